"""Run agents of other frameworks and languages behind a server that answers and records their requests."""
