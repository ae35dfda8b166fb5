"""Devices, number formats, attention kernels and quantization are checked before a model is loaded."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from compound.core.errors import CompoundError, DeclarationError, MissingExtra  # noqa: E402
from compound.engines.local import devices, footprint, loading  # noqa: E402
from compound.engines.local.devices import Placement  # noqa: E402
from compound.engines.local.engine import TransformersEngine  # noqa: E402

WHERE = "optimize.mmgrpo.base"


class Device:
    """A context that replaces `torch.cuda.device`."""

    def __init__(self, _: object) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two CUDA devices without bfloat16."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("name", ["cuda", "cuda:1", "xpu", "mps"])
def test_a_device_that_does_not_exist_is_refused_with_the_setting(name: str) -> None:
    with pytest.raises(DeclarationError) as raised:
        Placement(name).check(WHERE)
    assert f"{WHERE}.device is {name}, but PyTorch finds no" in raised.value.message
    assert f"set {WHERE}.device to auto or cpu" in raised.value.hint


@pytest.mark.usefixtures("no_gpu")
def test_the_engine_is_refused_when_it_is_declared() -> None:
    with pytest.raises(DeclarationError) as raised:
        TransformersEngine("smollm2", device="cuda")
    assert raised.value.message == (
        "engine 'smollm2': transformers.device is cuda, but PyTorch finds no CUDA device"
    )
    assert raised.value.hint.startswith("set transformers.device to auto or cpu")


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cpu:0", "", "auto:1"])
def test_a_name_that_is_no_device_is_refused(name: str) -> None:
    with pytest.raises(DeclarationError, match="device"):
        TransformersEngine("smollm2", device=name)


@pytest.mark.usefixtures("cuda")
def test_an_index_beyond_the_devices_lists_them() -> None:
    Placement("cuda:1").check(WHERE)
    with pytest.raises(DeclarationError, match="finds 2 CUDA devices: cuda:0, cuda:1"):
        Placement("cuda:2").check(WHERE)


@pytest.mark.usefixtures("cuda")
def test_bfloat16_is_refused_where_it_is_not_supported_and_auto_avoids_it() -> None:
    with pytest.raises(DeclarationError, match="bfloat16, which cuda does not support"):
        Placement("cuda", "bfloat16").check(WHERE)
    with pytest.raises(DeclarationError, match="bfloat16, which cuda does not support"):
        Placement(dtype="bfloat16").check(WHERE)  # `auto` is CUDA here
    assert loading.fastest_dtype.__wrapped__("cuda") == "float32"


@pytest.mark.usefixtures("cuda")
def test_a_gpu_with_bfloat16_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    assert devices.resolve_device() == "cuda"
    assert loading.fastest_dtype.__wrapped__("auto") == "bfloat16"
    Placement("cuda:0", "bfloat16").check(WHERE)


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_a_device_without_index_is_the_current(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(getattr(torch, kind), "current_device", lambda: 1)
    assert devices.indexed_device(kind) == f"{kind}:1"
    assert devices.indexed_device(f"{kind}:0") == f"{kind}:0"
    assert devices.indexed_device("mps") == "mps"


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_auto_is_the_cpu_which_supports_all_formats() -> None:
    assert devices.resolve_device() == "cpu"
    for dtype in ("float32", "bfloat16", "float16"):
        Placement(dtype=dtype).check(WHERE)


def test_mps_supports_bfloat16_from_macos_14_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    for newer in (True, False):
        monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda *_, newer=newer: newer)
        assert devices.supports_bfloat16("mps") == newer
    assert devices.resolve_device("mps") == "mps"


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("placement", "setting"),
    [
        (Placement(attn_implementation="flash_attention_2"), "attn_implementation to sdpa"),
        (Placement(quantization="4bit"), "quantization to none"),
        (Placement("cpu", quantization="8bit"), "quantization to none"),
    ],
)
def test_what_needs_cuda_is_refused_without_it(placement: Placement, setting: str) -> None:
    with pytest.raises(DeclarationError, match="needs a CUDA device, but .* is cpu") as raised:
        placement.check(WHERE)
    assert f"set {WHERE}.{setting}" in raised.value.hint


@pytest.mark.usefixtures("cuda")
def test_missing_libraries_are_named_with_their_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingExtra, match=r"pip install .*\[quantized\]"):
        Placement("cuda", quantization="4bit").check(WHERE)
    with pytest.raises(DeclarationError, match="flash-attn is not installed"):
        Placement("cuda", attn_implementation="flash_attention_2").check(WHERE)
    with pytest.raises(DeclarationError, match="does not support float32"):
        Placement("cuda", "float32", "flash_attention_2").check(WHERE)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: SimpleNamespace())
    Placement("cuda", "float16", "flash_attention_2", "8bit").check(WHERE)


def test_quantization_passes_its_settings_to_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    from compound.engines import model_folder

    found: dict[str, Any] = {}

    def load(folder: Path, **given: Any) -> Any:
        found.update(given)
        return SimpleNamespace(to=lambda *_: pytest.fail("a quantized model cannot be moved"))

    monkeypatch.setattr(model_folder, "load_tokenizer", lambda _: None)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load)
    monkeypatch.setattr(
        transformers, "BitsAndBytesConfig", lambda **given: given
    )  # the class itself needs bitsandbytes
    how = {"device": "cuda:1", "attention": "sdpa"}
    model_folder.load_causal(Path("m"), "bfloat16", quantization="4bit", **how)
    assert found["quantization_config"] == {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_compute_dtype": torch.bfloat16,
    }
    assert (found["device_map"], found["attn_implementation"]) == ({"": "cuda:1"}, "sdpa")
    model_folder.load_causal(Path("m"), "bfloat16", quantization="8bit", **how)
    assert found["quantization_config"] == {"load_in_8bit": True}


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("[enforce fail] not enough memory: you tried to allocate"), True),
        (MemoryError(), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (CompoundError("the memory of the run"), False),
    ],
)
def test_errors_of_every_allocator_are_recognized(error: Exception, expected: bool) -> None:
    assert devices.is_out_of_memory(error) == expected
    with (
        pytest.raises(CompoundError if expected else type(error)) as raised,
        devices.naming_settings("a training step", "lower micro_tokens"),
    ):
        raise error
    assert ("lower micro_tokens" in str(raised.value)) == expected


def test_memory_of_the_cpu_respects_the_limit_of_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(footprint, "CGROUP", tmp_path)
    unlimited = footprint.free_memory("cpu")
    assert unlimited is not None
    assert unlimited > 2**20
    (tmp_path / "memory.max").write_text(f"{3 * 2**20}\n")
    (tmp_path / "memory.stat").write_text(f"anon {2**20}\nfile {2**21}\n")
    assert footprint.free_memory("cpu") == 2 * 2**20
    (tmp_path / "memory.max").write_text("max\n")
    assert footprint.free_memory("cpu") != 2 * 2**20
