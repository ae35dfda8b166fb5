"""LoRA adapters for inference, added to the outputs of a model's linear layers by forward hooks.

An adapted layer returns W x + (alpha / r) B A x instead of W x (Hu et al. 2021, equation 3).
Because a forward hook adds the second term, the base is in memory once for all adapters, and
switching adapters copies nothing. peft is not an option: it replaces layers by its own classes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from compound.core.engine import Adapter
from compound.core.errors import ConfigurationError
from compound.core.storage.artifacts import verify_reference
from compound.engines.adapter_files import Addition, check_base, read_adapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class AdapterCache:
    """Least-recently-used cache of a model's adapters."""

    def __init__(
        self, model: PreTrainedModel, capacity: int, on_evict: Callable[[str], None]
    ) -> None:
        self._model = model
        self._layers = {
            name: layer
            for name, layer in model.named_modules()
            if isinstance(layer, torch.nn.Linear)
        }
        self._dtype, self._device = model.dtype, model.device
        self._capacity, self._on_evict = capacity, on_evict
        self._cached = OrderedDict[str, dict[str, Addition]]()  # least recently used first

    @contextmanager
    def applied(self, adapter: Adapter | None) -> Iterator[str]:
        """Apply an adapter, or none, to the model inside the block; yields the adapter's version.

        Raises:
            ConfigurationError: the folder is missing, was changed, or contains no adapter of this
                model.
        """
        new = adapter is not None and adapter.sha256 not in self._cached
        additions = self._find(adapter) if adapter else {}
        with ExitStack() as stack:
            for name, (a, b) in additions.items():
                stack.callback(
                    self._layers[name].register_forward_hook(_addition_hook(a.T, b.T)).remove
                )
            if adapter and new:
                self._check_base(adapter)
            yield adapter.sha256 if adapter else ""

    def _check_base(self, adapter: Adapter) -> None:
        """Raise if an adapter fits the layers, but was trained on another base model."""
        try:
            model = self._model
            check_base(Path(adapter.path), model.name_or_path, lambda ids: _logprobs(model, ids))
        except ConfigurationError:
            del self._cached[adapter.sha256]
            raise

    def _find(self, adapter: Adapter) -> dict[str, Addition]:
        additions = self._cached.get(adapter.sha256) or self._read(adapter)
        self._cached[adapter.sha256] = additions
        self._cached.move_to_end(adapter.sha256)
        while len(self._cached) > self._capacity:
            self._on_evict(self._cached.popitem(last=False)[0])
        return additions

    def _read(self, adapter: Adapter) -> dict[str, Addition]:
        shapes = {
            name: (layer.in_features, layer.out_features) for name, layer in self._layers.items()
        }
        found = read_adapter(verify_reference(asdict(adapter)), shapes)
        return {
            name: (a.to(self._device, self._dtype), b.to(self._device, self._dtype))
            for name, (a, b) in found.items()
        }


def _logprobs(model: PreTrainedModel, tokens: Sequence[int]) -> list[float]:
    """Return the log-probability of each token but the first, given the tokens before it.

    Raises:
        IndexError: a token is not in the model's vocabulary.
    """
    ids = torch.tensor([tokens], device=model.device)
    logprobs = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
    chosen: list[float] = logprobs.gather(-1, ids[0, 1:, None]).flatten().tolist()
    return chosen


def _addition_hook(a: torch.Tensor, b: torch.Tensor) -> Callable[..., None]:
    """Return a hook that adds x a b to a layer's output for x, in place; a is (in, r), b is (r, out)."""

    def add(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        states = inputs[0].reshape(-1, a.shape[0])
        output.view(-1, b.shape[1]).addmm_(states @ a, b)

    return add
