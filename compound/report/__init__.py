"""The report of a run, made from the files of its directory alone.

`record` reads them, `facts` works out what they say, `sections` arranges it in `blocks`, and `markdown` and
`html` write those. `figures` and `curve` draw.
"""

from compound.report.facts.facts import summarize
from compound.report.writing import closing, write

__all__ = ["closing", "summarize", "write"]
