"""The setting `optimize.runner`: equal results from commands and Python, and refusals before anything is spent."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import compound as cp
from clusters.program import FILE, requests, write_program
from clusters.transports import LocalTransport
from compound.api import runners
from compound.api.check import check_program
from compound.api.estimate import estimate
from compound.api.optimize import run_optimization
from compound.core.errors import CompoundError, DeclarationError, MissingExtra, SpecError
from compound.optimization.settings.base import RaySettings, RunnerSettings
from compound.optimization.settings.optimize import OptimizeSettings
from compound.testing import ScriptedLM
from compound.yaml.program import load, loads

pytestmark = pytest.mark.usefixtures("without_reports")

TEXT = (
    FILE
    + """
data: {path: data, train: train, valid: valid, test: test}
metric: {custom: {call: "parts:score", bounds: [0, 1]}}
optimize:
  method: random
  iterations: 2
  candidates: 3
  minibatch: 4
  valid_size: 6
  concurrency: 6
  budget: {system_runs: 60}
"""
).replace(
    "temperature: 1.0}, in: {text", "temperature: {float: [0.5, 1.5], value: 1.0}}, in: {text"
)
RUNNER = ("optimize.runner", "{ray: {workers: 3, address: 'nowhere:1'}}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_program(tmp_path, TEXT)
    for split, start in (("train", 0), ("valid", 20), ("test", 40)):
        rows = [
            {"id": f"e{i}", "topic": f"topic {i}", "kind": f"kind {i % 4}", "answer": ""}
            for i in range(start, start + 12)
        ]
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / f"{split}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    return tmp_path


@pytest.fixture
def transports(monkeypatch: pytest.MonkeyPatch) -> list[LocalTransport]:
    """Transports that take the place of Ray's; the first worker of each is killed."""
    made: list[LocalTransport] = []

    def local(address: str, cpus: float) -> LocalTransport:
        assert (address, cpus) == ("nowhere:1", 1.0)
        made.append(LocalTransport([(4, False)]))
        return made[-1]

    monkeypatch.setattr(runners, "RayTransport", local)
    return made


def test_evaluate_gives_equal_results(folder: Path, transports: list[LocalTransport]) -> None:
    program = load(folder / "system.yaml")
    assert program.data is not None
    assert program.metric is not None
    expected = cp.evaluate(
        program.system, program.data, program.metric, cache=False, engines=program.find_engine
    )
    remote = load(folder / "system.yaml", overrides=[RUNNER])
    found = cp.evaluate(
        remote.system, program.data, program.metric, cache=False, settings=remote.optimize
    )
    assert found.rows == expected.rows
    assert len(transports[0].workers) == 4  # three, and one that replaced the lost one


@pytest.mark.slow
@pytest.mark.parametrize("method", ["random", "search", "optimas"])
def test_methods_make_the_same_decisions_on_workers(
    folder: Path, tmp_path: Path, method: str, transports: list[LocalTransport]
) -> None:
    def optimized(name: str, *overrides: tuple[str, str]) -> tuple[object, ...]:
        program = load(folder / "system.yaml", overrides=[("optimize.method", method), *overrides])
        assert program.data is not None
        assert program.metric is not None
        result = run_optimization(
            program.system,
            program.data,
            program.metric,
            program.optimize,
            run_dir=tmp_path / name,
            engines=program.find_engine,
            folder=program.folder,
            text=program.text,
        )
        events = [
            json.loads(line) for line in (tmp_path / name / "events.jsonl").read_text().splitlines()
        ]
        kept = [
            {k: v for k, v in each.items() if k not in ("at", "checksum", "spent")}
            for each in events
        ]
        return (
            result.best.to_json(),
            result.accepted,
            [each for each in kept if each["event"] in ("job", "decision")],
        )

    here = optimized("here")
    there = optimized("there", RUNNER)
    assert there == here
    assert transports


def test_ray_that_is_not_installed_is_reported_before_anything_is_spent(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    settings = OptimizeSettings(runner=RunnerSettings(ray=RaySettings()))
    program = load(folder / "system.yaml")
    with pytest.raises(MissingExtra, match="optimize.runner.ray needs ray"):
        runners.executor_opener(settings, program.system, program.find_engine)
    assert requests(folder) == 0


def refused(system: cp.System, engines: object, **settings: object) -> CompoundError:
    given = OptimizeSettings(runner=RunnerSettings(ray=RaySettings()))
    with pytest.raises(DeclarationError) as error:
        runners.executor_opener(given, system, engines, **settings)  # type: ignore[arg-type]
    assert "remove optimize.runner" in error.value.hint
    return error.value


def test_engines_given_as_objects_are_refused(folder: Path) -> None:
    system = load(folder / "system.yaml").system
    error = refused(system, {"simulated": ScriptedLM(["x"])})
    assert "given as Python objects" in error.message


def test_training_on_workers_is_noted_by_check_and_refused_by_a_dry_run(
    toy_model: Path, tmp_path: Path
) -> None:
    rows = "".join(
        json.dumps({"id": str(i), "question": str(i), "answer": ""}) + "\n" for i in range(30)
    )
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.jsonl").write_text(rows.replace('"id": "', f'"id": "{split}'))
    program = loads(
        f"""
system: qa
lm: {toy_model}
inputs: {{question: str}}
components:
  reader: {{llm: {{prompt: Read., weights: {{lora: {{rank: 4}}}}}}, in: {{question: $question}}}}
outputs: {{answer: $reader}}
data: {{path: ., train: train, valid: valid, test: test}}
metric: {{exact_match: {{output: answer, gold: answer}}}}
optimize: {{method: mmgrpo, runner: {{ray: {{}}}}, budget: {{system_runs: 2000}}}}
""",
        path=tmp_path / "system.yaml",
    )
    refused = "optimize.runner: optimizer 'mmgrpo' trains reader.weights in this process"
    assert (
        f"`compound optimize` will reject this file ({refused})" in check_program(program).notes[0]
    )
    with pytest.raises(DeclarationError, match=refused):
        estimate(program)


def test_a_file_that_may_not_import_cannot_name_a_cluster(folder: Path) -> None:
    text = (
        (folder / "system.yaml")
        .read_text()
        .replace("method: random", "method: random\n  runner: {ray: {}}")
    )
    with pytest.raises(SpecError, match="sends examples to a cluster, and imports are not allowed"):
        loads(text, path=folder / "system.yaml", allow_import=False)


class TestConsent:
    """The address of a cluster in a file: what it answers can execute code in this process."""

    FILE = """
system: s
inputs: {q: str}
components: {a: {function: {call: "builtins:str"}, in: {object: $q}}}
outputs: {y: $a}
optimize: {runner: {ray: {address: ADDRESS}}}
"""

    @pytest.fixture(autouse=True)
    def _no_configuration(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("COMPOUND_CONFIG", str(tmp_path / "config.toml"))
        monkeypatch.delenv("COMPOUND_TRUST", raising=False)

    def problem(self, address: str, **how: Any) -> str:
        try:
            loads(self.FILE.replace("ADDRESS", address), path="f.yaml", **how)
        except SpecError as error:
            return str(error)
        return ""

    @pytest.mark.parametrize("address", ["head:6379", "127.0.0.1:6379", "localhost:6379"])
    def test_an_address_needs_it(self, address: str) -> None:
        found = self.problem(address)
        assert "optimize.runner.ray.address: the file sends examples to" in found
        assert f"--trust http://{address}" in found

    def test_it_is_given_for_one_address(self) -> None:
        assert "which you have not trusted" not in self.problem(
            "head:6379", trust=["http://head:6379"]
        )
        assert "which you have not trusted" in self.problem("head:6380", trust=["http://head:6379"])

    def test_the_command_line_and_the_users_own_clusters_need_none(self) -> None:
        for name in ("auto", "local"):
            assert "trust" not in self.problem(name)
        override = ("optimize.runner", "{ray: {address: 'head:6379'}}")
        assert "trust" not in self.problem("other:6379", overrides=[override])

    @pytest.mark.parametrize(
        "address", ["ray://head:10001", "head", "head:6379/x", "user@head:6379"]
    )
    def test_other_forms_are_rejected(self, address: str) -> None:
        assert "optimize.runner.ray.address: must be auto, local or HOST:PORT" in self.problem(
            f'"{address}"'
        )
