"""From rewards to token advantages: length-adaptive GAE in three tiers, and critic-free advantages.

    δ_t = r_t + γ V(s_{t+1}) − V(s_t)        Â_t = δ_t + γλ Â_{t+1}        λ_actor = 1 − 1/(αT)

S3AC §3.2, token-level advantages (α = 1.5, γ = 1, reward on the last token only). The form of λ is
VAPO's (2504.05118). The tiers are three implementations: `gae_loop` is the equations above,
`gae_torch` and `gae_triton` are fast and use a form without a "next value":

    Â_t = r_t + W_{t+1} − V_t                W_t = γ(1−λ) V_t + γλ (r_t + W_{t+1})

W starts at the right end as γ V(s_T), plus R when one reward per response is given. A masked slot
copies W from its right, so a gap costs no further γλ. With λ = γ = 1, Â_t is exactly R − V_t.

    value [B, T]    B responses, T slots; value[:, t] is V of the state before token t
    reward          [B] (on the last trainable token) or [B, T]
    mask            [B, T], not 0 on trainable tokens, gaps allowed; `gae` also takes integer
                    lengths [B] where the trainable tokens come first
    lam             in [0, 1], a float or [B]
    bootstrap [B]   V(s_T) of truncated rows, 0 elsewhere
Advantages are float32 (float64 for float64 input), 0 on masked slots, and carry no gradient.

Differs from the paper:
- T in λ counts trainable tokens, and λ is clamped to [0, 1).
- A masked gap inside a response (tool output) is skipped.
- `gae` itself does not normalise. `whiten` is the step after it, and the trainer's default.

Also here: the advantages of GRPO (group), RLOO (leave-one-out), REINFORCE++ (batch), FlashREINFORCE
and VinePPO. All of them, `adaptive_lambda`, `gae_loop` and `whiten` can be copied one by one.
Left out: losses, the critic, λ_critic (it is 1: the critic's target is the return).

Run: `python gae.py` prints a right and a wrong response, token by token.
"""
import argparse

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # Triton is Linux only; everything but gae_triton works without it
    triton = None

BLOCK = 1024  # tokens that a Triton program scans at once


def adaptive_lambda(lengths: Tensor, alpha: float = 1.5) -> Tensor:
    """λ = 1 − 1/(αT), clamped to [0, 1); T [B] in trainable tokens; 0 for T = 0. (S3AC, VAPO)

    ValueError for a negative length or an alpha that is not above 0.
    """
    if not alpha > 0:
        raise ValueError(f"alpha: expected a number above 0, found {alpha}")
    if (lengths < 0).any():
        raise ValueError(f"lengths: expected 0 or more tokens, found {lengths.min().item()}")
    lengths = lengths if lengths.dtype == torch.float64 else lengths.float()
    lam = 1 - 1 / (alpha * lengths)                                      # λ = 1 − 1/(αT)
    return torch.where(lengths > 0, lam.clamp(0, 1 - 2**-24), 0.0)       # 1 − 2⁻²⁴: float32 below 1


def gae(value: Tensor, reward: Tensor, mask: Tensor, lam: float | Tensor, *, gamma: float = 1.0,
        bootstrap: Tensor | None = None, impl: str = "auto") -> Tensor:
    """Token advantages [B, T]; arguments as in the docstring of the file.

    impl: loop, torch, triton, or auto (triton on a GPU, else torch). ValueError on a wrong shape or
    device, lam or gamma outside [0, 1], lengths outside [0, T], or a reward [B, T] that is not 0
    (NaN included) on a masked slot.
    """
    if impl == "auto":
        impl = "triton" if value.is_cuda and triton is not None else "torch"
    tiers = {"loop": gae_loop, "torch": gae_torch, "triton": gae_triton}
    if impl not in tiers:
        raise ValueError(f"impl: expected auto, loop, torch or triton, found {impl!r}")
    if impl == "loop":
        _check(value, reward, mask, lam, gamma, bootstrap)
    return tiers[impl](value, reward, mask, lam, gamma=gamma, bootstrap=bootstrap)


def _check(value: Tensor, reward: Tensor, mask: Tensor, lam: float | Tensor, gamma: float,
           bootstrap: Tensor | None) -> tuple[Tensor, Tensor]:
    """lam [B] and bootstrap [B] in the dtype of the arithmetic, once everything fits together."""
    if value.dim() != 2 or not value.is_floating_point():
        raise ValueError(f"value: expected floats [B, T], found {value.dtype} {tuple(value.shape)}")
    (B, T), dtype = value.shape, torch.promote_types(value.dtype, torch.float32)
    bootstrap = value.new_zeros(B) if bootstrap is None else bootstrap
    lam = torch.as_tensor(lam, dtype=dtype, device=value.device)
    for name, x, shapes in (("mask", mask, [(B, T), (B,)]), ("reward", reward, [(B,), (B, T)]),
                            ("bootstrap", bootstrap, [(B,)]), ("lam", lam, [(), (B,)])):
        if tuple(x.shape) not in shapes or x.device != value.device:
            raise ValueError(f"{name}: expected shape {' or '.join(map(str, shapes))} on "
                             f"{value.device}, found {tuple(x.shape)} on {x.device}")
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma: expected a number in [0, 1], found {gamma}")
    if not ((lam >= 0) & (lam <= 1)).all():
        raise ValueError(f"lam: expected numbers in [0, 1], found {lam}")
    if mask.dim() == 1:
        integers = not (mask.dtype == torch.bool or mask.is_floating_point())
        if not integers or ((mask < 0) | (mask > T)).any():
            raise ValueError(f"mask: expected integer lengths in [0, {T}], found {mask.tolist()}")
        mask = torch.arange(T, device=mask.device) < mask[:, None]
    if reward.dim() == 2 and torch.where(mask.bool(), 0, reward).ne(0).any():  # NaN ≠ 0 too
        raise ValueError("reward: expected 0 on masked slots, found another value")
    return lam.expand(B), bootstrap.to(dtype)


# ---- tier 1: the loop anyone can check -----------------------------------------------------------
@torch.no_grad()
def gae_loop(value: Tensor, reward: Tensor, mask: Tensor, lam: float | Tensor, *,
             gamma: float = 1.0, bootstrap: Tensor | None = None) -> Tensor:
    """GAE from right to left, one token at a time. Arguments and errors as `gae`.

    Copied alone, it checks shapes and rewards on masked slots; `gae` checks ranges and devices too.
    """
    (B, T), dtype = value.shape, torch.promote_types(value.dtype, torch.float32)
    lam = torch.as_tensor(lam, dtype=dtype, device=value.device)
    bootstrap = value.new_zeros(B, dtype=dtype) if bootstrap is None else bootstrap.to(dtype)
    mask = mask != 0 if mask.dim() == 2 else torch.arange(T, device=mask.device) < mask[:, None]
    for name, x, shapes in (("mask", mask, [(B, T)]), ("reward", reward, [(B,), (B, T)]),
                            ("lam", lam, [(), (B,)]), ("bootstrap", bootstrap, [(B,)])):
        if tuple(x.shape) not in shapes:
            raise ValueError(f"{name}: expected shape {shapes}, found {tuple(x.shape)}")
    if reward.dim() == 1:
        last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)             # the last trainable token
        reward = torch.where(last, reward[:, None], 0.0)
    elif torch.where(mask, 0, reward).ne(0).any():                      # NaN ≠ 0 too
        raise ValueError("reward: expected 0 on masked slots, found another value")
    value, reward = value.to(dtype), reward.to(dtype)
    advantage = torch.zeros_like(value, memory_format=torch.contiguous_format)
    next_value, next_advantage = bootstrap, torch.zeros_like(bootstrap)
    for t in reversed(range(T)):
        delta = reward[:, t] + gamma * next_value - value[:, t]  # δ_t = r_t + γV(s_{t+1}) − V(s_t)
        now = delta + gamma * lam * next_advantage                      # Â_t = δ_t + γλ Â_{t+1}
        next_value = torch.where(mask[:, t], value[:, t], next_value)   # a masked slot is not there
        next_advantage = torch.where(mask[:, t], now, next_advantage)
        advantage[:, t] = torch.where(mask[:, t], now, 0.0)
    return advantage


# ---- tier 2: whole-tensor operations -------------------------------------------------------------
@torch.no_grad()
def gae_torch(value: Tensor, reward: Tensor, mask: Tensor, lam: float | Tensor, *,
              gamma: float = 1.0, bootstrap: Tensor | None = None) -> Tensor:
    """GAE as a blocked scan, O(log T) tensor operations. Arguments and errors as `gae`.

    Â = G − V with G_t = x_t + γλ G_{t+1} and x_t = r_t + γ(1−λ) V_{t+1}.
    """
    lam, bootstrap = _check(value, reward, mask, lam, gamma, bootstrap)
    if value.numel() == 0:
        return torch.zeros_like(value, dtype=lam.dtype)
    (B, T), dtype, K = value.shape, lam.dtype, 16  # blocks of K tokens
    mask = mask.bool() if mask.dim() == 2 else torch.arange(T, device=mask.device) < mask[:, None]
    lengths = mask.sum(1, dtype=torch.int32)
    gaps = (mask[:, 1:] > mask[:, :-1]).any()  # a token after a masked slot: push all to the left
    packed = torch.arange(T, device=value.device) < lengths[:, None] if gaps else mask
    left = lambda x: x.new_zeros(B, T).masked_scatter_(packed, x[mask]) if gaps else x
    V = torch.where(packed, left(value).to(dtype), 0.0)
    G = V.new_zeros(B, -(-T // K) * K)
    torch.mul(V[:, 1:], gamma * (1 - lam)[:, None], out=G[:, :T - 1])   # x_t = γ(1−λ) V_{t+1} …
    if reward.dim() == 2:
        G[:, :T] += torch.where(packed, left(reward).to(dtype), 0.0)    # … + r_t
    final = gamma * bootstrap + (reward if reward.dim() == 1 else 0)  # what the last token receives
    last = (lengths.long() - 1).clamp(min=0)[:, None]
    G.scatter_add_(1, last, torch.where(lengths > 0, final, 0.0).to(dtype)[:, None])
    _scan_(G.view(B, -1, K), gamma * lam.double())
    A = torch.sub(G[:, :T], V, out=V)                                   # Â_t = G_t − V_t
    return torch.zeros_like(A).masked_scatter_(mask, A[packed]) if gaps else A


def _scan_(x: Tensor, c: Tensor) -> None:
    """In place: y_t = x_t + c y_{t+1} over the last two dimensions of x [B, N, K]; c [B] float64.

    Inside the N blocks of K, all at once, one token after another (in a transposed copy); over the
    block starts by sums of 2, 4, 8, …; one pass then adds what comes from the right. No matrix
    product, so no TF32 switch reaches it; powers of c only multiply, so one that underflows is 0.
    """
    K = x.shape[2]
    y = x.transpose(1, 2).contiguous()                                  # [B, K, N]
    token, factor = y.unbind(1), c.to(x.dtype)[:, None]
    for t in reversed(range(K - 1)):
        token[t].addcmul_(factor, token[t + 1])                         # y_t = x_t + c y_{t+1}
    start, step, power = y[:, 0].clone(), 1, c[:, None]**K
    while step < start.shape[1]:
        start[:, :-step] += power.to(x.dtype) * start[:, step:]
        step, power = 2 * step, power * power
    power = c[:, None] ** torch.arange(K, 0, -1, device=x.device)
    y[:, :, :-1].addcmul_(power.to(x.dtype)[:, :, None], start[:, None, 1:])  # + c^{K−t} y_{next}
    x.copy_(y.transpose(1, 2))


# ---- tier 3: a reverse scan in Triton ------------------------------------------------------------
# Bytes per token, float32 values and a mask (bf16: 2 for each 4 read; lengths: no mask byte; a
# reward [B, T]: one more read in each kernel):
#   _chunk_kernel  reads V 4 + mask 1, writes two numbers per chunk; not run when a row is one chunk
#   _gae_kernel    reads V 4 + mask 1, writes Â 4; its shifted second read of a block hits the cache
if triton is not None:

    @triton.jit
    def _load(value, reward, mask, t, length, value_t, reward_t, mask_t,
              REWARD: tl.constexpr, MASK: tl.constexpr, DTYPE: tl.constexpr):
        """Trainable?, V_t, r_t of slots t; masked slots and slots outside the row are not read."""
        t = t.to(tl.int64)
        m = t < length
        if MASK:
            m = m & (tl.load(mask + t * mask_t, mask=m, other=0) != 0)
        v = tl.load(value + t * value_t, mask=m, other=0.0).to(DTYPE)
        r = v * 0
        if REWARD:
            r = tl.load(reward + t * reward_t, mask=m, other=0.0).to(DTYPE)
        return m, v, r

    @triton.jit
    def _then(a1, b1, a2, b2):
        """W ↦ a1 W + b1, then W ↦ a2 W + b2."""
        return a1 * a2, a2 * b1 + b2

    @triton.jit
    def _chunk_kernel(value, reward, mask, row_ptr, count_ptr, total_ptr, T, chunk_len,
                      value_b, value_t, reward_b, reward_t, mask_b, mask_t,
                      REWARD: tl.constexpr, MASK: tl.constexpr, BLOCK: tl.constexpr):
        """A chunk as a map of what comes from its right: W ↦ c^count W + total."""
        row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
        DTYPE: tl.constexpr = total_ptr.dtype.element_ty
        g, c = tl.load(row_ptr + 4 * row), tl.load(row_ptr + 4 * row + 1)
        log_c = tl.load(row_ptr + 4 * row + 2)
        length = T
        if not MASK:
            length = tl.load(mask + row * mask_b)
        total, count = g * 0, 0
        for start in range(chunk * chunk_len, (chunk + 1) * chunk_len, BLOCK):
            t = start + tl.arange(0, BLOCK)
            m, v, r = _load(value + row * value_b, reward + row * reward_b, mask + row * mask_b, t,
                            length, value_t, reward_t, mask_t, REWARD, MASK, DTYPE)
            n = m.to(tl.int32)
            before = count + tl.cumsum(n, 0) - n  # trainable tokens of the chunk before t
            total += tl.sum(tl.exp2(log_c * before) * (g * v + c * r), 0)
            count += tl.sum(n, 0)
        tl.store(count_ptr + row * tl.num_programs(1) + chunk, count)
        tl.store(total_ptr + row * tl.num_programs(1) + chunk, total)

    @triton.jit
    def _gae_kernel(value, reward, mask, row_ptr, count_ptr, total_ptr, advantage, T, chunk_len,
                    value_b, value_t, reward_b, reward_t, mask_b, mask_t, CHUNKS: tl.constexpr,
                    REWARD: tl.constexpr, MASK: tl.constexpr, BLOCK: tl.constexpr):
        """The advantages of one chunk of one row, right to left, a block of tokens at a time.

        The index i counts from the right: Triton's reverse scans can go wrong (its issue 4362).
        """
        row, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
        DTYPE: tl.constexpr = advantage.dtype.element_ty
        g, c = tl.load(row_ptr + 4 * row), tl.load(row_ptr + 4 * row + 1)
        log_c, final = tl.load(row_ptr + 4 * row + 2), tl.load(row_ptr + 4 * row + 3)
        length = T
        if not MASK:
            length = tl.load(mask + row * mask_b)
        # W at the chunk's right end: the chunks to the right, nearest first, then the row's end
        k = chunk + 1 + tl.arange(0, CHUNKS)
        n = tl.load(count_ptr + row * chunks + k, mask=k < chunks, other=0)
        total = tl.load(total_ptr + row * chunks + k, mask=k < chunks, other=0.0)
        total = tl.where(k == chunks, final, total)
        W = tl.sum(tl.exp2(log_c * (tl.cumsum(n, 0) - n)) * total, 0)
        i = tl.arange(0, BLOCK)
        for done in range(0, chunk_len, BLOCK):
            t = (chunk + 1) * chunk_len - 1 - done - i
            m, v, r = _load(value + row * value_b, reward + row * reward_b, mask + row * mask_b,
                            t + 1, tl.where(i > 0, length, 0), value_t, reward_t, mask_t,
                            REWARD, MASK, DTYPE)  # the slot to the right, inside the block
            a, b = tl.where(m, c, 1.0), g * v + c * r  # W ↦ γ(1−λ)V + γλ(r + W); masked: W ↦ W
            a, b = tl.associative_scan((a, b), 0, _then)
            a = tl.exp2(log_c * tl.cumsum(m.to(tl.int32), 0))  # more exact than a product of many c
            W_next = a * W + b                                # W_{t+1}
            m, v, r = _load(value + row * value_b, reward + row * reward_b, mask + row * mask_b,
                            t, length, value_t, reward_t, mask_t, REWARD, MASK, DTYPE)
            A = tl.where(m, r + W_next - v, 0.0)              # Â_t = r_t + W_{t+1} − V_t
            tl.store(advantage + row * T + t, A, mask=t < T)
            W_t = tl.where(m, g * v + c * (r + W_next), W_next)
            W = tl.sum(tl.where(i == BLOCK - 1, W_t, 0.0), 0)  # the block's left end


@torch.no_grad()
def gae_triton(value: Tensor, reward: Tensor, mask: Tensor, lam: float | Tensor, *,
               gamma: float = 1.0, bootstrap: Tensor | None = None) -> Tensor:
    """GAE by two kernels, few long rows split over many programs. Arguments and errors as `gae`.

    CUDA tensors, or CPU tensors in Triton's interpreter (TRITON_INTERPRET=1 before this file is
    imported). Inputs are read where they lie: any strides, any float dtype, float32 arithmetic.
    """
    if triton is None:
        raise ValueError("impl: expected loop or torch where triton is not installed, found triton")
    if not value.is_cuda and isinstance(_gae_kernel, triton.JITFunction):
        raise ValueError(f"value: expected CUDA or TRITON_INTERPRET=1, found {value.device}")
    lam, bootstrap = _check(value, reward, mask, lam, gamma, bootstrap)
    B, T = value.shape
    advantage = torch.empty(B, T, dtype=lam.dtype, device=value.device)
    if advantage.numel() == 0:
        return advantage
    per_token, masked = reward.dim() == 2, mask.dim() == 2
    final = gamma * bootstrap + (0 if per_token else reward)
    c = gamma * lam.double()
    log_c = c.log2().clamp(min=-1e4)                                    # c = 0: 0⁰ = 1, 0ⁿ = 0
    rows = torch.stack((gamma * (1 - lam.double()), c, log_c, final), 1).to(lam.dtype)
    reward = reward if per_token else value                             # not read
    mask = mask.bool().view(torch.uint8) if masked else mask[:, None]   # lengths
    chunks, chunk_len = _split(B, T, value.device)
    count = torch.empty(B, chunks, dtype=torch.int32, device=value.device)
    total = torch.empty(B, chunks, dtype=lam.dtype, device=value.device)
    inputs, grid = (value, reward, mask, rows, count, total), (B, chunks)
    strides = (*value.stride(), *reward.stride(), *mask.stride())
    flags = {"REWARD": per_token, "MASK": masked, "BLOCK": BLOCK}
    with torch.cuda.device_of(value):
        if chunks > 1:
            _chunk_kernel[grid](*inputs, T, chunk_len, *strides, **flags)
        _gae_kernel[grid](*inputs, advantage, T, chunk_len, *strides,
                          CHUNKS=triton.next_power_of_2(chunks), **flags)
    return advantage


def _split(B: int, T: int, device: torch.device) -> tuple[int, int]:
    """Chunks per row and tokens per chunk: about four programs for each multiprocessor."""
    on_gpu, blocks = device.type == "cuda", triton.cdiv(T, BLOCK)
    units = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 2
    per_chunk = triton.cdiv(blocks, min(blocks, triton.cdiv(4 * units, B)))
    return triton.cdiv(blocks, per_chunk), per_chunk * BLOCK


# ---- advantages without a critic, and whitening --------------------------------------------------
@torch.no_grad()
def group_advantage(reward: Tensor, prompt_id: Tensor, mask: Tensor, *,
                    divide_std: bool = True) -> Tensor:
    """(R − mean_group)/std_group on every token, [B, T]. (GRPO)

    reward and prompt_id [B], else ValueError. 0 in a group of one or of equal rewards. A row
    without a token is in no group.
    """
    if mask.dim() != 2 or not reward.shape == prompt_id.shape == mask.shape[:1]:
        raise ValueError(f"reward, prompt_id: expected shape (B,) beside a mask (B, T), found "
                         f"{tuple(reward.shape)}, {tuple(prompt_id.shape)}, {tuple(mask.shape)}")
    mask, dtype = mask != 0, torch.promote_types(reward.dtype, torch.float32)
    some = mask.any(1)
    R = torch.where(some, reward.double(), 0.0)  # float64: the mean of equal rewards is exact
    group = torch.unique(prompt_id, return_inverse=True)[1]
    over_group = lambda x: torch.zeros_like(x).index_add_(0, group, x)[group]   # Σ over i's group
    n = over_group(some.double()).clamp(min=1)
    advantage = torch.where(some, R - over_group(R) / n, 0.0)           # R − mean
    if divide_std:
        std = (over_group(advantage**2) / (n - 1).clamp(min=1)).sqrt()
        # assumption: the sample's deviation (n − 1), plus 1e-6
        advantage = advantage / (std + 1e-6)                            # (R − mean)/std
    return torch.where(mask, advantage[:, None], 0.0).to(dtype)


@torch.no_grad()
def leave_one_out_advantage(reward: Tensor, prompt_id: Tensor, mask: Tensor) -> Tensor:
    """R − mean of the prompt's other responses on every token, [B, T]. (RLOO)

    Ahmadian et al. 2024, 2402.14740. A response is no part of its own baseline, so the gradient is
    unbiased; nothing is divided by a deviation. All else as `group_advantage`.
    """
    if mask.dim() != 2 or not reward.shape == prompt_id.shape == mask.shape[:1]:
        raise ValueError(f"reward, prompt_id: expected shape (B,) beside a mask (B, T), found "
                         f"{tuple(reward.shape)}, {tuple(prompt_id.shape)}, {tuple(mask.shape)}")
    mask, dtype = mask != 0, torch.promote_types(reward.dtype, torch.float32)
    R, n = torch.where(mask.any(1), reward.double(), 0.0), mask.any(1).double()
    group = torch.unique(prompt_id, return_inverse=True)[1]
    total, n = (torch.zeros_like(x).index_add_(0, group, x)[group] for x in (R, n))
    # R − (ΣR − R)/(n − 1) = (R − mean) n/(n − 1)
    advantage = (R - total / n.clamp(min=1)) * n / (n - 1).clamp(min=1)
    return torch.where(mask, advantage[:, None], 0.0).to(dtype)


@torch.no_grad()
def batch_advantage(reward: Tensor, mask: Tensor) -> Tensor:
    """Return-to-go, whitened over all trainable tokens of the batch, [B, T].

    REINFORCE++, 2501.03262. reward [B] or [B, T]. 0 if all returns are equal or there is one token.
    ValueError on other shapes, or a reward [B, T] that is not 0 on a masked slot.
    """
    if mask.dim() != 2 or reward.shape not in (mask.shape[:1], mask.shape):
        raise ValueError(f"reward: expected shape (B,) or (B, T) beside a mask (B, T), "
                         f"found {tuple(reward.shape)} beside {tuple(mask.shape)}")
    mask, dtype = mask != 0, torch.promote_types(reward.dtype, torch.float32)
    if reward.dim() == 2 and torch.where(mask, 0, reward).ne(0).any():  # NaN ≠ 0 too
        raise ValueError("reward: expected 0 on masked slots, found another value")
    R = reward.double()[:, None] if reward.dim() == 1 else reward.double().flip(1).cumsum(1).flip(1)
    returns = torch.where(mask, R, 0.0)                                 # Σ_{l≥t} r_l
    centred = torch.where(mask, returns - returns.sum() / mask.sum().clamp(min=1), 0.0)
    std = (centred.square().sum() / (mask.sum() - 1).clamp(min=1)).sqrt()
    # assumption: the sample's deviation (n − 1), plus 1e-6
    return (centred / (std + 1e-6)).to(dtype)


@torch.no_grad()
def flash_reinforce_advantage(reward: Tensor, mask: Tensor) -> Tensor:
    """R − mean_batch(R) on every token, [B, T]; reward [B], else ValueError. (FlashREINFORCE)"""
    if mask.dim() != 2 or reward.shape != mask.shape[:1]:
        raise ValueError(f"reward: expected shape (B,) beside a mask (B, T), "
                         f"found {tuple(reward.shape)} beside {tuple(mask.shape)}")
    mask, dtype = mask != 0, torch.promote_types(reward.dtype, torch.float32)
    R = torch.where(mask.any(1), reward.double(), 0.0)
    # assumption: the mean weighs alike the responses that have a token, not the tokens
    mean = R.sum() / mask.any(1).sum().clamp(min=1)
    return torch.where(mask, (R - mean)[:, None], 0.0).to(dtype)        # R − mean(R)


@torch.no_grad()
def vine_advantage(step_value: Tensor, step_id: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
    """Â_step = r + V(s') − V(s) on every token of a step, [B, T]. (VinePPO, 2410.01679)

    step_value [B, N]: mean return of independent continuations from each step's start, in the units
    of the reward. step_id [B, T] in [0, N) on trainable tokens. s' is the start of the next step
    that has a trainable token; after the last one V(s') = 0. reward [B] or [B, T]. ValueError on
    other shapes or ids, or a reward [B, T] that is not 0 on a masked slot.
    """
    (B, T), N = mask.shape, step_value.shape[-1]
    for name, x, shapes in (("reward", reward, [(B,), (B, T)]), ("step_id", step_id, [(B, T)]),
                            ("step_value", step_value, [(B, N)])):
        if tuple(x.shape) not in shapes:
            raise ValueError(f"{name}: expected shape {shapes}, found {tuple(x.shape)}")
    mask, dtype = mask != 0, torch.promote_types(step_value.dtype, torch.float32)
    step = torch.where(mask, step_id, 0).long()
    if ((step < 0) | (step >= N)).any():
        raise ValueError(f"step_id: expected 0 to {N - 1} on trainable tokens, "
                         f"found {step.min().item()} to {step.max().item()}")
    if reward.dim() == 1:
        last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)             # the last trainable token
        reward = torch.where(last, reward[:, None], 0.0)
    elif torch.where(mask, 0, reward).ne(0).any():                      # NaN ≠ 0 too
        raise ValueError("reward: expected 0 on masked slots, found another value")
    there = torch.zeros(B, N + 1, device=mask.device).scatter_add_(1, step, mask.float()) > 0
    V = torch.where(there, torch.nn.functional.pad(step_value.to(dtype), (0, 1)), 0.0)
    index = torch.where(there, torch.arange(N + 1, device=mask.device), N)
    following = index.flip(1).cummin(1)[0].flip(1).roll(-1, 1)  # the next step there, or N: V = 0
    r = torch.zeros_like(V).scatter_add_(1, step, reward.to(dtype))
    advantage = r + V.gather(1, following) - V                          # Â = r + V(s') − V(s)
    return torch.where(mask, advantage.gather(1, step), 0.0)


@torch.no_grad()
def whiten(advantage: Tensor, mask: Tensor) -> Tensor:
    """(Â − mean)/std over all trainable tokens of the batch, [B, T]; 0 where masked.

    Mean 0, sample standard deviation 1; 0 for one token or for equal values. Another shape of the
    mask: ValueError. Why centred: CISPO keeps a gradient on every token; with a mean below 0 (an
    optimistic critic) it pushes down all that was sampled, success falls, and V lags even more.
    """
    # assumption: S3AC states no normalisation; whitened over the batch's tokens as most PPO code
    if mask.shape != advantage.shape:
        raise ValueError(f"mask: expected {tuple(advantage.shape)}, found {tuple(mask.shape)}")
    mask, dtype = mask != 0, torch.promote_types(advantage.dtype, torch.float32)
    A = torch.where(mask, advantage.double(), 0.0)  # float64: the mean of equal values is exact
    centred = torch.where(mask, A - A.sum() / mask.sum().clamp(min=1), 0.0)
    std = (centred.square().sum() / (mask.sum() - 1).clamp(min=1)).sqrt()
    return (centred / (std + 1e-6)).to(dtype)                           # (Â − mean)/std


# ---- demo ----------------------------------------------------------------------------------------
def demo() -> None:
    """One right and one wrong response, token by token."""
    value = torch.tensor([[0.0, 0.2, 0.1, 0.6, 0.7, 0.9], [0.0, 0.2, 0.3, -0.5, -0.8, 0.0]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
    reward, prompt_id = torch.tensor([1.0, -1.0]), torch.tensor([0, 0])
    lam = adaptive_lambda(mask.sum(1))
    actor = gae(value, reward, mask, lam)
    columns = {"V_t": value, "δ_t": gae(value, reward, mask, 0.0),      # λ = 0: Â = δ
               "Â λ_actor": actor, "whitened": whiten(actor, mask),
               "Â λ=1": gae(value, reward, mask, 1.0), "R−V_t": reward[:, None] - value,
               "group": group_advantage(reward, prompt_id, mask),
               "rloo": leave_one_out_advantage(reward, prompt_id, mask),
               "batch": batch_advantage(reward, mask)}
    for b in range(2):
        print(f"response {b + 1}: R = {reward[b]:+.0f}, T = {mask[b].sum()}, λ_actor {lam[b]:.3f}\n"
              "   t" + "".join(f"{name:>10}" for name in columns))
        for t in range(mask[b].sum()):
            print(f"{t:4}" + "".join(f"{x[b, t]:+10.3f}" for x in columns.values()))
    print("\nV_t is what the critic expects before token t, δ_t how much token t changes it. λ = 1"
          "\ncredits every token with the whole future, R − V_t; λ_actor = 1 − 1/(1.5T) weighs the"
          "\nnear future more: the step where V falls stands out. Whitened, the batch has mean 0."
          "\nWithout a critic (last columns) all tokens of a response get the same advantage.")


if __name__ == "__main__":
    argparse.ArgumentParser(description="token advantages of two responses").parse_args()
    demo()
