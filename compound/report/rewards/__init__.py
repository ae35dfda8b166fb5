"""Report local rewards."""
