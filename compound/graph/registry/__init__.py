"""Find code by name: engines, stored policies, and the Python code that files name."""
