"""Types of entries: names, references, port types, code, the edges of a node, and selections of models."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainValidator,
    Tag,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from compound.core.errors import CompoundError, DeclarationError
from compound.graph.json_types import json_type, record_type
from compound.graph.types import parse
from compound.yaml.document import Address, Document

if TYPE_CHECKING:
    from typing_extensions import TypeForm

LONGEST_TYPE = 500  # characters; bounds the recursion of the parser on untrusted input
_REFERENCE = re.compile(r"\$[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*\Z")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_CODE = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_.]*\Z")


class Model(BaseModel):
    """Base model of all parts of the file: no unknown keys, no type conversions."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True
    )

    @property
    def given(self) -> dict[str, Any]:
        """Fields that the file sets; others are left to the defaults of the class they are passed to."""
        names = [name for name in type(self).model_fields if name in self.model_fields_set]
        return {name: getattr(self, name) for name in names}


class MadeModel(Model):
    """Base of models that are created from fields with explicit descriptions, since they have no source."""

    model_config = ConfigDict(use_attribute_docstrings=False)


def value_error(what: str, hint: str = "") -> PydanticCustomError:
    """Return the error of an invalid value."""
    return PydanticCustomError("wrong", "{what}", {"what": what, "hint": hint})


def as_pydantic_error(error: CompoundError) -> PydanticCustomError:
    """Return an error as one that pydantic collects."""
    return PydanticCustomError("refused", "{what}", {"what": error.message, "hint": error.hint})


def _type(value: object) -> object:
    if isinstance(value, Mapping):
        return _mapping_type(value)
    if not isinstance(value, str) or len(value) > LONGEST_TYPE:
        raise value_error("must be a type such as str, int or list[str]")
    try:
        return parse(value)
    except DeclarationError as error:
        raise as_pydantic_error(error) from None


def _mapping_type(value: Mapping[object, object]) -> object:
    """Return the type of ``{json_schema: SCHEMA}``, or of an object with the given fields."""
    schema = value.get("json_schema")
    try:
        if isinstance(schema, Mapping):
            if len(value) > 1:
                raise value_error("must have no key besides json_schema")
            return json_type({str(key): part for key, part in schema.items()})
        if not value or not all(isinstance(name, str) and _NAME.match(name) for name in value):
            hint = "write {name: str, age: int}, or {json_schema: {type: object, ...}}"
            raise value_error("must be the types of fields by their names", hint)
        fields = {str(name): _type(part) for name, part in value.items()}
        return record_type(fields)
    except DeclarationError as error:
        raise as_pydantic_error(error) from None


def _plain(accepts: Callable[[Any], bool], what: str, hint: str = "") -> Callable[[object], Any]:
    def validate(value: object) -> object:
        if accepts(value):
            return value
        raise value_error(what, hint)

    return validate


def _matches(pattern: re.Pattern[str]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, str) and pattern.match(value) is not None


def _is_scalar(value: object) -> bool:
    return isinstance(value, str | int | float | bool)


def _is_constant(value: object) -> bool:
    return all(map(_is_scalar, value if isinstance(value, list) else [value]))


def _text_like(pattern: re.Pattern[str], description: str) -> WithJsonSchema:
    ecma = f"^{pattern.pattern.removesuffix(chr(92) + 'Z')}$"
    return WithJsonSchema({"type": "string", "pattern": ecma, "description": description})


Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
"""The name of a component, node, port, input or output."""
_NAMED = {"type": "string", "description": "str, int, float, bool, list[str], `one of a, b`, …"}
_SCHEMA = {
    "type": "object",
    "required": ["json_schema"],
    "properties": {"json_schema": {"type": "object", "description": "a JSON schema"}},
    "maxProperties": 1,
}
_RECORD = {
    "type": "object",
    "minProperties": 1,
    "description": "an object: the type of each field by name, or {json_schema: SCHEMA}",
}
Type = Annotated[object, PlainValidator(_type), WithJsonSchema({"anyOf": [_NAMED, _RECORD]})]
"""A type by name, or of an object."""
OneType = Annotated[object, PlainValidator(_type), WithJsonSchema({"anyOf": [_NAMED, _SCHEMA]})]
"""A type where a mapping without the key ``json_schema`` has another meaning."""
Reference = Annotated[
    str,
    PlainValidator(
        _plain(
            _matches(_REFERENCE),
            "must be a reference such as $question or $node.field",
            "write constants as settings of the component",
        )
    ),
    _text_like(_REFERENCE, "$input, $node or $node.field"),
]
Code = Annotated[
    str,
    PlainValidator(_plain(_matches(_CODE), "must name Python code as module:name")),
    _text_like(_CODE, "Python code: module:name"),
]
Scalar = Annotated[
    str | int | float | bool,
    PlainValidator(_plain(_is_scalar, "must be a string, a number, true or false")),
    WithJsonSchema({"type": ["string", "number", "boolean"]}),
]
Constant = Annotated[
    object,
    PlainValidator(
        _plain(_is_constant, "must be a string, a number, true, false, or a list of them")
    ),
    WithJsonSchema({"type": ["string", "number", "boolean", "array"]}),
]
"""A value that is not tuned."""
Number = Annotated[
    float,
    PlainValidator(_plain(lambda value: type(value) in (int, float), "must be a number")),
    WithJsonSchema({"type": "number"}),
]

WIRING_KEYS = ("in", "when", "out", "settings")
"""Keys of an entry other than its kind."""
When = Annotated[
    Annotated[Reference, Tag("~always")]
    | Annotated[dict[Reference, Scalar], Field(min_length=1, max_length=1), Tag("~equals")],
    Discriminator(lambda value: "~equals" if isinstance(value, Mapping) else "~always"),
]
_INLINE = {"required": ["json_schema"], "properties": {"json_schema": {"type": "object"}}}
Out = Annotated[
    Annotated[OneType, Tag("~one")]
    | Annotated[
        dict[Name, Type], Field(min_length=1, json_schema_extra={"not": _INLINE}), Tag("~several")
    ],
    Discriminator(
        lambda value: "~several" if isinstance(value, Mapping) and not _is_schema(value) else "~one"
    ),
]


def _is_schema(value: Mapping[object, object]) -> bool:
    return isinstance(value.get("json_schema"), Mapping)


class Wiring(Model):
    """The incoming edges and the condition of a node."""

    wires: dict[Name, Reference] = Field(default={}, alias="in")
    """The input or output that feeds each port; edges may also feed settings."""
    when: When | None = None
    """Condition to run the node: an output that must be true, or equal a value: {$router.route: search}."""


class MadeWiring(Wiring):
    """Base of the models of entries that are created from fields with explicit descriptions."""

    model_config = ConfigDict(use_attribute_docstrings=False)


TAGGED: dict[str, type[Model]] = {}
"""Model that a tag in the location of an error stands for."""
MARK = "x-model"
"""Key of the placeholder of a model in a JSON Schema, which pydantic would not resolve."""
ONE_OF: dict[str, SelectedModel] = {}
"""The selections of models, by what is selected."""


def tagged(tag: str, model: type[Model]) -> object:
    """Return an option of a union, which the location of an error names by its tag."""
    TAGGED[tag] = model
    return Annotated[model, Tag(tag)]


@dataclass(frozen=True, eq=False)
class SelectedModel:
    """Annotation of a mapping that has exactly one of some keys, which selects its model.

    Attributes:
        noun: what is selected, for messages.
        built_in: the models by key.
        installed: returns the keys that installed packages add.
        load: returns the model of such a key, or raises `CompoundError`.
        label: a key whose value selects the model, instead of a key for each.
        former: what to do instead of keys of earlier versions.
    """

    noun: str
    built_in: Mapping[str, type[Model]]
    installed: Callable[[], Collection[str]] = tuple
    load: Callable[[str], type[Model]] | None = None
    label: str = ""
    former: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ONE_OF[self.noun] = self

    @property
    def names(self) -> list[str]:
        """The possible keys, or labels."""
        return [*dict.fromkeys((*self.built_in, *self.installed()))]

    def named(self, name: str) -> type[Model]:
        """Return the model of a key."""
        return (
            self.built_in[name] if self.load is None or name in self.built_in else self.load(name)
        )

    def model(self, value: object) -> type[Model] | None:
        """Return the model of a mapping; None if it does not have exactly one of the keys."""
        given = value if isinstance(value, Mapping) else {}
        keys = (given.get(self.label),) if self.label else given
        found = [name for name in self.names if name in keys]
        return self.named(found[0]) if len(found) == 1 else None

    def _validate(self, value: object) -> Model:
        try:
            model = self.model(value)
        except CompoundError as error:
            raise as_pydantic_error(error) from error
        if model is None:
            kind = "one_label" if self.label else "one_key"
            raise PydanticCustomError(kind, self.noun)
        # pydantic prefixes the location
        return model.model_validate_json(json.dumps(value), strict=True)

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Validate by the model of the mapping."""
        return core_schema.no_info_plain_validator_function(self._validate)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Return placeholders, for which `compound.yaml.file.schema` writes references."""
        models = [self.named(name) for name in self.names]
        REFERRED.update({model.__name__: model for model in models})
        return {"oneOf": [{MARK: model.__name__} for model in models]}


REFERRED: dict[str, type[Model]] = {}
"""Models that JSON Schemas refer to, by name."""


Kind = TypeVar("Kind")
_ADAPTERS: dict[object, TypeAdapter[Any]] = {}  # cached by type: building one is slow


def validate_at(document: Document, kind: TypeForm[Kind], address: Address = ()) -> Kind:
    """Return the value at an address as a ``kind``; pydantic's errors are raised."""
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    adapter: TypeAdapter[Kind] = _ADAPTERS[kind]
    # Validate JSON, not Python values: in strict mode only JSON input accepts a list for a tuple.
    return adapter.validate_json(json.dumps(document.at(address)), strict=True)


def parse_at(document: Document, kind: TypeForm[Kind], address: Address = ()) -> Kind | None:
    """Return the value at an address as a ``kind``, or None if it is invalid; errors are not reported."""
    try:
        return validate_at(document, kind, address)
    except ValidationError:
        return None
