"""Losses: hand-computed numbers on two samples of up to three tokens. In test_trainer, TRL is the oracle."""

from __future__ import annotations

import math
from math import exp
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from compound.core.errors import DeclarationError
from compound.optimizers.weights.learner.losses import (
    SUMS,
    ClippedLoss,
    ImitationLoss,
    diagnostic_sums,
    kl,
    per_token_loss,
    sample_weights,
)

LONGEST = 4  # a completion could have had
Loss = ClippedLoss | ImitationLoss
VARIANTS = ("grpo", "dr_grpo", "dapo", "sft", "sft_sum")


def defaults(variant: str) -> Loss:
    return ImitationLoss() if variant.startswith("sft") else ClippedLoss()


def diagnose(settings: Loss, logps: Any, old: Any, advantages: Any, mask: Any) -> dict[str, float]:
    rows = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
    entropies = -logps.masked_fill(mask == 0, math.nan)
    found = diagnostic_sums(settings, logps, old, rows, mask, entropies)
    return dict(zip(SUMS, found.tolist(), strict=True))


def doubles(rows: Any) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


# two samples, of three tokens and of two; the log ratios are .3, 0, -.4 and .5, -.5
LOGPS = doubles([[-1.0, -0.5, -2.0], [-0.2, -1.5, -7.0]])
OLD = doubles([[-1.3, -0.5, -1.6], [-0.7, -1.0, -99.0]])
MASK = doubles([[1, 1, 1], [1, 1, 0]])
ADVANTAGES = doubles([1.5, -0.5])


def total(
    variant: str,
    logps: Any,
    old: Any,
    advantages: Any,
    mask: Any,
    settings: Loss | None = None,
) -> Any:
    weights = sample_weights(variant, [int(n) for n in mask.sum(-1)], LONGEST)
    losses = per_token_loss(settings or defaults(variant), logps, old, advantages, mask)
    return (losses * mask * torch.tensor(weights, dtype=losses.dtype)[:, None]).sum()


# by token, clipped to 0.8 … 1.2: good tokens at ratios e^.3 = 1.35 -> 1.2, 1, e^-.4 = .67 (not cut,
# since that is the pessimistic side); bad tokens at e^.5 = 1.65 (not cut) and e^-.5 = .61 -> .8
CLIPPED = [[-1.5 * 1.2, -1.5 * 1.0, -1.5 * exp(-0.4)], [0.5 * exp(0.5), 0.5 * 0.8, 0.0]]
LIKELIHOOD = [[1.0, 0.5, 2.0], [0.2, 1.5, 0.0]]


def by_sequence(rows: list[list[float]]) -> float:
    return (sum(rows[0]) / 3 + sum(rows[1]) / 2) / 2


def by_token(rows: list[list[float]]) -> float:
    return (sum(rows[0]) + sum(rows[1])) / 5


def by_longest(rows: list[list[float]]) -> float:
    return (sum(rows[0]) + sum(rows[1])) / (2 * 4)


def by_sum(rows: list[list[float]]) -> float:
    return (sum(rows[0]) + sum(rows[1])) / 2


BY_HAND = {
    "grpo": (CLIPPED, by_sequence),
    "dr_grpo": (CLIPPED, by_longest),
    "dapo": (CLIPPED, by_token),
    "sft": (LIKELIHOOD, by_token),
    "sft_sum": (LIKELIHOOD, by_sum),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_variant_on_two_samples_of_up_to_three_tokens(variant: str) -> None:
    rows, mean = BY_HAND[variant]
    losses = per_token_loss(defaults(variant), LOGPS, OLD, ADVANTAGES, MASK)
    torch.testing.assert_close(losses, doubles(rows), rtol=1e-12, atol=0)
    assert total(variant, LOGPS, OLD, ADVANTAGES, MASK).item() == pytest.approx(
        mean(rows), rel=1e-12
    )


def test_tokens_may_have_advantages_of_their_own() -> None:
    advantages = doubles([[1.5, -2.0, 0.0], [0.0, -0.5, 8.0]])
    losses = per_token_loss(ClippedLoss(), LOGPS, OLD, advantages, MASK)
    torch.testing.assert_close(losses, doubles([[-1.8, 2.0, 0.0], [0.0, 0.4, 0.0]]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_first_step_is_the_policy_gradient(variant: str) -> None:
    logps = LOGPS.clone().requires_grad_()
    total(variant, logps, None, ADVANTAGES, MASK).backward()
    weights = doubles(sample_weights(variant, [3, 2], LONGEST))[:, None]
    advantages = doubles([[1.0], [1.0]]) if variant.startswith("sft") else ADVANTAGES[:, None]
    torch.testing.assert_close(logps.grad, -advantages * weights * MASK)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30])
def test_what_stands_in_the_padding_never_matters(variant: str, junk: float) -> None:
    padding = MASK == 0
    wide = ADVANTAGES[:, None].expand(2, 3)
    clean = LOGPS.clone().requires_grad_()
    expected = total(variant, clean, OLD, wide, MASK)
    expected.backward()
    dirty = LOGPS.masked_fill(padding, junk).requires_grad_()
    found = total(
        variant,
        dirty,
        OLD.masked_fill(padding, -junk),
        wide.masked_fill(padding, junk),
        MASK,
    )
    found.backward()
    assert found.item() == expected.item()
    torch.testing.assert_close(dirty.grad, clean.grad, rtol=0, atol=0)
    assert kl(dirty, OLD.masked_fill(padding, -junk), MASK)[1, 2] == 0


def test_diagnostics_by_hand() -> None:
    found = diagnose(ClippedLoss(), LOGPS, OLD, ADVANTAGES, MASK)
    ratios = [exp(0.3), 1.0, exp(-0.4), exp(0.5), exp(-0.5)]
    # cut are one good token at e^.3 and one bad token at e^-.5
    assert (found["tokens"], found["low"], found["high"]) == (5, 1, 1)
    assert found["ratio"] == pytest.approx(sum(ratios))
    assert found["kl"] == pytest.approx(sum(ratios) - 5 - (0.3 - 0.4 + 0.5 - 0.5))
    assert found["entropy"] == pytest.approx(1.0 + 0.5 + 2.0 + 0.2 + 1.5)
    imitated = diagnose(ImitationLoss(), LOGPS, OLD, torch.ones(2), MASK)
    assert (imitated["tokens"], imitated["low"], imitated["high"]) == (5, 0, 0)


def test_wrong_lengths_and_settings_are_refused() -> None:
    for lengths, longest in (([1], None), ([3], 2)):
        with pytest.raises(
            DeclarationError, match=f"'dr_grpo' divides by the largest .* longest is {longest}"
        ):
            sample_weights("dr_grpo", lengths, longest)
    with pytest.raises(ValidationError, match="greater than 0"):
        ClippedLoss(clip=0.0)
