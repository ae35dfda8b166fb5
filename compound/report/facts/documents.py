"""The facts of a report as JSON types: one typed dictionary for each part.

`compound.report.facts.facts` and its neighbours make them, the tables and figures read them, and
`compound.report.summarize` returns the whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NotRequired, TypedDict

from compound.evaluation.evaluate import Summary
from compound.evaluation.statistics import IntervalDocument
from compound.graph.draw import GraphDocument
from compound.optimization.prospects import Detection, ProspectDocument
from compound.runs.events import ChangeRow, Gain, Spent


class SplitData(TypedDict):
    """How many examples a split has, and their digest."""

    n: int
    digest: str


class OptimizeDocument(TypedDict):
    """What is read of a run's settings, as JSON types."""

    method: str
    seed: int
    alpha: float
    failure_score: float
    budget: dict[str, float | None]


class RunConfig(TypedDict):
    """What is read of a run's ``config.json``: what was asked for."""

    system: str
    metric: str
    signature: str
    start: dict[str, object]
    graph: GraphDocument
    defaults: dict[str, object]
    engines: NotRequired[dict[str, str]]
    data: dict[str, SplitData]
    optimize: OptimizeDocument
    versions: dict[str, str]


class GainFacts(IntervalDocument):
    """A gain with its interval and the one-sided p-value of its test."""

    p: float


class SplitFacts(TypedDict):
    """The scores of a split before and after, and the gain."""

    before: Summary | None
    after: Summary | None
    gain: GainFacts | None


class Took(TypedDict, total=False):
    """What a method spent, as far as that is known."""

    system_runs: float | None
    test_runs: float | None
    calls: int | None
    prompt_tokens: int | None
    completion_tokens: int | None
    cost: float | None
    unpriced: int | None
    seconds: float | None


class MethodRow(Took):
    """A method beside the others; what the unoptimized system took is not counted."""

    method: str
    valid: Summary | None
    test: Summary | None
    gain: GainFacts | None
    versus: GainFacts | None
    failed: int | None
    accepted: NotRequired[int]
    decisions: NotRequired[int]
    missing: NotRequired[str]


class Point(TypedDict):
    """A score with its interval, after so many system runs."""

    at: float
    mean: float
    low: float | None
    high: float | None


class TrainPoint(TypedDict):
    """A job's comparison on train examples, after so many system runs."""

    at: float
    before: float
    after: float
    proposed: bool


class DecidedPoint(TypedDict):
    """A decision, after so many system runs."""

    at: float
    accepted: bool
    before: Summary
    after: Summary
    changed: list[str]


class Curve(TypedDict):
    """The course of a method; ``end`` is how many system runs its search took."""

    method: str
    start: list[Point]
    train: list[TrainPoint]
    decisions: list[DecidedPoint]
    end: float


class ChangeDocument(TypedDict):
    """A parameter that changed; the kind is ``text``, ``demos`` or ``value``."""

    key: str
    kind: str
    before: object
    after: object


class DecisionFacts(TypedDict):
    """An acceptance decision, after so many system runs."""

    decision: int
    accepted: bool
    level: float
    p: float | None
    before: Summary | None
    after: Summary | None
    gain: Gain | None
    changes: list[ChangeRow]
    note: str | None
    at: float


class JobRow(TypedDict):
    """An optimizer's job, which ended after so many system runs."""

    job: int
    optimizer: str
    keys: list[str]
    tried: int | None
    train_before: float | None
    train_after: float | None
    runs: float
    note: str
    values: dict[str, object]
    best_step: int | None
    at: float


class RetryFacts(TypedDict):
    """Failed test rows that were run again."""

    method: str
    evaluation: str
    failed: int
    retried: int
    recovered: int
    before: Summary
    after: Summary
    note: str | None


class UsageTotals(TypedDict):
    """What calls took together."""

    calls: int
    prompt_tokens: int
    completion_tokens: int
    cost: float
    unpriced: int


class TallyFacts(TypedDict):
    """Requests for proposals to one model, by outcome."""

    asked: int
    proposed: int
    unusable: int
    duplicate: int
    failed: int
    reasons: dict[str, int]


class ProposalFacts(UsageTotals):
    """Requests for proposals: by model, why models were not asked any more, and what they took."""

    models: dict[str, TallyFacts]
    stopped: dict[str, str]


class OutlookFacts(TypedDict, total=False):
    """What the run could find, estimated before it began."""

    detection: Detection
    jobs: list[ProspectDocument]
    told: list[str]
    duplicates: list[str]


class SpentFacts(Spent, total=False):
    """What a run spent, and how often something went wrong at a server."""

    incidents: dict[str, int]


class ComponentCost(UsageTotals):
    """What the recorded calls of a component took; the row ``""`` is everything else."""

    component: str
    executed: int | None
    reused: int | None
    seconds: float | None


class FailureGroup(TypedDict):
    """Runs that failed for one reason, by split."""

    kind: str
    message: str
    where: str
    count: int
    valid: int
    test: int


class Shown(TypedDict, total=False):
    """What is shown of a trace, cut to a readable length."""

    inputs: dict[str, str]
    gold: dict[str, str]
    outputs: dict[str, str]
    failure: str
    messages: dict[str, str]
    feedback: str


class Side(Shown, total=False):
    """What an example's run gave under one configuration."""

    score: float


class ExampleFacts(TypedDict):
    """An example before and after."""

    example: str
    inputs: dict[str, str]
    gold: dict[str, str]
    before: Side
    after: Side


class ExamplesFacts(TypedDict):
    """The examples that lost and gained most, the worst ones left, and how many moved."""

    split: str
    counts: dict[str, int] | None
    repeats: NotRequired[int]
    lost: list[ExampleFacts]
    gained: list[ExampleFacts]
    worst: list[ExampleFacts]


class TraceFacts(TypedDict):
    """What the recorded traces tell."""

    components: list[ComponentCost]
    failures: list[FailureGroup]
    other_failures: int
    examples: ExamplesFacts


class Provenance(TypedDict):
    """What a reader needs to make the same run again."""

    signature: str
    defaults: dict[str, object]
    engines: dict[str, str]
    data: dict[str, SplitData]
    settings: OptimizeDocument
    versions: dict[str, str]
    start: str
    best: str
    began: float | None
    ended: float | None


class PlanDocument(TypedDict):
    """How the budget of a run is divided; see `compound.optimization.budget_plan.BudgetPlan`."""

    decisions: int
    jobs: int
    cost: float
    level: float


class Headline(TypedDict):
    """The result in words; the verdict is one of those of `compound.report.facts.words.headline`."""

    title: str
    sentence: str
    verdict: str
    notes: list[str]


class Measured(TraceFacts):
    """Everything that the report says about a run, but its headline."""

    run: str
    system: str
    metric: str
    method: str
    seed: int
    missing: str
    bounds: list[float] | None
    stopped: str
    test_skipped: str
    alpha: float
    plan: PlanDocument | None
    valid: SplitFacts
    test: SplitFacts
    methods: list[MethodRow]
    graph: GraphDocument
    curves: list[Curve]
    changes: list[ChangeDocument]
    decisions: list[DecisionFacts]
    outlook: OutlookFacts
    proposals: ProposalFacts | None
    jobs: list[JobRow]
    retries: list[RetryFacts]
    spent: SpentFacts
    files: dict[str, bool]
    provenance: Provenance


class RunFacts(Measured, Headline):
    """Everything that the report says about a run."""


# --- training ------------------------------------------------------------------------------------------

Step = Mapping[
    str, object
]  # numbers of a training step by name, and those of components under ``components``
Ends = Sequence[float | None]  # what a fact was at first and at last


class AnswerFacts(TypedDict):
    """An answer of a component, and what it earned."""

    reward: float
    text: str


class Sums(TypedDict):
    """What some steps took together, ``None`` where no step says; of the memory the most."""

    tokens: float | None
    sampled: float | None
    left_out: float | None
    masked: float | None
    skipped_updates: float | None
    lost: float | None
    failed: float | None
    prompt_tokens: float | None
    sample_seconds: float | None
    train_seconds: float | None
    prompts_saved: float | None
    memory: float | None


class Totals(Sums):
    """The same for all jobs of a method, with the tokens for each second."""

    steps: int
    sampling_speed: float | None
    training_speed: float | None


class TrainedComponent(TypedDict):
    """What a component was trained on, and its facts at either end."""

    samples: float | None
    tokens: float | None
    reward: Ends
    penalty: Ends
    entropy: Ends
    length: Ends
    similarity: Ends


class Chosen(TypedDict):
    """Which step a job proposed, and the held-out scores of the start and of that step."""

    best_step: int | None
    held_out: Ends


class TrainedJob(Sums, Chosen):
    """A job that trained weights."""

    number: int
    recipe: str
    steps: list[Step]
    reward: Ends
    skipped: Ends
    kept: Ends
    explained: Ends
    answers: dict[str, list[tuple[int, list[AnswerFacts]]]]
    components: dict[str, TrainedComponent]


class MethodTraining(TypedDict):
    """The jobs in which a method trained weights, and their sums."""

    method: str
    jobs: list[TrainedJob]
    totals: Totals


class TrainingFacts(TypedDict, total=False):
    """What the methods of a run recorded of training, or why it cannot be read."""

    problem: str
    methods: list[MethodTraining]


class ReportFacts(RunFacts):
    """What a report is written from."""

    rewards: Mapping[str, object] | None
    training: TrainingFacts | None
