"""Reward propagation: what each call of a run earned, from the global rewards of the runs it led to (MHGPO).

The traces of one example, which may be forks of each other, are united into one graph of calls: what
happened before a fork point is the same call in all forks. From the outputs backwards, a call earns the mean
of what its direct successors earned; then each adds a penalty of its own, which goes no further. Everything
works on calls, so that loops, maps and conditions need no special case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from compound.errors import DeclarationError, nearest
from compound.execution.trace import Call, Trace

Aggregate = Callable[[Sequence[float]], float]
Penalty = Callable[[Call], float]


@dataclass(frozen=True)
class Credit:
    """What one call of an agent earned.

    Attributes:
        call: the call, as in the first of its traces.
        traces: positions of the traces it is part of; more than one for a call before a fork point.
        shared: what the runs it led to earned, by aggregation over its direct successors.
        penalty: what its own component's rule adds, usually not above 0.
    """

    call: Call
    traces: tuple[int, ...]
    shared: float
    penalty: float = 0.0

    @property
    def reward(self) -> float:
        """The call's own reward: the shared one and its penalty."""
        return self.shared + self.penalty


@dataclass(frozen=True)
class Propagated:
    """The credit of every agent's call, each once, in the order of the traces.

    ``unreached`` are the agents' calls that no reward can be traced back to; they have none.
    """

    credits: tuple[Credit, ...]
    unreached: tuple[Call, ...] = ()


@dataclass(slots=True)
class _Node:
    """A call of the united graph; ``ended`` are the traces whose outputs came from it."""

    call: Call
    traces: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    children: list[int] = field(default_factory=list)


def propagate(
    traces: Sequence[Trace],
    agents: Collection[str],
    *,
    penalties: Mapping[str, Penalty] | None = None,
    aggregate: str | Aggregate = "mean",
    fallback: float = 0.0,
) -> Propagated:
    """Propagate the rewards of the runs of one example back to the calls of its agents (MHGPO, equation 4).

    Args:
        traces: scored runs of one example. Forks of one run share the calls that `Executor.fork` kept; each
            fork needs a sample index of its own.
        agents: names of the components that earn rewards. Others are transparent: the direct successors of a
            call are the agents reached through others only.
        penalties: by agent, what its own rule adds to the reward of one of its calls. It is never propagated.
        aggregate: ``mean``, ``max``, ``min`` or a function: how the rewards of successors become one.
        fallback: the reward of a run that failed. It goes to the last calls that the run made, and from there
            back. A call that failed where its run did not, since nobody read it, earns no more.

    Raises:
        DeclarationError: the traces are of several examples, two different calls cannot be told apart, a run
            that succeeded has no score, or a name is unknown.

    Example:
        >>> def call(name, *parents):
        ...     return Call(name, name, name, parents, {}, {})
        >>> run = Trace("e", "", 0, 0, {}, (call("a"), call("tool", "a"), call("b", "tool")), score=0.5)
        >>> found = propagate([run], ["a", "b"], penalties={"b": lambda call: -1.0})
        >>> [(credit.call.address, credit.reward) for credit in found.credits]
        [('a', 0.5), ('b', -0.5)]
    """
    rules = penalties or {}
    unknown = sorted(set(rules) - set(agents))
    if unknown:
        raise DeclarationError(f"no agent is called {unknown[0]!r}", hint=nearest(unknown[0], agents))
    combine = _aggregator(aggregate)
    rewards = [run_reward(trace, fallback) for trace in traces]
    nodes = _unite(traces)
    shared: dict[int, float] = {}
    successors: list[tuple[dict[int, None], dict[int, None]]] = [({}, {})] * len(nodes)
    for i in reversed(range(len(nodes))):  # parents have lower numbers than their children
        following, ended = _direct(i, nodes, successors, agents)
        successors[i] = following, ended
        earned = [shared[j] for j in following if j in shared] + [rewards[t] for t in ended]
        if earned and nodes[i].call.component in agents:
            shared[i] = combine(earned) if nodes[i].call.failure is None else fallback
    credits_, unreached = [], []
    for i, node in enumerate(nodes):
        name = node.call.component
        if i in shared:
            penalty = rules[name](node.call) if name in rules else 0.0
            credits_.append(Credit(node.call, tuple(node.traces), shared[i], penalty))
        elif name in agents:
            unreached.append(node.call)
    return Propagated(tuple(credits_), tuple(unreached))


def run_reward(trace: Trace, fallback: float) -> float:
    """Return the reward of a run: its score, or the fallback when it failed, whatever it was scored with.

    Raises:
        DeclarationError: the run succeeded, but has no score.

    Example:
        >>> run_reward(Trace("e", "", 0, 0, {}, (), score=0.0), fallback=-1.0)
        0.0
    """
    if trace.failure is not None:
        return fallback
    if trace.score is None:
        raise DeclarationError(
            f"a run of example {trace.example!r} has no score", hint="score the trace first"
        )
    return trace.score


def _unite(traces: Sequence[Trace]) -> list[_Node]:
    """Return the calls of all traces, each once, parents before children.

    Two calls are the same when address, sample index and parents are, and so on for the parents.
    """
    if len({trace.example for trace in traces}) > 1:
        raise DeclarationError("rewards are propagated within one example, but the traces are of several")
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
                    hint="give each fork a sample index of its own",
                )
            nodes[i].traces.append(t)
            by_address[call.address] = i
        for address in _ends(trace):
            nodes[by_address[address]].ended.append(t)
    return nodes


def _ends(trace: Trace) -> Collection[str]:
    """Return the calls that the outputs came from; of a failed run, the last ones it made."""
    if trace.failure is None and trace.ends is not None:
        return trace.ends
    read = {address for call in trace.calls for address in call.parents}
    return [call.address for call in trace.calls if call.address not in read]


def _direct(
    i: int,
    nodes: Sequence[_Node],
    successors: Sequence[tuple[dict[int, None], dict[int, None]]],
    agents: Collection[str],
) -> tuple[dict[int, None], dict[int, None]]:
    """Return the agents' calls that follow a call, and the traces that end with it, through tools only."""
    following: dict[int, None] = {}
    ended = dict.fromkeys(nodes[i].ended)
    for child in nodes[i].children:
        if nodes[child].call.component in agents:
            following[child] = None
        else:
            following |= successors[child][0]
            ended |= successors[child][1]
    return following, ended


def _mean(rewards: Sequence[float]) -> float:
    return math.fsum(rewards) / len(rewards)


AGGREGATES: dict[str, Aggregate] = {"mean": _mean, "max": max, "min": min}


def _aggregator(aggregate: str | Aggregate) -> Aggregate:
    if not isinstance(aggregate, str):
        return aggregate
    if aggregate not in AGGREGATES:
        raise DeclarationError(
            f"no way to aggregate is called {aggregate!r}", hint=nearest(aggregate, AGGREGATES)
        )
    return AGGREGATES[aggregate]
