"""Requests of OPRO for a new prompt, and the reading of replies.

A request shows the best earlier prompts in ascending order of scores, and a few exemplars of the
task. A proposal may have several lines.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from compound.core.engine import Message, Request
from compound.core.narrowing import entry
from compound.graph.component import Component
from compound.graph.configuration import component_of
from compound.optimization.method import Task
from compound.optimizers.search.proposers.proposing import ask_for_proposal

SHOWN = 20  # earlier prompts in a request, as in the paper
EXEMPLARS = 3  # maximum number of exemplars in a request, as in the paper
MAX_TOKENS = 400  # of a new prompt
INTRODUCTION = "Examples of the step's task:"
Attempt = tuple[
    str, float | None
]  # an earlier prompt with its score; `None` stands for no score yet
MARK = re.compile(r"<prompt>(.*?)(?:</prompt>|\Z)", re.DOTALL | re.IGNORECASE)


def prompt_request(
    purpose: str,
    history: Sequence[Attempt],
    seed: int,
    shown: int = SHOWN,
    exemplars: Sequence[str] = (),
) -> Request:
    """Return the request for one new prompt."""
    best = sorted(
        dict(history).items(), key=lambda item: -math.inf if item[1] is None else item[1]
    )[-shown:]
    lines = "\n".join(
        f"<prompt>{text}</prompt> " + ("not scored yet" if score is None else f"score {score:.3f}")
        for text, score in best
    )
    examples = "\n\n".join(exemplars[:EXEMPLARS])
    text = (
        f"A language model performs one step of a larger system. The step: {purpose}\n\n"
        f"Instructions tried so far, with their scores (higher is better):\n{lines}\n\n"
        + (f"{INTRODUCTION}\n{examples}\n\n" if examples else "")
        + "Write one new instruction that is different from all of these and scores higher. "
        "Write it between <prompt> and </prompt>, and nothing else."
    )
    return Request((Message("user", text),), max_tokens=MAX_TOKENS, temperature=1.0, seed=seed)


async def propose_prompts(
    task: Task,
    key: str,
    history: Sequence[Attempt],
    seeds: Sequence[int],
    *,
    lm: str | None,
    exemplars: Sequence[str] = (),
) -> list[str]:
    """Ask a model for new prompts, each given the same history, and return the distinct new ones."""
    purpose = purpose_of(task.system.components[component_of(key)])
    space, before = task.system.parameters[key], {text for text, _ in history}
    new: list[str] = []

    def read(reply: str) -> str | None:
        text = parse_prompt(reply)
        return None if text is None or space.problem(text) else text

    def is_known(text: str) -> bool:
        return text in before or text in new

    for seed in seeds:
        if not task.scorer.may_ask(lm):
            break
        request = prompt_request(purpose, history, seed, exemplars=exemplars)
        text = await ask_for_proposal(task, request, lm, read, is_known)
        if text is not None and not is_known(text):
            new.append(text)
    return new


def tried(task: Task, key: str) -> list[Attempt]:
    """Return the prompts that earlier jobs scored by the global reward."""
    return [(entry(candidate.values, key, str), candidate.score) for candidate in task.tried]


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
