"""Names of GPUs that are the same in every process of a machine."""

from __future__ import annotations

import os
from collections.abc import Mapping

VISIBLE = "CUDA_VISIBLE_DEVICES"


def gpu_name(index: int, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the name of a GPU in CUDA_VISIBLE_DEVICES by its index in a process; None if it is hidden.

    >>> gpu_name(1, {}), gpu_name(1, {VISIBLE: "4,5"}), gpu_name(1, {VISIBLE: "4"})
    ('1', '5', None)
    """
    visible = environment.get(VISIBLE)
    if visible is None:
        return str(index)
    names = [name.strip() for name in visible.split(",")]
    shown = names[: names.index("-1")] if "-1" in names else names  # CUDA ignores what follows
    return (shown[index] or None) if index < len(shown) else None
