"""State of an optimization run, as stored in its checkpoints."""

from __future__ import annotations

from typing import Annotated, Any, cast

from pydantic import BaseModel, Field, NonNegativeFloat, PlainSerializer, PlainValidator, ValidationError

from compound.evaluation.evaluate import Evaluation, EvaluationDocument
from compound.execution.budget import MeterState, StoredUsage
from compound.optimization.budget_plan import BudgetPlan
from compound.optimization.method import JobRecord, ScoredCandidate
from compound.optimization.prices import Prices
from compound.optimization.proposals import LedgerState
from compound.runs.candidates import CandidateState
from compound.storage.state import State, first_problem

__all__ = ["FinalEvaluation", "JobState", "RunState", "SearchState", "StoredEvaluation"]


def _evaluation(value: object) -> Evaluation:
    """Return an evaluation, parsed from JSON if necessary."""
    if isinstance(value, Evaluation):
        return value
    try:
        stored = _StoredEvaluation.model_validate(value)
    except ValidationError as error:
        raise ValueError(first_problem(error)) from error
    return Evaluation.from_json(cast("EvaluationDocument", stored.model_dump()))  # validated above


class _StoredEvaluation(BaseModel):
    """JSON of an evaluation, by `Evaluation.to_json`; a row is example, sample, score and failure."""

    configuration: str
    rows: list[tuple[str, int, float, tuple[str, str] | None]]
    usage: StoredUsage
    system_runs: NonNegativeFloat
    bounds: tuple[float, float] | None = None
    violation: str = ""


StoredEvaluation = Annotated[
    Evaluation,
    PlainValidator(_evaluation),
    PlainSerializer(Evaluation.to_json, return_type=dict[str, object]),
]


class JobState(State):
    """The job in progress.

    Attributes:
        optimizer: name of the optimizer.
        keys: the parameters that may be changed.
        reason: numbers on which the scheduler based its choice.
        share: system runs that the job may spend.
        spent_before: system runs of the search when the job started.
        proposal_limits: maximum usage of proposal requests of the whole run by the end of the job.
        ledger_before: ledger of proposal requests when the job started.
        progress: the optimizer's own state; ``None`` before its first checkpoint.
        scored: candidates scored so far.
    """

    optimizer: str
    keys: tuple[str, ...]
    reason: dict[str, float]
    share: float
    spent_before: float
    proposal_limits: dict[str, float]
    ledger_before: LedgerState
    progress: dict[str, object] | None = None
    scored: list[ScoredCandidate] = Field(default_factory=list)


class SearchState(State):
    """The search on train and validation examples, after the initial evaluation.

    Attributes:
        plan: division of the budget.
        free_runs: system runs left for jobs when the plan was made; ``None`` without a limit.
        best: values of the best configuration: by default, the one with the highest validation score.
        incumbent: evaluation of the best configuration on the validation split.
        supported: values of the last configuration that a test supported, at first the initial ones.
        promising: values of the configuration with the highest score of those that only scored higher;
            ``None`` without one, or if a supported one scored higher since.
        promising_score: its validation score.
        working: values changed by jobs since the last decision.
        jobs_in_round: number of jobs finished since the last decision.
        decisions: number of decisions made.
        skipped: numbers of the decisions without a test, because nothing was proposed.
        idle_rounds: number of consecutive rounds without a change.
        job: the job in progress.
        history: records of the finished jobs.
        tried: scored candidates of finished jobs.
        stopped: why the search ended; ``""`` while it continues.
        ledger: ledger of proposal requests.
        prices: expected fractions of a system run, measured on the traces of the initial evaluation.
    """

    plan: BudgetPlan
    free_runs: float | None
    best: dict[str, object]
    incumbent: StoredEvaluation
    supported: dict[str, object] = Field(default_factory=dict)
    promising: dict[str, object] | None = None
    promising_score: float | None = None
    ledger: LedgerState
    prices: Prices = Field(default_factory=Prices)
    working: dict[str, object] = Field(default_factory=dict)
    jobs_in_round: int = 0
    decisions: int = 0
    skipped: list[int] = Field(default_factory=list)
    idle_rounds: int = 0
    job: JobState | None = None
    history: list[JobRecord] = Field(default_factory=list)
    tried: list[ScoredCandidate] = Field(default_factory=list)
    stopped: str = ""


class FinalEvaluation(State):
    """Evaluation of one configuration on the test split.

    Attributes:
        evaluation: ``None`` if the split was not evaluated.
        skipped: why the budget did not allow it.
    """

    evaluation: StoredEvaluation | None = None
    skipped: str = ""


class RunState(State):
    """An optimization run.

    Attributes:
        announced: number of notes recorded before the first system run.
        before: initial configuration on the validation split; ``None`` before its evaluation.
        search: the search; ``None`` before the initial evaluation.
        test_before: initial configuration on the test split; ``None`` before its evaluation.
        test_after: best configuration on the test split.
        meters: spending of the search and of the test split.
        bounds_violation: the first score outside the bounds that the metric declares; ``""`` without one.
        candidates: every configuration that was run, the initial one first.
        memory: data that the method stores across jobs.
        done: whether only the report is left.
        reported: whether the report is written.
    """

    announced: int = 0
    before: StoredEvaluation | None = None
    search: SearchState | None = None
    test_before: FinalEvaluation | None = None
    test_after: FinalEvaluation | None = None
    meters: list[MeterState] = Field(default_factory=list)
    bounds_violation: str = ""
    candidates: list[CandidateState] = Field(default_factory=list)
    memory: dict[str, Any] = Field(default_factory=dict)
    done: bool = False
    reported: bool = False

    @property
    def best(self) -> dict[str, object] | None:
        """Values of the best configuration; ``None`` before the initial evaluation."""
        return None if self.search is None else self.search.best
