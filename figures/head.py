"""The size of the value head × the limit of the gradient norm: S3AC §3.3, Table 4, Figure 12.

    V = wᵀ h,  w ~ N(0, std):  std 0.01, 0.02, 1/(H+1)      limit 1, 10, or 1 for each part (split)

Claims: std 1/(H+1) lowers the loss of the first 20 steps of value pretraining, a limit of 10
lowers the share of clipped steps, and the head holds over 99 % of the squared gradient norm early
on. The tiny model learns from its own responses, a second one (--model DIR) from demonstrations of
the embedded task in its own tokens, with one seed. A narrow model cannot show the first claim: at
H = 64, 1/(H+1) lies between 0.01 and 0.02 and V starts near 0 with all three.
Differs from the paper: one epoch, a higher learning rate; the first and the last 20 of fewer than
40 steps overlap.

    python -m figures.head [--model DIR] [--tiny: the smallest sizes]
"""
import argparse
import os
import random
import sys

import torch
from transformers import AutoConfig, AutoTokenizer

import rollout
from critic import Critic, init_value_head_
from figures import lab
from figures.coverage import pool_job
from value_pretrain import Recipe, TrajectoryPool, pretrain

STDS = {"0.01": 0.01, "0.02": 0.02, "1/(H+1)": None}
LIMITS = {"1": (1.0, False), "10": (10.0, False), "split 1": (1.0, True)}  # max_norm, split
COLUMNS = {"loss_first": "loss, first 20 steps", "loss_last": "last 20", "ev_after": "EV after",
           "clip_share": "clipped", "head_share": "head's share", "head_share_10": "in steps 1–10"}
SIZES = {"size": (2800, 80, "tiny's responses"), "model": ("", "", "folder of a second model")}


def demonstrations_job(folder: str, path: str, n: int) -> int:
    """A pool of n demonstrations of at most 7 steps in the tokens of the model in path -> n."""
    lab.clear_pool(folder)
    tokenizer, rng = AutoTokenizer.from_pretrained(path), random.Random(0)
    problems = [x for x in rollout.task_problems() if x.answer[0] <= "g"]
    ids = rng.choices(range(len(problems)), k=n)
    texts = [rollout.demonstration(problems[i].prompt, rollout.SLIP, rng)[:-1] for i in ids]
    replies = [tokenizer(text).input_ids + [tokenizer.eos_token_id] for text in texts]
    tokens, attention, mask, logp = rollout.pad_responses(
        [tokenizer(problems[i].prompt).input_ids for i in ids], replies,
        [[0.0] * len(x) for x in replies], tokenizer.eos_token_id)
    reward = [rollout.chain_reward(text, problems[i].answer) for text, i in zip(texts, ids)]
    TrajectoryPool(folder).append(rollout.Batch(
        tokens, attention, mask, torch.tensor(ids), torch.tensor(reward),
        torch.zeros(n, dtype=torch.bool), logp), 0)
    return n


def std_job(path: str, pool: str, std: str, seed: int, batch: int, lr: float) -> dict[str, dict]:
    """limit -> what the table shows of a pretraining. All cells of a seed see one order."""
    cells = {}
    for limit, (max_norm, split) in LIMITS.items():
        torch.manual_seed(seed)
        critic = Critic.from_pretrained(path)
        init_value_head_(critic.head, STDS[std])
        stats = pretrain(critic, TrajectoryPool.open(pool), recipe=Recipe(
            epochs=1, batch_size=batch, peak=lr, final=lr / 2, max_norm=max_norm, split=split,
            held_out=0.1, seed=seed), progress=False)
        stats["head_share_10"] = float(torch.tensor(stats["curve"]["head_share"][:10]).mean())
        cells[limit] = {key: stats[key] for key in COLUMNS}
    return cells


def print_grid(grid: dict[str, list[dict[str, dict]]]) -> None:
    """The nine cells, and the paper's statements beside ours; grid: std -> one result per seed."""
    of = lambda name, std, limit: [cells[limit][name] for cells in grid[std]]
    lab.print_table(["std", "limit", *COLUMNS.values()], [
        [std, limit, *(lab.mean_sd(of(name, std, limit)) for name in COLUMNS)]
        for std in STDS for limit in LIMITS])
    percent = lambda x: lab.mean_sd([100 * share for share in x], 1) + " %"
    wide, small = (of("loss_first", std, "10") for std in ("0.01", "1/(H+1)"))
    one, ten = (of("clip_share", "1/(H+1)", limit) for limit in ("1", "10"))
    share = of("head_share_10", "1/(H+1)", "10")
    print()
    lab.print_table(["claim", "paper, 35B", "here", "shows?"], [
        ["loss of the first 20 steps, std 0.01 → 1/(H+1), limit 10", "0.72 → 0.45",
         f"{lab.mean_sd(wide)} → {lab.mean_sd(small)}", lab.verdict(
             [-x for x in small], [-x for x in wide])],
        ["steps clipped, limit 1 → 10, std 1/(H+1)", "99.7 % → 12.5 %",
         f"{percent(one)} → {percent(ten)}", lab.verdict(one, ten)],
        ["head's share of the squared norm, steps 1–10, std 1/(H+1), limit 10", "> 99 %",
         percent(share), "shows" if min(share) > 0.99 else "does not show"]])


def main(args: argparse.Namespace) -> None:
    """Pools, cells and tables of the tiny model and of --model."""
    given = args.model and lab.model_folder(args.model)  # before the base policy, which takes long
    base, folder = lab.base_policy(args.tiny), args.folder
    models = {"tiny": (base, range(1, args.seeds + 1), (32, 1e-3))}  # trajectories a step, lr
    pools = [lab.Job("pool-tiny", pool_job, (f"{folder}/tiny", ((base, 1.0),), args.size, False))]
    if given:
        name = os.path.basename(os.path.normpath(given))
        models[name] = given, range(1, 2), (8, 1e-4)
        pools.append(lab.Job(f"pool-{name}", demonstrations_job, (
            f"{folder}/{name}", given, 300)))
    grid = {(name, std): [lab.Job(f"{name}-std-{i}-seed-{seed}", std_job, (
        path, f"{folder}/{name}", std, seed, *sizes), quiet=True) for seed in seeds]
        for name, (path, seeds, sizes) in models.items() for i, std in enumerate(STDS)}
    lab.announce(folder, {"for pools": pools, "of three critics": sum(grid.values(), [])})
    lab.run_jobs(pools, folder, args.workers)
    results = lab.run_groups(grid, folder, args.workers)
    for name, (path, *_) in models.items():
        print(f"\n{name}, H = {AutoConfig.from_pretrained(path).get_text_config().hidden_size}\n")
        print_grid({std: results[name, std] for std in STDS})


if __name__ == "__main__":
    sys.exit(lab.script("head", __doc__, SIZES, main, sys.argv[1:]))
