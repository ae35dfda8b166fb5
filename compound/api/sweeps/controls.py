"""Controls of a sweep: scores that a system has to beat, on the test examples of each seed.

The *constant* control gives one answer to every input; it is chosen on the train split. The *direct
call* gives the system's inputs to its default model in a single request. Their results are stored
per file and seed, and reused as long as nothing that determines them changes.
"""

from __future__ import annotations

import time
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
from compound.core.storage.state import State
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
from compound.graph.configuration import canonical_json, digest, to_readable_json
from compound.graph.fingerprint import describe_code
from compound.graph.registry.engines import for_system
from compound.graph.space import Space
from compound.graph.system import System
from compound.graph.types import accepts
from compound.optimization.runs.directory import read_json, write_atomically
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
TRIED = (
    50  # most frequent answers that are tried; with partial credit the best need not be the first
)
FOLDER = "controls"
FORMAT = 1  # increment it if the same settings lead to other results


class StoredControl(State):
    """A control in a file of the sweep's directory; ``evaluation`` is an `EvaluationDocument`."""

    key: str
    status: str
    reason: str = ""
    choice: str = ""
    evaluation: dict[str, Any] | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Control:
    """A control of one file and seed, stored in a file below the sweep's directory."""

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

    def run(self) -> None:
        """Evaluate the control unless its result is stored; a failure is retried by the next call."""
        key = ""
        try:
            examples = _Examples.read(self.program, self.settings)
            key = self._key(examples)
            if (
                (stored := self._read()) is not None
                and stored.key == key
                and stored.status != "failed"
            ):
                return
            choice, evaluation, seconds = self._evaluate(examples)
            document: dict[str, Any] = dict(evaluation.to_json())
            found = StoredControl(
                key=key, status="finished", choice=choice, evaluation=document, seconds=seconds
            )
        except NotApplicable as error:
            found = StoredControl(key=key, status="skipped", reason=error.message)
        except Exception as error:  # noqa: BLE001 - a control's failure must not end the runs
            message = (
                error.message
                if isinstance(error, CompoundError)
                else f"{type(error).__name__}: {error}"
            )
            found = StoredControl(key=key, status="failed", reason=message)
        UntrustedFolder(self._place).make()
        write_atomically(self._place / self._name("json"), canonical_json(found.to_json()) + "\n")

    @property
    def is_stored(self) -> bool:
        """Whether there is a result that `run` need not retry, unless what determines it has changed."""
        stored = self._read()
        return stored is not None and stored.status != "failed"

    @property
    def result(self) -> ControlRun | None:
        """The stored result, if there is one."""
        stored = self._read()
        if stored is None:
            return None
        found: Any = stored.evaluation
        return {
            "file": self.file,
            "name": self.name,
            "seed": self.settings.seed,
            "status": stored.status,
            "reason": stored.reason,
            "choice": stored.choice,
            "evaluation": Evaluation.from_json(found) if found else None,
            "seconds": stored.seconds,
        }

    @property
    def _place(self) -> Path:
        return self.folder / self.file / FOLDER

    def _name(self, suffix: str) -> str:
        return f"{self.name.replace(' ', '-')}-{self.settings.seed}.{suffix}"

    def _read(self) -> StoredControl | None:
        """Return the stored result; None if there is none, or it is damaged: it is then computed again."""
        try:
            if UntrustedFolder(self._place).kind(self._name("json")) is None:
                return None
            stored = StoredControl.from_json(read_json(self._place, self._name("json")))
            found: Any = stored.evaluation
            if found is not None:
                Evaluation.from_json(found)
        except (CompoundError, LookupError, TypeError, ValueError):
            return None
        return stored

    def _key(self, examples: _Examples) -> str:
        """Return a digest of everything that determines the result."""
        program, settings = self.program, self.settings
        parts: list[object] = [
            FORMAT,
            self.name,
            describe_code(program.metric),
            settings.failure_score,
        ]
        rows = [examples.test] if self.name == DIRECT else [examples.train, examples.test]
        parts += [[[e.id, e.inputs, e.gold] for e in split] for split in rows]
        if self.name == DIRECT:
            system = direct_system(program.system, _metric(program))
            parts += [system.signature, system.lm, program.find_engine(str(system.lm)).name]
            parts += [dict(system.settings), settings.max_failed]
        return digest(to_readable_json(parts))

    def _evaluate(self, examples: _Examples) -> tuple[str, Evaluation, float]:
        """Return the choice, its evaluation on the test examples, and the seconds that it took."""
        metric, outputs = _metric(self.program), self.program.system.outputs
        started = time.monotonic()
        if self.name == CONSTANT:
            answer = constant_answer(metric, outputs, examples.train)
            evaluation = evaluate_constant(metric, answer, examples.test, self.settings)
            return str(answer), evaluation, time.monotonic() - started
        evaluation = run_blocking(self._call_directly(examples.test))
        return str(self.program.system.lm), evaluation, time.monotonic() - started

    async def _call_directly(self, test: Sequence[Example]) -> Evaluation:
        """Evaluate the direct call; answers of an interrupted evaluation are reused, and charged once."""
        settings, metric = self.settings, _metric(self.program)
        system = direct_system(self.program.system, metric)
        UntrustedFolder(self._place).make()
        cache = DiskCache(self._place / self._name("sqlite"), step=0)
        executor = Executor(
            for_system(self.program.find_engine, system), cache=cache, seed=settings.seed
        )
        rules = EvaluationRules(settings.concurrency, settings.failure_score, max_failed=1.0)
        try:
            found = await evaluate(executor, system, test, metric, rules=rules)
        finally:
            await executor.aclose()
            cache.close()
        _check_failures(found, settings)
        return found


@dataclass(frozen=True)
class _Examples:
    """Train and test examples of a seed, which are those of the seed's runs."""

    train: Sequence[Example]
    test: Sequence[Example]

    @classmethod
    def read(cls, program: Program, settings: OptimizeSettings) -> _Examples:
        data, inputs, seed = program.data, program.system.inputs, settings.seed
        assert data is not None
        if not data.has("test"):
            raise NotApplicable("the data has no test split")
        train = read_examples(data, "train", inputs, limit=settings.train_size, seed=seed)
        test = read_examples(data, "test", inputs, limit=settings.test_size, seed=seed)
        if not test:
            raise NotApplicable("the test split is empty")
        for rows in (train, test):
            check_rows(_metric(program), program.system.outputs, rows)
        return cls(train, test)


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
    assert isinstance(metric, Comparison)
    scores = _scores(metric, answer, examples)
    rows = tuple(ScoredRun(each.id, 0, value) for each, value in zip(examples, scores, strict=True))
    rules = EvaluationRules(failure_score=settings.failure_score)
    return Evaluation(digest(["constant", answer]), rows, bounds=score_bounds(metric, rules))


def _scores(metric: Comparison, answer: object, examples: Sequence[Example]) -> list[float]:
    return [metric.score({metric.output: answer}, example).value for example in examples]


def _metric(program: Program) -> Metric:
    assert program.metric is not None
    return program.metric


def _check_failures(evaluation: Evaluation, settings: OptimizeSettings) -> None:
    """Raise an error if too many calls failed; an answer that cannot be parsed is a result of the model."""
    found = [
        row.failure
        for row in evaluation.rows
        if row.failure and row.failure.kind != ParseError.kind
    ]
    if len(found) > settings.max_failed * len(evaluation.rows):
        counted = Counter(f"{failure.kind}: {failure.message}" for failure in found)
        rules = EvaluationRules(max_failed=settings.max_failed)
        raise_too_many_failures(counted.most_common(), len(evaluation.rows), rules)
