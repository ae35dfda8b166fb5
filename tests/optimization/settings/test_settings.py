"""Settings: one model for each method, sections of any method, methods of one's own, and earlier spellings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest
from pydantic import BaseModel

import compound as cp
from compound.api.result import read_result
from compound.core.errors import RunDirectoryError, SpecError
from compound.optimization.runs.changes import FORMAT, list_changes
from compound.optimization.settings.base import CommonSettings
from compound.optimization.settings.optimize import OptimizeSettings, make_settings
from compound.optimization.settings.sections import optimize_model
from compound.optimizers.methods import METHODS, method
from compound.optimizers.weights.recipes.mmgrpo import MMGRPOSettings
from compound.yaml import load, loads, schema
from training_settings import training

ATLAS = Path(__file__).parents[3] / "benchmarks" / "atlas.yaml"
MOST = 17  # fields of one model
OTHER_LIBRARIES = {
    "learning_rate": "use optimize.mmgrpo.optimizer.lr",
    "num_generations": "use optimize.mmgrpo.rollouts.runs",
    "scale_rewards": "use optimize.mmgrpo.scale",
    "beta": "use optimize.mmgrpo.loss.grpo.beta",
    "kl_loss_coef": "use optimize.mmgrpo.loss.grpo.beta",
    "epsilon_high": "use optimize.mmgrpo.loss.grpo.clip_high",
    "per_device_train_batch_size": "use optimize.mmgrpo.optimizer.micro_tokens",
    "gradient_accumulation_steps": "use optimize.mmgrpo.optimizer.micro_tokens",
    "warmup_ratio": "use optimize.mmgrpo.optimizer.warmup_steps",
    "num_train_epochs": "use optimize.mmgrpo.steps",
    "weight_decay": "use optimize.mmgrpo.optimizer.weight_decay",
    "lora_dropout": "adapters have no dropout; optimizer.weight_decay regularizes them",
    "max_completion_length": "set max_tokens of the component",
    "lora_r": "set weights: {lora: {rank: …}} of the component",
    "lora": "set weights: {lora: {rank: …}} of the component",
    "peft_config": "set weights: {lora: {rank: …}} of the component",
    "wd": "use optimize.mmgrpo.optimizer.weight_decay",
}

OWN = '''
import compound as cp
from compound.optimization.method import Job, Method
from compound.optimizers.baselines.random import RandomSearch
from compound.optimizers.scheduling import Uniform


class AnnealingSettings(cp.ext.Settings):
    temperature: float = 1.0
    """The temperature at the start."""


@cp.ext.method(settings=AnnealingSettings)
def anneal(system, optimize, settings):
    jobs = [Job("random", tuple(system.parameters), weight=settings.temperature)]
    return Method("anneal", {"random": RandomSearch()}, jobs, Uniform())


def plain(system, optimize):
    return Method("plain", {"random": RandomSearch()}, [Job("random", tuple(system.parameters))], Uniform())
'''
FILE = """
system: small
lm: smollm2
inputs: {q: str}
components:
  a: {llm: {prompt: {tune: x}}, in: {q: $q}}
outputs: {y: $a}
"""


def own(folder: Path, optimize: str) -> Path:
    (folder / "annealing.py").write_text(OWN)
    file = folder / "system.yaml"
    file.write_text(f"{FILE}optimize: {optimize}\n")
    return file


def parts(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Yield a model and all models in its fields."""
    yield model
    for field in model.model_fields.values():
        for argument in (field.annotation, *get_args(field.annotation)):
            for inner in (argument, *get_args(argument)):
                if isinstance(inner, type) and issubclass(inner, BaseModel):
                    yield from parts(inner)


@pytest.mark.parametrize("name", METHODS)
def test_no_model_has_more_fields_than_one_can_read(name: str) -> None:
    models = set(parts(METHODS[name].settings))
    assert all(len(model.model_fields) <= MOST for model in models)
    fields = [field for model in models for field in model.model_fields.values()]
    assert all(field.description for field in fields)
    assert len(CommonSettings.model_fields) <= MOST + 3


class TestSections:
    def test_a_section_is_a_model_or_a_mapping(self) -> None:
        given = OptimizeSettings(method="mmgrpo", mmgrpo=MMGRPOSettings(steps=3))
        assert given == OptimizeSettings(method="mmgrpo", mmgrpo={"steps": 3})
        assert given.section("mmgrpo", MMGRPOSettings).steps == 3
        assert OptimizeSettings().section("mmgrpo", MMGRPOSettings) == MMGRPOSettings()
        assert make_settings(given.given) == given
        assert make_settings(given.model_dump()).model_dump() == given.model_dump()

    def test_a_section_is_checked_whether_its_method_is_chosen_or_not(self) -> None:
        with pytest.raises(SpecError, match=r"optimize.mygo.attempts: must be >= 1, but got 0"):
            loads(f"{FILE}optimize: {{method: search, mygo: {{attempts: 0}}}}")
        with pytest.raises(cp.CompoundError, match=r"mygo.attempts: Input should be greater"):
            make_settings({"method": "search", "mygo": {"attempts": 0}})

    def test_all_mistakes_are_named_at_once(self) -> None:
        text = f"{FILE}optimize:\n  sed: 1\n  mmgrpo: {{step: 1, optimizer: {{lr: x}}}}\n"
        with pytest.raises(SpecError) as raised:
            loads(text)
        told = str(raised.value)
        assert "optimize.sed: unknown key; did you mean 'seed'?" in told
        assert "optimize.mmgrpo.step: unknown key; did you mean 'steps'?" in told
        assert "optimize.mmgrpo.optimizer.lr: must be a number, but got 'x'" in told

    @pytest.mark.parametrize(
        ("section", "message"),
        [
            ("random: {k: 1}", "optimize.random: unknown key; method 'random' has no settings"),
            ("mmgrpo: {lrr: 1}", "optimize.mmgrpo.lrr: unknown key; did you mean optimizer.lr?"),
            (
                "better_together: {interleave: {every: 5}}",
                "optimize.better_together.interleave: unknown key; it was removed; list the search",
            ),
            (
                "optimas: {training: {ppo: {critic: {adapter: null}}}}",
                "critic.adapter: unknown key; it was removed; the value head reads the states of the policy",
            ),
            ("gepa: {steps: 1}", "optimize.gepa.steps: unknown key; it belongs to textgrad, ppo"),
            (
                "learning_rate: 1",
                "learning_rate: unknown key; set optimizer.lr in the section of the method",
            ),
            *(
                (f"mmgrpo: {{{name}: 1}}", f"optimize.mmgrpo.{name}: unknown key; {hint}")
                for name, hint in OTHER_LIBRARIES.items()
            ),
            ("mappo: {epsilon: 1}", "unknown key; use optimize.mappo.loss.dapo.clip"),
            (
                "mmgrpo: {loss: {dapo: {kl_coef: 1}}}",
                "unknown key; use optimize.mmgrpo.loss.dapo.beta",
            ),
            ("mmgrpo: {rollouts: {n: 1}}", "unknown key; use optimize.mmgrpo.rollouts.runs"),
            (
                "optimas: {training: {grpo: {learning_rate: 1}}}",
                "unknown key; use optimize.optimas.training.grpo.optimizer.lr",
            ),
        ],
    )
    def test_an_unknown_key_is_told_its_place(self, section: str, message: str) -> None:
        with pytest.raises(SpecError) as raised:
            loads(f"{FILE}optimize: {{{section}}}")
        assert message in str(raised.value)

    def test_a_single_setting_is_set_from_the_command_line(self) -> None:
        sets = [("optimize.mmgrpo.optimizer.lr", "0.5"), ("optimize.mmgrpo.loss.dapo.clip", "0.1")]
        program = load(ATLAS, overrides=sets)
        found = program.optimize.section("mmgrpo", MMGRPOSettings)
        assert found.optimizer.lr == 0.5
        assert (found.loss.name, found.loss.settings.model_dump()["clip"]) == ("dapo", 0.1)

    def test_a_method_reads_the_sections_of_its_stages(self) -> None:
        program = load(ATLAS, overrides=[("optimize.better_together.stages", "[mipro, mhgpo_rr]")])
        made = method("better_together", program.system, program.optimize)
        assert set(made.sections) == {"better_together", "mipro", "mhgpo_rr"}
        assert set(method("random", program.system, program.optimize).sections) == set()

    def test_the_schema_for_editors_knows_every_section(self) -> None:
        known = schema()
        document = {
            "system": "s",
            "inputs": {"q": "str"},
            "components": {"a": {"llm": {}, "in": {"q": "$q"}}},
            "outputs": {"y": "$a"},
            "optimize": {
                "method": "mine:anneal",
                "anneal": {"any": 1},
                "ppo": {"critic": {"lam": 0.9}},
            },
        }
        jsonschema.validate(document, known)
        for wrong in ({"ppo": {"critic": {"lamb": 0.9}}}, {"sed": 1}, {"ppo": {"loss": "sft"}}):
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate({**document, "optimize": wrong}, known)


class TestOwnMethods:
    """A method of one's own has settings like any other."""

    def test_its_section_is_read(self, tmp_path: Path) -> None:
        for section in ("anneal", "'annealing:anneal'"):
            file = own(tmp_path, f"{{method: 'annealing:anneal', {section}: {{temperature: 0.5}}}}")
            program = load(file)
            made = method("annealing:anneal", program.system, program.optimize, tmp_path)
            assert made.jobs[0].weight == 0.5
            assert [own.model_dump() for own in made.sections.values()] == [{"temperature": 0.5}]

    def test_as_a_stage_it_has_its_section_too(self, tmp_path: Path) -> None:
        stages = "better_together: {stages: ['annealing:anneal', random]}"
        program = load(own(tmp_path, f"{{{stages}, anneal: {{temperature: 0.5}}}}"))
        assert program.optimize.sections["anneal"].model_dump() == {"temperature": 0.5}

    @pytest.mark.parametrize(
        ("section", "told"),
        [
            (
                "{temprature: 0.5}",
                "optimize.anneal.temprature: unknown key; did you mean 'temperature'?",
            ),
            (
                "{stages: [mipro]}",
                "optimize.anneal.stages: unknown key; it belongs to better_together",
            ),
            (
                "{temperature: warm}",
                "optimize.anneal.temperature: must be a number, but got 'warm'",
            ),
            ("5", "optimize.anneal: must be a mapping, but got 5"),
        ],
    )
    def test_a_mistake_in_it_is_named(self, tmp_path: Path, section: str, told: str) -> None:
        with pytest.raises(SpecError) as raised:
            load(own(tmp_path, f"{{method: 'annealing:anneal', anneal: {section}}}"))
        assert told in str(raised.value)

    def test_a_function_without_settings_has_no_section(self, tmp_path: Path) -> None:
        file = own(tmp_path, "{method: 'annealing:plain'}")
        program = load(file)
        assert method("annealing:plain", program.system, program.optimize, tmp_path).name == "plain"
        with pytest.raises(SpecError, match="optimize.plain.x: unknown key"):
            load(own(tmp_path, "{method: 'annealing:plain', plain: {x: 1}}"))

    def test_without_imports_its_section_is_not_looked_at(self, tmp_path: Path) -> None:
        file = own(tmp_path, "{method: 'annealing:anneal', anneal: {temprature: 1}}")
        with pytest.raises(SpecError) as raised:
            load(file, allow_import=False)
        assert len(raised.value.problems) == 1
        assert "imports are not allowed" in str(raised.value)


class TestEarlierVersions:
    @pytest.mark.parametrize(
        ("old", "told"),
        [
            ("method: mmgrpo, weights: {passes: 2}", "weights: is no longer a section"),
            ("method: optimas, rewards: {sure: 0.8}", "rewards: is no longer a section"),
            ("prompts: {}", "prompts: is no longer a section"),
            ("method: ppo, ppo: {warmup_steps: 3}", "use optimize.ppo.optimizer.warmup_steps"),
            ("method: ppo, ppo: {learning_rate: 3}", "use optimize.ppo.optimizer.lr"),
        ],
    )
    def test_the_present_place_is_named(self, old: str, told: str) -> None:
        with pytest.raises(SpecError) as raised:
            loads(f"{FILE}optimize: {{{old}}}")
        assert told in str(raised.value)

    def test_a_run_of_an_earlier_format_is_read_but_not_continued(self, tmp_path: Path) -> None:
        run = Path(__file__).parents[3] / "docs" / "notebooks" / "tiny_run"
        config = json.loads((run / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "format": 2}))
        with pytest.raises(RunDirectoryError, match="written by an earlier version.*not resumed"):
            list_changes(tmp_path, {**config, "format": FORMAT}, ())
        for name in ("checkpoint.json", "events.jsonl", "memory.jsonl"):
            if (run / name).exists():
                (tmp_path / name).write_bytes((run / name).read_bytes())
        assert read_result(tmp_path).best


def test_the_hint_of_a_metric_is_not_a_change(tmp_path: Path) -> None:
    def config(place: str) -> dict[str, Any]:
        return {"format": FORMAT, "metric": f"Custom(bounds_hint='{place}(…, bounds=(0, 1))')"}

    (tmp_path / "config.json").write_text(json.dumps(config("cp.custom")))
    assert list_changes(tmp_path, config("cp.metrics.custom"), ()) == []
    assert list_changes(tmp_path, config("cp.other"), ()) != []


def test_settings_that_may_change_are_ignored_in_any_section(tmp_path: Path) -> None:
    from compound.api.description import MAY_CHANGE

    def config(**given: Any) -> dict[str, Any]:
        return {"format": FORMAT, "optimize": training("optimas", given).model_dump(mode="json")}

    (tmp_path / "config.json").write_text(json.dumps(config(micro_tokens=64, lr=0.1)))
    assert list_changes(tmp_path, config(micro_tokens=128, max_length=99, lr=0.1), MAY_CHANGE) == []
    told = list_changes(tmp_path, config(micro_tokens=128, lr=0.2), MAY_CHANGE)
    assert told == ["optimize.optimas.training.ppo.optimizer.lr: 0.1 → 0.2"]


def test_sections_stand_beside_the_common_settings() -> None:
    assert not set(METHODS) & set(CommonSettings.model_fields)
    assert set(optimize_model().model_fields) - set(CommonSettings.model_fields) <= set(METHODS)


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("r", "set weights: {lora: {rank: …}} of the component"),
        ("lora_alpha", "set weights: {lora: {alpha: …}} of the component"),
        ("target_modules", "set weights: {lora: {targets: …}} of the component"),
        ("lora_dropout", "adapters have no dropout; optimizer.weight_decay regularizes them"),
        ("rnk", "did you mean 'rank'?"),
    ],
)
def test_names_of_peft_are_told_the_settings_of_an_adapter(key: str, hint: str) -> None:
    text = FILE.replace("{prompt: {tune: x}}", f"{{prompt: x, weights: {{lora: {{{key}: 1}}}}}}")
    with pytest.raises(SpecError, match=re.escape(f"weights.lora.{key}: unknown key; {hint}")):
        loads(text)
