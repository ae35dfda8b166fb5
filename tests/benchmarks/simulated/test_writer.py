"""The scripted writer: what it does with a prompt, what it reads in a request, and that methods profit from it."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compound.api.optimize import optimize
from compound.benchmarks.simulated.writer import (
    CONVENTIONS,
    NEEDLESS,
    RELIABLE,
    SHOWN,
    SHOWN_MORE,
    SIZES,
    STEPS,
    UNAWARE,
    WriterLM,
    applied,
    base_of,
    chance_of,
    perform,
    prompts_in,
    rows,
)
from compound.evaluation.metrics.built_in import token_f1
from compound.example import Example
from compound.execution.rng import generator
from compound.spec import load

FILE = Path(__file__).parents[3] / "benchmarks" / "writer.yaml"
READER, FINISHER = STEPS
ALL = {step: " ".join([step.start, *(c.statements[0] for c in step.conventions)]) for step in STEPS}


def run(order: str, reader: str, finisher: str, demos: str = "") -> str:
    draft = perform(READER, f"{reader}\n\n{demos}Order: {order}\nDraft:")
    return perform(FINISHER, f"{finisher}\n\nDraft: {draft}\nLabel:")


def mean(reader: str, finisher: str, demos: str = "") -> float:
    """Return the mean score of two prompts."""
    metric = token_f1("label")
    found = [(row, run(row["order"], reader, finisher, demos)) for row in rows(100, "test")]
    return fmean(
        metric.score({"label": label}, Example(row["id"], {}, {"label": row["label"]})).value
        for row, label in found
    )


def reply(text: str, seed: int = 0, skill: float = 1.0) -> str:
    return WriterLM(skill)._reply_to(text, generator("test", seed))


def statements(text: str) -> list[str]:
    """Return the fields whose conventions a text states."""
    return [convention.name for convention in CONVENTIONS if convention.statements[0] in text]


MARKS = "Write it between <prompt> and </prompt>."
EXPECTED = "AL; 0305; three; peru; 1200 cents; LAMP"


class TestTask:
    def test_a_prompt_that_states_all_conventions_is_nearly_always_followed(self) -> None:
        starts = mean(READER.start, FINISHER.start)
        half = mean(ALL[READER], FINISHER.start)
        full = mean(ALL[READER], ALL[FINISHER])
        assert starts < 0.25 < half < 0.7
        assert 0.9 < full < 1.0

    def test_demonstrations_help_less_than_a_statement(self) -> None:
        shown = "Order: anna lopez; 5 march; 3; lima; 12 dollars; blue lamp\nDraft: AL; 0305; three; lima\n\n"
        chances = [
            chance_of(READER.conventions[0], READER, READER.start, demos)
            for demos in ([], ["AL; 0305"], ["AL", "BT"], ["anna lopez"])
        ]
        assert chances == [UNAWARE, SHOWN, SHOWN + SHOWN_MORE, UNAWARE]
        assert mean(READER.start, FINISHER.start) < mean(READER.start, FINISHER.start, shown)
        assert mean(READER.start, FINISHER.start, shown) < mean(ALL[READER], FINISHER.start)

    def test_needless_sentences_harm_a_little_and_wrong_ones_much(self) -> None:
        first = READER.conventions[0]
        chance = chance_of(first, READER, ALL[READER], [])
        assert chance == RELIABLE
        assert RELIABLE - 0.05 < chance_of(first, READER, f"{ALL[READER]} {NEEDLESS}", []) < RELIABLE
        assert chance_of(first, READER, f"{ALL[READER]} {first.statements[1]}", []) < 0.05

    def test_equal_messages_have_equal_answers_and_others_are_independent(self) -> None:
        message = f"{READER.start}\n\nOrder: anna lopez; 5 march; 3; lima; 12 dollars; red clock\nDraft:"
        assert perform(READER, message) == perform(READER, message) == reply(message)

    def test_every_row_is_what_the_conventions_make_of_it(self) -> None:
        for row in rows(50, "train"):
            values = zip(CONVENTIONS, row["order"].split("; "), row["label"].split("; "), strict=True)
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

    def test_it_notices_only_what_the_request_shows(self) -> None:
        bare = [statements(reply(f"{READER.start}\n{MARKS}", seed)) for seed in range(200)]
        told = [
            statements(reply(f"{READER.start}\n{(EXPECTED + chr(10)) * 9}{MARKS}", seed))
            for seed in range(200)
        ]
        assert fmean(map(len, bare)) < 0.4  # guesses: one in four, and one in three of them right
        assert fmean(map(len, told)) > 1.9  # two are noticed, and the third may be guessed

    def test_more_skill_notices_more(self) -> None:
        found = [
            fmean(
                len(statements(reply(f"{READER.start}\n{EXPECTED}\n{MARKS}", s, skill))) for s in range(200)
            )
            for skill in (0.0, 0.5, 1.0)
        ]
        assert found == sorted(found)
        assert found[-1] - found[0] > 0.4

    def test_criticism_is_used(self) -> None:
        criticism = "It does not say: Spell out the quantity."
        texts = [reply(f"<p>{READER.start}</p>\n{criticism}\n{MARKS}", seed) for seed in range(50)]
        assert all("quantity" in statements(text) for text in texts)

    @given(st.integers(0, 1000), st.sampled_from([0.0, 0.4, 1.0]))
    def test_wording_makes_no_difference(self, seed: int, skill: float) -> None:
        """Two methods that show the same prompts, numbers and examples get the same reply."""
        date = READER.conventions[1].statements[0]
        requests = [
            f"{opening}\n<prompt>{READER.start}</prompt>{verb}0.2\n<prompt>{READER.start} {date}</prompt>{verb}0.4\n"
            f"{heading}\n{EXPECTED}\n{ending} {MARKS}"
            for opening, verb, heading, ending in [
                ("Instructions so far:", " score ", "Examples:", "Write a better one."),
                (
                    "A history of trials follows.",
                    " -> ",
                    "Seen in the data",
                    "Reflect, then propose a variant.",
                ),
            ]
        ]
        one, other = (reply(request, seed, skill) for request in requests)
        assert one == other

    @pytest.mark.parametrize(
        ("ending", "start", "end"),
        [
            (MARKS, "<prompt>", "</prompt>"),
            ("Use <text> and </text>.", "<text>", "</text>"),
            ("Give it in ``` blocks.", "```\n", "\n```"),
        ],
    )
    def test_a_prompt_is_written_between_the_marks_that_are_asked_for(
        self, ending: str, start: str, end: str
    ) -> None:
        text = reply(f"{FINISHER.start}\n{ending}")
        assert text.startswith(f"{start}{FINISHER.start}")
        assert text.endswith(end)

    @pytest.mark.parametrize("text", [f"{EXPECTED}\n" * 9, f"{READER.start}\n" + f"{EXPECTED}\n" * 9])
    def test_without_marks_it_states_what_it_noticed(self, text: str) -> None:
        found = reply(f"{text}What do you see?")
        assert len(statements(found)) == 2
        assert READER.start not in found
        assert reply("What do you see?") == "Nothing stands out."


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
    result = optimize(
        program.system, program.data, program.metric, program.optimize, run_dir=tmp_path / "run",
        engines={"writer": WriterLM()},
    )  # fmt: skip
    assert result.test_before is not None
    assert result.test_after is not None
    assert result.test_after.mean > result.test_before.mean + 0.5  # one step alone gains 0.4
