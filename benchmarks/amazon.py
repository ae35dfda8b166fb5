"""Python steps of the amazon system: truncation of titles, and the decision."""

from __future__ import annotations

import re

_WORD = re.compile(r"\w{2,}")


def shorten(title: str, words: int) -> str:
    """Truncate a title to its first words; shops put the name first and keywords after it.

    >>> shorten("Tower 4L Air Fryer, 1400W, Black", 4)
    'Tower 4L Air Fryer,'
    """
    return " ".join(title.split()[:words])


def recent(session: str, last: int, words: int) -> str:
    """Return the last distinct titles of a session (one title per line), latest first.

    >>> recent("red mug\\nblue mug\\nred mug", last=5, words=9)
    'red mug; blue mug'
    """
    titles = [shorten(line, words) for line in session.splitlines() if line.strip()]
    return "; ".join(list(dict.fromkeys(reversed(titles)))[:last])


def cut_all(titles: list[str], words: int) -> list[str]:
    """Truncate each title to its first ``words`` words.

    >>> cut_all(["Arsenal Travel Mug", "Tower 4L Air Fryer"], 2)
    ['Arsenal Travel', 'Tower 4L']
    """
    return [shorten(title, words) for title in titles]


def decide(interest: str, profiles: list[str], titles: list[str], title_weight: float) -> int:
    """Return the index, from 0, of the candidate that is most similar to the interest; ties go to the first.

    Args:
        interest: a description of what the user is shopping for.
        profiles: a description of each candidate.
        titles: the title of each candidate.
        title_weight: weight of the titles, from 0 (only profiles count) to 1 (only titles count).

    >>> decide("a travel mug", ["A set of socks", "A mug"], ["Warm socks", "Steel Travel Mug"], 0.5)
    1
    """
    wanted = _words(interest)
    scores = [
        (1 - title_weight) * _shared(wanted, profile) + title_weight * _shared(wanted, title)
        for profile, title in zip(profiles, titles, strict=True)
    ]
    return scores.index(max(scores))


def _words(text: str) -> set[str]:
    return set(_WORD.findall(text.lower()))


def _shared(wanted: set[str], text: str) -> float:
    """Return the cosine similarity of two sets of words."""
    found = _words(text)
    if not wanted or not found:
        return 0.0
    return float(len(wanted & found) / (len(wanted) * len(found)) ** 0.5)
