"""Commands that serve a system over HTTP, and that find prompts of agents behind the gateway."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from compound.cli.options import (
    AsJson,
    Config,
    File,
    NoImport,
    Sets,
    TrustOption,
    app,
    format_examples,
    load_program,
    print_json,
)
from compound.core.errors import CompoundError, SpecError

if TYPE_CHECKING:
    from compound.api.discover import Discovery
    from compound.components.gateway.clustering import FoundPrompt

KEY = "COMPOUND_SERVE_KEY"


@app.command(
    epilog=format_examples(
        "serve system.yaml --config runs/demo/best.json",
        "serve system.yaml --port 8080 --feedback served",
        f"serve system.yaml --host 0.0.0.0   # needs a key in {KEY}",
    )
)
def serve(
    file: File,
    config: Config = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than loopback need a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 chooses a free one.")] = 8000,
    key_env: Annotated[
        str, typer.Option(help="Environment variable that holds the bearer key.")
    ] = KEY,
    allow_host: Annotated[
        Optional[list[str]],  # noqa: UP045 - typer reads this at run time
        typer.Option(help="Further name by which clients call the server; repeatable."),
    ] = None,
    allow_origin: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="Web origin whose pages may call the server; repeatable."),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Maximum number of runs at a time.")] = 64,
    queue: Annotated[
        int, typer.Option(min=0, help="Maximum number of runs that wait; more get 429.")
    ] = 256,
    timeout: Annotated[float, typer.Option(help="Time limit of a run in seconds.")] = 120.0,
    max_body: Annotated[int, typer.Option(min=1, help="Maximum size of a body in bytes.")] = 2**20,
    drain: Annotated[
        float, typer.Option(help="Maximum seconds for runs in flight after SIGTERM.")
    ] = 30.0,
    drain_delay: Annotated[
        float,
        typer.Option(help="Seconds to accept requests after SIGTERM while /ready reports 503."),
    ] = 0.0,
    reload_seconds: Annotated[
        float,
        typer.Option(
            "--reload", help="Seconds between checks for a new configuration file; 0: none."
        ),
    ] = 1.0,
    feedback: Annotated[
        Optional[Path], typer.Option(help="Folder to record runs and feedback in.")  # noqa: UP045
    ] = None,
    max_feedback: Annotated[
        int,
        typer.Option(
            min=1, help="Maximum size of that folder in bytes; nothing is recorded beyond."
        ),
    ] = 2**30,
    sets: Sets = None,
    no_import: NoImport = False,
    trust: TrustOption = None,
) -> None:
    """Serve a system over HTTP.

    POST /v1/run, /v1/batch, /v1/run/stream and /v1/feedback; /v1/chat/completions for systems with
    one text input and one output; /openapi.json, /health, /ready and /metrics. A changed
    configuration file is used without a restart. SIGTERM finishes the runs in flight.
    """
    from compound.api.serving import ServerSettings
    from compound.api.serving import serve as run_server

    settings = ServerSettings(
        host=host,
        port=port,
        key=os.environ.get(key_env) or None,
        allow_hosts=tuple(allow_host or ()),
        allow_origins=tuple(allow_origin or ()),
        concurrency=concurrency,
        queue=queue,
        timeout=timeout,
        max_body=max_body,
        drain=drain,
        drain_delay=drain_delay,
        reload=reload_seconds,
        feedback=feedback,
        max_feedback=max_feedback,
    )
    program = load_program(file, sets, no_import, trust=trust)
    run_server(program.system, config=config, engines=program.find_engine, settings=settings)


gateway = typer.Typer(
    help="Find the prompts of agents of other frameworks and languages.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
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
    examples: Annotated[
        int, typer.Option(min=2, help="Number of train examples to run the agents on.")
    ] = 8,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Accept every prompt without a question.")
    ] = False,
    output: Annotated[
        Optional[Path],  # noqa: UP045 - typer reads this at run time
        typer.Option(help="File to write; by default AGENT_prompts.yaml beside the system's file."),
    ] = None,
    model: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="Model among which the prompts may choose; repeatable."),
    ] = None,
    temperature: Annotated[
        bool, typer.Option(help="Tune the temperature of each prompt, too.")
    ] = False,
    as_json: AsJson = False,
    sets: Sets = None,
    no_import: NoImport = False,
    trust: TrustOption = None,
) -> None:
    """Run the external agents of a system on some examples, and find their prompts.

    The texts of their requests are compared: what several runs share becomes a template, and what
    varies a placeholder, {{name}}. Each template is shown for confirmation, or all are accepted by
    --yes, which is needed without a terminal. The confirmed ones are written to a file that the
    agent's setting prompts_file names; their texts are tuned by compound optimize.
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
    print(
        f"{found.agent}: {found.runs} runs, {found.usage.calls} requests, {found.usage.tokens} tokens"
    )
    for message in dict.fromkeys(found.failed):
        print(f"  a run failed: {message}")
    for name, count in found.recognized.items():
        print(f"  {count} requests have the declared prompt {name}")
    if found.other:
        print(
            f"  {found.other} requests have no prompt that several runs share; they are sent unchanged"
        )
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
