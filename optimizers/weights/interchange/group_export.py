"""Samples of training steps as JSON lines, for trainers of other libraries.

With ``keep_samples``, every training step stores its samples with their credit in the run
directory; `export_groups` collects those of a run in one file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pydantic import BaseModel, ConfigDict, Json, ValidationError

from compound.core.errors import DeclarationError, RunDirectoryError
from compound.core.security.untrusted import UntrustedFolder
from compound.core.storage.artifacts import leads_outside, verify_reference
from compound.core.storage.state import first_problem
from compound.optimization.runs.directory import CONFIG, as_folder, read_json, read_records
from compound.optimization.runs.recorder import MEMORY, MEMORY_FOLDER
from compound.optimizers.weights.learner.samples import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILE = "samples.jsonl"  # in the folder of a step
FIELD = "stored_samples"  # of the record of a step: the reference of its folder


class SampleRow(BaseModel):
    """One sampled answer with its credit, as stored for a step.

    ``prompt`` and ``completion`` are the decoded tokens, special ones included; trainers should
    read ``prompt_ids`` and ``completion_ids``, since text may be tokenized differently. ``group``
    is the key of the samples of the step that were compared; an empty key belongs to no group.
    ``advantages`` has one number per token of the completion; it is empty for methods that imitate.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    component: str
    example: str
    group: Json[list[str | int]]
    rollout: int
    invocation: int
    prompt: str
    completion: str
    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    adapter: str
    reward: float
    advantages: list[float]
    weight: float


class SampleFolder(BaseModel):
    """The reference of a folder, relative to the folder of the run's memory."""

    model_config = ConfigDict(extra="forbid", strict=True)

    path: str
    sha256: str


class StoredStep(BaseModel):
    """The fields of a step's record that locate its samples.

    Attributes:
        seed: the seed of the job.
        step: the number of the step.
        stored_samples: the reference of the folder with its samples.
    """

    model_config = ConfigDict(strict=True)

    seed: int
    step: int
    stored_samples: SampleFolder


ModelT = TypeVar("ModelT", bound=BaseModel)


def write_samples(
    samples: Sequence[Sample], tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    """Write the samples of a step to a file in ``folder``."""
    rows = (_stored(sample, tokenizer) for sample in samples)
    (folder / FILE).write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")


def export_groups(run: str | Path, path: str | Path) -> int:
    """Write the samples of all training steps of a run to a file of JSON lines, and return their number.

    Each line is a `SampleRow` with the ``step`` and the seed of the ``job``. Its ``group`` is a
    JSON list that starts with both, so that groups of different steps differ. ``datasets`` reads
    the file with ``load_dataset("json", data_files=path)``.

    Args:
        run: the directory of a finished or unfinished run; for a baseline ``RUN/baselines/METHOD``.
            It may come from someone else: nothing outside of it is read.
        path: the file to write. An existing one is replaced once all samples are written.

    Raises:
        DeclarationError: the run kept no samples.
        RunDirectoryError: the folder is not a run directory, a record or a sample in it is
            malformed or refers outside of it, or ``path`` cannot be written.
        ConfigurationError: the samples of a step are missing or were changed.
    """
    folder, target, count = as_folder(run), Path(path), 0
    read_json(folder, CONFIG)
    steps = list(_steps(folder))
    if not steps:
        raise DeclarationError(
            f"{folder} holds no samples",
            hint="train with keep_samples: true in the section of the method",
        )
    with UntrustedFolder(target.parent).writer(target.name) as file:
        for step in steps:
            for row in _rows(folder, step):
                file.write((json.dumps(_exported(row, step)) + "\n").encode())
                count += 1
    return count


def _steps(folder: UntrustedFolder) -> Iterator[StoredStep]:
    """Yield the steps of a run that kept their samples."""
    for number, record in enumerate(read_records(folder, MEMORY), start=1):
        if FIELD not in record:
            continue
        where = f"{folder}/{MEMORY}:{number}"
        step = _parsed(StoredStep, record, where)
        if leads_outside(step.stored_samples.path):
            raise RunDirectoryError(
                f"{where}: {FIELD} refers to the folder {step.stored_samples.path!r}, which is outside of "
                "the run directory",
                hint="restore the file from its run",
            )
        yield step


def _rows(folder: UntrustedFolder, step: StoredStep) -> Iterator[SampleRow]:
    """Yield the samples of a step."""
    memory, reference = folder.below(MEMORY_FOLDER), step.stored_samples
    place = memory.below(reference.path)
    folder.kind(MEMORY_FOLDER)  # rejects a link, which the next line would follow
    verify_reference(reference.model_dump(), memory.path)
    for number, record in enumerate(read_records(place, FILE), start=1):
        yield _parsed(SampleRow, record, f"{place}/{FILE}:{number}")


def _parsed(kind: type[ModelT], record: Mapping[str, object], where: str) -> ModelT:
    """Return a record as a model, after validating it.

    Raises:
        RunDirectoryError: a field is missing, unknown, or of the wrong type.
    """
    try:
        return kind.model_validate(record)
    except ValidationError as error:
        raise RunDirectoryError(
            f"{where}: {first_problem(error)}", hint="restore the file from its run"
        ) from None


def _exported(row: SampleRow, step: StoredStep) -> dict[str, object]:
    """Return a row with its job and step, also in the key of its group."""
    job = str(step.seed)
    group = json.dumps([job, step.step, *row.group] if row.group else [])
    return {**row.model_dump(), "group": group, "step": step.step, "job": job}


def _stored(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a sample as a line of JSON, which `SampleRow` reads."""
    tokens = sample.tokens
    row = {
        "component": sample.component,
        "example": sample.example,
        "group": json.dumps(sample.group),
        "rollout": sample.rollout,
        "invocation": sample.invocation,
        "prompt": str(tokenizer.decode(tokens.prompt)),
        "completion": str(tokenizer.decode(tokens.sampled)),
        "prompt_ids": list(tokens.prompt),
        "completion_ids": list(tokens.sampled),
        "logprobs": list(tokens.logprobs),
        "finish_reason": tokens.finish_reason,
        "adapter": tokens.adapter,
        "reward": sample.reward,
        "advantages": list(sample.advantages),
        "weight": sample.weight,
    }
    return json.dumps(row, ensure_ascii=False)
