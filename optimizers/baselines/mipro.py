"""MIPROv2: choose the instructions and demonstrations of all components jointly, by TPE on minibatches.

Opsahl-Ong et al. 2024, "Optimizing Instructions and Demonstrations for Multi-Stage Language Model
Programs", with the settings of DSPy's MIPROv2: multivariate TPE suggests one combination of values per
trial, which is scored on a minibatch; every few trials, the one with the best average that was not
fully evaluated yet is. The best fully evaluated combination wins.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pydantic import Field

from compound.core.errors import MissingExtra, TooManyFailures
from compound.core.example import Example
from compound.core.formatting import plural
from compound.core.narrowing import entry
from compound.core.storage.state import State
from compound.execution.rng import derive_seed, generator
from compound.graph.configuration import canonical_json, component_of
from compound.graph.space import Demo, Demos, Text, as_demos
from compound.graph.system import System
from compound.optimization.method import JobPlan, PlannedJob, Progress, Proposal, RequestCount, Task
from compound.optimization.settings.base import ModelName, Settings
from compound.optimizers.baselines.mipro_proposer import BATCHES, DEMOS, ROWS, Proposer
from compound.optimizers.scheduling import demo_keys, text_keys
from compound.optimizers.search.proposers.demos import (
    WeightedDemo,
    bootstrap,
    bootstrap_pools,
    correct_calls,
    draw_demos,
    labelled_demos,
)
from compound.optimizers.search.proposers.edits import bounded_edit, clauses_for
from compound.optimizers.search.sources import MAX_POOL, split

MINIBATCH = 35  # examples of a trial
EDITS_TRIED = 20  # edits tried per instruction, since duplicates are dropped
WATCHED = 16  # runs that provide demonstrations for requests only, if no component has tunable demonstrations

Auto = Literal["light", "medium", "heavy"]
Source = Literal["llm", "edits"]
SIZES: Mapping[Auto, tuple[int, int]]
SIZES = {"light": (6, 100), "medium": (12, 300), "heavy": (18, 1000)}
FULL_EVERY = 5  # trials between full evaluations
WHOLE = 50  # with at most this many examples, each trial is a full evaluation
RANDOM = 10  # random trials before the first suggestion of TPE, Optuna's default, as in DSPy
LARGER = 3  # size of the full set in minibatches, if the budget requires smaller sizes
Point = dict[str, int]  # by parameter, the number of one of its values; 0 is the incumbent's


class Trial(State):
    """A point with its mean score on some examples."""

    point: Point
    mean: float


class TrialPlan(State):
    """Sizes of a joint search."""

    trials: int
    batch: int
    # the number of examples of a full evaluation; if equal to `batch`, each trial is one
    full: int

    @property
    def runs(self) -> int:
        """System runs of the search, with the full evaluation of the incumbent.

        >>> TrialPlan(trials=20, batch=35, full=100).runs, TrialPlan(trials=20, batch=40, full=40).runs
        (1200, 840)
        """
        full = 0 if self.batch == self.full else math.ceil(self.trials / FULL_EVERY)
        return (1 + full) * self.full + self.trials * self.batch


class TrialSearch(State):
    """Progress of a joint search."""

    values: dict[str, list[object]]
    plan: TrialPlan
    trials: list[Trial] = Field(default_factory=list)
    # the fully evaluated points, in order; the first one is the incumbent
    full: list[Trial] = Field(default_factory=list)

    @property
    def evaluated(self) -> list[Trial]:
        """All fully evaluated points."""
        return [*self.full, *self.trials] if self.plan.batch == self.plan.full else self.full

    def changes(self, point: Point) -> dict[str, object]:
        """Return the values of a point that differ from the incumbent's."""
        return {key: self.values[key][number - 1] for key, number in point.items() if number}


class MIPROSettings(Settings):
    """Settings of `mipro`: the size of the search, and the source of instructions."""

    auto: Auto = "light"
    """Size of the search: `light` (6 values per parameter, full evaluations on 100 train examples), `medium`
    (12 and 300) or `heavy` (18 and 1,000). With tunable demonstrations, half as many instructions are
    written."""
    trials: int | None = Field(default=None, ge=1)
    """Number of trials; by default 2 m log2(n) for m parameters of n values, but at least 1.5 n."""
    proposers: tuple[Source, ...] = ("llm",)
    """Sources of instructions, used in turn: `llm` (a model that reads summaries and demonstrations), `edits`
    (a grammar of edits, which needs no model)."""
    edits_per_candidate: int = Field(default=2, ge=1)
    """Maximum number of edits between the incumbent and an instruction of `edits`."""
    lm: ModelName | None = None
    """The model that writes instructions; the system's own by default."""


class MIPROProgress(State):
    """Progress of `Mipro`."""

    # the sets of demonstrations of each parameter, without the incumbent's
    sets: dict[str, list[list[Demo]]]
    shown: dict[str, list[Demo]]  # the demonstrations of each component that requests may show
    plan: TrialPlan | None  # the sizes of the search; `None` if the system runs cover no trial
    summary: str | None = None
    attempts: int = 0
    texts: dict[str, list[str]] = Field(default_factory=dict)
    search: TrialSearch | None = None


@dataclass(frozen=True)
class Mipro:
    """Optimizer that searches the texts and demonstrations of all components jointly."""

    requires: ClassVar[tuple[str, ...]] = ("optuna",)

    settings: MIPROSettings = field(default_factory=MIPROSettings)

    def plan(self, job: PlannedJob) -> JobPlan:
        """Return the requests for summaries, descriptions and instructions."""
        candidates = 0 if job.runs < 2 * job.minibatch else None
        each = self._turns(job.system, job.keys).count("llm")
        if not job.texts or not each:
            return JobPlan(candidates=candidates)
        texts = len(job.texts) * each
        counts = {
            "observations": min(BATCHES, math.ceil(len(job.train) / ROWS)),
            "summaries": 1,
            "descriptions": 2 * texts,
            "new prompts": texts,
        }
        requests = [
            RequestCount(purpose, count, self.settings.lm) for purpose, count in counts.items()
        ]
        return JobPlan(requests, candidates)

    def _turns(self, system: System, keys: Sequence[str]) -> list[str]:
        n = SIZES[self.settings.auto][0]
        has_demos = any(isinstance(system.parameters[key], Demos) for key in keys)
        count = (n // 2 if has_demos else n) - 1
        sources = self.settings.proposers
        return [sources[i % len(sources)] for i in range(count)] if sources else []

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        """Collect demonstrations, write instructions, choose among them jointly, and propose the best."""
        pool, examples = split(task)
        if task.resume is not None:
            state = MIPROProgress.from_json(task.resume)
        else:
            state = await self._collect(task, pool, examples)
            sets = sum(map(len, state.sets.values()))
            yield Progress(state.to_json(), f"{plural(sets, 'set')} of demonstrations")
        if state.plan is not None and state.search is None:
            async for note in self._write(
                task, state, [*pool, *examples[state.plan.full :]] or examples
            ):
                yield Progress(state.to_json(), note)
            values: dict[str, list[object]] = {}
            values |= {key: list(texts) for key, texts in state.texts.items() if texts}
            values |= {key: list(sets) for key, sets in state.sets.items() if sets}
            state.search = TrialSearch(values=values, plan=state.plan)
        if state.search is not None and state.search.values:
            async for after in search_jointly(task, state.search, examples):
                best = max(trial.mean for trial in after.evaluated)
                note = f"{plural(len(after.evaluated), 'full evaluation')}: best {best:.3f}"
                yield Progress(state.to_json(), note, step=len(after.trials), of=after.plan.trials)
        yield _proposal(state.search)

    async def _collect(
        self, task: Task, pool: Sequence[Example], examples: Sequence[Example]
    ) -> MIPROProgress:
        count = SIZES[self.settings.auto][0] - 1
        pools = await bootstrap_pools(task, pool)
        labelled = labelled_demos(task.system, task.context.metric, pool)
        sets = {}
        for key in demo_keys(task):
            space = task.system.parameters[key]
            assert isinstance(space, Demos)  # `demo_keys` returns keys of demonstrations only
            sets[key] = demo_sets(
                task.system.configuration[key],
                pools.get(key, ()),
                labelled.get(component_of(key), ()),
                count=count,
                most=space.max,
                seed=task.seed,
                key=key,
            )
        shown = {component_of(key): [demo.demo for demo in found] for key, found in pools.items()}
        watches = "llm" in self._turns(task.system, task.keys)
        others = [component_of(key) for key in text_keys(task) if component_of(key) not in shown]
        if watches and others and task.scorer.runs_left >= 4 * task.minibatch:
            rows = (pool or examples[::-1])[
                : min(WATCHED, task.minibatch)
            ]  # full sets use the first ones
            shown |= await _demonstrations(task, others, rows)
        parameters = len(text_keys(task)) + len(sets)
        plan = plan_trials(
            self.settings.trials or trials_for(parameters, count + 1),
            MINIBATCH,
            SIZES[self.settings.auto][1],
            least=task.minibatch,
            examples=len(examples),
            runs=task.scorer.runs_left,
        )
        return MIPROProgress(
            sets=sets, shown={name: demos[:MAX_POOL] for name, demos in shown.items()}, plan=plan
        )

    async def _write(
        self, task: Task, state: MIPROProgress, rows: Sequence[Example]
    ) -> AsyncIterator[str]:
        turns, keys = self._turns(task.system, task.keys), text_keys(task)
        proposer = Proposer(task, self.settings.lm)
        if state.summary is None:
            asks = "llm" in turns and keys and task.scorer.may_ask(self.settings.lm)
            state.summary = await proposer.summarize(rows) if asks else ""
            yield "summary of the data"
        while state.attempts < len(keys) * len(turns):
            key, number = keys[state.attempts // len(turns)], state.attempts % len(turns)
            texts = state.texts.setdefault(key, [])
            if turns[number] == "edits":
                text = self._edit(task, key, number, texts)
            elif task.scorer.may_ask(self.settings.lm):
                demos = _rotated(state, key, number)
                text = await proposer.write(key, number, state.summary, demos, texts)
            else:
                text = None
            texts += [] if text is None else [text]
            state.attempts += 1
            yield f"{plural(sum(map(len, state.texts.values())), 'new instruction')}"

    def _edit(self, task: Task, key: str, number: int, known: Sequence[str]) -> str | None:
        space, current = task.system.parameters[key], entry(task.system.configuration, key, str)
        assert isinstance(space, Text)  # `text_keys` returns keys of texts only
        for attempt in range(EDITS_TRIED):
            rng = generator(task.seed, "mipro", "edit", key, number, attempt)
            clauses = clauses_for(task.system, key)
            text = bounded_edit(current, rng, space, self.settings.edits_per_candidate, clauses)
            if text and text != current and text not in known:
                return text
        return None


async def _demonstrations(
    task: Task, components: Sequence[str], rows: Sequence[Example]
) -> dict[str, list[Demo]]:
    traces = await task.scorer.traces({}, rows)
    corrections = correct_calls(
        traces, task.system, task.context.metric, {row.id: row for row in rows}
    )
    return {
        name: [demo.demo for demo in bootstrap(traces, task.system.components[name], corrections)]
        for name in components
    }


def _rotated(state: MIPROProgress, key: str, number: int) -> list[Demo]:
    """Return the demonstrations that a request shows: those of one set, then those of the following sets."""
    component = component_of(key)
    sets = next((some for name, some in state.sets.items() if component_of(name) == component), [])
    if sets:
        first = number % len(sets)
        found = [demo for demos in [*sets[first:], *sets[:first]] for demo in as_demos(demos)]
    else:
        demos = state.shown.get(component, [])
        first = DEMOS * number % max(1, len(demos))
        found = [*demos[first:], *demos[:first]]
    return list({canonical_json(demo): demo for demo in found}.values())[:DEMOS]


def _proposal(search: TrialSearch | None) -> Proposal:
    if search is None or not search.trials:
        return Proposal({}, note="no new values to choose from, or too few system runs for a trial")
    before, best = search.full[0].mean, max(search.evaluated, key=lambda trial: trial.mean)
    values = search.changes(best.point) if best.mean > before else {}
    tried = len({canonical_json(trial.point) for trial in search.trials})
    return Proposal(
        values, before, best.mean, tried, "" if values else "no trial beat the incumbent"
    )


TRIES = 4  # draws per set, since duplicates are dropped


def demo_sets(
    current: object,
    bootstrapped: Sequence[WeightedDemo],
    labelled: Sequence[Demo],
    *,
    count: int,
    most: int,
    seed: int,
    key: str,
) -> list[list[Demo]]:
    """Return distinct sets of demonstrations, without the current one.

    They are none; labelled ones; the best bootstrapped ones; and random bootstrapped ones. The latter two
    are filled up with labelled ones.
    """
    seen = {canonical_json(as_demos(current))}
    sets: list[list[Demo]] = []

    def add(demos: Sequence[Demo]) -> None:
        name = canonical_json(demos)
        if name not in seen and len(sets) < count:
            seen.add(name)
            sets.append(list(demos))

    add([])
    if labelled:
        add(_fill([], labelled, most, seed, key, 0))
    if bootstrapped:
        add(_fill([demo.demo for demo in bootstrapped[:most]], labelled, most, seed, key, 1))
    for number in range(TRIES * count if bootstrapped else 0):
        drawn = draw_demos(bootstrapped, most, generator(seed, "mipro", key, "drawn", number))
        add(_fill(drawn, labelled, most, seed, key, number + 2))
    return sets


def _fill(
    demos: Sequence[Demo], labelled: Sequence[Demo], most: int, seed: int, key: str, number: int
) -> list[Demo]:
    """Return demonstrations followed by random labelled ones with other inputs, ``most`` in total."""
    shown = {canonical_json(demo["inputs"]) for demo in demos}
    rest = [demo for demo in labelled if canonical_json(demo["inputs"]) not in shown]
    order = generator(seed, "mipro", key, "labelled", number).permutation(len(rest))
    return [*demos, *(rest[i] for i in order[: most - len(demos)])]


def trials_for(parameters: int, values: int) -> int:
    """Return the number of trials as in the paper's code: max(2 m log2(n), 1.5 n), rounded down.

    >>> [trials_for(4, n) for n in (6, 12, 18)], trials_for(1, 8), trials_for(0, 6)
    ([20, 28, 33], 12, 0)
    """
    return int(max(2 * parameters * math.log2(values), 1.5 * values)) if parameters else 0


def plan_trials(
    trials: int, most: int, full: int, *, least: int, examples: int, runs: float
) -> TrialPlan | None:
    """Return the sizes of a search that ``runs`` system runs cover; ``None`` if they cover no trial.

    The wanted sizes are ``trials`` trials on minibatches of ``most`` examples, and ``full`` examples of a
    full evaluation. They are reduced in this order: the full set, down to three minibatches; the
    minibatch, down to ``least``; the number of trials, down to 1; and the full set, down to one
    minibatch.

    >>> plan_trials(20, 35, 100, least=8, examples=200, runs=1200)
    TrialPlan(trials=20, batch=35, full=100)
    >>> plan_trials(20, 35, 100, least=8, examples=200, runs=300)
    TrialPlan(trials=20, batch=8, full=24)
    >>> plan_trials(20, 35, 100, least=8, examples=200, runs=100)
    TrialPlan(trials=5, batch=8, full=24)
    """
    if not trials or not examples:
        return None
    full = min(full, examples)
    plans = _plans(trials, min(most, full), full, min(least, full))
    return next((plan for plan in plans if plan.runs <= runs), None)


def _plans(trials: int, most: int, full: int, least: int) -> Iterator[TrialPlan]:
    """Yield sizes in the order in which they are preferred."""
    if full <= WHOLE:
        yield TrialPlan(trials=trials, batch=full, full=full)
    for size in range(full, min(LARGER * most, full) - 1, -1):
        yield TrialPlan(trials=trials, batch=min(most, size), full=size)
    for batch in range(most - 1, least - 1, -1):
        yield TrialPlan(trials=trials, batch=batch, full=min(LARGER * batch, full))
    for fewer in range(trials - 1, 0, -1):
        yield TrialPlan(trials=fewer, batch=least, full=max(least, min(LARGER * least, full)))
    for size in range(min(LARGER * least, full) - 1, least - 1, -1):
        yield TrialPlan(trials=1, batch=least, full=size)


async def search_jointly(
    task: Task, state: TrialSearch, examples: Sequence[Example]
) -> AsyncIterator[TrialSearch]:
    """Advance a search; yield its progress after the evaluation of the incumbent and after each trial."""
    plan, full_set = state.plan, examples[: state.plan.full]
    full = (
        0 if plan.batch == plan.full else plan.full
    )  # system runs reserved for the next full evaluation
    if not state.full:
        if task.scorer.runs_left < plan.full + plan.batch + full:
            return
        (incumbent,) = await task.scorer.score([{}], full_set)
        state.full.append(Trial(point=dict.fromkeys(sorted(state.values), 0), mean=incumbent.mean))
        yield state
    while len(state.trials) < plan.trials and task.scorer.runs_left >= plan.batch + full:
        # draws depend on the order, which checkpoints do not preserve
        sizes = {key: len(values) + 1 for key, values in sorted(state.values.items())}
        known = [(trial.point, trial.mean) for trial in [*state.full, *state.trials]]
        point = next_point(sizes, known, task.seed)
        order = generator(task.seed, "minibatch", len(state.trials)).permutation(len(full_set))
        mean = await _mean(task, state, point, [full_set[i] for i in order[: plan.batch]])
        state.trials.append(Trial(point=point, mean=mean))
        done = len(state.trials)
        is_last = done == plan.trials or task.scorer.runs_left < full + plan.batch + full
        if full and (done % FULL_EVERY == 0 or is_last):
            best = promising(state.trials, [trial.point for trial in state.full])
            if best is not None:
                state.full.append(Trial(point=best, mean=await _mean(task, state, best, full_set)))
        yield state


async def _mean(task: Task, state: TrialSearch, point: Point, examples: Sequence[Example]) -> float:
    try:
        (evaluation,) = await task.scorer.score([state.changes(point)], examples)
    except TooManyFailures:
        return task.context.rules.failure_score
    return evaluation.mean


def promising(trials: Sequence[Trial], evaluated: Sequence[Point]) -> Point | None:
    """Return the point with the best mean over its trials that was not fully evaluated yet.

    >>> trials = [Trial(point={"a": a}, mean=mean) for a, mean in [(1, 0.9), (2, 0.6), (1, 0.2)]]
    >>> promising(trials, evaluated=[{"a": 0}])
    {'a': 2}
    """
    points = {canonical_json(trial.point): trial.point for trial in trials}
    means: dict[str, list[float]] = {}
    for trial in trials:
        if trial.point not in evaluated:
            means.setdefault(canonical_json(trial.point), []).append(trial.mean)
    if not means:
        return None
    return points[max(means, key=lambda name: sum(means[name]) / len(means[name]))]


def next_point(
    sizes: Mapping[str, int], trials: Sequence[tuple[Mapping[str, int], float]], seed: int
) -> dict[str, int]:
    """Return the next suggestion of multivariate TPE (Bergstra et al. 2011).

    The study is rebuilt from the trials, with a sampler seeded by their number, so that a resumed search
    makes the same suggestions.
    """
    try:
        import optuna
    except ImportError:
        raise MissingExtra("mipro", "optuna", "search") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # of `multivariate`
        number = derive_seed(seed, "trial", len(trials)) % 2**32
        make_sampler = optuna.samplers.TPESampler
        sampler = make_sampler(seed=number, n_startup_trials=RANDOM, multivariate=True)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    make = optuna.distributions.CategoricalDistribution
    options = {name: make(range(size)) for name, size in sizes.items()}
    for point, score in trials:
        study.add_trial(
            optuna.trial.create_trial(params=dict(point), distributions=options, value=score)
        )
    trial = study.ask(options)
    return {name: trial.params[name] for name in sizes}
