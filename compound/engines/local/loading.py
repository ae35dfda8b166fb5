"""Loading of local models onto a device, their layer kinds, and the choice of number format.

The faster format on a CPU depends on the processor (bfloat16 is fast only with native
multiplication), so it is measured with a small matrix product.

Layer kinds determine whether states in a model's cache can be shared. Keys and values of attention
layers belong to single tokens: they can be repeated for several rows, truncated after any token,
and placed after padding. The state of a linear attention, convolution or state-space layer depends
on all tokens before it, and chunked attention counts chunks from the first token, so neither can be
shared.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import threading
import warnings
import weakref
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from compound.core.errors import CompoundError, MissingExtra
from compound.engines import model_folder, models
from compound.engines.local import devices
from compound.engines.local.devices import Placement

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


# the first import of transformers is not safe in several threads at once
_LOADING = threading.RLock()
# of which engines and trainers hold copies, by `base_key`
_BASES: weakref.WeakValueDictionary[object, PreTrainedModel] = weakref.WeakValueDictionary()
# of the measured product, which takes milliseconds in the slower format
PRODUCT_SHAPE = (256, 512, 1024)
# bfloat16 must take at most this fraction of float32's time: it takes 0.3 with AMX, and several
# times as long without native support.
CLEARLY_FASTER = 0.7


def dtype_of(placement: Placement) -> str:
    """Return the number format of a placement: its own, or the fastest one of its device."""
    if placement.dtype != "auto":
        return placement.dtype
    return fastest_dtype(devices.resolve_device(placement.device))


@functools.cache
def fastest_dtype(device: str = "auto") -> str:
    """Return the number format with faster matrix products: measured on a CPU, assumed on a GPU.

    On a GPU it is bfloat16 if supported, else float32. On a CPU bfloat16 must be clearly faster, so
    that all processes of a run choose the same format.
    """
    torch, device = devices.torch_module(), devices.resolve_device(device)
    if devices.device_type(device) != "cpu":
        return "bfloat16" if devices.supports_bfloat16(device) else "float32"
    seconds = _product_seconds(torch.float32, torch.bfloat16)
    return "bfloat16" if seconds[1] < CLEARLY_FASTER * seconds[0] else "float32"


def load(
    name: str, placement: Placement | str = "auto", chat_template: str = ""
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model for inference, and its tokenizer.

    Raises:
        ModelNotFound: the weights are not on this machine and cannot be downloaded.
        CompoundError: the model is not supported.
    """
    with _LOADING:
        how = Placement(dtype=placement) if isinstance(placement, str) else placement
        return _load(name, how, chat_template)


def load_base(
    folder: Path, placement: Placement
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the causal language model in a folder where a placement says; raises like `load_causal`."""
    from compound.engines.local.kernels import use_grouped_attention

    with models.hide_progress_bars():
        model, tokenizer = model_folder.load_causal(
            folder,
            dtype_of(placement),
            device=devices.resolve_device(placement.device),
            attention=placement.attn_implementation,
            quantization=placement.quantization,
        )
    if placement.attn_implementation == "auto":
        model = use_grouped_attention(model)
    return model, tokenizer


def load_shared(
    folder: Path, placement: Placement
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a frozen model as `load_base` does, with the weights of the same one in this process, if any.

    The model has modules of its own, to adapt or to pack. Another placement, or a folder whose
    files have changed, has its own weights; so have quantized models, whose layers keep states.
    """
    from compound.engines.local.kernels import pack, packable, shared_copy

    if (key := base_key(folder, placement)) is None:
        return load_base(folder, placement)
    with _LOADING:
        if (base := _BASES.get(key)) is not None:
            tokenizer = model_folder.load_tokenizer(folder)
        else:
            base, tokenizer = load_base(folder, placement)
            base = _BASES[key] = pack(base.requires_grad_(False), output=False)
            if packable(base):  # else other weights keep the file of the packed ones in memory
                for weight in base.parameters():
                    weight.data = weight.data.clone()
                release()
        model = shared_copy(base)
        model.shared_base = (base,)  # in memory as long as a copy; a tuple is no submodule
        return model, tokenizer


def base_key(folder: Path, placement: Placement) -> object:
    """Return what models that share weights have in common; ``None`` if their weights are not shared.

    Files are told apart by size and time: to read them would take as long as to load them.
    """
    if placement.quantization != "none":
        return None
    stats = ((str(path), path.stat()) for path in sorted(folder.resolve().rglob("*")))
    files = tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
    return resolved(placement), files


def resolved(placement: Placement) -> Placement:
    """Return a placement with the device and the number format that ``auto`` stands for."""
    device = devices.indexed_device(devices.resolve_device(placement.device))
    return replace(placement, device=device, dtype=dtype_of(placement))


def _load(
    name: str, placement: Placement, chat_template: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    devices.torch_module()
    try:
        import transformers  # noqa: F401 - to report here that it is missing
    except ImportError:
        raise MissingExtra(f"the model {name!r}", "transformers", "local") from None
    folder = models.resolve(name)
    try:
        model, tokenizer = load_shared(folder, placement)
    except (OSError, ValueError) as error:
        raise CompoundError(
            f"{folder} does not contain a causal language model that transformers can load: "
            f"{model_folder.explain(error)}",
            hint="the folder must contain config.json, *.safetensors and the tokenizer's files",
        ) from error
    if other := unshareable_kinds(model.config):
        raise CompoundError(
            f"{name!r} has layers other than full and sliding-window attention ({', '.join(other)}), whose "
            "states batches of prompts cannot share",
            hint="serve it with vLLM and name it vllm/MODEL or hosted_vllm/MODEL",
        )
    if chat_template:
        tokenizer.chat_template = chat_template
    if tokenizer.chat_template is None:
        raise CompoundError(
            f"{name!r} has no chat template",
            hint="use an instruction-tuned model, or set chat_template of an engine for it: "
            f"engines: {{NAME: {{transformers: {{model: {name}, chat_template: FILE.jinja}}}}}}",
        )
    from compound.engines.local.kernels import pack

    return pack(model.eval()), tokenizer


def chat_template(name: str) -> str:
    """Return the chat template of a model, or ``""`` if it has none; the weights are not loaded.

    Raises:
        ModelNotFound: the model is not on this machine and cannot be downloaded.
        CompoundError: the folder contains unsafe settings.
    """
    with _LOADING:
        template = model_folder.load_tokenizer(models.resolve(name)).chat_template
    return template if isinstance(template, str) else ""


def release() -> None:
    """Return freed memory to the system.

    glibc keeps memory in per-thread arenas, even after a thread has ended, so a process that loads
    one model after another would keep the working memory of each.
    """
    gc.collect()
    torch = devices.torch_module()
    for kind in ("cuda", "xpu", "mps"):
        if devices.device_count(kind):
            getattr(torch, kind).empty_cache()
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _product_seconds(*dtypes: torch.dtype) -> list[float]:
    """Return the shortest time of a matrix product in each format."""
    ones, matmul = devices.torch_module().ones, devices.torch_module().matmul
    rows, inner, columns = PRODUCT_SHAPE
    factors = ((ones(rows, inner, dtype=d), ones(inner, columns, dtype=d)) for d in dtypes)
    return devices.shortest_times(*(functools.partial(matmul, *pair) for pair in factors))


PER_TOKEN_KINDS = frozenset({"full_attention", "sliding_attention"})
STATELESS = frozenset({"moe", "mlp"})  # some model families list these as layers, too


def layer_kinds(config: PreTrainedConfig) -> frozenset[str]:
    """Return the kinds of layers with a state in the cache, as transformers names them."""
    config = config.get_text_config(decoder=True)
    named = getattr(config, "layer_types", None)
    if named:
        return frozenset(named) - STATELESS
    if getattr(config, "sliding_window", None) is not None:
        return frozenset({"sliding_attention"})
    if getattr(config, "attention_chunk_size", None) is not None:
        return frozenset({"chunked_attention"})
    return frozenset({"full_attention"})


def unshareable_kinds(config: PreTrainedConfig) -> list[str]:
    """Return the kinds of layers whose states prompts with a common prefix cannot share, sorted."""
    return sorted(layer_kinds(config) - PER_TOKEN_KINDS)


def checkpoint_layers(model: PreTrainedModel, name: str, setting: str) -> None:
    """Recompute the activations of each layer in the backward pass, also in evaluation mode.

    Raises:
        CompoundError: the model does not support it.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not model.supports_gradient_checkpointing or not layers:
        raise CompoundError(
            f"{name!r} does not support gradient checkpointing", hint=f"set {setting} to false"
        )
    with warnings.catch_warnings():  # transformers is renaming the method
        warnings.filterwarnings("ignore", "`(is_)?gradient_checkpointing", FutureWarning)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in layers:  # which read the flag; the dropout layers in them keep their own
        layer.training = True
