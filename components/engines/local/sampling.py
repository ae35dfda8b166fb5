"""Sampling within `generate`, by a logits processor and a stopping criterion.

Every row has its own random stream and its own record, so its samples depend neither on the other rows nor
on the global random generators. On the CPU the stream is numpy's; on other devices the noise is drawn where
the logits are, by a generator of torch with the same seed, so the same seed gives other samples there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from compound.components.engines.local.constraints import Constraint, ConstraintState, unpack
from compound.engine import FinishReason
from compound.errors import CallError

MIN_DRAW = 2.0**-25  # below the resolution of a float32 exponential draw, which may be exactly 0
SHRINK = 0.75  # finished rows are removed when at most this fraction of a batch is live

Tokens = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Row:
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
    state: ConstraintState | None = None
    failure: Exception | None = None
    on_token: Callable[[Row], None] | None = None
    rng: np.random.Generator = field(init=False)
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        self.rng = np.random.Generator(np.random.Philox(self.seed % 2**64))

    def generator_on(self, device: torch.device) -> torch.Generator:
        """Return the row's generator on a device; it keeps its state from token to token."""
        if self.generator is None:
            self.generator = torch.Generator(device).manual_seed(self.seed % 2**64)
        return self.generator

    @property
    def live(self) -> bool:
        """Whether the row needs more tokens."""
        return self.finish is None and not self.abandoned and self.failure is None


def host_noise(rows: Sequence[Row], size: int, device: torch.device) -> torch.Tensor:
    """Return exponential noise of shape (rows, size), drawn by numpy from each row's stream."""
    noise = np.empty((len(rows), size), np.float32)
    for line, row in zip(noise, rows, strict=True):
        row.rng.standard_exponential(dtype=np.float32, out=line)
    return torch.from_numpy(noise).to(device)


def device_noise(rows: Sequence[Row], size: int, device: torch.device) -> torch.Tensor:
    """Return exponential noise of shape (rows, size), drawn on the device from each row's stream."""
    noise = torch.empty((len(rows), size), dtype=torch.float32, device=device)
    for line, row in zip(noise, rows, strict=True):
        line.exponential_(generator=row.generator_on(device))
    return noise


class SampleTokens:
    """Logits processor that samples and records each row's next token, and forces `generate` to use it.

    At temperature T > 0 the token is ``argmax(logits / T + Gumbel noise)``, a draw from the softmax with
    noise from the row's own stream; at 0 it is the argmax. In rows with a constraint the logits of other
    tokens are first set to -inf, so that tokens are drawn from the renormalized rest, and recorded
    log-probabilities belong to it. Constrained and free rows may be in one batch.
    """

    def __init__(self, rows: Sequence[Row], ended: Callable[[Row], FinishReason | None]) -> None:
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

    def __init__(self, rows: Sequence[Row], shrink: bool) -> None:
        self.rows, self.shrink = rows, shrink

    def __call__(  # noqa: D102
        self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object
    ) -> torch.Tensor:
        live = sum(row.live for row in self.rows)
        over = live == 0 or (self.shrink and live <= SHRINK * len(self.rows))
        return torch.full((len(self.rows),), over, dtype=torch.bool, device=input_ids.device)
