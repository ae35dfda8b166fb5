"""A base model in one process is in memory once, and sharing it changes no bit of samples and updates."""

from __future__ import annotations

import gc
import os
import shutil
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("one_thread")

import compound as cp  # noqa: E402
from compound.core.engine import Completion, Message, Request  # noqa: E402
from compound.engines.local import kernels, loading  # noqa: E402
from compound.engines.local.devices import Placement  # noqa: E402
from compound.engines.local.engine import TransformersEngine  # noqa: E402
from compound.optimizers.weights.distributed.learner import open_trainer  # noqa: E402
from compound.optimizers.weights.learner.adapters import Adapters  # noqa: E402
from compound.optimizers.weights.learner.trainer import Trainer  # noqa: E402
from trainings.learners import declared, drawn  # noqa: E402

ASK = Request(
    (Message("user", "Fact: red Say:"),), max_tokens=6, temperature=1.0, seed=3, want_tokens=True
)
CPU = Placement("cpu", "float32")


@pytest.fixture(autouse=True)
def _nothing_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_BASES", weakref.WeakValueDictionary())


def opened(folder: Path, dtype: str = "float32", **given: Any) -> Trainer:
    placement = Placement("cpu", dtype)
    return open_trainer(
        declared(folder, ("x",), **given).model_copy(update={"placement": placement})
    )


async def answer(folder: Path, dtype: Any) -> tuple[TransformersEngine, Completion]:
    engine = TransformersEngine(str(folder), dtype=dtype, device="cpu")
    return engine, await engine.generate(ASK)


def storages(model: Any) -> set[int]:
    """Return the addresses of all weights of a model."""
    packed = [id(m.packed) for m in model.modules() if isinstance(m, kernels.PackedLinear)]
    tensors = [p.untyped_storage().data_ptr() for p in model.parameters() if not p.requires_grad]
    return {*tensors, *packed}


@pytest.mark.parametrize("first", ["engine", "trainer"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("packs", [True, False])
async def test_engine_and_trainer_share_weights_and_compute_what_they_do_alone(
    toy_model: Path, dtype: Any, first: str, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not packs:  # as on a GPU
        monkeypatch.setattr(kernels, "packable", lambda _: False)
    samples = drawn(("x",))
    with monkeypatch.context() as patch:
        patch.setattr(loading, "base_key", lambda *_: object())  # equal to no other
        engine, expected = await answer(toy_model, dtype)
        alone = opened(toy_model, dtype, beta=0.1)
        facts = alone.step(samples, 0)
        assert storages(engine._decoder._model).isdisjoint(storages(alone.adapters.base))  # type: ignore[union-attr]
    if first == "trainer":
        trainer = opened(toy_model, dtype, beta=0.1)
        engine, found = await answer(toy_model, dtype)
    else:
        engine, found = await answer(toy_model, dtype)
        trainer = opened(toy_model, dtype, beta=0.1)
    own = {trainer.adapters.base.lm_head.weight.data_ptr()} if packs else set()
    assert storages(trainer.adapters.base) - own <= storages(engine._decoder._model)  # type: ignore[union-attr]
    again = trainer.step(samples, 0)
    assert found == expected == await engine.generate(ASK)
    assert trainer.adapters._serialized("x") == alone.adapters._serialized("x")
    assert {**again, "train_seconds": 0} == {**facts, "train_seconds": 0}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_packed_layer_has_the_gradient_of_a_linear_layer(dtype: str, bias: bool) -> None:
    kind = getattr(torch, dtype)
    if dtype == "bfloat16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor has no kernel for packed bfloat16 weights")
    torch.manual_seed(0)
    plain = torch.nn.Linear(33, 50, bias=bias, dtype=kind).requires_grad_(False)
    layer = kernels.PackedLinear(plain)
    assert torch.equal(layer.weight, plain.weight)
    states = torch.randn(3, 7, 33, dtype=kind)
    upstream = torch.randn(3, 7, 50, dtype=kind)
    hooked: list[int] = []
    layer.register_forward_hook(lambda *_: hooked.append(1))

    def trained(module: Callable[[Any], Any]) -> Any:
        own = states.clone().requires_grad_()
        out = module(own)
        out.backward(upstream)
        return out, own.grad

    (out, gradient), (expected, wanted) = trained(layer), trained(plain)
    assert hooked == [1]
    assert torch.equal(gradient, wanted)
    assert torch.equal(out, layer(states))  # as in a sampler
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapted_layers_have_the_outputs_and_gradients_of_peft(
    toy_model: Path, dtype: Any, packs: bool
) -> None:
    load = loading.load_shared if packs else loading.load_base
    ours = Adapters(str(toy_model), {"x": cp.LoRA(4), "y": cp.LoRA(2)}, dtype=dtype, load=load)
    torch.manual_seed(0)
    for name in ("x", "y"):
        for _, weight in ours.parameters(name):
            weight.data.normal_(std=0.1)
    layer = ours.base.model.layers[0].self_attn.q_proj
    states = torch.randn(2, 5, layer.in_features).to(ours.base.dtype)
    upstream = torch.randn(2, 5, layer.out_features).to(ours.base.dtype)

    def trained(forward: Callable[[Any], Any], *, below: bool) -> list[Any]:
        own = states.clone().requires_grad_(below)
        for _, weight in ours.parameters("y"):
            weight.grad = None
        out = forward(own)
        out.backward(upstream)
        return [out, own.grad, layer.lora_A["a1"].weight.grad, layer.lora_B["a1"].weight.grad]

    tolerance = {"float32": 1e-5, "bfloat16": 0.05}[dtype]
    with ours.using("y"):
        for below in (True, False):
            found = trained(layer, below=below)
            expected = trained(partial(type(layer).forward, layer), below=below)
            torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    with ours.using(None):
        assert torch.equal(layer(states), layer.base_layer(states))


def test_output_layers_of_trainers_are_not_packed(toy_model: Path, tmp_path: Path) -> None:
    import transformers

    config = transformers.LlamaConfig.from_pretrained(toy_model, tie_word_embeddings=True)
    shutil.copytree(toy_model, tmp_path / "tied")
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "tied")
    trainer = opened(tmp_path / "tied")
    engine, _ = loading.load(str(tmp_path / "tied"), CPU)
    base = trainer.adapters.base
    assert base.lm_head.weight.data_ptr() == base.get_input_embeddings().weight.data_ptr()
    assert type(engine.lm_head) is kernels.PackedLinear


def test_other_formats_kernels_and_files_have_weights_of_their_own(
    toy_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(toy_model, folder)
    first, _ = loading.load_shared(folder, CPU)

    def address(placement: Placement = CPU) -> int:
        model, _ = loading.load_shared(folder, placement)
        return int(model.get_input_embeddings().weight.data_ptr())

    own = first.get_input_embeddings().weight.data_ptr()
    assert address() == own
    assert own not in {
        address(Placement("cpu", "bfloat16")),
        address(Placement("cpu", "float32", attn_implementation="eager")),
    }
    assert loading.base_key(folder, Placement("cpu", "bfloat16", quantization="4bit")) is None
    os.utime(folder / "model.safetensors", (1, 1))
    assert address() != own


def test_copies_are_adapted_apart_and_the_last_one_frees_the_weights(toy_model: Path) -> None:
    one, _ = loading.load_shared(toy_model, CPU)
    other, _ = loading.load_shared(toy_model, CPU)
    weights = weakref.ref(one.shared_base[0])
    loading.checkpoint_layers(one, "one", "setting")
    one.set_attn_implementation("eager")
    assert other.config._attn_implementation == "sdpa"
    assert not any(getattr(m, "gradient_checkpointing", False) for m in other.modules())
    del one
    gc.collect()
    assert weights() is not None
    del other
    gc.collect()
    assert weights() is None


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_training_run_reaches_the_weights_of_one_with_two_bases(
    toy_model: Path, tmp_path: Path, max_staleness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(name: str) -> set[str]:
        llm = cp.LLM(
            "answerer", prompt="Say:", output={"answer": str}, max_tokens=4, weights=cp.LoRA(rank=2)
        )
        outputs = {"answer": llm(question=cp.Input("question", str))}
        rows = [
            {"question": word, "answer": word} for word in ("red", "blue", "green", "gold") * 16
        ]
        cp.optimize(
            cp.System("one", outputs=outputs, lm="toy"),
            {"train": rows[:16], "valid": rows[16:56], "test": rows[56:]},
            lambda outputs, example: float(len(outputs["answer"]) % 5),
            method="mmgrpo",
            budget=400,
            run_dir=tmp_path / name,
            engines={
                "toy": TransformersEngine(str(toy_model), dtype="float32", deterministic=True)
            },
            mmgrpo={
                "steps": 2,
                "rollouts": {"examples": 4, "runs": 4, "max_staleness": max_staleness},
                "loss": {"grpo": {"beta": 0.1}},
            },
        )
        folder = tmp_path / name / "memory"
        stored = {path.name for path in folder.glob("answerer-*")}  # names hold digests
        assert stored
        return stored

    shared = trained("shared")
    monkeypatch.setattr(loading, "base_key", lambda *_: object())  # equal to no other
    assert trained("own") == shared
