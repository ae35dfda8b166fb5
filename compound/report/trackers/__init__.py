"""Experiment trackers: TensorBoard, Trackio, MLflow and Weights & Biases receive the record of runs."""
