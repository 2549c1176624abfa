"""The critic: a transformer with a float32 value head, its loss, and one optimizer step of it.

    V(s_t) = wᵀ h_t                            w ~ N(0, 1/(H+1)) (std), no bias, float32
    ℓ_t = ½ max((V − R)², (V_old + clip(V − V_old, −c, c) − R)²)       loss = Σ ℓ_t / n_tokens
    ∇_w ℓ_t = e_t h_t     ∇_h ℓ_t = e_t w      e_t = V(s_t) − R
    EV = 1 − Var(R − V) / Var(R)               over the trainable tokens

S3AC §3.3; the clipped loss is PPO's. A small w starts V near 0, but it makes the backbone's
gradient small, and the head's dominates the norm of both. The actor's limit of 1 would then leave
almost nothing of the backbone's step: the limit is 10, or `split` gives each part its own limit.

    tokens [B, S] long, attention [B, S] bool      prompts padded left, responses padded right
    value, mask [B, T]; target [B], the return R of all tokens of a row (λ_critic = 1), or [B, T]
    H hidden size. With R ∈ {−1, +1} and γ = 1, V(s_t) estimates 2p − 1, p the success rate

Differs from the paper:
  - it does not state c and the betas of AdamW: here they are 0.5 and (0.9, 0.999)
  - added: `split`, and skipping a step whose gradient is not finite (five in a row are an error)
  - added: `low_rank_`, a critic of which only a low-rank change learns; future work in the paper
Left out: sharding, the learning rate's schedule, the shift to [B, T] (value = v[:, -T-1:-1]).

    python critic.py    the two gradients of a small random model under four sizes of w
"""
import argparse
import math
import os
import tempfile
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

HEAD_FILE = "value_head.pt"  # beside the backbone's files in a critic's folder


class ValueHead(nn.Linear):
    """A linear layer H -> 1 that computes in float32 for any input dtype, also under autocast."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Values [..., 1] of the states whose last hidden vectors are hidden [..., H]."""
        with torch.autocast(hidden.device.type, enabled=False):
            return super().forward(hidden.to(self.weight.dtype))  # V = wᵀ h

    def _apply(self, fn, recurse: bool = True) -> nn.Module:
        """`.to(bfloat16)` and `.half()` move the weight to a device but leave it float32."""
        return super()._apply(lambda w: w.to(new.device) if (new := fn(w)).dtype in (
            torch.bfloat16, torch.float16) else new, recurse)


class Critic(nn.Module):
    """A Hugging Face backbone (AutoModel, no language-model head) and a value head (S3AC §3.3).

    The head is float32 or float64. Under FSDP2 it stays so as a unit: `fully_shard(critic.head)`.
    """

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        weight, config = next(backbone.parameters()), backbone.config.get_text_config()
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self.backbone = backbone
        self.head = ValueHead(config.hidden_size, 1, bias=False, device=weight.device, dtype=dtype)
        init_value_head_(self.head)

    def forward(self, tokens: Tensor, attention: Tensor) -> Tensor:
        """Values [B, S] float32: the one at position i is of the state that ends with token i.

        tokens [B, S] long, attention [B, S] bool or number, else ValueError. Padding has value 0.
        """
        if tokens.ndim != 2 or tokens.shape != attention.shape:
            raise ValueError("tokens, attention: expected one shape [B, S], found "
                             f"{tuple(tokens.shape)} and {tuple(attention.shape)}")
        attention = attention.bool()
        positions = (attention.long().cumsum(-1) - 1).clamp(min=0)  # 0 at the first real token
        hidden = self.backbone(input_ids=tokens, attention_mask=attention.long(),
                               position_ids=positions, use_cache=False).last_hidden_state
        return self.head(hidden).squeeze(-1).masked_fill(~attention, 0)

    @classmethod
    def from_pretrained(cls, path: str, dtype: torch.dtype = torch.float32, *,
                        trust_remote_code: bool = False) -> "Critic":
        """The critic of a Hugging Face folder, also of a causal language model's folder.

        dtype: the backbone's. A head in the folder is read (ValueError for another H), else drawn.
        """
        from transformers import AutoModel  # here, so that all else works with torch alone
        critic = cls(AutoModel.from_pretrained(path, dtype=dtype,
                                               trust_remote_code=trust_remote_code))
        file, shape = os.path.join(path, HEAD_FILE), tuple(critic.head.weight.shape)
        if os.path.isfile(file):
            head = torch.load(file, map_location="cpu", weights_only=True)
            if (size := tuple(head["weight"].shape)) != shape:
                raise ValueError(f"{file}: expected a weight of shape {shape}, found {size}")
            critic.head.load_state_dict(head)
        return critic

    def save_pretrained(self, path: str, state: dict[str, Tensor] | None = None) -> None:
        """Write the backbone as a Hugging Face folder and the head beside it.

        state: the full parameters by name, for a critic whose own are sharded. All files get a
        temporary name first, so that a crash leaves the critic that was in path whole.
        """
        state = self.state_dict() if state is None else state
        merged = {f"{name}.weight": x.weight for name, x in self.named_modules()
                  if parametrize.is_parametrized(x)}  # of a low-rank critic: W + B A
        state = {x: state[x] for x in state if ".parametrizations." not in x} | merged
        backbone, head = ({name.removeprefix(part): x for name, x in state.items()
                           if name.startswith(part)} for part in ("backbone.", "head."))
        os.makedirs(path, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path, prefix=".saving-") as new:
            self.backbone.save_pretrained(new, state_dict=backbone)
            torch.save(head, os.path.join(new, HEAD_FILE))
            for name in os.listdir(new):
                os.replace(os.path.join(new, name), os.path.join(path, name))


class LowRank(nn.Module):
    """W + B A for a frozen W [out, in]; A [rank, in], B [out, rank], which is 0 at the start."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.randn_like(weight[:rank]) / weight.shape[1] ** 0.5)
        self.B = nn.Parameter(weight.new_zeros(len(weight), len(self.A)))

    def forward(self, weight: Tensor) -> Tensor:
        """The layer's weight [out, in]."""
        return weight + self.B @ self.A  # W + B A


def low_rank_(critic: Critic, rank: int) -> Critic:
    """Only the head and a low-rank change of each linear layer learn from now on, in place.

    LoRA: Hu et al. 2021, 2106.09685, with a scale of 1. `save_pretrained` writes W + B A. S3AC
    names such a critic as future work. ValueError if the backbone has no linear layer.
    """
    layers = [x for x in critic.backbone.modules() if isinstance(x, nn.Linear)]
    if not layers:
        raise ValueError(f"critic: expected linear layers, found none in {type(critic.backbone)}")
    critic.backbone.requires_grad_(False)
    for layer in layers:  # assumption: every linear layer, and a scale of 1
        parametrize.register_parametrization(layer, "weight", LowRank(layer.weight, rank))
    return critic


@torch.no_grad()
def init_value_head_(head: torch.nn.Linear, std: float | None = None) -> torch.nn.Linear:
    """Draw the head's weight [1, H] from N(0, std), in place; std 1/(H+1) by default (S3AC §3.3).

    |h| is about √H after the last norm, so V starts with a spread of about 1/√H around 0.
    """
    head.weight.normal_(0, 1 / (head.in_features + 1) if std is None else std)
    if head.bias is not None:
        head.bias.zero_()
    return head


# ---- loss, gradients, one step -------------------------------------------------------------------

def value_loss(value: Tensor, target: Tensor, mask: Tensor, n_tokens: float | Tensor | None = None,
               *, old_value: Tensor | None = None, clip: float | None = 0.5,  # assumption: c = 0.5
               ) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """½ squared error of V against the return, summed over kept tokens / n_tokens (S3AC §3.3).

    value [B, T]; target [B] or [B, T]; mask [B, T] bool or number. n_tokens: of all micro-batches
    and ranks (default: of this call). old_value [B, T]: V before the update; a V that moved toward
    R by more than clip has no gradient (clip None: off). stats, each (sum, count): loss, clip_share
    (tokens without gradient). ValueError for other shapes or a clip that is not positive.
    """
    old, size = value if old_value is None else old_value, value.shape
    if len(size) != 2 or {mask.shape, old.shape} != {size} or target.shape not in (size, size[:1]):
        raise ValueError("value, mask, old_value, target: expected [B, T], target also [B], found "
                         f"{[tuple(x.shape) for x in (value, mask, old, target)]}")
    if clip is not None and not clip > 0:
        raise ValueError(f"clip: expected a positive width or None, found {clip}")
    keep, dtype = mask.bool(), torch.promote_types(value.dtype, torch.float32)
    # torch.where and not a product: NaN · 0 is NaN, in the result and in the gradient
    V = torch.where(keep, value.to(dtype), 0)
    R = torch.where(keep, (target if target.ndim == 2 else target[:, None]).detach().to(dtype), 0)
    square, clipped = (V - R).square(), torch.zeros_like(keep)  # e_t² = (V − R)²
    if old_value is not None and clip is not None:
        V_old = torch.where(keep, old.detach().to(dtype), 0)
        # V_old + clip(V − V_old, −c, c), written so that a V within the range stays V exactly
        near = (V.clamp(V_old - clip, V_old + clip) - R).square()
        square, clipped = torch.maximum(square, near), near > square
    count, loss = keep.sum(), square.sum() / 2
    n = count if n_tokens is None else torch.as_tensor(n_tokens, device=value.device)
    stats = {"loss": (loss.detach(), count), "clip_share": (clipped.sum(), count)}
    return loss / n.clamp(min=1), stats  # loss = Σ ℓ_t / n_tokens


def explained_variance(value: Tensor, target: Tensor, mask: Tensor) -> float:
    """EV = 1 − Var(R − V)/Var(R) over the kept tokens: 1 at best, 0 for a constant V (S3AC §3.3).

    value, mask [B, T], target [B] or [B, T], else ValueError. NaN for equal returns or no token.
    """
    size, shapes = value.shape, [tuple(x.shape) for x in (value, mask, target)]
    if len(size) != 2 or mask.shape != size or target.shape not in (size, size[:1]):
        raise ValueError(f"value, mask, target: expected [B, T], target also [B], found {shapes}")
    dtype = torch.promote_types(value.dtype, torch.float32)
    R = target if target.ndim == 2 else target[:, None]
    V, R = (x.detach().expand(size)[mask.bool()].to(dtype) for x in (value, R))
    if R.numel() == 0 or R.min() == R.max():
        return math.nan
    return 1 - ((R - V).var(correction=0) / R.var(correction=0)).item()


def grad_norms(critic: nn.Module) -> dict[str, float]:
    """Gradient norms of critic.head, critic.backbone and both ("total"), summed in float32 or more.

    "head_share": the head's share of the squared norm (over 99 % at first in S3AC §3.3), or NaN.
    With sharded gradients (DTensor) the norms are over all ranks, and every rank must call this.
    """
    norms = {}
    for name in ("head", "backbone"):
        parts = [torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32))
                 for p in getattr(critic, name).parameters() if (g := p.grad) is not None]
        norm = torch.linalg.vector_norm(torch.stack(parts or [torch.zeros(())]))
        norms[name] = (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()
    norms["total"] = total = math.hypot(norms["head"], norms["backbone"])
    return norms | {"head_share": (norms["head"] / total) ** 2 if total else math.nan}


def clip_critic_grad_(critic: nn.Module, max_norm: float = 10.0, *,
                      split: bool = False) -> dict[str, float]:
    """Scale the gradients down to max_norm in place; returns `grad_norms` from before (S3AC §3.3).

    split: each part by its own norm, not by the joint one. A norm of inf or NaN scales nothing:
    skip that step. ValueError if max_norm is not positive.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm: expected a positive number, found {max_norm}")
    norms = grad_norms(critic)
    for name in ("head", "backbone"):
        norm = norms[name if split else "total"]
        for p in getattr(critic, name).parameters():
            if p.grad is not None and max_norm < norm < math.inf:
                p.grad.mul_(max_norm / norm)
    return norms


class FiniteAdamW(torch.optim.AdamW):
    """AdamW over a module's trainable parameters that can skip a step with a non-finite gradient.

    The one place that makes an optimizer and that skips a step; the actor and all critics use it.
    in_a_row counts the steps skipped since the last good one, skipped all; name is for the error.
    """

    def __init__(self, module: nn.Module, lr: float, *, weight_decay: float = 0.01,
                 name: str = "critic") -> None:
        super().__init__([p for p in module.parameters() if p.requires_grad], lr, fused=True,
                         betas=(0.9, 0.999), weight_decay=weight_decay)  # assumption: the betas
        self.name, self.in_a_row, self.skipped = name, 0, 0

    def step_if_finite(self, norm: float) -> bool:
        """Make a step if norm, the whole gradient's, is finite; clear all gradients. -> step made?

        FloatingPointError at the fifth skipped step in a row; the weights are the last good ones.
        """
        if finite := math.isfinite(norm):
            self.step()
        self.zero_grad()
        self.in_a_row = 0 if finite else self.in_a_row + 1
        self.skipped += not finite
        if self.in_a_row >= 5:  # assumption: the number five
            raise FloatingPointError(f"the {self.name}'s gradient was not finite {self.in_a_row} "
                                     "times in a row; its weights are those of the last good step")
        return finite


def value_step_(critic: nn.Module, optimizer: FiniteAdamW,
                parts: Iterable[tuple[Tensor, Tensor, Tensor, Tensor | None]],
                n_tokens: float | Tensor, *, clip: float | None = 0.5, max_norm: float = 10.0,
                split: bool = False, world: int = 1) -> tuple[dict[str, tuple], dict[str, float]]:
    """One optimizer step of `value_loss` over all micro-batches of a mini-batch (S3AC §3.3).

    The one place that fits a critic; value pretraining and training share it. parts: (value,
    target, mask, old_value or None) as `value_loss` takes them, value with its graph; a generator
    keeps one graph at a time alive. n_tokens: of all parts on all `world` ranks. The gradients must
    be empty before and are afterwards. Returns stats, value_loss's pairs summed over this rank's
    parts, and norms: `grad_norms` from before clipping, "clipped" and "skipped" (bool).
    """
    stats = {}
    for value, target, mask, old_value in parts:
        loss, pairs = value_loss(value, target, mask, n_tokens, old_value=old_value, clip=clip)
        (loss * world).backward()  # FSDP takes the mean over ranks, the loss is their sum
        for name, pair in pairs.items():
            stats[name] = tuple(map(sum, zip(pair, stats.get(name, (0, 0)))))
    norms = clip_critic_grad_(critic, max_norm, split=split)
    largest = max(norms["head"], norms["backbone"]) if split else norms["total"]
    skipped = not optimizer.step_if_finite(norms["total"])
    return stats, norms | {"clipped": largest > max_norm, "skipped": skipped}


def _demo() -> None:
    """One line for each std of w: the two gradient norms, and the factor that each limit leaves."""
    from transformers import AutoModel, LlamaConfig
    parser = argparse.ArgumentParser(description="the two gradients of a random critic")
    for name, default in (("hidden", 512), ("layers", 2), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    H, layers, seed = vars(parser.parse_args()).values()
    if H < 8 or H % 8 or layers < 1 or not 0 <= seed < 2**63:
        raise SystemExit("error: expected --hidden 8, 16, …, --layers 1 or more, --seed 0 or more, "
                         f"found {H}, {layers}, {seed}")
    torch.manual_seed(seed)
    critic = Critic(AutoModel.from_config(LlamaConfig(
        hidden_size=H, intermediate_size=2 * H, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=8, vocab_size=256)))
    tokens, mask, R = torch.randint(256, (16, 64)), torch.ones(16, 64), torch.tensor([-1.0, 1] * 8)
    print(f"A random Llama, H = {H}, {layers} layers, 16 × 64 tokens, R = ±1 in turn\n\n"
          "                            gradient norm of     head's   factor left by a limit of\n"
          "std of w    V's std   loss     head   backbone    share       1      10   1, split\n")
    for std in ((3 * H) ** -0.5, 0.02, 0.01, 1 / (H + 1)):  # nn.Linear's default … S3AC's
        torch.manual_seed(seed)
        init_value_head_(critic.head, std)
        critic.zero_grad()
        V = critic(tokens, mask)
        (loss := value_loss(V, R, mask)[0]).backward()
        head, backbone, norm, share = grad_norms(critic).values()
        left = [min(1.0, x) for x in (1 / norm, 10 / norm, 1 / head, 1 / backbone)]
        print(f"{std:8.4f}{V.std():11.3f}{loss:7.3f}{head:9.2f}{backbone:11.2f}{share:9.1%}"
              "{:8.3f}{:8.3f}{:8.3f}, {:.3f}".format(*left))
    print("\nThe head's gradient hardly depends on w, the backbone's is proportional to it.")


if __name__ == "__main__":
    _demo()
