"""Find the prompts of an agent in its recorded requests, by aligning the texts of each role.

A text that occurs in several runs is constant. Texts that differ between runs are aligned token by
token: what they share, in order, is constant, and the rest becomes placeholders. Inputs of the
example, answers of models, and times are data: they become placeholders also if they are equal in
all runs. A user message is a prompt only if it contains data, or if most runs send the same one.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import count

from compound.components.gateway.templates import PromptTemplate

MIN_CONSTANT = 12  # characters, without spaces, that texts which differ must share
# Words of an answer that is data wherever it occurs; a shorter one may be a label that a prompt
# lists.
MIN_WORDS = 3
MIN_INNER = 8  # characters between two placeholders, unless they contain a line break
SHARE_OF_TEXT = 0.5  # of the shorter of two texts that must be shared
SHARE_OF_TEMPLATE = 0.6  # of a template that must occur in a further text
MAX_TOKENS = 20_000  # of a text; longer ones are compared as wholes only
GAP = "\ue000"  # stands for a placeholder in a form of a text

_TOKEN = re.compile(r"\w+|\s+|[^\w\s]")
_WORDS = re.compile(r"[^\W_]+")
_GAPS = re.compile(rf"{GAP}(?:[\W_]*{GAP})?")  # without a word between them
_LABEL = re.compile(r"([A-Za-z][A-Za-z0-9 '_-]{0,30}?)\s*[:=]\s*\Z")
_ROLE = re.compile(r"\b(?:[Yy]ou are|[Aa]ct as) (?:an?|the) ([A-Za-z][A-Za-z -]*)")
_LINKING = "a an and at by for from in of on or that the to who with"
_TIME = re.compile(
    r"\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d)?)?\b"
    r"|\b\d{1,2}[./]\d{1,2}[./]\d{2,4}\b|\b\d{1,2}:\d\d(?::\d\d)?(?: ?[AaPp]\.?[Mm]\b)?"
    r"|\b(?:(?:Mon|Tues?|Wednes|Thurs?|Fri|Satur|Sun)(?:day)?,? )?(?:\d{1,2}(?:st|nd|rd|th)?\.? )?"
    r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?,? (?:\d{1,2}(?:st|nd|rd|th)?,? )?\d{4}\b"
    r"|\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b"
)


@dataclass(frozen=True)
class RecordedRequest:
    """The texts of a request by role (``system``, ``user``), its run, and the data of the run.

    ``inputs`` are those of the example, ``answers`` those of models and tools. ``continues`` says
    that the first user message is not the last: it is a demonstration, or an earlier turn.
    ``model`` is the name that the request states, and ``failed`` whether it got no answer.
    """

    run: str
    texts: dict[str, str]
    inputs: frozenset[str] = frozenset()
    answers: frozenset[str] = frozenset()
    continues: bool = False
    model: str = ""
    failed: bool = False


@dataclass(frozen=True)
class FoundPrompt:
    """A prompt found in an agent's requests.

    Attributes:
        name: a suggested name.
        match: templates of the messages by role.
        requests: number of requests that have it.
        runs: number of runs in which they were sent.
        models: the models that they state, the one that answered most of them first.
    """

    name: str
    match: dict[str, str]
    requests: int
    runs: int
    models: tuple[str, ...] = ()


def find_prompts(
    requests: Sequence[RecordedRequest], taken: Iterable[str] = ()
) -> list[FoundPrompt]:
    """Return the prompts of recorded requests, the most specific ones first.

    Args:
        requests: requests of several runs.
        taken: names that prompts cannot have.

    >>> texts = [{"system": f"Answer for {name}, please."} for name in ("Ann", "Bo")]
    >>> requests = [RecordedRequest(str(run), text) for run, text in enumerate(texts)]
    >>> find_prompts(requests)[0].match
    {'system': 'Answer for {{text}}, please.'}
    """
    runs = len({request.run for request in requests})
    patterns: list[dict[str, str]] = [{} for _ in requests]
    for role in ("system", "user"):
        for template, members in _templates(requests, role):
            senders = [requests[member] for member in members]
            if role == "system" or _is_prompt(template, senders, runs):
                for member in members:
                    patterns[member][role] = template
    # beside a system prompt, questions that happen to be alike are no prompts
    partly = {p["system"] for p in patterns if "system" in p and "user" not in p}
    groups: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for i, pattern in enumerate(patterns):
        if pattern.get("system") in partly:
            pattern.pop("user", None)
        if pattern:
            groups.setdefault(tuple(pattern.items()), []).append(i)

    def precedence(match: tuple[tuple[str, str], ...]) -> tuple[int, int, int]:
        constant = sum(_size("".join(PromptTemplate(text).constants)) for _, text in match)
        return -len(match), -constant, groups[match][0]

    found: list[FoundPrompt] = []
    for match in sorted(groups, key=precedence):
        name = name_of(match[0][1], [*taken, *(prompt.name for prompt in found)])
        members = groups[match]
        sent = len({requests[i].run for i in members})
        models = Counter[str]()
        for i in members:
            models[requests[i].model] += not requests[i].failed
        ranked = tuple(model for model, _ in models.most_common() if model)
        found.append(FoundPrompt(name, dict(match), len(members), sent, ranked))
    return found


def _is_prompt(text: str, members: Sequence[RecordedRequest], runs: int) -> bool:
    """Return whether the template of user messages is a prompt of the program, not the user's question."""
    if all(member.continues for member in members):
        return False
    template = PromptTemplate(text)
    if not template.names:
        return 2 * len({member.run for member in members}) > runs
    return all(
        any(
            _occurrences(data, value)
            for value in (template.match(member.texts["user"]) or {}).values()
            for data in member.inputs | member.answers
        )
        for member in members
    )


def _templates(requests: Sequence[RecordedRequest], role: str) -> list[tuple[str, list[int]]]:
    """Return the templates of the texts of a role, with the requests that match each."""
    forms = {i: _form(r, r.texts[role]) for i, r in enumerate(requests) if role in r.texts}
    runs: dict[str, set[str]] = {}
    for i, form in forms.items():
        if _WORDS.search(form):
            runs.setdefault(form, set()).add(requests[i].run)
    groups = [g for g in _align(form for form in runs if len(runs[form]) == 1) if len(g[1]) > 1]
    for form in [form for form in runs if len(runs[form]) > 1]:
        # a value may occur twice: a repeated text can be one of a template with varying parts
        others = (g for g in groups if len(g[1]) > 1 and PromptTemplate(_render(g[0])).match(form))
        if GAP not in form and (group := next(others, None)) is not None:
            group[1].append(form)
        else:
            groups.append((form, [form]))
    found = []
    for known, members in groups:
        places = [i for i, form in forms.items() if form in members]
        if len({requests[i].run for i in places}) > 1 and _WORDS.search(known):
            found.append((_render(known), places))
    return found


def _form(request: RecordedRequest, text: str) -> str:
    """Return a text with gaps for the data of its run and for times."""
    data = request.inputs | request.answers
    whole = text.casefold().split()
    if any(whole == value.casefold().split() for value in data):
        return GAP
    spans = [found.span() for found in _TIME.finditer(text)]
    for value in data:
        words = len(_WORDS.findall(value))
        long = words >= MIN_WORDS or (value in request.inputs and len(value.strip()) > 1)
        spans += [s for s in _occurrences(value, text) if long or _is_delimited(text, s)]
    characters = list(text)
    for start, end in spans:
        characters[start:end] = GAP * (end - start)
    return _GAPS.sub(GAP, "".join(characters))


def _occurrences(value: str, text: str) -> list[tuple[int, int]]:
    """Return where a text contains the words of a value, whatever the case and the spaces."""
    found = _pattern_of(value)
    return [match.span() for match in found.finditer(text)] if found is not None else []


@functools.lru_cache(maxsize=4096)
def _pattern_of(value: str) -> re.Pattern[str] | None:
    words = value.split()
    if not _WORDS.search(value) or len(words) > MAX_TOKENS:
        return None
    core = r"\s+".join(map(re.escape, words))
    end = re.escape(words[-1][len(words[-1].rstrip(".!?,;:")) :])
    if end:
        core = f"{core[: -len(end)]}(?:{end})?"
    first = r"(?<!\w)" if words[0][0].isalnum() else ""
    return re.compile(rf"{first}{core}(?!\w)", re.IGNORECASE)


def _is_delimited(text: str, span: tuple[int, int]) -> bool:
    """Return whether a part of a text stands alone, after a label and at the end of a line."""
    before, after = text[: span[0]].rstrip(" \t\"'"), text[span[1] :].lstrip(" \t\"'.!?")
    return before[-1:] in ("", *":=\n>") and after[:1] in ("", *"\n<")


def _align(forms: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Return the form of each template with its texts; a text joins the one that it shares most with."""
    groups: list[tuple[str, list[str]]] = []
    for form in forms:
        if len(_TOKEN.findall(form)) > MAX_TOKENS:
            continue
        best: tuple[int, int, str] | None = None
        for number, (known, members) in enumerate(groups):
            shared = _shared(known, form)
            alone = SHARE_OF_TEXT * min(_size(known), _size(form))
            least = alone if len(members) == 1 else SHARE_OF_TEMPLATE * _size(known)
            anchored = not (shared.startswith(GAP) and shared.endswith(GAP))
            size = _size(shared)
            if anchored and size >= max(MIN_CONSTANT, least) and (best is None or size > best[0]):
                best = size, number, shared
        if best is None:
            groups.append((form, [form]))
        else:
            groups[best[1]] = (best[2], [*groups[best[1]][1], form])
    return groups


def _shared(known: str, form: str) -> str:
    """Return what two forms share, in order, with gaps for the rest.

    Short constants between gaps are left out: texts share them by chance.
    """
    one, other = _TOKEN.findall(known), _TOKEN.findall(form)
    found, a, b = "", 0, 0
    for block in SequenceMatcher(None, one, other, autojunk=False).get_matching_blocks():
        found += GAP if block.a > a or block.b > b else ""
        found += "".join(one[block.a : block.a + block.size])
        a, b = block.a + block.size, block.b + block.size
    first, *inner = found.split(GAP)
    if not inner:
        return first
    last = inner.pop()
    kept = [part for part in inner if _size(part) >= MIN_INNER or (_size(part) and "\n" in part)]
    return GAP.join([first, *kept, last])


def _size(text: str) -> int:
    """Return the number of characters of the constants of a form, without spaces."""
    return len("".join(text.replace(GAP, "").split()))


def _render(form: str) -> str:
    """Return a form as a template; placeholders are named after the label before them."""
    text, *rest = form.split(GAP)
    names = set[str]()
    for part in rest:
        label = _LABEL.search(text)
        names.add(name := _free_name(_slug(label[1]) if label else "", "text", names))
        text += f"{{{{{name}}}}}{part}"
    return text


def _slug(text: str) -> str:
    """Return a name made of the words of a text.

    >>> _slug("Search results")
    'search_results'
    """
    name = "_".join(re.findall(r"[a-z0-9]+", text.lower().replace("'", "")))
    return "" if name[:1].isdigit() else name


def _free_name(name: str, default: str, taken: Iterable[str]) -> str:
    base = name or default
    candidates = (f"{base}_{number}" if number > 1 else base for number in count(1))
    return next(candidate for candidate in candidates if candidate not in taken)


def name_of(text: str, taken: Iterable[str]) -> str:
    """Return a name for a prompt that is not taken.

    >>> name_of("You are a careful travel planner. Plan a trip.", [])
    'careful_travel_planner'
    >>> name_of("Summarize it", ["summarize_it"])
    'summarize_it_2'
    """
    role = _ROLE.search(text)
    words = role[1].split() if role else re.findall(r"[A-Za-z]+", re.sub(r"\{\{.*?\}\}", " ", text))
    words = words[:3]
    while len(words) > 1 and words[-1].lower() in _LINKING.split():
        words.pop()
    return _free_name(_slug(" ".join(words)), "prompt", set(taken))
