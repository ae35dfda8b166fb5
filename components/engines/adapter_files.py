"""Reading a LoRA adapter from a folder in peft's format. Nothing in the folder is executed.

An adapter that was made in a way that is not understood here would sample something else than what was
trained, so it is refused, by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, TypeAlias, TypedDict, cast

from compound.errors import ConfigurationError
from compound.security.limits import ARTIFACT
from compound.security.untrusted import UntrustedFolder
from compound.storage.records import Damaged, parse

if TYPE_CHECKING:
    import torch

Addition: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"  # A (r, in), and B (out, r) times alpha / r

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX, SIDES = "base_model.model.", (".lora_A.weight", ".lora_B.weight")
# These say how an adapter was made, or what its tensors show anyway. Any other setting must be empty.
SILENT = {
    *("auto_mapping", "base_model_name_or_path", "eva_config", "exclude_modules", "fan_in_fan_out"),
    *("inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha"),
    *("lora_dropout", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "revision"),
    *("target_modules", "task_type"),
}
STARTS = (True, False, "gaussian", "orthogonal", "eva")  # other ways to start change the base as well


def read_adapter(folder: Path, layers: Mapping[str, tuple[int, int]]) -> dict[str, Addition]:
    """Return A (r, in) and B (out, r) times alpha / r, in float32, for each layer that is adapted.

    Whether the adapter was trained on this very base cannot be seen, only whether it fits.

    Args:
        folder: with ``adapter_config.json`` and ``adapter_model.safetensors``.
        layers: the base's linear layers by name: numbers of inputs and of outputs.

    Raises:
        ConfigurationError: a file is missing or unreadable, the adapter is of a kind that is not supported,
            or it does not fit the layers.
    """
    config = read_config(folder)
    sides: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in read_tensors(folder).items():
        name, dot, side = key.removeprefix(PREFIX).partition(".lora_")
        if not key.startswith(PREFIX) or dot + side not in SIDES:
            raise _refused(folder, f"holds {key}, which is no part of a low-rank addition to a linear layer")
        sides.setdefault(name, {})[dot + side] = tensor.float()
    if other := sides.keys() - layers.keys():
        raise _misfit(folder, f"adapts {_few(other)}: the model has no such linear layer")
    if lacking := _targets(config, layers) - sides.keys():
        raise _misfit(folder, f"has nothing for {_few(lacking)}, which its target_modules name in the model")
    return {name: _addition(folder, name, found, layers[name], config) for name, found in sides.items()}


class LoRAConfig(TypedDict):
    """What is read of an adapter's settings."""

    r: int
    lora_alpha: float
    target_modules: NotRequired[object]
    layers_to_transform: NotRequired[object]
    exclude_modules: NotRequired[object]


def _addition(
    folder: Path,
    name: str,
    sides: Mapping[str, torch.Tensor],
    shape: tuple[int, int],
    config: LoRAConfig,
) -> Addition:
    """Check one layer's matrices, and scale them."""
    if sides.keys() != set(SIDES):
        raise _refused(folder, f"has one of two matrices for {name}")
    a, b = (sides[side] for side in SIDES)
    rank, (inputs, outputs) = config["r"], shape
    if a.shape != (rank, inputs) or b.shape != (outputs, rank):
        raise _misfit(
            folder,
            f"has matrices of shapes {tuple(a.shape)} and {tuple(b.shape)} for {name}, where rank {rank} and "
            f"the model want {(rank, inputs)} and {(outputs, rank)}",
        )
    if not (a.isfinite().all() and b.isfinite().all()):
        raise _refused(folder, f"holds numbers that are not finite, for {name}")
    return a, b * (config["lora_alpha"] / rank)


def _targets(config: LoRAConfig, layers: Mapping[str, object]) -> set[str]:
    """Return the layers that must be adapted, as far as the settings name them without exceptions."""
    targets = config.get("target_modules")
    exceptions = [config.get("layers_to_transform"), config.get("exclude_modules")]
    if not isinstance(targets, list) or exceptions != [None, None]:
        return set()
    return {name for name in layers if any(f".{name}".endswith(f".{target}") for target in targets)}


def read_config(folder: Path) -> LoRAConfig:
    """Return an adapter's settings, if they are those of a plain LoRA.

    Raises:
        ConfigurationError: they are missing, unreadable, or those of something else.
    """
    files = UntrustedFolder(folder, error=ConfigurationError)
    if files.kind(CONFIG) is None:
        raise _refused(folder, f"has no {CONFIG}")
    try:
        config = parse(files.read(CONFIG))
    except Damaged as error:
        raise _refused(folder, f"has a {CONFIG} that cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise _refused(folder, f"has a {CONFIG} that is no mapping")
    if (kind := config.get("peft_type")) != "LORA":
        raise _refused(folder, f"is of the kind {kind!r}; only 'LORA' is supported")
    for key in sorted(config.keys() - SILENT):
        if (value := config[key]) and (key, value) != ("bias", "none"):
            raise _refused(folder, f"has {key}={value!r}, which is not supported", f"train without {key}")
    if (start := config.get("init_lora_weights", True)) not in STARTS:
        raise _refused(folder, f"has init_lora_weights={start!r}, which changes the base model as well")
    for key, kinds in (("r", int), ("lora_alpha", int | float)):
        value = config.get(key)
        if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < math.inf:
            raise _refused(folder, f"has {key}={value!r}, which must be a positive number")
    return cast("LoRAConfig", config)  # both numbers were checked


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return an adapter's tensors, read into memory: a file that is only mapped could change.

    Raises:
        ConfigurationError: they are missing or unreadable.
    """
    import safetensors
    import safetensors.torch

    files = UntrustedFolder(folder, error=ConfigurationError)
    if files.kind(WEIGHTS) is None:
        hint = "weights are read from safetensors only; other formats can run code"
        raise _refused(folder, f"has no {WEIGHTS}", hint)
    try:
        # Unlike torch.load, this parses a header of JSON and copies numbers: nothing is unpickled.
        tensors: dict[str, torch.Tensor] = safetensors.torch.load(files.read(WEIGHTS, ARTIFACT))
    except (ValueError, KeyError, safetensors.SafetensorError) as error:
        raise _refused(folder, f"has a {WEIGHTS} that cannot be read: {error}") from error
    if not tensors:
        raise _refused(folder, f"has a {WEIGHTS} that holds nothing")
    return tensors


def _refused(folder: Path, what: str, hint: str = "") -> ConfigurationError:
    return ConfigurationError(f"the adapter {folder} {what}", hint=hint)


def _misfit(folder: Path, what: str) -> ConfigurationError:
    return _refused(folder, what, "it was trained on another base model: sample with that one")


def _few(names: Iterable[str]) -> str:
    first, *others = sorted(names)
    return f"{first} and {len(others)} more" if others else first
