"""Define an optimization: methods, optimizers, schedulers, jobs, the problem, and its budget plan."""
