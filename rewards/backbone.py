"""The shared backbone φ: any transformers encoder or decoder, run in length-sorted batches, cached by text.

The features of an encoder are the mean over its tokens, those of a decoder the state of its last
token. Texts that are too long are truncated in the inputs, so that the output stays complete.
"""

from __future__ import annotations

import hashlib
import logging
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from compound.components.embeddings import PACKAGED_MODEL, weights_folder
from compound.core.errors import CompoundError, ConfigurationError, DeclarationError, MissingExtra
from compound.core.security.limits import ARTIFACT
from compound.core.security.untrusted import UntrustedFolder, os_errors_as
from compound.engines import adapter_files, model_folder, models
from compound.engines.local.devices import Placement, naming_settings, resolve_device
from compound.engines.local.loading import checkpoint_layers, dtype_of
from compound.execution.rng import fork_torch_rng
from compound.rewards.features import Embedder

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


Array = NDArray[np.float32]
NAMES = {"minilm": PACKAGED_MODEL}
BATCH_TOKENS = 8_192  # maximum tokens of a forward pass, including padding
KEY = 16  # bytes
HEAD = b"compound features 2\n"  # of a file of features
LOWER = "lower backbone.max_length, set backbone.dtype to bfloat16, or use a smaller backbone"
logger = logging.getLogger(__name__)


class FeatureStore:
    """Vectors by 16-byte keys; with a path, also appended to a file.

    The last digits of a feature depend on its batch, so a resumed run reuses stored ones. Each record
    has a checksum: damaged ones are computed again, and a file of another format begins anew.

    >>> store = FeatureStore(None, 2)
    >>> store.put([b"k" * 16], np.array([[1.0, 2.0]], np.float32))
    >>> store.get(b"k" * 16).tolist(), b"x" * 16 in store
    ([1.0, 2.0], False)

    Raises:
        RunDirectoryError: the path is not a regular file, is a link, or cannot be read.
    """

    def __init__(self, path: Path | None, dim: int) -> None:
        self.path = path
        self._record = np.dtype(
            [("key", f"V{KEY}"), ("vector", np.float32, (dim,)), ("checksum", "<u4")]
        )
        self._found: dict[bytes, Array] = {}
        if path is not None and UntrustedFolder(path.parent).kind(path.name) is not None:
            self._load(UntrustedFolder(path.parent), path.name)

    def _load(self, folder: UntrustedFolder, name: str) -> None:
        raw, size = folder.read(name, ARTIFACT), self._record.itemsize
        whole = raw.startswith(HEAD) * (len(HEAD) + (len(raw) - len(HEAD)) // size * size)
        if len(raw) != whole:
            folder.truncate(name, whole)
        records = np.frombuffer(raw[len(HEAD) : whole], self._record)
        known = {r["key"].tobytes(): r["vector"] for r in records if r["checksum"] == _checksum(r)}
        self._found.update(known)
        if len(known) < len(records):
            logger.warning(
                "%s: %d damaged features are computed again", self.path, len(records) - len(known)
            )

    def __contains__(self, key: bytes) -> bool:
        return key in self._found

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: bytes) -> Array:
        """Return the vector of a key."""
        return self._found[key]

    def put(self, keys: Sequence[bytes], vectors: Array) -> None:
        """Store vectors.

        Raises:
            RunDirectoryError: the file cannot be written.
        """
        self._found.update(zip(keys, vectors, strict=True))
        if self.path is None:
            return
        records = np.zeros(len(keys), self._record)
        records["key"] = np.array(keys, f"V{KEY}")
        records["vector"] = vectors
        records["checksum"] = [_checksum(record) for record in records]
        folder = UntrustedFolder(self.path.parent)
        head = HEAD if not folder.size(self.path.name) else b""
        with folder.appender(self.path.name) as file, os_errors_as(self.path):
            file.write(head + records.tobytes())
            file.flush()


def _checksum(record: np.void) -> int:
    return zlib.crc32(record["vector"].tobytes(), zlib.crc32(record["key"].tobytes()))


class Backbone(Embedder):
    """A transformers model that embeds (inputs, output) texts as feature vectors.

    Args:
        name: ``minilm`` (all-MiniLM-L6-v2), ``smollm2``, a folder, or a hub id.
        max_length: the maximum number of tokens of a text pair.
        dtype: ``auto`` selects the fastest one on this machine; without a ``placement``.
        placement: where and how the model is loaded.

    Raises:
        CompoundError: the model cannot be loaded.
    """

    def __init__(
        self,
        name: str = "minilm",
        *,
        max_length: int = 256,
        dtype: str = "auto",
        placement: Placement | None = None,
    ) -> None:
        self.name = name
        with naming_settings(
            f"loading the backbone {name!r}", "use a smaller one, or another device"
        ):
            torch, self.tokenizer, self.model = _load(name, placement or Placement(dtype=dtype))
        self._torch = torch
        config = self.model.config
        self.decoder = any(a.endswith("ForCausalLM") for a in config.architectures or ())
        self.dim = int(config.hidden_size)
        self.max_length = min(
            max_length, int(getattr(config, "max_position_embeddings", max_length))
        )
        self.adapter = ""  # digest of the trained weights; part of every cache key
        self.store = FeatureStore(None, self.dim)
        self.passes = 0  # texts computed by the model, without cache hits

    def embed(self, texts: Sequence[tuple[str, str]]) -> Array:
        """Return a feature vector of length ``dim`` for each (inputs, output); equal texts run only once."""
        keys = [self._key(pair) for pair in texts]
        missing = {k: pair for k, pair in zip(keys, texts, strict=True) if k not in self.store}
        if missing:
            self.store.put(list(missing), self._read(list(missing.values())))
        found = [self.store.get(key) for key in keys]
        return np.stack(found) if found else np.zeros((0, self.dim), np.float32)

    def store_in(self, path: Path) -> None:
        """Store features in a file from now on, and reuse the features in it."""
        if self.store.path != path:
            self.store = FeatureStore(path, self.dim)

    def limit_features(self, most: int) -> None:
        """Forget the features in memory if there are more than ``most``."""
        if len(self.store) > most:
            self.store = FeatureStore(None, self.dim)

    def _key(self, pair: tuple[str, str]) -> bytes:
        text = "\x1f".join((self.adapter, *pair))
        return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).digest()

    def _read(self, pairs: Sequence[tuple[str, str]]) -> Array:
        found = np.zeros((len(pairs), self.dim), np.float32)
        tokens = self.tokenize(pairs)
        with naming_settings("embedding texts", LOWER), self._torch.inference_mode():
            for batch in batches([len(t) for t in tokens], BATCH_TOKENS):
                found[batch] = self.forward([tokens[i] for i in batch]).float().cpu().numpy()
        self.passes += len(pairs)
        return found

    def tokenize(self, pairs: Sequence[tuple[str, str]]) -> list[list[int]]:
        """Return the token ids of each pair, inputs first; they are truncated first if they do not fit."""
        special = len(self._joined([0], [0])) - 2
        first = self.tokenizer([a for a, _ in pairs], add_special_tokens=False)["input_ids"]
        second = self.tokenizer([b for _, b in pairs], add_special_tokens=False)["input_ids"]
        found = []
        for a, b in zip(first, second, strict=True):
            output = b[: self.max_length - special]
            remaining = self.max_length - special - len(output)
            found.append(self._joined(a[:remaining], output))
        return found

    def _joined(self, a: list[int], b: list[int]) -> list[int]:
        t = self.tokenizer
        if t.cls_token_id is None:
            return [*a, *b] or [t.eos_token_id]
        if not a:  # a single text, the format that sentence encoders are trained on
            return [t.cls_token_id, *b, t.sep_token_id]
        return [t.cls_token_id, *a, t.sep_token_id, *b, t.sep_token_id]

    def forward(self, tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the features of a batch as a tensor of shape (batch, dim)."""
        torch = self._torch
        longest = max(map(len, tokens))
        pad = self.tokenizer.pad_token_id or 0
        ids = torch.full((len(tokens), longest), pad, dtype=torch.long)
        mask = torch.zeros((len(tokens), longest), dtype=torch.long)
        for row, sequence in enumerate(tokens):
            ids[row, : len(sequence)] = torch.tensor(sequence)
            mask[row, : len(sequence)] = 1
        where = self.model.device
        mask = mask.to(where)
        hidden = self.model(input_ids=ids.to(where), attention_mask=mask).last_hidden_state
        if self.decoder:
            return hidden[torch.arange(len(tokens)), mask.sum(1) - 1]
        weights = mask.unsqueeze(-1).to(hidden.dtype)
        return (hidden * weights).sum(1) / weights.sum(1)

    # -- trained weights -------------------------------------------------------------------------------

    def add_adapter(self, rank: int, alpha: float, seed: int) -> None:
        """Add a new LoRA adapter to every linear layer, as the only trainable parameters."""
        peft = _peft()
        config = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", bias="none")
        with fork_torch_rng(seed, "adapter"), _known_warning():
            self.model = peft.get_peft_model(self.model, config)
        self.name_adapter()

    def checkpoint_layers(self) -> None:
        """Recompute the activations of each layer in the backward pass.

        Raises:
            CompoundError: the model does not support it.
        """
        checkpoint_layers(self.model, self.name, "reward.lora.gradient_checkpointing")

    def name_adapter(self) -> str:
        """Set and return the digest of the adapter's weights, which separates cached features of versions."""
        hashed = hashlib.sha256()
        for key, tensor in sorted(_peft().get_peft_model_state_dict(self.model).items()):
            hashed.update(key.encode())
            hashed.update(tensor.detach().float().cpu().numpy().tobytes())
        self.adapter = hashed.hexdigest()
        return self.adapter

    def save_adapter(self, folder: Path) -> None:
        """Write the adapter in peft's format (safetensors); do nothing without an adapter."""
        if self.adapter:
            self.model.save_pretrained(folder, safe_serialization=True)

    def load_adapter(self, folder: Path, name: str) -> None:
        """Load an adapter and check its digest.

        Raises:
            ConfigurationError: the folder has no adapter, or one with another digest.
        """
        if not (folder / adapter_files.WEIGHTS).exists():
            raise ConfigurationError(f"{folder} has no reward adapter")
        # peft would apply every setting in the untrusted folder, so only those of a plain LoRA are
        # read.
        config, tensors = adapter_files.read_config(folder), adapter_files.read_tensors(folder)
        if self.adapter:
            self.model = self.model.unload()
        self.add_adapter(config["r"], config["lora_alpha"], seed=0)
        try:
            _peft().set_peft_model_state_dict(self.model, tensors)
        except RuntimeError as error:
            raise ConfigurationError(
                f"{folder} does not fit the backbone {self.name!r}: {error}"
            ) from None
        self.model.eval()
        if self.name_adapter() != name:
            raise ConfigurationError(
                f"the reward adapter in {folder} does not match the digest in its card"
            )

    def remove_adapter(self) -> None:
        """Remove the adapter, which restores the base weights."""
        if self.adapter:
            self.model = self.model.unload().eval()
            self.adapter = ""

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the trainable parameters: the adapter's weights."""
        return [p for p in self.model.parameters() if p.requires_grad]


def batches(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Yield indices, longest texts first, in batches of at most ``most`` tokens including padding.

    >>> list(batches([3, 9, 4, 1], 10))
    [[1], [2, 0], [3]]
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    batch: list[int] = []
    for i in order:
        if batch and (len(batch) + 1) * lengths[batch[0]] > most:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


@contextmanager
def _known_warning() -> Iterator[None]:
    """Suppress the warning about an attribute that transformers is renaming and peft still reads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        yield


def _peft() -> ModuleType:
    try:
        import peft
    except ImportError:
        raise MissingExtra("a trained reward backbone", "peft", "rewards") from None
    module: ModuleType = peft
    return module


def _load(
    name: str, placement: Placement
) -> tuple[ModuleType, PreTrainedTokenizerBase, PreTrainedModel]:
    try:
        import torch
        import transformers  # noqa: F401 - imported here to report that it is missing
    except ImportError:
        raise MissingExtra("a reward model", "transformers", "local") from None
    folder = (
        Path(weights_folder()) if NAMES.get(name, name) == PACKAGED_MODEL else models.resolve(name)
    )
    try:
        with models.hide_progress_bars():
            model, tokenizer = model_folder.load_encoder(
                folder,
                dtype_of(placement),
                device=resolve_device(placement.device, "backbone"),
                attention=placement.attn_implementation,
            )
    except DeclarationError:  # of a device, which is a ValueError, too
        raise
    except (OSError, ValueError) as error:
        raise CompoundError(
            f"{name!r} cannot be a reward backbone: {model_folder.explain(error)}",
            hint="use minilm, smollm2, or a folder or hub id that transformers can load",
        ) from error
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return torch, tokenizer, model.eval()
