"""Check a file beyond its text: its method, its data and its metric, as far as they are on this machine.

A file is often checked before its data has been fetched. What is not there is no mistake, but is listed as
not checked. No model is loaded, and nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from compound.data import EXTENSIONS, ROLES, Dataset
from compound.duplicates import in_data, refuse
from compound.errors import CompoundError
from compound.metrics import check_rows
from compound.optimizing import make_problem
from compound.prospects import outlook
from compound.spec import Program

METHODS = "compound.optimizers.methods"


@dataclass(frozen=True)
class Checked:
    """Result of checking one file.

    Attributes:
        program: what was checked.
        warnings: examples that are in several splits.
        notes: what is allowed, but worth knowing.
        not_checked: the parts that are not on this machine, each with the reason.
    """

    program: Program
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the result for machines."""
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
        }

    def __str__(self) -> str:
        system = self.program.system
        size = f"{_counted(system.nodes, 'node')}, {_counted(system.parameters, 'parameter')} to tune"
        head = f"{self.program.path}: ok: {size}"
        notes = [f"  note: {note}" for note in self.notes]
        return "\n".join([head, *notes, *(f"  not checked: {part}" for part in self.not_checked)])


def _counted(items: Sized, noun: str) -> str:
    return f"{len(items)} {noun}" if len(items) == 1 else f"{len(items)} {noun}s"


def check_program(program: Program, *, strict: bool = False) -> Checked:
    """Check the method, the data, the metric and the prospects of a file.

    Args:
        program: the file.
        strict: whether to refuse examples that are in several splits.

    Raises:
        DeclarationError: the method that the file names cannot work on its system, or the budget holds
            nothing to try.
        DataError: a row of the data is unusable, or holds nothing that the metric can compare with; or, with
            ``strict``, splits share examples.
    """
    checked = Checked(program)
    checked.notes.extend(_check_method(program))
    checked.not_checked.extend([*_missing_corpora(program), *_check_data(program)])
    if program.data is not None and is_local(program.data):
        found = in_data(program.data, list(program.system.inputs))
        if strict:
            refuse(found)
        checked.warnings.extend(map(str, found))
        checked.notes.extend(_prospects(program))
    return checked


def is_local(data: Dataset) -> bool:
    """Return whether a data set can be read without a network."""
    return data.rows is not None or Path(data.path).exists()


def _prospects(program: Program) -> list[str]:
    """Return what a run could detect and try, if the file says how it is optimized."""
    if program.data is None or program.metric is None or "method" not in program.optimize.model_fields_set:
        return []
    problem = make_problem(
        program.system, program.data, program.metric, program.optimize, program.find_engine, program.folder
    )
    return list(outlook(problem)["told"])


def _check_method(program: Program) -> Iterator[str]:
    methods = import_module(METHODS)
    name, system, settings, folder = program.optimize.method, program.system, program.optimize, program.folder
    try:
        made = methods.method(name, system, settings, folder)
    except methods.NothingToTune:
        if "method" in settings.model_fields_set:
            raise
        fit = methods.fitting(system, settings, folder)
        if fit:
            others = ", ".join(fit)
            yield f"the default method {name!r} finds nothing to tune; set optimize.method to one of {others}"
        return
    except CompoundError:
        if "method" in settings.model_fields_set:
            raise
        return
    methods.refuse_untrainable(made, system, program.find_engine)


def _missing_corpora(program: Program) -> Iterator[str]:
    for name, component in program.system.components.items():
        corpus = getattr(getattr(component, "index", None), "corpus", None)
        if corpus is not None and not Path(corpus).is_file():
            yield f"corpus of {name!r}: there is no file {str(corpus)!r}"


def _check_data(program: Program) -> Iterator[str]:
    """Read every split that is on this machine; yield what could not be checked."""
    data = program.data
    if data is None:
        return
    if not is_local(data):
        hub = (
            "" if str(data.path).endswith(EXTENSIONS) else "; a data set on the hub is not loaded by a check"
        )
        yield f"data: there is no file or folder {str(data.path)!r}{hub}"
        return
    for role in ROLES:
        if data.has(role):
            examples = data.examples(role, list(program.system.inputs))
            if program.metric is not None:
                check_rows(program.metric, program.system.outputs, examples)
