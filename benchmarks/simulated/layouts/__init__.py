"""Simulated training on several GPUs: costs of a GPU, replicas that sample, and steps of a layout."""
