"""Measure the cost of a training step, compared with TRL, with shared prompts, and with several adapters.

    python -m benchmarks.measure.training.weights_speed [PART ...]

Parts: ``step`` (TRL's GRPOTrainer and ours on the same 32 sequences of 192 + 32 tokens), ``shared``
(prompts ten times as long as the answer, packed, or computed once per sample), ``long`` (the same
for a group of 8 with a prompt of 1,500 tokens), ``adapters`` (memory of 1, 2, 4 and 8 adapters),
``batches`` (time and memory by ``micro_tokens``), ``sampling`` (64 examples through a graph,
compared with the engine alone), ``prefill`` (prompt tokens of a step's rollouts, and how many of
them were reused). Each measurement runs in a separate process. Steps that are compared alternate
``TURNS`` times, in reverse order every other turn, so that other load affects both equally. A ratio
belongs to one turn; over all turns the median, the minimum and the maximum are reported. Results
are written to ``benchmarks/data/weights_speed.json``, with the machine's load at the start.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, cast

from compound.api.optimize import run_optimization
from compound.core.engine import TokenRecord
from compound.core.narrowing import entry
from compound.engines.model_folder import load_causal
from compound.engines.models import resolve
from compound.graph.space import ATTENTION, LoRA
from compound.optimization.runs.directory import read_records
from compound.optimization.settings.optimize import make_settings
from compound.optimizers.weights.credit import advantages
from compound.optimizers.weights.learner.adapters import Adapters
from compound.optimizers.weights.learner.losses import ClippedLoss, PolicyObjective
from compound.optimizers.weights.learner.samples import SECTION, Sample
from compound.optimizers.weights.learner.trainer import LearnerSpec, Trainer
from compound.optimizers.weights.learner.updates import OptimizerSettings
from compound.optimizers.weights.recipes.rollouts import RolloutSettings
from compound.yaml import load

if TYPE_CHECKING:
    from trl import GRPOTrainer

    from compound.core.engine import Engine


ATLAS = Path(__file__).parents[2] / "atlas.yaml"
OUTPUT = Path(__file__).parents[2] / "data" / "weights_speed.json"
ATTENTION_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj")
REPEATS = 3
TURNS = 5
LOSS = PolicyObjective(grpo=ClippedLoss(correction=None))
OPTIMIZER = OptimizerSettings()


def samples(prompt: int, answer: int, groups: int, each: int, component: str = "x") -> list[Sample]:
    """Return groups of samples that share a prompt of random tokens."""
    rng = random.Random(0)
    found = []
    for group in range(groups):
        prompt_tokens = tuple(rng.randrange(1000, 40_000) for _ in range(prompt))
        for number in range(each):
            sampled = tuple(rng.randrange(1000, 40_000) for _ in range(answer))
            record = TokenRecord(prompt_tokens, sampled, (), "length")
            found.append(
                Sample(
                    component, f"e{group}", "x", 0, record, rng.random(), (component, group), number
                )
            )
    return advantages(found)[0]


def peak() -> float:
    """Return the peak memory of this process in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def timed(step: Callable[[], object], repeats: int) -> list[float]:
    """Return the seconds of each step, after one warm-up step."""
    step()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return seconds


# -- measurements: each runs in a separate process ---------------------------------------------------------


def trainer_of(adapters: Adapters, optimizer: OptimizerSettings) -> Trainer:
    """Return a trainer of one component for each adapter."""
    spec = LearnerSpec(
        model="",
        shapes=adapters.spaces,
        adapter_of={name: name for name in adapters.spaces},
        loss=LOSS,
        optimizer=optimizer,
        rollouts=RolloutSettings(),
        section=SECTION,
    )
    return Trainer(adapters, spec)


def ours(
    prompt: int,
    answer: int,
    packed: bool,
    most: int = OPTIMIZER.micro_tokens,
    repeats: int = REPEATS,
    groups: int = 8,
    each: int = 4,
) -> dict[str, object]:
    """Measure our training step on groups of sequences, with at most ``most`` tokens per micro-batch."""
    adapters = Adapters("smollm2", {"x": LoRA(rank=16, targets=ATTENTION)})
    if not packed:
        adapters.unshared = "for comparison"
    trainer = trainer_of(adapters, OptimizerSettings(micro_tokens=most))
    before, rows = peak(), samples(prompt, answer, groups, each)
    seconds = timed(lambda: trainer.step(list(rows), 0), repeats)
    return {
        "seconds": median(seconds),
        "spread": [min(seconds), max(seconds)],
        "peak": peak(),
        "idle": before,
    }


def trls(prompt: int, answer: int, batches: int, repeats: int = REPEATS) -> dict[str, object]:
    """Measure TRL's trainer, with its loop and defaults, on these sequences in ``batches`` micro-batches."""
    import torch

    seconds: list[float] = []
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as out:
        rows = samples(prompt, answer, 8, 4)
        trainer = trl_trainer(
            resolve("smollm2"),
            rows,
            batches,
            repeats + 1,
            out,
            seconds.append,
            device=device,
            targets=ATTENTION_LAYERS,
        )
        before = peak()
        trainer.train()
    kept = seconds[1:]
    return {
        "seconds": median(kept),
        "spread": [min(kept), max(kept)],
        "peak": peak(),
        "idle": before,
    }


def trl_trainer(
    model: str | Path,
    rows: Sequence[Sample],
    batches: int,
    steps: int,
    out: str,
    on_step: Callable[[float], None],
    *,
    device: str,
    targets: str | Sequence[str] = "all-linear",
) -> GRPOTrainer:
    """Return TRL's trainer, which takes some steps on samples of equal lengths.

    Args:
        model: the folder of the base model.
        rows: the samples of each step.
        batches: the micro-batches of a step.
        steps: the number of steps.
        out: a folder for its files.
        on_step: called with the seconds of each step.
        device: where the model is loaded.
        targets: the layers with an adapter of rank 16.
    """
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from compound.engines.local.loading import fastest_dtype

    def synchronize() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    class Fed(GRPOTrainer):  # type: ignore[misc]  # mypy skips trl
        def _generate_and_score_completions(self, inputs: object) -> object:
            ids = torch.tensor([row.tokens.prompt for row in rows], device=device)
            answers = torch.tensor([row.tokens.sampled for row in rows], device=device)
            return {
                "prompt_ids": ids,
                "prompt_mask": torch.ones_like(ids),
                "completion_ids": answers,
                "completion_mask": torch.ones_like(answers),
                "num_items_in_batch": torch.tensor(answers.numel(), device=device),
                "advantages": torch.tensor([row.advantages[0] for row in rows], device=device),
            }

    class Clock(TrainerCallback):  # type: ignore[misc]  # as above
        def on_step_begin(self, *_: object, **__: object) -> None:
            synchronize()
            self.start = time.perf_counter()

        def on_step_end(self, *_: object, **__: object) -> None:
            synchronize()
            on_step(time.perf_counter() - self.start)

    loaded, tokenizer = load_causal(Path(model), fastest_dtype(device), device=device)
    arguments = GRPOConfig(
        output_dir=out,
        per_device_train_batch_size=len(rows) // batches,
        gradient_accumulation_steps=batches,
        num_generations=rows_per_group(rows),
        max_completion_length=len(rows[0].tokens.sampled),
        max_steps=steps,
        beta=0.0,
        report_to=[],
        use_cpu=device == "cpu",
        bf16=False,
        save_strategy="no",
        gradient_checkpointing=False,
        loss_type="grpo",
        logging_strategy="no",
        disable_tqdm=True,
    )
    layers = targets if isinstance(targets, str) else list(targets)
    return Fed(
        model=loaded,
        reward_funcs=lambda **_: [0.0],
        args=arguments,
        callbacks=[Clock()],
        train_dataset=Dataset.from_list([{"prompt": "go"}] * len(rows)),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=layers),
    )


def rows_per_group(rows: Sequence[Sample]) -> int:
    """Return the number of samples of the first group."""
    return sum(row.group == rows[0].group for row in rows)


def several(count: int) -> dict[str, object]:
    """Measure the memory of training ``count`` adapters on one base."""
    names = [f"x{number}" for number in range(count)]
    adapters = Adapters("smollm2", {name: LoRA(rank=16, targets=ATTENTION) for name in names})
    trainer = trainer_of(adapters, OPTIMIZER)
    rows = [row for name in names for row in samples(96, 16, 2, 4, name)]
    for number in range(2):
        trainer.step(list(rows), number)
    size = sum(
        tensor.numel() * tensor.element_size() for _, tensor in adapters.parameters(names[0])
    )
    return {"peak": peak(), "adapter": size / 2**20}


def sampled() -> dict[str, object]:
    """Measure 64 concurrent examples through a graph, and the same requests sent to the engine directly."""
    from compound.components.llm import LLM
    from compound.core.engine import Completion, Request
    from compound.engines.local.engine import TransformersEngine
    from compound.execution.executor import Executor
    from compound.graph.component import Input
    from compound.graph.system import System

    engine = TransformersEngine("smollm2")
    asked: list[Request] = []

    class Noted:
        """Engine wrapper that records requests."""

        def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any attribute of the engine
            return getattr(engine, name)

        async def generate(self, request: Request) -> Completion:
            asked.append(request)
            return await engine.generate(request)

    component = LLM(
        "writer",
        prompt="Write a sentence about the topic.",
        max_tokens=32,
        weights=LoRA(targets=ATTENTION),
        temperature=1.0,
    )
    system = System("one", outputs={"text": component(topic=Input("topic"))}, lm="lm")
    topics = [f"the number {number} and what people say of it" for number in range(64)]

    async def graph(seed: int, lm: object) -> None:
        executor = Executor({"lm": cast("Engine", lm)}, seed=seed)
        await asyncio.gather(
            *(
                executor.run(system, {"topic": topic}, example=topic, sample=seed)
                for topic in topics
            )
        )

    async def both() -> dict[str, object]:
        """Answer the same requests both ways, alternately, in one process."""
        await graph(0, Noted())
        ratios, rates = [], []
        for repeat in range(1, REPEATS + 1):
            asked.clear()
            start = time.perf_counter()
            await graph(repeat, Noted())
            middle = time.perf_counter()
            answers = await asyncio.gather(*(engine.generate(request) for request in list(asked)))
            end = time.perf_counter()
            ratios.append((end - middle) / (middle - start))
            rates.append(sum(a.usage.completion_tokens for a in answers) / (end - middle))
        await engine.aclose()
        return {
            "ratio": median(ratios),
            "tokens_per_second": median(rates),
            "spread": [min(ratios), max(ratios)],
        }

    return asyncio.run(both())


def prefilled(method: str) -> dict[str, object]:
    """Measure the prompt tokens of a training step on Atlas, and how many of them were reused."""
    program = load(ATLAS)
    assert program.data
    assert program.metric
    settings = make_settings(
        {
            **program.optimize.given,
            "method": method,
            "valid_size": 5,
            "test_size": 1,
            method: {"steps": 1, "optimizer": {"lr": 1e-3}},
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        run_optimization(
            program.system,
            program.data,
            program.metric,
            settings,
            run_dir=Path(folder) / "run",
            engines=program.find_engine,
        )
        records = read_records(Path(folder) / "run" / "memory.jsonl")
        first = next(record for record in records if record.get("kind") == "training")
    read, cached = first["prompt_tokens"], first["prompt_tokens_cached"]
    return {"prompt_tokens": read, "cached": cached, "share": cached / read}


MEASURES: Mapping[str, Callable[..., dict[str, object]]] = {
    "ours": ours,
    "trls": trls,
    "several": several,
    "sampled": sampled,
    "prefilled": prefilled,
}


def alone(measure: str, *arguments: object) -> dict[str, object]:
    """Run one measurement in a separate process."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.measure.training.weights_speed",
        "--measure",
        json.dumps([measure, *arguments]),
    ]
    ran = subprocess.run(command, check=False, capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(ran.stderr)
    found: dict[str, object] = json.loads(ran.stdout.splitlines()[-1])
    return found


# -- parts -------------------------------------------------------------------------------------------------


Measurement = tuple[str, *tuple[object, ...]]


def interleaved(
    measurements: Mapping[str, Measurement], run: Callable[..., Mapping[str, object]] | None = None
) -> dict[str, object]:
    """Alternate measurements of one step each, in reverse order every other turn.

    Returns:
        The seconds (median, spread, and list) and the largest peak of each measurement by name, and
        the load of the machine before the first.

    >>> one = {"seconds": 1.0, "peak": 2.0, "idle": 1.0}
    >>> found = interleaved({"a": ("x",), "b": ("y",)}, lambda kind: one)
    >>> found["a"]["each"], found["b"]["spread"]
    ([1.0, 1.0, 1.0, 1.0, 1.0], [1.0, 1.0])
    """
    run, load = run or alone, os.getloadavg()[0]
    rows: dict[str, list[Mapping[str, object]]] = {name: [] for name in measurements}
    for turn in range(TURNS):
        names = list(measurements)
        for name in names if turn % 2 == 0 else names[::-1]:
            rows[name].append(run(*measurements[name]))
    found: dict[str, object] = {"load": load}
    for name, some in rows.items():
        each = [entry(row, "seconds", (int, float)) for row in some]
        found[name] = {
            "seconds": median(each),
            "spread": [min(each), max(each)],
            "each": each,
            "peak": max(entry(row, "peak", (int, float)) for row in some),
            "idle": max(entry(row, "idle", (int, float)) for row in some),
        }
    return found


def step() -> dict[str, object]:
    """Compare a training step with TRL's."""
    most = OPTIMIZER.micro_tokens
    return interleaved(
        {
            "trl": ("trls", 192, 32, 1, 1),
            "ours": ("ours", 192, 32, False, most, 1),
            "ours with shared prompts": ("ours", 192, 32, True, most, 1),
        }
    )


def shared() -> dict[str, object]:
    """Compare computing prompts once per group with computing them for every sample, and with TRL."""
    most = OPTIMIZER.micro_tokens
    return interleaved(
        {
            "trl": ("trls", 320, 32, 2, 1),  # all at once would not fit into 24 GB
            "every": ("ours", 320, 32, False, most, 1),
            "once": ("ours", 320, 32, True, most, 1),
        }
    )


def long() -> dict[str, object]:
    """Compare both on a group of eight samples with a prompt of 1,500 tokens."""
    most = OPTIMIZER.micro_tokens
    return interleaved(
        {
            "every": ("ours", 1500, 32, False, most, 1, 1, 8),
            "once": ("ours", 1500, 32, True, most, 1, 1, 8),
        }
    )


def adapters() -> dict[str, object]:
    """Measure the growth of memory with the number of adapters."""
    found = {str(count): alone("several", count) for count in (1, 2, 4, 8)}
    one, eight = (entry(found[count], "peak", (int, float)) for count in ("1", "8"))
    adapter = entry(found["1"], "adapter", (int, float))
    return {**found, "grown_by_each": (eight - one) / 7, "adapter_and_optimizer": 4 * adapter}


def batches() -> dict[str, object]:
    """Measure time and memory by the number of tokens per micro-batch."""
    return {str(most): alone("ours", 240, 16, False, most) for most in (1024, 2048, 4096, 8192)}


def sampling() -> dict[str, object]:
    """Compare sampling through a graph with the engine alone."""
    return alone("sampled")


def prefill() -> dict[str, object]:
    """Measure the prompt tokens of a step's rollouts, and how many of them are reused, by method."""
    return {
        method: alone("prefilled", method)
        for method in ("mmgrpo", "mhgpo_is", "mhgpo_fof", "mhgpo_rr")
    }


PARTS: Mapping[str, Callable[[], dict[str, object]]] = {
    "step": step,
    "shared": shared,
    "long": long,
    "adapters": adapters,
    "batches": batches,
    "sampling": sampling,
    "prefill": prefill,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the given parts, or all, and keep the others."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], default=[])
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.measure:
        warnings.simplefilter("ignore")
        name, *given = json.loads(args.measure)
        print(json.dumps(MEASURES[name](*given)))
        return
    known = json.loads(OUTPUT.read_text(encoding="utf-8")) if OUTPUT.exists() else {}
    for part in args.parts or PARTS:
        known[part] = PARTS[part]()
        OUTPUT.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        print(f"{part}: {json.dumps(known[part], indent=1)}")


if __name__ == "__main__":
    main()
