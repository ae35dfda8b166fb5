"""Behaviour cloning: outputs are scored by the preferred output of the same input, and nothing else changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compound import Choice, Dataset, Example, Function, Input, OptimizeSettings, Result, System
from compound.api.optimize import run_optimization
from compound.metrics import custom
from compound.optimization.runs.directory import read_json
from compound.optimization.settings.base import BudgetSettings
from compound.optimizers.optimas.local import NO_TARGETS, Cloning, Imitation, Target, targets_of
from compound.optimizers.optimas.methods import HBCSettings
from compound.optimizers.search.sources import CandidateSources
from compound.rewards.buffer import PairBuffer, input_key
from compound.rewards.candidates import Candidate, Sampling
from compound.rewards.features import Embedder
from compound.rewards.pairs import Draw
from compound.rewards.settings import PairSettings
from optimas_settings import local_search, offline_rewards, optimas

pytestmark = pytest.mark.usefixtures("without_reports")

WORDS = ("red", "green", "blue", "big", "small")


class Words(Embedder):
    dim = len(WORDS)

    def __init__(self) -> None:
        self.read: list[tuple[str, str]] = []

    def embed(self, texts: Sequence[tuple[str, str]]) -> Any:
        self.read += texts
        return np.array([[text.split().count(w) for w in WORDS] for _, text in texts], np.float32)


def key(**inputs: Any) -> str:
    return input_key(Draw("", "", "", "", inputs, ()))


def imitation(**targets: tuple[Any, float]) -> Imitation:
    """What to write for some ``x``, each with its gap."""
    found = {key(x=x): Target(({"y": y},), gap, "e") for x, (y, gap) in targets.items()}
    return Imitation(found, frozenset(), Words())


class TestImitation:
    def test_similarity_is_the_cosine_times_the_gap(self) -> None:
        scores = imitation(a=("red big", 0.6), b=("blue", 0.2))
        calls = [
            ({"x": x}, {"y": y})
            for x, y in [("a", "red"), ("a", "green"), ("b", "blue"), ("c", "blue")]
        ]
        assert scores.rewards("any", calls) == pytest.approx([1.5 / np.sqrt(2), 0.0, 0.5, 0.0])

    def test_the_nearest_of_equally_good_outputs_counts(self) -> None:
        target = Target(({"y": "red"}, {"y": "blue"}), 1.0, "e")
        scores = Imitation({key(x="a"): target}, frozenset(), Words())
        assert scores.rewards("any", [({"x": "a"}, {"y": "blue blue"})]).tolist() == [1]


class TestTargets:
    def draw(self, x: str, outcomes: Mapping[str, float]) -> Draw:
        found = tuple(Candidate({"y": y}, (r,), certain=True) for y, r in outcomes.items())
        return Draw("any", "any", f"e-{x}", "digest", {"x": x}, found)

    def test_are_the_best_outputs_with_the_gap_to_the_worst(self) -> None:
        buffer = PairBuffer("system", Sampling())
        draws = [
            self.draw("a", {"p": 0.2, "q": 0.9, "r": 0.5}),
            self.draw("b", {"p": 1.0, "q": 0.5, "r": 1.0}),
        ]
        buffer.add([*draws, self.draw("c", {"p": 0.5, "q": 0.5})], 1)
        found = targets_of(buffer, "any")
        assert list(found) == [key(x="a"), key(x="b")]
        a, b = found.values()
        assert (a.preferred, a.example) == (({"y": "q"},), "e-a")
        assert a.gap == pytest.approx(0.7)
        assert b == Target(({"y": "p"}, {"y": "r"}), 0.5, "e-b")


def draft(question: str, style: str) -> str:
    return f"{style} {question}"


def weigh(draft: str, by: int) -> int:
    return by


class Kept(Function):
    cacheable = True


def system(style: str = "short", by: int = 1) -> System:
    """The best draft is plain, and the best weight 3, for every question."""
    styles = Choice("short", "plain", "long", "odd", value=style)
    drafted = Kept("drafter", draft, style=styles)(question=Input("question", str))
    weighed = Kept("weigher", weigh, by=Choice(1, 2, 3, value=by))(draft=drafted)
    return System("cloned", outputs={"draft": drafted, "weight": weighed})


STYLES = {"plain": 1.0, "short": 0.4, "long": 0.2, "odd": 0.0}


async def graded(outputs: Any, example: Example) -> float:
    style = outputs["draft"].split()[0]
    return 0.6 * STYLES[style] + 0.4 * float(outputs["weight"] == 3)


METRIC = custom(graded)


def rows(n: int, kind: str) -> list[dict[str, Any]]:
    return [{"id": f"{kind}{i}", "question": f"question {kind} {i}"} for i in range(n)]


DATA = Dataset.of(train=rows(40, "tr"), valid=rows(20, "va"), test=rows(10, "te"))
REWARDS = optimas(model="none", inputs=8, samples=3)
HBC = HBCSettings(backbone=REWARDS.backbone, pairs=PairSettings(inputs=8, samples=3))
SETTINGS = OptimizeSettings(
    method="hbc", seed=1, budget=BudgetSettings(system_runs=600), iterations=3, minibatch=4, hbc=HBC
)


def run(folder: Path, **how: Any) -> Result:
    return run_optimization(system(), DATA, METRIC, SETTINGS, run_dir=folder, **how)


class TestMethod:
    def test_finds_the_best_and_scores_no_output_by_the_metric_alone(self, tmp_path: Path) -> None:
        result = run(tmp_path / "run")
        assert dict(result.best) == {"drafter.style": "plain", "weigher.by": 3}
        assert result.test_after is not None
        assert result.test_after.mean == 1.0
        history = read_json(tmp_path / "run", "checkpoint.json")["state"]["search"]["history"]
        assert history[0]["optimizer"] == "offline"
        assert history[0]["facts"]["targets"] == {
            "drafter": 8,
            "weigher": 8,
        }  # all options are drawn
        assert all(job["facts"]["steered"] for job in history[1:])
        assert all(job["facts"]["accuracy"] == {} for job in history)
        records = (tmp_path / "run" / "memory.jsonl").read_text().splitlines()
        assert len(records) == 16
        assert all('"iteration": 1' in record or '"iteration":1' in record for record in records)

    def test_inputs_stay_those_of_the_buffer_when_the_system_changes(self, job: Any) -> None:
        """The weigher reads other drafts by now; candidates still meet the drafts it was collected with."""
        train = [Example(f"e{i}", {"question": f"question {i}"}) for i in range(20)]
        opening = job(system(), METRIC, train, share=500, minibatch=4)
        prompts = CandidateSources()
        opening.run(offline_rewards(REWARDS, prompts, Cloning))
        later = job(system("odd"), METRIC, train, share=500, minibatch=4, keys=("weigher.by",))
        later.task = replace(
            later.task, context=replace(later.task.context, memory=opening.task.context.memory)
        )
        _, proposal = later.run(local_search(REWARDS, prompts, scoring=Cloning))
        assert proposal.values == {"weigher.by": 3}
        assert proposal.facts["local_gain"] == pytest.approx(1)

    def test_a_component_with_nothing_to_imitate_is_left_as_it_is(self, job: Any) -> None:
        train = [Example(f"e{i}", {"question": f"question {i}"}) for i in range(20)]
        assignment = job(system(), METRIC, train, share=500, minibatch=4, keys=("weigher.by",))
        _, proposal = assignment.run(local_search(REWARDS, CandidateSources(), scoring=Cloning))
        assert not proposal.facts["steered"]
        assert proposal.values == {}
        assert proposal.note == NO_TARGETS
