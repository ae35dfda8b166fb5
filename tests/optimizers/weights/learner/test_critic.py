"""The critic of PPO: a probe of the policy's states, which does not train the policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from numerics import GRADIENTS, LOGPROBS
from training_settings import plain
from trainings.learners import catch_gradients, drawn, noised

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("one_thread")
pytest.importorskip("peft")

from compound.optimizers.weights.credit import gae  # noqa: E402
from compound.optimizers.weights.learner.adapters import Adapters  # noqa: E402
from compound.optimizers.weights.learner.samples import Sample  # noqa: E402
from compound.optimizers.weights.learner.trainer import Trainer  # noqa: E402


def some(components: Sequence[str] = ("x",)) -> list[Sample]:
    return drawn(components, groups=2, longest=4)


def trainer_of(adapters: Adapters, *names: str, **given: Any) -> Trainer:
    settings = plain(lr=0.01, critic__lr=0.05, **given)
    trainer = settings.trainer(adapters, {name: name for name in names}, critic=True)
    assert trainer.critic
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(2)
        trainer.critic.head[1].weight.normal_(std=0.3)
    return trainer


def valued(trainer: Trainer, samples: Sequence[Sample]) -> list[Sample]:
    """Return samples with values, and with advantages and returns by GAE."""
    found = []
    for sample in trainer.values([replace(s, on_policy=False) for s in samples]):
        gains, returns = gae(sample.values, sample.reward, lam=0.9)
        found.append(replace(sample, advantages=tuple(gains), returns=tuple(returns)))
    return found


@pytest.fixture
def caught(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return catch_gradients(monkeypatch)


def reference(adapters: Adapters, trainer: Trainer, sample: Sample) -> Any:
    """Return the value before each token, by peft's model on the whole sequence, one sample at a time."""
    assert trainer.critic
    ids = torch.tensor([[*sample.tokens.prompt, *sample.tokens.sampled]])
    with torch.no_grad(), adapters.using(sample.component):
        states = adapters.model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0]
    first = len(sample.tokens.prompt) - 1
    norm, linear = trainer.critic.head
    return linear(norm(states[first : first + sample.length]))[:, 0]


def test_values_are_those_of_the_states_of_the_policy(toy_model: Path) -> None:
    adapters = noised(toy_model, "x", "y")
    trainer = trainer_of(adapters, "x", "y")
    for sample in trainer.values(some(components=("x", "y"))):
        with torch.no_grad():
            expected = reference(adapters, trainer, sample).tolist()
        assert sample.values == pytest.approx(expected, abs=LOGPROBS)


@pytest.mark.parametrize("clip", [0.2, None])
def test_the_gradient_is_that_of_the_clipped_squared_error(
    toy_model: Path, caught: dict[str, Any], clip: float | None
) -> None:
    """The loss is written out here as in TRL's PPO: half the larger of two squared errors, by token."""
    adapters = noised(toy_model, "x")
    trainer = trainer_of(adapters, "x", critic__clip=clip)
    samples = valued(trainer, some())
    # returns far from the values, and values that moved since: some are clipped, and some are not
    samples = [
        replace(s, values=tuple(v + 0.3 * (-1) ** n for n, v in enumerate(s.values)))
        for s in samples
    ]
    trainer.step(samples, 0)
    loss = torch.zeros(())
    for sample in samples:  # `grpo`: the mean over samples of the mean over their tokens
        now = reference(adapters, trainer, sample)
        old, wanted = torch.tensor(sample.values), torch.tensor(sample.returns)
        error = (now - wanted) ** 2
        if clip is not None:
            bounded = torch.clamp(now, old - clip, old + clip)
            error = torch.maximum(error, (bounded - wanted) ** 2)
        loss = loss + 0.5 * error.mean() / len(samples)
    assert trainer.critic
    own = [(f"the value head {name}", t) for name, t in trainer.critic.head.named_parameters()]
    expected = torch.autograd.grad(loss, [tensor for _, tensor in own])
    most = max(float(gradient.abs().max()) for gradient in expected)
    assert most > 0
    for (name, _), gradient in zip(own, expected, strict=True):
        assert float((caught[name] - gradient).abs().max()) < GRADIENTS * most, name


def none_or_zero(gradients: dict[str, Any], owner: str) -> bool:
    own = [gradient for name, gradient in gradients.items() if name.startswith(owner)]
    assert own
    return all(gradient is None or not bool(gradient.any()) for gradient in own)


def test_values_and_policy_do_not_train_each_other(toy_model: Path, caught: dict[str, Any]) -> None:
    trainer = trainer_of(noised(toy_model, "x", "y"), "x", "y")
    samples = valued(trainer, some(components=("x", "y")))
    flat = [replace(s, advantages=(0.0,) * s.length) for s in samples]
    trainer.step(flat, 0)  # only values to learn
    assert none_or_zero(caught, "adapter 'x'")
    assert none_or_zero(caught, "adapter 'y'")
    assert not none_or_zero(caught, "the value head")
    caught.clear()
    trainer.step([replace(s, returns=s.values) for s in samples], 0)  # values that are right
    assert not none_or_zero(caught, "adapter 'x'")
    assert not none_or_zero(caught, "adapter 'y'")
    largest = max(
        float(g.abs().max()) for name, g in caught.items() if name.startswith("adapter 'x'")
    )
    for name, gradient in caught.items():
        assert name.startswith("adapter") or float(gradient.abs().max()) < 1e-5 * largest
