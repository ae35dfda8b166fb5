"""Turn out-of-memory errors of torch into errors that name the setting to lower."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from compound.errors import CompoundError


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out, on any device.

    ``torch.OutOfMemoryError`` is a ``RuntimeError``; allocators without an error class of their own raise
    ``RuntimeError`` with a message about memory.

    >>> is_out_of_memory(RuntimeError("CUDA out of memory")), is_out_of_memory(RuntimeError("shape mismatch"))
    (True, False)
    """
    if isinstance(error, CompoundError):
        return False
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "memory" in str(error))


@contextmanager
def naming_settings(what: str, hint: str) -> Iterator[None]:
    """Raise `CompoundError` with a hint if memory runs out in a block or a decorated function.

    Args:
        what: the activity, for the message, such as ``a training step``.
        hint: the settings to lower.

    >>> with naming_settings("a training step", "lower micro_tokens"):
    ...     raise MemoryError("1 GiB")
    Traceback (most recent call last):
    compound.errors.CompoundError: a training step ran out of memory: 1 GiB; lower micro_tokens
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise CompoundError(f"{what} ran out of memory: {error}", hint=hint) from error
