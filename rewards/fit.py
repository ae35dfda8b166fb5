"""Fit a reward model to a pair buffer: heads on fixed features, or on a LoRA-trained backbone.

Every component's head is refitted to the whole buffer, with lower weights for older pairs, so that updates of
one component cannot make another one forget. A trained backbone continues from its last weights, on batches
that mix all components (`compound.rewards.backbone_training`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from compound.execution.rng import generator
from compound.graph.configuration import digest
from compound.graph.system import System
from compound.rewards.alignment import accuracy
from compound.rewards.buffer import PairBuffer, input_key
from compound.rewards.features import Embedder, FeatureMap
from compound.rewards.heads import MIN_INPUTS, Fit, fit
from compound.rewards.model import LocalReward, RewardModel
from compound.rewards.template import Reading, Template

RECENCY = 0.8  # decay of a pair's weight per iteration
HELD_OUT = 0.25  # share of the inputs held out if the backbone is trained

Weighting = Literal["plain", "margin"]


@dataclass(frozen=True)
class PairTexts:
    """Pairs of a component in the form that the model reads, in buffer order."""

    component: str
    chosen: tuple[Reading, ...]
    rejected: tuple[Reading, ...]
    inputs: tuple[str, ...]
    gaps: tuple[float, ...]
    recency: tuple[float, ...]
    held_out: tuple[bool, ...] = ()

    def is_sufficient(self) -> bool:
        """Return whether there are enough pairs to fit and to evaluate a reward."""
        judged = self.held_out or (True,) * len(self.inputs)
        seen = {
            n
            for n, out in zip(self.inputs, self.held_out or (False,) * len(self.inputs), strict=True)
            if not out
        }
        return len(seen) >= MIN_INPUTS and any(judged)


@dataclass
class FittedRewards:
    """A reward model, and the reasons why some components have no reward."""

    model: RewardModel
    missing: dict[str, str] = field(default_factory=dict)


def component_pairs(
    buffer: PairBuffer, system: System, component: str, *, held_out: bool = False
) -> PairTexts:
    """Return a component's pairs as rendered by its template.

    Args:
        buffer: the draws.
        system: the system with the component.
        component: the name of the component.
        held_out: whether to hold out the share `HELD_OUT` of the inputs, the same ones every time.
    """
    return read_pairs(buffer, Template.of(system.components[component]), held_out=held_out)


def read_pairs(buffer: PairBuffer, template: Template, *, held_out: bool = False) -> PairTexts:
    """Return a component's pairs as rendered by its template; see `component_pairs`."""
    found = buffer.weighted_pairs(template.component)
    latest = max((iteration for _, iteration, _ in found), default=0)
    first: dict[str, str] = {}  # groups equal inputs, and calls of the same example
    groups = tuple(first.setdefault(input_key(pair), pair.example) for pair, _, _ in found)
    return PairTexts(
        template.component,
        tuple(template.read(pair.inputs, pair.chosen) for pair, _, _ in found),
        tuple(template.read(pair.inputs, pair.rejected) for pair, _, _ in found),
        groups,
        tuple(pair.gap for pair, _, _ in found),
        tuple(weight * RECENCY ** (latest - iteration) for _, iteration, weight in found),
        tuple(is_held_out(name) for name in groups) if held_out else (),
    )


def is_held_out(name: str) -> bool:
    """Return whether an input is held out, which depends only on its name and so never changes."""
    return bool(generator("held out", name).random() < HELD_OUT)


def fit_rewards(
    buffer: PairBuffer,
    system: System,
    components: Sequence[str],
    backbone: Embedder,
    name: str,
    *,
    weighting: Weighting = "plain",
    trained: bool = False,
    seed: int = 0,
    known: dict[str, LocalReward] | None = None,
) -> FittedRewards:
    """Fit the heads of some components to a buffer (OPTIMAS, section 4.2).

    Args:
        buffer: the draws so far.
        system: the system of the draws.
        components: the components to fit; those without enough pairs are left out, with the reason.
        backbone: the embedding model for the features.
        name: the name of the backbone, for the checkpoint.
        weighting: ``margin`` weights pairs by their gap.
        trained: whether the backbone was trained on these pairs, so that some inputs must be held out.
        seed: seeds the folds.
        known: a cache of fits by the digest of their data; updated in place.
    """
    known = {} if known is None else known
    found: dict[str, LocalReward] = {}
    missing: dict[str, str] = {}
    for component in components:
        texts = component_pairs(buffer, system, component, held_out=trained)
        if not texts.is_sufficient():
            missing[component] = _why(buffer, component, len(set(texts.inputs)))
            continue
        key = digest([asdict(texts), name, getattr(backbone, "adapter", ""), weighting, seed])
        if key not in known:
            template = Template.of(system.components[component])
            features = FeatureMap.of(template, [*texts.chosen, *texts.rejected], backbone.dim)
            fitted, judged = _fit(texts, features, backbone, weighting, seed)
            score = accuracy(fitted.margins, judged)
            inputs = tuple(sorted({name for entry in buffer.of(component) for name in entry.draw.inputs}))
            known[key] = LocalReward(
                features, fitted.head, fitted.slope or 1.0, score, fitted.margins, inputs
            )
        found[component] = known[key]
    return FittedRewards(RewardModel(name, backbone, found, buffer.digest), missing)


def _fit(
    texts: PairTexts, features: FeatureMap, backbone: Embedder, weighting: Weighting, seed: int
) -> tuple[Fit, list[str]]:
    """Return the fit, and the inputs of the pairs it was evaluated on."""
    rows = features.matrix([*texts.chosen, *texts.rejected], backbone)
    n = len(texts.chosen)
    fitted = fit(
        rows[:n], rows[n:], texts.inputs,
        gaps=texts.gaps if weighting == "margin" else None,
        recency=texts.recency, held_out=texts.held_out or None, soft=features.soft, seed=seed,
    )  # fmt: skip
    judged = [g for g, out in zip(texts.inputs, texts.held_out or (True,) * n, strict=True) if out]
    return fitted, judged


def _why(buffer: PairBuffer, component: str, inputs: int) -> str:
    """Return the reason why a component has no reward, with a suggestion."""
    draws = [entry.draw for entry in buffer.of(component)]
    several = [draw for draw in draws if len(draw.candidates) > 1]
    if not draws:
        return "it was never called"
    if not several:
        return "all draws gave the same output; raise its temperature or give it tunable settings"
    if all(len({reward for c in draw.candidates for reward in c.rewards}) == 1 for draw in several):
        return "all its outputs led to the same score: the metric does not depend on them"
    return f"only {inputs} inputs have outputs with significantly different scores; {MIN_INPUTS} are needed"
