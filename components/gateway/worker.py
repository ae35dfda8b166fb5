"""Program that imports an agent's function once, and calls it for one run after the other.

Started by `compound.components.gateway.processes` as a script, with nothing but the standard library,
and pydantic where an annotation or a result has a class. It reads one JSON object with the inputs per line of
stdin, and writes one with the result per line to its original stdout; what the agent prints goes to
stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import os
import sys
import traceback
import typing
from collections.abc import Callable

PLAIN = (str, int, float, bool, list, dict, object, type(None))


def main() -> None:
    """Serve calls until stdin ends."""
    place, search_path = sys.argv[1], json.loads(sys.argv[2])
    sys.path[:] = search_path
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    os.dup2(2, 1)  # what the agent prints is no result
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    function: Callable[..., object] | None = None
    with asyncio.Runner() as runner:
        for line in requests:
            try:
                if function is None:
                    function = _load(place)
                answer = {"result": _call(runner, function, json.loads(line))}
                text = json.dumps(answer, default=_plain)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - an agent's code may raise anything
                traceback.print_exc()
                text = json.dumps(
                    {"error": f"{type(error).__name__}: {error}", "place": _place(error)}
                )
            print(text, file=results, flush=True)
            sys.stdout.flush()


def _load(place: str) -> Callable[..., object]:
    module, _, path = place.partition(":")
    found: object = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    if not callable(found):
        raise TypeError(f"{place} is {type(found).__name__}, not a function")
    return found


def _call(
    runner: asyncio.Runner, function: Callable[..., object], inputs: dict[str, object]
) -> object:
    """Call a function; coroutines of all runs share one event loop, as clients at module level require."""
    result = function(**_as_annotated(function, inputs))
    if not inspect.isawaitable(result):
        return result

    async def finish() -> object:
        return await result

    return runner.run(finish())


def _as_annotated(function: Callable[..., object], inputs: dict[str, object]) -> dict[str, object]:
    """Return inputs whose parameters are annotated with classes, such as dates, as instances of them."""
    try:
        hints = typing.get_type_hints(function)
    except Exception:  # noqa: BLE001 - annotations may be anything
        return inputs
    named = [name for name in inputs if name in hints and _names_class(hints[name])]
    if not named:
        return inputs
    from pydantic import TypeAdapter

    found = dict(inputs)
    for name in named:
        with contextlib.suppress(Exception):  # the function gets the JSON form, and judges it
            found[name] = TypeAdapter(hints[name]).validate_python(inputs[name])
    return found


def _names_class(hint: object) -> bool:
    if isinstance(hint, type) and not typing.get_args(hint):
        return hint not in PLAIN
    return any(map(_names_class, typing.get_args(hint)))


def _plain(value: object) -> object:
    """Return the JSON form of a result of another class, as pydantic reads it."""
    from pydantic_core import to_jsonable_python

    return to_jsonable_python(value, timedelta_mode="float")


def _place(error: BaseException) -> str:
    """Return the innermost line of the agent's own code that an error comes from."""
    own = [
        f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename
    ]
    own = [f for f in own if f.filename != __file__ and not f.filename.startswith("<frozen")]
    last = own[-1] if own else None
    return f"{os.path.basename(last.filename)}:{last.lineno}" if last else ""


if __name__ == "__main__":
    main()
