"""Search prompts, demonstrations, choices and numbers."""
