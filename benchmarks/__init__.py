"""Benchmark systems and measurements, imported as ``compound.benchmarks``."""

if __name__ != "compound.benchmarks":
    raise ImportError("import compound.benchmarks, not benchmarks: a second copy would break isinstance")
