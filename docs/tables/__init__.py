"""Tables of the documentation, generated from the committed results of the benchmarks.

`tables.pages` has the pages and the tables by name; the other modules have the tables of one theme
each.
"""
