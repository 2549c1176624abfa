"""Value pretraining with coverage: a critic that knows long and correct responses from the start.

    loss = (1/N) Σ_i Σ_t ½ (V(s_t) − R_i)²     N = sampled tokens of the whole step, R_i ∈ {−1, +1}

S3AC §3.3, Table 4, Figures 5 and 10. A critic fitted to the initial policy alone has hardly met a
long response that ends well (over 24K tokens 5.0 % are correct; after 1,600 steps of training
61.8 %), so it marks long prefixes down just when the policy learns to write them. Remedy: pool
trajectories of policies of several strengths, look at the share correct by length and policy, draw
a balanced set and fit V to R for two epochs: lr 1e-5 → 5e-6 (cosine, 3 % warm-up); attention,
routers and vision tower frozen; gradient norm clipped at 10.

The pool is a folder of two files, memory-mapped, so that billions of tokens are never loaded:
    tokens.bin   int32, all trajectories end to end, no padding. A token that the policy sampled is
                 stored as its id, any other (prompt, tool output) as ~id, which is negative: the
                 mask travels with the tokens.
    index.bin    one RECORD per trajectory: where it starts, how long it is, who wrote it,
                 how it ended.
An append writes the tokens first and the index second, each through to the disk, so a killed writer
loses at most its own append. One writer at a time, any number of readers.

Shapes: tokens, attention [B, S], mask [B, T], reward [B], S = P + T (prompt left-, response
right-padded). Length = sampled tokens. Bucket k of the edges e holds e[k−1] < length ≤ e[k].

What the paper leaves open is marked `assumption`. Left out: resuming half-way.

    python value_pretrain.py               a pool of three policies, its coverage, a tiny critic
    python value_pretrain.py --pool DIR    the coverage table of an existing pool
    python value_pretrain.py --claims      coverage against initial pool: Figures 2a, 5 and 10
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from critic import (
    Critic, clip_critic_grad_, explained_variance, one_thread, side_by_side, value_loss,
)
from rollout import Batch, length_groups, response

RECORD = np.dtype([
    ("offset", "<i8"),           # of the first token, counted in tokens
    ("prompt_id", "<i8"),
    ("prompt_length", "<i4"),
    ("response_length", "<i4"),  # gaps (tool output) included
    ("sampled", "<i4"),          # response tokens that the policy sampled: the trainable ones
    ("policy", "<i4"),           # label of the policy that wrote it
    ("reward", "<f4"),
    ("truncated", "?"),
], align=True)


# ---- the pool

class TrajectoryPool:
    """Trajectories on disk: `.index`, an array of RECORDs, and `.tokens`, flat; both memory-mapped.

    TrajectoryPool(path) opens the folder or starts an empty pool in it; .open wants a pool there.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        files = [self.path / "tokens.bin", self.path / "index.bin"]
        there = [f for f in files if f.exists()]
        if len(there) == 1 and there[0].stat().st_size:
            raise ValueError(
                f"path: expected tokens.bin and index.bin in {path}, found only {there[0].name}")
        for file in files:
            if file not in there:
                file.touch()
        self._index_bytes = files[1].stat().st_size
        index = _memmap(files[1], RECORD, self._index_bytes // RECORD.itemsize)
        self._map(*_sound(index, files[0].stat().st_size // 4))

    @classmethod
    def open(cls, path: str | os.PathLike) -> TrajectoryPool:
        """The pool in an existing folder, without what a killed writer left unfinished.

        ValueError if there is none, or if its records do not follow one another.
        """
        if not (Path(path) / "index.bin").is_file():
            raise ValueError(f"path: expected a folder with tokens.bin and index.bin, found {path}")
        return cls(path)

    def __len__(self) -> int:
        return len(self.index)

    def append(self, batch: Batch, policy: int) -> None:
        """Write the rows of a Batch, padding stripped, under the label `policy` (an integer).

        Reads tokens, attention, mask, reward, prompt_id and truncated. ValueError, and nothing
        written, on shapes that do not fit, a mask outside the attention, an empty prompt, a reward
        that is not finite, ids that are no int32, or a second writer.
        """
        tokens, attention, mask, reward = _checked(batch)
        P = tokens.shape[1] - mask.shape[1]
        sampled = np.concatenate([np.zeros_like(attention[:, :P]), mask], axis=1)
        flat = np.where(sampled, tokens, ~tokens)[attention].astype("<i4")   # row after row
        length = attention.sum(1)
        new = np.zeros(len(tokens), RECORD)
        new["offset"] = len(self.tokens) + np.cumsum(length) - length
        new["prompt_length"] = attention[:, :P].sum(1)
        new["response_length"] = attention[:, P:].sum(1)
        new["sampled"], new["reward"], new["policy"] = mask.sum(1), reward, policy
        new["prompt_id"] = batch.prompt_id.cpu().numpy()
        new["truncated"] = batch.truncated.cpu().numpy()
        if (self.path / "index.bin").stat().st_size != self._index_bytes:
            raise ValueError(f"pool: expected one writer, found {self.path} changed since it was "
                             "opened; open it again")
        # At no moment does a record point at tokens that are not its own: records that have lost
        # theirs go first, then come the tokens, and last their records.
        end = RECORD.itemsize * len(self)
        if self._index_bytes > end:
            self._index_bytes = _write(self.path / "index.bin", end, new[:0])
        _write(self.path / "tokens.bin", 4 * len(self.tokens), flat)
        self._index_bytes = _write(self.path / "index.bin", end, new)
        self._map(len(self) + len(new), len(self.tokens) + len(flat))

    def batch(self, rows: np.ndarray, pad_id: int = 0) -> tuple[torch.Tensor, ...]:
        """rows [B] -> tokens [B, S] long, attention [B, S] bool, mask [B, T] bool, reward [B].

        Padded as a Batch, to the longest prompt and response of these rows; on the CPU.
        """
        if not len(rows):
            raise ValueError("rows: expected at least one row number, found none")
        record = self.index[np.asarray(rows)]
        prompt, answer = record["prompt_length"], record["response_length"]
        B, P, T = len(record), prompt.max(), answer.max()
        tokens = np.full((B, P + T), pad_id, np.int64)
        attention, mask = np.zeros((B, P + T), bool), np.zeros((B, T), bool)
        for i, (start, p, r) in enumerate(zip(record["offset"], prompt, answer)):
            stored = self.tokens[start:start + p + r]
            tokens[i, P - p:P + r] = np.where(stored < 0, ~stored, stored)
            attention[i, P - p:P + r] = True
            mask[i, :r] = stored[p:] >= 0
        reward = record["reward"].copy()
        return tuple(torch.from_numpy(x) for x in (tokens, attention, mask, reward))

    def sample(
        self, n: int, *, edges: np.ndarray | None = None, seed: int | np.random.Generator = 0
    ) -> np.ndarray:
        """Row numbers [n], balanced over length and outcome: coverage_sample of this pool."""
        return coverage_sample(self.index, n, edges=edges, seed=seed)

    def _map(self, rows: int, n_tokens: int) -> None:
        self.index = _memmap(self.path / "index.bin", RECORD, rows)
        self.tokens = _memmap(self.path / "tokens.bin", np.dtype("<i4"), n_tokens)


def _memmap(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    return np.memmap(path, dtype, "r", shape=(count,)) if count else np.empty(0, dtype)


def _sound(index: np.ndarray, n_tokens: int) -> tuple[int, int]:
    """(records whose tokens are all there, tokens they cover): what a killed writer left intact."""
    ends = index["offset"] + index["prompt_length"] + index["response_length"]
    starts = np.concatenate([[0], ends])[:-1]
    wrong = np.flatnonzero((index["offset"] != starts) | (index["prompt_length"] < 1))
    if len(wrong):   # not a torn tail, so it is not ours to cut off
        i = wrong[0]
        raise ValueError(f"index.bin: expected record {i} at token {starts[i]}, found {index[i]}: "
                         "another layout, or damage")
    rows = int(np.searchsorted(ends, n_tokens, side="right"))
    return rows, int(ends[rows - 1]) if rows else 0


def _write(path: Path, at: int, data: np.ndarray) -> int:
    """Put data at byte `at`, over any torn tail, and wait for the disk. Returns the new size."""
    with open(path, "r+b") as file:
        file.truncate(at)
        file.seek(at)
        file.write(data.tobytes())
        file.flush()
        os.fsync(file.fileno())
    return at + data.nbytes


def _checked(batch: Batch) -> tuple[np.ndarray, ...]:
    """tokens, attention, mask, reward as arrays, or a ValueError before anything is written."""
    tokens, reward = batch.tokens.cpu().numpy(), batch.reward.float().cpu().numpy()
    attention, mask = batch.attention.cpu().numpy() != 0, batch.mask.cpu().numpy() != 0
    B, S = tokens.shape
    if attention.shape != (B, S) or len(mask) != B or mask.shape[1] >= S:
        raise ValueError(f"batch: expected attention ({B}, {S}) and mask ({B}, less than {S}), "
                         f"found {attention.shape} and {mask.shape}")
    for name in ("reward", "prompt_id", "truncated"):
        shape = tuple(getattr(batch, name).shape)
        if shape != (B,):
            raise ValueError(f"batch.{name}: expected shape ({B},), found {shape}")
    P = S - mask.shape[1]
    if (mask & ~attention[:, P:]).any():
        raise ValueError("batch.mask: expected sampled tokens inside the attention, found others")
    if not attention[:, :P].any(1).all():
        row = attention[:, :P].any(1).argmin()
        raise ValueError(f"batch.attention: expected a prompt in each row, found none in row {row}")
    if not np.isfinite(reward).all():
        raise ValueError("batch.reward: expected finite numbers, found NaN or inf")
    real = tokens[attention]
    if real.size and not 0 <= real.min() <= real.max() < 2**31:
        raise ValueError(f"batch.tokens: expected 0 … 2^31 − 1, found {real.min()} … {real.max()}")
    return tokens, attention, mask, reward


# ---- coverage

class Cell(NamedTuple):
    """One policy in one bucket, low < length ≤ high (None: no upper end). share: share correct."""
    policy: int
    low: int
    high: int | None
    count: int
    share: float


def length_edges(length: np.ndarray, buckets: int = 8) -> np.ndarray:
    """Edges [≤ buckets − 1] of buckets of equal width from 0 to the longest length."""
    return np.unique(np.ceil(np.linspace(0, length.max(), buckets + 1)[1:-1]).astype(np.int64))


def coverage_table(index: np.ndarray, edges: np.ndarray | None = None) -> list[Cell]:
    """Share correct (reward > 0) by policy and length, one Cell per pair; share NaN if it is empty.

    index: RECORDs, `pool.index` or a part of it. S3AC Figure 10. ValueError on an empty index.
    """
    bucket, edges = _buckets(index, edges)
    policy, row = np.unique(index["policy"], return_inverse=True)
    columns = len(edges) + 1
    cell = row * columns + bucket
    count = np.bincount(cell, minlength=len(policy) * columns)
    correct = np.bincount(cell, index["reward"] > 0, len(count))
    share = np.where(count > 0, correct / np.maximum(count, 1), math.nan)
    lows, highs = [0, *edges.tolist()], [*edges.tolist(), None]
    return [Cell(int(policy[i // columns]), lows[i % columns], highs[i % columns], int(n), float(s))
            for i, (n, s) in enumerate(zip(count, share))]


def format_coverage(table: list[Cell]) -> str:
    """The table as text: a line per length bucket, a column per policy: share correct (count)."""
    policies = sorted({c.policy for c in table})
    highs = list(dict.fromkeys(c.high for c in table))

    def text(cells: list[Cell]) -> str:
        """Share correct of several cells together and their count, or a dash for none."""
        n, correct = sum(c.count for c in cells), sum(c.count * c.share for c in cells if c.count)
        return f"{100 * correct / n:.1f} % ({n:,})" if n else "–"

    def line(name: str, cells: list[Cell]) -> str:
        """A row of the table: its name, a column per policy, all of them."""
        columns = [text([c for c in cells if c.policy == p]) for p in policies] + [text(cells)]
        return name.rjust(14) + "".join(x.rjust(20) for x in columns)

    head = "sampled tokens".rjust(14) + "".join(f"policy {p}".rjust(20) for p in policies)
    names = [f"≤ {h:,}" if h is not None else f"> {table[-1].low:,}" for h in highs]
    lines = [line(name, [c for c in table if c.high == h]) for name, h in zip(names, highs)]
    return "\n".join([head + "all".rjust(20), *lines, line("all", table)])


def coverage_sample(
    index: np.ndarray, n: int, *,
    edges: np.ndarray | None = None, seed: int | np.random.Generator = 0,
) -> np.ndarray:
    """n distinct row numbers, sorted, balanced over length bucket × outcome.

    Every cell gives the same number; one that has fewer gives all it has and the others make up for
    it: the few long and correct ones are not drowned. Within a cell the draw is uniform.
    ValueError if n is not in 1 … len(index).
    """
    if not 1 <= n <= len(index):
        raise ValueError(f"n: expected 1 … {len(index)} (trajectories in the pool), found {n}")
    bucket, edges = _buckets(index, edges)
    # assumption: equal counts per length × outcome; the weights of the paper's pool are not known
    cell = (2 * bucket + (index["reward"] > 0)).astype(np.int16)   # int16: sorted by radix
    count = np.bincount(cell, minlength=2 * len(edges) + 2)
    quota = _quota(count, n)
    order = np.random.default_rng(seed).permutation(len(index))
    order = order[np.argsort(cell[order], kind="stable")]          # cell by cell, random inside
    rank = np.arange(len(order)) - np.repeat(np.cumsum(count) - count, count)
    return np.sort(order[rank < np.repeat(quota, count)])


def _quota(count: np.ndarray, n: int) -> np.ndarray:
    """How many each cell gives: the smallest first, each at most an equal share of what is left."""
    quota = np.zeros_like(count)
    for done, cell in enumerate(np.argsort(count, kind="stable")):
        quota[cell] = min(count[cell], (n - quota.sum()) // (len(count) - done))
    return quota


def _buckets(index: np.ndarray, edges: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    if not len(index):
        raise ValueError("index: expected at least one trajectory, found none")
    edges = length_edges(index["sampled"]) if edges is None else np.asarray(edges, np.int64)
    if edges.ndim != 1 or (np.diff(edges) <= 0).any():
        raise ValueError(f"edges: expected increasing lengths, found {edges.tolist()}")
    return np.searchsorted(edges, index["sampled"], side="left"), edges


def split_by_prompt(
    prompt_id: np.ndarray, share: float, seed: int | np.random.Generator = 0
) -> np.ndarray:
    """prompt_id [N] -> [N] bool, held out or not: all trajectories of a random share of prompts.

    So no prompt is on both sides. Share 0 holds out nothing; ValueError if a side has no prompt.
    """
    ids = np.unique(prompt_id)
    n = max(1, round(share * len(ids))) if share else 0
    if not 0 <= share < 1 or n >= len(ids):
        raise ValueError(f"held_out: expected a share in [0, 1) that leaves a prompt on each side, "
                         f"found {share} of {len(ids)} prompts")
    return np.isin(prompt_id, np.random.default_rng(seed).permutation(ids)[:n])


# ---- pretraining

def lr_at(
    step: int, total: int, *, peak: float = 1e-5, final: float = 5e-6, warmup: float = 0.03
) -> float:
    """Learning rate of step 0 … total − 1: linear up to peak, then cosine down to final. S3AC §3.3.

    The last step of the warm-up has peak, the last of all final (where there is only one: peak).
    Never 0. ValueError on a step outside or a warm-up outside [0, 1].
    """
    if not 0 <= warmup <= 1:
        raise ValueError(f"warmup: expected a share in [0, 1], found {warmup}")
    if not 0 <= step < total:
        raise ValueError(f"step: expected 0 … {total - 1}, found {step}")
    rise = max(1, round(warmup * total))
    if step < rise:
        return peak * (step + 1) / rise
    done = (step + 1 - rise) / (total - rise)
    return final + (peak - final) * 0.5 * (1 + math.cos(math.pi * done))


# Whole components of a parameter's dotted name: so `gate` is the router of an MoE layer (Mixtral,
# Qwen, DeepSeek), never gate_proj or gate_up_proj, and `attention` no post_attention_layernorm.
ATTENTION = {"self_attn", "attn", "attention", "self_attention", "cross_attn", "linear_attn"}
ROUTER = {"gate", "router"}
VISION = {"visual", "vision_tower", "vision_model"}


def freeze_for_pretraining_(critic: Critic) -> list[str]:
    """Freeze attention layers, MoE routers and the vision tower; returns their names (S3AC §3.3).

    By the parameter names of transformers: Llama, Qwen, Gemma, GPT-2, GPT-NeoX, Mixtral, DeepSeek,
    GPT-OSS, Llava, Qwen-VL and their like. MLPs, experts, embeddings, the norms between the layers
    and the head stay trainable. ValueError if no name matches.
    """
    # assumption: all that is inside an attention module is attention, so q_norm, k_norm and linear
    # attention too; the projector inside `visual` is part of the tower; shared_expert_gate, which
    # scales one expert and picks none, is not a router
    frozen = []
    for name, parameter in critic.backbone.named_parameters(prefix="backbone"):
        if (ATTENTION | ROUTER | VISION) & set(name.split(".")):
            parameter.requires_grad_(False)
            frozen.append(name)
    if not frozen:
        raise ValueError(
            f"critic: expected one of {sorted(ATTENTION | ROUTER | VISION)} in parameter names, "
            f"found none in {type(critic.backbone).__name__}; freeze by hand, pass freeze='none'")
    return frozen


def freeze_backbone_(critic: Critic) -> list[str]:
    """Freeze all but the head; returns the names frozen."""
    critic.backbone.requires_grad_(False)
    return [name for name, _ in critic.backbone.named_parameters(prefix="backbone")]


FREEZE = {"attention": freeze_for_pretraining_, "backbone": freeze_backbone_,
          "none": lambda critic: []}


def micro_batches(
    index: np.ndarray, rows: np.ndarray, token_budget: int, world: int = 1
) -> list[np.ndarray]:
    """rows [B] in groups of similar length, see `length_groups`."""
    prompt, answer = (index[name][rows].tolist() for name in ("prompt_length", "response_length"))
    return [rows[group] for group in length_groups(prompt, answer, token_budget, world)]


def predict(
    critic: Critic, pool: TrajectoryPool, rows: np.ndarray,
    autocast_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """rows [B] -> value, target (λ_critic = 1: R at each token), mask; [B, T] on its device."""
    device = next(critic.parameters()).device
    tokens, attention, mask, reward = (x.to(device) for x in pool.batch(rows))
    with torch.autocast(device.type, dtype=autocast_dtype, enabled=autocast_dtype is not None):
        value = response(critic(tokens, attention), mask.shape[1])
    return value, reward[:, None].to(value.dtype).expand_as(value), mask


def accumulate_gradient(
    critic: Critic, pool: TrajectoryPool, rows: np.ndarray, *,
    token_budget: int = 32_768, autocast_dtype: torch.dtype | None = None,
    rank: int = 0, world: int = 1,
) -> torch.Tensor:
    """Add the gradient of one step over all rows to .grad, in micro-batches; returns the loss [].

    Divided by the step's own number of sampled tokens, so that neither the budget nor the number
    of ranks changes the result.
    """
    n_tokens = int(pool.index["sampled"][rows].sum())
    total = 0.0
    for group in micro_batches(pool.index, rows, token_budget, world):
        value, target, mask = predict(critic, pool, group[rank::world], autocast_dtype)
        loss, _ = value_loss(value, target, mask, n_tokens)   # Σ ½ (V(s_t) − R)² / N
        (loss * world).backward()                             # FSDP takes the mean over ranks
        total = total + loss.detach()
    if world > 1:
        dist.all_reduce(total)
    return total


@torch.no_grad()
def held_out_ev(
    critic: Critic, pool: TrajectoryPool, rows: np.ndarray, *,
    token_budget: int = 32_768, autocast_dtype: torch.dtype | None = None,
    rank: int = 0, world: int = 1,
) -> float:
    """EV = 1 − Var(R − V)/Var(R) over the sampled tokens of rows; NaN for none or equal returns."""
    parts = [torch.empty(2, 0)]
    for group in micro_batches(pool.index, rows, token_budget, world) if len(rows) else []:
        value, target, mask = predict(critic, pool, group[rank::world], autocast_dtype)
        parts.append(torch.stack([value[mask], target[mask]]).cpu())
    parts = [torch.cat(parts, dim=1)] * world
    if world > 1:
        dist.all_gather_object(parts, parts[0])
    value, target = torch.cat(parts, dim=1)[:, None]   # [1, N] each
    return explained_variance(value, target, torch.ones_like(value))


def pretrain(
    critic: Critic, pool: TrajectoryPool, rows: np.ndarray | None = None, *,
    epochs: int = 2,
    batch_size: int = 256,   # assumption: trajectories per step; the paper's number is not known
    token_budget: int = 32_768,
    peak: float = 1e-5, final: float = 5e-6, warmup: float = 0.03,
    max_norm: float = 10.0, split: bool = False,
    held_out: float = 0.02, eval_rows: int = 1024, eval_every: int = 0,
    freeze: str = "attention",
    autocast_dtype: torch.dtype | None = None,
    seed: int | np.random.Generator = 0,
    progress: bool = True,
    rank: int = 0, world: int = 1,
) -> dict:
    """Fit V to R in place, on the critic's device, in the mode (train or eval) it is in. S3AC §3.3.

    rows: row numbers, such as pool.sample(n); None: all. held_out: share of the *prompts* kept for
    explained variance, so no prompt is on both sides; at most eval_rows of their trajectories are
    used. token_budget: padded tokens of a micro-batch, a matter of memory alone. split: clip head
    and backbone each by its own norm. freeze: attention (and routers and vision tower), backbone
    (only the head learns) or none. Keep float32 weights and pass autocast_dtype=torch.bfloat16:
    a step of 1e-5 is lost in bfloat16 weights. rank, world: of a critic that fully_shard has taken
    apart; every rank calls this with the same pool and arguments.

    Returns frozen (names) · steps · tokens (trained on, all epochs) · loss_first, loss_last (mean
    of 20 steps) · clip_share · head_share (of the squared gradient norm) · ev_before, ev_after ·
    skipped_nonfinite · curve: lists of lr, loss, grad_norm, head_share, clipped by step, and of
    ev (steps done, EV). What was trainable before is so again afterwards. ValueError on bad
    arguments; RuntimeError when loss or gradient is not finite five times in a row (such steps are
    skipped, so the weights are still those of the last good one).
    """
    if freeze not in FREEZE:
        raise ValueError(f"freeze: expected one of {', '.join(FREEZE)}, found {freeze}")
    rng = np.random.default_rng(seed)
    batches, test = _plan(pool, rows, epochs, batch_size, held_out, rng)
    batches = [b[:len(b) // world * world] for b in batches if len(b) >= world]
    test = test[:min(len(test), eval_rows) // world * world]
    how = {"token_budget": token_budget, "autocast_dtype": autocast_dtype,
           "rank": rank, "world": world}
    curve = {name: [] for name in ("lr", "loss", "grad_norm", "head_share", "clipped")}
    tokens = skipped = in_a_row = 0
    trainable = [p for p in critic.parameters() if p.requires_grad]
    try:
        frozen = FREEZE[freeze](critic)
        learning = [p for p in trainable if p.requires_grad]
        # assumption: betas and weight decay
        optimizer = torch.optim.AdamW(learning, peak, betas=(0.9, 0.999), weight_decay=0.01)
        critic.zero_grad()
        ev = [(0, held_out_ev(critic, pool, test, **how))]
        bar = tqdm(batches, "value pretraining", disable=not progress)
        for step, chosen in enumerate(bar):
            lr = lr_at(step, len(batches), peak=peak, final=final, warmup=warmup)
            optimizer.param_groups[0]["lr"] = lr
            loss = float(accumulate_gradient(critic, pool, chosen, **how))
            norms = clip_critic_grad_(critic, max_norm, split=split)   # from before the clipping
            norm, head_share = norms["total"], norms["head_share"]
            if math.isfinite(loss + norm):
                optimizer.step()
                in_a_row = 0
                clipped = (max(norms["head"], norms["backbone"]) if split else norm) > max_norm
                for name, x in zip(curve, (lr, loss, norm, head_share, clipped)):
                    curve[name].append(x)
                tokens += int(pool.index["sampled"][chosen].sum())
            else:
                skipped, in_a_row = skipped + 1, in_a_row + 1
            critic.zero_grad()
            if in_a_row == 5:
                raise RuntimeError(f"pretrain: loss {loss}, gradient norm {norm} at step {step} of "
                                   f"{len(batches)}: not finite for the fifth time in a row")
            if step + 1 == len(batches) or eval_every and (step + 1) % eval_every == 0:
                ev.append((step + 1, held_out_ev(critic, pool, test, **how)))
            bar.set_postfix(loss=f"{loss:.3f}", ev=f"{ev[-1][1]:.3f}", skipped=skipped)
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
        critic.zero_grad()
    return {
        "frozen": frozen, "steps": len(curve["loss"]), "tokens": tokens,
        "loss_first": _mean(curve["loss"][:20]), "loss_last": _mean(curve["loss"][-20:]),
        "clip_share": _mean(curve["clipped"]), "head_share": _mean(curve["head_share"]),
        "ev_before": ev[0][1], "ev_after": ev[-1][1], "skipped_nonfinite": skipped,
        "curve": curve | {"ev": ev},
    }


def _plan(
    pool: TrajectoryPool, rows: np.ndarray | None, epochs: int, batch_size: int, held_out: float,
    rng: np.random.Generator,
) -> tuple[list[np.ndarray], np.ndarray]:
    """The rows of each step, all epochs one after the other, and the held-out rows; shuffled."""
    if min(epochs, batch_size) < 1:
        raise ValueError(f"epochs, batch_size: expected at least 1, found {epochs}, {batch_size}")
    rows = np.arange(len(pool)) if rows is None else np.asarray(rows)
    rows = rows[pool.index["sampled"][rows] > 0]   # a row without a sampled token teaches nothing
    if not len(rows):
        raise ValueError("rows: expected a trajectory with a sampled token, found none")
    out = split_by_prompt(pool.index["prompt_id"][rows], held_out, rng)
    orders = [rng.permutation(rows[~out]) for _ in range(epochs)]
    batches = [o[i:i + batch_size] for o in orders for i in range(0, len(o), batch_size)]
    return batches, rng.permutation(rows[out])


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else math.nan


def _countdown(strength: float, size: int, rng: np.random.Generator) -> Batch:
    """The demo's task: from n write n−1 … 0 and a full stop; a slip turns all that follows into x.

    A step is right with probability `strength`, so only a strong policy gets a long answer right.
    """
    stop, lost, zero, names = 1, 2, 3, 28                     # ids; 0 is padding
    n, t = rng.integers(1, 25, (size, 1)), np.arange(25)
    wrong = np.cumsum((rng.random((size, 25)) > strength) & (t < n), axis=1) > 0
    answer = np.where(wrong, lost, np.where(t < n, zero + n - 1 - t, stop))
    name = rng.integers(0, 20, (size, 2))                     # so that there are many prompts
    prompt, mask = np.concatenate([names + name, zero + n], axis=1), t <= n
    tokens = np.concatenate([prompt, np.where(mask, answer, 0)], axis=1)
    attention = np.concatenate([prompt > 0, mask], axis=1)
    prompt_id = n[:, 0] + 25 * (name[:, 0] + 20 * name[:, 1])
    arrays = tokens, attention, mask, prompt_id, np.where(wrong.any(1), -1.0, 1.0), wrong.any(1)
    return Batch(*map(torch.from_numpy, arrays), logp_roll=torch.zeros(size, 25))


def _best_ev(pool: TrajectoryPool, rows: np.ndarray) -> float:
    """EV of the mean return by (n, last token): all that a countdown tells about its end."""
    tokens, _, mask, reward = (x.numpy() for x in pool.batch(rows))
    state = (64 * tokens[:, 2:3] + tokens[:, 2:-1])[mask]
    R = np.broadcast_to(reward[:, None], mask.shape)[mask]
    mean = np.bincount(state, R) / np.maximum(np.bincount(state), 1)
    return 1 - np.var(R - mean[state]) / np.var(R)


def _show(pool: TrajectoryPool) -> None:
    tokens = int(pool.index["sampled"].sum(dtype=np.int64))
    print(f"{len(pool):,} trajectories, {tokens:,} sampled tokens: share correct (trajectories)\n")
    print(format_coverage(coverage_table(pool.index)))


def _demo(args: argparse.Namespace) -> None:
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        pool = TrajectoryPool(folder)
        for policy, strength in enumerate((0.80, 0.93, 0.98)):
            pool.append(_countdown(strength, 3000, rng), policy)
        print("Countdowns of three policies, right with 80, 93 and 98 % in each step\n")
        _show(pool)
        rows = pool.sample(4096, seed=rng)
        print("\n4,096 of them drawn for coverage:\n")
        print(format_coverage(coverage_table(pool.index[rows])))
        critic = Critic(LlamaModel(LlamaConfig(
            vocab_size=48, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4)))
        # a tiny critic starts from nothing and has few steps: a larger step size than the paper's
        stats = pretrain(critic, pool, rows, batch_size=128, peak=1e-3, final=1e-4, held_out=0.1,
                         eval_every=6, seed=rng)
        best = _best_ev(pool, rows)
    curve, bar = stats["curve"], "█"
    print(f"\n{'steps':>6}{'lr':>10}{'loss':>8}{'norm':>8}{'head':>8}{'EV, held-out prompts':>22}")
    for done, ev in curve["ev"]:
        row = [curve[k][max(done, 1) - 1] for k in ("lr", "loss", "grad_norm", "head_share")]
        print("{:>6}{:10.1e}{:8.3f}{:8.2f}{:8.1%}{:10.3f} ".format(done or "start", *row, ev)
              + bar * round(30 * ev))
    print(f"\nEV {stats['ev_before']:.3f} -> {stats['ev_after']:.3f}, where the text allows about "
          f"{best:.3f}\nloss {stats['loss_first']:.3f} -> {stats['loss_last']:.3f} (first and last "
          f"20 steps), {stats['clip_share']:.0%} of the steps clipped, "
          f"{len(stats['frozen'])} matrices frozen, {stats['tokens']:,} tokens")


# ---- the claims of Figures 2a, 5 and 10, on the embedded task

# name: pool, rows drawn balanced over length × outcome or plainly, what is frozen. The paper's two
# critics come first; the others change one thing about them.
CRITICS = {
    "coverage": ("coverage", True, "attention"),
    "initial": ("initial", False, "attention"),
    "coverage-plain": ("coverage", False, "attention"),
    "initial-balanced": ("initial", True, "attention"),
    "full": ("coverage", True, "none"),
    "head-only": ("coverage", True, "backbone"),
}
ACTORS = ("coverage", "initial", "head-only")  # critics that also train an actor
POLICIES = ("initial policy", "stronger policy")


def _policy_pool(
    folder: Path, policies: list[tuple[str, float]], n: int, *, held_out: bool = False
) -> TrajectoryPool:
    """n responses of each policy (folder, temperature), labelled in this order; sampled once."""
    from rollout import chain_reward, collect, task_problems
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if folder.exists():
        return TrajectoryPool.open(folder)
    new = folder.with_name(folder.name + ".sampling")
    shutil.rmtree(new, ignore_errors=True)
    pool, problems = TrajectoryPool(new), task_problems(held_out=held_out)
    rng = torch.Generator().manual_seed(0)
    for label, (path, temperature) in enumerate(policies):
        model, tokenizer = (x.from_pretrained(path) for x in (AutoModelForCausalLM, AutoTokenizer))
        for ids in (torch.arange(n) % len(problems)).split(2048):
            pool.append(collect(
                model, tokenizer, [tokenizer(problems[i].prompt).input_ids for i in ids],
                [problems[i].answer for i in ids], ids, chain_reward, generator=rng,
                eos_id=[tokenizer.eos_token_id], max_new_tokens=64, temperature=temperature), label)
    new.rename(folder)
    return TrajectoryPool.open(folder)


def _pretrained_critic(job: dict) -> None:
    """Pretrain the critic of a job and keep it in job["folder"]; pretrain.json comes last."""
    from train import write_json

    pool_name, balanced, freeze = CRITICS[job["name"]]
    pool, seed, n = TrajectoryPool.open(Path(job["out"], pool_name)), job["seed"], job["n"]
    rng = np.random.default_rng(seed)
    rows = pool.sample(n, seed=rng) if balanced else rng.choice(len(pool), n, replace=False)
    torch.manual_seed(seed)
    critic = Critic.from_pretrained(job["base"])
    stats = pretrain(critic, pool, rows, batch_size=32, peak=1e-3, final=1e-4, held_out=0,
                     freeze=freeze, seed=seed, progress=False)
    critic.save_pretrained(job["folder"])
    write_json(os.path.join(job["folder"], "pretrain.json"), stats)


def _critic_folder(args: argparse.Namespace, name: str, seed: int) -> Path:
    return Path(args.out, "critics", f"{name}-{seed}")


def _critics(args: argparse.Namespace, base: str, names: list[str]) -> None:
    """The critics of these names that are not there yet, args.seeds of each, side by side."""
    side_by_side(_pretrained_critic, [
        {"name": name, "seed": seed, "n": args.size, "base": base, "out": args.out,
         "folder": str(_critic_folder(args, name, seed))}
        for name in names for seed in range(args.seeds)
        if not (_critic_folder(args, name, seed) / "pretrain.json").exists()])


def _actors(args: argparse.Namespace, names: tuple[str, ...]) -> dict[str, list[dict]]:
    """S3AC runs from the base policy, each with one of the critics: name -> a result per seed."""
    from train import run_all

    flags = ["--rollout-batch", "128", "--steps", str(args.steps), "--lr", str(args.lr),
             "--critic-lr", str(args.critic_lr)]
    found = run_all({f"{name}-{seed}": [
        *flags, "--critic", str(_critic_folder(args, name, seed)), "--seed", str(seed)]
        for name in names for seed in range(args.seeds)}, os.path.join(args.out, "runs"))
    return {name: [found[f"{name}-{seed}"] for seed in range(args.seeds)] for name in names}


@torch.no_grad()
def _on_pool(critic: Critic, pool: TrajectoryPool, rows: np.ndarray) -> dict:
    """EV, value loss, and V(s_0) against the return of trajectories never trained on."""
    parts = [predict(critic, pool, group) for group in micro_batches(pool.index, rows, 32_768)]
    V, R = (torch.cat([x[i][x[2]] for x in parts])[None] for i in (0, 1))       # [1, N] tokens
    p, right = (torch.cat([(x[i][:, 0] + 1) / 2 for x in parts]) for i in (0, 1))  # of s_0: [B]
    bin_of = (10 * p).long().clamp(0, 9)
    bins = [{"n": int(b.sum()), "said": p[b].mean().item(), "right": right[b].mean().item()}
            for b in (bin_of == i for i in range(10)) if b.any()]
    error = sum(b["n"] * abs(b["said"] - b["right"]) for b in bins) / len(p)
    return {"ev": explained_variance(V, R, torch.ones_like(V)), "bins": bins,
            "loss": ((V - R).square().mean() / 2).item(), "calibration": error}


def _truth(args: argparse.Namespace, file: Path, path: str, pool: TrajectoryPool,
           rows: np.ndarray) -> dict:
    """Random prefixes of a policy's responses and the share of its continuations that end right.

    Written to file once: ids (prompt and prefix), p.
    """
    import genac
    from rollout import chain_reward, generate, task_problems
    from train import write_json
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if file.exists():
        return json.loads(file.read_text())
    model, tokenizer = (x.from_pretrained(path) for x in (AutoModelForCausalLM, AutoTokenizer))
    rng, problems = np.random.default_rng(0), task_problems(held_out=True)
    ids, states, answers = [], [], []
    for record in pool.index[rng.choice(rows, args.prefixes, replace=False)]:
        P, start = record["prompt_length"], record["offset"]
        end = start + P + rng.integers(record["response_length"])  # the state before a token
        stored = pool.tokens[start:end]
        ids.append(np.where(stored < 0, ~stored, stored).tolist())
        states.append(genac.State(*map(tokenizer.decode, (ids[-1][:P], ids[-1][P:])), "", 0.0))
        answers.append(problems[record["prompt_id"]].answer)
    p = genac.true_success(model, tokenizer, states, args.continuations, generate, chain_reward,
                           answers, 64, torch.Generator().manual_seed(0))
    write_json(str(file), {"ids": ids, "p": p.tolist()})
    return json.loads(file.read_text())


@torch.no_grad()
def _error(critic: Critic, truth: dict, k: int) -> float:
    """Mean ((V + 1)/2 − p)² over the prefixes, sampling noise of p taken off."""
    from genac import squared_error
    from rollout import left_pad

    value = critic(*left_pad(truth["ids"], 0, "cpu"))[:, -1]
    return squared_error(((value + 1) / 2).tolist(), torch.tensor(truth["p"]), k, 0.0)


def _measure(args: argparse.Namespace, test: TrajectoryPool, truths: list[dict]) -> dict:
    """policy -> critic -> a list of figures, one per seed, on that policy's held-out responses."""
    found = {policy: {name: [] for name in CRITICS} for policy in POLICIES}
    for name in CRITICS:
        for seed in range(args.seeds):
            critic = Critic.from_pretrained(_critic_folder(args, name, seed))
            for label, (policy, truth) in enumerate(zip(POLICIES, truths)):
                rows = np.flatnonzero(test.index["policy"] == label)
                found[policy][name].append(_on_pool(critic, test, rows) | {
                    "error": _error(critic, truth, args.continuations)})
    return found


def _print_critics(found: dict, truths: list[dict], args: argparse.Namespace) -> None:
    """A table per policy: the critics' figures on its held-out responses."""
    from genac import squared_error
    from train import spread

    columns = {"ev": "EV", "loss": "value loss", "calibration": "|said − right| of s_0",
               "error": "error² of p"}
    for (policy, critics), truth in zip(found.items(), truths):
        p = torch.tensor(truth["p"])
        constant = squared_error([p.mean().item()] * len(p), p, args.continuations, 0.0)
        print(f"\nheld-out responses of the {policy}; mean success of {len(p)} prefixes "
              f"{p.mean():.3f}, error² of always saying so {constant:.4f}\n")
        print(f"{'critic':18}" + "".join(x.rjust(24) for x in columns.values()))
        for name, figures in critics.items():
            print(f"{name:18}" + "".join(
                spread([x[key] for x in figures]).rjust(24) for key in columns))


def _print_bins(found: dict) -> None:
    """Figure 2a as text: V(s_0) as a success rate, and how often such prompts ended right."""
    print("\nV(s_0) against held-out return, seed 0: said → right (prompts)")
    for policy in POLICIES:
        for name in list(CRITICS)[:4]:
            bins = found[policy][name][0]["bins"]
            print(f"{policy:17}{name:18}" + "  ".join(
                f"{b['said']:.2f} → {b['right']:.2f} ({b['n']})" for b in bins))


def _trained(runs: list[dict]) -> dict[str, list[float]]:
    """Success after training, and EV and value loss of the first ten steps, one figure per seed."""
    from train import mean_finite, success

    def early(run: dict, key: str) -> float:
        """The mean of the first ten steps."""
        steps = [row for row in run["metrics"] if row["step"] <= 10 and key in row]
        return mean_finite([row[key] for row in steps])

    return {"success": [success(run) for run in runs],
            "ev": [early(r, "critic/explained_variance") for r in runs],
            "loss": [early(r, "critic/loss") for r in runs]}


def _print_actors(actors: dict[str, dict]) -> None:
    """What became of the actors trained with each critic."""
    from train import spread

    paper = {"coverage": "80.78 %", "initial": "79.86 %"}
    print(f"\n{'actor trained with':20}{'success':>18}{'EV, steps 1–10':>18}"
          f"{'loss, steps 1–10':>18}{'paper (35B)':>14}")
    for name, figures in actors.items():
        print(f"{name:20}" + "".join(spread(x).rjust(18) for x in figures.values())
              + f"{paper.get(name, ''):>14}")


def _clearly(more: list[float], less: list[float]) -> str:
    """Whether one mean is above the other by two standard errors: yes, no, or neither."""
    gap, noise = float(np.mean(more) - np.mean(less)), 0.0
    if len(more) > 1:
        noise = math.hypot(np.std(more, ddof=1), np.std(less, ddof=1)) / math.sqrt(len(more))
    return "within the noise" if abs(gap) <= 2 * noise else "yes" if gap > 0 else "no"


def _verdicts(found: dict, actors: dict[str, dict], table: list[Cell]) -> None:
    """The paper's statements, its figures and ours, and whether ours say the same."""
    from train import spread

    def line(what: str, paper: str, before: list, after: list, sign: int) -> None:
        """One statement: the paper's figures, ours, whether they agree."""
        verdict = _clearly([sign * x for x in after], [sign * x for x in before])
        print(f"{what:58}{paper:>18}{spread(before) + ' → ' + spread(after):>36}   {verdict}")

    n = len({c.low for c in table})  # buckets; the last one in which both have enough to count
    both = [(a, b) for a, b in zip(table[:n], table[n:]) if min(a.count, b.count) >= 50]
    a, b = both[-1]
    print(f"\n{'':58}{'paper':>18}{'here':>36}   shows")
    line(f"right of over {a.low} tokens (24K): initial → stronger policy", "5.0 % → 61.8 %",
         [a.share], [b.share], 1)
    print("initial → coverage critic:")
    new = found[POLICIES[1]]
    for key, what, paper, sign in (
            ("ev", "EV on the stronger policy's responses", "higher", 1),
            ("loss", "value loss on them", "lower", -1),
            ("calibration", "|said − right| of s_0 on them", "", -1),
            ("error", "error² of p on them", "", -1)):
        line("  " + what, paper, *([x[key] for x in new[c]] for c in ("initial", "coverage")), sign)
    for key, what, paper, sign in (
            ("ev", "EV in steps 1–10 of the actor", "higher", 1),
            ("loss", "value loss in steps 1–10", "lower", -1),
            ("success", "success of the actor, same budget", "79.86 → 80.78 %", 1)):
        line("  " + what, paper, *(actors[c][key] for c in ("initial", "coverage")), sign)


def _check_settings(args: argparse.Namespace) -> None:
    """ValueError if what stands in args.out was made with other settings."""
    from train import write_json

    names = ("size", "steps", "lr", "critic_lr", "strong", "prefixes", "continuations")
    settings, file = {name: getattr(args, name) for name in names}, Path(args.out, "settings.json")
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.exists() and json.loads(file.read_text()) != settings:
        raise ValueError(f"--out: expected what {settings} left, found {file.read_text()}")
    write_json(str(file), settings)


def _prepare(args: argparse.Namespace, base: str) -> tuple[str, TrajectoryPool]:
    """Pools and critics; returns the stronger policy and the pool of held-out responses."""
    out = Path(args.out)
    _policy_pool(out / "initial", [(base, 1.0)], 2 * args.size)
    if not args.strong:
        _critics(args, base, ["initial"])
        _actors(args, ("initial",))
    strong = args.strong or str(out / "runs" / "initial-0" / "actor")
    policies = [(base, 1.0), (base, 0.8), (base, 0.6), (strong, 1.0)]
    _policy_pool(out / "coverage", policies, args.size // 2)
    _critics(args, base, list(CRITICS))
    return strong, _policy_pool(
        out / "test", [(base, 1.0), (strong, 1.0)], 1600, held_out=True)


def _claims(args: argparse.Namespace) -> None:
    """Pools, critics, actors, tables and runs/claims/value_pretrain.json; goes on where it was."""
    from train import build_base, write_json

    one_thread()
    _check_settings(args)
    base = build_base()
    strong, test = _prepare(args, base)
    truths = [_truth(args, Path(args.out, f"truth-{label}.json"), path, test,
                     np.flatnonzero(test.index["policy"] == label))
              for label, path in enumerate((base, strong))]
    found, table = _measure(args, test, truths), coverage_table(test.index)
    print(f"\nshare correct of held-out responses (0 initial policy, 1 {strong})\n"
          + format_coverage(table)
          + "\npaper, > 24K tokens: 5.0 % initially, 61.8 % after 1,600 steps")
    _print_critics(found, truths, args)
    _print_bins(found)
    actors = {name: _trained(runs) for name, runs in _actors(args, ACTORS).items()}
    _print_actors(actors)
    _verdicts(found, actors, table)
    print(WHY)
    os.makedirs("runs/claims", exist_ok=True)
    write_json("runs/claims/value_pretrain.json", {
        "settings": vars(args), "lengths": [cell._asdict() for cell in table], "critics": found,
        "actors": actors})


WHY = """
"yes" and "no" are gaps of over two standard errors of the seeds (of one seed: any gap).
- A response is as long as its problem has steps, whoever writes it: a stronger policy brings long
  responses that end right more often, but no length that the initial one does not write by itself.
- A balanced draw shows as many right as wrong responses of each length. It takes away what tells a
  hard prompt from an easy one here, its length, and the critic learns a success rate near one half:
  compare |said − right| of coverage with coverage-plain, of initial-balanced with initial. Before
  DAPS relies on V(s_0), on-line updates have to put that right.
- coverage-plain learns from policies that succeed more often than the initial one, low temperatures
  among them, and says too much on the initial policy's prompts.
- The actor has few steps and a critic that is refitted twice in each: little time in which the
  critic's start can matter."""


def main() -> None:
    """The command line: the demo, the coverage of a pool, or the claims."""
    parser = argparse.ArgumentParser(description="value pretraining with coverage")
    add = parser.add_argument
    add("--pool", metavar="DIR", help="print the coverage of this pool and stop")
    add("--seed", type=int, default=0, help="of the demo")
    add("--claims", action="store_true", help="re-measure Figures 2a, 5 and 10")
    add("--out", default="runs/claims/value_pretrain", help="folder of the claims; it is resumed")
    add("--seeds", type=int, default=3)
    add("--size", type=int, default=4096, help="trajectories a critic is pretrained on")
    add("--strong", metavar="DIR", default="", help="stronger policy; empty: the actor trained "
        "with the initial critic")
    add("--steps", type=int, default=60, help="of an actor")
    add("--lr", type=float, default=5e-5, help="of an actor: the one that s3ac was tuned to")
    add("--critic-lr", type=float, default=2.5e-4, help="of a critic while it trains an actor")
    add("--prefixes", type=int, default=200, help="states whose true success is measured")
    add("--continuations", type=int, default=32, help="of each of them")
    args = parser.parse_args()
    if args.pool:
        _show(TrajectoryPool.open(args.pool))
    elif args.claims:
        try:
            _claims(args)
        except (ValueError, OSError) as error:
            raise SystemExit(f"error: {error}") from None
    else:
        _demo(args)


if __name__ == "__main__":
    main()
