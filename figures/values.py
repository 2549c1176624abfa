"""What a trained critic knows: `python -m figures.values RUN` (S3AC, Figures 2b, 3 and 11).

RUN is the folder of a finished run with one critic. V(s_t) estimates 2p − 1, where p is the chance
that the policy ends right from there, measured as the share right among k continuations sampled
from that state. Shown are V and 2p − 1 along a right and a wrong response, the advantages of long
failures around their first wrong step, the squared error of V against the truth, and what V is
worth as a process-reward model: the best of n responses by V. RUN/values.json keeps the numbers.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

import genac
import rollout
import train
from critic import explained_variance
from figures import lab
from rollout import Batch, take
from train import Run

ANSWER_OF = {"chain": lambda text: text[-2:], "boxed": rollout.extract_boxed,
             "math_verify": rollout.extract_boxed}  # what a majority vote counts


def show_values(args: argparse.Namespace) -> None:
    """Samples n responses to each of the held-out problems and shows what the critic says."""
    run = finished_run(args.run)
    problems = min(args.problems, len(run.eval_prompts))
    rng = train.generator(args.seed, "evaluate", 1)
    batch = respond(run, problems, args.n, rng)
    answers = [run.eval_problems[i].answer for i in batch.prompt_id.tolist()]
    for title, wanted in (("right", batch.reward > 0), ("wrong", batch.reward < 0)):
        rows = wanted.nonzero()[:, 0]
        if len(rows):
            longest = rows[batch.mask[rows].sum(1).argsort(descending=True)]
            i = longest[len(longest) // 4]  # long, but not the longest
            print_response(run, take(batch, i[None]), answers[i], title, rng)
    lab.write_json(os.path.join(args.run, "values.json"), {
        "long failures": long_failures(run, batch),
        "truth": error_to_truth(run, batch, answers, rng),
        "best of n": best_of_n(run, batch, args.n)})


def finished_run(folder: str) -> Run:
    """Actor and critic of a run as they were at its end; ValueError for a run without a critic."""
    wanted = f"RUN: expected the folder of a finished run with one critic, found {folder}"
    if not os.path.isfile(os.path.join(folder, "config.json")):
        raise ValueError(f"{wanted} without config.json")
    cfg, _ = train.parse(["--resume", folder])
    if cfg.method not in train.METHODS or train.METHODS[cfg.method].value != "critic":
        raise ValueError(f"{wanted} of {cfg.method}, which has none or is not in METHODS")
    actor, critic = os.path.join(folder, "actor"), os.path.join(folder, "critic")
    if not (os.path.isdir(actor) and os.path.isdir(critic)):
        raise ValueError(f"{wanted} that has not ended (--resume goes on with it)")
    run = train.setup(replace(cfg, model=actor, critic=critic))
    train.prepare_critic(run)
    return run


def respond(run: Run, problems: int, n: int, rng: torch.Generator) -> Batch:
    """n responses to each of the first held-out problems, in the order of the problems, with values
    and advantages."""
    ids = torch.arange(problems).repeat_interleave(n)
    answers = [problem.answer for problem in run.eval_problems]
    batch = train.respond(run, run.eval_prompts, answers, ids, rng, run.cfg.temperature)
    batch = take(batch, batch.prompt_id.argsort(stable=True))
    batch.value = train.score(run, batch)[2][0]
    batch.advantage = train.ADVANTAGES["gae"](batch, run.cfg)
    return batch


# ---- along a response ----------------------------------------------------------------------------


def pieces(mask: Tensor) -> Tensor:
    """Starts [B, T] of at most 26 pieces of even length, of two tokens or more."""
    width = max(2, -(-int(mask.sum(1).max()) // 26))
    return genac.segment_starts(mask, width=width, at_most=26)


def first_error(prompt: str, text: str) -> int | None:
    """Where the first wrong digit of a response to the embedded task stands."""
    right = rollout.demonstration(prompt, 0.0, random.Random(0))
    return next((i for i, (x, y) in enumerate(zip(text, right)) if i % 2 and x != y), None)


def error_of(run: Run, batch: Batch, i: int) -> int | None:
    """The token of row i with the first wrong digit, where the verifier is the embedded task's."""
    if run.cfg.verifier != "chain":
        return None
    T = batch.mask.shape[1]
    text = rollout.decode(run.tokenizer, batch.tokens[i : i + 1, -T:], batch.mask[i : i + 1])[0]
    return first_error(run.eval_problems[int(batch.prompt_id[i])].prompt, text)


def print_response(run: Run, batch: Batch, answer: str, title: str, rng: torch.Generator,
                   k: int = 64) -> None:
    """One response in pieces: V and the truth 2p − 1 at a piece's start, mean advantage in it."""
    starts = pieces(batch.mask)
    p = train.monte_carlo(run, batch, starts, [answer], k, rng)
    at, T, wrong = starts[0].nonzero()[:, 0].tolist(), batch.mask.shape[1], error_of(run, batch, 0)
    prompt = run.tokenizer.decode(batch.tokens[0, :-T][batch.attention[0, :-T]][-200:])
    print(f"\na {title} response to {prompt}\n{'t':>5}  {'tokens':20}{'V(s_t)':>8}"
          f"{'2p − 1':>8}{'mean Â':>8}    (p: {k} continuations)")
    for start, stop, truth in zip(at, [*at[1:], T], (2 * p - 1).tolist()):
        text = run.tokenizer.decode(batch.tokens[0, -T:][start:stop])
        mark = "   ← the first wrong step" if wrong is not None and start <= wrong < stop else ""
        V, A = batch.value[0, start], batch.advantage[0, start:stop].mean()
        print(f"{start:5}  {text[-20:]!r:20}{V:+8.2f}{truth:+8.2f}{A:+8.2f}{mark}")


# ---- over many responses -------------------------------------------------------------------------


def long_failures(run: Run, batch: Batch) -> dict[str, float]:
    """Mean token advantage of the longer half of the failures: by fifth of the response, and
    before, at and after the first wrong step (S3AC, Figure 2b)."""
    length, failed = batch.mask.sum(1), (batch.reward < 0).nonzero()[:, 0].tolist()
    rows = [i for i in failed if length[i] >= length[failed].median()]
    parts = {}
    for i in rows:
        A, wrong = batch.advantage[i][batch.mask[i]].tolist(), error_of(run, batch, i)
        for t, x in enumerate(A):
            parts.setdefault(f"fifth {5 * t // len(A) + 1}", []).append(x)
            if wrong is not None:
                where = "before" if t < wrong else "at" if t == wrong else "after"
                parts.setdefault(f"{where} the first wrong step", []).append(x)
    means = {name: float(np.mean(x)) for name, x in sorted(parts.items())}
    print(f"\n{len(rows)} long failures (without a critic each token has the same Â)\n")
    lab.print_table(["tokens", "mean Â"], [[name, f"{x:+.3f}"] for name, x in means.items()])
    return means


def error_to_truth(run: Run, batch: Batch, answers: list[str], rng: torch.Generator,
                   states: int = 300, k: int = 32) -> dict[str, float]:
    """Mean ((V + 1)/2 − p)² over states of the responses; beside it that of always saying the mean
    of p, and EV."""
    chosen, p = lab.random_truths(run, batch, pieces(batch.mask), answers, states, k, rng)
    errors = {"critic": lab.squared_error((batch.value[chosen].cpu() + 1) / 2, p, k),
              "mean of p": lab.squared_error(p.mean().expand_as(p), p, k),
              "explained variance": explained_variance(batch.value, batch.reward, batch.mask)}
    print(f"\nsquared error of (V + 1)/2 against p of {len(p)} prefixes, {k} continuations each; "
          "explained variance of the returns\n")
    lab.print_table([*errors], [[*errors.values()]])
    return errors


def best_of_n(run: Run, batch: Batch, most: int) -> dict[str, dict[str, float]]:
    """Success when one of n responses is chosen: by V at the last token, by the least V on the
    way, by majority vote; beside one at random and any of n right (pass@n)."""
    mask, value = batch.mask, batch.value
    texts = rollout.decode(run.tokenizer, batch.tokens[:, -mask.shape[1] :], mask)
    answers = [ANSWER_OF.get(run.cfg.verifier, str)(text) for text in texts]
    right = (batch.reward > 0).cpu().numpy()
    last = value.gather(1, (mask.sum(1, keepdim=True) - 1).clamp_min(0))[:, 0].cpu().numpy()
    least = value.masked_fill(~mask, math.inf).amin(1).cpu().numpy()
    table = {}
    for n in (2, 4, 8, 16):
        if n <= most and len(right) % n == 0:  # n divides the responses of each problem
            groups = np.arange(len(right)).reshape(-1, n)
            every = np.arange(len(groups))
            votes = [max(group, key=lambda i: sum(answers[j] == answers[i] for j in group))
                     for group in groups.tolist()]
            shares = {"random": right, "last V": right[groups[every, last[groups].argmax(1)]],
                      "least V": right[groups[every, least[groups].argmax(1)]],
                      "majority": right[votes], "pass@n": right[groups].any(1)}
            table[str(n)] = {name: float(x.mean()) for name, x in shares.items()}
    print()
    lab.print_table(["best of n", "random", "last V", "least V", "majority", "pass@n"],
                    [[n, *row.values()] for n, row in table.items()])
    return table


def main(argv: list[str]) -> int:
    """Command line -> exit status."""
    flags = lab.Parser("values", __doc__)
    flags.add_argument("run", metavar="RUN", help="run folder")
    for name, least, value, meaning in (("seed", 0, 0, "of the responses"), (
            "problems", 1, 100, "held out"), ("n", 2, 16, "responses to each problem")):
        flags.add_argument(f"--{name}", type=lab.whole(least), default=value, metavar="N",
                           help=f"{meaning} [{value}]")
    return lab.command(flags, show_values, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
