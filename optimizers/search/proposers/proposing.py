"""Requests for proposals to a model, the count of their outcomes, and traces as text for prompts."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from compound.core.engine import Message, Request
from compound.core.errors import CallError
from compound.execution.answer_text import after_thoughts
from compound.execution.trace import Call, Trace
from compound.graph.component import Component
from compound.graph.configuration import canonical_json, to_readable_json
from compound.graph.system import System
from compound.optimization.method import Task

MAX_TOKENS = 400  # of a new prompt
NO_REQUESTS = "no further requests to the model: too many failed, or the planned number is used"
FENCE = re.compile(r"```\w*\n(.+?)\n\s*```", re.DOTALL)
MARK = re.compile(r"<prompt>(.*?)(?:</prompt>|\Z)", re.DOTALL | re.IGNORECASE)
Attempt = tuple[str, float | None]  # an earlier prompt with its score, if it has one

T = TypeVar("T")


def writing_request(text: str, seed: int, max_tokens: int = MAX_TOKENS) -> Request:
    """Return a request with one message of a user, whose answers vary."""
    return Request((Message("user", text),), max_tokens=max_tokens, temperature=1.0, seed=seed)


def parse_prompt(reply: str) -> str | None:
    """Return the prompt in a reply, with all its lines; ``None`` if there is none.

    >>> parse_prompt("Sure! <prompt>Answer.\\nBe brief.</prompt>")
    'Answer.\\nBe brief.'
    """
    match = MARK.search(reply)
    return (match.group(1).strip() if match else "") or None


def tried(task: Task, key: str) -> list[Attempt]:
    """Return the prompts that earlier jobs scored by the global reward."""
    return [(str(candidate.values[key]), candidate.score) for candidate in task.tried]


def outputs_of(component: Component) -> str:
    """Return a description of a component's task, from its declaration."""
    return f"{component.name} writes {', '.join(component.outputs)}"


async def ask_for_text(
    task: Task,
    key: str,
    request: Request,
    lm: str | None,
    known: Collection[str],
    parse: Callable[[str], str | None] = parse_prompt,
) -> str | None:
    """Ask a model for a text of a parameter; return it if it is valid, even if it is known."""
    space = task.system.parameters[key]

    def read(reply: str) -> str:
        fenced = FENCE.findall(reply)
        text = unwrap(parse(reply) or (fenced[0] if len(fenced) == 1 else ""))
        if problem := space.problem(text) if text else f"no <prompt>…</prompt> in {reply!r:.100}":
            raise ValueError(problem)
        return text

    return await ask_for_proposal(task, request, lm, read, lambda text: text in known)


def unwrap(text: str) -> str:
    """Return a prompt without thoughts before it, and without a fence or quotation marks around it.

    >>> unwrap('"Answer."'), unwrap('Answer "yes" or "no".')
    ('Answer.', 'Answer "yes" or "no".')
    """
    text = after_thoughts(text).strip()
    found = FENCE.fullmatch(text) or re.fullmatch(r'"([^"]+)"', text)
    inner = found and re.search(r"^\s*```(\w*)", found[1], re.MULTILINE)
    is_around = found and (not inner or inner[1])  # the first fence in it would end an earlier one
    return found[1].strip() if found and is_around else text


async def ask_for_proposal(
    task: Task,
    request: Request,
    lm: str | None,
    read: Callable[[str], T | None],
    is_known: Callable[[T], bool] = lambda proposal: False,
) -> T | None:
    """Ask a model for a proposal, and count the outcome as proposed, duplicate, unusable or failed.

    ``read`` parses a reply without its thoughts; it raises `ValueError` or returns ``None`` for an
    unusable one, and so is a text that contains the answer of a held-out example.
    """
    try:
        reply = await task.scorer.generate(request, lm)
    except CallError:  # the scorer counts failed requests; the job continues without this proposal
        return None
    try:
        proposal, reason = read(after_thoughts(reply.text)), ""
    except ValueError as error:
        proposal, reason = None, str(error)
    if isinstance(proposal, str) and task.scorer.leaks(proposal, request, lm):
        proposal, reason = None, "it contains the expected answer of a held-out example"
    if proposal is None:
        task.scorer.record_outcome("unusable", lm, reason)
    else:
        task.scorer.record_outcome("duplicate" if is_known(proposal) else "proposed", lm)
    return proposal


VALUE = 600  # maximum characters of one value
FAILURE = 300  # maximum bytes of the message of a failed call
FEEDBACK = 2_000  # maximum bytes of a metric's feedback


def fields(values: Mapping[str, object]) -> str:
    """Return values on one line, each shortened.

    >>> fields({"question": "Which river?", "k": 3})
    'question: Which river?; k: 3'
    """
    return "; ".join(f"{name}: {_shortened(value)}" for name, value in values.items()) or "nothing"


def steps(trace: Trace) -> str:
    """Return one line per call of a trace: its address and outputs, and the message if it failed."""
    return "\n".join(
        f"{call.address} wrote {fields(call.outputs)}"
        + (f" (failed: {_cut_bytes(call.failure.message, FAILURE)})" if call.failure else "")
        for call in trace.calls
    )


def calls(trace: Trace, component: Component) -> str:
    """Return the inputs and outputs of a component's calls in a trace, two lines per call."""
    return "\n".join(_lines(call, component, "It") for call in trace.calls_of(component.name))


def calls_of_others(trace: Trace, component: Component, system: System) -> str:
    """Return the inputs and outputs of the other components' calls in a trace, in order."""
    others = [call for call in trace.calls if call.component != component.name]
    parts = system.components
    return "\n".join(_lines(call, parts[call.component], call.address) for call in others)


def read_and_written(call: Call, system: System) -> str:
    """Return the inputs and outputs of a call, on two lines."""
    return _lines(call, system.components[call.component], "It")


def _lines(call: Call, component: Component, subject: str) -> str:
    """Return the inputs of a call, without settings, and its outputs, with the message if it failed."""
    given = {name: value for name, value in call.inputs.items() if name not in component.settings}
    failed = f" (failed: {_cut_bytes(call.failure.message, FAILURE)})" if call.failure else ""
    return f"{subject} read {fields(given)}\n{subject} wrote {fields(call.outputs)}{failed}"


def result(trace: Trace) -> str:
    """Return the outputs of a run, or the message if it failed."""
    if trace.failure:
        return f"the run failed: {_cut_bytes(trace.failure.message, FAILURE)}"
    return fields(trace.outputs)


def verdict(trace: Trace) -> str:
    """Return the score of a run, with the metric's feedback if there is any."""
    return f"{trace.score or 0.0:.3f}" + (
        f" ({_cut_bytes(trace.feedback, FEEDBACK)})" if trace.feedback else ""
    )


def diagram(system: System) -> str:
    """Return a description of the inputs and outputs of all nodes, including nested ones, one per line."""
    return "\n".join(
        f"{node.name}{'' if node.name == node.component.name else f' (a use of {node.component.name})'}"
        f" reads {', '.join(source.label for source in node.wires.values()) or 'nothing'}"
        f" and writes {', '.join(node.component.outputs)}"
        for node in system.all_nodes()
    )


def _shortened(value: object) -> str:
    text = value if isinstance(value, str) else canonical_json(to_readable_json(value))
    return text if len(text) <= VALUE else f"{text[:VALUE]} …"


def _cut_bytes(text: str, longest: int) -> str:
    encoded = text.encode(errors="replace")
    return text if len(encoded) <= longest else f"{encoded[:longest].decode(errors='ignore')} …"
