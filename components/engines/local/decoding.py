"""Batched decoding with `generate`; finished rows leave the batch.

In exact mode every batch has the same number of rows and a width given by the rows' length class, and prompts
share no prefixes. A row's results are then bit-identical for any other rows in its batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from transformers import GenerationConfig

from compound.components.engines.local.adapters import AdapterCache
from compound.components.engines.local.constraints import (
    Constraint,
    ConstraintCompiler,
    ConstraintState,
    end_tokens,
)
from compound.components.engines.local.prefill import Prefill
from compound.components.engines.local.sampling import Row, SampleTokens, StopWhenDone
from compound.engine import Adapter, FinishReason, Prefilled

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase


BUCKET = 32  # exact mode pads prompts to a multiple of this
EXACT_ROWS = 8  # rows of a batch in exact mode


class Decoder:
    """Decoder of rows by a model and its tokenizer.

    Args:
        model: a causal language model with attention layers only (full or sliding).
        tokenizer: the model's tokenizer.
        exact: whether a row's result must be bit-identical for any other rows in its batch.
        max_batch_tokens: maximum number of tokens in a batch's cache.
        max_adapters: maximum number of adapters in memory, each with its cached prefixes.
        skip_special_tokens: whether the text of an answer leaves out special tokens.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        exact: bool,
        max_batch_tokens: int,
        max_adapters: int,
        skip_special_tokens: bool = True,
    ) -> None:
        self.ends = end_tokens(model, tokenizer)
        # Otherwise `generate` would apply the checkpoint's own sampling settings (penalties, top-p).
        model.generation_config = GenerationConfig()
        self._model, self._tokenizer, self._skip_special_tokens = model, tokenizer, skip_special_tokens
        self._constraints: ConstraintCompiler | None = None
        self._exact, self._max_batch_tokens = exact, max_batch_tokens
        self._prefill = Prefill(model, capacity=max_batch_tokens // 4)
        self._adapters = AdapterCache(model, capacity=max_adapters, on_evict=self._prefill.forget)

    def start(self, constraint: Constraint) -> ConstraintState:
        """Return the state of a constrained answer before its first token.

        Raises:
            CallError: the format cannot be enforced.
        """
        if self._constraints is None:
            size = self._model.config.get_text_config(decoder=True).vocab_size
            self._constraints = ConstraintCompiler(self._tokenizer, size, self.ends)
        return self._constraints.start(constraint)

    @property
    def prefilled(self) -> Prefilled:
        """Number of prompt tokens so far, and how many of them were reused."""
        return self._prefill.counts

    def batches(self, rows: Sequence[Row]) -> Iterator[list[Row]]:
        """Split rows into batches that fit; in exact mode, by length class."""
        if self._exact:
            classes: dict[int, list[Row]] = {}
            for row in rows:
                classes.setdefault(_width(row), []).append(row)
            for same in classes.values():
                yield from (same[i : i + EXACT_ROWS] for i in range(0, len(same), EXACT_ROWS))
            return
        batch: list[Row] = []
        for row in rows:
            longest = max(len(other.prompt) + other.max_tokens for other in (*batch, row))
            if batch and longest * (len(batch) + 1) > self._max_batch_tokens:
                yield batch
                batch = []
            batch.append(row)
        if batch:
            yield batch

    def run(self, batch: Sequence[Row], adapter: Adapter | None = None) -> None:
        """Complete the rows of a batch in place, all with the same adapter or with none.

        Raises:
            ConfigurationError: the adapter cannot be used; see `AdapterCache.applied`.
        """
        with torch.inference_mode(), self._adapters.applied(adapter) as version:
            if self._exact:
                spare = [Row((0,), 0, finish="length") for _ in range(EXACT_ROWS - len(batch))]
                rows = [*batch, *spare]
                self._decode(rows, *self._prefill.read_padded([row.prompt for row in rows], _width(batch[0])))
            else:
                order, cache, mask = self._prefill.read([row.prompt for row in batch], version)
                self._decode([batch[i] for i in order], cache, mask)

    def _decode(self, rows: list[Row], cache: DynamicCache, mask: torch.Tensor) -> None:
        """Run `generate` until all rows are done; `cache` and `mask` exclude each row's last token."""
        while any(row.live for row in rows):
            last = torch.tensor([[row.sampled[-1] if row.sampled else row.prompt[-1]] for row in rows])
            steps = max(row.max_tokens - len(row.sampled) for row in rows if row.live)
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            self._model.generate(
                input_ids=last.to(mask.device),
                attention_mask=mask,
                past_key_values=cache,
                generation_config=GenerationConfig(max_new_tokens=steps, do_sample=False),
                logits_processor=[SampleTokens(rows, self._ended)],
                stopping_criteria=[StopWhenDone(rows, shrink=not self._exact)],
            )
            mask = torch.nn.functional.pad(mask, (0, cache.get_seq_length() - mask.shape[1]), value=1)
            if not self._exact:
                stay = [i for i, row in enumerate(rows) if row.live]
                rows = [rows[i] for i in stay]
                chosen = torch.tensor(stay, dtype=torch.long, device=mask.device)
                cache.batch_select_indices(chosen)
                mask = mask[chosen]

    def _ended(self, row: Row) -> FinishReason | None:
        """Return the finish reason if the last sampled token ends the row, else None."""
        if row.sampled[-1] in self.ends:
            return "stop"
        if row.stop:
            # A stop string spans at most as many tokens as it has bytes; 4 more may complete a character.
            tail = row.sampled[-max(len(stop.encode()) for stop in row.stop) - 4 :]
            if any(stop in self._text(tail) for stop in row.stop) and self.text(row) != self._text(
                row.sampled
            ):
                return "stop"
        return "length" if len(row.sampled) >= row.max_tokens else None

    def text(self, row: Row) -> str:
        """Decode a row's answer, without the end token and truncated at the first stop string."""
        # An end token is not always one of the tokenizer's special tokens, which decoding skips.
        text = self._text(row.sampled[:-1] if row.sampled and row.sampled[-1] in self.ends else row.sampled)
        return text[: min((at for stop in row.stop if (at := text.find(stop)) >= 0), default=len(text))]

    def _text(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            tokens, skip_special_tokens=self._skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text


def _width(row: Row) -> int:
    """Return a row's length class: the length of its prompt without the last token, rounded up.

    >>> _width(Row(tuple(range(34)), 1)), _width(Row((1,), 1))
    (64, 32)
    """
    return max(-(-(len(row.prompt) - 1) // BUCKET), 1) * BUCKET
