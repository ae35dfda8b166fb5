"""Describe the result of a run in one sentence that the statistics support, with notes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from compound.core.formatting import plural
from compound.optimization.proposals import describe_requests
from compound.report.text import interval, number, p_value, signed

GUIDE = "docs/guides/nothing_found.md, 'My run found nothing, what now?'"
ONE_SIDED = 0.05  # below this p, explain why the two-sided interval can still include zero
SPLITS = {"test": "test", "valid": "validation"}


def headline(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``title``, ``sentence``, ``verdict`` and ``notes``.

    The verdict is ``better``, ``worse``, ``unclear``, ``unchanged`` or ``unmeasured``.
    """
    split = "test" if facts["test"]["gain"] else "valid"
    result, missing = facts[split], facts["missing"]
    if result["before"] is None:
        sentence = "There is no result yet: the run stopped before the first validation score."
        return {
            "title": "no result yet",
            "sentence": sentence,
            "verdict": "unmeasured",
            "notes": [],
        }
    if result["after"] is None:
        raise ValueError("the score after the search is missing")
    before, after = number(result["before"]["mean"]), number(result["after"]["mean"])
    if facts["changes"]:
        verdict, numbers = _verdict(result["gain"]), f"{before} → {after}"
        sentence = describe_change(result, split, verdict)
    else:
        verdict = "unchanged"
        numbers = f"{before} so far" if missing else f"{before}, unchanged"
        sentence = _no_change(facts, split)
    return {
        "title": f"{SPLITS[split]} score {numbers}",
        "sentence": f"Unfinished: {missing}. So far: {sentence}" if missing else sentence,
        "verdict": verdict,
        "notes": [*_notes(facts, split)],
    }


def _verdict(gain: Mapping[str, Any] | None) -> str:
    if gain is None or gain["low"] is None or gain["high"] is None:
        return "unclear"
    return "better" if gain["low"] > 0 else "worse" if gain["high"] < 0 else "unclear"


def describe_change(result: Mapping[str, Any], split: str, verdict: str) -> str:
    """Return the sentence on a change of the score, with the reason if it may be due to chance."""
    gain, is_test = result["gain"], split == "test"
    verb, noun = {"better": ("rose", "gain"), "worse": ("fell", "loss")}.get(
        verdict, ("went", "change")
    )
    start = (
        f"On the {SPLITS[split]} split the score {verb} from {interval(result['before'])} "
        f"to {interval(result['after'])}, a {noun} of {interval(gain, signed)}"
    )
    p = f", one-sided p {_is(gain['p'])}" if is_test else ""
    claim = f"{start} ({plural(gain['n'], 'example')}, 95 % intervals{p})."
    if verdict != "unclear":
        return claim
    if gain["low"] is not None:
        which = ", which is two-sided," if is_test and gain["p"] < ONE_SIDED else ""
        reason = f"the interval{which} includes zero"
    elif gain["n"] == 1:
        reason = "one example gives no estimate of the variation"
    else:
        reason = "identical differences give no interval unless the metric declares its range"
    return f"{claim} The change may be due to chance: {reason}."


def _is(p: float) -> str:
    text = p_value(p)
    return text if text.startswith("<") else f"= {text}"


def _no_change(facts: Mapping[str, Any], split: str) -> str:
    before, tested = facts[split]["before"], [d for d in facts["decisions"] if d["after"]]
    claim = f"No change was accepted: {_why_nothing(facts, tested)}. The system is unchanged."
    if facts["missing"]:
        claim = f"{plural(len(tested), 'candidate')} tested, none accepted."
    score = f"Its {SPLITS[split]} score is {interval(before)}"
    return f"{claim} {score} ({plural(before['n'], 'example')}, 95 % interval)."


def _why_nothing(facts: Mapping[str, Any], tested: Sequence[Mapping[str, Any]]) -> str:
    """Return why no candidate was accepted."""
    if tested:
        higher = [
            (1.0 if d["p"] is None else d["p"], d["level"])
            for d in tested
            if d["after"]["mean"] > d["before"]["mean"]
        ]
        start = f"of {plural(len(tested), 'candidate')} tested on the validation split"
        if not higher:
            return f"{start}, none scored higher"
        smallest, level = min(higher, key=itemgetter(0))
        return (
            f"{start}, {len(higher)} scored higher, but not significantly (smallest p "
            f"{_is(smallest)}, above the level {p_value(level)})"
        )
    if facts["decisions"]:
        return "a change was proposed, but the budget ended before it could be tested"
    worked = [job for job in facts["jobs"] if job["runs"]]
    tried = sum(job["tried"] or 0 for job in worked)
    if not tried:
        return "no candidate was proposed" if worked else "no optimizer job could run"
    return (
        f"{plural(tried, 'candidate')} tried on train examples, none better than the incumbent, so "
        "none was tested on the validation split"
    )


def _notes(facts: Mapping[str, Any], split: str) -> Iterator[str]:
    """Yield the caveats of the sentence."""
    accepted, result = bool(facts["changes"]), facts[split]
    yield from _unsupported(facts["decisions"])
    if split == "valid" and accepted:
        yield (
            "The configuration was selected on the validation split: expect a lower score on new "
            "data."
        )
    if facts["test_skipped"]:
        yield f"The test split was not read: {facts['test_skipped']}."
    elif not facts["missing"] and not facts["provenance"]["data"]["test"]["n"]:
        yield "There is no test split."
    if facts["bounds_violation"]:
        yield (
            f"Warning: {facts['bounds_violation']}: decisions after this score used the test for "
            "scores of unknown range. Correct the metric, or the bounds it declares, and repeat "
            "the run."
        )
    elif facts["bounds"] is None:
        yield (
            "The metric does not declare its range: the 95 % intervals assume scores from 0 to 1, "
            "or, if a score lies outside, normally distributed means, and the acceptance test is "
            "not valid for every distribution of gains. If the scores are bounded, declare the "
            "bounds of the metric."
        )
    failed = result["before"]["failed"] + (result["after"]["failed"] if accepted else 0)
    if failed:
        score = number(facts["provenance"]["settings"]["failure_score"])
        claim = f"a failed run scores {score} and counts in the mean"
        yield f"{failed:,} of these runs failed; {claim}."
    yield from facts["cost_notes"]
    yield from _of_proposals(facts["proposals"] or {"models": {}})
    yield from (f"Warning: {text}." for text in facts["outlook"].get("duplicates", ()))
    if not accepted:
        yield from (f"{line[0].upper()}{line[1:]}." for line in facts["outlook"].get("told", ()))
    if recovered := sum(retry["recovered"] for retry in facts["retries"]):
        yield f"{plural(recovered, 'test run')} failed at first and succeeded when retried."
    if facts["stopped"]:
        yield f"The search ended: {facts['stopped']}."
    if not accepted and not facts["missing"]:
        yield f"Next steps: see {GUIDE}."


def _unsupported(decisions: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a note on a change that only scored higher, if there is one."""
    kept = next((d for d in reversed(decisions) if d["accepted"]), None)
    promising = [d for d in decisions if d["verdict"] == "promising"]
    if kept is not None:
        found = kept if kept["verdict"] == "promising" else None
    else:
        found = max(promising, key=lambda d: float(d["probability"] or 0), default=None)
    if found is None or found["p"] is None:
        return
    subject = "The change is" if found is kept else "The most promising change was not kept, but is"
    claim, gain = "is better", "such a gain"
    if margin := found["margin"]:
        claim, gain = f"lowers the score by no more than {number(margin)}", "this"
    yield (
        f"{subject} not supported by the test on validation examples (p {_is(found['p'])}, above "
        f"the level {p_value(found['level'])}): it {claim} with a probability of "
        f"{number(found['probability'])}, and about {found['examples']:,} examples would support "
        f"{gain}."
    )


def _of_proposals(proposals: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes on models that failed or gave no usable proposal."""
    for lm, tally in proposals["models"].items():
        if not tally["proposed"]:
            yield f"Proposals failed: {describe_requests({lm: tally})}."
        elif tally["failed"]:
            yield f"Some proposals failed: {describe_requests({lm: tally})}."
        if lm in proposals["stopped"]:
            yield f"Requests to {lm!r} were stopped: {proposals['stopped'][lm]}."
