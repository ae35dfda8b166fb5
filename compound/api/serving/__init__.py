"""Serve a system over HTTP: typed runs, streams, OpenAI's chat interface, metrics and feedback.

`app` makes an ASGI application for any server; `serve` runs it with uvicorn, as ``compound serve``
does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compound.api.serving.application import app as app
    from compound.api.serving.server import serve as serve
    from compound.api.serving.settings import ServerSettings as ServerSettings

_HOME = {
    "ServerSettings": "compound.api.serving.settings",
    "app": "compound.api.serving.application",
    "serve": "compound.api.serving.server",
}

__all__ = sorted(_HOME)  # noqa: PLE0605 - the names are loaded lazily


if not TYPE_CHECKING:  # with a module-level `__getattr__`, type checkers would accept any name

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module 'compound.api.serving' has no attribute {name!r}")
        try:
            value = getattr(importlib.import_module(_HOME[name]), name)
        except ImportError as error:
            importlib.import_module("compound.core.errors").raise_missing_extra(error, "serving")
            raise
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return __all__
