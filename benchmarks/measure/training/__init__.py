"""Measurements of weight training: sampling during training, replaced examples, and critics."""
