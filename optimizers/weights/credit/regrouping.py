"""Regrouping of singletons: samples that nothing of their own example compares with (MHGPO, round-robin).

An agent before the fork point is called once per example. Such samples are pooled over the batch, by agent
and fork agent, and cut into groups. These groups mix examples, so that their rewards also vary with
difficulty: their variance is reported apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from compound.errors import DeclarationError
from compound.execution.rng import generator
from compound.optimizers.weights.credit.advantages import check_rewards, variance
from compound.optimizers.weights.learner.samples import Group, Sample

MIXED = "mixed"  # how the keys of such groups begin


@dataclass(frozen=True)
class Regrouped:
    """A batch without the singletons that could be compared with others.

    Attributes:
        samples: in the order they had; those that were singletons have new groups.
        groups: how many groups were made of singletons.
        mixed: how many samples are in them.
        alone: singletons whose pool has no other; they stay as they are.
        variance: the mean over the new groups of the population variance of the rewards.
    """

    samples: tuple[Sample, ...]
    groups: int
    mixed: int
    alone: int
    variance: float


def regroup(
    samples: Sequence[Sample], size: int, pool: Callable[[Sample], Group], *, seed: int = 0
) -> Regrouped:
    """Put singletons into groups with others of their pool.

    A pool is shuffled and cut into groups of ``size``. What remains is a smaller group, but a single one
    joins the group before it. The key of a new group is ``("mixed", *pool, number)``.

    Args:
        samples: of the whole batch.
        size: G, at least 2.
        pool: the key of what may be mixed; for MHGPO, the sample's component and the component that its
            example was forked at.
        seed: names the random streams of the shuffles.

    Raises:
        DeclarationError: the size is below 2, or a reward is not a finite number.

    Example:
        >>> from compound.engine import TokenRecord
        >>> tokens = TokenRecord((1,), (2,), (-0.1,), "stop")
        >>> rows = [Sample("a", f"e{i}", "a", 0, tokens, float(i % 2), (f"e{i}",)) for i in range(5)]
        >>> found = regroup(rows, 2, lambda sample: (sample.component, "b"))
        >>> Counter(sample.group for sample in found.samples)
        Counter({('mixed', 'a', 'b', 1): 3, ('mixed', 'a', 'b', 0): 2})
    """
    if size < 2:
        raise DeclarationError(f"a group must have at least 2 elements, but size is {size}")
    check_rewards(samples)
    members = Counter(sample.group for sample in samples)
    pools: dict[Group, list[int]] = {}
    for place, sample in enumerate(samples):
        if not sample.group or members[sample.group] == 1:
            pools.setdefault(pool(sample), []).append(place)
    groups: dict[Group, list[int]] = {}
    for key, places in pools.items():
        order = generator(seed, "regroup", *key).permutation(len(places))
        for number, part in enumerate(_cut([places[i] for i in order], size)):
            groups[MIXED, *key, number] = part
    made = {key: part for key, part in groups.items() if len(part) > 1}
    rows = list(samples)
    for key, part in made.items():
        for place in part:
            rows[place] = replace(rows[place], group=key)
    spreads = [variance([samples[place].reward for place in part]) for part in made.values()]
    return Regrouped(
        samples=tuple(rows),
        groups=len(made),
        mixed=sum(map(len, made.values())),
        alone=len(groups) - len(made),
        variance=sum(spreads) / len(spreads) if spreads else 0.0,
    )


def _cut(places: Sequence[int], size: int) -> list[list[int]]:
    """Return parts of ``size``, and what remains; a single one joins the part before it.

    >>> _cut([1, 2, 3, 4, 5, 6, 7], 3), _cut([1, 2, 3, 4, 5], 3), _cut([1], 3)
    ([[1, 2, 3], [4, 5, 6, 7]], [[1, 2, 3], [4, 5]], [[1]])
    """
    parts = [list(places[start : start + size]) for start in range(0, len(places), size)]
    if len(parts) > 1 and len(parts[-1]) < 2:
        last = parts.pop()
        parts[-1] += last
    return parts
