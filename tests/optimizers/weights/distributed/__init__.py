"""Tests with a real Ray cluster: `make test-ray`."""
