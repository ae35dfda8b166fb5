"""Keys of servers of tools, which are read from the environment and never recorded."""

from __future__ import annotations

import os

from compound.errors import CompoundError
from compound.security.sanitize import remember_secret


def read_key(variable: str, user: str) -> str:
    """Return a key from the environment, and remove it from records from now on.

    Args:
        variable: name of the environment variable.
        user: what needs the key, for the message.

    Raises:
        CompoundError: the variable is not set.
    """
    key = os.environ.get(variable, "")
    if not key:
        raise CompoundError(f"the key of {user!r} is not set", hint=f"export {variable}=…")
    remember_secret(key)
    return key
