"""Optimizers of the package ``dspy`` on worlds of scripted writers.

The model is called in this process. Steps of the program are formatted as our component formats
them, so that equal prompts and demonstrations have equal outputs; all other requests have the forms
of DSPy.
"""

from __future__ import annotations

import io
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from types import SimpleNamespace
from typing import Any

import dspy
from dspy.teleprompt import BootstrapFewShotWithRandomSearch, MIPROv2

from benchmarks.simulated.writers.programs import PlainProgram
from benchmarks.simulated.writers.worlds import Found, Row, Step

CANDIDATES = (
    6  # instructions and sets of demonstrations per predictor, as in the size ``light`` of MIPROv2
)
FULL_STEPS = 10  # trials between full evaluations: more trials within few runs than with DSPy's 5
MOST_DEMOS = 4  # demonstrations that the systems' files allow
MINIBATCHES = (
    3  # minibatches of MIPROv2 that make up the validation examples, as in ``light`` (35 of 100)
)


class WriterLM(dspy.BaseLM):  # type: ignore[misc]  # DSPy is untyped here
    """The model of a world."""

    def __init__(self, program: PlainProgram) -> None:
        super().__init__("scripted", cache=False)
        self._program = program

    def forward(
        self,
        prompt: str | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        **settings: object,
    ) -> SimpleNamespace:
        """Reply to a prompt or to messages."""
        text = "\n\n".join(str(message["content"]) for message in messages or ()) or str(prompt)
        message = SimpleNamespace(content=self._program.ask(text), tool_calls=None)
        choice = SimpleNamespace(message=message, finish_reason="stop")
        return SimpleNamespace(choices=[choice], usage={}, model="scripted")


class StepAdapter(dspy.ChatAdapter):  # type: ignore[misc]
    """Formats the steps of a program as our component does, and all other requests as DSPy does."""

    def __init__(self, steps: Sequence[Step]) -> None:
        super().__init__()
        self._steps = {((step.input,), (step.output,)): step for step in steps}

    def _step(self, signature: Any) -> Step | None:  # noqa: ANN401
        return self._steps.get((tuple(signature.input_fields), tuple(signature.output_fields)))

    def format(
        self,
        signature: Any,  # noqa: ANN401
        demos: Sequence[Any],
        inputs: Mapping[str, Any],  # noqa: RUF100, ANN401
    ) -> list[dict[str, Any]]:
        """Return the messages of a request."""
        step = self._step(signature)
        if step is None:
            messages: list[dict[str, Any]] = super().format(signature, demos, inputs)
            return messages
        text = step.message(signature.instructions, complete(step, demos), inputs[step.input])
        return [{"role": "user", "content": text}]

    def parse(self, signature: Any, completion: str) -> dict[str, Any]:  # noqa: ANN401
        """Return the fields of a reply."""
        step = self._step(signature)
        found: dict[str, Any] = (
            {step.output: completion} if step is not None else super().parse(signature, completion)
        )
        return found


def complete(step: Step, demos: Sequence[Any]) -> list[Row]:
    """Return the demonstrations of a step that have both of its fields."""
    rows = [{name: demo.get(name) for name in (step.input, step.output)} for demo in demos]
    return [row for row in rows if all(row.values())]


class ScriptedProgram(dspy.Module):  # type: ignore[misc]
    """The program of a world, with a predictor for each step."""

    def __init__(self, program: PlainProgram) -> None:
        super().__init__()
        self.program = program
        for step in program.steps:
            signature = dspy.Signature(f"{step.input} -> {step.output}", program.start[step.name])
            setattr(self, step.name, dspy.Predict(signature))

    def forward(self, **inputs: str) -> Any:  # noqa: ANN401
        """Run the steps in order."""
        self.program.runs += 1
        found = dict(inputs)
        for step in self.program.steps:
            found[step.output] = getattr(self, step.name)(**{step.input: found[step.input]})[
                step.output
            ]
        return dspy.Prediction(**{step.output: found[step.output] for step in self.program.steps})


class BudgetedMIPROv2(MIPROv2):  # type: ignore[misc]
    """MIPROv2 with as many trials as the remaining runs allow."""

    def __init__(self, program: PlainProgram, runs: int, **settings: Any) -> None:  # noqa: ANN401
        super().__init__(auto=None, num_candidates=CANDIDATES, **settings)
        self._program, self._runs = program, runs

    def _optimize_prompt_parameters(self, *arguments: Any) -> Any:  # noqa: ANN401
        program, instructions, demos, evaluate, valid, _, minibatch, size, steps, seed = arguments
        left = self._runs - self._program.runs
        trials = trials_within(left, len(valid), size, steps)
        return super()._optimize_prompt_parameters(
            program, instructions, demos, evaluate, valid, trials, minibatch, size, steps, seed
        )


def trials_within(runs: int, valid: int, minibatch: int, steps: int) -> int:
    """Return how many trials of MIPROv2 a number of runs allows, at least one.

    It evaluates the initial program on all validation examples, each trial on a minibatch, and the
    best after every ``steps`` trials and at the end on all of them.

    >>> trials_within(145, 40, 13, 5), trials_within(158, 40, 13, 5), trials_within(158, 40, 13, 10)
    (5, 5, 6)
    """
    fitting = (
        n
        for n in range(1, runs + 1)
        if valid + n * minibatch + math.ceil(n / steps) * valid <= runs
    )
    return max(fitting, default=1)


Optimize = Callable[
    [PlainProgram, int, list[Any], list[Any]], Any
]  # of runs, train and validation examples


def metric_of(program: PlainProgram) -> Callable[..., float]:
    """Return the metric of a world."""
    last = program.steps[-1].output
    return lambda example, prediction, trace=None: program.score(example, prediction[last])


def mipro(program: PlainProgram, runs: int, train: list[Any], valid: list[Any]) -> Any:  # noqa: ANN401
    """Run MIPROv2."""
    optimizer = BudgetedMIPROv2(
        program, runs, metric=metric_of(program), num_threads=1, seed=program.seed + 1
    )
    return optimizer.compile(
        ScriptedProgram(program),
        trainset=train,
        valset=valid,
        num_trials=1,
        minibatch_size=len(valid) // MINIBATCHES,
        minibatch_full_eval_steps=FULL_STEPS,
    )


def gepa(program: PlainProgram, runs: int, train: list[Any], valid: list[Any]) -> Any:  # noqa: ANN401
    """Run GEPA; it ends with the iteration that spends the last run."""
    score = metric_of(program)

    def metric(
        example: Any,  # noqa: ANN401
        prediction: Any,  # noqa: ANN401
        trace: object = None,
        name: str | None = None,
        part: object = None,
    ) -> Any:  # noqa: ANN401
        value = score(example, prediction)
        return (
            value
            if name is None
            else dspy.Prediction(score=value, feedback=program.feedback(example, value))
        )

    optimizer = dspy.GEPA(
        metric,
        max_metric_calls=runs,
        reflection_lm=WriterLM(program),
        num_threads=1,
        seed=program.seed,
    )
    return optimizer.compile(ScriptedProgram(program), trainset=train, valset=valid)


def bootstrap(
    program: PlainProgram, runs: int, train: list[Any], valid: list[Any], labelled: int = 16
) -> Any:  # noqa: ANN401
    """Run BootstrapFewShotWithRandomSearch, one candidate after another until the runs are spent."""
    optimizer = BootstrapFewShotWithRandomSearch(
        metric_of(program), max_labeled_demos=labelled, num_candidate_programs=runs, num_threads=1
    )
    best: tuple[float, Any] = (-math.inf, None)
    number = -3  # the number of its first candidate
    while program.runs + len(valid) <= runs:
        found = optimizer.compile(
            ScriptedProgram(program), trainset=train, valset=valid, restrict=[number]
        )
        best = max(best, (found.candidate_programs[0]["score"], found), key=lambda pair: pair[0])
        number += 1
    return best[1]


OPTIMIZERS: Mapping[str, Optimize] = {
    "MIPROv2": mipro,
    "GEPA": gepa,
    "bootstrap": bootstrap,
    "bootstrap, 4 demonstrations": partial(bootstrap, labelled=MOST_DEMOS),
}


@contextmanager
def quiet() -> Iterator[None]:
    """Drop DSPy's messages and progress bars."""
    logging.disable(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(),
            redirect_stdout(io.StringIO()),
            redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def compile_program(name: str, program: PlainProgram, runs: int, valid: int) -> Found:
    """Run an optimizer of DSPy, a key of `OPTIMIZERS`, with a number of runs and validation examples."""
    inputs = program.steps[0].input
    train, validation = (
        [dspy.Example(**row).with_inputs(inputs) for row in rows]
        for rows in (program.rows("train", 240), program.rows("dev", 100)[:valid])
    )
    with quiet(), dspy.context(lm=WriterLM(program), adapter=StepAdapter(program.steps)):
        best = OPTIMIZERS[name](program, runs, train, validation)
    predictors = {step: getattr(best, step.name) for step in program.steps}
    prompts = {step.name: found.signature.instructions for step, found in predictors.items()}
    demos = {step.name: complete(step, found.demos) for step, found in predictors.items()}
    return program.found(prompts, demos)
