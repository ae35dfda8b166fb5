"""Schedulers: choose the next job from the history alone, so that a resumed run chooses the same.

Every choice carries the numbers it was made from in ``Job.reason``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from compound.execution.rng import generator
from compound.graph.configuration import component_of
from compound.optimization.method import Job, JobRecord

History = Sequence[JobRecord]


@dataclass(frozen=True)
class Uniform:
    """Every job equally often: rounds, each in a fresh seeded order.

    >>> jobs = [Job("a", ("x.p",)), Job("b", ("y.p",))]
    >>> first = Uniform().choose(jobs, [], seed=0)
    >>> history = [JobRecord(job=0, optimizer=first.optimizer, keys=first.keys)]
    >>> second = Uniform().choose(jobs, history, seed=0)
    >>> {first.optimizer, second.optimizer} == {"a", "b"}
    True
    """

    def choose(self, jobs: Sequence[Job], history: History, seed: int) -> Job:
        """Return the next job of the current round."""
        done = Counter((record.optimizer, record.keys) for record in history)
        fewest = min(done[job.optimizer, job.keys] for job in jobs)
        order = generator(seed, "schedule", fewest).permutation(len(jobs))
        waiting = [jobs[i] for i in order if done[jobs[i].optimizer, jobs[i].keys] == fewest]
        return _because(waiting[0], {"rounds": float(fewest), "waiting": float(len(waiting))})


@dataclass(frozen=True)
class RewardGapScheduler:
    """The rule of OPTIMAS (appendix E): probability proportional to a component's mean reward gap.

    The gaps are live: those of each component's latest pairs, as the last job that measured them recorded. A
    component nobody measured counts as the mean of the others. Jobs are drawn without replacement: a round
    ends, and all but the last may be drawn again, when those left in it hold no more than ``floor`` of the
    probability. A part ``floor`` is spread evenly: a gap of 0 among a few outputs is no proof that nothing
    can be gained, for example while another component spoils every score.
    """

    floor: float = 0.1

    def choose(self, jobs: Sequence[Job], history: History, seed: int) -> Job:
        """Draw a job by its component's gap."""
        known: Mapping[str, float] = next(
            (record.facts["gaps"] for record in reversed(history) if record.facts.get("gaps")), {}
        )
        usual = sum(known.values()) / len(known) if known else 1.0
        gaps = np.array([known.get(component_of(job.keys[0]), usual) for job in jobs])
        weights = gaps if gaps.sum() > 0 else np.ones(len(jobs))
        chances = (1 - self.floor) * weights / weights.sum() + self.floor / len(jobs)
        open_ = self._waiting(jobs, history, chances)
        chances = np.where(open_, chances, 0.0) / chances[open_].sum()
        picked = int(generator(seed, "schedule", len(history)).choice(len(jobs), p=chances))
        return _because(jobs[picked], {"gap": float(gaps[picked]), "probability": float(chances[picked])})

    def _waiting(
        self, jobs: Sequence[Job], history: History, chances: NDArray[np.float64]
    ) -> NDArray[np.bool_]:
        """Return which jobs may be drawn in the round that the history leads to."""
        place = {(job.optimizer, job.keys): i for i, job in enumerate(jobs)}
        open_ = np.ones(len(jobs), bool)
        for record in history:
            done = place.get((record.optimizer, record.keys))
            if done is None:
                continue
            open_[done] = False
            if chances[open_].sum() <= self.floor:
                open_[:] = True
                if record is history[-1] and len(jobs) > 1:
                    open_[done] = False  # another one comes first
        return open_


@dataclass(frozen=True)
class UCB:
    """The job with the highest upper confidence bound of its gain per system run (UCB1, Auer et al. 2002).

    Gains are measured in units of the largest one seen. Jobs never tried come first.
    """

    width: float = 1.0

    def choose(self, jobs: Sequence[Job], history: History, seed: int) -> Job:
        """Return the job with the highest bound; ties by the seed."""
        found = _gains(jobs, history)
        order = generator(seed, "schedule", len(history)).permutation(len(jobs))
        untried = [i for i in order if not found[i]]
        if untried:
            return _because(jobs[untried[0]], {"untried": float(len(untried))})
        largest = max(max(gains) for gains in found) or 1.0
        total = math.log(sum(map(len, found)))
        means = [sum(gains) / len(gains) / largest for gains in found]
        bounds = [m + self.width * math.sqrt(2 * total / len(g)) for m, g in zip(means, found, strict=True)]
        best = max(order, key=lambda i: bounds[i])
        reason = {"gain_per_run": means[best] * largest, "bound": bounds[best]}
        return _because(jobs[best], reason)


@dataclass(frozen=True)
class Thompson:
    """Draws each job's mean gain per system run from its posterior, and takes the largest (Thompson 1933).

    The posterior is normal around the shrunk mean, with the spread of all gains seen: one pseudo-observation
    at the mean of all jobs.
    """

    def choose(self, jobs: Sequence[Job], history: History, seed: int) -> Job:
        """Return the job with the largest draw."""
        found = _gains(jobs, history)
        every = [gain for gains in found for gain in gains]
        centre = sum(every) / len(every) if every else 0.0
        spread = float(np.std(every)) if len(every) > 1 else 0.0
        spread = spread or abs(centre) or 1.0
        rng = generator(seed, "schedule", len(history))
        means = [(sum(gains) + centre) / (len(gains) + 1) for gains in found]
        draws = [m + spread / math.sqrt(len(g) + 1) * rng.normal() for m, g in zip(means, found, strict=True)]
        best = int(np.argmax(draws))
        return _because(jobs[best], {"gain_per_run": means[best], "drawn": float(draws[best])})


def _because(job: Job, reason: Mapping[str, float]) -> Job:
    chosen: Job = replace(job, reason=reason)
    return chosen


def _gains(jobs: Sequence[Job], history: History) -> list[list[float]]:
    """Return each job's measured gains on train examples per system run, in order; no gain is 0."""
    found: dict[tuple[str, tuple[str, ...]], list[float]] = {(job.optimizer, job.keys): [] for job in jobs}
    for record in history:
        key = record.optimizer, record.keys
        if key in found:
            before, after = record.train_before, record.train_after
            gain = after - before if record.values and before is not None and after is not None else 0.0
            found[key].append(max(0.0, gain) / max(record.runs, 1.0))
    return list(found.values())
