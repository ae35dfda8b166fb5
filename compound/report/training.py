"""Records of training steps, the facts computed from them, and their curves.

Each training step writes one record to ``memory.jsonl``. A run trains in one or several consecutive
jobs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from compound.core.errors import CompoundError
from compound.core.security.untrusted import UntrustedFolder
from compound.core.storage.state import first_problem
from compound.execution.rng import derive_seed
from compound.graph.configuration import components_of
from compound.optimization.runs.directory import (
    as_folder,
    inconsistency_errors,
    read_json,
    read_records,
)
from compound.optimization.runs.recorder import MEMORY
from compound.report.figures import (
    PALETTE,
    WIDE,
    clip_name,
    columns_of,
    figure_to_svg,
    use_integer_ticks,
)
from compound.report.record import Facts, Record, to_strict_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KIND = "training"
ABOUT = ("kind", "seed", "step", "recipe", "keys")  # identify a record; all else are metrics
END = 0.2  # share of a job's steps to average at the start and at the end
COUNTS = ("tokens", "sampled", "left_out", "masked", "refilled", "skipped_updates", "lost")
SUMS = (*COUNTS, "failed", "prompt_tokens", "sample_seconds", "train_seconds")
JOB_ENDS = ("reward", "skipped", "kept", "explained")
COMPONENT_ENDS = ("reward", "penalty", "entropy", "length", "similarity")

Step = Mapping[str, Any]  # numbers of a training step, and those of components under ``components``


def records(run: str | Path | UntrustedFolder) -> list[Step]:
    """Return the records of a run's training steps, oldest first.

    Args:
        run: the directory of a finished or unfinished run.

    Raises:
        RunDirectoryError: the folder is not a run directory, or one of its files is broken.
    """
    folder = as_folder(run)
    read_json(folder, "config.json")
    return [record for record in read_records(folder, MEMORY) if record.get("kind") == KIND]


def step_metrics(record: Mapping[str, object]) -> dict[str, float]:
    """Return the finite numbers of a training step's record by path, such as ``components/NAME/entropy``."""
    return numbers_by_path({name: value for name, value in record.items() if name not in ABOUT})


def numbers_by_path(values: Mapping[str, object]) -> dict[str, float]:
    """Return the finite numbers of nested mappings by their path, such as ``budget/calls``."""
    return dict(_flat(values))


def _flat(value: object, name: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{name}/{key}" if name else key)
    elif _is_number(value):
        yield name, int(value) if isinstance(value, bool) else value


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


def _jobs(record: Record) -> list[tuple[int, list[Step]]]:
    """Return the steps of each job, with the job's number in the table of jobs."""
    jobs: dict[object, list[Step]] = {}
    for found in records(record.folder):
        jobs.setdefault(found.get("seed"), []).append(found)
    seed = record.config["optimize"]["seed"]
    numbers: dict[object, int] = {
        derive_seed(seed, "job", n): n + 1 for n in range(len(record.all("job")) + 1)
    }  # one more than has ended: a job may be running
    places = enumerate(jobs.items(), 1)
    return [(numbers.get(job, place), steps) for place, (job, steps) in places]


def training_facts(path: str | Path, record: Record | None = None) -> Facts | None:
    """Return the training facts of a run; ``None`` if there are none.

    If the records cannot be read, the reason is returned as ``problem``, and the rest of the report
    is still written.
    """
    try:
        with inconsistency_errors(path):
            return method_training(record or Record.read(path))
    except CompoundError as error:
        return {"problem": str(error)}


def method_training(record: Record) -> Facts | None:
    """Return the jobs that trained weights, and their totals; ``None`` if there are none."""
    chosen: dict[int, tuple[int | None, Mapping[int, float]]] = {
        event["job"] + 1: (facts["best_step"], dict(facts["evaluated"]))
        for event in record.all("job")
        if (facts := event.get("facts") or {}).get("best_step") is not None
    }
    jobs = []
    for number, steps in _jobs(record):
        best, scores = chosen.get(number, (None, {}))
        held_out = [scores.get(0), None if best is None else scores.get(best)]
        about = {"number": number, "best_step": best, "held_out": held_out}
        jobs.append({**about, **_job(steps)})
    if not jobs:
        return None
    every = [step for job in jobs for step in job["steps"]]
    # Speeds leave out the first step of each job, which includes the warm-up.
    later = [step for job in jobs for step in (job["steps"][1:] or job["steps"])]
    totals = {
        "steps": len(every),
        **_sums(every),
        "sampling_speed": _speed(later, "sampled", "sample_seconds"),
        "training_speed": _speed(later, "tokens", "train_seconds"),
    }
    return to_strict_json({"method": record.method, "jobs": jobs, "totals": totals})


def _job(found: Sequence[Step]) -> Facts:
    """Return the facts of a job."""
    steps = [_step(record) for record in found]
    listed = [keys for record in found if isinstance(keys := record.get("keys"), list)]
    trained = components_of(str(key) for keys in listed for key in keys)
    names = dict.fromkeys([*trained, *(name for step in steps for name in by_component(step))])
    return {
        "recipe": str(found[0].get("recipe", "")),
        "steps": steps,
        **_sums(steps),
        **_ends(steps, JOB_ENDS),
        "answers": _answers(found),
        "components": {
            name: _component([by_component(step).get(name, {}) for step in steps]) for name in names
        },
    }


def by_component(step: Step) -> Mapping[str, Step]:
    """Return the numbers of a step by component."""
    found = step.get("components")
    return found if isinstance(found, Mapping) else {}


def get_number(step: Step, name: str) -> float | None:
    """Return a number of a step or of one of its components, or ``None`` if it has none."""
    value = step.get(name)
    return value if isinstance(value, int | float) else None


def _step(record: Step) -> Step:
    """Return the numbers of a step; ``skipped`` and ``kept`` are shares."""
    penalties = record.get("penalties")
    paid = penalties if isinstance(penalties, Mapping) else {}
    components = {
        name: _numbers({**facts, "penalty": paid.get(name)})
        for name, facts in by_component(record).items()
    }
    numbers = {name: n for name, n in _numbers(record).items() if name not in ABOUT}
    shares = {
        part: numbers[part] / numbers[whole] if numbers.get(whole) and part in numbers else None
        for part, whole in (("skipped", "groups"), ("kept", "attempts"))
    }
    tokens = sum(facts.get("tokens", 0) for facts in components.values())
    return {**numbers, **shares, "tokens": tokens, "components": components}


def _numbers(values: Mapping[str, object]) -> dict[str, float]:
    return {name: value for name, value in values.items() if _is_number(value)}


class ShownAnswer(BaseModel):
    """An answer that the record of a step shows; lists have a number for each token, or are empty."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    tokens: list[str]
    reward: float
    length: int = 0
    advantage: float | None = None
    advantages: list[float] = []
    ratios: list[float] = []  # of the trainer's probability in the last update to the sampler's
    clipped: list[int] = []  # places of tokens
    truncated: bool = False
    left_out: bool = False
    prompt: str = ""  # if it differs from that of the group

    @property
    def by_token(self) -> list[float]:
        """The advantage of each token; 0 if it is unknown."""
        return self.advantages or [self.advantage or 0.0] * len(self.tokens)


class ShownGroup(BaseModel):
    """Answers that a step compared with each other, the highest reward first."""

    model_config = ConfigDict(frozen=True)

    component: str
    example: str
    prompt: str = ""
    answers: list[ShownAnswer] = Field(min_length=1)


def shown_groups(step: Step) -> list[ShownGroup]:
    """Return the groups of answers that a step's record shows.

    Raises:
        ValueError: they are malformed.
    """
    found = step.get("excerpts", ())
    if isinstance(old := step.get("answers"), Mapping):  # of earlier versions: two of a component
        found = [
            {"component": name, "example": a["example"], "answers": [{**a, "tokens": [a["text"]]}]}
            for name, answers in old.items()
            for a in answers
        ]
    try:
        return [ShownGroup.model_validate(group) for group in found]
    except ValidationError as error:
        raise ValueError(f"answers of step {step.get('step')}: {first_problem(error)}") from None


def shown_steps(record: Record) -> list[tuple[int, int, Step]]:
    """Return the steps whose record shows answers: the job's number, the place, the record."""
    return [
        (number, place, step)
        for number, steps in _jobs(record)
        for place, step in enumerate(steps)
        if step.get("excerpts") or step.get("answers")
    ]


def _sums(steps: Sequence[Step]) -> Facts:
    """Return totals over some steps, ``None`` without numbers; memory is the maximum."""
    found: Facts = {name: _total(steps, name) for name in SUMS}
    read, cached = found["prompt_tokens"], _total(steps, "prompt_tokens_cached")
    found["prompts_saved"] = cached / read if read and cached is not None else None
    found["memory"] = max(_known(steps, "memory"), default=None)
    return found


def _known(steps: Iterable[Step], name: str) -> list[float]:
    return [value for step in steps if (value := get_number(step, name)) is not None]


def _total(steps: Iterable[Step], name: str) -> float | None:
    known = _known(steps, name)
    return sum(known) if known else None


def _component(steps: Sequence[Step]) -> Facts:
    sums = {name: _total(steps, name) for name in ("samples", "tokens")}
    return {**sums, **_ends(steps, COMPONENT_ENDS)}


def _ends(steps: Sequence[Step], names: Sequence[str]) -> Facts:
    return {name: first_last_means([get_number(step, name) for step in steps]) for name in names}


def first_last_means(values: Sequence[float | None]) -> list[float | None]:
    """Return the means over the first and the last fifth of some steps; one counts in both.

    >>> first_last_means([1.0, 2.0, 3.0, 4.0, 6.0, None, 1.0, 1.0, None, 9.0])
    [1.5, 9.0]
    """
    few = max(1, round(END * len(values)))
    sides = ([v for v in side if v is not None] for side in (values[:few], values[-few:]))
    return [fmean(side) if side else None for side in sides]


def _speed(steps: Sequence[Step], tokens: str, took: str) -> float | None:
    both = [(get_number(step, tokens), get_number(step, took)) for step in steps]
    known = [(n, duration) for n, duration in both if n is not None and duration]
    return sum(n for n, _ in known) / sum(duration for _, duration in known) if known else None


def trained_components(method: Facts) -> list[Facts]:
    """Return the facts of each trained component and job."""
    return [
        {**own, "job": job["number"], "component": name}
        for job in method["jobs"]
        for name, own in job["components"].items()
    ]


def _answers(found: Sequence[Step]) -> list[Facts]:
    """Return the best and the worst answer of each component at the first and the last step with any."""
    steps = [(place, groups) for place, step in enumerate(found) if (groups := shown_groups(step))]
    rows = []
    for name in dict.fromkeys(group.component for _, groups in steps for group in groups):
        own = [(n, g) for n, groups in steps for g in groups if g.component == name]
        for place in dict.fromkeys((own[0][0], own[-1][0])):
            answers = [(a, g.example) for n, g in own if n == place for a in g.answers]
            answers.sort(key=lambda pair: -pair[0].reward)
            rows += [
                {
                    "component": name,
                    "step": place + 1,
                    "example": example,
                    "text": "".join(answer.tokens),
                    **answer.model_dump(include={"reward", "advantage"}),
                }
                for answer, example in answers[:: len(answers) - 1 or 1]
            ]
    return rows


def answers_of(method: Facts) -> list[Facts]:
    """Return the best and the worst recorded answers of all jobs and components."""
    return [{**row, "job": job["number"]} for job in method["jobs"] for row in job["answers"]]


# --- curves by step -------------------------------------------------------------------------------

ROW = 2.25  # inches, height of a row of panels
SMOOTH = 0.1  # window of the moving mean, as a share of a job's steps
COLORS = ("accent", "other1", "other3", "other2", "good")
Dashes = str | tuple[float, tuple[float, ...]]  # a matplotlib line style
DASHES: tuple[Dashes, ...] = ("-", (0, (4, 1.5)), (0, (1.2, 1.2)))  # of components of one colour
THRESHOLD: tuple[str, Dashes] = (PALETTE["good"], (0, (3, 1.5)))
FEW = 4  # up to this number of lines per panel, draw single steps as well as moving means

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """One small plot."""

    title: str  # the quantity and its unit
    facts: tuple[str, ...]  # names of the numbers to draw; the second one is dashed
    by_component: bool = True
    low: float | None = 0.0  # limits of the axis; ``None`` follows the data
    high: float | None = None
    moving: bool = False  # hidden if all values are zero: the method does not use the number


REWARD = Panel("Mean reward of rollouts", ("reward", "threshold"), by_component=False, low=None)
CLIPPED = Panel("Clipped tokens (share)", ("high", "low"), moving=True)
PANELS = (
    REWARD,
    Panel("Reward by component", ("reward",), low=None),
    Panel("Entropy (nats per token)", ("entropy",)),
    Panel("Answer length (tokens)", ("length",)),
    Panel("Similarity of answers", ("similarity",), high=1.0),
    Panel("KL to the old policy", ("kl",), moving=True),
    Panel("KL to the base model", ("base_kl",), moving=True),
    CLIPPED,
    Panel("Skipped groups (share)", ("skipped",), by_component=False, high=1.0),
    Panel("Kept attempts (share)", ("kept",), by_component=False, high=1.0),
)


def training_svg(jobs: Sequence[Facts], name: str = "training") -> str:
    """Return the SVG of the training curves of a method's consecutive jobs.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    panels = panels_with_data(jobs)
    components = list(dict.fromkeys(name for job in jobs for name in job["components"]))
    across = 4 if len(panels) in (4, 7, 8) or len(panels) > 9 else min(len(panels), 3)
    down = -(-len(panels) // across)
    looks = {name: _look(components, name) for name in components}
    if _has_threshold(jobs):
        looks["threshold"] = THRESHOLD
    with figure_to_svg(WIDE, ROW * down + 0.2 * (1 + len(looks) // 5), name) as (figure, svg):
        grid = figure.subplots(down, across, squeeze=False)
        for place, axes in enumerate(grid.flat):
            if place >= len(panels):
                axes.axis("off")
                continue
            _draw(axes, panels[place], jobs, components)
            _separate(axes, jobs, WIDE / across, named=place < across)
            if place + across >= len(panels):
                axes.set_xlabel("training step")
        from matplotlib.lines import Line2D

        lines = [Line2D([], [], color=color, linestyle=dashes) for color, dashes in looks.values()]
        names = map(clip_name, looks)
        figure.legend(lines, names, ncols=min(5, len(looks)) or 1, loc="outside lower center")
    return svg[0]


def panels_with_data(jobs: Sequence[Facts]) -> list[Panel]:
    """Return the panels that have data."""
    return [panel for panel in PANELS if _has_data(jobs, panel)]


def _has_data(jobs: Sequence[Facts], panel: Panel) -> bool:
    found = [y for job in jobs for fact in panel.facts for y in _values(job, panel, fact)]
    return any(found) if panel.moving else bool(found)


def _has_threshold(jobs: Sequence[Facts]) -> bool:
    return any(curve(job["steps"], "threshold") for job in jobs)


def _values(job: Facts, panel: Panel, fact: str) -> list[float]:
    names = job["components"] if panel.by_component else [None]
    return [y for name in names for _, y in curve(job["steps"], fact, name)]


def curve(steps: Sequence[Step], fact: str, component: str | None = None) -> Points:
    """Return a number by step, of a component or of the whole step; steps without it are skipped.

    >>> curve([{"reward": 0.5}, {"reward": None}, {"reward": 1.0}], "reward")
    [(0, 0.5), (2, 1.0)]
    """
    own = [by_component(s).get(component, {}) if component is not None else s for s in steps]
    return [(at, y) for at, step in enumerate(own) if (y := get_number(step, fact)) is not None]


def moving_mean(points: Points, half: int) -> Points:
    """Return the centred moving mean over each point and up to ``half`` points on either side.

    >>> moving_mean([(0, 1.0), (1, 2.0), (2, 6.0)], 1)
    [(0, 1.5), (1, 3.0), (2, 4.0)]
    """
    values = [y for _, y in points]
    return [(x, fmean(values[max(0, i - half) : i + half + 1])) for i, (x, _) in enumerate(points)]


def _starts(jobs: Sequence[Facts]) -> list[int]:
    """Return the first step of each job in the figure, and the step after the last job."""
    return [*accumulate((len(job["steps"]) for job in jobs), initial=1)]


def _look(names: Sequence[str], component: str | None) -> tuple[str, Dashes]:
    if component is None:
        return PALETTE["ink"], "-"
    place = names.index(component)
    return PALETTE[COLORS[place % len(COLORS)]], DASHES[place // len(COLORS) % len(DASHES)]


def _draw(axes: Axes, panel: Panel, jobs: Sequence[Facts], names: Sequence[str]) -> None:
    """Draw moving means, single steps if there are few lines, and thresholds."""
    components = names if panel.by_component else [None]
    few = len(components) * len(panel.facts) <= FEW
    for start, job in zip(_starts(jobs), jobs, strict=False):
        half = round(SMOOTH * len(job["steps"])) // 2
        for component, fact in product(components, panel.facts):
            points = [(start + at, y) for at, y in curve(job["steps"], fact, component)]
            if not points:
                continue
            color, dashes = _look(names, component)
            if fact == "threshold":
                look: dict[str, Any] = {"drawstyle": "steps-mid", "linewidth": 1.3}
                color, dashes = THRESHOLD
            else:
                if half and few:
                    axes.plot(*columns_of(points, 2), color=color, linewidth=0.7, alpha=0.3)
                points = moving_mean(points, half)
                dashes = DASHES[1] if fact != panel.facts[0] else dashes
                look = {"linewidth": 1.7, "marker": "o" if len(points) == 1 else "", "ms": 3.5}
            axes.plot(*columns_of(points, 2), color=color, linestyle=dashes, **look)
    axes.set_title(panel.title, pad=18 if len(jobs) > 1 else 6)  # above the numbers of the jobs
    end = _starts(jobs)[-1] - 1
    margin = max(0.5, 0.02 * end)
    axes.set_xlim(1 - margin, end + margin)
    use_integer_ticks(axes.xaxis)
    if panel.low is not None:
        drawn = (float(np.max(each.get_ydata())) for each in axes.get_lines())
        top = panel.high or 1.08 * (max(drawn, default=0.0) or 1.0)
        axes.set_ylim(panel.low - 0.03 * (panel.high or 0), top * 1.03)


def _separate(axes: Axes, jobs: Sequence[Facts], wide: float, *, named: bool) -> None:
    """Draw a vertical line between jobs, with the numbers of the jobs above if they fit."""
    starts = _starts(jobs) if len(jobs) > 1 else []
    for start in starts[1:-1]:
        axes.axvline(start - 0.5, color=PALETTE["muted"], linewidth=0.8, alpha=0.7)
    for (start, end), job in zip(pairwise(starts), jobs, strict=False):
        room = 0.85 * wide * (end - start) / (starts[-1] - 1)
        text = f"job {job['number']}" if room > 0.42 else str(job["number"]) if room > 0.16 else ""
        if named and text:
            at, across = ((start + end - 1) / 2, 1.02), axes.get_xaxis_transform()
            axes.text(*at, text, transform=across, size=7.5, color=PALETTE["muted"], ha="center")


def caption(jobs: Sequence[Facts]) -> str:
    """Return the caption of the figure."""
    parts = [
        "Metrics by training step: thick lines are moving means over a tenth of a job's steps; "
        "thin lines, in panels with few lines, are single steps."
    ]
    if _has_threshold(jobs):
        parts.append("Attempts with a reward of at least the threshold are kept.")
    if len(jobs) > 1:
        parts.append("Vertical lines separate the jobs.")
    if _has_data(jobs, CLIPPED):
        parts.append(
            "Clipped tokens: solid above the upper bound (positive advantage), dashed below the "
            "lower bound (negative advantage)."
        )
    elif any(_values(job, CLIPPED, "high") for job in jobs):
        parts.append("No token was clipped.")
    return " ".join(parts)
