r"""S3AC end to end: base policy, coverage pool, value pretraining, actor-critic steps, evaluation.

    for each rollout batch                                          S3AC §3
        prompts   ~ DAPS(V(s_0), counts)                            §3.4   daps.py
        responses ~ μ(·|prompt), R ∈ {−1, +1}                       §3.1   rollout.py
        log π_old, V(s_t)             trainer's log-probs, critic    §3.2
        Â_t = δ_t + λ_i Â_{t+1},      λ_i = 1 − 1/(αT_i)            §3.2   gae.py
        keep = IcePoP(π_old/μ) ∧ MIS(π_old/μ)                       §3.2   actor_loss.py
        critic: 2 epochs of clipped ½(V − R)²                       §3.3   critic.py
        actor:  1 epoch of −sg(clip(r) Â) log π in 8 mini-batches   §3.2   actor_loss.py
        DAPS counts ← 0.99 · counts + outcomes                      §3.4

A method is one row of METHODS: what fills `value`, what fills `advantage`, which loss, how prompts
are selected. Everything else is shared. Each random draw of step t comes from a generator seeded
with (seed, t), so a resumed run goes on bit for bit without any generator to save.

Under torchrun parameters, gradients and optimizer states are sharded (FSDP2). Every rank holds the
whole rollout batch, tokens and numbers alike, and works on its share of the rows; whatever is
decided is decided from the same numbers by the same generator on each, so nothing else is
communicated, and advantages, counts and denominators are global without further care.

Differs from the paper: see the README's assumptions. Left out: asynchronous rollouts, judge models,
multimodal data.

    python train.py                                          the embedded task, all stages
    python train.py --model DIR --data problems.jsonl        your model, your problems
    torchrun --nproc_per_node 8 train.py --model …           the same, sharded
    python train.py --resume runs/…                          goes on where it stopped
    python train.py --compare single group …                 methods side by side, over seeds
    python train.py --show-values runs/…                     V(s_t) along responses, and its error
    python train.py --help                                   every field of Config is a flag
"""

import argparse
import contextlib
import copy
import json
import math
import multiprocessing
import os
import pickle
import random
import re
import resource
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedConfig,
    PreTrainedTokenizerBase,
)

import genac
import rollout
from actor_loss import (
    cispo_loss, dis_loss, flash_reinforce_loss, group_expectation_weight, grpo_loss, linear_entropy,
    linear_token_logp, mismatch_mask, nll_loss, ppo_clip_loss,
)
from critic import HEAD_FILE, Critic, clip_critic_grad_, explained_variance, value_loss
from daps import (
    DAPS, accept, fuse, greso_accept_prob, mixed_groups, nearest_half, uniform_streak,
)
from gae import (
    adaptive_lambda, batch_advantage, flash_reinforce_advantage, gae, group_advantage,
    leave_one_out_advantage, vine_advantage,
)
from rollout import Batch, collect, concatenate, length_groups, positions, response, take
from value_pretrain import TrajectoryPool, coverage_table, format_coverage, pretrain

# ------------------------------------------------------------------------------- configuration


def flag(default: Any, text: str, *choices: str) -> Any:
    """A field of Config: its default, its line in --help, the values allowed (any if none)."""
    return field(default=default, metadata={"help": text, "choices": choices or None})


@dataclass
class Config:
    """Every field is a flag; the defaults are the paper's where it gives a value."""

    # run
    method: str = flag("s3ac", "row of METHODS")
    model: str = flag("", "folder or name of a Hugging Face model; empty: the embedded base policy")
    data: str = flag("", "JSONL of problems; empty: the embedded task")
    eval_data: str = flag(
        "", "JSONL of problems to evaluate on; empty: a held-out part of the data")
    steps: int = flag(200, "rollout batches")
    seed: int = flag(0, "seed of everything random")
    out: str = flag("", "run folder; empty: a new one under runs/")
    target: float = flag(0.0, "exit with status 1 if the success at the end is below this")
    device: str = flag("auto", "auto, cpu or cuda")
    dtype: str = flag("float32", "of parameters and optimizer", "float32", "bfloat16")
    compute_dtype: str = flag(
        "float32", "of forward and backward (autocast)", "float32", "bfloat16")
    shard_size: int = flag(0, "ranks that share one copy of the parameters; 0: all of them")
    checkpoint_activations: bool = flag(False, "recompute activations in the backward pass")
    trust_remote_code: bool = flag(False, "run code that comes with the model")
    # rollout
    rollout_batch: int = flag(1024, "trajectories per step")  # assumption: not known for 1.5B
    k: int = flag(0, "responses per prompt; 0: the method's own")
    max_prompt: int = flag(1024, "longest prompt in tokens")
    long_prompts: str = flag("skip", "prompts over max_prompt", "skip", "stop")
    max_response: int = flag(3072, "longest response in tokens")
    temperature: float = flag(1.0, "of sampling, and so of the policy that is trained")
    rollout_dtype: str = flag(
        "", "sample with a copy of this type; empty: none", "", "bfloat16", "float16")
    sampler: str = flag("generate", "generate, or generate_batch (paged, for GPUs)")
    router_replay: bool = flag(False, "R3: train with the experts that the sampler chose (MoE)")
    max_rows: int = flag(256, "responses under way at once")
    verifier: str = flag("boxed", "of responses: boxed, number, math_verify or chain")
    instruction: str = flag(
        r"Please reason step by step, and put your final answer within \boxed{}.",
        "added to each prompt",
    )
    filter_rounds: int = flag(10, "rounds of replacing uniform groups (k > 1)")  # assumption
    delimiter: str = flag("", "text after which a step may end (vine-ppo, genac); empty: steps of "
                              "a sixteenth of max_response")
    vine_k: int = flag(9, "continuations per step's start (vine-ppo)")
    # actor
    loss: str = flag("", "entry of LOSSES: cispo, ppo-clip, dis, …; empty: the method's own")
    lr: float = flag(1e-6, "learning rate")
    mini_batches: int = flag(8, "optimizer steps per epoch over a rollout batch")
    clip_norm: float = flag(1.0, "gradient norm limit")
    alpha: float = flag(1.5, "α in λ = 1 − 1/(αT)")
    eps_low: float = flag(0.0, "ratio clipped at 1 − this; 0: the loss's own, 0.2 for CISPO")
    eps_high: float = flag(0.0, "ratio clipped at 1 + this; 0: the loss's own, 0.28 for CISPO")
    gepo: bool = flag(False, "weigh responses by GEPO's group expectation (grpo-x, grpo)")
    token_low: float = flag(0.5, "IcePoP: least π_old/μ of a token")
    token_high: float = flag(5.0, "IcePoP: largest π_old/μ of a token")
    response_high: float = flag(5.0, "MIS: largest π_old/μ in a response")
    weight_decay: float = flag(0.01, "AdamW, both models")  # assumption: not stated
    # critic
    critic: str = flag("", "folder of a pretrained critic (asyppo: two, separated by a comma; "
                           "genac: a language model that gives scores); empty: pretrain one")
    critic_lr: float = flag(5e-6, "learning rate")
    critic_epochs: int = flag(2, "epochs over a rollout batch")
    critic_clip_norm: float = flag(10.0, "gradient norm limit, in pretraining too")
    critic_clip_split: bool = flag(False, "clip head and backbone each by its own norm")
    value_clip: float = flag(0.5, "range of the clipped value loss; 0: off")  # assumption
    reply: int = flag(1024, "longest reply of a generative critic in tokens")
    context: int = flag(4096, "a generative critic's prompt and reply together, in tokens")
    # value pretraining
    pretrain: str = flag("", "how a critic starts: on a coverage pool, on the initial policy's "
                             "responses, not at all; empty: the method's own",
                         "", "coverage", "initial", "none")
    pool: str = flag("", "folder of an existing trajectory pool; empty: sample one")
    pool_models: str = flag("", "more policies for the pool: folders, separated by commas")
    pool_temperatures: str = flag("1.0,0.8,0.6", "strengths of each policy, separated by commas")
    pool_size: int = flag(4096, "trajectories per policy and temperature")
    pretrain_freeze: str = flag("attention", "what stays as it is: attention, all but the head "
                                             "(backbone), nothing", "attention", "backbone", "none")
    pretrain_size: int = flag(0, "trajectories drawn from the pool for coverage; 0: all of it")
    pretrain_epochs: int = flag(2, "epochs")
    pretrain_batch: int = flag(256, "trajectories per step")  # assumption: not known
    pretrain_lr: float = flag(1e-5, "learning rate at its peak")
    pretrain_lr_final: float = flag(5e-6, "learning rate at the end")
    # prompt selection
    selection: str = flag("", "of prompts; empty: the method's own",
                          "", "uniform", "daps", "pcl", "greso")
    candidates: int = flag(4, "candidate prompts per prompt needed")  # assumption: not stated
    a_min: float = flag(0.1, "least acceptance, 0.1–0.3 in the paper")
    n_c: float = flag(3.0, "weight of the critic's estimate, in trials")
    decay: float = flag(0.99, "of the counts, per rollout batch")
    daps_uniform: int = flag(40, "steps of uniform selection at the start")
    daps_ramp: int = flag(80, "steps until selection acts fully")
    # evaluation and files
    eval_every: int = flag(0, "steps between evaluations; 0: before and after only")
    eval_problems: int = flag(256, "problems evaluated at the most")
    eval_k: int = flag(4, "responses per problem: avg@k, pass@k")
    eval_temperature: float = flag(1.0, "of evaluation; 0: greedy")
    show_every: int = flag(20, "steps between responses shown with their values; 0: never")
    save_every: int = flag(50, "steps between checkpoints; 0: at the end only")
    keep: int = flag(2, "checkpoints kept")
    token_budget: int = flag(32768, "padded tokens per forward pass")


PRESETS = {
    # two CPU cores, minutes: a 4-layer model takes a larger step size, everything else is smaller
    "tiny": dict(
        steps=80, rollout_batch=256, max_prompt=16, max_response=64, max_rows=256,
        verifier="chain", instruction="", lr=5e-5, critic_lr=2.5e-4, pool_size=5120,
        pretrain_size=10240, pretrain_lr=1e-3, pretrain_lr_final=1e-4, pretrain_batch=32,
        daps_uniform=10, daps_ramp=20, eval_problems=400, eval_k=4, vine_k=4, reply=136,
        context=256,
    ),
    # the paper's public settings; one 8-GPU node
    "qwen2.5-math-1.5b": dict(
        model="Qwen/Qwen2.5-Math-1.5B", max_response=3072, compute_dtype="bfloat16",
        rollout_dtype="bfloat16", checkpoint_activations=True, eval_k=16, steps=400,
    ),
    "r1-distill-1.5b": dict(
        model="deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", max_response=16384,
        compute_dtype="bfloat16", rollout_dtype="bfloat16", checkpoint_activations=True, eval_k=32,
        steps=400, max_rows=128,
    ),
}


class Method(NamedTuple):
    """The columns in which methods differ; a flag of the same name replaces the one it names."""

    value: str  # critic | critics | vine | tracker | generative | none: VALUES
    pretrain: str  # how a critic starts: coverage | initial | none
    advantage: str  # ADVANTAGES
    loss: str  # LOSSES
    selection: str = "uniform"  # uniform | daps | pcl | greso
    k: int = 1  # responses per prompt
    filter: bool = False  # replace groups that are all right or all wrong (DAPO)


# All rows share sampler, masks, optimizer and one epoch of mini-batches; none has a KL term.
METHODS = {
    # Shen et al. 2026: token advantages, coverage pretraining, selection by difficulty
    "s3ac": Method("critic", "coverage", "gae", "cispo", "daps", filter=True),
    # the same without token-level credit: the prompt's baseline R − V(s_0) on every token
    "s3ac-v0": Method("critic", "coverage", "v0", "cispo", "daps", filter=True),
    # Shao et al. 2024, 2402.03300: a group's mean is the baseline, its std the scale, no critic;
    # each response's tokens are averaged first
    "grpo": Method("none", "none", "group", "grpo", k=8),
    # GRPO's advantage with S3AC's loss and DAPO's group filter
    "grpo-x": Method("none", "none", "group", "cispo", k=8, filter=True),
    # Ahmadian et al. 2024, 2402.14740: the mean of the other responses is the baseline, no std
    "rloo": Method("none", "none", "leave-one-out", "ppo-clip", k=8),
    # Hu 2025, 2501.03262: returns whitened over all tokens of the batch, so K = 1 will do
    "reinforce++": Method("none", "none", "batch", "cispo"),
    # Hu, Zhang et al. 2026: batch mean, no std; unclipped ratio to the sampler, whole responses
    # gated by their mean Bernoulli KL; each response's tokens are averaged first
    "flash-reinforce": Method("none", "none", "flash", "flash"),
    # Schulman et al. 2017, 1707.06347: a critic that starts with the policy, λ = 0.95
    "ppo": Method("critic", "none", "gae-0.95", "ppo-clip"),
    # Yuan et al. 2025, 2503.01491: the critic pretrained on the initial policy, fitted with λ = 1
    "vc-ppo": Method("critic", "initial", "gae-0.95", "ppo-clip"),
    # Yue et al. 2025, 2504.05118: λ by length with α = 0.05, ε 0.2/0.28, NLL of right responses
    "vapo": Method("critic", "initial", "gae-vapo", "vapo", k=8),
    # Kazemnejad et al. 2024, 2410.01679: a step's value is the mean of k continuations, no critic
    "vine-ppo": Method("vine", "none", "vine", "ppo-clip"),
    # Hou, Li et al. 2026, 2607.07508: S3AC's advantage, the ratio to the sampler must be in a range
    "sao": Method("critic", "initial", "gae", "dis"),
    # Xu et al. 2025, 2509.13232: the baseline is a Beta tracker of each prompt's outcomes
    "spo": Method("tracker", "none", "tracker", "ppo-clip"),
    # Pan et al. 2026, 2604.19485: the critic's baseline only while it explains something
    "evpo": Method("critic", "none", "evpo", "ppo-clip"),  # assumption: no pretraining
    # Liu et al. 2025, 2510.01656: two critics, no advantage on the states where they agree most
    "asyppo": Method("critics", "initial", "agree", "ppo-clip", k=8),  # assumption: pretrained
    # GenAC 2026, 2604.10701: the critic says in words what it expects, at segment starts
    "genac": Method("generative", "none", "segments", "ppo-clip"),
}

ADVANTAGES = {
    "gae": lambda b, cfg: gae(
        b.value, b.reward, b.mask, adaptive_lambda(b.mask.sum(-1), cfg.alpha)),
    "gae-0.95": lambda b, cfg: gae(b.value, b.reward, b.mask, 0.95),
    "gae-vapo": lambda b, cfg: gae(
        b.value, b.reward, b.mask, adaptive_lambda(b.mask.sum(-1), 0.05)),
    "v0": lambda b, cfg: torch.where(b.mask, (b.reward - b.value[:, 0])[:, None], 0.0),
    "group": lambda b, cfg: group_advantage(b.reward, b.prompt_id, b.mask) * gepo_weight(b, cfg),
    "leave-one-out": lambda b, cfg: leave_one_out_advantage(b.reward, b.prompt_id, b.mask),
    "batch": lambda b, cfg: batch_advantage(b.reward, b.mask),
    "flash": lambda b, cfg: flash_reinforce_advantage(b.reward, b.mask),
    "vine": lambda b, cfg: vine_advantage(*by_step(b), b.reward, b.mask),
    "tracker": lambda b, cfg: batch_advantage(b.reward - b.value[:, 0], b.mask),  # whiten(R − v̂)
    "evpo": lambda b, cfg: evpo_advantage(b),
    "agree": lambda b, cfg: agreement_advantage(b),
    # assumption: λ = 0.95 from segment to segment, as PPO's; the paper's is not known
    "segments": lambda b, cfg: genac.spread(
        gae(b.value, b.reward, b.starts, 0.95), b.starts, b.mask),
}


def gepo_weight(b: Batch, cfg: Config) -> Tensor | float:
    """GEPO's weight of each response [B, 1], where it is asked for."""
    if not cfg.gepo:
        return 1.0
    # assumption: it stands for sampler → trainer; the mini-batches' own ratio stays the loss's
    return group_expectation_weight(b.logp_old, b.logp_roll, b.prompt_id, b.mask)[:, None]


def by_step(b: Batch) -> tuple[Tensor, Tensor]:
    """step_value [B, N] and step_id [B, T] out of values that are constant within a step."""
    step_id = (b.starts.cumsum(1) - 1).clamp_min(0)
    step_value = b.value.new_zeros(len(b.mask), int(step_id.max()) + 1)
    return step_value.scatter_add_(1, step_id, torch.where(b.starts, b.value, 0.0)), step_id


def evpo_advantage(b: Batch) -> Tensor:
    """The critic's baseline where it explains anything, EV > 0, else the batch's or group's mean
    (EVPO, 2604.19485)."""
    if explained_variance(b.value, b.reward, b.mask) > 0:
        return gae(b.value, b.reward, b.mask, 1.0)  # assumption: λ = 1, so R − V(s_t)
    if len(b.prompt_id.unique()) < len(b.prompt_id):
        return group_advantage(b.reward, b.prompt_id, b.mask, divide_std=False)
    return flash_reinforce_advantage(b.reward, b.mask)


def agreement_advantage(b: Batch, share: float = 0.2) -> Tensor:
    """GAE, but 0 on the share of states where two critics agree most (AsyPPO, 2510.01656)."""
    bound = torch.quantile(b.value_std[b.mask].float(), share)
    A = gae(b.value, b.reward, b.mask, 0.95)  # assumption: λ = 0.95
    return torch.where(b.value_std <= bound, 0.0, A)


class Counts(NamedTuple):
    """What a mini-batch's losses are divided by, over all micro-batches and ranks."""

    tokens: Tensor  # kept
    responses: Tensor  # with a token
    right: Tensor  # kept tokens of right responses


LOSSES = {
    "cispo": lambda logp, b, n, cfg: cispo_loss(
        logp, b.logp_old, b.advantage, b.keep, n.tokens, **clip_range(cfg)),
    "ppo-clip": lambda logp, b, n, cfg: ppo_clip_loss(
        logp, b.logp_old, b.advantage, b.keep, n.tokens, **clip_range(cfg)),
    "dis": lambda logp, b, n, cfg: dis_loss(
        logp, b.logp_roll, b.advantage, b.keep, n.tokens, **clip_range(cfg)),
    "grpo": lambda logp, b, n, cfg: grpo_loss(
        logp, b.logp_old, b.advantage, b.keep, n.responses, **clip_range(cfg)),
    "flash": lambda logp, b, n, cfg: flash_reinforce_loss(
        logp, b.logp_roll, b.advantage, b.mask, n.responses),
    "vapo": lambda logp, b, n, cfg: vapo_loss(logp, b, n, cfg),
}


def vapo_loss(logp: Tensor, b: Batch, n: Counts, cfg: Config) -> tuple[Tensor, dict]:
    """The clipped surrogate with ε 0.2/0.28 + 0.1 · NLL of right responses (VAPO, 2504.05118)."""
    how = {"eps_high": 0.28} | clip_range(cfg)
    loss, stats = ppo_clip_loss(logp, b.logp_old, b.advantage, b.keep, n.tokens, **how)
    nll, more = nll_loss(logp, b.reward, b.keep, n.right)
    return loss + 0.1 * nll, stats | more


def clip_range(cfg: Config) -> dict[str, float]:
    """The ε that were asked for; a loss's own otherwise."""
    return {name: x for name in ("eps_low", "eps_high") if (x := getattr(cfg, name))}


def method_of(cfg: Config) -> Method:
    """The method's row with the columns that flags replace."""
    given = dict(k=cfg.k, loss=cfg.loss, selection=cfg.selection, pretrain=cfg.pretrain)
    return METHODS[cfg.method]._replace(**{name: x for name, x in given.items() if x})


# The first field of each section of Config -> the section's title in --help.
SECTIONS = dict(method="run", rollout_batch="rollout", loss="actor", critic="critic",
                pretrain="value pretraining", selection="prompt selection",
                eval_every="evaluation and files")


def parse(argv: list[str]) -> tuple[Config, bool]:
    """Command line -> Config, and whether it resumes a run. Flags win over the preset.

    ValueError for a --resume that does not fit; argparse ends the program for unknown flags.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "--preset", choices=PRESETS, help="default: tiny without --model and --data")
    parser.add_argument("--resume", metavar="DIR", help="run folder to go on with")
    for f in fields(Config):
        if f.name in SECTIONS:
            group = parser.add_argument_group(SECTIONS[f.name])
        how = dict(action=argparse.BooleanOptionalAction) if f.type is bool else dict(
            type=f.type, choices=f.metadata["choices"], metavar=f.type.__name__.upper())
        group.add_argument(
            "--" + f.name.replace("_", "-"), default=argparse.SUPPRESS,
            help=f"{f.metadata['help']} [{f.default}]".replace("%", "%%"), **how)
    given = vars(parser.parse_args(argv))
    preset, resume = given.pop("preset"), given.pop("resume")
    if resume:
        return resumed(resume, given | ({"preset": preset} if preset else {})), True
    if preset is None and not (given.get("model") or given.get("data")):
        preset = "tiny"
    cfg = replace(Config(**PRESETS.get(preset, {})), **given)
    new = time.strftime(f"runs/%Y%m%d-%H%M%S-{cfg.method}-{cfg.seed}")
    return replace(cfg, out=cfg.out or new), False


# Fields that may change when a run is resumed: they do not change what the next step computes.
FREE_ON_RESUME = {"steps", "target", "device", "eval_every", "show_every", "save_every", "keep"}


def resumed(folder: str, given: dict) -> Config:
    """The saved configuration with the given fields that may change; ValueError for others."""
    try:
        with open(os.path.join(folder, "config.json")) as file:
            saved = Config(**json.load(file))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError("--resume: expected a run folder with config.json, "
                         f"found {folder} ({error})") from None
    changed = [f"{n} {getattr(saved, n, None)!r} -> {x!r}" for n, x in given.items()
               if getattr(saved, n, None) != x and n not in FREE_ON_RESUME]
    if changed:
        raise ValueError("--resume: expected the configuration of that run, found other values: "
                         + ", ".join(changed))
    given.pop("out", None)
    return replace(saved, **given, out=folder)


TINIEST, MOST = 1e-12, 1e12  # for what must be above 0, and for what has no upper limit
LIMITS = [
    ("steps rollout_batch max_prompt max_response mini_batches max_rows token_budget candidates "
     "eval_k eval_problems filter_rounds pool_size keep critic_epochs pretrain_epochs "
     "pretrain_batch vine_k reply", 1, MOST),
    ("temperature lr critic_lr clip_norm critic_clip_norm alpha pretrain_lr pretrain_lr_final n_c "
     "token_high response_high", TINIEST, MOST),
    ("seed k shard_size weight_decay value_clip pretrain_size daps_uniform daps_ramp eval_every "
     "eval_temperature show_every save_every eps_high token_low", 0, MOST),
    ("eps_low a_min decay", 0, 1),
]


def check(cfg: Config) -> None:
    """ValueError in one sentence for what can be seen wrong before any model is loaded."""
    for name, table in (("method", METHODS), ("verifier", rollout.VERIFIERS), ("loss", LOSSES),
                        ("sampler", rollout.SAMPLERS)):
        found = getattr(cfg, name)
        if found not in table and (name, found) != ("loss", ""):
            raise ValueError(f"--{name}: expected one of {', '.join(table)}; found {found}")
    method = method_of(cfg)
    if min(cfg.rollout_batch, method.k) < 1 or cfg.rollout_batch % method.k:
        raise ValueError(f"--k: expected a divisor of --rollout-batch {cfg.rollout_batch}, "
                         f"found {method.k}")
    grouped = method.advantage in ("group", "leave-one-out") or method.selection == "greso"
    if grouped and method.k == 1:
        raise ValueError(f"--k: expected 2 or more for the groups of {cfg.method}"
                         f"{' with greso' * (method.selection == 'greso')}, found 1")
    if cfg.gepo and method.advantage != "group":
        raise ValueError("--gepo: expected a method with group advantages (grpo-x, grpo), "
                         f"found {cfg.method}")
    if not 1 <= cfg.mini_batches <= cfg.rollout_batch:
        raise ValueError(f"--mini-batches: expected 1 … {cfg.rollout_batch} (--rollout-batch), "
                         f"found {cfg.mini_batches}")
    if method.selection in ("daps", "pcl") and method.value not in ("critic", "critics"):
        raise ValueError(f"--selection: expected uniform or greso, since {cfg.method} has no "
                         f"critic that could tell difficulty; found {method.selection}")
    for names, low, high in LIMITS:
        for name in names.split():
            if not low <= getattr(cfg, name) <= high:
                expected = (f"{low} … {high}" if high < MOST else
                            f"{low} or more" if low != TINIEST else "a number above 0")
                raise ValueError(f"--{name.replace('_', '-')}: expected {expected}, "
                                 f"found {getattr(cfg, name)}")
    if cfg.data and not cfg.model:
        raise ValueError("--data: expected --model beside it, since the embedded policy knows only "
                         f"the embedded task; found --data {cfg.data} alone")
    if cfg.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("--device: expected cpu or auto on a machine without CUDA, "
                         f"found {cfg.device}")
    try:
        if not all(0 < float(t) < math.inf for t in cfg.pool_temperatures.split(",")):
            raise ValueError
    except ValueError:
        raise ValueError("--pool-temperatures: expected numbers above 0, separated by commas, "
                         f"found {cfg.pool_temperatures}") from None
    if cfg.pool and not os.path.isfile(os.path.join(cfg.pool, "index.bin")):
        raise ValueError(f"--pool: expected a folder with a trajectory pool, found {cfg.pool}")
    for name in ("data", "eval_data"):
        if getattr(cfg, name) and not os.path.isfile(getattr(cfg, name)):
            raise ValueError(f"--{name.replace('_', '-')}: expected a JSONL file, "
                             f"found no file {getattr(cfg, name)}")
    for name in ("model", "pool_models"):
        for path in filter(None, getattr(cfg, name).split(",")):
            if not os.path.isfile(os.path.join(path, "config.json")) and looks_local(path):
                raise ValueError(f"--{name.replace('_', '-')}: expected a folder with a Hugging "
                                 f"Face model (config.json), found none at {path}")
    if cfg.router_replay and cfg.sampler != "generate":
        raise ValueError("--router-replay: expected --sampler generate, which notes the expert "
                         f"choices, found {cfg.sampler}")
    check_critic(cfg, method)
    if cfg.verifier == "math_verify":
        rollout.VERIFIERS["math_verify"](r"\boxed{1}", "1")  # ImportError that names the package


def check_critic(cfg: Config, method: Method) -> None:
    """ValueError unless --critic names what the method's kind of critic is read from."""
    expected = {"generative": ("a language model that gives scores", "config.json", 1),
                "critics": ("two critics, separated by a comma", HEAD_FILE, 2),
                }.get(method.value, ("a critic", HEAD_FILE, 1))
    paths = [path for path in cfg.critic.split(",") if path]
    if paths and len(paths) != expected[2] or not all(
            os.path.isfile(os.path.join(path, expected[1])) for path in paths):
        raise ValueError(f"--critic: expected the folder of {expected[0]} ({expected[1]}), "
                         f"found {cfg.critic}")
    if method.value == "generative" and not cfg.critic:
        raise ValueError("--critic: expected the folder of a language model that gives scores (see "
                         "python genac.py --train, --sft and --rl), found none")


def looks_local(path: str) -> bool:
    """True for a path, False for what may be a name on the hub (`owner/name`)."""
    return path.startswith((".", "/", "~")) or path.count("/") != 1 or os.path.isdir(
        path.split("/")[0])


# -------------------------------------------------------------------------------------- set-up


@dataclass
class Run:
    """All the state of a run."""

    cfg: Config
    method: Method
    device: torch.device
    tokenizer: PreTrainedTokenizerBase
    eos_id: list[int]
    problems: list[rollout.Problem]
    prompts: list[list[int]]  # token ids of problems
    eval_problems: list[rollout.Problem]
    eval_prompts: list[list[int]]
    actor: "Actor"
    actor_opt: torch.optim.Optimizer
    rank: int = 0
    size: int = 1  # ranks
    critic: Critic | None = None
    critic_opt: torch.optim.Optimizer | None = None
    second: Critic | None = None  # AsyPPO's other critic
    second_opt: torch.optim.Optimizer | None = None
    generative: genac.GenCritic | None = None
    generative_opt: torch.optim.Optimizer | None = None
    sampler: nn.Module | None = None  # whole copy of a sharded actor, or of another dtype
    routing: rollout.Routing | None = None  # notes the sampler's expert choices
    daps: DAPS | None = None  # also the counts of SPO's tracker
    streak: Tensor | None = None  # [n_prompts] uniform groups in a row (GRESO)
    step: int = 0
    before: dict = field(default_factory=dict)  # the evaluation before training
    nonfinite: dict = field(default_factory=lambda: {"actor": 0, "critic": 0})  # in a row
    stop: bool = False  # Ctrl-C: after this step

    @property
    def answers(self) -> list[str]:
        """The answers to the problems."""
        return [p.answer for p in self.problems]


class Actor(nn.Module):
    """A causal language model that answers with log-probs, so that the output matrix is used inside
    forward, where FSDP2 has put it together."""

    def __init__(self, model: nn.Module, temperature: float, router_replay: bool = False) -> None:
        super().__init__()
        self.model, self.temperature = model, temperature
        self.routing = rollout.Routing(model) if router_replay else None

    def forward(self, tokens: Tensor, attention: Tensor, mask: Tensor, entropy: bool,
                routing: Tensor | None = None) -> Tensor:
        """log π(a_t|s_t) [1, B, T] of the trainable tokens, 0 where masked: full vocabulary, at the
        sampling temperature. With entropy [2, B, T]: that of the distributions, no gradient."""
        T = mask.shape[1]
        if self.routing:  # stays set, for activations that are computed again in the backward pass
            self.routing.replay = routing
        hidden = self.model.base_model(
            input_ids=tokens, attention_mask=attention.long(), position_ids=positions(attention),
            use_cache=False).last_hidden_state
        hidden, weight = response(hidden, T)[mask], self.model.get_output_embeddings().weight
        logp = linear_token_logp(hidden, weight, tokens[:, -T:][mask], temperature=self.temperature)
        found = [logp]
        if entropy:
            found.append(linear_entropy(hidden, weight, temperature=self.temperature))
        out = logp.new_zeros(len(found), *mask.shape)
        out[:, mask] = torch.stack(found)
        return out


def join(cfg: Config) -> tuple[int, int, torch.device]:
    """Rank, number of ranks and device; joins the process group that torchrun has laid out."""
    cuda = cfg.device != "cpu" and torch.cuda.is_available()
    size = int(os.environ.get("WORLD_SIZE", 1))
    if size == 1:
        return 0, 1, torch.device(cfg.device if cfg.device != "auto" else "cuda" if cuda else "cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    return dist.get_rank(), size, device


def check_ranks(cfg: Config, size: int) -> None:
    """ValueError unless the ranks can share prompts and mini-batches evenly."""
    prompts, each = cfg.rollout_batch // method_of(cfg).k, cfg.rollout_batch // cfg.mini_batches
    if prompts % size or each < size:
        raise ValueError(f"--rollout-batch: expected prompts per step ({prompts}) that {size} "
                         f"processes divide, and mini-batches of {size} rows or more (they have "
                         f"{each}), found {cfg.rollout_batch} rows")
    if cfg.shard_size and size % cfg.shard_size:
        raise ValueError(f"--shard-size: expected a divisor of the {size} processes, "
                         f"found {cfg.shard_size}")


def setup(cfg: Config) -> Run:
    """Model, tokenizer and problems; what may be wrong with the data is found before the model."""
    rank, size, device = join(cfg)
    check_ranks(cfg, size)
    if size > 1:  # the clocks that name a run folder may differ
        name = [cfg.out]
        dist.broadcast_object_list(name)
        cfg.out = name[0]
    train, held_out = load_data(cfg)
    path = cfg.model or first_rank_builds(rank, size)
    how = dict(trust_remote_code=cfg.trust_remote_code)
    tokenizer = pretrained(AutoTokenizer, path, **how)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.eos_token_id is None:
        raise ValueError("--model: expected a tokenizer with an end-of-sequence token, "
                         f"found none in {path}")
    train, prompts = encode(cfg, tokenizer, train)
    held_out, eval_prompts = encode(cfg, tokenizer, held_out)
    model = pretrained(AutoModelForCausalLM, path, dtype=getattr(torch, cfg.dtype), **how)
    check_model(cfg, model, prompts)
    sampler = None
    # a copy samples where the actor cannot: in another type, in parts, or seen by other code
    if cfg.rollout_dtype or size > 1 or cfg.sampler != "generate" or cfg.router_replay:
        sampler = copy.deepcopy(model).to(device)
        for p in sampler.parameters():  # not the tables of RoPE, which stay float32
            p.data = p.data.to(getattr(torch, cfg.rollout_dtype or cfg.dtype))
    recorder = rollout.Routing(sampler) if cfg.router_replay else None
    actor = Actor(model, cfg.temperature, cfg.router_replay)
    actor = shard(actor, model.config, cfg, size, device)
    run = Run(
        cfg, method_of(cfg), device, tokenizer, eos_ids(model, tokenizer), train, prompts, held_out,
        eval_prompts, actor, optimizer(actor, cfg.lr, cfg.weight_decay), rank, size,
        sampler=sampler, routing=recorder)
    if run.method.selection == "greso":
        run.streak = torch.zeros(len(train), dtype=torch.long)
    if run.method.selection == "daps" or run.method.value == "tracker":
        run.daps = DAPS(len(train), a_min=cfg.a_min, n_c=cfg.n_c, decay=cfg.decay,
                        uniform=cfg.daps_uniform, ramp=cfg.daps_ramp)
    return run


def first_rank_builds(rank: int, size: int) -> str:
    """The embedded base policy, built by one rank while the others wait."""
    if rank == 0:
        build_base()
    if size > 1:
        dist.barrier()
    return build_base()


def shard(module: nn.Module, config: PreTrainedConfig, cfg: Config, size: int,
          device: torch.device, *float32: nn.Module) -> nn.Module:
    """FSDP2 in place: every layer a unit, the modules float32 units that keep that type, and the
    rest one. A single process keeps the module whole. Returns it on the device."""
    if cfg.checkpoint_activations:
        checkpoint_activations(module.model if isinstance(module, Actor) else module.backbone)
    if size == 1:
        return module.to(device)
    n = cfg.shard_size or size
    shape, names = ((size // n, n), ("replicate", "shard")) if n < size else ((size,), ("shard",))
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    kept = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    cast = MixedPrecisionPolicy(getattr(torch, cfg.compute_dtype), torch.float32)
    for unit in float32:
        fully_shard(unit, mesh=mesh, mp_policy=kept)
    for layer in layers_of(module, config):
        fully_shard(layer, mesh=mesh, mp_policy=cast)
    return fully_shard(module, mesh=mesh, mp_policy=cast)


def checkpoint_activations(model: nn.Module) -> None:
    """Layers recompute their activations in the backward pass, in training mode alone: so dropout,
    which the sampler has not seen either, is switched off."""
    renamed = hasattr(model, "activation_checkpointing_enable")
    (model.activation_checkpointing_enable if renamed else model.gradient_checkpointing_enable)()
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        if hasattr(part, "attention_dropout"):
            part.attention_dropout = 0.0


def layers_of(module: nn.Module, config: PreTrainedConfig) -> nn.ModuleList:
    """The decoder layers; ValueError if the model has no list of them."""
    n = config.get_text_config().num_hidden_layers
    for part in module.modules():
        if isinstance(part, nn.ModuleList) and len(part) == n:
            return part
    raise ValueError(f"--model: expected a list of {n} layers to shard, found none in "
                     f"{type(module).__name__}")


def pretrained(auto: type, path: str, **how: Any) -> Any:
    """auto.from_pretrained(path), whose many kinds of errors become one sentence."""
    try:
        return auto.from_pretrained(path, **how)
    except Exception as error:  # foreign files, foreign code
        kind = "a folder" if os.path.isdir(path) else "a name on the hub, for lack of such a folder"
        raise ValueError(f"--model: expected what transformers can load in {path} ({kind}), found "
                         f"{type(error).__name__}: {str(error).splitlines()[0][:200]}") from error


def load_data(cfg: Config) -> tuple[list[rollout.Problem], list[rollout.Problem]]:
    """Problems to train on and problems held out; no prompt is in both or twice."""
    shuffled = random.Random(0).shuffle  # which part is held out does not depend on --seed
    if not cfg.data:
        train, held_out = rollout.task_problems(), rollout.task_problems(held_out=True)
    else:
        rows = rollout.load_problems(cfg.data)
        train = list({json.dumps(p.prompt): p for p in rows}.values())
        if len(train) < len(rows):
            print(f"left out {len(rows) - len(train)} of {len(rows)} problems: "
                  "prompts that stand there twice")
        shuffled(train)
        n = 0 if cfg.eval_data else min(cfg.eval_problems, len(train) // 10 or len(train) // 2)
        held_out, train = train[:n], train[n:]
    if cfg.eval_data:
        held_out = rollout.load_problems(cfg.eval_data)
        shuffled(held_out)
    if len(train) < 2:
        raise ValueError(f"--data: expected 2 or more problems to train on, found {len(train)}")
    return train, held_out[: cfg.eval_problems]


def encode(
    cfg: Config, tokenizer: PreTrainedTokenizerBase, problems: list[rollout.Problem]
) -> tuple[list[rollout.Problem], list[list[int]]]:
    """Problems whose prompt fits, and their token ids."""
    try:
        ids = [rollout.encode_prompt(tokenizer, p, instruction=cfg.instruction)
               for p in tqdm(problems, desc="tokens of the prompts", delay=5, leave=False)]
    except Exception as error:  # a chat template is code of the tokenizer's author
        raise ValueError("--data: expected prompts that the tokenizer's chat template takes, found "
                         f"{type(error).__name__}: {error}") from error
    fits = [0 < len(x) <= cfg.max_prompt for x in ids]
    too_long = len(fits) - sum(fits)
    if too_long and (cfg.long_prompts == "stop" or not any(fits)):
        raise ValueError(f"--max-prompt: expected prompts of at most {cfg.max_prompt} tokens, "
                         f"found {too_long} of {len(fits)} that are longer (or empty), the longest "
                         f"{max(map(len, ids))}; --long-prompts skip leaves them out")
    if too_long:
        print(f"skipped {too_long} of {len(fits)} prompts: over --max-prompt {cfg.max_prompt}")
    return ([p for p, ok in zip(problems, fits) if ok], [x for x, ok in zip(ids, fits) if ok])


def eos_ids(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """All ids that end a response: the generation config's and the tokenizer's."""
    named = model.generation_config.eos_token_id
    named = named if isinstance(named, list) else [named]
    return sorted({i for i in [*named, tokenizer.eos_token_id] if i is not None})


@torch.no_grad()
def check_model(cfg: Config, model: nn.Module, prompts: list[list[int]]) -> None:
    """ValueError unless the sampler's cache fits the layers, all positions exist, and the logits
    are hidden @ weightᵀ, as linear_token_logp takes them to be."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    others = kinds - {"full_attention", "sliding_attention"}
    if others:
        raise ValueError("--model: expected attention layers, which the sampler's cache is made "
                         f"for, found {', '.join(sorted(others))}")
    longest, most = max(map(len, prompts)), getattr(config, "max_position_embeddings", None)
    if most and longest + cfg.max_response > most:
        raise ValueError(f"--max-response: expected at most {most - longest}, as the model has "
                         f"{most} positions and the longest prompt {longest} tokens; "
                         f"found {cfg.max_response}")
    tokens = torch.tensor([prompts[0]], device=next(model.parameters()).device)
    hidden = getattr(model.base_model(input_ids=tokens, use_cache=False), "last_hidden_state", None)
    found = model(input_ids=tokens, use_cache=False).logits.float()
    expected = math.inf
    if hidden is not None and hidden.shape[-1] == model.get_output_embeddings().weight.shape[-1]:
        expected = hidden.float() @ model.get_output_embeddings().weight.float().T
    error = ((found - expected).abs().max() / found.abs().max()).item()
    capped = getattr(config, "final_logit_softcapping", None)
    if capped or not error < (1e-4 if cfg.dtype == "float32" else 0.02):
        raise ValueError("--model: expected logits = hidden @ weightᵀ (no bias, scale or cap on "
                         f"the output), found a relative difference of {error:.2g}")


def optimizer(module: nn.Module, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW over all parameters of the module (this rank's part of them, if sharded)."""
    # assumption: AdamW, betas (0.9, 0.999)
    return torch.optim.AdamW(
        module.parameters(), lr=lr, betas=(0.9, 0.999), weight_decay=weight_decay, fused=True)


def build_base(folder: str = "runs/base", *, steps: int = 300, batch: int = 128) -> str:
    """The embedded base policy as a Hugging Face folder: supervised on demonstrations with errors.

    Built once; from then on it is loaded as any --model is.
    """
    if os.path.isfile(os.path.join(folder, "config.json")):
        return folder
    tokenizer, rng = rollout.task_tokenizer(), random.Random(0)
    torch.manual_seed(0)
    eos = tokenizer.eos_token_id
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=192, num_hidden_layers=4,
        num_attention_heads=4, max_position_embeddings=256, bos_token_id=None, eos_token_id=eos,
        pad_token_id=eos, initializer_range=0.08))  # 0.02 is too small at this width: not learned
    problems = rollout.task_problems()
    opt = optimizer(model, 3e-3, 0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 3e-3, total_steps=steps, pct_start=0.1)
    bar = tqdm(range(steps), desc="base policy (once)", dynamic_ncols=True)
    for _ in bar:
        prompts = [rng.choice(problems).prompt for _ in range(batch)]
        replies = [rollout.demonstration(prompt, 0.1, rng) for prompt in prompts]
        tokens = tokenizer([p + r for p, r in zip(prompts, replies)], padding=True,
                           return_tensors="pt").input_ids
        length = torch.tensor([len(p) + len(r) for p, r in zip(prompts, replies)])
        at = torch.arange(tokens.shape[1])
        learned = (at >= len(prompts[0])) & (at < length[:, None])
        loss = model(input_ids=tokens, labels=tokens.masked_fill(~learned, -100)).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step(), opt.zero_grad(), schedule.step()
        bar.set_postfix(loss=f"{loss.item():.3f}")
    write_folder(folder, tokenizer, model)
    return folder


def write_folder(folder: str, tokenizer: PreTrainedTokenizerBase, model: nn.Module,
                 state_dict: dict[str, Tensor] | None = None) -> None:
    """A Hugging Face folder, written under a temporary name; what stands there goes last."""
    for leftover in (f"{folder}.writing", f"{folder}.old"):
        shutil.rmtree(leftover, ignore_errors=True)
    model.save_pretrained(f"{folder}.writing", state_dict=state_dict)
    tokenizer.save_pretrained(f"{folder}.writing")
    if os.path.isdir(folder):
        os.rename(folder, f"{folder}.old")
    os.rename(f"{folder}.writing", folder)
    shutil.rmtree(f"{folder}.old", ignore_errors=True)


# ---------------------------------------------------------------------------- forward, by parts


def autocast(run: Run) -> contextlib.AbstractContextManager:
    """bfloat16 compute where --compute-dtype asks for it; parameters stay as they are."""
    if run.cfg.compute_dtype == "float32" or run.size > 1:  # FSDP2's own policy casts
        return contextlib.nullcontext()
    return torch.autocast(run.device.type, getattr(torch, run.cfg.compute_dtype))


@contextlib.contextmanager
def updating(run: Run, module: nn.Module) -> Iterator[None]:
    """Training mode where activations are recomputed, else as always."""
    module.train(run.cfg.checkpoint_activations)
    yield
    module.eval()


def actor_logp(run: Run, b: Batch, *, entropy: bool = False) -> Tensor:
    """log π(a_t|s_t) [B, T], or with entropy both, [2, B, T]."""
    with autocast(run):
        out = run.actor(b.tokens, b.attention, b.mask, entropy, b.routing)
    return out if entropy else out[0]


def critic_value(run: Run, critic: Critic, b: Batch) -> Tensor:
    """V(s_t) [B, T]."""
    with autocast(run):
        return response(critic(b.tokens, b.attention), b.mask.shape[1])


def micro_batches(run: Run, b: Batch, rows: Tensor) -> Iterator[tuple[Tensor, Batch]]:
    """Yields (rows, part): this rank's share of the given rows in groups of similar length, at most
    token_budget padded tokens each (or one row), cut to their own width."""
    T, attention = b.mask.shape[1], b.attention[rows]
    prompt, answer = attention[:, :-T].sum(1).tolist(), attention[:, -T:].sum(1).tolist()
    for group in length_groups(prompt, answer, run.cfg.token_budget, run.size):
        share = rows[torch.tensor(group[run.rank :: run.size], device=rows.device)]
        yield share, take(b, share)


@torch.no_grad()
def score(run: Run, b: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """log π_old and entropy [B, T], and V of each critic [critics, B, T], in micro-batches; 0 where
    masked."""
    found = critics(run)
    out = b.logp_roll.new_zeros(2 + len(found), *b.mask.shape)
    for rows, part in micro_batches(run, b, torch.arange(len(b.mask), device=run.device)):
        T = part.mask.shape[1]
        out[:2, rows, :T] = actor_logp(run, part, entropy=True)
        for i, (critic, _) in enumerate(found, start=2):
            out[i, rows, :T] = torch.where(part.mask, critic_value(run, critic, part), 0.0)
    if run.size > 1:
        dist.all_reduce(out)  # each rank has filled in its own rows
    return out[0], out[1], out[2:]


def critics(run: Run) -> list[tuple[Critic, torch.optim.Optimizer]]:
    """The critics with a value head and their optimizers: none, one, or AsyPPO's two."""
    pairs = (run.critic, run.critic_opt), (run.second, run.second_opt)
    return [(critic, opt) for critic, opt in pairs if critic]


# -------------------------------------------------------------------------------------- values


def step_starts(run: Run, b: Batch) -> Tensor:
    """Where steps start [B, T]: after --delimiter, or every sixteenth of --max-response."""
    width, text = -(-run.cfg.max_response // 16), run.cfg.delimiter
    if not text:
        return genac.segment_starts(b.mask, width=width)
    ids = genac.delimiter_ids(run.tokenizer, text.encode().decode("unicode_escape"))
    ends = genac.ends_by_delimiter(b.tokens[:, -b.mask.shape[1] :], ids)
    return genac.segment_starts(b.mask, ends, width=width)


def monte_carlo(run: Run, b: Batch, starts: Tensor, answers: list[str], k: int,
                rng: torch.Generator) -> Tensor:
    """Share right of k continuations of each state in starts [B, T], in row order: [N].

    answers: those to the B prompts. A continuation that makes its response longer than
    --max-response is wrong.
    """
    S, T = b.tokens.shape[1], b.mask.shape[1]
    rows, at = starts.cpu().nonzero(as_tuple=True)
    tokens, attention = b.tokens.cpu(), b.attention.cpu()
    prefixes = [tokens[i, : S - T + t][attention[i, : S - T + t]].tolist()
                for i, t in zip(rows.tolist(), at.tolist())]
    said = rollout.decode(run.tokenizer, tokens[:, -T:][rows],
                          attention[:, -T:][rows] & (torch.arange(T) < at[:, None]))
    known = [(text, answers[i]) for text, i in zip(said, rows.tolist())]

    def verify(text: str, known: tuple[str, str]) -> float:
        """The verdict on the whole response."""
        return rollout.VERIFIERS[run.cfg.verifier](known[0] + text, known[1])

    ids = torch.arange(len(at)).repeat_interleave(k)
    found = respond(run, prefixes, known, ids, rng, run.cfg.temperature, verify=verify)
    whole = at[found.prompt_id.cpu()] + found.mask.sum(1).cpu()
    right = (found.reward.cpu() > 0) & (whole <= run.cfg.max_response)
    return right[found.prompt_id.cpu().argsort(stable=True)].float().view(-1, k).mean(1)


def vine_value(run: Run, b: Batch, V: Tensor, rng: torch.Generator) -> tuple[Tensor, dict]:
    """V = 2p − 1 of each step's start, p by independent continuations, on the step's tokens
    (VinePPO, 2410.01679)."""
    b.starts, answers = step_starts(run, b), [run.problems[i].answer for i in b.prompt_id.tolist()]
    value = torch.zeros_like(b.logp_roll)
    p = monte_carlo(run, b, b.starts, answers, run.cfg.vine_k, rng)
    value[b.starts] = 2 * p.to(value) - 1
    return genac.spread(value, b.starts, b.mask), {"vine/continuations": run.cfg.vine_k * len(p)}


def tracker_value(run: Run, b: Batch, V: Tensor, rng: torch.Generator) -> tuple[Tensor, dict]:
    """2v̂ − 1, v̂ the mean of the prompt's Beta(1 + S, 1 + N − S), without this batch (SPO)."""
    # assumption: it starts at Beta(1, 1) and forgets as DAPS's counts do, not by the policy's drift
    ids = b.prompt_id.cpu()
    p = fuse(torch.full(ids.shape, 0.5), run.daps.successes[ids], run.daps.trials[ids], 2.0)
    run.daps.update(ids, b.reward.cpu() > 0)
    return torch.where(b.mask, (2 * p - 1).to(b.logp_roll)[:, None], 0.0), {}


def two_values(run: Run, b: Batch, V: Tensor, rng: torch.Generator) -> tuple[Tensor, dict]:
    """The mean of two critics; how far they disagree goes to b.value_std (AsyPPO)."""
    b.value_std = V.std(0)
    return V.mean(0), {"critic/disagreement": b.value_std[b.mask].mean().item()}


def generative_value(run: Run, b: Batch, V: Tensor, rng: torch.Generator) -> tuple[Tensor, dict]:
    """V of each segment's start as the generative critic words it (GenAC, stage 3), which then
    learns from its replies: one REINFORCE step on R_v = 1 − (r − v̂)²."""
    critic, T = run.generative, b.mask.shape[1]
    b.starts, r = step_starts(run, b), (b.reward > 0).float()
    if critic.success.value is None:
        critic.success.update(r)
    asked = [run.problems[i].prompt for i in b.prompt_id.tolist()]
    questions = [x if isinstance(x, str) else x[-1]["content"] for x in asked]
    seed = int(torch.randint(2**62, (), generator=rng))
    value, replies, stats = genac.ask(
        critic, questions, b.tokens[:, -T:], b.mask, b.starts, rollout.generate,
        torch.Generator(run.device).manual_seed(seed))
    stats |= genac.reinforce_backward(critic, replies, r[b.starts.nonzero()[:, 0]],
                                      token_budget=run.cfg.token_budget)
    norm = nn.utils.clip_grad_norm_(critic.model.parameters(), run.cfg.clip_norm).item()
    step_if_finite(run, "critic", run.generative_opt, norm)
    critic.success.update(r)
    return value, means("genac", stats) | {"genac/states": int(b.starts.sum()),
                                           "genac/grad_norm": norm}


VALUES = {  # (run, batch, V of the critics [critics, B, T], rng) -> value [B, T] or None, metrics
    "none": lambda run, b, V, rng: (None, {}),
    "critic": lambda run, b, V, rng: (V[0], {}),
    "critics": two_values,
    "vine": vine_value,
    "tracker": tracker_value,
    "generative": generative_value,
}


# -------------------------------------------------------------------------------------- a step


def train_step(run: Run) -> dict[str, float]:
    """One rollout batch and its updates (S3AC §3), -> metrics."""
    cfg, method, clock = run.cfg, run.method, Clock(run)
    rng = generator(cfg.seed, "train", run.step)
    batch, metrics = rollout_batch(run, rng)
    metrics |= clock("rollout")
    batch.logp_old, entropy, V = score(run, batch)
    batch.value, asked = VALUES[method.value](run, batch, V, rng)
    metrics |= asked | clock("value") if asked else {}  # else its time is that of the scores
    batch.advantage = ADVANTAGES[method.advantage](batch, cfg)
    batch.keep, mismatch = mismatch_mask(
        batch.logp_old, batch.logp_roll, batch.mask,
        token_range=(cfg.token_low, cfg.token_high), response_range=(0.0, cfg.response_high))
    metrics |= means("mismatch", mismatch) | describe(run, batch, entropy) | clock("score")
    if run.critic:  # assumption: before the actor; the advantages keep the values from before
        metrics |= update_critic(run, batch, rng) | clock("critic")
    with updating(run, run.actor):
        metrics |= update_actor(run, batch, rng) | clock("actor")
    run.step += 1
    bad = [name for name, n in run.nonfinite.items() if n >= 5]
    if bad:
        raise FloatingPointError(f"step {run.step}: the {bad[0]}'s gradient was not finite "
                                 f"{run.nonfinite[bad[0]]} times in a row")
    if cfg.show_every and (run.step - 1) % cfg.show_every == 0:
        tqdm.write(show_response(run, batch))
    return metrics | speeds(metrics, batch)


def rollout_batch(run: Run, rng: torch.Generator) -> tuple[Batch, dict[str, float]]:
    """Selected prompts, K responses each, verified. With K > 1, uniform groups are replaced.

    RuntimeError if no group is mixed in cfg.filter_rounds rounds (or all prompts).
    """
    cfg, k = run.cfg, run.method.k
    refresh_sampler(run)
    n, unused = cfg.rollout_batch // k, torch.randperm(len(run.prompts), generator=rng)
    sampled, kept, metrics = [], [], {}
    filtered = run.method.filter and k > 1
    for _ in range(cfg.filter_rounds if filtered else 1):
        missing = n - sum(len(b.reward) for b in kept) // k
        if missing <= 0 or not len(unused):
            break
        wanted = -(-missing // run.size) * run.size  # an even share for every rank
        ids, report = select(run, unused, min(wanted, len(unused)), rng)
        unused = unused[~torch.isin(unused, ids)]
        metrics = {name: metrics.get(name, 0) + x for name, x in report.items()}
        sampled.append(respond(
            run, run.prompts, run.answers, ids.repeat_interleave(k), rng, cfg.temperature))
        mixed = mixed_groups(sampled[-1].reward, sampled[-1].prompt_id) if filtered else ...
        kept.append(take(sampled[-1], mixed))
    everything = concatenate(sampled)
    success = everything.reward > 0
    if run.method.selection == "daps":  # assumption: outcomes of dropped groups count too
        run.daps.update(everything.prompt_id.cpu(), success.cpu())
    if run.streak is not None:
        run.streak = uniform_streak(run.streak, everything.reward.cpu(), everything.prompt_id.cpu())
    batch = concatenate(kept)
    usable = min(len(batch.reward) // k, n) // run.size * run.size * k
    if not usable:
        raise RuntimeError(
            f"step {run.step + 1}: every group of {k} was all right or all wrong, in "
            f"{len(sampled)} rounds of prompts (success {success.float().mean():.2f}): nothing to "
            "learn from")
    batch = take(batch, torch.arange(usable, device=run.device))
    return batch, metrics | {
        "rollout/success": success.float().mean().item(),
        "rollout/length": everything.mask.sum(1).float().mean().item(),
        "rollout/truncated": everything.truncated.float().mean().item(),
        "rollout/trajectories": usable, "rollout/sampled": len(success),
        "rollout/discarded": len(success) - usable,
        "prompts/sampled": everything.prompt_id.tolist(), "prompts/right": success.int().tolist(),
        "prompts/trained": batch.prompt_id.tolist()}


def select(run: Run, unused: Tensor, n: int, rng: torch.Generator) -> tuple[Tensor, dict]:
    """n ids out of the unused ones, which are shuffled: the first ones, or a choice by difficulty.
    """
    how = run.method.selection
    if how == "uniform":
        return unused[:n], {}
    if how == "greso":  # Zheng et al. 2025: by what the prompt's last groups were, no critic
        chosen, _ = accept(greso_accept_prob(run.streak[unused]), n, rng)
        return unused[chosen], {}
    # assumption: candidates are a random multiple of the prompts needed, not the whole data set
    ids = unused[: n * run.cfg.candidates]
    value = initial_values(run, ids)
    if not value.isfinite().all():
        raise FloatingPointError(f"step {run.step + 1}: the critic's V(s_0) is not finite")
    if how == "pcl":  # Gao et al. 2025: the candidates nearest to even odds
        return ids[nearest_half(value, n)], {}
    chosen, report = run.daps.select(ids, value, n, run.step, rng), run.daps.report
    names = ("offered", "accepted", "filled")
    return chosen, {f"daps/{name}": float(report[name]) for name in names}


@torch.no_grad()
def initial_values(run: Run, ids: Tensor) -> Tensor:
    """V(s_0) [n] of prompts, before anything is generated."""
    lists = [run.prompts[i] for i in ids.tolist()]
    per_pass = max(1, run.cfg.token_budget // max(map(len, lists))) * run.size
    values = torch.zeros(len(lists), device=run.device)
    for start in range(0, len(lists), per_pass):
        rows = list(range(start, min(start + per_pass, len(lists)))[run.rank :: run.size])
        tokens, attention = rollout.left_pad(  # a rank without rows runs along with another's
            [lists[i] for i in rows or [start]], run.tokenizer.pad_token_id, run.device)
        with autocast(run):
            value = run.critic(tokens, attention)[:, -1]
        values[rows] = value[: len(rows)].float()
    if run.size > 1:
        dist.all_reduce(values)
    return values.cpu()


def respond(run: Run, prompts: list[list[int]], answers: list, ids: Tensor, rng: torch.Generator,
            temperature: float, model: nn.Module | None = None,
            verify: Callable[[str, Any], float] | None = None) -> Batch:
    """Responses to prompts[ids], each rank its share, verified; the whole batch on every rank."""
    cfg, share = run.cfg, ids[run.rank :: run.size]
    # the same draw on every rank keeps rng in step; the rank makes the samples differ
    seed = int(torch.randint(2**62, (), generator=rng)) + run.rank
    with autocast(run) if run.sampler is None else contextlib.nullcontext():
        batch = collect(
            model or run.sampler or run.actor.model, run.tokenizer,
            [prompts[i] for i in share], [answers[i] for i in share], share,
            verify or rollout.VERIFIERS[cfg.verifier], eos_id=run.eos_id,
            max_new_tokens=cfg.max_response, temperature=temperature,
            generator=torch.Generator(run.device).manual_seed(seed), max_rows=cfg.max_rows,
            sampler=rollout.SAMPLERS[cfg.sampler], routing=None if model else run.routing)
    if run.size == 1:
        return batch
    batches = [None] * run.size
    dist.all_gather_object(batches, to(batch, "cpu"))
    return to(concatenate(batches), run.device)


def to(b: Batch, device: torch.device | str) -> Batch:
    """The batch on another device."""
    found = {f.name: getattr(b, f.name) for f in fields(Batch)}
    return Batch(**{name: x.to(device) for name, x in found.items() if x is not None})


@torch.no_grad()
def refresh_sampler(run: Run) -> None:
    """Copies the actor's parameters, put together from all ranks, to the model that samples.

    A whole copy per rank, so that ranks may sample for different lengths of time: a forward pass of
    the sharded model waits for the others in every layer.
    """
    if run.sampler:
        for target, p in zip(run.sampler.parameters(), run.actor.model.parameters()):
            target.copy_(gathered(p))


def gathered(p: Tensor) -> Tensor:
    """The whole tensor of a sharded parameter; every rank must ask."""
    return p.full_tensor() if hasattr(p, "full_tensor") else p


def update_critic(run: Run, b: Batch, rng: torch.Generator) -> dict[str, float]:
    """Fits each critic on its own responses: one on all of them, AsyPPO's two on half of them each.
    """
    found, metrics = critics(run), {}
    for i, (critic, opt) in enumerate(found):
        own = take(b, torch.arange(i, len(b.mask), len(found), device=run.device))
        with updating(run, critic):
            metrics = fit_critic(run, critic, opt, own, rng) | metrics  # those of the first stay
    return metrics


def fit_critic(run: Run, critic: Critic, opt: torch.optim.Optimizer, b: Batch,
               rng: torch.Generator) -> dict[str, float]:
    """cfg.critic_epochs epochs of the clipped squared error against R (λ_critic = 1)."""
    cfg, stats, norms, skipped = run.cfg, {}, [], 0
    for _ in range(cfg.critic_epochs):
        # assumption: as many mini-batches per epoch as the actor has
        for rows in mini_batches(run, b, rng):
            n_tokens = b.mask[rows].sum()
            for _, part in micro_batches(run, b, rows):
                loss, s = value_loss(
                    critic_value(run, critic, part), part.reward, part.mask, n_tokens,
                    old_value=part.value, clip=cfg.value_clip or None)
                (loss * run.size).backward()  # FSDP takes the mean over ranks
                add(stats, s)
            norm = clip_critic_grad_(critic, cfg.critic_clip_norm, split=cfg.critic_clip_split)
            skipped += not step_if_finite(run, "critic", opt, norm["total"])
            norms.append(norm)
    picked = {name: stats[name] for name in ("loss", "clip_share")}
    out = means("critic", global_sum(run, picked)) | {
        f"critic/grad_{name}": mean_finite([x[name] for x in norms]) for name in norms[0]}
    parts = ("head", "backbone") if cfg.critic_clip_split else ("total",)
    over = [max(x[part] for part in parts) > cfg.critic_clip_norm for x in norms]
    return out | {
        "critic/grad_clipped_share": mean_finite(over), "critic/skipped_nonfinite": skipped}


def update_actor(run: Run, b: Batch, rng: torch.Generator) -> dict[str, float]:
    """One epoch of the policy loss in cfg.mini_batches optimizer steps."""
    cfg, stats, norms, skipped = run.cfg, {}, [], 0
    for rows in mini_batches(run, b, rng):
        # masked tokens leave the denominator too
        keep = b.keep[rows]
        n = Counts(keep.sum(), b.mask[rows].any(1).sum(), keep[b.reward[rows] > 0].sum())
        if not n.tokens:  # nothing to learn, and no step on old moments
            continue
        for _, part in micro_batches(run, b, rows):
            loss, s = LOSSES[run.method.loss](actor_logp(run, part), part, n, cfg)
            (loss * run.size).backward()  # FSDP takes the mean over ranks
            padded = part.tokens.numel()
            add(stats, s | {"padding": (padded - part.attention.sum(), padded)})
        norm = gathered(nn.utils.clip_grad_norm_(run.actor.parameters(), cfg.clip_norm)).item()
        skipped += not step_if_finite(run, "actor", run.actor_opt, norm)
        norms.append(norm)
    return means("actor", global_sum(run, stats)) | {
        "actor/grad_norm": mean_finite(norms),
        "actor/grad_clipped_share": mean_finite([x > cfg.clip_norm for x in norms]),
        "actor/skipped_nonfinite": skipped}


def mini_batches(run: Run, b: Batch, rng: torch.Generator) -> list[Tensor]:
    """The rows of the batch, shuffled, in at most cfg.mini_batches parts that ranks can share."""
    order = torch.randperm(len(b.mask), generator=rng).to(run.device)
    each = -(-len(order) // (run.cfg.mini_batches * run.size)) * run.size
    return list(order.split(each))


def step_if_finite(run: Run, name: str, opt: torch.optim.Optimizer, norm: float) -> bool:
    """An optimizer step, left out if the gradient is not finite; whether it was made."""
    finite = math.isfinite(norm)
    if finite:
        opt.step()
    run.nonfinite[name] = 0 if finite else run.nonfinite[name] + 1
    opt.zero_grad()
    return finite


def generator(seed: int, stage: str, step: int = 0) -> torch.Generator:
    """Random numbers of one step of one stage, a function of these three alone."""
    sequence = np.random.SeedSequence([seed, ("train", "pool", "evaluate").index(stage), step])
    return torch.Generator().manual_seed(int(sequence.generate_state(1, np.uint64)[0] >> 1))


# ------------------------------------------------------------------------------------- metrics


class Clock:
    """clock("phase") -> seconds since the last call, and peak memory (GPU: since that call too)."""

    def __init__(self, run: Run) -> None:
        self.device, self.last = run.device, time.perf_counter()

    def __call__(self, name: str) -> dict[str, float]:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        seconds, self.last = now - self.last, now
        return {f"time/{name}": seconds, f"memory/{name}_gib": peak_memory(self.device)}


def add(total: dict, stats: dict) -> None:
    """Adds (sum, count) pairs of a micro-batch to the total."""
    for name, (s, n) in stats.items():
        have = total.get(name, (0.0, 0.0))
        total[name] = (have[0] + s, have[1] + n)


def global_sum(run: Run, stats: dict) -> dict:
    """(sum, count) pairs added up over all ranks."""
    if run.size == 1:
        return stats
    flat = torch.tensor([float(x) for pair in stats.values() for x in pair], dtype=torch.float64)
    dist.all_reduce(flat)
    return dict(zip(stats, flat.view(-1, 2).tolist()))


def means(prefix: str, stats: dict) -> dict[str, float]:
    """(sum, count) pairs -> named means, NaN without a count."""
    return {f"{prefix}/{name}": float(s) / float(n) if float(n) else math.nan
            for name, (s, n) in stats.items()}


def speeds(metrics: dict, b: Batch) -> dict[str, float]:
    """Trainable tokens per second of each phase, and the peak memory of all."""
    n, phases = int(b.mask.sum()), [x[5:] for x in metrics if x.startswith("time/")]
    out = {f"speed/{phase}": n / metrics[f"time/{phase}"] for phase in phases}
    return out | {"memory/peak_gib": max(metrics[f"memory/{phase}_gib"] for phase in phases)}


def mean_finite(values: list) -> float:
    """The mean of those that are finite, NaN without any."""
    finite = [x for x in values if math.isfinite(x)]
    return float(np.mean(finite)) if finite else math.nan


def describe(run: Run, b: Batch, entropy: Tensor) -> dict[str, float]:
    """What the batch looks like before the updates."""
    n, A = b.mask.sum(), b.advantage[b.mask]
    out = {
        "actor/entropy": (entropy[b.mask].sum() / n).item(),
        "mismatch/log_ratio_max": (b.logp_old - b.logp_roll)[b.mask].abs().max().item(),
        "advantage/mean": A.mean().item(), "advantage/std": A.std().item(),
    }
    if b.value is not None:
        R, V0 = b.reward, b.value[:, 0]
        out |= {
            "critic/explained_variance": explained_variance(b.value, R, b.mask),
            "critic/value_mean": (b.value[b.mask].sum() / n).item(),
            "critic/initial_value": V0.mean().item(),
            "critic/initial_error": (V0 - R).square().mean().item(),
        }
    return out


def peak_memory(device: torch.device) -> float:
    """GiB: of the GPU since the last call, elsewhere of the process since its start."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) / 2**30
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def memory_gib(
    config: PreTrainedConfig, cfg: Config, ranks: int = 1, cuda: bool = True
) -> dict[str, float]:
    """Computed peak memory per rank, by part, for a dense Llama-like config (transformers).

    states  parameters, gradients and two moments of actor and critic in float32, shared out
    copy    the whole model that samples       whole  what FSDP2 puts together at a time
    pass    activations of one micro-batch     cache  keys and values of all rows under way
    peak    states + copy + the larger of an update (whole + pass) and a rollout (cache)

    The factors 10 H + 4 I numbers per token and layer were fitted to the measured peaks of small
    models on a CPU, which a test repeats.
    """
    H, I = config.hidden_size, config.intermediate_size
    L, V = config.num_hidden_layers, config.vocab_size
    d = getattr(config, "head_dim", None) or H // config.num_attention_heads
    kv = config.num_key_value_heads * d
    layer = 2 * H * (config.num_attention_heads * d + kv) + 3 * H * I
    outer = V * H * (1 if config.tie_word_embeddings else 2)
    n, bf16 = L * layer + outer, cfg.compute_dtype == "bfloat16"
    tokens = max(cfg.token_budget, cfg.max_prompt + cfg.max_response)
    active = 2 * L * H + 10 * H + 4 * I if cfg.checkpoint_activations else L * (10 * H + 4 * I)
    logits = min(tokens * V, 2**27 if cuda else 2**21)  # linear_token_logp's chunk
    wide = 2 if cfg.rollout_dtype else 4
    rows = min(cfg.max_rows, -(-cfg.rollout_batch // ranks))
    gib = {
        "states": 2 * 16 * n / ranks,
        "copy": n * wide if cfg.rollout_dtype or ranks > 1 else 0,
        "whole": (outer + 2 * layer) * (2 if bf16 else 4) if ranks > 1 else 0,
        "pass": tokens * active * (2.35 if bf16 else 4) + 2 * logits * (2 if bf16 else 4),
        "cache": rows * (2 * L * kv * (cfg.max_prompt + cfg.max_response) * wide + 3 * 4 * V),
    }
    gib["peak"] = gib["states"] + gib["copy"] + max(gib["whole"] + gib["pass"], gib["cache"])
    return {name: x / 2**30 for name, x in gib.items()}


def memory_table() -> None:
    """Prints the README's table: Qwen2.5's sizes × response length × GPUs, bf16 compute."""
    sizes = {"0.5B": (896, 4864, 24, 14, 2), "1.5B": (1536, 8960, 28, 12, 2),
             "7B": (3584, 18944, 28, 28, 4)}
    counts = (1, 2, 4, 8)
    heading = " | ".join(f"{n} GPU{'s' * (n > 1)}" for n in counts)
    print(f"| model | response | {heading} |\n|---|---|" + "---|" * len(counts))
    for name, (H, I, L, heads, kv) in sizes.items():
        config = LlamaConfig(
            hidden_size=H, intermediate_size=I, num_hidden_layers=L, num_attention_heads=heads,
            num_key_value_heads=kv, vocab_size=151936, tie_word_embeddings=name != "7B")
        for T in (3072, 8192, 16384):
            cfg = replace(Config(**PRESETS["qwen2.5-math-1.5b"]), max_response=T, max_rows=128)
            peaks = [memory_gib(config, cfg, n)["peak"] for n in counts]
            print(f"| {name} | {T:,} | " + " | ".join(f"{x:.0f}" for x in peaks) + " |")


def show_response(run: Run, b: Batch, pieces: int = 12) -> str:
    """One response of the batch as text, V(s_t) before each of its pieces."""
    i = int(b.mask.sum(1).argmax())
    n, T = int(b.mask[i].sum()), b.mask.shape[1]
    tokens = b.tokens[i, -T:][b.mask[i]].tolist()
    cuts = sorted({round(n * j / pieces) for j in range(pieces + 1)})
    text = ""
    for start, stop in zip(cuts, cuts[1:]):
        value = f"⟨{b.value[i, start]:+.2f}⟩" if b.value is not None else "·"
        text += value + run.tokenizer.decode(tokens[start:stop])
    prompt = run.tokenizer.decode(b.tokens[i, :-T][b.attention[i, :-T]])
    return f"step {run.step}  {prompt[-300:]} {text}  R = {b.reward[i]:+.0f}"


def evaluate(run: Run) -> dict[str, float]:
    """avg@k and pass@k on the held-out problems, in all and by level; length, share truncated."""
    cfg, n, k = run.cfg, len(run.eval_prompts), run.cfg.eval_k
    if not n:
        return {}
    refresh_sampler(run)
    ids = torch.arange(n).repeat_interleave(k)
    rng = generator(cfg.seed, "evaluate")
    answers = [p.answer for p in run.eval_problems]
    b = respond(run, run.eval_prompts, answers, ids, rng, cfg.eval_temperature)
    right = (b.reward[b.prompt_id.argsort(stable=True)] > 0).float().view(n, k).cpu()
    out = {f"eval/avg@{k}": right.mean().item(), f"eval/pass@{k}": right.amax(1).mean().item(),
           "eval/length": b.mask.sum(1).float().mean().item(),
           "eval/truncated": b.truncated.float().mean().item()}
    levels = [p.level for p in run.eval_problems]
    for level in sorted(set(levels) - {""}):
        rows = torch.tensor([x == level for x in levels])
        out[f"eval/{level}/avg@{k}"] = right[rows].mean().item()
        out[f"eval/{level}/pass@{k}"] = right[rows].amax(1).mean().item()
    return out


# --------------------------------------------------------------------------------------- files


def write_json(path: str, value: Any) -> None:
    """The value as indented JSON, under a temporary name first: path holds all of it or what was
    there before."""
    with open(path + ".writing", "w") as file:
        json.dump(value, file, indent=1)
    os.replace(path + ".writing", path)


def log(run: Run, metrics: dict[str, float]) -> None:
    """One line of metrics.jsonl; a number that is not finite is written as null."""
    if run.rank:
        return
    clean = {name: x if isinstance(x, list) or math.isfinite(x) else None
             for name, x in metrics.items()}
    with open(os.path.join(run.cfg.out, "metrics.jsonl"), "a") as file:
        file.write(json.dumps({"step": run.step, **clean}) + "\n")


def state_of(run: Run) -> dict[str, Tensor]:
    """All tensors of a checkpoint by name, themselves and not copies: parameters, AdamW's moments
    by the name of their parameter, the counts of prompts. Nothing else: tensors run no code."""
    state = {}
    generative = run.generative and run.generative.model
    for name, module, opt in (
            ("actor", run.actor, run.actor_opt), ("critic", run.critic, run.critic_opt),
            ("second", run.second, run.second_opt),
            ("generative", generative, run.generative_opt)):
        if module is None:
            continue
        state |= {f"{name}.{key}": x for key, x in module.state_dict().items()}
        for key, p in module.named_parameters():
            if not opt.state[p]:  # before the first step
                opt.state[p] = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p),
                                "exp_avg_sq": torch.zeros_like(p)}
            state |= {f"{name}_opt.{key}.{part}": x for part, x in opt.state[p].items()}
    if run.daps:
        state |= {f"daps.{key}": x for key, x in run.daps.state_dict().items()}
    if run.streak is not None:
        state["greso.streak"] = run.streak
    return state


def save(run: Run) -> str:
    """A checkpoint under a temporary name, then renamed; the last cfg.keep stay.

    Every rank calls it. OSError if it cannot be written; the one before is then as it was.
    """
    folder = os.path.join(run.cfg.out, "checkpoints")
    path = os.path.join(folder, f"step-{run.step:06d}")
    if os.path.isdir(path):
        return path
    try:
        if run.rank == 0:
            shutil.rmtree(path + ".writing", ignore_errors=True)
            os.makedirs(path + ".writing")
        wait(run)
        dcp.save(state_of(run), checkpoint_id=path + ".writing", no_dist=run.size == 1)
        if run.rank == 0:
            write_json(os.path.join(path + ".writing", "state.json"), {
                "step": run.step, "before": run.before, "nonfinite": run.nonfinite,
                "ranks": run.size,
                "actor_success": run.generative and run.generative.success.value})
            os.rename(path + ".writing", path)
    except (OSError, dcp.api.CheckpointException) as error:
        raise OSError(f"could not write {path}: {str(error).splitlines()[-1]}; "
                      f"last checkpoint: {(checkpoints(run.cfg.out) or ['none'])[-1]}") from None
    wait(run)
    if run.rank == 0:
        for old in checkpoints(run.cfg.out)[: -run.cfg.keep]:
            shutil.rmtree(old)
    return path


def checkpoints(out: str) -> list[str]:
    """Whole checkpoints of a run folder, oldest first."""
    folder = os.path.join(out, "checkpoints")
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return [os.path.join(folder, x) for x in sorted(names) if re.fullmatch(r"step-\d{6}", x)]


def wait(run: Run) -> None:
    """Until every rank is here."""
    if run.size > 1:
        dist.barrier()


class PlainReader(dcp.FileSystemReader):
    """Reads a checkpoint whose index names nothing but the index's own classes: torch reads tensors
    with weights_only, but the index with a pickle that could call anything."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.metadata.Metadata:
        """The index, or pickle.UnpicklingError."""
        with open(self.path / ".metadata", "rb") as file:
            metadata = PlainUnpickler(file).load()
        metadata.storage_meta = metadata.storage_meta or dcp.metadata.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class PlainUnpickler(pickle.Unpickler):
    """Knows tensor descriptions and their places in files, nothing else."""

    KNOWN = {
        "torch.distributed.checkpoint.metadata": {
            "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
            "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"},
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch.serialization": {"_get_layout"}, "pathlib": {"PosixPath", "WindowsPath"},
        "torch": {"Size", "float64", "float32", "bfloat16", "float16", "int64", "bool", "uint8"},
    }

    def find_class(self, module: str, name: str) -> Any:
        """The class, or pickle.UnpicklingError if it is not one of KNOWN."""
        if name not in self.KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"expected an index of tensors, found {module}.{name}")
        return super().find_class(module, name)


def load(run: Run) -> None:
    """Restores the last checkpoint of the run folder; metrics written after it are dropped."""
    found = checkpoints(run.cfg.out)
    if not found:
        raise ValueError(f"--resume: expected a checkpoint in {run.cfg.out}/checkpoints, "
                         "found none")
    with open(os.path.join(found[-1], "state.json")) as file:
        saved = json.load(file)
    state = state_of(run)
    try:
        dcp.load(state, storage_reader=PlainReader(found[-1]), no_dist=run.size == 1)
    except (dcp.api.CheckpointException, RuntimeError, pickle.UnpicklingError) as error:
        raise ValueError(f"--resume: expected a checkpoint of this model in {found[-1]}, found "
                         f"another or damage: {str(error).splitlines()[-1]}") from None
    run.step, run.before, run.nonfinite = saved["step"], saved["before"], saved["nonfinite"]
    if run.daps:
        run.daps.load_state_dict({key: state[f"daps.{key}"] for key in run.daps.state_dict()})
    if run.generative:
        run.generative.success.value = saved["actor_success"]
    if run.cfg.steps < run.step:
        raise ValueError(f"--steps: expected {run.step} or more, which the run has done, "
                         f"found {run.cfg.steps}")
    if saved["ranks"] != run.size:
        print(f"written by {saved['ranks']} ranks, resumed on {run.size}: parameters, moments and "
              "counts are exact, the samples from here on are others")
    if run.rank == 0:
        cut_metrics(run)


def cut_metrics(run: Run) -> None:
    """Drops the lines of metrics.jsonl after run.step, and one that a kill left torn."""
    path = os.path.join(run.cfg.out, "metrics.jsonl")
    with open(path) as file:
        rows = [(line, json.loads(line)) for line in file if line.endswith("}\n")]
    lines = [line for line, row in rows if row["step"] <= run.step
             and (row["step"] == 0 or "rollout/success" in row)]  # the last evaluation comes again
    with open(path + ".writing", "w") as file:
        file.writelines(lines)
    os.replace(path + ".writing", path)


def whole_state(run: Run, module: nn.Module | None) -> dict[str, Tensor]:
    """The module's tensors put together from all ranks, on the CPU of rank 0; {} on the others."""
    state = {}
    for key, x in (module.state_dict() if module else {}).items():
        whole = gathered(x)
        if run.rank == 0:
            state[key] = whole.cpu()
    return state


def export(run: Run) -> None:
    """Actor and critic as Hugging Face folders in the run folder, put together from all ranks."""
    for name, module in (("actor", run.actor), ("critic", run.critic), ("second", run.second)):
        folder, state = os.path.join(run.cfg.out, name), whole_state(run, module)
        if run.rank == 0 and name == "actor":
            write_folder(folder, run.tokenizer, model=run.actor.model, state_dict={
                key.removeprefix("model."): x for key, x in state.items()})
        elif run.rank == 0 and module:
            module.save_pretrained(folder, state)
    if run.rank == 0 and run.generative:
        write_folder(os.path.join(run.cfg.out, "critic"), run.generative.tokenizer,
                     run.generative.model)
    wait(run)


# --------------------------------------------------------------------------------------- stages


def make_pool(run: Run) -> TrajectoryPool:
    """Trajectories of policies of several strengths on the training prompts (S3AC §3.3)."""
    cfg = run.cfg
    if cfg.pool:
        return TrajectoryPool.open(cfg.pool)
    folder = os.path.join(cfg.out, "pool")
    if os.path.isdir(folder) and len(TrajectoryPool(folder)):
        raise ValueError(f"--out: expected no pool there yet, found the pool of an unfinished run; "
                         f"--pool {folder} uses it, another --out begins anew")
    wait(run)
    pool = TrajectoryPool(folder) if run.rank == 0 else None
    # assumption: a lower temperature stands in for a stronger policy where no later one exists yet
    temperatures = [float(x) for x in cfg.pool_temperatures.split(",")]
    paths = ["", *filter(None, cfg.pool_models.split(","))]  # empty: the run's own policy
    policies = [(path, t) for path in paths for t in temperatures]
    total = cfg.pool_size * len(policies)
    if run.method.pretrain == "initial":
        policies = [("", cfg.temperature)]
    each, rng = total // len(policies), generator(cfg.seed, "pool")
    bar = tqdm(total=total, desc="trajectory pool", disable=run.rank > 0)
    for label, (path, temperature) in enumerate(policies):
        tqdm.write(f"policy {label}: {path or cfg.model or 'base'} at temperature {temperature}")
        model = pretrained(
            AutoModelForCausalLM, path, dtype=getattr(torch, cfg.rollout_dtype or cfg.dtype),
            trust_remote_code=cfg.trust_remote_code).to(run.device) if path else None
        for start in range(0, each, 8 * cfg.max_rows * run.size):
            n = min(8 * cfg.max_rows * run.size, each - start)
            ids = torch.randint(len(run.prompts), (n,), generator=rng)
            batch = respond(run, run.prompts, run.answers, ids, rng, temperature, model)
            if pool is not None:
                pool.append(batch, label)
            bar.update(n)
            bar.set_postfix(policy=label, success=f"{(batch.reward > 0).float().mean():.2f}")
    bar.close()
    wait(run)
    return TrajectoryPool.open(folder)


def prepare_critic(run: Run) -> None:
    """The method's critic or critics with their optimizers: from --critic, else as the actor is."""
    cfg = run.cfg
    paths = [*filter(None, cfg.critic.split(","))]
    if run.method.value == "generative":
        return prepare_generative(run, paths[0])
    start = cfg.model or build_base()
    run.critic, run.critic_opt = new_critic(run, paths[0] if paths else start, cfg.seed)
    if run.method.value == "critics":
        run.second, run.second_opt = new_critic(run, paths[1] if paths else start, cfg.seed + 1)


def new_critic(run: Run, path: str, seed: int) -> tuple[Critic, torch.optim.Optimizer]:
    """A critic from a folder, of a critic or of a language model, and its optimizer."""
    cfg = run.cfg
    torch.manual_seed(seed)  # the head's weights
    critic = pretrained(Critic, path, dtype=getattr(torch, cfg.dtype),
                        trust_remote_code=cfg.trust_remote_code)
    words, known = len(run.tokenizer), critic.backbone.get_input_embeddings().num_embeddings
    if known < words:
        raise ValueError(f"--critic: expected the actor's vocabulary of {words} tokens, "
                         f"found {known}")
    critic = shard(critic, critic.backbone.config, cfg, run.size, run.device, critic.head)
    return critic, optimizer(critic, cfg.critic_lr, cfg.weight_decay)


def prepare_generative(run: Run, path: str) -> None:
    """GenAC's critic: a language model, whole on every rank, asked in its own words."""
    cfg = run.cfg
    how = dict(trust_remote_code=cfg.trust_remote_code)
    tokenizer = pretrained(AutoTokenizer, path, **how)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = pretrained(AutoModelForCausalLM, path, dtype=getattr(torch, cfg.dtype), **how)
    size = sum(p.numel() for p in run.actor.model.parameters()) / 1e6
    embedded = not cfg.data or cfg.verifier == "chain"
    run.generative = genac.GenCritic(
        model.eval().to(run.device), tokenizer, eos_ids(model, tokenizer), genac.RunningSuccess(),
        f"{size:.1f}M", genac.COMPACT if embedded else genac.ENGLISH, context=cfg.context,
        max_new_tokens=cfg.reply)
    run.generative_opt = optimizer(model, cfg.critic_lr, 0.0)


def pretrain_critic(run: Run) -> None:
    """Value pretraining on a pool; the critic is kept in critic-pretrained/. AsyPPO's two learn
    from half of the trajectories each."""
    cfg = run.cfg
    pool = make_pool(run)
    print("\nshare correct (trajectories) by length and policy\n"
          + format_coverage(coverage_table(pool.index)) + "\n")
    n = min(cfg.pretrain_size or len(pool), len(pool))
    rows = (pool.sample(n, seed=cfg.seed) if run.method.pretrain == "coverage" else
            np.sort(np.random.default_rng(cfg.seed).permutation(len(pool))[:n]))
    for i, (critic, _) in enumerate(critics(run)):
        fit_pool(run, critic, pool, rows[i :: len(critics(run))], ("", "-second")[i])


def fit_pool(run: Run, critic: Critic, pool: TrajectoryPool, rows: np.ndarray, name: str) -> None:
    """Value pretraining of one critic on the pool's rows."""
    cfg, dtype = run.cfg, getattr(torch, run.cfg.compute_dtype)
    with updating(run, critic):
        stats = pretrain(
            critic, pool, rows, epochs=cfg.pretrain_epochs,
            batch_size=cfg.pretrain_batch, token_budget=cfg.token_budget, peak=cfg.pretrain_lr,
            final=cfg.pretrain_lr_final, max_norm=cfg.critic_clip_norm,
            split=cfg.critic_clip_split, freeze=cfg.pretrain_freeze, seed=cfg.seed,
            progress=run.rank == 0, rank=run.rank, world=run.size,
            autocast_dtype=dtype if dtype != torch.float32 and run.size == 1 else None)
    state = whole_state(run, critic)
    if run.rank == 0:
        write_json(os.path.join(cfg.out, f"pretrain{name}.json"), stats)
        critic.save_pretrained(os.path.join(cfg.out, f"critic-pretrained{name}"), state)
    if not stats["ev_after"] > 0.02:
        print("warning: the critic explains next to nothing of the returns on held-out prompts; a "
              "larger pool (--pool-size), more epochs or another --pretrain-lr may help")
    print(f"critic: loss {stats['loss_first']:.3f} → {stats['loss_last']:.3f} (first and last 20 "
          f"steps), EV on held-out prompts {stats['ev_before']:.2f} → {stats['ev_after']:.2f}, "
          f"{stats['clip_share']:.0%} of the steps clipped\n")


def train(run: Run) -> None:
    """Steps up to cfg.steps, with metrics, evaluations, checkpoints; Ctrl-C ends after a step."""
    cfg = run.cfg
    bar = tqdm(total=cfg.steps, initial=run.step, desc=cfg.method, disable=run.rank > 0)
    with bar, ctrl_c(run):
        while run.step < cfg.steps:
            try:
                metrics = train_step(run)
            except FloatingPointError as error:
                raise FloatingPointError(f"{error}; checkpoint {save(run)}") from None
            if cfg.eval_every and run.step % cfg.eval_every == 0 and run.step < cfg.steps:
                metrics |= evaluate(run)
            log(run, metrics)
            bar.update()
            bar.set_postfix(
                success=f"{metrics['rollout/success']:.2f}",
                length=f"{metrics['rollout/length']:.0f}",
                EV=f"{metrics.get('critic/explained_variance', math.nan):.2f}",
                clip=f"{metrics.get('actor/clip_share', math.nan):.3f}")
            if cfg.save_every and run.step % cfg.save_every == 0:
                save(run)
            if global_sum(run, {"stop": (float(run.stop), 1.0)})["stop"][0]:
                save(run)
                raise KeyboardInterrupt


@contextlib.contextmanager
def ctrl_c(run: Run) -> Iterator[None]:
    """SIGINT and SIGTERM ask for a stop after the step, since half a step cannot be resumed.

    A second Ctrl-C stops at once; not under torchrun, which passes the first one on a second time.
    """

    def ask(signum: int, frame: Any) -> None:
        """The first signal is noted; a second Ctrl-C raises."""
        if signum == signal.SIGINT and run.stop and run.size == 1:
            raise KeyboardInterrupt
        run.stop = True
        print("\nstopping after this step", file=sys.stderr)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def finish(run: Run) -> int:
    """Evaluation after training, export, the last lines. Returns the exit status."""
    cfg, key = run.cfg, f"eval/avg@{run.cfg.eval_k}"
    save(run)
    after = evaluate(run)
    log(run, after)
    export(run)
    if run.rank == 0:
        write_json(os.path.join(cfg.out, "result.json"), {"before": run.before, "after": after})
    if not after:
        print(f"done, no held-out problems to evaluate on; files in {cfg.out}")
        return 0
    print(f"\n{'held out':28}{'before':>8}{'after':>8}")
    for name in after:
        print(f"{name[5:]:28}{run.before[name]:8.3f}{after[name]:8.3f}")
    reached = cfg.target <= after[key]
    print(f"success {after[key]:.3f} ({after[key] - run.before[key]:+.3f})"
          + ("" if reached else f", below the target {cfg.target}") + f"; files in {cfg.out}")
    return 0 if reached else 1


def start(cfg: Config, resumed: bool) -> Run:
    """All up to the first step: base policy, evaluation, pool and pretraining; or a resume."""
    run = setup(cfg)
    os.makedirs(cfg.out, exist_ok=True)
    k, needs_critic = run.method.k, run.method.value in ("critic", "critics", "generative")
    if cfg.rollout_batch // k > len(run.prompts):
        print(f"{len(run.prompts)} problems: a step has at most {len(run.prompts) * k} "
              f"trajectories and not {cfg.rollout_batch}")
    if needs_critic:
        prepare_critic(run)
    if resumed:
        load(run)
        return run
    leftover = os.path.join(cfg.out, "metrics.jsonl")  # of a run that never got to its first step
    if run.rank == 0 and os.path.exists(leftover):
        os.remove(leftover)
    run.before = evaluate(run)
    log(run, run.before)
    if needs_critic and not cfg.critic and run.method.pretrain != "none":
        pretrain_critic(run)
    if run.rank == 0:
        write_json(os.path.join(cfg.out, "config.json"), asdict(cfg))
    save(run)  # from here on the run can be resumed
    return run


# --------------------------------------------------------------------------------- comparisons
# Arms of a claim, each a set of flags beside --lr and --seed: two arms of a claim differ in what
# the claim is about. The learning rate of each arm is the best of the same grid on seed 0, at the
# last step; the figures are of other seeds at that rate.

COMPARISONS = {
    "single": ("--method s3ac", "--method s3ac-v0", "--method reinforce++",
               "--method flash-reinforce"),
    "group": ("--method s3ac --k 8", "--method grpo-x"),
    "daps": ("--method s3ac", "--method s3ac --selection uniform", "--method s3ac --k 8",
             "--method s3ac --k 8 --selection uniform"),
    "loss": ("--method s3ac", "--method s3ac --loss ppo-clip", "--method s3ac --loss dis",
             "--method reinforce++ --loss dis"),  # the last one: without a critic
    # one setting of DAPS at a time, at the learning rate of the first arm
    "sweep": ("--method s3ac", *(f"--method s3ac {x}" for x in (
        "--a-min 0.3", "--n-c 1", "--n-c 10", "--decay 0.9", "--daps-uniform 0 --daps-ramp 0"))),
}
PAPER = {  # success in the paper, per cent: 35B models, means of seven benchmarks
    ("single", "--method s3ac"): 80.9, ("single", "--method reinforce++"): 70.4,
    ("single", "--method flash-reinforce"): 67.4,
    ("group", "--method s3ac --k 8"): 80.5, ("group", "--method grpo-x"): 76.4,
    ("daps", "--method s3ac"): 76.94, ("daps", "--method s3ac --selection uniform"): 74.40,
    ("daps", "--method s3ac --k 8"): 80.49,
    ("daps", "--method s3ac --k 8 --selection uniform"): 79.04,
}


def run_all(jobs: dict[str, list[str]], folder: str, workers: int = 2) -> dict[str, dict]:
    """Runs `train.py FLAGS --out folder/NAME` for each job, `workers` side by side.

    A finished run is not done again, a cut one is resumed. Returns per name before and after (the
    evaluations), metrics (the lines of metrics.jsonl) and stopped (why a run ended early, or "").
    """
    done = [name for name in jobs if finished(os.path.join(folder, name))]
    waiting, running = [name for name in jobs if name not in done], {}
    os.makedirs(folder, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the runs end too
    bar = tqdm(total=len(jobs), initial=len(done), desc=folder, dynamic_ncols=True)
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                running[waiting[0]] = launch(jobs[waiting[0]], folder, waiting[0], workers)
                waiting.pop(0)
            time.sleep(0.2)
            for name in [x for x, process in running.items() if process.exitcode is not None]:
                last = settle(folder, name, running.pop(name).exitcode)
                bar.update(), tqdm.write(f"{name}: {last}")
    except BaseException:
        for process in running.values():  # each ends after its step, with a checkpoint
            process.terminate()
        for process in running.values():
            process.join()
        raise
    return {name: outcome(os.path.join(folder, name)) for name in jobs}


def finished(path: str) -> bool:
    """Whether a run has its result."""
    return os.path.exists(os.path.join(path, "result.json"))


def launch(flags: list[str], folder: str, name: str, workers: int) -> BaseProcess:
    """One run as a process of its own, on its share of the cores; what it says goes to a log."""
    path = os.path.join(folder, name)
    how = ["--resume", path] if checkpoints(path) else [*flags, "--out", path]
    how += ["--device", "cpu"]  # a fork cannot use a GPU
    if not checkpoints(path):
        shutil.rmtree(path, ignore_errors=True)  # one that never got to its first step
    threads = max(1, (os.cpu_count() or 1) // workers)
    # a fork of a process that has done nothing but the imports, which take seconds
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train"])
    process = context.Process(target=run_alone, args=(how, path + ".log", threads))
    process.start()
    return process


def run_alone(flags: list[str], log: str, threads: int) -> None:
    """main(flags) with its words in a log; ends the process with its exit status."""
    os.setsid()  # Ctrl-C reaches it through run_all
    with open(log, "a") as said:
        os.dup2(said.fileno(), 1), os.dup2(said.fileno(), 2)
    torch.set_num_threads(threads)
    sys.exit(main(flags))


def settle(folder: str, name: str, status: int) -> str:
    """The last line a run has said. One that stopped of itself has its result all the same;
    RuntimeError for any other end."""
    path = os.path.join(folder, name)
    with open(path + ".log", errors="replace") as file:
        last = ["no word", *file.read().strip().splitlines()][-1]
    if status == 1 and not finished(path):  # collapsed: nothing to learn from, or not finite
        write_json(os.path.join(path, "result.json"), {"before": {}, "after": {}, "stopped": last})
    elif status:
        raise RuntimeError(f"{name} ended with status {status}: {last} (see {path}.log)")
    return last


def outcome(path: str) -> dict:
    """result.json and metrics.jsonl of a finished run."""
    with open(os.path.join(path, "result.json")) as file:
        found = {"stopped": ""} | json.load(file)
    with open(os.path.join(path, "metrics.jsonl")) as file:
        return found | {"metrics": [json.loads(line) for line in file]}


def spread(values: list[float]) -> str:
    """Mean ± sample standard deviation."""
    sd = f" ± {np.std(values, ddof=1):.3f}" if len(values) > 1 else ""
    return f"{np.mean(values):.3f}{sd}"


def slug(flags: str) -> str:
    """A folder's name for flags."""
    return flags.replace("--method ", "").replace("--", "").replace(" ", "-")


def compare(args: argparse.Namespace) -> None:
    """Runs what the comparisons need and prints a table for each; JSON beside the runs."""
    common = (f"--steps {args.steps} --rollout-batch {args.rollout_batch} --eval-every 20 "
              "--eval-k 2 --show-every 0 --save-every 20 --keep 1 --token-budget 1024").split()
    rates = args.lrs.split(",")
    has_critic = lambda arm: method_of(parse(arm.split())[0]).value == "critic"
    # a run without a critic takes half as long: two more of them
    seeds = lambda arm: range(1, args.seeds + (1 if has_critic(arm) else 3))
    critic = {seed: f"critic-{seed}" for seed in range(args.seeds + 1)}
    run_all({name: ["--steps", "1", "--eval-problems", "1", "--seed", str(seed)]
             for seed, name in critic.items()}, args.folder, args.workers)

    def job(arm: str, lr: str, seed: int) -> tuple[str, list[str]]:
        """Name and flags of one run; methods with a critic start from that of their seed."""
        flags = [*common, *arm.split(), "--lr", lr, "--critic-lr", str(5 * float(lr)),
                 "--seed", str(seed)]
        if has_critic(arm):
            flags += ["--critic", f"{args.folder}/{critic[seed]}/critic-pretrained"]
        return f"{slug(arm)}-lr{lr}-s{seed}", flags

    tuned = list(dict.fromkeys(
        arm for name in args.compare for arm in COMPARISONS[name][: 1 if name == "sweep" else 99]))
    grid = run_all(dict(job(arm, lr, 0) for arm in tuned for lr in rates), args.folder,
                   args.workers)
    at_end = {(arm, lr): success(grid[job(arm, lr, 0)[0]]) for arm in tuned for lr in rates}
    best = {arm: max(rates, key=lambda lr: at_end[arm, lr]) for arm in tuned}
    for name in args.compare:
        arms = {arm: best.get(arm) or best[COMPARISONS[name][0]] for arm in COMPARISONS[name]}
        jobs = {arm: dict(job(arm, lr, seed) for seed in seeds(arm)) for arm, lr in arms.items()}
        found = run_all({k: v for some in jobs.values() for k, v in some.items()}, args.folder,
                        args.workers)
        rows = {arm: summary([found[x] for x in jobs[arm]]) | {
            "seeds": list(seeds(arm)), "lr": lr, "tuning": {r: at_end.get((arm, r)) for r in rates},
            "paper": PAPER.get((name, arm))} for arm, lr in arms.items()}
        write_json(os.path.join(args.folder, f"{name}.json"),
                   {"grid": rates, "flags": common, "arms": rows})
        print_comparison(name, rows, args)


def success(run: dict) -> float:
    """Held-out success at the last step; of a run that stopped itself, that of its last batch."""
    found = [x for name, x in run["after"].items() if re.fullmatch(r"eval/avg@\d+", name)]
    steps = [m["rollout/success"] for m in run["metrics"] if "rollout/success" in m]
    return found[0] if found else steps[-1]


def summary(runs: list[dict]) -> dict:
    """What the tables and curves show of an arm's runs, one value or list per seed."""
    steps = [[m for m in run["metrics"] if "rollout/success" in m] for run in runs]
    evaluated = [[[m["step"], x] for m in run["metrics"] for name, x in m.items()
                  if re.fullmatch(r"eval/avg@\d+", name)] for run in runs]
    last = lambda name: [float(np.mean([m.get(name) or 0.0 for m in s[-5:]])) for s in steps]
    return {
        "success": [success(run) for run in runs], "stopped": [run["stopped"] for run in runs],
        "best": [max(x for _, x in e) for e in evaluated], "evaluated": evaluated,
        "entropy": last("actor/entropy"), "length": last("rollout/length"),
        "ev": last("critic/explained_variance"), "medium": [medium_share(s) for s in steps],
        "discarded": [sum(m["rollout/discarded"] for m in s) for s in steps],
        "seconds": [float(np.median([sum(x for name, x in m.items() if name.startswith("time/"))
                                     for m in s])) for s in steps],
        "curves": {name: [[m[name] for m in s] for s in steps]
                   for name in ("rollout/success", "actor/entropy", "rollout/length")}}


def medium_share(steps: list[dict], window: int = 5) -> float:
    """Share of the trained responses whose problem has 0.2 < p ≤ 0.8: p is the share right among
    all responses of the run to problems of as many steps, sampled at most `window` batches away."""
    length = [p.prompt[4] for p in rollout.task_problems()]
    medium = []
    for i, step in enumerate(steps):
        right = {}
        for m in steps[max(0, i - window) : i + window + 1]:
            for prompt, r in zip(m["prompts/sampled"], m["prompts/right"]):
                right.setdefault(length[prompt], []).append(r)
        medium += [0.2 < np.mean(right[length[x]]) <= 0.8 for x in step["prompts/trained"]]
    return float(np.mean(medium))


def print_comparison(name: str, rows: dict[str, dict], args: argparse.Namespace) -> None:
    """A comparison as a Markdown table."""
    print(f"\n{name}: embedded task, {args.steps} steps of {args.rollout_batch} responses; "
          "held-out success at the last step, mean ± standard deviation over seeds from 1; lr is "
          f"the best of {args.lrs} for seed 0, the critic's five times that\n")
    head = ["arm", "lr", "success", "by seed", "best − last", "entropy", "length", "EV",
            "0.2 < p ≤ 0.8", "discarded", "s/step", "seed 0 by lr", "paper"]
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for arm, row in rows.items():
        drop = [b - x for b, x in zip(row["best"], row["success"])]
        tuning = " ".join("–" if x is None else f"{x:.2f}" for x in row["tuning"].values())
        cells = [slug(arm), row["lr"], spread(row["success"]),
                 " ".join(f"{x:.3f}" for x in row["success"]), spread(drop),
                 *(f"{np.mean(row[x]):.3g}" for x in ("entropy", "length", "ev", "medium",
                                                      "discarded", "seconds")),
                 tuning, row["paper"] or "–"]
        print("| " + " | ".join(map(str, cells)) + " |")
    for arm, row in rows.items():
        for seed, why in zip(row["seeds"], row["stopped"]):
            if why:
                print(f"{slug(arm)}, seed {seed}: {why}")


def plot(folder: str) -> None:
    """figures/NAME.png of each comparison that has been run: success, entropy, length by step."""
    try:
        import matplotlib
    except ImportError:
        raise ImportError("--plot needs a package: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    os.makedirs("figures", exist_ok=True)
    for name in COMPARISONS:
        path = os.path.join(folder, f"{name}.json")
        if not os.path.exists(path):
            continue
        with open(path) as file:
            arms = json.load(file)["arms"]
        figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
        for i, (arm, row) in enumerate(arms.items()):
            curves = {"held-out success": [list(zip(*e)) for e in row["evaluated"]]} | {
                title: [(range(1, len(c) + 1), c) for c in row["curves"][key]]
                for title, key in (("entropy", "actor/entropy"), ("length", "rollout/length"))}
            for axis, (title, lines) in zip(axes, curves.items()):
                axis.set(title=title, xlabel="step")
                for j, (x, y) in enumerate(lines):
                    axis.plot(x, y, color=f"C{i}", alpha=0.7,
                              label=f"{slug(arm)}, lr {row['lr']}" if j == 0 else None)
        axes[0].legend(fontsize=7)
        figure.savefig(f"figures/{name}.png", dpi=110)
        plt.close(figure)
        print(f"figures/{name}.png")


# ------------------------------------------------------------------------- what a critic knows


def show_values(folder: str, seed: int, problems: int = 100, n: int = 16) -> None:
    """V(s_t) along a right and a wrong response of a finished run, its advantages on long failures,
    its error against the truth by Monte Carlo, and the best of n responses by V; values.json."""
    run = finished_run(folder)
    problems = min(problems, len(run.eval_prompts))
    answers, rng = [p.answer for p in run.eval_problems], generator(seed, "evaluate", 1)
    ids = torch.arange(problems).repeat_interleave(n)
    b = respond(run, run.eval_prompts, answers, ids, rng, run.cfg.temperature)
    b = take(b, b.prompt_id.argsort(stable=True))
    b.value = score(run, b)[2][0]
    b.advantage = ADVANTAGES["gae"](b, run.cfg)
    known = [answers[i] for i in b.prompt_id.tolist()]
    for title, wanted in (("right", b.reward > 0), ("wrong", b.reward < 0)):
        rows = wanted.nonzero()[:, 0]
        if len(rows):
            longest = rows[b.mask[rows].sum(1).argsort(descending=True)]
            i = longest[len(longest) // 4]  # long, but not the longest
            print_response(run, take(b, i[None]), known[i], title, rng)
    found = {"long failures": long_failures(run, b), "truth": error_to_truth(run, b, known, rng),
             "best of n": best_of_n(run, b, n)}
    write_json(os.path.join(folder, "values.json"), found)


def finished_run(folder: str) -> Run:
    """Actor and critic of a run as they were at its end; ValueError for a run without a critic."""
    if not os.path.isfile(os.path.join(folder, "config.json")):
        raise ValueError(f"--show-values: expected the folder of a finished run, found {folder}")
    cfg = resumed(folder, {})
    actor, critic = os.path.join(folder, "actor"), os.path.join(folder, "critic")
    if method_of(cfg).value != "critic" or not os.path.isdir(critic):
        raise ValueError("--show-values: expected the folder of a finished run with one critic, "
                         f"found {folder} ({cfg.method})")
    run = setup(replace(cfg, model=actor, critic=critic))
    prepare_critic(run)
    return run


def pieces(b: Batch) -> Tensor:
    """Starts [B, T] of at most 26 pieces of even length, of two tokens or more."""
    width = max(2, -(-int(b.mask.sum(1).max()) // 26))
    return genac.segment_starts(b.mask, width=width, at_most=26)


def first_error(prompt: str, text: str) -> int | None:
    """Where the first wrong digit of a response to the embedded task stands."""
    for k, digit in enumerate(text[1::2], start=1):
        if digit != str((int(prompt[0]) + k * int(prompt[2])) % 10):
            return 2 * k - 1
    return None


def error_of(run: Run, b: Batch, i: int) -> int | None:
    """The token of row i with the first wrong digit, where the verifier is the embedded task's."""
    if run.cfg.verifier != "chain":
        return None
    text = rollout.decode(run.tokenizer, b.tokens[i : i + 1, -b.mask.shape[1] :],
                          b.mask[i : i + 1])[0]
    return first_error(run.eval_problems[int(b.prompt_id[i])].prompt, text)


def print_response(run: Run, b: Batch, answer: str, title: str, rng: torch.Generator,
                   k: int = 64) -> None:
    """One response in pieces: V and the truth 2p − 1 at a piece's start, mean advantage in it."""
    starts = pieces(b)
    p = monte_carlo(run, b, starts, [answer], k, rng)
    at, T, wrong = starts[0].nonzero()[:, 0].tolist(), b.mask.shape[1], error_of(run, b, 0)
    prompt = run.tokenizer.decode(b.tokens[0, :-T][b.attention[0, :-T]][-200:])
    print(f"\na {title} response to {prompt}\n{'t':>5}  {'tokens':20}{'V(s_t)':>8}"
          f"{'2p − 1':>8}{'mean Â':>8}    (p: {k} continuations)")
    for start, stop, truth in zip(at, [*at[1:], T], (2 * p - 1).tolist()):
        text = run.tokenizer.decode(b.tokens[0, -T:][start:stop])
        mark = "   ← the first wrong step" if wrong is not None and start <= wrong < stop else ""
        V, A = b.value[0, start], b.advantage[0, start:stop].mean()
        print(f"{start:5}  {text[-20:]!r:20}{V:+8.2f}{truth:+8.2f}{A:+8.2f}{mark}")


def long_failures(run: Run, b: Batch) -> dict[str, float]:
    """Mean token advantage of the longer half of the failures: by fifth of the response, and
    before, at and after the first wrong step (S3AC Figure 2b)."""
    length = b.mask.sum(1)
    rows = ((b.reward < 0) & (length >= length[b.reward < 0].median())).nonzero()[:, 0].tolist()
    parts = {}
    for i in rows:
        A, wrong = b.advantage[i][b.mask[i]].tolist(), error_of(run, b, i)
        for t, x in enumerate(A):
            parts.setdefault(f"fifth {5 * t // len(A) + 1}", []).append(x)
            if wrong is not None:
                where = "before" if t < wrong else "at" if t == wrong else "after"
                parts.setdefault(f"{where} the first wrong step", []).append(x)
    found = {name: float(np.mean(x)) for name, x in sorted(parts.items())}
    print(f"\nmean Â of {len(rows)} long failures (without a critic each token has the same):")
    for name, x in found.items():
        print(f"  {name:28}{x:+.3f}")
    return found


def error_to_truth(run: Run, b: Batch, answers: list[str], rng: torch.Generator,
                   states: int = 300, k: int = 32) -> dict[str, float]:
    """Mean ((V + 1)/2 − p)² over states of the responses, less the p(1 − p)/(k − 1) that k
    continuations add; beside it that of always saying the mean of p, and EV."""
    starts = pieces(b)
    chosen = starts.flatten().nonzero()[:, 0]
    chosen = chosen[torch.randperm(len(chosen), generator=rng)[:states].to(chosen.device)]
    picked = torch.zeros_like(starts).flatten().index_fill(0, chosen, True).view_as(starts)
    p = monte_carlo(run, b, picked, answers, k, rng)
    v, noise = (b.value[picked].cpu() + 1) / 2, p * (1 - p) / (k - 1)
    found = {"critic": ((v - p).square() - noise).mean().item(),
             "mean of p": ((p.mean() - p).square() - noise).mean().item(),
             "explained variance": explained_variance(b.value, b.reward, b.mask)}
    print(f"\nsquared error of (V + 1)/2 against the success probability of {len(p)} prefixes, "
          f"{k} continuations each: {found['critic']:.4f} (always the mean of p: "
          f"{found['mean of p']:.4f}); EV against the returns {found['explained variance']:.2f}")
    return found


def best_of_n(run: Run, b: Batch, most: int) -> dict[str, dict[str, float]]:
    """Success when one of n responses is chosen: by V at the last token, by the least V on the
    way, by majority vote; beside one at random and any of n right (pass@n)."""
    T = b.mask.shape[1]
    texts = rollout.decode(run.tokenizer, b.tokens[:, -T:], b.mask)
    said = [ANSWER_OF.get(run.cfg.verifier, str)(text) for text in texts]
    right = (b.reward > 0).cpu().numpy()
    last = b.value.gather(1, (b.mask.sum(1, keepdim=True) - 1).clamp_min(0))[:, 0].cpu().numpy()
    least = b.value.masked_fill(~b.mask, math.inf).amin(1).cpu().numpy()
    found = {}
    for n in (2, 4, 8, 16):
        if n > most or len(right) % n:
            continue
        groups = np.arange(len(right)).reshape(-1, n)  # n divides the responses of each problem
        votes = [max(group, key=lambda i: sum(said[j] == said[i] for j in group))
                 for group in groups.tolist()]
        found[str(n)] = {
            "random": right.mean(), "last V": right[groups[range(len(groups)),
                                                           last[groups].argmax(1)]].mean(),
            "least V": right[groups[range(len(groups)), least[groups].argmax(1)]].mean(),
            "majority": right[votes].mean(), "pass@n": right[groups].any(1).mean()}
        found[str(n)] = {name: float(x) for name, x in found[str(n)].items()}
    names = list(found["2"])
    print("\nbest of n\n" + f"{'n':>4}" + "".join(f"{name:>12}" for name in names))
    for n, row in found.items():
        print(f"{n:>4}" + "".join(f"{row[name]:12.3f}" for name in names))
    return found


ANSWER_OF = {"chain": lambda text: text[-2:], "boxed": rollout.extract_boxed,
             "math_verify": rollout.extract_boxed}  # what a majority vote counts


def experiments(argv: list[str]) -> None:
    """The command line of --compare, --show-values and --plot."""
    parser = argparse.ArgumentParser(description="comparisons over seeds, and what a critic knows")
    add = parser.add_argument
    add("--compare", nargs="+", choices=COMPARISONS, default=[], help="the paper's claims")
    add("--show-values", metavar="DIR", help="run folder: V(s_t) along responses, and its error")
    add("--plot", action="store_true", help="draw figures/ from the comparisons (matplotlib)")
    add("--seeds", type=int, default=3, help="runs per arm beside one for each learning rate, two "
        "more where there is no critic")
    add("--lrs", default="5e-5,1e-4,2e-4", help="learning rates tried for each arm")
    add("--steps", type=int, default=60, help="rollout batches per run")
    add("--rollout-batch", type=int, default=64, help="responses per batch")
    add("--workers", type=int, default=2, help="runs side by side")
    add("--folder", default="runs/compare", help="where the runs and the tables' JSON are kept")
    add("--seed", type=int, default=0, help="of --show-values")
    args = parser.parse_args(argv)
    if not re.fullmatch(r"\d+(\.\d+)?(e-?\d+)?(,\d+(\.\d+)?(e-?\d+)?)*", args.lrs):
        raise ValueError("--lrs: expected learning rates separated by commas, as 5e-5,1e-4; "
                         f"found {args.lrs}")
    for name in ("seeds", "steps", "rollout_batch", "workers"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')}: expected 1 or more, "
                             f"found {getattr(args, name)}")
    if args.compare:
        build_base()  # once, before two runs want it
        compare(args)
    if args.show_values:
        show_values(args.show_values, args.seed)
    if args.plot:
        plot(args.folder)


def main(argv: list[str]) -> int:
    """Command line -> exit status: 0; 1 stopped or below the target; 2 bad input; 130 Ctrl-C."""
    rank = int(os.environ.get("RANK", 0))
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
    out = sys.stdout if rank == 0 else open(os.devnull, "w")  # one rank speaks; all report errors
    who = f"rank {rank}: " if "RANK" in os.environ else ""
    cfg = None  # of experiments, which are many runs
    with contextlib.redirect_stdout(out):
        try:
            if argv and argv[0] in ("--compare", "--show-values", "--plot"):
                experiments(argv)
                return 0
            cfg, resume = parse(argv)
            check(cfg)
            if not resume and os.path.exists(os.path.join(cfg.out, "config.json")):
                raise ValueError(f"--out: expected a folder without a run, found one in {cfg.out} "
                                 "(--resume goes on with it)")
            run = start(cfg, resume)
            train(run)
            return finish(run)
        except KeyboardInterrupt:
            if cfg is None:
                print("\ninterrupted: the same command goes on where this one stopped")
                return 130
            last, pool = checkpoints(cfg.out), os.path.join(cfg.out, "pool")
            said = (f"{last[-1]} is there, go on with --resume {cfg.out}" if last else
                    "there is no checkpoint yet, so there is nothing to resume")
            if not last and os.path.isdir(pool):
                n = len(TrajectoryPool(pool))
                said += f"; --pool {pool} uses the {n:,} trajectories sampled so far"
            print(f"\ninterrupted: {said}")
            return 130
        except (FloatingPointError, RuntimeError) as error:
            print(f"{who}stopped: {error}", file=sys.stderr)
            return 1
        except (ValueError, ImportError, OSError) as error:
            print(f"{who}error: {error}", file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
