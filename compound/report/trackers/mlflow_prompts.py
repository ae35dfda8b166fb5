"""Register the texts of a result as prompts of MLflow, and load them back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compound.core.errors import DeclarationError, RunDirectoryError, explain_missing
from compound.core.security.untrusted import UntrustedFolder
from compound.graph.configuration import Configuration, load
from compound.graph.space import Text
from compound.graph.system import System
from compound.optimization.runs.directory import CONFIG, read_json

if TYPE_CHECKING:
    from mlflow import MlflowClient

BEST = "best.json"
ALIAS = "best"


def register_prompts(run: str | Path, *, prefix: str = "", alias: str = ALIAS) -> dict[str, int]:
    """Register the texts of a run's best configuration as prompts of MLflow.

    The prompt of a parameter is named ``PREFIX.COMPONENT.PARAMETER``. A text that equals the
    prompt's latest version creates no new version.

    Args:
        run: the run directory.
        prefix: start of the names; default: the name of the system.
        alias: alias to set for the registered versions.

    Returns:
        The version of each prompt, by its name.

    Raises:
        MissingExtra: MLflow is not installed.
        RunDirectoryError: the folder is not a run directory, or has no best configuration yet.
    """
    folder = UntrustedFolder(run)
    config = read_json(folder, CONFIG)
    if folder.kind(BEST) is None:
        raise RunDirectoryError(
            f"{folder} has no {BEST} yet", hint="resume the run with the command that started it"
        )
    best = load(folder.path / BEST)
    spaces: Mapping[str, Mapping[str, Any]] = config["structure"]["parameters"]
    texts = {
        k: str(best[k])
        for k, space in spaces.items()
        if space.get("kind") == Text.kind and k in best
    }
    client = _client()
    tags = {"compound.run": str(folder.path.absolute()), "compound.configuration": best.digest}
    start = prefix or str(config["system"])
    found: dict[str, int] = {}
    for key, text in texts.items():
        name = f"{start}.{key}"
        latest = client.load_prompt(f"prompts:/{name}@latest", allow_missing=True)
        if latest is None or latest.template != text:
            about = {**tags, "compound.key": key}
            latest = client.register_prompt(name, text, commit_message="compound", tags=about)
        found[name] = int(latest.version)
        client.set_prompt_alias(name, alias, found[name])
    return found


def load_prompts(system: System, *, prefix: str = "", version: str | int = ALIAS) -> Configuration:
    """Return the configuration of a system with the texts that are registered in MLflow.

    Args:
        system: the system; parameters that are no texts keep their values.
        prefix: start of the names; default: the name of the system.
        version: alias or number of the version to load.

    Raises:
        DeclarationError: a prompt is not registered.
        MissingExtra: MLflow is not installed.
    """
    client, texts = _client(), {}
    at = f"/{version}" if str(version).isdecimal() else f"@{version}"
    for key in (key for key, space in system.parameters.items() if isinstance(space, Text)):
        name = f"{prefix or system.name}.{key}"
        found = client.load_prompt(f"prompts:/{name}{at}", allow_missing=True, cache_ttl_seconds=0)
        if found is None:
            raise DeclarationError(
                f"MLflow has no prompt {name!r} with the version {str(version)!r}",
                hint="register it with register_prompts, or check MLFLOW_TRACKING_URI",
            )
        texts[key] = str(found.template)
    return system.bind(texts).configuration


def _client() -> MlflowClient:
    with explain_missing("the prompt registry"):
        from mlflow import MlflowClient
    return MlflowClient()
