"""Audit the installed packages for known vulnerabilities, and report if the audit was not possible.

pip-audit needs a vulnerability service. Some package indexes answer its requests without
vulnerability data, and a machine may be offline. The script therefore first queries a package with
a known vulnerability. If that is not reported, the audit is skipped with a message, and fails only
with --require.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NotRequired, TypedDict

KNOWN = "jinja2==2.4.1"  # CVE-2014-1402 and others
SERVICES = ("pypi", "osv")


class Vulnerability(TypedDict):
    """Vulnerability in a report."""

    id: str


class Package(TypedDict):
    """Package in a report; ``skip_reason`` replaces ``vulns`` if it was not checked."""

    name: str
    version: NotRequired[str]
    vulns: NotRequired[list[Vulnerability]]
    skip_reason: NotRequired[str]


class Report(TypedDict):
    """Output of pip-audit."""

    dependencies: list[Package]


Run = Callable[[Sequence[str], float], Report | None]


def run(arguments: Sequence[str], seconds: float) -> Report | None:
    """Run pip-audit; return its report, or None if there is none within the time limit."""
    options = ["--format", "json", "--progress-spinner", "off", "--timeout", "10"]
    command = [sys.executable, "-m", "pip_audit", *options, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
        report: Report | None = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        return None
    return report


def vulnerable(report: Report | None) -> dict[str, list[str]]:
    """Return the vulnerabilities of a report by package."""
    rows = report["dependencies"] if isinstance(report, dict) else []
    return {
        f"{row['name']} {row['version']}": [found["id"] for found in row["vulns"]]
        for row in rows
        if row.get("vulns")
    }


def find_service(ask: Run) -> str | None:
    """Return a service with vulnerability data, or None if none answers."""
    with tempfile.TemporaryDirectory() as folder:
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text(KNOWN + "\n", encoding="utf-8")
        options = ["--no-deps", "--disable-pip", "--requirement", str(requirements)]
        return next(
            (
                s
                for s in SERVICES
                if vulnerable(ask(["--vulnerability-service", s, *options], 60.0))
            ),
            None,
        )


def audit(ask: Run, accepted: Mapping[str, str], *, require: bool) -> tuple[int, str]:
    """Audit the environment; return the exit code and the text to print.

    Args:
        ask: runs pip-audit.
        accepted: accepted vulnerabilities, each with the reason.
        require: whether to fail if the audit is not possible.
    """
    service = find_service(ask)
    report = (
        ask(["--vulnerability-service", service, "--local", "--skip-editable"], 900.0)
        if service
        else None
    )
    if report is None:
        why = (
            "no vulnerability service answers"
            if service is None
            else f"{service} gave no report in time"
        )
        return int(require), f"audit: SKIPPED: {why}; the installed packages were not checked"
    skipped = sum("skip_reason" in row for row in report["dependencies"])
    left = {
        package: sorted(set(found) - set(accepted))
        for package, found in vulnerable(report).items()
        if set(found) - set(accepted)
    }
    lines = [f"audit: {package}: {', '.join(found)}" for package, found in left.items()]
    checked = len(report["dependencies"]) - skipped
    lines.append(
        f"audit: {checked} packages checked by {service}, {skipped} not on the index, {len(left)} vulnerable"
    )
    return int(bool(left)), "\n".join(lines)


def main() -> None:
    """Audit this environment; exit with 1 if a package is vulnerable."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--require", action="store_true", help="fail if the audit is not possible")
    project = Path(__file__).parents[1] / "pyproject.toml"
    settings = tomllib.loads(project.read_text("utf-8")).get("tool", {}).get("audit", {})
    code, text = audit(run, settings.get("accepted", {}), require=parser.parse_args().require)
    print(text)
    sys.exit(code)


if __name__ == "__main__":
    main()
