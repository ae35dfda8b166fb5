"""The pages of the studio: for each, the name of its template and the values it shows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from compound.api.studio.charts import Chart, Point
from compound.api.studio.labels import progress
from compound.api.studio.runs import Run, Runs, compared_sides, seconds_left, spending
from compound.api.studio.traces import FILTERS, SORTS, Query
from compound.core.errors import CompoundError
from compound.evaluation.evaluate import Evaluation, gain_interval
from compound.optimization.runs.candidate_record import (
    FEWEST,
    CandidateRecord,
    cost_name,
    front,
    importance,
)
from compound.optimization.runs.recorder import MEMORY
from compound.report.facts import reward_facts
from compound.report.record import RecordedTrace, own_gold
from compound.report.rendering import Figure, draw_figure
from compound.report.rewards import reward_figures
from compound.report.text import count, number, signed
from compound.report.training import (
    ShownGroup,
    panels_with_data,
    shown_groups,
    shown_steps,
    trained_components,
    training_facts,
    training_svg,
)
from compound.rewards.inspection import FOLDER as REWARDS
from compound.rewards.inspection import Inspection, Judgement, inspect_search_reward
from compound.rewards.model import NONE as NO_BACKBONE

PAGE = 50  # examples per page
CALLS = 50  # calls of an example per page, of each side
MOST = 200  # rows of the comparison of runs
MOST_GROUPS = 16  # of a step of training, and answers of a group
LEVELS = 4  # of the colour of a token
WORST = 5  # pairs that a reward orders most wrongly
COSTS = {
    "tokens": "tokens per run",
    "usd": "dollars per run",
    "seconds": "seconds per run, with waits",
}

Options = Mapping[str, str]
View = tuple[str, dict[str, Any]]


def list_runs(runs: Runs, options: Options) -> View:
    """Return the list of runs, of which some may be ticked to be compared."""
    rows, search = runs.summaries(), options.get("q", "")
    shown = [row for row in rows if search.lower() in json.dumps(row).lower()]
    return "runs.html", {"rows": shown, "total": len(rows), "search": search, "folder": runs.folder}


def compare(runs: Runs, names: Sequence[str]) -> View:
    """Return the comparison of runs: scores, changes, and the examples whose scores differ.

    Raises:
        CompoundError: fewer than two runs are named.
    """
    chosen = [runs.get(name) for name in dict.fromkeys(names)]
    if len(chosen) < 2:
        raise CompoundError("tick two or more runs to compare them")
    rows = [run.summary() for run in chosen]
    sides = [compared_sides(run.record) for run in chosen]
    results = [after or before for _, before, after in sides]
    data = {(row.get("split"), row.get("data")) for row in rows}
    same = len(data) == 1 and None not in next(iter(data))
    known = [each for each in results if each is not None]
    compared = known if same and len(known) == len(results) else []
    return "compare.html", {
        "rows": rows,
        "same": same,
        "differences": [gain_interval(compared[0], each).to_json() for each in compared[1:]],
        "examples": _scores_by_example(compared) if compared else [],
        "changes": [run.facts["changes"] for run in chosen],
        "costs": [_costs(run) for run in chosen],
        "headings": ["example", *(f"#{run.name}" for run in chosen)],
        "most": MOST,
    }


def _scores_by_example(results: Sequence[Evaluation]) -> list[tuple[str, list[float]]]:
    """Return the examples that all were run on and whose scores differ, the most different first."""
    scores = [each.by_example() for each in results]
    common = [name for name in scores[0] if all(name in side for side in scores)]
    rows = [(name, [side[name] for side in scores]) for name in common]
    differing = [row for row in rows if len(set(row[1])) > 1]
    return sorted(differing, key=lambda row: min(row[1]) - max(row[1]))[:MOST]


def overview(run: Run, options: Options) -> View:
    """Return the result of a run, its course, and what it has spent."""
    facts, state = run.facts, run.state
    return "overview.html", {
        "facts": facts,
        "state": state,
        "stopping": run.is_stopping,
        "spending": spending(run),
        "left": seconds_left(run) if state == "running" else None,
        "latest": _latest(run),
        "course": _course(facts),
        "found": _found(run),
        "costs": _costs(run),
        "problem": run.known_candidates[1],
    }


def _latest(run: Run) -> str:
    """Return what the run does, in its own words."""
    phases = {
        "start": "searching",
        "decision": "a decision was made",
        "test_before": "testing the result",
        "test_after": "ending",
        "done": "",
    }
    for event in reversed(run.record.events):
        if event["event"] == "progress" and event.get("note"):
            return str(event["note"])
        if event["event"] in phases:
            return phases[event["event"]]
    return "evaluating the initial configuration"


def _course(facts: Mapping[str, Any]) -> Chart | None:
    """Return the chart of the best validation score by system runs."""
    if not facts["start"]:
        return None
    start = facts["start"][0]
    end = max(facts["spent"].get("system_runs", 0.0), start["at"])
    points = [Point(start["at"], start["mean"], start["low"], start["high"], "initial", "initial")]
    line = [(start["at"], start["mean"])]
    for decision in facts["decisions"]:
        if decision["after"] is None or decision["before"] is None:
            continue
        after, kept = decision["after"], decision["accepted"]
        name = f"decision {decision['decision']}: {number(after['mean'])}"
        series = "accepted" if kept else "rejected"
        points.append(
            Point(decision["at"], after["mean"], after["low"], after["high"], series, name)
        )
        if kept:
            line.append((decision["at"], after["mean"]))
    line.append((end, line[-1][1]))
    return Chart(
        f"Validation score by system runs: {number(line[0][1])} at first, {number(line[-1][1])} "
        f"after {count(end)} runs",
        "system runs of the search",
        "validation score",
        points,
        {"best so far": line},
        steps=True,
    )


def _found(run: Run) -> Chart | None:
    """Return the chart of the candidates' gains in the order in which they were found."""
    points = [
        _point(run, candidate, place, float(place))
        for place, candidate in enumerate(run.known_candidates[0], 1)
        if candidate.gain is not None
    ]
    if len(points) < 2:
        return None
    best, line = float("-inf"), []
    for point in points:
        best = max(best, point.y)
        line.append((point.x, best))
    return Chart(
        f"Mean gain of {len(points)} candidates on the examples they were run on",
        "candidate",
        "gain over the initial configuration",
        points,
        {"highest so far": line},
        steps=True,
    )


def _point(run: Run, candidate: CandidateRecord, place: int, x: float) -> Point:
    source = "initial" if candidate.fate == "start" else candidate.source or "other"
    title = (
        f"candidate {place} ({source}): gain {signed(candidate.gain)} on "
        f"{count(candidate.evaluations)} runs, {candidate.fate}"
    )
    link = f"/run/{run.name}?view=candidate&number={place}"
    gain = candidate.gain or 0.0
    return Point(x, gain, series=source, title=title, link=link, marked=candidate.chosen)


def _costs(run: Run) -> list[tuple[str, float, float]]:
    """Return what a run of the system takes with the initial configuration and with the result."""
    known = run.known_candidates[0]
    chosen = next((candidate for candidate in known if candidate.chosen), None)
    if chosen is None:
        return []
    names = {
        "prompt tokens": "prompt_tokens",
        "completion tokens": "completion_tokens",
        "dollars": "usd",
        "seconds, with waits for models": "seconds",
    }
    rows = [
        (label, getattr(known[0], field), getattr(chosen, field)) for label, field in names.items()
    ]
    return [row for row in rows if row[1] is not None and row[2] is not None]


def candidates(run: Run, options: Options) -> View:
    """Return all candidates, the front of score against cost, and the importance of parameters."""
    known = run.candidates
    cost = options.get("cost", "")
    cost = cost if cost in COSTS else cost_name(known)
    best = front(known, cost)
    rows = [*enumerate(known, 1)]
    order = options.get("sort", "found")
    if order == "gain":
        rows.sort(key=lambda row: -(row[1].gain if row[1].gain is not None else -9e9))
    elif order == "cost":
        rows.sort(key=lambda row: getattr(row[1], cost) or 0.0)
    return "candidates.html", {
        "rows": rows,
        "cost": cost,
        "costs": COSTS,
        "sort": order,
        "found": _found(run),
        "front": _front_chart(run, known, best, cost),
        "on_front": {candidate.digest for candidate in best},
        "fewest": FEWEST,
        "importance": importance(known),
    }


def _front_chart(
    run: Run, known: Sequence[CandidateRecord], best: Sequence[CandidateRecord], cost: str
) -> Chart | None:
    points = [
        _point(run, candidate, place, value)
        for place, candidate in enumerate(known, 1)
        if candidate.gain is not None and (value := getattr(candidate, cost)) is not None
    ]
    if len(points) < 2 or len({point.x for point in points}) < 2:
        return None
    return Chart(
        f"Gain of {len(points)} candidates against {COSTS[cost]}; the chosen one has a ring",
        COSTS[cost],
        "gain over the initial configuration",
        points,
        {"front": [(getattr(each, cost), each.gain or 0.0) for each in best]},
        steps=True,
    )


def candidate(run: Run, options: Options) -> View:
    """Return one candidate: its values as changes of its parent.

    Raises:
        CompoundError: there is no such candidate.
    """
    known, place = run.candidates, options.get("number", "")
    if not place.isdecimal() or not 1 <= int(place) <= len(known):
        raise CompoundError(f"there is no candidate {place!r} of {run.name}")
    shown = known[int(place) - 1]
    numbers = {each.digest: number_ for number_, each in enumerate(known, 1)}
    start, parent = run.record.start, numbers.get(shown.parent)
    against = options.get("against", "parent")
    other = start
    if against != "start" and parent is not None:
        other = start.replace(known[parent - 1].values)
    mine = start.replace(shown.values)
    changed = [
        {"key": change.key, "before": other[change.key], "after": mine[change.key]}
        for change in other.diff(mine)
    ]
    return "candidate.html", {
        "candidate": shown,
        "number": int(place),
        "parent": parent,
        "against": against,
        "changed": changed,
        "values": mine.to_json(),
        "children": [numbers[c.digest] for c in known if c.parent == shown.digest],
        "total": len(known),
    }


def query_of(run: Run, options: Options) -> Query:
    """Return which examples are asked for; by default those that show the result."""
    sides = run.sides()
    split = options.get("split", "")
    if split not in ("test", "valid"):
        split = "test" if "test" in sides else "valid"
    start = run.record.start.digest
    before, after = sides.get(split, (start, run.record.best.digest))
    return Query(
        split,
        options.get("before") or before,
        options.get("after") or after,
        options.get("show", "all"),
        options.get("sort", "difference"),
        options.get("q", "").strip(),
    )


def examples(run: Run, options: Options) -> View:
    """Return a page of examples, with the outputs and scores of two configurations."""
    read = run.traces.extend()
    query = query_of(run, options)
    number_ = _number(options, "page") or 1
    page = run.traces.page(query, number_, PAGE)
    names = run.configurations()
    known = run.traces.splits()
    return "examples.html", {
        "query": query,
        "page": page,
        "number": number_,
        "pages": max(1, -(-page.total // PAGE)),
        "read": read,
        "filters": FILTERS,
        "sorts": {name: label for name, (label, _) in SORTS.items()},
        "splits": [*known],
        "configurations": [(d, names.get(d, d[:10])) for d in known.get(query.split, [])],
        "names": names,
    }


def example(run: Run, options: Options) -> View:
    """Return the calls of one example, side by side for two configurations.

    Raises:
        CompoundError: it was not recorded with either of them.
    """
    read = run.traces.extend(patience=10.0)
    query, name = query_of(run, options), options.get("example", "")
    wanted, part = _number(options, "sample"), _number(options, "calls") or 1
    digests = [*dict.fromkeys((query.before, query.after))]  # one if nothing was changed
    traces = [run.traces.trace(query.split, digest, name, wanted) for digest in digests]
    others = traces[::-1] if len(traces) > 1 else [None]
    shown = [trace for trace in traces if trace is not None]
    if None in traces and read < 1:
        message = f"{read:.0%} of the traces are read; the page loads itself again."
        return "error.html", {"message": message, "title": "Reading the traces", "refresh": 300}
    if not shown:
        raise CompoundError(f"there is no recorded run of example {name!r} ({query.split})")
    names = run.configurations()
    rewards, why = _call_rewards(run, shown, compute="rewards" in options)
    before, after = run.traces.neighbors(query, name)
    return "example.html", {
        "query": query,
        "example": name,
        "samples": run.traces.samples(query.split, query.after, name),
        "sample": shown[-1]["sample"],
        "inputs": shown[-1]["inputs"],
        "gold": own_gold(shown[-1]),
        "sides": [
            {
                "name": names.get(digest, digest[:10]),
                "trace": trace,
                "rewards": rewards.get(digest, {}),
                "calls": _calls(trace, other, part) if trace else [],
            }
            for digest, trace, other in zip(digests, traces, others, strict=True)
        ],
        "unknown_rewards": why,
        "previous": before,
        "next": after,
        "part": part,
        "parts": max(
            -(-(len(t["calls"]) + len(t.get("metric_calls", ()))) // CALLS) for t in shown
        ),
    }


def _number(options: Options, name: str) -> int | None:
    """Return a whole number among the options, if there is one."""
    text = options.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 9 else None


def _calls(trace: RecordedTrace, other: RecordedTrace | None, part: int) -> list[dict[str, Any]]:
    """Return a page of calls; those that the other side has as well are folded on the page."""
    mine, others = ([*t["calls"], *t.get("metric_calls", ())] if t else [] for t in (trace, other))
    theirs, found = {call["address"]: call for call in others}, []
    for call in mine[(part - 1) * CALLS : part * CALLS]:
        twin = theirs.get(call["address"])
        parts = ("inputs", "outputs", "failure", "exchanges")
        equal = twin is not None and all(call.get(part) == twin.get(part) for part in parts)
        found.append({**call, "equal": equal, "depth": call["address"].count("/")})
    return found


def _call_rewards(
    run: Run, traces: Sequence[RecordedTrace], *, compute: bool
) -> tuple[dict[str, dict[str, float]], str]:
    """Return the local reward of each call by configuration and address, or why it is unknown.

    Heads on named features are computed at once; those on embeddings load a model, so only on
    request.
    """
    if run.folder.kind(f"{REWARDS}/card.json") is None:
        return {}, ""
    try:
        opened = Inspection.open(run.folder.path)
        if opened.stored.backbone != NO_BACKBONE and not compute:
            return {}, f"they need the model {opened.stored.backbone}"
        found: dict[str, dict[str, float]] = {}
        for trace in traces:
            for call in trace["calls"]:
                if call["component"] in opened.components and not call["failure"]:
                    pairs = [(call["inputs"], call["outputs"])]
                    values = opened.model.rewards(call["component"], pairs)
                    found.setdefault(trace["configuration"], {})[call["address"]] = float(values[0])
    except CompoundError as error:
        return {}, str(error)
    return found, ""


def rewards(run: Run, options: Options) -> View:
    """Return accuracy, calibration and the worst pairs of the local rewards."""
    files = (f"{REWARDS}/card.json", "events.jsonl", MEMORY)
    facts = run.remember("reward facts", files, lambda: reward_facts(run.folder.path))

    def worst() -> Mapping[str, Sequence[Judgement]]:
        opened = Inspection.open(run.folder.path)
        return {name: _worst(opened, name) for name in opened.components}

    is_known = facts and "problem" not in facts
    return "rewards.html", {
        "facts": facts,
        "figures": run.remember("reward figures", files, lambda: reward_figures(facts)),
        "worst": run.remember("worst pairs", files, worst) if is_known else {},
    }


def _worst(opened: Inspection, component: str) -> Sequence[Judgement]:
    """Return the pairs with the largest errors, by the reward that a search used if there was one."""
    if not opened.searched(component):
        return opened.worst(component, WORST)
    judged = inspect_search_reward(opened, component).judgements
    return sorted(judged, key=lambda judgement: judgement.margin)[:WORST]


def training(run: Run, options: Options) -> View:
    """Return the curves of training, and the answers of a step with their advantages by token."""
    files = ("events.jsonl", MEMORY)
    facts = run.remember("training facts", files, lambda: training_facts(run.folder.path))
    is_known = facts is not None and "problem" not in facts
    recorded = shown_steps(run.record) if is_known else []
    steps = {f"{job}/{place + 1}": step for job, place, step in recorded}
    jobs = facts["jobs"] if facts is not None and is_known else []
    names = ["", *steps, ""]
    place = names.index(options["at"]) if options.get("at") in steps else len(steps)
    at = names[place]
    groups = shown_groups(steps.get(at, {}))[:MOST_GROUPS]
    sizes = [abs(value) for group in groups for each in group.answers for value in each.by_token]
    return "training.html", {
        "facts": facts,
        "curves": run.remember("curves", files, partial(_curves, jobs)) if jobs else None,
        "trained": trained_components({"jobs": jobs}),
        "steps": names[1:-1],
        "at": at,
        "before": names[place - 1],
        "after": names[place + 1],
        "groups": [_tokens_of(group, max(sizes, default=0.0) or 1.0) for group in groups],
    }


def _curves(jobs: Sequence[dict[str, Any]]) -> Figure | None:
    """Return the curves of training; ``None`` without numbers."""
    if not panels_with_data(jobs):
        return None
    return draw_figure("training", lambda: training_svg(jobs, "training"))


def _tokens_of(group: ShownGroup, most: float) -> dict[str, Any]:
    """Return a group of answers with the tokens to colour: text, level from -4 to 4, and description."""
    rows = []
    for answer in group.answers[:MOST_GROUPS]:
        tokens = []
        for place, (text, value) in enumerate(zip(answer.tokens, answer.by_token, strict=False)):
            told = f"advantage {signed(value)}" + ", clipped" * (place in answer.clipped)
            if place < len(answer.ratios):
                told += f", ratio {answer.ratios[place]:.3g}"
            level = math.ceil(abs(value) / most * LEVELS)
            tokens.append((text, level if value > 0 else -level, told))
        ranked = sorted(zip(answer.advantages, answer.tokens, strict=False))
        rows.append({"answer": answer, "tokens": tokens, "ranked": ranked})
    return {"group": group, "rows": rows}


def label(run: Run, options: Options) -> View:
    """Return the next pair of outputs to compare, without the names of their configurations."""
    read = run.traces.extend(patience=2.0)
    chosen = {"split": "valid", **options}
    query = query_of(run, chosen)
    found = progress(run, query) if query.before != query.after else None
    return "label.html", {
        "query": query,
        "progress": found,
        "read": read,
        "names": run.configurations(),
        "gold": own_gold(found.pair.left) if found and found.pair else {},
    }


VIEWS: Mapping[str, Callable[[Run, Options], View]] = {
    "overview": overview,
    "candidates": candidates,
    "candidate": candidate,
    "examples": examples,
    "example": example,
    "rewards": rewards,
    "training": training,
    "label": label,
}


def tabs(run: Run) -> dict[str, str]:
    """Return the pages that a run has something for, by name."""
    found = {"overview": "Overview", "candidates": "Candidates", "examples": "Examples"}
    if run.folder.kind(f"{REWARDS}/card.json") is not None:
        found["rewards"] = "Local rewards"
    if run.folder.kind(MEMORY) is not None and run.folder.size(MEMORY) > 0:
        found["training"] = "Training"
    return {**found, "label": "Label"}
