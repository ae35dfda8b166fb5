"""Train LoRA adapters: samples, forward passes, updates."""
