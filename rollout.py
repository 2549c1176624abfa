"""Rollout: prompts in; sampled responses, the sampler's own log-probs and rewards out.

    a_t ~ μ(·|s_t) = softmax(z_t / τ)            log μ(a_t|s_t) over the full vocabulary
    R = +1 if the verifier accepts the response, −1 otherwise

S3AC §3.1 (binary reward on the last token), §3.2 (why log μ is kept: IcePoP and MIS compare it
with the trainer's log π_old). Shapes, for B prompts, the longest prompt P and longest response T:

    tokens    [B, P+T]  prompt left-padded to P ‖ response right-padded to T
    attention [B, P+T]  True on real tokens; position ids are counted from it
    mask      [B, T]    True on sampled tokens, the end-of-sequence token included, nothing after it

    state s_t   = prompt + response[:t]                 the hidden state *before* response token t
    response(x) = x[:, −T−1:−1]                         the one place where the shift by one happens

Masks come from positions, never from `ids == pad`: pad == eos is normal.
Differs from the paper:
  - a response cut at the length limit has R = −1; the paper does not say what it has
  - the embedded task stands in for the paper's data where no other is given
Left out: a server for the sampler, and sampling while training goes on.

    python rollout.py         a response of the embedded task, token by token, and its states
"""
from __future__ import annotations

import argparse
import functools
import inspect
import json
import logging
import math
import os
import random
import re
import select
import string
import subprocess
import sys
import tempfile
import threading
import unicodedata
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

if TYPE_CHECKING:  # transformers' models take seconds to import
    from transformers import DynamicCache, PreTrainedTokenizerBase, PreTrainedTokenizerFast


def _expect(ok: Any, sentence: str) -> None:
    """ValueError with this sentence unless ok."""
    if not ok:
        raise ValueError(sentence)


# ---- batch ---------------------------------------------------------------------------------------

@dataclass
class Batch:
    """One rollout batch. train.py fills the fields from logp_old on, in this order."""

    tokens: Tensor  # [B, P+T] long
    attention: Tensor  # [B, P+T] bool
    mask: Tensor  # [B, T] bool
    prompt_id: Tensor  # [B] long: key of DAPS's counts and of groups
    reward: Tensor  # [B] float, −1 | +1
    truncated: Tensor  # [B] bool: no end-of-sequence token within the limit
    logp_roll: Tensor  # [B, T] float: log μ(a_t|s_t) at the sampling temperature
    routing: Tensor | None = None  # [B, P+T, L, k] int16: experts chosen (see Routing), −1: unknown
    logp_old: Tensor | None = None  # [B, T] log π_old(a_t|s_t), the trainer's
    starts: Tensor | None = None  # [B, T] bool: where steps start (VinePPO, GenAC)
    value_std: Tensor | None = None  # [B, T] how far two critics disagree (AsyPPO)
    value: Tensor | None = None  # [B, T] V(s_t); value[:, 0] = V(s_0)
    target: Tensor | None = None  # [B] or [B, T]: what a critic is fitted to, R or the λ-return
    advantage: Tensor | None = None  # [B, T] Â_t
    keep: Tensor | None = None  # [B, T] bool: mask ∧ IcePoP ∧ MIS


def positions(attention: Tensor) -> Tensor:
    """Position ids [B, S]: the first real token of each row is 0, wherever it stands."""
    return (attention.long().cumsum(-1) - 1).clamp_min(0)


def response(x: Tensor, T: int) -> Tensor:
    """From x [B, S, …] of every position to [B, T, …] of the states before each response token."""
    return x[:, -T - 1 : -1]


WIDE = ("tokens", "attention", "routing")  # the fields of P+T columns; others have T or none


def _present(batch: Batch) -> dict[str, Tensor]:
    """The fields that are filled, by name."""
    return {name: x for name, x in vars(batch).items() if x is not None}


def move(batch: Batch, device: torch.device | str) -> Batch:
    """The batch on another device."""
    return Batch(**{name: x.to(device) for name, x in _present(batch).items()})


def take(batch: Batch, rows: Tensor) -> Batch:
    """The given rows (indices, or bool [B]), cut to their own longest prompt and response."""
    real, P = batch.attention[rows].any(0), batch.tokens.shape[1] - batch.mask.shape[1]
    width = int(real[P:].sum())  # of the responses
    wide = slice(int(real.int().argmax()), P + width)  # columns before it are padding in every row
    return Batch(**{
        name: x[rows] if x.ndim == 1 else x[rows][:, wide if name in WIDE else slice(width)]
        for name, x in _present(batch).items()})


def concatenate(batches: list[Batch]) -> Batch:
    """One batch of several: prompts padded on the left, responses on the right. [ΣB, …]"""
    T = [batch.mask.shape[1] for batch in batches]
    return Batch(**{
        name: _stack([getattr(batch, name) for batch in batches], T, -1 if name == "routing" else 0)
        for name in _present(batches[0])})


def _stack(parts: list[Tensor], T: list[int], fill: float) -> Tensor:
    """Parts [n_i, W_i, …] one below another -> [Σn, P+T, …]. `fill` pads the last T_i columns of a
    part on the right to the longest T, and those before them on the left to the longest P."""
    if parts[0].ndim == 1:
        return torch.cat(parts)
    right = [max(T) - t for t in T]
    width = max(x.shape[1] + n for x, n in zip(parts, right))
    return torch.cat([nn.functional.pad(
        x, (0, 0) * (x.ndim - 2) + (width - x.shape[1] - n, n), value=fill)
        for x, n in zip(parts, right)])


def length_groups(
    prompt: list[int], answer: list[int], token_budget: int, size: int = 1
) -> list[list[int]]:
    """Lengths of prompts and answers [B] -> row numbers in groups of similar length: (P + T) × rows
    ≤ token_budget for each of `size` ranks, or one row a rank. A rank takes every size-th row of
    every group, so that all run as many passes. A group also ends where padding would be over 15 %
    of it, unless it is a trifle. Longest first, so that a lack of memory shows in the first pass.
    """
    order = sorted(range(len(prompt)), key=lambda i: -(prompt[i] + answer[i]))
    groups, P, T, real, budget = [], 0, 0, 0, token_budget * size
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        p, t = (max(x[i] for i in rows) for x in (prompt, answer))
        tokens = sum(prompt[i] + answer[i] for i in rows)
        P, T, real = max(P, p), max(T, t), real + tokens
        padded = (P + T) * (len(groups[-1]) + len(rows)) if groups else math.inf
        if padded > budget or padded - real > max(0.15 * padded, budget / 16):
            groups.append([])
            P, T, real = p, t, tokens
        groups[-1] += rows
    return groups


# ---- sampler -------------------------------------------------------------------------------------

TAIL = 32  # tokens of a prompt that are fed anew where its beginning is copied


@torch.no_grad()
def generate(
    model: nn.Module, prompts: list[list[int]], *, max_new_tokens: int, temperature: float = 1.0,
    eos_id: int | list[int], pad_id: int, generator: torch.Generator | None = None,
    max_rows: int = 256, routing: Routing | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Samples a response to each prompt (token ids), max_rows at a time -> tokens [B, P+T] long,
    attention [B, P+T] and mask [B, T] bool, logp_roll [B, T], rows in the order of prompts.

    logp_roll is log μ over the full vocabulary at this temperature, 0 where mask is False: float32,
    or float64 for a float64 model. Temperature 0 is greedy decoding, scored at temperature 1. T is
    the longest response; one cut at max_new_tokens keeps its last token. `routing` notes the
    experts of each token. ValueError for an empty prompt or a number out of range.
    """
    _check_generate(prompts, max_new_tokens, temperature, max_rows)
    device, B = next(model.parameters()).device, len(prompts)
    eos = torch.tensor(eos_id, device=device).reshape(-1)
    if generator and generator.device.type != device.type:
        generator = _child(generator, device)

    def draw(z: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [n, V] -> token [n] and its log-prob [n]."""
        logp = torch.log_softmax(z / (temperature or 1.0), -1)  # log μ(·|s_t)
        token = (torch.multinomial(logp.exp(), 1, generator=generator) if temperature
                 else logp.argmax(-1, keepdim=True))
        return token[:, 0], logp.gather(-1, token)[:, 0]

    if routing:
        routing.start(B, max(map(len, prompts)) + max_new_tokens)
    # a response that ends early counts as max_new_tokens, so that the bar shows what is left to do
    with tqdm(total=B * max_new_tokens, desc="sampling", unit=" tokens", unit_scale=True, delay=5,
              leave=False, disable=os.getenv("RANK", "0") != "0") as bar:
        parts = [_respond(model, prompts[i : i + max_rows], draw, eos, max_new_tokens, pad_id, bar,
                          routing, i) for i in range(0, B, max_rows)]
    out, logp_roll, length = map(torch.cat, zip(*parts))
    out, logp_roll = (x[:, : int(length.max())] for x in (out, logp_roll))
    mask = torch.arange(out.shape[1], device=device) < length[:, None]
    tokens, attention = left_pad(prompts, pad_id, device)
    return torch.cat([tokens, out], 1), torch.cat([attention, mask], 1), mask, logp_roll


def _check_generate(prompts: list[list[int]], limit: int, temperature: float, rows: int) -> None:
    empty = [f"an empty prompt at {i}" for i, prompt in enumerate(prompts) if len(prompt) == 0]
    _expect(len(prompts) and not empty, "prompts: expected lists of token ids, none empty; found "
            + (empty or ["no prompt"])[0])
    _expect(limit >= 1 <= rows,
            f"max_new_tokens and max_rows: expected 1 or more, found {limit}, {rows}")
    _expect(0 <= temperature < math.inf,
            f"temperature: expected 0 (greedy) or more, found {temperature}")


def _respond(model: nn.Module, prompts: list[list[int]], draw: Callable, eos: Tensor, limit: int,
             pad_id: int, bar: tqdm, routing: Routing | None, number: int) -> tuple:
    """Responses to n prompts, rows number … number + n − 1 of the call, side by side -> tokens and
    log-probs [n, limit], lengths [n]. Rows are right-aligned: all write one column of the cache."""
    row = torch.arange(len(prompts), device=eos.device)  # in the cache
    z, seen, cache = _prefill(model, prompts, pad_id, number + row, routing)
    out = torch.full((len(row), limit), pad_id, device=eos.device)
    logp_roll, length, going = z.new_zeros(out.shape), torch.zeros_like(row), row >= 0
    for t in range(limit):
        live = row[going]
        out[live, t], logp_roll[live, t] = draw(z[going])
        length[live] = t + 1
        going &= ~torch.isin(out[row, t], eos)
        n = int(going.sum())
        bar.update(len(live) * (limit - t) - n * (limit - t - 1))
        if not n or t + 1 == limit:
            break
        if len(row) - n >= max(1, len(row) // 8):  # an eighth has ended: it is dropped
            first = int(seen[going].any(0).int().argmax())  # columns before it are padding
            row, seen = row[going], seen[going, first:]
            for layer in cache.layers:
                layer.keys, layer.values = (x[going, :, first:] for x in (layer.keys, layer.values))
            going = going[going]
        seen = torch.cat([seen, going[:, None]], 1)
        z = _forward(model, out[row, t][:, None], seen, cache, number + row, routing)
    return out, logp_roll, length


def _forward(model: nn.Module, tokens: Tensor, seen: Tensor, cache: DynamicCache, row: Tensor,
             routing: Routing | None) -> Tensor:
    """tokens [n, m], the last columns of attention seen [n, W] -> logits [n, V] after the last, in
    float32 or more."""
    where = positions(seen)[:, -tokens.shape[1] :]
    z = model(input_ids=tokens, attention_mask=seen.long(), position_ids=where, use_cache=True,
              logits_to_keep=1, **{_cache_name(type(model)): cache}).logits[:, -1]
    if routing:
        routing.note(row, where, seen[:, -tokens.shape[1] :])
    return z.to(torch.promote_types(z.dtype, torch.float32))


@functools.cache
def _cache_name(model: type) -> str:
    """The name of the cache among the model's arguments: it changes within transformers 5."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def _prefill(model: nn.Module, prompts: list[list[int]], pad_id: int, row: Tensor,
             routing: Routing | None) -> tuple[Tensor, Tensor, DynamicCache]:
    """Logits [n, V] after n prompts, their attention [n, W] and cache. If it saves half of the
    tokens, a beginning that prompts share (K rollouts of a prompt, a critic's states of a response)
    is computed once; then each prompt feeds its last TAIL tokens."""
    from transformers import DynamicCache
    source, lengths = begins_alike(prompts), [len(prompt) for prompt in prompts]
    once = sorted(set(source))
    if routing or 2 * (sum(lengths[i] for i in once) + TAIL * len(source)) > sum(lengths):
        once = range(len(source))
    tokens, seen = left_pad([prompts[i] for i in once], pad_id, row.device)
    z = _forward(model, tokens, seen, cache := DynamicCache(), row, routing)
    if len(once) == len(source):
        return z, seen, cache
    at = row.new_tensor([once.index(i) for i in source])
    copied = row.new_tensor([max(n - TAIL, 0) for n in lengths])[:, None]
    first = (~seen).sum(1, keepdim=True)[at]  # column of the source's first token
    columns = torch.arange(-int(copied.max()), 0, device=row.device) + copied + first
    for layer in cache.layers:  # right-aligned; columns before `first` are masked
        layer.keys, layer.values = (x[at].take_along_dim(columns.clamp_min(0)[:, None, :, None], 2)
                                    for x in (layer.keys, layer.values))
    tokens, real = left_pad([prompt[-TAIL:] for prompt in prompts], pad_id, row.device)
    seen = torch.cat([columns >= first, real], 1)
    return _forward(model, tokens, seen, cache, row, routing), seen, cache


def begins_alike(prompts: list[list[int]]) -> list[int]:
    """source[i] is a prompt, as long or longer, that begins with all tokens of prompt i but its
    last TAIL, so that i can use its cache; or i itself. source[source[i]] is source[i]."""
    source, whole = list(range(len(prompts))), []
    for i in sorted(source, key=lambda i: -len(prompts[i])):
        n = len(prompts[i]) - TAIL  # comparing the last token first is fast: it tells most apart
        alike = (j for j in reversed(whole) if n > 0 and prompts[j][n - 1] == prompts[i][n - 1]
                 and prompts[j][:n] == prompts[i][:n])
        source[i] = next(alike, i)
        whole += [i] if source[i] == i else []
    return source


class Routing:
    """R3 (Ma et al. 2025, 2510.11370): the expert choices of a mixture-of-experts model, noted
    while it samples and replayed in the trainer's forward pass. Without R3 a token near a tie goes
    to other experts in the trainer, and ρ jumps. The trainer's router computes the gate weights
    anew, so it keeps its gradient. It must return (logits, scores, indices) with scores =
    softmax(logits) of the chosen, made to sum to one or not: Qwen3-MoE, Mixtral and their like.
    ValueError for a model without such a router.
    """

    def __init__(self, model: nn.Module) -> None:
        self.routers = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
        _expect(self.routers, "--router-replay: expected a model with top-k routers, found none in "
                f"{type(model).__name__}")
        self.seen, self.replay = [], None
        for layer, router in enumerate(self.routers):
            router.register_forward_hook(lambda *call, layer=layer: self._hook(layer, *call))

    def start(self, rows: int, width: int) -> None:
        """Room for the choices of new rows: choice [rows, width, L, k] by position, −1: unknown."""
        router, self.seen = self.routers[0], []
        self.choice = torch.full((rows, width, len(self.routers), router.top_k), -1,
                                 dtype=torch.int16, device=router.weight.device)

    def note(self, row: Tensor, position: Tensor, real: Tensor) -> None:
        """The choices of the forward pass just done: row [n], position and real [n, m]."""
        choice = torch.stack(self.seen, 1).unflatten(0, position.shape)  # [n, m, L, k]
        self.choice[row[:, None].expand_as(real)[real], position[real]] = choice[real].short()
        self.seen = []

    def columns(self, attention: Tensor) -> Tensor:
        """The noted choices in the columns of attention [B, S] -> [B, S, L, k]."""
        rows = torch.arange(len(attention), device=attention.device)[:, None]
        return torch.where(attention[..., None, None], self.choice[rows, positions(attention)], -1)

    def _hook(self, layer: int, router: nn.Module, inputs: tuple, output: tuple) -> tuple | None:
        logits, scores, chosen = output
        if self.replay is None:
            self.seen.append(chosen)
            return None
        noted = self.replay[:, :, layer].flatten(0, 1).long()
        index = torch.where(noted >= 0, noted, chosen)  # the last token was never fed
        score = logits.float().softmax(-1).gather(-1, index)
        if getattr(router, "norm_topk_prob", True):
            score = score / score.sum(-1, keepdim=True)
        return logits, score.to(scores.dtype), index


def generate_batch(
    model: nn.Module, prompts: list[list[int]], *, max_new_tokens: int, temperature: float = 1.0,
    eos_id: int | list[int], pad_id: int, generator: torch.Generator | None = None,
    max_rows: int = 256,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same as `generate` by transformers' continuous batching (a paged cache), for GPUs where
    `generate` is the bottleneck. RuntimeError if a request fails."""
    from transformers.generation import configuration_utils as configs
    _check_generate(prompts, max_new_tokens, temperature, max_rows)
    device, width = next(model.parameters()).device, max(map(len, prompts)) + max_new_tokens
    # transformers fills a GPU's memory; on a CPU this takes what the rows need, in its usual pages
    room = {} if device.type == "cuda" else {
        "num_blocks": max_rows * (width // 256 + 1), "max_batch_tokens": max(width, 1024)}
    seed = generator and int(torch.randint(2**31, (), generator=generator, device=generator.device))
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    try:
        done = model.generate_batch(
            prompts,
            generation_config=configs.GenerationConfig(
                max_new_tokens=max_new_tokens, do_sample=temperature > 0, top_k=0, top_p=1.0,
                temperature=temperature or 1.0, eos_token_id=eos_id, pad_token_id=pad_id),
            continuous_batching_config=configs.ContinuousBatchingConfig(
                return_logprobs=True, max_requests_per_batch=max_rows, seed=seed, **room))
    except MemoryError as error:  # older versions see no memory on a CPU without psutil
        raise RuntimeError(f"generate_batch: {error}; on a CPU a newer transformers, or the "
                           "package psutil, may help") from None
    replies = sorted(done.values(), key=lambda reply: int(reply.request_id.rpartition("_")[2]))
    failed = [reply.error for reply in replies if reply.error or not reply.generated_tokens]
    if failed or len(replies) < len(prompts):
        raise RuntimeError(f"generate_batch: expected {len(prompts)} responses, found "
                           f"{len(replies) - len(failed)}; {failed[:1]}")
    return pad_responses(prompts, [list(reply.generated_tokens) for reply in replies],
                         [reply.logprobs[: len(reply.generated_tokens)] for reply in replies],
                         pad_id, device)


def pad_responses(
    prompts: list[list[int]], ids: list[list[int]], logp: list[list[float]], pad_id: int,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Another engine's responses as the four tensors of `generate`: the ids and log-probs of each,
    its end-of-sequence token included."""
    rows = [(np.array([*prompt, *x]), np.ones(len(prompt) + len(x), bool), np.ones(len(x), bool),
             np.array(numbers, np.float32)) for prompt, x, numbers in zip(prompts, ids, logp)]
    return tuple(x.to(device) for x in _columns(rows, pad_id))


def left_pad(
    rows: list[list[int]], pad_id: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Lists of ids -> tokens [B, P] and attention [B, P]."""
    return pad_responses(rows, [()] * len(rows), [()] * len(rows), pad_id, device)[:2]


SAMPLERS = {"generate": generate, "generate_batch": generate_batch}


# ---- shared out over the ranks -------------------------------------------------------------------

def over_ranks(
    work: Callable[[Any, torch.Generator], list], items: Any, generator: torch.Generator | None
) -> list:
    """One result per item, in the order of items, the same list on every rank.

    Each rank calls work(items[rank::size], own_generator), unless that share is empty, for a list
    of one result per item. All ranks pass the same items and a generator in the same state. Without
    torch.distributed there is one rank. ValueError if another rank's list has a wrong length.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    rng, share = _child(generator, rank=rank), items[rank::size]
    part = work(share, rng) if len(share) else []
    parts, results = [part] * size, [None] * len(items)
    if size > 1:
        dist.all_gather_object(parts, part)
    for i in range(size):
        results[i::size] = parts[i]
    return results


def _child(generator: torch.Generator | None, device: torch.device | None = None, rank: int = 0
           ) -> torch.Generator:
    """A new generator by one draw of another, on its device or the one given. That draw is the same
    on every rank and keeps `generator` in step; the rank makes the new generators differ."""
    at = generator.device if generator else torch.device("cpu")
    seed = int(torch.randint(2**62, (), generator=generator, device=at)) + rank
    return torch.Generator(device or at).manual_seed(seed)


def shared(sampler: Callable) -> Callable:
    """A sampler like `generate` that shares the prompts out over the ranks and returns the four
    tensors for all prompts, in their order, on every rank."""
    def sample(model: nn.Module, prompts: list[list[int]], *, pad_id: int,
               generator: torch.Generator | None = None, **limits: Any) -> tuple[Tensor, ...]:
        """The sampler's four tensors of all prompts."""
        rows = over_ranks(lambda share, rng: _rows(
            *sampler(model, share, pad_id=pad_id, generator=rng, **limits)), prompts, generator)
        return tuple(x.to(next(model.parameters()).device) for x in _columns(rows, pad_id))
    return sample


def _rows(*columns: Tensor) -> list[tuple]:
    """Tensors [B, …] as B rows of arrays: a row of a tensor is pickled with the whole tensor."""
    return list(zip(*(x.cpu().numpy() for x in columns)))


def _columns(rows: list[tuple], pad_id: int) -> list[Tensor]:
    """Rows (tokens, attention, mask, logp, reward, routing) of several widths -> tensors [B, …]."""
    T, fills = [len(row[2]) for row in rows], (pad_id, 0, 0, 0, 0, -1)
    return [_stack([torch.from_numpy(np.asarray(x)[None]) for x in column], T, fill)
            for column, fill in zip(zip(*rows), fills)]


def collect(
    sample: Callable, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]], answers: list,
    prompt_id: Tensor, verifier: Callable[[str, Any], float], *, eos_id: list[int],
    generator: torch.Generator | None, routing: Routing | None = None,
) -> Batch:
    """Samples a response to each prompt (token ids, length B) and verifies it -> Batch.

    sample(prompts, generator=…) returns the four tensors of `generate`, and notes the experts'
    choices in `routing`. Ranks share the work, and every rank gets the whole batch, in the order of
    prompts, on the device of prompt_id [B] long. verifier(text, answer) gets the text without
    special tokens and any object as answer, and returns ±1; a response without an end-of-sequence
    token fails whatever it says. ValueError if `sample` gives no token for a prompt.
    """
    def work(share: range, rng: torch.Generator) -> list[tuple]:
        """Rows of the prompts with these numbers."""
        tokens, attention, mask, logp = sample([prompts[i] for i in share], generator=rng)
        texts = decode(tokenizer, tokens[:, tokens.shape[1] - mask.shape[1] :], mask)
        reward = torch.tensor([verifier(text, answers[i]) for text, i in zip(texts, share)])
        noted = [routing.columns(attention)] if routing else []
        return _rows(tokens, attention, mask, logp, reward, *noted)

    rows = over_ranks(work, range(len(prompts)), generator)
    empty = [f"no token for prompt {i}" for i, row in enumerate(rows) if not row[2].any()]
    _expect(not empty and len(rows) == len(prompts),
            f"sampler: expected a response to each of {len(prompts)} prompts, found "
            + (empty or [f"{len(rows)}"])[0])
    tokens, attention, mask, logp, reward, *noted = _columns(rows, tokenizer.pad_token_id)
    last = tokens[:, -mask.shape[1] :].gather(1, mask.sum(1, keepdim=True) - 1)[:, 0]
    truncated = ~torch.isin(last, torch.tensor(eos_id))
    # assumption: a truncated response is a failure (R = −1), not a state to bootstrap from
    reward = torch.where(truncated, -1.0, reward)
    batch = Batch(tokens, attention, mask, prompt_id, reward, truncated, logp, *noted)
    return move(batch, prompt_id.device)


def decode(tokenizer: PreTrainedTokenizerBase, tokens: Tensor, mask: Tensor) -> list[str]:
    """Text of each row of tokens [B, T] where mask [B, T] is True, without special tokens."""
    rows = [row[kept].tolist() for row, kept in zip(tokens.cpu(), mask.cpu())]
    return tokenizer.batch_decode(rows, skip_special_tokens=True)


# ---- problems ------------------------------------------------------------------------------------

PROMPT_KEYS = ("prompt", "problem", "question")
ANSWER_KEYS = ("reward_model.ground_truth", "answer", "solution")
LIST_AS_TEXT = re.compile(r"[\[{][\s\[]*[\"']|\[[^,()\[\]]*\]$")  # but [0, 1] is an interval
NO_ANSWER = re.compile("|".join((
    r"^\s*(?i:nan|null|n/a)\s*$", r"^\s*[\[{][\s\[]*[\"']", r"^\s*\[[^,()\[\]]*\]\s*$",  # no list
    r"[\x00-\x08\x0b\x0c\x0e-\x1f]", r"[\t\r][a-zA-Z]",  # "\frac", "\theta" as JSON reads them
    r"\n(?:abla|cong|e|eg|eq|exists|geq|gtr|i|leq|less|mid|ot|otin|parallel|sim|subseteq|u)"
    r"(?![a-zA-Z])", r"(?<!\\)\\\\(?:d?frac|sqrt|text|pi|left)",  # \\frac: one backslash too many
    r"^[-?.:!\s]*$", r"^\s*[,;`#\"']", r"[,;`]\s*$", r"\*\*.+\*\*", r"(?i:\banswer\b.*\d)")))
BENT = re.compile(  # the same in a prompt, where a tab before a word may be meant
    r"[\x08\f][a-zA-Z]{0,9}|\t(?:imes|heta|ext(?:bf|it|rm)?\{|frac|riangle|herefore|ilde)"
    r"|\r(?:ight|ho|angle|floor|ceil|brace)|\n(?:abla|otin|leq|geq)\b")


@dataclass(frozen=True)
class Problem:
    """prompt: text, or chat messages (role, content) of which the last is the user's."""

    prompt: str | list[dict]
    answer: str
    level: str = ""


def load_problems(path: str) -> list[Problem]:
    """Reads JSONL as GSM8K, MATH, AIME, DAPO-Math and verl write it; blank lines are skipped.

    The first of PROMPT_KEYS and of ANSWER_KEYS that is present counts. Of an answer: its last box,
    else what follows '####' (GSM8K), else all of it; of a solution: its last box. A list of one
    answer, also as text ('["76"]'), is that answer. ValueError with the number of the line that
    does not fit: several alternatives, NaN, an answer that is wrong in a box.
    """
    problems = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                if text := line.decode("utf-8-sig").strip():
                    problems.append(_read_problem(text))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    _expect(problems, f"{path}: expected one JSON object per line, found no line with one")
    return problems


def _read_problem(text: str) -> Problem:
    _expect(text[0] != "[", "expected JSONL, one JSON object per line, found a JSON list")
    try:
        row = json.loads(text, parse_float=Decimal)  # a float would lose digits: 4.5e33
    except (ValueError, RecursionError, ArithmeticError) as error:
        reason = getattr(error, "msg", error)
        raise ValueError(f"expected a JSON object, found broken JSON ({reason})") from None
    _expect(isinstance(row, dict), f"expected a JSON object, found {text:.40}")
    nested = row["reward_model"] if isinstance(row.get("reward_model"), dict) else {}
    row |= {f"reward_model.{key}": value for key, value in nested.items()}
    picked = []
    for keys in (PROMPT_KEYS, ANSWER_KEYS):
        present = [(key, row[key]) for key in keys if row.get(key) is not None]
        _expect(present, f"expected one of the keys {', '.join(keys)}; found "
                + (", ".join(row) or "none"))
        picked.append(present[0])
    (key, prompt), answer = picked
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    texts = [m.get(field) for m in messages if isinstance(m, dict) for field in ("role", "content")]
    complete = len(texts) == 2 * len(messages) and all(isinstance(text, str) for text in texts)
    _expect(complete and texts[-2:-1] == ["user"] and texts[-1].strip(),
            f"{key}: expected a text, or chat messages (role, content) that end with the user's, "
            f"not empty; found {prompt!r:.40}")
    bent = BENT.search(" ".join(texts))
    _expect(not bent, f"{key}: expected a text, found {bent and bent[0]!r} in it")
    return Problem(prompt, _gold(*answer), str(row.get("level", row.get("difficulty", ""))))


def _gold(key: str, answer: Any) -> str:
    """The answer as one line of text that is right when it stands in a box; or ValueError."""
    if isinstance(answer, str) and LIST_AS_TEXT.match(answer.strip()):
        try:  # as in Skywork-OR1
            answer = json.loads(re.sub(r"^\[\s*'([^'\"]*)'\s*\]$", r'["\1"]', answer.strip()),
                                parse_float=Decimal)
        except (ValueError, RecursionError):
            pass
    if isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    vast = isinstance(answer, Decimal) and abs(answer.adjusted()) > MAX_CHARS - 50
    _expect(type(answer) in (str, int, Decimal) and not vast, f"{key}: expected a text or a number,"
            f" or a list of one; found {str(answer):.40}")
    answer = f"{answer:f}" if isinstance(answer, Decimal) else str(answer)
    box = _last_box(answer)
    _expect(key != "solution" or box, r"solution: expected a closed \boxed{…} in it, found none")
    mark, answer = ("", answer[box]) if box else answer.rpartition("####")[1:]
    line, odd = " ".join(answer.split()), [c for c in answer if c.isdecimal() and not c.isascii()]
    odd = odd or not line.isprintable() or mark and "\n" in answer.strip()  # a zero-width space
    odd = odd or NO_ANSWER.search(answer)
    _expect(not odd and math_reward(rf"\boxed{{{line}}}", line) > 0,
            f"{key}: expected an answer that a reply can give, found {answer!r:.60}")
    return line


def encode_prompt(tokenizer: PreTrainedTokenizerBase, problem: Problem, *, instruction: str = ""
                  ) -> list[int]:
    r"""Token ids by the chat template, up to where the reply starts; without one, of plain text.
    The instruction, such as "Put your final answer within \boxed{}.", is added to the user's last
    message on a line of its own."""
    text = isinstance(problem.prompt, str)
    chat = [{"role": "user", "content": problem.prompt}] if text else problem.prompt
    if instruction:
        chat = [*chat[:-1], {"role": "user", "content": chat[-1]["content"] + "\n" + instruction}]
    ids = (tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
           if tokenizer.chat_template else
           tokenizer("\n\n".join(message["content"] for message in chat)).input_ids)
    while ids and ids[-1] == tokenizer.eos_token_id:  # some tokenizers append it to every text
        ids = ids[:-1]
    return ids


def load_data(data: str, eval_data: str, n_eval: int) -> tuple[list[Problem], list[Problem]]:
    """Problems to train on and at most n_eval held out; no prompt of `data` is in both or twice.

    Without data the embedded task's. Without eval_data a tenth of `data` at most is held out.
    Prints how many answers of `data` have which form. ValueError for fewer than 2 to train on.
    """
    shuffle = random.Random(0).shuffle  # which part is held out does not depend on --seed
    if not data:
        train, held_out = task_problems(), task_problems(held_out=True)
    else:
        rows = load_problems(data)
        forms = Counter(answer_form(p.answer) for p in rows)
        print("answers: " + " · ".join(f"{form} {n}" for form, n in forms.most_common()))
        shuffle(train := list({json.dumps(p.prompt): p for p in rows}.values()))
        if len(train) < len(rows):
            print(f"left out {len(rows) - len(train)} of {len(rows)} problems: "
                  "prompts that stand there twice")
        n = 0 if eval_data else min(n_eval, len(train) // 10 or len(train) // 2)
        held_out, train = train[:n], train[n:]
    if eval_data:
        shuffle(held_out := load_problems(eval_data))
        there, n = {json.dumps(p.prompt) for p in held_out}, len(train)
        train = [p for p in train if json.dumps(p.prompt) not in there]
        if len(train) < n:
            print(f"left out {n - len(train)} problems of --data that stand in --eval-data")
    _expect(len(train) > 1, f"--data: expected 2 or more problems to train on, found {len(train)}")
    return train, held_out[:n_eval]


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, problems: list[Problem], *, max_prompt: int,
    long_prompts: str, instruction: str,
) -> tuple[list[Problem], list[list[int]]]:
    """Problems whose prompt has 1 … max_prompt tokens, and their ids. ValueError for a longer one
    with long_prompts "stop", or if none fits."""
    try:
        pairs = [(p, encode_prompt(tokenizer, p, instruction=instruction))
                 for p in tqdm(problems, desc="tokens of the prompts", delay=5, leave=False)]
    except Exception as error:  # a chat template is code of the tokenizer's author
        raise ValueError("--data: expected prompts that the tokenizer's chat template takes, found "
                         f"{type(error).__name__}: {error}") from error
    fit = [(p, ids) for p, ids in pairs if 0 < len(ids) <= max_prompt]
    if len(fit) < len(pairs):
        left_out = f"{len(pairs) - len(fit)} of {len(pairs)}"
        _expect(fit and long_prompts != "stop", f"--max-prompt: expected prompts of at most "
                f"{max_prompt} tokens, found {left_out} that are longer (or empty), the longest "
                f"{max(len(ids) for _, ids in pairs)}; --long-prompts skip leaves them out")
        print(f"skipped {left_out} prompts: over --max-prompt {max_prompt}")
    return [p for p, _ in fit], [ids for _, ids in fit]


# ---- verifiers -----------------------------------------------------------------------------------
# What the model wrote is hostile: nothing in it is evaluated, only short answers are taken apart,
# and no signal is used, so that a worker thread comes to the same verdict.

MAX_CHARS = 500  # a longer answer is compared letter by letter
BOX_OR_BRACE = re.compile(
    r"\\(?:boxed|fbox)(?:\s*\{|\s+(-?\d(?:[\d.,/]*\d)?)(?![\w\\^]))|\\.|[{}]", re.S | re.A)


def extract_boxed(text: str) -> str | None:
    r"""Content of the last \boxed{…} or \fbox{…} that is closed (or `\boxed 5`), None without one.
    Braces nest, \{ and \} are no braces, and a box inside another counts as the last."""
    box = _last_box(text)
    return text[box].strip(" \t\r\n") if box else None


def _last_box(text: str) -> slice | None:
    """Where that content stands."""
    starts, last = [], (-1, -1)  # per open brace: where the content of its box starts, or −1
    for token in BOX_OR_BRACE.finditer(text):
        if token[1]:
            last = token.span(1)
        elif token[0] == "}" and starts:
            last = max(last, (starts.pop(), token.start()))
        elif token[0][-1] == "{" and token[0] != r"\{":
            starts.append(token.end() if token[0] != "{" else -1)
    return slice(*last) if last[0] >= 0 else None


# These closed lists say what is respelled or dropped. Everything else is part of an answer.
SPELLING = {old: new for new, olds in {  # of LaTeX's tokens
    "": r"\left \right \big \bigl \bigr \Big \Bigl \Bigr \bigg \biggl \biggr \Bigg \Biggl \Biggr "
        r"\displaystyle \textstyle \!", "/": "⁄", "<": r"\lt", ">": r"\gt", r"\emptyset ":
    r"\varnothing ∅", "|": r"\lvert \rvert \vert", r"\binom": r"\dbinom \tbinom",
    **{rf"\{name} ": x for name, x in zip("alpha beta gamma theta lambda phi omega".split(),
                                          "αβγθλφω")}, **{rf"\mathbb{{{x[0]}}}": x[1] for x in (
        "Rℝ", "Qℚ", "Zℤ", "Nℕ", "Cℂ")},
    " ": r"\, \; \: \( \) \[ \] \quad \qquad ~ $", "-": "− –", "*": r"\cdot \times × · ⋅",
    "^": "**", r"\frac": r"\dfrac \tfrac \cfrac", "%": r"\%", "°": r"\circ \degree", r"\sqrt": "√",
    r"\{": r"\lbrace", r"\}": r"\rbrace", r"\infty ": "∞", r"\pi ": "π", r"\pm ": "±",
    r"\cup ": "∪", r"\in ": "∈", r"\le ": r"\leq \leqslant ≤", r"\ge ": r"\geq \geqslant ≥",
    r"\ne ": r"\neq ≠"}.items() for old in olds.split()} | {
    "\\": ""} | dict.fromkeys(["\\ ", *"\u00a0\u2009\u202f"], " ")  # no-break and thin spaces
UNITS = {word + s: words.split()[0] for words in (  # ~: only in a text style
    "° degree", "°C degreescelsius", "°F degreesfahrenheit", r"dollar \$", "cent", "unit", "radian",
    "mm millimeter", "cm centimeter centimetre", "meter metre ~m", "km kilometer kilometre",
    "inch inche", "foot feet ft", "yard", "mile", "milehour mph", "gram ~g", "kg kilogram",
    "~mg", "pound lb", "ounce oz", "liter litre ~L", "mL ~ml", "second ~s", "minute min",
    "hour ~hr ~h", "day", "week", "month", "year") for word in words.split() for s in ("", "s")}
MAGNITUDES = {"": 0} | {word + s: n for word, n in {
    "hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}.items()
    for s in ("", "s")}
MANY = "|".join(filter(None, MAGNITUDES))
WORD = "|".join(sorted(map(re.escape, UNITS), key=len, reverse=True))
UNIT = re.compile(  # 5 square cm, 5 cm^2, 5 km/h, 5 m/s^2; not of 2x-3 cm
    rf"((?:[^\\a-zA-Z]|\\(?:frac|sqrt|pi|\$)|{MANY}|[eE](?=[-+\d]))*?(?:[\d}})!]|\\pi|{MANY}))"
    rf" ?(square|sq\.?|cubic)?({WORD})(?:\^\{{([23])\}})?"
    rf"(?:(?:/|per)({WORD}|[sh]|hr)(\^\{{2\}})?)?", re.S)
TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|\*\*|.|\\", re.S)
NAME = re.compile(  # x = …, x_1 = …, f(x) = …, (x, y) = …, \theta = …, x \in …
    r"((?:(?:[a-zA-Z]|\\[a-zA-Z]+)'*(?:_\{\w+\})?(?:\^\{-1\})?(?:\([a-zA-Z](?:,[a-zA-Z])*\))?"
    r"|\([a-zA-Z](?:,[a-zA-Z])+\))(?:=|\\in(?![a-zA-Z]) ?))(.+)", re.S)
MATRIX = re.compile(r"(?s)\\begin\{(\w+)\}(?:\{[clr|]*\})?((?:(?!\\begin|\\end).)*)\\end\{\1\}")
PLUS_MINUS = re.compile(r"\\(pm|mp)(?![a-zA-Z]) ?")
RELATION = re.compile(r"([<>]|\\(?:[lgn]e|in)(?![a-zA-Z]) ?)")
OPENING = {"(": ")", "[": ")", "{": "}", r"\{": r"\}", r"\langle": r"\rangle"}
CLOSING = {x: x for x in OPENING.values()} | {"]": ")"}
REAL = r"(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,3})?"
NUMBER = re.compile(rf"(?a)([-+]?)(?:({REAL})(?:/({REAL}))?|"
                    rf"(\d*) ?\\frac\{{([-+]?{REAL})\}}\{{([-+]?{REAL})\}})(%?)")
RAISED = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
STYLE = (r"\\(?:text(?:rm|bf|it|sf|normal)?|math(?:rm|bf|it|sf)|boldsymbol|mbox|operatorname|"
         r"emph)\s*\{((?:[^{}]|\^\{\w\})*)\}", r" \1 ")
PLAIN = [(re.compile(old), new) for old, new in (  # the markup of a whole answer, in this order
    (r"\\(?:left|right)\s*\.", ""),  # an invisible bracket
    (r"^([^$\\]*)\$([^$]*)$", r"\1\\$\2"),  # a dollar; two of them are math
    (r"(?a)(?<=\d)(?:\{,\}|,\\!|\\,)(?=\d{3}(?!\d|/))", ""),  # 1{,}000
    (r"(?s)^\s*<(.*)>\s*$", r"\\langle \1\\rangle"),  # a vector
    (TOKEN, lambda m: SPELLING.get(m[0], m[0])),
    ("[⁻⁰¹²³⁴-⁹]+", lambda m: "^{" + m[0].translate(RAISED) + "}"),
    ("[₀-₉]+", lambda m: "_{" + "".join(str("₀₁₂₃₄₅₆₇₈₉".index(c)) for c in m[0]) + "}"),
    (r"\\mathbb\s*([A-Z])", r"\\mathbb{\1}"),
    ("[¼-¾⅐-⅞]", lambda m: r"\frac{%s}{%s}" % (*unicodedata.normalize("NFKC", m[0]).split("⁄"),)),
    (r"([\^_])\s*(?:\{\s*(\w)\s*\}|(-?\d+|[a-zA-Z]))", r"\1{\2\3}"),  # x^2
    (r"\^\s*(?:\{\s*°\s*\}|°)", "°"),  # 30^\circ; below: 5\text{m} is a unit, 5m is not
    (r"((?:[\d})]|\\pi)\s*\\(?:text|mathrm)\{\s*)(mg|ml|hrs?|[mgshL])(?=[\s}^/])", r"\1~\2"),
    *[STYLE] * 9,  # styles in each other
    (r",?\s*(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])",  # a list, unless it joins relations
     lambda m: m[0] if RELATION.search(m.string) else ", "),
    (r"(?<![a-zA-Z\\])(?:[A-Z][a-z]{2,}|No)(?![a-zA-Z])", lambda m: m[0].lower()),  # Yes
    (r"(?a)(?<![\d.,])(?!\d+ [1-9]\d* ?/)[1-9]\d{0,2}(?:(?: \d{3})+|"  # 1 1/2 is mixed
     r"(?:,\d{3})+(?![^()\[\]]*(?:[)\]]|\\\})))(?!\d|,\d)",
     lambda m: re.sub("[ ,]", "", m[0])),  # 1 234, 1,234; (1,234) has two
    (r"(?<!\.)\.\s*$", ""),
    (r"\s+", " "),
    (r"(?<=\d)e(?= [-+])", "{e}"),  # 2e - 1 is no 0.2
    (r"(\\[a-zA-Z]+ (?=[a-zA-Z])|(?<=\d) (?=\d))| ", r"\1"),  # \pi x and 1 1/2 need theirs
)]
RESPELL = [(re.compile(old, re.ASCII), new) for old, new in (  # of a single value
    (r"^([-+]?)(\d*)\.(\d*)\\overline\{(\d+)\}(?=%?$)",  # 0.\overline{3} -> \frac{3}{9}
     lambda m: r"%s\frac{%d}{%d}" % (m[1], int(m[2] + m[3] + m[4]) - int(m[2] + m[3] or 0),
                                     10 ** len(m[3] + m[4]) - 10 ** len(m[3]))),
    (r"(?<![\d./])(\d+\.?\d*|\.\d+)[*x]10\^\{([-+]?\d{1,3})\}(?!\w)", r"\1e\2"),  # 3.5*10^{4}
    (r"(?<![\w.}])10\^\{([-+]?\d{1,3})\}(?!\w)", r"1e\1"),
    (r"\\(frac|sqrt) ?(\\pi|[\da-zA-Z])", r"\\\1{\2}"),  # \sqrt2 -> \sqrt{2}
    (r"(\\frac\{(?:[^{}]|\{[^{}]*\})*\}) ?(\\pi|[\da-zA-Z])", r"\1{\2}"),  # \frac{1}2
    (r"^\\frac\{-([^-+]*)$", r"-\\frac{\1"),  # \frac{-x}{2} -> -\frac{x}{2}
    (r"(?<![\w.}/^)])(\d+)/(\d+)(?![\w./^{(\\])", r"\\frac{\1}{\2}"),  # 1/2
    (r"^([-+]?)(?:(?!.*\\(?:sin|cos|tan|cot|sec|csc|arc|ln|log|lg|exp|mod|pm|mp|min|max|lim))"
     r"([^-+/,()<>=\s]+)|\(([^()]+)\))/(\d+|[a-zA-Z]|\\pi|\\sqrt\{[^{}]*\})$",
     r"\1\\frac{\2\3}{\4}"),  # \sqrt{3}/2, (1+x)/2
    (r"(?<=[\d}])\*(?=\\pi|\\sqrt)", ""),
    (r"^([-+]?\\frac\{\d+)(\}\{\d+\}) ?(\\pi|\\sqrt\{[^{}]*\}|[a-zA-Z])$", r"\1\3\2"),  # \frac23\pi
    (r"^([-+]?\\frac\{)1(?=\\pi|\\sqrt|[a-df-zA-Z])", r"\1"),
    (r"(?<=[\d}])percent$", "%"),
    (r"^\+", ""),
)]


def canonical(text: str, *, names: bool = False, units: bool = False) -> str:
    r"""One spelling for answers that mean the same.

    A number is an exact fraction: 0.5, 50/100, \frac12, 5 \times 10^{-1}, 5e-1 and 50\% are 1/2,
    0.\overline{3} is 1/3, 1 1/2 is 3/2, 1,234 is 1234, 5 million is 5000000. Entry by entry:
    tuples, intervals, matrices (order and brackets count; a pmatrix is a bmatrix), \{sets\} and
    lists (comma, semicolon, and, or; \pm is a list of two; order does not count, between commas a
    semicolon parts lists), unions, the sides of < and >. It drops spaces, markup, text styles
    (STYLE), thousands separators; brackets around the whole of one answer, (C) is C; one full stop
    at the end; a word's capital; a name before `=` or `\in` unless `names` or others have another
    name (x = 1, y = 2); a unit of UNITS after a number unless `units`. Nothing else goes: letters,
    other words, percent, i, inequalities, a.m. are part of the answer.
    """
    if len(text) > MAX_CHARS:
        return text
    form = functools.partial(_form, names=names, units=units)

    def matrix(match: re.Match) -> str:
        r"""\begin{pmatrix} 1 & 2 \\ 3 & 4 \\ \end{pmatrix} -> \matrix{1&2\\3&4}"""
        rows = re.split(r"\\\\(?:\[[-\d.]+[a-z]{2}\])?", match[2])
        rows = [_split(x, "&", ",") or x.split("&") for x in (rows if rows[-1] else rows[:-1])]
        kind = "matrix" if match[1] in ("pmatrix", "bmatrix") else match[1]
        return rf"\{kind}{{" + r"\\".join("&".join(map(form, row)) for row in rows) + "}"

    for old, new in [*PLAIN, *[(MATRIX, matrix)] * 3]:  # a matrix of matrices
        text = old.sub(new, text)
    return form(text)


def same_answer(one: str, other: str) -> bool:
    """Whether two answers mean the same: a symmetric relation. A name (x = 5) or a unit (5 cm) that
    one of them lacks does not count; where both have one, it must be the same."""
    bare = canonical(one)
    return canonical(other) == bare and all(
        len({canonical(text, **kept) for text in (one, other)} - {bare}) < 2
        for kept in ({"names": True}, {"units": True}))


def _form(text: str, *, names: bool, units: bool, depth: int = 6) -> str:
    """The canonical spelling of a plain text: of a bracket, a list, a union, a name or a value."""
    again = functools.partial(_form, names=names, units=units, depth=depth - 1)
    if depth == 0 or not text:
        return text
    tokens = TOKEN.findall(text)
    left, inside, right = tokens[0], "".join(tokens[1:-1]), tokens[-1]
    name, parts = NAME.fullmatch(text), _split(text)
    within = _split(inside) if OPENING.get(left, "") == CLOSING.get(right) else []
    if len(within) == 1 and left + right in ("()", "{}"):
        return again(inside)
    braces = within and left in ("{", r"\{")
    if within and not braces and not PLUS_MINUS.search(inside):
        grouped = any(re.match(r"0\d\d", x) for x in within)  # (5,000) is no (5,0)
        return left + ",".join(within if grouped else map(again, within)) + right
    if name and "=" not in name[2] and _split(name[2])[1:]:  # x = 1, 2
        parts = [name[1] + part for part in _split(name[2])]
    parts = [signed for part in (within if braces else parts or [text]) for signed in {
        PLUS_MINUS.sub(lambda m: signs[m[1] == "mp"], part)  # a \pm b is a+b and a-b
        for signs in ("+-", "-+")}]
    if braces or len(parts) > 1:
        groups = _split(text, ";") if "," in text else []  # 1, 2; 3, 4
        named = [match and match[1] for match in map(NAME.fullmatch, parts)]
        if len(groups) > 1:
            parts = groups
        elif len({*named}) > 1:  # x = 1, y = 2 is more than 1, 2
            again = functools.partial(again, names=True)
        parts = (set if braces else list)(map(again, parts))
        # whose is the 2 in x = 1, 2, y = 3, or in x = 1, y = 2, x = 3, y = 1?
        order = len({*named}) > 1 and (None in named or len({*named}) < len(named))
        parts = parts if order else sorted(parts)
        return r"\{" + ",".join(parts) + r"\}"
    if name:
        return name[1] * names + again(name[2])
    parts, sides = _split(text, r"\cup"), RELATION.split(text)
    if len(parts) > 1:
        return r"\cup ".join(sorted(again(part.strip()) for part in parts))
    if len(sides) > 1 and all(len(_split(x)) == 1 for x in sides[::2]):  # x < 1/2
        return "".join(x if i % 2 else again(x) for i, x in enumerate(sides))
    return _value(text, units)


def _split(text: str, *marks: str) -> list[str]:
    """'a,(b,c)' -> ['a', '(b,c)']: at marks, or at , and ; where outside of brackets. Empty where
    brackets do not match (except [a,b)) or a part is empty."""
    parts, opened = [""], []
    for token in TOKEN.findall(text):
        if token in OPENING:
            opened.append(OPENING[token])
        elif token in CLOSING and (not opened or opened.pop() != CLOSING[token]):
            return []
        if not opened and token in (marks or ",;"):
            parts.append("")
        else:
            parts[-1] += token
    return parts if all(parts) and not opened else []


def _value(text: str, units: bool) -> str:
    """A number as an exact fraction, anything else in one spelling; its unit only if `units`."""
    unit = ""
    if match := UNIT.fullmatch(text):
        text, prefix, word, power, per, squared = match.groups()
        power = power or {"square": "2", "sq": "2", "sq.": "2", "cubic": "3"}.get(prefix, "")
        per = UNITS.get(per, UNITS.get(f"~{per}", ""))
        unit = f" {UNITS[word]}{power}{per}{squared or ''}"
        if text[0] + text[-1] == "()" and len(_split(text[1:-1])) == 1:
            text = text[1:-1]
    if match := re.fullmatch(r"([-+]?)\\\$(.+)", text, re.S):
        text, unit = match[1] + match[2], " dollar"
    text, many = re.fullmatch(rf"(.*?)({MANY}|)", text, re.S).groups()
    for old, new in RESPELL:
        text = old.sub(new, text)
    if match := NUMBER.fullmatch(text):
        sign, real, below, whole, p, q, percent = match.groups()
        top, bottom = Fraction(real or p), Fraction(below or q or 1)
        if bottom and not (whole and not 0 < top < bottom):  # 1\frac{-1}{2} is no number
            number = (-1 if sign == "-" else 1) * (int(whole or 0) + top / bottom)
            return str(number * 10 ** MAGNITUDES[many] / (100 if percent else 1)) + unit * units
    return text + many + unit * units


def answer_form(answer: str) -> str:
    """number, fraction, list (tuple, interval, set, matrix), text (a word in it) or expression."""
    form = canonical(answer)
    if NUMBER.fullmatch(form):
        return "fraction" if "/" in form and "." not in answer else "number"
    if form.startswith(("(", "[", r"\{", r"\matrix")):
        return "list"
    return "text" if re.search(r"(?<![\\a-zA-Z])[a-zA-Z]{3,}", form) else "expression"


def _verdict(reply: str | None, answer: str) -> float:
    return 1.0 if reply and canonical(reply) and same_answer(reply, answer) else -1.0


def math_reward(text: str, answer: str) -> float:
    """+1.0 if the last box of the text means the same as the answer, else −1.0. Never raises."""
    return _verdict(extract_boxed(text), answer)


LABEL = re.compile(r"(?im)^(?:(?:[ \t*_#>•+-]|\d+[.)])*[ \t#>•+-])?"  # - **Answer:**
                   r"([*_]*(?:the )?(?:final )?answer[ \t*_]*:)(?=([\s*_]*)((?:[-•+] +)?))")


def answer_reward(text: str, answer: str) -> float:
    """+1.0 if the last line `Answer: …` gives the answer, boxed or not, else −1.0: DAPO-Math."""
    label = [None, *LABEL.finditer(text)][-1]
    rest = text[label.end(3) :] if label else ""
    close = {r"\[": r"\]", "$$": "$$"}.get(rest[:2], "\n")  # displayed math has several lines
    last, opened = rest[2 * (close != "\n") :].partition(close)[0], []
    for mark in re.findall(r"\*+|_+", label[1] + label[2]) if label else ():
        opened.pop() if opened[-1:] == [mark] else opened.append(mark)
    for mark in reversed(opened):  # emphasis that is still open ends after the answer
        last = re.sub(rf"{re.escape(mark)}(?=\W*$|\s)", "", last, count=1)
    box = "boxed" in last or r"\fbox" in last
    return _verdict(extract_boxed(last) if box else last.strip("` \t\r"), answer)


SLASH, PART = r"(?:\s?/\s?\d*\.?\d+)?", r"(?:[-+.,\d]|\{,\}){1,99}"
TEN = r"10(?:\s?(?:\^|\*\*)\s?(?:[-−]?\d{1,3}|\{\s?[-−+]?\d{1,3}\s?\})|[⁻⁰¹²³⁴-⁹]{1,4})"
NUMBER_IN_TEXT = re.compile(
    r"((?:(?<![\w)}])[-−–])?(?:\\?\$)?(?:"
    rf"(?:\d+\s?)?\\[dtc]?frac(?:\s?(?:\{{\s?(?:{TEN}|{PART})\s?\}}|\d)){{2}}|"
    rf"\d*\.\d*\\overline\{{\d+\}}|\d+ [1-9]\d*/\d+|(?:\d+ ?)?[¼-¾⅐-⅞]|{TEN}{SLASH}|"  # 1 1/2, 1½
    rf"\d+\s?\^\s?(?:\{{[^{{}}]{{1,9}}\}}|-?\d+)|(?<!\^)(?<!\^\{{)(?:"  # 2^{5} as a whole; no cm^2
    r"(?:[1-9]\d{0,2}(?:[ \u00a0\u2009\u202f]\d{3})+(?!\d)|"  # 1 234.5
    r"\d{1,3}(?:(?:,|\{,\}|,\\!|\\,)\d{3})+(?!\d)|\d*\.?\d+)(?:\.\d+)?"  # 1,234.5, .5
    rf"(?:[eE][-+]?\d+(?!\w)|\s?(?:\\times|\\cdot|[×·*x])\s?{TEN})?{SLASH}))"  # 1e4, 3 \times 10^4
    rf"(?:(?:\s|\\,)?(?:\\text\{{\s?)?(?i:{MANY})(?![a-z])\}}?)?)(\s?(?:\\?%|percent))?", re.ASCII)


def number_reward(text: str, answer: str) -> float:
    """+1.0 if the last number of the text is the answer, else −1.0: for models without boxes. A
    magnitude (`million`) belongs to the number, other words do not; 50% gives 50 and 50% alike."""
    number, percent = [("", ""), *NUMBER_IN_TEXT.findall(text)][-1]
    return max(_verdict(number, answer), _verdict(number + percent, answer))


MATH_VERIFY_SECONDS = 10
MATH_VERIFY_LOCK = threading.Lock()
MATH_VERIFY = r"""
import json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
from math_verify import LatexExtractionConfig, parse, verify
def read(tex): return parse(f"\\boxed{{{tex}}}", [LatexExtractionConfig()], parsing_timeout=None)
replies, sys.stdout = sys.stdout, sys.stderr
print("ready", file=replies, flush=True)
for line in sys.stdin:
    answer, boxed = json.loads(line)
    print(verify(read(answer), read(boxed), timeout_seconds=None), file=replies, flush=True)
"""


@functools.cache
def _math_verify_process() -> subprocess.Popen:
    """math-verify in a process of its own, which can be stopped when it hangs; a thread cannot."""
    process = subprocess.Popen(
        [sys.executable, "-c", MATH_VERIFY], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    if process.stdout.readline() != "ready\n":
        raise ImportError("math_verify needs a package: pip install 'math-verify[antlr4_13_2]'")
    return process


def math_verify_reward(text: str, answer: str) -> float:
    """As math_reward; where that says no, this asks the package math-verify about the same box. It
    does not ask if both are numbers, one has words, or only a name or unit differs: math-verify
    drops those. An answer that takes it too long is wrong. ImportError if it is missing."""
    with MATH_VERIFY_LOCK:
        if _math_verify_process().poll() is not None:  # it died since the last question
            _math_verify_process.cache_clear()
        process, boxed = _math_verify_process(), extract_boxed(text) or ""
        forms = {answer_form(boxed), answer_form(answer)}
        decided = "text" in forms or forms <= {"number", "fraction"}
        if decided or not 0 < len(boxed) <= MAX_CHARS or canonical(boxed) == canonical(answer):
            return math_reward(text, answer)
        print(json.dumps([answer, boxed]), file=process.stdin, flush=True)
        answered, _, _ = select.select([process.stdout], [], [], MATH_VERIFY_SECONDS)
        reply = process.stdout.readline() if answered else ""
        if not reply:  # it hangs or died: the next question gets a new process
            process.kill()
            process.wait()
            _math_verify_process.cache_clear()
        return 1.0 if reply == "True\n" else -1.0


# ---- embedded task -------------------------------------------------------------------------------
# An iterated map. Prompt `+7@d=3`: add 7 modulo 10, up to letter d (4 times), start at 3.
# Response: the running values with letter counters, `a0b7c4d1$`, two characters a step.
# Two kinds of prompts: at the mark `@` (easy) all demonstrations are right. At `!` (hard) each step
# slips with probability SLIP: it writes the value before once more, `a0b7c7d4$`, and goes on from
# it. So success is near 1, near 0 and between, and a slip can be seen in the response.
# The prompt ends with the start, so that the first step, like all others, follows a value.

LETTERS = string.ascii_lowercase[:16]
CHARACTERS = string.printable[:95] + "\n"  # a token each: printable ASCII; `$` ends a text
EASY, HARD, SLIP = "@", "!", 0.4


def task_problems(*, held_out: bool = False) -> list[Problem]:
    """2,448 problems to train on or 414 held out: 2 marks, 10 starts, 9 addends, 1–16 steps. No
    held-out chain begins a training chain: its start and addend occur together in no training
    problem ("new pair"), or only in shorter ones ("longer"). level is the mark's name, at the hard
    mark the range of the number of steps, and which of the two it is."""
    problems, numbers = [], (range(10), range(1, 10), range(1, len(LETTERS) + 1))
    for mark, start, addend, steps in product(EASY + HARD, *numbers):
        group = (start + 3 * addend) % 10  # each has every addend once
        part = ", new pair" if group == 0 else ", longer" if group == 9 and steps > 8 else ""
        # a new pair's chain of one step, `a4`, begins chains of other pairs: it is left out
        if bool(part) == held_out and (group or steps > 1):
            letter = LETTERS[steps - 1]
            length = "01-04" if steps <= 4 else "05-08" if steps <= 8 else "09-16"
            problems.append(Problem(
                f"+{addend}{mark}{letter}={start}", f"{letter}{(start + addend * steps) % 10}",
                ("easy" if mark == EASY else f"hard {length}") + part))
    random.Random(0).shuffle(problems)
    return problems


def chain_reward(text: str, answer: str) -> float:
    """+1.0 if the text ends with the last letter and its right value, `d1`, else −1.0."""
    return 1.0 if text.endswith(answer) else -1.0


def demonstration(prompt: str, slip: float, rng: random.Random) -> str:
    """A response in which each step slips with probability `slip` if the prompt is hard: the slips
    leave a base policy that is worth improving."""
    addend, mark, last, value = int(prompt[1]), prompt[2], LETTERS.index(prompt[3]), int(prompt[5])
    steps = []
    for letter in LETTERS[: last + 1]:
        if mark == EASY or rng.random() >= slip:
            value = (value + addend) % 10
        steps.append(f"{letter}{value}")
    return "".join(steps) + "$"


def task_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character; `$` is end of sequence and padding alike."""
    from transformers import PreTrainedTokenizerFast
    words = {character: i for i, character in enumerate(CHARACTERS)}
    split = {"type": "Split", "pattern": {"Regex": ""}, "behavior": "Isolated", "invert": False}
    description = {
        "version": "1.0", "added_tokens": [], "pre_tokenizer": split, "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "?"}}
    with tempfile.TemporaryDirectory() as folder:  # transformers reads it from a file
        path = os.path.join(folder, "tokenizer.json")
        with open(path, "w") as file:
            json.dump(description, file)
        return PreTrainedTokenizerFast(
            tokenizer_file=path, eos_token="$", pad_token="$", unk_token="?")


VERIFIERS = {"boxed": math_reward, "answer": answer_reward, "number": number_reward,
             "math_verify": math_verify_reward, "chain": chain_reward}


def build_base(folder: str = "runs/base", *, steps: int = 700, batch: int = 64) -> str:
    """The embedded base policy as a Hugging Face folder: supervised on demonstrations with slips.
    It is built once. Of two processes that build it, the first that is ready puts it there."""
    if os.path.isfile(os.path.join(folder, "config.json")):
        return folder
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer, rng, problems = task_tokenizer(), random.Random(0), task_problems()
    # long chains more often: late letters are rare otherwise, and learned too late
    weights = [1 + LETTERS.index(problem.answer[0]) for problem in problems]
    torch.manual_seed(0)
    eos = tokenizer.eos_token_id
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=192, num_hidden_layers=4,
        num_attention_heads=4, max_position_embeddings=256, bos_token_id=None, eos_token_id=eos,
        pad_token_id=eos, initializer_range=0.08))  # 0.02 is too small at this width: not learned
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 3e-3, total_steps=steps, pct_start=0.1)
    bar = tqdm(range(steps), desc="base policy (once)", dynamic_ncols=True)
    for _ in bar:
        prompts = [problem.prompt for problem in rng.choices(problems, weights, k=batch)]
        texts = [prompt + demonstration(prompt, SLIP, rng) for prompt in prompts]
        part = tokenizer(texts, padding=True, return_tensors="pt")
        part.attention_mask[:, : len(prompts[0])] = 0  # prompts, of one length, are not learned
        labels = part.input_ids.masked_fill(part.attention_mask == 0, -100)
        loss = model(input_ids=part.input_ids, labels=labels).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step(), opt.zero_grad(), schedule.step()
        bar.set_postfix(loss=f"{loss.item():.3f}")
    write_folder(folder, tokenizer, model, replace=False)
    return folder


def write_folder(
    folder: str, tokenizer: PreTrainedTokenizerBase, model: nn.Module,
    state_dict: dict[str, Tensor] | None = None, *, replace: bool = True,
) -> None:
    """A Hugging Face folder, written beside its place and then renamed: it is whole or not there.
    A model there is replaced, other files stay; with replace=False a model's folder is kept."""
    parent, name = os.path.split(os.path.abspath(folder))
    os.makedirs(parent, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{name}.", dir=parent) as temporary:
        new, old = os.path.join(temporary, "new"), os.path.join(temporary, "old")
        model.save_pretrained(new, state_dict=state_dict)
        tokenizer.save_pretrained(new)
        try:
            if replace and os.path.isdir(folder):
                os.rename(folder, old)
            os.rename(new, folder)
            for name in {*os.listdir(old)} - {*os.listdir(folder)} if os.path.isdir(old) else ():
                if not name.startswith("model"):  # old weights may have been in more parts
                    os.rename(os.path.join(old, name), os.path.join(folder, name))
        except OSError:  # another process was quicker: its folder is taken
            if not os.path.isfile(os.path.join(folder, "config.json")):
                raise


def eos_ids(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """All ids that end a response: the generation config's and the tokenizer's."""
    named = model.generation_config.eos_token_id
    named = [*(named if isinstance(named, list) else [named]), tokenizer.eos_token_id]
    return sorted({i for i in named if i is not None})


# ---- demo ----------------------------------------------------------------------------------------

def _demonstrate(prompts: list[list[int]], generator: torch.Generator) -> tuple[Tensor, ...]:
    """A sampler without a model: replies of a policy that slips with probability 0.2 at the hard
    mark and is sure of everything else, with their log-probs."""
    tokenizer, rng = task_tokenizer(), random.Random(generator.initial_seed())
    ids, logp = [], []
    for text in tokenizer.batch_decode(prompts):
        reply = demonstration(text[-6:], 0.2, rng)
        values, hard = [text[-1], *reply[1::2]], text[-4] == HARD  # a slip repeats the value before
        p = [(0.2 if a == b else 0.8) if hard else 1.0 for a, b in pairwise(values)]
        logp.append([x for q in p for x in (0.0, math.log(q))] + [0.0])
        ids.append(tokenizer(reply).input_ids)
    return pad_responses(prompts, ids, logp, tokenizer.pad_token_id)


def _demo(seed: int) -> None:
    """One row of a Batch as a table: where the state of each response token stands."""
    tokenizer, texts = task_tokenizer(), ["+7!d=3", "Now: +2@f=4"]
    batch = collect(
        _demonstrate, tokenizer, [encode_prompt(tokenizer, Problem(text, "")) for text in texts],
        ["d1", "f6"], torch.arange(2), chain_reward, eos_id=[tokenizer.eos_token_id],
        generator=torch.Generator().manual_seed(seed))
    T, n = batch.mask.shape[1], int(batch.mask[0].sum())
    P = batch.tokens.shape[1] - T
    print(f"{texts[0]} means: add 7 modulo 10 four times, from 3. Right is a0b7c4d1$. At the hard "
          "mark !\nthe policy slips with probability 0.2: it writes the value before once more. "
          f"Row 0 of a batch,\nP = {P}, T = {T}:\n\n"
          "column  token  attention  its hidden state is    t  mask  log μ(a_t|s_t)   R")
    for c, (i, real) in enumerate(zip(batch.tokens[0], batch.attention[0])):
        t, token = c - P, repr(tokenizer.decode([int(i)]))[1:-1] if real else "·"
        state = f"s_{t + 1}, before token {t + 1}" if -1 <= t < n - 1 else ""
        reward = f"{batch.reward[0]:+4.0f}" if t == n - 1 else ""
        trained = f"{t:4}{int(batch.mask[0, t]):6}{batch.logp_roll[0, t]:16.3f}" if t >= 0 else ""
        print(f"{c:6}{token:>7}{int(real):11}  {state:21}{trained}{reward}".rstrip())
    print("\nThe state before token t stands one column to the left of token t. Therefore\n"
          f"response(x, T) = x[:, -T-1:-1] takes columns {P - 1} to {P + T - 2}; s_0 = prompt.\n"
          "R goes to the last trained token. Padding (·) is neither attended nor trained.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="a response, token by token, and its states")
    parser.add_argument("--seed", type=int, default=1)
    seed = parser.parse_args().seed
    if not 0 <= seed < 2**63:
        raise SystemExit(f"error: --seed: expected 0 … 2^63 − 1, found {seed}")
    _demo(seed)
