"""Pydantic model of the YAML file, and its JSON Schema."""

from __future__ import annotations

import functools
import typing
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, Discriminator, Field, Tag, create_model

from compound.concurrency.functions import ThreadUse
from compound.evaluation.dataset import Split
from compound.evaluation.metrics.named import METRICS, metric_factory
from compound.evaluation.metrics.named import installed as installed_metrics
from compound.registry.engines import KINDS as ENGINES
from compound.registry.engines import engine_class
from compound.registry.engines import installed as installed_engines
from compound.settings.common import CommonSettings
from compound.settings.sections import UserSections, optimize_model
from compound.spec.fleet import FleetEntry, FleetSettings
from compound.spec.kinds.body import BUILT_IN, Body
from compound.spec.kinds.installed import KINDS as KINDS_INSTALLED
from compound.spec.kinds.tools import NO_PLUGINS, TOOLS
from compound.spec.schema.installed import MARK, Installed
from compound.spec.schema.settings import TAGGED as SPACE_TAGS
from compound.spec.schema.signature import entry_model, make_model
from compound.spec.schema.types import Code, Model, Name, Number
from compound.spec.schema.wiring import key_discriminator

SplitBy = Annotated[
    Annotated[str, Tag("~column")] | Annotated[dict[Split, float], Tag("~shares")],
    Discriminator(lambda value: "~shares" if isinstance(value, Mapping) else "~column"),
]


class DataSettings(Model):
    """Location of the examples."""

    path: str = Field(min_length=1)
    """A folder or file relative to this file, a folder of feedback from `compound serve`, or a data set's id
    on the Hugging Face hub, `owner/name`."""
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


class ClassEngine(Model):
    """An engine of your own, made as Class(**settings)."""

    code: Code = Field(alias="class")
    """The class, as module:name; modules are also found beside this file."""
    settings: dict[Name, Any] = Field(default={})
    """What it is made with."""


def _union(models: Mapping[str, type[Model]], installed: Installed, prefix: str = "") -> object:
    return typing.Union[
        *(Annotated[model, Tag(f"~{prefix}{name}")] for name, model in models.items()),
        Annotated[Model, installed, Tag(installed.tag)],
    ]


_ONE_RUN = {
    **{name: entry_model(name, factory) for name, factory in METRICS.items()},
    "custom": make_model("custom_entry", "A custom metric.", {"custom": (CustomMetric, ...)}),
}
_ENGINES: Mapping[str, type[Model]] = {
    **{kind: entry_model(kind, engine_class(kind)) for kind in ENGINES if kind != "fleet"},
    "fleet": FleetEntry,
    "class": ClassEngine,
}
METRICS_INSTALLED = Installed(
    "metric", installed_metrics, lambda name: entry_model(name, metric_factory(name), "metric_")
)
ONE_RUN = "metric of one run"
if typing.TYPE_CHECKING:
    OneRunMetric = Model
else:
    OneRunMetric = Annotated[
        _union(_ONE_RUN, METRICS_INSTALLED), key_discriminator(_ONE_RUN, ONE_RUN, METRICS_INSTALLED)
    ]


class PassAtKMetric(Model):
    """Whether at least one of k runs of an example passes another metric; `repeats` must be at least k."""

    k: int = Field(ge=1)
    """The number of runs of which one must pass."""
    of: OneRunMetric
    """The metric that scores a run, such as `{exact_match: {output: answer}}`."""
    threshold: Number = 1.0
    """The lowest score that passes."""


_METRICS = {
    **_ONE_RUN,
    "pass_at_k": make_model("pass_at_k_entry", "pass@k of a metric.", {"pass_at_k": (PassAtKMetric, ...)}),
}
ENGINES_INSTALLED = Installed(
    "engine", installed_engines, lambda kind: entry_model(kind, engine_class(kind), "engine_")
)


if typing.TYPE_CHECKING:
    Metric = Model
    Engine = Model
else:
    Metric = Annotated[
        _union(_METRICS, METRICS_INSTALLED), key_discriminator(_METRICS, "metric", METRICS_INSTALLED)
    ]
    Engine = Annotated[
        _union(_ENGINES, ENGINES_INSTALLED, "engine-"),
        key_discriminator(_ENGINES, "engine", ENGINES_INSTALLED, "engine-"),
    ]


class File(Body):
    """A compound AI system with its data, its metric and the settings of its optimization."""

    system: Name
    """The system's name, for run directories and reports."""
    lm: str | None = None
    """The default model of LLM components: smollm2, a folder, provider/model, or an engine's name."""
    engines: dict[str, Engine] = Field(default={})
    """Named models with settings, usable wherever a model is named."""
    data: DataSettings | None = None
    """The examples."""
    metric: Metric | None = None
    """The metric that scores outputs; exactly one."""
    optimize: CommonSettings = CommonSettings()
    """Settings of the optimization."""


@functools.cache
def file_model(own: UserSections = ()) -> type[File]:
    """Return the model of a file whose ``optimize:`` has a section for each method.

    Args:
        own: sections of methods that are not built-in.
    """
    described = File.model_fields["optimize"].description
    optimize: Any = (optimize_model(own), Field(default=None, description=described))
    return create_model("File", __base__=_MadeFile, __doc__=File.__doc__, optimize=optimize)


class _MadeFile(File):
    """Base of the file models created from fields with explicit descriptions."""

    model_config = ConfigDict(use_attribute_docstrings=False)


POSSIBLE: Mapping[str, Mapping[str, type[Model]]] = {
    "kind": {name: kind.entry for name, kind in BUILT_IN.items()},
    "metric": _METRICS,
    ONE_RUN: _ONE_RUN,
    "engine": _ENGINES,
    "tool": TOOLS,
}
"""Groups of keys of which an entry must have exactly one, by what the key selects."""
INSTALLED: Mapping[str, Installed] = {
    "kind": KINDS_INSTALLED,
    "metric": METRICS_INSTALLED,
    ONE_RUN: METRICS_INSTALLED,
    "engine": ENGINES_INSTALLED,
    "tool": NO_PLUGINS,
}
"""Keys that installed packages add to these groups."""
TAGGED: Mapping[str, type[Model]] = {
    **SPACE_TAGS,
    **{tag: model for kind in BUILT_IN.values() for tag, model in kind.tags.items()},
    **{f"~{name}": model for group in ("kind", "metric") for name, model in POSSIBLE[group].items()},
    **{f"~engine-{name}": model for name, model in _ENGINES.items()},
    "~fleet": FleetSettings,
}
"""Model that each tag in the location of an error stands for."""


def schema() -> dict[str, object]:
    """Return the JSON Schema (draft 2020-12) of the file."""
    found = {"$schema": "https://json-schema.org/draft/2020-12/schema", **file_model().model_json_schema()}
    _add_installed(found, found["$defs"])
    _close(found)
    found["$defs"]["OptimizeSettings"]["additionalProperties"] = {"type": "object"}  # a custom method
    return found


def _add_installed(part: object, definitions: dict[str, object]) -> None:
    """Replace the placeholders of installed extensions by references to their models."""
    if isinstance(part, dict):
        for name, item in list(part.items()):
            marks = [option for option in item if MARK in option] if name == "oneOf" else []
            for mark in marks:
                item.remove(mark)
                item.extend(_references(INSTALLED[mark[MARK]], definitions))
            _add_installed(item, definitions)
    elif isinstance(part, list):
        for item in part:
            _add_installed(item, definitions)


def _references(installed: Installed, definitions: dict[str, object]) -> list[dict[str, str]]:
    """Return a reference to the model of each installed extension, and add the models to the definitions."""
    found = []
    for name in installed.names():
        model = installed.model(name)
        own = model.model_json_schema()
        definitions.update(own.pop("$defs", {}))
        definitions[model.__name__] = own
        found.append({"$ref": f"#/$defs/{model.__name__}"})
    return found


def _close(part: object) -> None:
    """Forbid keys that are not names: pydantic writes the allowed pattern but does not exclude other keys."""
    if isinstance(part, dict):
        if "patternProperties" in part:
            part.setdefault("additionalProperties", False)
        for item in part.values():
            _close(item)
    elif isinstance(part, list):
        for item in part:
            _close(item)
