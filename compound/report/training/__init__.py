"""Report training steps."""
