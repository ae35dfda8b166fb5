"""Models of several families: samples are packed only if that changes no gradient.

Tiny models with random weights, of each family that keeps something else of what it has read.
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from numerics import GRADIENTS, LOGPROBS

torch = pytest.importorskip("torch")
pytest.importorskip("peft")  # first: importing it replaces the module of transformers by another
transformers = pytest.importorskip("transformers")

from benchmarks.simulated.toy_model import make_toy_model  # noqa: E402
from compound.core.engine import TokenRecord  # noqa: E402
from compound.core.errors import CompoundError  # noqa: E402
from compound.engines.local import loading, prefill  # noqa: E402
from compound.engines.local.loading import layer_kinds, unshareable_kinds  # noqa: E402
from compound.engines.local.prefill import Prefill  # noqa: E402
from compound.graph.space import LoRA  # noqa: E402
from compound.optimizers.weights.learner import forward as forward_module  # noqa: E402
from compound.optimizers.weights.learner import packing  # noqa: E402
from compound.optimizers.weights.learner.adapters import Adapters, reason_unshared  # noqa: E402
from compound.optimizers.weights.learner.forward import forward  # noqa: E402
from compound.optimizers.weights.learner.samples import Sample  # noqa: E402
from training_settings import plain  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # of families, about kernels that are not installed
]

WINDOW = 16
COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
BOTH = {"layer_types": ["sliding_attention", "full_attention"]}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
MIXTURE = {"num_experts_per_tok": 1, "moe_intermediate_size": 16}

FULL: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "LlamaConfig", {"num_attention_heads": 4}),
    "qwen3": ("Qwen3", "Qwen3Config", {"head_dim": 16}),
}
WINDOWED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mistral": ("Mistral", "MistralConfig", {"sliding_window": WINDOW}),
    "qwen2": (
        "Qwen2",
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "gemma3": ("Gemma3", "Gemma3TextConfig", {"head_dim": 16, "sliding_window": WINDOW, **BOTH}),
}
OTHER: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3-next": (
        "Qwen3Next",
        "Qwen3NextConfig",
        {
            "head_dim": 16,
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "num_experts": 2,
            "shared_expert_intermediate_size": 16,
            **MIXTURE,
            **LINEAR,
        },
    ),
    "lfm2": ("Lfm2", "Lfm2Config", {"layer_types": ["conv", "full_attention"]}),
    "mamba2": (
        "Mamba2",
        "Mamba2Config",
        {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1},
    ),
    "llama4": (
        "Llama4",
        "Llama4TextConfig",
        {
            "intermediate_size_mlp": 48,
            "head_dim": 16,
            "attention_chunk_size": WINDOW,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "no_rope_layers": [1, 0],
            "layer_types": ["chunked_attention", "full_attention"],
        },
    ),
}


def make(family: str, config: str, settings: dict[str, Any]) -> Any:
    """Return a tiny random model of a family."""
    made = getattr(transformers, config)(**{**COMMON, **settings})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return getattr(transformers, f"{family}ForCausalLM")(made).eval()


def samples(prompts: Sequence[int], each: int = 4) -> list[Sample]:
    """Return samples of random tokens, in groups that share a prompt of a given length."""
    rng = random.Random(0)
    found = []
    for length in prompts:
        prompt = tuple(rng.randrange(5, 90) for _ in range(length))
        for number in range(each):
            sampled = tuple(rng.randrange(5, 90) for _ in range(2 + number))
            found.append(Sample("x", "e", "x", 0, TokenRecord(prompt, sampled, (), "stop"), 0.0))
    return found


def branching(rng: random.Random) -> list[Sample]:
    """Return samples in groups with a common instruction, conversations, equal and single samples."""

    def drawn(length: int) -> tuple[int, ...]:
        return tuple(rng.randrange(5, 90) for _ in range(length))

    def sample(prompt: tuple[int, ...], length: int) -> Sample:
        return Sample("x", "e", "x", 0, TokenRecord(prompt, drawn(length), (), "stop"), 0.0)

    instruction, found = drawn(25), []
    for _ in range(3):
        prompt = instruction + drawn(rng.randrange(1, 40))
        found += [sample(prompt, rng.randrange(1, 30)) for _ in range(4)]
    for _ in range(3):
        said = instruction
        for _ in range(3):
            found.append(sample(said, rng.randrange(1, 20)))
            said += found[-1].tokens.sampled + drawn(5)
    found += [sample(drawn(3), 1), sample(drawn(50), 2), found[0]]
    rng.shuffle(found)
    return found


def gradients(model: Any, some: Sequence[Sample], packed: bool) -> tuple[Any, dict[str, Any]]:
    model.zero_grad()
    ran = forward(model, some, packed=packed)
    (ran.logps * ran.mask * torch.arange(1, len(some) + 1)[:, None]).sum().backward()
    named = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return (ran.logps * ran.mask).detach(), named


def lengths_one_by_one(
    query: Any, key: Any, value: Any, ends: Any, key_ends: Any, longest: int, longest_key: int,
    *, scale: float, window_size: tuple[int, int], enable_gqa: bool,
) -> Any:  # fmt: skip
    """Compute `torch.nn.attention.varlen.varlen_attn`, which needs a GPU, for one sequence at a time."""
    results = []
    left, right = window_size
    assert (enable_gqa, right) == (True, 0)
    for (start, end), (key_start, key_end) in zip(
        itertools.pairwise(ends.tolist()), itertools.pairwise(key_ends.tolist()), strict=True
    ):
        length, keys = end - start, key_end - key_start
        assert length <= longest
        assert keys <= longest_key
        before = torch.arange(keys - length, keys)[:, None] - torch.arange(keys)
        mask = (before >= 0) & ((before <= left) if left >= 0 else True)
        rows = (query[start:end], key[key_start:key_end], value[key_start:key_end])
        found = torch.nn.functional.scaled_dot_product_attention(
            *(row.transpose(0, 1)[None] for row in rows), mask, scale=scale, enable_gqa=True
        )
        results.append(found[0].transpose(0, 1))
    return torch.cat(results)


def one_by_one(model: Any, some: Sequence[Sample]) -> Any:
    """Return log-probabilities by the model's own forward pass, one sample at a time."""
    rows = torch.zeros(len(some), max(s.length for s in some))
    for row, sample in zip(rows, some, strict=True):
        ids = torch.tensor([[*sample.tokens.prompt, *sample.tokens.sampled]])
        with torch.no_grad():
            said = (
                model(input_ids=ids).logits[0, len(sample.tokens.prompt) - 1 : -1].log_softmax(-1)
            )
        row[: sample.length] = said.gather(-1, torch.tensor(sample.tokens.sampled)[:, None])[:, 0]
    return rows


@pytest.mark.parametrize("how", ["by_blocks", "by_length"])
@pytest.mark.parametrize("family", [*FULL, *WINDOWED])
def test_packed_samples_have_the_log_probabilities_and_gradients_of_separate_ones(
    family: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr(varlen, "varlen_attn", lengths_one_by_one)
    called: list[int] = []
    attention = getattr(packing, how)

    def noted(*given: Any) -> Any:
        called.append(1)
        return attention(*given)

    monkeypatch.setattr(packing, "by_blocks", noted)  # on a CPU
    model, some = make(*{**FULL, **WINDOWED}[family]), branching(random.Random(0))
    assert ("sliding_attention" in layer_kinds(model.config)) == (family in WINDOWED)
    separate, expected = gradients(model, some, False)
    assert not called
    logps, found = gradients(model, some, True)
    assert len(called) == model.config.num_hidden_layers
    assert float((logps - separate).abs().max()) <= LOGPROBS
    assert float((separate - one_by_one(model, some)).abs().max()) <= LOGPROBS
    most = max(float(gradient.abs().max()) for gradient in expected.values())
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert float((gradient - expected[name]).abs().max()) <= GRADIENTS * most, name


@pytest.mark.parametrize("family", OTHER)
def test_models_with_other_layers_are_not_packed(family: str) -> None:
    model, some = make(*OTHER[family]), samples((40, 23))
    kinds = unshareable_kinds(model.config)
    assert kinds
    found, _ = gradients(model, some, False)
    assert float((found - one_by_one(model, some)).abs().max()) <= LOGPROBS
    tokenizer: Any = None  # kinds decide before any text is read
    assert reason_unshared(model, tokenizer) == f"the model has layers of {', '.join(kinds)}"


def test_another_attention_is_not_packed() -> None:
    model, tokenizer = make(*FULL["llama"]), None
    model.set_attn_implementation("eager")
    assert reason_unshared(model, tokenizer) == "the attention of the model is 'eager'"


def test_a_packed_attention_with_other_terms_is_refused() -> None:
    model = make(*FULL["llama"])
    packing.use_packed_attention(model)
    states = torch.zeros(1, 2, 3, 8)
    attend = transformers.AttentionInterface()[model.config._attn_implementation]
    pack = packing.Pack([(1, 2, 3)], model.device)
    for term in ({"softcap": 30.0}, {"s_aux": torch.zeros(2)}, {"dropout": 0.1}):
        with pytest.raises(ValueError, match="attention with dropout"):
            attend(model, states, states, states, None, pack=pack, **term)


def test_a_model_with_other_results_for_packed_samples_processes_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packing is tried once before training, regardless of the model's configuration."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = make_toy_model(tmp_path)
    assert Adapters(str(folder), {"x": LoRA(rank=2)}, dtype="float32").unshared == ""
    attention = packing.by_blocks
    monkeypatch.setattr(packing, "by_blocks", lambda *given: 0.5 * attention(*given))
    adapters = Adapters(str(folder), {"x": LoRA(rank=2)}, dtype="float32")
    assert "log-probabilities of packed samples differ" in adapters.unshared
    asked = []

    def noted(model: Any, batch: Any, **how: Any) -> Any:
        asked.append(how["packed"])
        return forward(model, batch, **how)

    monkeypatch.setattr(forward_module, "forward", noted)
    trainer = plain().trainer(adapters, {"x": "x"})
    rng = random.Random(0)
    prompt = tuple(rng.randrange(24) for _ in range(30))
    some = [
        Sample(
            "x", "e", "x", 0, TokenRecord(prompt, (1, 2), (-1.0, -1.0), "stop"), 0.0
        ).with_advantage(a)
        for a in (1.0, -1.0, 0.5, -0.5)
    ]
    assert trainer.step(some, 0)["unshared"] == adapters.unshared
    assert asked == [False]


def test_a_model_that_refuses_packed_samples_processes_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(*_: Any) -> Any:
        raise NotImplementedError("another attention")

    monkeypatch.setattr(packing, "by_blocks", refuses)
    model = make(*WINDOWED["mistral"])
    tokenizer: Any = lambda *_, **__: SimpleNamespace(input_ids=list(range(20)))  # noqa: E731
    assert reason_unshared(model, tokenizer) == (
        "the model does not support packed samples (NotImplementedError: another attention)"
    )


def decoded(model: Any, reader: Prefill, prompts: Sequence[tuple[int, ...]]) -> list[Any]:
    """Return the log-probabilities of the token after each prompt, computed with the sampler's prefill."""
    with torch.inference_mode():
        order, cache, mask = reader.read(prompts)
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        last = torch.tensor([[prompts[i][-1]] for i in order])
        places = (mask.cumsum(-1) - 1)[:, -1:]
        out = model(input_ids=last, attention_mask=mask, position_ids=places, past_key_values=cache)
    found: list[Any] = [None] * len(prompts)
    for row, i in enumerate(order):
        found[i] = out.logits[row, -1].log_softmax(-1)
    return found


@pytest.mark.parametrize("family", WINDOWED)
def test_the_sampler_shares_prefixes_longer_than_a_sliding_window(family: str) -> None:
    model, rng = make(*WINDOWED[family]), random.Random(0)
    beginning = tuple(rng.randrange(5, 90) for _ in range(3 * WINDOW))
    assert len(beginning) > prefill.MIN_PREFIX
    prompts = [(*beginning, *(rng.randrange(5, 90) for _ in range(n))) for n in (2, 9, 5, 30)]
    prompts.append(tuple(rng.randrange(5, 90) for _ in range(7)))
    reader = Prefill(model, capacity=4096)
    for prompt, found in zip(prompts, decoded(model, reader, prompts), strict=True):
        with torch.inference_mode():
            expected = model(input_ids=torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        assert float((found - expected).abs().max()) <= LOGPROBS
    assert reader.counts.cached > 0, "a beginning was shared"


@pytest.mark.parametrize("family", OTHER)
def test_the_sampler_refuses_models_with_other_layers_and_names_them(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_model: Callable[..., Path]
) -> None:
    make_model(tmp_path)  # for its tokenizer
    model = make(*OTHER[family])
    auto = SimpleNamespace(from_pretrained=lambda *_, **__: model)
    monkeypatch.setattr(transformers, "AutoModelForCausalLM", auto)
    with pytest.raises(CompoundError, match="layers other than full and sliding-window") as caught:
        loading.load(str(tmp_path), "float32")
    for kind in unshareable_kinds(model.config):
        assert kind in str(caught.value)
