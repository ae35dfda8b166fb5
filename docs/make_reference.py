"""Write the references of settings, commands and Python names from the code: ``make docs``.

The pages of the packages of the Python API are built with the site; see `docs/make_site.py`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from pydantic import BaseModel
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

import compound
from compound.cli import app
from compound.optimization.settings.base import (
    BudgetSettings,
    LimitSettings,
    ObjectiveSettings,
    RaySettings,
)
from compound.optimization.settings.optimize import OptimizeSettings
from compound.optimization.settings.sections import model_at, settings_models
from compound.yaml.types import ONE_OF

FOLDER = Path(__file__).parent / "reference"
NOTE = "<!-- written by `make docs` -->"
SAME_NAMES = (
    "Keys of a [file](yaml.md) and arguments have the same names. `cp.optimize`, `cp.evaluate` and "
    "`cp.sweep` take the section `optimize:` as `settings={…}`, or its keys as arguments. Exceptions: `call` "
    "is the argument `function` of `cp.Function`, the limits of `code` are "
    "`cp.components.CodeRunner(limits=…)`, "
    "`prompts_file` is `prompts`, and `out` is `output`. "
    "[Use in Python](../guides/python.md) has examples."
)


GROUPS = {
    "Declare": "Input System LLM Retriever Selector Function FirstOf Loop Map Agent Tool tool component "
    "llm system Port Image",
    "Spaces": "Text Demos Choice Int Float LoRA",
    "Data": "Dataset Example Score",
    "Run and optimize": "run stream evaluate optimize sweep load load_result load_system Executor Result "
    "Budget OptimizeSettings Configuration Trace inspect_calls trace_with CompoundError RunFailed",
}
NAMESPACES = {
    "Components": "components",
    "Metrics": "metrics",
    "Engines": "engines",
    "Other libraries": "interchange",
    "Extend": "ext",
}


def main() -> None:
    """Write the pages."""
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


def pages() -> dict[str, str]:
    """Return the text of each page."""
    return {
        "settings.md": _settings_page(),
        "commands.md": _commands_page(),
        "python.md": _python_page(),
    }


def _python_page() -> str:
    """Return the table of the names that ``import compound as cp`` offers; links lead to their code."""
    assert sorted(name for names in GROUPS.values() for name in names.split()) == compound.__all__
    parts = ["# Python", NOTE, "```python\nimport compound as cp\n```", SAME_NAMES]
    groups = {title: (compound, "cp", names.split()) for title, names in GROUPS.items()}
    for title, name in NAMESPACES.items():
        package = importlib.import_module(f"compound.{name}")
        groups[title] = package, f"cp.{name}", package.__all__
    for title, (package, prefix, names) in groups.items():
        rows = [_name_row(package, prefix, name) for name in names]
        parts += [f"## {title}", "\n".join(["| name | description |", "| --- | --- |", *rows])]
    return "\n\n".join(parts) + "\n"


def _name_row(package: ModuleType, prefix: str, name: str) -> str:
    value = getattr(package, name)
    documented = inspect.isclass(value) or inspect.isfunction(value)
    about = (inspect.getdoc(value) or "").partition("\n\n")[0] if documented else ""
    module = package._HOME[name].partition(":")[0].replace(".", "/")
    described = " ".join(about.split()).replace("|", "&#124;")
    return f"| [`{prefix}.{name}`](../../{module}.py) | {described} |"


def _settings_page() -> str:
    parts = [
        "# Settings",
        NOTE,
        "Every key below `optimize:` and `engines:` of the [YAML file](yaml.md), with its default. "
        "`compound check --schema` writes the same as JSON Schema, for editors.",
        "## `optimize:`",
        _settings(OptimizeSettings),
        _settings(BudgetSettings),
        _settings(ObjectiveSettings),
        _settings(LimitSettings),
        _settings(RaySettings, ["runner.ray"]),
        *(_settings(model, places) for model, places in settings_models().items()),
        "## `engines:`",
        "`engines: {NAME: {KIND: {...}}}`",
        *(_engine(kind, entry) for kind, entry in ONE_OF["engine"].built_in.items()),
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
        shown = (
            f"{type(default).__name__}, below"
            if isinstance(default, BaseModel)
            else f"`{default!r}`"
        )
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
