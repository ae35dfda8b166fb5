"""Base of settings, choices among settings, and names in settings.

In YAML, a choice is a mapping with one key, ``loss: {grpo: {clip: 0.2}}``, or only the name,
``loss: dapo``. A field whose value names a model, a method, code or a file is marked by its type,
such as ``lm: ModelName | None``; `references` finds all of them, so that a file can be checked
before anything runs.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    SerializerFunctionWrapHandler,
    Tag,
    model_serializer,
    model_validator,
)

from compound.execution.budget import Budget


class Settings(BaseModel):
    """Base of all settings: unknown keys are rejected, and values are immutable.

    Descriptions are the docstrings of the attributes.

    Example:
        >>> class AnnealingSettings(Settings):
        ...     temperature: float = 1.0
        >>> AnnealingSettings(temperature=0.5)
        AnnealingSettings(temperature=0.5)
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class NoSettings(Settings):
    """Settings of a method without options."""


S = TypeVar("S", bound=Settings)


class OneOf(Settings, ABC):
    """A choice between options: at most one field is set, to the settings of that option.

    Subclasses declare one field per option, ``None`` by default. The first option is the default.
    """

    # options of earlier versions, with the option to use instead
    REMOVED: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [name for name in type(self).model_fields if name in self.model_fields_set]
        if len(given) > 1:
            raise ValueError(f"selects several options: {' and '.join(given)}; keep one")
        for name in given:
            if getattr(self, name) is None:
                raise ValueError(f"{name} must be a mapping; {{}} selects the defaults")
        return self

    @property
    def name(self) -> str:
        """Name of the selected option."""
        options = list(type(self).model_fields)
        return next((name for name in options if getattr(self, name) is not None), options[0])

    @property
    @abstractmethod
    def settings(self) -> Settings:
        """Settings of the selected option."""

    @model_serializer(mode="wrap")
    def _chosen_only(self, dump: SerializerFunctionWrapHandler) -> dict[str, object]:
        chosen = dump(self).get(self.name)
        return {self.name: self.settings.model_dump(mode="json") if chosen is None else chosen}


def or_name(choice: type[OneOf]) -> object:
    """Return a field type that accepts a choice or the bare name of an option."""
    options = tuple(choice.model_fields)
    named: Callable[[object], object] = lambda value: (  # noqa: E731
        choice.model_validate({value: {}}) if isinstance(value, str) else value
    )

    def reject_removed(value: object) -> object:
        given = [value] if isinstance(value, str) else value if isinstance(value, Mapping) else ()
        for name in given:
            if name in choice.REMOVED:
                raise ValueError(f"{name} was removed; use {choice.REMOVED[name]}")
        return value

    return Annotated[
        Annotated[Literal[options], Tag("~name")] | Annotated[choice, Tag("~mapping")],
        Discriminator(lambda value: "~name" if isinstance(value, str) else "~mapping"),
        AfterValidator(named),
        BeforeValidator(reject_removed),
    ]


Kind = Literal["model", "backbone", "method", "code", "configuration", "feedback"]
Path = tuple[str | int, ...]


@dataclass(frozen=True)
class NameMark:
    """Annotation that marks a string as the name of an object of some kind."""

    kind: Kind


ModelName = Annotated[str, NameMark("model")]
BackboneName = Annotated[str, NameMark("backbone")]
MethodName = Annotated[str, NameMark("method")]
CodeName = Annotated[str, NameMark("code")]
ConfigurationFile = Annotated[str, NameMark("configuration")]
FeedbackFolder = Annotated[str, NameMark("feedback")]


@dataclass(frozen=True)
class Reference:
    """A name found in settings."""

    kind: Kind
    path: Path  # path of the field, relative to the searched settings
    name: str | None  # the value; `None` if the field is not set
    key: bool = False


def references(settings: BaseModel, path: Path = ()) -> Iterator[Reference]:
    """Yield every reference in settings, including nested models.

    >>> class Writing(BaseModel):
    ...     lm: ModelName | None = None
    ...     rules: dict[str, CodeName] = {}
    >>> [(found.kind, found.path, found.name) for found in references(Writing(rules={"a": "my:rule"}))]
    [('model', ('lm',), None), ('code', ('rules', 'a'), 'my:rule')]
    """
    for name, field in type(settings).model_fields.items():
        annotation: object = field.annotation
        for mark in field.metadata:
            if isinstance(mark, NameMark):
                annotation = Annotated[str, mark]
        yield from _found(getattr(settings, name), annotation, (*path, name))


def _found(
    value: object, annotation: object, path: Path, *, key: bool = False
) -> Iterator[Reference]:
    if isinstance(value, BaseModel):
        yield from references(value, path)
        return
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        marks = [mark for mark in arguments[1:] if isinstance(mark, NameMark)]
        if marks and (value is None or isinstance(value, str)):
            yield Reference(marks[0].kind, path, value, key)
        elif not marks:
            yield from _found(value, arguments[0], path, key=key)
    elif origin in (Union, UnionType):
        for argument in arguments:
            yield from _found(value, argument, path, key=key)
    elif isinstance(value, Mapping) and len(arguments) == 2:
        for name, item in value.items():
            yield from _found(name, arguments[0], (*path, name), key=True)
            yield from _found(item, arguments[1], (*path, name))
    elif isinstance(value, Sequence) and not isinstance(value, str) and arguments:
        for place, item in enumerate(value):
            yield from _found(item, arguments[0], (*path, place))


VALID_SIZES = (8, 40)  # fewest and most validation examples of ``valid_size: auto``

ValidSize = Annotated[
    Annotated[int, Field(ge=2), Tag("~number")] | Annotated[Literal["auto"], Tag("~name")],
    Discriminator(lambda value: "~name" if isinstance(value, str) else "~number"),
]  # one kind per type of value, so that an error names the setting once

TrackerName = Literal["mlflow", "tensorboard", "wandb"]


class BudgetSettings(Settings):
    """Hard limits of a run; an omitted limit means unlimited."""

    system_runs: float | None = Field(default=None, ge=0)
    """Maximum number of system runs on train and validation examples; cached and forked runs count as a
    fraction. Proposal requests, such as requests for new prompts, are not system runs: limit them by
    calls, tokens or cost."""
    calls: int | None = Field(default=None, ge=0)
    """Maximum number of engine calls, including proposal requests and the test split."""
    tokens: int | None = Field(default=None, ge=0)
    """Maximum number of prompt and completion tokens, including proposals and the test split."""
    cost: float | None = Field(default=None, ge=0)
    """Maximum cost in US dollars, including proposals and the test split."""
    minutes: float | None = Field(default=None, gt=0)
    """Maximum wall-clock minutes over all attempts, including the test split."""
    test_share: float = Field(default=0.2, gt=0, lt=1)
    """Share of calls, tokens, cost and minutes reserved for the evaluation on the test split."""
    max_proposal_failures: int = Field(default=5, ge=1)
    """Number of consecutive failed calls after which a job stops querying the model that writes proposals.
    Four times as many unusable replies have the same effect."""

    def limits(self) -> dict[str, Any]:
        """Return the configured limits by name.

        >>> BudgetSettings(system_runs=100).limits()
        {'system_runs': 100.0}
        """
        found = {each.name: getattr(self, each.name) for each in fields(Budget)}
        return {name: limit for name, limit in found.items() if limit is not None}

    def total(self) -> Budget:
        """Return the limits of the whole run."""
        return Budget(**self.limits())

    def search(self) -> Budget:
        """Return the limits of the search: everything except the reserve for the test split."""
        return self.total().share(1 - self.test_share)

    def test(self) -> Budget:
        """Return the reserve for the test split; its system runs are counted separately and unlimited."""
        return replace(self.total().share(self.test_share), system_runs=None)


class LimitSettings(Settings):
    """Limits on the mean of the runs of a configuration; calls from the cache count like executed ones."""

    usd_per_run: float | None = Field(default=None, gt=0)
    """US dollars of the system's calls. Every model of the system needs a price."""
    tokens_per_run: float | None = Field(default=None, gt=0)
    """Prompt and completion tokens of the system's calls."""
    seconds_per_run: float | None = Field(default=None, gt=0)
    """Seconds of the longest chain of dependent calls, as measured, with retries and waits."""

    def broken(self, *, usd: float | None, tokens: float, seconds: float) -> list[str]:
        """Return a phrase for each limit that means per run exceed; unknown dollars exceed their limit.

        >>> LimitSettings(usd_per_run=0.01, tokens_per_run=500).broken(usd=None, tokens=620, seconds=1)
        ['usd_per_run is unknown', 'tokens_per_run 620 > 500']
        """
        means = {"usd_per_run": usd, "tokens_per_run": tokens, "seconds_per_run": seconds}
        found: list[str] = []
        for name, limit in self.model_dump(exclude_none=True).items():
            if (mean := means[name]) is None:
                found.append(f"{name} is unknown")
            elif mean > limit:
                found.append(f"{name} {mean:.4g} > {limit:g}")
        return found


class ObjectiveSettings(Settings):
    """Objective of an optimization."""

    maximize: Literal["score"] = "score"
    """What to maximize: `score`, the mean of the metric."""
    limits: LimitSettings = LimitSettings()
    """Limits per run. A run returns no change that exceeds one, and prefers any configuration that meets all
    of them to one that does not."""


def _check_cluster(address: str) -> str:
    if not re.fullmatch(r"auto|local|[A-Za-z0-9._-]+:[0-9]{1,5}", address):
        raise ValueError(f"must be auto, local or HOST:PORT, but got {address!r}")
    return address


class RaySettings(Settings):
    """Workers on a Ray cluster."""

    address: Annotated[str, AfterValidator(_check_cluster)] = "auto"
    """Address of the cluster: `auto` (that of `RAY_ADDRESS`, or of your own `ray start` here), `local` (one
    started on this machine for the run), or `host:port`, which needs your consent if a file names it."""
    workers: int | None = Field(default=None, ge=1)
    """Number of workers; default: one per machine. Each is a process with models and indexes of its own, and
    makes many calls at a time. For `compound sweep --cluster`: number of runs at a time."""
    cpus: float = Field(default=1.0, ge=0)
    """Processors that Ray reserves for each worker."""
    start_seconds: float = Field(default=120.0, gt=0)
    """Maximum time in which a worker must start and load the system."""
    max_restarts: int = Field(default=20, ge=0)
    """Number of lost workers that are replaced; above it, the run stops and can be resumed."""


class RunnerSettings(Settings):
    """Where calls are computed."""

    ray: RaySettings
    """Compute them on a Ray cluster; needs the extra `ray`."""


class CommonSettings(Settings):
    """Settings shared by all methods."""

    method: MethodName = "auto"
    """`auto` (one of the following, by system and budget, with the reasons), `search` (all parameters except
    weights, jointly), `optimas` (the same with local rewards, which also train weights), a method that trains
    weights such as `mmgrpo` or `mhgpo_rr`, `better_together`, a baseline such as `random` or `mipro`, or your
    own `module:function`."""
    seed: int = Field(default=0, ge=0)
    """Seed of all random streams of the run."""
    budget: BudgetSettings = BudgetSettings()
    """Hard limits of the run."""
    objective: ObjectiveSettings = ObjectiveSettings()
    """What a run optimizes, and what a run of the system may take."""
    iterations: int = Field(default=6, ge=1)
    """Maximum number of proposals tested on the validation split."""
    train_size: int | None = Field(default=None, ge=1)
    """Number of train examples to use; default: all."""
    valid_size: ValidSize | None = "auto"
    """Number of validation examples used for acceptance decisions; `null` uses all. `auto` uses 40, or a
    quarter of `budget.system_runs` if that is less (at least 8): the initial evaluation and one decision then
    leave about half of the budget for the search. A run that is resumed with another budget keeps its
    examples."""
    test_size: int | None = Field(default=None, ge=1)
    """Number of test examples evaluated for the report; default: all."""
    minibatch: int = Field(default=8, ge=1)
    """Typical number of train examples in a candidate's first evaluation; searches use at least half as many.
    Later evaluations add examples for the best candidates."""
    candidates: int = Field(default=8, ge=1)
    """Number of candidates per proposal round."""
    alpha: float = Field(default=0.05, gt=0, lt=1)
    """Probability, over the whole run, of the verdict `supported` for a configuration that is not better."""
    accept: Literal["best", "supported"] = "best"
    """Which configuration a run returns: `best` (the one with the highest validation score, with the verdict
    of the test beside it, and the initial one if nothing scored higher), or `supported` (only one that the
    test supports). With `supported`, a part of the budget, and of the train examples if the validation split
    has no unused ones, is kept for second looks at changes that the first look does not decide."""
    repeats: int = Field(default=1, ge=1)
    """Number of runs per example when a stochastic system is evaluated."""
    trackers: tuple[TrackerName, ...] = ()
    """Experiment trackers that receive the run: `tensorboard` (an event file in the run directory), `mlflow`,
    `wandb`. The trackers' own environment variables, such as `MLFLOW_TRACKING_URI` or `WANDB_PROJECT`, state
    where."""
    concurrency: int = Field(default=64, ge=1)
    """Maximum number of examples in flight."""
    runner: RunnerSettings | None = None
    """Where examples are run; default: in this process. Results are equal."""
    failure_score: float = 0.0
    """Score of a failed run; failures are also counted and reported."""
    max_failed: float = Field(default=0.5, gt=0, le=1)
    """Maximum share of failed runs in an evaluation; above it, the run stops. A higher one resumes it.
    Failures on the test split are only reported."""

    @property
    def valid_examples(self) -> int | None:
        """Number of validation examples to use, as `valid_size` says; None for all.

        >>> [CommonSettings(budget={"system_runs": runs}).valid_examples for runs in (None, 400, 100, 20)]
        [40, 40, 25, 8]
        """
        if self.valid_size != "auto":
            return self.valid_size
        fewest, most = VALID_SIZES
        runs = self.budget.system_runs
        return most if runs is None else max(fewest, min(most, int(runs / 4)))
