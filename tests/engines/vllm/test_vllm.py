"""The vLLM engine, tested against a fake vLLM server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fake_vllm as fake
from compound import CompoundError
from compound.core.engine import Adapter, AnswerFormat, Prefilled, TokenRecord, Usage
from compound.core.errors import (
    AdapterNotServed,
    CallError,
    ConfigurationError,
    DeclarationError,
    SpecError,
    TransientError,
)
from compound.core.storage.artifacts import folder_digest
from compound.engines.adapter_files import (
    NOISE,
    VISIBLE,
    Probe,
    check_logprobs,
    read_probe,
)
from compound.engines.vllm.adapters import DIFFERS_FROM_OTHERS, INDISTINGUISHABLE, MATCHES_PROBE
from compound.engines.vllm.engine import VLLMEngine
from compound.ext import Engine, Message, Request, ToolSpec
from compound.graph.registry.engines import find_engine
from compound.optimizers.memory_plan import check_trainable
from compound.optimizers.methods import method
from compound.yaml import loads
from vllm_requests import ask, request, until

pytest.importorskip("httpx")

NOW = ToolSpec("now", "Return the time.", '{"type": "object", "properties": {}}')


@pytest.fixture
def server() -> Iterator[Any]:
    server = fake.FakeVLLM().serve()
    yield server
    server.stop()


def engine(server: Any, **settings: Any) -> VLLMEngine:
    return VLLMEngine("tiny", api_base=server.address, **settings)


def test_it_is_an_engine_whose_name_tells_apart_what_changes_answers(server: Any) -> None:
    assert isinstance(engine(server), Engine)
    assert find_engine("vllm/smollm2").name == "vllm:smollm2"
    assert find_engine("vllm/Qwen/Qwen3-8B").name == "vllm:Qwen/Qwen3-8B"
    others = [
        VLLMEngine("m"),
        VLLMEngine("m", api_base="http://h/v1"),
        VLLMEngine("m", args=["--dtype", "bfloat16"]),
        VLLMEngine("m", extra={"top_p": 0.5}),
        VLLMEngine("m", deterministic=True),
    ]
    assert len({lm.name for lm in others}) == 5
    assert [lm.remote for lm in others] == [False, True, False, False, False]


@pytest.mark.parametrize(
    ("deterministic", "temperature", "seed"),
    [(False, 0.7, None), (True, 0.7, 3), (True, 0.0, None)],
)
def test_only_sampled_requests_of_a_deterministic_engine_carry_a_seed(
    server: Any, deterministic: bool, temperature: float, seed: int | None
) -> None:
    hi = Request((Message("user", "Hi"),), temperature=temperature, seed=3)
    ask(engine(server, deterministic=deterministic), hi)
    (sent,) = server.sent("chat/completions")
    assert sent.get("seed") == seed


def test_the_server_is_sent_the_request_and_nothing_of_the_models_own_sampling(server: Any) -> None:
    what = Request(
        (Message("system", "Be brief."), Message("user", "Hi")),
        max_tokens=7,
        temperature=0.5,
        stop=("\n",),
        seed=2**63 + 3,
    )
    ask(engine(server, extra={"top_p": 0.9}, deterministic=True), what)
    assert server.sent("chat/completions") == [
        {
            "model": "tiny",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Hi"},
            ],
            "max_completion_tokens": 7,
            "temperature": 0.5,
            "stop": ["\n"],
            "seed": 3,
            "top_p": 0.9,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        }
    ]


@pytest.mark.parametrize(
    ("settings", "sent"),
    [
        ({"format": AnswerFormat(choices=("yes", "no"))}, {"choice": ["yes", "no"]}),
        ({"format": AnswerFormat(schema='{"type": "integer"}')}, {"json": {"type": "integer"}}),
        ({"format": AnswerFormat(choices=("a",)), "want_tokens": True}, {"choice": ["a"]}),
        ({"format": AnswerFormat(choices=("a",)), "want_tokens": True, "temperature": 1.0}, None),
        ({"format": AnswerFormat(choices=("a",)), "tools": (NOW,)}, None),
        (
            {"format": AnswerFormat(choices=("a",)), "tools": (NOW,), "tool_choice": "none"},
            {"choice": ["a"]},
        ),
        ({}, None),
    ],
)
def test_the_server_enforces_the_format_except_in_rollouts_and_where_tools_may_be_called(
    server: Any, settings: dict[str, Any], sent: dict[str, Any] | None
) -> None:
    (completion,) = ask(engine(server), request(**settings))
    assert server.sent("chat/completions")[-1].get("structured_outputs") == sent
    assert completion.tokens is None or completion.tokens.constraint == ""


def test_a_cue_is_the_beginning_of_the_assistants_turn(server: Any) -> None:
    ask(engine(server), request("What?", cue="answer:"))
    sent = server.sent("chat/completions")[0]
    assert sent["messages"] == [
        {"role": "user", "content": "What?"},
        {"role": "assistant", "content": "answer:"},
    ]
    assert (sent["add_generation_prompt"], sent["continue_final_message"]) == (False, True)


def test_a_token_record_is_what_the_server_says(server: Any) -> None:
    (completion,) = ask(engine(server), request(want_tokens=True))
    assert completion.tokens == TokenRecord(
        (1, 10, 11, 12, 13), (7, 8, 2), (-0.5, -0.25, 0.0), "stop"
    )
    assert (completion.text, completion.usage) == ("four", Usage(1, 5, 3))
    sent = server.sent("chat/completions")[0]
    assert (sent["return_token_ids"], sent["logprobs"], sent["top_logprobs"]) == (True, True, 0)


@pytest.mark.parametrize(
    "change",
    [
        {".token_ids": None},
        {"prompt_token_ids": None},
        {".logprobs": None},
        {".token_ids": [7, 8]},
        {".logprobs": {"content": [{"logprob": -9999.0}, {"logprob": -1.0}, {"logprob": -1.0}]}},
        {".logprobs": {"content": [{"logprob": 17.5}, {"logprob": -1.0}, {"logprob": -1.0}]}},
        {"choices": []},
    ],
    ids=["ids", "prompt", "logprobs", "fewer ids", "no number", "logits", "choices"],
)
def test_an_answer_without_a_record_is_a_failed_call(server: Any, change: dict[str, Any]) -> None:
    server.change = change
    with pytest.raises(CallError, match="vLLM, 0.10.2 or later") as caught:
        ask(engine(server), request(want_tokens=True))
    assert not isinstance(caught.value, TransientError)


def test_an_aborted_answer_is_transient(server: Any) -> None:
    server.change = {".finish_reason": "abort"}
    with pytest.raises(TransientError, match="abort"):
        ask(engine(server))


def test_the_prefill_that_the_prefix_cache_saved_is_summed(server: Any) -> None:
    lm = engine(server)
    ask(lm, request("a"), request("b"))
    assert lm.prefill == Prefilled(tokens=10, cached=4)
    assert lm.prefill.share == 0.4
    server.change = {
        "usage": {"prompt_tokens": 10, "completion_tokens": 1}
    }  # without the server's flag
    ask(lm)
    assert lm.prefill == Prefilled(tokens=20, cached=4)
    assert Prefilled().share == 0.0


def test_records_that_ignore_the_temperature_are_refused(server: Any) -> None:
    server.raw = True
    with pytest.raises(CompoundError, match="--logprobs-mode processed_logprobs") as caught:
        ask(engine(server), request(want_tokens=True, temperature=0.7))
    assert not isinstance(caught.value, CallError)
    assert server.sent("chat/completions") == []


def test_the_server_is_asked_once_and_only_where_it_matters(server: Any) -> None:
    hot = request(want_tokens=True, temperature=0.7)
    ask(
        engine(server),
        request(want_tokens=True, temperature=1.0),
        request(want_tokens=True),
        request(temperature=0.7),
    )
    assert server.sent("completions") == []
    ask(engine(server), hot, hot)
    assert [body["temperature"] for body in server.sent("completions")] == [0.0, 0.01]


@pytest.mark.parametrize("status", [429, 500, 503, 408])
def test_a_server_error_is_transient_and_not_retried_here(server: Any, status: int) -> None:
    server.fault["chat/completions"] = (status, "busy", {"retry-after": "3"})
    with pytest.raises(TransientError, match="busy") as caught:
        ask(engine(server))
    assert caught.value.retry_after == 3.0
    assert len(server.sent("chat/completions")) == 1


@pytest.mark.parametrize(
    ("status", "message", "hint"),
    [
        (400, "temperature must be non-negative", "temperature"),
        (400, "This model's maximum context length is 20 tokens.", "shorten the prompt"),
        (
            400,
            "max_completion_tokens=40 cannot be greater than max_model_len=20.",
            "shorten the prompt",
        ),
        (404, "The model does not exist", "must serve it under this name"),
        (200, "", "answered '<html>'"),
    ],
)
def test_a_refusal_is_a_permanent_error(server: Any, status: int, message: str, hint: str) -> None:
    server.fault["chat/completions"] = (status, message, {})
    with pytest.raises(CallError, match=hint) as caught:
        ask(engine(server))
    assert not isinstance(caught.value, TransientError)


def test_a_server_with_a_key_is_shown_it(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server.key = "secret-1"
    monkeypatch.setenv("TINY_KEY", "secret-1")
    assert ask(engine(server, api_key_env="TINY_KEY"))[0].text == "four"
    monkeypatch.setenv("TINY_KEY", "secret-2")
    with pytest.raises(CallError, match="set TINY_KEY") as caught:
        ask(engine(server, api_key_env="TINY_KEY"))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["\x1b[31mred", "half \ud83d", "re\u202eversed", "a\x00b"])
def test_the_names_of_another_server_are_sanitized(server: Any, name: str) -> None:
    server.models = lambda _: (200, {"data": [{"id": name}]})
    with pytest.raises(CompoundError, match="does not serve 'tiny'; it serves ") as caught:
        ask(engine(server))
    assert not isinstance(caught.value, CallError)
    shown = caught.value.hint
    assert shown.replace("\ufffd", "").isprintable()
    assert shown == "it serves " + "".join("\ufffd" if not c.isprintable() else c for c in name)


def test_an_unreachable_server_is_tried_again() -> None:
    other = fake.FakeVLLM()
    lm = engine(other, timeout=0.5)
    with pytest.raises(TransientError):
        asyncio.run(lm.generate(request()))
    other.serve()
    assert ask(lm)[0].text == "four"
    other.stop()


Write = Callable[..., Adapter]


def sampled(adapter: Adapter, **settings: Any) -> Request:
    return request(adapter=adapter, want_tokens=True, temperature=1.0, **settings)


def refused(server: Any, adapter: Adapter, *earlier: Adapter) -> str:
    """Return the message of the error that refuses an adapter, which ends a run before any sample."""
    lm = engine(server)

    async def run() -> None:
        try:
            for each in earlier:
                await lm.generate(sampled(each))
            await lm.generate(sampled(adapter))
        finally:
            assert adapter.sha256 not in lm.adapters
            await lm.aclose()

    with pytest.raises(AdapterNotServed) as caught:
        asyncio.run(run())
    assert not isinstance(caught.value, CallError)
    assert adapter.sha256[:16] not in [body["model"] for body in server.sent("chat/completions")]
    assert adapter.sha256[:16] not in server.loaded
    return str(caught.value)


async def test_an_adapter_is_loaded_by_version_and_sampled_with(server: Any, write: Write) -> None:
    one, two = write(0.5), write(0.8, before=0.5)
    lm = engine(server)

    async with contextlib.aclosing(lm):
        found = [await lm.generate(sampled(each)) for each in (one, two, one)]
        assert lm.adapters == {one.sha256: MATCHES_PROBE, two.sha256: MATCHES_PROBE}
        records = [completion.tokens for completion in found]
    assert [record.adapter for record in records if record] == [one.sha256, two.sha256, one.sha256]
    assert [record.logprobs[0] for record in records if record] == [-1.0, -1.3, -1.0]
    names = [one.sha256[:16], two.sha256[:16]]
    assert [body["model"] for body in server.sent("chat/completions")] == [*names, names[0]]
    assert server.sent("load_lora_adapter") == [
        {"lora_name": name, "lora_path": adapter.path}
        for name, adapter in zip(names, (one, two), strict=True)
    ]


def test_a_folder_that_was_changed_is_not_loaded(server: Any, write: Write) -> None:
    adapter = write(0.5)
    (Path(adapter.path) / "adapter_config.json").write_text('{"revision": "0.6"}')
    with pytest.raises(ConfigurationError, match="was changed"):
        ask(engine(server), sampled(adapter))
    assert server.sent("load_lora_adapter") == []


def test_an_adapter_that_is_no_plain_lora_reaches_no_server(server: Any, write: Write) -> None:
    path = Path(write(0.5).path)
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(
        json.dumps({**config, "modules_to_save": ["lm_head"]})
    )
    with pytest.raises(ConfigurationError, match="modules_to_save"):
        ask(engine(server), sampled(Adapter(str(path), folder_digest(path))))
    assert server.sent("load_lora_adapter") == []


@pytest.mark.parametrize("stale", ["base", "first"])
def test_a_server_that_keeps_old_weights_is_detected(server: Any, write: Write, stale: str) -> None:
    server.stale = stale
    earlier = [write(0.5)] if stale == "first" else []
    said = refused(server, write(0.9, before=0.5 if earlier else 0.0), *earlier)
    assert "those of the weights that the adapter replaces" in said
    assert "restart the server" in said


def test_identical_numbers_show_a_stale_server_below_the_noise(server: Any, write: Write) -> None:
    """One training step moves log-probabilities by thousandths, but noise is a tenth."""
    old, new = write(0.5), write(0.502, before=0.5)
    lm = engine(server)
    server.noise = 0.05

    async def run() -> dict[str, str]:
        async with contextlib.aclosing(lm):
            for each in (old, new):
                await lm.generate(sampled(each))
            return dict(lm.adapters)

    assert asyncio.run(run()) == {old.sha256: MATCHES_PROBE, new.sha256: DIFFERS_FROM_OTHERS}
    server.restart()
    server.stale = "first"
    assert f"identical to those of {old.sha256[:16]}" in refused(server, new, old)


def test_a_server_with_unknown_weights_is_detected(server: Any, write: Write) -> None:
    server.stale = "first"
    first = write(5.0, before=None)
    assert "nats per token, and noise explains at most" in refused(
        server, write(0.5, before=-0.5), first
    )


def test_noise_of_a_number_format_is_accepted(server: Any, write: Write) -> None:
    server.noise = 2 * NOISE
    ask(
        engine(server),
        sampled(write(0.5)),
        sampled(write(0.6, before=0.5)),
        sampled(write(0.51, before=0.5)),
    )
    assert len(server.sent("chat/completions")) == 3


async def test_an_adapter_without_effect_is_indistinguishable(server: Any, write: Write) -> None:
    lm = engine(server)
    nothing = [write(0.0), write(0.0, before=None), write(0.0, before=None, note="other")]
    same = write(0.5, before=0.5 + VISIBLE / 2)  # the trainer itself sees no difference

    async with contextlib.aclosing(lm):
        for each in (*nothing, same):
            await lm.generate(sampled(each))
        assert list(lm.adapters.values()) == [INDISTINGUISHABLE] * 4


def test_an_adapter_without_a_probe_must_change_base_numbers(server: Any, write: Write) -> None:
    adapter = write(0.5, before=None)
    lm = engine(server)

    async def run() -> dict[str, str]:
        async with contextlib.aclosing(lm):
            await lm.generate(sampled(adapter))
            return dict(lm.adapters)

    assert asyncio.run(run()) == {adapter.sha256: DIFFERS_FROM_OTHERS}
    server.restart()
    server.stale = "base"
    assert "identical to those of tiny" in refused(server, adapter)


def test_equal_weights_in_another_folder_are_accepted(server: Any, write: Write) -> None:
    one, again = write(0.5, before=None), write(0.5, before=None, note="saved again")
    assert one.sha256 != again.sha256
    assert len(ask(engine(server), sampled(one), sampled(again))) == 2


def test_a_server_that_forgets_what_it_acknowledged_is_detected(server: Any, write: Write) -> None:
    server.load_lora_adapter = lambda body: (200, "Success")
    assert "does not exist" in refused(server, write(0.5))


async def test_a_cancelled_call_does_not_delay_a_swap(server: Any, write: Write) -> None:
    lm = engine(server)

    async with contextlib.aclosing(lm):
        server.hang = True
        gone = asyncio.create_task(lm.generate(request()))
        await until(lambda: len(server.sent("chat/completions")) == 1)
        swap = asyncio.create_task(lm.generate(sampled(write(0.5))))
        await asyncio.sleep(0.05)
        server.hang = server.fragile = False  # the server may not have noticed yet
        gone.cancel()
        assert (await swap).text == "four"


def test_an_adapter_that_the_server_lost_is_loaded_again(server: Any, write: Write) -> None:
    adapter = write(0.5)
    lm = engine(server)
    asyncio.run(lm.generate(sampled(adapter)))
    server.restart()  # it was restarted by whoever runs it
    with pytest.raises(TransientError, match="lost the adapter"):
        asyncio.run(lm.generate(sampled(adapter)))
    assert ask(lm, sampled(adapter))[0].text == "four"


def test_an_adapter_another_process_loaded_is_checked_as_ours(server: Any, write: Write) -> None:
    good, bad = write(0.5), write(0.6)
    server.loaded = {good.sha256[:16]: 0.5, bad.sha256[:16]: 0.0}
    assert ask(engine(server), sampled(good))[0].text == "four"
    refused(server, bad)


@pytest.mark.parametrize(
    ("status", "message", "hint"),
    [
        (
            500,
            "Worker failed with error 'LoRA rank 64 is greater than max_lora_rank 16.'",
            "raise max_lora_rank",
        ),
        (404, "Not Found", "--enable-lora"),
        (404, "Loading lora x failed: No adapter found for /x", "read the same files"),
    ],
)
def test_a_server_that_refuses_an_adapter_ends_the_run(
    server: Any, write: Write, status: int, message: str, hint: str
) -> None:
    server.fault["load_lora_adapter"] = (status, message, {})
    with pytest.raises(CompoundError, match=hint) as caught:
        ask(engine(server), sampled(write(0.5)))
    assert not isinstance(caught.value, CallError)


def test_a_server_too_busy_to_load_an_adapter_is_transient(server: Any, write: Write) -> None:
    server.fault["load_lora_adapter"] = (503, "busy", {})
    with pytest.raises(TransientError, match="busy"):
        ask(engine(server), sampled(write(0.5)))


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": [1]},
        {"tokens": [1, 2, 3]},
        {"tokens": "abc"},
        {"tokens": [1.5] * 40},
        {"logprobs": [True] * 39},
        {"before": [float("nan")] * 39},
        {"before": None},
        {"before": [10**400] * 39},
    ],
    ids=str,
)
def test_an_invalid_probe_file_is_refused(write: Write, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"probe\.json is not a probe"):
        read_probe(Path(write(0.5, changes=changes).path))


def test_a_probe_file_is_read_through_no_link_and_up_to_a_depth(write: Write) -> None:
    probe = Path(write(0.5).path) / "probe.json"
    probe.write_text("[" * 5000 + "]" * 5000)
    with pytest.raises(ConfigurationError, match=r"nested more than 200 levels deep"):
        read_probe(probe.parent)
    probe.rename(probe.with_name("elsewhere.json"))
    probe.symlink_to("elsewhere.json")
    with pytest.raises(ConfigurationError, match=r"probe\.json is a symbolic link"):
        read_probe(probe.parent)


def test_the_rules_hold_on_hand_computed_probes() -> None:
    far = Probe((1, 2, 3), (-1.0, -2.0), (-1.0, -1.0))  # 1.0 apart, 0.8 needed
    assert far.distinguishable
    assert check_logprobs(far, (-1.0, -1.51))
    with pytest.raises(AdapterNotServed, match="replaces"):
        check_logprobs(far, (-1.0, -1.49))
    with pytest.raises(AdapterNotServed, match="replaces"):
        check_logprobs(far, (-1.0, -1.5))  # as near to one as to the other
    with pytest.raises(AdapterNotServed, match=r"0\.35 nats per token"):
        check_logprobs(far, (-0.3, -2.0))
    near = Probe((1, 2, 3), (-1.0, -2.0), (-1.0, -1.3))
    assert not near.distinguishable
    assert near.differs
    assert not check_logprobs(near, (-1.0, -1.5))  # nearer to before, but that is noise
    with pytest.raises(AdapterNotServed):
        check_logprobs(near, (math.nan, -2.0))
    assert not Probe((1, 2), (-1.0,), (-1.00009,)).differs


FILE = """
system: demo
lm: fast
engines: {{fast: {{vllm: {{model: smollm2, {settings}}}}}}}
inputs: {{question: str}}
components:
  answerer: {{llm: {{prompt: Answer.}}, in: {{question: $question}}}}
outputs: {{answer: $answerer}}
"""


@pytest.mark.parametrize("settings", ["command: ./vllm", "args: [--enforce-eager]"])
def test_a_file_that_says_how_to_run_a_program_is_as_trusted_as_python(settings: str) -> None:
    loads(FILE.format(settings=settings))
    key = settings.partition(":")[0]
    with pytest.raises(SpecError, match=rf"engines\.fast\.vllm\.{key}: .*imports are not allowed"):
        loads(FILE.format(settings=settings), allow_import=False)
    loads(FILE.format(settings="max_loras: 2"), allow_import=False)


TRAINED = """
system: trained
lm: model
inputs: {question: str}
components:
  answerer: {llm: {prompt: Answer., weights: {lora: {rank: RANK}}}, in: {question: $question}}
outputs: {answer: $answerer}
engines: {model: {vllm: {model: m, SETTINGS}}}
optimize: {method: METHOD}
"""


def check_training(settings: str, rank: int = 8, name: str = "mmgrpo") -> None:
    """Run the checks of ``compound check`` on a system that trains a model on vLLM."""
    text = TRAINED.replace("SETTINGS", settings).replace("RANK", str(rank)).replace("METHOD", name)
    program = loads(text)
    check_trainable(
        method(name, program.system, program.optimize), program.system, program.find_engine
    )


@pytest.mark.parametrize(
    "extra", ["top_p: 0.95", "top_k: 20", "min_p: 0.1", "repetition_penalty: 1.1"]
)
def test_training_on_another_distribution_than_sampled_is_refused_by_check(extra: str) -> None:
    with pytest.raises(DeclarationError, match=rf"'answerer' cannot .* samples with {extra[:5]}"):
        check_training(f"extra: {{{extra}}}")
    check_training(f"extra: {{{extra}}}", name="mygo")  # imitation takes no ratios


def test_an_adapter_that_is_too_large_for_its_engine_is_refused_by_check() -> None:
    check_training("max_lora_rank: 16", rank=16)
    with pytest.raises(DeclarationError, match=r"'answerer' has rank 32, .*vllm:m.* at most 16"):
        check_training("max_lora_rank: 16", rank=32)
    check_training("concurrency: 8", rank=200)  # an engine without a limit
