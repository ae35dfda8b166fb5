"""Settings of weight training given as flat keyword arguments, and trainers created from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compound.optimization.settings.base import Settings
from compound.optimization.settings.optimize import OptimizeSettings, make_settings
from compound.optimizers.methods import METHODS
from compound.optimizers.weights.learner.losses import ClippedLoss, ImitationLoss
from compound.optimizers.weights.learner.samples import SECTION
from compound.optimizers.weights.learner.trainer import LearnerSpec, Trainer
from compound.optimizers.weights.methods import POLICY_METHODS
from compound.optimizers.weights.recipes.mygo import MyGOSettings
from compound.optimizers.weights.recipes.ppo import PPOSettings
from compound.optimizers.weights.recipes.recipe import TrainingSettings

PARTS = ("optimizer", "rollouts", "evaluation", "critic")


def placed(model: type[TrainingSettings], /, **given: Any) -> dict[str, Any]:
    """Nest settings in their sections by name; ``critic__lr`` names the section explicitly.

    >>> placed(PPOSettings, steps=2, lr=0.1, loss="dapo", clip=0.3, critic__lr=0.2)["loss"]
    {'dapo': {'clip': 0.3}}
    """
    found: dict[str, Any] = {}
    loss = given.pop("loss", None)
    if isinstance(loss, Mapping):
        found["loss"] = loss
    default = "sft" if issubclass(model, MyGOSettings) else "grpo"
    chosen = loss if isinstance(loss, str) else default
    options: dict[str, Any] = {}
    for name, value in given.items():
        part, _, leaf = name.rpartition("__")
        if part:
            found.setdefault(part, {})[leaf] = value
        elif name in model.model_fields:
            found[name] = value
        elif name in (ImitationLoss if chosen.startswith("sft") else ClippedLoss).model_fields:
            options[name] = value
        else:
            where = next(p for p in PARTS if p in model.model_fields and name in _fields(model, p))
            found.setdefault(where, {})[name] = value
    if isinstance(loss, str) or options:
        found["loss"] = {chosen: options}
    return found


def read_by(model: type[TrainingSettings], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a model has."""
    found = {}
    for name, value in given.items():
        part, _, leaf = name.rpartition("__")
        parts = [part] if part else [each for each in PARTS if each in model.model_fields]
        if name in model.model_fields or any(
            each in model.model_fields and leaf in _fields(model, each) for each in parts
        ):
            found[name] = value
    return found


def _fields(model: type[TrainingSettings], part: str) -> Mapping[str, object]:
    kind: type[Settings] = type(model.model_fields[part].get_default())
    return kind.model_fields


def section(method: str, **given: Any) -> dict[str, Any]:
    """Return the settings section of a method; for methods with a training part, of that part."""
    if method in ("optimas", "hbc"):
        return {"training": {"ppo": placed(PPOSettings, **given)}}
    model = METHODS[method].settings
    assert issubclass(model, TrainingSettings)
    return placed(model, **given)


def training(method: str, weights: Mapping[str, Any], **common: Any) -> OptimizeSettings:
    """Return the settings of a run with a method that trains weights."""
    return make_settings({"method": method, method: section(method, **weights), **common})


@dataclass(frozen=True)
class Parts:
    """Flat settings of a trainer."""

    given: Mapping[str, Any]

    @property
    def settings(self) -> PPOSettings | MyGOSettings:
        """Settings in the form of a training method."""
        model = MyGOSettings if str(self.given.get("loss", "")).startswith("sft") else PPOSettings
        return model.model_validate(placed(model, **self.given))

    def but(self, **changed: Any) -> Parts:
        """Return a copy with some settings changed."""
        return plain(**{**self.given, **changed})

    def trainer(
        self, adapters: Any, adapter_of: Mapping[str, str], *, critic: bool = False, **how: Any
    ) -> Trainer:
        """Return a trainer."""
        own = self.settings
        head = own.critic if critic and isinstance(own, PPOSettings) else None
        passed = {name: how.pop(name) for name in ("in_step", "teacher") if name in how}
        spec = LearnerSpec(
            model="",
            shapes=adapters.spaces,
            adapter_of=dict(adapter_of),
            loss=own.loss,
            optimizer=own.optimizer,
            rollouts=own.rollouts,
            critic=head,
            **{"section": SECTION, **how},
        )
        return Trainer(adapters, spec, **passed)


def plain(**given: Any) -> Parts:
    """Return flat settings of a trainer, without importance correction by default."""
    loss = str(given.get("loss", "grpo"))
    if loss.startswith("sft"):
        return Parts({name: value for name, value in given.items() if name != "correction"})
    return Parts({"correction": None, **given})


def trainings(**given: Any) -> dict[str, Any]:
    """Return the settings section of every method that trains weights, each with the settings it has."""
    found: dict[str, Any] = {}
    for name, factory in POLICY_METHODS.items():
        model = factory.settings
        assert issubclass(model, TrainingSettings)
        found[name] = placed(model, **read_by(model, given))
    return found
