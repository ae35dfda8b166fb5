"""Records of training steps, and the facts computed from them.

Each training step writes one record to ``memory.jsonl``. A run trains in one or several consecutive jobs; its
baselines write records to their own directories.
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
from compound.report.facts.record import Record, to_strict_json
from compound.runs.directory import as_folder, inconsistency_errors, read_json, read_records
from compound.runs.recorder import MEMORY
from compound.security.untrusted import UntrustedFolder

KIND = "training"
ABOUT = ("kind", "seed", "step", "recipe", "keys")  # fields that identify a record; all others are metrics
NOT_CHOSEN: Chosen = {"best_step": None, "held_out": [None, None]}
END = 0.2  # share of a job's steps to average at the start and at the end


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
    found = read_records(folder, MEMORY)
    return [record for record in found if record.get("kind") == KIND]


def export(run: str | Path, log: Callable[[dict[str, float], int], object]) -> None:
    """Export the metrics of all training steps to an experiment tracker.

    Args:
        run: the run directory.
        log: called for each step with its metrics by name (``reward``, ``components/NAME/entropy`` …; ``job``
            is the job's number in the report) and the step number, which continues across jobs because
            trackers require increasing steps: ``wandb.log``, ``trackio.log``, ``mlflow.log_metrics``.

    Raises:
        RunDirectoryError: the folder is not a run directory, or one of its files is broken.

    Example:
        >>> import tempfile
        >>> from compound.runs.directory import RunDirectory
        >>> run = RunDirectory.create(tempfile.mkdtemp() + "/run", "", {"optimize": {"seed": 0}})
        >>> run.append("memory.jsonl", {"kind": "training", "reward": 0.5, "components": {"a": {"kl": 0.1}}})
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


# --- facts ---------------------------------------------------------------------------------------------


def training_facts(path: str | Path) -> TrainingFacts | None:
    """Return the training facts of a run's method and baselines, as JSON types; ``None`` if there are none.

    If the records cannot be read, the reason is returned as ``problem``, and the rest of the report is still
    written.
    """
    try:
        with inconsistency_errors(path):
            record = Record.read(path)
            found = [trained for r in (record, *record.baselines()) if (trained := method_training(r))]
    except CompoundError as error:
        return {"problem": str(error)}
    return {"methods": found} if found else None


def method_training(record: Record) -> MethodTraining | None:
    """Return the jobs in which a method trained weights, and their totals; ``None`` if there are none."""
    drawn, chosen = _drawn(record), _chosen(record)
    jobs = [
        _job(number, steps, drawn.get(number, []), chosen.get(number, NOT_CHOSEN))
        for number, steps in _jobs(record)
    ]
    if not jobs:
        return None
    every = [step for job in jobs for step in job["steps"]]
    # Speeds leave out the first step of each job, which includes the warm-up.
    later = [step for job in jobs for step in (job["steps"][1:] or job["steps"])]
    totals: Totals = {
        "steps": len(every),
        **_sums(every),
        "sampling_speed": _speed(later, "sampled", "sample_seconds"),
        "training_speed": _speed(later, "tokens", "train_seconds"),
    }
    found: MethodTraining = {"method": record.method, "jobs": jobs, "totals": totals}
    return to_strict_json(found)


def _chosen(record: Record) -> dict[int, Chosen]:
    """Return the step that each job proposed, and the held-out scores of the start and of that step."""
    found: dict[int, Chosen] = {}
    for event in record.all("job"):
        facts = event.get("facts") or {}
        if (step := facts.get("best_step")) is not None:
            scores = dict(facts["evaluated"])
            found[event["job"] + 1] = {"best_step": step, "held_out": [scores.get(0), scores.get(step)]}
    return found


def _drawn(record: Record) -> dict[int, list[int]]:
    """Return the completion tokens between the progress events of each job, by the job's number.

    Each step emits a progress event right after its record, and evaluations emit separate ones. The tokens
    are those of the step's rollouts and, for the first step of a job, also those of the job before it.
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
    """Return the facts of a job, whose sampled tokens are unknown if it has more events than steps."""
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
        "reward": _ends(steps, "reward"),
        "skipped": _ends(steps, "skipped"),
        "kept": _ends(steps, "kept"),
        "explained": _ends(steps, "explained"),
        "answers": {name: answers for name in names if (answers := _answers(found, name))},
        "components": {name: _component([by_component(s).get(name, {}) for s in steps]) for name in names},
        **chosen,
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
    """Return the numbers of a step, with ``skipped`` and ``kept`` as shares of its groups and attempts."""
    penalties = record.get("penalties")
    paid = penalties if isinstance(penalties, Mapping) else {}
    components = {
        name: {
            fact: value for fact, value in {**facts, "penalty": paid.get(name)}.items() if _is_number(value)
        }
        for name, facts in by_component(record).items()
    }
    numbers = {name: value for name, value in record.items() if name not in ABOUT and _is_number(value)}
    shares = {
        part: numbers[part] / numbers[whole] if numbers.get(whole) and part in numbers else None
        for part, whole in (("skipped", "groups"), ("kept", "attempts"))
    }
    tokens = [facts["tokens"] for facts in components.values() if "tokens" in facts]
    return {**numbers, **shares, "tokens": sum(tokens), "components": components}


def _answers(found: Sequence[Step], name: str) -> list[tuple[int, list[AnswerFacts]]]:
    """Return the recorded answers of a component at the first and the last step that has any."""
    recorded = [(place, record.get("answers")) for place, record in enumerate(found)]
    answers = [(place, by[name]) for place, by in recorded if isinstance(by, Mapping) and by.get(name)]
    return answers if len(answers) < 2 else [answers[0], answers[-1]]


def _sums(steps: Sequence[Step]) -> Sums:
    """Return totals over some steps, ``None`` for numbers that no step recorded; memory is the maximum."""
    memory = _known(steps, "memory")
    read, cached = _total(steps, "prompt_tokens"), _total(steps, "prompt_tokens_cached")
    return {
        "tokens": _total(steps, "tokens"),
        "sampled": _total(steps, "sampled"),
        "left_out": _total(steps, "left_out"),
        "masked": _total(steps, "masked"),
        "refilled": _total(steps, "refilled"),
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
    return [value for step in steps if (value := get_number(step, name)) is not None]


def _total(steps: Iterable[Step], name: str) -> float | None:
    known = _known(steps, name)
    return sum(known) if known else None


def _component(steps: Sequence[Step]) -> TrainedComponent:
    """Return the training data of a component, and its numbers at the first and the last steps."""
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
    return first_last_means([get_number(step, name) for step in steps])


def first_last_means(values: Sequence[float | None]) -> list[float | None]:
    """Return the means over the first and the last fifth of some steps; a single step counts in both.

    >>> first_last_means([1.0, 2.0, 3.0, 4.0, 6.0, None, 1.0, 1.0, None, 9.0])
    [1.5, 9.0]
    """
    few = max(1, round(END * len(values)))
    sides = ([v for v in side if v is not None] for side in (values[:few], values[-few:]))
    return [fmean(side) if side else None for side in sides]


def _speed(steps: Sequence[Step], tokens: str, seconds: str) -> float | None:
    """Return tokens per second, over the steps that recorded both."""
    both = [(get_number(step, tokens), get_number(step, seconds)) for step in steps]
    known = [(n, took) for n, took in both if n is not None and took]
    return sum(n for n, _ in known) / sum(took for _, took in known) if known else None
