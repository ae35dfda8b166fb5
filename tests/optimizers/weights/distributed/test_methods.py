"""Every method that trains weights trains the same in one process and in several."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from learners import difference, weights_of

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from compound.errors import CompoundError  # noqa: E402
from compound.optimizers.weights import training as session  # noqa: E402
from compound.optimizers.weights.distributed.processes import Processes  # noqa: E402
from compound.optimizers.weights.distributed.settings import LearnerSettings  # noqa: E402
from compound.optimizers.weights.distributed.sharded import ShardedLearner  # noqa: E402
from compound.optimizers.weights.learner.learner import LearnerSpec, open_trainer  # noqa: E402
from compound.optimizers.weights.learner.samples import Sample  # noqa: E402
from compound.optimizers.weights.learner.saved import Saved  # noqa: E402
from compound.optimizers.weights.learner.trainer import Trainer  # noqa: E402
from compound.optimizers.weights.methods import POLICY_METHODS  # noqa: E402
from compound.storage.artifacts import Reference  # noqa: E402
from training_jobs import trained  # noqa: E402

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EQUAL = 1e-6  # relative to the largest number of a tensor, in float32
FAST = {"mappo", "mmgrpo", "mygo"}  # a value head, a group, and maximum likelihood
COUNTS = [2, pytest.param(4, marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def model(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make_model(tmp_path_factory.mktemp("model"), positions=4096)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def group() -> Iterator[Callable[[int], Processes]]:
    known: dict[int, Processes] = {}

    def found(count: int) -> Processes:
        if count not in known:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("OMP_NUM_THREADS", "1")
                known[count] = Processes(count)
        return known[count]

    yield found
    for each in known.values():
        each.close()


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

    def divergences(self, samples: Sequence[Sample]) -> list[tuple[float, ...]]:
        found = self.one.divergences(samples)
        for ours, expected in zip(self.several.divergences(samples), found, strict=True):
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


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    ("method", "local"),
    [
        *(
            pytest.param(name, "ppo", marks=() if name in FAST else pytest.mark.slow, id=name)
            for name in POLICY_METHODS
        ),
        *(
            pytest.param("optimas", local, marks=pytest.mark.slow, id=f"optimas-{local}")
            for local in ("ppo", "grpo")
        ),
    ],
)
def test_every_method_trains_to_the_weights_of_one_process(
    method: str, local: str, count: int, model: Path, group: Callable[[int], Processes], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    learners: list[Both] = []
    own, folder = tmp_path / "several", tmp_path / "one"
    own.mkdir()
    folder.mkdir()

    def opened(spec: LearnerSpec, settings: LearnerSettings) -> Both:
        learners.append(Both(spec, group(count), own))
        return learners[-1]

    monkeypatch.setattr(session, "open_learner", opened)
    more: dict[str, Any] = {"pace": 0.01} if method == "mygo" else {"kl_reward": 0.05}
    _, records = asyncio.run(trained(model, method, folder, local=local, micro_tokens=64, **more))
    steps = [record for record in records if record.get("kind") == "training"]
    assert max(norm for record in steps for norm in record["norms"].values()) > 0
    differences = [number for learner in learners for number in learner.compared]
    assert len(differences) == len(steps)
    assert max(differences) <= EQUAL


def test_one_setting_starts_the_processes_and_a_loss_of_one_is_no_loss_of_steps(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job with two processes, one of which is killed, ends with the checkpoint of the step before."""
    steps: list[int] = []
    step = ShardedLearner.step

    def dying(self: ShardedLearner, samples: Sequence[Sample], number: int) -> dict[str, Any]:
        steps.append(number)
        if number == 1:
            os.kill(self._processes._processes[0].pid, signal.SIGKILL)
        return step(self, samples, number)

    monkeypatch.setattr(ShardedLearner, "step", dying)
    monkeypatch.setattr(Trainer, "step", lambda *_: pytest.fail("computed in this process"))
    with pytest.raises(CompoundError, match=r"learner process 0 of 2 .* was killed by signal 9"):
        asyncio.run(trained(model, "mmgrpo", tmp_path, learner=json.loads('{"processes": 2}')))
    assert steps == [0, 1]
    stored = [path.name for path in tmp_path.iterdir()]
    assert sum(name.startswith("optimizer-states-") for name in stored) == 1
    assert sum(name.startswith("answerer-") for name in stored) == 1
