"""Links of the pages to files of the repository that are no pages of the site: a hook of MkDocs.

Links to an example lead to its page, and those of public names (`cp.run`) to their documentation. Other files
are named without a link, since the site has no copy of them; with ``repo_url`` in mkdocs.yml they are linked
there. A link to a file that does not exist is left as it is, and a strict build fails on it.
"""

from __future__ import annotations

import inspect
import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

import compound

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the text of a page with links that work on the site."""
    folder = Path(config.docs_dir)

    def replaced(match: re.Match[str]) -> str:
        text, target = match[1], match[2]
        value = (
            getattr(compound, text.strip("`").removeprefix("cp."), None) if text.startswith("`cp.") else None
        )
        if inspect.isclass(value) or inspect.isfunction(value):
            return f"[{text}][{value.__module__}.{value.__qualname__}]"
        source = os.path.normpath(os.path.join(os.path.dirname(page.file.src_uri), target))
        known = files.get_file_from_path(source)
        if known is not None and known.inclusion.is_included() and not source.endswith(".py"):
            return match[0]
        as_page = source.removesuffix(".py") + ".md"
        if source.endswith(".py") and files.get_file_from_path(as_page) is not None:
            return f"[{text}]({target.removesuffix('.py')}.md)"
        place = folder / source
        if not place.exists() and "/" not in page.file.src_uri:  # a page from the root of the repository
            place = folder.parent / source
        if not place.exists():
            return match[0]
        if config.repo_url:
            path = os.path.relpath(place.resolve(), folder.parent)
            return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{path})"
        return text

    return LINK.sub(replaced, markdown)
