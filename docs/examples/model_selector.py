"""Choose a model for each component of a system, and read what the choice costs.

A request names a wish and some prices. One component reads the wish, the other adds up the prices.
Each can use two models: `small` reads well but adds two numbers only, and `large` costs twenty
times as much. Both are simulated, so the example needs no key. For real models, write
``engines={"small": cp.engines.LiteLLM("openai/gpt-4o-mini"), "large": cp.engines.LiteLLM("openai/gpt-4o")}``.

Run: python docs/examples/model_selector.py [FOLDER]
"""

from __future__ import annotations

import random
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import compound as cp
from compound.testing import ScriptedLM

WISHES = {
    "refund": "I want my money back",
    "exchange": "I want another size",
    "invoice": "I need the bill",
}


def answer(message: str, numbers: int) -> str:
    """Answer as a model that can add up to `numbers` numbers."""
    if "Add" in message:
        return str(sum(int(price) for price in re.findall(r"\d+", message)[:numbers]))
    return next(wish for wish, sentence in WISHES.items() if sentence in message)


def engines() -> dict[str, cp.ext.Engine]:
    """Return the models; a price is in dollars per word."""
    return {
        "small": ScriptedLM(lambda message: answer(message, 2), name="small", price=1e-6),
        "large": ScriptedLM(lambda message: answer(message, 9), name="large", price=2e-5),
    }


def declare() -> cp.System:
    """Declare two components, each with a selector for its model."""
    request = cp.Input("request", str)
    wish = cp.LLM("wish", prompt="Which wish is it: refund, exchange or invoice?", max_tokens=2)
    total = cp.LLM("total", prompt="Add the prices.", output=int, max_tokens=2)
    wish_model = cp.Selector("wish_model", "small", "large")
    total_model = cp.Selector("total_model", "small", "large")
    return cp.System(
        "desk",
        outputs={
            "wish": wish(request=request, lm=wish_model(request=request)),
            "total": total(request=request, lm=total_model(request=request)),
        },
    )


def rows(count: int, seed: int) -> list[dict[str, object]]:
    """Return requests with two to four prices."""
    rng, made = random.Random(seed), []
    for number in range(count):
        wish, prices = (
            rng.choice(list(WISHES)),
            [rng.randint(1, 40) for _ in range(rng.randint(2, 4))],
        )
        request = f"{WISHES[wish]}. I paid {' and '.join(map(str, prices))} dollars."
        made.append(
            {"id": f"{seed}-{number}", "request": request, "wish": wish, "total": sum(prices)}
        )
    return made


def share_right(outputs: Mapping[str, object], example: cp.Example) -> float:
    """Score one half for each output that is right."""
    return sum(outputs[name] == example.gold[name] for name in ("wish", "total")) / 2


def main(folder: Path) -> cp.Result:
    """Select the models, and print score and cost before and after."""
    system, test = declare(), rows(40, seed=3)
    metric = cp.metrics.custom(share_right, bounds=(0, 1))
    result = cp.optimize(
        system,
        data={"train": rows(40, seed=1), "valid": rows(40, seed=2), "test": test},
        metric=metric,
        method="llm_selector",
        budget=cp.Budget(system_runs=400, cost=1.00),
        engines=engines(),
        run_dir=folder / "model_selector",
        progress=False,
    )
    for name, configuration in (("before", system.configuration), ("after", result.best)):
        # measured without the cache: calls that come from the cache of a run cost nothing
        found = cp.evaluate(
            system.bind(configuration), test, metric, engines=engines(), cache=False
        )
        dollars = 1000 * found.usage.cost / len(test)
        print(f"{name}: score {found.mean:.3f}, ${dollars:.2f} for 1,000 requests")
    print(f"models: {dict(result.best)}")
    print(f"the search itself cost ${result.spent['cost']:.3f}")
    return result


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else temporary))
