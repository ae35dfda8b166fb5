"""Run directories that were changed by somebody else, or are in progress."""

from __future__ import annotations

import json
import platform
from pathlib import Path

from compound.core.storage.records import to_document, to_line


def change(run: Path, name: str, old: str, new: str) -> None:
    """Replace text in the values of a file of a run, as somebody who computes its checksums would."""
    text = (run / name).read_text()
    encoded = json.dumps(new)[1:-1]
    if name.endswith(".json"):
        document = json.loads(text.replace(old, encoded))
        document.pop("checksum")
        (run / name).write_text(to_document(document))
        return
    lines, checksum = [], ""
    for row in text.splitlines():
        record = json.loads(row.replace(old, encoded))
        record.pop("checksum")
        line, checksum = to_line(record, checksum)
        lines.append(line)
    (run / name).write_bytes(b"".join(lines))


def unfinished(run: Path, process: int) -> None:
    """Let a run look like one in progress, written by a process."""
    state = json.loads((run / "checkpoint.json").read_text())
    state.pop("checksum")
    state["state"]["done"] = False
    state["lengths"] = dict.fromkeys(state["lengths"], 0)  # files may be replaced by shorter ones
    (run / "checkpoint.json").write_text(json.dumps(state))
    (run / "lock").write_text(json.dumps({"host": platform.node(), "process": process}))
