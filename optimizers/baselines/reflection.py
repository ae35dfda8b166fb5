"""Answers to the questions of a search: texts are run by the scorer, and rewritten from records of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from compound.engine import Message, Request
from compound.errors import TooManyFailures
from compound.example import Example
from compound.execution.rng import derive_seed
from compound.execution.trace import Trace
from compound.graph.bounds import CallBound, Extent
from compound.graph.configuration import component_of
from compound.optimization.bounds import Outlook
from compound.optimization.method import Task
from compound.optimizers.baselines.evolution import Evaluate, Record, Rewrite, Scored
from compound.optimizers.search.proposing import ask
from compound.optimizers.search.transcripts import (
    calls,
    fields,
    longest_calls,
    longest_of,
    longest_run,
    result,
    verdict,
)

WRITTEN = 1000  # tokens of a reflection, at most
HEADINGS = 200  # bytes of the headings of one run in a request, at most

Answer = list[float] | str | None  # scores by example; another text, or None where there is none


class Answers:
    """Answers to a search: those of an earlier attempt again, then new ones.

    Args:
        task: runs candidates and asks the model.
        lm: the model that reflects.
        known: what the earlier attempt had answered.
    """

    def __init__(self, task: Task, lm: str | None, known: Sequence[Answer]) -> None:
        self._task = task
        self._lm = lm
        self._known = len(known)
        self._given = 0
        self.all: list[Answer] = [*known]

    @property
    def new(self) -> bool:
        """Whether this attempt is further than the earlier one."""
        return self._given > self._known

    async def to(self, question: Evaluate | Rewrite) -> Scored | str | None:
        """Return the next answer; scores come with records, but those of the earlier attempt without."""
        records: Sequence[Mapping[str, Record]] = ()
        if self._given == len(self.all):
            if isinstance(question, Evaluate):
                scores, records = await self._scores(question)
                self.all.append(scores)
            else:
                self.all.append(await self._rewritten(question))
        answer = self.all[self._given]
        self._given += 1
        return (answer, records) if isinstance(answer, list) else answer

    async def _scores(self, question: Evaluate) -> Scored:
        task, examples = self._task, question.examples
        try:
            traces = await task.scorer.traces(question.texts, examples)
        except TooManyFailures:  # a text that breaks the runs only loses
            return [task.context.rules.failure_score] * len(examples), []
        records = [self._records(*run, question.texts) for run in zip(traces, examples, strict=True)]
        return [trace.score or 0.0 for trace in traces], records

    def _records(self, trace: Trace, example: Example, keys: Mapping[str, str]) -> dict[str, Record]:
        """Return what there is to say of one run, for the keys of each component that was called in it."""
        found: dict[str, Record] = {}
        for key in keys:
            component = self._task.system.components[component_of(key)]
            if trace.calls_of(component.name):
                expected = {"Expected result": fields(example.gold)} if example.gold else {}
                found[key] = {
                    "Inputs and outputs": calls(trace, component),
                    "Result of the whole system": result(trace),
                    **expected,
                    "Score": verdict(trace),
                }
        return found

    async def _rewritten(self, question: Rewrite) -> str | None:
        """Return what the model writes in place of a text; ``None`` when that is of no use."""
        if not question.records:
            return None
        request = reflect(
            question.text, question.records, derive_seed(self._task.seed, "gepa", len(self.all))
        )
        space = self._task.system.parameters[question.key]

        def read(reply: str) -> str | None:
            found = instruction(reply)
            return None if not found or space.problem(found) else found

        new = await ask(self._task, request, self._lm, read, lambda found: found == question.text)
        return None if new == question.text else new


def reflect(text: str, records: Sequence[Record], seed: int) -> Request:
    """Return the library's request for a text that does better than another did in a few runs."""
    from gepa.strategies.instruction_proposal import InstructionProposalSignature as Reflection

    given = {"current_instruction_doc": text, "dataset_with_feedback": records}
    message = Message("user", Reflection.prompt_renderer(given))
    return Request((message,), max_tokens=WRITTEN, temperature=1.0, seed=seed)


def bound(outlook: Outlook, calls: float, batch: int, lm: str | None) -> CallBound:
    """Return the bound of requests for reflections."""
    template = len(reflect("", [], 0).messages[0].content.encode())
    expected = longest_of(example.gold for example in outlook.train)
    found = Extent()
    for key in outlook.texts:
        if key in outlook.keys:
            record = longest_calls(outlook.uses[component_of(key)]) + longest_run(outlook) + expected
            asked = Extent(template) + outlook.texts[key] + (record + Extent(HEADINGS)).times(batch)
            found = found.joined(asked)
    return CallBound("reflections", calls, found, WRITTEN, (lm,) if lm else ())


def instruction(reply: str) -> str:
    """Return the text between the fences of a reply; all of it where there are none."""
    from gepa.strategies.instruction_proposal import InstructionProposalSignature as Reflection

    text: str = Reflection.output_extractor(reply.strip())["new_instruction"]
    return text
