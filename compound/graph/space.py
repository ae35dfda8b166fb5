"""Spaces: the sets of values from which an optimizer chooses a component's parameters.

A space includes its initial value. A space may be declared wherever a plain value is accepted:
``k=5`` is fixed, ``k=Choice(1, 5, 10, value=5)`` may be tuned.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from compound.core.errors import DeclarationError, suggest_name
from compound.core.narrowing import report_wrong_arguments
from compound.core.storage.artifacts import Reference, is_reference

if TYPE_CHECKING:
    import numpy as np

Scalar = str | int | float | bool
ALL_LINEAR, ATTENTION = "all-linear", "attention"
TARGETS = (ALL_LINEAR, ATTENTION)  # layer groups accepted as targets of an adapter


class Space(ABC):
    """Set of values of one parameter. ``value`` is the initial value."""

    kind: ClassVar[str]
    value: object

    @abstractmethod
    def problem(self, value: object) -> str:
        """Return why ``value`` is outside the space, or ``""`` if it is valid."""

    @property
    @abstractmethod
    def type(self) -> object:
        """Port type of the values, for edges that feed the parameter."""

    @abstractmethod
    def to_json(self) -> dict[str, object]:
        """Return the declaration as JSON, without the initial value."""

    def check(self, value: object, name: str) -> None:
        """Raise `DeclarationError` if ``value`` is outside the space of the parameter ``name``."""
        problem = self.problem(value)
        if problem:
            raise DeclarationError(f"{name} {problem}")


@report_wrong_arguments
@dataclass(frozen=True)
class Text(Space):
    """A text, usually a prompt.

    Attributes:
        value: the initial text.
        max_length: maximum number of characters.
        keep: passages that every value must contain, word for word.

    >>> Text("Answer in a few words.").problem(3)
    'must be a string, but got 3'
    >>> Text("Answer. Never name a patient.", keep=["Never name a patient."]).problem("Answer.")
    "must contain 'Never name a patient.'"
    """

    value: str
    max_length: int = 8000
    keep: Sequence[str] = ()
    kind: ClassVar[str] = "text"

    def __post_init__(self) -> None:
        given = [self.keep] if isinstance(self.keep, str) else self.keep
        object.__setattr__(self, "keep", tuple(given))
        self.check(self.value, "Text")

    def problem(self, value: object) -> str:  # noqa: D102
        if not isinstance(value, str):
            return f"must be a string, but got {value!r}"
        if len(value) > self.max_length:
            return f"must have at most {self.max_length} characters, but has {len(value)}"
        missing = next((passage for passage in self.keep if passage not in value), None)
        return "" if missing is None else f"must contain {missing!r:.200}"

    @property
    def type(self) -> object:  # noqa: D102
        return str

    def to_json(self) -> dict[str, object]:  # noqa: D102
        keep = {"keep": list(self.keep)} if self.keep else {}
        return {"kind": self.kind, "max_length": self.max_length, **keep}


Demo = Mapping[str, Mapping[str, object]]  # "inputs" and "outputs", each a mapping by name


def as_demos(value: object) -> list[Demo]:
    """Return the demonstrations in a setting as a list."""
    demos = value if isinstance(value, Sequence) else [None]
    if not all(isinstance(demo, Mapping) for demo in demos):
        raise TypeError(f"demonstrations must be a list of mappings, but got {value!r:.80}")
    return list(demos)


@report_wrong_arguments
@dataclass(frozen=True)
class Demos(Space):
    """Demonstrations: worked examples in the prompt.

    A value is a tuple of at most ``max`` mappings ``{"inputs": {...}, "outputs": {...}}``.

    >>> Demos(max=4).problem([{"inputs": {"q": "1+1"}, "outputs": {"a": "2"}}])
    ''
    """

    value: tuple[Demo, ...] = ()
    max: int = 4
    kind: ClassVar[str] = "demos"

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", tuple(self.value))
        self.check(self.value, "Demos")

    def problem(self, value: object) -> str:  # noqa: D102
        if not isinstance(value, Sequence) or isinstance(value, str):
            return f"must be a list of demonstrations, but got {value!r}"
        if len(value) > self.max:
            return f"must hold at most {self.max} demonstrations, but holds {len(value)}"
        for demo in value:
            parts = demo if isinstance(demo, Mapping) else {}
            if set(parts) != {"inputs", "outputs"} or not all(
                isinstance(p, Mapping) for p in parts.values()
            ):
                return f"must hold {{'inputs': {{…}}, 'outputs': {{…}}}} only, but holds {demo!r}"
        return ""

    @property
    def type(self) -> object:  # noqa: D102
        return list[dict[str, Any]]

    def to_json(self) -> dict[str, object]:  # noqa: D102
        return {"kind": self.kind, "max": self.max}


@report_wrong_arguments
@dataclass(frozen=True, init=False)
class Choice(Space):
    """A categorical space: one of a few unordered values.

    >>> Choice(1, 5, 10, value=5).problem(7)
    'must be one of 1, 5, 10, but got 7'
    """

    options: tuple[Scalar, ...]
    value: Scalar
    kind: ClassVar[str] = "choice"

    def __init__(self, *options: Scalar, value: object = None) -> None:
        if not options:
            raise DeclarationError("Choice needs at least one option")
        if any(not isinstance(option, str | int | float | bool) for option in options):
            raise DeclarationError(
                f"Choice options must be texts, numbers or booleans, but got {options!r}",
                hint="write Choice('a', 'b'), not a list",
            )
        if len({(type(o), o) for o in options}) < len(options):
            raise DeclarationError(f"Choice options must differ, but got {options!r}")
        object.__setattr__(self, "options", tuple(options))
        object.__setattr__(self, "value", options[0] if value is None else value)
        self.check(self.value, "Choice")

    def problem(self, value: object) -> str:  # noqa: D102
        if any(type(value) is type(option) and value == option for option in self.options):
            return ""
        return f"must be one of {', '.join(map(repr, self.options))}, but got {value!r}"

    @property
    def type(self) -> object:  # noqa: D102
        kinds = {type(option) for option in self.options}
        if kinds == {str}:
            return Literal[self.options]
        return kinds.pop() if len(kinds) == 1 else Any

    def to_json(self) -> dict[str, object]:  # noqa: D102
        return {"kind": self.kind, "options": list(self.options)}

    def draw(self, rng: np.random.Generator) -> Scalar:
        """Draw one of the options uniformly."""
        return self.options[rng.integers(len(self.options))]


@dataclass(frozen=True, init=False)
class PerInput(Choice):
    """A categorical space whose value may also be chosen for each input by a stored reward.

    A value is an option, or ``{"path": folder, "sha256": digest}`` of a reward checkpoint.

    >>> space = PerInput("short", "long")
    >>> space.problem({"path": "memory/length-9f", "sha256": "9f"}), space.problem("medium")
    ('', "must be one of 'short', 'long' or a stored reward, but got 'medium'")
    """

    value: Scalar | Reference  # type: ignore[assignment]  # wider than in `Choice`

    def problem(self, value: object) -> str:  # noqa: D102
        if is_reference(value) or not super().problem(value):
            return ""
        return f"must be one of {', '.join(map(repr, self.options))} or a stored reward, but got {value!r}"

    def to_json(self) -> dict[str, object]:  # noqa: D102
        return {**super().to_json(), "per_input": True}


@report_wrong_arguments
@dataclass(frozen=True)
class Int(Space):
    """Integers in ``[low, high]``; ``log`` makes the scale logarithmic."""

    low: int
    high: int
    value: int = None  # type: ignore[assignment]  # resolved to `low` below
    log: bool = False
    kind: ClassVar[str] = "int"

    def __post_init__(self) -> None:
        _check_bounds(self)

    def problem(self, value: object) -> str:  # noqa: D102
        if type(value) is not int:
            return f"must be an integer, but got {value!r}"
        return _outside(self, value)

    @property
    def type(self) -> object:  # noqa: D102
        return int

    def to_json(self) -> dict[str, object]:  # noqa: D102
        return {"kind": self.kind, "low": self.low, "high": self.high, "log": self.log}

    def draw(self, rng: np.random.Generator) -> int:
        """Draw an integer uniformly, or log-uniformly if ``log``."""
        if self.log:
            return min(
                int(math.exp(rng.uniform(math.log(self.low), math.log(self.high + 1)))), self.high
            )
        return int(rng.integers(self.low, self.high + 1))


@report_wrong_arguments
@dataclass(frozen=True)
class Float(Space):
    """Real numbers in ``[low, high]``; ``log`` makes the scale logarithmic."""

    low: float
    high: float
    value: float = None  # type: ignore[assignment]  # resolved to `low` below
    log: bool = False
    kind: ClassVar[str] = "float"

    def __post_init__(self) -> None:
        _check_bounds(self)
        object.__setattr__(self, "value", float(self.value))

    def problem(self, value: object) -> str:  # noqa: D102
        if isinstance(value, int | float) and type(value) in (int, float) and math.isfinite(value):
            return _outside(self, value)
        return f"must be a finite number, but got {value!r}"

    @property
    def type(self) -> object:  # noqa: D102
        return float

    def to_json(self) -> dict[str, object]:  # noqa: D102
        return {"kind": self.kind, "low": self.low, "high": self.high, "log": self.log}

    def draw(self, rng: np.random.Generator) -> float:
        """Draw a number uniformly, or log-uniformly if ``log``."""
        if self.log:
            drawn = math.exp(rng.uniform(math.log(self.low), math.log(self.high)))
            return min(max(drawn, self.low), self.high)
        return float(rng.uniform(self.low, self.high))


def _check_bounds(space: Int | Float) -> None:
    if getattr(space, "value", None) is None:
        object.__setattr__(space, "value", space.low)
    name = type(space).__name__
    whole = int if isinstance(space, Int) else (int, float)
    if not all(isinstance(b, whole) and not isinstance(b, bool) for b in (space.low, space.high)):
        raise DeclarationError(
            f"{name} bounds must be numbers, but got low={space.low!r}, high={space.high!r}"
        )
    if not space.low <= space.high:
        raise DeclarationError(
            f"{name}: low <= high must hold, but got low={space.low}, high={space.high}"
        )
    if space.log and space.low <= 0:
        raise DeclarationError(f"{name}: a log scale needs low > 0, but got low={space.low}")
    space.check(space.value, name)


def _outside(space: Int | Float, value: float) -> str:
    if space.low <= value <= space.high:
        return ""
    return f"must lie in [{space.low}, {space.high}], but got {value!r}"


@dataclass(frozen=True)
class Weights(Space):
    """Weights of a component's model: a LoRA adapter on a frozen base model.

    A value is ``None`` (the base model) or ``{"path": folder, "sha256": digest}``. ``targets`` are
    the adapted linear layers, as in `LoRA`.
    """

    value: Mapping[str, str] | None = None
    rank: int = 16
    alpha: int = 32
    targets: str | tuple[str, ...] = ALL_LINEAR
    kind: ClassVar[str] = "weights"

    def __post_init__(self) -> None:
        if self.rank < 1 or self.alpha < 1:
            raise DeclarationError(
                f"LoRA: rank and alpha must be >= 1, but got {self.rank}, {self.alpha}"
            )
        if isinstance(self.targets, str):
            if self.targets not in TARGETS:
                raise DeclarationError(
                    f"LoRA: targets must be {' or '.join(map(repr, TARGETS))}, or a list of names of linear "
                    f"layers, but got {self.targets!r}",
                    hint=f"{suggest_name(self.targets, TARGETS)}; write a single layer as a list: [q_proj]",
                )
        else:
            object.__setattr__(self, "targets", tuple(self.targets))
            if not self.targets or not all(isinstance(name, str) and name for name in self.targets):
                raise DeclarationError(
                    f"LoRA: targets must name at least one linear layer, but got {self.targets!r}"
                )
        self.check(self.value, "Weights")

    def problem(self, value: object) -> str:  # noqa: D102
        if value is None or is_reference(value):
            return ""
        return f"must be None or {{'path': …, 'sha256': …}}, but got {value!r}"

    @property
    def type(self) -> object:  # noqa: D102
        return dict[str, str] | None

    def to_json(self) -> dict[str, object]:  # noqa: D102
        targets = self.targets if isinstance(self.targets, str) else list(self.targets)
        return {"kind": self.kind, "rank": self.rank, "alpha": self.alpha, "targets": targets}


@report_wrong_arguments
def LoRA(  # noqa: N802 - reads as a declaration
    rank: int = 16, alpha: int | None = None, targets: str | Sequence[str] = ALL_LINEAR
) -> Weights:
    """Return the space of LoRA adapters of one shape.

    Args:
        rank: rank of the update.
        alpha: scale of the update; default: twice the rank.
        targets: the adapted linear layers: ``all-linear``, all except the output layer;
            ``attention``, those of attention only; or the last parts of their names, such as
            ``["q_proj", "v_proj"]``. Adapters on all layers learn more than those on attention
            only, even with the same number of parameters (Schulman et al. 2025, "LoRA Without
            Regret"), hence the default.

    Raises:
        DeclarationError: the rank or alpha is below 1, or the targets are invalid.

    Example:
        >>> LoRA(8).to_json()
        {'kind': 'weights', 'rank': 8, 'alpha': 16, 'targets': 'all-linear'}
        >>> LoRA(8, targets=["q_proj", "v_proj"]).targets
        ('q_proj', 'v_proj')
    """
    chosen = targets if isinstance(targets, str) else tuple(targets)
    return Weights(rank=rank, alpha=2 * rank if alpha is None else alpha, targets=chosen)
