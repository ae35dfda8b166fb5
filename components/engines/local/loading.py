"""Loading of local models, with the choice of device and number format.

The faster format on a CPU depends on the processor (bfloat16 is fast only with native multiplication), so it
is measured with a small matrix product.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import threading
import time
from types import ModuleType
from typing import TYPE_CHECKING

from compound.components.engines import model_folder, models
from compound.components.engines.local.layers import unshareable_kinds
from compound.errors import CompoundError, MissingExtra

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


_LOADING = threading.Lock()  # the first import of transformers is not safe in several threads at once
PRODUCT_SHAPE = (256, 512, 1024)  # of the measured product, which takes milliseconds in the slower format


def device() -> str:
    """Return ``cuda`` if available, else ``cpu``."""
    return "cuda" if _torch().cuda.is_available() else "cpu"


# bfloat16 must take at most this fraction of float32's time: it takes 0.3 with AMX, and several times as
# long without native support.
CLEARLY_FASTER = 0.7


@functools.cache
def fastest_dtype() -> str:
    """Return the number format with faster matrix products: ``bfloat16`` on a GPU, measured on a CPU.

    On a CPU bfloat16 must be clearly faster, so that all processes of a run choose the same format.
    """
    torch = _torch()
    if device() == "cuda":
        return "bfloat16"
    seconds = {name: _product_seconds(getattr(torch, name)) for name in ("float32", "bfloat16")}
    return "bfloat16" if seconds["bfloat16"] < CLEARLY_FASTER * seconds["float32"] else "float32"


def load(
    name: str, dtype: str = "auto", chat_template: str = ""
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model for inference, and its tokenizer; ``chat_template`` replaces the model's own.

    Raises:
        ModelNotFound: the weights are not on this machine and cannot be downloaded.
        CompoundError: the model is not supported.
    """
    with _LOADING:
        return _load(name, dtype, chat_template)


def _load(name: str, dtype: str, chat_template: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    _torch()
    try:
        import transformers  # noqa: F401 - to report here that it is missing
    except ImportError:
        raise MissingExtra(f"the model {name!r}", "transformers", "local") from None
    folder = models.resolve(name)
    dtype = fastest_dtype() if dtype == "auto" else dtype
    try:
        with models.hide_progress_bars():
            model, tokenizer = model_folder.load_causal(folder, dtype)
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
    from compound.components.engines.local.packing import pack

    return pack(model.to(device()).eval()), tokenizer


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

    glibc keeps memory in per-thread arenas, even after a thread has ended, so a process that loads one model
    after another would keep the working memory of each.
    """
    gc.collect()
    if device() == "cuda":
        _torch().cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _product_seconds(dtype: torch.dtype) -> float:
    """Return the shortest time of a few matrix products."""
    torch = _torch()
    rows, inner, columns = PRODUCT_SHAPE
    left, right = torch.ones(rows, inner, dtype=dtype), torch.ones(inner, columns, dtype=dtype)
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        left @ right
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _torch() -> ModuleType:
    try:
        import torch
    except ImportError:
        raise MissingExtra("a model in this process", "torch", "local") from None
    module: ModuleType = torch
    return module
