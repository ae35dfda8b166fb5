"""Segments: which components are searched together, what their local reward reads, and what it finds."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pytest

from compound.benchmarks.simulated.ablations import fit_nothing
from compound.components.function import Function
from compound.components.selector import Selector
from compound.errors import DataError
from compound.evaluation.metrics.custom import custom
from compound.example import Example
from compound.execution.executor import Executor
from compound.graph.component import CallContext, Input, Operation, Output
from compound.graph.space import Choice
from compound.graph.system import System
from compound.graph.types import Port
from compound.optimization.budget_plan import has_job_per_component
from compound.optimization.method import Job, JobRecord, Method
from compound.optimization.prices import estimate_prices
from compound.optimizers.methods import method
from compound.optimizers.optimas import segment_search
from compound.optimizers.optimas.guided import GuidedSearch, conditions_of, savings_of
from compound.optimizers.optimas.guided_race import GuidedRace
from compound.optimizers.optimas.part import part_of, segments
from compound.optimizers.optimas.rewarding import RunRewards
from compound.optimizers.optimas.segment_search import SegmentDraws, SegmentProgress, SegmentSearch, Steps
from compound.optimizers.scheduling.scheduler import RewardGapScheduler
from compound.optimizers.search.gain_model import GainModel, Observation
from compound.optimizers.search.joint import JointSearch
from compound.optimizers.search.prompts import PromptSearch
from compound.rewards.buffer import Entry, PairBuffer
from compound.rewards.gains.critic import Critic, fit_critic
from compound.rewards.gains.estimates import Evaluations, estimate_gains, estimate_unbiased
from compound.rewards.pairs import Draw
from compound.rewards.sampling.candidates import Candidate
from compound.settings.optimize import make_settings
from optimas_settings import learning, optimas

LEARNING = learning(optimas(model="none"))
WORDS = ("north", "south", "east", "west", "up", "down", "left", "right")
BEST = {"cut.size": 3, "show.count": 2, "show.order": "last"}


def cut(text: str, size: int) -> list[str]:
    """Cut a text into pieces of some words."""
    words = text.split()
    return [" ".join(words[i : i + size]) for i in range(0, len(words), size)]


def show(pieces: list[str], count: int, order: Literal["first", "last"]) -> str:
    """Show some of the pieces, from one end."""
    return " ".join(pieces[:count] if order == "first" else pieces[-count:])


@dataclass(frozen=True, eq=False)
class Reader(Operation):
    """A counted step: the word after "key", if at most six words are shown; later steps repeat it."""

    name: str

    kind = "reader"
    cacheable = True

    @property
    def inputs(self) -> Mapping[str, Port]:
        return {"shown": Port(str)}

    @property
    def outputs(self) -> Mapping[str, Port]:
        return {"word": Port(str)}

    @property
    def settings(self) -> Mapping[str, object]:
        return {}

    @property
    def version(self) -> str:
        return f"reader:{self.name}"

    def deterministic(self, values: Mapping[str, object]) -> bool:
        return True

    async def run(
        self, inputs: Mapping[str, object], values: Mapping[str, object], call: CallContext
    ) -> Mapping[str, object]:
        words = str(inputs["shown"]).split()
        if len(words) == 1:
            return {"word": words[0]}
        after = dict(pairwise(words)) if len(words) <= 6 else {}
        return {"word": after.get("key", "none")}


def document_system() -> System:
    """Return two cheap components before three counted calls.

    The answer is near the end of a text. No single change gains anything: only the last two pieces of three
    words contain it without too many others.
    """
    pieces = Function("cut", cut, size=Choice(3, 12, 24, value=24))(text=Input("text", str))
    found = Function(
        "show", show, count=Choice(1, 2, 4, value=4), order=Choice("first", "last", value="first")
    )(pieces=pieces)
    for name in ("reader", "checker", "speaker"):
        found = Reader(name)(shown=found)
    assert isinstance(found, Output)
    return System("document", outputs={"answer": found})


def examples(n: int) -> list[Example]:
    rng = np.random.default_rng(0)
    found = []
    for i in range(n):
        words, answer = rng.choice(WORDS, 24).tolist(), str(rng.choice(WORDS))
        words[20:22] = ["key", answer]
        found.append(Example(f"e{i}", {"text": " ".join(words)}, {"answer": answer}))
    return found


METRIC = custom(lambda outputs, example: float(outputs["answer"] == example.gold["answer"]))


def same(x: str, option: int) -> str:
    return x * option


def tuned(name: str) -> Function:
    return Function(name, same, option=Choice(1, 2))


class TestSegments:
    def test_cheap_components_in_a_row_are_one(self) -> None:
        assert segments(document_system()) == [("cut", "show")]

    def test_a_counted_call_between_two_components_divides_them(self) -> None:
        first = tuned("first")(x=Input("x", str))
        second = tuned("second")(x=Reader("between")(shown=first))
        assert segments(System("s", outputs={"y": second})) == [("first",), ("second",)]

    def test_a_cheap_component_without_parameters_does_not_divide_them(self) -> None:
        between = Function("between", same, option=1)(x=tuned("first")(x=Input("x", str)))
        assert segments(System("s", outputs={"y": tuned("last")(x=between)})) == [("first", "last")]

    def test_branches_meet_in_one(self) -> None:
        def join(a: str, b: str, option: int) -> str:
            return (a + b) * option

        x = Input("x", str)
        joined = Function("join", join, option=Choice(1, 2))(a=tuned("left")(x=x), b=tuned("right")(x=x))
        assert segments(System("s", outputs={"y": joined})) == [("left", "right", "join")]

    def test_a_component_that_is_used_twice_is_one_of_its_own(self) -> None:
        twice = tuned("twice")
        again = twice(x=twice(x=Input("x", str)), name="again")
        assert segments(System("s", outputs={"y": tuned("last")(x=again)})) == [("twice",), ("last",)]

    def test_a_choice_for_each_input_is_one_of_its_own(self) -> None:
        def system(per_input: bool) -> System:
            label = Selector("label", "p", "q", per_input=per_input)(x=tuned("first")(x=Input("x", str)))
            return System("s", outputs={"y": tuned("last")(x=label)})

        assert segments(system(per_input=True)) == [("label",), ("first", "last")]
        assert segments(system(per_input=False)) == [("first", "label", "last")]

    def test_a_method_has_one_job_for_each(self) -> None:
        system = document_system()
        jobs = method("optimas", system, make_settings({"method": "optimas"})).jobs
        assert [sorted(job.keys) for job in jobs] == [sorted(BEST)]

    def test_nothing_is_merged_where_local_rewards_save_nothing(self) -> None:
        """Nothing counted follows: both components are searched globally, by a job each."""
        last = tuned("last")(x=tuned("first")(x=Reader("reader")(shown=Input("x", str))))
        jobs = method("optimas", System("s", outputs={"y": last}), make_settings({"method": "optimas"})).jobs
        assert [job.keys for job in jobs] == [("first.option",), ("last.option",)]

    @pytest.mark.parametrize(
        ("keys", "is_divided"),
        [
            ([("a.x", "b.x")], False),  # one decision, as always
            ([("a.x", "b.x"), ("c.x",)], True),
            ([("a.x", "b.x"), ("c.x",), ("b.y", "a.y")], True),  # a second job of the same segment
            ([("a.x", "b.x"), ("b.x",)], False),  # b would be tested with two groups
            ([("a.x",), ("a.y",)], True),
            ([("a.x",), ("b.x",)], True),
        ],
    )
    def test_segments_are_accepted_by_themselves(self, keys: list[tuple[str, ...]], is_divided: bool) -> None:
        jobs = [Job("search", some) for some in keys]
        found = Method("m", {}, jobs, RewardGapScheduler())
        assert has_job_per_component(found) is is_divided


class TestPart:
    def test_a_segment_is_one_call_with_the_inputs_from_outside(self) -> None:
        system = document_system()
        part = part_of(system, ["show", "cut"], estimate_prices(system))
        assert part.components == ("cut", "show")
        assert part.name == "cut + show"
        assert (part.weight, part.price) == (0.0, 0.0)
        trace = asyncio.run(
            Executor(lambda _: pytest.fail("no engine")).run(part.system, {"text": "a b c d"})
        )
        (call,) = part.calls(trace)
        assert call.inputs == {"cut.text": "a b c d"}
        assert call.outputs == {"cut.output": ["a b c d"], "show.output": "a b c d"}
        reading = part.template().read(call.inputs, call.outputs)
        assert {"cut.output.items", "show.output.words"} <= set(reading.numbers)
        assert "cut: Cut a text" in reading.description
        assert "show: Show some" in reading.description

    def test_savings_are_those_of_the_segment(self) -> None:
        system = document_system()
        found = savings_of(system, ["cut", "show"], estimate_prices(system))
        assert (found.component, found.global_price, found.local_price) == ("cut + show", 1.0, 0.0)
        assert "cut + show without limit" in str(found)


class TestSearch:
    def run(self, job: Any, share: float = 60.0, **how: Any) -> Any:
        assignment = job(document_system(), METRIC, examples(60), keys=tuple(BEST), share=share, minibatch=8)
        return assignment, *assignment.run(SegmentSearch(LEARNING, **how))

    def test_a_combination_is_found_of_which_no_part_gains(self, job: Any) -> None:
        _, _, proposal = self.run(job)
        assert proposal.values == BEST
        for component in ("cut", "show"):
            keys = tuple(key for key in BEST if key.startswith(component))
            alone = job(document_system(), METRIC, examples(60), keys=keys, share=60.0, minibatch=8)
            assert not alone.run(GuidedSearch(LEARNING, PromptSearch(())))[1].values

    def test_without_a_local_reward_it_makes_no_local_evaluations(self, job: Any) -> None:
        """The first candidates are those of the joint search, and the same one is proposed."""
        _, states, proposal = self.run(job, fit=fit_nothing)
        other = job(document_system(), METRIC, examples(60), keys=tuple(BEST), share=60.0, minibatch=8)
        joint_states, joint = other.run(JointSearch(PromptSearch(())))
        assert states[0]["candidates"] == [c["values"] for c in joint_states[0]["candidates"]]
        assert proposal.values == joint.values
        assert not proposal.facts["steered"]
        race = states[-1]["race"]
        assert [len(columns) for columns in race["evaluations"]["parts"][1:]][: len(race["counts"])] == race[
            "counts"
        ]

    def test_a_reward_that_predicts_takes_runs_for_local_evaluations(self, job: Any) -> None:
        _, states, proposal = self.run(job, share=120.0)
        race = states[-1]["race"]
        assert proposal.facts["steered"]
        locally = [len(columns) for columns in race["evaluations"]["parts"][1:]]
        assert sum(locally) > sum(race["counts"])
        assert proposal.facts["why"] == ""

    def test_a_reward_is_learned_from_enough_examples(self, job: Any) -> None:
        sizes = []

        def fit(entries: Sequence[Entry], *args: Any, **kwargs: Any) -> Critic | None:
            sizes.append(len({entry.draw.example for entry in entries}))
            return fit_critic(entries, *args, **kwargs)

        self.run(job, share=120.0, fit=fit)
        assert sizes[0] == 0  # a step of fewer than eight examples
        assert {0} < {*sizes}
        assert min(size for size in sizes if size) >= 8

    def test_the_model_of_gains_is_told_the_variance_of_control_variates(
        self, job: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told: list[Sequence[Observation]] = []

        class Model(GainModel):
            def __init__(self, spaces: Any, start: Any, observations: Any, noise: float) -> None:
                told.append(observations)
                super().__init__(spaces, start, observations, noise)

        monkeypatch.setattr(segment_search, "GainModel", Model)
        _, states, proposal = self.run(job, share=120.0)
        assert proposal.facts["steered"]
        assert {each.variance for each in told[0]} == {None}
        sds = [sd for sd in states[-1]["race"]["sds"] if sd is not None]
        assert [each.variance for each in told[-1]] == pytest.approx([max(sd, 1e-3) ** 2 for sd in sds])

    def test_estimates_of_infinite_variance_do_not_reach_the_model(self, job: Any) -> None:
        """Of three candidates, the last has no global evaluation; the others keep their gains."""
        task = job(document_system(), METRIC, examples(8), keys=tuple(BEST), share=60.0, minibatch=8).task
        part = part_of(task.system, ("cut", "show"), task.prices)
        given = conditions_of(
            task, LEARNING, part, 1.0, gold=True, estimate=estimate_unbiased, fit=fit_critic
        )
        candidates: list[dict[str, object]] = [BEST, {**BEST, "show.count": 4}, {**BEST, "cut.size": 12}]
        steps = Steps(task, given, candidates, examples(8), [], 1)
        scores, local = np.full((3, 8), np.nan), np.zeros((3, 8))
        scores[:2] = [[1, 1, 0, 1, 1, 0, 1, 1], [0, 1, 0, 0, 0, 0, 1, 0]]
        local[:] = scores[0] + 0.1 * np.arange(8)
        steps.table.scores[:3] = [np.zeros(8), *scores[:2]]
        data = Evaluations(scores, local)
        gains = estimate_gains(data, shrink=False)
        assert gains.slope
        assert np.isinf(gains.sd).tolist() == [False, False, True]
        model = steps._model(gains, data)
        assert [each.values for each in model.observations] == candidates[:2]
        assert model.means(candidates)[0] > 0

    def test_estimates_from_one_example_each_have_the_variance_of_scores(self, job: Any) -> None:
        """A second job may plan its first step by the draws of the first one: no row has two values."""
        task = job(document_system(), METRIC, examples(8), keys=tuple(BEST), share=60.0, minibatch=2).task
        part = part_of(task.system, ("cut", "show"), task.prices)
        given = conditions_of(
            task, LEARNING, part, 1.0, gold=True, estimate=estimate_unbiased, fit=fit_critic
        )
        candidates: list[dict[str, object]] = [BEST, {**BEST, "show.count": 4}]
        steps = Steps(task, given, candidates, examples(8), [], 1)
        steps.table.scores[:, 0] = [0.0, 1.0, 0.0]
        data = Evaluations(np.array([[1.0], [0.0]]), np.array([[0.5], [0.1]]))
        model = steps._model(estimate_gains(data, shrink=False), data)
        assert [each.variance for each in model.observations] == [None, None]
        assert model.means(candidates)[0] > 0

    @pytest.mark.parametrize("share", [10.0, 33.0, 60.0, 150.0])
    def test_runs_stay_within_the_share(self, job: Any, share: float) -> None:
        assignment, _, _ = self.run(job, share=share)
        assert assignment.spent <= share + 1e-6
        assert (
            not 20 < share < 100 or assignment.spent >= 0.75 * share
        )  # else too little, or all are examined

    def test_an_interrupted_job_continues(self, job: Any) -> None:
        assignment = job(document_system(), METRIC, examples(60), keys=tuple(BEST), share=60.0, minibatch=8)
        assert assignment.check_resume(lambda: SegmentSearch(LEARNING))

    def test_its_draws_are_stored_apart_from_those_of_components(self, job: Any) -> None:
        assignment, _, proposal = self.run(job)
        rewards = RunRewards.open(assignment.task, LEARNING)
        assert rewards.buffer.entries == []
        entries = SegmentDraws(rewards, "cut + show").entries()
        assert entries
        assert {entry.draw.component for entry in entries} == {"cut + show"}
        assert all(set(entry.draw.inputs) == {"cut.text"} for entry in entries)
        assert SegmentDraws(rewards, "another").entries() == []
        assert proposal.facts["component"] == "cut + show"
        assert set(proposal.facts["gaps"]) <= {"cut + show"}

    def test_draws_of_several_jobs_have_their_iterations(self, job: Any) -> None:
        assignment, _, _ = self.run(job)
        rewards = RunRewards.open(assignment.task, LEARNING)
        assert rewards.iteration == 1
        stored = SegmentDraws(rewards, "cut + show")
        before = stored.entries()
        stored.add([before[0].draw], 2)
        assert RunRewards.open(assignment.task, LEARNING).iteration == 2
        assert [entry.iteration for entry in stored.entries()] == [1] * len(before) + [2]


class TestDivision:
    """The division of a step's runs where a local evaluation costs a quarter of a global one."""

    @pytest.mark.parametrize(
        ("noise", "local_sd"), [(0.1, 0.5), (0.3, 0.3), (0.5, 0.05)], ids=["local", "both", "global"]
    )
    def test_the_mean_variance_is_least(self, job: Any, noise: float, local_sd: float) -> None:
        task = job(document_system(), METRIC, examples(60), keys=tuple(BEST), share=500.0, minibatch=8).task
        part = replace(part_of(task.system, ("cut", "show"), task.prices), price=0.25, weight=0.25)
        given = conditions_of(
            task, LEARNING, part, 1.0, gold=True, estimate=estimate_unbiased, fit=fit_critic
        )
        candidates: list[dict[str, object]] = [BEST, {**BEST, "show.count": 4}]
        steps = Steps(task, given, candidates, examples(60), [], 1)
        race = GuidedRace(alive=[0, 1], slope=1.0, noise=noise, local_sd=local_sd)
        state = SegmentProgress(iteration=1, levels={}, runs=500.0, candidates=candidates, race=race)
        plan = steps.plan(state)
        assert plan is not None
        rows = len(candidates)

        full = math.ceil(500 / (16 * (task.candidates + 1)))  # examples of each candidate in a step
        runs = full * (rows + 1)  # the incumbent is evaluated on the same examples

        def variance(size: int) -> float:
            left = runs - size * (rows + 1)
            local = int((left + 1e-9) / (0.25 * rows + 0.25))
            if not size:
                return math.inf
            return noise**2 / size + local_sd**2 / (size + local)

        best = min(range(full + 1), key=variance)
        assert len([cell for cell in plan.globally if cell[0]]) == best * rows
        spent = len(plan.globally) + 0.25 * (len(plan.locally) + len(plan.locally) / rows)
        assert spent <= runs + 1e-6
        assert bool(plan.locally) is (best < full)


@pytest.mark.parametrize("record", [5, None, "draw", []])
def test_a_damaged_draw_of_a_segment_is_reported(job: Any, record: object) -> None:
    assignment = job(document_system(), METRIC, examples(20), keys=tuple(BEST), share=20.0)
    assignment.memory.append({"kind": "draw of a segment", "record": record})
    with pytest.raises(DataError, match="a draw of a segment in the run's memory is damaged"):
        assignment.run(SegmentSearch(LEARNING))


def test_records_of_segments_are_no_pairs_of_components() -> None:
    system = document_system()
    draw = Draw("cut + show", "cut + show", "e", "d", {"cut.text": "a"}, (Candidate({"y": 1}, (1.0,)),))
    (record,) = PairBuffer(system.identity).add([draw], 1)
    wrapped = {"kind": "draw of a segment", "record": record}
    assert PairBuffer.read([wrapped], system, LEARNING.pairs.sampling).entries == []


def test_the_scheduler_draws_a_segment_by_its_own_gap() -> None:
    jobs = [Job("local", ("cut.size", "show.count")), Job("local", ("other.option",))]
    record = JobRecord(
        job=0, optimizer="local", keys=jobs[0].keys, facts={"gaps": {"cut + show": 0.3, "other": 0.1}}
    )
    chosen = [RewardGapScheduler().choose(jobs, [record], seed) for seed in range(40)]
    assert {round(job.reason["probability"], 2) for job in chosen if job.keys == jobs[0].keys} == {0.75}
