"""Memory and time of training steps on a GPU, compared with the computed memory and with TRL."""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median

from benchmarks.measure.cluster.base_memory import LOGITS, footprint_of
from benchmarks.measure.gpu.models import GPU, RANK, REPEATS, emptied, random_model, spread, timed
from benchmarks.measure.training.weights_speed import samples, trainer_of, trl_trainer
from benchmarks.simulated.layouts.costs import BASES, H100
from compound.core.errors import CompoundError
from compound.engines.local.devices import Placement
from compound.engines.local.footprint import OPTIMIZER_BYTES, SUM_BYTES
from compound.graph.space import LoRA
from compound.optimizers.weights.learner.adapters import Adapters
from compound.optimizers.weights.learner.updates import OptimizerSettings

TOKENS = 8192  # of a micro-batch
LENGTH, GROUP = 512, 2  # tokens of a sample, half of them answer; samples of a group


def memory(tokenizer: Path) -> dict[str, object]:
    """Measure training steps with two sizes of the base, with and without checkpointing."""
    found: dict[str, object] = {}
    for name in ("0.6B", "8B"):
        with random_model(name, tokenizer) as folder:
            for checkpointing in (True, False):
                found[f"{name}{' with checkpointing' if checkpointing else ''}"] = step_memory(
                    name, folder, checkpointing=checkpointing
                )
    return found


def quantized(tokenizer: Path) -> dict[str, object]:
    """Measure training steps with a quantized base, with checkpointing."""
    with random_model("8B", tokenizer) as folder:
        return {
            bits: step_memory("8B", folder, checkpointing=True, quantization=bits)
            for bits in ("none", "8bit", "4bit")
        }


def step_memory(
    name: str, folder: str, *, checkpointing: bool, quantization: str = "none"
) -> dict[str, object]:
    """Measure the peak memory and the time of training steps of one micro-batch, and the planned memory."""
    import torch

    emptied()
    try:
        adapters = Adapters(
            folder,
            {"x": LoRA(rank=RANK)},
            checkpointing=checkpointing,
            placement=Placement(GPU, "bfloat16", quantization=quantization),
        )
        emptied()
        loaded = torch.cuda.memory_allocated()
        settings = OptimizerSettings(micro_tokens=TOKENS)
        trainer = trainer_of(adapters, settings)
        rows = samples(LENGTH // 2, LENGTH // 2, TOKENS // LENGTH // GROUP, GROUP)
        adapters.unshared = "every prompt is processed"
        trainer.step(list(rows), 0)
        seconds = [timed(lambda: trainer.step(list(rows), 0)) for _ in range(REPEATS)]
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    except (CompoundError, RuntimeError) as error:
        return {"error": str(error)[:600]}
    finally:
        adapters = trainer = None  # type: ignore[assignment]  # before the memory is returned
        emptied()
    sizes = footprint_of(name)
    suffixes = sorted({layer.rpartition(".")[2] for layer, _, _ in sizes.linear})
    parts = {
        "weights": sizes.weights("bfloat16", quantization),
        "adapter": (OPTIMIZER_BYTES + SUM_BYTES) * sizes.adapter(RANK, suffixes),
        "activations": TOKENS * sizes.activations("bfloat16", checkpointing=checkpointing),
        "logits": LOGITS,
    }
    operations = (6 if checkpointing else 4) * BASES[name].parameters * TOKENS
    return {
        "loaded": loaded,
        "peak": peak,
        "reserved": reserved,
        "plan": parts,
        "planned": sum(parts.values()),
        "seconds": spread(seconds),
        "tokens_per_second": TOKENS / median(seconds),
        "share_of_peak": operations / median(seconds) / H100.flops,
    }


def compared(
    tokenizer: Path, prompt: int, answer: int, groups: int, each: int, *, name: str = "0.6B"
) -> dict[str, object]:
    """Alternate TRL's training step with ours: with every prompt, and with equal prompts once."""
    import torch

    with random_model(name, tokenizer) as folder:
        adapters = Adapters(folder, {"x": LoRA(rank=RANK)}, placement=Placement(GPU, "bfloat16"))
        settings = OptimizerSettings(micro_tokens=groups * each * (prompt + answer))
        trainer = trainer_of(adapters, settings)
        rows = samples(prompt, answer, groups, each)
        reason = adapters.unshared
        times: dict[str, list[float]] = {"trl": [], "every": [], "once": []}
        peaks: dict[str, int] = {}

        def ours(way: str) -> None:
            adapters.unshared = "for comparison" if way == "every" else reason
            torch.cuda.reset_peak_memory_stats()
            times[way].append(timed(lambda: trainer.step(list(rows), 0)))
            peaks[way] = torch.cuda.max_memory_allocated()

        def alternate(seconds: float) -> None:
            times["trl"].append(seconds)
            for way in ("every", "once")[:: 1 if len(times["trl"]) % 2 else -1]:
                ours(way)

        with tempfile.TemporaryDirectory() as out:
            trl_trainer(folder, rows, 1, REPEATS + 2, out, alternate, device=GPU).train()
    emptied()
    kept = {way: values[2:] for way, values in times.items()}
    found: dict[str, object] = {way: spread(values) for way, values in kept.items()}
    found |= {"peaks": peaks, "unpacked": reason}
    for one, other in (("every", "trl"), ("once", "trl"), ("once", "every")):
        found[f"{one}/{other}"] = spread(
            [a / b for a, b in zip(kept[one], kept[other], strict=True)]
        )
    return found


def step(tokenizer: Path) -> dict[str, object]:
    """Compare 32 sequences of 192 + 32 tokens."""
    return compared(tokenizer, 192, 32, 8, 4)


def shared(tokenizer: Path) -> dict[str, object]:
    """Compare 32 sequences of 320 + 32 tokens."""
    return compared(tokenizer, 320, 32, 8, 4)


def long(tokenizer: Path) -> dict[str, object]:
    """Compare a group of 8 with a prompt of 1,500 tokens."""
    return compared(tokenizer, 1500, 32, 1, 8)


def larger(tokenizer: Path) -> dict[str, object]:
    """Compare a group of 8 with a prompt of 1,500 tokens, with a base of 8B."""
    return compared(tokenizer, 1500, 32, 1, 8, name="8B")
