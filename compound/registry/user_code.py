"""Errors in a user's code: reported with the file, the line, and what the code should do instead."""

from __future__ import annotations

import inspect
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from compound.errors import CompoundError

__all__ = ["UserCodeError", "check_signature", "definition", "located", "reported"]

_PACKAGE = Path(__file__).parents[1]
_OURS = tuple(  # the folders named here are links in a checkout
    os.path.realpath(_PACKAGE / name) + os.sep
    for name in ("", "benchmarks", "components", "optimizers", "rewards")
)
_LIBRARIES = tuple(
    os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "purelib", "platlib")
)


class UserCodeError(CompoundError):
    """Code of a user raised an error, or does not do what its role requires."""


def definition(code: object) -> str:
    """Return where a function, a class or the class of an object is defined, as ``file:line``.

    Where there is no source, the name is returned.
    """
    target = _target(code)
    try:
        return f"{inspect.getsourcefile(target)}:{inspect.getsourcelines(target)[1]}"
    except (OSError, TypeError):
        return str(getattr(target, "__qualname__", target))


def _target(code: object) -> type | Callable[..., object]:
    """Return the function or class that an object is, or the class that it is of."""
    if inspect.isclass(code):
        return code
    return inspect.unwrap(code) if inspect.isroutine(code) else type(code)


@contextmanager
def reported(role: str, code: object) -> Iterator[None]:
    """Name the file and the line of a user's code that raises inside the block.

    Errors of this package, and errors that no code of a user took part in, pass unchanged.

    Args:
        role: what the code is, such as ``optimizer 'anneal'``.
        code: the function or the object that is called; it counts as a user's in a library, too.

    Raises:
        UserCodeError: a user's code raised another error.
    """
    try:
        yield
    except CompoundError:
        raise
    except Exception as error:
        place = _place(error, code)
        if place is None:
            raise
        raise UserCodeError(
            f"{role} failed at {place}: {type(error).__name__}: {error}", hint="--debug shows the traceback"
        ) from error


def _place(error: BaseException, code: object) -> str | None:
    """Return the innermost line of a user's code in a traceback; ``None`` if there is none."""
    try:
        own = os.path.realpath(inspect.getsourcefile(_target(code)) or "")
    except TypeError:
        own = ""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = os.path.realpath(frame.filename)
        is_library = path.startswith(_LIBRARIES) and path != own
        if os.path.isfile(path) and not path.startswith(_OURS) and not is_library:
            return f"{frame.filename}:{frame.lineno}, in {frame.name}"
    return None


def located(error: BaseException, code: object) -> str:
    """Return an error as text, with the line of a user's code that raised it.

    The file is named without its folder: the text is recorded in traces.

    Args:
        error: the error.
        code: the function or the object that was called; it counts as a user's in a library, too.

    >>> located(ValueError("no words"), print)
    'ValueError: no words'
    """
    place = _place(error, code)
    where = "" if place is None else f" ({os.path.basename(place)})"
    return f"{type(error).__name__}: {error}{where}"


def check_signature(code: Callable[..., object], role: str, *parameters: str) -> None:
    """Refuse a function that cannot be called with some positional arguments.

    Raises:
        UserCodeError: it takes others; the message names its place.
    """
    try:
        signature = inspect.signature(code)
    except (TypeError, ValueError):  # some callables of C have none
        return
    try:
        signature.bind(*parameters)
    except TypeError as error:
        raise UserCodeError(
            f"{role} at {definition(code)} has the signature {signature}: {error}",
            hint=f"it is called with ({', '.join(parameters)})",
        ) from None
