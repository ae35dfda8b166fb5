"""Load the YAML file of a system: its graph, data, metric, engines and optimization settings.

All errors of a file are reported at once, as ``file:line:column: address: error; hint``. A file
that names Python code (``call:``, ``class:``) or a command to run (``command:`` of an engine) must
be trusted like Python code; ``allow_import=False`` rejects such files. A file that names a server
or the environment variable of a key needs the user's consent; see `compound.core.security.trust`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from compound.core.engine import Engine
from compound.core.errors import DeclarationError, SpecError, suggest_name
from compound.core.example import Metric
from compound.core.security.trust import Trust
from compound.evaluation.dataset import Dataset
from compound.evaluation.hub import HUB, hub_id
from compound.evaluation.metrics.custom import custom
from compound.evaluation.metrics.named import made_by, metric_factory
from compound.evaluation.metrics.scoring import metric_lms, pass_at_k
from compound.graph.registry.engines import find_engine, open_engine, own_engine
from compound.graph.registry.plugins import installed, registered
from compound.graph.system import System
from compound.optimization.registration import as_factory
from compound.optimization.settings.base import Settings, references
from compound.optimization.settings.optimize import OptimizeSettings
from compound.optimization.settings.sections import UserSections, optimize_model, own_sections
from compound.yaml.build import Graph
from compound.yaml.context import OUTSIDE, FileContext, is_outside
from compound.yaml.document import Address, Document, format_value
from compound.yaml.engines import EngineSettings, read_engines
from compound.yaml.file import (
    CustomMetric,
    DataSettings,
    MetricEntry,
    PassAtKMetric,
    SplitBy,
    file_model,
    report_schema_errors,
)
from compound.yaml.kind import report_wrong_settings
from compound.yaml.source import MAX_BYTES, apply, read
from compound.yaml.types import parse_at


class SystemFile(BaseModel):
    """What a file was loaded from, so that another process can load it in the same way; see `load`.

    ``path`` is absolute; code and data that the file names are searched beside it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    text: str
    path: str
    overrides: tuple[tuple[str, str], ...] = ()
    allow_import: bool = True
    trust: tuple[str, ...] = ()


@dataclass(frozen=True)
class FileEngines:
    """Lookup of engines by model: those that a file defines, otherwise by the form of the name.

    Attributes:
        path: the file.
        engines: kind and settings of each engine that the file defines, by name.
        outside: models that may be read outside the file's folder; None for any.
        source: what the file was loaded from.
    """

    path: Path
    engines: Mapping[str, EngineSettings]
    outside: Collection[str] | None
    source: SystemFile

    def __call__(self, lm: str) -> Engine:
        """Return the engine of a model.

        Raises:
            DeclarationError: no engine serves the model, or its settings do not fit its kind.
        """
        if lm not in self.engines:
            if self.outside is not None and is_outside(lm) and lm not in self.outside:
                raise DeclarationError(f"{self.path}: the model {lm!r} {OUTSIDE}")
            return find_engine(lm)
        kind, settings = self.engines[lm]
        try:
            if ":" in kind:  # an engine of the user's own
                return own_engine(kind, self.path.parent)(**settings)
            return open_engine(kind, **settings)
        except TypeError as error:
            raise DeclarationError(f"{self.path}: engines.{lm}.{kind}: {error}") from error


@dataclass(frozen=True)
class Program:
    """Contents of a file, ready to run.

    Attributes:
        path: the file.
        text: the text of the file, without overrides.
        system: the system, bound to its initial values.
        data: the dataset, if the file has one.
        metric: the metric, if the file has one.
        optimize: the settings of the optimization.
        find_engine: the lookup of engines: those that the file defines, others by their names.
    """

    path: Path
    text: str
    system: System
    data: Dataset | None
    metric: Metric | None
    optimize: OptimizeSettings
    find_engine: Callable[[str], Engine]

    @property
    def folder(self) -> Path:
        """Folder that is searched first for code and files that the file names."""
        return self.path.parent


def load(path: str | Path, **options: Any) -> Program:  # noqa: ANN401 - those of `loads`
    """Load a file; paths in it are relative to its folder, and ``options`` are those of `loads`.

    Raises:
        SpecError: the file cannot be read, or it has errors.
        DeclarationError: an entry of ``trust`` is malformed.
        ConfigurationError: the user's configuration file cannot be read.
    """
    try:
        with Path(path).open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise SpecError([f"{path}: cannot be read: {reason}"]) from None
    return loads(raw, path=path, **options)


def loads(
    text: str | bytes,
    *,
    path: str | Path = "system.yaml",
    overrides: Sequence[tuple[str, str]] = (),
    allow_import: bool = True,
    models: Collection[str] = (),
    trust: Collection[str] = (),
    sends: bool = True,
    reads: bool = False,
) -> Program:
    """Load a text as the content of the file ``path``.

    Args:
        text: the content of the file.
        path: the file; paths in the text are relative to its folder.
        overrides: entries to replace, such as ``("optimize.budget.system_runs", "150")``; each
            value is parsed as YAML.
        allow_import: whether the file may name Python code, read outside its folder, and use the
            servers and keys that the user's configuration trusts.
        models: additional model names for which the caller has engines.
        trust: servers and keys that the file may use in addition to those of the user's
            configuration, such as ``"gpu.example:8000"`` and ``"LLM_KEY@llm.example.com"``; without
            imports, only these.
        sends: whether engines may send requests; if not, their servers and keys need no consent.
        reads: whether local data and corpora that the file names must exist.

    Raises:
        SpecError: the text has errors.
        DeclarationError: an entry of ``trust`` is malformed.
        ConfigurationError: the user's configuration file cannot be read.

    >>> program = loads('''
    ... system: demo
    ... lm: smollm2
    ... inputs: {question: str}
    ... components:
    ...   answerer: {llm: {prompt: {tune: Answer in a few words.}}, in: {question: $question}}
    ... outputs: {answer: $answerer}
    ... ''')
    >>> program.system.configuration["answerer.prompt"]
    'Answer in a few words.'
    """
    path = Path(path)
    Trust.of(trust)  # raises on a malformed entry even if the file does not need it
    document = read(text, str(path))
    apply(document, overrides)
    own: UserSections = ()  # the sections of custom methods, with the models of their settings
    if isinstance(sections := document.at(("optimize",)), dict):
        own = tuple(own_sections(sections, path.parent, imports=allow_import).items())
    report_schema_errors(document, file_model(own))
    context = FileContext(
        document,
        path.parent,
        allow_import,
        {*models, *_keys(document, "engines")},
        trust,
        sends=sends,
        reads=reads,
    )
    lm = parse_at(document, str, ("lm",))
    if lm is not None:
        context.check_models([lm], ("lm",))
    graph = Graph(context, (), str(document.at(("system",))))
    system = graph.system(lm)
    _check_models(context)
    data, metric = _data(context), _metric(context)
    optimize = _optimize(context, own)
    engines = read_engines(context)
    try:
        document.check()
    except SpecError as error:  # so that the errors in the data are reported, too
        outputs: Collection[str] = _keys(document, "outputs") if system is None else system.outputs
        error.readable = (data, metric, graph.input_types, outputs)
        raise
    assert system is not None
    outside = None if allow_import else frozenset(context.outside)
    source = SystemFile(
        text=document.text,
        path=os.path.abspath(path),
        overrides=tuple(overrides),
        allow_import=allow_import,
        trust=tuple(trust),
    )
    find = FileEngines(path, engines, outside, source)
    system = system.with_engines(find)
    return Program(path, document.text, system, data, metric, optimize, find)


def _keys(document: Document, section: str) -> list[str]:
    found = document.at((section,))
    return list(found) if isinstance(found, dict) else []


def _check_models(context: FileContext) -> None:
    missing = context.without_model
    if missing and not context.document.has(("lm",)):
        first = next(iter(missing.values()))
        names = ", ".join(missing)
        context.document.report(
            first, f"no model for {names}", "add `lm: smollm2` to the file", key=True
        )


def _optimize(context: FileContext, own: UserSections) -> OptimizeSettings:
    address = ("optimize",)
    found = (
        parse_at(context.document, optimize_model(own), address)
        if context.document.has(address)
        else None
    )
    if found is None:
        method = parse_at(context.document, str, (*address, "method"))
        if method is not None:
            _check_method(context, method, (*address, "method"))
        return OptimizeSettings()
    given = {
        name: getattr(found, name)
        for name in type(found).model_fields
        if name in found.model_fields_set
    }
    unknown = [name for name, model in own if model is None]
    settings = OptimizeSettings.model_validate({k: v for k, v in given.items() if k not in unknown})
    _check_references(context, found, address)
    if settings.trackers and not context.allow_import:
        reason = "the file sends the record of the run to a tracker, and imports are not allowed"
        hint = "remove it; `compound runs track RUN` sends a run afterwards"
        context.document.report((*address, "trackers"), reason, hint)
    if settings.runner is not None and not context.allow_import:
        reason = "the file sends examples to a cluster, and imports are not allowed"
        context.document.report((*address, "runner"), reason, "remove it, or allow imports")
    elif settings.runner is not None:
        _check_cluster(context, settings.runner.ray.address)
    return settings


def _check_cluster(context: FileContext, cluster: str) -> None:
    """Report the address of a cluster that the user has not trusted, even if it is on this machine.

    A cluster receives the examples, and its answers can execute code in this process. ``auto`` is
    the cluster that the user started, joined or named in the environment
    (`compound.cluster.ray_cluster`), and ``local`` is one that the run starts.
    """
    place = ("optimize", "runner", "ray", "address")
    if cluster not in ("auto", "local") and not context.document.is_override(place):
        server = f"http://{cluster}"
        context.check_trust(server, None, place, place, sends="examples", only_listed=True)


def _check_references(context: FileContext, settings: Settings, start: Address) -> None:
    """Report names in settings that cannot be resolved, whichever method they belong to."""
    for found in references(settings, start):
        address = found.path
        if found.name is None:
            continue
        if found.kind == "model":
            context.check_models([found.name], address)
        elif found.kind == "backbone":
            context.may_read(found.name, address)
        elif found.kind in ("configuration", "feedback"):
            context.resolve_path(found.name, address, key=found.key)
        elif found.kind == "code":
            context.load_function(found.name, address)
        else:
            _check_method(context, found.name, address)


def _check_method(context: FileContext, name: str, address: Address) -> None:
    """Report a method that does not exist; import a custom one, so that it is found later."""
    known = [*registered(), *installed()]
    if ":" in name:
        found = context.load_function(name, address)
        if found is not None:
            context.attempt(address, lambda: as_factory(found, name))
    elif name not in known:
        context.document.report(
            address, f"no method {name!r}", f"{suggest_name(name, known)}, or module:function"
        )


def _data(context: FileContext) -> Dataset | None:
    shares = parse_at(context.document, SplitBy | None, ("data", "split_by"))
    context.attempt(("data", "split_by"), lambda: Dataset("", split_by=shares))
    given = parse_at(context.document, DataSettings | None, ("data",))
    if given is None or context.document.has_errors(("data",)):
        return None
    rest = {key: value for key, value in given.given.items() if key != "path"}
    path, address = given.path, ("data", "path")
    # A path in the file's folder takes precedence over a hub id; the working directory is never
    # searched.
    is_there = os.path.lexists(context.folder / path)
    if path.startswith(HUB) or (hub_id(path) is not None and not is_there):
        if hub_id(path) is None:
            context.document.report(
                address,
                f"{format_value(path)} is not the id of a data set",
                f"write {HUB}OWNER/NAME",
            )
        return Dataset(f"{HUB}{path.removeprefix(HUB)}", **rest)
    if "://" in path:
        context.check_store(path, address)
        return Dataset(path, **rest)
    place, within = context.resolve_data(path, address)
    return Dataset(place, **rest, within=within)


def _metric(context: FileContext) -> Metric | None:
    model = parse_at(context.document, MetricEntry | None, ("metric",))
    return None if model is None else _metric_of(context, model, ("metric",))


def _metric_of(context: FileContext, model: MetricEntry, place: Address) -> Metric | None:
    name = next(iter(type(model).model_fields))
    settings, address = getattr(model, name), (*place, name)
    if isinstance(settings, PassAtKMetric):
        of = _metric_of(context, settings.of, (*address, "of"))
        if of is None:
            return None
        make = functools.partial(pass_at_k, of, settings.k, settings.threshold)
        return context.attempt(
            (*address, "threshold" if "threshold" in settings.given else "of"), make
        )
    if isinstance(settings, CustomMetric):
        return _custom_metric(context, settings, address)
    outputs, output = _keys(context.document, "outputs"), getattr(settings, "output", None)
    unknown = bool(outputs) and output is not None and output not in outputs
    if unknown:
        hint = suggest_name(str(output), outputs)
        context.document.report((*address, "output"), f"no output {output!r}", hint)
    metric = context.attempt(address, functools.partial(metric_factory(name), **settings.given))
    if metric is not None:
        context.check_models(metric_lms(metric), (*address, "lm"))
    return None if unknown else metric


def _custom_metric(context: FileContext, settings: CustomMetric, address: Address) -> Metric | None:
    function = context.load_function(settings.call, (*address, "call"))
    if function is None:
        return None
    if settings.settings is not None:
        return _own_metric(context, function, settings, address)
    bounds = None if settings.bounds is None else (settings.bounds[0], settings.bounds[1])
    make = functools.partial(custom, function, settings.name)
    if context.attempt((*address, "call"), make) is None:
        return None
    bounded = functools.partial(make, bounds, settings.thread)
    made = context.attempt((*address, "bounds"), bounded)
    return made and replace(made, bounds_hint="metric: {custom: {…, bounds: [0, 1]}}")


def _own_metric(
    context: FileContext, function: Callable[..., object], found: CustomMetric, address: Address
) -> Metric | None:
    assert found.settings is not None
    for name in ("name", "bounds", "thread"):
        if name in found.model_fields_set:
            hint = "pass them in the function: cp.metrics.custom(score, name, bounds, thread)"
            context.document.report(
                (*address, name), "cannot be given together with settings", hint, key=True
            )
            return None
    if report_wrong_settings(context, function, found.settings, (*address, "settings")):
        return None
    make = functools.partial(made_by, function, found.call, **found.settings)
    return context.attempt((*address, "settings" if found.settings else "call"), make)
