"""Sweeps over methods, files and seeds, with their controls."""
