"""Successive halving: many candidates on few examples, the better half on twice as many.

All candidates of a rung meet the same examples, and each rung's examples contain the last one's, whose
calls come from the cache. The incumbent is a candidate of every rung. (Jamieson and Talwalkar 2016.)
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence

from pydantic import Field

from compound.example import Example
from compound.optimization.method import Scorer
from compound.storage.state import State

INCUMBENT = ""  # its name among the candidates' numbers


class Standing(State):
    """The result of a candidate on the last rung that it reached.

    Attributes:
        candidate: its number.
        mean: its score.
        incumbent: the incumbent's score on the same examples.
        n: the number of these examples.
    """

    candidate: int
    mean: float
    incumbent: float
    n: int


class Race(State):
    """A race after some of its rungs.

    Attributes:
        plan: the numbers of candidates and of examples of each rung.
        alive: the numbers of the candidates that the next rung may take, best first.
        done: how many rungs of the plan need not be run any more.
        standings: the results of the candidates that were scored.
        failed: names of the examples whose runs failed, for each candidate by its number as text; the
            incumbent's number is `INCUMBENT`.
    """

    plan: list[tuple[int, int]]
    alive: list[int]
    done: int = 0
    standings: list[Standing] = Field(default_factory=list)
    failed: dict[str, list[str]] = Field(default_factory=dict)

    def ranking(self) -> list[Standing]:
        """Return the standings, best first: those of later rungs come before those of earlier ones."""
        return sorted(self.standings, key=lambda s: (-s.n, -s.mean, s.candidate))

    def note(self) -> str:
        """Describe the rung that was completed last."""
        best, count = self.ranking()[0], len(self.alive)
        return (
            f"{count} candidate{'s' * (count != 1)} on {best.n} example{'s' * (best.n != 1)}: "
            f"best {best.mean:.3f}, incumbent {best.incumbent:.3f}"
        )


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
    candidates: Sequence[Mapping[str, object]],
    examples: Sequence[Example],
    scorer: Scorer,
    minibatch: int,
    resume: Race | None = None,
) -> AsyncIterator[Race]:
    """Race candidates, and yield the race after each rung.

    Args:
        candidates: values to change, one mapping for each candidate.
        examples: in the order in which they are used.
        scorer: runs candidates.
        minibatch: examples of the first rung.
        resume: the race to continue; ``None`` starts one.
    """
    if resume is None:
        plan = rungs(len(candidates), minibatch, len(examples), scorer.left, scorer.free_repeats)
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
