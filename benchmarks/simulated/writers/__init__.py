"""Comparisons of methods where a scripted model of known skill writes the prompts."""
