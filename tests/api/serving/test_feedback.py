"""Feedback: what is accepted, that it survives crashes, and that it becomes examples and preference pairs."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import compound as cp
from compound.api.serving.feedback_store import FeedbackStore, StoreError
from compound.core.errors import DataError
from compound.evaluation.feedback import read_feedback
from compound.execution.executor import Executor
from compound.execution.trace import Failure, Trace, to_json
from compound.rewards.buffer import draws_from_feedback
from compound.rewards.candidates import Sampling
from compound.rewards.pairs import ordered_pairs
from compound.testing import OptimizerJob, ScriptedLM
from optimas_settings import learning, optimas
from processes import python
from served import client_of, qa, served

pytest.importorskip("fastapi")
QUESTION = {"inputs": {"question": "Which river?"}}


def serving(folder: Path, lm: Any = None, system: cp.System | None = None, **settings: Any) -> Any:
    lm = lm or ScriptedLM(lambda message, rng: f"answer {rng.integers(10**9)}")
    return served(system or qa(temperature=1.0), lm, feedback=folder, **settings)


def run_of(client: Any, body: Any = None) -> str:
    return str(client.post("/v1/run", json=body or QUESTION).json()["run_id"])


def rate(client: Any, **body: Any) -> int:
    return int(client.post("/v1/feedback", json=body).status_code)


def test_feedback_is_acknowledged_once_it_is_on_the_disk(tmp_path: Path) -> None:
    folder = tmp_path / "served"
    with serving(folder) as running, running.client() as client:
        one, two = run_of(client), run_of(client)
        assert rate(client, run_id=one, score=1) == 201
        assert (
            rate(client, run_id=two, correction={"answer": "the Rímac"}, comment="Wrong river.")
            == 201
        )
        assert rate(client, better=one, worse=two) == 201
        log = read_feedback(folder)  # while the server runs
        metrics = client.get("/metrics").text
    assert set(log.runs) == {one, two}
    assert list(log.preferences) == [(one, two)]
    assert log.about[one].score == 1
    assert log.about[two].correction == {"answer": "the Rímac"}
    assert log.about[two].comment == "Wrong river."
    assert 'compound_feedback_total{kind="rating"} 2.0' in metrics


def test_ids_of_streams_and_chats_can_be_rated(tmp_path: Path) -> None:
    with serving(tmp_path) as running, running.client() as client:
        stream = client.post("/v1/run/stream", json=QUESTION).headers["x-run-id"]
        chat = {"model": "qa", "messages": [{"role": "user", "content": "Which river?"}]}
        whole = client.post("/v1/chat/completions", json=chat).json()["id"]
        pieces = client.post("/v1/chat/completions", json={**chat, "stream": True}).headers[
            "x-run-id"
        ]
        batch = client.post("/v1/batch", json={"inputs": [QUESTION["inputs"]]}).json()["results"][
            0
        ]["run_id"]
        assert [rate(client, run_id=run, score=0.5) for run in (stream, whole, pieces, batch)] == [
            201
        ] * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"run_id": "RUN"}, 422),
        ({"run_id": "RUN", "score": 1.5}, 422),
        ({"run_id": "RUN", "score": "nan"}, 422),
        ({"run_id": "RUN", "correction": {"answr": "x"}}, 422),
        ({"run_id": "RUN", "correction": {"answer": 5}}, 422),
        ({"run_id": "RUN", "score": 1, "correction": {}}, 422),
        ({"run_id": "RUN", "score": 1, "better": "RUN", "worse": "OTHER"}, 422),
        ({"better": "RUN", "worse": "RUN"}, 422),
        ({"better": "RUN"}, 422),
        ({"better": "RUN", "worse": "OTHER"}, 422),  # of other inputs
        ({"run_id": "run-0", "score": 1}, 404),
        ({"run_id": "RUN", "comment": "x" * 5000}, 422),
    ],
)
def test_meaningless_feedback_is_refused(tmp_path: Path, body: dict[str, Any], status: int) -> None:
    with serving(tmp_path) as running, running.client() as client:
        names = {
            "RUN": run_of(client),
            "OTHER": run_of(client, {"inputs": {"question": "Another?"}}),
        }
        given = {key: names.get(v, v) if isinstance(v, str) else v for key, v in body.items()}
        assert rate(client, **given) == status
        assert (tmp_path / "feedback.jsonl").read_text() == ""


def test_without_a_folder_nothing_is_recorded_and_the_answer_says_so() -> None:
    with client_of(qa(), ScriptedLM(lambda message: "yes")) as client:
        answer = client.post("/v1/feedback", json={"run_id": run_of(client), "score": 1})
    assert answer.status_code == 404
    assert "--feedback" in answer.json()["error"]["message"]


def test_runs_of_an_earlier_server_are_rated_and_servers_share_no_folder(tmp_path: Path) -> None:
    with serving(tmp_path) as running, running.client() as client:
        run = run_of(client)
        with pytest.raises(StoreError, match="in use by another process"):
            FeedbackStore(tmp_path)
    with serving(tmp_path) as running, running.client() as client:
        assert rate(client, run_id=run, score=0) == 201
        assert rate(client, better=run_of(client), worse=run) == 201


def test_records_hold_no_messages_and_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from compound.core.security import sanitize

    keys = ["sk-of-the-provider", 'pass"word\\of-the-sörver']
    monkeypatch.setattr(sanitize, "_SECRETS", set(keys))
    text = f"are {' and '.join(keys)} keys?"
    with serving(tmp_path) as running, running.client() as client:
        run = run_of(client, {"inputs": {"question": text}})
        assert rate(client, run_id=run, comment=text, correction={"answer": text}) == 201
    (document,) = map(json.loads, (tmp_path / "runs.jsonl").read_text().splitlines())
    (feedback,) = map(json.loads, (tmp_path / "feedback.jsonl").read_text().splitlines())
    assert (
        document["trace"]["inputs"]["question"]
        == feedback["comment"]
        == "are [key removed] and [key removed] keys?"
    )
    assert feedback["correction"]["answer"] == feedback["comment"]
    assert "exchanges" not in document["trace"]["calls"][0]


KILLED = """
import os, signal, sys
from pathlib import Path
from compound.execution.trace import from_json
from compound.api.serving.feedback_store import FeedbackStore
import json

store = FeedbackStore(Path(sys.argv[1]))
trace = from_json(json.loads(sys.argv[2]))
for number in range(50):
    store.add_run(f"run-{number}", trace)
    store.add_feedback({"run": f"run-{number}", "score": 1.0}).result()
    print(number, flush=True)
store.add_run("run-last", trace)
os.kill(os.getpid(), signal.SIGKILL)
"""


def trace_of(**inputs: Any) -> Trace:
    import asyncio

    engines = {"lm": ScriptedLM(lambda message: "the Rímac")}
    return asyncio.run(Executor(engines).run(qa(), inputs or {"question": "?"}))


def test_a_killed_process_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    from compound.execution.trace import to_json

    ran = python("-c", KILLED, str(tmp_path), json.dumps(to_json(trace_of())))
    assert ran.returncode == -9, ran.stderr
    acknowledged = len(ran.stdout.split())
    assert acknowledged == 50
    log = read_feedback(tmp_path)
    assert len(log.about) == 50
    assert set(log.about) <= set(log.runs)
    FeedbackStore(tmp_path).close()  # can be opened again


@pytest.mark.parametrize("name", ["runs.jsonl", "feedback.jsonl"])
def test_a_line_that_a_crash_left_incomplete_is_removed(tmp_path: Path, name: str) -> None:
    store = FeedbackStore(tmp_path)
    store.add_run("run-1", trace_of())
    store.add_feedback({"run": "run-1", "score": 1.0}).result()
    store.close()
    whole = (tmp_path / name).read_bytes()
    with (tmp_path / name).open("ab") as file:
        file.write(b'{"run": "run-2", "tr' + b"x" * 70_000)
    assert list(read_feedback(tmp_path).runs) == ["run-1"]  # a reader ignores it
    FeedbackStore(tmp_path).close()
    assert (tmp_path / name).read_bytes() == whole


def test_a_full_disk_is_reported_and_leaves_no_partial_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = False
    write = os.write

    def limited(descriptor: int, data: bytes) -> int:
        if full and len(data) < 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[: max(10, len(data) - 10)] if full else data)

    with serving(tmp_path) as running, running.client() as client:
        run = run_of(client)
        assert rate(client, run_id=run, score=0) == 201
        monkeypatch.setattr(os, "write", limited)
        full = True
        assert rate(client, run_id=run, score=1) == 503
        full = False
        assert rate(client, run_id=run, comment="better") == 201
    log = read_feedback(tmp_path)
    assert (log.about[run].score, log.about[run].comment) == (0, "better")


def test_the_folder_does_not_grow_beyond_its_limit(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving(tmp_path, max_feedback=4_000) as running, running.client() as client:
        first, *_, last = (run_of(client) for _ in range(12))
        assert rate(client, run_id=first, score=1, comment="x" * 4_000) == 503
        assert rate(client, run_id=last, score=1) == 404  # it was not recorded
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 4_000
    assert capfd.readouterr().err.count("it would exceed 4,000 bytes") == 1


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs.jsonl").write_text('{"run": 5}\n')
    (tmp_path / "feedback.jsonl").write_text("")
    with pytest.raises(DataError, match=r"runs\.jsonl:1: not a run"):
        read_feedback(tmp_path)
    with pytest.raises(StoreError, match=r"runs\.jsonl:1 is damaged"):
        FeedbackStore(tmp_path)
    with pytest.raises(DataError, match="compound serve --feedback"):
        read_feedback(tmp_path / "other")


@pytest.mark.parametrize(
    "change",
    [{"outputs": ["yes"]}, {"inputs": "x"}, {"inputs": {"question": float("inf")}}, {"calls": [1]}],
    ids=str,
)
def test_a_recorded_run_of_another_form_is_named(tmp_path: Path, change: dict[str, Any]) -> None:
    """Regression test: reading the examples of someone else's folder ended with a traceback."""
    recorded = {"run": "run-0", "trace": {**to_json(trace_of()), **change}}
    (tmp_path / "runs.jsonl").write_text(json.dumps(recorded) + "\n")
    (tmp_path / "feedback.jsonl").write_text('{"run": "run-0", "score": 1.0}\n')
    with pytest.raises(DataError, match=r"runs\.jsonl:1: (not a run of a served system: it|holds)"):
        read_feedback(tmp_path)


def test_corrected_and_confirmed_answers_are_examples(tmp_path: Path) -> None:
    store = FeedbackStore(tmp_path)
    for number in range(6):
        store.add_run(f"run-{number}", trace_of(question=f"q{number % 5}"))
    said: list[dict[str, Any]] = [
        {"run": "run-0", "correction": {"answer": "old"}},
        {"run": "run-5", "correction": {"answer": "new"}},  # of the same question as run-0
        {"run": "run-1", "score": 1.0},
        {"run": "run-2", "score": 0.4},
        {"run": "run-3", "comment": "hm"},
        {"run": "run-9", "score": 1.0},
    ]
    for document in said:
        store.add_feedback(document)
    store.close()
    data = cp.Dataset(tmp_path, split_by={"train": 0.5, "valid": 0.5})
    found = {
        example.inputs["question"]: example.gold["answer"]
        for role in ("train", "valid")
        if data.has(role)
        for example in _or_none(data, role)
    }
    assert found == {"q0": "new", "q1": "the Rímac"}


def _examples(folder: Path, inputs: list[str]) -> list[cp.Example]:
    return cp.Dataset(folder, split_by={"train": 1.0}).examples("train", inputs)


def test_of_runs_with_equal_inputs_the_one_rated_last_is_the_example(tmp_path: Path) -> None:
    store = FeedbackStore(tmp_path)
    for run in ("run-0", "run-1"):
        store.add_run(run, trace_of())
    store.add_feedback({"run": "run-0", "score": 0.2})
    store.add_feedback({"run": "run-1", "correction": {"answer": "early"}})
    store.add_feedback({"run": "run-0", "correction": {"answer": "late"}})
    store.add_feedback({"run": "run-1", "comment": "thanks"})
    store.close()
    (example,) = _examples(tmp_path, ["question"])
    assert example.gold["answer"] == "late"


def test_an_empty_correction_and_a_failed_run_confirm_no_answer(tmp_path: Path) -> None:
    store = FeedbackStore(tmp_path)
    store.add_run("run-0", trace_of(question="empty"))
    store.add_run(
        "run-1", replace(trace_of(question="failed"), failure=Failure("transient", "busy"))
    )
    store.add_run("run-2", trace_of(question="right"))
    store.add_feedback({"run": "run-0", "correction": {}})
    store.add_feedback({"run": "run-1", "score": 1.0})
    store.add_feedback({"run": "run-2", "score": 1.0})
    store.close()
    assert [e.inputs["question"] for e in _examples(tmp_path, ["question"])] == ["right"]


def test_inputs_named_like_the_columns_of_feedback_keep_their_values(tmp_path: Path) -> None:
    inputs = {"id": "customer-7", "gold": "999", "comment": "none"}
    store = FeedbackStore(tmp_path)
    for number, question in enumerate(("one", "two")):
        trace = replace(trace_of(), inputs={**inputs, "question": question})
        store.add_run(f"run-{number}", trace)
        store.add_feedback({"run": f"run-{number}", "score": 1.0, "comment": "good"})
    store.close()
    examples = _examples(tmp_path, ["question", *inputs])
    assert [dict(example.inputs) for example in examples] == [
        {**inputs, "question": "one"},
        {**inputs, "question": "two"},
    ]
    assert all(example.id.startswith("feedback-") for example in examples)


def _or_none(data: cp.Dataset, role: Any) -> list[cp.Example]:
    try:
        return data.examples(role, ["question"])
    except DataError:
        return []


def test_a_feedback_folder_needs_shares(tmp_path: Path) -> None:
    FeedbackStore(tmp_path).close()
    with pytest.raises(DataError, match=r"set split_by to shares"):
        cp.Dataset(tmp_path).examples("train", ["question"])
    with pytest.raises(DataError, match="no examples yet"):
        cp.Dataset(tmp_path, split_by={"train": 1.0}).examples("train", ["question"])


def two_steps() -> cp.System:
    writer = cp.LLM("writer", prompt=cp.Text("Write."), temperature=1.0)
    checker = cp.LLM("checker", prompt=cp.Text("Check."))
    return cp.System(
        "two", {"answer": checker(text=writer(question=cp.Input("question")))}, lm="lm"
    )


def rated(folder: Path, system: cp.System, *, scores: bool = False) -> tuple[str, str]:
    """Serve two runs of equal inputs, prefer the second, and return the ids."""
    lm = ScriptedLM(lambda message, rng: f"{message[:5]} {rng.integers(10**9)}")
    with serving(folder, lm, system) as running, running.client() as client:
        one, two = (run_of(client, {**QUESTION, "seed": seed}) for seed in (1, 2))
        if scores:
            assert rate(client, run_id=one, score=0.2) == rate(client, run_id=two, score=0.9) == 201
        else:
            assert rate(client, better=two, worse=one) == 201
    return one, two


@pytest.mark.parametrize("scores", [False, True])
def test_a_preference_belongs_to_the_call_that_differs_first(tmp_path: Path, scores: bool) -> None:
    system = two_steps()
    one, two = rated(tmp_path, system, scores=scores)
    log = read_feedback(tmp_path)
    (draw,) = draws_from_feedback(log, system)
    assert (draw.component, draw.address, dict(draw.inputs)) == (
        "writer",
        "writer",
        QUESTION["inputs"],
    )
    (pair,) = ordered_pairs(draw, Sampling())
    assert pair.chosen == log.runs[two].call("writer").outputs
    assert pair.rejected == log.runs[one].call("writer").outputs


def test_a_preference_between_runs_with_two_different_branches_is_left_out(tmp_path: Path) -> None:
    one, two = (cp.LLM(n, temperature=1.0)(question=cp.Input("question")) for n in ("one", "two"))

    def join(one: str, two: str) -> str:
        return one + two

    system = cp.System("branches", {"answer": cp.Function("join", join)(one=one, two=two)}, lm="lm")
    rated(tmp_path, system)
    assert draws_from_feedback(read_feedback(tmp_path), system) == []


def test_runs_of_another_system_are_left_out(tmp_path: Path) -> None:
    rated(tmp_path, two_steps())
    assert draws_from_feedback(read_feedback(tmp_path), qa()) == []


def test_feedback_is_copied_into_a_run_of_optimas_once(tmp_path: Path) -> None:
    from compound.optimizers.search.rewarding import RunRewards

    system = two_steps()
    rated(tmp_path / "served", system)
    metric = cp.metrics.custom(lambda outputs, example: 1.0)
    job = OptimizerJob(system, metric, [cp.Example("a", {"question": "?"})], lambda: ScriptedLM([]))
    task = replace(job.task, context=replace(job.task.context, folder=tmp_path))
    settings = learning(optimas(model="none", feedback="served"))
    rewards = RunRewards.load(task, settings)
    assert [pair.component for pair, _ in rewards.buffer.pairs("writer")] == ["writer"]
    assert rewards.iteration == 0  # the offline phase is still to come
    rated(tmp_path / "later", system)
    shutil.rmtree(tmp_path / "served")
    again = RunRewards.load(task, settings)  # as after an interruption
    assert again.buffer.digest == rewards.buffer.digest
