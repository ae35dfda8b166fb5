"""Successive halving: many candidates on few examples, the better half on twice as many.

All candidates of a rung meet the same examples, and each rung's examples contain the last one's, whose
calls come from the cache. The incumbent is a candidate of every rung. (Jamieson and Talwalkar 2016.)
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compound.contracts import Example
from compound.optimization import Progress, Scorer

INCUMBENT = ""  # its name among the candidates' numbers


@dataclass(frozen=True)
class Standing:
    """Where a candidate stands: its score on the rung it reached, in examples, and the incumbent's there."""

    candidate: int
    mean: float
    incumbent: float
    n: int


def rungs(
    candidates: int, minibatch: int, examples: int, runs: float, free_repeats: bool = True
) -> list[tuple[int, int]]:
    """Return ``(candidates, examples)`` for each rung, within ``runs`` system runs.

    A rung costs its candidates and the incumbent on the examples that are new to them, or on all of them
    where repeats are not free. The number of candidates is lowered until the first rung leaves 40 % of
    the runs for later ones, or fits at all.

    >>> rungs(8, 8, 100, 400)
    [(8, 8), (4, 16), (2, 32), (1, 64)]
    >>> rungs(8, 8, 100, 40)
    [(2, 8), (1, 16)]
    """
    first = min(minibatch, examples)
    while candidates > 1 and (candidates + 1) * first > runs * (0.6 if candidates > 2 else 1.0):
        candidates -= 1
    plan: list[tuple[int, int]] = []
    spent, seen, alive = 0.0, 0, candidates
    size = first
    while size > seen:
        spent += (alive + 1) * (size - seen if free_repeats else size)
        if spent > runs:
            break
        plan.append((alive, size))
        if alive == 1 and len(plan) > 1 and size >= 8 * first:
            break
        seen, size, alive = size, min(2 * size, examples), max(1, alive // 2)
    return plan


async def race(
    candidates: Sequence[Mapping[str, Any]],
    examples: Sequence[Example],
    scorer: Scorer,
    minibatch: int,
    state: Mapping[str, Any] | None = None,
) -> AsyncIterator[Progress | list[Standing]]:
    """Race candidates; yields progress after each rung, and last the standings, best first.

    Args:
        candidates: values to change, one mapping for each candidate.
        examples: in the order in which they are used.
        scorer: runs candidates.
        minibatch: examples of the first rung.
        state: ``Progress.state`` of an interrupted race.
    """
    if state is None:
        plan = rungs(len(candidates), minibatch, len(examples), scorer.left, scorer.free_repeats)
    else:
        plan = state["plan"]
    alive = list(range(plan[0][0])) if plan and state is None else list((state or {}).get("alive", ()))
    standings: dict[int, Standing] = {}
    failed: dict[str, list[str]] = dict((state or {}).get("failed", {}))
    done = 0 if state is None else state["done"]
    if state is not None:
        standings = {s[0]: Standing(*s) for s in state["standings"]}
    for rung in range(done, len(plan)):
        count, size = plan[rung]
        alive = alive[:count]
        batch = examples[:size]
        incumbent, *scored = await scorer.score([{}, *(candidates[number] for number in alive)], batch)
        for number, evaluation in zip(alive, scored, strict=True):
            standings[number] = Standing(number, evaluation.mean, incumbent.mean, size)
        for name, evaluation in zip([INCUMBENT, *map(str, alive)], [incumbent, *scored], strict=True):
            failed[name] = [row.example for row in evaluation.rows if row.failure]
        alive.sort(key=lambda number: (-standings[number].mean, number))
        best = standings[alive[0]]
        hopeless = count == 1 and best.mean <= best.incumbent
        yield Progress(
            {
                "plan": plan,
                "alive": alive,
                "done": len(plan) if hopeless else rung + 1,
                "standings": [[s.candidate, s.mean, s.incumbent, s.n] for s in standings.values()],
                "failed": {**failed},
            },
            f"{len(alive)} candidate{'s' * (len(alive) != 1)} on {size} example{'s' * (size != 1)}: "
            f"best {best.mean:.3f}, incumbent {best.incumbent:.3f}",
        )
        if hopeless:
            break
    yield sorted(standings.values(), key=lambda s: (-s.n, -s.mean, s.candidate))
