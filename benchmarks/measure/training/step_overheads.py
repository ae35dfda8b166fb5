"""Measure what a training step spends beside sampling and training: files of adapters, and token records.

    python -m benchmarks.measure.training.step_overheads

``adapter`` stores an adapter of the size that rank 16 has on all linear layers of an 8B model, and
verifies it as an engine does: with its content hashed once, and hashed three times (of the tensors,
of the written files, and by the engine). ``tokens`` builds the token records of a step from parsed
JSON, with token ids that share their objects, and with those of the parser. The two ways alternate
``TURNS`` times, in reverse order every other turn, so that other load affects both equally;
medians, minima and maxima are reported. Results are written to
``benchmarks/data/step_overheads.json``, with the machine's load at the start. Needs no GPU: both
parts run on the host.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from compound.core.engine import TokenRecord, TokenRow
from compound.core.storage.artifacts import Reference, discard, store_folder, verify_reference

if TYPE_CHECKING:
    from torch import Tensor

OUTPUT = Path(__file__).parents[2] / "data" / "step_overheads.json"
TURNS = 9
LAYERS, RANK = 36, 16
LINEAR = (  # inputs and outputs of the linear layers of Qwen3-8B
    (4096, 4096),
    (4096, 1024),
    (4096, 1024),
    (4096, 4096),
    (4096, 12288),
    (4096, 12288),
    (12288, 4096),
)
RECORDS, PROMPT, ANSWER, VOCABULARY = 256, 2048, 512, 151_936
FILE = "adapter_model.safetensors"

Summary = dict[str, float | list[float]]


def alternated(
    ways: Mapping[str, Callable[[], Mapping[str, float]]],
) -> dict[str, dict[str, Summary]]:
    """Run all ways in turn, in reverse order every other turn; summarize the quantities that they return."""
    found: dict[str, list[Mapping[str, float]]] = {name: [] for name in ways}
    for turn in range(TURNS):
        for name in list(ways)[:: -1 if turn % 2 else 1]:
            gc.collect()
            found[name].append(ways[name]())
    return {
        name: {quantity: _summary([one[quantity] for one in turns]) for quantity in turns[0]}
        for name, turns in found.items()
    }


def _summary(each: list[float]) -> Summary:
    return {"median": median(each), "spread": [min(each), max(each)], "each": each}


def adapter(folder: Path) -> dict[str, object]:
    """Measure the seconds from weights in memory to a verified folder, with and without repeated hashing."""
    import torch
    from safetensors.torch import save_file

    random = torch.Generator().manual_seed(0)
    tensors = {
        f"{layer}.{number}.{side}": torch.randn(shape, generator=random)
        for layer in range(LAYERS)
        for number, (inputs, outputs) in enumerate(LINEAR)
        for side, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK)))
    }

    def once() -> Reference:
        weights = folder / "weights"
        save_file(tensors, weights)
        with weights.open("rb") as file:
            known = {FILE: hashlib.file_digest(file, "sha256").digest()}
        reference = store_folder(lambda path: weights.rename(path / FILE), folder, "once", known)
        verify_reference(reference, folder)
        return reference

    def thrice() -> Reference:
        _digest(tensors)
        reference = store_folder(lambda path: save_file(tensors, path / FILE), folder, "thrice")
        verify_reference(reference, folder, reread=True)
        return reference

    def measure(run: Callable[[], Reference]) -> dict[str, float]:
        started, used = time.perf_counter(), time.process_time()
        reference = run()
        found = {
            "seconds": time.perf_counter() - started,
            "CPU seconds": time.process_time() - used,
        }
        discard(reference["path"], folder)
        return found

    size = 4 * sum(tensor.numel() for tensor in tensors.values())
    return {
        "bytes": size,
        **alternated({"once": lambda: measure(once), "three times": lambda: measure(thrice)}),
    }


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the digest of tensors in memory."""
    hashed = hashlib.sha256()
    for name, tensor in tensors.items():
        hashed.update(name.encode() + tensor.numpy().tobytes())
    return hashed.hexdigest()


def tokens() -> dict[str, object]:
    """Measure the memory and the time of the token records of a step, made from JSON."""
    rng = random.Random(0)
    texts = [json.dumps(_row(rng)) for _ in range(RECORDS)]

    def shared(row: TokenRow) -> TokenRecord:
        return TokenRecord.from_row(row)

    def separate(row: TokenRow) -> TokenRecord:
        prompt, sampled, logprobs, reason, *rest = row
        return TokenRecord(tuple(prompt), tuple(sampled), tuple(logprobs), reason, *rest)

    def measure(make: Callable[[TokenRow], TokenRecord]) -> dict[str, float]:
        rows = [json.loads(text) for text in texts]
        started = time.perf_counter()
        kept = [make(row) for row in rows]
        seconds = (time.perf_counter() - started) / len(kept)
        del rows, kept
        tracemalloc.start()
        kept = [make(json.loads(text)) for text in texts]
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return {"seconds": seconds, "bytes": size / len(kept)}

    ways = alternated({"shared": lambda: measure(shared), "separate": lambda: measure(separate)})
    return {"records": RECORDS, "prompt": PROMPT, "answer": ANSWER, **ways}


def _row(rng: random.Random) -> TokenRow:
    """Return a record of random tokens."""
    prompt, sampled = (
        [rng.randrange(VOCABULARY) for _ in range(count)] for count in (PROMPT, ANSWER)
    )
    return prompt, sampled, [-rng.random() for _ in sampled], "stop", ""


def main() -> None:
    """Run both parts, and write the results."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        found = {
            "load": load,
            "cores": os.cpu_count(),
            "adapter": adapter(Path(folder)),
            "tokens": tokens(),
        }
    OUTPUT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
