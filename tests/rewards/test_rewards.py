"""Local rewards: what is read, features, heads by equation 5, alignment measures, the buffer, checkpoints."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from scipy import optimize

from compound import LLM, Function, Input, Selector, System, Text
from compound.core.errors import ConfigurationError, DataError, DeclarationError
from compound.rewards.alignment import calibration_error, reliability
from compound.rewards.buffer import PairBuffer
from compound.rewards.candidates import Candidate, Sampling
from compound.rewards.features import Embedder, FeatureMap, NoBackbone, Template, describe
from compound.rewards.fit import component_pairs, fit_rewards, role_of
from compound.rewards.heads import MIN_INPUTS, STRENGTHS, fit, folds, slope
from compound.rewards.model import RewardModel, load
from compound.rewards.pairs import Draw


def shorten(text: str, hint: str | None = None) -> str:
    """Return the first words of a text.

    The hint is not used.
    """
    return text[:5]


def weigh(x: float, by: float = 2.0) -> float:
    return x * by


def small() -> System:
    short = Function("short", shorten)(text=Input("text", str))
    return System("small", outputs={"y": short})


def draw(
    example: str,
    text: str,
    outcomes: Mapping[str, Sequence[float]],
    component: str = "short",
    *,
    certain: bool = True,
) -> Draw:
    found = tuple(
        Candidate({"output": y}, tuple(rewards), certain=certain) for y, rewards in outcomes.items()
    )
    return Draw(component, component, example, "digest", {"text": text}, found)


class TestTemplate:
    def test_inputs_come_short_first_and_outputs_last(self) -> None:
        reading = Template.of(Function("short", shorten)).read(
            {"text": "a long text", "hint": "tip"}, {"output": "a lon"}
        )
        assert reading.inputs == "hint: tip\ntext: a long text"
        described = "short: Return the first words of a text. Reads text, hint. Writes output."
        assert reading.texts == (f"{described}\nhint: tip\ntext: a long text", "output: a lon")
        assert reading.output == "output: a lon"
        assert reading.label == ""

    def test_numbers_of_a_text_by_hand(self) -> None:
        numbers = (
            Template.of(Function("short", shorten))
            .read({"text": "Lima is in Peru"}, {"output": "Lima, Lima in 5."})
            .numbers
        )
        assert numbers["output.words"] == pytest.approx(math.log(5))
        assert numbers["output.characters"] == pytest.approx(math.log(17))
        assert numbers["output.repeats"] == pytest.approx(1 / 4)
        assert numbers["output in text"] == pytest.approx(2 / 3)
        assert (
            numbers["output.sentence"],
            numbers["output.capital"],
            numbers["output.digits"],
        ) == (1, 1, 1)

    def test_numbers_of_a_number_are_its_value_and_its_products(self) -> None:
        reading = Template.of(Function("weigh", weigh)).read({"x": 3.0}, {"output": 4.0})
        assert reading.numbers == {"output": 4.0, "output^2": 16.0, "output*x": 12.0}

    def test_the_description_says_what_a_component_is_for_but_not_its_configuration(self) -> None:
        """OPTIMAS renders description, inputs and output; the description was missing."""
        llm = LLM("writer", prompt=Text("A secret prompt."), temperature=0.7)
        assert describe(llm) == "writer: A call to a language model. Writes output."
        assert describe(Selector("model", "small", "large")).endswith("Writes choice.")
        assert (
            "secret" not in Template.of(llm).read({"question": "why?"}, {"output": "so"}).texts[0]
        )

    def test_a_label_is_no_text(self) -> None:
        template = Template.of(Selector("model", "small", "large"))
        reading = template.read({"question": "why?"}, {"choice": "large"})
        assert (reading.output, reading.label) == ("", "choice=large")
        assert template.choices() == ("choice=small", "choice=large")


class Echo(Embedder):
    dim = 2

    def __init__(self) -> None:
        self.read: list[tuple[str, str]] = []

    def embed(self, texts: Sequence[tuple[str, str]]) -> Any:
        self.read += texts
        return np.array([[len(a), len(b)] for a, b in texts], np.float32).reshape(len(texts), 2)

    def store_in(self, path: Path) -> None:
        pass


class TestFeatures:
    def test_columns_and_values_by_hand(self) -> None:
        template = replace(Template.of(Function("weigh", weigh)), description="")
        readings = [
            template.read({"x": 3.0}, {"output": 4.0}),
            template.read({"x": 1.0}, {"output": -2.0}),
        ]
        features = FeatureMap.of(template, readings, 2)
        assert features.columns == ("φ0", "φ1", "output", "output*x", "output^2")
        assert features.soft == (True, True, False, False, False)
        assert features.matrix(readings, Echo()).tolist() == [[4, 9, 4, 12, 16], [4, 10, -2, -2, 4]]

    @pytest.mark.parametrize("written", [1e300, -1e300, 10**400, 1e160])
    def test_huge_numbers_are_finite_features(self, written: float) -> None:
        template = Template.of(Function("weigh", weigh))
        readings = [template.read({"x": 3.0}, {"output": each}) for each in (written, 1.0)]
        found = FeatureMap.of(template, readings, 2).matrix(readings, Echo())
        assert np.isfinite(found @ found.T).all()

    def test_each_label_has_its_own_block_of_the_inputs_features(self) -> None:
        template = replace(Template.of(Selector("model", "small", "large")), description="")
        readings = [template.read({"q": "a?"}, {"choice": c}) for c in ("small", "large")]
        features = FeatureMap.of(template, readings, 2)
        assert features.columns[:2] == ("choice=small", "choice=large")
        assert features.matrix(readings, Echo()).tolist() == [
            [1, 0, 5, 0, 0, 0],
            [0, 1, 0, 0, 5, 0],
        ]


def loss_of(weights: Any, differences: Any, strength: float) -> float:
    margins = differences @ weights
    return float(np.logaddexp(0, -margins).sum() * strength + 0.5 * weights @ weights)


class TestHeads:
    def test_no_pair_is_judged_by_a_head_that_saw_its_input(self) -> None:
        """Each input has a feature of its own that tells its pairs apart, and nothing else does."""
        n = 12
        chosen = np.repeat(np.eye(n), 2, axis=0)
        found = fit(chosen, np.zeros((2 * n, n)), [str(i // 2) for i in range(2 * n)])
        assert np.abs(found.margins).max() == 0
        assert (
            found.head.rewards(chosen.astype(np.float32)) > found.head.rewards(np.zeros((1, n)))[0]
        ).all()

    def test_d8_gaps_that_are_all_equal_weigh_the_same(self) -> None:
        """D8: a normalization of equal gaps by their range was 0/0, and every weight became NaN."""
        rng = np.random.default_rng(0)
        chosen, rejected = rng.normal(1, 1, (20, 2)), rng.normal(0, 1, (20, 2))
        groups = [str(i) for i in range(20)]
        plain, equal = (
            fit(chosen, rejected, groups),
            fit(chosen, rejected, groups, recency=[0.5] * 20),
        )
        assert equal.head.weights == pytest.approx(plain.head.weights)

    @pytest.mark.parametrize(
        ("recency", "weights"),
        [(None, [1.0, 1.0, 1.0, 1.0]), ([1.0, 0.5, 0.25, 0.25], [2.0, 1.0, 0.5, 0.5])],
    )
    def test_the_weighted_loss_by_hand(
        self, recency: list[float] | None, weights: list[float]
    ) -> None:
        """The head minimizes C Σ w log(1 + exp(-d·b)) + |b|²/2, with the mean of w equal to 1."""
        rng = np.random.default_rng(0)
        chosen, rejected = rng.normal(0.5, 1, (40, 2)), rng.normal(0, 1, (40, 2))
        groups = [str(i) for i in range(40)]
        found = fit(chosen, rejected, groups, recency=recency and recency * 10)
        differences = (chosen - rejected) / np.vstack([chosen, rejected]).std(0)
        heavy = np.array(weights * 10)

        def loss(b: Any) -> float:
            return float(found.strength * heavy @ np.logaddexp(0, -differences @ b) + b @ b / 2)

        best = optimize.minimize(loss, np.zeros(2), tol=1e-12).x
        assert found.head.weights == pytest.approx(best, abs=2e-3)

    @staticmethod
    def chosen_by_loss(differences: Any, fold: Any, tested: Sequence[int]) -> float:
        """Return the strength with the lowest loss on some folds, each by the head fitted to the others."""
        losses = {}
        for strength in STRENGTHS:
            found = []
            for number in tested:
                others = differences[np.isin(fold, tested) & (fold != number)]
                head = optimize.minimize(loss_of, np.zeros(2), (others, strength), tol=1e-12).x
                found += np.logaddexp(0, -differences[fold == number] @ head).tolist()
            losses[strength] = sum(found) / len(found)
        return min(losses, key=lambda strength: losses[strength])

    def test_margins_are_those_of_heads_fitted_and_regularized_on_the_other_folds(self) -> None:
        """The regularization was chosen by the loss on the same folds that the accuracy was reported of."""
        rng = np.random.default_rng(1)
        chosen, rejected = rng.normal(0.5, 1, (30, 2)), rng.normal(0, 1, (30, 2))
        names = [str(i // 2) for i in range(30)]
        found, fold = fit(chosen, rejected, names), folds(names, 0)
        differences = (chosen - rejected) / np.vstack([chosen, rejected]).std(0)
        selected = set()
        for number in set(fold.tolist()):
            others = [other for other in range(5) if other != number]
            strength = self.chosen_by_loss(differences, fold, others)
            selected.add(strength)
            best = optimize.minimize(
                loss_of, np.zeros(2), (differences[fold != number], strength), tol=1e-12
            ).x
            own = differences[fold == number] @ best
            assert found.margins[fold == number] == pytest.approx(own, abs=5e-3)
        assert found.strength == self.chosen_by_loss(differences, fold, range(5))
        assert len(selected) > 1  # the choice differs between folds

    def test_forward_margins_are_those_of_heads_fitted_to_earlier_folds(self) -> None:
        rng = np.random.default_rng(1)
        chosen, rejected = rng.normal(0.5, 1, (30, 2)), rng.normal(0, 1, (30, 2))
        names = [str(i // 2) for i in range(30)]
        found, fold = fit(chosen, rejected, names, tested=True).forward, folds(names, 0)
        differences = (chosen - rejected) / np.vstack([chosen, rejected]).std(0)
        assert np.isnan(found[fold == 0]).all()
        for number in range(1, 5):
            past = range(number)
            strength = 0.1 if number == 1 else self.chosen_by_loss(differences, fold, past)
            best = optimize.minimize(
                loss_of, np.zeros(2), (differences[fold < number], strength), tol=1e-12
            ).x
            assert found[fold == number] == pytest.approx(
                differences[fold == number] @ best, abs=5e-3
            )

    def test_the_slope_by_hand(self) -> None:
        """One margin of 2 right with weight 3 and wrong with weight 1: odds of 3 to 1."""
        margins = np.array([2.0, -2.0])
        assert slope(margins, np.array([3.0, 1.0])) * 2.0 == pytest.approx(math.log(3), rel=1e-2)
        assert slope(margins) == pytest.approx(0.0, abs=1e-6)
        assert slope(np.zeros(0)) == slope(np.zeros(3)) == 0.0

    def test_few_inputs_are_refused(self) -> None:
        rows = np.ones((10, 1))
        with pytest.raises(DataError, match="3 inputs are too few to train a reward"):
            fit(rows, 0 * rows, ["a", "b", "c"] * 3 + ["a"])
        assert len(fit(rows, 0 * rows, ["a", "b", "c", "d"] * 2 + ["a", "b"]).margins) == 10

    def test_numbers_that_are_none_are_refused(self) -> None:
        rows = np.ones((8, 1))
        with pytest.raises(DataError, match="not finite"):
            fit(rows * np.nan, rows, [str(i) for i in range(8)])


class TestAlignment:
    def test_reliability_by_hand(self) -> None:
        """Ten pairs stated at σ(1): eight right."""
        margins = [1.0] * 8 + [-1.0] * 2
        (one,) = reliability(margins, 1.0, bins=1)
        assert one.stated == pytest.approx(1 / (1 + math.exp(-1)))
        assert (one.observed, one.pairs) == (0.8, 10)
        assert calibration_error([one]) == pytest.approx(0.8 - one.stated)
        assert math.isnan(calibration_error([]))


class TestBuffer:
    def records(self, system: System) -> list[dict[str, Any]]:
        buffer = PairBuffer(system.identity)
        first = buffer.add([draw("e1", "Lima", {"a": [1.0], "b": [0.0]})], 1)
        return first + buffer.add([draw("e2", "Rome", {"a": [0.2], "b": [0.7], "c": [0.7]})], 2)

    def test_what_is_written_is_read(self) -> None:
        system = small()
        records = json.loads(json.dumps(self.records(system)))
        found = PairBuffer.read(records, system, Sampling())
        assert [
            (p.chosen["output"], p.rejected["output"], p.gap, i) for p, i in found.pairs("short")
        ] == [
            ("a", "b", 1.0, 1),
            ("b", "a", pytest.approx(0.5), 2),
            ("c", "a", pytest.approx(0.5), 2),
        ]
        again = PairBuffer(system.identity)
        again.entries = list(found.entries)
        assert again.digest == found.digest

    def test_gap_is_the_mean_over_the_latest_pairs_by_hand(self) -> None:
        """The gaps of the second draw are 0.5, 0.5 and 0; an input with one output counts as 0."""
        buffer = PairBuffer.read(self.records(small()), small(), Sampling())
        assert buffer.gap("short") == pytest.approx(1 / 3)
        buffer.add([draw("e3", "Oslo", {"a": []})], 2)
        assert buffer.gap("short") == pytest.approx(1 / 6)
        assert buffer.gap("other") is None

    def test_a_tie_has_no_gap_and_single_runs_measure_none(self) -> None:
        """Differences of 0.9, -0.1, 0.2 and -0.4 are noise; one run of each output measures nothing."""
        noisy = draw(
            "e1", "Lima", {"a": [1.0, 0.1, 0.5, 0.3], "b": [0.1, 0.2, 0.3, 0.7]}, certain=False
        )
        single = draw("e2", "Rome", {"a": [1.0], "b": [0.0]}, certain=False)
        buffer = PairBuffer("system")
        buffer.add([single], 1)
        assert buffer.gap("short") is None
        buffer.add([noisy], 1)
        assert buffer.gap("short") == 0.0
        buffer.add([single], 2)
        assert buffer.gap("short") == 0.0


def filled(outcome: Any, inputs: int = 12, iteration: int = 1) -> PairBuffer:
    """A buffer of `inputs` draws; ``outcome`` gives the reward of an output of an input."""
    buffer = PairBuffer(small().identity)
    words = ["one", "one two", "one two three"]
    for i in range(inputs):
        text = f"text number {i}"
        buffer.add([draw(f"e{i}", text, {w: [outcome(text, w)] for w in words})], iteration)
    return buffer


def shortest(text: str, output: str) -> float:
    return 1.0 / len(output.split())


class TestLearning:
    def test_what_the_metric_prefers_is_learned(self) -> None:
        learned = fit_rewards(filled(shortest), small(), ["short"], NoBackbone(), "none")
        reward = learned.model.rewards_of["short"]
        assert reward.accuracy.mean == 1.0
        assert reward.accuracy.inputs == 12
        low, high = learned.model.rewards(
            "short",
            [({"text": "other"}, {"output": "a b c d"}), ({"text": "other"}, {"output": "a"})],
        )
        assert high > low

    @pytest.mark.parametrize(
        ("buffer", "reason"),
        [
            (PairBuffer(small().identity), "never called"),
            (filled(lambda text, output: 0.5), "all its outputs led to the same score"),
            (filled(shortest, inputs=MIN_INPUTS - 1), f"only {MIN_INPUTS - 1} inputs"),
        ],
    )
    def test_why_there_is_no_reward(self, buffer: PairBuffer, reason: str) -> None:
        learned = fit_rewards(buffer, small(), ["short"], NoBackbone(), "none")
        assert not learned.model.rewards_of
        assert reason in learned.missing["short"]

    def test_d12_equal_inputs_are_on_one_side(self) -> None:
        """D12: a split by pair had one input on both sides; here even two examples with one input are one."""
        buffer = PairBuffer(small().identity)
        for i in range(8):
            buffer.add([draw(f"e{i}", f"text {i % 4}", {"a": [1.0], "b": [0.0]})], 1)
        texts = component_pairs(buffer, Template.of(small().components["short"]))
        assert texts.inputs == ("e0", "e1", "e2", "e3") * 2

    def test_held_out_inputs_never_change_sides(self) -> None:
        names = [f"e{i}" for i in range(400)]
        roles = Counter(role_of(name) for name in names)
        assert 0.15 < roles["judge"] / 400 < 0.35
        assert 0.15 < roles["tune"] / 400 < 0.35
        before = component_pairs(
            filled(shortest, 8), Template.of(small().components["short"]), held_out=True
        )
        after = component_pairs(
            filled(shortest, 12), Template.of(small().components["short"]), held_out=True
        )
        assert after.roles[: len(before.roles)] == before.roles


class TestCheckpoint:
    def model(self) -> RewardModel:
        return fit_rewards(filled(shortest), small(), ["short"], NoBackbone(), "none").model

    def test_a_saved_model_scores_the_same(self, tmp_path: Path) -> None:
        model = self.model()
        model.save(tmp_path / "m")
        again = load(tmp_path / "m")
        calls = [({"text": "x"}, {"output": y}) for y in ("a", "a b", "a b c d")]
        assert again.rewards("short", calls).tolist() == model.rewards("short", calls).tolist()
        assert again.rewards_of["short"].accuracy == model.rewards_of["short"].accuracy
        assert again.data == model.data
        assert {path.name for path in (tmp_path / "m").iterdir()} == {
            "card.json",
            "heads.safetensors",
        }

    @pytest.mark.parametrize(
        "kind", ["missing", "no card", "torn card", "pickle", "wrong shape", "format"]
    )
    def test_damage_gets_a_clear_error(self, tmp_path: Path, kind: str) -> None:
        """Nothing in it is executed."""
        folder = tmp_path / "m"
        if kind != "missing":
            self.model().save(folder)
        card = folder / "card.json"
        if kind == "no card":
            card.unlink()
        elif kind == "torn card":
            card.write_text(card.read_text()[:50])
        elif kind == "pickle":
            ran = f"cos\nsystem\n(S'touch {tmp_path}/ran'\ntR."
            (folder / "heads.safetensors").write_bytes(ran.encode())
            found = {k: v for k, v in json.loads(card.read_text()).items() if k != "checksum"}
            found["heads"] = hashlib.sha256(ran.encode()).hexdigest()
            card.write_text(json.dumps(found))
        elif kind == "wrong shape":
            data = json.loads(card.read_text())
            data["components"]["short"]["features"]["numbers"] = []
            card.write_text(json.dumps(data))
        elif kind == "format":
            card.write_text(json.dumps({**json.loads(card.read_text()), "format": 99}))
        with pytest.raises(ConfigurationError, match=str(folder)):
            load(folder)
        assert not (tmp_path / "ran").exists()

    @pytest.mark.parametrize(
        ("place", "value"),
        [
            (("adapter",), "0" * 64),
            (("max_length",), -1),
            (("components",), []),
            (("components", "short", "slope"), float("nan")),
            (("components", "short", "accuracy", "pairs"), "many"),
            (("components", "short", "accuracy", "inputs"), -1),
            (("components", "short", "features", "numbers", 0), ["a"]),
            (("components", "short", "features", "dim"), 10**30),
            (("components", "short", "features", "labels"), ["a"] * 5),
            (("components", "short", "features", "label_fields"), {"a": [{}]}),
        ],
    )
    def test_a_card_of_another_form_gets_a_clear_error(
        self, tmp_path: Path, place: tuple[Any, ...], value: object
    ) -> None:
        """Regression test: they ended with a traceback, or filled the memory with names of columns."""
        self.model().save(tmp_path)
        card = json.loads((tmp_path / "card.json").read_text())
        del card["checksum"]
        part = card
        for name in place[:-1]:
            part = part[name]
        part[place[-1]] = value
        (tmp_path / "card.json").write_text(json.dumps(card))
        with pytest.raises(ConfigurationError, match="is a damaged reward checkpoint"):
            load(tmp_path)

    @pytest.mark.parametrize(
        ("part", "change"),
        [
            ("weights", lambda head: np.tile(head, (len(head), 1))),
            ("center", lambda head: head[:1]),
            ("scale", np.zeros_like),
            ("weights", lambda head: head * np.nan),
            ("margins", lambda head: head.reshape(1, -1)),
        ],
    )
    def test_a_head_of_another_form_gets_a_clear_error(
        self, tmp_path: Path, part: str, change: Callable[[Any], Any]
    ) -> None:
        self.model().save(tmp_path)
        path = tmp_path / "heads.safetensors"
        tensors = safetensors.numpy.load(path.read_bytes())
        tensors[f"short.{part}"] = np.ascontiguousarray(change(tensors[f"short.{part}"]))
        path.write_bytes(safetensors.numpy.save(tensors))
        card = json.loads((tmp_path / "card.json").read_text())
        (tmp_path / "card.json").write_text(
            json.dumps({k: v for k, v in card.items() if k not in ("heads", "checksum")})
        )
        with pytest.raises(ConfigurationError, match="is a damaged reward checkpoint"):
            load(tmp_path)

    def test_a_component_without_reward_is_named(self) -> None:
        with pytest.raises(DeclarationError, match="no local reward for component 'long'"):
            self.model().rewards("long", [])

    def test_rewards_are_log_odds(self) -> None:
        model = self.model()
        steep = replace(model.rewards_of["short"], slope=2 * model.rewards_of["short"].slope)
        twice = RewardModel("none", NoBackbone(), {"short": steep})
        calls = [({"text": "x"}, {"output": "a"})]
        assert twice.rewards("short", calls)[0] == pytest.approx(
            2 * model.rewards("short", calls)[0]
        )
