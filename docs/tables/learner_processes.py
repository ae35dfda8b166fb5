"""Table of the time of a training step in one process and in several."""

from __future__ import annotations

from statistics import median

from tables.data import markdown, results
from tables.training_speed import in_range


def learner_steps() -> str:
    """Compare the seconds of a step by processes; a ratio belongs to one turn."""
    seconds = results("learner_processes")["seconds"]
    (_, basis), *_ = seconds.items()
    rows = []
    for name, own in seconds.items():
        ratios = [a / b for a, b in zip(own, basis, strict=True)]
        rows.append(
            [
                name,
                in_range(median(own), min(own), max(own), digits=1),
                in_range(median(ratios), min(ratios), max(ratios)),
            ]
        )
    return markdown(["learner", "a step, s", "time, relative to 1 process"], rows)


TABLES = (learner_steps,)
