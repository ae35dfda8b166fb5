"""Damaged run directories: the right result, or an error that names the file; no traceback, nothing silent.

One small run is recorded whole, and copied as it is at a moment in the middle, as a kill would
leave it. Then every file of both is damaged in many ways, and the copies are read or continued.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from compound.api.optimize import run_optimization
from compound.api.result import Result, read_result
from compound.api.studio.runs import list_runs
from compound.api.verify import verify
from compound.components.function import Function
from compound.components.llm import LLM
from compound.core.errors import CompoundError
from compound.evaluation.dataset import Dataset
from compound.evaluation.metrics.built_in import exact_match
from compound.graph.component import Input
from compound.graph.configuration import load
from compound.graph.space import Choice, Demos, Text
from compound.graph.system import System
from compound.optimization.runs.directory import read_records
from compound.optimization.settings.base import BudgetSettings
from compound.optimization.settings.optimize import OptimizeSettings
from compound.report import summarize
from compound.testing import ScriptedLM
from optimas_settings import optimas
from run_files import without_checksums

APPENDED = ("events.jsonl", "traces.jsonl", "memory.jsonl")
Damage = Callable[[Path, random.Random], None]


def answered(message: str, rng: np.random.Generator) -> str:
    if "Repeat the answer." in message:
        return message.rsplit("Reply: ", 1)[-1].splitlines()[0]
    asked = message.rsplit("Question: ", 1)[-1].splitlines()[0].rsplit(maxsplit=1)[-1]
    chance = 0.25 + 0.35 * ("few words" in message) + 0.2 * (message.count("Question:") - 1)
    return asked if rng.random() < chance else "dunno"


def suffix(answer: str, end: str) -> str:
    return answer + end


def rows(n: int, kind: str) -> list[dict[str, str]]:
    return [{"question": f"what is {kind} {i}", "answer": f"{i}"} for i in range(n)]


def run(path: Path, listener: Callable[[Mapping[str, Any]], None] | None = None) -> Result:
    answer = LLM(
        "answerer", prompt=Text("Answer the question."), demos=Demos(max=2), temperature=1.0
    )
    checked = LLM("checker", prompt="Repeat the answer.")(reply=answer(question=Input("question")))
    ended = Function("suffix", suffix, end=Choice(" or so", "", "!"))(answer=checked)
    system = System("damaged", outputs={"answer": ended}, lm="lm")
    data = Dataset.of(train=rows(24, "tr"), valid=rows(12, "va"), test=rows(6, "te"))
    settings = OptimizeSettings(
        method="optimas",
        seed=1,
        minibatch=3,
        candidates=4,
        iterations=1,
        valid_size=None,
        alpha=0.2,
        budget=BudgetSettings(system_runs=240),
        optimas=optimas(model="none", min_rollouts=1, max_rollouts=2, level=1),
    )
    return run_optimization(
        system,
        data,
        exact_match("answer"),
        settings,
        run_dir=path,
        engines={"lm": ScriptedLM(answered)},
        listener=listener,
    )


@dataclass(frozen=True)
class Runs:
    """A finished run, the same run in the middle of its search, and what it leads to."""

    finished: Path
    killed: Path
    best: dict[str, Any]
    facts: dict[str, Any]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("corruption")
    seen: list[str] = []

    def copy(event: Mapping[str, Any]) -> None:
        if event["event"] == "call":
            return
        seen.append(event["event"])
        if event["event"] == "decision" and not (folder / "search").exists():
            shutil.copytree(folder / "run", folder / "search")

    run(folder / "run", copy)
    assert {"decision", "job"} <= set(seen)
    finished = folder / "run"
    assert all((finished / name).stat().st_size for name in APPENDED)
    assert (folder / "search" / "cache.sqlite-wal").stat().st_size
    return Runs(
        finished,
        folder / "search",
        json.loads((finished / "best.json").read_text()),
        shown(finished),
    )


def shown(path: Path) -> dict[str, Any]:
    """Return what a report says, without what is no part of the result."""
    facts: Any = summarize(path)
    for name in ("rewards", "training"):
        if "problem" in (facts.get(name) or {}):  # the rest of the report is written
            raise CompoundError(facts[name]["problem"])
    for name in ("run", "files"):
        del facts[name]
    return cast("dict[str, Any]", facts)


def flip(path: Path, draw: random.Random) -> None:
    raw = bytearray(path.read_bytes())
    raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
    path.write_bytes(raw)


def cut(path: Path, draw: random.Random) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[: draw.randrange(len(raw))])


def delete(path: Path, _: random.Random) -> None:
    path.unlink()


def zeros(path: Path, draw: random.Random) -> None:
    """A block that was never written, as after a power cut."""
    raw = bytearray(path.read_bytes())
    start = draw.randrange(len(raw))
    raw[start : start + 512] = bytes(len(raw[start : start + 512]))
    path.write_bytes(raw)


def changed(value: Any, draw: random.Random) -> Any:
    """Return JSON with one value of another type, or without one entry."""
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key, item in list(node.items() if isinstance(node, dict) else enumerate(node)):
            places.append((node, key))
            if isinstance(item, dict | list):
                walk(item)

    walk(value)
    if not places:
        return [value]
    node, key = draw.choice(places)
    others: list[Any] = [None, "text", -1, 1.5, [], {}, True, [[1]], {"a": 1}]
    if draw.random() < 0.3 and isinstance(node, dict):
        del node[key]
    else:
        node[key] = draw.choice([other for other in others if type(other) is not type(node[key])])
    return value


def retype(path: Path, draw: random.Random) -> None:
    """Change the JSON of a document, or of a line, and leave it valid JSON."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        lines = text.splitlines()
        at = draw.randrange(len(lines))
        lines[at] = json.dumps(changed(json.loads(lines[at]), draw), ensure_ascii=False)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    else:
        found = json.dumps(changed(json.loads(text), draw), indent=1, ensure_ascii=False)
        path.write_text(found + "\n", encoding="utf-8")


def swap(path: Path, draw: random.Random) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    if len(lines) > 1:
        a, b = draw.sample(range(len(lines)), 2)
        lines[a], lines[b] = lines[b], lines[a]
    path.write_bytes(b"".join(lines))


def drop(path: Path, draw: random.Random) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    del lines[draw.randrange(len(lines))]
    path.write_bytes(b"".join(lines))


def repeat(path: Path, draw: random.Random) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    lines.insert(draw.randrange(len(lines)), draw.choice(lines))
    path.write_bytes(b"".join(lines))


def row(statement: str) -> Damage:
    """Change one entry of a cache."""

    def damage(path: Path, draw: random.Random) -> None:
        with closing(sqlite3.connect(path)) as db, db:
            keys = sorted(key for (key,) in db.execute("SELECT key FROM outcome"))
            one, other = draw.sample(keys, 2)
            db.execute(statement, {"one": one, "other": other})

    damage.__name__ = statement.split(" WHERE", maxsplit=1)[0]
    return damage


def answer_flip(path: Path, draw: random.Random) -> None:
    """Flip one bit in a recorded answer, and nothing else."""
    with closing(sqlite3.connect(path)) as db, db:
        found = sorted(db.execute("SELECT key, value FROM outcome"))
        key, value = draw.choice(found)
        raw = bytearray(value.encode())
        raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(7)
        db.execute(
            "UPDATE outcome SET value = ? WHERE key = ?", (raw.decode(errors="replace"), key)
        )


ANY: tuple[Damage, ...] = (flip, flip, flip, cut, delete, zeros)
DOCUMENT: tuple[Damage, ...] = (*ANY, *[retype] * 8)
LINES: tuple[Damage, ...] = (*DOCUMENT, swap, drop, repeat)
ROWS: tuple[Damage, ...] = (
    *[answer_flip] * 6,
    row(
        "UPDATE outcome SET value = (SELECT value FROM outcome WHERE key = :other) WHERE key = :one"
    ),
    row("UPDATE outcome SET value = '[1]' WHERE key = :one"),
    row("UPDATE outcome SET value = 7 WHERE key = :one"),
    row("UPDATE outcome SET value = NULL WHERE key = :one"),
    row("UPDATE outcome SET value = '{}', checksum = NULL WHERE key = :one"),
    row("UPDATE outcome SET step = step + 1000 WHERE key = :one"),
    row("UPDATE outcome SET step = 'x' WHERE key = :one"),
    row("DELETE FROM outcome WHERE key = :one"),
)


def damages(path: Path) -> tuple[Damage, ...]:
    if path.suffix == ".jsonl":
        return LINES
    if path.suffix == ".json":
        return DOCUMENT
    return (*ANY, *ROWS) if path.name == "cache.sqlite" else ANY


@pytest.fixture
def step(request: pytest.FixtureRequest) -> int:
    """Every third damage is tried, and with --slow each of them."""
    return 1 if request.config.getoption("--slow") else 3


def damaged(source: Path, target: Path, step: int) -> Iterator[tuple[str, Path, Path, list[str]]]:
    """Yield copies of a run, one for each damage: what was done, the copy, the file, its names in messages."""
    tried = 0
    for file in sorted(
        p.relative_to(source) for p in source.rglob("*") if p.is_file() and p.stat().st_size
    ):
        for number, damage in enumerate(damages(file)):
            tried += 1
            if tried % step:
                continue
            draw = random.Random(f"{file} {number}")
            copy = target / f"{hashlib.sha256(str(file).encode()).hexdigest()[:8]}-{number}"
            shutil.copytree(source, copy)
            damage(copy / file, draw)
            if (
                not (copy / file).exists()
                or (copy / file).read_bytes() != (source / file).read_bytes()
            ):
                names = [file.name.removesuffix("-wal").removesuffix("-shm")]
                names += ["checkpoint.json"] if file.name in APPENDED else []
                yield f"{damage.__name__} {number} in {file}", copy, file, names
            shutil.rmtree(copy)


@pytest.mark.slow
def test_whatever_is_damaged_in_a_finished_run_it_reads_right_or_is_refused_by_name(
    runs: Runs, tmp_path: Path, step: int
) -> None:
    wrong = []
    for what, copy, file, names in damaged(runs.finished, tmp_path, step):
        for read, expected in (
            (shown, runs.facts),
            (lambda p: read_result(p).best.to_json(), runs.best["values"]),
        ):
            try:
                if read(copy) != expected:
                    wrong.append(f"{what}: another result")
            except CompoundError as error:
                if not any(name in str(error) for name in names):
                    wrong.append(f"{what}: the message names no file: {error}")
            except Exception as error:  # noqa: BLE001 - that is what is looked for
                wrong.append(f"{what}: {type(error).__name__}: {error}")
        if file.name == "best.json" and (copy / file).exists():
            try:
                found = load(copy / file)
                if found.to_json() != json.loads((runs.finished / file).read_text())["values"]:
                    wrong.append(f"{what}: another configuration")
            except CompoundError as error:
                if "best.json" not in str(error):
                    wrong.append(f"{what}: {error}")
    assert not wrong, "\n".join(wrong)


def continued(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Continue a run; return its best configuration, and what it says about damage."""
    run(path)
    notes = [
        event["note"]
        for event in read_records(path, "events.jsonl")
        if event["event"] == "note" and not event["note"].startswith("local rewards may make")
    ]
    return json.loads((path / "best.json").read_text()), notes


@pytest.mark.slow
def test_whatever_is_damaged_in_a_killed_run_it_ends_right_or_says_so(
    runs: Runs, tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compound.report.write", lambda _: None)
    wrong = []
    for what, copy, _, names in damaged(runs.killed, tmp_path, step):
        try:
            best, notes = continued(copy)
            if best != runs.best and not any("cache.sqlite" in note for note in notes):
                wrong.append(f"{what}: another result, and nothing is said")
        except CompoundError as error:
            if not any(name in str(error) for name in names):
                wrong.append(f"{what}: the message names no file: {error}")
        except Exception as error:  # noqa: BLE001 - that is what is looked for
            wrong.append(f"{what}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)


def test_a_run_without_checksums_is_read_and_continued(runs: Runs, tmp_path: Path) -> None:
    finished = without_checksums(Path(shutil.copytree(runs.finished, tmp_path / "finished")))
    assert (shown(finished), verify(finished)) == (runs.facts, [])
    killed = without_checksums(Path(shutil.copytree(runs.killed, tmp_path / "killed")))
    assert continued(killed) == (runs.best, [])
    assert (shown(killed)["test"], verify(killed)) == (runs.facts["test"], [])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["config.json", "checkpoint.json", *APPENDED])
def test_wrong_types_in_files_without_checksums_end_in_no_traceback(
    runs: Runs, tmp_path: Path, name: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checksums can be left out by whoever made the run directory; what it holds is checked all the same."""
    monkeypatch.setattr("compound.report.write", lambda _: None)
    plain = [
        without_checksums(Path(shutil.copytree(source, tmp_path / place)))
        for source, place in ((runs.finished, "finished"), (runs.killed, "killed"))
    ]
    wrong = []
    for number in range(0, 36, step):
        for source, use in zip(plain, (shown, continued), strict=True):
            if use is continued and number >= 12:
                continue
            copy = Path(shutil.copytree(source, tmp_path / "copy"))
            retype(copy / name, random.Random(number))
            try:
                list_runs(tmp_path)
                verify(copy)
                use(copy)
            except CompoundError as error:
                if str(copy) not in str(error):
                    wrong.append(f"{name} {number}: the message names no place: {error}")
            except Exception as error:  # noqa: BLE001 - that is what is looked for
                wrong.append(f"{name} {number}: {type(error).__name__}: {error}")
            shutil.rmtree(copy)
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_verify_names_what_is_damaged(runs: Runs, tmp_path: Path, step: int) -> None:
    assert verify(runs.finished) == []
    unnoticed = []
    harmless = ("lock", "report.md", "report.html", "system.yaml")
    for what, copy, file, names in damaged(runs.finished, tmp_path, step):
        found = verify(copy)
        if file.name not in harmless and not any(
            name in problem for problem in found for name in names
        ):
            unnoticed.append(f"{what}: {found}")
    meaningless = [w for w in unnoticed if re.match(r"flip \d+ in cache.sqlite:", w)]
    card = [what for what in unnoticed if re.match(r"delete \d+ in memory/rewards/card.json", what)]
    assert unnoticed == [*meaningless, *card], "\n".join(unnoticed)
    assert len(meaningless) <= 4  # bits of a database that no entry uses
