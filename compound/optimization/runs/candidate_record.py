"""Record of the candidates of a run, read from its directory: their front, and what explains their gains."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError

from compound.core.errors import RunDirectoryError
from compound.core.formatting import plural
from compound.core.security.untrusted import UntrustedFolder
from compound.core.storage.state import first_problem
from compound.graph.configuration import Configuration, canonical_json
from compound.optimization.runs.candidates import FILE, Fate
from compound.optimization.runs.directory import as_folder, load_checkpoint, read_json, read_records

CHANGED = 1.2  # factor by which tokens or dollars per run must change to be named
RIDGE = 1.0  # prior weight against an effect, in candidates of average size
MIN_CANDIDATES = 6  # below which nothing is said of importance
FEWEST = 20  # evaluations of a candidate of the front, unless it is the initial or the chosen one


@dataclass(frozen=True)
class CandidateRecord:
    """A configuration that a run evaluated.

    Attributes:
        mean, low, high: mean score of these examples with its 95 % interval.
        prompt_tokens, completion_tokens, usd, seconds: means per run, on validation examples if
            there are runs on them. Calls from the cache count like executed ones; ``usd`` is
            ``None`` if a price is unknown.
    """

    __pydantic_config__ = ConfigDict(strict=True, allow_inf_nan=False)

    digest: str  # digest of the configuration
    values: Mapping[str, object]  # the values that differ from the initial configuration
    # digest of the configuration that it changes; `""` if the optimizer does not tell
    parent: str
    source: str  # what proposed it: an optimizer, or sources that the optimizer names
    # number of the first job that ran it; `None` for the initial configuration, and if only a
    # decision ran it
    job: int | None
    # `start`, `not proposed` (by its job), `proposed` (to a decision that was not made, or as
    # a part of its change), the verdict of its decision, or `over limit`
    fate: Fate
    chosen: bool  # whether it is the result of the run
    evaluations: int  # number of distinct runs on train and validation examples
    mean: float
    low: float | None
    high: float | None
    # mean gain over the initial configuration on the examples that both were run on
    gain: float | None
    prompt_tokens: float
    completion_tokens: float
    usd: float | None
    seconds: float
    broken_limits: tuple[str, ...] = ()  # limits of the objective that these means exceed

    @property
    def tokens(self) -> float:
        """Prompt and completion tokens per run."""
        return self.prompt_tokens + self.completion_tokens


_CANDIDATE = TypeAdapter(CandidateRecord)


def read_candidates(place: str | Path | UntrustedFolder) -> list[CandidateRecord]:
    """Return the candidates of a run, the initial configuration first; none for a run of an earlier version.

    Raises:
        RunDirectoryError: the file is damaged, or belongs to another run.
    """
    folder = as_folder(place)
    if folder.kind(FILE) is None:
        stored = load_checkpoint(folder)
        if stored is not None and stored.state.search is not None and stored.state.candidates:
            raise RunDirectoryError(f"{folder}/{FILE} is missing", hint="restore it from a copy")
        return []
    start = Configuration(read_json(folder, "config.json").get("start", {}))
    found: list[CandidateRecord] = []
    expected: object = None
    for number, record in enumerate(read_records(folder, FILE), 1):
        where = f"{folder}/{FILE}:{number}"
        try:
            candidate = _CANDIDATE.validate_json(json.dumps(record))
        except ValidationError as error:
            raise RunDirectoryError(
                f"{where}: it is not a candidate: {first_problem(error)}"
            ) from None
        unknown = candidate.values.keys() - start.keys()
        if unknown or start.replace(candidate.values).digest != candidate.digest:
            raise RunDirectoryError(
                f"{where}: it is not a candidate of this run: its values differ"
            )
        found.append(candidate)
        expected = record.get("of")
    if len(found) != expected:
        raise RunDirectoryError(
            f"{folder}/{FILE} has {len(found)} of {expected or 'an unknown number of'} lines"
        )
    return found


def describe_costs(candidates: Sequence[CandidateRecord]) -> list[str]:
    """Return sentences on the limits, and on what a run of the system takes since it was optimized."""
    chosen = next((candidate for candidate in candidates if candidate.chosen), None)
    changes = cost_changes(candidates[0], chosen) if chosen is not None else []
    return [*describe_limits(candidates), *(f"{line}." for line in changes)]


def describe_limits(candidates: Sequence[CandidateRecord]) -> list[str]:
    """Return sentences on candidates and a result that exceed limits."""
    chosen = next((candidate for candidate in candidates if candidate.chosen), None)
    if chosen is None:
        return []
    start, within = candidates[0], [each for each in candidates if not each.broken_limits]
    over = sum(bool(candidate.broken_limits) for candidate in candidates[1:])
    broken, found = ", ".join(chosen.broken_limits), list[str]()
    if broken and not within:
        found.append(
            f"No evaluated configuration meets the limits; the result is the initial one ({broken})."
        )
    elif broken:
        found.append(
            f"The result exceeds a limit ({broken}): the search ended before a decision on one of the "
            f"{plural(len(within), 'candidate')} within the limits."
        )
    elif start.broken_limits:
        found.append(
            f"The initial configuration exceeds a limit ({', '.join(start.broken_limits)}); the result meets "
            "all limits."
        )
    if over and within:
        found.append(
            f"{plural(over, 'candidate')} exceeded a limit and could not become the result."
        )
    return found


def cost_changes(before: CandidateRecord, after: CandidateRecord) -> list[str]:
    """Return a line for tokens and dollars per run that changed by more than the factor `CHANGED`."""
    names = {
        "prompt_tokens": ("Input tokens per run", "{:,.0f}"),
        "completion_tokens": ("Output tokens per run", "{:,.0f}"),
        "usd": ("Dollars per run", "${:.3g}"),
    }
    found = []
    for name, (text, form) in names.items():
        old, new = getattr(before, name), getattr(after, name)
        if old and new and not 1 / CHANGED <= new / old <= CHANGED:
            found.append(f"{text}: {form.format(old)} → {form.format(new)} (×{new / old:.2g})")
    return found


def cost_name(candidates: Sequence[CandidateRecord]) -> Literal["usd", "tokens"]:
    """Return the cost of a front: dollars if all prices are known and some calls cost, otherwise tokens."""
    usd = [candidate.usd for candidate in candidates]
    return "usd" if any(usd) and None not in usd else "tokens"


def front(candidates: Sequence[CandidateRecord], cost: str = "") -> list[CandidateRecord]:
    """Return the candidates that no other one beats in both gain and cost, the cheapest first.

    Gains over the initial configuration are compared, of candidates with `FEWEST` evaluations. The cost
    is ``usd``, ``tokens`` or ``seconds``, by default that of `cost_name`.
    """
    cost, found = cost or cost_name(candidates), list[tuple[float, CandidateRecord]]()
    known = [c for c in candidates if c.evaluations >= FEWEST or c.chosen or c.fate == "start"]
    costs = [(getattr(c, cost), c) for c in known]
    gains = [(float(n), -c.gain, c) for n, c in costs if c.gain is not None and n is not None]
    for _, loss, candidate in sorted(gains, key=lambda row: row[:2]):
        if not found or loss < found[-1][0]:
            found.append((loss, candidate))
    return [candidate for _, candidate in found]


@dataclass(frozen=True)
class Importance:
    """A parameter."""

    key: str
    share: float  # its share of the explained variance of gains
    values: int  # number of values that were tried
    best: object  # the value with the largest effect; `None` if it is the initial one
    effect: float  # that effect, over the mean of all values


def importance(candidates: Sequence[CandidateRecord]) -> list[Importance]:
    """Return the changed parameters by their importance, the largest first; none with few candidates.

    A ridge regression of the gains on the values of all parameters gives an effect for each value. The
    importance of a parameter is the variance of its effects, as a share of that of all parameters.
    """
    known = [c for c in candidates if c.gain is not None and c.evaluations]
    keys = sorted({key for c in known for key in c.values})
    if len(known) < MIN_CANDIDATES or not keys:
        return []
    levels = [
        [canonical_json(c.values[key]) if key in c.values else "" for c in known] for key in keys
    ]
    names = [sorted(set(column)) for column in levels]
    columns = [
        [[value == name for name in found] for value in column]
        for column, found in zip(levels, names, strict=True)
    ]
    design = np.hstack([np.array(column, float) for column in columns])
    weights = np.sqrt([c.evaluations for c in known])
    weights = weights / weights.mean()
    gains = np.array([c.gain for c in known], float)
    centred = gains - np.average(gains, weights=weights)
    scaled = design * weights[:, None]
    effects = np.linalg.solve(
        scaled.T @ scaled + RIDGE * np.eye(design.shape[1]), scaled.T @ (centred * weights)
    )
    found, start = [], 0
    for key, values in zip(keys, names, strict=True):
        own = slice(start, start + len(values))
        start = own.stop
        contribution = design[:, own] @ effects[own]
        variance = float(np.average((contribution - contribution.mean()) ** 2, weights=weights))
        best = int(np.argmax(effects[own]))
        effect = float(effects[own][best] - contribution.mean())
        value = json.loads(values[best]) if values[best] else None
        found.append((key, variance, len(values), value, effect))
    total = sum(row[1] for row in found) or 1.0
    rows = [Importance(key, v / total, n, best, effect) for key, v, n, best, effect in found]
    return sorted(rows, key=lambda row: -row.share)
