"""Prompts written by a language model that sees earlier prompts with their scores (OPRO).

Yang et al. 2023, "Large Language Models as Optimizers". The history is kept across iterations and shown
in ascending order; a proposal may span several lines.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from compound.component import Component
from compound.configuration import component_of
from compound.contracts import Message, Request
from compound.errors import CallError
from compound.optimization import Task
from compound.streams import stream

MARK = re.compile(r"<prompt>(.*?)(?:</prompt>|\Z)", re.DOTALL | re.IGNORECASE)


def ask(
    purpose: str,
    history: Sequence[tuple[str, float | None]],
    seed: int,
    shown: int = 10,
) -> Request:
    """Return the request for one new prompt.

    Args:
        purpose: what the component does: its inputs and outputs in words.
        history: prompts and their scores, the last one where a prompt has several; the best ``shown`` are
            shown, the best last. ``None`` is a prompt that has no score yet.
        seed: the request's random stream.
        shown: how many earlier prompts to show.
    """
    best = sorted(dict(history).items(), key=lambda item: -math.inf if item[1] is None else item[1])[-shown:]
    lines = "\n".join(f"<prompt>{text}</prompt> {_score(score)}" for text, score in best)
    text = (
        f"A language model performs one step of a larger system. The step: {purpose}\n\n"
        f"Instructions tried so far, with their scores (higher is better):\n{lines}\n\n"
        "Write one new instruction that is different from all of these and scores higher. "
        "Write it between <prompt> and </prompt>, and nothing else."
    )
    return Request((Message("user", text),), max_tokens=400, temperature=1.0, seed=seed)


async def written(task: Task, key: str, attempt: int, lm: str | None) -> str | None:
    """Ask for a new prompt in place of one of the system's, shown with what earlier tasks tried.

    Returns:
        The prompt; ``None`` when the model gave none that the parameter can hold, or did not answer.
    """
    history: list[tuple[str, float | None]] = [(t.values[key], t.score) for t in task.tried]
    request = ask(
        purpose(task.system.components[component_of(key)]),
        [(task.system.configuration[key], None), *history],
        stream(task.seed, "opro", attempt),
    )
    try:
        text = proposal((await task.scorer.generate(request, lm)).text)
    except CallError:  # a prompt that the model did not write is a candidate less
        return None
    return None if text is None or task.system.parameters[key].problem(text) else text


def purpose(component: Component) -> str:
    """Return what a component does, in the words that its declaration has for it."""
    return f"{component.name} writes {', '.join(component.outputs)}"


def _score(score: float | None) -> str:
    return "not scored yet" if score is None else f"score {score:.3f}"


def proposal(text: str) -> str | None:
    """Return the instruction in a reply, all its lines; ``None`` when there is none.

    >>> proposal("Sure! <prompt>Answer.\\nBe brief.</prompt>")
    'Answer.\\nBe brief.'
    """
    match = MARK.search(text)
    found = match.group(1).strip() if match else ""
    return found or None
