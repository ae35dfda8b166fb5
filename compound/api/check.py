"""Check a file's method, data and metric, as far as they are available on this machine.

A file is often checked before its data is downloaded. Missing parts are not errors, but are listed as
not checked. No model is loaded, and nothing is downloaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from compound.api.optimize import make_problem
from compound.api.runners import check_runner
from compound.errors import CompoundError, DeclarationError, MissingExtra, SeveralErrors, SpecError
from compound.evaluation.dataset import ROLES, Dataset
from compound.evaluation.duplicates import check_no_overlaps, find_in_data
from compound.evaluation.examples import read_examples
from compound.evaluation.hub import HUB
from compound.evaluation.metrics.scoring import check_rows
from compound.extras import check_installed
from compound.formatting import plural
from compound.graph.types import holds_images
from compound.optimization.prospects import outlook
from compound.optimizers import methods
from compound.optimizers.weights.methods import NothingToTune
from compound.registry.engine_checks import no_images
from compound.settings.optimize import OptimizeSettings
from compound.spec import Program

_PLACED = re.compile(r"(?P<file>[^\n]+?):(?P<line>\d+):(?:(?P<column>\d+):)? (?P<rest>.*)", re.DOTALL)
_WHERE = re.compile(r"(?P<where>(?:[\w-]+|'[^']*')(?:\.(?:[\w-]+|'[^']*'))*): ")


@dataclass(frozen=True)
class CheckResult:
    """Result of checking one file.

    Attributes:
        program: the checked program.
        warnings: examples that occur in several splits.
        notes: valid but noteworthy facts.
        not_checked: parts that are missing on this machine, each with the reason.
    """

    program: Program
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, object]:
        """Return the result as JSON."""
        system = self.program.system
        return {
            "file": str(self.program.path),
            "system": system.name,
            "nodes": list(system.nodes),
            "parameters": list(system.parameters),
            "method": self.program.optimize.method,
            "warnings": self.warnings,
            "notes": self.notes,
            "not_checked": self.not_checked,
            "problems": [],
        }

    def __str__(self) -> str:
        system = self.program.system
        size = f"{plural(len(system.nodes), 'node')}, {plural(len(system.parameters), 'parameter')} to tune"
        head = f"{self.program.path}: ok: {size}"
        notes = [f"  note: {note}" for note in self.notes]
        return "\n".join([head, *notes, *(f"  not checked: {part}" for part in self.not_checked)])


def problems_of(error: CompoundError, file: Path) -> list[dict[str, object]]:
    """Return the problems reported by an error, as JSON.

    Each has ``file, line, column, where, message``: the location in the YAML file or in the data file,
    as far as known.

    >>> problems_of(SpecError(["a.yaml:3:1: optimize.sed: no such key"]), Path("a.yaml"))
    [{'file': 'a.yaml', 'line': 3, 'column': 1, 'where': 'optimize.sed', 'message': 'no such key'}]
    """
    if isinstance(error, SpecError):
        return [_problem(text, file) for text in error.problems]
    errors = error.errors if isinstance(error, SeveralErrors) else (error,)
    return [_problem(str(each), file, spec=False) for each in errors]


def _problem(text: str, file: Path, *, spec: bool = True) -> dict[str, object]:
    """Parse one problem from its message."""
    found = _PLACED.match(text)
    if found is None and spec:
        found = re.match(f"(?P<file>{re.escape(str(file))}): (?P<rest>.*)", text)
    if found is None:
        return {"file": str(file), "line": None, "column": None, "where": "", "message": text}
    place, rest = found.groupdict(), found["rest"]
    where = _WHERE.match(rest) if spec and place.get("line") else None
    return {
        "file": place["file"],
        **{name: int(place[name]) if place.get(name) else None for name in ("line", "column")},
        "where": where["where"] if where else "",
        "message": rest[where.end() :] if where else rest,
    }


def check_program(program: Program, *, strict: bool = False) -> CheckResult:
    """Check the method, the data, the metric and the prospects of a file.

    Args:
        program: the file.
        strict: whether to reject examples that occur in several splits.

    Raises:
        DeclarationError: the method is not applicable to the system, or the budget is too small to
            try anything.
        DataError: a row is invalid, a value does not match the type of its input, or an example has no gold
            value for the metric; or, with ``strict``, splits share examples.
        SeveralErrors: several of these errors occurred.
    """
    checked = CheckResult(program)
    problems: list[CompoundError] = []
    with _collecting_errors(problems):
        checked.notes.extend(_check_method(program))
    with _collecting_errors(problems):
        _check_images(program)
    checked.notes.extend(_missing_libraries(program.optimize))
    checked.not_checked.extend([*_missing_corpora(program), *_check_data(program, problems)])
    if problems:
        raise problems[0] if len(problems) == 1 else SeveralErrors(problems)
    if program.data is not None and is_local(program.data):
        found = find_in_data(program.data, list(program.system.inputs))
        if strict:
            check_no_overlaps(found)
        checked.warnings.extend(map(str, found))
        checked.notes.extend(line for line in _prospects(program) if line not in checked.notes)
    return checked


@contextmanager
def _collecting_errors(problems: list[CompoundError]) -> Iterator[None]:
    """Collect the error raised by a block, so that all errors are reported together."""
    try:
        yield
    except CompoundError as error:
        problems.append(error)


def is_local(data: Dataset) -> bool:
    """Return whether a data set can be read without a network."""
    return data.rows is not None or (not str(data.path).startswith(HUB) and Path(data.path).exists())


def _prospects(program: Program) -> list[str]:
    """Return what a run could detect and try, if the file says how it is optimized."""
    named = "method" in program.optimize.model_fields_set
    if program.data is None or program.metric is None or not (named or program.optimize.budget.limits()):
        return []
    try:
        problem = make_problem(
            program.system,
            program.data,
            program.metric,
            program.optimize,
            program.find_engine,
            program.folder,
        )
    except NothingToTune:
        if named and not methods.agents_without_prompts(program.system):
            raise
        return []  # reported by the note about the method
    return list(outlook(problem)["told"]) if named else []


def _check_method(program: Program) -> Iterator[str]:
    name, system, settings, folder = program.optimize.method, program.system, program.optimize, program.folder
    try:
        made = methods.method(name, system, settings, folder, program.find_engine)
    except NothingToTune:
        if agents := methods.agents_without_prompts(system):
            yield (
                f"the prompts of agent {agents[0]!r} are not declared, so that there is nothing to tune; "
                f"find them by `compound gateway discover {program.path}`"
            )
            return
        if "method" in settings.model_fields_set:
            raise
        fit = methods.applicable_methods(system, settings, folder)
        if fit:
            others = ", ".join(fit)
            yield f"the default method {name!r} has nothing to tune; set optimize.method to one of {others}"
        return
    except CompoundError:
        if "method" in settings.model_fields_set:
            raise
        return
    yield from made.proposers
    methods.check_trainable(made, system, program.find_engine)
    try:
        check_runner(settings, system, [made])
    except DeclarationError as error:  # a sweep runs each whole optimization on one machine of the cluster
        yield (
            f"`compound optimize` will reject this file ({error.message}); `compound sweep --cluster` "
            "accepts it"
        )


def _check_images(program: Program) -> None:
    """Check that the models of components with images among their inputs take images.

    Raises:
        DeclarationError: one does not.
    """
    for node in program.system.all_nodes():
        settings = node.component.settings
        if "lm" in settings and any(holds_images(port.type) for port in node.inputs.values()):
            lm = settings["lm"] or program.system.lm
            models: tuple[object, ...] = getattr(lm, "options", (lm,))
            for model in map(str, filter(None, models)):
                _check_takes_images(program, node.name, model)


def _check_takes_images(program: Program, node: str, model: str) -> None:
    try:
        engine = program.find_engine(model)
    except CompoundError:  # reported elsewhere
        return
    if not getattr(engine, "takes_images", False):
        problem = no_images(model)
        raise DeclarationError(f"{node!r} has images among its inputs: {problem.message}", hint=problem.hint)


def _missing_libraries(settings: OptimizeSettings) -> Iterator[str]:
    """Yield the settings whose library is not installed on this machine."""
    modules: dict[str, str] = {f"optimize.trackers: {name}": name for name in settings.trackers}
    if settings.runner is not None:
        modules["optimize.runner: ray"] = "ray"
    for setting, module in modules.items():
        try:
            check_installed(module, setting)
        except MissingExtra as error:
            yield str(error)


def _missing_corpora(program: Program) -> Iterator[str]:
    for name, component in program.system.components.items():
        corpus = getattr(getattr(component, "index", None), "corpus", None)
        if corpus is not None and not Path(corpus).is_file():
            yield f"corpus of {name!r}: file {str(corpus)!r} does not exist"


def _check_data(program: Program, problems: list[CompoundError]) -> Iterator[str]:
    """Read every split on this machine; yield what could not be checked, and collect errors."""
    data = program.data
    if data is None:
        return
    if not is_local(data):
        path = str(data.path)
        hub = "; `check` does not load data sets from the hub" if path.startswith(HUB) else ""
        yield f"data: file or folder {path.removeprefix(HUB)!r} does not exist{hub}"
        return
    for role in ROLES:
        if data.has(role):
            with _collecting_errors(problems):
                examples = read_examples(data, role, program.system.inputs)
                if program.metric is not None:
                    check_rows(program.metric, program.system.outputs, examples)
