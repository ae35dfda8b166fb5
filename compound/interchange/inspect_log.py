"""Write the recorded runs of examples as logs of Inspect, which its viewer shows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from compound.core.errors import ExportError, explain_missing
from compound.core.security.untrusted import UntrustedFolder
from compound.optimization.runs.directory import inconsistency_errors, read_json, read_records

if TYPE_CHECKING:
    from inspect_ai.log import EvalLog, EvalSample
    from inspect_ai.model import ChatMessage

SCORER = "score"
NAMES = ("initial", "result")


def write_inspect(run: Path, folder: Path) -> str:
    """Write a log for the initial configuration and one for the result, and return a sentence on them.

    Each recorded run of an example is a sample: its inputs, gold, score and feedback, and the
    messages of all calls, each with the address of its call. The test split is written, or the
    validation split if the test split was not read.

    Args:
        run: the run directory.
        folder: the folder of logs, which is made if it does not exist.

    Raises:
        ExportError: the run has no recorded runs, or a log cannot be written.
        MissingExtra: inspect-ai is not installed.
    """
    with explain_missing("logs of Inspect"):
        from inspect_ai.log import write_eval_log

    config = read_json(run, "config.json")
    digests = _digests(run, config)
    found: dict[str, dict[tuple[str, str, int], Mapping[str, Any]]] = {"test": {}, "valid": {}}
    with inconsistency_errors(run):
        for trace in read_records(run, "traces.jsonl"):
            if trace["configuration"] in digests.values():
                key = trace["configuration"], trace["example"], trace["sample"]
                found[trace["split"]][key] = trace
        split = "test" if found["test"] else "valid"
        logs = {}
        for name, digest in digests.items():
            traces = [trace for key, trace in found[split].items() if key[0] == digest]
            if traces:
                logs[name] = _log(config, name, split, traces)
    if not logs:
        raise ExportError(f"{run} has no recorded runs of examples")
    place = UntrustedFolder(folder, error=ExportError).make()
    for name, log in logs.items():
        target = f"{name}.eval"
        if place.kind(target) not in (None, "file"):
            raise ExportError(f"{folder / target} is no file", hint="choose another folder")
        write_eval_log(log, str(place.path / target))
    return f"{', '.join(logs)} of the {split} split: inspect view --log-dir {folder}"


def _digests(run: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the digests of the initial configuration and of the result."""
    from compound.graph.configuration import Configuration
    from compound.optimization.runs.directory import load_checkpoint

    stored = load_checkpoint(run)
    start = Configuration(config["start"])
    best = stored.state.best if stored is not None else None
    found = {NAMES[0]: start.digest, NAMES[1]: start.replace(best or {}).digest}
    return found if found[NAMES[0]] != found[NAMES[1]] else {NAMES[0]: start.digest}


def _log(
    config: Mapping[str, Any], name: str, split: str, traces: Sequence[Mapping[str, Any]]
) -> EvalLog:
    from inspect_ai.log import (
        EvalConfig,
        EvalDataset,
        EvalLog,
        EvalMetric,
        EvalPlan,
        EvalResults,
        EvalScore,
        EvalSpec,
        EvalStats,
    )

    now = datetime.now(UTC).isoformat(timespec="seconds")
    scores = [float(trace["score"] or 0.0) for trace in traces]
    mean = EvalMetric(name="mean", value=sum(scores) / len(scores))
    engines = ", ".join(sorted(set(map(str, config.get("engines", {}).values()))))
    return EvalLog(
        status="success",
        eval=EvalSpec(
            created=now,
            task=f"{config['system']} ({name})",
            dataset=EvalDataset(name=split, samples=len({t["example"] for t in traces})),
            model=engines or "none",
            config=EvalConfig(),
        ),
        plan=EvalPlan(),
        results=EvalResults(
            total_samples=len(traces),
            completed_samples=len(traces),
            scores=[EvalScore(name=SCORER, scorer=SCORER, metrics={"mean": mean})],
        ),
        stats=EvalStats(started_at=now, completed_at=now),
        samples=[_sample(trace) for trace in traces],
    )


def _sample(trace: Mapping[str, Any]) -> EvalSample:
    from inspect_ai.log import EvalSample
    from inspect_ai.model import ModelOutput
    from inspect_ai.scorer import Score

    failure = ": ".join(trace["failure"]) if trace["failure"] else ""
    answer = failure or _text(trace["outputs"])
    return EvalSample(
        id=trace["example"],
        epoch=trace["sample"] + 1,
        input=_text(trace["inputs"]),
        target=_text({k: v for k, v in trace["gold"].items() if trace["inputs"].get(k) != v}),
        messages=[*_messages(trace)],
        output=ModelOutput.from_content(model="", content=answer),
        scores={
            SCORER: Score(value=trace["score"] or 0.0, answer=answer, explanation=trace["feedback"])
        },
        metadata={"parts": trace["parts"], "configuration": trace["configuration"]},
    )


def _messages(trace: Mapping[str, Any]) -> Iterator[ChatMessage]:
    """Yield the messages of all calls in order, and the answers."""
    from inspect_ai.model import ChatMessageAssistant, ChatMessageSystem, ChatMessageUser

    for call in trace["calls"]:
        for exchange in call.get("exchanges", ()):
            own = {"call": call["address"], "model": exchange["model"]}
            for message in exchange["messages"]:
                kind = ChatMessageSystem if message["role"] == "system" else ChatMessageUser
                text = message["content"]
                if message["role"] == "assistant":
                    yield ChatMessageAssistant(content=text, metadata=own)
                else:
                    yield cast("ChatMessage", kind(content=text, metadata=own))
            yield ChatMessageAssistant(content=exchange["completion"], metadata=own)


def _text(values: Mapping[str, object]) -> str:
    """Return a single value as it is, several as JSON."""
    if len(values) == 1 and isinstance(only := next(iter(values.values())), str):
        return only
    return json.dumps(values, ensure_ascii=False)
