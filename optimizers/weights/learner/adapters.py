"""A frozen base model with named LoRA adapters.

The version of an adapter is the digest of the folder it is saved to, in peft's format; samplers
report this digest with every answer. The folder also contains `probe.json`: log-probabilities of a
fixed text, by which an engine can check whether a server really applies the adapter.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from compound.core.errors import (
    CompoundError,
    ConfigurationError,
    DeclarationError,
    suggest_name,
)
from compound.core.storage.artifacts import Reference, copy_into, store_folder
from compound.engines import model_folder, models
from compound.engines.adapter_files import WEIGHTS, check_base, read_config, read_probe
from compound.engines.local import loading
from compound.engines.local.constraints import ConstraintCompiler, end_tokens
from compound.engines.local.devices import Placement
from compound.execution.rng import fork_torch_rng
from compound.graph.component import check_name
from compound.graph.space import Weights
from compound.optimizers.weights.learner.samples import SECTION
from compound.optimizers.weights.learner.targets import check_targets, resolve

if TYPE_CHECKING:
    import torch
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PROBE = "probe.json"
METADATA = {"format": "pt"}
# Do not change: adapter digests and stored probes depend on it.
PROBE_TEXT = "The answer to this question is a short sentence about the weather in a small town."
# nats by which a token's log-probability may differ through rounding, in float32
FLOAT32_TOLERANCE = 1e-2
HALF_TOLERANCE = 0.5  # the same in half precision
Name = str
Load = Callable[[Path, Placement], tuple["PreTrainedModel", "PreTrainedTokenizerBase"]]


class FrozenModel:
    """A causal language model that is not trained: the base of adapters, or a teacher."""

    def __init__(self, model: str, placement: Placement, load: Load = loading.load_base) -> None:
        self.base, self.tokenizer = _load(model, placement, load)
        _check_logits(model, self.base, self.tokenizer)
        # why tokens that several samples begin with are processed for each
        self.unshared = reason_unshared(self.base, self.tokenizer)

    @cached_property
    def constraints(self) -> ConstraintCompiler:
        """The parsers of constrained answers, as in the sampler."""
        size = self.base.get_output_embeddings().weight.shape[0]
        return ConstraintCompiler(self.tokenizer, size, end_tokens(self.base, self.tokenizer))

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.base.device

    @contextmanager
    def using(self, name: Name | None) -> Iterator[PreTrainedModel]:
        """Yield the model, which has no adapters to enable."""
        yield self.base


class Adapters(FrozenModel):
    """A base model with named LoRA adapters, each trained independently."""

    def __init__(
        self,
        model: str,
        spaces: Mapping[Name, Weights],
        *,
        seed: int = 0,
        dtype: str = "auto",
        placement: Placement | None = None,
        checkpointing: bool = False,
        load: Load = loading.load_base,
    ) -> None:
        super().__init__(model, placement or Placement(dtype=dtype), load)
        for space in spaces.values():
            check_targets(self.base, space.targets)
        self.spaces = {
            name: replace(space, targets=tuple(resolve(self.base, space.targets)))
            for name, space in sorted(spaces.items())
        }
        # peft builds module names from adapter names, so it gets aliases that are always valid
        self._alias = {name: f"a{number}" for number, name in enumerate(self.spaces)}
        wrapped = {self._alias[name]: space for name, space in self.spaces.items()}
        self.model = _wrapped(self.base, wrapped, seed)
        self.checkpointing = checkpointing
        if checkpointing:
            loading.checkpoint_layers(self.base, model, "base.gradient_checkpointing")
        self._before: dict[Name, Sequence[float]] = {}
        self._stored: dict[Name, tuple[str, dict[str, str] | None]] = {}
        for name in self.spaces:
            self._stored[name] = hashlib.sha256(self._serialized(name)).hexdigest(), None

    @contextmanager
    def using(self, name: Name | None) -> Iterator[PreTrainedModel]:
        """Yield the model with one adapter enabled, or with all disabled for ``None``."""
        if name is None:
            with self.model.disable_adapter():
                yield self.base
            return
        self.model.set_adapter(self._alias[name])
        # `set_adapter` freezes the others, which still need gradients later
        for other in self._alias:
            for _, parameter in self.parameters(other):
                parameter.requires_grad_(True)
        yield self.base

    def parameters(self, name: Name) -> list[tuple[str, Tensor]]:
        """Return the trainable tensors of an adapter with their names in peft's file format."""
        ends = (f".lora_A.{self._alias[name]}.weight", f".lora_B.{self._alias[name]}.weight")
        found = (
            (key.replace(f".{self._alias[name]}.weight", ".weight"), parameter)
            for key, parameter in self.model.named_parameters()
            if key.endswith(ends)
        )
        return sorted(found, key=lambda item: item[0])

    def version(self, name: Name) -> str:
        """Return the digest of the last stored version of an adapter; ``""`` if it equals the base model."""
        reference = self._stored[name][1]
        return reference["sha256"] if reference else ""

    def save(self, name: Name, folder: Path) -> dict[str, str] | None:
        """Store an adapter as a content-addressed artifact, unless it is as it was last stored."""
        content, reference = self._stored[name]
        weights = self._serialized(name)
        digest = hashlib.sha256(weights)
        if digest.hexdigest() != content:
            reference = store_folder(
                partial(self._write, name, weights), folder, name, {WEIGHTS: digest.digest()}
            )
            self._remember(name, folder / reference["path"])
            self._stored[name] = digest.hexdigest(), reference
        return reference

    def write(self, name: Name, folder: Path) -> None:
        """Write an adapter and its probe to a folder, in peft's format."""
        self._write(name, self._serialized(name), folder)

    def _serialized(self, name: Name) -> bytes:
        from safetensors.torch import save

        tensors = {key: p.detach().float().cpu().contiguous() for key, p in self.parameters(name)}
        content: bytes = save(tensors, METADATA)
        return content

    def _write(self, name: Name, weights: bytes, folder: Path) -> None:
        (folder / WEIGHTS).write_bytes(weights)
        space = self.spaces[name]
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": models.public_name(self.base.name_or_path),
            "r": space.rank,
            "lora_alpha": space.alpha,
            "lora_dropout": 0.0,
            "target_modules": sorted(space.targets),
            "bias": "none",
            "inference_mode": True,
        }
        (folder / "adapter_config.json").write_text(
            json.dumps(config, indent=1) + "\n", encoding="utf-8"
        )
        (folder / PROBE).write_text(json.dumps(self._probe(name)) + "\n", encoding="utf-8")

    def load(self, name: Name, folder: Path) -> None:
        """Load an adapter's weights from a folder, without executing any code in it."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        config, space = read_config(folder), self.spaces[name]
        alpha, rank = config["lora_alpha"], config["r"]
        if alpha * space.rank != space.alpha * rank:
            raise ConfigurationError(
                f"the adapter in {folder} was trained with alpha {alpha} and rank "
                f"{rank}, but {name!r} declares alpha {space.alpha} and rank {space.rank}, "
                "which would scale its output differently",
                hint=f"set weights.lora.alpha to {alpha} and weights.lora.rank to {rank}",
            )
        try:
            tensors = load_file(folder / WEIGHTS)
        except (OSError, SafetensorError) as error:
            raise ConfigurationError(f"{folder} contains no readable adapter: {error}") from None
        own = dict(self.parameters(name))
        if {k: tuple(v.shape) for k, v in tensors.items()} != {
            k: tuple(p.shape) for k, p in own.items()
        }:
            raise ConfigurationError(
                f"the adapter in {folder} has another base or another shape than {name!r} declares",
                hint="use the model it was trained on, and set weights.lora.rank and weights.lora.targets to "
                "the values it was trained with",
            )
        for key, parameter in own.items():
            parameter.data.copy_(tensors[key])

    def start_from(self, name: Name, reference: Reference | None, folder: Path) -> None:
        """Load a stored adapter as the current version of an adapter."""
        if reference is None:
            return
        own = copy_into({**reference, "path": str(folder / reference["path"])}, folder)
        path = folder / own["path"]  # verified by `copy_into`
        self.load(name, path)
        self._stored[name] = hashlib.sha256(self._serialized(name)).hexdigest(), own
        check_base(path, self.base.name_or_path, partial(self._logprobs, name))
        self._remember(name, path)

    def _remember(self, name: Name, folder: Path) -> None:
        """Remember the probe of a stored version, which the next one replaces."""
        if probe := read_probe(folder):
            self._before[name] = probe.logprobs

    def _probe(self, name: Name) -> dict[str, Sequence[int] | Sequence[float]]:
        """Return the log-probabilities of `PROBE_TEXT` with this adapter and with its previous version."""
        tokens = self.tokenizer(PROBE_TEXT, add_special_tokens=False).input_ids
        if len(self._before.get(name, ())) != len(tokens) - 1:
            self._before[name] = self._logprobs(None, tokens)
        logprobs = self._logprobs(name, tokens)
        return {"tokens": tokens, "logprobs": logprobs, "before": self._before[name]}

    def _logprobs(self, name: Name | None, tokens: Sequence[int]) -> list[float]:
        """Return the log-probabilities of tokens but the first with an adapter, or without any."""
        import torch

        from compound.optimizers.weights.learner.forward import forward
        from compound.optimizers.weights.learner.samples import probe_sample

        with torch.no_grad(), self.using(name) as model:
            ran = forward(model, [probe_sample(tokens)], entropy=False)
            found: list[float] = ran.logps[0].tolist()
            return found


def _check_logits(name: str, base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise if the model's logits differ from those computed by `forward`.

    Some families transform logits in ways that `head.OutputLayer` does not implement; training them
    would optimize a different distribution.
    """
    import torch

    from compound.optimizers.weights.learner.forward import forward
    from compound.optimizers.weights.learner.samples import probe_sample

    tokens = tokenizer(PROBE_TEXT, add_special_tokens=False).input_ids
    with torch.no_grad():
        ours = forward(base, [probe_sample(tokens)], entropy=False).logps[0]
        logits = base(input_ids=torch.tensor([tokens], device=base.device)).logits[0, :-1].float()
        targets = torch.tensor(tokens[1:], device=base.device)
        theirs = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    if float((ours - theirs).abs().max()) > HALF_TOLERANCE:
        raise CompoundError(
            f"{name!r} cannot be trained: the way this model family computes logits is not supported",
            hint="use a model of another family",
        )


def reason_unshared(base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return why samples cannot be packed for a model; ``""`` if they can.

    Checks the layers and their attention, then compares packed and separate samples of a text.
    """
    import torch

    from compound.engines.local.kernels import NAME
    from compound.optimizers.weights.learner.forward import forward
    from compound.optimizers.weights.learner.packing import MIN_SHARED, SUFFIX
    from compound.optimizers.weights.learner.samples import probe_sample

    if kinds := loading.unshareable_kinds(base.config):
        return f"the model has layers of {', '.join(kinds)}"
    if (name := base.config._attn_implementation.removesuffix(SUFFIX)) not in ("sdpa", NAME):
        return f"the attention of the model is {name!r}"
    tokens = MIN_SHARED * tuple(tokenizer(PROBE_TEXT, add_special_tokens=False).input_ids)
    samples = [
        probe_sample((*tokens[:MIN_SHARED], *tokens[other:]), prompt=length, answer=answer)
        for other, length in ((0, MIN_SHARED), (1, MIN_SHARED + 3))
        for answer in (1, 2, 4)
    ]
    with torch.no_grad():
        plain = forward(base, samples, entropy=False)
        try:
            packed = forward(base, samples, packed=True, entropy=False)
        except (ImportError, ValueError, TypeError, AttributeError, RuntimeError) as error:
            return f"the model does not support packed samples ({type(error).__name__}: {error})"
    difference = float(((plain.logps - packed.logps) * plain.mask).abs().max())
    # `not <=` also catches NaN
    if not difference <= (HALF_TOLERANCE if base.dtype != torch.float32 else FLOAT32_TOLERANCE):
        return f"log-probabilities of packed samples differ by {difference:.2g} nats"
    return ""


def _wrapped(base: PreTrainedModel, spaces: Mapping[Name, Weights], seed: int) -> PeftModel:
    """Add the adapters to the base model, whose own weights stay frozen."""
    import peft

    model = None
    with fork_torch_rng(seed, "adapters"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        for name, space in spaces.items():
            config = peft.LoraConfig(
                r=space.rank,
                lora_alpha=space.alpha,
                target_modules=list(space.targets),
                bias="none",
            )
            try:
                if model is None:
                    model = peft.get_peft_model(base, config, adapter_name=name)
                else:
                    model.add_adapter(name, config)
            except ValueError as error:
                raise DeclarationError(
                    f"an adapter does not fit its base model: {error}",
                    hint="set weights.lora.targets to names of linear layers of the model",
                ) from None
    if model is None:
        raise DeclarationError("no component has weights to train")
    _compute_in_base_dtype(model)
    return model.eval()


def _compute_in_base_dtype(model: PeftModel) -> None:
    """Make adapters compute in the base model's number format; weights and gradients stay float32.

    By default, peft converts the inputs of adapters to float32 and keeps those for the backward
    pass, which doubles their memory.
    """
    from peft.tuners.lora import LoraLayer

    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            layer.forward = partial(_adapted, layer)


def _adapted(layer: LoraLayer, x: Tensor) -> Tensor:
    import torch
    from torch.nn.functional import linear

    from compound.engines.local.kernels import LinearProduct, PackedLinear

    base, (name,) = layer.base_layer, layer.active_adapters
    if layer.disable_adapters or name not in layer.lora_A:
        return base(x)
    a, b, scale = layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name]
    if type(base) in (torch.nn.Linear, PackedLinear):  # others are quantized
        return LinearProduct.apply(x, base, a, b, scale)
    return base(x) + linear(linear(x, a.to(x.dtype)), b.to(x.dtype)) * scale


def _load(
    name: str, placement: Placement, load: Load = loading.load_base
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    folder = models.resolve(name)
    try:
        model, tokenizer = load(folder, placement)
    except (OSError, ValueError) as error:
        raise CompoundError(f"{name!r} cannot be trained: {model_folder.explain(error)}") from error
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model.eval(), tokenizer


def check_same_tokens(teacher: str, base: str, section: str) -> None:
    """Raise if a teacher reads the tokens of the base model as others; downloads nothing.

    Models that are not on this machine yet are not checked.
    """
    folders = models.find_local(base), models.find_local(teacher)
    if None in folders:
        return
    mine, other = (
        model_folder.load_tokenizer(folder).get_vocab() for folder in filter(None, folders)
    )
    if mine != other:
        different = sum(other.get(token) != number for token, number in mine.items())
        raise DeclarationError(
            f"{section}.teacher {teacher!r} has another tokenizer than {base!r}: of {len(mine):,} and "
            f"{len(other):,} tokens, {max(different, len(other) - len(mine)):,} differ",
            hint="use a larger model of the same family, such as one that differs in size only",
        )


def partition(
    components: Sequence[str], adapters: str | Mapping[str, Sequence[str]], section: str = SECTION
) -> dict[Name, tuple[str, ...]]:
    """Return the components of each adapter.

    >>> partition(["a", "b", "c"], {"ab": ["a", "b"]})
    {'ab': ('a', 'b'), 'c': ('c',)}
    >>> partition(["a", "b"], "shared"), partition(["a"], "each")
    ({'shared': ('a', 'b')}, {'a': ('a',)})
    """
    if adapters == "shared":
        return {"shared": tuple(components)}
    groups = (
        {} if isinstance(adapters, str) else {name: tuple(some) for name, some in adapters.items()}
    )
    named = [component for some in groups.values() for component in some]
    for name, some in groups.items():
        check_name("Adapter", name)
        if not some:
            raise DeclarationError(
                f"{section}.adapters assigns the adapter {name!r} to no component",
                hint="list the components that share it, or remove it",
            )
        if name in components and name not in some:
            raise DeclarationError(
                f"{section}.adapters names an adapter {name!r}, but the component of that name uses another "
                "adapter",
                hint="choose another name for the adapter",
            )
    for component in named:
        if component not in components:
            raise DeclarationError(
                f"{section}.adapters names {component!r}, which has no weights",
                hint=suggest_name(component, components),
            )
        if named.count(component) > 1:
            raise DeclarationError(
                f"{section}.adapters names {component!r} twice",
                hint="list it under one adapter only",
            )
    return groups | {c: (c,) for c in components if c not in named}
