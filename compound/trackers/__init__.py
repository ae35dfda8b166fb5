"""Experiment trackers: MLflow and Weights & Biases receive parameters, metrics and files of runs."""
