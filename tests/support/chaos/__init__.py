"""Fault injection: a model server that misbehaves on purpose."""
