"""Every equation by hand first, then as a theorem, then on the inputs that break such code.

    python -m pytest -q test_all.py            all, on a CPU; no network, fixed seeds
    python -m pytest -q test_all.py -k gae     one file's section

The kernels run in Triton's interpreter, and are compiled ahead of time for sm_80 and sm_90.
"""
import argparse
import ast
import contextlib
import copy
import dataclasses
import functools
import importlib
import inspect
import itertools
import json
import math
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if not torch.cuda.is_available():  # before anything imports triton, as transformers does
    os.environ.setdefault("TRITON_INTERPRET", "1")

from transformers import (
    AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM,
)

import actor_loss as al
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
    Critic, FiniteAdamW, ValueHead, clip_critic_grad_, explained_variance, grad_norms,
    init_value_head_, low_rank_, value_loss, value_step_,
)
from daps import (
    DAPS, accept, accept_prob, fuse, greso_accept_prob, mixed_groups, nearest_half, ramp,
    success_from_value, trials_from_spread, uniform_streak,
)
from figures import compare, critics, lab, noise, speed, values
from gae import adaptive_lambda, gae_loop, whiten
from genac import State
from rollout import (
    HARD, Batch, Problem, answer_reward, canonical, collect, concatenate, encode_prompt,
    extract_boxed, generate, load_problems, math_reward, math_verify_reward, number_reward,
    positions, response, same_answer, take, task_problems, task_tokenizer,
)


def _tiny(name="llama", **config):
    """A causal language model of any family: small, with weights that are the same every time."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **dict(
        vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, n_embd=32,
        num_key_value_heads=2, intermediate_size=48, max_position_embeddings=256, n_layer=2,
        eos_token_id=1, initializer_range=0.2, num_local_experts=4, n_head=4) | config)).eval()


# ---- gae.py --------------------------------------------------------------------------------------
_TIERS = ["loop", "torch"] + ["triton"] * (gae.triton is not None)
_NEEDS_TRITON = pytest.mark.skipif(gae.triton is None, reason="triton is not installed")
_named = lambda name, values: pytest.mark.parametrize(name, values, ids=lambda f: f.__name__)


def _copied_alone(function):
    """The function made from its source alone, beside nothing but torch, Tensor and math."""
    space = {"torch": torch, "Tensor": torch.Tensor, "math": math}
    exec(inspect.getsource(function), space)
    return space[function.__name__]


def _random(B, T, seed=0):
    """Three float64 normal draws [B, T], and a mask with gaps: row 0 is empty, row 1 full."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(B, T, generator=g) < 0.7
    mask[0], mask[1:2] = False, True
    return *torch.randn(3, B, T, generator=g, dtype=torch.float64), mask


def _gae_run(impl, *args, **kwargs):
    """gae by this implementation, on its device; the answer back on the CPU."""
    device = "cuda" if impl == "triton" and torch.cuda.is_available() else "cpu"
    move = lambda x: x.to(device) if isinstance(x, torch.Tensor) else x
    kwargs = {name: move(x) for name, x in kwargs.items()}
    return gae.gae(*map(move, args), **kwargs, impl=impl).cpu()


def _gae_case(T, dtype):
    """value (NaN where masked), reward [B, T], mask, λ per row (0, 1 too), bootstrap; strided."""
    value, reward, rest, mask = _random(4, T, seed=T)
    value, reward = torch.where(mask, value, torch.nan), torch.where(mask, reward, 0.0).to(dtype)
    value = torch.stack([value, torch.full_like(value, torch.nan)], 2).to(dtype)[:, :, 0]
    lam = torch.tensor([.5, .8, 0, 1], dtype=dtype if dtype == torch.float64 else torch.float32)
    return value, reward.t().contiguous().t(), mask.t().contiguous().t(), lam, rest.sum(1).to(dtype)


def _gae_definition(value, reward, mask, lam, gamma=1.0, bootstrap=torch.zeros(9)):
    """The two equations on floats, from right to left through the trainable tokens of each row."""
    out, wide, r = torch.zeros_like(value, dtype=torch.float64), reward.dim() == 2, reward.tolist()
    for b, V in enumerate(value.tolist()):
        t_next, V_next, A, weight = None, bootstrap[b].item(), 0.0, gamma * lam[b].item()
        for t in reversed(mask[b].nonzero().flatten().tolist()):
            r_t = r[b][t] if wide else r[b] * (t_next is None)       # R is on the last token
            A = r_t + gamma * V_next - V[t] + weight * A             # Â_t = δ_t + γλ Â_{t+1}
            out[b, t], t_next, V_next = A, t, V[t]
    return out


@pytest.mark.parametrize("impl", _TIERS)
def test_gae_by_hand(impl):
    """Small rows worked out by hand: NaN behind the end, a gap, λ per row, bootstrap, no token."""
    t, ones = torch.tensor, torch.ones(1, 3)
    near = lambda a, b: torch.testing.assert_close(a, t(b), atol=1e-6, rtol=1e-5)
    for bad in (100.0, torch.nan):
        near(_gae_run(impl, t([[0., 0, bad]]), t([[0., 1, 0]]), t([[1, 1, 0]]), .95), [[.95, 1, 0]])
    gap = t([[.2, 9, -9, .4, .6]])
    near(_gae_run(impl, gap, t([1.]), t([[1, 0, 0, 1, 1]]), .95), [[.751, 0, 0, .58, .4]])
    rows = _gae_run(impl, t([[.5, .5, .5], [.2, -.2, 7]]), t([1., -1]), t([[1., 1, 1], [1, 1, 0]]),
                    gae.adaptive_lambda(t([3, 2])))
    near(rows[1], [-.933333, -.8, 0])
    cut = t([[.1, .2, .3]])
    for r in (t([0.]), torch.zeros(1, 3)):
        near(_gae_run(impl, cut, r, ones, .9, bootstrap=t([.5])), [[.352, .28, .2]])
    near(_gae_run(impl, cut, t([0.]), ones, .9), [[-.053, -.17, -.3]])
    for x in (torch.ones(2, 0), torch.ones(0, 5)):
        assert _gae_run(impl, x, torch.ones(len(x)), x, 0.9).shape == x.shape


@_named("function", [gae.adaptive_lambda, _copied_alone(gae.adaptive_lambda)])
def test_gae_adaptive_lambda(function):
    """λ = 1 − 1/(αT): 0 for T = 0, never negative, below 1 even where float32 would round to 1."""
    lam = function(torch.tensor([0, 1, 2, 10]))
    torch.testing.assert_close(lam, torch.tensor([0, 1 / 3, 2 / 3, 14 / 15]))
    assert function(torch.tensor([10]), alpha=0.05) == 0
    assert 0.9999 < function(torch.tensor([10**9])) < 1
    assert function(torch.tensor([3.0]).double()).dtype == torch.float64


@pytest.mark.parametrize("impl", _TIERS)
@pytest.mark.parametrize("dtype, T, split", [
    *((torch.float64, T, None) for T in (1, 2, 31, 64, 65)),
    *((torch.float64, 150, split) for split in ((1, 160), (3, 64), (5, 32))),
    (torch.float32, 150, None), (torch.bfloat16, 150, None), (torch.float16, 150, None)])
def test_gae_is_its_definition(impl, dtype, T, split, monkeypatch):
    """For any T, mask, dtype, strides, λ, γ, bootstrap and programs: the equations on floats."""
    monkeypatch.setattr(gae, "BLOCK", 32)
    if split:
        monkeypatch.setattr(gae, "_split", lambda *_: split)
    value, reward, mask, lam, boot = _gae_case(T, dtype)
    R, lengths = torch.tensor([torch.nan, 1, -1, 1], dtype=dtype), torch.tensor([0, 1, T - 1, T])
    prefix = torch.arange(T) < lengths[:, None]
    filled = torch.where(prefix, value.nan_to_num(0.3), torch.nan)
    for V, r, m, given, gamma in ((value, reward, mask, mask, .97), (value, R, mask, mask, 1),
                                  (filled, R, prefix, lengths, 1)):
        want = _gae_definition(V, r, m, lam, gamma, boot)
        got = _gae_run(impl, V, r, given, lam, gamma=gamma, bootstrap=boot)
        tolerance = (1e-12, 1e-10) if dtype == torch.float64 else (1e-4, 1e-5)  # measured: 2e-6
        torch.testing.assert_close(got.double(), want, atol=tolerance[0], rtol=tolerance[1])
        assert got.dtype == lam.dtype and got.is_contiguous()


@pytest.mark.parametrize("T, lam", [(8192, 0.95), (32768, 1 - 1 / (1.5 * 32768))])
def test_gae_long_rows(T, lam):
    """λᵀ that is 0 in float32, and λ near 1: right, also at a lower matmul precision, autocast."""
    value, ones = torch.randn(1, T, generator=torch.Generator().manual_seed(1)), torch.ones(1, T)
    want = _gae_definition(value, ones[:, 0], ones, torch.tensor([lam]))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    with torch.autocast("cpu", torch.bfloat16):
        got = gae.gae(value, ones[:, 0], ones, lam).double()
    torch.set_float32_matmul_precision(before)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


# how to call an advantage f with reward r [5] or [5, 7], a number x for each token, and mask m
_IDS, _STEPS = torch.tensor([3, 3, 3, 5, 3]), torch.arange(7).expand(5, 7) // 2
_ADVANTAGES = {
    gae.gae: lambda f, r, x, m: f(x, r, m, 0.9, gamma=0.97),
    gae.gae_loop: lambda f, r, x, m: f(x, r, m, 0.9, gamma=0.97),
    gae.batch_advantage: lambda f, r, x, m: f(r, m),
    gae.vine_advantage: lambda f, r, x, m: f(
        _STEPS[:, :4].to(x.dtype), torch.where(m != 0, _STEPS[:, :m.shape[1]], -9), r, m),
    gae.group_advantage: lambda f, r, x, m: f(r, _IDS, m),
    gae.leave_one_out_advantage: lambda f, r, x, m: f(r, _IDS, m),
    gae.flash_reinforce_advantage: lambda f, r, x, m: f(r, m),
    gae.whiten: lambda f, r, x, m: f(x, m)}
_PER_TOKEN = list(_ADVANTAGES)[:4]  # these take a reward [B, T], too


@_named("function", _ADVANTAGES)
def test_gae_laws_of_every_advantage(function):
    """Masked slots reach nothing; no gradient; float32 or more; padding is nothing; copies work."""
    call = lambda r, x, m, f=function: _ADVANTAGES[function](f, r, x, m)
    x, _, _, mask = _random(5, 7)
    reward, wide = torch.tensor([torch.nan, 1, -1, 1, .5]).double(), torch.where(mask, x, 0)
    alone = function if function is gae.gae else _copied_alone(function)
    want = call(reward, x, mask)
    assert want.dtype == torch.float64 and want[mask].any() and not want[~mask].any()
    assert torch.equal(call(reward, x, mask, alone), want)
    for bad, dtype in ((torch.nan, torch.float32), (torch.inf, torch.uint8), (1e9, torch.int64)):
        assert torch.equal(call(reward, torch.where(mask, x, bad), mask.to(dtype)), want)
    assert not call(reward.clone().requires_grad_(), x.clone().requires_grad_(), mask).requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            r, y = reward.to(dtype), x.to(dtype)
            assert call(r, y, mask).dtype == torch.float32
            torch.testing.assert_close(call(r, y, mask), call(r.double(), y.double(), mask).float(),
                                       atol=1e-4, rtol=1e-4)
    short = call(reward, x[:, :5], mask[:, :5])
    padded = call(reward, x, mask & (torch.arange(7) < 5))
    torch.testing.assert_close(padded, nn.functional.pad(short, (0, 2)), atol=1e-12, rtol=0)
    none = call(torch.full_like(reward, torch.nan), x, torch.zeros_like(mask))
    assert torch.equal(none, torch.zeros_like(none))
    for bad in (torch.nan, 1.0, -1.0) if function in _PER_TOKEN else ():
        assert torch.equal(call(wide, x, mask, alone), call(wide, x, mask))
        with pytest.raises(ValueError, match="^reward: expected 0 on masked slots"):
            call(torch.where(mask, x, bad), x, mask)


def test_gae_advantages_without_a_critic_by_hand():
    """Group, leave-one-out, batch, Flash and whitened advantages; exactly 0 where all is equal."""
    reward = torch.tensor([1., -1, 1, 1, .1, .1, .1, torch.nan])
    group, mask = torch.tensor([7, 7, 7, 3, 9, 9, 9, 7]), torch.ones(8, 2)
    mask[7] = mask[0, 1] = 0  # a row without a token is in no group
    std = torch.tensor([1., -1, 1]).std() + 1e-6
    centred = torch.tensor([[2 / 3, 0], [-4 / 3, -4 / 3], [2 / 3, 2 / 3]])
    for a, want in ((gae.group_advantage(reward, group, mask), centred / std),
                    (gae.group_advantage(reward, group, mask, divide_std=False), centred),
                    (gae.leave_one_out_advantage(reward, group, mask), 1.5 * centred)):
        torch.testing.assert_close(a[:3], want)
        assert not a[3:].any()
    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]])
    R, returns = torch.tensor([[.5, .5, 0], [2, 0, -3], [0, 0, 0]]), torch.tensor([1, .5, -1, -3])
    x = torch.zeros(3, 3).masked_scatter(mask > 0, returns)
    for a in (gae.batch_advantage(R, mask), gae.whiten(x, mask)):
        torch.testing.assert_close(a[mask > 0], (returns - returns.mean()) / returns.std())
    three = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    flash = gae.flash_reinforce_advantage(torch.tensor([1., 0, torch.nan]), three)
    assert torch.equal(flash, three * torch.tensor([[.5], [-.5], [0]]))
    for few in (torch.tensor([[0, 1, 0]]), torch.ones(1, 3), torch.ones(1, 3001)):
        x = torch.full(few.shape, .1)
        for a in (gae.whiten(x, few), gae.batch_advantage(x[:, 0], few),
                  gae.flash_reinforce_advantage(x[:, 0], few)):
            assert torch.equal(a, torch.zeros_like(x))


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


def test_gae_vine():
    """V(next step) − V(step), R − V on the last; with one token per step it is GAE of λ = 0."""
    value = torch.tensor([[.1, .5, .3], [.2, torch.nan, .6]])
    step = torch.tensor([[0, 0, 1, 2, -5], [0, 1, 1, 2, 2]])
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 0, 0, 1, 1]])
    a = gae.vine_advantage(value, step, torch.tensor([1., -1]), mask)
    torch.testing.assert_close(a, torch.tensor([[.4, .4, -.2, .7, 0], [.4, 0, 0, -1.6, -1.6]]))
    value, R, mask = torch.rand(2, 6), torch.tensor([1., -1]), torch.ones(2, 6)
    a = gae.vine_advantage(value, torch.arange(6).expand(2, 6), R, mask)
    torch.testing.assert_close(a, gae.gae_loop(value, R, mask, 0.0))


_M, _I, _GAP = torch.ones(2, 3), torch.zeros(2).long(), torch.tensor([[1, 1, 1], [1, 1, 0]])
_GOOD = {"value": _M, "reward": _M[:, 0], "mask": _GAP, "lam": .9}


@pytest.mark.parametrize("name, function, arguments", [
    *((name, functools.partial(gae.gae, **_GOOD | {"impl": impl, name: x}), ()) for name, x in (
        ("value", _M[0]), ("value", _GAP), ("reward", _M[:1, 0]), ("reward", _GAP * torch.nan),
        ("mask", torch.ones(2, 4)), ("mask", torch.tensor([1, 4])), ("mask", _I == 0),
        ("lam", 1.1), ("lam", torch.tensor([.5, -.1])), ("lam", torch.nan), ("lam", torch.ones(3)),
        ("gamma", 2.), ("bootstrap", torch.ones(3)), ("impl", "fast")) for impl in _TIERS[:2]),
    ("alpha", gae.adaptive_lambda, (_I, 0)), ("lengths", gae.adaptive_lambda, (_I - 1,)),
    ("mask", gae.gae_loop, (_M, _I, _M[:1], .9)), ("mask", gae.whiten, (_M, _M[:1])),
    ("lam", gae.gae_loop, (_M, _I, _M, torch.ones(3))),
    ("reward, prompt_id", gae.group_advantage, (_I, _I[:1], _M)),
    ("reward, prompt_id", gae.leave_one_out_advantage, (_M, _I, _M)),
    ("reward", gae.batch_advantage, (torch.ones(3, 3), _M)),
    ("reward", gae.flash_reinforce_advantage, (_M, _M)),
    ("step_id", gae.vine_advantage, (_M, _GAP + 2, _I, _M)),
    ("step_value", gae.vine_advantage, (_M[:1], _GAP, _I, _M))])
def test_gae_refuses(name, function, arguments):
    """A wrong shape, range or name is one sentence that names the argument."""
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        function(*arguments)


_COMPILE = """
import importlib, json, sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
for module, name, types, constants, warps in json.load(sys.stdin):
    kernel = getattr(importlib.import_module(module), name)
    constants = {k: v for k, v in constants.items() if k in kernel.arg_names}
    types = {k: "constexpr" if k in constants else types.get(k, "i32") for k in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, (k, t) in enumerate(types.items())
               if t[0] == "*" or k in "NVH"}
    for arch in (80, 90):
        triton.compile(ASTSource(kernel, types, constexprs=constants, attrs=aligned),
                       target=GPUTarget("cuda", arch, 32), options={"num_warps": warps})
"""


@_NEEDS_TRITON
def test_gae_and_actor_loss_kernels_compile_without_spills(tmp_path):
    """All compile for sm_80 and sm_90: no spill, few registers, 99 KiB of shared memory."""
    flags = {"BLOCK": gae.BLOCK, "CHUNKS": 32, "value_t": 1, "reward_t": 1, "mask_t": 1}
    types = {"row_ptr": "*fp32", "count_ptr": "*i32", "total_ptr": "*fp32", "advantage": "*fp32",
             "tokens": "*i64", "parts": "*fp32", "lse": "*fp32", "grad": "*fp32",
             "temperature": "fp32"}
    jobs = [("gae", kernel, types | {"value": v, "reward": v, "mask": m},
             flags | {"REWARD": m == "*u8", "MASK": m == "*u8"}, 4)
            for kernel in ("_chunk_kernel", "_gae_kernel")
            for v, m in (("*fp32", "*u8"), ("*bf16", "*i64"))]
    for name, dtype in (("*bf16", torch.bfloat16), ("*fp32", torch.float32)):
        blocks = al._launch(dtype, 4096, 49152)[1]
        jobs += [("actor_loss", kernel, types | dict.fromkeys(("hidden", "weight", "out"), name),
                  blocks, blocks["num_warps"])
                 for kernel in ("_logsumexp_kernel", "_logit_grad_kernel")]
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(Path(gae.__file__).parent), "TRITON_CACHE_DIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", _COMPILE], env=env, text=True, capture_output=True,
                         input=json.dumps(jobs))
    assert run.returncode == 0, run.stderr[-2000:]
    tool = Path(gae.triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    built = [*tmp_path.rglob("*.cubin")]
    assert len(built) == 2 * len(jobs)
    for cubin in built:
        text = subprocess.check_output([tool, "-res-usage", cubin], text=True)
        registers, *spilled = map(int, re.findall(r"(?:REG|STACK|LOCAL):(\d+)", text))
        limit = 128 if cubin.stem in ("_chunk_kernel", "_gae_kernel") else 255
        assert spilled == [0, 0] and 0 < registers <= limit, text
        assert json.loads(cubin.with_suffix(".json").read_text())["shared"] <= 99 * 1024


# ---- critic.py -----------------------------------------------------------------------------------
def _tiny_model(auto=AutoModel, family="llama", **config):
    """A random model, the same on each call: 2 layers, 2 heads, hidden size 16, 32 tokens."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                 num_key_value_heads=2, vocab_size=32)
    return auto.from_config(AutoConfig.for_model(family, **sizes | config))


def _tiny_critic(dtype=torch.float64, std=None, **config):
    critic = Critic(_tiny_model(**config).to(dtype))
    init_value_head_(critic.head, std)
    return critic


def test_critic_value_loss_by_hand():
    """½ mean of [1,1,1,1,9] is 1.3 in one call and in two; a V past c toward R has no gradient."""
    value, R, mask = torch.tensor([[1., 1, 1, 1], [3, 0, 0, 0]]), torch.zeros(2), torch.ones(2, 4)
    mask[1, 1:] = 0
    halves = [value_loss(value[i:i + 1], R[i:i + 1], mask[i:i + 1], 5)[0] for i in (0, 1)]
    assert value_loss(value, R, mask)[0].item() == pytest.approx(1.3) == sum(halves).item()
    value = torch.tensor([[1.], [5.]], dtype=torch.float64, requires_grad=True)
    loss, stats = value_loss(value, torch.full((2,), 10.), torch.ones(2, 1), 1,
                             old_value=value.detach().flip(0), clip=.2)
    assert loss.item() == pytest.approx(40.5 + 38.72) and stats["clip_share"][0] == 1
    assert torch.autograd.grad(loss, value)[0].flatten().tolist() == [-9, 0]


def test_critic_value_loss_and_explained_variance():
    """From R [B] or [B, T]: ½ mean square and 1 − Var(R − V)/Var(R) over kept tokens."""
    value, old, _, mask = _random(50, 7)
    R = (torch.arange(50) % 2 * 2. - 1).double()
    rows = R[:, None].expand(50, 7)
    v, r = value[mask], rows[mask]
    square = (r - v).square().mean().item() / 2
    ev = 1 - ((r - v).var(correction=0) / r.var(correction=0)).item()
    for target in (R.masked_fill(~mask.any(1), math.nan), rows.masked_fill(~mask, math.nan)):
        for how in ({}, {"old_value": old, "clip": None}, {"old_value": value}):
            loss, stats = value_loss(value, target, mask, **how)
            assert loss.item() == pytest.approx(square, abs=1e-14) and stats == {
                "loss": (pytest.approx(square * len(v)), len(v)), "clip_share": (0, len(v))}
        for f in (explained_variance, _copied_alone(explained_variance)):
            assert f(value, target, mask) == pytest.approx(ev, abs=1e-12)
            assert math.isnan(f(value, target, 0 * mask)) and math.isnan(f(value, 0 * R, mask))
    for none in ((value[:0], R[:0], mask[:0]), (value[:, :0], R, mask[:, :0])):
        assert value_loss(*none)[0] == 0 and math.isnan(explained_variance(*none))


@pytest.mark.parametrize("parts, split", [(1, False), (2, False), (4, True)])
def test_critic_value_step_adds_up(parts, split):
    """A step over parts of any size and width is clipped AdamW on the loss of the whole."""
    tokens = torch.randint(32, (6, 9), generator=torch.Generator().manual_seed(1))
    length, R = torch.tensor([9, 3, 8, 1, 5, 2]), torch.tensor([1., -1, -1, 1, -1, 1])
    mask, old = torch.arange(9) < length[:, None], torch.full((6, 9), .2, dtype=torch.float64)
    plain, critic = _tiny_critic(std=.5), _tiny_critic(std=.5)

    def cut():
        for rows in torch.arange(6).tensor_split(parts)[::-1]:
            m = mask[rows, :length[rows].max()]
            yield critic(tokens[rows, :m.shape[1]], m), R[rows], m, old[rows, :m.shape[1]]

    loss, stats = value_loss(plain(tokens, mask), R, mask, old_value=old, clip=.1)
    (2 * loss).backward()
    norms = clip_critic_grad_(plain, .3, split=split) | {"clipped": True, "skipped": False}
    torch.optim.AdamW(plain.parameters(), 1e-2, weight_decay=.01, fused=True).step()
    got, got_norms = value_step_(critic, FiniteAdamW(critic, 1e-2), cut(), mask.sum(), clip=.1,
                                 max_norm=.3, split=split, world=2)
    torch.testing.assert_close(critic.state_dict(), plain.state_dict(), rtol=0, atol=1e-5)
    torch.testing.assert_close(got, stats)
    assert got_norms == pytest.approx(norms) and all(p.grad is None for p in critic.parameters())
    still = FiniteAdamW(critic, 0.)
    loose = value_step_(critic, still, cut(), 1, max_norm=1e9, split=split)[1]
    between = (max(loose["head"], loose["backbone"]) + loose["total"]) / 2
    tight = value_step_(critic, still, cut(), 1, max_norm=between, split=split)[1]
    assert not loose["clipped"] and tight["clipped"] is not split


def test_critic_finite_adamw():
    """An inf or NaN changes no weight, clears the gradient, counts; the fifth in a row raises."""
    (layer := nn.Linear(1, 1)).bias.requires_grad_(False)
    optimizer, nan, inf = FiniteAdamW(layer, 1e-2, name="actor"), math.nan, math.inf
    assert optimizer.param_groups[0]["params"] == [layer.weight]
    for norm, in_a_row in ((nan, 1), (inf, 2), (5., 0), (nan, 1), (inf, 2), (nan, 3), (nan, 4)):
        before, layer.weight.grad = layer.weight.item(), torch.ones(1, 1)
        assert optimizer.step_if_finite(norm) is (in_a_row == 0) is (layer.weight.item() != before)
        assert optimizer.in_a_row == in_a_row and layer.weight.grad is None
    with pytest.raises(FloatingPointError, match="the actor's gradient was not finite 5 times"):
        optimizer.step_if_finite(nan)
    assert optimizer.skipped == 7


def test_critic_head():
    """w ~ N(0, 1/(H + 1)), ∇_w = Σ e_t h_t, ∇_h = e_t w; V is hᵀw in float32 also under bf16."""
    for std, scale in ((None, 1 / 7), (.3, .3)):
        for init in (init_value_head_, _copied_alone(init_value_head_)):
            head = ValueHead(6, 1, dtype=torch.float64)
            torch.manual_seed(0), init(head, std), torch.manual_seed(0)
            torch.testing.assert_close(head.weight, scale * torch.randn(1, 6, dtype=torch.float64))
            assert not head.bias.any()
    h, R = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True), torch.tensor([1., -1])
    value = head(h)[..., 0]
    value_loss(value, R, torch.ones(2, 5))[0].backward()
    e = (value - R[:, None]).detach() / 10
    torch.testing.assert_close(head.weight.grad[0], torch.einsum("bt,bth->h", e, h.detach()))
    torch.testing.assert_close(h.grad, e[..., None] * head.weight.detach()[0])
    tokens, attention, full = torch.arange(10).view(2, 5), torch.ones(2, 5), torch.float32
    late = _tiny_critic(full).half()  # not even rounded on the way
    assert torch.equal(late.head.weight, _tiny_critic(full).head.weight)
    for dtype, context in ((torch.bfloat16, False), (full, True)):
        critic = _tiny_critic(dtype, std=1.)
        with torch.autocast("cpu", torch.bfloat16, enabled=context):
            hidden, value = critic.backbone(tokens).last_hidden_state, critic(tokens, attention)
        assert value.dtype == full
        torch.testing.assert_close(value, hidden.float() @ critic.head.weight[0], rtol=0, atol=1e-5)
    assert _tiny_critic(full).double()(tokens, attention).dtype == torch.float64


def test_critic_sees_the_past_and_no_padding():
    """V is causal, ignores padding on either side and is 0 there; positions start at 0."""
    critic = _tiny_critic(std=1.)
    alone = critic(torch.tensor([[5, 2, 6, 7]]), torch.ones(1, 4))
    tokens = torch.tensor([[2, 2, 5, 2, 6, 7, 2], [9, 8, 7, 6, 5, 4, 3]])
    attention = torch.tensor([[0, 0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1]]).bool()
    value = critic(tokens, attention)
    torch.testing.assert_close(value[0, 2:6], alone[0], rtol=0, atol=1e-12)
    assert (value[~attention] == 0).all()
    later = critic(tokens.index_fill(1, torch.tensor([5]), 30), attention)
    torch.testing.assert_close(later[:, :5], value[:, :5], rtol=0, atol=1e-12)
    seen, hidden = {}, SimpleNamespace(last_hidden_state=torch.zeros(2, 7, 16))
    critic.backbone.forward = lambda **inputs: seen.update(inputs) or hidden
    critic(tokens, attention)
    assert seen["position_ids"].tolist() == [[0, 0, 0, 1, 2, 3, 3], [0, 1, 2, 3, 4, 5, 6]]
    assert torch.equal(seen["attention_mask"], attention.long()) and seen["use_cache"] is False


def test_critic_from_a_language_model_and_back(tmp_path, monkeypatch):
    """An LM's folder gives its backbone; a critic's own comes back, and outlives a killed save."""
    lm, path = _tiny_model(AutoModelForCausalLM), str(tmp_path / "critic")
    lm.save_pretrained(tmp_path / "lm")
    tokens, attention = torch.arange(8).view(2, 4), torch.ones(2, 4)
    critic, half = (Critic.from_pretrained(str(tmp_path / "lm"), dtype=dtype)
                    for dtype in (torch.float32, torch.bfloat16))
    assert half.backbone.dtype == torch.bfloat16 and half.head.weight.dtype == torch.float32
    torch.testing.assert_close(critic.backbone(tokens)[0], lm.model(tokens)[0])
    critic.save_pretrained(path)
    (tmp_path / "critic" / "tokenizer.json").write_text("{}")
    state = {name: 0 * x for name, x in critic.state_dict().items()}
    with monkeypatch.context() as patch, pytest.raises(StopIteration):
        patch.setattr(critic_file.os, "replace", lambda *_: next(iter([])))  # written, not renamed
        critic.save_pretrained(path, state)
    assert torch.equal(Critic.from_pretrained(path)(tokens, attention), critic(tokens, attention))
    critic.save_pretrained(path, state)  # over the old one, leaving what is not the critic's
    assert (Critic.from_pretrained(path)(tokens, attention) == 0).all()
    assert "tokenizer.json" in os.listdir(path) and ".saving" not in str(os.listdir(path))
    torch.save({"weight": torch.zeros(1, 9)}, os.path.join(path, critic_file.HEAD_FILE))
    with pytest.raises(ValueError, match=r"\(1, 16\), found \(1, 9\)"):
        Critic.from_pretrained(path)


@pytest.mark.parametrize("split, max_norm, head, backbone", [
    (False, 9, 3, 4), (True, 9, 3, 4), (False, 1, .6, .8), (True, 1, 1, 1), (True, 3.5, 3, 3.5)])
def test_critic_clipping(split, max_norm, head, backbone):
    """Head 3, backbone 4: total 5, share 9/25; one factor or, split, two; inf scales nothing."""
    for bad in (None, math.inf, math.nan):
        critic = _tiny_critic(torch.float32)
        critic.head.weight.grad = head_grad = torch.full((1, 16), 3 / 4)
        grad = critic.backbone.norm.weight.grad = torch.ones(16)
        head_grad[0, 3] = bad or 3 / 4
        before, factors = head_grad.clone(), (1 if bad else head / 3, backbone / 4)
        norms = clip_critic_grad_(critic, max_norm, split=split)
        want = {"head": 3, "backbone": 4, "total": 5, "head_share": .36}
        assert not math.isfinite(norms["total"]) if bad else norms == pytest.approx(want)
        torch.testing.assert_close(head_grad, factors[0] * before, equal_nan=True)
        assert bad and not split or torch.equal(grad, torch.full((16,), factors[1]))
    none, half = grad_norms(_tiny_critic()), _tiny_critic(torch.float16)  # no overflow at 65504
    assert [*none.values()][:3] == [0, 0, 0] and math.isnan(none["head_share"])
    next(half.backbone.parameters()).grad = torch.full((32, 16), 4096.).half()
    assert grad_norms(half)["backbone"] == pytest.approx(4096 * math.sqrt(512), rel=1e-5)


def test_critic_norms_of_sharded_gradients():
    """Under FSDP2 with a bf16 policy the head stays float32, and norms are the plain ones."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    def norms(critic):
        value = critic(torch.arange(12).view(2, 6), torch.ones(2, 6))
        value_loss(value, torch.tensor([1., -1]), torch.ones(2, 6))[0].backward()
        return [clip_critic_grad_(critic, .01), grad_norms(critic), value.dtype == torch.float32]

    plain, critic = norms(_tiny_critic(torch.float32, std=.5)), _tiny_critic(torch.float32, std=.5)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(critic.head)
        fully_shard(critic, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        assert all(got == pytest.approx(want, rel=.1) for got, want in zip(norms(critic), plain))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("call, change, says", [
    *((value_loss, {name: x}, says) for name, x, says in (
        ("mask", torch.ones(2, 4), "2, 4"), ("value", torch.ones(3), r"\[\(3,\)"),
        ("target", torch.ones(3), r"\(3,\)"), ("target", torch.ones(2, 1), r"\(2, 1\)"),
        ("old_value", torch.ones(2, 1), r"\(2, 1\)"), ("clip", 0., "clip"), ("clip", -1., "clip"))),
    *((explained_variance, {name: x}, "expected") for name, x in (
        ("mask", torch.ones(2, 4)), ("value", torch.ones(3)), ("target", torch.ones(2, 1)))),
    *((clip_critic_grad_, {"max_norm": bad}, "max_norm: expected") for bad in (0., -1., math.nan)),
    (Critic.forward, {"tokens": torch.ones(2, 3), "attention": torch.ones(2, 4)}, r"\(2, 4\)")])
def test_critic_refuses(call, change, says):
    """A wrong shape, width or limit is one sentence, not a broadcast."""
    case = {"value": torch.ones(2, 3), "target": torch.ones(2), "mask": torch.ones(2, 3)}
    args = [] if call in (value_loss, explained_variance) else [_tiny_critic()]
    with pytest.raises(ValueError, match=says):
        call(*args, **(change if args else case | change))


def test_critic_low_rank(tmp_path):
    """W + B A starts at W; only A, B and the head learn; what is saved is W + B A."""
    critic, tokens = _tiny_critic(torch.float32), torch.randint(32, (2, 5))
    before, n = critic(tokens, tokens >= 0), len(list(critic.parameters()))
    low_rank_(critic, 3)
    assert torch.equal(critic(tokens, tokens >= 0), before)
    learn = [name for name, p in critic.named_parameters() if p.requires_grad]
    assert all(name.endswith((".A", ".B", "head.weight")) for name in learn) and len(learn) > n / 2
    opt = FiniteAdamW(critic, 0.1)
    for _ in range(2):  # B first, then A too
        value_loss(critic(tokens, tokens >= 0), torch.ones(2), tokens >= 0)[0].backward()
        assert opt.step_if_finite(1.0)
    after = critic(tokens, tokens >= 0)
    critic.save_pretrained(str(tmp_path))
    again = Critic.from_pretrained(str(tmp_path))(tokens, tokens >= 0)
    assert torch.allclose(again, after, atol=1e-5) and (after - before).abs().max() > 1e-2


# ---- actor_loss.py -------------------------------------------------------------------------------
_TOKEN_LOSSES = [cispo_loss, ppo_clip_loss, dis_loss]
_BY_RESPONSE = [grpo_loss, flash_reinforce_loss, genac.reinforce_loss]


def _actor_case(scale=0.3):
    """logp (leaf), logp_old, advantage, keep [5, 40] in float64; row 0 empty, gaps in others."""
    step, old, advantage, keep = _random(5, 40, seed=5)
    old = -old.abs() - 0.5
    return (old + scale * step).clamp(max=-0.1).requires_grad_(), old, advantage, keep


def _call(loss, logp, old, advantage, keep, n=None):
    """The loss with what it takes; `row` is one number per response, NaN where no token is kept."""
    row = torch.where(keep != 0, advantage, 0).double().sum(-1)
    row = torch.where((keep != 0).any(-1), row, torch.nan)
    calls = {"nll_loss": lambda: loss(logp, row, keep, n),
             "sft_loss": lambda: loss(logp, keep, n),
             "reinforce_loss": lambda: loss(logp, row, keep, n),
             "value_loss": lambda: loss(logp, advantage, keep, n, old_value=old, clip=.3),
             "flash_reinforce_loss": lambda: loss(logp, old, advantage, keep, n, delta=.125)}
    return calls.get(loss.__name__, lambda: loss(logp, old, advantage, keep, n))()


def _grad(loss, logp):
    return torch.autograd.grad(loss, logp)[0]


def _bernoulli_kl(p, q):
    return (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).mean()


# Each loss as its paper writes it, for the kept tokens of one response: log π p, log π_old q, Â A,
# the ratio r = π/π_old; `row` is A.sum(). Summed over responses and divided by the loss's count.
_ppo = lambda r, A: -torch.minimum(r * A, r.clamp(.8, 1.2) * A)
_FORMULAS = {
    cispo_loss: lambda p, q, A, r: -(r.clamp(.8, 1.28) * A).detach() @ p,
    ppo_clip_loss: lambda p, q, A, r: _ppo(r, A).sum(),
    dis_loss: lambda p, q, A, r: -torch.where((.7 < r) & (r < 6), r * A, 0).detach() @ p,
    grpo_loss: lambda p, q, A, r: _ppo(r, A).mean(),
    flash_reinforce_loss: lambda p, q, A, r: -((r * A).detach() * p).mean() * (
        _bernoulli_kl(q.exp(), p.exp()) <= .125),
    nll_loss: lambda p, q, A, r: -p.sum() * (A.sum() > 0),
    genac.sft_loss: lambda p, q, A, r: -p.sum(),
    genac.reinforce_loss: lambda p, q, A, r: -p.sum() * A.sum(),
    value_loss: lambda p, q, A, r: torch.maximum(
        (p - A).square(), (q + (p - q).clamp(-.3, .3) - A).square()).sum() / 2}
_every_loss = pytest.mark.parametrize(  # `-k critic` and `-k genac` select theirs, too
    "loss", _FORMULAS, ids=lambda f: f"{f.__module__}.{f.__name__}")


@_every_loss
def test_actor_loss_is_its_formula(loss):
    """In micro-batches, with any junk in masked slots: the paper's loss and its gradient."""
    logp, old, advantage, keep = case = _actor_case(scale=.7)
    rows = [(p[m], q[m], A[m]) for p, q, A, m in zip(*case) if m.any()]
    n = len(rows) if loss in _BY_RESPONSE else int(keep.sum())
    n = sum(len(A) for _, _, A in rows if A.sum() > 0) if loss is nll_loss else n
    want = sum(_FORMULAS[loss](p, q, A, (p - q).exp()) for p, q, A in rows) / n
    grad, (whole, stats) = _grad(want, logp), _call(loss, *case)
    torch.testing.assert_close(whole, want, atol=1e-12, rtol=0)
    assert [*stats.values()][0] == (pytest.approx(n * want.item()), n)  # of the loss
    for bad, dtype, cuts in ((math.nan, torch.bool, [5]), (math.inf, torch.int64, [2, 3]),
                             (-math.inf, torch.float32, [3, 2]), (1e9, torch.uint8, [1] * 5)):
        junk = [nn.functional.pad(torch.where(keep, x, bad).detach(), (0, 3), value=bad)
                for x in (logp, old, advantage)]
        wide = nn.functional.pad(keep, (0, 3)).to(dtype)
        parts = [_call(loss, *part, n) for part in zip(
            *(x.split(cuts) for x in (junk[0].requires_grad_(), *junk[1:], wide)))]
        total = sum(part for part, _ in parts)
        torch.testing.assert_close(total, want, atol=1e-12, rtol=0)
        torch.testing.assert_close(_grad(total, junk[0]), nn.functional.pad(grad, (0, 3)))
        for name, pair in stats.items():
            torch.testing.assert_close([sum(s[name][k] for _, s in parts) for k in (0, 1)], [*pair])
    ratio = (logp - old).exp()[keep]
    for name, x in (("ratio", ratio), ("kl", ratio - 1 - ratio.log())):
        assert name not in stats or stats[name] == (pytest.approx(x.sum().item()), len(x))
    if "clip_share" in stats and loss is not cispo_loss:  # a clipped token has no gradient
        assert 0 < stats["clip_share"][0] == (grad[keep] == 0).sum()
    if loss is flash_reinforce_loss:
        kl = torch.stack([_bernoulli_kl(q.exp(), p.exp()) for p, q, _ in rows])
        assert 0 < stats["gated"][0] == (kl > .125).sum() < 4 == stats["gated"][1]
        assert stats["bernoulli_kl"] == (pytest.approx(kl.sum().item()), 4)


@_every_loss
def test_actor_loss_laws_of_every_loss(loss):
    """Nothing trainable: zeros. The gradient is logp's alone. float32 or more. Copies work."""
    for n in (None, 0, torch.tensor(0), torch.tensor(0.0), 5):
        logp = torch.full((2, 3), math.nan, requires_grad=True)
        pair = _call(loss, logp, logp.detach(), logp.detach(), torch.zeros(2, 3), n)
        assert pair[0] == 0 and (_grad(pair[0], logp) == 0).all()
        assert all(s == c == 0 for s, c in pair[1].values())
    logp, old, advantage, keep = _actor_case()
    for f in (loss, *([_copied_alone(loss)] if loss.__module__ != "genac" else [])):
        value = _call(f, logp, old.requires_grad_(), advantage.requires_grad_(), keep)[0]
        grads = torch.autograd.grad(value, (logp, old, advantage), allow_unused=True)
        assert value == _call(loss, logp, old, advantage, keep)[0] and value.dtype == torch.float64
        assert grads[0] is not None and grads[1:] == (None, None)
    with torch.autocast("cpu", torch.bfloat16):
        half = [x.detach().bfloat16() for x in (logp, old, advantage)]
        got, same = _call(loss, *half, keep), _call(loss, *(x.double() for x in half), keep)
    assert got[0].dtype == torch.float32
    torch.testing.assert_close(got[0].double(), same[0], atol=1e-5, rtol=1e-4)
    far = torch.tensor([[0., -1]], requires_grad=True)  # a log-ratio of 100 is finite
    for advantage in (torch.tensor([[1., 1]]), torch.tensor([[-1., 1]])):
        value, stats = _call(loss, far, torch.tensor([[-100., -1]]), advantage, torch.ones(1, 2))
        numbers = (_grad(value, far), value, *sum(stats.values(), ()))
        assert all(torch.as_tensor(x).isfinite().all() for x in numbers)


def test_actor_loss_by_hand():
    """Worked examples of CISPO, a log-ratio of 100, kept tokens' mean, GRPO, NLL, temperature ½."""
    t, near = torch.tensor, lambda a, b: torch.testing.assert_close(a, t(b), atol=5e-6, rtol=0)
    logp = t([-1., -2, -.5], requires_grad=True)
    pair = cispo_loss(logp, t([-1., -1, -2]), t([1., -1, 2]), torch.ones(3))
    near(pair[0].detach(), 17 / 75)
    near(_grad(pair[0], logp), [-1 / 3, 4 / 15, -64 / 75])
    assert [int(x) for x in pair[1]["clip_share"]] == [2, 3]
    logp = t([0., -1], requires_grad=True)
    pair = cispo_loss(logp, t([-100., -1]), t([0., 1]), torch.ones(2))
    assert pair[0] == .5 and _grad(pair[0], logp).tolist() == [0, -.5]
    ones, keep = torch.full((2, 6), -1.), t([[1, 1, 1, 1, 0, 0], [0] * 6])
    for loss in _TOKEN_LOSSES:
        assert abs(loss(ones, ones, -ones, keep)[0]) == 1
    logp = t([[.69, .71, 5.99, 6.01]]).log().requires_grad_()
    pair = dis_loss(logp, torch.zeros(1, 4), torch.ones(1, 4), torch.ones(1, 4), 1)
    near(-_grad(pair[0], logp), [[0, .71, 5.99, 0]])
    x = torch.full((1, 3), -2., requires_grad=True)
    for edge in ({"eps_high": 0}, {"eps_low": 0}):  # DIS's bounds are excluded
        assert not _grad(dis_loss(x, x.detach(), -x.detach(), torch.ones(1, 3), **edge)[0], x).any()
    logp, zero = torch.zeros(2, 3, requires_grad=True), torch.zeros(2, 3)
    keep, advantage = t([[1, 0, 0], [1, 1, 1]]), t([[1.], [-2]]).expand(2, 3)
    pair = grpo_loss(logp, zero, advantage, keep)
    assert pair[0] == .5 and ppo_clip_loss(logp, zero, advantage, keep)[0] == 1.25
    assert [x.item() for x in pair[1]["loss"]] == [1, 2]
    near(_grad(pair[0], logp), [[-.5, 0, 0], [1 / 3, 1 / 3, 1 / 3]])
    logp = t([[-1., -3], [-5, -5], [-7, -7]], requires_grad=True)
    pair = nll_loss(logp, t([1., -1, 0]), torch.ones(3, 2))
    assert pair[0] == 2 and _grad(pair[0], logp).tolist() == [[-.5, -.5], [0, 0], [0, 0]]
    logits, token = t([[[2., 1, 0]]]), t([[0]])
    for logp in (token_logp(logits, token, temperature=.5),
                 _copied_alone(token_logp)(logits, token, temperature=.5),
                 token_logp(logits.bfloat16(), token, temperature=.5),
                 linear_token_logp(logits, torch.eye(3), token, temperature=.5)):
        near(logp, [[-math.log1p(math.exp(-2) + math.exp(-4))]])  # −.142932


@_named("test", [mismatch_mask, _copied_alone(mismatch_mask)])
def test_actor_loss_mismatch_by_hand(test):
    """IcePoP keeps .51, 1, 4.99 of five ratios; MIS drops a response by its largest."""
    rho = torch.tensor([[.49, .51, 1, 4.99, 5.01], [.49, .51, 1, 4.99, 149]])
    roll, mask = torch.full_like(rho, -3), torch.ones(2, 5)
    keep = test(roll + rho.log(), roll, mask)[0]
    assert keep.int().tolist() == [[0, 1, 1, 1, 0], [0] * 5]
    rho[1, 4] = 1
    keep, stats = test(roll + rho.log(), roll, mask, response_range=(0, 5))
    assert keep.int().tolist() == [[0] * 5, [0, 1, 1, 1, 1]]
    counts = {k: [round(float(x), 4) for x in v] for k, v in stats.items()}
    kl = round(float((rho - 1 - rho.log()).sum()), 4)
    assert counts == {"icepop_masked": [3, 10], "mis_masked": [5, 10], "masked": [6, 10],
                      "mis_dropped": [1, 2], "ratio": [19.99, 10], "kl": [kl, 10]}
    torch.testing.assert_close(mismatch_ratio(roll + rho.log(), roll, mask), rho)
    long = torch.full((1, 10_000), -1.)
    assert test(long + math.log(1.012), long, long)[0].all()
    assert test(roll, roll, mask, token_range=(1, 1), response_range=(1, 1))[0].all()
    roll = torch.full((3, 2), -1.)
    roll[0, 1], roll[1, 0] = math.nan, -math.inf
    keep = test(torch.full((3, 2), -1.), roll, torch.ones(3, 2))[0]
    assert keep.tolist() == [[False] * 2, [False] * 2, [True] * 2]
    logp, old, _, keep = _actor_case()
    for bad, dtype in ((math.nan, torch.int64), (math.inf, torch.float32), (1e9, torch.uint8)):
        dirty = [torch.where(keep, x, bad) for x in (logp, old)]
        for f in (test, mismatch_ratio, explained_variance, lambda p, q, m: (
                group_expectation_weight(p, q, torch.tensor([0, 1, 1, 0, 0]), m))):
            got, want = f(*dirty, keep.to(dtype)), f(logp, old, keep)
            torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_actor_loss_gepo():
    """q = .1 and .3: Σq²/Σq = .25, so p = .2 and .5 weigh .8 and 2; alone p/q; right at e⁻⁴⁰⁰."""
    p, q = torch.tensor([[.2], [.5], [.2]]), torch.tensor([[.1], [.3], [.1]])
    w = group_expectation_weight(p.log(), q.log(), torch.tensor([4, 4, 9]), torch.ones(3, 1))
    torch.testing.assert_close(w, torch.tensor([.8, 2, 2]))
    logp, roll, _, mask = _actor_case(scale=.5)
    p, q = ([math.exp(x[i][mask[i]].mean()) for i in (1, 2, 3, 4)] for x in (logp.detach(), roll))
    expected, same = sum(x * x for x in q) / sum(q), torch.zeros(5)
    want = torch.tensor([0, *p], dtype=torch.float64) / expected  # row 0 is empty
    w = group_expectation_weight(logp, roll, same, mask)
    torch.testing.assert_close(w, want, atol=1e-12, rtol=0)
    assert not w.requires_grad and (mismatch_ratio(logp, roll, mask) > 0).equal(mask)
    near, ones = torch.tensor([[-1., -1], [-1.5, -1], [-2, -1], [-2, -2]]), torch.ones(4, 2)
    far = group_expectation_weight(near - 398.9, near - 399, same[:4], ones)
    want = group_expectation_weight(near + .1, near, same[:4], ones)
    torch.testing.assert_close(far, want, rtol=1e-3, atol=0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, about NaN
@pytest.mark.parametrize("shape", [(1, 3, 5, 7), (2, 37, 45, 131), (1, 64, 32, 64)])
@pytest.mark.parametrize("impl, dtype, near, near_grad", [
    ("torch", torch.float64, 1e-12, 1e-12), ("torch", torch.bfloat16, 5e-5, 3e-2),
    *([("triton", torch.float32, 5e-5, 5e-5), ("triton", torch.float16, 5e-5, 3e-2)]
      if gae.triton else [])])
def test_actor_loss_linear_is_token_logp_of_logits(shape, impl, dtype, near, near_grad,
                                                   monkeypatch):
    """Log-probs, entropy, gradients are those of all logits: any chunks, tiles, autocast, NaN."""
    monkeypatch.setattr(al, "_chunks", lambda h, vocab: (
        slice(i, min(i + 7, vocab)) for i in range(0, vocab, 7)))
    g, (B, T, H, V) = torch.Generator().manual_seed(0), shape
    hidden, weight = ((torch.randn(*size, generator=g) / H**0.25).to(dtype).double()
                      .requires_grad_() for size in ((B, T, H), (V, H)))
    tokens, grad = torch.randint(V, (B, T), generator=g), torch.randn(B, T, generator=g)
    used = torch.arange(B * T).view(B, T) != 1
    naive = token_logp(hidden @ weight.T, tokens, temperature=.7)
    p = (hidden @ weight.T / .7).log_softmax(-1)
    want = torch.autograd.grad(naive, (hidden, weight), grad * used)
    device = "cuda" if impl == "triton" and torch.cuda.is_available() else "cpu"
    for bad in (math.nan, math.inf):
        h = torch.where(used[..., None], hidden, bad).detach().to(device, dtype).requires_grad_()
        w = weight.detach().to(device, dtype).requires_grad_()
        with torch.autocast(device, torch.bfloat16):
            got = linear_token_logp(h, w, tokens.to(device), temperature=.7, impl=impl)
            entropy = linear_entropy(h, w, temperature=.7)
            grads = [torch.autograd.grad(got, inputs, (grad * used).to(device, got.dtype),
                                         retain_graph=True) for inputs in ((h, w), (h,), (w,))]
        assert got.dtype == entropy.dtype == torch.promote_types(dtype, torch.float32)
        for x, expected in ((got, naive), (entropy, -(p.exp() * p).sum(-1))):
            x, expected = x.cpu().double()[used], expected[used]
            torch.testing.assert_close(x, expected, atol=near, rtol=near)
        for x, expected in zip(sum(grads, ()), (*want, *want)):
            assert x.dtype == dtype
            torch.testing.assert_close(x.cpu().double(), expected, atol=near_grad, rtol=near_grad)


class _Largest(TorchDispatchMode):
    """The size of the largest tensor that an operation returned."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.size = max([self.size, *sizes])
        return out


def test_actor_loss_linear_never_holds_the_logits():
    """No tensor of a third of T × V numbers; the chunks are the vocabulary, once, in order."""
    hidden, weight = (torch.randn(n, 8, requires_grad=True) for n in (4096, 1024))
    with _Largest() as seen:
        logp = linear_token_logp(hidden, weight, torch.arange(4096) % 1024)
        torch.autograd.grad(logp.sum(), (hidden, weight))
        linear_entropy(hidden, weight)
    assert seen.size <= 4096 * 1024 // 3
    for n, vocab in itertools.product((0, 1, 5000), (5, 256, 257, 1000)):
        words = [w for s in al._chunks(torch.empty(n, 3), vocab) for w in range(vocab)[s]]
        assert words == list(range(vocab))


_X, _H, _W, _F = torch.zeros(2, 3), torch.zeros(2, 3, 4), torch.zeros(5, 4), linear_token_logp


@pytest.mark.parametrize("says, function, args, options", [
    *(("logp", loss, args, {}) for loss in (*_TOKEN_LOSSES, grpo_loss, flash_reinforce_loss)
      for args in ((_X, _X, _X[0], _X), (_X, _X, _X, _X[:, :1]), (_X, _X, _X, _X, torch.ones(2)))),
    ("logp", nll_loss, (_X, _X, _X), {}),
    ("logp", nll_loss, (_X, _X[:, 0], _X, torch.ones(2)), {}),
    ("logp_old", mismatch_mask, (_X, _X[0], _X), {}),
    ("logp_old", mismatch_ratio, (_X, _X[0], _X), {}),
    ("token_range", mismatch_mask, (_X, _X, _X), {"token_range": (5, .5)}),
    ("response_range", mismatch_mask, (_X, _X, _X), {"response_range": (-1, 5)}),
    ("logp", group_expectation_weight, (_X, _X, _X, _X), {}),
    ("tokens", token_logp, (_H, _X[:, 0]), {}), ("tokens", _F, (_H, _W, _X[:, 0]), {}),
    ("temperature", token_logp, (_H, _X), {"temperature": 0}),
    ("temperature", _F, (_H, _W, _X), {"temperature": 0}), ("weight", _F, (_H, _W.T, _X), {}),
    ("weight", linear_entropy, (_H, _W.T), {}), ("impl", _F, (_H, _W, _X), {"impl": "fast"}),
    ("impl", _F, (_H.double(), _W, _X), {"impl": "triton"})])
def test_actor_loss_refuses(says, function, args, options):
    """A wrong shape, range, count or name is one sentence that begins with the argument."""
    with pytest.raises(ValueError, match=f"^{says}.*: expected .*found"):
        function(*args, **options)


# ---- daps.py -------------------------------------------------------------------------------------
_daps_on = functools.partial(DAPS, uniform=0, ramp=0)  # selects by acceptance alone (ω = 1)
_DAPS_NAN = torch.tensor([[0, math.nan], [0, 0]])
_DAPS_ALONE = [(f, _copied_alone(f)) for f in (success_from_value, fuse, accept_prob, ramp,
                                               mixed_groups)]  # to be copied one by one


def _daps_select(selector, v0, n, seed=0, step=0):
    return selector.select(torch.arange(len(v0)), v0, n, step, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("success_from_value, fuse, accept_prob, ramp, mixed_groups",
                         [*zip(*_DAPS_ALONE)], ids=["file", "copied alone"])
def test_daps_functions_by_hand(success_from_value, fuse, accept_prob, ramp, mixed_groups):
    """a(0, .25, .5, .75, 1) = .1, .775, 1, .775, .1; p_c, p̂, ω, groups, GRESO, PCL; copies."""
    p = torch.tensor([0, .25, .5, .75, 1], dtype=torch.float64)
    want = torch.tensor([.1, .775, 1, .775, .1], dtype=torch.float64)
    torch.testing.assert_close(accept_prob(p), want)
    torch.testing.assert_close(accept_prob(p, 0.3), .3 + .7 / .9 * (want - .1))
    low = success_from_value(torch.tensor([-3, -1, 0, 1, 9, math.nan], dtype=torch.bfloat16))
    assert low.dtype == torch.float32 and low[:5].tolist() == [0, 0, .5, 1, 1] and low[5].isnan()
    assert torch.equal(success_from_value(2 * p - 1), p) and torch.equal(fuse(p, 0 * p, 0 * p), p)
    torch.testing.assert_close(fuse(p, 2e8 + 0 * p, 1e9 + 0 * p), .2 + 0 * p, rtol=0, atol=1e-8)
    assert [ramp(t) for t in (0, 40, 60, 80, 100, 120, 999)] == [0, 0, .25, .5, .75, 1, 1]
    assert [ramp(t, 5, 0) for t in (4, 5)] == [0, 1] and ramp(0, 0, 0) == 1
    reward, ids = torch.tensor([1., -1, -1, 1, -1, 1, 1]), torch.tensor([0, 1, 1, 3, 0, 4, 4])
    for sign in (reward, (reward > 0).float()):  # −1/+1 as well as 0/1
        assert mixed_groups(sign, ids).nonzero().flatten().tolist() == [0, 4]
    streak = torch.tensor([3, 4, 5, 6, 0])
    assert uniform_streak(streak, reward, ids).tolist() == [0, 5, 5, 7, 1]
    assert torch.equal(uniform_streak(streak, reward[:0], ids[:0]), streak) and streak[0] == 3
    assert greso_accept_prob(torch.tensor([0, 1, 2, 6, 7])).tolist() == [1, .5, .25, 2**-6, .01]
    v0 = torch.tensor([.9, -.1, 0, 5, .3, -2, 1], dtype=torch.bfloat16)
    assert nearest_half(v0, 6).tolist() == [2, 1, 4, 0, 3, 5]  # of equals the first


def test_daps_update_and_acceptance_by_hand():
    """S = 3, N = 4, one decay, V = .2: p̂ = .685345, a = .876330; counts decay, then add."""
    (selector := _daps_on(2)).update(torch.tensor([1, 1, 1, 1]), torch.tensor([1, 1, 0, 1]))
    selector.update(torch.tensor([0]), torch.tensor([True]))
    v0, one = torch.tensor([.2], dtype=torch.float64), torch.tensor([1])
    p_hat = fuse(success_from_value(v0), selector.successes[1:], selector.trials[1:])
    assert p_hat.item() == pytest.approx(.685345, abs=1e-6)
    assert selector.acceptance(one, v0, 0).item() == pytest.approx(.876330, abs=1e-6)
    assert DAPS(2).acceptance(one, torch.ones(1), 60).item() == pytest.approx(.775)
    g, selector, S, N = torch.Generator().manual_seed(0), DAPS(6, decay=.9), [0.] * 6, [0.] * 6
    for size in (5, 0, 12, 1):
        ids, right = torch.randint(6, (size,), generator=g), torch.randint(2, (size,), generator=g)
        selector.update(ids, right)
        S, N = [.9 * s for s in S], [.9 * n for n in N]
        for i, r in zip(ids.tolist(), right.tolist()):
            S[i], N[i] = S[i] + r, N[i] + 1
    (other := DAPS(6)).load_state_dict(state := selector.state_dict())
    selector.update(torch.tensor([0]), torch.tensor([1.]))
    for counts in (state, other.state_dict()):
        torch.testing.assert_close(list(counts.values()), list(torch.tensor([S, N]).double()))


def test_daps_uniform_phase():
    """At ω = 0 the selection is the first n of a shuffle, whatever V and the history say."""
    plain, told, v0 = DAPS(50), DAPS(50), torch.linspace(-1, 1, 50)
    told.update(torch.arange(50).repeat(9), torch.arange(450) % 2)
    for seed in range(9):
        want = torch.randperm(50, generator=torch.Generator().manual_seed(seed))[:10]
        assert torch.equal(_daps_select(plain, v0, 10, seed, step=40), want)
        assert torch.equal(_daps_select(told, -v0.abs(), 10, seed, step=0), want)
    assert plain.report == dict(offered=50, omega=0, acceptance=1, rounds=1, accepted=10, filled=0)


def test_daps_accepts_in_proportion_then_the_best():
    """Few of many: in proportion to the chance; what ten rounds lack is filled by the best."""
    g, counts = torch.Generator().manual_seed(0), torch.zeros(4, dtype=torch.float64)
    a = torch.tensor([.1, .775, 1, .271], dtype=torch.float64)
    for _ in range(400):
        counts += torch.bincount(accept(a.repeat(500), 20, g)[0] % 4, minlength=4)
    expected = counts.sum() * a / a.sum()
    assert ((counts - expected) ** 2 / expected).sum() < 16.27  # the 0.1 % tail, 3 degrees
    selector = _daps_on(8, a_min=0.0)  # two are certain, the others all but hopeless
    v0 = torch.tensor([-1, -.999999, 0, 1, -.9999999, 0, .99999, 1], dtype=torch.float64)
    ids = _daps_select(selector, v0, 5)
    assert set(ids[:2].tolist()) == {2, 5} and ids[2:].tolist() == [6, 1, 4]
    assert [selector.report[name] for name in ("rounds", "accepted", "filled")] == [10, 2, 3]
    pairs = {tuple(sorted(_daps_select(selector, torch.ones(8), 2, i).tolist())) for i in range(99)}
    assert len(pairs) > 20  # of 28
    _daps_select(steady := _daps_on(30, a_min=0.5), torch.ones(30), 30)
    assert 1 < steady.report["rounds"] <= 10 and steady.report["filled"] == 0  # later rounds skip


@pytest.mark.parametrize("n, a_min", [(0, .1), (1, 0.), (7, .1), (7, 1.), (36, .1), (37, 0.)])
def test_daps_selects_n_distinct_candidates(n, a_min):
    """select is `accept` on a': n distinct candidates, all chance from the generator alone."""
    selector, before = _daps_on(100, a_min=a_min), torch.get_rng_state()
    one, two = (torch.Generator().manual_seed(n) for _ in range(2))
    ids, v0 = torch.arange(99, 25, -2), torch.linspace(-1.5, 1.5, 37).bfloat16()
    got, report = selector.select(ids, v0, n, 0, one), selector.report
    assert got.dtype == torch.long and len(set(got.tolist()) & set(ids.tolist())) == n == len(got)
    assert report["accepted"] + report["filled"] == n and report["rounds"] <= 10
    a = selector.acceptance(ids, v0, 0)
    taken, drawn = accept(a, n, two)
    assert torch.equal(got, ids[taken]) and drawn.items() <= report.items()
    assert report["acceptance"] == pytest.approx(a.mean().item()) and report["offered"] == 37
    assert torch.equal(one.get_state(), two.get_state())
    assert torch.equal(before, torch.get_rng_state())


def _daps_call(method, first, second, *more):
    (selector := DAPS(5)).update(torch.arange(5), torch.ones(5))
    try:
        getattr(selector, method)(torch.tensor(first), torch.tensor(second), *more)
    finally:  # refused, and nothing changed
        assert selector.trials.tolist() == [1] * 5 == selector.successes.tolist()


@pytest.mark.parametrize("says, call, args", [
    *((says, _daps_call, ("select", ids, v0, n, 0, torch.Generator())) for says, ids, v0, n in (
        ("distinct", [0, 1, 1], [0., 0, 0], 1), ("9. out", [9], [0.], 1), ("-1. o", [-1], [0.], 1),
        ("whole", [0.], [0.], 1), ("whole", [True], [0.], 1), ("whole", [[0]], [[0.]], 1),
        ("1 NaN", [0, 1], [0., math.nan], 1), ("v0: .* shape", [0, 1], [0.], 1),
        ("n: expected 0 … 1", [0], [0.], 2), ("found -1", [0], [0.], -1))),
    *((says, _daps_call, ("update", ids, success)) for says, ids, success in (
        ("-1", [0, 1], [1., -1]), ("nan", [0, 1], [1., math.nan]), ("5", [0, 5], [1., 0]),
        ("shape", [0, 1], [1.]), ("whole", [0.], [1.]))),
    *(("found", functools.partial(DAPS, **{"n_prompts": 5, name: x}), ()) for name, x in (
        ("n_prompts", 0), ("a_min", 2), ("n_c", 0.), ("decay", 2.), ("uniform", -1), ("ramp", -1))),
    *(("state: expected", DAPS(5).load_state_dict, (state,)) for state in (
        {}, {"successes": torch.ones(5)}, {"successes": torch.ones(5), "trials": torch.ones(4)})),
    ("a_min", accept_prob, (torch.ones(1), -.1)), ("n_c", fuse, (*torch.ones(3, 1), 0.)),
    ("shape", mixed_groups, (torch.ones(2), torch.ones(3))), ("2, 2", nearest_half, (_DAPS_NAN, 1)),
    ("1 NaN", mixed_groups, (_DAPS_NAN[0], torch.ones(2))), ("v0", nearest_half, (_DAPS_NAN[0], 1)),
    ("a: .* 1 NaN", accept, (_DAPS_NAN[0], 1, None)), ("2", greso_accept_prob, (torch.ones(1), 2)),
    ("-0.1", greso_accept_prob, (torch.ones(2), .5, -.1)),
    ("2. out", uniform_streak, (torch.zeros(2), torch.ones(1), torch.tensor([2])))])
def test_daps_refuses(says, call, args):
    """Repeats, strangers, NaN, other shapes, numbers out of range: one clear sentence each."""
    with pytest.raises(ValueError, match=says):
        call(*args)


def test_daps_ensemble_by_hand():
    """Critics that say 0.6 and 0.4 are worth ¼/0.02 − 1 = 11.5 trials; agreement is worth more."""
    v0 = torch.tensor([[0.2, 0.1, -1.0, 1.0], [-0.2, 0.1, 1.0, 0.9]])
    n_c = trials_from_spread(v0)
    assert n_c.tolist() == pytest.approx([11.5, 30, 0.3, 0.975 * 0.025 / 0.00125 - 1])
    daps = DAPS(4, a_min=0.1, uniform=0, ramp=0)
    daps.update(torch.tensor([0, 0]), torch.tensor([1, 1]))
    p = (2 + 11.5 * 0.5) / (2 + 11.5)  # p̂ = (S + n_c p_c)/(N + n_c)
    a = daps.acceptance(torch.arange(4), v0, 1)
    assert a[0].item() == pytest.approx(0.1 + 0.9 * 4 * p * (1 - p))
    ids = daps.select(torch.arange(4), v0, 2, 1, torch.Generator().manual_seed(0))
    assert len(ids) == 2
    with pytest.raises(ValueError, match="v0: expected the shape"):
        daps.select(torch.arange(4), v0[:, :3], 2, 1, torch.Generator())


# ---- rollout.py ----------------------------------------------------------------------------------

ROLLOUT_PROMPTS = [[5, 1, 6], [7], [3, 3, 3, 3, 9, 2], [8, 2], [4, 5, 6, 7], [2, 9], [11, 12, 1, 1]]


class _RolloutScripted(nn.Module):
    """A stand-in for a language model: the logits at position p are logits[p], whatever came; or
    such that token script[p] is sampled."""

    def __init__(self, script=(), logits=()):
        super().__init__()
        self.seen = []
        self.logits = nn.Parameter(torch.tensor(logits) if logits else 50 * torch.eye(10)[script])

    def forward(self, input_ids, attention_mask, position_ids, past_key_values, **unused):
        kv = torch.zeros(*input_ids.shape, 1).unsqueeze(1)  # [R, heads = 1, n, d = 1]
        past_key_values.update(kv, kv, 0)
        self.seen.append(attention_mask)
        return SimpleNamespace(logits=self.logits[position_ids[:, -1:]])


def _rollout_llama():
    return _tiny(vocab_size=13, bos_token_id=None, pad_token_id=1, initializer_range=0.3)


def _rollout_sample(model, prompts, seed=0, sampler=generate, **limits):
    """The sampler's four tensors."""
    limits = dict(max_new_tokens=9, eos_id=[1, 4], pad_id=1) | limits
    return sampler(model, prompts, generator=torch.Generator().manual_seed(seed), **limits)


def _rollout_scored(model, out, temperature):
    """Log-probs of the sampled tokens by one full forward pass, without a cache."""
    tokens, attention, mask, _ = out
    z = model(tokens, attention_mask=attention.long(), position_ids=positions(attention)).logits
    logp = torch.log_softmax(response(z, mask.shape[1]) / (temperature or 1), -1)
    return logp.gather(-1, tokens[:, -mask.shape[1] :, None])[..., 0]


def _rollout_collect(sample, answers, eos_id):
    """The batch of prompts [1] with id 4. The text is the list of ids; right is what is equal."""
    tokenizer = SimpleNamespace(
        pad_token_id=2, batch_decode=lambda rows, skip_special_tokens: [str(row) for row in rows])
    return collect(sample, tokenizer, [[1]] * len(answers), answers, torch.tensor([4, 4]),
                   lambda text, answer: 1.0 if text == answer else -1.0, eos_id=eos_id,
                   generator=None)


@pytest.mark.parametrize("function, arguments, expected", [
    (positions, (torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]),), [[0, 0, 0, 1], [0, 1, 2, 3]]),
    (response, (torch.arange(7)[None], 3), [[3, 4, 5]])])  # state t: one to the left of token t
def test_rollout_copied_alone(function, arguments, expected):
    """The function, and its source alone beside torch and Tensor, give what is right by hand."""
    namespace = {"torch": torch, "Tensor": Tensor}
    exec(inspect.getsource(function), namespace)
    for f in (function, namespace[function.__name__]):
        assert f(*arguments).tolist() == expected


def test_rollout_log_prob_at_the_sampling_temperature():
    """Case 13: log softmax([2, 1, 0] / 0.5) = −0.142932, −2.142932, −4.142932."""
    tokens, _, _, logp = _rollout_sample(
        _RolloutScripted(logits=[[2.0, 1.0, 0.0]] * 2), [[1]] * 200, max_new_tokens=1,
        temperature=0.5)
    assert (logp[:, 0] - (-0.142932 - 2.0 * tokens[:, -1])).abs().max() < 1e-5
    assert set(tokens[:, -1].tolist()) >= {0, 1}


def test_rollout_pad_equal_to_eos():
    """Case 14: with pad = eos = 2 the 2 in the prompt is attended, the one that ends is trained."""
    model = _RolloutScripted([0, 0, 7, 8, 2, 9])
    tokens, attention, mask, _ = _rollout_sample(
        model, [[5, 2, 6], [6]], max_new_tokens=4, eos_id=2, pad_id=2)
    assert tokens.tolist() == [[5, 2, 6, 7, 8, 2, 2], [2, 2, 6, 0, 0, 7, 8]]
    assert attention.tolist() == [[True] * 6 + [False], [False] * 2 + [True] * 5]
    assert mask.tolist() == [[True, True, True, False], [True] * 4]
    assert model.seen[0].tolist() == [[1, 1, 1], [0, 0, 1]]


def test_rollout_another_engines_replies():
    """pad_responses: ids and log-probs of any lengths as the four tensors of generate."""
    tokens, attention, mask, logp = rollout.pad_responses(
        [[1, 2], [3]], [[4], [5, 6]], [[-0.5], [-1.0, -2.0]], 9)
    assert tokens.tolist() == [[1, 2, 4, 9], [9, 3, 5, 6]]
    assert attention.tolist() == [[True] * 3 + [False], [False] + [True] * 3]
    assert mask.tolist() == [[True, False], [True, True]] and logp.tolist() == [[-.5, 0], [-1, -2]]


@pytest.mark.parametrize("script, limit, eos, text, length, truncated, reward", [
    ([5, 6, 6, 6], 2, [2], "[5, 6]", 2, True, -1.0),  # case 15: cut by the limit
    ([5, 2, 6, 6], 2, [2], "[5, 2]", 2, False, 1.0),
    ([5, 9, 6, 6], 4, [2, 9], "[5, 9]", 2, False, 1.0),  # any of the end tokens ends
    ([5, 2, 6, 6], 4, [2], "[1, 5, 2]", 2, False, -1.0)])  # the prompt is no part of the text
def test_rollout_collect_by_hand(script, limit, eos, text, length, truncated, reward):
    """A cut response keeps its tokens and fails though its text is right; the verifier sees the
    sampled tokens alone: no prompt, no padding."""
    batch = _rollout_collect(lambda prompts, generator: generate(
        _RolloutScripted(script), prompts, max_new_tokens=limit, eos_id=eos, pad_id=2,
        generator=generator), [text, text], eos)
    assert batch.mask.sum(1).tolist() == [length] * 2 and batch.prompt_id.tolist() == [4, 4]
    assert batch.truncated.tolist() == [truncated] * 2 and batch.reward.tolist() == [reward] * 2


def test_rollout_refuses():
    """One sentence that names the argument, before the model is called; case 36: or the prompt that
    a sampler gives no token or no response to."""
    limits = dict(prompts=[[1]], max_new_tokens=1, eos_id=2, pad_id=2)
    for change, words in [
            (dict(prompts=[]), "no prompt"), (dict(prompts=[[1], []]), "empty prompt at 1"),
            (dict(max_new_tokens=0), "max_new_tokens"), (dict(temperature=-1), "temperature"),
            (dict(temperature=float("nan")), "temperature"), (dict(max_rows=0), "max_rows")]:
        for sampler in rollout.SAMPLERS.values():
            with pytest.raises(ValueError, match=words):
                sampler(None, **limits | change)
    for ids, words in [([[5], []], "no token for prompt 1"), ([[], []], "no token for prompt 0"),
                       ([[5]], "found 1")]:
        with pytest.raises(ValueError, match="sampler: expected a response to each .*" + words):
            _rollout_collect(lambda prompts, generator: rollout.pad_responses(
                prompts, ids, [[0.0] * len(x) for x in ids], 2), ["", ""], [2])
    reply = SimpleNamespace(request_id="r_0", error="full", generated_tokens=[5], logprobs=[0.0])
    engine = Mock(**{"parameters.side_effect": lambda: iter([torch.zeros(1)]),
                     "generate_batch.return_value": {"r_0": reply}})
    with pytest.raises(RuntimeError, match="generate_batch: expected 1 responses, found 0.*full"):
        rollout.generate_batch(engine, **limits)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0])
@pytest.mark.parametrize("max_rows", [1, 3, 28])
def test_rollout_sampler_log_probs_are_the_trainers(max_rows, temperature):
    """log μ from the cache, rows dropped on the way, is log π of one full pass: to 1e-9. A bfloat16
    model's are float32; the sample is a function of the generator's state."""
    model, limits = _rollout_llama().double(), dict(temperature=temperature, max_rows=max_rows)
    out = _rollout_sample(model, ROLLOUT_PROMPTS * 4, max_rows, max_new_tokens=12, **limits)
    tokens, attention, mask, logp = out
    assert len(set(mask.sum(1).tolist())) > 3 and logp.dtype == torch.float64
    assert ((_rollout_scored(model, out, temperature) - logp).abs() * mask).max() < 1e-9
    assert (logp[~mask] == 0).all()
    ended = torch.isin(tokens[:, -mask.shape[1] :], torch.tensor([1, 4])) & mask
    assert (ended.sum(1) <= 1).all() and (mask.sum(1)[~ended.any(1)] == 12).all()
    a, b, c = (_rollout_sample(model.bfloat16(), ROLLOUT_PROMPTS, seed, **limits)
               for seed in (1, 1, 2))
    assert a[3].dtype == torch.float32 and torch.isfinite(a[3]).all() and torch.equal(a[0], b[0])
    assert (a[0].shape == c[0].shape and torch.equal(a[0], c[0])) == (temperature == 0)


def test_rollout_greedy_is_transformers_generate():
    """Temperature 0 is model.generate of each row alone, at any max_rows and order of prompts."""
    model, expected = _rollout_llama().double(), []
    for prompt in ROLLOUT_PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                             max_new_tokens=9)
        expected.append(out[0, len(prompt) :].tolist())
    for rows, step in ((1, 1), (2, 1), (5, 1), (64, 1), (64, -1)):
        tokens, _, mask, _ = _rollout_sample(
            model, ROLLOUT_PROMPTS[::step], max_rows=rows, temperature=0, eos_id=1)
        texts = [row[m].tolist() for row, m in zip(tokens[:, -mask.shape[1] :], mask)]
        assert texts == expected[::step]


@pytest.mark.parametrize("sampler", rollout.SAMPLERS.values())
def test_rollout_samplers_draw_from_the_policy(sampler, monkeypatch):
    """Log-probs of every token are the trainer's, first tokens follow softmax(z/τ) within 4.5
    standard errors; a bar's total is rows × limit, and it ends there though responses are short."""
    bars, tqdm = [], rollout.tqdm
    monkeypatch.setattr(rollout, "tqdm", lambda *a, **how: bars.append(
        tqdm(*a, **how | {"disable": False, "delay": 99})) or bars[-1])
    model, n = _rollout_llama(), 1000
    try:
        out = _rollout_sample(model, [[5, 1, 6], [7]] * n, sampler=sampler, max_new_tokens=5,
                              temperature=1.3, max_rows=300)
    except RuntimeError as error:  # transformers 5.17 on a CPU without psutil
        if "psutil" not in str(error):
            raise
        pytest.skip(str(error))
    assert ((_rollout_scored(model, out, 1.3) - out[3]).abs() * out[2]).max() < 1e-4
    assert out[1][:, : -out[2].shape[1]].sum(1).tolist() == [3, 1] * n
    for i, prompt in enumerate(([5, 1, 6], [7])):
        p = torch.softmax(model(torch.tensor([prompt])).logits[0, -1] / 1.3, 0)
        share = torch.bincount(out[0][i::2, -out[2].shape[1]], minlength=13) / n
        assert ((share - p).abs() < 4.5 * (p * (1 - p) / n).sqrt() + 1e-3).all()
    assert all(bar.total == 10 * n == bar.n > out[2].sum() for bar in bars)


def test_rollout_shared_beginnings_are_fed_once(monkeypatch):
    """Prompts that begin alike give the same sample from a copied cache, in half of the tokens."""
    model, rng = _rollout_llama().double(), random.Random(0)
    text = [[rng.randrange(2, 13) for _ in range(n)] for n in (200, 211)]
    prompts = [x[:n] + [7, 8, 9] for x, longest in zip(text, (190, 205))
               for n in (150, 160, 171, longest)] + [[3, 4, 5]]
    prompts += [prompts[3]] * 3  # a group's prompts are equal
    assert rollout.begins_alike(prompts) == [3] * 4 + [7] * 4 + [8] + [3] * 3
    assert rollout.begins_alike([[1] * 32, [1] * 32]) == [0, 1]  # nothing left to copy
    fed, outs, limits = [], [], dict(temperature=0.8, eos_id=1)
    model.register_forward_pre_hook(
        lambda model, args, given: fed.append(given["input_ids"].numel()), with_kwargs=True)
    for alike in (rollout.begins_alike, lambda prompts: list(range(len(prompts)))):
        monkeypatch.setattr(rollout, "begins_alike", alike)
        for rows in (9, 64):
            outs.append(_rollout_sample(model, prompts, max_rows=rows, **limits) + (sum(fed),))
            fed.clear()
    for rows, shared, plain in zip((9, 64), outs[:2], outs[2:]):
        assert all(torch.equal(x, y) for x, y in zip(shared[:3], plain[:3]))
        assert (shared[3] - plain[3]).abs().max() < 1e-9
        assert shared[4] < plain[4] / (2 if rows == 64 else 1)


def _rollout_batch(prompt_lengths, lengths):
    B, P, T = len(lengths), max(prompt_lengths), max(lengths)
    at, ends = torch.arange(P + T), torch.tensor(lengths)[:, None]
    starts = P - torch.tensor(prompt_lengths)[:, None]
    attention, mask = (at >= starts) & (at < P + ends), torch.arange(T) < ends
    tokens = torch.where(attention, at + 100 * torch.arange(B)[:, None] - starts, 0)
    routing = torch.where(attention, tokens, -1).short()[..., None, None]
    return Batch(tokens, attention, mask, torch.arange(B), torch.ones(B), torch.zeros(B).bool(),
                 mask.float() * 7, routing, value=mask.float() * torch.arange(1, T + 1))


def _rollout_real(b):
    """What stands on real tokens, by row."""
    return [(t[a].tolist(), r[a].flatten().tolist(), m.sum().item(), v[m].tolist(), i.item())
            for t, a, r, m, v, i in zip(b.tokens, b.attention, b.routing, b.mask, b.value,
                                        b.prompt_id)]


def test_rollout_take_and_concatenate_keep_every_real_token():
    """Rows cut to their own width and put together again lose nothing; no column is all padding."""
    whole = _rollout_batch([3, 1, 5, 2], [4, 6, 1, 2])
    parts = [take(whole, torch.tensor(rows)) for rows in ([0, 3], [2], [1])]
    assert parts[0].tokens.shape == (2, 3 + 4) and parts[1].tokens.shape == (1, 5 + 1)
    assert all(part.attention.any(0).all() for part in parts)
    again = rollout.move(concatenate(parts), "cpu")
    assert again.tokens.shape == whole.tokens.shape and again.logp_old is None
    assert _rollout_real(again) == [_rollout_real(whole)[i] for i in (0, 3, 2, 1)]
    assert (again.routing[~again.attention] == -1).all()
    chosen = take(whole, torch.tensor([True, False, False, True]))
    assert _rollout_real(chosen) == [_rollout_real(whole)[i] for i in (0, 3)]
    whole.mask[0, 1:3] = False  # tool output: attended columns stay though nothing there is trained
    assert take(whole, torch.tensor([0])).mask.tolist() == [[True, False, False, True]]


@pytest.mark.parametrize("size", [1, 3])
def test_rollout_length_groups_hold_every_row_within_the_budget(size):
    """Each row once; (P + T) × rows ≤ budget × ranks unless one row a rank; longest first."""
    rng = random.Random(0)
    prompt, answer = ([rng.randrange(1, 40) for _ in range(60)] for _ in range(2))
    groups = rollout.length_groups(prompt, answer, 200, size)
    assert sorted(sum(groups, [])) == list(range(60)) and len(groups) > 2
    lengths = [max(prompt[i] for i in g) + max(answer[i] for i in g) for g in groups]
    assert all(n * len(g) <= 200 * size or len(g) <= size for n, g in zip(lengths, groups))
    assert max(map(sum, zip(prompt, answer))) == max(prompt[i] + answer[i] for i in groups[0])


def _rollout_on_ranks(monkeypatch, size, work):
    """work(rank) on each of `size` ranks: threads that exchange pickles -> results by rank."""
    here, barrier, parts = threading.local(), threading.Barrier(size, timeout=100), {}

    def gather(into, value):
        parts[here.rank] = pickle.dumps(value)
        barrier.wait()
        into[:] = [pickle.loads(parts[r]) for r in range(size)]
        barrier.wait()

    def run(rank):
        here.rank = rank
        return work(rank)

    monkeypatch.setattr(rollout, "dist", SimpleNamespace(
        is_initialized=lambda: size > 1, get_rank=lambda: here.rank, get_world_size=lambda: size,
        all_gather_object=gather))
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))


def _rollout_rank_job(size):
    """What each of `size` ranks does, a function of its number; a model and its notes a rank."""
    model = _tiny("mixtral", bos_token_id=None, initializer_range=0.3, intermediate_size=16,
                  experts_implementation="eager").double()
    prompts = [p for p in ROLLOUT_PROMPTS for _ in range(4)]
    limits = dict(max_new_tokens=6, temperature=0, eos_id=list(range(60)), pad_id=3)
    routers = [copy.deepcopy(model) for _ in range(size)]
    notes = [rollout.Routing(router) for router in routers]

    def work(rank):
        g = torch.Generator().manual_seed(5)
        draws = rollout.over_ranks(lambda share, rng: [
            (x, torch.rand(1, generator=rng).item()) for x in share], range(7), g)
        batch = collect(
            lambda prompts, generator: generate(routers[rank], prompts, routing=notes[rank],
                                                generator=generator, max_rows=5, **limits),
            task_tokenizer(), prompts, list(range(28)), torch.arange(28) // 4,
            lambda text, answer: 1.0 if answer % 3 else -1.0, eos_id=list(range(60)),
            generator=None, routing=notes[rank])
        shared = rollout.shared(generate)(model, prompts, generator=None, **limits)
        return {**vars(batch)}, shared, draws, torch.rand(1, generator=g).item()

    return work, routers, notes


@pytest.mark.parametrize("size", [2, 3, 9])
def test_rollout_ranks_are_one_process(monkeypatch, size):
    """over_ranks: results in the order of items on all ranks, with other draws on each, more ranks
    than items included; the generator takes one draw. K = 4 responses to 7 prompts: rows in the
    order of prompts, also the experts noted; so are the four tensors of a shared sampler."""
    work, routers, notes = _rollout_rank_job(size)
    (one, tensors, draws, after), = _rollout_on_ranks(monkeypatch, 1, work)
    g = torch.Generator().manual_seed(5)
    own = torch.Generator().manual_seed(int(torch.randint(2**62, (), generator=g)))
    assert draws[0] == (0, torch.rand(1, generator=own).item())  # rank 0's, however many there are
    assert after == torch.rand(1, generator=g).item()
    noted, attention = one["routing"], one["attention"]
    assert ((noted[..., 0, 0] >= 0).sum(1) == attention.sum(1) - 1).all()  # the last is never fed
    notes[0].seen = []
    routers[0](one["tokens"], attention_mask=attention.long(), position_ids=positions(attention))
    full = torch.stack(notes[0].seen).view(2, *attention.shape, 2).permute(1, 2, 0, 3)
    assert (full == noted)[noted >= 0].all() and len(set(one["mask"].sum(1).tolist())) > 2
    assert one["prompt_id"].tolist() == [i // 4 for i in range(28)]
    expected = [1.0 if i % 3 else -1.0 for i in range(28)]
    assert torch.where(one["truncated"], -1.0, torch.tensor(expected)).equal(one["reward"])
    results = _rollout_on_ranks(monkeypatch, size, work)
    for batch, others, their_draws, their_after in results:
        assert their_draws == results[0][2] and their_draws[0] == draws[0] and their_after == after
        assert [x for x, _ in their_draws] == list(range(7)) == [x for x, _ in draws]
        assert len({draw for _, draw in their_draws}) == 7
        assert (batch["tokens"] == one["tokens"])[attention].all()
        pairs = [*zip(others, tensors), *((batch[x], one[x]) for x in one if x != "tokens")]
        assert all(torch.allclose(x, y, rtol=0, atol=1e-9) for x, y in pairs if x is not None)


def test_rollout_task_problems_and_demonstrations():
    """+7!d=3 is 0, 7, 4, 1; a slip writes the value before once more, and no easy step slips. 2,448
    and 414 distinct problems; no held-out chain begins a training chain; flawless demonstrations
    are all right, and of the longest hard ones with slips few."""
    chain = lambda prompt, slip: rollout.demonstration(prompt, slip, random.Random(9))
    assert chain("+7!d=3", 0.0) == chain("+7@d=3", 1.0) == "a0b7c4d1$"
    assert chain("+7!d=3", 1.0) == "a3b3c3d3$" and chain("+7!d=3", 0.3) == "a0b7c7d4$"
    assert [rollout.chain_reward(x, "d1") for x in ("a0b7c4d1", "a0b7c4d4", "")] == [1, -1, -1]
    train, held_out = task_problems(), task_problems(held_out=True)
    assert (len(train), len(held_out)) == (2448, 414)
    assert len({p.prompt for p in train + held_out}) == 2862
    assert {p.level for p in train} == {"easy", "hard 01-04", "hard 05-08", "hard 09-16"}
    assert {p.level.split(", ")[1] for p in held_out} == {"new pair", "longer"}
    right = [chain(p.prompt, 0.0)[:-1] for p in train + held_out]
    begun = {text[:i] for text in right[: len(train)] for i in range(len(text) + 1)}
    assert not begun & set(right[len(train) :])
    assert all(text.endswith(p.answer) for p, text in zip(train + held_out, right))
    rng, longest = random.Random(0), [p for p in train if p.prompt[2:4] == "!p"]
    shares = [rollout.demonstration(p.prompt, rollout.SLIP, rng)[:-1].endswith(p.answer)
              for p in longest * 4]
    assert 0 < sum(shares) < len(shares) / 3


def test_rollout_task_tokenizer_is_one_of_transformers(tmp_path):
    """Saved and loaded as any tokenizer: a token per character, `$` ends and pads."""
    task_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("+7!d=3a0$").input_ids
    assert len(ids) == 9 and ids[-1] == tokenizer.eos_token_id == tokenizer.pad_token_id
    assert tokenizer.batch_decode([ids], skip_special_tokens=True) == ["+7!d=3a0"]
    assert encode_prompt(tokenizer, Problem("+7!d=3", "d1")) == ids[:6]
    assert tokenizer.decode(tokenizer("é\n").input_ids) == "?\n"


def test_rollout_base_policy_of_two_builders(tmp_path, monkeypatch):
    """Case 40: of two processes that build at once the second takes the folder of the first alone.
    The same seed gives the same weights, and a folder that is there is not built again."""
    first, second = str(tmp_path / "a" / "base"), str(tmp_path / "b" / "base")
    rollout.build_base(first, steps=2, batch=4)
    save = LlamaForCausalLM.save_pretrained

    def late(model, folder, **how):
        monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", save)
        rollout.build_base(second, steps=2, batch=4)
        open(os.path.join(second, "mark"), "w").close()
        save(model, folder, **how)

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", late)
    assert rollout.build_base(second, steps=2, batch=4) == second
    assert os.path.isfile(os.path.join(second, "mark")) and os.listdir(tmp_path / "b") == ["base"]
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (first, second)]
    assert all(torch.equal(x, y) for x, y in zip(*(m.parameters() for m in models)))
    tokenizer = AutoTokenizer.from_pretrained(second)
    models[0].generation_config.eos_token_id = [5, 3]
    assert rollout.eos_ids(models[0], tokenizer) == sorted({5, 3, tokenizer.eos_token_id})
    open(os.path.join(second, "model-00002-of-00002.safetensors"), "w").close()
    there = {*os.listdir(first), "mark"}
    rollout.write_folder(second, tokenizer, models[0])  # the model is replaced, foreign files stay
    assert {*os.listdir(second)} == there and os.listdir(tmp_path / "b") == ["base"]
    with pytest.raises(OSError):  # but a folder without a model stays
        rollout.write_folder(str(tmp_path), tokenizer, models[0], replace=False)


# ---- rollout.py: answers and verifiers -----------------------------------------------------------

# A row: spellings of one answer, the data set's first. Of numbers in a text, then of other answers.
ROLLOUT_NUMBERS = [row.split(" | ") for line in r"""
72 | 72. | $72$ | 72.0 | \$72 | +72 | x = 72 | 072 | 72 dollars | 72^\circ | 72^{\circ} | \text{72}
50\% | 50% | 50 percent | 0.5 | 1/2 | \frac{1}{2} | .5 | \frac12 | \dfrac12 | \tfrac{1}{2} | ½
144 | \dfrac{288}{2} | \(144\) | 144\,\mathrm{cm} | 144 square units |  144 \text{ hours}. | 288/2
1,234 | 1234 | 1{,}234 | 1,\!234 | 1\,234 | 1234.00 | \$1,234 | 1,234 miles | 1234. | 1{,}234.0
\frac{1}{4} | \frac1{4} | \frac{1}4 | 2/8 | \frac{-1}{-4} | \frac{.5}{2}
-\frac{611}{495} | -1.2\overline{34} | -1.23\overline{43} | -1222/990 | \boldsymbol{-1222/990}
-\frac{1}{2} | \frac{-1}{2} | \frac{1}{-2} | -1/2 | -.5 | −0.5 | x=-\frac12
\frac{3}{2} | 1\frac{1}{2} | 1\frac12 | 1 1/2 | 1.5 | 1½; 1000 | 10**3 | 1 000
3 \cdot 10^5 | 3\times 10^5 | 3 × 10^5
10000000000000000 | 1e16 | 1E+16 | 10^{16} | 10^16 | 1 \times 10^{16} | 10,000,000,000,000,000
0.00001 | 1e-5 | 1 \times 10^{-5} | 10^{-5} | 10⁻⁵ | \frac{1}{10^5} | 1/100000 | 0.001\% | 1 x 10^-5
4.5e33 | 4.5 \times 10^{33} | 45\cdot 10^{32} | 4500000000000000000000000000000000
5000000 | 5\text{ million} | 5 million | 5{,}000{,}000 | 5,000,000 | \$5 million dollars
6000000 | 6 millions | 6 000 000 | 6 000 000 | 6 \text{ millions}
5 | x = 5 | y = 5. | 5\text{ cm} | 5\text{ m} | \$5 | \textbf{5} | (5) | 5 degrees | 5
60\text{ miles per hour} | 60 mph | 60
""".strip().splitlines() for row in line.split("; ")]
ROLLOUT_OTHERS = [row.split(" | ") for line in r"""
3cm | 3\text{ cm} | 3\,\mathrm{cm} | 3 centimeters; 8 dollars | 8\text{ dollars} | 8\$
4^\circ | 4° | 4 degrees | 4^{\circ} | 4\degree; 11\text{ km/h} | 11km/h | 11 km per hour
9\text{ m}^2 | 9\,\mathrm{m}^{2} | 9 square meters | 9 meters² | 9; 3+4i | 3 + 4i | 3+4\mathrm{i}
\frac{1}{13}cm | \frac{1}{13}\text{ cm} | 1/13 centimeters; 6/7 | 6 / 7 | \frac67; 52_8 | 52_{8}
11\sqrt2 | 11\sqrt{2} | 11 \sqrt {2}; \pm 3 | 3, -3 | \{-3, 3\}; a \pm b \mp c | a+b-c, a-b+c
\frac{\sqrt{3}}{2} | \sqrt{3}/2 | \frac{\sqrt3}2 | \dfrac{\sqrt 3}{2} | √3/2 | \sqrt3/2
no solution | No solution | \text{no solution} | \textbf{No solution.}; (10,100) | (10, 100)
-\frac{\pi}{6} | \frac{-\pi}{6} | -\pi/6 | -\dfrac\pi6; x^2+5 | x^{2} + 5; x \leq 3 | x\le 3
\frac{1}{\sqrt{2}} | 1/\sqrt{2} | 1/√2 | \frac1{\sqrt2}; \frac{2\pi}{3} | \frac23\pi | 2\pi/3 | 2π/3
-\frac{\pi}{2} | -\frac12 \pi | -\frac{1}{2}\pi | -\pi/2; 25\pi | 25\pi\text{ cm}^2 | 25 \pi cm²
10000/3 | 10 000/3 | 10,000/3 | \frac{10000}{3}; \frac{1+\sqrt{5}}{2} | (1+\sqrt5)/2 | \frac{1+√5}2
x\le\frac{3}{2} | x \le 3/2 | x≤1.5; A\cup B | B \cup A; 2\sqrt3 | 2\cdot\sqrt{3}; \theta | θ
x\in\mathbb{R} | x ∈ ℝ | \mathbb R; \binom{5}{2} | \dbinom{5}{2}; a_{1} | a₁; 45\text{ mg} | 45
\emptyset | ∅ | \varnothing
3+\sqrt2 | 3+\sqrt{2}\text{ cm} | (3+\sqrt2)\text{ cm} | (3 + \sqrt{2})
\left( 3, \frac{\pi}{2} \right) | (3,\pi/2) | \bigl(3.0,\,\tfrac{\pi}{2}\bigr)
\left[0,100\right) | [0, 100) | x \in [0,100) | [0,\;100.0); 0,100 | 0, 100 | 100 and 0
\text{(C)} | C | (C) | \textbf{C} | \mathrm{C}; (1,2), (3,4) | \{(3,4),(1,2)\} | (3,4),(1,2)
(-\infty,2)\cup(3,\infty) | (-\infty, 2) \cup (3, \infty) | x \in (3, ∞) ∪ (-∞, 2.0)
1,-2 | -2, 1 | x = 1 \text{ or } x = -2 | \{-2,1\} | -2 and 1 | $1$, $-2$ | 1.0,-2
1 \pm \sqrt{19} | 1+\sqrt{19}, 1-\sqrt{19} | 1-\sqrt{19} \text{ and } 1+\sqrt{19}
\pm\sqrt{3} | \{\pm \sqrt3\} | x = \pm√3 | -\sqrt3 \text{ or } \sqrt3; (x,y) = (1,2) | (1, 2)
2x + 3 | y = 2x + 3 | f(x) = 2x + 3 | 2x+3; (1{,}000, 2) | (1000,2) | (1\,000, 2.0)
\text{Evelyn} | Evelyn | \textbf{Evelyn} | \mbox{Evelyn}.; \langle 1,2,3,4\rangle | <1, 2.0, 3, 4>
x=1, y=2 | y = 2 \text{ and } x = 1.0; x = 7, 8 | x = 7 \text{ or } x = 8 | \{7, 8\}
\begin{pmatrix}-2 \\ \frac12\end{pmatrix} | \begin{pmatrix}-2\\\frac{1}{2}\end{pmatrix}
\begin{pmatrix} 1/5 \\ -3.6 \end{pmatrix} | \begin{bmatrix} \frac15\\\frac{-18}{5}\\\end{bmatrix}
""".strip().splitlines() for row in line.split("; ")]
ROLLOUT_DIFFERENT = [pair.split(" | ") for row in r"""
5 | 5\text{ million}; 3 | 3\text{ halves}; 5 | 5\text{ does not exist}; 5 | 5\text{ apples}; 5 | 5i
5 | 5x; 5m | 5; 5 | 5!; 5 | \overline{5}; 5 | 5_8; R | \mathbb{R}; A | a; 5 | about 5; 50\% | 50
50 | 50 percent; 0.333... | 0.333; 12 | 1 2; 1 1/2 | 11/2; 10^{5}3 | 10^{53}; 2**3 | 2*3; AB = 5 | 5
x = 5 | y = 5; f(x)=2x | g(x)=2x; x=1,y=2 | x=2,y=1; (x,y)=(1,2) | (y,x)=(1,2); 5 cm | 5 km; 1,1 | 1
\$5 | 5 cents; 20°C | 20°F; 5\text{ a.m.} | 5\text{ p.m.}; 5 | 5\text{ p.m.}; x<5 | x>5; 5 | \ge 5
x\le 5 | x<5; 5 | \approx 5; 5 | \ne 5; x>3 or x<1 | x>3 and x<1; (1,2) | [1,2]; [0,1) | [0,1]
(1,2) | 1,2; \{1\} | 1; 1,234 | 1, 234; ((1,2),3) | (1,2,3); (\{1,2\},3) | (1,2,3); 1/0 | 2/0; x | y
2\frac{-\pi}{6} | 2-\frac{\pi}{6}; 1e16 | 1e15; <1,2,3,4> | <1,3,2,4>; 5 thousand | 5 million; C | D
\begin{vmatrix}1\end{vmatrix} | \begin{pmatrix}1\end{pmatrix}; 72 | 27; 72 | -72; (1,234) | 1234
\begin{pmatrix}1,2\end{pmatrix} | \begin{pmatrix}2,1\end{pmatrix}; (1,2) | (2,1); 1,2 | 1; 52_8 | 52
x=1,y=2 \text{ or } x=2,y=1 | x=1,y=1 \text{ or } x=2,y=2; x=1,2,y=3 | x=1,y=3,2
10 000/3 | 10; 5 000/1 | 5; 1 234/5 | 1.5; 1/3 \cdot 10^4 | 1/30000; 2e - 1 | 0.2
100/0.5*10^{2} | 2; \frac{1\frac{1}{2}}{3} | \frac{\frac12}{3}; \frac12mg | \frac{1}{2}; 2ml^2 | 2
(2/1,000) | (2,000); 0.3 | 0.\overline{3}
(5,000\%) | (5,0); (2,000/1) | (2,0); (2,012) | (2,12); 2\frac{3}{2} | 7/2; \ln1/2 | \frac{\ln1}{2}
\sin\pi/6 | \frac{\sin\pi}{6}; x \le 3/2 | x < 3/2; x<1/2 | x<1/3; A\cup B | A\cup C; 3e + 2 | 300
x=1, y=2 | 2, 1; x=1, y=2 | 1, 2; \sin 30 | \sin 30^\circ; 2x-3 | 2x-3\text{ cm}; x | x\text{ cm}
5 million | 5 m; \frac{2}{3}\pi | \frac{2}{3\pi}; 1/2\sqrt{2} | \frac{1}{2\sqrt{2}}; 3n | 3n\,mi
0.333 | 1/3; x^2 | x2; 10 | 1; \frac{1}{0} | \frac{2}{0}; 2^{10} | 1024; 2\cdot\frac12 | 2.5
\sqrt{23} | \sqrt23; 1-2 | 1+2; \frac{-1+x}{2} | -\frac{1+x}{2}; 3cm | 3\text{ m}; 3cm | 3xcm
4^\circ | 4 radians; 9\text{ m}^2 | 9\text{ m}; 8 dollars | 8 cents; 11 km/h | 11\text{ m/s}
3+4i | 3-4i; \frac13cm | \frac13xcm; no solution | 5; \sqrt3/2 | \sqrt{2}/2
""".strip().splitlines() for pair in row.split("; ")]
ROLLOUT_HOSTILE = [
    "9**9**9**9", "9^{9^{9^{9^9}}}", "10**1000000000", "1e999999999", "99999999!", "9" * 100_000,
    "1/" + "9" * 498, "0." + "9" * 498, r"\frac{1}{0}", "__import__('os').abort()", "(" * 100_000,
    "{" * 499, r"\frac" * 100, r"\text{" * 80, r"\text{" * 60 + "}" * 60, r"\le" * 80 + "ft" * 80,
    "," * 499, "((1,2)," * 70, "(" * 248 + "1,1" + ")" * 248, " " * 499, r"\pm" * 166,
    r"\pm," * 120, "-" * 499, "\\", "", "\x00", "\ud800", "٣", "²", "½", "nan", "inf", "1_0",
    "0x10", ".", "+", "-", "/", "1/", "{}", r"\{\}",
]


def test_rollout_box_is_the_last_one_closed():
    """Case 18: the last closed box, whole, with its nested braces; none without one."""
    cases = {
        r"First \boxed{1}, no wait \boxed{2}": "2", r"\boxed{5": None, "the answer is 5": None,
        r"\boxed{1} then \boxed{5": "1", r"\boxed{\frac{1}{\sqrt{2}}}.": r"\frac{1}{\sqrt{2}}",
        r"\boxed{\{1, 2\}}": r"\{1, 2\}", r"\boxed{\left\{ x \right.}": r"\left\{ x \right.",
        r"a stray { and \fbox {7} }": "7", r"}} \boxed{3}": "3", r"\boxed{\boxed{4}}": "4",
        r"\boxed{6 \text{or \fbox{8}} 9}": "8", r"\boxed{}": "", r"\boxed{a\\}": r"a\\",
        r"so $\boxed 12$. As asked, in \boxed form": "12", r"so \boxed 5, as": "5",
        r"\boxed 5^2": None}
    assert {text: extract_boxed(text) for text in cases} == cases


@pytest.mark.parametrize("verify, answer, right, wrong", [
    (math_reward, "33", [r"\boxed{033}", r"\boxed{1}, no \boxed{33.0}"],
     ["the answer is 33", "33", r"\boxed{33", r"\boxed{}", ""]),
    (math_reward, "", [], [r"\boxed{}"]),
    (number_reward, "3", ["She has 5 - 2 = 3 apples left, so 3.", "10-3", "1, 2 and 3", "003"],
     ["no number", "", "3 or 6", "-3", "9**9**9**9"]),
    (number_reward, r"\$1234.5", ["a total of $1,234.50!", "so 1,234.5."], ["1,234", "234.5"]),
    (number_reward, "0.75", ["x is 3/4", r"equals \frac{3}{4}", ".75"], ["3", "4"]),
    (number_reward, "-7/2", ["It is -3.5.", "−3.5"], ["3.5"]),
    (number_reward, "50", ["50%", r"\boxed{50}", "#### 50", "about $50."], ["0.5"]),
    (number_reward, "1,000", ["1{,}000", r"\frac{2{,}000}{2}", r"\frac{ 3000 }{ 3 }", "3000 / 3",
                              "10^4/10", "10**3", "1000 cm^2", r"\boxed{1000\text{ cm}^{2}}"],
     ["1, 0", "1000^2", "2^{1000}"]),
    (number_reward, "5000000", ["5 Million", r"5\,\text{million}", "5 000 000 km^2", "5 millions"],
     ["5", "5 million and 1"]),
    (number_reward, "1.5", ["1½", "1 ½", "1 1/2", "3.0/2.0"], ["½", "2 000/3"]),
    (rollout.VERIFIERS["answer"], "34", [  # case 35
        "So.\nAnswer: 34", r"So.\nAnswer: \boxed{34}".replace(r"\n", "\n"), "**Answer:** $34$",
        "**Answer: 34**", "Answer:\n34", "Answer: 1\nAnswer: 34", "### Final answer: 34.",
        r"Answer: \(34\)"],
     ["Answer: 34\nAnswer: 35", "The answer is 34", "34", "", "Answer:", r"\boxed{34}",
      "Answer: 34 or 35", r"Answer: \boxed{34", "Answer: 34}", "Answer: " + "{" * 10**5]),
    (rollout.VERIFIERS["answer"], "z^*", [
        "Answer: z^*", "* Answer: z^*", "**Answer:** z^*", "**Answer: z^***",
        "_Answer:_ **$z^*$**.", "**Answer:**\n**z^***"],
     ["Answer: z", "**Answer: z^**", "Answer: z^**"]),
    (rollout.VERIFIERS["answer"], "5", [
        "- **Answer: 5**.", "Answer: **5**", "__Answer: 5__", "Answer:\n- 5", "Answer: - 5",
        "**Final Answer:**\n\\[\n\\boxed{5}\n\\]", "Answer:\n$$\n5\n$$", "1. **Answer:** 5",
        "### Final Answer:\n\n**Answer: 5**", "• Answer: 5", "+ Answer: `5`", "Answer: **5** cm",
        r"Answer: \fbox{5}"], ["Answer: 5**2", "Answer: $$\n6\n$$ 5", "Answer: -5"])])
def test_rollout_verdicts_by_hand(verify, answer, right, wrong):
    """The last box, the last number by its value, the last line `Answer: …`, boxed or not."""
    assert [verify(text, answer) for text in right + wrong] == [1.0] * len(right) + [-1.0] * len(
        wrong)


@pytest.mark.parametrize("same", ROLLOUT_NUMBERS + ROLLOUT_OTHERS)
def test_rollout_answers_same_by_hand(same):
    """Cases 23-26: all spellings are the first and the last one, in a box and on a line `Answer:`,
    a number also as the last one of a text; a second pass changes nothing."""
    for x in same:
        assert canonical(canonical(x)) == canonical(x) and same_answer(same[0], x), x
        for answer in (same[0], same[-1]):
            assert math_reward(rf"so \boxed{{{x}}}.", answer) == 1.0, (x, answer)
        assert answer_reward(f"First 7.\nAnswer: {x}", same[0]) == 1.0, x
        if same in ROLLOUT_NUMBERS and "=" not in x:
            assert number_reward(f"It is 7, no, it is {x}", same[0]) == 1.0, x


def test_rollout_answers_differ_by_hand():
    """Case 25 and its kind: what a mathematician tells apart is never equal. Rows do not meet."""
    for one, other in ROLLOUT_DIFFERENT:
        assert not same_answer(one, other) and not same_answer(other, one), (one, other)
    rows = [{canonical(x) for x in row} for row in ROLLOUT_NUMBERS + ROLLOUT_OTHERS]
    assert all(len(row) == 1 for row in rows) and len(set.union(*rows)) == len(rows)


def test_rollout_hostile_text_is_wrong_at_once_and_the_same_in_a_thread():
    """Case 19: no text raises, hangs or is evaluated, and a thread comes to the same verdicts."""
    long = [
        r"\boxed{" * 30_000, "{" * 200_000, r"\boxed" + " " * 200_000, "\\" * 200_001,
        "1," * 100_000, r"\boxed{" * 20_000 + "}" * 20_000, "1" * 200_000, "-" * 200_000,
        r"\frac{1" * 30_000]
    texts = [*long, *ROLLOUT_HOSTILE, *(rf"\boxed{{{text}}}" for text in ROLLOUT_HOSTILE),
             *(f"Answer: {text}" for text in ROLLOUT_HOSTILE)]

    def verdicts():
        return [f(x, "1024") for x in texts for f in (math_reward, number_reward, answer_reward)]

    here, there = verdicts(), []
    thread = threading.Thread(target=lambda: there.extend(verdicts()))
    thread.start()
    thread.join()
    assert here == there and set(here) == {-1.0}
    for text in ROLLOUT_HOSTILE:  # as the answer of a data set
        assert math_reward(r"\boxed{1024}", text) == number_reward("1024", text) == -1.0


def test_rollout_answers_of_noise():
    """Random LaTeX: nothing raises, each is the same as itself, the relation is symmetric."""
    pieces = r"\left \right. \frac \sqrt \text{ { } ( ) [ ] \{ \} , ; . / - + \pm \pi x e 1 10 234"
    pieces += r" = \in ^ _ ^{2} ^\circ % $ \$ \, \! \\ & and or cm million \begin{pmatrix} \cup ⁵"
    pieces = (pieces + r" \end{pmatrix} \times \le °C ٣ < > ").split(" ")
    rng, last = random.Random(0), "5"
    for _ in range(600):
        text = "".join(rng.choices(pieces, k=rng.choice([1, 2, 4, 8, 90])))
        assert same_answer(text, text), text
        assert same_answer(text, last) == same_answer(last, text), (text, last)
        last = text


def _answers_number(value):
    """Spellings of a fraction: in lowest terms or not, decimal, scientific, mixed, grouped."""
    p, q, sign = abs(value.numerator), value.denominator, "-" if value < 0 else ""
    out = [f"{p}/{q}", rf"\frac{{{p}}}{{{q}}}", rf"\dfrac{{{3 * p}}}{{{3 * q}}}", f"{p} / {q}"]
    if 10**9 % q == 0:
        decimal = Decimal(p) / Decimal(q)
        e = decimal.adjusted()
        m, d = (format(x, "f") for x in (decimal.scaleb(-e).normalize(), decimal))
        raised = str(e).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
        out += [d, rf"{m} \times 10^{{{e}}}", f"{m}e{e}", rf"{m}\cdot10^{{{e}}}", f"{m}E{e:+}",
                f"{m} × 10{raised}", rf"{decimal * 100:f}\%", rf"\frac{{{m}}}{{10^{{{-e}}}}}"]
        out += [f"{d}.0"] * (q == 1)
        out += [f"{decimal:,f}".replace(",", mark) for mark in ("{,}", r"\,", r",\!")]
    if q > 1 and p > q:
        out += [f"{p // q} {p % q}/{q}", rf"{p // q}\frac{{{p % q}}}{{{q}}}"]
    return [sign + x for x in out]


def _answers_several(rng, quarters):
    """Spellings of the tuple, interval, set, list and matrix of v/4, by kind."""
    a = [rng.choice(_answers_number(Fraction(v, 4))) for v in quarters]
    b = rng.sample(a, len(a))
    rows = [r"\begin{%smatrix} %s %s\end{%smatrix}" % (k, r" \\ ".join(a), end, k)
            for k, end in (("p", ""), ("b", r"\\"), ("p", r"\\ "))]
    return {
        "tuple": [f"({', '.join(a)})", rf"\left({','.join(a)}\right)", f"( {' ,'.join(a)} )"],
        "interval": [x % (*a[:2],) for x in ("[%s, %s)", r"\left[%s,%s\right)", r"x \in [%s,%s)")],
        "set": [rf"\{{{', '.join(a)}\}}", rf"\left\{{ {', '.join(b)} \right\}}"],
        "list": [", ".join(b), r" \text{ and } ".join(a), " or ".join(a), "; ".join(b)],
        "column": [*rows, "A = " + rows[0]],
        "row": [r"\begin{pmatrix}%s\end{pmatrix}" % " & ".join(a)]}


def _answers_generated(n):
    """n times (spellings of one answer, answers that are others) of every kind."""
    rng = random.Random(0)
    wraps = r"{} | ${}$ | \({}\) | {}. | x = {} | \left({}\right) | \displaystyle {} | \,{}\;"
    for _ in range(n):
        value = rng.choice([1, 1, -1]) * rng.choice([
            Fraction(rng.randrange(1, 10 ** rng.randrange(1, 9))),
            Fraction(rng.randrange(1, 99999), 10 ** rng.randrange(1, 6)),
            Fraction(rng.randrange(1, 200), rng.randrange(2, 40))])
        others = _answers_number(value + rng.choice([1, -1, Fraction(1, 7), -2 * value]))
        yield ([rng.choice(wraps.split(" | ")).format(x) for x in _answers_number(value)],
               rng.sample(others, 3))
        many = rng.sample(range(-50, 50), 4)
        kinds, changed = (_answers_several(rng, values) for values in (many[:3], many[1:]))
        for kind, same in kinds.items():
            yield same, changed[kind][:2] + [
                x[0] for k, x in kinds.items() if k != kind and {k, kind} != {"set", "list"}]


def test_rollout_answers_generated(monkeypatch):
    """Every respelling of a generated answer is right and every other answer wrong, both ways."""
    monkeypatch.setattr(rollout, "canonical", functools.cache(rollout.canonical))
    for same, others in _answers_generated(25):
        for x, y in itertools.product(same, same[-2:] + others):
            assert same_answer(x, y) is same_answer(y, x) is (y in same), (x, y)


def _rollout_file(tmp_path, *rows):
    """A JSONL file of these rows, of which bytes are lines already."""
    path = tmp_path / "problems.jsonl"
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return str(path)


def test_rollout_every_layout_and_answer_loads(tmp_path, capsys):
    """GSM8K, MATH, AIME, DAPO-Math and verl rows load; blank lines, BOM and CRLF do no harm. Cases
    22-24: a list of one, as JSON or as text, is that one; JSON numbers keep their digits; the forms
    are counted in one line."""
    layouts = rb"""
    {"question": "q1", "answer": "5 * 2 = 10\n#### 1,234"}

    {"problem": "q2", "solution": "$\\boxed{1}$, no: $\\boxed{\\frac{1}{2}}$."}
    {"problem": "q3", "answer": 33, "solution": "\\boxed{no}", "prompt": null}
    {"ID": "2024-I-1", "problem": "q4", "answer": "033"}
    {"prompt": [{"role": "user", "content": "2+2?"}], "reward_model": {"ground_truth": "34"}}
    {"prompt": "q6", "reward_model": {"style": "rule"}, "answer": 0, "question": "other"}
    {"question": "q7 \u2028 \u00e9", "answer": "so \\boxed{(1,2)}", "reward_model": null}
    """.strip().replace(b"\n", b"\r\n")
    chat = [{"role": "user", "content": "2+2?"}]
    expected = [("q1", "1,234"), ("q2", r"\frac{1}{2}"), ("q3", "33"), ("q4", "033"), (chat, "34"),
                ("q6", "0"), ("q7 \u2028 é", "(1,2)")]
    golds = {b'"[\\"76\\"]"': "76", b'["76"]': "76", b"[76]": "76", b'"[76]"': "76",
             b"\"['76']\"": "76", b"1e16": "1" + "0" * 16, b"0.00001": "0.00001", b"-0.0": "-0.0",
             b"4.5e33": "45" + "0" * 32, b'"4.5e33"': "4.5e33", b'"1/2"': "1/2", b'"yes"': "yes",
             b'"[0, 1]"': "[0, 1]", b'"[2.5]"': "2.5", b'"\\\\sqrt{2}"': r"\sqrt{2}"}
    rows = [b'{"question": "q", "reward_model": {"ground_truth": %s}}' % x for x in golds]
    path = _rollout_file(tmp_path, b"\xef\xbb\xbf" + layouts, *rows)
    expected += [("q", x) for x in golds.values()]
    assert load_problems(path) == [Problem(prompt, answer) for prompt, answer in expected]
    rollout.load_data(path, "", 1)
    assert capsys.readouterr().out.startswith(
        "answers: number 16 · fraction 2 · list 2 · text 1 · expression 1\n")
    with pytest.raises(ValueError, match="problems.jsonl: expected one JSON object per line"):
        load_problems(_rollout_file(tmp_path, b"", b" "))


@pytest.mark.parametrize("words, rows", [
    ("expected a JSON object, found broken JSON", [b'{"question": "q", ', b'{"a":' * 50_000]),
    (".*utf-8", [b"\xff\xfe"]),
    ("expected JSONL.*found a JSON list", [b"[" * 50_000, b'[{"question": "q", "answer": "1"}]']),
    ('expected a JSON object, found "text"', [b'"text"']),
    (".*prompt, problem, question; found text, answer", [{"text": "q", "answer": "1"}]),
    (".*answer, solution; found question, label", [{"question": "q", "label": 1}]),
    (".*reward_model.ground_truth, answer", [{"question": "q", "reward_model": "34"}]),
    (".*found none", [{}]),
    ("question: .*not empty", [{"question": " \n", "answer": "1"}]),
    ("question: .*found 5", [{"question": 5, "answer": "1"}]),
    ("question: .*in it", [{"question": x, "answer": "1"} for x in (
        "2 \times 3", "\theta", "\right)", "a \notin b", "\beta")]),
    (r"question: .*found '.x0crac' in it", [{"question": "Is \frac{1}{2} 1?", "answer": "1"}]),
    ("prompt: .*user", [{"prompt": x, "answer": "1"} for x in (
        [], ["q"], [{"role": "user"}], [{"role": "system", "content": "q"}],
        [{"role": "user", "content": " "}])]),
    ("answer: expected a text or a number", [
        {"question": "q", "answer": x} for x in (["1", "2"], True)]),
    ("answer: expected an answer", [{"question": "q", "answer": x} for x in ("5 #### ", "")]),
    ("solution: expected a closed", [{"problem": "q", "solution": x} for x in (
        r"\boxed{5", r"\boxed 3\frac{1}{2}", r"\boxed 2^{10}", r"\boxed 5cm")]),
    ("reward_model.ground_truth: expected a", [  # a gold that no reply can meet
        b'{"question": "q", "reward_model": {"ground_truth": 1e999999}}',
        *({"question": "q", "reward_model": {"ground_truth": x}} for x in (
            ["1", "2"], [], [["1"]], {"a": 1}, '["1", "2"]', "['1','2']", '["1"', '{"a": 1}', "[]",
            "[null]", True, float("nan"), float("inf"), "NaN", "null", " ", "5}", "{5",
            "\frac{1}{2}", "3 \times 5", r"\text{}", '["\\frac{1}{2}"]', "\theta", "2\tan x",
            "\rho", "\ne 5", "\nabla f", "\boxed{\theta}", "5\u200b", "\ufeff5", "\ud800",
            "\ue000", "5,", ",5", "1, 2,", "?", "-", "N/A", '"5"', "`5`", "# 5", "**5**",
            r"\\frac{1}{2}", "[1/2]", "[x]", "The answer is 5.", "５", "a #### 5\nmore",
            "\nparallel")),
        b'{"question": "q", "reward_model": {"ground_truth": "\\\\boxed{\\tau}"}}']),
    ("expected a JSON object, found broken", [
        b'{"question": "q", "answer": 1e99999999999999999999}'])])
def test_rollout_bad_line_is_named(tmp_path, words, rows):
    """A line that does not fit raises one sentence with file, line, expected and found."""
    for row in rows:
        path = _rollout_file(tmp_path, {"question": "q", "answer": "1"}, b"", row)
        with pytest.raises(ValueError, match="problems.jsonl, line 3: " + words) as error:
            load_problems(path)
        assert "\n" not in str(error.value) and len(str(error.value)) < 400


def _rollout_tokenizer(chat_template=None):
    tokenizer = task_tokenizer()
    tokenizer.chat_template = chat_template
    return tokenizer


def test_rollout_prompt_as_token_ids():
    """encode_prompt is a list of ids: the chat template's up to the reply, or the plain text's.
    Case 32: end-of-sequence tokens ($) at the end are taken off, others stay."""
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    plain, chat, ends = map(_rollout_tokenizer, (None, template, template + "$$"))
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "2+2?"}]
    text, talk = Problem("2+2?", "4"), Problem(messages, "4")
    for tokenizer, problem, instruction, expected in [
            (plain, text, "", "2+2?"), (plain, text, "Box it.", "2+2?\nBox it."),
            (plain, talk, "", "S\n\n2+2?"), (plain, Problem("2$2$$", "4"), "", "2$2"),
            (chat, text, "", "<user>2+2?</><assistant>"),
            (chat, talk, "Box it.", "<system>S</><user>2+2?\nBox it.</><assistant>"),
            (ends, text, "$", "<user>2+2?\n$</><assistant>")]:
        ids = encode_prompt(tokenizer, problem, instruction=instruction)
        assert type(ids) is list and all(type(i) is int for i in ids)
        assert tokenizer.decode(ids) == expected
    assert messages[-1]["content"] == "2+2?"


def test_rollout_data_that_repeats_or_is_too_long(tmp_path, capsys):
    """Case 29: prompts that stand twice are left out, so none is held out and trained on; those
    over max_prompt are counted and skipped, or refused; the split is the same every time."""
    rows = [{"prompt": str(n) * n, "answer": "2"} for n in (3, 4, 5, 6, 7, 8, 2, 1, 9)]
    rows += [*rows, {"prompt": "0" * 30, "answer": "2"}, {"prompt": "0" * 2, "answer": "2"}]
    os.mkdir(tmp_path / "few")
    file, other = _rollout_file(tmp_path, *rows), _rollout_file(tmp_path / "few", *rows[:3])
    train, held_out = rollout.load_data(file, "", 5)
    assert len({p.prompt for p in train + held_out}) == 11 and len(held_out) == 1
    assert "left out 9 of 20 problems" in capsys.readouterr().out
    assert rollout.load_data(file, "", 5) == (train, held_out)
    for data, eval_data, n, sizes in [(file, other, 7, [8, 3]), ("", "", 8, [2448, 8]),
                                      (other, "", 5, [2, 1])]:  # one is always held out
        assert [len(x) for x in rollout.load_data(data, eval_data, n)] == sizes
    with pytest.raises(ValueError, match="--data: expected 2 or more problems .* found 1"):
        rollout.load_data(_rollout_file(tmp_path, *rows[:2]), "", 5)
    encode = functools.partial(rollout.encode_prompts, max_prompt=9, instruction="")
    kept, ids = encode(task_tokenizer(), train + held_out, long_prompts="skip")
    assert [len(p.prompt) for p in kept] == [len(x) for x in ids] and max(map(len, ids)) == 9
    assert len(kept) == 10 and "skipped 1 of 11 prompts" in capsys.readouterr().out
    long = [p for p in train + held_out if len(p.prompt) > 9]
    for some, rule in ((train + held_out, "stop"), (long, "skip")):
        with pytest.raises(ValueError, match="--max-prompt: .* 1 of .*longer.* longest 30"):
            encode(task_tokenizer(), some, long_prompts=rule)
    with pytest.raises(ValueError, match="--data: .*chat template takes"):
        encode(_rollout_tokenizer("{{ 1 / 0 }}"), kept, long_prompts="skip")


def test_rollout_math_verify(monkeypatch):
    """Case 19: without the package the first call, whatever its text, is an error that names it. A
    question that hangs or kills the process is wrong, the next one is answered; in a thread."""
    fresh = functools.cache(rollout._math_verify_process.__wrapped__)
    monkeypatch.setattr(rollout, "_math_verify_process", fresh)
    monkeypatch.setattr(rollout, "MATH_VERIFY", "import a_package_that_nobody_has")
    for text in ("", r"\boxed{1}"):
        with pytest.raises(ImportError, match="pip install 'math-verify"):
            rollout.VERIFIERS["math_verify"](text, "1")
    monkeypatch.setattr(rollout, "MATH_VERIFY", (
        "import json\nprint('ready', flush=True)\nwhile True:\n"
        "    answer, boxed = json.loads(input())\n"
        "    while boxed == 'h': pass\n"
        "    print(1 / (boxed != 'd') and boxed == 'y', flush=True)\n"))
    monkeypatch.setattr(rollout, "MATH_VERIFY_SECONDS", 0.5)
    asked, verdicts = ("y", "n", "h", "y", "d", "y", "y" * 1000, "yes", "5"), []
    thread = threading.Thread(target=lambda: verdicts.extend(
        math_verify_reward(rf"\boxed{{{boxed}}}", "5.0") for boxed in asked))
    thread.start(), thread.join()
    fresh().kill(), fresh().wait()  # between two questions
    verdicts.append(math_verify_reward(r"\boxed{y}", "5.0")), fresh().kill()
    assert verdicts == [1.0, -1.0, -1.0, 1.0, -1.0, 1.0, -1.0, -1.0, 1.0, 1.0]


# ---- value_pretrain.py ---------------------------------------------------------------------------
def _value_pretrain_batch(n, seed=0):
    """n random trajectories, two to a prompt_id, with gaps; id 2 is padding and occurs inside."""
    rng, column = np.random.default_rng(seed), np.arange(16)
    p, r = rng.integers(1, 9, (2, n, 1))
    attention = (column >= 8 - p) & (column < 8 + r)
    mask = (attention[:, 8:] & (rng.random((n, 8)) > 0.3)) | (column[:8] == r - 1)
    tokens = np.where(attention, rng.integers(0, 32, (n, 16)), 2)
    arrays = tokens, attention, mask, np.arange(n) // 2, rng.choice([-1.0, 1.0], n), p[:, 0] > 4
    return Batch(*map(torch.from_numpy, arrays), logp_roll=torch.zeros(n, 8))


def _value_pretrain_pool(folder, n, seed=0):
    pool = vp.TrajectoryPool(folder)
    pool.append(_value_pretrain_batch(n, seed), 0)
    return pool


def _value_pretrain_bytes(path):
    return tuple((path / name).read_bytes() for name in ("tokens.bin", "index.bin"))


@_named("lr_at", [vp.lr_at, _copied_alone(vp.lr_at)])
def test_value_pretrain_lr_at(lr_at):
    """Straight up to peak at the end of the warm-up, down to final in the last step, never 0."""
    rates = [lr_at(s, 100) for s in range(100)]
    assert rates[:3] + rates[-1:] == pytest.approx([1e-5 / 3, 2e-5 / 3, 1e-5, 5e-6], rel=1e-12)
    assert rates[51] == pytest.approx(5e-6 + 2.5e-6 * (1 + math.cos(math.pi * 49 / 97)))
    for total, warmup in itertools.product(range(1, 80), (0.0, 0.03, 0.5, 1.0)):
        rates = [lr_at(s, total, peak=3.0, final=1.0, warmup=warmup) for s in range(total)]
        top = max(1, round(warmup * total)) - 1
        assert min(rates) > 0 and max(rates) == rates[top] == 3.0
        assert sorted(rates[:top]) == rates[:top] and sorted(rates[top:])[::-1] == rates[top:]
        assert rates[-1] == pytest.approx(1.0) or top + 1 == total


def test_value_pretrain_pool_layout_and_round_trip(tmp_path):
    """Sampled tokens are id, others ~id, padding is left out; rows come back however appended."""
    tokens = torch.tensor([[2, 5, 2, 6, 7, 0, 2, 2, 2, 2], [2, 2, 2, 9, 3, 4, 5, 6, 2, 2]])
    attention = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1, 1, 1, 0]])
    mask = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 0, 0, 1, 1, 0]])
    pool, sign = vp.TrajectoryPool(tmp_path), torch.tensor([1.0, -1.0])
    pool.append(Batch(tokens, attention, mask, torch.tensor([40, 41]), sign, sign < 0, mask), 7)
    stored = [~5, ~2, ~6, 7, 0, 2, ~9, 3, ~4, ~5, 6, 2]  # pad == eos == 2 inside is stored
    assert np.fromfile(tmp_path / "tokens.bin", "<i4").tolist() == stored and pool.origin == {}
    assert pool.index.tolist() == [(0, 40, 3, 3, 3, 7, 1.0, False), (6, 41, 1, 5, 3, 7, -1.0, True)]
    assert isinstance(pool.tokens, np.memmap) and isinstance(pool.index, np.memmap)
    batch, order = _value_pretrain_batch(40), np.arange(0, 39, 3)[::-1].copy()
    _value_pretrain_pool(tmp_path / "one", 40)
    for rows in torch.arange(40).split(7):
        vp.TrajectoryPool(tmp_path / "many").append(take(batch, rows), 0)
    assert _value_pretrain_bytes(tmp_path / "one") == _value_pretrain_bytes(tmp_path / "many")
    want = take(batch, torch.from_numpy(order))
    want = want.tokens, want.attention, want.mask, want.reward.float()
    for got, expected in zip(vp.TrajectoryPool.open(tmp_path / "many").batch(order, 2), want):
        assert torch.equal(got, expected) and got.dtype == expected.dtype


def test_value_pretrain_pool_torn_at_every_byte(tmp_path, monkeypatch):
    """Cut at any byte of the last append, the pool is as before, even if the next writer dies."""
    pool, folder, write = _value_pretrain_pool(tmp_path, 5), tmp_path / "torn", vp._write
    before, new = _value_pretrain_bytes(tmp_path), _value_pretrain_batch(1)
    pool.append(new, 1)
    after = _value_pretrain_bytes(tmp_path)
    dies = lambda path, at, data: 1 / 0 if path.name == "index.bin" and len(data) else write(
        path, at, data)
    cut = [[x[:k] for k in range(len(y), len(x))] for x, y in zip(after, before)]
    torn = [(tokens, index) for tokens in cut[0] for index in (before[1], after[1])]
    for k, state in enumerate([*torn, *((after[0], index) for index in cut[1])]):
        folder.mkdir()
        (folder / "tokens.bin").write_bytes(state[0]), (folder / "index.bin").write_bytes(state[1])
        pool = vp.TrajectoryPool.open(folder)
        assert (pool.tokens.tobytes(), pool.index.tobytes()) == before
        assert _value_pretrain_bytes(folder) == state   # a reader cuts nothing
        if k % 5 == 0:
            with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
                patch.setattr(vp, "_write", dies)
                pool.append(_value_pretrain_batch(9, seed=1), 0)
            assert (folder / "tokens.bin").stat().st_size > len(after[0])  # the tokens come first
            pool = vp.TrajectoryPool.open(folder)
            assert (pool.tokens.tobytes(), pool.index.tobytes()) == before
            pool.append(new, 1)
            assert _value_pretrain_bytes(folder) == after and len(pool) == 6
        shutil.rmtree(folder)


@pytest.mark.parametrize("message, call", [   # a pool of 16 rows, its folder and batch, a critic
    ("path: expected a folder", lambda p, d, b, c: p.open(d / "none")),
    ("a JSON object", lambda p, d, b, c: (d / "pool.json").write_text('{"') and p.open(d)),
    ("a JSON object", lambda p, d, b, c: (d / "pool.json").write_text("3") and p.open(d)),
    ("only .*index.bin", lambda p, d, b, c: (d / "tokens.bin").unlink() or p.open(d)),
    ("record 0", lambda p, d, b, c: (d / "index.bin").write_bytes(b"1" * 800) and p.open(d)),
    ("one writer", lambda p, d, b, c: _value_pretrain_pool(d, 1) and p.append(b, 0)),
    ("n: expected 1 … 16", lambda p, d, b, c: p.sample(17)),
    ("n: expected 1 … 4", lambda p, d, b, c: vp.balanced_draw(np.zeros(4, int), 0)),
    ("edges", lambda p, d, b, c: vp.coverage_table(p.index, [5, 5])),
    ("index", lambda p, d, b, c: vp.coverage_table(p.index[:0])),
    ("rows", lambda p, d, b, c: p.batch([])), ("step", lambda p, d, b, c: vp.lr_at(5, 5)),
    ("step", lambda p, d, b, c: vp.lr_at(-1, 5)),
    ("warmup", lambda p, d, b, c: vp.lr_at(0, 5, warmup=1.5)),
    ("held_out", lambda p, d, b, c: vp.split_by_prompt(np.arange(5), 1.0)),
    ("held_out", lambda p, d, b, c: vp.split_by_prompt(np.arange(5), -0.1)),
    ("folder: expected no", lambda p, d, b, c: vp.fill_pool(d, [("", 0)], 1, 1)),
    ("policies, each, at_once", lambda p, d, b, c: vp.fill_pool(d / "new", [("", 0)], 1, 0)),
    ("rows: .* a sampled token", lambda p, d, b, c: vp.pretrain(c, p, np.arange(0))),
    ("held_out: .* of 1 prompts", lambda p, d, b, c: vp.pretrain(c, p, np.arange(2))),
    ("epochs", lambda p, d, b, c: vp.pretrain(c, p, None, vp.Recipe(epochs=0))),
    ("freeze: .* none", lambda p, d, b, c: vp.pretrain(c, p, None, vp.Recipe(freeze="x"))),
    *((message, lambda p, d, b, c, name=name, change=change: p.append(dataclasses.replace(
        b, **{name: change(getattr(b, name))}), 0)) for name, message, change in (
            ("attention", "batch: expected attention", lambda a: a[:, 1:]),
            ("attention", "a prompt .* row 0", lambda a: a & (torch.arange(16) > 7)),
            ("mask", "batch.mask", torch.ones_like), ("prompt_id", "shape", lambda p: p[:, None]),
            ("truncated", "shape", lambda t: t[:1]), ("reward", "shape", lambda r: r[:2]),
            ("reward", "finite", lambda r: r * math.nan), ("tokens", "batch.tokens", torch.neg),
            ("tokens", "batch.tokens", lambda t: t + 2**31)))])
def test_value_pretrain_refuses(tmp_path, message, call):
    """Bad arguments, batches and damage are one sentence, before any work: no record is lost."""
    pool, critic = _value_pretrain_pool(tmp_path, 16), _tiny_critic()
    before = pool.index.tolist()
    with pytest.raises(ValueError, match=message):
        call(pool, tmp_path, _value_pretrain_batch(16), critic)
    assert "record" in message or pool.index.tolist() == before
    assert not (tmp_path / "none").exists() and all(p.requires_grad for p in critic.parameters())


def test_value_pretrain_fill_pool(tmp_path, monkeypatch, capsys):
    """Labels are positions, chunks at most at_once; a killed run keeps chunks and origin."""
    sizes, origin = [], {"tokenizer": "é"}
    policies = [(name, lambda n: sizes.append(n) or _value_pretrain_batch(
        n if len(sizes) != 8 else 1 / 0)) for name in ("weak", "strong")]
    pool = vp.fill_pool(tmp_path / "a", policies, 7, 3, origin=origin)
    assert sizes == [3, 3, 1] * 2 and pool.index["policy"].tolist() == [0] * 7 + [1] * 7
    assert sorted(os.listdir(pool.path)) == ["index.bin", "pool.json", "tokens.bin"]
    with pytest.raises(ZeroDivisionError):
        vp.fill_pool(tmp_path / "b", policies, 7, 3, origin=origin)
    killed = vp.TrajectoryPool.open(tmp_path / "b")
    assert len(killed) == 3 and killed.origin == origin == pool.origin
    assert len(vp.fill_pool(tmp_path / "c", policies, 5, 2, writer=False)) == 0
    assert sizes[8:] == [2, 2, 1] * 2 and not (tmp_path / "c/pool.json").exists()
    monkeypatch.setattr(sys, "argv", ["value_pretrain.py", "--pool", str(tmp_path / "a")])
    vp.main()
    assert "14 trajectories" in capsys.readouterr().out


def test_value_pretrain_coverage_table():
    """Cell for cell the table is what counting one trajectory at a time gives."""
    rng, index = np.random.default_rng(0), np.zeros(300, vp.RECORD)
    index["sampled"], index["reward"] = rng.integers(1, 50, 300), rng.choice([-1, 1], 300)
    index["policy"] = rng.choice([-3, 0, 8], 300)
    for edges, columns in ((None, 8), ([], 1), ([10], 2), ([5, 6, 49, 80], 5)):
        table = vp.coverage_table(index, edges)
        assert len(table) == 3 * columns
        for c in table:
            inside = (c.low < index["sampled"]) & (index["sampled"] <= (c.high or 10**9))
            right = index["reward"][inside & (index["policy"] == c.policy)] > 0
            assert c.count == len(right)
            assert c.share == right.mean() if len(right) else math.isnan(c.share)
    cells = (0, 0, 24_000, 4, 0.75), (0, 24_000, None, 1000, 0.05), (1, 24_000, None, 1000, 0.618)
    text = vp.format_coverage([vp.Cell(*c) for c in cells]).splitlines()   # S3AC §3.3
    assert text[1].split() == "≤ 24,000 75.0 % (4) – 75.0 % (4)".split()
    assert text[2].split() == "> 24,000 5.0 % (1,000) 61.8 % (1,000) 33.4 % (2,000)".split()


def test_value_pretrain_draw_is_balanced():
    """All cells give the same, up to one, or all they have; coverage balances length × outcome."""
    rng, index = np.random.default_rng(0), np.zeros(2000, vp.RECORD)
    index["sampled"], index["reward"] = rng.integers(1, 90, 2000), rng.choice([-1, -1, 1], 2000)
    cell = rng.choice([-5, 0, 3, 4, 70], 2000, p=[0.6, 0.3, 0.08, 0.015, 0.005])
    names, have = np.unique(cell, return_counts=True)
    for n in (1, 2, 7, 40, 100, 500, 1999, 2000):
        rows = vp.balanced_draw(cell, n, seed=n)
        gave = (cell[rows][:, None] == names).sum(0)
        assert (np.diff(rows) > 0).all() and len(rows) == n
        assert ((gave == have) | (gave >= gave.max() - 1)).all()
    hits = sum(np.bincount(vp.balanced_draw(np.ones(20), 5, s), minlength=20) for s in range(800))
    assert hits.sum() == 4000 and abs(hits - 200).max() < 60   # 200 ± 12: uniform within a cell
    cell = 2 * np.searchsorted([30, 60], index["sampled"]) + (index["reward"] > 0)
    rows = vp.coverage_sample(index, 300, edges=[30, 60], seed=4)
    assert np.array_equal(rows, vp.balanced_draw(cell, 300, 4))
    assert np.bincount(cell[rows]).tolist() == [50] * 6


def test_value_pretrain_split_by_prompt(tmp_path):
    """No prompt is on both sides; an epoch is all other rows that have a sampled token."""
    batch, pool = _value_pretrain_batch(102), vp.TrajectoryPool(tmp_path)   # 51 prompts
    batch.mask[100:] = False
    pool.append(batch, 0)
    for share, n in ((0.2, 10), (1e-9, 1), (0.0, 0)):
        recipe = vp.Recipe(epochs=2, batch_size=16, held_out=share, seed=1)
        batches, test = vp._plan(pool, None, recipe, 2)
        assert len({i // 2 for i in test}) == n and len(test) == 2 * n
        assert sorted(np.concatenate([*batches, test, test])) == sorted([*range(100)] * 2)
    assert all(len(b) % 2 == 0 for b in batches) and len(batches) == 14


@pytest.mark.parametrize("family, marks, per_layer, config", [
    ("llama", ["self_attn"], 4, {}), ("qwen3", ["self_attn"], 6, {"head_dim": 8}),
    ("qwen3_moe", ["self_attn", "mlp.gate."], 7,
     dict(head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)),
    ("mixtral", ["self_attn", "mlp.gate."], 5, {"num_local_experts": 4}),
    ("gpt2", [".attn."], 4, dict(n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0))])
def test_value_pretrain_freeze_by_name(family, marks, per_layer, config):
    """Frozen are attention, routers, the vision tower; no gate_proj, expert, norm or head."""
    critic = _tiny_critic(family=family, **config)
    names, frozen = dict(critic.named_parameters()), vp.freeze_for_pretraining_(critic)
    assert frozen == [n for n in names if any(m in n for m in marks)]
    assert len(frozen) == 2 * per_layer
    assert frozen == [n for n, p in names.items() if not p.requires_grad]
    stay = ["a.post_attention_layernorm", "a.mlp.gate_proj", "a.mlp.shared_expert_gate"]
    names = [*stay, "visual.mlp.fc1", "vision_tower.norm", "vision_model.embeddings", "moe.router",
             "linear_attn.in_proj", "self_attention.dense", "cross_attn.q_norm"]
    backbone = SimpleNamespace(named_parameters=lambda prefix: [(n, nn.Parameter()) for n in names])
    assert vp.freeze_for_pretraining_(SimpleNamespace(backbone=backbone)) == names[3:]
    del names[3:]
    with pytest.raises(ValueError, match="found none in SimpleNamespace"):
        vp.freeze_for_pretraining_(SimpleNamespace(backbone=backbone))


def test_value_pretrain_micro_batches_and_ranks_are_one_batch(tmp_path):
    """At any token budget, on 1 or 2 ranks: every V and R of one padded batch once, and its EV."""
    pool, critic = _value_pretrain_pool(tmp_path, 12), _tiny_critic()
    rows = np.random.default_rng(0).permutation(12)[:10]
    tokens, attention, mask, reward = pool.batch(rows)
    value = response(critic(tokens, attention), mask.shape[1])
    target = reward[:, None].double().expand_as(value)
    pairs = lambda v, R, m: torch.stack([v[m], R[m]])[:, v[m].argsort()]
    ev = explained_variance(value, target, mask)
    for budget, world in ((1, 1), (25, 1), (25, 2), (10**6, 2)):
        recipe = vp.Recipe(token_budget=budget)
        parts = [x for rank in range(world)
                 for x in vp.value_parts(critic, pool, rows, recipe, rank=rank, world=world)]
        assert all(len(v) == 1 or v.numel() < budget for v, *_ in parts)
        v, R = torch.cat([pairs(v, R, m) for v, R, m, _ in parts], 1)
        got, want = pairs(v, R, v != math.inf), pairs(value, target, mask)
        torch.testing.assert_close(got, want, atol=1e-12, rtol=0)
        assert vp.held_out_ev(critic, pool, rows, recipe) == pytest.approx(ev, abs=1e-6)
    for none in (rows[:0], np.flatnonzero(pool.index["reward"] > 0)):
        assert math.isnan(vp.held_out_ev(critic, pool, none))


@pytest.mark.parametrize("freeze, still", [
    ("attention", "self_attn"), ("backbone", "backbone"), ("none", "nothing")])
def test_value_pretrain_is_the_plain_loop(tmp_path, freeze, still):
    """Per step: lr_at, mean loss, clip, AdamW; EV after 1, 2, 4, … steps; frozen keep still."""
    pool, critic, plain = _value_pretrain_pool(tmp_path, 12), _tiny_critic(), _tiny_critic()
    start = copy.deepcopy(plain.state_dict())
    stats = vp.pretrain(critic, pool, None, vp.Recipe(
        epochs=5, batch_size=12, token_budget=40, peak=1e-2, final=1e-3, max_norm=0.05, held_out=0,
        freeze=freeze), progress=False)
    learning = [p for n, p in plain.named_parameters() if still not in n]
    optimizer = torch.optim.AdamW(learning, betas=(0.9, 0.999), weight_decay=0.01)
    tokens, attention, mask, reward = pool.batch(np.arange(12))
    for step in range(5):
        optimizer.param_groups[0]["lr"] = vp.lr_at(step, 5, peak=1e-2, final=1e-3)
        optimizer.zero_grad()
        value = response(plain(tokens, attention), mask.shape[1])
        loss = ((value - reward[:, None]) ** 2 / 2)[mask].mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(learning, 0.05)
        optimizer.step()
        curve = [stats["curve"][name][step] for name in ("loss", "grad_norm")]
        assert curve == pytest.approx([loss.item(), norm.item()], rel=1e-5)
    for (name, p), q in zip(critic.named_parameters(), plain.parameters()):
        assert torch.allclose(p, q, atol=1e-7) and p.requires_grad and p.grad is None
        assert torch.equal(p, start[name]) == (name in stats["frozen"]) == (still in name)
    assert stats["tokens"] == 5 * mask.sum() and stats["clip_share"] == 1
    assert [done for done, _ in stats["curve"]["ev"]] == [0, 1, 2, 4, 5]


def test_value_pretrain_learns_the_same_again(tmp_path):
    """Where the prompt tells R, EV of unseen prompts goes to 1; the same seed, the same critic."""
    batch, pool, weights = _value_pretrain_batch(120), vp.TrajectoryPool(tmp_path), []
    batch.tokens[:, 7], batch.attention[:, :7] = batch.reward.long() + 4, False
    pool.append(batch, 0)
    recipe = vp.Recipe(12, 16, peak=1e-2, final=1e-3, held_out=0.2, freeze="none", split=True)
    for dtype in (None, None, torch.bfloat16):
        critic = _tiny_critic(torch.float32)
        stats = vp.pretrain(critic, pool, None, recipe._replace(autocast_dtype=dtype))
        assert stats["ev_before"] < 0.3 and stats["ev_after"] > 0.8 and stats["steps"] == 72
        weights.append(critic.head.weight)
    assert torch.equal(*weights[:2]) and not torch.equal(*weights[1:])
    assert weights[2].dtype == torch.float32 and stats["loss_last"] < stats["loss_first"] / 2


def test_value_pretrain_skips_nonfinite_and_stops(tmp_path):
    """A step with a NaN loss changes nothing and is counted; five in a row stop the run."""
    pool, critic, good = _value_pretrain_pool(tmp_path, 16), _tiny_critic(), iter(
        [0, 1, 0, 0, 0, 0, 1, 0])   # and none after these steps
    critic.head.register_forward_hook(
        lambda module, hidden, out: out if next(good, 0) else out * math.nan)
    recipe = vp.Recipe(batch_size=2, epochs=1, held_out=0, peak=1e-2)
    stats = vp.pretrain(critic, pool, None, recipe, progress=False)
    assert stats["skipped_nonfinite"] == 6 and stats["steps"] == len(stats["curve"]["lr"]) == 2
    assert math.isfinite(stats["loss_last"])
    start = copy.deepcopy(critic.state_dict())
    with pytest.raises(FloatingPointError, match="5 times in a row"):
        vp.pretrain(critic, pool, None, recipe, progress=False)
    for name, p in critic.named_parameters():
        assert torch.equal(p, start[name]) and p.isfinite().all()
        assert p.requires_grad and p.grad is None


# ---- genac.py ------------------------------------------------------------------------------------
def _genac_bits(*rows):
    return torch.tensor([[c == "1" for c in row] for row in rows])


def _genac_sampler(texts, prompts_seen):
    """A sampler that gives these texts, whatever it is asked, and notes what it is asked."""
    def sampler(model, prompts, *, pad_id, **limits):
        tokenizer = rollout.task_tokenizer()
        prompts_seen.extend(map(tokenizer.decode, prompts))
        replies = tokenizer([text + "$" for text in texts[: len(prompts)]]).input_ids
        return *genac._pad_outside(prompts, replies, pad_id), None
    return sampler


def _genac_critic(model=None, rate=0.4, **fields):
    tokenizer, success = rollout.task_tokenizer(), genac.RunningSuccess()
    success.value = rate
    fields = dict(template=genac.COMPACT, context=256, max_new_tokens=96) | fields
    return genac.GenCritic(model or nn.Linear(1, 1), tokenizer, tokenizer,
                           [tokenizer.eos_token_id], success, "0.2M", **fields)


def _genac_tiny():
    eos = rollout.task_tokenizer().eos_token_id
    return _tiny_model(AutoModelForCausalLM, vocab_size=95, hidden_size=32, initializer_range=0.3,
                       eos_token_id=eos, pad_token_id=eos).eval()


def _genac_traces(n):
    text = "a0b7c4d1e8f5g2h9"
    return [(genac.State("+7!h=3", text[: 3 * i % 16], "0.2M", 0.4),
             f"{text[: 5 * i % 14]}=<answer>{i % 11}</answer>") for i in range(n)]


def _genac_grad(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("parse, R_v", [
    (genac.parse_score, genac.value_reward),
    (_copied_alone(genac.parse_score), _copied_alone(genac.value_reward))])
def test_genac_score_and_reward(parse, R_v):
    """A score is an integer 0 … 10 in the last closed tag (case 20); E R_v is largest at v̂ = p."""
    table = {f"<answer>{k}</answer>": k / 10 for k in range(11)} | dict.fromkeys((
        "7", "", "<answer>7", "7</answer>", "</answer>7<answer>",
        "<answer>3</answer> <answer>x</answer>",
        *(f"<answer>{x}</answer>" for x in ("11", "seven", "-1", "7.5", "", "٧", "07")))) | {
        "<answer> 10\n</answer>$": 1.0, "<answer>3</answer> no, <answer>8</answer>": 0.8,
        "<answer><answer>6</answer>": 0.6, "<answer>4</answer> then <answer>": 0.4}
    assert {text: parse(text) for text in table} == table
    grid = [k / 10 for k in range(11)]
    for p in grid + [0.14, 0.26, 0.97]:
        best = max(grid, key=lambda v: p * R_v(1, v) + (1 - p) * R_v(0, v))
        assert best == min(grid, key=lambda v: abs(v - p))
    assert R_v(1, 0.7) == pytest.approx(0.91) and R_v(0, None) == R_v(1, None) == 0
    success = genac.RunningSuccess()  # the first update sets it; then v ← 0.9 v + 0.1 mean
    assert success.value is None and success.update(0.5) == 0.5
    assert success.update(torch.tensor([1, 1, 0, 1])) == success.value == pytest.approx(0.525)


@pytest.mark.parametrize("template", [genac.ENGLISH, genac.COMPACT])
def test_genac_prompt_shows_the_icc_fields(template):
    """ICC shows size, rate, ability; without it, or without a rate, none of the three."""
    fields = dict(model_size="1.5B", success_rate=0.375, template=template)
    prompt = r"{icc} \frac{1}"
    full, bare = (genac.critic_prompt(prompt, "a0b7", icc=icc, **fields) for icc in (True, False))
    assert bare == genac.critic_prompt(prompt, "a0b7", **fields | {"success_rate": None})
    assert all(text in full and text in bare for text in (prompt, "a0b7"))
    for text in ("1.5B", "0.38", *(["Ability", "Facts", "skill"] if template.ability else [])):
        assert full.count(text) == 1 and text not in bare


_ONES, _STATE = torch.ones(2, 3), genac.State("+7!z=3", "a0b7", "0.2M", 0.4)
_ask = functools.partial(genac.critic_prompt, "q", "p", model_size="1B")


@pytest.mark.parametrize("message, call", [
    ("r: expected an outcome", lambda: genac.value_reward(-1, 0.5)),
    ("success: expected", lambda: genac.RunningSuccess().update(math.nan)),
    ("momentum: expected", lambda: genac.RunningSuccess(1.0)),
    *((r"template.text: .*no \{%s\}" % x, lambda x=x: _ask(success_rate=0.4, template=(
        genac.ENGLISH._replace(text=genac.ENGLISH.text.replace("{%s}" % x, "")))))
      for x in ("question", "prefix", "icc", "ability")),
    ("template.icc: .*no {success_rate}", lambda: _ask(
        success_rate=0.4, template=genac.COMPACT._replace(icc="{model_size}"))),
    *(("success_rate: expected", lambda x=x: _ask(success_rate=x)) for x in (1.2, math.nan)),
    ("width", lambda: genac.segment_starts(_ONES, width=0)),
    ("ends: expected shape", lambda: genac.segment_starts(_ONES, _ONES[:1])),
    ("delimiter: expected", lambda: genac.delimiter_ids(rollout.task_tokenizer(), "ab")),
    ("v_hat: expected 6", lambda: genac.segment_values([0.5], _ONES, _ONES, None)),
    ("fallback: expected", lambda: genac.segment_values([None] * 6, _ONES, _ONES, None)),
    ("context: expected room for a prompt of 17 tokens", lambda: genac.encode_state(
        _genac_critic(context=50, max_new_tokens=40), _STATE)),
    ("advantage: expected", lambda: genac.reinforce_loss(_ONES, _ONES[:1, 0], _ONES)),
    ("logp, mask", lambda: genac.sft_loss(_ONES, _ONES[:1])),
    ("baseline: expected", lambda: genac.reply_advantage(_ONES[0], baseline="median")),
    ("traces: expected at least", lambda: genac.sft(_genac_critic(), [], None))])
def test_genac_refusals(message, call):
    """Bad input is one sentence that names the argument."""
    with pytest.raises(ValueError, match=message):
        call()


def test_genac_token_advantages_are_those_of_the_segment_process():
    """A token's advantage is GAE's where each segment is one action; λ = 1 is GAE over tokens."""
    starts, mask = _genac_bits("10101"), _genac_bits("11111")
    value = genac.segment_values([0.5, 0.2, None], starts, mask, 0.9)
    assert value[0].tolist() == pytest.approx([0, 0, -0.6, -0.6, 0.8])
    A = genac.spread_segments(gae.gae(value, torch.ones(1), starts, 0.5), starts, mask)
    assert A[0].tolist() == pytest.approx([0.15, 0.15, 1.5, 1.5, 0.2])
    late = genac.spread_segments(value + 1, _genac_bits("00100"), mask)[0]
    assert late.tolist() == pytest.approx([0, 0, 0.4, 0.4, 0.4])  # nothing before a start
    draw, ends, outcome, mask = _random(20, 37)
    R = outcome[:, 0].sign()
    starts = genac.segment_starts(mask, ends > 0.2, width=2, at_most=6)
    v_hat = (draw[starts].sigmoid() * 10).round().div(10).tolist()
    value = genac.segment_values(v_hat, starts, mask, None).double()
    assert value[starts].tolist() == pytest.approx([2 * v - 1 for v in v_hat])
    for lam in (0.0, 0.7, 1.0):
        out = genac.spread_segments(gae.gae(value, R, starts, lam), starts, mask)
        for b in range(20):
            V, segment = value[b, starts[b]][None], (starts[b].cumsum(0) - 1).clamp_min(0)
            A = gae.gae_loop(V, R[b : b + 1], torch.ones_like(V), lam)[0]
            want = A[segment] if len(A) else torch.zeros(37).double()  # row 0 is empty
            torch.testing.assert_close(out[b], torch.where(mask[b], want, 0.0))
    torch.testing.assert_close(out, gae.gae(value, R, mask, 1.0))


def test_genac_segment_starts():
    """By width, delimiter, surprise; what comes at t or later changes no start up to t."""
    mask, starts = _genac_bits("1111111", "1100111"), genac.segment_starts
    same = lambda x, *rows: torch.equal(x, _genac_bits(*rows))
    assert same(starts(mask, width=3), "1001001", "1000010")
    ends = genac.ends_by_delimiter(torch.tensor([[5, 9, 9, 5, 5, 9, 5]] * 2), [9])
    assert same(starts(mask, ends), "1011001", "1000101")
    assert same(starts(mask, ends, width=2), "1010001", "1000101")
    logp = [[math.log(p) for p in (0.1, 0.9, 0.2, 0.19, 0.9, 0.9, 0.1)]]  # 0.2 is not below 0.2
    logp = torch.tensor(logp, dtype=torch.float64)
    assert same(starts(mask[:1], genac.ends_by_surprise(logp)), "1100100")
    assert starts(torch.ones(1, 100)).sum() == 16 and starts(torch.ones(2, 64), width=4).sum() == 32
    mask, tokenizer = _genac_bits("11111111", "11011000"), rollout.task_tokenizer()
    assert genac.quarters(_genac_bits("10101010", "11011000"), mask) == [0, 1, 2, 3, 0, 1, 2, 3]
    assert tokenizer.decode(genac.delimiter_ids(tokenizer, "=")) == "="
    ends, *_, mask = _random(8, 30)
    for t in range(30):
        other = torch.cat([ends[:, :t], -ends[:, t:]], 1)
        one, two = (starts(mask, x > 0.5, width=2)[:, : t + 1] for x in (ends, other))
        assert torch.equal(one, two)


@pytest.mark.parametrize("rate, facts, middle", [(0.4, "0.2M,0.40", -0.2), (None, "", 0.0)])
def test_genac_ask_values_replies_and_counts(rate, facts, middle):
    """An unparsable reply takes the running rate, or V = 0; the actor's tokenizer reads."""
    critic, seen = _genac_critic(rate=rate), []
    critic.actor_tokenizer = argparse.Namespace(decode=lambda ids, **options: (
        critic.tokenizer.decode([i - 3 for i in ids], **options)))
    rows = critic.tokenizer(["a0b7c4d1$", "a1$"]).input_ids
    tokens, _, mask = genac._pad_outside([[], []], rows, 0)
    texts = [f"{x}</answer>" for x in ("<answer>9", "<answer>11", "<answer>1", "x<answer>0")]
    value, replies, stats = genac.ask(
        critic, ["+7!d=3", "+1!a=0"], tokens + 3, mask, genac.segment_starts(mask, width=4),
        _genac_sampler(texts, seen))
    assert seen == [f"|{facts}|+7!d=3", f"a0b7|{facts}|+7!d=3", f"a0b7c4d1|{facts}|+7!d=3",
                    f"|{facts}|+1!a=0"]
    expected = [[0.8] * 4 + [middle] * 4 + [-0.8], [-1.0] * 3 + [0.0] * 6]
    torch.testing.assert_close(value, torch.tensor(expected))
    assert replies.v_hat == [0.9, None, 0.1, 0.0] and replies.texts == texts
    assert critic.success.value == rate and stats["unparsable"] == (1, 4)
    assert stats["score"] == (pytest.approx(1.0), 3) and stats["prompt_truncated"] == (0, 4)
    assert stats["reply_tokens"] == (sum(map(len, texts)) + 4, 4)


def test_genac_long_texts_are_cut_and_silence_stops():
    """A prompt loses the response's start, a trace its own; silence ends in an error."""
    critic = _genac_critic(context=60, max_new_tokens=40, patience=3)
    state, text = genac.State("+7!z=3", "a0b7c4d1e8f5", "0.2M", 0.4), critic.tokenizer.decode
    ids, cut = genac.encode_state(critic, state)
    assert cut and text(ids) == "8f5|0.2M,0.40|+7!z=3"
    trace = "a0" * 30 + "<answer>7</answer>"
    tokens, _, mask, cuts = genac.traces_batch(critic, [(state, trace)])
    assert text(tokens[0, -40:]) == (trace + "$")[-40:] and mask.tolist() == [[True] * 40]
    assert cuts == 1 and text(genac.encode_chat(critic.tokenizer, "a0$")) == "a0"
    states = [state, state._replace(prefix="a0b")]
    ask = lambda reply: genac.ask_states(critic, states, _genac_sampler([reply] * 2, []))[1]
    for reply in ("x", "x", "<answer>1</answer>", "x", "x"):  # one good reply starts the count anew
        stats = ask(reply)
    assert stats["prompt_truncated"] == (1, 2) and stats["prompt_tokens"] == (40, 2)
    with pytest.raises(RuntimeError, match="no parsable reply in 3 calls.*--traces"):
        ask("x")


@pytest.mark.parametrize("baseline, scale", [("none", 1), ("mean", 2 / 3), ("leave-one-out", 1)])
def test_genac_gradient_by_exact_enumeration(baseline, scale):
    """Over all 27 triples of replies 0, 10, 11 the gradient is that of E[R_v], or 1 − 1/n of it."""
    z = torch.tensor([0.5, -0.2], dtype=torch.float64, requires_grad=True)
    reward, mask = torch.tensor([0.9, 0.1, 0.6], dtype=torch.float64), _genac_bits("10", "11", "11")
    logp = torch.log_softmax(z, 0)[torch.tensor([[0, 1], [1, 0], [1, 1]])]
    p = torch.where(mask, logp, 0.0).sum(1).exp()
    (exact,) = torch.autograd.grad(p @ reward, z, retain_graph=True)
    total = torch.zeros(2, dtype=torch.float64)
    for replies in map(list, itertools.product(range(3), repeat=3)):
        A = genac.reply_advantage(reward[replies], baseline=baseline)
        loss, _ = genac.reinforce_loss(logp[replies], A, mask[replies])
        total -= p[replies].prod() * torch.autograd.grad(loss, z, retain_graph=True)[0]
    assert exact.norm() > 0.1 and torch.allclose(total, scale * exact, atol=1e-12)
    A = genac.reply_advantage(reward, torch.tensor([7, 2, 7]), baseline="leave-one-out")
    assert A.tolist() == pytest.approx([0.3, 0.1, -0.3])  # one alone in its group keeps its reward
    assert genac.sft_loss(torch.tensor([[-1., -2], [-3, 9]]), _genac_bits("11", "10"))[0] == 2


def _genac_rank(rank, size, path):
    """Save .grad and sums after SFT on one trace (a rank has no row), then REINFORCE on 11."""
    dist.init_process_group("gloo", f"file://{path}.store", rank=rank, world_size=size)
    critic = _genac_critic(_genac_tiny())
    tokens, attention, mask, _ = genac.traces_batch(critic, _genac_traces(11))
    loss_of = lambda x, m, rows: genac.sft_loss(x, m)
    sums = genac.backward(critic, tokens[:1], attention[:1], mask[:1], loss_of)
    out = [sums["loss"], _genac_grad(critic.model)]
    replies = genac.Replies(tokens, attention, mask, [], [i / 10 for i in range(11)])
    sums = genac.reinforce_backward(critic, replies, torch.arange(11) % 2, token_budget=300)
    if rank == size - 1:
        torch.save([*out, _genac_grad(critic.model), sums["logp"], sums["reward"]], path)
    dist.destroy_process_group()


def test_genac_ranks_and_micro_batches_do_not_change_the_gradient(tmp_path):
    """One pass = micro-batches = two ranks with a share each; gradients are added to .grad."""
    critic, grads, path = _genac_critic(_genac_tiny()), [], str(tmp_path / "grad")
    tokens, attention, mask, _ = genac.traces_batch(critic, _genac_traces(11))
    logp = lambda: genac.reply_logp(critic.model, tokens, attention, mask.shape[1])
    R_v = torch.tensor([genac.value_reward(i % 2, i / 10) for i in range(11)])
    for loss in (lambda: genac.sft_loss(logp()[:1], mask[:1])[0],
                 lambda: genac.reinforce_loss(logp(), R_v, mask)[0]):
        loss().backward()
        grads.append(_genac_grad(critic.model))
    _genac_rank(0, 1, path + "1")
    torch.multiprocessing.spawn(_genac_rank, (2, path + "2"), nprocs=2)
    for sft, *two, per_token, reward in (torch.load(path + size) for size in "12"):
        assert all(x.norm() > 0.01 and torch.allclose(x, y, atol=1e-4) for x, y in zip(grads, two))
        assert (sft[1], per_token[1]) == (mask[0].sum(), mask.sum())
        assert tuple(map(float, reward)) == pytest.approx((R_v.sum().item(), 11))


def test_genac_trainer_scores_as_the_sampler_did():
    """reply_logp of sampled replies is the sampler's own log-prob, at its temperature."""
    model, tokenizer = _genac_tiny(), rollout.task_tokenizer()
    eos, prompts = tokenizer.eos_token_id, tokenizer(["a0b7|0.2M,0.40|+7!d=3", "|+1!a=1"]).input_ids
    tokens, attention, mask, logp = rollout.generate(
        model, prompts, max_new_tokens=9, temperature=0.7, eos_id=eos, pad_id=eos,
        generator=torch.Generator().manual_seed(0))
    again = genac.reply_logp(model, tokens, attention, mask.shape[1], 0.7)
    assert torch.allclose(again[mask], logp[mask], atol=1e-4)


def test_genac_sft(monkeypatch):
    """Each epoch holds every trace once; the rate rises, falls over the last third, is put back."""
    critic, traces, rates, parts = _genac_critic(_genac_tiny()), _genac_traces(10), [], []
    optimizer, whole = FiniteAdamW(critic.model, 3e-3), genac.traces_batch
    run = lambda **how: genac.sft(critic, traces, optimizer, batch_size=4, progress=False, **how)
    step = optimizer.step_if_finite
    optimizer.step_if_finite = lambda norm: (
        rates.append(optimizer.param_groups[0]["lr"]) or step(norm if len(rates) != 2 else math.nan)
    )
    monkeypatch.setattr(genac, "traces_batch", lambda *x: parts.append(x[1]) or whole(*x))
    log = run(seed=None, epochs=7 / 3)
    assert [len(part) for part in parts] == [4, 4, 2, 4, 4, 2, 4]
    assert sum(parts[:3], []) == traces and sum(parts[3:6], []) == traces
    assert rates == pytest.approx([3e-3 * min(1, 3 * (1 - step / 7)) for step in range(7)])
    assert [row["skipped_nonfinite"] for row in log] == [step == 1 for step in range(7)]
    assert log[6]["loss"] < 0.9 * log[0]["loss"]  # of the same four traces
    run(seed=0, epochs=1)
    shuffled = sum(parts[7:], [])
    assert rates[7] == 3e-3 and shuffled != traces and sorted(shuffled) == sorted(traces)
    assert [genac.sft_lr_share(step, 100) for step in (0, 1, 2, 66, 99)] == pytest.approx(
        [1 / 3, 2 / 3, 1, 1, 0.03])


def test_genac_traces_through_a_file(tmp_path):
    """States written as prompts come back with traces; a line that does not fit is named."""
    path, good = str(tmp_path / "p"), dict(problem="q", partial="", trace="<answer>9</answer>")
    states = [genac.State("2+2? {x}", "It is\nfour ✓", "3B", 0.4), genac.State("q", "", "1B", None)]
    genac.write_prompts(path, states, [1, 0], [3, 0], icc=False)
    rows = [json.loads(line) for line in open(path, encoding="utf-8")]
    assert [(row["outcome"], row["position"]) for row in rows] == [(1, 3), (0, 0)]
    assert rows[0]["prompt"] == genac.critic_prompt(
        *states[0][:2], model_size="", success_rate=None)
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(good | row) + "\n\n" for row in [*rows, {}])
    read = lambda: genac.load_traces(path, model_size="1B", success_rate=0.5)
    assert read() == [(x, good["trace"]) for x in [*states, genac.State("q", "", "1B", 0.5)]]
    for row, message in (
        ({"trace": "I say 7"}, "line 2: trace: expected an integer"),
        ({"partial": 3}, "line 2: partial: expected a text, found 3"),
        ({"success_rate": 70}, "line 2: success_rate: expected a number in"),
        ('{"problem": "q", "partial": ""}', "under the key trace, found the keys problem, partial"),
        ("[1]", "line 2: expected a JSON"), ("{", "line 2: .* found broken"), ("", "no line")):
        with open(path, "w") as file:
            row = json.dumps(good | row) if isinstance(row, dict) else row
            file.write(json.dumps(good) + "\n" + row if row else "\n")
        with pytest.raises(ValueError, match=message):
            read()


def test_genac_demo(tmp_path, capsys):
    """One line per segment by the written replies; a folder's model is asked as well."""
    genac.demo(argparse.Namespace(critic=None, seed=0))
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "|+7!j=3" in line]
    assert len(lines) == 6 and lines[0][1:] == [
        "j0.84<answer>6</answer>", "0.6", "+0.2", "0.64", "a0b7", "-1.20", "-0.50"]
    _genac_tiny().save_pretrained(tmp_path)
    rollout.task_tokenizer().save_pretrained(tmp_path)
    genac.demo(argparse.Namespace(critic=str(tmp_path), seed=0))
    assert "R_v = 0" in capsys.readouterr().out


# ---- train.py ------------------------------------------------------------------------------------

# On a policy that is hardly trained: about the machinery.
TRAIN_TINY = """--rollout-batch 8 --mini-batches 2 --pool-size 8 --pretrain-batch 8 --lr 1e-3
    --pretrain-epochs 1 --eval-problems 4 --eval-k 2 --max-response 20 --show-every 0 --device cpu
    --verifier even --pool-temperatures 1.0""".split()


def _train_patch(patch, base):  # short problems, a verifier that half of all texts satisfy
    torch.set_num_threads(1)
    patch.setattr(rollout, "LETTERS", "abcdefg")
    for name, reward in dict(even=lambda text, answer: 1 - 2.0 * (len(text) % 2),
                             no=lambda text, answer: -1.0, yes=lambda text, answer: 1.0).items():
        patch.setitem(rollout.VERIFIERS, name, reward)
    patch.setattr(rollout, "build_base", lambda *args, **limits: base)


@pytest.fixture(scope="session")
def train_base(tmp_path_factory):
    """A base policy that ends its responses, and beside it -run, three steps with all stages."""
    base, build = str(tmp_path_factory.mktemp("base") / "base"), rollout.build_base
    with pytest.MonkeyPatch.context() as patch:
        _train_patch(patch, base)
        build(base, steps=30, batch=16)
        flags = ["--out", base + "-run", *"--steps 3 --save-every 1 --eval-every 2".split()]
        assert train.main([*TRAIN_TINY, *flags]) == 0
    return base


@pytest.fixture
def train_go(train_base, tmp_path, monkeypatch):
    """train_go("--steps 2") runs main on the tiny configuration -> exit status."""
    _train_patch(monkeypatch, train_base)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(train_base + "-run", "run")
    return lambda flags: train.main([*([] if "--resume r" in flags else TRAIN_TINY),
                                     *flags.replace("BASE", train_base).split()])


@pytest.fixture
def train_data(train_go, train_base):
    """Two steps in r/ on the problems of d.jsonl, by the model m/ -> the lines of d.jsonl."""
    rows = [f'{{"prompt": "{"abc"[i % 3]}{i}", "answer": "{i}"}}\n' for i in range(30)]
    shutil.copytree(train_base, "m"), open("d.jsonl", "w").writelines(rows)
    assert train_go("--model m --data d.jsonl --instruction= --method spo --steps 2 --save-every 1 "
                    "--out r") == 0
    return rows


def _train_run(base, monkeypatch, flags=""):
    _train_patch(monkeypatch, base)
    run = train.setup(train.parse([*TRAIN_TINY, *flags.split()])[0])
    train.prepare_critic(run)
    for _, opt in run.trained.values():  # AdamW divides by tiny numbers: steps are compared by SGD
        opt.step = torch.optim.SGD(opt.param_groups[0]["params"], 0.01).step
    return run


def _train_rollout(run):
    b, _ = train.rollout_batch(run, train.generator(0, "train"), train.Metrics(run))
    b.logp_old, V = train.score(run, b)
    return b, V


def _train_files(folder):
    rows = [json.loads(line) for line in open(f"{folder}/metrics.jsonl")]
    return rows, torch.load(train.checkpoints(folder)[-1] + "/state.pt", weights_only=True)


def _train_same(a, b):
    pairs = list(zip(tree_leaves(a), tree_leaves(b), strict=True))
    return all(torch.equal(x, y) if torch.is_tensor(x) else x == y for x, y in pairs)


def _train_model(folder, name, pad_token="$", **config):
    """A folder with a model of any family, weights also in its output's bias, task's tokenizer."""
    tokenizer, model = task_tokenizer(), _tiny(name, **config)
    tokenizer.add_special_tokens({"pad_token": pad_token})
    [x.data.normal_() for key, x in model.named_parameters() if key == "lm_head.bias"]
    rollout.write_folder(folder, tokenizer, model)


def test_train_one_run_of_every_stage(train_base):
    """Metrics, files, and the values used: the flag's, preset's, method's or loss's, in order."""
    folder, (rows, state) = train_base + "-run", _train_files(train_base + "-run")
    steps, config = rows[1:-1], json.load(open(folder + "/config.json"))
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 3]
    assert {k for x in steps for k in x if x[k] is None} <= {"critic/explained_variance"}
    assert steps[0]["mismatch/log_ratio_max"] < 1e-5
    assert all({"actor/clip_share", "critic/grad_head_share", "memory/peak_gib", "daps/accepted",
                "time/rollout", "rollout/length"} <= row.keys() for row in steps)
    assert {"eval/avg@2", "eval/pass@2"} <= rows[0].keys() & rows[2].keys() & rows[-1].keys()
    critic = Critic.from_pretrained(folder + "/critic").state_dict()
    assert _train_same({**critic}, {**state["critic"]["model"]})
    assert None not in config.values() and len(train.checkpoints(folder)) == config["keep"] == 2
    used = [(c["lr"], c["critic_lr"], c["whiten"], c["k"], c["eps_high"], c["verifier"]) for c in (
        config, vars(train.parse("--data x --k 2 --loss ppo-clip".split())[0]))]
    tiny = (1e-3, train.PRESETS["tiny"]["critic_lr"], True, 1, 0.28, "even")
    assert used == [tiny, (1e-6, 5e-6, True, 2, 0.2, "boxed")]


TRAIN_OPTIONS = """s3ac-token --critic-rank 2; s3ac-ensemble
s3ac-v0 --pretrain none; grpo --k 4; grpo-x --k 4; rloo --k 4; reinforce++; ppo
vc-ppo --pool-temperatures 1.0,0.5 --critic-clip-split; vapo --k 4; vine-ppo --vine-k 2; spo; evpo
asyppo --k 4; flash-reinforce; sao --pretrain coverage --pretrain-size 4 --pool-temperatures 1.0,0.5
genac --reply 8 --context 60 --critic BASE; reinforce++ --loss grpo; ppo --whiten --delimiter b
s3ac --selection pcl --pretrain none --k 4; s3ac --loss ppo-clip --selection uniform --no-whiten
ppo --checkpoint-activations; grpo-x --k 4 --selection greso --gepo; spo --sampler generate_batch
reinforce++ --loss dis --rollout-dtype bfloat16 --compute-dtype bfloat16"""


@pytest.mark.parametrize("flags", TRAIN_OPTIONS.replace("\n", "; ").split("; "))
def test_train_methods_and_options_run(train_go, train_base, flags):
    """Every row of METHODS and every option: finite metrics, weights move."""
    assert train_go(f"--steps 1 --out r --method {flags}") == 0
    (_, row, *_), state = _train_files("r")
    assert {k for k, x in row.items() if x is None} <= {"critic/explained_variance", "genac/score"}
    assert row["actor/grad_norm"] > 0 and row["rollout/trajectories"] % 4 == 0
    assert "bfloat16" not in flags or row["mismatch/log_ratio_max"] > 1e-5  # a real mismatch
    if "0.5" in flags:  # --pretrain initial: as many trajectories, all of one policy
        index = vp.TrajectoryPool.open("r/pool").index
        assert len(index) == 16 and set(index["policy"]) == ({0, 1} if "sao" in flags else {0})
    base = AutoModelForCausalLM.from_pretrained(train_base).state_dict()
    assert not any(torch.equal(x, state["actor"]["model"]["model." + k]) for k, x in base.items())


@pytest.mark.parametrize("name, loss_of", [  # of a whole mini-batch x: p = log π, q = log π_old
    ("cispo", lambda p, q, x: al.cispo_loss(p, q, x.advantage, x.keep)[0]),
    ("ppo-clip", lambda p, q, x: al.ppo_clip_loss(p, q, x.advantage, x.keep)[0]),
    ("dis", lambda p, q, x: al.dis_loss(p, x.logp_roll, x.advantage, x.keep)[0]),
    ("grpo", lambda p, q, x: al.grpo_loss(p, q, x.advantage, x.keep)[0]),  # rows with a kept token
    ("flash", lambda p, q, x: al.flash_reinforce_loss(p, x.logp_roll, x.advantage, x.mask)[0]),
    ("vapo", lambda p, q, x: al.ppo_clip_loss(p, q, x.advantage, x.keep, eps_high=0.28)[0]
        + 0.1 * al.nll_loss(p, x.reward, x.keep)[0])])
def test_train_updates_are_their_equations(train_base, monkeypatch, name, loss_of):
    """Each update is that of its whole mini-batch, in parts or not; masked slots are not used."""
    limits = (0.05, 0.3) if name == "vapo" else (1e3, 1e3)  # of the norms, actor's and critic's
    run = _train_run(train_base, monkeypatch, "--clip-norm {} --critic-clip-norm {} --value-clip "
                     "0.01 --token-budget 60 --loss {}".format(*limits, name))
    b, (V,) = _train_rollout(run)
    b.mask[0] = b.mask[:, 1:3] = False
    b.logp_old += 0.3 * torch.randn(V.shape)
    b.value, b.advantage = V + 0.1 * torch.randn(V.shape), torch.randn(V.shape)
    b.keep = b.mask & (torch.rand(V.shape) > 0.3) & (torch.arange(8) > 2)[:, None]
    critic, actor = copy.deepcopy(run.critics[0][0]), copy.deepcopy(run.actor)
    rng, metrics = torch.Generator().manual_seed(0), train.Metrics(run)
    for module in (critic, critic, actor):
        for rows in train.mini_batches(run, b, rng):
            x = Batch(**{k: x[rows] for k, x in vars(b).items() if x is not None})
            if module is critic:
                V = response(critic(x.tokens, x.attention), b.mask.shape[1])
                near, R = x.value + (V - x.value).clamp(-0.01, 0.01), x.reward[:, None]
                loss = torch.maximum((V - R).square(), (near - R).square())[x.mask].mean() / 2
            else:
                loss = loss_of(actor(x.tokens, x.attention, x.mask, False)[0], x.logp_old, x)
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), limits[module is critic])
            torch.optim.SGD(module.parameters(), 0.01).step()
            module.zero_grad()
    for x in (b.logp_roll, b.logp_old, b.value, b.advantage):
        x[~b.mask] = math.nan
    train.update_critics(run, b, rng.manual_seed(0), metrics)
    train.update_actor(run, b, rng, metrics)
    for module, trained in ((critic, run.critics[0][0]), (actor, run.actor)):
        pairs = zip(module.parameters(), trained.parameters(), strict=True)
        assert max((p - q).abs().max() for p, q in pairs) < 1e-6
    assert all(math.isfinite(x) for x in metrics.means().values())


def test_train_order_of_a_step(train_base, monkeypatch):
    """Scores, values, advantages are from before the updates: critic, then actor, then counts."""
    run, seen = _train_run(train_base, monkeypatch, "--temperature 0.7 --token-budget 60 "
                          "--mini-batches 1"), []  # so the update's entropy is that of π_old
    assert not {p.prompt for p in run.problems} & {p.prompt for p in run.eval_problems}
    model, critic = copy.deepcopy((run.actor.model, run.critics[0][0]))
    order = ["update_critics", "update_generative", "update_actor", "update_counts"]
    for name in order:
        monkeypatch.setattr(train, name, lambda *a, name=name, real=getattr(train, name): (
            seen.append(name), real(*a)))
    b, metrics = train.train_step(run)
    T, mask = b.mask.shape[1], b.mask
    with torch.no_grad():
        z = model(input_ids=b.tokens, attention_mask=b.attention.long(),
                  position_ids=positions(b.attention)).logits
        log_pi = torch.log_softmax(response(z, T) / 0.7, -1)
        V = response(critic(b.tokens, b.attention), T)
    logp = log_pi.gather(-1, b.tokens[:, -T:, None])[..., 0]
    A = whiten(gae_loop(V, b.reward, mask, adaptive_lambda(mask.sum(1), 1.5)), mask)
    for x, y in ((b.logp_old, logp), (b.logp_roll, logp), (b.value, V), (b.advantage, A)):
        assert torch.allclose(x[mask], y[mask], atol=1e-4) and (x[~mask] == 0).all()
    entropy = -(log_pi.exp() * log_pi).sum(-1)[mask].mean().item()
    assert seen == order and metrics["actor/entropy"] == pytest.approx(entropy, abs=1e-5)
    assert torch.equal(b.keep, al.mismatch_mask(b.logp_old, b.logp_roll, mask)[0])
    run.actor.model.lm_head.bias = nn.Parameter(torch.linspace(-0.5, 0.5, z.shape[2]))
    with pytest.raises(ValueError, match="logits that are hidden states times"):
        train.try_model(run)


@pytest.mark.parametrize("method, value, reward, fields, expected", [
    ("s3ac-v0", [[.5, 9.], [-.2, 7.]], [1., -1.], {}, [[.5, .5], [-.8, -.8]]),
    ("s3ac-token", [[.5, .9]], [1.], {}, [[.4 + .6 * 2 / 3, .6]]),  # of V − V(s_0): 0, 0.4
    ("ppo", [[.2, .6]], [1.], {}, [[.4 + .4 * .95, .4]]),
    ("vapo", [[.2, .6]], [1.], {}, [[.4, .4]]),  # 1 − 1/(0.05 · 2) is below 0
    ("vine-ppo", [[.2, .2, .6]], [-1.], {"starts": [[True, False, True]]}, [[.4, .4, -1.6]]),
    ("evpo", [[.5], [-.5]], [1., -1.], {}, [[.5], [-.5]]),  # EV > 0: R − V
    ("evpo", [[-.5], [.5]], [1., -1.], {}, [[1.], [-1.]]),  # else R − the mean of batch or group
    ("evpo", [[-1.], [1.], [1.]], [1., 1., -1.], {"prompt_id": [0, 1, 1]}, [[0.], [1.], [-1.]]),
    ("spo", [[.5], [-.5], [-1.]], [1., 1., -1.], {}, [[x * 21 ** -.5] for x in (-1, 5, -4)]),
    ("genac", [[.2, .6]], [1.], {"starts": [[True] * 2]}, [[.4 + .4 * .95, .4]]),
    ("asyppo", [[.2, .6]], [1.], {"value_std": [[1., 2.]]}, [[0., .4]]),  # 0 where critics agree
    ("grpo", [[0.]] * 4, [1., -1.] * 2, {"prompt_id": [0, 0, 1, 1], "logp_old": [[0.], [1.], [0.],
     [0.]]}, [[1.], [-math.e], [1.], [-1.]])])  # gepo: weight 1 where sampler and trainer agree
def test_train_advantages_by_hand(method, value, reward, fields, expected):
    """One line for each kind of advantage."""
    fields = {"value": value, "reward": reward, "prompt_id": [*range(len(value))]} | fields
    b = SimpleNamespace(**{k: torch.tensor(x) for k, x in fields.items()})
    b.mask, b.logp_roll = b.value == b.value, torch.zeros_like(b.value)
    b.logp_old = getattr(b, "logp_old", b.logp_roll)
    cfg = train.resolve(train.Config(method=method, gepo=True))
    A = train.ADVANTAGES[train.METHODS[method].advantage](b, cfg)
    A = A / A.abs().min() if method == "grpo" else A  # without the division by std
    assert torch.allclose(A, torch.tensor(expected), atol=1e-5)


def test_train_prompts_and_groups(train_base, monkeypatch):
    """Groups are whole and mixed; all outcomes count once, after the batch; V(s_0) selects. Case
    39: one mixed group for two processes is said to be one."""
    run, seen = _train_run(train_base, monkeypatch, "--k 2 --rollout-batch 16"), []
    monkeypatch.setattr(train, "score", lambda run, b, real=train.score, **x: (
        seen.append(run.daps.trials.sum().item()), real(run, b, **x))[1])
    run.streak = torch.zeros(len(run.problems), dtype=torch.long)
    b, metrics = train.train_step(run)
    assert all(sorted(b.reward[b.prompt_id == i].tolist()) == [-1, 1] for i in b.prompt_id)
    assert metrics["rollout/sampled"] == len(b.reward) + metrics["rollout/discarded"] > 16
    assert seen == [0] and run.daps.trials.sum() == metrics["rollout/sampled"]
    assert run.daps.successes.sum() == sum(metrics["prompts/right"])
    pairs = [*zip(metrics["prompts/sampled"], metrics["prompts/right"])]
    uniform = {i for i, right in pairs if (i, 1 - right) not in pairs}
    assert uniform and uniform == {*run.streak.nonzero()[:, 0].tolist()}
    ids, rng, critic = torch.arange(40), train.generator(0, "train"), run.critics[0][0]
    V, tokens = train.initial_values(run, ids), torch.tensor([run.prompts[3]])
    assert torch.allclose(V[3], critic(tokens, torch.ones_like(tokens).bool())[0, -1], atol=1e-6)
    nearest = V.abs().argsort()[:10].sort().values
    assert torch.equal(train.SELECTIONS["pcl"](run, ids, 10, rng).sort().values, nearest)
    run.daps.select = lambda ids, v0, n, step, rng: seen.append(v0) or ids[:n]
    train.SELECTIONS["daps"](run, ids, 10, rng)
    run.streak = torch.where(ids >= 20, 50, 0)
    assert (train.SELECTIONS["greso"](run, ids, 10, rng) < 20).sum() >= 8
    assert torch.allclose(seen[1], V, atol=1e-6)
    run.size, run.cfg.filter_rounds, run.cfg.selection, verdicts = 2, 2, "uniform", []
    monkeypatch.setitem(rollout.VERIFIERS, "even", lambda *a: (
        verdicts.append(1) or 2.0 * (len(verdicts) == 2) - 1))
    with pytest.raises(RuntimeError, match="only 1 groups of 2 mixed, for 2 processes"):
        train.rollout_batch(run, rng, train.Metrics(run))


def test_train_values_of_methods(train_base, monkeypatch):
    """asyppo: halves. spo: the counts before. vine: without chance, the response itself. pass@k."""
    run, seen = _train_run(train_base, monkeypatch, "--method asyppo --k 4"), []
    b, V = _train_rollout(run)
    mean = train.VALUES["critics"](run, b, V, None).value
    assert torch.equal(mean, V.mean(0)) and (V[0] != V[1])[b.mask].all()
    with monkeypatch.context() as patch:
        patch.setattr(train, "mini_batches", lambda run, part, rng: seen.append(part) or [])
        train.update_critics(run, b, None, train.Metrics(run))
    assert [x.reward.tolist() for x in seen[::2]] == [b.reward[i::2].tolist() for i in (0, 1)]
    run = _train_run(train_base, monkeypatch, "--method spo")
    b, _ = train.train_step(run)
    again = train.VALUES["tracker"](run, b, None, None).value
    assert (b.value == 0).all() and (again[~b.mask] == 0).all()  # 2 · ½ − 1; then Beta(2, 1)
    assert torch.allclose(again[:, 0], torch.where(b.reward > 0, 1 / 3, -1 / 3))
    run = _train_run(train_base, monkeypatch, "--method vine-ppo --vine-k 2")
    run.cfg.temperature = run.actor.temperature = 1e-4
    monkeypatch.setitem(rollout.VERIFIERS, "even", lambda text, _: 1 - 2.0 * (len(text) > 6))
    (b, _), rng = _train_rollout(run), train.generator(0, "train", 1)
    estimate = train.VALUES["vine"](run, b, None, rng)
    assert torch.equal(estimate.value, b.mask * b.reward[:, None]) and len(b.reward.unique()) == 2
    run.cfg.max_response = 4
    late = (torch.arange(b.mask.shape[1]) >= 4).expand(b.mask.shape)[b.mask]
    assert (train.monte_carlo(run, b, b.mask, [""] * 8, 2, rng)[late] == 0).all()
    b.reward = torch.tensor([1.0, -1.0, -1.0, -1.0, 1.0, 1.0, -1.0, -1.0])
    monkeypatch.setattr(train, "respond", lambda *a, **k: b)
    out, _ = train.evaluate(run)
    assert out["eval/avg@2"] == 3 / 8 and out["eval/pass@2"] == 1 / 2


def test_train_genac_from_prompts_over_traces_to_a_frozen_actor(train_go, train_base):
    """The critic learns, the actor does not; one without words stands at the success rate."""
    flags = "--method genac --critic BASE --reply 24 --context 90 --critic-lr 1e-3 --out q "
    assert train_go(flags + "--write-prompts p.jsonl --n-prompts 16") == 0
    rows = [json.loads(line) for line in open("p.jsonl")]
    assert len(rows) == 16 and {row["outcome"] for row in rows} == {0, 1}
    open("t.jsonl", "w").writelines(
        json.dumps(row | {"trace": "<answer>7</answer>"}) + "\n" for row in rows)
    assert train_go(flags + "--traces t.jsonl --freeze-actor --steps 3") == 0
    base, actor, critic = ({**AutoModelForCausalLM.from_pretrained(x).state_dict()}
                           for x in (train_base, "q/actor", "q/critic"))
    assert _train_same(base, actor) and not _train_same(base, critic)
    before, step, *_ = _train_files("q")[0]
    assert "actor/loss" not in step and step["genac/unparsable"] == 1
    assert step["critic/value_mean"] == pytest.approx(2 * before["eval/avg@2"] - 1, abs=1e-6)


def test_train_router_replay(tmp_path, monkeypatch):
    """R3: with a bf16 sampler's choice of experts the float32 trainer's ρ comes closer to 1."""
    off = []
    _train_model(f"{tmp_path}/moe", "qwen3_moe", head_dim=8, num_experts=8, num_experts_per_tok=2,
                 moe_intermediate_size=16, num_hidden_layers=3, initializer_range=0.3)
    for flag in ("--no-router-replay", "--router-replay"):
        b, _ = _train_rollout(_train_run(None, monkeypatch, f"{flag} --model {tmp_path}/moe "
                              "--method spo --rollout-batch 64 --rollout-dtype bfloat16"))
        off.append((b.logp_old - b.logp_roll)[b.mask].abs())
    assert off[1].mean() < 0.9 * off[0].mean() and off[1].max() < 0.5 * off[0].max()


@pytest.mark.parametrize("flags", ["s3ac", "asyppo --k 4", "grpo-x --k 2 --selection greso",
                                   "genac --critic BASE --reply 8 --context 60"])
def test_train_interrupted_runs_go_on_bit_for_bit(train_go, capsys, flags):
    """After Ctrl-C, a full disk, a kill while writing (21), a bad (44) or hostile checkpoint."""
    def save(state, path):
        open(path, "wb").write(b"half")
        raise errors.pop()
    flags += " --save-every 1 --eval-every 2 --steps 3"
    errors = [SystemExit("killed"), OSError(28, "full")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "update_counts", lambda run, b, real=train.update_counts: (
            real(run, b), run.step and signal.raise_signal(signal.SIGINT)))
        assert train_go(f"--out r --method {flags}") == 130
        assert "go on with --resume r" in capsys.readouterr().out
        patch.undo()
        patch.setattr(torch, "save", save)
        assert train_go("--resume r") == 2
        assert "full); last checkpoint: r/checkpoints/step-000002" in capsys.readouterr().err
        with pytest.raises(SystemExit, match="killed"):
            train_go("--resume r")
    path = "r/checkpoints/step-000002"
    data = bytearray(open(path + "/state.pt", "rb").read())
    torch.save(type("Evil", (), {"__reduce__": lambda self: (os.mkdir, ("evil",))})(),
               path + "/state.pt")
    open(path + "/sha256", "w").write(train.checksum(path))
    assert train_go("--resume r") == 2 and not os.path.exists("evil")
    assert "expected a checkpoint of this model" in capsys.readouterr().err
    data[999] ^= 1  # a wrong bit, or the file is cut
    open(path + "/state.pt", "wb").write(data[:-9] if "greso" in flags else data)
    open("r/metrics.jsonl", "a").write('{"step": 3, "torn')
    assert train_go("--resume r --target 1.1") == 1 and os.path.isdir(path + ".damaged")
    out = capsys.readouterr().out
    assert f"damaged, by their checksums: {path}; going on from r/checkpoints/step-000001" in out
    assert "below the target 1.1; files in r" in out
    uncut = "run" if flags.startswith("s3ac") else "whole"  # train_base has done that one
    assert uncut == "run" or train_go(f"--out whole --method {flags}") == 0
    (rows, state), (rows_whole, whole) = map(_train_files, ("r", uncut))
    assert _train_same(state, whole) and [row["step"] for row in rows] == [0, 1, 2, 3, 3]
    same = lambda row: {k: x for k, x in row.items() if k[:4] not in ("time", "memo", "run/")}
    assert [*map(same, rows)] == [*map(same, rows_whole)]


TRAIN_ENDS = r"""--method no|--method: expected one of s3ac; --steps x|invalid int; --preset no|inva
--steps 0|--steps: expected 1 or more; --k 3|--k: expected a divisor of --rollout-batch 8, found 3
--method grpo-x --k 1|--k: expected 2 or more for groups (grpo-x; --nonsense 1|unrecognized
--selection greso|--k: expected 2 or more for groups (s3ac, selection greso; --lr inf|--lr: expected
--mini-batches 9|--mini-batches: expected 1 … 8; --data x --model BASE|--data: expected a JSONL
--method grpo --selection pcl|--selection: expected uniform; --data x|--data: expected --model besid
--critic .|--critic: expected the folder of a critic (value_head.pt), found .; --gepo|--gepo: expect
--method asyppo --k 4 --critic .|--critic: expected the folders of two critics; --pool x|--pool: exp
--method genac|--critic: expected the folder of a language model; --device tpu|--device: expected
--eps-low 2|--eps-low: expected 0 … 1, found 2.0; --target nan|--target: expected a number
--model ./no|--model: expected a folder with a Hugging Face model; --traces x|--traces: expected
--max-prompt 2|--max-prompt: expected prompts; --pool-temperatures 1,x|--pool-temperatures: expected
--max-response 300|--max-response: expected at most 250; --temperature 0|--temperature: expected a n
--token-low 6|--token-low: expected at most --token-high; --resume=|--resume: exp; --resume x|--resu
--method vine-ppo --delimiter \x|--delimiter: expected; --pretrain-size 1|--pretrain-size: expected
--router-replay|--router-replay: expected a model with top-k routers; --out run|(--resume goes on
--reply 99 --context 50|--reply: expected less than --context 50; --resume run --lr 7|lr 0.001 -> 7
--resume run --preset tiny|preset None -> 'tiny'; --resume run --steps 2|--steps: expected 3 or more
--shard-size 3|--shard-size: expected a divisor of the 4 processes; --rollout-batch 6|4 processes
--stop ab|--stop: expected texts of one ; --stop ,|none of them empty; --pool . --method spo|--pool:
--critic . --method spo|--critic: expected a method with; --critic-rank 2 --method spo|--critic-rank
--model BASE --verifier boxed|--data: expected a JSONL; --verifier number|--data: expected a JSONL
--pretrain none --critic-lr 1e12 --keep 1|not finite|0; --method spo --loss nan|not finite 5 times|0
--method genac --critic BASE --reply 8 --context 60|no parsable reply in 5 calls|4
--method spo --response-high 0.9|nothing was learned in 5 steps|0
--method grpo --k 4 --verifier yes --max-response 99 --rollout-batch 64|learned in 5 steps|0
--method rloo --k 4 --verifier yes --max-response 99 --rollout-batch 64|learned in 5 steps|0
--method reinforce++ --verifier yes --max-response 99 --rollout-batch 64|learned in 5 steps|0
--method grpo-x --k 4 --verifier no|every group of 4 was all right or all wrong, in 10 rounds|0"""


@pytest.mark.parametrize("row", TRAIN_ENDS.replace("\n", "; ").split("; "))
def test_train_ends_with_a_sentence(train_go, monkeypatch, capsys, row):
    """Cases 16, 43, 46, 47, 50. Status 2: bad input, no damage. 1: a run that cannot learn; the
    checkpoint is healthy."""
    flags, words, *last = row.split("|")
    monkeypatch.setenv("WORLD_SIZE", "4" if "4 processes" in words else "1")
    monkeypatch.setitem(train.LOSSES, "nan", lambda logp, b, n, cfg: (logp.sum() * math.nan, {}))
    flags += " --steps 9 --save-every 1" if last else ""
    with contextlib.suppress(SystemExit):  # argparse's way
        assert train_go(("" if "run" in flags else "--out q ") + flags) == 2 - len(last)
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert words in error and ("stopped: " if last else "error: ") in error
    assert os.path.exists("q/config.json") == bool(last) and len(train.checkpoints("run")) == 2
    for n in last:
        path, state = train.checkpoints("q")[-1], tree_leaves(_train_files("q")[1])
        assert path == f"q/checkpoints/step-00000{n}" and f"last checkpoint {path}" in error
        assert max(x.abs().max() for x in state if torch.is_tensor(x) and x.numel()) < 1e3


def _train_updates(run, folder):
    b, metrics = torch.load(folder + "/batch.pt", weights_only=False), train.Metrics(run)
    b.logp_old, (b.value,) = train.score(run, b)
    b.advantage, b.keep = train.ADVANTAGES["gae"](b, run.cfg), b.mask
    for update in (train.update_critics, train.update_actor):
        update(run, b, torch.Generator().manual_seed(0), metrics)
    named = {**run.actor.state_dict(), **run.critics[0][0].state_dict()}
    tensors = {name: train.gathered(x).clone() for name, x in named.items()} | dict(
        logp=b.logp_old, V=b.value, V_0=train.initial_values(run, torch.arange(5)))
    run.cfg.out, run.step = folder, run.size - 1
    train.save(run)
    recipe = vp.Recipe(epochs=1, batch_size=8, held_out=0.25)
    stats = vp.pretrain(run.critics[0][0], vp.TrajectoryPool.open(folder + "/pool"), None, recipe,
                        rank=run.rank, world=run.size)
    return tensors, {k: x for k, x in metrics.means().items() if "padding" not in k} | {
        "pretraining": stats["loss_first"], "EV": stats["ev_before"]}


def _train_rank(rank, base, folder, flags):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    patch, groups = pytest.MonkeyPatch(), "--method grpo-x --k 4 --rollout-batch 32"
    results = _train_updates(_train_run(base, patch, flags), folder)
    run = _train_run(base, patch, groups)
    b, _ = train.train_step(run)
    torch.save((*results, b, train.evaluate(run)[0]), f"{folder}/{rank}.pt")
    patch.setattr(train, "update_counts", lambda run, sampled: 1 / (1 - rank))  # one rank fails
    with open(f"{folder}/error{rank}", "w") as file, contextlib.redirect_stderr(file):
        status = train.main([*TRAIN_TINY, *groups.split(), "--out", folder + "/r"])
    raise SystemExit(status)


@pytest.mark.parametrize("flags", ["--token-budget 60", "--checkpoint-activations --shard-size 1"])
def test_train_two_ranks_are_one_process(train_base, monkeypatch, tmp_path, flags, capsys):
    """FSDP2, sharded or replicated: all numbers to 2e-5; groups (37), resume, a rank that fails."""
    run, folder = _train_run(train_base, monkeypatch, flags), str(tmp_path)
    b, _ = _train_rollout(run)
    torch.save(b, folder + "/batch.pt")
    vp.TrajectoryPool(folder + "/pool").append(b, 0)
    one, numbers = _train_updates(run, folder)
    torch.multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    with pytest.raises(torch.multiprocessing.ProcessExitedException):
        torch.multiprocessing.start_processes(
            _train_rank, (train_base, folder, flags), nprocs=2, start_method="forkserver")
    assert "rank 1: stopped: ZeroDivisionError" in (tmp_path / "error1").read_text()
    (two, theirs, b, same), (_, _, other, same_too) = (
        torch.load(f"{folder}/{r}.pt", weights_only=False) for r in (0, 1))
    assert same == same_too and torch.equal(b.tokens, other.tokens) and one.keys() == two.keys()
    assert max((one[name] - two[name]).abs().max() for name in one) < 2e-5  # measured: 1.7e-6
    assert theirs == pytest.approx(numbers, rel=1e-5, abs=1e-5, nan_ok=True)
    groups = [b.reward[b.prompt_id == i] for i in b.prompt_id]
    assert all(len(x) == 4 and len(x.unique()) == 2 for x in groups)
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "rollout/success": 1}\n')
    train.load(run)
    assert run.step == 1 and "written by 2 ranks, resumed on 1" in capsys.readouterr().out
    named = {**run.actor.state_dict(), **run.critics[0][0].state_dict()}
    assert all(torch.equal(x, two[name]) for name, x in named.items())


# ---- train.py: at the borders --------------------------------------------------------------------

def test_train_says_which_flags_have_no_effect(capsys):
    """Flags that the method or another flag leaves unused are named, and only a verifier that reads
    a box brings the request for one."""
    for flags, idle in (("--method grpo --lam 1 --pool-size 9 --lr 1", "--lam, --pool-size"),
                        ("--lam 1 --alpha 2 --n-c 1", "--alpha"), ("--lam 0 --alpha 2 --k 2", ""),
                        ("--pool p --pool-size 9 --pool-models m --pretrain-size 9",
                         "--pool-size, --pool-models"), ("--method genac --critic c --icc", ""),
                        ("--method genac --write-prompts p --traces t --vine-k 3",
                         "--traces, --vine-k"), ("--k 8 --filter-rounds 2 --decay 1", ""),
                        ("--loss flash --eps-low 1 --delta 1 --filter-rounds 2",
                         "--eps-low, --filter-rounds"), ("--preset small --method spo", "")):
        train.parse(flags.split())
        assert capsys.readouterr().out == (f"without effect in this run: {idle}\n" if idle else "")
    for verifier in rollout.VERIFIERS:
        boxed = verifier in ("boxed", "math_verify")
        assert train.parse(["--model", "m", "--verifier", verifier])[0].instruction == (
            train.BOXED if boxed else "")


@pytest.mark.parametrize("name, refused, config", [
    ("gemma2", True, dict(final_logit_softcapping=3.0, head_dim=8)), ("phi", True, {}),  # a bias
    ("granite", True, dict(logits_scaling=4.0)), ("cohere", True, dict(logit_scale=0.2)),
    ("mixtral", True, dict(router_jitter_noise=0.5)), ("mixtral", False, {}),
    ("gemma3_text", False, dict(sliding_window=4, head_dim=8)), ("persimmon", False, {}),
    ("bloom", False, dict(attention_dropout=0.5, hidden_dropout=0.5)),  # ALiBi
    ("gpt2", False, dict(attn_pdrop=0.5, resid_pdrop=0.5)), ("biogpt", False, {}),
    ("opt", False, dict(ffn_dim=48, word_embed_proj_dim=32, dropout=0.5, layerdrop=0.5)),
    ("xglm", False, dict(d_model=32, ffn_dim=48, num_layers=2, attention_heads=4, dropout=0.5,
                         layerdrop=0.2)), ("gpt_bigcode", False, dict(n_positions=256)),
    ("gpt_neo", False, dict(num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]])),
])
def test_train_borders_one_policy(tmp_path, monkeypatch, capsys, name, refused, config):
    """Soft caps, biases, scales and noise show in the figure; other families run, recomputed, with
    dropout switched off, whatever they call it (case 27)."""
    _train_model(f"{tmp_path}/m", name, **config)
    words = "log-probs that differ by at most 0.001,.*" if name == "mixtral" else "logits that are"
    for dtype in ("float32", "bfloat16")[: 1 if words.startswith("log") else 2]:
        with pytest.raises(ValueError, match=words) if refused else contextlib.nullcontext():
            _train_run(None, monkeypatch, f"--model {tmp_path}/m --method spo --dtype {dtype} "
                       f"--compute-dtype {dtype} --checkpoint-activations")
        most = max(map(float, re.findall(r"\d\.\de[+-]\d+", capsys.readouterr().out)))
        assert most > 1e-3 if refused or dtype == "bfloat16" else most < 1e-4


def test_train_borders_fingerprints(train_go, train_data, capsys):
    """Cases 28, 30, 33: other problems, held-out ones too, another tokenizer or vocabulary; ids or
    a pad id that no row has; a difference that begins at later positions."""
    def refused(flags, words, rows=train_data):
        open("d.jsonl", "w").writelines(rows)
        assert train_go(flags if "--resume" in flags else f"--steps 1 --out q {flags}") == 2
        assert words in capsys.readouterr().err and not os.path.exists("q/config.json")
    train_part, held_out = rollout.load_data("d.jsonl", "", 4)
    changed = [[row.replace('r": "', 'r": "9') if f'"{p.prompt}"' in row else row
                for row in train_data] for p in (*train_part[::26], *held_out[::2])]
    for other in (*changed, train_data[::-1], train_data[:-1],
                  [train_data[0].replace("0", "99"), *train_data[1:]],
                  [*train_data, '{"prompt": "z", "answer": 1}']):
        refused("--resume r", "expected one made with this run's problems", other)
    open("d.jsonl", "w").writelines(row.replace("prompt", "question") for row in train_data)
    assert train_go("--resume r --steps 3") == 0  # the same problems
    for file, key, value in (("tokenizer_config", "chat_template", "{{ messages[0].content }}?"),
                             ("generation_config", "eos_token_id", [3, 5])):
        data = json.load(open(f"m/{file}.json"))
        json.dump(data | {key: value}, open(f"m/{file}.json", "w"))
        refused("--resume r", "expected one made with this run's prompt and end tokens")
        json.dump(data, open(f"m/{file}.json", "w"))
    text = open("m/tokenizer.json").read().replace('"a": 10', '"b": 10')
    open("m/tokenizer.json", "w").write(text.replace('"b": 11', '"a": 11'))
    for flags in ("--resume r", "--model m --critic run/critic", "--model m --pool run/pool"):
        refused(flags, f"{flags.split()[-2]}: expected one made with this run's tokenizer")
    os.remove("run/pool/pool.json")
    ids = vp.TrajectoryPool.open("run/pool").tokens.copy()
    for ids[0] in (5000, ~5000):  # in a response, in a prompt
        ids.tofile("run/pool/tokens.bin")
        refused("--pool run/pool", "--pool: expected token ids below 96, found 5000")
    data = "--data d.jsonl --instruction= --method spo"
    _train_model("pad", "llama", pad_token="[PAD]")  # gets the id 96
    refused(f"{data} --model pad", "--model: expected one that the sampler and the trainer can run")
    rope = dict(rope_type="longrope", short_factor=[1.0] * 4, long_factor=[8.0] * 4,
                rope_theta=1e4, original_max_position_embeddings=16)
    _train_model("rope", "phi3", rope_parameters=rope, pad_token_id=1,
                 original_max_position_embeddings=16)
    assert train_go("--model rope --method spo --instruction= --max-response 40 --out e") == 2
    assert "log-probs that differ by at most 0.1" in capsys.readouterr().err
    _train_model("vocab", "llama", vocab_size=300)
    assert train_go("--model vocab --out v --steps 1") == 0
    assert train_go("--model vocab --out w --steps 1 --pool v/pool") == 0
    refused("--model vocab --critic run/critic", "vocabulary")
    refused("--model vocab --stop ☃", "--stop")


def test_train_borders_resume(train_go, train_data, capsys):
    """Case 44 thrice: a damaged checkpoint; damaged or no metrics; older configurations."""
    for _ in range(3):
        open("r/checkpoints/step-000002/sha256", "w").write("0")
        assert train_go("--resume r") == 0
    os.rename("r/checkpoints/step-000002", "r/checkpoints/step-000005")
    assert train_go("--resume r --steps 6") == 2 and "step 2 in r/" in capsys.readouterr().err
    os.rename("r/checkpoints/step-000005", "r/checkpoints/step-000002")
    for junk in (b'{"step": 1, "x"}\n', b"\0\0\n", b'\xff\n', b'{"a": 1}\n', b"[1]\n", b'{"st'):
        data = open("r/metrics.jsonl", "rb").read()
        open("r/metrics.jsonl", "wb").write(junk + data if junk.endswith(b"\n") else data + junk)
        assert train_go("--resume r") == 0
    os.remove("r/metrics.jsonl")
    assert train_go("--resume r") == 0
    config = json.load(open("r/config.json"))
    for changed, status in (({k: x for k, x in config.items() if k != "critic_lam"}, 0),
                            (config | {"steps": "3"}, 2), (config | {"lr": None}, 2),
                            (config | {"stop": 5}, 2), (config | {"lr": 0.5}, 2)):
        json.dump(changed, open("r/config.json", "w"))
        assert train_go("--resume r") == status
    error = capsys.readouterr().err
    assert "--steps: expected a value of type int, found '3'" in error and "--lr: exp" in error
    assert "config.json as the run began, found lr 0.001, now 0.5" in error


def test_train_borders_a_folder_has_one_owner(train_go, train_base, capsys):
    """Cases 41, 42: foreign files stay, also under names that a run uses, links and notes too; a
    lock names its process and ends with it."""
    os.makedirs("f/notes"), os.mkdir("big"), os.symlink("big", "link"), os.mkdir("here")
    shutil.copytree(train_base, "m"), shutil.copytree(train_base, "models/actor")
    time = os.stat("models/actor/model.safetensors").st_mtime_ns
    for flags, words in (("--out f", "f with notes"), ("--out m --model m", "m with "), (
            "--out .", ". with "), ("--out models --model models/actor", "models with actor")):
        assert train_go(f"--steps 1 --method spo {flags}") == 2
        assert words in capsys.readouterr().err
    assert os.listdir("f") == ["notes"] and {*os.listdir("m")} == {*os.listdir(train_base)}
    assert os.stat("models/actor/model.safetensors").st_mtime_ns == time
    for out in ("new", "link", "./big", "here/."):
        assert train_go(f"--steps 1 --max-prompt 2 --out {out}") == 2
        assert "--max-prompt" in capsys.readouterr().err
    assert not os.path.exists("new")
    for out in ("run/actor", "run/mine/deeper"):  # an export would replace it
        assert train_go(f"--steps 1 --method spo --out {out}") == 2
        assert "--out: expected a folder outside of other runs" in capsys.readouterr().err
    open("run/log.txt", "w").write("mine"), open("run/actor/card.md", "w").write("mine")
    assert train_go("--resume run --steps 4") == 0
    assert os.path.exists("run/log.txt") and os.path.exists("run/actor/card.md")
    for gone in ("checkpoints", "result.json"):  # of a run that has done something
        os.rename(f"run/{gone}", f"kept-{gone}")
        assert train_go("--steps 1 --out run") == 2
        assert "found one in run (without checkpoints)" in capsys.readouterr().err
    if not (pid := os.fork()):
        lock = train.own_folder("g")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert open("g/.lock").read().startswith(f"process {pid} on ")
    with train.own_folder("g"):
        assert train_go("--steps 1 --method spo --out g") == 2
        assert f"in use by process {os.getpid()} on " in capsys.readouterr().err
    assert train_go("--steps 1 --method spo --out g") == 0


def test_train_borders_stopped_before_the_first_step(train_go, monkeypatch, capsys):
    """Cases 45, 50: the plan, that nothing is right, one line, what can be used. A run killed in
    its first checkpoint starts anew by the same command."""
    plan = ("a pool of 16 trajectories, 20 tokens", "4 × 2 responses before",
            "before training: 0 of 8 responses are right", r"8 have no \boxed{}",
            "at this speed: ", "trajectories of the pool have the same reward")
    spo = "--method spo --steps 1 --out r"
    pool = "--verifier boxed --pool-temperatures 1,.5 --steps 1 --out r"
    for flags, stage, error, status, words in [
            (spo, "save", SystemExit("killed"), None, ""),
            (spo, "save", KeyboardInterrupt(), 130, "so there is nothing to resume"),
            (pool, "pretrain", KeyError("x"), 1, "stopped: KeyError: 'x' (--debug shows where)"),
            (pool + " --debug", "pretrain", KeyError("x"), 1, "Traceback"),
            (pool, "pretrain", RuntimeError("can't allocate memory"), 1,
             "out of memory: a smaller --token-budget or --max-r"),
            (pool, "pretrain", KeyboardInterrupt(), 130,
             "nothing to resume; --pool r/pool uses the 16 trajectories")]:
        shutil.rmtree("r", ignore_errors=True)
        with monkeypatch.context() as patch, contextlib.suppress(SystemExit):
            patch.setattr(train, stage, Mock(side_effect=error))
            assert train_go(flags) == status
        error.with_traceback(None)  # its frames hold the lock
        out, err = capsys.readouterr()
        assert words in out + err and ("Traceback" in err) == ("--debug" in flags)
        assert train_go("--resume r") == 2
        if stage == "save":
            assert train_go(flags) == 0
        else:
            assert all(x in out for x in plan) and train_go(flags) == 2
            assert "--pool r/pool uses it" in capsys.readouterr().err
    assert train_go(pool + " --pool r/pool") == 0
    assert "nothing was learned, since no response was right" in capsys.readouterr().out
    with monkeypatch.context() as patch:  # safetensors' way to say so
        patch.setattr(train, "export", Mock(side_effect=Exception("I/O: No space left on device")))
        assert train_go("--method spo --steps 1 --out full") == 1
    assert ("stopped: could not write to full, its disk is full (I/O: No space left on device); "
            "last checkpoint full/checkpoints/step-000001") in capsys.readouterr().err


def test_train_few_wrong_responses_do_not_end_a_run(train_go, monkeypatch, capsys):
    """In small batches all may be wrong by chance: the run ends after 256 and five steps. One that
    has learned and is always right has an evaluation and status 0."""
    flags = "--method spo --verifier no --max-response 2 --steps"
    assert train_go(f"{flags} 7 --out r") == 0
    assert "step 7: nothing was learned, since no response was right" in capsys.readouterr().out
    assert train_go(f"{flags} 40 --out q") == 1
    assert "step 32: nothing was learned in 32 steps in a row" in capsys.readouterr().err
    calls = itertools.count()  # the evaluation and three steps are half right, then all is wrong
    monkeypatch.setitem(rollout.VERIFIERS, "no", lambda *_: 1.0 if (
        n := next(calls)) < 32 and n % 2 else -1.0)
    assert train_go("--method spo --verifier no --steps 40 --out s") == 1
    assert "step 35: nothing was learned in 32 steps in a row" in capsys.readouterr().err
    monkeypatch.setitem(rollout.VERIFIERS, "yes", lambda *_: -1.0 if (
        n := next(calls)) < 32 and n % 2 else 1.0)
    calls = itertools.count()  # then all is right: the run has learned, and ends as others do
    assert train_go("--method rloo --k 4 --verifier yes --max-response 99 --steps 40 --out t") == 0
    assert "in a row, since all responses were right: training ends" in capsys.readouterr().out
    assert json.load(open("t/result.json"))["after"]["eval/avg@2"] == 1


def test_train_borders_prompts_targets_and_health(train_base, tmp_path, monkeypatch, capsys):
    """Cases 34, 43: stops end; few prompts come equally often; PPO's λ-return; health of saves."""
    run = _train_run(train_base, monkeypatch, "--stop a,b --method ppo")
    run.problems, run.prompts, run.cfg.out = run.problems[:4], run.prompts[:4], str(tmp_path)
    b, (b.value,) = _train_rollout(run)
    ends = torch.isin(b.tokens[:, -b.mask.shape[1] :], torch.tensor(run.eos_id)) & b.mask
    assert len(run.eos_id) == 3 and torch.equal(ends.sum(1) == 1, ~b.truncated) and ends.any()
    assert b.prompt_id.sort().values.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    train.update_critics(run, b, train.generator(0, "train"), train.Metrics(run))
    target = gae_loop(b.value, b.reward, b.mask, 0.95) + b.value
    assert torch.allclose(b.target[b.mask], target[b.mask], atol=1e-6)
    for run.step, skipped, x in ((0, 0, 0.0), (1, 2, 0.0), (2, 0, torch.nan)):
        run.critics[0][1].in_a_row, next(run.actor.parameters()).data[0, 0] = skipped, x
        train.save(run)
        assert ("not saved" in capsys.readouterr().out) == (run.step > 0)
    assert len(train.checkpoints(run.cfg.out)) == 1


def test_train_borders_sound_checkpoints(train_go, monkeypatch):
    """Case 43: what comes after success has halved pushes out no checkpoint from before."""
    seen = []
    right = lambda i: i % 8 < (6 if i < 24 else 2)  # an evaluation and two steps at 6 of 8
    verdict = lambda *_: seen.append(1) or 2.0 * right(len(seen) - 1) - 1
    monkeypatch.setitem(rollout.VERIFIERS, "even", verdict)
    assert train_go("--method spo --steps 5 --save-every 1 --keep 1 --out c") == 0
    first, last = train.checkpoints("c")
    assert (first[-1], last[-1]) == ("1", "5") and train.last_checkpoint("c", 4) == first
    text = train.sentence(RuntimeError("x"), SimpleNamespace(out="c"), 1)
    assert text.startswith(f"stopped: x; last checkpoint {last}; success has halved since {first}")


def test_train_borders_before_anything_is_sampled(train_go, train_base, monkeypatch, capsys):
    """Points 1, 8: a gold that the verifier cannot accept, an empty pool."""
    monkeypatch.setattr(train, "evaluate", lambda run: 1 / 0)
    open("d.jsonl", "w").writelines(f'{{"prompt": "{i}", "answer": "{x}"}}\n' for i, x in enumerate(
        ("812", "1/2", "-3.5", "Paris", "1,234", "50\\\\%", "2\\\\sqrt{3}")))
    flags = f"--model {train_base} --data d.jsonl --verifier number --out q"
    assert train_go(flags) == 2
    assert "accept every answer of the data, found number, which rejects 2 of them" in (
        capsys.readouterr().err)
    vp.TrajectoryPool("empty")
    open("t.jsonl", "w").write('{"problem": "+7!d=3"}\n')
    genac_flags = "--method genac --critic BASE --reply 8 --context"
    for flags, words in (("--pool empty", "--pool: "),
                         (f"{genac_flags} 20", "context: expected room"),
                         (f"{genac_flags} 60 --traces t.jsonl", "t.jsonl, line 1: expected a text"),
                         ("--method vine-ppo --delimiter ab", "delimiter: expected text inside")):
        assert train_go(f"--out q {flags}") == 2 and words in capsys.readouterr().err, flags


# ---- figures/lab.py, compare.py, values.py -------------------------------------------------------

def test_figures_jobs_are_done_once(tmp_path, capsys):
    """A job's result is read back from its file; a finished job is not done again, a new one is; a
    name with other arguments is refused, since the old result would be taken for its own."""
    jobs, folder = [lab.Job(str(n), math.factorial, (n,)) for n in (3, 4, 5)], str(tmp_path)
    assert lab.run_jobs(jobs[:2], folder) == {"3": 6, "4": 24}
    (tmp_path / "4.json").write_text("7")  # what stands there is believed
    lab.announce(folder, {"to begin": jobs[:2], "to go on": jobs[2:], "to end": 2})
    assert ("5 runs in 3 stages (2 to begin, then 1 to go on, then 2 to end), 2 of them done"
            in capsys.readouterr().out)
    assert lab.run_groups({"a": jobs, "b": jobs[:1]}, folder, 2) == {"a": [6, 7, 120], "b": [6]}
    with pytest.raises(ValueError, match=r"--folder: expected 4 in .* to be of \[6\], found"):
        lab.run_jobs([lab.Job("4", math.factorial, (6,))], folder)


@pytest.mark.parametrize("job, error, message", [
    (lab.Job("dead", signal.raise_signal, (9,)), RuntimeError, "dead was killed by signal 9: .*og"),
    (lab.Job("bad", math.sqrt, (-1,)), RuntimeError, "bad ended with status 3: .*: .*bad.log"),
    (lab.Job("quick", abs, (1,)), KeyboardInterrupt, None)])
def test_figures_no_job_outlives_the_runner(tmp_path, monkeypatch, job, error, message):
    """A job that is killed or raises ends the others, in a sentence with its name and its log;
    Ctrl-C ends them all."""
    if error is KeyboardInterrupt:
        monkeypatch.setattr(lab, "settle", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(error, match=message):
        lab.run_jobs([lab.Job("slow", time.sleep, (600,)), job], str(tmp_path))
    assert not multiprocessing.active_children()


def test_figures_training_run(tmp_path, monkeypatch):
    """A run without a checkpoint starts in an empty folder, one with a checkpoint is resumed. One
    that stopped of itself has its reason as a result; any other failure is an error."""
    main, folder, job = Mock(return_value=0), tmp_path / "a", lab.training("a", ["--steps", "2"])
    monkeypatch.setattr(train, "main", main)
    folder.mkdir(), (folder / "notes").touch()
    lab.train_run(str(folder), *job.arguments)
    assert (folder / "notes").exists()  # train.main refuses it
    with pytest.raises(ValueError, match="--folder: expected a pool or nothing in .*, found notes"):
        lab.clear_pool(str(folder))
    (folder / "notes").unlink(), train.own_folder(str(folder)).close()
    lab.train_run(str(folder), *job.arguments)
    assert not folder.exists() and main.call_args[0][0][:3] == ["--steps", "2", "--out"]
    monkeypatch.setattr(train, "checkpoints", lambda out: ["one"])
    lab.train_run(str(folder), *job.arguments)
    assert main.call_args[0][0][:2] == ["--resume", str(folder)]
    folder.mkdir()
    reason, metrics = "stopped: nothing to learn from", '{"step": 1, "rollout/success": 0.25}\n'
    for status, text in ((2, "error: no"), (1, "stopped: before a step"), (-9, "step 2"), (0, None),
                         (1, "stopped: KeyError: 'x' (--debug shows where)")):
        (tmp_path / "a.log").write_text(text or f"step 3\r{reason}\n")
        if not text:
            (folder / "metrics.jsonl").write_text(metrics)
            assert lab.settle(job, str(tmp_path), 1) == reason
        else:
            with pytest.raises(RuntimeError, match="^a (ended with|was killed).*" + text[:20]):
                lab.settle(job, str(tmp_path), status)
    run = lab.result(job, str(tmp_path))
    assert run["stopped"] == reason and compare.success(run) == 0.25


def test_figures_numbers_by_hand(capsys):
    """Mean ± sample standard deviation; one value has none. A difference shows if it is above two
    times its standard error, which is √2 for 2, 4 and 0, 2; one value on a side has no verdict. A
    band is as wide as the standard deviation and ends where no curve has been."""
    assert lab.mean_sd([0.1, 0.3]) == "0.200 ± 0.141" and lab.mean_sd([0.25]) == "0.250"
    assert lab.percent(0.657) == "65.7 %" and lab.percent(None) == lab.mean_sd([]) == "–"
    for better, worse, text in (
            ([2, 4], [0, 2], "does not show (+2.000 ± 1.414)"), ([1], [0, 0], "– (+1.000)"),
            ([4, 6], [0, 2], "shows (+4.000 ± 1.414)"), ([0, 1], [2], "– (-1.500)"),
            ([0, 2], [4, 6], "does not show (-4.000 ± 1.414)")):
        assert lab.verdict(better, worse) == text
    assert lab.squared_error([0.5], [0.2], 8) == pytest.approx(0.3**2 - 0.2 * 0.8 / 7)
    lab.print_table(["a", "b", "c"], [[None, math.nan, 0.5]])
    assert capsys.readouterr().out == "| a | b | c |\n| --- | --- | --- |\n| – | – | 0.500 |\n"
    axis = Mock()
    lab.band(axis, np.arange(2), [np.array(x) for x in ([0.0, 1], [0.0, 0], [3.0, 2])], "", "")
    low, high = axis.fill_between.call_args[0][1:]
    assert np.allclose(low, [0, 0]) and np.allclose(high, [1 + 3**0.5, 2]), "means 1; sd √3 and 1"


def test_figures_errors_are_one_sentence(capsys, monkeypatch):
    """Each kind of end has its exit status and, unless --debug is given, one line."""
    for error, status, text in ((ValueError("a"), 2, "error: a"), (RuntimeError("b"), 1, "b"),
                                (KeyError("c"), 1, "KeyError:"), (KeyboardInterrupt(), 130, "")):
        assert lab.script("x", "x", {}, Mock(side_effect=error), []) == status
        lines = capsys.readouterr().err.strip().splitlines()
        assert len(lines) == 1 and text in lines[0]
    lab.script("x", "x", {}, lambda _: 1 / 0, ["--debug"])
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for flags, message in (
            ("single --lrs 1e-4;2e-4", "--lrs: rates separated by commas"),
            ("single --lrs 0,1e-4", "expected a number above 0, found 0"),
            ("single --folder=", "--folder: expected the name of a folder"),
            ("single --seeds 0", "--seeds: expected 1 or more, found 0"),
            ("single --steps", "--steps: expected a value, found no argument"),
            ("singel", "names: expected some of whiten, single, group, daps, loss, sweep, "
                       "variants, methods, found singel"),
            ("single --what", "expected a flag of --help, found --what"), ("", "found none"),
            ("single --tune-seeds 0", "--tune-seeds: expected 1 or more"),
            ("--plot", "pip install matplotlib")):
        assert compare.main(flags.split()) == 2 and message in capsys.readouterr().err, flags
    assert lab.script("x", "x", {}, values.main, ["nowhere"], common=(), positional="run") == 2
    assert "RUN: expected" in capsys.readouterr().err


def test_figures_curves_at_equal_responses():
    """Discarded responses count: of two steps of 10 and 30 sampled, with success 0 → 0.4 → 0.6, it
    is 0.2 after 5, 0.5 after 25, 0.6 ever after; a null is left out; seconds add up by phase. p of
    a level is the share right in the batches around: one level at ½, one at 1, then at ½ too."""
    run = {"stopped": "", "metrics": [
        {"eval/avg@2": 0.0}, {"rollout/sampled": 10, "time/a": 1, "time/b": 2, "eval/avg@2": 0.4},
        {"rollout/sampled": 30, "time/a": 4, "critic/x": None}, {"eval/avg@2": 0.6}]}
    points = compare.curve(run)
    assert points == [(0, 0, 0.0), (10, 3, 0.4), (40, 7, 0.6)] and compare.success(run) == 0.6
    assert np.allclose(compare.at(points, np.array([5, 25, 40, 99])), [0.2, 0.5, 0.6, 0.6])
    assert compare.at(points, 5, 1) == pytest.approx(0.5) and compare.curve(run, "critic/x") == []
    assert np.allclose(compare.on_the_way(points, 30), [0.4, 0.4 + 0.2 / 3, 0.4 + 0.4 / 3])
    step = {"prompts/sampled": [0, 0, 1, 1], "prompts/right": [1, 0, 1, 1],
            "prompts/trained": [0, 0, 1]}
    later = {"prompts/sampled": [1] * 2, "prompts/right": [0] * 2, "prompts/trained": [1]}
    assert compare.medium_share([step], ["a", "b"]) == pytest.approx(2 / 3)
    assert compare.medium_share([step, later], ["a", "b"], window=1) == 1.0


def test_figures_rates_are_tuned_on_seeds_of_their_own(tmp_path, monkeypatch, capsys):
    """The rate with the best mean over the tuning seeds is reported, on other seeds; "–" stands
    where there is no critic; an arm that ends below half of its best has collapsed."""
    def run(job):
        flags = dict(zip(job.arguments[::2], job.arguments[1::2]))
        seed, lr = int(flags["--seed"]), float(flags["--lr"])
        assert ("--eval-data" in job.arguments) == (seed >= 100), "problems of their own"
        end = {100: lr == 1e-3, 101: 0.6 * (lr == 1e-4)}.get(seed, 0.1 * seed)  # means ½ and 0.3
        step = {"rollout/sampled": 16, "rollout/discarded": 0, "time/x": 1.0, "actor/entropy": 0.5,
                "rollout/length": 9, "eval/avg@2": 0.3,
                "prompts/sampled": [0], "prompts/right": [1], "prompts/trained": [0]}
        return {"stopped": "", "metrics": [step, {"eval/avg@2": float(end)}]}

    monkeypatch.setattr(lab, "run_jobs", lambda jobs, *_, **__: {
        job.name: None if job.quiet else run(job) for job in jobs})
    monkeypatch.setattr(rollout, "build_base", lambda: None)
    flags = ["group", "--lrs", "1e-4,1e-3", "--seeds", "2", "--folder", str(tmp_path)]
    assert compare.main(flags) == 0
    rows, text = json.loads((tmp_path / "group.json").read_text()), capsys.readouterr().out
    s3ac, grpo = rows.values()
    assert s3ac["by lr"] == {"1e-4": 0.3, "1e-3": 0.5} and s3ac["lr"] == "1e-3"
    assert s3ac["success"] == pytest.approx([0.1, 0.2]) and "| s3ac-k-8 | 1e-3 |" in text
    assert grpo["collapsed"] == [True, False] and "| 50 % |" in text
    problems = load_problems(tmp_path / "tuning.jsonl")  # training problems of their own
    assert len(problems) == 414 and {p.prompt for p in problems} <= {
        p.prompt for p in task_problems()}
    assert "| grpo-x | 0.500 | 9.000 | – |" in text and "| 80.5 % |" in text
    assert "| s3ac-k-8 above grpo-x | does not show (+0.000 ±" in text


def test_figures_values_by_hand(monkeypatch):
    """`+7!c=3`: the first digit that is not the chain's. Of three problems with two responses each
    last V gets all right, least V two. So many of the starts are drawn, and no other."""
    tokenizer = rollout.task_tokenizer()
    run = SimpleNamespace(tokenizer=tokenizer, cfg=SimpleNamespace(verifier="chain"),
                          eval_problems=[Problem("+7!c=3", "c4")])
    for text, at in (("a0b7c4", None), ("a0b0c4", 3), ("a3", 1), ("", None), ("a0b7cx", 5)):
        ids = torch.tensor([tokenizer(f"{text}$").input_ids])
        one = SimpleNamespace(tokens=ids, mask=ids >= 0, prompt_id=torch.tensor([0]))
        assert values.first_error(run, one, 0) == at
    batch = SimpleNamespace(
        tokens=torch.tensor(tokenizer(["a1", "a2", "b1", "b2", "c1", "c2"]).input_ids),
        mask=torch.ones(6, 2, dtype=torch.bool), reward=torch.tensor([1.0, -1, -1, 1, 1, -1]),
        value=torch.tensor([[.1, .9], [.2, .3], [0, .1], [.4, .8], [.5, .6], [0, .2]]))
    assert values.best_of_n(run, batch, 2)["2"] == pytest.approx({
        "random": 0.5, "last V": 1.0, "least V": 2 / 3, "majority": 2 / 3, "pass@n": 1.0})
    monkeypatch.setattr(train, "monte_carlo", lambda run, batch, starts, *_: starts.sum()[None])
    starts = torch.tensor([[1, 0, 1, 1, 0], [1, 1, 0, 1, 0]]).bool()
    for n, expected in ((2, 2), (6, 6), (9, 6)):
        rng = torch.Generator().manual_seed(0)
        chosen, p = lab.random_truths(None, None, starts, [], n, 8, rng)
        assert p.tolist() == [expected] and not (chosen & ~starts).any()


def test_figures_noise_of_known_gradients():
    """Gaussian gradients of mean m and covariance s² I in d dimensions have SNR |m|²/(d s²) within
    the jackknife's error, 0 for m = 0; the mean cosine with m is E[m·g/|g|]/|m|, with the other
    blocks' sum of pure noise 0. Parallel estimators have one SNR, so a ratio without error."""
    d, each, rng = 200, 60, torch.Generator().manual_seed(0)
    def sums(mean, s):
        g = mean + s * torch.randn(each * noise.BLOCKS, d, generator=rng, dtype=torch.float64)
        rows = torch.cat([g, nn.functional.normalize(g), g.square().sum(1, keepdim=True)], 1)
        return rows.view(each, noise.BLOCKS, -1).sum(0)

    mean = torch.ones(d, dtype=torch.float64)  # |m|² = d
    for s in (1.0, 4.0):
        one = sums(mean, s)
        double = torch.cat([2 * one[:, :d], one[:, d:-1], 4 * one[:, -1:]], 1)
        (snr, cosine), (same, _) = (noise.quality(x, sums(mean, 0.1), each) for x in (one, double))
        value, error = map(float, noise.ratio(snr, 1 / s**2, 6).split(" ± "))
        assert abs(value - 1) < 4 * error < 0.4, (s, value, error)
        exact = nn.functional.normalize(mean + s * torch.randn(
            9000, d, generator=rng, dtype=torch.float64)).sum(1).mean() / d**0.5
        assert cosine[0] == pytest.approx(exact.item(), abs=0.02)
        assert len(snr) == len(cosine) == 17 and noise.ratio(same, snr) == "1.00 ± 0.00"
    nothing = sums(0 * mean, 1.0)
    snr, cosine = noise.quality(nothing, nothing, each)
    assert abs(snr[0]) < 5e-4 and abs(cosine[0]) < 0.01  # biased: 1/960, and 1/√960


def test_figures_noise_true_values_by_hand(monkeypatch, capsys):
    """`+7!b=3`: a0b7. Values are behind by right − stated; a key holds less and less. A value is
    the mean R of the states with the same key, by the first one that enough states share."""
    tokenizer = task_tokenizer()
    run = SimpleNamespace(tokenizer=tokenizer, problems=[Problem("+7!b=3", "b7")])
    def batch(*texts):
        tokens = torch.tensor(tokenizer([f"{x}$" for x in texts]).input_ids)
        return SimpleNamespace(
            tokens=tokens, mask=tokens >= 0, prompt_id=torch.zeros(len(texts)).long(),
            reward=torch.tensor([rollout.chain_reward(x, "b7") for x in texts]))
    keys = [x[2] for x in noise.states(run, batch("a3b0"))]
    assert [x[0][2] for x in keys] == [0, 0, 7, 7, 7] and [x[1][3] for x in keys] == [0, 0, 1, 1, 1]
    assert keys[2] == [("+7!b", 2, 7), ("!b", 2, False, 1), ("!b", 2, False), ("!", False)]
    monkeypatch.setattr(noise, "LEAST", 2)
    sample = batch("a0b7", "a0b7", "a0b0", "a3b0", "a3b7", "a3b1")
    V = noise.true_values(run, sample, batch("a0b7", "a3b0", "a5b7"))
    assert torch.allclose(V[0], torch.tensor([0, 0, 1 / 3, 1 / 3, 1.0]))
    assert torch.allclose(V[1:, 2], torch.tensor([-1 / 3, -1 / 3])), "a5 is like a3: wrong"
    result = {"known": {"success": "0.5"}, "of": {noise.BASE: [[0.02] * 17, [0.1] * 17],
                                                  "x": [[0.03] * 17, [0.2] * 17]}}
    noise.print_tables({"first": result})
    out = capsys.readouterr().out
    assert "| x | 30.0 ± 0.0 | 1.50 ± 0.00 | 0.200 ± 0.000 | 4.00 ± 0.00 |" in out


# ---- figures/critics.py, coverage.py -------------------------------------------------------------

@pytest.mark.parametrize("prefix, checks", [
    ("", ""), ("a0", "a00="), ("a0b7c4", "a00=b77=c44="), ("a0b7c7", "a00=b77=c47!"),
    ("a0b0c4", "a00=b70!c44="), ("a0b", "a00="), ("a0c4", "a00=b7?!c44="), ("aG", "a0G!"),
    ("a0b7c4d1e8", "a00=b77=c44=d11=e88=")])  # the last one is past the end
def test_figures_oracle_checks_each_step(prefix, checks):
    """`+7!d=3`: each step's letter, right and stated value, do they agree; goal, rate, score. Of so
    few steps a wrong value never becomes right again; an easy prompt never slips."""
    state, tokenizer = State("+7!d=3", prefix, critics.SIZE, 0.6), task_tokenizer()
    trace, p = critics.oracle_trace(state), critics.oracle_chance(state)
    assert trace == f"{checks}d0.60<answer>{round(10 * p)}</answer>"
    right = not checks.endswith("!") and len(prefix) < 10  # b0c4: two errors cancel
    assert p == pytest.approx(right * (1 - critics.slip_at(0.6)) ** (4 - len(checks) // 4))
    assert critics.oracle_chance(state._replace(question="+7@d=3")) == right
    slip, state = critics.slip_at(0.6), state._replace(question="+9!c=3", prefix="a1")
    assert critics.oracle_chance(state) == pytest.approx(2 * slip * (1 - slip))  # 1 + 9 = 10
    assert tokenizer.decode(tokenizer(trace).input_ids) == trace  # in the task's alphabet


@pytest.mark.parametrize("slip", [0.0, 0.07, 0.3, 0.5])
def test_figures_success_is_the_chain_s(slip):
    """The closed form is the chain of ten digits, simulated as a distribution, in float64: a slip
    leaves a value behind by the addend. The slip is found again from the success rate."""
    mean = 0.0
    for by in range(1, 10):
        right = torch.eye(10, dtype=torch.float64)  # row: behind now; column 0: right m steps later
        step = right * (1 - slip) + slip * right.roll(by, 1)
        for m in range(critics.STEPS + 1):
            expected = [critics.chance(by, m, behind, slip) for behind in range(10)]
            assert right[:, 0].tolist() == pytest.approx(expected, abs=1e-12)
            mean += right[0, 0].item() / (9 * critics.STEPS) * (m > 0)
            right = right @ step
    rate = critics.success_at(slip)
    assert rate == pytest.approx((1 + mean) / 2, abs=1e-12)
    assert critics.slip_at(rate) == pytest.approx(slip, abs=2e-6)


def test_figures_sets_hold_what_they_say():
    """Hard prompts alone. No critic and no policy has seen the unseen operands. Pools: 16 that
    differ, cut at one step, only the first is right. The truth scores 0."""
    problems, states, pools = critics.test_sets(16, 0)
    pair = lambda question: (question[1], question[5])
    assert not {pair(p.prompt) for p in task_problems()} & {
        pair(x.question) for x in states["unseen operands"]} and len(pools) == 4
    assert max(p.answer[0] for p in problems) == critics.NEAR
    new = {x.question for name in ("in distribution", "stronger actors") for x in states[name]}
    assert not new & {p.prompt for p in problems}
    for name, rows in states.items():
        assert len(rows) == 16 and all(x.question[2] == HARD and (
            x.question[3] > critics.NEAR) == (name == "longer chains") for x in rows)
    # an even number of slips with the addend 5 is right again: wrong values have a chance, too
    pools += critics.candidate_pools(2, 0, [p for p in problems if p.prompt[1] == "5"])
    for pool, p in zip(pools, map(critics.true_p, pools)):
        assert p[0] > p[1:].max() + 0.1
        assert len({(x.question, len(x.prefix)) for x in pool}) == 1 and len({*pool}) == 16
    result = critics.measure(lambda rows: critics.true_p(rows).tolist(), states, pools)
    assert all(x == (1 if "top-1" in name else 0) for name, x in result.items())


@pytest.mark.parametrize("name", ["head", "coverage", "critics", "noise"])
def test_figures_tiny_flags(name):
    """--tiny has a folder of its own and smaller sizes, one seed; no flag of it is refused."""
    module = importlib.import_module(f"figures.{name}")
    tiny, full = (vars(lab.parser(name, module.__doc__, module.SIZES, tiny=bool(x)).parse_args(x))
                  for x in (["--tiny"], []))
    assert tiny["folder"] == full["folder"] + "-tiny" and (tiny["seeds"], full["seeds"]) == (1, 3)
    sizes = [x for x in module.SIZES if type(full[x]) is int and x != "seed"]
    assert sizes and tiny["tiny"] and all(tiny[x] < full[x] for x in sizes)


# ---- figures/speed.py ----------------------------------------------------------------------------

class _SpeedPeak(TorchDispatchMode):
    """The most bytes alive at once in tensors that were made inside."""
    alive, most = weakref.WeakValueDictionary(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if torch.is_tensor(x):
                self.alive[x.untyped_storage()._cdata] = x.untyped_storage()
        self.most = max(self.most, sum(storage.nbytes() for storage in self.alive.values()))
        return out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("H, I, L", [(64, 192, 4), (128, 192, 4), (64, 384, 8)])
def test_figures_speed_memory_is_computed_to_a_fifth(H, I, L, recompute, dtype):
    """Activations of one pass against the measured peak, gradients left out; states by hand."""
    config = LlamaConfig(hidden_size=H, intermediate_size=I, num_hidden_layers=L, vocab_size=100,
                         num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    actor = train.Actor(LlamaForCausalLM(config).to(getattr(torch, dtype)), 1.0)
    if recompute:
        train.checkpoint_activations(actor.model)
        actor.train()
    tokens = torch.ones(4, 256).long()
    with _SpeedPeak() as peak:
        actor(tokens, tokens.bool(), tokens[:, 2:].bool(), False).sum().backward()
    measured = peak.most - sum(p.numel() * p.element_size() for p in actor.parameters())
    flags = f"--token-budget 1024 --max-prompt 2 --max-response 254 --compute-dtype {dtype}"
    cfg = train.parse(flags.split() + ["--checkpoint-activations"] * recompute)[0]
    one, two = ({name: 2**30 * x for name, x in speed.memory_gib(config, cfg, n, False).items()}
                for n in (1, 2))
    assert 0.8 < one["pass"] / measured < 1.25
    n = sum(p.numel() for p in actor.parameters() if p.ndim > 1)  # 16 bytes; actor and critic
    assert (one["states"], two["states"], one["copy"], two["copy"]) == (32 * n, 16 * n, 0, 4 * n)


def test_figures_speed_tables(capsys, monkeypatch):
    """Tiny sizes print whole tables; calls take turns; a step's phases, their sum, ms a response.
    doubling = loop for every λ in float64; the closed form where λ^T is no tiny number."""
    case = torch.randn(3, 77).double(), torch.tensor([1.0, -1, 1]).double(), torch.ones(3, 77)
    estimators = speed.estimators()
    for lam, name in itertools.product((0.0, 0.3, 0.95, 1.0), list(estimators)[:4]):  # own ones
        if name != "closed form" or lam > 0.9:
            apart = estimators[name](*case, lam) - gae.gae_loop(*case, lam)
            assert apart.abs().max() < 1e-10, name
    order = []
    timed = speed.alternate({x: lambda x=x: order.append(x) for x in "ab"}, 9)
    turns = [order[i : i + 2] for i in range(0, 20, 2)]
    assert [*"ab"] in turns and [*"ba"] in turns and all(len({*x}) == 2 for x in turns)
    assert [len(pairs) for pairs in timed.values()] == [9, 9]
    speed.gae_table(((2, 5), (3, 7)), 1), speed.sampler_table("", 3, 4, 2, 0)
    row = {"rollout/success": 0.5, "rollout/sampled": 50, "time/rollout": 1.0, "time/actor": 4.0}
    rows = [{"eval/avg@1": 0.1}, row | {"time/actor": 99.0}, row, row]
    runs = {"s3ac": {"metrics": [x | {"time/critic": 2.0} for x in rows]}, "b": {"metrics": rows}}
    monkeypatch.setattr(lab, "run_jobs", lambda *jobs, **title: runs)
    speed.step_table(3)
    flags = lab.parser("speed", "speed", speed.FLAGS, common=(), positional=(*speed.BENCHES,))
    speed.main(flags.parse_args(["memory"]))
    with pytest.raises(ValueError, match="names: expected some of gae, .*, found nonsense"):
        flags.parse_args(["nonsense"])
    out = capsys.readouterr().out
    for line in ("closed form", "| model.generate |", "| time/critic | 2.000 | – |\n| all | 7.000 "
                 "| 5.000 |\n| ms per response sampled | 140.000 | 100.000 |", " 360 | 247 | 190 "):
        assert line in out, line
    if sys.platform == "linux":
        assert all(map(math.isfinite, speed.logp_cost("torch", 64, 9000, 8)))


# ---- the project ---------------------------------------------------------------------------------

PROJECT = Path(train.__file__).resolve().parent
PROJECT_LEAVES = "gae", "critic", "actor_loss", "daps", "rollout", "genac"
PROJECT_CONCEPTS = *PROJECT_LEAVES, "value_pretrain", "train"


def _project_imports(tree):
    """First names of the modules that a syntax tree imports, at any depth but in demo functions."""
    if isinstance(tree, ast.FunctionDef) and "demo" in tree.name:
        return set()
    names = {alias.name for alias in tree.names} if isinstance(tree, ast.Import) else set()
    names |= {tree.module} if isinstance(tree, ast.ImportFrom) else set()
    inner = map(_project_imports, ast.iter_child_nodes(tree))
    return {name.split(".")[0] for name in names}.union(*inner)


def test_project_imports():
    """A leaf imports no sibling, no concept file the laboratory, and there is no circle."""
    allowed = dict.fromkeys(PROJECT_LEAVES, set()) | {"value_pretrain": {"critic", "rollout"}}
    for name in PROJECT_CONCEPTS:
        uses = _project_imports(ast.parse((PROJECT / f"{name}.py").read_text()))
        left = uses & {*PROJECT_CONCEPTS, "figures", "test_all"}
        assert left <= allowed.get(name, {*PROJECT_CONCEPTS[:-1]}), (name, left)


@pytest.mark.parametrize("path", [*PROJECT.glob("*.py"), *PROJECT.glob("figures/*.py")], ids=str)
def test_project_functions_are_short_typed_and_explained(path):
    """At most 40 lines, 9 arguments and 100 columns; what is public has types and a docstring."""
    assert max(map(len, path.read_text().splitlines())) <= 100
    tree = ast.parse(path.read_text() if "test_" not in path.name else "")
    classes = [x for x in tree.body if isinstance(x, ast.ClassDef) and x.name[0] != "_"]
    public = {f for scope in (tree, *classes) for f in scope.body}
    for f in (x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef)):
        args = [*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs]
        args = [x for x in args if x.arg not in ("self", "cls")]
        kernel = any("triton" in ast.unparse(x) for x in f.decorator_list)
        assert kernel or f.end_lineno - f.lineno < 40 and len(args) <= 9, f.name
        if f in public and f.name[0] != "_":
            assert ast.get_docstring(f) and f.returns and all(x.annotation for x in args), f.name


def test_project_demos_run(tmp_path):
    """`python X.py` shows its concept and exits with 0."""
    runs = [subprocess.Popen(
        [sys.executable, PROJECT / f"{name}.py"], cwd=tmp_path, stdout=-1, stderr=-2, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"}) for name in PROJECT_CONCEPTS[:-1]]
    for run in runs:
        text = run.communicate()[0]
        assert run.returncode == 0 and len(text) > 200, (run.args, text)


def test_project_demos_refuse_in_one_sentence(tmp_path):
    """Flags out of range, unknown or empty: status 1, or argparse's 2, and no traceback."""
    runs = [(line, subprocess.Popen(
        [sys.executable, *line.split(" ")], cwd=PROJECT, stdout=-1,
        stderr=-1, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})) for line in (
        "gae.py --foo", "actor_loss.py --foo", "critic.py --hidden 7", "daps.py --batch 5000",
        "rollout.py --seed -1", "value_pretrain.py --pool=", f"genac.py --critic {tmp_path}",
        "genac.py --critic no", "-m figures.head --model no")]
    for line, run in runs:
        out, error = run.communicate()
        last = error.strip().splitlines()[-1]
        assert run.returncode in (1, 2) and not out and "error: " in last, (line, error)
        assert "Traceback" not in error and (run.returncode == 2 or error.count("\n") == 1), line


def test_project_readme_blocks_run_as_printed(train_go, monkeypatch):
    """Copy one function; sums for --preset small; Changing one thing, a whole run; vLLM, against a
    stub of its interface."""
    text = (PROJECT / "README.md").read_text()
    copied, sums, changed, vllm = re.findall(r"```python\n(.*?)```", text, re.S)
    subprocess.run([sys.executable, "-c", copied + "\nassert keep.all()"], cwd=PROJECT, check=True)
    exec(sums)
    assert len(load_problems("sums.jsonl")) == 3000
    train.check(train.parse("--preset small --model run/actor --data sums.jsonl".split())[0])
    for table, name in ((train.ADVANTAGES, "return"), (train.LOSSES, "vanilla"), (
            train.SELECTIONS, "last"), (train.METHODS, "mine"), (rollout.SAMPLERS, "mine")):
        monkeypatch.setitem(table, name, next(iter(table.values())))  # taken out again
    status, main, small = [], train.main, (
        "--steps 1 --rollout-batch 8 --verifier even --eval-problems 2 --max-response 20 --out r")
    monkeypatch.setattr(train, "main", lambda argv: status.append(main([*argv, *small.split()])))
    exec(changed, {})
    assert status == [0]
    logp = lambda seed: [{i: SimpleNamespace(logprob=-float(seed))} for i in (5, 6, 3)]
    reply = lambda p: SimpleNamespace(token_ids=(5, 6, 3), logprobs=logp(p.seed))
    engine = SimpleNamespace(generate=lambda prompts, params: [
        SimpleNamespace(outputs=[reply(p)]) for _, p in zip(prompts, params, strict=True)])
    exec(vllm, names := dict(torch=torch, rollout=rollout, update_weights=lambda *args: None,
                             SamplingParams=SimpleNamespace, ENGINE=engine))
    tokens, attention, mask, logp = names["vllm_sampler"](
        None, [[1, 2]] * 8, max_new_tokens=5, temperature=1.0, eos_id=[3], pad_id=3,
        generator=torch.Generator().manual_seed(0), max_rows=8)
    assert tokens.tolist() == [[1, 2, 5, 6, 3]] * 8 and attention.all() and mask.all()
    assert len(logp[:, 0].unique()) == 8  # K responses of one prompt differ
