"""Rollout: prompts in; sampled responses, the sampler's own log-probs and rewards out.

    a_t ~ μ(·|s_t) = softmax(z_t / τ)            log μ(a_t|s_t) over the full vocabulary
    R = +1 if the verifier accepts the response, −1 otherwise; cut at the length limit: −1

S3AC §3.1 (binary reward on the last token), §3.2 (why log μ is kept: IcePoP and MIS compare it
with the trainer's log π_old). Shapes, for B prompts, the longest prompt P and longest response T:

    tokens    [B, P+T]  prompt left-padded to P ‖ response right-padded to T
    attention [B, P+T]  True on real tokens; position ids are counted from it
    mask      [B, T]    True on sampled tokens, the end-of-sequence token included, nothing after it

    state s_t   = prompt + response[:t]                 the hidden state *before* response token t
    response(x) = x[:, −T−1:−1]                         the one place where the shift by one happens

Masks come from positions, never from `ids == pad`: pad == eos is normal. Four parts: the batch,
the samplers (`generate`, or another engine with its arguments), problems and verifiers, the
embedded task. Left out: servers of their own, sampling while training.

    python rollout.py              one batch of the embedded task, token by token
    python rollout.py --bench      tokens per second against transformers' own model.generate
    python rollout.py --bench --model DIR
"""

import argparse
import functools
import inspect
import json
import logging
import os
import random
import re
import select
import string
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from fractions import Fraction
from itertools import accumulate

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.cache_utils import DynamicCache
from transformers.generation.configuration_utils import ContinuousBatchingConfig, GenerationConfig

# --------------------------------------------------------------------------------------- batch


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
    advantage: Tensor | None = None  # [B, T] Â_t
    keep: Tensor | None = None  # [B, T] bool: mask ∧ IcePoP ∧ MIS


def positions(attention: Tensor) -> Tensor:
    """Position ids [B, S]: the first real token of each row is 0, wherever it stands."""
    return (attention.long().cumsum(-1) - 1).clamp_min(0)


def response(x: Tensor, T: int) -> Tensor:
    """From x [B, S, …] of every position to [B, T, …] of the states before each response token."""
    return x[:, -T - 1 : -1]


WIDE = ("tokens", "attention", "routing")  # the fields of P+T columns; others have T or none


def take(batch: Batch, rows: Tensor) -> Batch:
    """The given rows (indices, or bool [B]), cut to their own longest prompt and response."""
    S, T = batch.tokens.shape[1], batch.mask.shape[1]
    real = batch.attention[rows].any(0)
    first = int(real.int().argmax())  # columns before it are padding in every row taken
    width = int(real[-T:].sum()) if T else 0
    picked = {}
    for name, x in _present(batch).items():
        x = x[rows]
        if name in WIDE:
            x = x[:, first : S - T + width]
        elif x.ndim > 1:
            x = x[:, :width]
        picked[name] = x
    return Batch(**picked)


def concatenate(batches: list[Batch]) -> Batch:
    """One batch of several: prompts padded on the left, responses on the right. [ΣB, …]"""
    T = max(b.mask.shape[1] for b in batches)
    P = max(b.tokens.shape[1] - b.mask.shape[1] for b in batches)
    joined = {}
    for name, x in _present(batches[0]).items():
        rows = [getattr(b, name) for b in batches]
        if x.ndim > 1:
            pads = [(P - b.tokens.shape[1] + b.mask.shape[1] if name in WIDE else 0,
                     T - b.mask.shape[1]) for b in batches]
            fill = -1 if name == "routing" else 0
            rows = [nn.functional.pad(x, (0, 0) * (x.ndim - 2) + pad, value=fill)
                    for x, pad in zip(rows, pads)]
        joined[name] = torch.cat(rows)
    return Batch(**joined)


def _present(batch: Batch) -> dict[str, Tensor]:
    """The fields that are filled, by name."""
    found = {field.name: getattr(batch, field.name) for field in fields(Batch)}
    return {name: x for name, x in found.items() if x is not None}


def length_groups(
    prompt: list[int], answer: list[int], token_budget: int, size: int = 1
) -> list[list[int]]:
    """Row numbers in groups of similar length: (P + T) × rows ≤ token_budget for each of `size`
    ranks. Each takes every size-th row of every group, so that all run as many passes.

    prompt and answer are lengths [B]; a single row per rank may be over the budget. A group also
    ends where padding would be over 15 % of it, unless it is a trifle. Longest first, so that a
    lack of memory shows in the first pass and not after an hour.
    """
    order = sorted(range(len(prompt)), key=lambda i: -(prompt[i] + answer[i]))
    groups, group, P, T, real = [], [], 0, 0, 0
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        longest_p, longest_t = (max(x[i] for i in rows) for x in (prompt, answer))
        tokens = sum(prompt[i] + answer[i] for i in rows)
        padded = (max(P, longest_p) + max(T, longest_t)) * (len(group) + len(rows))
        wasteful = padded - real - tokens > max(0.15 * padded, token_budget * size / 16)
        if group and (padded > token_budget * size or wasteful):
            groups.append(group)
            group, P, T, real = [], 0, 0, 0
        group, real = group + rows, real + tokens
        P, T = max(P, longest_p), max(T, longest_t)
    return [*groups, group] if group else groups


# ------------------------------------------------------------------------------------- sampler


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    eos_id: int | list[int],
    pad_id: int,
    generator: torch.Generator | None = None,
    max_rows: int = 256,
    routing: "Routing | None" = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Samples one response to each prompt (lists of token ids, none empty), rows in their order.

    At most max_rows responses are under way at once. When an eighth of them has ended, their rows
    leave the batch and the cache, and waiting prompts take the places; a beginning that many share
    is computed once (`prefill`). Temperature 0 is greedy decoding, scored at temperature 1.
    `routing` notes the experts that each token goes to.

    Returns tokens [B, P+T] long, attention [B, P+T] bool, mask [B, T] bool, logp_roll [B, T]
    float32 over the full vocabulary at this temperature, 0 where mask is False. T is the longest
    response sampled. A response cut at max_new_tokens keeps its last token.
    """
    _check_generate(prompts, max_new_tokens, temperature, max_rows)
    device, B = next(model.parameters()).device, len(prompts)
    eos = torch.tensor(eos_id, device=device).reshape(-1)
    out = torch.full((B, max_new_tokens), pad_id, device=device)
    logp_roll = torch.zeros(B, max_new_tokens, device=device)
    length = torch.zeros(B, dtype=torch.long, device=device)
    live, waiting = _Live(model, pad_id, device, routing), list(range(B))
    if routing:
        routing.start(B, max(map(len, prompts)) + max_new_tokens)
    bar = tqdm(total=B, desc="responses", delay=5, leave=False,
               disable=os.getenv("RANK", "0") != "0")
    while True:
        bar.update(live.drop_ended())
        free = max_rows - len(live.row)
        if waiting and free >= max(1, max_rows // 8):
            slots, logits = live.admit(waiting[:free], [prompts[i] for i in waiting[:free]])
            waiting = waiting[free:]
        elif len(live.row):
            slots, logits = live.step()
        else:
            break
        token, logp = _sample(logits, temperature, generator)
        row = live.row[slots]
        out[row, length[row]], logp_roll[row, length[row]] = token, logp
        length[row] += 1
        live.last[slots] = token
        live.ended[slots] = torch.isin(token, eos) | (length[row] == max_new_tokens)
    bar.close()
    T = int(length.max())
    mask = torch.arange(T, device=device) < length[:, None]
    tokens, attention = left_pad(prompts, pad_id, device)
    return (
        torch.cat([tokens, out[:, :T]], 1), torch.cat([attention, mask], 1), mask, logp_roll[:, :T]
    )


def _sample(logits: Tensor, temperature: float, generator) -> tuple[Tensor, Tensor]:
    """logits [R, V] -> token [R] and its log-prob [R] in float32."""
    logp = torch.log_softmax(logits.float() / (temperature or 1.0), -1)
    if temperature == 0:
        token = logp.argmax(-1, keepdim=True)
    else:
        token = torch.multinomial(logp.exp(), 1, generator=generator)
    return token[:, 0], logp.gather(-1, token)[:, 0]


class _Live:
    """The R rows under way: row (the number of its prompt), last token and ended, [R] each,
    attention [R, W] and the KV cache. Rows are right-aligned, so that one column is `now` for all;
    positions come from the attention mask."""

    def __init__(self, model: nn.Module, pad_id: int, device: torch.device, routing=None):
        self.model, self.pad_id, self.device, self.routing = model, pad_id, device, routing
        self.row = torch.empty(0, dtype=torch.long, device=device)
        self.last, self.ended = self.row, self.row.bool()
        self.attention = torch.empty(0, 0, dtype=torch.bool, device=device)
        self.cache = DynamicCache()
        named = inspect.signature(model.forward).parameters  # renamed within transformers 5
        self.cache_name = "cache" if "cache" in named else "past_key_values"

    def forward(
        self, row: Tensor, tokens: Tensor, attention: Tensor, cache: DynamicCache
    ) -> Tensor:
        """tokens [n, m] at the end of attention [n, W] -> logits [n, V] after the last of them."""
        m = tokens.shape[1]
        where = positions(attention)[:, -m:]
        out = self.model(
            input_ids=tokens, attention_mask=attention.long(), use_cache=True, logits_to_keep=1,
            position_ids=where, **{self.cache_name: cache},
        )
        if self.routing:
            self.routing.note(row, where, attention[:, -m:])
        return out.logits[:, -1]

    def admit(self, numbers: list[int], prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Prefills n prompts and joins them to the rows under way -> their slots [n], logits."""
        R, n, row = len(self.row), len(prompts), torch.tensor(numbers, device=self.device)
        logits, attention, cache = self.prefill(row, prompts)
        if R:
            attention = _stack(self.cache, self.attention, cache, attention)
        self.cache, self.attention = cache, attention
        self.row, self.last = torch.cat([self.row, row]), torch.cat([self.last, row])
        self.ended = torch.cat([self.ended, torch.zeros_like(row, dtype=torch.bool)])
        return torch.arange(R, R + n, device=self.device), logits

    def prefill(self, row: Tensor, prompts: list[list[int]]) -> tuple[Tensor, Tensor, DynamicCache]:
        """Logits [n, V] after n prompts, their attention [n, W] and cache.

        Where that saves half of the tokens or more, a prompt copies the keys and values of its
        beginning from one that begins alike: K rollouts of a prompt, a critic's states of a text.
        """
        source, lengths = begins_alike(prompts), [len(prompt) for prompt in prompts]
        own = [i for i, j in enumerate(source) if i == j]
        rest = [i for i, j in enumerate(source) if i != j]
        if self.routing or 2 * sum(lengths[i] - TAIL for i in rest) < sum(lengths):
            tokens, attention = left_pad(prompts, self.pad_id, self.device)
            cache = DynamicCache()
            return self.forward(row, tokens, attention, cache), attention, cache
        logits, attention, cache = self.prefill(row[own], [prompts[i] for i in own])
        copied = torch.tensor([lengths[i] - TAIL for i in rest], device=self.device)[:, None]
        at = torch.tensor([own.index(source[i]) for i in rest], device=self.device)
        first = (~attention).sum(1, keepdim=True)[at]  # column of its first token
        C = int(copied.max())
        columns = torch.arange(C, device=self.device) - C + copied + first  # right-aligned
        tails = DynamicCache()
        for i, layer in enumerate(cache.layers):
            tails.update(*(x[at].take_along_dim(columns.clamp_min(0)[:, None, :, None], 2)
                           for x in (layer.keys, layer.values)), i)
        new = torch.tensor([prompts[i][-TAIL:] for i in rest], device=self.device)
        seen = torch.cat([columns >= first, torch.ones_like(new, dtype=torch.bool)], 1)
        logits = torch.cat([logits, self.forward(row[rest], new, seen, tails)])
        attention = _stack(cache, attention, tails, seen)
        order = torch.tensor(own + rest, device=self.device).argsort()
        for layer in tails.layers:
            layer.keys, layer.values = layer.keys[order], layer.values[order]
        return logits[order], attention[order], tails

    def step(self) -> tuple[Tensor, Tensor]:
        """Feeds the last tokens -> slots [n] of the rows that go on, logits [n, V]."""
        self.attention = torch.cat([self.attention, ~self.ended[:, None]], 1)
        logits = self.forward(self.row, self.last[:, None], self.attention, self.cache)
        slots = (~self.ended).nonzero()[:, 0]
        return slots, logits[slots]

    def drop_ended(self) -> int:
        """Drops rows that ended, once they are an eighth or all, and columns nobody needs now.
        Returns how many."""
        ended = int(self.ended.sum())
        if ended < len(self.row) and ended < max(1, len(self.row) // 8) or not ended:
            return 0
        rows = (~self.ended).nonzero()[:, 0]
        self.row, self.last, self.ended = self.row[rows], self.last[rows], self.ended[rows]
        attention = self.attention[rows]
        first = int(attention.any(0).int().argmax()) if len(rows) else attention.shape[1]
        self.attention = attention[:, first:]
        for layer in self.cache.layers:
            layer.keys = layer.keys[rows, :, first:]
            layer.values = layer.values[rows, :, first:]
        return ended


TAIL = 32  # tokens of a prompt that are fed anew where its beginning is copied


def begins_alike(prompts: list[list[int]]) -> list[int]:
    """For each prompt one, as long or longer, that begins with all of it but its last TAIL tokens;
    itself if there is none. None of those named names another."""
    seen, source = {}, list(range(len(prompts)))  # seen: hash of a beginning -> whose it is
    for i in sorted(source, key=lambda i: -len(prompts[i])):
        at = list(accumulate(prompts[i], lambda h, token: hash((h, token)), initial=0))
        n = len(prompts[i]) - TAIL
        j = seen.get(at[n]) if n > 0 else None
        if j is not None and prompts[j][:n] == prompts[i][:n]:
            source[i] = j
        else:
            seen |= dict.fromkeys(at, i)
    return source


def _stack(above: DynamicCache, attention: Tensor, cache: DynamicCache, own: Tensor) -> Tensor:
    """Puts the rows of a cache and its attention above another's, right-aligned; in place."""
    W = max(attention.shape[1], own.shape[1])
    for old, new in zip(above.layers, cache.layers):
        new.keys = torch.cat([_widen(old.keys, W, -2), _widen(new.keys, W, -2)])
        new.values = torch.cat([_widen(old.values, W, -2), _widen(new.values, W, -2)])
    return torch.cat([_widen(attention, W, 1), _widen(own, W, 1)])


def _widen(x: Tensor, W: int, dim: int) -> Tensor:
    """Zeros on the left of one dimension, up to width W."""
    shape = list(x.shape)
    shape[dim] = W - shape[dim]
    return torch.cat([x.new_zeros(shape), x], dim) if shape[dim] else x


def left_pad(
    rows: list[list[int]], pad_id: int, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Lists of ids -> tokens [B, P] and attention [B, P]."""
    P = max(map(len, rows))
    tokens = torch.tensor([[pad_id] * (P - len(row)) + list(row) for row in rows], device=device)
    real = P - torch.tensor([len(row) for row in rows], device=device)
    return tokens, torch.arange(P, device=device) >= real[:, None]


def _check_generate(prompts, max_new_tokens, temperature, max_rows) -> None:
    empty = [i for i, prompt in enumerate(prompts) if len(prompt) == 0]
    if not len(prompts) or empty:
        found = f"an empty prompt at {empty[0]}" if empty else "no prompt"
        raise ValueError(f"prompts: expected lists of token ids, none empty; found {found}")
    if max_new_tokens < 1 or max_rows < 1:
        raise ValueError(
            f"max_new_tokens and max_rows: expected 1 or more, found {max_new_tokens}, {max_rows}"
        )
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature: expected 0 (greedy) or more, found {temperature}")


class Routing:
    """R3 (Ma et al. 2025, 2510.11370): the expert choices of a mixture-of-experts model, noted
    while it samples and replayed in the trainer's forward pass. Gate weights are computed anew from
    the trainer's router, so its gradient is kept. Without R3 a token near a tie goes to other
    experts in the trainer than in the sampler, and ρ jumps.

    For routers that return (logits, scores, indices) with scores = softmax(logits) of the chosen,
    made to sum to one or not: Qwen3-MoE, Mixtral and their like in transformers.
    """

    def __init__(self, model: nn.Module) -> None:
        self.routers = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
        if not self.routers:
            raise ValueError("--router-replay: expected a model with top-k routers, found none in "
                             f"{type(model).__name__}")
        self.seen, self.replay = [], None
        for layer, router in enumerate(self.routers):
            router.register_forward_hook(lambda *call, layer=layer: self._hook(layer, *call))

    def start(self, rows: int, width: int) -> None:
        """Room for the choices of new rows: choice [rows, width, L, k] by position, −1: unknown."""
        shape = rows, width, len(self.routers), self.routers[0].top_k
        self.choice = torch.full(shape, -1, dtype=torch.int16, device=self.routers[0].weight.device)
        self.seen = []

    def note(self, row: Tensor, position: Tensor, real: Tensor) -> None:
        """The choices of the forward pass just done: row [n], position and real [n, m]."""
        n, m = position.shape
        choice = torch.stack(self.seen).view(len(self.routers), n, m, -1).permute(1, 2, 0, 3)
        self.choice[row[:, None].expand(n, m)[real], position[real]] = choice[real].to(torch.int16)
        self.seen = []

    def columns(self, attention: Tensor) -> Tensor:
        """The noted choices in the columns of attention [B, S] -> [B, S, L, k]."""
        rows = torch.arange(len(attention), device=attention.device)[:, None]
        return torch.where(attention[..., None, None], self.choice[rows, positions(attention)], -1)

    def _hook(self, layer: int, router: nn.Module, inputs: tuple, output: tuple) -> tuple | None:
        logits, scores, own = output
        if self.replay is None:
            self.seen.append(own)
            return None
        noted = self.replay[:, :, layer].flatten(0, 1).long()
        index = torch.where(noted >= 0, noted, own)  # the last token never went through the sampler
        score = logits.float().softmax(-1).gather(-1, index)
        if getattr(router, "norm_topk_prob", True):
            score = score / score.sum(-1, keepdim=True)
        return logits, score.to(scores.dtype), index


def generate_batch(
    model: nn.Module,
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    eos_id: int | list[int],
    pad_id: int,
    generator: torch.Generator | None = None,
    max_rows: int = 256,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same as `generate` by transformers' continuous batching: a paged cache, prompts and
    responses in one pass. For GPUs where `generate` is the bottleneck.

    RuntimeError if a request fails.
    """
    _check_generate(prompts, max_new_tokens, temperature, max_rows)
    device, pages = next(model.parameters()).device, 256  # the default size of a page
    sampling = GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=temperature > 0, temperature=temperature or 1.0,
        top_k=0, top_p=1.0, eos_token_id=eos_id, pad_token_id=pad_id)
    width = max(map(len, prompts)) + max_new_tokens
    # a GPU's memory is measured and filled; of a CPU's no more than the rows need is taken
    room = {} if device.type == "cuda" else {
        "num_blocks": max_rows * (width // pages + 1), "max_batch_tokens": max(width, 1024)}
    seed = generator and int(torch.randint(2**31, (), generator=generator, device=generator.device))
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    paging = ContinuousBatchingConfig(
        return_logprobs=True, max_requests_per_batch=max_rows, seed=seed, **room)
    try:
        done = model.generate_batch(
            prompts, generation_config=sampling, continuous_batching_config=paging)
    except MemoryError as error:  # older versions see no memory on a CPU without psutil
        raise RuntimeError(f"generate_batch: {error}; on a CPU a newer transformers, or the "
                           "package psutil, may help") from None
    replies = sorted(done.values(), key=lambda reply: int(reply.request_id.rpartition("_")[2]))
    failed = [reply.error for reply in replies if reply.error or not reply.generated_tokens]
    if failed or len(replies) < len(prompts):
        raise RuntimeError(f"generate_batch: expected {len(prompts)} responses, found "
                           f"{len(replies) - len(failed)}; {failed[:1]}")
    ids = [list(reply.generated_tokens) for reply in replies]
    logp = [list(reply.logprobs[: len(x)]) for reply, x in zip(replies, ids)]
    return pad_responses(prompts, ids, logp, pad_id, device)


def pad_responses(
    prompts: list[list[int]], ids: list[list[int]], logp: list[list[float]], pad_id: int,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Another engine's replies as the four tensors of `generate`: ids and log-probs of each
    response, its end-of-sequence token included."""
    length = torch.tensor([len(x) for x in ids])
    mask = torch.arange(int(length.max())) < length[:, None]
    out, logp_roll = torch.full(mask.shape, pad_id), torch.zeros(mask.shape)
    out[mask] = torch.tensor([token for x in ids for token in x])
    logp_roll[mask] = torch.tensor([number for x in logp for number in x])
    tokens, attention = left_pad(prompts, pad_id, "cpu")
    whole = torch.cat([tokens, out], 1), torch.cat([attention, mask], 1), mask, logp_roll
    return tuple(x.to(device) for x in whole)


SAMPLERS = {"generate": generate, "generate_batch": generate_batch}


def collect(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[list[int]],
    answers: list[str],
    prompt_id: Tensor,
    verifier: Callable[[str, str], float],
    *,
    eos_id: list[int],
    max_new_tokens: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
    max_rows: int = 256,
    sampler: Callable = generate,
    routing: Routing | None = None,
) -> Batch:
    """Samples a response to each prompt (token ids, length B) and verifies it -> Batch.

    prompt_id [B] long. The verifier gets text and answer, without the special tokens, and returns
    ±1. A response without an end-of-sequence token is a failure, whatever it says.
    """
    tokens, attention, mask, logp_roll = sampler(
        model, prompts, max_new_tokens=max_new_tokens, temperature=temperature, eos_id=eos_id,
        pad_id=tokenizer.pad_token_id, generator=generator, max_rows=max_rows,
        **({"routing": routing} if routing else {}),
    )
    T = mask.shape[1]
    last = tokens[:, -T:].gather(1, mask.sum(1, keepdim=True) - 1)[:, 0]
    truncated = ~torch.isin(last, torch.tensor(eos_id, device=last.device))
    texts = decode(tokenizer, tokens[:, -T:], mask)
    reward = torch.tensor([verifier(text, answer) for text, answer in zip(texts, answers)])
    reward = reward.to(tokens.device)
    # assumption: a truncated response is a failure (R = −1), not a state to bootstrap from
    reward = torch.where(truncated, -1.0, reward)
    return Batch(tokens, attention, mask, prompt_id.to(tokens.device), reward, truncated, logp_roll,
                 routing.columns(attention) if routing else None)


def decode(tokenizer: PreTrainedTokenizerBase, tokens: Tensor, mask: Tensor) -> list[str]:
    """Text of each row of tokens [B, T] where mask [B, T] is True, without special tokens."""
    rows = [row[kept].tolist() for row, kept in zip(tokens.cpu(), mask.cpu())]
    return tokenizer.batch_decode(rows, skip_special_tokens=True)

# ------------------------------------------------------------------------------------ problems

PROMPT_KEYS = ("prompt", "problem", "question")
ANSWER_KEYS = ("reward_model.ground_truth", "answer", "solution")


@dataclass(frozen=True)
class Problem:
    """prompt: text, or chat messages (role, content) of which the last is the user's."""

    prompt: str | list[dict]
    answer: str
    level: str = ""


def load_problems(path: str) -> list[Problem]:
    """Reads JSONL as GSM8K, MATH, AIME, DAPO-Math and verl write it; blank lines are skipped.

    The first key present counts: prompt | problem | question, and reward_model.ground_truth |
    answer | solution. Of an answer: its last box, else what follows '####' (GSM8K), else all of
    it; of a solution: its last box. ValueError with the number of the line that does not fit.
    """
    problems = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                if text := line.decode("utf-8-sig").strip():
                    row = _read_row(text)
                    level = row.get("level", row.get("difficulty", ""))
                    problems.append(Problem(_read_prompt(row), _read_answer(row), str(level)))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    if not problems:
        raise ValueError(f"{path}: expected one JSON object per line, found no line with one")
    return problems


def _read_row(text: str) -> dict:
    if text.startswith("["):
        raise ValueError("expected JSONL, one JSON object per line, found a JSON list")
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", error)
        raise ValueError(f"expected a JSON object, found broken JSON ({reason})") from None
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, found {text:.40}")
    nested = row["reward_model"] if isinstance(row.get("reward_model"), dict) else {}
    return row | {f"reward_model.{key}": value for key, value in nested.items()}


def _first_present(row: dict, keys: tuple[str, ...]) -> tuple[str, object]:
    for key in keys:
        if row.get(key) is not None:
            return key, row[key]
    found = ", ".join(row) or "none"
    raise ValueError(f"expected one of the keys {', '.join(keys)}; found {found}")


def _read_prompt(row: dict) -> str | list[dict]:
    key, prompt = _first_present(row, PROMPT_KEYS)
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    texts = [m.get(field) for m in messages if isinstance(m, dict) for field in ("role", "content")]
    complete = len(texts) == 2 * len(messages) and all(isinstance(text, str) for text in texts)
    if not complete or texts[-2:-1] != ["user"] or not texts[-1].strip():
        raise ValueError(
            f"{key}: expected a text, or chat messages (role, content) that end with the user's, "
            f"not empty; found {prompt!r:.40}"
        )
    return prompt


def _read_answer(row: dict) -> str:
    key, answer = _first_present(row, ANSWER_KEYS)
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
        raise ValueError(f"{key}: expected a text or a number, found {str(answer):.40}")
    boxed = extract_boxed(str(answer))
    if key == "solution" and boxed is None:
        raise ValueError(r"solution: expected a closed \boxed{…} in it, found none")
    answer = str(answer).rpartition("####")[2].strip() if boxed is None else boxed
    if not canonical(answer):
        raise ValueError(f"{key}: expected an answer, found {answer!r}")
    return answer


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, problem: Problem, *, instruction: str = ""
) -> list[int]:
    r"""Token ids by the chat template, up to where the reply starts; without one, of plain text.

    instruction is added to the user's last message on a line of its own, for example
    "Please reason step by step, and put your final answer within \boxed{}."
    """
    chat = problem.prompt
    if isinstance(chat, str):
        chat = [{"role": "user", "content": chat}]
    if instruction:
        chat = [*chat[:-1], {"role": "user", "content": chat[-1]["content"] + "\n" + instruction}]
    if tokenizer.chat_template:
        return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    return tokenizer("\n\n".join(message["content"] for message in chat)).input_ids


# ----------------------------------------------------------------------------------- verifiers
# What the model wrote is hostile: nothing in it is evaluated, only short answers are taken apart,
# and no signal is used, so that a worker thread comes to the same verdict.

MAX_CHARS = 500  # a longer answer is compared letter by letter
BOX_OR_BRACE = re.compile(r"\\(?:boxed|fbox)(?:\s*\{|\s+(-?\d[\d.,/]*))|\\.|[{}]", re.S | re.A)


def extract_boxed(text: str) -> str | None:
    r"""Content of the last \boxed{…} or \fbox{…} that is closed (or `\boxed 5`), None without one.

    Braces nest, \{ and \} are no braces, and of two boxes in each other the inner one is the last.
    """
    starts, last = [], (-1, -1)  # per open brace: where the content of its box starts, or −1
    for token in BOX_OR_BRACE.finditer(text):
        if token[1]:
            last = token.span(1)
        elif token[0] == "}" and starts:
            last = max(last, (starts.pop(), token.start()))
        elif token[0][-1] == "{" and token[0] != r"\{":
            starts.append(token.end() if token[0] != "{" else -1)
    return text[slice(*last)].strip() if last[0] >= 0 else None


TEXT = r"\\(?:text(?:rm|bf|it|normal)?|math(?:rm|bf|it|sf)|mbox|operatorname)\s*\{"
UNIT = (
    r"\s*(?:degrees?|percent|dollars?|cents?|(?:square |cubic )?(?:units?|[ckm]m|inch(?:es)?|feet|"
    r"miles?|(?:kilo|centi)?meters?)|(?:second|minute|hour|day|week|month|year)s?)"
)
RESPELL = [(re.compile(old, re.ASCII), new) for old, new in (
    (r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])\.?", ""),  # \left( -> (
    (r"(?<!\\)\\[,;:! ()\[\]]|~|\\q?quad(?![a-z])|\\displaystyle", ""),  # spaces, \( and \)
    (r"\\?[$%]|\^\\circ|\^\{\\circ\}|\\degree|°", ""),
    (r"[−–]", "-"),
    (r"\\(?:cdot|times)(?![a-z])|×|·", "*"),
    (r"\\([lgn]e)q(?![a-z])", r"\\\1"),  # \leq -> \le
    (rf",?\s*{TEXT}\s*(?:and|or)\s*\}}|,?\s+(?:and|or)\s+", ", "),  # 1 or 2 -> 1, 2
    (rf"(?<=[\d}}i])\s*{TEXT}(?!\s*[ap]\.?m)[^{{}}]*\}}(?:\^\{{?\d\}}?)?$", ""),  # 5\text{ m} -> 5
    (rf"(?<=\d){UNIT}(?:\^\{{?\d\}}?)?$", ""),  # 5 dollars -> 5
    (rf"{TEXT}([^{{}}]*)\}}", r"\1"),  # \text{even} -> even
    (r"\{,\}", ""),  # 1{,}000 -> 1000
    (r"(?:(?<=[1-9])|(?<=\d\d)),(?=\d{3}(?:,\d{3})*(?![\d,])[^()\[\]{}]*$)", ""),  # 1,000 -> 1000
    (r"^\\?[A-Za-z](?:_\w|\([a-z]\))?\s*(?:=|\\in(?![a-z]))", ""),  # x = 5 -> 5
    (r"\\[dtc]frac", r"\\frac"),
    (r"\\(frac|sqrt)\s*(\\pi|[\da-zA-Z])", r"\\\1{\2}"),  # \sqrt2 -> \sqrt{2}
    (r"(\\frac\{(?:[^{}]|\{[^{}]*\})*\})\s*(\\pi|[\da-zA-Z])", r"\1{\2}"),  # \frac{1}2
    (r"\\frac\{-([^-+]*)$", r"-\\frac{\1"),  # \frac{-1}{2} -> -\frac{1}{2}
    (r"^([-+]?\d+)\s+(\d+)/(\d+)$", r"\1\\frac{\2}{\3}"),  # 1 1/2 -> 1\frac{1}{2}
    (r"^([-+]?)([^-+/,()\s]+)/(\d+|[a-zA-Z]|\\[a-z]+)$", r"\1\\frac{\2}{\3}"),  # x/2
    (r"([\^_])\{(\w)\}", r"\1\2"),  # x^{2} -> x^2
    (r"^\(([A-Z])\)$", r"\1"),  # choice (C) -> C
    (r"^(?:--|\+|\s)+|[.\s\\]+$", ""),
    (r"\s*,\s*", ", "),
    (r"(?<!,)\s+", ""),
)]


def canonical(text: str, depth: int = 3) -> str:
    r"""One spelling for answers that mean the same, down to depth brackets; idempotent.

    Numbers become exact fractions (.5, 50/100, \frac12 -> 1/2). Tuples and intervals keep brackets
    and order, lists and \{sets\} become their sorted elements, a \pm b the list a+b, a-b.
    """
    if len(text) > MAX_CHARS:
        return text
    for _ in range(MAX_CHARS):  # to a fixed point: what one rule removes may set off another
        before = text
        for old, new in RESPELL:
            text = old.sub(new, text)
        if text == before:
            break
    bracket = re.fullmatch(r"(\(|\[|\\\{)(.*)(\)|\]|\\\})", text, re.S)
    elements = _split_at_commas(bracket[2]) if bracket else []
    if len(elements) < 2:  # no tuple: a list or a single answer
        bracket, elements = None, _split_at_commas(text)
        if r"\pm" in text:
            elements = [e.replace(r"\pm", sign) for e in elements for sign in "+-"]
    if len(elements) < 2 or depth == 0:
        return _exact_number(text) or text
    elements = [canonical(element, depth - 1) for element in elements]
    if bracket and bracket[1] != r"\{":
        return bracket[1] + ", ".join(elements) + bracket[3]
    return ", ".join(sorted(elements))


def _split_at_commas(text: str) -> list[str]:
    """'a, (b, c)' -> ['a', ' (b, c)']; nothing where brackets do not match (save [a, b))."""
    parts, opened = [""], []
    for char in text:
        if char in "([{":
            opened.append(char)
        elif char in ")]}" and (not opened or (opened.pop() == "{") != (char == "}")):
            return []
        if char == "," and not opened:
            parts.append("")
        else:
            parts[-1] += char
    return [] if opened else parts


NUMERAL = r"\d+\.?\d*|\.\d+"
NUMBER = re.compile(  # a decimal, or a \frac with or without a whole number before it
    rf"(-?)(?:({NUMERAL})|(\d*)\\frac\{{(-?(?:{NUMERAL}))\}}\{{(-?(?:{NUMERAL}))\}})", re.ASCII
)


def _exact_number(text: str) -> str | None:
    r"""'-0.5' -> '-1/2', '1\frac{1}{2}' -> '3/2'; None where the text is no number."""
    match = NUMBER.fullmatch(text)
    if not match or (match[5] and Fraction(match[5]) == 0):
        return None
    sign, decimal, whole, p, q = match.groups()
    value = Fraction(decimal) if decimal else Fraction(whole or 0) + Fraction(p) / Fraction(q)
    return str(-value if sign else value)


def math_reward(text: str, answer: str) -> float:
    """+1.0 if the last box of the text means the same as the answer, else −1.0. Never raises."""
    boxed = extract_boxed(text)
    return 1.0 if boxed and canonical(boxed) == canonical(answer) else -1.0


NUMBER_IN_TEXT = re.compile(
    r"(?:(?<![\w)}])[-−])?\\?\$?(?:\\[dtc]?frac\{\d+\}\{\d+\}|"
    r"(?:\d{1,3}(?:(?:,|\{,\})\d{3})+(?!\d)|\d*\.?\d+)(?:\.\d+)?(?:/\d+)?)", re.ASCII
)


def number_reward(text: str, answer: str) -> float:
    """+1.0 if the last number of the text is the answer, else −1.0: for models without boxes."""
    numbers = NUMBER_IN_TEXT.findall(text)
    return 1.0 if numbers and canonical(numbers[-1]) == canonical(answer) else -1.0


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
    """math-verify in a process of its own: that can be stopped when it hangs, a thread cannot."""
    process = subprocess.Popen(
        [sys.executable, "-c", MATH_VERIFY], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )
    if process.stdout.readline() != "ready\n":
        raise ImportError("math_verify needs a package: pip install 'math-verify[antlr4_13_2]'")
    return process


def math_verify_reward(text: str, answer: str) -> float:
    """As math_reward, and where that says no, the package math-verify is asked about the same box.

    ImportError if it is missing, whatever the text. An answer that takes it too long is wrong.
    """
    with MATH_VERIFY_LOCK:
        process = _math_verify_process()
        boxed = extract_boxed(text)
        if not boxed or len(boxed) > MAX_CHARS or math_reward(text, answer) > 0:
            return math_reward(text, answer)
        print(json.dumps([answer, boxed]), file=process.stdin, flush=True)
        answered, _, _ = select.select([process.stdout], [], [], MATH_VERIFY_SECONDS)
        reply = process.stdout.readline() if answered else ""
        if not reply:  # it hangs or died: the next question gets a new process
            process.kill()
            process.wait()
            _math_verify_process.cache_clear()
        return 1.0 if reply == "True\n" else -1.0



# ------------------------------------------------------------------------------- embedded task
# An iterated map. Prompt `3+7@d=`: start at 3, add 7 modulo 10, up to letter d, that is 4 times.
# Response: the running values with letter counters, `a0b7c4d1$`. The number of steps is the
# difficulty, length follows it, and a wrong step can be seen in the prefix.

LETTERS = string.ascii_lowercase
CHARACTERS = string.printable[:95] + "\n"  # a token each: printable ASCII; `$` ends a text
HELD_OUT = 400


def task_problems(*, held_out: bool = False) -> list[Problem]:
    """2,200 problems for training or the 400 held out: 10 starts × 10 addends × 26 lengths.

    level is the quarter of the lengths that a problem belongs to.
    """
    problems = []
    for start in range(10):
        for addend in range(10):
            for steps, letter in enumerate(LETTERS, start=1):
                low = (steps - 1) // 7 * 7 + 1
                problems.append(Problem(
                    f"{start}+{addend}@{letter}=", f"{letter}{(start + addend * steps) % 10}",
                    f"{low:02d}-{min(low + 6, len(LETTERS)):02d} steps",
                ))
    random.Random(0).shuffle(problems)
    return problems[:HELD_OUT] if held_out else problems[HELD_OUT:]


def chain_reward(text: str, answer: str) -> float:
    """+1.0 if the text ends with the last letter and its right value, `d1`, else −1.0."""
    return 1.0 if text.endswith(answer) else -1.0


def demonstration(prompt: str, wrong: float, rng: random.Random) -> str:
    """A response in which each step is wrong with probability `wrong`; later steps go on from it.

    The errors are what leaves a base policy worth improving.
    """
    value, addend, last = int(prompt[0]), int(prompt[2]), LETTERS.index(prompt[4])
    steps = []
    for letter in LETTERS[: last + 1]:
        value = (value + addend + (rng.randrange(1, 10) if rng.random() < wrong else 0)) % 10
        steps.append(f"{letter}{value}")
    return "".join(steps) + "$"


def task_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character; `$` is end of sequence and padding alike."""
    vocabulary = {character: i for i, character in enumerate(CHARACTERS)}
    description = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
        "normalizer": None, "post_processor": None, "decoder": {"type": "Fuse"},
        "pre_tokenizer": {
            "type": "Split", "pattern": {"Regex": ""}, "behavior": "Isolated", "invert": False,
        },
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "?"},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "tokenizer.json")
        with open(path, "w") as file:
            json.dump(description, file)
        return PreTrainedTokenizerFast(
            tokenizer_file=path, eos_token="$", pad_token="$", unk_token="?"
        )


VERIFIERS = {
    "boxed": math_reward, "number": number_reward, "math_verify": math_verify_reward,
    "chain": chain_reward,
}


# ------------------------------------------------------------------------------ demo, benchmark


def _demo(seed: int) -> None:
    """A few problems, a random policy and one that knows how: what a Batch holds."""
    tokenizer, rng = task_tokenizer(), random.Random(seed)
    problems = [p for p in task_problems() if p.prompt[4] in "abcd"][:4]
    print("prompt    flawless response    with every third step wrong       verdicts")
    for p in problems:
        texts = [demonstration(p.prompt, wrong, rng)[:-1] for wrong in (0.0, 1 / 3)]
        verdicts = "  ".join(f"{chain_reward(text, p.answer):+.0f}" for text in texts)
        print(f"{p.prompt:10}{texts[0]:21}{texts[1]:34}{verdicts}")

    torch.manual_seed(seed)
    model = _bench_model(len(tokenizer))
    batch = collect(
        model, tokenizer, [encode_prompt(tokenizer, p) for p in problems],
        [p.answer for p in problems], torch.arange(4), chain_reward,
        eos_id=[tokenizer.eos_token_id, 0], max_new_tokens=12)
    print(f"\nsampled by a random policy, cut at 12 tokens: P + T = {batch.tokens.shape[1]}\n")
    print("row  tokens, · = padding      trained  log μ of the first  truncated  R")
    for i in range(4):
        text = "".join(
            tokenizer.decode([t]) if real else "·"
            for t, real in zip(batch.tokens[i].tolist(), batch.attention[i].tolist()))
        print(f"{i:3}  {text:24}{batch.mask[i].sum():8}{batch.logp_roll[i, 0]:14.3f}"
              f"{str(batch.truncated[i].item()):>16}  {batch.reward[i]:+.0f}")


def _bench_model(vocab: int, eos: int = 0) -> nn.Module:
    """A small random Llama that draws every token with the same probability: so the lengths are
    geometric, long-tailed, and the same in law for any sampler."""
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=vocab, hidden_size=64, intermediate_size=192, num_hidden_layers=4,
        num_attention_heads=4, max_position_embeddings=1024, bos_token_id=None, eos_token_id=eos,
        pad_token_id=eos)).eval()
    model.lm_head.weight.data.zero_()
    return model


def _bench(folder: str, prompts: int, limit: int, rows: int, seed: int) -> None:
    """Response tokens per second of generate and of model.generate: same model, prompts, limit."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = (AutoModelForCausalLM.from_pretrained(folder, dtype=dtype) if folder
             else _bench_model(100)).to(device)
    eos = model.generation_config.eos_token_id
    if folder:  # a real model's own lengths, and a prompt that its tokenizer would write
        ids = AutoTokenizer.from_pretrained(folder)
        texts = [f"What is {i} plus {i + 7}?" for i in range(prompts)]
        lists = [encode_prompt(ids, Problem(text, "")) for text in texts]
    else:
        rng = random.Random(seed)
        lists = [[rng.randrange(1, 100) for _ in range(rng.randint(5, 30))] for _ in range(prompts)]

    def ours() -> int:
        """Response tokens that generate samples."""
        generator = torch.Generator(device).manual_seed(seed)
        out = generate(model, lists, max_new_tokens=limit, eos_id=eos, pad_id=eos,
                       generator=generator, max_rows=rows)
        return int(out[2].sum())

    def theirs() -> int:
        """Response tokens that model.generate samples, in batches of as many rows."""
        torch.manual_seed(seed)
        total = 0
        for start in range(0, prompts, rows):
            tokens, attention = left_pad(lists[start : start + rows], eos, device)
            out = model.generate(
                tokens, attention_mask=attention.long(), do_sample=True, top_k=0, top_p=1.0,
                max_new_tokens=limit, pad_token_id=eos)[:, tokens.shape[1] :]
            ended = (out == eos).int()
            total += int((ended.cumsum(1) - ended == 0).sum())  # up to the first end, included
        return total

    threads = f"{torch.get_num_threads()} threads"
    name = torch.cuda.get_device_name() if device == "cuda" else threads
    print(f"{device} ({name}), {folder or 'a 4-layer model'}, {prompts} prompts, at most {limit} "
          f"tokens, {rows} rows; three runs each, in turn")
    speeds = {ours: [], theirs: []}
    for _ in range(3):
        for run in speeds:
            start = time.perf_counter()
            n = run()
            speeds[run].append(n / (time.perf_counter() - start))
    a, b = (sorted(x)[1] for x in speeds.values())
    print(f"rollout.generate {a:10,.0f} tokens/s\nmodel.generate   {b:10,.0f} tokens/s\n"
          f"median ratio     {a / b:10.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="the batch and the sampler: demo, or --bench")
    parser.add_argument("--bench", action="store_true", help="time against model.generate")
    parser.add_argument("--model", default="", metavar="DIR", help="Hugging Face folder to bench")
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--limit", type=int, default=512, help="longest response")
    parser.add_argument("--rows", type=int, default=128, help="responses under way at once")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.bench:
        _bench(args.model, args.prompts, args.limit, args.rows, args.seed)
    else:
        _demo(args.seed)
