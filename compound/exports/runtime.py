"""Run an exported system with an OpenAI-compatible server, using the standard library only.

This file is copied into exported programs, with the system as the literal PROGRAM, and with the code of the
modules that it imports from the package. It formats prompts and reads answers as the package does; the tests
compare the two.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import math
import os
import re
import sys
import textwrap  # noqa: F401 - used by the copied modules
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal  # noqa: F401
from functools import partial
from typing import Any

from compound.components.answers.answer_lists import list_items
from compound.components.answers.answer_words import (
    check_cut,
    json_object,
    labelled_fields,
    plain_text,
    read_bool,
    read_label,
    read_number,
    read_union,
)
from compound.execution.calls.answer_text import after_thoughts, answer_part, json_values

PROGRAM: dict[str, Any] = {}  # <- replaced by the system

# -- graph -------------------------------------------------------------------------------------------

ABSENT: Any = object()  # value of an output whose node was skipped by its condition
Complete = Callable[[dict[str, Any]], Any]


class ExportedRunError(Exception):
    """A step failed; the message names it."""


def run_program(program: Mapping[str, Any], inputs: Mapping[str, Any], complete: Complete) -> dict[str, Any]:
    """Run a system whose requests are answered by ``complete``."""
    if set(inputs) != set(program["inputs"]):
        raise ExportedRunError(f"the inputs must be {sorted(program['inputs'])}, but got {sorted(inputs)}")
    outputs = run_graph(program, inputs, complete)
    for name, value in outputs.items():
        if value is ABSENT:
            raise ExportedRunError(f"output {name!r} was skipped by a condition")
    return outputs


def run_graph(graph: Mapping[str, Any], inputs: Mapping[str, Any], complete: Complete) -> dict[str, Any]:
    """Run the nodes of a graph, which are in topological order."""
    results: dict[str, dict[str, Any]] = {}
    for node in graph["nodes"]:
        results[node["name"]] = run_node(node, inputs, results, complete)
    return {name: read(source, inputs, results) for name, source in graph["outputs"].items()}


def read(source: Sequence[str], inputs: Mapping[str, Any], results: Mapping[str, Mapping[str, Any]]) -> Any:  # noqa: ANN401
    """Return the value of an input, or of a node's output or a field of it."""
    if source[0] == "input":
        return inputs[source[1]]
    value = results[source[1]][source[2]]
    for key in source[3:]:
        if value is not ABSENT:
            value = value[key] if isinstance(value, Mapping) else getattr(value, key)
    return value


def run_node(
    node: Mapping[str, Any],
    inputs: Mapping[str, Any],
    results: Mapping[str, Mapping[str, Any]],
    complete: Complete,
) -> dict[str, Any]:
    """Run a node, or return absent outputs if its condition does not hold."""
    given = {port: read(source, inputs, results) for port, source in node["wires"].items()}
    optional = node["optional"]
    skipped = any(value is ABSENT and port not in optional for port, value in given.items())
    if node["when"] is not None:
        guard = read(node["when"]["source"], inputs, results)
        skipped = skipped or guard is ABSENT or guard != node["when"]["equals"]
    if skipped:
        return dict.fromkeys(node["outputs"], ABSENT)
    given = {port: optional.get(port) if value is ABSENT else value for port, value in given.items()}
    given = {**{port: value for port, value in optional.items() if port not in given}, **given}
    try:
        return KINDS[node["kind"]](node, given, complete)
    except ExportedRunError:
        raise
    except Exception as error:
        raise ExportedRunError(f"{node['name']}: {type(error).__name__}: {error}") from error


def run_function(node: Mapping[str, Any], given: Mapping[str, Any], complete: Complete) -> dict[str, Any]:
    """Call a Python function that is found by its name."""
    module, _, path = node["call"].partition(":")
    function: Any = importlib.import_module(module)
    for part in path.split("."):
        function = getattr(function, part)
    result = function(**{**node["settings"], **given})
    if inspect.isawaitable(result):
        result = asyncio.run(_awaited(result))
    return {"output": result} if node["single"] else dict(result)


async def _awaited(result: Any) -> Any:  # noqa: ANN401
    return await result


def run_value(node: Mapping[str, Any], given: Mapping[str, Any], complete: Complete) -> dict[str, Any]:
    """Return a fixed value."""
    return {name: given.get(node["setting"], node["value"]) for name in node["outputs"]}


def run_first_of(node: Mapping[str, Any], given: Mapping[str, Any], complete: Complete) -> dict[str, Any]:
    """Return the first value of a branch that was not skipped."""
    present = [given[port] for port in node["ports"] if given.get(port) is not None]
    if not present:
        raise ValueError("no input has a value: every branch was skipped")
    return {"output": present[0]}


def run_loop(node: Mapping[str, Any], given: Mapping[str, Any], complete: Complete) -> dict[str, Any]:
    """Repeat a graph until its condition holds."""
    turns = given.get("max_turns", node["max_turns"])
    state = {name: given[name] for name in node["body"]["inputs"]}
    outputs: dict[str, Any] = {}
    for _ in range(turns):
        outputs = run_program(node["body"], state, complete)
        if node["until"] is not None and outputs[node["until"]] is True:
            break
        state |= {target: outputs[source] for source, target in node["carry"].items()}
    return outputs


def run_map(node: Mapping[str, Any], given: Mapping[str, Any], complete: Complete) -> dict[str, Any]:
    """Run a graph for each item of a list."""
    items = given[node["over"]]
    found = [run_program(node["body"], {**given, node["over"]: item}, complete) for item in items]
    return {name: [outputs[name] for outputs in found] for name in node["outputs"]}


KINDS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any], Complete], dict[str, Any]]] = {
    "function": run_function,
    "value": run_value,
    "first_of": run_first_of,
    "loop": run_loop,
    "map": run_map,
}


# -- chat --------------------------------------------------------------------------------------------

BASE_URL = "https://api.openai.com/v1"
TRIES, WAIT = 4, 1.0  # attempts of a request, and seconds before the second one
JSON_TYPES: dict[str, type] = {"object": dict, "array": list, "string": str}


def run(
    inputs: Mapping[str, Any], *, base_url: str = "", api_key: str = "", timeout: float = 120.0
) -> dict[str, Any]:
    """Run the system on one set of inputs and return its outputs.

    Args:
        inputs: a value for each input.
        base_url: base URL of an OpenAI-compatible server; default: OPENAI_BASE_URL, or OpenAI's.
        api_key: key of the server; default: the environment variable OPENAI_API_KEY.
        timeout: seconds until a request fails.
    """
    url = base_url or os.environ.get("OPENAI_BASE_URL") or BASE_URL
    unformatted: set[str] = set()  # models that do not take a response format

    def complete(body: dict[str, Any]) -> tuple[str, bool]:
        plain = {name: value for name, value in body.items() if name != "response_format"}
        if plain == body or body["model"] in unformatted:
            return send(plain, url, api_key, timeout)
        try:
            return send(body, url, api_key, timeout)
        except RejectedRequest:
            answer = send(plain, url, api_key, timeout)  # the prompt describes the format, too
            unformatted.add(body["model"])
            return answer

    return run_program(PROGRAM, inputs, complete)


def run_llm(node: Mapping[str, Any], given: Mapping[str, Any], complete: Complete) -> dict[str, Any]:
    """Ask the model, and ask again after an answer that cannot be read."""
    settings = {**node["settings"], **{k: v for k, v in given.items() if k in node["settings"]}}
    shown = {name: value for name, value in given.items() if name not in settings}
    messages = [{"role": "system", "content": node["system"]}] if node["system"] else []
    messages.append({"role": "user", "content": "\n\n".join([*node["blocks"], format_inputs(shown)])})
    for attempt in range(node["reasks"] + 1):
        *earlier, last = messages
        cued = f"{last['content']}\n{node['cue']}" if node["cue"] else last["content"]
        body = {
            "model": model_of(settings["lm"]),
            "messages": [*earlier, {"role": last["role"], "content": cued}],
            "max_tokens": settings["max_tokens"],
            "temperature": settings["temperature"],
            **({"response_format": node["response_format"]} if node["response_format"] else {}),
            **node["options"],
        }
        if "max_tokens" in node["unsupported"]:
            body["max_completion_tokens"] = body["max_tokens"]
        body = {name: value for name, value in body.items() if name not in node["unsupported"]}
        answer, is_cut = complete(body)
        text = unwrap(answer) if node["wrapped"] else answer
        try:
            return parse(text, node["fields"], node["layout"], is_cut and text == answer)
        except ValueError as error:
            if attempt == node["reasks"]:
                raise
            correction = f"The answer is invalid: {str(error)[:500]}\nReply with {node['corrected']} only."
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": correction}]
    raise AssertionError("the last attempt returns or raises")


KINDS["llm"] = run_llm


# -- requests ----------------------------------------------------------------------------------------


def model_of(name: str) -> str:
    """Return the name of a model at its server: without the prefix of the provider OpenAI.

    >>> model_of("openai/gpt-4o-mini"), model_of("meta/llama")
    ('gpt-4o-mini', 'meta/llama')
    """
    return name.removeprefix("openai/")


class RejectedRequest(ExportedRunError):
    """The server does not take a request."""


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """Reports a redirect as an error, since it would take the key and the prompt to another server."""

    def redirect_request(self, *_: Any) -> None:  # noqa: ANN401
        """Follow none."""


OPENER = urllib.request.build_opener(NoRedirects)
MAX_ANSWER = 2**26  # bytes


def send(body: Mapping[str, Any], base_url: str, api_key: str, timeout: float) -> tuple[str, bool]:
    """Send a request for a chat completion; return the text, and whether it was cut. Retry what may pass."""
    if not base_url.startswith(("http://", "https://")):
        raise ExportedRunError(f"the base URL must start with http:// or https://, but is {base_url!r}")
    key = api_key or os.environ.get("OPENAI_API_KEY", "")
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    asked = urllib.request.Request(
        f"{base_url.rstrip('/')}/chat/completions", json.dumps(body).encode(), headers
    )
    for attempt in range(TRIES):
        try:
            with OPENER.open(asked, timeout=timeout) as answer:
                choice = json.loads(answer.read(MAX_ANSWER))["choices"][0]
                content, is_cut = choice["message"]["content"], choice.get("finish_reason") == "length"
                return (content if isinstance(content, str) else ""), is_cut
        except urllib.error.HTTPError as error:
            detail = error.read(500).decode(errors="replace")
            if attempt + 1 == TRIES or (error.code != 429 and error.code < 500):
                kind = RejectedRequest if error.code in (400, 422) else ExportedRunError
                raise kind(f"the server answered {error.code}: {detail}") from None
        except (OSError, ValueError) as error:
            if attempt + 1 == TRIES:
                raise ExportedRunError(f"the server did not answer: {error}") from None
        time.sleep(WAIT * 2**attempt)
    raise AssertionError("the last attempt returns or raises")


# -- prompts -----------------------------------------------------------------------------------------


def format_inputs(inputs: Mapping[str, Any]) -> str:
    """Format inputs as labelled text."""
    texts = {name: format_value(value) for name, value in inputs.items() if value is not None}
    return "\n".join(
        f"{field_label(name)}:" + (f"\n{text}" if "\n" in text else f" {text}")
        for name, text in texts.items()
    )


def field_label(name: str) -> str:
    """Return a field's label."""
    return "Answer" if name == "output" else name.replace("_", " ").capitalize()


def format_value(value: Any) -> str:  # noqa: ANN401
    """Format a value for a model: one passage per line, numbered texts, anything else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, str) for item in value):
        return "\n".join(f"[{i}] {text}" for i, text in enumerate(value, 1))
    if isinstance(value, (list, tuple)) and value and all(map(is_passage, value)):
        return "\n".join(f"{p['title']}: {p['text']}" if p.get("title") else p["text"] for p in value)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def is_passage(value: Any) -> bool:  # noqa: ANN401
    """Return whether a value has a text and no fields that the line of a passage does not show."""
    return (
        isinstance(value, Mapping)
        and value.keys() <= {"id", "title", "text", "score"}
        and isinstance(value.get("text"), str)
        and isinstance(value.get("title"), (str, type(None)))
    )


# -- answers -----------------------------------------------------------------------------------------


def unwrap(text: str) -> str:
    """Return the answer from the object in which a response format wraps it; other texts are unchanged."""
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return text
    if not isinstance(value, dict) or value.keys() != {"answer"}:
        return text
    inner = value["answer"]
    return inner if isinstance(inner, str) else json.dumps(inner, ensure_ascii=False)


def parse(text: str, fields: Mapping[str, Any], layout: str, is_cut: bool = False) -> dict[str, Any]:
    """Read the fields of an answer, or raise ValueError."""
    raw = raw_fields(text, fields, layout)
    last = [*raw][-1] if raw and is_cut and layout != "json" else None
    parsed: dict[str, Any] = {}
    problems = []
    for name, kind in list(fields.items())[: 1 if layout == "text" else None]:
        if name not in raw:
            problems.append(f"{name!r} is missing")
            continue
        try:
            is_text = layout == "json" and isinstance(raw[name], str) and takes_text(kind)
            value = raw[name] if is_text else parse_value(raw[name], kind)
            if name == last:
                check_last(raw[name], kind, value, layout)
            parsed[name] = value
        except ValueError as error:
            problems.append(f"{name!r}: {error}")
    if problems:
        raise ValueError(f"{'; '.join(problems)} in {text!r:.300}")
    return parsed


def raw_fields(text: str, fields: Mapping[str, Any], layout: str) -> Mapping[str, Any]:
    """Return the texts or JSON values of the fields that a text has."""
    names = list(fields)
    if layout == "text":
        is_whole = fields[names[0]] == {"type": "str"} and bool(after_thoughts(text))
        answer = text if is_whole else answer_part(text)
        return {names[0]: answer.strip().removeprefix(f"{field_label(names[0])}:").strip()}
    answer = answer_part(text)
    if layout == "json":
        return json_object(answer, names)
    found = labelled_fields(answer, names)
    if found and len(found) < len(names) and after_thoughts(text) == text:
        whole = labelled_fields(text, names)
        return whole if len(whole) == len(names) else found
    return found


def takes_text(kind: Mapping[str, Any]) -> bool:
    """Return whether any text is a value of a type."""
    inner = kind["item"] if kind["type"] == "optional" else kind
    if inner["type"] == "union":
        return any(map(takes_text, inner["items"]))
    return inner["type"] in ("str", "any") or {"string"} < set(inner.get("forms", ()))


def check_last(raw: str, kind: Mapping[str, Any], value: Any, layout: str) -> None:  # noqa: ANN401
    """Check that the last value of a text that was cut is complete; a single text may be cut."""
    if takes_text(kind) and isinstance(value, str):
        if layout == "fields":
            raise ValueError("the text was cut in this field")
    else:
        name = (kind["item"] if kind["type"] == "optional" else kind)["type"]
        form = {"json": "json", "list": "list"}.get(name, "words")
        check_cut(raw, form, value, partial(parse_value, kind=kind), labels_of(kind))


def labels_of(kind: Mapping[str, Any]) -> list[str]:
    """Return the texts of the values of a type with finitely many, else an empty list."""
    if kind["type"] == "bool":
        return ["yes", "no", "true", "false"]
    if kind["type"] == "labels":
        return [str(option) for option in kind["options"]]
    parts = [kind["item"]] if kind["type"] == "optional" else kind.get("items", [])
    found = [labels_of(part) for part in parts]
    none = ["none"] if kind["type"] == "optional" else []
    return [*(label for labels in found for label in labels), *none] if found and all(found) else []


def parse_value(raw: Any, kind: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """Convert the text or JSON of a value to its type."""
    name = kind["type"]
    if name == "optional":
        none = raw is None or (isinstance(raw, str) and raw.strip().lower() in ("", "none", "null"))
        return None if none else parse_value(raw, kind["item"])
    if not isinstance(raw, str):
        return _from_json_value(raw, kind)
    if name in ("str", "any"):
        return raw
    if name == "labels":
        return _member(plain_text(raw), kind)
    if name == "bool":
        return read_bool(plain_text(raw))
    if name in ("int", "float"):
        return read_number(plain_text(raw), name)
    if name == "list":
        return [parse_value(part, kind["item"]) for part in list_items(raw, kind["item"]["type"])]
    if name == "union":
        readers = [(item["type"], partial(parse_value, kind=item)) for item in kind["items"]]
        return read_union(raw, readers)
    return _json(raw, kind["forms"])


def whole_json(text: str) -> list[Any]:
    """Return the value of a text that is JSON in a list; otherwise an empty list."""
    try:
        return [json.loads(text, strict=False)]
    except (ValueError, RecursionError):
        return []


def _json(raw: str, forms: Sequence[str]) -> Any:  # noqa: ANN401
    """Return the first value of a text in a form of its type; a text without one, if texts are values."""
    fits = {JSON_TYPES[form] for form in forms if form in JSON_TYPES} or {dict, list}
    fenced = re.fullmatch(r"```\w*\n(.*)```", raw.strip(), re.DOTALL)
    body = (fenced[1] if fenced else raw).strip()
    # in a text, brackets may be something else, such as a citation
    start = r"\{" if "string" in forms or "array" not in forms else r"[{\[]"
    values = json_values(raw, start)
    for value in whole_json(body) or [value for value, _, _ in reversed(values)]:
        if type(value) in fits:
            if values and re.search(r'\{\s*"|\[\s*[{"]', raw[values[-1][2] :]):
                raise ValueError(f"{raw!r:.100} has incomplete JSON after the last complete one")
            json.dumps(value, allow_nan=False)  # rejects what is no JSON
            return value
        if type(value) is list:
            raise ValueError(f"{raw!r:.100} is none of {', '.join(forms)}")
    if "string" in forms and not body.startswith(("{", '["', "[{")):
        return raw
    raise ValueError(f"{raw!r:.100} holds no complete JSON")


def _option(raw: Any, items: Sequence[Mapping[str, Any]]) -> Any:  # noqa: ANN401
    for item in items:
        try:
            return parse_value(raw, item)
        except ValueError:
            continue
    raise ValueError(f"{raw!r:.100} has none of the types of the answer")


def _from_json_value(raw: Any, kind: Mapping[str, Any]) -> Any:  # noqa: ANN401
    name = kind["type"]
    if name == "union":
        return _option(raw, kind["items"])
    if isinstance(raw, float) and not math.isfinite(raw):
        raise ValueError(f"{raw!r} is not a finite number")
    if name == "list" and isinstance(raw, list):
        return [parse_value(item, kind["item"]) for item in raw]
    if name in ("str", "labels") and isinstance(raw, (int, float)):
        return parse_value(json.dumps(raw), kind)
    fits: Any = {"str": str, "int": int, "float": (int, float), "bool": bool}.get(name)
    if fits is None or (isinstance(raw, fits) and (name == "bool") == isinstance(raw, bool)):
        return raw
    if name == "int" and isinstance(raw, float) and raw.is_integer():
        return int(raw)
    raise ValueError(f"{raw!r:.100} is not {name}")


def _member(raw: str, kind: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """Return a label, or the value of the member of an Enum that is named."""
    try:
        return read_label(raw, kind["options"])
    except ValueError:
        if not (names := kind.get("names")):
            raise
        return names[read_label(raw, list(names))]


def main() -> None:
    """Read the inputs as NAME=VALUE or one JSON object, and print the outputs as JSON."""
    arguments = sys.argv[1:]
    if len(arguments) == 1 and arguments[0].startswith("{"):
        inputs = json.loads(arguments[0])
    else:
        inputs = dict(argument.split("=", 1) for argument in arguments)
    try:
        print(json.dumps(run(inputs), ensure_ascii=False, indent=2, default=str))
    except ExportedRunError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
