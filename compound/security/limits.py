"""Limits on what is read from files that somebody else may have made; each can be raised by a variable.

A compressed file of ten megabytes can hold ten gigabytes, and one line can be large enough to fill the
memory. The defaults are far above what data sets and run directories need.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from compound.errors import DeclarationError

MIB = 2**20
DEPTH = 200  # levels of nested JSON; Python's own functions fail at about a thousand


@dataclass(frozen=True)
class Limit:
    """A number of mebibytes, and the environment variable that replaces it.

    >>> LINE.bytes // MIB
    64
    """

    variable: str
    default: int

    @property
    def bytes(self) -> int:
        """The limit in bytes.

        Raises:
            DeclarationError: the variable does not hold a positive whole number.
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
        """How to raise the limit."""
        return f"if the file is to be trusted, set {self.variable} to a larger number of mebibytes"

    def __str__(self) -> str:
        return f"{self.bytes // MIB:,} MiB"


DATA = Limit("COMPOUND_MAX_DATA_MB", 1024)
"""What one compressed data file or corpus may decompress to."""
LINE = Limit("COMPOUND_MAX_LINE_MB", 64)
"""One line of a data file, a corpus or a record of a run."""
FILE = Limit("COMPOUND_MAX_FILE_MB", 512)
"""One JSON document of a run directory, or a configuration file."""
ARTIFACT = Limit("COMPOUND_MAX_ARTIFACT_MB", 16384)
"""All files of one adapter or stored reward."""
