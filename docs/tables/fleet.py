"""Table of the benchmark of a fleet."""

from __future__ import annotations

from collections.abc import Mapping

from tables.data import markdown, results

NAMES = {
    "one": "one",
    "two": "two",
    "two_one_killed": "two, one of them killed in the middle of the step",
}


def fleet() -> str:
    """Tabulate the throughput of fleets on simulated servers."""
    rows = []
    for step in results("fleet")["steps"]:
        for name, found in step["cases"].items():
            low, high = found["p25_requests_per_second"], found["p75_requests_per_second"]
            rows.append(
                [
                    f"{step['requests']}",
                    NAMES[name],
                    f"{found['requests_per_second']:.1f} ({low:.1f} to {high:.1f})",
                    _speed(step["speed"].get(name)),
                    f"{found['lost']} of {found['calls']:,}",
                    f"{found['moved']}",
                    f"{found['servers_per_group']:.2f}",
                ]
            )
    headings = [
        "requests of a step",
        "replicas",
        "requests per second (quartiles)",
        "speed (range)",
        "lost",
        "moved",
        "servers per group",
    ]
    return markdown(headings, rows)


def _speed(found: Mapping[str, float] | None) -> str:
    """Format a speed relative to one replica; the row of one replica has none."""
    return (
        f"{found['median']:.2f} × ({found['least']:.2f} to {found['most']:.2f})" if found else "–"
    )


TABLES = (fleet,)
