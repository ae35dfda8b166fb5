"""Credit of samples: groups whose rewards are compared, advantages, and rewards of calls.

- `module_groups` compares calls of a component at the same position of trajectories (mmGRPO,
  algorithm 1). `regroup` pools samples without a comparable one of their example (MHGPO,
  round-robin): an agent before the fork point is called once per example. Such groups mix examples,
  so their rewards also vary with the difficulty of the examples, and their variance is reported
  separately.
- `advantages` are relative to the group. A group with equal rewards or a single element carries no
  preference between answers: its samples are dropped and counted, which also avoids division by
  zero (mmGRPO, equation 2; MHGPO, equation 5). `gae` estimates the advantages of the tokens of one
  sample from values (Schulman et al. 2016; PPO and MAPPO).
- `propagate` assigns credit to each call from the global rewards of the runs it led to (MHGPO). The
  traces of an example, which may be forks of each other, are merged into one graph of calls, where
  calls before a fork point are shared by all forks. Backwards from the outputs, a call earns the
  mean of the rewards of its direct successors. Then a penalty of the call itself is added, which is
  not propagated. Loops, maps and conditions need no special case.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, pvariance
from typing import Literal, TypeVar

import numpy as np

from compound.core.errors import DeclarationError, suggest_name
from compound.execution.rng import generator
from compound.execution.trace import Call, Trace
from compound.optimizers.weights.learner.samples import Group, Sample

T = TypeVar("T")
Penalty = Callable[[Call], float]
DEVIATION_EPSILON = 1e-4  # added to the standard deviation, as in TRL
VARIANCE_EPSILON = 1e-6  # added to the variance under the root in the population form
WHITENING_EPSILON = 1e-8  # added to the variance when advantages are whitened
MIXED = "mixed"  # first element of the keys of groups across examples

# -- advantages ----------------------------------------------------------------------------------


def advantages(
    samples: Sequence[Sample],
    standardize: str = "trl",
    *,
    references: Mapping[Group, Sequence[float]] | None = None,
) -> tuple[list[Sample], dict[str, float]]:
    """Return the samples with group-relative advantages, the same for all tokens of a sample.

    Args:
        samples: with their groups; a sample with group `()` is compared with no other.
        standardize: a name from `STANDARDIZATIONS`. With ``none`` the advantage is the reward
            itself, and no group is skipped.
        references: by group, the rewards that mean and standard deviation are computed from, if
            they differ from those of the samples, such as one reward per conversation.

    Returns:
        The samples that carry a gradient, in input order; and as JSON, the numbers of groups and
        samples, those of groups without a gradient (``skipped``) and of their samples
        (``dropped``), and the population variance of the rewards, averaged over all groups.

    Raises:
        DeclarationError: a reward is not a finite number.

    Example:
        >>> from compound.core.engine import TokenRecord
        >>> tokens = TokenRecord((1,), (2, 3), (-0.1, -0.2), "stop")
        >>> rows = [Sample("a", "e", "a", 0, tokens, reward, ("e", "a", 0)) for reward in (0.0, 1.0)]
        >>> trained, facts = advantages(rows, "center")
        >>> [sample.advantages for sample in trained], facts["skipped"], facts["variance"]
        ([(-0.5, -0.5), (0.5, 0.5)], 0, 0.25)
    """
    check_rewards(samples)
    compared = {key: [s.reward for s in members] for key, members in by_group(samples).items()}
    compared |= {key: list(some) for key, some in (references or {}).items() if key in compared}
    skipped = {key for key in compared if standardize != "none" and is_flat(compared[key])}
    function = STANDARDIZATIONS[standardize]
    kept: list[Sample] = []
    for number, sample in enumerate(samples):
        key = _key(sample, number)
        if key not in skipped:
            kept.append(sample.with_advantage(function(sample.reward, compared[key])))
    spread = sum(map(variance, compared.values()))
    facts = {
        "groups": len(compared),
        "skipped": len(skipped),
        "samples": len(samples),
        "dropped": len(samples) - len(kept),
        "variance": spread / len(compared) if compared else 0.0,
    }
    return kept, facts


def by_group(samples: Iterable[Sample]) -> dict[Group, list[Sample]]:
    """Return the samples by group, in order of first occurrence.

    A sample without a group is a group of its own, with the key ``("", index of the sample)``.
    """
    groups: dict[Group, list[Sample]] = {}
    for number, sample in enumerate(samples):
        groups.setdefault(_key(sample, number), []).append(sample)
    return groups


def _key(sample: Sample, number: int) -> Group:
    return sample.group or ("", number)


def check_rewards(samples: Iterable[Sample]) -> None:
    """Check that all rewards are finite."""
    for sample in samples:
        if not math.isfinite(sample.reward):
            raise DeclarationError(
                f"the reward of {sample.component!r} on example {sample.example!r} (call {sample.address!r}, "
                f"rollout {sample.rollout}) must be a finite number, but is {sample.reward}",
                hint="check the values that the metric and the penalties return for this call",
            )


def variance(rewards: Sequence[float]) -> float:
    """Return the population variance."""
    mean = fmean(rewards)
    return math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards)


def is_flat(rewards: Sequence[float]) -> bool:
    """Return whether all rewards are equal up to rounding."""
    return math.isclose(min(rewards), max(rewards), rel_tol=1e-9, abs_tol=1e-12)


def _deviation(rewards: Sequence[float]) -> float:
    return math.sqrt(variance(rewards) * len(rewards) / (len(rewards) - 1))


STANDARDIZATIONS: dict[str, Callable[[float, Sequence[float]], float]] = {
    "trl": lambda r, every: (r - fmean(every)) / (_deviation(every) + DEVIATION_EPSILON),
    # mmGRPO, equation 2
    "plain": lambda r, every: (r - fmean(every)) / _deviation(every),
    # Prompt-R1
    "population": lambda r, every: (
        (r - fmean(every)) / math.sqrt(variance(every) + VARIANCE_EPSILON)
    ),
    "center": lambda r, every: r - fmean(every),  # Dr. GRPO
    # RLOO
    "leave_one_out": lambda r, every: r - (math.fsum(every) - r) / (len(every) - 1),
    "none": lambda r, every: r,  # plain REINFORCE
}


def gae(
    values: Sequence[float],
    reward: float,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    kl: Sequence[float] = (),
    beta: float = 0.0,
) -> tuple[list[float], list[float]]:
    """Return the advantage and the value target of every token.

    With r_t = -beta kl_t, plus the reward at the last token, and V = 0 after it::

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t     = delta_t + gamma lam A_{t+1}
        target  = A_t + V_t

    Example:
        >>> gae([0.5, 0.25, 0.75], 1.0, lam=0.5)
        ([0.0625, 0.625, 0.25], [0.5625, 0.875, 1.0])
    """
    if not all(map(math.isfinite, (*values, *kl, reward, beta))):
        raise DeclarationError(
            f"values, KL estimates and the reward ({reward}) must be finite numbers"
        )
    found = [0.0] * len(values)
    next_value = next_advantage = 0.0
    r_t = reward
    for t in reversed(range(len(values))):
        if kl:
            r_t -= beta * kl[t]
        delta = r_t + gamma * next_value - values[t]
        next_advantage = found[t] = delta + gamma * lam * next_advantage
        next_value, r_t = values[t], 0.0
    return found, [advantage + value for advantage, value in zip(found, values, strict=True)]


def explained_variance(
    values: Sequence[Sequence[float]], returns: Sequence[Sequence[float]]
) -> float | None:
    """Return the explained variance of the returns by the values, over the tokens of all samples.

    1 - Var(returns - values) / Var(returns); ``None`` if the returns have no variance.
    """
    estimates, targets = [*itertools.chain(*values)], [*itertools.chain(*returns)]
    spread = pvariance(targets) if targets else 0.0
    if not spread:
        return None
    return 1.0 - pvariance([t - e for e, t in zip(estimates, targets, strict=True)]) / spread


def whiten(batch: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the advantages of a batch, normalized to mean 0 and variance 1 over all tokens."""
    tokens = [*itertools.chain(*batch)]
    mean = math.fsum(tokens) / len(tokens) if tokens else 0.0
    scale = math.sqrt(variance(tokens) + WHITENING_EPSILON) if tokens else 1.0
    return [[(advantage - mean) / scale for advantage in sample] for sample in batch]


# -- samples and their groups --------------------------------------------------------------------


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
    reward, found = run_reward(trace, fallback), list[Sample]()
    for call in trace.calls:
        if call.component in components:
            own = fallback if call.failure else reward
            found += call_samples(call, trace.example, own, rollout=rollout, on_policy=on_policy)
    return found


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
    place = call.component, example, call.address, call.invocation
    return [
        Sample(*place, tokens, reward, group, rollout, on_policy)
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
    for place, sample in enumerate(samples):
        calls.setdefault(_key(sample, place), []).append(place)
    pools: dict[Group, list[list[int]]] = {}
    for places in calls.values():
        if len({samples[place].rollout for place in places}) == 1:
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


# -- rewards of calls ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Credit:
    """Credit of a call of an agent."""

    call: Call  # as in the first of its traces
    traces: tuple[int, ...]  # with the call; several for a call before a fork point
    shared: float  # the propagated reward: the mean over the direct successors
    penalty: float = 0.0

    @property
    def reward(self) -> float:
        """Reward of the call: the sum of the propagated reward and the penalty."""
        return self.shared + self.penalty


@dataclass(slots=True)
class _Node:
    call: Call
    traces: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)  # the traces whose outputs come from it
    children: list[int] = field(default_factory=list)


def propagate(
    traces: Sequence[Trace],
    agents: Collection[str],
    *,
    penalties: Mapping[str, Penalty] | None = None,
    fallback: float = 0.0,
) -> tuple[list[Credit], list[Call]]:
    """Propagate the rewards of the runs of one example back to the calls of its agents (MHGPO, equation 4).

    Example:
        >>> def call(name, *parents):
        ...     return Call(name, name, name, parents, {}, {})
        >>> run = Trace("e", "", 0, 0, {}, (call("a"), call("tool", "a"), call("b", "tool")), score=0.5)
        >>> found, _ = propagate([run], ["a", "b"], penalties={"b": lambda call: -1.0})
        >>> [(credit.call.address, credit.reward) for credit in found]
        [('a', 0.5), ('b', -0.5)]
    """
    rules = penalties or {}
    if unknown := sorted(set(rules) - set(agents)):
        raise DeclarationError(
            f"unknown agent {unknown[0]!r}", hint=suggest_name(unknown[0], agents)
        )
    rewards = [run_reward(trace, fallback) for trace in traces]
    nodes = _unite(traces)
    shared: dict[int, float] = {}
    # the agents' calls and the ends of traces that follow a call directly or through tools only
    after: list[tuple[dict[int, None], dict[int, None]]] = [({}, {})] * len(nodes)
    for i in reversed(range(len(nodes))):  # parents have lower numbers than their children
        following, ended = dict[int, None](), dict.fromkeys(nodes[i].ended)
        for child in nodes[i].children:
            if nodes[child].call.component in agents:
                following[child] = None
            else:
                following |= after[child][0]
                ended |= after[child][1]
        after[i] = following, ended
        earned = [shared[j] for j in following if j in shared] + [rewards[t] for t in ended]
        if earned and nodes[i].call.component in agents:
            shared[i] = fmean(earned) if nodes[i].call.failure is None else fallback
    credits_, unreached = [], []
    for i, node in enumerate(nodes):
        name = node.call.component
        if i in shared:
            penalty = rules[name](node.call) if name in rules else 0.0
            credits_.append(Credit(node.call, tuple(node.traces), shared[i], penalty))
        elif name in agents:
            unreached.append(node.call)
    return credits_, unreached


def run_reward(trace: Trace, fallback: float) -> float:
    """Return the reward of a run: its score, or the fallback if it failed, even if it has a score."""
    if trace.failure is not None:
        return fallback
    if trace.score is None:
        raise DeclarationError(
            f"a run of example {trace.example!r} has no score", hint="score the trace first"
        )
    return trace.score


def _unite(traces: Sequence[Trace]) -> list[_Node]:
    """Return the distinct calls of all traces, parents before children.

    Two calls are equal if seed, configuration, address, sample index and (recursively) parents are
    equal.
    """
    if len({trace.example for trace in traces}) > 1:
        raise DeclarationError(
            "rewards are propagated within one example, but the traces belong to several examples"
        )
    nodes: list[_Node] = []
    numbers: dict[tuple[object, ...], int] = {}
    for t, trace in enumerate(traces):
        by_address: dict[str, int] = {}
        for call in trace.calls:
            parents = tuple(by_address[address] for address in call.parents)
            identity = (trace.seed, trace.configuration, call.address, call.sample, parents)
            i = numbers.setdefault(identity, len(nodes))
            if i == len(nodes):
                nodes.append(_Node(call))
                for parent in parents:
                    nodes[parent].children.append(i)
            elif nodes[i].call.tokens != call.tokens:
                raise DeclarationError(
                    f"two runs of example {trace.example!r} have different calls at {call.address!r} with "
                    f"sample index {call.sample}",
                    hint="give each fork a distinct sample index",
                )
            nodes[i].traces.append(t)
            by_address[call.address] = i
        read = {address for call in trace.calls for address in call.parents}
        ends: Collection[str] = [c.address for c in trace.calls if c.address not in read]
        if trace.failure is None and trace.ends is not None:  # else its last calls
            ends = trace.ends
        for address in ends:
            nodes[by_address[address]].ended.append(t)
    return nodes
