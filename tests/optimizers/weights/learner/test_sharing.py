"""When equal prompts are processed once: it must save tokens, on a GPU more than a second pass costs."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from compound.engine import TokenRecord  # noqa: E402
from compound.graph.space import LoRA  # noqa: E402
from compound.optimizers.weights.learner import adapters as adapters_module  # noqa: E402
from compound.optimizers.weights.learner import forward as forward_module  # noqa: E402
from compound.optimizers.weights.learner.adapters import Adapters  # noqa: E402
from compound.optimizers.weights.learner.batching import Pass, in_step, micro_batches  # noqa: E402
from compound.optimizers.weights.learner.forward import NEVER, Sharing, saves_enough  # noqa: E402
from compound.optimizers.weights.learner.passes import Passes  # noqa: E402
from compound.optimizers.weights.learner.samples import Sample  # noqa: E402

PROMPT = tuple(range(20))


def group(size: int) -> list[Sample]:
    """Return samples of five tokens each with one prompt of 20 tokens."""
    return [
        Sample("x", "e", "x", 0, TokenRecord(PROMPT, tuple(range(n, n + 5)), (), "stop"), 0.0)
        for n in range(size)
    ]


def test_sharing_must_save_the_given_number_of_tokens() -> None:
    some = group(4)  # 4 · 25 = 100 tokens, or 20 + 4 · 5 = 40
    assert Sharing(60).pays(some)
    assert not Sharing(61).pays(some)
    assert saves_enough(some, Sharing(60))
    assert not saves_enough(some, Sharing(61))
    assert not saves_enough(some, NEVER)


def test_sharing_also_saves_passes() -> None:
    """Two samples of 25 tokens fit into 60, so two passes are needed; one is saved: 60 + 0.6 · 150 = 150."""
    some = group(4)
    assert Sharing(150, 60).pays(some)
    assert not Sharing(151, 60).pays(some)
    assert not Sharing(150, 100).pays(some)  # one pass is enough


@pytest.mark.parametrize("most", [24, 25, 40, 49])
def test_passes_hold_whole_samples(most: int) -> None:
    """One sample fits, and three further passes are saved: 60 + 0.6 · 3 · 300 = 600 > 300."""
    assert len(micro_batches(group(4), most, sharing=NEVER)) == 4
    assert Sharing(300, most).pays(group(4))
    assert not Sharing(300, 50).pays(group(4))  # 60 + 0.6 · 300 = 240


def test_micro_batches_count_every_prompt_where_sharing_does_not_pay() -> None:
    some = group(8)  # 200 tokens, or 60
    assert len(micro_batches(some, 100, sharing=Sharing(140))) == 1
    assert len(micro_batches(some, 100, sharing=Sharing(141))) == 2  # four samples of 25 tokens each


@pytest.mark.parametrize(
    ("device", "layers", "parameters", "tokens"),
    [("cpu", 28, 6e8, 0.0), ("cuda", 28, 7e8, 20_000.0), ("cuda", 36, 8e9, 2250.0), ("xpu", 36, 8e9, 2250.0)],
)
def test_a_second_pass_costs_more_tokens_of_a_smaller_model(
    device: str, layers: int, parameters: float, tokens: float
) -> None:
    text = SimpleNamespace(num_hidden_layers=layers)
    base = SimpleNamespace(
        device=SimpleNamespace(type=device),
        config=SimpleNamespace(get_text_config=lambda **_: text),
        num_parameters=lambda: parameters,
    )
    assert adapters_module._second_pass_tokens(cast("Any", base)) == pytest.approx(tokens)


def counted_passes(adapters: Adapters, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how often the layers run over a group of four."""
    runs = list[int]()
    decoder = forward_module._decoder

    def counted(model: Any) -> Any:
        runs.append(1)
        return decoder(model)

    monkeypatch.setattr(forward_module, "_decoder", counted)
    found = Passes(adapters, {"x": "x"}, 4096, 1.0, constrained=False, in_step=False)
    with adapters.using("x") as model:
        for each in found.share(group(4)):
            found.run(model, each, temperature=1.0)
    return len(runs)


@pytest.mark.parametrize(("least", "passes"), [(0.0, 2), (61.0, 1)])
def test_the_trainer_runs_the_layers_twice_only_if_it_pays(
    toy_model: Path, monkeypatch: pytest.MonkeyPatch, least: float, passes: int
) -> None:
    adapters = Adapters(str(toy_model), {"x": LoRA(rank=2)}, dtype="float32")
    assert adapters.second_pass == 0.0  # on a CPU
    adapters.second_pass = least
    assert counted_passes(adapters, monkeypatch) == passes


def test_checkpointing_processes_every_prompt(toy_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = Adapters(str(toy_model), {"x": LoRA(rank=2)}, dtype="float32", checkpointing=True)
    assert adapters.second_pass == math.inf
    assert counted_passes(adapters, monkeypatch) == 1


def test_the_cost_does_not_depend_on_the_number_of_adapters(
    toy_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = list[int]()

    def noted(base: Any) -> float:
        sizes.append(base.num_parameters())
        return 0.0

    monkeypatch.setattr(adapters_module, "_second_pass_tokens", noted)
    for names in ("x", "xyz"):
        Adapters(str(toy_model), {name: LoRA(rank=2) for name in names}, dtype="float32")
    assert len(set(sizes)) == 1


def test_processes_in_step_run_the_layers_equally_often_where_some_batches_pay() -> None:
    """A group of 8 saves 140 tokens and pays for 100; a group of 2 saves 20 and does not."""
    sharing = Sharing(100)
    shares = [[group(8)], [group(2), group(8)], []]
    passes = [list(in_step(shares, rank, sharing=sharing)) for rank in range(3)]

    def runs(each: Pass) -> int:
        shared = saves_enough(each.samples, sharing) if each.shared is None else each.shared
        return 1 + (shared and max(sample.length for sample in each.samples) > 1)

    assert [[runs(each) for each in own] for own in passes] == [[2, 1]] * 3
