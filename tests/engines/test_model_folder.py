"""Untrusted model folders: loading them never executes their contents."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compound.core.errors import CompoundError, ConfigurationError
from compound.engines import model_folder
from compound.engines.local.devices import Placement

pytest.importorskip("torch")
pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
PACKAGES = ("compound", "components", "rewards", "optimizers", "benchmarks")


def _engine(folder: Path) -> None:
    from compound.core.engine import Message, Request
    from compound.engines.local.engine import TransformersEngine

    async def once() -> None:
        engine = TransformersEngine(str(folder))
        try:
            await engine.generate(Request((Message("user", "hi"),), max_tokens=1))
        finally:
            await engine.aclose()

    asyncio.run(once())


def _sampler(folder: Path) -> None:
    from compound.engines.local import loading

    loading.load(str(folder), "float32")


def _trainer(folder: Path) -> None:
    from compound.optimizers.weights.learner import adapters

    adapters._load(str(folder), Placement(dtype="float32"))


def _backbone(folder: Path) -> None:
    from compound.rewards.backbone import Backbone

    Backbone(str(folder), dtype="float32")


def _embedder(folder: Path) -> None:
    pytest.importorskip("sentence_transformers")
    from compound.components.index import PassageIndex

    PassageIndex(str(folder), device="cpu").rank("a", ["b", "c"], 1)


def _served(folder: Path) -> None:
    pytest.importorskip("httpx")
    from compound.engines.vllm.engine import VLLMEngine

    asyncio.run(VLLMEngine(str(folder), command="false").connect())


IN_PROCESS: dict[str, Callable[[Path], None]] = {
    "engine": _engine,
    "sampler": _sampler,
    "trainer": _trainer,
    "backbone": _backbone,
    "embedder": _embedder,
}
DOORS = {**IN_PROCESS, "vllm": _served}


class Touch:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """A path that exists once code of a folder has run."""
    return tmp_path / "canary"


@pytest.fixture
def folder(make_model: Callable[..., Path], tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Answer every question with yes, and record it."""
    questions: list[str] = []

    def answer(question: str = "") -> str:
        questions.append(question)
        return "y"

    monkeypatch.setattr("builtins.input", answer)
    return questions


def change(file: Path, **settings: Any) -> None:
    """Change the settings in a JSON file."""
    file.parent.mkdir(exist_ok=True)
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    file.write_text(json.dumps({**found, **settings}), encoding="utf-8")


def with_code(folder: Path, canary: Path) -> None:
    """Make the folder require a Python file that it contains."""
    (folder / "evil.py").write_text(
        f"import pathlib\npathlib.Path({str(canary)!r}).touch()\n"
        "from transformers import LlamaConfig as C, LlamaForCausalLM as M, PreTrainedTokenizerFast as T\n",
        encoding="utf-8",
    )
    models = dict.fromkeys(("AutoModel", "AutoModelForCausalLM"), "evil.M")
    change(
        folder / "config.json", model_type="foreign", auto_map={"AutoConfig": "evil.C", **models}
    )
    change(
        folder / "tokenizer_config.json",
        tokenizer_class="T",
        auto_map={"AutoTokenizer": ["evil.T", "evil.T"]},
    )


def with_code_of_the_tokenizer(folder: Path, canary: Path) -> None:
    with_code(folder, canary)
    change(folder / "config.json", model_type="llama", auto_map={})


def pickled(file: Path, canary: Path) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(pickle.dumps(Touch(canary), protocol=2))


def with_pickled_weights(folder: Path, canary: Path) -> None:
    (folder / "model.safetensors").unlink()
    pickled(folder / "pytorch_model.bin", canary)


def module(folder: Path, path: str, kind: str) -> None:
    """Declare a module of an embedding model."""
    modules = [{"idx": 0, "name": "0", "path": path, "type": kind}]
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")


def with_a_foreign_module(folder: Path, canary: Path) -> None:
    """joblib.numpy_pickle.load(path) unpickles; some versions of sentence-transformers call it."""
    pickled(folder / "0_Pickle", canary)
    module(folder, "0_Pickle", "joblib.numpy_pickle")


def with_a_foreign_activation(folder: Path, _: Path) -> None:
    change(folder / "1_Dense" / "config.json", activation_function="torch.hub.get_dir")
    module(folder, "1_Dense", "sentence_transformers.models.Dense")


def with_another_base(folder: Path, canary: Path, place: str = ".") -> None:
    """transformers would load the base that an adapter names, from any path."""
    base = folder.parent / "base"
    base.mkdir()
    with_code(base, canary)
    file = folder / place / "adapter_config.json"
    change(file, peft_type="LORA", base_model_name_or_path=str(base))


def with_weights_of_another_name(folder: Path, canary: Path) -> None:
    (folder / "model.safetensors").unlink()
    pickled(folder / "weights.txt", canary)
    weights = {"model.embed_tokens.weight": "weights.txt"}
    change(folder / "model.safetensors.index.json", metadata={"total_size": 1}, weight_map=weights)


def with_weights_that_the_settings_name(folder: Path, canary: Path) -> None:
    pickled(folder / "weights.txt", canary)
    change(folder / "config.json", transformers_weights="weights.txt")


def with_a_link_to_a_folder(folder: Path, _: Path) -> None:
    (folder.parent / "elsewhere").mkdir()
    (folder / "0_T").symlink_to(folder.parent / "elsewhere")


def with_a_pipe(folder: Path, _: Path) -> None:
    """Opening a pipe would block forever."""
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


def setting(file: str = "config.json", **settings: Any) -> Callable[[Path, Path], None]:
    return lambda folder, _: change(folder / file, **settings)


KERNELS, NOT_SAFE = "would download code", "not a safetensors file in the same folder"
FOREIGN: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "pickled weights": (with_pickled_weights, "pickled weights"),
    "pickled weights of a module": (
        lambda folder, canary: pickled(folder / "2_Dense" / "pytorch_model.bin", canary),
        "pickled weights",
    ),
    "a foreign module": (with_a_foreign_module, "names the class .*, which is not allowed"),
    "a foreign activation": (with_a_foreign_activation, "names .torch.hub.get_dir., which is not"),
    "downloaded kernels": (setting(attn_implementation="someone/kernel"), KERNELS),
    # without flash-attn, transformers downloads it as a kernel
    "flash attention": (setting(_attn_implementation="flash_attention_2"), KERNELS),
    "kernels of a part of the model": (
        setting(attn_implementation={"text_config": "sdpa", "vision": "flash_attention_3"}),
        KERNELS,
    ),
    "another base": (with_another_base, "is an adapter, not a model"),
    "pickled weights of another name": (with_weights_of_another_name, NOT_SAFE),
    "weights that the settings name": (with_weights_that_the_settings_name, NOT_SAFE),
    # sentence-transformers passes these arguments on, and would unpickle weights
    "arguments of loaders": (
        setting("0_T/sentence_roberta_config.json", model_args={"weights_only": False}),
        "passes weights_only=False",
    ),
    "downloaded kernels of a module": (
        setting("0_T/config.json", _attn_implementation="someone/kernel"),
        KERNELS,
    ),
    "another base of a module": (
        lambda folder, canary: with_another_base(folder, canary, "0_T"),
        "is an adapter, not a model",
    ),
    "a module elsewhere": (
        lambda folder, _: module(folder, "../base", "sentence_transformers.models.Transformer"),
        "not a subfolder of its folder",
    ),
    "a link to a folder": (with_a_link_to_a_folder, "is a link"),
    "a pipe": (with_a_pipe, "not a regular file"),
}


@pytest.mark.parametrize(
    "make", [with_code, with_code_of_the_tokenizer], ids=["model", "tokenizer"]
)
@pytest.mark.parametrize("door", IN_PROCESS)
def test_python_code_in_a_model_folder_neither_runs_nor_asks(
    folder: Path, canary: Path, asked: list[str], door: str, make: Callable[[Path, Path], None]
) -> None:
    make(folder, canary)
    with pytest.raises(CompoundError) as caught:
        IN_PROCESS[door](folder)
    assert not canary.exists()
    assert asked == []
    assert "trust_remote_code" not in str(caught.value)
    if door != "embedder":  # sentence-transformers has other words for it
        assert "requires custom Python code" in str(caught.value)


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("door", DOORS)
def test_folders_that_could_run_code_are_refused_by_every_loader(
    folder: Path, canary: Path, asked: list[str], door: str, kind: str
) -> None:
    make, said = FOREIGN[kind]
    make(folder, canary)
    with pytest.raises(CompoundError, match=said):
        DOORS[door](folder)
    assert not canary.exists()
    assert asked == []


def test_a_chat_template_runs_no_python(folder: Path, canary: Path) -> None:
    (folder / "chat_template.jinja").write_text(
        "{{ messages.__class__.__mro__[1].__subclasses__() }}"
        f"{{{{ cycler.__init__.__globals__.os.system('touch {canary}') }}}}",
        encoding="utf-8",
    )
    with pytest.raises(CompoundError, match="chat template"):
        _engine(folder)
    assert not canary.exists()


def test_a_reward_adapter_is_read_as_a_plain_lora(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """peft would act on other kinds, such as loading the tokenizer that a prompt tuning config names."""
    pytest.importorskip("peft")
    from compound.rewards.backbone import Backbone

    folder = make_model(tmp_path / "model")
    backbone = Backbone(str(folder), dtype="float32")
    backbone.add_adapter(2, 4, seed=0)
    backbone.save_adapter(tmp_path / "adapter")
    name = backbone.adapter
    backbone.load_adapter(tmp_path / "adapter", name)
    assert backbone.parameters()
    kind = {
        "peft_type": "PROMPT_TUNING",
        "prompt_tuning_init": "TEXT",
        "tokenizer_name_or_path": str(folder),
    }
    change(tmp_path / "adapter" / "adapter_config.json", **kind)
    with pytest.raises(ConfigurationError, match="PROMPT_TUNING"):
        backbone.load_adapter(tmp_path / "adapter", name)


def test_a_foreign_adapter_is_refused(make_model: Callable[..., Path], tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from safetensors.numpy import load_file, save_file

    from compound.rewards.backbone import Backbone

    backbone = Backbone(str(make_model(tmp_path / "model")), dtype="float32")
    backbone.add_adapter(2, 4, seed=0)
    backbone.save_adapter(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({key: tensor[:1].copy() for key, tensor in load_file(file).items()}, file)
    with pytest.raises(ConfigurationError, match="does not fit"):
        backbone.load_adapter(tmp_path / "adapter", backbone.adapter)


def _calls() -> list[tuple[str, ast.Call]]:
    found = []
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            place = file.relative_to(ROOT).as_posix()
            found += [(f"{place}:{n.lineno}", n) for n in ast.walk(tree) if isinstance(n, ast.Call)]
    return found


def _given(call: ast.Call) -> dict[str, str]:
    return {keyword.arg or "**": ast.unparse(keyword.value) for keyword in call.keywords}


@pytest.mark.slow
def test_every_call_that_loads_a_model_refuses_code_and_pickles() -> None:
    seen = 0
    for place, call in _calls():
        name, given = ast.unparse(call.func), _given(call)
        if name.endswith((".from_pretrained", ".from_config")):
            seen += 1
            assert given.get("trust_remote_code") == "False", place
            if name.endswith(".from_config"):  # reads no file
                continue
            assert given.get("local_files_only") == "True", place
            if "Tokenizer" not in name and "Config" not in name:
                assert given.get("use_safetensors") == "True", place
        if name.rpartition(".")[2] in {"SentenceTransformer", "CrossEncoder", "SparseEncoder"}:
            seen += 1
            assert given.get("trust_remote_code") == "False", place
            assert given.get("model_kwargs") == "{'use_safetensors': True, 'weights_only': True}", (
                place
            )
    assert seen == 8


@pytest.mark.slow
def test_nothing_in_the_package_unpickles_or_evaluates() -> None:
    banned = {
        "eval",
        "exec",
        "torch.load",
        "np.fromregex",
        "yaml.load",
        "yaml.unsafe_load",
        "PeftModel.from_pretrained",
    }
    for place, call in _calls():
        name = ast.unparse(call.func)
        assert name not in banned, place
        assert not name.endswith("PeftModel.from_pretrained"), place
        if name in {"np.load", "numpy.load"}:
            assert _given(call).get("allow_pickle") == "False", place
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                wrong = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
                assert not wrong & {name.partition(".")[0] for name in names}, file


def test_ordinary_folders_pass(folder: Path, tmp_path: Path) -> None:
    model_folder.check_model_folder(folder)
    (folder / "pytorch_model.bin").write_bytes(b"beside the safetensors, which are read")
    model_folder.check_model_folder(folder)
    model_folder.check_model_folder(tmp_path / "no-such-folder")
    change(folder / "config.json", attn_implementation="sdpa")
    model_folder.check_model_folder(folder)


@pytest.mark.parametrize("name", ["config.json", "modules.json"])
def test_a_settings_file_that_is_no_json_is_named(folder: Path, name: str) -> None:
    for content in (b"{", b"\xff", b"[" * 100_000):
        (folder / name).write_bytes(content)
        with pytest.raises(CompoundError, match=name):
            model_folder.check_model_folder(folder)
