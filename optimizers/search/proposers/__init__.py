"""Sources of candidates: demonstrations, edits, and prompts that a model writes."""
