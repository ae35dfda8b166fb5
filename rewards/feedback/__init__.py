"""Preference pairs from the feedback of a served system's users."""
