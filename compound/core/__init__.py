"""Values and helpers that every package uses.

- `errors`: the exceptions, and missing extras.
- `engine`: engines, requests, answers and usage.
- `example`, `image`: rows of data, scores, and images.
- `narrowing`: arguments and settings of the wrong type, as errors.
- `formatting`, `notebook`: short texts of values, and tables in notebooks.
- `threads`, `loops`: functions in threads, and event loops.
"""
