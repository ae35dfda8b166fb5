"""GEPA: evolve all texts of a system jointly, by reflection and Pareto selection.

Agrawal et al. 2025, "GEPA: Reflective Prompt Evolution Can Outperform Reinforcement Learning". The
search is that of the authors' library, in a separate thread (`compound.core.threads`), as a
sequence of questions: scores, new texts, and whether to continue. Given the answers it is
deterministic, so that a resumed job restarts it and replays the stored answers; the library's own
checkpoints, which are pickled, are not used.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from compound.core.errors import BudgetExhausted, MissingExtra, TooManyFailures
from compound.core.example import Example
from compound.core.loops import gather
from compound.core.narrowing import entry
from compound.core.storage.state import State
from compound.core.threads import CallbackQuestions
from compound.evaluation.evaluate import score_bounds
from compound.execution.rng import derive_seed
from compound.execution.trace import Trace
from compound.graph.configuration import component_of
from compound.optimization.method import JobPlan, PlannedJob, Progress, Proposal, RequestCount, Task
from compound.optimization.settings.base import ModelName, Settings
from compound.optimizers.scheduling import text_keys
from compound.optimizers.search.proposers.proposing import (
    NO_REQUESTS,
    ask_for_text,
    calls,
    calls_of_others,
    fields,
    result,
    verdict,
    writing_request,
)
from compound.optimizers.search.sources import split

if TYPE_CHECKING:
    from gepa.core.adapter import EvaluationBatch
    from gepa.core.state import GEPAState

TRIES = 2  # reflections per minibatch of runs in a job's share
COMPARED = 8  # number of candidates whose scoring on the Pareto set a job's share should cover
MERGED = 5  # examples of the Pareto set on which the library tries a merged candidate
ROUNDING = 1e-9
MAX_TOKENS = 1000  # of a new text


class GEPASettings(Settings):
    """Settings of `gepa`: prompts are rewritten by reflection. Defaults are those of the authors' library."""

    lm: ModelName | None = None
    """The model that writes reflections; the system's own by default."""
    iterations: int = Field(default=100, ge=0)
    """Maximum number of iterations of a job."""
    batch: int = Field(default=3, ge=1)
    """Number of examples of one reflection."""
    held_out: int = Field(default=50, ge=1)
    """Maximum size of the Pareto set, the train examples on which candidates are compared."""
    merges: int = Field(default=0, ge=0)
    """Maximum number of accepted merges of two candidates with a common ancestor; 0 disables merging. The
    library recommends 5."""
    selection: Literal["pareto", "current_best", "epsilon_greedy", "top_k_pareto"] = "pareto"
    """Choice of the candidate to rewrite: drawn from the frontier (`pareto`), the best by mean score
    (`current_best`), mostly the best (`epsilon_greedy`: a random one in one of ten cases), or drawn from the
    five best by mean score on the frontier (`top_k_pareto`)."""
    components: Literal["round_robin", "all"] = "round_robin"
    """Texts rewritten in one iteration: one after the other in turn, or all at once."""


# Added to all scores if candidates are merged: the library draws a common ancestor in proportion to
# its mean score, and fails if all are 0. A power of two, such that sums of counts stay exact.
LIFT = 2.0**-30

Record = Mapping[str, str]  # the description of one run for a reflection


@dataclass(frozen=True)
class Evaluate:
    """Asks for the scores of texts on examples."""

    texts: Mapping[str, str]
    examples: Sequence[Example]


@dataclass(frozen=True)
class Reflection:
    """A text to rewrite, and records of runs with it."""

    key: str
    text: str
    records: Sequence[Record]


@dataclass(frozen=True)
class Proceed:
    """Asks whether to continue, and describes the progress."""

    iterations: int
    candidates: Sequence[Mapping[str, str]]
    best: int
    mean: float


Question = Evaluate | list[Reflection] | Proceed
# answers a question: scores with the records of each run by key (none if unknown); new texts, `None`
# where there is none; or whether to continue
Ask = Callable[[Question], Any]


class _Key(str):
    """A key with the same hash in every process, in which a merge iterates over the set of keys."""

    __slots__ = ()

    def __hash__(self) -> int:
        return zlib.crc32(self.encode())


@dataclass
class _Adapter:
    """Turns what the library asks for into questions; implements its ``GEPAAdapter``."""

    ask: Ask
    lift: float

    def evaluate(
        self, batch: Sequence[Example], candidate: Mapping[str, str], capture_traces: bool = False
    ) -> EvaluationBatch:
        from gepa.core.adapter import EvaluationBatch

        texts = {str(key): text for key, text in candidate.items()}
        scores, records = self.ask(Evaluate(texts, batch))
        scores = [score + self.lift for score in scores]
        return EvaluationBatch(scores, scores, list(records) or [{} for _ in scores])

    def make_reflective_dataset(
        self, candidate: Mapping[str, str], eval_batch: EvaluationBatch, keys: Sequence[str]
    ) -> dict[str, list[Record]]:
        runs = eval_batch.trajectories
        return {key: [run[str(key)] for run in runs if str(key) in run] for key in keys}

    def propose_new_texts(
        self,
        candidate: Mapping[str, str],
        dataset: Mapping[str, Sequence[Record]],
        keys: Sequence[str],
    ) -> dict[str, str]:
        asked = [Reflection(str(key), candidate[key], dataset[key]) for key in keys]
        texts = zip(keys, self.ask(asked), strict=True)
        return {key: text for key, text in texts if text is not None}


def search(
    ask: Ask,
    *,
    start: Mapping[str, str],
    feedback: Sequence[Example],
    pareto: Sequence[Example],
    settings: GEPASettings,
    lowest: float,
    perfect: float,
    seed: int,
) -> None:
    """Run the library's search."""
    from gepa.api import optimize

    lift = LIFT - min(0.0, lowest) if settings.merges else 0.0
    optimize(
        seed_candidate={_Key(key): text for key, text in start.items()},
        trainset=list(feedback),
        valset=list(pareto),
        adapter=_Adapter(ask, lift),
        candidate_selection_strategy=settings.selection,
        module_selector=settings.components,
        use_merge=settings.merges > 0,
        max_merge_invocations=settings.merges,
        reflection_minibatch_size=min(settings.batch, len(feedback)),
        perfect_score=perfect + lift,
        stop_callbacks=lambda state: not ask(_progress(state, lift)),
        logger=SimpleNamespace(log=lambda message: None),
        track_best_outputs=False,
        seed=seed,
    )


def _progress(state: GEPAState, lift: float) -> Proceed:
    means = state.program_full_scores_val_set
    best = means.index(max(means))
    candidates = [
        {str(key): text for key, text in texts.items()} for texts in state.program_candidates
    ]
    return Proceed(state.i + 1, candidates, best, means[best] - lift)


class Evolution(State):
    """Progress of `GEPA`."""

    FORMAT = 3
    # the answers to the questions of the search, in order; the first one is the incumbent's scores
    # on the Pareto set
    answers: list[Answer]
    best: dict[str, str] = Field(default_factory=dict)
    mean: float

    @property
    def incumbent(self) -> list[float]:
        """The incumbent's scores on the Pareto set."""
        answer = self.answers[0]
        assert isinstance(answer, Scores)  # the first question is about the incumbent
        return answer.scores


@dataclass(frozen=True)
class GEPA:
    """Optimizer that rewrites texts, and keeps candidates that are best on some example.

    Candidates are compared on a part of the train examples, the Pareto set; reflections read runs of
    the others. An iteration starts only if the job's remaining share covers all of its runs.

    Raises:
        MissingExtra: the library is not installed.
    """

    settings: GEPASettings = field(default_factory=GEPASettings)

    def __post_init__(self) -> None:
        try:  # report a missing library before any budget is spent
            import gepa.api  # noqa: F401
        except ImportError:
            raise MissingExtra("method 'gepa'", "gepa", "search") from None

    def plan(self, job: PlannedJob) -> JobPlan:
        """Return the reflections of all iterations."""
        count = self.most_reflections(job.runs, len(job.texts))
        return JobPlan([RequestCount("reflections", count, self.settings.lm)])

    def most_reflections(self, runs: float, texts: int = 1) -> int:
        """Return the maximum number of reflections of a job: `TRIES` per minibatch of its runs.

        >>> GEPA().most_reflections(44), GEPA().most_reflections(math.inf)
        (30, 100)
        """
        settings = self.settings
        held = math.ceil(runs / settings.batch) if math.isfinite(runs) else math.inf
        candidates = min(settings.iterations, TRIES * held)
        return int(candidates * (texts if settings.components == "all" else 1))

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        """Score the incumbent, answer the questions of the search, and propose the best candidate."""
        _, examples = split(task)
        settings = self.settings
        start = {key: entry(task.system.configuration, key, str) for key in text_keys(task)}
        if task.resume is not None:
            state = Evolution.from_json(task.resume)
        elif not task.scorer.may_ask(settings.lm):
            yield Proposal({}, note=NO_REQUESTS)
            return
        else:
            most, left = min(settings.held_out, len(examples) // 2), task.scorer.runs_left
            size = pareto_size(most, task.minibatch, settings.batch, left)
            if not size or not start:
                yield Proposal({}, note="too few examples or system runs to compare candidates")
                return
            traces = await task.scorer.traces({}, examples[:size])
            scores = Scores(scores=[trace.score or 0.0 for trace in traces])
            state = Evolution(answers=[scores], mean=fmean(scores.scores))
            note = f"the incumbent on {size} example{'s' * (size != 1)}: {state.mean:.3f}"
            yield Progress(state.to_json(), note)
        size = len(state.incumbent)
        answers = Answers(task, settings, state.answers)
        low, high = score_bounds(task.context.metric, task.context.rules) or assumed_bounds(
            state.incumbent
        )
        evolve = partial(
            search,
            start=start,
            feedback=examples[size:],
            pareto=examples[:size],
            settings=settings,
            lowest=low,
            perfect=high,
            seed=derive_seed(task.seed, "gepa"),
        )
        try:
            with CallbackQuestions[Question](evolve, "gepa") as questions:
                async for question in questions:
                    if not isinstance(question, Proceed):
                        questions.answer(await answers.answer(question))
                        continue
                    if answers.has_new:
                        texts = question.candidates[question.best].items()
                        best = {key: text for key, text in texts if text != start[key]}
                        state = Evolution(answers=answers.all, best=best, mean=question.mean)
                        yield Progress(state.to_json(), _note(question), step=question.iterations)
                    proceeds = self._affords(question, high, task.scorer.runs_left, size)
                    questions.answer(proceeds and task.scorer.may_ask(settings.lm))
        except BudgetExhausted:
            if not state.best:
                raise
        tried = sum(isinstance(answer, str) for answer in answers.all)
        note = "" if state.best else "no rewritten prompt beat the incumbent"
        yield Proposal(state.best, fmean(state.incumbent), state.mean, tried, note)

    def _affords(self, progress: Proceed, perfect: float, left: float, pareto: int) -> bool:
        settings = self.settings
        can_improve = (
            progress.iterations < settings.iterations and progress.mean < perfect - ROUNDING
        )
        cost = 2 * settings.batch + pareto
        return can_improve and max(cost, MERGED + pareto if settings.merges else 0) <= left


def assumed_bounds(scores: Sequence[float]) -> tuple[float, float]:
    """Return the bounds of a metric that declares none; the maximum is 1, unless a score exceeds it.

    >>> assumed_bounds([0.25, 1.0]), assumed_bounds([40.0, -3.0])
    ((0.25, 1.0), (-3.0, inf))
    """
    return min(scores), math.inf if max(scores) > 1 else 1.0


def pareto_size(most: int, least: int, batch: int, runs: float) -> int:
    """Return the size of the Pareto set, such that ``runs`` covers `COMPARED` candidates on it.

    It is at least ``least``, unless the runs would then not cover the incumbent and one iteration.

    >>> pareto_size(50, 8, batch=3, runs=200), pareto_size(50, 8, 3, 40), pareto_size(50, 8, 3, 16)
    (25, 8, 5)
    """
    first = (runs - 2 * batch) / 2
    return max(0, math.floor(min(most, first, max(least, runs / COMPARED))))


def _note(progress: Proceed) -> str:
    return f"best of {len(progress.candidates)} candidates {progress.mean:.3f}"


class Scores(State):
    """An answer: the score of each example."""

    scores: list[float]


Answer = Scores | str | None  # scores by example, or a new text (None if there is none)


class Answers:
    """Answers to a search: replays the answers of an interrupted attempt, then gives new ones."""

    def __init__(self, task: Task, settings: GEPASettings, known: Sequence[Answer]) -> None:
        self._task = task
        self._settings = settings
        self._known = len(known)
        self._given = 0
        self.all: list[Answer] = [*known]

    @property
    def has_new(self) -> bool:
        """Whether answers were given beyond the replayed ones."""
        return self._given > self._known

    async def answer(self, question: Evaluate | list[Reflection]) -> object:
        """Return the next answers to a question; replayed scores have no records."""
        place = self._given
        if isinstance(question, Evaluate):
            self._given += 1
            records: Sequence[Mapping[str, Record]] = ()
            if place == len(self.all):
                found, records = await self._run(question.texts, question.examples)
                self.all.append(found)
            scores = self.all[place]
            assert isinstance(scores, Scores)  # as recorded for the same question
            return scores.scores, records
        self._given += len(question)
        if place == len(self.all):
            self.all += await gather(
                self._rewrite(item, place + number) for number, item in enumerate(question)
            )
        answers = self.all[place : self._given]
        return [answer for answer in answers if not isinstance(answer, Scores)]

    async def _run(
        self, texts: Mapping[str, str], examples: Sequence[Example]
    ) -> tuple[Scores, Sequence[Mapping[str, Record]]]:
        task, failed = self._task, self._task.context.rules.failure_score
        try:
            traces = await task.scorer.traces(texts, examples)
        except TooManyFailures:  # texts that break the runs get the failure score
            return Scores(scores=[failed] * len(examples)), []
        records = [self._records(*run, texts) for run in zip(traces, examples, strict=True)]
        return Scores(scores=[trace.score or 0.0 for trace in traces]), records

    def _records(
        self, trace: Trace, example: Example, keys: Mapping[str, str]
    ) -> dict[str, Record]:
        system, records = self._task.system, dict[str, Record]()
        for key in keys:
            component = system.components[component_of(key)]
            if trace.calls_of(component.name):
                others = calls_of_others(trace, component, system)
                records[key] = {
                    "Inputs and outputs": calls(trace, component),
                    **({"Other steps of the run": others} if others else {}),
                    "Result of the whole system": result(trace),
                    **({"Expected result": fields(example.gold)} if example.gold else {}),
                    "Score": verdict(trace),
                }
        return records

    async def _rewrite(self, item: Reflection, number: int) -> str | None:
        if not item.records:
            return None
        from gepa.strategies.instruction_proposal import InstructionProposalSignature as Form

        def parse(reply: str) -> str:
            return str(Form.output_extractor(reply.strip())["new_instruction"])

        given = {
            "current_instruction_doc": item.text,
            "dataset_with_feedback": item.records,
            "prompt_template": None,
        }
        seed = derive_seed(self._task.seed, "gepa", number)
        request = writing_request(Form.prompt_renderer(given), seed, MAX_TOKENS)
        known, lm = [item.text], self._settings.lm
        new = await ask_for_text(self._task, item.key, request, lm, known, parse)
        return None if new == item.text else new
