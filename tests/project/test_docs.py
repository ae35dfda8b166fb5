"""The documentation is correct: its code runs, its files load, and its commands and links exist."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import inspect
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.main import get_command

import compound as cp
from compound import testing
from compound.api.estimate import estimate
from compound.cli import app
from compound.evaluation.acceptance import paired_test
from compound.graph.space import Weights
from compound.testing import ScriptedLM
from compound.yaml import loads
from compound.yaml.kinds import BUILT_IN
from processes import python

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


YAML_REFERENCE = sorted((ROOT / "docs" / "reference").glob("yaml*.md"))


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(page.read_text("utf-8")) if kind == language]


def cases(language: str) -> list[Any]:
    return [
        pytest.param(page, text, id=f"{page.stem}-{i}")
        for page in PAGES
        for i, text in enumerate(blocks(page, language))
    ]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the files that the pages mention."""
    monkeypatch.chdir(tmp_path)
    passages = [
        {"id": f"p{i}", "title": f"T{i}", "text": f"Lima lies on river {i}."} for i in range(9)
    ]
    (tmp_path / "corpus.jsonl").write_text("\n".join(map(json.dumps, passages)))
    rows = [json.dumps({"question": f"Which river is {i}?", "answer": str(i)}) for i in range(60)]
    for name in ("data", "data/qa"):
        (tmp_path / name).mkdir()
        for split in ("train", "dev", "test"):
            (tmp_path / name / f"{split}.jsonl").write_text("\n".join(rows))
    shutil.copy(ROOT / "docs" / "examples" / "shop" / "questions.jsonl", tmp_path)
    (tmp_path / "reviews").mkdir()
    reviews = [
        json.dumps({"text": f"{i} stars", "label": ("negative", "positive")[i > 2]})
        for i in range(60)
    ]
    for split in ("train", "dev", "test"):
        (tmp_path / "reviews" / f"{split}.jsonl").write_text("\n".join(reviews))
    return tmp_path


def test_files_that_a_page_names_exist() -> None:
    folders = "compound|components|rewards|optimizers|benchmarks|tests|docs"
    named = re.compile(rf"`((?:{folders})/[\w./-]+\.\w+)`")
    pages = [ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *PAGES]
    names = {name for page in pages for name in named.findall(page.read_text("utf-8"))}
    assert len(names) > 30
    assert {name for name in names if not (ROOT / name).exists()} == set()


def beside(page: Path) -> dict[str, str]:
    """Return the modules of a page, which are the code blocks introduced as `NAME.py`."""
    text = page.read_text("utf-8")
    return dict(re.findall(r"`(\w+)\.py`:\n\n```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))


def execute(text: str, names: dict[str, Any]) -> None:
    """Run a code block of this repository's pages, which may use top-level await."""
    code = compile(text, "block", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    result = eval(code, names)
    if inspect.iscoroutine(result):
        asyncio.run(result)


def answering(message: str) -> str:
    return str((re.findall(r"\d+", message) or ["none"])[-1])


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:.*will be removed in v6:FutureWarning"
)  # of TRL's own arguments
@pytest.mark.filterwarnings(
    "ignore:You are using 'rollout_func'"
)  # which the guide to TRL says, too
@pytest.mark.parametrize(("page", "text"), cases("python"))
def test_code_runs(page: Path, text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "compound.graph.registry.engines.open_engine", lambda *_, **__: ScriptedLM(answering)
    )
    ask = cp.LLM("rewriter", prompt=cp.Text("Say a number."))(question=cp.Input("question", str))
    search = cp.Retriever("searcher", cp.components.BM25("corpus.jsonl"), k=cp.Choice(1, 5, 10))(
        query=ask
    )
    system = cp.System("demo", outputs={"passages": search}, lm="smollm2")
    executor = cp.Executor({"smollm2": ScriptedLM(answering)})
    names: dict[str, Any] = {
        "cp": cp,
        "system": system,
        "executor": executor,
        "trace": asyncio.run(executor.run(system, {"question": "Which river is 3?"})),
    }
    for name, values in [("demo", system.configuration), ("qa", {"searcher.k": 1})]:
        (folder / "runs" / name).mkdir(parents=True)
        cp.Configuration(values).save(folder / "runs" / name / "best.json")
    shutil.copytree(ROOT / "docs" / "notebooks" / "tiny_run", folder / "runs" / "tiny")
    shutil.copytree(folder / "runs" / "tiny", folder / "runs" / "hotpotqa")
    step = {
        "kind": "training",
        "step": 0,
        "reward": 0.5,
        "components": {"answerer": {"length": 9, "entropy": 1}},
    }
    with (folder / "runs" / "hotpotqa" / "memory.jsonl").open("a") as file:
        file.write(json.dumps(step) + "\n")
    (folder / "qa.yaml").write_text(blocks(ROOT / "docs" / "start.md", "yaml")[0])
    for module, code in beside(page).items():
        (folder / f"{module}.py").write_text(code)
    found = blocks(page, "python")
    for block in found[: found.index(text) + 1]:  # a block may build upon those before it
        execute(block, names)


@pytest.mark.parametrize(("page", "text"), cases("yaml"))
def test_files_load(page: Path, text: str, folder: Path) -> None:
    whole = yaml.safe_load(text)
    shared = YAML_REFERENCE if page in YAML_REFERENCE else [page]  # one of them has the module
    for module, code in (item for source in shared for item in beside(source).items()):
        (folder / f"{module}.py").write_text(code)
    if "system" in whole:
        loads(text, path=folder / "system.yaml")
        return
    base = yaml.safe_load((ROOT / "tests" / "files" / "spec" / "small.yaml").read_text())
    if "components" in whole:
        base = {
            "system": "s",
            "lm": "smollm2",
            "inputs": {"question": "str"},
            "outputs": {"y": "$answerer"},
        }
        base["data"] = {"path": "data"}
    guide = blocks(ROOT / "docs" / "guides" / "extending.md", "python")
    metrics = [block for block in guide if "def brevity(" in block or "def at_most(" in block]
    (folder / "my_metrics.py").write_text("\n".join(metrics))
    loads(yaml.safe_dump({**base, **whole}, sort_keys=False), path=folder / "system.yaml")


RECIPES = [text for text in blocks(ROOT / "docs" / "cookbook.md", "yaml") if "optimize:" in text]


@pytest.mark.slow
@pytest.mark.parametrize("text", RECIPES, ids=lambda text: text.split()[1])
def test_recipes_optimize(text: str, folder: Path) -> None:
    """Every recipe runs to a result; those that train weights are only planned."""
    for module, code in beside(ROOT / "docs" / "cookbook.md").items():
        (folder / f"{module}.py").write_text(code)
    small = [
        ("optimize.budget.system_runs", "60"),
        ("optimize.valid_size", "8"),
        ("optimize.test_size", "4"),
    ]
    program = loads(text, path=folder / "system.yaml", overrides=small)
    assert estimate(program)
    if any(isinstance(space, Weights) for space in program.system.parameters.values()):
        return
    assert program.data is not None
    assert program.metric is not None
    result = cp.optimize(
        program.system,
        program.data,
        program.metric,
        settings=program.optimize,
        run_dir=folder / "run",
        engines=lambda _: ScriptedLM(answering_recipes, price=1e-6),
        progress=False,
    )
    assert result.test_after is not None
    assert result.test_after.failed == 0


def answering_recipes(message: str) -> str:
    stars = re.findall(r"(\d+) stars", message)
    if stars:
        return "positive" if int(stars[-1]) > 2 else "negative"
    return answering(message)


@pytest.mark.parametrize(("page", "text"), cases("sh"))
def test_commands_exist(page: Path, text: str) -> None:
    commands: Any = get_command(app)
    targets = re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        if words[0] == "make":
            assert words[1] in targets
        elif words[0] == "compound":
            command = commands
            while hasattr(command, "commands"):
                command = command.commands[words.pop(1)]
            known = {option for p in command.params for option in p.opts} | {"--help"}
            assert {word for word in words if word.startswith("--")} <= known
        else:
            assert words[0] in ("curl", "git", "pip", "python") or words[:2] == ["ray", "start"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text("utf-8")):
        assert "://" in target or (page.parent / target).exists(), target


def test_the_tests_that_guard_against_defects_exist() -> None:
    named = re.findall(
        r"`(test_\w+)`", (ROOT / "docs" / "evidence" / "optimas_defects.md").read_text("utf-8")
    )
    tests = "".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 20
    assert [name for name in named if f"def {name}(" not in tests] == []


def maker(name: str) -> Any:
    made = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert made is not None
    assert made.loader is not None
    module = importlib.util.module_from_spec(made)
    made.loader.exec_module(module)
    return module


def test_the_references_of_settings_and_commands_are_current() -> None:
    for name, text in maker("make_reference").pages().items():
        assert (ROOT / "docs" / "reference" / name).read_text("utf-8") == text, "run: make docs"


def test_the_examples_that_must_improve_are_those_the_paired_test_asks_for() -> None:
    page = (ROOT / "docs" / "guides" / "nothing_found.md").read_text("utf-8")
    rows = [
        [c.strip() for c in li.split("|")[1:-1]] for li in page.splitlines() if li.startswith("| ")
    ]
    (start,) = [i for i, row in enumerate(rows) if row[0] == "planned decisions"]
    worse = [int(re.sub(r"\D", "", heading) or 0) for heading in rows[start][2:]]
    checked = 0
    for row in rows[start + 2 : start + 6]:
        level = 0.05 / int(row[0])
        for down, up in zip(worse, map(int, row[2:]), strict=True):
            for ups, accepted in ((up, True), (up - 1, False)):
                after = [1.0] * ups + [0.0] * down
                before = [0.0] * ups + [1.0] * down
                p = paired_test(before, after, bounds=(0.0, 1.0), rng=np.random.default_rng(0))
                assert (p <= level) is accepted
            checked += 1
    assert checked == 24


def test_the_tables_of_the_yaml_reference_are_those_of_the_models() -> None:
    made = maker("make_yaml_reference")
    pages = [page.read_text("utf-8") for page in YAML_REFERENCE]
    assert [made.with_keys(page) for page in pages] == pages, "run: make docs"
    assert sorted(re.findall(r"<!-- keys (.*?) -->", "".join(pages))) == sorted(made.MODELS)


def test_the_yaml_reference_has_a_section_for_every_construct() -> None:
    text = "".join(page.read_text("utf-8") for page in YAML_REFERENCE)
    headings = set(re.findall(r"^#+ `([\w.]+)`$", text, re.MULTILINE))
    assert {*BUILT_IN, "use", "engines", "data", "metric", "optimize"} <= headings
    examples = "".join(block for page in YAML_REFERENCE for block in blocks(page, "yaml"))
    words = ["when:", "first_of:", "map:", "loop:", "use:", "out:", "carry:", "until:", "over:"]
    assert [word for word in words if word not in examples] == []


def test_the_optimizer_of_the_guide_optimizes(folder: Path) -> None:
    """The optimizer from the guide is written to a file, and used by a system."""
    guide = blocks(ROOT / "docs" / "guides" / "extending.md", "python")
    code = [block for block in guide if "class OneDraw" in block or "def one_draw(" in block]
    (folder / "my_optimizer.py").write_text("\n".join(code))
    (folder / "toy.py").write_text(
        "def pick(x: int, mode: str) -> int:\n    return x if mode == 'b' else 0\n"
    )
    rows = [{"id": f"{split}-{i}", "x": i % 7, "y": i % 7} for split in "abc" for i in range(50)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    program = loads(
        """
system: toy
inputs: {x: int}
components:
  picker: {function: {call: "toy:pick", mode: {choice: [a, b]}}, in: {x: $x}, out: int}
outputs: {y: $picker}
data: {path: rows.jsonl, split_by: {train: 0.4, valid: 0.4, test: 0.2}}
metric: {exact_match: {output: y, gold: y}}
optimize: {method: "my_optimizer:one_draw", one_draw: {weight: 2.0}, budget: {system_runs: 300}}
""",
        path=folder / "toy.yaml",
    )
    assert program.data is not None
    assert program.metric is not None
    result = cp.optimize(
        program.system,
        program.data,
        program.metric,
        settings=program.optimize,
        run_dir=folder / "run",
        progress=False,
    )
    assert dict(result.best) == {"picker.mode": "b"}
    assert result.test_after is not None
    assert result.test_after.mean == 1.0


@pytest.mark.slow
def test_the_kits_of_the_guide_pass(tmp_path: Path) -> None:
    """The examples of the guide pass under pytest in a test module."""
    text = "\n".join(blocks(ROOT / "docs" / "guides" / "extending.md", "python"))
    kits = re.findall(r"^class (Test\w+)\((\w+)\)", text, re.MULTILINE)
    assert {kit for _, kit in kits} == {name for name in testing.__all__ if name.endswith("Kit")}
    (tmp_path / "test_mine.py").write_text(text)
    arguments = ("-m", "pytest", "-p", "no:cacheprovider", "-q", "-rA", "test_mine.py")
    ran = python(*arguments, cwd=tmp_path, env={"PYTEST_ADDOPTS": ""})
    assert ran.returncode == 0, ran.stdout
    for name, _ in kits:
        assert f"PASSED test_mine.py::{name}::test_" in ran.stdout


def test_every_settings_model_that_a_default_names_has_a_table() -> None:
    page = (ROOT / "docs" / "reference" / "settings.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `\w+` \| (\w+), below", page, flags=re.MULTILINE))
    assert {"BudgetSettings", "RolloutSettings"} <= named
    assert named <= set(re.findall(r"^### (\w+)$", page, flags=re.MULTILINE))
    assert not [li for li in page.splitlines() if li.startswith("| `") and not li.endswith(" |")]
