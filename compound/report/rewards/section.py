"""The report's section on local rewards: the accuracy of each head, and whether it was used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from pydantic import TypeAdapter

from compound.errors import CompoundError, MissingExtra
from compound.report.facts.record import to_strict_json
from compound.report.facts.text import count, interval, number, signed
from compound.report.rendering.blocks import Block, Figure
from compound.report.rendering.tables import Table, table
from compound.report.rewards import figures
from compound.rewards.inspection.inspect import FOLDER, Inspection
from compound.rewards.inspection.views import Overview
from compound.rewards.model import NONE
from compound.runs.directory import inconsistency_errors
from compound.security.untrusted import UntrustedFolder

SHOWN = 3  # features per component in the table


def reward_facts(path: str | Path) -> dict[str, object] | None:
    """Return the facts on a run's local rewards as JSON types; ``None`` if it has none.

    If the records cannot be read, the reason is returned as ``problem``, and the rest of the report is still
    written.
    """
    if UntrustedFolder(path).kind(f"{FOLDER}/card.json") is None:
        return None
    try:
        with inconsistency_errors(path):
            found = to_strict_json(asdict(Inspection.open(path).overview()))
    except CompoundError as error:
        return {"problem": str(error)}
    return found


def reward_blocks(facts: Mapping[str, object]) -> list[Block]:
    """Return the section's blocks."""
    if "problem" in facts:
        return [f"The local rewards of this run cannot be read: {facts['problem']}."]
    overview = TypeAdapter(Overview).validate_python(facts)
    blocks: list[Block] = [rewards(overview), _how(overview)]
    if any(head.local for head in overview.heads):
        blocks += [use(overview), USED]
    if any(head.explanation for head in overview.heads):
        blocks += [explanations(overview), EXPLAINED]
    return [*blocks, *_figures(overview)]


def rewards(overview: Overview) -> Table:
    """Return the table of the components with the quality and the use of their rewards."""
    headings = ("component", "#held-out accuracy", "#pairs", "#inputs", "#mean gap", "#calibration error",
                "#rank correlation", "#jobs using it", "reason not used")  # fmt: skip
    rows = [
        (
            head.component, interval(head.accuracy.to_json()), count(head.pairs), count(head.accuracy.inputs),
            number(head.gap), number(head.error), number(head.correlation), f"{head.steered} of {head.jobs}",
            head.why or "–",
        )
        for head in overview.heads
    ]  # fmt: skip
    rows += [
        (
            m.component,
            "–",
            count(m.pairs),
            "–",
            number(m.gap),
            "–",
            "–",
            "–",
            m.why or "no reward was learned",
        )
        for m in overview.missing
    ]
    return table(headings, rows)


def _how(overview: Overview) -> str:
    reads = (
        "the numbers and labels of the template"
        if overview.backbone == NONE
        else f"text embeddings of {overview.backbone}"
    )
    trained = ", trained on these pairs" if overview.trained else ""
    return (
        f"Each head is a linear function of {reads}{trained}. Accuracy is the share of output pairs that it "
        "orders like the global reward, on held-out inputs: the mean over inputs with its 95 % confidence "
        "interval. Searches use a reward as far as it predicts the global one; weights are trained by it "
        "only if it is significantly better than chance. The gap is the mean difference between two outputs "
        "for an input, in the latest iteration; 0 if it is not significant. The correlation is Spearman's, "
        "of local with global rewards among the outputs of a call in held-out pairs."
    )


USED = (
    "Use in the last joint search. The slope is the expected gain of the score per unit of the local reward, "
    "trust says how sure it is that the slope is positive, and prices are those of one evaluation, in system "
    "runs. Saved is what the same number of global evaluations would have cost in addition."
)


def use(overview: Overview) -> Table:
    """Return the table of what each local reward was used for, and what that saved."""
    rows = [
        (
            head.component, number(local.trust), number(local.slope), count(local.evaluations),
            number(local.price), number(local.global_price), f"{local.saved:.1f}",
        )
        for head in overview.heads if (local := head.local) is not None
    ]  # fmt: skip
    headings = (
        "component",
        "#trust",
        "#slope",
        "#local evaluations",
        "#price",
        "#global price",
        "#runs saved",
    )
    return table(headings, rows)


EXPLAINED = (
    "A logistic regression on only the named features approximates each head's held-out ranking. Weights are "
    "log odds per standard deviation. Agreement is the share of held-out pairs that it orders like the head, "
    "accuracy the share that it orders like the global reward."
)


def explanations(overview: Overview) -> Table:
    """Return the table of the named features with the largest weights for each head."""
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
    return table(("component", "largest weights", "#agreement", "#accuracy"), rows)


CALIBRATION = (
    "Calibration: predicted probability of the ranking of held-out pairs against the share ranked correctly, "
    "in five groups of equal size. Below the dashed line, the reward is overconfident."
)
MARGINS = (
    "Held-out margins: reward of the better output minus that of the worse one. The outermost bars include "
    "all larger margins."
)
ALIGNMENT = (
    "Local against global rewards of the outputs in held-out pairs, each minus the mean of its call, and "
    "their trend. Local rewards do not compare inputs, so only differences within a call are meaningful."
)
LENGTH = "Local rewards of the same outputs by their length, value or label, with means."
WEIGHTS = "Weights of the named features, with 95 % intervals over resampled inputs."
DRIFT = (
    "The line is the cross-validated accuracy each time the rewards were trained. Squares are the accuracy "
    "on an iteration's new pairs of a reward trained on earlier iterations only (larger: more inputs)."
)
STEPS = "Validation score after each accepted change, with the changed components."


def _figures(overview: Overview) -> list[Block]:
    heads = overview.heads
    of_heads: list[tuple[str, str, Callable[[], str]]] = [
        ("calibration", CALIBRATION, lambda: figures.calibration_svg(heads)),
        ("margins", MARGINS, lambda: figures.margins_svg(heads)),
        ("alignment", ALIGNMENT, lambda: figures.alignment_svg(heads)),
        ("length", LENGTH, lambda: figures.length_svg(heads)),
        ("weights", WEIGHTS, lambda: figures.weights_svg(heads)),
    ]
    drawings = of_heads if heads else []
    if any(len(head.history) > 1 for head in heads):
        drawings.append(("drift", DRIFT, lambda: figures.drift_svg(heads)))
    if overview.steps:
        drawings.append(("steps", STEPS, lambda: figures.steps_svg(overview)))
    try:
        found = [Figure(name, caption, svg=draw(), instead="") for name, caption, draw in drawings]
    except MissingExtra as error:
        return [
            f"The figures need matplotlib, which is not installed: {error.hint}, then run `compound report` "
            "on this run."
        ]
    return [*(replace(figure, instead="The figures are in report.html.") for figure in found[:1]), *found[1:]]
