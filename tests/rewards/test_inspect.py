"""Looking into local rewards: numbers by hand, runs that cannot be opened, the report, and the notebook."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import compound as cp
from compound.components.function import Function
from compound.components.selector import Selector
from compound.errors import CompoundError, ConfigurationError, DataError, DeclarationError, RunDirectoryError
from compound.graph.system import System
from compound.narrowing import entry
from compound.report import write
from compound.report.rewards import figures
from compound.report.rewards.section import reward_blocks, reward_facts
from compound.rewards.buffer import PairBuffer
from compound.rewards.features import FeatureMap, NoBackbone
from compound.rewards.fit import fit_rewards, read_pairs
from compound.rewards.heads import Head, fit
from compound.rewards.inspection.explain import (
    attribute_reward,
    explain_ranking,
    head_similarity,
    prequential_accuracies,
    rewards_from_margins,
)
from compound.rewards.inspection.inspect import Inspection
from compound.rewards.inspection.views import Overview
from compound.rewards.model import LocalReward, load
from compound.rewards.pairs import Draw
from compound.rewards.sampling.candidates import Candidate, Sampling
from compound.rewards.template import Template
from compound.storage.records import read_document, to_document
from optimas_settings import optimas

NOTEBOOKS = Path(__file__).parents[2] / "docs" / "notebooks"
TINY = NOTEBOOKS / "tiny_run"
NOTEBOOK = NOTEBOOKS / "inspect_reward_model.ipynb"
SVG = "image/svg+xml"


def shorten(text: str) -> str:
    return text[:5]


def small() -> System:
    return System("small", outputs={"y": Function("short", shorten)(text=cp.Input("text", str))})


def draw(example: str, outcomes: Mapping[Any, float], component: str = "short", name: str = "output") -> Draw:
    found = tuple(Candidate({name: y}, (value,), certain=True) for y, value in outcomes.items())
    return Draw(component, component, example, "digest", {"text": f"text of {example}"}, found)


def write_run(
    path: Path, draws: Sequence[tuple[Draw, int]], system: System | None = None, *, events: Sequence[Any] = ()
) -> Path:
    """Write what an inspection reads of a run, with rewards of numbers and labels."""
    system = system or small()
    buffer = PairBuffer(system.identity, Sampling(3, 2, 4))
    records = [record for one, iteration in draws for record in buffer.add([one], iteration)]
    learned = fit_rewards(buffer, system, list(system.components), NoBackbone(), "none")
    learned.model.save(path / "memory" / "rewards")
    config = {"optimize": {"optimas": optimas(model="none").model_dump(mode="json")}}
    (path / "config.json").write_text(json.dumps(config))
    for name, rows in (("memory", records), ("events", events)):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


WORDS = ("one", "one two", "one two three")


def shortest(n: int = 12, iteration: int = 1, sign: int = 1) -> list[tuple[Draw, int]]:
    """Draws in which the shortest output is the best, or the worst."""
    return [
        (draw(f"e{iteration}-{i}", {w: 0.5 - sign * 0.1 * len(w.split()) for w in WORDS}), iteration)
        for i in range(n)
    ]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", shortest())


@pytest.fixture(scope="module")
def tiny() -> Overview:
    return Inspection.open(TINY).overview()


class TestPlaced:
    def test_a_pair_lies_around_zero(self) -> None:
        assert rewards_from_margins([(1, 0, 2.0)]) == [{0: -1.0, 1: 1.0}]

    def test_groups_that_no_pair_joins_are_apart(self) -> None:
        assert rewards_from_margins([(0, 1, 2.0), (3, 2, 4.0)]) == [{0: 1.0, 1: -1.0}, {2: -2.0, 3: 2.0}]

    def test_nothing_gives_nothing(self) -> None:
        assert rewards_from_margins([]) == []


def readings(outputs: Sequence[str]) -> list[Any]:
    template = Template.of(Function("short", shorten))
    return [template.read({"text": "some text"}, {"output": output}) for output in outputs]


def short_map() -> FeatureMap:
    return FeatureMap.of(Template.of(Function("short", shorten)), readings(WORDS), 0)


class TestExplanation:
    def test_what_the_head_likes_is_found_although_it_is_wrong(self) -> None:
        """The head prefers ends of sentences; the global reward never does."""
        n = 20
        chosen, rejected = readings(["a b c"] * n), readings(["a b c."] * n)
        found = explain_ranking(short_map(), chosen, rejected, [str(i) for i in range(n)], -np.ones(n))
        assert found is not None
        weights = {weight.feature: weight.value for weight in found.weights}
        assert weights["output.sentence"] > 0
        assert weights["output.characters"] > 0  # a full stop is a character too
        assert set(weights) == {"output.sentence", "output.characters"}
        assert (found.agreement.mean, found.accuracy.mean) == (1.0, 0.0)

    def test_limits_hold_the_weight_and_the_largest_comes_first(self) -> None:
        rng = np.random.default_rng(0)
        texts = [" ".join(["w"] * int(k)) for k in rng.integers(1, 9, 120)]
        chosen, rejected = readings(texts[:60]), readings(texts[60:])
        margins = np.array([len(b.output) - len(a.output) for a, b in zip(chosen, rejected, strict=True)])
        found = explain_ranking(
            short_map(), chosen, rejected, [str(i) for i in range(60)], margins.astype(float)
        )
        assert found is not None
        assert found.agreement.mean > 0.95
        sizes = [abs(weight.value) for weight in found.weights]
        assert sizes == sorted(sizes, reverse=True)
        assert all(weight.low <= weight.value <= weight.high for weight in found.weights)

    def test_the_resampled_weights_are_those_of_the_head(self) -> None:
        from compound.rewards.inspection.explain import _newton

        rng = np.random.default_rng(0)
        rows = rng.normal(0.5, 1, (50, 3))
        fitted = fit(rows, 0 * rows, [str(i) for i in range(50)])
        again = _newton(rows / fitted.head.scale, fitted.strength)
        assert again == pytest.approx(fitted.head.weights, abs=1e-3)

    def test_outputs_that_no_name_tells_apart_have_no_explanation(self) -> None:
        same = readings(["abc"] * 10), readings(["xyz"] * 10)
        assert explain_ranking(short_map(), *same, [str(i) for i in range(10)], np.ones(10)) is None

    def test_too_few_inputs_have_no_explanation(self) -> None:
        assert explain_ranking(short_map(), readings(["a"]), readings(["b c"]), ["e"], np.ones(1)) is None


class TestAttribution:
    def test_each_word_counts_what_the_reward_loses_without_it(self) -> None:
        def score(variants: Sequence[Mapping[str, Any]]) -> Any:
            return np.array([3.0 * ("Lima" in v["y"]) - len(v["y"].split()) + v["n"] for v in variants])

        found = attribute_reward(score, {"y": "It is Lima", "n": 10})
        assert found.reward == 10.0
        assert [(piece.text, piece.effect) for piece in found.pieces] == [("It", -1), ("is", -1), ("Lima", 2)]

    def test_items_of_a_list_are_left_out_in_turn(self) -> None:
        def score(variants: Sequence[Mapping[str, Any]]) -> Any:
            return np.array([float(sum(len(item) for item in o["passages"])) for o in variants])

        found = attribute_reward(score, {"passages": ["Lima is in Peru", "ab"]})
        assert [(piece.text, piece.effect) for piece in found.pieces] == [
            ("Lima is in Peru", 15.0),
            ("ab", 2.0),
        ]

    def test_a_long_text_is_taken_in_parts(self) -> None:
        found = attribute_reward(
            lambda v: np.array([len(entry(o, "y", str).split()) for o in v]), {"y": "w " * 100}, most=10
        )
        assert [piece.effect for piece in found.pieces] == [10.0] * 10

    def test_an_output_without_words_has_a_reward_and_no_parts(self) -> None:
        found = attribute_reward(lambda variants: np.ones(len(variants)), {"y": "", "n": 2})
        assert (found.reward, found.pieces) == (1.0, ())


class TestSimilarity:
    def head(self, name: str, weights: Mapping[str, float]) -> LocalReward:
        template = Template(name, frozenset(), {})
        features = FeatureMap(template, tuple(weights), (), 0)
        n = len(weights)
        base = load(TINY / "memory" / "rewards").rewards_of["writer"]
        return replace(
            base, features=features, head=Head(np.array([*weights.values()]), np.zeros(n), np.ones(n))
        )

    def test_cosine_over_shared_columns_by_hand(self) -> None:
        one = self.head("a", {"y.words": 3.0, "y.lines": 4.0, "y in p": 9.0})
        two = self.head("b", {"y.words": 4.0, "y.lines": 3.0, "y in q": 9.0})
        found = head_similarity(one, two)
        assert found.cosine == pytest.approx(24 / 25)
        assert (found.first, found.second, found.shared) == ("a", "b", 2)

    def test_nothing_shared_is_no_number(self) -> None:
        assert head_similarity(self.head("a", {"x": 1.0}), self.head("b", {"y": 1.0})).cosine is None
        assert head_similarity(self.head("a", {"x": 0.0}), self.head("b", {"x": 1.0})).cosine is None


class TestDrift:
    def judged(self, draws: Sequence[tuple[Draw, int]]) -> list[tuple[int, float, int]]:
        buffer = PairBuffer(small().identity, Sampling())
        for one, iteration in draws:
            buffer.add([one], iteration)
        texts = read_pairs(buffer, Template.of(Function("short", shorten)))
        features = FeatureMap.of(Template.of(Function("short", shorten)), [*texts.chosen, *texts.rejected], 0)
        rows = features.matrix([*texts.chosen, *texts.rejected], NoBackbone())
        n, when = len(texts.chosen), [iteration for _, iteration in buffer.pairs("short")]
        found = prequential_accuracies(rows[:n], rows[n:], texts, when, soft=features.soft)
        return [(j.iteration, j.accuracy.mean, j.accuracy.inputs) for j in found]

    def test_a_turn_shows_once_and_is_learned(self) -> None:
        draws = [*shortest(6, 1), *shortest(3, 2), *shortest(30, 3, sign=-1), *shortest(3, 4, sign=-1)]
        assert self.judged(draws) == [(2, 1.0, 3), (3, 0.0, 30), (4, 1.0, 3)]

    def test_an_input_that_was_there_before_is_not_judged(self) -> None:
        again = [(one, 2) for one, _ in shortest(6, 1)]
        assert self.judged([*shortest(6, 1), *again]) == []

    def test_too_few_inputs_before_are_waited_for(self) -> None:
        assert [step[0] for step in self.judged([*shortest(2, 1), *shortest(3, 2), *shortest(2, 3)])] == [3]


class TestInspection:
    def test_candidates_have_the_held_out_rewards_that_the_margins_say(self, run: Path) -> None:
        found = Inspection.open(run, small())
        head = found.head("short")
        margins = dict(zip([(p.chosen["output"], p.rejected["output"]) for p, _ in found.buffer.pairs("short")],
                           found.margins("short").tolist(), strict=False))  # fmt: skip
        first = {point.x: point.local for point in head.points if point.input == head.points[0].input}
        assert {round(x): True for x in first} == {1: True, 2: True, 3: True}
        by_words = {round(x): value for x, value in first.items()}
        pairs = [p for p in found.buffer.pairs("short") if p[0].example == head.points[0].input]
        for (pair, _), margin in zip(pairs, found.margins("short"), strict=False):
            better, worse = (
                by_words[len(entry(side, "output", str).split())] for side in (pair.chosen, pair.rejected)
            )
            assert better - worse == pytest.approx(margin)
        assert sum(by_words.values()) == pytest.approx(0)
        assert margins
        assert head.correlation == 1.0
        assert [p.global_ for p in head.points[:3]] == pytest.approx([0.1, 0.0, -0.1])

    def test_numbers_of_a_perfect_reward(self, run: Path) -> None:
        head = Inspection.open(run).head("short")
        assert (head.accuracy.mean, head.pairs, head.accuracy.inputs) == (1.0, 36, 12)
        assert head.gap == pytest.approx((0.1 + 0.1 + 0.2) / 3)
        assert sum(b.pairs for b in head.bins) == len(head.margins) == 36
        assert all(b.observed == 1.0 for b in head.bins)
        assert head.error == pytest.approx(1 - np.mean([b.stated for b in head.bins]), abs=0.02)
        assert (head.measure, head.drift) == ("words", ())

    def test_the_worst_pairs_come_first_with_their_texts(self, tmp_path: Path) -> None:
        draws = shortest(20)
        odd, when = draws[7]
        draws[7] = (replace(odd, candidates=(Candidate({"output": "one"}, (0.0,), certain=True),
                                             Candidate({"output": "one two three"}, (1.0,), certain=True))), when)  # fmt: skip
        worst = Inspection.open(write_run(tmp_path, draws)).worst("short", 1)[0]
        assert worst.pair.example == "e1-7"
        assert (worst.chosen, worst.rejected) == ("output: one two three", "output: one")
        assert (worst.inputs, worst.iteration) == ("text: text of e1-7", 1)
        assert worst.margin < 0
        assert worst.probability == pytest.approx(1 / (1 + math.exp(-worst.margin)))

    def test_a_component_of_labels(self, tmp_path: Path) -> None:
        chooser = Selector("model", "small", "large", "none")
        system = System("choosing", outputs={"y": chooser(text=cp.Input("text", str))})
        outcomes = {"small": 0.2, "large": 0.9, "none": 0.0}
        draws = [(draw(f"e{i}", outcomes, "model", "choice"), 1) for i in range(8)]
        found = Inspection.open(write_run(tmp_path, draws, system), system)
        head = found.head("model")
        assert (head.measure, head.labels) == ("label", ("choice=small", "choice=large", "choice=none"))
        assert {p.x: round(p.global_, 2) for p in head.points} == {0: -0.17, 1: 0.53, 2: -0.37}
        assert head.explanation is not None
        assert head.explanation.weights[0].feature in {"choice=large", "choice=none"}
        assert "large" in figures.length_svg([head])

    def test_what_it_steered_and_why_not_is_read_from_the_events(self, tmp_path: Path) -> None:
        accuracy = {"mean": 0.55, "low": 0.4, "high": 0.7, "pairs": 9, "inputs": 3}
        facts = {
            "iteration": 1,
            "accuracy": {"short": accuracy},
            "component": "short",
            "missing": {"other": "dull"},
        }
        jobs = [
            {"event": "job", "facts": {**facts, "steered": False, "why": "too often wrong"}},
            {"event": "job", "facts": {**facts, "iteration": 2, "steered": True, "why": ""}},
            {"event": "job", "facts": {}},
        ]
        decisions: list[Mapping[str, Any]] = [
            {"event": "baseline", "mean": 0.2, "low": 0.1, "high": 0.3},
            {"event": "decision", "decision": 1, "accepted": False, "changes": [["short.x", 0, 1]]},
            {"event": "decision", "decision": 2, "accepted": True, "changes": [["short.x", 0, 1], ["short.y", 0, 1]],
             "after": {"mean": 0.4, "low": 0.3, "high": 0.5}},
        ]  # fmt: skip
        overview = Inspection.open(write_run(tmp_path, shortest(), events=[*jobs, *decisions])).overview()
        (head,) = overview.heads
        assert (head.jobs, head.steered, head.why) == (2, 1, "too often wrong")
        assert [(j.iteration, j.accuracy.mean) for j in head.history] == [(1, 0.55), (2, 0.55)]
        assert [(m.component, m.why, m.pairs) for m in overview.missing] == [("other", "dull", 0)]
        assert [(s.at, s.mean, s.components) for s in overview.steps] == [(0, 0.2, ()), (2, 0.4, ("short",))]
        assert overview.decisions == 2

    @pytest.mark.parametrize("iteration", [1, 2])
    def test_pairs_that_were_remembered_since_are_left_out(self, run: Path, iteration: int) -> None:
        """Those of a race come after the reward of their own iteration was learned."""
        since = [(draw(f"raced{i}", {"one": 0.1, "one two": 0.4}), iteration) for i in range(3)]
        other = write_run(run.parent / "other", [*shortest(), *since])
        shutil.copy(other / "memory.jsonl", run / "memory.jsonl")
        assert Inspection.open(run).head("short").pairs == 36

    def test_of_a_trained_backbone_only_held_out_pairs_are_shown(self, run: Path) -> None:
        """Its margins are those of the inputs set apart; the others have none."""
        found = Inspection.open(run)
        stored = replace(found.stored, adapter="trained")
        apart = read_pairs(found.buffer, found.reward("short").features.template, held_out=True).is_judged
        reward = replace(found.reward("short"), margins=np.arange(1.0, sum(apart) + 1))
        trained = replace(found, stored=replace(stored, rewards_of={"short": reward}))
        trained._check()
        head = trained.head("short", backbone=NoBackbone())
        assert 0 < len(head.margins) < 36
        assert len(trained.judgements("short")) == len(head.margins) == sum(apart)
        assert {p.input for p in head.points} == {
            pair.example for (pair, _), out in zip(found.buffer.pairs("short"), apart, strict=True) if out
        }

    def test_attributions_ask_the_head(self, run: Path) -> None:
        found = Inspection.open(run)
        shown = found.attributions("short", {"text": "t"}, {"output": "one two three"})
        whole, part = found.model.rewards(
            "short", [({"text": "t"}, {"output": "one two three"}), ({"text": "t"}, {"output": "two three"})]
        )
        assert [shown.reward, shown.pieces[0].effect] == pytest.approx([whole, whole - part])

    def test_nothing_is_written(self, run: Path) -> None:
        before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
        found = Inspection.open(run)
        found.overview()
        found.worst("short")
        assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


class TestErrors:
    def test_no_such_run(self, tmp_path: Path) -> None:
        with pytest.raises(RunDirectoryError, match="is not a run directory"):
            Inspection.open(tmp_path / "nowhere")

    def test_a_run_without_local_rewards(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(RunDirectoryError, match="has no local rewards; method optimas stores them"):
            Inspection.open(tmp_path)

    def test_an_unknown_component_is_named(self, run: Path) -> None:
        for ask in ("head", "worst", "drift", "margins"):
            with pytest.raises(
                DeclarationError, match=r"no local reward for component 'shart'; did you mean"
            ):
                getattr(Inspection.open(run), ask)("shart")

    def test_another_system_is_refused(self, run: Path) -> None:
        other = System("other", outputs={"y": Function("short", shorten)(text=cp.Input("words", str))})
        with pytest.raises(DataError, match="belongs to another system"):
            Inspection.open(run, other)

    @pytest.mark.parametrize(
        ("damage", "error", "words"),
        [
            ("config", RunDirectoryError, "no reward settings of this version"),
            ("card", ConfigurationError, "damaged reward checkpoint"),
            ("tensors", ConfigurationError, "damaged reward checkpoint"),
            ("margins", ConfigurationError, "35 margins of 'short', the buffer 36 pairs"),
            ("line", RunDirectoryError, "not a JSON line"),
            ("record", DataError, "record 2 of the pair buffer is damaged"),
            ("first", DataError, "record 1 of the pair buffer is damaged"),
            ("pairs", RunDirectoryError, "was not fitted to the pairs"),
            ("none", RunDirectoryError, "was not fitted to the pairs"),
        ],
    )
    def test_damage_is_named(self, run: Path, damage: str, error: type[CompoundError], words: str) -> None:
        card, memory = run / "memory" / "rewards" / "card.json", run / "memory.jsonl"
        lines = memory.read_text().splitlines(keepends=True)
        if damage == "config":
            (run / "config.json").write_text('{"optimize": {"optimas": {"reward": {"weight": 1}}}}')
        elif damage == "card":
            card.write_text(card.read_text()[:90])
        elif damage == "tensors":
            card.with_name("heads.safetensors").write_bytes(b"nothing")
        elif damage == "margins":
            from safetensors.numpy import load_file, save_file

            tensors = load_file(card.with_name("heads.safetensors"))
            save_file(
                {**tensors, "short.margins": tensors["short.margins"][1:]},
                card.with_name("heads.safetensors"),
            )
        elif damage == "line":
            memory.write_text(lines[0] + "{\n")
        elif damage == "record":
            memory.write_text(lines[0] + lines[1].replace('"draw"', '"drew"'))
        elif damage == "first":
            memory.write_text("{}\n")
        elif damage == "pairs":
            memory.write_text("".join(lines).replace("0.4", "0.45"))
        elif damage == "none":
            memory.write_text("")
        if damage in {"tensors", "margins"}:  # whoever changes the file on purpose changes its digest, too
            heads = card.with_name("heads.safetensors").read_bytes()
            stored = {**read_document(card.read_bytes()), "heads": hashlib.sha256(heads).hexdigest()}
            card.write_text(to_document(stored))
        with pytest.raises(error, match=re.escape(words)):
            Inspection.open(run)
        facts = reward_facts(run)
        assert facts is not None
        assert "cannot be read" in str(reward_blocks(facts)[0])

    def test_a_run_whose_rewards_all_failed_says_so(self, tmp_path: Path) -> None:
        found = Inspection.open(write_run(tmp_path, shortest(2)))
        assert found.components == ()
        with pytest.raises(DeclarationError, match="no component of .* has a local reward"):
            _ = found.largest
        overview = found.overview()
        assert [(m.component, m.pairs) for m in overview.missing] == [("short", 6)]
        assert len(reward_blocks(reward_facts(tmp_path) or {})) == 2


class TestFigures:
    def test_a_feature_has_words(self) -> None:
        assert figures.spoken("output.words", sole=True) == "number of words"
        assert figures.spoken("choice=large") == "choice=large"

    def test_means_of_many_values_are_of_equal_parts(self) -> None:
        found = figures.trend([(float(i), 2.0 * i) for i in range(25)])
        assert found.tolist() == [[2, 4], [7, 14], [12, 24], [17, 34], [22, 44]]

    @pytest.mark.parametrize("name", ["calibration", "margins", "alignment", "length", "weights"])
    def test_every_figure_has_a_panel_for_each_component(self, name: str, tiny: Overview) -> None:
        heads = tiny.heads
        svg = getattr(figures, f"{name}_svg")(heads)
        assert "planner" in svg
        assert "writer" in svg
        assert svg != getattr(figures, f"{name}_svg")(heads[:1])

    def test_a_head_about_which_nothing_is_known_can_be_drawn(self, run: Path) -> None:
        bare = replace(Inspection.open(run).head("short"), bins=(), margins=(), points=(), explanation=None,
                       history=(), drift=None, error=None, correlation=None)  # fmt: skip
        for name in ("calibration", "margins", "alignment", "length", "weights"):
            assert getattr(figures, f"{name}_svg")([bare]).startswith("<svg")
        assert figures.drift_svg([bare]).startswith("<svg")


# --- the tiny run, the report and the notebook ----------------------------------------------------------


def script() -> ModuleType:
    made = importlib.util.spec_from_file_location("make_tiny_run", NOTEBOOKS / "make_tiny_run.py")
    assert made is not None
    assert made.loader is not None
    module = importlib.util.module_from_spec(made)
    sys.modules["make_tiny_run"] = module
    made.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the script with another seed, whose metric likes long outputs."""
    path: Path = script().make(tmp_path_factory.mktemp("second") / "run", seed=5, likes_long=True, runs=900)
    return path


def test_the_tiny_run_is_small_and_names_no_machine() -> None:
    files = [path for path in TINY.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 300_000
    assert not list(TINY.rglob("*.sqlite"))
    for path in files:
        text = path.read_bytes()
        assert not re.search(rb"/(home|root|tmp|work|usr|Users)/", text), path
    events = [json.loads(line) for line in (TINY / "events.jsonl").read_text().splitlines()]
    assert [event["at"] for event in events] == [float(i) for i in range(len(events))]
    assert not any(event["spent"]["seconds"] for event in events)


def test_the_tiny_run_shows_what_its_metric_likes(tiny: Overview) -> None:
    writer = next(head for head in tiny.heads if head.component == "writer")
    assert writer.accuracy.low is not None
    assert writer.accuracy.low > 0.6
    assert writer.correlation is not None
    assert writer.correlation > 0.4
    assert writer.explanation is not None
    strongest = {weight.feature: weight for weight in writer.explanation.weights[:3]}
    assert strongest["output in plan"].low > 0
    assert [missing.component for missing in tiny.missing] == ["polisher"]
    assert "the metric does not depend on them" in tiny.missing[0].why


def test_the_use_of_a_reward_is_read_from_the_events(tiny: Overview) -> None:
    """Only the planner's reward can save runs: no other counted call follows the writer."""
    planner, writer = (
        next(head for head in tiny.heads if head.component == name) for name in ("planner", "writer")
    )
    assert planner.local is not None
    assert planner.local.evaluations > 0
    assert planner.local.trust > 0.5
    assert planner.local.saved > 0
    assert writer.local is None


def test_the_report_of_such_a_run_has_the_section(second: Path) -> None:
    markdown, html = ((second / name).read_text("utf-8") for name in ("report.md", "report.html"))
    assert "\n## Local rewards\n" in markdown
    assert markdown.count("The figures are in report.html.") == 1
    for component in ("planner", "polisher"):
        assert f"| {component} |" in markdown.split("## Local rewards")[1].split("\n## ")[0]
    for name in ("calibration", "margins", "alignment", "length", "weights", "steps"):
        assert html.count(f'<figure class="{name}">') == 1
    assert '<figure class="drift">' not in html  # the rewards were trained once
    ids = re.findall(r' id="([^"]+)"', html)
    assert len(ids) == len({*ids})
    write(second)
    assert html == (second / "report.html").read_text("utf-8")


def test_a_report_is_written_although_the_rewards_are_damaged(second: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(second, tmp_path / "run"))
    (path / "memory" / "rewards" / "card.json").write_text("{")
    write(path)
    assert "The local rewards of this run cannot be read" in (path / "report.md").read_text("utf-8")


def test_without_matplotlib_the_section_has_its_tables(second: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    *_, last = reward_blocks(reward_facts(second) or {})
    assert "figures need matplotlib" in str(last)


def executed(run: Path) -> Any:
    """Execute the notebook on a run, in a kernel of this environment."""
    nbformat, nbclient = (importlib.import_module(name) for name in ("nbformat", "nbclient"))
    notebook = nbformat.read(NOTEBOOK, 4)
    (cell,) = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", ())]
    cell.source = re.sub(r'^RUN = "[^"]*"', f"RUN = {str(run)!r}", cell.source)
    assert str(run) in cell.source
    nbclient.NotebookClient(notebook, timeout=200, resources={"metadata": {"path": NOTEBOOKS}}).execute()
    return notebook


def pictures(notebook: Any) -> list[str]:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return [output["data"][SVG] for output in outputs if SVG in output.get("data", {})]


@pytest.mark.filterwarnings("ignore")  # of the kernel's machinery
def test_the_notebook_runs_on_two_runs_and_shows_different_figures(
    second: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOKS.parents[1]))
    first, other = executed(TINY), executed(second)
    assert len(pictures(first)) == len(pictures(other)) == 8
    for a, b in zip(pictures(first), pictures(other), strict=True):
        assert a != b


def test_the_notebook_is_committed_without_outputs_and_its_cells_are_short() -> None:
    notebook = json.loads(NOTEBOOK.read_text("utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert all(len(cell["source"]) <= 12 for cell in code)


def test_a_figure_can_be_drawn_on_axes_of_ones_own(tiny: Overview) -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots(1, 1)
    figures.draw_alignment(axes, tiny.heads[0])
    assert axes.get_xlabel() == "local reward minus call mean"
