"""The YAML file: read with positions, checked as a whole, built into a `System`, and written again.

Reading: `yaml` parses the text into a tree with positions and applies overrides; `shape` checks the tree by
the models of `file` and `kinds`; `make`, `uses`, `edges` and `build` construct the system; `program` adds the
rest. Writing: `dump`. Each component kind is a module of `kinds`: its schema, construction and spelling.
"""

from compound.spec.dump import dump
from compound.spec.file import schema
from compound.spec.program import Program, load, loads

__all__ = ["Program", "dump", "load", "loads", "schema"]
