"""Groups of samples whose rewards are compared.

`module_groups` compares calls of a component at the same position of trajectories (mmGRPO,
algorithm 1). `regroup` pools samples without a comparable one of their example (MHGPO,
round-robin): an agent before the fork point is called once per example. Such groups mix examples,
so their rewards also vary with the difficulty of the examples, and their variance is reported
separately.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Literal, TypeVar

import numpy as np

from compound.execution.rng import generator
from compound.execution.trace import Call, Trace
from compound.optimizers.weights.credit.advantages import by_group, check_rewards, variance
from compound.optimizers.weights.credit.propagation import run_reward
from compound.optimizers.weights.learner.samples import Group, Sample

T = TypeVar("T")
MIXED = "mixed"  # first element of the keys of groups across examples


def trajectory_samples(
    trace: Trace,
    components: Collection[str],
    *,
    rollout: int = 0,
    fallback: float = 0.0,
    on_policy: bool = True,
) -> list[Sample]:
    """Return a sample for every answer that trained components sampled in a run, with the run's reward.

    The calls of a failed run, including the failed one, get the fallback reward, and so does a
    failed call in a run that succeeded. A score of 0.0 is a reward of 0.0, not a missing one.

    Args:
        trace: a scored run. A failed run may have any score, or none.
        components: the trained components.
        rollout: the index of the run among those of the example.
        fallback: the reward of a failed run.
        on_policy: whether the run was sampled with the weights to train.

    Raises:
        DeclarationError: the run succeeded, but has no score.
    """
    reward = run_reward(trace, fallback)
    return [
        sample
        for call in trace.calls
        if call.component in components
        for sample in call_samples(
            call,
            trace.example,
            fallback if call.failure else reward,
            rollout=rollout,
            on_policy=on_policy,
        )
    ]


def call_samples(
    call: Call,
    example: str,
    reward: float,
    *,
    rollout: int = 0,
    group: Group = (),
    on_policy: bool = True,
) -> list[Sample]:
    """Return a sample for every request of a call that was answered with tokens."""
    return [
        Sample(
            call.component,
            example,
            call.address,
            call.invocation,
            tokens,
            reward,
            group,
            rollout,
            on_policy,
        )
        for tokens in call.tokens
        if tokens.sampled
    ]


def module_groups(
    samples: Sequence[Sample],
    rollouts: Mapping[str, int],
    *,
    size: int | None = None,
    padding: Literal["fill", "truncate", "none"] = "fill",
    seed: int = 0,
) -> tuple[list[Sample], dict[str, int]]:
    """Form the groups of a batch (mmGRPO, algorithm 1).

    The key of a group is (example, component, k-th invocation of the component in its trajectory),
    independent of the prompts.
    """
    check_rewards(samples)
    groups = by_group(replace(s, group=(s.example, s.component, s.invocation)) for s in samples)
    truncated = deselected = 0
    chosen: list[Sample] = []
    for key, rows in groups.items():
        every = rollouts[rows[0].example]
        if padding == "truncate" and len({sample.rollout for sample in rows}) < every:
            truncated += len(rows)
            continue
        target = size or every
        if size is not None and len(rows) > size:
            rewards = [sample.reward for sample in rows]
            picked = select_diverse(rewards, size, generator(seed, "diverse", *key))
            deselected += len(rows) - size
            chosen += [rows[i] for i in picked]
        elif padding != "none" and len(rows) < target:
            chosen += [replace(sample, weight=target / len(rows)) for sample in rows]
        else:
            chosen += rows
    return chosen, {"truncated": truncated, "deselected": deselected}


def select_diverse(rewards: Sequence[float], size: int, rng: np.random.Generator) -> list[int]:
    """Return the indices, in ascending order, of ``size`` elements with the largest reward variance.

    The optimum is a prefix and a suffix of the sorted rewards, since the variance is convex in each
    reward.
    """
    shuffled = [int(i) for i in rng.permutation(len(rewards))]
    order = sorted(shuffled, key=lambda i: rewards[i])
    choices = [[*order[:k], *order[len(order) - size + k :]] for k in range(size + 1)]
    spreads = [variance([rewards[i] for i in choice]) for choice in choices]
    best = [
        n for n, spread in enumerate(spreads) if math.isclose(spread, max(spreads), rel_tol=1e-9)
    ]
    return sorted(choices[best[int(rng.integers(len(best)))]])


def regroup(
    samples: Sequence[Sample], size: int, pool: Callable[[Sample], Group], *, seed: int = 0
) -> tuple[list[Sample], dict[str, float]]:
    """Group singletons with others of their pool; a call of several requests is one element.

    Each pool is shuffled and divided into groups of ``size``. The remainder forms a smaller group;
    a single remaining sample joins the previous group. The key of a new group is ``("mixed", *pool,
    number)``.

    Example:
        >>> from collections import Counter
        >>> from compound.core.engine import TokenRecord
        >>> tokens = TokenRecord((1,), (2,), (-0.1,), "stop")
        >>> rows = [Sample("a", f"e{i}", "a", 0, tokens, float(i % 2), (f"e{i}",)) for i in range(5)]
        >>> found, _ = regroup(rows, 2, lambda sample: (sample.component, "b"))
        >>> Counter(sample.group for sample in found)
        Counter({('mixed', 'a', 'b', 1): 3, ('mixed', 'a', 'b', 0): 2})
    """
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
    return rows, {
        "mixed_groups": len(new),
        "mixed_variance": sum(spreads) / len(spreads) if spreads else 0.0,
        "alone": len(groups) - len(new),
    }


def _cut(places: Sequence[T], size: int) -> list[list[T]]:
    """Return parts of ``size`` and the remainder; a single remaining element joins the previous part."""
    parts = [list(places[start : start + size]) for start in range(0, len(places), size)]
    if len(parts) > 1 and len(parts[-1]) < 2:
        last = parts.pop()
        parts[-1] += last
    return parts
