"""The laboratory's shared part: jobs side by side, tables, mean ± sd, verdicts, bands in pictures.

A job is a process of its own: a function with its arguments, or a training run with its flags. Its
words go to FOLDER/NAME.log, its result to FOLDER/NAME.json (of a training run to
FOLDER/NAME/result.json). The same command goes on where it was stopped: a job that has its result
is not done again, and a training run that was cut goes on from its checkpoint.
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
    function: Callable[..., Any] | None  # of a module; returns JSON, not None. None: a training run
    arguments: tuple = ()  # of a training run its flags
    quiet: bool = False  # print no line when it ends


def training(name: str, flags: list[str], *, quiet: bool = False) -> Job:
    """A training run `train.py FLAGS --out FOLDER/NAME` on the CPU."""
    return Job(name, None, tuple(flags), quiet)


def train_run(path: str, *flags: str) -> int:
    """Starts the run in the folder `path`, or resumes it. Returns train.main's exit status."""
    if train.checkpoints(path):
        return train.main(["--resume", path, "--device", "cpu"])
    if os.path.exists(os.path.join(path, ".lock")):  # a run that never got to its first step
        with train.own_folder(path):  # ValueError if it goes on, or if there are other files
            shutil.rmtree(path)
    return train.main([*flags, "--out", path, "--device", "cpu"])


def result(job: Job, folder: str) -> Any:
    """What a finished job returned, None before. Of a training run: a dict of "before" and "after"
    (the evaluations), "stopped" (why it ended early, or ""), "metrics" (lines of metrics.jsonl)."""
    path = Path(folder, job.name)
    file = path.with_name(job.name + ".json") if job.function else path / "result.json"
    if not file.exists():
        return None
    value = json.loads(file.read_text())
    lines = [] if job.function else (path / "metrics.jsonl").read_text().splitlines()
    return value if job.function else {
        "stopped": "", **value, "metrics": [json.loads(line) for line in lines]}


def announce(folder: str, stages: dict[str, list[Job] | int]) -> None:
    """Prints how many jobs will run in how many stages, and how many are done already. stages:
    title -> jobs, or their number where their flags depend on an earlier stage."""
    jobs = sum((x for x in stages.values() if not isinstance(x, int)), [])
    sizes = {name: x if isinstance(x, int) else len(x) for name, x in stages.items() if x}
    print(f"{sum(sizes.values())} runs in {len(sizes)} stages ("
          + ", then ".join(f"{n} {name}" for name, n in sizes.items())
          + f"), {sum(result(job, folder) is not None for job in jobs)} of them done already; "
          f"folder {folder}", flush=True)


def run_jobs(jobs: list[Job], folder: str, workers: int = 2, *, title: str = "") -> dict[str, Any]:
    """Runs the jobs that have no result yet, `workers` side by side. Returns name -> result.
    RuntimeError if a job dies; the other jobs are ended first. KeyboardInterrupt ends all jobs,
    each training run after its step, with a checkpoint. ValueError: see check_same."""
    folder, running = os.path.abspath(folder), []
    check_same(jobs, folder)
    waiting = [job for job in jobs if result(job, folder) is None]
    threads = int(os.environ.get("OMP_NUM_THREADS", max(1, os.cpu_count() // workers)))
    # each process is a fork of one that has done nothing but the imports, which take seconds
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["figures.lab", "transformers.models.llama.modeling_llama"])
    bar = tqdm(total=len(jobs), initial=len(jobs) - len(waiting), desc=title, disable=not waiting)
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                arguments = waiting.pop(0), folder, os.getcwd(), threads
                running.append((arguments[0], context.Process(target=work, args=arguments)))
                running[-1][1].start()
            time.sleep(0.1)
            for job, process in [x for x in running if x[1].exitcode is not None]:
                running.remove((job, process))
                line = settle(job, folder, process.exitcode)
                bar.update()
                if not job.quiet:
                    tqdm.write(f"{job.name}: {line}")
    finally:
        started = [process for _, process in running if process.pid]
        for process in started:
            process.terminate()  # a training run saves after its step
        for process in started:
            process.join()
        bar.close()
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


def work(job: Job, folder: str, cwd: str, threads: int) -> None:
    """A job in its own process: its words go to the log, its result to the result's file."""
    os.setsid()  # Ctrl-C reaches the job through run_jobs alone
    os.chdir(cwd)
    torch.set_num_threads(threads)
    path = os.path.join(folder, job.name)
    with open(path + ".log", "a") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    print(f"---- {job.name} starts", flush=True)
    try:
        if job.function:
            return write_json(path + ".json", job.function(*job.arguments))
        sys.exit(train_run(path, *job.arguments))
    except Exception:
        traceback.print_exc()
        sys.exit(3)  # a status that train.main does not use


def settle(job: Job, folder: str, status: int) -> str:
    """The last line in the log of a job that has ended. RuntimeError if the job died. A training
    run that stopped of itself (status 1: nothing to learn, not finite) gets a result with why."""
    path = os.path.join(folder, job.name)
    line = re.split(r"[\r\n]+", Path(path + ".log").read_text(errors="replace").strip())[-1]
    fault = re.search("out of memory|--debug", line)  # train.main's words for no result
    if status == 1 and os.path.exists(path + "/metrics.jsonl") and not fault:
        if result(job, folder) is None:
            write_json(path + "/result.json", {"before": {}, "after": {}, "stopped": line})
    elif status:
        end = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        raise RuntimeError(f"{job.name} {end}: {line} (log: {path}.log)")
    return line


def clear_pool(folder: str) -> None:
    """Removes the pool of a job that was cut. ValueError if the folder holds anything else."""
    there = {*os.listdir(folder)} if os.path.exists(folder) else set()
    foreign = sorted(there - {"tokens.bin", "index.bin", "pool.json", "pool.writing"})
    train.expect("folder", f"a pool or nothing in {folder}", ", ".join(foreign[:3]), not foreign)
    shutil.rmtree(folder, ignore_errors=True)


# ---- policies ------------------------------------------------------------------------------------

def base_policy(tiny: bool) -> str:
    """The folder of the initial policy; with tiny of one that has learned next to nothing."""
    return rollout.build_base("runs/base-tiny", steps=20, batch=16) if tiny else (
        rollout.build_base())


def model_folder(path: str) -> str:
    """The path; ValueError where no Hugging Face model is: transformers would ask the hub."""
    if not os.path.isfile(os.path.join(path, "config.json")):
        raise ValueError(f"--model: expected a folder with config.json, found {path}")
    return path


def policy(model: str, critic: str = "") -> train.Run:
    """The policy of the embedded task in a folder, as train.respond wants it, and its critic."""
    flags = ["--critic", critic] if critic else ["--method", "grpo"]
    run = train.setup(train.parse(["--preset", "tiny", "--model", model, *flags])[0])
    train.prepare_critic(run)
    return run


def responses(run: train.Run, ids: torch.Tensor, rng: torch.Generator, temperature: float = 1.0,
              *, held_out: bool = False) -> rollout.Batch:
    """A response to each of the problems with these ids, in the order of ids."""
    problems, prompts = ((run.eval_problems, run.eval_prompts) if held_out
                         else (run.problems, run.prompts))
    return train.respond(run, prompts, [x.answer for x in problems], ids, rng, temperature)


def random_truths(run: train.Run, batch: rollout.Batch, starts: torch.Tensor, answers: list,
                  n: int, k: int, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """n of the starts [B, T], drawn at random -> [B, T], and p [n]: the share right of k
    continuations of each."""
    drop = starts.nonzero()
    drop = drop[torch.randperm(len(drop), generator=rng)[n:].to(drop.device)]
    starts = starts.index_put(tuple(drop.T), torch.zeros_like(starts[0, 0]))
    return starts, train.monte_carlo(run, batch, starts, answers, k, rng).cpu()


def squared_error(v_hat: list[float] | torch.Tensor, p: list[float] | torch.Tensor, k: int
                  ) -> float:
    """Mean (v̂ − p)², p the share right of k continuations: the p(1 − p)/k that they add, estimated
    by p(1 − p)/(k − 1), is taken off."""
    v, p = torch.as_tensor(v_hat), torch.as_tensor(p)
    return ((v - p).square() - p * (1 - p) / (k - 1)).mean().item()


# ---- tables and pictures -------------------------------------------------------------------------

def mean_sd(values: list[float], digits: int = 3) -> str:
    """Mean ± sample standard deviation, `0.657 ± 0.161`; of one value the value, of none `–`."""
    sd = f" ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else ""
    return f"{np.mean(values):.{digits}f}{sd}" if values else "–"


def percent(x: float | None, digits: int = 1) -> str:
    """A share as `65.7 %`; None as `–`."""
    return "–" if x is None else f"{100 * x:.{digits}f} %"


def verdict(better: list[float], worse: list[float]) -> str:
    """`shows (+0.103 ± 0.033)`: the difference of the means ± its standard error. A difference
    shows if it is above two of them; `–` instead of a verdict where a side has one value."""
    difference = np.mean(better) - np.mean(worse)
    if min(len(better), len(worse)) < 2:
        return f"– ({difference:+.3f})"
    se = math.sqrt(sum(np.var(x, ddof=1) / len(x) for x in (better, worse)))  # s²_a/n_a + s²_b/n_b
    return f"{'shows' if difference > 2 * se else 'does not show'} ({difference:+.3f} ± {se:.3f})"


def print_table(head: list[str], rows: list[list[Any]]) -> None:
    """A Markdown table. None and NaN become `–`; floats have three digits."""
    for row in (head, ["---"] * len(head), *rows):
        print("| " + " | ".join("–" if x is None or x != x else f"{x:.3f}" if isinstance(x, float)
                                else str(x) for x in row) + " |")


def band(axis: Any, grid: np.ndarray, curves: list[np.ndarray], label: str, color: str) -> None:
    """Draws curves [N] of several seeds on the grid [N]: their mean as a line, ± their sample
    standard deviation as a band, which ends where no seed has been."""
    mean, sd = np.mean(curves, 0), np.std(curves, 0, ddof=min(1, len(curves) - 1))
    low, high = np.maximum(mean - sd, np.min(curves, 0)), np.minimum(mean + sd, np.max(curves, 0))
    axis.fill_between(grid, low, high, color=color, alpha=0.2, lw=0)
    axis.plot(grid, mean, color=color, label=label)


# ---- command line --------------------------------------------------------------------------------

COMMON = {  # name: default, with --tiny, what it is; {} is the script's name
    "folder": ("runs/{}", "runs/{}-tiny", "of runs, logs and results"),
    "seeds": (3, 1, "seeds reported, from 1 on"), "workers": (2, 2, "jobs at a time"),
    "tiny": (False, False, "the smallest sizes")}


class Parser(argparse.ArgumentParser):
    """Wrong flags are a ValueError of one sentence, where argparse would end the program."""

    def error(self, message: str) -> None:
        """`--seeds: expected 1 or more, found 0` out of argparse's message."""
        for old, new in (("^argument ", ""), ("expected one arg", "expected a value, found no arg"),
                         ("^unrecognized arguments: ", "expected a flag of --help, found ")):
            message = re.sub(old, new, message)
        raise ValueError(message)


def parser(name: str, text: str, flags: dict[str, tuple], *, tiny: bool = False,
           common: tuple[str, ...] = tuple(COMMON), positional: Any = ()) -> Parser:
    """Of `python -m figures.NAME`: --debug, the common flags, and flags: name -> (default, default
    with --tiny, help, and the least value of a whole number if that is not 1). positional: the name
    of a value, or what any number of `names` may be."""
    out = Parser(prog=f"python -m figures.{name}", description=text.splitlines()[0],
                 allow_abbrev=False)
    if isinstance(positional, str):
        out.add_argument(positional, metavar=positional.upper())
    elif positional:
        names = ", ".join(positional)
        out.add_argument("names", nargs="*", help=names, type=read_if(
            positional.__contains__, f"some of {names}"))
    out.add_argument("--debug", action="store_true", help="show the traceback of an error")
    for flag, (default, small, meaning, *least) in (
            {x: COMMON[x] for x in common} | flags).items():
        value = small if tiny else default
        value = value.format(name) if isinstance(value, str) else value
        read = (whole(*least) if isinstance(value, (int, tuple)) else above_0
                if isinstance(value, float) else read_if(
                    lambda x, flag=flag: x or flag != "folder", "the name of a folder"))
        kind = (dict(action="store_true") if isinstance(value, bool) else dict(
            default=value, metavar="X", type=read,
            nargs=len(value) if isinstance(value, tuple) else None))
        out.add_argument("--" + flag.replace("_", "-"), help=f"{meaning} [{value}]", **kind)
    return out


def read_if(valid: Callable[[str], Any], expected: str, kind: type = str) -> Callable[[str], Any]:
    """A flag's type: `kind` of the text, if that is valid."""
    def read(text: str) -> Any:
        """The value in the text."""
        if not valid(text):
            raise argparse.ArgumentTypeError(f"expected {expected}, found {text}")
        return kind(text)
    return read


def whole(least: int = 1) -> Callable[[str], int]:
    """A flag's type: a whole number of `least` or more."""
    return read_if(lambda x: re.fullmatch(r"\d+", x) and int(x) >= least, f"{least} or more", int)


above_0 = read_if(
    lambda x: re.fullmatch(r"(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", x) and 0 < float(x) < math.inf,
    "a number above 0", float)


def script(name: str, text: str, flags: dict[str, tuple], body: Callable, argv: list[str],
           **more: Any) -> int:
    """body(what `parser` reads from argv) -> exit status: 0; 1 a job died; 2 bad input; 130 Ctrl-C
    or SIGTERM. Every error is one sentence; --debug shows the traceback too."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: it ends the jobs too
    try:
        body(parser(name, text, flags, tiny="--tiny" in argv, **more).parse_args(argv))
    except KeyboardInterrupt:
        print("\ninterrupted: the same command goes on where this one stopped", file=sys.stderr)
        return 130
    except Exception as error:
        if "--debug" in argv:
            traceback.print_exc()
        print(train.sentence(error, None), file=sys.stderr)
        return 2 if isinstance(error, train.BAD_INPUT) else 1
    return 0
