"""The studio at its door: pages of runs, guards, labels, the stop file, and nothing else written."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from benchmarks.measure.studio import write_run
from compound.api.studio.application import application, link, serve
from compound.core.errors import CompoundError
from compound.evaluation.feedback import read_feedback
from compound.optimization.runs.recorder import STOP
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

    def test_another_candidate_can_be_chosen(self, client: TestClient) -> None:
        page = client.get("/run/one?view=examples&before=absent").text
        assert "No example was run with both" in page


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
        assert "http://" not in answer.text
        assert "https://" not in answer.text
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
