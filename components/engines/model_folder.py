"""Loading models from folders that may come from someone else: nothing in a folder is executed.

Every model, tokenizer and embedding is opened here. The libraries are told not to run Python code and not to
read pickled weights. What they would still act on, in some versions or in all, is refused before they see the
folder: a module class named by its import path, attention kernels that are downloaded, an adapter that names
another base.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from compound.errors import CompoundError

PICKLED = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt", "*.joblib")
MODULES = ("Transformer", "Pooling", "Normalize", "Dense", "Dropout", "LayerNorm", "StaticEmbedding")
_MODULE = re.compile(rf"sentence_transformers(\.[a-z_]+)*\.({'|'.join(MODULES)})")
_ACTIVATION = re.compile(r"torch\.nn\.modules\.(activation|linear)\.\w+")
_MAX_BYTES = 16 * 2**20  # of a settings file; real ones have a few kilobytes


def load_causal(folder: Path, dtype: str) -> tuple[Any, Any]:
    """Return the causal language model in a folder and its tokenizer.

    Raises:
        CompoundError: the folder holds what is not loaded from a foreign folder.
        OSError, ValueError: transformers cannot load it.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    check_model_folder(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=_dtype(dtype), trust_remote_code=False, use_safetensors=True, local_files_only=True
    )
    return model, tokenizer


def load_encoder(folder: Path, dtype: str) -> tuple[Any, Any]:
    """Return the model in a folder without its head, and its tokenizer; raises as `load_causal`."""
    from transformers import AutoModel, AutoTokenizer

    check_model_folder(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    model = AutoModel.from_pretrained(
        folder, dtype=_dtype(dtype), trust_remote_code=False, use_safetensors=True, local_files_only=True
    )
    return model, tokenizer


def load_embedder(folder: Path, device: str | None) -> Any:
    """Return the sentence-transformers model in a folder; raises as `load_causal`."""
    from sentence_transformers import SentenceTransformer

    check_model_folder(folder)
    return SentenceTransformer(
        str(folder),
        device=device,
        trust_remote_code=False,
        local_files_only=True,
        model_kwargs={"use_safetensors": True},
    )


def check_model_folder(folder: Path) -> None:
    """Refuse a folder that asks a library to run code; a path that is no folder passes.

    Raises:
        CompoundError: it holds pickled weights only, or a setting that leads to code from elsewhere.
    """
    for place in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        pickled = sorted(path.name for pattern in PICKLED for path in place.glob(pattern))
        if pickled and not any(place.glob("*.safetensors")):
            raise CompoundError(
                f"{place} holds pickled weights ({pickled[0]}), which can run code",
                hint="save the model as safetensors: model.save_pretrained(folder, safe_serialization=True)",
            )
    if (folder / "adapter_config.json").exists():
        raise CompoundError(
            f"{folder} is an adapter, which names its base model itself",
            hint="name the base as the model, and the adapter as the component's weights",
        )
    for name in ("config.json", "sentence_bert_config.json"):
        _check_settings(folder / name)
    _check_modules(folder)


def explain(error: Exception) -> str:
    """Return why a library could not load a folder; without its advice to trust the folder's code."""
    text = str(error)
    if "trust_remote_code" in text:
        return "it needs Python code of its own, which is never run; use a model that transformers knows"
    return text


def _check_settings(file: Path) -> None:
    """Refuse settings that name an implementation to be downloaded."""
    for key, value in _entries(_read(file)):
        if key.strip("_").startswith(("attn_implementation", "experts_implementation")) and "/" in str(value):
            raise CompoundError(
                f"{file}: {key} names {value!r}, code that would be downloaded", hint=f"remove {key}"
            )


def _check_modules(folder: Path) -> None:
    """Refuse modules of an embedding model that are not those of sentence-transformers."""
    modules = _read(folder / "modules.json")
    for key, value in _entries(modules):
        if key == "type" and not (isinstance(value, str) and _MODULE.fullmatch(value)):
            raise CompoundError(
                f"{folder / 'modules.json'} names the class {value!r}, which is not imported",
                hint=f"possible: {', '.join(MODULES)} of sentence_transformers",
            )
        if key == "path" and isinstance(value, str) and value:
            file = folder / value / "config.json"
            for name, activation in _entries(_read(file)):
                if name == "activation_function" and not _ACTIVATION.fullmatch(str(activation)):
                    raise CompoundError(
                        f"{file}: {name} names {activation!r}, which is not called",
                        hint="possible: torch.nn.modules.activation.Tanh and the like",
                    )


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield every key and value of a JSON value, however deep."""
    waiting = [value]
    while waiting:
        found = waiting.pop()
        if isinstance(found, Mapping):
            yield from found.items()
            waiting.extend(found.values())
        elif isinstance(found, list):
            waiting.extend(found)


def _read(file: Path) -> Any:
    """Return a JSON file's value, None if there is no such file."""
    if not file.exists():
        return None
    try:
        with file.open("rb") as opened:
            text = opened.read(_MAX_BYTES + 1)
        return json.loads(text[:_MAX_BYTES])  # a longer one is cut, and then no JSON
    except (OSError, ValueError, RecursionError) as error:
        raise CompoundError(f"{file} cannot be read: {error}", hint="it is a JSON file") from None


def _dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)
