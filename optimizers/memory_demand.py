"""Memory that one part of a run needs on a device, and the sizes of a model that it is computed from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from compound.components.engines import models
from compound.components.engines.local import footprint
from compound.components.engines.local.footprint import Footprint


@dataclass(frozen=True)
class Demand:
    """Memory of one part of a run, in bytes.

    Attributes:
        what: the part.
        device: its device.
        fixed: weights, adapters and optimizer states; for a server, all its memory.
        working: upper bound of activations, logits and caches.
        lower: settings that lower the working memory.
        smaller: settings that lower the fixed memory.
    """

    what: str
    device: str
    fixed: int
    working: int
    lower: str
    smaller: str

    @property
    def most(self) -> int:
        """Upper bound of the memory: fixed and working."""
        return self.fixed + self.working


def find_sizes(model: str, *, causal: bool = True) -> tuple[Path, Footprint] | str:
    """Return the folder of a model and its sizes, or why they are unknown; downloads nothing."""
    folder = models.find_local(model)
    if folder is None:
        return f"{model!r} is not on this machine yet"
    try:
        return folder, footprint.footprint(folder, causal=causal)
    except (OSError, ValueError, AttributeError, ImportError) as error:
        return f"{model!r} has no configuration that can be read ({type(error).__name__})"
