"""Regrouping of singletons: samples without a comparable sample of the same example (MHGPO, round-robin).

An agent before the fork point is called once per example. Such samples are pooled over the batch, by agent
and fork agent, and divided into groups. These groups mix examples, so their rewards also vary with the
difficulty of the examples, and their variance is reported separately.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from compound.errors import DeclarationError
from compound.execution.rng import generator
from compound.optimizers.weights.credit.advantages import check_rewards, variance
from compound.optimizers.weights.learner.samples import Group, Sample

T = TypeVar("T")
MIXED = "mixed"  # first element of the keys of such groups


@dataclass(frozen=True)
class Regrouped:
    """A batch whose singletons were regrouped where possible.

    Attributes:
        samples: in input order; regrouped singletons have new groups.
        groups: the number of new groups.
        mixed: the number of samples in new groups.
        alone: the number of singletons without another one in their pool, which are unchanged.
        variance: the population variance of the rewards, averaged over the new groups.
    """

    samples: tuple[Sample, ...]
    groups: int
    mixed: int
    alone: int
    variance: float


def regroup(
    samples: Sequence[Sample], size: int, pool: Callable[[Sample], Group], *, seed: int = 0
) -> Regrouped:
    """Group singletons with others of their pool; a call of several requests is one element.

    Each pool is shuffled and divided into groups of ``size``. The remainder forms a smaller group; a single
    remaining sample joins the previous group. The key of a new group is ``("mixed", *pool, number)``.

    Args:
        samples: the whole batch.
        size: G, at least 2.
        pool: returns the key of a sample's pool; for MHGPO, the sample's component and the component at which
            its example was forked.
        seed: the seed of the shuffles.

    Raises:
        DeclarationError: the size is below 2, or a reward is not a finite number.

    Example:
        >>> from collections import Counter
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
    calls: dict[Group, list[int]] = {}  # a call of an agent has a sample for each of its requests
    rollouts: dict[Group, set[int]] = {}
    for place, sample in enumerate(samples):
        key = sample.group or ("", place)
        calls.setdefault(key, []).append(place)
        rollouts.setdefault(key, set()).add(sample.rollout)
    pools: dict[Group, list[list[int]]] = {}
    for key, places in calls.items():
        if len(rollouts[key]) == 1:
            pools.setdefault(pool(samples[places[0]]), []).append(places)
    groups: dict[Group, list[list[int]]] = {}
    for key, singles in pools.items():
        order = generator(seed, "regroup", *key).permutation(len(singles))
        for number, part in enumerate(_cut([singles[i] for i in order], size)):
            groups[MIXED, *key, number] = part
    new = {key: part for key, part in groups.items() if len(part) > 1}
    rows = list(samples)
    for key, part in new.items():
        for place in itertools.chain(*part):
            rows[place] = replace(rows[place], group=key)
    spreads = [variance([samples[places[0]].reward for places in part]) for part in new.values()]
    return Regrouped(
        samples=tuple(rows),
        groups=len(new),
        mixed=sum(len(places) for part in new.values() for places in part),
        alone=len(groups) - len(new),
        variance=sum(spreads) / len(spreads) if spreads else 0.0,
    )


def _cut(places: Sequence[T], size: int) -> list[list[T]]:
    """Return parts of ``size`` and the remainder; a single remaining element joins the previous part.

    >>> _cut([1, 2, 3, 4, 5, 6, 7], 3), _cut([1, 2, 3, 4, 5], 3), _cut([1], 3)
    ([[1, 2, 3], [4, 5, 6, 7]], [[1, 2, 3], [4, 5]], [[1]])
    """
    parts = [list(places[start : start + size]) for start in range(0, len(places), size)]
    if len(parts) > 1 and len(parts[-1]) < 2:
        last = parts.pop()
        parts[-1] += last
    return parts
