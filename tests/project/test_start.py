"""The quickstart shows what its commands printed and took, and they still work as it says."""

from __future__ import annotations

import importlib.util
import math
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TRANSCRIPT = ROOT / "docs" / "examples" / "shop" / "transcript.txt"


@pytest.fixture(scope="module")
def recorder() -> Any:
    made = importlib.util.spec_from_file_location("record_start", ROOT / "docs" / "record_start.py")
    assert made is not None
    assert made.loader is not None
    sys.modules["record_start"] = module = importlib.util.module_from_spec(made)
    made.loader.exec_module(module)
    return module


def by_section(transcript: str) -> dict[str, str]:
    found = re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", transcript, re.MULTILINE)
    return dict(found)


def commands(text: str) -> list[str]:
    return re.findall(r"^\$ (.*)", text, re.MULTILINE)


def scores(text: str) -> list[tuple[float, float]]:
    found = re.findall(r"test score ([\d.]+) → ([\d.]+)", text)
    return [(float(before), float(after)) for before, after in found]


def test_minutes_and_outputs_are_those_of_the_transcript(recorder: Any) -> None:
    recorded = by_section(TRANSCRIPT.read_text("utf-8"))
    sections = recorder.sections()
    assert len(sections) == len(recorded) == 5
    for section in sections:
        text = recorded[section.title]
        blocks = [block for _, language, block in section.blocks if language == "sh"]
        assert commands(text) == "".join(blocks).splitlines()
        seconds = sum(map(int, re.findall(r", (\d+) s of a core\]$", text, re.MULTILINE)))
        assert section.minutes == max(1, math.ceil(seconds / 60))
        data = (TRANSCRIPT.parent / "tickets.csv").read_text("utf-8")
        shown = [block for _, language, block in section.blocks if language == "text"]
        for line in "".join(shown).splitlines():
            assert line in text + data, line
    assert sum(section.minutes for section in sections) <= 20


@pytest.mark.slow
@pytest.mark.user_cache
def test_a_new_user_gets_through_the_page(recorder: Any, tmp_path: Path) -> None:
    """Each command succeeds; scores depend on how the processor rounds."""
    pytest.importorskip("torch")
    pytest.importorskip("bm25s")
    pytest.importorskip("uvicorn")
    from compound.engines import models

    if models.list_models()[0].state == "absent":
        pytest.skip("the weights of smollm2 are not installed")
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    lines = recorder.record(tmp_path, recorder.sections())
    sections = by_section("\n".join(lines) + "\n")
    ((before, after),) = scores(sections["2. Your own data"])
    assert after > before + 0.1
    assert scores(sections["3. Your own system"]) or "unchanged" in sections["3. Your own system"]
    before, after = map(float, re.findall(r"right ([\d.]+)", sections["4. Your own metric"]))
    assert after > before
    assert '"outputs":{"answer":"' in sections["6. Use and serve the result"]
