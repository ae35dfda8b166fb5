"""The scripted model passes its generator only to functions that require a second argument."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from compound.core.engine import Message, Request
from compound.testing import ScriptedLM
from compound.testing.doubles import Script


class Draws:
    def __call__(self, message: str, rng: np.random.Generator) -> str:
        return f"{message} {type(rng).__name__}"


def reply(script: Script) -> str:
    return asyncio.run(ScriptedLM(script).generate(Request((Message("user", "hello"),)))).text


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (lambda message, answer="bound": answer, "bound"),
        (lambda message, *, answer="bound": answer, "bound"),
        (lambda message, *further: str(len(further)), "0"),
        (lambda message, rng: type(rng).__name__, "Generator"),
        (Draws(), "hello Generator"),
        (str.upper, "HELLO"),
    ],
)
def test_a_script_gets_the_generator_if_it_requires_a_second_argument(
    script: Script, expected: str
) -> None:
    assert reply(script) == expected
