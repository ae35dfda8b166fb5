"""Judge generated code by unit tests that run in the sandbox."""
