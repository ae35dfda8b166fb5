"""Results of ``benchmarks/atlas.yaml`` are bit for bit those of the version before the packages were arranged anew."""

from __future__ import annotations

import importlib.util
import json

import pytest

from reference import atlas


@pytest.mark.parametrize("method", atlas.METHODS)
def test_a_scripted_run_is_that_of_the_earlier_version(method: str) -> None:
    expected = json.loads(atlas.SCRIPTED_FILE.read_text())[method]
    assert json.loads(json.dumps(atlas.summary(method, atlas.METHODS[method]))) == expected


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs the extra local")
def test_a_deterministic_run_of_the_embedded_model_is_that_of_the_earlier_version() -> None:
    expected = json.loads(atlas.EMBEDDED_FILE.read_text())
    if atlas.fingerprint() != expected["processor"]:
        pytest.skip("the fixture was made on another kind of processor, which rounds differently")
    assert json.loads(json.dumps(atlas.embedded())) == expected
