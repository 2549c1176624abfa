"""Every equation by hand first, then as a theorem, then on the inputs that break such code.

    python -m pytest -q test_all.py            all, on a CPU; no network, fixed seeds
    python -m pytest -q test_all.py -k gae     one file's section

The kernels run in Triton's interpreter, and are compiled ahead of time for sm_80 and sm_90.
"""
import argparse
import copy
import functools
import itertools
import json
import math
import os
import pickle
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

if not torch.cuda.is_available():  # before anything imports triton, as transformers does
    os.environ.setdefault("TRITON_INTERPRET", "1")

from transformers import (
    AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM,
    MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM,
)

import actor_loss
import critic as critic_file
import gae
import genac
import rollout
import train
import value_pretrain as vp
from actor_loss import (
    cispo_loss, dis_loss, flash_reinforce_loss, group_expectation_weight, grpo_loss, linear_entropy,
    linear_token_logp, mismatch_mask, mismatch_ratio, nll_loss, ppo_clip_loss, token_logp,
)
from critic import (
    Critic, ValueHead, clip_critic_grad_, explained_variance, explained_variance_from, grad_norms,
    init_value_head_, value_loss,
)
from daps import (
    DAPS, accept, accept_prob, fuse, greso_accept_prob, mixed_groups, nearest_half, ramp,
    success_from_value, uniform_streak,
)
from genac import (
    COMPACT, ENGLISH, GenCritic, RunningSuccess, State, Template, critic_prompt, parse_score,
    reinforce_loss, reply_advantage, segment_starts, segment_values, sft_loss, spread,
    value_reward,
)
from rollout import (
    VERIFIERS, Batch, Problem, canonical, collect, concatenate, encode_prompt, extract_boxed,
    generate, load_problems, math_reward, math_verify_reward, number_reward, positions, response,
    take,
)


# ------------------------------------------------------------------------------------------ gae.py


_TIERS = [pytest.param(gae.gae_loop, id="loop"), pytest.param(gae.gae_torch, id="torch")]
if gae.triton is not None:
    _TIERS.append(pytest.param(gae.gae_triton, id="triton"))
_FAST = _TIERS[1:]


def _gae_device(tier):
    return "cuda" if tier is getattr(gae, "gae_triton") and torch.cuda.is_available() else "cpu"


def _gae_run(tier, value, reward, mask, lam, **kwargs):
    """The tier on its device, the answer back on the CPU."""
    move = lambda x: x.to(_gae_device(tier)) if isinstance(x, torch.Tensor) else x
    return tier(*map(move, (value, reward, mask, lam)),
                **{name: move(x) for name, x in kwargs.items()}).cpu()


def _gae_case(B, T, seed=0, dtype=torch.float64):
    """Random values, rewards, a mask with gaps (row 0 empty, row 1 full), λ per row."""
    g = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.rand(*shape, generator=g, dtype=torch.float64)
    mask = rand(B, T) < 0.7
    mask[0], mask[1] = False, True
    value = torch.where(mask, 2 * rand(B, T) - 1, torch.nan).to(dtype)
    reward = torch.where(mask, rand(B, T), 0.0).to(dtype)
    return value, reward, mask, rand(B), rand(B)


@pytest.mark.parametrize("tier", _TIERS)
def test_gae_by_hand(tier):
    """Small rows worked out by hand: NaN behind the end, a gap, λ per row, a bootstrap."""
    t = torch.tensor
    near = lambda a, b: torch.testing.assert_close(a, t(b), atol=1e-6, rtol=1e-5)
    for bad in (100.0, torch.nan):
        near(_gae_run(tier, t([[0., 0, bad]]), t([[0., 1, 0]]), t([[1, 1, 0]]), .95), [[.95, 1, 0]])
    gap = t([[.2, 9, -9, .4, .6]])
    near(_gae_run(tier, gap, t([1.]), t([[1, 0, 0, 1, 1]]), .95), [[.751, 0, 0, .58, .4]])
    lam = gae.adaptive_lambda(t([3, 2]))
    rows = _gae_run(tier, t([[.5, .5, .5], [.2, -.2, 7]]), t([1., -1]),
                    t([[1., 1, 1], [1, 1, 0]]), lam)
    near(rows[1], [-.933333, -.8, 0])
    ones, cut = torch.ones(1, 3), t([[.1, .2, .3]])
    near(_gae_run(tier, cut, t([0.]), ones, .9, bootstrap=t([.5])), [[.352, .28, .2]])
    near(_gae_run(tier, cut, torch.zeros(1, 3), ones, .9, bootstrap=t([.5])), [[.352, .28, .2]])
    near(_gae_run(tier, cut, t([0.]), ones, .9), [[-.053, -.17, -.3]])


def test_gae_adaptive_lambda():
    """λ = 1 − 1/(αT): 0 for T = 0, never negative, below 1 even where float32 would round to 1."""
    lam = gae.adaptive_lambda(torch.tensor([0, 1, 2, 10]))
    torch.testing.assert_close(lam, torch.tensor([0, 1 / 3, 2 / 3, 14 / 15]))
    assert gae.adaptive_lambda(torch.tensor([10]), alpha=0.05) == 0
    assert gae.adaptive_lambda(torch.tensor([10**9])) < 1
    assert gae.adaptive_lambda(torch.tensor([3.0], dtype=torch.float64)).dtype == torch.float64
    with pytest.raises(ValueError, match="lengths.*-1"):
        gae.adaptive_lambda(torch.tensor([-1]))
    with pytest.raises(ValueError, match="alpha"):
        gae.adaptive_lambda(torch.tensor([1]), alpha=0)


@pytest.mark.parametrize("tier", _FAST)
@pytest.mark.parametrize("T", [1, 2, 31, 63, 64, 65, 130, 300])
def test_gae_equals_loop(tier, T, monkeypatch):
    """Any T, gaps, NaN in masked slots, λ per row, γ, bootstrap: equal to the loop in float64."""
    monkeypatch.setattr(gae, "BLOCK", 32)
    value, reward, mask, lam, boot = _gae_case(4, T, seed=T)
    lam[2] = 0
    for r, gamma in ((reward, 0.97), (reward.sum(1), 1.0)):
        want = gae.gae_loop(value, r, mask, lam, gamma=gamma, bootstrap=boot)
        got = _gae_run(tier, value, r, mask, lam, gamma=gamma, bootstrap=boot)
        torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-10)
        assert not got[0].any() and got[1].all() and not got[~mask].any()


@pytest.mark.parametrize("tier", _TIERS)
def test_gae_lengths_are_a_prefix_mask(tier, monkeypatch):
    """lengths [B] mean the mask whose first lengths[b] slots are true; NaN behind has no effect."""
    monkeypatch.setattr(gae, "BLOCK", 32)
    lengths, T = torch.tensor([0, 1, 69, 70]), 70
    mask = torch.arange(T) < lengths[:, None]
    value, _, _, lam, boot = _gae_case(4, T, seed=3)
    value = torch.where(mask, value.nan_to_num(0.3), torch.nan)
    reward = torch.tensor([torch.nan, 1, -1, 1], dtype=torch.float64)
    want = gae.gae_loop(value, reward, mask, lam, bootstrap=boot)
    got = _gae_run(tier, value, reward, lengths, lam, bootstrap=boot)
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-10)
    assert not got[0].any()
    got = _gae_run(tier, value, reward, mask, lam, bootstrap=boot)
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("tier", _TIERS)
def test_gae_gap_equals_removal(tier):
    """A gap is skipped: the advantages are those of the row with the gap cut out."""
    value, reward, mask, lam, boot = _gae_case(2, 40, seed=5)
    keep = mask[1].clone()
    keep[5:9] = keep[20:33] = False
    whole = _gae_run(tier, value[1:], (reward[1] * keep)[None], keep[None], 0.9)
    cut = gae.gae_loop(value[1:, keep], reward[1:, keep], torch.ones(1, int(keep.sum())), 0.9)
    torch.testing.assert_close(whole[:, keep], cut)


@pytest.mark.parametrize("tier", _TIERS)
def test_gae_lambda_one_is_the_return_minus_value(tier):
    """γ = λ = 1: R − V(s_t); λ = 0: δ_t."""
    value, reward = torch.rand(2, 90, dtype=torch.float64), torch.tensor([1.0, -1.0]).double()
    one = _gae_run(tier, value, reward, torch.ones(2, 90), 1.0)
    torch.testing.assert_close(one, reward[:, None] - value)
    delta = torch.cat((value[:, 1:], reward[:, None]), 1) - value
    torch.testing.assert_close(_gae_run(tier, value, reward, torch.ones(2, 90), 0.0), delta)


@pytest.mark.parametrize("tier", _FAST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gae_low_precision_and_strides(tier, dtype, monkeypatch):
    """Non-contiguous float32, bf16 and fp16 values: float32 results of the rounded values."""
    monkeypatch.setattr(gae, "BLOCK", 64)
    value, reward, mask, lam, boot = _gae_case(3, 150, seed=7, dtype=dtype)
    strided = lambda x: x.t().contiguous().t()                    # column-major
    wide = torch.full((3, 300), torch.nan, dtype=dtype)
    wide[:, ::2] = value
    want = gae.gae_loop(value.double(), reward.double(), mask, lam.float().double())
    got = _gae_run(tier, wide[:, ::2], strided(reward), strided(mask), lam.float())
    assert got.dtype == torch.float32 and got.is_contiguous()
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


def test_gae_long_rows_do_not_underflow():
    """λ = .95 at T = 8,192, where λᵀ is 0 in float32: finite, right; also λ near 1, T = 32,768."""
    for T, lam in ((8192, 0.95), (32768, 1 - 1 / (1.5 * 32768))):
        lam = torch.tensor(lam)                                   # the same float32 λ for both
        value, reward = torch.randn(1, T, generator=torch.Generator().manual_seed(1)), torch.ones(1)
        want, next_value, advantage = [], 1.0, 0.0                # R in place of V(s_T)
        for v in reversed(value[0].double().tolist()):
            advantage = next_value - v + lam.item() * advantage
            next_value = v
            want.append(advantage)
        got = gae.gae(value, reward, torch.ones(1, T), lam, impl="torch")
        want = torch.tensor(want[::-1], dtype=torch.float64)
        torch.testing.assert_close(got[0].double(), want, atol=2e-5, rtol=2e-5)


@pytest.mark.skipif(gae.triton is None, reason="triton is not installed")
def test_gae_split_does_not_change_the_result(monkeypatch):
    """One program per row or many: the same advantages."""
    monkeypatch.setattr(gae, "BLOCK", 32)
    value, reward, mask, lam, boot = _gae_case(3, 200, seed=9)
    got = []
    for chunks, length in ((1, 224), (2, 128), (4, 64), (7, 32)):
        monkeypatch.setattr(gae, "_split", lambda *_: (chunks, length))
        got.append(_gae_run(gae.gae_triton, value, reward, mask, lam, bootstrap=boot))
    for other in got[1:]:
        torch.testing.assert_close(other, got[0], atol=1e-12, rtol=1e-10)


def test_gae_no_gradient_and_no_lower_precision():
    """Advantages carry no gradient; autocast and matmul-precision switches do not change them."""
    value = torch.randn(2, 200, requires_grad=True)
    args = torch.ones(2), torch.ones(2, 200), 0.99
    want = gae.gae(value, *args)
    assert not want.requires_grad
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(gae.gae(value, *args), want)
    finally:
        torch.set_float32_matmul_precision(before)


def test_gae_empty_and_all_masked():
    """No token at all: zeros, whatever stands there."""
    value = torch.full((2, 5), torch.nan)
    for impl in ("loop", "torch"):
        got = gae.gae(value, torch.tensor([torch.nan, 1.0]), torch.zeros(2, 5), 0.9, impl=impl)
        assert torch.equal(got, torch.zeros(2, 5))
        for B, T in ((2, 0), (0, 5)):
            none = gae.gae(value[:B, :T], torch.ones(B), torch.ones(B, T), 0.9, impl=impl)
            assert none.shape == (B, T)


@pytest.mark.parametrize("name, change", [
    ("value", {"value": torch.zeros(3)}), ("value", {"value": torch.zeros(2, 3, dtype=torch.long)}),
    ("reward", {"reward": torch.zeros(3)}), ("mask", {"mask": torch.ones(2, 4)}),
    ("mask", {"mask": torch.tensor([1, 4])}), ("mask", {"mask": torch.tensor([True, True])}),
    ("lam", {"lam": 1.1}), ("lam", {"lam": torch.tensor([0.5, -0.1])}), ("lam", {"lam": torch.nan}),
    ("lam", {"lam": torch.ones(3)}), ("gamma", {"gamma": 2.0}),
    ("bootstrap", {"bootstrap": torch.ones(3)}),
    ("impl", {"impl": "fast"}),
    ("reward", {"reward": torch.tensor([[0, 1.0, 0], [0, 0, 1.0]])}),
    ("reward", {"reward": torch.tensor([[0, 1.0, 0], [0, 0, torch.nan]])}),
])
def test_gae_bad_input(name, change):
    """A wrong argument is named in one sentence; a reward on a masked slot is never dropped."""
    good = {"value": torch.zeros(2, 3), "reward": torch.zeros(2), "lam": 0.9,
            "mask": torch.tensor([[1, 1, 1], [1, 1, 0]])}
    gae.gae(**good)
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        gae.gae(**(good | change))


def test_gae_group_advantage():
    """(R − mean)/(std + 1e-6) by group; 0 for one or equal rewards; an empty row is no member."""
    reward = torch.tensor([1., -1, 1, 1, .1, .1, .1, torch.nan])
    group = torch.tensor([7, 7, 7, 3, 9, 9, 9, 7])
    mask = torch.ones(8, 2)
    mask[7] = 0
    mask[0, 1] = 0
    a = gae.group_advantage(reward, group, mask)
    std = torch.tensor([1., -1, 1]).std() + 1e-6
    torch.testing.assert_close(a[:3, 0], torch.tensor([2 / 3, -4 / 3, 2 / 3]) / std)
    assert a[0, 1] == 0 and a[1, 1] == a[1, 0] and not a[3:].any()
    plain = gae.group_advantage(reward, group, mask, divide_std=False)
    torch.testing.assert_close(plain[:3, 0], torch.tensor([2 / 3, -4 / 3, 2 / 3]))
    with pytest.raises(ValueError, match="prompt_id"):
        gae.group_advantage(reward, group[:2], mask)


def test_gae_batch_advantage():
    """Return-to-go whitened over tokens: mean 0, std 1; 0 for one token, equal rewards, none."""
    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]])
    a = gae.batch_advantage(torch.tensor([1., -1, torch.nan]), mask)
    std = torch.tensor([1., 1, -1, -1]).std()
    torch.testing.assert_close(a, torch.tensor([[1., 1, 0], [-1, 0, -1], [0, 0, 0]]) / std)
    dense = torch.tensor([[.5, .5, 0], [2, 0, -3], [0, 0, 0]])
    a, tokens = gae.batch_advantage(dense, mask), torch.tensor([1, .5, -1, -3])
    torch.testing.assert_close(a[mask.bool()], (tokens - tokens.mean()) / tokens.std())
    for few in (torch.tensor([[0, 1, 0]]), torch.zeros(1, 3), torch.ones(1, 3)):
        assert torch.equal(gae.batch_advantage(torch.tensor([.1]), few), torch.zeros(1, 3))
    with pytest.raises(ValueError, match="reward"):
        gae.batch_advantage(torch.ones(3, 3), mask)


def test_gae_flash_reinforce_advantage():
    """R − mean over the responses that have a token, not over tokens; 0 for equal rewards."""
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    a = gae.flash_reinforce_advantage(torch.tensor([1., 0, torch.nan]), mask)
    assert torch.equal(a, torch.tensor([[.5, .5, .5], [-.5, 0, 0], [0, 0, 0]]))
    assert not gae.flash_reinforce_advantage(torch.full((3,), .1), torch.ones(3, 2)).any()
    with pytest.raises(ValueError, match="reward"):
        gae.flash_reinforce_advantage(torch.ones(3, 3), torch.ones(3, 3))


def test_gae_vine_advantage():
    """V(next step) − V(step), R − V on the last; a step without trainable tokens is skipped."""
    value = torch.tensor([[.1, .5, .3], [.2, torch.nan, .6]])
    step = torch.tensor([[0, 0, 1, 2, -5], [0, 1, 1, 2, 2]])
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 0, 0, 1, 1]])
    a = gae.vine_advantage(value, step, torch.tensor([1., -1]), mask)
    want = torch.tensor([[.4, .4, -.2, .7, 0], [.4, 0, 0, -1.6, -1.6]])
    torch.testing.assert_close(a, want)
    with pytest.raises(ValueError, match="step_id"):
        gae.vine_advantage(value, step + 1, torch.ones(2), mask)
    with pytest.raises(ValueError, match="step_value"):
        gae.vine_advantage(value[:1], step, torch.ones(2), mask)


def test_gae_vine_equals_gae_at_lambda_zero_between_steps():
    """One token per step: VinePPO is GAE with λ = 0 on the step values."""
    value, mask = torch.rand(2, 6), torch.ones(2, 6)
    a = gae.vine_advantage(value, torch.arange(6).expand(2, 6), torch.tensor([1., -1]), mask)
    torch.testing.assert_close(a, gae.gae_loop(value, torch.tensor([1., -1]), mask, 0.0))


_GAE_COMPILE = """
import os, re, subprocess, tempfile
import triton, gae
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
pointers = {"row_ptr": "*fp32", "count_ptr": "*i32", "total_ptr": "*fp32", "advantage": "*fp32"}
for kernel in (gae._chunk_kernel, gae._gae_kernel):
    for arch in (80, 90):
        for dtype, dense in (("*fp32", True), ("*bf16", False)):
            flags = {"REWARD": dense, "MASK": dense, "BLOCK": gae.BLOCK, "CHUNKS": 32}
            constants = {k: v for k, v in flags.items() if k in kernel.arg_names}
            constants |= {"value_t": 1, "reward_t": 1, "mask_t": 1}
            types = pointers | {"value": dtype, "reward": dtype, "mask": "*u8" if dense else "*i64"}
            signature = {k: "constexpr" if k in constants else types.get(k, "i32")
                         for k in kernel.arg_names}
            built = triton.compile(ASTSource(fn=kernel, signature=signature, constexprs=constants),
                                   target=GPUTarget("cuda", arch, 32))
            with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
                f.write(built.asm["cubin"]); f.flush()
                text = subprocess.run([tool, "-res-usage", f.name], capture_output=True, text=True)
            used = dict(re.findall(r"(REG|STACK|LOCAL|SHARED):(\\d+)", text.stdout))
            print(kernel.__name__, arch, dtype, used["REG"], used["STACK"], used["LOCAL"])
"""


@pytest.mark.skipif(gae.triton is None, reason="triton is not installed")
def test_gae_kernels_compile_without_spills():
    """Both kernels compile for sm_80 and sm_90 without a GPU: no spills, at most 128 registers."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    here = os.path.dirname(os.path.abspath(gae.__file__))
    env["PYTHONPATH"] = os.pathsep.join((here, env.get("PYTHONPATH", "")))
    run = subprocess.run([sys.executable, "-c", _GAE_COMPILE], env=env, capture_output=True,
                         text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    lines = [line.split() for line in run.stdout.splitlines()]
    assert len(lines) == 8, run.stdout
    for *_, registers, stack, local in lines:
        assert 0 < int(registers) <= 128 and stack == local == "0", run.stdout


def test_gae_leave_one_out_by_hand():
    """Rewards 1, −1, 1: the others' means are 0, 1, 0, so 1, −2, 1; one or equal rewards: 0."""
    reward = torch.tensor([1., -1, 1, 1, .1, .1, .1, torch.nan])
    group = torch.tensor([7, 7, 7, 3, 9, 9, 9, 7])
    mask = torch.ones(8, 2)
    mask[7] = 0  # in no group
    mask[0, 1] = 0
    a = gae.leave_one_out_advantage(reward, group, mask)
    torch.testing.assert_close(a[:3], torch.tensor([[1., 0], [-2, -2], [1, 1]]))
    assert not a[3:].any() and a.dtype == torch.float32
    none = gae.leave_one_out_advantage(reward, group, torch.zeros(8, 2))
    assert torch.equal(none, torch.zeros(8, 2))


def test_gae_leave_one_out_is_the_loop():
    """Each response's reward minus a plain mean over the rows that share its id, in float64."""
    g = torch.Generator().manual_seed(0)
    reward = torch.randn(40, generator=g, dtype=torch.float64)
    group = torch.randint(9, (40,), generator=g)
    mask = torch.rand(40, 3, generator=g) < .6
    a = gae.leave_one_out_advantage(reward, group, mask)
    assert a.dtype == torch.float64
    for i in range(40):
        others = [reward[j] for j in range(40) if j != i and group[j] == group[i] and mask[j].any()]
        want = reward[i] - sum(others) / len(others) if others else 0.
        torch.testing.assert_close(a[i], want * mask[i].double())


def test_gae_leave_one_out_baseline_is_independent():
    """E[Â ∇ log π] is the exact gradient; with its own reward in the mean it is (n − 1)/n of it."""
    n, p = 3, torch.tensor(.3, dtype=torch.float64)  # π(right) = p = σ(θ), so ∇ log π is 1 − p or
    outcomes = torch.tensor(list(itertools.product([1., -1], repeat=n)))  # −p, ∇ E[R] = 2p(1 − p)
    chance = torch.where(outcomes > 0, p, 1 - p).prod(1)
    score = torch.where(outcomes > 0, 1 - p, -p)
    rows, ids = outcomes.double().flatten(), torch.arange(2**n).repeat_interleave(n)
    ones = torch.ones(len(rows), 1)
    for a, share in ((gae.leave_one_out_advantage(rows, ids, ones), 1),
                     (gae.group_advantage(rows, ids, ones, divide_std=False), (n - 1) / n)):
        mean = (chance * (a.view(-1, n) * score).mean(1)).sum().item()
        assert mean == pytest.approx(share * 2 * .3 * .7, abs=1e-12)


def test_gae_leave_one_out_refuses():
    """Another shape of prompt_id, and a reward per token, are named."""
    with pytest.raises(ValueError, match="prompt_id"):
        gae.leave_one_out_advantage(torch.ones(3), torch.ones(2), torch.ones(3, 2))
    with pytest.raises(ValueError, match="reward"):
        gae.leave_one_out_advantage(torch.ones(3, 2), torch.ones(3), torch.ones(3, 2))


# --------------------------------------------------------------------------------------- critic.py


def _critic_config():
    from transformers import LlamaConfig
    return LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                       num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64)


def _critic_tiny(dtype=torch.float32, std=None):
    from transformers import AutoModel
    torch.manual_seed(0)
    critic = Critic(AutoModel.from_config(_critic_config()).to(dtype))
    init_value_head_(critic.head, std)
    return critic


def _critic_case(B=5, T=7, seed=0):
    """value, target, mask with gaps and an empty row, old values; all float64."""
    g = torch.Generator().manual_seed(seed)
    value, old = torch.randn(2, B, T, generator=g, dtype=torch.float64)
    target = torch.randint(2, (B,), generator=g).double() * 2 - 1
    mask = torch.rand(B, T, generator=g) < .7
    mask[1] = False
    return value.requires_grad_(), target, mask, old


def _critic_with_gradient(head=3.0, backbone=4.0):
    """A critic whose head and backbone have gradients of the norms given."""
    critic = _critic_tiny()
    for part, norm in ((critic.head, head), (critic.backbone, backbone)):
        grads = [torch.randn_like(p) for p in part.parameters()]
        scale = norm / math.sqrt(sum(g.square().sum().item() for g in grads))
        for p, g in zip(part.parameters(), grads):
            p.grad = g * scale
    return critic


def test_critic_value_loss_by_hand():
    """Squared errors [1,1,1,1] and [9] give 1.3 in one call and in two with the global count."""
    value, target = torch.tensor([[1., 1, 1, 1], [3, 0, 0, 0]]), torch.zeros(2)
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    loss, stats = value_loss(value, target, mask)
    halves = [value_loss(value[i:i + 1], target[i:i + 1], mask[i:i + 1], 5)[0] for i in (0, 1)]
    assert loss.item() == pytest.approx(1.3) and sum(halves).item() == pytest.approx(1.3)
    assert stats["loss"][0].item() == 6.5 and stats["loss"][1].item() == 5
    assert value_loss(value, target, mask, torch.tensor(10))[0].item() == pytest.approx(.65)


@pytest.mark.parametrize("old, v, loss, gradient, clipped", [
    (5., 1., 40.5, -9., 0), (1., 5., 38.72, 0., 1)])
def test_critic_value_clip_by_hand(old, v, loss, gradient, clipped):
    """c = .2, R = 10: moving away keeps the plain gradient, moving past c toward R has none."""
    value = torch.tensor([[v]], dtype=torch.float64, requires_grad=True)
    got, stats = value_loss(value, torch.tensor([10.]), torch.ones(1, 1),
                            old_value=torch.tensor([[old]], dtype=torch.float64), clip=.2)
    got.backward()
    assert got.item() == pytest.approx(loss) and value.grad.item() == pytest.approx(gradient)
    assert stats["clip_share"][0].item() == clipped


@pytest.mark.parametrize("clip", [None, .3])
@pytest.mark.parametrize("wide", [False, True])
def test_critic_value_loss_is_the_loop(clip, wide):
    """Loss, gradient and stats equal a loop over the kept tokens in float64."""
    value, target, mask, old = _critic_case()
    loss, stats = value_loss(value, target[:, None].expand(5, 7) if wide else target, mask.int(),
                             old_value=old, clip=clip)
    loss.backward()
    total, gradient, clipped, n = 0., torch.zeros(5, 7, dtype=torch.float64), 0, int(mask.sum())
    for b, t in mask.nonzero().tolist():
        V, R, V_old = value[b, t].item(), target[b].item(), old[b, t].item()
        near = V_old + min(max(V - V_old, -(clip or 9e9)), clip or 9e9)
        dead = (near - R) ** 2 > (V - R) ** 2 + 1e-12
        total, clipped = total + .5 * max((V - R) ** 2, (near - R) ** 2), clipped + dead
        gradient[b, t] = 0 if dead else (V - R) / n
    assert loss.dtype == torch.float64 and loss.item() == pytest.approx(total / n, abs=1e-14)
    torch.testing.assert_close(value.grad, gradient, rtol=0, atol=1e-14)
    error = (value - target[:, None]).detach()[mask]
    assert (clip is None) == (clipped == 0) and stats["clip_share"][0] == clipped
    assert stats["error"][0].item() == pytest.approx(error.sum().item())
    assert stats["error_sq"][0].item() == pytest.approx(error.square().sum().item())
    assert all(count == n and not x.requires_grad for x, count in stats.values())


@pytest.mark.parametrize("moved", [0., .09])
def test_critic_value_loss_within_the_range_is_unclipped(moved):
    """Where |V − V_old| < c, loss and gradient are the plain ones to the bit, none is clipped."""
    value, target, mask, old = _critic_case(B=99)
    value = value.detach().float().requires_grad_()
    old = value.detach() + moved * torch.tanh(old)
    target = 0 * target  # a return of ±1 would round the last bits away
    loss, stats = value_loss(value, target, mask, old_value=old, clip=.1)
    plain = value_loss(value, target, mask)[0]
    assert loss == plain and stats["clip_share"][0] == 0
    assert torch.equal(*(torch.autograd.grad(x, value)[0] for x in (loss, plain)))


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -1e9])
def test_critic_masked_junk_reaches_nothing(junk):
    """Whatever stands in masked slots: same loss, stats and EV, zero gradient there, all finite."""
    value, target, mask, old = _critic_case()
    wide = target[:, None].expand(5, 7)

    def run(fill):
        v = value.detach().masked_fill(~mask, fill).requires_grad_()
        R, V_old = wide.masked_fill(~mask, fill), old.masked_fill(~mask, fill)
        loss, stats = value_loss(v, R, mask, old_value=V_old)
        loss.backward()
        return loss, v.grad, [x for x, _ in stats.values()], explained_variance(v, R, mask)

    torch.testing.assert_close(run(junk), run(0.0), rtol=0, atol=0)
    assert (run(junk)[1][~mask] == 0).all()
    row = target.masked_fill(~mask.any(1), junk)  # the return of a row without a trainable token
    assert value_loss(value, row, mask)[0] == value_loss(value, target, mask)[0]


@pytest.mark.parametrize("shape", [(2, 3), (1, 1), (0, 4), (2, 0)])
def test_critic_all_masked(shape):
    """Nothing trainable: loss 0, zero finite gradient, explained variance NaN."""
    value = torch.full(shape, float("nan"), requires_grad=True)
    mask = torch.zeros(shape)
    loss, stats = value_loss(value, torch.ones(shape[0]), mask, old_value=value.detach())
    loss.backward()
    assert loss == 0 and (value.grad == 0).all()
    assert math.isnan(explained_variance(value, torch.ones(shape[0]), mask))
    assert math.isnan(explained_variance_from(stats))


@pytest.mark.parametrize("parts", [2, 4])
def test_critic_micro_batches_add_up(parts):
    """1, 2 or 4 micro-batches of any size and width: the same gradient, and EV from sums."""
    critic = _critic_tiny(torch.float64, std=.5)
    tokens = torch.randint(32, (6, 9), generator=torch.Generator().manual_seed(1))
    length = torch.tensor([9, 3, 8, 1, 5, 2])
    mask = torch.arange(9) < length[:, None]
    R = torch.tensor([1., -1, -1, 1, -1, 1])

    def run(rows):
        critic.zero_grad()
        sums = {}
        for r in rows:
            T = int(length[r].max())
            m = mask[r, :T]
            loss, stats = value_loss(critic(tokens[r, :T], m), R[r], m, mask.sum())
            loss.backward()
            for name, (x, n) in stats.items():
                s, k = sums.get(name, (0., 0))
                sums[name] = (s + x.item(), k + n.item())
        return [p.grad.clone() for p in critic.parameters()], sums

    whole, sums = run([torch.arange(6)])
    split, split_sums = run(torch.arange(6).tensor_split(parts)[::-1])
    torch.testing.assert_close(split, whole, rtol=0, atol=1e-12)
    want = explained_variance(critic(tokens, mask), R, mask)
    for s in (sums, split_sums):
        assert explained_variance_from(s) == pytest.approx(want, abs=1e-12)


def test_critic_gradients_of_head_and_backbone():
    """∇_w = Σ e_t h_t and ∇_h = e_t w, against autograd in float64."""
    head = ValueHead(6, 1, bias=False, dtype=torch.float64)
    h = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    R, mask = torch.tensor([1., -1]), torch.ones(2, 5)
    value = head(h)[..., 0]
    value_loss(value, R, mask)[0].backward()
    e, w = (value - R[:, None]).detach() / 10, head.weight.detach()[0]
    torch.testing.assert_close(head.weight.grad[0], sum(e[b, t] * h[b, t].detach()
                                                        for b in range(2) for t in range(5)))
    for b, t in mask.nonzero().tolist():
        torch.testing.assert_close(h.grad[b, t], e[b, t] * w)


def test_critic_head_stays_float32():
    """Under a bf16 backbone, after .to(bfloat16), and under autocast, V is hᵀw in float32."""
    tokens, attention = torch.arange(10).view(2, 5), torch.ones(2, 5, dtype=torch.bool)
    late = _critic_tiny()
    w = late.head.weight.detach().clone()
    late = late.to(torch.bfloat16)
    assert late.backbone.embed_tokens.weight.dtype == torch.bfloat16
    assert torch.equal(late.head.weight, w)  # not even rounded on the way
    for critic in (late, _critic_tiny(torch.bfloat16), _critic_tiny().half()):
        assert critic.head.weight.dtype == torch.float32
    for dtype, context in ((torch.bfloat16, False), (torch.float32, True)):
        critic = _critic_tiny(dtype, std=1.)
        with torch.autocast("cpu", torch.bfloat16, enabled=context):
            hidden = critic.backbone(tokens).last_hidden_state
            value = critic(tokens, attention)
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, hidden.float() @ critic.head.weight[0], rtol=0, atol=1e-5)
    assert _critic_tiny().double()(tokens, attention).dtype == torch.float64
    assert _critic_tiny(torch.float64).head.weight.dtype == torch.float64


def test_critic_sees_the_past_and_no_padding():
    """V is causal, does not depend on padding on either side, is 0 there, gradients stay finite."""
    critic = _critic_tiny(torch.float64, std=1.)
    alone = critic(torch.tensor([[5, 2, 6, 7]]), torch.ones(1, 4))
    tokens = torch.tensor([[2, 2, 5, 2, 6, 7, 2], [9, 8, 7, 6, 5, 4, 3]])
    attention = torch.tensor([[0, 0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1]], dtype=torch.bool)
    value = critic(tokens, attention)
    torch.testing.assert_close(value[0, 2:6], alone[0], rtol=0, atol=1e-12)
    assert (value[~attention] == 0).all() and value.shape == (2, 7)
    changed = tokens.clone()
    changed[:, 5], changed[0, [0, 1, 6]] = 30, 31
    later = critic(changed, attention)
    torch.testing.assert_close(later[:, :5], value[:, :5], rtol=0, atol=1e-12)
    assert (later[:, 5] - value[:, 5]).abs().min() > 1e-3
    value_loss(value, torch.ones(2), attention)[0].backward()
    assert all(p.grad.isfinite().all() for p in critic.parameters())


def test_critic_positions_count_attended_tokens():
    """Positions start at 0 with the first real token; the backbone gets the mask and no cache."""
    class Spy(torch.nn.Embedding):
        def forward(self, input_ids, **inputs):
            self.inputs = inputs
            return SimpleNamespace(last_hidden_state=super().forward(input_ids))

    spy = Spy(8, 4)
    spy.config = _critic_config()
    spy.config.hidden_size = 4
    attention = torch.tensor([[0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]).bool()
    Critic(spy)(torch.zeros(2, 6, dtype=torch.long), attention)
    assert spy.inputs["position_ids"].tolist() == [[0, 0, 0, 1, 2, 2], [0, 1, 2, 3, 4, 5]]
    assert spy.inputs["attention_mask"].tolist() == attention.long().tolist()
    assert spy.inputs["use_cache"] is False


def test_critic_head_initialisation():
    """w has std 1/(H+1) and mean 0 by default, any std on request, and a bias starts at 0."""
    torch.manual_seed(0)
    H = 40_000
    head = init_value_head_(torch.nn.Linear(H, 1))
    assert head.weight.std().item() * (H + 1) == pytest.approx(1, abs=.02)
    assert abs(head.weight.mean().item()) * (H + 1) < .02 and head.bias == 0
    assert init_value_head_(head, .3).weight.std().item() == pytest.approx(.3, rel=.02)
    assert (init_value_head_(head, 0.).weight == 0).all()
    assert _critic_tiny().head.weight.std() < 2 / 17


def test_critic_from_a_language_model_and_back(tmp_path, monkeypatch):
    """A causal LM's folder gives its backbone and a new head; a critic's own comes back the same,
    and outlives a save that is killed in the middle."""
    from transformers import AutoModelForCausalLM
    lm, path = AutoModelForCausalLM.from_config(_critic_config()), str(tmp_path / "critic")
    lm.save_pretrained(tmp_path / "lm")
    tokens, attention = torch.arange(8).view(2, 4), torch.ones(2, 4)
    critic = Critic.from_pretrained(str(tmp_path / "lm"))
    torch.testing.assert_close(critic.backbone(tokens).last_hidden_state,
                               lm.model(tokens).last_hidden_state)
    critic.save_pretrained(path)
    want = critic(tokens, attention)
    assert torch.equal(Critic.from_pretrained(path)(tokens, attention), want)
    half = Critic.from_pretrained(path, dtype=torch.bfloat16)
    assert half.backbone.dtype == torch.bfloat16
    assert torch.equal(half.head.weight, critic.head.weight)

    def killed(*_):
        raise KeyboardInterrupt
    (tmp_path / "critic" / "tokenizer.json").write_text("{}")
    with torch.no_grad():
        critic.backbone.embed_tokens.weight.zero_()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(critic_file.torch, "save", killed)
        critic.save_pretrained(path)
    assert torch.equal(Critic.from_pretrained(path)(tokens, attention), want)
    critic.save_pretrained(path)  # over the old one, leaving what is not the critic's
    assert torch.equal(Critic.from_pretrained(path)(tokens, attention), critic(tokens, attention))
    assert "tokenizer.json" in os.listdir(path)
    assert not any(name.startswith(".saving") for name in os.listdir(path))
    torch.save({"weight": torch.zeros(1, 9)}, os.path.join(path, critic_file.HEAD_FILE))
    with pytest.raises(ValueError, match=r"\(1, 16\), found \(1, 9\)"):
        Critic.from_pretrained(path)


def test_critic_grad_norms_by_hand():
    """Head 3, backbone 4: total 5, the head's share of the squared norm 9/25; none: 0 and NaN."""
    norms = grad_norms(_critic_with_gradient())
    want = {"head": 3, "backbone": 4, "total": 5, "head_share": .36}
    assert norms == pytest.approx(want, rel=1e-5)
    none = grad_norms(_critic_tiny())
    assert none["head"] == none["backbone"] == none["total"] == 0 and math.isnan(none["head_share"])


@pytest.mark.parametrize("split, max_norm, head, backbone", [
    (False, 10., 3, 4), (True, 10., 3, 4), (False, 1., .6, .8), (True, 1., 1, 1),
    (True, 3.5, 3, 3.5), (False, 3.5, 2.1, 2.8)])
def test_critic_clipping(split, max_norm, head, backbone):
    """Joint clipping scales both alike, split each by its own norm; below the limit not one bit."""
    critic = _critic_with_gradient()
    before = copy.deepcopy([p.grad for p in critic.parameters()])
    assert clip_critic_grad_(critic, max_norm, split=split)["total"] == pytest.approx(5, rel=1e-5)
    after = grad_norms(critic)
    assert (after["head"], after["backbone"]) == pytest.approx((head, backbone), rel=1e-5)
    for p, g in zip(critic.parameters(), before):
        factor = head / 3 if p is critic.head.weight else backbone / 4
        torch.testing.assert_close(p.grad, factor * g, rtol=1e-4, atol=1e-7)
        assert factor != 1 or torch.equal(p.grad, g)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_critic_clipping_leaves_nonfinite_gradients(bad):
    """One bad number shows in the norm and spreads nowhere; the healthy part is still clipped."""
    for split in (False, True):
        critic = _critic_with_gradient()
        critic.head.weight.grad[0, 3] = bad
        before = copy.deepcopy([p.grad for p in critic.parameters()])
        assert not math.isfinite(clip_critic_grad_(critic, 2., split=split)["total"])
        grads = [p.grad for p in critic.parameters()]
        assert sum((~g.isfinite()).sum().item() for g in grads) == 1
        if not split:
            torch.testing.assert_close(grads, before, rtol=0, atol=0, equal_nan=True)
        assert grad_norms(critic)["backbone"] == pytest.approx(2 if split else 4, rel=1e-5)


def test_critic_norm_of_low_precision_gradients():
    """Norms of bf16 and half gradients are float32: exact to 1e-6, no overflow at 65504."""
    critic = _critic_tiny(torch.float16)
    next(critic.backbone.parameters()).grad = torch.full((32, 16), 6e4, dtype=torch.float16)
    assert grad_norms(critic)["backbone"] == pytest.approx(6e4 * math.sqrt(512), rel=1e-3)
    bf16 = _critic_tiny(torch.bfloat16)
    next(bf16.backbone.parameters()).grad = torch.full((32, 16), 1 / 3, dtype=torch.bfloat16)
    third = torch.tensor(1 / 3).bfloat16().item()
    assert grad_norms(bf16)["backbone"] == pytest.approx(third * math.sqrt(512), rel=1e-6)


def test_critic_norms_of_sharded_gradients():
    """Under FSDP2 a head that is a unit stays float32, norms and clipping equal the plain."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    def step(critic):
        value = critic(torch.arange(12).view(2, 6), torch.ones(2, 6))
        value_loss(value, torch.tensor([1., -1]), torch.ones(2, 6))[0].backward()
        return clip_critic_grad_(critic, .01), grad_norms(critic)

    plain = step(_critic_tiny(std=.5))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for policy, rel in ((MixedPrecisionPolicy(), 1e-5),
                            (MixedPrecisionPolicy(param_dtype=torch.bfloat16), .1)):
            critic = _critic_tiny(std=.5)
            fully_shard(critic.head, mesh=mesh)
            fully_shard(critic, mesh=mesh, mp_policy=policy)
            assert hasattr(critic.head.weight, "full_tensor")
            for norms, want in zip(step(critic), plain):
                assert norms == pytest.approx(want, rel=rel)
            assert critic(torch.arange(12).view(2, 6), torch.ones(2, 6)).dtype == torch.float32
    finally:
        dist.destroy_process_group()


def test_critic_explained_variance_by_hand():
    """1 for V = R, 0 for any constant V, −3 for V = −R, NaN if all returns are equal."""
    R, mask = torch.tensor([1., -1, 1, -1]), torch.ones(4, 3)
    wide = R[:, None].expand(4, 3)
    for value, want in ((wide, 1), (0 * wide + .7, 0), (-wide, -3), (.5 * wide + .2, .75)):
        assert explained_variance(value, R, mask) == pytest.approx(want, abs=1e-6)
        sums = value_loss(value, R, mask)[1]
        assert explained_variance_from(sums) == pytest.approx(want, abs=1e-5)
    for same in (1., .3, 0.):
        R = torch.full((4,), same)
        assert math.isnan(explained_variance(wide, R, mask))
        assert math.isnan(explained_variance_from(value_loss(wide, R, mask)[1]))
    one = torch.tensor([[1, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]])
    assert math.isnan(explained_variance(wide, torch.tensor([1., -1, 1, -1]), one))


def test_critic_explained_variance_is_of_kept_tokens():
    """EV and the EV from sums equal the definition on the kept tokens alone, in float64."""
    value, target, mask, _ = _critic_case(B=40)
    V, R = value.detach()[mask], target[:, None].expand(40, 7)[mask]
    want = 1 - ((R - V).var(correction=0) / R.var(correction=0)).item()
    assert explained_variance(value, target, mask) == pytest.approx(want, abs=1e-12)
    sums = value_loss(value, target, mask)[1]
    assert explained_variance_from(sums) == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("change, says", [
    ({"mask": torch.ones(2, 4)}, "value and mask"), ({"value": torch.ones(3)}, "value and mask"),
    ({"target": torch.ones(3)}, "target must"), ({"target": torch.ones(2, 1)}, "target must"),
    ({"old_value": torch.ones(2, 1)}, "old_value must"), ({"clip": 0.}, "clip must"),
    ({"clip": -1.}, "clip must")])
def test_critic_value_loss_refuses(change, says):
    """A wrong shape or width is one sentence, not a broadcast."""
    case = {"value": torch.ones(2, 3), "target": torch.ones(2), "mask": torch.ones(2, 3), **change}
    with pytest.raises(ValueError, match=says):
        value_loss(**case)


def test_critic_refuses_bad_shapes_and_limits():
    """Tokens and attention of two shapes, and a limit that is not positive."""
    critic = _critic_tiny()
    with pytest.raises(ValueError, match=r"found \(2, 3\) and \(2, 4\)"):
        critic(torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 4))
    for bad in (0., -1., float("nan")):
        with pytest.raises(ValueError, match="max_norm must be positive"):
            clip_critic_grad_(critic, bad)


# ----------------------------------------------------------------------------------- actor_loss.py


TOKEN_LOSSES = [cispo_loss, ppo_clip_loss, dis_loss]


def _actor_case(rows=4, length=7, scale=0.3, seed=0):
    """logp (leaf), logp_old, advantage, keep in float64; unequal rows, one gap, one row empty."""
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, length, generator=g, dtype=torch.float64) * 3
    logp = old + scale * torch.randn(rows, length, generator=g, dtype=torch.float64)
    advantage = torch.randn(rows, length, generator=g, dtype=torch.float64)
    lengths = torch.tensor([length, 3, 0, 5])[:rows, None]
    keep = torch.arange(length) < lengths
    keep[0, 2] = False
    return logp.requires_grad_(), old, advantage, keep


def _actor_linear_case(rows, length, width, vocab, dtype=torch.float32):
    g = torch.Generator().manual_seed(vocab)
    hidden = torch.randn(rows, length, width, generator=g, dtype=torch.float64).to(dtype)
    weight = (torch.randn(vocab, width, generator=g, dtype=torch.float64) / 2).to(dtype)
    tokens = torch.randint(vocab, (rows, length), generator=g)
    grad = torch.randn(rows, length, generator=g, dtype=torch.float64)
    grad[0, 1] = 0  # a masked token
    return hidden.requires_grad_(), weight.requires_grad_(), tokens, grad


def _actor_grad(loss_fn, logp, *args, **options):
    return torch.autograd.grad(loss_fn(logp, *args, **options)[0], logp)[0]


def test_actor_loss_cispo_hand():
    """The worked CISPO example: the third token is clipped and still has a gradient."""
    logp = torch.tensor([-1.0, -2, -0.5], requires_grad=True)
    old, advantage = torch.tensor([-1.0, -1, -2]), torch.tensor([1.0, -1, 2])
    loss, stats = cispo_loss(logp, old, advantage, torch.ones(3))
    loss.backward()
    torch.testing.assert_close(loss.item(), 0.226667, atol=1e-6, rtol=0)
    expected = torch.tensor([-0.333333, 0.266667, -0.853333])
    torch.testing.assert_close(logp.grad, expected, atol=1e-6, rtol=0)
    assert [int(x) for x in stats["clip_share"]] == [2, 3]


def test_actor_loss_far_ratio_is_finite():
    """A log-ratio of 100 overflows nothing; CISPO's mean is .5 with gradient [0, −.5]."""
    old, advantage = torch.tensor([-100.0, -1]), torch.tensor([0.0, 1])
    for fn in [*TOKEN_LOSSES, flash_reinforce_loss]:
        logp = torch.tensor([0.0, -1], requires_grad=True)
        loss, stats = fn(logp, old, advantage, torch.ones(2))
        loss.backward()
        assert all(torch.isfinite(x).all() for x in (loss, logp.grad, *sum(stats.values(), ())))
        if fn is cispo_loss:
            assert loss.item() == 0.5 and logp.grad.tolist() == [0, -0.5]
        advantage_far = torch.tensor([-1.0, 1])  # the far token itself, pushed down
        assert _actor_grad(fn, logp, old, advantage_far, torch.ones(2)).isfinite().all()


def test_actor_loss_temperature_hand():
    """Logits [2, 1, 0] at temperature .5 give token 0 log-prob −.142932, also from hidden."""
    logits, token = torch.tensor([[[2.0, 1, 0]]]), torch.tensor([[0]])
    direct = token_logp(logits, token, temperature=0.5)
    fused = linear_token_logp(logits, torch.eye(3), token, temperature=0.5)
    torch.testing.assert_close(direct.item(), -0.142932, atol=1e-6, rtol=0)
    torch.testing.assert_close((direct - fused).exp().item(), 1.0, atol=1e-6, rtol=0)


def test_actor_loss_masked_response_leaves_the_mean():
    """Responses of 4 and 6 tokens, the second masked, per-token loss 1: the mean is 1, not .4."""
    logp, advantage = torch.full((2, 6), -1.0), torch.ones(2, 6)
    keep = torch.tensor([[1, 1, 1, 1, 0, 0], [0] * 6])
    for fn in TOKEN_LOSSES:
        assert abs(fn(logp, logp, advantage, keep)[0].item()) == 1.0
    assert cispo_loss(logp, logp, advantage, keep, 10)[0].item() == pytest.approx(0.4)


def test_actor_loss_mismatch_hand():
    """IcePoP alone keeps .51, 1, 4.99 of five ratios; by default 5.01 drops its whole response."""
    rho = torch.tensor([[0.49, 0.51, 1, 4.99, 5.01], [0.49, 0.51, 1, 4.99, 1]])
    roll, mask = torch.full_like(rho, -3), torch.ones(2, 5)
    keep, _ = mismatch_mask(roll + rho.log(), roll, mask, response_range=(0, math.inf))
    assert keep.int().tolist() == [[0, 1, 1, 1, 0], [0, 1, 1, 1, 1]]
    keep, stats = mismatch_mask(roll + rho.log(), roll, mask)
    assert keep.int().tolist() == [[0] * 5, [0, 1, 1, 1, 1]]
    counts = {k: [round(float(x), 4) for x in v] for k, v in stats.items()}
    assert counts["icepop_masked"] == [3, 10] and counts["mis_masked"] == [5, 10]
    assert counts["masked"] == [6, 10] and counts["mis_dropped"] == [1, 2]
    assert counts["ratio"] == [19.99, 10]
    assert counts["kl"] == [round(float((rho - 1 - rho.log()).sum()), 4), 10]
    torch.testing.assert_close(mismatch_ratio(roll + rho.log(), roll, mask), rho)


def test_actor_loss_mismatch_does_not_grow_with_length():
    """Ten thousand tokens of ratio 1.012 stay: the response test is a maximum, not a product."""
    roll, mask = torch.full((1, 10_000), -1.0), torch.ones(1, 10_000, dtype=torch.bool)
    assert mismatch_mask(roll + math.log(1.012), roll, mask)[0].all()


def test_actor_loss_range_bounds():
    """IcePoP's and MIS's bounds are included, DIS's excluded: at ratio 1 and a bound of 1."""
    x, one = torch.full((1, 3), -2.0, requires_grad=True), torch.ones(1, 3)
    assert mismatch_mask(x, x, one, token_range=(1, 1), response_range=(1, 1))[0].all()
    assert _actor_grad(dis_loss, x, x.detach(), one, one, eps_high=0).abs().max() == 0
    assert _actor_grad(dis_loss, x, x.detach(), one, one, eps_low=0).abs().max() == 0
    assert _actor_grad(dis_loss, x, x.detach(), one, one).abs().min() > 0


def test_actor_loss_mismatch_broken_numbers():
    """A NaN, or a token the sampler calls impossible, drops its response and no other one."""
    roll = torch.full((3, 2), -1.0)
    roll[0, 1], roll[1, 0] = math.nan, -math.inf
    assert mismatch_mask(torch.full((3, 2), -1.0), roll, torch.ones(3, 2))[0].tolist() == [
        [False, False], [False, False], [True, True]]


def test_actor_loss_first_step_is_reinforce():
    """At ratio 1 CISPO, PPO-clip and DIS all have the REINFORCE gradient −Â/n, and clip nothing."""
    logp, _, advantage, keep = _actor_case()
    old = logp.detach().clone()
    for fn in TOKEN_LOSSES:
        loss, stats = fn(logp, old, advantage, keep)
        grad = torch.autograd.grad(loss, logp)[0]
        torch.testing.assert_close(grad, -advantage * keep / keep.sum())
        assert stats["clip_share"][0] == 0 and stats["kl"][0] == 0
        assert stats["ratio"][0] == stats["ratio"][1] == keep.sum()


def _actor_loss_loop(name, logp, old, advantage, keep):
    """The token losses written out token by token, on floats: gradient and clipped count."""
    grad, clipped = torch.zeros_like(logp), 0
    for i in range(keep.numel()):
        if keep.flatten()[i]:
            a, r = advantage.flatten()[i].item(), math.exp(logp.flatten()[i] - old.flatten()[i])
            if name == "cispo":
                weight, out = min(max(r, 0.8), 1.28), not 0.8 <= r <= 1.28
            elif name == "ppo":
                out = (a > 0 and r > 1.2) or (a < 0 and r < 0.8)
                weight = 0 if out else r
            else:
                out = not 0.7 < r < 6
                weight = 0 if out else r
            grad.view(-1)[i], clipped = -weight * a / int(keep.sum()), clipped + out
    return grad, clipped


def test_actor_loss_gradients_against_loop():
    """Each loss's gradient is its weight of the ratio times −Â/n, token by token."""
    logp, old, advantage, keep = _actor_case(scale=1.5)
    for name, fn in zip(("cispo", "ppo", "dis"), TOKEN_LOSSES):
        loss, stats = fn(logp, old, advantage, keep)
        grad, clipped = _actor_loss_loop(name, logp.detach(), old, advantage, keep)
        torch.testing.assert_close(torch.autograd.grad(loss, logp)[0], grad, atol=1e-12, rtol=0)
        assert 0 < stats["clip_share"][0] == clipped and stats["clip_share"][1] == keep.sum()


def test_actor_loss_flash_against_loop():
    """FlashREINFORCE: gate by the mean Bernoulli KL, 1/T_i inside, 1/B with B before the gate."""
    logp, roll, advantage, mask = _actor_case(scale=0.15)
    grad, total, gated = torch.zeros_like(roll), 0.0, 0
    for i in (0, 1, 3):  # the row 2 has no token
        where = mask[i].nonzero().flatten().tolist()
        p, q = roll[i].exp(), logp[i].detach().exp()
        kl = sum(p[t] * math.log(p[t] / q[t]) + (1 - p[t]) * math.log((1 - p[t]) / (1 - q[t]))
                 for t in where)
        if kl / len(where) > 3e-3:
            gated += 1
            continue
        for t in where:
            grad[i, t] = -(q[t] / p[t]) * advantage[i, t] / len(where) / 3
            total += float(grad[i, t] * logp[i, t].detach())
    loss, stats = flash_reinforce_loss(logp, roll, advantage, mask)
    assert 0 < gated < 3 and [int(x) for x in stats["gated"]] == [gated, 3]
    torch.testing.assert_close(loss.item(), total)
    torch.testing.assert_close(torch.autograd.grad(loss, logp)[0], grad, atol=1e-12, rtol=0)
    ratio = flash_reinforce_loss(logp + 3, roll, advantage, mask, delta=math.inf)[1]["ratio"]
    assert ratio[0] / ratio[1] > 10  # not clipped


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_actor_loss_micro_batches_add_up(parts):
    """With the global count, losses, gradients, stats of 1, 2, 4 unequal micro-batches add up."""
    case = _actor_case(scale=0.5)
    cuts = {1: [4], 2: [1, 3], 4: [1, 1, 1, 1]}[parts]
    for fn in [*TOKEN_LOSSES, lambda *a: flash_reinforce_loss(*a, delta=0.05)]:
        logp, keep = case[0], case[3]
        n = keep.sum() if fn in TOKEN_LOSSES else int(keep.any(-1).sum())
        whole, stats = fn(*case)
        split = [fn(*piece, n) for piece in zip(*(x.split(cuts) for x in case))]
        total = sum(loss for loss, _ in split)
        torch.testing.assert_close(total, whole, atol=1e-12, rtol=0)
        torch.testing.assert_close(*(torch.autograd.grad(x, logp)[0] for x in (total, whole)),
                                   atol=1e-12, rtol=0)
        for name, pair in stats.items():
            added = torch.stack([torch.stack([torch.as_tensor(x).double() for x in s[name]])
                                 for _, s in split]).sum(0)
            torch.testing.assert_close(added, torch.stack([x.double() for x in pair]))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e9])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.uint8])
def test_actor_loss_masked_slots_reach_nothing(bad, dtype):
    """What stands in a masked slot changes no loss, no gradient, no stat and no mask."""
    logp, old, advantage, keep = _actor_case()
    dirty = [torch.where(keep, x.detach(), bad) for x in (logp, old, advantage)]
    dirty[0].requires_grad_()
    for fn in [*TOKEN_LOSSES, flash_reinforce_loss]:
        clean, found = fn(logp, old, advantage, keep), fn(*dirty, keep.to(dtype))
        torch.testing.assert_close(clean, found, rtol=0, atol=0)
        grads = torch.autograd.grad(clean[0], logp)[0], torch.autograd.grad(found[0], dirty[0])[0]
        torch.testing.assert_close(*grads, rtol=0, atol=0)
        assert (grads[1][~keep] == 0).all()
    clean, found = (mismatch_mask(a, b, keep) for a, b in ((logp, old), dirty[:2]))
    torch.testing.assert_close(clean, found, rtol=0, atol=0)
    assert not found[0][~keep].any() and (mismatch_ratio(*dirty[:2], keep)[~keep] == 0).all()


def test_actor_loss_all_masked():
    """A batch with everything masked has loss 0 and zero gradients, also at a global count of 0."""
    for fn in [*TOKEN_LOSSES, flash_reinforce_loss]:
        for n in (None, 0, torch.tensor(0), torch.tensor(0.0), 5):
            logp = torch.full((2, 3), math.nan, requires_grad=True)
            loss, stats = fn(logp, logp.detach(), logp.detach(), torch.zeros(2, 3), n)
            loss.backward()
            assert loss == 0 and (logp.grad == 0).all() and all(c == 0 for _, c in stats.values())
    keep, stats = mismatch_mask(logp, logp, torch.zeros(2, 3))
    assert not keep.any() and all(float(s) == c == 0 for s, c in stats.values())


def test_actor_loss_no_gradient_beside_logp():
    """Neither the old log-probs nor the advantage get a gradient."""
    logp, old, advantage, keep = _actor_case()
    for fn in [*TOKEN_LOSSES, flash_reinforce_loss]:
        loss, _ = fn(logp, old.requires_grad_(), advantage.requires_grad_(), keep)
        assert torch.autograd.grad(loss, (old, advantage), allow_unused=True) == (None, None)


def test_actor_loss_float32_under_autocast():
    """bfloat16 inputs under autocast give float32 log-probs and losses; no logit is rounded."""
    hidden, weight, tokens, grad = _actor_linear_case(2, 5, 24, 40, torch.bfloat16)
    exact = token_logp(hidden.double() @ weight.double().T, tokens)
    with torch.autocast("cpu", torch.bfloat16):
        logp = linear_token_logp(hidden, weight, tokens)
        same = linear_token_logp(hidden.float(), weight.float(), tokens)
        entropy = linear_entropy(hidden, weight)
        loss, _ = cispo_loss(logp.bfloat16(), logp.bfloat16(), logp.bfloat16(), torch.ones(2, 5))
        d_hidden, d_weight = torch.autograd.grad(logp, (hidden, weight), grad.float())
    assert logp.dtype == entropy.dtype == loss.dtype == torch.float32
    assert token_logp((hidden @ weight.T), tokens).dtype == torch.float32
    torch.testing.assert_close(logp, exact.float(), atol=1e-5, rtol=0)
    torch.testing.assert_close(same, logp, atol=1e-5, rtol=0)
    expected = torch.autograd.grad(exact, (hidden, weight), grad)
    torch.testing.assert_close((d_hidden, d_weight), expected, atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("budget", [2**20, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_actor_loss_linear_equals_naive(budget, temperature, monkeypatch):
    """linear_token_logp is token_logp(hidden @ weight.T), value and gradient, one chunk or more."""
    if budget == 64:  # chunks of 7 words, the last one shorter
        monkeypatch.setattr(actor_loss, "_chunks", lambda h, vocab: (
            slice(i, min(i + 7, vocab)) for i in range(0, vocab, 7)))
    hidden, weight, tokens, grad = _actor_linear_case(2, 5, 6, 24, torch.float64)
    naive = token_logp(hidden @ weight.T, tokens, temperature=temperature)
    fused = linear_token_logp(hidden, weight, tokens, temperature=temperature)
    torch.testing.assert_close(fused, naive, atol=1e-12, rtol=0)
    for inputs in ((hidden, weight), (hidden,), (weight,)):
        torch.testing.assert_close(*(torch.autograd.grad(x, inputs, grad, retain_graph=True)
                                     for x in (fused, naive)), atol=1e-12, rtol=0)
    assert torch.autograd.gradcheck(
        lambda h, w: linear_token_logp(h, w, tokens, temperature=temperature), (hidden, weight))
    logp = (hidden @ weight.T / temperature).log_softmax(-1)
    torch.testing.assert_close(linear_entropy(hidden, weight, temperature=temperature),
                               -(logp.exp() * logp).sum(-1), atol=1e-12, rtol=0)


def test_actor_loss_chunks_cover_the_vocabulary():
    """The chunks are the vocabulary, once, in order, for any number of tokens."""
    for n, vocab in ((0, 5), (1, 1000), (5000, 1000), (5000, 256), (5000, 257)):
        words = [w for s in actor_loss._chunks(torch.empty(n, 3), vocab) for w in range(vocab)[s]]
        assert words == list(range(vocab))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_actor_loss_linear_masked_hidden(bad):
    """A hidden state whose token the loss masks reaches no gradient, whatever it holds."""
    hidden, weight, tokens, _ = _actor_linear_case(2, 4, 6, 11)
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]]) != 0
    dirty = torch.where(mask[..., None], hidden.detach(), bad).requires_grad_()
    grads = []
    for h in (hidden, dirty):
        logp = linear_token_logp(h, weight, tokens)
        loss, _ = cispo_loss(logp, logp.detach(), torch.ones(2, 4), mask)
        grads.append(torch.autograd.grad(loss, (h, weight)))
    torch.testing.assert_close(*grads, atol=1e-6, rtol=0)
    assert (grads[1][0][~mask] == 0).all() and grads[1][1].abs().max() > 0
    logp = linear_token_logp(dirty, weight, tokens)
    zero = torch.autograd.grad(logp, (dirty, weight), torch.zeros(2, 4))
    assert all((g == 0).all() for g in zero)


def test_actor_loss_linear_never_holds_the_logits(monkeypatch):
    """Forward and backward make no tensor of T × V numbers, nor a third of it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else [out]:
                self.size = max(self.size, x.numel() if isinstance(x, torch.Tensor) else 0)
            return out

    hidden, weight, tokens, grad = _actor_linear_case(1, 4096, 8, 1024)
    with Largest() as seen:
        logp = linear_token_logp(hidden, weight, tokens)
        torch.autograd.grad(logp, (hidden, weight), grad.float())
        linear_entropy(hidden, weight)
    assert seen.size <= 4096 * 1024 // 3


@pytest.mark.skipif(actor_loss.triton is None, reason="Triton is not installed")
@pytest.mark.parametrize("shape", [(1, 3, 5, 7), (2, 37, 45, 131), (1, 64, 32, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_actor_loss_triton_equals_torch(shape, dtype):
    """The kernels give the torch version's log-probs and gradients, in partial and full tiles."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    case = _actor_linear_case(*shape, dtype)
    hidden, weight, tokens, grad = (
        x.detach().to(device).requires_grad_(x.requires_grad) for x in case)
    results = []
    for impl in ("torch", "triton"):
        logp = linear_token_logp(hidden, weight, tokens, temperature=0.7, impl=impl)
        results.append((logp, *torch.autograd.grad(logp, (hidden, weight), grad.float())))
    assert logp.dtype == torch.float32
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(results[1][0], results[0][0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(results[1][1:], results[0][1:], atol=tolerance, rtol=tolerance)


_ACTOR_COMPILE = """
import os, re, subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import actor_loss, torch
tools = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")
for kernel in (actor_loss._logsumexp_kernel, actor_loss._logit_grad_kernel):
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        blocks = actor_loss._launch(dtype, 4096, 49152)[1]
        warps = blocks.pop("num_warps")
        types = dict(hidden=name, weight=name, out=name, tokens="i64", parts="fp32", lse="fp32",
                     grad="fp32")
        sizes = dict(temperature="fp32", N="i32", V="i32", H="i32")
        args = kernel.arg_names
        signature = {a: "*" + types[a] if a in types else sizes.get(a, "constexpr") for a in args}
        aligned = {(i,): [["tt.divisibility", 16]] for i, a in enumerate(args)
                   if a in types or a in ("N", "V", "H")}
        source = ASTSource(kernel, signature, constexprs=blocks, attrs=aligned)
        for arch in (80, 90):
            binary = triton.compile(source, target=GPUTarget("cuda", arch, 32),
                                    options={"num_warps": warps})
            with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
                f.write(binary.asm["cubin"])
                f.flush()
                usage = subprocess.run([os.path.join(tools, "cuobjdump"), "-res-usage", f.name],
                                       capture_output=True, text=True, check=True).stdout
            found = [re.search(what + r":(\\d+)", usage)[1] for what in ("REG", "STACK", "LOCAL")]
            print(kernel.__name__, name, arch, *found, binary.metadata.shared)
"""


@pytest.mark.skipif(actor_loss.triton is None, reason="Triton is not installed")
def test_actor_loss_kernels_compile_without_spills(tmp_path):
    """Both kernels compile for sm_80 and sm_90, bfloat16 and float32: no spill, 99 KiB shared."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(Path(actor_loss.__file__).parent), "TRITON_CACHE_DIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", _ACTOR_COMPILE], env=env, capture_output=True,
                         text=True)
    assert run.returncode == 0, run.stderr
    rows = [line.split() for line in run.stdout.splitlines()]
    assert len(rows) == 8
    for kernel, dtype, arch, regs, stack, local, shared in rows:
        assert stack == local == "0" and int(shared) <= 99 * 1024, run.stdout


def test_actor_loss_bad_input():
    """Bad shapes, ranges and names are one sentence that names the argument."""
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"advantage: .*\[2, 3\].*\[2\]"):
        cispo_loss(x, x, torch.zeros(2), x)
    with pytest.raises(ValueError, match=r"keep: .*\[2, 3\].*\[2, 1\]"):
        flash_reinforce_loss(x, x, x, torch.ones(2, 1))
    with pytest.raises(ValueError, match=r"n_tokens.*\[2\]"):
        dis_loss(x, x, x, x, torch.ones(2))
    with pytest.raises(ValueError, match=r"logp_roll: .*\[2, 3\].*\[3\]"):
        mismatch_mask(x, torch.zeros(3), x)
    with pytest.raises(ValueError, match=r"token_range: .*\(5, 0.5\)"):
        mismatch_mask(x, x, x, token_range=(5, 0.5))
    with pytest.raises(ValueError, match=r"tokens: .*\[2, 3\].*\[2\]"):
        token_logp(torch.zeros(2, 3, 4), torch.zeros(2, dtype=torch.long))
    ids = torch.zeros(2, 3, dtype=torch.long)
    hidden, weight = torch.zeros(2, 3, 4), torch.zeros(5, 4)
    with pytest.raises(ValueError, match=r"tokens: .*\[2, 3\].*\[2\]"):
        linear_token_logp(hidden, weight, ids[:, 0])
    with pytest.raises(ValueError, match=r"weight: .*\[V, 4\].*\[4, 5\]"):
        linear_token_logp(hidden, weight.T, ids)
    with pytest.raises(ValueError, match=r"temperature: .*0"):
        linear_token_logp(hidden, weight, ids, temperature=0)
    with pytest.raises(ValueError, match=r"impl: .*'fast'"):
        linear_token_logp(hidden, weight, ids, impl="fast")
    with pytest.raises(ValueError, match="impl: .*float64|impl: .*missing"):
        linear_token_logp(hidden.double(), weight, ids, impl="triton")


def test_actor_loss_grpo_by_hand():
    """Ratio 1, Â = 1 and −2 on 1 and 3 tokens: mean of responses ½, of tokens 5/4; gradient 1/T."""
    logp = torch.zeros(2, 3, requires_grad=True)
    keep, advantage = torch.tensor([[1, 0, 0], [1, 1, 1]]), torch.tensor([[1.], [-2]]).expand(2, 3)
    loss, stats = grpo_loss(logp, torch.zeros(2, 3), advantage, keep)
    assert loss.item() == .5 and [x.item() for x in stats["loss"]] == [1, 2]
    assert ppo_clip_loss(logp, torch.zeros(2, 3), advantage, keep)[0].item() == 1.25
    grad = torch.autograd.grad(loss, logp)[0]
    torch.testing.assert_close(grad, torch.tensor([[-.5, 0, 0], [1 / 3, 1 / 3, 1 / 3]]))


def test_actor_loss_grpo_is_the_mean_of_ppo_by_response():
    """Loss and gradient: ppo_clip_loss of each response alone, averaged over those with tokens."""
    logp, old, advantage, keep = _actor_case(scale=1.5)
    loss, stats = grpo_loss(logp, old, advantage, keep, eps_high=.28)
    alone = [ppo_clip_loss(logp[i:i + 1], old[i:i + 1], advantage[i:i + 1], keep[i:i + 1],
                           eps_high=.28) for i in (0, 1, 3)]  # row 2 is empty
    want = sum(x for x, _ in alone) / 3
    torch.testing.assert_close(loss, want, atol=1e-12, rtol=0)
    torch.testing.assert_close(*(torch.autograd.grad(x, logp)[0] for x in (loss, want)))
    clipped = sum(s["clip_share"][0] for _, s in alone)
    assert 0 < clipped == stats["clip_share"][0] and stats["clip_share"][1] == keep.sum()


@pytest.mark.parametrize("cuts", [[1, 3], [2, 2], [1, 1, 1, 1]])
def test_actor_loss_grpo_and_nll_micro_batches_add_up(cuts):
    """With the global count, losses, gradients and stats of unequal micro-batches add up."""
    logp, old, advantage, keep = _actor_case(scale=.5)
    reward = torch.tensor([1., -1, 1, 1])
    for fn, args, n in ((grpo_loss, (logp, old, advantage, keep), keep.any(-1).sum()),
                        (nll_loss, (logp, reward, keep), keep[reward > 0].sum())):
        whole, stats = fn(*args)
        split = [fn(*piece, n) for piece in zip(*(x.split(cuts) for x in args))]
        total = sum(loss for loss, _ in split)
        torch.testing.assert_close(total, whole, atol=1e-12, rtol=0)
        torch.testing.assert_close(*(torch.autograd.grad(x, logp)[0] for x in (total, whole)))
        for name, pair in stats.items():
            for k in (0, 1):
                torch.testing.assert_close(sum(s[name][k] for _, s in split), pair[k])


def test_actor_loss_nll_by_hand():
    """Right: log-probs −1, −3. Wrong: −5. The loss is 2, its gradient −½ on right tokens alone."""
    logp = torch.tensor([[-1., -3], [-5, -5]], requires_grad=True)
    loss, stats = nll_loss(logp, torch.tensor([1., -1]), torch.ones(2, 2))
    assert loss.item() == 2 and [x.item() for x in stats["nll"]] == [4, 2]
    assert torch.autograd.grad(loss, logp)[0].tolist() == [[-.5, -.5], [0, 0]]
    loss, _ = nll_loss(logp, torch.tensor([-1., 0]), torch.ones(2, 2))  # none is right
    assert loss == 0 and not torch.autograd.grad(loss, logp)[0].any()


def test_actor_loss_gepo_by_hand():
    """q = .1 and .3: Σq²/Σq = .25, so p = .2 and .5 weigh .8 and 2; alone it is p/q."""
    p, q = torch.tensor([[.2], [.5], [.2]]), torch.tensor([[.1], [.3], [.1]])
    w = group_expectation_weight(p.log(), q.log(), torch.tensor([4, 4, 9]), torch.ones(3, 1))
    torch.testing.assert_close(w, torch.tensor([.8, 2, 2]))


def test_actor_loss_gepo_is_the_loop():
    """The formula written out on plain probabilities, each the geometric mean over its tokens."""
    logp, roll, _, mask = _actor_case(scale=.5)
    group = torch.tensor([3, 3, 3, 3])
    p, q = ([math.exp(x[i][mask[i]].mean()) for i in (0, 1, 3)] for x in (logp.detach(), roll))
    expected = sum(x * x for x in q) / sum(q)
    w = group_expectation_weight(logp, roll, group, mask)
    want = torch.tensor([p[0], p[1], 0, p[2]], dtype=torch.float64) / expected
    torch.testing.assert_close(w, want, atol=1e-12, rtol=0)
    assert not w.requires_grad and w[2] == 0
    order = torch.tensor([3, 0, 2, 1])
    moved = group_expectation_weight(logp[order], roll[order], group, mask[order])
    torch.testing.assert_close(moved, w[order])


def test_actor_loss_gepo_has_no_underflow():
    """Log-probs of −400 a token, where q² and q are 0 in float32, weigh as those of −1 do."""
    near = torch.tensor([[-1., -1], [-1.5, -1], [-2, -1]])
    ids, ones = torch.zeros(3, dtype=torch.long), torch.ones(3, 2)
    want = group_expectation_weight(near + .1, near, ids, ones)
    torch.testing.assert_close(group_expectation_weight(near - 398.9, near - 399, ids, ones), want,
                               rtol=1e-3, atol=0)
    far = group_expectation_weight(torch.zeros(3, 2), near - 399, ids, ones)
    assert far.isfinite().all() and (far > 1e8).all()


def test_actor_loss_other_methods_masked_slots_reach_nothing():
    """NaN, inf in masked slots and a NaN reward of an empty row change nothing, any mask dtype."""
    logp, old, advantage, keep = _actor_case()
    reward, ids = torch.tensor([1., 1, torch.nan, -1]), torch.tensor([0, 1, 1, 0])
    for bad in (math.nan, math.inf, -math.inf):
        dirty = [torch.where(keep, x.detach(), bad) for x in (logp, old, advantage)]
        x = dirty[0].requires_grad_()
        for m in (keep, keep.float(), keep.to(torch.uint8)):
            for clean, found in ((grpo_loss(logp, old, advantage, keep), grpo_loss(*dirty, m)),
                                 (nll_loss(logp, reward, keep), nll_loss(x, reward, m))):
                torch.testing.assert_close(clean, found, rtol=0, atol=0)
                grads = torch.autograd.grad(clean[0], logp)[0], torch.autograd.grad(found[0], x)[0]
                torch.testing.assert_close(*grads, rtol=0, atol=0)
            weights = (group_expectation_weight(logp, old, ids, keep),
                       group_expectation_weight(x, dirty[1], ids, m))
            torch.testing.assert_close(*weights, rtol=0, atol=0)
    none = torch.zeros_like(keep)
    for loss, _ in (grpo_loss(logp, old, advantage, none), nll_loss(logp, reward, none)):
        assert loss == 0 and not torch.autograd.grad(loss, logp)[0].any()
    assert not group_expectation_weight(logp, old, ids, none).any()


def test_actor_loss_other_methods_are_float32_under_autocast():
    """bfloat16 log-probs give float32 results, inside autocast too."""
    x = torch.full((2, 3), -1.5, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        found = (grpo_loss(x, x, x, x)[0], nll_loss(x, torch.ones(2), x)[0],
                 group_expectation_weight(x, x, torch.zeros(2), x))
    assert [y.dtype for y in found] == [torch.float32] * 3 and found[1] == 1.5


def test_actor_loss_other_methods_refuse():
    """Wrong shapes are named, and a count that is no single number."""
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"keep: .*\[2, 3\].*\[2\]"):
        grpo_loss(x, x, x, torch.ones(2))
    with pytest.raises(ValueError, match=r"n_responses.*\[2\]"):
        grpo_loss(x, x, x, x, torch.ones(2))
    with pytest.raises(ValueError, match=r"reward: .*\[2\].*\[2, 3\]"):
        nll_loss(x, x, x)
    with pytest.raises(ValueError, match=r"mask: .*\[2, 3\].*\[2\]"):
        nll_loss(x, torch.ones(2), torch.ones(2))
    with pytest.raises(ValueError, match=r"prompt_id: .*\[2\].*\[3\]"):
        group_expectation_weight(x, x, torch.zeros(3), x)
    with pytest.raises(ValueError, match=r"logp_roll: .*\[2, 3\].*\[2\]"):
        group_expectation_weight(x, torch.ones(2), torch.ones(2), x)


# ----------------------------------------------------------------------------------------- daps.py


def _daps_on(n_prompts, **settings):
    """A DAPS that selects by acceptance alone from step 0 on (ω = 1)."""
    return DAPS(n_prompts, uniform=0, ramp=0, **settings)


def _daps_select(daps, v0, n, seed=0, step=0):
    return daps.select(torch.arange(len(v0)), torch.as_tensor(v0), n, step,
                       torch.Generator().manual_seed(seed))


def test_daps_acceptance_by_hand():
    """p = 0, .25, .5, .75, 1 at a_min .1 is accepted with .1, .775, 1, .775, .1."""
    p = torch.tensor([0, .25, .5, .75, 1], dtype=torch.float64)
    want = torch.tensor([.1, .775, 1, .775, .1], dtype=torch.float64)
    torch.testing.assert_close(accept_prob(p), want)
    torch.testing.assert_close(accept_prob(p, 0.3), .3 + .7 / .9 * (want - .1))


def test_daps_estimate_by_hand():
    """S = 3, N = 4 after one decay, V = .2, n_c = 3: p̂ = .685345 and a = .876330."""
    daps = _daps_on(2)
    daps.update(torch.tensor([1, 1, 1, 1]), torch.tensor([1, 1, 0, 1]))
    daps.update(torch.tensor([0]), torch.tensor([True]))
    v0 = torch.tensor([.2], dtype=torch.float64)
    p = fuse(success_from_value(v0), daps.successes[1:], daps.trials[1:])
    assert p.item() == pytest.approx(.685345, abs=1e-6)
    assert daps.acceptance(torch.tensor([1]), v0, 0).item() == pytest.approx(.876330, abs=1e-6)


def test_daps_success_is_half_of_value_plus_one():
    """A success rate p has the value 2p − 1; values beyond [−1, 1] clip, float64 stays exact."""
    p = torch.linspace(0, 1, 7, dtype=torch.float64)
    assert (success_from_value(2 * p - 1) - p).abs().max() < 1e-15
    low = success_from_value(torch.tensor([-3, -1, 0, 1, 9], dtype=torch.bfloat16))
    assert low.dtype == torch.float32 and low.tolist() == [0, 0, .5, 1, 1]
    assert success_from_value(torch.tensor([float("nan")])).isnan().all()


def test_daps_critic_counts_as_n_c_trials():
    """p̂ is p_c without history, S/N after many trials, and trials that say p_c leave it p_c."""
    p_c, many = torch.tensor([.7], dtype=torch.float64), torch.tensor([1e9], dtype=torch.float64)
    assert fuse(p_c, 0 * many, 0 * many).item() == pytest.approx(.7, abs=1e-12)
    assert fuse(p_c, .2 * many, many).item() == pytest.approx(.2, abs=1e-8)
    assert fuse(p_c, 5 * p_c, 5 * torch.ones(1), n_c=2.).item() == pytest.approx(.7, abs=1e-12)


def test_daps_ramp():
    """ω is 0 up to step 40, 1 from step 120, linear between; length 0 is a switch."""
    assert [ramp(t) for t in (0, 40, 60, 80, 100, 120, 999)] == [0, 0, .25, .5, .75, 1, 1]
    assert [ramp(t, 5, 0) for t in (4, 5)] == [0, 1] and ramp(0, 0, 0) == 1
    a = DAPS(1).acceptance(torch.tensor([0]), torch.tensor([1.]), 60)  # ¾·1 + ¼·0.1
    assert a.item() == pytest.approx(.775)


def test_daps_uniform_phase_ignores_values_and_counts():
    """At ω = 0 a selection is one uniform draw, the same whatever V and the history say."""
    plain, told = DAPS(50), DAPS(50)
    told.update(torch.arange(50).repeat(9), torch.arange(450) % 2)
    v0 = torch.linspace(-1, 1, 50)
    counts = torch.zeros(50)
    for seed in range(1500):
        ids = _daps_select(plain, v0, 10, seed, step=40)
        assert ids.tolist() == _daps_select(told, -v0.abs(), 10, seed, step=0).tolist()
        counts[ids] += 1
    assert plain.report == {"offered": 50, "omega": 0, "acceptance": 1, "rounds": 1,
                            "accepted": 10, "filled": 0}
    mean = 1500 / 5
    chi2 = ((counts - mean) ** 2 / (mean * .8)).sum() * 49 / 50  # of draws without replacement
    assert 23.98 < chi2 < 85.35  # the 0.1 % tails of 49 degrees of freedom


def test_daps_inclusion_is_proportional_to_acceptance():
    """Few out of many candidates: a prompt is selected in proportion to its acceptance."""
    v0 = torch.tensor([-1., -.5, 0., .9]).repeat(500)  # a = .1, .775, 1, .271 in four classes
    daps, counts = _daps_on(2000), torch.zeros(4, dtype=torch.float64)
    for seed in range(400):
        ids = _daps_select(daps, v0, 20, seed)
        counts += torch.bincount(ids % 4, minlength=4)
        assert daps.report["rounds"] == 1 and daps.report["accepted"] == 20
    a = accept_prob(success_from_value(v0[:4].double()))
    expected = counts.sum() * a / a.sum()
    assert ((counts - expected) ** 2 / expected).sum() < 16.27  # the 0.1 % tail, 3 degrees
    flat = counts.sum() / 4
    assert ((counts - flat) ** 2 / flat).sum() > 1000  # and uniform it is not


def test_daps_fills_up_with_the_best():
    """What ten rounds do not accept is filled up in order of acceptance, and counted."""
    daps = _daps_on(8, a_min=0.0)
    v0 = [-1, -.999999, 0, 1, -.9999999, 0, .99999, 1]  # two certain, the others all but hopeless
    ids = _daps_select(daps, torch.tensor(v0, dtype=torch.float64), 5)
    assert set(ids[:2].tolist()) == {2, 5} and ids[2:].tolist() == [6, 1, 4]
    assert daps.report["rounds"] == 10
    assert (daps.report["accepted"], daps.report["filled"]) == (2, 3)
    pairs = {tuple(sorted(_daps_select(daps, torch.ones(8), 2, i).tolist())) for i in range(99)}
    assert len(pairs) > 20  # of 28: equal ones are filled in drawn order, not in that of the ids


@pytest.mark.parametrize("a_min", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("n", [0, 1, 7, 36, 37])
def test_daps_selects_n_distinct_candidates(n, a_min):
    """Any n up to M gives n distinct candidates within ten rounds, accepted + filled = n."""
    daps, g = _daps_on(100, a_min=a_min), torch.Generator().manual_seed(n)
    ids = torch.randperm(100, generator=g)[:37]
    v0 = torch.rand(37, generator=g).bfloat16() * 3 - 1.5
    got = daps.select(ids, v0, n, 0, g)
    assert got.dtype == torch.long and len(set(got.tolist())) == n == len(got)
    assert set(got.tolist()) <= set(ids.tolist())
    assert daps.report["accepted"] + daps.report["filled"] == n and daps.report["rounds"] <= 10


def test_daps_later_rounds_skip_what_is_taken():
    """With a floor of .5 on every prompt, M of M are accepted in rounds, not filled up."""
    daps = _daps_on(30, a_min=0.5)
    assert sorted(_daps_select(daps, torch.ones(30), 30).tolist()) == list(range(30))
    assert 1 < daps.report["rounds"] <= 10 and daps.report["filled"] == 0


def test_daps_chance_comes_from_the_generator_alone():
    """Equal generators select equally, on every rank, and torch's global stream is not touched."""
    before = torch.get_rng_state()
    v0 = torch.linspace(-1, 1, 40)
    picks = [_daps_select(_daps_on(40), v0, 9, seed).tolist() for seed in (1, 1, 2)]
    assert picks[0] == picks[1] != picks[2]
    assert torch.equal(before, torch.get_rng_state())


def test_daps_update_is_decay_then_sum():
    """Counts = a loop that decays all, then adds each outcome; a batch of none only decays."""
    g = torch.Generator().manual_seed(0)
    daps, S, N = DAPS(6, decay=.9), [0.] * 6, [0.] * 6
    for size in (5, 0, 12, 1):
        ids = torch.randint(6, (size,), generator=g)
        right = torch.randint(2, (size,), generator=g)
        daps.update(ids, right)
        S, N = [.9 * s for s in S], [.9 * n for n in N]
        for i, r in zip(ids.tolist(), right.tolist()):
            S[i], N[i] = S[i] + r, N[i] + 1
    torch.testing.assert_close(daps.successes, torch.tensor(S, dtype=torch.float64))
    torch.testing.assert_close(daps.trials, torch.tensor(N, dtype=torch.float64))


def test_daps_state_is_a_copy():
    """A saved state does not follow later updates, and a loaded one goes on by itself."""
    daps, other = DAPS(3), DAPS(3)
    daps.update(torch.tensor([2]), torch.tensor([1.]))
    state = daps.state_dict()
    other.load_state_dict(state)
    daps.update(torch.tensor([0]), torch.tensor([1.]))
    other.update(torch.tensor([1]), torch.tensor([0.]))
    assert state["successes"].tolist() == [0, 0, 1] == state["trials"].tolist()
    assert other.trials.tolist() == [0, 1, .99] and daps.trials.tolist() == [1, 0, .99]


def test_daps_mixed_groups():
    """Kept: groups with a right and a wrong response, in any row order, of any size above one."""
    reward, group = torch.tensor([1., -1, 1, -1, 1, -1, 1]), torch.tensor([7, 7, 3, 5, 3, 5, 9])
    want = [True, True, False, False, False, False, False]
    assert mixed_groups(reward, group).tolist() == want
    assert mixed_groups((reward > 0).float(), group).tolist() == want  # 0/1 as well as −1/+1
    assert mixed_groups(torch.zeros(0), torch.zeros(0, dtype=torch.long)).shape == (0,)
    g = torch.Generator().manual_seed(0)
    reward = torch.randint(2, (60,), generator=g) * 2. - 1
    group = torch.randint(25, (60,), generator=g)
    for r, i, kept in zip(reward, group, mixed_groups(reward, group)):
        assert kept == (len(set(reward[group == i].tolist())) == 2)


@pytest.mark.parametrize("ids, v0, n, says", [
    ([0, 1, 1], [0., 0, 0], 1, "distinct"), ([0, 1, 9], [0., 0, 0], 1, "found 9"),
    ([0, -1, 2], [0., 0, 0], 1, "found -1"), ([0., 1, 2], [0., 0, 0], 1, "whole numbers"),
    ([0, 1, 2], [0., float("nan"), 0], 1, "1 NaN"), ([0, 1, 2], [0., 0], 1, "shape"),
    ([0, 1, 2], [0., 0, 0], 4, "n must be"), ([0, 1, 2], [0., 0, 0], -1, "n must be"),
    ([[0, 1]], [[0., 0]], 1, "one dimension")])
def test_daps_select_refuses(ids, v0, n, says):
    """Repeats, strangers, NaN, other shapes and more than there are get one clear sentence."""
    with pytest.raises(ValueError, match=says):
        DAPS(5).select(torch.tensor(ids), torch.tensor(v0), n, 0, torch.Generator())


@pytest.mark.parametrize("ids, right, says", [
    ([0, 1], [1., -1], "found -1"), ([0, 1], [1., float("nan")], "found nan"),
    ([0, 5], [1., 0], "found 5"), ([0, 1], [1.], "shape"), ([0., 1], [1., 0], "whole numbers")])
def test_daps_update_refuses_and_changes_nothing(ids, right, says):
    """A wrong outcome, id or shape is refused before the counts decay."""
    daps = DAPS(5)
    daps.update(torch.arange(5), torch.ones(5))
    with pytest.raises(ValueError, match=says):
        daps.update(torch.tensor(ids), torch.tensor(right))
    assert daps.trials.tolist() == [1] * 5 == daps.successes.tolist()


def test_daps_refuses_bad_settings_and_states():
    """Settings out of range, a state of another size or without counts, other shapes."""
    for bad in ({"a_min": 1.5}, {"n_c": 0.}, {"decay": 2.}, {"uniform": -1}, {"ramp": -1}):
        with pytest.raises(ValueError, match="found"):
            DAPS(5, **bad)
    daps, small = DAPS(5), DAPS(4).state_dict()
    mixed_sizes = {"successes": torch.ones(5), "trials": torch.ones(4)}
    for state in (small, {}, {"successes": torch.ones(5)}, mixed_sizes):
        with pytest.raises(ValueError, match="state must hold"):
            daps.load_state_dict(state)
    assert daps.successes.tolist() == [0] * 5
    for call in (lambda: accept_prob(torch.ones(1), -.1), lambda: DAPS(0),
                 lambda: fuse(torch.ones(1), torch.zeros(1), torch.zeros(1), 0.),
                 lambda: mixed_groups(torch.ones(2), torch.ones(3)),
                 lambda: mixed_groups(torch.tensor([float("nan")]), torch.tensor([1]))):
        with pytest.raises(ValueError, match="found"):
            call()


def test_daps_nearest_half_by_hand():
    """V = .9, −.1, 0, .3, −2: nearest to p = ½ are 0, −.1, .3; of equals the first given."""
    assert nearest_half(torch.tensor([.9, -.1, 0, .3, -2]), 3).tolist() == [2, 1, 3]
    assert nearest_half(torch.tensor([.5, -.5, .5, 0.]), 3).tolist() == [3, 0, 1]
    assert nearest_half(torch.tensor([5., -1, 1], dtype=torch.bfloat16), 3).tolist() == [0, 1, 2]
    assert nearest_half(torch.zeros(0), 0).tolist() == []


def test_daps_nearest_half_takes_what_daps_accepts_most():
    """The n candidates of PCL are those of highest a: 4p(1 − p) falls with |p − ½|."""
    v0 = torch.randperm(101, generator=torch.Generator().manual_seed(0)).double() / 50 - .993
    a = accept_prob(success_from_value(v0))
    assert nearest_half(v0, 30).tolist() == a.argsort(descending=True)[:30].tolist()


def test_daps_greso_by_hand():
    """p = ½: 1, ½, ¼ after no, one, two uniform groups; from 7 on the floor .01 holds."""
    z = torch.tensor([0, 1, 2, 6, 7, 500])
    assert greso_accept_prob(z).tolist() == [1, .5, .25, 2**-6, .01, .01]
    assert greso_accept_prob(z[:2], 0., 0.).tolist() == [1, 0]


def test_daps_uniform_streak():
    """+1 after all right or all wrong, 0 after a mixed group, others and the input untouched."""
    streak = torch.tensor([3, 4, 5, 6, 0])
    reward = torch.tensor([1., -1, -1, 1, -1, 1, 1])
    ids = torch.tensor([0, 1, 1, 3, 0, 4, 4])
    assert uniform_streak(streak, reward, ids).tolist() == [0, 5, 5, 7, 1]
    assert streak.tolist() == [3, 4, 5, 6, 0]
    assert uniform_streak(streak, reward[:0], ids[:0]).tolist() == streak.tolist()


def test_daps_accept_is_what_select_does():
    """DAPS.select is accept on its acceptance, and the generator ends in the same state."""
    v0 = torch.linspace(-1, 1, 40)
    daps, one, two = _daps_on(40), *(torch.Generator().manual_seed(5) for _ in range(2))
    ids = torch.arange(39, -1, -1)
    picked = daps.select(ids, v0, 25, 0, one)
    taken, drawn = accept(daps.acceptance(ids, v0, 0), 25, two)
    assert picked.tolist() == ids[taken].tolist() and drawn.items() <= daps.report.items()
    assert torch.equal(one.get_state(), two.get_state())


def test_daps_accept_follows_greso():
    """Few out of many: a prompt is taken in proportion to max(p^z, floor); 0 and 1 are certain."""
    z = torch.arange(4).repeat(500)
    counts, g = torch.zeros(4), torch.Generator().manual_seed(0)
    for _ in range(400):
        counts += torch.bincount(z[accept(greso_accept_prob(z), 20, g)[0]], minlength=4)
    expected = counts.sum() * greso_accept_prob(torch.arange(4)) / 1.875
    assert ((counts - expected) ** 2 / expected).sum() < 16.27  # the 0.1 % tail, 3 degrees
    taken, drawn = accept(torch.tensor([0., 1, 0, 1]), 3, g)
    assert set(taken[:2].tolist()) == {1, 3} and drawn == {"rounds": 10, "accepted": 2, "filled": 1}


@pytest.mark.parametrize("call, says", [
    (lambda g: nearest_half(torch.tensor([0., torch.nan]), 1), "v0 .* 1 NaN"),
    (lambda g: nearest_half(torch.zeros(2, 2), 1), r"v0 .*\(2, 2\)"),
    (lambda g: nearest_half(torch.zeros(2), 3), "n must be in 0 … 2"),
    (lambda g: accept(torch.zeros(2), -1, g), "found -1"),
    (lambda g: accept(torch.tensor([torch.nan]), 1, g), "a must .* 1 NaN"),
    (lambda g: greso_accept_prob(torch.ones(2), 1.5), "found 1.5, 0.01"),
    (lambda g: greso_accept_prob(torch.ones(2), floor=-.1), "found 0.5, -0.1"),
    (lambda g: uniform_streak(torch.zeros(2), torch.ones(1), torch.tensor([2])), "found 2"),
    (lambda g: uniform_streak(torch.zeros(2), torch.ones(1), torch.tensor([-1])), "found -1"),
    (lambda g: uniform_streak(torch.zeros(2), torch.ones(2), torch.tensor([0])), "one shape")])
def test_daps_other_selections_refuse(call, says):
    """NaN, other shapes, strangers, numbers out of range and more than there are: one sentence."""
    with pytest.raises(ValueError, match=says):
        call(torch.Generator())


# -------------------------------------------------------------------------------------- rollout.py


class _Scripted(nn.Module):
    """A stand-in for a language model: the logits at position p are logits[p], whatever came."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(torch.as_tensor(logits, dtype=torch.float32))
        self.seen = []

    def forward(self, input_ids, attention_mask, position_ids, past_key_values, use_cache,
                logits_to_keep):
        kv = torch.zeros(*input_ids.shape, 1).unsqueeze(1)  # [R, heads = 1, n, d = 1]
        past_key_values.update(kv, kv, 0)
        self.seen.append((input_ids, attention_mask))
        return SimpleNamespace(logits=self.logits[position_ids[:, -1:]])


def _one_hot(ids, vocab=10):
    """Logits that force the given token at each position."""
    return 50 * torch.nn.functional.one_hot(torch.tensor(ids), vocab)


def _llama(vocab=13, **how):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3,
        max_position_embeddings=64, bos_token_id=None, eos_token_id=1, pad_token_id=1, **how
    )).eval()


PROMPTS = [[5, 1, 6], [7], [3, 3, 3, 3, 9, 2], [8, 2], [4, 5, 6, 7], [2, 9], [11, 12, 1, 1]]


def test_rollout_log_prob_at_the_sampling_temperature():
    """log softmax([2, 1, 0] / 0.5)[0] = −0.142932 for sampler and trainer alike."""
    logits = torch.tensor([[[2.0, 1.0, 0.0]]])
    assert torch.allclose(token_logp(logits, torch.tensor([[0]]), temperature=0.5),
                          torch.tensor([[-0.142932]]), atol=1e-6)
    for seed in range(50):
        out = generate(_Scripted(logits[0].repeat(4, 1)), [[1]], max_new_tokens=1, temperature=0.5,
                       eos_id=2, pad_id=2, generator=torch.Generator().manual_seed(seed))
        if out[0][0, -1] == 0:
            assert abs(out[3][0, 0] + 0.142932) < 1e-6
            return
    raise AssertionError("token 0 has probability 0.87 and was never drawn in 50 tries")


def test_rollout_pad_equal_to_eos():
    """With pad = eos = 2 the 2 inside the prompt is attended and the one that ends is trained."""
    model = _Scripted(_one_hot([0, 0, 7, 8, 2, 9]))
    tokens, attention, mask, logp = generate(
        model, [[5, 2, 6], [6]], max_new_tokens=4, eos_id=2, pad_id=2)
    assert tokens[0].tolist() == [5, 2, 6, 7, 8, 2, 2]  # row 1: position 0 forces 0, 7 8 2 follow
    assert attention[0].tolist() == [True] * 6 + [False]
    assert mask.tolist() == [[True, True, True, False], [True, True, True, True]]
    assert tokens[1].tolist() == [2, 2, 6, 0, 0, 7, 8] and attention[1].tolist()[:2] == [False] * 2
    assert model.seen[0][1][0].tolist() == [1, 1, 1] and model.seen[0][1][1].tolist() == [0, 0, 1]


def _verified(model, prompts, limit, answer="", eos=(2,), pad=2):
    tokenizer = SimpleNamespace(
        pad_token_id=pad, batch_decode=lambda rows, skip_special_tokens: [str(r) for r in rows])
    return collect(model, tokenizer, prompts, [answer] * len(prompts), torch.arange(len(prompts)),
                   lambda text, a: 1.0 if a in text else -1.0, eos_id=list(eos),
                   max_new_tokens=limit)


def test_rollout_truncated_response_is_a_failure():
    """Cut by the limit: both sampled tokens are trained, R = −1 even if the text is right."""
    batch = _verified(_Scripted(_one_hot([5, 6, 6, 6])), [[1]], 2)
    assert batch.tokens.tolist() == [[1, 5, 6]] and batch.mask.tolist() == [[True, True]]
    assert batch.truncated.tolist() == [True] and batch.reward.tolist() == [-1.0]
    whole = _verified(_Scripted(_one_hot([5, 2, 6, 6])), [[1]], 2)
    assert whole.truncated.tolist() == [False] and whole.reward.tolist() == [1.0]


def test_rollout_several_end_tokens_and_the_verifier_sees_the_response_alone():
    """Any of the end tokens ends; the verifier gets the sampled tokens, no prompt, no padding."""
    batch = _verified(_Scripted(_one_hot([5, 9, 6, 6])), [[1], [1]], 4, "[5, 9]", eos=(2, 9))
    assert batch.reward.tolist() == [1.0, 1.0] and batch.mask.sum(1).tolist() == [2, 2]


def test_rollout_sampler_log_probs_are_the_trainers():
    """log μ from the cache, with rows dropped and refilled, = log π of one full pass, to 1e-5."""
    model = _llama()
    for rows in (1, 3, 64):
        tokens, attention, mask, logp = generate(
            model, PROMPTS * 4, max_new_tokens=12, temperature=0.7, eos_id=[1, 4], pad_id=1,
            generator=torch.Generator().manual_seed(rows), max_rows=rows)
        assert len(set(mask.sum(1).tolist())) > 3  # lengths differ, so rows were dropped
        T = mask.shape[1]
        logits = model(tokens, attention_mask=attention.long(), position_ids=positions(attention)
                       ).logits
        scored = token_logp(response(logits, T), tokens[:, -T:], temperature=0.7)
        assert ((scored - logp).abs() * mask).max() < 1e-5
        assert (logp[~mask] == 0).all() and logp.dtype == torch.float32


def test_rollout_greedy_is_transformers_generate():
    """Temperature 0 is model.generate(do_sample=False), in the prompts' order, at any max_rows."""
    model, results = _llama(), []
    for rows in (1, 2, 5, 64):
        tokens, _, mask, logp = generate(model, PROMPTS, max_new_tokens=9, temperature=0, eos_id=1,
                                         pad_id=1, max_rows=rows)
        results.append([row[m].tolist() for row, m in zip(tokens[:, -mask.shape[1]:], mask)])
        assert (logp[mask] < 0).all()  # scored at temperature 1
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                             max_new_tokens=9)
        expected.append(out[0, len(prompt):].tolist())
    assert all(result == expected for result in results)


def test_rollout_positions_stop_where_a_row_ends():
    """With learned positions, prompt and response may fill them all, whatever the other rows do."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(
        vocab_size=7, n_positions=14, n_embd=8, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1,
        initializer_range=1.0)).eval()
    prompts = [[2] * 6, [3], [4], [5] * 4] * 20
    tokens, attention, mask, _ = generate(
        model, prompts, max_new_tokens=8, eos_id=1, pad_id=1, max_rows=40,
        generator=torch.Generator().manual_seed(0))
    assert attention.sum(1).max() == 14 and (mask.sum(1) < 4).any()


def test_rollout_draws_from_the_softmax():
    """First tokens of 4,000 rows follow softmax(z/τ): frequencies within 4.5 standard errors."""
    z = torch.tensor([[1.0, 0.0, -1.0, 2.0]])
    tokens, *_ = generate(_Scripted(z), [[0]] * 4000, max_new_tokens=1, temperature=1.5, eos_id=9,
                          pad_id=9, generator=torch.Generator().manual_seed(0), max_rows=300)
    p = torch.softmax(z[0] / 1.5, 0)
    share = torch.bincount(tokens[:, -1], minlength=4) / 4000
    assert ((share - p).abs() < 4.5 * (p * (1 - p) / 4000).sqrt()).all()


def _paged_sampler_runs(model):
    """Skips a test where transformers' continuous batching cannot: 5.17 on a CPU without psutil."""
    try:
        rollout.generate_batch(model, [[2]], max_new_tokens=1, eos_id=1, pad_id=1)
    except RuntimeError as error:
        if "psutil" not in str(error):
            raise
        pytest.skip(str(error))


def test_rollout_both_samplers_draw_from_the_same_policy():
    """generate_batch against generate: the trainer's log-probs to 1e-4 on every sampled token, in
    the prompts' order, and first tokens in the same proportions."""
    model, prompts, shares = _llama(), PROMPTS[:4] * 150, []
    _paged_sampler_runs(model)
    for sampler in (generate, rollout.generate_batch):
        tokens, attention, mask, logp = sampler(
            model, prompts, max_new_tokens=5, temperature=1.3, eos_id=[1, 4], pad_id=1,
            generator=torch.Generator().manual_seed(0), max_rows=32)
        T = mask.shape[1]
        logits = model(tokens, attention_mask=attention.long(), position_ids=positions(attention)
                       ).logits
        scored = token_logp(response(logits, T), tokens[:, -T:], temperature=1.3)
        assert ((scored - logp).abs() * mask).max() < 1e-4
        assert (attention[:, :-T].sum(1) == torch.tensor([len(p) for p in prompts])).all()
        ended = torch.isin(tokens[:, -T:], torch.tensor([1, 4])) & mask
        assert (ended.sum(1) <= 1).all() and (mask.sum(1)[~ended.any(1)] == T).all()
        shares.append(torch.bincount(tokens[:, -T], minlength=13) / 600)
    error = (2 * shares[0] * (1 - shares[0]) / 600 + 1e-5).sqrt()
    assert ((shares[0] - shares[1]).abs() < 4.5 * error).all()


def test_rollout_shared_beginnings_are_fed_once(monkeypatch):
    """Prompts that begin alike give the same sample from a copied cache, in half of the tokens.
    """
    model, rng = _llama().double(), random.Random(0)
    text = [[rng.randrange(2, 13) for _ in range(n)] for n in (200, 211)]
    prompts = [x[:n] + [7, 8, 9] for x in text for n in (150, 160, 171, 190)] + [[3, 4, 5]]
    prompts += [prompts[3]] * 3  # a group's prompts are equal
    assert rollout.begins_alike(prompts) == [3] * 4 + [7] * 4 + [8] + [3] * 3
    assert rollout.begins_alike([[1] * 32, [1] * 32]) == [0, 1]  # nothing left to copy
    fed, forward = [], rollout._Live.forward
    monkeypatch.setattr(rollout._Live, "forward", lambda self, row, tokens, *rest: (
        fed.append(tokens.numel()), forward(self, row, tokens, *rest))[1])

    def sample(rows):
        """One response per prompt, and how many tokens were fed for them."""
        fed.clear()
        out = generate(model, prompts, max_new_tokens=9, temperature=0.8, eos_id=1, pad_id=1,
                       max_rows=rows, generator=torch.Generator().manual_seed(0))
        return out, sum(fed)

    shared = {rows: sample(rows) for rows in (7, 64)}
    monkeypatch.setattr(rollout, "begins_alike", lambda prompts: list(range(len(prompts))))
    for rows, (out, tokens) in shared.items():
        plain, all_tokens = sample(rows)
        assert all(torch.equal(x, y) for x, y in zip(out[:3], plain[:3]))
        assert (out[3] - plain[3]).abs().max() < 1e-6
        assert tokens < all_tokens / (2 if rows == 64 else 1)


def test_rollout_same_generator_same_sample():
    """The sample is a function of the generator's state."""
    a, b, c = (generate(_llama(), PROMPTS, max_new_tokens=9, eos_id=1, pad_id=1, max_rows=3,
                        generator=torch.Generator().manual_seed(seed))[0] for seed in (1, 1, 2))
    assert torch.equal(a, b) and not (a.shape == c.shape and torch.equal(a, c))


def test_rollout_low_precision_model_has_float32_log_probs():
    """A bf16 model's log-probs are float32 and sum to one over the vocabulary."""
    logp = generate(_llama().bfloat16(), PROMPTS, max_new_tokens=5, eos_id=1, pad_id=1)[3]
    assert logp.dtype == torch.float32 and torch.isfinite(logp).all()


def test_rollout_response_and_positions():
    """State t stands one to the left of token t; positions count real tokens alone."""
    assert response(torch.arange(7)[None], 3).tolist() == [[3, 4, 5]]
    attention = torch.tensor([[0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]]).bool()
    assert positions(attention)[0, 2:5].tolist() == [0, 1, 2]
    assert positions(attention)[1, :4].tolist() == [0, 1, 2, 3]


def _batch(prompt_lengths, lengths):
    B, P, T = len(lengths), max(prompt_lengths), max(lengths)
    at, ends = torch.arange(P + T), torch.tensor(lengths)[:, None]
    starts = P - torch.tensor(prompt_lengths)[:, None]
    attention, mask = (at >= starts) & (at < P + ends), torch.arange(T) < ends
    tokens = torch.where(attention, at + 100 * torch.arange(B)[:, None] - starts, 0)
    return Batch(tokens, attention, mask, torch.arange(B), torch.ones(B), torch.zeros(B).bool(),
                 mask.float() * 7, value=mask.float() * torch.arange(1, T + 1))


def _real(batch):
    return [(t[a].tolist(), m.sum().item(), v[m].tolist(), i.item()) for t, a, m, v, i in zip(
        batch.tokens, batch.attention, batch.mask, batch.value, batch.prompt_id)]


def test_rollout_take_and_concatenate_keep_every_real_token():
    """Rows cut to their own width and put together again lose nothing; no column is all padding."""
    whole = _batch([3, 1, 5, 2], [4, 6, 1, 2])
    parts = [take(whole, torch.tensor(rows)) for rows in ([0, 3], [2], [1])]
    assert parts[0].tokens.shape == (2, 3 + 4) and parts[1].tokens.shape == (1, 5 + 1)
    assert all(part.attention.any(0).all() for part in parts)
    again = concatenate(parts)
    assert again.tokens.shape == whole.tokens.shape and again.logp_old is None
    assert _real(again) == [_real(whole)[i] for i in (0, 3, 2, 1)]
    assert _real(take(whole, torch.tensor([True, False, False, True]))) == [
        _real(whole)[i] for i in (0, 3)]


def test_rollout_take_keeps_a_gap_in_the_mask():
    """Tool output at the end of the cut: attended columns stay though nothing there is trained."""
    batch = _batch([2, 2], [5, 3])
    batch.mask[0, 1:3] = False
    assert take(batch, torch.tensor([0])).mask.tolist() == [[True, False, False, True, True]]


@pytest.mark.parametrize("change, words", [
    (dict(prompts=[]), "no prompt"), (dict(prompts=[[1], []]), "empty prompt at 1"),
    (dict(max_new_tokens=0), "max_new_tokens"), (dict(temperature=-1), "temperature"),
    (dict(temperature=float("nan")), "temperature"), (dict(max_rows=0), "max_rows")])
def test_rollout_generate_refuses(change, words):
    """One sentence that names the argument, before the model is called."""
    how = dict(prompts=[[1]], max_new_tokens=1, eos_id=2, pad_id=2) | change
    with pytest.raises(ValueError, match=words):
        generate(_Scripted([[0.0]]), how.pop("prompts"), **how)


# ---- rollout.py: embedded task


def test_rollout_task_by_hand():
    """3+7@d= : 0, 7, 4, 1; the right chain ends with d1 and a wrong one does not."""
    assert rollout.demonstration("3+7@d=", 0.0, random.Random(0)) == "a0b7c4d1$"
    assert rollout.chain_reward("a0b7c4d1", "d1") == 1.0
    assert rollout.chain_reward("a0b7c4d2", "d1") == -1.0 == rollout.chain_reward("", "d1")


def test_rollout_task_problems_and_demonstrations():
    """2,600 distinct problems, none in both parts; flawless demonstrations are all right."""
    train, held_out = rollout.task_problems(), rollout.task_problems(held_out=True)
    assert len({p.prompt for p in train + held_out}) == 2600 and len(held_out) == 400
    rng = random.Random(0)
    right = [rollout.chain_reward(rollout.demonstration(p.prompt, 0.0, rng)[:-1], p.answer)
             for p in train]
    assert set(right) == {1.0}
    wrong = [rollout.chain_reward(rollout.demonstration(p.prompt, 0.1, rng)[:-1], p.answer)
             for p in train if p.prompt[4] == "z"]
    assert 0 < wrong.count(1.0) < len(wrong) / 3


def test_rollout_task_tokenizer_is_one_of_transformers(tmp_path):
    """Saved and loaded as any tokenizer: a token per character, `$` ends and pads."""
    rollout.task_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("3+7@d=a0$").input_ids
    assert len(ids) == 9 and ids[-1] == tokenizer.eos_token_id == tokenizer.pad_token_id
    assert tokenizer.batch_decode([ids], skip_special_tokens=True) == ["3+7@d=a0"]
    assert rollout.encode_prompt(tokenizer, Problem("3+7@d=", "d1")) == ids[:6]


# -------------------------------------------------------------- rollout.py, problems and verifiers


# The first spelling is the data set's, the others are a model's.
PROBLEMS_SAME = [
    ["72", "72.", "$72$", "72.0", r"\$72", "+72", "x = 72", "072", "72 dollars", r"72\text{ cm}^2",
     r"72^\circ", r"72^{\circ}", r"72\%", r"\text{72}", "144/2", r"\dfrac{144}{2}", r"\(72\)",
     r"72\,\mathrm{cm}", "72 square units", r" 72 \text{ hours}."],
    ["1,234", "1234", "1{,}234", r"1,\!234", r"1\,234", "1234.00", r"\$1,234", "1,234 miles"],
    ["1234567.5", "1,234,567.5", r"1{,}234{,}567.50", r"\frac{2469135}{2}"],
    [r"\frac{1}{2}", "1/2", "0.5", ".5", r"\frac12", r"\dfrac12", r"\tfrac{1}{2}", r"\frac1{2}",
     r"\frac{1}2", "2/4", "1 / 2", r"\frac{-1}{-2}", r"\frac{.5}{1}"],
    [r"-\frac{1}{2}", r"\frac{-1}{2}", r"\frac{1}{-2}", "-1/2", "-.5", "−0.5", r"x=-\frac12"],
    [r"\frac{3}{2}", r"1\frac{1}{2}", r"1\frac12", "1 1/2", "1.5"],
    [r"11\sqrt2", r"11\sqrt{2}", r"11 \sqrt {2}"],
    [r"\frac{\sqrt{3}}{2}", r"\sqrt{3}/2", r"\frac{\sqrt3}2", r"\dfrac{\sqrt 3}{2}"],
    [r"-\frac{\pi}{6}", r"\frac{-\pi}{6}", r"-\pi/6", r"-\dfrac\pi6"],
    [r"\left( 3, \frac{\pi}{2} \right)", r"(3,\pi/2)", r"\bigl(3.0,\,\tfrac{\pi}{2}\bigr)"],
    [r"\left[0,100\right)", "[0, 100)", r"x \in [0,100)", r"[0,\;100.0)"],
    [r"(-\infty, 2) \cup (3, \infty)", r"(-\infty,2)\cup(3,\infty)"],
    ["1,-2", "-2, 1", r"x = 1 \text{ or } x = -2", r"\{-2,1\}", "-2 and 1", "$1$, $-2$", "1.0,-2"],
    [r"1 \pm \sqrt{19}", r"1+\sqrt{19}, 1-\sqrt{19}", r"1-\sqrt{19} \text{ and } 1+\sqrt{19}"],
    [r"\pm 3", "3, -3", r"\{-3, 3\}"],
    ["(1,2), (3,4)", r"\{(3,4),(1,2)\}", "(3,4),(1,2)"],
    [r"\text{Evelyn}", "Evelyn", r"\textbf{Evelyn}", r"\mbox{Evelyn}."],
    [r"\text{(C)}", "C", "(C)", r"\textbf{C}"],
    ["y = 2x + 3", "2x+3", "f(x) = 2x + 3"],
    ["52_8", "52_{8}"],
    ["0,100", "0, 100", "100 and 0"],
    ["(10,100)", "(10, 100)"],
    ["(1{,}000, 2)", "(1000,2)", r"(1\,000, 2.0)"],
    ["x^2+5", "x^{2} + 5"],
    [r"3 \cdot 10^5", r"3\times 10^5", r"3 × 10^5"],
    [r"x \leq 3", r"x\le 3"],
    [r"\begin{pmatrix}-2 \\ \frac12\end{pmatrix}", r"\begin{pmatrix}-2\\\frac{1}{2}\end{pmatrix}"],
]
PROBLEMS_DIFFERENT = [
    ("72", "27"), ("72", "-72"), ("1,234", "1, 234"), ("(1,234)", "1234"), ("[0,100]", "(0,100)"),
    ("(1,2)", "(2,1)"), ("(1,2)", "1,2"), ("1,2", "1"), ("1,1", "1"), ("0.333", "1/3"),
    (r"\frac{1}{0}", r"\frac{2}{0}"), ("2^{10}", "1024"), (r"2\cdot\frac12", "2.5"), ("x", "y"),
    (r"5\text{ a.m.}", r"5\text{ p.m.}"), (r"\frac{-1+x}{2}", r"-\frac{1+x}{2}"), ("1 1/2", "11/2"),
    ("52_8", "52"), (r"\sqrt{23}", r"\sqrt23"), ("10", "1"), ("x^2", "x2"), ("1-2", "1+2"),
]
PROBLEMS_HOSTILE = [
    "9**9**9**9", "9^{9^{9^{9^9}}}", "10**1000000000", "1e999999999", "99999999!", "9" * 100_000,
    "1/" + "9" * 498, "0." + "9" * 498, r"\frac{1}{0}", "__import__('os').abort()", "(" * 100_000,
    "{" * 499, r"\frac" * 100, r"\text{" * 80, r"\text{" * 60 + "}" * 60, r"\le" * 80 + "ft" * 80,
    "," * 499, "((1,2)," * 70, "(" * 248 + "1,1" + ")" * 248, " " * 499, r"\pm" * 166,
    r"\pm," * 120, "-" * 499, "\\", "", "\x00", "\ud800", "٣", "²", "½", "nan", "inf", "1_0",
    "0x10", ".", "+", "-", "/", "1/", "{}", r"\{\}",
]


def test_problems_box_is_the_last_one_closed():
    """extract_boxed gives the last closed box, whole, with its nested braces; none without one."""
    cases = {
        r"First \boxed{1}, no wait \boxed{2}": "2",
        r"\boxed{5": None,
        "the answer is 5": None,
        r"\boxed{1} then \boxed{5": "1",
        r"\boxed{\frac{1}{\sqrt{2}}}.": r"\frac{1}{\sqrt{2}}",
        r"\boxed{\{1, 2\}}": r"\{1, 2\}",
        r"\boxed{\left\{ x \right.}": r"\left\{ x \right.",
        r"a stray { and \fbox {7} }": "7",
        r"}} \boxed{3}": "3",
        r"\boxed{\boxed{4}}": "4",
        r"\boxed{6 \text{or \fbox{8}} 9}": "8",
        r"so $\boxed 12$. As asked, in \boxed form": "12",
        r"\boxed{}": "",
        r"\boxed{a\\}": r"a\\",
    }
    for text, expected in cases.items():
        assert extract_boxed(text) == expected, text


def test_problems_answers_that_mean_the_same():
    """Every spelling of a row gets the reward of every other, and a second pass changes nothing."""
    for row in PROBLEMS_SAME:
        for spelling in row:
            for answer in (row[0], row[-1]):
                assert math_reward(rf"so \boxed{{{spelling}}}.", answer) == 1.0, (spelling, answer)
            assert canonical(canonical(spelling)) == canonical(spelling), spelling


def test_problems_answers_that_differ():
    """Rows do not meet: no spelling of one is right for another, nor in the hand-made pairs."""
    rows = [{canonical(spelling) for spelling in row} for row in PROBLEMS_SAME]
    assert all(len(row) == 1 for row in rows) and len(set.union(*rows)) == len(rows)
    for one, other in PROBLEMS_DIFFERENT:
        assert math_reward(rf"\boxed{{{one}}}", other) == -1.0, (one, other)
    assert math_reward("the answer is 72", "72") == -1.0
    assert math_reward(r"\boxed{72", "72") == -1.0
    assert math_reward(r"\boxed{}", "") == -1.0
    assert math_reward(r"\boxed{033}", "33") == 1.0


def test_problems_last_number():
    """number_reward compares the last number of the text by its value."""
    right = [
        ("She has 5 - 2 = 3 apples left, so 1,234.", "1234"), ("It is -3.5.", "-7/2"),
        ("about $18.", "18"), ("x is 3/4", "0.75"), ("10-3", "3"), ("50%", "50"), ("−2", "-2"),
        ("a total of $1,234.50!", r"\$1234.5"), (r"equals \frac{3}{4}", ".75"), ("33", "033"),
        (r"\boxed{7}", "7"), ("#### 72", "72"), ("1{,}000", "1,000"), ("1, 2 and 3", "3"),
    ]
    wrong = [("no number", "5"), ("", "5"), ("5 or 6", "5"), ("5", "-5"), ("9**9**9**9", "1")]
    for text, answer in right:
        assert number_reward(text, answer) == 1.0, text
    for text, answer in wrong:
        assert number_reward(text, answer) == -1.0, text


def test_problems_hostile_text_is_wrong_at_once_and_the_same_in_a_thread():
    """No text raises, hangs or is evaluated, and a worker thread comes to the same verdicts."""
    long = [
        r"\boxed{" * 30_000, "{" * 200_000, r"\boxed" + " " * 200_000, "\\" * 200_001,
        "1," * 100_000, r"\boxed{" * 20_000 + "}" * 20_000, "1" * 200_000, "-" * 200_000,
        r"\frac{1" * 30_000,
    ]
    texts = long + [rf"\boxed{{{text}}}" for text in PROBLEMS_HOSTILE] + PROBLEMS_HOSTILE
    verify = [math_reward, number_reward]

    def verdicts():
        return [f(text, "1024") for text in texts for f in verify]

    here, there = verdicts(), []
    thread = threading.Thread(target=lambda: there.extend(verdicts()))
    thread.start()
    thread.join()
    assert here == there and set(here) == {-1.0}
    for text in PROBLEMS_HOSTILE:  # as the answer of a data set
        assert math_reward(r"\boxed{1024}", text) == number_reward("1024", text) == -1.0


def test_problems_canonical_is_idempotent():
    """canonical(canonical(x)) == canonical(x) for random strings of pieces of LaTeX."""
    pieces = r"\left \right \frac \dfrac \sqrt \text{ { } { } ( ) [ ] \{ \} , , . / - + \pm \pi x"
    pieces += r" 1 2 10 234 0 = \in \cdot ^ _ ^{2} ^\circ \% $ \, \! \\ \ and or cm {,} \leq"
    pieces = (pieces + r" \cup A (C) p.m. ٣").split(" ") + [" "]
    rng = random.Random(0)
    for _ in range(2000):
        text = "".join(rng.choices(pieces, k=rng.choice([2, 4, 8, 16, 120])))
        once = canonical(text)
        assert canonical(once) == once, text


def _problems_file(tmp_path, *rows):
    path = tmp_path / "problems.jsonl"
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def test_problems_every_layout_loads(tmp_path):
    """GSM8K, MATH, AIME, DAPO-Math and verl rows load; blank lines, BOM and CRLF do no harm."""
    chat = [{"role": "system", "content": "Think."}, {"role": "user", "content": "2+2?"}]
    path = _problems_file(
        tmp_path,
        b'\xef\xbb\xbf{"question": "q1", "answer": "5 * 2 = 10\\n#### 1,234"}\r',
        b"  \r",
        {"problem": "q2", "solution": r"$\boxed{1}$, no: $\boxed{\frac{1}{2}}$."},
        {"problem": "q3", "answer": 33, "solution": r"\boxed{no}", "prompt": None},
        {"ID": "2024-I-1", "problem": "q4", "answer": "033"},
        {"prompt": chat, "reward_model": {"ground_truth": "34", "style": "rule"}, "answer": None},
        {"prompt": "q6", "reward_model": {"style": "rule"}, "answer": 0, "question": "other"},
        {"question": "q7 \u2028 é", "answer": r"so \boxed{(1,2)}"},
    )
    expected = [
        ("q1", "1,234"), ("q2", r"\frac{1}{2}"), ("q3", "33"), ("q4", "033"),
        (chat, "34"), ("q6", "0"), ("q7 \u2028 é", "(1,2)"),
    ]
    assert load_problems(path) == [Problem(prompt, answer) for prompt, answer in expected]


@pytest.mark.parametrize("row, message", [
    (b'{"question": "q", ', "line 3: expected a JSON object, found broken JSON"),
    (b"\xff\xfe", "line 3: .*utf-8"),
    (b"[" * 50_000, "line 3: .*found a JSON list"),
    (b'{"a":' * 50_000, "line 3: .*broken JSON"),
    (b'[{"question": "q", "answer": "1"}]', "line 3: expected JSONL.*found a JSON list"),
    (b'"text"', 'line 3: expected a JSON object, found "text"'),
    ({"text": "q", "answer": "1"}, "line 3: .*prompt, problem, question; found text, answer"),
    ({"question": "q", "label": 1}, "line 3: .*answer, solution; found question, label"),
    ({"question": "q", "reward_model": "34"}, "line 3: .*reward_model.ground_truth, answer"),
    ({}, "line 3: .*found none"),
    ({"question": " \n", "answer": "1"}, "line 3: question: .*not empty"),
    ({"question": 5, "answer": "1"}, "line 3: question: .*found 5"),
    ({"prompt": [], "answer": "1"}, "line 3: prompt: "),
    ({"prompt": ["q"], "answer": "1"}, "line 3: prompt: "),
    ({"prompt": [{"role": "user"}], "answer": "1"}, "line 3: prompt: "),
    ({"prompt": [{"role": "system", "content": "q"}], "answer": "1"}, "line 3: prompt: .*user"),
    ({"prompt": [{"role": "user", "content": " "}], "answer": "1"}, "line 3: prompt: "),
    ({"question": "q", "answer": ["1"]}, "line 3: answer: expected a text or a number"),
    ({"question": "q", "answer": True}, "line 3: answer: expected a text or a number"),
    ({"question": "q", "answer": "5 #### "}, "line 3: answer: expected an answer"),
    ({"question": "q", "answer": ""}, "line 3: answer: expected an answer"),
    ({"problem": "q", "solution": r"\boxed{5"}, "line 3: solution: expected a closed"),
])
def test_problems_bad_line_is_named(tmp_path, row, message):
    """A line that does not fit raises one sentence with file, line, expected and found."""
    path = _problems_file(tmp_path, {"question": "q", "answer": "1"}, b"", row)
    with pytest.raises(ValueError, match="problems.jsonl, " + message) as error:
        load_problems(path)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_problems_empty_file(tmp_path):
    """A file without a problem is an error that says so."""
    with pytest.raises(ValueError, match="problems.jsonl: expected one JSON object per line"):
        load_problems(_problems_file(tmp_path, b"", b" "))


def _problems_tokenizer(chat_template=None):
    tokenizer = rollout.task_tokenizer()
    tokenizer.chat_template = chat_template
    return tokenizer


def test_problems_prompt_as_token_ids():
    """encode_prompt is a list of ids: the chat template's up to the reply, or the plain text's."""
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    plain, chat = _problems_tokenizer(), _problems_tokenizer(template)
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "2+2?"}]
    text, talk = Problem("2+2?", "4"), Problem(messages, "4")
    cases = [
        (plain, text, "", "2+2?"),
        (plain, text, "Box it.", "2+2?\nBox it."),
        (plain, talk, "", "S\n\n2+2?"),
        (chat, text, "", "<user>2+2?</><assistant>"),
        (chat, talk, "Box it.", "<system>S</><user>2+2?\nBox it.</><assistant>"),
    ]
    for tokenizer, problem, instruction, expected in cases:
        ids = encode_prompt(tokenizer, problem, instruction=instruction)
        assert type(ids) is list and all(type(i) is int for i in ids)
        assert tokenizer.decode(ids) == expected
    assert messages[-1]["content"] == "2+2?"


@pytest.fixture
def math_verify_script(monkeypatch):
    """Lets a test put another script in the place of the one that imports the package."""
    rollout._math_verify_process.cache_clear()
    yield lambda script: monkeypatch.setattr(rollout, "MATH_VERIFY", script)
    if rollout._math_verify_process.cache_info().currsize:
        rollout._math_verify_process().kill()
    rollout._math_verify_process.cache_clear()


def test_problems_math_verify_missing(math_verify_script):
    """Without the package the first call, whatever its text, is an error that names it."""
    math_verify_script("import a_package_that_nobody_has")
    for text in ("", r"\boxed{1}"):
        with pytest.raises(ImportError, match="pip install 'math-verify"):
            VERIFIERS["math_verify"](text, "1")


def test_problems_math_verify_survives_a_hang(math_verify_script, monkeypatch):
    """A question that hangs or kills the process is wrong, the next is answered; in a thread."""
    math_verify_script(
        "import json\nprint('ready', flush=True)\nwhile True:\n"
        "    answer, boxed = json.loads(input())\n"
        "    while boxed == 'hang': pass\n"
        "    print(1 / (boxed != 'die') and boxed == 'yes', flush=True)\n"
    )
    monkeypatch.setattr(rollout, "MATH_VERIFY_SECONDS", 0.5)
    verdicts = []

    def ask():
        for boxed in ("yes", "no", "hang", "yes", "die", "yes", "y" * 1000, "5"):
            verdicts.append(math_verify_reward(rf"\boxed{{{boxed}}}", "5.0"))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert verdicts == [1.0, -1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0]


def test_problems_math_verify_itself(math_verify_script):
    """The package, where installed, sees that x+1 is 1+x and survives a hostile expression."""
    pytest.importorskip("math_verify")
    assert math_verify_reward(r"\boxed{x+1}", "1+x") == 1.0
    assert math_verify_reward(r"\boxed{x+2}", "1+x") == -1.0
    assert math_verify_reward(r"\boxed{9**9**9**9}", "1+x") == -1.0
    assert math_verify_reward("x+1", "1+x") == -1.0


# ------------------------------------------------------------------------------- value_pretrain.py


def _pool_batch(rows, pad=0, widen=0):
    """rows (prompt, response, sampled, reward, prompt_id) -> a Batch, `widen` wider than needed."""
    P, T = (max(len(r[k]) for r in rows) + widen for k in (0, 1))
    tokens = torch.full((len(rows), P + T), pad)
    attention, mask = (
        torch.zeros(len(rows), P + T, dtype=torch.bool),
        torch.zeros(len(rows), T, dtype=torch.bool),
    )
    for i, (prompt, answer, sampled, *_) in enumerate(rows):
        ids = torch.tensor(list(prompt) + list(answer))
        tokens[i, P - len(prompt) : P + len(answer)] = ids
        attention[i, P - len(prompt) : P + len(answer)] = True
        mask[i, : len(answer)] = torch.tensor(sampled, dtype=torch.bool)
    return Batch(
        tokens=tokens,
        attention=attention,
        mask=mask,
        prompt_id=torch.tensor([r[4] for r in rows]),
        reward=torch.tensor([r[3] for r in rows]),
        truncated=torch.tensor([r[3] < 0 for r in rows]),
        logp_roll=torch.zeros(mask.shape),
    )


def _pool_rows(n, seed=0, longest=9, vocab=32):
    """n random trajectories with gaps, eos == pad == 2 inside prompts and responses."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(n):
        prompt, answer = (
            rng.integers(0, vocab, rng.integers(1, longest)).tolist() for _ in range(2)
        )
        sampled = (rng.random(len(answer)) > 0.3).tolist()
        sampled[-1] = True
        rows.append((prompt, answer[:-1] + [2], sampled, float(rng.choice([-1.0, 1.0])), i // 2))
    return rows


def _pool_state(path):
    return (path / "tokens.bin").read_bytes(), (path / "index.bin").read_bytes()


def _pool_index(length, reward, policy=0, prompt_id=0):
    index = np.zeros(len(length), vp.RECORD)
    index["sampled"], index["reward"], index["policy"], index["prompt_id"] = (
        length,
        reward,
        policy,
        prompt_id,
    )
    return index


def _pool_critic(dtype=torch.float64, seed=0):
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return Critic(LlamaModel(config).to(dtype))


def test_pool_layout_by_hand(tmp_path):
    """Sampled tokens are stored as id, all others as ~id; padding is not, pad == eos inside is."""
    pool = vp.TrajectoryPool(tmp_path)
    pool.append(
        _pool_batch(
            [
                ([5, 2, 6], [7, 8, 2], [1, 1, 1], 1.0, 40),
                ([9], [3, 4, 5, 6, 2], [1, 0, 0, 1, 1], -1.0, 41),
            ],
            pad=2,
            widen=1,
        ),
        7,
    )
    assert np.fromfile(tmp_path / "tokens.bin", "<i4").tolist() == [
        ~5,
        ~2,
        ~6,
        7,
        8,
        2,
        ~9,
        3,
        ~4,
        ~5,
        6,
        2,
    ]
    assert pool.index["offset"].tolist() == [0, 6] and pool.index["prompt_length"].tolist() == [
        3,
        1,
    ]
    assert pool.index["response_length"].tolist() == [3, 5] and pool.index["sampled"].tolist() == [
        3,
        3,
    ]
    assert pool.index["policy"].tolist() == [7, 7] and pool.index["prompt_id"].tolist() == [40, 41]
    assert pool.index["reward"].tolist() == [1, -1] and pool.index["truncated"].tolist() == [
        False,
        True,
    ]
    tokens, attention, mask, reward = pool.batch([1, 0], pad_id=2)
    assert tokens.tolist() == [
        [2, 2, 9, 3, 4, 5, 6, 2],
        [5, 2, 6, 7, 8, 2, 2, 2],
    ] and reward.tolist() == [-1, 1]
    assert attention.int().tolist() == [[0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0]]
    assert mask.int().tolist() == [[1, 0, 0, 1, 1], [1, 1, 1, 0, 0]]


def test_pool_round_trip_and_memory_map(tmp_path):
    """Any rows, whichever batch they came in, come back as the Batch that they would make."""
    rows, pool = _pool_rows(40), vp.TrajectoryPool(tmp_path)
    for k in range(0, 40, 8):
        pool.append(_pool_batch(rows[k : k + 8], pad=2, widen=k % 3), k)
    pool = vp.TrajectoryPool.open(tmp_path)
    assert (
        len(pool) == 40 and isinstance(pool.tokens, np.memmap) and isinstance(pool.index, np.memmap)
    )
    order = np.random.default_rng(1).permutation(40)[:13]
    want = _pool_batch([rows[i] for i in order], pad=2)
    tokens, attention, mask, reward = pool.batch(order, pad_id=2)
    for got, expected in (
        (tokens, want.tokens),
        (attention, want.attention),
        (mask, want.mask),
        (reward, want.reward),
    ):
        assert torch.equal(got, expected) and got.dtype == expected.dtype
    assert pool.index["policy"].tolist() == [8 * (i // 8) for i in range(40)]


def test_pool_append_in_three_is_append_in_one(tmp_path):
    """However trajectories are cut into appends and sessions, the two files are the same bytes."""
    rows = _pool_rows(12)
    vp.TrajectoryPool(tmp_path / "one").append(_pool_batch(rows), 3)
    pool = vp.TrajectoryPool(tmp_path / "three")
    pool.append(_pool_batch(rows[:5]), 3)
    pool.append(_pool_batch(rows[5:6], pad=2), 3)
    pool = vp.TrajectoryPool.open(tmp_path / "three")
    pool.append(_pool_batch(rows[6:], widen=2), 3)
    assert _pool_state(tmp_path / "one") == _pool_state(tmp_path / "three") and len(pool) == 12


def test_pool_torn_at_every_byte(tmp_path):
    """Cut at any byte of the last record or its tokens, the pool opens and goes on as before it."""
    rows, whole = _pool_rows(6), tmp_path / "whole"
    pool = vp.TrajectoryPool(whole)
    pool.append(_pool_batch(rows[:5]), 0)
    before = _pool_state(whole)
    pool.append(_pool_batch(rows[5:]), 1)
    after = _pool_state(whole)
    torn = [
        (t, before[1]) for t in (after[0][:k] for k in range(len(before[0]), len(after[0]) + 1))
    ]
    torn += [(after[0][:k], after[1]) for k in range(len(before[0]), len(after[0]))]
    torn += [(after[0], after[1][:k]) for k in range(len(before[1]), len(after[1]))]
    assert len(torn) > 60
    for k, (tokens, index) in enumerate(torn):
        folder = tmp_path / "torn"
        folder.mkdir()
        (folder / "tokens.bin").write_bytes(tokens), (folder / "index.bin").write_bytes(index)
        pool = vp.TrajectoryPool.open(folder)
        assert (
            len(pool) == 5
            and pool.tokens.tobytes() == before[0]
            and pool.index.tobytes() == before[1]
        )
        assert _pool_state(folder) == (
            tokens,
            index,
        )  # a reader cuts nothing: a writer may be at work
        if k % 5 == 0:
            pool.append(_pool_batch(rows[5:]), 1)
            assert _pool_state(folder) == after and len(pool) == 6
        shutil.rmtree(folder)


def test_pool_killed_between_the_files(tmp_path, monkeypatch):
    """A writer that dies before the index has written nothing that a reader sees."""
    rows, pool = _pool_rows(6), vp.TrajectoryPool(tmp_path)
    pool.append(_pool_batch(rows[:5]), 0)
    before, write = _pool_state(tmp_path), vp._write

    def killed(path, at, data):
        if path.name == "index.bin":
            raise KeyboardInterrupt
        return write(path, at, data)

    monkeypatch.setattr(vp, "_write", killed)
    with pytest.raises(KeyboardInterrupt):
        pool.append(_pool_batch(rows[5:]), 0)
    assert (
        len(vp.TrajectoryPool.open(tmp_path)) == len(pool) == 5
        and _pool_state(tmp_path)[1] == before[1]
    )
    monkeypatch.undo()
    pool.append(_pool_batch(rows[5:]), 0)
    assert len(vp.TrajectoryPool.open(tmp_path)) == 6


def test_pool_records_that_lost_their_tokens(tmp_path, monkeypatch):
    """Records whose tokens never reached the disk are gone, even if the next writer dies."""
    rows, pool = _pool_rows(10), vp.TrajectoryPool(tmp_path)
    pool.append(_pool_batch(rows[:5]), 0)
    before = _pool_state(tmp_path)
    pool.append(_pool_batch(rows[5:6]), 0)
    want = _pool_state(tmp_path)
    (tmp_path / "tokens.bin").write_bytes(before[0])
    (tmp_path / "index.bin").write_bytes(before[1])
    vp.TrajectoryPool.open(tmp_path).append(_pool_batch(rows[6:]), 0)
    (tmp_path / "tokens.bin").write_bytes(before[0])  # 4 records without tokens
    shutil.copytree(tmp_path, tmp_path / "copy")
    pool, write = vp.TrajectoryPool.open(tmp_path), vp._write
    assert len(pool) == 5
    pool.append(_pool_batch(rows[5:6]), 0)
    assert _pool_state(tmp_path) == want
    pool = vp.TrajectoryPool.open(tmp_path / "copy")

    def killed(path, at, data):
        if path.name == "index.bin" and len(data):
            raise KeyboardInterrupt
        return write(path, at, data)

    monkeypatch.setattr(vp, "_write", killed)
    with pytest.raises(KeyboardInterrupt):
        pool.append(_pool_batch(_pool_rows(40, seed=1)), 0)
    assert len(vp.TrajectoryPool.open(tmp_path / "copy")) == 5


def test_pool_refuses(tmp_path):
    """Two writers, damage, a missing folder, bad batches: ValueError, and the disk is unchanged."""
    rows = _pool_rows(6)
    with pytest.raises(ValueError, match="path"):
        vp.TrajectoryPool.open(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    first, second = vp.TrajectoryPool(tmp_path / "p"), vp.TrajectoryPool(tmp_path / "p")
    first.append(_pool_batch(rows), 0)
    state = _pool_state(tmp_path / "p")
    with pytest.raises(ValueError, match="one writer"):
        second.append(_pool_batch(rows), 0)

    def broken(**fields):
        batch = _pool_batch(rows)
        for name, value in fields.items():
            setattr(batch, name, value(getattr(batch, name)))
        return batch

    for message, bad in {
        "attention": broken(attention=lambda a: a[:, 1:]),
        "mask": broken(mask=lambda m: torch.ones_like(m)),
        "prompt in each": broken(
            attention=lambda a: a & (torch.arange(len(a)) != 3)[:, None], mask=lambda m: m & False
        ),
        "reward: expected finite": broken(reward=lambda r: r * math.nan),
        "reward: expected shape": broken(reward=lambda r: r[:2]),
        "prompt_id": broken(prompt_id=lambda p: p[:, None]),
        "tokens": broken(tokens=lambda t: t - 40),
    }.items():
        with pytest.raises(ValueError, match=message):
            first.append(bad, 0)
    with pytest.raises(ValueError, match="rows"):
        first.batch([])
    assert _pool_state(tmp_path / "p") == state
    damaged = bytearray(state[1])
    damaged[vp.RECORD.itemsize * 2] += 1  # the offset of record 2
    (tmp_path / "p" / "index.bin").write_bytes(damaged)
    with pytest.raises(ValueError, match="record 2"):
        vp.TrajectoryPool.open(tmp_path / "p")
    (tmp_path / "p" / "tokens.bin").unlink()
    with pytest.raises(ValueError, match="only index.bin"):
        vp.TrajectoryPool(tmp_path / "p")


def test_coverage_table_by_hand():
    """S3AC's finding: over 24K tokens the first policy has 5.0 % right, the last one 61.8 %."""
    length = np.r_[np.full(1000, 24_001), np.full(1000, 30_000), [24_000] * 4]
    reward = np.r_[
        np.where(np.arange(1000) < 50, 1, -1), np.where(np.arange(1000) < 618, 1, -1), [1, 1, 1, -1]
    ]
    policy = np.r_[np.zeros(1000), np.ones(1000), np.zeros(4)]
    table = vp.coverage_table(_pool_index(length, reward, policy), [24_000])
    assert [tuple(c) for c in table[:2]] == [(0, 0, 24_000, 4, 0.75), (0, 24_000, None, 1000, 0.05)]
    assert (
        tuple(table[2])[:4] == (1, 0, 24_000, 0)
        and math.isnan(table[2].share)
        and table[3].share == 0.618
    )
    text = vp.format_coverage(table)
    assert (
        "5.0 % (1,000)" in text
        and "61.8 % (1,000)" in text
        and "> 24,000" in text
        and "33.4 % (2,000)" in text
    )
    assert "nan" not in text


def test_coverage_table_is_the_count():
    """Cell for cell the table is what counting one trajectory at a time gives."""
    rng = np.random.default_rng(0)
    index = _pool_index(
        rng.integers(1, 50, 300), rng.choice([-1, 1], 300), rng.choice([-3, 0, 8], 300)
    )
    for edges in (None, [], [10], [5, 6, 49, 80]):
        table = vp.coverage_table(index, edges)
        assert sum(c.count for c in table) == 300 and {c.policy for c in table} == {-3, 0, 8}
        for c in table:
            inside = [
                r["reward"] > 0
                for r in index
                if r["policy"] == c.policy and c.low < r["sampled"] <= (c.high or 10**9)
            ]
            assert c.count == len(inside) and (
                not inside or abs(c.share - sum(inside) / len(inside)) < 1e-12
            )
    with pytest.raises(ValueError, match="edges"):
        vp.coverage_table(index, [5, 5])
    with pytest.raises(ValueError, match="index"):
        vp.coverage_table(index[:0])


def test_coverage_sample_is_balanced():
    """n distinct rows; all cells give the same, up to one, or else all that they have."""
    rng = np.random.default_rng(0)
    length = rng.integers(1, 100, 2000)
    length[(30 < length) & (length <= 60)] = 7  # an empty bucket
    index = _pool_index(length, np.where(rng.random(2000) < 0.9 / (1 + length / 8), 1, -1))
    cell = 2 * np.searchsorted([30, 60, 90], length) + (index["reward"] > 0)
    have = np.bincount(cell, minlength=8)
    assert have.min() == 0 and have.max() > 20 * have[7] > 0
    for n in (1, 2, 7, 40, 100, 500, 1999, 2000):
        rows = vp.coverage_sample(index, n, edges=[30, 60, 90], seed=n)
        gave = np.bincount(cell[rows], minlength=8)
        assert len(np.unique(rows)) == len(rows) == n
        assert all(g == h or g >= gave.max() - 1 for g, h in zip(gave, have)), (n, gave, have)
    assert np.bincount(cell[vp.coverage_sample(index, 100, edges=[30, 60, 90])])[7] == min(
        have[7], 16
    )
    for n in (0, 2001):
        with pytest.raises(ValueError, match="n: expected"):
            vp.coverage_sample(index, n)


def test_coverage_sample_is_uniform_inside_a_cell():
    """Every trajectory of one cell is drawn equally often; the same seed draws the same."""
    index = _pool_index(np.ones(20, int), np.ones(20))
    hits = np.bincount(
        np.concatenate([vp.coverage_sample(index, 5, seed=s) for s in range(800)]), minlength=20
    )
    assert hits.sum() == 4000 and abs(hits - 200).max() < 60  # 200 ± 12 (one sigma)
    assert np.array_equal(
        vp.coverage_sample(index, 5, seed=3), vp.coverage_sample(index, 5, seed=3)
    )
    assert not np.array_equal(
        vp.coverage_sample(index, 5, seed=3), vp.coverage_sample(index, 5, seed=4)
    )


def test_split_by_prompt():
    """No prompt has trajectories on both sides, and the share is a share of prompts."""
    prompt_id = np.random.default_rng(0).integers(0, 50, 400)
    out = vp.split_by_prompt(prompt_id, 0.2, seed=1)
    held, kept = set(prompt_id[out]), set(prompt_id[~out])
    assert not held & kept and len(held) == 10 and len(held | kept) == 50
    assert (
        not vp.split_by_prompt(prompt_id, 0.0).any()
        and len(set(prompt_id[vp.split_by_prompt(prompt_id, 1e-9)])) == 1
    )
    for share, ids in ((1.0, prompt_id), (-0.1, prompt_id), (0.5, np.zeros(3, int))):
        with pytest.raises(ValueError, match="held_out"):
            vp.split_by_prompt(ids, share)


def test_lr_at_endpoints():
    """Straight up to peak at the end of the warm-up, down to final in the last step, never 0."""
    rates = [vp.lr_at(s, 100) for s in range(100)]
    assert rates[:3] == pytest.approx([1e-5 / 3, 2e-5 / 3, 1e-5]) and rates[-1] == pytest.approx(
        5e-6, rel=1e-12
    )
    assert rates[51] == pytest.approx(5e-6 + 2.5e-6 * (1 + math.cos(math.pi * 49 / 97)))
    for total in range(1, 80):
        for warmup in (0.0, 0.03, 0.5, 1.0):
            rates = [vp.lr_at(s, total, peak=3.0, final=1.0, warmup=warmup) for s in range(total)]
            rise = max(1, round(warmup * total))
            assert min(rates) > 0 and max(rates) == rates[rise - 1] == 3.0
            assert (
                sorted(rates[:rise]) == rates[:rise]
                and sorted(rates[rise - 1 :], reverse=True) == rates[rise - 1 :]
            )
            assert rates[-1] == pytest.approx(1.0) or rise == total
    for step, total, warmup in ((-1, 5, 0.1), (5, 5, 0.1), (0, 0, 0.1), (0, 5, 1.5)):
        with pytest.raises(ValueError):
            vp.lr_at(step, total, warmup=warmup)


_SMALL = dict(
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    vocab_size=32,
)


@pytest.mark.parametrize(
    "family, config, marks, per_layer",
    [
        ("llama", _SMALL, ["self_attn"], 4),
        ("qwen3", _SMALL | {"head_dim": 8}, ["self_attn"], 6),  # q_norm and k_norm are inside
        (
            "qwen3_moe",
            _SMALL
            | {
                "head_dim": 8,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 8,
            },
            ["self_attn", "mlp.gate."],
            7,
        ),
        ("mixtral", _SMALL | {"num_local_experts": 4}, ["self_attn", "mlp.gate."], 5),
        (
            "gpt2",
            {
                "n_embd": 16,
                "n_layer": 2,
                "n_head": 2,
                "vocab_size": 32,
                "bos_token_id": 0,
                "eos_token_id": 0,
            },
            [".attn."],
            4,
        ),
    ],
)
def test_freeze_by_name(family, config, marks, per_layer):
    """Frozen are attention and routers: no gate_proj, experts, norms, embeddings, head."""
    from transformers import AutoConfig, AutoModel

    critic = Critic(AutoModel.from_config(AutoConfig.for_model(family, **config)))
    frozen = vp.freeze_for_pretraining_(critic)
    names = dict(critic.named_parameters())
    assert (
        frozen == [n for n in names if any(m in n for m in marks)] and len(frozen) == 2 * per_layer
    )
    assert (
        all(p.requires_grad == (n not in frozen) for n, p in names.items())
        and names["head.weight"].requires_grad
    )
    assert not any(
        w in n
        for n in frozen
        for w in ("proj_gate", "gate_proj", "gate_up", "experts", "layernorm", "embed")
    )


def test_freeze_vision_tower_and_others():
    """The vision tower is frozen whole; a backbone without such names is a ValueError."""
    from torch import nn

    class Backbone(nn.Module):
        def __init__(self, *names):
            super().__init__()
            self.config = type("C", (), {"hidden_size": 4, "get_text_config": lambda self: self})()
            for name in names:
                part = self
                for step in name.split("."):
                    if not hasattr(part, step):
                        part.add_module(step, nn.Linear(2, 2, bias=False))
                    part = getattr(part, step)

    text = (
        "language.post_attention_layernorm",
        "language.mlp.gate_proj",
        "language.mlp.shared_expert_gate",
    )
    seen = (
        "visual.blocks.mlp.fc1",
        "vision_tower.norm",
        "vision_model.embeddings",
        "language.block_sparse_moe.router",
        "language.linear_attn.in_proj",
        "language.self_attention.dense",
        "language.cross_attn.q_norm",
    )
    frozen = vp.freeze_for_pretraining_(Critic(Backbone(*text, *seen)))
    assert {f"backbone.{n}.weight" for n in seen} <= set(frozen) and not {
        f"backbone.{n}.weight" for n in text
    } & set(frozen)
    with pytest.raises(ValueError, match="found none in Backbone"):
        vp.freeze_for_pretraining_(Critic(Backbone(*text)))


def test_micro_batches_partition():
    """Every row once, padded size within the budget, a longer row alone, longest first."""
    rng = np.random.default_rng(0)
    index = np.zeros(60, vp.RECORD)
    index["prompt_length"], index["response_length"] = (
        rng.integers(1, 20, 60),
        rng.integers(0, 60, 60),
    )
    rows = rng.permutation(60)[:37]
    for budget in (1, 50, 200, 10**6):
        groups = vp.micro_batches(index, rows, budget)
        assert sorted(np.concatenate(groups)) == sorted(rows)
        for g in groups:
            assert (
                len(g) == 1
                or len(g) * (index["prompt_length"][g].max() + index["response_length"][g].max())
                <= budget
            )
        size = (index["prompt_length"] + index["response_length"])[np.concatenate(groups)]
        assert (np.diff(size) <= 0).all()
    assert len(groups) == 1 and len(vp.micro_batches(index, rows, 1)) == 37
    index["prompt_length"], index["response_length"] = 2, np.where(np.arange(60) == 5, 90, 8)
    assert [len(g) for g in vp.micro_batches(index, np.arange(11), 100)] == [1, 10]


def test_step_gradient_does_not_know_micro_batches(tmp_path):
    """At any budget, loss and gradient of a step are Σ ½ (V(s_t) − R)² / N, one row at a time."""
    pool, critic, rows = vp.TrajectoryPool(tmp_path), _pool_critic(), _pool_rows(10)
    pool.append(_pool_batch(rows, pad=2), 0)
    chosen, N, loss = [7, 1, 4, 8, 2], 0, 0.0
    for prompt, answer, sampled, R, _ in (rows[i] for i in chosen):
        tokens = torch.tensor([prompt + answer])
        V = critic(tokens, torch.ones_like(tokens))[
            0, len(prompt) - 1 : -1
        ]  # the state before each answer token
        loss = loss + sum(
            (0.5 * (V[t] - R) ** 2 for t in range(len(answer)) if sampled[t]), torch.zeros(())
        )
        N += sum(sampled)
    (loss / N).backward()
    want = {n: p.grad.clone() for n, p in critic.named_parameters()}
    for budget in (1, 25, 40, 10**6):
        critic.zero_grad()
        got = vp.accumulate_gradient(critic, pool, np.array(chosen), token_budget=budget)
        assert abs(got - loss / N) < 1e-12 and not got.requires_grad
        for name, p in critic.named_parameters():
            assert torch.allclose(p.grad, want[name], atol=1e-12), (budget, name)


def test_held_out_ev_does_not_know_micro_batches(tmp_path):
    """EV over micro-batches is EV of one padded batch; NaN without rows or with equal returns."""
    pool, critic = vp.TrajectoryPool(tmp_path), _pool_critic()
    pool.append(_pool_batch(_pool_rows(12)), 0)
    tokens, attention, mask, reward = pool.batch(np.arange(12))
    V = response(critic(tokens, attention), mask.shape[1]).detach()
    want = explained_variance(V, reward[:, None].double().expand_as(V), mask)
    for budget in (1, 60, 10**6):
        assert vp.held_out_ev(critic, pool, np.arange(12), token_budget=budget) == pytest.approx(
            want, abs=1e-9
        )
    assert math.isnan(vp.held_out_ev(critic, pool, np.arange(0)))
    assert math.isnan(vp.held_out_ev(critic, pool, np.flatnonzero(pool.index["reward"] > 0)))
    assert critic.head.weight.grad is None


def test_pretrain_is_the_plain_loop(tmp_path):
    """Per step: lr_at, mean loss over its tokens, clip, AdamW. Only the frozen names keep still."""
    pool, critic, plain = vp.TrajectoryPool(tmp_path), _pool_critic(), _pool_critic()
    pool.append(_pool_batch(_pool_rows(12)), 0)
    start = {n: p.detach().clone() for n, p in critic.named_parameters()}
    stats = vp.pretrain(
        critic,
        pool,
        epochs=3,
        batch_size=12,
        token_budget=40,
        peak=1e-2,
        final=1e-3,
        max_norm=0.05,
        held_out=0,
        progress=False,
    )
    learning = [p for n, p in plain.named_parameters() if "self_attn" not in n]
    optimizer = torch.optim.AdamW(learning, betas=(0.9, 0.999), weight_decay=0.01)
    tokens, attention, mask, reward = pool.batch(np.arange(12))
    norms = []
    for step in range(3):
        optimizer.param_groups[0]["lr"] = vp.lr_at(step, 3, peak=1e-2, final=1e-3)
        V = response(plain(tokens, attention), mask.shape[1])
        loss, _ = value_loss(V, reward[:, None].double().expand_as(V), mask)
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(learning, 0.05)))
        optimizer.step()
        assert stats["curve"]["loss"][step] == pytest.approx(float(loss.detach()), rel=1e-6)
    assert (
        stats["curve"]["grad_norm"] == pytest.approx(norms, rel=1e-5) and stats["clip_share"] == 1.0
    )
    for (name, p), q in zip(critic.named_parameters(), plain.parameters()):
        assert torch.allclose(p, q, atol=1e-7), name
        assert torch.equal(p, start[name]) == (name in stats["frozen"]) == ("self_attn" in name), (
            name
        )
        assert p.requires_grad and p.grad is None
    assert (
        stats["steps"] == 3
        and stats["tokens"] == 3 * int(mask.sum())
        and math.isnan(stats["ev_after"])
    )


def test_pretrain_learns_and_holds_out_prompts(tmp_path, monkeypatch):
    """Where the prompt tells R, EV of unseen prompts goes to 1; no prompt is on both sides."""
    rng, rows = np.random.default_rng(0), []
    for i in range(120):
        R = float(rng.choice([-1, 1]))
        rows.append(
            ([4 + int(R), 10 + i % 20], rng.integers(10, 30, 3).tolist(), [1, 1, 1], R, i // 3)
        )
    rows.append(([9], [], [], 1.0, 999))  # no sampled token: nothing to learn from
    pool, critic = vp.TrajectoryPool(tmp_path), _pool_critic(torch.float32)
    pool.append(_pool_batch(rows), 0)
    trained, evaluated = set(), set()
    step, ev = vp.accumulate_gradient, vp.held_out_ev
    monkeypatch.setattr(
        vp, "accumulate_gradient", lambda c, p, r, **k: (trained.update(r), step(c, p, r, **k))[1]
    )
    monkeypatch.setattr(
        vp, "held_out_ev", lambda c, p, r, **k: (evaluated.update(r), ev(c, p, r, **k))[1]
    )
    stats = vp.pretrain(
        critic,
        pool,
        epochs=12,
        batch_size=16,
        peak=1e-2,
        final=1e-3,
        held_out=0.2,
        eval_every=20,
        freeze="none",
        split=True,
        progress=False,
    )
    assert stats["ev_before"] < 0.3 and stats["ev_after"] > 0.8
    assert stats["loss_last"] < stats["loss_first"] / 2
    assert len(trained) == 96 and len(evaluated) == 24 and 120 not in trained | evaluated
    assert not {r // 3 for r in trained} & {r // 3 for r in evaluated}
    assert [s for s, _ in stats["curve"]["ev"]] == [0, 20, 40, 60, 72] and stats[
        "steps"
    ] == 72 == len(stats["curve"]["lr"])
    assert stats["frozen"] == [] and 0 < stats["head_share"] < 1
    assert stats["curve"]["lr"] == [vp.lr_at(s, 72, peak=1e-2, final=1e-3) for s in range(72)]


def test_pretrain_autocast_and_repeatable(tmp_path):
    """The same seed gives the same critic, bit for bit; bfloat16 autocast keeps float32 weights."""
    pool = vp.TrajectoryPool(tmp_path)
    pool.append(_pool_batch(_pool_rows(12)), 0)
    weights = []
    for dtype in (None, None, torch.bfloat16):
        critic = _pool_critic(torch.float32)
        vp.pretrain(
            critic,
            pool,
            batch_size=4,
            held_out=0.2,
            peak=1e-3,
            final=1e-3,
            autocast_dtype=dtype,
            progress=False,
        )
        weights.append(critic.backbone.embed_tokens.weight.detach())
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert weights[2].dtype == torch.float32 and (weights[0] - weights[2]).abs().max() < 0.02


def test_pretrain_skips_nonfinite_and_stops(tmp_path):
    """A step with a NaN loss changes nothing and is counted; five in a row stop the run."""
    pool = vp.TrajectoryPool(tmp_path)
    pool.append(_pool_batch(_pool_rows(16)), 0)

    def run(bad):
        critic, calls = _pool_critic(), iter(range(1000))
        critic.head.register_forward_hook(
            lambda m, i, out: out * math.nan if next(calls) in bad else out
        )
        return critic, lambda: vp.pretrain(
            critic, pool, batch_size=2, epochs=1, held_out=0, peak=1e-2, progress=False
        )

    critic, go = run({0, 2, 3, 4, 5, 7})
    stats = go()
    assert (
        stats["skipped_nonfinite"] == 6
        and stats["steps"] == 2
        and math.isfinite(stats["loss_last"])
    )
    assert all(torch.isfinite(p).all() for p in critic.parameters())
    critic, go = run({0, 1, 2, 3, 4})
    start = [p.detach().clone() for p in critic.parameters()]
    with pytest.raises(RuntimeError, match="fifth time in a row"):
        go()
    assert all(
        torch.equal(p, q) and p.requires_grad and p.grad is None
        for p, q in zip(critic.parameters(), start)
    )


def test_pretrain_refuses(tmp_path):
    """An empty pool, no sampled token, no epochs, too few prompts: ValueErrors before any work."""
    pool, critic = vp.TrajectoryPool(tmp_path), _pool_critic()
    with pytest.raises(ValueError, match="rows"):
        vp.pretrain(critic, pool, progress=False)
    pool.append(_pool_batch([([1], [2], [1], 1.0, 0), ([1], [3], [0], 1.0, 1)]), 0)
    with pytest.raises(ValueError, match="rows"):
        vp.pretrain(critic, pool, np.array([1]), progress=False)
    with pytest.raises(ValueError, match="held_out"):
        vp.pretrain(critic, pool, progress=False)
    with pytest.raises(ValueError, match="epochs"):
        vp.pretrain(critic, pool, epochs=0, held_out=0, progress=False)
    assert all(p.requires_grad for p in critic.parameters())


# ------------------------------------------------------- claims of critic.py and value_pretrain.py


class _CountCritic(torch.nn.Module):
    """V = how many real tokens the state has, divided by 10, minus 1: p̂ = tokens / 20."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = torch.nn.Parameter(torch.zeros(1))

    def forward(self, tokens, attention):
        return attention.long().cumsum(-1).float() / 10 - 1


def _claims_pool(folder, rows) -> vp.TrajectoryPool:
    """rows of (prompt tokens, response tokens, reward)."""
    tokens, attention, mask, logp = rollout.pad_responses(
        [[5] * p for p, _, _ in rows], [[6] * t for _, t, _ in rows],
        [[0.0] * t for _, t, _ in rows], 0)
    pool = vp.TrajectoryPool(folder)
    pool.append(rollout.Batch(
        tokens, attention, mask, torch.arange(len(rows)), torch.tensor([r for *_, r in rows]),
        torch.zeros(len(rows), dtype=torch.bool), logp), 0)
    return pool


def _claims_critic() -> Critic:
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    return Critic(LlamaModel(LlamaConfig(
        vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2)))


def test_claims_calibration_by_hand(tmp_path):
    """Prompts of 2 and 10 tokens say 0.1 and 0.5; 1 of 2 and 1 of 2 end right: error 0.4/2 + 0."""
    pool = _claims_pool(tmp_path, [(2, 3, 1.0), (2, 1, -1.0), (10, 2, 1.0), (10, 2, -1.0)])
    found = vp._on_pool(_CountCritic(), pool, np.arange(4))
    assert [(b["n"], round(b["said"], 4), b["right"]) for b in found["bins"]] == [
        (2, 0.1, 0.5), (2, 0.5, 0.5)]
    assert found["calibration"] == pytest.approx(0.2, abs=1e-6)
    V = np.array([-0.8, -0.7, -0.6, -0.8, 0.0, 0.1, 0.0, 0.1])
    R = np.array([1, 1, 1, -1, 1, 1, -1, -1])
    assert found["loss"] == pytest.approx(((V - R) ** 2).mean() / 2, abs=1e-6)
    assert found["ev"] == pytest.approx(1 - np.var(R - V) / np.var(R), abs=1e-6)


def test_claims_error_against_truth_by_hand():
    """The value is read at each prefix's own last token, and p(1 − p)/(k − 1) is taken off."""
    truth = {"ids": [[5] * 4, [5] * 10], "p": [0.2, 0.0]}  # p̂ is 0.2 and 0.5
    expected = (0.0 - 0.2 * 0.8 / 7 + 0.25) / 2
    assert vp._error(_CountCritic(), truth, 8) == pytest.approx(expected, abs=1e-6)


def test_claims_clearly():
    """A gap counts from two standard errors on; of one seed each, any gap does."""
    assert vp._clearly([0.9, 0.91, 0.92], [0.8, 0.81, 0.79]) == "yes"
    assert vp._clearly([0.8, 0.81, 0.79], [0.9, 0.91, 0.92]) == "no"
    assert vp._clearly([0.9, 0.7, 0.8], [0.8, 0.6, 0.9]) == "within the noise"
    assert vp._clearly([0.8], [0.7]) == "yes" and vp._clearly([0.7], [0.8]) == "no"


@pytest.mark.parametrize("freeze", ["attention", "backbone", "none"])
def test_claims_freeze_moves_only_the_rest(tmp_path, freeze):
    """What freeze names stays bit for bit, all else moves, and all is trainable afterwards."""
    pool = _claims_pool(tmp_path, [(2, 3, 1.0), (3, 2, -1.0), (4, 4, 1.0), (2, 5, -1.0)])
    critic = _claims_critic()
    before = {name: p.detach().clone() for name, p in critic.named_parameters()}
    stats = vp.pretrain(critic, pool, batch_size=2, epochs=2, peak=1e-2, final=1e-2, held_out=0,
                        freeze=freeze, progress=False)
    still = {n for n, p in critic.named_parameters() if torch.equal(p, before[n])}
    assert still == set(stats["frozen"])
    assert ("head.weight" not in still and all(p.requires_grad for p in critic.parameters()))
    backbone = {n for n in before if n.startswith("backbone.")}
    attention = {n for n in backbone if "self_attn" in n}
    assert still == {"attention": attention, "backbone": backbone, "none": set()}[freeze]


def test_claims_freeze_unknown(tmp_path):
    """Another word for freeze is one sentence, before any work."""
    pool = _claims_pool(tmp_path, [(2, 3, 1.0), (3, 2, -1.0)])
    with pytest.raises(ValueError, match="freeze: expected one of attention, backbone, none"):
        vp.pretrain(_claims_critic(), pool, freeze="head", progress=False)


def test_claims_demonstrations_in_any_tokenizer(tmp_path):
    """Without wrong steps every demonstration is right, ends once, and has 2 tokens a step."""
    rollout.task_tokenizer().save_pretrained(tmp_path / "model")
    critic_file._demonstrate(str(tmp_path / "pool"), str(tmp_path / "model"), n=20, wrong=0.0)
    pool = vp.TrajectoryPool.open(tmp_path / "pool")
    assert (pool.index["reward"] == 1).all() and not pool.index["truncated"].any()
    assert (pool.index["prompt_length"] == 6).all()
    assert (pool.index["sampled"] % 2 == 1).all() and pool.index["sampled"].max() <= 15
    critic_file._demonstrate(str(tmp_path / "noisy"), str(tmp_path / "model"), n=20, wrong=1.0)
    assert vp.TrajectoryPool.open(tmp_path / "noisy").index["reward"].mean() < 0


def test_claims_settings_of_another_run(tmp_path):
    """A folder made with other settings is not mixed with these; with the same it goes on."""
    args = dict(out=str(tmp_path / "c"), size=8, steps=2, lr=1e-4, critic_lr=5e-4, strong="",
                prefixes=4, continuations=2, seeds=1)
    vp._check_settings(argparse.Namespace(**args))
    vp._check_settings(argparse.Namespace(**args | {"seeds": 3}))
    with pytest.raises(ValueError, match="--out: expected"):
        vp._check_settings(argparse.Namespace(**args | {"size": 16}))


# ---------------------------------------------------------------------------------------- genac.py


def _bits(*rows):
    return torch.tensor([[c == "1" for c in row] for row in rows])


def test_genac_hand_example():
    """Scores 5, 2, 9 at tokens 0, 2, 4 of a right response: V = 0, −.6, .8; Â for λ = 1 and ½."""
    starts, mask, R = _bits("10101"), _bits("11111"), torch.tensor([1.0])
    value = segment_values([0.5, 0.2, 0.9], starts, mask, None)
    assert torch.allclose(value, torch.tensor([[0, 0, -0.6, -0.6, 0.8]]), atol=1e-6)
    full = gae.gae(value, R, mask, 1.0)
    assert torch.allclose(full, torch.tensor([[1, 1, 1.6, 1.6, 0.2]]), atol=1e-6)
    half = spread(gae.gae(value, R, starts, 0.5), starts, mask)
    assert torch.allclose(half, torch.tensor([[0.15, 0.15, 1.5, 1.5, 0.2]]), atol=1e-6)
    assert torch.allclose(segment_values([0.5, None, 0.9], starts, mask, 0.25)[0, 2:4],
                          torch.tensor([-0.5, -0.5]))


def test_genac_token_advantages_are_those_of_the_segment_process():
    """λ = 1 inside a segment, any λ between: a token has its segment's advantage, gaps or not."""
    g = torch.Generator().manual_seed(0)
    mask = torch.rand(20, 37, generator=g) < 0.8
    mask[3] = False
    starts = segment_starts(mask, torch.rand(20, 37, generator=g) < 0.4, width=2, at_most=6)
    scores = (torch.randint(11, (int(starts.sum()),), generator=g) / 10).tolist()
    R = torch.randint(2, (20,), generator=g) * 2.0 - 1
    value = segment_values(scores, starts, mask, None)
    scores = iter(scores)
    for lam in (0.0, 0.7, 1.0):
        found = spread(gae.gae(value.double(), R, starts, lam), starts, mask)
        for b in range(20):
            where = starts[b].nonzero()[:, 0].tolist()
            V = [value[b, t].item() for t in where] + [0.0]
            A, after = [0.0] * (len(where) + 1), 0.0
            for j in reversed(range(len(where))):
                r = R[b].item() if j == len(where) - 1 else 0.0
                after = A[j] = r + V[j + 1] - V[j] + lam * after
            for t in range(37):
                j = sum(s <= t for s in where) - 1
                assert abs(found[b, t].item() - (A[j] if mask[b, t] else 0.0)) < 1e-6
    assert torch.allclose(found, gae.gae(value.double(), R, mask, 1.0), atol=1e-6)  # λ = 1
    for b, t in starts.nonzero().tolist():  # the scores are dealt out in row order
        assert abs(value[b, t].item() - (2 * next(scores) - 1)) < 1e-6


@pytest.mark.parametrize("text, score", [
    ("<answer>7</answer>", 0.7), ("<answer> 10\n</answer>$", 1.0), ("<answer>0</answer>", 0.0),
    ("<answer>3</answer> no, <answer>8</answer>", 0.8),
    ("<answer>3</answer> <answer>x</answer>", None),
    ("<answer>11</answer>", None), ("<answer>seven</answer>", None), ("7", None), ("", None),
    ("<answer>-1</answer>", None), ("<answer>7.5</answer>", None), ("<answer>7", None),
    ("<answer></answer>", None), ("</answer>7<answer>", None), ("<answer>٧</answer>", None),
    ("<answer>4</answer> and then <answer>", 0.4), ("<answer>7/10</answer>", None),
    ("<answer><answer>6</answer>", 0.6),
    ("<answer>1e1</answer>", None), ("<answer>+3</answer>", None),
])
def test_genac_parse_score(text, score):
    """An integer 0 … 10 in the last closed tag, and nothing else, is a score."""
    assert parse_score(text) == score


def test_genac_reward_is_proper():
    """E_{r~p} R_v is largest at v̂ = p on the grid; between two grid points at the nearer one."""
    grid = [k / 10 for k in range(11)]
    expected = lambda p, v: p * value_reward(1, v) + (1 - p) * value_reward(0, v)
    for p in grid + [0.14, 0.26, 0.97]:
        best = max(grid, key=lambda v: expected(p, v))
        assert best == min(grid, key=lambda v: abs(v - p))
    assert value_reward(1, 0.7) == pytest.approx(0.91) and value_reward(0, 0.0) == 1
    assert value_reward(0, None) == value_reward(1, None) == 0
    with pytest.raises(ValueError, match="r: expected an outcome"):
        value_reward(-1, 0.5)


def test_genac_running_success():
    """The first update sets the average; then v ← 0.9 v + 0.1 x, x the mean of a batch."""
    success = RunningSuccess()
    assert success.value is None
    assert success.update(0.5) == 0.5
    assert success.update(torch.tensor([1, 1, 0, 1])) == pytest.approx(0.525)
    assert success.value == pytest.approx(0.525)
    for bad in (1.5, -1.0, math.nan):
        with pytest.raises(ValueError, match="success: expected"):
            success.update(bad)
    with pytest.raises(ValueError, match="momentum"):
        RunningSuccess(1.0)


@pytest.mark.parametrize("template", [ENGLISH, COMPACT])
def test_genac_prompt_shows_the_icc_fields(template):
    """Both templates show question, response, size and rate; icc False leaves out the last two."""
    how = dict(model_size="1.5B", success_rate=0.375, template=template)
    full = critic_prompt("3+7@d=", "a0b7", **how)
    bare = critic_prompt("3+7@d=", "a0b7", icc=False, **how)
    for text in ("3+7@d=", "a0b7"):
        assert text in full and text in bare
    for text in ("1.5B", "0.38"):
        assert text in full and text not in bare
    assert critic_prompt(r"{icc} {prefix} \frac{1}{2}", "{question}", **how).count("1.5B") == 1
    assert "{prefix}" in critic_prompt("{prefix}", "a", **how)  # filled in one pass


def test_genac_prompt_errors():
    """A template that lacks a field, and a rate that is none, are named."""
    how = dict(model_size="1.5B", success_rate=0.4)
    for field in ("question", "prefix", "icc"):
        bad = ENGLISH._replace(text=ENGLISH.text.replace("{%s}" % field, ""))
        with pytest.raises(ValueError, match=rf"template.text: .*no \{{{field}\}}"):
            critic_prompt("q", "p", template=bad, **how)
    with pytest.raises(ValueError, match="template.icc: .*no {success_rate}"):
        critic_prompt("q", "p", template=Template(ENGLISH.text, "{model_size}"), **how)
    for rate in (None, 1.2, math.nan):
        with pytest.raises(ValueError, match="success_rate"):
            critic_prompt("q", "p", model_size="1.5B", success_rate=rate)
    critic_prompt("q", "p", model_size="", success_rate=None, icc=False)


def test_genac_segment_starts_by_hand():
    """Fixed length, delimiter, probability < 0.2; a gap counts for nothing; at most so many."""
    mask = _bits("1111111", "1100111", "0000000")
    assert torch.equal(segment_starts(mask, width=3), _bits("1001001", "1000010", "0000000"))
    ends = genac.ends_by_delimiter(torch.tensor([[5, 9, 9, 5, 5, 9, 5]] * 3), [9])
    assert torch.equal(segment_starts(mask, ends), _bits("1011001", "1000101", "0000000"))
    assert torch.equal(segment_starts(mask, ends, width=2), _bits("1010001", "1000101", "0000000"))
    p = torch.tensor([[0.1, 0.9, 0.2, 0.19, 0.9, 0.9, 0.1]])  # 0.2 is not below 0.2
    surprise = genac.ends_by_surprise(p.double().log())
    assert torch.equal(segment_starts(mask[:1], surprise), _bits("1100100"))
    assert segment_starts(torch.ones(1, 100)).sum() == 16  # then the last runs to the end
    assert segment_starts(torch.ones(2, 64), width=4).sum() == 32
    with pytest.raises(ValueError, match="width"):
        segment_starts(mask, width=0)
    with pytest.raises(ValueError, match="ends: expected shape"):
        segment_starts(mask, ends[:2])


def test_genac_segments_are_causal():
    """What comes at t or later changes no start up to t: V is no baseline that knows the action."""
    g = torch.Generator().manual_seed(1)
    mask, ends = torch.rand(8, 30, generator=g) < 0.9, torch.rand(8, 30, generator=g) < 0.3
    starts = segment_starts(mask, ends, width=2)
    for t in range(30):
        other = ends.clone()
        other[:, t:] = torch.rand(8, 30 - t, generator=g) < 0.5
        assert torch.equal(segment_starts(mask, other, width=2)[:, : t + 1], starts[:, : t + 1])


def _scripted(replies, seen=None):
    """A sampler that gives these texts in turn, whatever it is asked."""
    tokenizer, replies = rollout.task_tokenizer(), itertools.cycle(replies)

    def sampler(model, prompts, *, max_new_tokens, temperature, eos_id, pad_id, generator):
        if seen is not None:
            seen.extend(tokenizer.decode(p) for p in prompts)
        rows = [tokenizer(next(replies) + "$").input_ids for _ in prompts]
        tokens, attention = rollout.left_pad(prompts, pad_id, "cpu")
        L = max(map(len, rows))
        mask = torch.tensor([[i < len(row) for i in range(L)] for row in rows])
        reply = torch.tensor([row + [pad_id] * (L - len(row)) for row in rows])
        return torch.cat([tokens, reply], 1), torch.cat([attention, mask], 1), mask, mask.float()

    return sampler


def _genac_critic(model=None, **how):
    tokenizer, success = rollout.task_tokenizer(), RunningSuccess()
    success.update(0.4)
    return GenCritic(model or nn.Linear(1, 1), tokenizer, [tokenizer.eos_token_id], success, "0.2M",
                     **({"template": COMPACT, "context": 256, "max_new_tokens": 96} | how))


def _responses(critic, *texts):
    rows = [critic.tokenizer(text).input_ids for text in texts]
    T, pad = max(map(len, rows)), critic.tokenizer.pad_token_id
    mask = torch.tensor([[t < len(row) for t in range(T)] for row in rows])
    return torch.tensor([row + [pad] * (T - len(row)) for row in rows]), mask


def test_genac_ask_values_replies_and_counts():
    """One call for all starts; unparsable states take the running rate and are counted."""
    critic, seen = _genac_critic(), []
    tokens, mask = _responses(critic, "a0b7c4d1$", "a1$")
    starts = segment_starts(mask, width=4)
    replies = ["<answer>9</answer>", "nothing", "<answer>1</answer>", "x<answer>0</answer>"]
    sampler = _scripted(replies, seen)
    value, replies, stats = genac.ask(critic, ["3+7@d=", "0+1@a="], tokens, mask, starts, sampler)
    assert seen == ["|0.2M,0.40|3+7@d=", "a0b7|0.2M,0.40|3+7@d=", "a0b7c4d1|0.2M,0.40|3+7@d=",
                    "|0.2M,0.40|0+1@a="]
    expected = [[0.8] * 4 + [-0.2] * 4 + [-0.8], [-1.0] * 3 + [0.0] * 6]
    assert torch.allclose(value, torch.tensor(expected), atol=1e-6)
    assert replies.v_hat == [0.9, None, 0.1, 0.0] and replies.texts[1] == "nothing"
    assert stats["unparsable"] == (1, 4) and stats["prompt_truncated"] == (0, 4)
    assert stats["score"] == (pytest.approx(1.0), 3)
    assert stats["reply_tokens"] == (replies.mask.sum(), 4)


def test_genac_prompts_are_causal():
    """Other tokens from a state on leave the prompt of that state as it is."""
    critic = _genac_critic()
    tokens, mask = _responses(critic, "a0b7c4d1e8f5$")
    starts, prompts = segment_starts(mask, width=2), []
    for t in range(0, 13, 2):
        other = tokens.clone()
        other[:, t:] = 7
        prompts.append([genac.states_at(critic, ["q"], x, starts)[t // 2] for x in (tokens, other)])
    assert all(a == b for a, b in prompts) and len({a for a, _ in prompts}) == 7


def test_genac_long_responses_are_cut_on_the_left():
    """A prompt over the context loses the start of the response, nothing else, and is counted."""
    critic = _genac_critic(context=60, max_new_tokens=40)
    state = State("3+7@z=", "a0b7c4d1e8f5", "0.2M", 0.4)
    ids, cut = genac.encode_state(critic, state)
    assert cut and len(ids) == 20 and critic.tokenizer.decode(ids) == "8f5|0.2M,0.40|3+7@z="
    assert genac.encode_state(critic, state._replace(prefix="a0"))[1] is False
    states = [state, state._replace(prefix="a0b")]
    _, stats = genac.ask_states(critic, states, _scripted(["<answer>1</answer>"]))
    assert stats["prompt_truncated"] == (1, 2) and stats["prompt_tokens"] == (40, 2)
    critic.context = 50
    with pytest.raises(ValueError, match="context: expected room for a prompt of 17 tokens"):
        genac.encode_state(critic, state)


def test_genac_silent_critic_stops():
    """After `patience` calls without one parsable reply: an error that says what to do."""
    critic, state = _genac_critic(patience=3), State("3+7@z=", "", "0.2M", 0.4)
    for reply in ("x", "x", "<answer>1</answer>", "x", "x"):  # one good reply starts the count anew
        genac.ask_states(critic, [state] * 2, _scripted([reply]))
    with pytest.raises(RuntimeError, match="no parsable reply in 3 calls.*--sft"):
        genac.ask_states(critic, [state], _scripted(["x"]))


def test_genac_reinforce_gradient_is_the_score_function():
    """Vocabulary 2, two replies of one and two tokens: dL/dz = −(1/2) Σ A (onehot − softmax)."""
    z = torch.tensor([0.3, -0.4], dtype=torch.float64, requires_grad=True)
    replies, A = torch.tensor([[1, 0], [0, 1]]), torch.tensor([0.5, -2.0], dtype=torch.float64)
    mask = torch.tensor([[1, 0], [1, 1]])
    logp = torch.log_softmax(z, 0)[replies]
    loss, stats = reinforce_loss(logp, A, mask)
    loss.backward()
    p = torch.softmax(z.detach(), 0)
    e = torch.eye(2, dtype=torch.float64)
    by_hand = -(0.5 * (e[1] - p) - 2.0 * ((e[0] - p) + (e[1] - p))) / 2
    assert torch.allclose(z.grad, by_hand, atol=1e-12)
    assert stats["loss"][1] == 2 and stats["logp"][1] == 3


def test_genac_losses_ignore_masked_slots_and_add_up():
    """NaN or 1e9 in masked slots reaches no loss or gradient; rows with a global count add up."""
    logp = torch.tensor([[-1.0, math.nan, -2.0], [-3.0, 1e9, math.inf], [math.nan] * 3],
                        requires_grad=True)
    mask, A = torch.tensor([[1, 0, 1], [1, 0, 0], [0, 0, 0]]), torch.tensor([1.0, 2.0, math.nan])
    for loss_of, expected, grad in (
        (lambda x, m, rows, n: sft_loss(x, m, n)[0], 2.0, -1 / 3),
        (lambda x, m, rows, n: reinforce_loss(x, A[rows], m, n)[0], 4.5, -0.5),
    ):
        loss = loss_of(logp, mask, slice(None), None)
        (g,) = torch.autograd.grad(loss, logp)
        assert loss.item() == pytest.approx(expected) and g[0, 0].item() == pytest.approx(grad)
        assert g.isfinite().all() and (g[mask == 0] == 0).all()
        n = 3 if expected == 2.0 else 2
        parts = sum(loss_of(logp[i : i + 1], mask[i : i + 1], slice(i, i + 1), n) for i in range(3))
        assert parts.item() == pytest.approx(expected)
        nothing = loss_of(logp, torch.zeros(3, 3), slice(None), None)
        (g,) = torch.autograd.grad(nothing, logp)
        assert nothing == 0 and (g == 0).all()
    with pytest.raises(ValueError, match="advantage: expected shape"):
        reinforce_loss(logp, A[:2], mask)
    with pytest.raises(ValueError, match="logp, mask"):
        sft_loss(logp, mask[:2])


@pytest.mark.parametrize("baseline, scale", [("none", 1), ("mean", 2 / 3), ("leave-one-out", 1)])
def test_genac_baselines_by_exact_enumeration(baseline, scale):
    """All 27 triples of replies: the expected gradient is exact; the mean's is 1 − 1/n of it."""
    z = torch.tensor([0.5, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    reward = torch.tensor([0.9, 0.1, 0.6], dtype=torch.float64)
    (exact,) = torch.autograd.grad(torch.softmax(z, 0) @ reward, z)
    total = torch.zeros(3, dtype=torch.float64)
    p = torch.softmax(z, 0).detach()
    for replies in itertools.product(range(3), repeat=3):
        replies = torch.tensor(replies)
        A = reply_advantage(reward[replies], baseline=baseline)
        logp = torch.log_softmax(z, 0)[replies][:, None]
        loss, _ = reinforce_loss(logp, A, torch.ones(3, 1))
        total -= p[replies].prod() * torch.autograd.grad(loss, z)[0]
    assert torch.allclose(total, scale * exact, atol=1e-12)


def test_genac_leave_one_out_by_hand():
    """In a group each reward is held against the mean of the others; one alone keeps its own."""
    reward, group = torch.tensor([1.0, 0.0, 0.5, 0.8]), torch.tensor([7, 7, 7, 2])
    out = reply_advantage(reward, group, baseline="leave-one-out")
    assert torch.allclose(out, torch.tensor([0.75, -0.75, 0.0, 0.8]))
    assert torch.allclose(reply_advantage(reward, baseline="mean"), reward - 0.575)
    with pytest.raises(ValueError, match="baseline: expected none, mean or leave-one-out"):
        reply_advantage(reward, baseline="median")


def _tiny():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=95, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        initializer_range=0.3, num_attention_heads=2, max_position_embeddings=256,
        bos_token_id=None, eos_token_id=65, pad_token_id=65)).eval()


def _traces(n):
    states = genac.task_states(n, 0, rollout.task_problems())
    return [(s, genac.oracle_trace(s.question, s.prefix, s.success_rate)) for s in states]


def test_genac_micro_batches_do_not_change_the_gradient():
    """One pass, or many of unequal length, cut to their own width: the same gradient to 1e-6."""
    critic, grads = _genac_critic(_tiny()), []
    tokens, attention, mask, _ = genac.join(critic, _traces(12))
    for budget in (10**6, 500, 1):
        critic.model.zero_grad()
        stats = genac.backward(critic, tokens, attention, mask, token_budget=budget,
                               loss_of=lambda x, m, rows: sft_loss(x, m, mask.sum()))
        grads.append(torch.cat([p.grad.flatten() for p in critic.model.parameters()]))
        assert stats["loss"][1] == mask.sum()
    assert grads[0].norm() > 0.1
    assert all(torch.allclose(g, grads[0], atol=1e-6) for g in grads[1:])


def test_genac_trainer_scores_as_the_sampler_did():
    """reply_logp of sampled replies is the sampler's own log-prob, at its temperature."""
    model, tokenizer = _tiny(), rollout.task_tokenizer()
    prompts = [tokenizer(x).input_ids for x in ("a0b7|0.2M,0.40|3+7@d=", "|0.2M,0.40|1+1@a=")]
    tokens, attention, mask, logp = rollout.generate(
        model, prompts, max_new_tokens=9, temperature=0.7, eos_id=65, pad_id=65,
        generator=torch.Generator().manual_seed(0))
    again = genac.reply_logp(model, tokens, attention, mask.shape[1], 0.7)
    assert torch.allclose(again[mask], logp[mask], atol=1e-5)


def test_genac_sft_lowers_the_loss_and_rl_raises_the_score_it_rewards():
    """SFT fits the traces; REINFORCE makes the reply that fits the outcome more likely."""
    critic = _genac_critic(_tiny())
    log = genac.sft(critic, _traces(32), steps=12, batch_size=16, lr=3e-3, progress=False)
    assert len(log) == 12 and log[-1]["loss"] < 0.9 * log[0]["loss"]
    tokens, mask = _responses(critic, "a0b7c4d1$", "a9b9c9d9$")
    starts = segment_starts(mask, at_most=1)
    good, bad = "<answer>9</answer>", "<answer>2</answer>"
    rollouts = lambda: (["3+7@d="] * 2, tokens, mask, starts, torch.tensor([1.0, 1.0]))
    state = genac.states_at(critic, ["3+7@d="], tokens, starts[:1])[0]
    row = lambda text: genac.join(critic, [(state, text)])

    def likelier():
        (t, a, m, _), (t2, a2, m2, _) = row(good), row(bad)
        with torch.no_grad():
            return (genac.reply_logp(critic.model, t, a, m.shape[1]).sum()
                    - genac.reply_logp(critic.model, t2, a2, m2.shape[1]).sum()).item()

    before = likelier()
    log = genac.rl_pretrain(critic, rollouts, _scripted([good, bad, "?"]), steps=6, lr=3e-3,
                            baseline="leave-one-out", progress=False)
    assert likelier() > before + 0.5 and critic.success.value > 0.4
    assert log[0]["reward"] == pytest.approx((0.99 + 0.36) / 2) and log[0]["unparsable"] == 0
    assert log[1]["unparsable"] == 0.5 and log[1]["reward"] == pytest.approx(0.99 / 2)


def test_genac_balanced():
    """Equal counts per outcome × position; what a small cell lacks, the others give."""
    outcome, position = [1] * 5 + [0] * 95, [0, 0, 1, 1, 1] + [0, 1] * 47 + [0]
    chosen = genac.balanced(outcome, position, 22, random.Random(0))
    cells = [(outcome[i], position[i]) for i in chosen]
    assert len(set(chosen)) == 22
    assert sorted(cells.count(c) for c in set(cells)) == [2, 3, 8, 9]
    assert cells.count((1, 0)) == 2 and cells.count((1, 1)) == 3
    assert sorted(genac.balanced(outcome, position, 100, random.Random(0))) == list(range(100))
    assert cells != sorted(cells)
    for n in (0, 101):
        with pytest.raises(ValueError, match="n: expected 1 … 100"):
            genac.balanced(outcome, position, n, random.Random(0))


def test_genac_quarters():
    """Positions are counted in trainable tokens of the response's own length."""
    mask = _bits("11111111", "11011000")
    assert genac.quarters(_bits("10101010", "11011000"), mask) == [0, 1, 2, 3, 0, 1, 2, 3]


def test_genac_traces_through_a_file(tmp_path):
    """write_prompts, an oracle's reply under `trace`, load_traces: the same states come back."""
    critic, path = _genac_critic(template=ENGLISH), str(tmp_path / "p.jsonl")
    states = [State("What is 2+2? {x}", "It is\nfour ✓", "0.2M", 0.4), State("q", "", "0.2M", 0.25)]
    genac.write_prompts(path, critic, states, [1, 0], [3, 0])
    rows = [json.loads(line) for line in open(path, encoding="utf-8")]
    assert [r["outcome"] for r in rows] == [1, 0] and [r["position"] for r in rows] == [3, 0]
    assert rows[0]["prompt"] == critic_prompt(*states[0][:2], model_size="0.2M", success_rate=0.4)
    with open(path, "w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row | {"trace": "Easy. <answer>9</answer>"}) + "\n\n")
    assert genac.load_traces(path) == [(s, "Easy. <answer>9</answer>") for s in states]


@pytest.mark.parametrize("line, message", [
    ('{"problem": "q", "partial": ""}', "line 2: expected a text under the key trace, found the "
     "keys problem, partial"),
    ('{"problem": "q", "partial": 3, "trace": "x"}', "line 2: partial: expected a text, found 3"),
    ('{"problem": "q", "partial": "", "trace": "I say 7"}', "line 2: trace: expected an integer"),
    ("[1]", "line 2: expected a JSON object"),
    ("{", "line 2: expected a JSON object, found broken"),
    ('{"problem": "q", "partial": "", "trace": "<answer>7</answer>", "success_rate": 70}',
     "line 2: success_rate: expected a number in"),
])
def test_genac_trace_errors(tmp_path, line, message):
    """A line that does not fit is named by its number."""
    good = '{"problem": "q", "partial": "", "trace": "<answer>7</answer>"}'
    path = tmp_path / "t.jsonl"
    path.write_text(good + "\n" + line + "\n")
    with pytest.raises(ValueError, match=message):
        genac.load_traces(str(path), model_size="1B", success_rate=0.5)
    path.write_text("\n")
    with pytest.raises(ValueError, match="found no line with one"):
        genac.load_traces(str(path))


@pytest.mark.parametrize("prefix, trace", [
    ("", ""), ("a0", "a00="), ("a0b7c4", "a00=b77=c44="), ("a0b7c5", "a00=b77=c45!"),
    ("a0b8c4", "a00=b78!c44="),  # two errors that cancel: right again
    ("a0b", "a00="), ("a0c4", "a00=b7?!c44="), ("aG", "a0G!"),
    ("a0b7c4d1e8", "a00=b77=c44=d11=e88="),
])
def test_genac_oracle_checks_each_step(prefix, trace):
    """`3+7@d=`: each step's letter, right value, stated value, do they agree; then the score."""
    reply = genac.oracle_trace("3+7@d=", prefix, 0.4)
    assert reply.startswith(trace + "d0.40<answer>") and parse_score(reply) is not None
    wrong = genac.oracle_chance("3+7@d=", "a0b7c5", 0.4)
    assert wrong < 0.1 < genac.oracle_chance("3+7@d=", "a0b8c4", 0.4)
    if prefix == "a0b7c4d1e8":
        assert parse_score(reply) == 0  # past the end
    tokenizer = rollout.task_tokenizer()
    assert tokenizer.decode(tokenizer(reply).input_ids) == reply  # in the task's alphabet


def test_genac_oracle_chance_is_the_chain_s():
    """0.1 ± … q^m solves p' = p(1 − e) + (1 − p) e/9, and persistence inverts the average."""
    e = 0.13
    q = 1 - 10 * e / 9
    right, wrong = 1.0, 0.0
    for m in range(27):
        assert genac.chance(q, m, True) == pytest.approx(right)
        assert genac.chance(q, m, False) == pytest.approx(wrong)
        right, wrong = (p * (1 - e) + (1 - p) * e / 9 for p in (right, wrong))
    rate = sum(genac.chance(q, n, True) for n in range(1, 27)) / 26
    assert genac.persistence(rate) == pytest.approx(q, abs=1e-6)
    scores = [parse_score(genac.oracle_trace("3+7@h=", "a0b7", x)) for x in (0.2, 0.5, 0.9)]
    assert scores == sorted(scores) and scores[0] < scores[2]  # a stronger actor, a higher score


def test_genac_oracle_agrees_with_demonstrations():
    """Share of noisy demonstrations that end right = the average chance, to Monte Carlo error."""
    rng, e = random.Random(0), 0.1
    q, problem = 1 - 10 * e / 9, rollout.Problem("3+7@h=", "h9")
    texts = [rollout.demonstration(problem.prompt, e, rng)[:-1] for _ in range(4000)]
    share = sum(rollout.chain_reward(t, problem.answer) > 0 for t in texts) / 4000
    assert abs(share - genac.chance(q, 8, True)) < 0.03


def test_genac_oracle_in_the_place_of_a_critic():
    """ask with the oracle as sampler: V falls where the error is, the error's segment is blamed."""
    critic = _genac_critic()
    sampler = functools.partial(genac.oracle_sampler, tokenizer=critic.tokenizer)
    tokens, mask = _responses(critic, "a0b7c4d1e9f6$", "a0b7c4d1e8f5$")
    starts = segment_starts(mask, width=4)
    value, _, stats = genac.ask(critic, ["3+7@f="] * 2, tokens, mask, starts, sampler)
    assert value[0, 7] == value[1, 7] > 0 and stats["unparsable"] == (0, 8)
    assert value[0, 12] == -1 and value[1, 12] == 1
    A = spread(gae.gae(value, torch.tensor([-1.0, 1.0]), starts, 0.0), starts, mask)
    assert A[0].argmin() == 8 and A[1, 8] > 0


_TWO_RANKS = '''
import sys
import genac, rollout, torch, torch.distributed as dist
from transformers import AutoModelForCausalLM
if "RANK" in __import__("os").environ:
    dist.init_process_group("gloo")
critic = genac.task_critic(sys.argv[1], layers=2)
problems = rollout.task_problems()
states = genac.task_states(11, 0, problems)
traces = [(s, genac.oracle_trace(s.question, s.prefix, s.success_rate)) for s in states]
tokens, attention, mask, _ = genac.join(critic, traces)
n = mask.sum()
grads, totals = [], []
for _ in range(2):  # the second adds to what the first has left
    stats = genac.backward(critic, tokens, attention, mask,
                           lambda x, m, _: genac.sft_loss(x, m, n), token_budget=300)
grads.append(torch.cat([p.grad.flatten() for p in critic.model.parameters()]))
critic.model.zero_grad()
v_hat = [genac.parse_score(text) for _, text in traces]
replies = genac.Replies(tokens, attention, mask, [text for _, text in traces], v_hat)
r = torch.arange(11) % 2
more = genac.reinforce_backward(critic, replies, r.float(), baseline="mean", token_budget=300)
grads.append(torch.cat([p.grad.flatten() for p in critic.model.parameters()]))
critic.temperature, critic.max_new_tokens, critic.silent = 0.0, 12, -1  # greedy: any rank's is one
few, _ = genac.ask_states(critic, states[:1], rollout.generate)
all_, _ = genac.ask_states(critic, states, rollout.generate)
asked = genac.respond(critic, problems[:5], limit=12, verifier="chain",
                      generator=torch.Generator().manual_seed(0))
assert [len(x) for x in asked] == [5] * 5 and asked[0] == [p.prompt for p in problems[:5]]
if genac.ranks()[0] == genac.ranks()[1] - 1:  # the last rank: it must hold the whole too
    torch.save([grads, float(stats["loss"][0]), float(more["reward"][0]), few.texts, all_.texts],
               sys.argv[2])
if dist.is_initialized():
    dist.destroy_process_group()
'''


def test_genac_two_ranks_are_one(tmp_path):
    """Under torchrun each rank takes its share: gradients agree to 1e-6, replies and sums too."""
    _tiny().save_pretrained(tmp_path / "model")
    rollout.task_tokenizer().save_pretrained(tmp_path / "model")
    script, found = tmp_path / "two.py", []
    script.write_text(_TWO_RANKS)
    env = os.environ | {"PYTHONPATH": os.path.dirname(os.path.abspath(genac.__file__)),
                        "OMP_NUM_THREADS": "1"}
    for start in ([], ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port",
                       "0", "--standalone"]):
        out = str(tmp_path / f"out-{len(start)}")
        subprocess.run([sys.executable, *start, str(script), str(tmp_path / "model"), out],
                       env=env, check=True, capture_output=True, timeout=120)
        found.append(torch.load(out, weights_only=False))
    one, two = found
    for a, b in zip(one[0], two[0]):
        assert a.norm() > 0.01 and torch.allclose(a, b, atol=1e-6)
    assert one[1:3] == pytest.approx(two[1:3], rel=1e-5) and one[3:] == two[3:]


def test_genac_pools_hold_one_right_candidate():
    """claim_sets: the first of a pool is right so far, the others are not, all cut at one step;
    the operands held out are in no other set, and the chains are as long as each set says."""
    problems, states, pools = genac.claim_sets(16, 0)
    held = lambda q: (int(q[0]) + 3 * int(q[2])) % 10 == 7
    assert len(pools) == 4 and all(len(pool) == genac.POOLS[-1] for pool in pools)
    for pool in pools:
        p = [genac.oracle_chance(s.question, s.prefix, s.success_rate) for s in pool]
        assert p[0] > max(p[1:]) and len({(s.question, len(s.prefix)) for s in pool}) == 1
    long = lambda q: ord(q[4]) - 96 > genac.NEAR
    assert not any(held(p.prompt) or long(p.prompt) for p in problems)
    for name, of_set in states.items():
        assert all(held(s.question) == (name == "unseen operands") for s in of_set)
        assert all(long(s.question) == (name == "longer chains") for s in of_set)
    seen = {s.question for s in states["in distribution"]}
    assert not seen & {p.prompt for p in problems}


def test_genac_measure_by_hand():
    """The truth as the score has error 0 and picks the right one; a constant has chance."""
    _, states, pools = genac.claim_sets(16, 1)
    truth = lambda of: [genac.oracle_chance(s.question, s.prefix, s.success_rate) for s in of]
    found = genac.measure(truth, states, pools)
    assert all(found[name] == pytest.approx(0, abs=1e-6) for name in states)
    assert all(found[f"top-1 of {m}"] == 1 for m in genac.POOLS)
    found = genac.measure(lambda of: [0.5] * len(of), states, pools)
    assert all(found[f"top-1 of {m}"] == pytest.approx(1 / m) for m in genac.POOLS)
    assert all(found[name] > 0.01 for name in states)


def test_genac_claims_keep_what_is_done(tmp_path, monkeypatch, capsys):
    """Both kinds of critic through all stages, to a file and a table; a second start adds none."""
    monkeypatch.chdir(tmp_path)
    _tiny().save_pretrained("base")
    rollout.task_tokenizer().save_pretrained("base")
    monkeypatch.setattr(train, "build_base", lambda: "base")
    monkeypatch.setattr(genac, "REPLY", 12)
    monkeypatch.setattr(genac, "POOLS", (2, 4))
    kinds = "generative", "discriminative"
    monkeypatch.setattr(genac, "GENERATIVE", {kinds[0]: (1, True)})
    monkeypatch.setattr(genac, "DISCRIMINATIVE", {kinds[1]: (1, 1)})
    args = argparse.Namespace(n=4, sft_steps=[1, 1], sft_batch=2, sft_lr=1e-3, value_lr=1e-3,
                              lr=1e-4, batch=2, steps=1, baseline="none", progress=False)
    os.makedirs(genac.CLAIMS)
    threads = torch.get_num_threads()
    found = {}
    for name in kinds:
        genac.claim_critic(args, name, 0)
        with open(genac.claim_file(name, 0)) as file:
            found[name] = json.load(file)
        assert list(found[name]) == ["untrained", "SFT", "SFT + RL"]
        for stage in found[name].values():
            names = "in distribution", "longer chains", "top-1 of 4"
            assert all(0 <= stage[name] <= 1 for name in names)
    assert found["generative"]["untrained"]["unparsable"] == 1
    monkeypatch.setattr(genac, "claim_generative", None)  # whoever calls it now fails
    genac.claim_critic(args, "generative", 0)
    torch.set_num_threads(threads)
    genac.print_critics({name: [x, x] for name, x in found.items()})
    assert "discriminative, SFT + RL" in capsys.readouterr().out


def test_genac_guesses_give_each_verdict_a_coin():
    """guessed_states: a value is right with ½ + ½·¹⁄₁₀, whatever the one before it is."""
    states = genac.guessed_states(600, 0, rollout.task_problems())
    right = [[value == stated for _, value, stated in genac.check_steps(s.question, s.prefix)[0]]
             for s in states]
    share = lambda x: sum(x) / len(x)
    assert abs(share([x for row in right for x in row]) - 0.55) < 0.03
    after = [b for row in right for a, b in zip(row, row[1:]) if not a]
    assert abs(share(after) - 0.55) < 0.04  # of noisy actors' states hardly one


# ---------------------------------------------------------------------------------------- train.py


# A run of main() on a policy that is hardly trained: it is about the machinery, `.ci/run` trains.

TINY = ("--rollout-batch 16 --mini-batches 2 --pool-size 16 --pretrain-batch 16 --eval-problems 8 "
        "--eval-k 2 --max-response 24 --show-every 0 --device cpu --pool-temperatures 1.0 "
        "--lr 1e-3 --verifier even --eval-every 0").split()


def _even(text, answer):
    """A verifier that a random policy satisfies half of the time."""
    return 1.0 if len(text) % 2 == 0 else -1.0


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A base policy of a few steps: it has learned to end its responses, and not much else."""
    folder = str(tmp_path_factory.mktemp("base") / "model")
    return train.build_base(folder, steps=30, batch=16)


@pytest.fixture
def go(base, tmp_path, monkeypatch):
    """go("--steps 2") runs main on the tiny configuration -> exit status."""
    monkeypatch.setitem(rollout.VERIFIERS, "even", _even)
    monkeypatch.setattr(train, "build_base", lambda: base)
    monkeypatch.chdir(tmp_path)
    return lambda flags, *rest: train.main([*TINY, *flags.split(), *rest])


def _metrics(folder):
    with open(os.path.join(folder, "metrics.jsonl")) as file:
        return [json.loads(line) for line in file]


def _last_state(folder):
    """All tensors of a run's last checkpoint, and its numbers."""
    path = train.checkpoints(folder)[-1]
    index = train.PlainReader(path).read_metadata().state_dict_metadata
    state = {name: torch.empty(x.size, dtype=x.properties.dtype) for name, x in index.items()}
    dcp.load(state, storage_reader=train.PlainReader(path), no_dist=True)
    return state, json.load(open(os.path.join(path, "state.json")))


def _equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def _run(base, monkeypatch, *flags):
    """The state of a run, with a critic, before its first step."""
    monkeypatch.setitem(rollout.VERIFIERS, "even", _even)
    monkeypatch.setattr(train, "build_base", lambda: base)
    run = train.setup(train.parse([*TINY, *flags])[0])
    if run.method.value == "critic":
        train.prepare_critic(run)
    return run


def test_train_one_run_of_every_stage(go):
    """Pool, pretraining, steps, evaluation: all metrics finite, first ratio 1, files all there."""
    assert go("--steps 2 --out r --eval-every 1") == 0
    rows = _metrics("r")
    steps = [row for row in rows if "rollout/success" in row]
    assert [row["step"] for row in rows] == [0, 1, 2, 2] and len(steps) == 2
    undefined = {k for row in steps for k, x in row.items() if x is None}
    assert undefined <= {"critic/explained_variance"}
    assert steps[0]["mismatch/log_ratio_max"] < 1e-5
    for name in ("rollout/length", "actor/clip_share", "actor/entropy", "critic/loss",
                 "critic/grad_head_share", "daps/accepted", "time/rollout", "memory/peak_gib"):
        assert all(name in row for row in steps), name
    assert "eval/avg@2" in rows[1] and "eval/pass@2" in rows[-1]
    exported = AutoModelForCausalLM.from_pretrained("r/actor").state_dict()
    state, _ = _last_state("r")
    assert all(torch.equal(state["actor.model." + k], x) for k, x in exported.items())
    assert AutoTokenizer.from_pretrained("r/actor").eos_token == "$"
    critic = Critic.from_pretrained("r/critic").state_dict()
    assert all(torch.equal(state["critic." + k], x) for k, x in critic.items())
    assert json.load(open("r/config.json"))["rollout_batch"] == 16


@pytest.mark.parametrize("flags", [
    "--method grpo-x --k 4", "--method reinforce++", "--k 4", "--loss ppo-clip --selection uniform",
    "--method s3ac-v0", "--method grpo --k 4", "--method rloo --k 4", "--method flash-reinforce",
    "--method ppo", "--method vc-ppo", "--method vapo --k 4", "--method vine-ppo --vine-k 2",
    "--method sao", "--method spo", "--method evpo", "--method asyppo --k 4", "--selection pcl",
    "--method grpo-x --k 4 --selection greso --gepo",
    "--loss dis --rollout-dtype bfloat16", "--sampler generate_batch", "--compute-dtype bfloat16",
    "--critic-clip-split"])
def test_train_methods_and_options_run(go, flags):
    """Every row of METHODS, every loss, groups and low precision: finite metrics, weights move."""
    if "generate_batch" in flags:
        _paged_sampler_runs(_llama())
    assert go(f"--steps 1 --out r {flags}") == 0
    row = _metrics("r")[1]
    assert all(x is not None for k, x in row.items() if k != "critic/explained_variance"), row
    assert row["actor/grad_norm"] > 0 and row["rollout/trajectories"] % 4 == 0
    if "bfloat16" in flags:
        assert row["mismatch/log_ratio_max"] > 1e-5  # a real mismatch


def test_train_micro_batches_do_not_change_the_step(base, monkeypatch):
    """One pass or many of unequal length: the same updated actor and critic to 1e-6."""
    after = []
    for budget in ("100000", "60"):
        run = _run(base, monkeypatch, "--token-budget", budget, "--weight-decay", "0",
                   "--lr", "1e-4")
        for opt in (run.actor_opt, run.critic_opt):  # Adam divides by tiny numbers: compare SGD
            opt.step = torch.optim.SGD(opt.param_groups[0]["params"], 0.1).step
        train.train_step(run)
        after.append([*run.actor.parameters(), *run.critic.parameters()])
    assert max((a - b).abs().max() for a, b in zip(*after)) < 1e-6


def test_train_scores_do_not_depend_on_padding(base, monkeypatch):
    """log π_old and V of a batch equal those of each row alone, to 1e-5."""
    run = _run(base, monkeypatch)
    batch, _ = train.rollout_batch(run, train.generator(0, "train", 0))
    logp, entropy, value = train.score(run, batch)
    value = value[0]  # of the only critic
    for i in range(len(batch.mask)):
        alone = take(batch, torch.tensor([i]))
        T = alone.mask.shape[1]
        for whole, one in zip((logp, entropy, value), train.score(run, alone)):
            assert torch.allclose(whole[i, :T], one.view(-1, T)[0], atol=1e-5)
    assert (logp[~batch.mask] == 0).all() and (logp[batch.mask] < 0).all()


def test_train_interleaved_conversation(base, monkeypatch):
    """A masked gap (tool output) inside a response: what stands in it changes no update but through
    the attention, and its own log-prob and value are never used."""
    run = _run(base, monkeypatch)
    batch, _ = train.rollout_batch(run, train.generator(0, "train", 0))
    batch.mask[:, 1:3] = False
    batch.logp_old, _, (batch.value,) = train.score(run, batch)
    batch.advantage = train.ADVANTAGES["gae"](batch, run.cfg)
    batch.keep = batch.mask
    for field_ in ("logp_roll", "logp_old", "value", "advantage"):
        getattr(batch, field_)[~batch.mask] = float("nan")
    metrics = train.update_critic(run, batch, train.generator(0, "train", 0))
    metrics |= train.update_actor(run, batch, train.generator(0, "train", 0))
    assert all(math.isfinite(x) for x in metrics.values())
    assert all(p.isfinite().all() for p in run.actor.parameters())


def test_train_resume_is_bit_exact(go):
    """Two steps, resume, two more = four steps: every tensor of the last checkpoint is equal."""
    assert go("--steps 4 --out whole") == 0
    assert go("--steps 2 --out parts") == 0
    with open("parts/metrics.jsonl", "a") as file:  # a step that was logged but not saved
        file.write('{"step": 3}\n')
        file.write('{"step": 3, "torn')
    os.mkdir("parts/checkpoints/step-000003.writing")  # killed while writing
    open("parts/checkpoints/step-000003.writing/__0_0.distcp", "w").write("torn")
    assert train.main("--resume parts --steps 4".split()) == 0
    (whole, numbers), (parts, again) = _last_state("whole"), _last_state("parts")
    assert _equal(whole, parts) and numbers == again and len(whole) > 100
    steps = [[m["actor/loss"] for m in _metrics(f) if "actor/loss" in m]
             for f in ("whole", "parts")]
    assert steps[0] == steps[1] and len(steps[0]) == 4


def test_train_ctrl_c_leaves_a_run_that_goes_on(go, monkeypatch):
    """Ctrl-C in the middle of the third step: it is finished and saved, status 130, and resumed
    the run is the uninterrupted one, bit for bit."""
    score = train.score

    def interrupted(run, batch):
        if run.step == 2:
            signal.raise_signal(signal.SIGINT)
        return score(run, batch)

    with monkeypatch.context() as patch:
        patch.setattr(train, "score", interrupted)
        assert go("--steps 5 --out r") == 130
    assert train.checkpoints("r")[-1].endswith("step-000003")
    assert train.main("--resume r --steps 5".split()) == 0 and go("--steps 5 --out whole") == 0
    assert _equal(_last_state("r")[0], _last_state("whole")[0])


def test_train_a_checkpoint_cannot_run_code(go, capsys):
    """An index that names a function is refused without calling it; so is a tensor file."""
    assert go("--steps 1 --out r") == 0
    path = train.checkpoints("r")[-1]
    for file, write in ((".metadata", pickle.dump),
                        ("__0_0.distcp", lambda x, f: torch.save(x, f))):
        with open(os.path.join(path, file), "rb") as kept:
            good = kept.read()
        with open(os.path.join(path, file), "wb") as bad:
            write(_Evil(), bad)
        assert train.main("--resume r --steps 2".split()) == 2
        assert "expected a checkpoint of this model" in capsys.readouterr().err
        with open(os.path.join(path, file), "wb") as again:
            again.write(good)
    assert not os.path.exists("evil") and train.main("--resume r --steps 2".split()) == 0


class _Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


def test_train_full_disk_keeps_the_checkpoint_before(go, monkeypatch, capsys):
    """A write that fails ends the run with a sentence that names the last whole checkpoint."""
    save = dcp.save

    def full(state, checkpoint_id, **how):
        if "000002" in checkpoint_id:
            raise OSError(28, "No space left on device")
        return save(state, checkpoint_id=checkpoint_id, **how)

    with monkeypatch.context() as patch:
        patch.setattr(dcp, "save", full)
        assert go("--steps 3 --out r --save-every 1") == 2
    error = capsys.readouterr().err
    assert "No space left on device" in error
    assert "last checkpoint: r/checkpoints/step-000001" in error
    assert len(_last_state("r")[0]) > 100


def test_train_uniform_groups_for_ever_end_with_a_sentence(go, monkeypatch, capsys):
    """A verifier that always says no: the run ends, names the reason, and never loops."""
    monkeypatch.setitem(rollout.VERIFIERS, "even", lambda text, answer: -1.0)
    assert go("--steps 3 --out r --method grpo-x --k 4 --filter-rounds 3") == 1
    assert "every group of 4 was all right or all wrong, in 3 rounds" in capsys.readouterr().err


def test_train_groups_are_mixed_and_counted(base, monkeypatch):
    """With K > 1 every group that is trained on is mixed, and sampled = trained + discarded."""
    run = _run(base, monkeypatch, "--method", "grpo-x", "--k", "4")
    batch, metrics = train.rollout_batch(run, train.generator(0, "train", 0))
    for i in batch.prompt_id.unique():
        assert batch.reward[batch.prompt_id == i].unique().numel() == 2
    assert metrics["rollout/sampled"] == len(batch.reward) + metrics["rollout/discarded"]


def test_train_non_finite_gradients_are_skipped_counted_and_stop(go, base, monkeypatch, capsys):
    """A NaN gradient changes nothing but the count; five in a row end the run with a checkpoint."""
    run = _run(base, monkeypatch)
    before = [p.clone() for p in run.actor.parameters()]
    norms = [math.nan, 1.0, math.inf, math.nan]
    made = [train.step_if_finite(run, "actor", run.actor_opt, norm) for norm in norms]
    assert made == [False, True, False, False] and run.nonfinite == {"actor": 2, "critic": 0}
    assert all(torch.equal(a, b) for a, b in zip(before, run.actor.parameters()))
    monkeypatch.setitem(train.LOSSES, "cispo", lambda logp, b, n, cfg: (logp.sum() * math.nan, {}))
    assert go("--steps 9 --out r --method reinforce++ --selection uniform") == 1  # 2 updates a step
    error = capsys.readouterr().err
    assert "not finite 6 times in a row" in error and "r/checkpoints/step-000003" in error
    assert [m["actor/skipped_nonfinite"] for m in _metrics("r")[1:]] == [2, 2]


def test_train_values_that_are_not_finite_stop(base, monkeypatch):
    """A critic gone NaN is told as what it is, not as a wrong argument."""
    run = _run(base, monkeypatch)
    run.critic.head.weight.data.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="V.s_0. is not finite"):
        train.rollout_batch(run, train.generator(0, "train", 0))


def test_train_daps_selects_from_values(base, monkeypatch):
    """Ids are distinct, in range, outcomes reach the counts, and V(s_0) is the critic's own."""
    run = _run(base, monkeypatch, "--daps-uniform", "0", "--daps-ramp", "0")
    ids = torch.tensor([3, 0, 7])
    by_score = []
    for i in ids.tolist():
        tokens = torch.tensor([run.prompts[i]])
        by_score.append(run.critic(tokens, torch.ones_like(tokens).bool())[0, -1].item())
    assert torch.allclose(train.initial_values(run, ids), torch.tensor(by_score), atol=1e-6)
    batch, metrics = train.rollout_batch(run, train.generator(0, "train", 0))
    assert batch.prompt_id.unique().numel() == 16 and metrics["daps/offered"] == 64
    assert run.daps.state_dict()["trials"].sum() == 16


BAD = [
    ("--method nonsense", "--method: expected one of s3ac"),
    ("--k 3", "--k: expected a divisor of --rollout-batch 16, found 3"),
    ("--method grpo-x --k 1", "--k: expected 2 or more"),
    ("--mini-batches 17", "--mini-batches: expected 1 … 16"),
    ("--temperature 0", "--temperature: expected a number above 0"),
    ("--method grpo-x --selection daps", "--selection: expected uniform"),
    ("--data none.jsonl", "--data: expected --model beside it"),
    ("--data none.jsonl --model x", "--data: expected a JSONL file, found no file none.jsonl"),
    ("--critic .", "--critic: expected the folder of a critic (value_head.pt), found ."),
    ("--critic-epochs 0", "--critic-epochs: expected 1 or more, found 0"),
    ("--seed -1", "--seed: expected 0 or more, found -1"),
    ("--lr nan", "--lr: expected a number above 0, found nan"),
    ("--eps-low 2", "--eps-low: expected 0 … 1, found 2.0"),
    ("--max-response 300", "--max-response: expected at most 250"),
    ("--resume nothing", "--resume: expected a run folder with config.json, found nothing"),
    ("--model ./nowhere", "--model: expected a folder with a Hugging Face model"),
    ("--max-prompt 2", "--max-prompt: expected prompts of at most 2 tokens, found 2200 of 2200"),
    ("--pool nowhere", "found nowhere"),
    ("--pool-temperatures 1,x", "--pool-temperatures"),
]


@pytest.mark.parametrize("flags, words", BAD)
def test_train_bad_input_is_one_sentence(go, flags, words, capsys):
    """Exit status 2 and one sentence that names the flag, what was expected and what was found."""
    assert go(f"--out r {flags}") == 2
    error = capsys.readouterr().err.strip()
    assert words in error and error.startswith("error: ") and "\n" not in error


@pytest.mark.parametrize("flags", ["--preset huge", "--nonsense 1", "--steps many",
                                   "--long-prompts maybe"])
def test_train_bad_flags_are_refused(flags, capsys):
    """argparse's own sentence and status 2."""
    with pytest.raises(SystemExit) as stop:
        train.main(flags.split())
    assert stop.value.code == 2 and "error: " in capsys.readouterr().err


def test_train_bad_data_names_the_line(go, capsys, monkeypatch):
    """A broken line or a missing key of a JSONL file is named with its number, before any model."""
    open("config.json", "w").write("{}")  # a folder that looks like a model's
    for text, words in (('{"prompt": "1+1=", "answer": "2"}\n{"prompt": ', "line 2"),
                        ('{"text": "1+1="}\n', "line 1"), ("\n", "found no line")):
        open("data.jsonl", "w").write(text)
        assert go("--out r --data data.jsonl --model .") == 2
        assert words in capsys.readouterr().err


def test_train_data_that_repeats_or_is_too_long(go, base, capsys):
    """Prompts that stand twice are left out, so none is held out and trained on; those over
    --max-prompt are counted and skipped, or stop the run."""
    rows = [{"prompt": str(n) * n, "answer": "2"} for n in (3, 4, 5, 6, 7, 8, 2, 1, 9)]
    rows += [*rows, {"prompt": "0" * 30, "answer": "2"}, {"prompt": "0" * 2, "answer": "2"}]
    open("data.jsonl", "w").write("\n".join(map(json.dumps, rows)))
    cfg = train.parse(["--data", "data.jsonl", "--eval-problems", "5"])[0]
    train_part, held_out = train.load_data(cfg)
    assert len({p.prompt for p in train_part + held_out}) == 11 == len(train_part) + len(held_out)
    assert len(held_out) == 1 and "left out 9 of 20 problems" in capsys.readouterr().out
    flags = (f"--steps 1 --model {base} --data data.jsonl --rollout-batch 4 --eval-problems 1 "
             "--instruction= --k 1")
    assert go(f"--out r {flags} --max-prompt 9") == 0
    assert "skipped 1 of 10 prompts" in capsys.readouterr().out
    assert go(f"--out q {flags} --max-prompt 9 --long-prompts stop") == 2
    assert "found 1 of 10 that are longer" in capsys.readouterr().err


def test_train_run_folders_are_not_overwritten(go, capsys):
    """--out with a run in it, --resume without one or with new settings: a sentence, no damage."""
    assert go("--steps 1 --out r") == 0
    assert go("--steps 1 --out r") == 2 and "--resume goes on" in capsys.readouterr().err
    for flags, words in (("--lr 7", "lr 0.001 -> 7"), ("--out q", "out 'r' -> 'q'"),
                         ("--preset tiny", "preset None -> 'tiny'")):
        assert train.main(["--resume", "r", *flags.split()]) == 2
        assert words in capsys.readouterr().err
    open("r/config.json", "w").write("{")
    assert train.main(["--resume", "r"]) == 2 and "--resume: expected" in capsys.readouterr().err
    assert go("--steps 0 --out q") == 2 and not os.path.exists("q")
    assert go("--steps 3 --out p") == 0 and train.main("--resume p --steps 2".split()) == 2
    assert "--steps: expected 3 or more" in capsys.readouterr().err


def test_train_flags_win_over_the_preset_and_the_preset_over_the_defaults():
    """tiny only without --model and --data; the paper's values are the defaults."""
    cfg, _ = train.parse("--lr 3".split())
    assert cfg.lr == 3 and cfg.verifier == "chain" and cfg.critic_lr == 2.5e-4
    paper, _ = train.parse("--data x.jsonl".split())
    assert paper.verifier == "boxed" and (paper.lr, paper.critic_lr) == (1e-6, 5e-6)
    assert (paper.clip_norm, paper.critic_clip_norm, paper.alpha) == (1.0, 10.0, 1.5)
    assert train.clip_range(paper) == {}  # the loss's own: 0.2 and 0.28 for CISPO
    asked = train.parse("--data x --model y --eps-high 0.5".split())[0]
    assert train.clip_range(asked) == {"eps_high": 0.5}
    assert (paper.mini_batches, paper.critic_epochs) == (8, 2)
    assert train.parse("--preset r1-distill-1.5b --steps 7".split())[0].steps == 7


def test_train_a_method_is_one_row(go, monkeypatch):
    """A new row and one function: advantage R on every token, no baseline."""
    monkeypatch.setitem(train.ADVANTAGES, "return", lambda b, cfg: b.mask * b.reward[:, None])
    monkeypatch.setitem(train.METHODS, "reinforce",
                        train.Method("none", "none", "return", "cispo"))
    assert go("--steps 1 --out r --method reinforce") == 0


def test_train_refuses_an_output_that_is_not_hidden_times_weight(base):
    """With a bias or a cap on the logits the trainer's log-probs would not be the sampler's."""
    cfg, model = train.parse(TINY)[0], _llama()
    train.check_model(cfg, model, [[1, 2, 3]])
    model.lm_head.bias = nn.Parameter(torch.full((13,), 0.05))
    model.lm_head.bias.data[3] = -0.05
    with pytest.raises(ValueError, match="no bias, scale or cap"):
        train.check_model(cfg, model, [[1, 2, 3]])
    model.lm_head.bias = None
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match="found linear_attention"):
        train.check_model(cfg, model, [[1, 2, 3]])


def test_train_always_holds_out_a_problem(tmp_path):
    """Three problems: one is held out, so that a target is measured; one alone is refused."""
    file = tmp_path / "few.jsonl"
    cfg = train.parse(["--data", str(file), "--model", "x", "--target", "0.5"])[0]
    for n, message in ((3, None), (1, "--data: expected 2 or more problems")):
        file.write_text("".join(f'{{"prompt": "1+{i}=", "answer": "2"}}\n' for i in range(n)))
        if message is None:
            assert [len(part) for part in train.load_data(cfg)] == [2, 1]
        else:
            with pytest.raises(ValueError, match=message):
                train.load_data(cfg)


def test_train_target_is_the_exit_status(go, capsys):
    """Below --target the status is 1, and the last line says what was reached and where."""
    assert go("--steps 1 --out r --target 1.1") == 1
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert "below the target 1.1" in last and last.endswith("files in r")


# ----------------------------------------------------------------------------- train.py, memory


class _Peak(TorchDispatchMode):
    """Bytes of all tensors made inside that are alive, and the most at once."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.known = set()

    def _gone(self, key, n):
        self.known.discard(key)
        self.now -= n

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if torch.is_tensor(x) and (key := x.untyped_storage()._cdata) not in self.known:
                n = x.untyped_storage().nbytes()
                self.known.add(key)
                self.now += n
                weakref.finalize(x.untyped_storage(), self._gone, key, n)
        self.most = max(self.most, self.now)
        return out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("H, I, L", [(64, 192, 4), (128, 192, 4), (64, 384, 8)])
def test_train_memory_is_computed_to_a_fifth(H, I, L, recompute, dtype):
    """memory_gib's activations of one pass against the measured peak, gradients left out."""
    config = LlamaConfig(hidden_size=H, intermediate_size=I, num_hidden_layers=L, vocab_size=100,
                         num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    actor = train.Actor(LlamaForCausalLM(config).to(getattr(torch, dtype)), 1.0)
    if recompute:
        train.checkpoint_activations(actor.model)
        actor.train()
    tokens, attention = torch.randint(100, (4, 256)), torch.ones(4, 256).bool()
    with _Peak() as peak:
        actor(tokens, attention, attention[:, 2:], False).sum().backward()
    measured = peak.most - sum(p.numel() * p.element_size() for p in actor.parameters())
    cfg = train.replace(train.parse(TINY)[0], token_budget=1024, max_prompt=2, max_response=254,
                        compute_dtype=dtype, checkpoint_activations=recompute)
    computed = 2**30 * train.memory_gib(config, cfg, cuda=False)["pass"]
    assert 0.8 < computed / measured < 1.25


def test_train_memory_states_by_hand():
    """16 bytes a parameter for each of actor and critic, shared by the ranks; the copy is whole."""
    model = _llama(tie_word_embeddings=False)
    n = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    cfg = train.parse(TINY)[0]
    assert train.memory_gib(model.config, cfg)["states"] * 2**30 == 32 * n
    two = train.memory_gib(model.config, cfg, 2)
    assert two["states"] * 2**30 == 16 * n and two["copy"] * 2**30 == 4 * n


# ------------------------------------------------------------------- train.py, mixture of experts


def _moe(kind):
    torch.manual_seed(0)
    config = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
              "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2,
              "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": 65,
              "pad_token_id": 65, "initializer_range": 0.3}
    if kind == "mixtral":
        return MixtralForCausalLM(MixtralConfig(num_local_experts=8, **config)).eval()
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(
        num_experts=8, moe_intermediate_size=16, head_dim=8, norm_topk_prob=kind == "qwen3",
        **config)).eval()


@pytest.mark.parametrize("kind", ["qwen3", "qwen3, weights not normalised", "mixtral"])
def test_train_router_replay(kind, tmp_path, monkeypatch):
    """R3: a bf16 sampler and the float32 trainer choose the same experts on every token, ρ comes
    closer to 1, and the router still has a gradient. Replaying its own choices changes nothing."""
    _moe(kind).save_pretrained(tmp_path)
    rollout.task_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setitem(rollout.VERIFIERS, "even", _even)
    off = {}
    for replay in (False, True):
        run = train.setup(train.parse([
            *TINY, "--model", str(tmp_path), "--method", "reinforce++", "--rollout-batch", "32",
            "--rollout-dtype", "bfloat16",
            "--router-replay" if replay else "--no-router-replay"])[0])
        batch, _ = train.rollout_batch(run, train.generator(0, "train", 0))
        batch.logp_old = train.score(run, batch)[0]
        off[replay] = (batch.logp_old - batch.logp_roll)[batch.mask].abs()
    assert off[True].mean() < 0.7 * off[False].mean() and off[True].max() < off[False].max()

    noted, attention, agree = batch.routing, batch.attention, []
    for layer, router in enumerate(run.actor.routing.routers):
        want = noted[:, :, layer]
        router.register_forward_hook(lambda m, i, out, want=want: agree.append(
            (out[2].view(*attention.shape, 2) == want)[want[..., 0] >= 0].all()))
    run.actor(batch.tokens, attention, batch.mask, False, noted)[0].sum().backward()
    assert len(agree) == 3 and all(agree)
    assert all(r.weight.grad.abs().sum() > 0 for r in run.actor.routing.routers)
    fed = attention.sum(1) - 1  # all tokens but the last one sampled
    assert ((noted[..., 0, 0] >= 0).sum(1) == fed).all()

    with torch.no_grad():
        own = run.actor(batch.tokens, attention, batch.mask, False, torch.full_like(noted, -1))
        run.actor.routing.replay = None
        run.actor.routing.seen = []
        plain = run.actor(batch.tokens, attention, batch.mask, False)
    assert torch.allclose(own, plain, atol=1e-6)


def test_train_router_replay_needs_routers(base, monkeypatch):
    """A dense model has no router: one sentence."""
    with pytest.raises(ValueError, match="--router-replay: expected a model with top-k routers"):
        _run(base, monkeypatch, "--router-replay")


# ---------------------------------------------------------------------------- train.py on two ranks


def _updates(run, folder):
    """A gradient of value pretraining, then scores and updates of one given batch: metrics, and
    every tensor, whole."""
    batch = torch.load(os.path.join(folder, "batch.pt"), weights_only=False)
    pool = vp.TrajectoryPool.open(os.path.join(folder, "pool"))
    rows, how = np.arange(len(pool)), {"token_budget": 60, "rank": run.rank, "world": run.size}
    tensors = {"pretraining loss": vp.accumulate_gradient(run.critic, pool, rows, **how)}
    tensors |= {"gradient of " + name: train.gathered(p.grad).clone()
                for name, p in run.critic.named_parameters()}
    run.critic.zero_grad()
    assert abs(vp.held_out_ev(run.critic, pool, rows, **how)) < 1
    for opt in (run.actor_opt, run.critic_opt):  # Adam divides by tiny numbers: compare SGD
        opt.step = torch.optim.SGD(opt.param_groups[0]["params"], 0.1).step
    batch.logp_old, entropy, (batch.value,) = train.score(run, batch)
    batch.advantage, batch.keep = train.ADVANTAGES["gae"](batch, run.cfg), batch.mask
    rng = torch.Generator().manual_seed(0)
    metrics = train.update_critic(run, batch, rng) | train.update_actor(run, batch, rng)
    named = {**run.actor.state_dict(), **run.critic.state_dict()}
    tensors |= {name: train.gathered(x).clone() for name, x in named.items()}
    return tensors | {"logp_old": batch.logp_old, "value": batch.value, "entropy": entropy}, metrics


def _rank(rank, folder, base, port, flags):
    """One of two processes: updates, a checkpoint, sampling and selection with uneven lengths."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2",
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    rollout.VERIFIERS["even"], train.build_base = _even, lambda: base
    run = train.setup(train.parse([*TINY, *flags])[0])
    train.prepare_critic(run)
    found = _updates(run, folder)
    if rank == 0:
        torch.save(found, os.path.join(folder, "two.pt"))
    run.cfg.out, run.step = folder, 1
    train.save(run)
    sampled, metrics = train.rollout_batch(run, train.generator(0, "train", 1))
    ids = torch.arange(5)
    values = train.initial_values(run, ids)
    alone = torch.cat([train.initial_values(run, ids[i : i + 1]) for i in range(5)])
    assert torch.allclose(values, alone, atol=1e-6)  # also where a rank has no row of its own
    torch.save((sampled, values, train.evaluate(run), metrics),
               os.path.join(folder, f"rank{rank}.pt"))
    torch.distributed.destroy_process_group()


def _free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.mark.parametrize("flags", [("--token-budget", "60"), (
    "--checkpoint-activations", "--shard-size", "1")])
def test_train_two_ranks_are_one_process(base, monkeypatch, tmp_path, flags, capsys):
    """FSDP2 on two processes, sharded or replicated: scores, losses, norms and updated weights of
    one, to 1e-6, with uneven lengths; both ranks hold the same sampled batch; their checkpoint
    resumes on one process."""
    run = _run(base, monkeypatch, *flags)
    batch, _ = train.rollout_batch(run, train.generator(0, "train", 0))
    assert len(set(batch.mask.sum(1).tolist())) > 3
    torch.save(batch, tmp_path / "batch.pt")
    vp.TrajectoryPool(tmp_path / "pool").append(batch, 0)
    one, metrics = _updates(run, str(tmp_path))
    torch.multiprocessing.spawn(_rank, (str(tmp_path), base, _free_port(), flags), nprocs=2)
    two, theirs = torch.load(tmp_path / "two.pt")
    assert one.keys() == two.keys()
    assert max((one[name] - two[name]).abs().max() for name in one) < 3e-6
    assert metrics.keys() == theirs.keys()
    same = [x for x in metrics if "padding" not in x]
    assert all(abs(metrics[x] - theirs[x]) < 1e-5 * max(1, abs(metrics[x])) for x in same)
    (a, va, ea, ma), (b, vb, eb, mb) = (
        torch.load(tmp_path / f"rank{r}.pt", weights_only=False) for r in (0, 1))
    assert torch.equal(a.tokens, b.tokens) and torch.equal(va, vb) and ea == eb and ma == mb
    assert len(a.mask) == 16 and a.prompt_id.unique().numel() == 16

    run.cfg.out, run.step = str(tmp_path), 0
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "rollout/success": 1}\n')
    train.load(run)
    assert run.step == 1 and "written by 2 ranks, resumed on 1" in capsys.readouterr().out
    named = {**run.actor.state_dict(), **run.critic.state_dict()}
    assert all(torch.equal(x, two[name]) for name, x in named.items())
    assert not (tmp_path / "metrics.jsonl").read_text()


def _command(*flags, ranks=0, script="train.py"):
    """A run in a process of its own, by torchrun where ranks are given -> Popen."""
    script = os.path.join(os.path.dirname(os.path.abspath(train.__file__)), script)
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--master_port",
              str(_free_port())] if ranks else []
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, *launch, script, *flags], env=env,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_train_killed_at_any_moment_goes_on_bit_for_bit(base, tmp_path, monkeypatch):
    """SIGKILL while the third checkpoint is being written, resume, = the uninterrupted run."""
    monkeypatch.chdir(tmp_path)
    flags = [x for x in TINY if x not in ("--verifier", "even")]
    flags = [*flags, "--verifier", "chain", "--model", base, "--steps", "4", "--save-every", "1"]
    killed = _command(*flags, "--out", "killed")
    while killed.poll() is None and not os.path.exists("killed/checkpoints/step-000003.writing"):
        pass
    killed.kill()
    killed.wait()
    assert len(train.checkpoints("killed")) >= 1
    again = _command("--resume", "killed")
    assert again.wait() == 0, again.stdout.read()
    whole = _command(*flags, "--out", "whole")
    assert whole.wait() == 0, whole.stdout.read()
    assert _equal(_last_state("killed")[0], _last_state("whole")[0])


def test_train_a_failing_rank_ends_the_run_with_its_message(base, tmp_path, monkeypatch):
    """Rank 1 fails while rank 0 waits in a collective: the whole run ends, and says why."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "failing.py"
    script.write_text(f"""
import os, sys
sys.path.insert(0, {os.path.dirname(os.path.abspath(train.__file__))!r})
import train
def score(run, batch):
    if run.rank == 1:
        raise RuntimeError("the disk of rank 1 is gone")
    return scored(run, batch)
scored, train.score = train.score, score
sys.exit(train.main(sys.argv[1:]))
""")
    flags = [x for x in TINY if x not in ("--verifier", "even")]
    run = _command(*flags, "--verifier", "chain", "--model", base, "--steps", "1", "--out", "r",
                   "--method", "reinforce++", ranks=2, script=str(script))
    said = run.communicate()[0]
    assert run.returncode != 0 and "rank 1: stopped: the disk of rank 1 is gone" in said


def test_train_two_ranks_need_an_even_share(base, tmp_path, monkeypatch):
    """Prompts that the processes do not divide, or a shard size that does not: one sentence."""
    cfg = train.parse([*TINY, "--rollout-batch", "15", "--mini-batches", "2"])[0]
    with pytest.raises(ValueError, match="--rollout-batch: expected prompts per step"):
        train.check_ranks(cfg, 2)
    cfg = train.parse([*TINY, "--shard-size", "3"])[0]
    with pytest.raises(ValueError, match="--shard-size: expected a divisor of the 4 processes"):
        train.check_ranks(cfg, 4)
    with pytest.raises(ValueError, match="expected a list of 2 layers to shard, found none"):
        train.layers_of(nn.Linear(1, 1), LlamaConfig(num_hidden_layers=2))


def test_train_token_budget_keeps_padding_low(base, monkeypatch):
    """Long-tailed lengths, sorted and cut by a budget: under 15 % of the tokens are padding, every
    row is in exactly one share, and both ranks have as many passes."""
    run = _run(base, monkeypatch, "--token-budget", "2048")
    g = torch.Generator().manual_seed(0)
    length = (-torch.rand(256, generator=g).log() * 60).long().clamp(1, 400)
    mask = torch.arange(400) < length[:, None]
    attention = torch.cat([torch.ones(256, 6).bool(), mask], 1)
    batch = Batch(attention.long(), attention, mask, torch.arange(256), torch.ones(256),
                  torch.zeros(256).bool(), mask.float())
    rows, run.size, shares = torch.arange(256), 2, []
    for run.rank in (0, 1):
        shares.append(list(train.micro_batches(run, batch, rows)))
    assert len(shares[0]) == len(shares[1]) > 3
    assert torch.cat([r for s in shares for r, _ in s]).sort().values.equal(rows)
    parts = [part for s in shares for _, part in s]
    padded = sum(part.tokens.numel() for part in parts)
    assert 1 - attention.sum() / padded < 0.15
    assert all(part.tokens.numel() <= 2048 or len(part.mask) == 1 for part in parts)


# ------------------------------------------------------------------ train.py: methods and claims


def _scored(run):
    """A rollout batch with its scores, and the critics' values."""
    batch, _ = train.rollout_batch(run, train.generator(0, "train", 0))
    batch.logp_old, _, V = train.score(run, batch)
    return batch, V


def _hand_batch(value, reward, mask=None, prompt_id=None):
    """A Batch with nothing but what an advantage reads."""
    value, reward = torch.tensor(value), torch.tensor(reward)
    mask = torch.ones_like(value).bool() if mask is None else torch.tensor(mask).bool()
    ids = torch.arange(len(value)) if prompt_id is None else torch.tensor(prompt_id)
    zero = torch.zeros_like(value)
    return rollout.Batch(zero.long(), mask, mask, ids, reward, ~mask.any(1), zero, logp_old=zero,
                         value=value)


def test_train_prompt_baseline_by_hand():
    """s3ac-v0: R − V(s_0) on every token, 0 where masked."""
    b = _hand_batch([[0.5, 9.0], [-0.2, 7.0]], [1.0, -1.0], [[1, 1], [1, 0]])
    A = train.ADVANTAGES["v0"](b, train.Config())
    assert torch.allclose(A, torch.tensor([[0.5, 0.5], [-0.8, 0.0]]))


def test_train_vine_by_hand():
    """Â of a step is V(s') − V(s), of the last R − V(s); the value stands at each of its tokens."""
    b = _hand_batch([[0.2, 0.2, 0.6, 0.6]], [1.0])
    b.starts = torch.tensor([[True, False, True, False]])
    A = train.ADVANTAGES["vine"](b, train.Config())
    assert torch.allclose(A, torch.tensor([[0.4, 0.4, 0.4, 0.4]]))
    b.reward = torch.tensor([-1.0])
    assert torch.allclose(train.ADVANTAGES["vine"](b, None), torch.tensor([[0.4, 0.4, -1.6, -1.6]]))


def test_train_segments_with_one_token_each_are_gae():
    """genac: where every token starts a segment its advantage is PPO's."""
    b = _hand_batch(torch.randn(3, 5).tolist(), [1.0, -1.0, 1.0])
    b.starts = b.mask
    A = train.ADVANTAGES["segments"](b, None)
    assert torch.allclose(A, train.ADVANTAGES["gae-0.95"](b, None))


def test_train_evpo_takes_the_critic_only_where_it_explains():
    """EV > 0: R − V(s_t). EV ≤ 0: the mean of the batch, or of the group where there is one."""
    R = [1.0, -1.0]
    good = _hand_batch([[0.5, 0.5], [-0.5, -0.5]], R)
    assert torch.allclose(train.evpo_advantage(good), torch.tensor([[0.5, 0.5], [-0.5, -0.5]]))
    bad = _hand_batch([[-0.5, -0.5], [0.5, 0.5]], R)
    assert torch.allclose(train.evpo_advantage(bad), torch.tensor([[1.0, 1.0], [-1.0, -1.0]]))
    group = _hand_batch([[-1.0]] * 2 + [[1.0]] * 2, [1.0, 1.0, 1.0, -1.0], prompt_id=[0, 0, 1, 1])
    assert train.evpo_advantage(group)[:, 0].tolist() == [0, 0, 1, -1]


def test_train_agreeing_states_have_no_advantage():
    """asyppo: the fifth of the states with the least disagreement has advantage 0, no other."""
    b = _hand_batch(torch.randn(2, 10).tolist(), [1.0, -1.0])
    b.value_std = torch.arange(1.0, 21.0).view(2, 10)
    A, whole = train.agreement_advantage(b), train.ADVANTAGES["gae-0.95"](b, None)
    assert (A[0, :4] == 0).all() and torch.equal(A.flatten()[4:], whole.flatten()[4:])


def test_train_two_critics_learn_from_disjoint_responses(base, monkeypatch):
    """asyppo: each critic sees every second response; V is their mean."""
    run = _run(base, monkeypatch, "--method", "asyppo", "--k", "4")
    train.prepare_critic(run)
    batch, V = _scored(run)
    assert len(V) == 2 and not torch.equal(V[0], V[1])  # heads drawn apart
    batch.value, found = train.VALUES["critics"](run, batch, V, None)
    assert torch.allclose(batch.value, V.mean(0)) and found["critic/disagreement"] > 0
    seen = []
    monkeypatch.setattr(train, "fit_critic", lambda run, critic, opt, b, rng: seen.append(b) or {})
    train.update_critic(run, batch, None)
    assert [len(b.reward) for b in seen] == [8, 8]
    assert all(b.prompt_id.bincount()[b.prompt_id].eq(2).all() for b in seen)  # half of each group


def test_train_tracker_is_read_before_the_batch_counts(base, monkeypatch):
    """spo: the first value of a prompt is even odds, its own outcome moves only the next one."""
    run = _run(base, monkeypatch, "--method", "spo")
    batch, V = _scored(run)
    value, _ = train.VALUES["tracker"](run, batch, V, None)
    assert (value == 0).all()  # 2 · ½ − 1
    again, _ = train.VALUES["tracker"](run, batch, V, None)
    S = batch.reward > 0
    assert torch.allclose(again[:, 0], torch.where(S, 1 / 3, -1 / 3))  # Beta(2, 1): p = 2/3
    assert (again[~batch.mask] == 0).all()


def test_train_monte_carlo_of_a_policy_without_chance(base, monkeypatch):
    """At temperature → 0 each continuation is the response itself: p is 0 or 1, its own outcome."""
    run = _run(base, monkeypatch, "--method", "vine-ppo", "--vine-k", "2", "--temperature", "1e-4")
    batch, V = _scored(run)
    value, found = train.VALUES["vine"](run, batch, V, train.generator(0, "train", 1))
    assert torch.equal(value, batch.mask * batch.reward[:, None])
    assert found["vine/continuations"] == 2 * int(batch.starts.sum())
    assert batch.starts[:, 0].all() and (batch.starts.sum(1) <= 16).all()


def test_train_vapo_adds_a_tenth_of_the_likelihood_of_right_responses(base, monkeypatch):
    """loss = clipped surrogate with ε 0.2/0.28 + 0.1 · NLL, which knows right responses alone."""
    run = _run(base, monkeypatch, "--method", "vapo", "--k", "4")
    batch, _ = _scored(run)
    batch.advantage, batch.keep = torch.randn(batch.mask.shape), batch.mask
    logp = (batch.logp_old + 0.3).requires_grad_()
    right = (batch.mask & (batch.reward > 0)[:, None]).sum()
    n = train.Counts(batch.mask.sum(), None, right)
    loss, stats = train.LOSSES["vapo"](logp, batch, n, run.cfg)
    clipped, _ = ppo_clip_loss(logp, batch.logp_old, batch.advantage, batch.mask, eps_high=0.28)
    nll = -logp[batch.mask & (batch.reward > 0)[:, None]].mean()
    assert torch.allclose(loss, clipped + 0.1 * nll) and stats["nll"][1] == right


def test_train_selection_by_a_critic_or_by_history(base, monkeypatch):
    """pcl: the candidates nearest V = 0. greso: a prompt with many uniform groups hardly comes."""
    run = _run(base, monkeypatch, "--selection", "pcl")
    ids, rng = torch.arange(40), train.generator(0, "train", 0)
    chosen, _ = train.select(run, ids, 10, rng)
    V = train.initial_values(run, ids).abs()
    assert set(chosen.tolist()) == set(V.argsort()[:10].tolist())
    run = _run(base, monkeypatch, "--method", "grpo-x", "--k", "4", "--selection", "greso")
    run.streak[20:40] = 50
    chosen, _ = train.select(run, ids, 10, rng)
    assert (chosen < 20).sum() >= 8 and len(set(chosen.tolist())) == 10


def test_train_gepo_is_one_where_sampler_and_trainer_agree(base, monkeypatch):
    """A group of equal probabilities has weight 1; off by default; with another method an error."""
    b = _hand_batch([[0.0]] * 4, [1.0, -1.0, 1.0, -1.0], prompt_id=[0, 0, 1, 1])
    cfg = train.Config(gepo=True)
    plain = train.ADVANTAGES["group"](b, train.Config())
    assert torch.allclose(train.ADVANTAGES["group"](b, cfg), plain)
    b.logp_old = b.logp_old + torch.tensor([[0.0], [1.0], [0.0], [0.0]])
    ratio = train.ADVANTAGES["group"](b, cfg) / plain
    assert torch.allclose(ratio[:, 0], torch.tensor([1, math.e, 1, 1]))
    with pytest.raises(ValueError, match="--gepo: expected a method with group advantages"):
        train.check(train.parse("--gepo --method s3ac".split())[0])


def test_train_initial_pool_has_one_policy(go):
    """--pretrain initial: as many trajectories as for coverage, all of the initial policy at 1."""
    temperatures = ("--pool-temperatures", "1.0,0.5")
    assert go("--steps 1 --out a --method vc-ppo", *temperatures) == 0
    assert go("--steps 1 --out b --method s3ac", *temperatures) == 0
    initial, coverage = (vp.TrajectoryPool.open(f"{x}/pool").index["policy"] for x in "ab")
    assert set(initial) == {0} and set(coverage) == {0, 1} and len(initial) == len(coverage) == 32
    assert go("--steps 1 --out c --method s3ac --pretrain none") == 0
    assert not os.path.exists("c/pool")


@pytest.mark.parametrize("flags", [
    "--method genac", "--method asyppo --k 4", "--method grpo-x --k 4 --selection greso",
    "--method spo"])
def test_train_every_state_of_a_method_is_resumed(go, base, flags):
    """Second critic, generative critic, streaks, tracker: one step and a resumed one are two."""
    flags += f" --critic {base}" if "genac" in flags else ""
    assert go("--steps 2 --out whole " + flags) == 0
    assert go("--steps 1 --out parts " + flags) == 0
    assert train.main("--resume parts --steps 2".split()) == 0
    whole, parts = _last_state("whole")[0], _last_state("parts")[0]
    assert _equal(whole, parts)
    for name, x in _last_state("whole")[1].items():
        assert x == _last_state("parts")[1][name], name


def test_train_generative_critic_without_words(go, base, monkeypatch):
    """genac: a critic that says nothing parsable stands at the running success rate, is counted,
    and five batches of that are the end, with a sentence."""
    seen = []
    describe = train.describe
    monkeypatch.setattr(train, "describe", lambda run, b, e: seen.append(b) or describe(run, b, e))
    assert go(f"--steps 1 --out r --method genac --critic {base}") == 0
    row, batch = _metrics("r")[1], seen[0]
    assert row["genac/unparsable"] == 1 and row["genac/states"] == int(batch.starts.sum())
    rate = (batch.reward > 0).float().mean()
    assert torch.allclose(batch.value, torch.where(batch.mask, 2 * rate - 1, 0.0))
    assert go(f"--steps 9 --out s --method genac --critic {base}") == 1
    assert train.checkpoints("s")


@pytest.mark.parametrize("flags, message", [
    ("--method asyppo --critic .", "two critics, separated by a comma"),
    ("--method genac", "--critic: expected the folder of a language model that gives scores"),
    ("--method rloo --k 1", "expected 2 or more for the groups of rloo"),
    ("--selection greso", "groups of s3ac with greso"),
    ("--method grpo --selection pcl", "no critic that could tell difficulty; found pcl"),
])
def test_train_method_errors(go, capsys, flags, message):
    """What does not fit a method is one sentence, before any model is loaded."""
    assert go("--steps 1 --out r " + flags) == 2
    assert message in capsys.readouterr().err


def test_train_comparison_runs_once_and_goes_on(go, monkeypatch, capsys):
    """A table over seeds, its JSON; a second start redoes nothing, a cut run is resumed."""
    class Done:
        exitcode = 0

    started = []

    def launch(flags, folder, name, workers):
        """The run in this process."""
        path = os.path.join(folder, name)
        how = ["--resume", path] if train.checkpoints(path) else [*flags, "--out", path]
        started.append(name)
        tiny = [] if "--resume" in how else TINY
        assert train.main([*tiny, *how]) == 0
        with open(path + ".log", "w") as file:
            file.write("done")
        return Done()

    monkeypatch.setattr(train, "launch", launch)
    monkeypatch.setattr(train, "COMPARISONS", {"single": ("--method s3ac", "--method reinforce++")})
    how = ("--compare single --seeds 2 --lrs 1e-3,1e-4 --steps 1 --rollout-batch 16").split()
    assert train.main(how) == 0
    said = capsys.readouterr().out
    with open("runs/compare/single.json") as file:
        found = json.load(file)
    row = found["arms"]["--method s3ac"]
    assert len(row["success"]) == 2 and row["lr"] in found["grid"] and row["paper"] == 80.9
    assert set(row["tuning"]) == {"1e-3", "1e-4"} and 0 <= row["medium"][0] <= 1
    assert f"| s3ac | {row['lr']} | {train.spread(row['success'])} |" in said
    assert len(started) == len(set(started)) == 3 + 4 + 2 + 4  # critics, grid, seeds
    os.remove("runs/compare/reinforce++-lr1e-3-s0/result.json")  # as if it had been cut
    assert train.main(how) == 0 and started[13:] == ["reinforce++-lr1e-3-s0"]


@pytest.mark.parametrize("flags, message", [
    ("--lrs 1e-4;2e-4", "--lrs: expected learning rates separated by commas"),
    ("--seeds 0", "--seeds: expected 1 or more, found 0"),
    ("--rollout-batch 0", "--rollout-batch: expected 1 or more, found 0")])
def test_train_comparison_errors(go, capsys, flags, message):
    """Before a run is started, one sentence."""
    assert train.main(["--compare", "single", *flags.split()]) == 2
    assert message in capsys.readouterr().err


def test_train_share_of_medium_prompts_by_hand(monkeypatch):
    """0.2 < p ≤ 0.8, p by number of steps in the batches around: one length at ½, one at 1."""
    problems = [rollout.Problem("3+7@a=", ""), rollout.Problem("3+7@b=", "")]
    monkeypatch.setattr(rollout, "task_problems", lambda: problems)
    step = {"prompts/sampled": [0, 0, 1, 1], "prompts/right": [1, 0, 1, 1],
            "prompts/trained": [0, 0, 1]}
    assert train.medium_share([step]) == pytest.approx(2 / 3)
    later = {"prompts/sampled": [1] * 2, "prompts/right": [0] * 2, "prompts/trained": [1]}
    assert train.medium_share([step, later], window=1) == 1.0  # now length b stands at ½ too


def test_train_stopped_run_has_a_result(tmp_path):
    """A run that ended by itself with status 1 counts, with its reason; any other end is an error.
    """
    os.makedirs(tmp_path / "a")
    (tmp_path / "a.log").write_text("step 3\nstopped: nothing to learn from\n")
    (tmp_path / "a" / "metrics.jsonl").write_text('{"step": 1, "rollout/success": 0.25}\n')
    train.settle(str(tmp_path), "a", 1)
    found = train.outcome(str(tmp_path / "a"))
    assert found["stopped"] == "stopped: nothing to learn from" and train.success(found) == 0.25
    with pytest.raises(RuntimeError, match="a ended with status 2"):
        train.settle(str(tmp_path), "a", 2)


def test_train_spread_by_hand():
    """Mean and sample standard deviation; one value has no spread."""
    assert train.spread([0.1, 0.3]) == "0.200 ± 0.141" and train.spread([0.25]) == "0.250"


@pytest.mark.parametrize("text, at", [
    ("a0b7c4", None), ("a0b8c4", 3), ("a1", 1), ("", None), ("aGb7", 1), ("a0b7cx", 5)])
def test_train_first_error(text, at):
    """`3+7@c=`: the place of the first digit that is not the chain's."""
    assert train.first_error("3+7@c=", text) == at


def test_train_best_of_n_by_hand(base, monkeypatch, capsys):
    """Two problems, two responses each: by last V both right, by least V one, pass@2 both."""
    run = _run(base, monkeypatch)
    run.cfg.verifier = "chain"
    tokens = torch.tensor(run.tokenizer(["a1", "a2", "b1", "b2"]).input_ids)
    b = _hand_batch([[0.1, 0.9], [0.2, 0.3], [0.0, 0.1], [0.4, 0.8]], [1.0, -1.0, -1.0, 1.0],
                    prompt_id=[0, 0, 1, 1])
    b.tokens = tokens
    found = train.best_of_n(run, b, 2)["2"]
    assert found == {"random": 0.5, "last V": 1.0, "least V": 0.5, "majority": 0.5, "pass@n": 1.0}


def test_train_shows_the_values_of_a_run(go, capsys):
    """--show-values: responses piece by piece, long failures, error to the truth, best of n."""
    assert go("--steps 1 --out r") == 0
    assert train.main("--show-values r".split()) == 0
    said = capsys.readouterr().out
    assert "V(s_t)" in said and "long failures" in said and "pass@n" in said
    with open("r/values.json") as file:
        found = json.load(file)
    assert set(found) == {"long failures", "truth", "best of n"} and found["best of n"]["16"]
    assert train.main("--show-values nowhere".split()) == 2


def test_train_plot_needs_matplotlib(go, monkeypatch, capsys):
    """--plot says which package is missing."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert train.main(["--plot"]) == 2 and "pip install matplotlib" in capsys.readouterr().err


# ------------------------------------------------------------------------------------ the project


def test_readme_lists_every_assumption():
    """The README's table has a row for each line marked as an assumption, file by file."""
    folder = Path(train.__file__).parent
    table = (folder / "README.md").read_text().split("## Assumptions")[1].split("\n## ")[0]
    for file in sorted(folder.glob("*.py")):
        marks = file.read_text().count("# assumption")
        if file.name != "test_all.py":
            assert table.count(f"| `{file.name}` |") == marks, file.name


def test_leaf_files_import_no_sibling():
    """A leaf can be copied alone into another project."""
    folder = Path(train.__file__).parent
    siblings = {file.stem for file in folder.glob("*.py")}
    for name in ("gae", "critic", "actor_loss", "daps", "rollout", "genac"):
        lines = (folder / f"{name}.py").read_text().splitlines()
        imported = {line.split()[1].split(".")[0] for line in lines
                    if line.startswith(("import ", "from "))}
        assert not imported & siblings, name
