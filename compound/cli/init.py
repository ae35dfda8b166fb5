"""Command that writes the file of a system for data, and of the prompts of agents for a system."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from compound.cli.options import (
    MetricName,
    NoImport,
    Rows,
    Sets,
    TrustOption,
    app,
    confirm_prompt,
    format_examples,
    load_program,
    print_json,
    show_prompts,
)
from compound.cli.script import ScriptOptions, is_script, write_script_system
from compound.cli.tables import FEWEST, MOST_LABEL, NODE, port_names, read_table
from compound.core.errors import CompoundError, SpecError

if TYPE_CHECKING:
    from compound.api.discover import Discovery
    from compound.components.gateway.clustering import FoundPrompt
    from compound.yaml import Program


@app.command(
    epilog=format_examples(
        "init data.csv",
        "init data/ --lm openai/gpt-4o-mini --out qa.yaml",
        "init system.yaml --examples 20 --yes",
        "init script.py --data rows.csv --metric metrics:score",
    )
)
def init(
    source: Annotated[
        Path,
        typer.Argument(
            help="Data file, or folder with train, dev and test files; the YAML file of a system "
            "with external agents; or a Python script that calls OpenAI's API.",
            show_default=False,
        ),
    ],
    lm: Annotated[
        str, typer.Option(help="Model of the system. [default: smollm2, or those of a script]")
    ] = "",
    out: Annotated[
        Optional[Path],  # noqa: UP045 - typer reads this at run time
        typer.Option(help="File to write. [default: system.yaml, or AGENT_prompts.yaml]"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    examples: Annotated[
        int, typer.Option(min=2, help="Agents: number of train examples to run them on.")
    ] = 8,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Agents: accept every prompt without a question.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Agents: print the found prompts as JSON, write nothing.")
    ] = False,
    rows: Rows = None,
    metric_name: MetricName = "",
    sets: Sets = None,
    no_import: NoImport = False,
    trust: TrustOption = None,
) -> None:
    """Write a system of one model call for data, of a script, or the prompts of the agents of a system.

    Of data, the answer is the column with a usual name (answer, label, ...), otherwise the last
    one; a few different values become the labels of the output. All other columns are inputs,
    except ids and splits.

    The external agents of a system are run on some examples, and the texts of their requests are
    compared: what several runs share becomes a template, and what varies a placeholder, {{name}}.
    Each template is shown for confirmation, or all are accepted by --yes, which is needed without a
    terminal. The confirmed ones are written to a file that the agent's setting prompts_file names;
    their texts are tuned by compound optimize.

    For a script, see compound optimize, which writes the same file and then optimizes it.
    """
    if is_script(source):
        if no_import:
            raise SpecError([f"--no-import does not allow to run {source}"])
        chosen = ScriptOptions(rows, metric_name or None, lm or None, yes)
        written, _ = write_script_system(source, chosen)
        print(f"now run: compound optimize {written} --dry-run")
        return
    if source.suffix in (".yaml", ".yml"):
        program = load_program(source, sets, no_import, trust=trust)
        found = _discover(program, source, examples)
        if as_json:
            print_json(
                [{k: v for k, v in asdict(each).items() if k != "results"} for each in found]
            )
        else:
            _write_prompts(found, source, out, yes=yes, force=force)
        return
    _write_system(source, lm or "smollm2", out or Path("system.yaml"), force)


def _write_system(data: Path, lm: str, out: Path, force: bool) -> None:
    from compound.api.check import check_program
    from compound.interchange.exports import write as write_file
    from compound.yaml import loads

    folder = Path(os.path.relpath(data, out.parent)).as_posix()
    text = system_file(data, folder, lm)
    if out.exists() and not force:
        raise CompoundError(
            f"{out} exists", hint="choose another name by --out, or replace it by --force"
        )
    program = loads(text, path=out)
    write_file(out, text)
    try:
        checked = check_program(program)  # reports what is wrong with the rows
    except CompoundError:
        print(f"{out} is written, but cannot be used yet:", file=sys.stderr)
        raise
    print(f"{checked}\nedit the prompt in {out}, then run: compound optimize {out} --dry-run")


def system_file(data: Path, path: str, lm: str) -> str:
    """Return the YAML text of a system for some data.

    Args:
        data: the file or folder.
        path: the same, relative to the folder of the YAML file.
        lm: the model of the system.

    Raises:
        DataError: it has no rows, or fewer than two columns with a name and values.
    """
    from compound.yaml.text import Flow, write

    table = read_table(data, path)
    longest = max(table.inputs.values(), key=lambda column: ("str" in column.kinds, column.longest))
    asked, given = _words(table.gold.name), _words(longest.name)
    llm = {
        "prompt": {"tune": f"Give the {asked} of the {given}."},
        "demos": {"tune": 4},
        "max_tokens": table.tokens,
    }
    tree: dict[str, object] = {
        "system": port_names([data.name.partition(".")[0]])[0],
        "lm": lm,
        "inputs": Flow({port: column.type for port, column in table.inputs.items()}),
        "components": {
            NODE: {
                "llm": Flow(llm),
                "in": Flow({port: f"${port}" for port in table.inputs}),
                **({"out": table.kind} if table.kind != "str" else {}),
            }
        },
        "outputs": Flow({table.output: f"${NODE}"}),
        "data": Flow(table.source),
        "metric": Flow({table.metric: Flow({"output": table.output, "gold": table.output})}),
    }
    if table.rows >= FEWEST or data.is_dir():
        tree["optimize"] = Flow({"budget": Flow({"system_runs": 300})})
    return write(tree)


def _words(name: str) -> str:
    words = " ".join(re.findall(r"[^\W_]+", name)).lower()
    return words.removeprefix("the ")[:MOST_LABEL] or "value"


# --- the prompts of agents -----------------------------------------------------------------------


def _discover(program: Program, file: Path, examples: int) -> list[Discovery]:
    """Run the agents of a system on train examples, and return their prompts."""
    from compound.api.discover import discover

    if program.data is None:
        raise SpecError([f"{file}:1:1: finding the prompts of agents needs `data:` in the file"])
    train = program.data.examples("train", list(program.system.inputs), limit=examples)
    return discover(program.system, train, program.find_engine)


def _write_prompts(
    found: Sequence[Discovery], file: Path, out: Path | None, *, yes: bool, force: bool
) -> None:
    """Show the prompts, and write the confirmed ones."""
    unasked = False
    for each in found:
        show_prompts(each)
        confirmed = [prompt for prompt in each.prompts if confirm_prompt(prompt, yes)]
        if confirmed:
            path = out or file.with_name(f"{each.agent}_prompts.yaml")
            _write(each, confirmed, path, force=force)
        unasked = unasked or bool(each.prompts and not confirmed)
    if unasked and sys.stdin.isatty():
        print("\nno prompt was accepted, so that nothing was written")
    elif unasked:
        print(
            "error: nothing was written: without a terminal, the prompts cannot be confirmed\n"
            "hint: check them above, and accept them all with --yes",
            file=sys.stderr,
        )
        raise typer.Exit(1)


def _write(found: Discovery, confirmed: list[FoundPrompt], path: Path, *, force: bool) -> None:
    """Write the confirmed prompts, and say how to use the file."""
    from compound.api.discover import prompts_tree
    from compound.yaml.text import write

    try:
        with path.open("w" if force else "x", encoding="utf-8") as opened:
            opened.write(write(prompts_tree(confirmed)))
    except FileExistsError:
        raise CompoundError(
            f"{path} exists", hint="choose another name by --out, or replace it by --force"
        ) from None
    setting = f"{found.agent}: {{external_agent: {{prompts_file: {path.name}}}}}"
    print(f"\nwrote {path}; add it to the agent:\n  {setting}")
