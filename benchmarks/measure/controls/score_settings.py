"""Score many settings of a system on the same examples, such as every combination of its choices.

    python -m benchmarks.measure.controls.score_settings benchmarks/relay.yaml \
      --set data.path=$PWD/facts --limit 40 --output benchmarks/data/relay_settings.json

Without ``--named``, all parameters that are choices are combined, so that the optimum and the
spread are known before a search. ``--named`` is a JSON file with settings by name, such as
controls. Other parameters keep their initial values. Calls are cached in the user's cache folder:
repeat an interrupted command.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import TypedDict, get_args

from compound.api.sync import evaluate
from compound.core.errors import DataError
from compound.evaluation.dataset import Split
from compound.evaluation.evaluate import Summary
from compound.graph.space import Choice, Scalar, Space
from compound.yaml import Program, load

Settings = dict[str, Scalar]


class Row(Summary):
    """Score of one combination of settings; ``parts`` are the means of the parts of the metric."""

    name: str
    settings: Settings
    parts: dict[str, float]


class Scored(TypedDict):
    """Scores of all combinations.

    ``start`` holds the initial values of the parameters that are set; ``mean`` and ``deviation``
    (population standard deviation) are those of the combinations' means.
    """

    split: str
    start: dict[str, object]
    mean: float
    deviation: float
    rows: list[Row]


def combinations(parameters: Mapping[str, Space]) -> Iterator[Settings]:
    """Yield every combination of the choices among the parameters.

    >>> list(combinations({"a.k": Choice(1, 2), "b.how": Choice("x")}))
    [{'a.k': 1, 'b.how': 'x'}, {'a.k': 2, 'b.how': 'x'}]
    """
    choices = {
        name: space.options for name, space in parameters.items() if isinstance(space, Choice)
    }
    for values in itertools.product(*choices.values()):
        yield dict(zip(choices, values, strict=True))


def score(program: Program, name: str, settings: Settings, split: Split, limit: int) -> Row:
    """Score one combination of settings.

    Raises:
        DataError: the file names no data or no metric.
    """
    if program.data is None or program.metric is None:
        raise DataError(f"system {program.system.name!r}: a score needs data and a metric")
    parts: list[Mapping[str, float]] = []
    found = evaluate(
        program.system.bind(settings),
        program.data,
        program.metric,
        split,
        limit=limit,
        settings=program.optimize,
        engines=program.find_engine,
        on_trace=lambda example, trace: parts.append(trace.parts),
    )
    names = sorted({name for part in parts for name in part})
    means = {name: fmean(part.get(name, 0.0) for part in parts) for name in names}
    print(found.interval, name or settings, flush=True)
    return {"name": name, "settings": settings, **found.summary(), "parts": means}


def score_all(
    program: Program, named: Mapping[str, Settings] | None, split: Split, limit: int
) -> Scored:
    """Score settings by name in their order, or by default all combinations of choices, best first."""
    parameters = program.system.parameters
    if named is not None:
        rows = [score(program, name, settings, split, limit) for name, settings in named.items()]
    else:
        rows = [score(program, "", settings, split, limit) for settings in combinations(parameters)]
        rows.sort(key=lambda row: -row["mean"])
    means = [row["mean"] for row in rows]
    return {
        "split": split,
        "start": {name: parameters[name].value for row in rows for name in row["settings"]},
        "mean": fmean(means),
        "deviation": pstdev(means),
        "rows": rows,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Score settings of one file, and write them to a JSON file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("system", type=Path, help="the system's YAML file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="an override"
    )
    parser.add_argument("--named", type=Path, help="a JSON file with settings by name")
    parser.add_argument("--split", choices=get_args(Split), default="train")
    parser.add_argument("--limit", type=int, default=40, help="number of examples (default 40)")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(arguments)
    program = load(args.system, overrides=[tuple(entry.split("=", 1)) for entry in args.set])
    named = None if args.named is None else json.loads(args.named.read_text(encoding="utf-8"))
    found = score_all(program, named, args.split, args.limit)
    args.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
