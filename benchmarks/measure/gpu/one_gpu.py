"""Measure training and sampling in one process on a GPU, with random models of known shapes.

    python -m benchmarks.measure.gpu.one_gpu [PART ...]

Parts:

- ``agreement``: log-probabilities and gradients of tiny models of several families, compared with the CPU.
- ``memory``: peak memory and time of a training step with the shapes of Qwen3, compared with the computed
  memory and with the peak operations of the GPU.
- ``quantized``: the same in 8 and 4 bits, which needs bitsandbytes.
- ``step``, ``shared``, ``long``: TRL's training step and ours, alternating, in the cases of `weights_speed`
  in ``measure/training``; ours processes every prompt, and equal prompts once, in packed rows.
- ``larger``: the case ``long`` with a base of 8B.
- ``sampling``: 64 requests by the engine and by ``generate`` of transformers, alternating.
- ``mismatch``: log-probabilities of the sampler and of the trainer for the same tokens.
- ``peaks``: the memory plan of small models beside measured peaks (`memory_peaks` in ``measure/cluster``).
- ``toys``: every training method on its toy task, with seed 0.

Results are written to ``benchmarks/data/one_gpu.json`` by part, with the name of the GPU. The
tokenizer is that of the embedded model, or of ``--tokenizer``.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from benchmarks.measure.cluster.memory_peaks import every, run
from benchmarks.measure.gpu.agreement import agreement
from benchmarks.measure.gpu.models import GPU
from benchmarks.measure.gpu.sampling import mismatch, sampling
from benchmarks.measure.gpu.steps import larger, long, memory, quantized, shared, step
from benchmarks.measure.learning_curves import METHODS, Case, train
from compound.engines.models import resolve

OUTPUT = Path(__file__).parents[2] / "data" / "one_gpu.json"


def peaks(_: Path) -> dict[str, object]:
    """Measure the cases of `memory_peaks`, each in a process of its own."""
    return {"cases": [run(case) for case in every(GPU, "smollm2")]}


def toys(_: Path) -> dict[str, object]:
    """Train every method on its toy task with seed 0, eight at a time."""
    cases = [Case(task, method, 0) for task, methods in METHODS.items() for method in methods]
    with ProcessPoolExecutor(8, mp_context=get_context("spawn")) as pool:
        ran = list(pool.map(train, cases))
    kept = ("before", "after", "chance", "optimum", "seconds")
    return {
        case.name: {key: found[key] for key in kept} for case, found in zip(cases, ran, strict=True)
    }


Part = Callable[[Path], dict[str, object]]
PARTS: Mapping[str, Part] = {
    "agreement": agreement,
    "memory": memory,
    "quantized": quantized,
    "step": step,
    "shared": shared,
    "long": long,
    "larger": larger,
    "sampling": sampling,
    "mismatch": mismatch,
    "peaks": peaks,
    "toys": toys,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the given parts, or all, and keep the others."""
    import torch
    import transformers
    import trl

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], default=[])
    parser.add_argument(
        "--tokenizer", type=Path, help="a folder with a tokenizer; default: that of smollm2"
    )
    parser.add_argument("--out", type=Path, default=OUTPUT)
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("one_gpu: PyTorch finds no CUDA device")
    warnings.simplefilter("ignore")
    device = {
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "trl": trl.__version__,
    }
    known = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    tokenizer = args.tokenizer or Path(resolve("smollm2"))
    for part in args.parts or PARTS:
        start = time.perf_counter()
        known[part] = {**device, **PARTS[part](tokenizer)}
        args.out.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        print(
            f"{part} ({time.perf_counter() - start:.0f} s): {json.dumps(known[part])}", flush=True
        )


if __name__ == "__main__":
    main()
