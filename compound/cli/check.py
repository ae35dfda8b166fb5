"""Commands that check files and extensions, and that manage local models."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from compound.cli.errors import explain
from compound.cli.options import (
    AsJson,
    NoImport,
    Sets,
    Strict,
    TrustOption,
    app,
    format_examples,
    load_program,
    print_json,
)
from compound.core.errors import CompoundError, SpecError

if TYPE_CHECKING:
    from compound.engines.models import KnownModel, TermsOfUse


@app.command(
    epilog=format_examples(
        "check system.yaml",
        "check *.yaml",
        "check a.yaml --no-import",
        "check --schema > system.schema.json",
        "check --extensions",
    )
)
def check(
    files: Annotated[
        Optional[list[Path]],  # noqa: UP045 - typer reads this at run time
        typer.Argument(help="System YAML files.", show_default=False),
    ] = None,
    sets: Sets = None,
    strict: Strict = False,
    no_import: NoImport = False,
    as_json: AsJson = False,
    trust: TrustOption = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of files, for editors.")
    ] = False,
    extensions: Annotated[
        bool,
        typer.Option(
            "--extensions",
            help="List installed extensions, their packages, and whether they can be loaded.",
        ),
    ] = False,
) -> None:
    """Check files without running them.

    Checks syntax, names, types, wiring, settings, the method, and data available locally, and
    reports every error of the file and of the data.

    Loads no model and downloads nothing; data on the hub is listed as not checked. With --json,
    several files give a list with an entry for every file, including its problems. Exit code 2 if a
    file is invalid, or local data is missing.
    """
    if schema:
        from compound.yaml import schema as spec_schema

        print_json(spec_schema())
    elif extensions:
        _list_extensions(as_json)
    elif files:
        _check(files, sets, no_import, trust, as_json=as_json, strict=strict)
    else:
        raise SpecError(["check needs a FILE, --schema or --extensions"])


def _check(
    files: list[Path],
    sets: list[str] | None,
    no_import: bool,
    trust: list[str] | None,
    *,
    as_json: bool,
    strict: bool,
) -> None:
    """Check files one after the other, and exit with the highest code."""
    from compound.api.check import check_program, problems_of, with_data_errors
    from compound.core.formatting import plural

    found: list[dict[str, Any]] = []
    codes = []
    for file in files:
        try:
            program = load_program(file, sets, no_import, trust=trust, reads=True)
            checked = check_program(program, strict=strict)
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


def _list_extensions(as_json: bool) -> None:
    """List the plug-ins of installed packages, with the problem of each that cannot be used."""
    from compound.evaluation.metrics.named import BUILT_IN as METRICS
    from compound.graph.registry.engines import BUILT_IN as ENGINES
    from compound.graph.registry.plugins import GROUPS, HIDDEN, registered
    from compound.graph.registry.plugins import plugins as installed
    from compound.yaml.kinds import BUILT_IN as KINDS
    from compound.yaml.types import WIRING_KEYS

    methods = registered()
    built_in: dict[str, Collection[str]] = {
        "components": (*KINDS, *WIRING_KEYS),
        "engines": ENGINES,
        "metrics": METRICS,
        "methods": methods,
        "optimizers": methods,
    }

    found: list[dict[str, str]] = []
    for plugin in (each for group in GROUPS for each in installed(group).values()):
        try:
            plugin.load()
            problem = HIDDEN if plugin.name in built_in[plugin.group] else ""
        except CompoundError as error:
            problem = error.message
        about = {"value": plugin.value, "package": plugin.distribution, "problem": problem}
        found.append({"group": plugin.group, "name": plugin.name, **about})
    if as_json:
        print_json(found)
        return
    for row in found:
        print(
            f"{row['group']}: {row['name']} ({row['value']}, from {row['package']}) {row['problem']}".rstrip()
        )
    if not found:
        print("no installed package provides extensions", file=sys.stderr)


models = typer.Typer(
    help="List or download models that run in this process.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(models, name="models")


@models.command("get", epilog=format_examples("models get smollm2", "models get gemma3-270m"))
def models_get(
    name: Annotated[str, typer.Argument(help="Name of the model.")] = "smollm2",
    accept_terms: Annotated[
        bool,
        typer.Option("--accept-terms", help="Accept the model's terms of use without a question."),
    ] = False,
) -> None:
    """Download the weights of a model.

    If the use of a model is subject to terms, they are shown, and must be accepted before the
    download.
    """
    from compound.engines.models import install

    def accept(model: KnownModel, terms: TermsOfUse) -> bool:
        print(
            f"Use of {model.name} ({model.hub_id}) is subject to the {terms.name}:\n  {terms.url}\n"
            f"The download has about {model.megabytes} MB.",
            file=sys.stderr,
        )
        if accept_terms:
            return True
        return sys.stdin.isatty() and typer.confirm(f"Do you accept the {terms.name}?", err=True)

    print(install(name, accept))


@models.command("list", epilog=format_examples("models list"))
def models_list(as_json: AsJson = False) -> None:
    """List known models and the location of their weights."""
    from compound.engines.models import list_models

    found = list_models()
    if as_json:
        print_json(found)
    else:
        for model in found:
            print(f"{model.name:<12} {model.state:<9} {model.where}")
