"""The optimization loop: jobs propose, decisions accept or reject, the test split is evaluated last."""
