"""Benchmark systems and measurements, to run from a clone of the repository."""
