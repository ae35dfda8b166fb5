"""Public names of `compound.api.serving`, for type checkers and for its ``__getattr__``."""

from compound.api.serving.application import app as app
from compound.api.serving.server import serve as serve
from compound.api.serving.settings import ServerSettings as ServerSettings
