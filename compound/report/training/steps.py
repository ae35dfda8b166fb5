"""Records of training steps: facts, and the section of the report.

A training step leaves one record in ``memory.jsonl``. A run trains in one job or in several, one after the
other; the baselines of a run have records of their own, in their own directories.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TypeGuard

from compound.errors import CompoundError
from compound.execution.rng import derive_seed
from compound.graph.configuration import components_of
from compound.report.facts.documents import (
    AnswerFacts,
    Chosen,
    Ends,
    MethodTraining,
    Step,
    Sums,
    Totals,
    TrainedComponent,
    TrainedJob,
    TrainingFacts,
)
from compound.report.facts.record import Record, plain
from compound.runs.directory import as_folder, read_json, read_records, understood
from compound.runs.recorder import MEMORY
from compound.security.untrusted import UntrustedFolder

KIND = "training"
ABOUT = ("kind", "seed", "step", "recipe", "keys")  # of a record: whose it is; everything else was measured
NOT_CHOSEN: Chosen = {"best_step": None, "held_out": [None, None]}
END = 0.2  # of a job's steps, at either end, that are compared


def records(run: str | Path) -> list[Step]:
    """Return the records of a run's training steps, oldest first.

    Args:
        run: the run directory, of a finished or an unfinished run; a baseline's is ``RUN/baselines/METHOD``.

    Raises:
        RunDirectoryError: it is no run directory, or one of its files is broken.
    """
    return _records(as_folder(run))


def _records(folder: UntrustedFolder) -> list[Step]:
    read_json(folder, "config.json")
    found = read_records(folder, MEMORY)
    return [record for record in found if record.get("kind") == KIND]


def export(run: str | Path, log: Callable[[dict[str, float], int], object]) -> None:
    """Hand the numbers of every training step to an experiment tracker.

    Args:
        run: the run directory.
        log: called for each step with its numbers by name (``reward``, ``components/NAME/entropy`` …; ``job``
            is the job's number in the report) and the step's number, which goes on from job to job and so
            never falls, as trackers ask: ``wandb.log``, ``trackio.log``, ``mlflow.log_metrics``.

    Raises:
        RunDirectoryError: it is no run directory, or one of its files is broken.

    Example:
        >>> import tempfile
        >>> from compound.runs.directory import RunDirectory
        >>> made = RunDirectory.create(tempfile.mkdtemp() + "/run", "", {"optimize": {"seed": 0}})
        >>> made.append("memory.jsonl", {"kind": "training", "reward": 0.5, "components": {"a": {"kl": 0.1}}})
        >>> made.close()
        >>> seen = []
        >>> export(made.path, lambda numbers, step: seen.append((step, numbers)))
        >>> seen
        [(0, {'job': 1, 'reward': 0.5, 'components/a/kl': 0.1})]
    """
    step = 0
    for number, steps in _jobs(Record.read(run)):
        for record in steps:
            measured = {name: value for name, value in record.items() if name not in ABOUT}
            log({"job": number, **dict(_flat(measured))}, step)
            step += 1


def _flat(value: object, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers in a record with their places; texts, lists and what is not finite are left out."""
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
    }  # one may be under way
    places = enumerate(jobs.items(), 1)
    return [(numbers.get(job, place), steps) for place, (job, steps) in places]


# --- facts ---------------------------------------------------------------------------------------------


def training_facts(path: str | Path) -> TrainingFacts | None:
    """Return what a run's method and its baselines recorded of training, as JSON types; ``None`` without any.

    What cannot be read is named under ``problem``: the rest of the report does not depend on it.
    """
    try:
        with understood(path):
            record = Record.read(path)
            found = [trained for one in (record, *record.baselines()) if (trained := method_training(one))]
    except CompoundError as error:
        return {"problem": str(error)}
    return {"methods": found} if found else None


def method_training(record: Record) -> MethodTraining | None:
    """Return the jobs in which one method trained weights, and their sums; ``None`` where it did not."""
    drawn, chosen = _drawn(record), _chosen(record)
    jobs = [
        _job(number, steps, drawn.get(number, []), chosen.get(number, NOT_CHOSEN))
        for number, steps in _jobs(record)
    ]
    if not jobs:
        return None
    every = [step for job in jobs for step in job["steps"]]
    later = [step for job in jobs for step in (job["steps"][1:] or job["steps"])]
    totals: Totals = {
        "steps": len(every),
        **_sums(every),
        "sampling_speed": _speed(later, "sampled", "sample_seconds"),
        "training_speed": _speed(later, "tokens", "train_seconds"),
    }
    found: MethodTraining = {"method": record.method, "jobs": jobs, "totals": totals}
    return plain(found)


def _chosen(record: Record) -> dict[int, Chosen]:
    """Return which step each job proposed, and the held-out scores of the start and of that step."""
    found: dict[int, Chosen] = {}
    for event in record.all("job"):
        facts = event.get("facts") or {}
        if (step := facts.get("best_step")) is not None:
            scores = dict(facts["evaluated"])
            found[event["job"] + 1] = {"best_step": step, "held_out": [scores.get(0), scores.get(step)]}
    return found


def _drawn(record: Record) -> dict[int, list[int]]:
    """Return the tokens that models wrote before each progress event of a job, by the job's number.

    A step has such an event as soon as its record is written; an evaluation has one of its own. They are the
    tokens of its rollouts, and in a job's first step also of what the job did before it.
    """
    found: dict[int, list[int]] = {}
    before = 0
    for event in record.events:
        now = event["spent"].get("completion_tokens", 0) if "spent" in event else 0
        if event["event"] == "progress" and "evaluation" not in event:
            found.setdefault(event["job"] + 1, []).append(now - before)
        before = now
    return found


def _job(number: int, found: Sequence[Step], drawn: Sequence[int], chosen: Chosen) -> TrainedJob:
    """Return the facts of a job; the tokens of its steps are not known where other events are among them."""
    known = drawn if len(drawn) <= len(found) else []
    steps: list[Step] = [
        {**_step(record), **({"sampled": known[place]} if place < len(known) else {})}
        for place, record in enumerate(found)
    ]
    trained = components_of(key for record in found for key in _keys(record))
    names = dict.fromkeys([*trained, *(name for step in steps for name in parts(step))])
    return {
        "number": number,
        "recipe": str(found[0].get("recipe", "")),
        "steps": steps,
        **_sums(steps),
        "reward": _ends(steps, "reward"),
        "skipped": _ends(steps, "skipped"),
        "kept": _ends(steps, "kept"),
        "explained": _ends(steps, "explained"),
        "answers": {name: said for name in names if (said := _answers(found, name))},
        "components": {name: _component([parts(s).get(name, {}) for s in steps]) for name in names},
        **chosen,
    }


def _keys(record: Step) -> Sequence[str]:
    keys = record.get("keys")
    return [str(key) for key in keys] if isinstance(keys, list) else []


def parts(step: Step) -> Mapping[str, Step]:
    """Return the numbers of a step by component."""
    found = step.get("components")
    return found if isinstance(found, Mapping) else {}


def measured(step: Step, name: str) -> float | None:
    """Return a number of a step or of one of its components, ``None`` where it has none."""
    value = step.get(name)
    return value if isinstance(value, int | float) else None


def _step(record: Step) -> Step:
    """Return the numbers of a step; ``skipped`` and ``kept`` become shares of its groups and attempts."""
    penalties = record.get("penalties")
    paid = penalties if isinstance(penalties, Mapping) else {}
    components = {
        name: {
            fact: value for fact, value in {**facts, "penalty": paid.get(name)}.items() if _is_number(value)
        }
        for name, facts in parts(record).items()
    }
    numbers = {name: value for name, value in record.items() if name not in ABOUT and _is_number(value)}
    shares = {
        part: numbers[part] / numbers[whole] if numbers.get(whole) and part in numbers else None
        for part, whole in (("skipped", "groups"), ("kept", "attempts"))
    }
    tokens = [facts["tokens"] for facts in components.values() if "tokens" in facts]
    return {**numbers, **shares, "tokens": sum(tokens), "components": components}


def _answers(found: Sequence[Step], name: str) -> list[tuple[int, list[AnswerFacts]]]:
    """Return the numbers of the first and the last step that show answers of a component, with these."""
    answers = [(place, record.get("answers")) for place, record in enumerate(found)]
    said = [(place, some[name]) for place, some in answers if isinstance(some, Mapping) and some.get(name)]
    return said if len(said) < 2 else [said[0], said[-1]]


def _sums(steps: Sequence[Step]) -> Sums:
    """Return what some steps took together, ``None`` where no step says; of the memory the most."""
    memory = _known(steps, "memory")
    read, cached = _total(steps, "prompt_tokens"), _total(steps, "prompt_tokens_cached")
    return {
        "tokens": _total(steps, "tokens"),
        "sampled": _total(steps, "sampled"),
        "left_out": _total(steps, "left_out"),
        "masked": _total(steps, "masked"),
        "skipped_updates": _total(steps, "skipped_updates"),
        "lost": _total(steps, "lost"),
        "failed": _total(steps, "failed"),
        "prompt_tokens": read,
        "sample_seconds": _total(steps, "sample_seconds"),
        "train_seconds": _total(steps, "train_seconds"),
        "prompts_saved": cached / read if read and cached is not None else None,
        "memory": max(memory, default=None),
    }


def _known(steps: Iterable[Step], name: str) -> list[float]:
    return [value for step in steps if (value := measured(step, name)) is not None]


def _total(steps: Iterable[Step], name: str) -> float | None:
    known = _known(steps, name)
    return sum(known) if known else None


def _component(steps: Sequence[Step]) -> TrainedComponent:
    """Return what a component was trained on, and its facts at either end."""
    return {
        "samples": _total(steps, "samples"),
        "tokens": _total(steps, "tokens"),
        "reward": _ends(steps, "reward"),
        "penalty": _ends(steps, "penalty"),
        "entropy": _ends(steps, "entropy"),
        "length": _ends(steps, "length"),
        "similarity": _ends(steps, "similarity"),
    }


def _ends(steps: Sequence[Step], name: str) -> Ends:
    return ends([measured(step, name) for step in steps])


def ends(values: Sequence[float | None]) -> list[float | None]:
    """Return the means over the first and over the last fifth of some steps; a single step is both.

    >>> ends([1.0, 2.0, 3.0, 4.0, 6.0, None, 1.0, 1.0, None, 9.0])
    [1.5, 9.0]
    """
    few = max(1, round(END * len(values)))
    sides = ([v for v in side if v is not None] for side in (values[:few], values[-few:]))
    return [fmean(side) if side else None for side in sides]


def _speed(steps: Sequence[Step], tokens: str, seconds: str) -> float | None:
    """Return tokens for each second, over the steps that know both."""
    both = [(measured(step, tokens), measured(step, seconds)) for step in steps]
    known = [(n, took) for n, took in both if n is not None and took]
    return sum(n for n, _ in known) / sum(took for _, took in known) if known else None
