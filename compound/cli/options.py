"""Application object, and options and output shared by several commands."""

from __future__ import annotations

import json
import sys
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from compound.core.errors import SpecError
from compound.core.formatting import plural
from compound.core.security.sanitize import sanitize_for_terminal

if TYPE_CHECKING:
    from compound.api.discover import Discovery
    from compound.components.gateway.clustering import FoundPrompt
    from compound.core.example import Metric
    from compound.evaluation.dataset import Dataset
    from compound.yaml import Program

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Declare compound AI systems as graphs and optimize them on data.",
    epilog="Every command accepts --debug to show the traceback of an error. compound --version prints "
    "the version.",
)


def format_examples(*commands: str) -> str:
    """Return a help epilog with one example per line."""
    lines = "\n".join(f"  compound {command}" for command in commands)
    return f"\b\nExamples:\n{lines}"


File = Annotated[Path, typer.Argument(help="YAML file of the system.", show_default=False)]
Sets = Annotated[
    Optional[list[str]],  # noqa: UP045 - typer reads this at run time
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override an entry of the file, e.g. optimize.seed=1; repeatable.",
    ),
]
NoImport = Annotated[
    bool,
    typer.Option(
        "--no-import",
        help="Reject files that name code, programs, servers, keys, or paths outside their folder.",
    ),
]
TrustOption = Annotated[
    Optional[list[str]],  # noqa: UP045 - typer reads this at run time
    typer.Option(
        "--trust",
        metavar="[NAME@]HOST",
        help="Trust a server named in the file; with NAME, send that environment variable to it as the key.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Config = Annotated[
    Optional[Path],  # noqa: UP045 - typer reads this at run time
    typer.Option("--config", help="Configuration to use, such as the best.json of a run."),
]
Strict = Annotated[bool, typer.Option("--strict", help="Reject data whose splits share examples.")]
Otel = Annotated[
    bool,
    typer.Option(
        "--otel",
        envvar="COMPOUND_OTEL",
        help="Export OpenTelemetry spans; the variables OTEL_* state where, and what they contain.",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Do not show progress.")]

# of Python scripts
Rows = Annotated[
    Optional[Path],  # noqa: UP045 - typer reads this at run time
    typer.Option("--data", help="Scripts: file with a column for each input and the answer."),
]
MetricName = Annotated[
    str,
    typer.Option(
        "--metric",
        help="Scripts: module:function, or the name of a metric. [default: by the answers]",
    ),
]
ScriptModel = Annotated[
    str, typer.Option("--lm", help="Scripts: model that answers. [default: those of the script]")
]
Yes = Annotated[
    bool, typer.Option("--yes", "-y", help="Scripts: tune every prompt without a question.")
]


def tracing(otel: bool) -> AbstractContextManager[object]:
    """Return a context manager that exports OpenTelemetry spans of its block, if requested."""
    if not otel:
        return nullcontext()
    from compound.execution.tracing.setup import trace_with

    return trace_with()


def load_program(
    file: Path,
    sets: list[str] | None,
    no_import: bool,
    config: Path | None = None,
    trust: list[str] | None = None,
    *,
    sends: bool = True,
    reads: bool = False,
) -> Program:
    """Load a YAML file, apply overrides, and bind a configuration; see `compound.yaml.load`."""
    # commands import their modules when called, to keep --help fast
    from dataclasses import replace

    from compound.graph.configuration import load
    from compound.yaml import load as load_spec

    overrides = []
    for item in sets or []:
        key, separator, value = item.partition("=")
        if not separator or not key:
            raise SpecError([f"--set {item}: must be KEY=VALUE, such as optimize.seed=1"])
        overrides.append((key, value))
    program = load_spec(
        file,
        overrides=overrides,
        allow_import=not no_import,
        trust=trust or (),
        sends=sends,
        reads=reads,
    )
    if config is None:
        return program
    return replace(program, system=program.system.bind(load(config)))


def print_json(value: object) -> None:
    """Print JSON to stdout, in ASCII if its encoding does not hold every sign."""
    plain = not str(sys.stdout.encoding).lower().startswith("utf")
    print(json.dumps(value, indent=2, ensure_ascii=plain, default=str))


def require_data(program: Program, what: str) -> tuple[Dataset, Metric]:
    """Return the data and metric of a program, or raise that command `what` needs them."""
    data, metric = program.data, program.metric
    if data is None or metric is None:
        missing = [key for key, found in (("data", data), ("metric", metric)) if found is None]
        raise SpecError(
            [f"{program.path}:1:1: {what} needs `{key}:` in the file" for key in missing]
        )
    return data, metric


def show_prompts(found: Discovery) -> None:
    """Print the counts of an agent's requests."""
    print(
        f"{found.agent}: {found.runs} runs, {found.usage.calls} requests, {found.usage.tokens} tokens"
    )
    for message, count in Counter(found.failed).most_common():
        print(f"  {plural(count, 'run')} failed: {sanitize_for_terminal(message)}")
    for name, count in found.recognized.items():
        print(f"  {count} requests have the declared prompt {name}")
    if found.other:
        print(
            f"  {found.other} requests have no prompt that several runs share; they are sent unchanged"
        )
    if not found.prompts:
        print("  no further prompt was found")


def confirm_prompt(prompt: FoundPrompt, yes: bool) -> bool:
    """Show a prompt, and ask whether to tune it."""
    print(f"\n{prompt.name}: {prompt.requests} requests in {prompt.runs} runs")
    for role, text in prompt.match.items():
        print(f"  [{role}]")
        print("\n".join(f"    {line}" for line in sanitize_for_terminal(text).splitlines()))
    if yes or not sys.stdin.isatty():
        return yes
    return typer.confirm(f"Tune {prompt.name}?", default=True, err=True)
