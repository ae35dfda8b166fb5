"""Read and validate the YAML file of a `System`.

`source` parses the text into a `document` with positions; `file` checks it by its model;
`build` makes the components by their `kinds` and connects them; `program` adds data, metric and
engines.
"""

from compound.yaml.file import schema
from compound.yaml.program import Program, load, loads

__all__ = ["Program", "load", "loads", "schema"]
