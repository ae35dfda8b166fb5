"""Verify the integrity of a run directory: its files and their consistency; copy it to a store."""

from __future__ import annotations

import secrets
import shutil
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path

from compound.core.errors import CompoundError, RunDirectoryError
from compound.core.security.limits import ARTIFACT, LINE
from compound.core.security.trust import is_store
from compound.core.security.untrusted import CHUNK, TEMPORARY, UntrustedFolder, os_errors_as
from compound.core.storage.artifacts import references_in, verify_reference
from compound.core.storage.locking import FILE as LOCK
from compound.core.storage.records import Damaged, parse
from compound.core.storage.stores import StoreFolder
from compound.execution.cache import (
    WAIT,
    check_files,
    check_schema,
    limit_steps,
    read_row,
    restrict,
)
from compound.execution.results import check_row
from compound.graph.configuration import Configuration, load
from compound.optimization.runs.candidate_record import read_candidates
from compound.optimization.runs.directory import (
    APPENDED,
    CONFIG,
    PILOT,
    inconsistency_errors,
    last_checksum,
    load_checkpoint,
    read_json,
    read_records,
)
from compound.optimization.runs.recorder import CACHE, MEMORY_FOLDER
from compound.optimization.runs.state import Checkpoint
from compound.report.trackers.tracking import FILE as TRACKERS
from compound.rewards.model import read as read_rewards

SHOWN = 5  # maximum number of damaged cache entries to report
BEST = "best.json"
REWARDS = f"{MEMORY_FOLDER}/rewards"


def verify(path: str | Path) -> list[str]:
    """Return the problems of a run directory; empty if there are none.

    Nothing is modified. Files of earlier versions have no checksums, so only their format is
    checked.

    Example:
        >>> import tempfile
        >>> from compound.optimization.runs.directory import RunDirectory
        >>> run = RunDirectory.create(tempfile.mkdtemp() + "/run", "", {"seed": 0})
        >>> run.close()
        >>> verify(run.path)
        []
    """
    folder = UntrustedFolder(path)
    problems: list[str] = []

    def attempt(check: Callable[[], object]) -> None:
        try:
            with inconsistency_errors(folder):
                check()
        except CompoundError as error:
            if error.message not in problems:
                problems.append(error.message)

    attempt(folder.check)
    if problems:  # nothing in it can be opened safely
        return problems
    attempt(lambda: read_json(folder, CONFIG))
    attempt(lambda: load_checkpoint(folder))
    stored = None if problems else load_checkpoint(folder)
    for name in APPENDED:
        attempt(lambda name=name: _check_records(folder, name, stored))  # type: ignore[misc]
    if stored is not None:
        attempt(lambda: _check_artifacts(folder, stored))
    if stored is not None:
        attempt(lambda: _check_best(folder, stored))
    attempt(lambda: problems.extend(_cache_problems(folder, stored)))
    if folder.kind(PILOT) == "folder":
        attempt(lambda: problems.extend(_cache_problems(folder.below(PILOT), None)))
    attempt(lambda: _check_rewards(folder))
    attempt(lambda: read_candidates(folder))
    if folder.kind(TRACKERS) is not None:
        attempt(lambda: read_json(folder, TRACKERS))
    return problems


def copy_run(source: str | Path, target: str | Path) -> int:
    """Copy a finished run to a store, or from there to this machine; return the number of files.

    The run is verified on this machine. Its configuration, which makes it a run, is written last.

    Raises:
        RunDirectoryError: the run is unfinished or damaged, or the target is in use.
        DeclarationError: neither is an address in a store.
    """
    if is_store(target):
        return _upload(UntrustedFolder(source), StoreFolder(target, RunDirectoryError))
    return _download(StoreFolder(source, RunDirectoryError), UntrustedFolder(target))


def _upload(run: UntrustedFolder, store: StoreFolder) -> int:
    read_json(run, CONFIG)
    stored = load_checkpoint(run)
    if stored is None or not stored.state.done:
        raise RunDirectoryError(
            f"{run} is not finished, and a store has no locks for a run in progress",
            hint="run the command that started it again, which finishes it, and copy it then",
        )
    _check_undamaged(run, run)
    names = {"/".join(parts) for parts in run.files() if parts != (LOCK,)}
    present = set(store.files())  # without a configuration, those of an interrupted copy
    if CONFIG in present or present - names:
        raise RunDirectoryError(f"{store} holds other files", hint="name an address without files")
    return _copy_files(run, store, names)


def _download(store: StoreFolder, target: UntrustedFolder) -> int:
    sizes = store.files()
    if CONFIG not in sizes:
        raise RunDirectoryError(f"{store} is not a run directory: it has no {CONFIG}")
    if sum(sizes.values()) > ARTIFACT.bytes:
        raise RunDirectoryError(f"{store} holds more than {ARTIFACT}", hint=ARTIFACT.hint)
    if target.names():
        raise RunDirectoryError(f"{target} is not empty", hint="name a new folder")
    if target.path.name in ("", ".."):  # the copy would replace the folder that it is made in
        raise RunDirectoryError(f"{target} is not the name of a folder", hint="name a new folder")
    part = target.path.with_name(f".{target.path.name}.{secrets.token_hex(4)}{TEMPORARY}")
    try:
        copied = _copy_files(store, UntrustedFolder(part).make(), sizes)
        _check_undamaged(UntrustedFolder(part), store)
        with os_errors_as(target):
            part.rename(target.path)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return copied


def _copy_files(
    source: UntrustedFolder | StoreFolder,
    target: UntrustedFolder | StoreFolder,
    names: Iterable[str],
) -> int:
    ordered = sorted(names, key=CONFIG.__eq__)
    for name in ordered:
        if isinstance(target, UntrustedFolder) and "/" in name:
            target.below(name.rpartition("/")[0]).make()
        with source.reader(name) as read, target.writer(name) as written:
            shutil.copyfileobj(read, written, CHUNK)
    return len(ordered)


def _check_undamaged(folder: UntrustedFolder, shown: object) -> None:
    if problems := verify(folder.path):
        problem = problems[0].replace(str(folder), str(shown))
        raise RunDirectoryError(f"the run is damaged, and is not copied: {problem}")


def _check_records(folder: UntrustedFolder, name: str, stored: Checkpoint | None) -> None:
    if stored is not None:
        last = last_checksum(folder, name, stored.lengths[name])
        if stored.checksums.get(name, last) != last:
            raise CompoundError(
                f"{folder}/{name} was changed: its last record does not match the checkpoint"
            )
    for _ in read_records(folder, name):
        pass


def _check_artifacts(folder: UntrustedFolder, stored: Checkpoint) -> None:
    """Verify the folders referenced by the best configuration, and those of the job in progress."""
    search = stored.state.search
    job = None if stored.state.done or search is None else search.job
    for value in references_in([stored.state.best, job and job.progress]):
        verify_reference(value, folder.path / MEMORY_FOLDER, reread=True)


def _check_best(folder: UntrustedFolder, stored: Checkpoint) -> None:
    """Compare ``best.json``, which a finished run must have, with the rest of the run."""
    if folder.kind(BEST) is None:
        if stored.state.done:
            raise CompoundError(f"{folder}/{BEST} is missing")
        return
    found, config = load(folder.path / BEST), read_json(folder, CONFIG)
    if stored.state.done and found.digest != Configuration(stored.state.best or {}).digest:
        raise CompoundError(f"{folder}/{BEST} does not hold the best configuration of the run")
    document = parse(folder.read(BEST))
    for name in ("system", "signature"):
        actual = document.get(name) if isinstance(document, dict) else None
        if actual != config.get(name):
            raise CompoundError(f"{folder}/{BEST} has {name} {actual!r:.80}, unlike the run")


def _check_rewards(folder: UntrustedFolder) -> None:
    if folder.kind(f"{REWARDS}/card.json") is not None:
        read_rewards(folder.path / REWARDS)


def _cache_problems(folder: UntrustedFolder, stored: Checkpoint | None) -> list[str]:
    """Return the problems of a cache, which is opened read-only."""
    unfinished = check_files(folder, CACHE)  # SQLite ignores the journal of a read-only database
    path = folder.place(CACHE)
    if folder.kind(CACHE) is None:
        return [f"{path} is missing"] if stored is not None and stored.cached else []
    problems: list[str] = []
    shown: list[str] = []
    covered = damaged = 0
    try:
        for step, problem in () if unfinished else _entries(folder, path, problems):
            if problem:
                damaged += 1
                shown += [problem] * (
                    damaged <= SHOWN
                )  # the number is unbounded, so only some are reported
            else:
                covered += stored is not None and step < stored.step
    except sqlite3.DataError:
        return [
            *problems,
            f"{path}: a recorded call is larger than {LINE}; to check it and later ones, set "
            f"{LINE.variable} to a larger number of mebibytes",
        ]
    except sqlite3.Error as error:
        return [f"{path} is not a usable cache: {error}"]
    if damaged > SHOWN:
        shown.append(f"{path}: {damaged - SHOWN} more recorded calls are damaged")
    lost = stored.cached - covered - damaged if stored is not None else 0
    if lost > 0:
        problems.append(
            f"{path}: {lost} of {stored.cached if stored else 0} recorded calls are missing"
        )
    return problems + shown


def _entries(folder: UntrustedFolder, path: Path, problems: list[str]) -> Iterator[tuple[int, str]]:
    """Yield the step and the problem of each entry of a cache; collect other problems."""
    has_no_log = not folder.size(f"{CACHE}-wal")  # SQLite then needs to write nothing
    address = f"{path.absolute().as_uri()}?{'immutable=1' if has_no_log else 'mode=ro'}"
    with closing(sqlite3.connect(address, uri=True, timeout=WAIT)) as db, limit_steps(db, path):
        restrict(db)
        if not check_schema(db, path):
            return
        found = [text for (text,) in db.execute("PRAGMA quick_check")]
        problems += [f"{path}: {text}" for text in found if text != "ok"]
        for key, step, *row in db.execute("SELECT key, step, value, checksum FROM outcome"):
            try:
                check_row(read_row(key, step, *row))
            except Damaged as error:
                yield 0, f"{path}: the recorded call {str(key)[:16]}… is damaged ({error})"
            else:
                yield step, ""
