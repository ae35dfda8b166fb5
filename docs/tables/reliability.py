"""Tables of runs with injected faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tables.data import markdown, results


def kills() -> str:
    """Tabulate the results of runs that were killed at random times and resumed, by workload."""

    def row(name: str, runs: Sequence[Mapping[str, Any]]) -> list[str]:
        same = [
            sum(run[what] for run in runs) for what in ("same_best", "same_events", "same_spent")
        ]
        return [
            name,
            str(len(runs)),
            str(sum(len(run["codes"]) - 1 for run in runs)),
            *(f"{count} of {len(runs)}" for count in same),
            str(sum(run["repeated"] for run in runs)),
        ]

    headings = [
        "workload",
        "runs",
        "times ended",
        "same configuration",
        "same decisions",
        "same spending",
        "requests made twice",
    ]
    return by("kills", "workload", headings, row)


def faults() -> str:
    """Tabulate the results of runs against a server with faults, by kind of fault."""

    def row(kind: str, runs: Sequence[Mapping[str, Any]]) -> list[str]:
        results = [run for run in runs if run["same_best"] is not None]
        ended = [run for run in runs if run["code"] == 0]
        covered = sum(run["metered"] >= run["billed"] - 1e-12 for run in ended)
        codes = Counter(run["code"] for run in runs)
        return [
            kind.replace("_", " "),
            str(sum(run["injected"] for run in runs)),
            ", ".join(f"{codes[code]} × {code}" for code in sorted(codes)),
            str(sum(run["failed"] for run in runs)),
            f"{sum(run['same_best'] for run in results)} of {len(results)}"
            if results
            else "not required",
            f"{covered} of {len(ended)}" if ended else "–",
        ]

    headings = [
        "fault",
        "faults injected",
        "exit codes",
        "failed calls",
        "same configuration",
        "with a result: counted at least the bill",
    ]
    return by("faults", "kind", headings, row)


def damages() -> str:
    """Tabulate the results of commands on damaged run directories, by kind of damage."""

    def row(damage: str, commands: Sequence[Mapping[str, Any]]) -> list[str]:
        refused = sum(command["code"] != 0 for command in commands)
        return [
            damage.replace("_", " "),
            str(len(commands)),
            str(len(commands) - refused),
            str(refused),
            str(sum(bool(command["problems"]) for command in commands)),
        ]

    headings = [
        "damage",
        "commands",
        "ended as usual",
        "ended with a message",
        "tracebacks or other results",
    ]
    return by("damages", "damage", headings, row)


def disks() -> str:
    """Tabulate the results of runs with a file size limit, by limit."""
    found = results("chaos")["disk"]
    rows = [
        [f"{run['limit']:,}", *map(str, run["codes"]), "; ".join(run["problems"]) or "none"]
        for run in found
    ]
    return markdown(
        ["bytes of a file", "exit code", "exit code after freeing space", "problems"], rows
    )


def by(
    part: str,
    key: str,
    headings: Sequence[str],
    row: Callable[[str, Sequence[Mapping[str, Any]]], list[str]],
) -> str:
    """Tabulate a part of the fault-injection record, with a row for each value of a key and a total."""
    found = results("chaos")[part]
    names = list(dict.fromkeys(record[key] for record in found))
    rows = [row(name, [record for record in found if record[key] == name]) for name in names]
    return markdown(headings, [*rows, row("**all**", found)])


TABLES = (kills, faults, damages, disks)
