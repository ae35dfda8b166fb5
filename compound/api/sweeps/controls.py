"""Controls of a sweep: scores that a system has to beat, on the test examples of each seed.

The *constant* control gives one answer to every input; it is chosen on the train split. The *direct
call* gives the system's inputs to its default model in a single request; its calls are recorded
per file and seed, so that they are made once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from compound.components.llm import LLM
from compound.core.errors import CompoundError, DeclarationError, ParseError
from compound.core.example import Example, Metric
from compound.core.loops import run_blocking
from compound.core.security.untrusted import UntrustedFolder
from compound.evaluation.dataset import Split
from compound.evaluation.evaluate import (
    Evaluation,
    EvaluationRules,
    ScoredRun,
    evaluate,
    raise_too_many_failures,
    score_bounds,
)
from compound.evaluation.examples import read_examples
from compound.evaluation.metrics.comparison import Comparison
from compound.evaluation.metrics.judges import Judge
from compound.evaluation.metrics.scoring import check_rows
from compound.execution.cache import DiskCache
from compound.execution.executor import Executor
from compound.graph.component import Input, Output, Source, connect
from compound.graph.configuration import digest
from compound.graph.registry.engines import for_system
from compound.graph.space import Space
from compound.graph.system import System
from compound.graph.types import accepts
from compound.optimization.settings.optimize import OptimizeSettings

if TYPE_CHECKING:
    from compound.report.sweep import ControlRun
    from compound.yaml import Program

NAME = "direct"
MAX_TOKENS = 256  # of the answer, unless a model component writes the output


class NotApplicable(DeclarationError):
    """A control does not apply to a system, for a reason that the sweep reports."""


def direct_system(system: System, metric: Metric) -> System:
    """Return a system of one LLM component with the inputs of a system, and the outputs that a metric reads.

    The prompt names inputs and outputs, and the component adds the type of the outputs, as it does
    in any system. Where an LLM component writes the output, its stop strings and number of tokens
    are taken over.

    Raises:
        NotApplicable: the system has no default model, or no model can write its outputs.

    Example:
        >>> from compound.metrics import exact_match
        >>> answerer = LLM("answerer", max_tokens=8)
        >>> system = System("demo", {"answer": answerer(question=Input("question"))}, lm="smollm2")
        >>> component = direct_system(system, exact_match("answer")).components["direct"]
        >>> component.prompt, component.max_tokens
        ('Read the question, then give the answer.', 8)
    """
    if system.lm is None:
        raise NotApplicable(f"system {system.name!r} has no default model (lm)")
    names = [metric.output] if isinstance(metric, Comparison | Judge) else list(system.outputs)
    kinds = {
        name: str if system.outputs[name].type is Any else system.outputs[name].type
        for name in names
    }
    writer = _writer(system, names)
    stop, setting = (writer.stop, writer.max_tokens) if writer else ((), MAX_TOKENS)
    start = setting.value if isinstance(setting, Space) else setting
    tokens = start if isinstance(start, int) else MAX_TOKENS
    wires: dict[str, Source] = {
        _port(name): Input(name, kind) for name, kind in system.inputs.items()
    }
    try:
        component = LLM(
            NAME,
            prompt=_prompt(list(system.inputs), names),
            output=kinds,
            max_tokens=tokens,
            stop=stop,
        )
        node = connect(component, NAME, wires, None)
        made = System(NAME, {name: Output(node, name) for name in names}, lm=system.lm)
    except DeclarationError as error:
        raise NotApplicable(f"one call cannot replace the system: {error.message}") from error
    return made.with_engines(system.engines)


def _prompt(inputs: list[str], outputs: list[str]) -> str:
    """Return the instruction.

    >>> _prompt(["question", "search_results"], ["answer"])
    'Read the question and the search results, then give the answer.'
    """
    given, wanted = (
        " and ".join(f"the {name.replace('_', ' ')}" for name in names)
        for names in (inputs, outputs)
    )
    return f"Read {given}, then give {wanted}."


def _port(name: str) -> str:
    """Return the port of an input; a port with the name of a setting would replace the setting."""
    return f"given_{name}" if name in LLM(NAME).settings else name


def _writer(system: System, outputs: list[str]) -> LLM | None:
    """Return the LLM component that writes the outputs, if one does."""
    sources = [system.outputs[name] for name in outputs]
    components = [source.node.component for source in sources if isinstance(source, Output)]
    first = components[0] if components else None
    same = all(component is first for component in components)
    return first if same and isinstance(first, LLM) else None


CONSTANT, DIRECT = "constant", "direct call"
TRIED = 50  # most frequent answers to try; with partial credit the best need not be the first
FOLDER = "controls"


@dataclass(frozen=True)
class Control:
    """A control of one file and seed; its calls are recorded below the sweep's directory."""

    name: str
    program: Program
    settings: OptimizeSettings
    folder: Path

    @property
    def file(self) -> str:
        """Name of the system's file, without folder and suffix."""
        return self.program.path.stem

    def __str__(self) -> str:
        return f"{self.file}, control {self.name!r}, seed {self.settings.seed}"

    def run(self) -> ControlRun:
        """Evaluate the control; recorded calls are not repeated, and charged once."""
        found: ControlRun = {
            "file": self.file,
            "name": self.name,
            "seed": self.settings.seed,
            "status": "finished",
            "reason": "",
            "choice": "",
            "evaluation": None,
        }
        try:
            found["choice"], found["evaluation"] = self._evaluate()
        except NotApplicable as error:
            found["status"], found["reason"] = "skipped", error.message
        except CompoundError as error:
            found["status"], found["reason"] = "failed", error.message
        except Exception as error:  # noqa: BLE001 - a control's failure must not end the runs
            found["status"], found["reason"] = "failed", f"{type(error).__name__}: {error}"
        return found

    def _evaluate(self) -> tuple[str, Evaluation]:
        """Return the choice, and its evaluation on the test examples."""
        program, settings = self.program, self.settings
        system, data, metric = program.system, program.data, program.metric
        assert data is not None
        assert metric is not None
        if not data.has("test"):
            raise NotApplicable("the data has no test split")
        sizes: Mapping[Split, int | None] = {
            "train": settings.train_size,
            "test": settings.test_size,
        }
        train, test = (
            read_examples(data, role, system.inputs, limit=limit, seed=settings.seed)
            for role, limit in sizes.items()
        )
        if not test:
            raise NotApplicable("the test split is empty")
        for rows in (train, test):
            check_rows(metric, system.outputs, rows)
        if self.name == CONSTANT:
            answer = constant_answer(metric, system.outputs, train)
            return str(answer), evaluate_constant(metric, answer, test, settings)
        direct = direct_system(system, metric)
        return str(direct.lm), run_blocking(self._call_directly(direct, metric, test))

    async def _call_directly(
        self, system: System, metric: Metric, test: Sequence[Example]
    ) -> Evaluation:
        """Evaluate the direct call.

        Raises:
            TooManyFailures: too many calls failed; an answer that cannot be parsed is a result of
                the model.
        """
        settings, folder = self.settings, UntrustedFolder(self.folder / self.file / FOLDER).make()
        cache = DiskCache(folder.path / f"direct-call-{settings.seed}.sqlite", step=0)
        engines = for_system(self.program.find_engine, system)
        executor = Executor(engines, cache=cache, seed=settings.seed)
        rules = EvaluationRules(settings.concurrency, settings.failure_score, max_failed=1.0)
        try:
            evaluation = await evaluate(executor, system, test, metric, rules=rules)
        finally:
            await executor.aclose()
            cache.close()
        failures = [row.failure for row in evaluation.rows if row.failure]
        counted = Counter(
            f"{failure.kind}: {failure.message}"
            for failure in failures
            if failure.kind != ParseError.kind
        )
        if counted.total() > settings.max_failed * len(evaluation.rows):
            rules = EvaluationRules(max_failed=settings.max_failed)
            raise_too_many_failures(counted.most_common(), len(evaluation.rows), rules)
        return evaluation


def constant_answer(
    metric: Metric, outputs: Mapping[str, object], train: Sequence[Example]
) -> object:
    """Return the answer with the highest mean score on train, among its most frequent gold answers.

    Ties go to the more frequent answer, then to the one that occurs first.

    Raises:
        NotApplicable: the metric does not compare an output with gold answers that are labels or
            texts.
    """
    if not isinstance(metric, Comparison):
        raise NotApplicable(f"metric {metric.name!r} does not compare an output with a gold field")
    if not metric.answers:
        raise NotApplicable(
            f"metric {metric.name!r} has no gold answers that could be given to every example"
        )
    if metric.listed:
        raise NotApplicable(f"metric {metric.name!r} scores a list, not a label or a text")
    kind = getattr(outputs[metric.output], "type", Any)
    golds = [answer for example in train for answer in metric.accepted(example)]
    for answer in golds:
        if not isinstance(answer, str | int | float):
            raise NotApplicable(
                f"gold answers are of type {type(answer).__name__}, not labels or texts"
            )
    counted = Counter(answer if accepts(kind, answer) else str(answer) for answer in golds)
    tried = [answer for answer, _ in counted.most_common(TRIED)]
    return max(tried, key=lambda answer: fmean(_scores(metric, answer, train)))


def evaluate_constant(
    metric: Metric, answer: object, examples: Sequence[Example], settings: OptimizeSettings
) -> Evaluation:
    """Return the scores of one answer for all examples, which take no system runs and no calls."""
    rules = EvaluationRules(failure_score=settings.failure_score)
    scores = zip(examples, _scores(metric, answer, examples), strict=True)
    rows = tuple(ScoredRun(example.id, 0, score) for example, score in scores)
    return Evaluation(digest(["constant", answer]), rows, bounds=score_bounds(metric, rules))


def _scores(metric: Metric, answer: object, examples: Sequence[Example]) -> list[float]:
    assert isinstance(metric, Comparison)
    return [metric.score({metric.output: answer}, example).value for example in examples]
