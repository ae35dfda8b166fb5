"""Evaluations of the candidates of a component or segment: global scores, and local runs of a part.

A local reward is computed from a run of the part; every global evaluation gives draws, to which the reward is
fitted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from compound.example import Example
from compound.execution.trace import Call, Trace, TraceDocument, from_json, to_json
from compound.graph.configuration import canonical_json, to_readable_json
from compound.optimization.method import Task
from compound.optimizers.optimas.part import Part, run_parts
from compound.optimizers.search.prompts import is_whole
from compound.rewards.buffer import Entry
from compound.rewards.features import Embedder
from compound.rewards.gains.critic import Critic, fit_critic, read_call
from compound.rewards.gains.estimates import EstimateGains, Evaluations, estimate_gains
from compound.rewards.gains.gold import answers_of, gold_features
from compound.rewards.pairs import Draw
from compound.rewards.sampling.candidates import Candidate
from compound.rewards.template import Template
from compound.storage.state import State

__all__ = ["Cell", "Conditions", "EvaluationTable", "FitCritic", "StoredEvaluations"]

Cell = tuple[int, int]  # row and column of a table


class FitCritic(Protocol):
    """Fits the local reward of a component to draws; see `compound.rewards.gains.critic.fit_critic`."""

    def __call__(
        self, entries: Sequence[Entry], template: Template, backbone: Embedder, *, certain: bool
    ) -> Critic | None:
        """Return the local reward; ``None`` if there are too few draws."""
        ...


@dataclass(frozen=True)
class Conditions:
    """What a guided race needs besides the task.

    Attributes:
        part: the part of the system that evaluates the component locally.
        price: system runs of a global evaluation whose prefix is cached.
        template: renders the component's calls.
        backbone: embeds texts.
        gold: whether the local reward may read the gold answers of train examples.
        certain: whether the components after this one are deterministic.
        estimate: estimates gains from evaluations; see `compound.rewards.gains.estimates`.
        fit: fits the local reward to draws.
    """

    part: Part
    price: float
    template: Template
    backbone: Embedder
    gold: bool = True
    certain: bool = True
    estimate: EstimateGains = estimate_gains
    fit: FitCritic = fit_critic


class StoredEvaluations(State):
    """Evaluations, as stored in a checkpoint; row 0 is the incumbent, row i + 1 is candidate i.

    Attributes:
        scores: the global scores of each row, by example; ``None`` if a run was lost to a transient failure.
        parts: the examples with local evaluations of each row.
        failed: row and example of the local evaluations that failed.
        failures: row, example and trace of the local evaluations with a failed call, which no cache holds.
    """

    scores: list[dict[int, float | None]] = Field(default_factory=list)
    parts: list[list[int]] = Field(default_factory=list)
    failed: list[tuple[int, int]] = Field(default_factory=list)
    failures: list[tuple[int, int, dict[str, Any]]] = Field(default_factory=list)


class EvaluationTable:
    """Evaluations of a race; row 0 is the incumbent, row i + 1 is candidate i, columns are examples.

    Args:
        task: the job.
        given: the conditions.
        candidates: the values that each candidate changes.
        examples: the examples, in the order of use.

    Attributes:
        scores: global scores; nan if not evaluated, or lost to a transient failure.
        scored: whether a global evaluation was made.
    """

    def __init__(
        self,
        task: Task,
        given: Conditions,
        candidates: Sequence[Mapping[str, object]],
        examples: Sequence[Example],
    ) -> None:
        self._task = task
        self._given = given
        self._values: list[Mapping[str, object]] = [{}, *candidates]
        self._examples = examples
        self._parts: list[dict[int, Trace]] = [{} for _ in self._values]
        self._failed: set[Cell] = set()
        self.scores: NDArray[np.float64] = np.full((len(self._values), len(examples)), np.nan)
        self.scored = np.zeros(self.scores.shape, bool)

    def extend(self, candidates: Sequence[Mapping[str, object]]) -> None:
        """Add candidates, which have no evaluations yet."""
        self._values += candidates
        self._parts += [{} for _ in candidates]
        added = (len(candidates), len(self._examples))
        self.scores = np.vstack([self.scores, np.full(added, np.nan)])
        self.scored = np.vstack([self.scored, np.zeros(added, bool)])

    # -- what is missing, and its price ------------------------------------------------------------------

    def missing(self, alive: Sequence[int], n: int) -> list[Cell]:
        """Return the missing global evaluations of the incumbent and the candidates on the first examples."""
        rows = [0, *(number + 1 for number in alive)]
        return [(row, column) for column in range(n) for row in rows if not self.scored[row, column]]

    def cost(self, alive: Sequence[int], cells: Sequence[Cell], n_local: int) -> float:
        """Return the expected system runs of global evaluations, and of local ones on the first examples."""
        part, price = self._given.part, self._given.price
        total, made = 0.0, set(cells)
        for row, column in cells:
            known = column in self._parts[row]
            whole, own = (1.0, part.weight) if row == 0 else (price, part.price)
            total += whole - own if known else whole
        for row in (0, *(number + 1 for number in alive)):
            own = part.weight if row == 0 else part.price
            parts, scored = self._parts[row], self.scored[row]
            total += own * sum(
                column not in parts and not scored[column] and (row, column) not in made
                for column in range(n_local)
            )
        return total

    # -- evaluation --------------------------------------------------------------------------------------

    async def evaluate(self, alive: Sequence[int], cells: Sequence[Cell], n_local: int) -> None:
        """Make global evaluations, and local ones of the same examples and of the first ones."""
        by_rows: dict[tuple[int, ...], list[int]] = {}
        columns: dict[int, list[int]] = {}
        for row, column in cells:
            columns.setdefault(column, []).append(row)
        for column, rows in columns.items():
            by_rows.setdefault(tuple(rows), []).append(column)
        for rows_, at in by_rows.items():
            await self._score(rows_, at)
            await self._run_parts(sorted({0, *rows_}), at)
        for row in (0, *(number + 1 for number in alive)):
            missing = [column for column in range(n_local) if column not in self._parts[row]]
            await self._run_parts([row], missing)

    async def evaluate_locally(self, cells: Sequence[Cell]) -> None:
        """Make the missing ones of some local evaluations, and the incumbent's on the same examples."""
        missing: dict[int, list[int]] = {}
        for cell in dict.fromkeys([*((0, column) for _, column in cells), *cells]):
            row, column = cell
            if column not in self._parts[row]:
                missing.setdefault(row, []).append(column)
        for row, columns in missing.items():
            await self._run_parts([row], columns)

    def local_columns(self, row: int) -> list[int]:
        """Return the examples with a local evaluation of a row."""
        return sorted(self._parts[row])

    async def _score(self, rows: Sequence[int], columns: Sequence[int]) -> None:
        found = await self._task.scorer.score(
            [self._values[row] for row in rows], [self._examples[column] for column in columns]
        )
        for row, evaluation in zip(rows, found, strict=True):
            for column, run in zip(columns, evaluation.rows, strict=True):
                lost = run.failure is not None and run.failure.is_transient
                self.scores[row, column] = math.nan if lost else run.score
                self.scored[row, column] = True

    async def _run_parts(self, rows: Sequence[int], columns: Sequence[int]) -> None:
        if not rows or not columns:
            return
        configuration = self._task.system.configuration.to_json()
        systems = [self._given.part.bind({**configuration, **self._values[row]}) for row in rows]
        found = await run_parts(
            self._task.context, self._given.part, systems, [self._examples[column] for column in columns]
        )
        for row, traces in zip(rows, found, strict=True):
            for column, trace in zip(columns, traces, strict=True):
                failures = [call.failure for call in trace.calls if call.failure is not None]
                if any(failure.is_transient for failure in failures):
                    continue  # evaluated again in a later rung, if it is still of interest
                self._parts[row][column] = trace
                calls = self._given.part.calls(trace)
                if not calls or any(call.failure is not None for call in calls):
                    self._failed.add((row, column))

    async def restore(self, stored: StoredEvaluations) -> None:
        """Fill the table with stored evaluations; local ones without failures run again, from the cache."""
        for row, scores in enumerate(stored.scores):
            for column, score in scores.items():
                self.scored[row, column] = True
                self.scores[row, column] = math.nan if score is None else score
        for row, column, trace in stored.failures:
            self._parts[row][column] = from_json(cast("TraceDocument", trace))
        self._failed = {(row, column) for row, column in stored.failed if column in self._parts[row]}
        for row, columns in enumerate(stored.parts):
            await self._run_parts([row], [c for c in columns if c not in self._parts[row]])

    def stored(self) -> StoredEvaluations:
        """Return the evaluations for a checkpoint."""
        return StoredEvaluations(
            scores=[
                {int(c): None if math.isnan(row[c]) else float(row[c]) for c in np.flatnonzero(known)}
                for row, known in zip(self.scores, self.scored, strict=True)
            ],
            parts=[sorted(own) for own in self._parts],
            failed=sorted(self._failed),
            failures=[
                (row, column, _document(trace))
                for row, own in enumerate(self._parts)
                for column, trace in sorted(own.items())
                if not is_whole(trace)
            ],
        )

    # -- draws and gains ---------------------------------------------------------------------------------

    def gains(self, critic: Critic | None) -> Evaluations:
        """Return the gains over the incumbent: global ones, and local ones by a critic."""
        locally = np.full_like(self.scores[1:], np.nan)
        if critic is not None:
            locally = self._local_gains(critic)
        return Evaluations(self.scores[1:] - self.scores[0], locally)

    def gap(self, data: Evaluations, slope: float) -> float | None:
        """Return the mean gap between two outputs of the component for one input, in units of the score.

        The gap of an example is the mean difference of the calibrated local rewards of its distinct outputs,
        0 if all candidates give the same one. It estimates the reward gap of OPTIMAS (appendix E) from what a
        guided race evaluates, whether or not the components after this one are random.

        Args:
            data: the gains over the incumbent.
            slope: gain of the score per unit of local reward.

        Returns:
            The mean over the examples with local rewards of two candidates or more; ``None`` without any.
        """
        if not slope:
            return None
        gaps = []
        for column in range(len(self._examples)):
            found = {0: 0.0, **{i + 1: slope * gain for i, gain in enumerate(data.locally[:, column])}}
            known = [row for row, reward in found.items() if not math.isnan(reward)]
            if len(known) > 1:
                rewards = list({self._outputs(row, column): found[row] for row in known}.values())
                differences = [abs(a - b) for a, b in combinations(rewards, 2)]
                gaps.append(sum(differences) / max(1, len(differences)))
        return float(np.mean(gaps)) if gaps else None

    def _outputs(self, row: int, column: int) -> str:
        """Return the outputs of the component's calls; equal texts for equal outputs."""
        calls = self._given.part.calls(self._parts[row][column])
        return canonical_json([to_readable_json(call.outputs) for call in calls])

    def _signals(self, trace: Trace, example: Example) -> dict[str, float]:
        """Return the features of a trace of the part that only a train example has."""
        if not self._given.gold:
            return {}
        shown: dict[str, object] = {}
        for name in (*self._given.part.components, *self._given.part.effects):
            for call in trace.calls_of(name):
                shown |= {f"{name}.{field}": value for field, value in call.outputs.items()}
        return gold_features(shown, answers_of(example))

    def _matched(self, row: int, column: int) -> list[tuple[Call, Call]]:
        """Return the incumbent's calls of the component with the candidate's calls on the same inputs."""
        ours, theirs, part = self._parts[0].get(column), self._parts[row].get(column), self._given.part
        if ours is None or theirs is None:
            return []
        other = {call.address: call for call in part.calls(theirs)}
        return [
            (call, other[call.address])
            for call in part.calls(ours)
            if call.address in other and _same(call.inputs, other[call.address].inputs)
        ]

    def draws(self) -> list[Draw]:
        """Return the draws of the component that the global evaluations gave."""
        return [draw for column in range(len(self._examples)) for draw in self._draws_of(column)]

    def _draws_of(self, column: int) -> list[Draw]:
        """Return the draws of the component that the global evaluations of an example gave."""
        example, found = self._examples[column], dict[str, tuple[Call, list[Candidate]]]()
        for row in range(len(self._values)):
            score = float(self.scores[row, column])
            if math.isnan(score):
                continue
            settings = {k.split(".", maxsplit=1)[1]: v for k, v in self._values[row].items()}
            for ours, call in self._matched(row, column):
                if call.failure is None:
                    signals = self._signals(self._parts[row][column], example)
                    made = Candidate(call.outputs, (score,), settings, self._given.certain, signals)
                    found.setdefault(call.address, (ours, []))[1].append(made)
        component, configuration = self._given.part.name, self._task.system.configuration.digest
        return [
            Draw(component, address, example.id, configuration, dict(ours.inputs), _distinct(candidates))
            for address, (ours, candidates) in found.items()
        ]

    def _local_gains(self, critic: Critic) -> NDArray[np.float64]:
        """Return the mean local gain of each candidate's calls on each example; nan if not evaluated.

        A call is compared with the incumbent's call on the same inputs. Calls on other inputs do not count,
        such as those of later turns of a loop, since local rewards are not comparable across inputs. A failed
        call counts as the worst output of the example.
        """
        rewards = self._rewards_by_call(critic)
        found = np.full_like(self.scores, np.nan)
        for column in range(len(self._examples)):
            rows = [row.get(column, {}) for row in rewards]
            incumbent = rows[0]
            if (0, column) in self._failed:
                incumbent = _worst(rows) | incumbent
            found[0, column] = 0.0 if incumbent else np.nan
            for row, own in enumerate(rows[1:], 1):
                gains = [reward - incumbent[call] for call, reward in own.items() if call in incumbent]
                found[row, column] = sum(gains) / len(gains) if gains else np.nan
        for row, column in sorted(self._failed):
            known = found[:, column][~np.isnan(found[:, column])]
            if row:
                found[row, column] = known.min() if len(known) else np.nan
        return found[1:]

    def _rewards_by_call(self, critic: Critic) -> list[dict[int, dict[str, float]]]:
        """Return, by row and column, the local reward of each call by address, without those that failed."""
        readings, names, places = [], [], []
        for row, parts in enumerate(self._parts):
            for column in parts:
                example = self._examples[column]
                signals = self._signals(parts[column], example)
                for _, call in self._matched(row, column):
                    if call.failure is None:
                        readings.append(read_call(self._given.template, call.inputs, call.outputs, signals))
                        names.append(example.id)
                        places.append((row, column, call.address))
        found: list[dict[int, dict[str, float]]] = [{} for _ in self._parts]
        rewards = critic.rewards(readings, names).tolist()
        for (row, column, address), reward in zip(places, rewards, strict=True):
            found[row].setdefault(column, {})[address] = reward
        return found


def _document(trace: Trace) -> dict[str, Any]:
    """Return a trace as JSON types, without durations, costs and messages, which no estimate reads."""
    calls = [
        Call(
            c.address, c.node, c.component, c.parents, c.inputs, c.outputs, c.failure, invocation=c.invocation
        )
        for c in trace.calls
    ]
    return dict(to_json(replace(trace, calls=tuple(calls))))


def _worst(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the lowest reward of each call."""
    return {call: min(row[call] for row in rows if call in row) for call in dict.fromkeys(chain(*rows))}


def _distinct(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    found: dict[str, Candidate] = {}
    for candidate in candidates:
        found.setdefault(canonical_json(to_readable_json(candidate.outputs)), candidate)
    return tuple(found.values())


def _same(a: Mapping[str, object], b: Mapping[str, object]) -> bool:
    return a == b or canonical_json(to_readable_json(a)) == canonical_json(to_readable_json(b))
