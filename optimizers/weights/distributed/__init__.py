"""Learners of several processes on one machine: data parallel, or with the base model divided (FSDP2)."""
