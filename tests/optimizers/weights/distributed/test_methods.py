"""Every method that trains weights trains the same in one process and in several."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from trainings.learners import difference, weights_of

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("one_thread")
pytest.importorskip("peft")

from compound.core.storage.artifacts import Reference  # noqa: E402
from compound.optimizers.weights import training as session  # noqa: E402
from compound.optimizers.weights.distributed.learner import (  # noqa: E402
    LearnerSettings,
    open_trainer,
)
from compound.optimizers.weights.distributed.processes import (  # noqa: E402
    Processes,
    ShardedLearner,
)
from compound.optimizers.weights.learner.samples import Sample  # noqa: E402
from compound.optimizers.weights.learner.trainer import LearnerSpec, Saved  # noqa: E402
from compound.optimizers.weights.methods import POLICY_METHODS  # noqa: E402
from trainings.jobs import trained  # noqa: E402

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EQUAL = 1e-6  # relative to the largest number of a tensor, in float32
COUNTS = [2, 4]


class Both:
    """A learner that does everything twice, in this process and in several, and compares the results."""

    compared: list[float]

    def __init__(self, spec: LearnerSpec, processes: Processes, folder: Path) -> None:
        self.one, self.several = open_trainer(spec), ShardedLearner(processes, spec)
        self.folder, self.compared = folder, []

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.several.tokenizer

    def start(self, references: Mapping[str, Reference | None], folder: Path) -> None:
        self.one.start(references, folder)
        self.several.start(references, folder)

    def restore(self, saved: Saved, folder: Path) -> None:
        raise AssertionError("nothing is resumed here")

    def restore_optimizer(self, name: str, reference: Reference, folder: Path) -> None:
        self.one.restore_optimizer(name, reference, folder)
        self.several.restore_optimizer(name, reference, folder)

    def step(self, samples: Sequence[Sample], number: int) -> dict[str, Any]:
        facts = self.one.step(samples, number)
        # versions are digests, which a difference of one bit changes
        others = self.several.step([replace(s, on_policy=False) for s in samples], number)
        assert others["norms"] == pytest.approx(facts["norms"], rel=EQUAL)
        assert others["components"].keys() == facts["components"].keys()
        for name, metrics in facts["components"].items():
            assert others["components"][name] == pytest.approx(metrics, rel=1e-4, abs=1e-5)
        return facts

    def values(self, samples: Sequence[Sample]) -> list[Sample]:
        found = self.one.values(samples)
        for ours, expected in zip(self.several.values(samples), found, strict=True):
            assert ours.values == pytest.approx(expected.values, rel=EQUAL, abs=EQUAL)
        return found

    def divergences(
        self, samples: Sequence[Sample], taught: Sequence[Sample] | None = None
    ) -> list[tuple[float, ...]]:
        found = self.one.divergences(samples, taught)
        for ours, expected in zip(self.several.divergences(samples, taught), found, strict=True):
            assert ours == pytest.approx(expected, abs=1e-5)
        return found

    def save(self, folder: Path) -> Saved:
        saved = self.one.save(folder)
        others = self.several.save(self.folder)
        self.compared.append(difference(weights_of(others, self.folder), weights_of(saved, folder)))
        return saved

    def write_adapter(self, name: str, folder: Path) -> None:
        self.one.write_adapter(name, folder)

    def close(self) -> None:
        self.one.close()


@pytest.mark.slow
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    ("method", "local"),
    [
        *(pytest.param(name, "ppo", id=name) for name in POLICY_METHODS),
        *(pytest.param("optimas", local, id=f"optimas-{local}") for local in ("ppo", "grpo")),
    ],
)
def test_every_method_trains_to_the_weights_of_one_process(
    method: str,
    local: str,
    count: int,
    model: Path,
    group: Callable[[int], Processes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learners: list[Both] = []
    own, folder = tmp_path / "several", tmp_path / "one"
    own.mkdir()
    folder.mkdir()

    def opened(spec: LearnerSpec, settings: LearnerSettings, folder: Path) -> Both:
        learners.append(Both(spec, group(count), own))
        return learners[-1]

    monkeypatch.setattr(session, "open_learner", opened)
    more: dict[str, Any] = {"pace": 0.01} if method == "mygo" else {"kl_reward": 0.05}
    _, records = asyncio.run(
        trained(model, method, folder, local=local, dtype="float32", micro_tokens=64, **more)
    )
    steps = [record for record in records if record.get("kind") == "training"]
    assert max(norm for record in steps for norm in record["norms"].values()) > 0
    differences = [number for learner in learners for number in learner.compared]
    assert len(differences) == len(steps)
    assert max(differences) <= EQUAL
