"""A feature whose library is missing names the extra to install, at any depth of imports."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from compound.core.errors import (
    LIBRARIES,
    MissingExtra,
    install_command,
    missing_libraries,
    raise_missing_extra,
)
from processes import python

ROOT = Path(__file__).parents[2]
PREPARED = """
import sys
import tomllib
from pathlib import Path
sys.modules[{module!r}] = None  # as if it were not installed
import compound as cp
from compound.testing import ScriptedLM

question = cp.Input("question")
rows = [{{"question": str(i), "y": "x"}} for i in range(20)]
data = {{"train": rows, "valid": rows}}
folder = Path("model")
folder.mkdir()
(folder / "config.json").write_text("{{}}")
Path("corpus.jsonl").write_text('{{"id": "1", "text": "Lima"}}')
lm = {{"lm": ScriptedLM(lambda message: "y")}}

def llm(lm="lm", **settings):
    node = cp.LLM("a", prompt=cp.Text("Answer."), retries=0, **settings)(question)
    return cp.System("s", outputs={{"y": node}}, lm=lm)

def ask(engine):
    cp.run(llm(), {{"question": "?"}}, engines={{"lm": engine}})

def retrieve(index):
    node = cp.Retriever("r", index)(query=question)
    cp.run(cp.System("s", outputs={{"y": node}}), {{"question": "?"}})

def optimize(system, method, **engines):
    cp.optimize(system, data, "exact_match", method=method, budget=400, progress=False, **engines)

def searching():
    passages = cp.Retriever("r", cp.components.BM25("corpus.jsonl"))(query=question)
    answer = cp.LLM("a", prompt=cp.Text("Answer."))(question=question, passages=passages)
    return cp.System("s", outputs={{"y": answer}}, lm="lm")

def trained():
    return llm(str(folder), weights=cp.LoRA(rank=4))

try:
    {action}
except cp.CompoundError as error:
    print(f"{{type(error).__name__}}: {{error}}")
"""
ACTIONS = [
    ("torch", "ask(cp.engines.Transformers(str(folder)))"),
    ("torch", "ask(cp.engines.Transformers(str(folder), dtype='float32'))"),
    ("torch", "optimize(trained(), 'mmgrpo')"),
    ("transformers", "ask(cp.engines.Transformers(str(folder), dtype='float32'))"),
    (
        "gguf",
        "from compound.engines.models import SMOLLM2, _convert; "
        "_convert(Path('x.gguf'), SMOLLM2, {})",
    ),
    (
        "llguidance",
        "from transformers import PreTrainedTokenizerFast as T; "
        "from compound.engines.local.constraints import ConstraintCompiler as C; C(T, 8, [0])",
    ),
    ("safetensors", "from compound.rewards.model import read; read(folder)"),
    ("huggingface_hub", "ask(cp.engines.Transformers('someone/model', dtype='float32'))"),
    ("litellm", "ask(cp.engines.LiteLLM('openai/gpt-4o-mini'))"),
    ("litellm", "cp.run(llm('openai/gpt-4o-mini'), {'question': '?'})"),
    ("httpx", "ask(cp.engines.VLLM('m', api_base='http://127.0.0.1:9/v1'))"),
    ("optuna", "optimize(llm(), 'mipro', engines=lm)"),
    ("gepa", "optimize(llm(), 'gepa', engines=lm)"),
    ("peft", "optimize(trained(), 'mmgrpo')"),
    ("httpx", "optimize(llm(), 'random', engines={'lm': cp.engines.OpenAI('m')})"),
    ("bm25s", "optimize(searching(), 'random', engines=lm)"),
    ("bm25s", "retrieve(cp.components.BM25('corpus.jsonl'))"),
    ("regex", "retrieve(cp.components.BM25('corpus.jsonl'))"),
    ("snowballstemmer", "retrieve(cp.components.BM25('corpus.jsonl', language='spanish'))"),
    ("sentence_transformers", "retrieve(cp.components.Dense('corpus.jsonl', model=str(folder)))"),
    (
        "rouge_score",
        "cp.evaluate(llm(), [{'question': '?', 'y': 'x'}], cp.metrics.rouge('y'), engines=lm)",
    ),
    ("matplotlib", "from compound.report.rewards import reward_svg; reward_svg('length', [])"),
    ("pyarrow", "cp.evaluate(llm(), cp.Dataset('someone/numbers'), 'exact_match', engines=lm)"),
    ("s3fs", "cp.evaluate(llm(), 's3://bucket/rows.jsonl', 'exact_match', engines=lm)"),
    (
        "sklearn",
        "import numpy as np; from compound.rewards.heads import logistic; "
        "logistic(np.ones((1, 1)), np.ones(1), 1.0)",
    ),
    (
        "pyseccomp",
        "program = cp.components.CodeRunner('c')(code=question).stdout; "
        "cp.run(cp.System('s', outputs={'y': program}), {'question': 'print(1)'})",
    ),
    ("ray", "from compound.cluster.ray_cluster import RayTransport; RayTransport()"),
    ("mcp", "cp.Tool.from_mcp(command=['server'])"),
    ("opentelemetry", "cp.trace_with()"),
    ("mlflow", "optimize(llm(), 'random', engines=lm, trackers=('mlflow',))"),
    ("tensorboard", "optimize(llm(), 'random', engines=lm, trackers=('tensorboard',))"),
    ("wandb", "optimize(llm(), 'random', engines=lm, trackers=('wandb',))"),
    ("peft", "from compound.rewards.backbone import _peft; _peft()"),
    ("fastapi", "from compound.api.serving import app"),
    ("starlette", "from compound.api.serving import app"),
    ("prometheus_client", "from compound.api.serving import app"),
    ("uvicorn", "from compound.api.serving import serve"),
    ("dspy", "cp.interchange.from_dspy(None, lm='m')"),
    (
        "inspect_ai",
        "from compound.report.inspect_log import write_inspect; "
        "write_inspect(folder, folder / 'logs')",
    ),
]
NEVER_IMPORTED = {
    "accelerate",  # transformers imports it
    "bitsandbytes",  # transformers imports it, on CUDA only
    "psutil",  # without it, free memory is unknown
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "action"), ACTIONS, ids=[f"{m}-{i}" for i, (m, _) in enumerate(ACTIONS)]
)
def test_a_missing_library_names_its_extra(module: str, action: str, tmp_path: Path) -> None:
    library, extra = LIBRARIES[module]
    extras = {extra, *{"peft": {"rewards"}}.get(module, ())}
    code = PREPARED.format(module=module, action=action)
    ran = python("-c", code, cwd=tmp_path, env={"COMPOUND_CACHE": str(tmp_path / "cache")})
    assert ran.returncode == 0, ran.stderr
    assert "MissingExtra: " in ran.stdout
    assert f"needs {library}, which is not installed" in ran.stdout
    assert any(f'[{name}]"' in ran.stdout for name in extras)


def test_the_hint_installs_from_the_clone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    assert install_command("vllm") == 'pip install -e ".[vllm]"'
    monkeypatch.chdir(tmp_path)
    assert install_command("vllm") == f'pip install -e "{ROOT}[vllm]"'


def test_hints_without_a_clone_name_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stated = [
        "numpy>=1",
        'httpx>=0.27; extra == "remote"',
        "uvloop>=0.1; sys_platform != 'win32' and extra == 'serve'",
    ]
    monkeypatch.setattr("compound.core.errors.__file__", str(tmp_path / "compound" / "errors.py"))
    monkeypatch.setattr("importlib.metadata.requires", lambda _: stated)
    assert install_command("remote") == 'pip install "httpx>=0.27"'
    assert install_command("serve") == 'pip install "uvloop>=0.1"'


def test_no_page_names_a_package_that_is_not_ours() -> None:
    pages = [
        ROOT / "README.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "docs").rglob("*.py"),
        *(ROOT / "docs").rglob("*.ipynb"),
    ]
    assert [page for page in pages if "compound-ai" in page.read_text("utf-8")] == []


def test_every_optional_library_is_tried() -> None:
    assert {module for module, _ in ACTIONS} | NEVER_IMPORTED == set(LIBRARIES)


def test_every_extra_exists_and_installs_the_library() -> None:
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    for library, extra in LIBRARIES.values():
        section = text.split(f"\n{extra} = [", 1)[1].split("\n]", 1)[0]
        assert f'"{library}>=' in section


def test_the_server_of_vllm_has_an_extra_outside_all() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
        "optional-dependencies"
    ]
    assert [requirement.partition(">")[0] for requirement in extras["vllm"]] == ["vllm"]
    assert [requirement.partition(">")[0] for requirement in extras["trl"]] == ["trl"]
    joined = extras["all"][0].partition("[")[2].rstrip("]").split(",")
    assert set(extras) - set(joined) == {
        *("all", "browser", "dev", "docs", "inspect", "quantized", "vllm")
    }


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError("x", name="pandas"), ImportError("torch"), ValueError("torch")]
)
def test_other_errors_are_left_alone(error: Exception) -> None:
    raise_missing_extra(error)


def test_the_command_line_names_the_extra(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn")

    monkeypatch.setattr("compound.yaml.schema", broken)
    ran = cli("check", "--schema")
    assert ran.code == 2
    assert (
        ran.err
        == f"error: this command needs torch, which is not installed\nhint: {install_command('local')}\n"
    )
    with pytest.raises(MissingExtra, match="x needs peft"):
        raise_missing_extra(ModuleNotFoundError("No module named 'peft'", name="peft"), "x")


CHECKED = """
system: s
lm: m
engines:
  m: {engine}
inputs: {{question: str}}
components:
  r: {{retriever: {{index: bm25, corpus: corpus.jsonl}}, in: {{query: $question}}}}
  a: {{llm: {{prompt: {{tune: "Answer."}}}}, in: {{question: $question, passages: $r}}}}
outputs: {{y: $a}}
metric: {{rouge: {{output: y}}}}
data: {{path: rows.jsonl, split_by: {{train: 0.5, valid: 0.5}}}}
optimize: {{budget: {{system_runs: 400}}}}
"""


PRICED = "{litellm: {model: openai/x, price: [1, 1]}}"


@pytest.mark.parametrize("command", [["check"], ["optimize", "--dry-run"]])
@pytest.mark.parametrize(
    ("module", "engine", "settings"),
    [
        ("httpx", "{openai: {model: x, api_base: 'http://127.0.0.1:9/v1'}}", ""),
        ("httpx", "{fleet: {urls: ['http://127.0.0.1:9/v1'], openai: {model: x}}}", ""),
        (
            "litellm",
            "{litellm: {model: hosted_vllm/x, api_base: 'http://127.0.0.1:9/v1'}}",
            "",
        ),
        ("torch", "{transformers: {model: smollm2}}", ""),
        ("bm25s", PRICED, ""),
        ("regex", PRICED, ""),
        ("rouge_score", PRICED, ""),
        ("transformers", PRICED, "optimize.method=hbc"),
        ("sklearn", PRICED, "optimize.method=optimas"),
        ("peft", PRICED, "optimize={method: optimas, optimas: {reward: {lora: {}}}}"),
        ("wandb", PRICED, "optimize.trackers=[wandb]"),
        ("ray", PRICED, "optimize.runner={ray: {workers: 2}}"),
    ],
)
def test_a_check_and_a_dry_run_name_missing_libraries(
    command: list[str],
    module: str,
    engine: str,
    settings: str,
    tmp_path: Path,
    cli: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("system.yaml").write_text(CHECKED.format(engine=engine))
    Path("corpus.jsonl").write_text('{"id": "1", "text": "Lima"}')
    Path("rows.jsonl").write_text("".join(f'{{"question": "{i}", "y": "x"}}\n' for i in range(40)))
    monkeypatch.setitem(sys.modules, module, None)
    given = ["--trust", "http://127.0.0.1:9"]
    if settings:
        given += ["--set", settings, "--set", "optimize.budget.system_runs=400"]
    ran = cli(command[0], "system.yaml", *command[1:], *given)
    assert bool(ran.code) == (module not in ("wandb", "ray"))
    library, extra = LIBRARIES[module]
    assert f"needs {library}, which is not installed" in ran.out + ran.err
    assert settings or f"[{extra}]" in ran.out + ran.err


def test_the_missing_libraries_of_an_extra_are_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("torch", "transformers", "bm25s"):
        monkeypatch.setitem(sys.modules, module, None)
    engine = ("the engine", ("torch", "transformers", "torch"))
    found = missing_libraries([engine, ("an index", ("bm25s",)), ("a reward", ("torch",))])
    assert [error.message for error in found] == [
        "the engine needs torch, transformers, which are not installed",
        "an index needs bm25s, which is not installed",
    ]
