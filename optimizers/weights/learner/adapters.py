"""One frozen base and the adapters trained on it: each with a name, a version, and its own optimizer state.

An adapter's version is the digest of the folder it is saved to, in peft's format: what the sampler says it
sampled with. The folder also holds `probe.json`, by which a server can be asked whether it really serves it.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from compound.components.engines import model_folder, models
from compound.components.engines.local import loading
from compound.errors import CompoundError, ConfigurationError, DeclarationError, MissingExtra
from compound.execution.rng import fork_torch_rng
from compound.graph.component import check_name
from compound.graph.space import Weights
from compound.optimizers.weights.learner.targets import resolve
from compound.storage.artifacts import Reference, kept, put, verified

if TYPE_CHECKING:
    import torch
    from peft import PeftModel
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PROBE = "probe.json"
TEXT = "The quick answer to the question is that nobody knows, since it was never asked before."
SAME = 1e-2  # nats by which it may in float32
NEAR = 0.5  # nats by which a token's log-probability may differ for rounding in half precision
Name = str


class Adapters:
    """A base model with named LoRA adapters, each trained apart.

    Args:
        model: ``smollm2``, a folder, or a hub id.
        spaces: each adapter's name and shape; its targets may be named as a set, see `LoRA`.
        seed: names the random stream of first weights.
        start: adapters to start from, where there are any; others start as the base is.
        dtype: of the base; adapters are in float32.

    Attributes:
        unshared: why equal prompts are not read once on this base; "" where they are.
    """

    def __init__(
        self,
        model: str,
        spaces: Mapping[Name, Weights],
        *,
        seed: int = 0,
        start: Mapping[Name, Path] | None = None,
        dtype: str = "auto",
    ) -> None:
        self.base, self.tokenizer = _load(model, dtype)
        self.spaces = {
            name: replace(space, targets=tuple(resolve(self.base, space.targets)))
            for name, space in sorted(spaces.items())
        }
        self._alias = {
            name: f"a{number}" for number, name in enumerate(self.spaces)
        }  # any name is one of ours
        _check_logits(model, self.base, self.tokenizer)
        self.unshared = why_unshared(self.base, self.tokenizer)
        self.model = _wrapped(self.base, {self._alias[n]: space for n, space in self.spaces.items()}, seed)
        self._before: dict[Name, list[float]] = {}
        self._stored: dict[Name, tuple[str, dict[str, str] | None]] = {}
        for name in self.spaces:
            if start and name in start:
                self.load(name, start[name])
            self._stored[name] = self._content(name), None

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.base.device

    @contextmanager
    def using(self, name: Name | None) -> Iterator[PreTrainedModel]:
        """Lend the model with one adapter, or as the base is."""
        if name is None:
            with self.model.disable_adapter():
                yield self.base
            return
        self.model.set_adapter(self._alias[name])
        for other in self.spaces:  # `set_adapter` freezes all others, and their optimizers would lose them
            for _, parameter in self.parameters(other):
                parameter.requires_grad_(True)
        yield self.base

    def parameters(self, name: Name) -> list[tuple[str, Tensor]]:
        """Return the trained tensors of an adapter with their names in peft's files."""
        ends = (f".lora_A.{self._alias[name]}.weight", f".lora_B.{self._alias[name]}.weight")
        found = (
            (key.replace(f".{self._alias[name]}.weight", ".weight"), parameter)
            for key, parameter in self.model.named_parameters()
            if key.endswith(ends)
        )
        return sorted(found, key=lambda item: item[0])

    def version(self, name: Name) -> str:
        """Return the digest of an adapter as it was stored last; ``""`` where it is as the base is."""
        reference = self._stored[name][1]
        return reference["sha256"] if reference else ""

    def save(self, name: Name, folder: Path) -> dict[str, str] | None:
        """Store an adapter as an artifact, by its content, unless it is as it was stored last.

        Returns:
            Its reference, relative to ``folder``, or ``None`` where it never changed.
        """
        content, reference = self._content(name), self._stored[name][1]
        if content != self._stored[name][0]:
            reference = put(lambda made: self.write(name, made), folder, name)
            self._before[name] = _logprobs(folder / reference["path"]) or []
            self._stored[name] = content, reference
        return reference

    def _content(self, name: Name) -> str:
        """Return the digest of an adapter's weights as they are."""
        hashed = hashlib.sha256()
        for key, tensor in self.parameters(name):
            hashed.update(key.encode() + tensor.detach().float().cpu().numpy().tobytes())
        return hashed.hexdigest()

    def write(self, name: Name, folder: Path) -> None:
        """Write an adapter into a folder, in peft's format, with its probe."""
        from safetensors.torch import save_file

        space = self.spaces[name]
        tensors = {key: p.detach().float().cpu().contiguous() for key, p in self.parameters(name)}
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
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
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        (folder / PROBE).write_text(json.dumps(self._probe(name)) + "\n", encoding="utf-8")

    def load(self, name: Name, folder: Path) -> None:
        """Read an adapter's weights; nothing in the folder is executed.

        Raises:
            ConfigurationError: the folder holds no adapter, or one of another base or shape.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        from compound.components.engines.adapter_files import read_config

        config, space = read_config(folder), self.spaces[name]
        alpha, rank = config["lora_alpha"], config["r"]
        if alpha * space.rank != space.alpha * rank:
            raise ConfigurationError(
                f"the adapter in {folder} was trained with alpha {alpha} and rank "
                f"{rank}, but {name!r} declares alpha {space.alpha} and rank {space.rank}: "
                "it would say something else",
                hint="declare those it was trained with",
            )
        try:
            tensors = load_file(folder / "adapter_model.safetensors")
        except (OSError, SafetensorError) as error:
            raise ConfigurationError(f"{folder} holds no adapter that can be read: {error}") from None
        own = dict(self.parameters(name))
        if {k: tuple(v.shape) for k, v in tensors.items()} != {k: tuple(p.shape) for k, p in own.items()}:
            raise ConfigurationError(
                f"the adapter in {folder} has another base or another shape than {name!r} declares",
                hint="declare the rank and targets it was trained with, on the model it was trained on",
            )
        for key, parameter in own.items():
            parameter.data.copy_(tensors[key])

    def begin(self, name: Name, reference: Reference | None, folder: Path) -> None:
        """Take a stored adapter as an adapter's present version; ``None`` is the base.

        Args:
            name: of the adapter.
            reference: where it is stored, relative to ``folder`` or absolute; it is copied there if need be.
            folder: where adapters are saved to.
        """
        if reference is None:
            return
        own = kept({**reference, "path": str(folder / reference["path"])}, folder)
        path = verified(own, folder)
        self.load(name, path)
        self._stored[name] = self._content(name), own
        if found := _logprobs(path):
            self._before[name] = found

    def _probe(self, name: Name) -> dict[str, list[int] | list[float]]:
        """Return log-probabilities of a fixed text with this adapter, and with the version before it."""
        import torch

        from compound.optimizers.weights.learner.forward import forward
        from compound.optimizers.weights.learner.samples import probe

        tokens = self.tokenizer(TEXT, add_special_tokens=False).input_ids
        sample = probe(tokens)
        with torch.no_grad():
            if len(self._before.get(name, ())) != len(tokens) - 1:
                with self.using(None) as base:
                    self._before[name] = forward(base, [sample], shared=False).logps[0].tolist()
            with self.using(name) as model:
                now: list[float] = forward(model, [sample], shared=False).logps[0].tolist()
        return {"tokens": tokens, "logprobs": now, "before": self._before[name]}


def _logprobs(folder: Path) -> list[float] | None:
    """Return the log-probabilities in an adapter's probe, if it has one that can be read."""
    try:
        return [
            float(value) for value in json.loads((folder / PROBE).read_text(encoding="utf-8"))["logprobs"]
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _check_logits(name: str, base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise where what is trained is not what the model says, since it changes its logits in its own way."""
    import torch

    from compound.optimizers.weights.learner.forward import forward
    from compound.optimizers.weights.learner.samples import probe

    tokens = tokenizer(TEXT, add_special_tokens=False).input_ids
    with torch.no_grad():
        ours = forward(base, [probe(tokens)], shared=False).logps[0]
        logits = base(input_ids=torch.tensor([tokens], device=base.device)).logits[0, :-1].float()
        wanted = torch.tensor(tokens[1:], device=base.device)
        theirs = logits.log_softmax(-1).gather(-1, wanted[:, None])[:, 0]
    if float((ours - theirs).abs().max()) > NEAR:
        raise CompoundError(
            f"{name!r} cannot be trained: it makes its logits in a way that is not known here",
            hint="take a model of another family",
        )


def why_unshared(base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return why equal prompts cannot be read once, by the kinds of layers and by trying; "" if they can."""
    import torch

    from compound.components.engines.local.layers import unshared_kinds
    from compound.optimizers.weights.learner.forward import forward
    from compound.optimizers.weights.learner.samples import probe

    if kinds := unshared_kinds(base.config):
        return f"the model has layers of {', '.join(kinds)}"
    tokens = tuple(tokenizer(TEXT, add_special_tokens=False).input_ids)
    samples = [
        probe(tokens, prompt=length, answer=answer) for length in (4, 7) for answer in (1, 2, 4)
    ]  # two lengths of prompts, answers that end early
    with torch.no_grad():
        plain = forward(base, samples, shared=False)
        try:
            shared = forward(base, samples, shared=True)
        except (
            ValueError,
            TypeError,
            AttributeError,
            IndexError,
            NotImplementedError,
            RuntimeError,
        ) as error:
            return f"the model refuses a cache of another kind than its own ({type(error).__name__})"
    difference = float(((plain.logps - shared.logps) * plain.mask).abs().max())
    if not difference <= (NEAR if base.dtype != torch.float32 else SAME):
        return f"the model computes other numbers behind a cached prompt (by {difference:.2g} nats)"
    return ""


def _wrapped(base: PreTrainedModel, spaces: Mapping[Name, Weights], seed: int) -> PeftModel:
    """Put the adapters on the base; all of it stays frozen but them."""
    try:
        import peft
    except ImportError:
        raise MissingExtra("training", "peft", "train") from None
    model = None
    with fork_torch_rng(seed, "adapters"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        for name, space in spaces.items():
            config = peft.LoraConfig(
                r=space.rank, lora_alpha=space.alpha, target_modules=list(space.targets), bias="none"
            )
            try:
                if model is None:
                    model = peft.get_peft_model(base, config, adapter_name=name)
                else:
                    model.add_adapter(name, config)
            except ValueError as error:
                raise DeclarationError(
                    f"an adapter does not fit its base: {error}",
                    hint="weights.lora.targets must name linear layers of the model",
                ) from None
    if model is None:
        raise DeclarationError("there is no component with weights to train")
    if base.dtype != _dtype_of_adapters(model):
        _compute_as_the_base(model)
    return model.eval()


def _dtype_of_adapters(model: PeftModel) -> torch.dtype:
    return next(parameter.dtype for parameter in model.parameters() if parameter.requires_grad)


def _compute_as_the_base(model: PeftModel) -> None:
    """Let adapters compute in the base's number format; their weights and gradients stay float32.

    peft converts what an adapter reads instead, and all that is kept for the backward pass with it.
    """
    from peft.tuners.lora import LoraLayer

    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            layer.cast_input_dtype_enabled = False
            for part in (*layer.lora_A.values(), *layer.lora_B.values()):
                part.forward = partial(_product, part)


def _product(part: torch.nn.Linear, x: Tensor) -> Tensor:
    from torch.nn.functional import linear

    return linear(x, part.weight.to(x.dtype))


def _load(name: str, dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a causal language model to train on, frozen, and its tokenizer."""
    try:
        import transformers  # noqa: F401 - only to say here that it is missing
    except ImportError:
        raise MissingExtra("training", "transformers", "local") from None
    folder = models.resolve(name)
    kind = loading.fastest_dtype() if dtype == "auto" else dtype
    try:
        with models.quiet():
            model, tokenizer = model_folder.load_causal(folder, kind)
    except (OSError, ValueError) as error:
        raise CompoundError(f"{name!r} cannot be trained: {model_folder.explain(error)}") from error
    if tokenizer.chat_template is None:
        raise CompoundError(f"{name!r} has no chat template", hint="use an instruction-tuned model")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model.to(loading.device()).eval(), tokenizer


def partition(
    components: Sequence[str], adapters: str | Mapping[str, Sequence[str]]
) -> dict[Name, tuple[str, ...]]:
    """Return which components train which adapter.

    Args:
        components: those with weights.
        adapters: ``each``, ``shared``, or names with their components; those not named have one each.

    Raises:
        DeclarationError: a component is unknown, or named twice; an adapter has none, or the name of a
            component that has another one.

    >>> partition(["a", "b", "c"], {"ab": ["a", "b"]})
    {'ab': ('a', 'b'), 'c': ('c',)}
    >>> partition(["a", "b"], "shared"), partition(["a"], "each")
    ({'shared': ('a', 'b')}, {'a': ('a',)})
    """
    if adapters == "shared":
        return {"shared": tuple(components)}
    groups = {} if isinstance(adapters, str) else {name: tuple(some) for name, some in adapters.items()}
    named = [component for some in groups.values() for component in some]
    for name, some in groups.items():
        check_name("Adapter", name)
        if not some:
            raise DeclarationError(f"the setting adapters gives the adapter {name!r} to no component")
        if name in components and name not in some:
            raise DeclarationError(
                f"the setting adapters calls an adapter {name!r}, like a component that has another one",
                hint="choose another name",
            )
    for component in named:
        if component not in components:
            raise DeclarationError(f"the setting adapters names {component!r}, which has no weights")
        if named.count(component) > 1:
            raise DeclarationError(f"the setting adapters names {component!r} twice")
    return groups | {c: (c,) for c in components if c not in named}
