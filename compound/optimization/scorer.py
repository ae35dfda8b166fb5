"""Score an optimizer's candidates by the global reward on train examples, within a job's share."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from compound.core.engine import Completion, Request
from compound.core.errors import DeclarationError
from compound.core.example import Example
from compound.evaluation.evaluate import Evaluation, OnTrace, evaluate_all, raise_too_many_failures
from compound.evaluation.metrics.text import normalize
from compound.evaluation.statistics import binomial_tail
from compound.execution.executor import Executor
from compound.execution.trace import Trace
from compound.graph.configuration import canonical_json
from compound.graph.registry.engines import worst_case
from compound.graph.system import System
from compound.optimization.method import Problem, ScoredCandidate
from compound.optimization.proposals import ProposalOutcome, Proposals
from compound.optimization.settings.base import references

TRAIN_SAMPLE = -1  # one sample index for the whole search, so that equal runs come from the cache
CHANCE = 0.01  # significance level of the test for systematic failure


def has_free_repeats(system: System) -> bool:
    """Return whether repeating a run costs nothing, because its counted calls come from the cache."""
    return any(component.cacheable for component in system.components.values())


def _where_to_name(problem: Problem) -> str:
    for section, settings in problem.method.sections.items():
        for found in references(settings, (section,)):
            if found.kind == "model":
                return f"set optimize.{'.'.join(map(str, found.path))}, or the lm of the system"
    return "set the lm of the system"


class JobScorer:
    """Implements `compound.optimization.method.Scorer` for one job.

    Args:
        problem: provides metric and rules.
        executor: runs candidates, with the run's cache and budget.
        incumbent: the system that candidates change.
        share: system runs that the job may spend.
        spent: system runs on the meter when the job started.
        proposals: ledger of proposal requests; default: one without limits.
        runs_left: returns the system runs left in the budget; default: the meter's own estimate.
        observe: called with the systems to run; returns a receiver of their traces.
    """

    def __init__(
        self,
        problem: Problem,
        executor: Executor,
        incumbent: System,
        share: float,
        spent: float,
        proposals: Proposals | None = None,
        runs_left: Callable[[], float] | None = None,
        *,
        observe: Callable[[Sequence[System]], OnTrace] | None = None,
    ) -> None:
        self._problem = problem
        self._executor = executor
        self._incumbent = incumbent
        self._share = share
        self._spent = spent
        self._scores: dict[str, ScoredCandidate] = {}
        give_up = problem.settings.budget.max_proposal_failures
        self._proposals = proposals or Proposals(executor.meter, give_up=give_up)
        self._runs_left = runs_left or executor.meter.remaining_runs
        self._observe = observe
        self._violations: list[str] = []

    @property
    def violation(self) -> str:
        """The first score outside the bounds that the metric declares; ``""`` without one."""
        return next(iter(self._violations), "")

    @property
    def runs_left(self) -> float:
        """System runs that this job may still spend."""
        used = self._executor.meter.system_runs - self._spent
        return max(0.0, min(self._share - used, self._runs_left()))

    @property
    def has_free_repeats(self) -> bool:
        """Whether rescoring a candidate on the same examples costs no system runs."""
        return has_free_repeats(self._incumbent)

    async def score(
        self,
        candidates: Sequence[Mapping[str, Any]],
        examples: Sequence[Example],
        *,
        record: bool = True,
    ) -> list[Evaluation]:
        """Run and score each candidate on the same examples, concurrently."""
        evaluations = await self._evaluate(candidates, examples, None, record=record)
        if not record:
            return evaluations
        for values, evaluation in zip(candidates, evaluations, strict=True):
            full = {**self._incumbent.configuration.to_json(), **values}
            self._scores[canonical_json(full)] = ScoredCandidate(
                full, evaluation.mean, len(examples)
            )
        return evaluations

    async def traces(self, values: Mapping[str, Any], examples: Sequence[Example]) -> list[Trace]:
        """Return the scored traces of one candidate, in order."""
        traces: list[Trace] = []
        await self._evaluate([values], examples, lambda _, trace: traces.append(trace))
        return traces

    async def _evaluate(
        self,
        candidates: Sequence[Mapping[str, object]],
        examples: Sequence[Example],
        on_trace: OnTrace | None,
        *,
        record: bool = True,
    ) -> list[Evaluation]:
        """Evaluate candidates; raise if all of them fail significantly more often than ``max_failed``."""
        systems = [self._incumbent.bind(values) for values in candidates]
        rules = self._problem.rules
        observed = self._observe(systems) if self._observe and record else None

        def receive(example: Example, trace: Trace) -> None:
            for receiver in filter(None, (observed, on_trace)):
                receiver(example, trace)

        evaluations = await evaluate_all(
            self._executor,
            systems,
            examples,
            self._problem.metric,
            samples=[TRAIN_SAMPLE],
            rules=replace(rules, max_failed=1.0),
            on_trace=receive,
        )
        for evaluation in evaluations:
            self._violations += filter(None, [evaluation.violation])
        fewest = min(evaluation.failed for evaluation in evaluations)
        if binomial_tail(fewest, len(examples), rules.max_failed) < CHANCE:
            raise_too_many_failures(evaluations[0].failures(), len(examples), rules)
        return evaluations

    async def generate(self, request: Request, lm: str | None = None) -> Completion:
        """Send a request outside of the system.

        Raises:
            NotAsked: the model keeps failing, or the job has used all its requests.
        """
        chosen = self._writer(lm)
        worst = worst_case(self._executor.engine(chosen), request)
        async with self._proposals.request(chosen, worst):
            return await self._executor.request(chosen, request)

    def may_ask(self, lm: str | None = None) -> bool:
        """Return whether `generate` would send another request to a model."""
        return self._proposals.may_ask(self._writer(lm))

    def record_outcome(
        self, outcome: ProposalOutcome, lm: str | None = None, reason: str = ""
    ) -> None:
        """Record the usefulness of a model's last answer, and why it is unusable."""
        self._proposals.record_outcome(self._writer(lm), outcome, reason)

    def leaks(self, text: str, request: Request, lm: str | None = None) -> bool:
        """Return whether a new prompt contains the answer of a held-out example, and record that it does."""
        shown = "\n".join(message.text for message in request.messages)
        found = self._held_out.found_in(text, shown)
        if found:
            self._proposals.report_leak(self._writer(lm), found)
        return bool(found)

    @functools.cached_property
    def _held_out(self) -> HeldOutAnswers:
        problem = self._problem
        return HeldOutAnswers([*problem.valid, *problem.further, *problem.test], problem.train)

    def _writer(self, lm: str | None) -> str:
        chosen = lm or next(iter(self._problem.system.lms), None)
        if not chosen:
            raise DeclarationError(
                "no model is set for proposal requests", hint=_where_to_name(self._problem)
            )
        return chosen

    def snapshot(self) -> list[ScoredCandidate]:
        """Return the candidates scored so far, for a checkpoint."""
        return list(self._scores.values())

    def restore(self, scored: Sequence[ScoredCandidate]) -> None:
        """Continue from a `snapshot` of the same job."""
        self._scores = {canonical_json(candidate.values): candidate for candidate in scored}

    def scored_for(self, keys: Sequence[str]) -> list[ScoredCandidate]:
        """Return scored candidates that differ from the incumbent only in ``keys``, for later jobs."""
        start = self._incumbent.configuration.to_json()
        return [
            ScoredCandidate({k: t.values[k] for k in keys}, t.score, t.n)
            for t in self._scores.values()
            if all(k in keys or value == start.get(k) for k, value in t.values.items())
        ]


SHARED = 2  # held-out examples with an answer, above which it counts as a label
LEAST = 5  # characters of an answer; shorter ones occur in prompts by chance


class HeldOutAnswers:
    """Answers that only held-out examples have.

    >>> train, valid = (Example("e", {"q": "?"}, {"answer": name}) for name in ("Banjul", "Serekunda"))
    >>> answers = HeldOutAnswers([valid], [train])
    >>> answers.found_in("Name a city, such as Serekunda."), answers.found_in("Name a city, such as Banjul.")
    ('serekunda', '')
    """

    def __init__(self, held_out: Sequence[Example], train: Sequence[Example]) -> None:
        known = {answer for example in train for answer in _answers(example)}
        counts = Counter(answer for example in held_out for answer in set(_answers(example)))
        self._answers = sorted(
            answer for answer, n in counts.items() if n <= SHARED and answer not in known
        )

    def found_in(self, value: object, shown: str = "") -> str:
        """Return an answer that a value contains and the request for it did not show; ``""`` without one."""
        text = "\n".join(_texts(value))
        words, seen = f" {normalize(text)} ", f" {normalize(shown)} "
        return next((a for a in self._answers if f" {a} " in words and f" {a} " not in seen), "")


def _answers(example: Example) -> Iterator[str]:
    """Yield the texts of the expected results of an example, in a common form."""
    for text in _texts(example.gold):
        answer = normalize(text)
        if len(answer) >= LEAST and re.search(r"[^\W\d]", answer):
            yield answer


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _texts(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part)
