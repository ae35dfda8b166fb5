"""Find the prompts of an agent in its recorded requests, by aligning their texts.

A text that occurs in several runs is constant. Texts that differ between runs are aligned token by
token: what they share, in order, is constant, and the rest becomes placeholders. Only the texts of
several runs together tell what is constant, so a text of a single run is never a prompt by itself.

Inputs of the example, answers of models, and times are data: they become placeholders also if they
are equal in all runs. A user message is a prompt only if it contains data, or if most runs send the
same one.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher

from compound.components.gateway.templates import PromptTemplate

MIN_CONSTANT = 12  # characters, without spaces, that texts which differ must share
# Words of an answer that is data wherever it occurs; a shorter one may be a label that a prompt
# lists.
MIN_WORDS = 3
MIN_INNER = 8  # characters between two placeholders, unless they contain a line break
SHARE_OF_TEXT = 0.5  # of the shorter of two texts that must be shared
SHARE_OF_TEMPLATE = 0.6  # of a template that must occur in a further text
MAX_TOKENS = 20_000  # of a text; longer ones are compared as wholes only

_TOKEN = re.compile(r"\w+|\s+|[^\w\s]")
_WORDS = re.compile(r"[^\W_]+")
_LABEL = re.compile(r"([A-Za-z][A-Za-z0-9 '_-]{0,30}?)\s*[:=]\s*\Z")
_ROLE = re.compile(r"\b(?:[Yy]ou are|[Aa]ct as) (?:an?|the) ([A-Za-z][A-Za-z -]*)")
_TIME = re.compile(
    r"\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d)?)?\b"
    r"|\b\d{1,2}[./]\d{1,2}[./]\d{2,4}\b|\b\d{1,2}:\d\d(?::\d\d)?(?: ?[AaPp]\.?[Mm]\b)?"
    r"|\b(?:(?:Mon|Tues?|Wednes|Thurs?|Fri|Satur|Sun)(?:day)?,? )?(?:\d{1,2}(?:st|nd|rd|th)?\.? )?"
    r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?,? (?:\d{1,2}(?:st|nd|rd|th)?,? )?\d{4}\b"
    r"|\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b"
)
_GAP = None  # a placeholder among the tokens
Token = str | None
Span = tuple[int, int]


@dataclass(frozen=True)
class RecordedText:
    """A text of a request, the run that it comes from, and the data of that run.

    ``inputs`` are those of the example; ``answers`` those of models and tools.
    """

    run: str
    text: str
    inputs: frozenset[str] = frozenset()
    answers: frozenset[str] = frozenset()


@dataclass(eq=False)
class TextCluster:
    """Texts of one template.

    Attributes:
        template: the template.
        members: positions of the texts among those given.
    """

    template: str
    members: list[int] = field(default_factory=list)


def cluster_texts(texts: Sequence[RecordedText]) -> list[TextCluster]:
    """Return the templates of texts, each of which matches all of its members; other texts are in none.

    >>> texts = [RecordedText(str(i), f"Answer for {name}, please.") for i, name in enumerate(["Ann", "Bo"])]
    >>> cluster_texts(texts)[0].template
    'Answer for {{text}}, please.'
    """
    forms = [tuple(_tokens(item)) for item in texts]
    runs: dict[tuple[Token, ...], set[str]] = {}
    for form, item in zip(forms, texts, strict=True):
        if _has_words(form):
            runs.setdefault(form, set()).add(item.run)
    constants = [form for form, found in runs.items() if len(found) > 1]
    varying = [form for form in runs if form not in constants]
    groups = [(tokens, found) for tokens, found in _align(varying) if len(found) > 1]
    for form in constants:
        # a value may occur twice: a repeated text can be one of a template with varying parts
        text = _render(form)
        matching = (
            g
            for g in groups
            if len(g[1]) > 1 and PromptTemplate(_render(g[0])).match(text) is not None
        )
        if _GAP not in form and (group := next(matching, None)) is not None:
            group[1].append(form)
        else:
            groups.append(([*form], [form]))
    clusters = []
    for tokens, found in groups:
        members = [i for i, form in enumerate(forms) if form in found]
        constant = _without_data(tokens, [texts[i] for i in members])
        if len({texts[i].run for i in members}) > 1 and _has_words(constant):
            clusters.append(TextCluster(_render(constant), members))
    return clusters


def _tokens(item: RecordedText) -> list[Token]:
    """Return the tokens of a text, with gaps for the data that it contains wherever it occurs."""
    spans = [found.span() for found in _TIME.finditer(item.text)]
    for value in item.inputs:
        spans += _occurrences(value, item.text) if len(value.strip()) > 1 else []
    for value in item.answers:
        spans += _occurrences(value, item.text) if len(_WORDS.findall(value)) >= MIN_WORDS else []
    whole = " ".join(item.text.casefold().split())
    if any(whole == " ".join(value.casefold().split()) for value in item.inputs | item.answers):
        return [_GAP]
    return _with_gaps(item.text, spans)


def _without_data(tokens: Sequence[Token], members: Sequence[RecordedText]) -> list[Token]:
    """Return the tokens of a template, with gaps for constants that are data in every text."""
    template = PromptTemplate(_render(tokens))
    common: set[int] | None = None
    for item in members:
        places = _places(template, item.text)
        data = [*(span for value in item.inputs for span in _occurrences(value, item.text))]
        for value in item.answers:
            short = len(_WORDS.findall(value)) < MIN_WORDS
            data += [
                s
                for s in _occurrences(value, item.text)
                if not short or _is_delimited(item.text, s)
            ]
        covered = {at for start, end in data for at in range(start, end)}
        found = {n for n, at in enumerate(places) if at in covered}
        common = found if common is None else common & found
    if not common:
        return [*tokens]
    parts, start = [], 0
    for constant in template.constants:
        spans = [
            (n - start, n - start + 1) for n in sorted(common) if start <= n < start + len(constant)
        ]
        parts.append(_with_gaps(constant, spans))
        start += len(constant)
    joined: list[Token] = [*parts[0]]
    for part in parts[1:]:
        joined += [_GAP, *part]
    return _merged(joined)


def _places(template: PromptTemplate, text: str) -> list[int]:
    """Return the position in a text of each character of a template's constants."""
    values = template.match(text)
    places: list[int] = []
    at = 0
    for constant, name in zip(template.constants, [*template.names, ""], strict=True):
        places += range(at, at + len(constant))
        at += len(constant) + len((values or {}).get(name, ""))
    return places


def _occurrences(value: str, text: str) -> list[Span]:
    """Return where a text contains the words of a value, whatever the case and the spaces."""
    found = _pattern_of(value)
    return [match.span() for match in found.finditer(text)] if found is not None else []


@functools.lru_cache(maxsize=4096)
def _pattern_of(value: str) -> re.Pattern[str] | None:
    words = value.split()
    if not _WORDS.search(value) or len(words) > MAX_TOKENS:
        return None
    first, last = (r"(?<!\w)" if value.strip()[0].isalnum() else ""), r"(?!\w)"
    core = r"\s+".join(map(re.escape, words))
    end = re.escape(words[-1][len(words[-1].rstrip(".!?,;:")) :])
    if end:
        core = f"{core[: -len(end)]}(?:{end})?"
    return re.compile(first + core + last, re.IGNORECASE)


def _is_delimited(text: str, span: Span) -> bool:
    """Return whether a part of a text stands alone, after a label and at the end of a line."""
    before, after = text[: span[0]].rstrip(" \t\"'"), text[span[1] :].lstrip(" \t\"'.!?")
    return (not before or before[-1] in ":=\n>") and (not after or after[0] in "\n<")


def _with_gaps(text: str, spans: Sequence[Span]) -> list[Token]:
    """Return the tokens of a text with gaps at some places."""
    tokens: list[Token] = []
    at = 0
    for start, end in sorted(spans):
        if start > at or not tokens:
            tokens += [*_TOKEN.findall(text[at:start]), _GAP]
        at = max(at, end)
    return _merged([*tokens, *_TOKEN.findall(text[at:])])


def _merged(tokens: Sequence[Token]) -> list[Token]:
    """Return tokens in which gaps without a word between them are one gap."""
    found: list[Token] = []
    for token in tokens:
        if token is _GAP and _GAP in found:
            last = len(found) - 1 - found[::-1].index(_GAP)
            if not _has_words(found[last:]):
                del found[last:]
        found.append(token)
    return found


def _has_words(tokens: Iterable[Token]) -> bool:
    return any(token is not _GAP and _WORDS.search(token) for token in tokens)


def _align(forms: Iterable[tuple[Token, ...]]) -> list[tuple[list[Token], list[tuple[Token, ...]]]]:
    """Return templates as tokens, with their texts; a text joins the template that it shares most with."""
    groups: list[tuple[list[Token], list[tuple[Token, ...]]]] = []
    for form in forms:
        if len(form) > MAX_TOKENS:
            continue
        best: tuple[int, int, list[Token]] | None = None
        for number, (known, members) in enumerate(groups):
            shared = _shared(known, form)
            size = _size(shared)
            alone = len(members) == 1
            shorter = min(_size(known), _size(form))
            least = SHARE_OF_TEXT * shorter if alone else SHARE_OF_TEMPLATE * _size(known)
            fits = size >= max(MIN_CONSTANT, least) and (
                shared[0] is not _GAP or shared[-1] is not _GAP
            )
            if fits and (best is None or size > best[0]):
                best = size, number, shared
        if best is None:
            groups.append(([*form], [form]))
        else:
            groups[best[1]] = (best[2], [*groups[best[1]][1], form])
    return groups


def _shared(known: Sequence[Token], tokens: Sequence[Token]) -> list[Token]:
    """Return the tokens that a template shares with a text, in order, with gaps for the rest."""
    found: list[Token] = []
    a = b = 0
    for block in SequenceMatcher(None, known, tokens, autojunk=False).get_matching_blocks():
        if block.a > a or block.b > b:
            found.append(_GAP)
        found += known[block.a : block.a + block.size]
        a, b = block.a + block.size, block.b + block.size
    return _without_fragments(found)


def _without_fragments(tokens: Sequence[Token]) -> list[Token]:
    """Widen gaps over short constants between them, which texts share by chance."""
    parts: list[list[Token]] = [[]]
    for token in tokens:
        if token is _GAP:
            parts.append([])
        else:
            parts[-1].append(token)
    inner = [
        part
        for part in parts[1:-1]
        if _size(part) >= MIN_INNER or "\n" in "".join(filter(None, part))
    ]
    inner = [part for part in inner if _size(part)]
    if len(parts) == 1:
        return parts[0]
    found = list(parts[0])
    for part in (*inner, parts[-1]):
        found += [_GAP, *part]
    return found


def _size(tokens: Iterable[Token]) -> int:
    """Return the number of characters of the constant tokens, without spaces."""
    return sum(len("".join(token.split())) for token in tokens if token is not _GAP)


def _render(tokens: Sequence[Token]) -> str:
    """Return a template as text; placeholders are named after the label before them."""
    text, names = "", set[str]()
    for token in tokens:
        if token is not _GAP:
            text += token
            continue
        label = _LABEL.search(text)
        base = _slug(label[1]) if label else ""
        name, number = base or "text", 2
        while name in names:
            name, number = f"{base or 'text'}_{number}", number + 1
        names.add(name)
        text += f"{{{{{name}}}}}"
    return text


def _slug(text: str) -> str:
    """Return a name made of the words of a text.

    >>> _slug("Search results")
    'search_results'
    """
    words = re.findall(r"[a-z0-9]+", text.lower().replace("'", ""))
    name = "_".join(words)
    return name if name and not name[0].isdigit() else ""


def name_of(text: str, taken: Iterable[str]) -> str:
    """Return a name for a prompt that is not taken.

    >>> name_of("You are a careful travel planner. Plan a trip.", [])
    'careful_travel_planner'
    >>> name_of("Summarize it", ["summarize_it"])
    'summarize_it_2'
    """
    role = _ROLE.search(text)
    words = role[1].split() if role else re.findall(r"[A-Za-z]+", re.sub(r"\{\{.*?\}\}", " ", text))
    base = _slug(" ".join(words[:3])) or "prompt"
    name, number = base, 2
    while name in set(taken):
        name, number = f"{base}_{number}", number + 1
    return name


@dataclass(frozen=True)
class RecordedRequest:
    """The texts of a request by role (``system``, ``user``), its run, and the data of the run.

    ``continues`` says that the first user message is not the last: it is a demonstration, or an
    earlier turn.
    """

    run: str
    texts: dict[str, str]
    inputs: frozenset[str] = frozenset()
    answers: frozenset[str] = frozenset()
    continues: bool = False


@dataclass(frozen=True)
class FoundPrompt:
    """A prompt found in an agent's requests.

    Attributes:
        name: a suggested name.
        match: templates of the messages by role.
        requests: number of requests that have it.
        runs: number of runs in which they were sent.
    """

    name: str
    match: dict[str, str]
    requests: int
    runs: int


def find_prompts(
    requests: Sequence[RecordedRequest], taken: Iterable[str] = ()
) -> list[FoundPrompt]:
    """Return the prompts of recorded requests, the most specific ones first.

    Args:
        requests: requests of several runs.
        taken: names that prompts cannot have.
    """
    patterns: list[dict[str, str]] = [{} for _ in requests]
    for role in ("system", "user"):
        places = [i for i, request in enumerate(requests) if role in request.texts]
        texts = [
            RecordedText(r.run, r.texts[role], r.inputs, r.answers)
            for r in (requests[i] for i in places)
        ]
        for cluster in cluster_texts(texts):
            senders = [requests[places[member]] for member in cluster.members]
            if role == "user" and not _is_prompt(
                cluster.template, senders, len({r.run for r in requests})
            ):
                continue
            for member in cluster.members:
                patterns[places[member]][role] = cluster.template
    # beside a system prompt, questions that happen to be alike are no prompts
    partly = {p["system"] for p in patterns if "system" in p and "user" not in p}
    groups: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for i, pattern in enumerate(patterns):
        if pattern.get("system") in partly:
            pattern.pop("user", None)
        if pattern:
            groups.setdefault(tuple(pattern.items()), []).append(i)
    ordered = sorted(
        groups.items(), key=lambda item: (-len(item[0]), -_generality(item[0]), item[1][0])
    )
    found: list[FoundPrompt] = []
    for key, members in ordered:
        used = [*taken, *(prompt.name for prompt in found)]
        runs = len({requests[i].run for i in members})
        found.append(FoundPrompt(name_of(key[0][1], used), dict(key), len(members), runs))
    return found


def _is_prompt(text: str, members: Sequence[RecordedRequest], runs: int) -> bool:
    """Return whether the template of user messages is a prompt of the program, not the user's question."""
    if all(member.continues for member in members):
        return False
    template = PromptTemplate(text)
    if not template.names:
        return 2 * len({member.run for member in members}) > runs
    filled = ((member, (template.match(member.texts["user"]) or {}).values()) for member in members)
    return all(
        any(
            _occurrences(data, value) for data in member.inputs | member.answers for value in values
        )
        for member, values in filled
    )


def _generality(match: Iterable[tuple[str, str]]) -> int:
    """Return the constant characters of templates: of two that match a text, the longer is more specific."""
    return sum(_size(PromptTemplate(text).constants) for _, text in match)
