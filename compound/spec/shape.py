"""Validate a document against typed models; report errors with their position and the nearest valid name."""

from __future__ import annotations

import json
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from compound.errors import suggest_name
from compound.settings.renamed import ELSEWHERE, OLD_SECTIONS, SYNONYMS
from compound.settings.sections import model_at, renamed_settings, suggest_key
from compound.spec.file import INSTALLED, POSSIBLE, TAGGED, File
from compound.spec.schema.settings import SPACES
from compound.spec.schema.wiring import WIRING_KEYS
from compound.spec.yaml.document import Address, Document, format_value

if TYPE_CHECKING:
    from typing_extensions import TypeForm


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
    ("data", "path"): "for a folder with train.jsonl, dev.jsonl and test.jsonl write `data: {path: FOLDER}`; "
    "for files a.jsonl and b.jsonl in it, `data: {path: FOLDER, train: a, valid: b, test: null}`; for one "
    "file, `data: {path: rows.jsonl, split_by: {train: 0.6, valid: 0.2, test: 0.2}}`",
}
"""Hints for missing entries whose key alone does not explain them."""
Kind = TypeVar("Kind")
_ADAPTERS: dict[object, TypeAdapter[Any]] = {}  # cached by type: building one is slow


def parse_at(document: Document, kind: TypeForm[Kind], address: Address = ()) -> Kind | None:
    """Return the value at an address as a ``kind``, or None if it is invalid; errors are not reported."""
    try:
        return _validated(document, kind, address)
    except ValidationError:
        return None


def report_schema_errors(document: Document, model: type[File]) -> None:
    """Report every entry of the file that its model rejects."""
    try:
        _validated(document, model, ())
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            _note(document, detail, model)


def _validated(document: Document, kind: TypeForm[Kind], address: Address) -> Kind:
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    adapter: TypeAdapter[Kind] = _ADAPTERS[kind]
    # Validate JSON, not Python values: in strict mode only JSON input accepts a list for a tuple.
    return adapter.validate_json(json.dumps(document.at(address)), strict=True)


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
        document.report(address[:-1], f"{str(address[-1])!r} is missing", _MISSING.get(address, ""), key=True)
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
        document.report(address, str(context.get("what", _NAME)), str(context.get("hint", "")), key=True)


def _expected(detail: ErrorDetails, name: str) -> str:
    listed = str(detail.get("ctx", {}).get("expected", "")).replace(" or ", ", ")
    return suggest_name(name, [item.strip("'") for item in listed.split(", ")])


def _unknown_key(document: Document, detail: ErrorDetails, address: Address) -> None:
    fields = _model_at(detail["loc"][:-1]).model_fields
    possible = [field.alias or name for name, field in fields.items()]
    name = str(address[-1])
    hint = suggest_name(name, possible)
    if address[-2:-1] in (("lora",), ("weights",)):  # names in other libraries
        told = f"set {SYNONYMS[name]} in the section of the method" if name in SYNONYMS else hint
        hint = ELSEWHERE.get(name, told)
    document.report(address, "unknown key", hint, key=True)


def _unknown_setting(document: Document, address: Address, model: type[File]) -> None:
    """Report a key under ``optimize:`` that does not exist or was renamed."""
    values = document.at(("optimize",))
    if len(address) == 2 and address[1] in OLD_SECTIONS and isinstance(values, Mapping):
        for leaf, now in renamed_settings(str(address[1]), values):
            document.report((*address, leaf) if leaf else address, now, key=True)
        return
    document.report(address, "unknown key", suggest_key(address[1:], model_at(model, ["optimize"])), key=True)


def _not_listed(document: Document, detail: ErrorDetails, address: Address) -> None:
    value = document.at(address)
    document.report(address, f"cannot be {format_value(value)}", _expected(detail, str(value)))


def _count(document: Document, detail: ErrorDetails, address: Address) -> None:
    context = detail.get("ctx", {})
    low, high, found = context.get("min_length"), context.get("max_length"), context.get("actual_length")
    if found == 0 or not document.at(address):
        document.report(address, "must not be empty")
    else:
        limit = f"at least {low}" if low is not None else f"at most {high}"
        document.report(address, f"must have {limit} entries, but has {found}")


def _one_key(document: Document, detail: ErrorDetails, address: Address) -> None:
    noun = detail["msg"]
    possible = [*POSSIBLE[noun], *INSTALLED[noun].names()]
    value = document.at(address)
    if not isinstance(value, dict):
        document.report(
            address, f"must be a mapping with one {noun}, but got {format_value(value)}", _all(possible)
        )
        return
    found = [key for key in value if key in possible]
    others = [key for key in value if key not in possible and key not in WIRING_KEYS]
    if found:
        kinds = " and ".join(map(repr, found))
        document.report((*address, found[1]), f"names several: {kinds}", f"keep one {noun}", key=True)
    elif others:
        document.report((*address, others[0]), f"unknown {noun}", suggest_name(others[0], possible), key=True)
    else:
        document.report(address, f"names no {noun}", _all(possible), key=True)


def _one_label(document: Document, detail: ErrorDetails, address: Address) -> None:
    key, labels = detail["msg"], str(detail["ctx"]["labels"]).split(", ")
    value = document.at(address)
    if not isinstance(value, dict):
        document.report(address, f"must be a mapping, but got {format_value(value)}")
    elif key not in value:
        document.report(address, f"{key!r} is missing", _all(labels), key=True)
    else:
        label = value[key]
        document.report(
            (*address, key), f"unknown {key} {format_value(label)}", suggest_name(str(label), labels)
        )


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


def _model_at(loc: tuple[str | int, ...]) -> type[BaseModel]:
    """Return the model at an error's location, where tags name models and keys name their fields."""
    model: type[BaseModel] = File
    for place, part in enumerate(loc):
        if str(part).startswith("~installed-"):
            model = INSTALLED[str(part).removeprefix("~installed-")].model(str(loc[place + 1]))
        elif _is_mark(part):
            model = TAGGED.get(str(part), model)
        for name, field in model.model_fields.items():
            if part in (name, field.alias):
                model = next(_models(field.annotation), model)
    return model


def _models(annotation: object) -> Iterator[type[BaseModel]]:
    """Yield the model in an annotation if there is only one; otherwise a tag in the location selects it."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    found = [model for argument in typing.get_args(annotation) for model in _models(argument)]
    yield from found if len(found) == 1 else ()
