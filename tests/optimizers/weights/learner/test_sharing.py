"""When equal prompts are processed once: on a CPU, if it saves half of the tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from compound.core.engine import TokenRecord  # noqa: E402
from compound.graph.space import LoRA  # noqa: E402
from compound.optimizers.weights.learner import forward as forward_module  # noqa: E402
from compound.optimizers.weights.learner.adapters import Adapters  # noqa: E402
from compound.optimizers.weights.learner.batching import Passes, cost, micro_batches  # noqa: E402
from compound.optimizers.weights.learner.forward import saves_enough  # noqa: E402
from compound.optimizers.weights.learner.samples import Sample  # noqa: E402

PROMPT = tuple(range(20))


def group(size: int) -> list[Sample]:
    return [
        Sample("x", "e", "x", 0, TokenRecord(PROMPT, tuple(range(n, n + 5)), (), "stop"), 0.0)
        for n in range(size)
    ]


def test_sharing_must_save_half_of_the_tokens() -> None:
    assert saves_enough(group(4))  # 4 · 25 = 100 tokens, or 20 + 4 · 5 = 40
    assert not saves_enough(group(2))  # 50 tokens, or 30
    assert cost(group(4)) == 20 + 4 * 5
    assert cost(group(4), share=False) == 4 * 24  # the last token is not read


def test_micro_batches_count_every_prompt_where_prompts_are_not_shared() -> None:
    some = group(8)  # 200 tokens, or 60
    assert len(micro_batches(some, 100)) == 1
    assert len(micro_batches(some, 100, share=False)) == 2  # four samples of 25 tokens each


def counted_passes(adapters: Adapters, monkeypatch: pytest.MonkeyPatch) -> int:
    runs = list[int]()
    decoder = forward_module._decoder

    def counted(model: Any) -> Any:
        runs.append(1)
        return decoder(model)

    monkeypatch.setattr(forward_module, "_decoder", counted)
    found = Passes(adapters, {"x": "x"}, 4096, 1.0, constrained=False, in_step=False)
    with adapters.using("x") as model:
        for batch, _ in found.share(group(4)):
            found.run(model, batch, temperature=1.0)
    return len(runs)


@pytest.mark.parametrize(("shares", "passes"), [(True, 2), (False, 1)])
def test_the_trainer_runs_the_layers_twice_on_a_cpu(
    toy_model: Path, monkeypatch: pytest.MonkeyPatch, shares: bool, passes: int
) -> None:
    adapters = Adapters(str(toy_model), {"x": LoRA(rank=2)}, dtype="float32")
    assert adapters.shares
    adapters.shares = shares
    assert counted_passes(adapters, monkeypatch) == passes


def test_checkpointing_processes_every_prompt(
    toy_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters = Adapters(str(toy_model), {"x": LoRA(rank=2)}, dtype="float32", checkpointing=True)
    assert counted_passes(adapters, monkeypatch) == 1
