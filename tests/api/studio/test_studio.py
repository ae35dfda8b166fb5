"""The studio at its door: pages of runs, guards, labels, the stop file, and nothing else written."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from benchmarks.measure.studio import write_run
from compound.api.studio.application import application, link, serve
from compound.api.studio.traces import TraceIndex
from compound.core.errors import CompoundError
from compound.core.storage.records import to_line
from compound.evaluation.feedback import read_feedback
from compound.optimization.runs.recorder import STOP
from compound.report import write
from studio_runs import change, unfinished

VIEWS = ("overview", "candidates", "candidate&number=2", "examples", "rewards", "training", "label")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two finished runs."""
    write_run(tmp_path / "one", examples=60, candidates=8)
    shutil.copytree(tmp_path / "one", tmp_path / "nested" / "two")
    return tmp_path


@pytest.fixture
def client(folder: Path) -> Iterator[TestClient]:
    with TestClient(application(folder), base_url="http://127.0.0.1:8200") as found:
        yield found


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class TestPages:
    def test_the_list_names_every_run_with_its_result(self, client: TestClient) -> None:
        page = client.get("/").text
        assert "2 runs" in page
        assert "nested/two" in page
        assert page.count('<span class="state finished">') == 2
        assert "No run matches" in client.get("/?q=absent").text

    @pytest.mark.parametrize("view", VIEWS)
    def test_reading_a_page_writes_nothing(
        self, client: TestClient, folder: Path, view: str
    ) -> None:
        before = contents(folder)
        assert client.get(f"/run/nested/two?view={view}").status_code == 200
        assert contents(folder) == before

    def test_a_run_directory_is_shown_by_itself(self, folder: Path) -> None:
        with TestClient(application(folder / "one"), base_url="http://localhost") as client:
            assert "1 run" in client.get("/").text
            assert client.get("/run/one?view=examples").status_code == 200

    def test_the_overview_states_result_costs_and_changes(self, client: TestClient) -> None:
        page = client.get("/run/one").text
        assert "test score" in page.lower()
        assert "prompt tokens" in page
        assert "<ins>" in page
        assert "finder.k" in page

    def test_a_candidate_is_a_change_of_its_parent(self, client: TestClient) -> None:
        page = client.get("/run/one?view=candidate&number=3").text
        assert "finder.k" in page
        assert "Way 1" in page
        for number in ("0", "10", "x", "", "9" * 30):
            answer = client.get(f"/run/one?view=candidate&number={number}")
            assert answer.status_code == 409
            assert "no candidate" in answer.text

    def test_an_example_has_its_messages_in_full_on_both_sides(self, client: TestClient) -> None:
        page = client.get("/run/one?view=example&example=e7").text
        assert page.count("Answer. " * 100 + "What is the number 7?") == 4  # two calls, two sides
        assert "local reward" not in page
        answer = client.get("/run/one?view=example&example=absent")
        assert answer.status_code == 409
        assert "no recorded run" in answer.text

    def test_runs_are_compared_example_by_example(self, client: TestClient) -> None:
        page = client.get("/compare?run=one&run=nested/two").text
        assert "Comparison of 2 runs" in page
        assert "different examples" not in page
        assert "tick two" in client.get("/compare?run=one&run=one").text

    def test_runs_on_other_examples_are_not_compared_by_score(
        self, client: TestClient, folder: Path
    ) -> None:
        change(folder / "one", "config.json", "digest-of-test-rows", "another")
        assert "different examples" in client.get("/compare?run=one&run=nested/two").text


class TestExamples:
    @pytest.mark.parametrize(
        ("show", "differences"),
        [
            ("all", {"+1.000", "−1.000", "0.000"}),
            ("better", {"+1.000"}),
            ("worse", {"−1.000"}),
            ("equal", {"0.000"}),
            ("failed", set()),
            ("nonsense", {"+1.000", "−1.000", "0.000"}),
        ],
    )
    def test_a_filter_shows_what_its_name_says(
        self, client: TestClient, show: str, differences: set[str]
    ) -> None:
        page = client.get(f"/run/one?view=examples&show={show}&sort=example").text
        assert (
            set(re.findall(r'<td class="number (?:better|worse)?">([^<]*)</td>', page))
            == differences
        )

    def test_pages_hold_each_example_once(self, client: TestClient) -> None:
        found: list[str] = []
        for number in (1, 2):
            page = client.get(f"/run/one?view=examples&sort=example&page={number}").text
            found += [part.split('"')[0].split("&")[0] for part in page.split("example=")[1:]]
        assert sorted(found) == sorted(f"e{i}" for i in range(60))
        for page in ("0", "-1", "x", "99", "9" * 40):
            assert client.get(f"/run/one?view=examples&page={page}").status_code == 200

    @pytest.mark.parametrize(
        ("text", "count"),
        [("number 57?", 1), ("NUMBER 57?", 1), ("57? e57", 1), ("%", 0), ("_", 0), ("'", 0)],
    )
    def test_a_search_is_literal(self, client: TestClient, text: str, count: int) -> None:
        page = client.get("/run/one", params={"view": "examples", "q": text}).text
        assert page.count("example=e") == count


class TestForeignRuns:
    def test_texts_of_a_run_stay_texts(self, client: TestClient, folder: Path) -> None:
        hostile = "<script>alert(1)</script>\u202e"
        change(folder / "one", "traces.jsonl", "unknown", hostile)
        change(folder / "one", "candidates.jsonl", "source 1", hostile)
        for view in ("overview", "candidates", "examples", "example&example=e7"):
            answer = client.get(f"/run/one?view={view}")
            page = answer.text
            assert answer.status_code == 200
            assert "<script>alert" not in page
            assert "\u202e" not in page
        assert "&lt;script&gt;" in client.get("/run/one?view=candidates").text

    def test_names_may_have_any_characters(self, client: TestClient, folder: Path) -> None:
        name = "a\nb \u202e<b>'\"#?% &"
        shutil.copytree(folder / "one", folder / name)
        assert link(name) in client.get("/").text
        for view in ("overview", "candidates", "examples", "label"):
            assert client.get(link(name, view)).status_code == 200
        (folder / "one").rename(folder / "\udcff")
        assert "is not named in UTF-8" in client.get("/").text

    def test_links_of_hostile_names_stay_below_the_run(self) -> None:
        assert link('a"/../b?c', "example", example='"&<x') == (
            "/run/a%22/../b%3Fc?view=example&example=%22%26%3Cx"
        )

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("checkpoint.json", "{"),
            ("checkpoint.json", '{"format": 99}'),
            ("config.json", '{"optimize": 3}'),
            ("config.json", "[" * 100_000),
            ("candidates.jsonl", '{"number": "x"}\n'),
            ("events.jsonl", '{"event": "decision"}\n'),
            ("traces.jsonl", '{"split": 3}\n'),
            ("traces.jsonl", "not json\n"),
        ],
    )
    def test_damage_is_reported_and_stops_no_other_page(
        self, client: TestClient, folder: Path, name: str, text: str
    ) -> None:
        (folder / "one" / name).write_text(text)
        for view in VIEWS:
            answer = client.get(f"/run/one?view={view}")
            assert answer.status_code in (200, 409), view
            assert "Traceback" not in answer.text
        assert client.get("/").status_code == 200
        assert client.get("/run/nested/two").status_code == 200

    @pytest.mark.parametrize(
        ("name", "value"),
        [("score", {"a": 1}), ("sample", "0x"), ("calls", 5), ("outputs", [1]), ("failure", "no")],
    )
    def test_a_trace_of_another_form_is_named(
        self, client: TestClient, folder: Path, name: str, value: object
    ) -> None:
        """Regression test: SQLite refused the value, and the page was an internal error."""
        path = folder / "one" / "traces.jsonl"
        first, *_ = path.read_text().splitlines()
        row = {key: item for key, item in json.loads(first).items() if key != "checksum"}
        path.write_text(json.dumps({**row, name: value}) + "\n")
        answer = client.get("/run/one?view=examples")
        assert (answer.status_code, "is not a trace of a run" in answer.text) == (409, True)

    def test_a_run_of_a_link_is_refused(self, client: TestClient, folder: Path) -> None:
        (folder / "linked").symlink_to(folder / "one")
        assert client.get("/run/linked").status_code == 409
        assert "nested/two" in client.get("/").text

    @pytest.mark.parametrize(
        "name", ["%2e%2e", "%2e%2e/one", "one/%2e%2e/one", "absent", "one/memory", "a%00b"]
    )
    def test_names_lead_nowhere_else(self, client: TestClient, name: str) -> None:
        answer = client.get(f"/run/{name.replace('/', '%2f')}")
        assert answer.status_code in (404, 409)

    def test_a_run_deleted_while_it_is_open(self, client: TestClient, folder: Path) -> None:
        assert client.get("/run/one?view=examples").status_code == 200
        shutil.rmtree(folder / "one")
        assert client.get("/run/one?view=examples").status_code in (404, 409)
        assert client.get("/").status_code == 200

    def test_a_truncated_file_is_read_again(self, client: TestClient, folder: Path) -> None:
        assert "60 examples" in client.get("/run/one?view=examples").text
        lines = (folder / "one" / "traces.jsonl").read_text().splitlines(keepends=True)
        (folder / "one" / "traces.jsonl").write_text("".join(lines[:90]))
        assert "30 examples" in client.get("/run/one?view=examples").text
        (folder / "one" / "traces.jsonl").write_text("".join(lines[:110]) + lines[110][:40])
        assert "50 examples" in client.get("/run/one?view=examples").text


class TestGuards:
    def test_only_names_of_this_machine_are_served(self, client: TestClient) -> None:
        assert client.get("/", headers={"Host": "evil.example"}).status_code == 421

    @pytest.mark.parametrize("path", ["/stop/one", "/label/one"])
    def test_other_pages_cannot_write(self, client: TestClient, path: str) -> None:
        foreign = client.post(path, json={}, headers={"Origin": "http://evil.example"})
        form = client.post(path, data={"a": "b"})
        assert (foreign.status_code, form.status_code) == (403, 415)
        assert client.get(path).status_code == 405

    @pytest.mark.parametrize(("site", "computes"), [("cross-site", False), ("same-origin", True)])
    def test_pages_of_other_sites_load_no_model(
        self, client: TestClient, monkeypatch: pytest.MonkeyPatch, site: str, *, computes: bool
    ) -> None:
        asked: list[bool] = []

        def call_rewards(
            run: object, traces: object, *, compute: bool
        ) -> tuple[dict[str, Any], str]:
            asked.append(compute)
            return {}, ""

        monkeypatch.setattr("compound.api.studio.views._call_rewards", call_rewards)
        page = "/run/one?view=example&example=e7&rewards=1"
        assert client.get(page, headers={"Sec-Fetch-Site": site}).status_code == 200
        assert asked == [computes]

    def test_nothing_is_loaded_from_elsewhere(self, client: TestClient) -> None:
        answer = client.get("/run/one")
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        page = re.sub(r' xmlns(:\w+)?="http://www\.w3\.org/[^"]*"', "", answer.text)
        assert "http://" not in page
        assert "https://" not in page
        assert client.get("/assets/studio.js").status_code == 200
        assert client.get("/assets/..%2fapplication.py").status_code == 404

    def test_unknown_addresses(self, client: TestClient) -> None:
        assert client.get("/run/one?view=absent").status_code == 404
        assert "cannot be shown" in client.get("/absent").text

    def test_it_listens_on_loopback_only(self, folder: Path) -> None:
        with pytest.raises(CompoundError, match="loopback only"):
            serve(folder, "0.0.0.0", 0, print)


class TestStopping:
    def test_a_run_in_progress_is_asked_to_stop(self, client: TestClient, folder: Path) -> None:
        unfinished(folder / "one", os.getpid())
        page = client.get("/run/one").text
        assert 'data-live="/live/one"' in page
        assert 'data-post="/stop/one"' in page
        assert client.post("/stop/one", json={}).status_code == 200
        assert (folder / "one" / STOP).exists()
        assert "asked to stop" in client.get("/run/one").text

    def test_others_are_not(self, client: TestClient, folder: Path) -> None:
        unfinished(folder / "nested" / "two", process=2**22 + 1)
        for name in ("one", "nested/two"):
            answer = client.post(f"/stop/{name}", json={})
            assert answer.status_code == 409
            assert "not running" in answer.json()["error"]["message"]
        assert not [*folder.rglob(STOP)]
        assert "No process" in client.get("/run/nested/two").text


def pair(client: TestClient) -> dict[str, Any] | None:
    """Return the body of a label for the next pair, without the choice."""
    page = client.get("/run/one?view=label&split=test").text
    if "data-label" not in page:
        return None
    names = ("split", "before", "after", "example")
    return {name: page.split(f'data-{name}="')[1].split('"')[0] for name in names}


class TestLabels:
    def test_labels_are_preferences_between_runs_with_equal_inputs(
        self, client: TestClient, folder: Path
    ) -> None:
        for choice in ("left", "right", "equal"):
            body = pair(client)
            assert body is not None
            assert client.post("/label/one", json={**body, "choice": choice}).status_code == 200
        log = read_feedback(folder / "one" / "labels")
        assert (len(log.preferences), len(log.ties)) == (2, 1)
        for better, worse in log.preferences:
            assert log.runs[better].inputs == log.runs[worse].inputs
            assert log.runs[better].outputs != log.runs[worse].outputs

    def test_sides_are_random_and_hidden(self, client: TestClient, folder: Path) -> None:
        firsts = []
        while (body := pair(client)) is not None:
            page = client.get("/run/one?view=label&split=test").text.split("<section")[2]
            assert "result" not in page
            assert "initial" not in page
            client.post("/label/one", json={**body, "choice": "left"})
            firsts.append(body)
        preferred = read_feedback(folder / "one" / "labels").preferences
        after = sum(
            f"/{body['after'][:16]}/" in better
            for body, (better, _) in zip(firsts, preferred, strict=True)
        )
        assert 0 < after < len(firsts)  # always the left one, so that the sides decide
        assert "Every pair is labelled" in client.get("/run/one?view=label&split=test").text

    @pytest.mark.parametrize(
        "changed", [{"choice": "both"}, {"example": "absent"}, {"example": 3}, {"more": 1}]
    )
    def test_a_malformed_label_is_refused(
        self, client: TestClient, folder: Path, changed: dict[str, object]
    ) -> None:
        body = pair(client)
        assert body is not None
        answer = client.post("/label/one", json={**body, "choice": "left", **changed})
        assert answer.status_code in (409, 422)
        assert answer.json()["error"]["message"]
        assert not (folder / "one" / "labels" / "feedback.jsonl").exists()

    @pytest.mark.parametrize("target", ["elsewhere", "absent"])
    def test_labels_are_not_written_through_a_link(
        self, client: TestClient, folder: Path, target: str
    ) -> None:
        body = {**(pair(client) or {}), "choice": "left"}
        (folder / "elsewhere").mkdir()
        (folder / "one" / "labels").symlink_to(folder / target)
        answer = client.post("/label/one", json=body)
        assert (answer.status_code, "symbolic link" in answer.text) == (409, True)
        assert not list((folder / "elsewhere").iterdir())
        assert not (folder / "absent").exists()

    def test_a_second_studio_is_told_to_use_the_first(
        self, client: TestClient, folder: Path
    ) -> None:
        body = {**(pair(client) or {}), "choice": "left"}
        assert client.post("/label/one", json=body).status_code == 200
        with TestClient(application(folder), base_url="http://localhost") as other:
            answer = other.post("/label/one", json={**(pair(other) or {}), "choice": "left"})
        assert answer.status_code == 409
        assert "use that one" in answer.json()["error"]["message"]


def test_a_changed_run_is_announced(folder: Path) -> None:
    """The stream itself is endless, so its source is asked."""
    from compound.api.studio.application import _state_of
    from compound.api.studio.runs import Runs

    runs = Runs(folder, folder)
    run = runs.get("one")
    before = _state_of(run)
    assert _state_of(run) == before
    (folder / "one" / STOP).touch()
    assert _state_of(run) != before
    runs.close()


def rewritten(run: Path, name: str, edit: Any) -> None:
    """Let a function change the records of a file of a run, as somebody who computes its checksums would."""
    lines, checksum = [], ""
    for text in (run / name).read_text().splitlines():
        record = json.loads(text)
        record.pop("checksum")
        line, checksum = to_line(edit(record), checksum)
        lines.append(line)
    (run / name).write_bytes(b"".join(lines))
    stored = json.loads((run / "checkpoint.json").read_text())
    stored.pop("checksum")
    stored |= {"lengths": dict.fromkeys(stored["lengths"], 0), "checksums": {}}
    (run / "checkpoint.json").write_text(json.dumps(stored))


class TestLargeExamples:
    def test_thousands_of_calls_come_in_pages(self, client: TestClient, folder: Path) -> None:
        """Regression test: the page of an example with 5,000 calls had 27 MB."""

        def edit(trace: dict[str, Any]) -> dict[str, Any]:
            if trace["example"] == "e7":
                call = {**trace["calls"][0], "parents": []}
                trace["calls"] = [{**call, "address": f"tool/{n}"} for n in range(1020)]
            return trace

        rewritten(folder / "one", "traces.jsonl", edit)
        page = client.get("/run/one?view=example&example=e7").text
        assert len(page) < 500_000
        assert "page 1 of 21" in page
        assert page.count("<strong>tool/") == 2 * 50
        last = client.get("/run/one?view=example&example=e7&calls=21").text
        assert last.count("<strong>tool/") == 2 * 20
        assert ">later<" not in last
        for number in ("0", "99", "x", "9" * 5000):
            assert client.get(f"/run/one?view=example&example=e7&calls={number}").status_code == 200

    def test_texts_of_megabytes_are_cut_and_their_length_is_told(
        self, client: TestClient, folder: Path
    ) -> None:
        def edit(trace: dict[str, Any]) -> dict[str, Any]:
            if trace["example"] == "e7":
                trace["calls"][0]["exchanges"][0]["messages"][0]["content"] = "<b>" * 10**6
                trace["outputs"] = {"answer": trace["configuration"] * 10**5}
            return trace

        rewritten(folder / "one", "traces.jsonl", edit)
        for view in ("example&example=e7", "label&split=test", "examples"):
            assert len(client.get(f"/run/one?view={view}").text) < 5e6
        assert "(3,000,000 characters)" in client.get("/run/one?view=example&example=e7").text

    def test_the_next_example_is_that_of_the_list(self, client: TestClient) -> None:
        listed = "/run/one?view=examples&split=test&show=worse&sort=example"
        names = re.findall(r"example=(e\d+)", client.get(listed).text)
        page = client.get(
            listed.replace("view=examples", "view=example") + f"&example={names[1]}"
        ).text
        links = dict(re.findall(r'<a rel="(prev|next)" href="[^"]*example=(e\d+)"', page))
        assert links == {"prev": names[0], "next": names[2]}


def test_an_example_is_not_said_to_be_missing_while_traces_are_read(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression test: a page of a large run said that the example was not run with the result."""
    monkeypatch.setattr(TraceIndex.extend, "__defaults__", (0.0,))
    page = client.get("/run/one?view=example&example=e59").text
    assert "not run with this configuration" not in page
    assert page.count("<section aria-label=") == 2


def test_an_example_that_is_not_read_yet_loads_itself_again(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression test: on a busy machine, the page of an example ended with status 409."""
    monkeypatch.setattr(TraceIndex, "extend", lambda *_, **__: 0.25)
    monkeypatch.setattr(TraceIndex, "trace", lambda *_: None)
    answer = client.get("/run/one?view=example&example=e59")
    assert (answer.status_code, "25% of the traces are read" in answer.text) == (200, True)
    assert 'data-refresh="300"' in answer.text


class TestUnchangedResult:
    """Regression test: every example was shown twice, with the names "initial" and "initial"."""

    def test_examples_are_shown_once(self, client: TestClient, folder: Path) -> None:
        start = re.search(r"before=(\w{64})", client.get("/run/one?view=examples").text)
        assert start is not None
        same = f"before={start[1]}&after={start[1]}&split=test"
        table = client.get(f"/run/one?view=examples&{same}").text
        assert "output before" not in table
        assert "which is also the result" in table
        page = client.get(f"/run/one?view=example&example=e7&{same}").text
        assert page.count("<section aria-label=") == 1
        assert "same on both sides" not in page


class TestFronts:
    def test_the_front_is_that_of_the_chosen_cost(self, client: TestClient, folder: Path) -> None:
        """Regression test: it was that of tokens, drawn over seconds."""
        numbers = iter(range(100))

        def edit(row: dict[str, Any]) -> dict[str, Any]:
            n = next(numbers)  # more tokens and fewer seconds with every gain
            return {**row, "gain": n / 10, "prompt_tokens": 100.0 + n, "seconds": 9.0 - n}

        rewritten(folder / "one", "candidates.jsonl", edit)
        told = ", not beaten in gain and cost"
        assert client.get("/run/one?view=candidates&cost=tokens").text.count(told) == 9
        assert client.get("/run/one?view=candidates&cost=seconds").text.count(told) == 1


ANSWER = {"tokens": [" Par", "is", "<b>"], "reward": 1.0, "length": 3, "advantage": 0.5}


class TestTraining:
    def steps(self, folder: Path, *excerpts: object) -> None:
        about = {"kind": "training", "seed": 1, "recipe": "PPO", "reward": 0.5, "components": {}}
        rows = [{**about, "step": n, "excerpts": each} for n, each in enumerate(excerpts)]
        (folder / "one" / "memory.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))

    def test_tokens_have_the_sign_and_the_size_of_their_advantage(
        self, client: TestClient, folder: Path
    ) -> None:
        one = {**ANSWER, "advantages": [2.0, 0.0, -0.5], "ratios": [1.3, 1.0, 0.9], "clipped": [0]}
        other = {**ANSWER, "advantage": -1.0, "reward": 0.0, "left_out": True}
        groups = [{"component": "x", "example": "e1", "prompt": "P", "answers": [one, other]}]
        self.steps(folder, [], groups, groups)
        page = client.get("/run/one?view=training&at=1/2").text
        assert '<span class="up" style="--size:4" title="advantage +2.000, clipped, ratio 1.3"> Par</span>' in page  # fmt: skip
        assert '<span title="advantage 0.000, ratio 1">is</span>' in page
        assert '<span class="down" style="--size:1" title="advantage −0.500, ratio 0.9">&lt;b&gt;</span>' in page  # fmt: skip
        assert page.count('class="down" style="--size:2" title="advantage −1.000"') == 3
        for text in ("1 clipped", "left out of the loss", "0.90 to 1.30"):
            assert text in page
        assert "job 1, step 1" not in page  # it has no answers
        assert 'selected>job 1, step 3' in client.get("/run/one?view=training").text  # fmt: skip

    def test_answers_of_earlier_versions_are_shown(self, client: TestClient, folder: Path) -> None:
        self.steps(folder, [])
        path = folder / "one" / "memory.jsonl"
        old = {"x": [{"example": "e1", "reward": 1.0, "text": "an earlier answer"}]}
        record = json.loads(path.read_text())
        record.pop("excerpts")
        path.write_text(json.dumps({**record, "answers": old}) + "\n")
        assert "an earlier answer" in client.get("/run/one?view=training").text

    @pytest.mark.parametrize(
        "excerpts",
        [
            5,
            [5],
            {"a": 1},
            [{"component": "x"}],
            [{"component": "x", "example": "e", "answers": []}],
            [{"component": "x", "example": "e", "answers": [{**ANSWER, "tokens": "text"}]}],
            [{"component": "x", "example": "e", "answers": [{**ANSWER, "reward": float("nan")}]}],
            [{"component": "x", "example": "e", "answers": [{**ANSWER, "advantages": [{}]}]}],
        ],
    )
    def test_malformed_answers_are_told_and_the_report_is_still_written(
        self, client: TestClient, folder: Path, excerpts: object
    ) -> None:
        self.steps(folder, excerpts)
        answer = client.get("/run/one?view=training")
        assert answer.status_code == 200
        assert "damaged or inconsistent" in answer.text
        assert "pydantic" not in answer.text
        assert client.get("/run/one").status_code == 200
        write(folder / "one")

    def test_lengths_that_differ_and_enormous_groups_are_shown_in_part(
        self, client: TestClient, folder: Path
    ) -> None:
        short = {**ANSWER, "advantages": [1.0], "ratios": [2.0] * 9, "clipped": [-1, 99]}
        group = {"component": "\u202ex", "example": "<e>", "answers": [short] * 500}
        self.steps(folder, [group] * 50)
        page = client.get("/run/one?view=training").text
        assert "\u202e" not in page
        assert len(page) < 10**6

    def test_a_line_that_is_being_written_is_left_out_and_damage_is_told(
        self, client: TestClient, folder: Path
    ) -> None:
        self.steps(folder, [{"component": "x", "example": "e", "answers": [ANSWER]}])
        path = folder / "one" / "memory.jsonl"
        path.write_text(path.read_text() + '{"kind": "train')
        assert "Par" in client.get("/run/one?view=training").text
        path.write_text(path.read_text() + "ing}\n")
        assert "memory.jsonl:2" in client.get("/run/one?view=training").text
        path.unlink()
        assert client.get("/run/one?view=training").status_code == 200


class TestSeveralPeople:
    def test_labels_at_the_same_time_are_all_stored(self, client: TestClient, folder: Path) -> None:
        """Regression test: both requests opened the folder, and one was told to use another studio."""
        body = {**(pair(client) or {}), "choice": "left"}
        with ThreadPoolExecutor(8) as pool:
            answers = [pool.submit(client.post, "/label/one", json=body) for _ in range(16)]
        assert {each.result().status_code for each in answers} == {200}
        log = read_feedback(folder / "one" / "labels")
        assert (len(log.runs), len(log.preferences)) == (2, 1)
        lines = (folder / "one" / "labels" / "feedback.jsonl").read_text().splitlines()
        assert len(lines) == 16

    def test_outputs_that_differ_at_their_ends_are_offered(
        self, client: TestClient, folder: Path
    ) -> None:
        """Regression test: the first 300 characters of outputs were compared."""

        def edit(trace: dict[str, Any]) -> dict[str, Any]:
            return {**trace, "outputs": {"answer": "word " * 200 + trace["configuration"]}}

        rewritten(folder / "one", "traces.jsonl", edit)
        assert "0 of 60 pairs" in client.get("/run/one?view=label&split=test").text
