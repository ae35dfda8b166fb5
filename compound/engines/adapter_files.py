"""LoRA adapters in folders of peft's format: their files, and the probe that tells them apart on a server.

Nothing in the folder is executed. An adapter with an unsupported setting would sample from another
policy than the trained one, so it is rejected with an error that names the setting.

A server that accepts an adapter but continues with the old weights corrupts training silently: the
samples look right, but their gradients belong to another policy. Each adapter therefore contains a
file ``probe.json``, which its digest covers: n token ids (``tokens``), and the n - 1 log-probabilities
(nats, temperature 1) of each but the first, under this adapter (``logprobs``) and under the weights
that it replaces (``before``). The server's log-probabilities are compared with both. Serving in
bfloat16 adds noise of about 0.06 nats per token (root mean square, SmolLM2 against float32).

1. Their mean distance from ``logprobs`` must be at most `TOLERANCE`.
2. If ``logprobs`` and ``before`` are at least `APART` × `NOISE` apart, they must be nearer to
   ``logprobs``: the midpoint is then 4 standard deviations away, at almost twice the measured noise.
3. Otherwise they must not be identical to those of the base or of an adapter with other weights. One
   training step moves log-probabilities by less than the noise, but a relative change of 1e-6 in the
   weights (the smallest one measured) changes some rounding. Concurrent requests of other processes
   can hide such an identity, but never create one.

An adapter whose ``logprobs`` and ``before`` differ by less than `VISIBLE`, or whose B matrices are
zero, is indistinguishable, and only rule 1 applies. Without a probe, rule 3 is applied to a fixed text.

Several servers behind one address may be in different states. A version is therefore checked
`CHECKS` times, each time over a new connection and with other first tokens, because balancers choose
by connection, by request, or by the start of the prompt. If a share s of the requests goes to servers
without the version, it passes with probability (1 - s)^8: 0.4 % for one of two, 10 % for one of four;
round-robin balancing reaches all of at most 8. Each sampled answer must also name its version as its
model. Not detected: a server that fails or joins after the checks and still answers under the
version's name, and a balancer that routes short prompts differently from chat requests.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeAlias

from compound.core.errors import AdapterNotServed, ConfigurationError
from compound.core.security.limits import ARTIFACT
from compound.core.security.untrusted import UntrustedFolder
from compound.core.storage.records import Damaged, parse
from compound.engines import models

if TYPE_CHECKING:
    import torch


# A (r, in), and B (out, r) times alpha / r
Addition: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"

Settings = Mapping[str, Any]  # of an adapter's configuration file
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX, SIDES = "base_model.model.", (".lora_A.weight", ".lora_B.weight")
# These describe how an adapter was trained, or repeat what its tensors show. Other settings must be
# empty.
IGNORED_SETTINGS = {
    *("auto_mapping", "base_model_name_or_path", "eva_config", "exclude_modules", "fan_in_fan_out"),
    *("inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha"),
    *("lora_dropout", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r"),
    *("revision", "target_modules", "task_type"),
}
# Other initializations also change the base.
SUPPORTED_INITS = (True, False, "gaussian", "orthogonal", "eva")


def read_adapter(folder: Path, layers: Mapping[str, tuple[int, int]]) -> dict[str, Addition]:
    """Return A (r, in) and B (out, r) times alpha / r, in float32, for each adapted layer.

    This checks that the adapter fits the base, but cannot verify that it was trained on the same
    base.

    Raises:
        ConfigurationError: a file is missing or unreadable, the kind of adapter is not supported,
            or the adapter does not fit the layers.
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
        raise _misfit(
            folder, f"has no matrices for {_summarize(lacking)}, which its target_modules name"
        )
    return {
        name: _addition(folder, name, factors, layers[name], config)
        for name, factors in sides.items()
    }


def _addition(
    folder: Path,
    name: str,
    sides: Mapping[str, torch.Tensor],
    shape: tuple[int, int],
    config: Settings,
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


def _targets(config: Settings, layers: Mapping[str, object]) -> set[str]:
    """Return the layers that must be adapted; empty if the settings have exceptions or do not list them."""
    targets = config.get("target_modules")
    exceptions = [config.get("layers_to_transform"), config.get("exclude_modules")]
    if not isinstance(targets, list) or exceptions != [None, None]:
        return set()
    return {name for name in layers if any(f".{name}".endswith(f".{target}") for target in targets)}


def read_config(folder: Path) -> Settings:
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
            raise _refused(
                folder, f"has {key}={value!r}, which is not supported", f"train without {key}"
            )
    if (start := config.get("init_lora_weights", True)) not in SUPPORTED_INITS:
        raise _refused(
            folder, f"has init_lora_weights={start!r}, which changes the base model as well"
        )
    for key, kinds in (("r", int), ("lora_alpha", int | float)):
        value = config.get(key)
        if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < math.inf:
            raise _refused(folder, f"has {key}={value!r}, which must be a positive number")
    return config


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


FILE = "probe.json"
TEXT = (
    "In 1969 two people walked on the Moon; a third waited above. def add(a, b): return a + b. "
    "Le chat dort. 17 * 3 = 51, and water boils at 100 degrees."
)  # for adapters without a probe: several kinds of text, since an adapter may change only one
NOISE = 0.1  # nats per token, standard deviation
APART = 8.0  # times the noise
CHECKS = 8  # number of checks of a version if several servers may answer at one address
TOLERANCE = 0.3  # nats per token, mean absolute difference
VISIBLE = 1e-4  # nats, largest difference of a token: served numbers change from about half of that


@dataclass(frozen=True, slots=True)
class Probe:
    """Contents of a probe file."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    before: tuple[float, ...]

    @property
    def distinguishable(self) -> bool:
        """Whether the adapter differs from the weights it replaces by more than noise explains."""
        return math.dist(self.logprobs, self.before) >= APART * NOISE

    @property
    def differs(self) -> bool:
        """Whether they differ at all, according to the log-probabilities in the file."""
        return max(_differences(self.logprobs, self.before)) >= VISIBLE


def read_probe(folder: Path) -> Probe | None:
    """Read an adapter's probe; None if it has none.

    Raises:
        ConfigurationError: the file does not have the format above.
    """
    path, files = folder / FILE, UntrustedFolder(folder, error=ConfigurationError)
    if files.kind(FILE) is None:
        return None
    try:
        held: Any = parse(files.read(FILE))
        tokens = tuple(_numbers(held["tokens"], int))
        logprobs = tuple(map(float, _numbers(held["logprobs"], int, float)))
        before = tuple(map(float, _numbers(held["before"], int, float)))
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise ConfigurationError(
            f"{path} is not a probe: {type(error).__name__}: {error}"
        ) from error
    if len(tokens) < 2 or not len(logprobs) == len(before) == len(tokens) - 1:
        raise ConfigurationError(
            f"{path} is not a probe: {len(tokens)} tokens, {len(logprobs)} logprobs and {len(before)} before",
            hint="n tokens, at least 2, require n - 1 numbers in each",
        )
    return Probe(tokens, logprobs, before)


def check_base(
    folder: Path, model: str, logprobs: Callable[[tuple[int, ...]], Sequence[float]]
) -> None:
    """Raise if an adapter that fits a model's layers was trained on another base model.

    Its probe decides, closely if the adapter names another base; without a probe, the name does.

    Args:
        folder: the adapter.
        model: the model's name or folder.
        logprobs: returns the log-probabilities of each token but the first with the adapter.

    Raises:
        ConfigurationError: it was trained on another base model.
    """
    probe = read_probe(folder)
    trained_on = str(read_config(folder).get("base_model_name_or_path") or model)
    names = [Path(models.public_name(name)).name.casefold() for name in (trained_on, model)]
    renamed = names[0] != names[1]
    reason = f"the model is {model}" if renamed and probe is None else ""
    hint = "use the model that it was trained on"
    if probe is not None:
        try:
            check_logprobs(probe, logprobs(probe.tokens), NOISE if renamed else TOLERANCE)
        except (AdapterNotServed, IndexError) as error:
            reason = str(error)
    if renamed:
        hint = f"use {trained_on!r}; if {model} is a copy of it, give its folder that name"
    if reason:
        other = f", {trained_on!r}" if renamed else ""
        raise _refused(folder, f"was trained on another base model{other}: {reason}", hint)


def check_logprobs(probe: Probe, served: Sequence[float], tolerance: float = TOLERANCE) -> bool:
    """Check a server's log-probabilities by rules 1 and 2; return whether rule 2 applied.

    >>> probe = Probe((5, 6, 7), logprobs=(-1.0, -2.0), before=(-3.0, -2.0))
    >>> check_logprobs(probe, (-1.1, -2.1))
    True

    Raises:
        AdapterNotServed: the log-probabilities are not the adapter's.
    """
    distance = fmean(_differences(served, probe.logprobs))
    if probe.distinguishable and math.dist(served, probe.before) <= math.dist(
        served, probe.logprobs
    ):
        raise AdapterNotServed(
            "its log-probabilities are those of the weights that the adapter replaces"
        )
    if not distance <= tolerance:  # also true for NaN
        raise AdapterNotServed(
            f"its log-probabilities differ from the adapter's by {distance:.2g} nats per token, and noise "
            f"explains at most {tolerance}"
        )
    return probe.distinguishable


def rotate(tokens: Sequence[int], by: int) -> tuple[int, ...]:
    """Rotate a probe's text, so that it starts at another token.

    >>> rotate((5, 6, 7), 1)
    (6, 7, 5)
    """
    by %= len(tokens)
    return (*tokens[by:], *tokens[:by])


def check_probe_model(answered: object, expected: str) -> None:
    """Check the model that an answer names; an answer without a name is accepted.

    Raises:
        AdapterNotServed: the answer names another model than the adapter.

    >>> check_probe_model("0123abcd", "0123abcd")
    """
    if answered is not None and answered != expected:
        raise AdapterNotServed(
            f"a server answered with the model {answered!r}, but the adapter {expected} was requested",
            hint="give the address of a single server; adapters do not work with several servers behind one "
            "address",
        )


def weights_digest(folder: Path) -> str:
    """Return the SHA-256 of an adapter's weights, or ``""`` if the usual file is missing."""
    files = UntrustedFolder(folder, error=ConfigurationError)
    if files.kind(WEIGHTS) != "file":
        return ""
    return hashlib.sha256(files.read(WEIGHTS, ARTIFACT)).hexdigest()


def changes_nothing(folder: Path) -> bool:
    """Return whether an adapter has no effect, because all its B matrices are zero.

    The file starts with the length of its JSON header in eight bytes; a zero tensor consists of
    zero bytes.

    Raises:
        ConfigurationError: the weights are not a safetensors file.
    """
    path, files = folder / WEIGHTS, UntrustedFolder(folder, error=ConfigurationError)
    if files.kind(WEIGHTS) != "file":
        return False
    held = files.read(WEIGHTS, ARTIFACT)
    start = 8 + int.from_bytes(held[:8], "little")
    try:
        header: Any = parse(held[8:start])
        places = [entry["data_offsets"] for name, entry in header.items() if "lora_B" in name]
        return not any(held[start + first : start + last].strip(b"\0") for first, last in places)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"{path} is not a safetensors file: {error}") from error


def _numbers(values: object, *kinds: type) -> list[Any]:
    """Return a list after checking that its items are finite numbers of some types."""
    if not isinstance(values, list) or not all(type(value) in kinds for value in values):
        raise TypeError("not a list of numbers")
    if not all(map(math.isfinite, values)):
        raise ValueError("not finite")
    return values


def _differences(some: Sequence[float], others: Sequence[float]) -> list[float]:
    return [abs(one - other) for one, other in zip(some, others, strict=False)]
