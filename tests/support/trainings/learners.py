"""Declarations, samples, adapters and comparisons for tests of learners."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from compound.core.engine import TokenRecord
from compound.engines.local.devices import Placement
from compound.graph.space import LoRA, Weights
from compound.optimizers.weights.credit import advantages
from compound.optimizers.weights.learner import trainer, updates
from compound.optimizers.weights.learner.adapters import Adapters
from compound.optimizers.weights.learner.samples import Sample
from compound.optimizers.weights.learner.trainer import LearnerSpec, Saved
from compound.optimizers.weights.learner.updates import Updater
from compound.optimizers.weights.recipes.ppo import PPOSettings
from training_settings import plain


def declared(
    model: Path, names: Sequence[str] = ("x", "y"), *, critic: bool = False, **given: Any
) -> LearnerSpec:
    """Return the declaration of a learner with one adapter for each component; settings as in `plain`."""
    own = plain(**{"lr": 0.01, **given}).settings
    return LearnerSpec(
        model=str(model),
        shapes={name: Weights(rank=4, alpha=8, targets="all-linear") for name in names},
        adapter_of={name: name for name in names},
        loss=own.loss,
        optimizer=own.optimizer,
        rollouts=own.rollouts,
        critic=own.critic if critic and isinstance(own, PPOSettings) else None,
        steps=4,
        longest=8,
        section="optimize.ppo",
        placement=Placement("cpu", "float32"),
    )


def drawn(
    names: Sequence[str] = ("x", "y"),
    *,
    groups: int = 8,
    each: int = 4,
    prompt: int = 5,
    longest: int = 6,
    seed: int = 0,
    on_policy: bool = False,
) -> list[Sample]:
    """Return samples of random tokens with advantages; off-policy ones, of which no version is checked."""
    rng, found = random.Random(seed), []
    for name in names:
        for group in range(groups):
            tokens = tuple(rng.randrange(24) for _ in range(prompt + group % 4))
            for rollout in range(each):
                sampled = tuple(rng.randrange(24) for _ in range(1 + rng.randrange(longest)))
                record = TokenRecord(tokens, sampled, (-1.0,) * len(sampled), "stop")
                found.append(
                    Sample(
                        name,
                        f"e{group}",
                        name,
                        0,
                        record,
                        rng.random(),
                        (name, group),
                        rollout,
                        on_policy=on_policy,
                        returns=(0.7,) * len(sampled),
                    )
                )
    return advantages(found, "trl")[0]


def noised(model: Path, *names: str, noise: float = 0.2, rank: int = 4) -> Adapters:
    """Return adapters of random weights for a model in float32."""
    adapters = Adapters(str(model), {name: LoRA(rank=rank) for name in names}, dtype="float32")
    randomize(adapters, noise)
    return adapters


def randomize(adapters: Adapters, noise: float = 0.2) -> None:
    """Set the weights of adapters at random."""
    import torch

    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        for name in adapters.spaces:
            for _, tensor in adapters.parameters(name):
                tensor.normal_(std=noise)


def catch_gradients(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the gradients of the last update by owner and name, from now on; updates are not made."""
    found: dict[str, Any] = {}

    class Caught(Updater):
        def update(self, step: int) -> float:
            self.reduce()
            for name, tensor in self.parameters:
                if tensor.grad is not None:
                    found[f"{self.whose} {name}"] = tensor.grad.clone()
                tensor.grad = None
            return 0.0

    for module in (trainer, updates):
        monkeypatch.setattr(module, "Updater", Caught)
    return found


def weights_of(saved: Saved, folder: Path) -> dict[str, Any]:
    """Return the tensors of all adapters of a checkpoint."""
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    for name, reference in saved.adapters.items():
        if reference is not None:
            tensors = load_file(folder / reference["path"] / "adapter_model.safetensors")
            found |= {f"{name}.{key}": tensor for key, tensor in tensors.items()}
    return found


def difference(ours: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    """Return the largest difference of two sets of tensors, relative to the largest number of each tensor."""
    assert ours.keys() == expected.keys()
    found = [
        float((ours[name] - tensor).abs().max() / tensor.abs().max().clamp(min=1e-30))
        for name, tensor in expected.items()
    ]
    return max(found, default=0.0)
