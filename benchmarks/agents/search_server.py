"""An MCP server that searches the catalogue: ``python -m benchmarks.agents.search_server``."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from mcp.server import MCPServer

from benchmarks.agents.catalogue import pages

if TYPE_CHECKING:
    import bm25s

server = MCPServer("search", log_level="ERROR")
PAGES = pages()


@functools.cache
def index() -> bm25s.BM25:
    """Return a BM25 index of the pages."""
    import bm25s

    found = bm25s.BM25()
    found.index(_tokens([f"{page['title']} {page['text']}" for page in PAGES]), show_progress=False)
    return found


def _tokens(texts: list[str]) -> object:
    import bm25s

    return bm25s.tokenize(texts, stopwords=None, show_progress=False)


@server.tool()  # type: ignore[untyped-decorator]
def search(query: str, k: int = 2) -> str:
    """Search the catalogue of the shop, and return the k best pages."""
    ranked, scores = index().retrieve(_tokens([query]), k=max(1, min(k, 5)), show_progress=False)
    hits = [PAGES[int(i)] for i, score in zip(ranked[0], scores[0], strict=True) if score > 0]
    return "\n".join(f"{page['title']}: {page['text']}" for page in hits) or "no page found"


if __name__ == "__main__":
    server.run("stdio")
