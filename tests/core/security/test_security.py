"""The threat table names tests that exist, and the scanners say what they did."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = ("compound", "components", "rewards", "optimizers", "benchmarks")


def rows() -> list[tuple[str, str, str]]:
    """Return the threat table: threat, defence, test."""
    found = []
    for line in (ROOT / "SECURITY.md").read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("|") and len(cells) == 3 and cells[0] not in {"threat", "---"}:
            found.append((cells[0], cells[1], cells[2]))
    return found


def names_in(file: Path) -> set[str]:
    """Return the names of the tests in a file, those in classes included."""
    tree = ast.parse(file.read_text("utf-8"))
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    return {node.name for node in ast.walk(tree) if isinstance(node, functions)}


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][:40])
def test_every_threat_has_a_defence_and_a_test_that_exists(row: tuple[str, str, str]) -> None:
    threat, defence, test = row
    named = re.findall(r"`([\w/]+/test_\w+\.py)::(test_\w+)`", test)
    assert threat
    assert defence
    assert named, f"{threat}: no test"
    for file, name in named:
        assert name in names_in(ROOT / "tests" / file), f"{file} has no test {name}"


def test_the_threat_table_is_read() -> None:
    assert len(rows()) >= 17


def test_every_finding_that_is_waved_through_has_a_reason() -> None:
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            for number, line in enumerate(file.read_text("utf-8").splitlines(), 1):
                if "nosec" in line:
                    assert re.search(r"# nosec B\d{3}  # \w.+", line), f"{file}:{number}"


@pytest.fixture(scope="module")
def audit() -> Any:
    made = importlib.util.spec_from_file_location("audit", ROOT / ".ci" / "audit.py")
    assert made is not None
    assert made.loader is not None
    module = importlib.util.module_from_spec(made)
    made.loader.exec_module(module)
    return module


def report(**found: list[str]) -> dict[str, Any]:
    """Return what pip-audit reports of packages and their vulnerabilities."""
    return {
        "dependencies": [
            {"name": name, "version": "1", "vulns": [{"id": one} for one in ids]}
            for name, ids in found.items()
        ]
    }


class Service:
    """pip-audit with these reports: of the package that is known to be vulnerable, and of the environment."""

    def __init__(self, known: Any, environment: Any) -> None:
        self.known, self.environment = known, environment
        self.asked: list[list[str]] = []

    def __call__(self, arguments: Sequence[str], seconds: float) -> Any:
        assert seconds <= 900
        self.asked.append(list(arguments))
        return self.known if "--requirement" in arguments else self.environment


KNOWN = report(jinja2=["CVE-2014-1402"])


@pytest.mark.parametrize(
    "known", [None, report(jinja2=[]), {"dependencies": [{"name": "jinja2", "skip_reason": "?"}]}]
)
def test_an_audit_that_misses_a_known_vulnerability_is_no_pass(audit: Any, known: Any) -> None:
    service = Service(known, report(a=[]))
    code, text = audit.audit(service, {}, require=False)
    assert code == 0
    assert "SKIPPED" in text
    assert "not checked" in text
    assert all(
        "--requirement" in asked for asked in service.asked
    )  # nothing else is asked then: it would take long
    assert audit.audit(service, {}, require=True)[0] == 1


def test_an_audit_without_a_report_is_skipped_not_passed(audit: Any) -> None:
    code, text = audit.audit(Service(KNOWN, None), {}, require=False)
    assert (code, "SKIPPED" in text) == (0, True)


def test_a_vulnerable_package_fails_the_audit_unless_it_is_accepted(audit: Any) -> None:
    service = Service(KNOWN, report(fine=[], bad=["GHSA-1", "GHSA-2"]))
    code, text = audit.audit(service, {"GHSA-1": "not reachable"}, require=False)
    assert code == 1
    assert "bad 1: GHSA-2" in text
    assert "GHSA-1" not in text
    code, text = audit.audit(service, {"GHSA-1": "a", "GHSA-2": "b"}, require=False)
    assert code == 0
    assert "2 packages checked" in text


def test_a_service_that_hangs_is_left_in_time(audit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: Any, timeout: float, **__: Any) -> None:
        raise audit.subprocess.TimeoutExpired("pip-audit", timeout)

    monkeypatch.setattr(audit.subprocess, "run", hang)
    assert audit.run(["--local"], 1.0) is None


def test_the_checks_run_the_scanners() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    check = makefile.partition("\ncheck:")[2].partition("\n\n")[0]
    assert "$(BIN)/bandit" in check
    assert ".ci/audit.py" in check
