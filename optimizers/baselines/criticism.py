"""Requests of TextGrad: feedback on outputs and prompts, and a rewritten prompt that addresses it.

Yuksekgonul et al. 2024, "TextGrad: Automatic 'Differentiation' via Text". Each request contains the
same information as that of the authors' library; the wording is our own.
"""

from __future__ import annotations

from collections.abc import Sequence

from compound.core.engine import Message, Request
from compound.core.example import Example
from compound.execution.trace import Call, Trace
from compound.graph.component import Component
from compound.graph.system import System
from compound.optimizers.baselines.opro.requests import purpose_of
from compound.optimizers.search.proposers.transcripts import (
    fields,
    read_and_written,
    result,
    verdict,
)

MAX_TOKENS = 400  # of a feedback, and of a prompt
_ADVICE = "Give specific criticism, in a few sentences; if it is already good, say so."


def loss_request(trace: Trace, example: Example, call: Call, system: System, seed: int) -> Request:
    """Return the request for feedback on an output, given the result of the run and its score."""
    expected = f"The expected result: {fields(example.gold)}\n" if example.gold else ""
    text = (
        f"{_part(system.components[call.component])}\n\n"
        f"The system read {fields(trace.inputs)}\n"
        f"The step wrote {fields(call.outputs)}\n"
        f"The result of the system: {result(trace)}\n{expected}Its score: {verdict(trace)}\n\n"
        f"What is wrong with the output of the step, {purpose_of(system.components[call.component])}, such "
        f"that the score was not higher? {_ADVICE} Do not write a new output."
    )
    return _request(text, seed)


def output_request(
    earlier: Call, call: Call, prompt: str, feedback: str, system: System, seed: int
) -> Request:
    """Return the request for feedback on a call's output, given the feedback on the output of a later call."""
    text = (
        f"{_conversation(call, prompt, feedback, system)}\n\n"
        f"An earlier step, {purpose_of(system.components[earlier.component])}, contributed to what it read:\n"
        f"<output>{fields(earlier.outputs)}</output>\n\n"
        f"What is wrong with the output of the earlier step, such that the feedback arose? {_ADVICE} "
        "Do not write a new output."
    )
    return _request(text, seed)


def prompt_request(call: Call, prompt: str, feedback: str, system: System, seed: int) -> Request:
    """Return the request for feedback on a prompt, given the feedback on the output of one call with it."""
    text = (
        f"{_conversation(call, prompt, feedback, system)}\n\n"
        f"What is wrong with the instruction, such that the feedback arose? {_ADVICE} It will be used again "
        "for other inputs. Do not write a new instruction."
    )
    return _request(text, seed)


def rewrite_request(
    component: Component,
    prompt: str,
    feedback: Sequence[tuple[Call, str]],
    past: Sequence[str],
    constraints: Sequence[str],
    system: System,
    seed: int,
) -> Request:
    """Return the request for a prompt that addresses feedback."""
    runs = "\n\n".join(
        f"Run {number}:\n{read_and_written(call, system)}\nCriticism of the instruction:\n{text}"
        for number, (call, text) in enumerate(feedback, start=1)
    )
    versions = "\n".join(f"<past>{text}</past>" for text in past)
    history = (
        f"Earlier versions of the instruction, oldest first:\n{versions}\n"
        "If the criticism is the same as before, change more.\n\n"
    )
    conditions = "".join(f"- {condition}\n" for condition in constraints)
    conditions = f"It must meet these conditions:\n{conditions}" if constraints else ""
    text = (
        f"{_part(component)}\n\nIts instruction:\n<prompt>{prompt}</prompt>\n\n{runs}\n\n"
        f"{history if past else ''}"
        "Rewrite the instruction so that it meets the criticism. The criticism can be mistaken; keep what is "
        f"right. {conditions}"
        "Write it between <prompt> and </prompt>, and nothing else."
    )
    return _request(text, seed)


def _part(component: Component) -> str:
    return (
        f"A language model performs one step of a larger system. The step: {purpose_of(component)}"
    )


def _conversation(call: Call, prompt: str, feedback: str, system: System) -> str:
    return (
        f"{_part(system.components[call.component])}\n\nIts instruction:\n<prompt>{prompt}</prompt>\n\n"
        f"{read_and_written(call, system)}\n\nFeedback on what it wrote:\n<feedback>{feedback}</feedback>"
    )


def _request(text: str, seed: int) -> Request:
    return Request((Message("user", text),), max_tokens=MAX_TOKENS, temperature=1.0, seed=seed)
