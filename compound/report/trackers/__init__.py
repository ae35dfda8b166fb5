"""Experiment trackers: TensorBoard, MLflow and Weights & Biases receive the record of runs."""
