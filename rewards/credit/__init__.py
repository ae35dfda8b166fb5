"""Assign credit: propagate rewards through calls, and shape or gate the rewards of single agents."""
