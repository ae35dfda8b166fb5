"""Safe loading of models from untrusted folders, without executing anything in them.

All models, tokenizers and embedding models are loaded through this module. The libraries are
configured not to run Python code and not to read pickled weights. Settings that some or all of
their versions would still act on are rejected before the folder is loaded: a module class named by
its import path, attention kernels to download, an adapter that names another base, weights of
another format under any name, and arguments that disable these defences.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

from compound.core.errors import CompoundError

if TYPE_CHECKING:
    import torch
    from sentence_transformers import SentenceTransformer
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


PICKLED = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib")
SAFE = ".safetensors"
ARGUMENTS = {
    "model_kwargs",
    "model_args",
    "processor_kwargs",
    "tokenizer_args",
    "config_kwargs",
    "config_args",
}
"""Settings of sentence-transformers that it passes on to transformers."""
HARMLESS = {
    "add_pooling_layer",
    "attn_implementation",
    "do_lower_case",
    "dtype",
    "model_max_length",
    "padding_side",
    "torch_dtype",
    "truncation_side",
    "use_cache",
    "use_fast",
    "use_safetensors",
}
KERNELS = (None, "", "eager", "sdpa", "grouped_mm", "batched_mm")  # those of transformers
MODULES = (
    "Transformer",
    "Pooling",
    "Normalize",
    "Dense",
    "Dropout",
    "LayerNorm",
    "StaticEmbedding",
)
_MODULE = re.compile(rf"sentence_transformers(\.[a-z_]+)*\.({'|'.join(MODULES)})")
_ACTIVATION = re.compile(r"torch\.nn\.modules\.(activation|linear)\.\w+")
_MAX_BYTES = 16 * 2**20  # of a settings file; typical ones have a few kilobytes


def load_causal(
    folder: Path,
    dtype: str,
    *,
    device: str = "cpu",
    attention: str = "auto",
    quantization: str = "none",
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the causal language model in a folder onto a device, and its tokenizer.

    ``auto`` leaves the choice of attention kernels to transformers.

    Raises:
        CompoundError: the folder contains code or unsafe settings; see `check_model_folder`.
        OSError, ValueError: transformers cannot load the folder.
    """
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(folder)
    options = _options(dtype, device, attention, quantization)
    model = AutoModelForCausalLM.from_pretrained(
        folder, use_safetensors=True, trust_remote_code=False, local_files_only=True, **options
    )
    return (model if quantization != "none" else model.to(device)), tokenizer


def load_encoder(
    folder: Path, dtype: str, *, device: str = "cpu", attention: str = "auto"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model in a folder without its head, and its tokenizer; raises like `load_causal`."""
    from transformers import AutoModel

    tokenizer = load_tokenizer(folder)
    options = _options(dtype, device, attention)
    model = AutoModel.from_pretrained(
        folder, use_safetensors=True, trust_remote_code=False, local_files_only=True, **options
    )
    return model.to(device), tokenizer


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer in a folder; raises like `load_causal`."""
    from transformers import AutoTokenizer

    check_model_folder(folder)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        folder, trust_remote_code=False, local_files_only=True
    )
    return tokenizer


def load_empty(
    folder: Path, *, causal: bool = True, dtype: str = "", attention: str = "auto"
) -> PreTrainedModel:
    """Return the model in a folder without its weights, on the meta device; raises like `load_causal`.

    Only the configuration is read, and no memory is allocated for weights.
    """
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    check_model_folder(folder)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    kind = AutoModelForCausalLM if causal else AutoModel
    with torch.device("meta"):
        made: PreTrainedModel = kind.from_config(
            config, trust_remote_code=False, **_options(dtype, "meta", attention)
        )
    made.tie_weights()
    return made


def load_embedder(folder: Path, device: str | None) -> SentenceTransformer:
    """Load the sentence-transformers model in a folder; raises like `load_causal`."""
    from sentence_transformers import SentenceTransformer

    check_model_folder(folder)
    return SentenceTransformer(
        str(folder),
        device=device,
        trust_remote_code=False,
        local_files_only=True,
        model_kwargs={"use_safetensors": True, "weights_only": True},
    )


def check_model_folder(folder: Path) -> None:
    """Check that a folder cannot make a library run code; a path that is not a folder is accepted.

    Raises:
        CompoundError: the folder contains only pickled weights, or a setting that refers to code or
            to files outside the folder.
    """
    for root, names, files in os.walk(folder):
        place = Path(root)
        _check_kinds(place, names, files)
        pickled = sorted(name for name in files if name.endswith(PICKLED))
        if pickled and not any(name.endswith(SAFE) for name in files):
            raise CompoundError(
                f"{place} holds pickled weights ({pickled[0]}), which can run code",
                hint="save the model as safetensors: model.save_pretrained(folder, safe_serialization=True)",
            )
        if "adapter_config.json" in files:
            raise CompoundError(
                f"{place} is an adapter, not a model",
                hint="give the base as the model, and the adapter as the component's weights",
            )
        for name in sorted(files):
            if name.endswith(".index.json"):
                _check_index(place / name)
            elif name.endswith("config.json"):
                _check_settings(place / name)
        if "modules.json" in files:
            _check_modules(place)


def explain(error: Exception) -> str:
    """Return the reason why a library could not load a folder, without its advice to trust remote code."""
    text = str(error)
    if "trust_remote_code" in text:
        return "it requires custom Python code, which is never run; use a model that transformers supports"
    return text


def _check_kinds(place: Path, folders: list[str], files: list[str]) -> None:
    """Reject links to folders, which the check does not follow, and files that block when read (pipes)."""
    for name in folders:
        if (place / name).is_symlink():
            raise CompoundError(
                f"{place / name} is a link to a folder", hint="replace it by the folder"
            )
    for name in files:
        if (place / name).exists() and not (place / name).is_file():
            raise CompoundError(f"{place / name} is not a regular file", hint="remove it")


def _check_index(file: Path) -> None:
    """Reject a weight index that names files of another format."""
    index = _read(file)
    weights = index.get("weight_map") if isinstance(index, Mapping) else None
    for value in weights.values() if isinstance(weights, Mapping) else ():
        _require_safetensors(file, value)


def _check_settings(file: Path) -> None:
    """Reject settings that name downloaded code, other weights, or unsafe arguments of loaders."""
    for key, value in _entries(_read(file)):
        if key.strip("_") in ("attn_implementation", "experts_implementation"):
            named = value.values() if isinstance(value, Mapping) else [value]
            if foreign := [each for each in named if each not in KERNELS]:
                raise CompoundError(
                    f"{file}: {key} names {foreign[0]!r}, which would download code",
                    hint=f"remove {key}; the engine's setting attn_implementation chooses the kernels",
                )
        if key == "transformers_weights" and value is not None:
            _require_safetensors(file, value)
        if key in ARGUMENTS and isinstance(value, Mapping):
            wrong = [
                name for name, given in value.items() if name not in HARMLESS or given in ({}, [])
            ]
            if wrong or value.get("use_safetensors", True) is not True:
                name = wrong[0] if wrong else "use_safetensors"
                raise CompoundError(
                    f"{file}: {key} passes {name}={value[name]!r} to the library that loads the model",
                    hint=f"remove it; possible: {', '.join(sorted(HARMLESS))}",
                )


def _require_safetensors(file: Path, name: object) -> None:
    if not (
        isinstance(name, str) and name.endswith((SAFE, f"{SAFE}.index.json")) and _is_plain(name)
    ):
        raise CompoundError(
            f"{file} names {name!r}, which is not a safetensors file in the same folder; other formats can "
            "run code",
            hint="save the model as safetensors: model.save_pretrained(folder, safe_serialization=True)",
        )


def _is_plain(name: str) -> bool:
    return name not in {"", ".", ".."} and not re.search(r"[/\\\x00]", name)


def _check_modules(folder: Path) -> None:
    """Reject modules of an embedding model outside of sentence-transformers or outside of the folder."""
    file = folder / "modules.json"
    modules = _read(file)
    for module in modules if isinstance(modules, list) else [modules]:
        kind, path = (
            (module.get("type"), module.get("path"))
            if isinstance(module, Mapping)
            else (None, None)
        )
        if not (isinstance(kind, str) and _MODULE.fullmatch(kind)):
            raise CompoundError(
                f"{file} names the class {kind!r}, which is not allowed",
                hint=f"possible: {', '.join(MODULES)} of sentence_transformers",
            )
        if not isinstance(path, str) or (path and not _is_plain(path)):
            raise CompoundError(f"{file} names {path!r}, which is not a subfolder of its folder")
        if kind.endswith(".Dense"):
            _check_activation(folder / path / "config.json")


def _check_activation(file: Path) -> None:
    for name, activation in _entries(_read(file)):
        if name == "activation_function" and not _ACTIVATION.fullmatch(str(activation)):
            raise CompoundError(
                f"{file}: {name} names {activation!r}, which is not allowed",
                hint="possible: the classes of torch.nn.modules.activation, such as Tanh",
            )


def _entries(value: object) -> Iterator[tuple[str, object]]:
    """Yield every key and value of a JSON value at any depth; iterative, as nesting may be deep."""
    waiting = [value]
    while waiting:
        found = waiting.pop()
        if isinstance(found, Mapping):
            yield from found.items()
            waiting.extend(found.values())
        elif isinstance(found, list):
            waiting.extend(found)


def _read(file: Path) -> object:
    """Return a JSON file's value, or None if the file does not exist."""
    if not file.exists():
        return None
    try:
        with file.open("rb") as opened:
            text = opened.read(_MAX_BYTES + 1)
        return cast(
            "object", json.loads(text[:_MAX_BYTES])
        )  # a longer file is truncated: invalid JSON
    except (OSError, ValueError, RecursionError) as error:
        raise CompoundError(
            f"{file} cannot be read: {error}", hint="it must be a JSON file"
        ) from None


def _options(
    dtype: str, device: str, attention: str, quantization: str = "none"
) -> dict[str, object]:
    """Return the arguments of ``from_pretrained`` for settings other than the defaults."""
    options: dict[str, object] = {"dtype": _dtype(dtype)} if dtype else {}
    if attention != "auto":
        options["attn_implementation"] = attention
    if quantization != "none":
        from transformers import BitsAndBytesConfig

        # A quantized model cannot be moved between devices, so it is loaded where it will be used.
        options["device_map"] = {"": device}
        options["quantization_config"] = (
            BitsAndBytesConfig(load_in_8bit=True)
            if quantization == "8bit"
            else BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=_dtype(dtype)
            )
        )
    return options


def _dtype(name: str) -> torch.dtype:
    import torch

    return getattr(torch, name)
