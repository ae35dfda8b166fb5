"""The package of example extensions: installed like by a user, used by name, and tested by its own tests."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from processes import python

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "docs" / "examples" / "plugin"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the installed package, and next to it a copy of its files."""
    folder = tmp_path_factory.mktemp("plugin")
    shutil.copytree(
        PLUGIN, folder / "source", ignore=shutil.ignore_patterns("build", "*.egg-info", "runs")
    )
    install = ["install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    arguments = ("-m", "pip", *install, "--target", str(folder / "site"), ".")
    ran = python(*arguments, cwd=folder / "source")
    assert ran.returncode == 0, ran.stderr
    return folder


def run(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(installed / "site")])
    return python("-m", *arguments, cwd=installed / "source", env={"PYTHONPATH": path})


@pytest.mark.slow
def test_the_command_lists_its_extensions(installed: Path) -> None:
    found = json.loads(run(installed, "compound", "check", "--extensions", "--json").stdout)
    own = [row for row in found if row["package"] == "compound-example"]
    assert {(row["group"], row["name"]) for row in own} == {
        ("components", "template"),
        ("engines", "echo"),
        ("methods", "top_share"),
        ("metrics", "brevity"),
        ("optimizers", "hill_climb"),
    }
    assert [row["problem"] for row in own] == [""] * 5


@pytest.mark.slow
def test_a_file_uses_them(installed: Path) -> None:
    ran = run(installed, "compound", "optimize", "system.yaml", "--run", "one", "--json", "--quiet")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["configuration"]["question_template.text"] == "{}"
    assert found["test_after"]["mean"] > found["test_before"]["mean"] + 0.4
    swept = (
        "sweep",
        "system.yaml",
        "--methods",
        "hill_climb",
        "--no-controls",
        "--json",
        "--quiet",
    )
    ran = run(installed, "compound", *swept)
    assert [each["status"] for each in json.loads(ran.stdout)["runs"]] == ["finished"], ran.stderr


def test_an_unknown_setting_is_reported_at_its_place(installed: Path) -> None:
    ran = run(installed, "compound", "check", "system.yaml", "--set", "optimize.hill_climb.stepp=1")
    assert ran.returncode == 2
    assert "optimize.hill_climb.stepp: unknown key; did you mean 'step'?" in ran.stderr


@pytest.mark.slow
def test_its_own_tests_pass(installed: Path) -> None:
    ran = run(installed, "pytest", "-q", "-p", "no:cacheprovider", "tests")
    assert ran.returncode == 0, ran.stdout
