"""Entries of the file whose key names an installed extension; their models are created on first use."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from compound.errors import CompoundError
from compound.spec.schema.types import Model

MARK = "x-installed"  # placeholder for installed extensions in a JSON Schema


@dataclass(frozen=True)
class Installed:
    """Annotation of an entry's type that also accepts installed extensions.

    Attributes:
        noun: the sort of extension: ``kind``, ``metric`` or ``engine``.
        names: returns the names of the installed extensions.
        model: returns the model of an entry by name.
    """

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
        return model.model_validate_json(json.dumps(value), strict=True)  # pydantic prefixes the location

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Validate by the model of the entry."""
        return core_schema.no_info_plain_validator_function(self.validate)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Return a placeholder that `compound.spec.file.schema` replaces."""
        return {MARK: self.noun}
