"""Local rewards in the joint search: gains of a component's values, at the price of the component alone.

Every global run gives draws: outputs of a component for equal inputs, with the scores that they led
to, to which a local reward is fitted (`compound.rewards.gains`). Values of the component are then
evaluated without what follows it, and the model of gains weighs what this tells against the scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from compound.core.example import Example
from compound.core.threads import compute
from compound.execution.trace import Call, Trace
from compound.graph.configuration import (
    canonical_json,
    component_of,
    components_of,
    to_readable_json,
)
from compound.graph.space import PerInput
from compound.graph.system import System
from compound.optimization.method import Task
from compound.optimization.prices import Prices
from compound.optimizers.search.candidates import GlobalRuns, LocalCell, Values, incumbent_values
from compound.optimizers.search.gain_model import GainModel, Observation
from compound.optimizers.search.part import Part, part_of, run_parts
from compound.optimizers.search.ratings import Ratings
from compound.optimizers.search.rewarding import RunRewards
from compound.rewards.buffer import Entry, PairBuffer
from compound.rewards.candidates import Candidate
from compound.rewards.features import Template
from compound.rewards.fit import fit_rewards
from compound.rewards.gains import (
    Critic,
    Slope,
    answers_of,
    fit_critic,
    gold_features,
    read_call,
    shrink,
    slope_within,
    trust_in,
)
from compound.rewards.inspection import record_reward, without_order
from compound.rewards.model import store_reward
from compound.rewards.pairs import Draw, has_certain_downstream
from compound.rewards.settings import RewardLearning

WORTH = 1.2  # price of a global over a local evaluation below which there is nothing to save
# of a component in one pass: its most promising values, on further examples
VALUES, EXAMPLES = 3, 2
DIGITS = 12  # of mean scores: equal ones must not differ by rounding errors
ENOUGH = 8  # examples with several outputs, before rewards are used
NOTHING_FOLLOWS = "nothing counted follows it"
Place = tuple[
    str, str, int
]  # a component, the values of all parameters, and the number of an example


@dataclass(frozen=True)
class RewardGuide:
    """Prepares the local evaluations of a job."""

    learning: RewardLearning
    gold: bool = True  # whether the rewards may read the gold answers of train examples
    judge: str | None = None  # rates outputs by the gold answers; `None` for no ratings
    # fits a reward to draws; `fit_critic`, or a control of an experiment
    fit: Callable[..., Critic | None] = fit_critic

    def prepare(self, task: Task, examples: Sequence[Example]) -> LocalGains | None:
        """Return the local evaluations of a job; ``None`` if none saves anything."""
        names = components_of(task.keys)
        cheap = [
            name for name in names if not savings_of(task.system, name, task.prices).unused_reason
        ]
        if not cheap and not chosen_for_each_input(task):
            return None
        parts = {name: part_of(task.system, name, task.prices) for name in names}
        return LocalGains(self, task, RunRewards.load(task, self.learning), parts, cheap, examples)


def chosen_for_each_input(task: Task) -> list[str]:
    """Return the keys of a job whose values may be chosen for each input."""
    return [key for key in task.keys if isinstance(task.system.parameters[key], PerInput)]


@dataclass(frozen=True)
class LocalSavings:
    """What the local reward of a component may save, by the prices of evaluations.

    >>> print(LocalSavings("a", 1.0, 0.25), LocalSavings("d", 0.25, 0.25, "the last one"), sep="; ")
    a 4 times (1 of a run globally, 0.25 locally); d none: the last one
    """

    component: str
    global_price: float  # system runs of a global evaluation of a change on one example
    local_price: float
    # why the component is searched by the global reward; `""` if it has a local one
    unused_reason: str = ""

    @property
    def price(self) -> float:
        """System runs of an evaluation by the reward that the component is searched with."""
        return self.global_price if self.unused_reason else self.local_price

    def __str__(self) -> str:
        if self.unused_reason:
            return f"{self.component} none: {self.unused_reason}"
        factor = f"{total_savings([self]):.3g} times" if self.price else "without limit"
        prices = f"{self.global_price:.3g} of a run globally, {self.local_price:.3g} locally"
        return f"{self.component} {factor} ({prices})"


def total_savings(components: Sequence[LocalSavings]) -> float:
    """Return by how much local rewards make evaluations of some components cheaper, at most; may be infinite.

    >>> total_savings([LocalSavings("a", 1.0, 0.25), LocalSavings("d", 0.25, 0.25, "the last one")])
    2.5
    """
    whole, part = sum(c.global_price for c in components), sum(c.price for c in components)
    return whole / part if part else math.inf if whole else 1.0


def describe_savings(components: Sequence[LocalSavings]) -> str:
    """Return what local rewards may save as a sentence."""
    found = total_savings(components)
    whole = f"at most {found:.3g} times" if math.isfinite(found) else "without limit"
    each = "; ".join(map(str, components))
    return f"local rewards may make an evaluation of a candidate cheaper: {each}; {whole} in all"


def savings_of(system: System, component: str, prices: Prices) -> LocalSavings:
    """Return what the local reward of a component may save."""
    part, price = part_of(system, component, prices), prices.change([component])
    reason = ""
    if not (price > 0 and price >= WORTH * part.price):
        follows = price > part.price + 1e-9
        cheap = f"a global evaluation costs less than {WORTH:g} local ones"
        reason = cheap if follows else NOTHING_FOLLOWS
    return LocalSavings(component, price, part.price, reason)


@dataclass
class LocalGains:
    """Evaluations of single components in one job, at a lower price than whole runs."""

    guide: RewardGuide
    task: Task
    rewards: RunRewards
    parts: Mapping[str, Part]  # the part of the system that ends with each component
    cheap: Sequence[str]  # the components whose local evaluations save something
    examples: Sequence[Example]
    # for each component with a local reward, the expected gain of the score per unit of it, and the
    # variance of this estimate
    slopes: Mapping[str, Slope] = field(default_factory=dict)
    _critics: dict[str, Critic] = field(default_factory=dict)
    _known: dict[Place, dict[str, float]] = field(default_factory=dict)  # rewards by inputs
    _calls: dict[Place, Sequence[Call]] = field(default_factory=dict)
    _signals: dict[Place, Mapping[str, float]] = field(default_factory=dict)
    _scores: dict[tuple[str, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._backbone = self.rewards.frozen_backbone()
        components = self.task.system.components
        self._templates = {name: Template.of(components[name]) for name in self.parts}
        self._ratings = (
            Ratings(self.task, judge) if (judge := self.guide.judge) is not None else None
        )
        self._iteration = self.rewards.iteration + 1
        given = [Entry(draw, 0) for draw in self.task.context.earlier.draws]
        self._earlier = {
            name: [*(e for e in given if e.draw.component == name), *self.rewards.buffer.of(name)]
            for name in self.parts
        }

    @property
    def trust(self) -> float:
        """How sure it is that the rewards order outputs like the score: the surest one counts."""
        return max(map(trust_in, self.slopes.values()), default=0.0)

    # -- learning ----------------------------------------------------------------------------------------

    async def learn(self, runs: Iterable[GlobalRuns]) -> None:
        """Read the calls of global runs, which are in the cache, and fit the rewards to them."""
        found: dict[
            tuple[str, int], float
        ] = {}  # in an order that does not depend on interruptions
        for values, scores in runs:
            name = self._name(values)
            new = [row for row in scores if (name, row) not in self._scores]
            found |= {(name, row): scores[row] for row in sorted(scores)}
            for component in self.parts if new else ():
                await self._run(component, values, new)
        self._scores = found
        self._critics, self._known, slopes = {}, {}, dict[str, Slope]()
        for component in self.cheap:
            draws = self._draws(component)
            critic = await compute(self._fit, component, draws)
            if critic is not None and (slope := self._slope(component, critic, draws)) is not None:
                self._critics[component], slopes[component] = critic, slope
        draws = [draw for component in slopes for draw in self._draws(component)]
        if len({draw.example for draw in draws if len(draw.candidates) > 1}) < ENOUGH:
            slopes = {}
        variance = float(np.var([*self._scores.values()])) if self._scores else 0.0
        self.slopes = {
            name: slope for name, slope in shrink(slopes, variance).items() if slope[0] > 0
        }

    def _fit(self, component: str, draws: Sequence[Draw], *, ordered: bool = True) -> Critic | None:
        """Fit a reward to draws; without their order, the prior alone."""
        entries = [*self._earlier[component], *(Entry(draw, self._iteration) for draw in draws)]
        entries = entries if ordered else [without_order(entry) for entry in entries]
        certain = has_certain_downstream(self.task.system, component)
        return self.guide.fit(entries, self._templates[component], self._backbone, certain=certain)

    def _draws(self, component: str) -> list[Draw]:
        """Return the outputs of a component for equal inputs, with the mean scores that they led to."""
        found: dict[tuple[int, str], tuple[Call, dict[str, tuple[Candidate, list[float]]]]] = {}
        certain = has_certain_downstream(self.task.system, component)
        for (name, row), score in self._scores.items():
            place = component, name, row
            for call in self._calls.get(place, ()):
                if call.failure is None:
                    _, outputs = found.setdefault((row, _text(call.inputs)), (call, {}))
                    made = Candidate(call.outputs, (), {}, certain, self._signals[place])
                    outputs.setdefault(_text(call.outputs), (made, []))[1].append(score)
        configuration = self.task.system.configuration.digest
        draws = []
        for (row, _), (call, outputs) in found.items():
            candidates = tuple(
                Candidate(
                    made.outputs,
                    (round(float(np.mean(scores)), DIGITS),),
                    {},
                    certain,
                    made.signals,
                )
                for made, scores in outputs.values()
            )
            example = self.examples[row].id
            draws.append(
                Draw(component, call.address, example, configuration, dict(call.inputs), candidates)
            )
        return draws

    def _slope(self, component: str, critic: Critic, draws: Sequence[Draw]) -> Slope | None:
        several = [draw for draw in draws if len(draw.candidates) > 1]
        outputs = [
            (number, draw, made) for number, draw in enumerate(several) for made in draw.candidates
        ]
        template = self._templates[component]
        readings = [
            read_call(template, draw.inputs, made.outputs, made.signals)
            for _, draw, made in outputs
        ]
        examples = [draw.example for _, draw, _ in outputs]
        scores = np.array([made.value for _, _, made in outputs])
        calls = [number for number, _, _ in outputs]
        rewards = critic.rewards(readings, examples)
        return slope_within(rewards, scores, calls, examples) if outputs else None

    # -- evaluation --------------------------------------------------------------------------------------

    async def evaluate(
        self,
        cells: list[LocalCell],
        model: GainModel,
        leader: Values,
        options: Mapping[str, Sequence[Values]],
        runs: float,
        rng: np.random.Generator,
    ) -> None:
        """Evaluate the values of each component that a draw ranks highest on further examples."""
        for component in rng.permutation(sorted(self.slopes)).tolist():
            part, current = self.parts[component], self._current(component)
            above = part.system.parameters.keys() - current.keys()
            before = {key: value for key, value in leader.items() if key in above}
            base = _cell(cells, component, current, before)
            others = [values for values in options[component] if _text(values) != _text(current)]
            drawn = model.draw([{**leader, **values} for values in others], rng, component)
            plan: dict[int, list[int]] = {}
            ready = set(base.rows)
            for i in np.argsort(-drawn, kind="stable").tolist():
                cell = _cell(cells, component, others[i], before)
                rows = [row for row in range(len(self.examples)) if row not in cell.rows][:EXAMPLES]
                cost = part.price * len(rows) + part.weight * len(set(rows) - ready)
                if len(plan) == VALUES or cost > runs:
                    break
                if rows:
                    runs -= cost
                    ready |= set(rows)
                    plan[i] = rows
            await self._add(base, sorted(ready - set(base.rows)))
            for i, rows in plan.items():
                await self._add(_cell(cells, component, others[i], before), rows)

    async def _add(self, cell: LocalCell, rows: Sequence[int]) -> None:
        cell.failed += await self._run(cell.component, {**cell.context, **cell.values}, rows)
        cell.rows += rows

    async def restore(self, cells: Sequence[LocalCell]) -> None:
        """Repeat the evaluations of an interrupted job from the cache, except those that failed."""
        for cell in cells:
            rows = [row for row in cell.rows if row not in cell.failed]
            await self._run(cell.component, {**cell.context, **cell.values}, rows)

    async def _run(self, component: str, values: Values, rows: Sequence[int]) -> list[int]:
        part, name = self.parts[component], self._name(values)
        missing = [row for row in rows if (component, name, row) not in self._calls]
        if not missing:
            return []
        system = part.bind({**self.task.system.configuration.to_json(), **values})
        (traces,) = await run_parts(
            self.task.context, part, [system], [self.examples[row] for row in missing]
        )
        failed = []
        for row, trace in zip(missing, traces, strict=True):
            place, calls = (component, name, row), trace.calls_of(component)
            if not calls or any(call.failure is not None for call in calls):
                failed.append(row)
            self._calls[place] = calls
            self._signals[place] = self._signals_of(part, trace, self.examples[row])
        if self._ratings is not None and component in self.cheap:
            places = [(component, name, row) for row in missing]
            runs = [(self._calls[place], self.examples[place[2]]) for place in places]
            for place, rating in zip(places, await self._ratings.of(component, runs), strict=True):
                self._signals[place] = {**self._signals[place], **rating}
        return failed

    def _signals_of(self, part: Part, trace: Trace, example: Example) -> Mapping[str, float]:
        """Return the features of a trace of a part that only a train example has."""
        shown = {
            f"{name}.{port}": value
            for name in (part.component, *part.effects)
            for call in trace.calls_of(name)
            for port, value in call.outputs.items()
        }
        return gold_features(shown, answers_of(example)) if self.guide.gold else {}

    async def policies(self) -> Values:
        """Return rewards, which read no gold answers, as values of parameters chosen for each input."""
        keys = {component_of(key): key for key in chosen_for_each_input(self.task)}
        if not keys:
            return {}
        known = self.rewards.buffer
        new = [
            Entry(draw, self._iteration) for component in keys for draw in self._draws(component)
        ]
        draws = PairBuffer(known.system, known.sampling, [*known.entries, *new])
        name, seed = self.guide.learning.backbone.model, self.task.pool_seed
        learned = await compute(
            fit_rewards, draws, self.task.system, [*keys], self._backbone, name, seed=seed
        )
        model = learned.model
        folder = self.task.context.memory.folder
        rewards = model.rewards_of
        return {keys[name]: store_reward(model, name, folder) for name in rewards}

    # -- results -----------------------------------------------------------------------------------------

    def observations(self, cells: Sequence[LocalCell]) -> list[Observation]:
        """Return the mean differences of rewards to the incumbent's calls; a failed call is the worst."""
        found: dict[tuple[str, str], tuple[Values, list[int], list[float]]] = {}
        numbers: dict[tuple[str, int], int] = {}  # of the pairs of a context and an example
        for cell in cells:
            current = self._current(cell.component)
            if cell.component not in self.slopes or _text(cell.values) == _text(current):
                continue
            name = cell.component, _text(cell.values)
            _, rows, differences = found.setdefault(name, (cell.values, [], []))
            for row in cell.rows:
                difference = self._difference(cell, {**cell.context, **current}, row, cells)
                if difference is not None:
                    context = f"{cell.component} {_text(cell.context)}", row
                    rows.append(numbers.setdefault(context, len(numbers)))
                    differences.append(difference)
        whole = incumbent_values(self.task)
        return [
            Observation.of({**whole, **values}, differences, rows, component)
            for (component, _), (values, rows, differences) in found.items()
            if rows
        ]

    def _difference(
        self, cell: LocalCell, base: Values, row: int, cells: Sequence[LocalCell]
    ) -> float | None:
        """Return the mean difference of rewards of the calls for the same inputs; ``None`` without any."""
        ours = self._rewards_at((cell.component, self._name(base), row))
        if row in cell.failed and ours:
            others = [
                each for each in cells if each.component == cell.component and row in each.rows
            ]
            known = [self._rewards_at(self._place(each, row)) for each in others]
            return min(r for own in known for r in own.values()) - float(np.mean([*ours.values()]))
        theirs = self._rewards_at(self._place(cell, row))
        found = [theirs[inputs] - reward for inputs, reward in ours.items() if inputs in theirs]
        return float(np.mean(found)) if found else None

    def _place(self, cell: LocalCell, row: int) -> Place:
        return cell.component, self._name({**cell.context, **cell.values}), row

    def _rewards_at(self, place: Place) -> dict[str, float]:
        component, _, row = place
        if place not in self._known:
            calls = [call for call in self._calls.get(place, ()) if call.failure is None]
            signals, template = self._signals.get(place, {}), self._templates[component]
            readings = [read_call(template, call.inputs, call.outputs, signals) for call in calls]
            found = self._critics[component].rewards(readings, [self.examples[row].id] * len(calls))
            self._known[place] = {
                _text(c.inputs): r for c, r in zip(calls, found.tolist(), strict=True)
            }
        return self._known[place]

    async def finish(self, cells: Sequence[LocalCell]) -> Mapping[str, object]:
        """Add the draws to the run's memory, fit rewards to all of it, and return how these were used."""
        draws = [draw for component in self.parts for draw in self._draws(component)]
        self.rewards.add(draws, self._iteration, len({draw.example for draw in draws}))
        learned = await self.rewards.learn()
        return {
            **self.rewards.facts(learned),
            "local": {
                component: {
                    "trust": trust_in(self.slopes[component]) if component in self.slopes else 0.0,
                    "slope": self.slopes.get(component, (0.0, 0.0))[0],
                    "evaluations": sum(
                        len(cell.rows) for cell in cells if cell.component == component
                    ),
                    "price": part.price,
                    "global_price": self.task.prices.change([component]),
                    "record": await compute(self._record, component, draws),
                }
                for component, part in self.parts.items()
                if component in self.cheap
            },
        }

    def _record(self, component: str, draws: Sequence[Draw]) -> Mapping[str, object] | None:
        if (critic := self._critics.get(component)) is None:
            return None
        own = [draw for draw in draws if draw.component == component]
        several = [draw for draw in own if len(draw.candidates) > 1]
        prior = self._fit(component, own, ordered=False)
        return asdict(record_reward(critic, prior, several)) if several else None

    def _current(self, component: str) -> Values:
        values = incumbent_values(self.task)
        return {key: value for key, value in values.items() if component_of(key) == component}

    def _name(self, values: Mapping[str, object]) -> str:
        return canonical_json({**incumbent_values(self.task), **values})


def _cell(cells: list[LocalCell], component: str, values: Values, context: Values) -> LocalCell:
    """Return the evaluations of some values, new ones if there are none."""
    name = canonical_json([component, values, context])
    for cell in cells:
        if canonical_json([cell.component, cell.values, cell.context]) == name:
            return cell
    cells.append(LocalCell(component=component, values=values, context=context))
    return cells[-1]


def _text(values: Mapping[str, object]) -> str:
    return canonical_json(to_readable_json(values))
