"""Simulated systems with a known optimum and a known downstream value, on the graph shapes of the papers.

A component's output is a number: the quality of its option, plus a share of its inputs, plus noise.
The reward is a weighted sum of the outputs plus ``interaction`` times the products along the edges.
All outputs are therefore jointly Gaussian, and the expected reward of a configuration, and that
given one output (the right-hand side of equation 4 in OPTIMAS), have closed forms. Thousands of
runs take a second.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from compound.core.example import Example, Score
from compound.core.narrowing import entry
from compound.execution.rng import generator
from compound.graph.component import CallContext, Input, Operation, Source
from compound.graph.space import Choice
from compound.graph.system import System
from compound.graph.types import Port

Vector = NDArray[np.float64]

# node -> its inputs; `x` is the system's input
SHAPES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "chain": {"a": ("x",), "b": ("a",), "c": ("b",)},
    "selectors": {"a": ("x",), "b": ("a",), "c": ("b",), "d": ("b", "c")},
    "join": {"a": ("x",), "b": ("x",), "c": ("a", "b")},
    "five": {"a": ("x",), "b": ("a",), "c": ("b",), "d": ("a", "c"), "e": ("a", "d")},
    "diamond": {"a": ("x",), "b": ("x",), "c": ("a", "b"), "d": ("a", "b", "c")},
}


@dataclass(frozen=True, eq=False)
class Step(Operation):
    """Component whose output is ``quality[option] + carry * mean(inputs) + noise``."""

    name: str
    reads: tuple[str, ...]
    qualities: tuple[float, ...]
    carry: float
    noise: float
    common: bool = True

    kind = "simulated"
    cacheable = True

    @property
    def inputs(self) -> Mapping[str, Port]:  # noqa: D102
        return {name: Port(float) for name in self.reads}

    @property
    def outputs(self) -> Mapping[str, Port]:  # noqa: D102
        return {"y": Port(float)}

    @property
    def settings(self) -> Mapping[str, object]:  # noqa: D102
        return {"option": Choice(*range(len(self.qualities)))}

    @property
    def version(self) -> str:  # noqa: D102
        reads, qualities = tuple(self.reads), tuple(self.qualities)  # lists when loaded from a file
        return f"simulated:{reads}:{qualities}:{self.carry}:{self.noise}:{self.common}"

    def deterministic(self, values: Mapping[str, object]) -> bool:  # noqa: D102
        return not self.noise

    async def run(  # noqa: D102
        self, inputs: Mapping[str, object], values: Mapping[str, object], call: CallContext
    ) -> Mapping[str, object]:
        numbers = [entry(inputs, name, (int, float)) for name in inputs]
        read, option = sum(numbers) / len(inputs), entry(values, "option", int)
        rng = call.rng if self.common else generator(call.seed, option, *numbers)
        noise = self.noise * float(rng.normal()) if self.noise else 0.0
        return {"y": self.qualities[option] + self.carry * read + noise}


@dataclass(frozen=True)
class Simulated:
    """Simulated system and metric, with closed-form expectations.

    Attributes:
        shape: a name in `SHAPES`.
        options: number of options of each component.
        interaction: the weight of the products along edges; 0 makes components independent.
        carry: the share of its mean input that a component adds to its output.
        noise: the standard deviation of each output.
        common: whether runs of one sample share their noise for all inputs and options; otherwise
            other inputs or options draw other noise, like a language model with other prompts.
        blur: the standard deviation of the metric around the true reward, drawn again for other
            outputs.
        spread: the range of each component's qualities, 1 by default; 0 makes all options equal.
        seed: the seed of the qualities and weights.

    Example:
        >>> world = Simulated("chain", noise=0.0)
        >>> best, value = world.optimum()
        >>> abs(world.value(best) - value) < 1e-12
        True
    """

    shape: str
    options: int = 3
    interaction: float = 0.0
    carry: float = 0.3
    noise: float = 0.1
    common: bool = True
    blur: float = 0.0
    spread: tuple[float, ...] = ()
    seed: int = 0

    @property
    def graph(self) -> Mapping[str, tuple[str, ...]]:
        """Inputs of each node."""
        return SHAPES[self.shape]

    @property
    def names(self) -> list[str]:
        """Components in topological order."""
        return list(self.graph)

    @cached_property
    def qualities(self) -> Mapping[str, tuple[float, ...]]:
        """Quality of each option of each component, in [0, 1] times its spread."""
        spread = dict(zip(self.names, self.spread, strict=False))
        drawn = {
            name: generator(self.seed, "quality", self.shape, name).random(self.options)
            for name in self.names
        }
        return {name: tuple((spread.get(name, 1.0) * row).tolist()) for name, row in drawn.items()}

    @cached_property
    def weights(self) -> Vector:
        """Weight of each component's output in the reward, in [0.5, 1]."""
        return 0.5 + 0.5 * generator(self.seed, "weight", self.shape).random(len(self.names))

    def system(self) -> System:
        """Return the system with each component at its first option; it outputs all nodes' outputs."""
        sources: dict[str, Source] = {"x": Input("x", float)}
        for name, reads in self.graph.items():
            step = Step(name, reads, self.qualities[name], self.carry, self.noise, self.common)
            wires: dict[str, Any] = {source: sources[source] for source in reads}
            sources[name] = step(**wires)
        return System(
            f"simulated_{self.shape}", outputs={name: sources[name] for name in self.names}
        )

    def reward(self, y: Vector) -> float:
        """Return the global reward of the components' outputs."""
        return float(self.weights @ y + self.interaction * (y @ self._products() @ y))

    def score(self, outputs: Mapping[str, object], example: Example) -> Score:
        """Score outputs, which makes this object a metric."""
        y = np.array([outputs[name] for name in self.names])
        blur = (
            self.blur * float(generator(self.seed, "blur", example.id, *y).normal())
            if self.blur
            else 0.0
        )
        return Score(self.reward(y) + blur)

    @property
    def name(self) -> str:
        """The metric's name."""
        return "simulated"

    def examples(self, n: int, split: str = "train") -> list[Example]:
        """Return examples with one number each, drawn from a normal distribution."""
        drawn = generator(self.seed, "examples", split).normal(size=n)
        return [Example(f"{split}-{i}", {"x": float(x)}, {}) for i, x in enumerate(drawn)]

    # -- closed-form expectations ----------------------------------------------------------------------

    def value(self, options: Mapping[str, int], x: float = 0.0) -> float:
        """Return the expected reward of a configuration for an input."""
        return self._expected(options, x, {})

    def downstream(self, options: Mapping[str, int], known: Mapping[str, float], x: float) -> float:
        """Return the expected reward given some components' outputs.

        With one output and all its upstream outputs known, this is the expectation in equation 4.
        """
        return self._expected(options, x, known)

    def optimum(self, x: float = 0.0) -> tuple[dict[str, int], float]:
        """Return the best configuration and its expected reward.

        Without negative interactions this is each component's best option; otherwise all
        combinations are tried.
        """
        if self.interaction >= 0:
            best = {name: int(np.argmax(row)) for name, row in self.qualities.items()}
            return best, self.value(best, x)
        tried = itertools.product(range(self.options), repeat=len(self.names))
        settings = [dict(zip(self.names, choice, strict=True)) for choice in tried]
        best = max(settings, key=lambda options: self.value(options, x))
        return best, self.value(best, x)

    def single(self, options: Mapping[str, int], x: float = 0.0) -> float:
        """Return the largest gain in expected reward from changing one component.

        The gain is 0 at a component-wise maximum (theorem 4.2).
        """
        current = self.value(options, x)
        return max(
            self.value({**options, name: other}, x) - current
            for name in self.names
            for other in range(self.options)
        )

    def _products(self) -> Vector:
        """Return the matrix that multiplies outputs along the edges."""
        matrix = np.zeros((len(self.names), len(self.names)))
        for i, name in enumerate(self.names):
            for source in self.graph[name]:
                if source != "x":
                    matrix[i, self.names.index(source)] = 1.0
        return matrix

    def _expected(self, options: Mapping[str, int], x: float, known: Mapping[str, float]) -> float:
        """Return E[w·y + λ yᵀMy], which is w·m + λ (mᵀMm + tr(MS)) with mean m and covariance S."""
        mean, spread = self._moments(options, x, known)
        product = self._products()
        quadratic = float(mean @ product @ mean + np.trace(product @ spread))
        return float(self.weights @ mean) + self.interaction * quadratic

    def _moments(
        self, options: Mapping[str, int], x: float, known: Mapping[str, float]
    ) -> tuple[Vector, Vector]:
        """Return mean and covariance of all outputs, given some outputs with all their upstream outputs."""
        size = len(self.names)
        mean, loads = (
            np.zeros(size),
            np.zeros((size, size)),
        )  # y = mean + loads @ (independent noise)
        for i, name in enumerate(self.names):
            if name in known:
                mean[i] = known[name]
                continue
            reads = self.graph[name]
            share = self.carry / len(reads)
            mean[i] = self.qualities[name][options[name]]
            for source in reads:
                if source == "x":
                    mean[i] += share * x
                else:
                    j = self.names.index(source)
                    mean[i] += share * mean[j]
                    loads[i] += share * loads[j]
            loads[i, i] += self.noise
        return mean, loads @ loads.T


def options_of(values: Mapping[str, object], names: Sequence[str]) -> dict[str, int]:
    """Return the options in a configuration."""
    return {name: entry(values, f"{name}.option", int) for name in names}


# Conditions of the searches: outputs like those of a language model (each setting draws another
# answer), metric noise larger than the gain of one component, and too many options for an
# exhaustive search.
NOISE, BLUR, OPTIONS = 0.1, 0.5, 16


class Changed(TypedDict, total=False):
    """Fields of `Simulated` that a benchmark sets."""

    options: int
    interaction: float
    noise: float
    blur: float
    spread: tuple[float, ...]


def world(shape: str, seed: int, **changed: Unpack[Changed]) -> Simulated:
    """Return a simulated system that is hard to search."""
    given: Changed = {"noise": NOISE, "blur": BLUR, "options": OPTIONS, **changed}
    return Simulated(shape, seed=seed, common=False, **given)
