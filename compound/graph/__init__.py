"""Declare a system: typed components, their search spaces, the graph they form, and configurations of it."""
