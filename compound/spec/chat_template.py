"""Chat templates of engines, which a file contains or names."""

from __future__ import annotations

from compound.errors import DeclarationError
from compound.example import Values
from compound.security.untrusted import UntrustedFolder
from compound.spec.context import Context
from compound.spec.yaml.document import Address

SETTING, SUFFIX = "chat_template", ".jinja"


def with_template(context: Context, given: Values, engine: Address) -> Values:
    """Return an engine's settings with the text of the template whose file they name.

    A name ends with ``.jinja`` and is relative to the system's file; any other text is a template itself.
    """
    name, address = given.get(SETTING), (*engine, SETTING)
    if not (isinstance(name, str) and name.endswith(SUFFIX)):
        return given
    place, _ = context.resolve_path(name, address)
    if context.document.has_errors(address):
        return given

    def read() -> str:
        folder = UntrustedFolder(place.parent, error=DeclarationError)
        if folder.kind(place.name) != "file":
            raise DeclarationError(f"no file {name!r}", hint="its path is relative to the system's file")
        try:
            return folder.read(place.name).decode()
        except UnicodeDecodeError:
            raise DeclarationError(f"{name!r} is not a text in UTF-8") from None

    text = context.attempt(address, read)
    return given if text is None else {**given, SETTING: text}
