"""Generate the tables of keys in docs/reference/yaml*.md from the models of the file; run by ``make docs``.

A table is between ``<!-- keys NAME -->`` and ``<!-- end -->``. The text around it is written
manually, and tests load its examples.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from compound.optimization.settings.base import BudgetSettings, LimitSettings, ObjectiveSettings
from compound.optimization.settings.optimize import OptimizeSettings
from compound.optimization.settings.sections import model_at, settings_models
from compound.yaml import agents, kinds, spaces, types
from compound.yaml import file as file_model
from compound.yaml.types import Wiring

PAGES = sorted((Path(__file__).parent / "reference").glob("yaml*.md"))

MODELS: Mapping[str, type[BaseModel]] = {
    "file": file_model.File,
    "wiring": Wiring,
    **{
        name: model_at(kind.entry, [name])
        for name, kind in kinds.BUILT_IN.items()
        if name not in ("retriever", "hyperparameter")
    },
    **kinds.INDEX_SETTINGS,
    "tool function": agents.TOOLS["function"],
    "tool mcp": agents.MCPSettings,
    "external_agent prompts": agents.AgentPromptSettings,
    "external_agent match": agents.Match,
    "text": spaces.TextSpace,
    "demos": spaces.DemosSpace,
    "choice": spaces.ChoiceSpace,
    "int": spaces.IntSpace,
    "float": spaces.FloatSpace,
    "lora": spaces.LoRAShape,
    "data": file_model.DataSettings,
    "optimize": OptimizeSettings,
    "budget": BudgetSettings,
    "objective": ObjectiveSettings,
    "limits": LimitSettings,
    **{
        f"{group} {name}": model_at(entry, [name])
        for group in ("metric", "engine")
        for name, entry in types.ONE_OF[group].built_in.items()
    },
}
COMMON = {"wires", "when"}  # every component has these keys, so they are documented once
VALUES = {
    "RunnerSettings": "`{ray: {address: auto, workers: 8}}`, see [the settings](settings.md)",
    "IntSetting": "integer, or `{int: [LOW, HIGH]}`",
    "AnySetting": "any value, or one to tune",
    "Scalar": "string, number or boolean",
    "Number": "number",
    "ValidSize": "integer, or `auto`",
    "Any": "anything",
    "ComponentEntry": "component",
    "UseEntry": "`use` entry",
    "EngineEntry": "engine",
    "Proposer": "`demos`, `edits`, `opro`",
    "PolicyObjectiveField": "loss, see below",
    "ImitationObjectiveField": "loss, see below",
    "LocalTrainingField": "`ppo` or `grpo`, see below",
    "Sharing": "`each`, `shared`, or components by adapter",
    "Scale": "`trl`, `plain`, `population`, `center`, `leave_one_out`, `none`",
    "Schedule": "`constant`, `cosine`",
    "Penalties": "`module:name`, by component",
    "dict[ConfigurationFile, PositiveInt]": "integer, by file",
    "dict[str, NonNegativeFloat]": "number, by component",
    "tuple[NonNegativeFloat, PositiveFloat]": "two numbers",
    "ModelName": "string",
    "BackboneName": "string",
    "MethodName": "string",
    "tuple[str, ...] | list[str]": "list of strings",
    "tuple[float, float]": "two numbers",
    "Count": "integer",
    "fleet_vllm_settings": "settings of `vllm`",
    "fleet_openai_settings": "settings of `openai`",
    "MetricEntry": "metric",
    "OneRunMetric": "metric",
    "Demonstration": "`{inputs: …, outputs: …}`",
    "SplitBy": "a column, or `{train: SHARE, …}`",
    "Name": "name",
    "Code": "`module:name`",
    "Reference": "reference",
    "GraphEntry": "inputs, components, nodes, outputs",
    "Type": "type",
    "bool": "boolean",
    "float": "number",
    "int": "integer",
    "str": "string",
    "When": "reference, or `{reference: value}`",
}

KNOWN = {
    types.Scalar: VALUES["Scalar"],
    spaces.OptionSetting: VALUES["Scalar"],
    types.Number: "number",
    types.Name: "name",
    types.Type: "type",
    types.Code: VALUES["Code"],
    agents.Match: "mapping, see below",
}


def main() -> None:
    """Rewrite the pages."""
    for page in PAGES:
        page.write_text(with_keys(page.read_text(encoding="utf-8")), encoding="utf-8")


def sections() -> str:
    """Return a table for each section of ``optimize:`` and for each part of these sections."""
    found = settings_models()
    whole = {model: [p for p in places if "." not in p] for model, places in found.items()}
    texts = [
        f"### {_names(places, 'optimize.')}\n\n{_about(model)}\n\n{keys(model)}"
        for model, places in whole.items()
        if places
    ]
    texts.append("### Parts of sections")
    for model, places in found.items():
        if not whole[model] and model.model_fields:
            leaves, owners = (
                [p.rpartition(".")[2] for p in places],
                [p.partition(".")[0] for p in places],
            )
            texts.append(
                f"#### {_names(leaves)}\n\n{_about(model)} Part of {_names(owners)}.\n\n{keys(model)}"
            )
    return "\n\n".join(texts)


def _names(places: Sequence[str], prefix: str = "") -> str:
    return ", ".join(f"`{prefix}{place}`" for place in dict.fromkeys(places))


def _about(model: type[BaseModel]) -> str:
    return (inspect.getdoc(model) or "").partition("\n\n")[0]


def with_keys(page: str) -> str:
    """Replace every table of the page."""
    made = f"<!-- sections -->\n{sections()}\n<!-- end sections -->"
    page = re.sub(r"<!-- sections -->\n.*?<!-- end sections -->", lambda _: made, page, flags=re.S)

    def table(found: re.Match[str]) -> str:
        return f"<!-- keys {found[1]} -->\n{keys(MODELS[found[1]])}\n<!-- end -->"

    return re.sub(r"<!-- keys ([^>]*) -->\n.*?<!-- end -->", table, page, flags=re.S)


def keys(model: type[BaseModel]) -> str:
    """Return the table of a model's keys."""
    rows = ["| key | value | default | description |", "| --- | --- | --- | --- |"]
    own = _annotations(model)
    for name, field in sorted(model.model_fields.items(), key=lambda item: item[0] not in own):
        if model is not Wiring and name in COMMON:
            continue
        about = (
            " ".join(str(field.description or "").split()).replace("|", "\\|").replace("``", "`")
        )
        rows.append(
            f"| `{field.alias or name}` | {value(model, name)} | {default(field)} | {about} |"
        )
    return "\n".join(rows)


def default(field: FieldInfo) -> str:
    """Format the default value of a key."""
    if field.is_required():
        return "required"
    found = field.get_default(call_default_factory=True)
    if hasattr(found, "model_dump"):
        return "see below"
    return "–" if found in (None, "", [], {}, ()) else f"`{_yaml(found)}`"


def _yaml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_yaml, value))}]"
    return str(value)


def value(model: type[BaseModel], name: str) -> str:
    """Describe the values that a key accepts."""
    if (model, name) == (spaces.IntSpace, "value"):
        return VALUES["int"]
    declared = next(
        vars(cls)["__annotations__"][name] for cls in model.__mro__ if name in _annotations(cls)
    )
    if not isinstance(declared, str):
        return _words(declared)
    optional = re.sub(r"^Annotated\[(.*?), .*\]( \| None)?$", r"\1\2", declared)
    optional = optional.removesuffix(" | None")
    return _value(optional)


def _annotations(cls: type) -> Mapping[str, object]:
    found: Mapping[str, object] = vars(cls).get("__annotations__", {})
    return found


def _words(kind: object) -> str:
    """Describe a type in words."""
    for known, words in KNOWN.items():
        if kind == known:
            return words
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        for mark in arguments[1:]:
            if isinstance(mark, types.SelectedModel):
                return mark.noun
            if getattr(mark, "custom_error_type", "") == "form":
                text = str(mark.custom_error_message).removeprefix("must be ")
                return re.sub(r"(\{[^}]*\}+)", r"`\1`", re.sub(r"\ban? ", "", text))
        rest = arguments[1:-1]  # the last mark may be the description
        return _words(Annotated[(arguments[0], *rest)] if rest else arguments[0])
    if origin in (Union, UnionType):
        return " or ".join(
            dict.fromkeys(_words(part) for part in arguments if part is not NoneType)
        )
    if origin is Literal:
        return ", ".join(f"`{label}`" for label in arguments)
    if origin is tuple and arguments[-1] is not ...:
        return "two numbers"
    if origin in (list, Sequence) or (origin is tuple and arguments[-1] is ...):
        return "list of " + re.sub(
            r"\b(string|integer|number|boolean|name|tool|list(?= of))\b",
            r"\1s",
            _words(arguments[0]),
        )
    if origin in (dict, Mapping):
        return f"{_words(arguments[1])}, by {_words(arguments[0])}"
    text = kind.__name__ if isinstance(kind, type) and not arguments else str(kind)
    return _value(re.sub(r"\b(typing|collections\.abc|compound(?:\.\w+)+)\.", "", text))


def _value(text: str) -> str:
    """Describe a type, given its source text, in words."""
    if text in VALUES:
        return VALUES[text]
    if match := re.fullmatch(r"Literal\[(.*)\]", text):
        return ", ".join(f"`{label}`" for label in re.findall(r"['\"]([^'\"]*)['\"]", match[1]))
    if match := re.fullmatch(r"(?:list|Sequence)\[(.*)\]|tuple\[(.*), \.\.\.\]", text):
        item = _value(match[1] or match[2])
        return "list of " + re.sub(r"\b(string|integer|number|boolean|name)\b", r"\1s", item)
    if match := re.fullmatch(r"(?:dict|Mapping)\[(\w+), (.*)\]", text):
        return f"{_value(match[2])}, by {_value(match[1])}"
    if " | " in text and "[" not in text:
        return " or ".join(_value(part) for part in text.split(" | "))
    return (
        "see below"
        if text.endswith(("Settings", "Loss", "_settings"))
        else "mapping"
        if text[:1].isupper()
        else text
    )


if __name__ == "__main__":
    main()
