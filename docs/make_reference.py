"""Write the reference of settings and of commands from the models and the command line: ``make docs``.

The reference of Python names is built with the site; see `docs/site_pages.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from compound.cli import app
from compound.settings.common import BudgetSettings, RaySettings
from compound.settings.optimize import OptimizeSettings
from compound.settings.sections import model_at, settings_models
from compound.spec.file import POSSIBLE

FOLDER = Path(__file__).parent / "reference"
NOTE = "<!-- written by `make docs` -->"


def main() -> None:
    """Write the pages."""
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


def pages() -> dict[str, str]:
    """Return the text of each page."""
    return {"settings.md": _settings_page(), "commands.md": _commands_page()}


def _settings_page() -> str:
    parts = [
        "# Settings",
        NOTE,
        "Every key below `optimize:` and `engines:` of the [YAML file](yaml.md), with its default. "
        "`compound schema` writes the same as JSON Schema, for editors.",
        "## `optimize:`",
        _settings(OptimizeSettings),
        _settings(BudgetSettings),
        _settings(RaySettings, ["runner.ray"]),
        *(_settings(model, places) for model, places in settings_models().items()),
        "## `engines:`",
        "`engines: {NAME: {KIND: {...}}}`",
        *(_engine(kind, entry) for kind, entry in POSSIBLE["engine"].items()),
    ]
    return "\n\n".join(parts) + "\n"


def _settings(model: type[BaseModel], places: Sequence[str] = ()) -> str:
    where = f"Used by {', '.join(f'`{place}`' for place in places)}.\n\n" if places else ""
    table = _rows(model) if model.model_fields else ["It has no settings.\n"]
    return "\n".join([f"### {model.__name__}\n\n{_text(model)}\n\n{where}", *table])


def _text(model: type[BaseModel]) -> str:
    """Return the docstring of a model, without its example in Python."""
    return (inspect.getdoc(model) or "").partition("\nExample:")[0].strip()


def _rows(model: type[BaseModel]) -> list[str]:
    rows = ["| key | default | description |", "| --- | --- | --- |"]
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True)
        shown = f"{type(default).__name__}, below" if isinstance(default, BaseModel) else f"`{default!r}`"
        shown = "required" if field.is_required() else shown
        rows.append(f"| `{name}` | {shown} | {' '.join(str(field.description).split())} |")
    return rows


def _engine(kind: str, entry: type[BaseModel]) -> str:
    settings = model_at(entry, [kind])
    return "\n".join([f"### `{kind}`\n\n{_text(settings)}\n", *_rows(settings)])


def _commands_page() -> str:
    parts = ["# Commands", NOTE, "`python -m compound` is the same as `compound`."]
    for words in _commands(_group()):
        result = CliRunner().invoke(
            app, [*words, "--help"], prog_name="compound", env={"COLUMNS": "100", "TERM": "dumb"}
        )
        parts += [f"## compound {' '.join(words)}", f"```text\n{result.output.strip()}\n```"]
    return "\n\n".join(parts) + "\n"


def _group() -> TyperGroup:
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    return group


def _commands(group: TyperGroup) -> Iterator[list[str]]:
    """Yield the words of each command, those of subgroups included."""
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from ([name, *words] for words in _commands(command))
        else:
            yield [name]


if __name__ == "__main__":
    main()
