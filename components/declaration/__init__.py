"""Declare components and systems as plain Python functions."""
