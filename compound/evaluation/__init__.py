"""Evaluate a system: data sets, metrics, evaluations, and the statistics of scores."""
