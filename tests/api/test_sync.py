"""The doors of ordinary Python code: what they take, and what they say of a mistake."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import compound as cp
from compound.core.narrowing import entry
from compound.core.storage.artifacts import folder_digest
from compound.yaml import loads

pytestmark = pytest.mark.usefixtures("without_reports")


def plus(x: int, more: int) -> int:
    return x + more


def system() -> cp.System:
    return cp.System(
        "plus",
        outputs={"y": cp.Function("plus", plus, more=cp.Int(0, 4, value=1))(x=cp.Input("x", int))},
    )


def data() -> cp.Dataset:
    rows = [{"id": str(i), "x": i, "target": i + 3} for i in range(24)]
    return cp.Dataset.of(train=rows[:8], valid=rows[8:20], test=rows[20:])


def near(outputs: Mapping[str, Any], example: cp.Example) -> float:
    return 1.0 - 0.25 * abs(entry(outputs, "y", int) - entry(example.gold, "target", int))


def test_a_plain_function_is_a_metric(tmp_path: Path) -> None:
    assert cp.evaluate(system(), data(), near, "valid", cache=False).mean == 0.5
    found = cp.optimize(
        system(),
        data(),
        near,
        method="random",
        run_dir=tmp_path / "run",
        progress=False,
        budget=cp.Budget(system_runs=200),
    )
    assert found.after.mean == 1.0
    assert not (tmp_path / "run" / "system.yaml").exists()
    found.best.save(tmp_path / "new" / "folder" / "best.json")
    assert cp.load(tmp_path / "new" / "folder" / "best.json") == found.best


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"mmgpro": {}}, "unknown setting mmgpro; did you mean 'mmgrpo'"),
        (
            {"ppo": {"optimizer": {"lrr": 1}}},
            "unknown setting ppo.optimizer.lrr; did you mean 'lr'",
        ),
        ({"ppo": {"optimizer": {"lr": -1.0}}}, "ppo.optimizer.lr: Input should be greater than 0"),
        ({"mygo": {"threshold": 2.0}}, "mygo: threshold 2 is above max_reward 1"),
        (
            {"weights": {"lr": 1.0}},
            "optimize.weights is no longer a section; use that of the method",
        ),
        ({"seed": "x", "alpha": 7}, "seed: .*\nalpha: "),
        ({"settings": {"self": 1}}, "unknown setting self"),
    ],
)
def test_a_mistake_in_settings_is_named(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(cp.CompoundError, match=told):
        cp.optimize(system(), data(), near, run_dir=tmp_path / "run", progress=False, **changes)


def test_weights_begin_with_an_adapter_that_lies_beside_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the working directory is, and wherever the run is recorded."""
    adapter = tmp_path / "files" / "adapter"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text("{}")
    value = {"path": "adapter", "sha256": folder_digest(adapter)}
    file = tmp_path / "files" / "system.yaml"
    file.write_text(
        "system: s\nlm: smollm2\ninputs: {q: str}\ncomponents:\n  a:\n    llm: {weights: {lora: {rank: 4}, value: "
        f"{{path: adapter, sha256: {value['sha256']}}}}}}}\n    in: {{q: $q}}\noutputs: {{y: $a}}\n"
    )
    monkeypatch.chdir(tmp_path)
    start = cp.load_system(file).configuration["a.weights"]
    assert start == {**value, "path": str(adapter)}
    assert (
        loads(
            "system: s\nlm: smollm2\ninputs: {q: str}\ncomponents: {a: {llm: {weights: {lora: {rank: 4}}}, "
            "in: {q: $q}}}\noutputs: {y: $a}\n"
        ).system.configuration["a.weights"]
        is None
    )
