"""Excerpts of steps: bounded, with the numbers that the trainer used, and without effect on the training."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from compound import LoRA  # noqa: E402
from compound.core.engine import TokenRecord  # noqa: E402
from compound.engines import model_folder, models  # noqa: E402
from compound.optimizers.weights.credit import advantages  # noqa: E402
from compound.optimizers.weights.learner import trainer as trainer_module  # noqa: E402
from compound.optimizers.weights.learner.adapters import Adapters  # noqa: E402
from compound.optimizers.weights.learner.excerpts import (  # noqa: E402
    ANSWERS,
    ENDS,
    GROUPS,
    STEPS,
    TokenTexts,
    choose_groups,
    describe_groups,
)
from compound.optimizers.weights.learner.samples import Sample, SamplingSettings  # noqa: E402
from training_settings import plain  # noqa: E402

SAMPLING = SamplingSettings(max_length=100_000)


class Letters:
    """A tokenizer whose tokens are the bytes of UTF-8."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int], **_: Any) -> str:
        return bytes(tokens).decode(errors="replace")


def sample(
    reward: float, *, component: str = "x", group: str = "e", length: int = 3, prompt: int = 4
) -> Sample:
    tokens = TokenRecord((97,) * prompt, (98,) * length, (-1.0,) * length, "stop")
    return Sample(component, group, component, 0, tokens, reward, (component, group))


def texts() -> TokenTexts:
    tokenizer: Any = Letters()
    return TokenTexts(tokenizer)


@pytest.mark.parametrize("steps", [1, 5, STEPS, STEPS + 1, 1000])
def test_what_is_recorded_of_a_job_is_bounded(steps: int) -> None:
    samples = []
    for n in range(900):
        how = {"component": f"c{n % 9}", "group": str(n % 45), "prompt": 2000 + n % 3}
        made = sample(float(n % 7), length=900, **how)  # type: ignore[arg-type]
        # the first token differs, so that the numbers of all tokens are stored
        samples.append(replace(made, advantages=(1.0, *[0.5] * 899)))
    chosen = [choose_groups(samples, number, steps) for number in range(steps)]
    recorded = [groups for groups in chosen if groups]
    assert len(recorded) <= STEPS + 1
    assert chosen[0]
    assert chosen[-1]
    assert all(len(groups) == GROUPS for groups in recorded)
    seen = {group[0].component for groups in recorded for group in groups}
    assert len(seen) == (9 if steps >= STEPS else min(9, GROUPS + steps - 1))
    found = describe_groups(recorded[0], (), texts(), SAMPLING)
    assert all(len(group["answers"]) == ANSWERS for group in found)
    assert len(found[0]["answers"][0]["tokens"]) == sum(ENDS)
    assert len(json.dumps(found)) * (STEPS + 1) < 4e6


def test_the_group_whose_rewards_differ_most_comes_first_with_its_best_and_worst_answers() -> None:
    flat = [sample(0.5, group="flat") for _ in range(3)]
    wide = [sample(n / 10, group="wide") for n in range(12)]
    other = [sample(n / 20, group="other") for n in range(3)]
    found = choose_groups([*flat, *wide, *other], 0, 1)
    assert [group[0].example for group in found] == ["wide", "flat"]
    assert [round(s.reward * 10) for s in found[0]] == [11, 10, 9, 8, 3, 2, 1, 0]
    assert choose_groups([], 0, 1) == []


@given(st.text(max_size=30))
def test_tokens_are_the_text_whatever_its_characters(text: str) -> None:
    tokens = text.encode(errors="ignore")
    found = texts().of(tokens)
    assert "".join(found) == tokens.decode()
    assert len(found) == len(tokens)


def test_invalid_bytes_and_tokens_of_a_real_vocabulary_have_texts(smollm2: str) -> None:
    assert len(texts().of([0xFF, 0xE2, 0x82, 0xFF, 97])) == 5
    found = TokenTexts(model_folder.load_tokenizer(models.resolve(smollm2)))
    tokens = found._tokenizer.encode(" Ünï 日本 😀\n")
    assert "".join(found.of(tokens)) == " Ünï 日本 😀\n"


@settings(max_examples=30)
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=3, max_size=3))
def test_numbers_that_json_lacks_are_left_out(numbers: list[float]) -> None:
    answer = replace(sample(1.0), advantages=tuple(numbers))
    found = describe_groups([[answer]], [(numbers, numbers)], texts(), SAMPLING)
    json.dumps(found, allow_nan=False)


def test_answers_that_were_left_out_take_no_numbers_of_others() -> None:
    long, short = sample(1.0, length=50), sample(0.0)
    group = [long.with_advantage(1.0), short.with_advantage(-1.0)]
    few = SamplingSettings(max_length=20)
    (found,) = describe_groups([group], [([0.0] * 3, [0.0] * 3)], texts(), few, (0.8, 1.2))
    first, second = found["answers"]
    assert (first["left_out"], "ratios" in first) == (True, False)
    assert second["ratios"] == pytest.approx([2.72] * 3)  # e, from -1 to 0


def trained(toy_model: Path) -> tuple[dict[str, Any], str, list[Sample]]:
    adapters = Adapters(str(toy_model), {"x": LoRA(rank=4)}, dtype="float32")
    rows = [
        Sample("x", f"e{g}", "x", 0, TokenRecord((1, 2, g), (n, n + 1), (-1.0, -2.0), "stop"), n, (g,), n)
        for g in range(2)
        for n in range(4)
    ]  # fmt: skip
    samples, _ = advantages(rows, "trl")
    trainer = plain(lr=0.05, epochs=3).trainer(adapters, {"x": "x"})
    facts = trainer.step(samples, 0)
    return facts, str(adapters._serialized("x")), samples


def test_ratios_and_clipped_tokens_are_those_of_the_last_update(toy_model: Path) -> None:
    facts, _, samples = trained(toy_model)
    groups = choose_groups(samples, 0, 1)
    found = describe_groups(groups, facts["shown_logps"], texts(), SAMPLING, (0.8, 1.2))
    moved = 0
    shown = [(s, a) for g, d in zip(groups, found, strict=True) for s, a in zip(g, d["answers"], strict=True)]  # fmt: skip
    for (each, answer), (new, old) in zip(shown, facts["shown_logps"], strict=True):
        for place, ratio in enumerate(answer["ratios"]):
            assert ratio == pytest.approx(
                math.exp(new[place] - each.tokens.logprobs[place]), rel=0.01
            )
            change = math.exp(new[place] - old[place])
            moved += change != 1.0
            clipped = change > 1.2 if each.advantages[0] > 0 else change < 0.8
            assert (place in answer.get("clipped", ())) == clipped
    assert moved


def test_recording_changes_no_weight(toy_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts, weights, _ = trained(toy_model)
    monkeypatch.setattr(trainer_module, "choose_groups", lambda *_: [])
    without, same, _ = trained(toy_model)
    assert weights == same
    for name in ("shown_logps", "train_seconds"):
        facts.pop(name)
        without.pop(name, None)
    assert facts == without
