"""Proposer of MIPROv2: a model summarizes the data, describes the system, and writes instructions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compound.core.engine import Request
from compound.core.example import Example
from compound.core.narrowing import entry
from compound.execution.rng import derive_seed, generator
from compound.graph.configuration import component_of
from compound.graph.space import Demo
from compound.optimization.method import Task
from compound.optimizers.baselines.mipro.requests import (
    BATCHES,
    COMPLETE,
    ROWS,
    TIPS,
    Briefing,
    component_request,
    instruction_request,
    observation_request,
    summary_request,
    system_request,
)
from compound.optimizers.baselines.opro.requests import parse_prompt, tried
from compound.optimizers.search.proposers.proposing import ask_for_proposal

MAX_SKIPS = 5  # batches without a new observation before the remaining ones are skipped


@dataclass(frozen=True)
class Proposer:
    """Asks a model for instructions, with the requests of `requests`.

    Attributes:
        lm: the model; ``None`` for the system's own.
    """

    task: Task
    lm: str | None

    async def summarize(self, rows: Sequence[Example]) -> str:
        """Return a summary of a data set, from observations on batches of its rows; ``""`` if none is given.

        Later batches see earlier observations, and may be declared to add nothing.
        """
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
        """Return a new instruction for a parameter.

        Returns:
            The instruction; ``None`` if the reply was unusable, or the instruction is known.
        """
        task, system = self.task, self.task.system
        component, space = system.components[component_of(key)], system.parameters[key]
        current = entry(system.configuration, key, str)
        seeds = [self._seed(kind, key, number) for kind in ("system", "component", "instruction")]
        about_system = await self._ask(system_request(system, demos, seeds[0])) or ""
        about = (
            await self._ask(component_request(system, component, about_system, demos, seeds[1]))
            or ""
        )
        earlier = [*sorted(tried(task, key), key=lambda attempt: attempt[1] or 0.0)]
        briefing = Briefing(
            summary=summary,
            about_system=about_system,
            about_component=about,
            demos=demos,
            current=current,
            earlier=[*earlier, *((text, None) for text in known)],
            tip=TIPS[int(generator(task.seed, "mipro", "tip", key, number).integers(len(TIPS)))],
        )

        def read(reply: str) -> str | None:
            text = parse_prompt(reply)
            return None if text is None or space.problem(text) else text

        def is_known(text: str) -> bool:
            return text == current or text in known

        request = instruction_request(system, component, briefing, seeds[2])
        text = await ask_for_proposal(task, request, self.lm, read, is_known)
        return None if text is None or is_known(text) else text

    async def _ask(self, request: Request) -> str | None:
        if not self.task.scorer.may_ask(self.lm):
            return None
        return await ask_for_proposal(
            self.task, request, self.lm, lambda reply: reply.strip() or None
        )

    def _seed(self, *names: str | int) -> int:
        return derive_seed(self.task.seed, "mipro", *names)
