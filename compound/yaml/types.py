"""Types of entries: names, references, port types, code, the edges of a node, and installed extensions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union

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


def as_pydantic_error(error: DeclarationError) -> PydanticCustomError:
    """Return a declaration error as one that pydantic collects."""
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
    """Return a validator of plain values."""

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

MARK = "x-installed"  # placeholder for installed extensions in a JSON Schema


@dataclass(frozen=True)
class Installed:
    """Annotation of an entry's type that also accepts installed extensions."""

    noun: str
    names: Callable[[], Collection[str]]
    model: Callable[[str], type[Model]]

    @property
    def tag(self) -> str:
        """Tag of such an entry in the location of an error."""
        return f"~installed-{self.noun}"

    def validate(self, value: dict[str, Any]) -> Model:
        """Validate the entry with the model of its extension."""
        name = next(name for name in self.names() if name in value)
        try:
            model = self.model(name)
        except CompoundError as error:
            facts = {"what": error.message, "hint": error.hint}
            raise PydanticCustomError("refused", "{what}", facts) from error
        return model.model_validate_json(
            json.dumps(value), strict=True
        )  # pydantic prefixes the location

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Validate by the model of the entry."""
        return core_schema.no_info_plain_validator_function(self.validate)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Return a placeholder that `compound.yaml.file.schema` replaces."""
        return {MARK: self.noun}


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
POSSIBLE: dict[str, Mapping[str, type[Model]]] = {}
"""Groups of keys of which an entry must have exactly one, by what the key selects; see `one_key`."""
INSTALLED: dict[str, Installed] = {}
"""Keys that installed packages add to these groups."""


def tagged(tag: str, model: type[Model]) -> object:
    """Return an option of a union, which the location of an error names by its tag."""
    TAGGED[tag] = model
    return Annotated[model, Tag(tag)]


def one_key(
    noun: str,
    models: Mapping[str, type[Model]],
    installed: Installed | None = None,
    prefix: str = "",
) -> object:
    """Return the type of entries that must have exactly one of some keys."""
    POSSIBLE[noun] = models
    options = [tagged(f"~{prefix}{name}", model) for name, model in models.items()]
    if installed is not None:
        INSTALLED[noun] = installed
        options.append(Annotated[Model, installed, Tag(installed.tag)])

    def tag(value: object) -> str | None:
        if not isinstance(value, Mapping):
            return None
        found = [name for name in models if name in value]
        names = () if installed is None else installed.names()
        others = [name for name in names if name in value and name not in models]
        if len(found) + len(others) != 1:
            return None
        return f"~{prefix}{found[0]}" if found else f"~installed-{noun}"

    select = Discriminator(tag, custom_error_type="one_key", custom_error_message=noun)
    return Annotated[Union[tuple(options)], select]  # noqa: UP007 - made of a tuple


def one_label(key: str, models: Mapping[str, type[Model]]) -> object:
    """Return the type of mappings whose value at a key selects the model."""
    options = tuple(tagged(f"~{label}", model) for label, model in models.items())

    def tag(value: object) -> str | None:
        label = value.get(key) if isinstance(value, Mapping) else None
        return f"~{label}" if isinstance(label, str) and label in models else None

    select = Discriminator(
        tag,
        custom_error_type="one_label",
        custom_error_message=key,
        custom_error_context={"labels": ", ".join(models)},
    )
    return Annotated[Union[options], select]  # noqa: UP007


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
