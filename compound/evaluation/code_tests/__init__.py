"""Judge generated code by unit tests that run in the sandbox, with verdicts that the code cannot forge."""
