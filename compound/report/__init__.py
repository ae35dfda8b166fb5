"""Report of a run, written from the files of its directory only.

`record` reads the files; `facts`, `headline`, `training` and `rewards` compute the values.
``report.jinja`` states the sections, which `rendering` turns into Markdown and HTML; `sections`
adds what a template cannot express, and writes the files. `figures`, `graph` and `training_curves`
draw, and `sweep` compares runs.
"""

from compound.report.facts import summarize
from compound.report.sections import terminal_summary, write

__all__ = ["summarize", "terminal_summary", "write"]
