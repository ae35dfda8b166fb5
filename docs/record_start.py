"""Follow docs/start.md as a new user would, and record what its commands print and how long they take.

Besides the seconds that passed, those of the processor are recorded, which depend less on what else runs.

    python docs/record_start.py docs/examples/shop/transcript.txt

The sections that state their minutes are executed in a temporary folder with the data of
docs/examples/shop; a block after a line like `qa.yaml`: is written to this file. Servers run until
the end of their section, at free ports. The model is the embedded one.
"""

from __future__ import annotations

import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "start.md"
SHOP = ROOT / "docs" / "examples" / "shop"
SERVERS = {"serve": ["--port", "0"], "ui": ["--port", "0", "--no-browser"]}
ADDRESS = re.compile(r"http://[\d.]+:\d+")
BLOCK = re.compile(r"(?:^`([\w.]+)`:\n\n)?^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


class Section(NamedTuple):
    """A section that states its minutes, with the blocks (name of a file, language, text) in it."""

    title: str
    minutes: int
    blocks: list[tuple[str, str, str]]


def sections() -> list[Section]:
    """Return the sections of the page that state their minutes."""
    found = re.split(r"^## ", PAGE.read_text("utf-8"), flags=re.MULTILINE)[1:]
    titles = [re.match(r"(.*) \((\d+) min(?:ute)?s?\)\n", text) for text in found]
    return [
        Section(title[1], int(title[2]), BLOCK.findall(text))
        for title, text in zip(titles, found, strict=True)
        if title
    ]


def record(folder: Path, followed: Sequence[Section]) -> Iterator[str]:
    """Run the commands of sections in a folder, and yield the lines of the transcript."""
    shutil.copytree(SHOP, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.txt"))
    for section in followed:
        yield f"## {section.title}"
        servers: list[subprocess.Popen[str]] = []
        address = ""
        try:
            for name, language, text in section.blocks:
                if name:
                    (folder / name).write_text(text, encoding="utf-8")
                for line in text.splitlines() if language == "sh" else ():
                    began, used, command = time.monotonic(), _used(), shlex.split(line)
                    if command[0] == "compound":
                        command[:1] = [sys.executable, "-m", "compound"]
                    if command[0] == sys.executable and command[3] in SERVERS:
                        started = _start([*command, *SERVERS[command[3]]], folder)
                        servers.append(started)
                        assert started.stdout is not None
                        printed = next(filter(ADDRESS.search, started.stdout))
                        address = ADDRESS.findall(printed)[0]
                        printed = printed.replace(address, re.sub(r":\d+$", ":…", address))
                    else:
                        command = [ADDRESS.sub(address, word) for word in command]
                        printed = _run(command, folder)
                    yield f"$ {line}"
                    yield from printed.splitlines()
                    yield f"[{time.monotonic() - began:.0f} s, {_used() - used:.0f} s of a core]"
        finally:
            for server in servers:
                server.terminate()
                server.communicate()


def _used() -> float:
    """Return the processor seconds of the commands that have ended; servers run longer."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _start(command: list[str], folder: Path) -> subprocess.Popen[str]:
    out, both = subprocess.PIPE, subprocess.STDOUT
    return subprocess.Popen(
        command, cwd=folder, env=_environment(), stdout=out, stderr=both, text=True
    )


def _run(command: list[str], folder: Path) -> str:
    """Run a command; progress and notes, which go to stderr, are not recorded."""
    done = subprocess.run(
        command, cwd=folder, env=_environment(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}: {done.stdout}{done.stderr}")
    return done.stdout


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"}


def main() -> None:
    """Write the transcript."""
    with tempfile.TemporaryDirectory() as folder, open(sys.argv[1], "w", encoding="utf-8") as file:
        for line in record(Path(folder), sections()):
            print(line, file=file, flush=True)


if __name__ == "__main__":
    main()
