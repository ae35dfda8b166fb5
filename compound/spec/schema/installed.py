"""Entries of the file whose key is the name of an installed extension; their models are made when used."""

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

MARK = "x-installed"  # in a JSON Schema, in the place of what is installed


@dataclass(frozen=True)
class Installed:
    """Extensions that may stand in one place of the file; an annotation of the type of the entry.

    Attributes:
        noun: what they add: ``kind``, ``metric`` or ``engine``.
        names: returns the names that are installed.
        model: returns the model of an entry by its name.
    """

    noun: str
    names: Callable[[], Collection[str]]
    model: Callable[[str], type[Model]]

    @property
    def tag(self) -> str:
        """What stands for such an entry in the location of an error."""
        return f"~installed-{self.noun}"

    def validate(self, value: dict[str, Any]) -> Model:
        """Return the entry as its own model."""
        name = next(name for name in self.names() if name in value)
        try:
            model = self.model(name)
        except CompoundError as error:
            facts = {"what": error.message, "hint": error.hint}
            raise PydanticCustomError("refused", "{what}", facts) from error
        return model.model_validate_json(json.dumps(value), strict=True)  # its errors get their place here

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Validate by the model of the entry."""
        return core_schema.no_info_plain_validator_function(self.validate)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Leave a mark that `compound.spec.file.schema` replaces."""
        return {MARK: self.noun}
