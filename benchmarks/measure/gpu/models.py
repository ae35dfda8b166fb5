"""Random models of known shapes, and what every measurement on a GPU does around a step."""

from __future__ import annotations

import gc
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from benchmarks.measure.cluster.base_memory import config_of
from compound.execution.rng import fork_torch_rng

GPU = "cuda:0"
REPEATS = 5  # measurements of a step, after the warm-up
RANK = 16  # of an adapter on all linear layers


@contextmanager
def random_model(name: str, tokenizer: Path) -> Iterator[str]:
    """Yield a folder with a random model of a size of Qwen3, written in bfloat16."""
    import torch
    from transformers import Qwen3ForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(tokenizer / file, folder)
        torch.set_default_dtype(torch.bfloat16)
        try:
            with fork_torch_rng(0, "random model"), torch.device(GPU):
                model = Qwen3ForCausalLM(config_of(name))
        finally:
            torch.set_default_dtype(torch.float32)
        model.save_pretrained(folder)
        del model
        emptied()
        yield folder


def emptied() -> None:
    """Return unused memory of the GPU, and forget its peak."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def timed(step: Callable[[], object]) -> float:
    """Return the seconds of a step, including the work that it leaves to the GPU."""
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the minimum and the maximum."""
    return {"median": median(values), "min": min(values), "max": max(values)}
