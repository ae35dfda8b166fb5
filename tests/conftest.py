"""What every test may rely on: no network, no downloads, and caches that do not outlive the session."""

from __future__ import annotations

import asyncio
import gc
import inspect
import ipaddress
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

# pytest rewrites scipy/stats/_page_trend_test.py like a test, and Python 3.11 fails at times to
# parse it in a worker thread, so it is imported here.
import scipy.stats  # noqa: F401
from hypothesis import HealthCheck, settings

from compound.cli import main
from compound.core.security import sanitize
from compound.core.security.sanitize import registered_secrets
from compound.testing import OptimizerJob

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ["WANDB_ERROR_REPORTING"] = "false"

# Hypothesis' own clocks are off: a busy machine fails no test.
settings.register_profile(
    "tests", deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)
settings.load_profile("tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))


def pytest_collection_finish() -> None:
    """Exempt what is imported so far from garbage collection: millions of objects, a second each time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    async def within_reason() -> None:
        async with asyncio.timeout(300):
            await pyfuncitem.obj(**given)

    asyncio.run(within_reason())
    return True


@pytest.fixture(scope="session")
def toy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny random model; tests must not change it."""
    pytest.importorskip("torch")
    from benchmarks.simulated.toy_model import make_toy_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make_toy_model(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let PyTorch use one thread, here and in processes that a test starts."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def under_every_hash_seed(pytestconfig: pytest.Config) -> Callable[[str], set[str]]:
    """Run code in processes with four, or slow eight, string-hash seeds; returns what they printed."""
    seeds = range(8 if pytestconfig.getoption("--slow") else 4)

    def run(seed: int, code: str) -> str:
        environment = {
            **os.environ,
            "PYTHONHASHSEED": str(seed),
            "PYTHONPATH": str(Path(__file__).parents[1]),
        }
        command = [sys.executable, "-c", code]
        return subprocess.run(
            command, env=environment, check=True, capture_output=True, text=True
        ).stdout

    def run_all(code: str) -> set[str]:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return set(pool.map(run, seeds, [code] * len(seeds)))

    return run_all


def _is_local(family: int, address: Any) -> bool:
    if family == socket.AF_UNIX:
        return True
    host = address[0] if isinstance(address, tuple) else address
    if host in ("localhost", ""):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@pytest.fixture(scope="session", autouse=True)
def _no_network() -> Iterator[None]:
    """Make connecting to anything but this machine raise."""

    def guarded(original: Any) -> Any:
        def connect(self: socket.socket, address: Any) -> Any:
            if not _is_local(self.family, address):
                raise RuntimeError(
                    f"a test tried to connect to {address!r}: tests run without a network"
                )
            return original(self, address)

        return connect

    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "connect_ex"):
            patch.setattr(socket.socket, name, guarded(getattr(socket.socket, name)))
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_fsync() -> Iterator[None]:
    """Wait for no disk: what is written need not survive a power failure."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="session")
def _session_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compound-cache")


@pytest.fixture(autouse=True)
def _own_cache(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, _session_cache: Path
) -> None:
    """Keep indexes and models that tests build away from the user's own cache, except for those marked."""
    if request.node.get_closest_marker("user_cache") is None:
        monkeypatch.setenv("COMPOUND_CACHE", str(_session_cache))


@pytest.fixture(autouse=True)
def _own_secrets() -> Iterator[None]:
    """Forget the keys that a test registered: they would divide the streamed text of later ones."""
    before = registered_secrets()
    yield
    sanitize._SECRETS.intersection_update(before)


@pytest.fixture(autouse=True)
def _own_loggers() -> Iterator[None]:
    """Restore the loggers that a server configures: their handler writes to the captured stream."""
    loggers = [logging.getLogger(name) for name in ("compound", "uvicorn")]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.fixture
def without_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let optimizations write no reports, which take longer than small searches; other tests read them."""
    monkeypatch.setattr("compound.report.write", lambda _: None)


@pytest.fixture(scope="session")
def job() -> type[OptimizerJob]:
    """Jobs of optimizers, run for real."""
    return OptimizerJob


LINES = (
    "the quick brown fox jumps over the lazy dog and runs far away",
    "a question about a river, a town, a king and the colour of the sky",
    "answer in a few words: yes, no, maybe, one, two, three, four, five",
)
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def smollm2() -> str:
    """The name of the embedded model; skips the test if its weights are not installed."""
    from compound.engines import models

    if models.list_models()[0].state == "absent":
        pytest.skip("the weights of smollm2 are not installed")
    return "smollm2"


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Path]:
    """Return a function that saves a tiny random Llama and a byte-level tokenizer with a chat template."""

    def make(folder: Path, positions: int = 512, **generation: Any) -> Path:
        import torch
        import transformers
        from tokenizers import ByteLevelBPETokenizer

        bpe = ByteLevelBPETokenizer()
        bpe.train_from_iterator(
            LINES,
            vocab_size=400,
            special_tokens=["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"],
        )
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=bpe._tokenizer, eos_token="<|end|>"
        )
        tokenizer.chat_template = TEMPLATE
        config = transformers.LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=positions,
            initializer_range=0.35,
            eos_token_id=tokenizer.eos_token_id,
        )
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = transformers.LlamaForCausalLM(config)
        model.generation_config.update(**generation)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def model(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny random Llama; tests must not change it."""
    pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make_model(tmp_path_factory.mktemp("model"), positions=4096)


class Ran(NamedTuple):
    """What became of a command."""

    code: int
    out: str
    err: str


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command in this process."""

    def run(*arguments: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["compound", *arguments])
        before = signal.getsignal(signal.SIGINT)
        capsys.readouterr()
        try:
            with pytest.raises(SystemExit) as ended:
                main()
        finally:
            signal.signal(signal.SIGINT, before)
        printed = capsys.readouterr()
        code = ended.value.code
        assert isinstance(code, int)
        assert "Traceback" not in printed.out + printed.err
        return Ran(code, printed.out, printed.err)

    return run


@pytest.fixture
def game(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a system and its data, which is the working directory."""
    shutil.copytree(Path(__file__).parent / "files" / "game", tmp_path, dirs_exist_ok=True)
    rows = [{"id": str(i), "x": i % 9, "target": 2.0 * (i % 9)} for i in range(120)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.chdir(tmp_path)
    return tmp_path
