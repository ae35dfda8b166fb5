"""Jobs and schedulers, which choose the parameters to optimize next."""
