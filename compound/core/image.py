"""Images as values: inputs of systems, ports of components, and parts of messages to models."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Literal, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    model_validator,
)

MediaType = Literal["image/png", "image/jpeg", "image/gif", "image/webp"]
MAX_BYTES = 10 * 2**20
"""Maximum size of an image; providers accept between 5 and 20 MiB."""
SIGNATURES: Mapping[MediaType, re.Pattern[bytes]] = {
    "image/png": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "image/jpeg": re.compile(rb"\xff\xd8\xff"),
    "image/gif": re.compile(rb"GIF8[79]a"),
    "image/webp": re.compile(rb"RIFF.{4}WEBP", re.DOTALL),
}
"""First bytes of the files of each format."""
_DATA_URL = re.compile(r"data:(?P<type>[a-z]+/[a-z0-9.+-]+);base64,", re.IGNORECASE)


def _decoded(data: object) -> object:
    if not isinstance(data, str):
        return data
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise ValueError(f"the data of an image must be base64: {error}") from None


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


class Image(BaseModel):
    """An image: its bytes and their format.

    An input of this type is sent to models that take images. Its JSON form is ``{"media_type":
    "image/png", "data": "<base64>"}``; a data URL is accepted as well. In data files an image may
    also be the path of a file below the folder of the data file.

    Attributes:
        media_type: format of the bytes.
        data: content of the image file, at most 10 MiB.

    Raises:
        ValueError: the bytes are no image of the format, or too large.

    Example:
        >>> dot = Image.from_bytes(b"GIF89a-and-so-on")
        >>> dot.media_type, dot.data_url[:30]
        ('image/gif', 'data:image/gif;base64,R0lGODlh')
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    media_type: MediaType
    data: Annotated[
        bytes,
        BeforeValidator(_decoded),
        PlainSerializer(_encoded, return_type=str, when_used="json"),
        Field(min_length=1, max_length=MAX_BYTES),
    ]

    @classmethod
    def from_bytes(cls, data: bytes) -> Image:
        """Return the image in the content of a file; the format is recognized by its first bytes.

        Raises:
            ValueError: the bytes are no image of a supported format, or too large.
        """
        kind = _recognized(data)
        if kind is None:
            raise ValueError(f"the data is no image; supported are {', '.join(SIGNATURES)}")
        return cls(media_type=kind, data=data)

    @classmethod
    def from_file(cls, path: str | Path) -> Image:
        """Return the image in a file.

        Raises:
            OSError: the file cannot be read.
            ValueError: it holds no image of a supported format, or is too large.
        """
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        try:
            return cls.from_bytes(data)
        except ValueError as error:
            raise ValueError(f"{path}: {_first_line(error)}") from None

    @model_validator(mode="before")
    @classmethod
    def _read_data_url(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        found = _DATA_URL.match(value)
        if found is None:
            raise ValueError("an image must be a data URL, data:image/png;base64,…")
        return {"media_type": found["type"].lower(), "data": value[found.end() :]}

    @model_validator(mode="after")
    def _check_format(self) -> Image:
        if not SIGNATURES[self.media_type].match(self.data):
            found = _recognized(self.data) or "no supported image"
            raise ValueError(f"the data is declared as {self.media_type}, but is {found}")
        return self

    @property
    def sha256(self) -> str:
        """Digest of the bytes, in hex."""
        return hashlib.sha256(self.data).hexdigest()

    @property
    def data_url(self) -> str:
        """The image as a data URL."""
        return f"data:{self.media_type};base64,{_encoded(self.data)}"

    @property
    def label(self) -> str:
        """Description for texts, such as messages in traces."""
        return f"[{self.media_type}, {len(self.data):,} bytes, sha256 {self.sha256[:12]}]"

    def __repr__(self) -> str:
        return f"Image({self.label[1:-1]})"

    __str__ = __repr__


def replace_images(value: object, replacement: Callable[[Image], object]) -> object:
    """Return a value with the images in it replaced, also those in their JSON form.

    A model or a dataclass that contains an image becomes a dictionary; a value without images is
    unchanged.
    """
    if (image := _as_image(value)) is not None:
        return replacement(image)
    members = _members(value)
    if isinstance(members, dict):
        changed: object = {key: replace_images(item, replacement) for key, item in members.items()}
        pairs = zip(members.values(), cast("dict[object, object]", changed).values(), strict=True)
    elif isinstance(members, list):
        changed = [replace_images(item, replacement) for item in members]
        pairs = zip(members, changed, strict=True)
    else:
        return value
    return value if all(old is new for old, new in pairs) else changed


def _as_image(value: object) -> Image | None:
    if isinstance(value, Image):
        return value
    if not (isinstance(value, dict) and value.keys() == {"media_type", "data"}):
        return None
    try:
        return Image.model_validate(value)
    except ValidationError:
        return None


def _members(value: object) -> object:
    """Return the members of a value by name or in order; the value itself if it has none."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if isinstance(value, BaseModel):
        return {name: getattr(value, name) for name in type(value).model_fields}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return value


def _recognized(data: bytes) -> MediaType | None:
    return next((kind for kind, start in SIGNATURES.items() if start.match(data)), None)


def _first_line(error: ValueError) -> str:
    problems = getattr(error, "errors", None)
    return str(problems()[0]["msg"]) if callable(problems) else str(error)
