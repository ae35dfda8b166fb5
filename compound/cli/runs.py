"""Commands that list, inspect and show runs."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated, Optional

import typer

from compound.cli.options import AsJson, app, format_examples, print_json
from compound.core.errors import explain_missing
from compound.core.formatting import width_of
from compound.core.security.sanitize import sanitize_for_terminal

RECENT = 3e7  # seconds in which a date needs no year

runs = typer.Typer(
    help="List, report, compare, trace, track, verify or copy runs; by default list those in runs.",
    invoke_without_command=True,
    rich_markup_mode=None,
)
app.add_typer(runs, name="runs")

Folder = Annotated[Path, typer.Option("--dir", help="Folder that holds the run directories.")]
Run = Annotated[Path, typer.Argument(help="Run directory.", show_default=False)]


@runs.callback()
def default(context: typer.Context) -> None:  # noqa: D103 - the help is that of the group
    if context.invoked_subcommand is None:
        list_()


@runs.command("list", epilog=format_examples("runs list", "runs list --dir results --json"))
def list_(folder: Folder = Path("runs"), as_json: AsJson = False) -> None:
    """List runs with their results."""
    from compound.api.studio.runs import list_runs
    from compound.report.rendering import render_text

    rows = list_runs(folder)
    if as_json:
        print_json(rows)
        return
    if not rows:
        print(f"no runs in {folder}")
        return
    for row in rows:
        name = sanitize_for_terminal(os.path.relpath(row["run"], folder))
        row["name"] = " ".join(name.split())
        row["mark"] = "*" * (row.get("split") == "valid" and row["before"] is not None)
        if began := row.get("began"):
            form = "%d %b" if time.time() - began < RECENT else "%Y-%m"
            row["date"] = time.strftime(form, time.localtime(began))
    print(render_text("runs.jinja", {"rows": rows, "width": width_of(sys.stdout)}))


@runs.command(epilog=format_examples("runs verify", "runs verify runs/demo"))
def verify(
    paths: Annotated[
        Optional[list[Path]],  # noqa: UP045 - typer reads this at run time
        typer.Argument(metavar="[RUN]...", help="Run directories to verify. [default: all]"),
    ] = None,
    folder: Folder = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Verify the checksums of all files of runs.

    Exit code 1 if a file is damaged.
    """
    from compound.api.sync import is_run, run_directories
    from compound.api.verify import verify as verify_run

    chosen = paths or run_directories(folder)
    none = {str(path): ["not a run directory"] for path in chosen if not is_run(path)}
    found = {str(path): none.get(str(path)) or verify_run(path) for path in chosen}
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


@runs.command(epilog=format_examples("runs report runs/demo", "runs report runs/demo --json"))
def report(
    run: Run,
    as_json: AsJson = False,
) -> None:
    """Regenerate the report of a run.

    Prints the paths of report.md and report.html.
    """
    from compound.report import summarize, terminal_summary, write

    if as_json:
        print_json(summarize(run))
        return
    write(run)
    print(terminal_summary(run, width_of(sys.stdout)))


@runs.command(
    epilog=format_examples(
        "runs trace runs/demo",
        "runs trace runs/demo --failed --limit 1",
        "runs trace runs/demo --split test --example 17 --component answerer",
        "runs trace runs/demo --json",
    )
)
def trace(
    run: Run,
    example: Annotated[str, typer.Option(help="Id of an example. [default: all]")] = "",
    component: Annotated[str, typer.Option(help="Name of a component. [default: all]")] = "",
    split: Annotated[str, typer.Option(help="valid or test. [default: both]")] = "",
    failed: Annotated[bool, typer.Option("--failed", help="Only failed runs.")] = False,
    limit: Annotated[
        int, typer.Option(min=1, help="Maximum number of system runs, the last ones.")
    ] = 3,
    as_json: AsJson = False,
) -> None:
    """Print the calls of recorded system runs, with their messages.

    Runs on validation and test examples are recorded. The last ones are printed, oldest first.
    """
    from compound.api.result import format_recorded, select_recorded

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


@runs.command(epilog=format_examples("runs compare runs/qa runs/qa-2"))
def compare(
    first: Run,
    second: Run,
    as_json: AsJson = False,
) -> None:
    """Compare the results of two runs: score, tokens, dollars and seconds, and changed examples.

    All numbers are of the examples that both results were tested on, with 95 % intervals.
    """
    from dataclasses import asdict

    from compound.api.compare import compare as compare_runs
    from compound.report.record import to_strict_json

    found = compare_runs(first, second)
    if as_json:
        print_json(to_strict_json(asdict(found)))
    else:
        print(f"first: {first}\nsecond: {second}\n\n{found.text(width_of(sys.stdout))}")


@runs.command(
    epilog=format_examples("runs track runs/demo --to mlflow", "runs track runs/demo --to wandb")
)
def track(
    run: Run,
    to: Annotated[str, typer.Option(help="tensorboard, mlflow or wandb.", show_default=False)],
) -> None:
    """Send the record of a run to an experiment tracker.

    Sends what the tracker does not have yet: all of a run that was not tracked, or the rest of one
    during which the tracker was not reachable. optimize.trackers tracks runs live.
    """
    from compound.core.formatting import plural
    from compound.report.trackers.tracking import send

    sent = send(to, run)
    print(f"{plural(sent, 'event')} sent to {to}" if sent else f"{to} has all events already")


@runs.command(
    epilog=format_examples(
        "runs copy runs/demo s3://bucket/runs/demo", "runs copy s3://bucket/runs/demo runs/copy"
    )
)
def copy(
    source: Annotated[str, typer.Argument(help="Run directory, or its address.")],
    target: Annotated[str, typer.Argument(help="Address in a store, or a new folder.")],
) -> None:
    """Copy a finished run to a store (S3), or back to a folder, where commands can open it.

    Checksums are verified. Keys are those of the environment and of AWS configuration files.
    """
    from compound.api.verify import copy_run
    from compound.core.formatting import plural

    print(f"{plural(copy_run(source, target), 'file')} copied to {target}")


@app.command(epilog=format_examples("ui", "ui runs/demo --no-browser", "ui results --port 8300"))
def ui(
    folder: Annotated[
        Path, typer.Argument(help="Folder of runs, or a run directory.", file_okay=False)
    ] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 chooses a free one.")] = 8200,
    no_browser: Annotated[
        bool, typer.Option("--no-browser", help="Do not open the page in a browser.")
    ] = False,
) -> None:
    """Show runs in a browser: results, candidates, examples, local rewards, training.

    Runs in progress are followed. Pages are served to this machine only. Nothing is written but
    labels and the file that stops a run.
    """
    with explain_missing("the studio"):
        from compound.api.studio.application import serve

    def opened(address: str) -> None:
        place = folder if folder.exists() else f"{folder}, which does not exist yet,"
        print(f"the runs in {place} are shown on {address} (Ctrl-C ends)", flush=True)
        if not no_browser:
            import webbrowser

            webbrowser.open(address)

    serve(folder, "127.0.0.1", port, opened)
