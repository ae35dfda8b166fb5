"""Ablations of `optimas`: rewards learned from shuffled labels, frozen rewards, a gate, no local reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from compound.execution.rng import generator
from compound.graph.system import System
from compound.optimization.method import Method, Optimizer
from compound.optimization.registration import MethodFactory
from compound.optimizers.optimas.evaluation_table import FitCritic
from compound.optimizers.optimas.guided import GuidedSearch
from compound.optimizers.optimas.methods import OptimasSettings, optimas
from compound.optimizers.optimas.segment_search import SegmentSearch
from compound.rewards.buffer import Entry
from compound.rewards.features import Embedder
from compound.rewards.gains.critic import Critic, fit_critic
from compound.rewards.gains.estimates import EstimateGains, Evaluations, Gains, estimate_gains
from compound.rewards.pairs import Draw
from compound.rewards.template import Template
from compound.settings.optimize import OptimizeSettings

GATE = 0.6  # share of evaluations that a reward must order like the global one


@dataclass(frozen=True)
class FitToShuffled:
    """Fits a critic to draws, in a share of which the scores of the candidates are shuffled.

    Attributes:
        share: share of the draws.
    """

    share: float = 1.0

    def __call__(
        self, entries: Sequence[Entry], template: Template, backbone: Embedder, *, certain: bool
    ) -> Critic | None:
        """Shuffle, then fit."""
        shuffled = [replace(entry, draw=self._shuffled(entry.draw)) for entry in entries]
        return fit_critic(shuffled, template, backbone, certain=certain)

    def _shuffled(self, draw: Draw) -> Draw:
        rng = generator(0, "labels", draw.example, draw.address)
        if rng.random() >= self.share:
            return draw
        order = rng.permutation(len(draw.candidates))
        rewards = [draw.candidates[i].rewards for i in order]
        candidates = [replace(c, rewards=r) for c, r in zip(draw.candidates, rewards, strict=True)]
        return replace(draw, candidates=tuple(candidates))


def fit_to_first(
    entries: Sequence[Entry], template: Template, backbone: Embedder, *, certain: bool
) -> Critic | None:
    """Fit a critic to the draws of the first iteration only (frozen rewards)."""
    first = min((entry.iteration for entry in entries), default=0)
    kept = [entry for entry in entries if entry.iteration == first]
    return fit_critic(kept, template, backbone, certain=certain)


def fit_nothing(
    entries: Sequence[Entry], template: Template, backbone: Embedder, *, certain: bool
) -> Critic | None:
    """Return no critic, so that candidates are compared by the global reward alone."""
    return None


def gated(data: Evaluations) -> Gains:
    """Estimate gains by a gate in place of the control variate.

    If the local reward orders enough evaluations like the global one, candidates are ranked by it alone;
    otherwise by the global reward alone.
    """
    compared = data.both() & (data.globally != 0) & (data.locally != 0)
    agree = np.sign(data.globally[compared]) == np.sign(data.locally[compared])
    if len(agree) and agree.mean() >= GATE:
        found = estimate_gains(data)
        mean = np.where(np.isnan(found.locally), found.mean, found.locally)
        return replace(found, mean=mean, spread=0.0, doubt=0.0)
    return estimate_gains(Evaluations(data.globally, np.full_like(data.locally, np.nan)))


def _with(fit: FitCritic = fit_critic, estimate: EstimateGains = estimate_gains) -> MethodFactory:
    """Return the method `optimas` with another way to fit rewards, or to estimate gains."""

    def ablated(system: System, optimize: OptimizeSettings, settings: OptimasSettings) -> Method:
        made = optimas(system, optimize, settings)
        local, segment = made.optimizers["local"], made.optimizers["segment"]
        assert isinstance(local, GuidedSearch)
        assert isinstance(segment, SegmentSearch)
        changed: dict[str, Optimizer] = {
            "local": replace(local, fit=fit, estimate=estimate),
            "segment": replace(segment, fit=fit),
        }
        return replace(made, optimizers={**made.optimizers, **changed})

    return MethodFactory(ablated, OptimasSettings)


SHARES = (0.0, 0.5, 0.75, 0.9, 1.0)
mislabelled_0, mislabelled_1, mislabelled_2, mislabelled_3, mislabelled_4 = (
    _with(FitToShuffled(share)) for share in SHARES
)
shuffled = mislabelled_4
frozen = _with(fit_to_first)
unguided = _with(fit_nothing)
gate = _with(estimate=gated)
