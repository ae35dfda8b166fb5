"""The loss of a training: one of several by its name, with its settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compound.optimizers.weights.loss.losses import (
    CISPOLoss,
    ClippedLoss,
    ImitationLoss,
    PolicyLoss,
    REINFORCELoss,
    SAPOLoss,
    VESPOLoss,
)
from compound.settings.choices import OneOf, or_name


class PolicyObjective(OneOf):
    """A loss that weighs samples by advantages, by TRL's names; `grpo` by default."""

    grpo: ClippedLoss | None = None
    """The mean over samples of the mean over their tokens."""
    bnpo: ClippedLoss | None = None
    """The mean over the tokens of the batch."""
    dr_grpo: ClippedLoss | None = None
    """The sum over tokens divided by the largest length, averaged over samples."""
    dapo: ClippedLoss | None = None
    """The mean over all tokens."""
    gspo: ClippedLoss | None = None
    """As `grpo`, with one probability ratio for each sample."""
    luspo: ClippedLoss | None = None
    """The mean over samples of the sum over tokens, with one probability ratio for each sample."""
    cispo: CISPOLoss | None = None
    """A capped ratio weighs the gradient."""
    sapo: SAPOLoss | None = None
    """A soft gate instead of clipping."""
    vespo: VESPOLoss | None = None
    """A smooth weight of the ratio of the whole sample."""
    reinforce: REINFORCELoss | None = None
    """The plain policy gradient, without a ratio."""

    @property
    def settings(self) -> PolicyLoss:
        """The settings of the loss that was chosen."""
        found: PolicyLoss | None = getattr(self, self.name)
        return ClippedLoss() if found is None else found


class ImitationObjective(OneOf):
    """A loss that imitates samples; `sft` by default."""

    sft: ImitationLoss | None = None
    """The mean over all tokens."""
    sft_sum: ImitationLoss | None = None
    """The mean over samples of the sum over tokens, as printed in the paper of MyGO."""

    @property
    def settings(self) -> ImitationLoss:
        """The settings of the loss that was chosen."""
        found: ImitationLoss | None = getattr(self, self.name)
        return ImitationLoss() if found is None else found


Objective = PolicyObjective | ImitationObjective
if TYPE_CHECKING:
    PolicyObjectiveField = PolicyObjective
    ImitationObjectiveField = ImitationObjective
else:
    PolicyObjectiveField = or_name(PolicyObjective)
    ImitationObjectiveField = or_name(ImitationObjective)
