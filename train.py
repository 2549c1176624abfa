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

This file has four parts: the step; METHODS, a row each, with the four tables it reads (SELECTIONS,
VALUES, ADVANTAGES, LOSSES); Config, whose every field is a flag; and the plumbing that any trainer
has. Whoever stops reading where the plumbing begins has read S3AC.

Shapes: B responses, P prompt tokens, T response tokens; [B, P+T] tokens and attention, [B, T] all
else (`Batch` in rollout.py). Each random draw of step t comes from a generator that is seeded with
(seed, t), so a resumed run goes on bit for bit without a generator in its checkpoint.

Under torchrun FSDP2 shards parameters, gradients and optimizer states. Every rank holds the whole
rollout batch and the same random generator, so all ranks make the same decisions without
communicating, and advantages, counts and denominators are global. Each computes a share of the
rows.

Differs from the paper:
  - sampler and trainer are one process, so a step waits for its longest response
  - where the actor itself samples in float32, log μ is taken for log π_old
  - a lower temperature stands in for a stronger policy in the pool
  - what the paper does not state is marked `# assumption`
Left out: asynchronous rollouts, judge models, multimodal data.

    python train.py                                          the embedded task, all stages
    python train.py --model DIR --data problems.jsonl        your model, your problems
    torchrun --nproc_per_node 8 train.py --model …           the same, sharded
    python train.py --resume runs/…                          goes on where it stopped
    python train.py --help                                   every field of Config is a flag
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import hashlib
import json
import math
import os
import pickle
import re
import resource
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from tqdm import tqdm

import genac
import rollout
from actor_loss import (
    cispo_loss, dis_loss, flash_reinforce_loss, group_expectation_weight, grpo_loss, linear_entropy,
    linear_token_logp, mismatch_mask, nll_loss, ppo_clip_loss)
from critic import (
    HEAD_FILE, Critic, FiniteAdamW, explained_variance, low_rank_, value_step_)
from daps import (
    DAPS, accept, fuse, greso_accept_prob, mixed_groups, nearest_half, uniform_streak)
from gae import (
    adaptive_lambda, batch_advantage, flash_reinforce_advantage, gae, group_advantage,
    leave_one_out_advantage, vine_advantage, whiten)
from rollout import Batch, collect, concatenate, length_groups, positions, response, take
from value_pretrain import (
    Recipe, TrajectoryPool, balanced_draw, coverage_table, fill_pool, format_coverage, pretrain)

# ---- the step ------------------------------------------------------------------------------------

def train_step(run: Run) -> tuple[Batch, dict[str, float]]:
    """One rollout batch and its updates (S3AC §3) -> the batch and its metrics."""
    cfg, method, metrics = run.cfg, run.method, Metrics(run)
    rng = generator(cfg.seed, "train", run.step)
    with metrics.timed("rollout"):
        batch, sampled = rollout_batch(run, rng, metrics)
    with metrics.timed("score"):
        batch.logp_old, V = score(run, batch, exact=is_exact(run))
    expect_one_policy(cfg, distance(batch.logp_old, batch.logp_roll, batch.mask), later=True)
    with metrics.timed("value"):
        estimate = VALUES[method.value](run, batch, V, rng)
    batch.value, batch.starts, batch.value_std = estimate.value, estimate.starts, estimate.std
    batch.advantage = ADVANTAGES[method.advantage](batch, cfg)
    if cfg.whiten:  # Â ← (Â − mean)/std over all trainable tokens
        batch.advantage = whiten(batch.advantage, batch.mask)
    # assumption: masks come from π_old/μ once a step; the loss's ratio is π/π_old
    batch.keep, mismatch = mismatch_mask(
        batch.logp_old, batch.logp_roll, batch.mask,
        token_range=(cfg.token_low, cfg.token_high), response_range=(0.0, cfg.response_high))
    with metrics.timed("critic"):  # assumption: before the actor; Â keeps the values from before
        update_critics(run, batch, rng, metrics)
        update_generative(run, batch, estimate.replies, metrics)
    with metrics.timed("actor"):
        update_actor(run, batch, rng, metrics)
    update_counts(run, sampled)
    run.step += 1
    return batch, metrics.all(sampled, batch, {"mismatch": mismatch, cfg.method: estimate.stats})


def rollout_batch(run: Run, rng: torch.Generator, metrics: Metrics) -> tuple[Batch, Batch]:
    """Selected prompts, K verified responses each -> the batch to train on, and all sampled.

    Where the method filters groups (K > 1), uniform ones are replaced (DAPO). RuntimeError if no
    group is mixed in cfg.filter_rounds rounds, or among all prompts.
    """
    cfg, k, sampled, kept = run.cfg, run.cfg.k, [], []
    refresh_sampler(run)
    n, unused = cfg.rollout_batch // k, torch.randperm(len(run.prompts), generator=rng)
    filtered = run.method.filter and k > 1
    for _ in range(cfg.filter_rounds if filtered else -(-n // len(run.prompts))):
        missing = n - sum(len(part.reward) for part in kept) // k
        if k == 1 and not len(unused):  # fewer prompts than trajectories: they come once more
            unused = torch.randperm(len(run.prompts), generator=rng)
        if missing <= 0 or not len(unused):
            break
        wanted = -(-missing // run.size) * run.size  # an even share for every rank
        ids = SELECTIONS[cfg.selection](run, unused, min(wanted, len(unused)), rng)
        if cfg.selection == "daps":
            metrics.add("daps", {x: run.daps.report[x] for x in ("offered", "accepted", "filled")})
        unused = unused[~torch.isin(unused, ids)]
        part = respond(run, run.prompts, run.answers, ids.repeat_interleave(k), rng,
                       cfg.temperature)
        sampled.append(part)
        # assumption: the critic too learns from mixed groups alone, so not from hopeless prompts
        kept.append(take(part, mixed_groups(part.reward, part.prompt_id) if filtered else ...))
    everything, batch = concatenate(sampled), concatenate(kept)
    usable = min(len(batch.reward) // k, n) // run.size * run.size * k  # whole groups
    if not usable:
        mixed = f"only {len(batch.reward) // k} groups of {k} mixed, for {run.size} processes" if (
            len(batch.reward)) else f"every group of {k} was all right or all wrong"
        raise RuntimeError(
            f"step {run.step + 1}: {mixed}, in {len(sampled)} rounds of prompts (success "
            f"{(everything.reward > 0).float().mean():.2f}): nothing to learn from")
    return take(batch, torch.arange(usable, device=run.device)), everything


def update_critics(run: Run, batch: Batch, rng: torch.Generator, metrics: Metrics) -> None:
    """cfg.critic_epochs epochs of clipped ½(V − R)² (λ_critic = 1); AsyPPO's two critics learn from
    every second response each."""
    # assumption: all of the critic learns on-line; the paper speaks of pretraining where it freezes
    cfg, n, batch.target = run.cfg, len(run.critics), batch.reward
    if n and cfg.critic_lam < 1:  # the λ-return Â_λ + V
        batch.target = batch.value + gae(batch.value, batch.reward, batch.mask, cfg.critic_lam)
    for i, (critic, opt) in enumerate(run.critics):
        part = take(batch, torch.arange(i, len(batch.mask), n, device=run.device))
        for _ in range(cfg.critic_epochs):
            # assumption: the critic's epochs have as many mini-batches as the actor's
            for rows in mini_batches(run, part, rng):
                values = ((critic_value(run, critic, m), m.target, m.mask, m.value)
                          for _, m in micro_batches(run, part, rows))
                with updating(run, critic):
                    stats, norms = value_step_(
                        critic, opt, values, part.mask[rows].sum(), clip=cfg.value_clip or None,
                        max_norm=cfg.critic_clip_norm, split=cfg.critic_clip_split, world=run.size)
                name = ("critic", "second_critic")[i]
                metrics.add(name, {x: stats[x] for x in ("loss", "clip_share")})
                metrics.add_norms(name, norms)


def update_generative(run: Run, batch: Batch, replies: genac.Replies | None, metrics: Metrics
                      ) -> None:
    """GenAC, stages 2 and 3: one REINFORCE step on R_v = 1 − (r − v̂)² of the critic's replies."""
    if replies is None:
        return
    r = (batch.reward > 0).float()
    stats = genac.reinforce_backward(
        run.generative, replies, r[batch.starts.nonzero()[:, 0]], baseline=run.cfg.baseline,
        token_budget=run.cfg.token_budget)
    norm = nn.utils.clip_grad_norm_(run.generative.model.parameters(), run.cfg.clip_norm).item()
    run.generative_opt.step_if_finite(norm)
    run.generative.success.update(r)  # after the batch that was judged
    means = {name: float(x) / float(n) for name, (x, n) in stats.items()}
    metrics.add("genac", means | {"states": int(batch.starts.sum()), "grad_norm": norm})


def update_actor(run: Run, batch: Batch, rng: torch.Generator, metrics: Metrics) -> None:
    """One epoch of the policy loss in cfg.mini_batches optimizer steps."""
    cfg = run.cfg
    for rows in [] if cfg.freeze_actor else mini_batches(run, batch, rng):
        n = counts(batch.mask[rows], batch.keep[rows], batch.reward[rows])
        if not n.tokens:  # nothing to learn, and no step on old moments
            continue
        with updating(run, run.actor):
            for _, part in micro_batches(run, batch, rows):
                logp, entropy = actor_logp(run, part, entropy=True)
                loss, stats = LOSSES[cfg.loss](logp, part, n, cfg)
                (loss * run.size).backward()  # FSDP takes the mean over ranks
                # before the first update π is π_old: the proof where μ was taken for it
                if batch.logp_old is batch.logp_roll and not metrics.numbers["actor/updates"]:
                    expect_one_policy(cfg, distance(logp, part.logp_old, part.mask), later=True)
                padded = part.tokens.numel()
                metrics.add("actor", stats | {
                    "entropy": (entropy.detach().sum(), part.mask.sum()),
                    "padding": (padded - part.attention.sum(), padded)})
        norm = gathered(nn.utils.clip_grad_norm_(run.actor.parameters(), cfg.clip_norm)).item()
        stepped = run.actor_opt.step_if_finite(norm)
        metrics.add_norms("actor", {
            "norm": norm, "clipped": norm > cfg.clip_norm, "skipped": not stepped})


def update_counts(run: Run, sampled: Batch) -> None:
    """DAPS's and SPO's counts, GRESO's streaks: after the batch, so its values exclude it."""
    if run.daps:  # assumption: outcomes of groups that the filter drops count too
        run.daps.update(sampled.prompt_id, sampled.reward > 0)
    if run.streak is not None:
        run.streak = uniform_streak(run.streak, sampled.reward.cpu(), sampled.prompt_id)


# ---- methods: a row each, and the four tables that a row's columns name --------------------------

class Method(NamedTuple):
    """The columns in which methods differ; a flag of the same name replaces the one it names."""

    differs: str  # the one thing that sets it apart, for --help
    value: str  # VALUES
    pretrain: str  # how a critic starts: coverage | initial | none
    advantage: str  # ADVANTAGES
    loss: str  # LOSSES
    selection: str = "uniform"  # SELECTIONS
    k: int = 1  # responses per prompt
    filter: bool = False  # replace groups that are all right or all wrong (DAPO)
    whiten: bool = False  # advantages: mean 0, standard deviation 1 over the batch's tokens
    lam: float = 0.0  # λ of GAE; 0: by length, 1 − 1/(αT)
    alpha: float = 1.5
    critic_lam: float = 1.0  # λ of the critic's target; 1: the return


# All rows share sampler, masks, optimizer and one epoch of mini-batches.
# assumption: none has a KL term
METHODS = {
    # assumption: whitened, since advantages that are not centred can run away
    "s3ac": Method("Shen 2026: token advantages, coverage pretraining, selection by difficulty",
                   "critic", "coverage", "gae", "cispo", "daps", filter=True, whiten=True),
    "s3ac-v0": Method("s3ac without token credit: R − V(s_0) on every token",
                      "critic", "coverage", "v0", "cispo", "daps", filter=True, whiten=True),
    "s3ac-ensemble": Method("s3ac with two critics: V is their mean, n_c comes from their spread",
                            "critics", "coverage", "gae", "cispo", "daps", filter=True,
                            whiten=True),
    "s3ac-token": Method("s3ac without the prompt's baseline: V − V(s_0) in place of V",
                         "critic", "coverage", "token", "cispo", "daps", filter=True, whiten=True),
    "grpo": Method("Shao 2024, 2402.03300: (R − group mean)/std, averaged by response",
                   "none", "none", "group", "grpo", k=8),
    "grpo-x": Method("GRPO's advantage with S3AC's loss and DAPO's group filter",
                     "none", "none", "group", "cispo", k=8, filter=True),
    "rloo": Method("Ahmadian 2024, 2402.14740: R − the mean of the group's others",
                   "none", "none", "leave-one-out", "ppo-clip", k=8),
    "reinforce++": Method("Hu 2025, 2501.03262: returns whitened over the batch, no critic",
                          "none", "none", "batch", "cispo"),
    "flash-reinforce": Method("Hu, Zhang 2026: R − batch mean, bare ratio to the sampler, a gate",
                              "none", "none", "flash", "flash"),
    "ppo": Method("Schulman 2017, 1707.06347: a critic that starts with the policy, λ = 0.95",
                  "critic", "none", "gae", "ppo-clip", lam=0.95, critic_lam=0.95),
    "vc-ppo": Method("Yuan 2025, 2503.01491: critic pretrained on the initial policy, λ_critic = 1",
                     "critic", "initial", "gae", "ppo-clip", lam=0.95),
    "vapo": Method("Yue 2025, 2504.05118: λ by length, α = 0.05, + 0.1 NLL of right responses",
                   "critic", "initial", "gae", "vapo", k=8, alpha=0.05),
    "vine-ppo": Method("Kazemnejad 2024, 2410.01679: a step's value is a mean of continuations",
                       "vine", "none", "vine", "ppo-clip"),
    "sao": Method("Hou, Li 2026, 2607.07508: S3AC's advantage, ratio to the sampler in a range",
                  "critic", "initial", "gae", "dis"),
    "spo": Method("Xu 2025, 2509.13232: R − a Beta tracker of the prompt's outcomes, whitened",
                  "tracker", "none", "tracker", "ppo-clip"),
    # assumption: no pretraining; λ = 1, so R − V(s_t)
    "evpo": Method("Pan 2026, 2604.19485: the critic's baseline only while it explains something",
                   "critic", "none", "evpo", "ppo-clip", lam=1.0),
    # assumption: critics pretrained on the initial policy; λ = 0.95
    "asyppo": Method("Liu 2025, 2510.01656: two critics, advantage 0 where they agree most",
                     "critics", "initial", "agree", "ppo-clip", k=8, lam=0.95),
    # assumption: λ = 0.95 from segment to segment, as PPO's; not whitened
    "genac": Method("2604.10701: a language model's score at segment starts is the value",
                    "generative", "none", "segments", "ppo-clip", lam=0.95),
}


def by_difficulty(choose: Callable) -> Callable:
    """A selection that asks the critics for V(s_0) of candidates before anything is generated."""

    def select(run: Run, unused: Tensor, n: int, rng: torch.Generator) -> Tensor:
        """n of the unused ids; FloatingPointError if a value is not finite."""
        # assumption: four candidates per prompt needed, a random part of the data set
        ids = unused[: n * run.cfg.candidates]
        v0 = torch.stack([initial_values(run, ids, i) for i in range(len(run.critics))])
        if not v0.isfinite().all():
            raise FloatingPointError(f"step {run.step + 1}: the critic's V(s_0) is not finite")
        return choose(run, ids, v0 if len(v0) > 1 else v0[0], n, rng)

    return select


SELECTIONS = {  # (run, unused ids in random order, n, rng) -> n ids
    "uniform": lambda run, unused, n, rng: unused[:n],
    "daps": by_difficulty(
        lambda run, ids, v0, n, rng: run.daps.select(ids, v0, n, run.step, rng)),
    # Gao et al. 2025, 2510.01135: the candidates nearest to even odds
    "pcl": by_difficulty(
        lambda run, ids, v0, n, rng: ids[nearest_half(v0.view(-1, len(ids)).mean(0), n)]),
    # Zheng et al. 2025, 2506.02177: by what the prompt's last groups were, no critic
    "greso": lambda run, unused, n, rng: unused[
        accept(greso_accept_prob(run.streak[unused]), n, rng)[0]],
}


class Estimate(NamedTuple):
    """What an entry of VALUES returns."""

    value: Tensor | None = None  # [B, T]
    starts: Tensor | None = None  # [B, T]: where steps or segments start
    std: Tensor | None = None  # [B, T]: how far two critics disagree
    replies: genac.Replies | None = None  # of a generative critic
    stats: dict = {}  # (sum, count) pairs


VALUES = {  # (run, batch, V of the critics [critics, B, T], rng) -> Estimate
    "none": lambda run, batch, V, rng: Estimate(),
    "critic": lambda run, batch, V, rng: Estimate(V[0]),
    "critics": lambda run, batch, V, rng: Estimate(V.mean(0), std=V.std(0)),  # AsyPPO
    "vine": lambda *args: vine_value(*args),
    "tracker": lambda *args: tracker_value(*args),
    "generative": lambda *args: generative_value(*args),
}


def lam_of(mask: Tensor, cfg: Config) -> float | Tensor:
    """λ of GAE: a number, or one for each response by its length, [B]."""
    return cfg.lam or adaptive_lambda(mask.sum(-1), cfg.alpha)


ADVANTAGES = {  # (batch, cfg) -> Â [B, T]
    "gae": lambda b, cfg: gae(b.value, b.reward, b.mask, lam_of(b.mask, cfg)),
    "token": lambda b, cfg: gae(  # V − V(s_0): what the prefix tells, not how hard the prompt is
        b.value - b.value[:, :1], b.reward, b.mask, lam_of(b.mask, cfg)),
    "v0": lambda b, cfg: torch.where(b.mask, (b.reward - b.value[:, 0])[:, None], 0.0),
    "group": lambda b, cfg: weighted_group_advantage(b, cfg),
    "leave-one-out": lambda b, cfg: leave_one_out_advantage(b.reward, b.prompt_id, b.mask),
    "batch": lambda b, cfg: batch_advantage(b.reward, b.mask),
    "flash": lambda b, cfg: flash_reinforce_advantage(b.reward, b.mask),
    "vine": lambda b, cfg: vine_advantage(*by_step(b), b.reward, b.mask),
    "tracker": lambda b, cfg: batch_advantage(b.reward - b.value[:, 0], b.mask),  # whiten(R − v̂)
    "evpo": lambda b, cfg: evpo_advantage(b, cfg),
    "agree": lambda b, cfg: agreement_advantage(b, cfg),
    "segments": lambda b, cfg: genac.spread_segments(
        gae(b.value, b.reward, b.starts, lam_of(b.starts, cfg)), b.starts, b.mask),
}


class Counts(NamedTuple):
    """What a mini-batch's losses are divided by, over all micro-batches and ranks."""

    tokens: Tensor  # kept
    kept_responses: Tensor  # with a kept token
    responses: Tensor  # with a token
    right: Tensor  # kept tokens of right responses


def counts(mask: Tensor, keep: Tensor, reward: Tensor) -> Counts:
    """Counts of a mini-batch: mask, keep [B, T], reward [B]."""
    return Counts(keep.sum(), keep.any(1).sum(), mask.any(1).sum(), keep[reward > 0].sum())


def eps(cfg: Config) -> dict[str, float]:
    """The range of the ratio."""
    return {"eps_low": cfg.eps_low, "eps_high": cfg.eps_high}


LOSSES = {  # (logp [B, T] with its gradient, batch, counts, cfg) -> loss, stats
    "cispo": lambda logp, b, n, cfg: cispo_loss(
        logp, b.logp_old, b.advantage, b.keep, n.tokens, **eps(cfg)),
    "ppo-clip": lambda logp, b, n, cfg: ppo_clip_loss(
        logp, b.logp_old, b.advantage, b.keep, n.tokens, **eps(cfg)),
    "dis": lambda logp, b, n, cfg: dis_loss(
        logp, b.logp_roll, b.advantage, b.keep, n.tokens, **eps(cfg)),
    "grpo": lambda logp, b, n, cfg: grpo_loss(
        logp, b.logp_old, b.advantage, b.keep, n.kept_responses, **eps(cfg)),
    "flash": lambda logp, b, n, cfg: flash_reinforce_loss(
        logp, b.logp_roll, b.advantage, b.mask, n.responses, delta=cfg.delta),
    "vapo": lambda logp, b, n, cfg: vapo_loss(logp, b, n, cfg),
}
EPS = {"cispo": (0.2, 0.28), "ppo-clip": (0.2, 0.2), "dis": (0.3, 5.0), "grpo": (0.2, 0.2),
       "vapo": (0.2, 0.28)}  # each loss's own ε_low, ε_high


# ---- configuration -------------------------------------------------------------------------------

def flag(default: Any, text: str, choices: Any = None, *, low: float = -math.inf,
         above: float = -math.inf, high: float = math.inf) -> Any:
    """A field of Config: default, line in --help, the values or the range allowed. None: what the
    method, or its loss, brings along."""
    return field(default=default, metadata=dict(
        text=text, choices=choices, low=low, above=above, high=high))


@dataclass
class Config:
    """Every field is a flag. The defaults are the paper's where it gives a value."""

    # run
    method: str = flag("s3ac", "row of METHODS", METHODS)
    model: str = flag("", "folder or name of a Hugging Face model; empty: the embedded base policy")
    data: str = flag("", "JSONL of problems; empty: the embedded task")
    eval_data: str = flag("", "JSONL to evaluate on; empty: a held-out part of the data")
    steps: int = flag(200, "rollout batches", low=1)
    seed: int = flag(0, "seed of everything random", low=0, high=2**62)
    out: str = flag("", "run folder; empty: a new one under runs/")
    target: float = flag(0.0, "exit with status 1 if the success at the end is below this")
    device: str = flag("auto", "auto, cpu or cuda")
    dtype: str = flag("float32", "of parameters and optimizer", ("float32", "bfloat16"))
    compute_dtype: str = flag("float32", "of forward and backward", ("float32", "bfloat16"))
    shard_size: int = flag(0, "ranks that share one copy of the parameters; 0: all", low=0)
    checkpoint_activations: bool = flag(False, "recompute activations in the backward pass")
    trust_remote_code: bool = flag(False, "run code that comes with the model")
    debug: bool = flag(False, "show the traceback of an error")
    # rollout
    rollout_batch: int = flag(1024, "trajectories per step", low=1)  # assumption: unknown for 1.5B
    k: int = flag(None, "responses per prompt", low=1)
    max_prompt: int = flag(1024, "longest prompt in tokens", low=1)
    long_prompts: str = flag("skip", "prompts over --max-prompt", ("skip", "stop"))
    max_response: int = flag(3072, "longest response in tokens", low=1)
    # assumption: temperature 1
    temperature: float = flag(1.0, "of sampling, and so of the policy that is trained", above=0)
    rollout_dtype: str = flag(
        "", "sample with a copy of this type; empty: none", ("", "bfloat16", "float16"))
    sampler: str = flag("generate", "own sampler, or transformers' paged one", rollout.SAMPLERS)
    router_replay: bool = flag(False, "R3: train with the experts that the sampler chose (MoE)")
    max_rows: int = flag(256, "responses under way at once", low=1)
    verifier: str = flag(None, "of responses; by default boxed, or answer where most prompts of "
                               "--data ask for a line Answer: (DAPO-Math)", rollout.VERIFIERS)
    instruction: str = flag(None, "added to each prompt; by default a request to reason step by "
                                  "step and to put the answer in a box, if a box is read")
    # assumption: uniform groups are replaced in at most 10 rounds
    filter_rounds: int = flag(10, "rounds of replacing uniform groups (k > 1)", low=1)
    stop: str = flag("", r"more tokens that end a response, by commas; \n is a line's end")
    delimiter: str = flag("", "text after which a step may end (vine-ppo, genac); empty: steps of "
                              "a sixteenth of --max-response")
    vine_k: int = flag(9, "continuations per step's start (vine-ppo)", low=1)
    # actor
    loss: str = flag(None, "of the policy", LOSSES)
    lr: float = flag(1e-6, "learning rate", above=0)  # assumption: constant over the steps
    mini_batches: int = flag(8, "optimizer steps per epoch over a rollout batch", low=1)
    clip_norm: float = flag(1.0, "gradient norm limit", above=0)
    whiten: bool = flag(None, "advantages: mean 0, standard deviation 1 over the batch's tokens")
    lam: float = flag(None, "λ of GAE; 0: by length, 1 − 1/(αT)", low=0, high=1)
    alpha: float = flag(None, "α in λ = 1 − 1/(αT)", above=0)
    eps_low: float = flag(None, "ratio clipped at 1 − this", low=0, high=1)
    eps_high: float = flag(None, "ratio clipped at 1 + this", low=0)
    delta: float = flag(3e-3, "FlashREINFORCE's gate; 5e-3 for R1-Distill", above=0)
    gepo: bool = flag(False, "weigh responses by GEPO's group expectation (grpo-x, grpo). Which "
                             "method of that name the paper means is not known")
    token_low: float = flag(0.5, "IcePoP: least π_old/μ of a token", low=0)
    token_high: float = flag(5.0, "IcePoP: largest π_old/μ of a token", above=0)
    response_high: float = flag(math.exp(5), "MIS: largest π_old/μ in a response", above=0)
    weight_decay: float = flag(0.01, "AdamW", low=0)  # assumption: not stated
    freeze_actor: bool = flag(False, "train the generative critic alone (GenAC, stage 2)")
    # critic
    critic: str = flag("", "folder of a pretrained critic (asyppo: two, separated by a comma; "
                           "genac: a language model that gives scores); empty: pretrain one")
    critic_lr: float = flag(5e-6, "learning rate", above=0)
    critic_rank: int = flag(0, "only a change of this rank of its linear layers learns, and the "
                               "head (LoRA); 0: all", low=0)
    critic_lam: float = flag(None, "λ of its target; 1: the return", low=0, high=1)
    critic_epochs: int = flag(2, "epochs over a rollout batch", low=1)
    critic_clip_norm: float = flag(10.0, "gradient norm limit, in pretraining too", above=0)
    critic_clip_split: bool = flag(False, "clip head and backbone each by its own norm")
    value_clip: float = flag(0.5, "range of the clipped value loss; 0: off", low=0)  # assumption: ½
    # generative critic
    traces: str = flag("", "JSONL of an oracle's traces to learn from first (GenAC, stage 1)")
    write_prompts: str = flag("", "write prompts for an oracle to this file, and stop")
    n_prompts: int = flag(512, "how many --write-prompts writes", low=1)
    icc: bool = flag(True, "tell the critic the actor's size and running success")
    baseline: str = flag("none", "of R_v", ("none", "mean", "leave-one-out"))
    reply: int = flag(1024, "longest reply in tokens", low=1)
    context: int = flag(4096, "prompt and reply together, in tokens", low=2)
    # value pretraining
    pretrain: str = flag(None, "how a critic starts: on a coverage pool, on the initial policy's "
                               "responses, not at all", ("coverage", "initial", "none"))
    pool: str = flag("", "folder of an existing trajectory pool; empty: sample one")
    pool_models: str = flag("", "more policies for the pool: folders, separated by commas")
    pool_temperatures: str = flag("1.0,0.8,0.6", "strengths of each policy, separated by commas")
    pool_size: int = flag(4096, "trajectories per policy and temperature", low=1)
    pretrain_freeze: str = flag("attention", "what stays as it is (backbone: all but the head)",
                                ("attention", "backbone", "none"))
    # assumption: two thirds of the pool, so that the draw can balance
    pretrain_size: int = flag(0, "trajectories drawn from the pool; 0: two thirds of it", low=0)
    pretrain_epochs: int = flag(2, "epochs", low=1)
    pretrain_batch: int = flag(256, "trajectories per step", low=1)  # assumption: 256
    pretrain_lr: float = flag(1e-5, "learning rate at its peak", above=0)
    pretrain_lr_final: float = flag(5e-6, "learning rate at the end", above=0)
    # prompt selection
    selection: str = flag(None, "of prompts", SELECTIONS)
    candidates: int = flag(4, "candidate prompts per prompt needed", low=1)
    a_min: float = flag(0.1, "least acceptance, 0.1–0.3 in the paper", low=0, high=1)
    n_c: float = flag(3.0, "weight of the critic's estimate, in trials", above=0)
    decay: float = flag(0.99, "of the counts, per rollout batch", low=0, high=1)
    # assumption: DAPS's steps are rollout batches, not gradient steps
    daps_uniform: int = flag(40, "steps of uniform selection at the start", low=0)
    daps_ramp: int = flag(80, "steps until selection acts fully", low=0)
    # evaluation and files
    eval_every: int = flag(0, "steps between evaluations; 0: before and after only", low=0)
    eval_problems: int = flag(256, "problems evaluated at the most", low=1)
    eval_k: int = flag(4, "responses per problem: avg@k, pass@k", low=1)
    eval_temperature: float = flag(1.0, "of evaluation; 0: greedy", low=0)
    show_every: int = flag(20, "steps between responses shown with their values; 0: never", low=0)
    save_every: int = flag(50, "steps between checkpoints; 0: at the end only", low=0)
    keep: int = flag(2, "checkpoints kept", low=1)
    token_budget: int = flag(32768, "padded tokens per forward pass", low=1)


PAPER = dict(steps=400, rollout_batch=4096, compute_dtype="bfloat16", rollout_dtype="bfloat16",
             checkpoint_activations=True)
PRESETS = {
    # two CPU cores, minutes: a 4-layer model takes a larger step size, everything else is smaller.
    # assumption: DAPS acts from the first step, since the pretrained critic tells easy from hard
    "tiny": dict(
        steps=80, rollout_batch=256, max_prompt=16, max_response=40, max_rows=256,
        verifier="chain", instruction="", lr=1e-4, critic_lr=5e-4, pool_size=5120,
        pretrain_size=10240, pretrain_lr=1e-3, pretrain_lr_final=1e-4, pretrain_batch=32,
        daps_uniform=0, daps_ramp=10, eval_problems=414, eval_k=4, vine_k=4, reply=136,
        context=256),
    # a --model of up to about 0.5B, --data with short numbers as answers, a CPU or a small GPU.
    # At temperature 1 such a model rambles, and its answer ends with the sentence
    "small": dict(
        steps=10, rollout_batch=64, mini_batches=2, max_prompt=256, max_response=16,
        temperature=0.5, eval_temperature=0.5, stop=r".,\n,\n\n", verifier="number",
        instruction="", lr=1e-5, critic_lr=5e-5, pool_size=64, pool_temperatures="0.8,0.5,0.3",
        pretrain_batch=16, pretrain_lr=1e-4, pretrain_lr_final=3e-5, daps_uniform=5, daps_ramp=10,
        eval_problems=96, eval_k=2, eval_every=5, token_budget=4096),
    # the paper's public settings, single rollout; one 8-GPU node. Its groups: --k 16
    "qwen2.5-math-1.5b": PAPER | dict(model="Qwen/Qwen2.5-Math-1.5B", max_response=3072, eval_k=16),
    "r1-distill-1.5b": PAPER | dict(
        model="deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", max_response=16384, eval_k=32,
        max_rows=128, delta=5e-3)}


# ==== plumbing: what any trainer has ==============================================================
# ---- the other methods' parts --------------------------------------------------------------------

def step_starts(run: Run, batch: Batch) -> Tensor:
    """Where steps start [B, T]: after --delimiter, or every sixteenth of --max-response."""
    text, tokens = unescaped(run.cfg.delimiter), batch.tokens[:, -batch.mask.shape[1] :]
    ends = genac.ends_by_delimiter(
        tokens, genac.delimiter_ids(run.tokenizer, text)) if text else None
    return genac.segment_starts(batch.mask, ends, width=-(-run.cfg.max_response // 16))


def unescaped(text: str) -> str | None:
    """The text with its escapes, such as \\n, replaced; None if one is broken."""
    try:
        return text.encode("latin-1", "backslashreplace").decode("unicode_escape")
    except UnicodeDecodeError:
        return None


def segments(run: Run, batch: Batch) -> tuple[list[str], Tensor, Tensor, Tensor]:
    """What GenAC's critic judges: B questions; response tokens, mask and segment starts [B, T]."""
    T, ids = batch.mask.shape[1], batch.prompt_id.tolist()
    questions = [question(run.problems[i]) for i in ids]
    return questions, batch.tokens[:, -T:], batch.mask, step_starts(run, batch)


def question(problem: rollout.Problem) -> str:
    """The text that the user asks last."""
    return problem.prompt if isinstance(problem.prompt, str) else problem.prompt[-1]["content"]


def vine_value(run: Run, batch: Batch, V: Tensor, rng: torch.Generator) -> Estimate:
    """2p − 1 of each step's start on its tokens, p by continuations (VinePPO, 2410.01679)."""
    starts, answers = step_starts(run, batch), [run.answers[i] for i in batch.prompt_id.tolist()]
    p = monte_carlo(run, batch, starts, answers, run.cfg.vine_k, rng)
    value = genac.segment_values(p.tolist(), starts, batch.mask, None)
    return Estimate(value, starts, stats={"continuations": (run.cfg.vine_k * len(p), 1)})


def tracker_value(run: Run, batch: Batch, V: Tensor, rng: torch.Generator) -> Estimate:
    """2v̂ − 1, v̂ the mean of the prompt's Beta(1 + S, 1 + N − S), without this batch (SPO)."""
    # assumption: it starts at Beta(1, 1) and forgets as DAPS's counts do, not by the policy's drift
    ids = batch.prompt_id.cpu()
    p = fuse(torch.full(ids.shape, 0.5), run.daps.successes[ids], run.daps.trials[ids], 2.0)
    return Estimate(torch.where(batch.mask, (2 * p - 1).to(batch.logp_roll)[:, None], 0.0))


def generative_value(run: Run, batch: Batch, V: Tensor, rng: torch.Generator) -> Estimate:
    """V of each segment's start as the generative critic words it (GenAC, stage 3)."""
    judged, sampler = segments(run, batch), rollout.shared(rollout.generate)
    value, replies, stats = genac.ask(run.generative, *judged, sampler, rng)
    return Estimate(value, judged[-1], replies=replies, stats=stats)


def by_step(batch: Batch) -> tuple[Tensor, Tensor]:
    """step_value [B, N] and step_id [B, T] out of values that are constant within a step."""
    step_id = (batch.starts.cumsum(1) - 1).clamp_min(0)
    step_value = batch.value.new_zeros(len(batch.mask), int(step_id.max()) + 1)
    at_start = torch.where(batch.starts, batch.value, 0.0)
    return step_value.scatter_add_(1, step_id, at_start), step_id


def evpo_advantage(batch: Batch, cfg: Config) -> Tensor:
    """Critic's baseline where EV > 0, else the batch's or group's mean (EVPO, 2604.19485)."""
    if explained_variance(batch.value, batch.reward, batch.mask) > 0:
        return gae(batch.value, batch.reward, batch.mask, lam_of(batch.mask, cfg))
    if len(batch.prompt_id.unique()) < len(batch.prompt_id):
        return group_advantage(batch.reward, batch.prompt_id, batch.mask, divide_std=False)
    return flash_reinforce_advantage(batch.reward, batch.mask)


def agreement_advantage(batch: Batch, cfg: Config, share: float = 0.2) -> Tensor:
    """GAE, but 0 on the share of states where two critics agree most (AsyPPO, 2510.01656)."""
    bound = torch.quantile(batch.value_std[batch.mask].float(), share)
    A = gae(batch.value, batch.reward, batch.mask, lam_of(batch.mask, cfg))
    return torch.where(batch.value_std <= bound, 0.0, A)


def weighted_group_advantage(batch: Batch, cfg: Config) -> Tensor:
    """(R − group mean)/std, times GEPO's weight of each response where --gepo asks for it."""
    A = group_advantage(batch.reward, batch.prompt_id, batch.mask)
    if not cfg.gepo:
        return A
    # assumption: the weight stands for sampler → trainer; mini-batches keep the loss's own ratio
    return A * group_expectation_weight(
        batch.logp_old, batch.logp_roll, batch.prompt_id, batch.mask)[:, None]


def vapo_loss(logp: Tensor, b: Batch, n: Counts, cfg: Config) -> tuple[Tensor, dict]:
    """The clipped surrogate with ε 0.2/0.28 + 0.1 · NLL of right responses (VAPO, 2504.05118)."""
    loss, stats = ppo_clip_loss(logp, b.logp_old, b.advantage, b.keep, n.tokens, **eps(cfg))
    nll, more = nll_loss(logp, b.reward, b.keep, n.right)
    return loss + 0.1 * nll, stats | more


# ---- command line --------------------------------------------------------------------------------

# The first field of each section of Config -> the section's title in --help.
SECTIONS = dict(method="run", rollout_batch="rollout", loss="actor", critic="critic",
                traces="generative critic", pretrain="value pretraining",
                selection="prompt selection", eval_every="evaluation and files")
TYPES = {"int": int, "float": float, "str": str}
KINDS = {"int": int, "float": (int, float), "str": str, "bool": bool}
# Fields that may change when a run is resumed: they do not change what the next step computes.
FREE_ON_RESUME = {"steps", "target", "device", "debug", "eval_every", "show_every", "save_every",
                  "keep"}
# Folders and files may have moved; fingerprints say whether they are the same.
PATHS = {"out", "model", "data", "eval_data", "critic", "traces", "pool", "pool_models"}
BESIDE = """

from the project's folder: python -m figures.compare (methods over seeds), figures.values RUN (what
a critic knows), figures.noise (how much a critic saves), .critics, .coverage, .head, .speed"""


def parse(argv: list[str]) -> tuple[Config, bool]:
    """Command line -> Config, and whether it resumes a run. Flags win over the preset, the preset
    over the method, the method over the loss. ValueError for a --resume that does not fit."""
    parser = argparse.ArgumentParser(
        "train.py", usage="python train.py [--preset NAME] [--FLAG VALUE …]", allow_abbrev=False,
        description=__doc__.splitlines()[0], formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        epilog="methods, by what sets each apart; a flag named like a column replaces it:\n"
        + "\n".join(f"  {name:16}{row.differs}" for name, row in METHODS.items()) + BESIDE)
    parser.add_argument("--preset", choices=PRESETS, help="default: tiny, without --model, --data")
    parser.add_argument("--resume", metavar="DIR", help="run folder to go on with")
    for f in fields(Config):
        if f.name in SECTIONS:
            group = parser.add_argument_group(SECTIONS[f.name])
        choices = f.metadata["choices"]
        kind = dict(action=argparse.BooleanOptionalAction) if f.type == "bool" else dict(
            type=TYPES[f.type], metavar=f"{{{','.join(choices)}}}" if choices else f.type.upper())
        default = "the method's or data's own" if f.default is None else f.default
        group.add_argument("--" + f.name.replace("_", "-"), **kind, help=(
            f"{f.metadata['text']} [{default}]".replace("%", "%%")))
    given = vars(parser.parse_args(argv))
    if "resume" in given:
        return resumed(given.pop("resume"), given), True
    preset = given.pop("preset", "" if given.get("model") or given.get("data") else "tiny")
    cfg = resolve(replace(Config(**PRESETS.get(preset, {})), **given))
    if idle := [f"--{name.replace('_', '-')}" for name in given if name in without_effect(cfg)]:
        print(f"without effect in this run: {', '.join(idle)}")
    return cfg, False


def resolve(cfg: Config) -> Config:
    """The configuration with what its method and loss bring along: the values that are used."""
    expect("method", METHODS, cfg.method)
    brought = METHODS[cfg.method]._asdict()
    brought["verifier"] = "answer" if asks_for_answer_line(cfg.data) else "boxed"
    brought["instruction"] = BOXED if (cfg.verifier or brought["verifier"]) in BOXES else ""
    brought |= zip(("eps_low", "eps_high"), EPS.get(cfg.loss or brought["loss"], ()))
    new = time.strftime(f"runs/%Y%m%d-%H%M%S-{cfg.method}-{cfg.seed}-{os.getpid()}")
    return replace(cfg, out=cfg.out or new, **{
        name: x for name, x in brought.items() if getattr(cfg, name, "") is None})


def asks_for_answer_line(path: str) -> bool:
    """Whether most of the first 100 lines of a JSONL ask for a line `Answer: …`."""
    if not os.path.isfile(path):
        return False
    with open(path, errors="replace") as file:
        lines = [line for line, _ in zip(file, range(100))]
    return sum("Answer:" in line for line in lines) > len(lines) / 2


BOXED = r"Please reason step by step, and put your final answer within \boxed{}."
BOXES = "boxed", "math_verify"  # the verifiers that read a box


def without_effect(cfg: Config) -> set[str]:
    """The fields that this method and the other flags leave unused."""
    method, value = METHODS[cfg.method], METHODS[cfg.method].value
    heads, judged = value in ("critic", "critics"), value == "generative"
    pool, lam = heads and not cfg.critic and cfg.pretrain != "none", method.advantage in (
        "gae", "token", "evpo", "agree", "segments")
    used = {
        "critic_lr": heads or judged, "pretrain": heads and not cfg.critic, "lam": lam,
        "critic_lam critic_epochs critic_clip_norm critic_clip_split value_clip": heads,
        "pretrain_freeze pretrain_size pretrain_epochs pretrain_batch pretrain_lr "
        "pretrain_lr_final": pool, "pool_size": pool and not cfg.pool,
        "pool_models pool_temperatures": pool and not cfg.pool and cfg.pretrain == "coverage",
        "alpha": lam and not cfg.lam, "candidates": cfg.selection in ("daps", "pcl"),
        "a_min n_c daps_uniform daps_ramp": cfg.selection == "daps",
        "decay": cfg.selection == "daps" or value == "tracker",
        "filter_rounds": method.filter and cfg.k > 1, "delta": cfg.loss == "flash",
        "eps_low eps_high": cfg.loss in EPS, "vine_k": value == "vine",
        "token_low token_high response_high": cfg.loss != "flash", "icc context reply": judged,
        "delimiter": judged or value == "vine", "n_prompts": cfg.write_prompts,
        "traces baseline": judged and not cfg.write_prompts}
    return {name for names, use in used.items() if not use for name in names.split()}


def resumed(folder: str, given: dict) -> Config:
    """The saved configuration with the given fields that may change; ValueError for others."""
    try:
        saved = resolve(Config(**json.loads(Path(folder, "config.json").read_text())))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError("--resume: expected a run folder with config.json, "
                         f"found {folder or 'an empty name'} ({error})") from None
    changed = [f"{n} {getattr(saved, n, None)!r} -> {x!r}" for n, x in given.items()
               if getattr(saved, n, None) != x and n not in FREE_ON_RESUME]
    expect("resume", "the configuration of that run", f"other values: {', '.join(changed)}",
           not changed)
    return replace(saved, **given | {"out": folder})


def check(cfg: Config) -> None:
    """ValueError in one sentence for what can be seen wrong before any model is loaded."""
    for f in fields(Config):
        value, (_, choices, low, above, high) = getattr(cfg, f.name), f.metadata.values()
        if value is None and f.default is None:  # no loss of this method has such a range
            continue
        expect(f.name, f"a value of type {f.type}", repr(value), isinstance(value, KINDS[f.type]))
        if choices is not None:
            expect(f.name, choices, value)
        elif f.type in ("int", "float"):
            text = (f"a number above {above}" if above > -math.inf else f"{low} … {high}"
                    if high < math.inf else f"{low} or more" if low > -math.inf else "a number")
            expect(f.name, text, value,
                   math.isfinite(value) and low <= value <= high and value > above)
    for name, expected, ok in [*requirements(cfg), *critic_requirements(cfg), *required_files(cfg)]:
        expect(name, expected, getattr(cfg, name) or "nothing", ok)
    if cfg.verifier == "math_verify":
        rollout.VERIFIERS["math_verify"](r"\boxed{1}", "1")  # ImportError that names the package


def expect(name: str, expected: Any, value: Any, ok: Any = None) -> None:
    """ValueError in the form of all flags, unless ok; expected: text, or choices for the value."""
    if not isinstance(expected, str):
        expected, ok = "one of " + ", ".join(x or '""' for x in expected), value in expected
    if not ok:
        raise ValueError(f"--{name.replace('_', '-')}: expected {expected}, found {value}")


def requirements(cfg: Config) -> Iterator[tuple[str, str, Any]]:
    """(field, what is expected of it beside the others, whether it is so)."""
    method, name = METHODS[cfg.method], cfg.method
    groups = cfg.selection == "greso" or method.advantage in ("group", "leave-one-out")
    yield "token_low", f"at most --token-high {cfg.token_high}", cfg.token_low <= cfg.token_high
    yield "mini_batches", f"1 … {cfg.rollout_batch} (--rollout-batch)", (
        cfg.mini_batches <= cfg.rollout_batch)
    size = int(os.environ.get("WORLD_SIZE", 1))
    prompts, each = cfg.rollout_batch // cfg.k, cfg.rollout_batch // cfg.mini_batches
    yield ("rollout_batch", f"prompts per step ({prompts}) that {size} processes divide, and "
           f"mini-batches of {size} rows or more (they have {each})",
           prompts % size == 0 and each >= size)
    yield "shard_size", f"a divisor of the {size} processes", (
        not cfg.shard_size or size % cfg.shard_size == 0)
    yield "k", f"a divisor of --rollout-batch {cfg.rollout_batch}", cfg.rollout_batch % cfg.k == 0
    yield "k", f"2 or more for groups ({name}, selection {cfg.selection})", cfg.k > 1 or not groups
    yield "gepo", f"a method with group advantages (grpo-x, grpo) and not {name}", (
        not cfg.gepo or method.advantage == "group")
    yield "stop", "texts separated by commas, none of them empty", (
        not cfg.stop or "" not in cfg.stop.split(","))
    yield "delimiter", r"text with escapes such as \n", unescaped(cfg.delimiter) is not None
    yield "pretrain_size", "0 (two thirds) or 2 or more", cfg.pretrain_size != 1
    yield "reply", f"less than --context {cfg.context}", cfg.reply < cfg.context
    yield ("data", "--model beside it, since the embedded policy knows only the embedded task",
           cfg.model or not cfg.data)
    yield "data", "a JSONL file and --model (or --verifier chain, for the embedded task)", (
        cfg.data or cfg.verifier not in ((*BOXES, "answer", "number") if cfg.model else ["number"]))
    yield "sampler", "generate for --router-replay, since it notes the expert choices", (
        not cfg.router_replay or cfg.sampler == "generate")
    yield "device", "auto, cpu or cuda[:N]", re.fullmatch(r"auto|cpu|cuda(:\d+)?", cfg.device)
    yield "device", "cpu or auto on a machine without CUDA", (
        not cfg.device.startswith("cuda") or torch.cuda.is_available())
    number = r"\s*(\d+\.?\d*|\.\d+)(e-?\d+)?\s*"
    yield "pool_temperatures", "numbers above 0, separated by commas", (
        re.fullmatch(f"{number}(,{number})*", cfg.pool_temperatures)
        and all(0 < float(x) < math.inf for x in cfg.pool_temperatures.split(",")))


def critic_requirements(cfg: Config) -> Iterator[tuple[str, str, Any]]:
    """The same for what only some critics can use."""
    method, name = METHODS[cfg.method], cfg.method
    heads = method.value in ("critic", "critics")
    yield "selection", f"uniform or greso, since {name} has no critic that could tell difficulty", (
        cfg.selection not in ("daps", "pcl") or heads)
    yield "critic", f"a method with a critic and not {name}", (
        not cfg.critic or heads or method.value == "generative")
    yield "critic_rank", f"0, or a method with a value head and not {name}", (
        not cfg.critic_rank or heads)
    yield "pool", f"a method that pretrains a critic ({name}: {cfg.pretrain}) and no --critic", (
        not cfg.pool or heads and not cfg.critic and cfg.pretrain != "none")
    for flag_name in ("traces", "write_prompts", "freeze_actor"):
        yield flag_name, f"--method genac and not {name}", (
            not getattr(cfg, flag_name) or method.value == "generative")


def required_files(cfg: Config) -> Iterator[tuple[str, str, Any]]:
    """The same for files and folders that are read."""
    for name in ("data", "eval_data", "traces"):
        path = getattr(cfg, name)
        yield name, "a JSONL file that exists", not path or os.path.isfile(path)
    for name in ("model", "pool_models"):
        for path in filter(None, getattr(cfg, name).split(",")):
            on_hub = path.count("/") == 1 and not path.startswith((".", "/", "~"))  # owner/name
            yield name, "a folder with a Hugging Face model (config.json)", (
                os.path.isfile(os.path.join(path, "config.json"))
                or on_hub and not os.path.isdir(os.path.dirname(path)))
    yield "out", "a folder", not os.path.isfile(cfg.out)
    yield "write_prompts", "a file that is not there yet, in a folder that is", (
        not cfg.write_prompts or not os.path.exists(cfg.write_prompts)
        and os.path.isdir(os.path.dirname(cfg.write_prompts) or "."))
    yield "pool", "a folder with a trajectory pool (index.bin, tokens.bin)", not cfg.pool or all(
        os.path.isfile(os.path.join(cfg.pool, x)) for x in ("index.bin", "tokens.bin"))
    kind, file, n = {
        "generative": ("the folder of a language model that gives scores", "config.json", 1),
        "critics": ("the folders of two critics, separated by a comma", HEAD_FILE, 2),
    }.get(METHODS[cfg.method].value, ("the folder of a critic", HEAD_FILE, 1))
    paths = [path for path in cfg.critic.split(",") if path]
    whole = len(paths) == n and all(os.path.isfile(os.path.join(x, file)) for x in paths)
    yield "critic", f"{kind} ({file})", whole or not paths and file == HEAD_FILE


# ---- set-up --------------------------------------------------------------------------------------

@dataclass
class Run:
    """All the state of a run."""

    cfg: Config
    method: Method
    device: torch.device
    tokenizer: Any
    eos_id: list[int]
    problems: list[rollout.Problem]
    prompts: list[list[int]]  # token ids of problems
    eval_problems: list[rollout.Problem]
    eval_prompts: list[list[int]]
    actor: Actor
    actor_opt: FiniteAdamW
    rank: int = 0
    size: int = 1  # ranks
    critics: list[tuple[Critic, FiniteAdamW]] = field(default_factory=list)  # none, one, AsyPPO's
    generative: genac.GenCritic | None = None
    generative_opt: FiniteAdamW | None = None
    sampler: nn.Module | None = None  # whole copy of a sharded actor, or of another dtype
    routing: rollout.Routing | None = None  # notes the sampler's expert choices
    daps: DAPS | None = None  # also the counts of SPO's tracker
    streak: Tensor | None = None  # [n_prompts] uniform groups in a row (GRESO)
    step: int = 0
    sound: int = 0  # the last step whose weights have sampled at half the best success or more
    best: float = 0.0  # success of a rollout batch
    before: dict = field(default_factory=dict)  # the evaluation before training
    origin: dict = field(default_factory=dict)  # fingerprints of tokenizer and problems
    stop: bool = False  # Ctrl-C: after this step
    seconds: float = 0.0  # of the last step

    @property
    def answers(self) -> list[str]:
        """The answers to the problems."""
        return [p.answer for p in self.problems]

    @property
    def trained(self) -> dict[str, tuple[nn.Module, FiniteAdamW]]:
        """All modules that learn and their optimizers, by the name of the folder they end in."""
        parts = {"actor": (self.actor, self.actor_opt)} | dict(
            zip(("critic", "second"), self.critics))
        if self.generative:
            parts["critic"] = self.generative.model, self.generative_opt
        return parts


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
        T, temperature = mask.shape[1], self.temperature
        if self.routing:  # stays set, for activations that are computed again in the backward pass
            self.routing.replay = routing
        hidden = self.model.base_model(
            input_ids=tokens, attention_mask=attention.long(), position_ids=positions(attention),
            use_cache=False).last_hidden_state
        hidden, weight = response(hidden, T)[mask], self.model.get_output_embeddings().weight
        rows = [linear_token_logp(hidden, weight, tokens[:, -T:][mask], temperature=temperature)]
        if entropy:
            rows.append(linear_entropy(hidden, weight, temperature=temperature))
        out = rows[0].new_zeros(len(rows), *mask.shape)
        out[:, mask] = torch.stack(rows)
        return out


def join_ranks(cfg: Config) -> tuple[int, int, torch.device]:
    """Rank, number of ranks and device; joins the process group that torchrun has laid out."""
    size = int(os.environ.get("WORLD_SIZE", 1))
    cuda = cfg.device != "cpu" and torch.cuda.is_available()
    if size == 1:
        return 0, 1, torch.device(cfg.device if cfg.device != "auto" else "cuda" if cuda else "cpu")
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu")
    if cuda:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    name = [cfg.out]  # the clocks that name a run folder may differ
    dist.broadcast_object_list(name)
    cfg.out = name[0]
    return dist.get_rank(), size, device


def setup(cfg: Config) -> Run:
    """Model, tokenizer and problems; what may be wrong with the data is found before the model."""
    rank, size, device = join_ranks(cfg)
    problems, held_out = rollout.load_data(cfg.data, cfg.eval_data, cfg.eval_problems)
    expect_answerable(cfg.verifier, [*problems, *held_out])
    if size > 1 and rank:
        dist.barrier()  # rank 0 builds the embedded base policy, if it is not there
    path = cfg.model or rollout.build_base()
    if size > 1 and not rank:
        dist.barrier()
    tokenizer = load_tokenizer(cfg, path)
    limits = {x: getattr(cfg, x) for x in ("max_prompt", "long_prompts", "instruction")}
    problems, prompts = rollout.encode_prompts(tokenizer, problems, **limits)
    held_out, eval_prompts = rollout.encode_prompts(tokenizer, held_out, **limits)
    model = pretrained("AutoModelForCausalLM", path, cfg, cfg.dtype)
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    longest = max(map(len, prompts))
    expect("max_response", f"at most {most - longest}, as the model has {most} positions and the "
           f"longest prompt {longest} tokens", cfg.max_response, cfg.max_response <= most - longest)
    sampler = sampling_copy(cfg, model, size, device)
    actor = shard(Actor(model, cfg.temperature, cfg.router_replay), model.config, cfg, size, device)
    opt = FiniteAdamW(actor, cfg.lr, weight_decay=cfg.weight_decay, name="actor")
    ends = rollout.eos_ids(model, tokenizer) + stop_ids(cfg, tokenizer)
    if cfg.delimiter:  # ValueError if no token has it
        genac.delimiter_ids(tokenizer, unescaped(cfg.delimiter))
    run = Run(cfg, METHODS[cfg.method], device, tokenizer, ends, problems, prompts, held_out,
              eval_prompts, actor, opt, rank, size, sampler=sampler,
              routing=rollout.Routing(sampler) if cfg.router_replay else None)
    run.origin = fingerprints(run)
    try_model(run)
    if cfg.selection == "greso":
        run.streak = torch.zeros(len(problems), dtype=torch.long)
    if cfg.selection == "daps" or run.method.value == "tracker":
        run.daps = DAPS(len(problems), a_min=cfg.a_min, n_c=cfg.n_c, decay=cfg.decay,
                        uniform=cfg.daps_uniform, ramp=cfg.daps_ramp)
    return run


def stop_ids(cfg: Config, tokenizer: Any) -> list[int]:
    """The tokens of --stop."""
    texts = [unescaped(text) or text for text in cfg.stop.split(",") if text]
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    expect("stop", "texts of one known token each", cfg.stop,
           all(len(x) == 1 and x[0] != tokenizer.unk_token_id for x in ids))
    return sum(ids, [])


def expect_answerable(verifier: str, problems: list[rollout.Problem]) -> None:
    """ValueError if a reply of an answer alone is not right (in a box all are: `load_problems`)."""
    form = {"number": "%s", "answer": "Answer: %s", "chain": "%s"}.get(verifier)
    wrong = [p.answer for p in problems if form and rollout.VERIFIERS[verifier](
        form % p.answer, p.answer) < 0]
    expect("verifier", "one that can accept every answer of the data",
           f"{verifier}, which rejects {len(wrong)} of them, as {wrong[:1]}", not wrong)


def sampling_copy(cfg: Config, model: nn.Module, size: int, device: torch.device
                  ) -> nn.Module | None:
    """A whole copy of the actor that samples where the actor cannot: in another type, in parts, or
    seen by other code; else None."""
    if not (cfg.rollout_dtype or size > 1 or cfg.sampler != "generate" or cfg.router_replay):
        return None
    sampler = copy.deepcopy(model).to(device)
    for p in sampler.parameters():  # not the tables of RoPE, which stay float32
        p.data = p.data.to(getattr(torch, cfg.rollout_dtype or cfg.dtype))
    return sampler


def fingerprints(run: Run) -> dict[str, str]:
    """What belongs together: what 64 ids of the tokenizer decode to, the problems, and the ids that
    chat template and instruction make of them, with those that end a response."""
    step = max(1, len(run.tokenizer) // 64)
    last = range(max(0, len(run.tokenizer) - 64), len(run.tokenizer))  # added tokens
    texts = [run.tokenizer.decode([i]) for i in [*range(0, len(run.tokenizer), step), *last]]
    problems = [[p.prompt, p.answer] for p in [*run.problems, *run.eval_problems]]
    ids = [run.prompts, run.eval_prompts, sorted(run.eos_id)]
    return {name: hashlib.sha256(json.dumps(x).encode()).hexdigest()[:12] for name, x in (
        ("tokenizer", texts), ("problems", problems), ("prompt and end tokens", ids))}


def expect_origin(flag: str, run: Run, there: dict[str, str], *names: str) -> None:
    """ValueError if what is read was made with another tokenizer or other problems."""
    for name in names:
        expect(flag, f"one made with this run's {name} (fingerprint {run.origin[name]})",
               f"one made with another ({there.get(name)})",
               there.get(name, run.origin[name]) == run.origin[name])


def pretrained(kind: str | type, path: str, cfg: Config, dtype: str = "") -> Any:
    """From a folder, by a class or transformers' class of that name; all errors: one sentence."""
    import transformers  # takes seconds

    try:
        return (getattr(transformers, kind) if isinstance(kind, str) else kind).from_pretrained(
            path, trust_remote_code=cfg.trust_remote_code,
            **({"dtype": getattr(torch, dtype)} if dtype else {}))
    except Exception as error:  # foreign files, foreign code
        where = "a folder" if os.path.isdir(path) else (
            "a name on the hub, for lack of such a folder")
        raise ValueError(f"--model: expected what transformers can load in {path} ({where}), found "
                         f"{type(error).__name__}: {str(error).splitlines()[0][:200]}") from error


def load_tokenizer(cfg: Config, path: str) -> Any:
    """The folder's tokenizer, padding with end of sequence where it has no padding token."""
    tokenizer = pretrained("AutoTokenizer", path, cfg)
    expect("model", "a tokenizer with an end-of-sequence token", f"none in {path}",
           tokenizer.eos_token_id is not None)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def shard(module: nn.Module, config: Any, cfg: Config, size: int, device: torch.device,
          *float32: nn.Module) -> nn.Module:
    """The module on the device. With several ranks FSDP2 in place: every layer a unit, the modules
    float32 units that keep that type, and the rest one; ValueError without a list of layers."""
    if cfg.checkpoint_activations:
        checkpoint_activations(module.model if isinstance(module, Actor) else module.backbone)
    if size == 1:
        return module.to(device)
    depth, n = config.get_text_config().num_hidden_layers, cfg.shard_size or size
    layers = next((x for x in module.modules()
                   if isinstance(x, nn.ModuleList) and len(x) == depth), None)
    expect("model", f"a list of {depth} layers to shard", f"none in {type(module).__name__}",
           layers)
    shape, names = ((size // n, n), ("replicate", "shard")) if n < size else ((size,), ("shard",))
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    kept, cast = (MixedPrecisionPolicy(param_dtype=x, reduce_dtype=torch.float32)
                  for x in (torch.float32, getattr(torch, cfg.compute_dtype)))
    for unit in float32:
        fully_shard(unit, mesh=mesh, mp_policy=kept)
    for unit in [*layers, module]:
        fully_shard(unit, mesh=mesh, mp_policy=cast)
    return module


def checkpoint_activations(model: nn.Module) -> None:
    """Layers recompute their activations in the backward pass, in training mode alone: so dropout,
    which the sampler has not seen either, is switched off."""
    renamed = hasattr(model, "activation_checkpointing_enable")
    (model.activation_checkpointing_enable if renamed else model.gradient_checkpointing_enable)()
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for name in [x for x in vars(part) if "drop" in x and isinstance(vars(part)[x], float)]:
            setattr(part, name, 0.0)  # attention_dropout, hidden_dropout, layerdrop, …


@torch.no_grad()
def try_model(run: Run) -> None:
    """Prints how far the sampler's log-probs are from the trainer's, and those of a row in a batch
    from the row alone, on two prompts of unequal length as the run will use them; ValueError if
    that is too far, or if the model cannot be run so."""
    cfg, n, longest = run.cfg, run.size, max(run.prompts, key=len)
    T = min(8, cfg.max_response)
    trial = replace(run, critics=[], cfg=replace(  # one pass, so that the rows are padded
        cfg, max_response=T, token_budget=max(cfg.token_budget, 2 * n * (len(longest) + T))))
    ids = torch.tensor([0] * n + [1] * n)  # a row of each for every rank
    try:
        batch = respond(trial, [longest, longest[len(longest) // 2 :]], ["", ""], ids,
                        generator(cfg.seed, "evaluate"), cfg.temperature, verify=lambda *_: -1.0)
        with updating(run, run.actor):
            logp = score(trial, batch)[0]
            parts = [take(batch, rows) for rows in ids.to(run.device).argsort().split(n)]
            alone = [score(trial, part)[0] for part in parts]
        bent = bent_logits(run.sampler or run.actor.model, batch.tokens[:, :8])
    except (AttributeError, TypeError, ValueError, IndexError, RuntimeError) as error:
        if "memory" in str(error):
            raise
        raise ValueError("--model: expected one that the sampler and the trainer can run, found "
                         f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
    apart = distance(logp, batch.logp_roll, batch.mask)
    padded = max(distance(x, whole[:, : x.shape[1]], part.mask)
                 for x, whole, part in zip(alone, logp.split(n), parts))
    print(f"sampler against trainer: log-probs differ by at most {apart:.1e}; a row in a batch "
          f"against the row alone: {padded:.1e}")
    expect("model", "logits that are hidden states times the output matrix, which log-probs are "
           "computed from", f"others, by {bent:.2g} (a soft cap, a scale or a bias)", bent < 0.03)
    expect_one_policy(cfg, max(apart, padded, key=lambda x: (x != x, x)))


def bent_logits(model: nn.Module, tokens: Tensor) -> float:
    """How far a model's logits are from hidden state times output matrix, relative to the largest.
    Its output layer is fed 0, where a bias shows, and a hundredfold, where a cap or scale does."""
    head, apart = model.get_output_embeddings(), 0.0
    for scale in (0.0, 100.0):
        fed = []
        hook = head.register_forward_pre_hook(
            lambda _, x: fed.append(scale * x[0]) or (fed[0],))
        logits = model(tokens, use_cache=False).logits.float()
        hook.remove()
        plain = nn.functional.linear(fed[0], head.weight).float()
        apart = max(apart, ((logits - plain).abs().max() / plain.abs().max().clamp_min(1)).item())
    return apart


def distance(a: Tensor, b: Tensor, mask: Tensor) -> float:
    """The largest |a − b| where mask is True."""
    return (a - b)[mask].abs().max().item()


def expect_one_policy(cfg: Config, apart: float, later: bool = False) -> None:
    """ValueError if log-probs of sampler and trainer differ more than their types explain. later:
    in a step, whose many tokens have a wider limit in float32 and none in other types."""
    exact = {cfg.dtype, cfg.compute_dtype, cfg.rollout_dtype or cfg.dtype} == {"float32"}
    limit = 0.5 if not exact else 0.1 if later else 1e-3
    limit /= min(1.0, cfg.temperature)  # log-probs grow with 1/τ
    expect("model", f"log-probs that differ by at most {limit:.2g}, so sampler and trainer are "
           "one policy", f"{apart:.2g}", apart <= limit or later and not exact)


def prepare_critic(run: Run) -> None:
    """The method's critic or critics with their optimizers: from --critic, else as the actor is."""
    cfg, paths = run.cfg, [*filter(None, run.cfg.critic.split(","))]
    for i in range({"critic": 1, "critics": 2}.get(run.method.value, 0)):
        path = paths[i] if paths else cfg.model or rollout.build_base()
        torch.manual_seed(cfg.seed + i)  # the head's weights
        critic = pretrained(Critic, path, cfg, cfg.dtype)
        words, rows = (x.get_input_embeddings().num_embeddings for x in (
            run.actor.model, critic.backbone))
        expect("critic", f"the actor's vocabulary of {words} tokens", rows, rows >= words)
        if (origin := Path(path, "origin.json")).is_file():
            there = json_object(origin.read_text(errors="replace"))
            expect("critic", "a JSON object", f"another text in {origin}", there)
            expect_origin("critic", run, there, "tokenizer")
        if cfg.critic_rank:
            expect("critic_rank", "0 with several processes", cfg.critic_rank, run.size == 1)
            low_rank_(critic, cfg.critic_rank)
        critic = shard(critic, critic.backbone.config, cfg, run.size, run.device, critic.head)
        run.critics.append((critic, FiniteAdamW(critic, cfg.critic_lr, name="critic",
                                                weight_decay=cfg.weight_decay)))
    if run.method.value == "generative":  # a language model, whole on every rank
        tokenizer = load_tokenizer(cfg, paths[0])
        model = pretrained("AutoModelForCausalLM", paths[0], cfg, cfg.dtype).eval().to(run.device)
        size = f"{sum(p.numel() for p in run.actor.model.parameters()) / 1e6:.1f}M"
        embedded = not cfg.data or cfg.verifier == "chain"
        run.generative = genac.GenCritic(
            model, tokenizer, run.tokenizer, rollout.eos_ids(model, tokenizer),
            genac.RunningSuccess(), size, genac.COMPACT if embedded else genac.ENGLISH,
            icc=cfg.icc, context=cfg.context, max_new_tokens=cfg.reply)
        run.generative_opt = FiniteAdamW(
            model, cfg.critic_lr, weight_decay=0.0, name="generative critic")
        longest = max(map(question, run.problems), key=len)  # has it room in the critic's context?
        genac.encode_state(run.generative, genac.State(longest, "", size, 0.5))
    if cfg.traces:  # wrong ones are refused now, and read once the actor's success is known
        genac.load_traces(cfg.traces)


# ---- forward passes, by parts --------------------------------------------------------------------

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


def actor_logp(run: Run, batch: Batch, *, entropy: bool = False) -> Tensor:
    """log π(a_t|s_t) [B, T], or with entropy both, [2, B, T]."""
    with autocast(run):
        out = run.actor(batch.tokens, batch.attention, batch.mask, entropy, batch.routing)
    return out if entropy else out[0]


def critic_value(run: Run, critic: Critic, batch: Batch) -> Tensor:
    """V(s_t) [B, T]."""
    with autocast(run):
        return response(critic(batch.tokens, batch.attention), batch.mask.shape[1])


def mini_batches(run: Run, batch: Batch, rng: torch.Generator) -> list[Tensor]:
    """The rows of the batch, shuffled, in at most cfg.mini_batches parts that ranks can share."""
    order = torch.randperm(len(batch.mask), generator=rng).to(run.device)
    each = -(-len(order) // (run.cfg.mini_batches * run.size)) * run.size
    return list(order.split(each))


def micro_batches(run: Run, batch: Batch, rows: Tensor) -> Iterator[tuple[Tensor, Batch]]:
    """Yields (rows, part): this rank's share of the given rows in groups of similar length, at most
    token_budget padded tokens each (or one row), cut to their own width."""
    T, attention = batch.mask.shape[1], batch.attention[rows]
    prompt, answer = attention[:, :-T].sum(1).tolist(), attention[:, -T:].sum(1).tolist()
    for group in length_groups(prompt, answer, run.cfg.token_budget, run.size):
        share = rows[torch.tensor(group[run.rank :: run.size], device=rows.device)]
        yield share, take(batch, share)


@torch.no_grad()
def score(run: Run, batch: Batch, *, exact: bool = False) -> tuple[Tensor, Tensor]:
    """log π_old [B, T] and V of each critic [critics, B, T], 0 where masked. exact: the sampler's
    log μ is log π_old."""
    out = batch.logp_roll.new_zeros(1 + len(run.critics), *batch.mask.shape)
    everything = torch.arange(len(batch.mask), device=run.device)
    for rows, part in micro_batches(run, batch, everything) if run.critics or not exact else ():
        T = part.mask.shape[1]
        if not exact:
            out[0, rows, :T] = actor_logp(run, part)
        for i, (critic, _) in enumerate(run.critics, start=1):
            out[i, rows, :T] = torch.where(part.mask, critic_value(run, critic, part), 0.0)
    if run.size > 1:
        dist.all_reduce(out)  # each rank has filled in its own rows
    return batch.logp_roll if exact else out[0], out[1:]


def is_exact(run: Run) -> bool:
    """Whether the actor itself samples, in float32: then μ is π_old, as `try_model` has shown."""
    # assumption: so π_old need not be computed once more
    return run.sampler is None and {run.cfg.dtype, run.cfg.compute_dtype} == {"float32"}


@torch.no_grad()
def initial_values(run: Run, ids: Tensor, i: int = 0) -> Tensor:
    """V(s_0) [n] of prompts, before anything is generated, by the i-th critic."""
    lists = [run.prompts[i] for i in ids.tolist()]
    per_pass = max(1, run.cfg.token_budget // max(map(len, lists))) * run.size
    values = torch.zeros(len(lists), device=run.device)
    for start in range(0, len(lists), per_pass):
        rows = list(range(start, min(start + per_pass, len(lists)))[run.rank :: run.size])
        tokens, attention = rollout.left_pad(  # a rank without rows runs along with another's
            [lists[i] for i in rows or [start]], run.tokenizer.pad_token_id, run.device)
        with autocast(run):
            value = run.critics[i][0](tokens, attention)[:, -1]
        values[rows] = value[: len(rows)].float()
    if run.size > 1:
        dist.all_reduce(values)
    return values.cpu()


def respond(run: Run, prompts: list[list[int]], answers: list, ids: Tensor, rng: torch.Generator,
            temperature: float, model: nn.Module | None = None,
            verify: Callable[[str, Any], float] | None = None) -> Batch:
    """Verified responses to prompts[ids], in that order; the whole batch on every rank."""
    cfg, rows, routing = run.cfg, ids.tolist(), None if model else run.routing
    sample = functools.partial(
        rollout.SAMPLERS[cfg.sampler], model or run.sampler or run.actor.model,
        max_new_tokens=cfg.max_response, temperature=temperature, eos_id=run.eos_id,
        pad_id=run.tokenizer.pad_token_id, max_rows=cfg.max_rows,
        **({"routing": routing} if routing else {}))
    with autocast(run) if run.sampler is None else contextlib.nullcontext():
        return collect(
            sample, run.tokenizer, [prompts[i] for i in rows], [answers[i] for i in rows],
            ids.to(run.device), verify or rollout.VERIFIERS[cfg.verifier], eos_id=run.eos_id,
            generator=rng, routing=routing)


@torch.no_grad()
def refresh_sampler(run: Run) -> None:
    """Copies the actor's parameters, put together from all ranks, to the model that samples: whole
    on every rank, since a pass of the sharded model waits for the other ranks in every layer."""
    if run.sampler:
        for target, p in zip(run.sampler.parameters(), run.actor.model.parameters()):
            target.copy_(gathered(p))


def gathered(p: Tensor) -> Tensor:
    """The whole tensor of a sharded parameter; every rank must ask."""
    return p.full_tensor() if hasattr(p, "full_tensor") else p


def generator(seed: int, stage: str, step: int = 0) -> torch.Generator:
    """Random numbers of one step of one stage, a function of these three alone."""
    sequence = np.random.SeedSequence([seed, ("train", "pool", "evaluate").index(stage), step])
    return torch.Generator().manual_seed(int(sequence.generate_state(1, np.uint64)[0] >> 1))


# ---- metrics -------------------------------------------------------------------------------------

class Metrics:
    """What a step reports. So no line of the algorithm is about bookkeeping."""

    def __init__(self, run: Run) -> None:
        self.run, self.numbers, self.sums = run, {"actor/updates": 0}, {}

    def add(self, prefix: str, stats: dict[str, Any]) -> None:
        """Adds to those so far: numbers, and (sum, count) pairs, whose mean over micro-batches and
        ranks is reported."""
        for name, x in stats.items():
            key = f"{prefix}/{name}"
            if isinstance(x, tuple):
                self.sums[key] = tuple(a + b for a, b in zip(self.sums.get(key, (0.0, 0.0)), x))
            else:
                self.numbers[key] = self.numbers[key] + x if key in self.numbers else x

    def add_norms(self, prefix: str, norms: dict[str, float]) -> None:
        """Gradient norms of one optimizer step, `clipped` and `skipped`; a norm that is not finite
        is left out of the means."""
        skipped = norms["skipped"]
        self.add(prefix, {"updates": 1 - skipped, "skipped_nonfinite": int(skipped)})
        self.add(prefix, {f"grad_{name}": (x, 1) for name, x in norms.items()
                          if math.isfinite(x) and name != "skipped"})

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Seconds of what is done inside, and on a GPU its peak memory."""
        start = time.perf_counter()
        yield
        if self.run.device.type == "cuda":
            torch.cuda.synchronize()
        self.add("time", {phase: time.perf_counter() - start})

    def all(self, sampled: Batch, batch: Batch, stats: dict[str, dict]) -> dict[str, Any]:
        """All numbers of a step, of what was sampled and of the batch before the updates."""
        n, R, A = batch.mask.sum(), batch.reward, batch.advantage[batch.mask]
        success = sampled.reward > 0
        for prefix, pairs in (stats | {"run": {"stop": (float(self.run.stop), 1)}}).items():
            self.add(prefix, pairs)  # a signal to one rank stops all
        self.numbers |= {
            "rollout/success": success.float().mean().item(), "rollout/tokens": int(n),
            "rollout/length": sampled.mask.sum(1).float().mean().item(),
            "rollout/truncated": sampled.truncated.float().mean().item(),
            "rollout/trajectories": len(R), "rollout/sampled": len(success),
            "rollout/discarded": len(success) - len(R),
            "prompts/sampled": sampled.prompt_id.tolist(), "prompts/right": success.int().tolist(),
            "prompts/trained": batch.prompt_id.tolist(),
            "mismatch/log_ratio_max": distance(batch.logp_old, batch.logp_roll, batch.mask),
            "advantage/mean": A.mean().item(), "advantage/std": A.std().item()}
        if batch.value_std is not None:
            self.add("critic", {"disagreement": batch.value_std[batch.mask].mean().item()})
        if batch.value is not None:
            V0 = batch.value[:, 0]
            self.add("critic", {
                "explained_variance": explained_variance(batch.value, R, batch.mask),
                "value_mean": (batch.value[batch.mask].sum() / n).item(),
                "initial_value": V0.mean().item(),
                "initial_error": (V0 - R).square().mean().item()})
        return self.numbers | self.means() | {"memory/peak_gib": peak_memory(self.run.device)}

    def means(self) -> dict[str, float]:
        """The pairs' means over all ranks; NaN without a count."""
        flat = torch.tensor([float(x) for pair in self.sums.values() for x in pair],
                            dtype=torch.float64)
        if self.run.size > 1:
            dist.all_reduce(flat)
        return {name: s / n if n else math.nan
                for name, (s, n) in zip(self.sums, flat.view(-1, 2).tolist())}


def peak_memory(device: torch.device) -> float:
    """GiB: of the GPU since the last call, elsewhere of the process since its start."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) / 2**30
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


# ---- evaluation ----------------------------------------------------------------------------------

def evaluate(run: Run) -> tuple[dict[str, float], Batch | None]:
    """avg@k, pass@k (also by level), length, share truncated on held-out problems; responses."""
    cfg, n, k = run.cfg, len(run.eval_prompts), run.cfg.eval_k
    if not n:
        return {}, None
    refresh_sampler(run)
    ids, rng = torch.arange(n).repeat_interleave(k), generator(cfg.seed, "evaluate")
    batch = respond(run, run.eval_prompts, [p.answer for p in run.eval_problems], ids, rng,
                    cfg.eval_temperature)
    right = (batch.reward > 0).float().view(n, k).cpu()
    share = lambda name, right: {f"eval/{name}avg@{k}": right.mean().item(),
                                 f"eval/{name}pass@{k}": right.amax(1).mean().item()}
    out = share("", right) | {"eval/length": batch.mask.sum(1).float().mean().item(),
                              "eval/truncated": batch.truncated.float().mean().item()}
    levels = [p.level for p in run.eval_problems]
    for level in sorted(set(levels) - {""}):
        out |= share(f"{level}/", right[torch.tensor([x == level for x in levels])])
    return out, batch


def show_response(run: Run, batch: Batch, pieces: int = 12) -> str:
    """The longest response as text, with ⟨V(s_t)⟩ before its pieces where there is a critic."""
    i = int(batch.mask.sum(1).argmax())
    n, T = int(batch.mask[i].sum()), batch.mask.shape[1]
    tokens = batch.tokens[i, -T:][batch.mask[i]].tolist()
    cuts = sorted({round(n * j / pieces) for j in range(pieces + 1)})
    text = run.tokenizer.decode(tokens)
    if batch.value is not None:
        text = "".join(f"⟨{batch.value[i, start]:+.2f}⟩{run.tokenizer.decode(tokens[start:stop])}"
                       for start, stop in zip(cuts, cuts[1:])) + "  (⟨V(s_t)⟩)"
    prompt = run.tokenizer.decode(batch.tokens[i, :-T][batch.attention[i, :-T]])
    return f"step {run.step}  {prompt[-300:]} {text}  R = {batch.reward[i]:+.0f}"


def say_if_uniform(run: Run, batch: Batch) -> None:
    """One paragraph if no response is right, or none is wrong: from that nothing can be learned."""
    n, right, T = len(batch.reward), int((batch.reward > 0).sum()), batch.mask.shape[1]
    if 0 < right < n:
        return
    texts = rollout.decode(run.tokenizer, batch.tokens[:, -T:], batch.mask)
    unboxed = sum(rollout.extract_boxed(text) is None for text in texts)
    boxes = rf", {unboxed} have no \boxed{{}} (--instruction, --verifier)" if (
        run.cfg.verifier in ("boxed", "math_verify")) else ""
    print(f"before training: {right} of {n} responses are right; {int(batch.truncated.sum())} were "
          f"cut at {run.cfg.max_response} tokens (--max-response){boxes}. Nothing can be learned "
          "unless some are right and some wrong: take easier or harder problems (--data), or "
          f"another --model. One response ends in {texts[0][-80:]!r}")


def monte_carlo(run: Run, batch: Batch, starts: Tensor, answers: list[str], k: int,
                rng: torch.Generator) -> Tensor:
    """Share right of k continuations of each state in starts [B, T], in row order: [N]. answers: to
    the B prompts. A continuation that makes its response longer than --max-response is wrong."""
    S, T = batch.tokens.shape[1], batch.mask.shape[1]
    rows, at = starts.cpu().nonzero(as_tuple=True)
    tokens, attention = batch.tokens.cpu(), batch.attention.cpu()
    prefixes = [tokens[i, : S - T + t][attention[i, : S - T + t]].tolist()
                for i, t in zip(rows.tolist(), at.tolist())]
    texts = rollout.decode(run.tokenizer, tokens[:, -T:][rows],
                           attention[:, -T:][rows] & (torch.arange(T) < at[:, None]))
    begun = [(text, answers[i]) for text, i in zip(texts, rows.tolist())]
    verifier = rollout.VERIFIERS[run.cfg.verifier]
    ids = torch.arange(len(at)).repeat_interleave(k)
    ends = respond(run, prefixes, begun, ids, rng, run.cfg.temperature,
                   verify=lambda text, begun: verifier(begun[0] + text, begun[1]))
    whole = at[ids] + ends.mask.sum(1).cpu()
    right = (ends.reward.cpu() > 0) & (whole <= run.cfg.max_response)
    return right.float().view(-1, k).mean(1)


# ---- files ---------------------------------------------------------------------------------------

RUN_FILES = {"", "actor", "checkpoints", "config", "critic", "critic-pretrained",
             "critic-pretrained-second", "critic-sft", "metrics", "pool", "pretrain",
             "pretrain-second", "result", "second", "values"}  # by the name before the first dot


def has_run(out: str) -> bool:
    """Whether a folder holds a run that has done a step, also if its checkpoints are gone."""
    lines = Path(out, "metrics.jsonl")
    return bool(checkpoints(out)) or os.path.exists(os.path.join(out, "result.json")) or (
        lines.is_file() and "rollout/success" in lines.read_text(errors="replace"))


def own_folder(out: str, resumes: bool = False) -> Any:
    """The run folder, this process's own as long as the returned file is open: a lock that ends
    with the process. ValueError if another one has it, or if it holds what no run has written."""
    import fcntl  # where there is none, on Windows, there is no torch.distributed either

    outer = [x.parent for x in (y / ".lock" for y in Path(out).resolve().parents)
             if x.is_file() and x.read_text(errors="replace").startswith("process ")]
    expect("out", "a folder outside of other runs", f"{out} in the run {outer and outer[0]}",
           resumes or not outer)
    os.makedirs(out, exist_ok=True)
    there = sorted(os.listdir(out))  # a run's folder has a lock, and a resumed one may hold notes
    foreign = [x for x in there if x.split(".")[0] not in RUN_FILES or ".lock" not in there]
    expect("out", "an empty folder or that of a run", f"{out} with {', '.join(foreign[:3])}",
           resumes or not foreign)
    lock = open(os.path.join(out, ".lock"), "a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.seek(0)
        expect("out", "a folder that no other process uses",
               f"{out} in use by {lock.read() or 'another'}", False)
    lock.truncate(0)
    print(f"process {os.getpid()} on {os.uname().nodename}", end="", file=lock, flush=True)
    return lock


def write_json(path: str, value: Any) -> None:
    """The value as indented JSON: the file holds all of it, or what was there before."""
    write_text(path, json.dumps(value, indent=1))


def write_text(path: str, text: str) -> None:
    """The text under a temporary name first."""
    Path(path + ".writing").write_text(text)
    os.replace(path + ".writing", path)


def log(run: Run, metrics: dict[str, Any]) -> None:
    """One line of metrics.jsonl; a number that is not finite is written as null."""
    if run.rank:
        return
    clean = {name: x if isinstance(x, list) or math.isfinite(x) else None
             for name, x in metrics.items()}
    with open(os.path.join(run.cfg.out, "metrics.jsonl"), "a") as file:
        file.write(json.dumps({"step": run.step, **clean}) + "\n")


def whole_state(module: nn.Module, opt: FiniteAdamW | None = None) -> dict[str, dict]:
    """Parameters and AdamW's moments (none before its first step), put together from all ranks on
    the CPU of rank 0; every rank must ask."""
    from torch.distributed.checkpoint import state_dict as dcp  # takes a second

    options = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = {"model": dcp.get_model_state_dict(module, options=options)}
    if opt and opt.state:
        state["optimizer"] = dcp.get_optimizer_state_dict(module, opt, options=options)
    return state


def restore(module: nn.Module, opt: FiniteAdamW, state: dict[str, dict]) -> None:
    """The reverse of whole_state on any number of ranks: each reads the whole, keeps its share."""
    from torch.distributed.checkpoint import state_dict as dcp

    options = dcp.StateDictOptions(full_state_dict=True)
    dcp.set_model_state_dict(module, state["model"], options=options)
    if "optimizer" in state:
        dcp.set_optimizer_state_dict(module, opt, state["optimizer"], options=options)


def save(run: Run) -> None:
    """A checkpoint, written by rank 0; every rank calls it. OSError if the disk does not take it.

    What is not healthy is not written, so that it pushes out nothing: a weight that is not finite,
    or an optimizer in the middle of skipping steps.
    """
    path = os.path.join(run.cfg.out, "checkpoints", f"step-{run.step:06d}")
    if os.path.isdir(path):
        return
    state = {name: whole_state(*part) for name, part in run.trained.items()}
    finite = not any(opt.in_a_row for _, opt in run.trained.values()) and all(
        x.isfinite().all() for part in state.values() for x in part["model"].values())
    if run.rank == 0 and not finite:
        print(f"step {run.step}: not saved, since its weights or gradients are not finite")
    elif run.rank == 0:
        write_checkpoint(run.cfg, path, run.sound, state | {
            "step": run.step, "sound": run.sound, "best": run.best, "before": run.before,
            "origin": run.origin, "ranks": run.size, "streak": run.streak, "config": {
                x: value for x, value in vars(run.cfg).items() if x not in FREE_ON_RESUME | PATHS},
            "daps": run.daps and run.daps.state_dict(),
            "actor_success": run.generative and run.generative.success.value})
    wait(run)


def write_checkpoint(cfg: Config, path: str, sound: int, state: dict[str, Any]) -> None:
    """state.pt and its checksum under a temporary name, then renamed. The last cfg.keep stay, and
    the last one up to step `sound`, so that a policy that has collapsed pushes out no sound one."""
    try:
        shutil.rmtree(path + ".writing", ignore_errors=True)
        os.makedirs(path + ".writing")
        torch.save(state, os.path.join(path + ".writing", "state.pt"))
        Path(path + ".writing", "sha256").write_text(checksum(path + ".writing"))
        os.rename(path + ".writing", path)
    except (OSError, RuntimeError) as error:  # torch.save makes RuntimeErrors of a full disk
        text = " ".join(str(error).split())
        raise OSError(f"could not write {path}, is its disk full? ({text}); last checkpoint: "
                      f"{last_checkpoint(cfg.out) or 'none'}") from None
    kept = {last_checkpoint(cfg.out, sound), *checkpoints(cfg.out)[-cfg.keep :]}
    for old in {*checkpoints(cfg.out)} - kept:
        shutil.rmtree(old)


def checksum(path: str) -> str:
    """SHA-256 of a checkpoint's tensors and numbers."""
    with open(os.path.join(path, "state.pt"), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def whole(path: str) -> bool:
    """Whether a checkpoint is as it was written."""
    try:
        return Path(path, "sha256").read_text() == checksum(path)
    except (OSError, ValueError):
        return False


def checkpoints(out: str) -> list[str]:
    """Whole checkpoints of a run folder, oldest first."""
    folder = os.path.join(out, "checkpoints")
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return [os.path.join(folder, x) for x in sorted(names) if re.fullmatch(r"step-\d{6,}", x)]


def last_checkpoint(out: str, sound: float = math.inf) -> str:
    """The last checkpoint up to step `sound`; of any step if there is none; "" without any."""
    paths = checkpoints(out)
    up_to = [x for x in paths if int(x.rpartition("-")[2]) <= sound]
    return (up_to or paths or [""])[-1]


def wait(run: Run) -> None:
    """Until every rank is here."""
    if run.size > 1:
        dist.barrier()


def load(run: Run) -> None:
    """Restores the newest checkpoint that is whole; metrics written after it are dropped.
    ValueError if there is none, or if it is one of another model."""
    paths = checkpoints(run.cfg.out)
    path = next((x for x in reversed(paths) if whole(x)), None)
    damaged = [x for x in paths if path is None or x > path]
    expect("resume", "a whole checkpoint in checkpoints/", f"none in {run.cfg.out}" + (
        f", where {', '.join(damaged)} are damaged, by their checksums" if damaged else ""), path)
    if damaged:
        print(f"damaged, by their checksums: {', '.join(damaged)}; going on from {path}")
    try:  # weights_only: no file runs code
        state = torch.load(os.path.join(path, "state.pt"), map_location="cpu", weights_only=True)
        expect("resume", "checkpoints under their own names", f"step {state['step']} in {path}",
               path.endswith(f"step-{state['step']:06d}"))
        expect_origin("resume", run, state["origin"], *run.origin)
        changed = [f"{x} {value!r}, now {getattr(run.cfg, x, None)!r}"
                   for x, value in state.get("config", {}).items()
                   if getattr(run.cfg, x, None) != value]
        expect("resume", "config.json as the run began", ", ".join(changed), not changed)
        for name, part in run.trained.items():
            restore(*part, state[name])
    except (KeyError, TypeError, RuntimeError, pickle.UnpicklingError) as error:
        raise ValueError(f"--resume: expected a checkpoint of this model in {path}, found another: "
                         f"{str(error).splitlines()[-1].strip()}") from None
    run.step, run.before, run.streak = state["step"], state["before"], state["streak"]
    run.sound, run.best = state["sound"], state["best"]
    if run.daps:
        run.daps.load_state_dict(state["daps"])
    if run.generative:
        run.generative.success.value = state["actor_success"]
    expect("steps", f"{run.step} or more, which the run has done", run.cfg.steps,
           run.cfg.steps >= run.step)
    if state["ranks"] != run.size:
        print(f"written by {state['ranks']} ranks, resumed on {run.size}: parameters, moments and "
              "counts are exact, the samples from here on are others")
    if run.rank == 0:
        for newer in damaged:
            shutil.rmtree(newer + ".damaged", ignore_errors=True)
            os.rename(newer, newer + ".damaged")
        cut_metrics(os.path.join(run.cfg.out, "metrics.jsonl"), run.step)


def cut_metrics(file: str, step: int) -> None:
    """Drops the lines after `step`, the last evaluation and what is damaged or torn by a kill."""
    lines = open(file, errors="replace").readlines() if os.path.exists(file) else []
    rows = [(line, json_object(line)) for line in lines]
    write_text(file, "".join(line for line, row in rows if row.get("step") == 0 or (
        row.get("step", math.inf) <= step and "rollout/success" in row)))


def json_object(text: str) -> dict[str, Any]:
    """The JSON object in a text, {} if there is none."""
    with contextlib.suppress(ValueError, TypeError):
        return dict(json.loads(text))
    return {}


def export(run: Run, name: str, folder: str) -> None:
    """A part that learns, put together from all ranks, as a Hugging Face folder of the run."""
    module, path = run.trained[name][0], os.path.join(run.cfg.out, folder)
    state = whole_state(module)["model"]
    if run.rank == 0 and isinstance(module, Critic):
        module.save_pretrained(path, state)
    elif run.rank == 0:
        tokenizer = run.tokenizer if name == "actor" else run.generative.tokenizer
        model, prefix = (run.actor.model, "model.") if name == "actor" else (module, "")
        rollout.write_folder(path, tokenizer, model, {
            key.removeprefix(prefix): x for key, x in state.items()})
    if run.rank == 0:
        write_json(os.path.join(path, "origin.json"), run.origin)
    wait(run)


# ---- stages --------------------------------------------------------------------------------------

def open_pool(run: Run) -> TrajectoryPool:
    """The pool of --pool; ValueError if it is empty or has tokens that the actor has not."""
    pool, rows = TrajectoryPool.open(run.cfg.pool), run.actor.model.get_input_embeddings()
    expect_origin("pool", run, pool.origin, "tokenizer")
    expect("pool", "one with trajectories", "none", len(pool))
    most = max(int(np.maximum(part, ~part).max()) for part in np.array_split(
        pool.tokens, len(pool.tokens) // 2**20 + 1) if len(part))
    expect("pool", f"token ids below {rows.num_embeddings}", most, most < rows.num_embeddings)
    return pool


def sample_pool(run: Run) -> TrajectoryPool:
    """Trajectories of policies of several strengths on the training prompts (S3AC §3.3)."""
    cfg, folder = run.cfg, os.path.join(run.cfg.out, "pool")
    filled = os.path.isdir(folder) and len(TrajectoryPool(folder))
    expect("out", "no pool there yet", f"the pool of an unfinished run; --pool {folder} uses it, "
           "another --out begins anew", not filled)
    wait(run)
    # assumption: a lower temperature stands in for a stronger policy where no later one exists yet
    policies = [(path, float(t)) for path in ("", *filter(None, cfg.pool_models.split(",")))
                for t in cfg.pool_temperatures.split(",")]  # "": the run's own policy
    rng = generator(cfg.seed, "pool")
    if cfg.pretrain == "initial":
        policies = [("", cfg.temperature)]
    load = functools.cache(lambda path: path and pretrained(
        "AutoModelForCausalLM", path, cfg, cfg.rollout_dtype or cfg.dtype).to(run.device))

    def sample(path: str, temperature: float, n: int) -> Batch:
        """n trajectories of one policy."""
        ids = torch.randint(len(run.prompts), (n,), generator=rng)
        return respond(run, run.prompts, run.answers, ids, rng, temperature, load(path) or None)

    named = [(f"{path or cfg.model or 'base'} at temperature {t}",
              functools.partial(sample, path, t)) for path, t in policies]
    return fill_pool(folder, named, pool_size(cfg) // len(named), 8 * cfg.max_rows * run.size,
                     writer=run.rank == 0, origin=run.origin)


def pretrain_critics(run: Run, pool: TrajectoryPool) -> None:
    """Value pretraining on a pool; the critic is kept in critic-pretrained/. AsyPPO's two learn
    from half of the trajectories each."""
    cfg, dtype = run.cfg, getattr(torch, run.cfg.compute_dtype)
    uniform = len(np.unique(pool.index["reward"])) < 2
    if uniform:
        print(f"warning: all {len(pool)} trajectories of the pool have the same reward, so the "
              "critic learns a constant (--pool-temperatures, --pool-models, --data)")
    print("\nshare correct (trajectories) by length and policy\n"
          + format_coverage(coverage_table(pool.index)) + "\n")
    n = min(cfg.pretrain_size or -(-2 * len(pool) // 3), len(pool))
    if n < cfg.pretrain_size:
        print(f"--pretrain-size {cfg.pretrain_size:,}: the pool has {n:,}, all are taken")
    rows = (pool.sample(n, seed=cfg.seed) if cfg.pretrain == "coverage" else
            np.sort(np.random.default_rng(cfg.seed).permutation(len(pool))[:n]))
    recipe = Recipe(
        epochs=cfg.pretrain_epochs, batch_size=cfg.pretrain_batch, token_budget=cfg.token_budget,
        peak=cfg.pretrain_lr, final=cfg.pretrain_lr_final, max_norm=cfg.critic_clip_norm,
        split=cfg.critic_clip_split, freeze=cfg.pretrain_freeze, seed=cfg.seed,
        autocast_dtype=dtype if dtype != torch.float32 and run.size == 1 else None)
    for i, (critic, _) in enumerate(run.critics):
        with updating(run, critic):
            stats = pretrain(critic, pool, rows[i :: len(run.critics)], recipe, rank=run.rank,
                             world=run.size, progress=run.rank == 0)
        second = "-second" * i
        export(run, ("critic", "second")[i], "critic-pretrained" + second)
        if run.rank == 0:
            write_json(os.path.join(cfg.out, f"pretrain{second}.json"), stats)
        if not stats["ev_after"] > 0.02 and not uniform:
            print("warning: the critic explains next to nothing of the returns on held-out prompts;"
                  " a larger pool (--pool-size), more epochs or another --pretrain-lr may help")
        print(f"critic: loss {stats['loss_first']:.3f} → {stats['loss_last']:.3f} (first and last "
              f"20 steps), EV on held-out prompts {stats['ev_before']:.2f} → "
              f"{stats['ev_after']:.2f}, {stats['clip_share']:.0%} of the steps clipped\n")


def learn_traces(run: Run) -> None:
    """GenAC, stage 1: SFT on an oracle's traces; facts about the actor may be missing in them."""
    cfg, critic = run.cfg, run.generative
    traces = genac.load_traces(cfg.traces, model_size=critic.model_size,
                               success_rate=critic.success.value)
    # assumption: AdamW with weight decay 0.01 for SFT, with moments of its own
    opt = FiniteAdamW(critic.model, cfg.critic_lr, weight_decay=0.01, name="generative critic")
    steps = genac.sft(critic, traces, opt, token_budget=cfg.token_budget, seed=cfg.seed)
    print(f"traces: loss {steps[0]['loss']:.3f} → {steps[-1]['loss']:.3f} in {len(steps)} steps")
    export(run, "critic", "critic-sft")


def write_oracle_prompts(cfg: Config) -> int:
    """--write-prompts: states of the actor's responses, balanced over outcome and quarter of the
    response. An oracle reads each line's `prompt` and adds its reply as `trace`."""
    run, states, cells, rng = setup(cfg), [], [], generator(cfg.seed, "pool")
    prepare_critic(run)
    critic, success = run.generative, run.generative.success
    while len(states) < 2 * cfg.n_prompts:  # twice as many as asked for, so that there is a choice
        ids = torch.randint(len(run.prompts), (cfg.rollout_batch,), generator=rng)
        batch = respond(run, run.prompts, run.answers, ids, rng, cfg.temperature)
        r = (batch.reward > 0).long().cpu()
        if success.value is not None:  # the first batch only says how able the actor is
            questions, tokens, mask, starts = segments(run, batch)
            states += genac.states_at(run.tokenizer, questions, tokens, starts,
                                      model_size=critic.model_size, success_rate=success.value)
            cells += zip(r[starts.cpu().nonzero()[:, 0]].tolist(), genac.quarters(starts, mask))
        success.update(r.double())
    # assumption: prompts are balanced by quarters of the response
    rows = balanced_draw(np.array([4 * r + quarter for r, quarter in cells]), cfg.n_prompts,
                         cfg.seed)
    if run.rank == 0:
        genac.write_prompts(cfg.write_prompts, [states[i] for i in rows],
                            *zip(*(cells[i] for i in rows)), icc=cfg.icc, template=critic.template)
    print(f"{len(rows)} prompts in {cfg.write_prompts}; put the oracle's reply to each under "
          "`trace`")
    return 0


def start(cfg: Config, resumes: bool) -> Run:
    """All up to the first step: base policy, evaluation, pool and pretraining; or a resume."""
    run = setup(cfg)
    os.makedirs(cfg.out, exist_ok=True)
    if cfg.rollout_batch // cfg.k > len(run.prompts) and cfg.k > 1:
        print(f"{len(run.prompts)} problems: a step has at most {len(run.prompts) * cfg.k} "
              f"trajectories and not {cfg.rollout_batch}")
    prepare_critic(run)
    if resumes:
        load(run)
        return run
    if run.rank == 0:  # of a run that never got to its first step
        Path(cfg.out, "metrics.jsonl").unlink(missing_ok=True)
    needs_pool = run.critics and not cfg.critic and cfg.pretrain != "none"
    pool = open_pool(run) if needs_pool and cfg.pool else None
    print_plan(run, needs_pool)
    since = time.perf_counter()
    run.before, batch = evaluate(run)
    log(run, run.before)
    if batch is not None:
        print_forecast(run, batch, (time.perf_counter() - since) / len(batch.mask),
                       len(pool) if pool else pool_size(cfg) * bool(needs_pool))
        say_if_uniform(run, batch)
        print(show_response(run, batch) + "\nbefore training: " + ", ".join(
            f"{name[5:]} {x:.3f}" for name, x in run.before.items()))
    if batch is not None and run.generative:
        run.generative.success.update((batch.reward > 0).double())
    if needs_pool:
        pretrain_critics(run, pool or sample_pool(run))
    if cfg.traces:
        learn_traces(run)
    if run.rank == 0:
        write_json(os.path.join(cfg.out, "config.json"), asdict(cfg))
    save(run)  # from here on the run can be resumed
    return run


def print_plan(run: Run, needs_pool: bool) -> None:
    """What will be done, before anything is sampled."""
    cfg, each = run.cfg, run.cfg.rollout_batch // run.cfg.mini_batches
    if needs_pool and not cfg.pool:
        print(f"a pool of {pool_size(cfg):,} trajectories, {cfg.max_response:,} tokens at most, "
              "and value pretraining on it (--pool-size, --max-response, --pool)")
    print(f"{len(run.eval_prompts)} × {cfg.eval_k} responses before and after training; "
          f"{cfg.steps} steps of {cfg.rollout_batch} responses and {cfg.mini_batches} updates each")
    if each < 4:
        print(f"an optimizer step sees {each} responses: fewer --mini-batches are faster and "
              "less noisy")


def print_forecast(run: Run, batch: Batch, sampling: float, n: int) -> None:
    """Minutes that the stages will take with a pool of n, if responses take as long to sample as
    the evaluation's did (in seconds each), and to score as some of them do now."""
    cfg, critics = run.cfg, len(run.critics)
    rows, since = torch.arange(min(len(batch.mask), 32 * run.size)), time.perf_counter()
    score(run, take(batch, rows.to(run.device)))
    forward = (time.perf_counter() - since) / len(rows) / (1 + critics)
    # an update has a forward pass and a backward pass of twice its time
    passes = critics + 3 * (not cfg.freeze_actor) + 3 * critics * cfg.critic_epochs
    passes += not is_exact(run)
    step = cfg.rollout_batch * (sampling + passes * forward)
    drawn = min(cfg.pretrain_size or -(-2 * n // 3), n)
    pool = n * sampling * (not cfg.pool) + 3 * drawn * cfg.pretrain_epochs * forward
    print(f"at this speed: {pool / 60:.1f} min for pool and pretraining, {step:.1f} s a step, "
          f"{(pool + cfg.steps * step) / 60:.1f} min in all (shorter with --steps, "
          "--rollout-batch, --pool-size, --max-response)")


def pool_size(cfg: Config) -> int:
    """Trajectories of a new pool: of each policy at each temperature."""
    models, strengths = (len([*filter(None, x.split(","))]) for x in (
        cfg.pool_models, cfg.pool_temperatures))
    return (1 + models) * strengths * cfg.pool_size


BAR = [("success", "rollout/success", ".2f"), ("length", "rollout/length", ".0f"),
       ("EV", "critic/explained_variance", ".2f"), ("clip", "actor/clip_share", ".3f"),
       ("R_v", "genac/reward", ".2f")]


def train(run: Run) -> None:
    """Steps up to cfg.steps, with metrics, evaluations, checkpoints; Ctrl-C ends after a step."""
    cfg, learned, idle, lost = run.cfg, False, 0, 0  # steps without learning, their responses
    bar = tqdm(total=cfg.steps, initial=run.step, desc=cfg.method, disable=run.rank > 0)
    with bar, ctrl_c(run):
        while run.step < cfg.steps:
            since = time.perf_counter()
            batch, metrics = train_step(run)
            run.seconds = time.perf_counter() - since
            right = metrics["rollout/success"]
            if right >= run.best / 2:  # so the weights that sampled were sound
                run.sound, run.best = run.step - 1, max(run.best, right)
            norm = metrics.get("actor/grad_norm", float(cfg.freeze_actor))  # none, or of 0
            if right and norm:
                learned, idle, lost = True, 0, 0
            else:  # a few responses may all be right, or all wrong, by chance
                idle += 1
                lost += metrics["rollout/sampled"] if right in (0, 1) else 256
                why = {0: "no response was right", 1: "all responses were right"}.get(
                    right, "no token was kept, no gradient was finite, or all groups were uniform "
                    "(mismatch/…, actor/grad_norm in metrics.jsonl)")
                tqdm.write(f"step {run.step}: nothing was learned, since {why}")
            if cfg.show_every and (run.step - 1) % cfg.show_every == 0 and run.rank == 0:
                tqdm.write(show_response(run, batch))
            if cfg.eval_every and run.step % cfg.eval_every == 0 and run.step < cfg.steps:
                metrics |= evaluate(run)[0]
            log(run, metrics)
            bar.update()
            bar.set_postfix({name: f"{metrics[key]:{form}}" for name, key, form in BAR
                             if key in metrics})
            if cfg.save_every and run.step % cfg.save_every == 0 and not idle:
                save(run)
            if idle >= 5 and lost >= 256:
                end = f"step {run.step}: nothing was learned in {idle} steps in a row, since {why}"
                if learned and right == 1:  # so there is nothing left to learn
                    return print(f"{end}: training ends here")
                raise RuntimeError(end)
            if metrics["run/stop"]:
                save(run)
                raise KeyboardInterrupt


@contextlib.contextmanager
def ctrl_c(run: Run) -> Iterator[None]:
    """SIGINT and SIGTERM ask for a stop after the step, since half a step cannot be resumed. A
    second Ctrl-C stops at once; not under torchrun, which passes the first one on twice."""

    def ask(signum: int, frame: Any) -> None:
        """The first signal is noted; a second Ctrl-C raises."""
        if signum == signal.SIGINT and run.stop and run.size == 1:
            raise KeyboardInterrupt
        run.stop = True
        last = f" (the last one took {run.seconds:.0f} s)" if run.seconds else ""
        print(f"\nstopping after this step{last}", file=sys.stderr)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def finish(run: Run) -> int:
    """Evaluation after training, export, the last lines. Returns the exit status."""
    cfg, key, before = run.cfg, f"eval/avg@{run.cfg.eval_k}", run.before
    save(run)
    after, _ = evaluate(run)
    log(run, after)
    for name in run.trained:
        export(run, name, name)
    if run.rank == 0:
        write_json(os.path.join(cfg.out, "result.json"), {"before": before, "after": after})
    if not after:
        print(f"done, no held-out problems to evaluate on; files in {cfg.out}")
        return 0
    print(f"\n{'held out':28}{'before':>8}{'after':>8}")
    for name in after:
        print(f"{name[5:]:28}{before.get(name, math.nan):8.3f}{after[name]:8.3f}")
    reached = cfg.target <= after[key]
    print(f"success {after[key]:.3f} ({after[key] - before[key]:+.3f})"
          + ("" if reached else f", below the target {cfg.target}") + f"; files in {cfg.out}")
    return 0 if reached else 1


BAD_INPUT = ValueError, ImportError, OSError  # exit status 2; other errors 1


def main(argv: list[str]) -> int:
    """Command line -> exit status: 0; 1 stopped or below the target; 2 bad input; 130 Ctrl-C."""
    rank, cfg, lock, run = int(os.environ.get("RANK", 0)), None, None, None
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
    out = sys.stdout if rank == 0 else open(os.devnull, "w")  # one rank speaks
    with contextlib.redirect_stdout(out):
        try:
            cfg, resumes = parse(argv)
            check(cfg)
            found = "--resume goes on with it" if checkpoints(cfg.out) else "without checkpoints"
            expect("out", "a folder without a run", f"one in {cfg.out} ({found})",
                   resumes or not has_run(cfg.out))
            if cfg.write_prompts:
                return write_oracle_prompts(cfg)
            lock = rank or own_folder(cfg.out, resumes)  # held until the process ends
            run = start(cfg, resumes)
            train(run)
            return finish(run)
        except KeyboardInterrupt:
            print("\ninterrupted" + (f": {what_is_there(cfg)}" if cfg else ""))
            return 130
        except Exception as error:
            if "--debug" in argv:
                traceback.print_exc()
            bad_input = isinstance(error, BAD_INPUT)
            with contextlib.suppress(OSError):  # a link, a mount or `.` stays
                if rank == 0 and lock and os.listdir(cfg.out) == [".lock"]:  # nothing was begun
                    os.remove(os.path.join(cfg.out, ".lock"))
                    os.rmdir(cfg.out)
            if rank == 0 or not bad_input:  # all ranks see the same bad input
                who = f"rank {rank}: " if "RANK" in os.environ else ""
                fell = run and run.sound < run.step - 1  # the last weights have sampled badly
                print(who + sentence(error, cfg, run.sound if fell else None), file=sys.stderr)
            return 2 if bad_input else 1


def what_is_there(cfg: Config) -> str:
    """What an interrupted run has left, and how to go on."""
    pool = os.path.join(cfg.out, "pool")
    if last := last_checkpoint(cfg.out):
        return f"{last} is there, go on with --resume {cfg.out}"
    return "there is no checkpoint yet, so there is nothing to resume" + (
        f"; --pool {pool} uses the {len(TrajectoryPool(pool)):,} trajectories sampled so far"
        if os.path.isdir(pool) and len(TrajectoryPool(pool)) else "")


def sentence(error: Exception, cfg: Config | None, sound: int | None = None) -> str:
    """An error as one line for the user; sound: the last step before success halved, if it did."""
    text, last = " ".join(str(error).split()), last_checkpoint(cfg.out) if cfg else ""
    if "No space left" in text:
        text = f"could not write to {cfg.out}, its disk is full ({text})"
    elif isinstance(error, BAD_INPUT):
        return f"error: {text or type(error).__name__}"
    elif isinstance(error, (MemoryError, torch.OutOfMemoryError)) or re.search(
            "allocate memory|out of memory", text):
        text = f"out of memory: a smaller --token-budget or --max-rows may help ({text[:200]})"
    elif not isinstance(error, (RuntimeError, FloatingPointError)):
        text = f"{type(error).__name__}: {text} (--debug shows where)"
    before = last_checkpoint(cfg.out, sound) if last and sound is not None else last
    return f"stopped: {text}" + (f"; last checkpoint {last}" if last else "") + (
        f"; success has halved since {before}: to go on from there remove the newer ones"
        if before != last else "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
