"""Candidates of a run as a study of Optuna, for its history, importances and fronts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compound.errors import ExportError
from compound.extras import explain_missing
from compound.graph.configuration import digest
from compound.runs.candidate_record import Candidate, read_candidates
from compound.runs.directory import inconsistency_errors, read_json
from compound.security.untrusted import UntrustedFolder
from compound.storage.artifacts import without_path

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.storages import BaseStorage

UNCHANGED = "start"  # label of an initial text


@explain_missing("the export to Optuna")
def to_optuna(run: str | Path, storage: str | BaseStorage | None = None) -> Study:
    """Return a study of Optuna with one trial for each candidate of a run, in the order of their first runs.

    The value of a trial is the mean score. Choices and numbers are parameters with the distributions of the
    system. Texts, demonstrations and other values are categorical: ``start``, or the start of a digest. The
    values, the costs per run, the fate and the rest of the record are user attributes of the trial.

    Args:
        run: the run directory.
        storage: a storage of Optuna, such as ``sqlite:///study.db``; default: in memory. The study gets the
            name of the run directory.

    Raises:
        ExportError: the run has no record of candidates, or the storage has a study of this name.
        RunDirectoryError: it is not a run directory, or is damaged.
    """
    import optuna

    candidates, config = read_candidates(run), read_json(run, "config.json")
    if not candidates:
        raise ExportError(f"{run} has no candidates", hint="runs of this version record them")
    start, name = config["start"], Path(run).resolve().name
    with inconsistency_errors(run):
        spaces = config["structure"]["parameters"]
        values = {key: [c.values.get(key, start[key]) for c in candidates] for key in start}
        columns = {key: _column(spaces.get(key, {}), own, start[key]) for key, own in values.items()}
    trials = [
        optuna.trial.create_trial(
            value=candidate.mean,
            params={key: own[number] for key, (_, own) in columns.items()},
            distributions={key: distribution for key, (distribution, _) in columns.items()},
            user_attrs=_attributes(candidate),
        )
        for number, candidate in enumerate(candidates)
    ]
    try:
        study = optuna.create_study(storage=storage, study_name=name, direction="maximize")
    except optuna.exceptions.DuplicatedStudyError:
        raise ExportError(f"{storage} has a study {name!r} already", hint="name another file") from None
    study.set_user_attr(UNCHANGED, start)
    study.add_trials(trials)
    return study


def write_study(run: Path, path: Path) -> str:
    """Write the study of a run to an SQLite file, and return a sentence about it.

    Raises:
        ExportError: it cannot be written.
    """
    folder = UntrustedFolder(path.parent, error=ExportError)
    if folder.kind(path.name) not in (None, "file"):
        raise ExportError(f"{path} is no file", hint="name a file in a folder that exists, no link")
    storage = f"sqlite:///{path}"
    try:
        study = to_optuna(run, storage)
    except ImportError:
        raise
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "sqlalchemy":
            raise
        raise ExportError(f"{path} cannot be written as a database: {error}") from None
    return f"study {study.study_name!r} with {len(study.trials)} trials: {storage}"


def _attributes(candidate: Candidate) -> dict[str, Any]:
    return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(candidate).items()}


def _column(
    space: Mapping[str, Any], values: Sequence[object], start: object
) -> tuple[BaseDistribution, list[Any]]:
    """Return the distribution of a parameter, and its value in each trial."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    match space:
        case {"kind": "choice", "options": options} if all(any(v == o for o in options) for v in values):
            return CategoricalDistribution(options), [*values]
        case {"kind": "int" | "float" as kind, "low": low, "high": high, "log": log}:
            make = IntDistribution if kind == "int" else FloatDistribution
            return make(low, high, log=log), [*values]
    labels = [_label(value, start) for value in values]
    return CategoricalDistribution([*dict.fromkeys(labels)]), labels


def _label(value: object, start: object) -> str:
    own = digest(without_path(value))
    return UNCHANGED if own == digest(without_path(start)) else own[:12]
