"""Data sets of the Hugging Face hub: their files are downloaded and read like local data files.

The library `datasets` is not used: it would also read from the working directory, and from any
location and file type that a data set names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from compound.core.errors import CompoundError, DataError, MissingExtra
from compound.core.security.untrusted import UntrustedFolder
from compound.evaluation.rows import EXTENSIONS, DataFile, DataRow, choose_split, iterate_rows

HUB = "hf://datasets/"
"""Prefix of the path of a data set on the Hugging Face hub, even if a local path of that name exists."""
# An owner is required: a bare name may be a folder or a file format, with another meaning.
_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
# A split or subset name: no path separators, and no special characters of glob patterns.
_PART = re.compile(r"[^./\\*?\[\]][^/\\*?\[\]]*")
_EXPORT = "refs/convert/parquet"  # the hub's Parquet copy of public data sets, by subset and split
_HINT = (
    "check the path, or the id, subset and split on the hub; download data sets in other formats and pass "
    "their folder"
)


def hub_id(path: str) -> str | None:
    """Return the id of the hub data set that a path refers to, or None.

    >>> hub_id("owner/name"), hub_id("hf://datasets/owner/name"), hub_id("pandas"), hub_id("data/train.csv")
    ('owner/name', 'owner/name', None, None)
    """
    name = path.removeprefix(HUB)
    return name if _ID.fullmatch(name) and not name.endswith(EXTENSIONS) else None


def missing_path_error(path: str, given: str) -> DataError:
    """Return the error for a path that is neither a local path nor a hub id."""
    example = f"owner/{given}" if re.fullmatch(r"[\w-]+", given) else "owner/name"
    return DataError(
        f"no file or folder {path!r}",
        hint=f"path must be a local folder or file, or a hub id with its owner, such as {example!r}",
    )


def hub_rows(path: str, subset: str | None, splits: Sequence[str]) -> tuple[str, Sequence[DataRow]]:
    """Return the first available split of a hub data set, and its rows."""
    name, given = hub_id(path), path.removeprefix(HUB)
    if name is None:
        raise missing_path_error(given, given)
    missing = missing_path_error(given, given).message
    for part in (*splits, *([] if subset is None else [subset])):
        if not _PART.fullmatch(part):
            raise DataError(
                f"{name}: {part!r} is not a valid name of a split or a subset on the hub"
            )
    try:
        import huggingface_hub  # noqa: F401 - to report which one is missing
        import pyarrow as pa  # noqa: F401
    except ImportError as error:
        raise MissingExtra(
            f"{missing}; reading it as a hub data set", error.name or "pyarrow", "hub"
        ) from error
    what = f"{missing}, and the hub has no data set of that id with a split"
    try:
        files = _files(name, subset, splits)
        split = choose_split(splits, list(files), what)
        if split in files:
            return split, [row for file in files[split] for _, row in iterate_rows(file)]
    except CompoundError:
        raise
    except Exception as error:
        raise DataError(f"{what} {splits[0]!r}: {error}", hint=_HINT) from error
    raise DataError(
        f"{what} {splits[0]!r}: neither its Parquet copy has the split, nor is there a file {split}.jsonl, "
        ".csv, .json or .parquet",
        hint=_HINT,
    )


def _files(name: str, subset: str | None, splits: Sequence[str]) -> dict[str, list[DataFile]]:
    def copied(part: str) -> dict[str, list[DataFile]]:
        return _download(name, _EXPORT, {split: [f"{part}/{split}/*.parquet"] for split in splits})

    found = copied(subset or "default")
    if not found and subset is None and (part := _only_subset(name)) is not None:
        found = copied(part)
    folders = ("", "data/") if subset is None else (f"{subset}/", f"data/{subset}/")
    endings = ("-*-of-*.parquet", ".parquet", *(end for end in EXTENSIONS if end != ".parquet"))
    names = [f"{folder}{{}}{ending}" for folder in folders for ending in endings]
    return found or _download(name, None, {s: [n.format(s) for n in names] for s in splits})


def _download(
    name: str, revision: str | None, patterns: Mapping[str, Sequence[str]]
) -> dict[str, list[DataFile]]:
    """Return the files of each split; empty if the data set has no such revision."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError, RevisionNotFoundError

    wanted = [pattern for of_split in patterns.values() for pattern in of_split]
    try:
        given = snapshot_download(
            name, repo_type="dataset", revision=revision, allow_patterns=wanted
        )
    except (RevisionNotFoundError, LocalEntryNotFoundError):
        if revision is None:
            raise
        return {}
    folder, found = Path(given), {}
    for split, of_split in patterns.items():
        files = next((files for pattern in of_split if (files := sorted(folder.glob(pattern)))), [])
        if files:
            # entries of the cache, which is trusted, are links to their content
            kept = [(file.resolve(), file.relative_to(folder)) for file in files]
            found[split] = [
                DataFile(UntrustedFolder(f.parent, error=DataError), f.name, f"{HUB}{name}/{shown}")
                for f, shown in kept
            ]
    return found


def _only_subset(name: str) -> str | None:
    """Return the only subset of a data set, or None if the hub has no Parquet copy."""
    from httpx import HTTPError
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError, RevisionNotFoundError
    from huggingface_hub.hf_api import RepoFolder

    try:
        tree = HfApi().list_repo_tree(name, repo_type="dataset", revision=_EXPORT)
        parts = sorted(entry.path for entry in tree if isinstance(entry, RepoFolder))
    except RevisionNotFoundError:
        return None
    except (OSError, HTTPError):  # the hub is unreachable: use cached subsets
        try:
            folder = snapshot_download(
                name,
                repo_type="dataset",
                revision=_EXPORT,
                allow_patterns=["none"],
                local_files_only=True,
            )
        except LocalEntryNotFoundError:
            return None
        parts = sorted(path.name for path in Path(folder).iterdir() if path.is_dir())
    if len(parts) > 1:
        raise DataError(
            f"{name} on the hub has several subsets",
            hint=f"set subset to one of {', '.join(parts)}",
        )
    return parts[0] if parts else None
