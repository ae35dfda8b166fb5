"""Commands for external agents, whose requests go through the gateway."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from compound.cli.options import AsJson, File, NoImport, Sets, TrustOption, app, format_examples, print_json
from compound.errors import CompoundError, SpecError

if TYPE_CHECKING:
    from compound.api.discover import Discovery
    from compound.gateway.clustering import FoundPrompt

gateway = typer.Typer(
    help="Find the prompts of agents of other frameworks and languages.", no_args_is_help=True,
    rich_markup_mode=None,
)  # fmt: skip
app.add_typer(gateway, name="gateway")


@gateway.command(
    "discover",
    epilog=format_examples(
        "gateway discover system.yaml",
        "gateway discover system.yaml --examples 20 --yes --output prompts.yaml",
        "gateway discover system.yaml --temperature --model smollm2 --model openai/gpt-4o-mini",
    ),
)
def discover_prompts(
    file: File,
    examples: Annotated[int, typer.Option(min=2, help="Number of train examples to run the agents on.")] = 8,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Accept every prompt without a question.")] = False,
    output: Annotated[
        Optional[Path],  # noqa: UP045 - typer reads this at run time
        typer.Option(help="File to write; by default AGENT_prompts.yaml beside the system's file."),
    ] = None,
    model: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="Model among which the prompts may choose; repeatable."),
    ] = None,
    temperature: Annotated[bool, typer.Option(help="Tune the temperature of each prompt, too.")] = False,
    as_json: AsJson = False,
    sets: Sets = None,
    no_import: NoImport = False,
    trust: TrustOption = None,
) -> None:
    """Run the external agents of a system on some examples, and find their prompts.

    The texts of their requests are compared: what several runs share becomes a template, and what varies a
    placeholder, {{name}}. Each template is shown for confirmation, or all are accepted by --yes, which is
    needed without a terminal. The confirmed ones are written to a file that the agent's setting prompts_file
    names; their texts are tuned by compound optimize.
    """
    from compound.api.discover import discover
    from compound.cli.options import load_program

    program = load_program(file, sets, no_import, trust=trust)
    if program.data is None:
        raise SpecError([f"{file}:1:1: gateway discover needs `data:` in the file"])
    train = program.data.examples("train", list(program.system.inputs), limit=examples)
    found = discover(program.system, train, program.find_engine)
    if as_json:
        print_json([asdict(each) for each in found])
        return
    unasked = False
    for each in found:
        _show(each)
        confirmed = [prompt for prompt in each.prompts if _confirm(prompt, yes)]
        if confirmed:
            _write(each, confirmed, file, output, model or [], temperature)
        unasked = unasked or bool(each.prompts and not confirmed)
    if unasked:
        _explain_nothing_written()


def _show(found: Discovery) -> None:
    """Print the counts of an agent's requests."""
    print(f"{found.agent}: {found.runs} runs, {found.usage.calls} requests, {found.usage.tokens} tokens")
    for message in dict.fromkeys(found.failed):
        print(f"  a run failed: {message}")
    for name, count in found.recognized.items():
        print(f"  {count} requests have the declared prompt {name}")
    if found.other:
        print(f"  {found.other} requests have no prompt that several runs share; they are sent unchanged")
    if not found.prompts:
        print("  no further prompt was found")


def _confirm(prompt: FoundPrompt, yes: bool) -> bool:
    """Show a prompt, and ask whether to tune it."""
    print(f"\n{prompt.name}: {prompt.requests} requests in {prompt.runs} runs")
    for role, text in prompt.match.items():
        print(f"  [{role}]")
        print("\n".join(f"    {line}" for line in text.splitlines()))
    if yes or not sys.stdin.isatty():
        return yes
    return typer.confirm(f"Tune {prompt.name}?", default=True, err=True)


def _explain_nothing_written() -> None:
    """Print why an agent's prompts were not written; without a terminal, end with exit code 1."""
    if sys.stdin.isatty():
        print("\nno prompt was accepted, so that nothing was written")
        return
    print(
        "error: nothing was written: without a terminal, the prompts cannot be confirmed\n"
        "hint: check them above, and accept them all with --yes",
        file=sys.stderr,
    )
    raise typer.Exit(1)


def _write(
    found: Discovery,
    confirmed: list[FoundPrompt],
    file: Path,
    output: Path | None,
    models: list[str],
    temperature: bool,
) -> None:
    """Write the confirmed prompts, and say how to use the file."""
    from compound.api.discover import prompts_yaml

    path = output or file.with_name(f"{found.agent}_prompts.yaml")
    try:
        with path.open("x", encoding="utf-8") as opened:
            opened.write(prompts_yaml(confirmed, models=models, temperature=temperature))
    except FileExistsError:
        raise CompoundError(f"{path} exists", hint="choose another file with --output") from None
    setting = f"{found.agent}: {{external_agent: {{prompts_file: {path.name}}}}}"
    print(f"\nwrote {path}; add it to the agent:\n  {setting}")
