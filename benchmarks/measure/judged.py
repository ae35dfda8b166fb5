"""Compare local rewards with a language model as judge, on the pairs of finished runs (OPTIMAS, table 4).

    python -m benchmarks.measure.judged benchmarks/atlas.yaml runs/table/atlas/optimas/* \
        --output judged.json

For each run directory of method `optimas`, this measures the ranking accuracy of each component's
local reward on held-out inputs, and that of the system's model when it chooses between the same
outputs after twenty examples. Answers are cached next to the output file, so an interrupted
benchmark can be resumed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

from rich.progress import track

from benchmarks.measure.judge import JudgeSettings, judge
from compound.execution.cache import DiskCache
from compound.execution.executor import Executor
from compound.rewards.inspection import Inspection
from compound.yaml import Program, load


async def judged(
    program: Program, run: Path, executor: Executor, lm: str, pairs: int
) -> dict[str, object]:
    """Return, by component, the accuracies of local reward and judge, and the jobs that used the reward."""
    found = Inspection.open(run, program.system)
    rows: dict[str, object] = {}
    for component in track(found.components, f"judging {run.name}"):
        accuracy = await judge(
            lambda request: executor.request(lm, request),
            found.buffer,
            program.system,
            component,
            JudgeSettings(pairs=pairs),
            held_out=bool(found.stored.adapter),
        )
        head = found.head(component)
        rows[component] = {
            "local": found.reward(component).accuracy.to_json(),
            "judge": accuracy.to_json(),
            "pairs": len(found.buffer.weighted_pairs(component)),
            "jobs": head.jobs,
            "steered": head.steered,
        }
    return rows


async def _all(args: argparse.Namespace) -> dict[str, object]:
    program = load(args.system, overrides=[tuple(entry.split("=", 1)) for entry in args.set])
    lm = args.lm or program.system.defaults["lm"]
    assert isinstance(lm, str)
    executor = Executor(program.find_engine, cache=DiskCache(args.output.with_suffix(".sqlite")))
    try:
        rows = {
            f"{run.parent.name}/{run.name}": await judged(program, run, executor, lm, args.pairs)
            for run in args.runs
        }
    finally:
        await executor.aclose()
    return {"judge": lm, "runs": rows}


def main(arguments: Sequence[str] | None = None) -> None:
    """Judge the pairs of the given runs, and write one JSON file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("system", type=Path, help="the system's YAML file")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an override that the runs used",
    )
    parser.add_argument("runs", type=Path, nargs="+", help="run directories of method optimas")
    parser.add_argument("--lm", help="the judge's model (default: the system's model)")
    parser.add_argument(
        "--pairs", type=int, default=60, help="maximum pairs per component (default 60)"
    )
    parser.add_argument("--output", type=Path, default=Path("judged.json"))
    args = parser.parse_args(arguments)
    found = asyncio.run(_all(args))
    args.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
