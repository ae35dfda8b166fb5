"""Learners of several processes compute what one process computes, whatever is divided among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from numerics import LOGPROBS
from trainings.learners import declared, difference, drawn, weights_of

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("one_thread")
pytest.importorskip("peft")

from compound.core.errors import ConfigurationError  # noqa: E402
from compound.graph.space import Weights  # noqa: E402
from compound.optimizers.weights.distributed.learner import (  # noqa: E402
    open_trainer,
)
from compound.optimizers.weights.distributed.processes import (  # noqa: E402
    Learner,
    Processes,
    ShardedLearner,
)
from compound.optimizers.weights.learner.samples import Sample  # noqa: E402
from compound.optimizers.weights.learner.trainer import LearnerSpec, Saved, StaleSamples  # noqa: E402
from compound.optimizers.weights.learner.updates import VALUE  # noqa: E402

EQUAL = 1e-6  # relative to the largest number of a tensor, in float32
MANY: dict[str, Any] = {"groups": 12, "prompt": 40}  # a micro-batch of 64 tokens for each group
Group = Callable[[int], Processes]


def trained(
    learner: Learner,
    folder: Path,
    steps: Sequence[int] = (0, 1),
    *,
    critic: bool = True,
    **samples: Any,
) -> tuple[Saved, list[tuple[dict[str, float], list[tuple[float, ...]]]]]:
    folder.mkdir(exist_ok=True)
    reports = []
    for number in steps:
        given = drawn(seed=number, **samples)
        given = learner.values(given) if critic else given
        facts = learner.step(given, number)
        learner.release_cache()
        reports.append((facts["norms"], [sample.values for sample in given]))
    return learner.save(folder), reports


def both(
    spec: LearnerSpec, processes: Processes, folder: Path, sharding: str = "data", **how: Any
) -> tuple[float, float]:
    """Train in one process and in several; return the differences of weights and of gradient norms."""
    trainer = open_trainer(spec)
    alone, said = trained(trainer, folder / "alone", **how)
    several, others = trained(
        ShardedLearner(processes, spec, sharding=sharding), folder / "several", **how
    )
    norms = [
        abs(theirs[name] - norm) / norm
        for (ours, _), (theirs, _) in zip(said, others, strict=True)
        for name, norm in ours.items()
    ]
    for (_, ours), (_, theirs) in zip(said, others, strict=True):
        for row, expected in zip(theirs, ours, strict=True):
            assert row == pytest.approx(expected, abs=LOGPROBS)
    assert all(several.adapters.values())
    weights = difference(
        weights_of(several, folder / "several"), weights_of(alone, folder / "alone")
    )
    return weights, max(norms)


REPEATED = {"epochs": 2, "beta": 0.05}  # several updates a step, and a KL term


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sharding", "count", "given", "changes"),
    [
        *((kind, count, REPEATED, {}) for kind in ("data", "fsdp") for count in (2, 4)),
        # the backward pass gathers the weights of each layer again, to recompute its activations
        ("fsdp", 2, REPEATED, {"checkpointing": True}),
    ],
)
def test_many_micro_batches_train_to_equal_weights(
    sharding: str,
    count: int,
    given: Any,
    changes: Any,
    toy_model: Path,
    group: Group,
    tmp_path: Path,
) -> None:
    """With a value head, and samples of two adapters."""
    spec = declared(toy_model, critic=True, micro_tokens=64, **given).model_copy(update=changes)
    assert max(both(spec, group(count), tmp_path, sharding, **MANY)) <= EQUAL


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_layers_are_divided_again_after_each_pass(
    checkpointing: bool, toy_model: Path, tmp_path: Path, booting: Callable[[str], None]
) -> None:
    """And the other process keeps no copies of checkpoints."""
    report = tmp_path / "report.txt"
    code = f"""
from compound.optimizers.weights.distributed.worker import LearnerWorker
from torch.distributed.tensor import DTensor
carry_out = LearnerWorker.carry_out
def noted(self, action, arguments):
    found = carry_out(self, action, arguments)
    if rank == 1 and action in ("values", "step"):
        named = self.trainer.adapters.base.named_parameters()
        layers = [p for n, p in named if ".layers." in n and "lora" not in n]
        divided = all(isinstance(p, DTensor) for p in layers)
        open({str(report)!r}, "a").write(f"{{divided}} {{len(layers) > 0}}\\n")
    if rank == 1 and action == "save":
        open({str(report)!r}, "a").write(f"kept: {{[*self._scratch.iterdir()]}}\\n")
    return found
LearnerWorker.carry_out = noted
"""
    booting(code)
    processes = Processes(2)
    spec = declared(toy_model, critic=True, micro_tokens=64)
    spec = spec.model_copy(update={"checkpointing": checkpointing})
    learner = ShardedLearner(processes, spec, sharding="fsdp")
    try:
        facts = learner.step(learner.values(drawn(**MANY)), 0)
        learner.save(tmp_path)
    finally:
        learner.close()
    assert report.read_text().splitlines() == ["True True", "True True", "kept: []"]
    assert "unshared" not in facts


@pytest.mark.slow
@pytest.mark.parametrize("empty", ["equal", "other format"])
def test_the_first_process_reads_the_weights_of_divided_layers(
    empty: str, toy_model: Path, tmp_path: Path, booting: Callable[[str], None]
) -> None:
    """The others receive them, unless a model without weights would have others than the loaded one."""
    report = tmp_path / "report.txt"
    code = f"""
from compound.engines import model_folder
from compound.optimizers.weights.distributed import worker
load, empty = model_folder.load_causal, worker._empty
def load_causal(*arguments, **how):
    open({str(report)!r}, "a").write(f"{{rank}}\\n")
    return load(*arguments, **how)
model_folder.load_causal = load_causal
if {empty!r} == "other format":
    worker._empty = lambda *arguments: empty(*arguments).bfloat16()
"""
    booting(code)
    processes = Processes(2)
    try:
        weights, norms = both(
            declared(toy_model, critic=True, micro_tokens=64), processes, tmp_path, "fsdp", **MANY
        )
    finally:
        processes.close()
    assert sorted(report.read_text().split()) == (["0"] if empty == "equal" else ["0", "1"])
    assert max(weights, norms) <= EQUAL


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["dr_grpo", "dapo"])
def test_every_kind_of_loss_is_the_sum_over_processes(
    loss: str, toy_model: Path, group: Group, tmp_path: Path
) -> None:
    spec = declared(toy_model, ("x",), loss=loss, micro_tokens=64, epochs=2)
    weights, norms = both(spec, group(2), tmp_path, steps=(0,), names=("x",), critic=False, **MANY)
    assert max(weights, norms) <= EQUAL


def test_a_step_without_samples_for_a_process_ends(
    toy_model: Path, group: Group, tmp_path: Path
) -> None:
    """One sample, of which the other processes get nothing; also where they gather the layers together."""
    for sharding in ("data", "fsdp"):
        learner = ShardedLearner(group(2), declared(toy_model, ("x",)), sharding=sharding)
        facts = learner.step(drawn(("x",), groups=1, each=2)[:1], 0)
        assert facts["norms"]["x"] > 0
        assert learner.step([], 1)["norms"] == {}


def test_log_ratios_are_those_of_one_process(toy_model: Path, group: Group, tmp_path: Path) -> None:
    """To the base model, and after the prompts of a teacher."""
    spec = declared(toy_model, micro_tokens=64)
    learners: list[Learner] = [open_trainer(spec), ShardedLearner(group(2), spec)]
    for taught in (None, drawn(seed=1, prompt=9)):
        rows = []
        for learner in learners:
            learner.step(drawn(), 0)
            rows.append(learner.divergences(drawn(seed=1), taught))
        assert any(abs(ratio) > 1e-3 for row in rows[0] for ratio in row)
        for ours, expected in zip(rows[1], rows[0], strict=True):
            assert ours == pytest.approx(expected, abs=LOGPROBS)


@pytest.mark.parametrize(
    ("first", "second"), [(1, 2), (2, 1), pytest.param(2, 4, marks=pytest.mark.slow)]
)
def test_a_checkpoint_is_continued_by_any_number_of_processes(
    first: int, second: int, toy_model: Path, group: Group, tmp_path: Path
) -> None:
    """With the optimizer states of adapters and value head, to the weights of an uninterrupted training."""
    spec = declared(toy_model, critic=True, micro_tokens=64)

    def opened(count: int) -> Learner:
        return open_trainer(spec) if count == 1 else ShardedLearner(group(count), spec)

    folder = tmp_path / "whole"
    whole, _ = trained(open_trainer(spec), folder, (0, 1), **MANY)
    begun, _ = trained(opened(first), tmp_path, (0,), **MANY)
    learner = opened(second)
    learner.restore(begun, tmp_path)
    ended, _ = trained(learner, tmp_path, (1,), **MANY)
    assert difference(weights_of(ended, tmp_path), weights_of(whole, folder)) <= EQUAL
    # without the states the second step would be another one
    learner = opened(2)
    learner.start(begun.adapters, tmp_path)
    other, _ = trained(learner, tmp_path, (1,), **MANY)
    assert difference(weights_of(other, tmp_path), weights_of(whole, folder)) > 1e-3
    learner = opened(2)
    learner.start(begun.adapters, tmp_path)
    for name in ("x", "y", VALUE):
        learner.restore_optimizer(name, begun.optimizers, tmp_path)
    same, _ = trained(learner, tmp_path, (1,), **MANY)
    assert difference(weights_of(same, tmp_path), weights_of(whole, folder)) <= EQUAL


def test_a_start_elsewhere_is_copied_by_the_run_and_only_the_first_process_writes(
    toy_model: Path, group: Group, tmp_path: Path
) -> None:
    spec, elsewhere, folder = declared(toy_model, ("x",)), tmp_path / "elsewhere", tmp_path / "run"
    for path in (elsewhere, folder):
        path.mkdir()
    begun, _ = trained(open_trainer(spec), elsewhere, (0,), critic=False, names=("x",))
    reference = begun.adapters["x"]
    assert reference is not None
    learner = ShardedLearner(group(2), spec)
    learner.start({"x": {**reference, "path": str(elsewhere / reference["path"])}}, folder)
    assert [path.name for path in folder.iterdir()] == [reference["path"]]
    learner.write_adapter("x", made := tmp_path)
    assert (made / "adapter_model.safetensors").exists()
    version = reference["sha256"]
    learner.step([fresh(sample, version) for sample in drawn(("x",))], 0)
    saved = learner.save(folder)
    assert saved.versions["x"][-2:] == [version, (saved.adapters["x"] or {})["sha256"]]
    assert len(list(folder.iterdir())) == 3  # two adapters and the optimizer states
    with pytest.raises(StaleSamples, match=r"learner process \d of 2"):
        learner.step([fresh(sample, version) for sample in drawn(("x",))], 1)


def fresh(sample: Sample, version: str) -> Sample:
    return replace(sample, on_policy=True, tokens=replace(sample.tokens, adapter=version))


@pytest.mark.slow
def test_errors_of_a_process_are_those_of_the_trainer(toy_model: Path, tmp_path: Path) -> None:
    """With the same class, so that the run treats them in the same way."""
    spec = declared(toy_model, ("x",))
    saved, _ = trained(open_trainer(spec), tmp_path, (0,), critic=False, names=("x",))
    wider = spec.model_copy(update={"shapes": {"x": Weights(rank=8, alpha=8, targets="attention")}})
    processes = Processes(2)
    learner = ShardedLearner(processes, wider)
    with pytest.raises(
        ConfigurationError, match=r"learner process \d of 2.*declares alpha 8 and rank 8"
    ):
        learner.restore(saved, tmp_path)
