"""Batched decoding with `generate`, where each row samples by itself and leaves the batch when it is done.

Every row has its own random stream and its own record, so its samples depend neither on the other
rows nor on the global random generators. On the CPU the stream is numpy's; on other devices the
noise is drawn where the logits are, by a generator of torch with the same seed, so the same seed
gives other samples there.

In exact mode every batch has the same number of rows and a width given by the rows' length class,
and prompts share no prefixes. A row's results are then bit-identical for any other rows in its
batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import GenerationConfig

from compound.core.engine import Adapter, FinishReason, Prefilled
from compound.core.errors import CallError
from compound.engines.chat_format import cut_at_stop
from compound.engines.local.adapters import AdapterCache
from compound.engines.local.constraints import (
    ChoiceState,
    Constraint,
    ConstraintCompiler,
    ConstraintState,
    end_tokens,
    unpack,
)
from compound.engines.local.prefill import Prefill

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase


BUCKET = 32  # exact mode pads prompts to a multiple of this
EXACT_ROWS = 8  # rows of a batch in exact mode


class Decoder:
    """Decoder of rows by a model and its tokenizer."""

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
        # Otherwise `generate` would apply the checkpoint's own sampling settings (penalties,
        # top-p).
        model.generation_config = GenerationConfig()
        self._model, self._tokenizer = model, tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._constraints: ConstraintCompiler | None = None
        self._exact, self._max_batch_tokens = exact, max_batch_tokens
        self._prefill = Prefill(model, capacity=max_batch_tokens // 4)
        self._adapters = AdapterCache(model, capacity=max_adapters, on_evict=self._prefill.forget)

    def start(self, constraint: Constraint) -> ConstraintState | ChoiceState:
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

    def batches(self, rows: Sequence[SamplingRow]) -> Iterator[list[SamplingRow]]:
        """Split rows into batches that fit; in exact mode, by length class."""
        if self._exact:
            classes: dict[int, list[SamplingRow]] = {}
            for row in rows:
                classes.setdefault(_width(row), []).append(row)
            for same in classes.values():
                yield from (same[i : i + EXACT_ROWS] for i in range(0, len(same), EXACT_ROWS))
            return
        batch: list[SamplingRow] = []
        for row in rows:
            longest = max(len(other.prompt) + other.max_tokens for other in (*batch, row))
            if batch and longest * (len(batch) + 1) > self._max_batch_tokens:
                yield batch
                batch = []
            batch.append(row)
        if batch:
            yield batch

    def run(self, batch: Sequence[SamplingRow], adapter: Adapter | None = None) -> None:
        """Complete the rows of a batch in place, all with the same adapter or with none.

        Raises:
            ConfigurationError: the adapter cannot be used; see `AdapterCache.applied`.
        """
        with torch.inference_mode(), self._adapters.applied(adapter) as version:
            if self._exact:
                spare = range(EXACT_ROWS - len(batch))
                rows = [*batch, *(SamplingRow((0,), 0, finish="length") for _ in spare)]
                prompts, width = [row.prompt for row in rows], _width(batch[0])
                self._decode(rows, *self._prefill.read_padded(prompts, width))
            else:
                order, cache, mask = self._prefill.read([row.prompt for row in batch], version)
                self._decode([batch[i] for i in order], cache, mask)

    def _decode(self, rows: list[SamplingRow], cache: DynamicCache, mask: torch.Tensor) -> None:
        """Run `generate` until all rows are done; `cache` and `mask` exclude each row's last token."""
        while any(row.live for row in rows):
            last = torch.tensor(
                [[row.sampled[-1] if row.sampled else row.prompt[-1]] for row in rows]
            )
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
            mask = torch.nn.functional.pad(
                mask, (0, cache.get_seq_length() - mask.shape[1]), value=1
            )
            if not self._exact:
                stay = [i for i, row in enumerate(rows) if row.live]
                rows = [rows[i] for i in stay]
                chosen = torch.tensor(stay, dtype=torch.long, device=mask.device)
                cache.batch_select_indices(chosen)
                mask = mask[chosen]

    def _ended(self, row: SamplingRow) -> FinishReason | None:
        """Return the finish reason if the last sampled token ends the row, else None."""
        if row.sampled[-1] in self.ends:
            return "stop"
        if row.stop:
            # A stop string spans at most as many tokens as it has bytes; 4 more may complete a
            # character.
            tail = row.sampled[-max(len(stop.encode()) for stop in row.stop) - 4 :]
            if any(stop in self._text(tail) for stop in row.stop) and self.text(row) != self._text(
                row.sampled
            ):
                return "stop"
        return "length" if len(row.sampled) >= row.max_tokens else None

    def text(self, row: SamplingRow) -> str:
        """Decode a row's answer, without the end token and truncated at the first stop string."""
        # An end token is not always one of the tokenizer's special tokens, which decoding skips.
        ended = bool(row.sampled) and row.sampled[-1] in self.ends
        return cut_at_stop(self._text(row.sampled[:-1] if ended else row.sampled), row.stop)

    def _text(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            tokens,
            skip_special_tokens=self._skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return text


def _width(row: SamplingRow) -> int:
    """Return a row's length class: the length of its prompt without the last token, rounded up."""
    return max(-(-(len(row.prompt) - 1) // BUCKET), 1) * BUCKET


MIN_DRAW = 2.0**-25  # below the resolution of a float32 exponential draw, which may be exactly 0
SHRINK = 0.75  # finished rows are removed when at most this fraction of a batch is live

Tokens = tuple[int, ...]


@dataclass(slots=True, eq=False)
class SamplingRow:
    """One prompt and the answer sampled so far."""

    prompt: Tokens
    max_tokens: int
    temperature: float = 0.0
    stop: tuple[str, ...] = ()
    seed: int = 0
    want_logprobs: bool = False
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: FinishReason | None = None
    abandoned: bool = False
    constraint: Constraint | None = None
    state: ConstraintState | ChoiceState | None = None
    failure: Exception | None = None
    on_token: Callable[[SamplingRow], None] | None = None
    rng: np.random.Generator = field(init=False)
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        self.rng = np.random.Generator(np.random.Philox(self.seed % 2**64))

    @property
    def live(self) -> bool:
        """Whether the row needs more tokens."""
        return self.finish is None and not self.abandoned and self.failure is None


def host_noise(rows: Sequence[SamplingRow], size: int, device: torch.device) -> torch.Tensor:
    """Return exponential noise of shape (rows, size), drawn by numpy from each row's stream."""
    noise = np.empty((len(rows), size), np.float32)
    for line, row in zip(noise, rows, strict=True):
        row.rng.standard_exponential(dtype=np.float32, out=line)
    return torch.from_numpy(noise).to(device)


def device_noise(rows: Sequence[SamplingRow], size: int, device: torch.device) -> torch.Tensor:
    """Return exponential noise of shape (rows, size), drawn on the device from each row's stream."""
    noise = torch.empty((len(rows), size), dtype=torch.float32, device=device)
    for line, row in zip(noise, rows, strict=True):
        if row.generator is None:  # it keeps its state from token to token
            row.generator = torch.Generator(device).manual_seed(row.seed % 2**64)
        line.exponential_(generator=row.generator)
    return noise


class SampleTokens:
    """Logits processor that samples and records each row's next token, and forces `generate` to use it.

    At temperature T > 0 the token is ``argmax(logits / T + Gumbel noise)``, a draw from the softmax
    with noise from the row's own stream; at 0 it is the argmax. In rows with a constraint the
    logits of other tokens are first set to -inf, so that tokens are drawn from the renormalized
    rest, and recorded log-probabilities belong to it. Constrained and free rows may be in one
    batch.
    """

    def __init__(
        self, rows: Sequence[SamplingRow], ended: Callable[[SamplingRow], FinishReason | None]
    ) -> None:
        self.rows, self.ended = rows, ended

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # noqa: D102
        self._constrain(scores)
        hot = [i for i, row in enumerate(self.rows) if row.temperature > 0]
        drawn = [i for i in hot if self.rows[i].live]
        wanted = any(row.want_logprobs for row in self.rows)
        if hot:
            scores /= scores.new_tensor([row.temperature or 1.0 for row in self.rows])[:, None]
        picked = scores.argmax(-1)
        if drawn:
            rows = [self.rows[i] for i in drawn]
            noise = host_noise if scores.device.type == "cpu" else device_noise
            gumbel = noise(rows, scores.shape[-1], scores.device).clamp_(min=MIN_DRAW).log_().neg_()
            picked[drawn] = (gumbel.add_(scores[drawn])).argmax(-1)
        chosen = picked[:, None]
        logprobs = [0.0] * len(self.rows)
        if wanted:
            logprobs = (scores.gather(1, chosen)[:, 0] - scores.logsumexp(-1)).tolist()
        for row, token, logprob in zip(self.rows, picked.tolist(), logprobs, strict=True):
            if row.live:
                row.sampled.append(token)
                if row.state is not None:
                    row.state.accept(token)
                row.logprobs += [logprob] if row.want_logprobs else []
                row.finish = self.ended(row)
                if row.on_token is not None:
                    row.on_token(row)
        return scores.scatter_(1, chosen, torch.inf)

    def _constrain(self, scores: torch.Tensor) -> None:
        """Set the logits of tokens that a row's constraint does not allow to -inf, in place."""
        bound = [(i, row) for i, row in enumerate(self.rows) if row.state is not None and row.live]
        if not bound:
            return
        size = scores.shape[-1]
        bits = np.empty((len(bound), -(-size // 32)), np.int32)
        for line, (_, row) in zip(bits, bound, strict=True):
            assert row.state is not None
            try:
                row.state.fill(line)
            except CallError as error:
                row.failure = error
                line[:] = -1
        blocked = torch.from_numpy(~unpack(bits, size)).to(scores.device)
        if len(bound) == len(self.rows):
            scores.masked_fill_(blocked, -torch.inf)
        else:
            places = torch.tensor([i for i, _ in bound], device=scores.device)
            scores[places] = scores[places].masked_fill_(blocked, -torch.inf)


class StopWhenDone:
    """Stopping criterion that ends `generate` when all rows are done, or enough to shrink the batch."""

    def __init__(self, rows: Sequence[SamplingRow], shrink: bool) -> None:
        self.rows, self.shrink = rows, shrink

    def __call__(  # noqa: D102
        self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object
    ) -> torch.Tensor:
        live = sum(row.live for row in self.rows)
        over = live == 0 or (self.shrink and live <= SHRINK * len(self.rows))
        return torch.full((len(self.rows),), over, dtype=torch.bool, device=input_ids.device)
