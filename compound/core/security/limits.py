"""Limits on data read from untrusted files; each can be raised by an environment variable.

A compressed file of ten megabytes can hold ten gigabytes, and a single line can fill the memory.
The defaults are far above the needs of data sets and run directories.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from compound.core.errors import DeclarationError

MIB = 2**20
DEPTH = 200  # levels of nested JSON; Python's json module fails at about 1000
# levels of an output of a component, which records hold inside further levels
OUTPUT_DEPTH = DEPTH // 2


@dataclass(frozen=True)
class Limit:
    """A limit in mebibytes, and the environment variable that overrides it."""

    variable: str
    default: int

    @property
    def bytes(self) -> int:
        """The limit in bytes.

        Raises:
            DeclarationError: the variable is not a positive whole number.
        """
        chosen = os.environ.get(self.variable)
        if chosen is None:
            return self.default * MIB
        if not chosen.isascii() or not chosen.isdigit() or not int(chosen):
            raise DeclarationError(
                f"the environment variable {self.variable} must be a positive whole number of mebibytes, "
                f"but is {chosen!r}"
            )
        return int(chosen) * MIB

    @property
    def hint(self) -> str:
        """Advice on raising the limit."""
        return f"if you trust the file, set {self.variable} to a larger number of mebibytes"

    def __str__(self) -> str:
        return f"{self.bytes // MIB:,} MiB"


DATA = Limit("COMPOUND_MAX_DATA_MB", 1024)
"""Maximum decompressed size of a data file or corpus."""
LINE = Limit("COMPOUND_MAX_LINE_MB", 64)
"""Maximum length of a line of a data file, a corpus or a run record."""
FILE = Limit("COMPOUND_MAX_FILE_MB", 512)
"""Maximum size of a JSON document of a run directory, or of a configuration file."""
ARTIFACT = Limit("COMPOUND_MAX_ARTIFACT_MB", 16384)
"""Maximum total size of the files of an adapter or stored reward."""
