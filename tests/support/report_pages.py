"""The HTML page of a report, as a browser reads it."""

from __future__ import annotations

import re
from html.parser import HTMLParser


class Page(HTMLParser):
    """Checks that tags are balanced, pictures described and nothing is loaded; collects tags and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "svg":
            assert dict(attrs)["aria-label"]
        for name, value in attrs:
            assert not name.startswith("on")
            assert name not in ("src", "srcset", "action", "data")
            assert not name.endswith("href") or (value or "").startswith("#")
            assert not re.search(r"url\((?!#)", value or "")
            self.ids += [value or ""] * (name == "id")
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += "" if "style" in self.open else data
