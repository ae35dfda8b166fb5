"""Run models in this process, with LoRA adapters side by side on one base."""
