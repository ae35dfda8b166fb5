"""Verify that a server samples with the adapter that it has acknowledged.

A server that says yes and goes on with the old weights spoils training in silence: the samples look right,
and their gradients are those of another policy. So each adapter brings a probe, made by whoever wrote it: a
file ``probe.json`` in its folder (and so under its digest), one JSON object with

- ``tokens``: n token ids, n at least 2;
- ``logprobs``: n - 1 numbers, the log-probabilities (nats, temperature 1) under this adapter of each token
  but the first, given those before it;
- ``before``: the same under the adapter it replaces, or under the base model.

The server's answer for the same tokens is compared with both. Serving in bfloat16 costs about 0.06 nats per
token (root mean square, SmolLM2 against float32), and the noise is another one as soon as anything changes.

1. The mean distance from ``logprobs`` must be at most `TOLERANCE`, well above what number formats make.
2. Where ``logprobs`` and ``before`` lie further apart than noise explains, the answer must be nearer to
   ``logprobs``. With noise of standard deviation s per token, the answer's position along the line from one
   to the other, whose length is d, has standard deviation s; half the way is d / 2. They count as told apart
   from d = `APART` × `NOISE` on: 4 standard deviations, at a noise of almost twice what was measured.
3. One step of training moves log-probabilities by thousandths, which drowns in that noise. But a server that
   still computes with other weights gives *their* very numbers, while a change of a millionth in the weights
   changes the numbers, because it rounds otherwise somewhere (measured from 1e-6 on). So where rule 2 has
   nothing to say, the answer must not be, number for number, that of the base or of an adapter of other
   weights. Requests of other processes at the time can hide that, but never feign it.

Nothing can be told apart, and nothing is asked beyond rule 1, where ``logprobs`` and ``before`` differ by
less than `VISIBLE` or the adapter's B matrices are all zero. An adapter without a probe is held to the third
rule, on a fixed text.

Several servers behind one address (a load balancer, data parallelism) may each be in another state. So a
version is checked `CHECKS` times, each time over a new connection and with other first tokens, since
balancers choose by connection, by request, or by the beginning of the prompt; after the first time by rule 3.
A server that does not know the version, or computes without it, ends the run. Where a share s of the requests
goes to such servers, one version passes with probability (1 - s)^8: 0.4 % for one of two, 10 % for one of
four; servers that take turns are all asked if they are at most 8. Each later version is checked anew: one bad
server of four outlasts three versions with probability 0.1 %. It costs 8 requests of one short prompt for the
version, and 8 for the base and each other version on the server. A balancer that leads all requests of one
client to one server passes, and samples come from the server that was checked. Each sampled answer must also
name its version as the model it comes from (`check_probe_model`).

What remains undetected: a server that goes bad, or joins, after the checks and still answers under the
version's name; and a balancer that treats short prompts, or `/v1/completions`, unlike the samples' chats.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from compound.errors import AdapterNotServed, ConfigurationError

FILE, WEIGHTS = "probe.json", "adapter_model.safetensors"
TEXT = (
    "In 1969 two people walked on the Moon; a third waited above. def add(a, b): return a + b. "
    "Le chat dort. 17 * 3 = 51, and water boils at 100 degrees."
)  # for adapters without a probe: of several kinds, since an adapter may change only one
NOISE = 0.1  # nats per token, standard deviation
APART = 8.0  # times the noise
CHECKS = 8  # times that a version is checked where several servers may answer at one address
TOLERANCE = 0.3  # nats per token, mean absolute difference
VISIBLE = 1e-4  # nats, the largest difference of one token: the server's numbers change from half of that on


@dataclass(frozen=True, slots=True)
class Probe:
    """What a probe file holds."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    before: tuple[float, ...]

    @property
    def apart(self) -> bool:
        """Whether the adapter and what it replaces differ by more than noise explains."""
        return math.dist(self.logprobs, self.before) >= APART * NOISE

    @property
    def visible(self) -> bool:
        """Whether they differ at all, by the numbers of who wrote them."""
        return max(map(_difference, self.logprobs, self.before)) >= VISIBLE


def read_probe(folder: Path) -> Probe | None:
    """Return an adapter's probe, if it has one.

    Raises:
        ConfigurationError: the file is not of the form above.
    """
    path = folder / FILE
    if not path.exists():
        return None
    try:
        held = json.loads(path.read_text("utf-8"))
        tokens = tuple(_checked(int, held["tokens"]))
        logprobs, before = (
            tuple(map(float, _checked((int, float), held[n]))) for n in ("logprobs", "before")
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{path} is not a probe: {type(error).__name__}: {error}") from error
    if len(tokens) < 2 or not len(logprobs) == len(before) == len(tokens) - 1:
        raise ConfigurationError(
            f"{path} is not a probe: {len(tokens)} tokens, {len(logprobs)} logprobs and {len(before)} before",
            hint="for n tokens, at least 2, there are n - 1 of each",
        )
    return Probe(tokens, logprobs, before)


def judge(probe: Probe, served: Sequence[float]) -> bool:
    """Check a server's answer by the rules 1 and 2; return whether rule 2 had anything to say.

    >>> probe = Probe((5, 6, 7), logprobs=(-1.0, -2.0), before=(-3.0, -2.0))
    >>> judge(probe, (-1.1, -2.1))
    True

    Raises:
        AdapterNotServed: it is not the adapter's.
    """
    distance = sum(map(_difference, served, probe.logprobs)) / len(served)
    if probe.apart and math.dist(served, probe.before) <= math.dist(served, probe.logprobs):
        raise AdapterNotServed("its log-probabilities are those of what the adapter replaces")
    if not distance <= TOLERANCE:  # nor if it is no number
        raise AdapterNotServed(
            f"its log-probabilities are {distance:.2g} nats per token from the adapter's own, and at most "
            f"{TOLERANCE} is noise"
        )
    return probe.apart


def rotated(tokens: Sequence[int], by: int) -> tuple[int, ...]:
    """Return a probe's text from another token on, its beginning behind its end.

    >>> rotated((5, 6, 7), 1)
    (6, 7, 5)
    """
    by %= len(tokens)
    return (*tokens[by:], *tokens[:by])


def check_probe_model(answered: object, wanted: str) -> None:
    """Check the model that an answer names; servers that name none are believed.

    Raises:
        AdapterNotServed: it is not the adapter's.

    >>> check_probe_model("0123abcd", "0123abcd")
    """
    if answered is not None and answered != wanted:
        raise AdapterNotServed(
            f"a server answered with {answered!r} where the adapter {wanted} was asked for",
            hint="name the address of a single server: several behind one cannot be used with adapters",
        )


def weights_digest(folder: Path) -> str:
    """Return the SHA-256 of an adapter's weights, or "" where they are not in the usual file."""
    path = folder / WEIGHTS
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def is_silent(folder: Path) -> bool:
    """Return whether an adapter changes nothing: its B matrices are all zero.

    The file's header is JSON after eight bytes of its length; a tensor of zeros is a stretch of zero bytes.

    Raises:
        ConfigurationError: the weights are not a safetensors file.
    """
    path = folder / WEIGHTS
    if not path.is_file():
        return False
    held = path.read_bytes()
    start = 8 + int.from_bytes(held[:8], "little")
    try:
        header = json.loads(held[8:start])
        places = [entry["data_offsets"] for name, entry in header.items() if "lora_B" in name]
        return not any(held[start + first : start + last].strip(b"\0") for first, last in places)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"{path} is not a safetensors file: {error}") from error


Number = TypeVar("Number", int, float)


def _checked(kind: type[Number] | tuple[type[Number], ...], values: object) -> list[Number]:
    """Return a list whose items are of a kind, and finite."""
    if not isinstance(values, list) or not all(type(v) is not bool and isinstance(v, kind) for v in values):
        raise TypeError("not a list of numbers")
    if not all(map(math.isfinite, values)):
        raise ValueError("not finite")
    return values


def _difference(one: float, other: float) -> float:
    return abs(one - other)
