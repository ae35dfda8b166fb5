"""Measure the ranking accuracy of local rewards on simulated systems with a known best ranking."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import networkx as nx
import numpy as np

from benchmarks.simulated.systems import Changed, Simulated, world
from compound.core.example import Example
from compound.core.narrowing import entry
from compound.evaluation.evaluate import EvaluationRules, score
from compound.execution.cache import MemoryCache
from compound.execution.executor import Executor
from compound.execution.trace import Trace
from compound.graph.system import System
from compound.rewards.buffer import Entry, PairBuffer
from compound.rewards.candidates import Sampling
from compound.rewards.features import Template
from compound.rewards.fit import component_pairs, fit_rewards
from compound.rewards.model import make_backbone
from compound.rewards.pairs import Draw, Pair, collect

ONCE = Sampling(samples=3, rollouts=1, max_rollouts=1, level=1)
TRAIN_INPUTS, FRESH_INPUTS = 40, 60
NOISY_FACTOR = 4  # factor of the number of training inputs if there is noise
HINDERING = (
    -0.5
)  # an interaction with which a larger output lowers the value of another, or makes it harmful
KINDS: Mapping[str, Changed] = {
    "exact": {"noise": 0.0, "blur": 0.0},
    "exact, interacting": {"noise": 0.0, "blur": 0.0, "interaction": HINDERING},
    "noisy": {},
    "noisy, interacting": {"interaction": HINDERING},
}


def accuracy(shape: str, seed: int) -> dict[str, object]:
    """Return ranking accuracies on pairs of new inputs, and their upper bound, the Bayes limit.

    The limit ranks the same pairs by the expected reward given the output and all upstream outputs
    (equation 4 in closed form).
    """
    return {kind: _accuracy(world(shape, seed, **changed)) for kind, changed in KINDS.items()}


def _accuracy(made: Simulated) -> dict[str, float]:
    system = made.system()
    draws, _ = _draws(made, system, "train", TRAIN_INPUTS * (NOISY_FACTOR if made.noise else 1))
    fresh, outputs = _draws(made, system, "fresh", FRESH_INPUTS)
    buffer, backbone = _buffer(system, draws), make_backbone("none")
    learned = fit_rewards(buffer, system, made.names, backbone, "none", seed=made.seed)
    right: list[bool] = []
    best: list[bool] = []
    for name in made.names:
        pairs = [pair for pair, _ in _buffer(system, fresh).pairs(name)]
        calls = [(pair.inputs, y) for pair in pairs for y in (pair.chosen, pair.rejected)]
        local = learned.model.rewards(name, calls).reshape(-1, 2)
        right += (local[:, 0] > local[:, 1]).tolist()
        expected = [_expected(made, pair, outputs[pair.example]) for pair in pairs]
        best += [chosen > rejected for chosen, rejected in expected]
    return {"learned": float(np.mean(right)), "limit": float(np.mean(best))}


def lora(shape: str, seed: int) -> dict[str, float]:
    """Return the held-out accuracy of a trained sentence encoder on a system without noise."""
    from compound.rewards.backbone import Backbone
    from compound.rewards.fit import train
    from compound.rewards.settings import BackboneLoRASettings

    made = world(shape, seed, noise=0.0, blur=0.0)
    system = made.system()
    buffer = _buffer(system, _draws(made, system, "train", TRAIN_INPUTS)[0])
    backbone = Backbone("minilm", max_length=64)
    texts = [
        component_pairs(buffer, Template.of(system.components[name]), held_out=True)
        for name in made.names
    ]
    settings = BackboneLoRASettings(rank=8, alpha=16, epochs=4, batch=32, patience=60)
    curve = train(backbone, texts, settings, seed=seed)
    learned = fit_rewards(buffer, system, made.names, backbone, "minilm", trained=True, seed=seed)
    means = [reward.accuracy.mean for reward in learned.model.rewards_of.values()]
    losses = [loss for _, loss in curve.losses]
    return {"accuracy": float(np.mean(means)), "loss_before": losses[0], "loss_after": min(losses)}


def _draws(
    made: Simulated, system: System, split: str, inputs: int
) -> tuple[tuple[Draw, ...], dict[str, Mapping[str, float]]]:
    """Return draws of every component for some inputs, and each input's original outputs."""

    async def drawn() -> tuple[tuple[Draw, ...], dict[str, Mapping[str, float]]]:
        executor = Executor(cache=MemoryCache(), seed=made.seed)
        traced: list[tuple[Example, Trace]] = []
        outputs: dict[str, Mapping[str, float]] = {}
        for example in made.examples(inputs, split):
            trace = await executor.run(system, example.inputs, example=example.id)
            values = {**trace.outputs, **example.inputs}
            outputs[example.id] = {name: entry(values, name, (int, float)) for name in values}
            traced.append((example, await score(executor, trace, made, example, EvaluationRules())))
        return (
            await collect(executor, system, traced, made.names, made, sampling=ONCE)
        ).draws, outputs

    return asyncio.run(drawn())


def _buffer(system: System, draws: Sequence[Draw]) -> PairBuffer:
    return PairBuffer(system.identity, ONCE, [Entry(draw, 0) for draw in draws])


def _expected(made: Simulated, pair: Pair, outputs: Mapping[str, float]) -> tuple[float, float]:
    """Return the expected rewards given each output of a pair and all upstream outputs."""
    graph = nx.DiGraph([(source, name) for name, reads in made.graph.items() for source in reads])
    known = {name: outputs[name] for name in nx.ancestors(graph, pair.component) - {"x"}}
    first = dict.fromkeys(made.names, 0)
    chosen, rejected = (
        made.downstream(first, {**known, pair.component: entry(y, "y", (int, float))}, outputs["x"])
        for y in (pair.chosen, pair.rejected)
    )
    return chosen, rejected
