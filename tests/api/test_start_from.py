"""Runs that start from an earlier one: its configurations are candidates, its rewards are used if they hold."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import compound as cp
from benchmarks.simulated.relays import Relay
from compound import Dataset, Example, System
from compound.api.optimize import run_optimization
from compound.core.errors import DataError, RunDirectoryError
from compound.metrics import custom
from compound.optimization.method import EarlierRun
from compound.optimization.settings.optimize import make_settings
from compound.optimizers.search.local_gains import LocalGains, RewardGuide
from compound.optimizers.search.sources import CandidateSources
from compound.rewards.buffer import read_earlier
from compound.rewards.gains import fit_critic
from optimas_settings import guided_search, learning, optimas
from run_files import without_checksums

pytestmark = pytest.mark.usefixtures("without_reports")

REWARDS = optimas(model="none")


def rows(world: Relay, n: int, split: str = "") -> list[dict[str, Any]]:
    examples = world.examples(n, split) if split else world.examples(n)
    return [{"id": example.id, **example.inputs, **example.gold} for example in examples]


def run(
    folder: Path,
    runs: int = 150,
    *,
    seed: int = 0,
    train: int = 80,
    start_from: Path | None = None,
) -> cp.Result:
    world = Relay(4, 1)
    settings = make_settings(
        {
            "method": "optimas",
            "seed": seed,
            "valid_size": 10,
            "optimas": REWARDS,
            "alpha": 0.3,
            "budget": {"system_runs": runs},
        }
    )
    data = Dataset.of(train=rows(world, train), valid=rows(world, 10, "valid"))
    return run_optimization(
        world.system(),
        data,
        custom(world.score, thread="never"),
        settings,
        run_dir=folder,
        start_from=start_from,
    )


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> cp.Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("compound.report.write", lambda _: None)
        return run(tmp_path_factory.mktemp("first") / "run", 300)


def test_a_run_starts_from_the_result_and_compares_the_declared_system(
    first: cp.Result, tmp_path: Path
) -> None:
    result = run(tmp_path / "run", 60, seed=3, start_from=first.path)
    declared = Relay(4, 1).system().configuration.to_json()
    start = json.loads((result.path / "config.json").read_text())["start"]
    assert start == dict(first.best) != declared
    lines = (result.path / "candidates.jsonl").read_text().splitlines()
    values = [{**start, **json.loads(line)["values"]} for line in lines]
    assert declared in values
    assert result.after.mean >= result.before.mean == first.after.mean


def test_its_configurations_are_the_first_candidates(first: cp.Result, job: Any) -> None:
    world = Relay(4, 1)
    found = read_earlier(first.path, world.system(), world.examples(80))
    assert found.result == dict(first.best)
    assert found.values[-1] == world.system().configuration.to_json()
    made = job(world.system(), world, world.examples(80), keys=("a.option",), share=60)
    context = replace(
        made.task.context, earlier=EarlierRun(values=[{"a.option": 6, "unknown.key": 1}])
    )
    made.task = replace(made.task, context=context)
    states, _ = made.run(guided_search(REWARDS, CandidateSources(())))
    assert states[0]["candidates"][0]["values"] == {"a.option": 6}


def test_its_draws_are_trusted_once_whole_runs_confirm_them(first: cp.Result, job: Any) -> None:
    world = Relay(4, 1)
    examples = world.examples(80)
    found = read_earlier(first.path, world.system(), examples)
    fitted: list[int] = []

    def fit(entries: Any, *given: Any, **how: Any) -> Any:
        fitted.append(len(entries))
        return fit_critic(entries, *given, **how)

    task = job(world.system(), world, examples, keys=("a.option",)).task
    task = replace(task, context=replace(task.context, earlier=found))
    guide = RewardGuide(learning(REWARDS), fit=fit)
    local = guide.prepare(task, task.train)
    assert isinstance(local, LocalGains)
    asyncio.run(local.learn([]))
    assert fitted == [len(found.draws)]
    assert len(found.draws) > 20
    assert local.trust == 0
    assert not list(task.context.memory.records())  # the draws stay with the earlier run


def test_another_earlier_run_is_a_change_of_the_run(first: cp.Result, tmp_path: Path) -> None:
    run(tmp_path / "run", 60, start_from=first.path)
    with pytest.raises(RunDirectoryError, match="start_from: "):
        run(tmp_path / "run", 60)


def test_rows_that_are_no_train_examples_here_are_left_out(first: cp.Result) -> None:
    """A reward must not know a row that may now be a validation or test row; names do not matter."""
    world = Relay(4, 1)
    few = [Example(f"new{i}", e.inputs, e.gold) for i, e in enumerate(world.examples(10))]
    found = read_earlier(first.path, world.system(), few)
    assert {draw.example for draw in found.draws} <= {example.id for example in few}
    assert (
        0
        < len(found.draws)
        < len(read_earlier(first.path, world.system(), world.examples(80)).draws)
    )
    assert "are left out" in found.told


def test_draws_of_another_component_are_left_out(first: cp.Result) -> None:
    """A component of the same name but with other ports, and values that the parameter does not have."""

    def other(text: str, option: int) -> str:
        return text

    node = cp.Function("a", other, option=cp.Choice(100, 200))(text=cp.Input("text", str))
    with pytest.raises(RunDirectoryError, match="has nothing that this run could start from"):
        read_earlier(first.path, System("other", outputs={"y": node}), Relay(4, 1).examples(80))


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for folder in ("folder", "nowhere"):
        with pytest.raises(RunDirectoryError, match="is not a run directory"):
            run(tmp_path / "run", start_from=tmp_path / folder)


@pytest.mark.parametrize(
    "damage",
    [
        lambda draw: draw.pop("candidates"),
        lambda draw: draw["candidates"][0].__setitem__(1, [1e999]),
        lambda draw: draw["candidates"][0].__setitem__(0, "text"),
        lambda draw: draw["candidates"].__setitem__(0, None),
    ],
)
def test_damaged_draws_are_named(damage: Any, first: cp.Result, tmp_path: Path) -> None:
    """Of a run directory of someone else, which has no checksums, nothing is taken for granted."""
    copy = Path(shutil.copytree(first.path, tmp_path / "copy"))
    without_checksums(copy)
    records = [json.loads(line) for line in (copy / "memory.jsonl").read_text().splitlines()]
    damage(next(record["draw"] for record in records if "draw" in record))
    (copy / "memory.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises((RunDirectoryError, DataError)):
        run(tmp_path / "run", start_from=copy)


def test_options_of_the_system_are_kept_whatever_the_rows_contain(tmp_path: Path) -> None:
    @cp.component
    def echo(question: str, note: str) -> str:
        return note

    note = cp.components.Hyperparameter("note", cp.Choice("Note 13", "No note", value="No note"))
    system = cp.System("qa", {"answer": echo(question=cp.Input("question"), note=note())})
    rows = [{"question": f"{i}", "source": f"Note {i}", "answer": "Note 13"} for i in range(40)]
    given = (system, {"train": rows[:20], "valid": rows[20:]}, "exact_match")
    first = cp.optimize(
        *given, budget=80, method="search", progress=False, run_dir=tmp_path / "first"
    )
    assert first.best["note.value"] == "Note 13"
    held_out = [Example("a", {"question": "a"}, {"source": "Note 13"})]
    assert read_earlier(first.path, system, [], held_out).result == {"note.value": "Note 13"}


def test_values_that_contain_held_out_rows_are_left_out(tmp_path: Path) -> None:
    """The second run divides the rows in another way: its validation rows were train rows."""
    answer = cp.LLM("answer", prompt=cp.Text("Answer."), demos=cp.Demos(max=3))
    system = cp.System("qa", {"answer": answer(question=cp.Input("question"))}, lm="m")
    rows = [{"question": f"Which city is {i}?", "answer": "Banjul"} for i in range(60)]

    def optimize(name: str, train: int, valid: int, **more: Any) -> cp.Result:
        return cp.optimize(
            system,
            {"train": rows[train : train + 20], "valid": rows[valid : valid + 20]},
            "exact_match",
            budget=100,
            method="search",
            search={"sources": ["demos"]},
            progress=False,
            engines={"m": cp.testing.ScriptedLM(lambda m: "Banjul" if "Banjul" in m else "no")},
            run_dir=tmp_path / name,
            **more,
        )

    first = optimize("first", 0, 20)
    assert first.best["answer.demos"]
    second = optimize("second", 20, 0, start_from=first.path)
    told = "0 draws of its local rewards; without answer.demos, which contains texts of validation"
    assert [note for note in second.notes if told in note], second.notes
    known = {f"Which city is {i}?" for i in range(20)}
    shown = json.dumps([candidate.values for candidate in second.candidates])
    assert not [question for question in known if question in shown]
    third = optimize("third", 0, 40, start_from=first.path)
    assert first.best.digest in {candidate.digest for candidate in third.candidates}
