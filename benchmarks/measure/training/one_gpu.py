"""Measure training and sampling in one process on a GPU, with random models of known shapes.

    python -m compound.benchmarks.measure.training.one_gpu [PART ...]

Parts: ``agreement`` (log-probabilities and gradients of tiny models of several families on the GPU, compared
with the CPU), ``memory`` (peak memory and time of a training step with the shapes of Qwen3, compared with
the memory plan and with the peak operations of the GPU), ``quantized`` (the same in 8 and 4 bits, which needs
bitsandbytes), ``step``, ``shared`` and ``long`` (TRL's training step and ours, alternating, in the cases of
`weights_speed`; ours processes equal prompts never once, always once, and where it pays),
``sampling`` (64 requests by the engine and by ``generate`` of transformers, alternating), ``mismatch``
(log-probabilities of the sampler and of the trainer for the same tokens), ``toys`` (every training method on
its toy task, with seed 0). Results are written to ``benchmarks/data/one_gpu.json`` by part, with the name of
the GPU. The tokenizer is that of the embedded model, or of ``--tokenizer``.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from compound.benchmarks.measure.cluster.base_memory import LOGITS, config_of
from compound.benchmarks.measure.learning_curves import METHODS, Case, train
from compound.benchmarks.measure.training.weights_speed import LOSS, samples, trl_trainer
from compound.benchmarks.simulated.layouts.costs import BASES, H100
from compound.components.engines.local.devices import Placement
from compound.components.engines.local.engine import TransformersEngine
from compound.components.engines.local.footprint import OPTIMIZER_BYTES, SUM_BYTES, Footprint
from compound.components.engines.models import resolve
from compound.engine import Message, Request, TokenRecord
from compound.errors import CompoundError
from compound.graph.space import LoRA
from compound.optimizers.weights.learner import forward as forward_module
from compound.optimizers.weights.learner.adapters import Adapters
from compound.optimizers.weights.learner.forward import forward
from compound.optimizers.weights.learner.samples import Sample
from compound.optimizers.weights.learner.trainer import Trainer
from compound.optimizers.weights.learner.updates import OptimizerSettings
from compound.optimizers.weights.recipes.rollouts import RolloutSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OUTPUT = Path(__file__).parents[2] / "data" / "one_gpu.json"
GPU = "cuda:0"
REPEATS = 5
RANK, TOKENS = 16, 8192  # of an adapter on all linear layers; of a micro-batch
LENGTH, GROUP = 512, 2  # tokens of a sample, half of them answer; samples of a group
TINY: dict[str, object] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0,
}  # fmt: skip
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
FAMILIES: Mapping[str, tuple[str, Mapping[str, object]]] = {  # class prefix, settings of its configuration
    "Llama": ("Llama", {}),
    "Gemma 3, with windows": ("Gemma3Text", {"head_dim": 16, **MIXED}),
    "Qwen2, with windows": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "LFM2, a hybrid": ("Lfm2", {"layer_types": ["conv", "full_attention"]}),
    "Qwen3-Next, a hybrid": (
        "Qwen3Next",
        {
            "head_dim": 16, "linear_num_value_heads": 2, "linear_num_key_heads": 2,
            "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_experts": 2,
            "shared_expert_intermediate_size": 16, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
}  # fmt: skip


# -- models ------------------------------------------------------------------------------------------------


@contextmanager
def random_model(name: str, tokenizer: Path) -> Iterator[str]:
    """Yield a folder with a random model of a size of Qwen3, written in bfloat16."""
    import torch
    from transformers import Qwen3ForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(tokenizer / file, folder)
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(GPU):
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


# -- agreement ---------------------------------------------------------------------------------------------


def agreement(_: Path) -> dict[str, object]:
    """Compare log-probabilities and gradients on the GPU with those in float64 on the CPU."""
    return {family: _agreement(*FAMILIES[family]) for family in FAMILIES}


def _agreement(prefix: str, given: Mapping[str, object]) -> dict[str, object]:
    import torch
    import transformers

    config = getattr(transformers, f"{prefix}Config")(**{**TINY, **given})
    torch.manual_seed(0)
    family = getattr(transformers, f"{prefix.removesuffix('Text')}ForCausalLM")
    model = family(config).eval().double()
    model.config._experts_implementation = "eager"  # grouped products do not support float64
    exact = _gradients(model, shared=False)
    found: dict[str, object] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for device in ("cpu", GPU):
            moved = family(config).eval().to(device=device, dtype=dtype)
            moved.load_state_dict(model.state_dict())
            for shared in (False, None):  # None: if the layers allow it
                try:
                    logps, gradients = _gradients(moved, shared=shared)
                except (RuntimeError, NotImplementedError, CompoundError) as error:
                    found[_key(dtype, device, shared)] = f"{type(error).__name__}: {error}"[:300]
                    continue
                largest = max(float(g.abs().max()) for g in exact[1].values())
                found[_key(dtype, device, shared)] = {
                    "logps": float((logps - exact[0]).abs().max()),
                    "gradients": max(
                        float((gradients[name] - g).abs().max()) / largest for name, g in exact[1].items()
                    ),
                }
    return found


def _key(dtype: object, device: str, shared: bool | None) -> str:
    return " ".join((
        str(dtype).removeprefix("torch."), device.partition(":")[0],
        "unshared" if shared is False else "default",
    ))  # fmt: skip


def _gradients(model: PreTrainedModel, *, shared: bool | None) -> tuple[Any, dict[str, Any]]:
    import torch

    rng, rows = random.Random(0), []
    for length in (40, 12):
        prompt = tuple(rng.randrange(5, 90) for _ in range(length))
        for number in range(4):
            sampled = tuple(rng.randrange(5, 90) for _ in range(2 + number))
            rows.append(Sample("x", "e", "x", 0, TokenRecord(prompt, sampled, (), "stop"), 0.0))
    model.zero_grad()
    ran = forward(model, rows, shared=shared)
    weights = torch.arange(1, len(rows) + 1, device=ran.logps.device)[:, None]
    (ran.logps * ran.mask * weights).sum().backward()
    found = {
        name: parameter.grad.double().cpu()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return (ran.logps * ran.mask).detach().double().cpu(), found


# -- memory and time of a step -----------------------------------------------------------------------------


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
            folder, {"x": LoRA(rank=RANK)}, checkpointing=checkpointing,
            placement=Placement(GPU, "bfloat16", quantization=quantization),
        )  # fmt: skip
        sizes = Footprint.of(adapters.base)
        emptied()
        loaded = torch.cuda.memory_allocated()
        settings = OptimizerSettings(micro_tokens=TOKENS)
        trainer = Trainer(adapters, {"x": "x"}, LOSS, settings, RolloutSettings())
        rows = samples(LENGTH // 2, LENGTH // 2, TOKENS // LENGTH // GROUP, GROUP)
        with _every_prompt():
            trainer.step(list(rows), 0)
            seconds = [timed(lambda: trainer.step(list(rows), 0)) for _ in range(REPEATS)]
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    except (CompoundError, RuntimeError) as error:
        return {"error": str(error)[:600]}
    finally:
        adapters = trainer = None  # type: ignore[assignment]  # before the memory is returned
        emptied()
    meta = base_footprint(name)
    suffixes = sorted({layer.rpartition(".")[2] for layer, _, _ in meta.linear})
    parts = {
        "weights": meta.weights("bfloat16", quantization),
        "adapter": (OPTIMIZER_BYTES + SUM_BYTES) * meta.adapter(RANK, suffixes),
        "activations": TOKENS * meta.activations("bfloat16", checkpointing=checkpointing),
        "logits": LOGITS,
    }
    operations = (6 if checkpointing else 4) * BASES[name].parameters * TOKENS
    del sizes
    return {
        "loaded": loaded, "peak": peak, "reserved": reserved, "plan": parts, "planned": sum(parts.values()),
        "seconds": spread(seconds), "tokens_per_second": TOKENS / median(seconds),
        "share_of_peak": operations / median(seconds) / H100.flops,
    }  # fmt: skip


def base_footprint(name: str) -> Footprint:
    """Return the sizes of a base before adapters are added."""
    from compound.benchmarks.measure.cluster.base_memory import footprint_of

    return footprint_of(name)


@contextmanager
def _every_prompt() -> Iterator[None]:
    """Process the prompt of every sample."""
    before = forward_module.MAX_SHARED_FRACTION
    forward_module.MAX_SHARED_FRACTION = -1.0
    try:
        yield
    finally:
        forward_module.MAX_SHARED_FRACTION = before


# -- comparison with TRL -----------------------------------------------------------------------------------


def compared(tokenizer: Path, prompt: int, answer: int, groups: int, each: int) -> dict[str, object]:
    """Alternate TRL's training step with ours: with every prompt, equal prompts once, and the default."""
    with random_model("0.6B", tokenizer) as folder:
        adapters = Adapters(folder, {"x": LoRA(rank=RANK)}, placement=Placement(GPU, "bfloat16"))
        settings = OptimizerSettings(micro_tokens=groups * each * (prompt + answer))
        trainer = Trainer(adapters, {"x": "x"}, LOSS, settings, RolloutSettings())
        rows = samples(prompt, answer, groups, each)
        times: dict[str, list[float]] = {"trl": [], "every": [], "once": [], "default": []}
        least = adapters.second_pass

        def every() -> None:
            with _every_prompt():
                trainer.step(list(rows), 0)

        def once() -> None:
            adapters.second_pass = 0.0
            default()
            adapters.second_pass = least

        def default() -> None:
            trainer.step(list(rows), 0)

        def alternate(seconds: float) -> None:
            times["trl"].append(seconds)
            steps = [("every", every), ("once", once), ("default", default)]
            for name, step in steps if len(times["trl"]) % 2 else steps[::-1]:
                times[name].append(timed(step))

        with tempfile.TemporaryDirectory() as out:
            trl_trainer(folder, rows, 1, REPEATS + 2, out, alternate, device=GPU).train()
    emptied()
    kept = {name: values[2:] for name, values in times.items()}
    found: dict[str, object] = {name: spread(values) for name, values in kept.items()}
    for one, other in (
        ("every", "trl"),
        ("once", "trl"),
        ("default", "trl"),
        ("once", "every"),
    ):
        found[f"{one}/{other}"] = spread([a / b for a, b in zip(kept[one], kept[other], strict=True)])
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


# -- sampling ----------------------------------------------------------------------------------------------


def sampling(tokenizer: Path) -> dict[str, object]:
    """Compare the tokens per second of 64 requests in the engine and in transformers' ``generate``."""
    return {name: _sampling(name, tokenizer) for name in ("0.6B", "8B")}


def _requests(seed: int) -> list[Request]:
    rng = random.Random(seed)
    return [
        Request(
            (Message("user", " ".join(str(rng.randrange(10**6)) for _ in range(40))),), 64,
            temperature=1.0, seed=number, want_tokens=True,
        )
        for number in range(64)
    ]  # fmt: skip


def _sampling(name: str, tokenizer: Path) -> dict[str, object]:
    import torch

    with random_model(name, tokenizer) as folder:
        engine = TransformersEngine(folder, device=GPU)

        async def run() -> dict[str, object]:
            async def ask(seed: int) -> int:
                answers = await asyncio.gather(*map(engine.generate, _requests(seed)))
                return sum(len(answer.tokens.sampled) for answer in answers if answer.tokens)

            await ask(0)
            decoder = engine._decoder
            assert decoder is not None
            model: Any = decoder._model
            prompts = [engine._prompt(request) for request in _requests(1)]
            ids = torch.nn.utils.rnn.pad_sequence(
                [torch.tensor(p) for p in prompts], batch_first=True, padding_side="left"
            ).to(GPU)
            mask = torch.nn.utils.rnn.pad_sequence(
                [torch.ones(len(p), dtype=torch.long) for p in prompts], batch_first=True, padding_side="left"
            ).to(GPU)

            def generate() -> int:
                with torch.no_grad():
                    out = model.generate(
                        input_ids=ids, attention_mask=mask, max_new_tokens=64, min_new_tokens=64,
                        do_sample=True, top_k=0, top_p=1.0, temperature=1.0, pad_token_id=0,
                    )  # fmt: skip
                return int((out.shape[1] - ids.shape[1]) * out.shape[0])

            generate()
            rates: dict[str, list[float]] = {"engine": [], "generate": []}
            for seed in range(1, REPEATS + 1):
                torch.cuda.synchronize()
                start = time.perf_counter()
                count = await ask(seed)
                torch.cuda.synchronize()
                middle = time.perf_counter()
                other = generate()
                torch.cuda.synchronize()
                rates["engine"].append(count / (middle - start))
                rates["generate"].append(other / (time.perf_counter() - middle))
            peak = torch.cuda.max_memory_allocated()
            await engine.aclose()
            return {
                **{kind: spread(values) for kind, values in rates.items()},
                "peak": peak, "prompt_tokens": fmean(map(len, prompts)),
            }  # fmt: skip

        emptied()
        found = asyncio.run(run())
    emptied()
    return found


def mismatch(tokenizer: Path) -> dict[str, object]:
    """Compare log-probabilities of sampled tokens between the sampler and the trainer."""
    found: dict[str, object] = {}
    with random_model("0.6B", tokenizer) as folder:
        for dtype in ("bfloat16", "float32"):
            engine = TransformersEngine(folder, device=GPU, dtype=dtype)

            async def ask(engine: TransformersEngine = engine) -> list[TokenRecord]:
                answers = await asyncio.gather(*map(engine.generate, _requests(0)))
                await engine.aclose()
                return [answer.tokens for answer in answers if answer.tokens]

            records = asyncio.run(ask())
            del engine
            emptied()
            adapters = Adapters(folder, {"x": LoRA(rank=RANK)}, placement=Placement(GPU, dtype))
            differences: list[float] = []
            for record in records:
                sample = Sample("x", "e", "x", 0, record, 0.0)
                with adapters.using("x") as model:
                    logps = forward(model, [sample], entropy=False).logps[0].detach().tolist()
                differences += [abs(a - b) for a, b in zip(logps, record.logprobs, strict=False)]
            found[dtype] = {
                "tokens": len(differences), "mean": fmean(differences), "largest": max(differences),
            }  # fmt: skip
            del adapters
            emptied()
    return found


# -- learning ----------------------------------------------------------------------------------------------


def toys(_: Path) -> dict[str, object]:
    """Train every method on its toy task with seed 0, eight at a time."""
    cases = [Case(task, method, 0) for task, methods in METHODS.items() for method in methods]
    with ProcessPoolExecutor(8, mp_context=get_context("spawn")) as pool:
        ran = list(pool.map(train, cases))
    kept = ("before", "after", "chance", "optimum", "seconds")
    return {case.name: {key: found[key] for key in kept} for case, found in zip(cases, ran, strict=True)}


Part = Callable[[Path], dict[str, object]]
PARTS: Mapping[str, Part] = {
    "agreement": agreement, "memory": memory, "quantized": quantized, "step": step, "shared": shared,
    "long": long, "sampling": sampling, "mismatch": mismatch, "toys": toys,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the given parts, or all, and keep the others."""
    import torch
    import transformers
    import trl

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], default=[])
    parser.add_argument("--tokenizer", type=Path, help="a folder with a tokenizer; default: that of smollm2")
    parser.add_argument("--out", type=Path, default=OUTPUT)
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("one_gpu: PyTorch finds no CUDA device")
    warnings.simplefilter("ignore")
    device = {
        "gpu": torch.cuda.get_device_name(0), "torch": torch.__version__,
        "transformers": transformers.__version__, "trl": trl.__version__,
    }  # fmt: skip
    known = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    tokenizer = args.tokenizer or Path(resolve("smollm2"))
    for part in args.parts or PARTS:
        start = time.perf_counter()
        known[part] = {**device, **PARTS[part](tokenizer)}
        args.out.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        print(f"{part} ({time.perf_counter() - start:.0f} s): {json.dumps(known[part])}", flush=True)


if __name__ == "__main__":
    main()
