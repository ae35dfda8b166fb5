"""Sweeps: what the table holds, what is skipped, resumed, refused and reported, as a library and as a command."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from compound.api.result import read_result
from compound.api.sweeps.runs import Stopper
from compound.api.sweeps.sweep import plan, sweep
from compound.core.errors import DeclarationError, RunDirectoryError
from compound.evaluation.statistics import UNIT, mean_interval
from compound.optimization.runs.recorder import Interrupted
from compound.report.sweep import pooled, sweep_page, sweep_summary
from compound.yaml import load

pytestmark = pytest.mark.usefixtures("without_reports")

GAME = Path(__file__).parents[1] / "files" / "game"
SETS = [("optimize.budget.system_runs", "120"), ("optimize.optimas.backbone.model", "none")]


@pytest.fixture
def broken(game: Path) -> Path:
    """A further system beside the game, whose rows its code refuses."""
    rows = [json.loads(line) for line in (game / "rows.jsonl").read_text().splitlines()]
    (game / "bad.jsonl").write_text("\n".join(json.dumps({**row, "x": -1}) for row in rows))
    text = (game / "game.yaml").read_text()
    (game / "broken.yaml").write_text(text.replace("rows.jsonl", "bad.jsonl"))
    return game


def run(
    methods: str = "search,random", seeds: tuple[int, ...] = (0, 1), *names: str, **how: Any
) -> Any:
    """Run a sweep of some files into the folder ``out``."""
    folder = Path(how.pop("folder", "out"))
    programs = [load(Path(n), overrides=how.pop("sets", SETS)) for n in names or ("game.yaml",)]
    return sweep(plan(programs, methods.split(","), seeds, folder), folder, **how)


def timeless(value: Any) -> Any:
    """Return facts without what a clock says."""
    if isinstance(value, Mapping):
        return {key: timeless(item) for key, item in value.items() if key != "seconds"}
    return [timeless(item) for item in value] if isinstance(value, list) else value


def row(facts: Mapping[str, Any], method: str) -> Any:
    (found,) = [r for r in facts["rows"] if r["method"] == method]
    return found


class TestPooled:
    def test_the_wider_interval_is_given_whichever_it_is(self) -> None:
        apart = pooled([{"a": 0.0, "b": 0.0}, {"a": 1.0, "b": 1.0}])
        assert apart is not None
        assert (apart["mean"], apart["over"]) == (0.5, "seeds")
        expected = mean_interval([0.0, 1.0])
        assert apart["low"] == pytest.approx(expected.low)
        assert apart["high"] == pytest.approx(expected.high)
        alike = pooled([{"a": 0.0, "b": 1.0}] * 5)
        assert alike is not None
        assert (alike["mean"], alike["over"], alike["seeds"], alike["examples"]) == (
            0.5,
            "examples",
            5,
            2,
        )
        assert alike["high"] == pytest.approx(mean_interval([0.0, 1.0]).high)

    def test_one_number_has_no_interval_and_none_is_nothing(self) -> None:
        found = pooled([{"a": 0.5}])
        assert found is not None
        assert (found["mean"], found["low"], found["high"], found["over"]) == (
            0.5,
            None,
            None,
            None,
        )
        assert pooled([{}, {}]) is None

    def test_three_seeds_have_a_spread(self) -> None:
        """Means 0.25, 0.5 and 0.75: deviations of 0.25 from 0.5, so the variance is 2 * 0.0625 / 2."""
        seeds = [{"a": 0.0, "b": 0.5}, {"a": 0.5, "b": 0.5}, {"a": 1.0, "b": 0.5}]
        found = pooled(seeds)
        assert found is not None
        assert found["spread"] == {"sd": pytest.approx(0.25), "low": 0.25, "high": 0.75}
        two = pooled(seeds[:2])
        assert two is not None
        assert two["spread"] is None

    def test_the_interval_of_a_pool_stays_within_the_range_of_the_metric(self) -> None:
        """Regression test: Student's limits of accuracies close to 1 lay above 1."""
        for scores in (
            [{"a": 0.9, "b": 1.0}, {"a": 1.0, "b": 1.0}],
            [{"a": 0.4, "b": 1.0, "c": 1.0}],
        ):
            found: Any = pooled(scores, UNIT)
            assert 0 <= found["low"] < found["mean"] < found["high"] <= 1
        equal: Any = pooled([{"a": 1.0}, {"a": 1.0}], UNIT)
        assert (equal["over"], equal["high"]) == ("examples", 1.0)
        assert 0 < equal["low"] < 0.05


@pytest.mark.slow
def test_the_table_holds_what_the_runs_found(game: Path) -> None:
    facts = run()
    results = {
        (method, seed): read_result(game / "out" / "game" / method / str(seed))
        for method in ("search", "random")
        for seed in (0, 1)
    }
    for method in ("search", "random"):
        found, both = row(facts, method), [results[method, seed] for seed in (0, 1)]
        tests, gains = (
            [r.test_after.mean for r in both if r.test_after],
            [r.test_gain for r in both],
        )
        assert found["test"]["mean"] == pytest.approx(sum(tests) / 2)
        assert found["gain"]["mean"] == pytest.approx(sum(gain.mean for gain in gains if gain) / 2)
        assert (found["test"]["seeds"], found["test"]["examples"]) == (2, 19)
        assert found["accepted"] == sum(r.accepted for r in both)
        for name in ("system_runs", "test_runs", "calls"):
            assert found[name] == pytest.approx(sum(r.spent[name] for r in both) / 2)
    before = [results["search", seed].test_before for seed in (0, 1)]
    assert row(facts, "unoptimized")["test"]["mean"] == pytest.approx(
        sum(b.mean for b in before if b) / 2
    )
    assert [r["method"] for r in facts["rows"]] == ["unoptimized", "search", "random"]
    assert {(r["method"], r["seed"]): r["status"] for r in facts["runs"]} == dict.fromkeys(
        results, "finished"
    )
    assert json.loads((game / "out" / "sweep.json").read_text()) == facts
    page = (game / "out" / "sweep.md").read_text()
    assert page == sweep_page(facts)
    assert "| unoptimized | 2 × 19 |" in page
    assert "Budget of each run: system runs 120." in page
    assert sweep_summary(facts).count("2 × 19") == 3


def test_the_page_shows_the_spread_of_three_seeds(game: Path) -> None:
    facts = run("random", (0, 1, 2), sets=[*SETS, ("optimize.test_size", "9")])
    means = [read_result(game / "out/game/random" / str(seed)).test_after for seed in (0, 1, 2)]
    spread = row(facts, "random")["test"]["spread"]
    assert spread["low"] == pytest.approx(min(mean.mean for mean in means if mean))
    assert spread["high"] == pytest.approx(max(mean.mean for mean in means if mean))
    page = (game / "out" / "sweep.md").read_text()
    assert f"sd {spread['sd']:.3f}, {spread['low']:.3f} to {spread['high']:.3f}" in page
    assert "spread over seeds" not in sweep_page(run("random", (0, 1), folder="two"))


def test_the_page_names_intervals_from_few_inputs(game: Path) -> None:
    facts = run("random", (0,), sets=[*SETS, ("optimize.test_size", "9")])
    assert "Intervals from fewer than 10 inputs: unoptimized, random." in sweep_summary(facts)
    assert "Intervals from fewer than 10 inputs: unoptimized, random." in sweep_page(facts)
    assert "fewer than 10 inputs:" not in sweep_page(run("random", (0,), folder="more"))


def test_a_method_that_cannot_work_on_a_system_is_no_failure(game: Path) -> None:
    facts = run("random,opro")
    statuses = {r["method"]: r["status"] for r in facts["runs"]}
    assert statuses == {"random": "finished", "opro": "not applicable"}
    assert (
        "game, opro, seeds 0, 1: not applicable: system 'game' has no parameter"
        in sweep_summary(facts)
    )
    assert not (game / "out/game/opro").exists()


@pytest.mark.slow
def test_finished_runs_are_skipped_and_a_lost_one_is_made_again(game: Path) -> None:
    expected = run()
    shutil.rmtree(game / "out/game/random/1")
    kept = game / "out/game/search/0/checkpoint.json"
    stamp = kept.stat().st_mtime_ns
    said: list[str] = []
    assert timeless(run(log=said.append)) == timeless(expected)
    assert sum("finished before" in line for line in said) == 3
    assert kept.stat().st_mtime_ns == stamp


@pytest.mark.slow
@pytest.mark.parametrize("where", ["out", "out/game/random/0"])
def test_a_stop_file_ends_it_and_the_same_call_goes_on(game: Path, where: str) -> None:
    expected = timeless(run(folder="whole"))
    begun = 0

    def listen(event: Mapping[str, Any]) -> None:
        nonlocal begun
        if event["event"] == "start":
            begun += 1
            if begun == 2:  # within the second run
                Path(where, "STOP").touch()

    with pytest.raises(Interrupted, match="progress is saved in out"):
        run(watch=lambda _: nullcontext(listen))
    assert not Path(where, "STOP").exists()
    partly = json.loads((game / "out" / "sweep.json").read_text())
    assert [r["status"] for r in partly["runs"]] == [
        "finished",
        "unfinished",
        "unfinished",
        "unfinished",
    ]
    assert "unfinished" in (game / "out" / "sweep.md").read_text()
    assert timeless(run()) == expected


def test_asked_to_stop_while_a_run_ends_it_begins_no_other(game: Path) -> None:
    stopper = Stopper()

    def listen(event: Mapping[str, Any]) -> None:
        if event["event"] == "done":
            stopper.stop()

    with pytest.raises(Interrupted):
        run(watch=lambda _: nullcontext(listen), stopper=stopper)
    statuses = [r["status"] for r in json.loads((game / "out" / "sweep.json").read_text())["runs"]]
    assert statuses == ["finished", "unfinished", "unfinished", "unfinished"]


def test_more_seeds_and_methods_are_added_and_every_run_has_the_same_budget(game: Path) -> None:
    run("random", (0,))
    said: list[str] = []
    facts = run("random,search", (0, 1), log=said.append)
    assert row(facts, "random")["seeds"] == [0, 1]
    assert "[1 of 4] game, random, seed 0: finished before" in said
    for method in ("search", "random"):
        for seed in (0, 1):
            config = json.loads(
                (game / "out/game" / method / str(seed) / "config.json").read_text()
            )
            settings = config["optimize"]
            assert (settings["method"], settings["seed"]) == (method, seed)
            assert settings["budget"]["system_runs"] == 120


def test_a_failing_file_is_reported_and_the_others_go_on(broken: Path, game: Path) -> None:
    facts = run("random", (0, 1), "broken.yaml", "game.yaml")
    statuses = [(r["file"], r["status"]) for r in facts["runs"]]
    assert statuses == [("broken", "failed"), ("game", "finished")] * 2
    assert all(
        "no negative numbers" in r["reason"] for r in facts["runs"] if r["status"] == "failed"
    )
    assert "broken, random, seeds 0, 1: failed: " in (game / "out" / "sweep.md").read_text()
    mine = [r for r in facts["rows"] if r["file"] == "broken"]
    assert all(r["test"] is None for r in mine)
    shutil.copy("rows.jsonl", "bad.jsonl")
    with pytest.raises(RunDirectoryError, match=r"changed: data\.test: different .*that folder"):
        run("random", (0, 1), "broken.yaml", "game.yaml")
    shutil.rmtree(game / "out/broken")
    repaired = run("random", (0, 1), "broken.yaml", "game.yaml")
    assert [r["status"] for r in repaired["runs"]] == ["finished"] * 4


def test_data_that_is_gone_fails_its_own_runs_alone(broken: Path, game: Path) -> None:
    (game / "bad.jsonl").unlink()
    facts = run("random", (0,), "broken.yaml", "game.yaml")
    assert [r["status"] for r in facts["runs"]] == ["failed", "finished"]


def test_a_defect_of_one_run_ends_no_other(game: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("compound.optimizers.baselines.random.RandomSearch.propose", broken)
    facts = run("random,search", (0,))
    assert [r["status"] for r in facts["runs"]] == ["failed", "finished"]
    assert ["ZeroDivisionError: oops" in r["reason"] for r in facts["runs"]] == [True, False]


@pytest.mark.parametrize(
    ("methods", "seeds", "message"),
    [
        ("search,serch", (0,), "no method 'serch'"),
        ("search,search", (0,), "at least one method, and no duplicates"),
        ("search", (1, 1), "at least one seed, and no duplicates"),
        ("search", (), "at least one seed"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_runs(
    game: Path, methods: str, seeds: tuple[int, ...], message: str
) -> None:
    with pytest.raises(DeclarationError, match=message):
        run(methods, seeds)
    assert not (game / "out").exists()


def test_files_of_one_name_are_refused(game: Path) -> None:
    with pytest.raises(DeclarationError, match="file name, and no duplicates, but got game, game"):
        run("search", (0,), "game.yaml", "game.yaml")


def test_runs_of_another_budget_do_not_stand_in_one_table(game: Path) -> None:
    run("random", (0,))
    with pytest.raises(RunDirectoryError, match=r"changed: optimize\.budget\.system_runs"):
        run("random,search", (0,), sets=[("optimize.budget.system_runs", "200"), SETS[1]])
    assert not (game / "out/game/search").exists()


def test_a_run_is_no_sweep(game: Path) -> None:
    run("random", (0,))
    with pytest.raises(RunDirectoryError, match="is a run, not a sweep"):
        run("random", (0,), folder="out/game/random/0")


def test_a_broken_run_directory_fails_alone(game: Path) -> None:
    run("random", (0, 1))
    (game / "out/game/random/0/checkpoint.json").write_text("{")
    facts = run("random", (0, 1))
    assert [r["status"] for r in facts["runs"]] == ["failed", "finished"]
    assert "checkpoint.json cannot be read" in facts["runs"][0]["reason"]


SMALL = ("--set", "optimize.budget.system_runs=120", "--run", "out")


@pytest.mark.slow
def test_the_command_shows_progress_and_the_table(game: Path, cli: Any) -> None:
    code, out, err = cli(
        "sweep", "game.yaml", "--methods", "search, random", "--seeds", "0,1", *SMALL
    )
    assert code == 0
    assert "1 file, 2 methods, 2 seeds: 4 runs, 4 finished." in out
    assert "table: out/sweep.md" in out
    assert "[2 of 4] game, random, seed 0" in err
    assert "validation score of the start: " in err
    listed = json.loads(cli("runs", "list", "--dir", "out", "--json").out)
    assert [row["run"] for row in listed] == [  # in the order in which they began
        f"out/game/{method}/{seed}" for seed in (0, 1) for method in ("search", "random")
    ]
    code, out, err = cli(
        "sweep",
        "game.yaml",
        "--methods",
        "search,random",
        "--seeds",
        "0,1",
        *SMALL,
        "--json",
        "--quiet",
    )
    assert code == 0
    assert json.loads(out) == json.loads((game / "out" / "sweep.json").read_text())
    assert err == "sweep directory: out\n"


def test_a_failed_run_exits_1_when_all_is_done(broken: Path, cli: Any) -> None:
    code, out, err = cli("sweep", "broken.yaml", "game.yaml", "--methods", "random", *SMALL)
    assert code == 1
    assert "2 runs, 1 failed, 1 finished" in out
    assert "broken, random, seed 0 failed: " in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["game.yaml", "--methods", "serch"], "did you mean 'search'"),
        (["game.yaml", "--methods", "search", "--seeds", "0,one"], "'one' is not a seed"),
        (["game.yaml", "--methods", "search", "--seeds", "-1"], "'-1' is not a seed"),
        (["gmae.yaml", "--methods", "search"], "gmae.yaml"),
        (["game.yaml", "--methods", ","], "at least one method"),
        (["game.yaml"], "--methods"),
    ],
)
def test_bad_arguments_do_nothing(game: Path, cli: Any, arguments: list[str], message: str) -> None:
    code, _, err = cli("sweep", *arguments)
    assert code == 2
    assert message in err
    assert not (game / "runs").exists()


def test_a_stopped_sweep_exits_130(game: Path, cli: Any) -> None:
    (game / "out").mkdir()
    (game / "out" / "STOP").touch()
    code, _, err = cli("sweep", "game.yaml", "--methods", "random", *SMALL)
    assert code == 130
    assert "run the same command to resume" in err
    assert cli("sweep", "game.yaml", "--methods", "random", *SMALL)[0] == 0


def test_a_method_of_ones_own_lies_beside_the_file(
    tmp_path: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the command is given."""
    folder = tmp_path / "folder"
    shutil.copytree(GAME, folder)
    rows = [{"id": str(i), "x": i % 9, "target": 2.0 * (i % 9)} for i in range(120)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "ways.py").write_text(
        "from compound.optimizers.methods import METHODS\nmine = METHODS['random']\n"
    )
    monkeypatch.chdir(tmp_path)
    found = cli("sweep", "folder/game.yaml", "--methods", "ways:mine", "--run", "table", *SMALL)
    assert found.code == 0, found.err
