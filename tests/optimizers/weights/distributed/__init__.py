"""Learners of several processes."""
