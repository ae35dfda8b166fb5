"""Report of a run, written from the files of its directory only.

`record` reads the files, and `facts` computes the values. ``report.jinja`` states the sections,
which `rendering` turns into Markdown and HTML; `sections` adds what a template cannot express, and
writes the files. `figures`, `graph`, `training` and `rewards` draw, and `sweep` compares runs.
"""

from compound.report.facts import summarize
from compound.report.sections import forecast, terminal_summary, write

__all__ = ["forecast", "summarize", "terminal_summary", "write"]
