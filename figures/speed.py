"""How fast and how large: every bench of the project, each beside what one would use without it.

    gae      the tiers of gae.py beside a closed form, Σ_{l≥t} λ^l δ_l / λ^t, and doubling,
             y_t ← y_t + λ^s y_{t+s} for s = 1, 2, 4, …, both without a mask, and beside numba,
             verl and torchrl where they are installed
    logp     log π(a_t|s_t) forward and backward beside log_softmax().gather(): time, peak memory
    sampler  response tokens per second beside transformers' model.generate
    step     where the time of a step of S3AC and GRPO-X goes: the embedded task, on the CPU
    memory   computed, not measured: peak memory of Qwen2.5's sizes on 1 to 8 GPUs

The calls of a bench take turns, in random order, and a figure is the median of its calls. Compare
rows of one table, not of two runs.

    python -m figures.speed                            all of them, minutes
    python -m figures.speed sampler --model DIR        one of them, your model
"""
import argparse
import contextlib
import multiprocessing
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import gae
import rollout
import train
from actor_loss import linear_token_logp
from figures import lab

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # of models
KERNELS = ["triton"] if DEVICE == "cuda" and gae.triton else []
FLAGS = {  # name: default, default, what it is
    "model": ("", "", "sampler: a Hugging Face folder"), "repeats": (7, 7, "gae: calls per figure"),
    "logp": (*[(2048, 49152, 576)] * 2, "tokens, words, width"),
    "sampler": (*[(512, 512, 128)] * 2, "prompts, tokens of a response, rows at once"),
    "steps": (6, 6, "step: rollout batches", 2), "seed": (0, 0, "sampler", 0)}


def alternate(calls: dict[str, Callable], repeats: int) -> dict[str, list[tuple]]:
    """Name -> (seconds, result) of each call, `repeats` times in turn, in random order, after one
    turn that does not count. A call of more than two seconds is made once, and counts."""
    timed, rng = {name: [] for name in calls}, random.Random(0)
    for _ in range(repeats + 1):
        for name, call in rng.sample([*calls.items()], len(calls)):
            if not timed[name] or timed[name][0][0] < 2:
                start, result = time.perf_counter(), call()
                if DEVICE == "cuda":
                    torch.cuda.synchronize()
                timed[name].append((time.perf_counter() - start, result))
    return {name: pairs[1:] or pairs for name, pairs in timed.items()}


def deltas(V: Tensor, R: Tensor) -> Tensor:
    """δ [B, T] where every token counts, of V [B, T] and R [B]."""
    delta = nn.functional.pad(V[:, 1:], (0, 1)) - V                     # δ_t = V_{t+1} − V_t
    delta[:, -1] += R
    return delta


def closed_form(V: Tensor, R: Tensor, mask: Tensor, lam: float) -> Tensor:
    """Â [B, T] without regard to the mask; useless where λ^T leaves the range of the dtype."""
    power = lam ** torch.arange(V.shape[1], dtype=V.dtype, device=V.device)
    return (power * deltas(V, R)).flip(1).cumsum(1).flip(1) / power     # Σ_{l≥t} λ^l δ_l / λ^t


def doubling(V: Tensor, R: Tensor, mask: Tensor, lam: float) -> Tensor:
    """Â [B, T] without regard to the mask, for every λ, in log₂ T passes."""
    y, s = deltas(V, R), 1
    while s < y.shape[1]:
        y[:, :-s] += lam**s * y[:, s:]                                  # y_t ← y_t + λ^s y_{t+s}
        s *= 2
    return y


def estimators() -> dict[str, Callable[[Tensor, Tensor, Tensor, float], Tensor]]:
    """Name -> function of V [B, T], R [B], mask [B, T] and λ that returns Â [B, T]."""
    named = {x: getattr(gae, f"gae_{x}") for x in ("loop", "torch", *KERNELS)}
    named |= {"closed form": closed_form, "doubling": doubling}
    last = lambda V, R: nn.functional.pad(R[:, None], (V.shape[1] - 1, 0))  # rewards [B, T]
    with contextlib.suppress(ImportError):
        import numba

        @numba.njit(parallel=True)
        def loop(V, R, c, out):
            for b in numba.prange(len(V)):
                after, advantage = R[b], 0.0
                for t in range(V.shape[1] - 1, -1, -1):
                    advantage = after - V[b, t] + c * advantage
                    after, out[b, t] = V[b, t], advantage
            return out

        named["numba"] = lambda V, R, m, c: torch.from_numpy(
            loop(V.cpu().numpy(), R.cpu().numpy(), c, torch.empty(V.shape).numpy())).to(DEVICE)
    with contextlib.suppress(ImportError):
        from verl.trainer.ppo.core_algos import compute_gae_advantage_return as verl_gae
        # verl whitens its advantages, so Â is its return less V
        named["verl"] = lambda V, R, m, c: verl_gae(last(V, R), V, m.float(), 1.0, c)[1] - V
    with contextlib.suppress(ImportError):
        from torchrl.objectives.value.functional import vec_generalized_advantage_estimate as rl_gae

        def torchrl(V: Tensor, R: Tensor, mask: Tensor, lam: float) -> Tensor:
            r = last(V, R)
            parts = V, nn.functional.pad(V[:, 1:], (0, 1)), r, r.bool()
            return rl_gae(1.0, lam, *(x[..., None] for x in parts))[0][..., 0]

        named["torchrl"] = torchrl
    return named


def gae_table(shapes: tuple[tuple[int, int], ...], repeats: int) -> None:
    """ms of a call and its ratio to `torch` at each shape (responses, tokens); at the last shape
    the largest difference from the loop in float64, for the adaptive λ and for λ = 0.95."""
    named = estimators()
    rows, head = {name: [name] for name in named}, ["float32"]
    for B, T in shapes:
        lam, (V, R, mask) = gae.adaptive_lambda(torch.tensor(T)).item(), (
            torch.randn(B, T, device=DEVICE), *torch.ones(2, B, T, device=DEVICE))
        case = V, R[:, -1], mask.bool()
        timed = alternate({x: partial(f, *case, lam) for x, f in named.items()}, repeats)
        ms = {name: 1e3 * median(s for s, _ in pairs) for name, pairs in timed.items()}
        for name, row in rows.items():
            row += [ms[name], ms[name] / ms["torch"]]
        head += [f"{B}×{T:,}: ms", "to torch"]
    for x in (lam, 0.95):
        exact = gae.gae_loop(V.double(), *case[1:], x)
        for name, f in named.items():
            rows[name].append(f"{(f(*case, x) - exact).abs().max():.0e}")
        head.append(f"error at {T:,}, λ = {x:.6g}")
    lab.print_table(head, list(rows.values()))


def peak_bytes() -> int:
    """Most bytes in use (on a CPU: resident, Linux) since the last call."""
    if DEVICE == "cuda":
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak
    peak = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]
    Path("/proc/self/clear_refs").write_text("5")
    return 1024 * int(peak)


def logp_cost(variant: str, n: int, vocab: int, width: int) -> tuple[float, float]:
    """Seconds (best of five) and peak MiB above the inputs of a forward and backward pass."""
    hidden = torch.randn(1, n, width, device=DEVICE, dtype=DTYPE).requires_grad_()
    weight = (torch.randn(vocab, width, device=DEVICE, dtype=DTYPE) / width**0.5).requires_grad_()
    tokens = torch.randint(vocab, (1, n), device=DEVICE)

    def step(rows: int) -> None:
        """A forward and a backward pass over so many tokens."""
        h, a = hidden[:, :rows], tokens[:, :rows]
        logp = (linear_token_logp(h, weight, a, impl=variant) if variant != "log_softmax" else
                (h @ weight.T).float().log_softmax(-1).gather(-1, a[..., None]))
        torch.autograd.grad(logp.mean(), (hidden, weight))

    step(8)  # loads libraries, thread pools and kernels before anything is counted
    peak_bytes()
    before = peak_bytes()
    seconds = min(s for s, _ in alternate({"": partial(step, n)}, 5)[""])
    return seconds, (peak_bytes() - before) / 2**20


def logp_table(n: int, vocab: int, width: int) -> None:
    """Seconds and peak MiB, each variant in a process of its own, so that no peak hides another."""
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        costs = {name: pool.apply(logp_cost, (name, n, vocab, width))
                 for name in ("log_softmax", "torch", *KERNELS)}
    s, m = costs["log_softmax"]
    lab.print_table([f"{n:,} tokens × {vocab:,} words, H = {width}", "s", "ratio", "MiB", "ratio"],
                    [[name, x, x / s, y, y / m] for name, (x, y) in costs.items()])


def sampler_case(folder: str, n: int) -> tuple[nn.Module, list[int], list[list[int]]]:
    """Model, ids that end a response, n prompts: of a folder, or a random 4-layer Llama that draws
    all tokens alike, so that lengths are geometric, and the same in law for every sampler."""
    if folder:
        lab.model_folder(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPE).to(DEVICE)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        problems = [rollout.Problem(f"What is {i} plus {i + 7}?", "") for i in range(n)]
        prompts = [rollout.encode_prompt(tokenizer, problem) for problem in problems]
        return model, rollout.eos_ids(model, tokenizer), prompts
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=100, hidden_size=64, intermediate_size=192, num_hidden_layers=4,
        num_attention_heads=4, max_position_embeddings=1024)).eval().to(DEVICE)
    model.lm_head.weight.data.zero_()
    return model, [0], [torch.randint(1, 100, (5 + i % 26,)).tolist() for i in range(n)]


def sampler_table(folder: str, n: int, limit: int, rows: int, seed: int) -> None:
    """Response tokens per second of n prompts, `rows` under way at once; median of three runs."""
    torch.manual_seed(seed)
    model, eos, prompts = sampler_case(folder, n)

    def ours() -> int:
        """Tokens sampled by rollout.generate."""
        rng = torch.Generator(DEVICE).manual_seed(seed)
        return int(rollout.generate(model, prompts, max_new_tokens=limit, eos_id=eos, pad_id=eos[0],
                                    max_rows=rows, generator=rng)[2].sum())

    def theirs() -> int:
        """Tokens sampled by transformers: with one end, without the padding."""
        total = 0
        for start in range(0, n, rows):
            tokens, attention = rollout.left_pad(prompts[start : start + rows], eos[0], DEVICE)
            out = model.generate(
                tokens, attention_mask=attention.long(), do_sample=True, top_k=0, top_p=1.0,
                max_new_tokens=limit, eos_token_id=eos, pad_token_id=eos[0])[:, tokens.shape[1] :]
            ends = torch.isin(out, torch.tensor(eos, device=DEVICE))
            total += int((~ends).sum() + ends.any(1).sum())
        return total

    timed = alternate({"rollout.generate": ours, "model.generate": theirs}, 3)
    speed = {name: median(tokens / s for s, tokens in pairs) for name, pairs in timed.items()}
    lab.print_table([f"{folder or '4 layers'}, {n} prompts, {rows} rows", "tokens/s", "ratio"], [
        [name, round(x), x / speed["model.generate"]] for name, x in speed.items()])


def step_table(steps: int) -> None:
    """Seconds of a step by phase (medians without the first step), in all, and ms per response."""
    flags = f"--steps {steps} --eval-problems 1 --eval-k 1 --show-every 0 --save-every 0 --method"
    # the critic starts without a pool, prompts are selected from the start: the same work a step
    arms, columns = ("s3ac --pretrain none --daps-uniform 0 --daps-ramp 0", "grpo-x"), {}
    with tempfile.TemporaryDirectory() as folder:
        runs = lab.run_jobs([lab.training(arm.split()[0], f"{flags} {arm}".split(), quiet=True)
                             for arm in arms], folder, 1, title="step")
    for name, run in runs.items():
        lines = [line for line in run["metrics"] if "rollout/success" in line][1:]
        column = {x: median(line[x] for line in lines) for x in lines[0] if x.startswith("time/")}
        ms = 1e3 * sum(column.values()) / median(line["rollout/sampled"] for line in lines)
        columns[name] = column | {"all": sum(column.values()), "ms per response sampled": ms}
    lab.print_table(["seconds", *runs], [
        [x, *(column.get(x) for column in columns.values())] for x in columns["s3ac"]])


def memory_gib(config: LlamaConfig, cfg: train.Config, ranks: int = 1, cuda: bool = True
               ) -> dict[str, float]:
    """Computed peak memory per rank in GiB, by part, for a dense Llama-like config. The factors
    10 H + 4 I per token and layer were fitted to measured peaks, which a test repeats."""
    H, I, V = config.hidden_size, config.intermediate_size, config.vocab_size
    L, heads, kv = config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads
    d, T = getattr(config, "head_dim", None) or H // heads, cfg.max_prompt + cfg.max_response
    layer = 2 * H * d * (heads + kv) + 3 * H * I
    outer = V * H * (1 if config.tie_word_embeddings else 2)
    n, size = L * layer + outer, 2 if cfg.compute_dtype == "bfloat16" else 4
    tokens, rows = max(cfg.token_budget, T), min(cfg.max_rows, -(-cfg.rollout_batch // ranks))
    active = 2 * L * H + 10 * H + 4 * I if cfg.checkpoint_activations else L * (10 * H + 4 * I)
    logits = min(tokens * V, 2**27 if cuda else 2**21)  # linear_token_logp's chunk
    wide = 2 if cfg.rollout_dtype else 4
    gib = {
        "states": 2 * 16 * n / ranks,  # actor, critic: parameter, gradient, two moments in float32
        "copy": n * wide if cfg.rollout_dtype or ranks > 1 else 0,  # the whole model that samples
        "whole": (outer + 2 * layer) * size if ranks > 1 else 0,  # what FSDP2 puts together
        "pass": tokens * active * (2.35 if size == 2 else 4) + 2 * logits * size,  # micro-batch
        "cache": rows * (2 * L * kv * d * T * wide + 3 * 4 * V)}  # of all rows under way
    # states + copy + the larger of an update and a rollout
    gib["peak"] = gib["states"] + gib["copy"] + max(gib["whole"] + gib["pass"], gib["cache"])
    return {name: x / 2**30 for name, x in gib.items()}


def memory_table() -> None:
    """GiB per GPU for Qwen2.5's sizes × response length: bf16 compute, 128 rows sampled at once."""
    rows, names = [], ("hidden_size", "intermediate_size", "num_hidden_layers",
                       "num_attention_heads", "num_key_value_heads")
    for name, *sizes in (("0.5B", 896, 4864, 24, 14, 2), ("1.5B", 1536, 8960, 28, 12, 2),
                         ("7B", 3584, 18944, 28, 28, 4)):
        config = LlamaConfig(vocab_size=151936, tie_word_embeddings=name != "7B",
                             **dict(zip(names, sizes)))
        for T in (3072, 8192, 16384):
            flags = f"--preset qwen2.5-math-1.5b --max-rows 128 --max-response {T}"
            cfg, _ = train.parse(flags.split())
            rows.append([name, T, *(round(memory_gib(config, cfg, n)["peak"])
                                    for n in (1, 2, 4, 8))])
    lab.print_table(["model", "response", "1 GPU", "2 GPUs", "4 GPUs", "8 GPUs"], rows)


BENCHES = {
    "gae": lambda a: gae_table(((16, 2048), (64, 8192), (8, 32768)), a.repeats),
    "logp": lambda a: logp_table(*a.logp), "step": lambda a: step_table(a.steps),
    "sampler": lambda a: sampler_table(a.model, *a.sampler, a.seed),
    "memory": lambda a: memory_table()}


def main(args: argparse.Namespace) -> None:
    """The benches named, or all; the hardware stands above every table."""
    cpuinfo = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
    cpu = re.search(r"model name\s*: (.*)|$", cpuinfo)[1] or sys.platform
    gpu = torch.cuda.get_device_name() + ", " if DEVICE == "cuda" else ""
    for name in args.names or BENCHES:
        print(f"\n{name}: {gpu}{cpu}, {torch.get_num_threads()} threads, torch "
              f"{torch.__version__}\n")
        BENCHES[name](args)


if __name__ == "__main__":
    sys.exit(lab.script("speed", __doc__, FLAGS, main, sys.argv[1:], common=(),
                        positional=(*BENCHES,)))
