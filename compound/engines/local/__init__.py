"""Engine for models in this process, with several LoRA adapters on one base model."""
