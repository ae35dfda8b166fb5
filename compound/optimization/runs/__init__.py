"""Run directories: state, checkpoints, events, and earlier formats."""
