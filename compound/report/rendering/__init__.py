"""Render reports as HTML and Markdown."""
