"""Examples whose groups have equal rewards are replaced by further ones, within a bound that is planned."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compound.core.engine import Completion, Request, TokenRecord
from compound.core.errors import DeclarationError
from compound.core.example import CallValues, Example, Score
from compound.evaluation.metrics.custom import custom
from compound.execution.budget import Meter
from compound.graph.space import Weights
from compound.optimization.method import Task
from compound.optimizers.methods import method
from compound.optimizers.scheduling import keys_of
from compound.optimizers.weights.credit.advantages import advantages
from compound.optimizers.weights.learner.samples import Sample, SamplingSettings
from compound.optimizers.weights.recipes.groups import collect_groups
from compound.optimizers.weights.recipes.local_draws import LocalDraws
from compound.optimizers.weights.recipes.mhgpo import MHGPO, MHGPORandomSettings, MHGPOSettings
from compound.optimizers.weights.recipes.mmgrpo import (
    MMGRPO,
    GRPOSettings,
    MMGRPOSettings,
    PromptR1,
    PromptR1Settings,
)
from compound.optimizers.weights.recipes.ppo import PPO, PPOSettings
from compound.optimizers.weights.recipes.recipe import CreditedSamples, Recipe
from compound.optimizers.weights.steps import StepBatch, StepPlan
from compound.testing import RecipeJob
from training_settings import training

RUNS = {"runs": 3, "refill": 4}
STEP = [Example(f"flat{n}", {"x": f"flat{n}"}, {}) for n in range(2)] + [
    Example("e2", {"x": "two"}, {})
]
SPARE = [
    Example("flat3", {"x": "flat3"}, {}),
    *(Example(f"e{n}", {"x": f"spare{n}"}, {}) for n in range(4, 8)),
]
RECIPES: dict[str, Recipe] = {
    "mmgrpo": MMGRPO(MMGRPOSettings.model_validate({"rollouts": RUNS})),
    "prompt_r1": PromptR1(PromptR1Settings.model_validate({"rollouts": RUNS})),
    "is": MHGPO(MHGPOSettings.model_validate({"rollouts": RUNS}), "is"),
    "fof": MHGPO(MHGPOSettings.model_validate({"rollouts": RUNS}), "fof"),
    "rr": MHGPO(MHGPORandomSettings.model_validate({"rollouts": RUNS}), "rr"),
}


def flat(outputs: Any, example: Example) -> Score:
    """Give every run of some examples the same reward, and those of the others different ones."""
    if example.id.startswith("flat"):
        return Score(0.5)
    return Score(random.Random(f"{example.id} {outputs['y']}").random())


METRIC = custom(flat, "flat", bounds=(0, 1))


def examples_of(credited: CreditedSamples) -> list[str]:
    return list(dict.fromkeys(sample.example for sample in credited.samples))


@pytest.mark.parametrize("name", RECIPES)
def test_examples_of_equal_rewards_are_replaced_in_order(name: str) -> None:
    job = RecipeJob("ab")
    found = job.collect(RECIPES[name], examples=STEP, spare=SPARE, metric=METRIC)
    own = {s.example for s in found.samples if s.group[0] != "mixed"}
    # round 1 replaces flat0 and flat1 by flat3 and e4, round 2 replaces flat3 by e5
    assert own == {"e2", "e4", "e5"}
    assert (found.facts["refilled"], found.facts["informative"]) == (3, 3)


@pytest.mark.parametrize("name", RECIPES)
def test_no_more_is_drawn_than_there_is_room_for(name: str) -> None:
    found = RecipeJob("ab").collect(RECIPES[name], examples=STEP, spare=SPARE[:2], metric=METRIC)
    assert (found.facts["refilled"], found.facts["informative"]) == (2, 2)


@pytest.mark.parametrize("name", RECIPES)
def test_the_cost_of_all_examples_covers_a_step_that_draws_them_all(name: str) -> None:
    """If the runs end before, the step keeps the examples that it has."""
    everything = [Example(f"flat{n}", {"x": f"x{n}"}, {}) for n in range(6)]
    for cost, fits in ((RECIPES[name].cost(6, 2), True), (RECIPES[name].cost(2, 2), False)):
        meter = Meter()
        with meter.cap_runs(cost):
            found = RecipeJob("ab").collect(
                RECIPES[name],
                examples=everything[:2],
                spare=everything[2:],
                metric=METRIC,
                meter=meter,
            )
        assert (found.facts["refilled"] == 4) is fits
        assert found.scores
        assert meter.system_runs <= cost + 1e-9


@pytest.mark.parametrize("name", RECIPES)
def test_without_spare_examples_nothing_changes(name: str) -> None:
    plain, other = (
        RecipeJob("ab").collect(RECIPES[name], examples=STEP, metric=METRIC) for _ in range(2)
    )
    assert "refilled" not in plain.facts
    assert plain == other
    whole = RecipeJob("ab").collect(RECIPES[name], examples=STEP[2:], spare=SPARE, metric=METRIC)
    alone = RecipeJob("ab").collect(RECIPES[name], examples=STEP[2:], metric=METRIC)
    assert whole.samples == alone.samples
    assert whole.facts == {**alone.facts, "refilled": 0, "informative": 1}


@pytest.mark.parametrize("name", RECIPES)
def test_what_is_kept_does_not_depend_on_which_run_ends_first(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = RecipeJob("ab").collect(RECIPES[name], examples=STEP, spare=SPARE, metric=METRIC)
    for seed in range(3):
        rng, job = random.Random(seed), RecipeJob("ab")
        generate = job.lm.generate

        async def late(request: Request, rng: Any = rng, generate: Any = generate) -> Completion:
            for _ in range(rng.randrange(30)):
                await asyncio.sleep(0)
            done: Completion = await generate(request)
            return done

        monkeypatch.setattr(job.lm, "generate", late)
        assert job.collect(RECIPES[name], examples=STEP, spare=SPARE, metric=METRIC) == expected


def test_examples_whose_runs_were_lost_are_replaced_too() -> None:
    job = RecipeJob("a")
    job.lm.losses["a"] = 3  # all runs of the first example
    recipe = RECIPES["mmgrpo"]
    context = job.context(recipe, examples=STEP[2:], spare=SPARE[1:], metric=METRIC)
    found = asyncio.run(recipe.collect(context, STEP[2:]))
    assert (examples_of(found), found.facts["refilled"], found.facts["informative"]) == (
        ["e4"],
        1,
        1,
    )


# Rewards and kinds of the answers of an example, and whether the loss learns anything from them.
MASKED: dict[str, tuple[list[tuple[float, str]], bool]] = {
    "equal": ([(0.5, ""), (0.5, ""), (0.5, "")], False),
    "all masked": ([(0.0, "masked"), (0.5, "masked"), (1.0, "masked")], False),
    "all too long": ([(0.0, "long"), (0.5, "long"), (1.0, "long")], False),
    "all empty": ([(0.0, "empty"), (1.0, "empty")], False),
    "the differing ones masked": ([(0.0, "masked"), (0.5, ""), (1.0, "masked")], False),
    "the differing ones too long": ([(0.0, "long"), (0.5, ""), (1.0, "masked")], False),
    "one masked": ([(0.0, ""), (0.0, ""), (1.0, "masked")], True),  # the others are below the mean
    "none masked": ([(0.0, ""), (1.0, "")], True),
}


@pytest.mark.parametrize("name", MASKED)
def test_examples_from_which_the_loss_learns_nothing_are_replaced(name: str) -> None:
    answers, learns = MASKED[name]
    sampling = SamplingSettings(max_length=16, mask_truncated=True)

    def answer(example: Example, number: int, reward: float, kind: str) -> Sample:
        tokens = (3,) * {"long": 16, "empty": 0}.get(kind, 2)
        record = TokenRecord(
            (1, 2), tokens, (-0.5,) * len(tokens), "length" if kind == "masked" else "stop"
        )
        return Sample("a", example.id, "a", 0, record, reward, (example.id, "a"), number)

    async def draw(examples: Sequence[Example]) -> list[Sample]:
        kept = {"first": answers, "second": [(0.0, ""), (1.0, "")]}
        return [answer(e, n, *each) for e in examples for n, each in enumerate(kept[e.id])]

    async def credit(samples: Sequence[Sample]) -> CreditedSamples:
        return CreditedSamples(advantages(samples, "center")[0], [s.reward for s in samples])

    first, second = (Example(name, {"x": name}, {}) for name in ("first", "second"))
    context = RecipeJob("a").context(RECIPES["mmgrpo"], examples=[first], spare=[second])
    found = asyncio.run(collect_groups(context, [first], draw, credit, sampling))
    assert found.facts == {"refilled": int(not learns), "informative": 1}


def length(component: str, calls: Sequence[CallValues]) -> Any:
    """A local reward: the same for all answers to some inputs, another one for each other answer."""
    return np.array(
        [
            0.5 if str(inputs["x"]).startswith("flat") else int(str(outputs["output"])) / 10
            for inputs, outputs in calls
        ]
    )


def test_inputs_of_equal_local_rewards_are_replaced() -> None:
    recipe = LocalDraws(GRPOSettings.model_validate({"rollouts": RUNS}), length)
    found = RecipeJob("a").collect(recipe, examples=STEP, spare=SPARE)
    assert examples_of(found) == ["e2", "e4", "e5"]
    assert found.facts["refilled"] == 3


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        ("ppo", {"rollouts": {"refill": 2}}, "rollouts.refill replaces examples whose groups"),
        ("mappo", {"rollouts": {"refill": 2}}, "this method compares no groups"),
        (
            "mygo",
            {"rollouts": {"refill": 2}},
            "unknown setting mygo.rollouts.refill; it belongs to",
        ),
        ("optimas", {"training": {"ppo": {"rollouts": {"refill": 2}}}}, "compares no groups"),
        ("mmgrpo", {"rollouts": {"refill": 0}}, "refill"),
        ("mmgrpo", {"rollouts": {"refill": 2}, "scale": "none"}, "with scale none every rollout"),
    ],
)
def test_refill_is_refused_where_no_groups_are_compared(name: str, given: Any, told: str) -> None:
    from compound.optimization.settings.optimize import make_settings

    with pytest.raises(DeclarationError, match=told):
        method(name, RecipeJob("a").system, make_settings({"method": name, name: given}))


def plan_of(examples: Sequence[Example], refill: int, job: RecipeJob) -> StepPlan:
    given = {"rollouts": {"examples": 4, "runs": 3, "refill": refill}, "evaluation": {"every": 0}}
    recipe = MMGRPO(MMGRPOSettings.model_validate(given))
    task = job.context(recipe, examples=examples).task
    assert isinstance(task, Task)
    return StepPlan(task, recipe, 1)


def test_spare_examples_are_other_ones_and_the_same_after_an_interruption() -> None:
    many, job = [Example(f"e{n}", {"x": str(n)}, {}) for n in range(20)], RecipeJob("a")
    plan, again = plan_of(many, 3, job), plan_of(many, 3, job)
    for number in range(6):
        own, spare = plan.examples(number), plan.spare_examples(number)
        assert (len(own), len(spare)) == (4, 8)
        assert not {e.id for e in own} & {e.id for e in spare}
        assert spare == again.spare_examples(number)
    assert plan.spare_examples(0) != plan.spare_examples(1)
    assert plan_of(many, 1, job).spare_examples(0) == []
    assert plan.cost == 12 * 3  # 4 examples, and 8 that replace them, of 3 runs each
    assert plan_of(many[:6], 3, job).cost == 6 * 3
    assert len(plan_of(many[:6], 3, job).spare_examples(0)) == 2


@pytest.mark.parametrize("refilled", [0, 4, 8])
def test_the_runs_of_a_step_are_estimated_for_all_examples_that_may_be_drawn(refilled: int) -> None:
    """Whatever the steps before have drawn, if loops take twice the estimated runs."""
    many = [Example(f"e{n}", {"x": str(n)}, {}) for n in range(20)]
    plan = plan_of(many, 3, RecipeJob("a"))  # 4 examples, and up to 8 that replace them
    for factor in (1.0, 2.0):
        runs = (4 + refilled) * 3 * factor
        drawn = StepBatch(CreditedSamples([], [], {"refilled": refilled}), {"runs": runs})
        assert plan.max_runs(0, drawn) == pytest.approx(plan.cost * factor)


def test_a_step_is_started_only_if_all_of_its_examples_are_covered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    many, left = [Example(f"e{n}", {"x": str(n)}, {}) for n in range(20)], [0.0]
    plan = plan_of(many, 3, RecipeJob("a"))
    monkeypatch.setattr(type(plan.task.scorer), "runs_left", property(lambda _: left[0]))
    drawn = StepBatch(
        CreditedSamples([], [], {"refilled": 0}), {"runs": 24.0}
    )  # twice the estimate
    for runs, fits in ((60.0, False), (73.0, True)):
        left[0] = runs
        assert plan.affords(1, plan.max_runs(0, drawn)) is fits


def test_the_plan_counts_the_examples_that_may_be_drawn() -> None:
    system = RecipeJob("ab").system
    sizes = {}
    for refill in (1, 3):
        settings = training("mhgpo_is", {"rollouts__examples": 4, "runs": 2, "refill": refill})
        (job,) = method("mhgpo_is", system, settings).jobs
        sizes[refill] = job.step
        assert job.keys == tuple(keys_of(system, Weights))
        assert job.within(100).step == job.step
    assert sizes[1]
    assert sizes[3] == 3 * sizes[1]


def test_ppo_is_as_before() -> None:
    found = RecipeJob("ab").collect(PPO(PPOSettings.model_validate({"rollouts": {"runs": 2}})))
    assert "refilled" not in found.facts


def test_the_note_and_the_curve_state_how_many_were_drawn(tmp_path: Path) -> None:
    from compound.optimizers.weights.learner.saved import CurvePoint
    from compound.optimizers.weights.outcome import format_step

    step = CurvePoint(reward=0.5, samples=9, made=12, refilled=2)
    assert format_step(step) == (
        "mean reward 0.500, trained on 9 of 12 samples, 2 further examples drawn"
    )
    earlier = {key: value for key, value in step.to_json().items() if key != "refilled"}
    assert CurvePoint.from_json(earlier).refilled == 0
