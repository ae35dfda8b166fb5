"""The record of candidates: one line for each configuration that was run, whatever method asked for it."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import compound as cp
from compound.api.verify import verify
from compound.core.errors import ExportError, RunDirectoryError, TransientError
from compound.core.storage.records import read_lines, to_line
from compound.optimization.runs.candidate_record import (
    CandidateRecord,
    front,
    read_candidates,
)
from compound.optimization.runs.recorder import Interrupted
from compound.report import summarize, terminal_summary
from compound.testing import ScriptedLM

FILE = "candidates.jsonl"
PRICE = 0.001  # dollars per word
HIDDEN = "Answer in metres."


def script(message: str, rng: np.random.Generator) -> str:
    """Write a longer instruction; or answer: few questions without the hidden phrase, most with it."""
    if "<prompt>" in message:
        return (
            message.partition("</prompt>")[0]
            .partition("<prompt>")[2]
            .join(["<prompt>", f" {HIDDEN}</prompt>"])
        )
    if "instruction" in message.lower():
        quoted = re.findall(r"```\n?(.*?)\n?```", message, re.DOTALL)
        return f"```\n{quoted[0] if quoted else 'Answer.'} {HIDDEN}\n```"
    number = int(re.findall(r"number (\d+)", message)[-1])
    return "right" if number % 10 < (8 if HIDDEN in message else 3) else "wrong"


def pad(question: str, style: str) -> str:
    return f"{question} {'word ' * 30 if style == 'long' else ''}"


def data() -> dict[str, list[dict[str, str]]]:
    sizes = {"train": 40, "valid": 20, "test": 10}
    return {
        split: [
            {"id": f"{split}{i}", "question": f"number {i}", "answer": "right"} for i in range(n)
        ]
        for split, n in sizes.items()
    }


class Overloaded(ScriptedLM):
    """A server that answers two of three requests."""

    async def generate(self, request: Any) -> Any:
        self.sent = getattr(self, "sent", 0) + 1
        if self.sent % 3 == 0:
            raise TransientError("overloaded", retry_after=0.0)
        return await super().generate(request)


def run(folder: Path, method: str, kind: type[ScriptedLM] = ScriptedLM, **more: Any) -> cp.Result:
    padded = cp.Function("pad", pad, style=cp.Choice("short", "long"))(
        question=cp.Input("question")
    )
    answered = cp.LLM("answerer", prompt=cp.Text("Answer."))(question=padded)
    system = cp.System("units", outputs={"answer": answered}, lm="lm")
    settings = {
        "method": method,
        "valid_size": 20,
        "minibatch": 4,
        "budget": {"system_runs": 150},
        **more,
    }
    lm = kind(script, price=PRICE, writes_prompts=True)
    return cp.optimize(
        system,
        data(),
        "exact_match",
        settings=settings,
        run_dir=folder,
        engines={"lm": lm},
        progress=False,
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> cp.Result:
    return run(tmp_path_factory.mktemp("found") / "run", "search")


@pytest.mark.usefixtures("without_reports")
@pytest.mark.parametrize("method", ["search", "random", "gepa"])
def test_every_method_records_each_configuration_once(method: str, tmp_path: Path) -> None:
    result = run(tmp_path / "run", method)
    candidates = result.candidates
    assert len({candidate.digest for candidate in candidates}) == len(candidates) > 1
    start, *others = candidates
    assert (start.fate, start.values, start.gain, start.source) == ("start", {}, 0, "")
    assert start.evaluations >= 20
    assert all(other.values and other.source and other.job is not None for other in others)
    (chosen,) = (candidate for candidate in candidates if candidate.chosen)
    assert chosen.digest == result.best.digest
    assert chosen.fate in ("supported", "promising", "start")
    assert {other.fate for other in others if not other.chosen} <= {
        "not proposed",
        "rejected",
        "proposed",
    }
    for each in candidates:
        assert each.low is not None
        assert each.high is not None
        assert each.low <= each.mean <= each.high
        assert each.usd == pytest.approx(PRICE * each.tokens)
        assert each.completion_tokens == 1
    assert verify(result.path) == []


def test_costs_are_those_of_runs_without_a_cache(found: cp.Result) -> None:
    """The start is run again by the decision and by the search, from the cache."""
    start = found.candidates[0]
    assert 4 <= start.prompt_tokens <= 8  # Answer. Question: number 1 Answer:
    longer = next(c for c in found.candidates if c.values == {"pad.style": "long"})
    assert longer.prompt_tokens == pytest.approx(start.prompt_tokens + 30)


@pytest.mark.usefixtures("without_reports")
def test_costs_are_those_of_runs_without_lost_requests(found: cp.Result, tmp_path: Path) -> None:
    """A lost request is charged at its maximum, which says nothing on the cost of a configuration."""
    result = run(tmp_path / "run", "search", Overloaded)
    assert summarize(tmp_path / "run")["spent"]["incidents"]["lost"] > 20
    for candidate in result.candidates:
        assert candidate.completion_tokens == 1
        assert candidate.prompt_tokens < 100
    request = summarize(tmp_path / "run")["requests"]["before"]
    assert request["completion_tokens"] == 1


def test_the_joint_search_names_sources_and_parents(found: cp.Result) -> None:
    known = {candidate.digest for candidate in found.candidates}
    sources = {candidate.source for candidate in found.candidates[1:]}
    assert sources & {"describe", "reflect", "describe + reflect"}
    assert {candidate.parent for candidate in found.candidates[1:]} <= known


@pytest.mark.usefixtures("without_reports")
def test_a_resumed_run_records_the_same_candidates(found: cp.Result, tmp_path: Path) -> None:
    path = tmp_path / "run"
    for step in range(40):
        try:
            if step < 39:
                path.mkdir(exist_ok=True)
                (path / "STOP").touch() if (path / "config.json").exists() else None
            result = run(path, "search")
            break
        except Interrupted:
            assert step < 39
            shutil.copytree(path, tmp_path / "killed", dirs_exist_ok=True)
    assert without_seconds(result.candidates) == without_seconds(found.candidates)


def without_seconds(candidates: list[CandidateRecord]) -> list[dict[str, Any]]:
    return [{k: v for k, v in vars(c).items() if k != "seconds"} for c in candidates]


def rewritten(path: Path, change: Any) -> None:
    """Change the records of a file, and seal them again."""
    with path.open("rb") as file:
        records = [line.value for line in read_lines(file)]
    lines, before = [], ""
    for record in change(records):
        line, before = to_line(record, before)
        lines.append(line)
    path.write_bytes(b"".join(lines))


def first_with(**values: Any) -> Any:
    return lambda records: [{**records[0], **values}, *records[1:]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda records: records[:-1], "lines"),
        (first_with(mean="high"), "not a candidate: mean"),
        (first_with(usd=float("nan")), "not a candidate: usd"),
        (first_with(fate="famous"), "not a candidate: fate"),
        (first_with(digest="0" * 64), "values differ"),
        (first_with(values={"other.prompt": "x"}), "values differ"),
    ],
)
def test_foreign_records_are_refused(
    found: cp.Result, tmp_path: Path, change: Any, message: str
) -> None:
    path = shutil.copytree(found.path, tmp_path / "run")
    rewritten(path / FILE, change)
    with pytest.raises(RunDirectoryError, match=message):
        read_candidates(path)
    assert any(message in problem for problem in verify(path))


def test_damaged_and_missing_files_are_refused(found: cp.Result, tmp_path: Path) -> None:
    path = shutil.copytree(found.path, tmp_path / "run")
    text = (path / FILE).read_bytes()
    (path / FILE).write_bytes(text.replace(b'"mean": ', b'"mean": 1', 1))
    with pytest.raises(RunDirectoryError, match="checksum"):
        read_candidates(path)
    (path / FILE).unlink()
    with pytest.raises(RunDirectoryError, match="is missing"):
        read_candidates(path)
    (path / FILE).symlink_to(found.path / FILE)
    with pytest.raises(RunDirectoryError):
        read_candidates(path)


def candidate(mean: float, usd: float | None, **more: Any) -> CandidateRecord:
    given: Mapping[str, Any] = {
        "digest": "",
        "values": {},
        "parent": "",
        "source": "",
        "job": 0,
        "fate": "not proposed",
        "chosen": False,
        "evaluations": 20,
        "mean": mean,
        "low": None,
        "high": None,
        "gain": mean - 0.5,
        "prompt_tokens": 10.0,
        "completion_tokens": 1.0,
        "usd": usd,
        "seconds": 0.0,
        **more,
    }
    return CandidateRecord(**given)


def test_the_front_by_hand() -> None:
    start, best, cheap = candidate(0.5, 2.0, fate="start"), candidate(0.9, 3.0), candidate(0.4, 1.0)
    dominated, lucky = candidate(0.5, 2.5), candidate(1.0, 0.5, evaluations=19)
    easy = candidate(
        0.95, 0.7, gain=-0.2
    )  # its examples are easy: the initial configuration scores more on them
    assert front([start, dominated, best, lucky, cheap, easy]) == [easy, cheap, start, best]


def test_without_all_prices_the_front_counts_tokens() -> None:
    small, large = candidate(0.5, None, prompt_tokens=5.0), candidate(0.6, 0.1, prompt_tokens=9.0)
    assert front([large, small]) == [small, large]


def test_a_longer_prompt_is_named_in_the_result_and_its_reports(found: cp.Result) -> None:
    before, after = found.candidates[0], next(c for c in found.candidates if c.chosen)
    assert after.prompt_tokens > 1.2 * before.prompt_tokens
    line = f"Input tokens per run: {before.prompt_tokens:,.0f} → {after.prompt_tokens:,.0f} (×"
    assert any(line in note for note in found.cost_notes)
    assert line in repr(found)
    for told in (terminal_summary(found.path), found.report):
        assert line not in told.replace("\\", "")  # once, with the other costs of a request
        assert "input tokens" in told
    assert re.search(
        r"per request:\n  input tokens: .*×.*\n(.*\n)*  cost: \$", terminal_summary(found.path)
    )
    facts = summarize(found.path)["candidates"]
    assert facts is not None
    assert facts["cost"] == "usd"
    assert Counter(row["chosen"] for row in facts["rows"])[True] == 1
    assert "## Candidates" in found.report


def test_the_optuna_study_holds_the_candidates(found: cp.Result, tmp_path: Path, cli: Any) -> None:
    optuna = pytest.importorskip("optuna")
    study = cp.interchange.to_optuna(found.path)
    assert [trial.value for trial in study.trials] == [c.mean for c in found.candidates]
    assert study.best_trial.value == max(c.mean for c in found.candidates)
    assert study.trials[0].params == {"answerer.prompt": "start", "pad.style": "short"}
    style = study.trials[0].distributions["pad.style"]
    assert style == optuna.distributions.CategoricalDistribution(["short", "long"])
    assert study.trials[1].user_attrs["values"] == dict(found.candidates[1].values)
    importances = optuna.importance.get_param_importances(study)
    assert set(importances) == {"answerer.prompt", "pad.style"}

    stored = f"sqlite:///{tmp_path / 'study.db'}"
    written = cli("export", str(found.path), "--to", "optuna", "--output", f"{tmp_path}/study.db")
    assert written.out.startswith(
        f"study {found.path.name!r} with {len(found.candidates)} trials: "
    )
    loaded = optuna.load_study(study_name=found.path.name, storage=stored)
    assert [trial.params for trial in loaded.trials] == [trial.params for trial in study.trials]
    with pytest.raises(ExportError, match="has a study"):
        cp.interchange.to_optuna(found.path, stored)
    missing = cli("export", str(found.path), "--to", "optuna")
    assert (missing.code, "--to optuna needs --output" in missing.err) == (2, True)
