"""The report: numbers against ones computed by hand, honest words, and texts that try to break out."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from markdown_it import MarkdownIt
from scipy import stats

import compound as cp
from compound.api.optimize import run_optimization
from compound.core.errors import ParseError, RunDirectoryError, install_command
from compound.core.example import Example
from compound.core.storage.records import read_document, to_document
from compound.evaluation.dataset import Dataset, Split
from compound.evaluation.metrics.built_in import exact_match
from compound.evaluation.statistics import mean_interval
from compound.optimization.runs.recorder import Interrupted, Listener, Recorder
from compound.optimization.settings.base import BudgetSettings
from compound.optimization.settings.optimize import OptimizeSettings, make_settings
from compound.report import summarize, terminal_summary, write
from compound.report.record import own_gold
from compound.report.sections import changed_settings
from compound.report.text import line_diff, word_diff
from compound.testing import ScriptedLM
from optimas_settings import proposals
from report_pages import Page
from run_files import without_checksums

HOSTILE = (
    "</style><script>alert(1)</script> | a & b\n```\n# Injected\n````\n| x | y |\n| --- | --- |\n"
    "![p](http://evil.example/p.png) <img src=x onerror=alert(1)> 漢字 é \u202e \x00 \\| $x$ "
    + "long "
    * 400
)
TITLES = [
    "Scores",
    "Cost per request",
    "Changes",
    "Examples",
    "Decisions",
    "Jobs",
    "Detectable gains",
    "Graph",
    "Costs by component",
    "Failures",
    "Usage",
    "Provenance",
]
Reply = Callable[[str, np.random.Generator], Any]


class WithoutTest(Dataset):
    """Data without a test split."""

    def examples(self, role: Split, *args: Any, **kwargs: Any) -> list[Example]:
        return [] if role == "test" else super().examples(role, *args, **kwargs)


def answer(message: str) -> str:
    """Return the last word of the last question."""
    return str(re.findall(r"Question: .*?(\S+)$", message, re.MULTILINE)[-1])


def helped_by_prompt(message: str, rng: np.random.Generator) -> Any:
    clues = ("few words", "only the answer", "brief", "short phrase", "expert", "Check", "one line")
    share = 0.2 + 0.35 * sum(clue in message for clue in clues)
    return answer(message) if rng.random() < share else "a wrong answer"


def never_better(message: str, rng: np.random.Generator) -> Any:
    return answer(message) if rng.random() < 0.5 else "a wrong answer"


def often_failing(message: str, rng: np.random.Generator) -> Any:
    return ParseError(f"no field in {HOSTILE[:60]!r}") if rng.random() < 0.3 else answer(message)


def always_right(message: str, rng: np.random.Generator) -> Any:
    return answer(message)


def make(
    path: Path,
    reply: Reply,
    *,
    prompt: str = "Answer the question.",
    test: int = 40,
    temperature: float = 1.0,
    numbers: bool = False,
    on_start: Callable[[Recorder], None] | None = None,
    listener: Listener | None = None,
    **settings: Any,
) -> Path:
    """Optimize a small system and return the run directory."""

    def trimmed(text: str, cut: float) -> str:
        return text.strip()

    question = cp.Input("question", str)
    answerer = cp.LLM("answerer", prompt=cp.Text(prompt), temperature=temperature)
    trim = cp.Function("trim", trimmed, cut=cp.Float(0, 1, value=0.5) if numbers else 0.5)
    system = cp.System(
        "demo", outputs={"answer": trim(text=answerer(question=question))}, lm="scripted"
    )

    def rows(n: int) -> list[dict[str, str]]:
        return [{"question": f"what is {i}", "answer": str(i)} for i in range(n)]

    wanted: dict[str, Any] = {
        "budget": BudgetSettings(system_runs=500),
        "iterations": 2,
        "valid_size": 30,
        **proposals("edits"),
        **settings,
    }
    data = (Dataset if test else WithoutTest).of(train=rows(60), valid=rows(30), test=rows(test))
    run_optimization(
        system,
        data,
        exact_match("answer"),
        make_settings(wanted),
        run_dir=path,
        engines={"scripted": ScriptedLM(reply)},
        on_start=on_start,
        listener=listener,
    )
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """One finished run of each sort; the tests only read them."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        "improved": make(folder / "improved", helped_by_prompt, numbers=True),
        "unchanged": make(folder / "unchanged", never_better),
        "no test": make(folder / "no-test", helped_by_prompt, test=0, temperature=0.0),
        "failing": make(folder / "failing", often_failing, max_failed=0.9),
        "hostile": make(folder / "hostile", helped_by_prompt, prompt=HOSTILE),
    }


def page(path: Path) -> Page:
    text = (path / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"@import|url\((?!#)", text.split("</style>")[0])
    return Page(text)


def headings(markdown: str) -> list[str]:
    """Return the headings a Markdown parser finds, and check that it finds no HTML and no image."""
    tokens = MarkdownIt("commonmark").enable("table").parse(markdown)
    inside = [child for token in tokens for child in token.children or ()]
    assert not [
        t
        for t in (*tokens, *inside)
        if t.type in ("html_block", "html_inline", "image", "link_open")
    ]
    return [tokens[i + 1].content for i, token in enumerate(tokens) if token.type == "heading_open"]


def cells(markdown: str, heading: str) -> list[str]:
    """Return the cells of the first table under a heading, as a Markdown parser splits them."""
    tokens = MarkdownIt("commonmark").enable("table").parse(markdown.split(f"## {heading}\n")[1])
    kinds = [token.type for token in tokens]
    table = range(kinds.index("tbody_open"), kinds.index("tbody_close"))
    return [tokens[i + 1].content for i in table if kinds[i] == "td_open"]


def rows_of(path: Path, name: str) -> dict[str, float]:
    state = json.loads((path / "checkpoint.json").read_text())["state"]
    return {example: score for example, _, score, _ in state[name]["evaluation"]["rows"]}


def exact_interval(values: list[float]) -> tuple[float, float, float]:
    """Return the mean of scores of 0 and 1 with the limits of Clopper and Pearson."""
    found = stats.binomtest(round(sum(values)), len(values)).proportion_ci(0.95, method="exact")
    return sum(values) / len(values), found.low, found.high


@pytest.mark.slow
def test_the_headline_holds_the_numbers_computed_by_hand(runs: Mapping[str, Path]) -> None:
    path = runs["improved"]
    before, after = rows_of(path, "test_before"), rows_of(path, "test_after")
    gains = [after[e] - before[e] for e in before]
    facts = summarize(path)
    found: Any = facts["test"]
    for side, values in (("before", [*before.values()]), ("after", [*after.values()])):
        assert [found[side][k] for k in ("mean", "low", "high")] == pytest.approx(
            exact_interval(values)
        )
    gain = mean_interval(gains, bounds=(-1.0, 1.0))
    assert {k: found["gain"][k] for k in gain.to_json()} == pytest.approx(gain.to_json())
    up, down = sum(g > 0 for g in gains), sum(g < 0 for g in gains)
    # Differences are -1, 0 and 1, so the permutation test is the sign test.
    assert found["gain"]["p"] == pytest.approx(stats.binom.sf(up - 1, up + down, 0.5), abs=2e-3)
    assert facts["verdict"] == "better"
    numbers = found["before"]["mean"], found["after"]["mean"], found["gain"]["low"]
    for text in (*(f"{number:.3f}" for number in numbers), "40 ex"):
        assert text in facts["sentence"]
        assert text in page(path).text
    counts = {"better": up, "worse": down, "equal": 40 - up - down, "failed": 0}
    assert facts["examples"]["counts"] == counts


def test_methods_have_their_own_scores_and_spending(runs: Mapping[str, Path]) -> None:
    path = runs["improved"]
    methods: Any = summarize(path)["methods"]
    start, search = methods
    assert (start["method"], search["method"]) == ("unoptimized", "auto")
    values = rows_of(path, "test_after")
    assert search["test"]["mean"] == pytest.approx(sum(values.values()) / 40)
    events = [json.loads(text) for text in (path / "events.jsonl").read_text().splitlines()]
    ended = next(e for e in events if e["event"] == "test_after")
    assert {k: search[k] for k in ended["spent"]} == ended["spent"]
    assert search["accepted"] == sum(
        e["verdict"] == "supported" for e in events if e["event"] == "decision"
    )


@pytest.mark.parametrize("name", ["failing", "no test"])
def test_costs_by_component_add_up_to_what_was_spent(runs: Mapping[str, Path], name: str) -> None:
    path = runs[name]
    facts = summarize(path)
    traces = recorded(path)
    every = [c for t in traces for c in t["calls"] if c["component"] == "answerer"]
    calls = [c for c in every if not c["reused"]]
    assert (len(calls) < len(every)) == (
        name == "no test"
    )  # where nothing is drawn, decisions use the cache
    by_name = {row["component"]: row for row in facts["components"]}
    assert by_name["answerer"]["executed"] == len(calls)
    assert by_name["answerer"]["reused"] == len(every) - len(calls)
    assert by_name["answerer"]["prompt_tokens"] == sum(c["usage"]["prompt_tokens"] for c in calls)
    assert by_name["answerer"]["seconds"] == pytest.approx(sum(c["seconds"] for c in calls))
    for kind in ("calls", "prompt_tokens", "completion_tokens"):
        assert sum(row[kind] for row in facts["components"]) == facts["spent"][kind]


def recorded(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (path / "traces.jsonl").read_text("utf-8").splitlines()]


def test_a_request_takes_what_the_traces_say(runs: Mapping[str, Path]) -> None:
    path = runs["improved"]
    stored: Any = read_document((path / "checkpoint.json").read_bytes())
    state = stored["state"]
    means = []
    for side in ("before", "after"):
        configuration = state[f"test_{side}"]["evaluation"]["configuration"]
        mine = [t for t in recorded(path) if t["split"] == "test"]
        used = [
            sum(c["usage"]["prompt_tokens"] for c in t["calls"])
            for t in mine
            if t["configuration"] == configuration
        ]
        found = summarize(path)["requests"][side]
        assert (found["runs"], found["prompt_tokens"]) == (40, pytest.approx(sum(used) / 40))
        means.append(sum(used) / 40)
    told = f"input tokens: {means[0]:.0f} → {means[1]:.0f} (×{means[1] / means[0]:.2f})"
    assert told in terminal_summary(path)


def test_messages_of_every_example_are_complete(runs: Mapping[str, Path]) -> None:
    path = runs["hostile"]
    shown, told = page(path).text, []
    for row in summarize(path)["examples"]["rows"]:
        assert f"Question: {row['inputs']['question']}\nAnswer:" in shown
        for run in row["runs"].values():
            (exchange,) = run["calls"][0]["exchanges"]
            told += [message["content"] for message in exchange["messages"]]
    calls = [t["calls"][0]["exchanges"][0] for t in recorded(path) if t["split"] == "test"]
    assert sorted(told) == sorted(exchange["messages"][0]["content"] for exchange in calls)


def test_a_large_test_set_has_the_calls_of_some_examples_of_each_group(
    runs: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(shutil.copytree(runs["hostile"], tmp_path / "run"))
    monkeypatch.setattr("compound.report.record.IN_FULL", 6)
    write(path)
    found = summarize(path)["examples"]
    full = [row["group"] for row in found["rows"] if row["runs"]["after"]["calls"]]
    assert (found["in_full"], full.count("better"), full.count("equal")) == (6, 3, 3)
    assert "6 examples are shown in full" in page(path).text
    assert all(row["example"] in page(path).text for row in found["rows"])


def test_all_candidates_are_listed_and_runs_without_a_record_of_them_are_read(
    runs: Mapping[str, Path], tmp_path: Path
) -> None:
    path = without_checksums(Path(shutil.copytree(runs["improved"], tmp_path / "run")))
    lines = [json.loads(text) for text in (path / "candidates.jsonl").read_text().splitlines()]
    rows = summarize(path)["candidates"]["rows"]
    assert [row["digest"] for row in rows] == [line["digest"] for line in lines]
    parents = {row["digest"]: row["number"] for row in rows}
    assert [row["parent"] for row in rows] == [parents.get(line["parent"]) for line in lines]
    stored = json.loads((path / "checkpoint.json").read_text())
    stored["state"]["candidates"] = []
    (path / "checkpoint.json").write_text(json.dumps(stored))
    (path / "candidates.jsonl").unlink()
    write(path)
    assert summarize(path)["candidates"] is None
    assert "Candidates" not in headings((path / "report.md").read_text("utf-8"))


def test_failures_are_grouped_and_counted(runs: Mapping[str, Path]) -> None:
    path = runs["failing"]
    facts = summarize(path)
    traces = recorded(path)
    failed = [t["split"] for t in traces if t["failure"]]
    (group,) = facts["failures"]
    assert (group["kind"], group["where"], group["count"]) == ("parse", "answerer", len(failed))
    assert (group["valid"], group["test"]) == (failed.count("valid"), failed.count("test"))
    assert any("failed run scores 0.000 and counts in the mean" in note for note in facts["notes"])
    shown = [row for row in facts["examples"]["rows"] if row["group"] == "failed"]
    assert len(shown) == facts["examples"]["counts"]["failed"] == failed.count("test")
    assert all(row["runs"]["after"]["failure"][0] == "parse" for row in shown)


def test_nothing_accepted_is_said_and_the_system_stays(runs: Mapping[str, Path]) -> None:
    facts = summarize(runs["unchanged"])
    assert facts["verdict"] == "unchanged"
    assert facts["sentence"].startswith("No change was accepted")
    assert facts["title"].endswith(", unchanged")
    assert (facts["changes"], facts["methods"][1]["gain"]) == ([], None)
    assert "No changes" in (runs["unchanged"] / "report.md").read_text(encoding="utf-8")
    (named,) = re.findall(r"docs/guides/\w+\.md", terminal_summary(runs["unchanged"]))
    assert (Path(__file__).parents[2] / named).exists()


def test_a_metric_without_a_stated_range_is_named(runs: Mapping[str, Path], tmp_path: Path) -> None:
    path = Path(shutil.copytree(runs["improved"], tmp_path / "run"))
    assert not any("range" in note for note in summarize(path)["notes"])
    stored: dict[str, Any] = read_document((path / "checkpoint.json").read_bytes())
    state = stored["state"]
    evaluations = [state["before"], state["search"]["incumbent"]]
    for evaluation in (
        *evaluations,
        *(state[name]["evaluation"] for name in ("test_before", "test_after")),
    ):
        evaluation["bounds"] = None
    (path / "checkpoint.json").write_text(to_document(stored))
    assert any("does not declare its range" in note for note in summarize(path)["notes"])


def test_without_a_test_split_the_gain_is_called_optimistic(runs: Mapping[str, Path]) -> None:
    facts = summarize(runs["no test"])
    assert facts["title"].startswith("validation score")
    assert "one-sided p" not in facts["sentence"]
    assert {
        "There is no test split.",
        "The configuration was selected on the validation split: expect a lower score on new data.",
    } <= {*facts["notes"]}
    assert facts["examples"]["split"] == "valid"


def test_a_test_split_the_budget_did_not_reach_is_named(tmp_path: Path) -> None:
    path = make(
        tmp_path / "run",
        helped_by_prompt,
        budget=BudgetSettings(system_runs=300, calls=420, test_share=0.02),
    )
    facts = summarize(path)
    assert facts["test"]["after"] is None
    assert any(note.startswith("The test split was not read: budget") for note in facts["notes"])
    assert page(path).tags.count("svg") == 3


@pytest.mark.parametrize("events", [0, 1, 4, 12])
def test_an_unfinished_run_is_reported_as_such(tmp_path: Path, events: int) -> None:
    path, seen, recorders = tmp_path / "run", list[str](), list[Recorder]()

    def stop_later(event: Mapping[str, Any]) -> None:
        seen.extend([event["event"]] if event["event"] != "call" else [])
        if len(seen) == events:
            recorders[0].stop()

    if events == 0:
        finished = make(path, always_right)
        for name in ("checkpoint.json", "events.jsonl", "traces.jsonl", "best.json"):
            (finished / name).unlink()
    else:
        with pytest.raises(Interrupted):
            make(path, helped_by_prompt, on_start=recorders.append, listener=stop_later)
    write(path)
    facts = summarize(path)
    assert facts["missing"]
    assert facts["sentence"].startswith(("Unfinished: ", "There is no result yet"))
    assert "To resume the run" in page(path).text
    assert headings((path / "report.md").read_text(encoding="utf-8"))[1] == "Scores"
    assert terminal_summary(path)


def test_every_kind_of_change_is_shown(runs: Mapping[str, Path], tmp_path: Path) -> None:
    path = without_checksums(Path(shutil.copytree(runs["improved"], tmp_path / "run")))
    stored = json.loads((path / "checkpoint.json").read_text())
    demos = [
        {"inputs": {"question": f"what is {i}"}, "outputs": {"output": str(i)}} for i in range(3)
    ]
    config = json.loads((path / "config.json").read_text())
    config["start"]["answerer.demos"] = demos[:2]
    stored["state"]["search"]["best"] |= {
        "answerer.demos": demos[1:],
        "trim.cut": 0.25,
        "answerer.prompt": "Answer in short.",
    }
    stored["state"]["candidates"] = []  # their digests do not have the new parameter
    (path / "candidates.jsonl").unlink()
    (path / "config.json").write_text(json.dumps(config))
    (path / "checkpoint.json").write_text(json.dumps(stored))
    write(path)
    markdown, html = (
        (path / name).read_text(encoding="utf-8") for name in ("report.md", "report.html")
    )
    assert "**trim.cut**: 0.5 → 0.25" in markdown
    assert "```diff\n-Answer the question.\n+Answer in short.\n```" in markdown
    states = [
        re.search(rf"(kept|new|removed): Question: what is {i} Answer: {i}", markdown)
        for i in range(3)
    ]
    assert [found and found[1] for found in states] == ["removed", "kept", "new"]
    assert "<del>0.5</del> → <ins>0.25</ins>" in html
    assert "<span>Answer </span><del>the question</del><ins>in short</ins><span>.</span>" in html
    listed = [html.count(f'<li class="{state}">') for state in ("removed", "kept", "new")]
    assert listed == [1, 1, 1]
    shown = terminal_summary(path, 40)
    for text in (markdown, html, shown):
        assert "2 → 2 demonstrations" in text
    assert "\n  + Question: what is 2 Answer: 2\n" in shown
    assert "\n  - Question: what is 0 Answer: 0\n" in shown
    assert "what is 1" not in shown
    assert "trim.cut: 0.5 → 0.25" in shown


def test_the_closing_words_hold_the_result_and_fit_a_terminal(runs: Mapping[str, Path]) -> None:
    text = terminal_summary(runs["improved"])
    assert "answerer.prompt:\n  - Answer the question." in text
    assert "system runs in the search" in text
    assert text.endswith(f"best configuration: {runs['improved'] / 'best.json'}")
    text = terminal_summary(runs["improved"], 40)
    long = [line for line in text.splitlines() if len(line) > 40]
    assert all(line.startswith(("  ", "report: ", "best configuration: ")) for line in long)
    assert summarize(runs["improved"])["sentence"] in " ".join(text.split("\n"))


def test_hostile_texts_stay_texts(runs: Mapping[str, Path], tmp_path: Path) -> None:
    path = without_checksums(Path(shutil.copytree(runs["hostile"], tmp_path / "run")))
    traces = recorded(path)
    for trace in traces:
        trace["inputs"] = {HOSTILE[:40]: HOSTILE + "\ud800"}
        trace["outputs"] = {"answer": [HOSTILE, {"deep": HOSTILE}]}
        trace["gold"], trace["feedback"] = {"|": HOSTILE}, HOSTILE
        trace["failure"] = [HOSTILE[:20], HOSTILE]
        passage = {"title": "T", "text": HOSTILE, "score": 2.5}
        trace["calls"][1]["outputs"] = {"passages": [passage]}
    (path / "traces.jsonl").write_text("".join(json.dumps(trace) + "\n" for trace in traces))
    write(path)
    found = page(path)
    assert not {"script", "img"} & {*found.tags}
    assert "<script>alert(1)</script>" in found.text
    assert "score 2.500" in found.text
    markdown = (path / "report.md").read_text(encoding="utf-8")
    assert [h for h in headings(markdown)[1:] if h in TITLES] == TITLES
    assert "Injected" not in " ".join(headings(markdown))
    _, message, where, valid, test, together = cells(markdown, "Failures")
    assert "| a \\& b" in message
    assert (int(valid) + int(test), where) == (int(together), "–")
    for text in (markdown, found.text):
        assert not {"\x00", "\u202e", "\ud800"} & {*text}
        assert "漢字" in text
    assert len(markdown) < 100_000


def test_the_command_to_use_a_result_holds_no_other_command(
    runs: Mapping[str, Path], tmp_path: Path
) -> None:
    path = without_checksums(Path(shutil.copytree(runs["hostile"], tmp_path / "run")))
    config = json.loads((path / "config.json").read_text())
    name = next(node for node, kind in config["graph"]["nodes"] if kind == "input")[1:]
    renamed = (path / "config.json").read_text().replace(f"${name}", "$x; rm -rf ~\U000e0041")
    (path / "config.json").write_text(renamed)
    write(path)
    markdown = (path / "report.md").read_text(encoding="utf-8")
    assert "--config best.json 'x; rm -rf ~\\U000e0041'=…" in markdown


def test_both_forms_are_complete_and_load_nothing(runs: Mapping[str, Path]) -> None:
    for path in runs.values():
        found, markdown = page(path), (path / "report.md").read_text(encoding="utf-8")
        assert [h for h in headings(markdown) if h in TITLES] == TITLES
        assert found.tags.count("svg") == 3
        assert found.tags.count("h2") == len(TITLES) + ("## Candidates" in markdown)
        assert len(found.ids) == len({*found.ids}) > len(TITLES)
        json.dumps(summarize(path), allow_nan=False)


def test_without_matplotlib_it_says_how_to_get_figures_and_is_then_the_same_again(
    runs: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = runs["improved"]
    first = [(path / name).read_bytes() for name in ("report.md", "report.html")]
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write(path)
    found = page(path)
    assert found.tags.count("svg") == 1  # the graph
    assert install_command("report") in found.text
    assert "\\[report\\]" in (path / "report.md").read_text(encoding="utf-8")
    monkeypatch.undo()
    write(path)
    assert first == [(path / name).read_bytes() for name in ("report.md", "report.html")]


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        write(tmp_path)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "new"),
        ("old", ""),
        ("a b c d", "a x c d"),
        ("one\ntwo", "one\n2\n"),
        (HOSTILE, HOSTILE.replace("a", "e")),
    ],
)
def test_a_diff_holds_both_texts(before: str, after: str) -> None:
    pieces = word_diff(before, after)
    assert "".join(text for kind, text in pieces if kind != "new") == before
    assert "".join(text for kind, text in pieces if kind != "old") == after
    lines = line_diff(before, after)
    assert "\n".join(text[1:] for text in lines if text[0] != "+") == before
    assert "\n".join(text[1:] for text in lines if text[0] != "-") == after


def test_provenance_names_the_settings_that_are_not_the_default() -> None:
    settings = OptimizeSettings.model_validate(
        {
            "valid_size": 20,
            "mmgrpo": {"optimizer": {"lr": 0.5}, "loss": "dapo"},
            "budget": {"calls": 9},
        }
    )
    told = dict(changed_settings(settings.model_dump(mode="json")))
    assert told["mmgrpo.optimizer.lr"] == 0.5
    assert {name for name in told if "loss" not in name} == {"valid_size", "mmgrpo.optimizer.lr"}


@pytest.mark.parametrize(
    ("inputs", "gold", "shown"),
    [
        ({"question": "?"}, {"id": "7", "question": "?", "answer": "7"}, {"answer": "7"}),
        ({"question": "7"}, {"id": 7, "answer": "7"}, {"answer": "7"}),  # equal to another input
        ({"question": "?"}, {"question": "corrected"}, {"question": "corrected"}),
        ({"question": "?"}, {"answer": None, "hops": 2}, {"answer": None, "hops": 2}),
        ({"id": "a"}, {"id": "a"}, {}),
    ],
)
def test_gold_answers_are_shown_whatever_they_are_equal_to(
    inputs: dict[str, object], gold: dict[str, object], shown: dict[str, object]
) -> None:
    trace: Any = {"example": "7", "inputs": inputs, "gold": gold}
    assert own_gold(trace) == shown
