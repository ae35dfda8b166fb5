"""Agents: a model that calls tools in turns until it answers."""
