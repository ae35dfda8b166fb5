"""Records of training steps, and the facts computed from them.

Each training step writes one record to ``memory.jsonl``. A run trains in one or several consecutive
jobs; its baselines write records to their own directories.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, TypeGuard

from compound.core.errors import CompoundError
from compound.core.formatting import plural
from compound.core.security.untrusted import UntrustedFolder
from compound.execution.rng import derive_seed
from compound.graph.configuration import components_of
from compound.optimization.runs.directory import (
    as_folder,
    inconsistency_errors,
    read_json,
    read_records,
)
from compound.optimization.runs.recorder import MEMORY
from compound.report.record import Facts, Record, to_strict_json
from compound.report.text import seconds

KIND = "training"
ABOUT = (
    "kind",
    "seed",
    "step",
    "recipe",
    "keys",
)  # identify a record; all other fields are metrics
END = 0.2  # share of a job's steps to average at the start and at the end
SUMS = (
    "tokens",
    "sampled",
    "left_out",
    "masked",
    "refilled",
    "skipped_updates",
    "lost",
    "failed",
    "prompt_tokens",
    "sample_seconds",
    "train_seconds",
)
JOB_ENDS = ("reward", "skipped", "kept", "explained")
COMPONENT_ENDS = ("reward", "penalty", "entropy", "length", "similarity")

Step = Mapping[str, Any]  # numbers of a training step, and those of components under ``components``


def records(run: str | Path) -> list[Step]:
    """Return the records of a run's training steps, oldest first.

    Args:
        run: the directory of a finished or unfinished run; for a baseline ``RUN/baselines/METHOD``.

    Raises:
        RunDirectoryError: the folder is not a run directory, or one of its files is broken.
    """
    return _records(as_folder(run))


def _records(folder: UntrustedFolder) -> list[Step]:
    read_json(folder, "config.json")
    return [record for record in read_records(folder, MEMORY) if record.get("kind") == KIND]


def export(run: str | Path, log: Callable[[dict[str, float], int], object]) -> None:
    """Export the metrics of all training steps to an experiment tracker.

    Args:
        run: the run directory.
        log: called for each step with its metrics by name (``reward``, ``components/NAME/entropy``
            …; ``job`` is the job's number in the report) and the step number, which continues
            across jobs because trackers require increasing steps: ``wandb.log``, ``trackio.log``,
            ``mlflow.log_metrics``.

    Raises:
        RunDirectoryError: the folder is not a run directory, or one of its files is broken.

    Example:
        >>> import tempfile
        >>> from compound.optimization.runs.directory import RunDirectory
        >>> run = RunDirectory.create(tempfile.mkdtemp() + "/run", "", {"optimize": {"seed": 0}})
        >>> step = {"kind": "training", "reward": 0.5, "components": {"a": {"kl": 0.1}}}
        >>> run.append("memory.jsonl", step)
        >>> run.close()
        >>> logged = []
        >>> export(run.path, lambda metrics, step: logged.append((step, metrics)))
        >>> logged
        [(0, {'job': 1, 'reward': 0.5, 'components/a/kl': 0.1})]
    """
    step = 0
    for number, steps in _jobs(Record.read(run)):
        for record in steps:
            log({"job": number, **step_metrics(record)}, step)
            step += 1


def step_metrics(record: Mapping[str, object]) -> dict[str, float]:
    """Return the finite numbers of a training step's record, by path."""
    return dict(_flat({name: value for name, value in record.items() if name not in ABOUT}))


def _flat(value: object, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield the finite numbers of a record with their paths; strings and lists are skipped."""
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
    for found in _records(record.folder):
        jobs.setdefault(found.get("seed"), []).append(found)
    seed = record.config["optimize"]["seed"]
    numbers: dict[object, int] = {
        derive_seed(seed, "job", n): n + 1 for n in range(len(record.all("job")) + 1)
    }  # one more than has ended: a job may be running
    places = enumerate(jobs.items(), 1)
    return [(numbers.get(job, place), steps) for place, (job, steps) in places]


def training_facts(path: str | Path) -> Facts | None:
    """Return the training facts of a run's method and baselines; ``None`` if there are none.

    If the records cannot be read, the reason is returned as ``problem``, and the rest of the report
    is still written.
    """
    try:
        with inconsistency_errors(path):
            record = Record.read(path)
            trained = map(method_training, (record, *record.baselines()))
            found = [facts for facts in trained if facts]
    except CompoundError as error:
        return {"problem": str(error)}
    return {"methods": found} if found else None


def method_training(record: Record) -> Facts | None:
    """Return the jobs that trained weights, and their totals; ``None`` if there are none."""
    drawn, chosen = _drawn(record), _chosen(record)
    jobs = [
        {**_job(number, steps, drawn.get(number, [])), **chosen.get(number, _choice(None, {}))}
        for number, steps in _jobs(record)
    ]
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


def _chosen(record: Record) -> dict[int, Facts]:
    """Return what each job proposed, by the job's number."""
    return {
        event["job"] + 1: _choice(facts["best_step"], dict(facts["evaluated"]))
        for event in record.all("job")
        if (facts := event.get("facts") or {}).get("best_step") is not None
    }


def _choice(step: int | None, scores: Mapping[int, float]) -> Facts:
    """Return the step that a job proposed, and the held-out scores of start and step."""
    held_out = [scores.get(0), None if step is None else scores.get(step)]
    return {"best_step": step, "held_out": held_out}


def _drawn(record: Record) -> dict[int, list[int]]:
    """Return the completion tokens between the progress events of each job, by the job's number.

    Each step emits a progress event right after its record, and evaluations emit separate ones. The
    tokens are those of the step's rollouts and, for the first step of a job, also those of the job
    before it.
    """
    found: dict[int, list[int]] = {}
    before = 0
    for event in record.events:
        now = event["spent"].get("completion_tokens", 0) if "spent" in event else 0
        if event["event"] == "progress" and "evaluation" not in event:
            found.setdefault(event["job"] + 1, []).append(now - before)
        before = now
    return found


def _job(number: int, found: Sequence[Step], drawn: Sequence[int]) -> Facts:
    """Return the facts of a job; with more events than steps, tokens are unknown."""
    known = drawn if len(drawn) <= len(found) else []
    steps: list[Step] = [
        {**_step(record), **({"sampled": known[place]} if place < len(known) else {})}
        for place, record in enumerate(found)
    ]
    listed = [keys for record in found if isinstance(keys := record.get("keys"), list)]
    trained = components_of(str(key) for keys in listed for key in keys)
    names = dict.fromkeys([*trained, *(name for step in steps for name in by_component(step))])
    return {
        "number": number,
        "recipe": str(found[0].get("recipe", "")),
        "steps": steps,
        **_sums(steps),
        **_ends(steps, JOB_ENDS),
        "answers": {name: answers for name in names if (answers := _answers(found, name))},
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


def _answers(found: Sequence[Step], name: str) -> list[tuple[int, list[Facts]]]:
    """Return the recorded answers of a component at the first and the last step that has any."""
    recorded = [(place, record.get("answers")) for place, record in enumerate(found)]
    answers = [
        (place, by[name]) for place, by in recorded if isinstance(by, Mapping) and by.get(name)
    ]
    return answers if len(answers) < 2 else [answers[0], answers[-1]]


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
    """Return the training data of a component, and its numbers at the first and the last steps."""
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
    """Return tokens per second, over the steps that recorded both."""
    both = [(get_number(step, tokens), get_number(step, took)) for step in steps]
    known = [(n, duration) for n, duration in both if n is not None and duration]
    return sum(n for n, _ in known) / sum(duration for _, duration in known) if known else None


# --- for the template of the report -------------------------------------------------------------


def trained_components(method: Facts) -> list[Facts]:
    """Return the facts of each trained component and job."""
    return [
        {**own, "job": job["number"], "component": name}
        for job in method["jobs"]
        for name, own in job["components"].items()
    ]


def answers_of(method: Facts) -> list[Facts]:
    """Return the recorded answers of all jobs and components."""
    return [
        {**answer, "job": job["number"], "component": name, "step": step + 1}
        for job in method["jobs"]
        for name, steps in job["answers"].items()
        for step, recorded in steps
        for answer in recorded
    ]


def speeds_of(method: Facts) -> str:
    """Return a sentence on the time and speed of sampling and training."""
    totals = method["totals"]
    steps = plural(totals["steps"], "step")
    stages = {"sampling": totals["sample_seconds"], "training": totals["train_seconds"]}
    parts = [
        f"{stage} took {seconds(took)}{_rate(totals[f'{stage}_speed'])}"
        for stage, took in stages.items()
        if took is not None
    ]
    if not parts:
        return f"{steps}; their duration is not recorded."
    several = totals["steps"] > len(method["jobs"])
    warm = " Speeds exclude the first step of each job." if several else ""
    return f"{' and '.join(parts).capitalize()}, in total over {steps}.{warm}"


def _rate(speed: float | None) -> str:
    if speed is None:
        return ""
    return f" ({speed:,.0f} tokens/s)" if speed >= 10 else f" ({speed:.1f} tokens/s)"
