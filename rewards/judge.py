"""A language model as judge of outputs: what local rewards are compared with (OPTIMAS, section 5.2).

The judge sees outputs of one component that led to high and to low global rewards, and says which of two
outputs for other inputs is the better one. It answers the folds that the heads are judged on, so that its
accuracy stands beside theirs. Requests are made and replies are read by pure functions.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from compound.engine import Completion, Message, Request
from compound.errors import CallError, first_of
from compound.execution.rng import derive_seed, generator
from compound.graph.configuration import readable, readable_values
from compound.graph.system import System
from compound.rewards.alignment import NOTHING, Accuracy, mean_right
from compound.rewards.buffer import PairBuffer
from compound.rewards.fit import texts_of
from compound.rewards.heads import folds
from compound.rewards.pairs import Pair
from compound.rewards.template import Template, as_text

EACH = 300  # characters of one example: twenty of them are about 1,500 tokens
JUDGED = 2_400  # characters of the inputs and the two outputs in question
CUT = " …"
VERDICT = re.compile(r"[\W_]*([AB])[\W_]*")
CUE = "Letter:"  # small models then give one; asked otherwise, they copy an output

Generate = Callable[[Request], Awaitable[Completion]]


@dataclass(frozen=True)
class Judging:
    """How a judge is asked.

    Attributes:
        high, low: outputs shown of either kind, at most.
        pairs: pairs judged of one component, at most; every input gives one before any gives two.
        seed: names the folds, the pairs, and the requests' random streams.
    """

    high: int = 10
    low: int = 10
    pairs: int = 100
    seed: int = 0


@dataclass(frozen=True)
class _Question:
    """A pair to judge, the name of its input, and the pairs its examples come from."""

    number: int
    input: str
    pair: Pair
    others: Sequence[Pair]


async def judge(
    generate: Generate,
    buffer: PairBuffer,
    system: System,
    component: str,
    judging: Judging | None = None,
    *,
    held_out: bool = False,
) -> Accuracy:
    """Return how often a language model orders a component's pairs right.

    Every pair is asked about in both orders, and a verdict is the mean of the two: a judge that always
    prefers the first output is right half of the time. So is one whose reply cannot be read, or that fails.

    Args:
        generate: asks the model, such as ``lambda request: executor.ask("smollm2", request)``: cache and
            budget are then those of the executor.
        buffer: holds the draws.
        system: the one they belong to.
        component: whose pairs are judged.
        judging: how many examples and pairs.
        held_out: judge only the inputs that a trained backbone is judged on, by examples from the rest.

    Returns:
        The accuracy over inputs; of no pairs at all, where there are too few inputs to hold any out.

    Raises:
        BudgetExhausted: the budget ended before all pairs were judged.
    """
    judging = judging or Judging()
    template = Template.of(system.components[component])
    asked = _questions(buffer, system, component, judging, held_out)

    async def one(question: _Question, swapped: bool) -> float:
        seed = derive_seed(judging.seed, "judge", component, question.number, swapped)
        request = ask(template, question.pair, question.others, judging, swapped=swapped, seed=seed)
        try:
            text = (await generate(request)).text
        except CallError:
            return 0.5
        return right(text, swapped=swapped)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [[group.create_task(one(q, swapped)) for swapped in (False, True)] for q in asked]
    except BaseExceptionGroup as errors:
        raise first_of(errors) from None
    shares = [sum(task.result() for task in both) / 2 for both in tasks]
    return mean_right(shares, [q.input for q in asked]) if asked else NOTHING


def ask(
    template: Template,
    pair: Pair,
    others: Sequence[Pair],
    judging: Judging,
    *,
    swapped: bool = False,
    seed: int = 0,
) -> Request:
    """Return the question which of a pair's outputs is better; unless ``swapped``, A is the better one.

    Args:
        template: of the component.
        pair: its inputs and two outputs.
        others: pairs of other inputs, best examples first: the chosen outputs led to high rewards, the
            rejected ones to low rewards.
        judging: how many examples.
        swapped: whether B is the better one.
        seed: the request's random stream.
    """
    a, b = (pair.rejected, pair.chosen) if swapped else (pair.chosen, pair.rejected)
    rooms = JUDGED // 2, JUDGED // 4
    parts = [
        f"One step of a larger system is called {template.component}. An output of this step is good when "
        "the final result of the whole system is good. Here are some outputs of the step.",
        *_examples(template, others, judging),
        "Now compare two outputs for the same inputs.\n"
        f"{shortened(template.given(pair.inputs), rooms[0])}\n"
        f"Output A: {_output(a, rooms[1])}\n"
        f"Output B: {_output(b, rooms[1])}",
        "Which output leads to the better final result? Answer with the letter A or B, and nothing else.",
    ]
    return Request((Message("user", "\n\n".join(parts)),), max_tokens=4, seed=seed, cue=CUE)


def right(text: str, *, swapped: bool) -> float:
    """Return 1 when a reply names the better output, 0 for the other one, one half when it names none.

    >>> right(" A.", swapped=False), right("**B**", swapped=False), right("A or B", swapped=False)
    (1.0, 0.0, 0.5)
    """
    found = VERDICT.fullmatch(text.strip().partition("\n")[0])
    if found is None:
        return 0.5
    return float((found[1] == "B") == swapped)


def shortened(values: Mapping[str, object], room: int) -> str:
    """Return fields, one a line, whose longest are cut until all have at most ``room`` characters.

    >>> print(shortened({"passage": "Lima is the capital of Peru.", "question": "Where?"}, 24))
    question: Where?
    passage: Lima is the capi …
    """
    plain = readable_values(values)
    texts = sorted(((n, as_text(v)) for n, v in plain.items()), key=lambda item: len(item[1]))
    lines, left = [], room
    for i, (name, text) in enumerate(texts):
        kept = _cut(text, left // (len(texts) - i))
        left -= len(kept)
        lines.append(f"{name}: {kept}")
    return "\n".join(lines)


def _questions(
    buffer: PairBuffer, system: System, component: str, judging: Judging, held_out: bool
) -> list[_Question]:
    """Return the pairs to judge, each with those of the other folds, no input twice before all once."""
    texts = texts_of(buffer, system, component, held_out=held_out)
    if not texts.enough():
        return []
    pairs = [pair for pair, _ in buffer.pairs(component)]
    parts = texts.apart or tuple(folds(texts.inputs, judging.seed).tolist())
    drawn = generator(judging.seed, "judged").permutation(len(pairs)).tolist()
    asked = [i for i in _in_turns(drawn, texts.inputs) if not texts.apart or texts.apart[i]]
    clearest = _in_turns(sorted(drawn, key=lambda i: -pairs[i].gap), texts.inputs)
    shown = {part: [pairs[i] for i in clearest if parts[i] != part] for part in set(parts)}
    return [_Question(i, texts.inputs[i], pairs[i], shown[parts[i]]) for i in sorted(asked[: judging.pairs])]


def _in_turns(order: Sequence[int], inputs: Sequence[str]) -> list[int]:
    """Return positions in the order given, but no input a second time before all have had a first."""
    turns: Counter[str] = Counter()
    turn = {}
    for i in order:
        turn[i] = turns[inputs[i]]
        turns[inputs[i]] += 1
    return sorted(order, key=lambda i: turn[i])


def _examples(template: Template, others: Sequence[Pair], judging: Judging) -> list[str]:
    """Return what some outputs led to, high and low in turn: the inputs, the output, the verdict."""
    found = []
    for i in range(max(judging.high, judging.low)):
        if i < len(others):
            pair = others[i]
            shown = shortened(template.given(pair.inputs), EACH // 2)
            high = [("good", pair.chosen)] if i < judging.high else []
            low = [("bad", pair.rejected)] if i < judging.low else []
            found += [
                f"{shown}\nOutput: {_output(outputs, EACH // 2)}\nThis output is {kind}."
                for kind, outputs in [*high, *low]
            ]
    return found


def _output(outputs: Mapping[str, object], room: int) -> str:
    """Return outputs as text: a single one without its name."""
    if len(outputs) == 1:
        (value,) = outputs.values()
        return _cut(as_text(readable(value)), room)
    return "\n" + shortened(outputs, room)


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else text[: max(0, room - len(CUT))] + CUT
