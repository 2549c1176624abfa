"""Actor losses: from hidden states to token log-probs, from log-probs to the policy gradient.

    log π(a_t|s_t) = z[a_t] − log Σ_v exp z[v],   z = h_t Wᵀ / temperature
    r_t = π_θ/π_old      the policy being updated against the trainer before the update
    ρ_t = π_old/μ        the trainer before the update against the sampler, no gradient
    CISPO:  L = −(1/n) Σ_t sg(clip(r_t, 1−ε_low, 1+ε_high) Â_t) log π_θ(a_t|s_t)

S3AC §3.2. Its actor has the CISPO loss (2506.13585), range [0.8, 1.28], token mean over the batch,
no KL term, on tokens that pass two tests of ρ: IcePoP (2510.18855) token by token, and MIS on the
largest ρ of a response. Also here: the losses that S3AC is compared with, and GEPO's weight of a
response. `token_logp`, `mismatch_mask` and each loss can be copied alone.

    logp, logp_old, logp_roll, advantage [B, T]: B responses, T response tokens
    mask, keep [B, T]   bool or any number dtype: a slot counts where it is not 0
    n_tokens            count of kept tokens of the whole step, over all micro-batches and ranks,
                        so that their losses and gradients add up; default: this call's own
    stats               name -> (sum, count), which add up, too
Results are float32 (float64 for float64 input). A gradient goes through `logp` alone.

Differs from the paper:
- IcePoP's own paper also multiplies kept tokens by ρ; `mismatch_ratio` offers that.
- Masked tokens leave the denominator. MIS's range [0, 5] is read as one of the largest log-ratio.
- Log-ratios are clamped to ±20.
Left out: KL penalty, entropy bonus, a bias of the output layer, a vocabulary split over ranks.

Run: `python actor_loss.py` prints the weight of each loss, and what the masks drop.
"""
import argparse
import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

try:
    import triton
    import triton.language as tl
except ImportError:  # Triton exists on Linux only; the torch tier needs nothing of it
    triton = None


# ---- token log-probs -----------------------------------------------------------------------------
def token_logp(logits: Tensor, tokens: Tensor, *, temperature: float = 1.0) -> Tensor:
    """log π(a_t|s_t) in float32, full vocabulary: logits [B, T, V], tokens [B, T] -> [B, T].

    Score at the temperature that sampled: it is part of the policy. Bad arguments: ValueError.
    """
    if logits.shape[:-1] != tokens.shape:
        raise ValueError(f"tokens: expected {list(logits.shape[:-1])}, found {list(tokens.shape)}")
    if not temperature > 0:
        raise ValueError(f"temperature: expected a number above 0, found {temperature}")
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    # log π(a) = z[a] − log Σ_v exp z[v]
    return z.gather(-1, tokens.long().unsqueeze(-1)).squeeze(-1) - z.logsumexp(-1)


def linear_token_logp(hidden: Tensor, weight: Tensor, tokens: Tensor, *, temperature: float = 1.0,
                      impl: str = "auto") -> Tensor:
    """token_logp(hidden @ weight.T, tokens) without ever holding [B, T, V], forward or backward.

    It goes through the vocabulary in chunks, keeps one logsumexp per token, and computes the logits
    once more in the backward pass, for tokens whose gradient is not 0. hidden [B, T, H] or [N, H],
    weight [V, H], tokens [B, T] or [N] -> log-probs of tokens' shape, in float32 also for bfloat16.
    impl: torch, triton (CUDA, or TRITON_INTERPRET=1 set), or auto. Bad arguments: ValueError.
    """
    if hidden.shape[:-1] != tokens.shape:
        raise ValueError(f"tokens: expected {list(hidden.shape[:-1])}, found {list(tokens.shape)}")
    dtype = _check(hidden, weight, temperature)
    if impl == "auto":
        impl = "triton" if triton and hidden.is_cuda and dtype == torch.float32 else "torch"
    if impl not in ("torch", "triton"):
        raise ValueError(f"impl: expected auto, torch or triton, found {impl!r}")
    runs = triton and (hidden.is_cuda or not isinstance(_logsumexp_kernel, triton.JITFunction))
    if impl == "triton" and (dtype == torch.float64 or not runs):
        raise ValueError(f"impl: expected torch for {dtype} on {hidden.device}, found triton")
    logp = _LinearLogp.apply(hidden.flatten(0, -2), weight, tokens.flatten().long(), temperature,
                             impl == "triton")
    return logp.view(tokens.shape)


@torch.no_grad()
def linear_entropy(hidden: Tensor, weight: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Entropy −Σ_v π(v) log π(v) in nats of each next-token distribution, [B, T], no gradient.

    hidden [B, T, H], weight [V, H]; in chunks of the vocabulary, as linear_token_logp.
    """
    _check(hidden, weight, temperature)
    with torch.autocast(hidden.device.type, enabled=False):
        entropy = _logsumexp_torch(hidden.flatten(0, -2), weight, temperature, entropy=True)
    return entropy.view(hidden.shape[:-1])


def _check(hidden: Tensor, weight: Tensor, temperature: float) -> torch.dtype:
    """The dtype of the sums, float32 or float64, once the arguments fit together."""
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(f"weight: expected [V, {hidden.shape[-1]}], found {list(weight.shape)}")
    if not temperature > 0:
        raise ValueError(f"temperature: expected a number above 0, found {temperature}")
    return torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)


def _chunks(h: Tensor, vocab: int) -> Iterator[slice]:
    """Slices of the vocabulary, with small logits [N, words]; its gradient's rows are then done."""
    # 2²⁰ float32 numbers are 4 MiB, about a processor's cache; a GPU is busy with larger ones only
    step = max(256, (2**27 if h.is_cuda else 2**20) // max(h.shape))
    return (slice(start, min(start + step, vocab)) for start in range(0, vocab, step))


class _LinearLogp(torch.autograd.Function):
    """hidden [N, H], weight [V, H], tokens [N] -> log π [N]; saves one logsumexp per token."""

    @staticmethod
    def forward(ctx: FunctionCtx, hidden: Tensor, weight: Tensor, tokens: Tensor,
                temperature: float, kernel: bool) -> Tensor:
        """log π(a) [N], a chunk of the vocabulary at a time; kernel: in Triton."""
        dtype = _check(hidden, weight, temperature)
        chosen = (hidden.to(dtype) * weight[tokens].to(dtype)).sum(1) / temperature  # z[a]
        with torch.autocast(hidden.device.type, enabled=False):
            lse = (_logsumexp_triton if kernel else _logsumexp_torch)(hidden, weight, temperature)
        ctx.save_for_backward(hidden, weight, tokens, lse)
        ctx.temperature, ctx.kernel = temperature, kernel
        return chosen - lse  # log π(a) = z[a] − log Σ_v exp z[v]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of hidden and weight: ∂L/∂z = grad (1[v = a] − π(v)) / τ, chunk by chunk."""
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


def _logsumexp_torch(hidden: Tensor, weight: Tensor, temperature: float, entropy=False) -> Tensor:
    """log Σ_v exp z[v] of every row, [N], chunk after chunk; or the entropy, that minus E_π[z]."""
    h = hidden.to(_check(hidden, weight, temperature)) / temperature
    lse, mean = h.new_full((len(h),), -torch.inf), h.new_zeros(len(h))  # of the words seen so far
    for words in _chunks(h, len(weight)):
        z = h @ weight[words].to(h.dtype).T  # [N, words], written once, read twice
        last, lse = lse, torch.logaddexp(lse, z.logsumexp(1))
        if entropy:  # −Σ π log π = log Σ_v exp z[v] − E_π[z]
            mean = (last - lse).exp() * mean + (z.sub(lse[:, None]).exp_().mul_(z)).sum(1)
    return lse - mean


def _logit_grad_torch(h: Tensor, w: Tensor, a: Tensor, lse: Tensor, g: Tensor,
                      temperature: float) -> Tensor:
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


def _logit_grad_triton(h: Tensor, w: Tensor, a: Tensor, lse: Tensor, g: Tensor,
                       temperature: float) -> Tensor:
    """As _logit_grad_torch; written once, in the dtype of the two matrix products that follow."""
    h, w = h.contiguous(), w.contiguous()
    grid, blocks = _launch(h.dtype, len(h), len(w))
    G = torch.empty(len(h), len(w), dtype=h.dtype, device=h.device)
    with torch.cuda.device_of(h):
        _logit_grad_kernel[grid](h, w, a, lse, g, G, temperature, *G.shape, h.shape[1], **blocks)
    return G


# ---- sampler against trainer ---------------------------------------------------------------------
@torch.no_grad()
def mismatch_ratio(logp_old: Tensor, logp_roll: Tensor, mask: Tensor) -> Tensor:
    """ρ_t = π_old(trainer)/μ(sampler), [B, T], 0 where masked, no gradient.

    IcePoP's own paper (2510.18855) also multiplies kept tokens by ρ_t: give any loss here
    `advantage * mismatch_ratio(…)` as its advantage. Shapes that differ: ValueError.
    """
    shapes = [list(x.shape) for x in (logp_old, logp_roll, mask)]
    if shapes != [shapes[0]] * 3:
        raise ValueError(f"logp_old, logp_roll, mask: expected one shape, found {shapes}")
    mask, zero = mask != 0, torch.zeros(1, device=mask.device)  # float32: promotes half precision
    old, roll = (torch.where(mask, x, zero) for x in (logp_old, logp_roll))
    return torch.where(mask, (old - roll).clamp(-20, 20).exp(), 0.0)    # ρ_t


@torch.no_grad()
def mismatch_mask(logp_old: Tensor, logp_roll: Tensor, mask: Tensor, *,
                  token_range: tuple[float, float] = (0.5, 5.0),
                  response_range: tuple[float, float] = (0.0, math.exp(5))
                  ) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """IcePoP ∧ MIS: which tokens the sampler and the trainer agree on well enough, bool [B, T].

    IcePoP keeps a token iff ρ_t lies in token_range, bounds included. MIS keeps a response iff its
    largest ρ_t lies in response_range: a maximum, not a product, so small deviations do not add up
    over a long response. A NaN fails both. Stats: tokens that each test alone masks (icepop_masked,
    mis_masked) and the two together (masked), responses dropped (mis_dropped), mean ρ (ratio), and
    KL(μ‖π_old) estimated by ρ − 1 − ln ρ (kl). Other shapes, or a range that is none: ValueError.
    """
    shapes = [list(x.shape) for x in (logp_old, logp_roll, mask)]
    if shapes != [shapes[0]] * 3:
        raise ValueError(f"logp_old, logp_roll, mask: expected one shape, found {shapes}")
    for name, (low, high) in (("token_range", token_range), ("response_range", response_range)):
        if not 0 <= low <= high:
            raise ValueError(f"{name}: expected 0 <= low <= high, found {(low, high)}")
    mask, zero = mask != 0, torch.zeros(1, device=mask.device)  # float32: promotes half precision
    old, roll = (torch.where(mask, x, zero) for x in (logp_old, logp_roll))
    rho = torch.where(mask, (old - roll).clamp(-20, 20).exp(), 0.0)     # ρ_t = π_old/μ
    # assumption: the token mask is 0/1, kept tokens are not weighted by ρ (see mismatch_ratio)
    token = (token_range[0] <= rho) & (rho <= token_range[1])
    largest = rho.amax(-1, keepdim=True)
    # assumption: MIS's [0, 5] is of log-ratios, and its 0 is no bound: as ratios (0, e⁵)
    response = (response_range[0] <= largest) & (largest <= response_range[1])
    keep, some = mask & token & response, mask.any(-1)
    values = {"icepop_masked": ~token, "mis_masked": (~response).expand_as(mask), "masked": ~keep,
              "ratio": rho, "kl": rho - 1 - rho.log()}
    stats = {name: (torch.where(mask, x, 0).sum(), mask.sum()) for name, x in values.items()}
    return keep, stats | {"mis_dropped": ((some & ~response.squeeze(-1)).sum(), some.sum())}


@torch.no_grad()
def group_expectation_weight(logp: Tensor, logp_roll: Tensor, prompt_id: Tensor, mask: Tensor
                             ) -> Tensor:
    """GEPO's weight w_i ≥ 0 of each response, [B], no gradient (Zhang et al. 2025, 2508.17850).

    S3AC names a "GEPO" without formula; whether this one or Graph-Enhanced PO (2510.26270) is meant
    is not known. Differs from a response's own ratio p_i/q_i: the denominator is the prompt's
    expected q, so one improbable response cannot blow its weight up. logp (p), logp_roll (q), mask
    [B, T]; prompt_id [B], all responses of a prompt in one call; else ValueError. A row without a
    token has weight 0. Use: `advantage * weight[:, None]`.
    """
    shapes = [list(x.shape) for x in (logp, logp_roll, mask, prompt_id)]
    if shapes != [shapes[0]] * 3 + [shapes[0][:1]]:
        raise ValueError(f"logp…mask, prompt_id: expected [B, T] thrice, [B], found {shapes}")
    mask, zero = mask != 0, torch.zeros(1, device=mask.device)  # float32: promotes half precision
    some, length = mask.any(-1), mask.sum(-1).clamp(min=1)
    # assumption: p and q are geometric means over the tokens, as in the authors' code
    log_p, log_q = (torch.where(mask, x, zero).sum(-1) / length for x in (logp, logp_roll))
    same = (prompt_id[:, None] == prompt_id) & some  # [B, B]: is j a response to i's prompt?
    over_group = lambda x: torch.where(same, x, -torch.inf).logsumexp(-1)
    log_mean_q = over_group(2 * log_q) - over_group(log_q)              # log Σ_j q_j²/Σ_k q_k
    weight = (log_p - log_mean_q).clamp(-20, 20).exp()                  # p_i / (Σ_j q_j²/Σ_k q_k)
    return torch.where(some, weight, 0.0)


# ---- losses: (loss, stats); ValueError for shapes that differ or an n that is no single number ---
def cispo_loss(logp: Tensor, logp_old: Tensor, advantage: Tensor, keep: Tensor,
               n_tokens: float | Tensor | None = None, *, eps_low: float = 0.2,
               eps_high: float = 0.28) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """CISPO (MiniMax-M1, 2506.13585; S3AC's actor loss): the ratio is a clipped, detached weight.

    All [B, T]. Unlike under PPO a clipped token still has a gradient: the ratio limits its weight
    and never silences it. Stats: loss, ratio, kl, and clip_share, the tokens outside the range.
    """
    shapes = [list(x.shape) for x in (logp, logp_old, advantage, keep)]
    if shapes != [shapes[0]] * 4 or getattr(n_tokens, "ndim", 0) > 0:
        raise ValueError(f"logp…keep: expected one shape, scalar n, found {shapes}, {n_tokens}")
    keep, zero = keep != 0, torch.zeros(1, device=keep.device)  # float32: promotes half precision
    logp, old, A = (torch.where(keep, x, zero) for x in (logp, logp_old, advantage))
    ratio = (logp - old).detach().clamp(-20, 20).exp()                  # r_t = π_θ/π_old
    clipped = ratio.clamp(1 - eps_low, 1 + eps_high)  # r̄_t = clip(r_t, 1 − ε_low, 1 + ε_high)
    loss = -(clipped * A).detach() * logp                               # −sg(r̄_t Â_t) log π_θ
    kl = ratio - 1 - ratio.log()  # its mean over samples of π_old is KL(π_old‖π_θ)
    values = {"loss": loss, "ratio": ratio, "clip_share": clipped != ratio, "kl": kl}
    stats = {k: (torch.where(keep, x, 0).detach().sum(), keep.sum()) for k, x in values.items()}
    n = keep.sum() if n_tokens is None else n_tokens  # assumption: masked ones are not counted
    return loss.sum() / (n + (n == 0)), stats  # 0, not NaN, where nothing is counted


def ppo_clip_loss(logp: Tensor, logp_old: Tensor, advantage: Tensor, keep: Tensor,
                  n_tokens: float | Tensor | None = None, *, eps_low: float = 0.2,
                  eps_high: float = 0.2) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """PPO's clipped surrogate (1707.06347, eq. 7): the gradient goes through the ratio.

    All [B, T]. A token that has already moved past the range in the direction of its advantage gets
    no gradient; clip_share counts those. VAPO: eps_high 0.28. Other stats as `cispo_loss`.
    """
    shapes = [list(x.shape) for x in (logp, logp_old, advantage, keep)]
    if shapes != [shapes[0]] * 4 or getattr(n_tokens, "ndim", 0) > 0:
        raise ValueError(f"logp…keep: expected one shape, scalar n, found {shapes}, {n_tokens}")
    keep, zero = keep != 0, torch.zeros(1, device=keep.device)  # float32: promotes half precision
    logp, old, A = (torch.where(keep, x, zero) for x in (logp, logp_old, advantage))
    ratio, A = (logp - old.detach()).clamp(-20, 20).exp(), A.detach()   # r_t = π_θ/π_old
    free, cut = ratio * A, ratio.clamp(1 - eps_low, 1 + eps_high) * A
    loss = -torch.minimum(free, cut)  # −min(r_t Â_t, clip(r_t, 1 − ε_low, 1 + ε_high) Â_t)
    values = {"loss": loss, "ratio": ratio, "clip_share": cut < free, "kl": ratio - 1 - ratio.log()}
    stats = {k: (torch.where(keep, x, 0).detach().sum(), keep.sum()) for k, x in values.items()}
    n = keep.sum() if n_tokens is None else n_tokens
    return loss.sum() / (n + (n == 0)), stats


def grpo_loss(logp: Tensor, logp_old: Tensor, advantage: Tensor, keep: Tensor,
              n_responses: float | Tensor | None = None, *, eps_low: float = 0.2,
              eps_high: float = 0.2) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """GRPO's loss (Shao et al. 2024, 2402.03300): PPO's surrogate, averaged by response.

    All [B, T]. Differs from `ppo_clip_loss` in the mean alone: first over the T_i kept tokens of
    each response, then over responses, so a token of a long response weighs less. n_responses: all
    with a kept token in the whole step. Left out: the KL penalty. Stats as there, loss by response.
    """
    shapes = [list(x.shape) for x in (logp, logp_old, advantage, keep)]
    if shapes != [shapes[0]] * 4 or getattr(n_responses, "ndim", 0) > 0:
        raise ValueError(f"logp…keep: expected one shape, scalar n, found {shapes}, {n_responses}")
    keep, zero = keep != 0, torch.zeros(1, device=keep.device)  # float32: promotes half precision
    logp, old, A = (torch.where(keep, x, zero) for x in (logp, logp_old, advantage))
    ratio, A = (logp - old.detach()).clamp(-20, 20).exp(), A.detach()   # r_t = π_θ/π_old
    free, cut = ratio * A, ratio.clamp(1 - eps_low, 1 + eps_high) * A
    loss = -torch.minimum(free, cut).sum(-1) / keep.sum(-1).clamp(min=1)    # (1/T_i) Σ_t …
    values = {"ratio": ratio, "clip_share": cut < free, "kl": ratio - 1 - ratio.log()}
    stats = {k: (torch.where(keep, x, 0).detach().sum(), keep.sum()) for k, x in values.items()}
    some = keep.any(-1).sum()
    n = some if n_responses is None else n_responses
    return loss.sum() / (n + (n == 0)), {"loss": (loss.detach().sum(), some)} | stats  # (1/B) Σ_i …


def dis_loss(logp: Tensor, logp_roll: Tensor, advantage: Tensor, keep: Tensor,
             n_tokens: float | Tensor | None = None, *, eps_low: float = 0.3,
             eps_high: float = 5.0) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """DIS (2602.15763; SAO, 2607.07508): the ratio to the *sampler*, detached, 0 out of range.

    All [B, T]. Default range (0.7, 6), bounds excluded, for reasoning; the other published range is
    (0.2, 4), eps 0.8/3.0. clip_share: the tokens given weight 0. Other stats as `cispo_loss`.
    """
    shapes = [list(x.shape) for x in (logp, logp_roll, advantage, keep)]
    if shapes != [shapes[0]] * 4 or getattr(n_tokens, "ndim", 0) > 0:
        raise ValueError(f"logp…keep: expected one shape, scalar n, found {shapes}, {n_tokens}")
    keep, zero = keep != 0, torch.zeros(1, device=keep.device)  # float32: promotes half precision
    logp, roll, A = (torch.where(keep, x, zero) for x in (logp, logp_roll, advantage))
    ratio = (logp - roll).detach().clamp(-20, 20).exp()                 # r_t = π_θ/μ
    inside = (1 - eps_low < ratio) & (ratio < 1 + eps_high)
    weight = torch.where(inside, ratio, 0.0)  # f(r) = r if 1 − ε_l < r < 1 + ε_h else 0
    loss = -(weight * A).detach() * logp                                # −sg(f(r_t) Â_t) log π_θ
    values = {"loss": loss, "ratio": ratio, "clip_share": ~inside, "kl": ratio - 1 - ratio.log()}
    stats = {k: (torch.where(keep, x, 0).detach().sum(), keep.sum()) for k, x in values.items()}
    n = keep.sum() if n_tokens is None else n_tokens
    return loss.sum() / (n + (n == 0)), stats


def flash_reinforce_loss(logp: Tensor, logp_roll: Tensor, advantage: Tensor, mask: Tensor,
                         n_responses: float | Tensor | None = None, *, delta: float = 3e-3
                         ) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """FlashREINFORCE (2607.21653): no clip; responses that have drifted are gated out.

    All [B, T]. A response is kept iff the mean over its tokens of the Bernoulli KL between
    p = μ(a_t) and q = π(a_t) is at most delta (3e-3; 5e-3 for R1-Distill). n_responses: those with
    a token in the whole step, also gated ones. Stats: loss, gated, bernoulli_kl by response, ratio.
    """
    shapes = [list(x.shape) for x in (logp, logp_roll, advantage, mask)]
    if shapes != [shapes[0]] * 4 or getattr(n_responses, "ndim", 0) > 0:
        raise ValueError(f"logp…mask: expected one shape, scalar n, found {shapes}, {n_responses}")
    mask, zero = mask != 0, torch.zeros(1, device=mask.device)  # float32: promotes half precision
    logp, roll, A = (torch.where(mask, x, zero) for x in (logp, logp_roll, advantage))
    p, q = (x.detach().exp().clamp(1e-6, 1 - 1e-6) for x in (roll, logp))
    kl = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    length, some = mask.sum(-1).clamp(min=1), mask.any(-1)              # T_i
    mean_kl = kl.sum(-1) / length  # a masked slot has p = q and adds 0
    gate = mean_kl <= delta                                             # g_i
    ratio = (logp - roll).detach().clamp(-20, 20).exp()                 # r_t = π_θ/μ
    loss = -((ratio * A).detach() * logp).sum(-1) / length  # −(1/T_i) Σ_t sg(r_t Â_t) log π_θ
    loss = torch.where(gate, loss, 0.0)
    values = {"loss": loss, "gated": ~gate, "bernoulli_kl": mean_kl}
    stats = {k: (torch.where(some, x, 0).detach().sum(), some.sum()) for k, x in values.items()}
    stats["ratio"] = torch.where(mask, ratio, 0).sum(), mask.sum()
    n = some.sum() if n_responses is None else n_responses  # B from before the gate
    return loss.sum() / (n + (n == 0)), stats                           # (1/B) Σ_i g_i …


def nll_loss(logp: Tensor, reward: Tensor, mask: Tensor, n_tokens: float | Tensor | None = None
             ) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """VAPO's second term (Yue et al. 2025, 2504.05118): likelihood of the right responses' tokens.

    logp and mask [B, T], reward [B], right where positive. What was right is imitated, without
    advantage or ratio; VAPO adds 0.1 of it to `ppo_clip_loss`. n_tokens: of right ones. Stats: nll.
    """
    shapes = [list(x.shape) for x in (logp, mask, reward)]
    if shapes != [shapes[0]] * 2 + [shapes[0][:1]] or getattr(n_tokens, "ndim", 0) > 0:
        raise ValueError(f"logp, mask, reward: expected [B, T] ×2, [B], found {shapes}, {n_tokens}")
    right, zero = (mask != 0) & (reward > 0)[:, None], torch.zeros(1, device=mask.device)
    loss = -torch.where(right, logp, zero)                              # −log π_θ(a_t|s_t)
    n = right.sum() if n_tokens is None else n_tokens
    return loss.sum() / (n + (n == 0)), {"nll": (loss.detach().sum(), right.sum())}


# ---- demo ----------------------------------------------------------------------------------------
def demo() -> None:
    """Print the weight of each loss by ratio and sign of Â, and what the masks drop under noise."""
    losses = [cispo_loss, ppo_clip_loss, dis_loss, flash_reinforce_loss]
    ratio = torch.tensor([0.25, 0.5, 0.75, 0.9, 1, 1.1, 1.25, 1.5, 2, 4, 7]).double()[:, None]
    old, one, table = torch.full_like(ratio, -8), torch.ones_like(ratio), [ratio]
    for A, loss_fn in [(one, f) for f in losses] + [(-one, f) for f in losses]:
        logp = (old + ratio.log()).requires_grad_()
        table.append(-torch.autograd.grad(loss_fn(logp, old, A, one, 1)[0], logp)[0] + 0.0)
    print("Weight of ∇ log π at one token, −∂L/∂log π: the loss as its gradient sees it.\n\n"
          f"{'Â = +1':>16}{'Â = −1':>36}\n  ratio" + "    CISPO PPO-clip      DIS    Flash" * 2)
    for row in torch.cat(table, 1).tolist():
        print(f"{row[0]:7.2f}" + "".join(f"{x:9.2f}" for x in row[1:]))
    print("\nCISPO bounds the weight and keeps every token. PPO drops a token that has gone far"
          "\nenough in the direction of Â; at Â = −1 a large ratio keeps its unbounded weight. DIS"
          "\ndrops it outside (0.7, 6). FlashREINFORCE has the bare ratio and gates responses."
          "\n\nWhat IcePoP ∧ MIS drop, in %, if trainer log-probs = sampler's + N(0, σ)\n\n"
          "     σ  length  IcePoP tokens  MIS tokens    both  responses  KL(μ‖π_old) %")
    for sigma, length in ((0.01, 10_000), (0.1, 10_000), (0.5, 100), (0.5, 10_000), (1.5, 10_000)):
        noise = sigma * torch.randn(200, length, generator=torch.Generator().manual_seed(0))
        stats = mismatch_mask(noise - 1, torch.full_like(noise, -1), torch.ones_like(noise))[1]
        share = {name: 100 * (total / count).item() for name, (total, count) in stats.items()}
        print(f"{sigma:6.2f} {length:7} {share['icepop_masked']:14.2f} {share['mis_masked']:11.1f} "
              f"{share['masked']:7.1f} {share['mis_dropped']:10.1f} {share['kl']:14.3f}")


if __name__ == "__main__":
    argparse.ArgumentParser(description="the losses' weights, what the masks drop").parse_args()
    demo()
