"""Generate the tables of the documentation from the committed results of the benchmarks.

A table is between ``<!-- table NAME -->`` and ``<!-- end -->``; the text around it is not changed. The pages
and the tables are in the package `tables`, next to this file.
"""

from __future__ import annotations

from tables.pages import write_pages

if __name__ == "__main__":
    write_pages()
