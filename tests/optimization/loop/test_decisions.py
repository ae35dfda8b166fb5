"""Decisions: their levels, the test that they use, and scores outside the bounds that a metric declares."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulated.relays import Relay
from compound import LLM, Example, Function, Input, System, Text
from compound.api.progress import format_event
from compound.core.errors import TransientError
from compound.metrics import custom
from compound.optimization.budget_plan import make_plan
from compound.optimization.loop.loop import OptimizationLoop
from compound.optimization.method import Job, Method, Problem, Progress, Proposal, Task
from compound.optimization.prices import estimate_prices
from compound.optimization.runs.directory import RunDirectory
from compound.optimization.runs.recorder import Recorder
from compound.optimization.runs.state import OptimizationState
from compound.optimization.settings.optimize import OptimizeSettings, make_settings
from compound.optimizers.methods import method as find_method
from compound.optimizers.scheduling import InOrder, Uniform
from compound.testing import ScriptedLM

VALID = [Example(f"v{i}", {"x": i}) for i in range(10)]
TRAIN = [Example(f"t{i}", {"x": 100 + i}) for i in range(10)]


def run(made: Problem, folder: Path) -> tuple[list[dict[str, Any]], OptimizationState]:
    """Run an optimization; return its events and final state."""
    recorder = Recorder(RunDirectory.create(folder / "run", "", {}))
    try:
        asyncio.run(OptimizationLoop(made, recorder).run())
    finally:
        recorder.close()
    lines = (folder / "run" / "events.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], recorder.state


def kinds(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == kind]


@dataclass
class Sometimes:
    """Proposes a better label in some rounds, and nothing in the others."""

    proposes: list[bool]
    rounds: list[int] = field(default_factory=list)

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        self.rounds.append(task.seed)
        useful = self.proposes[len(self.rounds) - 1]
        yield Proposal({"step.label": f"0.0 {len(self.rounds)}"} if useful else {})


def score(x: int, label: str) -> float:
    """Return the number that a label states for train examples, or for all others."""
    valid, _, train = label.partition(" ")
    return float(train or valid) if x >= 100 else float(valid)


def labelled(
    optimizer: Any,
    values: Mapping[str, Any],
    *,
    start: str = "0.5",
    jobs_each: int | None = None,
    decisions: int | None = None,
    bounds: Any = (0, 1),
) -> Problem:
    step = Function("step", score, label=Text(start))
    system = System("labelled", outputs={"answer": step(x=Input("x", int))})
    metric = custom(lambda outputs, example: outputs["answer"], "stars", bounds=bounds)
    settings = OptimizeSettings.model_validate({"concurrency": 1, "minibatch": 1, **values})
    jobs = [Job("named", ("step.label",))]
    method = Method(
        "named",
        {"named": optimizer},
        jobs,
        InOrder() if jobs_each else Uniform(),
        jobs_each=jobs_each,
        decisions=decisions,
    )
    return Problem(system, TRAIN, VALID, [], metric, settings, method, {})


class TestLevels:
    @pytest.mark.parametrize(
        ("proposes", "levels"),
        [
            ([True, True, True], [0.02, 0.02, 0.02]),
            ([False, True, True], [0.03, 0.03]),
            ([True, False, True], [0.02, 0.04]),
            ([False, False, True], [0.06]),
        ],
    )
    def test_a_decision_without_a_proposal_leaves_its_level_to_the_later_ones(
        self, proposes: list[bool], levels: list[float], tmp_path: Path
    ) -> None:
        made = labelled(
            Sometimes(proposes), {"alpha": 0.06, "iterations": 3}, jobs_each=1, decisions=3
        )
        events, state = run(made, tmp_path)
        found = [event["level"] for event in kinds(events, "decision")]
        assert found == pytest.approx(levels)
        assert sum(found) <= 0.06 * (1 + 1e-12)
        assert state.search is not None
        assert state.search.skipped == [i + 1 for i, useful in enumerate(proposes) if not useful]


@dataclass(frozen=True)
class Named:
    """Scores a label on train examples, and proposes it."""

    label: str

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        values = {"step.label": self.label}
        await task.scorer.score([values], task.train[:2])
        yield Proposal(values)


class TestBounds:
    """A score outside the declared bounds: named, kept, and not relied on."""

    def test_scores_within_the_bounds_use_the_bounded_test(self, tmp_path: Path) -> None:
        events, state = run(labelled(Named("0.9"), {"iterations": 1}), tmp_path)
        (decision,) = kinds(events, "decision")
        # ten gains of 0.4: P(0.4 Gamma(10) <= Gamma(1)) = (1 / 1.4)**10
        assert (decision["test"], decision["p"]) == ("bounded mean", pytest.approx(1.4**-10))
        assert (decision["accepted"], state.bounds_violation) == (True, "")

    @pytest.mark.parametrize("label", ["1.5", "0.9 7"], ids=["on validation", "on train"])
    def test_a_score_outside_the_bounds_changes_the_test(self, label: str, tmp_path: Path) -> None:
        events, state = run(labelled(Named(label), {"iterations": 1}), tmp_path)
        first = "7 on example 't0'" if " " in label else "1.5 on example 't0'"
        violation = f"metric 'stars' returned {first}, outside its declared bounds [0, 1]"
        assert state.bounds_violation == violation
        (note,) = kinds(events, "note")
        assert note["note"].startswith(
            f"{violation}; decisions use the test for scores of unknown range"
        )
        (decision,) = kinds(events, "decision")
        assert (decision["test"], decision["p"]) == ("sign flips and t", 2**-10)

    def test_a_start_outside_the_bounds_is_said_at_the_start(self, tmp_path: Path) -> None:
        events, _ = run(labelled(Named("1.7"), {"iterations": 2}, start="1.5"), tmp_path)
        assert [event["event"] for event in events[:2]] == ["start", "note"]
        assert "returned 1.5 on example 'v0'" in events[1]["note"]
        assert len(kinds(events, "note")) == 1  # once, although every score is outside
        assert {event["test"] for event in kinds(events, "decision")} == {"sign flips and t"}


class TestLostRuns:
    """An overloaded server during one of the two evaluations of a decision."""

    def outcome(
        self, folder: Path, evaluations: Sequence[int], proposed: str
    ) -> tuple[list[dict[str, Any]], OptimizationState]:
        """Run a decision in which half of the runs of some evaluations are lost."""
        seen: Counter[str] = Counter()

        def stars(outputs: Any, example: Example) -> float:
            seen[example.id] += 1
            if example.id in ("v0", "v2", "v4", "v6", "v8") and seen[example.id] in evaluations:
                raise TransientError("overloaded")
            return float(outputs["answer"])

        made = labelled(Named(proposed), {"iterations": 1, "alpha": 0.1}, start="0.7")
        return run(replace(made, metric=custom(stars, "stars", bounds=(0, 1))), folder)

    def test_lost_runs_of_the_incumbent_are_no_evidence_for_a_change(self, tmp_path: Path) -> None:
        """Regression test: five gains of 0.7 by lost runs had p = (1 / 1.7)**5 = 0.07, and were accepted."""
        events, _ = self.outcome(tmp_path, [1, 2], "0.7 same")
        (decision,) = kinds(events, "decision")
        assert (decision["accepted"], decision["p"]) == (False, pytest.approx(1.0))
        assert (decision["before"]["failed"], decision["lost"]) == (5, 5)
        assert format_event(decision).endswith(
            " (5 examples lost to transient failures before the change)"
        )

    def test_lost_runs_of_the_incumbent_have_a_second_chance(self, tmp_path: Path) -> None:
        events, _ = self.outcome(tmp_path, [1], "0.7 same")
        (decision,) = kinds(events, "decision")
        assert (decision["before"]["failed"], decision["gain"]["mean"]) == (0, 0.0)
        assert "lost" not in decision

    def test_lost_runs_of_the_change_count_against_it(self, tmp_path: Path) -> None:
        """A change may cause timeouts; without them, ten gains of 0.3 would have a p-value of 0.07."""
        events, _ = self.outcome(tmp_path, [2], "1")
        (decision,) = kinds(events, "decision")
        assert decision["after"]["failed"] == 5
        assert decision["p"] > 0.9
        assert "lost" not in decision


def test_failed_runs_of_the_incumbent_are_not_repeated(tmp_path: Path) -> None:
    """Regression test: they were, at a cost that was not reserved, and the change was dropped."""
    runs: Counter[tuple[int, str]] = Counter()

    def answer(x: int, label: str) -> float:
        runs[x, label] += 1
        if label == "0.2" and x < 4:
            raise ValueError("no answer")
        return float(label)

    step = Function("step", answer, label=Text("0.2"))
    system = System("failing", outputs={"answer": step(x=Input("x", int))})
    made = labelled(Named("0.9"), {"iterations": 1, "budget": {"system_runs": 34}})
    events, _ = run(replace(made, system=system), tmp_path)
    (decision,) = kinds(events, "decision")
    assert (decision["accepted"], decision["before"]["failed"]) == (True, 4)
    assert [runs[x, "0.2"] for x in range(10)] == [1] * 10


@dataclass(frozen=True)
class Unseen:
    """Proposes a prompt that it has not run."""

    prompt: str

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        yield Proposal({"step.prompt": self.prompt})


@pytest.mark.parametrize(("budget", "covered"), [(1000, 10), (700, 5), (650, 0), (400, 0)])
def test_a_change_is_decided_on_the_examples_that_the_budget_covers(
    budget: int, covered: int, tmp_path: Path
) -> None:
    """Regression test: a longer prompt cost more than was reserved, and was dropped without a decision."""
    lm = ScriptedLM(lambda message: "0.9" if "long" in message else "0.2")
    step = LLM("step", Text("Rate."), lm="lm")
    system = System("costly", outputs={"answer": step(x=Input("x", int))}, lm="lm")
    metric = custom(lambda outputs, example: float(outputs["answer"]), "stars", bounds=(0, 1))
    made = labelled(Unseen("A long prompt. " * 15), {"iterations": 1, "budget": {"tokens": budget}})
    method = replace(made.method, jobs=[Job("named", ("step.prompt",))])
    made = replace(made, system=system, metric=metric, method=method, engines={"lm": lm})
    events, state = run(made, tmp_path)
    (decision,) = kinds(events, "decision")
    assert state.search is not None
    if covered == 10:
        assert "note" not in decision
    elif covered:
        assert decision["note"] == f"the budget covered {covered} of 10 validation examples"
        assert "could raise the tokens" in state.search.stopped
        assert format_event(decision).endswith(f"; {decision['note']}")
    else:
        assert decision["note"] == "the budget was exhausted before the decision"
    assert decision["accepted"] == bool(covered)
    assert decision.get("gain", {"mean": 0.7})["mean"] == pytest.approx(0.7)
    assert decision.get("after", {"n": 0})["n"] == covered


class TestHighScores:
    """Scores so high that even a perfect configuration could not be accepted."""

    def test_the_search_ends_before_its_first_job(self, tmp_path: Path) -> None:
        events, state = run(
            labelled(Named("1"), {"iterations": 1, "accept": "supported"}, start="0.7"), tmp_path
        )
        # ten gains of 0.3: P(0.3 Gamma(10) <= Gamma(1)) = (1 / 1.3)**10 = 0.073, and (1 / 1.3)**20
        # = 0.005
        reason = (
            "no change can be accepted: if all 10 validation examples scored 1, p would be 0.073, above the "
            "level 0.05; about 20 such examples would do"
        )
        assert [event["event"] for event in events[:2]] == ["start", "note"]
        assert events[1]["note"] == f"the search ends: {reason}"
        assert kinds(events, "job") == kinds(events, "decision") == []
        assert state.search is not None
        assert state.search.stopped == reason

    def test_perfect_scores_cannot_rise_with_any_number_of_examples(self, tmp_path: Path) -> None:
        for accept, reason in (
            (
                "supported",
                "no change can be accepted: if all 10 validation examples scored 1, p would be 1, "
                "above the level 0.05",
            ),
            ("best", "no change can score higher: all 10 validation examples score 1"),
        ):
            made = labelled(Named("1"), {"iterations": 1, "accept": accept}, start="1")
            events, _ = run(made, tmp_path / accept)
            (note,) = kinds(events, "note")
            assert note["note"] == f"the search ends: {reason}"

    def test_unknown_bounds_end_nothing(self, tmp_path: Path) -> None:
        events, state = run(
            labelled(Named("1"), {"iterations": 1}, start="0.99", bounds=None), tmp_path
        )
        (decision,) = kinds(events, "decision")
        assert (decision["accepted"], decision["test"]) == (True, "sign flips and t")
        assert (state.bounds_violation, kinds(events, "note")) == ("", [])


def rated(x: int, label: str) -> float:
    """Return the number that a label states for an example; 0.5 beyond its numbers."""
    numbers = label.split()
    return float(numbers[x]) if x < len(numbers) else 0.5


BETTER, UNCLEAR, WORSE = "1 " * 10, "1 1 1 1 1 1 0 0 0 0.5 ", "0 " * 10
START = "0.5 " * 30


@dataclass
class Each:
    """Proposes labels one after another, after runs of the incumbent."""

    labels: list[str]

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        await task.scorer.score([{}], task.train)
        yield Proposal({"step.label": self.labels.pop(0)})


def judged(
    *labels: str, further: int = 0, start: str = START, lowest: float = 0.0, **values: Any
) -> Problem:
    """A problem whose labels state the scores of ten validation examples, and of further ones."""
    step = Function("step", rated, label=Text(start))
    system = System("judged", outputs={"answer": step(x=Input("x", int))})
    metric = custom(lambda outputs, example: outputs["answer"], "stars", bounds=(lowest, 1))
    given = {"concurrency": 1, "minibatch": 1, "iterations": len(labels), **values}
    settings = OptimizeSettings.model_validate(given)
    method = Method(
        "each",
        {"each": Each([*labels])},
        [Job("each", ("step.label",))],
        InOrder(),
        jobs_each=1,
        decisions=len(labels),
    )
    more = [Example(f"f{i}", {"x": 10 + i}) for i in range(further)]
    return Problem(system, TRAIN, VALID, [], metric, settings, method, {}, further=more)


class TestVerdicts:
    @pytest.mark.parametrize("accept", ["best", "supported"])
    def test_a_change_that_scores_higher_is_promising(self, accept: str, tmp_path: Path) -> None:
        """Six examples gain a half, three lose it: 0.15 on average, and nothing that a test supports."""
        events, state = run(judged(UNCLEAR, accept=accept), tmp_path)
        (decision,) = kinds(events, "decision")
        assert (decision["verdict"], decision["accepted"]) == ("promising", accept == "best")
        assert 0.8 < decision["probability"] < 0.95
        assert 30 < decision["examples"] < 100
        assert state.search is not None
        assert state.search.supported == {"step.label": START}
        assert state.search.promising == {"step.label": UNCLEAR}
        assert state.search.best == {"step.label": UNCLEAR if accept == "best" else START}

    @pytest.mark.parametrize("accept", ["best", "supported"])
    def test_where_nothing_gains_the_result_is_the_start(self, accept: str, tmp_path: Path) -> None:
        events, state = run(judged(WORSE, accept=accept), tmp_path)
        (decision,) = kinds(events, "decision")
        assert (decision["verdict"], decision["accepted"]) == ("rejected", False)
        assert state.search is not None
        assert (state.search.best, state.search.promising) == ({"step.label": START}, None)

    @pytest.mark.parametrize(
        ("label", "margin", "accept", "verdict", "accepted"),
        [
            # losses of 0.05 below a margin of 0.3: P(0.475 (1 - Beta) <= 0.35) = (0.35 / 0.475)**10
            # = 0.047
            ("0.45 ", 0.3, "supported", "supported", True),
            ("0.45 ", 0.29, "supported", "promising", False),  # (0.355 / 0.475)**10 = 0.054
            ("0.45 ", 0.29, "best", "promising", True),
            ("0.45 ", 0.05, "best", "rejected", False),
            ("0.45 ", 0.0, "best", "rejected", False),
        ],
    )
    def test_a_loss_within_the_margin_of_a_job_is_accepted(
        self, label: str, margin: float, accept: str, verdict: str, accepted: bool, tmp_path: Path
    ) -> None:
        made = judged(label * 10, accept=accept)
        jobs = [replace(job, margin=margin) for job in made.method.jobs]
        events, state = run(replace(made, method=replace(made.method, jobs=jobs)), tmp_path)
        (decision,) = kinds(events, "decision")
        assert (decision["verdict"], decision["accepted"]) == (verdict, accepted)
        assert decision.get("margin", 0.0) == margin
        if margin >= 0.29:
            assert decision["p"] == pytest.approx(((1 - margin) / 2 / 0.475) ** 10)
        assert state.search is not None
        assert state.search.best == {"step.label": label * 10 if accepted else START}
        assert ("no loss above" in format_event(decision)) == bool(margin)

    def test_every_decision_tests_against_what_was_supported_last(self, tmp_path: Path) -> None:
        """A promising change is kept, but it is no evidence for a later one, which must beat the start."""
        events, state = run(judged(UNCLEAR, BETTER), tmp_path)
        first, second = kinds(events, "decision")
        assert (first["verdict"], second["verdict"]) == ("promising", "supported")
        assert second["before"]["mean"] == first["before"]["mean"] == 0.5
        assert second["p"] == pytest.approx(1.5**-10)
        assert state.search is not None
        assert state.search.best == state.search.supported == {"step.label": BETTER}

    def test_the_best_one_stays_if_a_later_one_scores_lower(self, tmp_path: Path) -> None:
        """Ten times 0.6 is supported by no test either, and scores less than 0.65 on average."""
        events, state = run(judged(UNCLEAR, "0.6 " * 10), tmp_path)
        assert [event["accepted"] for event in kinds(events, "decision")] == [True, False]
        assert state.search is not None
        assert state.search.best == {"step.label": UNCLEAR}

    def test_a_sum_that_differs_by_rounding_is_no_gain(self, tmp_path: Path) -> None:
        """As much is gained as lost, but the sum of the floats is above 0."""
        label, start = (
            "0.6 0.7 0.9 0.9 0.1 0.8 0.6 0.3 0.8 0.9",
            "0.9 0.9 0.8 0.1 0.3 0.6 0.6 0.8 0.7 0.9",
        )
        gains = [
            float(new) - float(old) for new, old in zip(label.split(), start.split(), strict=True)
        ]
        assert 0 < sum(gains) < 1e-9
        events, _ = run(judged(label, start=start), tmp_path)
        (decision,) = kinds(events, "decision")
        assert (decision["verdict"], decision["accepted"]) == ("rejected", False)

    def test_a_promising_one_is_forgotten_once_a_supported_is_better(self, tmp_path: Path) -> None:
        _, state = run(judged(UNCLEAR, BETTER, accept="supported"), tmp_path)
        assert state.search is not None
        assert (state.search.promising, state.search.promising_score) == (None, None)


class TestLooks:
    """A second look at further examples where the first one does not decide."""

    def test_it_joins_both_sets_at_the_rest_of_the_level(self, tmp_path: Path) -> None:
        events, _ = run(judged(UNCLEAR + BETTER, further=20), tmp_path)
        (decision,) = kinds(events, "decision")
        assert (decision["looks"], decision["level"]) == (2, pytest.approx(0.02))
        assert decision["after"]["n"] == 20  # as many further ones as the split has
        assert decision["after"]["mean"] == pytest.approx((6.5 + 10) / 20)
        assert decision["verdict"] == "supported"

    @pytest.mark.parametrize(("label", "verdict"), [(BETTER, "supported"), (WORSE, "rejected")])
    def test_a_clear_first_look_needs_none(self, label: str, verdict: str, tmp_path: Path) -> None:
        events, _ = run(judged(label, further=20), tmp_path)
        (decision,) = kinds(events, "decision")
        assert (decision["looks"], decision["level"]) == (1, pytest.approx(0.03))
        assert (decision["after"]["n"], decision["verdict"]) == (10, verdict)

    @pytest.mark.parametrize(("runs", "looks"), [(None, 2), (80, 2), (44, 1)])
    def test_there_is_none_that_the_budget_does_not_cover(
        self, runs: int | None, looks: int, tmp_path: Path
    ) -> None:
        """Then the first one has the whole level."""
        budget = {} if runs is None else {"system_runs": runs}
        events, _ = run(judged(UNCLEAR, further=20, budget=budget), tmp_path)
        (decision,) = kinds(events, "decision")
        assert decision["looks"] == looks
        assert decision["level"] == pytest.approx(0.05 if looks == 1 else 0.02)

    def test_too_few_further_examples_are_not_worth_some_level(self, tmp_path: Path) -> None:
        events, _ = run(judged(UNCLEAR, further=4), tmp_path)
        assert kinds(events, "decision")[0]["level"] == pytest.approx(0.05)

    def test_with_accept_supported_its_runs_are_reserved(self, tmp_path: Path) -> None:
        made = judged(UNCLEAR, further=10, accept="supported", budget={"system_runs": 80})
        prices = estimate_prices(made.system)
        reserved = make_plan(made, 70.0, 1, prices).cost
        without = make_plan(replace(made, further=()), 70.0, 1, prices).cost
        assert reserved == without + 2 * 10
        events, _ = run(made, tmp_path)
        assert kinds(events, "decision")[0]["looks"] == 2


@dataclass(frozen=True)
class Spend:
    """Evaluates the incumbent while the job's share allows it, and proposes an option."""

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        for example in task.train:
            if task.scorer.runs_left >= 1:
                await task.scorer.score([{}], [example])
        yield Proposal({"d.option": 1})


def test_a_job_may_spend_what_a_decision_does_not_need(tmp_path: Path) -> None:
    """A change of the last of four steps executes a quarter of each run: 5 runs, of which the last begins whole.

    Of 33 runs, 20 evaluate the start, 5.75 are reserved and 7 are left for the job; 20 used to be
    reserved.
    """
    world = Relay(4, 4, options=2)
    settings = make_settings(
        {"valid_size": 20, "minibatch": 2, "concurrency": 1, "budget": {"system_runs": 33}}
    )
    method = Method("spend", {"spend": Spend()}, [Job("spend", ("d.option",))], Uniform())
    rows, valid = world.examples(30), world.examples(20, "valid")
    events, _ = run(Problem(world.system(), rows, valid, [], world, settings, method, {}), tmp_path)
    (job,) = kinds(events, "job")
    (decision,) = kinds(events, "decision")
    assert job["runs"] == 7
    assert "p" in decision
    assert events[-1]["spent"]["system_runs"] <= 33


@pytest.mark.parametrize("method", ["random", "hbc"])
@pytest.mark.parametrize("runs", [60, 90, 150, 250])
def test_what_is_reserved_is_enough(method: str, runs: int, tmp_path: Path) -> None:
    """A decision that was begun is made, and the budget holds, with and without a counted tail."""
    for tuned in (1, 3):
        world = Relay(4, tuned, options=4, seed=runs)
        own = {"hbc": {"backbone": {"model": "none"}}} if method == "hbc" else {}
        settings = make_settings(
            {
                "method": method,
                "valid_size": 12,
                "minibatch": 4,
                "candidates": 4,
                "budget": {"system_runs": runs},
                "concurrency": 1,
                **own,
            }
        )
        system = world.system()
        made = Problem(
            system,
            world.examples(40),
            world.examples(12, "valid"),
            [],
            world,
            settings,
            find_method(method, system, settings),
            {},
        )
        folder = tmp_path / str(tuned)
        folder.mkdir()
        events, _ = run(made, folder)
        assert all("p" in decision for decision in kinds(events, "decision"))
        assert events[-1]["spent"]["system_runs"] <= runs + 1e-9
