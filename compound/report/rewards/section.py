"""The report's section on local rewards: what each head is worth, and whether it steered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from pydantic import TypeAdapter

from compound.errors import CompoundError, MissingExtra
from compound.report.facts.record import plain
from compound.report.facts.text import count, interval, number, signed
from compound.report.rendering.blocks import Block, Figure
from compound.report.rendering.tables import Table, table
from compound.report.rewards import figures
from compound.rewards.inspection.inspect import FOLDER, Inspection
from compound.rewards.inspection.views import HeadView, Overview
from compound.rewards.model import NONE
from compound.runs.directory import understood
from compound.security.untrusted import UntrustedFolder

SHOWN = 3  # features in the table


def reward_facts(path: str | Path) -> dict[str, object] | None:
    """Return what a run's records show of its local rewards as JSON types; ``None`` for a run without any.

    What cannot be read is named under ``problem``: the rest of the report does not depend on it.
    """
    if UntrustedFolder(path).kind(f"{FOLDER}/card.json") is None:
        return None
    try:
        with understood(path):
            found = plain(asdict(Inspection.open(path).overview()))
    except CompoundError as error:
        return {"problem": str(error)}
    return found


def reward_blocks(facts: Mapping[str, object]) -> list[Block]:
    """Return the section's blocks."""
    if "problem" in facts:
        return [f"The local rewards of this run cannot be shown: {facts['problem']}."]
    overview = TypeAdapter(Overview).validate_python(facts)
    blocks: list[Block] = [rewards(overview), _how(overview)]
    if any(head.explanation for head in overview.heads):
        blocks += [explanations(overview), EXPLAINED]
    return [*blocks, *_figures(overview)]


def rewards(overview: Overview) -> Table:
    """Return the components with what their rewards are worth, and what they were used for."""
    headings = ("component", "#held-out accuracy", "#pairs", "#inputs", "#mean gap", "#calibration error",
                "#rank correlation", "#jobs it steered", "why not")  # fmt: skip
    rows = [
        (
            head.component, interval(head.accuracy.to_json()), count(head.pairs), count(head.accuracy.inputs),
            number(head.gap), number(head.error), number(head.correlation), f"{head.steered} of {head.jobs}",
            head.why or _below(head, overview),
        )
        for head in overview.heads
    ]  # fmt: skip
    rows += [
        (m.component, "–", count(m.pairs), "–", number(m.gap), "–", "–", "–", m.why or "it has no reward")
        for m in overview.missing
    ]
    return table(headings, rows)


def _below(head: HeadView, overview: Overview) -> str:
    """Return why a reward no job has asked for yet would not steer."""
    return "below the accuracy from which it may" if head.accuracy.mean < overview.threshold else "–"


def _how(overview: Overview) -> str:
    reads = (
        "the template's numbers and labels"
        if overview.backbone == NONE
        else f"texts as {overview.backbone} reads them"
    )
    trained = ", trained on these pairs" if overview.trained else ""
    return (
        f"Each head is linear in {reads}{trained}. Accuracy is the share of pairs of outputs that it orders "
        "as the global reward does, on inputs it had not seen: the mean over inputs with its 95 % interval. "
        f"From {overview.threshold:.2f} on it may steer its component; otherwise the global reward does. The "
        "gap is that between the best and the worst output for an input, in the latest iteration. The "
        "correlation is Spearman's of local with global rewards among the outputs of one call in held-out "
        "pairs."
    )


EXPLAINED = (
    "A logistic regression on the named features alone imitates each head's held-out ranking. Weights are "
    "log odds for one standard deviation; agreement is the share of unseen pairs it orders as the head does, "
    "accuracy the share it orders as the global reward does."
)


def explanations(overview: Overview) -> Table:
    """Return what each head rewards, by named features."""
    rows = [
        (
            head.component,
            ", ".join(
                f"{figures.spoken(w.feature, sole=figures.sole(head))} {signed(w.value)}"
                for w in head.explanation.weights[:SHOWN]
            ),
            interval(head.explanation.agreement.to_json()), interval(head.explanation.accuracy.to_json()),
        )
        for head in overview.heads if head.explanation
    ]  # fmt: skip
    return table(("component", "rewards most", "#agreement", "#accuracy"), rows)


CALIBRATION = (
    "How sure each reward was of a held-out pair, and how often it was then right: five groups of equally "
    "many pairs. Below the dashed line it was too sure."
)
MARGINS = (
    "Held-out margins: how much higher the reward put the better output. The outermost bars hold all beyond."
)
ALIGNMENT = (
    "Local against global rewards of the outputs in held-out pairs, both less the mean of their call, and "
    "their trend. A local reward says nothing about which input is easier."
)
LENGTH = "Local rewards of the same outputs by their length, value or label, with means."
WEIGHTS = "Weights of the named features, with 95 % limits over resampled inputs."
DRIFT = (
    "The line is the cross-validated accuracy each time rewards were learned. Squares judge an iteration's "
    "new pairs by a reward learned from earlier iterations only (larger: more inputs)."
)
STEPS = "The validation score after each accepted change, with the components that it changed."


def _figures(overview: Overview) -> list[Block]:
    heads = overview.heads
    wanted: list[tuple[str, str, Callable[[], str]]] = [
        ("calibration", CALIBRATION, lambda: figures.calibration_svg(heads)),
        ("margins", MARGINS, lambda: figures.margins_svg(heads)),
        ("alignment", ALIGNMENT, lambda: figures.alignment_svg(heads)),
        ("length", LENGTH, lambda: figures.length_svg(heads)),
        ("weights", WEIGHTS, lambda: figures.weights_svg(heads)),
        ("drift", DRIFT, lambda: figures.drift_svg(heads, overview.threshold)),
    ]
    shown = [one for one in wanted if heads]
    if overview.steps:
        shown.append(("steps", STEPS, lambda: figures.steps_svg(overview)))
    try:
        found = [Figure(name, caption, svg=draw(), instead="") for name, caption, draw in shown]
    except MissingExtra as error:
        return [f"No figures without matplotlib: {error.hint}, then `compound report` on this run."]
    return [*(replace(figure, instead="Its figures are in report.html.") for figure in found[:1]), *found[1:]]
