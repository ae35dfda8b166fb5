"""Code component: runs a Python program in a sandbox."""

from __future__ import annotations

import functools
import platform
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from typing import ClassVar

from compound.core.narrowing import entry, report_wrong_arguments
from compound.core.security.sandbox.limits import LimitName, SandboxLimits
from compound.core.security.sandbox.sandbox import Sandbox
from compound.graph.component import CallContext, Operation, check_name
from compound.graph.types import Port


@report_wrong_arguments
@dataclass(frozen=True, eq=False, repr=False)
class CodeRunner(Operation):
    """A component that runs the Python program on its port ``code``, isolated from this machine.

    The ports ``stdin`` and ``files`` (texts by relative path) may be left unconnected. A program
    that fails or reaches a limit is a result like any other: ``ok`` is false, and ``status`` and
    ``limit`` say why.

    Attributes:
        name: the component's name.
        limits: resources of each program; see
            `compound.core.security.sandbox.limits.SandboxLimits`.
        reproducible: whether equal programs give equal outputs, so that results are shared between
            samples.

    Raises:
        SandboxUnavailable: when it runs on a machine without a sandbox; the program is not run.

    Example:
        >>> from compound import Input
        >>> runner = CodeRunner("runner", SandboxLimits(wall=5.0))
        >>> runner(code=Input("program")).ok.label
        '$runner.ok'
    """

    name: str
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    reproducible: bool = False

    kind = "code"
    cacheable = True
    inputs: ClassVar[Mapping[str, Port]] = {
        "code": Port(str),
        "stdin": Port(str, optional=True, default=""),
        "files": Port(dict[str, str], optional=True, default={}),
    }
    outputs: ClassVar[Mapping[str, Port]] = {
        "stdout": Port(str),
        "stderr": Port(str),
        "status": Port(int),
        "limit": Port(LimitName),
        "ok": Port(bool),
    }

    def __post_init__(self) -> None:
        check_name("CodeRunner", self.name)

    @property
    def version(self) -> str:  # noqa: D102
        return f"code:1:{platform.python_version()}:{astuple(self.limits)}"

    def deterministic(self, values: Mapping[str, object]) -> bool:  # noqa: D102
        return self.reproducible

    async def run(  # noqa: D102
        self, inputs: Mapping[str, object], values: Mapping[str, object], call: CallContext
    ) -> Mapping[str, object]:
        files = {path: str(text) for path, text in (entry(inputs, "files", dict)).items()}
        result = await shared_sandbox(self.limits).run(
            entry(inputs, "code", str), entry(inputs, "stdin", str), files
        )
        return {name: getattr(result, name) for name in self.outputs}


@functools.cache
def shared_sandbox(limits: SandboxLimits) -> Sandbox:
    """Return the sandbox of all components with equal limits, which bounds their concurrency."""
    return Sandbox(limits)
