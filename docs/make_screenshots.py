"""Take pictures of the studio and of the report, of the runs in a folder, in light and dark.

    python docs/make_screenshots.py runs --run atlas --example name-city-turkey --training adapter/mmgrpo/1/3
    python docs/make_screenshots.py runs --run relay --other relay-search
    python docs/make_screenshots.py runs --run tickets

The first two commands take those of the page of the studio, the last one, without an example, those
of the README: parts of two pages, narrow enough to be read on a phone. Needs the extra ``browser``.
The pictures are reduced to few colours, and written to docs/images.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

IMAGES = Path(__file__).parent / "images"
SIZE = {"width": 1280, "height": 800}
NARROW, TALL, SHARP = 560, 372, 2  # pixels of the parts, and device pixels of one of them
COLORS = 96
LOADED = 'main:not([data-refresh="300"])'  # the list of runs is always refreshed, but slower
# Scrolls a table to its column of gold answers, beside the outputs.
FROM_GOLD = "e => { e.parentElement.scrollLeft = e.querySelectorAll('th')[2]?.offsetLeft ?? 0 }"


def main() -> None:
    """Take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--run", required=True, help="name of the run to show")
    parser.add_argument("--example", help="id of the example to show")
    parser.add_argument("--other", help="name of a run to compare it with, beside local rewards")
    parser.add_argument("--training", default="", help="RUN/METHOD/JOB/STEP of the step to show")
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    options = parser.parse_args()
    command = [sys.executable, "-m", "compound", "ui", str(options.folder), "--port", "0"]
    with subprocess.Popen([*command, "--no-browser"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found is not None
            base = f"/run/{quote(options.run)}"
            if options.other:
                pages = {
                    "rewards": f"{base}?view=rewards",
                    "compare": f"/compare?run={quote(options.other)}&run={quote(options.run)}",
                }
                take(found[0], pages, options.chromium)
            elif options.example:
                pages = pages_of(base, options.example, options.training)
                take(found[0], pages, options.chromium)
            else:
                report = (options.folder / options.run / "report.html").resolve().as_uri()
                studio = f"{found[0]}/run/{quote(options.run)}?view=examples&sort=gain"
                take_parts(
                    {"studio": (studio, "table"), "report": (report, "h1")}, options.chromium
                )
        finally:
            process.terminate()


def pages_of(base: str, example: str, training: str) -> dict[str, str]:
    """Return the pages of a run by the names of their pictures."""
    trained, _, step = training.partition("/")
    pages = {
        "runs": "/",
        "overview": base,
        "candidates": f"{base}?view=candidates",
        "examples": f"{base}?view=examples&sort=gain",
        "example": f"{base}?view=example&example={quote(example)}",
        "label": f"{base}?view=label",
    }
    if training:
        pages["training"] = f"/run/{quote(trained)}?view=training&at={quote(step)}#answers"
    return pages


def take(address: str, pages: Mapping[str, str], chromium: str) -> None:
    """Write a picture of each page."""
    from playwright.sync_api import sync_playwright

    IMAGES.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            page = browser.new_context(viewport=SIZE, color_scheme=scheme).new_page()
            for name, path in pages.items():
                page.goto(address + path)
                page.wait_for_selector(LOADED)
                write(IMAGES / f"studio_{name}_{scheme}.png", page.screenshot())
        browser.close()


def take_parts(parts: Mapping[str, tuple[str, str]], chromium: str) -> None:
    """Write a picture of each page (address, selector) from the first element of a selector on."""
    from playwright.sync_api import sync_playwright

    size = {"width": NARROW, "height": 3 * TALL}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            context = browser.new_context(
                viewport=size, color_scheme=scheme, device_scale_factor=SHARP
            )
            page = context.new_page()
            for name, (address, selector) in parts.items():
                page.goto(address)
                page.wait_for_selector(LOADED)
                part = page.locator(selector).first
                part.evaluate(FROM_GOLD)
                box = part.bounding_box()
                assert box is not None
                clip = {"x": 0, "y": box["y"], "width": NARROW, "height": TALL}
                write(IMAGES / f"readme_{name}_{scheme}.png", page.screenshot(clip=clip))
        browser.close()


def write(path: Path, picture: bytes) -> None:
    """Write a picture with few colours."""
    from PIL import Image

    image = Image.open(io.BytesIO(picture)).convert("RGB")
    image.quantize(COLORS, method=Image.Quantize.MEDIANCUT).save(path, optimize=True)


if __name__ == "__main__":
    main()
