"""Settings of an optimization: the common ones, and a section for each method with settings.

YAML and Python use the same models. The settings of a method are declared next to its code.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, Self

from pydantic import ConfigDict, ModelWrapValidatorHandler, ValidationError, model_validator

from compound.core.errors import DeclarationError
from compound.optimization.settings.base import CommonSettings, S, Settings
from compound.optimization.settings.sections import describe_errors, validate_sections


def _describe_errors(model: type[S]) -> type[S]:
    """Make the constructor of settings raise `DeclarationError`; validation is unchanged."""
    construct = model.__init__

    @wraps(construct)
    def described(self: S, **values: object) -> None:
        try:
            construct(self, **values)
        except ValidationError as error:
            raise DeclarationError("\n".join(describe_errors(error, values))) from None

    setattr(model, "__init__", described)  # noqa: B010 - pydantic calls a constructor defined in the class
    return model


@_describe_errors
class OptimizeSettings(CommonSettings):
    """Settings of an optimization: common settings, and sections of methods by name.

    Sections of unused methods are allowed; they are validated too.

    Example:
        >>> settings = OptimizeSettings(method="opro", opro={"lm": "openai/gpt-4o"})
        >>> settings.sections
        {'opro': OPROSettings(lm='openai/gpt-4o')}
    """

    model_config = ConfigDict(extra="allow")

    if TYPE_CHECKING:

        def __init__(self, **settings: Any) -> None: ...  # noqa: ANN401 - fields and sections

    @model_validator(mode="wrap")
    @classmethod
    def _with_sections(cls, values: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(values, Mapping) or set(values) <= set(CommonSettings.model_fields):
            return handler(values)
        return handler(validate_sections(values))

    @property
    def sections(self) -> Mapping[str, Settings]:
        """Settings of individual methods, by section name."""
        return dict(self.__pydantic_extra__ or {})

    @property
    def given(self) -> Mapping[str, object]:
        """The settings given explicitly, sections included, by name."""
        known = [*type(self).model_fields, *self.sections]
        return {name: getattr(self, name) for name in known if name in self.model_fields_set}

    def section(self, method: str, kind: type[S]) -> S:
        """Return the settings of a method, or its defaults if it has no section.

        Args:
            method: name of the method; a section of ``module:function`` may also be named
                ``function``.
            kind: model of its settings.

        Raises:
            DeclarationError: the section holds settings of another method.
        """
        found = self.sections
        for name in (method, method.rpartition(":")[2]):
            if name in found:
                section = found[name]
                if _is_imported_anew(section, kind):
                    section = kind.model_validate(section.model_dump(exclude_unset=True))
                if not isinstance(section, kind):
                    raise DeclarationError(
                        f"optimize.{name} must be {kind.__name__} for method {method!r}, but is "
                        f"{type(section).__name__}",
                        hint=f"name the section {method!r}",
                    )
                return section
        return kind()


def _is_imported_anew(settings: Settings, kind: type[Settings]) -> bool:
    """Return whether ``settings`` come from an earlier import of the module that defines ``kind``."""
    made = type(settings)
    names = [(each.__module__, each.__qualname__) for each in (made, kind)]
    return made is not kind and names[0] == names[1]


GivenSettings = OptimizeSettings | Mapping[str, object]


def given_settings(settings: GivenSettings | None) -> dict[str, object]:
    """Return settings by name; a mapping has the keys of the section ``optimize`` of a file.

    Raises:
        DeclarationError: it is neither settings nor a mapping.
    """
    if settings is None:
        return {}
    if isinstance(settings, OptimizeSettings):
        return dict(settings.given)
    if isinstance(settings, Mapping):
        return dict(settings)
    raise DeclarationError(
        f"settings must be OptimizeSettings or a mapping, but is {settings!r:.60}",
        hint="such as {'method': 'search', 'seed': 1}",
    )


def make_settings(values: Mapping[str, object]) -> OptimizeSettings:
    """Build validated settings from a mapping.

    Raises:
        DeclarationError: settings are unknown or have invalid values; the message lists all of
            them.

    >>> make_settings({"mmgrpo": {"lr": 1}})
    Traceback (most recent call last):
    compound.core.errors.DeclarationError: unknown setting mmgrpo.lr; use optimize.mmgrpo.optimizer.lr
    """
    try:  # not by the constructor, whose arguments cannot have any name
        return OptimizeSettings.model_validate(values)
    except ValidationError as error:
        raise DeclarationError("\n".join(describe_errors(error, values))) from None
