"""Best configurations as prompts and models of MLflow, and loaded back."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # mlflow's imports
    import mlflow
    import pandas as pd
    from mlflow import MlflowClient

import compound as cp
from compound.core.errors import DeclarationError, RunDirectoryError, RunFailed
from compound.report.trackers.mlflow_model import load_prompts, log_model, register_prompts
from compound.testing import ScriptedLM
from local_mlflow import local_store

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MlflowClient]:
    with local_store(tmp_path, monkeypatch) as client:
        yield client


ROWS = [{"id": str(i), "question": f"What is {i}?", "answer": str(i)} for i in range(40)]
GOOD = "Answer with {{number}} only."


FILE = """
system: qa
lm: some/model
inputs: {question: str}
components:
  answerer:
    llm: {prompt: {tune: Say something.}, temperature: {float: [0.0, 0.5], value: 0.0}}
    in: {question: $question}
  clean: {function: {call: "cleaning:clean"}, in: {text: $answerer}}
outputs: {answer: $clean}
data: {path: rows.jsonl, split_by: {train: 0.4, valid: 0.4, test: 0.2}}
metric: {exact_match: {output: answer, gold: answer}}
optimize: {method: random, budget: {system_runs: 60}}
"""
PIPELINE = """
import compound as cp

question = cp.Input("question")
llm = cp.LLM("answerer", prompt=cp.Text("Say something."), lm="some/model", retries=0)
qa = cp.System("qa", {"answer": llm(question=question)})
own = cp.System("qa", {"answer": cp.LLM("answerer", prompt=cp.Text("Say."), lm="mine")(question=question)})
"""
CODE = "def clean(text: str) -> str:\n    if text == 'broken':\n        raise ValueError(text)\n    return text.strip(' .')\n"


def answer(message: str) -> str:
    number = message.rsplit("What is ", maxsplit=1)[-1].split("?", maxsplit=1)[0]
    good = message.startswith("Answer with")
    return "broken" if number == "13" else f"{number}." if good else "?"


@pytest.fixture
def run(store: MlflowClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Any) -> Path:
    """A run started by the command, whose best configuration has another prompt."""
    monkeypatch.setattr(
        "compound.graph.registry.engines.open_engine", lambda *_, **__: ScriptedLM(answer)
    )
    (tmp_path / "system.yaml").write_text(FILE)
    (tmp_path / "cleaning.py").write_text(CODE)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    done = cli("optimize", "system.yaml", "--quiet", "--run-dir", "run")
    assert done.code == 0, done.err
    path = tmp_path / "run" / "best.json"
    best = json.loads(path.read_text())
    best["values"]["answerer.prompt"] = GOOD
    del best["digest"]
    path.write_text(json.dumps(best))
    return tmp_path / "run"


class TestPrompts:
    def test_texts_are_registered_once_and_loaded_back(
        self, run: Path, store: MlflowClient
    ) -> None:
        assert register_prompts(run) == {"qa.answerer.prompt": 1}
        prompt = store.load_prompt("prompts:/qa.answerer.prompt@best")
        assert prompt is not None
        assert prompt.template == GOOD
        assert prompt.tags["compound.run"] == str(run.absolute())
        system = cp.load_system("system.yaml")
        found = load_prompts(system)
        assert found["answerer.prompt"] == GOOD
        assert found["answerer.temperature"] == system.configuration["answerer.temperature"]
        assert register_prompts(run, alias="production") == {"qa.answerer.prompt": 1}
        store.register_prompt("qa.answerer.prompt", "Another.")
        assert register_prompts(run) == {"qa.answerer.prompt": 3}
        assert load_prompts(system, version="2")["answerer.prompt"] == "Another."
        assert load_prompts(system, version=2)["answerer.prompt"] == "Another."
        assert load_prompts(system, version="production")["answerer.prompt"] == GOOD

    def test_what_is_missing_is_named(self, run: Path, tmp_path: Path) -> None:
        with pytest.raises(
            DeclarationError, match=r"no prompt 'other.answerer.prompt' with the version 'best'"
        ):
            load_prompts(cp.load_system("system.yaml"), prefix="other")
        with pytest.raises(RunDirectoryError):
            register_prompts(tmp_path)


class TestModels:
    def test_a_logged_model_runs_the_best_configuration_and_nothing_in_it_is_pickled(
        self, run: Path, store: MlflowClient
    ) -> None:
        info = log_model(run, files=["cleaning.py"], registered_model_name="qa")
        model = mlflow.pyfunc.load_model("models:/qa/1")
        frame = pd.DataFrame({"question": ["What is 7?", "What is 8?"]}, index=[3, 5])
        found = model.predict(frame)
        assert found.to_dict() == {"answer": {3: "7", 5: "8"}}
        assert model.predict([{"question": "What is 9?"}])["answer"].tolist() == ["9"]
        assert info.signature.inputs.input_names() == ["question"]
        assert info.signature.outputs.input_names() == ["answer"]
        folder = Path(mlflow.artifacts.download_artifacts(info.model_uri))
        files = {path.name for path in folder.rglob("*") if path.is_file()}
        assert {"system.yaml", "best.json", "cleaning.py"} <= files
        assert not [name for name in files if name.endswith((".pkl", ".pickle"))]
        assert "python_function" in (folder / "MLmodel").read_text()

    def test_engines_stay_open_between_predictions_and_a_row_that_fails_is_an_error(
        self, run: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        opened: list[str] = []

        def open_engine(*_: Any, **__: Any) -> ScriptedLM:
            opened.append("engine")
            return ScriptedLM(answer)

        monkeypatch.setattr("compound.graph.registry.engines.open_engine", open_engine)
        model = mlflow.pyfunc.load_model(log_model(run, files=["cleaning.py"]).model_uri)
        for _ in range(3):
            model.predict([{"question": "What is 7?"}])
        assert opened == ["engine"]
        with pytest.raises(RunFailed, match="'clean'"):
            model.predict([{"question": "What is 13?"}])

    @pytest.mark.parametrize("spoil", [lambda run: run, lambda run: (run / "best.json").unlink()])
    def test_what_is_missing_is_an_error(self, run: Path, spoil: Callable[[Path], object]) -> None:
        spoil(run)
        with pytest.raises(cp.CompoundError):
            log_model(run)

    @pytest.mark.parametrize("name", ["system.yaml", "best.json"])
    def test_a_link_in_a_run_directory_is_not_followed(
        self, run: Path, tmp_path: Path, name: str
    ) -> None:
        outside = tmp_path / "outside"
        (run / name).rename(outside)
        (run / name).symlink_to(outside)
        with pytest.raises(cp.CompoundError, match="link"):
            log_model(run, files=["cleaning.py"])

    def test_a_system_of_python_is_given_by_its_place(
        self, store: MlflowClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        llm = cp.LLM("answerer", prompt=cp.Text("Say something."), lm="some/model", retries=0)
        system = cp.System("qa", outputs={"answer": llm(question=cp.Input("question"))})
        data = {"train": ROWS[:10], "valid": ROWS[10:20]}
        cp.optimize(
            system,
            data,
            "exact_match",
            method="random",
            budget=40,
            run_dir=tmp_path / "python",
            engines={"some/model": ScriptedLM(answer)},
            progress=False,
        )
        with pytest.raises(RunDirectoryError, match="the run was started in Python"):
            log_model(tmp_path / "python")
        with pytest.raises(DeclarationError, match="a Python object cannot be logged: System"):
            log_model(tmp_path / "python", system=system)  # type: ignore[arg-type]
        (tmp_path / "pipeline.py").write_text(PIPELINE)
        info = log_model(tmp_path / "python", system="pipeline:qa", files=["pipeline.py"])
        with pytest.raises(DeclarationError, match="no engine for the model 'mine'"):
            log_model(tmp_path / "python", system="pipeline:own", files=["pipeline.py"])
        (tmp_path / "pipeline.py").unlink()
        monkeypatch.setattr(
            "compound.graph.registry.engines.open_engine", lambda *_, **__: ScriptedLM(answer)
        )
        found = mlflow.pyfunc.load_model(info.model_uri).predict([{"question": "What is 8?"}])
        assert found["answer"].tolist() == ["?"]
