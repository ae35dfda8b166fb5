"""Prompts written by a language model that sees earlier prompts with their scores (OPRO).

Yang et al. 2023, "Large Language Models as Optimizers". The history is kept across iterations and shown
in ascending order; a proposal may span several lines.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence

from compound.engine import Message, Request
from compound.execution.rng import derive_seed
from compound.graph.bounds import CallBound, Extent
from compound.graph.component import Component
from compound.graph.configuration import component_of
from compound.narrowing import entry
from compound.optimization.bounds import Outlook
from compound.optimization.method import Task
from compound.optimizers.search.proposing import ask as send

SHOWN = 10  # earlier prompts in a request
WRITTEN = 400  # tokens of a new prompt, at most
MARK = re.compile(r"<prompt>(.*?)(?:</prompt>|\Z)", re.DOTALL | re.IGNORECASE)


def ask(
    purpose: str,
    history: Sequence[tuple[str, float | None]],
    seed: int,
    shown: int = SHOWN,
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
    return Request((Message("user", text),), max_tokens=WRITTEN, temperature=1.0, seed=seed)


async def written(
    task: Task, key: str, attempt: int, lm: str | None, known: Collection[str] = ()
) -> str | None:
    """Ask for a new prompt in place of one of the system's, shown with what earlier tasks tried.

    Args:
        task: the job.
        key: names the prompt.
        attempt: its number in the job, which names the request's random stream.
        lm: the model; the system's own when ``None``.
        known: prompts that count as duplicates, besides the present one and those tried before.

    Returns:
        The prompt; ``None`` when the model gave none that the parameter can hold, or did not answer.
    """
    history: list[tuple[str, float | None]] = [(t.values[key], t.score) for t in task.tried]
    request = ask(
        purpose(task.system.components[component_of(key)]),
        [(entry(task.system.configuration, key, str), None), *history],
        derive_seed(task.seed, "opro", attempt),
    )
    space, before = task.system.parameters[key], {task.system.configuration[key], *(t for t, _ in history)}

    def read(reply: str) -> str | None:
        text = proposal(reply)
        return None if text is None or space.problem(text) else text

    return await send(task, request, lm, read, lambda text: text in before or text in known)


def bound(outlook: Outlook, key: str, calls: float, lm: str | None) -> CallBound:
    """Return the bound of requests for new prompts in place of one."""
    template = ask(purpose(outlook.system.components[component_of(key)]), [], 0).messages[0].content
    earlier = (outlook.texts[key] + Extent(len("<prompt></prompt> score -0.000\n") + 16)).times(SHOWN)
    prompt = Extent(len(template.encode())) + earlier
    return CallBound("new prompts", calls, prompt, WRITTEN, (lm,) if lm else ())


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
