"""Import DSPy programs and metrics, and write optimized values back into programs."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compound.core.errors import DeclarationError, explain_missing, suggest_name
from compound.core.example import Example, Score
from compound.core.formatting import format_names
from compound.core.narrowing import entry, report_wrong_arguments
from compound.engines.credentials import is_model_name
from compound.evaluation.metrics.custom import Custom, checked_bounds
from compound.evaluation.statistics import Bounds
from compound.graph.component import Input
from compound.graph.configuration import Configuration, load
from compound.graph.space import Choice, Demo, Demos, Float, Text, Weights, as_demos
from compound.graph.system import System
from compound.graph.types import format_type
from compound.interchange.dspy_predictor import (
    REMEDY,
    DSPyPredictor,
    check_modules,
    flat,
    own_adapter,
)
from compound.interchange.dspy_program import DSPyProgram, bind_predictors

if TYPE_CHECKING:
    import dspy

MOST_DEMOS = 4
OPTIONS = {
    *("temperature", "max_tokens", "max_completion_tokens", "stop", "timeout"),  # of components
    *("n", "num_generations", "rollout_id", "cache", "num_retries"),  # checked, or of DSPy alone
}
GivenOutputs = Mapping[str, object] | Sequence[str]


@report_wrong_arguments
@explain_missing("cp.interchange.from_dspy")
def from_dspy(
    program: dspy.Module,
    *,
    lm: str | Choice,
    name: str = "",
    inputs: Mapping[str, object] | None = None,
    outputs: GivenOutputs | None = None,
    temperature: float | Float | None = None,
    max_tokens: int | None = None,
    max_demos: int = MOST_DEMOS,
    weights: Weights | None = None,
    max_calls: int = 20,
) -> System:
    """Import a DSPy program as a system whose predictors are LLM components.

    Each predictor has its own prompt (the instructions of its signature) and demonstrations to
    tune, named after its place in the program: ``generate.prompt`` for ``self.generate``. The
    program's Python code runs unchanged between the predictors' calls, on a copy; the program
    itself is not modified. Prompts have the format of DSPy's adapter (`dspy.settings.adapter`, by
    default its ChatAdapter).

    Args:
        program: a program, compiled or not.
        lm: the model of all predictors, or a space of models to choose from. The models that are set
            in DSPy are not used, nor their options.
        name: the system's name; default: that of the program's class.
        inputs: types of the arguments of ``forward``; default: those without a default, with the
            types of its annotations or of the fields of its predictors with the same names.
        outputs: types of the fields that the program returns, or their names, which have the types
            of the predictors' fields; default: those of its signature, of its only predictor, or of
            the predictor whose prediction ``forward`` returns.
        temperature: temperature of all predictors; default: that of their configuration, or 0.
        max_tokens: maximum length of an answer in tokens; default: that of the predictor's
            configuration, or 1000.
        max_demos: maximum number of demonstrations of a predictor.
        weights: a space of LoRA adapters for each predictor.
        max_calls: maximum number of predictor calls in one run of the program.

    Raises:
        DeclarationError: inputs or outputs cannot be determined, a predictor asks for several
            completions or has another option of a model, or a module such as `dspy.Refine` calls
            models outside of its predictors.
    """
    import dspy

    if not isinstance(program, dspy.Module):
        raise DeclarationError(
            f"from_dspy needs a dspy.Module, but got {type(program).__name__}",
            hint="call it with an instance, such as from_dspy(MyProgram())",
        )
    check_modules(program)
    own = name or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(program).__name__).lower()
    copied = program.deepcopy()
    named = predictor_names(copied)
    given = {
        **{"lm": lm, "temperature": temperature, "max_tokens": max_tokens},
        **{"weights": weights, "max_demos": max_demos},
    }
    predictors = {
        component: _predictor(component, predictor, tuned, given)
        for component, (_, predictor, tuned) in named.items()
    }
    if not predictors:
        raise DeclarationError(
            f"the DSPy program {own!r} has no predictors",
            hint="assign them to attributes in __init__",
        )
    bind_predictors({component: predictor for component, (_, predictor, _) in named.items()})
    ports, returned = module_ports(program, inputs, outputs)
    composite = DSPyProgram(
        f"{own}_program" if own in predictors else own,
        copied,
        predictors,
        inputs=ports,
        outputs=returned,
        max_calls=max_calls,
    )
    wires: dict[str, Any] = {field: Input(field, kind) for field, kind in ports.items()}
    node = composite(**wires)
    found = {field: node if len(returned) == 1 else node[field] for field in returned}
    return System(own, found, lm=lm if isinstance(lm, str) else None)


def predictor_names(program: dspy.Module) -> dict[str, tuple[str, dspy.Predict, bool]]:
    """Return the predictors of a program by the name of their component.

    The values are the path in DSPy (the key in its state), the predictor, and whether it may be
    changed: predictors of compiled modules inside the program are frozen in DSPy, too.
    """
    import dspy

    tuned = {id(predictor): path for path, predictor in program.named_predictors()}
    found: dict[str, tuple[str, dspy.Predict, bool]] = {}
    for path, predictor in program.named_sub_modules(type_=dspy.Predict):
        shown = tuned.get(id(predictor), path.removeprefix("self."))
        own = _identifier(shown)
        short = own.removesuffix("_predict")
        key = short if short and short not in found else own
        number = 1
        while key in found:
            number += 1
            key = f"{own}_{number}"
        found[key] = (shown, predictor, id(predictor) in tuned)
    return found


def _identifier(path: str) -> str:
    """Return a path as a component's name.

    >>> _identifier("self"), _identifier("generate.predict"), _identifier("hops[0]"), _identifier("by['a b']")
    ('predict', 'generate_predict', 'hops_0', 'by_a_b')
    """
    name = re.sub(r"[^A-Za-z0-9]+", "_", path).strip("_") or "predict"
    name = "predict" if name == "self" else name
    return f"p_{name}" if name[0].isdigit() else name


def _predictor(
    name: str, predictor: dspy.Predict, tuned: bool, given: Mapping[str, Any]
) -> DSPyPredictor:
    config = {k: v for k, v in predictor.config.items() if v is not None}
    several = config.get("n") or config.get("num_generations") or 1
    if several > 1:
        raise DeclarationError(
            f"the predictor {name!r} asks for n={several} completions, but a component returns one",
            hint=f"remove n; or {REMEDY}",
        )
    if other := sorted(set(config) - OPTIONS):
        raise DeclarationError(
            f"the predictor {name!r} has the option {other[0]} of its model, which is not imported",
            hint=f"remove it, and set it on the engine of lm=: engines={{'NAME': cp.engines.LiteLLM(…, "
            f"extra={{{other[0]!r}: …}})}}",
        )
    stop = config.get("stop") or ()
    signature = predictor.signature
    demos = tuple(_as_demo(demo, signature) for demo in predictor.demos)
    most, prompt = max(given["max_demos"], len(demos)), signature.instructions
    temperature, longest = given["temperature"], given["max_tokens"]
    if temperature is None:
        temperature = float(config.get("temperature") or 0.0)
    if longest is None:
        longest = int(config.get("max_tokens") or config.get("max_completion_tokens") or 1000)
    return DSPyPredictor(
        name,
        prompt=Text(prompt, max_length=max(Text.max_length, len(prompt))) if tuned else prompt,
        output={field: info.annotation for field, info in signature.output_fields.items()},
        demos=Demos(demos, max=most) if tuned and most else demos,
        lm=given["lm"],
        temperature=temperature,
        max_tokens=longest,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        timeout=config.get("timeout", DSPyPredictor.timeout),
        weights=given["weights"] if tuned else None,
        enforce=False,
        format="fields" if len(signature.output_fields) > 1 else "auto",
        signature=signature,
        adapter=own_adapter(),
    )


def _as_demo(demo: Any, signature: Any) -> Demo:  # noqa: ANN401
    """Return a demonstration of DSPy, an example or a dict, split into inputs and outputs."""
    fields = dict(demo.toDict() if hasattr(demo, "toDict") else demo)
    return {
        "inputs": {name: fields[name] for name in signature.input_fields if name in fields},
        "outputs": {name: fields[name] for name in signature.output_fields if name in fields},
    }


def module_ports(
    module: dspy.Module, inputs: Mapping[str, object] | None, outputs: GivenOutputs | None
) -> tuple[Mapping[str, object], Mapping[str, object]]:
    """Return the types of a module's arguments and of the fields of its prediction.

    Raises:
        DeclarationError: they are not stated, and cannot be determined.
    """
    import dspy

    signatures = [p.signature for _, p in module.named_sub_modules(type_=dspy.Predict)]
    own = getattr(module, "signature", None)
    if not hasattr(own, "input_fields"):
        own = signatures[0] if len(signatures) == 1 else None
    takes = inputs or _arguments(module, own, signatures)
    if isinstance(outputs, Mapping) and outputs:
        return takes, outputs
    if own is None and not outputs and (child := _returned(module)) is not None:
        return takes, module_ports(child, takes, None)[1]
    known: dict[str, list[object]] = {}
    for signature in signatures if own is None else [own]:
        for field, info in signature.output_fields.items():
            known.setdefault(field, []).append(info.annotation)
    wanted = outputs or (known if own is not None else ())
    if not wanted or any(len(set(map(format_type, known.get(field, ())))) != 1 for field in wanted):
        fields = ", ".join(f"{field}: {format_type(kinds[-1])}" for field, kinds in known.items())
        raise DeclarationError(
            f"the outputs of {type(module).__name__} are not known: it has several predictors",
            hint=f"give outputs={{'answer': str}}, or a list of names; fields of its predictors: {fields}",
        )
    return takes, {field: known[field][0] for field in wanted}


def _returned(module: dspy.Module) -> dspy.Module | None:
    """Return the module whose prediction ``forward`` returns unchanged, if its code shows a single one."""
    import dspy

    try:
        forward = getattr(type(module), "forward", None) or type(module).aforward
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError, AttributeError):
        return None
    values: dict[str, list[ast.expr]] = {}  # of variables
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            values.setdefault(ast.unparse(node.targets[0]), []).append(node.value)
    places = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Return):
            for end in values.get(ast.unparse(node.value) if node.value else "", [node.value]):
                call = end.value if isinstance(end, ast.Await) else end
                places.add(ast.unparse(call.func) if isinstance(call, ast.Call) else "")
    own, _, place = (places.pop() if len(places) == 1 else "").partition(".")
    found = getattr(module, place.removesuffix(".acall"), None) if own == "self" else None
    return found if isinstance(found, dspy.Module) else None


def _arguments(module: dspy.Module, own: Any, signatures: Sequence[Any]) -> dict[str, object]:  # noqa: ANN401
    """Return the required arguments of ``forward`` and their types, or the input fields of the signature."""
    known: dict[str, object] = {}
    for signature in signatures:
        for field, info in signature.input_fields.items():
            known.setdefault(field, info.annotation)
    forward = getattr(type(module), "forward", None) or type(module).aforward
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = [*inspect.signature(forward).parameters.values()][1:]
    required = [p.name for p in parameters if p.kind in named and p.default is p.empty]
    if required:
        try:
            hints = typing.get_type_hints(forward)
        except NameError:
            hints = {}
        return {name: hints.get(name, known.get(name, Any)) for name in required}
    if own is None:
        raise DeclarationError(
            f"forward of {type(module).__name__} does not name its arguments",
            hint=f"give inputs={{'question': str}}; fields of its predictors: {format_names(known)}",
        )
    return {
        field: info.annotation
        for field, info in own.input_fields.items()
        if info.is_required()  # DSPy fills others
    }


@report_wrong_arguments
@explain_missing("cp.interchange.to_dspy")
def to_dspy(
    program: dspy.Module, configuration: Mapping[str, object] | System | str | Path
) -> dspy.Module:
    """Return a copy of a DSPy program with optimized instructions, demonstrations and sampling settings.

    The copy can be saved and loaded as usual: ``program.save("program.json")``.

    Args:
        program: the program that was imported with `from_dspy`.
        configuration: the configuration, such as ``result.best``, a system bound to it, or its
            file. A tuned model is that of the program or of `dspy.configure` with its name, otherwise
            ``dspy.LM(name)``.

    Raises:
        DeclarationError: a value belongs to no predictor, or cannot be written into a DSPy program,
            or the name of another model holds an address.
    """
    import dspy

    given = load(configuration) if isinstance(configuration, str | Path) else configuration
    values = given.configuration if isinstance(given, System) else Configuration(given)
    copied = program.deepcopy()
    named = predictor_names(copied)
    used = [dspy.settings.lm, *(predictor.lm for _, predictor, _ in named.values())]
    known = {lm.model: lm for lm in used if lm is not None}
    for key, value in values.items():
        component, _, setting = key.partition(".")
        if component not in named:
            raise DeclarationError(
                f"the program has no predictor for {key!r}", hint=suggest_name(component, named)
            )
        if value is not None:
            _write(named[component][1], key, setting, value, known)
    return copied


def _write(predictor: Any, key: str, setting: str, value: object, lms: Mapping[str, Any]) -> None:  # noqa: ANN401
    import dspy

    if setting == "prompt":
        predictor.signature = predictor.signature.with_instructions(value)
    elif setting == "demos":
        names = list(predictor.signature.input_fields)
        predictor.demos = [
            dspy.Example(**flat(demo)).with_inputs(*names) for demo in as_demos(value)
        ]
    elif setting in ("temperature", "max_tokens"):
        predictor.update_config(**{setting: value})
    elif setting == "lm":
        name = entry({"lm": value}, "lm", str)
        if name not in lms and not is_model_name(name):  # it may come from someone else's file
            raise DeclarationError(
                f"{key} is {name!r}, which is not the name of a model: it could send keys to another server",
                hint=f"if you trust it, call dspy.configure(lm=dspy.LM({name!r}, …)) before",
            )
        predictor.lm = lms[name] if name in lms else dspy.LM(name)
    else:
        raise DeclarationError(
            f"{key} cannot be written into a DSPy program",
            hint="serve the adapter, for example with vLLM, and set that model with dspy.configure(lm=…)",
        )


@report_wrong_arguments
@explain_missing("cp.interchange.from_dspy_metric")
def from_dspy_metric(
    metric: Callable[..., object], *, name: str = "", bounds: Bounds | None = None
) -> Custom:
    """Make a metric of one that was written for DSPy.

    The function is called as ``metric(example, pred)``, as by `dspy.Evaluate`: further parameters
    without a default, such as ``trace``, ``pred_name`` and ``pred_trace`` of GEPA, get None.
    ``example`` is a `dspy.Example` with the inputs and the reference values, ``pred`` a
    `dspy.Prediction` with the outputs of the system. It returns a number, or an object with
    ``score`` and ``feedback``.

    Args:
        metric: the function, sync or async, or a module such as `dspy.evaluate.SemanticF1`, whose
            requests DSPy makes and no budget counts.
        name: name in reports; default: the function's name.
        bounds: minimum and maximum score, as for `custom`.

    Raises:
        DeclarationError: it cannot be called.

    Example:
        >>> from compound import Example
        >>> def same(example, pred, trace=None):
        ...     return example.answer == pred.answer
        >>> from_dspy_metric(same).score({"answer": "Lima"}, Example("1", {}, {"answer": "Lima"}))
        Score(value=1.0, feedback='', parts={})
    """
    if not callable(metric):
        raise DeclarationError(f"a metric of DSPy must be a function, but is {metric!r:.80}")
    chosen = name or getattr(metric, "__name__", type(metric).__name__)
    more = _required(metric) - 2

    def score(outputs: Mapping[str, Any], example: Example) -> object:
        import dspy

        given = {"id": example.id, **example.gold, **example.inputs}
        arguments = (dspy.Example(**given).with_inputs(*example.inputs), dspy.Prediction(**outputs))
        found = metric(*arguments, *[None] * more)
        return _awaited(found) if inspect.isawaitable(found) else _score(found)

    score.__dict__["__wrapped__"] = metric  # errors name its place
    return Custom(score, chosen, None if bounds is None else checked_bounds(bounds, chosen))


def _required(metric: Callable[..., object]) -> int:
    """Return the number of arguments that a metric needs, at least two."""
    try:
        parameters = inspect.signature(metric).parameters.values()
    except (TypeError, ValueError):
        return 2
    needed = [
        p
        for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return max(2, len(needed))


async def _awaited(found: Any) -> object:  # noqa: ANN401
    return _score(await found)


def _score(found: Any) -> object:  # noqa: ANN401
    """Return the result of a metric; one with a score and feedback as a `Score`."""
    if isinstance(found, Mapping):
        value, feedback = found.get("score"), found.get("feedback")
    elif not isinstance(found, Score) and hasattr(found, "score"):
        value, feedback = found.score, getattr(found, "feedback", None)
    else:
        return found
    return found if value is None else Score(value, str(feedback or ""))
