"""How many responses a critic saves: signal-to-noise of one step's gradient at a fixed policy.

    g = −∇ Σ Â_t log π(a_t|s_t) / n        of a mini-batch of 64 responses with n tokens
    SNR = |E g|² / tr Cov g                grows in proportion to the number of responses
    cosine = E g·G / |g||G|                G: the true gradient; cosine² grows as the SNR does

All estimators see the *same* responses of one policy, to prompts drawn at random; only GRPO and
RLOO have as many of their own, 8 a prompt. Estimators with V use the critic of the run that made
the policy, and once more true values: the mean R of other responses in the same state, or in a
similar one where fewer than 20 were (`states`). G is the mean gradient of λ = 1 with true values,
which has no bias, over the other blocks of mini-batches. "±": jackknife over 16 blocks.

Differs from a step of train.py: each mini-batch is whitened by itself; the ratio is 1, so nothing
is clipped or masked; GRPO and RLOO have the token mean of the others; prompts are drawn uniformly.

    python -m figures.noise [--tiny: the smallest sizes]
"""
import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor, nn

import rollout
import train
from critic import explained_variance
from figures import lab
from gae import gae, whiten
from rollout import Batch, take

BASE, TRUE, BLOCKS, LEAST = "REINFORCE++", ", true values", 16, 20  # LEAST states of a true value
WITHOUT_V = {BASE: train.ADVANTAGES["batch"],  # (batch, cfg) -> Â [B, T]
             "R alone": lambda b, cfg: torch.where(b.mask, b.reward[:, None], 0.0)}
WITH_V = {"R − V(s_0)": train.ADVANTAGES["v0"], "S3AC, not whitened": train.ADVANTAGES["gae"],
          "S3AC": lambda b, cfg: whiten(train.ADVANTAGES["gae"](b, cfg), b.mask)}
WITH_V |= {f"λ = {lam}": lambda b, cfg, lam=lam: gae(b.value, b.reward, b.mask, lam)
           for lam in (0.0, 0.5, 0.8, 0.9, 0.95, 1.0)}
GROUPS = {"GRPO, K = 8": train.ADVANTAGES["group"], "RLOO": train.ADVANTAGES["leave-one-out"]}
SIZES = {  # name: default, with --tiny, what it is
    "seed": (1, 1, "of everything"), "steps": ("20,60", "1", "policies, beside the first one"),
    "batch": (64, 8, "responses of a mini-batch"), "batches": (12, 1, "mini-batches of a block"),
    "table": (16384, 256, "responses behind the true values"),
    "flags": ("", "--pool-size 64 --rollout-batch 16 --eval-problems 16", "of the training runs"),
    "states": (400, 8, "where they are checked"), "k": (64, 4, "continuations of each state")}


def states(run: train.Run, batch: Batch) -> Iterable[tuple[int, int, list]]:
    """Row, t and keys of every state of responses to the embedded task. The first key holds what
    matters of the state, the next ones less and less. A value is `behind` by right − stated."""
    texts = rollout.decode(run.tokenizer, batch.tokens[:, -batch.mask.shape[1] :], batch.mask)
    for i, (text, n) in enumerate(zip(texts, batch.mask.sum(1).tolist())):
        prompt = run.problems[batch.prompt_id[i]].prompt
        addend, start, behind, slips = int(prompt[1]), int(prompt[5]), 0, 0
        for t in range(n):
            key = prompt[2:4], t, behind == 0
            yield i, t, [(prompt[:4], t, behind), (*key, slips), key, (prompt[2], behind == 0)]
            if t % 2 and text[t : t + 1].isdigit():  # a step's value
                before, behind = behind, (start + addend * (t + 1) // 2 - int(text[t])) % 10
                slips += behind != before


def true_values(run: train.Run, sample: Batch, batch: Batch) -> Tensor:
    """V [B, T]: the mean R of LEAST or more states of the sample, as similar as possible."""
    count, total, value = Counter(), Counter(), torch.zeros(batch.mask.shape)
    for i, _, keys in states(run, sample):
        for key in keys:
            count[key] += 1
            total[key] += sample.reward[i].item()
    for i, t, keys in states(run, batch):
        key = next((x for x in keys if count[x] >= LEAST), keys[-1])
        value[i, t] = total[key] / max(1, count[key])
    return value


def gradient_sums(run: train.Run, batch: Batch, estimators: dict[str, tuple[Callable, Tensor]],
                  size: int) -> dict[str, Tensor]:
    """Σ g, Σ g/|g|, Σ |g|² over each block's mini-batches of `size` responses: [BLOCKS, 2d + 1] of
    each estimator, which is a function and its V [B, T]. float64."""
    actor = list(run.actor.parameters())
    d = sum(x.numel() for x in actor)
    sums = {x: torch.zeros(BLOCKS, 2 * d + 1, dtype=torch.float64) for x in estimators}
    for m, rows in enumerate(torch.arange(len(batch.mask)).split(size)):
        part = take(batch, rows)
        logp = train.actor_logp(run, part)
        part.logp_old, part.keep = logp.detach(), part.mask  # so the ratio is 1
        counts = train.counts(part.mask, part.keep, part.reward)
        for name, (advantage, value) in estimators.items():
            part.value = value[rows, : part.mask.shape[1]]
            part.advantage = advantage(part, run.cfg)
            loss, _ = train.LOSSES["cispo"](logp, part, counts, run.cfg)
            parts = torch.autograd.grad(loss, actor, retain_graph=True)
            g = torch.cat([x.flatten() for x in parts]).double()
            sums[name][m % BLOCKS] += torch.cat([g, g / g.norm().clamp_min(1e-30), g.dot(g)[None]])
    return sums


def quality(sums: Tensor, truth: Tensor, each: int) -> tuple[list[float], list[float]]:
    """SNR and mean cosine from gradient_sums over blocks of `each` mini-batches: of all, then of
    all but each block. G comes from truth, the sums of the estimator that has no bias."""
    rest = lambda x: x.sum(0) - torch.cat([torch.zeros_like(x[:1]), x])
    d, n = sums.shape[1] // 2, rest(torch.full_like(sums[:, 0], each))
    norm, square = rest(sums[:, :d]).square().sum(1), rest(sums[:, -1])  # |Σg|², Σ|g|²
    signal = (norm - square) / (n * (n - 1))                  # |E g|² = (|Σg|² − Σ|g|²)/(n(n−1))
    trace = (square - norm / n) / (n - 1)                     # tr Cov = (Σ|g|² − |Σg|²/n)/(n−1)
    G = nn.functional.normalize(rest(truth[:, :d])[1:])
    return (signal / trace).tolist(), (rest((sums[:, d:-1] * G).sum(1)) / n).tolist()


def measure_job(actor: str, critic: str, s: dict[str, int]) -> dict[str, dict]:
    """At the policy in the folder `actor`: what is known of it; `quality` of each estimator."""
    run, rng, size = lab.policy(actor, critic), torch.Generator().manual_seed(s["seed"]), s["batch"]
    draw = lambda n, k=1: lab.responses(run, torch.randint(
        len(run.prompts), (n // k,), generator=rng).repeat_interleave(k), rng)  # k to a prompt
    n = BLOCKS * s["batches"] * size
    sample, batch, groups = draw(s["table"]), draw(n), draw(n, 8)
    V, true = train.score(run, batch)[1][0], true_values(run, sample, batch)
    sums = gradient_sums(run, batch, {x: (f, V) for x, f in (WITHOUT_V | WITH_V).items()}
                         | {x + TRUE: (f, true) for x, f in WITH_V.items()}, size)
    sums |= gradient_sums(run, groups, {x: (f, groups.logp_roll) for x, f in GROUPS.items()}, size)
    at, p = lab.random_truths(run, batch, batch.mask, [run.answers[i] for i in batch.prompt_id],
                              s["states"], s["k"], rng)
    known = {"success": f"{(batch.reward > 0).float().mean():.3f}"}
    for name, x in (("critic", V), ("true values", true), ("mean of p", 0 * V + 2 * p.mean() - 1)):
        known[f"{name}: EV, (v − p)²"] = "{:.3f}, {:.4f}".format(explained_variance(
            x, batch.reward, batch.mask), lab.squared_error((x[at] + 1) / 2, p, s["k"]))
    return {"known": known, "of": {
        name: quality(x, sums["λ = 1.0" + TRUE], s["batches"]) for name, x in sums.items()}}


def ratio(x: list[float], y: list[float] | float, digits: int = 2) -> str:
    """x/y ± its standard error. x, y: a number, then the same without each block."""
    whole, *without = np.divide(x, y)  # se² = (K − 1)/K Σ_k (x_k − x̄)²
    return f"{whole:.{digits}f} ± {(BLOCKS - 1) ** 0.5 * np.std(without):.{digits}f}"


def print_tables(results: dict[str, dict]) -> None:
    """results: policy -> what measure_job returned of it."""
    known, of = ([r[x] for r in results.values()] for x in ("known", "of"))
    lab.print_table(["policy", *results], [[x, *(k[x] for k in known)] for x in known[0]])
    print(f"\nat each policy: SNR × 1000, ÷ {BASE}, cosine, cosine² ÷ {BASE}\n")
    lab.print_table(["estimator", *(x for name in results for x in (name, "÷", "cosine", "²÷"))], [
        [name, *(x for snr, cosine, base in ((*o[name], o[BASE]) for o in of) for x in (
            ratio(snr, 1e-3, 1), ratio(snr, base[0]), ratio(cosine, 1, 3),
            ratio(np.square(cosine), np.square(base[1]))))] for name in of[0]])


def main(args: argparse.Namespace) -> None:
    """Training runs, a measurement at each policy, tables."""
    base, folder, steps = lab.base_policy(args.tiny), args.folder, args.steps.split(",")
    flags = (f"--preset tiny --method s3ac --seed {args.seed} --show-every 0 --save-every 0 "
             f"--eval-k 1 {args.flags} --model {base} --steps").split()
    first = f"{folder}/s3ac-{steps[0]}/critic-pretrained"  # all runs start with its critic
    runs = [lab.training(f"s3ac-{x}", [*flags, x, *["--critic", first] * (x != steps[0])])
            for x in steps]
    paths = {"first": (base, first)} | {f"after {x} steps": (
        f"{folder}/s3ac-{x}/actor", f"{folder}/s3ac-{x}/critic") for x in steps}
    sizes = {x: getattr(args, x) for x in SIZES if x not in ("steps", "flags")}
    jobs = [lab.Job(x, measure_job, (*y, sizes), quiet=True) for x, y in paths.items()]
    lab.announce(folder, {"of training": runs, "of measuring": jobs})
    for part in (runs[:1], runs[1:], jobs):
        results = lab.run_jobs(part, folder, args.workers)
    print_tables(results)


if __name__ == "__main__":
    COMMON = "folder", "workers", "tiny"
    sys.exit(lab.script("noise", __doc__, SIZES, main, sys.argv[1:], common=COMMON))
