"""Write the recorded runs of examples as logs of Inspect, which its viewer shows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from compound.core.errors import ExportError, explain_missing
from compound.core.security.untrusted import UntrustedFolder
from compound.optimization.runs.directory import inconsistency_errors, read_records
from compound.report.record import SIDES, Record, RecordedTrace, Run, own_gold, recorded_trace

if TYPE_CHECKING:
    from inspect_ai.log import EvalLog, EvalSample
    from inspect_ai.model import ChatMessage

SCORER = "score"


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

    record = Record.read(run)
    digests = {"initial": record.start.digest, "result": record.best.digest}
    if digests["initial"] == digests["result"]:
        del digests["result"]
    found: dict[str, dict[Run, RecordedTrace]] = {split: {} for split in SIDES}
    with inconsistency_errors(run):
        for line in read_records(run, "traces.jsonl"):
            trace = recorded_trace(line)
            key = trace["configuration"], trace["example"], trace["sample"]
            found[trace["split"]][key] = trace
    split = next((split for split in SIDES if found[split]), "")
    place, written = UntrustedFolder(folder, error=ExportError).make(), []
    for name, digest in digests.items():
        traces = [trace for key, trace in found.get(split, {}).items() if key[0] == digest]
        if not traces:
            continue
        target = f"{name}.eval"
        if place.kind(target) not in (None, "file"):
            raise ExportError(f"{folder / target} is no file", hint="choose another folder")
        write_eval_log(_log(record.config, name, split, traces), str(place.path / target))
        written.append(name)
    if not written:
        raise ExportError(f"{run} has no recorded runs of examples")
    return f"{', '.join(written)} of the {split} split: inspect view --log-dir {folder}"


def _log(
    config: Mapping[str, Any], name: str, split: str, traces: Sequence[RecordedTrace]
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


def _sample(trace: RecordedTrace) -> EvalSample:
    from inspect_ai.log import EvalSample
    from inspect_ai.model import ModelOutput
    from inspect_ai.scorer import Score

    failure = ": ".join(trace["failure"]) if trace["failure"] else ""
    answer = failure or _text(trace["outputs"])
    return EvalSample(
        id=trace["example"],
        epoch=trace["sample"] + 1,
        input=_text(trace["inputs"]),
        target=_text(own_gold(trace)),
        messages=[*_messages(trace)],
        output=ModelOutput.from_content(model="", content=answer),
        scores={
            SCORER: Score(value=trace["score"] or 0.0, answer=answer, explanation=trace["feedback"])
        },
        metadata={"parts": trace["parts"], "configuration": trace["configuration"]},
    )


def _messages(trace: RecordedTrace) -> Iterator[ChatMessage]:
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
