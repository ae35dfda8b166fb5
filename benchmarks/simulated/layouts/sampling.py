"""Simulate the sampling of a step: runs of a chain of calls, on replicas with continuous batching.

All requests of a replica advance at one rate, which depends on their number. A new request first
reads its prompt, which stops the others. Requests are placed by the routing of fleets
(`compound.engines.replicas`); the samples of a group share their first prompt, which a replica
reads once. The driver handles one message at a time.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from benchmarks.simulated.layouts.costs import Costs
from compound.engines.replicas import choose
from compound.execution.rng import generator


@dataclass(frozen=True)
class Load:
    """The runs of a training step.

    Attributes:
        examples: the number of examples.
        group: runs of each example.
        calls: model calls of a run, one after the other.
        prompt: tokens of a prompt.
        answer: mean tokens of an answer.
        spread: standard deviation of the logarithm of an answer's length, which is lognormal.
        longest: maximum tokens of an answer.
        driver: seconds of the driver for each call.
    """

    examples: int = 64
    group: int = 8
    calls: int = 4
    prompt: int = 1000
    answer: float = 300.0
    spread: float = 0.6
    longest: int = 2048
    driver: float = 26e-6

    def lengths(self, seed: int) -> np.ndarray:
        """Draw the lengths of all answers, by run and call."""
        rng = generator(seed, "lengths")
        mean = np.log(self.answer) - self.spread**2 / 2
        drawn = rng.lognormal(mean, self.spread, (self.examples * self.group, self.calls))
        return np.clip(np.rint(drawn), 1, self.longest)


@dataclass
class SimulatedReplica:
    """A server that samples.

    Attributes:
        costs: the costs of its GPUs.
        context: mean tokens of a request in its cache.
        time: the time up to which it was simulated.
        stalled: the time up to which it reads prompts.
        clock: tokens that each request in flight has got since the start.
        running: the clocks at which the requests in flight end, with their runs, as a heap.
        known: prompts in its prefix cache.
        version: changes whenever the next end changes.
    """

    costs: Costs
    context: float
    time: float = 0.0
    stalled: float = 0.0
    clock: float = 0.0
    running: list[tuple[float, int]] = field(default_factory=list)
    known: set[int] = field(default_factory=set)
    version: int = 0

    def advance(self, now: float) -> None:
        """Simulate it up to a time before the next end."""
        passed = now - max(self.time, self.stalled)
        if self.running and passed > 0:
            self.clock += passed / self.costs.decoding(len(self.running), self.context)
        self.time = now

    def start(self, run: int, prompt: int, read: float, tokens: float) -> None:
        """Start a request: read the part of its prompt that is not in the cache, and sample its tokens.

        Args:
            run: the run, which `finish` returns.
            prompt: identifies the prompt.
            read: the tokens of the prompt.
            tokens: the tokens of the answer.
        """
        if prompt not in self.known:
            self.known.add(prompt)
            self.stalled = max(self.stalled, self.time) + self.costs.prefill(read)
        heapq.heappush(self.running, (self.clock + tokens, run))
        self.version += 1

    def next_end(self) -> float:
        """Return the time at which the next request ends, if no other one starts before."""
        left = max(0.0, self.running[0][0] - self.clock)
        return max(self.time, self.stalled) + left * self.costs.decoding(
            len(self.running), self.context
        )

    def finish(self, now: float) -> int:
        """End the next request at its time, and return its run."""
        self.clock, run = heapq.heappop(self.running)
        self.time = now
        self.version += 1
        return run


class _Event(NamedTuple):
    """The end of a replica's next request, or the end of the driver's work for a run.

    Attributes:
        replica: the replica; empty for the driver.
        number: the replica's version, or the run.
    """

    replica: str
    number: int


@functools.cache
def sampling_time(costs: Costs, load: Load, replicas: int, seed: int) -> float:
    """Return the seconds until all runs of a step have ended; the seed is that of the lengths of answers."""
    return _Sampling(costs, load, replicas, load.lengths(seed)).run()


class _Sampling:
    def __init__(self, costs: Costs, load: Load, replicas: int, lengths: np.ndarray) -> None:
        context = load.prompt + load.answer
        self.load, self.lengths = load, lengths
        self.replicas = {str(i): SimulatedReplica(costs, context) for i in range(replicas)}
        self.capacity = costs.capacity(context)
        self.done = np.zeros(len(lengths), dtype=int)  # calls of each run
        self.waiting: deque[int] = deque()  # runs whose next call has no place yet
        self.events: list[tuple[float, int, _Event]] = []
        self.driver = 0.0  # the time up to which the driver is busy
        self._order = itertools.count()  # of events at the same time

    def run(self) -> float:
        for run in range(len(self.lengths)):
            self._tell_driver(0.0, run)
        while self.events:
            now, _, event = heapq.heappop(self.events)
            if event.replica:
                replica = self.replicas[event.replica]
                if event.number != replica.version:
                    continue  # its requests changed since
                run = replica.finish(now)
                self.done[run] += 1
                self._plan(event.replica)
                self._tell_driver(now, run)
            elif self.done[event.number] < self.load.calls:
                self.waiting.append(event.number)
            self._place(now)
        return self.driver

    def _tell_driver(self, now: float, run: int) -> None:
        """Let the driver handle a run: it starts the next call, or records the end."""
        self.driver = max(self.driver, now) + self.load.driver
        self._add(self.driver, _Event("", run))

    def _place(self, now: float) -> None:
        """Send the calls that have a place."""
        while self.waiting:
            run = self.waiting[0]
            prompt = self._prompt(run)
            loads = {name: len(replica.running) for name, replica in self.replicas.items()}
            name = choose(str(prompt).encode(), loads, self.capacity)
            if name is None:
                return
            self.waiting.popleft()
            replica = self.replicas[name]
            replica.advance(now)
            replica.start(run, prompt, self.load.prompt, float(self.lengths[run, self.done[run]]))
            self._plan(name)

    def _prompt(self, run: int) -> int:
        """Identify the prompt of a run's next call: first calls share that of their example."""
        done = int(self.done[run])
        return run // self.load.group if done == 0 else len(self.lengths) * done + run

    def _plan(self, name: str) -> None:
        replica = self.replicas[name]
        if replica.running:
            self._add(replica.next_end(), _Event(name, replica.version))

    def _add(self, time: float, event: _Event) -> None:
        heapq.heappush(self.events, (time, next(self._order), event))
