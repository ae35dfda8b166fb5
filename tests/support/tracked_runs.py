"""Small searches whose records trackers receive."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import compound as cp
from compound.testing import ScriptedLM

ROWS = [{"id": str(i), "question": f"What is {i}?", "answer": str(i)} for i in range(40)]
DATA = {"train": ROWS[:12], "valid": ROWS[12:28], "test": ROWS[28:]}


def number_of(message: str) -> str:
    """Return the number that a message asks for."""
    return message.rsplit("What is ", maxsplit=1)[-1].split("?", maxsplit=1)[0]


def often_right(message: str) -> str:
    """Answer one of four questions."""
    number = number_of(message)
    return number if int(number) % 4 == 0 else "?"


def qa(**settings: Any) -> cp.System:
    """Return a system with a prompt and a temperature to tune."""
    prompt, temperature = cp.Text("Answer."), cp.Choice(0.0, 0.5)
    llm = cp.LLM("answerer", prompt=prompt, temperature=temperature, retries=0, **settings)
    return cp.System("qa", outputs={"answer": llm(question=cp.Input("question"))}, lm="lm")


def optimize(
    folder: Path, lm: ScriptedLM | Callable[[str], str] = often_right, **changes: Any
) -> cp.Result:
    """Optimize `qa`; the model ``good`` is better than the initial one."""
    engines = {
        "lm": lm if isinstance(lm, ScriptedLM) else ScriptedLM(lm),
        "good": ScriptedLM(number_of),
    }
    options = {"method": "random", "budget": 120, **changes}
    system = qa(lm=cp.Choice("lm", "good"))
    return cp.optimize(
        system, DATA, "exact_match", run_dir=folder, engines=engines, progress=False, **options
    )
