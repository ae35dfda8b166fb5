"""Generate the tables of the documentation from the committed results of the benchmarks.

A table is between ``<!-- table NAME -->`` and ``<!-- end -->``; the text around it is not changed.
The pages and the tables are in the package `tables`, next to this file.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # of `benchmarks`

from tables.pages import write_pages

if __name__ == "__main__":
    write_pages()
