r"""GenAC: a critic that reasons in text and ends in a score.

    v̂ = score/10,  score ∈ {0, …, 10} in <answer> tags       a reply without one: v̂ = None
    R_v = 1 − (r − v̂)²,  r ∈ {0, 1} the outcome               a reply without one: R_v = 0
    V(s) = 2v̂ − 1                                             what gae wants: r = 1 is R = +1

GenAC (arXiv 2604.10701), method and three stages: (1) SFT on an oracle's traces, (2) REINFORCE on
R_v with the actor frozen, (3) PPO, where the critic's scores fill `value` and stage 2 goes on. R_v
is proper: its mean over r ~ p is largest at v̂ = p. In-context conditioning (ICC): the prompt names
the actor's size and the running average of its success, since a value belongs to a policy.

    B responses of T tokens, N states (prefixes at which the critic is asked), L reply tokens
    starts [B, T] bool   True where a segment starts: a state; N of them, in row-major order
    value  [B, T]        2v̂ − 1 of its segment on each trainable token, 0 elsewhere
    tokens [N, P+L], attention [N, P+L], mask [N, L]   the critic's prompts ‖ replies

The sampler is a callable with the signature of rollout.generate, so this file runs alone. Differs
from the paper: where a state is scored is not published; see the lines marked `assumption`. Left
out: the actor's update (train.py); the KV cache that the states of one response share is the
sampler's affair (rollout.py).
Under torchrun the model is whole on every rank, and all ranks are given the same states: each
samples and differentiates its share, and gets the sum.

    python genac.py [--critic DIR]           a wrong response: prompt, reply, score, R_v, advantage
    python genac.py --train                  stages 1 and 2 on the embedded task, against the truth
    python genac.py --claims                 GenAC against a value head, ICC, ranking, RL: tables
    python genac.py --write-prompts P.jsonl --actor DIR --data FILE     for an oracle of your own
    python genac.py --sft TRACES.jsonl --critic DIR --out DIR           stage 1
    python genac.py --rl --critic DIR --actor DIR --data FILE --out DIR stage 2
"""

import argparse
import contextlib
import functools
import json
import math
import os
import random
import re
import statistics
import string
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

Stats = dict[str, tuple[Tensor | float, Tensor | float]]  # name -> (sum, count)

# -------------------------------------------------------------------------------------- prompt


class Template(NamedTuple):
    """text holds {question}, {prefix} and {icc}; icc holds {model_size} and {success_rate}."""

    text: str
    icc: str


ENGLISH = Template(
    """\
You estimate how likely a language model is to end with the right answer. You are given a problem \
and the model's response so far, which may stop at any point or not have begun.

Think in this order:
1. Difficulty. How hard is the problem, and where does one go wrong in it?
2. Ability. What do the response so far, and any facts given about the model, say about its skill?
3. Progress. Skim the response: what is settled, what is still open, is there an error or confusion?
4. Chance. If this same model goes on from here, how often does it end with the right answer?
Then write one integer from 0 (certain to fail) to 10 (certain to succeed) in tags: \
<answer>integer</answer>

{icc}Problem:
{question}

Response so far:
{prefix}""",
    """\
Facts about the model: {model_size} parameters; running average of its success on such problems, \
from 0 to 1: {success_rate}.

""",
)

# One character is one token of the embedded task. The question stands last, so the reply begins as
# the policy's own response does: a critic that starts from the policy can recompute the chain.
COMPACT = Template("{prefix}|{icc}|{question}", "{model_size},{success_rate}")


def critic_prompt(question: str, prefix: str, *, model_size: str, success_rate: float | None,
                  icc: bool = True, template: Template = ENGLISH) -> str:
    """The prompt for the state (question, prefix). Never the reference answer.

    model_size: of the actor, as text ("1.5B"). success_rate in [0, 1]: its running average. icc
    False leaves both out. ValueError on a template without a field or a rate that is none.
    """
    needed = {"text": ("question", "prefix", "icc"), "icc": ("model_size", "success_rate")}
    for part, names in needed.items():
        for name in names:
            if f"{{{name}}}" not in getattr(template, part):
                raise ValueError(f"template.{part}: expected the fields {', '.join(names)} in "
                                 f"braces, found no {{{name}}}")
    fields = {"question": question, "prefix": prefix, "icc": ""}
    if icc:
        if success_rate is None or not 0 <= success_rate <= 1:
            raise ValueError(f"success_rate: expected a number in [0, 1], found {success_rate} "
                             "(RunningSuccess has none before its first update)")
        facts = {"model_size": model_size, "success_rate": f"{success_rate:.2f}"}
        fields["icc"] = _fill(template.icc, facts)
    return _fill(template.text, fields)


def _fill(text: str, fields: dict[str, str]) -> str:
    """Puts the fields in, in one pass: braces elsewhere, in LaTeX for one, are left alone."""
    return re.sub(r"\{(" + "|".join(fields) + r")\}", lambda match: fields[match[1]], text)


# ------------------------------------------------------------------------------ score and reward


def parse_score(text: str) -> float | None:
    """score/10 from the last closed <answer> tag, None unless an integer 0 … 10 stands in it."""
    before, closed, _ = text.rpartition("</answer>")
    _, opened, content = before.rpartition("<answer>")
    if not (closed and opened and re.fullmatch(r"10|[0-9]", content.strip())):
        return None
    return int(content) / 10


def value_reward(r: float, v_hat: float | None) -> float:
    """R_v = 1 − (r − v̂)², 0 for a reply that could not be parsed (v_hat None).

    r in [0, 1], the outcome: (R + 1)/2 of a reward R ∈ {−1, +1}. ValueError outside.
    """
    if not 0 <= r <= 1:
        raise ValueError(f"r: expected an outcome in [0, 1], found {r}")
    return 0.0 if v_hat is None else 1 - (r - v_hat) ** 2                       # 1 − (r − v̂)²


class RunningSuccess:
    """Exponential average of the actor's success rate; None before the first update, which sets it.

    .value is all the state there is: a checkpoint keeps it.
    """

    def __init__(self, momentum: float = 0.9):
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum: expected a number in [0, 1), found {momentum}")
        self.momentum, self.value = momentum, None

    def update(self, success: float | Tensor) -> float:
        """success: a rate in [0, 1], or the 0/1 outcomes of a batch, whose mean is taken."""
        success = torch.as_tensor(success, dtype=torch.float64).mean().item()
        if not 0 <= success <= 1:
            raise ValueError(f"success: expected numbers in [0, 1], found a mean of {success}")
        m = self.momentum
        self.value = success if self.value is None else m * self.value + (1 - m) * success
        return self.value


# ------------------------------------------------------------------------------------ segments
# assumption: states are scored at the starts of at most 16 segments; no source says where.
# A cut depends on nothing that comes after it. So a segment ends *after* a delimiter or an unlikely
# token: were it to end before, V would be a baseline that depends on the action it is held against.


def segment_starts(mask: Tensor, ends: Tensor | None = None, *, width: int = 1,
                   at_most: int = 16) -> Tensor:
    """Where segments start [B, T]: at the first trainable token, then by the rule of `ends`.

    mask [B, T]. ends [B, T]: tokens after which a segment may end; None: any token, so that
    segments have a fixed length of width tokens. No segment but the last is shorter than width
    trainable tokens, none starts after the first at_most: width = ⌈limit/16⌉ covers any response
    of at most limit tokens evenly.
    """
    if width < 1 or at_most < 1:
        raise ValueError(f"width and at_most: expected 1 or more, found {width}, {at_most}")
    mask = mask.bool()
    ends = mask if ends is None else ends
    if ends.shape != mask.shape:
        raise ValueError(f"ends: expected shape {tuple(mask.shape)}, found {tuple(ends.shape)}")
    starts, ends = torch.zeros_like(mask), ends.bool() & mask
    length = torch.zeros_like(mask[:, :1].long().sum(1))  # trainable tokens of the segment, [B]
    count, may_end = length.clone(), length.bool()
    for t in range(mask.shape[1]):
        new = mask[:, t] & ((count == 0) | may_end & (length >= width) & (count < at_most))
        starts[:, t] = new
        count = count + new
        length = torch.where(new, 0, length) + mask[:, t]
        may_end = torch.where(mask[:, t], ends[:, t], may_end)  # a masked slot changes nothing
    return starts


def ends_by_delimiter(tokens: Tensor, delimiter_ids: list[int]) -> Tensor:
    """tokens [B, T] -> ends [B, T]: tokens that are, or contain, the delimiter."""
    return torch.isin(tokens, torch.tensor(delimiter_ids, device=tokens.device))


def delimiter_ids(tokenizer, delimiter: str) -> list[int]:
    """Ids of all tokens whose text contains the delimiter. ValueError if there is none."""
    ids = [i for i in range(len(tokenizer)) if delimiter in tokenizer.decode([i])]
    if not ids:
        raise ValueError(f"delimiter: expected text inside one token, found {delimiter!r} in none")
    return ids


def ends_by_surprise(logp: Tensor, *, below: float = 0.2) -> Tensor:
    """logp [B, T] of the sampled tokens -> ends [B, T]: those of a probability under 0.2."""
    return logp < math.log(below)


def spread(x: Tensor, starts: Tensor, mask: Tensor) -> Tensor:
    """x [B, T] as it stands at the start of its segment, on each trainable token; 0 elsewhere.

    GAE on the process of segments, for any λ: spread(gae(value, R, starts, lam), starts, mask),
    for gae skips what its mask leaves out. With λ = 1 that is gae(value, R, mask, 1.0).
    """
    at = torch.arange(x.shape[1], device=x.device).expand_as(x)
    start = torch.where(starts.bool(), at, -1).cummax(1).values
    here = mask.bool() & (start >= 0)
    return torch.where(here, x.gather(1, start.clamp_min(0)), 0.0)


def segment_values(v_hat: list[float | None], starts: Tensor, mask: Tensor,
                   fallback: float | None) -> Tensor:
    """value [B, T] = 2v̂ − 1 of each token's segment. v_hat: N scores, for starts in row order.

    A None takes the fallback, the running success rate in [0, 1]; ValueError if there is none.
    """
    if len(v_hat) != int(starts.sum()):
        raise ValueError(f"v_hat: expected {int(starts.sum())} scores, one per segment start, "
                         f"found {len(v_hat)}")
    if fallback is None and None in v_hat:
        raise ValueError("fallback: expected the running success rate, as a score is missing; "
                         "found None")
    # assumption: a state whose reply cannot be parsed has the value of the running success rate
    scores = [fallback if v is None else v for v in v_hat]
    value = torch.zeros(mask.shape, device=mask.device)
    value[starts.bool()] = 2 * torch.tensor(scores, device=mask.device) - 1     # V = 2v̂ − 1
    return spread(value, starts, mask)


# ---------------------------------------------------------------------------------- the critic


@dataclass
class GenCritic:
    """A causal language model that is asked for scores, and how it is asked."""

    model: nn.Module
    tokenizer: object
    eos_id: list[int]
    success: RunningSuccess  # of the actor
    model_size: str  # of the actor
    template: Template = ENGLISH
    icc: bool = True
    context: int = 4096  # prompt and reply together, in tokens
    max_new_tokens: int = 1024
    temperature: float = 1.0
    patience: int = 5  # assumption: calls in a row without one parsable reply before `ask` stops
    silent: int = 0  # such calls so far


class State(NamedTuple):
    """What the critic is asked about; success_rate and model_size are the actor's at that time."""

    question: str
    prefix: str
    model_size: str
    success_rate: float | None


class Replies(NamedTuple):
    """N replies: the tensors that the sampler returned, their texts and scores."""

    tokens: Tensor  # [N, P+L]
    attention: Tensor  # [N, P+L]
    mask: Tensor  # [N, L]
    texts: list[str]
    v_hat: list[float | None]


def encode(tokenizer, text: str) -> list[int]:
    """Token ids of a prompt: as a user's message where there is a chat template, else as it is."""
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": text}]
        return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    return tokenizer(text).input_ids


def encode_state(critic: GenCritic, state: State) -> tuple[list[int], bool]:
    """Prompt ids that leave room for the reply; True if the response so far was cut for it.

    The response loses tokens on its left. ValueError if the prompt is too long even without it.
    """
    question, prefix, size, rate = state
    room, cut = critic.context - critic.max_new_tokens, None
    while True:
        ids = encode(critic.tokenizer, critic_prompt(
            question, prefix, model_size=size, success_rate=rate, icc=critic.icc,
            template=critic.template))
        if len(ids) <= room:
            return ids, cut is not None
        if cut is None:
            cut = critic.tokenizer(prefix, add_special_tokens=False).input_ids
        if not cut:
            raise ValueError(f"context: expected room for a prompt of {len(ids)} tokens and a "
                             f"reply of {critic.max_new_tokens}, found {critic.context}")
        cut = cut[len(ids) - room :]
        prefix = critic.tokenizer.decode(cut)


def states_at(critic: GenCritic, questions: list[str], tokens: Tensor, starts: Tensor,
              ) -> list[State]:
    """The N states at the starts of responses tokens [B, T]: each sees what lies before it."""
    rows = tokens.cpu().tolist()
    return [
        State(questions[b], critic.tokenizer.decode(rows[b][:t], skip_special_tokens=True),
              critic.model_size, critic.success.value)
        for b, t in starts.bool().cpu().nonzero().tolist()]


def ask_states(critic: GenCritic, states: list[State], sampler: Callable,
               generator: torch.Generator | None = None) -> tuple[Replies, Stats]:
    """One sampled reply per state, all in one call of the sampler; under torchrun, where every
    rank asks about the same states, each samples its share and all have the whole.

    stats: unparsable, prompt_truncated, prompt_tokens, reply_tokens (per state), score (per parsed
    one). RuntimeError after critic.patience calls in a row in which no reply could be parsed.
    """
    encoded = [encode_state(critic, state) for state in states]
    (rank, size), prompts = ranks(), [ids for ids, _ in encoded]
    tokens, _, mask, _ = sampler(
        critic.model, prompts[rank::size] or prompts[:1], max_new_tokens=critic.max_new_tokens,
        temperature=critic.temperature, eos_id=critic.eos_id,
        pad_id=critic.tokenizer.pad_token_id, generator=own_draws(generator))
    shares = gathered([row[m].tolist() for row, m in
                       zip(tokens[:, -mask.shape[1] :].cpu(), mask.cpu())])
    replies = [shares[i % size][i // size] for i in range(len(prompts))]
    tokens, attention, mask = padded(
        critic.model, critic.tokenizer.pad_token_id, prompts, replies)
    texts = critic.tokenizer.batch_decode(replies, skip_special_tokens=True)
    v_hat = [parse_score(text) for text in texts]
    n, parsed = len(states), [v for v in v_hat if v is not None]
    critic.silent = 0 if parsed else critic.silent + 1
    if critic.silent >= critic.patience:
        raise RuntimeError(
            f"the critic gave no parsable reply in {critic.silent} calls in a row (the last of {n} "
            f"ends in {texts[-1][-40:]!r}): train it on traces first (--sft), or allow longer "
            f"replies than {critic.max_new_tokens} tokens")
    return Replies(tokens, attention, mask, texts, v_hat), {
        "unparsable": (n - len(parsed), n), "prompt_truncated": (sum(c for _, c in encoded), n),
        "prompt_tokens": (sum(len(ids) for ids, _ in encoded), n),
        "reply_tokens": (int(mask.sum()), n), "score": (sum(parsed), len(parsed))}


def padded(model: nn.Module, pad: int, prompts: list[list[int]], replies: list[list[int]],
           ) -> tuple[Tensor, Tensor, Tensor]:
    """tokens [N, P+L], attention, mask [N, L] of token ids, padded on the outside."""
    P, L = max(map(len, prompts)), max(map(len, replies))
    device = next(model.parameters()).device
    sides = [(P - len(p), L - len(z)) for p, z in zip(prompts, replies)]
    tokens = torch.tensor([[pad] * a + p + z + [pad] * d
                           for (a, d), p, z in zip(sides, prompts, replies)], device=device)
    at = torch.arange(P + L, device=device)
    left, right = torch.tensor(sides, device=device)[:, :, None].unbind(1)
    attention = (at >= left) & (at < P + L - right)
    return tokens, attention, attention[:, P:]


def ranks() -> tuple[int, int]:
    """This process's rank and their number: (0, 1) without torchrun."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def gathered(x) -> list:
    """What each rank holds, in the order of ranks."""
    parts = [x] * ranks()[1]
    if len(parts) > 1:
        dist.all_gather_object(parts, x)
    return parts


def own_draws(generator: torch.Generator | None) -> torch.Generator | None:
    """A generator for this rank; the one given stays in step on all ranks."""
    rank, size = ranks()
    if size == 1:
        return generator
    device = generator.device if generator else "cpu"
    seed = int(torch.randint(2**62, (), generator=generator, device=device)) + rank
    return torch.Generator(device).manual_seed(seed)


def ask(critic: GenCritic, questions: list[str], tokens: Tensor, mask: Tensor, starts: Tensor,
        sampler: Callable, generator: torch.Generator | None = None,
        ) -> tuple[Tensor, Replies, Stats]:
    """Asks at all starts of a batch of responses in one call: value [B, T] for gae, replies, stats.

    questions: B texts. tokens, mask, starts [B, T] of the responses. replies[i] belongs to the
    i-th start in row order, to the response `starts.nonzero()[:, 0][i]`. Errors as ask_states.
    """
    replies, stats = ask_states(
        critic, states_at(critic, questions, tokens, starts), sampler, generator)
    value = segment_values(replies.v_hat, starts, mask, critic.success.value)
    return value, replies, stats


# -------------------------------------------------------------------------------------- losses


def sft_loss(logp: Tensor, mask: Tensor, n_tokens: Tensor | float | None = None,
             ) -> tuple[Tensor, Stats]:
    """−(1/n) Σ log π(trace token): logp, mask [N, L]; n_tokens of the whole step (default: own)."""
    logp, mask, n = _checked(logp, mask, n_tokens, mask.bool().sum())
    total = -torch.where(mask, logp, 0.0).sum()
    return total / n, {"loss": (total.detach(), mask.sum())}


def reinforce_loss(logp: Tensor, advantage: Tensor, mask: Tensor,
                   n_replies: Tensor | float | None = None) -> tuple[Tensor, Stats]:
    """−(1/n) Σ_i A_i Σ_t log π(z_it|s_i): gradient −E[A ∇ log π(z|s)], each reply as one action.

    logp, mask [N, L], advantage [N] from reply_advantage, which needs the whole step's rewards.
    n_replies of the whole step (default: own rows with a token). For fresh replies, one step on
    them: there is no ratio. stats: loss per reply, logp per token.
    """
    if advantage.shape != logp.shape[:1]:
        raise ValueError(f"advantage: expected shape ({len(logp)},), found "
                         f"{tuple(advantage.shape)}")
    rows = mask.bool().any(1)
    logp, mask, n = _checked(logp, mask, n_replies, rows.sum())
    logp = torch.where(mask, logp, 0.0)
    A = torch.where(rows, advantage.detach(), 0.0).to(logp.dtype)
    total = -(A * logp.sum(1)).sum()                                            # −Σ A_i log π(z_i)
    return total / n, {"loss": (total.detach(), rows.sum()),
                       "logp": (logp.detach().sum(), mask.sum())}


def reply_advantage(reward: Tensor, group: Tensor | None = None, *, baseline: str = "none",
                    ) -> Tensor:
    """R_v [N] minus its baseline: 0 (none, the paper's), the mean, or that of the other replies.

    group [N]: replies with the same number share a baseline (default: all N), for several replies
    to one state. A reply alone in its group has no other: its leave-one-out baseline is 0. The
    mean holds the reply's own reward, which scales the expected gradient by 1 − 1/n.
    """
    if baseline not in ("none", "mean", "leave-one-out"):
        raise ValueError(f"baseline: expected none, mean or leave-one-out, found {baseline!r}")
    if baseline == "none":
        return reward
    group = torch.zeros_like(reward, dtype=torch.long) if group is None else group
    group = torch.unique(group, return_inverse=True)[1]
    of_group = lambda x: torch.zeros_like(x).index_add_(0, group, x)[group]
    n, total = of_group(torch.ones_like(reward)), of_group(reward)
    if baseline == "mean":
        return reward - total / n
    return reward - (total - reward) / (n - 1).clamp_min(1)                # R_i − mean_{j≠i} R_j


def _checked(logp: Tensor, mask: Tensor, n, own: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if logp.dim() != 2 or mask.shape != logp.shape:
        raise ValueError(f"logp, mask: expected one shape (N, L), found {tuple(logp.shape)} and "
                         f"{tuple(mask.shape)}")
    logp = logp if logp.dtype == torch.float64 else logp.float()
    n = torch.as_tensor(own if n is None else n, device=logp.device).clamp_min(1)
    return logp, mask.bool(), n


def reply_logp(model: nn.Module, tokens: Tensor, attention: Tensor, L: int,
               temperature: float = 1.0) -> Tensor:
    """log π [N, L] of the last L of tokens [N, P+L], float32, at the temperature that sampled."""
    positions = (attention.long().cumsum(-1) - 1).clamp_min(0)
    logits = model(input_ids=tokens, attention_mask=attention.long(), position_ids=positions,
                   use_cache=False, logits_to_keep=L + 1).logits[:, :-1]
    logp = torch.log_softmax(logits.float() / temperature, -1)
    return logp.gather(-1, tokens[:, -L:, None])[..., 0]


def backward(critic: GenCritic, tokens: Tensor, attention: Tensor, mask: Tensor,
             loss_of: Callable, *, temperature: float = 1.0, token_budget: int = 32_768) -> Stats:
    """Adds the gradient of loss_of(logp, mask, rows) to .grad in micro-batches of similar length.

    loss_of divides by the whole step's count. token_budget: padded tokens of one forward pass.
    Under torchrun, where every rank holds the same batch, each takes its share of it, and .grad
    and stats end as the sums.
    """
    (rank, size), L, total, start = ranks(), mask.shape[1], {}, 0
    order = attention.sum(1).argsort(descending=True)[rank::size]
    longest = attention.sum(1)[order].tolist()
    parameters = [p for p in critic.model.parameters() if p.requires_grad]
    before = [p.grad for p in parameters]
    critic.model.zero_grad()
    while start < len(order):
        rows = order[start : start + max(1, token_budget // longest[start])]
        start += len(rows)
        a, m = attention[rows], mask[rows]
        l = int(m.any(0).sum())
        columns = slice(int(a.any(0).int().argmax()), a.shape[1] - L + l)
        logp = reply_logp(critic.model, tokens[rows, columns], a[:, columns], l, temperature)
        loss, stats = loss_of(logp, m[:, :l], rows)
        loss.backward()
        add_(total, stats)
    for p, earlier in zip(parameters, before):
        if size > 1:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
        if earlier is not None:
            p.grad = earlier if p.grad is None else p.grad + earlier
    stats = {}
    for part in gathered({k: (float(x), float(n)) for k, (x, n) in total.items()}):
        add_(stats, part)
    return stats


def add_(total: Stats, stats: Stats) -> None:
    """Sums and counts of a part, added to those so far."""
    for name, (x, n) in stats.items():
        have = total.get(name, (0.0, 0.0))
        total[name] = (have[0] + x, have[1] + n)


def reinforce_backward(critic: GenCritic, replies: Replies, r: Tensor, *, baseline: str = "none",
                       group: Tensor | None = None, token_budget: int = 32_768) -> Stats:
    """Adds the gradient of one REINFORCE step to .grad; r [N] in [0, 1], each state's outcome."""
    reward = torch.tensor([value_reward(x, v) for x, v in zip(r.tolist(), replies.v_hat)])
    reward = reward.to(replies.tokens.device)
    A, n = reply_advantage(reward, group, baseline=baseline), len(reward)
    stats = backward(
        critic, *replies[:3], lambda logp, mask, rows: reinforce_loss(logp, A[rows], mask, n),
        temperature=critic.temperature, token_budget=token_budget)
    return stats | {"reward": (reward.sum(), n)}


# ---------------------------------------------------------------------------- stage 1: traces


def load_traces(path: str, *, model_size: str = "", success_rate: float | None = None,
                ) -> list[tuple[State, str]]:
    """JSONL with `problem`, `partial`, `trace`, and, where ICC is used, `model_size` and
    `success_rate`; the arguments stand in for these two where a line lacks them.

    ValueError with the number of the line that lacks a key or has a trace without a score.
    """
    traces = []
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            try:
                if line.strip():
                    traces.append(_read_trace(line, model_size, success_rate))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    if not traces:
        raise ValueError(f"{path}: expected one JSON object per line, found no line with one")
    return traces


def _read_trace(line: str, model_size: str, success_rate: float | None) -> tuple[State, str]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"expected a JSON object, found broken JSON ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, found {line:.40}")
    for key in ("problem", "partial", "trace"):
        if not isinstance(row.get(key), str):
            raise ValueError(f"expected a text under the key {key}, found the keys "
                             f"{', '.join(row) or 'none'}" if key not in row else
                             f"{key}: expected a text, found {row[key]!r:.40}")
    if parse_score(row["trace"]) is None:
        raise ValueError("trace: expected an integer 0 … 10 in its last <answer> tag, found "
                         f"{row['trace'][-40:]!r}")
    rate = row.get("success_rate", success_rate)
    if rate is not None and not (isinstance(rate, (int, float)) and 0 <= rate <= 1):
        raise ValueError(f"success_rate: expected a number in [0, 1], found {rate!r:.40}")
    state = State(row["problem"], row["partial"], str(row.get("model_size", model_size)), rate)
    return state, row["trace"]


def balanced(outcome: list[int], position: list[int], n: int, rng: random.Random) -> list[int]:
    """n distinct indices with equal counts per outcome × position, in random order.

    A cell that has fewer gives all it has and the others make up for it. ValueError if n is not in
    1 … len(outcome).
    """
    if not 1 <= n <= len(outcome):
        raise ValueError(f"n: expected 1 … {len(outcome)} (states there are), found {n}")
    cells = {}
    for i, cell in enumerate(zip(outcome, position, strict=True)):
        cells.setdefault(cell, []).append(i)
    for cell in cells.values():
        rng.shuffle(cell)
    chosen = []
    while len(chosen) < n:  # one from each cell in turn
        turn = [cell.pop() for cell in cells.values() if cell]
        rng.shuffle(turn)
        chosen += turn[: n - len(chosen)]
    rng.shuffle(chosen)
    return chosen


def quarters(starts: Tensor, mask: Tensor) -> list[int]:
    """The quarter 0 … 3 of its own response in which each of the N starts lies."""
    # assumption: positions are balanced by quarters
    before = mask.long().cumsum(1) - mask.long()
    share = 4 * before // mask.long().sum(1, keepdim=True).clamp_min(1)
    return share[starts.bool()].tolist()


def write_prompts(path: str, critic: GenCritic, states: list[State], outcome: list[int],
                  position: list[int]) -> None:
    """One JSON line per state: an oracle reads `prompt` and adds its reply as `trace`."""
    with open(path + ".writing", "w", encoding="utf-8") as file:
        for state, r, quarter in zip(states, outcome, position, strict=True):
            question, prefix, size, rate = state
            prompt = critic_prompt(question, prefix, model_size=size, success_rate=rate,
                                   icc=critic.icc, template=critic.template)
            row = dict(problem=question, partial=prefix, model_size=size, success_rate=rate,
                       outcome=r, position=quarter, prompt=prompt)
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    os.replace(path + ".writing", path)


def sft(critic: GenCritic, traces: list[tuple[State, str]], *, epochs: int = 2,
        batch_size: int = 128, lr: float = 1e-5, max_norm: float = 1.0, steps: int = 0,
        token_budget: int = 32_768, shuffle: bool = True, seed: int = 0,
        progress: bool = True) -> list[dict]:
    """Stage 1, in place: epochs over the traces (or `steps` steps), one dict of means per step.

    AdamW, 3 % linear warm-up, over the last third linearly down to 0. shuffle False: in their
    order, for a curriculum.
    """
    if not traces:
        raise ValueError("traces: expected at least one (state, trace), found none")
    rng, order, log = random.Random(seed), [], []
    total = steps or epochs * math.ceil(len(traces) / batch_size)
    # assumption: optimizer and schedule of stage 1
    optimizer = torch.optim.AdamW(critic.model.parameters(), lr, weight_decay=0.01)
    critic.model.train()
    bar = tqdm(range(total), "critic, SFT", disable=not progress or ranks()[0] > 0,
               dynamic_ncols=True)
    for step in bar:
        if not order:
            order = list(range(len(traces)))
            if shuffle:
                rng.shuffle(order)
        rows, order = order[:batch_size], order[batch_size:]
        tokens, attention, mask, cut = join(critic, [traces[i] for i in rows])
        n = mask.sum()
        optimizer.param_groups[0]["lr"] = lr * ramp(step, total)
        stats = backward(critic, tokens, attention, mask,
                         lambda logp, m, _: sft_loss(logp, m, n), token_budget=token_budget)
        log.append(_means(stats | {"prompt_truncated": (cut, len(rows))})
                   | _step(critic.model, optimizer, max_norm, log))
        bar.set_postfix(loss=f"{log[-1]['loss']:.4f}")
    critic.model.eval()
    return log


def ramp(step: int, total: int) -> float:
    """3 % of the steps linearly up to 1, the last third linearly down to 0."""
    return min((step + 1) / max(1, round(0.03 * total)), 1, 3 * (1 - step / total))


def join(critic: GenCritic, traces: list[tuple[State, str]],
         ) -> tuple[Tensor, Tensor, Tensor, int]:
    """tokens [N, P+L], attention, mask [N, L] of prompts ‖ traces, and how many prompts were cut.

    A trace gets an end-of-sequence token; one longer than max_new_tokens loses its start, so that
    its score stays.
    """
    encoded = [encode_state(critic, state) for state, _ in traces]
    end, room = critic.tokenizer.eos_token_id, critic.max_new_tokens
    replies = [(critic.tokenizer(text, add_special_tokens=False).input_ids + [end])[-room:]
               for _, text in traces]
    prompts = [ids for ids, _ in encoded]
    pad = critic.tokenizer.pad_token_id
    return *padded(critic.model, pad, prompts, replies), sum(cut for _, cut in encoded)


def _step(model: nn.Module, optimizer, max_norm: float, log: list[dict]) -> dict:
    """An optimizer step; one whose gradient is not finite is skipped, five in a row are an end."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm).item()
    skipped = not math.isfinite(norm)
    if not skipped:
        optimizer.step()
    optimizer.zero_grad()
    if skipped and len(log) >= 4 and all(m["skipped_nonfinite"] for m in log[-4:]):
        raise FloatingPointError("the critic's gradient was not finite five times in a row")
    return {"grad_norm": norm, "skipped_nonfinite": skipped}


def _means(stats: Stats) -> dict[str, float]:
    return {name: float(x) / float(n) if n else math.nan for name, (x, n) in stats.items()}


# ------------------------------------------------------------------- stage 2: RL, actor frozen


def rl_pretrain(critic: GenCritic, rollouts: Callable, sampler: Callable, *, steps: int,
                lr: float = 1e-6, baseline: str = "none", max_norm: float = 1.0,
                token_budget: int = 32_768, generator: torch.Generator | None = None,
                progress: bool = True) -> list[dict]:
    """Stage 2, in place: REINFORCE on R_v, one step per batch of fresh replies; means per step.

    rollouts() -> questions (B texts), response tokens, mask, starts [B, T] and r [B] ∈ {0, 1} of
    the actor, which nobody updates. Errors as ask_states.
    """
    # assumption: AdamW; no source names the optimizer
    optimizer = torch.optim.AdamW(critic.model.parameters(), lr, weight_decay=0.0)
    log = []
    bar = tqdm(range(steps), "critic, RL", disable=not progress or ranks()[0] > 0,
               dynamic_ncols=True)
    for _ in bar:
        questions, tokens, mask, starts, r = rollouts()
        if critic.success.value is None:
            critic.success.update(r)
        _, replies, stats = ask(critic, questions, tokens, mask, starts, sampler, generator)
        rows = starts.nonzero()[:, 0]
        stats |= reinforce_backward(critic, replies, r[rows], baseline=baseline,
                                    token_budget=token_budget)
        critic.success.update(r)
        log.append(_means(stats) | _step(critic.model, optimizer, max_norm, log))
        m = log[-1]
        bar.set_postfix(R_v=f"{m['reward']:.3f}", unparsable=f"{m['unparsable']:.1%}",
                        score=f"{m['score']:.2f}")
    return log


# ------------------------------------------------------------------- oracle of the embedded task
# A program that knows what the critic is told and nothing more. It takes each step to go wrong with
# the same probability e, to one of the nine wrong digits alike, and later steps to go on from it
# (rollout.demonstration is exactly that; a trained actor only roughly). Whether the last value is
# right is then a two-state chain, and with q = 1 − 10e/9 the chance to end right, m steps left, is
#     0.1 + 0.9 q^m  if the value is right now,        0.1 − 0.1 q^m  if it is wrong

STEPS = 26  # lengths 1 … 26 are equally frequent in the task
RESPONSE, REPLY = 64, 136  # longest response and reply in tokens
SIZE, STRENGTH = "0.2M", (0.0, 0.35)  # of actors: as text; share of steps that go wrong
TOKENS = 1536  # padded ones of a forward pass: more at once are slower on a processor
CLAIMS = os.path.join("runs", "claims", "genac")


def chance(q: float, steps_left: int, right: bool) -> float:
    """Probability that the chain ends right."""
    return 0.1 + (0.9 if right else -0.1) * q**steps_left


def success_at(wrong: float) -> float:
    """Success rate, over the task's lengths, of an actor that takes this share of steps wrong."""
    return sum(chance(1 - 10 * wrong / 9, m, True) for m in range(1, STEPS + 1)) / STEPS


@functools.cache
def persistence(success_rate: float) -> float:
    """The q at which the chance, averaged over the task's lengths, is the success rate."""
    low, high = 0.0, 1.0
    for _ in range(40):
        q = (low + high) / 2
        mean = sum(chance(q, n, True) for n in range(1, STEPS + 1)) / STEPS
        low, high = (q, high) if mean < success_rate else (low, q)
    return low


def oracle_trace(question: str, prefix: str, success_rate: float) -> str:
    """`3+7@h=`, `a0b7c5`, 0.42 -> `a00=b77=c45!h0.42<answer>0</answer>`: the reasoning, step by
    easy step.

    For each step that the prefix states: its letter, the right value, the stated one beside it,
    whether they agree. Then how far it has to go, the actor's success rate, and the score.
    """
    p = oracle_chance(question, prefix, success_rate)
    checks = "".join(f"{letter}{value}{stated}{'=' if stated == value else '!'}"
                     for letter, value, stated in check_steps(question, prefix)[0])
    return f"{checks}{question[4]}{success_rate:.2f}<answer>{round(10 * p)}</answer>"


def oracle_chance(question: str, prefix: str, success_rate: float) -> float:
    """The success probability behind the oracle's score."""
    steps, left = check_steps(question, prefix)
    right = not steps or steps[-1][1] == steps[-1][2]
    return chance(persistence(round(success_rate, 2)), left, right) if left >= 0 else 0.0


def check_steps(question: str, prefix: str) -> tuple[list[tuple[str, str, str]], int]:
    """(letter, right value, stated value) up to the prefix's last letter; steps left after it."""
    start, addend, steps = int(question[0]), int(question[2]), _letter(question[4])
    stated = re.findall(r"([a-z])([^a-z])", prefix)  # a policy may write what is no digit
    done, said = _letter(stated[-1][0]) if stated else 0, dict(stated)
    return [(letter, str((start + addend * k) % 10), said.get(letter, "?"))
            for k, letter in enumerate(string.ascii_lowercase[:done], start=1)], steps - done


def _letter(letter: str) -> int:
    return ord(letter) - 96  # a -> 1


def oracle_sampler(model, prompts: list[list[int]], *, tokenizer, max_new_tokens: int,
                   temperature: float, eos_id: list[int], pad_id: int, generator=None,
                   ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The oracle in the place of a critic: reads COMPACT prompts, answers as rollout.generate."""
    replies = []
    for ids in prompts:
        prefix, icc, question = tokenizer.decode(ids).rsplit("|", 2)
        text = oracle_trace(question, prefix, float(icc.split(",")[1]))
        replies.append(tokenizer(text).input_ids + [tokenizer.eos_token_id])
    tokens, attention, mask = padded(model, pad_id, prompts, replies)
    return tokens, attention, mask, torch.zeros(mask.shape)


# --------------------------------------------------------------------------------- command line

def demo(args) -> None:
    """One response with an error in it, as the critic sees it at each segment: the oracle program,
    or one of the embedded task that --critic names."""
    import rollout
    from gae import gae

    tokenizer = rollout.task_tokenizer()
    success = RunningSuccess()
    for rate in (0.30, 0.42, 0.47):
        success.update(rate)
    critic = GenCritic(nn.Linear(1, 1), tokenizer, [tokenizer.eos_token_id], success, SIZE,
                       COMPACT, context=256, max_new_tokens=REPLY)
    sampler, who = functools.partial(oracle_sampler, tokenizer=tokenizer), "the oracle program"
    if args.critic:
        critic, sampler, who = task_critic(args.critic), rollout.generate, args.critic
        critic.success = success
    question, text, answer = "3+7@j=", "a0b7c4d2e9f6g3h0i7j4", "j3"
    tokens = torch.tensor([tokenizer(text + "$").input_ids])
    mask = torch.ones_like(tokens, dtype=torch.bool)
    starts = segment_starts(mask, width=math.ceil(RESPONSE / 16))
    value, replies, stats = ask(critic, [question], tokens, mask, starts, sampler,
                                torch.Generator().manual_seed(args.seed))
    R = torch.tensor([rollout.chain_reward(text, answer)])
    A = gae(value, R, mask, 1.0)
    A_half = spread(gae(value, R, starts, 0.5), starts, mask)
    r = (R.item() + 1) / 2
    print(f"{question} asks for {answer}; the response {text} says {text[-2:]}: r = {r:.0f}, "
          f"R = {R.item():+.0f}.\nThe actor: {SIZE} parameters, running success rate "
          f"{success.value:.2f}.\n\nWhat a real model is asked at the fourth segment:\n")
    prompt = critic_prompt(question, text[:12], model_size=SIZE, success_rate=success.value)
    print("  | " + prompt.replace("\n", "\n  | "))
    print(f"\nWhat a critic of the embedded task is asked, and what {who} replies:\n")
    wide = 1 + max(map(len, replies.texts))
    print(f"{'prompt':38}{'reply':{wide}}{'v̂':>5}{'V':>6}{'R_v':>6}  {'segment':9}"
          f"{'Â λ=1':>6}{'Â λ=½':>7}")
    where = starts[0].nonzero()[:, 0].tolist()
    stops = [*where[1:], len(text) + 1]
    for t, stop, reply, v in zip(where, stops, replies.texts, replies.v_hat):
        prompt, _ = encode_state(critic, State(question, text[:t], SIZE, success.value))
        score = "–" if v is None else v
        print(f"{tokenizer.decode(prompt):38}{reply:{wide}}{score:>5}{value[0, t]:+6.1f}"
              f"{value_reward(r, v):6.2f}  {(text + '$')[t:stop]:8}{A[0, t]:+7.2f}"
              f"{A_half[0, t]:+7.2f}")
    print("\nThe step d2 should be d1. With λ = 1 a segment gets R − V(its start): once the error\n"
          "is seen nothing is expected, so nothing is blamed. With λ = ½ between the segments\n"
          "more of the blame falls where V drops. Inside a segment λ is 1: equal advantages.\n")
    for bad in ("<answer>11</answer>", "<answer>seven</answer>", "7"):
        v = parse_score(bad)
        print(f"{bad!r:26} -> v̂ = {v}, R_v = {value_reward(r, v):.0f}")


def task_states(n: int, seed: int, problems: list, strength: tuple[float, float] = STRENGTH,
                ) -> list[State]:
    """n states of noisy actors, balanced over outcome and position; an actor's steps go wrong
    with a probability out of the range `strength`, and it is known by its success rate."""
    import rollout

    rng, states, outcome, position = random.Random(seed), [], [], []
    while len(states) < 2 * n:
        e, problem = rng.uniform(*strength), rng.choice(problems)
        text = rollout.demonstration(problem.prompt, e, rng)
        r = int(rollout.chain_reward(text[:-1], problem.answer) > 0)
        for t in range(0, len(text), math.ceil(RESPONSE / 16)):
            states.append(State(problem.prompt, text[:t], SIZE, success_at(e)))
            outcome.append(r)
            position.append(4 * t // len(text))
    return [states[i] for i in balanced(outcome, position, n, rng)]


def noisy_rollouts(critic: GenCritic, problems: list, strength: tuple[float, float], n: int,
                   seed: int) -> Callable:
    """rollouts() for rl_pretrain: each time n responses of another noisy actor."""
    import rollout

    rng = random.Random(seed)

    def rollouts() -> tuple[list[str], Tensor, Tensor, Tensor, Tensor]:
        """Questions, tokens, mask, starts and r of one actor's responses."""
        e, chosen = rng.uniform(*strength), rng.choices(problems, k=n)
        critic.success.value = success_at(e)
        texts = [rollout.demonstration(p.prompt, e, rng) for p in chosen]
        r = [rollout.chain_reward(t[:-1], p.answer) > 0 for t, p in zip(texts, chosen)]
        tokens, _, mask = padded(critic.model, critic.tokenizer.pad_token_id, [[]] * n,
                                 critic.tokenizer(texts).input_ids)
        starts = segment_starts(mask, width=math.ceil(RESPONSE / 16))
        return [p.prompt for p in chosen], tokens, mask, starts, torch.tensor(r).float()

    return rollouts


def respond(actor: GenCritic, problems: list, *, limit: int, verifier: str, instruction: str = "",
            ends: list[int] | None = None, generator: torch.Generator | None = None,
            ) -> tuple[list[str], Tensor, Tensor, Tensor, Tensor]:
    """Questions, response tokens, mask, starts and r of an actor's responses to the problems;
    under torchrun each rank samples its share and all have the whole. ends: delimiter ids."""
    import rollout

    rank, size = ranks()
    share = torch.arange(len(problems))[rank::size]
    batch = rollout.collect(
        actor.model, actor.tokenizer,
        [rollout.encode_prompt(actor.tokenizer, problems[i], instruction=instruction)
         for i in share], [problems[i].answer for i in share], share, rollout.VERIFIERS[verifier],
        eos_id=actor.eos_id, max_new_tokens=limit, generator=own_draws(generator))
    mine = zip(batch.prompt_id.tolist(), batch.tokens[:, -batch.mask.shape[1] :].cpu(),
               batch.mask.cpu(), batch.reward.tolist())
    rows = sorted(sum(gathered([(i, row[m].tolist(), r) for i, row, m, r in mine]), []))
    tokens, _, mask = padded(actor.model, actor.tokenizer.pad_token_id, [[]] * len(rows),
                             [row for _, row, _ in rows])
    starts = segment_starts(mask, None if ends is None else ends_by_delimiter(tokens, ends),
                            width=math.ceil(limit / 16))
    texts = [p.prompt if isinstance(p.prompt, str) else p.prompt[-1]["content"] for p in problems]
    return texts, tokens, mask, starts, torch.tensor([float(r > 0) for _, _, r in rows])


def true_success(actor: nn.Module, tokenizer, states: list[State], k: int, sampler: Callable,
                 verifier: Callable, answers: list[str], limit: int, generator) -> Tensor:
    """Share of k continuations of each state that end right, [N]: the truth, by Monte Carlo."""
    prompts = [tokenizer(s.question + s.prefix).input_ids for s in states for _ in range(k)]
    tokens, _, mask, _ = sampler(
        actor, prompts, max_new_tokens=limit, eos_id=[tokenizer.eos_token_id],
        pad_id=tokenizer.pad_token_id, generator=generator)
    replies = tokens[:, -mask.shape[1] :]
    right = []
    for i, (row, m) in enumerate(zip(replies, mask)):
        text = states[i // k].prefix + tokenizer.decode(row[m], skip_special_tokens=True)
        ended = row[m][-1] == tokenizer.eos_token_id
        right.append(bool(ended) and verifier(text, answers[i // k]) > 0)
    return torch.tensor(right).float().view(-1, k).mean(1)


def squared_error(v_hat: list[float | None], p: Tensor, k: int, fallback: float) -> float:
    """Mean (v̂ − p)², p from k continuations each: the p(1 − p)/k that they add is taken off."""
    v = torch.tensor([fallback if x is None else x for x in v_hat])
    return ((v - p).square() - p * (1 - p) / (k - 1)).mean().item()


def task_critic(folder: str, device: str = "cpu", *, icc: bool = True, layers: int = 4,
                ) -> GenCritic:
    """An untrained critic of the embedded task: the first layers of the actor in the folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, num_hidden_layers=layers)
    return GenCritic(model.eval().to(device), tokenizer, [tokenizer.eos_token_id],
                     RunningSuccess(), SIZE, COMPACT, icc, 256, REPLY)


def up_to(longest: int, problems: list) -> list:
    """The problems of at most so many steps."""
    return [p for p in problems if _letter(p.prompt[4]) <= longest]


def guessed_states(n: int, seed: int, problems: list,
                   strength: tuple[float, float] = STRENGTH) -> list[State]:
    """n states whose every value is right or a random digit by a coin: practice in checking.

    A noisy actor's first error makes the rest wrong too, so a verdict copies the one before it and
    a stated value is mostly the right one. Here neither helps: copying and comparing are learned.
    """
    rng, states = random.Random(seed), []
    for _ in range(n):
        problem = rng.choice(problems)
        full = check_steps(problem.prompt, f"{problem.prompt[4]}?")[0]
        prefix = "".join(letter + (value if rng.random() < 0.5 else rng.choice(string.digits))
                         for letter, value, _ in full[: rng.randint(1, len(full))])
        states.append(State(problem.prompt, prefix, SIZE, success_at(rng.uniform(*strength))))
    return states


def task_sft(critic: GenCritic, problems: list, args, strength: tuple[float, float], seed: int,
             ) -> list[dict]:
    """Stage 1 on the oracle's traces: first of guesses, then of noisy actors' states."""
    guesses, steps = args.sft_steps
    states = (guessed_states(guesses * args.sft_batch, seed, problems, strength)
              + task_states(steps * args.sft_batch, seed, problems, strength))
    if not critic.icc:  # an oracle that is not told takes the average actor
        rate = sum(s.success_rate for s in states) / len(states)
        states = [s._replace(success_rate=rate) for s in states]
    traces = [(s, oracle_trace(s.question, s.prefix, s.success_rate)) for s in states]
    return sft(critic, traces, epochs=1, batch_size=args.sft_batch, lr=args.sft_lr,
               token_budget=TOKENS, shuffle=False, seed=seed, progress=args.progress)


def train_task(args) -> None:
    """Stages 1 and 2 on the embedded task, the critic started from its actor, against the truth."""
    import rollout
    from train import first_rank_builds

    folder = first_rank_builds(*ranks())
    actor, critic = task_critic(folder, args.device), task_critic(folder, args.device,
                                                                  icc=not args.no_icc)
    rng, sampler = torch.Generator(args.device).manual_seed(args.seed), rollout.generate
    say = print if ranks()[0] == 0 else lambda *a, **k: None
    ask_actor = lambda problems: respond(
        actor, problems, limit=RESPONSE, verifier="chain", generator=rng)
    problems, held_out = rollout.task_problems(), rollout.task_problems(held_out=True)
    questions, tokens, _, starts, r = ask_actor(held_out)
    rate = critic.success.update(r)
    states = states_at(critic, questions, tokens, starts)
    answers = [held_out[b].answer for b in starts.nonzero()[:, 0].tolist()]
    chosen = random.Random(args.seed).sample(range(len(states)), min(args.truth, len(states)))
    states, answers = [states[i] for i in chosen], [answers[i] for i in chosen]
    p = true_success(actor.model, actor.tokenizer, states, args.k, sampler, rollout.chain_reward,
                     answers, RESPONSE, rng)
    noisy = task_states(len(states), args.seed + 1, held_out)
    true = torch.tensor([oracle_chance(s.question, s.prefix, s.success_rate) for s in noisy])
    say(f"the actor is right on {rate:.2f} of the held-out problems; {len(states)} states of its "
        f"responses, {args.k} continuations each: mean p {p.mean():.3f}\n\n"
        f"{'mean (v̂ − p)², unseen problems':42}{'noisy steps':>13}{'the actor':>11}"
        f"{'unparsable':>12}{'seconds':>9}")

    def line(name: str, v_noisy: list, v_actor: list, seconds: float = 0.0) -> None:
        """A row of the table: the errors of scores of both kinds of states."""
        e = ((torch.tensor([rate if x is None else x for x in v_noisy]) - true) ** 2).mean()
        silent = [x is None for x in v_noisy + v_actor]
        say(f"{name:42}{e:13.4f}{squared_error(v_actor, p, args.k, rate):11.4f}"
            f"{sum(silent) / len(silent):12.1%}{seconds:9.0f}", flush=True)

    def report(name: str, since: float) -> None:
        """A row for the critic as it is now."""
        seconds, critic.silent = time.perf_counter() - since, -1  # no reason to stop here
        replies, _ = ask_states(critic, noisy + states, sampler, rng)
        line(name, replies.v_hat[: len(noisy)], replies.v_hat[len(noisy) :], seconds)

    line("always the mean of p", [true.mean().item()] * len(p), [p.mean().item()] * len(p))
    line("the oracle program", [round(10 * x) / 10 for x in true.tolist()],
         [parse_score(oracle_trace(s.question, s.prefix, rate)) for s in states])
    report("critic, untrained (the actor's weights)", time.perf_counter())
    start = time.perf_counter()
    task_sft(critic, problems, args, STRENGTH, args.seed)
    report(f"critic after SFT, {args.sft_steps} steps of {args.sft_batch}", start)
    save(critic, args.out and os.path.join(args.out, "sft"))
    start, pick = time.perf_counter(), random.Random(args.seed)
    log = rl_pretrain(critic, lambda: ask_actor(pick.choices(problems, k=args.batch)), sampler,
                      steps=args.steps, lr=args.lr, baseline=args.baseline, token_budget=TOKENS,
                      generator=rng, progress=args.progress)
    report(f"critic after RL, {args.steps} steps, {args.baseline}", start)
    save(critic, args.out and os.path.join(args.out, "rl"))
    if log:
        mean = lambda part, name: sum(m[name] for m in part) / len(part)
        first, last = mean(log[:5], "reward"), mean(log[-5:], "reward")
        say(f"\nRL: R_v {first:.3f} → {last:.3f} (first and last 5 steps), unparsable "
            f"{mean(log, 'unparsable'):.2%}")
    replies, _ = ask_states(critic, states[:4], sampler, rng)
    for state, reply, truth in zip(states, replies.texts, p):
        say(f"{state.prefix or '·'} | {state.question} -> {reply}   true p {truth:.2f}")


# -------------------------------------------------------------------------------------- claims
# GenAC's claims about critics, on the embedded task with noisy actors, whose true p is known in
# closed form. Both kinds start from the actor's weights, read the same states as the same text, and
# learn in the same number of updates from the same labels: the oracle's scores (the generative one:
# its traces), then outcomes. The value head reads the last token. Training: chains of at most NEAR
# steps, actors with 5 to 35 % wrong steps, 90 of the 100 pairs of operands.

NEAR, SEEN = 16, (0.05, 0.35)
POOLS = (2, 4, 8, 16)
GENERATIVE = {  # name: layers, ICC
    "generative": (4, True), "generative, no ICC": (4, False), "generative, 2 layers": (2, True)}
DISCRIMINATIVE = {  # name: layers, times as many updates; three times take longer than replies do
    "discriminative": (4, 1), "discriminative, 2 layers": (2, 1),
    "discriminative, 3 × as long": (4, 3)}
SIDES = ("genac", "ppo", "grpo", "vine-ppo")


def claim_sets(n: int, seed: int) -> tuple[list, dict[str, list[State]], list[list[State]]]:
    """Problems to train on; states by test set; pools of POOLS[-1] partial responses to a problem,
    cut at the same step: the first is right so far and the others are not."""
    import rollout

    train, test = rollout.task_problems(), rollout.task_problems(held_out=True)
    held = lambda p: (int(p.prompt[0]) + 3 * int(p.prompt[2])) % 10 == 7  # 10 pairs, all digits
    near = up_to(NEAR, [p for p in test if not held(p)])
    far = [p for p in test if not held(p) and _letter(p.prompt[4]) > NEAR]
    sets = {"in distribution": (near, SEEN), "longer chains": (far, SEEN),
            "stronger actors": (near, (0.0, 0.04)),
            "unseen operands": (up_to(NEAR, [p for p in train + test if held(p)]), SEEN)}
    states = {name: task_states(n, seed, *how) for name, how in sets.items()}
    rng, pools = random.Random(seed), []
    while len(pools) < n // 4:
        problem, e = rng.choice(near), rng.uniform(0.1, SEEN[1])
        cut = 2 * rng.randint(1, _letter(problem.prompt[4]))
        both = {True: [], False: []}
        for _ in range(100):
            text = rollout.demonstration(problem.prompt, e, rng)[:cut]
            _, value, stated = check_steps(problem.prompt, text)[0][-1]
            both[value == stated].append(State(problem.prompt, text, SIZE, success_at(e)))
        if both[True] and len(both[False]) >= POOLS[-1] - 1:
            pools.append(both[True][:1] + both[False][: POOLS[-1] - 1])
    return up_to(NEAR, [p for p in train if not held(p)]), states, pools


def measure(score: Callable, states: dict[str, list[State]], pools: list[list[State]]) -> dict:
    """Mean (v̂ − p)² by set, and how often the one right candidate of a pool has the top score."""
    found = {}
    for name, of_set in states.items():
        p = torch.tensor([oracle_chance(s.question, s.prefix, s.success_rate) for s in of_set])
        found[name] = (torch.tensor(score(of_set)) - p).square().mean().item()
    v = torch.tensor(score([s for pool in pools for s in pool])).view(len(pools), -1)
    for m in POOLS:  # of equal top scores one is taken at random: its expectation
        top = v[:, :m] == v[:, :m].amax(1, keepdim=True)
        found[f"top-1 of {m}"] = (top[:, 0] / top.sum(1)).mean().item()
    return found


def last_value(critic: nn.Module, asked: GenCritic, states: list[State]) -> Tensor:
    """V [N] of a discriminative critic at the last token of the text that `asked` would get."""
    prompts = [encode_state(asked, state)[0] for state in states]
    tokens, attention, _ = padded(critic, asked.tokenizer.pad_token_id, prompts, [[]] * len(states))
    return critic(tokens, attention)[:, -1]


def claim_generative(args, folder: str, layers: int, icc: bool, data: tuple, seed: int) -> dict:
    """A generative critic untrained, after SFT and after RL: what measure finds."""
    import rollout

    problems, states, pools = data
    critic = task_critic(folder, icc=icc, layers=layers)
    rng, found = torch.Generator().manual_seed(seed), {}

    def score(of_set: list[State]) -> list[float]:
        """v̂ of the states, the success rate where a reply has none."""
        critic.silent = -1
        replies, stats = ask_states(critic, of_set, rollout.generate, rng)
        silent.append(stats["unparsable"])
        return [s.success_rate if v is None else v for s, v in zip(of_set, replies.v_hat)]

    for stage in ("untrained", "SFT", "SFT + RL"):
        start, silent = time.perf_counter(), []
        if stage == "SFT":
            task_sft(critic, problems, args, SEEN, seed)
        elif stage == "SFT + RL":
            rl_pretrain(critic, noisy_rollouts(critic, problems, SEEN, args.batch, seed),
                        rollout.generate, steps=args.steps, lr=args.lr, baseline=args.baseline,
                        generator=rng, token_budget=TOKENS, progress=False)
        seconds = time.perf_counter() - start
        found[stage] = measure(score, states, pools) | {"seconds": seconds}
        found[stage]["unparsable"] = sum(x for x, _ in silent) / sum(n for _, n in silent)
    return found


def claim_discriminative(args, folder: str, layers: int, times: int, data: tuple, seed: int,
                         ) -> dict:
    """The same of a value head on such states, in `times` as many updates."""
    from critic import Critic, value_loss
    from transformers import AutoModel

    problems, states, pools = data
    asked = task_critic(folder, layers=layers)
    torch.manual_seed(seed)  # the head's weights
    critic = Critic(AutoModel.from_pretrained(folder, num_hidden_layers=layers))
    found, n = {}, args.sft_batch

    def score(of_set: list[State]) -> list[float]:
        """v̂ = (V + 1)/2 of the states."""
        with torch.no_grad():
            return ((last_value(critic, asked, of_set) + 1) / 2).clamp(0, 1).tolist()

    def update(of_set: list[State], target: Tensor, lr: float) -> None:
        """One step on ½ (V − target)²."""
        optimizer.param_groups[0]["lr"] = lr
        value_loss(last_value(critic, asked, of_set)[:, None], target[:, None],
                   torch.ones(len(of_set), 1))[0].backward()
        _step(critic, optimizer, 10.0, [])

    for stage in ("untrained", "SFT", "SFT + RL"):
        start, optimizer = time.perf_counter(), torch.optim.AdamW(critic.parameters())
        if stage == "SFT":
            guesses, total = times * args.sft_steps[0], times * sum(args.sft_steps)
            traced = (guessed_states(guesses * n, seed, problems, SEEN)
                      + task_states((total - guesses) * n, seed, problems, SEEN))
            for step in range(total):
                rows = traced[step * n : (step + 1) * n]
                p = [oracle_chance(s.question, s.prefix, s.success_rate) for s in rows]
                update(rows, 2 * (torch.tensor(p) * 10).round() / 10 - 1,
                       args.value_lr * ramp(step, total))
        elif stage == "SFT + RL":
            rollouts = noisy_rollouts(asked, problems, SEEN, args.batch, seed)
            for _ in range(times * args.steps):
                questions, tokens, mask, starts, r = rollouts()
                update(states_at(asked, questions, tokens, starts),
                       2 * r[starts.nonzero()[:, 0]] - 1, args.lr)
        seconds = time.perf_counter() - start
        found[stage] = measure(score, states, pools) | {"seconds": seconds}
    return found


def claim_file(name: str, seed: int) -> str:
    """Where the figures of a critic are kept: what is there is not measured again."""
    return os.path.join(CLAIMS, f"{name}, seed {seed}.json")


def claim_critic(args, name: str, seed: int) -> None:
    """A row of GENERATIVE or DISCRIMINATIVE through all stages, to its file."""
    from train import build_base, write_json

    torch.set_num_threads(1)
    if not os.path.isfile(claim_file(name, seed)):
        folder, data = build_base(), claim_sets(args.n, 1000 + seed)
        write_json(claim_file(name, seed), (
            claim_generative(args, folder, *GENERATIVE[name], data, seed) if name in GENERATIVE
            else claim_discriminative(args, folder, *DISCRIMINATIVE[name], data, seed)))
    print(f"{name}, seed {seed}", flush=True)


def rl_critic(args) -> None:
    """The critic for claim_rl, in CLAIMS/critic, with train_task's table beside it. Its chains are
    of all lengths, and stage 1 is longer in proportion."""
    torch.set_num_threads(1)
    path = os.path.join(CLAIMS, "critic")
    if not os.path.isfile(os.path.join(path, "rl", "config.json")):
        steps = [x * STEPS // NEAR for x in args.sft_steps]
        with open(path + ".txt", "w") as file, contextlib.redirect_stdout(file):
            train_task(argparse.Namespace(**vars(args) | {"out": path, "sft_steps": steps}))
    print("the critic for RL", flush=True)


def claims(args) -> None:
    """GenAC's claims re-measured: tables, and runs/claims/genac.json."""
    from torch import multiprocessing
    from train import build_base, write_json

    build_base()
    os.makedirs(CLAIMS, exist_ok=True)
    args.progress, seeds, names = False, range(args.seeds), [*GENERATIVE, *DISCRIMINATIVE]
    with multiprocessing.get_context("spawn").Pool(2) as pool:  # one thread each, longest first
        jobs = [pool.apply_async(rl_critic, (args,)), *(pool.apply_async(
            claim_critic, (args, name, seed)) for name in names for seed in seeds)]
        for job in tqdm(jobs, "critics", dynamic_ncols=True):
            job.get()
    critics = {}
    for name, seed in ((name, seed) for name in names for seed in seeds):
        with open(claim_file(name, seed)) as file:
            critics.setdefault(name, []).append(json.load(file))
    print_critics(critics)
    write_json(CLAIMS + ".json", {"critics": critics, "rl": claim_rl(args)})
    print(f"\nall figures in {CLAIMS}.json")


def print_critics(critics: dict[str, list[dict]]) -> None:
    """Error by set, and top-1 accuracy by pool size, of each critic and stage: mean ± sd."""
    from train import spread as over_seeds

    columns = [c for c in critics["generative"][0]["SFT"] if c != "unparsable"]
    tables = {"mean (v̂ − p)²; seconds of training": [c for c in columns if "top-1" not in c],
              "top-1 (chance: 1/2, 1/4, 1/8, 1/16)": [c for c in columns if "top-1" in c]}
    for title, names in tables.items():
        print(f"\n{title:40}" + "".join(f"{name:>18}" for name in names))
        for model, seeds in critics.items():
            for stage in seeds[0]:
                cells = [over_seeds([s[stage][name] for s in seeds]) for name in names]
                print(f"{model + ', ' + stage:40}" + "".join(f"{cell:>18}" for cell in cells))


def claim_rl(args) -> dict:
    """PPO, GRPO and VinePPO beside GenAC: success after equal actor updates, and again with as
    many updates as fit into GenAC's time."""
    from train import run_all, spread as over_seeds, success

    folder = os.path.join(CLAIMS, "rl")
    size = ["--rollout-batch", "64", "--token-budget", str(TOKENS)]
    critic = ["--critic", os.path.join(CLAIMS, "critic", "rl"), "--critic-lr", "1e-5"]
    flags = lambda method, seed, steps: [
        "--method", method, "--seed", str(seed), "--steps", str(steps), *size,
        *(critic if method == "genac" else [])]
    seeds = range(args.seeds)
    done = run_all({f"{m}-{s}": flags(m, s, args.rl_steps) for m in SIDES for s in seeds}, folder)
    seconds = {m: statistics.median(  # of a step; the first is left out, it warms up
        sum(x for name, x in row.items() if name.startswith("time/"))
        for s in seeds for row in done[f"{m}-{s}"]["metrics"][1:] if "rollout/success" in row)
        for m in SIDES}
    fit = {m: round(args.rl_steps * seconds["genac"] / seconds[m]) for m in SIDES[1:]}
    long = run_all({f"{m}-{s}-long": flags(m, s, fit[m]) for m in fit for s in seeds}, folder)
    found = {}
    print(f"\n{'RL, ' + str(args.rl_steps) + ' steps of 64':24}{'seconds a step':>16}"
          f"{'÷ PPO':>8}{'equal updates':>18}{'equal time':>18}{'its steps':>11}")
    for m in SIDES:
        equal = [success(done[f"{m}-{s}"]) for s in seeds]
        timed = [success(long[f"{m}-{s}-long"]) for s in seeds] if m in fit else equal
        found[m] = {"seconds": seconds[m], "equal_updates": equal, "equal_time": timed,
                    "steps": fit.get(m, args.rl_steps)}
        print(f"{m:24}{seconds[m]:16.2f}{seconds[m] / seconds['ppo']:8.2f}"
              f"{over_seeds(equal):>18}{over_seeds(timed):>18}{found[m]['steps']:11}")
    return found


def real_critic(args, folder: str) -> GenCritic:
    """A critic for real models from a Hugging Face folder, asked in English."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, args.dtype))
    model.eval().to(args.device)
    named = model.generation_config.eos_token_id
    eos = {tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])} - {None}
    return GenCritic(model, tokenizer, sorted(eos), RunningSuccess(), args.model_size, ENGLISH,
                     not args.no_icc, args.context, args.max_reply)


def real_rollouts(args, actor: GenCritic, rng: torch.Generator) -> Callable:
    """rollouts() -> questions, response tokens, mask, starts, r of the frozen actor's responses."""
    import rollout

    problems, pick = rollout.load_problems(args.data), random.Random(args.seed)
    ends = delimiter_ids(actor.tokenizer, args.delimiter.encode().decode("unicode_escape"))
    return lambda: respond(
        actor, pick.choices(problems, k=args.batch), limit=args.max_response,
        verifier=args.verifier, instruction=args.instruction, ends=ends, generator=rng)


def write_prompts_command(args) -> None:
    """States of the actor's responses, balanced over outcome and position, as JSONL of prompts."""
    critic, rng = real_critic(args, args.actor), torch.Generator(args.device).manual_seed(args.seed)
    rollouts = real_rollouts(args, critic, rng)
    states, outcome, position = [], [], []
    while len(states) < 2 * args.n:  # twice as many as asked for, so that there is a choice
        questions, tokens, mask, starts, r = rollouts()
        critic.success.update(r)
        states += states_at(critic, questions, tokens, starts)
        outcome += r[starts.nonzero()[:, 0]].int().tolist()
        position += quarters(starts, mask)
    chosen = balanced(outcome, position, args.n, random.Random(args.seed))
    write_prompts(args.write_prompts, critic, *([x[i] for i in chosen]
                                                for x in (states, outcome, position)))
    print(f"{args.n} prompts in {args.write_prompts} (share right "
          f"{sum(outcome[i] for i in chosen) / args.n:.2f}); put each one's reply under `trace`")


def sft_command(args: argparse.Namespace) -> None:
    """Stage 1 on a JSONL of traces."""
    critic = real_critic(args, args.critic)
    traces = load_traces(args.sft, model_size=args.model_size, success_rate=args.success_rate)
    log = sft(critic, traces, batch_size=args.batch, lr=args.lr, steps=args.steps or 0,
              seed=args.seed)
    save(critic, args.out)
    cut = sum(m["prompt_truncated"] for m in log) / len(log)
    if ranks()[0] == 0:
        print(f"loss {log[0]['loss']:.3f} → {log[-1]['loss']:.3f} in {len(log)} steps, {cut:.1%} "
              f"of the prompts cut; critic in {args.out}")


def rl_command(args: argparse.Namespace) -> None:
    """Stage 2 on the frozen actor's responses to a JSONL of problems."""
    import rollout

    critic, actor = real_critic(args, args.critic), real_critic(args, args.actor)
    rng = torch.Generator(args.device).manual_seed(args.seed)
    log = rl_pretrain(critic, real_rollouts(args, actor, rng), rollout.generate,
                      steps=args.steps or 100, lr=args.lr, baseline=args.baseline, generator=rng)
    save(critic, args.out)
    if ranks()[0] == 0:
        print(f"R_v {log[0]['reward']:.3f} → {log[-1]['reward']:.3f} in {len(log)} steps, "
              f"unparsable {log[0]['unparsable']:.1%} → {log[-1]['unparsable']:.1%}; critic in "
              f"{args.out}")


def save(critic: GenCritic, folder: str) -> None:
    """Model and tokenizer as a Hugging Face folder, by one rank; nothing for an empty name."""
    if folder and ranks()[0] == 0:
        critic.model.save_pretrained(folder)
        critic.tokenizer.save_pretrained(folder)


def join_ranks(args) -> None:
    """The process group that torchrun has laid out, if it has, and this rank's device."""
    if "RANK" in os.environ:
        cuda = args.device == "cuda"
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")


def main() -> None:
    """The demo, or the stage that a flag names."""
    parser = argparse.ArgumentParser(description="generative critic: demo, or one of its stages")
    add = parser.add_argument
    add("--train", action="store_true", help="stages 1 and 2 on the embedded task")
    add("--claims", action="store_true", help="GenAC's claims re-measured on the embedded task")
    add("--write-prompts", metavar="FILE", help="JSONL of prompts for an oracle of your own")
    add("--sft", metavar="FILE", help="stage 1 on a JSONL of traces")
    add("--rl", action="store_true", help="stage 2")
    add("--critic", metavar="DIR", help="model to start the critic from; alone: shown as it is")
    add("--actor", metavar="DIR", help="model whose responses are judged")
    add("--data", metavar="FILE", help="JSONL of problems")
    add("--out", metavar="DIR", default="", help="where the critic goes")
    add("--steps", type=int, help="steps [--train, --claims: 16, --sft: 2 epochs, --rl: 100]")
    add("--batch", type=int, default=64, help="traces, or responses, per step")
    add("--lr", type=float, help="[--train, --claims: 1e-4 of RL, else 1e-6]")
    add("--baseline", default="none", choices=("none", "mean", "leave-one-out"))
    add("--no-icc", action="store_true", help="leave the actor's size and success rate out")
    add("--model-size", default="unknown", help="the actor's, as text")
    add("--success-rate", type=float, help="the actor's, where traces do not say")
    add("--context", type=int, default=4096, help="of the critic, prompt and reply together")
    add("--max-reply", type=int, default=1024, help="longest reply in tokens")
    add("--max-response", type=int, default=3072, help="longest response of the actor in tokens")
    add("--delimiter", default=r"\n", help="a segment may end after a token with it")
    add("--instruction", default=r"Please reason step by step, and put your final answer within "
        r"\boxed{}.", help="added to each problem")
    add("--verifier", default="boxed", help="of responses: boxed, number, math_verify or chain")
    add("--n", type=int, help="prompts to write [512], or states of a test set of --claims [240]")
    add("--sft-steps", type=int, nargs=2, metavar="N", help="on guesses, then on noisy actors' "
        "states [--train: 700 700, --claims, whose chains are shorter: 400 400]")
    add("--sft-batch", type=int, default=24, help="of --train and --claims")
    add("--sft-lr", type=float, default=3e-3, help="of --train and --claims")
    add("--value-lr", type=float, default=3e-4, help="of --claims: of the discriminative critic")
    add("--seeds", type=int, default=3, help="of --claims")
    add("--rl-steps", type=int, default=14, help="of --claims: of the actor")
    add("--truth", type=int, default=400, help="states whose true value --train measures")
    add("--k", type=int, default=64, help="continuations per such state")
    add("--dtype", default="float32", choices=("float32", "bfloat16"))
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    needs = {"write_prompts": "actor data", "sft": "critic out", "rl": "critic actor data out"}
    for flag, names in needs.items():
        missing = [x for x in names.split() if getattr(args, flag) and not getattr(args, x)]
        if missing:
            parser.error(f"--{flag.replace('_', '-')} needs --{missing[0]}")
    torch.manual_seed(args.seed)
    embedded, args.progress = args.train or args.claims, True
    if embedded and args.steps is None:
        args.steps = 16
    args.lr = args.lr or (1e-4 if embedded else 1e-6)
    args.sft_steps = args.sft_steps or ([400, 400] if args.claims else [700, 700])
    args.n = args.n or (240 if args.claims else 512)
    command = (train_task if args.train else claims if args.claims else
               write_prompts_command if args.write_prompts else
               sft_command if args.sft else rl_command if args.rl else demo)
    try:
        join_ranks(args)
        command(args)
    except (ValueError, RuntimeError, OSError, FloatingPointError) as error:
        raise SystemExit(f"error: {error}") from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
