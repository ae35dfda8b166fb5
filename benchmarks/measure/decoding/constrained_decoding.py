"""Measure constrained decoding: valid answers for generated schemas, and its cost in tokens per second.

``python -m benchmarks.measure.decoding.constrained_decoding`` prints and saves JSON.

Validity: the embedded model answers at temperature 1 for each schema, once constrained and once
    free with the
same prompt. Most strings and arrays have no length limit: without the engine, which closes them,
their answers would be cut. An independent library (jsonschema) checks every answer against the
original schema.

Speed: in each round, the same batch of requests is answered constrained and free, in alternating
    order, and
each free answer has as many tokens as the constrained one. Ratios within a round are also valid on
a busy machine.

``--compare`` additionally compiles all schemas with the libraries that are installed (llguidance,
outlines-core, xgrammar), and computes the allowed tokens along the recorded answers.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from benchmarks.measure.decoding.grammar_libraries import compare
from compound.components.answers.answer_types import describe, enforceable
from compound.core.engine import AnswerFormat, Completion, Message, Request
from compound.engines.local.devices import resolve_device
from compound.engines.local.engine import TransformersEngine
from compound.graph.json_types import json_type

OUTPUT = Path(__file__).parents[2] / "data" / "constrained_decoding.json"
WORDS = (
    *(
        "name",
        "age",
        "city",
        "color",
        "items",
        "price",
        "rating",
        "notes",
        "owner",
        "status",
        "tags",
    ),
    *("title", "total", "active", "height", "parts", "summary", "country", "score", "friends"),
)
LABELS = ("red", "green", "blue", "small", "medium", "large", "open", "closed", "new", "used")
DEPTH = 3  # maximum nesting of objects and arrays below the root
SPEED_TOKENS = 64
Schema = dict[str, Any]


def nested_schema(rng: random.Random) -> Schema:
    """Return a schema of an object with nested objects and arrays; one in eight is recursive."""
    root = _object(rng, DEPTH)
    if rng.random() < 1 / 8:
        node = _object(rng, 1)
        node["properties"]["next"] = {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}
        node["required"].append("next")
        root["properties"]["chain"] = {"$ref": "#/$defs/Node"}
        root["required"].append("chain")
        root["$defs"] = {"Node": node}
    return root


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(WORDS, rng.randint(2, 4))
    parts = {name: _value(rng, depth - 1) for name in names}
    if depth == DEPTH:  # at least one nested object and one array
        parts["details"], parts["list"] = _object(rng, depth - 1), _array(rng, depth - 1)
    required = [name for name in parts if rng.random() < 0.8] or names[:1]
    return {
        "type": "object",
        "properties": parts,
        "required": required,
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> Schema:
    limits = rng.choice([{}, {}, {"minItems": 1}, {"minItems": 1, "maxItems": 3}])
    return {"type": "array", "items": _value(rng, depth - 1), **limits}


def _value(rng: random.Random, depth: int) -> Schema:
    plain: list[Schema] = [
        {"type": "string"},
        {"type": "string", "maxLength": rng.randint(5, 40)},
        {"enum": rng.sample(LABELS, 3)},
        {"type": "integer"},
        {"type": "integer", "minimum": rng.randint(-5, 0), "maximum": rng.randint(1, 500)},
        {"type": "number"},
        {"type": "boolean"},
        {"anyOf": [{"type": "string"}, {"type": "null"}]},
    ]
    if depth > 0 and rng.random() < 0.5:
        return _object(rng, depth) if rng.random() < 0.5 else _array(rng, depth)
    return rng.choice(plain)


def request(schema: Schema, seed: int, max_tokens: int, *, constrained: bool) -> Request:
    """Return the request for an example of a schema."""
    shape = describe(json_type(schema))
    answer = AnswerFormat(schema=json.dumps(enforceable(schema)))
    return Request(
        (Message("user", f"Invent an example. It must be JSON: {shape}"),),
        max_tokens=max_tokens,
        temperature=1.0,
        seed=seed,
        format=answer if constrained else None,
    )


def is_valid(schema: Schema, text: str) -> bool:
    """Return whether a text is JSON that a schema accepts."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return bool(Draft202012Validator(schema).is_valid(value))


async def together(engine: TransformersEngine, requests: Sequence[Request]) -> list[Completion]:
    """Make all calls concurrently."""
    return list(await asyncio.gather(*(engine.generate(one) for one in requests)))


def validity(
    runner: asyncio.Runner,
    engine: TransformersEngine,
    schemas: Sequence[Schema],
    args: argparse.Namespace,
) -> tuple[dict[str, object], list[str]]:
    """Answer for every schema, constrained and free; return the shares of valid answers, and the answers."""
    found: dict[str, object] = {}
    texts: dict[bool, list[str]] = {}
    for constrained in (True, False):
        requests = [
            request(schema, number, args.max_tokens, constrained=constrained)
            for number, schema in enumerate(schemas)
        ]
        answers = runner.run(together(engine, requests))
        texts[constrained] = [answer.text for answer in answers]
        found["constrained" if constrained else "free"] = {
            "valid": sum(map(is_valid, schemas, texts[constrained])),
            "of": len(schemas),
            "cut_at_max_tokens": sum(answer.finish_reason == "length" for answer in answers),
            "mean_tokens": round(
                statistics.mean(answer.usage.completion_tokens for answer in answers), 1
            ),
            "longest": max(answer.usage.completion_tokens for answer in answers),
        }
    return found, texts[True]


def speed(
    runner: asyncio.Runner,
    engine: TransformersEngine,
    schemas: Sequence[Schema],
    args: argparse.Namespace,
) -> dict[str, object]:
    """Time batches of constrained and free requests in interleaved pairs."""
    bound = [
        request(s, n, SPEED_TOKENS, constrained=True) for n, s in enumerate(schemas[: args.batch])
    ]
    first = runner.run(together(engine, bound))
    free = [
        replace(one, format=None, max_tokens=answer.usage.completion_tokens)
        for one, answer in zip(bound, first, strict=True)
    ]
    runner.run(together(engine, free[:1]))
    rates: dict[str, list[float]] = {"constrained": [], "free": []}
    cpu: dict[str, list[float]] = {"constrained": [], "free": []}
    for number in range(args.rounds):
        arms = [("constrained", bound), ("free", free)]
        for name, requests in arms if number % 2 else reversed(arms):
            started, used = time.perf_counter(), time.process_time()
            tokens = sum(a.usage.completion_tokens for a in runner.run(together(engine, requests)))
            rates[name].append(round(tokens / (time.perf_counter() - started), 2))
            cpu[name].append(round(1000 * (time.process_time() - used) / tokens, 3))
    pairs = [c / f for c, f in zip(rates["constrained"], rates["free"], strict=True)]
    work = [c / f for c, f in zip(cpu["constrained"], cpu["free"], strict=True)]
    return {
        "batch": len(bound),
        "tokens_per_second": rates,
        "cpu_milliseconds_per_token": cpu,
        "ratios": [round(ratio, 3) for ratio in pairs],
        "median_ratio": round(statistics.median(pairs), 3),
        "median_cpu_ratio": round(statistics.median(work), 3),
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--compare", action="store_true", help="compare the installed grammar libraries"
    )
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    schemas = [nested_schema(random.Random(number)) for number in range(args.schemas)]
    engine = TransformersEngine(args.model, dtype=args.dtype)
    with asyncio.Runner() as runner:
        valid, texts = validity(runner, engine, schemas, args)
        print(json.dumps(valid), flush=True)
        cost = speed(runner, engine, schemas, args)
        runner.run(engine.aclose())
    found: dict[str, object] = {
        "model": args.model,
        "dtype": args.dtype,
        "device": resolve_device(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "versions": {
            n: importlib.metadata.version(n) for n in ("llguidance", "torch", "transformers")
        },
        "max_tokens": args.max_tokens,
        "validity": valid,
        "speed": cost,
    }
    if args.compare:
        found["libraries"] = compare(args.model, [enforceable(schema) for schema in schemas], texts)
    args.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
