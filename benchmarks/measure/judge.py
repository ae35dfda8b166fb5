"""Language model as a judge of outputs, a baseline for local rewards (OPTIMAS, section 5.2).

The judge sees outputs of a component that led to high and to low global rewards, and chooses the
better of two outputs for other inputs. It is evaluated on the folds of the heads, so that the
accuracies are comparable. Requests are built and replies are parsed by pure functions.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from compound.core.engine import Completion, Message, Request
from compound.core.errors import CallError, first_leaf
from compound.execution.rng import derive_seed, generator
from compound.graph.configuration import to_readable_json, to_readable_values
from compound.graph.system import System
from compound.rewards.alignment import NO_PAIRS, Accuracy, mean_accuracy
from compound.rewards.buffer import PairBuffer
from compound.rewards.features import Template, as_text
from compound.rewards.fit import component_pairs
from compound.rewards.heads import folds
from compound.rewards.pairs import Pair

EACH = 300  # characters per example; twenty of them are about 1,500 tokens
JUDGED = 2_400  # characters of the inputs and the two outputs to compare
CUT = " …"
VERDICT = re.compile(r"[\W_]*([AB])[\W_]*")
CUE = "Letter:"  # without it, small models copy an output instead of answering with a letter

Generate = Callable[[Request], Awaitable[Completion]]


@dataclass(frozen=True)
class JudgeSettings:
    """Settings of the judge.

    Attributes:
        high, low: the maximum number of example outputs with high and with low rewards.
        pairs: the maximum number of pairs per component; each input contributes one before any
            contributes two.
        seed: seeds the folds, the pairs, and the random streams of the requests.
    """

    high: int = 10
    low: int = 10
    pairs: int = 100
    seed: int = 0


@dataclass(frozen=True)
class _Question:
    """A pair to judge, the name of its input, and the pairs that provide its examples."""

    number: int
    input: str
    pair: Pair
    others: Sequence[Pair]


async def judge(
    generate: Generate,
    buffer: PairBuffer,
    system: System,
    component: str,
    judging: JudgeSettings | None = None,
    *,
    held_out: bool = False,
) -> Accuracy:
    """Return the accuracy of a language model at ordering a component's pairs.

    Every pair is judged in both orders, and the two verdicts are averaged, so that a judge that
    always prefers the first output has an accuracy of one half. Failures and replies that cannot be
    parsed count one half.

    Args:
        generate: sends a request to the model, such as ``lambda request:
            executor.request("smollm2", request)``, which uses cache and budget of the executor.
        buffer: the draws.
        system: the system of the draws.
        component: the component whose pairs are judged.
        judging: the number of examples and pairs.
        held_out: whether to judge only the inputs held out from a trained backbone, with examples
            from the others.

    Returns:
        The accuracy over inputs, or that of no pairs if there are too few inputs to hold any out.

    Raises:
        BudgetExhausted: the budget ended before all pairs were judged.
    """
    judging = judging or JudgeSettings()
    template = Template.of(system.components[component])
    asked = _questions(buffer, system, component, judging, held_out)

    async def verdict(question: _Question, swapped: bool) -> float:
        seed = derive_seed(judging.seed, "judge", component, question.number, swapped)
        request = comparison_request(
            template, question.pair, question.others, judging, swapped=swapped, seed=seed
        )
        try:
            text = (await generate(request)).text
        except CallError:
            return 0.5
        return score_reply(text, swapped=swapped)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                [group.create_task(verdict(q, swapped)) for swapped in (False, True)] for q in asked
            ]
    except BaseExceptionGroup as errors:
        raise first_leaf(errors) from None
    shares = [sum(task.result() for task in both) / 2 for both in tasks]
    return mean_accuracy(shares, [q.input for q in asked]) if asked else NO_PAIRS


def comparison_request(
    template: Template,
    pair: Pair,
    others: Sequence[Pair],
    judging: JudgeSettings,
    *,
    swapped: bool = False,
    seed: int = 0,
) -> Request:
    """Return the request that asks which of a pair's outputs is better.

    Args:
        template: the template of the component.
        pair: the inputs and the two outputs.
        others: pairs of other inputs as examples, in order of preference: chosen outputs led to
            high rewards, rejected ones to low rewards.
        judging: the number of examples.
        swapped: whether output B is the better one, instead of A.
        seed: the seed of the request.
    """
    a, b = (pair.rejected, pair.chosen) if swapped else (pair.chosen, pair.rejected)
    limits = JUDGED // 2, JUDGED // 4  # characters of the inputs, and of each output
    parts = [
        f"One step of a larger system is called {template.component}. An output of this step is good when "
        "the final result of the whole system is good. Here are some outputs of the step.",
        *_examples(template, others, judging),
        "Now compare two outputs for the same inputs.\n"
        f"{shorten_fields(template.given(pair.inputs), limits[0])}\n"
        f"Output A: {_output(a, limits[1])}\n"
        f"Output B: {_output(b, limits[1])}",
        "Which output leads to the better final result? Answer with the letter A or B, and nothing else.",
    ]
    return Request((Message("user", "\n\n".join(parts)),), max_tokens=4, seed=seed, cue=CUE)


def score_reply(text: str, *, swapped: bool) -> float:
    """Return 1 if a reply names the better output, 0 for the worse one, and one half for neither.

    >>> [score_reply(text, swapped=False) for text in (" A.", "**B**", "A or B")]
    [1.0, 0.0, 0.5]
    """
    found = VERDICT.fullmatch(text.strip().partition("\n")[0])
    if found is None:
        return 0.5
    return float((found[1] == "B") == swapped)


def shorten_fields(values: Mapping[str, object], limit: int) -> str:
    """Return fields, one per line, with the longest ones truncated to a total of ``limit`` characters.

    >>> print(shorten_fields({"passage": "Lima is the capital of Peru.", "question": "Where?"}, 24))
    question: Where?
    passage: Lima is the capi …
    """
    plain = to_readable_values(values)
    texts = sorted(((n, as_text(v)) for n, v in plain.items()), key=lambda item: len(item[1]))
    lines, left = [], limit
    for i, (name, text) in enumerate(texts):
        kept = _cut(text, left // (len(texts) - i))
        left -= len(kept)
        lines.append(f"{name}: {kept}")
    return "\n".join(lines)


def _questions(
    buffer: PairBuffer, system: System, component: str, judging: JudgeSettings, held_out: bool
) -> list[_Question]:
    """Return the pairs to judge, balanced over inputs, each with the pairs of the other folds."""
    texts = component_pairs(buffer, Template.of(system.components[component]), held_out=held_out)
    if not texts.is_sufficient():
        return []
    pairs = [pair for pair, _, _ in buffer.weighted_pairs(component)]
    parts = texts.is_judged if texts.roles else tuple(folds(texts.inputs, judging.seed).tolist())
    drawn = generator(judging.seed, "judged").permutation(len(pairs)).tolist()
    asked = [i for i in _balanced(drawn, texts.inputs) if texts.is_judged[i]]
    clearest = _balanced(sorted(drawn, key=lambda i: -pairs[i].gap), texts.inputs)
    shown = {part: [pairs[i] for i in clearest if parts[i] != part] for part in set(parts)}
    return [
        _Question(i, texts.inputs[i], pairs[i], shown[parts[i]])
        for i in sorted(asked[: judging.pairs])
    ]


def _balanced(order: Sequence[int], inputs: Sequence[str]) -> list[int]:
    """Return indices in the given order, but each input once before any input twice."""
    turns: Counter[str] = Counter()
    turn = {}
    for i in order:
        turn[i] = turns[inputs[i]]
        turns[inputs[i]] += 1
    return sorted(order, key=lambda i: turn[i])


def _examples(template: Template, others: Sequence[Pair], judging: JudgeSettings) -> list[str]:
    """Return examples with inputs, output and verdict, alternating between high and low rewards."""
    found = []
    for i in range(max(judging.high, judging.low)):
        if i < len(others):
            pair = others[i]
            shown = shorten_fields(template.given(pair.inputs), EACH // 2)
            high = [("good", pair.chosen)] if i < judging.high else []
            low = [("bad", pair.rejected)] if i < judging.low else []
            found += [
                f"{shown}\nOutput: {_output(outputs, EACH // 2)}\nThis output is {kind}."
                for kind, outputs in [*high, *low]
            ]
    return found


def _output(outputs: Mapping[str, object], limit: int) -> str:
    """Return outputs as text, without the name if there is only one."""
    if len(outputs) == 1:
        (value,) = outputs.values()
        return _cut(as_text(to_readable_json(value)), limit)
    return "\n" + shorten_fields(outputs, limit)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: max(0, limit - len(CUT))] + CUT
