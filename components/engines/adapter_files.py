"""LoRA adapters read from a folder in peft's format, without executing anything in the folder.

An adapter with an unsupported setting would sample from another policy than the trained one, so it is
rejected with an error that names the setting.
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
# These describe how an adapter was trained, or repeat what its tensors show. Other settings must be empty.
IGNORED_SETTINGS = {
    *("auto_mapping", "base_model_name_or_path", "eva_config", "exclude_modules", "fan_in_fan_out"),
    *("inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha"),
    *("lora_dropout", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "revision"),
    *("target_modules", "task_type"),
}
SUPPORTED_INITS = (True, False, "gaussian", "orthogonal", "eva")  # other initializations also change the base


def read_adapter(folder: Path, layers: Mapping[str, tuple[int, int]]) -> dict[str, Addition]:
    """Return A (r, in) and B (out, r) times alpha / r, in float32, for each adapted layer.

    This checks that the adapter fits the base, but cannot verify that it was trained on the same base.

    Args:
        folder: a folder with ``adapter_config.json`` and ``adapter_model.safetensors``.
        layers: the base's linear layers by name, each with its number of inputs and of outputs.

    Raises:
        ConfigurationError: a file is missing or unreadable, the kind of adapter is not supported, or the
            adapter does not fit the layers.
    """
    config = read_config(folder)
    sides: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in read_tensors(folder).items():
        name, dot, side = key.removeprefix(PREFIX).partition(".lora_")
        if not key.startswith(PREFIX) or dot + side not in SIDES:
            raise _refused(folder, f"holds {key}, which is not a LoRA matrix of a linear layer")
        sides.setdefault(name, {})[dot + side] = tensor.float()
    if other := sides.keys() - layers.keys():
        raise _misfit(folder, f"adapts {_summarize(other)}: the model has no such linear layer")
    if lacking := _targets(config, layers) - sides.keys():
        raise _misfit(folder, f"has no matrices for {_summarize(lacking)}, which its target_modules name")
    return {name: _addition(folder, name, factors, layers[name], config) for name, factors in sides.items()}


class LoRAConfig(TypedDict):
    """Settings that are read from an adapter's configuration file."""

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
    """Check the two matrices of a layer, and scale B."""
    if sides.keys() != set(SIDES):
        raise _refused(folder, f"has only one of two matrices for {name}")
    a, b = (sides[side] for side in SIDES)
    rank, (inputs, outputs) = config["r"], shape
    if a.shape != (rank, inputs) or b.shape != (outputs, rank):
        raise _misfit(
            folder,
            f"has matrices of shapes {tuple(a.shape)} and {tuple(b.shape)} for {name}, but rank {rank} and "
            f"the model require {(rank, inputs)} and {(outputs, rank)}",
        )
    if not (a.isfinite().all() and b.isfinite().all()):
        raise _refused(folder, f"holds non-finite numbers for {name}")
    return a, b * (config["lora_alpha"] / rank)


def _targets(config: LoRAConfig, layers: Mapping[str, object]) -> set[str]:
    """Return the layers that must be adapted; empty if the settings have exceptions or do not list them."""
    targets = config.get("target_modules")
    exceptions = [config.get("layers_to_transform"), config.get("exclude_modules")]
    if not isinstance(targets, list) or exceptions != [None, None]:
        return set()
    return {name for name in layers if any(f".{name}".endswith(f".{target}") for target in targets)}


def read_config(folder: Path) -> LoRAConfig:
    """Read an adapter's settings, and check that they describe a plain LoRA.

    Raises:
        ConfigurationError: the settings are missing, unreadable or not supported.
    """
    files = UntrustedFolder(folder, error=ConfigurationError)
    if files.kind(CONFIG) is None:
        raise _refused(folder, f"has no {CONFIG}")
    try:
        config = parse(files.read(CONFIG))
    except Damaged as error:
        raise _refused(folder, f"has a {CONFIG} that cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise _refused(folder, f"has a {CONFIG} that is not a JSON object")
    if (kind := config.get("peft_type")) != "LORA":
        raise _refused(folder, f"is of the kind {kind!r}; only 'LORA' is supported")
    for key in sorted(config.keys() - IGNORED_SETTINGS):
        if (value := config[key]) and (key, value) != ("bias", "none"):
            raise _refused(folder, f"has {key}={value!r}, which is not supported", f"train without {key}")
    if (start := config.get("init_lora_weights", True)) not in SUPPORTED_INITS:
        raise _refused(folder, f"has init_lora_weights={start!r}, which changes the base model as well")
    for key, kinds in (("r", int), ("lora_alpha", int | float)):
        value = config.get(key)
        if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < math.inf:
            raise _refused(folder, f"has {key}={value!r}, which must be a positive number")
    return cast("LoRAConfig", config)  # both required fields were checked


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Read an adapter's tensors into memory; a memory-mapped file could change after its check.

    Raises:
        ConfigurationError: the tensors are missing or unreadable.
    """
    import safetensors
    import safetensors.torch

    files = UntrustedFolder(folder, error=ConfigurationError)
    if files.kind(WEIGHTS) is None:
        hint = "only safetensors files are read, because other formats can run code"
        raise _refused(folder, f"has no {WEIGHTS}", hint)
    try:
        # Unlike torch.load, this parses a JSON header and copies numbers, without unpickling.
        tensors: dict[str, torch.Tensor] = safetensors.torch.load(files.read(WEIGHTS, ARTIFACT))
    except (ValueError, KeyError, safetensors.SafetensorError) as error:
        raise _refused(folder, f"has a {WEIGHTS} that cannot be read: {error}") from error
    if not tensors:
        raise _refused(folder, f"has a {WEIGHTS} without tensors")
    return tensors


def _refused(folder: Path, reason: str, hint: str = "") -> ConfigurationError:
    return ConfigurationError(f"the adapter {folder} {reason}", hint=hint)


def _misfit(folder: Path, reason: str) -> ConfigurationError:
    return _refused(folder, reason, "it was trained on another base model; sample with that model")


def _summarize(names: Iterable[str]) -> str:
    first, *others = sorted(names)
    return f"{first} and {len(others)} more" if others else first
