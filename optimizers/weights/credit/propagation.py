"""Reward propagation: assign credit to each call from the global rewards of the runs it led to (MHGPO).

The traces of an example, which may be forks of each other, are merged into one graph of calls,
where calls before a fork point are shared by all forks. Backwards from the outputs, a call earns
the mean of the rewards of its direct successors. Then a penalty of the call itself is added, which
is not propagated. The algorithm works on calls, so loops, maps and conditions need no special case.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from compound.core.errors import DeclarationError, suggest_name
from compound.execution.trace import Call, Trace

Penalty = Callable[[Call], float]


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
    """A call of the merged graph; ``ended`` are the traces whose outputs come from it."""

    call: Call
    traces: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
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
    unknown = sorted(set(rules) - set(agents))
    if unknown:
        raise DeclarationError(
            f"unknown agent {unknown[0]!r}", hint=suggest_name(unknown[0], agents)
        )
    rewards = [run_reward(trace, fallback) for trace in traces]
    nodes = _unite(traces)
    shared: dict[int, float] = {}
    successors: list[tuple[dict[int, None], dict[int, None]]] = [({}, {})] * len(nodes)
    for i in reversed(range(len(nodes))):  # parents have lower numbers than their children
        following, ended = _direct(i, nodes, successors, agents)
        successors[i] = following, ended
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
        for address in _ends(trace):
            nodes[by_address[address]].ended.append(t)
    return nodes


def _ends(trace: Trace) -> Collection[str]:
    """Return the calls that the outputs come from, or, for a failed run, its last calls."""
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
    """Return the agents' calls and the ends of traces that follow a call directly or through tools only."""
    following: dict[int, None] = {}
    ended = dict.fromkeys(nodes[i].ended)
    for child in nodes[i].children:
        if nodes[child].call.component in agents:
            following[child] = None
        else:
            following |= successors[child][0]
            ended |= successors[child][1]
    return following, ended
