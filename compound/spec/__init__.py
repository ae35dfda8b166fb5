"""The YAML file: read with positions, checked as a whole, built into a `System`, and written again.

From text to program: `yaml_source` (text to a tree that knows its lines) → `overrides` → `file_*` (the shape
of the file) → `context`, `make`, `uses`, `edges`, `build` (the system) → `program`. Back: `spelling`, `dump`.
"""

from compound.spec.dump import dump
from compound.spec.program import Program, load, loads
from compound.spec.schema.model import schema

__all__ = ["Program", "dump", "load", "loads", "schema"]
