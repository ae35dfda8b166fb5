"""The studio in a real browser: layout, accessibility, keys, live updates, hostile texts."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compound.evaluation.feedback import read_feedback
from compound.optimization.runs.recorder import STOP
from studio_runs import change, unfinished

PAGES = {
    "runs": "/",
    "compare": "/compare?run=one&run=two",
    "overview": "/run/one",
    "candidates": "/run/one?view=candidates",
    "candidate": "/run/one?view=candidate&number=2",
    "examples": "/run/one?view=examples",
    "example": "/run/one?view=example&example=e7",
    "training": "/run/one?view=training",
    "label": "/run/one?view=label&split=test",
    "error": "/run/absent",
}


@pytest.fixture(params=["light", "dark"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def problems() -> list[str]:
    """What the browser reports: errors of scripts, and what the security policy refused."""
    return []


@pytest.fixture
def page(chromium: Any, problems: list[str]) -> Iterator[Any]:
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    found = context.new_page()
    found.on("console", lambda message: problems.append(message.text))
    found.on("pageerror", lambda error: problems.append(str(error)))
    yield found
    context.close()


def accept(dialog: Any, told: list[str]) -> None:
    told.append(dialog.message)
    dialog.accept()


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("width", [1280, 420])
def test_no_page_is_wider_than_the_screen_and_none_has_violations(
    page: Any, studio: str, name: str, width: int, scheme: str, problems: list[str]
) -> None:
    from axe_playwright_python.sync_playwright import (  # type: ignore[import-not-found, unused-ignore]
        Axe,
    )

    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    page.goto(studio + PAGES[name])
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert name == "error" or problems == []
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    found = Axe().run(page).response["violations"]
    assert [(each["id"], each["nodes"][0]["html"]) for each in found] == []


def test_labels_are_given_by_keys_alone(page: Any, studio: str, folder: Path) -> None:
    page.goto(studio + PAGES["label"])
    for done, key in enumerate("120", 1):
        page.keyboard.press(key)
        page.wait_for_function("n => document.querySelector('progress').value === n", arg=done)
    log = read_feedback(folder / "one" / "labels")
    assert (len(log.preferences), len(log.ties)) == (2, 1)


def test_every_page_is_reached_by_the_keyboard(page: Any, studio: str) -> None:
    page.goto(studio)
    for target in ("one", "Examples", "e0"):
        for _ in range(60):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.textContent.trim()") == target:
                break
        with page.expect_navigation():
            page.keyboard.press("Enter")
    assert "view=example&" in page.url


def test_arrows_lead_to_the_next_example_and_training_step(page: Any, studio: str) -> None:
    page.goto(f"{studio}/run/one?view=example&example=e7&sort=example&split=test")
    first = page.locator("h1").text_content()
    with page.expect_navigation():
        page.keyboard.press("ArrowRight")
    assert page.locator("h1").text_content() != first
    with page.expect_navigation():
        page.keyboard.press("ArrowLeft")
    assert page.locator("h1").text_content() == first
    page.goto(studio + PAGES["training"])
    with page.expect_navigation():
        page.keyboard.press("ArrowLeft")
    assert page.locator("option[selected]").text_content() == "job 1, step 2"


def test_tokens_differ_without_colour(page: Any, studio: str) -> None:
    page.goto(studio + PAGES["training"])
    read = """kind => {
        const style = getComputedStyle(document.querySelector(`td .tokens .${kind}`));
        return [style.textDecorationLine, style.textDecorationStyle];
    }"""
    looks = [page.evaluate(read, kind) for kind in ("up", "down")]
    assert looks == [["underline", "solid"], ["underline", "dotted"]]
    thick = """[...document.querySelectorAll('td .tokens .up')].map(
        each => [each.style.getPropertyValue('--size'), getComputedStyle(each).textDecorationThickness])"""
    sizes = {size: float(wide.removesuffix("px")) for size, wide in page.evaluate(thick)}
    assert sizes["4"] > sizes["3"] > sizes["2"] > sizes["1"]


def test_a_page_that_loads_itself_again_keeps_open_parts_and_choices(
    page: Any, studio: str, folder: Path
) -> None:
    """Regression test: a prompt that was being read closed at every step."""
    unfinished(folder / "one", os.getpid())
    page.goto(studio + PAGES["training"])
    page.get_by_text("Prompt", exact=True).click()
    page.locator("select").focus()
    events = folder / "one" / "events.jsonl"
    before = page.locator("h1").element_handle()
    events.write_text(events.read_text())  # as new
    page.wait_for_timeout(2500)
    assert before.evaluate("each => each.isConnected")
    page.locator("select").blur()
    page.wait_for_function("each => !each.isConnected", arg=before)
    assert page.locator("details").first.get_attribute("open") is not None


def test_runs_are_ticked_and_compared(page: Any, studio: str) -> None:
    page.goto(studio)
    for box in page.get_by_role("checkbox").all():
        box.check()
    page.get_by_role("button", name="Compare ticked runs").click()
    page.get_by_role("heading", name="Comparison of 2 runs").wait_for()


def test_a_run_in_progress_is_followed_and_stopped(page: Any, studio: str, folder: Path) -> None:
    unfinished(folder / "one", os.getpid())
    events = folder / "one" / "events.jsonl"
    first = json.loads(events.read_text().splitlines()[0])
    first.pop("checksum")
    events.write_text(f"{json.dumps(first)}\n")
    page.goto(studio + PAGES["overview"])
    page.get_by_text("Searching").wait_for()
    step = {"event": "progress", "job": 0, "note": "7 candidates", "spent": first["spent"]}
    events.write_text(f"{json.dumps(first)}\n{json.dumps({**step, 'at': first['at'] + 9})}\n")
    page.get_by_text("7 candidates").wait_for()
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Stop the run").click()
    page.get_by_text("was asked to stop").wait_for()
    assert (folder / "one" / STOP).exists()


def test_the_list_of_runs_loads_itself_again(page: Any, studio: str, folder: Path) -> None:
    page.goto(studio)
    page.get_by_role("checkbox").first.check()
    shutil.copytree(folder / "one", folder / "three")
    page.get_by_role("link", name="three").wait_for()
    name = page.evaluate("document.activeElement.value")
    assert page.locator(f'input[value="{name}"]').is_checked()
    assert page.locator("input:checked").count() == 1
    before = page.locator("h1").element_handle()
    page.wait_for_timeout(4000)  # nothing is replaced without a change
    assert before.evaluate("each => each.isConnected")
    (folder / "three").rename(folder / "four")
    page.get_by_role("link", name="four").wait_for()


def test_a_refused_label_is_told(page: Any, studio: str, folder: Path) -> None:
    page.goto(studio + PAGES["label"])
    told: list[str] = []
    page.on("dialog", lambda dialog: accept(dialog, told))
    (folder / "one" / "labels").write_text("a file where the folder should be")
    page.keyboard.press("1")
    page.wait_for_timeout(1000)
    assert told


def test_hostile_texts_do_nothing(
    page: Any, studio: str, folder: Path, problems: list[str]
) -> None:
    hostile = "<img src=x onerror=alert(1)><script>alert(2)</script>'); alert(3); ('"
    change(folder / "one", "traces.jsonl", "unknown", hostile)
    change(folder / "one", "candidates.jsonl", "source 1", hostile)
    dialogs: list[str] = []
    page.on("dialog", lambda dialog: accept(dialog, dialogs))
    for address in PAGES.values():
        page.goto(studio + address)
    assert dialogs == []
    assert not [text for text in problems if "404" not in text]
