"""Describe the result of a run in one sentence that the statistics support, with notes on how to read it."""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter

from compound.evaluation.evaluate import Summary
from compound.formatting import plural
from compound.optimization.proposals import describe_requests
from compound.report.facts.documents import GainFacts, Headline, Measured, ProposalFacts
from compound.report.facts.text import interval, number, p_value, signed

GUIDE = "docs/guides/nothing_found.md, 'My run found nothing, what now?'"
ONE_SIDED = 0.05  # below this one-sided p, explain why the two-sided interval can still include zero
SPLITS = {"test": "test", "valid": "validation"}


def headline(facts: Measured) -> Headline:
    """Return ``title``, ``sentence``, ``verdict`` and ``notes``.

    The verdict is ``better``, ``worse``, ``unclear``, ``unchanged`` or ``unmeasured``.
    """
    split = "test" if facts["test"]["gain"] else "valid"
    result = facts["test"] if split == "test" else facts["valid"]
    first, last = result["before"], result["after"]
    if first is None:
        sentence = "There is no result yet: the run stopped before the first validation score."
        return {"title": "no result yet", "sentence": sentence, "verdict": "unmeasured", "notes": []}
    if last is None:
        raise ValueError("the score after the search is missing")
    changed = bool(facts["changes"])
    verdict = _verdict(result["gain"]) if changed else "unchanged"
    scores = HeadlineScores(first, last, result["gain"], split)
    sentence = describe_change(scores, verdict) if changed else _no_change(facts, scores)
    before, after = number(first["mean"]), number(last["mean"])
    same = f"{before} so far" if facts["missing"] else f"{before}, unchanged"
    numbers = f"{before} → {after}" if changed else same
    return {
        "title": f"{SPLITS[split]} score {numbers}",
        "sentence": f"Unfinished: {facts['missing']}. So far: {sentence}" if facts["missing"] else sentence,
        "verdict": verdict,
        "notes": _notes(facts, scores),
    }


@dataclass(frozen=True)
class HeadlineScores:
    """Scores that the sentence describes."""

    before: Summary
    after: Summary
    gain: GainFacts | None
    split: str


def _verdict(gain: GainFacts | None) -> str:
    if gain is None or gain["low"] is None or gain["high"] is None:
        return "unclear"
    return "better" if gain["low"] > 0 else "worse" if gain["high"] < 0 else "unclear"


def describe_change(scores: HeadlineScores, verdict: str) -> str:
    """Return the sentence on a change of the score, with the reason if the change may be due to chance."""
    gain, split = scores.gain, scores.split
    if gain is None:
        raise ValueError("the gain is missing")
    verb, noun = {"better": ("rose", "gain"), "worse": ("fell", "loss")}.get(verdict, ("went", "change"))
    start = (
        f"On the {SPLITS[split]} split the score {verb} from {interval(scores.before)} "
        f"to {interval(scores.after)}, a {noun} of {interval(gain, signed)}"
    )
    basis = f"{plural(gain['n'], 'example')}, 95 % intervals"
    if split == "test":
        basis += f", one-sided p {_is(gain['p'])}"
    if verdict != "unclear":
        return f"{start} ({basis})."
    if gain["low"] is not None:
        one_sided = split == "test" and gain["p"] < ONE_SIDED
        which = ", which is two-sided," if one_sided else ""
        reason = f"the interval{which} includes zero"
    elif gain["n"] == 1:
        reason = "one example gives no estimate of the variation"
    else:
        reason = "identical differences give no interval unless the metric declares its range"
    return f"{start} ({basis}). The change may be due to chance: {reason}."


def _is(p: float) -> str:
    text = p_value(p)
    return text if text.startswith("<") else f"= {text}"


def _no_change(facts: Measured, scores: HeadlineScores) -> str:
    tested = sum(d["after"] is not None for d in facts["decisions"])
    claim = f"No change was accepted: {_why_nothing(facts)}. The system is unchanged."
    if facts["missing"]:
        claim = f"{plural(tested, 'candidate')} tested, none accepted."
    score = f"Its {SPLITS[scores.split]} score is {interval(scores.before)}"
    return f"{claim} {score} ({plural(scores.before['n'], 'example')}, 95 % interval)."


def _why_nothing(facts: Measured) -> str:
    """Return why no candidate was accepted: none was tested, none scored higher, or none significantly."""
    compared = [
        (d, d["p"], after["mean"] > before["mean"])
        for d in facts["decisions"]
        if (after := d["after"]) is not None and (before := d["before"]) is not None
    ]
    if compared:
        higher = [(1.0 if p is None else p, d["level"]) for d, p, is_higher in compared if is_higher]
        start = f"of {plural(len(compared), 'candidate')} tested on the validation split"
        if not higher:
            return f"{start}, none scored higher"
        smallest, level = min(higher, key=itemgetter(0))
        return (
            f"{start}, {len(higher)} scored higher, but not significantly (smallest p {_is(smallest)}, "
            f"above the level {p_value(level)})"
        )
    if facts["decisions"]:
        return "a change was proposed, but the budget ended before it could be tested"
    worked = [job for job in facts["jobs"] if job["runs"]]
    tried = sum(job["tried"] or 0 for job in worked)
    if not worked:
        return "no optimizer job could run"
    if not tried:
        return "no candidate was proposed"
    return (
        f"{plural(tried, 'candidate')} tried on train examples, none better than the incumbent, so none was "
        "tested on the validation split"
    )


def _of_proposals(proposals: ProposalFacts) -> list[str]:
    """Return notes on models that failed or gave no usable proposal."""
    notes = []
    for lm, tally in proposals["models"].items():
        if not tally["proposed"]:
            notes.append(f"Proposals failed: {describe_requests({lm: tally})}.")
        elif tally["failed"]:
            notes.append(f"Some proposals failed: {describe_requests({lm: tally})}.")
        if lm in proposals["stopped"]:
            notes.append(f"Requests to {lm!r} were stopped: {proposals['stopped'][lm]}.")
    return notes


def _unsupported(facts: Measured) -> str:
    """Return a note on a change that only scored higher, if there is one."""
    promising = [d for d in facts["decisions"] if d["verdict"] == "promising"]
    kept = next((d for d in reversed(facts["decisions"]) if d["accepted"]), None)
    shown = kept if kept is not None and kept["verdict"] == "promising" else None
    if shown is None and kept is None and promising:
        shown = max(promising, key=lambda d: d["probability"] or 0.0)
    if shown is None or shown["p"] is None:
        return ""
    subject = "The change is" if shown is kept else "The most promising change was not kept, but is"
    claim, gain = "is better", "such a gain"
    if margin := shown["margin"]:
        claim, gain = f"lowers the score by no more than {number(margin)}", "this"
    return (
        f"{subject} not supported by the test on validation examples (p {_is(shown['p'])}, above the level "
        f"{p_value(shown['level'])}): it {claim} with a probability of {number(shown['probability'])}, and "
        f"about {shown['examples']:,} examples would support {gain}."
    )


def _notes(facts: Measured, scores: HeadlineScores) -> list[str]:
    """Return the caveats of the sentence."""
    notes = []
    accepted = bool(facts["changes"])
    if kept := _unsupported(facts):
        notes.append(kept)
    if scores.split == "valid" and accepted:
        notes.append(
            "The configuration was selected on the validation split: expect a lower score on new data."
        )
    if facts["test_skipped"]:
        notes.append(f"The test split was not read: {facts['test_skipped']}.")
    elif not facts["missing"] and not facts["provenance"]["data"]["test"]["n"]:
        notes.append("There is no test split.")
    shown = [scores.before, scores.after] if accepted else [scores.before]
    if facts["bounds_violation"]:
        notes.append(
            f"Warning: {facts['bounds_violation']}: decisions after this score used the test for scores of "
            "unknown range. Correct the metric, or the bounds it declares, and repeat the run."
        )
    elif facts["bounds"] is None:
        notes.append(
            "The metric does not declare its range: the 95 % intervals assume scores from 0 to 1, or, if a "
            "score lies outside, normally distributed means, and the acceptance test is not valid for every "
            "distribution of gains. If the scores are bounded, declare the bounds of the metric."
        )
    failed = sum(s["failed"] for s in shown)
    if failed:
        score = number(facts["provenance"]["settings"]["failure_score"])
        notes.append(f"{failed:,} of these runs failed; a failed run scores {score} and counts in the mean.")
    notes += facts["cost_notes"]
    notes += _of_proposals(facts["proposals"]) if facts["proposals"] else []
    notes += [f"Warning: {text}." for text in facts["outlook"].get("duplicates", ())]
    if not accepted:
        notes += [f"{line[0].upper()}{line[1:]}." for line in facts["outlook"].get("told", ())]
    if recovered := sum(retry["recovered"] for retry in facts["retries"]):
        notes.append(f"{plural(recovered, 'test run')} failed at first and succeeded when retried.")
    if facts["stopped"]:
        notes.append(f"The search ended: {facts['stopped']}.")
    if not accepted and not facts["missing"]:
        notes.append(f"Next steps: see {GUIDE}.")
    return notes
