"""Baselines: random search, MIPRO, GEPA, TextGrad, LLMSelector."""
