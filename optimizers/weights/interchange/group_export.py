"""Samples of training steps as JSON lines, for trainers of other libraries.

With ``keep_samples``, every training step stores its samples with their credit in the run directory;
`export_groups` collects those of a run in one file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from compound.errors import DeclarationError
from compound.optimizers.weights.learner.samples import Sample
from compound.runs.directory import CONFIG, as_folder, read_json, read_records
from compound.runs.recorder import MEMORY, MEMORY_FOLDER
from compound.security.untrusted import UntrustedFolder
from compound.storage.artifacts import verify_reference

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILE = "samples.jsonl"  # in the folder of a step
FIELD = "stored_samples"  # of the record of a step: the reference of its folder


class SampleRow(TypedDict):
    """One sampled answer with its credit, as stored for a step.

    ``prompt`` and ``completion`` are the decoded tokens, special ones included; trainers should read
    ``prompt_ids`` and ``completion_ids``, since text may be tokenized differently. ``group`` is the key of
    the samples of the step that were compared, as a JSON list; an empty list belongs to no group.
    ``advantages`` has one number per token of the completion; it is empty for methods that imitate.
    """

    component: str
    example: str
    group: str
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


def write_samples(samples: Sequence[Sample], tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the samples of a step to a file in ``folder``."""
    rows = (json.dumps(_row(sample, tokenizer), ensure_ascii=False) for sample in samples)
    (folder / FILE).write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")


def export_groups(run: str | Path, path: str | Path) -> int:
    """Write the samples of all training steps of a run to a file of JSON lines, and return their number.

    Each line is a `SampleRow` with the ``step`` and the seed of the ``job``. Its ``group`` starts with both,
    so that groups of different steps differ. ``datasets`` reads the file with
    ``load_dataset("json", data_files=path)``.

    Args:
        run: the directory of a finished or unfinished run; for a baseline ``RUN/baselines/METHOD``.
        path: the file to write; an existing one is replaced.

    Raises:
        DeclarationError: the run kept no samples.
        RunDirectoryError: the folder is not a run directory.
        ConfigurationError: the samples of a step are missing or were changed.
    """
    folder, count = as_folder(run), 0
    read_json(folder, CONFIG)
    steps = [record for record in read_records(folder, MEMORY) if FIELD in record]
    if not steps:
        raise DeclarationError(
            f"{folder} holds no samples", hint="train with keep_samples: true in the section of the method"
        )
    with Path(path).open("w", encoding="utf-8") as file:
        for record in steps:
            for row in _stored_rows(folder, record):
                file.write(json.dumps(_with_origin(row, str(record["seed"]), record["step"])) + "\n")
                count += 1
    return count


def _stored_rows(folder: UntrustedFolder, record: dict[str, Any]) -> Iterator[SampleRow]:
    place = UntrustedFolder(verify_reference(record[FIELD], folder.path / MEMORY_FOLDER))
    with place.reader(FILE) as file:
        for line in file:
            yield json.loads(line)


def _with_origin(row: SampleRow, job: str, step: int) -> dict[str, Any]:
    """Return a row with its job and step, also in the key of its group."""
    group = json.loads(row["group"])
    return {**row, "group": json.dumps([job, step, *group] if group else []), "job": job, "step": step}


def _row(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> SampleRow:
    tokens = sample.tokens
    return SampleRow(
        component=sample.component,
        example=sample.example,
        group=json.dumps(sample.group),
        rollout=sample.rollout,
        invocation=sample.invocation,
        prompt=str(tokenizer.decode(tokens.prompt)),
        completion=str(tokenizer.decode(tokens.sampled)),
        prompt_ids=list(tokens.prompt),
        completion_ids=list(tokens.sampled),
        logprobs=list(tokens.logprobs),
        finish_reason=tokens.finish_reason,
        adapter=tokens.adapter,
        reward=sample.reward,
        advantages=list(sample.advantages),
        weight=sample.weight,
    )
