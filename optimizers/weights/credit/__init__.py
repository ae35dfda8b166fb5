"""Credit of samples: rewards propagated through calls, and advantages within groups."""
