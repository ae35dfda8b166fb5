"""Import programs of installed libraries, optimize them, take them back, and compare the results.

Run ``python -m benchmarks.measure.interchange``; it takes half an hour on two cores.

Prints one JSON object and writes it to ``benchmarks/data/interchange.json``. Each program is
optimized with method ``search`` twice: against a scripted model, which answers rightly only after a
demonstration, and against SmolLM2, both behind an OpenAI-compatible server on loopback. The
optimized programs then run in their own library, and exported requests without this package; the
rows count on how many test inputs they return what the optimized system returns. Agents of other
frameworks choose between SmolLM2 and Gemma 3 270M (``compound models get gemma3-270m``).
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import compound as cp
from benchmarks.measure.interchange.agents import AGENTS, measure_agent
from benchmarks.measure.interchange.chat_server import ChatServer
from benchmarks.measure.interchange.local_server import LocalServer
from benchmarks.measure.interchange.programs import PROGRAMS
from benchmarks.measure.interchange.tasks import scripted, things, uppercase
from benchmarks.measure.interchange.trial import MODEL, Trial

OUTPUT = Path(__file__).parents[2] / "data" / "interchange.json"


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument(
        "--without-models", action="store_true", help="measure the scripted model only"
    )
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any] | None) -> None:
        if row is not None:
            rows.append(row)
            options.output.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with ChatServer(scripted) as server:
            engine = cp.engines.LiteLLM(MODEL, api_base=server.url, price=(0, 0))
            trial = Trial("scripted", uppercase(), folder / "scripted", server.url, engine)
            for measure in PROGRAMS:
                add(measure(trial))
        if not options.without_models:
            with LocalServer("smollm2") as local:
                engine = cp.engines.LiteLLM(MODEL, api_base=local.url, price=(0, 0))
                trial = Trial("smollm2", things(), folder / "smollm2", local.url, engine)
                for measure in PROGRAMS:
                    add(measure(trial))
            for agent in AGENTS:
                add(measure_agent(agent, folder / "agents"))
    print(options.output.read_text("utf-8"))


if __name__ == "__main__":
    main()
