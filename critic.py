"""The critic: a transformer with a float32 value head, its loss, and the clipping of its gradient.

    V(s_t) = wᵀ h_t                            w ~ N(0, 1/(H+1)) (std), no bias, float32
    ℓ_t = ½ max((V − R)², (V_old + clip(V − V_old, −c, c) − R)²)       loss = Σ ℓ_t / n_tokens
    ∇_w ℓ_t = e_t h_t     ∇_h ℓ_t = e_t w      e_t = V(s_t) − R
    EV = 1 − Var(R − V) / Var(R)               over the trainable tokens

The two gradients are the point: the head's has the size of h, the backbone's that of w. A small w
starts V near 0, and lets the head dominate the norm. Clipping both by that one norm at 1, as the
actor does, scales the backbone's step to next to nothing. Hence a limit of 10, or `split`: a limit
for each by its own norm.

S3AC §3.3; the clipped loss is the usual one of PPO implementations.

    tokens [B, S] long, attention [B, S] bool      prompts padded left, responses padded right
    value, mask [B, T]; target [B], the return R of all tokens of a row (λ_critic = 1), or [B, T]
    H hidden size. With R ∈ {−1, +1} and γ = 1, V(s_t) estimates 2p − 1, p the success rate

Differs from the paper: c is not stated there, and `split` is an offer of this project. Left out:
the shift from [B, S] to [B, T] (V of the state before token t stands one position to its left:
value = v[:, -T-1:-1]), the optimizer and the sharding.

    python critic.py             the two gradients of a small random model under four sizes of w
    python critic.py --claims    size of w × limit of the norm, 9 pretrainings: Table 4, Figure 12
                                 (--model DIR: those of a second, larger model too)
"""
import argparse
import json
import math
import multiprocessing
import os
import random
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import torch
from torch import Tensor, nn

HEAD_FILE = "value_head.pt"  # beside the backbone's files in a critic's folder


class ValueHead(nn.Linear):
    """A linear layer H -> 1 that computes in float32 whatever enters it, also under autocast."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Values [..., 1] of the states whose last hidden vectors are hidden [..., H]."""
        with torch.autocast(hidden.device.type, enabled=False):
            return super().forward(hidden.to(self.weight.dtype))  # V = wᵀ h

    def _apply(self, fn, recurse: bool = True) -> nn.Module:
        """`.to(bfloat16)` and `.half()` move the weight but leave it float32."""
        def move(w: Tensor) -> Tensor:
            """fn(w), of which a half-precision result counts for its device alone."""
            new = fn(w)
            return w.to(new.device) if new.dtype in (torch.bfloat16, torch.float16) else new
        return super()._apply(move, recurse)


class Critic(nn.Module):
    """A Hugging Face backbone (AutoModel, no language-model head) and a value head (S3AC §3.3).

    The head is float32 under a backbone of any dtype, float64 under float64. Under FSDP2 with a
    bf16 policy it stays so as a unit of its own: `fully_shard(critic.head)` before the rest.
    """

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        weight = next(backbone.parameters())
        self.backbone = backbone
        self.head = ValueHead(backbone.config.get_text_config().hidden_size, 1, bias=False,
                              device=weight.device,
                              dtype=torch.promote_types(weight.dtype, torch.float32))
        init_value_head_(self.head)

    def forward(self, tokens: Tensor, attention: Tensor) -> Tensor:
        """Values [B, S] float32: the one at position i is of the state that ends with token i.

        tokens [B, S] long, attention [B, S] bool or number. Padding has value 0.
        """
        if tokens.ndim != 2 or tokens.shape != attention.shape:
            raise ValueError("tokens and attention must have one shape [B, S], found "
                             f"{tuple(tokens.shape)} and {tuple(attention.shape)}")
        attention = attention.bool()
        positions = (attention.long().cumsum(-1) - 1).clamp(min=0)
        hidden = self.backbone(input_ids=tokens, attention_mask=attention.long(),
                               position_ids=positions, use_cache=False).last_hidden_state
        return self.head(hidden).squeeze(-1).masked_fill(~attention, 0)

    @classmethod
    def from_pretrained(cls, path: str, dtype: torch.dtype = torch.float32, *,
                        trust_remote_code: bool = False) -> "Critic":
        """The critic of a Hugging Face folder, a causal language model's too; dtype the backbone's.

        The head is read from the folder if `save_pretrained` left one there, else drawn anew.
        ValueError if the head found there is of another hidden size.
        """
        from transformers import AutoModel  # here, so that all else works with torch alone
        critic = cls(AutoModel.from_pretrained(path, dtype=dtype,
                                               trust_remote_code=trust_remote_code))
        file = os.path.join(path, HEAD_FILE)
        if os.path.isfile(file):
            weight = torch.load(file, map_location="cpu", weights_only=True)["weight"]
            if weight.shape != critic.head.weight.shape:
                raise ValueError(f"{file} must hold a weight of shape "
                                 f"{tuple(critic.head.weight.shape)}, found {tuple(weight.shape)}")
            critic.head.load_state_dict({"weight": weight})
        return critic

    def save_pretrained(self, path: str, state: dict[str, Tensor] | None = None) -> None:
        """Write the backbone as a Hugging Face folder and the head beside it.

        state: the full parameters by name, for a critic whose own are sharded. All is written under
        a temporary name first: a critic that stands at path outlives a crash.
        """
        state = self.state_dict() if state is None else state
        backbone, head = ({name.removeprefix(part): x for name, x in state.items()
                           if name.startswith(part)} for part in ("backbone.", "head."))
        os.makedirs(path, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path, prefix=".saving-") as new:
            self.backbone.save_pretrained(new, state_dict=backbone)
            torch.save(head, os.path.join(new, HEAD_FILE))
            for name in os.listdir(new):
                os.replace(os.path.join(new, name), os.path.join(path, name))


@torch.no_grad()
def init_value_head_(head: nn.Linear, std: float | None = None) -> nn.Linear:
    """Draw the head's weight [1, H] from N(0, std), in place; std 1/(H+1) by default (S3AC §3.3).

    |h| is about √H after the last norm, so that V starts with a spread of about 1/√H around 0.
    """
    head.weight.normal_(0, 1 / (head.in_features + 1) if std is None else std)
    if head.bias is not None:
        head.bias.zero_()
    return head


def _masked(value: Tensor, target: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """keep [B, T] bool, and V, R [B, T], 0 where masked; ValueError for other shapes."""
    if value.ndim != 2 or mask.shape != value.shape:
        raise ValueError("value and mask must have one shape [B, T], found "
                         f"{tuple(value.shape)} and {tuple(mask.shape)}")
    if target.shape not in (value.shape, value.shape[:1]):
        raise ValueError(f"target must have the shape {tuple(value.shape[:1])} or "
                         f"{tuple(value.shape)}, found {tuple(target.shape)}")
    keep, dtype = mask.bool(), torch.promote_types(value.dtype, torch.float32)
    target = target.detach()[:, None] if target.ndim == 1 else target.detach()
    # torch.where and not a product: NaN · 0 is NaN, in the result and in the gradient.
    return keep, torch.where(keep, value.to(dtype), 0), torch.where(keep, target.to(dtype), 0)


def value_loss(value: Tensor, target: Tensor, mask: Tensor, n_tokens: float | Tensor | None = None,
               *, old_value: Tensor | None = None,
               clip: float | None = 0.5,  # assumption: the paper states no width c
               ) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """½ squared error of V against the return, summed over kept tokens / n_tokens (S3AC §3.3).

    value [B, T], target [B] or [B, T], mask [B, T] bool or number. n_tokens is the token count of
    all micro-batches and ranks, by default this call's. With old_value [B, T], the values before
    the update, a V that moved toward the return by more than clip has no gradient; None is off.
    stats, each (sum, count): loss, clip_share (tokens without gradient), value, target, target_sq,
    error, error_sq; summed over micro-batches and ranks they give `explained_variance_from`.
    ValueError for other shapes or a clip that is not positive.
    """
    keep, V, R = _masked(value, target, mask)
    if clip is not None and not clip > 0:
        raise ValueError(f"clip must be positive or None, found {clip}")
    if old_value is not None and old_value.shape != value.shape:
        raise ValueError(f"old_value must have the shape {tuple(value.shape)} of value, "
                         f"found {tuple(old_value.shape)}")
    error = V - R  # e_t = V − R
    square, clipped = error.square(), torch.zeros_like(keep)
    if old_value is not None and clip is not None:
        V_old = torch.where(keep, old_value.detach().to(V.dtype), 0)
        # V_old + clip(V − V_old, −c, c), written so that a V within the range stays V exactly.
        near = (V.clamp(V_old - clip, V_old + clip) - R).square()
        square, clipped = torch.maximum(square, near), near > square
    count = keep.sum()
    n = count if n_tokens is None else torch.as_tensor(n_tokens, device=value.device)
    loss = square.sum() / 2
    sums = {"loss": loss, "clip_share": clipped.sum(), "value": V.sum(), "target": R.sum(),
            "target_sq": R.square().sum(), "error": error.sum(), "error_sq": error.square().sum()}
    stats = {name: (x.detach(), count) for name, x in sums.items()}
    return loss / n.clamp(min=1), stats  # loss = Σ ℓ_t / n_tokens


def explained_variance(value: Tensor, target: Tensor, mask: Tensor) -> float:
    """EV = 1 − Var(R − V)/Var(R) over the kept tokens: 1 at best, 0 for a constant V (S3AC §3.3).

    value, mask [B, T], target [B] or [B, T]. NaN if all returns are equal or no token is kept.
    """
    keep, V, R = _masked(value.detach(), target, mask)
    V, R = V[keep], R[keep]
    if R.numel() == 0 or R.min() == R.max():
        return math.nan
    return 1 - ((R - V).var(correction=0) / R.var(correction=0)).item()


def explained_variance_from(stats: dict[str, tuple[float | Tensor, float | Tensor]]) -> float:
    """The same EV out of `value_loss`'s stats, summed over micro-batches and ranks.

    NaN if all returns are equal, to the rounding of a float32 sum, or no token was kept.
    """
    names = ("target", "target_sq", "error", "error_sq")
    if not float(stats["target"][1]):
        return math.nan
    R, R2, e, e2 = (float(stats[name][0]) / float(stats[name][1]) for name in names)
    var_R = R2 - R * R
    return 1 - (e2 - e * e) / var_R if var_R > 1e-6 * R2 else math.nan  # 1 − Var(R − V)/Var(R)


def grad_norms(critic: nn.Module) -> dict[str, float]:
    """Gradient norms of critic.head, critic.backbone and both ("total"), as floats.

    "head_share" is the head's share of the squared norm (over 99 % early on in S3AC §3.3), NaN if
    there is no gradient at all. Sharded gradients (DTensor) give the norm over all ranks, so that
    every rank must call this.
    """
    head, backbone = _norm(critic.head), _norm(critic.backbone)
    total = math.hypot(head, backbone)
    share = (head / total) ** 2 if total else math.nan
    return {"head": head, "backbone": backbone, "total": total, "head_share": share}


def _norm(module: nn.Module) -> float:
    """‖gradient‖₂ of the module, summed up in at least float32; 0 without gradients."""
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    if not grads:
        return 0.0
    norms = [torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32))
             for g in grads]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    return (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()


def clip_critic_grad_(critic: nn.Module, max_norm: float = 10.0, *,
                      split: bool = False) -> dict[str, float]:
    """Scale the gradients down to max_norm in place; returns `grad_norms` from before (S3AC §3.3).

    Jointly by the norm of both, or with split the head and the backbone each by its own norm.
    A norm that is inf or NaN scales nothing: look at "total" and skip the step. ValueError if
    max_norm is not positive.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, found {max_norm}")
    norms = grad_norms(critic)
    for name in ("head", "backbone"):
        norm = norms[name if split else "total"]
        if max_norm < norm < math.inf:
            for p in getattr(critic, name).parameters():
                if p.grad is not None:
                    p.grad.mul_(max_norm / norm)
    return norms


def _demo(args: argparse.Namespace) -> None:
    from transformers import AutoModel, LlamaConfig

    H, B, S = args.hidden, 16, 64
    torch.manual_seed(args.seed)
    config = LlamaConfig(hidden_size=H, intermediate_size=2 * H, num_hidden_layers=args.layers,
                         num_attention_heads=8, num_key_value_heads=8, vocab_size=256)
    critic = Critic(AutoModel.from_config(config))
    tokens, mask = torch.randint(256, (B, S)), torch.ones(B, S)
    R = torch.tensor([-1.0, 1.0]).repeat(B // 2)

    print(f"A random Llama, H = {H}, {args.layers} layers, {B} × {S} tokens, R = ±1 in turn\n")
    hidden = critic.backbone(tokens).last_hidden_state.detach().requires_grad_()
    V = critic.head(hidden)[..., 0]
    value_loss(V, R, mask)[0].backward()
    e, w = (V - R[:, None]).detach() / mask.sum(), critic.head.weight
    print("largest difference between autograd and   ∇_w = Σ e_t h_t: "
          f"{(torch.einsum('bs,bsh->h', e, hidden) - w.grad).abs().max():.1g}   ∇_h = e_t w: "
          f"{(e[..., None] * w[0] - hidden.grad).abs().max():.1g}")
    print(f"|h| = {hidden.norm(dim=-1).mean():.2f}   |w| = {w.norm():.3f}\n")

    print(f"{'':42}gradient norm of    head's    what is left by a limit of")
    print(f"{'std of w':20}{'std of V':>10}{'loss':>8}{'head':>8}{'backbone':>10}{'share':>10}"
          f"{'1':>9}{'10':>8}    1, split (head, backbone)")
    for name, std in (("nn.Linear's default", (3 * H) ** -0.5), ("0.02", 0.02), ("0.01", 0.01),
                      (f"1/(H+1) = {1 / (H + 1):.4f}", None)):
        torch.manual_seed(args.seed)
        init_value_head_(critic.head, std)
        critic.zero_grad()
        V = critic(tokens, mask)
        loss = value_loss(V, R, mask)[0]
        loss.backward()
        g = grad_norms(critic)
        one, ten, head, backbone = (min(1.0, limit / g[part]) for limit, part in (
            (1, "total"), (10, "total"), (1, "head"), (1, "backbone")))
        print(f"{name:20}{V.std():10.3f}{loss:8.3f}{g['head']:8.2f}{g['backbone']:10.2f}"
              f"{g['head_share']:10.1%}{one:9.3f}{ten:8.3f}{head:9.3f}, {backbone:.3f}")
    print("\nThe head's gradient hardly depends on w, the backbone's is proportional to it.\n"
          "(In the paper's 35B critic the head held over 99 % of the squared norm.)")


# ---- the claims of Table 4 and Figure 12

STDS = {"0.01": 0.01, "0.02": 0.02, "1/(H+1)": None}
LIMITS = {"1": (1.0, False), "10": (10.0, False), "split 1": (1.0, True)}  # max_norm, split
COLUMNS = {"step_1": "loss, step 1", "first": "first 20", "last": "last 20", "ev": "EV after",
           "clipped": "clipped", "head_share": "head's share", "head_share_10": "in steps 1–10"}


def side_by_side(work: Callable, jobs: list, workers: int = 2) -> list:
    """work(job) of every job, in processes of one thread each; the results in the jobs' order."""
    from tqdm import tqdm

    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=one_thread) as pool:
        return list(tqdm(pool.map(work, jobs), "critics", len(jobs)))


def one_thread() -> None:
    """What a process of the claims starts with: one thread, and no noise from transformers."""
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def _cell(job: dict) -> dict[str, float]:
    """One pretraining of the critic job["path"] on a pool: what the table shows of it."""
    from value_pretrain import TrajectoryPool, pretrain

    torch.manual_seed(job["seed"])
    critic = Critic.from_pretrained(job["path"])
    init_value_head_(critic.head, STDS[job["std"]])
    max_norm, split = LIMITS[job["limit"]]
    stats = pretrain(
        critic, TrajectoryPool.open(job["pool"]), epochs=1, batch_size=job["batch"],
        peak=job["lr"], final=job["lr"] / 2, max_norm=max_norm, split=split, held_out=0.1,
        seed=job["seed"], progress=False)
    head = stats["curve"]["head_share"]
    return {"std": job["std"], "limit": job["limit"], "seed": job["seed"],
            "steps": stats["steps"], "step_1": stats["curve"]["loss"][0],
            "first": stats["loss_first"], "last": stats["loss_last"], "ev": stats["ev_after"],
            "clipped": stats["clip_share"], "head_share": stats["head_share"],
            "head_share_10": sum(head[:10]) / len(head[:10])}


def _sample(pool: str, path: str, n: int = 2800) -> None:
    """Fills the pool with n responses of the model in path to prompts of the embedded task."""
    import rollout
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from value_pretrain import TrajectoryPool

    tokenizer, problems = AutoTokenizer.from_pretrained(path), rollout.task_problems()
    ids = torch.randint(len(problems), (n,), generator=torch.Generator().manual_seed(0))
    TrajectoryPool(pool).append(rollout.collect(
        AutoModelForCausalLM.from_pretrained(path), tokenizer,
        [tokenizer(problems[i].prompt).input_ids for i in ids], [problems[i].answer for i in ids],
        ids, rollout.chain_reward, eos_id=[tokenizer.eos_token_id], max_new_tokens=64,
        generator=torch.Generator().manual_seed(0)), 0)


def _demonstrate(pool: str, path: str, n: int = 300, wrong: float = 0.1) -> None:
    """Fills the pool with n demonstrations of at most 7 steps, in the tokens of the model in path;
    a share of the steps is wrong."""
    import rollout
    from transformers import AutoTokenizer
    from value_pretrain import TrajectoryPool

    tokenizer, rng = AutoTokenizer.from_pretrained(path), random.Random(0)
    problems = [p for p in rollout.task_problems() if p.level == "01-07 steps"]
    ids = rng.choices(range(len(problems)), k=n)
    texts = [rollout.demonstration(problems[i].prompt, wrong, rng)[:-1] for i in ids]
    replies = [tokenizer(text).input_ids + [tokenizer.eos_token_id] for text in texts]
    tokens, attention, mask, logp = rollout.pad_responses(
        [tokenizer(problems[i].prompt).input_ids for i in ids], replies,
        [[0.0] * len(x) for x in replies], tokenizer.eos_token_id)
    reward = [rollout.chain_reward(text, problems[i].answer) for text, i in zip(texts, ids)]
    TrajectoryPool(pool).append(
        rollout.Batch(tokens, attention, mask, torch.tensor(ids), torch.tensor(reward),
                      torch.zeros(n, dtype=torch.bool), logp), 0)


def _grid(name: str, path: str, fill: Callable, *, seeds: int, **how: float) -> list[dict]:
    """The 9 cells × seeds of one model, printed as a table; all cells of a seed see one order."""
    from train import spread
    from transformers import AutoConfig

    H = AutoConfig.from_pretrained(path).get_text_config().hidden_size
    with tempfile.TemporaryDirectory() as pool:
        fill(pool, path)
        cells = side_by_side(_cell, [
            dict(path=path, pool=pool, std=std, limit=limit, seed=seed, **how)
            for seed in range(seeds) for std in STDS for limit in LIMITS])
    print(f"\n{name}: H = {H}, 1/(H+1) = {1 / (H + 1):.4f}; {cells[0]['steps']} steps of "
          f"{how['batch']} trajectories, lr {how['lr']:g} → {how['lr'] / 2:g} in every cell, "
          f"{seeds} seed{'s' * (seeds > 1)}\n")
    print(f"{'std':10}{'limit':9}" + "".join(x.rjust(16) for x in COLUMNS.values()))
    for std in STDS:
        for limit in LIMITS:
            rows = _of(cells, std, limit)
            print(f"{std:10}{limit:9}" + "".join(
                spread([r[key] for r in rows]).rjust(16) for key in COLUMNS))
    return cells


def _of(cells: list[dict], std: str, limit: str) -> list[dict]:
    return [c for c in cells if c["std"] == std and c["limit"] == limit]


def _against_paper(name: str, cells: list[dict]) -> None:
    """The paper's statements, its figures and ours, and whether ours say the same."""
    def mean(key: str, std: str, limit: str) -> float:
        """The mean over the seeds of one cell."""
        rows = _of(cells, std, limit)
        return sum(r[key] for r in rows) / len(rows)

    small = "1/(H+1)"
    before, after = mean("first", "0.01", "10"), mean("first", small, "10")
    best, std, limit = min((mean("last", s, m), s, m) for s in STDS for m in LIMITS)
    one, ten = mean("clipped", small, "1"), mean("clipped", small, "10")
    head = mean("head_share_10", small, "10")
    print(f"\n{name:50}{'paper, 35B':>18}{'here':>36}   shows")
    for what, paper, here, shows in (
        ("loss of the first 20 steps, std 0.01 → 1/(H+1)", "0.72 → 0.45",
         f"{before:.3f} → {after:.3f}", after < 0.95 * before),
        ("best loss of the last 20 steps, and its setting", "0.21",
         f"{best:.3f}, std {std}, limit {limit}", None),
        ("steps clipped, limit 1 → 10", "99.7 % → 12.5 %", f"{one:.1%} → {ten:.1%}", ten < one / 2),
        ("head's share of the squared norm, steps 1–10", "> 99 %", f"{head:.1%}", head > 0.99)):
        word = {None: "–", True: "yes", False: "no"}[shows]
        print(f"{what:50}{paper:>18}{here:>36}   {word}")


def _claims(args: argparse.Namespace) -> None:
    """Both grids, the paper's figures beside them, and runs/claims/critic.json."""
    from train import build_base

    one_thread()
    found, sizes = {}, [
        ("tiny", build_base(), _sample, dict(batch=32, lr=1e-3, seeds=args.seeds))]
    if args.model:
        sizes.append((os.path.basename(os.path.normpath(args.model)), args.model, _demonstrate,
                      dict(batch=8, lr=1e-4, seeds=1)))
    for name, path, fill, how in sizes:
        found[name] = _grid(name, path, fill, **how)
        _against_paper(name, found[name])
    print(WHY if args.model else WHY + "\nOnly the tiny model was run: --model DIR adds another.")
    os.makedirs("runs/claims", exist_ok=True)
    with open("runs/claims/critic.json", "w") as file:
        json.dump(found, file, indent=1)


WHY = """
"yes" in the first line is a fall by 5 % or more, in the third one by half or more.
- V(s) at the start has the spread std · |h|: a large one is loss to be unlearned. A narrow model
  cannot show it: at H = 64, 1/(H+1) lies between 0.01 and 0.02 and V starts near 0 with all three.
- The gradient of the head grows with |h| and does not depend on w, so its share of the norm is
  a matter of the width and the depth: a small model stays below the paper's 99 %.
- AdamW divides by the gradient's own size. A limit that scales all steps alike changes nothing;
  what it changes is how steps of unlike norm count. So columns of one std lie close together here,
  and the share of clipped steps says more about the norm than about the learning.
- The first and the last 20 of fewer than 40 steps overlap."""


def main() -> None:
    """The command line: the demo, or the claims."""
    parser = argparse.ArgumentParser(description="the two gradients of a critic")
    parser.add_argument("--hidden", type=int, default=512, help="of the demo's model")
    parser.add_argument("--layers", type=int, default=2, help="of the demo's model")
    parser.add_argument("--seed", type=int, default=0, help="of the demo")
    parser.add_argument("--claims", action="store_true", help="re-measure Table 4 and Figure 12")
    parser.add_argument("--model", metavar="DIR", help="a second model for the claims")
    parser.add_argument("--seeds", type=int, default=3, help="of the claims' tiny model")
    args = parser.parse_args()
    _claims(args) if args.claims else _demo(args)


if __name__ == "__main__":
    main()
