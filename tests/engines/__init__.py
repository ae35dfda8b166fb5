"""Engines and servers of models."""
