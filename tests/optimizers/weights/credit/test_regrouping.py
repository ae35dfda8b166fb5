"""Singletons are compared only with others of their pool."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compound.core.engine import TokenRecord
from compound.core.errors import DeclarationError
from compound.optimizers.weights.credit.advantages import advantages
from compound.optimizers.weights.credit.grouping import regroup
from compound.optimizers.weights.learner.samples import Group, Sample

TOKENS = TokenRecord((1,), (2,), (-0.5,), "stop")


def single(example: int, component: str = "a", reward: float = 0.0, fork: str = "c") -> Sample:
    return Sample(
        component, f"e{example}", component, 0, TOKENS, reward, (f"e{example}", component, fork)
    )


def pool(sample: Sample) -> Group:
    return (sample.component, sample.group[2])


def sizes(samples: tuple[Sample, ...]) -> dict[Group, int]:
    return dict(Counter(sample.group for sample in samples))


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (1, [1]),
        (2, [2]),
        (3, [3]),
        (4, [4]),
        (5, [5]),
        (6, [4, 2]),
        (7, [4, 3]),
        (8, [4, 4]),
        (9, [4, 5]),
        (10, [4, 4, 2]),
    ],
)
def test_a_pool_is_cut_into_groups_and_a_single_one_joins_the_one_before(
    n: int, expected: list[int]
) -> None:
    found = regroup([single(i) for i in range(n)], 4, pool)
    assert sorted(sizes(found.samples).values()) == sorted(expected)
    if n > 1:
        assert sizes(found.samples) == {
            ("mixed", "a", "c", k): size for k, size in enumerate(expected)
        }
        assert (found.groups, found.mixed, found.alone) == (len(expected), n, 0)


def test_a_singleton_without_another_in_its_pool_stays_alone() -> None:
    rows = [single(0), single(1, "b"), single(2, fork="d")]
    found = regroup(rows, 4, pool)
    assert found.samples == tuple(rows)
    assert (found.groups, found.mixed, found.alone, found.variance) == (0, 0, 3, 0.0)


def test_pools_are_not_mixed() -> None:
    rows = [
        single(i, component, fork=fork) for i in range(3) for component in "ab" for fork in "cd"
    ]
    found = regroup(rows, 4, pool)
    assert sizes(found.samples) == {("mixed", c, f, 0): 3 for c in "ab" for f in "cd"}
    for before, after in zip(rows, found.samples, strict=True):
        assert after.group[1:3] == pool(before)
        assert replace(after, group=before.group) == before


def test_groups_of_more_than_one_are_left_as_they_are() -> None:
    group = ("e9", "a", "c")
    together = [replace(single(9), group=group, rollout=k) for k in range(3)]
    rows = [single(0), *together, single(1)]
    found = regroup(rows, 2, pool)
    assert found.samples[1:4] == tuple(together)
    assert found.samples[0].group == found.samples[4].group == ("mixed", "a", "c", 0)


def test_a_call_of_several_requests_is_one_element() -> None:
    """Its samples have one reward, so they would be dropped as a group of equal rewards."""
    rows = [single(i, reward=float(i)) for i in range(3) for _ in range(i + 1)]
    found = regroup(rows, 4, pool)
    assert sizes(found.samples) == {("mixed", "a", "c", 0): 6}
    assert (found.groups, found.mixed, found.alone) == (1, 6, 0)
    assert found.variance == pytest.approx(2 / 3)  # of three calls


def test_samples_without_a_group_are_singletons() -> None:
    rows = [replace(single(i), group=()) for i in range(2)]
    found = regroup(rows, 4, lambda sample: (sample.component,))
    assert sizes(found.samples) == {("mixed", "a", 0): 2}


def test_the_variance_of_mixed_groups_is_reported() -> None:
    rows = [
        single(0, reward=0.0),
        single(1, reward=1.0),
        single(2, "b", 0.0),
        single(3, "b", 4.0),
        single(4, fork="z", reward=9.0),
    ]
    found = regroup(rows, 4, pool)
    assert found.variance == (0.25 + 4.0) / 2
    trained, facts = advantages(found.samples, "center")
    assert [row.advantages[0] for row in trained] == [-0.5, 0.5, -2.0, 2.0]
    assert facts.dropped == 1


def test_the_shuffle_is_the_streams() -> None:
    rows = [single(i) for i in range(12)]
    splits = {
        frozenset(frozenset(s.example for s in found if s.group[3] == k) for k in range(3))
        for found in (regroup(rows, 4, pool, seed=seed).samples for seed in range(20))
    }
    assert len(splits) == 20
    assert regroup(rows, 4, pool, seed=7) == regroup(rows, 4, pool, seed=7)
    both = [*rows, *(single(i, "b") for i in range(12))]
    found = regroup(both, 4, pool).samples
    assert [s.group[3] for s in found[:12]] != [
        s.group[3] for s in found[12:]
    ]  # a stream for each pool


@given(st.lists(st.sampled_from("abc"), max_size=20), st.integers(2, 6), st.integers(0, 5))
def test_laws_of_regrouping(components: list[str], size: int, seed: int) -> None:
    rows = [single(i, component, float(i)) for i, component in enumerate(components)]
    found = regroup(rows, size, pool, seed=seed)
    assert [row.example for row in found.samples] == [row.example for row in rows]
    assert found.mixed + found.alone == len(rows)
    counts = sizes(found.samples)
    assert found.groups == sum(count > 1 for count in counts.values())
    for count in Counter(components).values():
        assert count == 1 or found.alone < len(rows)
    assert all(count <= size + 1 for count in counts.values())
    assert found.alone == sum(count == 1 for count in Counter(components).values())


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(DeclarationError, match="at least 2 elements, but size is 1"):
        regroup([], 1, pool)
    with pytest.raises(DeclarationError, match="the reward of 'a' on example 'e0'"):
        regroup([single(0, reward=math.nan)], 2, pool)
