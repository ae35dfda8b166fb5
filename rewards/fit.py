"""Fit a reward model to a pair buffer: heads on fixed features, or on a LoRA-trained backbone.

Every component's head is fitted anew to the whole buffer, older pairs weighing less: what one component
learns online never makes another forget. A trained backbone goes on from its last weights, on batches that
mix all components (`compound.rewards.backbone_training`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from compound.execution.rng import generator
from compound.graph.configuration import digest
from compound.graph.system import System
from compound.rewards.alignment import accuracy
from compound.rewards.buffer import PairBuffer, input_key
from compound.rewards.features import Embeds, FeatureMap
from compound.rewards.heads import LEAST_INPUTS, Fit, fit
from compound.rewards.model import LocalReward, RewardModel
from compound.rewards.template import Reading, Template

RECENCY = 0.8  # the weight of a pair, for each iteration since
HELD_OUT = 0.25  # of the inputs, where the backbone is trained too

Weighting = Literal["plain", "margin"]


@dataclass(frozen=True)
class PairTexts:
    """The pairs of one component as the model reads them, in buffer order."""

    component: str
    chosen: tuple[Reading, ...]
    rejected: tuple[Reading, ...]
    inputs: tuple[str, ...]
    gaps: tuple[float, ...]
    recency: tuple[float, ...]
    apart: tuple[bool, ...] = ()

    def enough(self) -> bool:
        """Return whether a reward can be fitted to these, and judged."""
        judged = self.apart or (True,) * len(self.inputs)
        seen = {
            n
            for n, out in zip(self.inputs, self.apart or (False,) * len(self.inputs), strict=True)
            if not out
        }
        return len(seen) >= LEAST_INPUTS and any(judged)


@dataclass
class Learned:
    """A reward model, and why some components have no reward."""

    model: RewardModel
    missing: dict[str, str] = field(default_factory=dict)


def texts_of(buffer: PairBuffer, system: System, component: str, *, held_out: bool = False) -> PairTexts:
    """Return a component's pairs as read by its template.

    Args:
        buffer: holds the draws.
        system: holds the component.
        component: its name.
        held_out: set `HELD_OUT` of the inputs apart, the same ones every time.
    """
    return read_pairs(buffer, Template.of(system.components[component]), held_out=held_out)


def read_pairs(buffer: PairBuffer, template: Template, *, held_out: bool = False) -> PairTexts:
    """Return a component's pairs as its template reads them; see `texts_of`."""
    found = buffer.pairs(template.component)
    latest = max((iteration for _, iteration in found), default=0)
    first: dict[str, str] = {}  # equal inputs belong together, and so do the calls of one example
    groups = tuple(first.setdefault(input_key(pair), pair.example) for pair, _ in found)
    return PairTexts(
        template.component,
        tuple(template.read(pair.inputs, pair.chosen) for pair, _ in found),
        tuple(template.read(pair.inputs, pair.rejected) for pair, _ in found),
        groups,
        tuple(pair.gap for pair, _ in found),
        tuple(RECENCY ** (latest - iteration) for _, iteration in found),
        tuple(is_apart(name) for name in groups) if held_out else (),
    )


def is_apart(name: str) -> bool:
    """Return whether an input is held out: a property of its name, so that it never changes sides."""
    return bool(generator("held out", name).random() < HELD_OUT)


def learn(
    buffer: PairBuffer,
    system: System,
    components: Sequence[str],
    backbone: Embeds,
    name: str,
    *,
    weighting: Weighting = "plain",
    trained: bool = False,
    seed: int = 0,
    known: dict[str, LocalReward] | None = None,
) -> Learned:
    """Fit the heads of some components to a buffer (OPTIMAS, section 4.2).

    Args:
        buffer: the draws so far.
        system: the one they belong to.
        components: which to fit; those without enough pairs are left out, with the reason.
        backbone: gives the features.
        name: the backbone's, for the checkpoint.
        weighting: ``margin`` weighs pairs by their gap.
        trained: whether the backbone was trained on these pairs: then some inputs are held out throughout.
        seed: names the folds.
        known: fits by what they were made from; looked up and added to.
    """
    known = {} if known is None else known
    found: dict[str, LocalReward] = {}
    missing: dict[str, str] = {}
    for component in components:
        texts = texts_of(buffer, system, component, held_out=trained)
        if not texts.enough():
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
    return Learned(RewardModel(name, backbone, found, buffer.digest), missing)


def _fit(
    texts: PairTexts, features: FeatureMap, backbone: Embeds, weighting: Weighting, seed: int
) -> tuple[Fit, list[str]]:
    """Return the fit, and the inputs of the pairs it was judged on."""
    rows = features.matrix([*texts.chosen, *texts.rejected], backbone)
    n = len(texts.chosen)
    fitted = fit(
        rows[:n], rows[n:], texts.inputs,
        gaps=texts.gaps if weighting == "margin" else None,
        recency=texts.recency, held_out=texts.apart or None, soft=features.soft, seed=seed,
    )  # fmt: skip
    judged = [g for g, out in zip(texts.inputs, texts.apart or (True,) * n, strict=True) if out]
    return fitted, judged


def _why(buffer: PairBuffer, component: str, inputs: int) -> str:
    """Return why a component has no reward, in words that say what to change."""
    draws = [entry.draw for entry in buffer.of(component)]
    several = [draw for draw in draws if len(draw.candidates) > 1]
    if not draws:
        return "it was never called"
    if not several:
        return "every draw gave the same output: nothing to prefer; raise its temperature or give it settings"
    if all(len({reward for c in draw.candidates for reward in c.rewards}) == 1 for draw in several):
        return "all its outputs led to the same score: the metric does not depend on them"
    return (
        f"only {inputs} inputs have outputs that surely lead to different scores; {LEAST_INPUTS} are needed"
    )


def held_out_rewards(
    learned: RewardModel, buffer: PairBuffer, component: str
) -> tuple[list[NDArray[np.float64]], list[list[float]]]:
    """Return local and global rewards of each draw with several candidates, for correlations and figures."""
    draws = [e.draw for e in buffer.of(component) if len(e.draw.candidates) > 1]
    calls = [(draw.inputs, c.outputs) for draw in draws for c in draw.candidates]
    values = learned.rewards(component, calls) if calls else np.zeros(0)
    ends = np.cumsum([len(draw.candidates) for draw in draws])[:-1]
    return list(np.split(values, ends)), [[c.value for c in draw.candidates] for draw in draws]
