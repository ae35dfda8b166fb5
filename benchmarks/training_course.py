"""How trainings went, agent by agent: what replies were fined, and how varied they were.

    python -m compound.benchmarks.training_course NAME=RUN ... --output FILE

Reads run directories. Of each it keeps, for every agent and every stretch of steps, the means of its
penalties, of the entropy (nats) of its tokens, and of the similarity of its replies (1: always the same); and
of all together, as ``rollouts``, the mean reward and the share of groups that were skipped.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from compound.report.training import records

STRETCHES = ((0, 5), (5, 10), (10, 25))  # of steps; the ends are not part of them
FACTS = ("entropy", "similarity")
ROLLOUTS = "rollouts"


def course(run: Path) -> dict[str, Any]:
    """Return the means of each stretch by agent; a stretch without samples of an agent has none."""
    steps = records(run)
    names = sorted({name for step in steps for name in step["components"]})
    return {
        f"{first + 1} to {end}": {
            **{name: _means(steps[first:end], name) for name in names},
            ROLLOUTS: _rollouts(steps[first:end]),
        }
        for first, end in STRETCHES
    }


def _rollouts(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    rewards = [step["reward"] for step in steps if step["reward"] is not None]
    groups = sum(step["groups"] for step in steps)
    return {"reward": fmean(rewards), "skipped": sum(step["skipped"] for step in steps) / groups}


def _means(steps: Sequence[Mapping[str, Any]], name: str) -> dict[str, float | None]:
    own = [step["components"][name] for step in steps if name in step["components"]]
    means = {fact: fmean(one[fact] for one in own) if own else None for fact in FACTS}
    return {**means, "penalty": fmean(step.get("penalties", {}).get(name, 0.0) for step in steps)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Write what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", help="a name and a run directory, with = between them")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(arguments)
    named = (run.split("=", 1) for run in args.runs)
    found = {name: course(Path(path)) for name, path in named}
    args.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
