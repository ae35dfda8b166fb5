"""Settings of an optimization, and the references they contain."""
