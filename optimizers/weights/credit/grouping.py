"""Module-level groups: compare calls of a component at the same position of their trajectories.

mmGRPO, algorithm 1: the key of a group is (example, component, k-th invocation of the component in its
trajectory), independent of the prompts. PADGROUPS handles trajectories with fewer invocations than others,
and SELECTKDIVERSE gives every group exactly G elements whose rewards have maximal variance.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from compound.errors import DeclarationError, suggest_name
from compound.execution.rng import generator
from compound.execution.trace import Call, Trace
from compound.optimizers.weights.credit.advantages import by_group, check_rewards
from compound.optimizers.weights.credit.propagation import run_reward
from compound.optimizers.weights.learner.samples import Group, Sample

PADDINGS = ("fill", "truncate", "none", "dspy_fill", "dspy_fill_random")


@dataclass(frozen=True)
class Grouped:
    """The groups of a batch.

    Attributes:
        samples: with their groups, group after group; copies of a sample are adjacent to it. In a filled
            group, weights make the distinct elements count equally, however often each was copied, and
            together as much as the elements of a full group.
        references: by group, the rewards of its elements before duplication, from which mean and standard
            deviation are computed.
        truncated: the number of samples dropped because some rollouts lack their invocation.
        deselected: the number of samples dropped because their group has more than G elements.
        duplicated: the number of copies.
    """

    samples: tuple[Sample, ...]
    references: Mapping[Group, tuple[float, ...]]
    truncated: int = 0
    deselected: int = 0
    duplicated: int = 0


def trajectory_samples(
    trace: Trace,
    components: Collection[str],
    *,
    rollout: int = 0,
    fallback: float = 0.0,
    on_policy: bool = True,
) -> list[Sample]:
    """Return a sample for every answer that trained components sampled in a run, with the run's reward.

    The calls of a failed run, including the failed one, get the fallback reward, and so does a failed call in
    a run that succeeded. A score of 0.0 is a reward of 0.0, not a missing one.

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
            call, trace.example, fallback if call.failure else reward, rollout=rollout, on_policy=on_policy
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
            call.component, example, call.address, call.invocation, tokens, reward, group, rollout, on_policy
        )
        for tokens in call.tokens
        if tokens.sampled
    ]


def module_groups(
    samples: Sequence[Sample],
    *,
    size: int | None = None,
    padding: str = "fill",
    rollouts: Mapping[str, int] | None = None,
    seed: int = 0,
) -> Grouped:
    """Form the groups of a batch (mmGRPO, algorithm 1).

    Args:
        samples: of one or more examples; ``rollout`` identifies the rollouts of an example. Existing groups
            are replaced.
        size: G, the number of elements per group; ``None`` uses the number of rollouts of the example, so
            that no group is reduced.
        padding: the treatment of invocations that some rollouts lack. ``fill`` fills up short groups with
            copies of their own elements; ``truncate`` drops such invocations; ``none`` leaves groups short;
            ``dspy_fill`` substitutes the rollout's last call of the component, as DSPy does, and
            ``dspy_fill_random`` a random one of its calls. Substitutes count in mean and standard deviation,
            once per rollout; a rollout without any call of the component has no substitute.
        rollouts: the number of rollouts of each example, if some of them left no sample.
        seed: the seed that breaks ties.

    Raises:
        DeclarationError: the padding is unknown, the size is below 2, an example has more rollouts than
            ``rollouts`` states, or a reward is not a finite number.
    """
    if padding not in PADDINGS:
        raise DeclarationError(f"unknown padding {padding!r}", hint=suggest_name(padding, PADDINGS))
    if size is not None and size < 2:
        raise DeclarationError(f"a group must have at least 2 elements, but size is {size}")
    check_rewards(samples)
    counts = _count_rollouts(samples, rollouts or {})
    groups = by_group(replace(s, group=(s.example, s.component, s.invocation)) for s in samples)
    truncated = 0
    if padding == "truncate":
        complete = {key: rows for key, rows in groups.items() if _rollouts(rows) == counts[rows[0].example]}
        truncated = len(samples) - sum(map(len, complete.values()))
        groups = complete
    elif padding.startswith("dspy"):
        groups = _substitute_own_calls(groups, padding == "dspy_fill_random", seed)
    chosen: list[Sample] = []
    references: dict[Group, tuple[float, ...]] = {}
    deselected = duplicated = 0
    for key, rows in groups.items():
        target = size or counts[rows[0].example]
        rewards = [sample.reward for sample in rows]
        short = len(rows) < target
        if len(rows) == target or (padding == "none" if short else size is None):
            picked = list(range(len(rows)))
        else:
            picked = select_diverse(rewards, target, generator(seed, "diverse", *key))
        copies = Counter(picked)
        share = len(picked) / max(1, len(copies))
        chosen += [replace(rows[i], weight=share / copies[i]) for i in picked]
        references[key] = tuple(rewards[i] for i in dict.fromkeys(picked))
        deselected += len(rows) - len(references[key])
        duplicated += len(picked) - len(references[key])
    return Grouped(tuple(chosen), references, truncated, deselected, duplicated)


def merge_copies(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples with adjacent copies merged into one sample of their total weight.

    The gradient is the same, and the model processes each distinct sample once.

    >>> from compound.engine import TokenRecord
    >>> row = Sample("a", "e", "a", 0, TokenRecord((1,), (2,), (-0.5,), "stop"), 1.0, weight=0.5)
    >>> [sample.weight for sample in merge_copies([row, row, replace(row, rollout=1)])]
    [1.0, 0.5]
    """
    copies = [list(same) for _, same in itertools.groupby(samples)]
    return [replace(same[0], weight=math.fsum(sample.weight for sample in same)) for same in copies]


def select_diverse(rewards: Sequence[float], size: int, rng: np.random.Generator) -> list[int]:
    """Return the indices of exactly ``size`` elements whose rewards have the largest variance.

    If there are at least ``size`` elements, each is chosen at most once: the optimum is a prefix and a suffix
    of the sorted rewards, since the variance is convex in each reward. If there are fewer, each is chosen at
    least once, and the copies are of elements with the lowest or the highest reward, for the same reason.

    Args:
        rewards: finite, at least one.
        size: the number of elements to choose.
        rng: breaks ties.

    Returns:
        Indices in ascending order; copied elements occur more than once.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> select_diverse([0.5, 0.0, 0.4, 1.0], 2, rng)
        [1, 3]
        >>> select_diverse([0.0, 0.1, 1.0], 5, rng)
        [0, 0, 1, 2, 2]
    """
    shuffled = [int(i) for i in rng.permutation(len(rewards))]
    order = sorted(shuffled, key=lambda i: rewards[i])
    if size <= len(order):
        choices = [[*order[:k], *order[len(order) - size + k :]] for k in range(size + 1)]
    else:
        lowest = [i for i in order if rewards[i] == rewards[order[0]]]
        # start from the other end, so that with all rewards equal every element is copied equally often
        highest = [i for i in reversed(order) if rewards[i] == rewards[order[-1]]]
        missing = size - len(order)
        choices = [[*order, *_cycled(lowest, k), *_cycled(highest, missing - k)] for k in range(missing + 1)]
    spreads = [_spread([rewards[i] for i in choice]) for choice in choices]
    best = [n for n, spread in enumerate(spreads) if math.isclose(spread, max(spreads), rel_tol=1e-9)]
    return sorted(choices[best[int(rng.integers(len(best)))]])


def _cycled(indices: Sequence[int], count: int) -> list[int]:
    return list(itertools.islice(itertools.cycle(indices), count))


def _spread(values: Sequence[float]) -> float:
    """Return the sum of squared deviations, which orders like the variance for a fixed number of values."""
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values)


def _rollouts(rows: Sequence[Sample]) -> int:
    return len({sample.rollout for sample in rows})


def _count_rollouts(samples: Sequence[Sample], stated: Mapping[str, int]) -> dict[str, int]:
    seen: dict[str, set[int]] = {}
    for sample in samples:
        seen.setdefault(sample.example, set()).add(sample.rollout)
    for example, found in seen.items():
        if example in stated and stated[example] < len(found):
            raise DeclarationError(
                f"rollouts of example {example!r} is {stated[example]}, but samples come from {len(found)} "
                "rollouts"
            )
    return {example: stated.get(example, len(found)) for example, found in seen.items()}


def _substitute_own_calls(
    groups: Mapping[Group, Sequence[Sample]], random: bool, seed: int
) -> dict[Group, list[Sample]]:
    """Substitute a rollout's last or a random call of the component for each invocation it lacks."""
    own: dict[tuple[str, str], dict[int, list[Sample]]] = {}
    for rows in groups.values():
        for sample in rows:
            calls = own.setdefault((sample.example, sample.component), {})
            calls.setdefault(sample.rollout, []).append(sample)
    filled = {key: list(rows) for key, rows in groups.items()}
    for key, rows in filled.items():
        present = {sample.rollout for sample in rows}
        for rollout, own_calls in own[rows[0].example, rows[0].component].items():
            if rollout not in present:
                ordered = sorted(own_calls, key=lambda call: call.invocation)
                index = int(generator(seed, "lend", *key, rollout).integers(len(ordered))) if random else -1
                rows.append(replace(ordered[index], group=key))
    return filled
