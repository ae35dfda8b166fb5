"""Choices for each input: stored rewards, selectors that follow them, and the search that finds them."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pytest

import compound as cp
from compound import Executor, Port, Selector, System
from compound.core.errors import ConfigurationError
from compound.core.narrowing import entry
from compound.core.storage.artifacts import folder_digest
from compound.execution.rng import generator
from compound.ext import CallContext, Operation
from compound.graph.configuration import canonical_json
from compound.graph.space import PerInput
from compound.optimization.runs.directory import read_records
from compound.optimizers.optimas.local import LocalSearch
from compound.optimizers.search.sources import CandidateSources
from compound.rewards.alignment import Accuracy
from compound.rewards.features import FeatureMap, NoBackbone, Template
from compound.rewards.gains import GOLD
from compound.rewards.heads import Head
from compound.rewards.model import LocalReward, RewardModel, store_reward
from optimas_settings import guided_search, local_search, optimas

ROOT = Path(__file__).parents[2]
Tool = Literal["low", "middle", "high"]
TOOLS: tuple[Tool, ...] = get_args(Tool)
PAPER = optimas(model="none", inputs=60, form="paper")
REWARDS = optimas(model="none")

PARTS = '''
from compound.graph.configuration import canonical_json
from compound.graph.component import Operation
from compound.graph.types import Port
from typing import Literal

Tool = Literal["low", "middle", "high"]


class Worker(Operation):
    """Works with a tool; which one is right depends on what it works on."""

    cacheable = True
    version = "1"
    inputs = {"tool": Port(Tool), "x": Port(float)}
    outputs = {"done": Port(str)}

    def __init__(self, name):
        self.name = name

    async def run(self, inputs, values, call):
        return {"done": inputs["tool"]}
'''
SYSTEM = """
system: toolbox
inputs: {x: float}
components:
  tool: {selector: {options: [low, middle, high], per_input: true}, in: {x: $x}}
  worker: {class: "parts:Worker", in: {tool: $tool, x: $x}}
outputs: {done: $worker}
"""
SERVE = """
import json, sys
import compound as cp

system = cp.load_system(sys.argv[1]).bind(cp.load(sys.argv[2]))
print(json.dumps([cp.run(system, {"x": x}).outputs["done"] for x in json.loads(sys.argv[3])]))
"""


def right(x: float) -> Tool:
    """The tool for an input; where they meet is no round number."""
    return "low" if x < -0.6 else "high" if x > 0.6 else "middle"


def rows(n: int, split: str) -> list[dict[str, Any]]:
    drawn = generator("toolbox", split).normal(size=n) * 1.3
    return [{"x": float(x), "answer": right(float(x))} for x in drawn]


def data() -> cp.Dataset:
    return cp.Dataset.of(train=rows(120, "train"), valid=rows(50, "valid"), test=rows(100, "test"))


def score(outputs: Mapping[str, Any], example: cp.Example) -> float:
    return float(outputs["done"] == example.gold["answer"])


def optimized(system: Path | System, run: Path, **changes: Any) -> cp.Result:
    given = {
        "method": "optimas",
        "valid_size": None,
        "iterations": 3,
        "optimas": REWARDS,
        **changes,
    }
    loaded = system if isinstance(system, System) else cp.load_system(system)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "compound.report.write", lambda path: None
        )  # figures take longer than all the rest
        return cp.optimize(
            loaded,
            data(),
            cp.metrics.custom(score),
            run_dir=run,
            progress=False,
            budget=cp.Budget(system_runs=900),
            **given,
        )


def jobs(run: Path) -> list[dict[str, Any]]:
    return [event for event in read_records(run, "events.jsonl") if event["event"] == "job"]


def served(system: Path, best: Path, xs: list[float]) -> subprocess.CompletedProcess[str]:
    """Load a configuration in a process of its own, and run the system on some inputs."""
    return subprocess.run(
        [sys.executable, "-c", SERVE, str(system), str(best), json.dumps(xs)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'support'}"},
        check=False,
    )


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toolbox")
    (folder / "parts.py").write_text(PARTS)
    (folder / "system.yaml").write_text(SYSTEM)
    return folder / "system.yaml"


@pytest.fixture(scope="module")
def result(file: Path) -> cp.Result:
    return optimized(file, file.parent / "run")


@pytest.fixture(scope="module")
def paper(file: Path) -> cp.Result:
    return optimized(file, file.parent / "paper", optimas=PAPER)


def toolbox(*options: str, name: str = "tool", per_input: bool = True) -> System:
    return System(
        "alone", {"tool": Selector(name, *options, per_input=per_input)(x=cp.Input("x", float))}
    )


def linear(slopes: Mapping[str, float], name: str = "tool") -> RewardModel:
    """A reward by hand: an option is worth its slope times x."""
    selector = Selector(name, *slopes)
    template = Template.of(selector)
    readings = [template.read({"x": 1.0}, {"choice": option}) for option in slopes]
    features = FeatureMap.of(template, readings, 0)
    by_name = {f"choice={option}*x": slope for option, slope in slopes.items()}
    weights = np.array([by_name.get(column, 0.0) for column in features.columns])
    size = len(weights)
    head = Head(weights, np.zeros(size), np.ones(size))
    reward = LocalReward(features, head, 1.0, Accuracy(1.0, 1.0, 1.0, 9, 9), inputs=("x",))
    return RewardModel("none", NoBackbone(), {name: reward})


def stored(folder: Path, slopes: Mapping[str, float], name: str = "tool") -> dict[str, str]:
    reference = store_reward(linear(slopes, name), name, folder)
    return {**reference, "path": str(folder / reference["path"])}


def chosen(system: System, x: float, **executor: Any) -> Any:
    trace = asyncio.run(Executor(**executor).run(system, {"x": x}))
    assert trace.failure is None
    return trace.outputs["tool"]


class TestSpace:
    REFERENCE: Mapping[str, str] = {"path": "memory/tool-9f", "sha256": "9f"}

    def test_a_value_is_an_option_or_a_reference(self) -> None:
        space = PerInput("a", "b")
        assert not space.problem("a")
        assert not space.problem(self.REFERENCE)
        for wrong in (
            "c",
            {"path": "p"},
            {"path": "p", "sha256": 1},
            {**self.REFERENCE, "more": ""},
            None,
        ):
            assert "must be one of 'a', 'b' or a stored reward" in space.problem(wrong)
        assert space.type == Literal["a", "b"]

    def test_it_is_asked_for(self) -> None:
        plain, asked = toolbox("a", "b", per_input=False), toolbox("a", "b")
        with pytest.raises(ConfigurationError, match="must be one of 'a', 'b', but got"):
            plain.bind({"tool.choice": self.REFERENCE})
        assert (
            asked.bind({"tool.choice": self.REFERENCE}).configuration["tool.choice"]
            == self.REFERENCE
        )
        assert plain.signature != asked.signature

    def test_what_is_searched_are_the_options(self) -> None:
        space = PerInput("a", "b", value=self.REFERENCE)
        rng = np.random.default_rng(0)
        assert {space.draw(rng) for _ in range(50)} == {"a", "b"}

    def test_yaml_says_it(self, tmp_path: Path) -> None:
        text = (
            "system: s\ninputs: {x: str}\noutputs: {done: $tool}\ncomponents:\n"
            "  tool: {selector: {options: [a, b], per_input: true, value: {path: tool, sha256: ab}}, in: {x: $x}}\n"
        )
        (tmp_path / "s.yaml").write_text(text)
        found = cp.load_system(tmp_path / "s.yaml").configuration["tool.choice"]
        assert found == {"path": str(tmp_path / "tool"), "sha256": "ab"}


class TestChoosing:
    def test_each_input_gets_the_option_with_the_highest_reward(self, tmp_path: Path) -> None:
        system = toolbox(*TOOLS).bind(
            {"tool.choice": stored(tmp_path, {"low": -1.0, "middle": 0.0, "high": 1.0})}
        )
        assert [chosen(system, x) for x in (-2.0, 2.0)] == ["low", "high"]

    def test_of_equally_good_options_the_first_is_taken(self, tmp_path: Path) -> None:
        value = stored(tmp_path, {"low": 0.0, "middle": 1.0, "high": 1.0})
        assert chosen(toolbox(*TOOLS).bind({"tool.choice": value}), 1.0) == "middle"
        assert (
            chosen(toolbox("high", "middle", "low").bind({"tool.choice": value}), 1.0) == "high"
        )  # by declaration, not by the checkpoint

    def test_many_at_once_choose_as_they_would_alone(self, tmp_path: Path) -> None:
        system = toolbox(*TOOLS).bind(
            {"tool.choice": stored(tmp_path, {"low": -1.0, "middle": 0, "high": 1})}
        )
        xs = [row["x"] for row in rows(40, "many")]

        async def all_of_them() -> list[object]:
            executor = Executor()
            traces = await asyncio.gather(*(executor.run(system, {"x": x}) for x in xs))
            return [trace.outputs["tool"] for trace in traces]

        assert asyncio.run(all_of_them()) == [chosen(system, x) for x in xs]

    def test_a_relative_path_starts_where_the_executor_says(self, tmp_path: Path) -> None:
        reference = store_reward(linear({"low": -1.0, "high": 1.0}), "tool", tmp_path)
        assert not Path(reference["path"]).is_absolute()
        system = toolbox("low", "high").bind({"tool.choice": reference})
        assert chosen(system, 1.0, folder=tmp_path) == "high"
        with pytest.raises(ConfigurationError, match="does not exist"):
            chosen(system, 1.0, folder=tmp_path / "elsewhere")


def flip_last_bit(checkpoint: Path) -> None:
    heads = checkpoint / "heads.safetensors"
    content = bytearray(heads.read_bytes())
    content[-1] ^= 1
    heads.write_bytes(content)


class TestStored:
    SLOPES: Mapping[str, float] = {"low": -1.0, "high": 1.0}

    def system(self, value: Mapping[str, str], *options: str, name: str = "tool") -> System:
        return toolbox(*(options or ("low", "high")), name=name).bind({f"{name}.choice": value})

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (shutil.rmtree, r"needs the folder \S+, which does not exist"),
            (flip_last_bit, "was changed: its files have the digest"),
            (lambda made: (made / "more.py").write_text("raise SystemExit"), "was changed"),
        ],
        ids=["missing folder", "changed file", "further file"],
    )
    def test_a_changed_folder(self, tmp_path: Path, change: Any, message: str) -> None:
        value = stored(tmp_path, self.SLOPES)
        change(Path(value["path"]))
        with pytest.raises(ConfigurationError, match=message):
            chosen(self.system(value), 1.0)

    def test_another_components_reward(self, tmp_path: Path) -> None:
        value = stored(tmp_path, self.SLOPES, "router")
        with pytest.raises(
            ConfigurationError, match="no reward for component 'tool'.*possible: router"
        ):
            chosen(self.system(value), 1.0)

    def test_a_reward_for_other_options(self, tmp_path: Path) -> None:
        value = stored(tmp_path, self.SLOPES)
        with pytest.raises(
            ConfigurationError,
            match="may choose 'middle', but the reward was trained on 'low', 'high'",
        ):
            chosen(self.system(value, "low", "middle", "high"), 1.0)

    def test_another_systems_reward(self, tmp_path: Path) -> None:
        value = stored(tmp_path, self.SLOPES)
        selector = Selector("tool", *self.SLOPES, per_input=True)
        system = System("other", {"tool": selector(y=cp.Input("y", float))}).bind(
            {"tool.choice": value}
        )
        with pytest.raises(
            ConfigurationError, match="has the input 'y', but the reward was trained .*with 'x'"
        ):
            asyncio.run(Executor().run(system, {"y": 1.0}))


class TestFolders:
    """A folder counts by what it holds, not by where it lies."""

    def test_configurations_are_equal_wherever_the_folder_lies(self, tmp_path: Path) -> None:
        value = stored(tmp_path, {"low": 1.0})
        here = cp.Configuration({"tool.choice": value})
        there = here.replace({"tool.choice": {**value, "path": "elsewhere"}})
        other = here.replace({"tool.choice": {**value, "sha256": "9f"}})
        assert here == there
        assert not here.diff(there)
        assert here != other
        assert len(here.diff(other)) == 1

    def test_a_saved_configuration_brings_its_folders_along(self, tmp_path: Path) -> None:
        (tmp_path / "run").mkdir()
        value = stored(tmp_path / "run", {"low": -1.0, "high": 1.0})
        for name in ("deployed", "again"):
            (tmp_path / name).mkdir()
        cp.Configuration({"tool.choice": value}).save(tmp_path / "deployed" / "best.json")
        cp.load(tmp_path / "deployed" / "best.json").save(tmp_path / "again" / "best.json")
        shutil.rmtree(tmp_path / "run")
        shutil.rmtree(tmp_path / "deployed")
        shutil.move(tmp_path / "again", tmp_path / "moved")
        found = cp.load(tmp_path / "moved" / "best.json")
        assert entry(found, "tool.choice", dict)["sha256"] == value["sha256"]
        assert chosen(toolbox("low", "high").bind(found), 1.0) == "high"
        assert str(tmp_path) not in (tmp_path / "moved" / "best.json").read_text()

    def test_saving_without_the_folder_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="does not exist"):
            cp.Configuration({"a.b": {"path": "gone", "sha256": "9f"}}).save(tmp_path / "best.json")


class TestOptimas:
    """The right tool depends on the input: a number that the reward sees."""

    @pytest.mark.slow
    @pytest.mark.parametrize("form", ["result", "paper"])
    def test_it_reaches_the_optimum(self, form: str, request: pytest.FixtureRequest) -> None:
        result: cp.Result = request.getfixturevalue(form)
        assert set(entry(result.best, "tool.choice", dict)) == {"path", "sha256"}
        assert result.test_after is not None
        assert result.test_after.mean >= 0.95

    def test_the_stored_reward_reads_no_gold_answers(self, result: cp.Result) -> None:
        folder = Path(entry(entry(result.best, "tool.choice", dict), "path", str))
        card = (folder / "card.json").read_text(encoding="utf-8")
        assert "choice=low*x" in card
        assert GOLD not in card

    @pytest.mark.slow
    def test_a_fresh_process_chooses_the_same_wherever_the_run_lies(
        self, file: Path, result: cp.Result, tmp_path: Path
    ) -> None:
        xs = [row["x"] for row in rows(30, "serve")]
        mine = [
            cp.run(cp.load_system(file).bind(result.best), {"x": x}).outputs["done"] for x in xs
        ]
        moved = tmp_path / "moved"
        shutil.copytree(result.path, moved)
        for folder in (result.path, moved):
            done = served(file, folder / "best.json", xs)
            assert json.loads(done.stdout) == mine, done.stderr
        assert len(set(mine)) == 3

    def test_without_the_checkpoint_it_says_what_is_missing(
        self, file: Path, result: cp.Result, tmp_path: Path
    ) -> None:
        moved = tmp_path / "moved"
        shutil.copytree(result.path, moved)
        shutil.rmtree(moved / "memory")
        done = served(file, moved / "best.json", [0.0])
        assert done.returncode == 1
        assert "ConfigurationError: the configuration needs the folder" in done.stderr
        assert "keep it next to the configuration file" in done.stderr

    @pytest.mark.slow
    def test_another_run_starts_from_it_and_keeps_it(
        self, file: Path, result: cp.Result, tmp_path: Path
    ) -> None:
        """Whatever becomes of the first run; every method knows what to do with such a start."""
        few = optimas(PAPER, inputs=20)
        for method in ("llm_selector", "search", "optimas"):
            run = tmp_path / method
            system = cp.load_system(file).bind(cp.load(result.path / "best.json"))
            found = optimized(system, run, method=method, iterations=1, optimas=few)
            assert found.after.mean >= result.after.mean
            value = json.loads((run / "best.json").read_text())["values"]["tool.choice"]
            assert (run / value["path"]).is_dir()
            kept = cp.load_system(file).bind(cp.load(run / "best.json"))
            assert cp.run(kept, {"x": 2.0}).outputs["done"] == "high"


class TestLocalSearch:
    def job(self, job: Any, **more: Any) -> Any:
        selector = Selector("tool", *TOOLS, per_input=True)
        x = cp.Input("x", float)
        system = System("toolbox", {"done": Same()(tool=selector(x=x), x=x)})
        examples = [
            cp.Example(f"e{i}", {"x": row["x"]}, {"answer": row["answer"]})
            for i, row in enumerate(rows(80, "jobs"))
        ]
        return job(system, cp.metrics.custom(score), examples, keys=("tool.choice",), **more)

    def search(self, **changes: Any) -> LocalSearch:
        return local_search(optimas(PAPER, **changes), CandidateSources(("edits",)))

    def test_it_proposes_the_reward_of_the_moment(self, job: Any) -> None:
        made = self.job(job)
        _, proposal = made.run(self.search())
        reference = proposal.values["tool.choice"]
        assert (
            folder_digest(made.task.context.memory.folder / reference["path"])
            == reference["sha256"]
        )
        assert (
            proposal.before is None
        )  # no candidate is scored by the global reward before the decision


def test_the_joint_search_scores_it_on_examples_that_it_was_not_fitted_to(job: Any) -> None:
    """Otherwise it would displace the best single option by what it knows of these examples."""
    made = TestLocalSearch().job(job)
    states, proposal = made.run(guided_search(REWARDS, CandidateSources(())))
    assert isinstance(proposal.values["tool.choice"], dict)
    scored = [
        each for each in states[-1]["candidates"] if isinstance(each["values"]["tool.choice"], dict)
    ]
    fitted = states[-1]["fitted"]
    assert any(each["rows"] for each in scored)
    for each in scored:
        assert not {*each["rows"]} & {*fitted[canonical_json(each["values"]["tool.choice"])]}


class Same(Operation):
    name, kind, cacheable, version = "worker", "worker", True, "1"
    inputs: Mapping[str, Port] = {"tool": Port(Tool), "x": Port(float)}
    outputs = {"done": Port(str)}  # noqa: RUF012

    async def run(
        self, inputs: Mapping[str, Any], values: Mapping[str, Any], call: CallContext
    ) -> Any:
        return {"done": inputs["tool"]}
