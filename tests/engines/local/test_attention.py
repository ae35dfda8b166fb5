"""Grouped attention of single queries, compared with torch's own and through tiny models."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numerics import rounding

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from compound.engines.local import (  # noqa: E402
    decoding,
    kernels,
    loading,
)
from compound.engines.local.decoding import SamplingRow  # noqa: E402
from compound.engines.local.devices import Placement  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

MISTRAL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 63,
}


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the measurement say that it is faster, whatever this processor is."""
    monkeypatch.setattr(kernels, "clearly_faster", lambda: True)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of queries of each call of `attend`."""
    made: list[int] = []
    attend = kernels.attend

    def noted(query: Any, *rest: Any) -> Any:
        made.append(query.shape[2])
        return attend(query, *rest)

    monkeypatch.setattr(kernels, "attend", noted)
    return made


def tensors(rows: int, groups: int, each: int, queries: int, tokens: int) -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(queries * 1000 + tokens)
    shapes = [(groups * each, queries), (groups, tokens), (groups, tokens)]
    query, key, value = (torch.randn(rows, *shape, 8, generator=generator) for shape in shapes)
    return query, key, value


def mask_of(queries: int, tokens: int, padding: list[int], window: int) -> Any:
    """Return a causal mask with padding on the left and a sliding window."""
    own = torch.arange(tokens - queries, tokens)[:, None]
    keys = torch.arange(tokens)[None]
    causal = (keys <= own) & (keys > own - window)
    real = torch.stack([torch.arange(tokens) >= count for count in padding])
    return causal[None, None] & real[:, None, None]


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 3),
    groups=st.integers(1, 2),
    each=st.integers(1, 3),
    before=st.sampled_from([0, 1, 50, 200, 300]),
    window=st.sampled_from([5, 10_000]),
    data=st.data(),
)
def test_single_queries_get_what_torch_computes(
    rows: int, groups: int, each: int, before: int, window: int, data: Any
) -> None:
    tokens = before + 1
    padding = data.draw(st.lists(st.integers(0, tokens - 1), min_size=rows, max_size=rows))
    query, key, value = tensors(rows, groups, each, 1, tokens)
    mask = mask_of(1, tokens, padding, window)
    result = kernels.attend(query, key, value, mask, 0.3)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, scale=0.3, enable_gqa=True
    )
    assert torch.allclose(result, expected, atol=rounding(4.0, length=tokens, depth=2))


def bfloat16_model(window: int | None = None) -> Any:
    config = transformers.MistralConfig(**MISTRAL, sliding_window=window)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.MistralForCausalLM(config).to(torch.bfloat16).eval()


def decoded(model: Any, *, exact: bool = False) -> list[SamplingRow]:
    """Decode prompts with a shared prefix, long and short endings, and one without the prefix."""
    tokenizer: Any = SimpleNamespace(eos_token_id=63, decode=lambda *_, **__: "")
    decoder = decoding.Decoder(
        model, tokenizer, exact=exact, max_batch_tokens=10_000, max_adapters=2
    )
    draw = random.Random(0)
    begin = tuple(7 * i % 60 for i in range(60))
    endings = [tuple(draw.randrange(60) for _ in range(length)) for length in (5, 40, 41, 150)]
    prompts = [*(begin + end for end in endings), tuple(draw.randrange(60) for _ in range(90))]
    rows = [SamplingRow(prompt, 4, 1.0, (), seed, True) for seed, prompt in enumerate(prompts)]
    decoder.run(rows)
    return rows


@pytest.mark.parametrize("window", [None, 48])
def test_answers_are_those_of_the_fused_kernel_up_to_rounding(
    window: int | None, faster: None, calls: list[int]
) -> None:
    plain = bfloat16_model(window)
    rows = decoded(kernels.use_grouped_attention(bfloat16_model(window)))
    assert set(calls) == {1}
    for row in rows:
        with torch.inference_mode():
            logits = (
                plain(torch.tensor([row.prompt + tuple(row.sampled)]))
                .logits[0]
                .float()
                .log_softmax(-1)
            )
        expected = [float(logits[len(row.prompt) - 1 + i, t]) for i, t in enumerate(row.sampled)]
        assert row.logprobs == pytest.approx(
            expected, abs=rounding(4.0, dtype="bfloat16", depth=16)
        )


@pytest.mark.parametrize(
    "change",
    [{"position_bias": torch.zeros(1)}, {"softcap": 30.0}, {"s_aux": torch.zeros(4)}],
    ids=lambda change: next(iter(change)),
)
def test_attention_of_another_kind_uses_the_fused_kernel(
    change: dict[str, Any], calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.integrations import sdpa_attention

    monkeypatch.setattr(sdpa_attention, "sdpa_attention_forward", lambda *_, **__: ("fused", None))
    monkeypatch.setattr(kernels, "clearly_faster", lambda: True)
    query, key, value = (tensor.to(torch.bfloat16) for tensor in tensors(1, 2, 2, 1, 40))
    module = SimpleNamespace()
    with torch.inference_mode():
        assert kernels._forward(module, query, key, value, None, **change) == ("fused", None)
        assert not calls
        kernels._forward(module, query, key, value, None)
        assert calls == [1]


@pytest.mark.parametrize(
    ("placement", "used"),
    [
        (Placement(device="cpu", dtype="bfloat16"), True),
        (Placement(device="cpu", dtype="bfloat16", attn_implementation="sdpa"), False),
        (Placement(device="cpu", dtype="bfloat16", attn_implementation="eager"), False),
        (Placement(device="cpu", dtype="float32"), False),
    ],
    ids=str,
)
def test_only_the_default_attention_of_bfloat16_is_replaced(
    placement: Placement, used: bool, make_model: Any, tmp_path: Path, faster: None
) -> None:
    model, _ = loading.load(str(make_model(tmp_path)), placement)
    assert (model.config._attn_implementation == kernels.NAME) is used


def test_a_processor_where_it_is_not_faster_keeps_the_fused_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "clearly_faster", lambda: False)
    assert kernels.use_grouped_attention(bfloat16_model()).config._attn_implementation == "sdpa"
