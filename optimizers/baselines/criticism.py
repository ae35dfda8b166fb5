"""Requests of TextGrad: a criticism of a prompt, and a rewritten prompt that addresses it.

Yuksekgonul et al. 2024, "TextGrad: Automatic 'Differentiation' via Text".
"""

from __future__ import annotations

from collections.abc import Sequence

from compound.engine import Message, Request
from compound.execution.trace import Trace
from compound.graph.bounds import CallBound, Extent
from compound.graph.component import Component
from compound.graph.configuration import component_of
from compound.optimization.bounds import Outlook
from compound.optimizers.search.opro import purpose_of
from compound.optimizers.search.transcripts import (
    calls,
    fields,
    longest_calls,
    longest_of,
    longest_run,
    result,
    verdict,
)

MAX_TOKENS = 400  # of a criticism, and of a prompt


def criticism_request(component: Component, prompt: str, traces: Sequence[Trace], seed: int) -> Request:
    """Return the request for a criticism of a prompt, given a few runs."""
    runs = "\n\n".join(
        f"Run {number}: the system read {fields(trace.inputs)}\n{calls(trace, component)}\n"
        f"The result: {result(trace)}\nIts score: {verdict(trace)}"
        for number, trace in enumerate(traces, start=1)
    )
    text = (
        f"A language model performs one step of a larger system. The step: {purpose_of(component)}\n\n"
        f"Its instruction:\n<prompt>{prompt}</prompt>\n\n{runs}\n\n"
        "What is wrong with the instruction, such that these runs did not score higher? Give criticism that "
        "holds beyond these runs, in a few sentences. Do not write a new instruction."
    )
    return Request((Message("user", text),), max_tokens=MAX_TOKENS, temperature=1.0, seed=seed)


def bounds(outlook: Outlook, steps: int, batch: int, lm: str | None) -> list[CallBound]:
    """Return the bounds of the requests for criticism and for rewriting, each sent ``steps`` times."""
    keys = [key for key in outlook.keys if key in outlook.texts]
    criticised, rewritten = Extent(), Extent()
    inputs = longest_of(example.inputs for example in outlook.train)
    for key in keys:
        component = outlook.system.components[component_of(key)]
        run = inputs + longest_calls(outlook.uses[component.name]) + longest_run(outlook) + Extent(200)
        template = criticism_request(component, "", [], 0).messages[0].content
        request = Extent(len(template.encode())) + outlook.texts[key] + run.times(batch)
        criticised = criticised.union(request)
        template = rewrite_request(component, "", "", 0).messages[0].content
        rewritten = rewritten.union(
            Extent(len(template.encode())) + outlook.texts[key] + Extent(tokens=MAX_TOKENS)
        )
    lms = (lm,) if lm else ()
    return [
        CallBound("criticism", steps, criticised, MAX_TOKENS, lms),
        CallBound("rewriting", steps, rewritten, MAX_TOKENS, lms),
    ]


def rewrite_request(component: Component, prompt: str, criticism: str, seed: int) -> Request:
    """Return the request for a prompt that addresses a criticism."""
    text = (
        f"A language model performs one step of a larger system. The step: {purpose_of(component)}\n\n"
        f"Its instruction:\n<prompt>{prompt}</prompt>\n\n"
        f"Criticism of the instruction:\n{criticism}\n\n"
        "Rewrite the instruction so that it meets the criticism. "
        "Write it between <prompt> and </prompt>, and nothing else."
    )
    return Request((Message("user", text),), max_tokens=MAX_TOKENS, temperature=1.0, seed=seed)
