"""Optional libraries, the extra that installs each, and the error raised when one is missing.

Code imports an optional library where it is used. A failed import is turned into `MissingExtra`
at the entry points, so that features need no import handling.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    "httpx": ("httpx", "vllm"),
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
    if find_spec(module) is None:
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
