"""Requests of MIPROv2's proposer.

They contain the same information as those of DSPy's proposer (`dspy.propose.GroundedProposer`): a
summary of the data set, written from observations on batches of rows; descriptions of the system
and of one of its components; demonstrations of the component; its current instruction; and a tip.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from compound.core.engine import Message, Request
from compound.core.example import Example
from compound.graph.component import Component
from compound.graph.space import Demo
from compound.graph.system import System
from compound.optimizers.baselines.opro.requests import MAX_TOKENS, Attempt, purpose_of
from compound.optimizers.search.proposers.transcripts import diagram, fields

ROWS = 10  # rows of one batch of observations
BATCHES = 10  # maximum number of batches
COMPLETE = re.compile(r"\W*complete\b", re.IGNORECASE)  # start of a reply that adds no observation
DEMOS = 3  # demonstrations in a request
EARLIER = 5  # earlier instructions in a request
DESCRIPTION = 300  # maximum tokens of an observation, a summary or a description

TIPS: Sequence[str] = (
    "",
    "Try an approach that is out of the ordinary.",
    "Be short and simple.",
    "Describe the task in full detail, so that nothing is left to guess.",
    "Make clear how much depends on a right answer.",
    "Begin with a role that suits the task.",
)


def observation_request(rows: Sequence[Example], earlier: str, seed: int) -> Request:
    """Return the request for observations on rows of a data set."""
    shown = "\n".join(f"- {fields(row.inputs)}; expected: {fields(row.gold)}" for row in rows)
    known = f"Observations on other rows:\n{earlier}\n\n" if earlier else ""
    ask = "Add what they miss, or reply COMPLETE if they miss nothing. " if earlier else ""
    text = (
        f"Rows of a data set:\n{shown}\n\n{known}"
        "What do all or most of these rows have in common, in subject, form, length and style? Which task is "
        f"the data set probably meant for? {ask}Reply with a few sentences."
    )
    return _request(text, DESCRIPTION, seed)


def summary_request(observations: str, seed: int) -> Request:
    """Return the request that condenses all observations."""
    text = (
        f"Observations on a data set:\n{observations}\n\n"
        "Condense them to the two or three sentences that matter most."
    )
    return _request(text, DESCRIPTION, seed)


def describe_graph(system: System) -> str:
    """Describe a system: what each step reads and writes, and the current instruction of each step."""
    prompts = "\n".join(
        f"Instruction of {key.removesuffix('.prompt')}: {value}"
        for key, value in system.configuration.items()
        if key in system.parameters and system.parameters[key].kind == "text"
    )
    return f"{diagram(system)}\n{prompts}"


def system_request(system: System, demos: Sequence[Demo], seed: int) -> Request:
    """Return the request for a description of the whole system."""
    text = (
        f"A system of several steps, some of them calls to language models:\n{describe_graph(system)}\n\n"
        f"{_examples(demos)}Describe the task that the system solves, and how its steps work together."
    )
    return _request(text, DESCRIPTION, seed)


def component_request(
    system: System, component: Component, about_system: str, demos: Sequence[Demo], seed: int
) -> Request:
    """Return the request for a description of one component's role."""
    text = (
        f"A system of several steps, some of them calls to language models:\n{describe_graph(system)}\n\n"
        f"What it does: {about_system}\n\n{_examples(demos)}"
        f"Describe the role of this step in the system: {purpose_of(component)}"
    )
    return _request(text, DESCRIPTION, seed)


@dataclass(frozen=True)
class Briefing:
    """Information for a request for an instruction.

    Attributes:
        tip: advice on the style of the instruction, or ``""``.
    """

    summary: str
    about_system: str
    about_component: str
    demos: Sequence[Demo]
    current: str
    earlier: Sequence[Attempt]
    tip: str


def instruction_request(
    system: System, component: Component, briefing: Briefing, seed: int
) -> Request:
    """Return the request for a new instruction of a component."""
    earlier = "\n".join(
        f"<prompt>{text}</prompt>" + ("" if score is None else f" score {score:.3f}")
        for text, score in briefing.earlier[-EARLIER:]
    )
    text = (
        f"The data set: {briefing.summary or 'unknown'}\n\n"
        f"A system of several steps:\n{describe_graph(system)}\n\n"
        f"What it does: {briefing.about_system or 'unknown'}\n\n"
        f"One of its steps: {purpose_of(component)}\n"
        f"Its role: {briefing.about_component or 'unknown'}\n\n{_examples(briefing.demos)}"
        + (f"Instructions written before:\n{earlier}\n\n" if earlier else "")
        + f"The current instruction of the step:\n<prompt>{briefing.current}</prompt>\n\n"
        "Write a new instruction, with which a language model performs this step better. "
        + (f"{briefing.tip} " if briefing.tip else "")
        + "Write it between <prompt> and </prompt>, and nothing else."
    )
    return _request(text, MAX_TOKENS, seed)


def _request(text: str, max_tokens: int, seed: int) -> Request:
    return Request((Message("user", text),), max_tokens=max_tokens, temperature=1.0, seed=seed)


def _examples(demos: Sequence[Demo]) -> str:
    """Return demonstrations as text, with a heading; ``""`` if there are none."""
    lines = (
        f"- read {fields(demo['inputs'])}; wrote {fields(demo['outputs'])}"
        for demo in demos[:DEMOS]
    )
    shown = "\n".join(lines)
    return f"Examples of the step at work:\n{shown}\n\n" if shown else ""
