"""A fleet of replicas in the file: the model of its settings, and what of them the user must allow."""

from __future__ import annotations

import inspect
import typing
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from compound.components.engines.options import Count
from compound.registry.engines import engine_class
from compound.spec.schema.signature import settings_model
from compound.spec.schema.types import Model

REPLICA = ("vllm", "openai")
"""Kinds of engines that a replica can be."""
if typing.TYPE_CHECKING:
    VLLMReplica = Model
    OpenAIReplica = Model
else:
    VLLMReplica, OpenAIReplica = (
        settings_model(f"fleet_{kind}", engine_class(kind), skip=("api_base",)) for kind in REPLICA
    )


class FleetSettings(Model):
    """Engine of several replicas of one model: running servers, or vLLM processes that it starts."""

    urls: list[str] = Field(default=[])
    """The addresses of running servers. A list of addresses may also stand for all settings."""
    replicas: Count | None = None
    """The number of vLLM processes to start, instead of addresses."""
    devices: list[list[int]] | None = None
    """The GPUs of each vLLM process to start, such as `[[0, 1], [2, 3]]`."""
    vllm: VLLMReplica | None = None
    """Settings of the engine `vllm` for each replica, without `api_base`; `concurrency` is the mean over
    replicas."""
    openai: OpenAIReplica | None = None
    """Settings of the engine `openai` for each replica, without `api_base`; the default for addresses.
    Without a `model`, it is the only one that the first server serves."""


if typing.TYPE_CHECKING:
    FleetForm = list[str] | FleetSettings
else:
    FleetForm = Annotated[
        Annotated[list[str], Field(min_length=1), Tag("~urls")] | Annotated[FleetSettings, Tag("~fleet")],
        Discriminator(lambda value: "~urls" if isinstance(value, list) else "~fleet"),
    ]


class FleetEntry(Model):
    """Engine of several replicas of one model."""

    fleet: FleetForm
    """The addresses of the servers, or the settings of the fleet."""


def plain_settings(form: FleetForm) -> dict[str, Any]:
    """Return the settings of a fleet as arguments of its engine.

    >>> plain_settings(["http://gpu:8000/v1"])
    {'urls': ['http://gpu:8000/v1']}
    """
    if isinstance(form, list):
        return {"urls": form}
    given = form.given
    return {**given, **{kind: given[kind].given for kind in REPLICA if given.get(kind) is not None}}


def command_settings(kind: str) -> tuple[str, ...]:
    """Return the settings of a kind of engine that can execute code."""
    found: tuple[str, ...] = getattr(inspect.unwrap(engine_class(kind)), "code_settings", ())
    return found
