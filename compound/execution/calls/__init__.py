"""Single calls: attempts, the context of a running component, shared results."""
