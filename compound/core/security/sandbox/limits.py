"""Limits of a sandboxed program, and the names by which results report them."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from compound.core.errors import DeclarationError

MIB = 2**20
INODES = 4096  # files and folders in each of the two temporary file systems

LimitName = Literal[
    "", "cpu", "wall", "output", "memory", "file_size", "disk", "open_files", "processes"
]

# Python turns these limits into exceptions; the last line of the traceback of an uncaught one names
# it.
_ERRORS: tuple[tuple[str, LimitName], ...] = (
    ("MemoryError", "memory"),
    ("numpy._core._exceptions._ArrayMemoryError", "memory"),
    ("numpy.core._exceptions._ArrayMemoryError", "memory"),
    ("RuntimeError: can't start new thread", "processes"),
    ("BlockingIOError: [Errno 11]", "processes"),
    ("OSError: [Errno 24]", "open_files"),
    ("OSError: [Errno 27]", "file_size"),
    ("OSError: [Errno 28]", "disk"),
)


@dataclass(frozen=True)
class SandboxLimits:
    """Resources that a sandboxed program may use.

    Attributes:
        cpu: CPU time of each process, in seconds; rounded up to whole ones.
        wall: elapsed time, in seconds.
        memory: address space of each process, in MiB.
        processes: number of processes and threads.
        file_size: size of each file, in MiB.
        disk: size of the temporary folder, in MiB; another one of this size is at ``/dev/shm``.
        open_files: number of open files of each process.
        output: size of stdout and stderr together, in KiB.
    """

    cpu: PositiveFloat = 10.0
    wall: PositiveFloat = 20.0
    memory: PositiveInt = 1024
    processes: PositiveInt = 32
    file_size: PositiveInt = 16
    disk: PositiveInt = 64
    open_files: PositiveInt = 64
    output: PositiveInt = 256

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            kinds = (int, float) if field.name in ("cpu", "wall") else (int,)
            if type(value) not in kinds or not 0 < value < math.inf:
                whole = "" if float in kinds else "whole "
                raise DeclarationError(
                    f"the limit {field.name} must be a positive {whole}number, but got {value!r}"
                )

    def rlimits(self) -> dict[str, list[int]]:
        """Return soft and hard limits, by the names of the module `resource`."""
        seconds, memory = math.ceil(self.cpu), self.memory * MIB
        both = {
            "RLIMIT_AS": memory,
            "RLIMIT_NPROC": self.processes,
            "RLIMIT_FSIZE": self.file_size * MIB,
            "RLIMIT_NOFILE": self.open_files,
            "RLIMIT_CORE": 0,
            "RLIMIT_MEMLOCK": 0,
            "RLIMIT_MSGQUEUE": 0,
            "RLIMIT_SIGPENDING": 64,
            "RLIMIT_RTPRIO": 0,
            "RLIMIT_NICE": 0,
        }
        return {
            "RLIMIT_CPU": [seconds, seconds + 1],
            **{name: [most, most] for name, most in both.items()},
        }


def limit_of(status: int, stderr: str) -> LimitName:
    """Return the limit that ended a program that was not killed from outside, as far as its end shows it.

    >>> limit_of(1, "Traceback (most recent call last):\\n  ...\\nMemoryError\\n")
    'memory'
    >>> limit_of(152, ""), limit_of(1, "ValueError: no")
    ('cpu', '')
    """
    if status == 128 + 24:  # SIGXCPU
        return "cpu"
    if status == 128 + 25:  # SIGXFSZ
        return "file_size"
    last = stderr.rstrip().rpartition("\n")[2] if status == 1 else ""
    return next((limit for start, limit in _ERRORS if last.startswith(start)), "")
