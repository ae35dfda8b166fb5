"""Export of samples from run directories, which may come from someone else."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from compound import CompoundError
from compound.core.errors import ConfigurationError, DeclarationError, RunDirectoryError
from compound.core.storage.artifacts import store_folder
from compound.optimization.runs.directory import RunDirectory
from compound.optimizers.weights.interchange import FILE, export_groups

ROW: dict[str, Any] = {
    "component": "answerer",
    "example": "1",
    "group": '["1", "answerer", 0]',
    "rollout": 0,
    "invocation": 0,
    "prompt": "a",
    "completion": "b",
    "prompt_ids": [5, 6],
    "completion_ids": [7],
    "logprobs": [-0.5],
    "finish_reason": "stop",
    "adapter": "",
    "reward": 1,
    "advantages": [0.5],
    "weight": 1.0,
}


def store(folder: Path, lines: Sequence[object]) -> dict[str, str]:
    text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    folder.mkdir(exist_ok=True, parents=True)
    return store_folder(lambda made: (made / FILE).write_text(text), folder, "samples")


def make_run(path: Path, *records: Mapping[str, object]) -> None:
    """Make a run directory unless there is one, and append records to its memory, which must be empty."""
    if not path.exists():
        RunDirectory.create(path, "", {"seed": 0}).close()
        (path / "memory").mkdir()
    run = RunDirectory.open(path)
    for record in records:
        run.append("memory.jsonl", record)
    run.close()


def exported(path: Path) -> list[dict[str, Any]]:
    export_groups(path, path.parent / "groups.jsonl")
    return [json.loads(line) for line in (path.parent / "groups.jsonl").read_text().splitlines()]


def test_groups_of_different_jobs_and_steps_have_different_keys(tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_run(run)
    both, alone = (store(run / "memory", rows) for rows in ([ROW, ROW], [{**ROW, "group": "[]"}]))
    steps = [{"seed": seed, "step": step} for seed in (7, 8) for step in (0, 1)]
    records = [
        *({**step, "stored_samples": both} for step in steps),
        {**steps[-1], "stored_samples": alone},
    ]
    make_run(run, {"kind": "other"}, *records)
    rows = exported(run)
    keys = [json.loads(row["group"]) for row in rows]
    assert keys[::2] == [[job, step, "1", "answerer", 0] for job in "78" for step in (0, 1)] + [[]]
    assert keys[0] == keys[1]
    assert [(row["job"], row["step"]) for row in rows[::2]] == [
        ("7", 0),
        ("7", 1),
        ("8", 0),
        ("8", 1),
        ("8", 1),
    ]
    assert rows[0] == {**ROW, "group": rows[0]["group"], "job": "7", "step": 0}


@pytest.mark.parametrize("how", ["absolute", "above", "link", "memory link"])
def test_samples_outside_of_the_run_are_not_read(how: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    reference = store(outside, [ROW])
    paths = {
        "absolute": str(outside / reference["path"]),
        "above": f"../../outside/{reference['path']}",
    }
    given = {**reference, "path": paths.get(how, reference["path"])}
    make_run(tmp_path / "run", {"kind": "other"}, {"seed": 7, "step": 0, "stored_samples": given})
    memory = tmp_path / "run" / "memory"
    if how == "link":
        (memory / reference["path"]).symlink_to(outside / reference["path"])
    elif how == "memory link":
        memory.rmdir()
        memory.symlink_to(outside)
    with pytest.raises(CompoundError) as raised:
        export_groups(tmp_path / "run", tmp_path / "groups.jsonl")
    assert ("symbolic link" if "link" in how else "memory.jsonl:2: stored_samples refers") in str(
        raised.value
    )
    assert not (tmp_path / "groups.jsonl").exists()


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"step": 0}, "seed: Field required"),
        ({"seed": 7}, "step: Field required"),
        ({"seed": 7, "step": "0"}, "step: "),
        ({"seed": 7, "step": 0, "stored_samples": "samples"}, "stored_samples: "),
        (
            {"seed": 7, "step": 0, "stored_samples": {"path": "samples"}},
            r"stored_samples\.sha256: ",
        ),
        (
            {"seed": 7, "step": 0, "stored_samples": {"path": "", "sha256": ""}},
            "outside of the run",
        ),
    ],
)
def test_malformed_records_are_named(
    record: dict[str, object], problem: str, tmp_path: Path
) -> None:
    reference = store(tmp_path / "elsewhere", [ROW])
    make_run(tmp_path / "run", {"kind": "other"}, {"stored_samples": reference, **record})
    with pytest.raises(RunDirectoryError, match=rf"memory\.jsonl:2: .*{problem}"):
        export_groups(tmp_path / "run", tmp_path / "groups.jsonl")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "not a JSON line"),
        ([ROW], "JSON object"),
        ({"group": "[]"}, "component: Field required"),
        ({**ROW, "group": "x"}, "group: Invalid JSON"),
        ({**ROW, "group": '{"a": 1}'}, "group: Input should be a valid list"),
        ({**ROW, "prompt_ids": "secret"}, "prompt_ids: Input should be a valid list"),
        ({**ROW, "more": 1}, "more: Extra inputs"),
    ],
)
def test_malformed_samples_are_named_and_lose_no_earlier_export(
    line: object, problem: str, tmp_path: Path
) -> None:
    make_run(tmp_path / "run")
    reference = store(tmp_path / "run" / "memory", [ROW, line])
    make_run(tmp_path / "run", {"seed": 7, "step": 0, "stored_samples": reference})
    target = tmp_path / "groups.jsonl"
    target.write_text("earlier")
    with pytest.raises(RunDirectoryError, match=rf"{FILE}:2: .*{problem}"):
        export_groups(tmp_path / "run", target)
    assert target.read_text() == "earlier"
    assert {path.name for path in tmp_path.iterdir()} == {"run", "groups.jsonl"}


def test_changed_samples_lose_no_earlier_export(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    with pytest.raises(DeclarationError, match="holds no samples"):
        export_groups(tmp_path / "run", tmp_path / "groups.jsonl")
    reference = store(tmp_path / "run" / "memory", [ROW])
    make_run(tmp_path / "run", {"seed": 7, "step": 0, "stored_samples": reference})
    assert len(exported(tmp_path / "run")) == 1
    with (tmp_path / "run" / "memory" / reference["path"] / FILE).open("a") as file:
        file.write(json.dumps(ROW) + "\n")
    with pytest.raises(ConfigurationError, match="was changed"):
        export_groups(tmp_path / "run", tmp_path / "groups.jsonl")
    assert len((tmp_path / "groups.jsonl").read_text().splitlines()) == 1
