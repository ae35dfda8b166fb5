"""Inspect local rewards of a run: what they were trained on, what they depend on, and how well they rank."""
