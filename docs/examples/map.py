"""Run a model for each item of a list, and aggregate its answers.

The embedded model labels each review of a cafe in a call of its own. A function then recommends the
cafe if a large enough share of the guests is happy. The question to the model and the share are
tuned together.

Needs ``pip install -e ".[local]"`` and ``compound models get smollm2``.
Run: python docs/examples/map.py [FOLDER]
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path
from typing import Literal

import compound as cp

POSITIVE = (
    "Great food and friendly staff.",
    "I loved every minute of it.",
    "The best coffee in town.",
    "A wonderful and cosy place.",
    "Perfect service, I will come back.",
    "Delicious cakes and a lovely garden.",
    "What a charming little cafe.",
    "The owner was kind and helpful.",
    "Fresh bread and excellent tea.",
    "We had a fantastic breakfast.",
    "Beautiful rooms and good music.",
    "My children enjoyed it very much.",
)
NEGATIVE = (
    "The soup was cold and the waiter was rude.",
    "I hated the noise.",
    "The worst coffee in town.",
    "A dirty and sad place.",
    "Terrible service, never again.",
    "The cake was stale and dry.",
    "We waited an hour for nothing.",
    "Overpriced and disappointing.",
    "The tea tasted of soap.",
    "Awful food and broken chairs.",
    "The staff ignored us.",
    "Boring, loud and far too expensive.",
)
QUESTIONS = ("How does the guest feel?", "Give the mood of the review.")


def recommend(labels: list[str], share: float) -> bool:
    """Return whether at least a share of the guests is happy."""
    return labels.count("happy") >= share * len(labels)


def declare() -> cp.System:
    """Declare the body, the map of the body over the reviews, and the aggregation."""
    question = cp.Selector("question", *QUESTIONS)
    labeller = cp.LLM("labeller", output=Literal["happy", "unhappy"], max_tokens=8)
    review = cp.Input("review", str)
    body = cp.System("label", outputs={"label": labeller(review=review, prompt=question())})
    mapped = cp.Map("labels", body, over="review")
    labels = mapped(review=cp.Input("reviews", list[str]))
    recommender = cp.Function("recommender", recommend, share=cp.Choice(0.3, 0.6, 0.9, value=0.3))
    return cp.System("cafes", outputs={"recommended": recommender(labels=labels)}, lm="smollm2")


def rows(place: int, count: int, rng: random.Random) -> list[dict[str, object]]:
    """Return cafes with five reviews each; good ones have three or more positive reviews."""
    made: list[dict[str, object]] = []
    for number in range(count):
        good = rng.randint(1, 4)
        reviews = rng.sample(POSITIVE[place::3], good) + rng.sample(
            NEGATIVE[place::3], min(5 - good, 4)
        )
        rng.shuffle(reviews)
        made.append({"id": f"{place}-{number}", "reviews": reviews, "recommended": good >= 3})
    return made


def main(folder: Path) -> cp.Result:
    """Tune question and share, and print them with the accuracy on test cafes."""
    rng = random.Random(0)
    result = cp.optimize(
        declare(),
        data={"train": rows(0, 20, rng), "valid": rows(1, 20, rng), "test": rows(2, 20, rng)},
        metric=cp.metrics.accuracy("recommended"),
        budget=cp.Budget(system_runs=120),
        run_dir=folder / "map",
        progress=False,
    )
    before, after = result.test_before, result.test_after
    assert before is not None
    assert after is not None
    print(f"accuracy on {len(after.rows)} test cafes: {before.mean:.2f} -> {after.mean:.2f}")
    print(f"question: {result.best['question.choice']}")
    print(f"share of happy guests: {result.best['recommender.share']}")
    return result


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else temporary))
