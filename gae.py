"""From rewards to token advantages: length-adaptive GAE in three tiers, and critic-free advantages.

    δ_t = r_t + γ V(s_{t+1}) − V(s_t)        Â_t = δ_t + γλ Â_{t+1}        λ_actor = 1 − 1/(αT)

S3AC, token-level advantages (α = 1.5, γ = 1, reward on the last token only); the form of λ is
VAPO's (2504.05118). `gae_loop` is these two equations. The two fast tiers use the same thing
written as a λ-return, G_t = r_t + W_{t+1}, which needs no "next value":

    Â_t = r_t + W_{t+1} − V_t                W_t = γ(1−λ) V_t + γλ (r_t + W_{t+1})

W starts at the right end as γ V(s_T), plus R when one reward per response is given. On a masked
slot W_t = W_{t+1}: a gap is skipped with no further γλ. With λ = γ = 1, Â_t is exactly R − V_t.

Legend: B responses, T response slots. value [B, T], value[:, t] = V of the state before token t.
reward [B] (on the last trainable token) or [B, T]. mask [B, T], true on trainable tokens, gaps
allowed, or integer lengths [B] when the trainable tokens come first. lam in [0, 1], a float or
[B]. bootstrap [B] = V(s_T) of truncated rows, 0 elsewhere. Advantages are float32 (float64 for
float64 values), 0 on masked slots, carry no gradient.
# assumption: not normalised, as no source mentions it.

Also here: group (GRPO), leave-one-out (RLOO), batch (REINFORCE++), FlashREINFORCE and VinePPO
advantages.
Left out: losses, the critic, λ_critic (it is 1: the critic's target is the return).

Run: `python gae.py` prints a right and a wrong response; `python gae.py --bench` times the tiers.
"""
import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # Triton is Linux only; everything but gae_triton works without it
    triton = None

BLOCK = 1024  # tokens that a Triton program scans at once


def adaptive_lambda(lengths: Tensor, alpha: float = 1.5) -> Tensor:
    """λ = 1 − 1/(αT), clamped to [0, 1); T [B] in trainable tokens; 0 for T = 0. (S3AC, VAPO)"""
    if not alpha > 0:
        raise ValueError(f"alpha: expected a number above 0, found {alpha}")
    if (lengths < 0).any():
        raise ValueError(f"lengths: expected 0 or more tokens, found {lengths.min().item()}")
    lengths = lengths.to(_dtype(lengths))
    lam = 1 - 1 / (alpha * lengths)                                      # λ = 1 − 1/(αT)
    return torch.where(lengths > 0, lam.clamp(0, 1 - 2**-24), 0.0)       # 1 − 2⁻²⁴: float32 below 1


def gae(value: Tensor, reward: Tensor, mask: Tensor, lam: float | Tensor, *, gamma: float = 1.0,
        bootstrap: Tensor | None = None, impl: str = "auto") -> Tensor:
    """Token advantages [B, T]; arguments as in the legend. `auto`: triton on a GPU, else torch.

    Raises ValueError on a wrong shape or device, lam or gamma outside [0, 1], lengths outside
    [0, T], or a reward [B, T] that is not 0 (NaN included) on a masked slot.
    """
    if impl == "auto":
        impl = "triton" if value.is_cuda and triton is not None else "torch"
    tiers = {"loop": gae_loop, "torch": gae_torch, "triton": gae_triton}
    if impl not in tiers:
        raise ValueError(f"impl: expected auto, loop, torch or triton, found {impl!r}")
    return tiers[impl](value, reward, mask, lam, gamma=gamma, bootstrap=bootstrap)


# --- tier 1: the loop anyone can check ---

@torch.no_grad()
def gae_loop(value: Tensor, reward: Tensor, mask: Tensor, lam: float | Tensor, *,
             gamma: float = 1.0, bootstrap: Tensor | None = None) -> Tensor:
    """GAE from right to left, one token at a time. Arguments and errors as `gae`."""
    lam, bootstrap = _check(value, reward, mask, lam, gamma, bootstrap)
    mask = _token_mask(mask, value.shape[1])
    reward = _token_reward(reward.to(lam.dtype), mask)
    value = value.to(lam.dtype)
    advantage = torch.zeros_like(value, memory_format=torch.contiguous_format)
    next_value, next_advantage = bootstrap, torch.zeros_like(bootstrap)
    for t in reversed(range(value.shape[1])):
        delta = reward[:, t] + gamma * next_value - value[:, t]  # δ_t = r_t + γV(s_{t+1}) − V(s_t)
        now = delta + gamma * lam * next_advantage                      # Â_t = δ_t + γλ Â_{t+1}
        next_value = torch.where(mask[:, t], value[:, t], next_value)   # a masked slot is not there
        next_advantage = torch.where(mask[:, t], now, next_advantage)
        advantage[:, t] = torch.where(mask[:, t], now, 0.0)
    return advantage


# --- tier 2: whole-tensor operations ---

@torch.no_grad()
def gae_torch(value: Tensor, reward: Tensor, mask: Tensor, lam: float | Tensor, *,
              gamma: float = 1.0, bootstrap: Tensor | None = None) -> Tensor:
    """GAE as a blocked scan, O(log T) tensor operations. Arguments and errors as `gae`."""
    lam, bootstrap = _check(value, reward, mask, lam, gamma, bootstrap)
    if value.numel() == 0:
        return torch.zeros_like(value, dtype=lam.dtype)
    final, reward = (reward, None) if reward.dim() == 1 else (0, reward)
    final = final + gamma * bootstrap  # what the last token receives
    if mask.dim() == 1:
        packed = _token_mask(mask, value.shape[1])
        return _gae_packed(value, reward, packed, mask, lam, gamma, final)
    mask, lengths = mask.bool(), mask.bool().sum(1, dtype=torch.int32)
    if not (mask[:, 1:] > mask[:, :-1]).any():  # no token after a masked slot
        return _gae_packed(value, reward, mask, lengths, lam, gamma, final)
    packed = _token_mask(lengths, value.shape[1])  # gaps: push tokens to the left
    value, reward = (None if x is None else x.new_zeros(x.shape).masked_scatter_(packed, x[mask])
                     for x in (value, reward))
    advantage = _gae_packed(value, reward, packed, lengths, lam, gamma, final)
    return torch.zeros_like(advantage).masked_scatter_(mask, advantage[packed])


def _gae_packed(value, reward, mask, lengths, lam, gamma, final, block=16) -> Tensor:
    """Rows without gaps: G_t = x_t + γλ G_{t+1} with x_t = r_t + γ(1−λ) V_{t+1}, Â = G − V."""
    B, T = value.shape
    value = torch.where(mask, value.to(lam.dtype), 0.0)
    G = value.new_zeros(B, -(-T // block) * block)
    torch.mul(value[:, 1:], gamma * (1 - lam)[:, None], out=G[:, :T - 1])   # x_t = γ(1−λ) V_{t+1} …
    if reward is not None:
        G[:, :T] += torch.where(mask, reward.to(lam.dtype), 0.0)            # … + r_t
    last = (lengths.long() - 1).clamp(min=0)[:, None]
    final = torch.where(lengths > 0, final, 0.0).to(lam.dtype)
    G.scatter_add_(1, last, final[:, None])
    _scan_(G.view(B, -1, block), gamma * lam.double())
    return torch.sub(G[:, :T], value, out=value)                            # Â_t = G_t − V_t


def _scan_(x: Tensor, c: Tensor) -> None:
    """In place: y_t = x_t + c y_{t+1} over the last two dimensions of x [B, N, K]; c [B] float64.

    Inside the blocks of K one token after another, all N blocks at once (they lie side by side in
    the transposed copy); then over the N block starts by doubling; then one pass that adds what
    comes from the right. No matrix product, so no TF32 or bf16 switch reaches it; powers of c are
    multiplied, never divided by, so that one that underflows is a harmless 0.
    """
    K = x.shape[2]
    y = x.transpose(1, 2).contiguous()                                  # [B, K, N]
    token, factor = y.unbind(1), c.to(x.dtype)[:, None]
    for t in reversed(range(K - 1)):
        token[t].addcmul_(factor, token[t + 1])                         # y_t = x_t + c y_{t+1}
    start = y[:, 0].clone()
    _double_(start, c[:, None]**K)
    power = c[:, None] ** torch.arange(K, 0, -1, device=x.device)
    y[:, :, :-1].addcmul_(power.to(x.dtype)[:, :, None], start[:, None, 1:])  # + c^{K−t} y_{next}
    x.copy_(y.transpose(1, 2))


def _double_(x: Tensor, c: Tensor) -> None:
    """In place: y_t = x_t + c y_{t+1} along the last dimension; sums of 2, 4, 8, … terms."""
    step = 1
    while step < x.shape[-1]:
        x[..., :-step] += c.to(x.dtype) * x[..., step:]
        c, step = c * c, 2 * step


# --- tier 3: a reverse scan in Triton ---
# Bytes per token, float32 values and a mask (bf16: 2 for each 4 read; lengths: no mask byte):
#   _chunk_kernel  reads V 4 + mask 1, writes two numbers per chunk; not run when a row is one chunk
#   _gae_kernel    reads V 4 + mask 1, writes Â 4; its shifted second read of a block hits the cache
# A reward [B, T] is one more read in each.

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

        The index i counts from the right, so the scan runs forward: compiled reverse scans of
        operators that do not commute have given wrong results in Triton (issue 4362).
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
        raise ValueError("impl: 'triton' was asked for and triton is not installed")
    if not value.is_cuda and isinstance(_gae_kernel, triton.JITFunction):
        raise ValueError("value: expected a CUDA tensor for impl 'triton' (or TRITON_INTERPRET=1 "
                         f"set before the import), found one on {value.device}")
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
    mask = mask.bool().view(torch.uint8) if masked else mask
    chunks, chunk_len = _split(B, T, value.device)
    count = torch.empty(B, chunks, dtype=torch.int32, device=value.device)
    total = torch.empty(B, chunks, dtype=lam.dtype, device=value.device)
    inputs, grid = (value, reward, mask, rows, count, total), (B, chunks)
    mask_strides = mask.stride() if masked else (mask.stride(0), 0)
    strides = (*value.stride(), *reward.stride(), *mask_strides)
    flags = {"REWARD": per_token, "MASK": masked, "BLOCK": BLOCK}
    with torch.cuda.device_of(value):
        if chunks > 1:
            _chunk_kernel[grid](*inputs, T, chunk_len, *strides, **flags)
        _gae_kernel[grid](*inputs, advantage, T, chunk_len, *strides,
                          CHUNKS=triton.next_power_of_2(chunks), **flags)
    return advantage


def _split(B: int, T: int, device: torch.device) -> tuple[int, int]:
    """Chunks per row and tokens per chunk: about four programs for each multiprocessor."""
    cuda = device.type == "cuda"
    programs = 4 * torch.cuda.get_device_properties(device).multi_processor_count if cuda else 8
    blocks = triton.cdiv(T, BLOCK)
    per_chunk = triton.cdiv(blocks, min(blocks, triton.cdiv(programs, B)))
    return triton.cdiv(blocks, per_chunk), per_chunk * BLOCK


# --- advantages without a critic ---

@torch.no_grad()
def group_advantage(reward: Tensor, prompt_id: Tensor, mask: Tensor, *,
                    divide_std: bool = True) -> Tensor:
    """(R − mean_group)/std_group on every token, [B, T]; reward and prompt_id [B]. (GRPO)

    0 in a group of one or of equal rewards. Rows without a token are in no group.
    """
    mask, centred, n, per_group = _centred_in_group(reward, prompt_id, mask)
    std = (per_group(centred**2) / (n - 1).clamp(min=1)).sqrt()
    # assumption: sample standard deviation (n − 1) plus 1e-6
    advantage = centred / (std + 1e-6) if divide_std else centred       # (R − mean)/std
    return torch.where(mask, advantage[:, None], 0.0).to(_dtype(reward))


@torch.no_grad()
def leave_one_out_advantage(reward: Tensor, prompt_id: Tensor, mask: Tensor) -> Tensor:
    """R − mean of the prompt's other responses on every token, [B, T]. (RLOO)

    Ahmadian et al. 2024, 2402.14740. Differs from `group_advantage`: a response is no part of its
    own baseline, which leaves the gradient unbiased, and nothing is divided by a deviation. reward
    and prompt_id [B]. 0 in a group of one or of equal rewards. A row without a token is in no
    group.
    """
    mask, centred, n, _ = _centred_in_group(reward, prompt_id, mask)
    advantage = centred * n / (n - 1).clamp(min=1)  # R − (ΣR − R)/(n − 1) = (R − mean) n/(n − 1)
    return torch.where(mask, advantage[:, None], 0.0).to(_dtype(reward))


@torch.no_grad()
def batch_advantage(reward: Tensor, mask: Tensor) -> Tensor:
    """Return-to-go, whitened over all trainable tokens of the batch, [B, T].

    REINFORCE++, 2501.03262. reward [B] or [B, T]. 0 if all returns are equal or there is one token.
    """
    _check_reward(reward, mask)
    mask = mask.bool()
    r = _token_reward(reward.double(), mask)
    returns = r.flip(1).cumsum(1).flip(1)                               # Σ_{l≥t} r_l
    n = mask.sum()
    mean = torch.where(mask, returns, 0.0).sum() / n.clamp(min=1)
    centred = torch.where(mask, returns - mean, 0.0)
    std = (centred.square().sum() / (n - 1).clamp(min=1)).sqrt()
    # assumption: sample standard deviation (n − 1) plus 1e-6
    return (centred / (std + 1e-6)).to(_dtype(reward))


@torch.no_grad()
def flash_reinforce_advantage(reward: Tensor, mask: Tensor) -> Tensor:
    """R − mean_batch(R) on every token, [B, T]; the mean is over responses. (FlashREINFORCE)"""
    mask, total = _response_reward(reward, mask)
    # assumption: the mean weighs responses, not tokens, alike
    mean = total.sum() / mask.any(1).sum().clamp(min=1)
    return torch.where(mask, (total - mean)[:, None], 0.0).to(_dtype(reward))   # R − mean(R)


@torch.no_grad()
def vine_advantage(step_value: Tensor, step_id: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
    """Â_step = r + V(s') − V(s) on every token of a step, [B, T]. (VinePPO, 2410.01679)

    step_value [B, N]: mean return of independent continuations from each step's start, in the units
    of the reward. step_id [B, T] in [0, N) on trainable tokens. s' is the start of the next step
    that has a trainable token; after the last one V(s') = 0. reward [B] or [B, T].
    """
    _check_reward(reward, mask)
    mask = mask.bool()
    _expect("step_id", step_id, reward, tuple(mask.shape))
    if step_value.dim() != 2 or len(step_value) != len(mask):
        raise ValueError(f"step_value: expected shape ({len(mask)}, steps), "
                         f"found {tuple(step_value.shape)}")
    N = step_value.shape[1]
    step = torch.where(mask, step_id, 0).long()
    if ((step < 0) | (step >= N)).any():
        raise ValueError(f"step_id: expected 0 to {N - 1} on trainable tokens, "
                         f"found {step.min().item()} to {step.max().item()}")
    value = step_value.to(_dtype(step_value))
    seen = torch.zeros(len(mask), N + 1, device=mask.device).scatter_add_(1, step, mask.float()) > 0
    value = torch.where(seen[:, :N], value, 0.0)
    value = torch.cat((value, torch.zeros_like(value[:, :1])), 1)       # V after the last step = 0
    index = torch.where(seen, torch.arange(N + 1, device=mask.device), N)
    following = index.flip(1).cummin(1)[0].flip(1)[:, 1:]  # the next step that is there
    r = _token_reward(reward.to(value.dtype), mask)
    step_reward = torch.zeros_like(value[:, :N]).scatter_add_(1, step, r)
    advantage = step_reward + value.gather(1, following) - value[:, :N]  # Â = r + V(s') − V(s)
    return torch.where(mask, advantage.gather(1, step), 0.0)


# --- shapes and masks ---

def _dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _token_mask(mask: Tensor, T: int) -> Tensor:
    """mask [B, T] or lengths [B] -> bool [B, T]."""
    return mask.bool() if mask.dim() == 2 else torch.arange(T, device=mask.device) < mask[:, None]


def _token_reward(reward: Tensor, mask: Tensor) -> Tensor:
    """[B] goes to the last trainable token; [B, T] passes; 0 on masked slots."""
    if reward.dim() == 1:
        after = mask.flip(1).cumsum(1).flip(1)                          # trainable tokens from t on
        mask, reward = mask & (after == 1), reward[:, None]
    return torch.where(mask, reward, 0.0)


def _response_reward(reward: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """bool mask [B, T] and R [B], 0 in rows without a token.

    In float64, because there the mean of equal float32 rewards is exactly that reward.
    """
    if reward.dim() != 1:
        raise ValueError(f"reward: expected shape (B,), found {tuple(reward.shape)}")
    _check_reward(reward, mask)
    mask = mask.bool()
    return mask, torch.where(mask.any(1), reward.double(), 0.0)


def _centred_in_group(reward: Tensor, prompt_id: Tensor, mask: Tensor
                      ) -> tuple[Tensor, Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """bool mask, R − mean_group [B], the group's size n [B], and x [B] -> its sum over the group.

    A row without a token is in no group, its R − mean_group is 0.
    """
    mask, total = _response_reward(reward, mask)
    _expect("prompt_id", prompt_id, reward, (reward.shape[0],))
    group = torch.unique(prompt_id, return_inverse=True)[1]
    per_group = lambda x: x.new_zeros(len(group)).index_add_(0, group, x)[group]
    n = per_group(mask.any(1).double()).clamp(min=1)
    return mask, torch.where(mask.any(1), total - per_group(total) / n, 0.0), n, per_group


def _expect(name: str, x: Tensor, like: Tensor, *shapes: tuple[int, ...]) -> None:
    if tuple(x.shape) not in shapes:
        raise ValueError(f"{name}: expected shape {' or '.join(map(str, shapes))}, "
                         f"found {tuple(x.shape)}")
    if x.device != like.device:
        raise ValueError(f"{name}: expected a tensor on {like.device}, found one on {x.device}")


def _check_reward(reward: Tensor, mask: Tensor) -> None:
    if mask.dim() != 2:
        raise ValueError(f"mask: expected shape (B, T), found {tuple(mask.shape)}")
    _expect("reward", reward, mask, tuple(mask.shape[:1]), tuple(mask.shape))
    if reward.dim() == 2 and torch.where(mask.bool(), 0, reward).ne(0).any():  # NaN ≠ 0 too
        raise ValueError("reward: expected 0 on masked slots, found another value")


def _check(value: Tensor, reward: Tensor, mask: Tensor, lam: float | Tensor, gamma: float,
           bootstrap: Tensor | None) -> tuple[Tensor, Tensor]:
    """lam [B] and bootstrap [B] in the dtype of the arithmetic, once everything fits together."""
    if value.dim() != 2 or not value.is_floating_point():
        raise ValueError(f"value: expected a float tensor of shape (B, T), found {value.dtype} "
                         f"{tuple(value.shape)}")
    (B, T), dtype = value.shape, _dtype(value)
    _expect("mask", mask, value, (B, T), (B,))
    _expect("reward", reward, value, (B,), (B, T))
    if bootstrap is None:
        bootstrap = torch.zeros(B, device=value.device)
    _expect("bootstrap", bootstrap, value, (B,))
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma: expected a number in [0, 1], found {gamma}")
    inside = (lam >= 0) & (lam <= 1) if isinstance(lam, Tensor) else 0 <= lam <= 1
    if not (inside.all() if isinstance(lam, Tensor) else inside):
        raise ValueError(f"lam: expected numbers in [0, 1], found {lam}")
    lam = torch.as_tensor(lam, dtype=dtype, device=value.device)
    lam = lam.expand(B) if lam.dim() == 0 else lam
    _expect("lam", lam, value, (B,))
    if mask.dim() == 1:
        if mask.dtype == torch.bool or mask.is_floating_point():
            raise ValueError(f"mask: expected integer lengths for shape ({B},), found {mask.dtype}")
        if ((mask < 0) | (mask > T)).any():
            raise ValueError(f"mask: expected lengths in [0, {T}], found {mask.tolist()}")
    if reward.dim() == 2:
        _check_reward(reward, _token_mask(mask, T))
    return lam, bootstrap.to(dtype)


# --- demo and benchmark ---

def demo() -> None:
    """One right and one wrong response, token by token."""
    value = torch.tensor([[0.0, 0.2, 0.1, 0.6, 0.7, 0.9], [0.0, 0.2, 0.3, -0.5, -0.8, 0.0]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
    reward = torch.tensor([1.0, -1.0])
    lam = adaptive_lambda(mask.sum(1))
    actor, critic = gae(value, reward, mask, lam), gae(value, reward, mask, 1.0)
    delta, r = gae(value, reward, mask, 0.0), _token_reward(reward, mask.bool())   # λ = 0: Â = δ
    free = {"group": group_advantage(reward, torch.zeros(2), mask),
            "rloo": leave_one_out_advantage(reward, torch.zeros(2), mask),
            "batch": batch_advantage(reward, mask),
            "flash": flash_reinforce_advantage(reward, mask)}
    for b in range(2):
        print(f"response {b + 1}: R = {reward[b]:+.0f}, T = {mask[b].sum()}, λ_actor {lam[b]:.3f}")
        print("   t     r_t     V_t     δ_t  Â λ_actor   Â λ=1   R−V_t" +
              "".join(f"{name:>8}" for name in free))
        for t in range(mask[b].sum()):
            row = (r, value, delta, actor, critic, reward[:, None] - value, *free.values())
            cells = [f"{x[b, t]:+{11 if k == 3 else 8}.3f}" for k, x in enumerate(row)]
            print(f"{t:4}" + "".join(cells))
        print()
    print("λ = 1 gives R − V(s_t): every token is credited with the whole future. λ_actor weighs")
    print("the near future more: the step where V falls or rises stands out. Without a critic all")
    print("tokens of a response get the same advantage.")


def _milliseconds(f, device: str, repeats: int) -> float:
    """Median wall time of one call."""
    times = []
    for k in range(repeats + 3):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        f()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1e3 * sorted(times[min(3, repeats):])[repeats // 2]


def bench(repeats: int) -> None:
    """Loop, torch and (on a GPU) the kernel; useful bytes: V and mask read, Â written, once."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    threads = f"{torch.get_num_threads()} threads"
    print(f"{device} ({torch.cuda.get_device_name() if device == 'cuda' else threads}), torch "
          f"{torch.__version__}, median of {repeats}; share = useful bytes/s over those of a copy "
          "of as many bytes")
    print(f"{'shape':>11} {'impl':>7} {'ms':>9} {'MB':>7} {'GB/s':>7} {'copy GB/s':>9}  share")
    for B, T in ((16, 2048), (64, 8192), (8, 32768)):
        value = torch.randn(B, T, device=device)
        lengths = torch.randint(T // 2, T + 1, (B,), device=device)
        mask, reward = _token_mask(lengths, T), torch.ones(B, device=device)
        lam = adaptive_lambda(lengths)
        size = B * T * (4 + 1 + 4)
        source = torch.zeros(size // 2, dtype=torch.uint8, device=device)   # read half, write half
        target = torch.empty_like(source)
        copy = size / _milliseconds(lambda: target.copy_(source), device, repeats) / 1e6
        for impl in ("loop", "torch") + (("triton",) if device == "cuda" and triton else ()):
            run = lambda: gae(value, reward, mask, lam, impl=impl)
            ms = _milliseconds(run, device, 1 if impl == "loop" else repeats)
            rate = size / ms / 1e6
            print(f"{f'{B}×{T}':>11} {impl:>7} {ms:9.3f} {size / 1e6:7.2f} {rate:7.2f} {copy:9.2f} "
                  f"{rate / copy:6.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="length-adaptive GAE: demo, or --bench")
    parser.add_argument("--bench", action="store_true", help="time the tiers on three shapes")
    parser.add_argument("--repeats", type=int, default=50, help="timed calls per figure")
    args = parser.parse_args()
    bench(args.repeats) if args.bench else demo()
