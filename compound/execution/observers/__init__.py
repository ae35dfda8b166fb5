"""Hooks for observers of runs: spans of tracers, and events of streams."""
