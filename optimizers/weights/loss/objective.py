"""Choice of the loss: one of several by name, with its settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from compound.optimizers.weights.loss.losses import (
    CISPOLoss,
    ClippedLoss,
    ImitationLoss,
    PolicyLoss,
    REINFORCELoss,
)
from compound.settings.choices import OneOf, or_name


class PolicyObjective(OneOf):
    """A loss that weights samples by advantages, under the names that TRL uses; `grpo` by default."""

    grpo: ClippedLoss | None = None
    """Clipped loss: the mean over samples of the mean over their tokens."""
    dr_grpo: ClippedLoss | None = None
    """Clipped loss: the sum over tokens divided by the maximum length, averaged over samples."""
    dapo: ClippedLoss | None = None
    """Clipped loss: the mean over all tokens."""
    gspo: ClippedLoss | None = None
    """Like `grpo`, with one probability ratio per sample."""
    cispo: CISPOLoss | None = None
    """A capped ratio weights the gradient."""
    reinforce: REINFORCELoss | None = None
    """The plain policy gradient, without a ratio."""

    REMOVED: ClassVar[Mapping[str, str]] = {
        "bnpo": "dapo", "sapo": "grpo", "vespo": "cispo", "luspo": "gspo",
    }  # fmt: skip

    @property
    def settings(self) -> PolicyLoss:
        """The settings of the selected loss."""
        found: PolicyLoss | None = getattr(self, self.name)
        return ClippedLoss() if found is None else found


class ImitationObjective(OneOf):
    """A loss that imitates samples; `sft` by default."""

    sft: ImitationLoss | None = None
    """Negative log-likelihood: the mean over all tokens."""
    sft_sum: ImitationLoss | None = None
    """Negative log-likelihood: the mean over samples of the sum over tokens, as printed in the MyGO paper."""

    @property
    def settings(self) -> ImitationLoss:
        """The settings of the selected loss."""
        found: ImitationLoss | None = getattr(self, self.name)
        return ImitationLoss() if found is None else found


Objective = PolicyObjective | ImitationObjective
if TYPE_CHECKING:
    PolicyObjectiveField = PolicyObjective
    ImitationObjectiveField = ImitationObjective
else:
    PolicyObjectiveField = or_name(PolicyObjective)
    ImitationObjectiveField = or_name(ImitationObjective)
