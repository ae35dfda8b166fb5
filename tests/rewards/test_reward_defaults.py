"""Defaults of learning and using local rewards, as recorded in docs/evidence/papers.md."""

from __future__ import annotations

from compound.optimizers.weights.recipes.local_draws import LocalTrainingChoice
from compound.optimizers.weights.recipes.ppo import LocalPPOSettings, MAPPOSettings, PPOSettings


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
