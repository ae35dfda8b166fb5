"""Local rewards in searches: cross-fitted critics, gold features, and parts of systems."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from benchmarks.simulated.systems import Simulated
from compound import Function, Input, System
from compound.optimization.prices import estimate_prices
from compound.optimizers.search.part import part_of
from compound.rewards.buffer import Entry
from compound.rewards.candidates import Candidate
from compound.rewards.features import NoBackbone, Template
from compound.rewards.gains import GOLD, Critic, fit_critic, gold_features, read_call
from compound.rewards.heads import MIN_INPUTS
from compound.rewards.pairs import Draw


def same(x: str) -> str:
    return x


class TestGold:
    def test_relations_by_hand(self) -> None:
        found = gold_features(
            {"y": "The river Seine, in Paris"}, {"answer": ["Seine", "the Loire"]}
        )
        assert found == {
            "gold:y.answer.holds": 1.0,
            "gold:y.answer.equal": 0.0,
            "gold:y.answer.covers": 1.0,
            "gold:y.answer.f1": pytest.approx(2 * 1 * 0.25 / 1.25),
        }

    def test_numbers_are_near(self) -> None:
        found = gold_features({"y": 7}, {"answer": 4})
        assert found == {"gold:y.answer.near": -math.log1p(3), "gold:y.answer.equal": 0.0}


def entries(n: int, values: Sequence[Sequence[float]], *, certain: bool = True) -> list[Entry]:
    return [
        Entry(
            Draw(
                "b",
                "b",
                f"e{i}",
                "",
                {"a": 0.5},
                tuple(Candidate({"y": y}, (y,), certain=certain) for y in values[i]),
            ),
            1,
        )
        for i in range(n)
    ]


class TestCritic:
    TEMPLATE = Template.of(Simulated("chain").system().components["b"])

    def test_the_head_of_an_example_was_not_fitted_to_it(self) -> None:
        """Flipping the labels of one fold's examples changes the other heads, but not its own."""
        rng = np.random.default_rng(0)
        values = rng.normal(size=(20, 4)).tolist()
        right = fit_critic(entries(20, values), self.TEMPLATE, NoBackbone(), certain=True)
        flipped = entries(20, values)
        for i in range(0, 20, 5):  # fold 0
            draw = flipped[i].draw
            scores = [c.rewards for c in reversed(draw.candidates)]
            made = tuple(
                Candidate(c.outputs, r, certain=True)
                for c, r in zip(draw.candidates, scores, strict=True)
            )
            flipped[i] = Entry(Draw("b", "b", f"e{i}", "", {"a": 0.5}, made), 1)
        other = fit_critic(flipped, self.TEMPLATE, NoBackbone(), certain=True)
        assert right is not None
        assert other is not None
        readings = [read_call(self.TEMPLATE, {"a": 0.5}, {"y": y}, {}) for y in (0.0, 1.0)]
        assert right.rewards(readings, ["e0", "e5"]) == pytest.approx(
            other.rewards(readings, ["e0", "e5"])
        )
        assert right.rewards(readings, ["e1", "e6"]) != pytest.approx(
            other.rewards(readings, ["e1", "e6"])
        )

    def test_too_few_examples_give_no_critic(self) -> None:
        values = np.random.default_rng(1).normal(size=(MIN_INPUTS, 3)).tolist()
        assert (
            fit_critic(entries(MIN_INPUTS, values), self.TEMPLATE, NoBackbone(), certain=True)
            is None
        )

    def test_gold_tells_what_the_output_does_not(self) -> None:
        """Outputs are symbols; only the gold feature tells which one is right."""
        template, rng, found = Template.of(Function("f", same)), np.random.default_rng(0), []
        for i in range(30):
            answer = f"s{rng.integers(9)}"
            drawn = {f"s{rng.integers(9)}" for _ in range(3)} | {answer}
            candidates = tuple(
                Candidate(
                    {"output": y},
                    (float(y == answer),),
                    certain=True,
                    signals=gold_features({"f.output": y}, {"answer": answer}),
                )
                for y in sorted(drawn)
            )
            found.append(Entry(Draw("f", "f", f"e{i}", "", {"x": "q"}, candidates), 1))
        blind = [
            Entry(
                Draw(
                    "f",
                    "f",
                    e.draw.example,
                    "",
                    {"x": "q"},
                    tuple(Candidate(c.outputs, c.rewards, certain=True) for c in e.draw.candidates),
                ),
                1,
            )
            for e in found
        ]
        seeing, unseeing = (
            fit_critic(rows, template, NoBackbone(), certain=True) for rows in (found, blind)
        )
        assert seeing is not None
        assert np.mean(seeing.margins > 0) > 0.95
        assert unseeing is None or np.mean(unseeing.margins > 0) < 0.7
        assert any(column.startswith(GOLD) for column in seeing.features.columns)


class TestPrior:
    """Outputs are numbers of symbols; `gold` is the closeness to the gold answer."""

    TEMPLATE = Template.of(Function("f", same))

    def critic(self, n: int, better: float, score: float = 1.0) -> Critic | None:
        """Fit to draws of two outputs; the one with the closeness ``better`` has the higher score."""
        made = [
            Candidate(
                {"output": f"s{i}"},
                (score * (gold == better),),
                certain=True,
                signals={f"{GOLD}y.answer.f1": gold},
            )
            for i, gold in enumerate((1.0, 0.0))
        ]
        rows = [Entry(Draw("f", "f", f"e{i}", "", {"x": "q"}, tuple(made)), 1) for i in range(n)]
        return fit_critic(rows, self.TEMPLATE, NoBackbone(), certain=True)

    def margin(self, found: Critic | None) -> float:
        assert found is not None
        readings = [
            read_call(self.TEMPLATE, {"x": "q"}, {"output": "s5"}, {f"{GOLD}y.answer.f1": gold})
            for gold in (1.0, 0.0)
        ]
        close, far = found.rewards(readings, ["new", "new"])
        return float(close - far)

    def test_without_pairs_the_output_closer_to_the_gold_answer_is_better(self) -> None:
        """Its difference within draws is 1, the unit of rewards."""
        assert self.margin(self.critic(1, better=1.0, score=0.0)) == pytest.approx(1.0)

    def test_without_gold_features_there_is_none(self) -> None:
        rows = [
            Entry(
                Draw(
                    "b",
                    "b",
                    "e0",
                    "",
                    {"a": 0.5},
                    tuple(Candidate({"y": y}, (0.5,)) for y in (0, 1)),
                ),
                1,
            )
        ]
        assert fit_critic(rows, TestCritic.TEMPLATE, NoBackbone(), certain=True) is None


class TestPart:
    def test_it_ends_with_the_component_and_its_cheap_consequences(self) -> None:
        world = Simulated("chain", noise=0.0)
        system = world.system()
        part = part_of(system, "b", estimate_prices(system))
        assert list(part.system.nodes) == ["a", "b"]
        assert [part.weight, part.price] == pytest.approx([2 / 3, 1 / 3])

    def test_functions_that_only_read_it_run_too(self) -> None:
        first = Function("first", same)(x=Input("x", str))
        second = Function("second", same)(x=first)
        system = System("s", outputs={"z": second})
        assert part_of(system, "first", estimate_prices(system)).effects == ("second",)

    def test_it_is_bound_to_the_values_of_the_whole_system(self) -> None:
        system = Simulated("chain", noise=0.0).system()
        part = part_of(system, "a", estimate_prices(system))
        bound = part.bind({**system.configuration.to_json(), "a.option": 2, "c.option": 1})
        assert dict(bound.configuration) == {"a.option": 2}
