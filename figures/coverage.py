"""Coverage against initial pool: S3AC §3.3, Figures 2a, 5 and 10.

Claims: a stronger policy gets long responses right that the initial one does not. A critic
pretrained on a pool that holds both knows more of the stronger policy's responses than one that saw
the initial policy alone, and an actor trained with it ends higher. Measured on both policies'
responses to held-out problems: the share right by length; EV, value loss, the mean gap between
V(s_0) and the share right of prompts with such a V(s_0); the squared error of (V + 1)/2 against the
true success p of random prefixes. Then the actors' success.
Differs from the paper: the stronger policy is the actor trained with the initial critic (or
--strong DIR); the pool's other two are the initial one at temperatures 0.8 and 0.6. A response has
the length of its problem here, whoever writes it: a stronger policy brings no new lengths.

    python -m figures.coverage [--tiny: the smallest sizes]
"""
import argparse
import itertools
import json
import sys
from collections.abc import Callable

import numpy as np
import torch

import genac
import rollout
from critic import Critic, explained_variance
from figures import lab
from figures.compare import success
from value_pretrain import (
    Recipe, TrajectoryPool, coverage_table, fill_pool, format_coverage, pretrain, value_parts)

CRITICS = {  # name: pool, balanced over length × outcome, frozen. The paper's two come first
    "coverage": ("coverage", True, "attention"), "initial": ("initial", False, "attention"),
    "coverage-plain": ("coverage", False, "attention"),
    "initial-balanced": ("initial", True, "attention"),
    "full": ("coverage", True, "none"), "head-only": ("coverage", True, "backbone")}
ACTORS = {"coverage": "80.78 %", "initial": "79.86 %", "head-only": "–"}  # success in the paper
COLUMNS = {"ev": "EV", "loss": "value loss", "gap": "gap of V(s_0)", "error": "(v − p)²"}
SIZES = {  # name: default, with --tiny, what it is
    "size": (4096, 64, "trajectories of a critic"), "test": (1600, 32, "of a policy, held out"),
    "steps": (60, 1, "of an actor"), "batch": (128, 16, "responses in each"),
    "lr": (1e-4, 1e-4, "of an actor; its critic's is five times that"),
    "prefixes": (200, 4, "states whose true p is sampled"),
    "continuations": (32, 2, "of each"), "strong": ("", "", "folder of the stronger policy")}


def pool_job(folder: str, policies: tuple[tuple[str, float], ...], n: int, held_out: bool) -> int:
    """A pool of n responses of each policy (path, temperature) -> its size. The problems come round
    and round."""
    def sampler(path: str, temperature: float) -> Callable[[int], rollout.Batch]:
        """Of responses to the next n problems."""
        run, turn, rng = lab.policy(path), itertools.count(), torch.Generator().manual_seed(0)
        count = len(run.eval_prompts if held_out else run.prompts)
        return lambda n: lab.responses(run, torch.tensor([next(turn) % count for _ in range(n)]),
                                       rng, temperature, held_out=held_out)

    lab.clear_pool(folder)
    return len(fill_pool(folder, [(f"{path} at {t}", sampler(path, t)) for path, t in policies],
                         n, 2048))


def critic_job(name: str, seed: int, size: int, base: str, folder: str) -> float:
    """Pretrains a critic on `size` trajectories, keeps it in FOLDER/NAME-SEED -> its last loss."""
    pool_name, balanced, freeze = CRITICS[name]
    pool, rng = TrajectoryPool.open(f"{folder}/{pool_name}"), np.random.default_rng(seed)
    rows = pool.sample(size, seed=rng) if balanced else rng.choice(len(pool), size, replace=False)
    torch.manual_seed(seed)  # the head's weights
    critic = Critic.from_pretrained(base)
    stats = pretrain(critic, pool, rows, Recipe(batch_size=32, peak=1e-3, final=1e-4, held_out=0,
                                                freeze=freeze, seed=seed), progress=False)
    critic.save_pretrained(f"{folder}/{name}-{seed}")
    return stats["loss_last"]


def truth_job(path: str, n: int, k: int) -> dict:
    """n states of a policy's responses to held-out problems, and the share of k continuations of
    each that end right -> question, prefix, p: lists of n; success of the policy."""
    run, rng = lab.policy(path), torch.Generator().manual_seed(0)
    problems = run.eval_problems
    batch = lab.responses(run, torch.arange(len(problems)), rng, held_out=True)
    starts, p = lab.random_truths(run, batch, genac.segment_starts(batch.mask, width=4),
                                  [x.answer for x in problems], n, k, rng)
    states = genac.states_at(run.tokenizer, [x.prompt for x in problems], batch.tokens[
        :, -batch.mask.shape[1] :], starts, model_size="", success_rate=None)
    return {"question": [x.question for x in states], "prefix": [x.prefix for x in states],
            "p": p.tolist(), "success": (batch.reward > 0).float().mean().item()}


@torch.no_grad()
def measure_job(path: str, folder: str, k: int) -> list[dict]:
    """For each policy of the pool FOLDER/test what the critic in path knows of it: EV, loss, gap,
    error, and bins (prompts, mean V(s_0) as a success rate, share right) by tenths of V(s_0)."""
    critic, pool = Critic.from_pretrained(path), TrajectoryPool.open(f"{folder}/test")
    tokenizer, results = rollout.task_tokenizer(), []
    for label in range(2):
        parts = list(value_parts(critic, pool, np.flatnonzero(pool.index["policy"] == label)))
        V, R = (torch.cat([x[i][x[2]] for x in parts])[None] for i in (0, 1))  # [1, N] tokens
        p, right = (torch.cat([(x[i][:, 0] + 1) / 2 for x in parts]) for i in (0, 1))  # of s_0
        tenth = (10 * p).long().clamp(0, 9)
        bins = [(int(x.sum()), p[x].mean().item(), right[x].mean().item())
                for x in (tenth == i for i in range(10)) if x.any()]
        with open(f"{folder}/truth-{label}.json") as file:
            states = json.load(file)
        ids = [tokenizer(q + x).input_ids for q, x in zip(states["question"], states["prefix"])]
        v_hat = (critic(*rollout.left_pad(ids, 0, "cpu"))[:, -1] + 1) / 2
        results.append({
            "ev": explained_variance(V, R, torch.ones_like(V)), "bins": bins,
            "loss": ((V - R).square().mean() / 2).item(),
            "gap": sum(n * abs(v - share) for n, v, share in bins) / len(p),
            "error": lab.squared_error(v_hat, states["p"], k)})
    return results


def print_tables(results: dict[str, list[list[dict]]], actors: dict[str, list[float]]) -> None:
    """The critics on both policies' responses, the actors, whether the claims show.

    results: critic -> for each seed what `measure_job` returned of (initial, stronger) policy.
    """
    for label, writer in enumerate(("initial", "stronger")):
        print(f"\non responses of the {writer} policy\n")
        lab.print_table(["critic", *COLUMNS.values()], [
            [name, *(lab.mean_sd([x[label][key] for x in seeds]) for key in COLUMNS)]
            for name, seeds in results.items()])
        for name in ("coverage", "initial"):  # Figure 2a, as text
            print(f"\n{name}, first seed, V(s_0) as a success rate → share right (prompts): "
                  + ", ".join(f"{v:.2f} → {share:.2f} ({n})"
                              for n, v, share in results[name][0][label]["bins"]))
    print()
    lab.print_table(["actor trained with", "paper, 35B", "success, %"], [
        [name, ACTORS[name], lab.mean_sd([100 * x for x in runs], 1)]
        for name, runs in actors.items()])
    of = lambda name, key: [x[1][key] * (1 if key == "ev" else -1) for x in results[name]]
    print()
    lab.print_table(["claim: on the stronger policy the coverage critic has a", "here"], [
        *([f"better {text}", lab.verdict(of("coverage", key), of("initial", key))]
          for key, text in COLUMNS.items()),
        ["better actor", lab.verdict(actors["coverage"], actors["initial"])]])


def main(args: argparse.Namespace) -> None:
    """Pools, critics, actors, measurements, tables."""
    folder, base, seeds = args.folder, lab.base_policy(args.tiny), range(1, args.seeds + 1)
    strong = args.strong or f"{folder}/actor-initial-1/actor"
    run = lambda jobs: lab.run_jobs(jobs, folder, args.workers)
    pools = [lab.Job(f"pool-{name}", pool_job, (f"{folder}/{name}", *more)) for name, *more in (
        ("initial", ((base, 1.0),), 2 * args.size, False),
        ("coverage", ((base, 1.0), (base, 0.8), (base, 0.6), (strong, 1.0)), args.size // 2, False),
        ("test", ((base, 1.0), (strong, 1.0)), args.test, True))]
    critics = {x: [lab.Job(f"{x}-{i}", critic_job, (x, i, args.size, base, folder), quiet=True)
                   for i in seeds] for x in CRITICS}
    actors = {x: [lab.training(f"actor-{x}-{i}", (
        f"--preset tiny --rollout-batch {args.batch} --steps {args.steps} --lr {args.lr} "
        f"--critic-lr {5 * args.lr} --eval-problems {args.test // 4} --seed {i}").split() + [
            "--model", base, "--critic", f"{folder}/{x}-{i}"]) for i in seeds] for x in ACTORS}
    truths = [lab.Job(f"truth-{i}", truth_job, (x, args.prefixes, args.continuations))
              for i, x in enumerate((base, strong))]
    measured = {x: [lab.Job(f"measured-{x}-{i}", measure_job, (
        f"{folder}/{x}-{i}", folder, args.continuations), quiet=True) for i in seeds]
        for x in CRITICS}
    all_critics, measuring, all_actors = (sum(x.values(), []) for x in (critics, measured, actors))
    lab.announce(folder, {"for pools": pools, "of critics": all_critics, "for the true p": truths,
                          "of measuring": measuring, "of actors": all_actors})
    run(pools[:1])
    if not args.strong:
        run(critics["initial"])
        run(actors["initial"])
    run(pools[1:])
    run(all_critics + truths)
    results, runs = (lab.run_groups(x, folder, args.workers) for x in (measured, actors))
    print("\nshare right of held-out responses: policy 0 the initial one, 1 the stronger one\n"
          + format_coverage(coverage_table(TrajectoryPool.open(f"{folder}/test").index))
          + "\npaper, over 24K tokens: 5.0 % initially, 61.8 % after 1,600 steps")
    print_tables(results, {x: [success(run) for run in of] for x, of in runs.items()})


if __name__ == "__main__":
    sys.exit(lab.script("coverage", __doc__, SIZES, main, sys.argv[1:]))
