"""The pydantic models of the YAML file."""
