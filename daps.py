"""Difficulty-aware prompt selection: choose what to roll out by the critic's V(s_0) and by history.

    p_c = clip((V(s_0) + 1) / 2, 0, 1)           a return in [−1, 1] is a success rate in [0, 1]
    p̂   = (S + n_c p_c) / (N + n_c)              Beta-Bernoulli: the critic counts as n_c trials
    a   = a_min + (1 − a_min) · 4 p̂ (1 − p̂)      accept: 1 at p̂ = ½, a_min at p̂ = 0 and p̂ = 1
    a'  = (1 − ω) · 1 + ω · a                    ω = 0 for 40 steps, then linear up to 1 in 80 steps
    S ← 0.99 S + Σ r_i,  N ← 0.99 N + Σ 1        once a rollout batch, r_i ∈ {0, 1}

S3AC §3.4 (DAPS); the group filter is the one of DAPO's dynamic sampling (arXiv 2503.14476). Two
selections to compare with: PCL (`nearest_half`) and GRESO (`greso_accept_prob`, `accept`).

    v0 [M]       V(s_0) of M candidate prompts, from one batched critic pass over the prompts alone;
                 [critics, M] of an ensemble
    ids [M]      their numbers in 0 … n_prompts − 1; S and N [n_prompts] are kept for every prompt
    reward, prompt_id [B]    outcomes of the B responses; a prompt's K responses share its id

Offer several candidates for each prompt wanted: then one round fills the batch, and a prompt's
chance to be in it is nearly proportional to a'. Each further round makes the choice flatter, and
filling up is no draw at all. `DAPS.report` tells what happened.

Differs from the paper:
  - it does not say how to fill a short batch: here at most 10 rounds, then the highest a' left
  - it does not say whether its 40 + 80 steps are gradient steps or rollout batches: here batches
  - added: with several critics their spread sets n_c (`trials_from_spread`), its future work
Left out: the critic's pass, the rollout, and the replacement of the groups that are dropped.

    python daps.py    the curve, the ramp, and four selections on prompts of known success
"""
import argparse
import math

import torch
from torch import Tensor


def success_from_value(v0: Tensor) -> Tensor:
    """Success rate p_c ∈ [0, 1] for a value V(s_0) of returns in {−1, +1} (S3AC §3.4).

    v0 of any shape; NaN stays NaN. The result is float32, or float64 for float64.
    """
    v0 = v0.to(torch.promote_types(v0.dtype, torch.float32))
    return ((v0 + 1) / 2).clamp(0, 1)  # p_c = clip((V(s_0) + 1)/2, 0, 1)


def fuse(p_c: Tensor, successes: Tensor, trials: Tensor, n_c: float | Tensor = 3.0) -> Tensor:
    """p̂ ∈ [0, 1] from the critic's p_c, worth n_c trials, and S successes in N trials (S3AC §3.4).

    All of one shape. ValueError if n_c is not positive: p̂ of an untried prompt would be 0/0.
    """
    if not torch.as_tensor(n_c > 0).all():
        raise ValueError(f"n_c: expected a positive number, found {n_c}")
    return (successes + n_c * p_c) / (trials + n_c)  # p̂ = (S + n_c p_c)/(N + n_c)


def trials_from_spread(v0: Tensor) -> Tensor:
    """n_c [M]: how many trials an ensemble is worth, from the V(s_0) [critics, M] of its critics.

    A Beta of mean p and n trials has variance p(1 − p)/(n + 1): critics that agree count for more.
    The paper names this as future work, without a formula.
    """
    p = success_from_value(v0.double())
    n = p.mean(0) * (1 - p.mean(0)) / p.var(0).clamp(min=1e-9) - 1  # p(1 − p)/σ² − 1
    return n.clamp(0.3, 30)  # assumption: a tenth to ten times the paper's 3


def accept_prob(p: Tensor, a_min: float = 0.1) -> Tensor:
    """Acceptance a ∈ [a_min, 1] of a prompt with success rate p ∈ [0, 1] (S3AC §3.4).

    a_min is the floor that keeps solved and hopeless prompts in sight, 0.1–0.3 in the paper.
    ValueError if it is not in [0, 1].
    """
    if not 0 <= a_min <= 1:
        raise ValueError(f"a_min: expected a number in [0, 1], found {a_min}")
    return a_min + (1 - a_min) * 4 * p * (1 - p)  # a = a_min + (1 − a_min)·4p̂(1 − p̂)


def ramp(step: int, uniform: int = 40, length: int = 80) -> float:
    """ω ∈ [0, 1]: 0 up to step `uniform`, linear, 1 from step `uniform + length` on (S3AC §3.4).

    length 0 switches from 0 to 1 at step `uniform`.
    """
    # assumption: a step of the 40 + 80 is a rollout batch, not a gradient step
    return min(max((step - uniform) / length, 0.0), 1.0) if length else float(step >= uniform)


# ---- selection -----------------------------------------------------------------------------------

def accept(a: Tensor, n: int, generator: torch.Generator) -> tuple[Tensor, dict[str, int]]:
    """n distinct positions in a [M], drawn with these chances in [0, 1], and a report of the draw.

    At most 10 rounds over the positions not yet taken, in drawn order, then those of highest a. The
    report holds rounds, accepted, filled, see `DAPS`. The CPU generator is the only source of
    chance; the positions are on the CPU. ValueError for NaN, another shape or n > M.
    """
    a = _candidates("a", a, n)
    left = torch.randperm(len(a), generator=generator)  # not yet taken, in drawn order
    taken, rounds = left[:0], 0
    while len(taken) < n and rounds < 10:  # assumption: the paper states no bound
        hit = torch.rand(len(left), generator=generator, dtype=torch.float64) < a[left]
        taken, left = torch.cat([taken, left[hit]]), left[~hit]
        rounds += 1
    # assumption: a short batch is filled by best a', ties in drawn order
    best, drawn = left[a[left].argsort(descending=True, stable=True)], min(len(taken), n)
    return torch.cat([taken, best])[:n], {"rounds": rounds, "accepted": drawn, "filled": n - drawn}


class DAPS:
    """The decayed outcome counts of every prompt, and the selection that reads them (S3AC §3.4).

    successes, trials [n_prompts]: float64 on the CPU. Ranks that update with the same outcomes and
    select with equally seeded generators agree without communication.
    report: what the last `select` did, empty before the first:
        offered      candidates it was given       rounds      rounds of acceptance, at most 10
        omega        ω: 0 uniform … 1 full DAPS    accepted    prompts that a draw accepted
        acceptance   mean a' of the candidates     filled      taken for want of accepted ones
    """

    def __init__(self, n_prompts: int, *, a_min: float = 0.1, n_c: float = 3.0,
                 decay: float = 0.99, uniform: int = 40, ramp: int = 80) -> None:
        if not (n_prompts >= 1 and 0 <= a_min <= 1 and n_c > 0 and 0 <= decay <= 1
                and uniform >= 0 and ramp >= 0):
            raise ValueError("DAPS: expected n_prompts, n_c > 0, a_min, decay in [0, 1], uniform, "
                             f"ramp ≥ 0, found {(n_prompts, n_c, a_min, decay, uniform, ramp)}")
        self.a_min, self.n_c, self.decay, self.uniform, self.ramp = a_min, n_c, decay, uniform, ramp
        self.successes, self.trials = torch.zeros(2, n_prompts, dtype=torch.float64)
        self.report: dict[str, float] = {}

    def acceptance(self, ids: Tensor, v0: Tensor, step: int) -> Tensor:
        """a' [M] float64 ∈ [a_min, 1] of the prompts ids [M] with values v0 at this step."""
        n_c, v0 = (trials_from_spread(v0), v0.mean(0)) if v0.ndim == 2 else (self.n_c, v0)
        p = fuse(success_from_value(v0.double()), self.successes[ids], self.trials[ids], n_c)
        w = ramp(step, self.uniform, self.ramp)
        return (1 - w) * 1 + w * accept_prob(p, self.a_min)  # assumption: ω mixes linearly with 1

    def select(self, ids: Tensor, v0: Tensor, n: int, step: int,
               generator: torch.Generator) -> Tensor:
        """n distinct ids out of the candidates ids [M]: as they were accepted, filled ones last.

        v0 [M]: their V(s_0), or [critics, M] of an ensemble, whose spread then sets n_c. step
        counts rollout batches, for the ramp. The CPU generator is the only source of chance. The
        candidates may come in any order. `report` tells what was done.
        ValueError if ids repeat or are out of range, v0 has another shape or a NaN, or n > M.
        """
        ids, v0 = _numbers("ids", ids, len(self.trials)), v0.detach().cpu()
        if len(ids.unique()) != len(ids):
            raise ValueError(f"ids: expected distinct ids, found {len(ids.unique())} of {len(ids)}")
        if v0.shape not in (ids.shape, (len(v0), *ids.shape)) or v0.isnan().any():
            raise ValueError(f"v0: expected the shape {[*ids.shape]} of ids and no NaN, found "
                             f"{[*v0.shape]} and {v0.isnan().sum()} NaN")
        a = self.acceptance(ids, v0, step)
        taken, drawn = accept(a, n, generator)
        self.report = {"offered": len(ids), "omega": ramp(step, self.uniform, self.ramp),
                       "acceptance": a.mean().item() if len(ids) else 0.0} | drawn
        return ids[taken]

    def update(self, prompt_id: Tensor, success: Tensor) -> None:
        """Decay all counts, then add a rollout batch's outcomes: call it once a rollout batch.

        prompt_id [B] whole numbers, repeats (a group's K responses) add up; success [B] 0 or 1,
        bool or number. Pass the outcomes of dropped groups too: they were trials like any other.
        ValueError, and nothing changed, for another shape, an id out of range or another value.
        """
        prompt_id = _numbers("prompt_id", prompt_id, len(self.trials))
        success = success.detach().cpu().double()
        wrong = success[(success != 0) & (success != 1)]
        if success.shape != prompt_id.shape or len(wrong):
            raise ValueError("success: expected 0 or 1 (as reward > 0) in the shape of prompt_id, "
                             f"found {[*success.shape]} with {wrong[:3].tolist()}")
        self.successes.mul_(self.decay).index_add_(0, prompt_id, success)  # S ← 0.99 S + Σ r_i
        self.trials.mul_(self.decay).index_add_(0, prompt_id, torch.ones_like(success))

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the counts: {"successes", "trials"}, each [n_prompts] float64."""
        return {"successes": self.successes.clone(), "trials": self.trials.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy the counts in; ValueError, and nothing changed, if one lacks or has another size."""
        sizes, size = {name: tuple(x.shape) for name, x in state.items()}, tuple(self.trials.shape)
        if not sizes.get("successes") == sizes.get("trials") == size:
            raise ValueError(f"state: expected successes and trials of shape {size}, found {sizes}")
        self.successes.copy_(state["successes"])
        self.trials.copy_(state["trials"])


def mixed_groups(reward: Tensor, prompt_id: Tensor) -> Tensor:
    """[B] bool: True where a response's group is neither all right nor all wrong (DAPO).

    reward [B], right where positive; prompt_id [B] whole numbers, a group's rows in any order. A
    group of one is never mixed: the filter is for K > 1. ValueError for another shape or NaN.
    """
    if reward.ndim != 1 or reward.shape != prompt_id.shape or reward.isnan().any():
        raise ValueError("reward, prompt_id: expected one shape [B] and no NaN, found "
                         f"{[*reward.shape]}, {[*prompt_id.shape]}, {reward.isnan().sum()} NaN")
    _, group, size = prompt_id.unique(return_inverse=True, return_counts=True)
    right = torch.zeros_like(size).index_add_(0, group, (reward > 0).long())
    return ((0 < right) & (right < size))[group]


# ---- selections that DAPS is compared with -------------------------------------------------------

def nearest_half(v0: Tensor, n: int) -> Tensor:
    """Positions [n] of the candidates whose p_c is nearest ½, nearest first. (PCL)

    Gao et al. 2025, 2510.01135. Differs from DAPS: the critic's V(s_0) [M] alone decides, with no
    draw, history or floor. Ties in the order given; on the CPU. ValueError for NaN or n > M.
    """
    v0 = _candidates("v0", v0, n)
    return (success_from_value(v0) - 0.5).abs().argsort(stable=True)[:n]  # |p_c − ½|


def greso_accept_prob(uniform_in_a_row: Tensor, p: float = 0.5, floor: float = 0.01) -> Tensor:
    """Chance max(p^z, floor) that a prompt is rolled out, float64. (GRESO)

    Zheng et al. 2025, 2506.02177. Differs from DAPS: it needs no critic. z: how many of the last
    groups, in a row, were all right or all wrong (`uniform_streak`). Left out: a p for each kind,
    adapted as it goes. Select with `accept`. ValueError unless p and floor are in [0, 1].
    """
    if not (0 <= p <= 1 and 0 <= floor <= 1):
        raise ValueError(f"p, floor: expected numbers in [0, 1], found {p}, {floor}")
    return (p ** uniform_in_a_row.double()).clamp(min=floor)  # max(p^z, floor)


def uniform_streak(streak: Tensor, reward: Tensor, prompt_id: Tensor) -> Tensor:
    """GRESO's z of every prompt after these responses, [n_prompts]: a new tensor.

    z is 0 after a mixed group, one more after a uniform one, unchanged for prompts not in prompt_id
    [B]. reward [B] as in `mixed_groups`; a group of one is uniform. ValueError for a wrong id.
    """
    mixed = mixed_groups(reward, prompt_id).cpu()
    prompt_id, streak = _numbers("prompt_id", prompt_id, len(streak)), streak.clone()
    streak[prompt_id] = torch.where(mixed, 0, streak[prompt_id] + 1)
    return streak


def _candidates(name: str, x: Tensor, n: int) -> Tensor:
    """x [M] on the CPU; ValueError unless it has one dimension and no NaN and 0 <= n <= M."""
    if x.ndim != 1 or x.isnan().any():
        raise ValueError(f"{name}: expected one dimension and no NaN, found the shape "
                         f"{[*x.shape]} and {x.isnan().sum()} NaN")
    if not 0 <= n <= len(x):
        raise ValueError(f"n: expected 0 … {len(x)}, the number of candidates, found {n}")
    return x.detach().cpu()


def _numbers(name: str, ids: Tensor, n_prompts: int) -> Tensor:
    """ids on the CPU; ValueError unless they are whole numbers [M] in 0 … n_prompts − 1."""
    ids = ids.detach().cpu()
    wrong = ids[(ids < 0) | (ids >= n_prompts)]
    if ids.ndim != 1 or ids.is_floating_point() or ids.dtype == torch.bool or len(wrong):
        raise ValueError(f"{name}: expected whole numbers [M] in 0 … {n_prompts - 1}, found "
                         f"{ids.dtype} {[*ids.shape]}, {wrong[:3].tolist()} out of range")
    return ids.long()


def _demo_selection(name: str, p_true: Tensor, args: argparse.Namespace) -> list[float]:
    """Share [5] of picked prompts with p in 0–.2 … .8–1, share of groups dropped, mean |p̂ − p|."""
    g = torch.Generator().manual_seed(args.seed)
    v0 = 2 * p_true - 1 + args.noise * torch.randn(len(p_true), generator=g)  # one error a prompt
    daps = DAPS(args.prompts, a_min=args.a_min, uniform=args.steps * (name == "uniform"), ramp=0)
    streak, share, dropped = torch.zeros(args.prompts, dtype=torch.long), torch.zeros(5), 0.0
    for step in range(args.steps):
        offered = torch.randperm(len(p_true), generator=g)[:args.candidates]
        if name == "PCL":
            ids = offered[nearest_half(v0[offered], args.batch)]
        elif name == "GRESO":
            ids = offered[accept(greso_accept_prob(streak[offered]), args.batch, g)[0]]
        else:
            ids = daps.select(offered, v0[offered], args.batch, step, g)
        prompt_id = ids.repeat_interleave(args.group)
        success = (torch.rand(len(prompt_id), generator=g) < p_true[prompt_id]).float()
        daps.update(prompt_id, success)
        streak = uniform_streak(streak, success, prompt_id)
        share += torch.histc(p_true[ids], bins=5, min=0, max=1) / args.batch / args.steps
        dropped += (~mixed_groups(success, prompt_id)).float().mean().item() / args.steps
    p = fuse(success_from_value(v0), daps.successes, daps.trials, daps.n_c)
    return [*share.tolist(), dropped, (p - p_true).abs().mean().item()]


def _demo() -> None:
    """The curve, the ramp, and what four selections take of prompts whose success is known."""
    parser = argparse.ArgumentParser(description="DAPS: its curve, its ramp, and what it selects")
    for name, default, text in (("a-min", 0.1, "floor"), ("noise", 0.4, "std of the error of V"),
                                ("prompts", 2000, ""), ("candidates", 256, "offered for a batch"),
                                ("batch", 64, "prompts"), ("group", 8, "responses a prompt, K"),
                                ("steps", 200, "rollout batches"), ("seed", 0, "")):
        parser.add_argument(f"--{name}", type=type(default), default=default, help=text)
    args = parser.parse_args()
    if not (0 <= args.a_min <= 1 and 0 <= args.noise < math.inf and 0 <= args.seed < 2**63
            and 1 <= args.batch <= args.candidates <= args.prompts and args.group * args.steps > 0
            and args.steps > 0):
        raise SystemExit("error: expected --a-min 0 … 1, --noise and --seed 0 or more, --group and "
                         "--steps 1 or more, 1 ≤ --batch ≤ --candidates ≤ --prompts; found "
                         + ", ".join(f"{name} {x}" for name, x in vars(args).items()))
    print(f"acceptance  a = a_min + (1 − a_min)·4p̂(1 − p̂),  a_min = {args.a_min}")
    for p in torch.linspace(0, 1, 11):
        a = accept_prob(p, args.a_min).item()
        print(f"   p̂ {p:.1f}   a {a:.3f}  {'█' * round(40 * a)}")
    print("\nramp  " + "   ".join(f"step {t}: ω {ramp(t):.2f}" for t in (0, 40, 60, 80, 100, 120)))
    torch.manual_seed(args.seed)
    p_true = torch.sin(torch.rand(args.prompts) * torch.pi / 2) ** 2  # Beta(½, ½)
    print(f"\n{args.batch} prompts out of {args.candidates}, {args.steps} times; std of V's error "
          f"{args.noise}\n   true p   0.0 – 0.2 – 0.4 – 0.6 – 0.8 – 1.0  dropped  |p̂ − p|")
    for name in ("uniform", "DAPS", "PCL", "GRESO"):
        *shares, error = _demo_selection(name, p_true, args)
        print(f"   {name:8}" + "".join(f"{x:8.1%}" for x in shares) + f"{error:9.3f}")
    hopeless = DAPS(100, a_min=args.a_min, uniform=0, ramp=0)
    hopeless.select(torch.arange(100), -torch.ones(100), 90, 0, torch.Generator().manual_seed(0))
    print(f"\n90 out of 100 hopeless prompts: {hopeless.report}")


if __name__ == "__main__":
    _demo()
