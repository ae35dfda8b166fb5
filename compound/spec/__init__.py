"""Read, validate and write the YAML file of a `System`.

Reading: `yaml` parses the text into a tree with positions and applies overrides; `shape` checks the tree by
the models of `file` and `kinds`; `make`, `uses`, `edges` and `build` construct the system; `program` adds the
rest. Writing: `dump`. Each component kind is a module of `kinds`: its schema, construction and YAML form.
"""

from compound.spec.dump import dump
from compound.spec.file import schema
from compound.spec.program import Program, load, loads

__all__ = ["Program", "dump", "load", "loads", "schema"]
