"""The laboratory's shared part: jobs side by side, tables, mean ± sd, verdicts, bands in pictures.

A job is a name and a function with its arguments, or a training run with its flags. Each job is a
process of its own; its words go to FOLDER/NAME.log, its result to FOLDER/NAME.json (of a training
run to FOLDER/NAME/result.json). The same command goes on where it was stopped: a job that has its
result is not done again, and a training run that was cut goes on from its checkpoint.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

import rollout
import train
from train import write_json

# ---- jobs ----------------------------------------------------------------------------------------


class Job(NamedTuple):
    """One process. Its arguments can be pickled; what does not change the result is not one."""

    name: str  # file name of log and result
    function: Callable[..., Any]  # at the top of a module; returns what JSON can hold, not None
    arguments: tuple = ()
    quiet: bool = False  # print no line when it ends


def training(name: str, flags: list[str], *, quiet: bool = False) -> Job:
    """A training run `train.py FLAGS --out FOLDER/NAME` on the CPU."""
    return Job(name, train_run, tuple(flags), quiet)


def train_run(path: str, *flags: str) -> int:
    """Starts the run in the folder `path`, or resumes it. Returns train.main's exit status."""
    if train.checkpoints(path):
        return train.main(["--resume", path, "--device", "cpu"])
    shutil.rmtree(path, ignore_errors=True)  # a run that never got to its first step
    return train.main([*flags, "--out", path, "--device", "cpu"])


def result(job: Job, folder: str) -> Any:
    """What a finished job returned, None before. Of a training run: a dict of "before" and "after"
    (the evaluations), "stopped" (why it ended early, or ""), "metrics" (lines of metrics.jsonl)."""
    path, is_run = os.path.join(folder, job.name), job.function is train_run
    file = Path(path, "result.json") if is_run else Path(path + ".json")
    if not file.exists():
        return None
    value = json.loads(file.read_text())
    if is_run:
        lines = Path(path, "metrics.jsonl").read_text().splitlines()
        value = {"stopped": ""} | value | {"metrics": [json.loads(line) for line in lines]}
    return value


def announce(folder: str, stages: dict[str, list[Job] | int]) -> None:
    """Prints how many jobs will run in how many stages, and how many are done already. stages:
    title -> jobs, or their number where their flags depend on an earlier stage."""
    sizes = {name: x if isinstance(x, int) else len(x) for name, x in stages.items() if x}
    jobs = [job for x in stages.values() if not isinstance(x, int) for job in x]
    done = sum(result(job, folder) is not None for job in jobs)
    parts = ", then ".join(f"{n} {name}" for name, n in sizes.items())
    print(f"{sum(sizes.values())} runs in {len(sizes)} stages ({parts}), {done} of them done "
          f"already; folder {folder}", flush=True)


def run_jobs(jobs: list[Job], folder: str, workers: int = 2, *, title: str = "") -> dict[str, Any]:
    """Runs the jobs that have no result yet, `workers` side by side. Returns name -> result.
    RuntimeError if a job dies; the other jobs are ended first. KeyboardInterrupt ends all jobs,
    each training run after its step, with a checkpoint. ValueError: see check_same."""
    folder, running = os.path.abspath(folder), []
    check_same(jobs, folder)
    waiting = [job for job in jobs if result(job, folder) is None]
    done = len(jobs) - len(waiting)
    with tqdm(total=len(jobs), initial=done, desc=title, disable=not waiting) as bar:
        try:
            while waiting or running:
                while waiting and len(running) < workers:
                    running.append(launch(waiting.pop(0), folder, workers))
                time.sleep(0.1)
                for job, process in [x for x in running if x[1].exitcode is not None]:
                    running.remove((job, process))
                    line = settle(job, folder, process.exitcode)
                    bar.update()
                    if not job.quiet:
                        tqdm.write(f"{job.name}: {line}")
        finally:
            for _, process in running:
                process.terminate()  # a training run saves after its step
            for _, process in running:
                process.join()
    return {job.name: result(job, folder) for job in jobs}


def run_groups(groups: dict[Any, list[Job]], folder: str, workers: int) -> dict[Any, list]:
    """run_jobs for the jobs of all groups: key -> their results, in order."""
    done = run_jobs(sum(groups.values(), []), folder, workers)
    return {key: [done[job.name] for job in group] for key, group in groups.items()}


def check_same(jobs: list[Job], folder: str) -> None:
    """Keeps the arguments of each job in FOLDER/jobs.json. ValueError if a job of this name had
    others, because its result would be taken for this one's."""
    file = Path(folder, "jobs.json")
    before = json.loads(file.read_text()) if file.exists() else {}
    for job in jobs:
        new = json.dumps(job.arguments, default=lambda x: getattr(x, "__qualname__", repr(x)))
        if before.setdefault(job.name, new) != new:
            raise ValueError(f"--folder: expected {job.name} in {folder} to be of {new}, "
                             f"found {before[job.name]}: choose another folder")
    os.makedirs(folder, exist_ok=True)
    write_json(str(file), before)


def launch(job: Job, folder: str, workers: int) -> tuple[Job, Any]:
    """Starts a job on its share of the cores or OMP_NUM_THREADS threads -> job, process."""
    threads = int(os.environ.get("OMP_NUM_THREADS", max(1, os.cpu_count() // workers)))
    # each process is a fork of one that has done nothing but the imports, which take seconds
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["figures.lab", "transformers.models.llama.modeling_llama"])
    process = context.Process(target=work, args=(job, folder, os.getcwd(), threads))
    process.start()
    return job, process


def work(job: Job, folder: str, cwd: str, threads: int) -> None:
    """A job in its own process: its words go to the log, its result to the result's file."""
    os.setsid()  # Ctrl-C reaches the job through run_jobs alone
    os.chdir(cwd)
    torch.set_num_threads(threads)
    path = os.path.join(folder, job.name)
    with open(path + ".log", "a") as log:
        os.dup2(log.fileno(), 1), os.dup2(log.fileno(), 2)
    print(f"---- {job.name} starts", flush=True)
    try:
        if job.function is train_run:
            sys.exit(train_run(path, *job.arguments))
        write_json(path + ".json", job.function(*job.arguments))
    except Exception:
        traceback.print_exc()
        sys.exit(3)  # a status that train.main does not use


def settle(job: Job, folder: str, status: int) -> str:
    """The last line in the log of a job that has ended. RuntimeError if the job died. A training
    run that stopped of itself (status 1: nothing to learn, not finite) gets a result with why."""
    path = os.path.join(folder, job.name)
    lines = re.split(r"[\r\n]+", Path(path + ".log").read_text(errors="replace").strip())
    fault = re.search("out of memory|--debug", lines[-1])  # train.main's words for no result
    if status == 1 and os.path.exists(path + "/metrics.jsonl") and not fault:
        if result(job, folder) is None:
            write_json(path + "/result.json", {"before": {}, "after": {}, "stopped": lines[-1]})
    elif status:
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        raise RuntimeError(f"{job.name} {how}: {lines[-1]} (log: {path}.log)")
    return lines[-1]


# ---- tables and pictures -------------------------------------------------------------------------


def mean_sd(values: list[float], digits: int = 3) -> str:
    """Mean ± sample standard deviation, `0.657 ± 0.161`; of one value the value, of none `–`."""
    sd = f" ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else ""
    return f"{np.mean(values):.{digits}f}{sd}" if values else "–"


def percent(x: float | None, digits: int = 1) -> str:
    """A share as `65.7 %`; None as `–`."""
    return "–" if x is None else f"{100 * x:.{digits}f} %"


def verdict(better: list[float], worse: list[float]) -> str:
    """`shows (+0.103 ± 0.033)`: the difference of the means ± its standard error, which is infinite
    for one value on a side. A difference shows if it is above two standard errors."""
    difference = np.mean(better) - np.mean(worse)
    # se² = s²_a / n_a + s²_b / n_b
    se = math.sqrt(sum(np.var(x, ddof=1) / len(x) if len(x) > 1 else math.inf
                       for x in (better, worse)))
    shows = "shows" if difference > 2 * se else "does not show"
    return f"{shows} ({difference:+.3f} ± {se:.3f})"


def squared_error(v_hat: list[float] | torch.Tensor, p: list[float] | torch.Tensor, k: int
                  ) -> float:
    """Mean (v̂ − p)², p the share right of k continuations: the p(1 − p)/k that they add, estimated
    by p(1 − p)/(k − 1), is taken off."""
    v, p = torch.as_tensor(v_hat), torch.as_tensor(p)
    return ((v - p).square() - p * (1 - p) / (k - 1)).mean().item()


def random_truths(run: train.Run, batch: rollout.Batch, starts: torch.Tensor, answers: list,
                  n: int, k: int, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """n of the starts [B, T], drawn at random -> [B, T], and p [n]: the share right of k
    continuations of each."""
    drop = starts.nonzero()
    drop = drop[torch.randperm(len(drop), generator=rng)[n:].to(drop.device)]
    starts = starts.index_put(tuple(drop.T), torch.zeros_like(starts[0, 0]))
    return starts, train.monte_carlo(run, batch, starts, answers, k, rng).cpu()


def print_table(head: list[str], rows: list[list[Any]]) -> None:
    """A Markdown table. None and NaN become `–`; floats have three digits."""
    for row in (head, ["---"] * len(head), *rows):
        print("| " + " | ".join("–" if x is None or x != x else f"{x:.3f}" if isinstance(x, float)
                                else str(x) for x in row) + " |")


def pyplot() -> Any:
    """matplotlib.pyplot, drawing into files. ImportError with the command that installs it."""
    try:
        from matplotlib import pyplot
    except ImportError:
        raise ImportError("--plot: expected matplotlib: pip install matplotlib") from None
    pyplot.switch_backend("Agg")
    return pyplot


def band(axis: Any, grid: np.ndarray, curves: list[np.ndarray], label: str, color: str) -> None:
    """Draws the mean over seeds of curves [N] on the grid [N] as a line, their range as a band."""
    axis.fill_between(grid, np.min(curves, 0), np.max(curves, 0), color=color, alpha=0.2, lw=0)
    axis.plot(grid, np.mean(curves, 0), color=color, label=label)


def save_picture(figure: Any, name: str) -> None:
    """Writes figures/NAME.png and prints where."""
    os.makedirs("figures", exist_ok=True)
    figure.savefig(f"figures/{name}.png", dpi=110)
    print(f"figures/{name}.png")


# ---- command line --------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """Of `python -m figures.NAME`. Wrong flags are a ValueError of one sentence, where argparse
    would end the program."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(prog=f"python -m figures.{name}", description=text.splitlines()[0],
                         allow_abbrev=False)
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")

    def error(self, message: str) -> None:
        """`--seeds: expected 1 or more, found 0` out of argparse's message."""
        message = re.sub("^argument ", "", message)
        message = re.sub("expected one arg", "expected a value, found no arg", message)
        message = re.sub("^unrecognized arguments: ", "expected a flag of --help, found ", message)
        raise ValueError(re.sub(r"invalid choice: (\S+) \(choose from (.*)\)",
                                r"expected one of \2, found \1", message))


def parser(name: str, text: str, sizes: dict[str, tuple[Any, Any, str]] | None = None,
           tiny: bool = False) -> Parser:
    """A Parser with --folder, --seeds and --workers. sizes adds --tiny and a flag for each of
    name -> (default, default with --tiny, help)."""
    out, flags = Parser(name, text), {
        "folder": (f"runs/{name}", f"runs/{name}-tiny", "of runs, logs and results"),
        "seeds": (3, 1, "seeds reported, from 1 on"), "workers": (2, 2, "jobs at a time")}
    if sizes:
        flags |= {"tiny": (False, False, "the smallest sizes")} | sizes
    for flag, values in flags.items():
        value, meaning = values[tiny], values[2]
        how = (dict(action="store_true") if isinstance(value, bool)
               else dict(type=whole(1) if isinstance(value, int) else type(value),
                         default=value, metavar="X"))
        out.add_argument("--" + flag.replace("_", "-"), help=f"{meaning} [{value}]", **how)
    return out


def base_policy(tiny: bool) -> str:
    """The folder of the initial policy; with tiny of one that has learned next to nothing."""
    return rollout.build_base("runs/base-tiny", steps=20, batch=16) if tiny else (
        rollout.build_base())


def whole(least: int) -> Callable[[str], int]:
    """A flag's type: a whole number of `least` or more."""
    def read(text: str) -> int:
        if not re.fullmatch(r"\d+", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected {least} or more, found {text}")
        return int(text)
    return read


def command(flags: Parser, body: Callable[[argparse.Namespace], None], argv: list[str]) -> int:
    """body(flags read from argv) -> exit status: 0; 1 a job died; 2 bad input; 130 Ctrl-C, SIGTERM.
    Every error is one sentence; --debug shows the traceback too."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: it ends the jobs too
    try:
        body(flags.parse_args(argv))
    except KeyboardInterrupt:
        print("\ninterrupted: the same command goes on where this one stopped", file=sys.stderr)
        return 130
    except Exception as error:
        if "--debug" in argv:
            traceback.print_exc()
        print(train.sentence(error, None), file=sys.stderr)
        return 2 if isinstance(error, (ValueError, ImportError, OSError)) else 1
    return 0


def script(name: str, text: str, sizes: dict, body: Callable[[argparse.Namespace], None]) -> int:
    """`command` with the parser of a script that has sizes."""
    return command(parser(name, text, sizes, "--tiny" in sys.argv), body, sys.argv[1:])
