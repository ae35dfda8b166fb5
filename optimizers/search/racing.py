"""Successive halving at true prices: score many candidates on some examples, and the better half on more.

Sequential halving (Karnin, Koren and Somekh 2013) divides a budget equally among its rungs. All candidates of
a rung are scored on the same examples, which contain those of the previous rung, whose calls are cached. The
incumbent is scored in every rung. The number of examples of a rung follows from what a candidate really
costs: a change late in the system executes only a fraction of a run (`compound.optimization.prices`), so that
the same budget compares more examples. The costs are measured in each rung: runs of the incumbent may be
cached, and candidates with equal outputs share the calls that follow. Sizes follow the measured costs, but
never exceed what the runs left cover if every candidate takes its predicted price.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pydantic import Field

from compound.example import Example
from compound.optimization.method import Scorer
from compound.storage.state import State

INCUMBENT = ""  # the incumbent's key among the candidates' numbers
GROWTH = 8  # without a limit of runs, the last rung has this many times the examples of the first
EXTENSION = 0.05  # of its examples: smallest extension of the last rung, if that is less than `FEWEST`
FEWEST = 0.5  # of a minibatch: examples of a rung, below which fewer candidates are raced


class Standing(State):
    """Result of a candidate in the last rung that it reached.

    Attributes:
        candidate: the number of the candidate.
        mean: its mean score.
        incumbent: the incumbent's mean score on the same examples.
        n: the number of examples.
    """

    candidate: int
    mean: float
    incumbent: float
    n: int

    @property
    def gain(self) -> float:
        """The candidate's mean score minus the incumbent's."""
        return self.mean - self.incumbent


class Race(State):
    """Progress of a race.

    Attributes:
        alive: the numbers of the candidates still in the race, best first.
        rungs: the number of rungs of the race.
        price: system runs that a candidate took per example of the last rung; before it, the predicted ones.
        done: the number of rungs that are completed or skipped.
        seen: the number of examples of the last completed rung.
        incumbent_price: system runs that the incumbent took per example.
        known: the number of examples that the incumbent was scored on.
        standings: the results of the scored candidates.
        failed: the names of the examples whose runs failed, by the candidate's number as text; `INCUMBENT` is
            the key of the incumbent.
    """

    alive: list[int]
    rungs: int
    price: float = 1.0
    done: int = 0
    seen: int = 0
    incumbent_price: float = 1.0
    known: int = 0
    standings: list[Standing] = Field(default_factory=list)
    failed: dict[str, list[str]] = Field(default_factory=dict)

    @property
    def is_finished(self) -> bool:
        """Whether no rung is left."""
        return self.done >= self.rungs

    def ranking(self) -> list[Standing]:
        """Return the standings, best first; candidates that reached later rungs come first."""
        return sorted(self.standings, key=lambda s: (-s.n, -s.mean, s.candidate))

    def note(self) -> str:
        """Return the progress note of the last completed rung."""
        best, count = self.ranking()[0], sum(standing.n == self.seen for standing in self.standings)
        return (
            f"{count} candidate{'s' * (count != 1)} on {best.n} example{'s' * (best.n != 1)}: "
            f"best {best.mean:.3f}, incumbent {best.incumbent:.3f}"
        )


@dataclass(frozen=True)
class Track:
    """Conditions of a race.

    Attributes:
        minibatch: the number of examples of the first rung that a race should have.
        examples: the number of available examples.
        price: expected system runs of a candidate on one example.
        incumbent_price: expected system runs of the incumbent on one example.
        free_repeats: whether scoring a candidate again on the same examples costs nothing.
    """

    minibatch: int
    examples: int
    price: float = 1.0
    incumbent_price: float = 1.0
    free_repeats: bool = True

    @property
    def fewest(self) -> int:
        """Minimum number of examples of the first rung of several candidates."""
        return max(1, min(math.ceil(FEWEST * self.minibatch), self.examples))

    def affordable(self, runs: float, candidates: int, seen: int = 0, known: int = 0) -> int:
        """Return the number of examples on which ``runs`` cover all candidates and the incumbent.

        Args:
            runs: system runs.
            candidates: the number of candidates.
            seen: the number of examples that the candidates were scored on; they are included.
            known: the number of examples that the incumbent was scored on.

        >>> track = Track(minibatch=8, examples=100, price=0.25)
        >>> track.affordable(12, candidates=8), track.affordable(12, candidates=8, known=6)
        (4, 6)
        """
        if not math.isfinite(runs):
            return self.examples
        runs, price = runs + 1e-9, candidates * self.price  # tolerance: fractions are summed as floats
        if not self.free_repeats:
            return self._whole(runs, price + self.incumbent_price)
        known = max(seen, known)
        shared = price * (known - seen)  # for the examples that cost the candidates only
        if runs < shared:
            return seen + self._whole(runs, price)
        return min(self.examples, known + self._whole(runs - shared, price + self.incumbent_price))

    def _whole(self, runs: float, each: float) -> int:
        """Return how many examples ``runs`` cover, at most all."""
        return int(min(self.examples, runs / each)) if each else self.examples

    def entrants(self, candidates: int, runs: float, known: int | None = None) -> int:
        """Return how many candidates a race within ``runs`` system runs can hold.

        Of more, the first rung would have fewer than `FEWEST` times the minibatch in examples.

        Args:
            candidates: the number of available candidates.
            runs: system runs left.
            known: the number of examples that the incumbent was scored on; by default, it is scored first.
        """
        if known is None:
            known = self.measured(runs)
            runs -= known * self.incumbent_price
        while candidates > 1:
            first = self.affordable(runs / rungs_of(candidates), candidates, known=known)
            if first >= self.fewest:
                return candidates
            candidates -= 1
        return candidates if self.affordable(runs, candidates, known=known) else 0

    def measured(self, runs: float) -> int:
        """Return the number of examples to score the incumbent on before the first rung, for its price."""
        if not self.free_repeats or not math.isfinite(runs):
            return 0
        return min(self.fewest, self.affordable(runs, 1))


def rungs_of(candidates: int) -> int:
    """Return the number of rungs of a race: half of the candidates, rounded up, reach the next one.

    >>> [rungs_of(n) for n in (1, 2, 3, 4, 6, 8, 9)]
    [1, 2, 3, 3, 4, 4, 5]
    """
    return 1 + math.ceil(math.log2(candidates)) if candidates else 0


async def race(
    candidates: Sequence[Mapping[str, object]],
    examples: Sequence[Example],
    scorer: Scorer,
    minibatch: int,
    price: float = 1.0,
    resume: Race | None = None,
) -> AsyncIterator[Race]:
    """Race candidates, and yield the progress after each rung.

    Each rung spends an equal part of the runs that are left, on as many new examples as they cover. The last
    rung is extended while the runs left cover further examples, since its candidate may cost less than
    predicted. The race ends early if the last candidate is no better than the incumbent.

    Args:
        candidates: the values that each candidate changes.
        examples: the examples, in the order of use.
        scorer: runs and scores candidates.
        minibatch: the number of examples of the first rung that the race should have.
        price: predicted system runs of a candidate on one example.
        resume: the race to resume; ``None`` starts a new one.
    """
    free = scorer.has_free_repeats
    track = Track(minibatch, len(examples), price if free else 1.0, free_repeats=free)
    state = resume or await _start(len(candidates), examples, scorer, track)
    while not state.is_finished:
        state, size = await _prepare_rung(state, track, examples, scorer)
        if size <= state.seen:
            return
        state = await _run_rung(state, track, candidates, examples[:size], scorer)
        yield state


async def _start(candidates: int, examples: Sequence[Example], scorer: Scorer, track: Track) -> Race:
    """Measure the price of the incumbent, and return a race of as many candidates as the runs left hold."""
    known, price = track.measured(scorer.runs_left), 1.0
    if known:
        (incumbent,) = await scorer.score([{}], examples[:known])
        price = incumbent.system_runs / known
    entrants = replace(track, incumbent_price=price).entrants(candidates, scorer.runs_left, known)
    return Race(
        alive=list(range(entrants)), rungs=rungs_of(entrants), price=track.price,
        incumbent_price=price, known=known,
    )  # fmt: skip


async def _prepare_rung(
    state: Race, track: Track, examples: Sequence[Example], scorer: Scorer
) -> tuple[Race, int]:
    """Return the number of examples of the next rung.

    If the runs left cover it only because runs of the incumbent are expected to be cached, the incumbent is
    scored first, on as many examples as they cover otherwise.
    """
    while True:
        wanted, most = _sizes(state, track, scorer.runs_left)
        if wanted <= most or most <= state.known:
            return state, min(wanted, most)
        (incumbent,) = await scorer.score([{}], examples[:most])
        price = (state.incumbent_price * state.known + incumbent.system_runs) / most
        state = state.model_copy(update={"incumbent_price": price, "known": most})


def _sizes(state: Race, track: Track, runs: float) -> tuple[int, int]:
    """Return the wanted number of examples of the next rung, and the number that the runs left surely cover.

    A rung should spend its part of the runs left, at the measured prices. It takes all examples if the runs
    left cover them for all its candidates, since later rungs would have no new examples.
    """
    if not math.isfinite(runs):
        progress = state.done / (state.rungs - 1) if state.rungs > 1 else 1.0
        return min(round(track.minibatch * GROWTH**progress), track.examples), track.examples
    field = len(state.alive), state.seen, state.known
    expected = replace(track, price=state.price, incumbent_price=state.incumbent_price)
    surely = replace(track, price=max(track.price, state.price), incumbent_price=1.0)
    wanted = expected.affordable(runs, *field)
    if wanted < track.examples:
        wanted = max(expected.affordable(runs / (state.rungs - state.done), *field), state.seen + 1)
    return wanted, surely.affordable(runs, *field)


async def _run_rung(
    state: Race,
    track: Track,
    candidates: Sequence[Mapping[str, object]],
    examples: Sequence[Example],
    scorer: Scorer,
) -> Race:
    """Score the candidates of a rung, and return the race after it."""
    incumbent, *scored = await scorer.score([{}, *(candidates[i] for i in state.alive)], examples)
    size, count = len(examples), len(state.alive)
    standings = {standing.candidate: standing for standing in state.standings}
    failed = dict(state.failed)
    for number, evaluation in zip(state.alive, scored, strict=True):
        standings[number] = Standing(candidate=number, mean=evaluation.mean, incumbent=incumbent.mean, n=size)
    for name, evaluation in zip([INCUMBENT, *map(str, state.alive)], [incumbent, *scored], strict=True):
        failed[name] = [row.example for row in evaluation.rows if row.failure]
    ranked = sorted(state.alive, key=lambda number: (-standings[number].mean, number))
    new = size - state.seen if track.free_repeats else size
    known = max(state.known, size) if track.free_repeats else 0
    paid = state.incumbent_price * state.known + incumbent.system_runs
    after = state.model_copy(
        update={
            "alive": ranked[: max(1, math.ceil(count / 2))],
            "done": state.done + 1,
            "seen": size,
            "price": sum(evaluation.system_runs for evaluation in scored) / (count * new),
            "incumbent_price": paid / (known or size),
            "known": known,
            "standings": [*standings.values()],
            "failed": failed,
        }
    )
    return after.model_copy(update={"done": _rungs_done(after, track, scorer.runs_left)})


def _rungs_done(state: Race, track: Track, runs: float) -> int:
    """Return the number of completed or skipped rungs after a rung.

    The last rung does not count as completed while its candidate is better than the incumbent and the runs
    left cover enough further examples.
    """
    if state.seen == track.examples:
        return state.rungs  # without new examples, a rung would change nothing
    if state.done < state.rungs:
        return state.done
    best = next(standing for standing in state.standings if standing.candidate == state.alive[0])
    further = min(_sizes(state.model_copy(update={"done": state.rungs - 1}), track, runs)) - state.seen
    least = min(track.fewest, math.ceil(EXTENSION * state.seen))
    return state.rungs - (best.gain > 0 and further >= least)
