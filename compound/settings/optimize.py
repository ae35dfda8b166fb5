"""The settings of an optimization: the common ones, and a section for each method that has its own.

YAML and Python share them. The settings of a method are declared beside its code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

from pydantic import ConfigDict, ModelWrapValidatorHandler, ValidationError, model_validator

from compound.errors import DeclarationError
from compound.settings.base import S, Settings
from compound.settings.common import BudgetSettings, CommonSettings
from compound.settings.sections import checked, problems


class OptimizeSettings(CommonSettings):
    """How a system is optimized: common settings, and sections of methods by their names.

    Sections of methods that are not used are allowed, and checked.

    Example:
        >>> settings = OptimizeSettings(method="opro", opro={"lm": "openai/gpt-4o"})
        >>> settings.sections
        {'opro': OPROSettings(lm='openai/gpt-4o')}
    """

    model_config = ConfigDict(extra="allow")

    if TYPE_CHECKING:

        def __init__(  # noqa: PLR0913 - a keyword for each setting
            self,
            *,
            method: str = ...,
            seed: int = ...,
            budget: BudgetSettings = ...,
            iterations: int = ...,
            train_size: int | None = ...,
            valid_size: int | None = ...,
            test_size: int | None = ...,
            minibatch: int = ...,
            candidates: int = ...,
            alpha: float = ...,
            repeats: int = ...,
            baselines: tuple[str, ...] = ...,
            concurrency: int = ...,
            failure_score: float = ...,
            max_failed: float = ...,
            **sections: Settings | Mapping[str, object],
        ) -> None: ...

    @model_validator(mode="wrap")
    @classmethod
    def _with_sections(cls, values: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Validate each section by the settings of its method."""
        if not isinstance(values, Mapping) or set(values) <= set(CommonSettings.model_fields):
            return handler(values)
        return handler(checked(values))

    @property
    def sections(self) -> Mapping[str, Settings]:
        """The settings of single methods, by section."""
        return dict(self.__pydantic_extra__ or {})

    @property
    def given(self) -> Mapping[str, object]:
        """The settings that were given, sections included, by name."""
        known = [*type(self).model_fields, *self.sections]
        return {name: getattr(self, name) for name in known if name in self.model_fields_set}

    def section(self, method: str, kind: type[S]) -> S:
        """Return the settings of a method, its defaults where there is no section.

        Args:
            method: its name; for ``module:function``, the section may be called by the function alone.
            kind: the model of its settings.

        Raises:
            DeclarationError: the section has the settings of another method.
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
                        hint=f"call the section {method!r}",
                    )
                return section
        return kind()


def _is_imported_anew(settings: Settings, kind: type[Settings]) -> bool:
    """Return whether the module of a model was imported again since settings were made."""
    made = type(settings)
    return made is not kind and (made.__module__, made.__qualname__) == (kind.__module__, kind.__qualname__)


def make_settings(values: Mapping[str, object]) -> OptimizeSettings:
    """Return settings from what was given of them.

    Raises:
        DeclarationError: a setting does not exist, or has a value that it cannot have; all are named.

    >>> make_settings({"mmgrpo": {"lr": 1}})
    Traceback (most recent call last):
    compound.errors.DeclarationError: there is no setting mmgrpo.lr; it is optimize.mmgrpo.optimizer.lr
    """
    try:
        return OptimizeSettings.model_validate(values)
    except ValidationError as error:
        raise DeclarationError("\n".join(problems(error, values))) from None
