"""Successive halving: score many candidates on few examples, and the better half on twice as many.

Jamieson and Talwalkar 2016. All candidates of a rung are scored on the same examples, which contain those of
the previous rung, whose calls are cached. The incumbent is scored in every rung.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence

from pydantic import Field

from compound.example import Example
from compound.optimization.method import Scorer
from compound.storage.state import State

INCUMBENT = ""  # the incumbent's key among the candidates' numbers


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


class Race(State):
    """Progress of a race.

    Attributes:
        plan: the number of candidates and the number of examples of each rung.
        alive: the numbers of the candidates still in the race, best first.
        done: the number of rungs that are completed or skipped.
        standings: the results of the scored candidates.
        failed: the names of the examples whose runs failed, by the candidate's number as text; `INCUMBENT` is
            the key of the incumbent.
    """

    plan: list[tuple[int, int]]
    alive: list[int]
    done: int = 0
    standings: list[Standing] = Field(default_factory=list)
    failed: dict[str, list[str]] = Field(default_factory=dict)

    def ranking(self) -> list[Standing]:
        """Return the standings, best first; candidates that reached later rungs come first."""
        return sorted(self.standings, key=lambda s: (-s.n, -s.mean, s.candidate))

    def note(self) -> str:
        """Return the progress note of the last completed rung."""
        best, count = self.ranking()[0], len(self.alive)
        return (
            f"{count} candidate{'s' * (count != 1)} on {best.n} example{'s' * (best.n != 1)}: "
            f"best {best.mean:.3f}, incumbent {best.incumbent:.3f}"
        )


def rungs(
    candidates: int, minibatch: int, examples: int, runs: float, free_repeats: bool = True
) -> list[tuple[int, int]]:
    """Return ``(candidates, examples)`` for each rung of a race within ``runs`` system runs.

    The cost of a rung is the number of its candidates, plus one for the incumbent, times the number of new
    examples (of all examples if repeats are not free). The number of candidates is reduced until the first
    rung leaves 40 % of the runs for later rungs; with two candidates, the first rung may take all runs.

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
    candidates: Sequence[Mapping[str, object]],
    examples: Sequence[Example],
    scorer: Scorer,
    minibatch: int,
    resume: Race | None = None,
) -> AsyncIterator[Race]:
    """Race candidates, and yield the progress after each rung.

    Args:
        candidates: the values that each candidate changes.
        examples: the examples, in the order of use.
        scorer: runs and scores candidates.
        minibatch: the number of examples of the first rung.
        resume: the race to resume; ``None`` starts a new one.
    """
    if resume is None:
        plan = rungs(len(candidates), minibatch, len(examples), scorer.runs_left, scorer.has_free_repeats)
        resume = Race(plan=plan, alive=list(range(plan[0][0])) if plan else [])
    plan = resume.plan
    standings = {standing.candidate: standing for standing in resume.standings}
    failed, alive, done = dict(resume.failed), resume.alive, resume.done
    while done < len(plan):
        count, size = plan[done]
        alive = alive[:count]
        incumbent, *scored = await scorer.score([{}, *(candidates[i] for i in alive)], examples[:size])
        for number, evaluation in zip(alive, scored, strict=True):
            standings[number] = Standing(
                candidate=number, mean=evaluation.mean, incumbent=incumbent.mean, n=size
            )
        for name, evaluation in zip([INCUMBENT, *map(str, alive)], [incumbent, *scored], strict=True):
            failed[name] = [row.example for row in evaluation.rows if row.failure]
        alive = sorted(alive, key=lambda number: (-standings[number].mean, number))
        best = standings[alive[0]]
        is_hopeless = count == 1 and best.mean <= best.incumbent
        done = len(plan) if is_hopeless else done + 1
        yield Race(plan=plan, alive=alive, done=done, standings=[*standings.values()], failed={**failed})
