"""Command that exports the prompts and the graph of a system for use without this package."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from compound.cli.options import NoImport, Sets, TrustOption, app, format_examples, load_program
from compound.core.errors import ExportError, SpecError, suggest_name
from compound.core.security.untrusted import UntrustedFolder

if TYPE_CHECKING:
    from compound.yaml.program import Program

SYSTEM = "system.yaml"
DRAWINGS = ("text", "mermaid", "svg")
FORMATS = (*DRAWINGS, "optuna", "inspect")  # besides those of prompts


@app.command(
    epilog=format_examples(
        "export runs/qa/best.json --to messages --output prompts.json",
        "export best.json --system system.yaml --to openai",
        "export system.yaml --to messages   # the initial configuration",
        "export runs/qa --to optuna --output qa.db   # the candidates of a run",
        "export runs/qa --to inspect --output logs   # then: inspect view --log-dir logs",
        "export system.yaml --to svg > graph.svg     # also text or mermaid",
    )
)
def export(
    configuration: Annotated[
        Path,
        typer.Argument(
            help="Configuration, such as the best.json of a run, a system's YAML file, or a run."
        ),
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="messages, openai, dspy, text, mermaid, svg; optuna or inspect for a run.",
        ),
    ],
    output: Annotated[
        Optional[Path],  # noqa: UP045 - typer reads this at run time
        typer.Option("--output", "-o", help="File to write; default: stdout."),
    ] = None,
    system: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--system",
            help="YAML file of the system; default: system.yaml beside the configuration.",
        ),
    ] = None,
    sets: Sets = None,
    no_import: NoImport = False,
    trust: TrustOption = None,
) -> None:
    """Export the best prompts of a system for use elsewhere, or draw its graph.

    Formats of --to:

    \b
    messages  chat messages with placeholders, as JSON; LangChain reads them, too
    openai    request bodies, as JSON
    dspy      the state of a program imported from DSPy
    optuna    an SQLite file with an Optuna study: each candidate of a run is a trial
    inspect   logs of Inspect, for its viewer: every example before and after a run
    text, mermaid, svg  a drawing of the graph

    What cannot be exported is named, and nothing is written. To run the system itself, see compound
    serve.

    A system that is found beside the configuration may not name Python code, like with --no-import;
    give one that you trust as --system.
    """
    from typing import cast

    from compound.interchange.exports import TARGETS, Target, write
    from compound.interchange.exports import export as export_prompts

    if to not in (*FORMATS, *TARGETS):
        raise ExportError(f"cannot export to {to!r}", hint=suggest_name(to, (*FORMATS, *TARGETS)))
    if to in ("optuna", "inspect"):
        if output is None:
            made = (
                "an SQLite file, such as study.db" if to == "optuna" else "a folder, such as logs"
            )
            raise ExportError(f"--to {to} needs --output", hint=f"name {made}")
        if to == "optuna":
            from compound.interchange.exports import write_study

            print(write_study(configuration, output))
        else:
            from compound.report.inspect_log import write_inspect

            print(write_inspect(configuration, output))
        return
    if configuration.suffix in (".yaml", ".yml"):
        program = load_program(configuration, sets, no_import, trust=trust, sends=False)
    elif system is not None:
        program = load_program(system, sets, no_import, configuration, trust, sends=False)
    else:
        program = _beside(configuration, sets, trust)
    if to in DRAWINGS:
        from compound.report.graph import draw

        text = draw(program.system, to)
        if output is not None:
            write(output, text)
    else:
        text = export_prompts(program.system, cast("Target", to), output)
    if output is None:
        print(text)


def _beside(configuration: Path, sets: list[str] | None, trust: list[str] | None) -> Program:
    """Load the system beside a configuration; both may be someone else's, so that no code is imported."""
    from compound.graph.configuration import load

    if configuration.is_dir():
        load(configuration)  # raises an error that names the file in the folder
    file = configuration.parent / SYSTEM
    if UntrustedFolder(configuration.parent, error=ExportError).kind(SYSTEM) != "file":
        raise ExportError(
            f"{file} does not exist, so that the system of {configuration} is not known",
            hint="give --system system.yaml; a system declared in Python is exported with "
            "cp.interchange.export",
        )
    try:
        return load_program(file, sets, True, configuration, trust, sends=False)
    except SpecError as error:
        # the option was not given
        problems = [
            each.replace("--no-import does not allow", "a file beside the configuration may not do")
            for each in error.problems
        ]
        raise SpecError([*problems, f"if you trust this file, add --system {file}"]) from None
