"""Metrics whose score is the verdict of a model (docs/adr/0039)."""
