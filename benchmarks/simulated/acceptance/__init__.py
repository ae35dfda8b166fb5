"""Simulated gains and systems by which acceptance tests are measured."""
