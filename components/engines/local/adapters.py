"""LoRA adapters on a model that is only read: small additions to the outputs of its linear layers.

A layer that gives W x gives W x + (alpha / r) B A x instead (Hu et al. 2021, equation 3). A forward hook adds
this behind the layer, so the base lies in memory once, whatever is sampled with it, and going from one
adapter to another copies nothing. peft cannot do this here: it replaces layers by classes of its own, and
knows none for `PackedLinear`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from compound.components.engines.adapter_files import Addition, read_adapter
from compound.components.engines.local.packing import PackedLinear
from compound.components.engines.probe import judge, read_probe
from compound.engine import Adapter
from compound.errors import AdapterNotServed, ConfigurationError
from compound.storage.artifacts import verified

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class AdapterCache:
    """The adapters that a model was sampled with most recently.

    Args:
        model: a causal language model.
        keep: how many adapters stay in memory; the one used longest ago is dropped first.
        dropped: told the version of an adapter that is dropped.
    """

    def __init__(self, model: PreTrainedModel, keep: int, dropped: Callable[[str], None]) -> None:
        self._model = model
        kinds = (torch.nn.Linear, PackedLinear)
        self._layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, kinds)}
        self._dtype, self._device = model.dtype, model.device
        self._keep, self._dropped = keep, dropped
        self._kept: OrderedDict[str, dict[str, Addition]] = OrderedDict()  # the last one used comes last

    @contextmanager
    def applied(self, adapter: Adapter | None) -> Iterator[str]:
        """Let the model compute with an adapter inside the block, or as it is; gives the adapter's version.

        Raises:
            ConfigurationError: the folder is missing or was changed, or holds no adapter of this model.
        """
        new = adapter is not None and adapter.sha256 not in self._kept
        additions = self._find(adapter) if adapter else {}
        with ExitStack() as stack:
            for name, (a, b) in additions.items():
                stack.callback(self._layers[name].register_forward_hook(_adding(a.T, b.T)).remove)
            if adapter and new:
                self._check_base(adapter)
            yield adapter.sha256 if adapter else ""

    def _check_base(self, adapter: Adapter) -> None:
        """Raise where an adapter fits the layers, but says something else than when it was trained."""
        probe = read_probe(Path(adapter.path))
        if probe is None:
            return
        try:
            judge(probe, _logprobs(self._model, probe.tokens))
        except (AdapterNotServed, IndexError) as error:
            del self._kept[adapter.sha256]
            raise ConfigurationError(
                f"the adapter {adapter.path} was trained on another base model: {error}",
                hint="sample with that one",
            ) from error

    def _find(self, adapter: Adapter) -> dict[str, Addition]:
        """Return an adapter's additions by layer; its folder is read once as long as they are kept."""
        additions = self._kept.get(adapter.sha256) or self._read(adapter)
        self._kept[adapter.sha256] = additions
        self._kept.move_to_end(adapter.sha256)
        while len(self._kept) > self._keep:
            self._dropped(self._kept.popitem(last=False)[0])
        return additions

    def _read(self, adapter: Adapter) -> dict[str, Addition]:
        shapes = {name: (layer.in_features, layer.out_features) for name, layer in self._layers.items()}
        found = read_adapter(verified(asdict(adapter)), shapes)
        return {
            name: (a.to(self._device, self._dtype), b.to(self._device, self._dtype))
            for name, (a, b) in found.items()
        }


def _logprobs(model: PreTrainedModel, tokens: Sequence[int]) -> list[float]:
    """Return the log-probability of each token but the first, given those before it.

    Raises:
        IndexError: the model has no such token.
    """
    read = torch.tensor([tokens], device=model.device)
    said = model(input_ids=read).logits[0, :-1].float().log_softmax(-1)
    found: list[float] = said.gather(-1, read[0, 1:, None]).flatten().tolist()
    return found


def _adding(a: torch.Tensor, b: torch.Tensor) -> Callable[..., None]:
    """Return a hook that adds x a b to what a layer has made of x, in place; a is (in, r), b is (r, out)."""

    def add(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        states = inputs[0].reshape(-1, a.shape[0])
        output.view(-1, b.shape[1]).addmm_(states @ a, b)

    return add
