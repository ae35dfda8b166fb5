"""Verification that a server samples with the adapter that it has acknowledged.

A server that accepts an adapter but continues with the old weights corrupts training silently: the samples
look right, but their gradients belong to another policy. Each adapter therefore contains a probe, written
with the adapter: a file ``probe.json`` in its folder (and so covered by its digest), one JSON object with

- ``tokens``: n token ids, n at least 2;
- ``logprobs``: n - 1 numbers, the log-probabilities (nats, temperature 1) of each token but the first, given
  the tokens before it, under this adapter;
- ``before``: the same under the adapter it replaces, or under the base model.

The server's log-probabilities of the same tokens are compared with both. Serving in bfloat16 adds noise of
about 0.06 nats per token (root mean square, SmolLM2 against float32), which changes with any change of the
weights.

1. The mean distance from ``logprobs`` must be at most `TOLERANCE`, well above the error of number formats.
2. If ``logprobs`` and ``before`` differ by more than noise explains, the answer must be nearer to
   ``logprobs``. With noise of standard deviation s per token, the answer's position along the line between
   them, whose length is d, has standard deviation s, and the midpoint is at d / 2. They count as
   distinguishable from d = `APART` × `NOISE`: 4 standard deviations, at almost twice the measured noise.
3. One training step moves log-probabilities by thousandths, which is below that noise. But a server that
   still computes with other weights returns *exactly* their numbers, whereas a relative change of 1e-6 in the
   weights (the smallest one measured) changes some rounding and therefore the numbers. So if rule 2 does not
   apply, the answer must not be identical to that of the base or of an adapter with other weights. Concurrent
   requests of other processes can hide such an identity, but never create one.

If ``logprobs`` and ``before`` differ by less than `VISIBLE`, or all B matrices of the adapter are zero, the
adapter is indistinguishable and only rule 1 applies. For an adapter without a probe, rule 3 is applied to a
fixed text.

Several servers behind one address (a load balancer, data parallelism) may be in different states. A version
is therefore checked `CHECKS` times, each time over a new connection and with other first tokens, because
balancers choose by connection, by request, or by the start of the prompt; rule 3 applies from the second
check. A server that does not know the version, or computes without it, ends the run. If a share s of the
requests goes to such servers, one version passes with probability (1 - s)^8: 0.4 % for one of two, 10 % for
one of four; round-robin balancing reaches all servers if there are at most 8. Each later version is checked
again: one bad server of four passes for three versions with probability 0.1 %. The cost is 8 requests of one
short prompt for the version, and 8 for the base and each other version on the server. A balancer that sends
all requests of a client to one server passes, and then samples come from the checked server. Each sampled
answer must also name its version as its model (`check_probe_model`).

Not detected: a server that fails or joins after the checks and still answers under the version's name, and a
balancer that routes short prompts or `/v1/completions` differently from chat requests.
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
)  # for adapters without a probe: several kinds of text, since an adapter may change only one
NOISE = 0.1  # nats per token, standard deviation
APART = 8.0  # times the noise
CHECKS = 8  # number of checks of a version if several servers may answer at one address
TOLERANCE = 0.3  # nats per token, mean absolute difference
VISIBLE = 1e-4  # nats, largest difference of a token: served numbers change from about half of that


@dataclass(frozen=True, slots=True)
class Probe:
    """Contents of a probe file."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    before: tuple[float, ...]

    @property
    def distinguishable(self) -> bool:
        """Whether the adapter differs from the weights it replaces by more than noise explains."""
        return math.dist(self.logprobs, self.before) >= APART * NOISE

    @property
    def differs(self) -> bool:
        """Whether they differ at all, according to the log-probabilities in the file."""
        return max(map(_difference, self.logprobs, self.before)) >= VISIBLE


def read_probe(folder: Path) -> Probe | None:
    """Read an adapter's probe; None if it has none.

    Raises:
        ConfigurationError: the file does not have the format above.
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
            hint="n tokens, at least 2, require n - 1 numbers in each",
        )
    return Probe(tokens, logprobs, before)


def check_logprobs(probe: Probe, served: Sequence[float]) -> bool:
    """Check a server's log-probabilities by rules 1 and 2; return whether rule 2 applied.

    >>> probe = Probe((5, 6, 7), logprobs=(-1.0, -2.0), before=(-3.0, -2.0))
    >>> check_logprobs(probe, (-1.1, -2.1))
    True

    Raises:
        AdapterNotServed: the log-probabilities are not the adapter's.
    """
    distance = sum(map(_difference, served, probe.logprobs)) / len(served)
    if probe.distinguishable and math.dist(served, probe.before) <= math.dist(served, probe.logprobs):
        raise AdapterNotServed("its log-probabilities are those of the weights that the adapter replaces")
    if not distance <= TOLERANCE:  # also true for NaN
        raise AdapterNotServed(
            f"its log-probabilities differ from the adapter's by {distance:.2g} nats per token, and noise "
            f"explains at most {TOLERANCE}"
        )
    return probe.distinguishable


def rotate(tokens: Sequence[int], by: int) -> tuple[int, ...]:
    """Rotate a probe's text, so that it starts at another token.

    >>> rotate((5, 6, 7), 1)
    (6, 7, 5)
    """
    by %= len(tokens)
    return (*tokens[by:], *tokens[:by])


def check_probe_model(answered: object, expected: str) -> None:
    """Check the model that an answer names; an answer without a name is accepted.

    Raises:
        AdapterNotServed: the answer names another model than the adapter.

    >>> check_probe_model("0123abcd", "0123abcd")
    """
    if answered is not None and answered != expected:
        raise AdapterNotServed(
            f"a server answered with the model {answered!r}, but the adapter {expected} was requested",
            hint="give the address of a single server; adapters do not work with several servers behind one "
            "address",
        )


def weights_digest(folder: Path) -> str:
    """Return the SHA-256 of an adapter's weights, or ``""`` if the usual file is missing."""
    path = folder / WEIGHTS
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def changes_nothing(folder: Path) -> bool:
    """Return whether an adapter has no effect, because all its B matrices are zero.

    The file starts with the length of its JSON header in eight bytes; a zero tensor consists of zero bytes.

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
    """Return a list after checking that its items are finite numbers of a type."""
    if not isinstance(values, list) or not all(type(v) is not bool and isinstance(v, kind) for v in values):
        raise TypeError("not a list of numbers")
    if not all(map(math.isfinite, values)):
        raise ValueError("not finite")
    return values


def _difference(one: float, other: float) -> float:
    return abs(one - other)
