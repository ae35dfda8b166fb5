"""Read, validate and write the YAML file of a `System`.

Reading: `source` parses the text into a `document` with positions; `file` checks it by its model;
`build` makes the components by their `kinds` and connects them; `program` adds data, metric and
engines. Writing: `dump`.
"""

from compound.yaml.dump import dump
from compound.yaml.file import schema
from compound.yaml.program import Program, load, loads

__all__ = ["Program", "dump", "load", "loads", "schema"]
