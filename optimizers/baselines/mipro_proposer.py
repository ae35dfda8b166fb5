"""Proposer of MIPROv2: a model summarizes the data, describes the system, and writes instructions.

The requests contain the same information as those of DSPy's `dspy.propose.GroundedProposer`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from compound.core.engine import Request
from compound.core.example import Example
from compound.core.narrowing import entry
from compound.execution.rng import derive_seed, generator
from compound.graph.component import Component
from compound.graph.configuration import component_of
from compound.graph.space import Demo
from compound.graph.system import System
from compound.optimization.method import Task
from compound.optimizers.search.proposers.proposing import (
    Attempt,
    ask_for_proposal,
    ask_for_text,
    diagram,
    fields,
    outputs_of,
    tried,
    writing_request,
)

MAX_SKIPS = 5  # batches without a new observation before the remaining ones are skipped


@dataclass(frozen=True)
class Proposer:
    """Asks a model for instructions."""

    task: Task
    lm: str | None

    async def summarize(self, rows: Sequence[Example]) -> str:
        """Return a summary of a data set, from observations on batches of its rows; ``""`` without any."""
        observations = ""
        skips = 0
        for number in range(min(BATCHES, -(-len(rows) // ROWS))):
            batch = rows[number * ROWS : (number + 1) * ROWS]
            found = await self._ask(
                observation_request(batch, observations, self._seed("observe", number))
            )
            if observations and found and COMPLETE.match(found):
                skips += 1
                if skips == MAX_SKIPS:
                    break
            elif found:
                observations = f"{observations}\n{found}".strip()
        if not observations:
            return ""
        return await self._ask(summary_request(observations, self._seed("summarize"))) or ""

    async def write(
        self, key: str, number: int, summary: str, demos: Sequence[Demo], known: Sequence[str]
    ) -> str | None:
        """Return a new instruction for a parameter; ``None`` if the reply is unusable, or the text known."""
        task, system = self.task, self.task.system
        component = system.components[component_of(key)]
        current = entry(system.configuration, key, str)
        seeds = [self._seed(kind, key, number) for kind in ("system", "component", "instruction")]
        about_system = await self._ask(system_request(system, demos, seeds[0])) or ""
        asked = component_request(system, component, about_system, demos, seeds[1])
        about = await self._ask(asked) or ""
        attempts = sorted(tried(task, key), key=lambda attempt: attempt[1] or 0.0)
        request = instruction_request(
            system,
            component,
            summary=summary,
            about_system=about_system,
            about_component=about,
            demos=demos,
            current=current,
            earlier=[*attempts, *((text, None) for text in known)],
            tip=TIPS[int(generator(task.seed, "mipro", "tip", key, number).integers(len(TIPS)))],
            seed=seeds[2],
        )
        text = await ask_for_text(task, key, request, self.lm, [current, *known])
        return None if text == current or text in known else text

    async def _ask(self, request: Request) -> str | None:
        if not self.task.scorer.may_ask(self.lm):
            return None
        return await ask_for_proposal(
            self.task, request, self.lm, lambda reply: reply.strip() or None
        )

    def _seed(self, *names: str | int) -> int:
        return derive_seed(self.task.seed, "mipro", *names)


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
    return writing_request(text, seed, DESCRIPTION)


def summary_request(observations: str, seed: int) -> Request:
    """Return the request that condenses all observations."""
    text = (
        f"Observations on a data set:\n{observations}\n\n"
        "Condense them to the two or three sentences that matter most."
    )
    return writing_request(text, seed, DESCRIPTION)


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
    return writing_request(text, seed, DESCRIPTION)


def component_request(
    system: System, component: Component, about_system: str, demos: Sequence[Demo], seed: int
) -> Request:
    """Return the request for a description of one component's role."""
    text = (
        f"A system of several steps, some of them calls to language models:\n{describe_graph(system)}\n\n"
        f"What it does: {about_system}\n\n{_examples(demos)}"
        f"Describe the role of this step in the system: {outputs_of(component)}"
    )
    return writing_request(text, seed, DESCRIPTION)


def instruction_request(
    system: System,
    component: Component,
    *,
    summary: str,
    about_system: str,
    about_component: str,
    demos: Sequence[Demo],
    current: str,
    earlier: Sequence[Attempt],
    tip: str,
    seed: int,
) -> Request:
    """Return the request for a new instruction of a component."""
    before = "\n".join(
        f"<prompt>{text}</prompt>" + ("" if score is None else f" score {score:.3f}")
        for text, score in earlier[-EARLIER:]
    )
    text = (
        f"The data set: {summary or 'unknown'}\n\n"
        f"A system of several steps:\n{describe_graph(system)}\n\n"
        f"What it does: {about_system or 'unknown'}\n\n"
        f"One of its steps: {outputs_of(component)}\n"
        f"Its role: {about_component or 'unknown'}\n\n{_examples(demos)}"
        + (f"Instructions written before:\n{before}\n\n" if before else "")
        + f"The current instruction of the step:\n<prompt>{current}</prompt>\n\n"
        "Write a new instruction, with which a language model performs this step better. "
        + (f"{tip} " if tip else "")
        + "Write it between <prompt> and </prompt>, and nothing else."
    )
    return writing_request(text, seed)


def _examples(demos: Sequence[Demo]) -> str:
    lines = (
        f"- read {fields(demo['inputs'])}; wrote {fields(demo['outputs'])}"
        for demo in demos[:DEMOS]
    )
    shown = "\n".join(lines)
    return f"Examples of the step at work:\n{shown}\n\n" if shown else ""
