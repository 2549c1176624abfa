"""Difficulty-aware prompt selection: choose what to roll out by the critic's V(s_0) and by history.

    p_c = clip((V(s_0) + 1) / 2, 0, 1)           a return in [−1, 1] is a success rate in [0, 1]
    p̂   = (S + n_c p_c) / (N + n_c)              Beta-Bernoulli: the critic counts as n_c trials
    a   = a_min + (1 − a_min) · 4 p̂ (1 − p̂)      accept: 1 at p̂ = ½, a_min at p̂ = 0 and p̂ = 1
    a'  = (1 − ω) · 1 + ω · a                    ω = 0 for 40 steps, then linear up to 1 in 80 steps
    S ← 0.99 S + Σ r_i,  N ← 0.99 N + Σ 1        once a rollout batch, r_i ∈ {0, 1}

S3AC §3.4 (DAPS); the group filter is the one of DAPO's dynamic sampling (arXiv 2503.14476).

    v0 [M]       V(s_0) of M candidate prompts, from one batched critic pass over the prompts alone
    ids [M]      their numbers in 0 … n_prompts − 1; S and N [n_prompts] are kept for every prompt
    reward, prompt_id [B]    outcomes of the B responses; a prompt's K responses share its id

Offer several candidates for each prompt wanted: then one round fills the batch, and the chance of a
prompt to be in it is nearly proportional to a'. Each further round over the candidates left makes
the choice flatter, and filling up is no draw at all: `DAPS.report` says how the last one went.

Differs from the paper, which does not say what happens when a round leaves the batch short: here
at most 10 rounds over the candidates not yet taken, then those of highest a'. Left out: the critic
pass and the rollout, which are the caller's, and the replacement of the groups that are dropped.

Run `python daps.py` for the curve, the ramp, and uniform against DAPS on prompts of known success.
"""
import argparse

import torch
from torch import Tensor

ROUNDS = 10  # assumption: the paper states no bound on the rounds of one selection


def success_from_value(v0: Tensor) -> Tensor:
    """Success rate p_c ∈ [0, 1] that a value V(s_0) of returns in {−1, +1} stands for (S3AC §3.4).

    v0 of any shape; NaN stays NaN. The result is float32, or float64 for float64.
    """
    v0 = v0.to(torch.promote_types(v0.dtype, torch.float32))
    return ((v0 + 1) / 2).clamp(0, 1)  # p_c = clip((V(s_0) + 1)/2, 0, 1)


def fuse(p_c: Tensor, successes: Tensor, trials: Tensor, n_c: float = 3.0) -> Tensor:
    """p̂ ∈ [0, 1] from the critic's p_c, worth n_c trials, and S successes in N trials (S3AC §3.4).

    All of one shape. ValueError if n_c is not positive: p̂ of an untried prompt would be 0/0.
    """
    if not n_c > 0:
        raise ValueError(f"n_c must be positive, found {n_c}")
    return (successes + n_c * p_c) / (trials + n_c)  # p̂ = (S + n_c p_c)/(N + n_c)


def accept_prob(p: Tensor, a_min: float = 0.1) -> Tensor:
    """Acceptance a ∈ [a_min, 1] of a prompt of success rate p ∈ [0, 1] (S3AC §3.4).

    a_min is the floor that keeps solved and hopeless prompts in sight, 0.1–0.3 in the paper.
    ValueError if it is not in [0, 1].
    """
    if not 0 <= a_min <= 1:
        raise ValueError(f"a_min must be in [0, 1], found {a_min}")
    return a_min + (1 - a_min) * 4 * p * (1 - p)  # a = a_min + (1 − a_min)·4p̂(1 − p̂)


def ramp(step: int, uniform: int = 40, length: int = 80) -> float:
    """ω ∈ [0, 1]: 0 up to step `uniform`, linear, 1 from step `uniform + length` on (S3AC §3.4).

    length 0 switches from 0 to 1 at step `uniform`.
    """
    if length == 0:
        return float(step >= uniform)
    return min(max((step - uniform) / length, 0.0), 1.0)


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
        if n_prompts < 1:
            raise ValueError(f"n_prompts must be at least 1, found {n_prompts}")
        if not (0 <= a_min <= 1 and n_c > 0 and 0 <= decay <= 1 and uniform >= 0 and ramp >= 0):
            raise ValueError("expected a_min and decay in [0, 1], n_c > 0, uniform and ramp >= 0, "
                             f"found {a_min}, {decay}, {n_c}, {uniform}, {ramp}")
        self.a_min, self.n_c, self.decay = a_min, n_c, decay
        self.uniform, self.ramp = uniform, ramp
        self.successes = torch.zeros(n_prompts, dtype=torch.float64)
        self.trials = torch.zeros(n_prompts, dtype=torch.float64)
        self.report: dict[str, float] = {}

    def acceptance(self, ids: Tensor, v0: Tensor, step: int) -> Tensor:
        """a' [M] float64 ∈ [a_min, 1] of the prompts ids [M] with values v0 [M] at this step."""
        p = fuse(success_from_value(v0.double()), self.successes[ids], self.trials[ids], self.n_c)
        w = ramp(step, self.uniform, self.ramp)
        return (1 - w) * 1 + w * accept_prob(p, self.a_min)  # assumption: ω mixes linearly with 1

    def select(self, ids: Tensor, v0: Tensor, n: int, step: int,
               generator: torch.Generator) -> Tensor:
        """n distinct ids out of the candidates ids [M]: as they were accepted, filled ones last.

        v0 [M] are their V(s_0), step is the one that the ramp counts, the CPU generator is the only
        source of chance. The candidates may come in any order. `report` tells what was done.
        ValueError if ids repeat or are out of range, v0 has another shape or a NaN, or n > M.
        """
        ids, v0 = self._checked(ids, "ids"), v0.detach().cpu()
        if len(ids.unique()) != len(ids):
            raise ValueError(f"ids must be distinct, found {len(ids.unique())} of {len(ids)}")
        if v0.shape != ids.shape or v0.isnan().any():
            raise ValueError(f"v0 must have the shape {tuple(ids.shape)} of ids and no NaN, found "
                             f"the shape {tuple(v0.shape)} and {int(v0.isnan().sum())} NaN")
        if not 0 <= n <= len(ids):
            raise ValueError(f"n must be in 0 … {len(ids)}, the number of ids, found {n}")

        a = self.acceptance(ids, v0, step)
        left = torch.randperm(len(ids), generator=generator)  # not yet taken, in drawn order
        taken, rounds = left[:0], 0
        while len(taken) < n and rounds < ROUNDS:
            hit = torch.rand(len(left), generator=generator, dtype=torch.float64) < a[left]
            taken, left = torch.cat([taken, left[hit]]), left[~hit]
            rounds += 1
        best = left[a[left].argsort(descending=True, stable=True)]  # ties in drawn order
        accepted = min(len(taken), n)
        self.report = {"offered": len(ids), "omega": ramp(step, self.uniform, self.ramp),
                       "acceptance": a.mean().item() if len(ids) else 0.0,
                       "rounds": rounds, "accepted": accepted, "filled": n - accepted}
        return ids[torch.cat([taken, best])[:n]]  # assumption: a short batch is filled by best a'

    def update(self, prompt_id: Tensor, success: Tensor) -> None:
        """Decay all counts, then add a rollout batch's outcomes: call it once a rollout batch.

        prompt_id [B] whole numbers, repeats (a group's K responses) add up; success [B] 0 or 1,
        bool or number. Pass the outcomes of dropped groups too: they were trials like any other.
        ValueError, and nothing changed, for another shape, an id out of range or another value.
        """
        prompt_id, success = self._checked(prompt_id, "prompt_id"), success.detach().cpu().double()
        if success.shape != prompt_id.shape:
            raise ValueError(f"success must have the shape {tuple(prompt_id.shape)} of prompt_id, "
                             f"found {tuple(success.shape)}")
        wrong = success[(success != 0) & (success != 1)]
        if len(wrong):
            raise ValueError(f"success must be 0 or 1 (say, reward > 0), found {wrong[0].item()}")
        self.successes.mul_(self.decay).index_add_(0, prompt_id, success)  # S ← 0.99 S + Σ r_i
        self.trials.mul_(self.decay).index_add_(0, prompt_id, torch.ones_like(success))

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the counts: {"successes", "trials"}, each [n_prompts] float64."""
        return {"successes": self.successes.clone(), "trials": self.trials.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy the counts in; ValueError, and nothing changed, if one lacks or has another size."""
        for name in ("successes", "trials"):
            found = tuple(state[name].shape) if name in state else "none"
            if found != tuple(self.trials.shape):
                raise ValueError(f"state must hold {name} of shape {tuple(self.trials.shape)}, one "
                                 f"count a prompt, found {found}")
        self.successes.copy_(state["successes"])
        self.trials.copy_(state["trials"])

    def _checked(self, ids: Tensor, name: str) -> Tensor:
        """ids on the CPU; ValueError unless they are whole numbers [M] in 0 … n_prompts − 1."""
        if ids.ndim != 1 or ids.is_floating_point() or ids.dtype == torch.bool:
            raise ValueError(f"{name} must be whole numbers of one dimension, "
                             f"found {ids.dtype} of shape {tuple(ids.shape)}")
        ids = ids.detach().cpu().long()
        wrong = ids[(ids < 0) | (ids >= len(self.trials))]
        if len(wrong):
            raise ValueError(f"{name} must be in 0 … {len(self.trials) - 1}, found {wrong[0]}")
        return ids


def mixed_groups(reward: Tensor, prompt_id: Tensor) -> Tensor:
    """[B] bool: True where a response's group is neither all right nor all wrong (DAPO).

    reward [B], right where positive; prompt_id [B] whole numbers, a group's rows in any order. A
    group of one is never mixed: the filter is for K > 1. ValueError for another shape or NaN.
    """
    if reward.ndim != 1 or reward.shape != prompt_id.shape or reward.isnan().any():
        raise ValueError("reward and prompt_id must have one shape [B] and reward no NaN, found "
                         f"{tuple(reward.shape)}, {tuple(prompt_id.shape)}, "
                         f"{int(reward.isnan().sum())} NaN")
    _, group, size = prompt_id.unique(return_inverse=True, return_counts=True)
    right = torch.zeros_like(size).index_add_(0, group, (reward > 0).long())
    return ((0 < right) & (right < size))[group]


def _simulate(daps: DAPS, p_true: Tensor, args: argparse.Namespace) -> tuple[Tensor, float, float]:
    """Share [5] of picked prompts with p in 0–.2 … .8–1, share of groups dropped, mean |p̂ − p|."""
    g = torch.Generator().manual_seed(args.seed)
    v0 = 2 * p_true - 1 + args.noise * torch.randn(len(p_true), generator=g)  # one error a prompt
    share, dropped = torch.zeros(5), 0.0
    for step in range(args.steps):
        offered = torch.randperm(len(p_true), generator=g)[:args.candidates]
        ids = daps.select(offered, v0[offered], args.batch, step, g)
        prompt_id = ids.repeat_interleave(args.group)
        success = torch.rand(len(prompt_id), generator=g) < p_true[prompt_id]
        daps.update(prompt_id, success)
        share += torch.histc(p_true[ids], bins=5, min=0, max=1) / args.batch / args.steps
        dropped += (~mixed_groups(success.float(), prompt_id)).float().mean().item() / args.steps
    p = fuse(success_from_value(v0), daps.successes, daps.trials, daps.n_c)
    return share, dropped, (p - p_true).abs().mean().item()


def _demo() -> None:
    parser = argparse.ArgumentParser(description="DAPS: its curve, its ramp, and what it selects")
    parser.add_argument("--a-min", type=float, default=0.1, help="acceptance floor")
    parser.add_argument("--noise", type=float, default=0.4, help="std of the critic's error in V")
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument("--candidates", type=int, default=256, help="prompts offered for a batch")
    parser.add_argument("--batch", type=int, default=64, help="prompts taken for a batch")
    parser.add_argument("--group", type=int, default=8, help="responses for a prompt, K")
    parser.add_argument("--steps", type=int, default=200, help="rollout batches")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    print(f"acceptance  a = a_min + (1 − a_min)·4p̂(1 − p̂),  a_min = {args.a_min}")
    p = torch.linspace(0, 1, 11)
    for p_i, a_i in zip(p.tolist(), accept_prob(p, args.a_min).tolist()):
        print(f"   p̂ {p_i:.1f}   a {a_i:.3f}  {'█' * round(40 * a_i)}")
    print("\nramp  " + "   ".join(f"step {t}: ω {ramp(t):.2f}" for t in (0, 40, 60, 80, 100, 120)))

    torch.manual_seed(args.seed)
    p_true = torch.sin(torch.rand(args.prompts) * torch.pi / 2) ** 2  # Beta(½, ½)
    print(f"\n{args.batch} prompts out of {args.candidates}, {args.steps} times, by a critic with "
          f"errors of std {args.noise} in V\n   true p      uniform    DAPS")
    off = DAPS(args.prompts, a_min=args.a_min, uniform=args.steps)  # ω = 0 in every step
    on = DAPS(args.prompts, a_min=args.a_min, uniform=0, ramp=0)  # ω = 1 in every step
    (u, u_drop, u_err), (d, d_drop, d_err) = (_simulate(x, p_true, args) for x in (off, on))
    for i, (u_i, d_i) in enumerate(zip(u.tolist(), d.tolist())):
        bar = "█" * round(100 * d_i)
        print(f"   {i / 5:.1f} – {(i + 1) / 5:.1f}   {u_i:6.1%}   {d_i:6.1%}  {bar}")
    print(f"   0.2 – 0.8   {u[1:4].sum():6.1%}   {d[1:4].sum():6.1%}  neither easy nor hard")
    print(f"   dropped     {u_drop:6.1%}   {d_drop:6.1%}  groups of {args.group} not mixed")
    print(f"   |p̂ − p|     {u_err:6.3f}   {d_err:6.3f}  after the last step")
    for name, daps in (("uniform", off), ("DAPS", on)):
        print(f"   last {name} selection: {_told(daps.report)}")

    hopeless = DAPS(100, a_min=args.a_min, uniform=0, ramp=0)
    hopeless.select(torch.arange(100), -torch.ones(100), 90, 0, torch.Generator().manual_seed(0))
    print(f"\n90 out of 100 hopeless prompts: {_told(hopeless.report)}")


def _told(report: dict[str, float]) -> str:
    """A report in one line."""
    return "  ".join(f"{name} {x:.3g}" for name, x in report.items())


if __name__ == "__main__":
    _demo()
