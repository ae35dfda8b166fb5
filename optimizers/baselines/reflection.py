"""Answers to the questions of GEPA's search: score texts, and rewrite them by reflecting on runs."""

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
from compound.optimizers.search.proposing import ask_for_proposal
from compound.optimizers.search.transcripts import (
    calls,
    fields,
    longest_calls,
    longest_of,
    longest_run,
    result,
    verdict,
)

MAX_TOKENS = 1000  # of a reflection
HEADINGS = 200  # upper bound on the bytes of headings per run in a request

Answer = list[float] | str | None  # scores by example, or a new text (None if there is none)


class Answers:
    """Answers to a search: replays the answers of an interrupted attempt, then gives new ones.

    Args:
        task: the job.
        lm: the model that writes reflections.
        known: the answers of the interrupted attempt.

    Attributes:
        all: all answers, in order.
    """

    def __init__(self, task: Task, lm: str | None, known: Sequence[Answer]) -> None:
        self._task = task
        self._lm = lm
        self._known = len(known)
        self._given = 0
        self.all: list[Answer] = [*known]

    @property
    def has_new(self) -> bool:
        """Whether answers were given beyond the replayed ones."""
        return self._given > self._known

    async def answer(self, question: Evaluate | Rewrite) -> Scored | str | None:
        """Return the next answer; replayed scores have no records."""
        records: Sequence[Mapping[str, Record]] = ()
        if self._given == len(self.all):
            if isinstance(question, Evaluate):
                scores, records = await self._scores(question)
                self.all.append(scores)
            else:
                self.all.append(await self._rewrite(question))
        answer = self.all[self._given]
        self._given += 1
        return (answer, records) if isinstance(answer, list) else answer

    async def _scores(self, question: Evaluate) -> Scored:
        task, examples = self._task, question.examples
        try:
            traces = await task.scorer.traces(question.texts, examples)
        except TooManyFailures:  # a text that breaks the runs gets the failure score
            return [task.context.rules.failure_score] * len(examples), []
        records = [self._records(*run, question.texts) for run in zip(traces, examples, strict=True)]
        return [trace.score or 0.0 for trace in traces], records

    def _records(self, trace: Trace, example: Example, keys: Mapping[str, str]) -> dict[str, Record]:
        """Return the record of a run for the keys of each component that was called in it."""
        records: dict[str, Record] = {}
        for key in keys:
            component = self._task.system.components[component_of(key)]
            if trace.calls_of(component.name):
                expected = {"Expected result": fields(example.gold)} if example.gold else {}
                records[key] = {
                    "Inputs and outputs": calls(trace, component),
                    "Result of the whole system": result(trace),
                    **expected,
                    "Score": verdict(trace),
                }
        return records

    async def _rewrite(self, question: Rewrite) -> str | None:
        """Return the model's new version of a text; ``None`` if it is invalid or unchanged."""
        if not question.records:
            return None
        request = reflection_request(
            question.text, question.records, derive_seed(self._task.seed, "gepa", len(self.all))
        )
        space = self._task.system.parameters[question.key]

        def read(reply: str) -> str | None:
            text = parse_instruction(reply)
            return None if not text or space.problem(text) else text

        new = await ask_for_proposal(self._task, request, self._lm, read, lambda text: text == question.text)
        return None if new == question.text else new


def reflection_request(text: str, records: Sequence[Record], seed: int) -> Request:
    """Return the library's request for a better version of a text, given records of runs."""
    from gepa.strategies.instruction_proposal import InstructionProposalSignature as Reflection

    given = {"current_instruction_doc": text, "dataset_with_feedback": records}
    message = Message("user", Reflection.prompt_renderer(given))
    return Request((message,), max_tokens=MAX_TOKENS, temperature=1.0, seed=seed)


def bound(outlook: Outlook, calls: float, batch: int, lm: str | None) -> CallBound:
    """Return the bound of requests for reflections."""
    template = len(reflection_request("", [], 0).messages[0].content.encode())
    expected = longest_of(example.gold for example in outlook.train)
    prompt = Extent()
    for key in outlook.texts:
        if key in outlook.keys:
            record = longest_calls(outlook.uses[component_of(key)]) + longest_run(outlook) + expected
            request = Extent(template) + outlook.texts[key] + (record + Extent(HEADINGS)).times(batch)
            prompt = prompt.union(request)
    return CallBound("reflections", calls, prompt, MAX_TOKENS, (lm,) if lm else ())


def parse_instruction(reply: str) -> str:
    """Return the text between code fences in a reply; the whole reply without fences."""
    from gepa.strategies.instruction_proposal import InstructionProposalSignature as Reflection

    text: str = Reflection.output_extractor(reply.strip())["new_instruction"]
    return text
