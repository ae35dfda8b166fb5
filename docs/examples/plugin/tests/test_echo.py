"""Conformance of the engine."""

from __future__ import annotations

from compound_example.echo import Echo

from compound.testing import EngineKit


class TestEcho(EngineKit):
    def make(self) -> Echo:
        return Echo(upper=True)
