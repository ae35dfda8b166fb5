"""The result in words: one sentence that claims no more than the numbers do, and notes on how to read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compound.report.text import interval, number, p_value, plural, signed

SPLITS = {"test": "test", "valid": "validation"}


def headline(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``title``, ``sentence``, ``verdict`` and ``notes``.

    The verdict is ``better``, ``worse``, ``unclear``, ``unchanged`` or ``unmeasured``.
    """
    split = "test" if facts["test"]["gain"] else "valid"
    result = facts[split]
    if result["before"] is None:
        sentence = "Nothing is measured yet: the run ended before the first validation score was in."
        return {"title": "no result yet", "sentence": sentence, "verdict": "unmeasured", "notes": []}
    changed = bool(facts["changes"])
    verdict = _verdict(result["gain"]) if changed else "unchanged"
    sentence = _change(result, split, verdict) if changed else _no_change(facts, result, split)
    before, after = number(result["before"]["mean"]), number(result["after"]["mean"])
    same = f"{before} so far" if facts["missing"] else f"{before}, unchanged"
    scores = f"{before} → {after}" if changed else same
    return {
        "title": f"{SPLITS[split]} score {scores}",
        "sentence": f"Unfinished: {facts['missing']}. So far: {sentence}" if facts["missing"] else sentence,
        "verdict": verdict,
        "notes": _notes(facts, result, split),
    }


def _verdict(gain: Mapping[str, Any] | None) -> str:
    if gain is None or gain["low"] is None:
        return "unclear"
    return "better" if gain["low"] > 0 else "worse" if gain["high"] < 0 else "unclear"


def _change(result: Mapping[str, Any], split: str, verdict: str) -> str:
    gain = result["gain"]
    verb, noun = {"better": ("rose", "gain"), "worse": ("fell", "loss")}.get(verdict, ("went", "change"))
    start = (
        f"On the {SPLITS[split]} split the score {verb} from {interval(result['before'])} "
        f"to {interval(result['after'])}, a {noun} of {interval(gain, signed)}"
    )
    basis = f"{plural(gain['n'], 'example')}, 95 % intervals"
    if split == "test":
        basis += f", one-sided p {_is(gain['p'])}"
    if verdict != "unclear":
        return f"{start} ({basis})."
    reason = "one example says nothing about chance" if gain["low"] is None else "the interval includes zero"
    return f"{start} ({basis}). This may be chance: {reason}."


def _is(p: float) -> str:
    text = p_value(p)
    return text if text.startswith("<") else f"= {text}"


def _no_change(facts: Mapping[str, Any], result: Mapping[str, Any], split: str) -> str:
    tested = sum(d["after"] is not None for d in facts["decisions"])
    found = (
        f"of {plural(tested, 'configuration')} put to the test, none was better beyond chance"
        if tested
        else "the search found nothing worth a test on the validation split"
    )
    claim = f"Nothing was accepted: {found}, and the system stays as it was."
    if facts["missing"]:
        claim = f"{plural(tested, 'configuration')} put to the test, none accepted."
    score = f"Its {SPLITS[split]} score is {interval(result['before'])}"
    return f"{claim} {score} ({plural(result['before']['n'], 'example')}, 95 % interval)."


def _notes(facts: Mapping[str, Any], result: Mapping[str, Any], split: str) -> list[str]:
    """Return what a reader should know before quoting the sentence."""
    notes = []
    accepted = bool(facts["changes"])
    if split == "valid" and accepted:
        notes.append("The validation split also chose this configuration: expect less on new data.")
    if facts["test_skipped"]:
        notes.append(f"The test split was not read: {facts['test_skipped']}.")
    elif not facts["missing"] and not facts["provenance"]["data"]["test"]["n"]:
        notes.append("There is no test split.")
    shown = [result["before"], result["after"]] if accepted else [result["before"]]
    if any(s["low"] is not None and s["low"] == s["high"] and s["n"] > 1 for s in shown):
        notes.append("Where all scores are equal the interval has no width; it promises more than it knows.")
    failed = sum(s["failed"] for s in shown)
    if failed:
        score = number(facts["provenance"]["settings"]["failure_score"])
        notes.append(f"{failed:,} of these runs failed; a failed run scores {score} and stays in the mean.")
    if facts["stopped"]:
        notes.append(f"The search ended: {facts['stopped']}.")
    return notes
