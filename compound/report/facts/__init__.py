"""The facts of a run that reports show, read from its directory."""
