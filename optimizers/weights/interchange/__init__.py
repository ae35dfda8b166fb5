"""Rollouts for TRL's trainer, and samples with their credit for others."""
