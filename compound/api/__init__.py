"""Python API: run, evaluate and optimize a system; sweep, estimate and check."""
