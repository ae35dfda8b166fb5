"""Proposer of MIPROv2: a model summarizes the data, describes the system, and writes instructions.

The requests contain the same information as those of DSPy's `dspy.propose.GroundedProposer`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from compound.core.example import Example
from compound.core.narrowing import entry
from compound.execution.rng import derive_seed, generator
from compound.graph.configuration import component_of
from compound.graph.space import Demo
from compound.graph.system import System
from compound.optimization.method import Task
from compound.optimizers.search.proposers.proposing import (
    ask_for_proposal,
    ask_for_text,
    diagram,
    fields,
    outputs_of,
    tried,
    writing_request,
)

MAX_SKIPS = 5  # batches without a new observation before the remaining ones are skipped
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
            shown = "\n".join(
                f"- {fields(row.inputs)}; expected: {fields(row.gold)}" for row in batch
            )
            known = f"Observations on other rows:\n{observations}\n\n" if observations else ""
            add = "Add what they miss, or reply COMPLETE if they miss nothing. " if known else ""
            text = (
                f"Rows of a data set:\n{shown}\n\n{known}"
                "What do all or most of these rows have in common, in subject, form, length and style? "
                f"Which task is the data set probably meant for? {add}Reply with a few sentences."
            )
            found = await self._ask(text, "observe", number)
            if observations and found and COMPLETE.match(found):
                skips += 1
                if skips == MAX_SKIPS:
                    break
            elif found:
                observations = f"{observations}\n{found}".strip()
        if not observations:
            return ""
        text = (
            f"Observations on a data set:\n{observations}\n\n"
            "Condense them to the two or three sentences that matter most."
        )
        return await self._ask(text, "summarize")

    async def write(
        self, key: str, number: int, summary: str, demos: Sequence[Demo], known: Sequence[str]
    ) -> str | None:
        """Return a new instruction for a parameter; ``None`` if the reply is unusable, or the text known."""
        task, system = self.task, self.task.system
        part = outputs_of(system.components[component_of(key)])
        current, graph = entry(system.configuration, key, str), describe_graph(system)
        shown = "\n".join(
            f"- read {fields(demo['inputs'])}; wrote {fields(demo['outputs'])}"
            for demo in demos[:DEMOS]
        )
        examples = f"Examples of the step at work:\n{shown}\n\n" if shown else ""
        steps = f"A system of several steps, some of them calls to language models:\n{graph}\n\n"
        about_system = await self._ask(
            f"{steps}{examples}Describe the task that the system solves, and how its steps work together.",
            *("system", key, number),
        )
        about = await self._ask(
            f"{steps}What it does: {about_system}\n\n{examples}"
            f"Describe the role of this step in the system: {part}",
            *("component", key, number),
        )
        attempts = sorted(tried(task, key), key=lambda attempt: attempt[1] or 0.0)
        before = "\n".join(
            f"<prompt>{text}</prompt>" + ("" if score is None else f" score {score:.3f}")
            for text, score in [*attempts, *((text, None) for text in known)][-EARLIER:]
        )
        tip = TIPS[int(generator(task.seed, "mipro", "tip", key, number).integers(len(TIPS)))]
        text = (
            f"The data set: {summary or 'unknown'}\n\n"
            f"A system of several steps:\n{graph}\n\n"
            f"What it does: {about_system or 'unknown'}\n\n"
            f"One of its steps: {part}\nIts role: {about or 'unknown'}\n\n{examples}"
            + (f"Instructions written before:\n{before}\n\n" if before else "")
            + f"The current instruction of the step:\n<prompt>{current}</prompt>\n\n"
            "Write a new instruction, with which a language model performs this step better. "
            + (f"{tip} " if tip else "")
            + "Write it between <prompt> and </prompt>, and nothing else."
        )
        request = writing_request(text, self._seed("instruction", key, number))
        new = await ask_for_text(task, key, request, self.lm, [current, *known])
        return None if new == current or new in known else new

    async def _ask(self, text: str, *names: str | int) -> str:
        """Return the reply to a request; ``""`` without one."""
        if not self.task.scorer.may_ask(self.lm):
            return ""
        request = writing_request(text, self._seed(*names), DESCRIPTION)
        found = await ask_for_proposal(
            self.task, request, self.lm, lambda reply: reply.strip() or None
        )
        return found or ""

    def _seed(self, *names: str | int) -> int:
        return derive_seed(self.task.seed, "mipro", *names)


def describe_graph(system: System) -> str:
    """Describe a system: what each step reads and writes, and the current instruction of each step."""
    prompts = "\n".join(
        f"Instruction of {key.removesuffix('.prompt')}: {value}"
        for key, value in system.configuration.items()
        if key in system.parameters and system.parameters[key].kind == "text"
    )
    return f"{diagram(system)}\n{prompts}"
