"""Training by other libraries: rollouts of a system for TRL's ``GRPOTrainer``, and exported samples.

With `trl_rollouts`, TRL owns the loop, the loss and the distribution over devices. The system is
run around the trained component, so that its answers get the reward of whole runs. With
``keep_samples``, every training step stores its samples with their credit in the run directory;
`export_groups` collects those of a run in one file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Json, ValidationError

from compound.core.errors import DeclarationError, RunDirectoryError
from compound.core.example import Example, Metric
from compound.core.loops import run_blocking
from compound.core.security.untrusted import UntrustedFolder
from compound.core.storage.artifacts import Reference, leads_outside, store_folder, verify_reference
from compound.core.storage.state import first_problem
from compound.engines.adapter_files import WEIGHTS
from compound.evaluation.evaluate import EvaluationRules
from compound.evaluation.metrics.custom import Scoring, as_metric
from compound.execution.cache import MemoryCache
from compound.execution.executor import Executor
from compound.graph.registry.engines import Engines, for_system
from compound.graph.space import Weights
from compound.graph.system import System
from compound.optimization.runs.directory import CONFIG, as_folder, read_json, read_records
from compound.optimization.runs.recorder import MEMORY, MEMORY_FOLDER
from compound.optimizers.weights.bases import PlannedTraining
from compound.optimizers.weights.credit import trajectory_samples
from compound.optimizers.weights.learner.samples import Sample, SamplingSettings
from compound.optimizers.weights.learner.trainer import StaleSamples
from compound.optimizers.weights.recipes.rollouts import (
    Rollout,
    Sampler,
    rollout_rules,
    upstream_components,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from trl import GRPOTrainer

FILE = "samples.jsonl"  # in the folder of a step
FIELD = "stored_samples"  # of the record of a step: the reference of its folder
ModelT = TypeVar("ModelT", bound=BaseModel)


@dataclass
class TRLRollouts:
    """Rollout function, reward function and data set for TRL; made by `trl_rollouts`."""

    system: System
    component: str
    examples: Mapping[str, Example]  # by name, which is the prompt of TRL's data set
    metric: Metric
    engines: Engines
    folder: Path
    seed: int
    rules: EvaluationRules
    _calls: int = 0

    @property
    def rows(self) -> list[dict[str, str]]:
        """The rows of TRL's data set: the name of each example in the column ``prompt``."""
        return [{"prompt": name} for name in self.examples]

    def __call__(self, prompts: Sequence[str], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        """Run the system with the trainer's weights, once per prompt (``rollout_func``).

        A run that did not call the component, or was lost to a transient error, has one token and
        the reward ``None``, which TRL excludes from its group.
        """
        reference = store_adapter(trainer, self.folder)
        system = self.system.bind({f"{self.component}.weights": reference})
        rollouts = run_blocking(self._draw(system, prompts, trainer))
        self._calls += 1
        samples = [self._sample(rollout, reference) for rollout in rollouts]
        end = int(trainer.processing_class.eos_token_id)
        return {
            "prompt_ids": [list(s.tokens.prompt) if s else [end] for s in samples],
            "completion_ids": [list(s.tokens.sampled) if s else [end] for s in samples],
            "logprobs": [list(s.tokens.logprobs) if s else [0.0] for s in samples],
            "run_reward": [s.reward if s else None for s in samples],
        }

    def reward(
        self, completions: Sequence[object], *, run_reward: list[float | None], **fields: object
    ) -> list[float | None]:
        """Return the rewards that the rollouts carry (``reward_funcs``)."""
        return run_reward

    async def _draw(
        self, system: System, prompts: Sequence[str], trainer: GRPOTrainer
    ) -> list[Rollout]:
        sampling = SamplingSettings(temperature=trainer.args.temperature)
        rules = rollout_rules(self.rules, system, [self.component], sampling)
        executor = Executor(self.engines, cache=MemoryCache(), seed=self.seed, folder=self.folder)
        sampler = Sampler(executor, system, self.metric, rules, self._calls)
        # processes share seeds, so a group that is divided among them needs numbers of its own in
        # each
        number = trainer.accelerator.process_index * len(prompts)
        wanted = [
            (self.examples[name], number + prompts[:place].count(name))
            for place, name in enumerate(prompts)
        ]
        shared = upstream_components(system, [self.component])
        rollouts = await sampler.attempts(wanted, shared=shared)
        sampler.check_failures()
        return rollouts

    def _sample(self, rollout: Rollout, reference: Reference) -> Sample | None:
        if rollout.lost:
            return None
        fallback = self.rules.failure_score
        found = trajectory_samples(rollout.trace, [self.component], fallback=fallback)
        if len(found) > 1:
            raise DeclarationError(
                f"{self.component!r} was called {len(found)} times in a run of example "
                f"{rollout.example.id!r}, but TRL trains one sequence per prompt",
                hint="train it with a method of compound, or export its groups; see the guide to TRL",
            )
        sample = found[0] if found else None
        if sample and sample.tokens.constraint:
            raise DeclarationError(
                f"the answers of {self.component!r} are constrained, which TRL's loss does not know",
                hint=f"set enforce: false in {self.component!r}",
            )
        if sample and sample.tokens.adapter != reference["sha256"]:
            raise StaleSamples(
                f"{sample.address} of example {sample.example!r} was sampled with other weights than the "
                "trainer's",
                hint=f"let only TRL change the weights of {self.component!r}",
            )
        return sample


def trl_rollouts(
    system: System,
    component: str,
    examples: Sequence[Example],
    metric: Metric | Scoring,
    *,
    engines: Engines,
    folder: str | Path,
    seed: int = 0,
    concurrency: int = 64,
    failure_score: float = 0.0,
    max_failed: float = 0.5,
) -> TRLRollouts:
    """Return rollout function, reward function and data set that train one component in ``GRPOTrainer``.

    The runs of a group share what the components before the trained one answer, so they have one
    prompt. Every answer gets the global reward of its run; a failed run gets ``failure_score``.

    Args:
        system: the system. Other components keep their configuration.
        component: a component with weights that is called at most once per run.
        examples: the train examples, with unique names.
        metric: the global reward.
        engines: model name -> engine, or a function that returns one. The component's engine must
            serve adapters of the model that TRL trains.
        folder: where the adapter is stored for the engine before each sampling.
        seed: the seed of all samples.
        concurrency: the maximum number of runs in flight.
        failure_score: the reward of a failed run.
        max_failed: the maximum share of runs that may be lost or fail in the metric.

    Returns:
        An object whose ``rows`` are the rows of ``train_dataset``, whose ``reward`` is the reward
        function, and which is itself the ``rollout_func``.

    Raises:
        DeclarationError: the component has no weights, its engine serves no adapters or changes the
            sampling distribution, or two examples have one name.
    """
    if not isinstance(system.parameters.get(f"{component}.weights"), Weights):
        raise DeclarationError(
            f"the component {component!r} has no weights to train",
            hint="declare it with weights=cp.LoRA(...)",
        )
    by_name = {example.id: example for example in examples}
    if len(by_name) != len(examples):
        raise DeclarationError(
            "two examples have the same id", hint="give each example an id of its own"
        )
    prepared = for_system(engines, system)
    planned = PlannedTraining(system, (component,), Executor(prepared).engine)
    _ = planned.base  # raises if it cannot be trained
    planned.check_sampling()
    rules = EvaluationRules(concurrency, failure_score, max_failed)
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    return TRLRollouts(system, component, by_name, as_metric(metric), prepared, place, seed, rules)


def store_adapter(trainer: GRPOTrainer, folder: Path) -> Reference:
    """Store the active adapter of a trainer in peft's format, and return its reference."""
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors.torch import save_file

    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise DeclarationError(
            "rollouts need the whole adapter in each process, but FSDP or DeepSpeed shard it",
            hint="train with data parallelism (DDP), or export the groups of a run as a data set",
        )
    model = trainer.accelerator.unwrap_model(trainer.model)
    if not isinstance(model, PeftModel):
        raise DeclarationError(
            "TRL trains all weights of the model, but engines serve LoRA adapters",
            hint="pass peft_config=LoraConfig(...) to GRPOTrainer",
        )
    name = model.active_adapter
    tensors = get_peft_model_state_dict(model, adapter_name=name)

    def write(path: Path) -> None:
        own = {key: tensor.detach().float().cpu().contiguous() for key, tensor in tensors.items()}
        save_file(own, path / WEIGHTS, metadata={"format": "pt"})
        model.peft_config[name].save_pretrained(str(path))

    return store_folder(write, folder, "trl")


# -- samples of a run ----------------------------------------------------------------------------


class SampleRow(BaseModel):
    """One sampled answer with its credit, as stored for a step.

    ``prompt`` and ``completion`` are the decoded tokens, special ones included; trainers should
    read ``prompt_ids`` and ``completion_ids``, since text may be tokenized differently. ``group``
    is the key of the samples of the step that were compared; an empty key belongs to no group.
    ``advantages`` has one number per token of the completion; it is empty for methods that imitate.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    component: str
    example: str
    group: Json[list[str | int]]
    rollout: int
    invocation: int
    prompt: str
    completion: str
    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    adapter: str
    reward: float
    advantages: list[float]
    weight: float


class SampleFolder(BaseModel):
    """The reference of a folder, relative to the folder of the run's memory."""

    model_config = ConfigDict(extra="forbid", strict=True)

    path: str
    sha256: str


class StoredStep(BaseModel):
    """The fields of a step's record that locate its samples: the seed of its job, and its number."""

    model_config = ConfigDict(strict=True)

    seed: int
    step: int
    stored_samples: SampleFolder


def write_samples(
    samples: Sequence[Sample], tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    """Write the samples of a step to a file in ``folder``, as lines that `SampleRow` reads."""
    with (folder / FILE).open("w", encoding="utf-8") as file:
        for sample in samples:
            tokens, fields = sample.tokens, SampleRow.model_fields
            row = {
                **{name: getattr(tokens, name) for name in fields if hasattr(tokens, name)},
                **{name: getattr(sample, name) for name in fields if hasattr(sample, name)},
                "group": json.dumps(sample.group),
                "prompt": str(tokenizer.decode(tokens.prompt)),
                "completion": str(tokenizer.decode(tokens.sampled)),
                "prompt_ids": list(tokens.prompt),
                "completion_ids": list(tokens.sampled),
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def export_groups(run: str | Path, path: str | Path) -> int:
    """Write the samples of all training steps of a run to a file of JSON lines, and return their number.

    Each line is a `SampleRow` with the ``step`` and the seed of the ``job``. Its ``group`` is a
    JSON list that starts with both, so that groups of different steps differ. ``datasets`` reads
    the file with ``load_dataset("json", data_files=path)``.

    Args:
        run: the directory of a finished or unfinished run.
            It may come from someone else: nothing outside of it is read.
        path: the file to write. An existing one is replaced once all samples are written.

    Raises:
        DeclarationError: the run kept no samples.
        RunDirectoryError: the folder is not a run directory, a record or a sample in it is
            malformed or refers outside of it, or ``path`` cannot be written.
        ConfigurationError: the samples of a step are missing or were changed.
    """
    folder, target, count = as_folder(run), Path(path), 0
    read_json(folder, CONFIG)
    steps = list(_steps(folder))
    if not steps:
        raise DeclarationError(
            f"{folder} holds no samples",
            hint="train with keep_samples: true in the section of the method",
        )
    with UntrustedFolder(target.parent).writer(target.name) as file:
        for step in steps:
            job = str(step.seed)
            for row in _rows(folder, step):
                group = json.dumps([job, step.step, *row.group] if row.group else [])
                line = {**row.model_dump(), "group": group, "step": step.step, "job": job}
                file.write((json.dumps(line) + "\n").encode())
                count += 1
    return count


def _steps(folder: UntrustedFolder) -> Iterator[StoredStep]:
    for number, record in enumerate(read_records(folder, MEMORY), start=1):
        if FIELD not in record:
            continue
        where = f"{folder}/{MEMORY}:{number}"
        step = _parsed(StoredStep, record, where)
        if leads_outside(step.stored_samples.path):
            raise RunDirectoryError(
                f"{where}: {FIELD} refers to the folder {step.stored_samples.path!r}, which is outside of "
                "the run directory",
                hint="restore the file from its run",
            )
        yield step


def _rows(folder: UntrustedFolder, step: StoredStep) -> Iterator[SampleRow]:
    memory, reference = folder.below(MEMORY_FOLDER), step.stored_samples
    place = memory.below(reference.path)
    folder.kind(MEMORY_FOLDER)  # rejects a link, which the next line would follow
    verify_reference(reference.model_dump(), memory.path)
    for number, record in enumerate(read_records(place, FILE), start=1):
        yield _parsed(SampleRow, record, f"{place}/{FILE}:{number}")


def _parsed(kind: type[ModelT], record: Mapping[str, object], where: str) -> ModelT:
    try:
        return kind.model_validate(record)
    except ValidationError as error:
        raise RunDirectoryError(
            f"{where}: {first_problem(error)}", hint="restore the file from its run"
        ) from None
