"""The paper's comparisons over seeds: whiten single group methods daps loss sweep variants.

Two arms differ in what the claim is about (S3AC: Figures 4, 6, 14, Tables 1–3, 5, 7, 8). Each arm
has the learning rate with the best mean success at a third, two thirds and the end, over the tuning
seeds (100, 101, …); tables and pictures are of other seeds (1, 2, …). All arms start from one base
policy, critics from the value pretraining of their seed. Arms are compared at equal numbers of
responses sampled, including those that a filter discards, because sampling costs most at the
paper's scale. "collapsed" is the share of seeds whose held-out success ends below half of its best,
"0.2 < p ≤ 0.8" the share of the training spent on middling prompts, with p from the run's own
responses to prompts of the same level. Entropy, length and EV are means over the last ten batches
(Table 7).
Flags after -- go to every run. The smallest comparison takes about a minute:

    python -m figures.compare single --seeds 1 --tune-seeds 0 --lrs 1e-4 --steps 2 \\
        --rollout-batch 16 -- --pool-size 64 --pretrain-size 64 --eval-problems 16
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

import rollout
import train
from figures import lab
from figures.lab import Job

COMPARISONS = {
    "whiten": ("--method s3ac", "--method s3ac --no-whiten", "--method reinforce++"),
    "single": ("--method s3ac", "--method s3ac-v0", "--method reinforce++",
               "--method flash-reinforce"),
    "group": ("--method s3ac --k 8", "--method grpo-x"),
    "daps": ("--method s3ac", "--method s3ac --selection uniform", "--method s3ac --k 8",
             "--method s3ac --k 8 --selection uniform"),
    "loss": ("--method s3ac", "--method s3ac --loss ppo-clip", "--method s3ac --loss dis",
             "--method reinforce++ --loss dis"),  # the last one: without a critic
    "sweep": ("--method s3ac", *(f"--method s3ac {x}" for x in (  # one setting of DAPS at a time
        "--a-min 0.3", "--n-c 1", "--n-c 10", "--decay 0.9", "--daps-uniform 10 --daps-ramp 20"))),
    "variants": ("--method s3ac", "--method s3ac --lam 0.8", "--method s3ac --lam 0.95",
                 "--method s3ac-token", "--method s3ac-ensemble", "--method s3ac --critic-rank 8")}
COMPARISONS["methods"] = COMPARISONS["single"] + COMPARISONS["group"]
PAPER = {  # success in the paper, per cent, by arm: 35B models, means of seven benchmarks
    "single": (80.9, None, 70.4, 67.4), "group": (80.5, 76.4), "daps": (76.94, 74.40, 80.49, 79.04)}
CLAIMS = {  # (i, j): arm i ends above arm j
    "whiten": ((0, 1), (0, 2)), "single": ((0, 1), (0, 2), (0, 3)), "group": ((0, 1),),
    "daps": ((0, 1), (2, 3)),
    "methods": ((0, 1), (0, 2), (0, 3), (0, 5), (4, 5)),
    "loss": ((0, 1), (0, 2), (2, 3)), "sweep": tuple((0, i) for i in range(1, 6)),
    "variants": tuple((i, 0) for i in range(1, 6))}
SAME_RATE = re.compile(  # what is left out of an arm's name gives the arm whose rate it has
    "-token|-ensemble| --(lam|critic-rank|selection|a-min|n-c|decay|daps-uniform|daps-ramp) [^ ]+")
POINTS = {"a third": 1 / 3, "two thirds": 2 / 3, "the end": 1.0}  # of the responses
HELD_OUT, EV = r"eval/avg@\d+", "critic/explained_variance"
# title, metric, horizontal axis (0: responses, 1: seconds) of a picture's panels, besides success
PANELS = ("entropy", "actor/entropy", 0), ("length", "rollout/length", 0)
WHITEN = ("mean advantage", "advantage/mean", 0), ("mean V(s_0)", "critic/initial_value", 0)
FLAGS = {"lrs": (*["5e-5,1e-4,2e-4"] * 2, "rates to choose from"),
         "tune_seeds": (2, 2, "seeds from 100 on that choose each arm's rate, not reported", 0),
         "steps": (80, 80, "rollout batches per run"),
         "rollout_batch": (256, 256, "responses per batch"),
         "plot": (False, False, "draw figures/*.png (needs matplotlib)")}

# ---- runs ----------------------------------------------------------------------------------------

def slug(arm: str) -> str:
    """An arm's name in tables and folders."""
    return arm.replace("--method ", "").replace("--", "").replace(" ", "-")


def has_critic(arm: str) -> bool:
    """Whether the arm's method has a critic with a value head."""
    return train.METHODS[train.parse(arm.split())[0].method].value == "critic"


def arm_jobs(args: argparse.Namespace, arm: str, lr: str, seeds: range) -> list[Job]:
    """The runs of an arm, one per seed. Seeds from 100 on choose learning rates: they are judged by
    problems of their own."""
    flags = (f"--steps {args.steps} --rollout-batch {args.rollout_batch} --eval-k 2 --keep 1 "
             f"--eval-every {max(1, args.steps // 16)} --save-every 20 --show-every 0 "
             f"{arm} --lr {lr} --critic-lr {5 * float(lr):g}").split()
    tuning = ["--eval-data", f"{args.folder}/tuning.jsonl"]
    critic = "--critic", f"{args.folder}/critic-{{}}/critic-pretrained"
    return [lab.training(f"{slug(arm)}-lr{lr}-s{seed}", [
        *flags, "--seed", str(seed), *args.extra, *tuning * (seed >= 100),
        *[x.format(seed) for x in critic * has_critic(arm)]]) for seed in seeds]


def compare(args: argparse.Namespace) -> None:
    """Runs what the comparisons need and prints the tables of each as soon as its runs are done."""
    arms = list(dict.fromkeys(arm for name in args.names for arm in COMPARISONS[name]))
    tuned = list(dict.fromkeys(SAME_RATE.sub("", arm) for arm in arms))
    tuning = range(100, 100 + args.tune_seeds * (len(args.lrs) > 1))
    reported = range(1, args.seeds + 1)
    grid = {(arm, lr): arm_jobs(args, arm, lr, tuning) for arm in tuned for lr in args.lrs}
    # the critic from which all runs of a seed start; the one step is not used
    one = "--steps 1 --rollout-batch 16 --eval-problems 1 --show-every 0 --seed".split()
    critics = [lab.training(f"critic-{seed}", [*args.extra, *one, str(seed)], quiet=True)
               for seed in [*tuning, *reported] if any(map(has_critic, arms))]
    last = sum((arm_jobs(args, arm, args.lrs[0], reported) for arm in arms), [])
    lab.announce(args.folder, {
        "to pretrain critics": critics, "to choose learning rates": sum(grid.values(), []),
        "to report": len(last) if tuning else last})
    if "--model" not in args.extra:
        rollout.build_base()  # once, before two runs want it
    # problems to choose rates by: training problems that the runs which choose do not train on
    problems = rollout.task_problems()[: len(rollout.task_problems(held_out=True))]
    Path(args.folder).mkdir(parents=True, exist_ok=True)
    train.write_text(f"{args.folder}/tuning.jsonl", "".join(
        json.dumps({"prompt": p.prompt, "answer": p.answer, "level": p.level}) + "\n"
        for p in problems))
    run = lambda jobs, title: lab.run_jobs(jobs, args.folder, args.workers, title=title)
    run(critics, "critics")
    done = run(sum(grid.values(), []), "learning rates")
    total = args.steps * args.rollout_batch  # on the way too, since good rates end alike
    by_lr = {arm: {lr: mean([float(on_the_way(curve(done[job.name]), total).mean())
                             for job in grid[arm, lr]]) for lr in args.lrs} for arm in tuned}
    best = {arm: max(args.lrs, key=lambda lr: by_lr[arm][lr] or 0.0) for arm in tuned}
    for name in args.names:
        lrs = {arm: best[SAME_RATE.sub("", arm)] for arm in COMPARISONS[name]}
        jobs = {arm: arm_jobs(args, arm, lr, reported) for arm, lr in lrs.items()}
        done = run(sum(jobs.values(), []), name)
        rows = {arm: {"lr": lr, "by lr": by_lr.get(arm)} | summary(
            [done[job.name] for job in jobs[arm]]) for arm, lr in lrs.items()}
        lab.write_json(f"{args.folder}/{name}.json", rows)
        print(f"\n{name}: embedded task, {args.steps} steps of {args.rollout_batch} responses\n")
        print_comparison(name, rows)


# ---- statistics ----------------------------------------------------------------------------------

def curve(run: dict, metric: str = HELD_OUT) -> list[tuple[int, float, float]]:
    """(responses sampled, seconds, value) of each line of the metrics that has the metric (a
    regular expression). Discarded responses count; the seconds of evaluations do not. Held-out
    success of a run that stopped of itself ends with its last batch."""
    points, sampled, seconds = [], 0, 0.0
    for line in run["metrics"]:
        sampled += line.get("rollout/sampled", 0)
        seconds += sum(x for key, x in line.items() if key.startswith("time/"))
        points += [(sampled, seconds, x) for key, x in line.items()
                   if re.fullmatch(metric, key) and x is not None]
    return points + (curve(run, "rollout/success")[-1:]
                     if metric == HELD_OUT and run["stopped"] else [])


def success(run: dict) -> float:
    """Held-out success at the end."""
    return curve(run)[-1][2]


def at(points: list, x: np.ndarray, column: int = 0) -> np.ndarray:
    """The curve [N] when x [N] responses had been sampled (column 1: seconds had passed), straight
    between its points. Its last value stands for what comes after."""
    points = np.array(points, dtype=float)
    return np.interp(x, points[:, column], points[:, 2])


def on_the_way(points: list, total: int) -> np.ndarray:
    """The curve at POINTS of `total` responses, [3]."""
    return at(points, total * np.array([*POINTS.values()]))


def mean(values: list[float | None]) -> float | None:
    """The mean of the values that are there, None if none is."""
    values = [x for x in values if x is not None]
    return float(np.mean(values)) if values else None


def summary(runs: list[dict]) -> dict[str, Any]:
    """What tables and pictures show of an arm: a value or a curve per seed."""
    steps = [[line for line in run["metrics"] if "rollout/sampled" in line] for run in runs]
    total = lambda name: [sum(line[name] for line in s) for s in steps]
    level = [problem.level for problem in rollout.task_problems()]
    best = [max(x for *_, x in curve(run)) for run in runs]
    metrics = HELD_OUT, EV, *(metric for _, metric, _ in PANELS + WHITEN)
    return {
        "success": [success(run) for run in runs], "stopped": [run["stopped"] for run in runs],
        "best": best, "collapsed": [success(run) < x / 2 for run, x in zip(runs, best)],
        "sampled": total("rollout/sampled"), "discarded": total("rollout/discarded"),
        "medium": [medium_share(s, level) for s in steps],
        "curves": {metric: [curve(run, metric) for run in runs] for metric in metrics}}


def medium_share(steps: list[dict], level: list[str], window: int = 5) -> float | None:
    """Share of the trained responses whose problem has 0.2 < p ≤ 0.8: p is the share right among
    all responses of the run to problems of that level, sampled at most `window` batches away."""
    medium = []
    for i, step in enumerate(steps):
        right = {}
        for near in steps[max(0, i - window) : i + window + 1]:
            for prompt, r in zip(near["prompts/sampled"], near["prompts/right"]):
                right.setdefault(level[prompt], []).append(r)
        medium += [0.2 < np.mean(right[level[x]]) <= 0.8 for x in step["prompts/trained"]]
    return mean(medium)


# ---- tables and pictures -------------------------------------------------------------------------

def print_comparison(name: str, rows: dict[str, dict]) -> None:
    """Success, what Table 7 shows, the claims' verdicts and why runs stopped."""
    arms, total = list(rows), min(max(row["sampled"]) for row in rows.values())
    points = {arm: np.stack([on_the_way(x, total) for x in row["curves"][HELD_OUT]], 1).tolist()
              for arm, row in rows.items()}
    print("Held-out success, mean ± standard deviation over seeds, when equal numbers of responses "
          f"had been sampled: {total:,} at the end\n")
    lab.print_table(["arm", "lr", *POINTS, "last step", "best", "last step by seed", "collapsed",
                     "tuning seeds by lr", "paper"], [
        [slug(arm), row["lr"], *map(lab.mean_sd, [*points[arm], row["success"], row["best"]]),
         " ".join(f"{x:.3f}" for x in row["success"]), lab.percent(mean(row["collapsed"]), 0),
         " ".join(f"{x:.2f}" for x in (row["by lr"] or {}).values() if x is not None) or None,
         paper and f"{paper} %"]
        for (arm, row), paper in zip(rows.items(), PAPER.get(name, [None] * len(rows)))])
    late = lambda row, metric: mean([mean([x for *_, x in c[-10:]]) for c in row["curves"][metric]])
    print()
    lab.print_table(["arm", "entropy", "length", "EV", "0.2 < p ≤ 0.8", "discarded", "s/step"], [
        [slug(arm), *(late(row, x) for x in ("actor/entropy", "rollout/length", EV)),
         lab.percent(mean(row["medium"])), int(mean(row["discarded"])),
         mean([c[-1][1] / len(c) for c in row["curves"]["actor/entropy"] if c])]
        for arm, row in rows.items()])
    print()
    lab.print_table(["claim", *POINTS], [
        [f"{slug(arms[i])} above {slug(arms[j])}",
         *map(lab.verdict, points[arms[i]], points[arms[j]])] for i, j in CLAIMS[name]])
    for arm, row in rows.items():
        for seed, reason in enumerate(row["stopped"], start=1):
            if reason:
                print(f"{slug(arm)}, seed {seed}: {reason}")


def plot(folder: str) -> None:
    """figures/NAME.png of each comparison that has been run: held-out success by responses and by
    seconds, and two more panels; of each arm a line and a band (lab.band)."""
    try:
        from matplotlib import pyplot
    except ImportError:
        raise ImportError("--plot: expected matplotlib: pip install matplotlib") from None
    pyplot.switch_backend("Agg")
    files = [*filter(Path.exists, (Path(folder, f"{name}.json") for name in COMPARISONS))]
    if not files:
        raise ValueError(f"--plot: expected comparisons that have been run in {folder}, found none")
    for file in files:
        figure, axes = pyplot.subplots(2, 2, figsize=(9, 7), layout="constrained")
        success = [("held-out success", HELD_OUT, column) for column in (0, 1)]
        for axis, (title, metric, column) in zip(axes.flat, [
                *success, *(WHITEN if file.stem == "whiten" else PANELS)]):
            axis.set(title=title, xlabel=("responses sampled", "seconds of training steps")[column])
            for i, (arm, row) in enumerate(json.loads(file.read_text()).items()):
                if curves := [points for points in row["curves"][metric] if points]:
                    grid = np.linspace(0, max(points[-1][column] for points in curves), 200)
                    lab.band(axis, grid, [at(points, grid, column) for points in curves],
                             f"{slug(arm)}, lr {row['lr']}", f"C{i}")
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        Path("figures").mkdir(exist_ok=True)
        figure.savefig(f"figures/{file.stem}.png", dpi=110)
        pyplot.close(figure)
        print(f"figures/{file.stem}.png")


def body(args: argparse.Namespace) -> None:
    """Runs the comparisons named, then draws."""
    if not (args.names or args.plot):
        raise ValueError(f"names: expected some of {', '.join(COMPARISONS)}, found none")
    args.lrs = args.lrs.split(",")
    try:
        [lab.above_0(lr) for lr in args.lrs]
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"--lrs: rates separated by commas, as 5e-5,1e-4; {error}") from None
    if len(args.lrs) > 1 and not args.tune_seeds:
        raise ValueError("--tune-seeds: expected 1 or more with several rates in --lrs, found 0")
    if args.names:
        compare(args)
    if args.plot:
        plot(args.folder)


def main(argv: list[str]) -> int:
    """Command line -> exit status. What comes after -- goes to every run."""
    cut = argv.index("--") if "--" in argv else len(argv)
    run = lambda args: body(argparse.Namespace(**vars(args), extra=argv[cut + 1 :]))
    return lab.script("compare", __doc__, FLAGS, run, argv[:cut], positional=(*COMPARISONS,),
                      common=("folder", "seeds", "workers"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
