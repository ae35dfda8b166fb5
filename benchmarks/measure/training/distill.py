"""Distill an optimized prompt with demonstrations into weights, on the questions of Atlas.

    python -m benchmarks.measure.training.distill --runs FOLDER

Runs that the folder holds are not made again. Writes ``benchmarks/data/distill_atlas.json``: test
scores and tokens of a run for the system as it is declared, with the prompt and demonstrations that
a search found, with the short prompt in their place, and with the short prompt and distilled
weights, if the decision accepted them; the decision, and the reverse KL divergence by training
step.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compound.api.optimize import run_optimization
from compound.api.result import read_result
from compound.api.sync import evaluate
from compound.evaluation.evaluate import Evaluation, gain_interval
from compound.graph.configuration import Configuration
from compound.graph.configuration import load as load_configuration
from compound.optimization.runs.directory import read_records
from compound.optimization.runs.recorder import read_events
from compound.yaml import Program, load

OUTPUT = Path(__file__).parents[2] / "data" / "distill_atlas.json"
ATLAS = Path(__file__).parents[2] / "atlas.yaml"
SEARCH: Mapping[str, object] = {"method": "search", "budget.system_runs": 240}
TRAINING = {
    "optimizer": {"lr": 1e-3},
    "steps": 20,
    "rollouts": {"examples": 4, "runs": 4},
    "evaluation": {"every": 10},
}
DISTILLATION = {"method": "distill", "distill": TRAINING, "budget.system_runs": 600}


def program_with(settings: Mapping[str, object]) -> Program:
    """Return Atlas with other settings of the optimization."""
    overrides = [(f"optimize.{name}", json.dumps(value)) for name, value in settings.items()]
    return load(ATLAS, overrides=overrides)


def run(program: Program, folder: Path, start: Configuration | None = None) -> None:
    """Optimize from a configuration, unless the folder holds a finished run."""
    assert program.data is not None
    assert program.metric is not None
    if not (folder / "best.json").exists():
        run_optimization(
            program.system if start is None else program.system.bind(start),
            program.data,
            program.metric,
            program.optimize,
            run_dir=folder,
            engines=program.find_engine,
            folder=program.folder,
            text=program.text,
        )


def score(program: Program, values: Mapping[str, object]) -> Evaluation:
    """Evaluate a configuration on the test examples of the runs."""
    assert program.data is not None
    assert program.metric is not None
    return evaluate(
        program.system.bind(values),
        program.data,
        program.metric,
        "test",
        limit=program.optimize.test_size,
        settings=program.optimize,
        engines=program.find_engine,
    )


def measure(folder: Path) -> dict[str, Any]:
    """Search, distill, and evaluate the short prompt without training; return what the runs measured."""
    program = program_with(SEARCH)
    run(program, folder / "search")
    optimized = load_configuration(folder / "search" / "best.json")
    run(program_with(DISTILLATION), folder / "distill", optimized)
    found, first = read_result(folder / "distill"), read_result(folder / "search")
    events = read_events(folder / "distill")
    job = [event for event in events if event["event"] == "job"][-1]
    decision = [event for event in events if event["event"] == "decision"][-1]
    short = {key: value for key, value in job["values"].items() if not key.endswith(".weights")}
    rows = {
        "as declared": first.test_before,
        "optimized": found.test_before,
        "short prompt, untrained": score(program, optimized.replace(short)),
        "distilled": found.test_after if found.accepted else None,
    }
    steps = [
        r for r in read_records(folder / "distill" / "memory.jsonl") if r.get("kind") == "training"
    ]
    return {
        "settings": {"search": dict(SEARCH), "distillation": DISTILLATION},
        "dropped": {key: optimized[key] for key in short},
        "rows": {
            name: {
                "score": evaluation.summary(),
                "difference": gain_interval(found.test_before, evaluation).to_json(),
            }
            for name, evaluation in rows.items()
            if evaluation is not None and found.test_before is not None
        },
        "decision": {
            name: decision.get(name)
            for name in (
                "verdict",
                "accepted",
                "margin",
                "p",
                "probability",
                "before",
                "after",
                "tokens",
            )
        },
        "held_out": job.get("facts", {}).get("evaluated"),
        "reverse_kl": [round(step["reverse_kl"], 4) for step in steps],
        "rewards": [round(step["reward"], 4) for step in steps],
        "seconds": [
            round(sum(step[name] for step in steps)) for name in ("sample_seconds", "train_seconds")
        ],
    }


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=Path, required=True, help="folder of the two runs")
    OUTPUT.write_text(
        json.dumps(measure(parser.parse_args().runs), indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
