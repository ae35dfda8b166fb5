"""State of an optimization run, as stored in its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PlainSerializer,
    PlainValidator,
    ValidationError,
)

from compound.core.storage.artifacts import is_reference, leads_outside
from compound.core.storage.records import Damaged
from compound.core.storage.state import State, StateError, first_problem
from compound.evaluation.evaluate import Evaluation
from compound.execution.budget import MeterState
from compound.optimization.budget_plan import BudgetPlan
from compound.optimization.method import JobRecord, ScoredCandidate
from compound.optimization.prices import Prices
from compound.optimization.proposals import LedgerState
from compound.optimization.runs.candidates import CandidateState


def _evaluation(value: Any) -> Evaluation:  # noqa: ANN401 - JSON
    return value if isinstance(value, Evaluation) else Evaluation.from_json(value)


StoredEvaluation = Annotated[
    Evaluation,
    PlainValidator(_evaluation),
    PlainSerializer(Evaluation.to_json, return_type=dict[str, object]),
]


class JobState(State):
    """The job in progress."""

    optimizer: str
    keys: tuple[str, ...]
    reason: dict[str, float]
    share: float
    spent_before: float
    # maximum usage of proposal requests of the whole run by the end of the job
    proposal_limits: dict[str, float]
    ledger_before: LedgerState  # ledger of proposal requests when the job started
    # the optimizer's own state; `None` before its first checkpoint
    progress: dict[str, object] | None = None
    scored: list[ScoredCandidate] = Field(default_factory=list)


class SearchState(State):
    """The search on train and validation examples, after the initial evaluation."""

    plan: BudgetPlan
    # system runs left for jobs when the plan was made; `None` without a limit
    free_runs: float | None
    # values of the best configuration: by default, the one with the highest validation score
    best: dict[str, object]
    incumbent: StoredEvaluation
    # values of the last configuration that a test supported, at first the initial ones
    supported: dict[str, object] = Field(default_factory=dict)
    # values of the configuration with the highest score of those that only scored higher; `None`
    # without one, or if a supported one scored higher since
    promising: dict[str, object] | None = None
    promising_score: float | None = None
    ledger: LedgerState
    # expected fractions of a system run, measured on the traces of the initial evaluation
    prices: Prices = Field(default_factory=Prices)
    working: dict[str, object] = Field(default_factory=dict)
    jobs_in_round: int = 0
    decisions: int = 0
    # numbers of the decisions without a test, because nothing was proposed
    skipped: list[int] = Field(default_factory=list)
    idle_rounds: int = 0
    job: JobState | None = None
    history: list[JobRecord] = Field(default_factory=list)
    tried: list[ScoredCandidate] = Field(default_factory=list)
    stopped: str = ""  # why the search ended; `""` while it continues


class FinalEvaluation(State):
    """Evaluation of one configuration on the test split."""

    evaluation: StoredEvaluation | None = None  # `None` if the split was not evaluated
    skipped: str = ""  # why the budget did not allow it


class OptimizationState(State):
    """An optimization run."""

    announced: int = 0  # number of notes recorded before the first system run
    before: StoredEvaluation | None = None
    search: SearchState | None = None
    test_before: FinalEvaluation | None = None
    test_after: FinalEvaluation | None = None
    meters: list[MeterState] = Field(default_factory=list)
    # the first score outside the bounds that the metric declares; `""` without one
    bounds_violation: str = ""
    # every configuration that was run, the initial one first
    candidates: list[CandidateState] = Field(default_factory=list)
    memory: dict[str, Any] = Field(default_factory=dict)
    done: bool = False  # whether only the report is left
    reported: bool = False

    @property
    def best(self) -> dict[str, object] | None:
        """Values of the best configuration; ``None`` before the initial evaluation."""
        return None if self.search is None else self.search.best


REMOVED = ("joint",)  # fields of a search that earlier versions stored
FORMAT = 3


def _state(value: object) -> OptimizationState:
    """Return a state from JSON, without fields of earlier versions."""
    state = dict(value) if isinstance(value, Mapping) else {}
    if isinstance(search := state.get("search"), Mapping):
        state["search"] = {name: item for name, item in search.items() if name not in REMOVED}
    return OptimizationState.from_json(state)


class Checkpoint(BaseModel):
    """The file ``checkpoint.json``."""

    model_config = ConfigDict(extra="ignore", strict=True)

    step: NonNegativeInt
    # lengths of the append-only files, to which they are truncated on resume
    lengths: dict[str, NonNegativeInt]
    checksums: dict[str, str] = {}
    cached: NonNegativeInt = 0
    state: Annotated[OptimizationState, PlainValidator(_state)]


def read_checkpoint(value: Mapping[str, Any], appended: tuple[str, ...]) -> Checkpoint:
    """Validate and return a checkpoint, which must have the lengths of the append-only files.

    Raises:
        Damaged: a value is missing or has the wrong type; the message names the first one.
    """
    if (found := value.get("format", 1)) != FORMAT:
        raise Damaged(f"it has format {found}, but this version reads format {FORMAT}")
    try:
        checkpoint = Checkpoint.model_validate(value)
    except StateError as error:
        raise Damaged(error.message) from None
    except (ValidationError, RecursionError) as error:
        raise Damaged(f"it is not a checkpoint of this version: {first_problem(error)}") from None
    if missing := [name for name in appended if name not in checkpoint.lengths]:
        raise Damaged(f"it is not a checkpoint of this version: lengths.{missing[0]} is missing")
    if (search := checkpoint.state.search) is not None:
        parts = {"best": search.best, "working": search.working, "supported": search.supported}
        for name, values in {**parts, "promising": search.promising or {}}.items():
            _check_places(name, values)
    return checkpoint


def _check_places(part: str, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        outside = is_reference(value) and leads_outside(value["path"])
        if outside and not PurePosixPath(value["path"]).is_absolute():
            raise Damaged(
                f"state.search.{part}.{key} refers to {value['path']!r}, which is outside of the run"
            )
