"""Results of an earlier version that later ones must reproduce bit for bit."""
