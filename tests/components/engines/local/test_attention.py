"""Attention of prompts by blocks, compared with torch's own and through tiny models."""

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

from compound.components.engines.local import decoding, loading  # noqa: E402
from compound.components.engines.local.devices import Placement  # noqa: E402
from compound.components.engines.local.kernels import attention  # noqa: E402
from compound.components.engines.local.sampling import Row  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

MISTRAL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": 63,
}  # fmt: skip


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the measurement say that blocks are faster, whatever this processor is."""
    monkeypatch.setattr(attention, "clearly_faster", lambda _: True)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of queries of each call of `attend`."""
    made: list[int] = []
    attend = attention.attend

    def noted(query: Any, *rest: Any) -> Any:
        made.append(query.shape[2])
        return attend(query, *rest)

    monkeypatch.setattr(attention, "attend", noted)
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
    queries=st.sampled_from([1, 31, 128, 129, 300]),
    before=st.sampled_from([0, 1, 50, 200]),
    window=st.sampled_from([5, 10_000]),
    data=st.data(),
)
def test_blocks_compute_what_torch_computes(
    rows: int, groups: int, each: int, queries: int, before: int, window: int, data: Any
) -> None:
    tokens = before + queries
    padding = data.draw(st.lists(st.integers(0, tokens - 1), min_size=rows, max_size=rows))
    query, key, value = tensors(rows, groups, each, queries, tokens)
    mask = mask_of(queries, tokens, padding, window)
    result = attention.attend(query, key, value, mask, 0.3)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, scale=0.3, enable_gqa=True
    )
    expected = expected.masked_fill(~mask.any(-1)[..., None], 0.0)  # a padding token attends to nothing
    assert torch.allclose(result, expected, atol=rounding(4.0, length=tokens, depth=2))


@pytest.mark.parametrize(("queries", "tokens"), [(1, 1), (129, 129), (40, 400), (300, 301)])
def test_without_a_mask_attention_is_causal(queries: int, tokens: int) -> None:
    query, key, value = tensors(2, 2, 2, queries, tokens)
    causal = mask_of(queries, tokens, [0, 0], 10_000)
    masked = attention.attend(query, key, value, causal, 0.3)
    assert torch.allclose(attention.attend(query, key, value, None, 0.3), masked, atol=rounding(4.0, depth=2))


def test_bfloat16_is_as_accurate_as_eager_attention() -> None:
    query, key, value = (tensor.to(torch.bfloat16) for tensor in tensors(2, 2, 2, 300, 400))
    mask = mask_of(300, 400, [0, 0], 10_000)
    exact = torch.nn.functional.scaled_dot_product_attention(
        query.double(), key.double(), value.double(), mask, enable_gqa=True
    )
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        eager = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
    blocks = attention.attend(query, key, value, mask, 8**-0.5)
    errors = [float((result - exact).pow(2).mean().sqrt()) for result in (blocks, eager)]
    assert errors[0] < 4 * errors[1] + 1e-4
    assert errors[0] < rounding(dtype="bfloat16", depth=2)


@pytest.mark.parametrize("queries", attention.SIZES)
def test_the_measurement_runs(queries: int) -> None:
    assert attention.clearly_faster.__wrapped__(queries) in (True, False)


def bfloat16_model(window: int | None = None) -> Any:
    config = transformers.MistralConfig(**MISTRAL, sliding_window=window)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.MistralForCausalLM(config).to(torch.bfloat16).eval()


def decoded(model: Any, *, exact: bool = False) -> list[Row]:
    """Decode prompts with a shared prefix, long and short endings, and one without the prefix."""
    tokenizer: Any = SimpleNamespace(eos_token_id=63, decode=lambda *_, **__: "")
    decoder = decoding.Decoder(model, tokenizer, exact=exact, max_batch_tokens=10_000, max_adapters=2)
    draw = random.Random(0)
    begin = tuple(7 * i % 60 for i in range(60))
    endings = [tuple(draw.randrange(60) for _ in range(length)) for length in (5, 40, 41, 150)]
    prompts = [*(begin + end for end in endings), tuple(draw.randrange(60) for _ in range(90))]
    rows = [Row(prompt, 4, 1.0, (), seed, True) for seed, prompt in enumerate(prompts)]
    decoder.run(rows)
    return rows


@pytest.mark.parametrize("window", [None, 48])
def test_answers_are_those_of_the_fused_kernel_up_to_rounding(
    window: int | None, faster: None, calls: list[int]
) -> None:
    plain = bfloat16_model(window)
    blocks = attention.use_blocks(bfloat16_model(window))
    rows = decoded(blocks)
    assert max(calls) >= 90
    assert min(calls) == 1
    for row in rows:
        with torch.inference_mode():
            logits = plain(torch.tensor([row.prompt + tuple(row.sampled)])).logits[0].float().log_softmax(-1)
        expected = [float(logits[len(row.prompt) - 1 + i, token]) for i, token in enumerate(row.sampled)]
        assert row.logprobs == pytest.approx(expected, abs=rounding(4.0, dtype="bfloat16", depth=16))


def test_deterministic_rows_are_bit_identical_in_any_batch(faster: None, calls: list[int]) -> None:
    model = attention.use_blocks(bfloat16_model())
    tokenizer: Any = SimpleNamespace(eos_token_id=63, decode=lambda *_, **__: "")
    decoder = decoding.Decoder(model, tokenizer, exact=True, max_batch_tokens=10_000, max_adapters=2)
    draw = random.Random(0)
    prompts = [tuple(draw.randrange(60) for _ in range(150 + i)) for i in range(8)]

    def answers(chosen: list[int]) -> dict[int, tuple[Any, ...]]:
        rows = [Row(prompts[i], 4, 1.0, (), i, True) for i in chosen]
        decoder.run(rows)
        return {i: (tuple(row.sampled), tuple(row.logprobs)) for i, row in zip(chosen, rows, strict=True)}

    together = answers(list(range(8)))
    assert calls
    for i in range(8):
        assert answers([i])[i] == together[i]
    assert answers(list(range(7, -1, -1))) == together


@pytest.mark.parametrize(
    "change",
    [
        {"is_causal": False},
        {"position_bias": torch.zeros(1)},
        {"softcap": 30.0},
        {"s_aux": torch.zeros(4)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_attention_of_another_kind_uses_the_fused_kernel(
    change: dict[str, Any], calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.integrations import sdpa_attention

    monkeypatch.setattr(sdpa_attention, "sdpa_attention_forward", lambda *_, **__: ("fused", None))
    monkeypatch.setattr(attention, "clearly_faster", lambda _: True)
    query, key, value = (tensor.to(torch.bfloat16) for tensor in tensors(1, 2, 2, 40, 40))
    module = SimpleNamespace(is_causal=True)
    with torch.inference_mode():
        assert attention._forward(module, query, key, value, None, **change) == ("fused", None)
        assert not calls
        attention._forward(module, query, key, value, None)
        assert calls == [40]
        module.is_causal = False
        assert attention._forward(module, query, key, value, None) == ("fused", None)


def test_tensors_that_blocks_do_not_support_use_the_fused_kernel() -> None:
    query, key, value = (tensor.to(torch.bfloat16) for tensor in tensors(1, 2, 2, 40, 60))
    mask = mask_of(40, 60, [0], 100)
    assert attention._suitable(query, key, value, mask)
    assert not attention._suitable(query, key, value, None)  # torch's meaning of causal differs then
    assert not attention._suitable(query, key, value, mask.to(torch.bfloat16))
    assert not attention._suitable(query, key, value, mask.expand(1, 4, 40, 60))
    assert not attention._suitable(query, key, value[..., :4], mask)
    assert attention._suitable(query[:, :, :1], key, value, None)
    assert not attention._suitable(query.float(), key.float(), value.float(), mask)


@pytest.mark.parametrize("padding", [None, [0, 4]], ids=["causal", "padded"])
def test_gradients_are_those_of_finite_differences(padding: list[int] | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "BLOCK", 3)
        inputs = [tensor.double().requires_grad_() for tensor in tensors(2, 2, 2, 7, 9)]
        mask = None if padding is None else mask_of(7, 9, padding, 5)
        assert torch.autograd.gradcheck(attention.attend, (*inputs, mask, 0.3))


@pytest.mark.parametrize("queries", [1, 150, 300])
def test_gradients_in_bfloat16_are_as_accurate_as_the_fused_kernels(queries: int) -> None:
    inputs = [tensor.to(torch.bfloat16).requires_grad_() for tensor in tensors(2, 2, 2, queries, 300)]
    mask = mask_of(queries, 300, [0, 40], 10_000)
    outer = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)

    outer = outer.masked_fill(~mask.any(-1)[..., None], 0.0)

    def fused(*states: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(*states, mask, scale=0.3, enable_gqa=True)

    def blocks(query: Any, key: Any, value: Any) -> Any:
        return attention.attend(query, key, value, mask, 0.3)

    exact = torch.autograd.grad(fused(*(tensor.double() for tensor in inputs)), inputs, outer.double())
    for ours, theirs, right in zip(
        torch.autograd.grad(blocks(*inputs), inputs, outer),
        torch.autograd.grad(fused(*inputs), inputs, outer),
        exact,
        strict=True,
    ):
        errors = [float((found.double() - right).norm() / right.norm()) for found in (ours, theirs)]
        assert errors[0] < max(4 * errors[1], rounding(dtype="bfloat16", depth=1))


def test_training_uses_blocks(faster: None, calls: list[int]) -> None:
    gradients = []
    for model in (bfloat16_model(), attention.use_blocks(bfloat16_model())):
        model(torch.tensor([[7 * i % 60 for i in range(150)]])).logits.float().logsumexp(-1).sum().backward()
        gradients.append(model.model.layers[0].self_attn.q_proj.weight.grad.double())
    assert calls == [150, 150]
    assert gradients[0].norm() > 0
    difference = (gradients[1] - gradients[0]).norm() / gradients[0].norm()
    assert difference < rounding(dtype="bfloat16", depth=16)


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
    assert (model.config._attn_implementation == attention.NAME) is used


@pytest.mark.parametrize("faster_at", attention.SIZES)
def test_blocks_serve_only_the_sizes_for_which_they_are_faster(
    faster_at: int, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "clearly_faster", lambda queries: queries == faster_at)
    decoded(attention.use_blocks(bfloat16_model()))
    assert {min(calls) == 1, max(calls) == 1} == {faster_at == 1}


def test_a_processor_where_blocks_are_not_faster_keeps_the_fused_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "clearly_faster", lambda _: False)
    assert attention.use_blocks(bfloat16_model()).config._attn_implementation == "sdpa"
