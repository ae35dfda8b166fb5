"""Command that exports a system for use without this package."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from compound.cli.options import NoImport, Sets, TrustOption, app, format_examples, load_program
from compound.errors import ExportError, SpecError
from compound.security.untrusted import UntrustedFolder

if TYPE_CHECKING:
    from compound.spec.program import Program

SYSTEM = "system.yaml"


@app.command(
    epilog=format_examples(
        "export runs/qa/best.json --to messages",
        "export runs/qa/best.json --to python --output qa.py",
        "export runs/qa/best.json --to langchain --output prompts.json",
        "export best.json --system system.yaml --to openai",
        "export system.yaml --to dspy --output qa_program.py   # the initial configuration",
        "export runs/qa --to optuna --output qa.db   # the candidates of a run",
    )
)
def export(
    configuration: Annotated[
        Path,
        typer.Argument(help="Configuration, such as the best.json of a run, a system's YAML file, or a run."),
    ],
    to: Annotated[
        str, typer.Option("--to", help="messages, openai, langchain, dspy, python, or optuna for a run.")
    ],
    output: Annotated[
        Optional[Path],  # noqa: UP045 - typer reads this at run time
        typer.Option("--output", "-o", help="File to write; default: stdout."),
    ] = None,
    system: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--system", help="YAML file of the system; default: system.yaml beside the configuration."
        ),
    ] = None,
    sets: Sets = None,
    no_import: NoImport = False,
    trust: TrustOption = None,
) -> None:
    """Export a system with its best prompts for use elsewhere.

    messages: chat messages with placeholders, as JSON. openai: request bodies, as JSON. langchain: a module
    of chat prompts, or their JSON for an output that ends in .json. dspy: a DSPy program. python: a module
    that runs the system with the standard library only. What cannot be exported is named, and nothing is
    written. optuna: an SQLite file with a study of Optuna, in which each candidate of a run is a trial.

    A system that is found beside the configuration may not name Python code, like with --no-import; give one
    that you trust as --system.
    """
    from typing import cast

    from compound.exports.export import Target
    from compound.exports.export import export as write

    if to == "optuna":
        from compound.exports.optuna_study import write_study

        if output is None:
            raise ExportError(
                "--to optuna needs --output", hint="name an SQLite file, such as --output study.db"
            )
        print(write_study(configuration, output))
        return
    if configuration.suffix in (".yaml", ".yml"):
        program = load_program(configuration, sets, no_import, trust=trust, sends=False)
    elif system is not None:
        program = load_program(system, sets, no_import, configuration, trust, sends=False)
    else:
        program = _beside(configuration, sets, trust)
    text = write(program.system, cast("Target", to), output)
    if output is None:
        print(text)


def _beside(configuration: Path, sets: list[str] | None, trust: list[str] | None) -> Program:
    """Load the system beside a configuration; both may come from someone else, so that no code is imported.

    Raises:
        ConfigurationError: the configuration is a folder.
        ExportError: there is no system.
        SpecError: the file cannot be used, or it names code.
    """
    from compound.graph.configuration import load

    if configuration.is_dir():
        load(configuration)  # raises an error that names the file in the folder
    file = configuration.parent / SYSTEM
    if UntrustedFolder(configuration.parent, error=ExportError).kind(SYSTEM) != "file":
        raise ExportError(
            f"{file} does not exist, so that the system of {configuration} is not known",
            hint="give --system system.yaml; a system declared in Python is exported with cp.export",
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
