"""Damage one file of a run directory, and check the behaviour of the commands.

A command may succeed with the same configuration, or end with a message and a non-zero exit code.
It must never end with a traceback, or with another configuration without a notice: if recorded
calls are lost, they are repeated and count against the budget again, so that the run may decide
otherwise.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from chaos.launcher import Launcher
from chaos.observe import ending
from chaos.server import FaultyServer
from chaos.workloads import Workload, answer

OPTIMIZE = ("optimize", "system.yaml", "--run-dir", "run", "--quiet")
READERS = (
    ("runs", "report", "run"),
    ("runs", "list", "--dir", "."),
    ("runs", "verify", "--dir", "."),
    ("run", "system.yaml", "--config", "run/best.json", "question=what is test 3"),
)
LOST_CALLS = "recorded calls are missing"  # part of the notice
SKIPPED = ("report.md", "report.html", "lock")  # rewritten, never read


def flip_bit(data: bytes, draws: random.Random) -> bytes:
    at = draws.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << draws.randrange(8))]) + data[at + 1 :]


def truncate(data: bytes, draws: random.Random) -> bytes:
    return data[: draws.randrange(len(data))]


def swap_lines(data: bytes, draws: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    if len(lines) < 2:
        return b""
    a, b = draws.sample(range(len(lines)), 2)
    lines[a], lines[b] = lines[b], lines[a]
    return b"".join(lines)


def retype(data: bytes, draws: random.Random) -> bytes:
    """Replace a digit of JSON text by a list, a text, ``null``, or another number."""
    digits = [at for at, byte in enumerate(data) if chr(byte).isdigit()]
    if not digits:
        return flip_bit(data, draws)
    at = draws.choice(digits)
    return data[:at] + draws.choice([b"[]", b'"x"', b"null", b"-1", b"1e999"]) + data[at + 1 :]


def _delete(_data: bytes, _draws: random.Random) -> bytes:
    return b""


DAMAGES: Mapping[str, Callable[[bytes, random.Random], bytes]] = {
    "flip_bit": flip_bit,
    "truncate": truncate,
    "swap_lines": swap_lines,
    "retype": retype,
    "delete": _delete,
}


@dataclass(frozen=True)
class DamagedRun:
    """A command on a run directory with one damaged file; `problems` are violations."""

    state: str  # `finished` or `unfinished`
    file: str
    damage: str
    command: str
    code: int
    problems: tuple[str, ...]


def damaged_runs(
    launcher: Launcher, workload: Workload, count: int, folder: Path, seed: int
) -> Iterator[DamagedRun]:
    """Yield the outcome of each command for ``count`` damaged run directories."""
    draws = random.Random(seed)
    with FaultyServer(answer=answer) as server:
        finished, unfinished = folder / "finished", folder / "unfinished"
        workload.write(finished, server.url)
        attempt = launcher.run(OPTIMIZE, finished)
        assert attempt.code == 0, attempt.err
        workload.write(unfinished, server.url)
        launcher.run(OPTIMIZE, unfinished, strike=attempt.seconds * 0.6)
        expected = ending(finished / "run").best
        for number in range(count):
            state = ("unfinished", "finished")[number % 2]
            source, damaged = folder / state, folder / f"damaged-{number}"
            shutil.copytree(source, damaged)
            file, damage = _damage(damaged / "run", draws)
            commands = READERS if state == "finished" else (OPTIMIZE, *READERS[:3])
            for command in commands:
                ended = launcher.run(command, damaged)
                problems = []
                if ended.has_traceback or ended.code < 0:
                    problems.append(f"exit code {ended.code}: {ended.err[-600:]}")
                if ended.code and not (ended.err + ended.out).strip():
                    problems.append(f"exit code {ended.code} without a message")
                best = damaged / "run" / "best.json"
                finishes = command is OPTIMIZE and ended.code == 0
                lost = LOST_CALLS in ended.err
                if finishes and not best.exists():
                    problems.append("no configuration was written")
                elif finishes and not lost and ending(damaged / "run").best != expected:
                    problems.append("another configuration was found")
                name = " ".join(
                    part
                    for part in command
                    if part in {"optimize", "report", "list", "run", "verify"}
                )
                yield DamagedRun(state, file, damage, name, ended.code, tuple(problems))
            shutil.rmtree(damaged)


def _damage(run: Path, draws: random.Random) -> tuple[str, str]:
    files = sorted(
        path
        for path in run.rglob("*")
        if path.is_file() and path.name not in SKIPPED and path.stat().st_size
    )
    path, name = draws.choice(files), draws.choice(sorted(DAMAGES))
    if name == "delete":
        path.unlink()
    else:
        path.write_bytes(DAMAGES[name](path.read_bytes(), draws))
    return str(path.relative_to(run)), name
