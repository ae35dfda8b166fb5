"""The two requests of textual feedback: what is wrong with a prompt, and the prompt without that.

Yuksekgonul et al. 2024, "TextGrad: Automatic 'Differentiation' via Text".
"""

from __future__ import annotations

from collections.abc import Sequence

from compound.component import Component
from compound.contracts import Message, Request
from compound.optimizers.opro import purpose
from compound.optimizers.transcripts import calls, fields, result, verdict
from compound.trace import Trace


def criticise(component: Component, prompt: str, traces: Sequence[Trace], seed: int) -> Request:
    """Return the request for what a prompt did wrong in a few runs."""
    runs = "\n\n".join(
        f"Run {number}: the system read {fields(trace.inputs)}\n{calls(trace, component)}\n"
        f"The result: {result(trace)}\nIts score: {verdict(trace)}"
        for number, trace in enumerate(traces, start=1)
    )
    text = (
        f"A language model performs one step of a larger system. The step: {purpose(component)}\n\n"
        f"Its instruction:\n<prompt>{prompt}</prompt>\n\n{runs}\n\n"
        "What is wrong with the instruction, such that these runs did not score higher? Give criticism that "
        "holds beyond these runs, in a few sentences. Do not write a new instruction."
    )
    return Request((Message("user", text),), max_tokens=400, temperature=1.0, seed=seed)


def rewrite(component: Component, prompt: str, criticism: str, seed: int) -> Request:
    """Return the request for a prompt that meets a criticism."""
    text = (
        f"A language model performs one step of a larger system. The step: {purpose(component)}\n\n"
        f"Its instruction:\n<prompt>{prompt}</prompt>\n\n"
        f"Criticism of the instruction:\n{criticism}\n\n"
        "Rewrite the instruction so that it meets the criticism. "
        "Write it between <prompt> and </prompt>, and nothing else."
    )
    return Request((Message("user", text),), max_tokens=400, temperature=1.0, seed=seed)
