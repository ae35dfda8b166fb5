"""Estimated gains of candidates: cross-fitted local rewards as control variates of the global reward."""
