"""Tests with a server of S3's API on this machine: `make test-ray`."""
