"""All texts of a system, evolved together by reflection and Pareto selection: GEPA.

Agrawal et al. 2025, "GEPA: Reflective Prompt Evolution Can Outperform Reinforcement Learning". The search
is the library's own. A job that was interrupted begins it again, and gives it the answers that its progress
holds: that costs nothing, and leads to the same candidates.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from pydantic import Field

from compound.concurrency.questions import Questions
from compound.errors import BudgetExhausted, MissingExtra
from compound.execution.rng import derive_seed
from compound.narrowing import entry
from compound.optimization.bounds import JobBound, Outlook
from compound.optimization.method import Progress, Proposal, Task
from compound.optimizers.baselines.evolution import PERFECT, Proceed, Question, search
from compound.optimizers.baselines.reflection import WRITTEN, Answer, Answers, bound
from compound.optimizers.search.prompts import split, text_keys
from compound.settings.base import Settings
from compound.settings.references import ModelName
from compound.storage.state import State

TRIES = 2  # reflections for each minibatch that a job's share holds
COMPARED = 8  # candidates on the Pareto set that a job's share should hold


class Evolution(State):
    """The progress of `GEPA`.

    Attributes:
        answers: the answers to the questions of the search, in order; the first one is the incumbent's scores
            on the Pareto set.
        best: the texts of the best candidate that are not the incumbent's.
        mean: its mean score on the Pareto set.
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
    """How prompts are rewritten by reflection."""

    lm: ModelName | None = None
    """The model that reflects; the system's own by default."""


@dataclass(frozen=True)
class GEPA:
    """Rewrites one text of one candidate at a time; candidates that are best on some example stay.

    Some of the train examples, the Pareto set, are what candidates are compared on; reflections read runs
    of the others. An iteration runs a candidate and its rewriting on ``batch`` of these and, where the
    rewriting scores more, on the Pareto set. It is begun only if what is left of the job's share holds
    all that, in runs really executed: what comes from the cache leaves room for more iterations.

    Attributes:
        iterations: the most iterations, for a job that no budget ends.
        batch: the examples of one reflection.
        held_out: the most examples of the Pareto set.
        lm: the model that reflects; the system's own when ``None``.

    Raises:
        MissingExtra: the library is not installed.
    """

    iterations: int = 100
    batch: int = 3
    held_out: int = 50
    lm: str | None = None

    def __post_init__(self) -> None:
        _need_the_library()  # a missing library is reported before anything is spent

    def bound(self, outlook: Outlook) -> JobBound:
        """Declare one reflection for each iteration."""
        calls = self.most_iterations(outlook.runs)
        return JobBound([bound(outlook, calls, self.batch, self.lm)], written=WRITTEN)

    def most_iterations(self, runs: float) -> int:
        """Return how many iterations a job makes at most with this number of system runs.

        A reflection that gives a new text is followed by runs of it on a minibatch. A job makes `TRIES` times
        as many reflections as its runs hold minibatches, since some give nothing new.

        >>> GEPA().most_iterations(44), GEPA().most_iterations(math.inf)
        (30, 100)
        """
        held = math.ceil(runs / self.batch) if math.isfinite(runs) else math.inf
        return int(min(self.iterations, TRIES * held))

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        """Score the incumbent, answer what the search asks, propose the best by the Pareto set."""
        _, examples = split(task)
        start = {key: entry(task.system.configuration, key, str) for key in text_keys(task)}
        if task.resume is not None:
            state = Evolution.from_json(task.resume)
        elif not task.scorer.may_ask(self.lm):
            yield Proposal({}, note="the model that reflects is not asked")
            return
        else:
            most = min(self.held_out, len(examples) // 2)
            size = pareto_size(most, task.minibatch, self.batch, task.scorer.left)
            if not size or not start:
                yield Proposal({}, note="too few examples or runs to compare anything")
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
            with Questions[Question](evolve, "gepa") as questions:
                async for question in questions:
                    if not isinstance(question, Proceed):
                        questions.answer(await answers.to(question))
                        continue
                    if answers.new:
                        best = {key: text for key, text in question.texts.items() if text != start[key]}
                        state = Evolution(answers=answers.all, best=best, mean=question.mean)
                        yield Progress(state.to_json(), _note(question), step=question.iterations)
                    going = self._affords(question, task.scorer.left, size)
                    questions.answer(going and task.scorer.may_ask(self.lm))
        except BudgetExhausted:
            if not state.best:
                raise
        tried = sum(isinstance(answer, str) for answer in answers.all)
        note = "" if state.best else "no rewritten prompt beat the incumbent"
        yield Proposal(state.best, fmean(state.incumbent), state.mean, tried, note)

    def _affords(self, so_far: Proceed, left: float, pareto: int) -> bool:
        """Return whether there is something left to find, and enough to look for it."""
        more = so_far.iterations < self.iterations and so_far.mean < PERFECT
        return more and 2 * self.batch + pareto <= left


def pareto_size(most: int, least: int, batch: int, runs: float) -> int:
    """Return how many examples to compare candidates on: such that ``runs`` hold `COMPARED` of them.

    ``least`` where that is fewer, unless the runs do not hold the incumbent and one iteration.

    >>> pareto_size(50, 8, batch=3, runs=200), pareto_size(50, 8, 3, 40), pareto_size(50, 8, 3, 16)
    (25, 8, 5)
    """
    first = (runs - 2 * batch) / 2
    return max(0, math.floor(min(most, first, max(least, runs / COMPARED))))


def _need_the_library() -> None:
    try:
        import gepa.api  # noqa: F401
    except ImportError:
        raise MissingExtra("method 'gepa'", "gepa", "search") from None


def _note(so_far: Proceed) -> str:
    return f"best of {so_far.candidates} candidates {so_far.mean:.3f}"
