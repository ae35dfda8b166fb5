"""Extensions of installed packages: found by name, imported when used, and reported when they are broken."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

import compound as cp
from compound.core.errors import DeclarationError
from compound.evaluation.metrics.custom import custom
from compound.evaluation.metrics.named import metric_factory
from compound.graph.registry import plugins as module
from compound.graph.registry.plugins import installed, plugins, warn_if_hidden
from compound.optimization.settings.optimize import make_settings
from compound.optimizers import methods
from compound.testing import ScriptedLM
from compound.yaml import loads

pytestmark = pytest.mark.usefixtures("without_reports")

SOURCE = """\
import compound as cp


class HillClimbSettings(cp.ext.Settings):
    step: float = 0.1


@cp.ext.optimizer(settings=HillClimbSettings, tunes=cp.Float)
class HillClimb:
    def __init__(self, settings):
        self.settings = settings

    async def propose(self, task):
        (key,) = task.keys
        value = task.system.configuration[key] + self.settings.step
        before, after = await task.scorer.score([{}, {key: value}], task.train)
        yield cp.ext.Proposal({key: value} if after.mean > before.mean else {}, before=before.mean, after=after.mean)


@cp.ext.optimizer
class Still:
    async def propose(self, task):
        yield cp.ext.Proposal({})
"""
YAML = """\
system: demo
lm: lm
inputs: {question: str}
components:
  answerer: {llm: {prompt: Answer., temperature: {float: [0.0, 1.0], value: 0.0}}, in: {question: $question}}
outputs: {answer: $answerer}
optimize: {method: hill_climb, hill_climb: {step: 0.25}}
"""


class Distribution:
    name = "demo-package"


@pytest.fixture
def declare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Pretend that a package is installed which declares entry points."""
    (tmp_path / "climbing.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))

    def declared(group: str, **names: str) -> None:
        points = []
        for name, value in names.items():
            point = EntryPoint(name, value, f"compound.{group}")
            vars(point)["dist"] = Distribution()
            points.append(point)
        known = dict(found)
        known[f"compound.{group}"] = [*known.get(f"compound.{group}", []), *points]
        found.update(known)
        plugins.cache_clear()

    found: dict[str, list[EntryPoint]] = {}
    monkeypatch.setattr(module, "entry_points", lambda group: found.get(group, []))
    plugins.cache_clear()
    yield declared
    plugins.cache_clear()
    sys.modules.pop("climbing", None)


def score(outputs: Mapping[str, Any], example: cp.Example) -> float:
    return float(outputs["answer"] == "warm")


def warm(message: str, rng: Any) -> str:
    return "warm"


class TestNames:
    def test_nothing_is_imported_to_list_them(self, declare: Any) -> None:
        declare("optimizers", hill_climb="climbing:HillClimb")
        assert (
            str(plugins("optimizers")["hill_climb"])
            == "'hill_climb' (climbing:HillClimb, from demo-package)"
        )
        assert list(installed()) == ["hill_climb"]
        assert "climbing" not in sys.modules

    def test_a_name_that_is_built_in_stays_what_it_is(self, declare: Any) -> None:
        declare("methods", search="climbing:HillClimb")
        assert list(installed()) == []
        assert methods.factory("search") is methods.METHODS["search"]

    def test_one_name_of_two_packages_is_refused(self, declare: Any) -> None:
        declare("optimizers", hill_climb="climbing:HillClimb")
        declare("optimizers", hill_climb="climbing:Still")
        with pytest.raises(DeclarationError, match=r"two packages add 'hill_climb' to compound"):
            plugins("optimizers")

    @pytest.mark.parametrize(
        ("value", "said"),
        [("nowhere:Thing", "ModuleNotFoundError"), ("climbing:Nothing", "AttributeError")],
    )
    def test_a_failing_package_is_named(self, declare: Any, value: str, said: str) -> None:
        declare("methods", broken=value)
        with pytest.raises(DeclarationError, match=f"'broken' .*demo-pack.* {said}") as info:
            methods.factory("broken")
        assert info.value.hint == "reinstall or remove the package demo-package"

    def test_an_unknown_method_is_compared_with_installed_ones(self, declare: Any) -> None:
        declare("optimizers", hill_climb="climbing:HillClimb")
        with pytest.raises(DeclarationError, match="no method 'hill_clim'") as info:
            methods.factory("hill_clim")
        assert "did you mean 'hill_climb'" in info.value.hint


class TestOptimizers:
    def test_a_file_names_it_with_its_settings(self, declare: Any) -> None:
        declare("optimizers", hill_climb="climbing:HillClimb")
        program = loads(YAML, models=["lm"], allow_import=False)  # an installed package may
        method = methods.method("hill_climb", program.system, program.optimize)
        assert method.sections["hill_climb"].model_dump() == {"step": 0.25}
        assert [job.keys for job in method.jobs] == [("answerer.temperature",)]

    def test_an_unknown_setting_is_named_at_its_place(self, declare: Any) -> None:
        declare("optimizers", hill_climb="climbing:HillClimb")
        with pytest.raises(cp.CompoundError) as info:
            loads(YAML.replace("step:", "stpe:"), models=["lm"])
        assert "7:45: optimize.hill_climb.stpe: unknown key; did you mean 'step'?" in str(
            info.value
        )

    def test_python_settings_are_checked(self, declare: Any) -> None:
        declare("optimizers", hill_climb="climbing:HillClimb")
        assert make_settings({"method": "hill_climb", "hill_climb": {"step": 1}}).sections
        with pytest.raises(DeclarationError, match=r"hill_climb\.step: .*valid number"):
            make_settings({"method": "hill_climb", "hill_climb": {"step": "far"}})

    @pytest.mark.parametrize("name", ["hill_climb", "climbing:HillClimb"])
    def test_it_runs(self, declare: Any, tmp_path: Path, name: str) -> None:
        declare("optimizers", hill_climb="climbing:HillClimb")
        section = name.rpartition(":")[2]
        sections: dict[str, Any] = {section: {"step": 0.5}}
        answerer = cp.LLM("answerer", prompt="Answer.", temperature=cp.Float(0.0, 1.0, value=0.0))
        system = cp.System(
            "demo", outputs={"answer": answerer(question=cp.Input("question", str))}, lm="lm"
        )
        rows = [{"question": f"{i}?", "answer": "warm"} for i in range(30)]
        found = cp.optimize(
            system,
            {"train": rows[:10], "valid": rows[10:20], "test": rows[20:]},
            custom(score, "score"),
            method=name,
            budget=300,
            run_dir=tmp_path / "run",
            engines={"lm": ScriptedLM(warm)},
            **sections,
        )
        assert found.after.mean == 1.0
        assert json.loads((tmp_path / "run" / "config.json").read_text())["optimize"][section] == {
            "step": 0.5
        }

    def test_one_without_settings_has_no_section(self, declare: Any) -> None:
        declare("optimizers", still="climbing:Still")
        with pytest.raises(DeclarationError, match="unknown setting still.step"):
            make_settings({"method": "still", "still": {"step": 1}})


METRIC = """\
import compound as cp


def brevity(words: int = 5):
    def score(outputs, example):
        return float(len(outputs["answer"].split()) <= words)

    return cp.metrics.custom(score, "brevity", bounds=(0, 1))


def plain(outputs, example):
    return 0.25


def none(words: int = 5):
    pass


def fails():
    raise ValueError("no words")
"""


class TestMetrics:
    @pytest.fixture(autouse=True)
    def measuring(self, declare: Any, tmp_path: Path) -> Iterator[None]:
        (tmp_path / "measuring.py").write_text(METRIC)
        declare(
            "metrics",
            **{name: f"measuring:{name}" for name in ("brevity", "plain", "none", "fails")},
        )
        yield
        sys.modules.pop("measuring", None)

    @pytest.mark.parametrize(
        ("name", "mean"), [("brevity", 1.0), ("plain", 0.25), ("exact_match", 0.0)]
    )
    def test_python_names_it(self, name: str, mean: float) -> None:
        answerer = cp.LLM("answerer")(question=cp.Input("question", str))
        system = cp.System("demo", outputs={"answer": answerer}, lm="lm")
        rows = [{"question": "?", "answer": "cold"}] * 2
        found = cp.evaluate(system, rows, name, engines={"lm": ScriptedLM(warm)})
        assert found.mean == mean

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("none", r"metric 'none' at .*measuring\.py:15 returned None, which is not a metric"),
            ("fails", r"'fails' failed at .*measuring\.py:20, in fails: ValueError: no words"),
            ("brevty", "no metric 'brevty'"),
        ],
    )
    def test_mistakes_are_named(self, name: str, said: str) -> None:
        with pytest.raises(cp.CompoundError, match=said):
            metric_factory(name)()


class TestDecorators:
    def test_a_class_without_propose_is_refused_with_its_place(self) -> None:
        decorate: Any = cp.ext.optimizer()
        with pytest.raises(cp.CompoundError, match=rf"at {__file__}:\d+, which has no .*propose"):

            @decorate
            class Idle:
                pass

    def test_settings_that_are_not_declared_are_refused(self) -> None:
        with pytest.raises(cp.CompoundError, match=r"optimizer 'idle' .* the signature") as info:

            @cp.ext.optimizer()
            class Idle:
                def __init__(self, settings: Any) -> None: ...
                async def propose(self, task: Any) -> Any:
                    yield cp.ext.Proposal({})

        assert "declare them: @cp.ext.optimizer(settings=MySettings)" in info.value.hint

    @pytest.mark.parametrize("settings", [dict, cp.ext.Settings()])
    def test_settings_that_are_none_are_refused(self, settings: Any) -> None:
        class Idle:
            def __init__(self, settings: Any) -> None: ...
            async def propose(self, task: Any) -> Any:
                yield cp.ext.Proposal({})

        decorate: Any = cp.ext.optimizer(settings=settings)
        with pytest.raises(cp.CompoundError, match=rf"'idle' at {__file__}:\d+ .*Settings"):
            decorate(Idle)
        with pytest.raises(cp.CompoundError, match="which is not a subclass of Settings"):
            cp.ext.method(settings=settings)(lambda system, optimize, settings: None)  # type: ignore[arg-type, return-value]

    def test_a_subclass_is_decorated_by_itself(self, declare: Any, tmp_path: Path) -> None:
        (tmp_path / "second.py").write_text(
            "from climbing import Still\nclass Second(Still): pass\n"
        )
        with pytest.raises(cp.CompoundError, match="is a class"):
            methods.factory("second:Second", tmp_path)

    def test_a_recipe_that_is_none_is_refused(self) -> None:
        decorate: Any = cp.ext.recipe

        class Plain(cp.ext.Recipe):
            pass

        with pytest.raises(cp.CompoundError, match="which is not a subclass of TrainingSettings"):
            decorate(settings=cp.ext.Settings)(Plain)
        with pytest.raises(cp.CompoundError, match="which is not a subclass of Recipe"):

            @decorate(settings=cp.ext.Settings)
            class Idle:
                pass

    def test_jobs_by_component(self, declare: Any, tmp_path: Path) -> None:
        (tmp_path / "apart.py").write_text(
            SOURCE.replace("@cp.ext.optimizer\n", "@cp.ext.optimizer(by_component=True)\n")
        )
        first = cp.LLM("a", prompt=cp.Text("A."), temperature=cp.Float(0.0, 1.0, value=0.0))(
            q=cp.Input("q", str)
        )
        second = cp.LLM("b", prompt=cp.Text("B."))(q=first)
        system = cp.System("demo", outputs={"y": second}, lm="lm")
        made = methods.method("apart:Still", system, cp.OptimizeSettings(), tmp_path)
        assert [job.keys for job in made.jobs] == [("a.prompt", "a.temperature"), ("b.prompt",)]


class TestHiddenNames:
    """An extension that takes a built-in name is reported, and never used."""

    BUILT_IN = (
        ("components", "llm"),
        ("components", "when"),
        ("engines", "litellm"),
        ("engines", "class"),
        ("metrics", "exact_match"),
        ("metrics", "custom"),
        ("methods", "search"),
        ("optimizers", "search"),
    )

    @pytest.mark.parametrize(("group", "name"), BUILT_IN)
    def test_the_command_marks_it(self, declare: Any, cli: Any, group: str, name: str) -> None:
        declare(group, **{name: "climbing:Still"})
        ran = cli("check", "--extensions")
        said = f"{group}: {name} (climbing:Still, from demo-package) its name is built in"
        assert said in ran.out
        assert "rename its entry point" in ran.out

    def test_using_the_name_warns_once(
        self, declare: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path
    ) -> None:
        declare("components", llm="climbing:Still", when="climbing:Still")
        declare("metrics", exact_match="climbing:Still")
        declare("methods", random="climbing:Still")
        warn_if_hidden.cache_clear()
        text = YAML.replace(
            "optimize: {method: hill_climb, hill_climb: {step: 0.25}}", "optimize: {method: random}"
        )
        for _ in range(2):
            program = loads(f"{text}metric: {{exact_match: {{output: answer}}}}\n", models=["lm"])
            methods.method("random", program.system, program.optimize)
        said = [record.getMessage() for record in caplog.records]
        names = [message.partition(" (")[0] for message in said]
        assert names == ["'llm'", "'exact_match'", "'random'"]
        assert all("is not used: its name is built in" in message for message in said)
        warn_if_hidden.cache_clear()


def test_the_command_lists_them(declare: Any, cli: Any) -> None:
    declare("optimizers", hill_climb="climbing:HillClimb")
    declare("metrics", broken="nowhere:Thing")
    found = cli("check", "--extensions")
    assert found.code == 0
    assert "optimizers: hill_climb (climbing:HillClimb, from demo-package)\n" in found.out
    assert "metrics: broken (nowhere:Thing, from demo-package) 'broken'" in found.out
