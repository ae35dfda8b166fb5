"""Simulated systems and toy tasks with a known optimum."""
