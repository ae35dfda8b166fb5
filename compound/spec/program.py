"""The YAML file of a system, its data, its metric and how to optimize it: read, checked, resolved.

Every mistake of a file is reported at once, as ``file:line:column: where.it.is: what; hint``.
A file that names Python code (``call:``, ``class:``) or says how to run a program (``command:`` of an engine)
is as trusted as Python; ``allow_import=False`` refuses such files. A file that names a server or the variable
of a key needs the user's consent; see `compound.security.trust`.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from compound.engine import Engine
from compound.errors import DeclarationError, SpecError, nearest
from compound.evaluation.dataset import Dataset
from compound.evaluation.hub import HUB, hub_id
from compound.evaluation.metrics import custom
from compound.evaluation.named_metrics import made_by, metric_factory
from compound.example import Metric, Values
from compound.graph.system import System
from compound.optimization.registration import as_factory
from compound.registry.engines import engine_class, find_engine, open_engine, own_engine
from compound.registry.methods import installed, registered
from compound.registry.user_code import check_signature
from compound.security.trust import Trust
from compound.settings.base import Settings
from compound.settings.optimize import OptimizeSettings
from compound.settings.references import references
from compound.settings.sections import Own, optimize_model, own_sections
from compound.spec.build import Graph
from compound.spec.consent import check_consent
from compound.spec.context import OUTSIDE, Context, leads_out
from compound.spec.file import ClassEngine, CustomMetric, DataSettings, SplitBy, file_model
from compound.spec.file import Engine as EngineModel
from compound.spec.file import Metric as MetricModel
from compound.spec.kinds.kind import report_misfits
from compound.spec.schema.types import Model
from compound.spec.shape import fitted, note_misfits
from compound.spec.yaml.document import Address, Document, shown
from compound.spec.yaml.overrides import apply
from compound.spec.yaml.source import MAX_BYTES, read

EngineSettings = tuple[str, Values]
LOCAL = ("transformers", "vllm")  # the engines that read a model's folder


@dataclass(frozen=True)
class FileEngines:
    """Finds the engine of a model: one of a file's, or one by the form of the name.

    Attributes:
        path: the file.
        engines: the kind and the settings of those that it names.
        outside: the models that may be read outside of the file's folder, None for any. A model's name may be
            the output of a component, so that the file does not spell it.
    """

    path: Path
    engines: Mapping[str, EngineSettings]
    outside: Collection[str] | None = None

    def __call__(self, lm: str) -> Engine:
        """Return the engine of a model.

        Raises:
            DeclarationError: there is none, or its settings are not those of its kind.
        """
        if lm not in self.engines:
            if self.outside is not None and leads_out(lm) and lm not in self.outside:
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
    """What a file says, ready to run.

    Attributes:
        path: the file.
        text: its text as given, without overrides.
        system: the system, bound to the values it starts from.
        data: where the examples are, if the file says so.
        metric: how outputs are scored, if the file says so.
        optimize: how to optimize.
        engines: the models the file names, each with the kind of its engine and settings.
        outside: the models that may be read outside of the file's folder; None for any.
    """

    path: Path
    text: str
    system: System
    data: Dataset | None
    metric: Metric | None
    optimize: OptimizeSettings
    engines: Mapping[str, EngineSettings]
    outside: Collection[str] | None = None

    @property
    def folder(self) -> Path:
        """Where code and files that it names are looked for first."""
        return self.path.parent

    def find_engine(self, lm: str) -> Engine:
        """Return the engine of a model: one of the file's, or one by the form of the name.

        Raises:
            DeclarationError: there is none, or its settings are not those of its kind.
        """
        return FileEngines(self.path, self.engines, self.outside)(lm)


def load(
    path: str | Path,
    *,
    overrides: Sequence[tuple[str, str]] = (),
    allow_import: bool = True,
    models: Collection[str] = (),
    trust: Collection[str] = (),
) -> Program:
    """Read a file; paths in it are relative to its folder.

    Args:
        path: the file.
        overrides: entries to replace, such as ``("optimize.budget.system_runs", "150")``; a value is read
            as YAML.
        allow_import: whether the file may name Python code, read what lies outside of its folder, and use
            what the user trusts in general.
        models: model names besides the file's own that the caller has engines for.
        trust: servers and keys that the file may use besides those the user trusts anyway, such as
            ``"gpu.example:8000"`` and ``"LLM_KEY@llm.example.com"``; without imports, these alone.

    Raises:
        SpecError: the file cannot be read, or something in it is wrong.
        DeclarationError: an entry of ``trust`` has another form.
        ConfigurationError: the user's configuration file cannot be read.
    """
    try:
        with Path(path).open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise SpecError([f"{path}: cannot be read: {reason}"]) from None
    return _load(raw, Path(path), overrides, allow_import, models, trust)


def loads(
    text: str | bytes,
    *,
    path: str | Path = "system.yaml",
    overrides: Sequence[tuple[str, str]] = (),
    allow_import: bool = True,
    models: Collection[str] = (),
    trust: Collection[str] = (),
) -> Program:
    """Read a text as if it stood in the file ``path``; see `load`.

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
    return _load(text, Path(path), overrides, allow_import, models, trust)


def _load(
    raw: bytes | str,
    path: Path,
    overrides: Sequence[tuple[str, str]],
    allow_import: bool,
    models: Collection[str],
    trust: Collection[str],
) -> Program:
    Trust.of(trust)  # a misspelled entry is an error even where the file needs none
    document = read(raw, str(path))
    apply(document, overrides)
    own = _own_sections(document, path.parent, allow_import)
    note_misfits(document, file_model(own))
    context = Context(document, path.parent, allow_import, {*models, *_keys(document, "engines")}, trust)
    lm = fitted(document, str, ("lm",))
    if lm is not None:
        context.check_models([lm], ("lm",))
    system = Graph(context, (), str(document.at(("system",)))).system(lm)
    _check_models(context)
    data, metric = _data(context), _metric(context)
    optimize = _optimize(context, own)
    engines = _engines(context)
    document.check()
    assert system is not None
    outside = None if allow_import else frozenset(context.outside)
    system = system.with_engines(FileEngines(path, engines, outside))
    return Program(path, document.text, system, data, metric, optimize, engines, outside)


def _keys(document: Document, section: str) -> list[str]:
    found = document.at((section,))
    return list(found) if isinstance(found, dict) else []


def _check_models(context: Context) -> None:
    """Note, once, that some components have no model."""
    missing = context.without_model
    if missing and not context.document.has(("lm",)):
        first = next(iter(missing.values()))
        names = ", ".join(missing)
        context.document.report(first, f"no model for {names}", "add `lm: smollm2` to the file", key=True)


def _engines(context: Context) -> dict[str, EngineSettings]:
    engines: dict[str, EngineSettings] = {}
    for name in _keys(context.document, "engines"):
        found = fitted(context.document, EngineModel, ("engines", name))
        if found is None:
            continue
        if isinstance(found, ClassEngine):
            if (own := _own_engine(context, found, ("engines", name))) is not None:
                engines[name] = own
            continue
        settings: Model
        ((kind, settings),) = found.given.items()
        engines[name] = (kind, settings.given)
        check_consent(context, kind, settings.given, ("engines", name, kind))
        if kind in LOCAL and settings.given.get("api_base") is None:  # else it is a name on that server
            model = settings.given.get("model", "")
            context.may_lead_to(model, ("engines", name, kind, "model"))
        for key in getattr(inspect.unwrap(engine_class(kind)), "runs", ()):
            if key in settings.given and not context.allow_import:
                address = ("engines", name, kind, key)
                context.document.report(address, "says how to run a program, and imports are not allowed")
    return engines


def _own_engine(context: Context, found: ClassEngine, address: Address) -> EngineSettings | None:
    """Return the place and the settings of an engine of the user's own; None if something is wrong."""
    code = context.function(found.code, (*address, "class"))
    check_consent(context, found.code, found.settings, (*address, "settings"))
    if code is None or report_misfits(context, code, found.settings, (*address, "settings")):
        return None

    def check() -> EngineSettings:
        check_signature(code, f"engine {found.code!r}", **found.settings)
        return found.code, found.settings

    return context.attempt((*address, "class"), check)


def _own_sections(document: Document, folder: Path, imports: bool) -> Own:
    """Return the sections of methods of the user's own, with the models of their settings."""
    values = document.at(("optimize",))
    return tuple(own_sections(values, folder, imports=imports).items()) if isinstance(values, dict) else ()


def _optimize(context: Context, own: Own) -> OptimizeSettings:
    address = ("optimize",)
    found = fitted(context.document, optimize_model(own), address) if context.document.has(address) else None
    if found is None:
        method = fitted(context.document, str, (*address, "method"))
        if method is not None:
            _check_method(context, method, (*address, "method"))
        return OptimizeSettings()
    given = {
        name: getattr(found, name) for name in type(found).model_fields if name in found.model_fields_set
    }
    unknown = [name for name, model in own if model is None]
    settings = OptimizeSettings.model_validate({k: v for k, v in given.items() if k not in unknown})
    _check_references(context, found, address)
    return settings


def _check_references(context: Context, settings: Settings, start: Address) -> None:
    """Note names in settings that stand for nothing, whichever method they belong to."""
    for found in references(settings, start):
        address = found.path
        if found.name is None:
            continue
        if found.kind == "model":
            context.check_models([found.name], address)
        elif found.kind == "backbone":
            context.may_lead_to(found.name, address)
        elif found.kind == "configuration":
            context.place(found.name, address, key=found.key)
        elif found.kind == "code":
            context.function(found.name, address)
        else:
            _check_method(context, found.name, address)


def _check_method(context: Context, name: str, address: Address) -> None:
    """Note a method that does not exist; one of the user's own is imported, so that it is found later."""
    known = [*registered(), *installed()]
    if ":" in name:
        found = context.function(name, address)
        if found is not None:
            context.attempt(address, lambda: as_factory(found, name))
    elif name not in known:
        context.document.report(address, f"no method {name!r}", f"{nearest(name, known)}, or module:function")


def _data(context: Context) -> Dataset | None:
    shares = fitted(context.document, SplitBy | None, ("data", "split_by"))
    context.attempt(("data", "split_by"), lambda: Dataset("", split_by=shares))
    given = fitted(context.document, DataSettings | None, ("data",))
    if given is None or context.document.wrong(("data",)):
        return None
    rest = {key: value for key, value in given.given.items() if key != "path"}
    path, address = given.path, ("data", "path")
    # What lies beside the file comes first; what the working directory holds never counts.
    is_there = os.path.lexists(context.folder / path)
    if path.startswith(HUB) or (hub_id(path) is not None and not is_there):
        if hub_id(path) is None:
            context.document.report(address, f"{shown(path)} is no data set's id", f"write {HUB}OWNER/NAME")
        return Dataset(f"{HUB}{path.removeprefix(HUB)}", **rest)
    place, within = context.place(path, address)
    return Dataset(place, **rest, within=within)


def _metric(context: Context) -> Metric | None:
    document = context.document
    model = fitted(document, MetricModel | None, ("metric",))
    if model is None:
        return None
    name = next(iter(type(model).model_fields))
    settings, address = getattr(model, name), ("metric", name)
    if isinstance(settings, CustomMetric):
        function = context.function(settings.call, (*address, "call"))
        if function is not None and settings.settings is not None:
            return _own_metric(context, function, settings, address)
        bounds = None if settings.bounds is None else (settings.bounds[0], settings.bounds[1])
        if function is None:
            return None
        if context.attempt((*address, "call"), functools.partial(custom, function, settings.name)) is None:
            return None
        make = functools.partial(custom, function, settings.name, bounds)
        return context.attempt((*address, "bounds"), make)
    outputs, output = _keys(document, "outputs"), getattr(settings, "output", None)
    if outputs and output is not None and output not in outputs:
        document.report((*address, "output"), f"no output {output!r}", nearest(str(output), outputs))
    return context.attempt(address, functools.partial(metric_factory(name), **settings.given))


def _own_metric(
    context: Context, function: Callable[..., object], found: CustomMetric, address: Address
) -> Metric | None:
    """Return the metric that a function of the user's own makes of its settings."""
    assert found.settings is not None
    for name in ("name", "bounds"):
        if name in found.model_fields_set:
            hint = "the function gives them to the metric: cp.custom(score, name, bounds)"
            context.document.report(
                (*address, name), "cannot be given together with settings", hint, key=True
            )
            return None
    if report_misfits(context, function, found.settings, (*address, "settings")):
        return None
    make = functools.partial(made_by, function, found.call, **found.settings)
    return context.attempt((*address, "settings" if found.settings else "call"), make)
