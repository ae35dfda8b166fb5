"""Run a system on an example: scheduling, calls with retries and caching, budgets, traces, forks."""
