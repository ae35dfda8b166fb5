"""What the report, the sweep and the terminal say of training: numbers by hand, gaps, and records of any kind."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from compound.api.progress import format_event
from compound.core.errors import RunDirectoryError
from compound.execution.rng import derive_seed
from compound.optimization.runs.state import OptimizationState
from compound.report import terminal_summary, write
from compound.report.figures import PALETTE
from compound.report.sweep import SweepRun, compare, sweep_page
from compound.report.training import (
    PANELS,
    caption,
    panels_with_data,
    records,
    step_metrics,
    training_facts,
    training_svg,
)
from report_pages import Page

TINY = Path(__file__).parents[2] / "docs" / "notebooks" / "tiny_run"
SEED = 3


def component(**facts: Any) -> dict[str, Any]:
    """Return what a record says of a component."""
    usual = {"samples": 8, "tokens": 16, "length": 2.0, "reward": 0.5, "similarity": 0.25}
    return {**usual, "entropy": 1.0, "low": 0.0, "high": 0.0, "kl": 0.0, **facts}


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
    assert "jobs" in facts, facts
    found: Any = facts
    return cast("dict[str, Any]", found)


def jobs_of(tmp_path: Path, steps: Sequence[Mapping[str, Any]]) -> Any:
    found: list[dict[str, Any]] = method(run(tmp_path / "run", steps))["jobs"]
    return found


# --- records ------------------------------------------------------------------------------------------------


class TestRecords:
    def test_a_line_under_way_is_left_out_and_a_broken_one_refused(self, tmp_path: Path) -> None:
        path = run(tmp_path / "run", [record(0)])
        with (path / "memory.jsonl").open("a") as file:
            file.write('{"kind": "train')
        assert len(records(str(path))) == 1
        (path / "memory.jsonl").write_text("no JSON\n" + lines([record(0)]))
        with pytest.raises(RunDirectoryError, match="memory.jsonl:1"):
            records(path)


class TestMetrics:
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
        (stored,) = records(run(tmp_path / "run", [one]))
        found = step_metrics(stored)
        assert found == {
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
        }
        assert not any(isinstance(value, bool) for value in found.values())


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
        steps = [record(0, masked=2, refilled=1), record(1, skipped_updates=3, refilled=2)]
        path = whole(tmp_path / "run", steps)
        told = {**self.EVENT, "spent": {}, "at": 0.0, "reason": {}}
        with (path / "events.jsonl").open("a") as file:
            file.write(lines([told]))
        text = section(path)
        for name in ("proposed step", "samples masked", "updates skipped", "examples refilled"):
            assert f"| {name} |" in text
        assert "| 2 | 2 | 0.100 → 0.500 |" in text

    def test_it_is_told_when_a_run_ends_and_when_its_job_does(self, tmp_path: Path) -> None:
        path = whole(tmp_path / "run", [record(0)])
        with (path / "events.jsonl").open("a") as file:
            file.write(lines([{**self.EVENT, "spent": {}, "at": 0.0, "reason": {}}]))
        assert "training, job 1: 3 steps; step 2 is the best of 3 evaluated" in terminal_summary(
            path
        )
        assert (
            "new values of first.weights: 3 steps; step 2 is the best of 3 evaluated"
            in format_event(self.EVENT)
        )


class TestFacts:
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
        steps = [{**step, "sampled": n} for step, n in zip(steps, (100, 30, 50), strict=True)]
        found = method(run(tmp_path / "run", steps))
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
        assert [(row["step"], row["component"], row["text"]) for row in job["answers"]] == [
            (2, "first", "answer 1"),
            (4, "first", "answer 3"),
        ]
        shown = section(whole(tmp_path / "whole", steps))
        for text in ("explained by values", "penalty", "answer 1", "answer 3"):
            assert text in shown
        assert "answer 2" not in shown

    def test_jobs_have_the_numbers_of_the_table_of_jobs(self, tmp_path: Path) -> None:
        events = [{"event": "job", "spent": {}} for _ in range(4)]
        path = run(
            tmp_path / "run", [record(0, 1), record(0, 3), record(0, 4), record(1, 4)], events
        )
        # The fifth job is under way.
        assert [job["number"] for job in method(path)["jobs"]] == [2, 4, 5]
        assert [len(job["steps"]) for job in method(path)["jobs"]] == [1, 1, 2]

    def test_whatever_a_record_lacks_the_report_stands(self, tmp_path: Path) -> None:
        parts: list[dict[str, Any]] = [
            {},
            {"components": None, "reward": "high", "groups": 0, "skipped": 0},
            {"reward": math.inf, "components": {"first": {"entropy": None, "kl": "x"}}},
            {"components": {"first": {}}, "memory": None, "seed": None, "keys": []},
        ]
        bare = [{"kind": "training", **part} for part in parts]
        for number, one in enumerate(bare):
            facts = training_facts(run(tmp_path / str(number), [one]))
            assert facts is not None
            json.dumps(facts, allow_nan=False)
        text = section(whole(tmp_path / "run", [*bare, record(2, 0)]))
        assert "| 1 | MMGRPO | 1 |" in text
        assert "5 steps" in text


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

    def test_jobs_are_numbered_and_parted(self, tmp_path: Path) -> None:
        assert "job 1" not in training_svg(jobs_of(tmp_path / "one", [record(i) for i in range(3)]))
        jobs = jobs_of(tmp_path / "three", [record(i, job) for job in range(3) for i in range(3)])
        svg = training_svg(jobs)
        assert [svg.count(f">job {number}<") for number in (1, 2, 3)] == [3, 3, 3]  # the upper row
        rule = f"stroke: {PALETTE['muted']}; stroke-opacity: 0.7"
        assert svg.count(rule) == 2 * len(panels_with_data(jobs))
        assert "Vertical lines separate the jobs." in caption(jobs)


# --- the section --------------------------------------------------------------------------------------------


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
        write(path)
        page = Page((path / "report.html").read_text())
        assert len(page.ids) == len({*page.ids})
        assert page.text.count("Mean reward of rollouts") == 1
        assert hostile in page.text
        assert "training" in page.ids
        text = section(path)
        assert text.count("the tables hold its numbers") == 1
        assert "<b" not in text.replace("\\<b", "")

    def test_records_that_cannot_be_read_are_named_and_the_rest_stands(
        self, tmp_path: Path
    ) -> None:
        path = whole(tmp_path / "run", [record()])
        with (path / "memory.jsonl").open("a") as file:
            file.write("broken\n")
        text = section(path)
        assert re.search(r"cannot be read: .*memory.jsonl:\d+", text.replace("\\", ""))
        assert "## Provenance" in (path / "report.md").read_text()


# --- sweeps -------------------------------------------------------------------------------------------------


def swept(tmp_path: Path, *seeds: Sequence[Mapping[str, Any]]) -> Any:
    """Compare runs of one method, each with the training given."""
    for seed, steps in enumerate(seeds):
        whole(tmp_path / str(seed), steps)
    about: Any = {"file": "f", "method": "optimas", "status": "finished", "reason": ""}
    states: Any = [{**about, "seed": seed, "run": str(seed)} for seed in range(len(seeds))]
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

    def test_broken_records_do_not_end_a_sweep(self, tmp_path: Path) -> None:
        whole(tmp_path / "x", [record()])
        facts = swept(tmp_path / "sweep", [record()])
        with (tmp_path / "sweep" / "0" / "memory.jsonl").open("a") as file:
            file.write("broken\n")
        states = [{key: run[key] for key in SweepRun.__annotations__} for run in facts["runs"]]
        again = compare(cast("Any", states), tmp_path / "sweep", facts["budgets"])
        assert again["rows"][1]["training"] is None
        assert again["rows"][1]["test"] == facts["rows"][1]["test"]
