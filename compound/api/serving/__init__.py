"""Serve a system over HTTP: typed runs, streams, OpenAI's chat interface, metrics and feedback.

`app` makes an ASGI application for any server; `serve` runs it with uvicorn, as ``compound serve``
does.
"""

from compound.core.lazy import public_names

__getattr__, __dir__, __all__, _HOME = public_names(__name__, __file__)
