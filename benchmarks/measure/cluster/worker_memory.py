"""Measure the memory and the throughput of 1 and 3 workers on one machine whose system searches a corpus.

Run ``python -m benchmarks.measure.cluster.worker_memory`` where the extras ``ray`` and
``retrieval`` are installed. It starts a Ray cluster on this machine, prints one JSON object and
writes it to ``benchmarks/data/worker_memory.json``. Each worker holds the passages of the corpus;
the lexical index is a file in the cache folder of the machine that all of them map. The model is
simulated and answers after 200 ms, with as many examples in flight over all workers in both cases.

Memory is the sum of the proportional set sizes of the worker processes: a page that three processes
share counts a third in each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.measure.cluster.ray_overhead import opened, seconds_per_example
from compound.yaml.program import Program, load

OUTPUT = Path(__file__).parents[2] / "data" / "worker_memory.json"
IN_FLIGHT, EXAMPLES, WORDS = 12, 96, 60
FILE = """
system: searching
lm: simulated
inputs: {question: str}
components:
  searcher: {retriever: {index: bm25, corpus: corpus.jsonl, k: 5}, in: {query: $question}}
  answerer: {llm: {prompt: {tune: Answer.}}, in: {question: $question, passages: $searcher}}
outputs: {answer: $answerer}
engines:
  simulated: {class: "benchmarks.measure.cluster.ray_overhead:Simulated", settings: {seconds: 0.2}}
"""


def write_corpus(path: Path, passages: int) -> None:
    """Write passages of random words, with frequencies that fall as those of a language."""
    source = random.Random(0)
    vocabulary = [f"word{number}" for number in range(50_000)]
    weights = [1 / (number + 10) for number in range(len(vocabulary))]
    with path.open("w", encoding="utf-8") as file:
        for number in range(passages):
            text = " ".join(source.choices(vocabulary, weights, k=WORDS))
            file.write(
                json.dumps({"id": str(number), "title": f"question {number}", "text": text}) + "\n"
            )


def workers_mb() -> float:
    """Return the proportional set size of all worker processes of this cluster."""
    import psutil

    total = 0
    for process in psutil.Process().children(recursive=True):
        with suppress(OSError, psutil.Error):  # it has ended
            if "".join(process.cmdline()).startswith("ray::CallWorker"):
                total += process.memory_full_info().pss
    return total / 1e6


async def measured(program: Program, workers: int) -> dict[str, float]:
    """Return memory and throughput with a number of workers."""
    executor = opened(program, workers)
    await seconds_per_example(
        executor, program, 2 * IN_FLIGHT, IN_FLIGHT
    )  # loads the corpus in each
    each = await seconds_per_example(executor, program, EXAMPLES, IN_FLIGHT, start=1000)
    memory = workers_mb()
    await executor.aclose()
    return {"workers_mb": round(memory, 1), "examples_per_second": round(1 / each, 1)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and save."""
    import ray

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--passages", type=int, default=100_000)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args(arguments)
    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "searching.yaml"
        path.write_text(FILE, encoding="utf-8")
        write_corpus(Path(folder) / "corpus.jsonl", args.passages)
        found = {
            "python": platform.python_version(),
            "ray": ray.__version__,
            "passages": args.passages,
            "words": WORDS,
            "in_flight": IN_FLIGHT,
            "workers": {str(count): asyncio.run(measured(load(path), count)) for count in (1, 3)},
        }
    text = json.dumps(found, indent=2)
    print(text)
    args.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
