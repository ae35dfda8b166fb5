"""Commands for local models."""

from __future__ import annotations

from typing import Annotated

import typer

from compound.cli.options import AsJson, app, format_examples, print_json

models = typer.Typer(
    help="List or download models that run in this process.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(models, name="models")


@models.command("get", epilog=format_examples("models get smollm2"))
def models_get(name: Annotated[str, typer.Argument(help="Name of the model.")] = "smollm2") -> None:
    """Download the weights of a model."""
    from compound.components.engines.models import install

    print(install(name))


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
