"""What the report, the sweep and the terminal say of training: numbers by hand, gaps, and records of any kind."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from benchmarks.measure.training import training_course
from compound.api.progress import Screen, format_event
from compound.core.errors import RunDirectoryError
from compound.execution.rng import derive_seed
from compound.optimization.runs.state import OptimizationState
from compound.report import terminal_summary, write
from compound.report.figures import PALETTE
from compound.report.rendering import Figure, Table
from compound.report.sweep import SweepRun, compare, sweep_page
from compound.report.training import export, first_last_means, records, training_facts
from compound.report.training_section import (
    PANELS,
    TrainingLine,
    caption,
    dash_coincident,
    first_last,
    moving_mean,
    panels_with_data,
    training_blocks,
    training_svg,
)

TINY = Path(__file__).parents[2] / "docs" / "notebooks" / "tiny_run"
SEED = 3
PAIR = {
    "node": "writer",
    "better": {"text": "a"},
    "worse": {"text": "b"},
}  # a record of another kind


def component(**facts: Any) -> dict[str, Any]:
    """Return what a record says of a component."""
    usual = {
        "samples": 8,
        "tokens": 16,
        "length": 2.0,
        "reward": 0.5,
        "similarity": 0.25,
        "entropy": 1.0,
    }
    return {**usual, "low": 0.0, "high": 0.0, "kl": 0.0, **facts}


def record(step: int = 0, job: int = 0, **facts: Any) -> dict[str, Any]:
    """Return the record of a step of the job of a number, as the loop counts."""
    about = {
        "kind": "training",
        "step": step,
        "seed": derive_seed(SEED, "job", job),
        "recipe": "MMGRPO",
    }
    usual = {
        "keys": ["second.weights", "first.weights"],
        "reward": 0.5,
        "groups": 4,
        "skipped": 1,
        "left_out": 0,
        "sample_seconds": 2.0,
        "train_seconds": 1.0,
        "norms": {"first": 1.0},
        "components": {"first": component(), "second": component()},
    }
    return {**about, **usual, **facts}


def progress(job: int, tokens: int, note: str = "step") -> dict[str, Any]:
    """Return the event that follows a step, when models had written so many tokens."""
    return {"event": "progress", "job": job, "note": note, "spent": {"completion_tokens": tokens}}


def lines(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def run(
    path: Path, steps: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]] = ()
) -> Path:
    """Write the files of a run that the facts of training are read from."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"optimize": {"seed": SEED, "method": "mmgrpo"}}))
    (path / "memory.jsonl").write_text(lines(steps))
    (path / "events.jsonl").write_text(lines(events))
    lengths = dict.fromkeys(("events.jsonl", "traces.jsonl", "memory.jsonl"), 0)
    stored = {"format": 3, "step": 1, "lengths": lengths, "state": OptimizationState().to_json()}
    (path / "checkpoint.json").write_text(json.dumps(stored))
    return path


def whole(path: Path, steps: Sequence[Mapping[str, Any]], method: str = "optimas") -> Path:
    """Copy a finished run, without its local rewards, and let it have trained weights too."""
    shutil.copytree(TINY, path, ignore=shutil.ignore_patterns("memory"))
    config = json.loads((path / "config.json").read_text())
    config["optimize"] |= {"seed": SEED, "method": method}
    (path / "config.json").write_text(json.dumps(config))
    with (path / "memory.jsonl").open("a") as file:
        file.write(lines(steps))
    return path


def method(path: Path) -> dict[str, Any]:
    """Return the facts of a run's own method."""
    facts = training_facts(path)
    assert facts is not None
    assert "methods" in facts, facts
    found: Any = facts["methods"][0]
    return cast("dict[str, Any]", found)


def jobs_of(tmp_path: Path, steps: Sequence[Mapping[str, Any]]) -> Any:
    found: list[dict[str, Any]] = method(run(tmp_path / "run", steps))["jobs"]
    return found


# --- records ------------------------------------------------------------------------------------------------


class TestRecords:
    def test_only_those_of_training_are_returned_in_order(self, tmp_path: Path) -> None:
        path = run(tmp_path / "run", [record(0), PAIR, record(1)])
        assert [found["step"] for found in records(path)] == [0, 1]

    def test_a_line_under_way_is_left_out_and_a_broken_one_refused(self, tmp_path: Path) -> None:
        path = run(tmp_path / "run", [record(0)])
        with (path / "memory.jsonl").open("a") as file:
            file.write('{"kind": "train')
        assert len(records(str(path))) == 1
        (path / "memory.jsonl").write_text("no JSON\n" + lines([record(0)]))
        with pytest.raises(RunDirectoryError, match="memory.jsonl:1"):
            records(path)

    def test_a_run_that_trained_nothing_has_none_and_a_folder_that_is_no_run_is_refused(
        self, tmp_path: Path
    ) -> None:
        path = run(tmp_path / "run", [PAIR])
        assert (records(path), training_facts(path)) == ([], None)
        (path / "memory.jsonl").unlink()
        assert (records(path), training_facts(path)) == ([], None)
        with pytest.raises(RunDirectoryError, match="not a run directory"):
            records(tmp_path)


class TestExport:
    def test_numbers_are_flat_and_everything_else_is_left_out(self, tmp_path: Path) -> None:
        one = record(
            7,
            reward=None,
            note="text",
            tags=[1, 2],
            warming=True,
            threshold=0.5,
            loss=math.nan,
            norms={"a": 2.0},
            components={"first": {"kl": 0.25, "why": "text", "new": 3}},
        )
        seen: list[Any] = []
        export(run(tmp_path / "run", [one]), lambda numbers, step: seen.append((numbers, step)))
        assert seen == [
            (
                {
                    "job": 1,
                    "groups": 4,
                    "skipped": 1,
                    "left_out": 0,
                    "sample_seconds": 2.0,
                    "train_seconds": 1.0,
                    "norms/a": 2.0,
                    "components/first/kl": 0.25,
                    "components/first/new": 3,
                    "warming": 1,
                    "threshold": 0.5,
                },
                0,
            )
        ]
        assert not any(isinstance(value, bool) for value in seen[0][0].values())

    def test_steps_go_on_from_job_to_job(self, tmp_path: Path) -> None:
        path = run(tmp_path / "run", [record(0, 0), record(1, 0), record(0, 1), PAIR, record(1, 1)])
        seen: list[Any] = []
        export(path, lambda numbers, step: seen.append((step, numbers["job"])))
        assert [step for step, _ in seen] == [0, 1, 2, 3]


# --- facts --------------------------------------------------------------------------------------------------


class TestProposedStep:
    """Which step was proposed is in the report's table, in the closing lines and on the terminal."""

    EVENT: Mapping[str, Any] = {
        "event": "job",
        "job": 0,
        "optimizer": "mmgrpo",
        "keys": ["first.weights"],
        "values": {"first.weights": {"path": "first-1", "sha256": "1"}},
        "train_before": 0.1,
        "train_after": 0.5,
        "tried": 3,
        "runs": 9.0,
        "note": "3 steps; step 2 is the best of 3 evaluated",
        "facts": {"best_step": 2, "evaluated": [[0, 0.1], [1, 0.2], [2, 0.5], [3, None]]},
    }

    def test_it_is_in_the_table_with_what_was_masked_and_skipped(self, tmp_path: Path) -> None:
        steps = [
            record(0, masked=2, skipped_updates=0, refilled=1),
            record(1, masked=0, skipped_updates=3, refilled=2),
        ]
        path = run(tmp_path / "run", steps, [self.EVENT])
        table = next(
            block
            for block in training_blocks(training_facts(path) or {})
            if isinstance(block, Table)
        )
        cells = dict(zip(table.headings, table.rows[0], strict=True))
        assert (cells["proposed step"], cells["held-out score"]) == ("2", "0.100 → 0.500")
        assert (cells["samples masked"], cells["updates skipped"]) == ("2", "3")
        assert cells["examples refilled"] == "3"

    def test_tokens_of_an_evaluation_are_not_those_of_a_step(self, tmp_path: Path) -> None:
        evaluation = {"evaluation": {"step": 0, "score": 0.1, "examples": 4, "best": 0}}
        events = [
            {**progress(0, 50), **evaluation},
            progress(0, 80),
            {**progress(0, 95), **evaluation},
        ]
        path = run(tmp_path / "run", [record(0)], events)
        assert [step["sampled"] for step in method(path)["jobs"][0]["steps"]] == [30]

    def test_it_is_told_when_a_run_ends_and_when_its_job_does(self, tmp_path: Path) -> None:
        path = whole(tmp_path / "run", [record(0)])
        with (path / "events.jsonl").open("a") as file:
            file.write(lines([{**self.EVENT, "spent": {}, "at": 0.0, "reason": {}}]))
        assert "training, job 1: 3 steps; step 2 is the best of 3 evaluated" in terminal_summary(
            path
        )
        assert "step 2 is the best of 3 evaluated, proposes first.weights" in format_event(
            self.EVENT
        )


class TestFacts:
    def test_ends_are_means_over_a_fifth_of_the_steps(self, tmp_path: Path) -> None:
        steps = [
            record(i, reward=i / 10, skipped=i % 5, components={"first": component(entropy=10 - i)})
            for i in range(10)
        ]
        (job,) = jobs_of(tmp_path, steps)
        assert job["reward"] == [pytest.approx(0.05), pytest.approx(0.85)]
        assert job["skipped"] == [
            pytest.approx(0.125),
            pytest.approx(0.875),
        ]  # (0 + 1) / 2 and (3 + 4) / 2 of 4
        assert job["components"]["first"]["entropy"] == [9.5, 1.5]
        assert job["kept"] == [None, None]

    def test_a_component_that_some_steps_do_not_have_is_told_from_the_others(
        self, tmp_path: Path
    ) -> None:
        steps = [
            record(i, components={"first": component(reward=float(i))} if i % 2 else {})
            for i in range(10)
        ]
        (job,) = jobs_of(tmp_path, steps)
        assert list(job["components"]) == ["second", "first"]  # in the order of the job's keys
        assert job["components"]["first"]["reward"] == [1.0, 9.0]
        assert job["components"]["first"]["samples"] == 40
        empty = {"samples": None, "tokens": None, "reward": [None, None], "entropy": [None, None]}
        assert empty.items() <= job["components"]["second"].items()

    def test_sums_and_speeds_by_hand(self, tmp_path: Path) -> None:
        steps = [
            record(
                i,
                sample_seconds=s,
                train_seconds=t,
                left_out=i,
                memory=m,
                lost=2 * i,
                failed=i,
                prompt_tokens=100 + 100 * i,
                prompt_tokens_cached=50 * i,
            )
            for i, (s, t, m) in enumerate([(9.0, 5.0, 100.0), (2.0, 1.0, 300.0), (3.0, 3.0, 200.0)])
        ]
        before = {"event": "baseline", "spent": {"completion_tokens": 50}}
        events = [before, *(progress(0, tokens) for tokens in (150, 180, 230))]
        found = method(run(tmp_path / "run", steps, events))
        assert found["totals"] == {
            "steps": 3,
            "tokens": 96.0,  # 3 steps of 2 components of 16
            "sampled": 180,
            "left_out": 3,
            "lost": 6,
            "failed": 3,
            "prompt_tokens": 600,
            "prompts_saved": 0.25,  # 0 + 50 + 100 of them
            "sample_seconds": 14.0,
            "train_seconds": 9.0,
            "memory": 300.0,
            "masked": None,
            "refilled": None,
            "skipped_updates": None,
            "sampling_speed": (30 + 50) / (2 + 3),
            "training_speed": (32 + 32) / (1 + 3),
        }
        assert [step["sampled"] for step in found["jobs"][0]["steps"]] == [100, 30, 50]

    def test_a_single_step_has_speeds_and_is_both_ends(self, tmp_path: Path) -> None:
        found = method(run(tmp_path / "run", [record(reward=0.75)], [progress(0, 40)]))
        assert (found["totals"]["sampling_speed"], found["totals"]["training_speed"]) == (
            20.0,
            32.0,
        )
        assert found["jobs"][0]["reward"] == [0.75, 0.75]

    def test_what_a_value_head_expected_what_penalties_cost_and_what_was_said_is_shown(
        self, tmp_path: Path
    ) -> None:
        said: list[dict[str, Any]] = [
            {"answers": {"first": [{"example": "e", "reward": float(i), "text": f"answer {i}"}]}}
            for i in range(4)
        ]
        steps = [
            record(
                i,
                explained=i / 4,
                penalties={"first": -1.0 if i < 2 else 0.0},
                **(said[i] if i else {}),
            )
            for i in range(4)
        ]
        (job,) = jobs_of(tmp_path, steps)
        assert job["explained"] == [0.0, 0.75]
        assert job["components"]["first"]["penalty"] == [-1.0, 0.0]
        assert job["components"]["second"]["penalty"] == [None, None]
        assert [(place, some[0]["text"]) for place, some in job["answers"]["first"]] == [
            (1, "answer 1"),
            (3, "answer 3"),
        ]
        blocks = training_blocks(training_facts(tmp_path / "run") or {})
        shown = str(blocks)
        for text in ("explained by values", "penalty", "answer 1", "answer 3"):
            assert text in shown
        assert "answer 2" not in shown

    def test_jobs_have_the_numbers_of_the_table_of_jobs(self, tmp_path: Path) -> None:
        events = [{"event": "job", "spent": {}} for _ in range(4)]
        path = run(
            tmp_path / "run", [record(0, 1), record(0, 3), record(0, 4), record(1, 4)], events
        )
        assert [job["number"] for job in method(path)["jobs"]] == [
            2,
            4,
            5,
        ]  # the fifth is under way
        assert [len(job["steps"]) for job in method(path)["jobs"]] == [1, 1, 2]

    def test_jobs_of_seeds_nobody_knows_are_numbered_by_their_place(self, tmp_path: Path) -> None:
        jobs = jobs_of(tmp_path, [record(seed=5), record(seed=9)])
        assert [job["number"] for job in jobs] == [1, 2]

    def test_tokens_are_of_the_job_that_drew_them(self, tmp_path: Path) -> None:
        events = [
            progress(0, 10, "3 candidates"),  # another optimizer's
            {"event": "job", "spent": {"completion_tokens": 15}},
            progress(1, 20),
            progress(1, 27),
            {"event": "job", "spent": {"completion_tokens": 30}},
            progress(2, 90),
        ]
        path = run(tmp_path / "run", [record(0, 1), record(1, 1), record(0, 2)], events)
        assert [job["sampled"] for job in method(path)["jobs"]] == [12, 60]

    def test_a_step_whose_event_was_lost_has_no_tokens_and_too_many_events_say_nothing(
        self, tmp_path: Path
    ) -> None:
        killed = run(tmp_path / "killed", [record(0), record(1)], [progress(0, 10)])
        steps = method(killed)["jobs"][0]["steps"]
        assert [step.get("sampled") for step in steps] == [10, None]
        mixed = run(tmp_path / "mixed", [record(0)], [progress(0, 10), progress(0, 20)])
        assert method(mixed)["jobs"][0]["sampled"] is None

    def test_whatever_a_record_lacks_the_report_stands(self, tmp_path: Path) -> None:
        bare: list[dict[str, Any]] = [
            {"kind": "training"},
            {"kind": "training", "components": None, "reward": "high", "groups": 0, "skipped": 0},
            {
                "kind": "training",
                "reward": math.inf,
                "components": {"first": {"entropy": None, "kl": "x"}},
            },
            {
                "kind": "training",
                "components": {"first": {}},
                "memory": None,
                "seed": None,
                "keys": [],
            },
        ]
        for number, one in enumerate(bare):
            facts = training_facts(run(tmp_path / str(number), [one]))
            assert facts is not None
            json.dumps(facts, allow_nan=False)
            assert not any(isinstance(block, Figure) for block in training_blocks(facts))
        text = section(whole(tmp_path / "run", [*bare, record(2, 0)]))
        assert "| 1 | MMGRPO | 1 |" in text
        assert "5 steps" in text

    def test_baselines_have_their_own(self, tmp_path: Path) -> None:
        path = run(tmp_path / "run", [record(reward=0.1)])
        other = run(path / "baselines" / "mygo", [record(reward=0.9, recipe="MyGO"), record(1)])
        (other / "config.json").write_text(
            json.dumps({"optimize": {"seed": SEED, "method": "mygo"}})
        )
        run(path / "baselines" / "random", [])
        facts = training_facts(path)
        assert facts is not None
        assert [(m["method"], m["totals"]["steps"]) for m in facts["methods"]] == [
            ("mmgrpo", 1),
            ("mygo", 2),
        ]

    @given(st.lists(st.none() | st.floats(-1e6, 1e6), min_size=1, max_size=60))
    def test_ends_lie_between_the_values_and_turn_with_them(
        self, values: list[float | None]
    ) -> None:
        known = [value for value in values if value is not None]
        first, last = first_last_means(values)
        for end in (first, last):
            assert end is None or min(known) - 1e-6 <= end <= max(known) + 1e-6
        assert first_last_means(values[::-1])[0] == (None if last is None else pytest.approx(last))


# --- the figure ---------------------------------------------------------------------------------------------


def titles(svg: str) -> set[str]:
    return {panel.title for panel in PANELS if f">{panel.title}<" in svg}


class TestFigure:
    def test_panels_that_say_nothing_are_left_out(self, tmp_path: Path) -> None:
        jobs = jobs_of(tmp_path, [record(i) for i in range(4)])
        svg = training_svg(jobs)
        assert titles(svg) == {panel.title for panel in panels_with_data(jobs)}
        assert not {title for title in titles(svg) if title.startswith(("KL", "Clipped", "Kept"))}
        assert len(titles(svg)) == 6
        assert "No token was clipped." in caption(jobs)

    @pytest.mark.parametrize(
        ("fact", "title"),
        [
            ("kl", "KL to the old"),
            ("base_kl", "KL to the base"),
            ("low", "Clipped"),
            ("high", "Clipped"),
        ],
    )
    def test_a_policy_that_moved_is_shown(self, tmp_path: Path, fact: str, title: str) -> None:
        steps = [
            record(0),
            record(1, components={"first": component(**{fact: 0.01}), "second": component()}),
        ]
        jobs = jobs_of(tmp_path, steps)
        assert sum(found.startswith(title) for found in titles(training_svg(jobs))) == 1
        assert ("Clipped tokens" in caption(jobs)) == (title == "Clipped")

    def test_mygo_shows_its_threshold_and_what_it_kept(self, tmp_path: Path) -> None:
        steps = [
            record(i, threshold=0.5, attempts=10, kept=i, groups=None, skipped=None)
            for i in range(3)
        ]
        jobs = jobs_of(tmp_path, steps)
        svg = training_svg(jobs)
        assert "Kept attempts (share)" in titles(svg)
        assert "Skipped groups (share)" not in titles(svg)
        assert ">threshold<" in svg
        assert "threshold" in caption(jobs)
        assert ">threshold<" not in training_svg(jobs_of(tmp_path / "other", [record()]))

    def test_rules_part_the_jobs(self, tmp_path: Path) -> None:
        rule = re.compile(rf"stroke: {PALETTE['muted']}; stroke-opacity: 0.7")
        one = training_svg(jobs_of(tmp_path / "one", [record(i) for i in range(3)]))
        assert not rule.search(one)
        assert "job 1" not in one
        jobs = jobs_of(tmp_path / "three", [record(i, job) for job in range(3) for i in range(3)])
        three = training_svg(jobs)
        assert len(rule.findall(three)) == 2 * len(panels_with_data(jobs))
        assert [three.count(f">job {number}<") for number in (1, 2, 3)] == [
            3,
            3,
            3,
        ]  # the upper row of panels
        assert "Vertical lines separate the jobs." in caption(jobs)

    def test_many_jobs_have_rules_but_no_room_for_words(self, tmp_path: Path) -> None:
        jobs = jobs_of(tmp_path, [record(0, job) for job in range(40)])
        svg = training_svg(jobs)
        assert "job 1" not in svg
        assert svg.count("stroke-opacity: 0.7") == 39 * len(panels_with_data(jobs))

    def test_lines_that_coincide_are_seen_in_turn(self) -> None:
        def line(color: str, *values: float) -> TrainingLine:
            return TrainingLine(list(enumerate(values)), len(values), color, "-", second=False)

        first, second, third = dash_coincident([line("a", 1, 2), line("b", 1, 3), line("c", 1, 2)])
        assert {(found.color, found.dashes) for found in (first, second, third)} == {
            ("a", (0.0, (4.0, 4.0))),
            ("c", (4.0, (4.0, 4.0))),
            ("b", "-"),
        }

    def test_one_step_is_a_dot_and_every_component_stands_in_the_legend(
        self, tmp_path: Path
    ) -> None:
        names = [f"component_{i}_of_many" for i in range(17)]
        steps = [
            record(keys=[f"{n}.weights" for n in names], components={n: component() for n in names})
        ]
        svg = training_svg(jobs_of(tmp_path, steps))
        assert all(f">{name}<" in svg for name in names)
        width, height = (float(n) for n in re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)[0])
        places = re.findall(r'x="(-?[\d.]+)" y="(-?[\d.]+)"[^>]*>component_\d+_of_many', svg)
        assert len(places) == len(names)
        assert all(0 < float(x) < width - 80 and 0 < float(y) < height for x, y in places)

    def test_a_step_is_drawn_at_its_place_although_others_lack_it(self, tmp_path: Path) -> None:
        """The first step's length is unknown; with it left out the line has one point less."""
        both = [record(i, components={"first": component(length=5.0 + i)}) for i in range(3)]
        gap = [record(0, components={}), *both[1:]]
        counts = []
        for name, steps in (("both", both), ("gap", gap)):
            svg = training_svg(jobs_of(tmp_path / name, steps))
            counts.append(len(re.findall(r"[ML] [\d.]+ [\d.]+", svg)))
        assert counts[0] - counts[1] == 4  # reward by component, entropy, length, similarity

    @given(
        st.lists(st.tuples(st.integers(0, 10**6), st.floats(-1e3, 1e3)), max_size=40),
        st.integers(0, 12),
    )
    def test_a_moving_mean_stays_within_what_it_is_over(
        self, points: list[tuple[float, float]], half: int
    ) -> None:
        smooth = moving_mean(points, half)
        assert [x for x, _ in smooth] == [x for x, _ in points]
        for i, (_, y) in enumerate(smooth):
            near = [value for _, value in points[max(0, i - half) : i + half + 1]]
            assert min(near) - 1e-9 <= y <= max(near) + 1e-9
        assert [y for _, y in moving_mean(points, 0)] == pytest.approx([y for _, y in points])
        turned = moving_mean([(x, -y) for x, y in points], half)
        assert [y for _, y in turned] == pytest.approx([-y for _, y in smooth])


# --- the section --------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Collects ids and text, and checks that tags are balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += "" if "style" in self.open else data


def section(path: Path) -> str:
    write(path)
    return (path / "report.md").read_text().partition("## Training\n")[2].partition("\n## ")[0]


class TestSection:
    def test_the_tables_hold_the_numbers(self, tmp_path: Path) -> None:
        steps = [
            record(
                i,
                0,
                reward=i / 10,
                memory=1024.0,
                left_out=1,
                components={"first": component(length=20.0 + i)},
            )
            for i in range(10)
        ]
        text = section(whole(tmp_path / "run", steps))
        row = "| 1 | MMGRPO | 10 | 0.050 → 0.850 | 25 % → 25 % | 10 | 160 | 20.0 s | 10.0 s | 1,024 MiB |"
        assert row in text.replace("\u00a0", " ")
        assert (
            "| 1 | first | 80 | 160 | 0.500 → 0.500 | 1.000 → 1.000 | 20.5 → 28.5 | 0.250 → 0.250 |"
            in text
        )
        assert "| 1 | second | – | – | – | – | – | – |" in text
        assert "attempts kept" not in text
        assert (
            "Sampling took 20.0 s and training took 10.0 s (16 tokens/s), in total over 10 steps."
            in text
        )

    def test_both_forms_have_it_with_ids_of_its_own(self, tmp_path: Path) -> None:
        hostile = '</svg><b onclick="x">|$x$'
        steps = [
            record(i, keys=[], recipe=hostile, components={hostile: component()}) for i in range(3)
        ]
        path = whole(tmp_path / "run", steps)
        whole(path / "baselines" / "mygo", steps, "mygo")
        write(path)
        page = Page((path / "report.html").read_text())
        assert len(page.ids) == len({*page.ids})
        assert page.text.count("Mean reward of rollouts") == 2
        assert "Method mygo:" in page.text
        assert hostile in page.text
        assert "training" in page.ids
        text = section(path)
        assert text.count("the tables below hold its numbers") == 2
        assert "Method mygo:" in text
        assert "<b" not in text.replace("\\<b", "")

    def test_it_stands_only_where_weights_were_trained(self, tmp_path: Path) -> None:
        path = whole(tmp_path / "run", [])
        write(path)
        assert "Training" not in Page((path / "report.html").read_text()).text
        assert "## Training" not in (path / "report.md").read_text()

    def test_records_that_cannot_be_read_are_named_and_the_rest_stands(
        self, tmp_path: Path
    ) -> None:
        path = whole(tmp_path / "run", [record()])
        with (path / "memory.jsonl").open("a") as file:
            file.write("broken\n")
        text = section(path)
        assert re.search(r"cannot be read: .*memory.jsonl:\d+", text.replace("\\", ""))
        assert "## Provenance" in (path / "report.md").read_text()

    def test_without_matplotlib_the_tables_stand(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = whole(tmp_path / "run", [record(0, 0)])
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        text = section(path)
        assert "needs matplotlib, which is not installed" in text
        assert "| 1 | MMGRPO | 1 |" in text

    def test_half_a_course_is_shown(self) -> None:
        assert first_last([None, 0.5]) == "– → 0.500"


# --- sweeps -------------------------------------------------------------------------------------------------


def swept(tmp_path: Path, *seeds: Sequence[Mapping[str, Any]]) -> Any:
    """Compare runs of one method, each with the training given."""
    for seed, steps in enumerate(seeds):
        whole(tmp_path / str(seed), steps)
    states: list[SweepRun] = [
        {
            "file": "f",
            "method": "optimas",
            "seed": seed,
            "run": str(seed),
            "status": "finished",
            "reason": "",
        }
        for seed in range(len(seeds))
    ]
    return compare(states, tmp_path, {"f": {"system_runs": 400, "test_share": 0.2}})


class TestSweep:
    def test_a_row_holds_means_over_seeds_and_the_most_memory(self, tmp_path: Path) -> None:
        facts = swept(
            tmp_path, [record(memory=500.0), record(1)], [record(sample_seconds=9.0, memory=700.0)]
        )
        found = facts["rows"][1]["training"]
        assert found == {
            "steps": 1.5,
            "sampled": None,
            "tokens": 48.0,
            "sample_seconds": 6.5,
            "train_seconds": 1.5,
            "memory": 700.0,
            "seeds": 2,
        }
        assert [run["training"]["sample_seconds"] for run in facts["runs"]] == [4.0, 9.0]
        page = sweep_page(facts)
        assert "| optimas | 2 | 1.5 | – | 48 | 6.5 s | 1.5 s | 700 MiB |" in page

    def test_runs_that_trained_nothing_have_no_table(self, tmp_path: Path) -> None:
        facts = swept(tmp_path, [])
        assert facts["rows"][1]["training"] is None
        assert "Training" not in sweep_page(facts)

    def test_seeds_that_trained_nothing_are_not_in_the_means(self, tmp_path: Path) -> None:
        found = swept(tmp_path, [record()], [])["rows"][1]["training"]
        assert (found["seeds"], found["train_seconds"], found["memory"]) == (1, 1.0, None)

    def test_broken_records_do_not_end_a_sweep(self, tmp_path: Path) -> None:
        whole(tmp_path / "x", [record()])
        facts = swept(tmp_path / "sweep", [record()])
        with (tmp_path / "sweep" / "0" / "memory.jsonl").open("a") as file:
            file.write("broken\n")
        again = compare(
            [
                cast("SweepRun", {key: run[key] for key in SweepRun.__annotations__})
                for run in facts["runs"]
            ],
            tmp_path / "sweep",
            facts["budgets"],
        )
        assert again["rows"][1]["training"] is None
        assert again["rows"][1]["test"] == facts["rows"][1]["test"]


# --- the terminal -------------------------------------------------------------------------------------------


class Terminal:
    """Rich's live display, as far as a screen needs it, with a clock that the test turns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.console = Console(file=io.StringIO(), width=100)
        self.now = 100.0
        self.view: Any = None
        monkeypatch.setattr("compound.api.progress.time.monotonic", lambda: self.now)
        self.screen = Screen(cast("Any", self), {"system_runs": 400}, 100.0)

    def update(self, view: Any) -> None:
        self.view = view

    def listen(self, seconds: float, **event: Any) -> list[str]:
        """Let an event happen after some seconds; return what stands below."""
        self.now += seconds
        self.screen.listen(event)
        below = Console(file=io.StringIO(), width=100)
        below.print(self.view)
        return below.file.getvalue().splitlines()  # type: ignore[attr-defined,no-any-return]

    @property
    def scrolled(self) -> str:
        return str(self.console.file.getvalue())  # type: ignore[attr-defined]


def step(number: int, job: int = 0, of: int = 40, **more: Any) -> dict[str, Any]:
    note, spent = f"mean reward 0.{number:03}, 8 samples", {"system_runs": 8.0 * number}
    return {
        "event": "progress",
        "job": job,
        "note": note,
        "step": number,
        "of": of,
        "spent": spent,
        **more,
    }


class TestTerminal:
    def test_steps_move_a_bar_and_do_not_scroll(self, monkeypatch: pytest.MonkeyPatch) -> None:
        terminal = Terminal(monkeypatch)
        bar, spent = terminal.listen(3.0, **step(1))
        assert bar.startswith("step 1 of 40 ")
        assert bar.endswith(
            " mean reward 0.001, 8 samples"
        )  # one step says nothing about how long others take
        assert spent.startswith("8 of 400 system runs")
        bar, _ = terminal.listen(20.0, **step(11))
        assert bar.endswith("mean reward 0.011, 8 samples · 0:58 left")  # 29 steps of 2 s
        assert terminal.scrolled == ""

    def test_calls_between_steps_leave_the_bar_as_it_is(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        terminal = Terminal(monkeypatch)
        terminal.listen(0.0, **step(1))
        before, _ = terminal.listen(10.0, **step(2))
        after, spent = terminal.listen(5.0, event="call", spent={"calls": 77})
        assert before == after
        assert "77 calls" in spent

    def test_the_bar_ends_with_its_job_and_another_begins_anew(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        terminal = Terminal(monkeypatch)
        terminal.listen(0.0, **step(1))
        terminal.listen(10.0, **step(2))
        done = {"optimizer": "mmgrpo", "keys": ["a.weights"], "values": {}, "note": "nothing"}
        assert len(terminal.listen(1.0, event="job", spent={}, **done)) == 1
        assert "mmgrpo on a.weights: nothing" in terminal.scrolled
        assert "left" not in terminal.listen(1.0, **step(1, job=1))[0]

    def test_jobs_without_an_end_between_have_clocks_of_their_own(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        terminal = Terminal(monkeypatch)
        terminal.listen(0.0, **step(1))
        assert "left" not in terminal.listen(9.0, **step(3, job=1))[0]
        bar, _ = terminal.listen(9.0, **step(4, job=1, method="mygo"))
        assert bar.startswith("mygo: step 4 of 40")
        assert "left" not in bar
        assert terminal.listen(2.0, **step(5, job=1, method="mygo"))[0].endswith(" · 1:10 left")

    def test_notes_that_tell_no_steps_scroll_as_before(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        terminal = Terminal(monkeypatch)
        terminal.listen(0.0, event="progress", job=0, note="best 0.500", step=3, of=None, spent={})
        terminal.listen(0.0, event="progress", job=0, note="3 candidates", spent={})
        assert terminal.scrolled == "progress  step 3: best 0.500\nprogress  3 candidates\n"


def test_the_course_of_a_training_is_its_means_by_stretch(tmp_path: Path) -> None:
    steps = [
        record(n, components={"a": component(entropy=float(n))}, penalties={"a": -0.1})
        for n in range(7)
    ]
    steps += [record(n, components={}) for n in range(7, 12)]
    training_course.main(
        [f"x={run(tmp_path / 'run', steps)}", "--output", str(tmp_path / "course.json")]
    )
    found = json.loads((tmp_path / "course.json").read_text())["x"]
    assert [found[stretch]["a"]["entropy"] for stretch in found] == [2.0, 5.5, None]
    assert found["6 to 10"]["a"]["penalty"] == pytest.approx(-0.04)  # by step, trained on or not
    assert [found[stretch]["rollouts"] for stretch in found] == [
        {"reward": 0.5, "skipped": 0.25}
    ] * 3  # 1 of 4
