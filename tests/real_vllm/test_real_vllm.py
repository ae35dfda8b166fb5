"""The vLLM engine against a real server: what it records is what transformers computes, and swaps are real."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compound.core.engine import Adapter, AnswerFormat, Completion, Message, Request, TokenRecord
from compound.core.errors import AdapterNotServed, CompoundError, TransientError
from compound.core.loops import run_in_background
from compound.core.storage.artifacts import folder_digest
from compound.engines.vllm.adapters import (
    DIFFERS_FROM_OTHERS,
    INDISTINGUISHABLE,
    MATCHES_PROBE,
)
from compound.engines.vllm.engine import VLLMEngine

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated"
)  # peft's
NOISE = 0.12  # nats per token, mean: bfloat16 against float32 is 0.04 on texts, and less on likely tokens
Ask = Callable[..., list[Completion]]


def request(text: str = "Name three rivers of Europe.", **settings: Any) -> Request:
    given = {"max_tokens": 48, "temperature": 1.0, "want_tokens": True, **settings}
    return Request((Message("user", text),), **given)


def record(completion: Completion) -> TokenRecord:
    assert completion.tokens is not None
    return completion.tokens


def distance(
    one: TokenRecord, reference: Any, adapter: str = "", temperature: float = 1.0
) -> float:
    """Return how far a record's log-probabilities are from what transformers computes, nats per token."""
    found: list[float] = reference.logprobs([*one.prompt, *one.sampled], adapter, temperature)[
        -len(one.sampled) :
    ]
    return sum(abs(a - b) for a, b in zip(found, one.logprobs, strict=True)) / len(found)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_a_record_holds_what_transformers_computes_on_its_tokens(
    ask: Ask, reference: Any, temperature: float
) -> None:
    (completion,) = ask(request(temperature=temperature, seed=3))
    one = record(completion)
    turns = [{"role": "user", "content": "Name three rivers of Europe."}]
    text = reference.tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, tokenize=False
    )
    assert one.prompt == tuple(reference.tokenizer(text, add_special_tokens=False).input_ids)
    assert reference.tokenizer.decode(one.sampled, skip_special_tokens=True) == completion.text
    assert (one.adapter, len(one.sampled)) == ("", completion.usage.completion_tokens)
    assert distance(one, reference, temperature=temperature or 1.0) < NOISE


def test_the_log_probabilities_are_those_after_temperature(ask: Ask, reference: Any) -> None:
    one = record(ask(request(temperature=1.6, seed=3))[0])
    assert distance(one, reference, temperature=1.6) < NOISE
    assert distance(one, reference, temperature=1.0) > 3 * NOISE


def test_a_cue_continues_the_prompt_token_by_token(ask: Ask, reference: Any) -> None:
    (completion,) = ask(request(cue="answer: "))
    text = reference.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Name three rivers of Europe."}],
        add_generation_prompt=True,
        tokenize=False,
    )
    expected = reference.tokenizer(text + "answer: ", add_special_tokens=False).input_ids
    assert record(completion).prompt == tuple(expected)
    assert not completion.text.startswith("answer")


def test_a_stop_string_ends_the_text_and_a_turn_has_its_end(ask: Ask, reference: Any) -> None:
    what = "What is the capital of France? Answer in one sentence."
    whole, cut, short = ask(
        request(what, temperature=0.0),
        request(what, temperature=0.0, stop=("Par",)),
        request(what, temperature=0.0, max_tokens=2),
    )
    assert "Paris" in whole.text
    assert (whole.finish_reason, cut.finish_reason, short.finish_reason) == (
        "stop",
        "stop",
        "length",
    )
    assert record(whole).sampled[-1] == reference.tokenizer.eos_token_id
    assert cut.text == whole.text.partition("Par")[0]
    assert record(cut).sampled == record(whole).sampled[: len(record(cut).sampled)]
    assert len(record(short).sampled) == 2


def test_a_seed_gives_the_same_sample_and_another_one_another(ask: Ask) -> None:
    (one,), (again,), (other,) = (
        ask(request(seed=2**63 + 5)),
        ask(request(seed=2**63 + 5)),
        ask(request(seed=6)),
    )
    assert record(one) == record(again)
    assert record(one).sampled != record(other).sampled


def test_adapters_are_swapped_with_their_records(ask: Ask, lm: VLLMEngine, reference: Any) -> None:
    one, two = reference.save("one"), reference.save("two", before="one")
    first, second, base = ask(request(adapter=one), request(adapter=two), request())
    assert lm.adapters[one.sha256] == lm.adapters[two.sha256] == MATCHES_PROBE
    for completion, name, adapter in ((first, "one", one), (second, "two", two), (base, "", None)):
        sampled = record(completion)
        assert sampled.adapter == (adapter.sha256 if adapter else "")
        near = {other: distance(sampled, reference, other) for other in ("one", "two", "")}
        assert near[name] < 2 * NOISE  # one sample, with unlikely tokens or without
        assert min(near, key=lambda other: near[other]) == name, near


def test_many_calls_at_once_keep_their_adapters_apart(ask: Ask, reference: Any) -> None:
    adapters = {"one": reference.save("one"), "two": reference.save("two", before="one"), "": None}
    names = [name for _ in range(8) for name in adapters]
    completions = ask(
        *(
            request(f"Tell a story, number {i}.", adapter=adapters[n], max_tokens=16)
            for i, n in enumerate(names)
        )
    )
    for name, completion in list(zip(names, completions, strict=True))[:6]:
        assert distance(record(completion), reference, name) < 2 * NOISE  # few tokens


def test_one_training_step_is_seen_by_its_numbers(ask: Ask, lm: VLLMEngine, reference: Any) -> None:
    reference.add("step", 0.0, like="one", step=1e-5)
    step = reference.save("step", before="one")
    ask(request(adapter=reference.save("one")), request(adapter=step))
    assert lm.adapters[step.sha256] == DIFFERS_FROM_OTHERS


def test_an_adapter_that_changes_nothing_says_so(ask: Ask, lm: VLLMEngine, reference: Any) -> None:
    silent = reference.save("silent")
    ask(request(adapter=silent))
    assert lm.adapters[silent.sha256] == INDISTINGUISHABLE


def test_adapters_without_probe_change_the_base(ask: Ask, lm: VLLMEngine, reference: Any) -> None:
    plain = reference.save("one", before=None)
    ask(request(adapter=plain))
    assert lm.adapters[plain.sha256] == DIFFERS_FROM_OTHERS


@pytest.mark.parametrize(("name", "really"), [("two", "one"), ("two", "silent"), ("small", "one")])
def test_a_name_under_which_something_else_is_served_is_caught(
    ask: Ask, lm: VLLMEngine, reference: Any, name: str, really: str
) -> None:
    if name == "small":
        reference.add("small", 0.0, like="one", step=2e-5)
    old, new = (
        reference.save("one"),
        reference.save(name, before="one" if really == "one" else "silent"),
    )
    ask(request(adapter=old))
    wrong = reference.save(really)

    async def load(adapter: Adapter, path: str) -> None:
        assert lm._link is not None
        body = {"lora_name": adapter.sha256[:16], "lora_path": path}
        await lm._link.api.send("unload_lora_adapter", body, 60.0)
        assert (await lm._link.api.send("load_lora_adapter", body, 60.0)).status == 200

    lm_adapters = set(lm.adapters)
    asyncio.run(run_in_background(load(new, wrong.path)))
    with pytest.raises(AdapterNotServed):
        ask(request(adapter=new))
    assert new.sha256 not in lm.adapters
    assert set(lm.adapters) <= lm_adapters


def test_old_versions_are_unloaded(ask: Ask, lm: VLLMEngine, reference: Any) -> None:
    for name in ("one", "two", "silent"):
        ask(request(adapter=reference.save(name), max_tokens=1))
    assert len(lm.adapters) == 2


def test_an_adapter_of_too_high_rank_ends_the_run(ask: Ask, reference: Any, tmp_path: Path) -> None:
    folder = tmp_path / "big"
    shutil.copytree(reference.save("one").path, folder)
    config = (folder / "adapter_config.json").read_text()
    (folder / "adapter_config.json").write_text(config.replace('"r": 8', '"r": 32'))
    with pytest.raises(CompoundError, match="raise max_lora_rank"):
        ask(request(adapter=Adapter(str(folder), folder_digest(folder))))


def test_shared_beginnings_come_from_the_prefix_cache(ask: Ask, lm: VLLMEngine) -> None:
    shared = "The report says this, at length. " * 60
    ask(request(shared + "First?", max_tokens=1))
    before = lm.prefill
    ask(request(shared + "Second?", max_tokens=1))
    assert lm.prefill.cached - before.cached >= 256
    assert lm.prefill.tokens - before.tokens > lm.prefill.cached - before.cached


def test_a_server_with_a_dead_engine_restarts(ask: Ask, lm: VLLMEngine, reference: Any) -> None:
    """Last in this file: it costs another start."""
    adapter = reference.save("one")
    ask(request(adapter=adapter))
    assert lm._link is not None
    assert lm._link.server is not None
    guard = lm._link.server._guard.pid

    async def run() -> None:
        call = asyncio.create_task(lm.generate(request("Tell a long story.", max_tokens=1500)))
        await asyncio.sleep(2)
        os.kill(_descendants(guard)[-1], signal.SIGKILL)  # the worker, at the end of the line
        await call

    with pytest.raises(TransientError, match="ended during the call"):
        asyncio.run(run())
    assert _descendants(guard) == []
    assert distance(record(ask(request(adapter=adapter))[0]), reference, "one") < NOISE


def _descendants(pid: int) -> list[int]:
    """Return the processes below one, those of a line in its order."""
    found = []
    children = Path(f"/proc/{pid}/task/{pid}/children")
    for child in children.read_text().split() if children.exists() else []:
        found += [int(child), *_descendants(int(child))]
    return found


def test_a_server_enforces_the_format_of_an_answer(ask: Ask) -> None:
    schema = json.dumps(
        {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
            "required": ["name", "age"],
            "additionalProperties": False,
        }
    )
    wanted = {"want_tokens": False, "max_tokens": 96}
    person, label = ask(
        request("Invent a person.", format=AnswerFormat(schema=schema), **wanted),
        request("Is it so?", format=AnswerFormat(choices=("yes", "no")), cue="Answer:", **wanted),
    )
    assert json.loads(person.text).keys() == {"name", "age"}
    assert label.text.strip() in {"yes", "no"}
