"""Tables of sampling during training, replaced examples, critics, and advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from tables.data import markdown, results

LABELS = {
    "sampling": "",
    "longer": ", longer",
    "steps": ", equal steps",
    "critic": "",
    "advantages": "",
}


def overlap() -> str:
    """Tabulate the speed of sampling during training, measured and computed."""
    found = results("overlap")["cases"]
    queues = list(found[0]["computed_speed"])
    rows = [
        [
            f"{one['sampling_per_step']['median']:.2f} / {one['training_per_step']['median']:.2f}",
            f"{one['seconds_per_step']['median']:.2f}",
            _speed(one["speed"]),
            *(f"{one['computed_speed'][queue]['median']:.2f}" for queue in queues),
        ]
        for one in found
    ]
    headings = ["sampling / training, s", "a step, s", "overlap, measured", *queues]
    return markdown(headings, rows)


def variants(*kinds: str) -> str:
    """Tabulate the scores and rewards of variants of trainings.

    Args:
        kinds: the first parts of the names of the trainings, such as ``sampling`` or ``critic``.
    """
    found = results("training_variants")
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in found["runs"].values():
        if row["part"].partition("/")[0] in kinds:
            groups.setdefault((row["part"], row["variant"]), []).append(row)
    order = sorted(
        groups,
        key=lambda key: (
            kinds.index(key[0].partition("/")[0]),
            key[0],
            f"{key[0]}/{key[1]}/score" in found["differences"],
        ),
    )
    critics = "critic" in kinds
    rows = []
    for part, variant in order:
        own = groups[part, variant]
        differences = [
            found["differences"].get(f"{part}/{variant}/{name}") for name in ("score", "reward")
        ]
        rows.append(
            [
                part.partition("/")[2] + LABELS[part.partition("/")[0]],
                variant,
                str(len(own)),
                _mean(own, "steps", 0),
                f"{fmean(row['rollouts'] for row in own):,.0f}",
                _mean(own, "score", 2),
                _difference(differences[0]),
                _mean(own, "reward", 3),
                _difference(differences[1]),
                *([_explained(own), _seconds(own)] if critics else []),
            ]
        )
    headings = [
        "task",
        "variant",
        "seeds",
        "steps",
        "runs",
        "score",
        "difference",
        "reward",
        "difference",
    ]
    return markdown([*headings, *(["explained variance", "training, s"] if critics else [])], rows)


def _speed(found: Mapping[str, float]) -> str:
    return f"{found['median']:.2f} × ({found['p25']:.2f} to {found['p75']:.2f})"


def _mean(rows: Sequence[Mapping[str, Any]], name: str, digits: int) -> str:
    return f"{fmean(row[name] for row in rows):.{digits}f}"


def _difference(found: Mapping[str, float] | None) -> str:
    """Format a mean difference with its interval."""
    if found is None:
        return "–"
    if found["low"] is None:  # equal in all seeds
        return f"{found['mean']:+.3f}"
    return f"{found['mean']:+.3f} [{found['low']:+.3f}, {found['high']:+.3f}]"


def _seconds(rows: Sequence[Mapping[str, Any]]) -> str:
    return f"{fmean(row['seconds']['train'] for row in rows):.0f}"


def _explained(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format the mean and the range over seeds of the median explained variance."""
    values = [row["medians"]["explained"] for row in rows]
    return f"{fmean(values):.2f} ({min(values):.2f} to {max(values):.2f})"


TABLES = (overlap, variants)
