"""LLM diagnoser: judge whether a component is responsible for the failure of a run.

The diagnoser of Chen et al. 2025, "Optimizing Model Selection for Compound AI Systems".
"""

from __future__ import annotations

import re

from compound.core.engine import Message, Request
from compound.core.example import Example
from compound.execution.trace import Trace
from compound.graph.system import System
from compound.optimizers.search.proposers.transcripts import diagram, fields, result, steps

UNDECIDED = 0.5  # the blame if a model gives no verdict
MAX_TOKENS = 300  # of a verdict with its reasons
VERDICT = re.compile(r"\[\s*(?:final\s+answer\s*:\s*(yes|no)|correct\s+answer)\s*\]", re.IGNORECASE)


def verdict_request(system: System, trace: Trace, example: Example, component: str) -> Request:
    """Return the request that asks whether a component is responsible for a wrong result."""
    text = (
        f"A system works in steps:\n{diagram(system)}\n\n"
        f"One run of it read {fields(example.inputs)}\n{steps(trace)}\n"
        f"The result: {result(trace)}\n"
        f"The expected result: {fields(example.gold)}\n\n"
        f"Is the step {component} responsible for a wrong result? Say why in a few sentences. Then end with "
        "[correct answer] if the result is right, [final answer: Yes] if the step is responsible for a wrong "
        "result, or [final answer: No] if it is not."
    )
    return Request((Message("user", text),), max_tokens=MAX_TOKENS)


def has_verdict(reply: str) -> bool:
    """Return whether a reply contains a verdict."""
    return VERDICT.search(reply) is not None


def blame(reply: str) -> float:
    """Return 1 if the last verdict of a reply blames the component, 0 if not, 0.5 without a verdict.

    >>> blame("It lost the name. [final answer: Yes]"), blame("[correct answer]"), blame("Perhaps.")
    (1.0, 0.0, 0.5)
    """
    verdicts = list(VERDICT.finditer(reply))
    if not verdicts:
        return UNDECIDED
    return float((verdicts[-1][1] or "no").lower() == "yes")
