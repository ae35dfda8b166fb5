"""Declarations, samples and jobs for tests of weight training."""
