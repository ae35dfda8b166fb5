"""Losses: hand-computed numbers on two samples of up to three tokens, and TRL's own loss as the oracle."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass
from math import exp, log
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from compound.core.errors import DeclarationError
from compound.optimizers.weights.learner.losses import (
    VARIANTS,
    CISPOLoss,
    ClippedLoss,
    LossSettings,
    importance_weights,
    kl,
    per_token_loss,
    sample_weights,
    value_loss,
)
from compound.optimizers.weights.learner.monitor import SUMS, diagnostic_sums
from numerics import rounding

LONGEST = 4  # a completion could have had


def diagnose(*given: Any, **more: Any) -> dict[str, float]:
    return dict(zip(SUMS, diagnostic_sums(*given, **more).tolist(), strict=True))


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
    settings: LossSettings | None = None,
) -> Any:
    weights = sample_weights(variant, [int(n) for n in mask.sum(-1)], LONGEST)
    losses = per_token_loss(variant, logps, old, advantages, mask, settings)
    return (losses * mask * torch.tensor(weights, dtype=losses.dtype)[:, None]).sum()


# --- hand-computed numbers -----------------------------------------------------------------------------

# by token, clipped to 0.8 … 1.2: good tokens at ratios e^.3 = 1.35 -> 1.2, 1, e^-.4 = .67 (not cut,
# since that is the pessimistic side); bad tokens at e^.5 = 1.65 (not cut) and e^-.5 = .61 -> .8
CLIPPED = [[-1.5 * 1.2, -1.5 * 1.0, -1.5 * exp(-0.4)], [0.5 * exp(0.5), 0.5 * 0.8, 0.0]]
# by sample: mean log ratios (.3 + 0 - .4) / 3 = -1/30 and (.5 - .5) / 2 = 0, neither is cut
SEQUENCE = [[-1.5 * exp(-1 / 30)] * 3, [0.5, 0.5, 0.0]]
# ratios capped at 5: none is; they weigh -A log p
CISPO = [
    [1.5 * exp(0.3) * 1.0, 1.5 * 1.0 * 0.5, 1.5 * exp(-0.4) * 2.0],
    [-0.5 * exp(0.5) * 0.2, -0.5 * exp(-0.5) * 1.5, 0.0],
]
REINFORCE = [[1.5 * 1.0, 1.5 * 0.5, 1.5 * 2.0], [-0.5 * 0.2, -0.5 * 1.5, 0.0]]
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
    "cispo": (CISPO, by_token),
    "gspo": (SEQUENCE, by_sequence),
    "reinforce": (REINFORCE, by_sum),
    "sft": (LIKELIHOOD, by_token),
    "sft_sum": (LIKELIHOOD, by_sum),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_variant_on_two_samples_of_up_to_three_tokens(variant: str) -> None:
    rows, mean = BY_HAND[variant]
    losses = per_token_loss(variant, LOGPS, OLD, ADVANTAGES, MASK)
    torch.testing.assert_close(losses, doubles(rows), rtol=1e-12, atol=0)
    assert total(variant, LOGPS, OLD, ADVANTAGES, MASK).item() == pytest.approx(
        mean(rows), rel=1e-12
    )


def test_the_clipped_numbers_are_what_one_reads_in_a_table() -> None:
    expected = doubles([[-1.8, -1.5, -1.0054800690534591], [0.8243606353500641, 0.4, 0.0]])
    torch.testing.assert_close(per_token_loss("grpo", LOGPS, OLD, ADVANTAGES, MASK), expected)
    assert total("grpo", LOGPS, OLD, ADVANTAGES, MASK).item() == pytest.approx(-0.4114898526713938)


def test_a_higher_upper_bound_lets_good_tokens_go_further() -> None:
    losses = per_token_loss("dapo", LOGPS, OLD, ADVANTAGES, MASK, ClippedLoss(clip_high=0.28))
    assert losses[0, 0].item() == pytest.approx(-1.5 * 1.28)
    assert losses[1, 1].item() == pytest.approx(0.5 * 0.8)


def test_delta_bounds_the_loss_of_bad_tokens() -> None:
    losses = per_token_loss("grpo", LOGPS, OLD, ADVANTAGES, MASK, ClippedLoss(clip_delta=1.5))
    expected = replace_at(CLIPPED, 1, 0, 0.5 * 1.5)  # e^.5 = 1.65 is above
    torch.testing.assert_close(losses, doubles(expected))


def replace_at(rows: list[list[float]], i: int, j: int, value: float) -> list[list[float]]:
    return [
        [value if (i, j) == (a, b) else x for b, x in enumerate(row)] for a, row in enumerate(rows)
    ]


def test_the_cap_of_cispo_weighs_without_cutting_the_gradient() -> None:
    logps = LOGPS.clone().requires_grad_()
    per_token_loss("cispo", logps, OLD, ADVANTAGES, MASK, CISPOLoss(cap=1.1)).sum().backward()
    expected = [[-1.5 * 1.1, -1.5, -1.5 * exp(-0.4)], [0.5 * 1.1, 0.5 * exp(-0.5), 0.0]]
    torch.testing.assert_close(logps.grad, doubles(expected))


def test_tokens_may_have_advantages_of_their_own() -> None:
    advantages = doubles([[1.5, -2.0, 0.0], [0.0, -0.5, 8.0]])
    losses = per_token_loss("grpo", LOGPS, OLD, advantages, MASK)
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


# --- micro-batches -------------------------------------------------------------------------------------


@given(
    st.sampled_from(list(VARIANTS)),
    st.lists(st.integers(0, 4), min_size=1, max_size=6),
    st.lists(st.integers(1, 3), min_size=6, max_size=6),
    st.integers(0, 99),
)
def test_micro_batches_add_up_to_the_batch_however_it_is_split(
    variant: str, lengths: list[int], cuts: list[int], seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    longest = max(1, *lengths)
    logps, old, reference = (
        -torch.rand(len(lengths), longest, generator=rng, dtype=torch.float64) * 3 for _ in range(3)
    )
    advantages = torch.randn(len(lengths), longest, generator=rng, dtype=torch.float64)
    mask = torch.arange(longest)[None] < torch.tensor(lengths)[:, None]
    weights = doubles(sample_weights(variant, lengths, 5))[:, None]

    def loss(part: slice) -> torch.Tensor:
        width = max(1, *lengths[part])  # a micro-batch is padded to its own longest
        at = (part, slice(width))
        losses = per_token_loss(variant, logps[at], old[at], advantages[at], mask[at])
        losses = losses + 0.1 * kl(logps[at], reference[at])
        return (losses * mask[at] * weights[part]).sum()

    edges = [n for n in itertools.accumulate(cuts, initial=0) if n < len(lengths)] + [len(lengths)]
    parts = sum(loss(slice(*edge)) for edge in itertools.pairwise(edges))
    torch.testing.assert_close(parts, loss(slice(0, len(lengths))), rtol=1e-12, atol=1e-12)


def test_weights_are_those_of_the_whole_batch() -> None:
    assert sample_weights("grpo", [2, 4]) == [1 / 4, 1 / 8]
    assert sample_weights("dapo", [2, 4]) == sample_weights("sft", [2, 4]) == [1 / 6, 1 / 6]
    assert sample_weights("dr_grpo", [2, 4], 10) == [1 / 20, 1 / 20]
    assert (
        sample_weights("reinforce", [2, 4]) == sample_weights("sft_sum", [2, 4]) == [1 / 2, 1 / 2]
    )
    assert sample_weights("grpo", [0, 4]) == [1 / 2, 1 / 8]
    assert sample_weights("dapo", [0]) == [1.0]
    assert (
        sample_weights("dapo", [])
        == sample_weights("grpo", [])
        == sample_weights("reinforce", [])
        == []
    )


# --- TRL as the oracle ---------------------------------------------------------------------------------

TRL_LOSSES = ["grpo", "dr_grpo", "dapo", "cispo", "gspo"]  # gspo: grpo with ratios of sequences


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


@dataclass(frozen=True)
class Clip:
    """The constants of all losses, as TRL's arguments hold them."""

    low: float = 0.2
    high: float = 0.2
    delta: float | None = None
    cispo: float = 5.0

    def of(self, variant: str) -> LossSettings:
        """Return the settings of one loss."""
        if variant == "cispo":
            return CISPOLoss(cap=self.cispo)
        return ClippedLoss(clip=self.low, clip_high=self.high, clip_delta=self.delta)


def by_trl(
    model: dict[str, Any], variant: str, clip: Clip, beta: float, correct: bool
) -> tuple[torch.Tensor, torch.Tensor, dict[str, list[float]]]:
    """TRL's loss, its gradient with respect to the logits, and what it logs; the model is a table of logits."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    logits = model["logits"].clone().requires_grad_()
    metrics: dict[str, Any] = {"train": defaultdict(list)}
    loss_type, cispo = "grpo" if variant == "gspo" else variant, variant == "cispo"
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            chosen_logps(logits, model["tokens"]),
            torch.zeros(model["tokens"].shape),
            None,
        ),
        args=SimpleNamespace(
            delta=clip.delta,
            use_bias_correction_kl=False,
            steps_per_generation=1,
        ),
        epsilon_low=clip.low,
        epsilon_high=clip.cispo if cispo else clip.high,
        loss_type=loss_type,
        importance_sampling_level="sequence" if variant == "gspo" else "token",
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
    model: dict[str, Any], variant: str, clip: Clip, beta: float, correct: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model["logits"].clone().requires_grad_()
    logps = chosen_logps(logits, model["tokens"])
    advantages = model["advantages"]
    if correct:
        sampler = model["old"] - model["ratio"].log()
        advantages = advantages[:, None] * importance_weights(model["old"], sampler, model["mask"])
    losses = per_token_loss(
        variant, logps, model["old"], advantages, model["mask"], clip.of(variant)
    )
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


CLIPS = [
    Clip(),
    Clip(low=0.1, high=0.28, delta=1.4, cispo=1.1),
    Clip(cispo=2.0),
]


@pytest.mark.parametrize(
    ("clip", "beta"),
    [(CLIPS[0], 0.0), (CLIPS[1], 0.04), (CLIPS[2], 0.0)],
    ids=["default", "tight", "other"],
)
@pytest.mark.parametrize("variant", TRL_LOSSES)
def test_trl_agrees(variant: str, clip: Clip, beta: float) -> None:
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
        by_us(model, variant, CLIPS[1], 0.04, True),
        by_trl(model, variant, CLIPS[1], 0.04, True),
    )


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "cispo"])
def test_trl_counts_the_same_tokens_as_cut(loss_type: str) -> None:
    clip = Clip(low=0.05, high=0.1, cispo=1.1)
    model = tiny_model(7)
    logged = by_trl(model, loss_type, clip, 0.0, False)[2]
    logps = chosen_logps(model["logits"], model["tokens"])
    given = (model["old"], model["advantages"], model["mask"], clip.of(loss_type))
    found = means(diagnose(loss_type, logps, *given))
    if loss_type == "cispo":
        assert logged["cispo_clip_ratio"] == [pytest.approx(found["high"])]
    else:
        assert logged["clip_ratio/low_mean"] == [pytest.approx(found["low"])]
        assert logged["clip_ratio/high_mean"] == [pytest.approx(found["high"])]
        assert found["low"] > 0
    assert found["high"] > 0


# --- the other parts -----------------------------------------------------------------------------------


def test_the_kl_estimate_by_hand() -> None:
    found = kl(doubles([-1.0, -1.0, -2.0]), doubles([-1.0, -1.5, -1.0]))
    torch.testing.assert_close(found, doubles([0.0, exp(-0.5) + 0.5 - 1, exp(1.0) - 1.0 - 1]))


def test_the_kl_estimate_is_the_divergence_on_average() -> None:
    policy, reference = doubles([0.5, 0.3, 0.2]), doubles([0.2, 0.3, 0.5])
    mean = (policy * kl(policy.log(), reference.log())).sum().item()
    assert mean == pytest.approx(0.5 * log(0.5 / 0.2) + 0.2 * log(0.2 / 0.5))


def test_importance_weights_by_hand() -> None:
    trainer, sampler = doubles([[-1.0, -2.0, -3.0]]), doubles([[-1.2, -1.5, 9.0]])
    mask = doubles([[1, 1, 0]])
    torch.testing.assert_close(
        importance_weights(trainer, sampler, mask), doubles([[exp(0.2), exp(-0.5), 1.0]])
    )
    capped = importance_weights(trainer, sampler, mask, cap=1.1)
    torch.testing.assert_close(capped, doubles([[1.1, exp(-0.5), 1.0]]))


def test_importance_weights_are_capped_at_two_and_have_no_gradient() -> None:
    trainer = doubles([[0.0]]).requires_grad_()
    weights = importance_weights(trainer, doubles([[-1.0]]), doubles([[1]]))
    assert weights.item() == 2.0
    assert not weights.requires_grad


def test_value_loss_by_hand() -> None:
    # |moved| within 0.2: half the squared error; moved further towards the target: the error at the bound
    values, old = doubles([0.5, 1.0, 1.0, -1.0]), doubles([0.4, 0.0, 2.0, 0.0])
    targets = doubles([1.0, 1.0, 0.0, 1.0])
    expected = doubles([0.5 * 0.25, 0.5 * 0.64, 0.5 * 1.8**2, 0.5 * 4.0])
    torch.testing.assert_close(value_loss(values, old, targets), expected)
    torch.testing.assert_close(
        value_loss(values, old, targets, None), doubles([0.125, 0.0, 0.5, 2.0])
    )


def test_diagnostics_by_hand() -> None:
    entropy = doubles([[1.0, 2.0, 3.0], [4.0, 5.0, math.nan]])
    found = diagnose("grpo", LOGPS, OLD, ADVANTAGES, MASK, entropy=entropy)
    ratios = [exp(0.3), 1.0, exp(-0.4), exp(0.5), exp(-0.5)]
    # cut are one good token at e^.3 and one bad token at e^-.5
    assert (found["tokens"], found["low"], found["high"]) == (5, 1, 1)
    assert found["ratio"] == pytest.approx(sum(ratios))
    assert found["kl"] == pytest.approx(sum(ratios) - 5 - (0.3 - 0.4 + 0.5 - 0.5))
    assert found["entropy"] == 15


def test_diagnostics_at_the_level_of_sequences_count_the_tokens_of_cut_samples() -> None:
    old = LOGPS - doubles([[0.9, 0.0, 0.0], [-0.6, 0.0, 0.0]])  # mean log ratios .3 and -.3
    whole = diagnose("gspo", LOGPS, old, ADVANTAGES, MASK)
    assert (whole["low"], whole["high"]) == (2, 3)
    each = diagnose("grpo", LOGPS, old, ADVANTAGES, MASK)
    assert (each["low"], each["high"]) == (1, 1)


def test_diagnostics_of_a_first_step_and_of_likelihood() -> None:
    first = means(diagnose("grpo", LOGPS, None, ADVANTAGES, MASK))
    assert first == {"low": 0, "high": 0, "kl": 0, "ratio": 1, "entropy": 0}
    assert diagnose("sft", LOGPS, OLD, None, MASK)["tokens"] == 5


def test_wrong_names_and_settings_are_refused() -> None:
    with pytest.raises(DeclarationError, match="unknown loss 'dap'; did you mean 'dapo'"):
        per_token_loss("dap", LOGPS, OLD, ADVANTAGES, MASK)
    with pytest.raises(DeclarationError, match="the loss 'dapo' needs advantages"):
        per_token_loss("dapo", LOGPS, OLD, None, MASK)
    with pytest.raises(
        DeclarationError, match="'dr_grpo' divides by the largest length .* longest is None"
    ):
        sample_weights("dr_grpo", [1])
    with pytest.raises(DeclarationError, match="longest is 2"):
        sample_weights("dr_grpo", [3], 2)
    with pytest.raises(ValidationError, match="greater than 0"):
        ClippedLoss(clip=0.0)
    with pytest.raises(ValidationError, match="clip_delta must be above 1 \\+ clip_high = 1.2"):
        ClippedLoss(clip_delta=1.1)
