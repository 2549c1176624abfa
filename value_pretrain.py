"""Value pretraining with coverage: a critic that knows long and correct responses from the start.

    loss = (1/N) Σ_i Σ_t ½ (V(s_t) − R_i)²     N = sampled tokens of the whole step, R_i ∈ {−1, +1}
    lr: linear up to 1e-5 in the first 3 % of the steps, then a cosine down to 5e-6

S3AC §3.3, Table 4, Figures 5 and 10. Of the initial policy's responses over 24K tokens 5.0 % are
correct, 61.8 % after 1,600 steps of training. A critic fitted to the initial policy alone gives
long prefixes low values just when the policy learns to write them. The remedy: pool trajectories of
policies of several strengths, look at the share correct by length and policy, draw a balanced set,
fit V to R for two epochs; attention, routers, vision tower frozen, gradient norm clipped at 10.

The pool is a folder. Its two big files are memory-mapped, so billions of tokens are never loaded:
    tokens.bin   int32, all trajectories end to end, no padding. A token that the policy sampled is
                 stored as its id, any other (prompt, tool output) as ~id, which is negative.
    index.bin    one RECORD per trajectory
    pool.json    optional: what the pool was made from (`origin`)
An append writes the tokens first and the index second and waits for the disk after each, so a
killed writer loses at most its own append. One process may write; any number may read.

Shapes: tokens, attention [B, S], mask [B, T], reward [B], S = P + T (prompt left-, response
right-padded). Length = sampled tokens. Bucket k of the edges e holds e[k−1] < length ≤ e[k].

Differs from the paper:
    - The pool's weights are not stated. Here every length bucket × outcome counts the same.
    - Batch size, AdamW's betas and weight decay are not stated: here 256, (0.9, 0.999), 0.01.
    - "Attention layers" means every parameter inside an attention module, its norms too.
    - A share of the prompts is held out, to measure explained variance (EV) on unseen prompts.
    - Micro-batches hold rows of similar length. Neither they nor the ranks change the gradient.
    - `split` (clip head and backbone each by its own norm) is an offer of this project.
Left out: going on with a pretraining that was stopped half-way.

    python value_pretrain.py               a pool of three policies, its coverage, a tiny critic
    python value_pretrain.py --pool DIR    the coverage table of an existing pool
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from critic import Critic, FiniteAdamW, explained_variance, value_step_
from rollout import Batch, length_groups, response

Seed = int | np.random.Generator
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


# ---- the pool ------------------------------------------------------------------------------------


class TrajectoryPool:
    """Trajectories on disk: `.index`, an array of RECORDs, and `.tokens`, flat; both memory-mapped.

    TrajectoryPool(path) opens the folder or starts an empty pool in it; .open wants a pool there.
    `.origin` is what pool.json says about the pool's making, {} without that file. ValueError if
    a file is missing or if the records do not follow one another.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        files = [self.path / "tokens.bin", self.path / "index.bin"]
        there = [f for f in files if f.exists()]
        if len(there) == 1 and there[0].stat().st_size:
            raise ValueError(f"path: expected tokens.bin and index.bin, found only {there[0]}")
        for file in set(files) - set(there):
            file.touch()
        self.origin = _read_origin(self.path / "pool.json")
        self._index_bytes = files[1].stat().st_size
        index = _memmap(files[1], RECORD, self._index_bytes // RECORD.itemsize)
        self._map(*_sound(index, files[0].stat().st_size // 4))

    @classmethod
    def open(cls, path: str | os.PathLike) -> TrajectoryPool:
        """The pool in an existing folder, without a killed writer's torn tail; else ValueError."""
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
            raise ValueError(f"pool: expected one writer, found {self.path} changed: reopen it")
        # No record may ever point at tokens of another trajectory. So records that have lost their
        # tokens are cut off first, then the tokens are written, then the records.
        end = RECORD.itemsize * len(self)
        if self._index_bytes > end:
            self._index_bytes = _write(self.path / "index.bin", end, new[:0])
        _write(self.path / "tokens.bin", 4 * len(self.tokens), flat)
        self._index_bytes = _write(self.path / "index.bin", end, new)
        self._map(len(self) + len(new), len(self.tokens) + len(flat))

    def batch(self, rows: np.ndarray, pad_id: int = 0) -> tuple[Tensor, ...]:
        """rows [B] -> tokens [B, S] long, attention [B, S] bool, mask [B, T] bool, reward [B].

        Padded as a Batch, to the longest prompt and response of these rows; on the CPU.
        """
        if not len(rows):
            raise ValueError("rows: expected at least one row number, found none")
        record = self.index[np.asarray(rows)]
        prompt, answer = record["prompt_length"], record["response_length"]
        P, column = prompt.max(), np.arange(prompt.max() + answer.max())
        attention = (column >= P - prompt[:, None]) & (column < P + answer[:, None])
        spans = zip(record["offset"], record["offset"] + prompt + answer)
        stored = np.concatenate([self.tokens[start:end] for start, end in spans])
        tokens, sampled = np.full(attention.shape, pad_id, np.int64), np.zeros_like(attention)
        tokens[attention] = np.where(stored < 0, ~stored, stored)   # row after row, as in append
        sampled[attention] = stored >= 0
        arrays = tokens, attention, sampled[:, P:], record["reward"].copy()
        return tuple(torch.from_numpy(x) for x in arrays)

    def sample(self, n: int, *, edges: np.ndarray | None = None, seed: Seed = 0) -> np.ndarray:
        """Row numbers [n], balanced over length × outcome: `coverage_sample` of this pool."""
        return coverage_sample(self.index, n, edges=edges, seed=seed)

    def _map(self, rows: int, n_tokens: int) -> None:
        self.index = _memmap(self.path / "index.bin", RECORD, rows)
        self.tokens = _memmap(self.path / "tokens.bin", np.dtype("<i4"), n_tokens)


def _memmap(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    return np.memmap(path, dtype, "r", shape=(count,)) if count else np.empty(0, dtype)


def _sound(index: np.ndarray, n_tokens: int) -> tuple[int, int]:
    """What a killed writer left intact: (records whose tokens are all there, tokens they cover)."""
    ends = index["offset"] + index["prompt_length"] + index["response_length"]
    starts = np.concatenate([[0], ends])[:-1]
    wrong = np.flatnonzero((index["offset"] != starts) | (index["prompt_length"] < 1))
    if len(wrong):   # a killed writer leaves a torn tail, never this: so cut nothing off
        i = wrong[0]
        raise ValueError(f"index.bin: expected record {i} at token {starts[i]}, found {index[i]}: "
                         "another layout, or damage")
    rows = int(np.searchsorted(ends, n_tokens, side="right"))
    return rows, int(ends[rows - 1]) if rows else 0


def _write(path: Path, at: int, data: np.ndarray) -> int:
    """Put data at byte `at`, cut off what stood behind, wait for the disk -> the new size."""
    with open(path, "r+b") as file:
        file.truncate(at)
        file.seek(at)
        file.write(data.tobytes())
        file.flush()
        os.fsync(file.fileno())
    return at + data.nbytes


def _read_origin(file: Path) -> dict:
    """The JSON object in pool.json, {} if the file is missing; ValueError if it holds none."""
    try:
        return dict(json.loads(file.read_bytes())) if file.exists() else {}
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: expected a JSON object, found another text ({error})") from None


def _checked(batch: Batch) -> tuple[np.ndarray, ...]:
    """tokens, attention, mask, reward as arrays, or a ValueError before anything is written."""
    tokens, reward = batch.tokens.cpu().numpy(), batch.reward.float().cpu().numpy()
    attention, mask = batch.attention.cpu().numpy() != 0, batch.mask.cpu().numpy() != 0
    B, S = tokens.shape
    if attention.shape != (B, S) or len(mask) != B or mask.shape[1] >= S:
        raise ValueError(f"batch: expected attention ({B}, {S}) and mask ({B}, less than {S}), "
                         f"found {attention.shape} and {mask.shape}")
    for name in ("reward", "prompt_id", "truncated"):
        if (shape := tuple(getattr(batch, name).shape)) != (B,):
            raise ValueError(f"batch.{name}: expected shape ({B},), found {shape}")
    P = S - mask.shape[1]
    fits = (tokens >= 0) & (tokens < 2**31)
    for what, good in (
            ("mask: expected sampled tokens inside the attention", attention[:, P:] | ~mask),
            ("attention: expected a prompt in each row", attention[:, :P].any(1, keepdims=True)),
            ("reward: expected finite numbers", np.isfinite(reward)[:, None]),
            ("tokens: expected 0 … 2^31 − 1", fits | ~attention)):
        if not good.all():
            raise ValueError(f"batch.{what}, found something else in row {good.all(1).argmin()}")
    return tokens, attention, mask, reward


def fill_pool(folder: str | os.PathLike, policies: list[tuple[str, Callable[[int], Batch]]],
              each: int, at_once: int, *, writer: bool = True,
              origin: dict | None = None) -> TrajectoryPool:
    """Sample `each` trajectories of every policy into the folder's pool and open it (S3AC §3.3).

    policies: pairs (name, sample) with sample(n) -> a Batch of n rows; the label of a policy is its
    position. A call samples at most at_once trajectories and is one append. origin: what the pool
    is made from, such as {"tokenizer": …, "problems": …}. Several ranks all call this and sample
    together; writer is True on one. ValueError if the pool is not empty or there is nothing to do.
    """
    if not policies or min(each, at_once) < 1:
        n = len(policies), each, at_once
        raise ValueError(f"policies, each, at_once: expected at least 1 of each, found {n}")
    pool = TrajectoryPool(folder)
    if len(pool):
        raise ValueError(f"folder: expected no trajectories in {folder} yet, found {len(pool):,}")
    if writer:   # under another name first, so that no reader sees half of it
        (pool.path / "pool.writing").write_text(json.dumps(origin or {}))
        os.replace(pool.path / "pool.writing", pool.path / "pool.json")
    with tqdm(total=each * len(policies), desc="trajectory pool", disable=not writer) as bar:
        for label, (name, sample) in enumerate(policies):
            if writer:
                bar.write(f"policy {label}: {name}")
            for done in range(0, each, at_once):
                batch = sample(min(at_once, each - done))
                if writer:
                    pool.append(batch, label)
                bar.update(len(batch.reward))
                bar.set_postfix(policy=label, success=f"{(batch.reward > 0).float().mean():.2f}")
    if dist.is_available() and dist.is_initialized():
        dist.barrier()   # the others open the pool after the last append
    return TrajectoryPool.open(folder)


# ---- coverage ------------------------------------------------------------------------------------


class Cell(NamedTuple):
    """One policy in one bucket, low < length ≤ high (None: no upper end). share: share correct."""
    policy: int
    low: int
    high: int | None
    count: int
    share: float


def coverage_table(index: np.ndarray, edges: np.ndarray | None = None) -> list[Cell]:
    """Share correct (reward > 0) by policy and length, S3AC Figure 10: one Cell for each pair.

    index: RECORDs, `pool.index` or a part of it. edges: increasing lengths; None: 8 buckets of
    equal width. The share of an empty cell is NaN. ValueError on an empty index or other edges.
    """
    bucket, edges = _buckets(index, edges)
    table = []
    for policy in np.unique(index["policy"]):
        mine = index["policy"] == policy
        for k, (low, high) in enumerate(pairwise([0, *edges.tolist(), None])):
            correct = index["reward"][mine & (bucket == k)] > 0
            share = float(correct.mean()) if len(correct) else math.nan
            table.append(Cell(int(policy), low, high, len(correct), share))
    return table


def format_coverage(table: list[Cell]) -> str:
    """The table as text: a line per length bucket, a column per policy, share correct (count)."""
    def share(cells: list[Cell]) -> str:
        """Share correct and count of several cells together, or a dash if they are empty."""
        n, correct = sum(c.count for c in cells), sum(c.count * c.share for c in cells if c.count)
        return f"{100 * correct / n:.1f} % ({n:,})" if n else "–"

    policies = sorted({c.policy for c in table})
    rows = {c.high: f"> {c.low:,}" if c.high is None else f"≤ {c.high:,}" for c in table}
    parts = [(name, [c for c in table if c.high == high]) for high, name in rows.items()]
    lines = [["sampled tokens"] + [f"policy {p}" for p in policies] + ["all"]]
    for name, cells in [*parts, ("all", table)]:
        columns = [share([c for c in cells if c.policy == p]) for p in policies]
        lines.append([name, *columns, share(cells)])
    return "\n".join(name.rjust(14) + "".join(x.rjust(20) for x in row) for name, *row in lines)


def coverage_sample(index: np.ndarray, n: int, *, edges: np.ndarray | None = None,
                    seed: Seed = 0) -> np.ndarray:
    """n distinct row numbers, sorted, balanced over length × outcome (reward > 0), S3AC §3.3.

    So the few long and correct trajectories count. ValueError if n is not in 1 … len(index).
    """
    bucket, _ = _buckets(index, edges)
    # assumption: equal counts per length × outcome; the weights of the paper's pool are not known
    return balanced_draw(2 * bucket + (index["reward"] > 0), n, seed)


def balanced_draw(cell: np.ndarray, n: int, seed: Seed = 0) -> np.ndarray:
    """cell [N] int, the cell of each row -> n distinct row numbers, sorted: equal counts per cell.

    A cell with fewer rows gives all of them, and the others make up for it. Within a cell the draw
    is uniform. ValueError if n is not in 1 … N.
    """
    if not 1 <= n <= len(cell):
        raise ValueError(f"n: expected 1 … {len(cell)} (rows to draw from), found {n}")
    _, cell, count = np.unique(cell, return_inverse=True, return_counts=True)
    quota = np.zeros_like(count)
    # The smallest cell is first; each gives at most an equal share of what is left to draw.
    for done, smallest in enumerate(np.argsort(count, kind="stable")):
        quota[smallest] = min(count[smallest], (n - quota.sum()) // (len(count) - done))
    order = np.random.default_rng(seed).permutation(len(cell))
    order = order[np.argsort(cell[order], kind="stable")]          # cell by cell, random inside
    rank = np.arange(len(order)) - np.repeat(np.cumsum(count) - count, count)
    return np.sort(order[rank < np.repeat(quota, count)])          # the first quota of each cell


def _buckets(index: np.ndarray, edges: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """The length bucket of each record [N], and the edges."""
    if not len(index):
        raise ValueError("index: expected at least one trajectory, found none")
    if edges is None:   # 8 buckets of equal width, or fewer if the longest response is short
        edges = np.unique(np.ceil(np.linspace(0, index["sampled"].max(), 9)[1:-1]))
    edges = np.asarray(edges, np.int64)
    if edges.ndim != 1 or (np.diff(edges) <= 0).any():
        raise ValueError(f"edges: expected increasing lengths, found {edges.tolist()}")
    return np.searchsorted(edges, index["sampled"], side="left"), edges


def split_by_prompt(prompt_id: np.ndarray, share: float, seed: Seed = 0) -> np.ndarray:
    """prompt_id [N] -> [N] bool: True for all trajectories of a random share of the prompts.

    True means held out; no prompt is on both sides. Share 0 holds out nothing. ValueError if share
    is outside [0, 1) or leaves a side without a prompt.
    """
    ids = np.unique(prompt_id)
    n = max(1, round(share * len(ids))) if share else 0
    if not 0 <= share < 1 or n >= len(ids):
        raise ValueError(f"held_out: expected a share in [0, 1) that leaves a prompt on each side, "
                         f"found {share} of {len(ids)} prompts")
    return np.isin(prompt_id, np.random.default_rng(seed).permutation(ids)[:n])


# ---- pretraining ---------------------------------------------------------------------------------


class Recipe(NamedTuple):
    """What value pretraining is done with. Defaults: S3AC §3.3 and Table 4, unless marked."""
    epochs: int = 2
    batch_size: int = 256       # assumption: trajectories per step; the paper states no number
    token_budget: int = 32_768  # padded tokens of a micro-batch; it changes memory and speed alone
    peak: float = 1e-5          # learning rate after the warm-up
    final: float = 5e-6         # learning rate of the last step
    warmup: float = 0.03        # share of the steps
    max_norm: float = 10.0      # limit of the gradient norm
    split: bool = False         # clip head and backbone each by its own norm
    held_out: float = 0.02      # assumption: share of the *prompts* that EV is measured on
    eval_rows: int = 1024       # at most so many of their trajectories
    freeze: str = "attention"   # attention: with routers and vision tower; backbone; none
    # Keep float32 weights with torch.bfloat16 here: bfloat16 weights would lose a step of 1e-5.
    autocast_dtype: torch.dtype | None = None
    seed: Seed = 0              # of the held-out prompts and of the order of rows


def pretrain(critic: Critic, pool: TrajectoryPool, rows: np.ndarray | None = None,
             recipe: Recipe = Recipe(), *, rank: int = 0, world: int = 1,
             progress: bool = True) -> dict:
    """Fit V to R in place, on the critic's device, in the mode (train or eval) it is in. S3AC §3.3.

    rows: row numbers, such as pool.sample(n); None: all. rank, world: of a critic that fully_shard
    has taken apart; every rank calls this with the same pool, rows and recipe. EV is measured
    before the first step, after 1, 2, 4, 8, … steps and after the last.

    Returns frozen (names) · steps · tokens (trained on, all epochs) · loss_first, loss_last (mean
    of 20 steps) · clip_share · head_share (of the squared gradient norm) · ev_before, ev_after ·
    skipped_nonfinite · curve: lists of lr, loss, grad_norm, head_share, clipped, tokens by step,
    and of ev: (steps done, EV). What was trainable is so afterwards. A step whose gradient is
    not finite is skipped; FloatingPointError after five in a row. ValueError on bad arguments.
    """
    if recipe.freeze not in FREEZE:
        raise ValueError(f"freeze: expected one of {', '.join(FREEZE)}, found {recipe.freeze}")
    batches, test = _plan(pool, rows, recipe, world)
    trainable = [p for p in critic.parameters() if p.requires_grad]
    try:
        frozen = FREEZE[recipe.freeze](critic)
        critic.zero_grad()
        curve = _fit(critic, pool, batches, test, recipe, rank, world, progress)
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
        critic.zero_grad()
    loss, ev = curve["loss"], curve["ev"]
    return {"frozen": frozen, "steps": len(loss), "tokens": sum(curve["tokens"]),
            "loss_first": float(np.mean(loss[:20])), "loss_last": float(np.mean(loss[-20:])),
            "clip_share": float(np.mean(curve["clipped"])),
            "head_share": float(np.mean(curve["head_share"])),
            "ev_before": ev[0][1], "ev_after": ev[-1][1],
            "skipped_nonfinite": len(batches) - len(loss), "curve": curve}


def _plan(pool: TrajectoryPool, rows: np.ndarray | None, recipe: Recipe,
          world: int) -> tuple[list[np.ndarray], np.ndarray]:
    """The rows of each step, all epochs one after the other, and the held-out rows; shuffled."""
    if min(recipe.epochs, recipe.batch_size) < 1:
        raise ValueError(f"epochs, batch_size: expected at least 1, found {recipe[:2]}")
    rows = np.arange(len(pool)) if rows is None else np.asarray(rows)
    rows = rows[pool.index["sampled"][rows] > 0]   # a row without a sampled token teaches nothing
    if not len(rows):
        raise ValueError("rows: expected a trajectory with a sampled token, found none")
    rng, size = np.random.default_rng(recipe.seed), recipe.batch_size
    out = split_by_prompt(pool.index["prompt_id"][rows], recipe.held_out, rng)
    orders = [rng.permutation(rows[~out]) for _ in range(recipe.epochs)]
    test = rng.permutation(rows[out])[:recipe.eval_rows]
    batches = [order[i:i + size] for order in orders for i in range(0, len(order), size)]
    # Cut to a multiple of world, so that every rank has a row in every forward pass.
    batches = [batch[:len(batch) // world * world] for batch in batches if len(batch) >= world]
    return batches, test[:len(test) // world * world]


def _fit(critic: Critic, pool: TrajectoryPool, batches: list[np.ndarray], test: np.ndarray,
         recipe: Recipe, rank: int, world: int, progress: bool) -> dict[str, list]:
    """One optimizer step per batch -> pretrain's curve."""
    optimizer = FiniteAdamW(critic, recipe.peak)   # of what is not frozen
    names = "lr", "loss", "grad_norm", "head_share", "clipped", "tokens"
    measure = partial(held_out_ev, critic, pool, test, recipe, rank=rank, world=world)
    curve = {name: [] for name in names} | {"ev": [(0, measure())]}
    bar = tqdm(batches, "value pretraining", disable=not progress)
    for done, rows in enumerate(bar, start=1):
        lr = lr_at(done - 1, len(batches), peak=recipe.peak, final=recipe.final,
                   warmup=recipe.warmup)
        optimizer.param_groups[0]["lr"] = lr
        n_tokens = int(pool.index["sampled"][rows].sum())   # N: of all micro-batches and ranks
        parts = value_parts(critic, pool, rows, recipe, rank=rank, world=world)
        stats, norms = value_step_(critic, optimizer, parts, n_tokens, max_norm=recipe.max_norm,
                                   split=recipe.split, world=world)
        loss = stats["loss"][0] / n_tokens                  # Σ ½ (V(s_t) − R)² / N
        if world > 1:
            dist.all_reduce(loss)
        if not norms["skipped"]:
            step = lr, loss.item(), norms["total"], norms["head_share"], norms["clipped"], n_tokens
            for name, x in zip(names, step):
                curve[name].append(x)
        if done & (done - 1) == 0 or done == len(batches):  # after 1, 2, 4, 8, … and all steps
            curve["ev"].append((done, measure()))
        bar.set_postfix(loss=f"{loss:.3f}", ev=f"{curve['ev'][-1][1]:.3f}",
                        skipped=optimizer.skipped)
    return curve


def value_parts(critic: Critic, pool: TrajectoryPool, rows: np.ndarray, recipe: Recipe = Recipe(),
                *, rank: int = 0, world: int = 1) -> Iterator[tuple[Tensor, Tensor, Tensor, None]]:
    """rows -> this rank's micro-batches of one step, as `critic.value_step_` wants them.

    Each is (value, target, mask, None) of shape [B, T], on the critic's device; its forward pass
    runs when it is asked for. None stands for values from before the update: none, so no clipping.
    """
    device, dtype = next(critic.parameters()).device, recipe.autocast_dtype
    prompt, answer = (pool.index[x][rows].tolist() for x in ("prompt_length", "response_length"))
    for group in length_groups(prompt, answer, recipe.token_budget, world):
        batch = pool.batch(rows[group[rank::world]])
        tokens, attention, mask, reward = (x.to(device) for x in batch)
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            value = response(critic(tokens, attention), mask.shape[1])   # V(s_t) of sampled a_t
        target = reward[:, None].to(value.dtype).expand_as(value)        # R at each t: λ_critic = 1
        yield value, target, mask, None


@torch.no_grad()
def held_out_ev(critic: Critic, pool: TrajectoryPool, rows: np.ndarray, recipe: Recipe = Recipe(),
                *, rank: int = 0, world: int = 1) -> float:
    """EV = 1 − Var(R − V)/Var(R) over the sampled tokens of rows; NaN for none or equal returns."""
    parts = value_parts(critic, pool, rows, recipe, rank=rank, world=world)
    pairs = [torch.stack([value[mask], target[mask]]).cpu() for value, target, mask, _ in parts]
    gathered = [torch.cat([torch.empty(2, 0), *pairs], dim=1)] * world
    if world > 1:
        dist.all_gather_object(gathered, gathered[0])
    value, target = torch.cat(gathered, dim=1)[:, None]   # [1, N] each
    return explained_variance(value, target, torch.ones_like(value))


def lr_at(step: int, total: int, *, peak: float = 1e-5, final: float = 5e-6,
          warmup: float = 0.03) -> float:
    """Learning rate of step 0 … total − 1: linear up to peak, then cosine down to final. S3AC §3.3.

    The last step of the warm-up has the rate peak, the last of all final (a single step: peak); the
    rate is never 0. ValueError on a step outside 0 … total − 1 or a warm-up outside [0, 1].
    """
    if not 0 <= warmup <= 1:
        raise ValueError(f"warmup: expected a share in [0, 1], found {warmup}")
    if not 0 <= step < total:
        raise ValueError(f"step: expected 0 … {total - 1}, found {step}")
    rise = max(1, round(warmup * total))
    if step < rise:
        return peak * (step + 1) / rise
    done = (step + 1 - rise) / (total - rise)   # share of the cosine, 1 in the last step
    # lr = final + (peak − final) · ½ (1 + cos π·done)
    return final + (peak - final) * 0.5 * (1 + math.cos(math.pi * done))


# A parameter is frozen if one of these words is a whole component of its dotted name: `gate` is an
# MoE layer's router, never gate_proj or gate_up_proj; `attention` no post_attention_layernorm.
ATTENTION = {"self_attn", "attn", "attention", "self_attention", "cross_attn", "linear_attn"}
ROUTER = {"gate", "router"}
VISION = {"visual", "vision_tower", "vision_model"}


def freeze_for_pretraining_(critic: Critic) -> list[str]:
    """Freeze attention layers, MoE routers and the vision tower; returns their names (S3AC §3.3).

    It goes by the names in transformers' Llama, Qwen, Gemma, GPT-2, GPT-NeoX, Mixtral, DeepSeek,
    GPT-OSS, Llava, Qwen-VL and similar models. MLPs, experts, embeddings, norms between layers and
    the head stay trainable. ValueError if no name matches.
    """
    # assumption: everything inside an attention module is attention: q_norm, k_norm and linear
    # attention too; the projector inside `visual` is part of the tower; shared_expert_gate is not a
    # router, because it scales one expert and picks none
    frozen, words = [], ATTENTION | ROUTER | VISION
    for name, parameter in critic.backbone.named_parameters(prefix="backbone"):
        if words & set(name.split(".")):
            parameter.requires_grad_(False)
            frozen.append(name)
    if not frozen:
        raise ValueError(f"critic: expected one of {sorted(words)} in parameter names, found none "
                         f"in {type(critic.backbone).__name__}; freeze by hand, or freeze='none'")
    return frozen


def freeze_backbone_(critic: Critic) -> list[str]:
    """Freeze everything but the head; returns the names frozen."""
    critic.backbone.requires_grad_(False)
    return [name for name, _ in critic.backbone.named_parameters(prefix="backbone")]


FREEZE = {"attention": freeze_for_pretraining_, "backbone": freeze_backbone_,
          "none": lambda critic: []}


# ---- demo ----------------------------------------------------------------------------------------


def _countdown(strength: float, size: int, rng: np.random.Generator) -> Batch:
    """The demo's task: write n−1 … 0 and a full stop; a slip, with probability 1 − strength in each
    step, turns all that follows into x. So only a strong policy gets a long answer right."""
    stop, lost, zero, names = 1, 2, 3, 28          # ids; 0 is padding
    n, t = rng.integers(1, 25, (size, 1)), np.arange(25)
    name = rng.integers(0, 20, (size, 2))          # a prompt is two names and n: many prompts
    wrong = np.cumsum((rng.random((size, 25)) > strength) & (t < n), axis=1) > 0
    answer = np.where(wrong, lost, np.where(t < n, zero + n - 1 - t, stop))
    tokens = np.concatenate([names + name, zero + n, np.where(t <= n, answer, 0)], axis=1)
    prompt_id, fail = n[:, 0] + 25 * (name @ [1, 20]), wrong.any(1)
    arrays = tokens, tokens > 0, t <= n, prompt_id, np.where(fail, -1.0, 1.0), fail
    return Batch(*map(torch.from_numpy, arrays), logp_roll=torch.zeros(size, 25))


def _show(pool: TrajectoryPool) -> None:
    """Print the size of a pool and its coverage table."""
    tokens = int(pool.index["sampled"].sum(dtype=np.int64))
    print(f"{len(pool):,} trajectories, {tokens:,} sampled tokens: share correct (trajectories)\n")
    print(format_coverage(coverage_table(pool.index)))


def _demo(seed: int) -> None:
    """A pool of three policies, its coverage before and after the draw, and a tiny critic."""
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    print("Countdowns of three policies\n")
    policies = [(f"right with {p:.0%} in each step", partial(_countdown, p, rng=rng))
                for p in (0.80, 0.93, 0.98)]
    with tempfile.TemporaryDirectory() as folder:
        pool = fill_pool(folder, policies, each=3000, at_once=1000)
        _show(pool)
        rows = pool.sample(4096, seed=rng)
        print("\n4,096 of them, drawn with as many right as wrong at every length:\n")
        print(format_coverage(coverage_table(pool.index[rows])))
        critic = Critic(LlamaModel(LlamaConfig(
            vocab_size=48, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4)))
        # a tiny critic starts from nothing and has few steps: a larger rate than the paper's
        curve = pretrain(critic, pool, rows, Recipe(
            batch_size=128, peak=1e-3, final=1e-4, held_out=0.1, seed=rng))["curve"]
    print(f"\n{'steps':>6}{'lr':>10}{'loss':>8}{'norm':>8}{'EV, held-out prompts':>22}")
    for done, ev in curve["ev"]:
        row = [curve[name][max(done, 1) - 1] for name in ("lr", "loss", "grad_norm")]
        bar = "█" * round(40 * max(ev, 0))
        print("{:>6}{:10.1e}{:8.3f}{:8.2f}{:10.3f} ".format(done or "start", *row, ev) + bar)
    print("\nAt first V explains next to nothing. Each line doubles the steps. Eight teach most: "
          "a lost\nresponse ends badly. The rest: how the chance falls with the steps to go.")


def main() -> None:
    """The command line: the demo, or the coverage of a pool."""
    parser = argparse.ArgumentParser(description="value pretraining with coverage")
    parser.add_argument("--pool", metavar="DIR", help="print the coverage of this pool and stop")
    parser.add_argument("--seed", type=int, default=0, help="of the demo")
    args = parser.parse_args()
    try:
        _demo(args.seed) if args.pool is None else _show(TrajectoryPool.open(args.pool))
    except (ValueError, RuntimeError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
