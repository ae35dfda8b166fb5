"""Summarize the course of training runs by agent: penalties and variety of replies.

    python -m benchmarks.measure.training.training_course NAME=RUN ... --output FILE

Reads run directories. For each run, every agent and every range of steps, it writes the means of
the agent's penalties, of the entropy of its tokens (nats), and of the similarity of its replies (1:
identical); and for all agents, as ``rollouts``, the mean reward and the share of skipped groups.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from compound.report.training import Step, by_component, get_number, records

RANGES = ((0, 5), (5, 10), (10, 25))  # of steps; the ends are exclusive
FACTS = ("entropy", "similarity")
ROLLOUTS = "rollouts"


def course(run: Path) -> dict[str, Mapping[str, object]]:
    """Return the means of each range that has steps, by agent; None without samples of the agent."""
    steps = records(run)
    names = sorted({name for step in steps for name in by_component(step)})
    return {
        f"{first + 1} to {end}": {
            **{name: _means(steps[first:end], name) for name in names},
            ROLLOUTS: _rollouts(steps[first:end]),
        }
        for first, end in RANGES
        if steps[first:end]
    }


def _rollouts(steps: Sequence[Step]) -> dict[str, float]:
    groups = sum(_known(steps, "groups"))
    return {
        "reward": fmean(_known(steps, "reward")),
        "skipped": sum(_known(steps, "skipped")) / groups,
    }


def _means(steps: Sequence[Step], name: str) -> dict[str, float | None]:
    own = [by_component(step)[name] for step in steps if name in by_component(step)]
    means = {fact: fmean(_known(own, fact)) if own else None for fact in FACTS}
    return {**means, "penalty": fmean(_penalty(step, name) for step in steps)}


def _known(steps: Sequence[Step], fact: str) -> list[float]:
    return [value for step in steps if (value := get_number(step, fact)) is not None]


def _penalty(step: Step, name: str) -> float:
    penalties = step.get("penalties")
    return (get_number(penalties, name) if isinstance(penalties, Mapping) else None) or 0.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Summarize the given runs, and write one JSON file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="NAME=RUN", help="a name and a run directory")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(arguments)
    named = (run.split("=", 1) for run in args.runs)
    found = {name: course(Path(path)) for name, path in named}
    args.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
