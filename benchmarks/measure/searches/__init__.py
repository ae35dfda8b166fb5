"""Searches compared on real systems, by system runs and by seed."""
