"""Report of a run, written from the files of its directory only.

`record` reads the files, `facts` computes the values, `sections` arranges them in `blocks`, and `markdown`
and `html` render the blocks. `figures` and `curve` draw.
"""

from compound.report.facts.facts import summarize
from compound.report.writing import terminal_summary, write

__all__ = ["summarize", "terminal_summary", "write"]
