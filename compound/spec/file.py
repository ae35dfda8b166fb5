"""What the YAML file may hold, as one pydantic model; the JSON Schema for editors comes from it."""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, cast

from pydantic import ConfigDict, Discriminator, Field, Tag, create_model

from compound.evaluation.dataset import Split
from compound.evaluation.metrics import METRICS
from compound.registry.engines import KINDS as ENGINES
from compound.registry.engines import engine_class
from compound.settings.common import CommonSettings
from compound.settings.sections import Own, optimize_model
from compound.spec.kinds.body import BUILT_IN, Body
from compound.spec.schema.settings import TAGGED as SPACE_TAGS
from compound.spec.schema.types import Code, Model, Name, Number
from compound.spec.schema.wiring import one_key

SplitBy = Annotated[
    Annotated[str, Tag("~column")] | Annotated[dict[Split, float], Tag("~shares")],
    Discriminator(lambda value: "~shares" if isinstance(value, Mapping) else "~column"),
]


class DataSettings(Model):
    """Where the examples are."""

    path: str = Field(min_length=1)
    """A folder or file relative to this file, or a data set's id on the Hugging Face hub, `owner/name`."""
    train: str = "train"
    """The split to learn from."""
    valid: str = "dev"
    """The split that decides about acceptance. Without a file or hub split `dev`, the one called `valid`,
    `validation` or `val` is read."""
    test: str | None = "test"
    """The split the report reads, once; `null` when there is none."""
    fields: dict[str, str] = Field(default={})
    """Column of each input or gold field whose column has another name."""
    id: str = "id"
    """The column that identifies a row."""
    split_by: SplitBy | None = None
    """For one file: the column that names the split, or the share of each."""
    subset: str | None = None
    """The hub's name of a part of the data set."""


class _Made(Model):
    """A model made of fields that carry their descriptions: there is no source to look for them in."""

    model_config = ConfigDict(use_attribute_docstrings=False)


FieldOf = tuple[object, object]  # a field's type, and its default or description


def _model(name: str, doc: str, **fields: FieldOf) -> type[Model]:
    given = cast("dict[str, Any]", fields)  # what `create_model` declares
    made: type[Model] = create_model(name, __base__=_Made, __doc__=doc, __module__=__name__, **given)
    return made


def _arguments(factory: Callable[..., object]) -> dict[str, FieldOf]:
    """Return the parameters of a function or class as the fields of a model."""
    described_by = vars(factory)["__init__"] if isinstance(factory, type) else factory
    hints = typing.get_type_hints(described_by, include_extras=True)
    doc = inspect.getdoc(factory) or ""
    fields: dict[str, FieldOf] = {}
    for name, parameter in inspect.signature(factory).parameters.items():
        described = re.search(rf"^( +){name}: (.+(?:\n\1 +.+)*)$", doc, re.MULTILINE)
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[name] = (
            hints[name],
            Field(default, description=" ".join(described[2].split()) if described else None),
        )
    return fields


def _summary(factory: Callable[..., object]) -> str:
    return (inspect.getdoc(factory) or "").split("\n", 1)[0]


class CustomMetric(Model):
    """A function of (outputs, example) that returns a number or a Score."""

    call: Code
    """The function, as module:name."""
    name: str = ""
    """What reports call it; the function's name by default."""
    bounds: Annotated[list[Number], Field(min_length=2, max_length=2)] | None = None
    """[low, high]: the least and the greatest score possible. Intervals then stay within them."""


def _entry(name: str, factory: Callable[..., object]) -> type[Model]:
    """Return the model of ``{name: {parameter: value}}``."""
    settings = _model(f"{name}_settings", _summary(factory), **_arguments(factory))
    return _model(f"{name}_entry", _summary(factory), **{name: (settings, ...)})


def _union(models: Mapping[str, type[Model]]) -> object:
    return typing.Union[tuple(Annotated[model, Tag(f"~{name}")] for name, model in models.items())]  # noqa: UP007


_METRICS = {
    **{name: _entry(name, factory) for name, factory in METRICS.items()},
    "custom": _model("custom_entry", "A metric of your own.", custom=(CustomMetric, ...)),
}
_ENGINES = {kind: _entry(kind, engine_class(kind)) for kind in ENGINES}
RUNS: Mapping[str, tuple[str, ...]] = {kind: getattr(engine_class(kind), "runs", ()) for kind in ENGINES}
"""By kind of engine, the settings that say how to run a program: a file with one is as trusted as Python."""


if typing.TYPE_CHECKING:
    Metric = Model
    Engine = Model
else:
    Metric = Annotated[_union(_METRICS), one_key(_METRICS, "metric")]
    Engine = Annotated[_union(_ENGINES), one_key(_ENGINES, "engine")]


class File(Body):
    """A compound AI system, with its data, its metric and how to optimize it."""

    system: Name
    """The system's name, for run directories and reports."""
    lm: str | None = None
    """The model of every LLM component that names none: smollm2, a folder, provider/model, or engine."""
    engines: dict[str, Engine] = Field(default={})
    """Named models with settings, usable wherever a model's name stands."""
    data: DataSettings | None = None
    """The examples."""
    metric: Metric | None = None
    """How outputs are scored, by exactly one metric."""
    optimize: CommonSettings = CommonSettings()
    """How the system is optimized."""


@functools.cache
def file_model(own: Own = ()) -> type[File]:
    """Return the model of a file whose ``optimize:`` has a section for each method.

    Args:
        own: sections of methods that are not built in.
    """
    described = File.model_fields["optimize"].description
    optimize: Any = (optimize_model(own), Field(default=None, description=described))
    return create_model("File", __base__=_MadeFile, __doc__=File.__doc__, optimize=optimize)


class _MadeFile(File):
    """A file made of fields that carry their descriptions."""

    model_config = ConfigDict(use_attribute_docstrings=False)


POSSIBLE: Mapping[str, Mapping[str, type[Model]]] = {
    "kind": {name: kind.entry for name, kind in BUILT_IN.items()},
    "metric": _METRICS,
    "engine": _ENGINES,
}
"""The keys of which exactly one must be there, by what they choose."""
TAGGED: Mapping[str, type[Model]] = {
    **SPACE_TAGS,
    **{tag: model for kind in BUILT_IN.values() for tag, model in kind.tags.items()},
    **{f"~{name}": model for group in POSSIBLE.values() for name, model in group.items()},
}
"""Which model a part of an error's location stands for."""


def schema() -> dict[str, object]:
    """Return the JSON Schema (draft 2020-12) of the file."""
    found = {"$schema": "https://json-schema.org/draft/2020-12/schema", **file_model().model_json_schema()}
    _close(found)
    found["$defs"]["OptimizeSettings"]["additionalProperties"] = {"type": "object"}  # a method of one's own
    return found


def _close(part: object) -> None:
    """Refuse keys that are no names: pydantic says which keys fit, but not that there are no others."""
    if isinstance(part, dict):
        if "patternProperties" in part:
            part.setdefault("additionalProperties", False)
        for item in part.values():
            _close(item)
    elif isinstance(part, list):
        for item in part:
            _close(item)
