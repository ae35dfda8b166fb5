"""Sets of demonstrations that MIPROv2 chooses among."""

from __future__ import annotations

from collections.abc import Sequence

from compound.execution.rng import generator
from compound.graph.configuration import canonical_json
from compound.graph.space import Demo, as_demos
from compound.optimizers.search.proposers.demos import WeightedDemo, draw_demos

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

    The sets are, in this order: no demonstrations; labelled ones only; the best bootstrapped ones;
    and bootstrapped ones drawn at random in random number. The latter two are filled up with
    labelled ones.
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
