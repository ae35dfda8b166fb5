"""A program, evaluations and transports for tests of clusters."""
