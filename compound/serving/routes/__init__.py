"""Handlers of the server's routes."""
