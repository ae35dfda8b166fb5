"""The kind ``code``: a Python program in a sandbox."""

from __future__ import annotations

from pydantic import Field

from compound.components.code import CodeRunner
from compound.security.sandbox.limits import SandboxLimits
from compound.spec.kinds.kind import DumpContext, Kind, MakeContext
from compound.spec.schema.types import Model
from compound.spec.schema.wiring import Wiring
from compound.spec.spelling import Tree


class SandboxSettings(Model):
    """Limits of the Python programs in a sandbox."""

    cpu: float = Field(default=10.0, gt=0)
    """CPU time of each process in seconds, rounded up to whole ones."""
    wall: float = Field(default=20.0, gt=0)
    """Elapsed time in seconds."""
    memory: int = Field(default=1024, ge=1)
    """Address space of each process in MiB."""
    processes: int = Field(default=32, ge=1)
    """Maximum number of processes and threads."""
    file_size: int = Field(default=16, ge=1)
    """Maximum size of a file in MiB."""
    disk: int = Field(default=64, ge=1)
    """Size of the temporary folder in MiB."""
    open_files: int = Field(default=64, ge=1)
    """Maximum number of open files of a process."""
    output: int = Field(default=256, ge=1)
    """Maximum size of stdout and stderr together in KiB."""


class CodeSettings(SandboxSettings):
    """A sandbox for Python programs, and its limits."""

    reproducible: bool = False
    """Whether equal programs give equal outputs, so that samples share cached results."""


class CodeEntry(Wiring):
    """A Python program, given on the port `code`, that runs in a sandbox without network access."""

    code: CodeSettings
    """The limits of the program."""


def _make(entry: CodeEntry, context: MakeContext) -> CodeRunner | None:
    given = dict(entry.code.given)
    reproducible = given.pop("reproducible", False)
    inside = (*context.address, "code")
    if not context.file.allow_import:  # the programs may come from the file's own data
        context.file.document.report(inside, "runs generated code, and imports are not allowed", key=True)
        return None
    return context.file.attempt(
        inside, lambda: CodeRunner(context.name, SandboxLimits(**given), reproducible)
    )


def _dump(component: CodeRunner, context: DumpContext) -> Tree:
    given = context.changed_fields(component.limits, ())
    return {"code": {**given, **({"reproducible": True} if component.reproducible else {})}}


CODE_KIND = Kind("code", CodeEntry, _make, (CodeRunner,), _dump)
