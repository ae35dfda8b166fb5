"""Number of threads of matrix products."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["one_matrix_thread"]


@contextmanager
def one_matrix_thread() -> Iterator[None]:
    """Limit matrix products to one thread, which is faster if the matrices are small.

    Without threadpoolctl, a part of scikit-learn, nothing is limited.

    Example:
        >>> import numpy as np
        >>> with one_matrix_thread():
        ...     float((np.eye(2) @ np.eye(2)).sum())
        2.0
    """
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:
        yield
        return
    with threadpool_limits(1, user_api="blas"):
        yield
