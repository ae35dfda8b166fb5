"""Logs for Inspect are read by Inspect itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from inspect_ai.log import read_eval_log

from compound.core.errors import CompoundError
from compound.report.inspect_log import write_inspect


def test_every_example_is_a_sample_before_and_after(folder: Path, tmp_path: Path, cli: Any) -> None:
    logs = tmp_path / "logs"
    assert cli("export", str(folder / "one"), "--to", "inspect", "--output", str(logs)).code == 0
    for name in ("initial", "result"):
        log = read_eval_log(str(logs / f"{name}.eval"))
        assert log.status == "success"
        samples = log.samples or []
        assert {sample.id for sample in samples} == {f"e{i}" for i in range(60)}
        first = next(sample for sample in samples if sample.id == "e7")
        assert (first.input, first.target) == ("What is the number 7?", "7")
        assert len(first.messages) == 4  # a request and an answer of each of two calls
        assert first.messages[0].text.endswith("What is the number 7?")
        scores = [sample.scores["score"].value for sample in samples if sample.scores]
        assert log.results is not None
        assert log.results.scores[0].metrics["mean"].value == pytest.approx(sum(scores) / 60)


def test_a_link_is_not_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "initial.eval").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CompoundError):
        write_inspect(folder / "one", tmp_path / "logs")
    assert not (tmp_path / "elsewhere").exists()
