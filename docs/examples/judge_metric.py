"""Score answers by a model as the judge, after a check that its verdicts are worth something.

Two judges are compared on labelled sentences. A judge that always gives the same verdict agrees
with half of the labels, so a judge is used only if the 95 % interval of its agreement lies above
one half. The metric of the optimization is then its verdict on sentences about a cafe. A judge can
still be wrong about sentences unlike the labelled ones: read what the optimized system writes, and
label some of it.

Needs ``pip install -e ".[local]"`` and ``compound models get smollm2``.
Run: python docs/examples/judge_metric.py [FOLDER]
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import compound as cp

LABELLED = {
    "Great food and friendly staff.": "happy",
    "I loved every minute of it.": "happy",
    "The best coffee in town.": "happy",
    "A wonderful and cosy place.": "happy",
    "Perfect service, I will come back.": "happy",
    "Delicious cakes and a lovely garden.": "happy",
    "What a charming little cafe.": "happy",
    "The owner was kind and helpful.": "happy",
    "The soup was cold and the waiter was rude.": "unhappy",
    "I hated the noise.": "unhappy",
    "The worst coffee in town.": "unhappy",
    "A dirty and sad place.": "unhappy",
    "Terrible service, never again.": "unhappy",
    "The cake was stale and dry.": "unhappy",
    "We waited an hour for nothing.": "unhappy",
    "Overpriced and disappointing.": "unhappy",
}
QUESTIONS = ("How does the guest feel?", "Give the mood of the review.")


def make_judge(question: str) -> cp.System:
    """Return a judge: a system of one call."""
    verdict = cp.LLM("verdict", prompt=question, output=Literal["happy", "unhappy"], max_tokens=8)
    return cp.System(
        "judge", outputs={"verdict": verdict(text=cp.Input("text", str))}, lm="smollm2"
    )


def describe(thing: str, phrase: str) -> str:
    """Write a sentence about a cafe."""
    return phrase.replace("_", thing)


def declare() -> cp.System:
    """Declare the system to optimize. It starts with a phrase that does not recommend the cafe."""
    phrase = cp.Choice("I hated the _.", "I loved the _.", "The _ was terrible.")
    describer = cp.Function("describer", describe, phrase=phrase)
    return cp.System("cafe", outputs={"text": describer(thing=cp.Input("thing", str))})


def choose_judge(lm: cp.ext.Engine) -> cp.System:
    """Return the judge that agrees best with the labels, if it agrees more often than a constant verdict."""
    rows = [{"id": text, "text": text, "verdict": label} for text, label in LABELLED.items()]
    labels = list(LABELLED.values())
    constant = max(labels.count(label) for label in labels) / len(labels)
    agreement = {}
    for question in QUESTIONS:
        judge = make_judge(question)
        found = cp.evaluate(
            judge, rows, cp.metrics.accuracy("verdict"), engines={"smollm2": lm}, cache=False
        )
        agreement[question] = found.interval
        mean, low = found.interval.mean, found.interval.low
        print(f"{question}\n  agreement with the labels: {mean:.2f}, at least {low:.2f}")
    best = max(agreement, key=lambda question: agreement[question].mean)
    print(f"agreement of a constant verdict: {constant:.2f}")
    if agreement[best].low <= constant:
        sys.exit("no judge is better than a constant verdict")
    return make_judge(best)


def main(folder: Path) -> cp.Result:
    """Choose a judge, optimize the system by its verdicts, and print both."""
    lm = cp.engines.Transformers("smollm2")
    judge = choose_judge(lm)
    executor = cp.Executor(
        {"smollm2": lm}
    )  # one for all verdicts, so that the model is loaded once

    async def judged(outputs: Mapping[str, object], example: cp.Example) -> cp.Score:
        trace = await executor.run(judge, {"text": outputs["text"]})
        verdict = trace.check().outputs["verdict"]
        return cp.Score(float(verdict == "happy"), feedback=f"the judge says {verdict}")

    things = "coffee cake garden music soup tea breakfast bread room pie lunch dinner juice salad"
    examples = [{"id": thing, "thing": thing} for thing in things.split()]
    try:
        result = cp.optimize(
            declare(),
            data={"train": examples[:7], "valid": examples[7:]},
            metric=cp.metrics.custom(judged, name="judged", bounds=(0, 1)),
            budget=cp.Budget(system_runs=80),
            run_dir=folder / "judge_metric",
            progress=False,
        )
    finally:
        asyncio.run(executor.aclose())
    print(f"score by the judge: {result.before.mean:.2f} -> {result.after.mean:.2f}")
    described = cp.run(declare().bind(result.best), {"thing": "coffee"})
    print(described.outputs["text"])
    return result


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else temporary))
