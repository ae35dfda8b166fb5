"""Losses: hand-computed numbers on two samples of up to three tokens, and TRL's own loss as the oracle."""

from __future__ import annotations

import math
from collections import defaultdict
from math import exp
from types import SimpleNamespace
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
    importance_weights,
    kl,
    per_token_loss,
    sample_weights,
)
from numerics import rounding

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


def means(sums: dict[str, float]) -> dict[str, float]:
    return {name: value / sums["tokens"] for name, value in sums.items() if name != "tokens"}


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


TRL_LOSSES = ["grpo", "dr_grpo", "dapo"]


def tiny_model(
    seed: int, lengths: tuple[int, ...] = (5, 2, 4, 1), vocabulary: int = 7
) -> dict[str, Any]:
    """Logits for every token, and a batch that another policy sampled; fp32."""
    rng = torch.Generator().manual_seed(seed)
    width = max(lengths)
    logits = torch.randn(len(lengths), width, vocabulary, generator=rng)
    tokens = torch.randint(vocabulary, (len(lengths), width), generator=rng)

    def logps(shift: float) -> torch.Tensor:
        moved = logits + shift * torch.randn(logits.shape, generator=rng)
        return moved.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]

    return {
        "logits": logits,
        "tokens": tokens,
        "mask": (torch.arange(width)[None] < torch.tensor(lengths)[:, None]).long(),
        "old": logps(0.6),
        "reference": logps(0.6),
        "advantages": torch.tensor([1.2, -0.7, -1.4, 0.0][: len(lengths)]),
        "ratio": torch.rand(len(lengths), width, generator=rng) + 0.5,
    }


def chosen_logps(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


def by_trl(
    model: dict[str, Any], variant: str, clip: ClippedLoss, beta: float, correct: bool
) -> tuple[torch.Tensor, torch.Tensor, dict[str, list[float]]]:
    """TRL's loss, its gradient with respect to the logits, and what it logs; the model is a table of logits."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    logits = model["logits"].clone().requires_grad_()
    metrics: dict[str, Any] = {"train": defaultdict(list)}
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            chosen_logps(logits, model["tokens"]),
            torch.zeros(model["tokens"].shape),
            None,
        ),
        args=SimpleNamespace(
            delta=None,
            use_bias_correction_kl=False,
            steps_per_generation=1,
        ),
        epsilon_low=1 - clip.bounds[0],
        epsilon_high=clip.bounds[1] - 1,
        loss_type=variant,
        importance_sampling_level="token",
        beta=beta,
        use_vllm=correct,
        vllm_importance_sampling_correction=correct,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        max_completion_length=LONGEST + 5,
        current_gradient_accumulation_steps=1,
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics=metrics,
    )
    empty = torch.zeros(len(logits), 0, dtype=torch.long)
    inputs = {
        "prompt_ids": empty,
        "prompt_mask": empty,
        "completion_ids": model["tokens"],
        "completion_mask": model["mask"],
        "advantages": model["advantages"],
        "old_per_token_logps": model["old"],
        "ref_per_token_logps": model["reference"],
        "num_items_in_batch": model["mask"].sum(),
    }
    if correct:
        inputs["importance_sampling_ratio"] = model["ratio"]
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    return loss.detach(), logits.grad, metrics["train"]


def by_us(
    model: dict[str, Any], variant: str, clip: ClippedLoss, beta: float, correct: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model["logits"].clone().requires_grad_()
    logps = chosen_logps(logits, model["tokens"])
    advantages = model["advantages"]
    if correct:
        sampler = model["old"] - model["ratio"].log()
        advantages = advantages[:, None] * importance_weights(model["old"], sampler, model["mask"])
    losses = per_token_loss(clip, logps, model["old"], advantages, model["mask"])
    losses = losses + beta * kl(logps, model["reference"])
    weights = torch.tensor(sample_weights(variant, model["mask"].sum(-1).tolist(), LONGEST + 5))
    loss = (losses * model["mask"] * weights[:, None]).sum()
    loss.backward()
    return loss.detach(), logits.grad


def agree(
    ours: tuple[torch.Tensor, torch.Tensor], theirs: tuple[torch.Tensor, torch.Tensor, Any]
) -> None:
    assert theirs[1].abs().max() > 1e-3  # there is a gradient to agree on
    # The terms of the loss are of size 1, and cancel; those of its gradient do not.
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=rounding(1.0, depth=8))
    largest = float(theirs[1].abs().max())
    torch.testing.assert_close(ours[1], theirs[1], rtol=0, atol=rounding(largest, depth=8))


TIGHT = ClippedLoss(clip=0.1, clip_high=0.28)


@pytest.mark.parametrize(("clip", "beta"), [(ClippedLoss(), 0.0), (TIGHT, 0.04)])
@pytest.mark.parametrize("variant", TRL_LOSSES)
def test_trl_agrees(variant: str, clip: ClippedLoss, beta: float) -> None:
    for seed in range(2):
        model = tiny_model(seed)
        agree(
            by_us(model, variant, clip, beta, False),
            by_trl(model, variant, clip, beta, False),
        )


@pytest.mark.parametrize("variant", TRL_LOSSES)
def test_weights_folded_into_advantages_are_trls_correction(variant: str) -> None:
    model = tiny_model(5)
    agree(
        by_us(model, variant, TIGHT, 0.04, True),
        by_trl(model, variant, TIGHT, 0.04, True),
    )


def test_trl_counts_the_same_tokens_as_cut() -> None:
    clip, model = ClippedLoss(clip=0.05, clip_high=0.1), tiny_model(7)
    logged = by_trl(model, "dapo", clip, 0.0, False)[2]
    logps = chosen_logps(model["logits"], model["tokens"])
    found = means(diagnose(clip, logps, model["old"], model["advantages"], model["mask"]))
    assert logged["clip_ratio/low_mean"] == [pytest.approx(found["low"])]
    assert logged["clip_ratio/high_mean"] == [pytest.approx(found["high"])]
    assert found["low"] > 0
    assert found["high"] > 0


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
