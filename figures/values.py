"""What a trained critic knows: `python -m figures.values RUN` (S3AC, Figures 2b, 3 and 11).

RUN is the folder of a finished run with one critic. V(s_t) estimates 2p − 1, where p is the chance
that the policy ends right from there, measured as the share right among k continuations sampled
from that state. Shown are V and 2p − 1 along a right and a wrong response, the advantages of long
failures around their first wrong step, the squared error of V against the truth, and what V is
worth as a process-reward model: the best of n responses by V. RUN/values.json keeps the numbers.
"""
import argparse
import math
import os
import random
import sys
from collections import defaultdict
from dataclasses import replace

import numpy as np
import torch

import genac
import rollout
import train
from critic import explained_variance
from figures import lab
from rollout import Batch, take
from train import Run

ANSWER_OF = {"chain": lambda text: text[-2:], "boxed": rollout.extract_boxed,
             "math_verify": rollout.extract_boxed}  # what a majority vote counts
FLAGS = {"seed": (0, 0, "of the responses", 0), "problems": (100, 100, "held out"),
         "n": (16, 16, "responses to each problem", 2)}


def main(args: argparse.Namespace) -> None:
    """Samples n responses to each of the held-out problems and shows what the critic says."""
    run, rng = finished_run(args.run), train.generator(args.seed, "evaluate", 1)
    ids = torch.arange(min(args.problems, len(run.eval_prompts))).repeat_interleave(args.n)
    batch = lab.responses(run, ids, rng, run.cfg.temperature, held_out=True)
    batch = take(batch, batch.prompt_id.argsort(stable=True))
    batch.value = train.score(run, batch)[1][0]
    batch.starts = genac.segment_starts(batch.mask, width=max(2, -(-batch.mask.shape[1] // 26)))
    batch.advantage = train.ADVANTAGES["gae"](batch, run.cfg)
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


def first_error(run: Run, batch: Batch, i: int) -> int | None:
    """The token of row i with the first wrong digit, where the verifier is the embedded task's."""
    if run.cfg.verifier != "chain":
        return None
    T, prompt = batch.mask.shape[1], run.eval_problems[int(batch.prompt_id[i])].prompt
    text = rollout.decode(run.tokenizer, batch.tokens[i : i + 1, -T:], batch.mask[i : i + 1])[0]
    right = rollout.demonstration(prompt, 0.0, random.Random(0))
    return next((t for t, (x, y) in enumerate(zip(text, right)) if t % 2 and x != y), None)


def print_response(run: Run, batch: Batch, answer: str, title: str, rng: torch.Generator,
                   k: int = 64) -> None:
    """One response in pieces: V and the truth 2p − 1 at a piece's start, mean advantage in it."""
    p, T = train.monte_carlo(run, batch, batch.starts, [answer], k, rng), batch.mask.shape[1]
    at, wrong = batch.starts[0].nonzero()[:, 0].tolist(), first_error(run, batch, 0)
    prompt = run.tokenizer.decode(batch.tokens[0, :-T][batch.attention[0, :-T]][-200:])
    print(f"\na {title} response to {prompt}\n{'t':>5}  {'tokens':20}{'V(s_t)':>8}"
          f"{'2p − 1':>8}{'mean Â':>8}    (p: {k} continuations)")
    for start, stop, truth in zip(at, [*at[1:], T], (2 * p - 1).tolist()):
        text = run.tokenizer.decode(batch.tokens[0, -T:][start:stop])
        mark = "   ← the first wrong step" if wrong is not None and start <= wrong < stop else ""
        V, A = batch.value[0, start], batch.advantage[0, start:stop].mean()
        print(f"{start:5}  {text[-20:]!r:20}{V:+8.2f}{truth:+8.2f}{A:+8.2f}{mark}")


def long_failures(run: Run, batch: Batch) -> dict[str, float]:
    """Mean token advantage of the longer half of the failures: by fifth of the response, and
    before, at and after the first wrong step (S3AC, Figure 2b)."""
    length, failed, parts = batch.mask.sum(1), batch.reward < 0, defaultdict(list)
    rows = (failed & (length >= length[failed].median())).nonzero()[:, 0] if failed.any() else []
    for i in rows:
        A, wrong = batch.advantage[i][batch.mask[i]].tolist(), first_error(run, batch, i)
        for t, x in enumerate(A):
            parts[f"fifth {5 * t // len(A) + 1}"].append(x)
            if wrong is not None:
                where = "before" if t < wrong else "at" if t == wrong else "after"
                parts[f"{where} the first wrong step"].append(x)
    means = {name: float(np.mean(x)) for name, x in sorted(parts.items())}
    print(f"\n{len(rows)} long failures (without a critic each token has the same Â)\n")
    lab.print_table(["tokens", "mean Â"], [[name, f"{x:+.3f}"] for name, x in means.items()])
    return means


def error_to_truth(run: Run, batch: Batch, answers: list[str], rng: torch.Generator,
                   states: int = 300, k: int = 32) -> dict[str, float]:
    """Mean ((V + 1)/2 − p)² over states of the responses; beside it that of always saying the mean
    of p, and EV."""
    chosen, p = lab.random_truths(run, batch, batch.starts, answers, states, k, rng)
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
    mask, value, right = batch.mask, batch.value, (batch.reward > 0).cpu().numpy()
    texts = rollout.decode(run.tokenizer, batch.tokens[:, -mask.shape[1] :], mask)
    answers = [ANSWER_OF.get(run.cfg.verifier, str)(text) for text in texts]
    last = value.gather(1, (mask.sum(1, keepdim=True) - 1).clamp_min(0))[:, 0].tolist()
    least = value.masked_fill(~mask, math.inf).amin(1).tolist()
    table = {}
    for n in (2, 4, 8, 16):
        if n <= most and len(right) % n == 0:  # n divides the responses of each problem
            groups = np.arange(len(right)).reshape(-1, n)
            best = lambda score: [max(x, key=lambda i: score(i, x)) for x in groups.tolist()]
            shares = {"random": right, "last V": right[best(lambda i, x: last[i])],
                      "least V": right[best(lambda i, x: least[i])],
                      "majority": right[best(
                          lambda i, x: [answers[j] for j in x].count(answers[i]))],
                      "pass@n": right[groups].any(1)}
            table[str(n)] = {name: float(x.mean()) for name, x in shares.items()}
    print()
    lab.print_table(["best of n", "random", "last V", "least V", "majority", "pass@n"],
                    [[n, *row.values()] for n, row in table.items()])
    return table


if __name__ == "__main__":
    sys.exit(lab.script("values", __doc__, FLAGS, main, sys.argv[1:], common=(), positional="run"))
