"""Measure the throughput of the in-process engine: 64 concurrent calls, one direct batch, single calls.

``python -m benchmarks.measure.engine_throughput`` prints and saves JSON. All three methods answer
the same prompts greedily with the same number of new tokens (end tokens are disabled), in one
process and number format, so that the ratios are also valid on a busy machine. There are two shapes
of prompts: ``shared``, as compound systems send them (the same instruction and demonstrations,
another question), and ``different``, with only the chat template in common.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from compound.core.engine import Completion, Message, Request
from compound.engines import models
from compound.engines.local import loading
from compound.engines.local.devices import resolve_device
from compound.engines.local.engine import TransformersEngine

OUTPUT = Path(__file__).parents[1] / "data" / "engine_throughput.json"
INSTRUCTION = (
    "Answer the question in a few words, using the passages. "
    "Say 'unknown' if they do not hold the answer."
)
PLACES = (
    "Oslo",
    "Lima",
    "Cairo",
    "Quito",
    "Hanoi",
    "Dakar",
    "Turin",
    "Perth",
    "Osaka",
    "Delhi",
    "Porto",
    "Basel",
)
THINGS = (
    "river",
    "bridge",
    "harbour",
    "tower",
    "museum",
    "garden",
    "market",
    "library",
    "castle",
    "station",
)


def fact(rng: random.Random) -> str:
    """Return a fictitious passage of about thirty tokens."""
    place, thing = rng.choice(PLACES), rng.choice(THINGS)
    return (
        f"The oldest {thing} of {place} was opened in {rng.randint(1500, 2000)} and is {rng.randint(10, 900)}"
        f" metres from the {rng.choice(THINGS)}, which {rng.choice(PLACES)} gave to the town."
    )


def question(rng: random.Random, passages: int) -> str:
    """Return passages and a question about one of them."""
    return (
        "\n".join(f"[{i + 1}] {fact(rng)}" for i in range(passages))
        + f"\nQuestion: when was the oldest {rng.choice(THINGS)} of {rng.choice(PLACES)} opened?"
    )


def prompts(shape: str, n: int) -> list[str]:
    """Return ``n`` prompts of about 350 shared and 50 distinct tokens, or of 150 to 250 distinct tokens."""
    rng = random.Random(0)
    if shape == "different":
        return [question(rng, rng.randint(4, 6)) for _ in range(n)]
    demos = "\n\n".join(f"{question(rng, 2)}\nAnswer: {rng.randint(1500, 2000)}" for _ in range(4))
    return [f"{INSTRUCTION}\n\n{demos}\n\n{question(rng, 1)}\nAnswer:" for _ in range(n)]


def ask(text: str, new_tokens: int) -> Request:
    """Return the request for a prompt."""
    return Request((Message("user", text),), max_tokens=new_tokens)


def endless(name: str, folder: Path) -> str:
    """Copy a model into a folder without its end token, so that every answer has the full length."""
    for file in models.resolve(name).iterdir():
        if file.suffix != ".json" or file.name == "tokenizer.json":
            (folder / file.name).symlink_to(file.resolve())
            continue
        settings = json.loads(file.read_text())
        (folder / file.name).write_text(
            json.dumps(settings | {"eos_token_id": None, "eos_token": None})
        )
    return str(folder)


class Direct:
    """Baseline that calls `model.generate` on all prompts as one left-padded batch."""

    def __init__(self, name: str, dtype: str) -> None:
        self.model, self.tokenizer = loading.load(name, dtype)
        self.tokenizer.padding_side = "left"
        self.tokenizer.pad_token_id = 0

    def __call__(self, requests: Sequence[Request]) -> list[str]:
        """Return the answers' texts."""
        chats = [[{"role": m.role, "content": m.text} for m in r.messages] for r in requests]
        texts = self.tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, tokenize=False
        )
        batch = self.tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
        out = self.model.generate(
            **batch.to(self.model.device),
            max_new_tokens=requests[0].max_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        new = out[:, batch["input_ids"].shape[1] :]
        return list(self.tokenizer.batch_decode(new, skip_special_tokens=True))


async def together(engine: TransformersEngine, requests: Sequence[Request]) -> list[Completion]:
    """Make all calls concurrently."""
    return list(await asyncio.gather(*(engine.generate(request) for request in requests)))


async def one_by_one(engine: TransformersEngine, requests: Sequence[Request]) -> list[Completion]:
    """Make the calls sequentially."""
    return [await engine.generate(request) for request in requests]


Result = TypeVar("Result")


def timed(work: Callable[[], Result]) -> tuple[float, Result]:
    """Return the seconds that a function took, and its result."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def measure(shape: str, folder: str, args: argparse.Namespace, direct: Direct) -> dict[str, object]:
    """Time the three methods on one shape of prompts; every engine starts without cached prefixes."""
    requests = [ask(text, args.new_tokens) for text in prompts(shape, args.calls)]
    few = requests[: args.alone]
    engine = TransformersEngine(folder, dtype=args.dtype, max_batch=args.calls)
    lone = TransformersEngine(folder, dtype=args.dtype, max_batch=args.calls)
    warm = [ask("Hello.", 2)]
    with asyncio.Runner() as runner:
        for one in (engine, lone):
            runner.run(one_by_one(one, warm))
        seconds, answers = timed(lambda: runner.run(together(engine, requests)))
        direct(warm)
        direct_seconds, texts = timed(lambda: direct(requests))
        alone_seconds, _ = timed(lambda: runner.run(one_by_one(lone, few)))
        for one in (engine, lone):
            runner.run(one.aclose())
    new = args.new_tokens * args.calls
    read = sum(answer.usage.prompt_tokens for answer in answers)
    rates = {
        "engine": new / seconds,
        "direct": new / direct_seconds,
        "one_by_one": args.new_tokens * len(few) / alone_seconds,
    }
    return {
        "prompt_tokens": {"total": read, "mean": round(read / args.calls, 1)},
        "new_tokens": new,
        "seconds": {
            "engine": round(seconds, 2),
            "direct": round(direct_seconds, 2),
            f"one_by_one, {len(few)} calls": round(alone_seconds, 2),
        },
        "new_tokens_per_second": {name: round(rate, 1) for name, rate in rates.items()},
        "prompt_tokens_per_second": {
            "engine": round(read / seconds, 1),
            "direct": round(read / direct_seconds, 1),
        },
        "engine_to_direct": round(rates["engine"] / rates["direct"], 2),
        "engine_to_one_by_one": round(rates["engine"] / rates["one_by_one"], 2),
        "equal_texts": sum(a.text == text for a, text in zip(answers, texts, strict=True)),
    }


def main() -> None:
    """Measure, print and save."""
    import torch
    import transformers

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"]
    )
    parser.add_argument("--calls", type=int, default=64)
    parser.add_argument("--alone", type=int, default=12, help="number of sequential calls")
    parser.add_argument("--new-tokens", type=int, default=32)
    args = parser.parse_args()
    args.dtype = loading.fastest_dtype() if args.dtype == "auto" else args.dtype
    with tempfile.TemporaryDirectory() as temporary:
        folder = endless(args.model, Path(temporary))
        direct = Direct(folder, args.dtype)
        shapes = {shape: measure(shape, folder, args, direct) for shape in ("shared", "different")}
    result = {
        "model": args.model,
        "dtype": args.dtype,
        "device": resolve_device(),
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "calls": args.calls,
        "new_tokens_each": args.new_tokens,
        **shapes,
    }
    text = json.dumps(result, indent=2)
    print(text)
    OUTPUT.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
