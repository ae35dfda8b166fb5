"""Measure what running examples on other machines costs and gains."""
