"""Detect duplicate examples within and across splits.

Scores on examples that were used for learning say nothing about new data. Examples are compared exactly
and after normalisation (Unicode variants, case and white space; see `fold`). Only digests are stored, so
that files larger than memory can be compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

from compound.errors import DataError
from compound.evaluation.dataset import ROLES, Dataset
from compound.evaluation.metrics.text import fold
from compound.example import Example
from compound.graph.configuration import canonical_json, to_readable_json

NAMES = {"train": "train", "valid": "validation", "test": "test"}


@dataclass(frozen=True)
class Overlap:
    """Examples of one split that duplicate examples of another, or earlier ones of the same split.

    Attributes:
        first, second: the splits; equal for duplicates within one split.
        exact: number of examples of the second split whose inputs equal those of an example of the first.
        normalised: the same after normalisation; includes the exact ones.
        with_gold: number of normalised duplicates whose other columns are also equal.
        example: ids of one pair.
    """

    first: str
    second: str
    exact: int
    normalised: int
    with_gold: int
    example: tuple[str, str]

    @property
    def across(self) -> bool:
        """Whether the splits differ."""
        return self.first != self.second

    def __str__(self) -> str:
        where = (
            f"of the {NAMES[self.second]} examples, {self.normalised} have the inputs of a "
            f"{NAMES[self.first]} example"
            if self.across
            else f"{self.normalised} {NAMES[self.first]} examples repeat the inputs of an earlier one"
        )
        same = f"{self.exact} exactly, {self.normalised - self.exact} after normalisation"
        other = self.normalised - self.with_gold
        gold = f"; {other} of them with different gold values" if other else ""
        return f"{where} ({same}{gold}), such as {self.second} {self.example[1]!r} and {self.first} " \
               f"{self.example[0]!r}"  # fmt: skip


Digests = dict[bytes, str]


@dataclass(frozen=True)
class _Seen:
    """Digests of a split's examples, each with the id of the first example that has it."""

    exact: Digests
    normalised: Digests
    gold: Digests


def find_overlaps(splits: Mapping[str, Iterable[Example]], id_column: str = "id") -> list[Overlap]:
    """Return duplicates across and within splits, in the order train, valid, test.

    Args:
        splits: examples by role; each is iterated once.
        id_column: the column that identifies a row; it does not count as gold.

    >>> one, two = Example("a", {"q": "Lima?"}), Example("b", {"q": "  LIMA?"})
    >>> [(o.first, o.second, o.exact, o.normalised) for o in find_overlaps({"train": [one], "test": [two]})]
    [('train', 'test', 0, 1)]
    """
    seen: dict[str, _Seen] = {}
    counts: dict[tuple[str, str], _Count] = {}
    for role in [role for role in ROLES if role in splits]:
        own = _Seen({}, {}, {})
        for example in splits[role]:
            keys = _digests(example, id_column)
            for other, known in (*seen.items(), (role, own)):
                counts.setdefault((other, role), _Count()).add(known, keys, example.id)
            for table, key in zip((own.exact, own.normalised, own.gold), keys, strict=True):
                table.setdefault(key, example.id)
        seen[role] = own
    pairs = [*combinations(seen, 2), *((role, role) for role in seen)]
    found = {pair: counts[pair] for pair in pairs if pair in counts}
    return [
        Overlap(*pair, count.exact, count.normalised, count.gold, count.example)
        for pair, count in found.items()
        if count.example is not None
    ]


@dataclass
class _Count:
    """Number of duplicates between two splits, and the first pair."""

    exact: int = 0
    normalised: int = 0
    gold: int = 0
    example: tuple[str, str] | None = None

    def add(self, known: _Seen, keys: tuple[bytes, bytes, bytes], name: str) -> None:
        exact, normalised, gold = keys
        self.exact += exact in known.exact
        self.normalised += normalised in known.normalised
        self.gold += gold in known.gold
        if self.example is None and normalised in known.normalised:
            self.example = (known.normalised[normalised], name)


def _digests(example: Example, id_column: str) -> tuple[bytes, bytes, bytes]:
    inputs = to_readable_json(dict(example.inputs))
    gold = {name: value for name, value in example.gold.items() if name not in {*example.inputs, id_column}}
    plain = _normalised(inputs)
    return _digest(inputs), _digest(plain), _digest([plain, _normalised(to_readable_json(gold))])


def _digest(value: object) -> bytes:
    return hashlib.blake2b(canonical_json(value).encode(errors="surrogatepass"), digest_size=16).digest()


def _normalised(value: object) -> object:
    if isinstance(value, str):
        return fold(value)
    if isinstance(value, Mapping):
        return {key: _normalised(item) for key, item in value.items()}
    return [_normalised(item) for item in value] if isinstance(value, list) else value


def find_in_data(data: Dataset, inputs: list[str]) -> list[Overlap]:
    """Return the overlaps of all rows of a data set, including rows that a run would not read."""
    splits: dict[str, Iterator[Example]] = {
        role: data.stream(role, inputs) for role in ROLES if data.has(role)
    }
    return find_overlaps(splits, data.id)


def check_no_overlaps(found: list[Overlap]) -> None:
    """Raise an error if splits share examples.

    Raises:
        DataError: two splits overlap; the message lists all overlaps.
    """
    shared = [str(overlap) for overlap in found if overlap.across]
    if shared:
        raise DataError(
            f"splits share examples: {'; '.join(shared)}",
            hint="remove them from one of the two splits, or omit --strict",
        )
