"""Log an optimized system as an MLflow model, and run it as a Python function.

The folder of the model contains the YAML file of the system, or the place of one that a module
declares, the configuration with its adapters, and further files such as Python modules. Nothing is
pickled: MLflow loads it through `_load_pyfunc`.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compound.core.engine import Engine
from compound.core.errors import (
    DISTRIBUTION,
    DeclarationError,
    RunDirectoryError,
    SpecError,
    explain_missing,
)
from compound.core.formatting import short_repr
from compound.core.loops import run_blocking, run_in_background
from compound.core.security.untrusted import UntrustedFolder
from compound.execution.executor import Executor
from compound.execution.trace import Trace
from compound.graph.configuration import Configuration, load
from compound.graph.registry.code import find_code
from compound.graph.registry.engines import for_system, resolve_engines
from compound.graph.space import Text
from compound.graph.system import System
from compound.optimization.runs.directory import CONFIG, read_json
from compound.yaml import load as load_program

if TYPE_CHECKING:
    import pandas as pd
    from mlflow import MlflowClient
    from mlflow.models import ModelSignature
    from mlflow.models.model import ModelInfo

SYSTEM, BEST, PLACE = "system.yaml", "best.json", "system.txt"
_PLACE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
IN_FLIGHT = 64  # rows in flight
COLUMNS: Mapping[object, str] = {str: "string", int: "long", float: "double", bool: "boolean"}


def log_model(
    run: str | Path,
    *,
    name: str = "system",
    system: str | Path | None = None,
    files: Sequence[str | Path] = (),
    registered_model_name: str | None = None,
    trust: Collection[str] = (),
    pip_requirements: Sequence[str] | None = None,
) -> ModelInfo:
    """Log the best configuration of a run with its system as an MLflow model.

    ``mlflow.pyfunc.load_model(info.model_uri).predict(rows)`` runs it: a row per input, a column
    per output.

    Args:
        run: the run directory.
        name: name of the model.
        system: the system's YAML file, or ``module:name`` of a system declared in Python; default:
            the file that the run stored.
        files: files and folders that the system's file names, such as Python modules, and the
            module that declares a system; they are placed next to it. Without them, a file that the
            run stored may not name code: the run may be someone else's.
        registered_model_name: registers the model under this name, too.
        trust: servers and keys that the file names and the user trusts, such as
            ``KEY@llm.example.com``.
        pip_requirements: requirements of the model; default: this version of compound.

    Raises:
        DeclarationError: the system is a Python object, ``module:name`` is no system, no engine
            serves one of its models, or the file that the run stored names code.
        MissingExtra: MLflow is not installed.
        RunDirectoryError: the run has no best configuration, or it stored no file and none is
            given.
    """
    with explain_missing("a model of MLflow"):
        import mlflow.pyfunc
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        # an example would be run; the signature is known from the ports
        warnings.filterwarnings("ignore", ".*input example was not provided")
        folder = Path(place) / "system"
        folder.mkdir()
        _fill(folder, Path(run), system, files)
        loaded = _checked(folder, trust, may_import=system is not None or bool(files))
        requirements = pip_requirements if pip_requirements is not None else _requirements()
        return mlflow.pyfunc.log_model(
            name=name,
            loader_module=__name__,
            data_path=str(folder),
            signature=_signature(loaded),
            registered_model_name=registered_model_name,
            pip_requirements=list(requirements),
            model_config={"trust": list(trust)},
            metadata={"system": loaded.name, "configuration": loaded.configuration.digest},
        )


def _checked(folder: Path, trust: Collection[str], *, may_import: bool) -> System:
    try:
        system, find_engine = _loaded(folder, trust, may_import=may_import)
    except SpecError as error:
        if may_import:
            raise
        raise DeclarationError(
            f"the system that the run stored cannot be used: {error.problems[0]}",
            hint="if you trust it, pass system=, its file",
        ) from None
    if (folder / PLACE).exists():
        for lm in system.lms:  # engines that were passed in Python are not stored
            find_engine(lm)
    return system


def _loaded(
    folder: Path, trust: Collection[str], *, may_import: bool = True
) -> tuple[System, Callable[[str], Engine]]:
    """Return the system in a model's folder, bound to its configuration, and the lookup of its engines."""
    if (folder / PLACE).exists():
        system = find_code((folder / PLACE).read_text(encoding="utf-8"), folder)
        find_engine = resolve_engines(system, None)
    else:
        program = load_program(folder / SYSTEM, trust=trust, allow_import=may_import)
        system, find_engine = program.system, program.find_engine
    return system.bind(load(folder / BEST)), find_engine


class SystemModel:
    """A system with a configuration as a Python function of MLflow.

    Engines stay open between predictions.
    """

    def __init__(self, folder: Path, trust: Collection[str] = ()) -> None:
        self.system, find_engine = _loaded(folder, trust)
        self._executor = Executor(for_system(find_engine, self.system), folder=folder)

    def predict(
        self, model_input: object, params: Mapping[str, object] | None = None
    ) -> pd.DataFrame:
        """Run the system on each row and return its outputs.

        Raises:
            DeclarationError: a column is missing or has a value of a wrong type.
            RunFailed: the run of a row failed.
        """
        import pandas as pd

        given = model_input if isinstance(model_input, list | pd.DataFrame) else [model_input]
        frame = pd.DataFrame(given)
        rows = frame.to_dict(orient="records")
        traces = run_blocking(run_in_background(self._run(rows)))
        outputs = [dict(trace.check().outputs) for trace in traces]
        return pd.DataFrame(outputs, index=frame.index, columns=list(self.system.outputs))

    async def _run(self, rows: Sequence[Mapping[Any, Any]]) -> list[Trace]:
        slots = asyncio.Semaphore(IN_FLIGHT)

        async def one(number: int, row: Mapping[Any, Any]) -> Trace:
            found = {name: row[name] for name in self.system.inputs if name in row}
            inputs = {k: v.item() if isinstance(v, np.generic) else v for k, v in found.items()}
            async with slots:
                return await self._executor.run(self.system, inputs, example=str(number))

        return list(await asyncio.gather(*(one(number, row) for number, row in enumerate(rows))))


def _load_pyfunc(path: str, model_config: Mapping[str, Any] | None = None) -> SystemModel:
    """Load a logged model; called by MLflow."""
    return SystemModel(Path(path), (model_config or {}).get("trust", ()))


def _fill(folder: Path, run: Path, system: str | Path | None, files: Sequence[str | Path]) -> None:
    """Write the files of a model."""
    if isinstance(system, str) and _PLACE.fullmatch(system):
        (folder / PLACE).write_text(system, encoding="utf-8")
    else:
        (folder / SYSTEM).write_text(_text(run, system), encoding="utf-8")
    if UntrustedFolder(run).kind(BEST) is None:
        raise RunDirectoryError(
            f"{run} has no {BEST}", hint="it is not a run directory, or the run is not finished"
        )
    load(run / BEST).located(run).save(folder / BEST)
    for file in map(Path, files):
        if file.is_dir():
            shutil.copytree(file, folder / file.name)
        elif file.is_file():
            shutil.copy(file, folder / file.name)
        else:
            raise DeclarationError(f"files: {file} does not exist")


def _text(run: Path, system: object) -> str:
    hint = "pass system=, the system's YAML file or its module:name"
    if system is None:
        stored = UntrustedFolder(run)
        if stored.kind(SYSTEM) is None:
            raise RunDirectoryError(
                f"{run / SYSTEM} is missing: the run was started in Python", hint=hint
            )
        return stored.read(SYSTEM).decode()
    if not isinstance(system, str | Path):
        raise DeclarationError(
            f"a system that is a Python object cannot be logged: {short_repr(system)}",
            hint=f"{hint}, such as 'pipeline:qa' with files=['pipeline.py']",
        )
    if not Path(system).is_file():
        raise RunDirectoryError(f"{system} is missing", hint=hint)
    return Path(system).read_text(encoding="utf-8")


def _signature(system: System) -> ModelSignature | None:
    """Return the signature of MLflow, if all inputs and outputs have simple types."""
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema

    outputs = {name: source.type for name, source in system.outputs.items()}
    kinds = [*system.inputs.values(), *outputs.values()]
    if not all(isinstance(kind, type) and kind in COLUMNS for kind in kinds):
        return None
    return ModelSignature(
        *(
            Schema([ColSpec(COLUMNS[kind], name) for name, kind in ports.items()])
            for ports in (system.inputs, outputs)
        )
    )


def _requirements() -> list[str]:
    """Return the requirement that installs this package again from where it was installed (PEP 610)."""
    try:
        installed = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return [f"{DISTRIBUTION}[all]"]
    origin = json.loads(installed.read_text("direct_url.json") or "{}").get("url")
    return [
        f"{DISTRIBUTION}[all] @ {origin}" if origin else f"{DISTRIBUTION}[all]=={installed.version}"
    ]


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
