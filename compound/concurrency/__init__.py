"""Combine threads and event loops."""
