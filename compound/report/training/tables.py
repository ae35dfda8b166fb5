"""The report's section on training: the curves, a table of jobs, the speeds, and a table of components."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from compound.errors import MissingExtra
from compound.formatting import plural
from compound.report.facts.documents import MethodTraining, TrainingFacts
from compound.report.facts.text import count, line, number, seconds
from compound.report.rendering.blocks import Block, Figure
from compound.report.rendering.tables import Table, table
from compound.report.training.figures import caption, shown, training_svg

HOW = (
    "Arrows lead from the mean over the first fifth of a job's steps to that over its last fifth. A job's "
    "reward is the global one, of its rollouts; a component's is that of the samples it was trained on, and "
    "so are its entropy, length and similarity (how much of their tokens an answer and the next one share). "
    "Groups of equal rewards give no gradient and are skipped; samples too long or empty are left out. Where "
    "steps were evaluated, the best one is proposed; its held-out score is beside that of the start."
)
SAID = (
    "What was said in the first and in the last step that taught a component something: the answers that "
    "earned most and least."
)


def training_blocks(facts: TrainingFacts) -> list[Block]:
    """Return the section's blocks."""
    if "problem" in facts:
        return [f"The training of this run cannot be shown: {facts['problem']}."]
    blocks: list[Block] = []
    for place, method in enumerate(facts["methods"]):
        if len(facts["methods"]) > 1:
            blocks.append(f"Method {method['method']}:")
        if shown(method["jobs"]):
            blocks.append(_figure(method, f"training{place or ''}"))
        blocks += [jobs(method), speeds(method), components(method)]
        if any(job["answers"] for job in method["jobs"]):
            blocks += [SAID, answers(method)]
    return [*blocks, HOW]


def _figure(method: MethodTraining, name: str) -> Figure:
    about = caption(method["jobs"])
    try:
        return Figure(name, about, svg=training_svg(method["jobs"], name))
    except MissingExtra as error:
        return Figure(name, about, missing=f"No figure without matplotlib: {error.hint}, then "
                      "`compound report` on this run.")  # fmt: skip


def jobs(method: MethodTraining) -> Table:
    """Return how each job went; columns that no job has anything for are left out."""
    headings = (
        "#job", "recipe", "#steps", "#proposed step", "#held-out score", "#reward", "#groups skipped",
        "#attempts kept", "#samples left out", "#samples masked", "#updates skipped",
        "#explained by values", "#rollouts lost", "#failed", "#prompt tokens", "#read before",
        "#tokens sampled", "#tokens trained", "#sampling", "#training", "#peak memory",
    )  # fmt: skip
    rows = [
        (
            str(job["number"]), job["recipe"] or "–", count(len(job["steps"])), count(job["best_step"]),
            course(job["held_out"]), course(job["reward"]),
            course(job["skipped"], percent), course(job["kept"], percent), count(job["left_out"]),
            count(job["masked"] or None), count(job["skipped_updates"] or None),
            course(job["explained"], percent),
            count(job["lost"] or None), count(job["failed"] or None), count(job["prompt_tokens"]),
            percent(job["prompts_saved"]), count(job["sampled"]), count(job["tokens"]),
            seconds(job["sample_seconds"]), seconds(job["train_seconds"]), mebibytes(job["memory"]),
        )
        for job in method["jobs"]
    ]  # fmt: skip
    return _said(headings, rows)


def _said(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table without the columns that no row has anything for."""
    said = [i for i in range(len(headings)) if any(row[i] != "–" for row in rows)]
    return table([headings[i] for i in said], [[row[i] for i in said] for row in rows])


def components(method: MethodTraining) -> Table:
    """Return what became of each component in each job."""
    headings = (
        "#job", "component", "#samples", "#tokens", "#reward", "#penalty", "#entropy", "#length",
        "#similarity",
    )  # fmt: skip
    rows = [
        (
            str(job["number"]), name, count(own["samples"]), count(own["tokens"]), course(own["reward"]),
            course(own["penalty"]), course(own["entropy"]), course(own["length"], count),
            course(own["similarity"]),
        )
        for job in method["jobs"]
        for name, own in job["components"].items()
    ]  # fmt: skip
    return _said(headings, rows)


def answers(method: MethodTraining) -> Table:
    """Return what components said in the first and the last step that taught them something."""
    headings = ("#job", "component", "#step", "#reward", "answer")
    rows = [
        (str(job["number"]), name, str(step + 1), number(said["reward"]), line(said["text"]) or "(nothing)")
        for job in method["jobs"]
        for name, steps in job["answers"].items()
        for step, some in steps
        for said in some
    ]
    return table(headings, rows)


def course(both: Sequence[float | None], form: Callable[[float | None], str] = number) -> str:
    """Return what a fact was at first and at last.

    >>> course([0.25, 0.5]), course([None, None])
    ('0.250 → 0.500', '–')
    """
    return "–" if both[0] is None and both[1] is None else " → ".join(map(form, both))


def percent(share: float | None) -> str:
    """Return a share.

    >>> percent(0.125).split(), percent(None)
    (['12', '%'], '–')
    """
    return "–" if share is None else f"{share:.0%}".replace("%", "\u00a0%")


def mebibytes(amount: float | None) -> str:
    """Return an amount of memory."""
    return "–" if amount is None else f"{amount:,.0f} MiB"


def speeds(method: MethodTraining) -> str:
    """Return a line on how long sampling and training took, and how fast they were."""
    totals = method["totals"]
    parts = [
        f"{word} {seconds(took)}{_rate(speed)}"
        for word, took, speed in (
            ("sampling took", totals["sample_seconds"], totals["sampling_speed"]),
            ("training took", totals["train_seconds"], totals["training_speed"]),
        )
        if took is not None
    ]
    if not parts:
        return f"{plural(totals['steps'], 'step')}; how long they took is not recorded."
    text = " and ".join(parts)
    warm = " Speeds leave out the first step of each job." if totals["steps"] > len(method["jobs"]) else ""
    return f"{text[:1].upper()}{text[1:]}, together over {plural(totals['steps'], 'step')}.{warm}"


def _rate(speed: float | None) -> str:
    return "" if speed is None else f" ({speed:,.0f} tokens/s)" if speed >= 10 else f" ({speed:.1f} tokens/s)"
