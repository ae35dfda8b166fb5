"""Arguments and GPUs of ``vllm serve``: arguments that the engine sets are rejected, some are read."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence

from compound.core.errors import DeclarationError

RESERVED_ARGUMENTS = (  # budgets, token records and the server's security depend on them
    "host",
    "port",
    "uds",
    "api-key",
    "served-model-name",
    "config",
    "enable-lora",
    "max-lora-rank",
    "max-loras",
    "logprobs-mode",
    "trust-remote-code",
    "allow-credentials",
    "allowed-origins",
    "enable-sleep-mode",
)
MEMORY_ARGUMENTS = ("gpu-memory-utilization", "kv-cache-memory-bytes")


def check_arguments(args: Sequence[str], model: str, *, gpu_memory: bool = False) -> None:
    """Reject arguments that the engine sets, including abbreviated names, which argparse accepts.

    With ``gpu_memory``, the setting of this name is given, too.
    """
    for argument in args:
        if _is_one_of(argument, RESERVED_ARGUMENTS):
            raise DeclarationError(
                f"engine {model!r}: args must not set {argument!r}",
                hint="the engine sets it; max_lora_rank, max_loras and sleep are settings of the engine",
            )
        if gpu_memory and _is_one_of(argument, MEMORY_ARGUMENTS):
            raise DeclarationError(
                f"engine {model!r}: gpu_memory and {argument!r} in args both limit the memory of the server",
                hint="remove one of them",
            )


def sets_memory(args: Sequence[str]) -> bool:
    """Return whether arguments determine the memory of the server.

    >>> sets_memory(["--gpu-memory-utilization", "0.5"]), sets_memory(["--dtype", "bfloat16"])
    (True, False)
    """
    return any(_is_one_of(argument, MEMORY_ARGUMENTS) for argument in args)


def value_of(args: Sequence[str], long: str, short: str = "") -> str | None:
    """Return the value of an argument, the last one if it is given several times.

    >>> value_of(["--dtype", "auto", "--dtype=half"], "dtype")
    'half'
    >>> value_of(["-tp", "2"], "tensor-parallel-size", "tp")
    '2'
    """
    found = None
    for argument, following in itertools.zip_longest(args, args[1:]):
        option, equals, value = argument.partition("=")
        named = option.startswith("--") and _name(option) == long
        if named or (short and option == f"-{short}"):
            found = value if equals else following
    return found


def gpu_count(args: Sequence[str]) -> int:
    """Return the number of GPUs of a server.

    >>> gpu_count([]), gpu_count(["--tensor-parallel-size", "2", "-pp=2"])
    (1, 4)
    """
    return shard_count(args) * _number(args, "data-parallel-size", "dp")


def shard_count(args: Sequence[str]) -> int:
    """Return the number of GPUs among which a server divides the weights of the model."""
    return _number(args, "tensor-parallel-size", "tp") * _number(
        args, "pipeline-parallel-size", "pp"
    )


def _number(args: Sequence[str], long: str, short: str) -> int:
    value = value_of(args, long, short) or ""
    return int(value) if value.isdecimal() and int(value) else 1


def _name(argument: str) -> str:
    return argument.partition("=")[0].removeprefix("--").replace("_", "-")


def _is_one_of(argument: str, arguments: Sequence[str]) -> bool:
    """Return whether an argument is one of the given ones, or an abbreviation of it."""
    name = _name(argument) if argument.startswith("--") else ""
    return bool(name) and any(own.startswith(name) for own in arguments)


VISIBLE = "CUDA_VISIBLE_DEVICES"


def gpu_name(index: int, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the name of a GPU in CUDA_VISIBLE_DEVICES by its index in a process; None if it is hidden.

    >>> gpu_name(1, {}), gpu_name(1, {VISIBLE: "4,5"}), gpu_name(1, {VISIBLE: "4"})
    ('1', '5', None)
    """
    visible = environment.get(VISIBLE)
    if visible is None:
        return str(index)
    names = [name.strip() for name in visible.split(",")]
    shown = names[: names.index("-1")] if "-1" in names else names  # CUDA ignores what follows
    return (shown[index] or None) if index < len(shown) else None
