"""Haystack pipelines as components."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from compound.core.engine import Usage
from compound.core.errors import CallError, DeclarationError, explain_missing, suggest_name
from compound.core.narrowing import report_wrong_arguments
from compound.core.threads import run_in_own_thread
from compound.graph.types import Port
from compound.interchange.black_box import (
    BlackBox,
    Price,
    Report,
    as_port_type,
    as_text,
    counted,
)

if TYPE_CHECKING:
    from haystack import Pipeline

_REPORTS: ContextVar[list[Report] | None] = ContextVar("haystack_reports", default=None)


class HaystackPipeline(BlackBox):
    """A pipeline as a component. Made by `compound.interchange.from_haystack`."""

    kind = "haystack"

    def __init__(
        self,
        name: str,
        pipeline: Any,  # noqa: ANN401 - a class of a library without types here
        *,
        sockets: Mapping[str, tuple[str, str]],
        results: Mapping[str, tuple[str, str]],
        **options: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(name, **options)
        self.pipeline = pipeline
        self._sockets, self._results = dict(sockets), dict(results)

    async def invoke(  # noqa: D102
        self, arguments: Mapping[str, object], reports: list[Report]
    ) -> Mapping[str, object]:
        data: dict[str, dict[str, object]] = {}
        for name, value in arguments.items():
            component, socket = self._sockets[name]
            data.setdefault(component, {})[socket] = value
        wanted = {component for component, _ in self._results.values()}

        def run() -> Mapping[str, Mapping[str, object]]:
            token = _REPORTS.set(reports)
            try:
                found: Mapping[str, Mapping[str, object]] = self.pipeline.run(
                    data, include_outputs_from=wanted
                )
            finally:
                _REPORTS.reset(token)
            return found

        found = await run_in_own_thread(run, f"haystack {self.name}")
        outputs = {}
        for name, (component, socket) in self._results.items():
            if socket not in found.get(component, {}):
                raise CallError(
                    f"the pipeline returned no {component}.{socket}: the component did not run"
                )
            outputs[name] = _readable(found[component][socket], self.outputs[name].type)
        return outputs


@report_wrong_arguments
@explain_missing("cp.interchange.from_haystack")
def from_haystack(
    pipeline: Pipeline,
    name: str = "",
    *,
    inputs: Mapping[str, str] | None = None,
    outputs: Mapping[str, str] | None = None,
    settings: Mapping[str, object] | None = None,
    version: str = "",
    price: Price | None = None,
    worst: Usage | None = None,
    cache: bool = True,
    timeout: float | None = None,
) -> HaystackPipeline:
    """Make a component of a Haystack pipeline.

    Inputs are the sockets of the pipeline that must be given, outputs those of its last components;
    types are those of the sockets. A list of chat messages becomes the text of the first. The usage
    in the metadata of its generators is charged to the budget, after each run.

    Args:
        pipeline: the pipeline; it is not modified.
        name: the component's name; default: ``pipeline``.
        inputs: sockets by the name of the input, such as ``{"question":
            "prompt_builder.question"}``.
        outputs: sockets by the name of the output, such as ``{"answer": "llm.replies"}``.
        settings: values or spaces of sockets, such as ``{"retriever.top_k": cp.Choice(1, 5, 10)}``;
            the setting is named ``retriever_top_k``.
        version: text that changes when the pipeline's behavior does, for the cache; added to its
            description.
        price: dollars per million prompt and completion tokens; default: litellm's price of the
            model.
        worst: upper bound of the usage of one run, which is reserved before it.
        cache: whether results are cached; never if the pipeline cannot be described
            (``pipeline.dumps()`` fails, for example because it holds a key as text) and ``version``
            is not given.
        timeout: time limit of one run in seconds.

    Raises:
        DeclarationError: a socket does not exist, or names of sockets are not unique.
    """
    from haystack import Pipeline as Base

    own = name or "pipeline"
    if not isinstance(pipeline, Base):
        raise DeclarationError(
            f"from_haystack needs a haystack.Pipeline, but got {type(pipeline).__name__}"
        )
    free, ends = (
        pipeline.inputs(include_components_with_connected_inputs=True),
        pipeline.outputs(True),
    )
    tuned = {f"{path.replace('.', '_')}": (path, value) for path, value in (settings or {}).items()}
    chosen = inputs or _unique(own, _required(pipeline.inputs()), "inputs")
    sockets = {key: _socket(own, path, free) for key, path in chosen.items()}
    sockets |= {key: _socket(own, path, free) for key, (path, _) in tuned.items()}
    last, described = pipeline.outputs(), _describe(pipeline)
    results = outputs or _unique(
        own, [f"{c}.{s}" for c, found in last.items() for s in found if s != "meta"], "outputs"
    )
    found = {key: _socket(own, path, ends) for key, path in results.items()}
    return HaystackPipeline(
        own,
        _with_reports(pipeline),
        sockets=sockets,
        results=found,
        inputs={key: Port(_plain(free[c][s]["type"])) for key, (c, s) in sockets.items()},
        outputs={key: _text_or(ends[c][s]["type"]) for key, (c, s) in found.items()},
        version=f"{version}|{described}",
        settings={key: value for key, (_, value) in tuned.items()},
        price=price,
        worst=worst,
        cache=cache and bool(described or version),
        timeout=timeout,
    )


def _describe(pipeline: Any) -> str:  # noqa: ANN401
    """Return the pipeline in YAML; empty if it cannot be written, for example because it holds a key."""
    try:
        return str(pipeline.dumps())
    except Exception:  # noqa: BLE001 - components raise various errors
        return ""


def _required(inputs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [
        f"{c}.{s}"
        for c, found in inputs.items()
        for s, info in found.items()
        if info["is_mandatory"]
    ]


def _unique(name: str, paths: list[str], what: str) -> dict[str, str]:
    """Name each socket after its last part; sorted, because the order of template variables is random."""
    found: dict[str, str] = {}
    for path in sorted(paths):
        key = path.partition(".")[2]
        if key in found:
            raise DeclarationError(
                f"pipeline {name!r}: {found[key]} and {path} have the same name",
                hint=f"give {what}={{'name': 'component.socket'}}",
            )
        found[key] = path
    return found


def _socket(name: str, path: str, known: Mapping[str, Mapping[str, Any]]) -> tuple[str, str]:
    component, _, socket = path.partition(".")
    if socket not in known.get(component, {}):
        paths = [f"{c}.{s}" for c, sockets in known.items() for s in sockets]
        raise DeclarationError(
            f"pipeline {name!r} has no socket {path!r}", hint=suggest_name(path, paths)
        )
    return component, socket


def _plain(kind: object) -> object:
    # Haystack keeps the text of an annotation that it cannot evaluate
    return Any if isinstance(kind, str) else as_port_type(kind)


def _text_or(kind: object) -> object:
    """Return the port type of an output socket: text for lists of chat messages or of texts."""
    from haystack.dataclasses import ChatMessage

    return str if kind in (list[ChatMessage], ChatMessage, list[str]) else _plain(kind)


def _readable(value: object, kind: object) -> object:
    if kind is str and isinstance(value, list):
        if not value:
            raise CallError("the pipeline returned no reply")
        value = value[0]
    return as_text(value) if kind is str else value


def _with_reports(pipeline: Any) -> Any:  # noqa: ANN401
    """Return a copy of a pipeline whose components record the usage in their outputs.

    Outputs of the pipeline hold only the last run of a component in a loop, so each run is
    recorded.
    """
    copied = copy.copy(pipeline)
    copied.graph = pipeline.graph.copy()
    for name in copied.graph.nodes:
        node = copied.graph.nodes[name]
        instance = node["instance"] = copy.copy(node["instance"])
        instance.run = _recording(instance.run)
    return copied


def _recording(run: Callable[..., Mapping[str, object]]) -> Callable[..., Mapping[str, object]]:
    @functools.wraps(run)
    def recorded(*arguments: object, **named: object) -> Mapping[str, object]:
        found = run(*arguments, **named)
        reports = _REPORTS.get()
        if reports is not None:
            reports += _reports(found)
        return found

    return recorded


def _reports(outputs: object) -> list[Report]:
    """Return the usage in the metadata of a generator's outputs: of chat messages, or a list ``meta``."""
    found = []
    values = outputs if isinstance(outputs, Mapping) else {}
    replies, meta = values.get("replies"), values.get("meta")
    notes = [getattr(reply, "meta", None) for reply in replies] if isinstance(replies, list) else []
    notes += meta if isinstance(meta, list) else []
    for note in notes:
        usage = note.get("usage") if isinstance(note, Mapping) else None
        if isinstance(note, Mapping) and isinstance(usage, Mapping) and usage:
            tokens = counted(usage.get("prompt_tokens")), counted(usage.get("completion_tokens"))
            found.append(Report(str(note.get("model", "")), 1, *tokens))
    return found
