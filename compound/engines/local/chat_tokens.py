"""Tokenize chats, and read tool calls of models that write them as text.

Control tokens come from the chat template only, never from contents: a text such as ``<|im_end|>``
in a message would otherwise end the message and could start another role. The template is rendered
twice, once with marks in the contents, which show where a control token comes from one. Such tokens
are divided after their first character; a chat without one is tokenized as it is. transformers'
``sanitize_control_tokens`` deletes some characters from contents, and ignores keys, texts that form
a control token only together with the template, and reasoning in earlier answers, which templates
read.

Tools are supported of models that write a call as JSON between ``<tool_call>`` and
``</tool_call>``, the form of Hermes, Qwen and SmolLM.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from compound.core.engine import Message, ToolCall, ToolSpec, token_ids
from compound.core.errors import CallError
from compound.engines.chat_format import MAX_CALLS, tools_to_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    Mark = Callable[..., str]

_WRITTEN = re.compile(r"</?\w+>")  # tags such as <think>, which models write in their answers


class ChatTokenizer:
    """Tokenizer of chats by a model's chat template.

    Control tokens are the special tokens, and the other added tokens that occur in the template, as
    those of roles do in some models.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        model: str,
        variables: Mapping[str, object] | None = None,
    ) -> None:
        self.tokenizer, self._model, self._variables = tokenizer, model, dict(variables or {})
        template = str(tokenizer.chat_template)
        words = set(re.findall(r"\w+", template))
        if unused := [repr(name) for name in self._variables if name not in words]:
            warnings.warn(
                f"the chat template of {model!r} does not use {', '.join(unused)}, which "
                "chat_template_kwargs sets",
                stacklevel=2,
            )
        added = [t for t in tokenizer.added_tokens_decoder.values() if len(t.content.strip()) > 1]
        special = {t.content for t in added if t.special}
        control = special | {t.content for t in added if t.content in template}
        self._control = _any_of(control)
        self._in_answers = _any_of(
            {t for t in control if t in special or not _WRITTEN.fullmatch(t)}
        )
        plain = [
            t.content for t in added if t.special and not (t.lstrip or t.rstrip or t.single_word)
        ]
        self._divider = min([*plain, *special], default="")

    def encode(
        self, messages: Sequence[Message], cue: str, tools: Sequence[ToolSpec]
    ) -> tuple[int, ...]:
        """Return the tokens of a chat, and of the start of its answer.

        Raises:
            CallError: the template does not accept the messages.
        """
        try:
            text, marked = self._render(turns_of(messages), cue, tools_to_json(tools))
        except Exception as error:  # a template may raise any exception
            raise CallError(
                f"the chat template of {self._model!r} does not accept the messages: {error}"
            ) from error
        cuts = [
            found.start() + 1
            for found in self._control.finditer(text)
            if any(found.start() <= at < found.start() + len(found[1]) for at in marked)
        ]
        return self._tokens(text, cuts)

    def encode_answer(self, text: str) -> tuple[int, ...]:
        """Return the tokens of an answer that another model wrote."""
        return self._tokens(text, [found.start() + 1 for found in self._in_answers.finditer(text)])

    def _render(
        self, turns: list[dict[str, Any]], cue: str, tools: list[dict[str, Any]]
    ) -> tuple[str, list[int]]:
        """Return the text of a chat, and the positions of marked characters, which come from contents."""
        given = json.dumps([turns, cue, tools], ensure_ascii=False)
        plain = self._applied(turns, tools) + cue
        mark = _unused_number(given + plain)
        for edges in (True, False):  # some templates test the start of a content
            add = _marker(mark, edges=edges)
            inner = functools.partial(add, self._control, inner=True)
            marked_turns = [self._marked_turn(turn, add) for turn in turns]
            rendered = self._applied(marked_turns, _changed(tools, inner)) + add(self._control, cue)
            pieces = rendered.split(mark)
            text, marked = "".join(pieces), list(accumulate(map(len, pieces[:-1])))
            if text == plain:
                return text, marked
        # the template read a control token in a content
        return (text, marked) if marked else (plain, [])

    def _marked_turn(self, turn: Mapping[str, Any], add: Mark) -> dict[str, Any]:
        own = turn["role"] == "assistant"
        control = self._in_answers if own else self._control
        rest = {key: value for key, value in turn.items() if key not in ("role", "content")}
        return {
            "role": turn["role"],
            "content": add(control, turn["content"], inner=own),
            **_changed(rest, functools.partial(add, control, inner=True)),
        }

    def _applied(self, turns: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        declared = {"tools": tools} if tools else {}
        text: str = self.tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, tokenize=False, **declared, **self._variables
        )
        return text

    def _tokens(self, text: str, cuts: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens of a text that is divided at some positions."""
        ends = [0, *cuts, len(text)]
        pieces = [text[a:b] for a, b in pairwise(ends)]
        tokens = token_ids(
            self.tokenizer(self._divider.join(pieces), add_special_tokens=False).input_ids
        )
        if not cuts:
            return tokens
        divider = self.tokenizer.convert_tokens_to_ids(self._divider)
        counts = [len(re.findall(re.escape(self._divider), piece)) for piece in pieces]
        found = [i for i, token in enumerate(tokens) if token == divider]
        if len(found) != sum(counts) + len(cuts):
            raise CallError(
                f"the tokenizer of {self._model!r} cannot encode the control tokens in a message"
            )
        inserted = {found[sum(counts[: n + 1]) + n] for n in range(len(cuts))}
        return tuple(token for i, token in enumerate(tokens) if i not in inserted)


def _any_of(texts: set[str]) -> re.Pattern[str]:
    """Return a pattern that finds the longest of some texts at every position, also overlapping ones."""
    return re.compile(
        f"(?=({'|'.join(map(re.escape, sorted(texts, key=len, reverse=True))) or '(?!)'}))"
    )


def _unused_number(text: str) -> str:
    """Return a number that is not in a text; templates leave digits as they are.

    It starts with the only 7, so that no digits before it can be taken for its start.
    """
    number = int(hashlib.sha256(text.encode(errors="replace")).hexdigest(), 16)
    while (mark := f"7{number}".replace("7", "8").replace("8", "7", 1)) in text:
        number += 1
    return mark


def _marker(mark: str, *, edges: bool) -> Mark:
    """Return a function that puts a mark before each match of a pattern in a text.

    With ``edges``, also before the first and the last visible character, unless the text is
    ``inner``.
    """

    def add(pattern: re.Pattern[str], text: str, *, inner: bool = False) -> str:
        places = {found.start() for found in pattern.finditer(text)}
        if edges and not inner and text.strip():
            places |= {len(text) - len(text.lstrip()), len(text.rstrip()) - 1}
        ends = [0, *sorted(places), len(text)]
        return mark.join(text[a:b] for a, b in pairwise(ends))

    return add


def _changed(value: Any, change: Callable[[str], str]) -> Any:  # noqa: ANN401 - any JSON value
    """Return a JSON value with all of its strings and keys changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _changed(each, change) for key, each in value.items()}
    return [_changed(each, change) for each in value] if isinstance(value, list) else value


START, END = "<tool_call>", "</tool_call>"
_TOOLS = re.compile(r"\btools\b")


def has_tools(template: str) -> bool:
    """Return whether a chat template declares tools, and asks for calls in the supported form.

    >>> has_tools("{% if tools %}Reply with <tool_call>…</tool_call>{% endif %}"), has_tools("{{ messages }}")
    (True, False)
    """
    return START in template and _TOOLS.search(template) is not None


def turns_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages in the form that chat templates take; arguments of calls are values, not JSON text."""
    found: list[dict[str, Any]] = []
    names = {call.id: call.name for message in messages for call in message.tool_calls}
    for message in messages:
        turn: dict[str, Any] = {"role": message.role, "content": message.text}
        if message.tool_calls:
            calls = [
                {"name": call.name, "arguments": _arguments(call.arguments)}
                for call in message.tool_calls
            ]
            turn["tool_calls"] = [{"type": "function", "function": call} for call in calls]
        if message.role == "tool":
            turn["name"] = names.get(message.tool_call_id, "")
        found.append(turn)
    return found


def write_calls(text: str, calls: Sequence[ToolCall]) -> str:
    """Return an answer with its calls, as `read_calls` reads it.

    >>> write_calls("Let me see.", [ToolCall("call_1", "add", '{"a": 1}')])
    'Let me see.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    """
    found = ({"name": call.name, "arguments": _arguments(call.arguments)} for call in calls)
    return text + "".join(f"{START}{json.dumps(call, ensure_ascii=False)}{END}" for call in found)


def read_calls(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Return the text of an answer without its calls, and the calls; one that is no JSON remains text.

    >>> read_calls('Let me see.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    ('Let me see.', (ToolCall(id='call_1', name='add', arguments='{"a": 1}'),))
    """
    calls: list[ToolCall] = []
    rest, at = "", 0
    # a regular expression would take cubic time for an answer that does not end a call
    while (start := text.find(START, at)) >= 0 and (end := text.find(END, start)) >= 0:
        inside, after = text[start + len(START) : end].strip(), end + len(END)
        call = _call(inside, len(calls) + 1) if len(calls) < MAX_CALLS else None
        if call is None:
            rest += text[at:after]
        else:
            rest += text[at:start]
            calls.append(call)
        at = after
    rest += text[at:]
    return (rest.strip() if calls else text), tuple(calls)


def _call(text: str, number: int) -> ToolCall | None:
    try:
        found = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, Mapping) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(f"call_{number}", found["name"], text)


def _arguments(text: str) -> object:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return text
