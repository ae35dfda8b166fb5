"""Choice of the loss: one of several by name, with its settings."""

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
    """A loss that weights samples by advantages, under the names that TRL uses; `grpo` by default."""

    grpo: ClippedLoss | None = None
    """Clipped loss: the mean over samples of the mean over their tokens."""
    bnpo: ClippedLoss | None = None
    """Clipped loss: the mean over the tokens of the batch."""
    dr_grpo: ClippedLoss | None = None
    """Clipped loss: the sum over tokens divided by the maximum length, averaged over samples."""
    dapo: ClippedLoss | None = None
    """Clipped loss: the mean over all tokens."""
    gspo: ClippedLoss | None = None
    """Like `grpo`, with one probability ratio per sample."""
    luspo: ClippedLoss | None = None
    """Clipped loss: the mean over samples of the sum over tokens, with one probability ratio per sample."""
    cispo: CISPOLoss | None = None
    """A capped ratio weights the gradient."""
    sapo: SAPOLoss | None = None
    """A soft gate on the ratio instead of clipping."""
    vespo: VESPOLoss | None = None
    """A smooth weight computed from the ratio of the whole sample."""
    reinforce: REINFORCELoss | None = None
    """The plain policy gradient, without a ratio."""

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
