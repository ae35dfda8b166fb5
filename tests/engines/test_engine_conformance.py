"""Every engine of this package passes the conformance kit of engines."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import fake_vllm as fake
from chaos.server import Fault, FaultyServer
from compound.core.engine import Engine, Message, Request
from compound.core.errors import CallError
from compound.engines.fleet import FleetEngine
from compound.engines.litellm import LiteLLMEngine
from compound.engines.openai import OpenAIEngine
from compound.engines.vllm.engine import VLLMEngine
from compound.testing import EngineKit, ScriptedLM

# litellm's own, where a call is cancelled as it begins
CANCELLED = "ignore:coroutine 'OpenAIChatCompletion.acompletion' was never awaited:RuntimeWarning"
DAYS = "Monday, Tuesday, Wednesday, Thursday and Friday"


class TestScripted(EngineKit):
    def make(self) -> Engine:
        return ScriptedLM(lambda message: DAYS, price=1e-3)

    def failing(self) -> tuple[Engine, Request]:
        return ScriptedLM([CallError("it is not there")]), self.request()


class TestSlowUnpricedScripted(EngineKit):
    def make(self) -> Engine:
        return ScriptedLM(
            lambda message: DAYS, latency=0.02, priced=False, concurrency=2, remote=False
        )


@pytest.fixture(scope="module")
def model(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
class TestTransformers(EngineKit):
    """The in-process engine, on a tiny random model."""

    folder: Path

    @pytest.fixture(autouse=True)
    def _model(self, model: Path) -> Iterator[None]:
        import torch

        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # tiny products on many threads only wait for one another
        self.folder = model
        yield
        torch.set_num_threads(threads)

    def make(self) -> Engine:
        from compound.engines.local.engine import TransformersEngine

        return TransformersEngine(str(self.folder), dtype="float32", deterministic=True)

    def failing(self) -> tuple[Engine, Request]:
        return self.make(), Request((Message("user", "far too long " * 400),))


@pytest.mark.skipif(importlib.util.find_spec("litellm") is None, reason="needs litellm")
@pytest.mark.filterwarnings(
    "ignore:Item 'summary' on TypedDict:UserWarning"
)  # litellm's own, at the first call
@pytest.mark.filterwarnings(CANCELLED)
class TestLiteLLM(EngineKit):
    """The engine over litellm, with a server on this machine."""

    server: FaultyServer

    @pytest.fixture(autouse=True)
    def _server(self) -> Iterator[None]:
        with FaultyServer(answer=lambda body: DAYS) as self.server:
            yield
        gc.collect()  # while the warnings of this class are filtered

    def make(self) -> Engine:
        return LiteLLMEngine("openai/tiny", api_base=self.server.url, price=(1.0, 10.0))

    def failing(self) -> tuple[Engine, Request]:
        self.server.first = (Fault.UNAUTHORIZED,)
        return self.make(), self.request()


@pytest.mark.skipif(importlib.util.find_spec("httpx") is None, reason="needs httpx")
class TestVLLM(EngineKit):
    """The engine over vLLM, with a server on this machine that answers as vLLM does."""

    server: fake.FakeVLLM

    @pytest.fixture(autouse=True)
    def _server(self) -> Iterator[None]:
        self.server = fake.FakeVLLM().serve()
        yield
        self.server.stop()

    def make(self) -> Engine:
        return VLLMEngine("tiny", api_base=self.server.address)

    def failing(self) -> tuple[Engine, Request]:
        self.server.fault = {"chat/completions": (400, "no such field", {})}
        return self.make(), self.request()


@pytest.mark.skipif(importlib.util.find_spec("httpx") is None, reason="needs httpx")
class TestFleet(EngineKit):
    """The engine of several replicas, with two servers on this machine."""

    servers: list[fake.FakeVLLM]

    @pytest.fixture(autouse=True)
    def _servers(self) -> Iterator[None]:
        self.servers = [fake.FakeVLLM().serve(), fake.FakeVLLM().serve()]
        yield
        for server in self.servers:
            server.stop()

    def make(self) -> Engine:
        return FleetEngine([server.address for server in self.servers], vllm={"model": "tiny"})

    def failing(self) -> tuple[Engine, Request]:
        for server in self.servers:
            server.fault = {"chat/completions": (400, "no such field", {})}
        return self.make(), self.request()


@pytest.mark.skipif(importlib.util.find_spec("openai") is None, reason="needs openai")
class TestOpenAI(EngineKit):
    """The engine for OpenAI's API, with a server on this machine."""

    server: FaultyServer

    @pytest.fixture(autouse=True)
    def _server(self) -> Iterator[None]:
        with FaultyServer(answer=lambda body: DAYS) as self.server:
            yield

    def make(self) -> Engine:
        return OpenAIEngine("tiny", api_base=self.server.url, price=(1.0, 10.0))

    def failing(self) -> tuple[Engine, Request]:
        self.server.first = (Fault.UNAUTHORIZED,)
        return self.make(), self.request()
