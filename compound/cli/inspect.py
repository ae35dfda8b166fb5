"""Commands that check files and inspect runs."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from compound.cli.errors import explain
from compound.cli.options import (
    AsJson,
    File,
    NoImport,
    Sets,
    Strict,
    TrustOption,
    app,
    format_examples,
    load_program,
    print_json,
)
from compound.errors import (
    CompoundError,
    SpecError,
)


@app.command(epilog=format_examples("check system.yaml", "check *.yaml", "check a.yaml --no-import"))
def check(
    files: Annotated[list[Path], typer.Argument(help="System YAML files.", show_default=False)],
    sets: Sets = None,
    strict: Strict = False,
    no_import: NoImport = False,
    as_json: AsJson = False,
    trust: TrustOption = None,
) -> None:
    """Check files without running them.

    Checks syntax, names, types, wiring, settings, the method, and data available locally, and reports every
    error of the file and of the data.

    Loads no model and downloads nothing; missing data is listed as not checked. With --json, several files
    give a list with an entry for every file, including its problems. Exit code 2 if a file is invalid.
    """
    from compound.api.check import check_program, problems_of, with_data_errors
    from compound.formatting import plural

    found: list[dict[str, Any]] = []
    codes = []
    for file in files:
        try:
            checked = check_program(load_program(file, sets, no_import, trust=trust), strict=strict)
        except CompoundError as raised:
            error = with_data_errors(raised) if isinstance(raised, SpecError) else raised
            if len(files) > 1 and not isinstance(error, SpecError):
                print(f"{file}:", file=sys.stderr)
            codes.append(explain(error))
            for warning in getattr(error, "__notes__", ()):
                print(f"{file}: warning: {warning}", file=sys.stderr)
            problems = problems_of(error, file)
            if not as_json:
                print(f"{file}: {plural(len(problems), 'error')}")
            found.append({"file": str(file), "problems": problems})
            continue
        found.append(checked.to_json())
        for warning in checked.warnings:
            print(f"{file}: warning: {warning}", file=sys.stderr)
        if not as_json:
            print(checked)
    if as_json:
        print_json(found if len(files) > 1 else found[0])
    if codes:
        raise typer.Exit(max(codes))


@app.command(
    epilog=format_examples(
        "graph system.yaml",
        "graph system.yaml --format mermaid",
        "graph system.yaml --format svg > graph.svg",
    )
)
def graph(
    file: File,
    form: Annotated[str, typer.Option("--format", help="Output format: text, mermaid or svg.")] = "text",
    sets: Sets = None,
    no_import: NoImport = False,
    trust: TrustOption = None,
) -> None:
    """Draw the graph of a system."""
    from compound.report.figures.system import draw

    print(draw(load_program(file, sets, no_import, trust=trust).system, form))


@app.command(epilog=format_examples("report runs/demo", "report runs/demo --json"))
def report(
    run: Annotated[Path, typer.Argument(help="Run directory.", show_default=False)], as_json: AsJson = False
) -> None:
    """Regenerate the report of a run.

    Prints the paths of report.md and report.html.
    """
    from compound.report import summarize, terminal_summary, write

    if as_json:
        print_json(summarize(run))
        return
    write(run)
    print(terminal_summary(run))


@app.command(
    epilog=format_examples(
        "trace runs/demo",
        "trace runs/demo --failed --limit 1",
        "trace runs/demo --split test --example 17 --component answerer",
        "trace runs/demo/baselines/random --json",
    )
)
def trace(
    run: Annotated[Path, typer.Argument(help="Run directory.", show_default=False)],
    example: Annotated[str, typer.Option(help="Id of an example. [default: all]")] = "",
    component: Annotated[str, typer.Option(help="Name of a component. [default: all]")] = "",
    split: Annotated[str, typer.Option(help="valid or test. [default: both]")] = "",
    failed: Annotated[bool, typer.Option("--failed", help="Only failed runs.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of system runs, the last ones.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Print the calls of recorded system runs, with their messages.

    Runs on validation and test examples are recorded. The last ones are printed, oldest first.
    """
    from compound.api.inspect_calls import format_recorded, select_recorded

    found = select_recorded(
        run, example=example, component=component, split=split, failed=failed, limit=limit
    )
    if as_json:
        print_json(found)
        return
    for recorded in found:
        print(format_recorded(recorded), end="\n\n")
    if not found:
        print(f"no recorded system run of {run} matches", file=sys.stderr)


@app.command(epilog=format_examples("track runs/demo --to mlflow", "track runs/demo --to wandb"))
def track(
    run: Annotated[Path, typer.Argument(help="Run directory.", show_default=False)],
    to: Annotated[str, typer.Option(help="tensorboard, trackio, mlflow or wandb.", show_default=False)],
) -> None:
    """Send the record of a run to an experiment tracker.

    Sends what the tracker does not have yet: all of a run that was not tracked, or the rest of one during
    which the tracker was not reachable. Baselines become nested runs. optimize.trackers tracks runs live.
    """
    from compound.formatting import plural
    from compound.trackers.tracking import send, tracker_name

    sent = send(tracker_name(to), run)
    print(f"{plural(sent, 'event')} sent to {to}" if sent else f"{to} has all events already")


@app.command(epilog=format_examples("runs", "runs --dir results", "runs --verify", "runs runs/demo --verify"))
def runs(
    paths: Annotated[
        Optional[list[Path]],  # noqa: UP045 - typer reads this at run time
        typer.Argument(metavar="[RUN]...", help="Run directories to verify. [default: all]"),
    ] = None,
    folder: Annotated[Path, typer.Option("--dir", help="Folder that holds the run directories.")] = Path(
        "runs"
    ),
    check_files: Annotated[
        bool,
        typer.Option(
            "--verify", help="Verify the checksums of all files; exit with code 1 if one is damaged."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List runs with their results, or verify their files."""
    from compound.api.sync import list_runs

    if check_files:
        _verify(paths or [], folder, as_json)
        return
    if paths:
        raise SpecError([f"{paths[0]}: RUN requires --verify; to list the runs in a folder, use --dir"])
    rows = list_runs(folder)
    if as_json:
        print_json(rows)
        return
    if not rows:
        print(f"no runs in {folder}")
    for row in rows:
        print(f"{row['run']:<32} {row['status']:<12} {row['result']}")


def _verify(paths: list[Path], folder: Path, as_json: bool) -> None:
    """Print the problems of run directories, and exit with code 1 if there are any."""
    from compound.api.sync import is_run, run_directories
    from compound.api.verify import verify

    chosen = paths or run_directories(folder)
    none = {str(path): ["not a run directory"] for path in chosen if not is_run(path)}
    found = {str(path): none.get(str(path)) or verify(path) for path in chosen}
    if as_json:
        print_json(found)
    else:
        if not found:
            print(f"no runs in {folder}")
        for run, problems in found.items():
            if run in none:
                print(f"{run}: not a run directory")
                continue
            print(f"{run}: {'ok' if not problems else f'{len(problems)} damaged'}")
            for problem in problems:
                print(f"  {problem}")
    if any(found.values()):
        raise typer.Exit(1)


@app.command(epilog=format_examples("schema > system.schema.json"))
def schema() -> None:
    """Print the JSON Schema of system YAML files, for editors."""
    from compound.spec import schema as spec_schema

    print_json(spec_schema())


@app.command(epilog=format_examples("plugins", "plugins --json"))
def plugins(as_json: AsJson = False) -> None:
    """List installed extensions.

    Shows what each provides, its package, and whether it can be loaded.
    """
    from compound.evaluation.metrics.named import BUILT_IN as METRICS
    from compound.registry.engines import BUILT_IN as ENGINES
    from compound.registry.methods import registered
    from compound.registry.plugins import GROUPS, HIDDEN
    from compound.registry.plugins import plugins as installed
    from compound.spec.kinds.body import BUILT_IN as KINDS
    from compound.spec.schema.wiring import WIRING_KEYS

    methods = registered()
    built_in: dict[str, Collection[str]] = {
        "components": (*KINDS, *WIRING_KEYS), "engines": ENGINES, "metrics": METRICS, "methods": methods,
        "optimizers": methods,
    }  # fmt: skip

    found: list[dict[str, str]] = []
    for plugin in (each for group in GROUPS for each in installed(group).values()):
        try:
            plugin.load()
            problem = HIDDEN if plugin.name in built_in[plugin.group] else ""
        except CompoundError as error:
            problem = error.message
        found.append(
            {
                "group": plugin.group, "name": plugin.name, "value": plugin.value,
                "package": plugin.distribution, "problem": problem,
            }
        )  # fmt: skip
    if as_json:
        print_json(found)
        return
    for row in found:
        print(
            f"{row['group']}: {row['name']} ({row['value']}, from {row['package']}) {row['problem']}".rstrip()
        )
    if not found:
        print("no installed package provides extensions", file=sys.stderr)
