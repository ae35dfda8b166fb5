"""Facts of a report as JSON types: a typed dictionary for each part.

The other modules of `compound.report.facts` and `compound.report.training` create them, the tables and
figures read them, and `compound.report.summarize` returns the complete facts of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NotRequired, TypedDict

from compound.evaluation.evaluate import Summary
from compound.evaluation.paired_tests import TestName
from compound.evaluation.statistics import IntervalDocument
from compound.graph.draw import GraphDocument
from compound.optimization.prospects import Detection, ProspectDocument
from compound.runs.events import ChangeRow, Gain, Spent, Verdict


class SplitData(TypedDict):
    """Number of examples in a split, and their digest."""

    n: int
    digest: str


class OptimizeDocument(TypedDict):
    """Settings of a run that the report reads, as JSON types."""

    method: str
    seed: int
    alpha: float
    failure_score: float
    budget: dict[str, float | None]


class RunConfig(TypedDict):
    """Parts of a run's ``config.json`` that the report reads: the configuration of the run."""

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


class MethodSpending(TypedDict, total=False):
    """Spending of a method; unknown numbers are None or absent."""

    system_runs: float | None
    test_runs: float | None
    calls: int | None
    prompt_tokens: int | None
    completion_tokens: int | None
    cost: float | None
    unpriced: int | None
    seconds: float | None


class MethodRow(MethodSpending):
    """A row of the comparison of methods; the spending of the unoptimized system is not counted."""

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
    """A score with its interval; ``at`` is the number of system runs spent before it."""

    at: float
    mean: float
    low: float | None
    high: float | None


class TrainPoint(TypedDict):
    """A job's comparison on train examples; ``at`` is the number of system runs spent before it."""

    at: float
    before: float
    after: float
    proposed: bool


class DecidedPoint(TypedDict):
    """A decision; ``at`` is the number of system runs spent before it."""

    at: float
    accepted: bool
    before: Summary
    after: Summary
    changed: list[str]


class Curve(TypedDict):
    """Scores of a method over its search; ``end`` is the number of system runs of the search."""

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
    """An acceptance decision; ``at`` is the number of system runs spent before it.

    ``test`` is ``None`` in records of earlier versions, whose test was that of sign flips.
    """

    decision: int
    accepted: bool
    level: float
    verdict: Verdict | None
    probability: float | None
    examples: int | None
    margin: float | None
    p: float | None
    test: TestName | None
    before: Summary | None
    after: Summary | None
    gain: Gain | None
    changes: list[ChangeRow]
    over: list[str]
    note: str | None
    at: float


class JobRow(TypedDict):
    """An optimizer's job; ``at`` is the number of system runs spent when it ended."""

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
    """Failed test rows that were retried."""

    method: str
    evaluation: str
    failed: int
    retried: int
    recovered: int
    before: Summary
    after: Summary
    note: str | None


class UsageTotals(TypedDict):
    """Total usage of calls."""

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
    """Requests for proposals: outcomes by model, why requests to a model were stopped, and total usage."""

    models: dict[str, TallyFacts]
    stopped: dict[str, str]


class OutlookFacts(TypedDict, total=False):
    """Gains that the run can detect, estimated before it started."""

    detection: Detection
    jobs: list[ProspectDocument]
    told: list[str]
    duplicates: list[str]


class SpentFacts(Spent, total=False):
    """Spending of a run, and the number of incidents at servers by kind."""

    incidents: dict[str, int]


class ComponentCost(UsageTotals):
    """Usage of the recorded calls of a component; the row ``""`` is everything else."""

    component: str
    executed: int | None
    reused: int | None
    seconds: float | None


class FailureGroup(TypedDict):
    """Runs that failed for the same reason, by split."""

    kind: str
    message: str
    where: str
    count: int
    valid: int
    test: int


class Shown(TypedDict, total=False):
    """Parts of a trace that the report shows, cut to a readable length."""

    inputs: dict[str, str]
    gold: dict[str, str]
    outputs: dict[str, str]
    failure: str
    messages: dict[str, str]
    feedback: str


class Side(Shown, total=False):
    """Result of an example under one configuration."""

    score: float


class ExampleFacts(TypedDict):
    """An example before and after."""

    example: str
    inputs: dict[str, str]
    gold: dict[str, str]
    before: Side
    after: Side


class ExamplesFacts(TypedDict):
    """Examples with the largest losses, gains and lowest scores, and counts of changed scores."""

    split: str
    counts: dict[str, int] | None
    repeats: NotRequired[int]
    lost: list[ExampleFacts]
    gained: list[ExampleFacts]
    worst: list[ExampleFacts]


class TraceFacts(TypedDict):
    """Facts computed from the recorded traces."""

    components: list[ComponentCost]
    failures: list[FailureGroup]
    other_failures: int
    examples: ExamplesFacts


class Provenance(TypedDict):
    """Information for reproducing the run."""

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


class FrontRow(TypedDict):
    """A candidate on the front of score against cost, or the initial or the chosen one."""

    mean: float
    low: float | None
    high: float | None
    gain: float | None
    evaluations: int
    cost: float
    fate: str
    chosen: bool
    on_front: bool
    changed: list[str]


class FrontFacts(TypedDict):
    """Gains against costs of the evaluated candidates; the hypervolume is relative to the worst of both."""

    cost: Literal["usd", "tokens"]
    candidates: int
    hypervolume: float
    rows: list[FrontRow]


class PlanDocument(TypedDict):
    """Division of a run's budget; see `compound.optimization.budget_plan.BudgetPlan`."""

    decisions: int
    jobs: int
    cost: float
    level: float


class Headline(TypedDict):
    """Result in words; the verdict is one of those of `compound.report.facts.words.headline`."""

    title: str
    sentence: str
    verdict: str
    notes: list[str]


class Measured(TraceFacts):
    """All facts of the report on a run, except its headline."""

    run: str
    system: str
    metric: str
    method: str
    seed: int
    missing: str
    bounds: list[float] | None
    bounds_violation: str
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
    front: FrontFacts | None
    cost_notes: list[str]
    proposals: ProposalFacts | None
    jobs: list[JobRow]
    retries: list[RetryFacts]
    spent: SpentFacts
    files: dict[str, bool]
    provenance: Provenance


class RunFacts(Measured, Headline):
    """All facts of the report on a run."""


# --- training ------------------------------------------------------------------------------------------

Step = Mapping[
    str, object
]  # numbers of a training step by name, and those of components under ``components``
Ends = Sequence[float | None]  # means of a number over the first and the last steps


class AnswerFacts(TypedDict):
    """An answer of a component, and its reward."""

    reward: float
    text: str


class Sums(TypedDict):
    """Totals over some steps, None if no step recorded the number; ``memory`` is the maximum."""

    tokens: float | None
    sampled: float | None
    left_out: float | None
    masked: float | None
    refilled: float | None
    skipped_updates: float | None
    lost: float | None
    failed: float | None
    prompt_tokens: float | None
    sample_seconds: float | None
    train_seconds: float | None
    prompts_saved: float | None
    memory: float | None


class Totals(Sums):
    """Totals over all jobs of a method, with speeds in tokens per second."""

    steps: int
    sampling_speed: float | None
    training_speed: float | None


class TrainedComponent(TypedDict):
    """Training data of a component, and its numbers at the first and the last steps."""

    samples: float | None
    tokens: float | None
    reward: Ends
    penalty: Ends
    entropy: Ends
    length: Ends
    similarity: Ends


class Chosen(TypedDict):
    """Step that a job proposed, and the held-out scores of the start and of that step."""

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
    """Jobs in which a method trained weights, and their totals."""

    method: str
    jobs: list[TrainedJob]
    totals: Totals


class TrainingFacts(TypedDict, total=False):
    """Training records of the methods of a run, or the reason why they cannot be read."""

    problem: str
    methods: list[MethodTraining]


class ReportFacts(RunFacts):
    """All facts that a report is written from."""

    rewards: Mapping[str, object] | None
    training: TrainingFacts | None
