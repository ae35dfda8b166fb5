"""Run the examples of evaluations in other processes and on other machines, with equal results."""
