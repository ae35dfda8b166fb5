"""Samples of one conversation as one token sequence.

The prompt of a later turn usually begins with all tokens of the turn before it: its prompt and its answer.
The model then processes the tokens of the last turn once, and the states of every turn are read from that.
Attention is causal, so they are those of separate passes. If a chat template changes earlier turns, or the
written text has other tokens than the sampled one, turns are processed separately.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from compound.optimizers.weights.learner.samples import Sample

Tokens = tuple[int, ...]


def conversations(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Divide samples into conversations, each in the order of its turns.

    Every sample after the first of a conversation has a prompt that begins with the prompt and the answer of
    the one before it.

    >>> from compound.engine import TokenRecord
    >>> def sample(prompt: Tokens, *answer: int) -> Sample:
    ...     return Sample("a", "e", "", 0, TokenRecord(prompt, answer, (), "stop"), 0.0)
    >>> turns = [sample((1, 2, 3, 4), 5), sample((1, 2), 3), sample((1, 9), 3)]
    >>> [[each.tokens.prompt for each in chain] for chain in conversations(turns)]
    [[(1, 2), (1, 2, 3, 4)], [(1, 9)]]
    """
    chains: list[list[Sample]] = []
    ends: defaultdict[Tokens, list[list[Sample]]] = defaultdict(list)
    lengths: set[int] = set()  # of the ends
    order = sorted(range(len(samples)), key=lambda i: (len(samples[i].tokens.prompt), i))
    for sample in (samples[i] for i in order):
        prompt = sample.tokens.prompt
        candidates = sorted((length for length in lengths if length <= len(prompt)), reverse=True)
        chain = next((ends[prompt[:n]].pop(0) for n in candidates if ends.get(prompt[:n])), None)
        if chain is None:
            chain = []
            chains.append(chain)
        chain.append(sample)
        end = prompt + sample.tokens.sampled
        ends[end].append(chain)
        lengths.add(len(end))
    return chains


def whole(chain: Sequence[Sample]) -> Tokens:
    """Return the tokens that the model reads for all turns of a conversation."""
    last = chain[-1].tokens
    return (*last.prompt, *last.sampled[:-1])
