"""Measure training on a GPU that a vLLM server of the same run shares with the trainer.

    python -m benchmarks.measure.gpu.server [--tokenizer FOLDER]

A system of two components is trained by mmGRPO for a few steps, with random models of the shapes of
Qwen3 and a reward that varies. The run starts vLLM on the trainer's GPU, with and without sleep.
Besides the times of the steps, the used memory of the GPU is recorded: before the run, while the
server samples, and while it sleeps, just before the trainer computes. Each case runs in a separate
process. Results are written to ``benchmarks/data/one_gpu_server.json``. ``COMPOUND_VLLM`` names the
``vllm`` command.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from pathlib import Path

from benchmarks.measure.gpu.models import GPU, random_model
from compound.api.optimize import run_optimization
from compound.components.llm import LLM
from compound.core.example import Example
from compound.engines.models import resolve
from compound.engines.vllm.engine import VLLMEngine
from compound.evaluation.dataset import Dataset
from compound.evaluation.metrics.custom import custom
from compound.graph.component import Input
from compound.graph.space import LoRA
from compound.graph.system import System
from compound.optimization.runs.directory import read_records
from compound.optimization.settings.optimize import make_settings

OUTPUT = Path(__file__).parents[2] / "data" / "one_gpu_server.json"
CASES = (("0.6B", True), ("0.6B", False), ("8B", True), ("8B", False))  # size of the base, sleep
STEPS, EXAMPLES, RUNS, ANSWER = 4, 8, 8, 128


def used() -> int:
    """Return the bytes of the GPU in use, by all processes."""
    import torch

    free, total = torch.cuda.mem_get_info(GPU)
    return int(total - free)


class Watched(VLLMEngine):
    """A vLLM engine that records the used memory of the GPU when its server sleeps and when it wakes."""

    seen: dict[str, list[int]]

    @contextlib.asynccontextmanager
    async def asleep(self, gpus: Collection[str]) -> AsyncIterator[bool]:
        """Record the memory around the turn of the trainer."""
        self.seen["awake"].append(used())
        start = time.perf_counter()
        async with super().asleep(gpus) as slept:
            self.seen["milliseconds to sleep"].append(int(1000 * (time.perf_counter() - start)))
            self.seen["asleep"].append(used())
            yield slept
            self.seen["trained"].append(used())


def vowels(outputs: Mapping[str, object], _: Example) -> float:
    """Return the share of vowels in the answers, a reward that differs between samples."""
    text = "".join(map(str, outputs.values())).lower()
    return sum(text.count(vowel) for vowel in "aeiou") / max(1, len(text))


def case(name: str, tokenizer: Path, *, sleep: bool) -> dict[str, object]:
    """Train with one size of the base; return times and memory."""
    import torch

    with random_model(name, tokenizer) as model, tempfile.TemporaryDirectory() as folder:
        before = used()
        engine = Watched(
            model,
            sleep=sleep,
            max_lora_rank=16,
            max_loras=2,
            args=("--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "64"),
        )
        engine.seen = {"awake": [], "milliseconds to sleep": [], "asleep": [], "trained": []}
        components = {
            part: LLM(
                part, prompt="Say something.", max_tokens=ANSWER, temperature=1.0, weights=LoRA()
            )
            for part in ("one", "two")
        }
        outputs = {part: made(topic=Input("topic", str)) for part, made in components.items()}
        system = System("pair", outputs=outputs, lm="lm")
        rows = [{"id": str(n), "topic": f"the number {n}"} for n in range(2 * EXAMPLES)]
        data = Dataset.of(train=rows[:EXAMPLES], valid=rows[EXAMPLES:])
        settings = make_settings(
            {
                "method": "mmgrpo",
                "seed": 0,
                "valid_size": EXAMPLES,
                "mmgrpo": {
                    "steps": STEPS,
                    "rollouts": {"examples": EXAMPLES, "runs": RUNS},
                    "base": {"gradient_checkpointing": name == "8B"},
                },
            }
        )
        run = Path(folder) / "run"
        start = time.perf_counter()
        run_optimization(
            system, data, custom(vowels, "vowels"), settings, run_dir=run, engines=lambda _: engine
        )
        seconds = time.perf_counter() - start
        steps = [r for r in read_records(run / "memory.jsonl") if r.get("kind") == "training"]
        return {
            "gpu": torch.cuda.get_device_name(0),
            "torch": torch.__version__,
            "seconds": seconds,
            "share": engine._gpu_memory_left,
            "before": before,
            "memory": engine.seen,
            "steps": [
                {k: v for k, v in step.items() if isinstance(v, int | float)} for step in steps
            ],
        }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all cases, each in a separate process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokenizer", type=Path, help="a folder with a tokenizer; default: that of smollm2"
    )
    parser.add_argument("--out", type=Path, default=OUTPUT)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    tokenizer = args.tokenizer or Path(resolve("smollm2"))
    if args.case:
        warnings.simplefilter("ignore")
        name, sleep = json.loads(args.case)
        print(json.dumps(case(name, tokenizer, sleep=sleep)))
        return
    found: dict[str, object] = {}
    for name, sleep in CASES:
        command = [
            sys.executable,
            "-m",
            "benchmarks.measure.gpu.server",
            "--tokenizer",
            str(tokenizer),
            "--case",
            json.dumps([name, sleep]),
        ]
        ran = subprocess.run(command, check=False, capture_output=True, text=True)
        title = f"{name}{' with sleep' if sleep else ''}"
        found[title] = (
            json.loads(ran.stdout.splitlines()[-1])
            if ran.returncode == 0
            else {"error": ran.stderr[-3000:]}
        )
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"{title}: {json.dumps(found[title])}", flush=True)


if __name__ == "__main__":
    main()
