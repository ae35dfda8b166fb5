"""A judge of one run: is this component to blame for the failure?

The diagnoser of Chen et al. 2025, "Optimizing Model Selection for Compound AI Systems".
"""

from __future__ import annotations

import re

from compound.engine import Message, Request
from compound.example import Example
from compound.execution.trace import Trace
from compound.graph.bounds import CallBound, Extent
from compound.graph.system import System
from compound.optimization.bounds import Outlook
from compound.optimizers.search.transcripts import (
    diagram,
    fields,
    longest_of,
    longest_run,
    longest_steps,
    result,
    steps,
)

UNDECIDED = 0.5
WRITTEN = 300  # tokens of a verdict with its reasons, at most
VERDICT = re.compile(r"\[\s*(?:final\s+answer\s*:\s*(yes|no)|correct\s+answer)\s*\]", re.IGNORECASE)


def ask(system: System, trace: Trace, example: Example, component: str) -> Request:
    """Return the request that asks whether ``component`` made a run fail."""
    text = (
        f"A system works in steps:\n{diagram(system)}\n\n"
        f"One run of it read {fields(example.inputs)}\n{steps(trace)}\n"
        f"The result: {result(trace)}\n"
        f"The expected result: {fields(example.gold)}\n\n"
        f"Is the step {component} responsible for a wrong result? Say why in a few sentences. Then end with "
        "[correct answer] if the result is right, [final answer: Yes] if the step is responsible for a wrong "
        "result, or [final answer: No] if it is not."
    )
    return Request((Message("user", text),), max_tokens=WRITTEN)


def verdicts(outlook: Outlook, calls: float, lm: str | None) -> CallBound:
    """Return the bound of requests for verdicts."""
    empty = Trace("", "", 0, 0, {}, ())
    template = ask(outlook.system, empty, Example("", {}), "").messages[0].content
    names = max(len(name.encode()) for name in outlook.system.components)
    run = longest_of(example.inputs for example in outlook.train) + longest_steps(outlook)
    expected = longest_of(example.gold for example in outlook.train)
    prompt = Extent(len(template.encode()) + names) + run + longest_run(outlook) + expected
    return CallBound("verdicts", calls, prompt, WRITTEN, (lm,) if lm else ())


def judged(reply: str) -> bool:
    """Return whether a reply holds a verdict."""
    return VERDICT.search(reply) is not None


def blame(reply: str) -> float:
    """Return 1 when a reply blames the component, 0 when it does not, one half when it does not say.

    The last verdict counts.

    >>> blame("It lost the name. [final answer: Yes]"), blame("[correct answer]"), blame("Perhaps.")
    (1.0, 0.0, 0.5)
    """
    found = list(VERDICT.finditer(reply))
    if not found:
        return UNDECIDED
    return float((found[-1][1] or "no").lower() == "yes")
