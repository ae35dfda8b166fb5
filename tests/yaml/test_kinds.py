"""Component kinds, metrics and engines of installed packages, as files name them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import compound as cp
from compound.core.errors import SpecError
from compound.evaluation.metrics.custom import bounds_hint
from compound.graph.registry import plugins as module
from compound.graph.registry.plugins import plugins
from compound.yaml import loads, schema

MISTAKES = yaml.safe_load(
    (Path(__file__).parents[1] / "files/spec/extensions.yaml").read_text("utf-8")
)
SOURCE = '''\
import threading
from collections.abc import Callable

import compound as cp


class Shout(cp.ext.Operation):
    """Shout a text.

    Args:
        name: the name of the component.
        mark: what stands at the end.
        times: how often.
    """

    kind, version = "shout", "1"
    inputs = {"text": cp.Port(str)}
    outputs = {"output": cp.Port(str)}

    def __init__(self, name: str, mark: str | cp.Text = "!", times: int | cp.Int = 1, calm: bool = False) -> None:
        if mark == "?":
            raise ValueError("that is a question")
        self.name, self.mark, self.times, self.calm = name, mark, times, calm

    @property
    def settings(self):
        return {"mark": self.mark, "times": self.times}

    async def run(self, inputs, values, call):
        return {"output": inputs["text"].upper() + values["mark"] * values["times"]}


class Needs(Shout):
    def __init__(self, name: str, mark: str) -> None:
        super().__init__(name, mark)


class Renamed(Shout):
    def __init__(self, name: str) -> None:
        super().__init__("other")


def length(output: str, most: int = 3) -> cp.ext.Metric:
    """Score 1 for short texts."""
    return cp.metrics.custom(lambda outputs, example: float(len(outputs[output]) <= most), "length")


class Parrot:
    """Repeat."""

    name, concurrency, remote, priced = "parrot", 1, False, True
    code_settings = ("program",)

    def __init__(self, words: int = 3, server: str = "", token_key_env: str | None = None, program: str = "") -> None:
        self.words = words

    def worst_case(self, request):
        return cp.ext.Usage(1, 1, request.max_tokens)

    async def generate(self, request):
        return cp.ext.Completion("polly", cp.ext.Usage(1, 1, 1), "stop")

    async def aclose(self):
        pass


class Held(Shout):
    def __init__(
        self, name: str, mark: str = "!", lock: threading.Thread | None = None, pool: "Pool | None" = None,
        done: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(name, mark)
        self.lock, self.pool, self.done = lock, pool, done


class Locked(Shout):
    def __init__(self, name: str, lock: threading.Thread) -> None:
        super().__init__(name)


class Reserved(Shout):
    def __init__(self, name: str, when: str = "now") -> None:
        super().__init__(name)


class Given(Shout):
    def __init__(self, name: str, given: str = "x") -> None:
        super().__init__(name)


class Alone(Shout):
    async def run(self, inputs):
        return {"output": ""}


number = 3
'''
SERVER = '"https://birds.example/v1"'
FILE = """\
system: demo
lm: smollm2
inputs: {text: str}
components:
  loud: {ENTRY, in: {text: $text}}
outputs: {y: $loud}
"""


class Distribution:
    name = "demo-package"


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    (tmp_path / "shouting.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    named = {
        "components": {
            "shout": "Shout",
            "needs": "Needs",
            "renamed": "Renamed",
            "none": "number",
            "gone": "gone",
            "llm": "Shout",
            "held": "Held",
            "locked": "Locked",
            "reserved": "Reserved",
            "given": "Given",
            "alone": "Alone",
        },
        "metrics": {"length": "length"},
        "engines": {"parrot": "Parrot"},
    }
    points = {
        f"compound.{group}": [
            EntryPoint(name, f"shouting:{value}", f"compound.{group}")
            for name, value in names.items()
        ]
        for group, names in named.items()
    }
    for point in (point for group in points.values() for point in group):
        vars(point)["dist"] = Distribution()
    monkeypatch.setattr(module, "entry_points", lambda group: points.get(group, []))
    plugins.cache_clear()
    yield
    plugins.cache_clear()
    sys.modules.pop("shouting", None)


def file(entry: str, **more: str) -> str:
    return FILE.replace("ENTRY", entry) + "".join(
        f"{key}: {value}\n" for key, value in more.items()
    )


def problems(text: str, **options: Any) -> list[str]:
    with pytest.raises(SpecError) as info:
        loads(text, **options)
    return [problem.removeprefix("system.yaml:") for problem in info.value.problems]


class TestKinds:
    def test_settings_are_arguments(self) -> None:
        system = loads(file('shout: {mark: "!!", times: {int: [1, 3], value: 2}}')).system
        assert cp.run(system, {"text": "a"}).outputs == {"y": "A!!!!"}
        assert system.parameters == {"loud.times": cp.Int(1, 3, value=2)}

    def test_a_file_without_it_imports_nothing(self) -> None:
        loads(file("llm: {}"))
        assert "shouting" not in sys.modules

    @pytest.mark.parametrize(("entry", "said"), MISTAKES["installed"])
    def test_mistakes_in_the_file_are_reported_at_their_place(self, entry: str, said: str) -> None:
        assert [p for p in problems(file(entry)) if p.startswith(said)], problems(file(entry))

    @pytest.mark.parametrize(("entry", "said"), MISTAKES["packages"])
    def test_mistakes_of_the_package_are_named(self, entry: str, said: str) -> None:
        with pytest.raises(SpecError, match=said) as info:
            loads(file(entry))
        assert "system.yaml:5:" in str(info.value)

    def test_a_parameter_that_no_file_can_hold_keeps_its_default(self) -> None:
        system = loads(file("held: {mark: x}")).system
        assert vars(system.components["loud"])["lock"] is None
        assert "5:17: components.loud.held.lock: unknown key; possible: mark" in problems(
            file("held: {lock: 3}")
        )


class TestMetrics:
    @pytest.mark.parametrize(("metric", "said"), MISTAKES["metrics"])
    def test_mistakes(self, metric: str, said: str) -> None:
        assert said in problems(file("shout: {}", metric=metric)), problems(
            file("shout: {}", metric=metric)
        )


class TestByPlace:
    """Metrics, engines and components of a module, with their settings."""

    def test_an_engine(self) -> None:
        engine = '{bird: {class: "shouting:Parrot", settings: {words: 2}}}'
        program = loads(file("llm: {lm: bird}", engines=engine))
        assert vars(program.find_engine("bird")) == {"words": 2}
        assert cp.run(program.system, {"text": "a"}).outputs == {"y": "polly"}
        assert vars(program.find_engine)["engines"] == {"bird": ("shouting:Parrot", {"words": 2})}

    def test_a_metric(self) -> None:
        metric = '{custom: {call: "shouting:length", settings: {output: y, most: 1}}}'
        found = loads(file("shout: {}", metric=metric)).metric
        assert found is not None
        assert found.score({"y": "ab"}, cp.Example("e", {})) == cp.Score(0.0)

    @pytest.mark.parametrize(("entry", "more", "said"), MISTAKES["named"])
    def test_mistakes(self, entry: str, more: dict[str, str], said: str) -> None:
        found = problems(file(entry, **more))
        assert [problem for problem in found if problem.startswith(said)], found

    def test_how_to_declare_bounds_is_said_in_the_syntax_of_the_file(self) -> None:
        for settings, hint in (
            ("", "metric: {custom: {…, bounds: [0, 1]}}"),
            (", settings: {output: y}", "bounds=(0, 1)"),
        ):
            found = loads(
                file("shout: {}", metric=f'{{custom: {{call: "shouting:length"{settings}}}}}')
            ).metric
            assert found is not None
            assert hint in bounds_hint(found)


class TestEngines:
    def test_a_file_names_it(self) -> None:
        program = loads(file("llm: {lm: bird}", engines="{bird: {parrot: {words: 2}}}"))
        assert vars(program.find_engine("bird")) == {"words": 2}
        assert cp.run(program.system, {"text": "a"}).outputs == {"y": "polly"}

    @pytest.mark.parametrize(
        ("engine", "options", "said", "trust"),
        [
            (
                f"{{parrot: {{server: {SERVER}}}}}",
                {},
                "7:35: engines.bird.parrot.server: the file sends prompts to",
                ["birds.example"],
            ),
            (
                f"{{parrot: {{server: {SERVER}, token_key_env: BIRD_KEY}}}}",
                {"trust": ["birds.example"]},
                "7:78: engines.bird.parrot.token_key_env: ",
                ["BIRD_KEY@birds.example"],
            ),
            (
                f'{{class: "shouting:Parrot", settings: {{server: {SERVER}}}}}',
                {},
                "7:63: engines.bird.settings.server: ",
                ["birds.example"],
            ),
            (
                "{parrot: {program: sh}}",
                {"allow_import": False},
                "7:36: engines.bird.parrot.program: is a command to run, and imports are not allowed",
                [],
            ),
            (
                '{class: "shouting:Parrot"}',
                {"allow_import": False},
                "7:25: engines.bird.class: names Python code (shouting:Parrot)",
                [],
            ),
        ],
        ids=["server", "key", "server by place", "program", "code"],
    )
    def test_servers_keys_and_programs_need_consent(
        self, engine: str, options: dict[str, Any], said: str, trust: list[str]
    ) -> None:
        text = file("llm: {lm: bird}", engines=f"{{bird: {engine}}}")
        (found,) = problems(text, **options)
        assert found.startswith(said)
        assert loads(text, trust=trust).system.nodes


def test_the_schema_holds_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    points = vars(module)["entry_points"]("compound.components")
    monkeypatch.setattr(
        module,
        "entry_points",
        lambda group: [p for p in points if p.name == "shout"] if group.endswith("ponents") else [],
    )
    plugins.cache_clear()
    validator = jsonschema.Draft202012Validator(schema())
    good = {
        "system": "demo",
        "inputs": {"text": "str"},
        "outputs": {"y": "$loud"},
        "components": {"loud": {"shout": {"mark": {"tune": "!"}}, "in": {"text": "$text"}}},
    }
    assert list(validator.iter_errors(good)) == []
    bad = {**good, "components": {"loud": {"shout": {"mrak": "!"}}}}
    assert list(validator.iter_errors(bad))
