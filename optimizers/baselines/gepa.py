"""GEPA: evolve all texts of a system jointly, by reflection and Pareto selection.

Agrawal et al. 2025, "GEPA: Reflective Prompt Evolution Can Outperform Reinforcement Learning". The search is
that of the authors' library. A resumed job restarts it and replays the stored answers, which costs nothing
and leads to the same candidates.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from pydantic import Field

from compound.concurrency.questions import CallbackQuestions
from compound.errors import BudgetExhausted, MissingExtra
from compound.execution.rng import derive_seed
from compound.narrowing import entry
from compound.optimization.bounds import JobBound, Outlook
from compound.optimization.method import Progress, Proposal, Task
from compound.optimizers.baselines.evolution import PERFECT, Proceed, Question, search
from compound.optimizers.baselines.reflection import MAX_TOKENS, Answer, Answers, bound
from compound.optimizers.search.prompts import split, text_keys
from compound.settings.base import Settings
from compound.settings.references import ModelName
from compound.storage.state import State

TRIES = 2  # reflections per minibatch of runs in a job's share
COMPARED = 8  # number of candidates whose scoring on the Pareto set a job's share should cover


class Evolution(State):
    """Progress of `GEPA`.

    Attributes:
        answers: the answers to the questions of the search, in order; the first one is the incumbent's scores
            on the Pareto set.
        best: the texts of the best candidate that differ from the incumbent's.
        mean: the best candidate's mean score on the Pareto set.
    """

    answers: list[Answer]
    best: dict[str, str] = Field(default_factory=dict)
    mean: float

    @property
    def incumbent(self) -> list[float]:
        """The incumbent's scores on the Pareto set."""
        scores = self.answers[0]
        assert isinstance(scores, list)  # the first question is about the incumbent
        return scores


class GEPASettings(Settings):
    """Settings of `gepa`: prompts are rewritten by reflection."""

    lm: ModelName | None = None
    """The model that writes reflections; the system's own by default."""


@dataclass(frozen=True)
class GEPA:
    """Optimizer that rewrites one text at a time, and keeps candidates that are best on some example.

    Candidates are compared on a part of the train examples, the Pareto set; reflections read runs of the
    others. An iteration runs a candidate and its rewritten version on ``batch`` examples and, if the
    rewritten version scores higher, on the Pareto set. It starts only if the job's remaining share covers
    all of these runs; cached runs are not charged, which allows further iterations.

    Attributes:
        iterations: the maximum number of iterations.
        batch: the number of examples of one reflection.
        held_out: the maximum size of the Pareto set.
        lm: the model that writes reflections; ``None`` for the system's own.

    Raises:
        MissingExtra: the library is not installed.
    """

    iterations: int = 100
    batch: int = 3
    held_out: int = 50
    lm: str | None = None

    def __post_init__(self) -> None:
        try:  # report a missing library before any budget is spent
            import gepa.api  # noqa: F401
        except ImportError:
            raise MissingExtra("method 'gepa'", "gepa", "search") from None

    def bound(self, outlook: Outlook) -> JobBound:
        """Declare one reflection per iteration."""
        calls = self.most_iterations(outlook.runs)
        return JobBound([bound(outlook, calls, self.batch, self.lm)], written=MAX_TOKENS)

    def most_iterations(self, runs: float) -> int:
        """Return the maximum number of iterations of a job with ``runs`` system runs.

        Each new text is run on a minibatch. Since some reflections give no new text, a job may make `TRIES`
        reflections per minibatch of its runs.

        >>> GEPA().most_iterations(44), GEPA().most_iterations(math.inf)
        (30, 100)
        """
        held = math.ceil(runs / self.batch) if math.isfinite(runs) else math.inf
        return int(min(self.iterations, TRIES * held))

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        """Score the incumbent, answer the questions of the search, and propose the best candidate."""
        _, examples = split(task)
        start = {key: entry(task.system.configuration, key, str) for key in text_keys(task)}
        if task.resume is not None:
            state = Evolution.from_json(task.resume)
        elif not task.scorer.may_ask(self.lm):
            yield Proposal(
                {}, note="no further requests to the model: too many failed, or the planned number is used"
            )
            return
        else:
            most = min(self.held_out, len(examples) // 2)
            size = pareto_size(most, task.minibatch, self.batch, task.scorer.runs_left)
            if not size or not start:
                yield Proposal({}, note="too few examples or system runs to compare candidates")
                return
            scores = [trace.score or 0.0 for trace in await task.scorer.traces({}, examples[:size])]
            state = Evolution(answers=[scores], mean=fmean(scores))
            note = f"the incumbent on {size} example{'s' * (size != 1)}: {state.mean:.3f}"
            yield Progress(state.to_json(), note)
        size = len(state.incumbent)
        answers = Answers(task, self.lm, state.answers)
        evolve = partial(
            search, start=start, feedback=examples[size:], pareto=examples[:size], batch=self.batch,
            seed=derive_seed(task.seed, "gepa"),
        )  # fmt: skip
        try:
            with CallbackQuestions[Question](evolve, "gepa") as questions:
                async for question in questions:
                    if not isinstance(question, Proceed):
                        questions.answer(await answers.answer(question))
                        continue
                    if answers.has_new:
                        best = {key: text for key, text in question.texts.items() if text != start[key]}
                        state = Evolution(answers=answers.all, best=best, mean=question.mean)
                        yield Progress(state.to_json(), _note(question), step=question.iterations)
                    proceeds = self._affords(question, task.scorer.runs_left, size)
                    questions.answer(proceeds and task.scorer.may_ask(self.lm))
        except BudgetExhausted:
            if not state.best:
                raise
        tried = sum(isinstance(answer, str) for answer in answers.all)
        note = "" if state.best else "no rewritten prompt beat the incumbent"
        yield Proposal(state.best, fmean(state.incumbent), state.mean, tried, note)

    def _affords(self, progress: Proceed, left: float, pareto: int) -> bool:
        """Return whether another iteration can improve the best candidate, and the budget covers it."""
        can_improve = progress.iterations < self.iterations and progress.mean < PERFECT
        return can_improve and 2 * self.batch + pareto <= left


def pareto_size(most: int, least: int, batch: int, runs: float) -> int:
    """Return the size of the Pareto set, such that ``runs`` covers `COMPARED` candidates on it.

    It is at least ``least``, unless the runs would then not cover the incumbent and one iteration.

    >>> pareto_size(50, 8, batch=3, runs=200), pareto_size(50, 8, 3, 40), pareto_size(50, 8, 3, 16)
    (25, 8, 5)
    """
    first = (runs - 2 * batch) / 2
    return max(0, math.floor(min(most, first, max(least, runs / COMPARED))))


def _note(progress: Proceed) -> str:
    return f"best of {progress.candidates} candidates {progress.mean:.3f}"
