"""Report of a run, written from the files of its directory only.

`record` reads the files; `facts`, `headline` and `training` compute the values; `sections` arranges
them in blocks, which `rendering` turns into Markdown and HTML. `figures` and `graph` draw, and
`sweep` compares runs.
"""

from compound.report.facts import summarize
from compound.report.writing import terminal_summary, write

__all__ = ["summarize", "terminal_summary", "write"]
