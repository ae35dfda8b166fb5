"""OpenTelemetry spans of system runs, component calls and requests to models."""
