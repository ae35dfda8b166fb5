"""`compound runs list`: a table that fits the terminal, of whatever lies in the folder."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from benchmarks.measure.studio import write_run
from processes import python
from studio_runs import unfinished

NAMES = ("atlas", "a-run-with-a-name-of-many-characters", "名前の長い実行", "odd\n\x1b[31mname")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in (*NAMES, "running", "damaged"):
        write_run(Path("runs", name), examples=20, candidates=2)
    unfinished(Path("runs", "running"), os.getppid())
    Path("runs", "damaged", "checkpoint.json").write_text("{")
    return tmp_path


@pytest.mark.parametrize(
    ("width", "heading"),
    [
        (100, "run state score gain method cost date"),
        (80, "run state score gain method cost date"),
        (60, "run state score gain"),
        (40, "run state score"),
    ],
)
def test_the_table_fits_a_terminal(
    folder: Path, cli: Any, monkeypatch: pytest.MonkeyPatch, width: int, heading: str
) -> None:
    monkeypatch.setattr("compound.cli.runs.width_of", lambda _: width)
    lines = cli("runs", "list").out.split("\n")
    assert cli("runs").out.split("\n") == lines
    assert lines[0].split() == heading.split()
    rows = lines[1 : 2 + len(NAMES) + 1]
    assert all(cell_len(line) <= width for line in rows)
    states = {line.split()[0]: line for line in rows}
    assert "running" in states["running"].split()[1]
    assert "finished" in states["atlas"]
    assert " → " in states["atlas"]
    assert lines[len(rows) + 1].startswith("damaged: runs/damaged/checkpoint.json")


def test_the_table_is_straight_in_ascii(folder: Path) -> None:
    ran = python("-m", "compound", "runs", "list", env={"PYTHONIOENCODING": "ascii"})
    lines = ran.stdout.split("\n")
    assert ran.stdout.isascii()
    assert "->" in lines[-3]
    assert {line.index("+0.") for line in lines if "->" in line} == {lines[0].index("gain")}


def test_a_folder_without_runs_says_so(tmp_path: Path, cli: Any) -> None:
    assert cli("runs", "list", "--dir", str(tmp_path)).out == f"no runs in {tmp_path}\n"
    assert cli("runs", "list", "--dir", str(tmp_path / "gone")).code == 0


def test_the_studio_refuses_a_file(folder: Path, cli: Any) -> None:
    found = cli("ui", "runs/atlas/config.json", "--port", "0", "--no-browser")
    assert (found.code, "is a file" in found.err) == (2, True)


def test_json_has_the_numbers_of_each_run(folder: Path, cli: Any) -> None:
    rows = {Path(row["run"]).name: row for row in json.loads(cli("runs", "list", "--json").out)}
    assert rows["atlas"]["gain"]["n"] == 20
    assert re.fullmatch(r"test 0\.\d+ -> 0\.\d+", rows["atlas"]["result"])
    assert {name: rows[name]["status"] for name in ("running", "damaged", "atlas")} == {
        "running": "running",
        "damaged": "damaged",
        "atlas": "finished",
    }
