"""Errors in a user's code: reported with the file, the line, and what the code should do instead."""

from __future__ import annotations

import inspect
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from compound.core.errors import CompoundError, ConfigurationError

_PACKAGE = Path(__file__).parents[2]
_OURS = tuple(  # the folders named here are links in a checkout
    os.path.realpath(_PACKAGE / name) + os.sep
    for name in ("", "components", "optimizers", "rewards")
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
    """Return the function or class that an object is, or the class that it is of.

    For `compound.components.function.Function`, and for the metric that `custom` makes, it is the
    function.
    """
    if inspect.isclass(code):
        return code
    if inspect.isroutine(code):
        inner: Callable[..., object] = inspect.unwrap(code)
        return inner
    wrapped = getattr(code, "function", None) if _is_ours(type(code)) else None
    return _target(wrapped) if callable(wrapped) else type(code)


def _is_ours(target: type | Callable[..., object]) -> bool:
    """Return whether a function or class belongs to this package, to Python, or has no source."""
    try:
        path = os.path.realpath(inspect.getsourcefile(target) or "")
    except TypeError:
        return True
    return not os.path.isfile(path) or path.startswith(_OURS)


def short_place(code: object) -> str:
    """Return `` (file:line)`` of a user's function or class, the file without its folder; else ``""``.

    >>> short_place(print), short_place(UserCodeError)
    ('', '')
    """
    target = _target(code)
    return "" if _is_ours(target) else f" ({os.path.basename(definition(target))})"


@contextmanager
def reported(role: str, code: object) -> Iterator[None]:
    """Name the file and the line of a user's code that raises inside the block.

    Errors of this package, and errors that no code of a user took part in, pass unchanged. A value
    or a key that the system does not have is reported like an error of the user's code, which
    passed it.
    """
    try:
        yield
    except Exception as error:
        told, hint = f"{type(error).__name__}: {error}", "--debug shows the traceback"
        if isinstance(error, CompoundError):
            told, hint = error.message, error.hint
            if not isinstance(error, ConfigurationError):
                raise
        place = _place(error, code)
        if place is None:
            raise
        raise UserCodeError(f"{role} failed at {place}: {told}", hint=hint) from error


def place_of_error(error: BaseException, package: str = "") -> str:
    """Return `` (file:line)`` of the innermost line of a user's code that an error comes from; else ``""``.

    Code of ``package`` counts as a user's although it is installed.

    For a syntax error, this is the line that cannot be read.

    >>> place_of_error(ValueError("no words"))
    ''
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}:{error.lineno})"
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        module, path = str(frame.f_globals.get("__name__")), frame.f_code.co_filename
        if os.path.isfile(path) and (
            _is_users(path) or (package and module.partition(".")[0] == package)
        ):
            return f" ({path}:{line})"
    return ""


def _is_users(path: str) -> bool:
    real = os.path.realpath(path)
    return os.path.isfile(real) and not real.startswith((*_OURS, *_LIBRARIES))


def _place(error: BaseException, code: object) -> str | None:
    """Return the innermost line of a user's code in a traceback; ``None`` if there is none."""
    try:
        own = os.path.realpath(inspect.getsourcefile(_target(code)) or "")
    except TypeError:
        own = ""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = os.path.realpath(frame.filename)
        if _is_users(path) or (path == own and os.path.isfile(path) and not path.startswith(_OURS)):
            return f"{frame.filename}:{frame.lineno}, in {frame.name}"
    return None


def place_in(error: BaseException, code: object) -> str:
    """Return `` (file:line, in function)`` of a user's code that raised an error, or where it is defined.

    The file is named without its folder: the text is recorded in traces.
    """
    place = _place(error, code)
    return short_place(code) if place is None else f" ({os.path.basename(place)})"


def located(error: BaseException, code: object, called: str = "") -> str:
    """Return an error as text, with the line of a user's code that raised it; see `place_in`.

    >>> located(ValueError("no words"), print)
    'ValueError: no words'
    """
    not_called = (
        called
        and isinstance(error, TypeError)
        and _place(error, code) is None
        and short_place(code)
    )
    fix = f"; it must accept the call {called}" if not_called else ""
    return f"{type(error).__name__}: {error}{place_in(error, code)}{fix}"


def check_signature(
    code: Callable[..., object], role: str, *parameters: str, **named: object
) -> None:
    """Reject a function that cannot be called with some arguments."""
    try:
        signature = inspect.signature(code)
    except (TypeError, ValueError):  # some callables of C have none
        return
    try:
        signature.bind(*parameters, **named)
    except TypeError as error:
        raise UserCodeError(
            f"{role} at {definition(code)} has the signature {signature}: {error}",
            hint=f"it is called with ({', '.join([*parameters, *(f'{name}=…' for name in named)])})",
        ) from None
