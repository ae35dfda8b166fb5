"""Advantages of samples within groups."""
