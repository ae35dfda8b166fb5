"""What is refused before anything is spent, and how the refusal says what is wrong and where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest

import compound as cp
from compound import Dataset, OptimizeSettings
from compound.api.optimize import run_optimization
from compound.core.errors import (
    DataError,
    DeclarationError,
    RunDirectoryError,
    TooManyFailures,
)
from compound.evaluation.examples import from_text
from compound.evaluation.metrics.scoring import check_rows
from compound.metrics import accuracy, exact_match, mrr, recall_at_k, token_f1
from compound.optimization.runs.directory import RunDirectory, read_json
from compound.optimization.settings.base import BudgetSettings
from compound.report import summarize
from compound.testing import ScriptedLM

QA = """
system: qa
lm: small
engines:
  small: {litellm: {model: openai/small, price: [1, 1]}}
inputs: {question: str}
components:
  answerer:
    llm: {prompt: {tune: Answer.}}
    in: {question: $question}
outputs: {answer: $answerer}
data: {path: data, valid: valid}
metric: {exact_match: {output: answer}}
optimize: {method: random, alpha: 0.2, budget: {system_runs: 60}, search: {sources: [edits]}}
"""


def named(name: str, **changes: Any) -> ScriptedLM:
    return ScriptedLM(lambda message: "yes", name=name, **changes)


def system(lm: str = "lm", **changes: Any) -> cp.System:
    made = cp.LLM("answerer", prompt=cp.Text("Answer."), demos=cp.Demos(max=2), **changes)
    return cp.System("qa", outputs={"answer": made(question=cp.Input("question"))}, lm=lm)


def rows(n: int = 12, kind: str = "") -> list[dict[str, Any]]:
    return [{"question": f"{kind} {i}?", "answer": "yes" if i % 2 else "no"} for i in range(n)]


def data(**splits: Any) -> Dataset:
    found = {role: rows(kind=role) for role in ("train", "valid", "test")}
    return Dataset.of(**{**found, **splits})


def settings(**changes: Any) -> OptimizeSettings:
    budget = BudgetSettings(**changes.pop("budget", {"system_runs": 60}))
    return OptimizeSettings(method="random", alpha=0.2, budget=budget, **changes)


def run(path: Path, engine: Any, **changes: Any) -> Any:
    given: dict[str, Any] = {
        "system": system(),
        "data": data(),
        "metric": exact_match("answer"),
        "settings": settings(),
    }
    given |= changes
    return run_optimization(**given, run_dir=path, engines={"lm": engine})


def begin(path: Path, engine: Any, **changes: Any) -> None:
    """Begin a run and stop it after its first event."""

    def stop(recorder: Any) -> None:
        recorder.stop()

    with pytest.raises(cp.CompoundError, match="stopped"):
        run(path, engine, on_start=stop, **changes)


@pytest.fixture
def qa(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a system and its data, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    (tmp_path / "qa.yaml").write_text(QA)
    (tmp_path / "data").mkdir()
    for name in ("train", "valid", "test"):
        write_rows(tmp_path, name, rows(kind=name))
    return tmp_path


def write_rows(folder: Path, name: str, found: list[dict[str, Any]]) -> None:
    (folder / "data" / f"{name}.jsonl").write_text("\n".join(map(json.dumps, found)))


def change(folder: Path, old: str, new: str) -> None:
    text = (folder / "qa.yaml").read_text()
    assert old in text
    (folder / "qa.yaml").write_text(text.replace(old, new))


class TestModels:
    def test_a_run_does_not_go_on_with_another_model(self, tmp_path: Path) -> None:
        begin(tmp_path / "run", named("litellm:openai/small"))
        said = r"changed: engines\.lm: litellm:openai/small → litellm:openai/large;"
        with pytest.raises(RunDirectoryError, match=said):
            run(tmp_path / "run", named("litellm:openai/large"))

    def test_it_goes_on_with_the_same_model_and_another_concurrency(self, tmp_path: Path) -> None:
        begin(tmp_path / "run", named("small"))
        assert run(tmp_path / "run", named("small", concurrency=3)).path == tmp_path / "run"

    def test_a_run_that_fails_too_often_goes_on_as_the_message_says(self, tmp_path: Path) -> None:
        lm = ScriptedLM(lambda message: "" if "valid " in message else "yes", stable_name=True)
        with pytest.raises(TooManyFailures, match="raise max_failed"):
            run(tmp_path / "run", lm)
        result = run(tmp_path / "run", lm, settings=settings(max_failed=1.0))
        assert (result.path / "best.json").exists()

    @pytest.mark.parametrize(
        ("number", "message"),
        [
            (1, "written by an earlier version of compound.*not resumed"),
            (99, "has format 99, but this version reads formats up to"),
        ],
    )
    def test_a_run_of_another_version_is_refused_but_an_earlier_one_can_be_read(
        self, tmp_path: Path, number: int, message: str
    ) -> None:
        begin(tmp_path / "run", named("small"))
        stored = RunDirectory.open(tmp_path / "run")
        config = read_json(tmp_path / "run", "config.json")
        kept = {k: v for k, v in config.items() if k not in ("engines", "structure")}
        stored.write_json("config.json", {**kept, "format": number})
        stored.close()
        with pytest.raises(RunDirectoryError, match=message):
            run(tmp_path / "run", named("small"))
        if number == 1:
            assert summarize(tmp_path / "run")["provenance"]["engines"] == {}

    def test_a_key_in_the_name_of_a_model_is_not_recorded(self, tmp_path: Path) -> None:
        from compound.core.security.sanitize import remember_secret

        remember_secret("sk-not-to-be-recorded")
        begin(tmp_path / "run", named("mine:sk-not-to-be-recorded"))
        assert "sk-not-to-be-recorded" not in (tmp_path / "run" / "config.json").read_text()

    def test_a_model_first_used_after_the_budget_was_raised_is_known(self, tmp_path: Path) -> None:
        begin(tmp_path / "run", named("small"))
        stored = RunDirectory.open(tmp_path / "run")
        config = read_json(tmp_path / "run", "config.json")
        stored.write_json("config.json", {**config, "engines": {}})
        stored.close()
        run(tmp_path / "run", named("small"))
        assert read_json(tmp_path / "run", "config.json")["engines"] == {"lm": "small"}


class TestValues:
    @pytest.mark.parametrize("command", ["check", "optimize", "evaluate --split train"])
    def test_a_value_of_another_type_is_named_with_its_row_before_anything_is_spent(
        self, qa: Path, cli: Any, command: str
    ) -> None:
        wrong = rows()
        wrong[3]["question"] = 5
        wrong[7]["question"] = None
        write_rows(qa, "train", wrong)
        name, *options = command.split()
        ran = cli(name, "qa.yaml", *options)
        assert ran.code == 2
        assert "train split" in ran.err
        assert "row 'train-4': input 'question' must be str, but got 5" in ran.err
        assert "2 of 12 rows" in ran.err
        assert not (qa / "runs" / "qa").exists()

    def test_python_checks_every_split_too(self, tmp_path: Path) -> None:
        engine = named("small")
        wrong = [*rows(kind="test")[:-1], {"question": ["a"], "answer": "no"}]
        with pytest.raises(DataError, match=r"test split.*row 'test-12'.*must be str, .*\['a'\]"):
            run(tmp_path / "run", engine, data=data(test=wrong))
        with pytest.raises(DataError, match="row 'valid-1'"):
            cp.evaluate(
                system(),
                {"valid": [{"question": 1, "answer": "no"}]},
                "exact_match",
                engines={"lm": engine},
            )
        assert engine.requests == []
        assert not (tmp_path / "run").exists()

    def test_cells_of_csv_become_the_types_of_the_inputs(self, tmp_path: Path) -> None:
        (tmp_path / "dev.csv").write_text(
            "n,x,flag,text,maybe,y\n5,0.5,true,7,a,5 0.5 True 7\n-1,1e3,False,null,,-1 1000.0 False null\n"
        )

        def told(n: int, x: float, flag: bool, text: str, maybe: str | None) -> str:
            return f"{n} {x} {flag} {text}" if isinstance(maybe, str) else "wrong"

        inputs = {"n": int, "x": float, "flag": bool, "text": str, "maybe": str | None}
        wires: dict[str, Any] = {name: cp.Input(name, kind) for name, kind in inputs.items()}
        made = cp.Function("told", told)(**wires)
        whole = cp.System("typed", outputs={"y": made})
        assert cp.evaluate(whole, tmp_path, accuracy("y")).mean == 1.0

    @pytest.mark.parametrize(
        ("name", "text", "message"),
        [
            ("dev.csv", "n,y\n5,5\nfive,5\n", "row 'dev-3': .*but got 'five'"),
            ("dev.jsonl", '{"n": "5", "y": 5}\n', "row 'dev-1': .*but got '5'"),
        ],
        ids=["no number in a cell", "text in JSON"],
    )
    def test_a_value_that_is_no_number_is_named_with_its_row(
        self, tmp_path: Path, name: str, text: str, message: str
    ) -> None:
        (tmp_path / name).write_text(text)
        whole = cp.System("typed", outputs={"y": cp.Function("same", same)(n=cp.Input("n", int))})
        with pytest.raises(DataError, match=message):
            cp.evaluate(whole, tmp_path, accuracy("y"))

    def test_the_command_line_and_csv_read_text_alike(self) -> None:
        assert [from_text(kind, "5") for kind in (int, float, str, int | None)] == [5, 5.0, "5", 5]
        assert from_text(list[str], '["a"]') == ["a"]
        with pytest.raises(ValueError, match="not int"):
            from_text(int, "five")


def same(n: int) -> int:
    return n


def labelled(kind: Any) -> cp.System:
    made = cp.LLM("answerer", prompt="Answer.", output={"label": kind})
    return cp.System("labels", outputs={"label": made(question=cp.Input("question"))}, lm="lm")


SENTIMENT = Literal["positive", "negative"]


class TestLabels:
    @pytest.mark.parametrize("metric", [accuracy("label"), exact_match("label"), token_f1("label")])
    @pytest.mark.parametrize("gold", [("pos", "neg"), (0, 1)])
    def test_gold_outside_the_labels_is_refused_with_values(self, metric: Any, gold: Any) -> None:
        examples = [cp.Example(str(i), {}, {"label": gold[i % 2]}) for i in range(5)]
        with pytest.raises(DataError) as error:
            check_rows(metric, labelled(SENTIMENT).outputs, examples)
        said = str(error.value)
        assert f"{gold[0]!r} (3 rows)" in said
        assert f"{gold[1]!r} (2 rows)" in said
        assert "labels: 'positive', 'negative'" in said
        assert "example '0'" in said

    @pytest.mark.parametrize(
        ("kind", "metric", "gold"),
        [
            (SENTIMENT, accuracy("label"), "positive"),
            (SENTIMENT, accuracy("label"), ["good", "positive"]),
            (SENTIMENT, exact_match("label"), "Positive."),
            (SENTIMENT | None, accuracy("label"), "negative"),
            (Literal[1, 2], accuracy("label"), "2"),
            (bool, accuracy("label"), True),
            (bool, accuracy("label"), "True"),
            (str, accuracy("label"), "pos"),
            (list[SENTIMENT], mrr("label"), ["positive"]),
            (list[SENTIMENT], recall_at_k("label"), ["negative", "positive"]),
        ],
    )
    def test_gold_an_output_can_match_is_accepted(self, kind: Any, metric: Any, gold: Any) -> None:
        check_rows(metric, labelled(kind).outputs, [cp.Example("a", {}, {"label": gold})])

    @pytest.mark.parametrize(
        ("kind", "metric", "gold"),
        [
            (SENTIMENT, accuracy("label", choices=["pos", "neg"]), "pos"),
            (SENTIMENT | None, accuracy("label"), "pos"),
            (bool, accuracy("label"), "true"),
            (list[SENTIMENT], mrr("label"), "pos"),
        ],
    )
    def test_gold_no_output_can_match_is_refused(self, kind: Any, metric: Any, gold: Any) -> None:
        with pytest.raises(DataError, match="can only score 0"):
            check_rows(metric, labelled(kind).outputs, [cp.Example("a", {}, {"label": gold})])

    def test_check_tells_it(self, qa: Path, cli: Any) -> None:
        change(
            qa,
            "llm: {prompt: {tune: Answer.}}",
            "llm: {prompt: {tune: Answer.}}\n    out: 'one of ja, nein'",
        )
        ran = cli("check", "qa.yaml")
        assert ran.code == 2
        assert "'no' (6 rows), 'yes' (6 rows)" in ran.err


class TestBeforeTheFirstCall:
    @pytest.mark.parametrize(
        "command", ["check qa.yaml", "optimize qa.yaml --dry-run", "optimize qa.yaml"]
    )
    def test_a_budget_of_money_needs_prices(self, qa: Path, cli: Any, command: str) -> None:
        change(qa, ", price: [1, 1]", "")
        change(qa, "budget: {system_runs: 60}", "budget: {system_runs: 60, cost: 1}")
        ran = cli(*command.split())
        assert ran.code == 2
        assert "budget.cost is set, but the price of 'small' is unknown" in ran.err
        assert not (qa / "runs").exists()

    def test_check_needs_prices_where_the_file_names_no_method(self, qa: Path, cli: Any) -> None:
        change(qa, ", price: [1, 1]", "")
        change(qa, "method: random, ", "")
        change(qa, "budget: {system_runs: 60}", "budget: {cost: 1}")
        assert "price of 'small' is unknown" in cli("check", "qa.yaml").err

    def test_a_dry_run_warns_of_a_key_that_is_not_set(
        self, qa: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ran = cli("optimize", "qa.yaml", "--dry-run")
        assert ran.code == 0, ran.err
        assert "warning: the key of 'openai/small' is not set; export OPENAI_API_KEY=…" in ran.out
        assert json.loads(cli("optimize", "qa.yaml", "--dry-run", "--json").out)["keys"]
        monkeypatch.setenv("OPENAI_API_KEY", "sk-something-long-enough")
        assert "warning: the key" not in cli("optimize", "qa.yaml", "--dry-run").out

    def test_a_run_without_a_key_leaves_no_run_behind(self, qa: Path, cli: Any) -> None:
        ran = cli("optimize", "qa.yaml")
        assert ran.code == 2
        assert "the key of 'openai/small' is not set" in ran.err
        assert not (qa / "runs" / "qa").exists()
        assert "no runs" in cli("runs", "list").out

    def test_a_run_refused_at_its_first_call_leaves_nothing_behind(self, tmp_path: Path) -> None:
        class Gone(ScriptedLM):
            async def generate(self, request: Any) -> Any:
                raise cp.CompoundError("no such model", hint="give another")

        with pytest.raises(cp.CompoundError, match="no such model"):
            run(tmp_path / "run", Gone(lambda request: ""))
        assert not (tmp_path / "run").exists()
        begin(tmp_path / "run", named("scripted"))
        with pytest.raises(cp.CompoundError, match="no such model"):
            run(tmp_path / "run", Gone(lambda request: ""))
        assert (tmp_path / "run" / "config.json").exists()
        begin(tmp_path / "run", named("scripted"))  # what lay in the folder before stays
        with pytest.raises(cp.CompoundError, match="no such model"):
            run(tmp_path / "run", Gone(lambda request: ""))
        assert (tmp_path / "run" / "config.json").exists()

    def test_a_run_that_spent_something_stays(self, tmp_path: Path) -> None:
        class Gone(ScriptedLM):
            async def generate(self, request: Any) -> Any:
                if self.requests:
                    raise cp.CompoundError("no more")
                return await super().generate(request)

        with pytest.raises(cp.CompoundError, match="no more"):
            run(tmp_path / "run", Gone(lambda request: "yes"))
        assert (tmp_path / "run" / "config.json").exists()


class TestCheckAsJson:
    def test_a_wrong_file_is_listed_with_its_problems(self, qa: Path, cli: Any) -> None:
        change(qa, "alpha: 0.2", "alhpa: 0.2")
        ran = cli("check", "qa.yaml", "--json")
        assert ran.code == 2
        found = json.loads(ran.out)
        assert found["file"] == "qa.yaml"
        (problem,) = found["problems"]
        assert (problem["file"], problem["line"], problem["where"]) == (
            "qa.yaml",
            14,
            "optimize.alhpa",
        )
        assert problem["column"] > 1
        assert "did you mean 'alpha'?" in problem["message"]

    def test_every_file_is_listed_in_order(self, qa: Path, cli: Any) -> None:
        (qa / "bad.yaml").write_text(QA.replace("alpha", "alhpa").replace("lm: small", "lm: smll"))
        ran = cli("check", "bad.yaml", "qa.yaml", "gone.yaml", "--json")
        found = json.loads(ran.out)
        assert [one["file"] for one in found] == ["bad.yaml", "qa.yaml", "gone.yaml"]
        assert [len(one["problems"]) for one in found] == [2, 0, 1]
        assert found[2]["problems"][0] == {
            "file": "gone.yaml",
            "line": None,
            "column": None,
            "where": "",
            "message": "cannot be read: No such file or directory",
        }


class TestChanges:
    @pytest.mark.parametrize(
        ("old", "new", "said"),
        [
            (
                "tune: Answer.}}",
                "tune: Answer.}}\n    out: {answer: 'one of yes, no'}",
                "components.answerer.out: str → {answer: one of yes, no}",
            ),
            (
                "tune: Answer.}}",
                "tune: Answer.}}\n    out: 'one of yes, no'",
                "components.answerer.out: str → one of yes, no",
            ),
            ("tune: Answer.}", "tune: Answer.}, demos: {tune: 3}", "answerer.demos: now tuned"),
            ("method: random", "method: mipro", "optimize.method: random → mipro"),
        ],
    )
    def test_what_differs_is_named_in_the_terms_of_the_file(
        self, qa: Path, cli: Any, monkeypatch: pytest.MonkeyPatch, old: str, new: str, said: str
    ) -> None:
        monkeypatch.setattr(
            "compound.yaml.program.FileEngines.__call__", lambda self, lm: named("small")
        )
        assert cli("optimize", "qa.yaml", "-q").code == 0
        for name in ("best.json", "report.md"):
            (qa / "runs" / "qa" / name).unlink()
        change(qa, old, new)
        ran = cli("optimize", "qa.yaml", "-q")
        assert ran.code == 2
        assert said in ran.err
        assert "signature" not in ran.err
        assert "graph." not in ran.err
        assert "continuing" not in ran.err


class TestMessages:
    def test_a_missing_input_is_told_in_the_words_of_the_door(self, qa: Path, cli: Any) -> None:
        ran = cli("run", "qa.yaml")
        assert ran.code == 2
        assert "needs input 'question': str\nhint: write question=VALUE" in ran.err
        with pytest.raises(DeclarationError, match="needs input 'question': str; got no inputs"):
            cp.run(system(), {}, engines={"lm": named("small")})

    def test_a_stop_by_the_user_is_no_error(self, qa: Path, cli: Any, monkeypatch: Any) -> None:
        monkeypatch.setattr(
            "compound.yaml.program.FileEngines.__call__", lambda self, lm: named("small")
        )
        begin_here = "compound.cli.optimize._stop_on_interrupt"
        monkeypatch.setattr(begin_here, lambda recorder: recorder.stop())
        ran = cli("optimize", "qa.yaml", "-q")
        assert ran.code == 130
        assert "stopped; progress is saved in runs/qa; run the same command to resume" in ran.err
        assert "error:" not in ran.err
        again = cli("optimize", "qa.yaml", "-q")
        assert "continuing the run from its last checkpoint" in again.err

    def test_a_finished_run_is_told_in_the_words_of_the_door(
        self, qa: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            "compound.yaml.program.FileEngines.__call__", lambda self, lm: named("small")
        )
        assert cli("optimize", "qa.yaml", "-q").code == 0
        ran = cli("optimize", "qa.yaml", "-q")
        assert "pass --new to start a new run, or choose another --run" in ran.err
        assert "continuing" not in ran.err
        run(qa / "python", named("small"))
        with pytest.raises(RunDirectoryError) as error:
            run(qa / "python", named("small"))
        assert str(error.value.hint).endswith("pass new=True, or another run_dir")

    def test_an_empty_split_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(DeclarationError, match="the valid split of the data has no rows"):
            cp.optimize(
                system(), {"train": rows(), "valid": []}, "exact_match", run_dir=tmp_path / "run"
            )

    def test_calls_of_a_metric_are_mentioned_if_it_is_a_function(self, qa: Path, cli: Any) -> None:
        assert "a user-defined metric" not in cli("optimize", "qa.yaml", "--dry-run").out
        (qa / "scoring.py").write_text("def score(outputs, example):\n    return 1.0\n")
        change(qa, "{exact_match: {output: answer}}", "{custom: {call: 'scoring:score'}}")
        assert "a user-defined metric" in cli("optimize", "qa.yaml", "--dry-run").out

    def test_a_split_smaller_than_asked_for_is_told(self, qa: Path, cli: Any) -> None:
        ran = cli("check", "qa.yaml", "--set", "optimize.valid_size=500")
        assert (
            "note: optimize.valid_size is 500, but the valid split has 12 rows: all rows are used"
            in ran.out
        )
        assert "all rows are used" not in cli("check", "qa.yaml").out


def test_the_advice_after_too_many_failures_can_be_followed() -> None:
    def failing(outputs: object, example: object) -> float:
        raise ValueError("no score")

    with pytest.raises(cp.CompoundError, match="raise max_failed"):
        cp.evaluate(system(), rows(), failing, engines={"lm": named("lm")}, cache=False)
    found = cp.evaluate(
        system(), rows(), failing, engines={"lm": named("lm")}, cache=False, max_failed=1.0
    )
    assert found.failed == 12
    settings = OptimizeSettings(failure_score=0.25, max_failed=0.1)
    found = cp.evaluate(
        system(),
        rows(),
        failing,
        engines={"lm": named("lm")},
        cache=False,
        settings=settings,
        max_failed=1.0,
    )
    assert found.mean == 0.25


def test_evaluate_rejects_settings_that_it_would_ignore() -> None:
    with pytest.raises(DeclarationError, match="evaluate has no setting 'budget'"):
        cp.evaluate(system(), rows(), "exact_match", engines={"lm": named("lm")}, budget=3)
    with pytest.raises(DeclarationError, match="did you mean 'max_failed'"):
        cp.evaluate(system(), rows(), "exact_match", engines={"lm": named("lm")}, max_fail=1.0)
