"""Commands that optimize systems."""

from __future__ import annotations

import sys
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from compound.core.errors import SpecError
from compound.core.formatting import width_of

if TYPE_CHECKING:
    from types import FrameType

    from compound.api.result import Result
    from compound.api.sweeps.runs import Stopper
    from compound.optimization.runs.recorder import Recorder
    from compound.yaml import Program

from compound.cli.options import (
    AsJson,
    Config,
    MetricName,
    NoImport,
    Otel,
    Quiet,
    Rows,
    ScriptModel,
    Sets,
    Strict,
    TrustOption,
    Yes,
    app,
    format_examples,
    load_program,
    print_json,
    require_data,
    tracing,
)
from compound.cli.script import (
    ScriptOptions,
    is_script,
    write_script_system,
    write_source_diff,
)


@app.command(
    epilog=format_examples(
        "optimize system.yaml",
        "optimize system.yaml --run second --set optimize.seed=1",
        "optimize system.yaml --config runs/first/best.json",
        "optimize system.yaml --run second --from runs/first",
        "optimize system.yaml --dry-run",
        "optimize system.yaml --dry-run --pilot 3",
        "optimize script.py --data rows.csv --metric metrics:score",
    )
)
def optimize(
    file: Annotated[
        Path,
        typer.Argument(
            help="YAML file of the system, or a Python script that calls OpenAI's API, as script.py or "
            "script.py:function.",
            show_default=False,
        ),
    ],
    run: Annotated[str, typer.Option(help="Name of the run: its folder in runs/.")] = "",
    run_dir: Annotated[Optional[Path], typer.Option(help="Run directory.")] = None,  # noqa: UP045
    new: Annotated[bool, typer.Option("--new", help="Start a new run even if one exists.")] = False,
    earlier: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--from", help="Run directory to start from: its result and local rewards."),
    ] = None,
    sets: Sets = None,
    config: Config = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print the plan in counts of runs and requests; run nothing."
        ),
    ] = False,
    pilot: Annotated[
        int,
        typer.Option(
            min=0,
            help="With --dry-run: validation examples to run, to estimate tokens, dollars and minutes.",
        ),
    ] = 0,
    strict: Strict = False,
    otel: Otel = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    no_import: NoImport = False,
    trust: TrustOption = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Rerun failed test rows of a finished run.")
    ] = False,
    rows: Rows = None,
    metric_name: MetricName = "",
    lm: ScriptModel = "",
    yes: Yes = False,
) -> None:
    """Optimize a system, or resume an interrupted run.

    A Python script that calls OpenAI's API is run unchanged: a function whose parameters are columns
    of --data, or the whole script with columns as arguments, as answers to input() or on stdin. Its
    prompts are found in the requests of some runs, shown for confirmation, and written to a YAML
    file beside the script, which is then optimized like any other. The better prompts are written as
    a diff of the script, prompts.diff in the run directory; the script itself is not changed.

    With --retry-failed, the test rows of a finished run that failed because no answer was received
    are rerun with the same examples and random streams, within the test split's share of the
    budget. Decisions do not change; the report lists the rerun rows.
    """
    from compound.api.optimize import run_optimization
    from compound.api.progress import progress_display

    if is_script(file):
        if no_import:
            raise SpecError([f"--no-import does not allow to run {file}"])
        options = ScriptOptions(rows, metric_name or None, lm or None, yes)
        with redirect_stdout(sys.stderr):  # stdout is for the result
            file, trusted = write_script_system(file, options, runs=not dry_run)
        trust = [*(trust or ()), *trusted]
    elif rows or metric_name or lm or yes:
        raise SpecError([f"--data, --metric, --lm and --yes are for scripts, but {file} is none"])
    program = load_program(file, sets, no_import, config, trust)
    data, metric = require_data(program, "optimize")
    path = _run_path(program.system.name, run, run_dir, new)
    if dry_run:
        _dry_run(program, path, as_json=as_json, strict=strict, pilot=pilot)
        return
    if pilot:
        raise SpecError(["--pilot needs --dry-run"])
    print(f"run directory: {path}", file=sys.stderr)

    def on_start(recorder: Recorder) -> None:
        if recorder.resumed and not recorder.state.done:
            print("continuing the run from its last checkpoint", file=sys.stderr)
        _stop_on_interrupt(recorder)

    def on_result(result: Result) -> None:
        from compound.report import terminal_summary

        display.close()
        lines = write_source_diff(program.system.bind(result.best), path)
        if as_json:
            print_json(result.to_json())
        else:
            print(terminal_summary(path, width_of(sys.stdout)))
            print("".join(f"{line}\n" for line in lines), end="", flush=True)

    with tracing(otel), ExitStack() as display:
        listener = display.enter_context(
            progress_display(program.optimize.budget.limits(), quiet=quiet)
        )
        run_optimization(
            program.system,
            data,
            metric,
            program.optimize,
            run_dir=path,
            engines=program.find_engine,
            folder=program.folder,
            text=program.text,
            listener=listener,
            on_start=on_start,
            on_result=on_result,
            strict=strict,
            retry_failed=retry_failed,
            start_from=earlier,
        )


@app.command(
    epilog=format_examples(
        "sweep system.yaml --methods search,random",
        "sweep a.yaml b.yaml --methods optimas,hbc --seeds 0,1,2 --run runs/table",
        "sweep system.yaml --methods search,mipro --set optimize.budget.system_runs=400",
        'sweep system.yaml --methods search,mipro --cluster --set "optimize.runner={ray: {workers: 4}}"',
    )
)
def sweep(
    files: Annotated[list[Path], typer.Argument(help="System YAML files.", show_default=False)],
    methods: Annotated[str, typer.Option(help="Comma-separated methods.")],
    seeds: Annotated[str, typer.Option(help="Comma-separated seeds.")] = "0",
    run: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Sweep directory.", show_default="runs/sweep"),
    ] = None,
    sets: Sets = None,
    no_controls: Annotated[
        bool,
        typer.Option(
            "--no-controls", help="Do not evaluate a constant answer and a direct model call."
        ),
    ] = False,
    cluster: Annotated[
        bool,
        typer.Option(
            "--cluster", help="Run several runs at a time, as tasks of the Ray cluster in the file."
        ),
    ] = False,
    otel: Otel = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    no_import: NoImport = False,
    trust: TrustOption = None,
) -> None:
    """Compare methods on several files and seeds.

    The same command resumes an interrupted sweep.

    On the test examples of each seed, two controls are evaluated: the answer that is best on the
    train split, given to every input, and one direct call of the system's model. Their calls are
    outside the budgets of the runs.

    Every run gets the budget set in its file and its own folder. Finished runs are skipped. The
    table is in sweep.md and sweep.json. Exit code 1 if a run failed.

    With --cluster, each run is a task of the Ray cluster that optimize.runner names, and workers is
    the number of runs at a time. All machines must share the sweep directory and the folders of the
    files.
    """
    from compound.api.progress import progress_display
    from compound.api.sweeps.runs import Stopper
    from compound.api.sweeps.sweep import plan
    from compound.api.sweeps.sweep import sweep as run_sweep
    from compound.core.storage.paths import run_folder
    from compound.report.sweep import sweep_summary

    programs = []
    for file in files:
        programs.append(load_program(file, sets, no_import, trust=trust))
        require_data(programs[-1], "sweep")
    run = run if run is not None else run_folder("sweep")
    planned = plan(programs, _split_list(methods), _parse_seeds(seeds), run)
    print(f"sweep directory: {run}", file=sys.stderr)
    stopper = Stopper()
    _stop_on_interrupt(stopper)
    with tracing(otel):
        facts = run_sweep(
            planned,
            run,
            watch=lambda limits: progress_display(limits, quiet=quiet),
            log=lambda line: None if quiet else print(line, file=sys.stderr, flush=True),
            stopper=stopper,
            controls=not no_controls,
            cluster=cluster,
        )
    if as_json:
        print_json(facts)
    else:
        print(f"{sweep_summary(facts)}\n\ntable: {run / 'sweep.md'}")
    if any(row["status"] == "failed" for row in facts["runs"]):
        raise typer.Exit(1)


def _split_list(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _parse_seeds(text: str) -> list[int]:
    items = _split_list(text)
    wrong = [item for item in items if not item.isdecimal()]
    if wrong:
        raise SpecError(
            [f"--seeds {text}: {wrong[0]!r} is not a seed; give whole numbers such as 0,1,2"]
        )
    return [int(item) for item in items]


def _run_path(system: str, run: str, run_dir: Path | None, new: bool) -> Path:
    from compound.core.storage.paths import run_folder, unused_path

    if Path(run).is_absolute() or ".." in Path(run).parts:
        raise SpecError([f"--run {run}: must be a name; set another folder by --run-dir"])
    path = run_dir if run_dir is not None else run_folder(run or system)
    return unused_path(path) if new else path


def _dry_run(program: Program, path: Path, *, as_json: bool, strict: bool, pilot: int) -> None:
    """Print the plan of a run, the effects it can detect, and what a pilot measures."""
    from compound.api.estimate import estimate
    from compound.report import forecast

    facts = {"run": str(path), **estimate(program, strict=strict, pilot=pilot, run_dir=path)}
    if as_json:
        print_json(facts)
    else:
        print(forecast(facts))


def _stop_on_interrupt(running: Recorder | Stopper) -> None:
    """Handle Ctrl-C: the first finishes the step and saves, the second stops now (still resumable)."""
    import signal

    def handle(_signal: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        running.stop()
        print(
            "\nstopping after this step; press Ctrl-C again to stop now",
            file=sys.stderr,
            flush=True,
        )

    signal.signal(signal.SIGINT, handle)
