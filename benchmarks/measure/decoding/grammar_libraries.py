"""Compile JSON schemas with each installed grammar library, and time the computation of allowed tokens."""

from __future__ import annotations

import importlib.metadata
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from compound.engines.local import loading

LONGEST_COMPILE = 20.0  # seconds of all compilations of a library; further schemas are not compiled
Follow = Callable[[Sequence[int]], Iterator[float]]  # yields the seconds of each computation
Compile = Callable[[str], Follow]


def compare(model: str, schemas: Sequence[object], texts: Sequence[str]) -> dict[str, object]:
    """Compile every schema and follow its recorded answer, with each library that is installed."""
    network, tokenizer = loading.load(model, "float32")
    size = network.config.vocab_size
    answers = [tuple(tokenizer(text, add_special_tokens=False).input_ids) for text in texts]
    libraries = {"llguidance": _llguidance, "outlines_core": _outlines_core, "xgrammar": _xgrammar}
    found: dict[str, object] = {}
    for name, prepare in libraries.items():
        try:
            started = time.perf_counter()
            compiler = prepare(tokenizer, size)
            found[name] = {
                "version": importlib.metadata.version(name),
                "start_seconds": round(time.perf_counter() - started, 2),
                **_measured(compiler, schemas, answers),
            }
        except ImportError as error:
            found[name] = {"not_installed": str(error)[:200]}
    return found


def _measured(
    compiler: Compile, schemas: Sequence[object], answers: Sequence[Sequence[int]]
) -> dict[str, object]:
    compiled, masks = list[float](), list[float]()
    failed = followed = 0
    for schema, answer in zip(schemas, answers, strict=True):
        if sum(compiled) > LONGEST_COMPILE:
            break
        started = time.perf_counter()
        try:
            follow = compiler(json.dumps(schema))
            compiled.append(time.perf_counter() - started)
        except Exception:  # noqa: BLE001 - each library has its own errors
            failed += 1
            continue
        try:
            masks += follow(answer)
            followed += 1
        except ValueError:
            pass  # the answer has other separators than this library
    return {
        "compiled": len(compiled),
        "rejected": failed,
        "not_tried": len(schemas) - len(compiled) - failed,
        "answers_followed": followed,
        "compile_milliseconds_median": round(1000 * statistics.median(compiled), 2)
        if compiled
        else None,
        "compile_milliseconds_longest": round(1000 * max(compiled), 1) if compiled else None,
        "mask_microseconds_mean": round(1e6 * statistics.mean(masks), 1) if masks else None,
    }


def _llguidance(tokenizer: Any, size: int) -> Compile:  # noqa: ANN401 - a tokenizer without types
    from llguidance import LLMatcher, LLTokenizer
    from llguidance.hf import from_tokenizer

    tokens = from_tokenizer(tokenizer, n_vocab=size, slices=LLTokenizer.json_slices())

    def compiled(schema: str) -> Follow:
        matcher = LLMatcher(tokens, LLMatcher.grammar_from_json_schema(schema), log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        bits = np.empty(-(-size // 32), np.int32)

        def follow(answer: Sequence[int]) -> Iterator[float]:
            for token in answer:
                started = time.perf_counter()
                matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
                yield time.perf_counter() - started
                if not matcher.consume_token(token):
                    raise ValueError("the answer does not fit")

        return follow

    return compiled


def _outlines_core(tokenizer: Any, size: int) -> Compile:  # noqa: ANN401 - as above
    from outlines_core import Guide, Index, Vocabulary
    from outlines_core.json_schema import build_regex_from_schema

    entries: dict[bytes, list[int]] = {}
    for token in range(size):
        text = tokenizer.decode([token])
        if token != tokenizer.eos_token_id and text and "\ufffd" not in text:
            entries.setdefault(text.encode(), []).append(token)
    vocabulary = Vocabulary(tokenizer.eos_token_id, entries)

    def compiled(schema: str) -> Follow:
        guide = Guide(Index(build_regex_from_schema(schema), vocabulary))

        def follow(answer: Sequence[int]) -> Iterator[float]:
            for token in answer:
                started = time.perf_counter()
                guide.get_tokens()
                yield time.perf_counter() - started
                guide.advance(token)

        return follow

    return compiled


def _xgrammar(tokenizer: Any, size: int) -> Compile:  # noqa: ANN401 - as above
    import xgrammar

    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size)
    compiler = xgrammar.GrammarCompiler(info)
    bits = xgrammar.allocate_token_bitmask(1, size)

    def compiled(schema: str) -> Follow:
        matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(schema))

        def follow(answer: Sequence[int]) -> Iterator[float]:
            for token in answer:
                started = time.perf_counter()
                matcher.fill_next_token_bitmask(bits)
                yield time.perf_counter() - started
                if not matcher.accept_token(token):
                    raise ValueError("the answer does not fit")

        return follow

    return compiled
