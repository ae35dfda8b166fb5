"""Programs of installed libraries that are imported, optimized and run again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import compound as cp
from benchmarks.measure.interchange.exported import in_dspy, runners
from benchmarks.measure.interchange.trial import MODEL, Trial


def plain_function(trial: Trial) -> dict[str, Any]:
    """Optimize a system declared as a Python function, and ask the model with its exported requests."""

    @cp.llm(
        prompt=cp.Text(trial.task.instruction),
        demos=cp.Demos(max=6),
        max_tokens=trial.task.max_tokens,
    )
    def answer(question: str) -> str:
        raise NotImplementedError

    @cp.system(name="plain_function", lm=MODEL)
    def declared(question: str) -> dict[str, str]:
        return {"answer": answer(question)}

    result = trial.optimize(declared, 600)
    best = declared.bind(result.best)
    expected = trial.outputs(best)
    same = {
        target: trial.agreement(ask_exported, expected)
        for target, ask_exported in runners(best, trial.url).items()
    }
    return trial.row("compound", "cp.system", result, same)


def dspy_program(trial: Trial) -> dict[str, Any]:
    """Optimize a DSPy program, write the values back, and run it in DSPy after saving and loading."""
    import dspy
    from dspy.utils.exceptions import AdapterParseError

    signature = dspy.Signature("question -> answer", trial.task.instruction)
    program = dspy.Predict(signature)
    system = cp.interchange.from_dspy(
        program, lm=MODEL, name="dspy_program", max_tokens=trial.task.max_tokens
    )
    result = trial.optimize(system, 600)
    best = system.bind(result.best)
    cp.interchange.to_dspy(program, result.best).save(trial.folder / "program.json")
    cp.interchange.export(best, "dspy", trial.folder / "exported.json")
    expected = trial.outputs(best)
    same = {}
    for form, file in (("to_dspy, save, load", "program"), ("export --to dspy, load", "exported")):
        loaded = dspy.Predict(signature)
        loaded.load(trial.folder / f"{file}.json")

        def alone(question: str, program: Any = loaded) -> object:  # noqa: ANN401 - of DSPy
            try:
                return in_dspy(program, trial.url, question=question).answer
            except AdapterParseError:
                return None

        same[form] = trial.agreement(alone, expected)
    return trial.row("dspy", "cp.interchange.from_dspy", result, same)


PROGRAMS: tuple[Callable[[Trial], dict[str, Any]], ...] = (plain_function, dspy_program)
