"""Make the replicas of a fleet from its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from compound.components.engines.fleet.replica import Replica
from compound.components.engines.fleet.routing import capacity
from compound.components.engines.openai.engine import OpenAIEngine
from compound.components.engines.vllm import arguments
from compound.components.engines.vllm.engine import VLLMEngine
from compound.errors import DeclarationError
from compound.formatting import plural
from compound.security.trust import Origin

Given = Mapping[str, object]
Groups = Sequence[Sequence[int]]


def make_replicas(
    urls: Sequence[str],
    replicas: int | None,
    devices: Groups | None,
    vllm: Given | None,
    openai: Given | None,
) -> tuple[list[Replica], int]:
    """Make the replicas of a fleet, and return their mean concurrency; for the arguments, see `FleetEngine`.

    Raises:
        DeclarationError: the arguments do not fit together.
    """
    if sum(bool(given) for given in (urls, replicas, devices)) != 1:
        raise DeclarationError(
            "a fleet needs either urls, or the number of replicas, or devices",
            hint="urls: [http://HOST:PORT/v1, …] for running servers, replicas or devices to start them",
        )
    if vllm is not None and openai is not None:
        raise DeclarationError("a fleet has settings of vllm or of openai, not both")
    if "api_base" in (vllm or openai or {}):
        raise DeclarationError("a fleet's servers are its urls; remove api_base")
    if not urls and openai is not None:
        raise DeclarationError("only vLLM servers can be started", hint="give urls, or settings of vllm")
    if not urls and "api_key_env" in (vllm or {}):
        raise DeclarationError(
            "vllm.api_key_env is the key of running servers, and each process of a fleet gets one of its own",
            hint="remove api_key_env, or give urls instead of replicas or devices",
        )
    if vllm is None and urls:
        mean = _made_openai(openai or {}).concurrency
        settings = {**(openai or {}), "concurrency": capacity(mean)}
        return [
            Replica(url, _made_openai({**settings, "api_base": url}), url) for url in _checked(urls)
        ], mean
    mean = _made_vllm(vllm or {}).concurrency
    settings = {**(vllm or {}), "concurrency": capacity(mean)}
    if urls:
        return [Replica(url, _made_vllm({**settings, "api_base": url}), url) for url in _checked(urls)], mean
    return _processes(replicas or 0, devices or (), settings), mean


def name_without_address(engine: VLLMEngine | OpenAIEngine, vllm: Given | None) -> str:
    """Return an engine's name without the address of its server, since answers do not depend on it."""
    if isinstance(engine, VLLMEngine):
        return _made_vllm({**(vllm or {}), "api_base": None}).name
    return f"openai:{engine.model}"


def _checked(urls: Sequence[str]) -> Sequence[str]:
    """Return different addresses without a slash at the end."""
    addresses = [url.rstrip("/") for url in urls]
    for url in addresses:
        Origin.of(url)
        if addresses.count(url) > 1:
            raise DeclarationError(f"the address {url} is given twice", hint="a replica is one server")
    return addresses


def _processes(count: int, devices: Groups, vllm: Given) -> list[Replica]:
    used = [device for group in devices for device in group]
    if len(set(used)) != len(used) or not all(devices):
        raise DeclarationError(
            "devices must be groups of different GPUs, one for each process", hint="such as [[0, 1], [2, 3]]"
        )
    found = []
    for number in range(count or len(devices)):
        engine = _made_vllm(vllm)
        if devices:
            _check_gpus(devices[number], engine.args)
            engine.environment = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices[number]))}
        found.append(Replica(f"process {number}", engine, None))
    return found


def _check_gpus(group: Sequence[int], args: Sequence[str]) -> None:
    """Reject a process that needs more GPUs than its group has, or leaves some of them idle."""
    used = arguments.gpu_count(args)
    # of other kinds of parallelism, the number of GPUs is not computed
    idle = used == 1 < len(group) and not any("parallel" in argument for argument in args)
    if used > len(group) or idle:
        raise DeclarationError(
            f"a group of devices has {plural(len(group), 'GPU')}, but its vLLM process uses {used}",
            hint=f'set vllm.args to [--tensor-parallel-size, "{len(group)}"], or change devices',
        )


def _made_vllm(given: Given) -> VLLMEngine:
    try:
        return VLLMEngine(**given)  # type: ignore[arg-type]  # it checks the types of its settings
    except DeclarationError as error:
        raise DeclarationError(f"vllm of a fleet: {error.message}", hint=error.hint) from None


def _made_openai(given: Given) -> OpenAIEngine:
    try:
        return OpenAIEngine(**given)  # type: ignore[arg-type]  # it checks the types of its settings
    except DeclarationError as error:
        raise DeclarationError(f"openai of a fleet: {error.message}", hint=error.hint) from None
