"""Choose which parameters to optimize next."""
