"""Score the best constant answer, the control that an accuracy has to beat, without running a sweep.

    python -m compound.benchmarks.measure.controls.constant_answers NAME=FILE:FOLDER ... --seeds
        0,1,2 --output FILE

For each benchmark file and seed, this is the control ``constant`` of `compound sweep`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from compound.api.sweeps.controls import constant_answer, evaluate_constant
from compound.evaluation.examples import read_examples
from compound.spec import load


def control(file: Path, folder: Path, seed: int) -> dict[str, object]:
    """Return the best constant answer of the train split, and its mean score on the test split."""
    program = load(file, overrides=[("data.path", str(folder.resolve()))])
    settings, metric, data, inputs = program.optimize, program.metric, program.data, program.system.inputs
    if metric is None or data is None:
        raise SystemExit(f"{file}: needs data and a metric")
    train = read_examples(data, "train", inputs, limit=settings.train_size, seed=seed)
    test = read_examples(data, "test", inputs, limit=settings.test_size, seed=seed)
    answer = constant_answer(metric, program.system.outputs, train)
    interval = evaluate_constant(metric, answer, test, settings).interval
    return {"answer": answer, "seed": seed, **interval.to_json()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the controls of the benchmarks that are named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("benchmarks", nargs="+", metavar="NAME=FILE:FOLDER")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--output", type=Path, required=True)
    parsed = parser.parse_args(arguments)
    found: dict[str, list[dict[str, object]]] = {}
    for entry in parsed.benchmarks:
        name, _, places = entry.partition("=")
        file, _, folder = places.partition(":")
        found[name] = [control(Path(file), Path(folder), int(seed)) for seed in parsed.seeds.split(",")]
    parsed.output.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
