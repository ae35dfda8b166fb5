"""Defaults of learning and using local rewards, as recorded in docs/evidence/papers.md."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from compound.optimizers.weights.recipes.local_draws import LocalTrainingChoice
from compound.optimizers.weights.recipes.ppo import LocalPPOSettings, MAPPOSettings, PPOSettings
from compound.rewards.candidates import Sampling
from compound.rewards.settings import PairSettings


def test_pairs_are_collected_with_the_defaults_of_sampling() -> None:
    assert PairSettings().sampling == Sampling()
    assert Sampling() == Sampling(samples=3, rollouts=2, max_rollouts=4, level=0.1, pairs=6)
    given = PairSettings(samples=5, min_rollouts=3, max_rollouts=6, level=0.05)
    assert given.sampling == Sampling(samples=5, rollouts=3, max_rollouts=6, level=0.05)
    assert PairSettings(min_rollouts=6).sampling.max_rollouts == 6


@pytest.mark.parametrize("level", [0.0, 1.1])
def test_a_level_is_a_probability(level: float) -> None:
    with pytest.raises(ValidationError):
        PairSettings(level=level)
    assert PairSettings(level=1).sampling.level == 1


def test_ppo_by_a_local_reward_stays_near_the_base_model() -> None:
    """It had no KL penalty unless asked for; for rewards of whole runs it has none."""
    for choice in (
        LocalTrainingChoice(),
        LocalTrainingChoice.model_validate({"ppo": {"critic": {"lam": 0.9}, "steps": 3}}),
    ):
        settings = choice.settings
        assert isinstance(settings, LocalPPOSettings)
        assert settings.critic.kl_reward == 0.05
    assert PPOSettings().critic.kl_reward == MAPPOSettings().critic.kl_reward == 0.0
