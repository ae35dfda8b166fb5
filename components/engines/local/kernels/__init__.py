"""Faster computation of layers of local models on a CPU."""
