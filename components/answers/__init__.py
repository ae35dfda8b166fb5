"""Answers of models: the types they may have, how a prompt describes them, and how a text is read."""
