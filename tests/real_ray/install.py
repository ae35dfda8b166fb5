"""Put Ray and a store into a virtual environment that also has the packages of this one.

Run ``python install.py FOLDER``. The environment of the tests refers to the packages of the
development environment, and has only those that it lacks: Ray, s3fs, and moto, a server of S3's API.
Standard library only.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

PACKAGES = ("ray", "s3fs", "moto[server]")
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"


def main(folder: Path) -> None:
    """Make the environment, or complete it."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    # a .pth file, because those of the development environment (an editable install) must be read,
    # too
    here = sysconfig.get_path("purelib")
    (packages / "development.pth").write_text(f"import site; site.addsitedir({here!r})\n", "utf-8")
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*command, "--constraint", str(CONSTRAINTS), *PACKAGES], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
