"""Score the best constant answer, the control that an accuracy has to beat.

    python -m compound.benchmarks.measure.constant_answers NAME=FILE:FOLDER ... --seeds 0,1,2 --output FILE

For each benchmark file and seed: of the gold answers of the train split, the one that scores best there is
given to every example of the test split that the file's settings draw with that seed.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from compound.evaluation.examples import read_examples
from compound.evaluation.metrics import Comparison
from compound.evaluation.statistics import mean_interval
from compound.example import Example
from compound.spec import load

TRIED = 50  # the most frequent gold answers; with partial credit the best constant need not be the very first


def control(file: Path, folder: Path, seed: int) -> dict[str, object]:
    """Return the best constant answer of the train split, and its mean score on the test split."""
    program = load(file, overrides=[("data.path", str(folder.resolve()))])
    settings, metric, data = program.optimize, program.metric, program.data
    if not isinstance(metric, Comparison) or data is None:
        raise SystemExit(f"{file}: needs data and a metric that compares an output with a gold field")
    inputs = program.system.inputs
    train = read_examples(data, "train", inputs, limit=settings.train_size, seed=seed)
    test = read_examples(data, "test", inputs, limit=settings.test_size, seed=seed)
    golds = Counter(str(answer) for example in train for answer in metric.accepted(example))
    answer = max(
        (found for found, _ in golds.most_common(TRIED)),
        key=lambda found: fmean(_scores(metric, found, train)),
    )
    interval = mean_interval(_scores(metric, answer, test), bounds=metric.bounds)
    return {"answer": answer, "seed": seed, **interval.to_json()}


def _scores(metric: Comparison, answer: str, examples: Sequence[Example]) -> list[float]:
    return [metric.score({metric.output: answer}, example).value for example in examples]


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
