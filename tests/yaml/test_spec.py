"""Reading a file: every kind, setting and section becomes what Python would have declared."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any, Literal

import jsonschema
import pytest

from compound import Dataset, Example, Function, Retriever, Score
from compound.components.index import BM25, Dense, PassageIndex
from compound.core.errors import DeclarationError, SpecError
from compound.evaluation.metrics.built_in import TokenF1
from compound.graph.space import Choice
from compound.yaml import Program, load, loads, schema
from compound.yaml.source import read
from processes import python

ROOT = Path(__file__).parents[2]
FILES = ROOT / "tests" / "files" / "spec"
DESIGN, EVERYTHING, SMALL = (
    (FILES / f"{name}.yaml").read_text("utf-8") for name in ("design", "everything", "small")
)


def folder_with(folder: Path, text: str) -> Path:
    """Write a file beside the module and the corpus that it names."""
    shutil.copytree(FILES, folder, dirs_exist_ok=True)
    path = folder / "system.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def one(component: str, *, inputs: str = "question: str", more: str = "") -> Program:
    """Load a file with one component whose output is the system's."""
    return loads(
        f"system: one\nlm: smollm2\ninputs: {{{inputs}}}\ncomponents:\n  c: {component}\noutputs: {{out: $c}}\n{more}"
    )


def settings(component: str) -> dict[str, Any]:
    return dict(one(component).system.components["c"].settings)


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return load(folder_with(tmp_path_factory.mktemp("everything"), EVERYTHING))


def test_the_example_of_the_design_loads(tmp_path: Path) -> None:
    path = tmp_path / "system.yaml"
    path.write_text(DESIGN, encoding="utf-8")
    program = load(path)
    assert list(program.system.nodes) == ["rewriter", "searcher", "answerer"]
    assert dict(program.system.configuration) == {
        "answerer.prompt": "Answer in a few words.",
        "rewriter.prompt": "Rewrite the question as a search query.",
        "searcher.k": 5,
    }
    assert program.system.defaults == {"lm": "smollm2"}
    assert program.data == Dataset("hf://datasets/data/hotpotqa", "train", "dev", "test")
    assert program.metric == TokenF1("token_f1", "answer", "answer")
    assert program.optimize.method == "search"
    assert program.optimize.budget.system_runs == 400
    assert program.text == DESIGN
    assert program.path == path


def test_every_kind_of_component_loads(everything: Program) -> None:
    kinds = {name: component.kind for name, component in everything.system.components.items()}
    expected = "function llm retriever selector hyperparameter loop map first_of cutter"
    assert set(kinds.values()) == set(expected.split())
    assert (
        everything.system.nodes["hop2"].component is everything.system.nodes["rewriter"].component
    )


def test_engines_of_the_file_come_before_the_convention(
    everything: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(
        "compound.yaml.program.open_engine", lambda kind, **given: opened.append((kind, given))
    )
    monkeypatch.setattr(
        "compound.yaml.program.find_engine", lambda lm: opened.append(("by name", {"lm": lm}))
    )
    for lm in ("mock", "openai/gpt-4o-mini"):
        everything.find_engine(lm)
    assert opened == [
        vars(everything.find_engine)["engines"]["mock"],
        ("by name", {"lm": "openai/gpt-4o-mini"}),
    ]


def test_an_engine_with_settings_of_another_kind_names_its_entry(
    everything: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    def strict(kind: str, *, model: str) -> None: ...

    monkeypatch.setattr("compound.yaml.program.open_engine", strict)
    with pytest.raises(DeclarationError, match=r"mock\.litellm: .*unexpected keyword .*'api_base'"):
        everything.find_engine("mock")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1e-6", 1e-6),
        (".5", 0.5),
        ("5.", 5.0),
        ("on", "on"),
        ("yes", "yes"),
        ("No", "No"),
        ("true", True),
        ("012", 12),
        ("0o17", 15),
        ("0x1F", 31),
        ("1_000", "1_000"),
        ("2024-01-01", "2024-01-01"),
        ("1:30", "1:30"),
        ("~", None),
        ("null", None),
        ('"1"', "1"),
        ("<<", "<<"),
        ("=", "="),
        ("-3", -3),
        ("[a, 1]", ["a", 1]),
        ("{a: {b: on}}", {"a": {"b": "on"}}),
    ],
)
def test_scalars_mean_what_yaml_1_2_says(tmp_path: Path, text: str, expected: object) -> None:
    component = f"{{class: 'parts:Cutter', settings: {{extra: {text}}}, in: {{text: $question}}}}"
    source = f"system: s\ninputs: {{question: str}}\ncomponents: {{c: {component}}}\noutputs: {{o: $c}}\n"
    cutter: Any = load(folder_with(tmp_path, source)).system.components["c"]
    assert cutter.extra == expected
    assert type(cutter.extra) is type(expected)


def test_types_are_spelled_as_in_messages() -> None:
    program = one("{llm: {}, in: {question: $question}, out: 'one of yes, no'}")
    assert program.system.outputs["out"].type == Literal["yes", "no"]
    program = one(
        "{llm: {}, in: {question: $question}, out: 'list[str] | None'}",
        inputs="question: 'dict[str, any]'",
    )
    assert program.system.outputs["out"].type == list[str] | None
    assert program.system.inputs == {"question": dict[str, Any]}


def test_indexes_are_declared_with_paths_beside_the_file(everything: Program) -> None:
    folder = everything.path.parent
    indexes = {
        n: c.index for n, c in everything.system.components.items() if isinstance(c, Retriever)
    }
    assert indexes == {
        "searcher": BM25(folder / "corpus.jsonl"),
        "finder": Dense(folder / "corpus.jsonl", "some/encoder", device="cpu"),
        "ranker": PassageIndex(),
    }


def test_data_beside_the_file_comes_before_the_hub(tmp_path: Path) -> None:
    path = folder_with(tmp_path / "nested", DESIGN)
    found = load(path).data
    assert found is not None
    assert found.path == "hf://datasets/data/hotpotqa"
    (path.parent / "data" / "hotpotqa").mkdir(parents=True)
    found = load(path).data
    assert found is not None
    assert found.path == path.parent / "data/hotpotqa"


def test_a_metric_of_ones_own_is_a_function(everything: Program) -> None:
    assert everything.metric is not None
    assert everything.metric.name == "score"
    score = everything.metric.score({}, Example("e", {}))
    assert isinstance(score, Score)
    assert score.value == 1.0


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    path = tmp_path / "system.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + SMALL.replace("\n", "\r\n").encode())
    assert load(path).system.signature == loads(SMALL).system.signature


def test_overrides_replace_entries_before_anything_is_checked() -> None:
    program = loads(
        SMALL,
        overrides=[
            ("optimize.budget.system_runs", "150"),
            ("optimize.alpha", "1e-3"),
            ("lm", "openai/gpt-4o-mini"),
            ("components.size.hyperparameter.choice.1", "7"),
            ("components.thinker.llm.prompt", "{tune: Plan.}"),
            ("data.path", "here.jsonl"),
        ],
    )
    assert program.optimize.budget.system_runs == 150
    assert program.optimize.budget.calls == 10
    assert program.optimize.alpha == 1e-3
    assert program.system.defaults == {"lm": "openai/gpt-4o-mini"}
    assert program.system.parameters["size.value"] == Choice(1, 7)
    assert program.system.configuration["thinker.prompt"] == "Plan."
    assert program.data is not None
    assert program.text == SMALL


def test_an_override_can_mend_a_broken_entry() -> None:
    broken = SMALL.replace("seed: 3", "seed: .inf")
    assert loads(broken, overrides=[("optimize.seed", "4")]).optimize.seed == 4


def test_code_is_found_beside_the_file_and_the_path_stays_as_it_was(tmp_path: Path) -> None:
    before = list(sys.path)
    path = folder_with(tmp_path, EVERYTHING)
    (tmp_path / "parts.py").write_text(
        (tmp_path / "parts.py").read_text() + "\nimport helper_of_parts\n"
    )
    (tmp_path / "helper_of_parts.py").write_text("")
    assert isinstance(load(path).system.components["router"], Function)
    assert sys.path == before


def test_two_folders_may_each_have_a_module_of_the_same_name(tmp_path: Path) -> None:
    first, second = folder_with(tmp_path / "a", EVERYTHING), folder_with(tmp_path / "b", EVERYTHING)
    changed = (second.parent / "parts.py").read_text().replace("text.upper()", "text.lower()")
    (second.parent / "parts.py").write_text(changed)
    shouted = []
    for path in (first, second, first):
        shouter = load(path).system.components["shouter"]
        assert isinstance(shouter, Function)
        shouted.append(shouter.function("Hi"))
    assert shouted == ["HI", "hi", "HI"]


def test_reading_a_file_loads_no_heavy_library(tmp_path: Path) -> None:
    path = folder_with(tmp_path, EVERYTHING)
    code = (
        "import sys; from compound.yaml import load, schema; load(sys.argv[1]); schema(); "
        "print([m for m in ('torch', 'transformers', 'optuna', 'litellm', 'bm25s', 'datasets', 'trl', 'peft') "
        "if m in sys.modules])"
    )
    done = python("-c", code, str(path), env={"HF_HUB_OFFLINE": "1"})
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("text", [DESIGN, EVERYTHING, SMALL])
def test_good_files_fit_the_json_schema(text: str) -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    jsonschema.validate(read(text, "x.yaml").tree, schema(), cls=jsonschema.Draft202012Validator)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("system: small", "sytem: small"),
        ("system: small", "system: 3"),
        ("llm: {prompt: {tune: Think.}", "lmm: {prompt: {tune: Think.}"),
        ("{tune: Think.}", "{tune: Think., valu: 1}"),
        ("{tune: Think.}", "[Think]"),
        ("max_tokens: {int: [8, 64], log: true}", "max_tokens: {int: [8]}"),
        ("{choice: [1, 2]}", "{choice: []}"),
        ("$question}}\n  size", "question}}\n  size"),
        ("outputs: {verdict: $judge}", "outputs: {}"),
        ("exact_match", "exact_mach"),
        ("{output: verdict}", "{otput: verdict}"),
        ("seed: 3", "seed: -3"),
        ("calls: 10", "call: 10"),
        ("thinker:", "2thinker:"),
        ("in: {thought", "inn: {thought"),
    ],
)
def test_bad_files_do_not_fit_the_json_schema(old: str, new: str) -> None:
    assert old in SMALL
    text = SMALL.replace(old, new)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(
            read(text, "x.yaml").tree, schema(), cls=jsonschema.Draft202012Validator
        )
    with pytest.raises(SpecError):
        loads(text)


def test_the_json_schema_describes_every_setting_and_is_json() -> None:
    found = json.loads(json.dumps(schema()))
    assert found["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    parts = [part for name, part in found["$defs"].items() if name.startswith(("kind_", "bm25"))]
    assert len(parts) > 5
    fields = [field for part in (found, *parts) for field in part["properties"].values()]
    assert all(field.get("description") for field in fields)
    kinds = next(iter(found["properties"]["components"]["patternProperties"].values()))["oneOf"]
    assert len(kinds) == 12
    assert all(f'"{name}"' in json.dumps(found) for name in ("rubric", "pairwise", "rouge"))
