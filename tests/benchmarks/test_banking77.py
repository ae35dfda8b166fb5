"""The Banking77 system: its file, its labels, label parsing, and whole runs with a scripted model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmark_systems import BENCHMARKS, evaluated, needs_data
from benchmarks.banking77 import labels, main, read_label
from compound.core.errors import DataError
from compound.testing import ScriptedLM
from compound.yaml import load
from compound.yaml.program import Program

LABELS = [
    "card_arrival",
    "card_linking",
    "card_payment_fee_charged",
    "Refund_not_showing_up",
    "lost_card?",
]
ROWS = [
    {"id": "a", "text": "Where is my card?", "intent": "card_arrival"},
    {"id": "b", "text": "My refund is missing.", "intent": "Refund_not_showing_up"},
]


@pytest.fixture
def program(tmp_path: Path) -> Program:
    (tmp_path / "labels.json").write_text(json.dumps(LABELS))
    file = ("components.labels.function.file", str(tmp_path / "labels.json"))
    return load(BENCHMARKS / "banking77.yaml", overrides=[file])


def replies(message: str) -> str:
    return (
        "It is about a card. Intent: card_arrival"
        if "Where is" in message
        else "refund_not_showing_up"
    )


def score(program: Program, lm: ScriptedLM) -> float:
    found = evaluated(program, ROWS, lm)
    assert found.failed == 0
    return float(found.mean)


def test_one_model_is_trained_and_sees_all_labels(program: Program) -> None:
    assert set(program.system.parameters) == {"classifier.weights"}
    lm = ScriptedLM(replies)
    assert score(program, lm) == 1.0
    shown = lm.requests[0].messages[-1].content
    assert "\n".join(f"[{i}] {label}" for i, label in enumerate(LABELS, 1)) in shown


def test_answers_of_the_constrained_system_are_limited_to_the_labels(tmp_path: Path) -> None:
    (tmp_path / "labels.json").write_text(json.dumps(LABELS))
    main([str(tmp_path / "labels.json"), str(tmp_path / "constrained.yaml")])
    file = ("components.labels.function.file", str(tmp_path / "labels.json"))
    program = load(tmp_path / "constrained.yaml", overrides=[file])
    lm = ScriptedLM(
        lambda message: "card_arrival" if "Where is" in message else "Refund_not_showing_up"
    )
    assert score(program, lm) == 1.0
    (limits,) = {request.format for request in lm.requests}
    assert limits is not None
    assert list(limits.choices) == LABELS


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("card_linking", "card_linking"),
        ("CARD_LINKING.", "card_linking"),
        ("Not card_arrival. Intent: card_linking", "card_linking"),
        ("Intent: card_arrival. Intent: card_linking", "card_linking"),
        ("Intent: [2] card_linking", "card_linking"),
        ("Intent: I am not sure, but card_linking", "card_linking"),
        ("card_arrival fits. Intent: unknown", "card_arrival"),
        ("Intent: lost_card?", "lost_card?"),
        ("The discard_arrival", "none"),
        ("card_arrivals", "none"),
        ("card arrival", "none"),
    ],
)
def test_the_label_after_the_marker_decides(text: str, wanted: str) -> None:
    assert read_label(text, LABELS) == wanted


def test_labels_are_found_below_the_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "banking77").mkdir()
    (tmp_path / "banking77" / "categories.json").write_text('["a", "b"]')
    monkeypatch.setenv("COMPOUND_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert labels("banking77/categories.json") == ["a", "b"]
    with pytest.raises(
        DataError, match=r"no file of labels 'other\.json'.*components\.labels\.function\.file"
    ):
        labels("other.json")


@pytest.mark.parametrize("text", ["[]", '{"a": 1}', "[1]"])
def test_files_of_anything_but_labels_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "labels.json").write_text(text)
    with pytest.raises(DataError, match="must be a list of texts"):
        labels(str(tmp_path / "labels.json"))


@needs_data
def test_real_labels_are_told_apart() -> None:
    real = labels("banking77/categories.json")
    assert len(real) == 77
    assert [read_label(f"Intent: {label}", real) for label in real] == real
