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


def learner_machines() -> str:
    """Compare the work per second of launchers with equal work for each process."""
    found = results("learner_processes")["machines"]["seconds"]
    one, two = found.values()
    speeds = [2 * a / b for a, b in zip(one, two, strict=True)]
    rows = [
        [name, in_range(median(own), min(own), max(own)), speed]
        for (name, own), speed in zip(
            found.items(),
            ("1", in_range(median(speeds), min(speeds), max(speeds))),
            strict=True,
        )
    ]
    return markdown(["launchers", "a step, s", "sequences per second, relative"], rows)


def learner_checkpoint() -> str:
    """Return the seconds of a checkpoint of 1 GB."""
    seconds = results("learner_processes")["checkpoint"]["seconds"]
    told = {
        "save": "written to the memory of the system, while the step waits",
        "sync": "brought to the disk by a thread",
    }
    rows = [
        [told[name], in_range(median(own), min(own), max(own), digits=1)]
        for name, own in seconds.items()
    ]
    return markdown(["checkpoint of 1 GB", "s"], rows)


TABLES = (learner_steps, learner_machines, learner_checkpoint)
