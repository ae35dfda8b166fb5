"""Generate docs/reference.md from the docstrings of the public names; run by ``make docs``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from pydantic import BaseModel

import compound
from compound import testing
from compound.cli import app
from compound.settings.common import BudgetSettings
from compound.settings.optimize import OptimizeSettings
from compound.settings.sections import model_at, settings_models
from compound.spec.file import POSSIBLE

OUTPUT = Path(__file__).parent / "reference.md"
GROUPS = {
    "Declaring": "Input System LLM Retriever Selector Hyperparameter Function FirstOf Loop Map "
    "BM25 Dense PassageIndex",
    "Spaces": "Text Demos Choice Int Float LoRA",
    "Running and optimizing": "run evaluate optimize load load_result load_system Executor Result Budget",
    "Data and metrics": "Dataset Example Score exact_match token_f1 accuracy mrr recall_at_k custom",
    "Extending": "method optimizer recipe Settings State Optimizer Task Job Method Progress Proposal "
    "Scheduler Recipe Engine Request Completion Message Metric CallContext Port",
    "Values": "Configuration Trace Usage Component Operation CompoundError",
}
TESTING = "MetricKit ComponentKit EngineKit OptimizerKit RecipeKit run_kit ScriptedLM OptimizerJob RecipeJob"


def main() -> None:
    """Write the page."""
    OUTPUT.write_text(page(), encoding="utf-8")


def page() -> str:
    """Return the text of the page."""
    parts = ["# Reference", "Generated from the docstrings by `make docs`. `import compound as cp`."]
    for title, names in GROUPS.items():
        parts.append(f"## {title}")
        parts += [_entry(name) for name in names.split()]
    parts += ["## Testing", "`from compound import testing`; see [extending](guides/extending.md)."]
    parts += [_entry(name, testing) for name in TESTING.split()]
    parts += ["## `optimize:` in YAML", _settings(OptimizeSettings), _settings(BudgetSettings)]
    parts += [_settings(model, places) for model, places in settings_models().items()]
    engines = [_engine(kind, entry) for kind, entry in POSSIBLE["engine"].items()]
    parts += ["## `engines:` in YAML", "`engines: {NAME: {KIND: {…}}}`", *engines]
    parts += ["## Commands", *_commands()]
    return "\n\n".join(parts) + "\n"


def _entry(name: str, module: ModuleType = compound) -> str:
    value = getattr(module, name)
    target = value.__init__ if inspect.isclass(value) else value
    try:
        signature = re.sub(r"\bself(, |\))", r"\1", str(inspect.signature(target))).replace("(, ", "(")
    except (TypeError, ValueError):
        signature = "(…)"
    signature = re.sub(r" -> None$", "", signature) if inspect.isclass(value) else signature
    is_protocol = getattr(value, "_is_protocol", False)
    code = f"```python\n{name}{'' if is_protocol else _shorter(signature)}\n```"
    methods = "".join(_methods(value)) if is_protocol or name == "Recipe" else ""
    prefix = "cp" if module is compound else module.__name__.rpartition(".")[2]
    return f"### `{prefix}.{name}`\n\n{code}\n\n{_fenced(inspect.getdoc(value) or '')}{methods}"


def _methods(value: type) -> Iterator[str]:
    """Yield an entry for each public method and property that a class declares."""
    for name, member in vars(value).items():
        is_property = isinstance(member, property)
        if name.startswith("_") or not (is_property or inspect.isfunction(member)):
            continue
        shown = "" if is_property else re.sub(r"\bself(, )?", "", str(inspect.signature(member)))
        prefix = "async " if inspect.iscoroutinefunction(member) else ""
        yield f"\n\n- `{prefix}{name}{_shorter(shown)}`: {' '.join((inspect.getdoc(member) or '').split())}"


def _shorter(signature: str) -> str:
    signature = re.sub(r"<(?:class|function) '?([\w.]+)'?(?: at \w+)?>", r"\1", signature)
    signature = re.sub(r" = <.*? at \w+>", " = …", signature)  # an object's address differs in each process
    return re.sub(r"'|compound\.(?:\w+\.)+|collections\.abc\.|\b(?:base|space)\.(?=[A-Z])", "", signature)


def _fenced(doc: str) -> str:
    """Enclose doctest blocks in fences, and make Google section headings bold."""
    lines: list[str] = []
    inside = False
    for line in doc.splitlines():
        starts = line.lstrip().startswith(">>>")
        if starts and not inside:
            lines.append("\n```python")
            inside = True
        if inside and not line.strip():
            lines.append("```")
            inside = False
        heading = re.fullmatch(r"(Args|Attributes|Returns|Raises|Example|Yields):", line)
        lines.append(f"**{heading[1]}**\n" if heading else line.strip() if inside else _item(line))
    return "\n".join([*lines, "```"] if inside else lines)


def _item(line: str) -> str:
    match = re.fullmatch(r"    (\S[^:]*): (.*)", line)
    return f"- `{match[1]}`: {match[2]}" if match else line


def _settings(model: type[BaseModel], places: Sequence[str] = ()) -> str:
    where = f" ({', '.join(f'`{place}`' for place in places)})" if places else ""
    about = f"**{model.__name__}**{where}: {_fenced(inspect.getdoc(model) or '')}\n"
    return "\n".join([about, *(_rows(model) if model.model_fields else ["It has no settings.\n"])])


def _rows(model: type[BaseModel]) -> list[str]:
    rows = ["| key | default | description |", "| --- | --- | --- |"]
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True)
        shown = "see below" if hasattr(default, "model_dump") else f"`{default!r}`"
        shown = "required" if field.is_required() else shown
        about = " ".join(str(field.description).split())
        rows.append(f"| `{name}` | {shown} | {about} |")
    return rows


def _engine(kind: str, entry: type[BaseModel]) -> str:
    settings = model_at(entry, [kind])
    return "\n".join([f"**{kind}**: {inspect.getdoc(settings)}\n", *_rows(settings)])


def _commands() -> list[str]:
    return [
        f"`compound {command.name or command.callback.__name__}`: {inspect.getdoc(command.callback)}"
        for command in app.registered_commands
        if command.callback is not None
    ]


if __name__ == "__main__":
    main()
