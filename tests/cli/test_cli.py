"""The commands as a user meets them: what they print where, their exit codes, and no traceback ever."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from benchmarks.measure.interchange.chat_server import ChatServer
from compound.cli import app
from compound.cli import entry_point as module
from compound.graph.configuration import Configuration, load
from processes import python

ROOT = Path(__file__).parents[2]


COMMAND = "from compound.cli import main; main()"


def command(*arguments: str, **environment: str) -> list[Any]:
    """Return what `subprocess` needs to run a command for real."""
    return [
        [sys.executable, "-c", COMMAND, *arguments],
        {**os.environ, "PYTHONPATH": str(ROOT), **environment},
    ]


CHOICE = "method auto: search, since evaluating single components would save little"
OK = f"game.yaml: ok: 1 node, 2 parameters to tune\n  note: {CHOICE}\n"


def test_python_m_compound_is_the_command(game: Path) -> None:
    ran = python("-m", "compound", "check", "game.yaml")
    assert (ran.returncode, ran.stdout) == (0, OK)


def test_check_says_ok_and_names_examples_in_several_splits(game: Path, cli: Any) -> None:
    ran = cli("check", "game.yaml")
    assert (ran.code, ran.out) == (0, OK)
    facts = json.loads(cli("check", "game.yaml", "--json").out)
    assert len(facts.pop("warnings")) == 6
    assert facts == {
        "file": "game.yaml",
        "system": "game",
        "nodes": ["guesser"],
        "parameters": ["guesser.aim", "guesser.mode"],
        "method": "auto",
        "notes": [CHOICE],
        "not_checked": [],
        "problems": [],
    }


def test_check_tells_every_mistake_with_its_place(game: Path, cli: Any) -> None:
    text = (game / "game.yaml").read_text()
    bad = (
        text.replace("float: [0, 4]", "float: [4, 0]")
        .replace("seed: 3", "sed: 3")
        .replace("$x}", "$z}")
    )
    (game / "bad.yaml").write_text(bad)
    ran = cli("check", "bad.yaml")
    assert ran.code == 2
    places = [re.match(r"bad\.yaml:(\d+):\d+: ", line) for line in ran.err.splitlines()]
    assert [int(place[1]) for place in places if place] == [5, 6, 11]
    assert "did you mean 'seed'" in ran.err
    assert "names neither an input nor a node; possible: $guesser, $x" in ran.err


def test_no_import_refuses_a_file_that_names_code(game: Path, cli: Any) -> None:
    (game / "game.py").write_text("raise SystemExit('it ran')")
    ran = cli("check", "game.yaml", "--no-import")
    assert ran.code == 2
    assert "it ran" not in ran.out + ran.err
    assert re.search(r"game\.yaml:5:\d+: .*game:guess", ran.err)


def test_run_prints_the_output_and_json_prints_the_trace(game: Path, cli: Any) -> None:
    assert cli("run", "game.yaml", "x=4").out == "y: 6.0\n"
    trace = json.loads(cli("run", "game.yaml", "x=4", "--json").out)
    assert trace["outputs"] == {"y": 6.0}
    assert [call["address"] for call in trace["calls"]] == ["guesser"]


def test_a_failed_run_exits_1_and_says_where(game: Path, cli: Any) -> None:
    ran = cli("run", "game.yaml", "x=-1")
    assert ran.code == 1
    assert "guesser" in ran.err
    assert "no negative numbers" in ran.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x"], "'x' must be NAME=VALUE"),
        (["x=1", "x=2"], "input 'x' is given twice"),
        (["z=1"], "error: unknown input 'z'; possible: x\n"),
        (["xx=1"], "error: unknown input 'xx'; did you mean 'x'?\n"),
        (["x=one"], "input 'x' must be int, but got 'one'"),
        ([], "x"),
        (["x=1", "--set", "optimize.sed=1"], "did you mean 'seed'"),
        (["x=1", "--set", "nonsense"], "--set nonsense: must be KEY=VALUE"),
        (["x=1", "--config", "nowhere.json"], "nowhere.json"),
        (["x=1", "--frobnicate"], "No such option"),
    ],
)
def test_bad_arguments_exit_2(game: Path, cli: Any, arguments: list[str], message: str) -> None:
    ran = cli("run", "game.yaml", *arguments)
    assert ran.code == 2
    assert message in ran.err


def test_evaluate_reports_mean_interval_and_cost(game: Path, cli: Any) -> None:
    ran = cli(
        "evaluate",
        "game.yaml",
        "--limit",
        "10",
        "--set",
        'components.guesser.function.mode.value="close"',
    )
    assert ran.code == 0
    assert re.match(
        r"valid: \w+ 0\.\d{4} \[0\.\d{4}, \d\.\d{4}\] on 10 examples, 0 failed, 0 calls, 0 tokens",
        ran.out,
    )
    found = json.loads(
        cli("evaluate", "game.yaml", "--split", "train", "--limit", "8", "--no-cache", "--json").out
    )
    keys = ["mean", "low", "high", "n", "failed", "failures", "calls", "tokens", "cost", "rows"]
    assert found.keys() >= set(keys)
    assert found["n"] == len(found["rows"]) == 8
    assert found["mean"] == pytest.approx(sum(score for _, score in found["rows"]) / 8)


def test_a_demand_that_is_not_met_exits_1(game: Path, cli: Any) -> None:
    ran = cli("evaluate", "game.yaml", "--min-score", "0.99")
    assert ran.code == 1
    assert re.search(r"the mean score 0\.\d+ is below --min-score 0\.99", ran.err)
    ran = cli("evaluate", "game.yaml", "--min-score", "0.99", "--json")
    found = json.loads(ran.out)
    assert (ran.code, found["passed"], found["reason"] in ran.err) == (1, False, True)
    assert cli("evaluate", "game.yaml", "--min-score", "nan").code == 2
    ran = cli("evaluate", "game.yaml", "--min-score", "0.01", "--json")
    assert (ran.code, json.loads(ran.out)["passed"], json.loads(ran.out)["reason"]) == (0, True, "")


def test_cache_results_are_told(tmp_path: Path, cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPOUND_CACHE", str(tmp_path / "cache"))
    (tmp_path / "rows.jsonl").write_text(
        "".join(f'{{"q": "{i}?", "a": "yes"}}\n' for i in range(3))
    )
    with ChatServer(lambda _: "yes") as server:
        (tmp_path / "s.yaml").write_text(
            "system: s\nlm: m\ninputs: {q: str}\ncomponents: {a: {llm: {}, in: {q: $q}}}\noutputs: {a: $a}\n"
            f"engines: {{m: {{openai: {{model: m, api_base: '{server.url}'}}}}}}\n"
            "data: {path: rows.jsonl, split_by: {valid: 1.0}}\nmetric: {exact_match: {output: a, gold: a}}\n"
        )
        first = cli("evaluate", str(tmp_path / "s.yaml"))
        again = cli("evaluate", str(tmp_path / "s.yaml"))
        document = json.loads(cli("evaluate", str(tmp_path / "s.yaml"), "--json").out)
    assert (tmp_path / "cache").is_dir()  # which a job of a CI keeps
    assert "3 calls, " in first.out
    assert "0 calls, 3 from the cache, 0 tokens" in again.out
    assert (document["calls"], document["cached_calls"]) == (0, 3)


def test_the_commands_of_the_ci_page_do_what_it_says(game: Path, cli: Any) -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "sweeps.md").read_text(encoding="utf-8")
    workflow = yaml.safe_load(page.partition("```yml")[2].partition("```")[0])
    steps = [step["run"] for step in workflow["jobs"]["evaluate"]["steps"] if "run" in step]
    commands = [shlex.split(step) for step in steps if step.startswith("compound ")]
    assert [command[1] for command in commands] == ["check", "evaluate", "evaluate"]
    shutil.copy(game / "game.yaml", game / "system.yaml")
    for score, code in (("0.8", 1), ("0.0", 0)):
        codes = []
        for command in commands:
            given = [score if word == "0.8" else word for word in command[1:]]
            ran = cli(*(given[: given.index(">")] if ">" in given else given))
            codes.append(ran.code)
            if "--json" in given:
                assert json.loads(ran.out)["n"] > 0
        assert codes == [0, code, 0]


def test_what_evaluate_cannot_do_exits_2(game: Path, cli: Any) -> None:
    assert (
        "unknown split; possible: dev, test, train, valid"
        in cli("evaluate", "game.yaml", "--split", "dvalid").err
    )
    row = (game / "rows.jsonl").read_text().splitlines()
    (game / "rows.jsonl").write_text("\n".join([*row[:5], "{broken", *row[5:]]))
    ran = cli("evaluate", "game.yaml")
    assert ran.code == 2
    assert "rows.jsonl:6: not JSON" in ran.err
    (game / "rows.jsonl").unlink()
    assert cli("evaluate", "game.yaml").code == 2


def test_mostly_failing_runs_exit_1_with_the_reason(game: Path, cli: Any) -> None:
    rows = [{"id": str(i), "x": -1, "target": 0.0} for i in range(60)]
    (game / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    ran = cli("evaluate", "game.yaml")
    assert ran.code == 1
    assert "no negative numbers" in ran.err


@pytest.mark.slow
def test_optimize_finds_the_number_and_another_process_can_use_it(game: Path, cli: Any) -> None:
    ran = cli("optimize", "game.yaml", "--json")
    assert ran.code == 0, ran.err
    result = json.loads(ran.out)
    for name in ("before", "after", "test_before", "test_after"):
        assert set(result[name]) == {"mean", "low", "high", "n", "failed"}
    assert {"system_runs", "calls", "tokens", "seconds", "accepted", "configuration"} <= set(result)
    assert result["accepted"] >= 1
    assert result["test_after"]["low"] > result["test_before"]["mean"]
    assert "validation score of the start: " in ran.err
    best = game / "runs" / "game" / "best.json"
    assert dict(load(best)) == result["configuration"]
    used = python("-c", COMMAND, "run", "game.yaml", "x=4", "--config", str(best), cwd=game)
    before, after = 6.0, float(used.stdout.removeprefix("y: "))
    assert abs(after - 8.0) < abs(before - 8.0)


@pytest.mark.slow
def test_a_finished_run_wants_new_and_reports_can_be_written_again(game: Path, cli: Any) -> None:
    assert "best configuration" in cli("optimize", "game.yaml", "--quiet").out
    again = cli("optimize", "game.yaml")
    assert again.code == 2
    assert "--new" in again.err
    assert cli("optimize", "game.yaml", "--new", "--quiet").code == 0
    assert sorted(p.name for p in (game / "runs").iterdir()) == ["game", "game-2"]
    other = cli("optimize", "game.yaml", "--set", "optimize.seed=4")
    assert other.code == 2
    (game / "runs/game/report.html").unlink()
    assert "report.html" in cli("runs", "report", "runs/game").out
    assert (game / "runs/game/report.html").is_file()
    assert json.loads(cli("runs", "report", "runs/game", "--json").out)["system"] == "game"
    listed = cli("runs", "list").out
    assert listed.count("finished") == 2
    assert [row["run"] for row in json.loads(cli("runs", "list", "--json").out)] == [
        "runs/game",
        "runs/game-2",
    ]


def test_a_dry_run_estimates_and_leaves_nothing(game: Path, cli: Any) -> None:
    found = json.loads(cli("optimize", "game.yaml", "--dry-run", "--json").out)
    assert found["system_runs"]["total"] >= 400
    assert found["plan"]["decisions"] >= 1
    assert not (game / "runs").exists()


def test_optimize_needs_data_and_a_metric(game: Path, cli: Any) -> None:
    text = (game / "game.yaml").read_text()
    (game / "bare.yaml").write_text(text[: text.index("data:")])
    ran = cli("optimize", "bare.yaml")
    assert ran.code == 2
    assert "bare.yaml:1:1: optimize needs `data:`" in ran.err
    assert "needs `metric:`" in ran.err


@pytest.mark.slow
def test_ctrl_c_saves_and_the_same_command_goes_on(game: Path, cli: Any) -> None:
    expected = json.loads(cli("optimize", "game.yaml", "--json", "--run", "whole").out)
    arguments, environment = command("optimize", "game.yaml", GAME_SECONDS="0.02")
    running = subprocess.Popen(
        arguments,
        env=environment,
        cwd=game,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    events = game / "runs" / "game" / "events.jsonl"
    until = time.monotonic() + 120
    while (
        not (events.exists() and events.read_text().count("\n") >= 2) and time.monotonic() < until
    ):
        time.sleep(0.02)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=120)
    assert running.returncode == 130, err
    assert "stopping after this step" in err
    assert "Traceback" not in err
    assert cli("runs", "list").out.count("unfinished") == 1
    resumed = json.loads(cli("optimize", "game.yaml", "--json").out)
    for key in ("configuration", "before", "after", "test_after", "accepted", "system_runs"):
        assert resumed[key] == expected[key]


def test_graph_draws_in_three_ways(game: Path, cli: Any) -> None:
    assert "guesser: function(x=$x)" in cli("export", "game.yaml", "--to", "text").out
    assert cli("export", "game.yaml", "--to", "mermaid").out.startswith("flowchart LR")
    assert "<svg" in cli("export", "game.yaml", "--to", "svg").out
    assert cli("export", "game.yaml", "--to", "svgg").code == 2


def test_schema_is_a_schema_and_models_are_listed(cli: Any) -> None:
    assert json.loads(cli("check", "--schema").out)["type"] == "object"
    assert "smollm2" in cli("models", "list").out
    assert cli("models", "get", "smollm3").code == 2


def test_the_version_is_told(cli: Any) -> None:
    assert re.fullmatch(r"compound \d+\.\d+\.\d+.*\n", cli("--version").out)


@pytest.mark.parametrize(
    "name",
    [
        *("optimize", "sweep", "evaluate", "run", "check", "export", "runs list"),
        *("runs report", "runs trace", "runs track", "runs verify"),
    ],
)
def test_every_command_has_help_with_an_example(name: str, cli: Any) -> None:
    ran = cli(*name.split(), "--help")
    assert ran.code == 0
    assert f"compound {name}" in ran.out.split("Example")[1]


def test_a_defect_is_told_in_one_line_and_debug_shows_it(
    game: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: dict[str, Any] = {}
    source = "def broken(*_, **__):\n    raise ZeroDivisionError('oops')\n"
    exec(compile(source, "<no file>", "exec"), held)  # a function of no file is no user's
    monkeypatch.setattr("compound.report.graph.draw", held["broken"])
    ran = cli("export", "game.yaml", "--to", "text")
    assert ran.code == 1
    assert ran.err.startswith("error: ZeroDivisionError: oops\nhint: this is a bug in compound")
    monkeypatch.setattr(sys, "argv", ["compound", "--debug", "export", "game.yaml", "--to", "text"])
    with pytest.raises(ZeroDivisionError):
        module.main()


def test_an_error_that_nothing_else_explains_names_the_line_of_a_users_code(
    game: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("compound.report.graph.draw", broken)
    ran = cli("export", "game.yaml", "--to", "text")
    assert ran.code == 1
    line = broken.__code__.co_firstlineno + 1
    place = f"{__file__}:{line}"
    assert (
        ran.err == f"error: ZeroDivisionError: oops ({place})\nhint: --debug shows the traceback\n"
    )


@pytest.mark.usefixtures("without_reports")
def test_an_optimization_starts_from_a_configuration(game: Path, cli: Any) -> None:
    Configuration({"guesser.aim": 1.75, "guesser.mode": "far"}).save(game / "start.json")
    small = (
        "--set",
        "optimize.budget.system_runs=70",
        "--set",
        "optimize.valid_size=20",
        "--quiet",
    )
    assert cli("optimize", "game.yaml", "--config", "start.json", "--run", "warm", *small).code == 0
    assert (
        json.loads((game / "runs" / "warm" / "config.json").read_text())["start"]["guesser.aim"]
        == 1.75
    )


def test_a_second_interrupt_says_how_to_go_on(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(arguments: list[str], **_: object) -> None:
        raise SystemExit(130)

    monkeypatch.setattr("compound.cli.entry_point.app", interrupted)
    found = cli("optimize", "game.yaml")
    assert found.code == 130
    assert "interrupted; run the same command to resume" in found.err


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the operating system refuse a path with an error, whoever the user is: root may do everything."""

    def refuse(path: Path, number: int) -> None:
        opened, made = os.open, os.mkdir

        def open_refused(
            name: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
        ) -> int:
            above = "" if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
            if Path(above, os.fsdecode(name)).resolve() == path.resolve():
                raise OSError(number, os.strerror(number), name)
            return opened(name, flags, mode, dir_fd=dir_fd)

        def mkdir_refused(name: Any, *options: Any, **more: Any) -> None:
            if Path(name).resolve() == path.resolve():
                raise OSError(number, os.strerror(number), str(name))
            made(name, *options, **more)

        monkeypatch.setattr(os, "open", open_refused)
        monkeypatch.setattr(os, "mkdir", mkdir_refused)

    return refuse


@pytest.mark.parametrize(
    "number", [errno.EACCES, errno.EROFS, errno.EIO, errno.ESTALE, errno.EMFILE]
)
@pytest.mark.parametrize(
    ("place", "arguments"),
    [
        ("runs", ["optimize", "game.yaml", "--quiet"]),
        ("runs/done/config.json", ["optimize", "game.yaml", "--run", "done"]),
        ("runs/done/checkpoint.json", ["runs", "report", "runs/done"]),
        ("runs/done", ["optimize", "game.yaml", "--run", "done"]),
        ("runs/done", ["runs", "report", "runs/done"]),
        ("runs/done/events.jsonl", ["runs", "report", "runs/done"]),
        ("runs/done/best.json", ["run", "game.yaml", "--config", "runs/done/best.json", "x=1"]),
        ("runs", ["runs", "list"]),
        ("table", ["sweep", "game.yaml", "--methods", "random", "--run", "table"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_a_place_that_cannot_be_used_is_named_with_what_to_do(
    game: Path, cli: Any, refusing: Any, place: str, arguments: list[str], number: int
) -> None:
    """Regression test: a read-only or unreadable place was called a bug in compound."""
    done = game / "runs" / "done"
    if place.startswith("runs/") or arguments == ["runs", "list"]:
        done.mkdir(parents=True)
        for name in ("config.json", "checkpoint.json", "events.jsonl", "best.json"):
            if not (place.endswith("events.jsonl") and name == "checkpoint.json"):
                (done / name).write_text("{}")
    refusing(game / place, number)
    ran = cli(*arguments)
    assert ran.code == 2, (ran.out, ran.err)
    assert "bug in compound" not in ran.err
    assert place in ran.err
    assert os.strerror(number) in ran.err
    assert "hint: " in ran.err


def test_an_unreadable_run_does_not_hide_the_others(game: Path, cli: Any, refusing: Any) -> None:
    for name in ("first", "second"):
        (game / "runs" / name).mkdir(parents=True)
        (game / "runs" / name / "config.json").write_text(
            '{"system": "game", "optimize": {"method": "search", "seed": 0}}'
        )
    refusing(game / "runs" / "first", errno.EACCES)
    rows = json.loads(cli("runs", "list", "--json").out)
    assert [(row["run"], row["status"]) for row in rows] == [
        ("runs/first", "damaged"),
        ("runs/second", "unfinished"),
    ]
    assert "Permission denied" in rows[0]["result"]
    checked = cli("runs", "verify", "--json")
    assert checked.code == 1
    assert [bool(problems) for problems in json.loads(checked.out).values()] == [True, False]


def test_a_working_directory_that_is_gone_is_named(
    game: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = game / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    ran = cli("run", str(game / "game.yaml"), "x=1", "--config", "best.json")
    assert ran.code == 2
    assert "defect" not in ran.err


@pytest.mark.slow
def test_a_style_file_in_the_working_directory_does_not_style_figures(game: Path, cli: Any) -> None:
    """It could have LaTeX run on the texts of a run."""
    small = ("--set", "optimize.budget.system_runs=70", "--quiet")
    assert cli("optimize", "game.yaml", "--run", "styled", *small).code == 0
    arguments, environment = command("runs", "report", "runs/styled")

    def drawn() -> bytes:
        subprocess.run(arguments, env=environment, capture_output=True, check=True)
        return (game / "runs" / "styled" / "report.html").read_bytes()

    plain = drawn()
    (game / "matplotlibrc").write_text("text.usetex: True\nfont.size: 31\n")
    assert drawn() == plain


@pytest.mark.usefixtures("without_reports")
def test_runs_are_verified_by_command(game: Path, cli: Any) -> None:
    small = ("--set", "optimize.budget.system_runs=70", "--quiet")
    for name in ("first", "second"):
        assert cli("optimize", "game.yaml", "--run", name, *small).code == 0
    assert cli("runs", "verify") == (0, "runs/first: ok\nruns/second: ok\n", "")
    path = game / "runs" / "second" / "traces.jsonl"
    path.write_text(path.read_text().replace("1", "2", 1))
    ran = cli("runs", "verify")
    assert ran.code == 1
    assert (
        "runs/first: ok\nruns/second: 1 damaged\n  runs/second/traces.jsonl:1: it does not match"
        in ran.out
    )
    assert cli("runs", "verify", "runs/first").code == 0
    assert cli("runs", "verify", "runs/nowhere").code == 1


def test_failed_rows_are_run_again(game: Path, cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (game / "game.py").read_text()
    down = 'if x == 3 and os.environ.get("DOWN"):\n        raise ConnectionError("gone")\n    if x < 0:'
    (game / "game.py").write_text(text.replace("if x < 0:", down))
    monkeypatch.setenv("DOWN", "1")
    small = ("--set", "optimize.budget.system_runs=70", "--json", "--quiet")
    first = json.loads(cli("optimize", "game.yaml", *small).out)
    assert first["test_before"]["failed"] > 0
    monkeypatch.delenv("DOWN")
    ran = cli("optimize", "game.yaml", "--retry-failed", *small)
    assert ran.code == 0, ran.err
    again = json.loads(ran.out)
    assert (again["test_before"]["failed"], again["before"]) == (0, first["before"])
    assert again["configuration"] == first["configuration"]
    assert "--retry-failed" in cli("optimize", "game.yaml", "--run", "other", "--retry-failed").err


LABELLED = """
system: judged
lm: smollm2
inputs: {question: str}
components:
  answerer: {llm: {prompt: Answer.}, in: {question: $question}}
outputs: {answer: $answerer}
metric: {numeric_match: {output: answer, gold: gold}}
"""


def test_agreement_prints_kappa_and_checks_it(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(LABELLED)
    rows = [
        {"question": "?", "said": str(i % 3), "gold": i % 2, "human": int(i % 3 == i % 2)}
        for i in range(12)
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    command = [
        "agreement",
        str(tmp_path / "s.yaml"),
        str(tmp_path / "rows.json"),
        "--output",
        "answer=said",
    ]
    found = CliRunner().invoke(app, [*command, "--min-kappa", "0.9"])
    assert found.exit_code == 0, found.output
    assert found.output.startswith("numeric_match: kappa 1.00 [")
    found = CliRunner().invoke(app, [*command, "--json"])
    assert json.loads(found.output)["n"] == 12
    found = CliRunner().invoke(app, [*command, "--min-kappa", "1.1"])
    assert "is below --min-kappa 1.1" in found.stderr
    assert found.exit_code == 1


@pytest.mark.parametrize("name", ["../elsewhere", "/tmp/elsewhere"])
def test_the_name_of_a_run_stays_in_the_folder_of_runs(name: str, game: Path, cli: Any) -> None:
    ran = cli("optimize", "game.yaml", "--run", name)
    assert (ran.code, "must be a name; set another folder by --run-dir" in ran.err) == (2, True)
