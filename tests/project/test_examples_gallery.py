"""Each example of ``docs/examples`` runs, prints what its page shows, and leaves nothing outside its folder."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import compound as cp
from compound.testing import ScriptedLM
from processes import python

ROOT = Path(__file__).parents[2]
GALLERY = ROOT / "docs" / "examples"
EXPECTED = GALLERY / "expected"
EXAMPLES = sorted(path.stem for path in GALLERY.glob("*.py"))
EMBEDDED = ("judge_metric", "loop", "map", "rag")  # those that only ask the embedded model

Run = Callable[[str], list[str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Execute an example as a script, in a folder of its own, and return the lines that it prints."""

    def execute(name: str) -> list[str]:
        (tmp_path / "work").mkdir()
        monkeypatch.chdir(tmp_path / "work")
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        monkeypatch.setattr(sys, "argv", [str(GALLERY / f"{name}.py"), str(tmp_path)])
        runpy.run_path(str(GALLERY / f"{name}.py"), run_name="__main__")
        assert list((tmp_path / "work").iterdir()) == []
        return capsys.readouterr().out.splitlines()

    return execute


@pytest.fixture
def embedded() -> None:
    """Skip a test where the embedded model is not installed."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from compound.engines import models

    if models.list_models()[0].state == "absent":
        pytest.skip("the weights of smollm2 are not installed")


def expected(name: str) -> list[str]:
    return (EXPECTED / f"{name}.txt").read_text("utf-8").splitlines()


def scores_of(result: cp.Result) -> tuple[float, float]:
    assert result.test_before is not None
    assert result.test_after is not None
    assert result.test_before.failed == result.test_after.failed == 0
    return result.test_before.mean, result.test_after.mean


@pytest.mark.slow
def test_plain_functions_find_the_known_optimum(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    assert run("plain_functions") == expected("plain_functions")
    result = cp.load_result(tmp_path / "plain_functions")
    assert dict(result.best) == {
        "summarize.statistic": "median",
        "summarize.window": 5,
        "correct.offset": 7,
    }


def test_the_selector_takes_the_large_model_only_where_needed(run: Run, tmp_path: Path) -> None:
    assert run("model_selector") == expected("model_selector")
    result = cp.load_result(tmp_path / "model_selector")
    assert dict(result.best) == {"total_model.choice": "large", "wish_model.choice": "small"}
    assert "$0.0724" in result.report.replace("\\", "")


def test_the_optimizer_of_the_gallery_finds_the_line(run: Run, tmp_path: Path) -> None:
    assert run("custom_optimizer") == expected("custom_optimizer")
    result = cp.load_result(tmp_path / "custom_optimizer")
    assert dict(result.best) == {"line.slope": 137, "line.intercept": -282}
    other = cp.load_result(tmp_path / "random")
    assert other.spent["system_runs"] <= 2000


@pytest.mark.filterwarnings("ignore:Items? :UserWarning")  # litellm's own, at its first call
def test_the_remote_api_is_asked_within_consent_rate_and_budget(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("litellm")
    refused, scores, spent, calls = run("remote_api")
    assert "the environment variable 'EXAMPLE_KEY' to http://127.0.0.1:" in refused
    assert scores == "token F1 on test questions: 0.33 -> 1.00"
    assert re.fullmatch(r"spent \$0\.00\d\d of at most \$0\.0100", spent)
    assert re.fullmatch(
        r"\d+ calls answered; [1-9]\d* rejected by the rate limit and sent again", calls
    )


@pytest.mark.slow
def test_a_resumed_run_repeats_no_recorded_request(run: Run, tmp_path: Path) -> None:
    requests, whole, again, same = run("resume")
    first, second = map(int, re.findall(r"\d+", requests))
    (uninterrupted,) = map(int, re.findall(r"\d+", whole))
    assert re.fullmatch(r"recorded requests that were sent again: 0 of [1-9]\d*", again)
    assert same.endswith("True")
    assert 0 <= first + second - uninterrupted <= 4  # those in flight when the process was killed


@pytest.mark.parametrize("name", EMBEDDED)
def test_examples_of_the_embedded_model_run_on_a_scripted_one(
    name: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "rag":
        pytest.importorskip("bm25s")
    scripted = ScriptedLM(lambda message: "happy", name="smollm2")
    monkeypatch.setattr("compound.graph.registry.engines.open_engine", lambda *_, **__: scripted)
    monkeypatch.setattr(cp.engines, "Transformers", lambda _: scripted)
    if name == "judge_metric":
        with pytest.raises(SystemExit, match="no judge is better than a constant verdict"):
            run(name)
        return
    assert run(name)
    scores_of(cp.load_result(tmp_path / name))


@pytest.mark.slow
@pytest.mark.user_cache
@pytest.mark.usefixtures("embedded")
def test_rag_gains_by_demonstrations(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("bm25s")
    run("rag")
    before, after = scores_of(cp.load_result(tmp_path / "rag"))
    assert after > before + 0.1


@pytest.mark.slow
@pytest.mark.user_cache
@pytest.mark.usefixtures("embedded")
def test_more_turns_give_more_valid_slogans(run: Run, tmp_path: Path) -> None:
    run("loop")
    result = cp.load_result(tmp_path / "loop")
    before, after = scores_of(result)
    assert after > before
    assert result.best["reviser.max_turns"] in (2, 3, 4, 5)


@pytest.mark.slow
@pytest.mark.user_cache
@pytest.mark.usefixtures("embedded")
def test_the_map_tunes_question_and_share(run: Run, tmp_path: Path) -> None:
    """Whether a gain is found depends on how the processor rounds: the labels of some reviews are close."""
    run("map")
    result = cp.load_result(tmp_path / "map")
    scores_of(result)
    assert result.after.mean >= result.before.mean
    assert set(result.best) == {"question.choice", "recommender.share"}


@pytest.mark.slow
@pytest.mark.user_cache
@pytest.mark.usefixtures("embedded")
def test_the_judge_beats_a_constant_and_decides(run: Run, tmp_path: Path) -> None:
    printed = run("judge_metric")
    assert "agreement of a constant verdict: 0.50" in printed
    result = cp.load_result(tmp_path / "judge_metric")
    assert result.after.mean > result.before.mean
    assert result.best["describer.phrase"] != "I hated the _."


@pytest.mark.slow
@pytest.mark.user_cache
@pytest.mark.usefixtures("embedded")
def test_training_raises_the_reward_on_new_reviews(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    run("train_adapter")
    before, after = scores_of(cp.load_result(tmp_path / "train_adapter"))
    assert after > before + 0.1


@pytest.mark.slow
def test_an_example_runs_without_a_folder_and_leaves_nothing(tmp_path: Path) -> None:
    example = str(GALLERY / "model_selector.py")
    ran = python(example, cwd=tmp_path, env={"TMPDIR": str(tmp_path)})
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == expected("model_selector")
    assert list(tmp_path.iterdir()) == []


def test_the_page_begins_each_example_with_a_result_that_it_printed() -> None:
    page = (GALLERY / "README.md").read_text("utf-8")
    results = dict(re.findall(r"^\| \[(\w+)\.py\]\(\1\.py\) \| ([^|]+) \|", page, re.MULTILINE))
    assert sorted(results) == EXAMPLES
    assert len(EXAMPLES) == 10
    for name, result in results.items():
        numbers = re.findall(r"\d[\d.,]*\d|\d", result)
        assert numbers
        assert [number for number in numbers if number not in "\n".join(expected(name))] == []
