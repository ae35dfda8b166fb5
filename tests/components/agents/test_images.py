"""Images as values, in YAML files and in data files."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

import compound as cp
from compound.core.errors import DataError
from compound.core.image import MAX_BYTES, SIGNATURES
from compound.core.loops import Sessions
from compound.evaluation.dataset import Dataset
from compound.evaluation.examples import read_examples
from compound.graph.space import Demo
from compound.graph.types import convert, format_type, parse
from compound.testing import ScriptedLM

FILES = {
    "image/png": b"\x89PNG\r\n\x1a\n..",
    "image/jpeg": b"\xff\xd8\xff\xe0..",
    "image/gif": b"GIF89a..",
    "image/webp": b"RIFF\n\0\0\0WEBP..",
}
DOT = cp.Image.from_bytes(FILES["image/png"])


@pytest.mark.parametrize("kind", SIGNATURES)
def test_the_format_is_recognized(kind: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(FILES[kind])
    assert cp.Image.from_file(tmp_path / "x").media_type == kind


@given(st.binary(max_size=50), st.sampled_from(sorted(FILES)))
def test_the_json_form_is_lossless(rest: bytes, kind: str) -> None:
    image = cp.Image.from_bytes(FILES[kind] + rest)
    assert convert(cp.Image, json.loads(json.dumps(image.model_dump(mode="json")))) == image
    assert convert(cp.Image, image.data_url) == image


@pytest.mark.parametrize(
    "wrong",
    [
        {"media_type": "image/png", "data": base64.b64encode(b"GIF89a").decode()},
        {"media_type": "image/svg+xml", "data": "PHN2Zz4="},
        {"media_type": "image/png", "data": "%%%"},
        {"media_type": "image/png", "data": ""},
        "http://127.0.0.1/cat.png",
        "data:text/html;base64,PGI+",
    ],
)
def test_other_data_is_rejected(wrong: Any) -> None:
    with pytest.raises(ValidationError):
        cp.Image.model_validate(wrong)


def test_the_size_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "large.gif"
    path.write_bytes(b"GIF89a" + bytes(MAX_BYTES))
    with pytest.raises(ValueError, match=r"large\.gif.*at most"):
        cp.Image.from_file(path)


class Page(BaseModel):
    title: str
    photo: cp.Image


@dataclasses.dataclass
class Album:
    photos: list[cp.Image]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (Page(title="t", photo=DOT), '{"photo":"[image 1]","title":"t"}'),
        (Album([DOT, DOT]), '{"photos":["[image 1]","[image 2]"]}'),
        ({"a": DOT}, '{"a":"[image 1]"}'),
        ({"a": DOT.model_dump(mode="json")}, '{"a":"[image 1]"}'),
        ((DOT, "text"), "\n[1] [image 1]\n[2] text"),
    ],
)
def test_images_within_values_are_sent_as_images(value: Any, shown: str) -> None:
    lm = ScriptedLM(["yes"], takes_images=True)
    node = cp.LLM("look", prompt="Look.")(page=cp.Input("page", type(value)))
    cp.run(cp.System("s", {"y": node}, lm="m"), {"page": value}, engines={"m": lm})
    (message,) = lm.requests[0].messages
    space = "" if shown.startswith("\n") else " "
    assert message.content == (f"Look.\n\nPage:{space}{shown}", *message.images)
    assert set(message.images) == {DOT}


def test_images_of_demonstrations_and_results_of_tools_are_described() -> None:
    @cp.tool
    def look() -> list[cp.Image]:
        """Return a photo."""
        return [DOT]

    demo: Demo = {"inputs": {"page": DOT}, "outputs": {"output": "a dot"}}
    text = (
        cp.LLM("look", demos=[demo])
        .messages({"page": "x"}, {"prompt": "", "demos": [demo]})[0]
        .text
    )
    assert text == f"Page: {DOT.label}\nAnswer: a dot\n\nPage: x"
    assert asyncio.run(look.answer("{}", Sessions())) == json.dumps([DOT.label])


class TestData:
    @staticmethod
    def folder(tmp_path: Path, value: object) -> Dataset:
        folder = tmp_path / "data"
        (folder / "photos").mkdir(parents=True)
        (folder / "photos" / "dot.png").write_bytes(DOT.data)
        (folder / "photos" / "note.png").write_text("no image")
        (tmp_path / "secret.png").write_bytes(DOT.data)
        (folder / "link.png").symlink_to(tmp_path / "secret.png")
        (folder / "train.jsonl").write_text(json.dumps({"photo": value, "answer": "dot"}) + "\n")
        return Dataset(folder)

    @pytest.mark.parametrize("value", ["photos/dot.png", DOT.data_url, DOT.model_dump(mode="json")])
    def test_paths_and_json_forms(self, tmp_path: Path, value: object) -> None:
        (example,) = read_examples(self.folder(tmp_path, value), "train", {"photo": cp.Image})
        assert convert(cp.Image, example.inputs["photo"]) == DOT

    def test_lists_of_paths(self, tmp_path: Path) -> None:
        data = self.folder(tmp_path, ["photos/dot.png", "photos/dot.png"])
        (example,) = read_examples(data, "train", {"photo": list[cp.Image]})
        assert example.inputs["photo"] == [DOT, DOT]

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ("../secret.png", "below the folder"),
            ("/etc/hostname", "below the folder"),
            ("link.png", "link"),
            ("photos/none.png", "no image 'photos/none.png'"),
            ("photos", "no image 'photos'"),
            ("photos/note.png", "no image; supported"),
        ],
    )
    def test_paths_may_not_leave_the_folder(self, tmp_path: Path, value: str, message: str) -> None:
        with pytest.raises(DataError, match=message) as error:
            read_examples(self.folder(tmp_path, value), "train", {"photo": cp.Image})
        assert "photo" in str(error.value)


YAML = """
system: look
lm: {model}
inputs: {{photo: Image}}
components:
  see:
    llm: {{prompt: Name it.}}
    in: {{photo: $photo}}
outputs: {{answer: $see}}
data: {{path: data, valid: train, test: null}}
metric: {{exact_match: {{output: answer, gold: answer}}}}
"""


def test_check_rejects_a_model_without_images(tmp_path: Path, cli: Any) -> None:
    TestData.folder(tmp_path, "photos/dot.png")
    (tmp_path / "dev.jsonl").write_text("")
    (tmp_path / "look.yaml").write_text(YAML.format(model="smollm2"))
    ran = cli("check", str(tmp_path / "look.yaml"))
    assert ran.code == 2
    assert (
        "'see' has images among its inputs: the model 'smollm2' does not take images"
        in ran.out + ran.err
    )


def test_the_type_has_a_spelling() -> None:
    assert parse("list[Image] | None") == list[cp.Image] | None
    assert format_type(dict[str, cp.Image]) == "dict[str, Image]"
