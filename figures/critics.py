r"""GenAC's claims: a critic that reasons in text against a value head, and what that does to RL.

    error    mean (v̂ − p)², p the success probability of a state, in closed form (below)
    top-1    how often the one response that is right so far has the highest score of m
    RL       success of the actor at equal updates, and in equal time

GenAC (2604.10701): error and distribution shift, top-1, critic size, ICC × stage, RL. The actors of
the error tables are noisy: a step slips with a probability that the critic can tell from the
success rate in its prompt. Both kinds of critic start from one policy, read the same text and make
as many updates: SFT, then the outcomes of fresh responses (REINFORCE on R_v; ½ (V − R)² for the
value head, which reads the last token). Not fair: in SFT the generative critic learns from traces
step by step, the value head from one number. Operands are unseen by critics and policy alike.
Differs from the paper: the oracle is a program; the RL stage is 2 % of a critic's updates.

    python -m figures.critics [--tiny: the smallest sizes]
    python -m figures.critics --train       only the critic for RL (FOLDER/rl/critic), its table
"""
import bisect
import functools
import itertools
import json
import math
import random
import re
import string
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import genac
import rollout
from critic import Critic, FiniteAdamW, value_step_
from figures import lab
from figures.compare import success
from figures.coverage import truth_job
from genac import GenCritic, State
from value_pretrain import balanced_draw

STEPS, NEAR = 16, "j"  # chains of 1 … 16 steps; critics are trained on those up to letter j, 10
SEEN, ANY, MOST = (0.1, 0.5), (0.0, 0.5), 0.55  # slips of the actors in training; of all; largest
WIDTH, REPLY, SIZE = 4, 96, "0.2M"  # tokens of a segment and of a reply; of the actors, as text
TOKENS = 1536  # padded ones of a forward pass: more at once are slower on a processor
POOLS, STAGES = (2, 4, 8, 16), ("untrained", "SFT", "SFT + RL")
CRITICS = {  # name: layers, ICC, times as many updates (three times take longer than replies do)
    "generative": (4, True, 1), "generative, no ICC": (4, False, 1),
    "generative, 2 layers": (2, True, 1), "value head": (4, True, 1),
    "value head, 2 layers": (2, True, 1), "value head, 3 × as long": (4, True, 3)}
SIZES = {  # name: default, with --tiny, what it is
    "n": (240, 4, "states of a test set"), "sft_steps": (400, 1, "SFT on guesses, then on states"),
    "sft_batch": (24, 2, "of SFT"), "sft_lr": (3e-3, 3e-3, "of the generative critic"),
    "value_lr": (3e-4, 3e-4, "of the value head: best of 3e-4, 1e-3, 3e-3 on one seed"),
    "steps": (16, 1, "of the RL stage"), "batch": (64, 8, "responses in each"),
    "lr": (1e-4, 1e-4, "of both kinds in the RL stage"),
    "truth": (400, 4, "states of the policy whose true p is sampled"),
    "k": (64, 2, "continuations of each"), "rl_steps": (40, 2, "of the actor"),
    "eval_problems": (414, 4, "held-out problems of a run")}
TRAIN = {"train": (False, False, "only the critic for RL, and its table")}

# ---- the oracle ----------------------------------------------------------------------------------
# A program that knows what the critic is told: that each step at the hard mark slips with one
# probability (a demonstration's do; a trained actor's only roughly). A value that is `behind` =
# (right − stated) mod 10 falls behind by the addend with each slip. So the chain ends right if k of
# the m steps left slip and (behind + k·addend) mod 10 = 0, k ~ Binomial(m, slip).

def chance(by: int, steps_left: int, behind: int, slip: float) -> float:
    """Probability in [0, 1] that a chain with the addend `by` ends right, steps_left ≥ 0 steps from
    a value that is `behind`."""
    m = steps_left
    return sum(math.comb(m, k) * slip**k * (1 - slip) ** (m - k)
               for k in range(m + 1) if (behind + k * by) % 10 == 0)


@functools.cache
def success_at(slip: float) -> float:
    """Success rate of an actor over all marks, addends and lengths. An easy step never slips."""
    hard = [chance(by, m, 0, slip) for by in range(1, 10) for m in range(1, STEPS + 1)]
    return (1 + sum(hard) / len(hard)) / 2


@functools.cache
def slip_at(success_rate: float) -> float:
    """The slip probability, at most MOST, at which success_at is the success rate."""
    return bisect.bisect_left(range(int(1e6 * MOST)), -success_rate,
                              key=lambda i: -success_at(i / 1e6)) / 1e6  # it falls


def check_steps(question: str, prefix: str) -> tuple[list[tuple[str, str, str]], int]:
    """(letter, right value, stated value) up to the prefix's last letter; steps left after it."""
    addend, start = int(question[1]), int(question[5])
    stated = re.findall(r"([a-z])([^a-z])", prefix)  # a policy may write what is no digit
    last, value = stated[-1][0] if stated else "`", dict(stated)  # ` stands before a
    return [(letter, str((start + addend * k) % 10), value.get(letter, "?"))
            for k, letter in enumerate(string.ascii_lowercase, start=1) if letter <= last
            ], ord(question[3]) - ord(last)


def oracle_chance(state: State) -> float:
    """The success probability behind the oracle's score: the true one of a noisy actor's state."""
    steps, left = check_steps(state.question, state.prefix)
    _, right, stated = steps[-1] if steps else ("", "0", "0")
    if left < 0 or not stated.isdigit():
        return 0.0
    slip = slip_at(round(state.success_rate, 2)) if state.question[2] == rollout.HARD else 0.0
    return chance(int(state.question[1]), left, int(right) - int(stated), slip)


def oracle_trace(state: State) -> str:
    """`+7!h=3`, `a0b7c7`, 0.74 -> `a00=b77=c47!h0.74<answer>0</answer>`, in easy steps: of each
    step that the prefix states the letter, the right value, the stated one beside it, whether they
    agree; then the goal, the actor's success rate, and the score."""
    checks = "".join(f"{letter}{value}{stated}{'=' if stated == value else '!'}"
                     for letter, value, stated in check_steps(state.question, state.prefix)[0])
    return (f"{checks}{state.question[3]}{state.success_rate:.2f}"
            f"<answer>{round(10 * oracle_chance(state))}</answer>")


def true_p(states: list[State]) -> Tensor:
    """p [N] of noisy actors' states, in closed form."""
    return torch.tensor([oracle_chance(x) for x in states])


# ---- states of noisy actors ----------------------------------------------------------------------

def draw_rate(slips: tuple[float, float], rng: random.Random) -> float:
    """The success rate of an actor, to the two digits that a prompt shows: they are all of it."""
    return round(success_at(rng.uniform(*slips)), 2)


def responses(problems: list, slips: tuple[float, float], rng: random.Random
              ) -> Iterator[tuple[list[State], bool]]:
    """Endless responses, each by another noisy actor: the states at every fourth token, and whether
    it ends right."""
    while True:
        problem, rate = rng.choice(problems), draw_rate(slips, rng)
        text = rollout.demonstration(problem.prompt, slip_at(rate), rng)  # a character is a token
        yield ([State(problem.prompt, text[:t], SIZE, rate) for t in range(0, len(text), WIDTH)],
               rollout.chain_reward(text[:-1], problem.answer) > 0)


def task_states(n: int, seed: int, problems: list, slips: tuple[float, float]) -> list[State]:
    """n states of noisy actors, balanced over outcome and quarter of the response, shuffled."""
    rng, states, cell = random.Random(seed), [], []
    for new, right in itertools.takewhile(lambda _: len(states) < 2 * n,
                                          responses(problems, slips, rng)):
        cell += [4 * right + 4 * i // len(new) for i in range(len(new))]
        states += new
    rows = balanced_draw(np.array(cell), n, seed).tolist()
    rng.shuffle(rows)
    return [states[i] for i in rows]


def lessons(n: int, seed: int, problems: list, slips: tuple[float, float]) -> list[State]:
    """2n states for SFT in their order: n guesses, whose values are right or random digits by a
    coin, so that copying and comparing are learned (a noisy actor's first slip makes the rest wrong
    too, so a verdict could copy the one before it); then n of noisy actors."""
    rng, guesses = random.Random(seed), []
    for _ in range(n):
        question = rng.choice(problems).prompt
        right, _ = check_steps(question, f"{question[3]}?")
        prefix = "".join(letter + (value if rng.random() < 0.5 else rng.choice(string.digits))
                         for letter, value, _ in right[: rng.randint(1, len(right))])
        guesses.append(State(question, prefix, SIZE, draw_rate(slips, rng)))
    return guesses + task_states(n, seed, problems, slips)


def outcomes(n: int, seed: int, problems: list, steps: int) -> Iterator[tuple[list[State], Tensor]]:
    """steps times the N states of n fresh responses, and the outcome r [N] of each one's."""
    fresh = responses(problems, SEEN, random.Random(seed))
    for _ in range(steps):
        drawn = list(itertools.islice(fresh, n))
        yield (sum((states for states, _ in drawn), []),
               torch.tensor([float(right) for states, right in drawn for _ in states]))


# ---- test sets, and what is measured on them -----------------------------------------------------

def test_sets(n: int, seed: int) -> tuple[list, dict[str, list[State]], list[list[State]]]:
    """Problems to train on; n states by test set; n/4 pools of candidates: of hard prompts, since
    on an easy one a noisy actor's p is 1."""
    hard, held_out = ([p for p in rollout.task_problems(held_out=x) if p.prompt[2] == rollout.HARD]
                      for x in (False, True))
    short, long = ([p for p in hard if (p.answer[0] <= NEAR) == near] for near in (True, False))
    unseen = [p for p in held_out if p.level.endswith("new pair") and p.answer[0] <= NEAR]
    sets = {"in distribution": (short[:100], SEEN), "longer chains": (long, SEEN),
            "stronger actors": (short[:100], (0.0, 0.05)), "unseen operands": (unseen, SEEN)}
    states = {name: task_states(n, seed, *where) for name, where in sets.items()}
    return short[100:], states, candidate_pools(n // 4, seed, short[:100])


def candidate_pools(n: int, seed: int, problems: list) -> list[list[State]]:
    """n pools of 16 different partial responses to one problem, cut at one step. Only the first is
    right, and its p the highest by a tenth: a wrong value may have as good a chance (addend 5)."""
    rng, pools = random.Random(seed), []
    while len(pools) < n:
        problem, rate, drawn = rng.choice(problems), draw_rate(SEEN, rng), {True: {}, False: {}}
        cut = 2 * rng.randint(1, check_steps(problem.prompt, "")[1])
        for _ in range(100):
            text = rollout.demonstration(problem.prompt, slip_at(rate), rng)[:cut]
            _, value, stated = check_steps(problem.prompt, text)[0][-1]
            drawn[value == stated][text] = State(problem.prompt, text, SIZE, rate)
        pool = [*drawn[True].values()][:1] + [*drawn[False].values()][: POOLS[-1] - 1]
        p = true_p(pool)
        if drawn[True] and len(pool) == POOLS[-1] and p[0] > p[1:].max() + 0.1:
            pools.append(pool)
    return pools


def measure(score: Callable[[list[State]], list[float]], states: dict[str, list[State]],
            pools: list[list[State]]) -> dict[str, float]:
    """Mean (v̂ − p)² by set, and how often a pool's first candidate has the top score."""
    result = {name: (torch.tensor(score(rows)) - true_p(rows)).square().mean().item()
              for name, rows in states.items()}
    v = torch.tensor(score(sum(pools, []))).view(len(pools), -1)
    for m in POOLS:  # one of several equal top scores is taken at random: its expectation
        top = v[:, :m] == v[:, :m].amax(1, keepdim=True)
        result[f"top-1 of {m}"] = (top[:, 0] / top.sum(1)).mean().item()
    return result


# ---- the two kinds of critic ---------------------------------------------------------------------

def task_critic(folder: str, icc: bool = True, layers: int = 4) -> GenCritic:
    """A critic of the embedded task: the first layers of the model in the folder."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, num_hidden_layers=layers).eval()
    return GenCritic(model, tokenizer, tokenizer, [tokenizer.eos_token_id],
                     genac.RunningSuccess(), SIZE, genac.COMPACT, icc, 256, REPLY,
                     patience=10**9)  # one that gives no score is measured, too


def ask(critic: GenCritic, states: list[State], rng: torch.Generator) -> genac.Replies:
    """The critic's replies about the states."""
    return genac.ask_states(critic, states, rollout.shared(rollout.generate), rng)[0]


def sft(critic: GenCritic, states: list[State], s: Namespace) -> None:
    """Stage 1 on the oracle's traces of the states, in their order."""
    if not critic.icc:  # an oracle that is not told takes the average actor
        rate = sum(x.success_rate for x in states) / len(states)
        states = [x._replace(success_rate=rate) for x in states]
    optimizer = FiniteAdamW(critic.model, s.sft_lr, name="generative critic")
    genac.sft(critic, [(x, oracle_trace(x)) for x in states], optimizer, epochs=1,
              batch_size=s.sft_batch, token_budget=TOKENS, seed=None, progress=False)


def reinforce(critic: GenCritic, batches: Iterable[tuple[list[State], Tensor]], s: Namespace,
              rng: torch.Generator) -> None:
    """Stage 2, the actors stay as they are: REINFORCE on R_v = 1 − (r − v̂)²."""
    optimizer = FiniteAdamW(critic.model, s.lr, weight_decay=0.0, name="generative critic")
    for states, r in batches:
        genac.reinforce_backward(critic, ask(critic, states, rng), r, token_budget=TOKENS)
        norm = nn.utils.clip_grad_norm_(critic.model.parameters(), 1.0)
        optimizer.step_if_finite(norm.item())


def last_value(critic: Critic, reader: GenCritic, states: list[State]) -> Tensor:
    """V [N] at the last token of the text that the generative critic `reader` would get."""
    prompts = [genac.encode_state(reader, x)[0] for x in states]
    return critic(*rollout.left_pad(prompts, reader.tokenizer.pad_token_id, "cpu"))[:, -1]


def fit(critic: Critic, reader: GenCritic, batches: Iterable[tuple[list[State], Tensor]],
        rates: Iterable[float]) -> None:
    """A step on ½ (V − (2v − 1))² for each batch of N states and their v [N], at its rate."""
    optimizer = FiniteAdamW(critic, 1.0)
    for (states, v), lr in zip(batches, rates):
        optimizer.param_groups[0]["lr"] = lr
        value, target = last_value(critic, reader, states)[:, None], 2 * v[:, None] - 1
        value_step_(critic, optimizer, [(value, target, torch.ones_like(value), None)], len(v))


def critic_job(name: str, seed: int, s: Namespace, base: str) -> dict[str, dict[str, float]]:
    """stage -> what `measure` returns of the critic after it, and the seconds it took."""
    problems, states, pools = test_sets(s.n, 1000 + seed)
    layers, icc, times = CRITICS[name]
    torch.manual_seed(seed)  # the head's weights
    rng, result, reader = torch.Generator().manual_seed(seed), {}, task_critic(base, icc, layers)
    critic = None if name.startswith("generative") else Critic(
        AutoModel.from_pretrained(base, num_hidden_layers=layers))
    rows = lessons(times * s.sft_steps * s.sft_batch, seed, problems, SEEN)
    batches = outcomes(s.batch, seed, problems, times * s.steps)

    @torch.no_grad()
    def score(of: list[State]) -> list[float]:
        """v̂ of the states: (V + 1)/2; or the reply's, the success rate where it has none."""
        if critic:
            return ((last_value(critic, reader, of) + 1) / 2).clamp(0, 1).tolist()
        return [x.success_rate if v is None else v for x, v in zip(of, ask(reader, of, rng).v_hat)]

    for stage in STAGES:
        start = time.perf_counter()
        if stage == "SFT" and critic:
            parts = [rows[i : i + s.sft_batch] for i in range(0, len(rows), s.sft_batch)]
            fit(critic, reader, ((part, (10 * true_p(part)).round() / 10) for part in parts), (
                s.value_lr * genac.sft_lr_share(i, len(parts)) for i in range(len(parts))))
        elif stage == "SFT":
            sft(reader, rows, s)
        elif stage == "SFT + RL" and critic:
            fit(critic, reader, batches, itertools.repeat(s.lr))
        elif stage == "SFT + RL":
            reinforce(reader, batches, s, rng)
        seconds = time.perf_counter() - start
        result[stage] = measure(score, states, pools) | {"seconds": seconds}
    return result


def print_critics(results: dict[str, list[dict]]) -> None:
    """Error by test set, top-1 by pool size, whether each claim shows; results: one per seed."""
    columns = list(results["generative"][0]["SFT"])
    for title, names in (("mean (v̂ − p)²", columns[:4]), ("top-1", columns[4:])):
        print(f"\n{title}\n")
        lab.print_table(["critic, stage", *names], [
            [f"{name}, {stage}", *(lab.mean_sd([x[stage][c] for x in seeds]) for c in names)]
            for name, seeds in results.items() for stage in STAGES])
    claims = [(c, "generative", "value head") for c in columns[:-1]] + [(columns[0], *x) for x in (
        ("generative", "generative, 2 layers"), ("value head", "value head, 2 layers"),
        ("generative", "generative, no ICC"), ("generative", "generative, SFT alone"))]
    results["generative, SFT alone"] = [x | {STAGES[-1]: x["SFT"]} for x in results["generative"]]
    good = lambda name, c: [x[STAGES[-1]][c] * (1 if "top-1" in c else -1) for x in results[name]]
    print()
    lab.print_table(["measure", "claim", "here"], [
        [c, f"{better} better than {worse}", lab.verdict(good(better, c), good(worse, c))]
        for c, better, worse in claims])


# ---- RL: its critic, that critic's error on the policy's own states, the runs --------------------

def rl_critic(s: Namespace, base: str, folder: str) -> str:
    """Stage 1 on chains of all lengths, longer in proportion -> the folder with the critic."""
    critic, n = task_critic(base), s.sft_steps * STEPS // 10 * s.sft_batch
    sft(critic, lessons(n, 0, rollout.task_problems(), ANY), s)
    rollout.write_folder(folder, critic.tokenizer, critic.model)
    return folder


def policy_errors(truth: str, k: int, folders: tuple[str, ...]) -> list[list]:
    """[name, error on states of the policy's own responses, unparsable share]: of always the mean
    of p, of the oracle program, of the critics in the folders. truth: truth_job's file."""
    with open(truth) as file:
        truth = json.load(file)
    p, rate, rng = truth["p"], truth["success"], torch.Generator().manual_seed(0)
    states = [State(q, x, SIZE, rate) for q, x in zip(truth["question"], truth["prefix"])]
    v_hat = {"always the mean of p": [sum(p) / len(p)] * len(p), "the oracle program": [
        genac.parse_score(oracle_trace(x)) for x in states]}
    v_hat |= {folder: ask(task_critic(folder), states, rng).v_hat for folder in folders}
    return [[name, lab.squared_error([rate if x is None else x for x in v], p, k),
             lab.percent(v.count(None) / len(v))] for name, v in v_hat.items()]


def rl_job(method: str, seed: int, steps: int, s: Namespace, base: str, *more: str, end: str = ""
           ) -> lab.Job:
    """A training run; the limit of 64 makes segments of WIDTH tokens, two steps."""
    flags = (f"--preset tiny --method {method} --seed {seed} --steps {steps} --token-budget "
             f"{TOKENS} --rollout-batch {s.batch} --eval-problems {s.eval_problems} "
             f"--eval-every 20 --max-response {16 * WIDTH}")
    return lab.training(f"{method}-{seed}{end}" if seed else "rl", [
        *flags.split(), "--model", base, *more])


def print_rl(args: Namespace, s: Namespace, base: str, critic: str) -> None:
    """PPO, GRPO and VinePPO beside GenAC: success after equal actor updates, and after as many as
    fit into GenAC's time."""
    def runs(steps: dict[str, int], end: str) -> dict[str, list[dict]]:
        """method -> a run per seed."""
        more = {"genac": ["--critic", critic, "--critic-lr", "1e-5"]}
        return lab.run_groups({m: [rl_job(m, i, n, s, base, *more.get(m, []), end=end)
                                   for i in range(1, args.seeds + 1)] for m, n in steps.items()},
                              args.folder, args.workers)

    equal = runs(dict.fromkeys(("genac", "ppo", "grpo", "vine-ppo"), s.rl_steps), "")
    seconds = {m: float(np.median([  # of a step; the first one is left out, it warms up
        sum(x for name, x in step.items() if name.startswith("time/")) for run in of
        for step in run["metrics"][1:] if "rollout/success" in step])) for m, of in equal.items()}
    steps = {m: round(s.rl_steps * seconds["genac"] / x) for m, x in seconds.items()}
    timed = equal | runs({m: n for m, n in steps.items() if m != "genac"}, "-long")
    percent = lambda of: lab.mean_sd([100 * success(run) for run in of], 1)
    print(f"\nRL, {s.rl_steps} steps of {s.batch} responses; success in per cent\n")
    lab.print_table(["method", "seconds a step", "÷ PPO (paper: genac 2.1, vine-ppo over 4)",
                     "equal updates", "equal time", "its steps"], [
        [m, seconds[m], f"{seconds[m] / seconds['ppo']:.1f}", percent(equal[m]),
         percent(timed[m]), steps[m]] for m in equal])


def main(args: Namespace) -> None:
    """The critic for RL and its table; then, without --train, all critics and the runs."""
    s, folder = Namespace(**{x: getattr(args, x) for x in SIZES}), args.folder
    base, stage_1, critic = lab.base_policy(args.tiny), f"{folder}/stage-1", f"{folder}/rl/critic"
    first = [lab.Job("stage 1", rl_critic, (s, base, stage_1), quiet=True),
             lab.Job("truth", truth_job, (base, s.truth, s.k), quiet=True)]
    critics = {} if args.train else {x: [
        lab.Job(f"{x}, seed {i}", critic_job, (x, i, s, base), quiet=True)
        for i in range(1, args.seeds + 1)] for x in CRITICS}
    rl = [rl_job("genac", 0, s.steps, s, base, "--freeze-actor", "--critic", stage_1,
                 "--critic-lr", str(s.lr))]
    table = [lab.Job("table", policy_errors, (
        f"{folder}/truth.json", s.k, (base, stage_1, critic)), quiet=True)]
    lab.announce(folder, {"of critics": first + sum(critics.values(), []), "of stage 2": rl,
                          "for its table": table, "of RL": 7 * args.seeds * (not args.train)})
    groups = lab.run_groups({"": first} | critics, folder, args.workers)
    lab.run_jobs(rl, folder, args.workers)
    print("\nthe critic for RL on states of the policy\n")
    lab.print_table(["scores of", "mean (v̂ − p)²", "unparsable"],
                    lab.run_jobs(table, folder, args.workers)["table"])
    if critics:
        print_critics({x: groups[x] for x in critics})
        print_rl(args, s, base, critic)


if __name__ == "__main__":
    sys.exit(lab.script("critics", __doc__, SIZES | TRAIN, main, sys.argv[1:]))
