"""Descriptions of runs: the resolved configuration that a run directory stores, and its changes."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from compound.core.errors import FRESH, RunDirectoryError
from compound.core.security.untrusted import UntrustedFolder
from compound.graph.configuration import digest, load, to_readable_json
from compound.graph.draw import as_document
from compound.graph.fingerprint import describe_code
from compound.graph.registry.code import find_code
from compound.optimization.method import Problem
from compound.optimization.preflight import engine_names, model_digests
from compound.optimization.runs import changes
from compound.optimization.runs.directory import RunDirectory, read_json
from compound.optimization.settings.base import Settings, references
from compound.optimization.settings.optimize import OptimizeSettings

FOR_MEMORY = (
    "optimize.*.optimizer.micro_tokens",
    "optimize.*.rollouts.max_length",
    "optimize.*.base.gradient_checkpointing",
    "optimize.*.reward.lora.gradient_checkpointing",
)  # settings that an out-of-memory error suggests lowering
PLACES = (
    "optimize.*.base.device",
    "optimize.*.base.attn_implementation",
    "optimize.*.backbone.device",
    "optimize.*.backbone.attn_implementation",
    *(f"optimize.*.learner.{how}" for how in ("processes", "machines", "address", "sharding")),
)  # settings that change results only by rounding
MAY_CHANGE = (
    *(
        f"optimize.{name}"
        for name in ("budget.", "concurrency", "max_failed", "trackers", "runner")
    ),
    "optimize.baselines",  # of earlier versions
    "versions.",
    *FOR_MEMORY,
    *PLACES,
)
VERSIONS = (
    "compound-systems",
    "torch",
    "transformers",
    "litellm",
    "optuna",
    "gepa",
    "bm25s",
    "numpy",
    "pydantic",
)


def describe(problem: Problem) -> dict[str, Any]:
    """Return the resolved configuration of a run, which must be equal for the run to be resumed."""
    splits = {"train": problem.train, "valid": problem.valid, "test": problem.test}
    return {
        "format": changes.FORMAT,
        "system": problem.system.name,
        "signature": problem.system.signature,
        "defaults": dict(problem.system.defaults),
        "settings": dict(problem.system.settings),
        "start": problem.system.configuration.to_json(),
        "graph": as_document(problem.system),
        "structure": changes.describe_structure(problem.system),
        "engines": engine_names(problem),
        "models": model_digests(problem),
        "data": {
            role: {
                "n": len(rows),
                "digest": digest(to_readable_json([[e.id, e.inputs, e.gold] for e in rows])),
            }
            for role, rows in splits.items()
        },
        "metric": describe_code(problem.metric),
        **({"start_from": problem.earlier.digest} if problem.earlier.digest else {}),
        "optimize": resolved_settings(problem),
        **_referenced_digests(problem.method.sections, problem.folder),
        "versions": library_versions(),
    }


def resolved_settings(problem: Problem) -> dict[str, Any]:
    """Return the common settings and those of the method, including defaults, as JSON."""
    common = {
        name: value for name, value in problem.settings if name not in problem.settings.sections
    }
    sections = {name: own.model_dump(mode="json") for name, own in problem.method.sections.items()}
    return {**OptimizeSettings.model_validate(common).model_dump(mode="json"), **sections}


def _referenced_digests(sections: Mapping[str, Settings], folder: Path) -> dict[str, Any]:
    """Return digests of the code and configuration files named in the method's settings."""
    found: dict[str, dict[str, Any]] = {}
    for section in sections.values():
        for each in references(section):
            if each.kind == "code" and each.name:
                found.setdefault("code", {})[each.name] = describe_code(
                    find_code(each.name, folder)
                )
            elif each.kind == "configuration" and each.name:
                path = folder / each.name
                digest_of = load(path).digest if path.exists() else None
                found.setdefault("configurations", {})[each.name] = digest_of
    return found


def library_versions() -> dict[str, str]:
    """Return the versions of Python and of libraries that can affect a result."""
    found = {"python": platform.python_version()}
    for name in VERSIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def open_run(path: Path, text: str, config: Mapping[str, Any]) -> RunDirectory:
    """Create a run directory, or open one with the same configuration.

    Raises:
        RunDirectoryError: the directory belongs to another configuration; the message names the
            keys.
    """
    if UntrustedFolder(path).kind("config.json") is None:
        return RunDirectory.create(path, text, config)
    keys = changes.list_changes(path, config, MAY_CHANGE)
    if keys:
        raise RunDirectoryError(
            f"{path} belongs to another configuration; changed: {'; '.join(keys)}",
            hint=FRESH,
        )
    run = RunDirectory.open(path)
    try:
        # models that the run did not use before, for example because its budget was smaller
        stored = read_json(run.path, "config.json")
        merged: dict[str, Any] = {
            part: {**config.get(part, {}), **stored[part]}
            for part in ("engines", "models")
            if part in stored
        }
        if any(merged[part] != stored[part] for part in merged):
            run.write_json("config.json", {**stored, **merged})
    except BaseException:
        run.close()
        raise
    return run


def stored_valid_size(path: Path) -> int | None:
    """Return the number of validation examples of the run in a directory; None if there is no run.

    A run with ``valid_size: auto`` keeps its validation examples if it is resumed with another
    budget.

    Raises:
        RunDirectoryError: the directory's configuration cannot be read.
    """
    if UntrustedFolder(path).kind("config.json") is None:
        return None
    match read_json(path, "config.json"):
        case {"data": {"valid": {"n": int(size)}}} if size > 0:
            return size
    return None
