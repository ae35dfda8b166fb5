"""Measurement scripts; each writes its results to ``benchmarks/data``."""
