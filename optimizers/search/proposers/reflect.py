"""Prompts that a model writes after reading the data (`describe`) or runs of the system (`reflect`).

Agrawal et al. 2025, "GEPA", and Opsahl-Ong et al. 2024, "MIPRO" (the summary of the data), show the
value of either source. Failing runs come first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence

import numpy as np

from compound.core.example import Example
from compound.execution.rng import derive_seed, generator
from compound.execution.trace import Trace
from compound.graph.component import Component
from compound.graph.configuration import component_of
from compound.graph.space import Text
from compound.graph.system import System
from compound.graph.types import format_ports
from compound.optimization.method import Task
from compound.optimizers.search.proposers.proposing import (
    ask_for_text,
    calls,
    calls_of_others,
    diagram,
    fields,
    result,
    verdict,
    writing_request,
)

MAX_TOKENS = 2000  # of a new prompt
SHOWN = 6  # runs that a reflection reads
BATCH = 8  # rows of the data that a description reads in each request
CHAIN = 5  # requests of a description, each of which reads further rows

MARKED = re.compile(r"<prompt>((?:(?!<prompt>).)*?)</prompt>", re.DOTALL | re.IGNORECASE)
AIM = (
    "Write an improved instruction for this step. Keep what works. State every rule, format, label and fact "
    "that the expected results show and the instruction does not say, in general terms: it will be used with "
    "other inputs, so do not copy single answers. Write it between <prompt> and </prompt>, and nothing else."
)


def purpose_of(component: Component, system: System) -> str:
    """Return a description of a component's task, from its declaration and its place in the system."""
    node = next(node for node in system.all_nodes() if node.component is component)
    read = ", ".join(name for name in node.wires if name not in component.settings) or "nothing"
    return f"{component.name} reads {read} and writes {format_ports(component.outputs)}"


def read_prompt(reply: str) -> str | None:
    """Return the last marked prompt of a reply; ``None`` if there is none, or it is part of the request.

    >>> read_prompt("A draft: <prompt>Answer.</prompt> Better: <prompt>Answer.\\nBe brief.</prompt>")
    'Answer.\\nBe brief.'
    >>> read_prompt("Write it between <prompt> and </prompt>, and nothing else.") is None
    True
    """
    found = [text.strip() for text in MARKED.findall(reply)]
    return next((text for text in reversed(found) if text and text not in AIM), None)


async def _ask(
    task: Task,
    key: str,
    text: str,
    heading: str,
    shown: Sequence[str],
    seed: int,
    *,
    lm: str | None,
    known: Collection[str],
) -> str | None:
    space, component = task.system.parameters[key], task.system.components[component_of(key)]
    assert isinstance(space, Text)  # callers pass keys of texts only
    described = diagram(task.system)
    steps = f"All steps:\n{described}\n\n" if "\n" in described else ""
    kept = "".join(
        f"It must contain this passage, word for word:\n{passage}\n\n" for passage in space.keep
    )
    message = (
        "A language model performs one step of a system. The step: "
        f"{purpose_of(component, task.system)}\n\n{steps}"
        f"Its current instruction:\n<prompt>{text}</prompt>\n\n"
        + "\n\n".join([heading, *shown])
        + f"\n\n{kept}{AIM}"
    )
    request = writing_request(message, seed, MAX_TOKENS)
    new = await ask_for_text(task, key, request, lm, known, read_prompt)
    return None if new in known else new


async def describe(
    task: Task, key: str, text: str, rows: Sequence[Example], number: int, *, lm: str | None
) -> str | None:
    """Return a version of a text that states what rows of the data show, improved with further rows."""
    order = generator(task.seed, "describe", key, number).permutation(len(rows))
    start = text
    for link in range(min(CHAIN, math.ceil(len(rows) / BATCH))):
        if not task.scorer.may_ask(lm):
            break
        batch = [rows[i] for i in order[link * BATCH : (link + 1) * BATCH]]
        shown = [
            f"Input of the system: {fields(row.inputs)}\nExpected result: {fields(row.gold)}"
            for row in batch
        ]
        seed = derive_seed(task.seed, "describe", key, number, link)
        heading = "Inputs of the whole system, with their expected results:"
        text = await _ask(task, key, text, heading, shown, seed, lm=lm, known={text}) or text
    return None if text == start else text


async def reflect(
    task: Task,
    key: str,
    text: str,
    runs: Sequence[tuple[Trace, Example]],
    number: str,
    *,
    lm: str | None,
    known: Collection[str],
) -> str | None:
    """Return a better version of a text, given runs of the system with it."""
    component = task.system.components[component_of(key)]
    fitting = [(trace, example) for trace, example in runs if trace.calls_of(component.name)]
    if not fitting or not task.scorer.may_ask(lm):
        return None
    rng = generator(task.seed, "reflect", key, number)
    scores = np.array([trace.score or 0.0 for trace, _ in fitting])
    succeeded = (scores == scores.max()) & (scores.max() > scores.min())  # these come last
    order = np.lexsort((rng.random(len(fitting)), succeeded)).tolist()
    picked = [fitting[i] for i in order[:SHOWN]]
    shown = [
        f"Run {place}:\n{record(trace, example, component, task.system)}"
        for place, (trace, example) in enumerate(picked, 1)
    ]
    seed = derive_seed(task.seed, "reflect", key, number)
    heading = "Runs of the system with this instruction:"
    return await _ask(task, key, text, heading, shown, seed, lm=lm, known=known)


def record(trace: Trace, example: Example, component: Component, system: System) -> str:
    """Return a run as text: what a component read and wrote, what the others did, and the result."""
    others = calls_of_others(trace, component, system)
    parts = [
        calls(trace, component),
        f"Other steps:\n{others}" if others else "",
        f"Result of the whole system: {result(trace)}",
        f"Expected result: {fields(example.gold)}" if example.gold else "",
        f"Score: {verdict(trace)}",
    ]
    return "\n".join(part for part in parts if part)
