"""Engines, which run the models that LLM components call, behind `compound.engine.Engine`."""
