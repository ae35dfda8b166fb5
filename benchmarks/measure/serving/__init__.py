"""Measure the server against the scripted engine that it calls."""
