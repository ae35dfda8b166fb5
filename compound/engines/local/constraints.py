"""Constrained decoding: restrict each token of an answer to those that its format allows, with llguidance.

The parser of a format determines the allowed tokens from the answer so far, so a token record need
not store them: `ConstraintCompiler.replay` computes them again for the trainer.

An answer that is not complete when few tokens are left is closed: from then on each token is the
one that ends strings, arrays and objects soonest. A format without length limits is therefore still
respected within ``max_tokens``, if its shortest answers fit. Of some given texts, each must fit, since
a limit would otherwise choose among them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from compound.core.engine import AnswerFormat
from compound.core.errors import CallError, MissingExtra
from compound.engines.remote import first_line

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Bits = NDArray[np.int32]

FORMATS = 256  # compiled formats that are kept
LONGEST_CLOSING = 1024  # tokens after which a closing counts as too long
CHOICE_SHARE = 2  # times the tokens of the longest text, for texts to choose from
MARGIN_SHARE = 4  # at most this part of the tokens is kept free besides those of the closing
# Separators are fixed: with free whitespace a small model may repeat line breaks until the limit.
JSON_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": True,  # keywords that cannot be enforced are checked when the answer is parsed
}
_DAYS = "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|[12][0-9])"
_DATE = f"(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{{2}}|[1-9][0-9]{{3}})-({_DAYS})"
_TIME = (
    "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]([.][0-9]{1,6})?(Z|[-+]([01][0-9]|2[0-3]):[0-5][0-9])"
)
_N = "[0-9]{1,6}"
# llguidance's own formats allow digits without end, so that an answer could not be closed, and the
# year 0.
FORMAT_PATTERNS = {
    "date": f"^{_DATE}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "time": f"^{_TIME}$",
    "duration": f"^P({_N}[WD]|({_N}D)?T({_N}H({_N}M)?({_N}S)?|{_N}M({_N}S)?|{_N}([.]{_N})?S))$",
}
# Texts in the order in which they close an answer soonest. In a string, where letters are allowed,
# a bracket is only another character.
CLOSERS = ("}", "]")
CONTINUATIONS = ('"', ",", ":", " ", "n", "0", "1", "f", "t", "[", "{", "-")


@dataclass(frozen=True, slots=True)
class Constraint:
    """Restriction of one answer."""

    answer: AnswerFormat
    lead: bool
    max_tokens: int

    def to_text(self) -> str:
        """Return the constraint as JSON, which `from_text` reads."""
        own = {"lead": self.lead, "max_tokens": self.max_tokens}
        return json.dumps({**self.answer.to_json(), **own})

    @staticmethod
    def from_text(text: str) -> Constraint:
        """Read the output of `to_text`."""
        data = json.loads(text)
        answer = AnswerFormat(data.get("schema", ""), tuple(data.get("choices", ())))
        return Constraint(answer, data["lead"], data["max_tokens"])


def grammar_of(answer: AnswerFormat, *, lead: bool) -> str:
    """Return the grammar of a format in llguidance's variant of Lark.

    >>> print(grammar_of(AnswerFormat(choices=("yes", "no")), lead=True))
    start: " "? answer
    answer: "yes" | "no"
    """
    start = 'start: " "? answer' if lead else "start: answer"
    if answer.schema:
        schema = _bounded(json.loads(answer.schema))
        schema = {**(schema if isinstance(schema, dict) else {}), "x-guidance": JSON_OPTIONS}
        return f"{start}\nanswer: %json {json.dumps(schema)}"
    return f"{start}\nanswer: {' | '.join(map(json.dumps, answer.choices))}"


def _bounded(schema: object) -> object:
    """Return a schema in which texts of dates, times and durations have bounded lengths."""
    if isinstance(schema, list):
        return [_bounded(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {
        key: part if key in ("enum", "const") else _bounded(part) for key, part in schema.items()
    }
    pattern = FORMAT_PATTERNS.get(str(schema.get("format")))
    if pattern and schema.get("type") == "string" and "pattern" not in schema:
        del found["format"]
        found["pattern"] = pattern
    return found


class ConstraintCompiler:
    """Compiles formats for the tokens of one model.

    Raises:
        MissingExtra: llguidance is not installed.
        CallError: the tokenizer is not a fast tokenizer.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, size: int, ends: Collection[int]
    ) -> None:
        try:
            from llguidance import LLTokenizer
            from llguidance.hf import from_tokenizer
        except ImportError:
            raise MissingExtra("an answer of a declared type", "llguidance", "local") from None
        try:
            self._tokens: LLTokenizer = from_tokenizer(
                tokenizer, n_vocab=size, eos_token=sorted(ends), slices=LLTokenizer.json_slices()
            )
        except ValueError as error:
            raise CallError(
                f"the tokenizer does not support constrained decoding: {error}",
                hint="set `enforce: false` on the component",
            ) from error
        self.size, self.ends = size, frozenset(ends)
        self._compiled = functools.lru_cache(maxsize=FORMATS)(self._compile)

    def start(self, constraint: Constraint) -> ConstraintState | ChoiceState:
        """Return the state before the first token of an answer.

        Raises:
            CallError: the format cannot be enforced, or one of the texts to choose from is longer
                than an answer may be.
        """
        matcher, shortest = self._compiled(constraint.answer, constraint.lead)
        if texts := constraint.answer.choices:
            written = {text: tuple(self._tokens.tokenize_str(text)) for text in texts}
            longest = max(texts, key=lambda text: len(written[text]))
            needed = len(written[longest])
            if needed > constraint.max_tokens:
                raise CallError(
                    f"max_tokens={constraint.max_tokens} is too low for the answer {longest!r:.60}",
                    hint=f"set max_tokens to {needed} or more",
                )
            if constraint.max_tokens < CHOICE_SHARE * (needed + 1):  # with the end token
                spaced = [f" {text}" for text in texts] if constraint.lead else []
                more = (tuple(self._tokens.tokenize_str(text)) for text in spaced)
                fitting = {each for each in more if len(each) <= constraint.max_tokens}
                return ChoiceState({*written.values(), *fitting}, self.ends)
        return ConstraintState(self, matcher.deep_copy(), constraint.max_tokens, shortest)

    def replay(self, constraint: Constraint, sampled: Sequence[int]) -> Bits:
        """Return the tokens that were allowed at each position of a sampled answer, as packed bits.

        Raises:
            ValueError: the answer has a token that the constraint does not allow.
        """
        state = self.start(constraint)
        bits = np.empty((len(sampled), -(-self.size // 32)), np.int32)
        for position, token in enumerate(sampled):
            state.fill(bits[position])
            if not bits[position, token // 32] >> (token % 32) & 1:
                raise ValueError(
                    f"the token {token} at position {position} violates the answer's format"
                )
            state.accept(token)
        return bits

    @functools.cached_property
    def closers(self) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Tokens of `CLOSERS` and `CONTINUATIONS`, and a token that is allowed in any text."""
        return (
            tuple(token for text in CLOSERS for token in self._token(text)),
            tuple(token for text in CONTINUATIONS for token in self._token(text)),
            self._token("x")[0],
        )

    def _token(self, text: str) -> tuple[int, ...]:
        found = self._tokens.tokenize_str(text)
        return tuple(found) if len(found) == 1 else ()

    def _compile(self, answer: AnswerFormat, lead: bool) -> tuple[LLMatcher, int]:
        """Return the parser of a format, and the number of tokens of a short answer."""
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokens, grammar_of(answer, lead=lead), log_level=0)
        if matcher.is_error():
            raise CallError(
                f"the answer's format cannot be enforced: {first_line(matcher.get_error())}",
                hint="simplify the output type, or set `enforce: false` on the component",
            )
        return matcher, len(ConstraintState(self, matcher, 0, 0).closing())


class ChoiceState:
    """State of an answer that is one of some texts, each in the tokens that the tokenizer divides it into.

    It is used if the limit of tokens leaves no room for other divisions.
    """

    def __init__(self, left: set[tuple[int, ...]], ends: Collection[int]) -> None:
        self._left, self._ends = left, ends

    @property
    def complete(self) -> bool:
        """Whether the answer may end here."""
        return () in self._left

    def fill(self, bits: Bits) -> None:
        """Write the allowed tokens into a row of packed bits."""
        allowed = np.zeros(32 * len(bits), np.bool_)
        allowed[[rest[0] for rest in self._left if rest]] = True
        if self.complete:
            allowed[list(self._ends)] = True
        bits[:] = np.packbits(allowed, bitorder="little").view(np.int32)

    def accept(self, token: int) -> None:
        """Record the next token of the answer."""
        self._left = {rest[1:] for rest in self._left if rest[:1] == (token,)}


class ConstraintState:
    """State of the parser of one answer.

    Args:
        compiler: the compiler.
        matcher: the parser in its initial state, which this object modifies.
        max_tokens: maximum number of tokens of the answer.
        shortest: number of tokens of a short answer. An optional part that one token begins can
            hardly delay the end by more, so as many tokens are kept free.
    """

    def __init__(
        self, compiler: ConstraintCompiler, matcher: LLMatcher, max_tokens: int, shortest: int
    ) -> None:
        self._compiler, self._matcher = compiler, matcher
        self._left, self._margin = max_tokens, min(shortest, max_tokens // MARGIN_SHARE)
        self._check_at = 0  # tokens left at which the length of the closing is computed next
        self._closing: list[int] | None = None
        self._plan(shortest)

    @property
    def complete(self) -> bool:
        """Whether the answer may end here."""
        return bool(self._matcher.is_accepting())

    def fill(self, bits: Bits) -> None:
        """Write the allowed tokens into a row of packed bits.

        Raises:
            CallError: the parser failed, for example because the format is too complex.
        """
        if self._closing is None and self._left <= self._check_at:
            closing = self.closing()
            self._closing = closing if self._plan(len(closing)) <= 0 else None
        if self._closing:
            bits[:] = 0
            bits[self._closing[0] // 32] = np.uint32(1 << self._closing[0] % 32).astype(np.int32)
        else:
            self._compute(self._matcher, bits)

    def _plan(self, closing: int) -> int:
        """Return the number of spare tokens, and set when it is computed next."""
        spare = self._left - closing - self._margin
        self._check_at = self._left - max(1, spare // 4) if spare > 0 else self._left
        return spare

    def accept(self, token: int) -> None:
        """Record the next token of the answer."""
        self._left -= 1
        self._closing = self._closing[1:] if self._closing else None
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)

    def closing(self) -> list[int]:
        """Return the tokens, with an end token, that complete the answer soonest by `CLOSERS`."""
        matcher, found = self._matcher.deep_copy(), list[int]()
        bits = np.empty(-(-self._compiler.size // 32), np.int32)
        while len(found) < LONGEST_CLOSING:
            if matcher.is_accepting() or matcher.is_stopped():
                return [*found, min(self._compiler.ends)]
            forced = matcher.compute_ff_tokens()
            if not forced:
                self._compute(matcher, bits)
                forced = [self._closer(bits)]
            if not matcher.consume_tokens(forced):
                return found
            found += forced
        return found

    def _closer(self, bits: Bits) -> int:
        """Return the allowed token that ends the answer soonest, as far as its text shows."""
        closers, continuations, letter = self._compiler.closers

        def is_allowed(token: int) -> bool:
            return bool(bits[token // 32] >> (token % 32) & 1)

        ordered = continuations if is_allowed(letter) else (*closers, *continuations)
        found = next(filter(is_allowed, ordered), None)
        return int(unpack(bits[None], self._compiler.size)[0].argmax()) if found is None else found

    @staticmethod
    def _compute(matcher: LLMatcher, bits: Bits) -> None:
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if matcher.is_error():
            raise CallError(
                f"the answer's format could not be followed: {first_line(matcher.get_error())}",
                hint="simplify the output type, or set `enforce: false` on the component",
            )


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens that end an answer of a model, with its original generation settings."""
    ends = model.generation_config.eos_token_id
    return frozenset(
        {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
    )


def unpack(bits: Bits, size: int) -> NDArray[np.bool_]:
    """Convert rows of packed bits to booleans, (rows, size).

    >>> unpack(np.array([[5]], np.int32), 4).tolist()
    [[True, False, True, False]]
    """
    return np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[:, :size].astype(np.bool_)
