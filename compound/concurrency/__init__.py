"""Bridges between threads and event loops, and locks."""
