"""Losses of weight training, and corrections for differences between sampler and trainer."""
