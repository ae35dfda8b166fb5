"""Constrained decoding: validity and cost of structured answers, and a comparison of grammar libraries."""
