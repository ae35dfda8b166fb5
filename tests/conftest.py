"""What every test may rely on: no network, no downloads, and caches that do not outlive the session."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings

from compound.cli import main
from compound.engine import Completion, Request
from compound.example import Example, Metric
from compound.execution.cache import MemoryCache
from compound.execution.executor import Executor
from compound.graph.configuration import canonical
from compound.graph.system import System
from compound.optimization.method import JobContext, Method, Optimizer, Progress, Proposal, Task
from compound.optimization.problem import Problem
from compound.optimization.scorer import JobScorer
from compound.optimizers.scheduling.scheduler import Uniform
from compound.settings.optimize import OptimizeSettings
from compound.testing import PlainMemory, ScriptedLM

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

# Hypothesis' own clocks are off: a busy machine fails no test.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)
settings.load_profile("tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))


@pytest.fixture(scope="session")
def under_every_hash_seed() -> Callable[[str], set[str]]:
    """Run code in eight processes with eight string-hash seeds; returns what they printed."""

    def run(seed: int, code: str) -> str:
        environment = {
            **os.environ,
            "PYTHONHASHSEED": str(seed),
            "PYTHONPATH": str(Path(__file__).parents[1]),
        }
        command = [sys.executable, "-c", code]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

    def run_all(code: str) -> set[str]:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return set(pool.map(run, range(8), [code] * 8))

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
                raise RuntimeError(f"a test tried to connect to {address!r}: tests run without a network")
            return original(self, address)

        return connect

    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "connect_ex"):
            patch.setattr(socket.socket, name, guarded(getattr(socket.socket, name)))
        yield


@pytest.fixture(scope="session")
def _session_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compound-cache")


@pytest.fixture(autouse=True)
def _own_cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, _session_cache: Path) -> None:
    """Keep indexes and models that tests build away from the user's own cache; slow tests share it."""
    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setenv("COMPOUND_CACHE", str(_session_cache))


class Job:
    """One job of an optimizer as the loop gives it: a real scorer, cache and meter, and a scripted model.

    Args:
        system: what to optimize.
        metric: the global reward.
        train: the examples to learn from.
        lm: the model ``lm``; made anew for each job, where a script keeps count.
        share: the system runs the job may spend.
        task: other fields of the task.
    """

    def __init__(
        self,
        system: System,
        metric: Metric,
        train: Sequence[Example],
        lm: Callable[[], ScriptedLM] = lambda: ScriptedLM([]),
        share: float = float("inf"),
        **task: Any,
    ) -> None:
        self._given = (system, metric, train, lm, share, task)
        self.lm = lm()
        memory = PlainMemory(Path(tempfile.mkdtemp()))
        self.executor = Executor({"lm": self.lm}, cache=MemoryCache(), folder=memory.folder)
        method = Method("none", {}, [], Uniform())
        engines = {"lm": self.lm}
        problem = Problem(system, train, (), (), metric, OptimizeSettings(), method, engines)
        self.scorer = JobScorer(problem, self.executor, system, share, 0.0)
        given = {"keys": tuple(system.parameters), "seed": 1, "minibatch": 4, "candidates": 8, **task}
        context = JobContext(self.executor, metric, problem.rules, memory)
        self.task = Task(
            system=system, train=train, scorer=self.scorer, context=context, pool_seed=2, **given
        )

    @property
    def spent(self) -> float:
        """System runs so far."""
        return self.executor.meter.system_runs

    def asked_models(self) -> list[str | None]:
        """Return a list that grows by the name of each model the optimizer asks; ``lm`` answers for all."""
        asked_of: list[str | None] = []
        original = self.scorer.generate

        async def watch(request: Request, lm: str | None = None) -> Completion:
            asked_of.append(lm)
            return await original(request, "lm")

        self.scorer.generate = watch  # type: ignore[method-assign]
        return asked_of

    def run(self, optimizer: Optimizer) -> tuple[list[Any], Proposal]:
        """Run to the end; returns the states and the proposal."""
        return asyncio.run(self._collect(optimizer, None, None))

    def run_interrupted(self, optimizer: Optimizer, after: int) -> tuple[list[Any], Proposal]:
        """Stop after some progress, and go on from the state as a checkpoint holds it."""
        states, _ = asyncio.run(self._collect(optimizer, None, after))
        rest, proposal = asyncio.run(self._collect(optimizer, states[-1], None))
        return states + rest, proposal

    def check_resume(self, optimizer: Optimizer) -> None:
        """Interrupt the same job after every progress: the rest must be as if nothing had happened."""
        states, proposal = self.run(optimizer)
        assert len(states) >= 3
        for after in range(1, len(states) + 1):
            system, metric, train, lm, share, task = self._given
            again = Job(system, metric, train, lm, share, **task)
            assert again.run_interrupted(optimizer, after) == (states, proposal)
            assert again.spent == self.spent

    async def _collect(
        self, optimizer: Optimizer, resume: Mapping[str, Any] | None, most: int | None
    ) -> tuple[list[Any], Proposal]:
        states: list[Any] = []
        async for event in optimizer.propose(replace(self.task, resume=resume)):
            if isinstance(event, Proposal):
                return states, event
            assert isinstance(event, Progress)
            states.append(json.loads(canonical(event.state)))  # as it is now, not as it may become
            if len(states) == most:
                break
        assert most is not None
        return states, Proposal({})


@pytest.fixture(scope="session")
def job() -> type[Job]:
    """Jobs of optimizers, run for real."""
    return Job


LINES = (
    "the quick brown fox jumps over the lazy dog and runs far away",
    "a question about a river, a town, a king and the colour of the sky",
    "answer in a few words: yes, no, maybe, one, two, three, four, five",
)
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Path]:
    """Return a function that saves a tiny random Llama and a byte-level tokenizer with a chat template."""

    def make(folder: Path, positions: int = 512, **generation: Any) -> Path:
        import torch
        import transformers
        from tokenizers import ByteLevelBPETokenizer

        bpe = ByteLevelBPETokenizer()
        bpe.train_from_iterator(
            LINES, vocab_size=400, special_tokens=["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
        )
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<|end|>")
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
