"""Compare the memory plan of a run with the measured peak of its trainer and its engine.

Run ``python -m benchmarks.measure.cluster.memory_peaks``; it takes about ten minutes on two cores, and
writes ``benchmarks/data/memory_peaks.json``. Every case runs in a process of its own: it loads a small
random model, takes a training step of two micro-batches, and reports its peak memory above that of the
imported libraries. The plan is that of ``compound optimize --dry-run``. ``--device cuda:0`` measures on a
GPU, in the memory that PyTorch allocates, and writes to ``--out``.

The first cases hold an engine beside the trainer: with one copy of the base, and with two, as if each had
loaded its own. They alternate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.simulated.toy_model import make_toy_model

OUTPUT = Path(__file__).parents[2] / "data" / "memory_peaks.json"
SHAPE: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "Qwen3": ("Qwen3", {"head_dim": 128}),  # queries are wider than hidden states, as in 0.6B
    "Gemma 3": ("Gemma3", {"head_dim": 64, "sliding_window": 512}),
}
RANK = 16
PAIRS = 1  # of runs with one copy of the base and with two


@dataclass(frozen=True)
class Case:
    """A training step to measure: a row of the table."""

    family: str = "Llama"
    dtype: str = "float32"
    micro_tokens: int = 2048
    checkpointing: bool = False
    each: int = 2  # samples with one prompt
    prompt: int = 96
    answer: int = 32
    device: str = "cpu"
    base: str = ""  # an engine beside the trainer: with `one` base, or with one `each`
    model: str = ""  # a name instead of a random model


def cases(device: str) -> list[Case]:
    """Return the cases without an engine."""
    plain = [
        Case(family, checkpointing=checkpointing)
        for family in FAMILIES
        for checkpointing in (False, True)
    ]
    shared = Case(each=8, prompt=224)
    long = Case(micro_tokens=512, each=1, prompt=1000, answer=500)
    half = Case(dtype="bfloat16")
    return [replace(case, device=device) for case in (*plain, shared, long, half)]


def beside_engine(device: str, model: str) -> list[Case]:
    """Return cases with an engine in the process, which alternate between one and two bases."""
    return [
        Case(dtype=dtype, base=base, device=device, model=model, micro_tokens=512)
        for dtype in ("float32", "bfloat16")
        for turn in range(PAIRS)
        for base in (("one", "each") if turn % 2 else ("each", "one"))
    ]


def make_model(case: Case, folder: Path) -> str:
    """Return the name of a case's model, which is saved to a folder if it is random."""
    import transformers

    if case.model:
        return case.model
    make_toy_model(folder)  # for its tokenizer
    family, own = FAMILIES[case.family]
    text = "Text" if family == "Gemma3" else ""
    config = getattr(transformers, f"{family}{text}Config")(**{**SHAPE, **own})
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)
    return str(folder)


def planned(case: Case, model: str) -> dict[str, int]:
    """Return what the memory plan of a run with one trained component states for each part."""
    import compound as cp
    from compound.api.optimize import make_problem
    from compound.engines.local.engine import TransformersEngine
    from compound.optimization.settings.optimize import make_settings
    from compound.optimizers.memory_plan import plan_memory

    llm = cp.LLM("answerer", prompt="Answer.", output=str, weights=cp.LoRA(RANK))
    outputs = {"answer": llm(question=cp.Input("question", str))}
    rows = [{"question": str(i), "answer": str(i)} for i in range(40)]
    own = {
        "optimizer": {"micro_tokens": case.micro_tokens},
        "rollouts": {"max_length": max(case.micro_tokens, case.prompt + case.answer)},
        "base": {"gradient_checkpointing": case.checkpointing, "device": case.device},
    }
    settings = make_settings({"method": "mmgrpo", "budget": {"system_runs": 4000}, "mmgrpo": own})
    # an engine with other kernels has weights of its own
    kernels: Any = "auto" if case.base == "one" else "sdpa"
    engine = TransformersEngine(model, **engine_settings(case), attn_implementation=kernels)
    problem = make_problem(
        cp.System("one", outputs=outputs, lm="base"),
        cp.Dataset.of(train=rows, valid=rows, test=rows),
        cp.metrics.exact_match("answer"),
        settings,
        {"base": engine},
    )
    demands = plan_memory(problem).demands[0 if case.base else 1 :]  # the engine's comes first
    return {
        "fixed": sum(each.fixed for each in demands),
        "most": sum(each.most for each in demands),
    }


def engine_settings(case: Case) -> dict[str, Any]:
    """Return the settings of the engine of a case."""
    return {
        "dtype": case.dtype,
        "device": case.device,
        "max_batch": 4,
        "max_batch_tokens": 512,
        "max_adapters": 1,
    }


def rows_of(case: Case, words: int) -> list[Any]:
    """Return samples for two micro-batches."""
    from compound.core.engine import TokenRecord
    from compound.optimizers.weights.credit import advantages
    from compound.optimizers.weights.learner.samples import Sample

    rng, found = random.Random(0), []
    distinct = case.prompt + case.each * case.answer if case.each > 2 else 0
    size = distinct or case.each * (case.prompt + case.answer)
    for group in range(-(-2 * case.micro_tokens // size)):
        prompt = tuple(rng.randrange(words) for _ in range(case.prompt))
        for number in range(case.each):
            sampled = tuple(rng.randrange(words) for _ in range(case.answer))
            record = TokenRecord(prompt, sampled, (), "length")
            found.append(
                Sample("x", str(group), "x", 0, record, rng.random(), ("x", group), number)
            )
    return (
        advantages(found)[0]
        if case.each > 1
        else [replace(sample, advantages=(1.0,) * case.answer) for sample in found]
    )


def measure(case: Case, model: str) -> int:
    """Return the peak memory in bytes of a case, above that of the libraries and of a tiny model."""
    import torch

    from compound.engines.local import loading

    warnings.simplefilter("ignore")
    if case.base == "each":
        loading.load_shared = loading.load_base
    with tempfile.TemporaryDirectory() as folder:
        toy = Path(folder)
        make_toy_model(toy)
        work(replace(case, micro_tokens=64, prompt=12, answer=4), str(toy))
    loading.release()
    if case.device == "cpu":
        start = resident("VmRSS")
        work(case, model)
        return resident("VmHWM") - start
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work(case, model)
    return int(torch.cuda.max_memory_allocated() - start)


def work(case: Case, model: str) -> None:
    """Take a training step, before and after samples of an engine if there is one."""
    from benchmarks.measure.training.weights_speed import trainer_of
    from compound.core.engine import Message, Request
    from compound.engines.local import loading
    from compound.engines.local.devices import Placement
    from compound.engines.local.engine import TransformersEngine
    from compound.graph.space import LoRA
    from compound.optimizers.weights.learner.adapters import Adapters
    from compound.optimizers.weights.learner.updates import OptimizerSettings

    engine = TransformersEngine(model, **engine_settings(case))
    prompt = Message("user", " ".join(["cat"] * 60))

    async def sample() -> None:
        requests = (Request((prompt,), 40, temperature=1.0, seed=seed) for seed in range(4))
        await asyncio.gather(*map(engine.generate, requests))

    if case.base:
        asyncio.run(sample())
    adapters = Adapters(
        model,
        {"x": LoRA(RANK)},
        placement=Placement(case.device, case.dtype),
        checkpointing=case.checkpointing,
        load=loading.load_shared,
    )
    trainer = trainer_of(adapters, OptimizerSettings(micro_tokens=case.micro_tokens))
    trainer.step(rows_of(case, min(1000, adapters.base.config.vocab_size)), 0)
    if case.base:
        asyncio.run(sample())
        asyncio.run(engine.aclose())


def resident(field: str) -> int:
    """Return the resident memory of this process in bytes: ``VmRSS`` now, or ``VmHWM`` at its peak."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def run(case: Case) -> dict[str, object]:
    """Return the plan and the measured peaks of a case, which runs in processes of its own.

    ``peak`` is what is allocated: glibc then returns every freed block of more than 1 MB at once. By
    default it keeps smaller ones (up to 32 MB), so that the process holds more: ``resident``.
    """
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(case, Path(folder))
        plan = planned(case, model)
        given = json.dumps({"case": asdict(case), "model": model})
        command = [sys.executable, "-m", "benchmarks.measure.cluster.memory_peaks", "--case", given]

        def peak(**variables: str) -> int:
            environment = {**os.environ, **variables}
            out = subprocess.run(
                command, check=True, stdout=subprocess.PIPE, text=True, env=environment
            )
            return int(out.stdout.split()[-1])

        found = {"peak": peak(MALLOC_MMAP_THRESHOLD_=str(10**6))}
        if case.device == "cpu":
            found["resident"] = peak()
    return {**asdict(case), **plan, **found, "plan/peak": round(plan["most"] / found["peak"], 2)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every case, and write the file after each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="smollm2", help="the model beside an engine")
    parser.add_argument("--out", type=Path, default=OUTPUT)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.case:
        given = json.loads(args.case)
        print(measure(Case(**given["case"]), given["model"]))
        return
    rows: list[dict[str, object]] = []
    for case in every(args.device, args.model):
        rows.append(run(case))
        print(json.dumps(rows[-1]), flush=True)
        args.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def every(device: str, model: str) -> Iterator[Case]:
    """Yield all cases."""
    yield from beside_engine(device, model)
    yield from cases(device)


if __name__ == "__main__":
    main()
