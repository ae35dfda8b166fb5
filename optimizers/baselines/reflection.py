"""Answers to the questions of GEPA's search: score texts, and rewrite them by reflecting on runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import Field

from compound.core.engine import Message, Request
from compound.core.errors import TooManyFailures
from compound.core.example import Example
from compound.core.loops import gather
from compound.core.storage.state import State
from compound.execution.rng import derive_seed
from compound.execution.trace import Trace
from compound.graph.configuration import component_of
from compound.optimization.method import Task
from compound.optimizers.baselines.evolution import Evaluate, Record, Reflection, Rewrite, Scored
from compound.optimizers.baselines.gepa_settings import GEPASettings
from compound.optimizers.search.proposers.proposing import ask_for_proposal
from compound.optimizers.search.proposers.transcripts import (
    calls,
    calls_of_others,
    fields,
    result,
    verdict,
)

OVERALL = "score"  # name of the objective of a metric without parts


class Scores(State):
    """An answer: the scores of texts on examples.

    Attributes:
        parts: the scores of each example by objective; empty if the search has one objective.
    """

    scores: list[float]
    parts: list[dict[str, float]] = Field(default_factory=list)


Answer = Scores | str | None  # scores by example, or a new text (None if there is none)


def objectives_of(traces: Sequence[Trace]) -> tuple[str, ...]:
    """Return the names of a metric's parts in scored runs; `OVERALL` if there are none."""
    return tuple(sorted({name for trace in traces for name in trace.parts})) or (OVERALL,)


def scores_of(traces: Sequence[Trace], objectives: Sequence[str], failed: float) -> Scores:
    """Return the scores of runs; a missing part has the score of a failed run."""
    scores = [trace.score or 0.0 for trace in traces]
    parts = [
        {name: score if name == OVERALL else trace.parts.get(name, failed) for name in objectives}
        for score, trace in zip(scores, traces, strict=True)
    ]
    return Scores(scores=scores, parts=parts if objectives else [])


class Answers:
    """Answers to a search: replays the answers of an interrupted attempt, then gives new ones."""

    def __init__(self, task: Task, settings: GEPASettings, known: Sequence[Answer]) -> None:
        self._task = task
        self._settings = settings
        self._known = len(known)
        self._given = 0
        self.all: list[Answer] = [*known]
        incumbent = known[0]
        assert isinstance(incumbent, Scores)
        self._objectives = tuple(incumbent.parts[0]) if incumbent.parts else ()

    @property
    def has_new(self) -> bool:
        """Whether answers were given beyond the replayed ones."""
        return self._given > self._known

    async def answer(self, question: Evaluate | Rewrite) -> list[Scored] | list[str | None]:
        """Return the next answers, one per item of a question; replayed scores have no records."""
        place, count = self._given, len(question.items)
        self._given += count
        if isinstance(question, Evaluate):
            return await self._evaluate(question, place)
        if place == len(self.all):
            self.all += await gather(
                self._rewrite(item, place + number) for number, item in enumerate(question.items)
            )
        return [
            answer for answer in self.all[place : place + count] if not isinstance(answer, Scores)
        ]

    async def _evaluate(self, question: Evaluate, place: int) -> list[Scored]:
        records: list[Sequence[Mapping[str, Record]]] = [()] * len(question.items)
        if place == len(self.all):
            found = await gather(self._run(texts, examples) for texts, examples in question.items)
            self.all += [scores for scores, _ in found]
            records = [run for _, run in found]
        answers = self.all[place : place + len(question.items)]
        return [
            Scored(answer.scores, answer.parts, run)
            for answer, run in zip(answers, records, strict=True)
            if isinstance(answer, Scores)
        ]

    async def _run(
        self, texts: Mapping[str, str], examples: Sequence[Example]
    ) -> tuple[Scores, Sequence[Mapping[str, Record]]]:
        task, failed = self._task, self._task.context.rules.failure_score
        try:
            traces = await task.scorer.traces(texts, examples)
        except TooManyFailures:  # texts that break the runs get the failure score
            parts = [dict.fromkeys(self._objectives, failed) for _ in examples if self._objectives]
            return Scores(scores=[failed] * len(examples), parts=parts), []
        records = [self._records(*run, texts) for run in zip(traces, examples, strict=True)]
        return scores_of(traces, self._objectives, failed), records

    def _records(
        self, trace: Trace, example: Example, keys: Mapping[str, str]
    ) -> dict[str, Record]:
        """Return the record of a run for the keys of each component that was called in it."""
        system, records = self._task.system, dict[str, Record]()
        for key in keys:
            component = system.components[component_of(key)]
            if trace.calls_of(component.name):
                others = (
                    calls_of_others(trace, component, system) if self._settings.whole_runs else ""
                )
                records[key] = {
                    "Inputs and outputs": calls(trace, component),
                    **({"Other steps of the run": others} if others else {}),
                    "Result of the whole system": result(trace),
                    **({"Expected result": fields(example.gold)} if example.gold else {}),
                    "Score": verdict(trace),
                }
        return records

    async def _rewrite(self, item: Reflection, number: int) -> str | None:
        """Return the model's new version of a text; ``None`` if it is invalid or unchanged."""
        if not item.records:
            return None
        seed = derive_seed(self._task.seed, "gepa", number)
        request = reflection_request(item.text, item.records, seed, self._settings)
        space = self._task.system.parameters[item.key]

        def read(reply: str) -> str | None:
            text = parse_instruction(reply)
            return None if not text or space.problem(text) else text

        new = await ask_for_proposal(
            self._task, request, self._settings.lm, read, lambda text: text == item.text
        )
        return None if new == item.text else new


def reflection_request(
    text: str, records: Sequence[Record], seed: int, settings: GEPASettings
) -> Request:
    """Return the library's request for a better version of a text, given records of runs."""
    from gepa.strategies.instruction_proposal import InstructionProposalSignature as Form

    given = {
        "current_instruction_doc": text,
        "dataset_with_feedback": records,
        "prompt_template": settings.template,
    }
    message = Message("user", Form.prompt_renderer(given))
    return Request((message,), max_tokens=settings.max_tokens, temperature=1.0, seed=seed)


def parse_instruction(reply: str) -> str:
    """Return the text between code fences in a reply; the whole reply without fences."""
    from gepa.strategies.instruction_proposal import InstructionProposalSignature as Form

    text: str = Form.output_extractor(reply.strip())["new_instruction"]
    return text
