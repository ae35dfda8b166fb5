"""Example extensions of compound, one for each role."""
