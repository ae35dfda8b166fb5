"""Systems of the folder `benchmarks`, evaluated with scripted models."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import compound as cp
from compound.core.engine import Engine
from compound.evaluation.dataset import Dataset
from compound.evaluation.evaluate import Evaluation
from compound.yaml.program import Program

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
needs_data = pytest.mark.skipif(
    "COMPOUND_DATA" not in os.environ, reason="COMPOUND_DATA names no folder of data sets"
)


def data_folder() -> Path:
    return Path(os.environ["COMPOUND_DATA"])


def evaluated(
    program: Program, data: Dataset | list[Any], engines: Engine | Mapping[str, Engine], **how: Any
) -> Evaluation:
    """Evaluate a system on rows, or a data set, with a model that plays smollm2 or with engines."""
    assert program.metric is not None
    data = cp.Dataset.of(valid=data) if isinstance(data, list) else data
    engines = engines if isinstance(engines, Mapping) else {"smollm2": engines}
    return cp.evaluate(program.system, data, program.metric, engines=engines, cache=False, **how)
