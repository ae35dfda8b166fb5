"""Measurements of methods that search prompts."""
