"""The report's section on training: curves, a table of jobs, speeds, and a table of components."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from compound.errors import MissingExtra
from compound.formatting import plural
from compound.report.facts.documents import MethodTraining, TrainingFacts
from compound.report.facts.text import count, line, number, seconds
from compound.report.rendering.blocks import Block, Figure
from compound.report.rendering.tables import Table, table
from compound.report.training.figures import caption, panels_with_data, training_svg

NOTES = (
    "Arrows point from the mean over the first fifth of a job's steps to the mean over the last fifth. A "
    "job's reward is the global reward of its rollouts. A component's reward, length and similarity (the "
    "share of tokens that consecutive answers have in common) are those of all its answers in these "
    "rollouts; its samples, tokens and entropy are those that it was trained on. Groups with equal rewards "
    "give no gradient and are skipped; samples that are empty or too long are left out. "
    "If steps were evaluated, the best step is proposed; its held-out score follows that of the start."
)
ANSWERS = (
    "Answers with the highest and the lowest reward, at the first and the last step with training samples of "
    "the component."
)


def training_blocks(facts: TrainingFacts) -> list[Block]:
    """Return the section's blocks."""
    if "problem" in facts:
        return [f"The training records of this run cannot be read: {facts['problem']}."]
    blocks: list[Block] = []
    for place, method in enumerate(facts["methods"]):
        if len(facts["methods"]) > 1:
            blocks.append(f"Method {method['method']}:")
        if panels_with_data(method["jobs"]):
            blocks.append(_figure(method, f"training{place or ''}"))
        blocks += [jobs(method), speeds(method), components(method)]
        if any(job["answers"] for job in method["jobs"]):
            blocks += [ANSWERS, answers(method)]
    return [*blocks, NOTES]


def _figure(method: MethodTraining, name: str) -> Figure:
    about = caption(method["jobs"])
    try:
        return Figure(name, about, svg=training_svg(method["jobs"], name))
    except MissingExtra as error:
        return Figure(name, about, missing="The figure needs matplotlib, which is not installed: "
                      f"{error.hint}, then run `compound report` on this run.")  # fmt: skip


def jobs(method: MethodTraining) -> Table:
    """Return the table of training jobs, without empty columns."""
    headings = (
        "#job", "recipe", "#steps", "#proposed step", "#held-out score", "#reward", "#groups skipped",
        "#examples refilled", "#attempts kept", "#samples left out", "#samples masked", "#updates skipped",
        "#explained by values", "#rollouts lost", "#failed", "#prompt tokens", "#prompt cached",
        "#tokens sampled", "#tokens trained", "#sampling", "#training", "#peak memory",
    )  # fmt: skip
    rows = [
        (
            str(job["number"]), job["recipe"] or "–", count(len(job["steps"])), count(job["best_step"]),
            first_last(job["held_out"]), first_last(job["reward"]),
            first_last(job["skipped"], percent), count(job["refilled"] or None),
            first_last(job["kept"], percent), count(job["left_out"]),
            count(job["masked"] or None), count(job["skipped_updates"] or None),
            first_last(job["explained"], percent),
            count(job["lost"] or None), count(job["failed"] or None), count(job["prompt_tokens"]),
            percent(job["prompts_saved"]), count(job["sampled"]), count(job["tokens"]),
            seconds(job["sample_seconds"]), seconds(job["train_seconds"]), mebibytes(job["memory"]),
        )
        for job in method["jobs"]
    ]  # fmt: skip
    return _without_empty_columns(headings, rows)


def _without_empty_columns(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    filled = [i for i in range(len(headings)) if any(row[i] != "–" for row in rows)]
    return table([headings[i] for i in filled], [[row[i] for i in filled] for row in rows])


def components(method: MethodTraining) -> Table:
    """Return the table of trained components, a row per job and component."""
    headings = (
        "#job", "component", "#samples", "#tokens", "#reward", "#penalty", "#entropy", "#length",
        "#similarity",
    )  # fmt: skip
    rows = [
        (
            str(job["number"]), name, count(own["samples"]), count(own["tokens"]), first_last(own["reward"]),
            first_last(own["penalty"]), first_last(own["entropy"]), first_last(own["length"], count),
            first_last(own["similarity"]),
        )
        for job in method["jobs"]
        for name, own in job["components"].items()
    ]  # fmt: skip
    return _without_empty_columns(headings, rows)


def answers(method: MethodTraining) -> Table:
    """Return the table of answers at the first and the last step with training samples."""
    headings = ("#job", "component", "#step", "#reward", "answer")
    rows = [
        (str(job["number"]), name, str(step + 1), number(answer["reward"]), line(answer["text"]) or "(empty)")
        for job in method["jobs"]
        for name, steps in job["answers"].items()
        for step, recorded in steps
        for answer in recorded
    ]
    return table(headings, rows)


def first_last(both: Sequence[float | None], form: Callable[[float | None], str] = number) -> str:
    """Format the first and the last value of a number.

    >>> first_last([0.25, 0.5]), first_last([None, None])
    ('0.250 → 0.500', '–')
    """
    return "–" if both[0] is None and both[1] is None else " → ".join(map(form, both))


def percent(share: float | None) -> str:
    """Format a share as a percentage.

    >>> percent(0.125).split(), percent(None)
    (['12', '%'], '–')
    """
    return "–" if share is None else f"{share:.0%}".replace("%", "\u00a0%")


def mebibytes(amount: float | None) -> str:
    """Format an amount of memory in MiB."""
    return "–" if amount is None else f"{amount:,.0f} MiB"


def speeds(method: MethodTraining) -> str:
    """Return a sentence on the time and speed of sampling and training."""
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
        return f"{plural(totals['steps'], 'step')}; their duration is not recorded."
    text = " and ".join(parts)
    warm = " Speeds exclude the first step of each job." if totals["steps"] > len(method["jobs"]) else ""
    return f"{text[:1].upper()}{text[1:]}, in total over {plural(totals['steps'], 'step')}.{warm}"


def _rate(speed: float | None) -> str:
    return "" if speed is None else f" ({speed:,.0f} tokens/s)" if speed >= 10 else f" ({speed:.1f} tokens/s)"
