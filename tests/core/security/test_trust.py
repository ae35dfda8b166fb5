"""What a file may send where: every secret here is a canary that a server on this machine would record."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import compound as cp
from compound.core.engine import Message, Request
from compound.core.errors import CompoundError, ConfigurationError, DeclarationError, SpecError
from compound.core.security.trust import PROVIDERS, Origin, Trust, config_file
from compound.engines.credentials import (
    CONFIGURABLE_PROVIDERS,
    Connection,
    is_model_name,
)
from compound.engines.litellm import LiteLLMEngine
from compound.engines.vllm.engine import VLLMEngine
from compound.graph.registry.engines import find_engine
from compound.yaml import loads
from processes import python
from recording_server import RecordingServer

pytest.importorskip("litellm")
pytest.importorskip("httpx")
pytestmark = [  # litellm's own, at its first call
    pytest.mark.filterwarnings("ignore:Items? :UserWarning"),
]

CANARY = "canary-4c1f"
SECRETS = (
    "GITHUB_TOKEN",
    "OPENAI_API_KEY",
    "OPENAI_ADMIN_KEY",
    "OPENAI_ORG_ID",
    "OPENAI_ORGANIZATION",
    "OPENAI_PROJECT_ID",
    "ANTHROPIC_API_KEY",
    "ANTHROPIC_AUTH_TOKEN",
    "AZURE_API_KEY",
    "AZURE_OPENAI_API_KEY",
    "AZURE_OPENAI_AD_TOKEN",
    "AZURE_AD_TOKEN",
    "HOSTED_VLLM_API_KEY",
    "LITELLM_PROXY_API_KEY",
    "LM_STUDIO_API_KEY",
    "LLAMAFILE_API_KEY",
    "OLLAMA_API_KEY",
    "HF_TOKEN",
    "GROQ_API_KEY",
)
FILE = """
system: demo
lm: fast
engines:
  fast: {{{kind}: {{model: {model}{settings}}}}}
inputs: {{question: str}}
components:
  answerer: {{llm: {{prompt: Answer.}}, in: {{question: $question}}}}
outputs: {{answer: $answerer}}
"""


class Server(RecordingServer):
    """A server that records everything it is sent, and answers as OpenAI does or by a redirect."""

    def __init__(self) -> None:
        super().__init__()
        message = {"role": "assistant", "content": "four"}
        said = {
            **{"id": "1", "object": "chat.completion", "created": 0, "model": "m"},
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10},
            "data": [{"id": "m"}],
        }
        self.headers, self.body = {"content-type": "application/json"}, json.dumps(said).encode()
        self.origin, self.address = self.url, f"{self.url}/v1"

    def redirect(self, address: str) -> None:
        self.status, self.headers = 307, {**self.headers, "location": address}

    @property
    def secrets(self) -> set[str]:
        """The secrets that arrived, by the variable they came from."""
        return set(re.findall(rf"{CANARY}:(\w+)", repr(self.received)))


@pytest.fixture
def server() -> Iterator[Server]:
    with Server.running() as made:
        yield made


@pytest.fixture
def other() -> Iterator[Server]:
    with Server.running() as made:
        yield made


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fill the environment with canaries, and give the user no configuration."""
    for name in SECRETS:
        monkeypatch.setenv(name, f"{CANARY}:{name}")
    monkeypatch.setenv(
        "OPENAI_CUSTOM_HEADERS", f"X-Gateway: {CANARY}:CUSTOM\nAuthorization: {CANARY}:CUSTOM_AUTH"
    )
    monkeypatch.setenv("COMPOUND_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.delenv("COMPOUND_TRUST", raising=False)


def text(model: str = "openai/m", kind: str = "litellm", **settings: Any) -> str:
    """Return a file whose engine has these settings."""
    return FILE.format(
        kind=kind,
        model=model,
        settings="".join(f", {k}: {json.dumps(v)}" for k, v in settings.items()),
    )


def problems(
    *args: Any, trust: tuple[str, ...] = (), allow_import: bool = True, **settings: Any
) -> list[str]:
    """Return what is wrong with a file whose engine has these settings."""
    try:
        loads(text(*args, **settings), trust=trust, allow_import=allow_import)
    except SpecError as error:
        return list(error.problems)
    return []


@pytest.fixture
def ask(cli: Any, tmp_path: Path) -> Any:
    """Run a file with these settings through the command line."""

    def run(*options: str, **settings: Any) -> Any:
        file = tmp_path / "system.yaml"
        file.write_text(text(**settings), encoding="utf-8")
        return cli("run", str(file), "question=2+2?", *options)

    return run


class TestKeys:
    @pytest.mark.parametrize("options", [(), ("--no-import",)])
    @pytest.mark.parametrize("kind", ["litellm", "vllm"])
    def test_a_file_cannot_send_a_variable_of_its_choice(
        self, ask: Any, server: Server, kind: str, options: tuple[str, ...]
    ) -> None:
        model = "openai/m" if kind == "litellm" else "m"
        ran = ask(
            *options, kind=kind, model=model, api_base=server.address, api_key_env="GITHUB_TOKEN"
        )
        assert ran.code == 2
        assert server.received == []
        assert f"--trust GITHUB_TOKEN@{server.origin}" in ran.err
        assert "'GITHUB_TOKEN'" in ran.err
        assert "system.yaml:5:" in ran.err

    @pytest.mark.slow
    @pytest.mark.parametrize("provider", CONFIGURABLE_PROVIDERS)
    def test_a_server_without_a_key_is_sent_nothing_of_the_environment(
        self, ask: Any, server: Server, provider: str
    ) -> None:
        ask(model=f"{provider}/m", api_base=server.address)
        assert server.received, provider
        assert server.secrets == set()
        assert CANARY not in repr(server.received)

    def test_a_vllm_server_without_key_is_sent_no_variable(self, ask: Any, server: Server) -> None:
        ask(kind="vllm", model="m", api_base=server.address)
        assert server.received
        assert CANARY not in repr(server.received)

    def test_a_trusted_key_arrives_and_nothing_else_does(self, ask: Any, server: Server) -> None:
        ran = ask(
            "--trust",
            f"GITHUB_TOKEN@{server.origin}",
            api_base=server.address,
            api_key_env="GITHUB_TOKEN",
        )
        assert ran.code == 0, ran.err
        assert ran.out.strip() == "four"
        assert server.secrets == {"GITHUB_TOKEN"}

    def test_a_key_is_trusted_for_one_server_only(
        self, ask: Any, server: Server, other: Server
    ) -> None:
        trust = (f"GITHUB_TOKEN@{other.origin}", server.origin)
        ran = ask(
            "--trust",
            trust[0],
            "--trust",
            trust[1],
            api_base=server.address,
            api_key_env="GITHUB_TOKEN",
        )
        assert ran.code == 2
        assert server.received == []

    def test_a_key_of_a_provider_goes_to_that_provider_without_consent(self) -> None:
        assert problems("openai/gpt-4o-mini", api_key_env="OPENAI_API_KEY") == []
        assert (
            problems(
                "openai/m", api_base="https://api.groq.com/openai/v1", api_key_env="GROQ_API_KEY"
            )
            == []
        )

    @pytest.mark.parametrize(
        ("model", "settings"),
        [
            ("openai/m", {"api_key_env": "GITHUB_TOKEN"}),
            ("openai/m", {"api_base": "https://api.openai.com/v1", "api_key_env": "GROQ_API_KEY"}),
            ("openai/m", {"api_base": "http://api.openai.com/v1", "api_key_env": "OPENAI_API_KEY"}),
            (
                "openai/m",
                {"api_base": "https://api.openai.com:8443/v1", "api_key_env": "OPENAI_API_KEY"},
            ),
            (
                "openai/m",
                {
                    "api_base": "https://api.openai.com.evil.example/v1",
                    "api_key_env": "OPENAI_API_KEY",
                },
            ),
            ("replicate/m", {"api_key_env": "GITHUB_TOKEN"}),
        ],
    )
    def test_a_key_goes_to_no_other_provider_scheme_or_port(
        self, model: str, settings: dict[str, Any]
    ) -> None:
        (problem,) = problems(model, **settings)
        assert "environment variable" in problem

    @pytest.mark.parametrize(
        "key", ["A; rm -rf ~ #", "$(touch x)", "A B", "", "os.environ/A", "A@evil.example"]
    )
    def test_the_command_that_gives_consent_holds_no_other_command(self, key: str) -> None:
        (problem,) = problems(api_base="https://llm.example.com", api_key_env=key)
        assert "not the name of an environment variable" in problem
        assert "--trust" not in problem

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "name",
        [
            "api_base",
            "base_url",
            "api_key",
            "custom_llm_provider",
            "extra_headers",
            "headers",
            "organization",
        ],
    )
    @pytest.mark.parametrize("kind", ["litellm", "vllm"])
    def test_further_arguments_say_neither_where_a_call_goes_nor_with_which_key(
        self, ask: Any, server: Server, kind: str, name: str
    ) -> None:
        extra = {name: "os.environ/GITHUB_TOKEN", "api_base": server.address}
        ran = ask(kind=kind, model="openai/m", extra=extra)
        assert ran.code == 2
        assert server.received == []

    def test_a_missing_key_is_named(
        self, ask: Any, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("GITHUB_TOKEN")
        ran = ask(
            "--trust",
            f"GITHUB_TOKEN@{server.origin}",
            api_base=server.address,
            api_key_env="GITHUB_TOKEN",
        )
        assert ran.code != 0
        assert "GITHUB_TOKEN" in ran.err

    @pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic", "azure"])
    def test_a_redirect_takes_neither_the_key_nor_the_prompt_elsewhere(
        self, ask: Any, server: Server, other: Server, provider: str
    ) -> None:
        server.redirect(other.address)
        entry = f"GITHUB_TOKEN@{server.origin}"
        ran = ask(
            "--trust",
            entry,
            model=f"{provider}/m",
            api_base=server.address,
            api_key_env="GITHUB_TOKEN",
        )
        assert ran.code == 1
        assert server.secrets == {"GITHUB_TOKEN"}
        assert other.received == []

    @pytest.mark.slow
    def test_vllm_follows_no_redirect(self, ask: Any, server: Server, other: Server) -> None:
        server.redirect(other.address)
        ask(kind="vllm", model="m", api_base=server.address)
        assert server.received
        assert other.received == []

    def test_python_names_a_key_and_a_server_without_further_consent(self, server: Server) -> None:
        engine = LiteLLMEngine("openai/m", api_base=server.address, api_key_env="GITHUB_TOKEN")

        async def ask() -> str:
            try:
                return (await engine.generate(Request((Message("user", "2+2?"),)))).text
            finally:
                await engine.aclose()

        assert asyncio.run(ask()) == "four"
        assert asyncio.run(ask()) == "four"  # closing leaves the engine usable
        assert server.secrets == {"GITHUB_TOKEN"}


class TestServers:
    @pytest.mark.parametrize(
        "address",
        [
            "https://evil.example/v1",
            "http://127.0.0.1.evil.example/v1",
            "http://localhost.evil.example:8000",
            "http://0.0.0.0:8000/v1",
            "http://10.0.0.7:8000/v1",
            "http://[::ffff:10.0.0.1]:80/v1",
            "http://2130706433/v1",
        ],
    )
    @pytest.mark.parametrize("kind", ["litellm", "vllm"])
    def test_a_server_elsewhere_needs_consent(self, address: str, kind: str) -> None:
        model = "openai/m" if kind == "litellm" else "m"
        (problem,) = problems(model, kind, api_base=address)
        assert "which you have not trusted" in problem
        (entry,) = re.findall(r"--trust (\S+);", problem)
        assert problems(model, kind, api_base=address, trust=(entry,)) == []

    @pytest.mark.parametrize(
        "address", ["http://127.0.0.1:8000/v1", "http://localhost:1/v1", "http://[::1]:8000"]
    )
    def test_a_server_on_this_machine_needs_none(self, address: str) -> None:
        assert problems(api_base=address) == []

    @pytest.mark.parametrize(
        "address",
        [
            "http://127.0.0.1@evil.example/v1",
            "http://user:password@127.0.0.1/v1",
            "http://evil.example\\@127.0.0.1/",
            "http://127.0.0.1\t.evil.example",
            "http://evil。example",
            "https://api.deepsee\u212a.com/v1",
            "https://api.mi\u017ftral.ai/v1",
            "http://127.0.0.1:99999/",
            "http://127.0.0.1:8000/admin/delete?all=1&x=",
            "http://127.0.0.1:8000/v1#",
            "http://127.0.0.1:0/",
            "//evil.example",
            "file:///etc/passwd",
            "os.environ/GITHUB_TOKEN",
            "http://[::1",
            "",
        ],
    )
    @pytest.mark.parametrize("kind", ["litellm", "vllm"])
    def test_an_address_that_clients_may_read_differently_is_refused(
        self, address: str, kind: str
    ) -> None:
        (problem,) = problems("openai/m" if kind == "litellm" else "m", kind, api_base=address)
        assert "not the address of a server" in problem
        engine = LiteLLMEngine if kind == "litellm" else VLLMEngine
        with pytest.raises(DeclarationError, match="not the address"):
            engine("openai/m", api_base=address)

    @pytest.mark.parametrize(
        "settings", [{"api_base": "http://127.0.0.1:1/v1"}, {"api_key_env": "OPENAI_API_KEY"}]
    )
    def test_no_import_takes_only_what_this_command_trusts(
        self, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        entries = ("http://127.0.0.1:1", "OPENAI_API_KEY@api.openai.com")
        monkeypatch.setenv("COMPOUND_TRUST", " ".join(entries))
        config_file().write_text(f"trust = {list(entries)}", encoding="utf-8")
        assert problems(**settings) == []
        (problem,) = problems(**settings, allow_import=False)
        assert "--no-import does not allow" in problem
        (entry,) = re.findall(r"--trust (\S+)$", problem)
        assert problems(**settings, allow_import=False, trust=(entry,)) == []

    @pytest.mark.parametrize(
        "provider", ["watsonx", "gigachat", "bedrock", "custom", "nonsense", "https:"]
    )
    def test_a_file_names_servers_only_of_providers_known_to_be_safe(self, provider: str) -> None:
        (problem,) = problems(f"{provider}/m", api_base="http://127.0.0.1:1/v1")
        assert "cannot name the server" in problem

    @pytest.mark.parametrize(
        "model",
        [
            "oobabooga/https://evil.example/x",
            "huggingface/http://evil.example",
            "openai/m?x=y",
            "bedrock/evil.example#",
            "baseten/a b",
            "nlp_cloud/../x",
            "vllm/--config=evil.yaml",
        ],
    )
    def test_a_models_name_holds_no_address_and_no_option(self, model: str) -> None:
        assert not is_model_name(model)
        plain = FILE.replace("lm: fast", f"lm: {json.dumps(model)}").format(
            kind="transformers", model="x", settings=""
        )
        with pytest.raises(SpecError, match="no engine for the model"):
            loads(plain)
        with pytest.raises(DeclarationError, match="not a model name"):
            find_engine(model)

    @pytest.mark.parametrize(
        "model",
        [
            "openai/gpt-4o-mini",
            "ollama/llama3:8b",
            "cloudflare/@cf/meta/llama-3",
            "openrouter/a/b:free",
            "vertex_ai/c@1",
        ],
    )
    def test_usual_names_of_models_are_taken(self, model: str) -> None:
        assert is_model_name(model)


class TestConsent:
    def test_the_environment_gives_consent(
        self, ask: Any, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COMPOUND_TRUST", f"gpu.example:8000, GITHUB_TOKEN@{server.origin}")
        assert ask(api_base=server.address, api_key_env="GITHUB_TOKEN").code == 0
        assert server.secrets == {"GITHUB_TOKEN"}

    def test_the_line_of_the_message_gives_consent(self, ask: Any, server: Server) -> None:
        given = {"api_base": server.address, "api_key_env": "GITHUB_TOKEN"}
        refused = ask(**given)
        line, path = re.findall(r"(trust = \[.*?\]) in (\S+)", refused.err)[0]
        Path(path).write_text(line, encoding="utf-8")
        assert ask(**given).code == 0
        assert server.secrets == {"GITHUB_TOKEN"}

    def test_nothing_beside_the_file_or_in_the_working_directory_gives_consent(
        self, ask: Any, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("COMPOUND_CONFIG")
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
        monkeypatch.chdir(tmp_path)
        for name in ("config.toml", "compound.toml", ".compound.toml", "pyproject.toml", ".env"):
            (tmp_path / name).write_text(
                f"trust = ['GITHUB_TOKEN@{server.origin}']\nCOMPOUND_TRUST=x", encoding="utf-8"
            )
        assert ask(api_base=server.address, api_key_env="GITHUB_TOKEN").code == 2
        assert server.received == []

    def test_the_configuration_is_in_the_home_folder(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("COMPOUND_CONFIG")
        monkeypatch.setenv("XDG_CONFIG_HOME", "/home/someone/conf")
        assert config_file() == Path("/home/someone/conf/compound/config.toml")

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            ("trust = 3", "must be a list"),
            ("trust = [3]", "must be a list"),
            ("trusts = []", "did you mean 'trust'"),
            ("trust = [", "cannot be read"),
        ],
    )
    def test_a_broken_configuration_file_is_named(self, content: str, said: str) -> None:
        config_file().write_text(content, encoding="utf-8")
        with pytest.raises(ConfigurationError, match=said) as caught:
            loads(text(api_base="https://llm.example.com"))
        assert str(config_file()) in str(caught.value)
        loads(text("openai/gpt-4o-mini"))  # a file that needs no consent does not read it

    @pytest.mark.parametrize(
        "entry", ["*", "A B@llm.example.com", "@llm.example.com", "KEY@", "https://*.example.com"]
    )
    def test_an_entry_of_other_forms_is_refused(self, entry: str, cli: Any, tmp_path: Path) -> None:
        file = tmp_path / "system.yaml"
        file.write_text(text("openai/gpt-4o-mini"), encoding="utf-8")
        ran = cli("check", str(file), "--trust", entry)
        assert ran.code == 2
        assert (
            repr(entry.rpartition("@")[2] if entry == "KEY@" else entry) in ran.err
            or "not the address" in ran.err
        )

    @pytest.mark.parametrize("command", ["check", "run", "evaluate", "optimize"])
    def test_every_command_asks_for_consent(self, cli: Any, command: str, tmp_path: Path) -> None:
        file = tmp_path / "system.yaml"
        file.write_text(text(api_base="https://llm.example.com/v1"), encoding="utf-8")
        ran = cli(command, str(file))
        assert ran.code == 2
        assert "--trust llm.example.com;" in ran.err
        ran = cli(command, str(file), "--trust", "llm.example.com")
        assert "--trust" not in ran.err

    def test_load_system_asks_for_consent(self, tmp_path: Path) -> None:
        file = tmp_path / "system.yaml"
        file.write_text(text(api_base="https://llm.example.com/v1"), encoding="utf-8")
        with pytest.raises(SpecError, match="--trust llm.example.com"):
            cp.load_system(file)
        assert cp.load_system(file, trust=["llm.example.com"]).name == "demo"

    def test_an_override_is_checked_like_the_file(self) -> None:
        with pytest.raises(SpecError, match="--trust"):
            loads(text(), overrides=[("engines.fast.litellm.api_base", "https://llm.example.com")])


def test_origins_are_compared_by_scheme_host_and_port() -> None:
    assert Origin.of("HTTPS://LLM.example.com:443/v1") == Origin.of("https://llm.example.com/")
    assert Origin.of("http://gpu") != Origin.of("https://gpu")
    assert Origin.of("http://gpu:8000") != Origin.of("http://gpu:8001")


def test_every_entry_of_the_provider_table_is_a_provider_of_litellm() -> None:
    import litellm

    known = {getattr(provider, "value", provider) for provider in litellm.provider_list}
    assert known >= set(PROVIDERS)
    assert known >= set(CONFIGURABLE_PROVIDERS)
    assert all(provider.origin.scheme == "https" for provider in PROVIDERS.values())


def test_a_connection_reads_keys_from_the_environment_alone() -> None:
    connection = Connection("openai/m", None, "NO_SUCH_VARIABLE")
    with pytest.raises(CompoundError, match="export NO_SUCH_VARIABLE"):
        connection.arguments()


@pytest.mark.slow
def test_a_dotenv_file_in_the_working_directory_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """litellm would read it, and a provider's address is one of the things it could set."""
    (tmp_path / ".env").write_text(
        "OPENAI_BASE_URL=https://evil.example\nCOMPOUND_TRUST=evil.example\n", "utf-8"
    )
    code = (
        "import os\n"
        "from compound.engines.litellm import LiteLLMEngine\n"
        "LiteLLMEngine('openai/gpt-4o-mini').priced\n"
        "print(os.environ.get('OPENAI_BASE_URL'), os.environ.get('COMPOUND_TRUST'))\n"
    )
    for name in ("OPENAI_BASE_URL", "COMPOUND_TRUST", "LITELLM_MODE"):
        monkeypatch.delenv(name, raising=False)
    assert python("-c", code, cwd=tmp_path).stdout.strip() == "None None"


STORED = """
system: demo
lm: smollm2
inputs: {question: str}
components: {answerer: {llm: {prompt: Answer.}, in: {question: $question}}}
outputs: {answer: $answerer}
data: {path: "PATH"}
"""


def stored(path: str, **options: Any) -> cp.Dataset | None:
    return loads(STORED.replace("PATH", path), **options).data


@pytest.mark.parametrize("path", ["s3://bucket", "s3://bucket/qa/rows.parquet", "s3://localhost/x"])
def test_a_file_reads_no_bucket_with_the_users_keys_without_consent(path: str) -> None:
    bucket = "/".join(path.split("/")[:3])
    with pytest.raises(
        SpecError, match=rf"data.path: the file reads {bucket} with your keys"
    ) as caught:
        stored(path)
    assert f"--trust {bucket}; in Python" in str(caught.value)
    assert str(getattr(stored(path, trust=[bucket]), "path", "")) == path
    for other in ("s3://bucket-2", "bucket", "https://bucket", "s3://buck"):
        with pytest.raises(SpecError, match="which you have not trusted"):
            stored(path, trust=[other])
    # named on the command line
    assert stored("data", overrides=[("data.path", path)]) is not None


def test_without_imports_a_bucket_needs_consent_on_the_command_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COMPOUND_TRUST", "s3://bucket")
    assert stored("s3://bucket/qa") is not None
    with pytest.raises(SpecError, match="which --no-import does not allow"):
        stored("s3://bucket/qa", allow_import=False)
    assert stored("s3://bucket/qa", allow_import=False, trust=["s3://bucket"]) is not None


@pytest.mark.parametrize(
    "path",
    [
        *("https://example.com/rows.jsonl", "gs://bucket/x", "az://bucket/x", "file:///etc/passwd"),
        *("s3://key:secret@bucket/x", "s3://bucket/../other", "s3://bucket/x?versionId=1", "s3://"),
        *("s3://bucket/*.jsonl", "zip://x::s3://bucket/a", "s3://bucket/a::b", "S3://bucket/x"),
        *("s3://bucket:99/x", "memory://x", "s3://bucket//x", "s3://Bucket.example/x"),
    ],
)
def test_no_other_address_is_a_data_set(path: str) -> None:
    with pytest.raises(SpecError, match=r"data.path: .* is not an address in a store"):
        stored(path, trust=["s3://bucket"])


def test_an_engine_has_no_address_in_a_store() -> None:
    with pytest.raises(SpecError, match="is not the address of a server"):
        loads(text(api_base="s3://bucket"), trust=["s3://bucket"])
    with pytest.raises(DeclarationError, match="is not the address of a server"):
        Trust.of(["KEY@s3://bucket"])


def test_strict_trust_has_no_exceptions() -> None:
    trust = Trust.of([], strict=True)
    assert not trust.allows_host(Origin.of("http://127.0.0.1:8000"))
    assert not trust.allows_key("OPENAI_API_KEY", PROVIDERS["openai"].origin)
