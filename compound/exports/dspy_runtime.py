"""Run an exported system as a DSPy program; this file is copied into exported modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Union

import dspy

from compound.exports.runtime import KINDS, run_program

PROGRAM: dict[str, Any] = {}  # <- replaced by the system

TYPES: dict[str, Any] = {"str": str, "int": int, "float": float, "bool": bool}


def type_of(kind: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """Return the Python type of a field."""
    if kind["type"] == "labels":
        return Literal[tuple(kind["options"])]
    if kind["type"] == "list":
        return list.__class_getitem__(type_of(kind["item"]))
    if kind["type"] == "optional":
        return type_of(kind["item"]) | None
    if kind["type"] == "union":
        return Union[tuple(map(type_of, kind["items"]))]  # noqa: UP007
    return TYPES.get(kind["type"], Any)


def predictor_of(spec: Mapping[str, Any]) -> dspy.Predict:
    """Return a predictor with its instructions, demonstrations and sampling settings."""
    fields = {name: (type_of(kind), dspy.InputField()) for name, kind in spec["inputs"].items()}
    fields |= {name: (type_of(kind), dspy.OutputField()) for name, kind in spec["outputs"].items()}
    settings = spec["config"]
    predictor = dspy.Predict(dspy.Signature(fields, spec["instructions"]), **settings)
    predictor.demos = [dspy.Example(**demo).with_inputs(*spec["inputs"]) for demo in spec["demos"]]
    return predictor


class Program(dspy.Module):  # type: ignore[misc]
    """The system as a DSPy program. Set its model with ``dspy.configure(lm=…)`` or ``set_lm``."""

    def __init__(self) -> None:
        super().__init__()
        self.predictors_by_name = {name: predictor_of(spec) for name, spec in PROGRAM["signatures"].items()}

    def forward(self, **inputs: Any) -> dspy.Prediction:  # noqa: ANN401
        """Run the system."""

        def predict(body: dict[str, Any]) -> Any:  # noqa: ANN401
            return self.predictors_by_name[body["component"]](**body["inputs"])

        return dspy.Prediction(**run_program(PROGRAM, inputs, predict))


def run_predictor(
    node: Mapping[str, Any], given: Mapping[str, Any], predict: Callable[[dict[str, Any]], Any]
) -> dict[str, Any]:
    """Call a predictor."""
    prediction = predict({"component": node["component"], "inputs": dict(given)})
    return {name: prediction[name] for name in node["outputs"]}  # it has methods named items, get …


KINDS["predict"] = run_predictor
