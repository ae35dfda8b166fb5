"""The state of an optimization run, as its checkpoints hold it."""

from __future__ import annotations

from typing import Annotated, Any, cast

from pydantic import BaseModel, Field, NonNegativeFloat, PlainSerializer, PlainValidator, ValidationError

from compound.evaluation.evaluate import Evaluation, EvaluationDocument
from compound.execution.budget import MeterState, StoredUsage
from compound.optimization.budget_plan import BudgetPlan
from compound.optimization.method import JobRecord, ScoredCandidate
from compound.optimization.proposals import LedgerState
from compound.storage.state import State, first_problem

__all__ = ["FinalEvaluation", "JobState", "RunState", "SearchState", "StoredEvaluation"]


def _evaluation(value: object) -> Evaluation:
    """Return an evaluation, read from JSON where it is not one yet."""
    if isinstance(value, Evaluation):
        return value
    try:
        stored = _StoredEvaluation.model_validate(value)
    except ValidationError as error:
        raise ValueError(first_problem(error)) from error
    return Evaluation.from_json(cast("EvaluationDocument", stored.model_dump()))  # it has these fields


class _StoredEvaluation(BaseModel):
    """The JSON of an evaluation, by `Evaluation.to_json`; each row is example, sample, score and failure."""

    configuration: str
    rows: list[tuple[str, int, float, tuple[str, str] | None]]
    usage: StoredUsage
    system_runs: NonNegativeFloat
    bounds: tuple[float, float] | None = None


StoredEvaluation = Annotated[
    Evaluation,
    PlainValidator(_evaluation),
    PlainSerializer(Evaluation.to_json, return_type=dict[str, object]),
]


class JobState(State):
    """The job under way.

    Attributes:
        optimizer: the name of its optimizer.
        keys: the parameters it may change.
        reason: the numbers that the scheduler chose it from.
        share: system runs it may spend.
        spent_before: system runs of the search when it began.
        proposal_limits: usage of requests for proposals that the whole run may have reached by its end.
        ledger_before: requests for proposals made when it began.
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
    """The search on train and validation examples, once the starting configuration is measured.

    Attributes:
        plan: how the budget is divided.
        free_runs: system runs left for jobs when it was; ``None`` without a limit.
        best: the values of the best configuration.
        incumbent: the best configuration's evaluation on the validation split.
        working: values that jobs changed since the last decision.
        jobs_in_round: jobs finished since the last decision.
        decisions: decisions made.
        idle_rounds: rounds in a row without a change.
        job: the job under way.
        history: finished jobs.
        tried: scored candidates of finished jobs.
        stopped: why the search has ended; ``""`` while it continues.
        ledger: requests for proposals.
    """

    plan: BudgetPlan
    free_runs: float | None
    best: dict[str, object]
    incumbent: StoredEvaluation
    ledger: LedgerState
    working: dict[str, object] = Field(default_factory=dict)
    jobs_in_round: int = 0
    decisions: int = 0
    idle_rounds: int = 0
    job: JobState | None = None
    history: list[JobRecord] = Field(default_factory=list)
    tried: list[ScoredCandidate] = Field(default_factory=list)
    stopped: str = ""


class FinalEvaluation(State):
    """One configuration on the test split.

    Attributes:
        evaluation: ``None`` where the split was not read.
        skipped: why the budget did not allow it.
    """

    evaluation: StoredEvaluation | None = None
    skipped: str = ""


class RunState(State):
    """An optimization run.

    Attributes:
        announced: notes recorded before the first run of the system.
        before: the starting configuration on the validation split; ``None`` before it is measured.
        search: ``None`` before that, too.
        test_before: the starting configuration on the test split; ``None`` before it is read.
        test_after: the best configuration on the test split.
        meters: spending of the search and of the test split.
        memory: what the method keeps from job to job.
        done: whether nothing is left but the report.
        reported: whether the report is written.
    """

    announced: int = 0
    before: StoredEvaluation | None = None
    search: SearchState | None = None
    test_before: FinalEvaluation | None = None
    test_after: FinalEvaluation | None = None
    meters: list[MeterState] = Field(default_factory=list)
    memory: dict[str, Any] = Field(default_factory=dict)
    done: bool = False
    reported: bool = False

    @property
    def best(self) -> dict[str, object] | None:
        """The values of the best configuration; ``None`` before the starting one is measured."""
        return None if self.search is None else self.search.best
