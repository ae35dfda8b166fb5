"""OPRO: generations of prompts, written by a model that sees earlier ones with their scores."""
