"""Distributions contain the right files, and CI runs the Python versions that pyproject.toml declares."""

from __future__ import annotations

import re
import shutil
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from processes import python

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
NOT_SHIPPED = (
    ".git",
    ".venv*",
    ".*_cache",
    "__pycache__",
    "build",
    "dist",
    "*.egg-info",
    ".compound",
    ".hypothesis",
)
SHIPPED = ("README.md", "CHANGELOG.md", "LICENSE", "Makefile", "constraints.txt", "pyproject.toml")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], set[str]]:
    """The file names in a source distribution, and in the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("built")
    shutil.copytree(ROOT, folder / "tree", symlinks=True, ignore=not_shipped)
    build("sdist", folder / "tree", folder)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        inside = {name.partition("/")[2] for name in file.getnames()}
        file.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    build("wheel", source, folder)
    (wheel,) = folder.glob("*.whl")
    return inside, set(zipfile.ZipFile(wheel).namelist())


def not_shipped(folder: str, names: list[str]) -> set[str]:
    """Return the names that git ignores: run directories at the top, and others at any depth."""
    top = {"runs"} if Path(folder) == ROOT else set()
    return shutil.ignore_patterns(*NOT_SHIPPED)(folder, names) | top


def build(what: str, source: Path, output: Path) -> None:
    code = f"from setuptools import build_meta; build_meta.build_{what}({str(output)!r})"
    ran = python("-c", code, cwd=source)
    assert ran.returncode == 0, ran.stderr


def below(folder: str, pattern: str = "*") -> set[str]:
    found = (ROOT / folder).rglob(pattern)
    return {str(p.relative_to(ROOT)) for p in found if p.is_file() and "__pycache__" not in p.parts}


@pytest.mark.slow
def test_the_source_distribution_holds_documentation_tests_and_constraints(
    built: tuple[set[str], set[str]],
) -> None:
    inside, _ = built
    wanted = {
        *SHIPPED,
        *below("docs"),
        *below("tests", "*.py"),
        *below("tests", "*.yaml"),
        *below("benchmarks", "*.yaml"),
    }
    wanted |= below("components", "*.py") | below("optimizers", "*.py") | below("rewards", "*.py")
    assert wanted - inside == set()


def test_the_wheel_holds_every_module_and_no_tests(built: tuple[set[str], set[str]]) -> None:
    _, inside = built
    own = {path for path in below("compound", "*.py") if not path.startswith(LINKED)}
    linked = {f"compound/{path}" for folder in FOLDERS for path in below(folder, "*.py")}
    assert (own | linked) - inside == set()
    templates = below("compound/report", "*.jinja") | {"compound/report/page.html"}
    templates |= below("compound/report", "*.mplstyle")
    assert {"compound/py.typed", *templates} <= inside
    assert not [
        n for n in inside if n.startswith(("tests/", "docs/", "benchmarks/", "compound/benchmarks"))
    ]


FOLDERS = ("components", "rewards", "optimizers")
LINKED = tuple(f"compound/{folder}/" for folder in FOLDERS)


def test_ci_runs_check_and_tests_on_every_python_that_is_declared() -> None:
    declared = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))
    job = workflow["jobs"]["test"]
    assert job["strategy"]["matrix"]["python"] == declared
    assert [step["run"] for step in job["steps"] if "run" in step] == ["make check", "make test"]


def test_every_tool_of_the_tests_is_pinned() -> None:
    pinned = {
        re.split(r"[=<>]", line)[0].lower()
        for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines()
        if line and not line.startswith("#")
    }
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [*extras["dev"], *extras["local"], *extras["search"], *extras["retrieval"]]
    names = {re.split(r"[\[=<>]", item)[0].lower() for item in wanted} - {
        "compound-systems",
        "types-pyyaml",
    }
    assert names - pinned == set()


def test_pre_commit_uses_the_pinned_version_of_ruff() -> None:
    text = (ROOT / ".pre-commit-config.yaml").read_text("utf-8")
    (pinned,) = re.findall(
        r"^ruff==(\S+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE
    )
    assert set(re.findall(r"ruff==([\d.]+)", text)) == {pinned}
