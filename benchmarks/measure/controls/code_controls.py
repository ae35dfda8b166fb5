"""Measure the controls of the code benchmarks, and what a model solves of the easier ones.

    python -m benchmarks.measure.controls.code_controls FOLDER --output FILE [--rows N]
        [--model smollm2]

FOLDER contains the folders bigcodebench, humaneval and mbpp_sanitized. For each split, the hidden
tests judge the solutions of the data set, an empty program, and a program that exits with status 0.
With a model, the system of mbpp.yaml runs on the test splits of humaneval and mbpp_sanitized, with
each last step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import compound as cp
from benchmarks.bigcodebench import passes_function, passes_suite, split_prompt
from compound.core.example import Example, Score
from compound.core.narrowing import entry
from compound.core.security.sandbox.sandbox import find_launcher
from compound.evaluation.code_tests.judge import LIMITS
from compound.evaluation.dataset import Split
from compound.evaluation.statistics import UNIT, mean_interval
from compound.yaml import load

Judge = Callable[[Mapping[str, object], Example], Awaitable[Score]]
EXIT = "import os\nos._exit(0)"
_MISSING = re.compile(r"No module named '([\w.]+)'")
SETS: Mapping[str, tuple[str, Sequence[Split], Judge]] = {
    "humaneval": ("prompt", ("test",), passes_function),
    "mbpp_sanitized": ("prompt", ("test", "valid"), passes_function),
    "bigcodebench": ("instruct_prompt", ("valid", "test"), passes_suite),
}
"""For each data set: the input, the splits, and the metric."""


def solution(example: Example) -> str:
    """Return the solution that the data set gives for an example."""
    body = entry(example.gold, "canonical_solution", str)
    if "complete_prompt" in example.gold:
        return entry(example.gold, "complete_prompt", str) + body
    return split_prompt(entry(example.inputs, "prompt", str))[1] + body


async def control(
    judge: Judge, examples: Sequence[Example], programs: Sequence[str], *, negative: bool
) -> dict[str, object]:
    """Return the mean score of programs, with those that fail, or that pass if negative."""
    scores = await asyncio.gather(
        *(
            judge({"code": program}, example)
            for example, program in zip(examples, programs, strict=True)
        )
    )
    interval = mean_interval([score.value for score in scores], bounds=UNIT).to_json()
    reasons = {e.id: s.feedback or "" for e, s in zip(examples, scores, strict=True) if s.value < 1}
    found: dict[str, object] = {**interval, "passed": sum(score.value == 1 for score in scores)}
    if negative:
        return {
            **found,
            "passing": [example.id for example in examples if example.id not in reasons],
        }
    missing = Counter(name for text in reasons.values() for name in set(_MISSING.findall(text)))
    return {**found, "missing": dict(missing), "failed": reasons}


async def controls(folder: Path, sets: Sequence[str], rows: int | None) -> dict[str, object]:
    """Return the controls of data sets, by set, split and kind of program."""
    found: dict[str, object] = {}
    for name in sets:
        column, splits, judge = SETS[name]
        data = cp.Dataset(folder / name, valid="dev")
        for split in splits:
            examples = [*data.examples(split, [column])][:rows]
            kinds = {
                "solutions": [solution(example) for example in examples],
                "empty": [""] * len(examples),
                "exit": [EXIT] * len(examples),
            }
            results = {
                kind: await control(judge, examples, programs, negative=kind != "solutions")
                for kind, programs in kinds.items()
            }
            found[f"{name}/{split}"] = results
    return found


def model_scores(folder: Path, model: str, rows: int) -> dict[str, object]:
    """Return the scores of the system of mbpp.yaml, by data set and by what its last step keeps."""
    file = Path(__file__).parents[2] / "mbpp.yaml"
    found: dict[str, object] = {}
    for name in ("mbpp_sanitized", "humaneval"):
        program = load(
            file, overrides=[("data.path", str((folder / name).resolve())), ("lm", model)]
        )
        data = cp.Dataset(folder / name)
        assert program.metric is not None
        for keep in ("initial", "passing", "revised"):
            system = program.system.bind({"final_code.keep": keep})
            scored = cp.evaluate(system, data, program.metric, split="test", limit=rows)
            solved = [row.example for row in scored.rows if row.score == 1]
            found[f"{name}/{keep}"] = {**scored.summary(), "solved": solved}
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the controls."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sets", default=",".join(SETS), help="data sets, separated by commas")
    parser.add_argument("--rows", type=int, default=None, help="rows of each split; default: all")
    parser.add_argument("--model", default="", help="also run this model")
    parser.add_argument("--model-rows", type=int, default=40)
    parser.add_argument("--output", type=Path, required=True)
    parsed = parser.parse_args(arguments)
    found: dict[str, object] = {
        "launcher": asyncio.run(find_launcher()).name,
        "limits": vars(LIMITS),
        "controls": asyncio.run(controls(parsed.folder, parsed.sets.split(","), parsed.rows)),
    }
    if parsed.model:
        found["model"] = {
            "name": parsed.model,
            **model_scores(parsed.folder, parsed.model, parsed.model_rows),
        }
    parsed.output.write_text(
        json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
