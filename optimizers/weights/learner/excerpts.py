"""Excerpts of a step for its record: some groups of answers, with the advantage of every token.

They are bounded whatever the settings: by steps of a job, groups of a step, answers of a group,
and tokens of an answer and a prompt. Those of a job take at most about 3 MB.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from compound.optimizers.weights.learner.samples import Group, Sample, SamplingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STEPS = 24  # steps of a job that are recorded, evenly spaced
GROUPS = 4  # groups of a step
ANSWERS = 8  # answers of a group: those with the highest and the lowest rewards
ENDS = 96, 64  # tokens of a long answer that are recorded, at its start and at its end
PROMPT_ENDS = 150
LARGEST, MAX_LOG_RATIO = 1e12, 14.0


def choose_groups(samples: Sequence[Sample], number: int, steps: int) -> list[list[Sample]]:
    """Return the groups of a step that its record shows, with some of their answers.

    Of each component, they are the group whose rewards differ most and the first one of the others.

    Args:
        samples: the samples of the step.
        number: the index of the step.
        steps: the number of steps of the job, of which some are left out.
    """
    if number % -(-steps // STEPS) and number != steps - 1:
        return []
    groups: dict[str, dict[Group, list[Sample]]] = {}
    for sample in samples:
        own, key = groups.setdefault(sample.component, {}), sample.group or (sample.example,)
        own.setdefault(key, []).append(sample)
    names = sorted(groups)
    first = number % len(names) if len(names) > GROUPS else 0  # so that each has its turn
    found: list[tuple[bool, list[Sample]]] = []
    for name in names[first:] + names[:first]:
        every = groups[name].values()
        ranked = [sorted(group, key=lambda sample: -sample.reward) for group in every]
        widest = max(ranked, key=lambda group: group[0].reward - group[-1].reward)
        ranked.remove(widest)
        found += [(False, widest), *((True, group) for group in ranked[:1])]
    found.sort(key=lambda pair: pair[0])
    half = ANSWERS // 2
    return [
        group if len(group) <= ANSWERS else group[:half] + group[-half:]
        for _, group in found[:GROUPS]
    ]


class TokenTexts:
    """The texts of tokens, of which those of single tokens are kept."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        # the text of a token after another one: some tokenizers drop the space of a first token
        self._before = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._start = 0
        self._start = len(self.text(()))
        self._known = cache(self.text)

    def text(self, tokens: Iterable[int]) -> str:
        """Return the text of some tokens."""
        whole = [*self._before, *tokens]
        return str(self._tokenizer.decode(whole, clean_up_tokenization_spaces=False))[self._start :]

    def of(self, tokens: Iterable[int]) -> list[str]:
        """Return the text of each token; that of a character is with the last one of its tokens."""
        found: list[str] = []
        part: tuple[int, ...] = ()
        for token in tokens:
            part = (*part, token)
            is_part = self._known(part).endswith("\ufffd") and len(part) < 4
            found.append("" if is_part else self._known(part))
            part = part if is_part else ()
        return found

    def prompt(self, tokens: Sequence[int]) -> str:
        """Return the text of a prompt without its middle, if it is long."""
        middle = len(tokens) - 2 * PROMPT_ENDS
        if middle <= 0:
            return self.text(tokens)
        first, last = self.text(tokens[:PROMPT_ENDS]), self.text(tokens[-PROMPT_ENDS:])
        return f"{first} … ({middle:,} tokens) … {last}"


def describe_groups(
    groups: Sequence[Sequence[Sample]],
    logps: Sequence[Sequence[Sequence[float]]],
    texts: TokenTexts,
    sampling: SamplingSettings,
    bounds: tuple[float, float] = (0.0, math.inf),
) -> list[dict[str, Any]]:
    """Return groups as JSON.

    Args:
        groups: the groups.
        logps: of the samples that the trainer learned from, in order, the log-probabilities of
            tokens in their last update, and those before the step; none if they are unknown.
        texts: the texts of tokens.
        sampling: decides which samples the trainer learns from.
        bounds: the clipping range of probability ratios.
    """
    known, found = iter(logps), []
    for group in groups:
        first = texts.prompt(group[0].tokens.prompt)
        answers: list[dict[str, Any]] = []
        for sample in group:
            learned, prompt = sampling.learns_from(sample), texts.prompt(sample.tokens.prompt)
            answer = _answer(sample, next(known, ()) if learned else (), texts, bounds)
            answer |= {"prompt": prompt} if prompt != first else {}
            answers.append(answer if learned else {**answer, "left_out": True})
        about = {"component": group[0].component, "example": group[0].example}
        found.append({**about, "prompt": first, "answers": answers})
    return found


def _answer(
    sample: Sample, logps: Sequence[Sequence[float]], texts: TokenTexts, bounds: tuple[float, float]
) -> dict[str, Any]:
    """Return an answer as JSON, with numbers of tokens only if they are finite and differ."""
    sampled, (first, last) = sample.tokens.logprobs, ENDS
    advantages = sample.advantages if len(sample.advantages) == sample.length else ()
    places = [n for n in range(sample.length) if n < first or n >= sample.length - last]
    found: dict[str, Any] = {
        "reward": sample.reward,
        "length": sample.length,
        "tokens": texts.of(sample.tokens.sampled[n] for n in places),
        "truncated": sample.is_truncated,
    }
    if advantages and all(abs(value) < LARGEST for value in advantages):  # false for NaN
        found["advantage"] = _rounded(math.fsum(advantages) / len(advantages))
        if len(set(advantages)) > 1:
            found["advantages"] = [_rounded(advantages[n]) for n in places]
    if logps and all(abs(value) < LARGEST for side in logps for value in side):
        new, old = logps
        low, high = bounds
        if len(sampled) == sample.length:
            ratios = [_ratio(new[n], sampled[n]) for n in places]
            found |= {"ratios": ratios} if set(ratios) != {1.0} else {}
        changes = [(_ratio(new[n], old[n]), advantages[n]) for n in places if advantages]
        over = [
            n for n, (r, a) in enumerate(changes) if (a > 0 and r > high) or (a < 0 and r < low)
        ]
        found |= {"clipped": over} if over else {}
    return found


def _ratio(new: float, old: float) -> float:
    return _rounded(math.exp(min(new - old, MAX_LOG_RATIO)))


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
