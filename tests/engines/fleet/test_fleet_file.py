"""A fleet in a file: its forms, its errors, and the user's consent for each address."""

from __future__ import annotations

from pathlib import Path

import pytest

from compound.core.errors import SpecError
from compound.engines.fleet import FleetEngine
from compound.yaml import loads

FILE = """
system: demo
lm: fast
engines: {fast: {fleet: SETTINGS}}
inputs: {question: str}
components:
  answerer: {llm: {prompt: Answer.}, in: {question: $question}}
outputs: {answer: $answerer}
"""
HERE = '["http://127.0.0.1:8000/v1", "http://127.0.0.1:8001/v1"]'
THERE = '["http://127.0.0.1:8000/v1", "http://gpu:8001/v1"]'


def load(settings: str, *, imports: bool = True, trust: tuple[str, ...] = ()) -> FleetEngine:
    text = FILE.replace("SETTINGS", settings)
    lm = loads(text, path="f.yaml", allow_import=imports, trust=trust).find_engine("fast")
    assert isinstance(lm, FleetEngine)
    return lm


@pytest.fixture(autouse=True)
def _no_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COMPOUND_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.delenv("COMPOUND_TRUST", raising=False)


def test_a_list_of_addresses_is_a_fleet() -> None:
    lm = load(HERE)
    assert [stats.name for stats in lm.replicas] == [
        "http://127.0.0.1:8000/v1",
        "http://127.0.0.1:8001/v1",
    ]
    assert (lm.concurrency, lm.forwards) == (32, True)


def test_settings_are_those_of_each_replica() -> None:
    lm = load(f"{{urls: {HERE}, vllm: {{model: m, concurrency: 8, extra: {{top_p: 0.5}}}}}}")
    assert (lm.name, lm.concurrency) == ('fleet:vllm:m:{"top_p": 0.5}', 16)
    assert (
        load("{devices: [[0], [1], [2]], vllm: {model: m, args: [--dtype, bfloat16]}}").concurrency
        == 192
    )
    assert load(f"{{urls: {HERE}, openai: {{model: m, price: [0, 0]}}}}").priced


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("[]", "fleet: must not be empty"),
        ("3", "fleet: must be a mapping"),
        ('["http://a:1/v1", 3]', r"fleet\.1: must be a string"),
        ("{urls: [], vllm: {model: m}}", "needs either urls"),
        ("{replicas: 0}", r"fleet\.replicas"),
        (
            "{replica: 2}",
            r"f\.yaml:4:26: engines\.fast\.fleet\.replica: unknown key; did you mean 'replicas'",
        ),
        ("{replicas: 2, vllm: {modl: m}}", r"fleet\.vllm\.modl: unknown key; did you mean 'model'"),
        (
            f"{{urls: {HERE}, vllm: {{api_base: 'http://127.0.0.1:1'}}}}",
            r"vllm\.api_base: unknown key",
        ),
        ("{replicas: 2, openai: {model: m}}", "only vLLM servers can be started"),
        ('["http://127.0.0.1:1/v1", "http://127.0.0.1:1/v1"]', "given twice"),
        ('["http://me:pass@127.0.0.1:1/v1"]', r"fleet\.0: .* is not the address of a server"),
    ],
)
def test_mistakes_are_reported_at_their_place(settings: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        load(settings)


@pytest.mark.parametrize(
    ("settings", "place"),
    [(THERE, r"fleet\.1"), (f"{{urls: {THERE}, vllm: {{model: m}}}}", r"fleet\.urls\.1")],
)
def test_every_address_needs_consent(settings: str, place: str) -> None:
    with pytest.raises(SpecError, match=rf"{place}: .* sends prompts to http://gpu:8001") as caught:
        load(settings)
    assert len(caught.value.problems) == 1
    assert load(settings, trust=("http://gpu:8001",)).concurrency > 0
    with pytest.raises(SpecError) as caught:
        load(settings, imports=False, trust=("http://gpu:8001",))
    assert [problem for problem in caught.value.problems if "127.0.0.1:8000" in problem]
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("kind", ["vllm", "openai"])
def test_a_key_needs_consent_for_every_address_it_is_sent_to(kind: str) -> None:
    settings = f"{{urls: {THERE}, {kind}: {{model: m, api_key_env: GITHUB_TOKEN}}}}"
    with pytest.raises(SpecError) as caught:
        load(settings, trust=("GITHUB_TOKEN@http://127.0.0.1:8000",))
    (problem,) = caught.value.problems
    assert "'GITHUB_TOKEN' to http://gpu:8001" in problem
    assert load(
        settings, trust=("GITHUB_TOKEN@http://127.0.0.1:8000", "GITHUB_TOKEN@http://gpu:8001")
    )


@pytest.mark.parametrize("setting", ["command: ./vllm", "args: [--dtype, bfloat16]"])
def test_a_command_of_a_fleet_is_as_trusted_as_python(setting: str) -> None:
    settings = f"{{replicas: 2, vllm: {{model: m, {setting}}}}}"
    load(settings)
    with pytest.raises(SpecError, match=r"fleet\.vllm\.(command|args): is a command to run"):
        load(settings, imports=False)
    load("{replicas: 2, vllm: {model: smollm2}}", imports=False)
    with pytest.raises(SpecError, match=r"fleet\.vllm\.model: .*"):
        load("{replicas: 2, vllm: {model: ../theirs}}", imports=False)
