"""Prompts written by a language model that sees earlier prompts with their scores (OPRO).

Yang et al. 2023, "Large Language Models as Optimizers". The history includes all iterations, and is shown in
ascending order of scores. A proposal may have several lines.
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
from compound.optimizers.search.proposing import ask_for_proposal

SHOWN = 10  # earlier prompts in a request
MAX_TOKENS = 400  # of a new prompt
MARK = re.compile(r"<prompt>(.*?)(?:</prompt>|\Z)", re.DOTALL | re.IGNORECASE)


def prompt_request(
    purpose: str,
    history: Sequence[tuple[str, float | None]],
    seed: int,
    shown: int = SHOWN,
) -> Request:
    """Return the request for one new prompt.

    Args:
        purpose: a description of the component's task.
        history: earlier prompts with their scores, of which the best ``shown`` are included, best last. If a
            prompt occurs several times, its last score counts; ``None`` stands for no score yet.
        seed: the seed of the request.
        shown: the number of earlier prompts to include.
    """
    best = sorted(dict(history).items(), key=lambda item: -math.inf if item[1] is None else item[1])[-shown:]
    lines = "\n".join(
        f"<prompt>{text}</prompt> " + ("not scored yet" if score is None else f"score {score:.3f}")
        for text, score in best
    )
    text = (
        f"A language model performs one step of a larger system. The step: {purpose}\n\n"
        f"Instructions tried so far, with their scores (higher is better):\n{lines}\n\n"
        "Write one new instruction that is different from all of these and scores higher. "
        "Write it between <prompt> and </prompt>, and nothing else."
    )
    return Request((Message("user", text),), max_tokens=MAX_TOKENS, temperature=1.0, seed=seed)


async def propose_prompt(
    task: Task, key: str, attempt: int, lm: str | None, known: Collection[str] = ()
) -> str | None:
    """Ask a model for a new prompt, given the prompts that earlier jobs tried.

    Args:
        task: the job.
        key: the parameter.
        attempt: the number of the attempt in the job, from which the seed is derived.
        lm: the model; ``None`` for the system's own.
        known: further prompts to count as duplicates, besides the current one and the tried ones.

    Returns:
        The prompt; ``None`` if the call failed or the reply had no valid prompt.
    """
    history: list[tuple[str, float | None]] = [(t.values[key], t.score) for t in task.tried]
    request = prompt_request(
        purpose_of(task.system.components[component_of(key)]),
        [(entry(task.system.configuration, key, str), None), *history],
        derive_seed(task.seed, "opro", attempt),
    )
    space, before = task.system.parameters[key], {task.system.configuration[key], *(t for t, _ in history)}

    def read(reply: str) -> str | None:
        text = parse_prompt(reply)
        return None if text is None or space.problem(text) else text

    return await ask_for_proposal(task, request, lm, read, lambda text: text in before or text in known)


def bound(outlook: Outlook, key: str, calls: float, lm: str | None) -> CallBound:
    """Return the bound of requests for new values of a prompt."""
    purpose = purpose_of(outlook.system.components[component_of(key)])
    template = prompt_request(purpose, [], 0).messages[0].content
    earlier = (outlook.texts[key] + Extent(len("<prompt></prompt> score -0.000\n") + 16)).times(SHOWN)
    prompt = Extent(len(template.encode())) + earlier
    return CallBound("new prompts", calls, prompt, MAX_TOKENS, (lm,) if lm else ())


def purpose_of(component: Component) -> str:
    """Return a description of a component's task, from its declaration."""
    return f"{component.name} writes {', '.join(component.outputs)}"


def parse_prompt(text: str) -> str | None:
    """Return the prompt in a reply, with all its lines; ``None`` if there is none.

    >>> parse_prompt("Sure! <prompt>Answer.\\nBe brief.</prompt>")
    'Answer.\\nBe brief.'
    """
    match = MARK.search(text)
    return (match.group(1).strip() if match else "") or None
