"""Check a file's method, data and metric, as far as they are available on this machine.

No model is loaded, and nothing is downloaded: data on the hub is listed as not checked. Missing local
data is reported when the file is loaded with ``reads``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard, cast

from compound.api.estimate import missing_for_run
from compound.api.optimize import make_problem
from compound.api.runners import check_runner
from compound.components.index import BM25, PassageIndex
from compound.core.engine import Capabilities
from compound.core.errors import (
    CompoundError,
    DataError,
    DeclarationError,
    InvalidRow,
    MissingExtra,
    SeveralErrors,
    SpecError,
    libraries_of,
    merge_rows,
    missing_libraries,
)
from compound.core.example import Example, Metric
from compound.core.formatting import plural
from compound.core.security.trust import is_store
from compound.evaluation.dataset import ROLES, Dataset
from compound.evaluation.evaluate import ONE_LANGUAGE
from compound.evaluation.examples import check_no_overlaps, find_in_data, read_examples
from compound.evaluation.hub import HUB
from compound.evaluation.metrics.scoring import check_rows, metric_lms
from compound.graph.component import Component, Input, Node
from compound.graph.registry.engines import no_images
from compound.graph.types import holds_images
from compound.optimization.preflight import outlook, system_parts
from compound.optimizers import methods
from compound.optimizers.memory_plan import check_trainable
from compound.optimizers.weights.methods import NothingToTune
from compound.yaml import Program
from compound.yaml.document import Address
from compound.yaml.source import read

LARGEST_CORPUS = 8_000_000  # bytes of a corpus that a check indexes
MOST_QUERIES = 1000  # of a split that a check searches for

_PLACED = re.compile(
    r"(?P<file>[^\n]+?):(?P<line>\d+):(?:(?P<column>\d+):)? (?P<rest>.*)", re.DOTALL
)
_WHERE = re.compile(r"(?P<where>(?:[\w-]+|'[^']*')(?:\.(?:[\w-]+|'[^']*'))*): ")


@dataclass(frozen=True)
class CheckResult:
    """Result of checking one file."""

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

    Each has ``file, line, column, where, message``: the location in the YAML file or in the data
    file, as far as known.

    >>> problems_of(SpecError(["a.yaml:3:1: optimize.sed: no such key"]), Path("a.yaml"))
    [{'file': 'a.yaml', 'line': 3, 'column': 1, 'where': 'optimize.sed', 'message': 'no such key'}]
    """
    if isinstance(error, SeveralErrors):
        return [problem for each in error.errors for problem in problems_of(each, file)]
    if isinstance(error, SpecError):
        return [_problem(text, file) for text in error.problems]
    return [_problem(str(error), file, spec=False)]


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
        DataError: a row is invalid, a value does not match the type of its input, or an example has
            no gold value for the metric; or, with ``strict``, splits share examples.
        SeveralErrors: several of these errors occurred.
    """
    checked = CheckResult(program)
    system, problems = program.system, list[CompoundError]()
    with _collecting_errors(problems):
        checked.notes.extend(_check_method(program))
    with _collecting_errors(problems):
        _check_images(program)
    problems.extend(_missing_parts(program))
    checked.notes.extend(missing_for_run(program.optimize))
    nodes = tuple(system.nodes.values())
    readable = _Readable(program.data, program.metric, system.inputs, system.outputs, nodes)
    checked.not_checked.extend(_check_data(readable, problems))
    checked.warnings.extend(readable.warnings)
    if problems:
        raise _all(
            [_at_metric(program, each, len(readable.ids)) for each in merge_rows(problems)],
            readable,
        )
    if program.data is not None and is_local(program.data):
        found = find_in_data(program.data, list(program.system.inputs))
        if strict:
            check_no_overlaps(found)
        checked.warnings.extend(map(str, found))
        checked.notes.extend(line for line in _prospects(program) if line not in checked.notes)
    return checked


def _at_metric(program: Program, error: CompoundError, rows: int) -> CompoundError:
    """Return an error at the metric's place in the file if its settings fit none of the rows."""
    found = error.key if isinstance(error, InvalidRow) and error.rows == rows else error.message
    if not re.match(r"[^:\n]+: no (?:gold field|label of output) ", found):
        return error
    document = read(program.text, str(program.path))
    address: Address = ("metric",)
    while isinstance(entry := document.at(address), dict) and "output" not in entry:
        address = (*address, "of" if "of" in entry else next(iter(entry)))
    address = (*address, "gold") if document.has((*address, "gold")) else address
    hint = error.fix if isinstance(error, InvalidRow) else error.hint
    document.report(address, found, hint)
    try:
        document.check()
    except SpecError as placed:
        return placed
    return error


@contextmanager
def _collecting_errors(problems: list[CompoundError]) -> Iterator[None]:
    """Collect the error raised by a block, so that all errors are reported together."""
    try:
        yield
    except CompoundError as error:
        problems.append(error)


def is_local(data: Dataset) -> bool:
    """Return whether a data set can be read without a network."""
    return data.rows is not None or (
        not str(data.path).startswith(HUB) and Path(data.path).exists()  # not in a store either
    )


def _prospects(program: Program) -> list[str]:
    """Return what a run could detect and try, if the file says how it is optimized."""
    named = "method" in program.optimize.model_fields_set
    if program.data is None or program.metric is None or not _is_planned(program):
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


def _is_planned(program: Program) -> bool:
    """Return whether a file says how its system is optimized."""
    return "method" in program.optimize.model_fields_set or bool(program.optimize.budget.limits())


def _check_method(program: Program) -> Iterator[str]:
    name, system, settings, folder = (
        program.optimize.method,
        program.system,
        program.optimize,
        program.folder,
    )
    try:
        made = methods.method(name, system, settings, folder, program.find_engine)
    except NothingToTune:
        if agents := methods.agents_without_prompts(system):
            yield (
                f"the prompts of agent {agents[0]!r} are not declared, so that there is nothing to tune; "
                f"find them by `compound init {program.path}`"
            )
            return
        if "method" in settings.model_fields_set:
            raise
        return
    except CompoundError:
        if "method" in settings.model_fields_set:
            raise
        return
    yield from made.notes if _is_planned(program) else ()
    yield from made.proposers
    check_trainable(made, system, program.find_engine)
    try:
        check_runner(settings, system, made)
    except (
        DeclarationError
    ) as error:  # a sweep runs each whole optimization on one machine of the cluster
        yield (
            f"`compound optimize` will reject this file ({error.message}); `compound sweep --cluster` "
            "accepts it"
        )


def _check_images(program: Program) -> None:
    """Check that the models of components with images among their inputs take images."""
    for node in program.system.all_nodes():
        if any(holds_images(port.type) for port in node.inputs.values()):
            for model in _models(program, node.component):
                _check_takes_images(program, node.name, model)


def _models(program: Program, component: Component) -> list[str]:
    """Return the models that a component may call."""
    if "lm" not in component.settings:
        return []
    lm = component.settings["lm"] or program.system.lm
    models: tuple[object, ...] = getattr(lm, "options", (lm,))
    return [str(model) for model in models if model]


def _missing_parts(program: Program) -> list[CompoundError]:
    """Return an error for each wrong engine, and each missing library of the system and its models."""
    components = program.system.components.values()
    names = dict.fromkeys(lm for component in components for lm in _models(program, component))
    needed, wrong = list(system_parts(program.system)), list[CompoundError]()
    for lm in [*names, *(metric_lms(program.metric) if program.metric is not None else ())]:
        with _collecting_errors(wrong):
            needed.append((f"the engine of {lm!r}", libraries_of(program.find_engine(lm))))
    return [*wrong, *missing_libraries(needed)]


def _check_takes_images(program: Program, node: str, model: str) -> None:
    try:
        engine = program.find_engine(model)
    except CompoundError:  # reported elsewhere
        return
    if not Capabilities(engine).takes_images:
        problem = no_images(model)
        raise DeclarationError(
            f"{node!r} has images among its inputs: {problem.message}", hint=problem.hint
        )


@dataclass(frozen=True)
class _Readable:
    """What can be checked of the data; collects the warnings of rows, and their ids."""

    data: Dataset | None
    metric: Metric | None
    inputs: Mapping[str, object]
    outputs: Collection[str]
    nodes: Sequence[Node] = ()
    warnings: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)


def with_data_errors(error: SpecError) -> CompoundError:
    """Return the errors of a file with those of its data, as far as it can be read."""
    if error.readable is None:
        return error
    data, metric, inputs, outputs = error.readable
    problems: list[CompoundError] = []
    readable = _Readable(
        cast("Dataset | None", data), cast("Metric | None", metric), inputs, outputs
    )
    list(_check_data(readable, problems))
    return _all([error, *problems], readable)


def _all(problems: Sequence[CompoundError], readable: _Readable) -> CompoundError:
    """Return one error for all, with the warnings as notes."""
    found = merge_rows(problems)
    error = found[0] if len(found) == 1 else SeveralErrors(found)
    for warning in readable.warnings:
        error.add_note(warning)
    return error


def _check_data(readable: _Readable, problems: list[CompoundError]) -> Iterator[str]:
    """Read every split on this machine; yield what could not be checked, and collect errors."""
    data = readable.data
    if data is None:
        return
    if not is_local(data):
        path = str(data.path)
        hub = "; `check` does not load data sets from the hub" if path.startswith(HUB) else ""
        missing = f"file or folder {path.removeprefix(HUB)!r} does not exist{hub}"
        yield f"data: {'`check` reads no store' if is_store(path) else missing}"
        return
    for role in ROLES:
        if data.has(role):
            with _collecting_errors(problems):
                examples = read_examples(data, role, readable.inputs, report=problems.append)
                readable.ids.extend(example.id for example in examples)
                readable.warnings.extend(_empty_texts(role, examples, readable))
                for node in readable.nodes:
                    with _collecting_errors(problems):
                        readable.warnings.extend(_vain_searches(role, examples, node))
                if readable.metric is not None:
                    check_rows(readable.metric, readable.outputs, examples)


def _empty_texts(role: str, examples: Sequence[Example], readable: _Readable) -> Iterator[str]:
    """Yield a warning for each input, and the gold field, that is an empty text in some rows."""
    gold = getattr(readable.metric, "gold", None)
    for kind, name in [*(("input", name) for name in readable.inputs), ("gold field", str(gold))]:
        places = [
            example.place or example.id
            for example in examples
            for value in [(example.inputs if kind == "input" else example.gold).get(name)]
            if isinstance(value, str) and not value.strip()
        ]
        if places:
            yield f"{kind} {name!r} is empty in {plural(len(places), f'{role} row')}: {_first(places)}"


def _vain_searches(role: str, examples: Sequence[Example], node: Node) -> Iterator[str]:
    """Yield a warning if a node that searches by words for columns finds no passage for some rows."""
    index = getattr(node.component, "index", None)
    columns = {port: wire.name for port, wire in node.wires.items() if isinstance(wire, Input)}
    if node.when is not None or not _is_searched(index, columns):
        return
    searched, places = examples[:MOST_QUERIES], []
    for example in searched:
        place = example.place or example.id
        try:
            if not _finds(
                index,
                **{port: example.inputs[columns[port]] for port in node.component.inputs or ()},
            ):
                places.append(place)
        except MissingExtra:  # reported elsewhere
            return
        except DataError as error:
            raise (
                error
                if isinstance(index, BM25)
                else InvalidRow(place, error.message, hint=error.hint)
            ) from error
    if places:
        yield (
            f"{node.name!r} finds no passage for {len(places)} of {len(searched)} {role} queries: "
            f"{_first(places)}; {ONE_LANGUAGE}"
        )


def _is_searched(index: object, columns: Collection[str]) -> TypeGuard[BM25 | PassageIndex]:
    if isinstance(index, PassageIndex):
        return index.model is None and {"query", "passages"} <= set(columns)
    file = Path(index.corpus) if isinstance(index, BM25) else None
    return (
        file is not None
        and "query" in columns
        and file.is_file()
        and file.stat().st_size <= LARGEST_CORPUS
    )


def _finds(index: BM25 | PassageIndex, query: Any, passages: Any = ()) -> bool:  # noqa: ANN401 - checked values
    found = (
        index.rank(query, passages, 1)
        if isinstance(index, PassageIndex)
        else index.open().search(query, 1)
    )
    return any(passage["score"] for passage in found)


def _first(places: Sequence[str]) -> str:
    return ", ".join(places[:3]) + (", …" if len(places) > 3 else "")
