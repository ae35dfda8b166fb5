"""Results of ``benchmarks/atlas.yaml`` are those of the version before the packages were arranged anew.

Configurations, requests and decisions are equal; other floats to a relative 1e-9, since kinds of
processors round their last digits differently.
"""

from __future__ import annotations

import importlib.util
import json
import math

import pytest

from reference import atlas


@pytest.mark.slow
@pytest.mark.parametrize("method", atlas.METHODS)
def test_a_scripted_run_is_that_of_the_earlier_version(method: str) -> None:
    expected = json.loads(atlas.SCRIPTED_FILE.read_text())[method]
    assert (
        differences(json.loads(json.dumps(atlas.summary(method, atlas.METHODS[method]))), expected)
        == []
    )


@pytest.mark.slow
@pytest.mark.user_cache
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs the extra local")
def test_a_deterministic_run_of_the_embedded_model_is_that_of_the_earlier_version() -> None:
    expected = json.loads(atlas.EMBEDDED_FILE.read_text())
    if atlas.fingerprint() != expected["processor"]:
        pytest.skip("the fixture was made on another kind of processor, which rounds differently")
    assert differences(json.loads(json.dumps(atlas.embedded())), expected) == []


@pytest.mark.parametrize(
    ("found", "equal"),
    [
        ({"decisions": [{"p": 0.11265432098765435, "accepted": True}], "best": {"a": 0.1}}, True),
        ({"decisions": [{"p": 0.112654322, "accepted": True}], "best": {"a": 0.1}}, False),
        ({"decisions": [{"p": 0.11265432098765432, "accepted": False}], "best": {"a": 0.1}}, False),
        (
            {
                "decisions": [{"p": 0.11265432098765432, "accepted": True}],
                "best": {"a": 0.10000000000000002},
            },
            False,
        ),
        (
            {"decisions": [{"p": 0.11265432098765432, "accepted": True}, {}], "best": {"a": 0.1}},
            False,
        ),
        ({"decisions": [{"p": None, "accepted": True}], "best": {"a": 0.1}}, False),
    ],
)
def test_only_last_digits_of_statistics_may_differ(found: object, equal: bool) -> None:
    expected = {"decisions": [{"p": 0.11265432098765432, "accepted": True}], "best": {"a": 0.1}}
    assert (differences(found, expected) == []) == equal


EXACT = {"best", "keys", "values", "tried", "changes", "requests", "processor"}


def differences(found: object, expected: object, path: str = "") -> list[str]:
    """Return the places where two JSON documents differ by more than the last digits of a statistic."""
    if isinstance(found, dict) and isinstance(expected, dict) and found.keys() == expected.keys():
        pairs = [(name, found[name], expected[name]) for name in expected]
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        pairs = [(str(i), *pair) for i, pair in enumerate(zip(found, expected, strict=True))]
    elif (
        isinstance(found, float)
        and isinstance(expected, float)
        and math.isclose(found, expected, rel_tol=1e-9)
    ):
        return []
    else:
        return [] if found == expected else [f"{path}: {found!r} instead of {expected!r}"]
    return [
        line
        for name, one, other in pairs
        if not (name in EXACT and one == other)
        for line in (
            [f"{path}.{name}: {one!r} instead of {other!r}"]
            if name in EXACT
            else differences(one, other, f"{path}.{name}")
        )
    ]
