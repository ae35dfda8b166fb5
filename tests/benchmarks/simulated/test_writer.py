"""The scripted writer: what it does with a prompt, what it reads in a request, and that methods profit from it."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks.simulated.writer import (
    CONVENTIONS,
    SIZES,
    STEPS,
    WriterLM,
    applied,
    base_of,
    perform,
    prompts_in,
    rows,
)
from compound.api.optimize import run_optimization
from compound.core.example import Example
from compound.evaluation.metrics.built_in import token_f1
from compound.execution.rng import generator
from compound.yaml import load

FILE = Path(__file__).parents[3] / "benchmarks" / "writer.yaml"
READER, FINISHER = STEPS


def run(order: str, reader: str, finisher: str, demos: str = "") -> str:
    draft = perform(READER, f"{reader}\n\n{demos}Order: {order}\nDraft:")
    return perform(FINISHER, f"{finisher}\n\nDraft: {draft}\nLabel:")


def mean(reader: str, finisher: str, demos: str = "") -> float:
    metric = token_f1("label")
    found = [(row, run(row["order"], reader, finisher, demos)) for row in rows(100, "test")]
    return fmean(
        metric.score({"label": label}, Example(row["id"], {}, {"label": row["label"]})).value
        for row, label in found
    )


def reply(text: str, seed: int = 0, skill: float = 1.0) -> str:
    return WriterLM(skill)._reply_to(text, generator("test", seed))


def statements(text: str) -> list[str]:
    return [convention.name for convention in CONVENTIONS if convention.statements[0] in text]


class TestTask:
    def test_equal_messages_have_equal_answers_and_others_are_independent(self) -> None:
        message = (
            f"{READER.start}\n\nOrder: anna lopez; 5 march; 3; lima; 12 dollars; red clock\nDraft:"
        )
        assert perform(READER, message) == perform(READER, message) == reply(message)

    def test_every_row_is_what_the_conventions_make_of_it(self) -> None:
        for row in rows(50, "train"):
            values = zip(
                CONVENTIONS, row["order"].split("; "), row["label"].split("; "), strict=True
            )
            for convention, plain, right in values:
                assert applied(convention.name, plain) == right
                assert convention.form.search(right)
                assert not convention.form.search(plain)

    @pytest.mark.parametrize("kind", SIZES)
    def test_the_files_are_those_that_are_generated(self, kind: str) -> None:
        lines = (FILE.parent / "data" / "writer" / f"{kind}.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == rows(SIZES[kind], kind)


class TestReading:
    def test_it_starts_from_the_prompt_with_the_highest_number(self) -> None:
        name, date, _ = (convention.statements[0] for convention in READER.conventions)
        texts = [READER.start, f"{READER.start} {name}", f"{READER.start} {date}"]
        scored = "\n".join(
            f"<p>{text}</p> {score}" for text, score in zip(texts, (0.1, 0.5, 0.3), strict=True)
        )
        assert base_of(list(prompts_in(scored))).sentences == (name,)
        unscored = "\n".join(f"<p>{text}</p>" for text in texts)
        assert base_of(list(prompts_in(unscored))).sentences == (date,)
        assert base_of(list(prompts_in(f"{scored}\n{FINISHER.start}"))).step is FINISHER


@pytest.mark.slow
@pytest.mark.parametrize("method", ["opro", "textgrad", "gepa", "mipro"])
def test_each_method_improves_the_system(tmp_path: Path, method: str) -> None:
    changes = {
        "method": method,
        "budget.system_runs": "400",
        "test_size": "40",
        "train_size": "80",
        "valid_size": "30",
    }
    program = load(FILE, overrides=[(f"optimize.{name}", value) for name, value in changes.items()])
    assert program.data is not None
    assert program.metric is not None
    result = run_optimization(
        program.system,
        program.data,
        program.metric,
        program.optimize,
        run_dir=tmp_path / "run",
        engines={"writer": WriterLM()},
    )
    assert result.test_before is not None
    assert result.test_after is not None
    assert result.test_after.mean > result.test_before.mean + 0.5  # one step alone gains 0.4
