"""Find the prompts of an agent in its recorded requests, by aligning their texts.

A text that occurs in several runs is constant. Texts that differ between runs are aligned token by token:
what they share, in order, is constant, and the rest becomes placeholders. Only the texts of several runs
together tell what is constant, so a text of a single run is never a prompt by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher

from compound.gateway.templates import Template

MIN_CONSTANT = 12  # characters, without spaces, that a template must have
MIN_INNER = 8  # characters between two placeholders, unless they contain a line break
SHARE_OF_TEXT = 0.5  # of the shorter of two texts that must be shared
SHARE_OF_TEMPLATE = 0.6  # of a template that must occur in a further text
MAX_TOKENS = 20_000  # of a text; longer ones are compared as wholes only

_TOKEN = re.compile(r"\w+|\s+|[^\w\s]")
_LABEL = re.compile(r"([A-Za-z][A-Za-z0-9 '_-]{0,30}?)\s*[:=]\s*\Z")
_ROLE = re.compile(r"\b(?:[Yy]ou are|[Aa]ct as) (?:an?|the) ([A-Za-z][A-Za-z -]*)")
_GAP = None  # a placeholder among the tokens
Token = str | None


@dataclass(frozen=True)
class RecordedText:
    """A text of a request, and the run that it comes from."""

    run: str
    text: str


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
    runs: dict[str, set[str]] = {}
    for item in texts:
        runs.setdefault(item.text, set()).add(item.run)
    constants = [text for text, found in runs.items() if len(found) > 1 and _size([text]) >= MIN_CONSTANT]
    varying = [text for text in runs if text not in constants]
    groups = [(tokens, found) for tokens, found in _align(varying) if len(found) > 1]
    for text in constants:
        # a value may occur twice: a repeated text can be one of a template with varying parts
        matching = (g for g in groups if len(g[1]) > 1 and Template(_render(g[0])).match(text) is not None)
        if (group := next(matching, None)) is not None:
            group[1].append(text)
        else:
            groups.append(([text], [text]))
    clusters = []
    for tokens, found in groups:
        names = set(found)
        members = [i for i, item in enumerate(texts) if item.text in names]
        if len({texts[i].run for i in members}) > 1:
            clusters.append(TextCluster(_render(tokens), members))
    return clusters


def _align(texts: Iterable[str]) -> list[tuple[list[Token], list[str]]]:
    """Return templates as tokens, with their texts; a text joins the template that it shares most with."""
    groups: list[tuple[list[Token], list[str]]] = []
    for text in texts:
        tokens: list[Token] = [*_TOKEN.findall(text)]
        if len(tokens) > MAX_TOKENS:
            continue
        best: tuple[int, int, list[Token]] | None = None
        for number, (known, members) in enumerate(groups):
            shared = _shared(known, tokens)
            size = _size(shared)
            alone = len(members) == 1
            shorter = min(_size(known), _size(tokens))
            least = SHARE_OF_TEXT * shorter if alone else SHARE_OF_TEMPLATE * _size(known)
            fits = size >= max(MIN_CONSTANT, least) and (shared[0] is not _GAP or shared[-1] is not _GAP)
            if fits and (best is None or size > best[0]):
                best = size, number, shared
        if best is None:
            groups.append((tokens, [text]))
        else:
            groups[best[1]] = (best[2], [*groups[best[1]][1], text])
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
    inner = [part for part in parts[1:-1] if _size(part) >= MIN_INNER or "\n" in "".join(filter(None, part))]
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
    """The texts of a request by role (``system``, ``user``), and its run."""

    run: str
    texts: dict[str, str]


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


def find_prompts(requests: Sequence[RecordedRequest], taken: Iterable[str] = ()) -> list[FoundPrompt]:
    """Return the prompts of recorded requests, the most specific ones first.

    Args:
        requests: requests of several runs.
        taken: names that prompts cannot have.
    """
    patterns: list[dict[str, str]] = [{} for _ in requests]
    for role in ("system", "user"):
        places = [i for i, request in enumerate(requests) if role in request.texts]
        texts = [RecordedText(requests[i].run, requests[i].texts[role]) for i in places]
        for cluster in cluster_texts(texts):
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
    ordered = sorted(groups.items(), key=lambda item: (-len(item[0]), -_generality(item[0]), item[1][0]))
    found: list[FoundPrompt] = []
    for key, members in ordered:
        used = [*taken, *(prompt.name for prompt in found)]
        runs = len({requests[i].run for i in members})
        found.append(FoundPrompt(name_of(key[0][1], used), dict(key), len(members), runs))
    return found


def _generality(match: Iterable[tuple[str, str]]) -> int:
    """Return the constant characters of templates: of two that match a text, the longer is more specific."""
    return sum(_size(Template(text).constants) for _, text in match)
