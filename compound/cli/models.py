"""Commands for local models."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from compound.cli.options import AsJson, app, format_examples, print_json

if TYPE_CHECKING:
    from compound.components.engines.known_models import KnownModel, Terms

models = typer.Typer(
    help="List or download models that run in this process.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(models, name="models")


@models.command("get", epilog=format_examples("models get smollm2", "models get gemma3-270m"))
def models_get(
    name: Annotated[str, typer.Argument(help="Name of the model.")] = "smollm2",
    accept_terms: Annotated[
        bool, typer.Option("--accept-terms", help="Accept the model's terms of use without a question.")
    ] = False,
) -> None:
    """Download the weights of a model.

    If the use of a model is subject to terms, they are shown, and must be accepted before the download.
    """
    from compound.components.engines.models import install

    def accept(model: KnownModel, terms: Terms) -> bool:
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
    from compound.components.engines.models import list_models

    found = list_models()
    if as_json:
        print_json(found)
    else:
        for model in found:
            print(f"{model.name:<12} {model.state:<9} {model.where}")
