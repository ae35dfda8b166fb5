"""Number of threads of matrix products."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["one_matrix_thread"]


@contextmanager
def one_matrix_thread() -> Iterator[None]:
    """Limit matrix products of NumPy and SciPy to one thread, which is faster if the matrices are small.

    Without threadpoolctl, a part of scikit-learn, nothing is limited.

    Example:
        >>> import numpy as np
        >>> with one_matrix_thread():
        ...     float((np.eye(2) @ np.eye(2)).sum())
        2.0
    """
    try:
        controller = _controller()
    except ImportError:
        yield
        return
    with controller.limit(limits=1, user_api="blas"):
        yield


@functools.cache
def _controller() -> Any:  # noqa: ANN401 - threadpoolctl has no types
    """Return the controller of the loaded libraries; finding them takes a millisecond."""
    import scipy.linalg  # noqa: F401 - it loads a library of its own
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()
