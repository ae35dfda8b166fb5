"""Commands that run and evaluate a system."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from compound.core.errors import SpecError, suggest_name

if TYPE_CHECKING:
    from compound.evaluation.dataset import Dataset, Split

from compound.cli.options import (
    AsJson,
    Config,
    File,
    NoImport,
    Otel,
    Quiet,
    Sets,
    TrustOption,
    app,
    format_examples,
    load_program,
    print_json,
    require_data,
    tracing,
)


def _not_nan(value: float | None) -> float | None:
    if value is not None and math.isnan(value):
        raise typer.BadParameter("must be a number that others can be compared with")
    return value


@app.command(
    epilog=format_examples(
        "evaluate system.yaml --split dev --limit 8 --no-cache --json",
        "evaluate system.yaml --config runs/demo/best.json --min-score 0.4",
    )
)
def evaluate(
    file: File,
    split: Annotated[
        str, typer.Option(help="train, valid, test, or the name of a split.")
    ] = "valid",
    limit: Annotated[Optional[int], typer.Option(min=1, help="Maximum number of examples.")] = None,  # noqa: UP045
    repeats: Annotated[int, typer.Option(min=1, help="Runs per example.")] = 1,
    config: Config = None,
    min_score: Annotated[
        float | None,
        typer.Option(
            help="Exit with code 1 if the mean score is below this value.", callback=_not_nan
        ),
    ] = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Neither read nor write the cache.")
    ] = False,
    sets: Sets = None,
    otel: Otel = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    no_import: NoImport = False,
    trust: TrustOption = None,
) -> None:
    """Evaluate a system on a split of its data.

    Prints the mean score with its 95 % interval, failures, and the cost.
    """
    from compound.api.sync import evaluate as run_evaluation

    program = load_program(file, sets, no_import, config, trust)
    data, metric = require_data(program, "evaluate")
    with tracing(otel):
        evaluation = run_evaluation(
            program.system,
            data,
            metric,
            _role(data, split),
            limit=limit,
            repeats=repeats,
            settings=program.optimize,
            engines=program.find_engine,
            cache=not no_cache,
            progress=not quiet,
        )
    summary = evaluation.summary()
    reason = _below("mean score", summary["mean"], min_score, "--min-score")
    if as_json:
        usage = evaluation.usage
        print_json(
            {
                **summary,
                "failures": evaluation.failures(),
                "violation": evaluation.violation,
                "passed": not reason,
                "reason": reason,
                "calls": usage.calls,
                "cached_calls": evaluation.cached_calls,
                "tokens": usage.tokens,
                "cost": usage.cost,
                "unpriced_calls": usage.unpriced,
                "metric_calls": evaluation.metric_usage.calls,
                "metric_tokens": evaluation.metric_usage.tokens,
                "metric_cost": evaluation.metric_usage.cost,
                "rows": [[r.example, r.score] for r in evaluation.rows],
            }
        )
    else:
        from compound.report.rendering import render_text

        about = {"split": split, "metric": metric.name, "summary": summary, "found": evaluation}
        print(render_text("evaluation.jinja", about))
    _exit_with(reason)


@app.command(
    epilog=format_examples(
        "agreement system.yaml labelled.jsonl --label human",
        "agreement system.yaml labelled.csv --output answer=model_answer --scale 1 5",
        "agreement system.yaml labelled.csv --part correct --min-kappa 0.4 --json",
    )
)
def agreement(
    file: File,
    labelled: Annotated[
        Path,
        typer.Argument(
            help="Outputs with labels: .jsonl, .json, .csv or .parquet.", show_default=False
        ),
    ],
    label: Annotated[str, typer.Option(help="Column with the labels.")] = "human",
    output: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            metavar="NAME[=COLUMN]", help="An output of the system and its column; repeatable."
        ),
    ] = None,
    scale: Annotated[
        Optional[tuple[float, float]],  # noqa: UP045
        typer.Option(help="Lowest and highest label; by default the scale of a rubric, else 0 1."),
    ] = None,
    part: Annotated[
        str, typer.Option(help="Compare this part of the score, such as a criterion.")
    ] = "",
    weights: Annotated[
        str, typer.Option(help="quadratic: near labels agree in part; none: only equal ones.")
    ] = "quadratic",
    min_kappa: Annotated[
        float | None,
        typer.Option(help="Exit with code 1 if kappa is below this value.", callback=_not_nan),
    ] = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Neither read nor write the cache.")
    ] = False,
    sets: Sets = None,
    as_json: AsJson = False,
    no_import: NoImport = False,
    trust: TrustOption = None,
) -> None:
    """Compare the metric of a system, such as a judge, with human labels of given outputs.

    Prints Cohen's kappa with its 95 % interval. The system is not run. The columns of the file with
    labels are the system's inputs, its outputs, the gold fields of the metric, and the label.
    """
    from dataclasses import asdict

    from compound.api.agreement import agreement as compare

    program = load_program(file, sets, no_import, trust=trust)
    if program.metric is None:
        raise SpecError([f"{file}:1:1: agreement needs `metric:` in the file"])
    if weights not in ("quadratic", "none"):
        raise SpecError([f"--weights {weights}: must be quadratic or none"])
    columns = dict(item.partition("=")[::2] for item in output or ())
    unknown = [name for name in columns if name not in program.system.outputs]
    if unknown:
        raise SpecError(
            [
                f"--output {unknown[0]}: no such output; {suggest_name(unknown[0], program.system.outputs)}"
            ]
        )
    found = compare(
        program.metric,
        labelled,
        label,
        outputs={name: column or name for name, column in columns.items()},
        inputs=list(program.system.inputs),
        scale=scale,
        part=part,
        weights=weights,  # type: ignore[arg-type]
        engines=program.find_engine,
        cache=not no_cache,
    )
    reason = _below("kappa", found.kappa, min_kappa, "--min-kappa")
    if as_json:
        facts = {**asdict(found), "passed": not reason, "reason": reason}
        print_json(
            {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in facts.items()}
        )
    else:
        print(f"{program.metric.name}: {found}")
    _exit_with(reason)


@app.command(
    epilog=format_examples(
        "run system.yaml question='Who wrote Emma?'",
        "run system.yaml --config runs/demo/best.json question='…' --json",
        "run system.yaml question='…' --trace",
        "run system.yaml question='…' --otel",
    )
)
def run(
    file: File,
    inputs: Annotated[Optional[list[str]], typer.Argument(help="Inputs as NAME=VALUE.")] = None,  # noqa: UP045
    config: Config = None,
    sample: Annotated[
        int, typer.Option(help="Sample index; selects the random streams of stochastic components.")
    ] = 0,
    trace: Annotated[
        bool, typer.Option("--trace", help="Print every call with its messages.")
    ] = False,
    sets: Sets = None,
    otel: Otel = False,
    as_json: AsJson = False,
    no_import: NoImport = False,
    trust: TrustOption = None,
) -> None:
    """Run a system once and print its outputs.

    With --trace, also prints every call. With --json, prints the whole trace.
    """
    from compound.api.sync import read_inputs
    from compound.api.sync import run as run_system
    from compound.execution.trace import as_text, to_json

    program = load_program(file, sets, no_import, config, trust)
    values = read_inputs(program.system, inputs or [])
    with tracing(otel):
        result = run_system(
            program.system, values, engines=program.find_engine, sample=sample, check=False
        )
        if as_json:
            print_json(to_json(result))
        else:
            if trace:
                print(as_text(result), end="\n\n")
            for name, value in result.outputs.items():
                print(
                    value
                    if len(result.outputs) == 1 and isinstance(value, str)
                    else f"{name}: {value}"
                )
    if result.failure is not None:
        where = next((f"{call.address}: " for call in result.calls if call.failure is not None), "")
        print(f"error: {where}{result.failure.kind}: {result.failure.message}", file=sys.stderr)
        raise typer.Exit(1)


def _below(what: str, value: float, least: float | None, option: str) -> str:
    """Return why a value does not reach what an option demands, or ``""``."""
    if least is None or value >= least:
        return ""
    return f"the {what} {value:.6g} is below {option} {least:.6g}"


def _exit_with(reason: str) -> None:
    """Exit with code 1 if there is a reason to."""
    if reason:
        print(f"error: {reason}", file=sys.stderr)
        raise typer.Exit(1)


def _role(data: Dataset, split: str) -> Split:
    names: dict[str, Split] = {"train": "train", "valid": "valid", "test": "test"}
    names.update({data.train: "train", data.valid: "valid"})
    if data.test:
        names[data.test] = "test"
    if split not in names:
        raise SpecError([f"--split {split}: unknown split; possible: {', '.join(sorted(names))}"])
    return names[split]
