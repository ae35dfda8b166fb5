"""Table of the benchmark of a fleet."""

from __future__ import annotations

from tables.data import markdown, results

NAMES = {
    "one": "one",
    "two": "two",
    "two_one_killed": "two, one of them killed in the middle of the step",
}


def fleet() -> str:
    """Tabulate the throughput of fleets on simulated servers."""
    data, rows = results("fleet"), []
    for name, found in data["cases"].items():
        low, high = found["p25_requests_per_second"], found["p75_requests_per_second"]
        speed = data["speed"].get(name)
        rows.append(
            [
                NAMES[name],
                f"{found['requests_per_second']:.1f} ({low:.1f} to {high:.1f})",
                f"{speed['median']:.2f} × ({speed['least']:.2f} to {speed['most']:.2f})" if speed else "–",
                f"{found['lost']} of {found['calls']:,}",
                f"{found['moved']}",
                f"{found['servers_per_group']:.2f}",
            ]
        )
    headings = [
        "replicas",
        "requests per second (quartiles)",
        "speed (range)",
        "lost",
        "moved",
        "servers per group",
    ]
    return markdown(headings, rows)


TABLES = (fleet,)
