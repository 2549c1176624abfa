r"""GenAC: a critic that reasons in text and ends in a score.

    v̂ = score / 10,  score ∈ {0, …, 10} inside <answer> tags   no such score: v̂ = None
    R_v = 1 − (r − v̂)²,  r ∈ {0, 1} the observed outcome        no such score: R_v = 0
    V(s) = 2v̂ − 1                                               the scale of gae: r = 1 is R = +1

Source: GenAC (arXiv 2604.10701), method and its three stages: (1) supervised fine-tuning (SFT) on
an oracle's reasoning traces, (2) REINFORCE on R_v with the actor frozen, (3) PPO: the critic's
scores give the actor's values, and the critic keeps learning from R_v. R_v is a proper score: its
mean over r ~ Bernoulli(p) is largest at v̂ = p. In-context conditioning (ICC): a value belongs to a
policy, so the prompt names the actor's size and the running average of its success.

    B responses of T tokens, N states (prefixes at which the critic is asked), L reply tokens
    starts [B, T] bool   True where a segment starts; its N true entries, row by row, are the states
    value  [B, T] float  2v̂ − 1 of the token's segment; 0 where mask is False
    tokens [N, P+L], attention [N, P+L], mask [N, L]   critic prompts (padded left) ‖ replies

Differs from the paper:
    - The paper does not publish which states are scored. Here: the starts of at most 16 segments.
    - A reply without a score gives R_v = 0, and its state takes the running success rate as v̂.
    - The running success never contains the batch that is judged: the caller updates it afterwards.
      Before the first update the prompt shows no facts about the actor.
    - A prompt that is too long loses the start of the response.
    - REINFORCE has no baseline in the paper; "mean" and "leave-one-out" are offered as well.
    - Stage 2 is no function of its own: it is stage 3 with a frozen actor.
    - The oracle of stage 1, GPT-5 in the paper, is whatever writes the `trace` of a JSONL line.
    - COMPACT is a second prompt, for models so small that they only know the embedded task.

Left out: the sampler (a callable with the signature of rollout.generate), the actor's update and
the loop over stages (train.py), a cache shared by the states of one response, and sharding: under
torchrun every rank holds the whole critic and the same states, and differentiates its share.

    python genac.py [--critic DIR]                       a wrong response: prompt, reply, R_v, V, Â
    python train.py --method genac --write-prompts FILE  prompts for an oracle; then --traces FILE
    python train.py --method genac --freeze-actor        stage 2; without that flag stage 3
"""

import argparse
import json
import math
import os
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

Stats = dict[str, tuple[Tensor | float, Tensor | float]]  # name -> (sum, count)
Tokenizer = Any  # a Hugging Face tokenizer; this file works without transformers


# ---- prompt --------------------------------------------------------------------------------------
# The order of thought is the paper's: difficulty, the actor's ability, progress, chance. The words
# are ours.

class Template(NamedTuple):
    """The text of a prompt, with fields in braces.

    text must hold {question}, {prefix} and {icc}; icc must hold {model_size} and {success_rate}.
    ability is the instruction to judge the actor's ability: it stands at {ability} in text. Without
    ICC both `icc` and `ability` are left out.
    """

    text: str
    icc: str
    ability: str = ""


ENGLISH = Template(
    """\
You estimate how likely a language model is to end with the right answer. You are given a problem \
and the model's response so far, which may stop at any point or not have begun.

Think in this order:
- Difficulty. How hard is the problem, and where does one go wrong in it?
{ability}\
- Progress. Skim the response: what is settled, what is still open, is there an error or confusion?
- Chance. If this same model goes on from here, how often does it end with the right answer?
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
    "- Ability. What do the response so far and the facts about the model say about its skill?\n",
)

# In the embedded task one character is one token. The question stands last, so the reply begins as
# the policy's own response begins: a critic made from the policy can recompute the steps.
COMPACT = Template("{prefix}|{icc}|{question}", "{model_size},{success_rate}")


def critic_prompt(question: str, prefix: str, *, model_size: str, success_rate: float | None,
                  icc: bool = True, template: Template = ENGLISH) -> str:
    """The prompt for the state (question, prefix). It never contains the reference answer.

    model_size is the actor's, as text ("1.5B"); success_rate, in [0, 1], is its running average.
    With icc False, or with success_rate None (nothing observed yet), the prompt shows neither and
    does not ask for the actor's ability. ValueError if the template lacks a field or the rate is
    outside [0, 1].
    """
    needed = ("question", "prefix", "icc") + ("ability",) * bool(template.ability)
    for part, names in (("text", needed), ("icc", ("model_size", "success_rate"))):
        for name in names:
            if f"{{{name}}}" not in getattr(template, part):
                raise ValueError(f"template.{part}: expected the fields {', '.join(names)} in "
                                 f"braces, found no {{{name}}}")
    fields = {"question": question, "prefix": prefix, "icc": "", "ability": ""}
    if icc and success_rate is not None:
        if not 0 <= success_rate <= 1:
            raise ValueError(f"success_rate: expected a number in [0, 1], found {success_rate}")
        facts = {"model_size": model_size, "success_rate": f"{success_rate:.2f}"}
        fields |= {"icc": _fill(template.icc, facts), "ability": template.ability}
    return _fill(template.text, fields)


def _fill(text: str, fields: dict[str, str]) -> str:
    """Replace the fields in one pass, so that other braces (LaTeX's, the question's) stay."""
    return re.sub(r"\{(" + "|".join(fields) + r")\}", lambda match: fields[match[1]], text)


# ---- score and reward ----------------------------------------------------------------------------

def parse_score(text: str) -> float | None:
    """score / 10 from the last closed <answer> tag; None unless it holds an integer 0 … 10."""
    before, closed, _ = text.rpartition("</answer>")
    _, opened, content = before.rpartition("<answer>")
    if not closed or not opened or content.strip() not in [str(k) for k in range(11)]:
        return None                                     # not clamped: "11" is no score
    return int(content) / 10


def value_reward(r: float, v_hat: float | None) -> float:
    """R_v = 1 − (r − v̂)²; 0 for a reply without a score (v_hat None).

    r in [0, 1] is the outcome, (R + 1)/2 of a reward R ∈ {−1, +1}. ValueError outside.
    """
    if not 0 <= r <= 1:
        raise ValueError(f"r: expected an outcome in [0, 1], found {r}")
    return 0.0 if v_hat is None else 1 - (r - v_hat) ** 2                       # 1 − (r − v̂)²


class RunningSuccess:
    """Exponential average of the actor's success rate. The first update sets it.

    .value is None before that. It is the only state, so a checkpoint keeps nothing else.
    """

    def __init__(self, momentum: float = 0.9) -> None:  # assumption: 0.9
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum: expected a number in [0, 1), found {momentum}")
        self.momentum: float = momentum
        self.value: float | None = None

    def update(self, success: float | Tensor) -> float:
        """success: a rate in [0, 1], or the 0/1 outcomes of a batch, whose mean is taken.

        Call it after the critic has judged the batch, or the prompt would reveal the outcomes.
        """
        success = torch.as_tensor(success, dtype=torch.float64).mean().item()
        if not 0 <= success <= 1:
            raise ValueError(f"success: expected numbers in [0, 1], found a mean of {success}")
        m = self.momentum
        self.value = success if self.value is None else m * self.value + (1 - m) * success
        return self.value


# ---- segments ------------------------------------------------------------------------------------
# A start must not depend on the token at the start or on later ones: otherwise V, the baseline of
# that token's action, would depend on the action, and the policy gradient would be biased. So a
# segment ends *after* a delimiter or an unlikely token, never before it.

def segment_starts(mask: Tensor, ends: Tensor | None = None, *, width: int = 1,
                   at_most: int = 16) -> Tensor:
    """Where segments start, [B, T] bool: at the first trainable token, then after tokens of `ends`.

    mask [B, T] is bool or a number. ends [B, T] marks tokens after which a segment may end; None
    means any token, so every segment has `width` tokens. Each segment but the last has at least
    `width` trainable tokens, and a response has at most `at_most` segments: width = ⌈limit/16⌉
    covers any response of at most `limit` tokens evenly. Masked gaps count for nothing.
    """
    # assumption: states are scored at the starts of at most 16 segments; no source says where
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
    """tokens [B, T] -> ends [B, T] bool: tokens that are, or contain, the delimiter."""
    return torch.isin(tokens, torch.tensor(delimiter_ids, device=tokens.device))


def delimiter_ids(tokenizer: Tokenizer, delimiter: str) -> list[int]:
    """Ids of all tokens whose text contains the delimiter. ValueError if there is none."""
    ids = [i for i in range(len(tokenizer)) if delimiter in tokenizer.decode([i])]
    if not ids:
        raise ValueError(f"delimiter: expected text inside one token, found {delimiter!r} in none")
    return ids


def ends_by_surprise(logp: Tensor, *, below: float = 0.2) -> Tensor:
    """logp [B, T] of sampled tokens -> ends [B, T] bool: those with a probability under `below`."""
    return logp < math.log(below)


def spread_segments(x: Tensor, starts: Tensor, mask: Tensor) -> Tensor:
    """Copy x [B, T] from each segment's start to all trainable tokens of the segment; 0 elsewhere.

    spread_segments(gae(value, R, starts, lam), starts, mask) is GAE on the process of segments,
    because gae skips what its mask leaves out. For λ = 1 it equals gae(value, R, mask, 1.0).
    """
    column = torch.arange(x.shape[1], device=x.device).expand_as(x)
    start = torch.where(starts.bool(), column, -1).cummax(1).values  # of the token's own segment
    inside = mask.bool() & (start >= 0)
    return torch.where(inside, x.gather(1, start.clamp_min(0)), 0.0)


def segment_values(v_hat: list[float | None], starts: Tensor, mask: Tensor,
                   fallback: float | None) -> Tensor:
    """value [B, T] = 2v̂ − 1 of each token's segment, 0 where mask is False.

    v_hat holds N scores in [0, 1], one per start, row by row. A None takes `fallback`, the running
    success rate. ValueError if the number of scores is wrong or a needed fallback is None.
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
    return spread_segments(value, starts, mask)


def quarters(starts: Tensor, mask: Tensor) -> list[int]:
    """The quarter 0 … 3 of its own response's trainable tokens in which each of N starts lies."""
    # assumption: traces are balanced by quarters of the response
    before = mask.long().cumsum(1) - mask.long()
    quarter = 4 * before // mask.long().sum(1, keepdim=True).clamp_min(1)
    return quarter[starts.bool()].tolist()


# ---- asking the critic ---------------------------------------------------------------------------

@dataclass
class GenCritic:
    """A causal language model that gives scores, and how it is asked.

    tokenizer is the critic's own. actor_tokenizer turns the actor's tokens into text: the two
    models may have different vocabularies, and the same ids would then mean other words.
    """

    model: nn.Module
    tokenizer: Tokenizer
    actor_tokenizer: Tokenizer
    eos_id: list[int]
    success: RunningSuccess  # of the actor
    model_size: str  # of the actor
    template: Template = ENGLISH
    icc: bool = True
    context: int = 4096  # tokens of prompt and reply together
    max_new_tokens: int = 1024  # assumption: so many tokens of a reply, at temperature 1
    temperature: float = 1.0
    patience: int = 5  # assumption: calls in a row without a parsable reply before `ask` stops
    silent: int = 0  # such calls so far


class State(NamedTuple):
    """What the critic is asked about; the last two are the actor's when the response was made."""

    question: str
    prefix: str
    model_size: str
    success_rate: float | None


class Replies(NamedTuple):
    """N replies: the sampler's tensors, and the texts and scores read from them."""

    tokens: Tensor  # [N, P+L]
    attention: Tensor  # [N, P+L]
    mask: Tensor  # [N, L]
    texts: list[str]
    v_hat: list[float | None]


def encode_chat(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a prompt: as a user's message if there is a chat template, else as plain text.

    An end-of-sequence token at the end of plain text is dropped: the reply would follow it.
    """
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": text}]
        return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    ids = tokenizer(text).input_ids
    return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids


def encode_state(critic: GenCritic, state: State) -> tuple[list[int], bool]:
    """Prompt ids that leave room for the reply; True if the response was cut to make room.

    The cut takes tokens from the left of the response. ValueError if the prompt is too long even
    without the response.
    """
    room, tail = critic.context - critic.max_new_tokens, None
    while len(ids := _prompt_ids(critic, state)) > room:
        if tail is None:
            tail = critic.tokenizer(state.prefix, add_special_tokens=False).input_ids
        if not tail:
            raise ValueError(f"context: expected room for a prompt of {len(ids)} tokens and a "
                             f"reply of {critic.max_new_tokens}, found {critic.context}")
        tail = tail[len(ids) - room :]  # again if the tail, tokenised anew, is longer
        state = state._replace(prefix=critic.tokenizer.decode(tail))
    return ids, tail is not None


def _prompt_ids(critic: GenCritic, state: State) -> list[int]:
    return encode_chat(critic.tokenizer, critic_prompt(
        state.question, state.prefix, model_size=state.model_size,
        success_rate=state.success_rate, icc=critic.icc, template=critic.template))


def states_at(actor_tokenizer: Tokenizer, questions: list[str], tokens: Tensor, starts: Tensor,
              *, model_size: str, success_rate: float | None) -> list[State]:
    """The N states at the starts [B, T] of response tokens [B, T], row by row.

    A state holds what lies before its start and nothing else. The tokens are the actor's, so the
    actor's tokenizer decodes them. questions: B texts.
    """
    rows = tokens.cpu().tolist()
    return [State(questions[b], actor_tokenizer.decode(rows[b][:t], skip_special_tokens=True),
                  model_size, success_rate)
            for b, t in starts.bool().cpu().nonzero().tolist()]


def ask_states(critic: GenCritic, states: list[State], sampler: Callable,
               generator: torch.Generator | None = None) -> tuple[Replies, Stats]:
    """One sampled reply per state, all in one call of the sampler.

    Under torchrun all ranks ask about the same states, and the sampler must return all replies on
    every rank (rollout.shared does). stats: unparsable, prompt_truncated, prompt_tokens and
    reply_tokens per state; score per parsed reply. RuntimeError after critic.patience calls in a
    row without a parsable reply.
    """
    encoded = [encode_state(critic, state) for state in states]
    tokens, attention, mask, _ = sampler(
        critic.model, [ids for ids, _ in encoded], max_new_tokens=critic.max_new_tokens,
        temperature=critic.temperature, eos_id=critic.eos_id,
        pad_id=critic.tokenizer.pad_token_id, generator=generator)
    reply = tokens[:, -mask.shape[1] :].cpu()
    texts = critic.tokenizer.batch_decode(
        [row[m].tolist() for row, m in zip(reply, mask.bool().cpu())], skip_special_tokens=True)
    v_hat = [parse_score(text) for text in texts]
    n, parsed = len(states), [v for v in v_hat if v is not None]
    critic.silent = 0 if parsed else critic.silent + 1
    if critic.silent >= critic.patience:  # nothing to learn from: R_v is 0 for every reply
        raise RuntimeError(
            f"the critic gave no parsable reply in {critic.silent} calls in a row (the last of {n} "
            f"ends in {texts[-1][-40:]!r}): train it on traces first (--traces), or allow longer "
            f"replies than {critic.max_new_tokens} tokens")
    return Replies(tokens, attention, mask, texts, v_hat), {
        "unparsable": (n - len(parsed), n), "score": (sum(parsed), len(parsed)),
        "prompt_truncated": (sum(cut for _, cut in encoded), n),
        "prompt_tokens": (sum(len(ids) for ids, _ in encoded), n),
        "reply_tokens": (int(mask.sum()), n)}


def ask(critic: GenCritic, questions: list[str], tokens: Tensor, mask: Tensor, starts: Tensor,
        sampler: Callable, generator: torch.Generator | None = None,
        ) -> tuple[Tensor, Replies, Stats]:
    """Ask at all starts of a batch of responses: value [B, T] for gae, the replies, and stats.

    questions: B texts. tokens, mask, starts [B, T] belong to the responses. replies[i] belongs to
    the i-th start, row by row: to the response starts.nonzero()[:, 0][i]. critic.success is read
    and not changed: update it after this batch has been judged. Errors as in ask_states.
    """
    rate = critic.success.value
    states = states_at(critic.actor_tokenizer, questions, tokens, starts,
                       model_size=critic.model_size, success_rate=rate)
    replies, stats = ask_states(critic, states, sampler, generator)
    # assumption: before the first update an unparsable reply stands for v̂ = 0.5, that is V = 0
    fallback = 0.5 if rate is None else rate
    return segment_values(replies.v_hat, starts, mask, fallback), replies, stats


# ---- losses --------------------------------------------------------------------------------------

def sft_loss(logp: Tensor, mask: Tensor, n_tokens: Tensor | float | None = None,
             ) -> tuple[Tensor, Stats]:
    """−(1/n) Σ log π(trace token) over logp [N, L], where mask [N, L] is set.

    n_tokens is the count of the whole step (default: of this call). stats: loss per token.
    """
    logp, mask, n = _checked(logp, mask, n_tokens, mask.bool().sum())
    total = -torch.where(mask, logp, 0.0).sum()                                 # −Σ log π
    return total / n, {"loss": (total.detach(), mask.sum())}


def reinforce_loss(logp: Tensor, advantage: Tensor, mask: Tensor,
                   n_replies: Tensor | float | None = None) -> tuple[Tensor, Stats]:
    """−(1/n) Σ_i A_i Σ_t log π(z_it|s_i), with gradient −E[A ∇ log π(z|s)]: a reply is one action.

    logp, mask [N, L]; advantage [N] comes from reply_advantage, which needs all rewards of the
    step. n_replies is the count of the whole step (default: rows with a token in this call). There
    is no ratio, so the replies must be fresh. stats: loss per reply, logp per token. ValueError on
    shapes that do not fit.
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


def _checked(logp: Tensor, mask: Tensor, n: Tensor | float | None, default: Tensor,
             ) -> tuple[Tensor, Tensor, Tensor]:
    """logp as float32 (float64 stays), mask as bool, and the count to divide by."""
    if logp.dim() != 2 or mask.shape != logp.shape:
        raise ValueError(f"logp, mask: expected one shape (N, L), found {tuple(logp.shape)} and "
                         f"{tuple(mask.shape)}")
    logp = logp if logp.dtype == torch.float64 else logp.float()
    n = torch.as_tensor(default if n is None else n, device=logp.device).clamp_min(1)
    return logp, mask.bool(), n


def reply_advantage(reward: Tensor, group: Tensor | None = None, *, baseline: str = "none",
                    ) -> Tensor:
    """R_v [N] minus a baseline: 0 ("none", the paper's), the mean, or the other replies' mean.

    Replies with the same number in group [N] share a baseline (default: all N), for several replies
    to one state. A reply that is alone in its group has leave-one-out baseline 0. The mean contains
    the reply's own reward; that scales the expected gradient by 1 − 1/n. ValueError on a baseline
    of another name.
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
        return reward - total / n                                               # R_i − mean_j R_j
    return reward - (total - reward) / (n - 1).clamp_min(1)                # R_i − mean_{j≠i} R_j


# ---- gradients -----------------------------------------------------------------------------------

def reply_logp(model: nn.Module, tokens: Tensor, attention: Tensor, L: int,
               temperature: float = 1.0) -> Tensor:
    """log π [N, L], float32, of the last L of tokens [N, P+L], at the temperature that sampled."""
    positions = (attention.long().cumsum(-1) - 1).clamp_min(0)  # left padding takes no position
    logits = model(input_ids=tokens, attention_mask=attention.long(), position_ids=positions,
                   use_cache=False, logits_to_keep=L + 1).logits[:, :-1]
    logp = torch.log_softmax(logits.float() / temperature, -1)
    return logp.gather(-1, tokens[:, -L:, None])[..., 0]


def backward(critic: GenCritic, tokens: Tensor, attention: Tensor, mask: Tensor,
             loss_of: Callable, *, temperature: float = 1.0, token_budget: int = 32_768) -> Stats:
    """Add the gradient of the loss to .grad, in micro-batches of replies of similar length.

    tokens, attention [N, P+L] and mask [N, L] are padded on the outside. loss_of(logp, mask, rows)
    -> (loss, stats) of the rows given; it divides by the whole step's count. token_budget: padded
    tokens of one forward pass. Under torchrun all ranks hold the same batch, each differentiates
    its share, and .grad and the stats end as the sums over ranks.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    length, S, L, parts, start = attention.sum(1), attention.shape[1], mask.shape[1], [], 0
    order = length.argsort(descending=True, stable=True)[rank::size]
    if rank > 0:  # all ranks hold the same earlier gradient: the sum shall count it once
        critic.model.zero_grad()
    while start < len(order):
        rows = order[start : start + max(1, token_budget // int(length[order[start]]))]
        start += len(rows)
        a, m = attention[rows], mask[rows]
        longest = int(m.any(0).sum())  # reply tokens of the part; no more columns are computed
        columns = slice(int(a.any(0).int().argmax()), S - L + longest)
        logp = reply_logp(critic.model, tokens[rows, columns], a[:, columns], longest, temperature)
        loss, stats = loss_of(logp, m[:, :longest], rows)
        loss.backward()
        parts.append({name: (float(x), float(n)) for name, (x, n) in stats.items()})
    for p in critic.model.parameters() if size > 1 else ():
        if p.requires_grad:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad  # a rank without a row
            dist.all_reduce(p.grad)
    return _sum_over_ranks(parts, size)


def _sum_over_ranks(parts: list[Stats], size: int) -> Stats:
    """Sums of (sum, count) pairs over the micro-batches of all ranks."""
    of_ranks, total = [parts] * size, {}
    if size > 1:
        dist.all_gather_object(of_ranks, parts)
    for part in sum(of_ranks, []):
        for name, (x, n) in part.items():
            x_before, n_before = total.get(name, (0.0, 0.0))
            total[name] = (x_before + x, n_before + n)
    return total


def reinforce_backward(critic: GenCritic, replies: Replies, r: Tensor, *, baseline: str = "none",
                       group: Tensor | None = None, token_budget: int = 32_768) -> Stats:
    """Add the gradient of one REINFORCE step on R_v to .grad; the caller clips and steps.

    r [N] in [0, 1] is the outcome of each state's response. stats: loss, logp, reward (R_v).
    """
    reward = torch.tensor([value_reward(x, v) for x, v in zip(r.tolist(), replies.v_hat)])
    reward = reward.to(replies.tokens.device)
    A, n = reply_advantage(reward, group, baseline=baseline), len(reward)
    stats = backward(
        critic, *replies[:3], lambda logp, mask, rows: reinforce_loss(logp, A[rows], mask, n),
        temperature=critic.temperature, token_budget=token_budget)
    return stats | {"reward": (reward.sum(), n)}


# ---- stage 1: traces -----------------------------------------------------------------------------

def write_prompts(path: str, states: list[State], outcome: list[int], position: list[int], *,
                  icc: bool = True, template: Template = ENGLISH) -> None:
    """One JSON line per state: an oracle reads `prompt` and adds its reply under `trace`.

    outcome (0 or 1) and position (quarter 0 … 3) are of each state, for whoever balances traces.
    The file appears whole or not at all.
    """
    with open(path + ".writing", "w", encoding="utf-8") as file:
        for state, r, quarter in zip(states, outcome, position, strict=True):
            question, prefix, size, rate = state
            prompt = critic_prompt(question, prefix, model_size=size, success_rate=rate, icc=icc,
                                   template=template)
            row = dict(problem=question, partial=prefix, model_size=size, success_rate=rate,
                       outcome=r, position=quarter, prompt=prompt)
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    os.replace(path + ".writing", path)


def load_traces(path: str, *, model_size: str = "", success_rate: float | None = None,
                ) -> list[tuple[State, str]]:
    """Read JSONL with the keys `problem`, `partial`, `trace`; with ICC also `model_size`,
    `success_rate`, for which the arguments stand in where a line lacks them.

    ValueError with file and line number on a line that is no JSON object, lacks a key, has a rate
    outside [0, 1] or a trace without a score, and on a file without a line.
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


def traces_batch(critic: GenCritic, traces: list[tuple[State, str]],
                 ) -> tuple[Tensor, Tensor, Tensor, int]:
    """tokens [N, P+L], attention [N, P+L], mask [N, L] of prompts ‖ traces; prompts that were cut.

    Each trace ends in an end-of-sequence token. A trace longer than max_new_tokens loses its
    start, because the score stands at its end.
    """
    encoded = [encode_state(critic, state) for state, _ in traces]
    prompts, end = [ids for ids, _ in encoded], critic.tokenizer.eos_token_id
    replies = [(critic.tokenizer(text, add_special_tokens=False).input_ids
                + [end])[-critic.max_new_tokens :] for _, text in traces]
    padded = _pad_outside(prompts, replies, critic.tokenizer.pad_token_id)
    device = next(critic.model.parameters()).device
    return *(x.to(device) for x in padded), sum(cut for _, cut in encoded)


def _pad_outside(prompts: list[list[int]], replies: list[list[int]], pad: int,
                 ) -> tuple[Tensor, Tensor, Tensor]:
    """Prompts padded on the left, replies on the right: tokens, attention [N, P+L], mask [N, L]."""
    P, L = max(map(len, prompts)), max(map(len, replies))
    rows = [(P - len(p), p + z, L - len(z)) for p, z in zip(prompts, replies)]
    tokens = torch.tensor([[pad] * left + ids + [pad] * right for left, ids, right in rows])
    attention = torch.tensor([[False] * left + [True] * len(ids) + [False] * right
                              for left, ids, right in rows])
    return tokens, attention, attention[:, P:]


def sft(critic: GenCritic, traces: list[tuple[State, str]], optimizer: Any, *, epochs: float = 2,
        batch_size: int = 128, max_norm: float = 1.0, token_budget: int = 32_768,
        seed: int | None = 0, progress: bool = True) -> list[dict]:
    """Stage 1: fine-tune critic.model in place on (state, trace) pairs; one dict per step.

    optimizer: has .param_groups, whose rates are the peaks of sft_lr_share, and
    .step_if_finite(norm) -> whether it stepped (critic.FiniteAdamW; 1e-5 is usual). epochs may be a
    fraction. seed None keeps the order of the traces (a curriculum), else each epoch shuffles them.
    The dict: loss, prompt_truncated (share), grad_norm (before clipping), skipped_nonfinite.
    """
    if not traces:
        raise ValueError("traces: expected at least one (state, trace), found none")
    # assumption: up to two epochs, a step of 128 traces, clipping at 1 and the schedule of the rate
    total = max(1, round(epochs * math.ceil(len(traces) / batch_size)))
    rng, order, log = random.Random(seed), [], []
    peaks = [group["lr"] for group in optimizer.param_groups]
    silent = not progress or dist.is_initialized() and dist.get_rank() > 0
    bar = tqdm(range(total), "critic, SFT", disable=silent, dynamic_ncols=True)
    critic.model.train()
    for step in bar:
        if not order:
            order = list(range(len(traces)))
            if seed is not None:
                rng.shuffle(order)
        part, order = [traces[i] for i in order[:batch_size]], order[batch_size:]
        tokens, attention, mask, cut = traces_batch(critic, part)
        loss_of = lambda logp, m, rows, n=mask.sum(): sft_loss(logp, m, n)
        stats = backward(critic, tokens, attention, mask, loss_of, token_budget=token_budget)
        for group, peak in zip(optimizer.param_groups, peaks):
            group["lr"] = peak * sft_lr_share(step, total)
        norm = nn.utils.clip_grad_norm_(critic.model.parameters(), max_norm).item()
        log.append({"loss": stats["loss"][0] / stats["loss"][1],
                    "prompt_truncated": cut / len(part), "grad_norm": norm,
                    "skipped_nonfinite": not optimizer.step_if_finite(norm)})
        bar.set_postfix(loss=f"{log[-1]['loss']:.4f}")
    critic.model.eval()
    for group, peak in zip(optimizer.param_groups, peaks):
        group["lr"] = peak  # the optimizer leaves with the rates it came with
    return log


def sft_lr_share(step: int, total: int) -> float:
    """Share of the peak at a step from 0: linear up over 3 %, linear down over the last third."""
    return min((step + 1) / max(1, round(0.03 * total)), 1, 3 * (1 - step / total))


# ---- demo ----------------------------------------------------------------------------------------
# +7!j=3 asks: add 7 modulo 10, start at 3, give the value after the tenth step, j. The response
# slips at d: it writes the 4 of c once more, where 1 is right, and every later value is wrong too.

QUESTION, RESPONSE, ANSWER = "+7!j=3", "a0b7c4d4e1f8g5h2i9j6", "j3"
SIZE, SUCCESS, WIDTH = "0.2M", 0.84, 4  # the actor's size and running success; tokens of a segment
REPLIES = (  # to the six states: what a program says that knows the task and the running success
    "j0.84<answer>6</answer>",
    "a00=b77=j0.84<answer>7</answer>",
    "a00=b77=c44=d14!j0.84<answer>0</answer>",
    "a00=b77=c44=d14!e81!f58!j0.84<answer>0</answer>",
    "a00=b77=c44=d14!e81!f58!g25!h92!j0.84<answer>0</answer>",
    "a00=b77=c44=d14!e81!f58!g25!h92!i69!j36!j0.84<answer>0</answer>")

LEGEND = """\
Signs. prompt: response so far|actor's size,its running success|question
    d14!    step d: the right value is 1, the response says 4, they differ (d11= would agree)
    j0.84   the chain ends at step j, and the actor's running success is 0.84
    $       the token that ends the response (end of sequence)
    v̂ = score/10, V = 2v̂ − 1, R_v = 1 − (r − v̂)², Â: the advantage of the segment's tokens, with
    λ = 1 and λ = ½ between segments (inside a segment λ is 1)
"""
BLAME = """
The step d4 should be d1. With λ = 1 a segment gets R − V(its start): no blame is left for a
segment whose failure was expected. With λ = ½ more of the blame falls where V drops, on c4d4.
"""


def demo(args: argparse.Namespace) -> None:
    """One response with an error in it, as the critic judges it at the start of each segment."""
    import rollout
    from gae import gae

    critic, sampler = _demo_critic(args.critic)
    critic.success.update(SUCCESS)
    tokens = torch.tensor([critic.actor_tokenizer(RESPONSE + "$").input_ids])
    mask = torch.ones_like(tokens, dtype=torch.bool)
    starts = segment_starts(mask, width=WIDTH)
    V, replies, _ = ask(critic, [QUESTION], tokens, mask, starts, sampler,
                        torch.Generator().manual_seed(args.seed))
    R = torch.tensor([rollout.chain_reward(RESPONSE, ANSWER)])
    A, A_half = gae(V, R, mask, 1.0), spread_segments(gae(V, R, starts, 0.5), starts, mask)
    ask_for = lambda t, template: critic_prompt(
        QUESTION, RESPONSE[:t], model_size=SIZE, success_rate=SUCCESS, template=template)
    print(f"{QUESTION} asks for {ANSWER}; the response {RESPONSE} says {RESPONSE[-2:]}: r = 0, "
          f"R = {R.item():+.0f}.\n\nWhat a real model is asked at the fourth segment:\n\n  | "
          + ask_for(3 * WIDTH, ENGLISH).replace("\n", "\n  | ") + "\n\n" + LEGEND)
    shown = [text.replace("\n", " ")[-70:] for text in replies.texts]
    wide = 1 + max(map(len, shown))
    print(f"{'prompt':38}{'reply':{wide}}{'v̂':>5}{'V':>6}{'R_v':>6}  {'segment':8}{'Â λ=1':>7}"
          f"{'Â λ=½':>7}")
    for i, t in enumerate(starts[0].nonzero()[:, 0].tolist()):
        v = replies.v_hat[i]
        print(f"{ask_for(t, COMPACT):38}{shown[i]:{wide}}{'–' if v is None else v:>5}"
              f"{V[0, t]:+6.1f}{value_reward(0, v):6.2f}  {(RESPONSE + '$')[t : t + WIDTH]:8}"
              f"{A[0, t]:+7.2f}{A_half[0, t]:+7.2f}")
    print("" if args.critic else BLAME)
    for bad in ("<answer>11</answer>", "<answer>seven</answer>", "7"):
        v = parse_score(bad)
        print(f"{bad!r:26} -> v̂ = {v}, R_v = {value_reward(0, v):.0f}")


def _demo_critic(folder: str | None) -> tuple[GenCritic, Callable]:
    """The critic in a Hugging Face folder, or one that replies REPLIES; and its sampler."""
    import rollout
    from transformers import AutoModelForCausalLM, AutoTokenizer

    actor = rollout.task_tokenizer()
    if folder is None:
        written = lambda model, prompts, *, eos_id, pad_id, **limits: (*_pad_outside(
            prompts, [actor(text).input_ids + eos_id for text in REPLIES], pad_id), None)
        return GenCritic(nn.Linear(1, 1), actor, actor, [actor.eos_token_id], RunningSuccess(),
                         SIZE, COMPACT), written
    if not os.path.isdir(folder):
        raise ValueError(f"--critic: expected a folder with a language model, found {folder}")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    limits = {} if tokenizer.chat_template else dict(
        template=COMPACT, context=256, max_new_tokens=96)  # a critic of the embedded task
    return GenCritic(model, tokenizer, actor, rollout.eos_ids(model, tokenizer), RunningSuccess(),
                     SIZE, **limits), rollout.generate


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="demo of a generative critic")
    parser.add_argument("--critic", metavar="DIR", help="ask this Hugging Face folder instead")
    parser.add_argument("--seed", type=int, default=0)
    try:
        demo(parser.parse_args())
    except (ValueError, RuntimeError, OSError) as error:
        raise SystemExit(f"error: {str(error).splitlines()[0]}") from None
