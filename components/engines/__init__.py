"""Engines: what runs the models that LLM components call, behind `compound.engine.Engine`."""
