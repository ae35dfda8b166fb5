"""Fit a reward model to a pair buffer: heads on fixed features, or on a LoRA-trained backbone.

Every component's head is refitted to the whole buffer, with lower weights for older pairs, so that
updates of one component cannot make another one forget. A trained backbone continues from its last
weights, on batches that mix all components (`compound.rewards.backbone_training`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from compound.execution.rng import generator
from compound.graph.configuration import digest
from compound.graph.system import System
from compound.rewards.alignment import accuracy, evidence
from compound.rewards.buffer import PairBuffer, input_key
from compound.rewards.features import Embedder, FeatureMap, Reading, Template
from compound.rewards.heads import MIN_INPUTS, Role, fit
from compound.rewards.model import LocalReward, RewardModel

RECENCY = 0.8  # decay of a pair's weight per iteration
# If the backbone is trained: shares of the inputs that evaluate it, and that choose its weights
HELD_OUT, TUNED = 0.25, 0.25


@dataclass(frozen=True)
class PairTexts:
    """Pairs of a component in the form that the model reads, in buffer order.

    If the backbone is trained, each pair has a role: to train it and fit the head, to choose when
    to stop and the regularization, or to evaluate both.
    """

    component: str
    chosen: tuple[Reading, ...]
    rejected: tuple[Reading, ...]
    inputs: tuple[str, ...]
    recency: tuple[float, ...]
    roles: tuple[Role, ...] = ()

    def is_sufficient(self) -> bool:
        """Return whether there are enough pairs to fit and to evaluate a reward."""
        if not self.roles:
            return len(set(self.inputs)) >= MIN_INPUTS
        seen = {name for name, role in zip(self.inputs, self.roles, strict=True) if role == "fit"}
        return len(seen) >= MIN_INPUTS and {"tune", "judge"} <= set(self.roles)

    @property
    def is_judged(self) -> tuple[bool, ...]:
        """Whether each pair is evaluated: all, unless the backbone was trained on some."""
        return tuple(role == "judge" for role in self.roles) or (True,) * len(self.inputs)


@dataclass
class FittedRewards:
    """A reward model, and the reasons why some components have no reward."""

    model: RewardModel
    missing: dict[str, str] = field(default_factory=dict)


def component_pairs(buffer: PairBuffer, template: Template, *, held_out: bool = False) -> PairTexts:
    """Return a component's pairs as rendered by its template.

    Args:
        buffer: the draws.
        template: the template of the component.
        held_out: whether to hold out inputs, the same ones every time: the share `TUNED` to choose
            the training of the backbone, and the share `HELD_OUT` to evaluate it.
    """
    found = buffer.weighted_pairs(template.component)
    latest = max((iteration for _, iteration, _ in found), default=0)
    first: dict[str, str] = {}  # groups equal inputs, and calls of the same example
    groups = tuple(first.setdefault(input_key(pair), pair.example) for pair, _, _ in found)
    return PairTexts(
        template.component,
        tuple(template.read(pair.inputs, pair.chosen) for pair, _, _ in found),
        tuple(template.read(pair.inputs, pair.rejected) for pair, _, _ in found),
        groups,
        tuple(weight * RECENCY ** (latest - iteration) for _, iteration, weight in found),
        tuple(role_of(name) for name in groups) if held_out else (),
    )


def role_of(name: str) -> Role:
    """Return the use of an input's pairs, which depends only on its name and so never changes."""
    drawn = generator("held out", name).random()
    return "judge" if drawn < HELD_OUT else "tune" if drawn < HELD_OUT + TUNED else "fit"


def fit_rewards(
    buffer: PairBuffer,
    system: System,
    components: Sequence[str],
    backbone: Embedder,
    name: str,
    *,
    trained: bool = False,
    tested: bool = False,
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
        trained: whether the backbone was trained on these pairs, so that some inputs must be held
            out.
        tested: whether to test that each reward is better than chance (`LocalReward.evidence`).
        seed: seeds the folds.
        known: a cache of fits by the digest of their data; updated in place.
    """
    known = {} if known is None else known
    found: dict[str, LocalReward] = {}
    missing: dict[str, str] = {}
    for component in components:
        template = Template.of(system.components[component])
        texts = component_pairs(buffer, template, held_out=trained)
        if not texts.is_sufficient():
            missing[component] = _why(buffer, component, len(set(texts.inputs)))
            continue
        key = digest([asdict(texts), name, backbone.adapter, seed, tested])
        if key not in known:
            features = FeatureMap.of(template, [*texts.chosen, *texts.rejected], backbone.dim)
            rows, n = features.matrix([*texts.chosen, *texts.rejected], backbone), len(texts.chosen)
            fitted = fit(
                rows[:n],
                rows[n:],
                texts.inputs,
                recency=texts.recency,
                roles=texts.roles or None,
                soft=features.soft,
                tested=tested,
                seed=seed,
            )
            judged = [name for name, out in zip(texts.inputs, texts.is_judged, strict=True) if out]
            inputs = tuple(
                sorted({name for entry in buffer.of(component) for name in entry.draw.inputs})
            )
            known[key] = LocalReward(
                features,
                fitted.head,
                fitted.slope or 1.0,
                accuracy(fitted.margins, judged),
                fitted.margins,
                inputs,
                evidence(fitted.forward, judged) if tested else None,
            )
        found[component] = known[key]
    return FittedRewards(RewardModel(name, backbone, found, buffer.digest), missing)


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
