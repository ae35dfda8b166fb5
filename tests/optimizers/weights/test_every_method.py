"""Every way of training weights on one file, `method:` switched and nothing else: adapters move, gradients are not 0."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from numerics import LOGPROBS

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from compound.api.description import describe  # noqa: E402
from compound.api.estimate import estimate  # noqa: E402
from compound.api.optimize import make_problem  # noqa: E402
from compound.core.errors import ConfigurationError, DeclarationError, SpecError  # noqa: E402
from compound.core.example import Example, Score  # noqa: E402
from compound.engines.local.engine import TransformersEngine  # noqa: E402
from compound.optimizers.methods import method  # noqa: E402
from compound.optimizers.weights.bases import PlannedTraining  # noqa: E402
from compound.optimizers.weights.learner.trainer import Trainer  # noqa: E402
from compound.optimizers.weights.methods import POLICY_METHODS  # noqa: E402
from compound.optimizers.weights.recipes.local_draws import LocalDraws  # noqa: E402
from compound.optimizers.weights.recipes.mhgpo import MHGPO  # noqa: E402
from compound.optimizers.weights.recipes.mmgrpo import MMGRPO, MMGRPOSettings  # noqa: E402
from compound.optimizers.weights.recipes.mygo import MyGO, MyGOSettings  # noqa: E402
from compound.optimizers.weights.recipes.ppo import PPO  # noqa: E402
from compound.optimizers.weights.recipes.recipe import CreditedSamples, Recipe  # noqa: E402
from compound.optimizers.weights.steps import StepBatch, reason_without_samples  # noqa: E402
from compound.report.training import shown_groups  # noqa: E402
from compound.testing import ScriptedLM  # noqa: E402
from compound.yaml import load  # noqa: E402
from training_settings import trainings  # noqa: E402
from trainings.jobs import ATLAS, SMALL, trained  # noqa: E402

SMALL_SECTIONS = [
    (f"optimize.{name}", json.dumps(section)) for name, section in trainings(**SMALL).items()
]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*POLICY_METHODS, "better_together"])
def test_the_method_alone_is_switched(name: str, model: Path, tmp_path: Path) -> None:
    # random answers hardly get better than the first ones
    slow: dict[str, Any] = {"pace": 0.01} if name == "mygo" else {}
    values, records = asyncio.run(trained(model, name, tmp_path, **slow))
    weights = {key: value for key, value in values.items() if key.endswith(".weights")}
    assert set(weights) == {"namer.weights", "answerer.weights"}
    assert len({value["sha256"] for value in weights.values()}) == 2
    for value in weights.values():
        assert (tmp_path / value["path"] / "adapter_model.safetensors").exists()
    assert_learned(records)
    shown = [shown_groups(record) for record in records if record["kind"] == "training"]
    assert {group.component for groups in shown for group in groups} == {"namer", "answerer"}
    assert all(answer.tokens for groups in shown for group in groups for answer in group.answers)


OLD_LOSSES = (("bnpo", "dapo"), ("cispo", "dapo"), ("gspo", "grpo"), ("reinforce", "grpo"))
REMOVED: list[tuple[object, str]] = [
    *((old, f"{old} was removed; use {new}") for old, new in OLD_LOSSES),
    *(({old: {}}, f"{old} was removed; use {new}") for old, new in OLD_LOSSES),
]
GRPO = {"training": {"grpo": {"rollouts": {"runs": 1}}}}


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        ("mhgpo_rr", {"forks": {"missing": 1.0}}, "forks names 'missing', which is not trained"),
        ("mmgrpo", {"adapters": {"one": ["namer", "missing"]}}, "adapters names 'missing'"),
        ("ppo", {"adapters": "shared"}, "unknown key; it belongs to mappo, mmgrpo"),
        ("optimas", {"training": {"ppo": {"adapters": "shared"}}}, "ppo.adapters: unknown key"),
        ("mmgrpo", {"loss": "sft"}, "loss: cannot be 'sft'; possible: dapo"),
        *(("mmgrpo", {"loss": loss}, told) for loss, told in REMOVED),
        ("mmgrpo", {"loss": "gropo"}, "loss: cannot be 'gropo'; did you mean 'grpo'"),
        ("mmgrpo", {"loss": {"dapo": {"cap": 0.1}}}, "loss.dapo.cap: unknown key"),
        (
            "mmgrpo",
            {"loss": {"dapo": {}, "grpo": {}}},
            "selects several options: grpo and dapo; keep one",
        ),
        ("mmgrpo", {"loss": {"dapo": None}}, "loss: dapo must be a mapping"),
        (
            "mmgrpo",
            {"rollouts": {"max_staleness": 1}, "loss": {"grpo": {"correction": None}}},
            "need a correction",
        ),
        (
            "mmgrpo",
            {"teachers": {"best.json": 1}, "loss": {"grpo": {"correction": None}}},
            "need a correction",
        ),
        ("mmgrpo", {"teachers": {"best.json": 0}}, "teachers"),
        ("mmgrpo", {"teachers": {"a.json": 4, "b.json": 4}}, "teachers make 8 of 8 runs"),
        ("mhgpo_rr", {"forks": {"namer": -1.0}}, "forks"),
        ("mhgpo_rr", {"forks": {"namer": 0.0, "answerer": 0.0}}, "forks is 0 for every component"),
        (
            "optimas",
            {"training": {"ppo": {"penalties": {"missing": "math:hypot"}}}},
            "penalties names 'missing'",
        ),
        (
            "mmgrpo",
            {"rollouts": {"runs": 1}},
            "runs of an example are compared, but rollouts.runs is 1",
        ),
        ("prompt_r1", {"rollouts": {"runs": 1}}, "are compared"),
        ("optimas", GRPO, "are compared"),
        ("mmgrpo", {"teachers": {"nowhere.json": 1}}, "nowhere.json"),
        ("mmgrpo", {"loss": {"grpo": {"clip": 1.5}}}, "clip"),
        ("mmgrpo", {"optimizer": {"lr": float("inf")}}, "lr"),
        ("mygo", {"max_reward": -1.0, "threshold": -2.0}, "max_reward"),
        ("mygo", {"threshold": 2.0}, "threshold 2 is above max_reward 1"),
        ("mygo", {"rollouts": {"runs": 3}}, "unknown key; it belongs to ppo"),
        ("better_together", {"stages": []}, "must name other methods"),
        ("hbc", {"offline": 0.0}, "must be > 0"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_run(
    name: str, given: dict[str, Any], told: str
) -> None:
    with pytest.raises((ConfigurationError, DeclarationError, SpecError), match=told):  # noqa: PT012
        program = load(ATLAS, overrides=[(f"optimize.{name}", json.dumps(given))])
        method(name, program.system, program.optimize)


@pytest.mark.parametrize("name", ["mmgrpo", "ppo", "optimas", "better_together"])
def test_a_model_that_cannot_be_trained_is_refused_before_anything_is_run(name: str) -> None:
    program = load(ATLAS, overrides=[("lm", "openai/gpt-4o-mini"), ("optimize.method", name)])
    with pytest.raises(
        DeclarationError, match=r"cannot be trained: litellm.* does not serve adapters"
    ):
        estimate(program)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mhgpo_is", "optimas"])
@pytest.mark.parametrize(("share", "expected"), [(9.4, None), (4.6, 1.0)])
def test_a_job_takes_no_more_than_its_share(
    name: str,
    share: float,
    expected: float | None,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor where a step takes more than its recipe expects, as it may in loops."""
    if expected is not None:
        for recipe in (MHGPO, LocalDraws, PPO):
            monkeypatch.setattr(recipe, "cost", lambda *_: expected)
    _, records = asyncio.run(trained(model, name, tmp_path, share=share, steps=30))
    jobs = [
        r for r in records if r.get("kind") == "job" and r["optimizer"] in ("weights", "mhgpo_is")
    ]
    assert jobs
    assert 0 < max(job["spent"] for job in jobs) <= share
    assert sum(record.get("kind") == "training" for record in records) < 30


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mmgrpo", "mhgpo_fof", "mhgpo_rr", "prompt_r1", "mygo", "ppo"])
def test_metrics_of_components_describe_the_answers_of_all_rollouts(
    name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of groups with equal rewards and of attempts below the threshold, which are not trained on."""

    def coarse(outputs: dict[str, Any], example: Example) -> Score:
        return Score(0.5 if crc32(example.id.encode()) % 2 else len(outputs["answer"]) % 2)

    monkeypatch.setattr("trainings.jobs.letters", coarse)
    _, records = asyncio.run(trained(model, name, tmp_path, examples=4, threshold=1.0))
    steps = [record for record in records if record["kind"] == "training"]
    for record in steps:
        for component in record["components"].values():
            if name != "mhgpo_rr":  # its runs share the answers before the fork
                assert component["reward"] == pytest.approx(record["reward"])
                assert component["answers"] == record["rollouts"]
    excluded = [
        own.get("samples", 0) < own["answers"] for r in steps for own in r["components"].values()
    ]
    assert any(excluded) == (name != "ppo")


def assert_learned(records: list[dict[str, Any]]) -> None:
    steps = [record for record in records if record.get("kind") == "training"]
    assert max(norm for record in steps for norm in record["norms"].values()) > 0
    assert all(record["sample_seconds"] > 0 for record in steps)


@pytest.mark.slow
@pytest.mark.parametrize("local", ["ppo", "grpo"])
def test_optimas_trains_weights_by_local_rewards_beside_prompts_and_numbers(
    local: str, model: Path, tmp_path: Path
) -> None:
    values, records = asyncio.run(trained(model, "optimas", tmp_path, local=local))
    assert "answerer.weights" in values
    assert_learned(records)
    jobs = [record for record in records if record.get("kind") == "job"]
    assert {job["optimizer"] for job in jobs} == {"offline", "joint", "weights"}
    steered = [job["facts"]["steered"] for job in jobs if job["optimizer"] == "weights"]
    assert any(steered)  # one reward at least was learned, and scored what was trained
    drawn = [record for record in records if record.get("recipe") == "LocalDraws"]
    # what is shown is what was trained on, not the score of runs that were not made
    for record in drawn:
        (own,) = record["components"].values()
        assert record["rollouts"] == own["samples"]
        assert record["reward"] == pytest.approx(own["reward"], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mmgrpo", "mappo"])
def test_answers_that_are_all_excluded_are_nothing_to_learn_from(
    name: str, model: Path, tmp_path: Path
) -> None:
    values, records = asyncio.run(trained(model, name, tmp_path, max_length=8))
    assert values == {}
    *steps, job = records
    assert [record["left_out"] > 0 for record in steps] == [True, True]
    assert job["facts"] == {"steps": 2, "samples": 0}
    assert "longer than max_length" in job["note"]


def test_a_stored_adapter_is_one_that_others_can_use(model: Path, tmp_path: Path) -> None:
    values, _ = asyncio.run(trained(model, "mmgrpo", tmp_path))
    folder = tmp_path / values["namer.weights"]["path"]
    assert (
        json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
        == model.name
    )
    mask = os.umask(0o022)
    os.umask(mask)
    assert {oct(path.stat().st_mode & 0o777) for path in folder.iterdir()} == {oct(0o666 & ~mask)}


@pytest.mark.slow
def test_d6_training_goes_on_from_the_present_adapter(model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    first, _ = asyncio.run(trained(model, "mmgrpo", tmp_path))
    second, records = asyncio.run(trained(model, "mmgrpo", tmp_path, first, lr=1e-9))
    assert [record["kind"] for record in records] == ["training", "training", "job"]
    for key in ("namer.weights", "answerer.weights"):
        before, after = (
            load_file(tmp_path / values[key]["path"] / "adapter_model.safetensors")
            for values in (first, second)
        )
        assert all(torch.allclose(before[name], after[name], atol=1e-6) for name in before)
        assert any(
            float(tensor.abs().max()) > 0 for name, tensor in before.items() if "lora_B" in name
        )


BESIDE = {
    "optimize.mhgpo_fof.penalties": '{"namer": "rules:dear"}',
    "optimize.mmgrpo.teachers": '{"best.json": 1}',
    "optimize.better_together.stages": '["mhgpo_fof", "mmgrpo"]',
}


def test_what_a_file_names_is_looked_for_beside_it_and_belongs_to_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run goes on only with the penalties and teachers that it began with."""
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    file = folder / "atlas.yaml"
    file.write_text(ATLAS.read_text(encoding="utf-8"), encoding="utf-8")
    shutil.copytree(ATLAS.parent / "data" / "atlas", folder / "data" / "atlas")
    shutil.copy(ATLAS.with_name("atlas.py"), folder)

    def told(price: float, prompt: str) -> dict[str, Any]:
        (folder / "rules.py").write_text(f"def dear(inputs, outputs):\n    return {price}\n")
        sys.modules.pop("rules", None)
        load(ATLAS).system.configuration.replace({"namer.prompt": prompt}).save(
            folder / "best.json"
        )
        program = load(file, overrides=[*BESIDE.items(), ("optimize.method", "better_together")])
        assert program.data
        assert program.metric
        given = program.system, program.data, program.metric, program.optimize
        found = describe(make_problem(*given, program.find_engine, program.folder))
        return {key: found[key] for key in ("code", "configurations")}

    first = told(-1.0, "Name it.")
    assert first == told(-1.0, "Name it.")
    assert first["code"] != told(-2.0, "Name it.")["code"]
    assert first["configurations"] != told(-1.0, "Say its name.")["configurations"]
    (folder / "best.json").unlink()
    program = load(file, overrides=[*BESIDE.items()])
    assert method(
        "mappo", program.system, program.optimize, folder
    ).jobs  # has none, and needs none
    with pytest.raises(ConfigurationError, match=r"best\.json does not exist"):
        method("mmgrpo", program.system, program.optimize, folder)


@pytest.mark.parametrize(
    ("recipe", "facts", "why"),
    [
        (
            MMGRPO(MMGRPOSettings()),
            {"failed": 2, "failure": "type: x"},
            "every run failed, most often with type: x",
        ),
        (MMGRPO(MMGRPOSettings()), {"groups": 4}, "all rewards within each group were equal"),
        (MMGRPO(MMGRPOSettings()), {"groups": 0}, "no run called a trained component"),
        (MyGO(MyGOSettings()), {"threshold": 0.75}, "no attempt reached the threshold 0.75"),
        (
            MyGO(MyGOSettings()),
            {},
            "the recipe returned no samples to imitate",
        ),  # a recipe without facts
    ],
)
def test_why_a_step_has_nothing_to_learn_from(
    recipe: Recipe, facts: dict[str, Any], why: str
) -> None:
    drawn = StepBatch(CreditedSamples([], [0.0, 0.0], facts), {"failed": 0, "failure": "", **facts})
    assert reason_without_samples(recipe, drawn) == why


@pytest.mark.parametrize(
    ("name", "step", "components"),
    [("mmgrpo", 6.0, 2), ("mhgpo_is", 9.0, 2), ("ppo", 6.0, 1), ("mygo", 6.0, 2)],
)
def test_a_job_says_what_its_steps_take(name: str, step: float, components: int) -> None:
    program = load(ATLAS, overrides=[*SMALL_SECTIONS, ("optimize.method", name)])
    made = method(name, program.system, program.optimize)
    assert {(job.step, job.steps, len(job.keys)) for job in made.jobs} == {(step, 2, components)}
    assert [job.least(8) for job in made.jobs] == [step] * len(made.jobs)
    assert method("random", program.system, program.optimize).jobs[0].least(8) == 16.0
    (first, *_) = estimate(replace(program, optimize=program.optimize))["steps"]
    assert first["runs_per_step"] == step


def test_a_dry_run_says_how_many_steps_the_budget_holds() -> None:
    """Of 240 runs 40 are the baseline's. The decision takes 30.25, since a quarter of a run, the call of
    the finder, is cached and the last run is reserved as a whole one: 169.75 hold seven steps of 24.
    """
    small = {"steps": 25, "rollouts": {"examples": 3, "runs": 8}}
    overrides = [("optimize.mmgrpo", json.dumps(small)), ("optimize.method", "mmgrpo")]
    program = load(ATLAS, overrides=[*overrides, ("optimize.budget.system_runs", "240")])
    (found,) = estimate(program)["steps"]
    assert (found["steps"], found["runs_per_step"], found["budget_holds"]) == (25, 24.0, 7)
    few = load(
        ATLAS,
        overrides=[*overrides, ("optimize.budget", "{calls: 1000}"), ("optimize.train_size", "2")],
    )
    (found,) = estimate(few)["steps"]
    assert (found["runs_per_step"], found["unless_ended_by"]) == (16.0, ["calls"])


def test_the_trainer_computes_in_the_format_of_the_engine(model: Path, tmp_path: Path) -> None:
    system = load(ATLAS, overrides=[("lm", str(model))]).system
    engines = [
        TransformersEngine(str(model), dtype="float32"),
        TransformersEngine(str(model), dtype="bfloat16"),
    ]
    for engine in engines:
        planned = PlannedTraining(system, ("namer",), {str(model): engine}.__getitem__)
        assert (planned.base, planned.placement.dtype) == (str(model), engine.dtype)
    assert [engine.dtype for engine in engines] == ["float32", "bfloat16"]
    names = ("namer", "answerer")
    both = iter(engines)
    with pytest.raises(
        DeclarationError, match=r"one number format, but have namer: float32, answerer: bfloat16"
    ):
        _ = PlannedTraining(system, names, lambda _: next(both)).placement
    unsaid: Iterator[Any] = iter([engines[0], ScriptedLM("a")])
    assert PlannedTraining(system, names, lambda _: next(unsaid)).placement.dtype == "float32"


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_the_trainer_says_what_the_sampler_said_at_any_temperature(
    temperature: float, model: Path, tmp_path: Path
) -> None:
    """Otherwise every sample would count as another policy's."""
    sampled: list[Any] = []
    step = Trainer.step

    def kept(self: Trainer, samples: Any, number: int, **how: Any) -> Any:
        ours = self.passes.logps(samples, base=False)
        sampled.extend((sample, ours[id(sample)][: sample.length].tolist()) for sample in samples)
        return step(self, samples, number, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", kept)
        asyncio.run(
            trained(model, "mappo", tmp_path, temperature=temperature, steps=1, dtype="float32")
        )
    assert sampled
    for sample, ours in sampled:
        assert ours == pytest.approx(sample.tokens.logprobs, abs=LOGPROBS / temperature)
