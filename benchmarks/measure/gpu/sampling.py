"""Sampling on a GPU: its speed, and the agreement of its log-probabilities with the trainer's."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.measure.gpu.models import GPU, RANK, REPEATS, emptied, random_model, spread
from compound.core.engine import Message, Request, TokenRecord
from compound.engines.local.devices import Placement
from compound.engines.local.engine import TransformersEngine
from compound.graph.space import LoRA
from compound.optimizers.weights.learner.adapters import Adapters
from compound.optimizers.weights.learner.forward import forward
from compound.optimizers.weights.learner.samples import Sample

REQUESTS, ANSWER = 64, 64  # requests at a time, and tokens of an answer


def sampling(tokenizer: Path) -> dict[str, object]:
    """Compare the tokens per second of 64 requests in the engine and in transformers' ``generate``."""
    return {name: _sampling(name, tokenizer) for name in ("0.6B", "8B")}


def requests(seed: int) -> list[Request]:
    """Return requests with random prompts of about 300 tokens."""
    rng = random.Random(seed)
    prompts = (" ".join(str(rng.randrange(10**6)) for _ in range(40)) for _ in range(REQUESTS))
    return [
        Request((Message("user", prompt),), ANSWER, temperature=1.0, seed=number, want_tokens=True)
        for number, prompt in enumerate(prompts)
    ]


def _sampling(name: str, tokenizer: Path) -> dict[str, object]:
    with random_model(name, tokenizer) as folder:
        emptied()
        found = asyncio.run(_rates(TransformersEngine(folder, device=GPU)))
    emptied()
    return found


async def _rates(engine: TransformersEngine) -> dict[str, object]:
    import torch

    async def ask(seed: int) -> int:
        return sum(len(record.sampled) for record in await _records(engine, seed))

    await ask(0)  # loads the model
    generate = Generate(engine)
    generate()
    rates: dict[str, list[float]] = {"engine": [], "generate": []}
    for seed in range(1, REPEATS + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        sampled = await ask(seed)
        torch.cuda.synchronize()
        middle = time.perf_counter()
        generate()
        torch.cuda.synchronize()
        rates["engine"].append(sampled / (middle - start))
        rates["generate"].append(REQUESTS * ANSWER / (time.perf_counter() - middle))
    peak = torch.cuda.max_memory_allocated()
    await engine.aclose()
    return {
        **{kind: spread(values) for kind, values in rates.items()},
        "peak": peak,
        "prompt_tokens": float(generate.mask.sum(1, dtype=torch.float32).mean()),
    }


async def _records(engine: TransformersEngine, seed: int) -> list[TokenRecord]:
    answers = await asyncio.gather(*map(engine.generate, requests(seed)))
    return [answer.tokens for answer in answers if answer.tokens]


class Generate:
    """transformers' ``generate`` on the model of an engine and on one batch of its prompts."""

    def __init__(self, engine: TransformersEngine) -> None:
        import torch
        from torch.nn.utils.rnn import pad_sequence

        assert engine._decoder is not None
        self.model: Any = engine._decoder._model
        prompts = [torch.tensor(engine._prompt(request)) for request in requests(1)]
        self.ids, self.mask = (
            pad_sequence(rows, batch_first=True, padding_side="left").to(GPU)
            for rows in (prompts, [torch.ones_like(prompt) for prompt in prompts])
        )

    def __call__(self) -> None:
        """Sample answers of the full length."""
        import torch

        with torch.no_grad():
            self.model.generate(
                input_ids=self.ids,
                attention_mask=self.mask,
                max_new_tokens=ANSWER,
                min_new_tokens=ANSWER,
                do_sample=True,
                top_k=0,
                top_p=1.0,
                temperature=1.0,
                pad_token_id=0,
            )


def mismatch(tokenizer: Path) -> dict[str, object]:
    """Compare log-probabilities of sampled tokens between the sampler and the trainer."""
    with random_model("0.6B", tokenizer) as folder:
        found: dict[str, object] = {
            "bfloat16": _mismatch(folder, TransformersEngine(folder, device=GPU, dtype="bfloat16")),
            "float32": _mismatch(folder, TransformersEngine(folder, device=GPU, dtype="float32")),
        }
    emptied()
    return found


def _mismatch(folder: str, engine: TransformersEngine) -> dict[str, float]:
    async def ask() -> list[TokenRecord]:
        try:
            return await _records(engine, 0)
        finally:
            await engine.aclose()

    records = asyncio.run(ask())
    emptied()
    adapters = Adapters(folder, {"x": LoRA(rank=RANK)}, placement=Placement(GPU, engine.dtype))
    differences: list[float] = []
    for record in records:
        with adapters.using("x") as model:
            ran = forward(model, [Sample("x", "e", "x", 0, record, 0.0)], entropy=False)
        logps = ran.logps[0].detach().tolist()
        differences += [abs(a - b) for a, b in zip(logps, record.logprobs, strict=True)]
    return {"tokens": len(differences), "mean": fmean(differences), "largest": max(differences)}
