"""Optional libraries, the extra that installs each, and the error raised when one is missing.

Code imports an optional library where it is used. A failed import is turned into `MissingExtra`
at the entry points, so that features need no import handling.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

from compound.errors import MissingExtra

LIBRARIES: Mapping[str, tuple[str, str]] = {
    "torch": ("torch", "local"),
    "transformers": ("transformers", "local"),
    "gguf": ("gguf", "local"),
    "safetensors": ("safetensors", "local"),
    "accelerate": ("accelerate", "local"),
    "llguidance": ("llguidance", "local"),
    "psutil": ("psutil", "local"),
    "bitsandbytes": ("bitsandbytes", "quantized"),
    "huggingface_hub": ("transformers", "local"),  # a dependency of transformers
    "litellm": ("litellm", "remote"),
    "httpx": ("httpx", "openai"),
    "optuna": ("optuna", "search"),
    "gepa": ("gepa", "search"),
    "bm25s": ("bm25s", "retrieval"),
    "regex": ("regex", "retrieval"),
    "snowballstemmer": ("snowballstemmer", "retrieval"),
    "sentence_transformers": ("sentence-transformers", "dense"),
    "rouge_score": ("rouge-score", "rouge"),
    "matplotlib": ("matplotlib", "report"),
    "pyarrow": ("pyarrow", "hub"),
    "sklearn": ("scikit-learn", "rewards"),
    "peft": ("peft", "train"),
    "opentelemetry": ("opentelemetry-sdk", "otel"),
    "mlflow": ("mlflow-skinny", "mlflow"),
    "tensorboard": ("tensorboard", "tensorboard"),
    "trackio": ("trackio", "trackio"),
    "wandb": ("wandb", "wandb"),
    "fastapi": ("fastapi", "serve"),
    "starlette": ("fastapi", "serve"),  # a dependency of fastapi
    "uvicorn": ("uvicorn", "serve"),
    "prometheus_client": ("prometheus-client", "serve"),
    "ray": ("ray", "ray"),
    "mcp": ("mcp", "mcp"),
    "pyseccomp": ("pyseccomp", "sandbox"),
    "dspy": ("dspy", "dspy"),
    "langchain_core": ("langchain-core", "langchain"),
    "haystack": ("haystack-ai", "haystack"),
}
"""Maps a module to the library's name on PyPI and the extra that installs it."""


def raise_missing_extra(error: BaseException, feature: str = "this") -> None:
    """Raise `MissingExtra` for the failed import of an optional library; return for any other error.

    >>> raise_missing_extra(ModuleNotFoundError("No module named 'torch'", name="torch"))
    Traceback (most recent call last):
    compound.errors.MissingExtra: this needs torch, which is not installed; pip install ...
    """
    if isinstance(error, ModuleNotFoundError) and not isinstance(error, MissingExtra) and error.name:
        known = LIBRARIES.get(error.name.partition(".")[0])
        if known is not None:
            raise MissingExtra(feature, *known) from error


def check_installed(module: str, feature: str) -> None:
    """Check that an optional library is installed, without importing it.

    Args:
        module: a key of `LIBRARIES`.
        feature: what needs the library.

    Raises:
        MissingExtra: it is not installed.
    """
    if sys.modules.get(module, module) is None or find_spec(module) is None:
        raise MissingExtra(feature, *LIBRARIES[module])


@contextmanager
def explain_missing(feature: str) -> Iterator[None]:
    """Raise `MissingExtra` for a failed import of an optional library in a block or a decorated function.

    Args:
        feature: what needs the library.
    """
    try:
        yield
    except ImportError as error:
        raise_missing_extra(error, feature)
        raise


def libraries_of(part: object) -> Sequence[str]:
    """Return the modules of optional libraries that an engine, a metric or another part ``requires``."""
    found: Sequence[str] = getattr(part, "requires", ())
    return found


def missing_libraries(needed: Iterable[tuple[str, Sequence[str]]]) -> list[MissingExtra]:
    """Return an error for each optional library that is not installed.

    Args:
        needed: what needs libraries, and their modules.
    """
    found: dict[str, MissingExtra] = {}
    for feature, modules in needed:
        for module in modules:
            try:
                check_installed(module, feature)
            except MissingExtra as error:
                found.setdefault(module, error)
    return list(found.values())
