"""Functions of the systems that the tests export; exported programs import them by name."""

from __future__ import annotations


def search(query: str, k: int) -> list[str]:
    return [f"passage {i} about {query}" for i in range(k)]


async def shorten(text: str) -> str:
    return text[:-1]


def is_short(text: str) -> bool:
    return len(text) < 4


def is_question(text: str) -> bool:
    return text.endswith("?")
