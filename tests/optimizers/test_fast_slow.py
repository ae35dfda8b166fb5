"""Fast-slow training: a population of prompts within each group, and sequential training as its limit."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.measure.prompts import fast_slow
from benchmarks.simulated.toy_model import make_toy_model
from compound import LLM, Input, LoRA, System
from compound.core.errors import DeclarationError
from compound.core.narrowing import entry
from compound.ext import Completion, Request, Task
from compound.metrics import custom
from compound.optimization.budget_plan import plan_job
from compound.optimization.settings.optimize import make_settings
from compound.optimizers import fast_slow as fast_slow_module
from compound.optimizers.fast_slow import FastSlow, FastSlowState
from compound.optimizers.methods import method
from compound.optimizers.weights.recipes.mmgrpo import MMGRPO, MMGRPOSettings
from compound.optimizers.weights.recipes.recipe import credited_by
from compound.optimizers.weights.recipes.rollouts import Population, RolloutSettings
from compound.optimizers.weights.steps import CurvePoint, TrainingState
from compound.testing import ScriptedLM
from compound.testing.recipe_kit import EXAMPLES, RecipeJob

VERSIONS = [{"first.prompt": f"f {word}", "second.prompt": f"s {word}"} for word in ("a", "b", "c")]


class TestPopulation:
    @given(versions=st.integers(1, 5), runs=st.integers(1, 20), step=st.integers(0, 99))
    def test_prompts_are_spread_evenly(self, versions: int, runs: int, step: int) -> None:
        population = Population([{}] * versions, step)
        used = Counter(population.index("e1", number) for number in range(runs))
        counts = [used[version] for version in range(versions)]
        assert max(counts) - min(counts) <= 1

    def test_texts_are_added_to_the_settings_of_rollouts(self) -> None:
        population = Population(VERSIONS[:1], step=1)
        own: dict[str, dict[str, object]] = {"first": {"temperature": 0.6}, "other": {"k": 1}}
        assert population.settings(own, "e1", 0) == {
            "first": {"temperature": 0.6, "prompt": "f a"},
            "second": {"prompt": "s a"},
            "other": {"k": 1},
        }
        assert own == {"first": {"temperature": 0.6}, "other": {"k": 1}}

    def test_rewards_are_summed_by_version(self) -> None:
        population = Population(VERSIONS[:2], step=1)
        for number, reward in enumerate([1.0, 0.5, 0.25, 0.0]):
            population.record("e1", number, reward)
        first = population.index("e1", 0)
        assert population.rewards[first] == (1.25, 2)
        assert population.rewards[1 - first] == (0.5, 2)


class TestGroups:
    def test_a_group_compares_calls_with_different_prompts(self) -> None:
        """One group per example, component and invocation, as without a population."""
        texts = [{"a.prompt": f"a {word}", "b.prompt": f"b {word}"} for word in ("one", "two")]
        job, recipe = RecipeJob("ab"), MMGRPO(MMGRPOSettings(rollouts=RolloutSettings(runs=4)))
        context = job.context(recipe)
        context.sampler.population = population = Population(texts, 0)
        credited = asyncio.run(credited_by(recipe, context, EXAMPLES))
        groups: dict[Any, list[str]] = {}
        for sample in credited.samples:
            prompt = bytes(sample.tokens.prompt).decode()
            version = next(
                i for i, text in enumerate(texts) if text[f"{sample.component}.prompt"] in prompt
            )
            assert version == population.index(sample.example, sample.rollout)
            groups.setdefault(sample.group, []).append(f"{sample.component}{version}")
        assert len(groups) == len(EXAMPLES) * 2
        for versions in groups.values():
            assert sorted(versions) == [f"{versions[0][0]}{i}" for i in (0, 0, 1, 1)]
        assert sum(count for _, count in population.rewards) == len(EXAMPLES) * 4
        assert sum(total for total, _ in population.rewards) == pytest.approx(sum(credited.scores))

    def test_a_population_of_one_changes_nothing(self) -> None:
        def collected(population: Population | None) -> Any:
            job, recipe = RecipeJob("ab"), MMGRPO(MMGRPOSettings(rollouts=RolloutSettings(runs=4)))
            context = job.context(recipe)
            context.sampler.population = population
            return asyncio.run(credited_by(recipe, context, EXAMPLES)).samples

        assert collected(Population([{"a.prompt": "a", "b.prompt": "b"}], 0)) == collected(None)

    def test_teachers_keep_their_own_prompts(self, tmp_path: Path) -> None:
        settings = MMGRPOSettings(rollouts=RolloutSettings(runs=4), teachers={"teacher.json": 1})
        job, recipe = RecipeJob("a"), MMGRPO(settings)
        job.system.configuration.replace({"a.prompt": "a teacher"}).save(tmp_path / "teacher.json")
        context = job.context(recipe, folder=tmp_path)
        context.sampler.population = Population([{"a.prompt": "a one"}, {"a.prompt": "a two"}], 0)
        samples = asyncio.run(credited_by(recipe, context, EXAMPLES)).samples
        taught = [bytes(sample.tokens.prompt).decode() for sample in samples if sample.rollout == 3]
        assert len(taught) == len(EXAMPLES)
        assert all(text.startswith("a teacher") for text in taught)


FEW = {
    "steps": 4,
    "rollouts": {"examples": 2, "runs": 4},
    "optimizer": {"lr": 3e-3},
    "evaluation": {"every": 0},
}


@pytest.mark.filterwarnings("ignore")
class TestTraining:
    def test_without_a_round_it_is_the_sequence_of_stages(self) -> None:
        pytest.importorskip("peft")
        plain = fast_slow.train({"stages": ["mmgrpo"]}, 0, 100, FEW)
        limit = fast_slow.train({"stages": ["mmgrpo"], "interleave": {"every": 1000}}, 0, 100, FEW)
        assert limit == plain
        assert entry(plain, "curve", list)

    @pytest.mark.slow
    def test_rounds_find_prompts_that_rollouts_use(self) -> None:
        pytest.importorskip("peft")
        rounds = {"stages": ["mmgrpo"], "interleave": {"every": 2, "share": 12.0}}
        found = fast_slow.train(rounds, 1, 600, {**FEW, "steps": 6})
        assert len(entry(found, "text", str).split()) > 1
        assert entry(found, "rollouts", int) == 6 * 2 * 4
        assert entry(found, "system_runs", float) <= 6 * 2 * 4 + 2 * 12 * 2 * 2 * 4

    @pytest.mark.parametrize("evaluation", [0, pytest.param(1, marks=pytest.mark.slow)])
    def test_it_resumes_from_every_checkpoint(
        self, job: Any, tmp_path: Path, evaluation: int
    ) -> None:
        pytest.importorskip("peft")
        model = str(make_toy_model(tmp_path / "model"))
        weights = {**FEW, "steps": 3, "evaluation": {"every": evaluation, "examples": 2}}
        settings = make_settings(
            {
                "method": "better_together",
                "mmgrpo": weights,
                "gepa": {"batch": 2, "iterations": 2},
                "better_together": {"stages": ["mmgrpo"], "interleave": {"every": 1, "share": 2.0}},
            }
        )
        made = method("better_together", fast_slow.coupled(model), settings)
        (one,) = made.jobs
        task = job(
            fast_slow.coupled(model),
            custom(fast_slow.graded),
            fast_slow.examples(),
            lambda: engine(model),
            120,
            keys=one.keys,
        )
        checkpoints = task.check_resume(lambda: made.optimizers[one.optimizer])
        states = [FastSlowState.from_json(checkpoint.state) for checkpoint in checkpoints]
        assert states[-1].training.step == 3
        assert states[-1].rounds == 2
        assert any(state.reflection for state in states)
        assert task.spent <= 120


def engine(model: str) -> Any:
    """Return an engine that trains, and answers reflections by the script."""
    from compound.engines.local.engine import TransformersEngine

    class Both(TransformersEngine):
        async def generate(self, request: Request) -> Completion:
            if "```" in request.messages[0].content:
                return await ScriptedLM(fast_slow.reflect).generate(request)
            return await super().generate(request)

    return Both(model, dtype="float32")


class TestMethod:
    def settings(self, stages: list[str], **interleave: Any) -> Any:
        return make_settings(
            {
                "method": "better_together",
                "better_together": {"stages": stages, "interleave": interleave},
            }
        )

    def test_a_stage_of_weights_also_changes_prompts(self) -> None:
        system = fast_slow.coupled("local/any")
        made = method(
            "better_together", system, self.settings(["random", "mmgrpo"], every=3, share=0.5)
        )
        assert [job.keys for job in made.jobs][-1] == ("agent.weights", "gate.text")
        plain = method("mmgrpo", system, make_settings({"method": "mmgrpo"}))
        assert plain.jobs[0].step is not None
        assert made.jobs[-1].step == 1.5 * plain.jobs[0].step
        assert isinstance(made.optimizers["2 mmgrpo/mmgrpo"], FastSlow)
        assert set(made.sections) == {"better_together", "random", "mmgrpo", "gepa"} - {"random"}

    def test_the_reflections_of_all_rounds_are_declared(self, job: Any) -> None:
        system = fast_slow.coupled("local/any")
        made = method("better_together", system, self.settings(["mmgrpo"], every=5))
        optimizer = made.optimizers["1 mmgrpo/mmgrpo"]
        assignment = job(system, custom(fast_slow.graded), fast_slow.examples())
        plan = plan_job(assignment.problem(optimizer), assignment.job, 10_000)
        assert isinstance(optimizer, FastSlow)
        assert plan is not None
        recipe = optimizer.training.recipe
        runs = 0.25 * 5 * recipe.cost(recipe.sampling.examples, 1)
        assert plan.most() == 4 * optimizer.reflection.most_reflections(runs)  # 25 steps

    @pytest.mark.parametrize(
        ("stages", "message"),
        [
            (["random"], "none of the stages random can"),
            (["mhgpo_rr"], "none of the stages mhgpo_rr can"),
        ],
    )
    def test_stages_without_groups_of_whole_runs_are_refused(
        self, stages: list[str], message: str
    ) -> None:
        with pytest.raises(DeclarationError, match=message):
            method("better_together", fast_slow.coupled("local/any"), self.settings(stages))

    def test_a_system_without_texts_is_refused(self) -> None:
        agent = LLM("agent", prompt="Say.", weights=LoRA())(word=Input("word", str))
        system = System("fixed", outputs={"said": agent}, lm="local/any")
        with pytest.raises(DeclarationError, match="no parameter that method 'gepa' can change"):
            method("better_together", system, self.settings(["mmgrpo"]))

    def test_samples_drawn_ahead_are_refused(self) -> None:
        settings = make_settings(
            {
                "method": "better_together",
                "better_together": {"stages": ["mmgrpo"], "interleave": {}},
                "mmgrpo": {"rollouts": {"max_staleness": 1}},
            }
        )
        with pytest.raises(DeclarationError, match="samples ahead"):
            method("better_together", fast_slow.coupled("local/any"), settings)


class TestState:
    def test_the_prompt_with_the_highest_mean_reward_is_chosen(self) -> None:
        state = FastSlowState(
            prompts=[{}, {"a.prompt": "x"}, {"a.prompt": "y"}], rewards=[(0.0, 0)] * 3
        )
        assert state.chosen == {}
        state.rewards = [(2.0, 4), (3.0, 4), (3.0, 5)]
        assert state.chosen == {"a.prompt": "x"}

    def test_a_prompt_without_rollouts_is_not_chosen_over_negative_rewards(self) -> None:
        """Rewards of conversations are negative at first, see `compound.optimizers.weights.credit.gated`."""
        state = FastSlowState(prompts=[{}, {"a.prompt": "x"}, {"a.prompt": "y"}])
        state.rewards = [(-4.0, 5), (0.0, 0), (-3.0, 5)]
        assert state.chosen == {"a.prompt": "y"}


class TestEnd:
    def session(self, job: Any) -> tuple[FastSlow, Task, fast_slow_module._Session]:
        """Return an optimizer with its task and a session, without loading a model."""
        system = fast_slow.coupled("local/any")
        settings = {
            "method": "better_together",
            "better_together": {"stages": ["mmgrpo"], "interleave": {}},
        }
        made = method("better_together", system, make_settings(settings))
        task = job(
            system, custom(fast_slow.graded), fast_slow.examples(), keys=made.jobs[0].keys
        ).task
        optimizer = made.optimizers[made.jobs[0].optimizer]
        assert isinstance(optimizer, FastSlow)
        weights = replace(task, keys=("agent.weights",))
        return optimizer, task, fast_slow_module._Session(weights, optimizer.training.recipe)

    def test_prompts_are_proposed_even_if_no_step_changed_the_weights(self, job: Any) -> None:
        optimizer, task, session = self.session(job)
        training = TrainingState(
            step=1, curve=[CurvePoint(reward=0.5, samples=0, made=8, why="all were equal")]
        )
        prompts = [dict[str, str](), {"gate.text": "better"}]
        state = FastSlowState(training=training, prompts=prompts, rewards=[(1.0, 4), (3.0, 4)])
        proposal = optimizer._proposal(task, session, state)
        assert proposal.values == {"gate.text": "better"}
        assert proposal.note == "nothing to learn from: all were equal"

    def test_a_cancelled_job_interrupts_the_learner_before_it_is_closed(
        self, job: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        optimizer, task, _ = self.session(job)
        called: list[str] = []

        async def opened(session: Any, state: Any) -> None:
            called.append("open")
            raise asyncio.CancelledError

        session = fast_slow_module._Session
        monkeypatch.setattr(session, "begin", opened)
        monkeypatch.setattr(session, "interrupt", lambda _: called.append("interrupt"))
        monkeypatch.setattr(session, "close", lambda _: called.append("close"))

        async def run() -> None:
            async for _ in optimizer.propose(task):
                pass

        with pytest.raises(asyncio.CancelledError):
            asyncio.run(run())
        assert called == ["open", "interrupt", "close"]
