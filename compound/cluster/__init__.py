"""Make the calls of evaluations in other processes and on other machines, with equal results."""
