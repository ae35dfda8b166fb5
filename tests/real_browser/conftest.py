"""A real browser for the tests of this folder.

Not part of the normal run: ``make test-browser`` sets REAL_BROWSER to the path of a Chromium. Without
it nothing here is collected.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from benchmarks.measure.studio import write_run
from compound.api.serving.server import listen
from compound.api.serving.settings import ServerSettings
from compound.api.studio.application import application

CHROMIUM = os.environ.get("REAL_BROWSER", "")
collect_ignore_glob = [] if CHROMIUM else ["*"]


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """The browser."""
    from playwright.sync_api import sync_playwright  # type: ignore[import-not-found, unused-ignore]

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two runs, of which one trained weights."""
    for name in ("one", "two"):
        write_run(tmp_path / name, examples=60, candidates=8)
    numbers = {"samples": 8, "tokens": 16, "length": 2.0, "reward": 0.5, "entropy": 1.0}
    answers = [
        {
            "tokens": [" Par", "is", "\u05d0\u05d1", "<b>"] * 30,
            "reward": reward,
            "length": 120,
            "advantage": reward - 0.5,
            "advantages": [(place % 9 - 4) / 4 for place in range(120)],
            "ratios": [1.1] * 120,
            "clipped": [0],
            "prompt": "Another prompt.",
        }
        for reward in (1.0, 0.0)
    ]
    group = {"component": "namer", "example": "e1", "prompt": "Name it.", "answers": answers}
    about = {"kind": "training", "seed": 1, "recipe": "PPO", "reward": 0.5, "excerpts": [group]}
    rows = [{**about, "step": step, "components": {"namer": numbers}} for step in range(3)]
    (tmp_path / "one" / "memory.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return tmp_path


@pytest.fixture
def studio(folder: Path) -> Iterator[str]:
    """The address of a studio of the folder."""
    settings = ServerSettings(port=0)
    listening = listen(settings)
    config = uvicorn.Config(application(folder, settings), log_level="warning", ws="none")
    config.timeout_graceful_shutdown = 1
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    server.should_exit = True
    thread.join()
    listening.close()
