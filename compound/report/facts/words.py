"""The result in words: one sentence that claims no more than the numbers do, and notes on how to read it."""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter

from compound.evaluation.evaluate import Summary
from compound.formatting import plural
from compound.optimization.proposals import described
from compound.report.facts.documents import GainFacts, Headline, Measured, ProposalFacts
from compound.report.facts.text import interval, number, p_value, signed

GUIDE = "docs/guides/nothing_found.md, 'My run found nothing, what now?'"
ONE_SIDED = 0.05  # a p-value below it may stand beside a two-sided interval that includes zero
SPLITS = {"test": "test", "valid": "validation"}


def headline(facts: Measured) -> Headline:
    """Return ``title``, ``sentence``, ``verdict`` and ``notes``.

    The verdict is ``better``, ``worse``, ``unclear``, ``unchanged`` or ``unmeasured``.
    """
    split = "test" if facts["test"]["gain"] else "valid"
    result = facts["test"] if split == "test" else facts["valid"]
    first, last = result["before"], result["after"]
    if first is None:
        sentence = "Nothing is measured yet: the run ended before the first validation score was in."
        return {"title": "no result yet", "sentence": sentence, "verdict": "unmeasured", "notes": []}
    if last is None:
        raise ValueError("the score after the search is missing")
    changed = bool(facts["changes"])
    verdict = _verdict(result["gain"]) if changed else "unchanged"
    told = Told(first, last, result["gain"], split)
    sentence = change_of(told, verdict) if changed else _no_change(facts, told)
    before, after = number(first["mean"]), number(last["mean"])
    same = f"{before} so far" if facts["missing"] else f"{before}, unchanged"
    scores = f"{before} → {after}" if changed else same
    return {
        "title": f"{SPLITS[split]} score {scores}",
        "sentence": f"Unfinished: {facts['missing']}. So far: {sentence}" if facts["missing"] else sentence,
        "verdict": verdict,
        "notes": _notes(facts, told),
    }


@dataclass(frozen=True)
class Told:
    """The scores that the sentence is about."""

    before: Summary
    after: Summary
    gain: GainFacts | None
    split: str


def _verdict(gain: GainFacts | None) -> str:
    if gain is None or gain["low"] is None or gain["high"] is None:
        return "unclear"
    return "better" if gain["low"] > 0 else "worse" if gain["high"] < 0 else "unclear"


def change_of(told: Told, verdict: str) -> str:
    """Return what changed, and why it may be chance."""
    gain, split = told.gain, told.split
    if gain is None:
        raise ValueError("the gain is missing")
    verb, noun = {"better": ("rose", "gain"), "worse": ("fell", "loss")}.get(verdict, ("went", "change"))
    start = (
        f"On the {SPLITS[split]} split the score {verb} from {interval(told.before)} "
        f"to {interval(told.after)}, a {noun} of {interval(gain, signed)}"
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
        reason = "one example says nothing about chance"
    else:
        reason = "equal differences have no interval unless the metric states its range"
    return f"{start} ({basis}). This may be chance: {reason}."


def _is(p: float) -> str:
    text = p_value(p)
    return text if text.startswith("<") else f"= {text}"


def _no_change(facts: Measured, told: Told) -> str:
    tested = sum(d["after"] is not None for d in facts["decisions"])
    claim = f"Nothing was accepted: {_why_nothing(facts)}, and the system stays as it was."
    if facts["missing"]:
        claim = f"{plural(tested, 'configuration')} put to the test, none accepted."
    score = f"Its {SPLITS[told.split]} score is {interval(told.before)}"
    return f"{claim} {score} ({plural(told.before['n'], 'example')}, 95 % interval)."


def _why_nothing(facts: Measured) -> str:
    """Return why no configuration was accepted: none was tried, none was better, or none by enough."""
    compared = [
        (d, d["p"], after["mean"] > before["mean"])
        for d in facts["decisions"]
        if (after := d["after"]) is not None and (before := d["before"]) is not None
    ]
    if compared:
        higher = [(1.0 if p is None else p, d["level"]) for d, p, is_higher in compared if is_higher]
        start = f"of {plural(len(compared), 'configuration')} put to the test on the validation split"
        if not higher:
            return f"{start}, none scored higher"
        smallest, level = min(higher, key=itemgetter(0))
        return (
            f"{start}, {len(higher)} scored higher, but not beyond chance (smallest p {_is(smallest)}, "
            f"where at most {p_value(level)} is accepted)"
        )
    if facts["decisions"]:
        return "a change was proposed, but the budget ended before it could be put to the test"
    worked = [job for job in facts["jobs"] if job["runs"]]
    tried = sum(job["tried"] or 0 for job in worked)
    if not worked:
        return "nothing could be tried"
    if not tried:
        return "no candidate was made to compare with the start"
    return (
        f"{plural(tried, 'candidate')} tried on train examples, none of them better there, so that none was "
        "put to the test on the validation split"
    )


def _of_proposals(proposals: ProposalFacts) -> list[str]:
    """Return notes on models that gave no usable proposal, or failed."""
    notes = []
    for lm, tally in proposals["models"].items():
        if not tally["proposed"]:
            notes.append(f"Proposals failed: {described({lm: tally})}.")
        elif tally["failed"]:
            notes.append(f"Some proposals failed: {described({lm: tally})}.")
        if lm in proposals["stopped"]:
            notes.append(f"{lm!r} was not asked any more: {proposals['stopped'][lm]}.")
    return notes


def _notes(facts: Measured, told: Told) -> list[str]:
    """Return what a reader should know before quoting the sentence."""
    notes = []
    accepted = bool(facts["changes"])
    if told.split == "valid" and accepted:
        notes.append("The validation split also chose this configuration: expect less on new data.")
    if facts["test_skipped"]:
        notes.append(f"The test split was not read: {facts['test_skipped']}.")
    elif not facts["missing"] and not facts["provenance"]["data"]["test"]["n"]:
        notes.append("There is no test split.")
    shown = [told.before, told.after] if accepted else [told.before]
    if facts["bounds"] is None:
        notes.append(
            "The metric does not state its range: the 95 % intervals assume means that are close to normal, "
            "and may leave the range. State it, for example bounds=(0, 1), where there is one."
        )
    failed = sum(s["failed"] for s in shown)
    if failed:
        score = number(facts["provenance"]["settings"]["failure_score"])
        notes.append(f"{failed:,} of these runs failed; a failed run scores {score} and stays in the mean.")
    notes += _of_proposals(facts["proposals"]) if facts["proposals"] else []
    notes += [f"Warning: {text}." for text in facts["outlook"].get("duplicates", ())]
    if not accepted:
        notes += [f"{line[0].upper()}{line[1:]}." for line in facts["outlook"].get("told", ())]
    if recovered := sum(each["recovered"] for each in facts["retries"]):
        notes.append(f"{plural(recovered, 'test run')} had failed at first and succeeded when run again.")
    if facts["stopped"]:
        notes.append(f"The search ended: {facts['stopped']}.")
    if not accepted and not facts["missing"]:
        notes.append(f"What to check next: {GUIDE}.")
    return notes
