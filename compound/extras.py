"""Optional libraries: which extra installs each of them, and the error that says so.

Code that needs one imports it where it is used, as usual. An import that fails is turned into `MissingExtra`
here, wherever it surfaces, so that no feature has to remember to do so.
"""

from __future__ import annotations

from collections.abc import Mapping

from compound.errors import MissingExtra

LIBRARIES: Mapping[str, tuple[str, str]] = {
    "torch": ("torch", "local"),
    "transformers": ("transformers", "local"),
    "gguf": ("gguf", "local"),
    "safetensors": ("safetensors", "local"),
    "accelerate": ("accelerate", "local"),
    "huggingface_hub": ("transformers", "local"),  # which brings it
    "litellm": ("litellm", "remote"),
    "httpx": ("httpx", "vllm"),
    "optuna": ("optuna", "search"),
    "gepa": ("gepa", "search"),
    "bm25s": ("bm25s", "retrieval"),
    "sentence_transformers": ("sentence-transformers", "dense"),
    "matplotlib": ("matplotlib", "report"),
    "pyarrow": ("pyarrow", "hub"),
    "sklearn": ("scikit-learn", "rewards"),
    "peft": ("peft", "train"),
}
"""By module: the library's name on the package index, and our extra that installs it."""


def raise_missing_extra(error: BaseException, feature: str = "this") -> None:
    """Raise `MissingExtra` for the failed import of an optional library; return for any other error.

    >>> raise_missing_extra(ModuleNotFoundError("No module named 'torch'", name="torch"))
    Traceback (most recent call last):
    compound.errors.MissingExtra: this needs torch, which is not installed; pip install "compound-ai[local]"
    """
    if isinstance(error, ModuleNotFoundError) and not isinstance(error, MissingExtra) and error.name:
        known = LIBRARIES.get(error.name.partition(".")[0])
        if known is not None:
            raise MissingExtra(feature, *known) from error
