"""Pydantic models of the YAML file."""
