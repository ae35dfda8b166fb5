"""Model of the YAML file, its JSON Schema, and the errors that it finds, with their position and a hint."""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    create_model,
)
from pydantic_core import ErrorDetails

from compound.core.errors import suggest_name
from compound.core.threads import ThreadUse
from compound.evaluation.dataset import Split
from compound.evaluation.metrics.named import METRICS, metric_factory
from compound.evaluation.metrics.named import installed as installed_metrics
from compound.optimization.settings.base import CommonSettings
from compound.optimization.settings.sections import (
    ELSEWHERE,
    REMOVED,
    REMOVED_SECTIONS,
    SYNONYMS,
    UserSections,
    model_at,
    optimize_model,
    suggest_key,
)
from compound.yaml.document import Address, Document, format_value
from compound.yaml.engines import EngineEntry
from compound.yaml.kinds import GraphEntry
from compound.yaml.spaces import SPACES, entry_model, make_model
from compound.yaml.types import (
    MARK,
    ONE_OF,
    REFERRED,
    TAGGED,
    WIRING_KEYS,
    Code,
    Model,
    Name,
    Number,
    SelectedModel,
    validate_at,
)

SplitBy = Annotated[
    Annotated[str, Tag("~column")] | Annotated[dict[Split, float], Tag("~shares")],
    Discriminator(lambda value: "~shares" if isinstance(value, Mapping) else "~column"),
]


class DataSettings(Model):
    """Location of the examples."""

    path: str = Field(min_length=1)
    """A folder or file relative to this file, or in a store (`s3://bucket/folder`), a folder of feedback from
    `compound serve`, or a data set's id on the Hugging Face hub, `owner/name`."""
    train: str = "train"
    """The split to learn from."""
    valid: str = "dev"
    """The split for acceptance tests. If there is no file or hub split `dev`, the one named `valid`,
    `validation` or `val` is read."""
    test: str | None = "test"
    """The split that is read once, for the report; `null` when there is none."""
    fields: dict[str, str] = Field(default={})
    """Column name of each input or gold field whose column is named differently."""
    id: str = "id"
    """The column that identifies a row."""
    split_by: SplitBy | None = None
    """For one file: the column that names the split, or the share of each. For a folder of feedback: the
    shares."""
    subset: str | None = None
    """The name of the data set's subset (configuration) on the hub."""


class CustomMetric(Model):
    """A function of (outputs, example) that returns a number or a Score."""

    call: Code
    """The function, as module:name."""
    settings: dict[Name, Any] | None = None
    """The settings of a metric that has some: the function is called with them, and returns the metric."""
    name: str = ""
    """The name in reports; the function's name by default."""
    bounds: Annotated[list[Number], Field(min_length=2, max_length=2)] | None = None
    """[low, high]: the minimum and maximum possible score. Intervals then stay within them."""
    thread: ThreadUse = "auto"
    """Where a synchronous function runs: on the event loop until a call took longer than 10 ms (`auto`), or
    always or never in threads."""


_ONE_RUN = {
    **{name: entry_model(name, factory) for name, factory in METRICS.items()},
    "custom": make_model("custom_entry", "A custom metric.", {"custom": (CustomMetric, ...)}),
}


def _metrics(noun: str, models: Mapping[str, type[Model]]) -> SelectedModel:
    def load(name: str) -> type[Model]:
        return entry_model(name, metric_factory(name), "metric_")

    return SelectedModel(noun, models, installed_metrics, load)


if TYPE_CHECKING:
    OneRunMetric = Model
else:
    OneRunMetric = Annotated[Model, _metrics("metric of one run", _ONE_RUN)]


class PassAtKMetric(Model):
    """Whether at least one of k runs of an example passes another metric; `repeats` must be at least k."""

    k: int = Field(ge=1)
    """The number of runs of which one must pass."""
    of: OneRunMetric
    """The metric that scores a run, such as `{exact_match: {output: answer}}`."""
    threshold: Number = 1.0
    """The lowest score that passes."""


if TYPE_CHECKING:
    MetricEntry = Model
else:
    _PASS_AT_K = {"pass_at_k": (PassAtKMetric, ...)}
    _ENTRY = make_model("pass_at_k_entry", "pass@k of a metric.", _PASS_AT_K)
    MetricEntry = Annotated[Model, _metrics("metric", {**_ONE_RUN, "pass_at_k": _ENTRY})]


class File(GraphEntry):
    """A compound AI system with its data, its metric and the settings of its optimization."""

    system: Name
    """The system's name, for run directories and reports."""
    lm: str | None = None
    """The default model of LLM components: smollm2, a folder, provider/model, or an engine's name."""
    engines: dict[str, EngineEntry] = Field(default={})
    """Named models with settings, usable wherever a model is named."""
    data: DataSettings | None = None
    """The examples."""
    metric: MetricEntry | None = None
    """The metric that scores outputs; exactly one."""
    optimize: CommonSettings = CommonSettings()
    """Settings of the optimization."""


@functools.cache
def file_model(own: UserSections = ()) -> type[File]:
    """Return the model of a file whose ``optimize:`` has a section for each method."""
    described = File.model_fields["optimize"].description
    optimize: Any = (optimize_model(own), Field(default=None, description=described))
    return create_model("File", __base__=_MadeFile, __doc__=File.__doc__, optimize=optimize)


class _MadeFile(File):
    """Base of the file models created from fields with explicit descriptions."""

    model_config = ConfigDict(use_attribute_docstrings=False)


def schema() -> dict[str, object]:
    """Return the JSON Schema (draft 2020-12) of the file."""
    REFERRED.clear()  # an earlier schema may have had other installed packages
    found = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **file_model().model_json_schema(),
    }
    definitions: dict[str, object] = found["$defs"]
    while missing := REFERRED.keys() - definitions:
        for name in missing:
            own = REFERRED[name].model_json_schema()
            definitions |= own.pop("$defs", {})
            definitions[name] = own
    _close(found)
    found["$defs"]["OptimizeSettings"]["additionalProperties"] = {
        "type": "object"
    }  # a custom method
    return found


def _close(part: object) -> None:
    """Forbid keys that are not names, which pydantic does not by a pattern; refer to selected models."""
    if isinstance(part, dict):
        if MARK in part:
            part["$ref"] = f"#/$defs/{part.pop(MARK)}"
        if "patternProperties" in part:
            part.setdefault("additionalProperties", False)
        for item in part.values():
            _close(item)
    elif isinstance(part, list):
        for item in part:
            _close(item)


_NAME = "must consist of letters, digits and underscores, not starting with a digit"
_MUST: Mapping[str, str] = {
    "string_type": "must be a string",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping",
    "model_attributes_type": "must be a mapping",
    "none_required": "must be left out",
    "greater_than": "must be > {gt}",
    "greater_than_equal": "must be >= {ge}",
    "less_than": "must be < {lt}",
    "less_than_equal": "must be <= {le}",
    "string_pattern_mismatch": _NAME,
    "form": "{message}",
    "wrong": "{what}",
}
_MISSING: Mapping[Address, str] = {
    (
        "data",
        "path",
    ): "for a folder with train.jsonl, dev.jsonl and test.jsonl write `data: {path: FOLDER}`; "
    "for files a.jsonl and b.jsonl in it, `data: {path: FOLDER, train: a, valid: b, test: null}`; for one "
    "file, `data: {path: rows.jsonl, split_by: {train: 0.6, valid: 0.2, test: 0.2}}`",
}
"""Hints for missing entries whose key alone does not explain them."""


def report_schema_errors(document: Document, model: type[File]) -> None:
    """Report every entry of the file that its model rejects."""
    try:
        validate_at(document, model)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            _note(document, detail, model)


def _note(document: Document, detail: ErrorDetails, model: type[File]) -> None:
    address, of_key = _address(document, detail["loc"])
    value = document.at(address)
    if of_key:
        _bad_key(document, detail, address)
    elif detail["type"] == "extra_forbidden" and address[0] == "optimize" and len(address) > 1:
        _unknown_setting(document, address, model)
    elif detail["type"] in _SPECIAL:
        _SPECIAL[detail["type"]](document, detail, address)
    elif detail["type"] == "missing":
        document.report(
            address[:-1], f"{str(address[-1])!r} is missing", _MISSING.get(address, ""), key=True
        )
    else:
        context = {**detail.get("ctx", {}), "message": detail["msg"].removeprefix("Value error, ")}
        hint = str(context.get("hint", ""))
        must = _MUST.get(detail["type"])
        what = must.format(**context) if must else str(context.get("what", context["message"]))
        if detail["type"] == "form" and isinstance(value, dict) and not set(value) & set(SPACES):
            hint = suggest_name(next(iter(value), ""), SPACES)
        document.report(address, f"{what}, but got {format_value(value)}" if must else what, hint)


def _address(document: Document, loc: tuple[str | int, ...]) -> tuple[Address, bool]:
    """Return the address of an error without pydantic's tags, and whether the error is about a key."""
    address: Address = ()
    for part in loc:
        if not _is_mark(part) or document.has((*address, part)):
            address = (*address, part)
    return address, bool(loc) and loc[-1] == "[key]" and address[-1:] != ("[key]",)


def _is_mark(part: str | int) -> bool:
    return isinstance(part, str) and (part.startswith("~") or part == "[key]")


def _bad_key(document: Document, detail: ErrorDetails, address: Address) -> None:
    context = detail.get("ctx", {})
    if detail["type"] == "literal_error":
        document.report(address, "unknown key", _expected(detail, str(address[-1])), key=True)
    else:
        document.report(
            address, str(context.get("what", _NAME)), str(context.get("hint", "")), key=True
        )


def _expected(detail: ErrorDetails, name: str) -> str:
    listed = str(detail.get("ctx", {}).get("expected", "")).replace(" or ", ", ")
    return suggest_name(name, [item.strip("'") for item in listed.split(", ")])


def _unknown_key(document: Document, detail: ErrorDetails, address: Address) -> None:
    fields = _model_at(document, detail["loc"][:-1]).model_fields
    possible = [field.alias or name for name, field in fields.items()]
    name = str(address[-1])
    hint = suggest_name(name, possible)
    if address[-2:-1] in (("lora",), ("weights",)):  # names in other libraries
        told = f"set {SYNONYMS[name]} in the section of the method" if name in SYNONYMS else hint
        hint = ELSEWHERE.get(name, told)
    document.report(address, "unknown key", hint, key=True)


def _unknown_setting(document: Document, address: Address, model: type[File]) -> None:
    """Report a key under ``optimize:`` that does not exist, or no longer."""
    if len(address) == 2 and address[1] in REMOVED_SECTIONS:
        document.report(address, REMOVED, key=True)
    else:
        hint = suggest_key(address[1:], model_at(model, ["optimize"]))
        document.report(address, "unknown key", hint, key=True)


def _not_listed(document: Document, detail: ErrorDetails, address: Address) -> None:
    value = document.at(address)
    document.report(address, f"cannot be {format_value(value)}", _expected(detail, str(value)))


def _count(document: Document, detail: ErrorDetails, address: Address) -> None:
    context = detail.get("ctx", {})
    low, high, found = (
        context.get("min_length"),
        context.get("max_length"),
        context.get("actual_length"),
    )
    if found == 0 or not document.at(address):
        document.report(address, "must not be empty")
    else:
        limit = f"at least {low}" if low is not None else f"at most {high}"
        document.report(address, f"must have {limit} entries, but has {found}")


def _one_key(document: Document, detail: ErrorDetails, address: Address) -> None:
    noun, value = detail["msg"], document.at(address)
    possible = ONE_OF[noun].names
    if not isinstance(value, dict):
        document.report(
            address,
            f"must be a mapping with one {noun}, but got {format_value(value)}",
            _all(possible),
        )
        return
    found = [key for key in value if key in possible]
    others = [key for key in value if key not in possible and key not in WIRING_KEYS]
    if found:
        kinds = " and ".join(map(repr, found))
        document.report(
            (*address, found[1]), f"names several: {kinds}", f"keep one {noun}", key=True
        )
    elif others:
        hint = ONE_OF[noun].former.get(others[0]) or suggest_name(others[0], possible)
        document.report((*address, others[0]), f"unknown {noun}", hint, key=True)
    else:
        document.report(address, f"names no {noun}", _all(possible), key=True)


def _one_label(document: Document, detail: ErrorDetails, address: Address) -> None:
    key, value = detail["msg"], document.at(address)
    labels = ONE_OF[key].names
    if not isinstance(value, dict):
        document.report(address, f"must be a mapping, but got {format_value(value)}")
    elif key not in value:
        document.report(address, f"{key!r} is missing", _all(labels), key=True)
    else:
        told = f"unknown {key} {format_value(value[key])}"
        document.report((*address, key), told, suggest_name(str(value[key]), labels))


def _all(names: Iterable[str]) -> str:
    return f"possible: {', '.join(sorted(names))}"


_SPECIAL: Mapping[str, Callable[[Document, ErrorDetails, Address], None]] = {
    "extra_forbidden": _unknown_key,
    "literal_error": _not_listed,
    "too_short": _count,
    "too_long": _count,
    "string_too_short": _count,
    "one_key": _one_key,
    "one_label": _one_label,
}


def _model_at(document: Document, loc: tuple[str | int, ...]) -> type[BaseModel]:
    """Return the model at an error's location, where tags name models and keys name their fields."""
    kind: Any = File
    address: Address = ()
    for part in loc:
        if _is_mark(part) and not document.has((*address, part)):
            kind = TAGGED.get(str(part), kind)
        else:
            kind = _inside(kind, document.at(address), part)
            address = (*address, part)
    return next(_models(kind, document.at(address)), File)


def _inside(kind: Any, value: object, part: str | int) -> Any:  # noqa: ANN401 - types of any form
    """Return the type of a field, or of the items of a list or mapping."""
    for model in _models(kind, value):
        for name, field in model.model_fields.items():
            if part in (name, field.alias):
                return Annotated[(field.annotation, *field.metadata, None)]  # with all marks
    while typing.get_origin(kind) is Annotated:
        kind = typing.get_args(kind)[0]
    options = [typing.get_args(option)[-1:] for option in (kind, *typing.get_args(kind))]
    return next((option[0] for option in options if option), kind)


def _models(kind: Any, value: object) -> Iterator[type[BaseModel]]:  # noqa: ANN401
    if isinstance(kind, SelectedModel):
        yield from filter(None, [kind.model(value)])
    elif isinstance(kind, type) and not typing.get_args(kind):
        yield from [kind] if issubclass(kind, BaseModel) else []
    elif typing.get_origin(kind) not in (list, dict):
        selected = [mark for mark in typing.get_args(kind) if isinstance(mark, SelectedModel)]
        for option in selected or typing.get_args(kind):
            yield from _models(option, value)
