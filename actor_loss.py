"""Actor losses: from hidden states to token log-probs, from log-probs to the policy gradient.

    log π(a_t|s_t) = z[a_t] − log Σ_v exp z[v],   z = h_t Wᵀ / temperature
    r_t = π_θ/π_old      the policy being updated against the trainer before the update
    ρ_t = π_old/μ        the trainer before the update against the sampler, no gradient
    CISPO:  L = −(1/n) Σ_t sg(clip(r_t, 1−ε_low, 1+ε_high) Â_t) log π_θ(a_t|s_t)

S3AC's actor: the CISPO loss (2506.13585), range [0.8, 1.28], token mean over the whole batch, no KL
term, on the tokens that pass two tests of ρ: IcePoP (2510.18855) token by token, and MIS on the
largest ρ of a response. Beside it, with the same arguments, the losses that S3AC is compared with:
PPO-clip (1707.06347), GRPO's mean of it by response (2402.03300), DIS (2602.15763) and
FlashREINFORCE (Hu, Zhang et al. 2026). What sets them apart is the weight of ∇ log π as a function
of the ratio; `python actor_loss.py` prints it. Two parts of others: GEPO's weight of a response
(2508.17850) and VAPO's likelihood term (2504.05118).

    B responses, T response tokens, H hidden size, V vocabulary
    hidden [B, T, H]   weight [V, H]   tokens [B, T] long   logits [B, T, V]
    logp, logp_old, logp_roll, advantage [B, T]
    mask, keep [B, T] bool or any number dtype: a slot counts where it is not 0

`linear_token_logp` never holds [B, T, V]: it goes through the vocabulary in chunks, keeps one
logsumexp per token, and computes the logits once more in the backward pass. `n_tokens` is the count
of kept tokens of the whole step, over all micro-batches and ranks: their losses and gradients then
add up to the whole (default: this call's own count). A stat is a (sum, count) pair for that reason.

Left out: KL penalty, entropy bonus, a bias of the output layer, a vocabulary split over ranks.

    python actor_loss.py             the weight of each loss, and what the masks drop
    python actor_loss.py --bench     log-probs: time and peak memory beside log_softmax().gather()
"""
import argparse
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

try:
    import triton
    import triton.language as tl
except ImportError:  # Triton exists on Linux only; the torch tier needs nothing of it
    triton = None

Stats = dict[str, tuple[Tensor, Tensor]]


def _float(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


# --- token log-probs


def token_logp(logits: Tensor, tokens: Tensor, *, temperature: float = 1.0) -> Tensor:
    """log π(a_t|s_t) in float32, full vocabulary: logits [B, T, V], tokens [B, T] -> [B, T].

    The temperature is part of the policy: score at the one that sampled.
    """
    if logits.shape[:-1] != tokens.shape:
        raise ValueError(f"tokens: expected the shape {list(logits.shape[:-1])} of logits without "
                         f"the vocabulary, found {list(tokens.shape)}")
    _check_temperature(temperature)
    z = _float(logits) / temperature
    # log π(a) = z[a] − log Σ_v exp z[v]
    return z.gather(-1, tokens.long().unsqueeze(-1)).squeeze(-1) - z.logsumexp(-1)


def linear_token_logp(hidden: Tensor, weight: Tensor, tokens: Tensor, *, temperature: float = 1.0,
                      impl: str = "auto") -> Tensor:
    """token_logp(hidden @ weight.T, tokens) without ever holding [B, T, V], forward or backward.

    hidden [B, T, H] (any leading shape, e.g. only the trainable tokens, [N, H]), weight [V, H],
    tokens [B, T] -> [B, T] float32; logits are float32 also where hidden and weight are bfloat16.
    impl "triton" runs the kernels, "torch" the chunked version, "auto" the kernels on CUDA.
    A token whose gradient is 0 (masked) is skipped in the backward pass, whatever it holds.
    """
    if hidden.shape[:-1] != tokens.shape:
        raise ValueError(f"tokens: expected the shape {list(hidden.shape[:-1])} of hidden without "
                         f"its last dimension, found {list(tokens.shape)}")
    _check_weight(hidden, weight)
    _check_temperature(temperature)
    if impl == "auto":
        fast = triton is not None and hidden.is_cuda and torch.float64 not in (hidden.dtype,
                                                                               weight.dtype)
        impl = "triton" if fast else "torch"
    if impl not in ("torch", "triton"):
        raise ValueError(f"impl: expected auto, torch or triton, found {impl!r}")
    if impl == "triton":
        _check_triton(hidden, weight)
    logp = _LinearLogp.apply(hidden.flatten(0, -2), weight, tokens.flatten().long(), temperature,
                             impl == "triton")
    return logp.view(tokens.shape)


@torch.no_grad()
def linear_entropy(hidden: Tensor, weight: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Entropy −Σ_v π(v) log π(v) in nats of each next-token distribution, [B, T], no gradient.

    hidden [B, T, H], weight [V, H]; in chunks of the vocabulary, as linear_token_logp.
    """
    _check_weight(hidden, weight)
    _check_temperature(temperature)
    h = hidden.flatten(0, -2).to(_accumulator(hidden, weight)) / temperature
    # of the words seen so far: log Σ_v exp z[v], and the mean of z under their softmax
    lse, mean = h.new_full((len(h),), -float("inf")), h.new_zeros(len(h))
    with torch.autocast(h.device.type, enabled=False):
        for words in _chunks(h, len(weight)):
            z = h @ weight[words].to(h.dtype).T
            last, lse = lse, torch.logaddexp(lse, z.logsumexp(1))
            mean = (last - lse).exp() * mean + (z.sub(lse[:, None]).exp_().mul_(z)).sum(1)
    return (lse - mean).view(hidden.shape[:-1])  # −Σ π log π = log Σ_v exp z[v] − E_π[z]


def _check_weight(hidden: Tensor, weight: Tensor) -> None:
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(f"weight: expected [V, {hidden.shape[-1]}] to go with hidden "
                         f"{list(hidden.shape)}, found {list(weight.shape)}")


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature: expected a number above 0, found {temperature}")


def _check_triton(hidden: Tensor, weight: Tensor) -> None:
    if triton is None:
        raise ValueError("impl: expected torch where the package triton is missing, found triton")
    if torch.float64 in (hidden.dtype, weight.dtype):
        raise ValueError("impl: expected torch for float64 (the kernels are float32), found triton")
    if not hidden.is_cuda and isinstance(_logsumexp_kernel, triton.JITFunction):
        raise ValueError("hidden: expected a CUDA tensor for impl triton (or TRITON_INTERPRET=1 "
                         f"before the import), found {hidden.device}")


def _accumulator(hidden: Tensor, weight: Tensor) -> torch.dtype:
    return torch.float64 if torch.float64 in (hidden.dtype, weight.dtype) else torch.float32


def _chunks(h: Tensor, vocab: int) -> Iterator[slice]:
    """Slices of the vocabulary, so that the logits [N, words] and weights [words, H] are small.

    Over the vocabulary, not over the tokens: a row of the weight gradient is then one finished sum.
    """
    # 2²⁰ float32 numbers are 4 MiB, about a processor's cache; a GPU is busy with larger ones only
    step = max(256, (2**27 if h.is_cuda else 2**20) // max(h.shape))
    return (slice(start, min(start + step, vocab)) for start in range(0, vocab, step))


class _LinearLogp(torch.autograd.Function):
    """hidden [N, H], weight [V, H], tokens [N] -> log π [N]; saves one logsumexp per token."""

    @staticmethod
    def forward(ctx: FunctionCtx, hidden: Tensor, weight: Tensor, tokens: Tensor,
                temperature: float, kernel: bool) -> Tensor:
        """log π [N] of the tokens; kernel picks the Triton tier."""
        dtype = _accumulator(hidden, weight)
        chosen = (hidden.to(dtype) * weight[tokens].to(dtype)).sum(1) / temperature  # z[a]
        with torch.autocast(hidden.device.type, enabled=False):
            lse = (_logsumexp_triton if kernel else _logsumexp_torch)(hidden, weight, temperature)
        ctx.save_for_backward(hidden, weight, tokens, lse)
        ctx.temperature, ctx.kernel = temperature, kernel
        return chosen - lse  # log π(a) = z[a] − log Σ_v exp z[v]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        """grad [N] -> gradients of hidden and weight, if those need one; None for the rest."""
        hidden, weight, tokens, lse = ctx.saved_tensors
        logit_grad = _logit_grad_triton if ctx.kernel else _logit_grad_torch
        # The kernel sums products of the model's dtype in float32; torch would round each logit.
        dtype = torch.promote_types(hidden.dtype, weight.dtype) if ctx.kernel else lse.dtype
        i = grad.nonzero().squeeze(1)  # a masked token is no work, and a NaN in it stays there
        h, a, lse, g = hidden[i].to(dtype), tokens[i], lse[i], grad[i] / ctx.temperature
        d_h, d_weight = torch.zeros_like(h, dtype=lse.dtype), torch.empty_like(weight)
        with torch.autocast(hidden.device.type, enabled=False):
            for words in _chunks(h, len(weight)):
                w = weight[words].to(dtype)
                G = logit_grad(h, w, a - words.start, lse, g, ctx.temperature)
                # ∂L/∂h = G W, summed in place, in float32 also where the factors are bfloat16
                d_h.addmm_(G, w) if G.dtype == d_h.dtype else d_h.add_(G @ w)
                if ctx.needs_input_grad[1]:
                    d_weight[words] = G.T @ h  # ∂L/∂W = Gᵀ h
        d_hidden = torch.zeros_like(hidden).index_copy_(0, i, d_h.to(hidden.dtype))
        return d_hidden, d_weight if ctx.needs_input_grad[1] else None, None, None, None


def _logsumexp_torch(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """log Σ_v exp z[v] of every row, [N], one chunk of the vocabulary after the other."""
    h = hidden.to(_accumulator(hidden, weight)) / temperature
    lse = h.new_full((len(h),), -float("inf"))
    for words in _chunks(h, len(weight)):
        # [N, words]: one write here; logsumexp reads it twice and makes a copy
        z = h @ weight[words].to(h.dtype).T
        lse = torch.logaddexp(lse, z.logsumexp(1))
    return lse


def _logit_grad_torch(h: Tensor, w: Tensor, a: Tensor, lse: Tensor, g: Tensor, temperature: float
                      ) -> Tensor:
    """G = ∂L/∂(h wᵀ) = g (onehot(a) − π) for one chunk w of the vocabulary, [N, words].

    g has the 1/temperature in it; a counts from the first word of the chunk and may lie outside.
    """
    G = torch.addmm(-lse[:, None], h, w.T, alpha=1 / temperature).exp_().mul_(-g[:, None])  # −g π
    here = torch.where((a >= 0) & (a < len(w)), g, 0.0)
    return G.scatter_add_(1, a.clamp(0, len(w) - 1)[:, None], here[:, None])


if triton is not None:

    @triton.jit
    def _logits_tile(hidden, weight, rows, words, N, V, H, BLOCK_H: tl.constexpr):
        """hidden[rows] @ weight[words].T, summed in float32, [BLOCK_N, BLOCK_V]; 0 outside."""
        acc = tl.zeros([rows.shape[0], words.shape[0]], tl.float32)
        h_ptr = hidden + rows[:, None].to(tl.int64) * H
        w_ptr = weight + words[None, :].to(tl.int64) * H
        for start in range(0, H, BLOCK_H):
            k = start + tl.arange(0, BLOCK_H)
            h = tl.load(h_ptr + k[None, :], (rows[:, None] < N) & (k[None, :] < H), other=0.0)
            w = tl.load(w_ptr + k[:, None], (words[None, :] < V) & (k[:, None] < H), other=0.0)
            acc = tl.dot(h, w, acc, input_precision="ieee")
        return acc

    @triton.jit
    def _logsumexp_kernel(hidden, weight, parts, temperature, N, V, H,
                          BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr):
        """One tile of logits, in registers only; its logsumexp goes to parts[tile, row]."""
        rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        words = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
        z = _logits_tile(hidden, weight, rows, words, N, V, H, BLOCK_H) / temperature
        z = tl.where(words[None, :] < V, z, -float("inf"))
        top = tl.max(z, 1)
        part = top + tl.log(tl.sum(tl.exp(z - top[:, None]), 1))
        tl.store(parts + tl.program_id(1).to(tl.int64) * N + rows, part, rows < N)

    @triton.jit
    def _logit_grad_kernel(hidden, weight, tokens, lse, grad, out, temperature, N, V, H,
                           BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr):
        """One tile of G = g (onehot(a) − π), from logits computed once more."""
        rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        words = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
        z = _logits_tile(hidden, weight, rows, words, N, V, H, BLOCK_H) / temperature
        a = tl.load(tokens + rows, rows < N, other=-1)
        log_sum = tl.load(lse + rows, rows < N, other=0.0)
        g = tl.load(grad + rows, rows < N, other=0.0)
        onehot = (words[None, :] == a[:, None]).to(tl.float32)
        G = g[:, None] * (onehot - tl.exp(z - log_sum[:, None]))
        inside = (rows[:, None] < N) & (words[None, :] < V)
        tl.store(out + rows[:, None].to(tl.int64) * V + words[None, :],
                 G.to(out.dtype.element_ty), inside)


def _launch(dtype: torch.dtype, n: int, vocab: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Grid, and tile sizes with warps; float32 has the smaller tile, so that neither spills."""
    size, h = (64, 32) if dtype == torch.float32 else (128, 64)
    blocks = {"BLOCK_N": size, "BLOCK_V": size, "BLOCK_H": h, "num_warps": 8}
    return (triton.cdiv(n, size), triton.cdiv(vocab, size)), blocks


def _logsumexp_triton(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """As _logsumexp_torch; the logits never leave the registers, one tile per program."""
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    h, w = hidden.to(dtype).contiguous(), weight.to(dtype).contiguous()
    grid, blocks = _launch(dtype, len(h), len(w))
    parts = torch.empty(grid[1], len(h), dtype=torch.float32, device=h.device)
    with torch.cuda.device_of(h):
        _logsumexp_kernel[grid](h, w, parts, temperature, len(h), len(w), h.shape[1], **blocks)
    return parts.logsumexp(0)


def _logit_grad_triton(h: Tensor, w: Tensor, a: Tensor, lse: Tensor, g: Tensor, temperature: float
                       ) -> Tensor:
    """As _logit_grad_torch; written once, in the dtype of the two matrix products that follow."""
    h, w = h.contiguous(), w.contiguous()
    grid, blocks = _launch(h.dtype, len(h), len(w))
    G = torch.empty(len(h), len(w), dtype=h.dtype, device=h.device)
    with torch.cuda.device_of(h):
        _logit_grad_kernel[grid](h, w, a, lse, g, G, temperature, *G.shape, h.shape[1], **blocks)
    return G


# --- masks


def _same_shape(tensors: dict[str, Tensor]) -> None:
    (first, expected), *rest = tensors.items()
    for name, x in rest:
        if x.shape != expected.shape:
            raise ValueError(f"{name}: expected the shape {list(expected.shape)} of {first}, "
                             f"found {list(x.shape)}")


def _masked(keep: Tensor, *tensors: Tensor) -> list[Tensor]:
    """In float32, 0 in every masked slot: a NaN there reaches no result and no gradient."""
    return [torch.where(keep, _float(x), 0.0) for x in tensors]


def _ratio(logp: Tensor, logp_old: Tensor) -> Tensor:
    return (logp - logp_old).clamp(-20, 20).exp()


def _stats(keep: Tensor, values: dict[str, Tensor]) -> Stats:
    """Each value's (sum over the kept slots, count of kept slots)."""
    n = keep.sum()
    return {name: (torch.where(keep, x.detach(), 0).sum(), n) for name, x in values.items()}


@torch.no_grad()
def mismatch_ratio(logp_old: Tensor, logp_roll: Tensor, mask: Tensor) -> Tensor:
    """ρ_t = π_old(trainer)/μ(sampler), [B, T], 0 where masked, no gradient.

    IcePoP's own paper (2510.18855) also multiplies the kept tokens by ρ_t. That is, for every loss
    here, `advantage * mismatch_ratio(…)` in place of `advantage`.
    """
    _same_shape({"mask": mask, "logp_old": logp_old, "logp_roll": logp_roll})
    mask = mask != 0
    return torch.where(mask, _ratio(*_masked(mask, logp_old, logp_roll)), 0.0)


@torch.no_grad()
def mismatch_mask(logp_old: Tensor, logp_roll: Tensor, mask: Tensor, *,
                  token_range: tuple[float, float] = (0.5, 5.0),
                  response_range: tuple[float, float] = (0.0, 5.0)) -> tuple[Tensor, Stats]:
    """IcePoP ∧ MIS: which tokens the sampler and the trainer agree on well enough, bool [B, T].

    IcePoP keeps a token iff ρ_t lies in token_range, bounds included. MIS keeps a response iff its
    largest ρ_t lies in response_range: a maximum, not a product, so small deviations do not add up
    over a long response. A ρ that is NaN fails both. Stats: the share of tokens that each test
    alone masks (icepop_masked, mis_masked) and the two together (masked), of responses dropped
    (mis_dropped), the mean ρ (ratio), and the KL(μ‖π_old) estimate ρ − 1 − ln ρ (kl).
    """
    for name, (low, high) in (("token_range", token_range), ("response_range", response_range)):
        if not 0 <= low <= high:
            raise ValueError(f"{name}: expected 0 <= low <= high, found {(low, high)}")
    rho = mismatch_ratio(logp_old, logp_roll, mask)
    mask = mask != 0
    # assumption: the token mask is 0/1, kept tokens are not weighted by ρ (see mismatch_ratio)
    token = (token_range[0] <= rho) & (rho <= token_range[1])
    largest = rho.amax(-1, keepdim=True)
    # assumption: the range is one of ratios; a log-ratio of at most 5 would be (0, e⁵)
    response = (response_range[0] <= largest) & (largest <= response_range[1])
    keep = mask & token & response
    stats = _stats(mask, {"icepop_masked": ~token, "mis_masked": (~response).expand_as(mask),
                          "masked": ~keep, "ratio": rho, "kl": rho - 1 - rho.log()})
    return keep, stats | _stats(mask.any(-1), {"mis_dropped": ~response.squeeze(-1)})


@torch.no_grad()
def group_expectation_weight(logp: Tensor, logp_roll: Tensor, prompt_id: Tensor, mask: Tensor
                             ) -> Tensor:
    """GEPO's weight w_i ≥ 0 of each response, [B], no gradient (Zhang et al. 2025, 2508.17850).

    Differs from a response's own ratio p_i/q_i: the denominator is the prompt's expected q, so one
    improbable response cannot blow its weight up. logp (the trainer's, p), logp_roll (the
    sampler's, q) and mask [B, T]; prompt_id [B], all responses of a prompt in one call. A row
    without a token has weight 0 and is in no group. To use it: `advantage * weight[:, None]`.
    """
    _same_shape({"mask": mask, "logp": logp, "logp_roll": logp_roll})
    if prompt_id.shape != mask.shape[:1]:
        raise ValueError(f"prompt_id: expected the shape {list(mask.shape[:1])} of responses, "
                         f"found {list(prompt_id.shape)}")
    mask = mask != 0
    some, length = mask.any(-1), mask.sum(-1).clamp(min=1)
    # assumption: p and q are geometric means over the tokens, as in the authors' code
    log_p, log_q = (x.sum(-1) / length for x in _masked(mask, logp, logp_roll))
    same = (prompt_id[:, None] == prompt_id) & some  # [B, B]: is j a response to i's prompt?
    over_group = lambda x: torch.where(same, x, -torch.inf).logsumexp(-1)
    log_mean_q = over_group(2 * log_q) - over_group(log_q)  # log Σ_j q_j²/Σ_k q_k
    return torch.where(some, _ratio(log_p, log_mean_q), 0.0)  # w_i = p_i / (Σ_j q_j²/Σ_k q_k)


# --- losses


def _inputs(logp: Tensor, logp_old: Tensor, advantage: Tensor, keep: Tensor) -> list[Tensor]:
    """Checked shapes; keep as bool, the rest clean in float32, a gradient through logp alone."""
    _same_shape({"logp": logp, "logp_old": logp_old, "advantage": advantage, "keep": keep})
    keep = keep != 0
    return [keep, *_masked(keep, logp, logp_old.detach(), advantage.detach())]


def _mean(loss: Tensor, count: Tensor, n: float | Tensor | None) -> Tensor:
    """Σ loss / n, n by default this call's own count; 0 (not NaN) where nothing is counted."""
    n = count if n is None else n
    if isinstance(n, Tensor) and n.dim() > 0:
        raise ValueError(f"n_tokens, n_responses: expected one number, found shape {list(n.shape)}")
    return loss.sum() / (n + (n == 0))


def _token_loss(loss: Tensor, keep: Tensor, n_tokens: float | Tensor | None, ratio: Tensor,
                clipped: Tensor) -> tuple[Tensor, Stats]:
    # assumption: the tokens that the mismatch mask drops leave the denominator too
    mean = _mean(loss, keep.sum(), n_tokens)
    return mean, _stats(keep, {"loss": loss}) | _ratio_stats(keep, ratio.detach(), clipped)


def _ratio_stats(keep: Tensor, ratio: Tensor, clipped: Tensor) -> Stats:
    kl = ratio - 1 - ratio.log()  # its mean over samples of π_old is KL(π_old‖π_θ)
    return _stats(keep, {"ratio": ratio, "clip_share": clipped, "kl": kl})


def cispo_loss(logp: Tensor, logp_old: Tensor, advantage: Tensor, keep: Tensor,
               n_tokens: float | Tensor | None = None, *, eps_low: float = 0.2,
               eps_high: float = 0.28) -> tuple[Tensor, Stats]:
    """CISPO (MiniMax-M1, 2506.13585; S3AC's actor loss): the ratio is a clipped, detached weight.

    All [B, T]; n_tokens as in the docstring of the file. Unlike under PPO a clipped token still has
    a gradient: the ratio limits its weight and never silences it. Stats: loss, ratio, kl, and
    clip_share, the tokens outside [1 − eps_low, 1 + eps_high].
    """
    keep, logp, logp_old, advantage = _inputs(logp, logp_old, advantage, keep)
    ratio = _ratio(logp.detach(), logp_old)
    clipped = ratio.clamp(1 - eps_low, 1 + eps_high)  # r̄_t = clip(r_t, 1 − ε_low, 1 + ε_high)
    loss = -(clipped * advantage) * logp  # −sg(r̄_t Â_t) log π_θ(a_t|s_t)
    return _token_loss(loss, keep, n_tokens, ratio, clipped != ratio)


def ppo_clip_loss(logp: Tensor, logp_old: Tensor, advantage: Tensor, keep: Tensor,
                  n_tokens: float | Tensor | None = None, *, eps_low: float = 0.2,
                  eps_high: float = 0.2) -> tuple[Tensor, Stats]:
    """PPO's clipped surrogate (1707.06347, eq. 7): the gradient goes through the ratio.

    All [B, T]. A token that has already moved past the range in the direction of its advantage gets
    no gradient; clip_share counts those. VAPO: eps_high 0.28.
    """
    keep, logp, logp_old, advantage = _inputs(logp, logp_old, advantage, keep)
    loss, ratio, clipped = _surrogate(logp, logp_old, advantage, eps_low, eps_high)
    return _token_loss(loss, keep, n_tokens, ratio, clipped)


def grpo_loss(logp: Tensor, logp_old: Tensor, advantage: Tensor, keep: Tensor,
              n_responses: float | Tensor | None = None, *, eps_low: float = 0.2,
              eps_high: float = 0.2) -> tuple[Tensor, Stats]:
    """GRPO's loss (Shao et al. 2024, 2402.03300): PPO's surrogate, averaged by response.

    All [B, T]. Differs from `ppo_clip_loss` in the mean alone: first over the T_i kept tokens of
    each response, then over responses, so a token of a long response weighs less. n_responses: the
    responses with a kept token in the whole step. Left out: GRPO's KL penalty. Stats: loss per
    response, the rest as `ppo_clip_loss`.
    """
    keep, logp, logp_old, advantage = _inputs(logp, logp_old, advantage, keep)
    loss, ratio, clipped = _surrogate(logp, logp_old, advantage, eps_low, eps_high)
    length, some = keep.sum(-1).clamp(min=1), keep.any(-1)
    loss = loss.sum(-1) / length  # (1/T_i) Σ_t −min(…)
    return (_mean(loss, some.sum(), n_responses),  # (1/B) Σ_i …
            _stats(some, {"loss": loss}) | _ratio_stats(keep, ratio.detach(), clipped))


def _surrogate(logp: Tensor, logp_old: Tensor, advantage: Tensor, eps_low: float, eps_high: float
               ) -> tuple[Tensor, Tensor, Tensor]:
    """PPO's loss of each token, its ratio, and whether the clip has taken its gradient."""
    ratio = _ratio(logp, logp_old)
    free, bounded = ratio * advantage, ratio.clamp(1 - eps_low, 1 + eps_high) * advantage
    # −min(r_t Â_t, clip(r_t, 1 − ε_low, 1 + ε_high) Â_t)
    return -torch.minimum(free, bounded), ratio, bounded < free


def dis_loss(logp: Tensor, logp_roll: Tensor, advantage: Tensor, keep: Tensor,
             n_tokens: float | Tensor | None = None, *, eps_low: float = 0.3,
             eps_high: float = 5.0) -> tuple[Tensor, Stats]:
    """DIS (2602.15763; S3AC Table 8, SAO): the ratio to the *sampler*, detached, 0 out of range.

    All [B, T]; one ratio does the work of both π_θ/π_old and ρ. Default range (0.7, 6), bounds
    excluded, for reasoning; also published: eps 0.8/3.0. clip_share: the tokens given weight 0.
    """
    keep, logp, logp_roll, advantage = _inputs(logp, logp_roll, advantage, keep)
    ratio = _ratio(logp.detach(), logp_roll)
    inside = (1 - eps_low < ratio) & (ratio < 1 + eps_high)
    weight = torch.where(inside, ratio, 0.0)  # f(r) = r if 1 − ε_l < r < 1 + ε_h else 0
    loss = -(weight * advantage) * logp  # −sg(f(r_t) Â_t) log π_θ(a_t|s_t)
    return _token_loss(loss, keep, n_tokens, ratio, ~inside)


def flash_reinforce_loss(logp: Tensor, logp_roll: Tensor, advantage: Tensor, mask: Tensor,
                         n_responses: float | Tensor | None = None, *, delta: float = 3e-3
                         ) -> tuple[Tensor, Stats]:
    """FlashREINFORCE (Hu, Zhang et al. 2026): no clip; responses that have drifted are gated out.

    All [B, T]. A response is kept iff the mean over its tokens of the Bernoulli KL between
    p = μ(a_t) and q = π(a_t) is at most delta (3e-3; 5e-3 for R1-Distill). n_responses: the
    responses with a token in the whole step; the gated ones stay in it. Stats: loss, gated and
    bernoulli_kl per response, ratio per token.
    """
    mask, logp, logp_roll, advantage = _inputs(logp, logp_roll, advantage, mask)
    p, q = (x.detach().exp().clamp(1e-6, 1 - 1e-6) for x in (logp_roll, logp))
    kl = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    length, some = mask.sum(-1).clamp(min=1), mask.any(-1)  # T_i
    mean_kl = kl.sum(-1) / length  # a masked slot has p = q and adds 0
    gate = mean_kl <= delta  # g_i
    ratio = _ratio(logp.detach(), logp_roll)
    loss = -((ratio * advantage) * logp).sum(-1) / length  # −(1/T_i) Σ_t sg(r_t Â_t) log π
    loss = torch.where(gate, loss, 0.0)
    per_response = {"loss": loss, "gated": ~gate, "bernoulli_kl": mean_kl}
    # L = (1/B) Σ_i g_i …, with the B from before the gate
    return (_mean(loss, some.sum(), n_responses),
            _stats(some, per_response) | _stats(mask, {"ratio": ratio}))


def nll_loss(logp: Tensor, reward: Tensor, mask: Tensor, n_tokens: float | Tensor | None = None
             ) -> tuple[Tensor, Stats]:
    """VAPO's second term (Yue et al. 2025, 2504.05118): likelihood of the right responses' tokens.

    logp and mask [B, T], reward [B], right where positive. Differs from a policy gradient: no
    advantage and no ratio, what was right is imitated; VAPO adds it times 0.1 to `ppo_clip_loss`.
    n_tokens: the tokens of right responses in the whole step. Stats: nll. Other shapes: ValueError.
    """
    _same_shape({"logp": logp, "mask": mask})
    if reward.shape != logp.shape[:1]:
        raise ValueError(f"reward: expected the shape {list(logp.shape[:1])} of responses, found "
                         f"{list(reward.shape)}")
    right = (mask != 0) & (reward > 0)[:, None]
    loss = -_masked(right, logp)[0]  # −log π_θ(a_t|s_t)
    return _mean(loss, right.sum(), n_tokens), _stats(right, {"nll": loss})


# --- demo and bench


def _weight(loss_fn, ratio: float, advantage: float) -> float:
    """The factor of ∇ log π in the ascent direction, −∂L/∂log π, at one token with this ratio."""
    old = torch.full((1, 1), -8.0, dtype=torch.float64)
    logp = (old + torch.tensor(ratio, dtype=torch.float64).log()).requires_grad_()
    loss, _ = loss_fn(logp, old, torch.full_like(old, advantage), torch.ones(1, 1))
    return -torch.autograd.grad(loss, logp)[0].item()


def demo() -> None:
    """Print the weight of each loss by ratio and sign of Â, and what the masks drop under noise."""
    losses = {"CISPO": cispo_loss, "PPO-clip": ppo_clip_loss, "DIS": dis_loss,
              "Flash": flash_reinforce_loss}
    print("Weight of ∇ log π at one token, −∂L/∂log π: the loss as its gradient sees it.\n")
    print("          Â = +1 " + " " * 29 + "Â = −1")
    print("  ratio " + "".join(f"{name:>9}" for name in losses) * 2)
    for r in (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 7.0):
        row = "".join(f"{_weight(f, r, a):9.2f}" for a in (1.0, -1.0) for f in losses.values())
        print(f"{r:7.2f} {row.replace('-0.00', ' 0.00')}")
    print("\nCISPO bounds the weight and keeps every token. PPO drops a token that has gone far"
          "\nenough in the direction of Â; at Â = −1 a large ratio keeps its unbounded weight. DIS"
          "\ndrops it outside (0.7, 6). FlashREINFORCE has the bare ratio and gates responses.")

    print("\nWhat IcePoP ∧ MIS drop, in %, if trainer log-probs = sampler's + N(0, σ)\n")
    print("     σ   length   tokens: IcePoP    MIS   both   responses   KL(μ‖π_old)")
    generator = torch.Generator().manual_seed(0)
    for sigma in (0.01, 0.1, 0.3, 0.5):
        for length in (100, 10_000):
            noise = sigma * torch.randn(200, length, generator=generator)
            mask = torch.ones(200, length)
            _, stats = mismatch_mask(noise - 1, torch.full_like(noise, -1), mask)
            share = {k: 100 * (s / n).item() for k, (s, n) in stats.items()}
            print(f"{sigma:6.2f} {length:8} {share['icepop_masked']:16.2f} "
                  f"{share['mis_masked']:6.1f} {share['masked']:6.1f} {share['mis_dropped']:11.1f} "
                  f"{share['kl'] / 100:14.5f}")


def measure(variant: str, n: int, vocab: int, width: int) -> tuple[float, float]:
    """Seconds of the best of five forward and backward passes, and peak MiB above the inputs."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    hidden = torch.randn(1, n, width, device=device, dtype=dtype).requires_grad_()
    weight = (torch.randn(vocab, width, device=device, dtype=dtype) / width**0.5).requires_grad_()
    tokens, g = torch.randint(vocab, (1, n), device=device), torch.randn(1, n, device=device)

    def step(rows: int) -> float:
        """Seconds of one forward and backward pass over the first rows tokens."""
        h, a = hidden[:, :rows], tokens[:, :rows]
        start = time.perf_counter()
        if variant == "naive":
            logp = (h @ weight.T).float().log_softmax(-1).gather(-1, a[..., None]).squeeze(-1)
        else:
            logp = linear_token_logp(h, weight, a, impl=variant)
        torch.autograd.grad(logp, (hidden, weight), g[:, :rows])
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    step(8)  # libraries, thread pools and kernels are loaded before anything is counted
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        return min(step(n) for _ in range(5)), (torch.cuda.max_memory_allocated() - before) / 2**20
    before = _peak_rss(reset=True)
    first, peak = step(n), _peak_rss() - before
    return min(first, *(step(n) for _ in range(4))), peak / 2**20


def _peak_rss(reset: bool = False) -> int:
    """Peak resident bytes of this process (Linux); with reset, from now on."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", status)[1])


def bench(n: int, vocab: int, width: int) -> None:
    """Each variant in a process of its own, so that no peak hides another."""
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else (
        f"CPU, {torch.get_num_threads()} threads")
    print(f"{n} tokens × {vocab} words, H = {width}, forward and backward, {where}\n")
    base = None
    kernels = ["triton"] if torch.cuda.is_available() and triton is not None else []
    for variant in ["naive", "torch", *kernels]:
        command = [sys.executable, __file__, "--variant", variant, "--tokens", str(n), "--vocab",
                   str(vocab), "--hidden", str(width)]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        seconds, peak = float(out[0]), float(out[1])
        base = base or (seconds, peak)
        print(f"{variant:8} {seconds:8.3f} s {peak:9.1f} MiB   time × {seconds / base[0]:.2f}   "
              f"memory × 1/{base[1] / peak:.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bench", action="store_true", help="time and peak memory against naive")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--variant", help=argparse.SUPPRESS)  # one row of the bench
    args = parser.parse_args()
    if args.variant:
        print(*measure(args.variant, args.tokens, args.vocab, args.hidden))
    elif args.bench:
        bench(args.tokens, args.vocab, args.hidden)
    else:
        demo()
