"""Run the whole harness and write its results: ``python -m chaos --out benchmarks/data/chaos.json``."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from chaos.corruption import damaged_runs
from chaos.disk import full_disks
from chaos.faults import faulty_runs
from chaos.kills import killed_runs
from chaos.launcher import Launcher
from chaos.server import Fault
from chaos.workloads import workloads

PARTS = ("kills", "faults", "damages", "disk")
LIMITS = (
    1_000,
    20_000,
    60_000,
    100_000,
    200_000,
)  # bytes of a file on the full disk; the smallest holds the message


def main() -> int:
    """Run the selected parts; return 1 as the exit code if there were problems, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--parts",
        nargs="*",
        choices=PARTS,
        default=PARTS,
        help="parts to run; others are kept in the file",
    )
    parser.add_argument("--kills", type=int, default=60, help="number of runs to kill")
    parser.add_argument(
        "--rates", type=float, nargs="*", default=[0.2, 0.4], help="shares of faulty requests"
    )
    parser.add_argument(
        "--damages", type=int, default=100, help="number of run directories to damage"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where to write the records as JSON")
    given = parser.parse_args()
    from benchmarks.simulated.toy_model import make_toy_model

    found: dict[str, list[dict[str, Any]]] = {}
    if given.out is not None and given.out.exists():
        earlier = json.loads(given.out.read_text(encoding="utf-8"))
        found = {
            part: earlier[part] for part in PARTS if part in earlier and part not in given.parts
        }
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as place, Launcher() as launcher:
        base = Path(place)
        model = make_toy_model(base / "model")
        everything = workloads()
        search = everything[0]
        parts: dict[str, Iterable[Any]] = {
            "kills": killed_runs(
                launcher, everything, given.kills, base / "kills", model, given.seed
            ),
            "faults": faulty_runs(
                launcher, search, tuple(Fault), given.rates, base / "faults", given.seed
            ),
            "damages": damaged_runs(launcher, search, given.damages, base / "damages", given.seed),
            "disk": full_disks(launcher, search, LIMITS, base / "disk"),
        }
        for name in given.parts:
            found[name] = [_shown(name, record) for record in parts[name]]
    wrong = sum(bool(record["problems"]) for records in found.values() for record in records)
    if given.out is not None:
        given.out.write_text(
            json.dumps({"seed": given.seed, **found}, indent=1) + "\n", encoding="utf-8"
        )
    counts = ", ".join(f"{len(records)} {name}" for name, records in found.items())
    print(f"{counts}: {wrong} with problems, {time.monotonic() - started:.0f} s")
    return 1 if wrong else 0


def _shown(part: str, record: Any) -> dict[str, Any]:
    facts = asdict(record)
    line = ", ".join(f"{key}={value}" for key, value in facts.items() if key != "problems")
    print(f"{part}: {line}", *facts["problems"], sep="\n  ! ", file=sys.stderr, flush=True)
    return facts


if __name__ == "__main__":
    sys.exit(main())
