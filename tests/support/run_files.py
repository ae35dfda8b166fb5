"""Run directories without checksums, which tests can edit; checksums are optional in the format."""

from __future__ import annotations

import json
from pathlib import Path

from compound.runs.directory import APPENDED, read_json, read_records


def without_checksums(path: Path) -> Path:
    """Rewrite a run's files, and those of its baselines, without checksums."""
    for folder in (path, *path.glob("baselines/*")):
        for name in APPENDED:
            if (folder / name).exists():
                lines = [json.dumps(record) + "\n" for record in read_records(folder, name)]
                (folder / name).write_text("".join(lines))
        for name in ("config.json", "checkpoint.json"):
            if (folder / name).exists():
                value = read_json(folder, name)
                if name == "checkpoint.json":
                    sizes = {n: (folder / n).stat().st_size if (folder / n).exists() else 0 for n in APPENDED}
                    kept = ("format", "step", "state")
                    value = {**{name: value[name] for name in kept}, "lengths": sizes}
                (folder / name).write_text(json.dumps(value, indent=1))
    return path
