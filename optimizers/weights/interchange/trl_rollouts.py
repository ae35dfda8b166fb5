"""Rollouts of a compound system for TRL's ``GRPOTrainer``.

TRL owns the loop, the loss and the distribution over devices. The system is run around the trained
component, so that its answers get the reward of whole runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from compound.core.errors import DeclarationError
from compound.core.example import Example, Metric
from compound.core.loops import run_blocking
from compound.core.storage.artifacts import Reference, store_folder
from compound.evaluation.evaluate import EvaluationRules
from compound.evaluation.metrics.custom import Scoring, as_metric
from compound.execution.cache import MemoryCache
from compound.execution.executor import Executor
from compound.graph.registry.engines import Engines, for_system
from compound.graph.space import Weights
from compound.graph.system import System
from compound.optimizers.weights.bases import base_model, check_sampling_engine
from compound.optimizers.weights.credit.grouping import trajectory_samples
from compound.optimizers.weights.learner.samples import Sample
from compound.optimizers.weights.learner.trainer import StaleSamples
from compound.optimizers.weights.recipes.rollouts import (
    Rollout,
    Sampler,
    rollout_settings,
    upstream_components,
)

if TYPE_CHECKING:
    from peft import PeftModel
    from trl import GRPOTrainer

REWARD = "run_reward"  # the field in which TRL passes rewards to the reward function


class RolloutFields(TypedDict):
    """Fields that TRL reads from the result of a rollout function, with one entry per prompt."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    logprobs: list[list[float]]
    run_reward: list[float | None]


@dataclass
class TRLRollouts:
    """Rollout function, reward function and data set for TRL; made by `trl_rollouts`.

    Attributes:
        system: the system.
        component: the component whose weights TRL trains.
        examples: the train examples by name, which is the prompt of TRL's data set.
        metric: the global reward.
        engines: model name -> engine, or a function that returns one.
        folder: where adapters are stored for the engine.
        seed: the seed of all samples.
        rules: concurrency, the reward of failed runs, and the share of runs that may be lost.
    """

    system: System
    component: str
    examples: Mapping[str, Example]
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

    def __call__(self, prompts: Sequence[str], trainer: GRPOTrainer) -> RolloutFields:
        """Run the system with the trainer's weights, once per prompt (``rollout_func``).

        A run that did not call the component, or was lost to a transient error, has one token and
        the reward ``None``, which TRL excludes from its group.

        Args:
            prompts: names of examples; equal ones form a group.
            trainer: the trainer, whose adapter samples.

        Raises:
            DeclarationError: the weights are sharded or no LoRA adapter, the component was called
                more than once in a run, or an answer was constrained.
            StaleSamples: an engine answered with other weights.
            TooManyFailures: too many runs were lost.
        """
        reference = store_adapter(trainer, self.folder)
        system = self.system.bind({f"{self.component}.weights": reference})
        samples = run_blocking(self._draw(system, prompts, trainer))
        self._calls += 1
        return self._fields(samples, reference, trainer)

    def reward(self, completions: Sequence[object], **fields: object) -> list[float | None]:
        """Return the rewards that the rollouts carry (``reward_funcs``)."""
        rewards = fields[REWARD]
        assert isinstance(rewards, list)  # TRL passes every field of a rollout as a list
        return rewards

    async def _draw(
        self, system: System, prompts: Sequence[str], trainer: GRPOTrainer
    ) -> list[Sample | None]:
        """Run the system for each prompt; return the component's samples, or ``None`` where there is none."""
        settings = rollout_settings(system, [self.component], trainer.args.temperature)
        rules = replace(self.rules, settings=settings)
        executor = Executor(self.engines, cache=MemoryCache(), seed=self.seed, folder=self.folder)
        sampler = Sampler(executor, system, self.metric, rules, self._calls)
        # processes share seeds, so a group that is divided among them needs numbers of its own in
        # each
        first, seen = trainer.accelerator.process_index * len(prompts), Counter[str]()
        wanted = []
        for name in prompts:
            wanted.append((self.examples[name], first + seen[name]))
            seen[name] += 1
        rollouts = await sampler.attempts(
            wanted, shared=upstream_components(system, [self.component])
        )
        sampler.check_failures()
        return [self._sample(rollout) for rollout in rollouts]

    def _sample(self, rollout: Rollout) -> Sample | None:
        if rollout.lost:
            return None
        fallback = self.rules.failure_score
        found = trajectory_samples(
            rollout.trace, [self.component], rollout=rollout.number, fallback=fallback
        )
        if len(found) > 1:
            raise DeclarationError(
                f"{self.component!r} was called {len(found)} times in a run of example "
                f"{rollout.example.id!r}, but TRL trains one sequence per prompt",
                hint="train it with a method of compound, or export its groups; see the guide to TRL",
            )
        if found and found[0].tokens.constraint:
            raise DeclarationError(
                f"the answers of {self.component!r} are constrained, which TRL's loss does not know",
                hint=f"set enforce: false in {self.component!r}",
            )
        return found[0] if found else None

    def _fields(
        self, samples: Sequence[Sample | None], reference: Reference, trainer: GRPOTrainer
    ) -> RolloutFields:
        end = int(trainer.processing_class.eos_token_id)
        found = RolloutFields(prompt_ids=[], completion_ids=[], logprobs=[], run_reward=[])
        for sample in samples:
            if sample is not None and sample.tokens.adapter != reference["sha256"]:
                raise StaleSamples(
                    f"{sample.address} of example {sample.example!r} was sampled with other weights than the "
                    "trainer's",
                    hint=f"let only TRL change the weights of {self.component!r}",
                )
            found["prompt_ids"].append(list(sample.tokens.prompt) if sample else [end])
            found["completion_ids"].append(list(sample.tokens.sampled) if sample else [end])
            found["logprobs"].append(list(sample.tokens.logprobs) if sample else [0.0])
            found["run_reward"].append(sample.reward if sample else None)
        return found


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
    engine_of = Executor(prepared).engine
    base_model(system, [component], engine_of)
    check_sampling_engine(system, [component], engine_of)
    rules = EvaluationRules(concurrency, failure_score, max_failed)
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    return TRLRollouts(system, component, by_name, as_metric(metric), prepared, place, seed, rules)


def store_adapter(trainer: GRPOTrainer, folder: Path) -> Reference:
    """Store the active adapter of a trainer in peft's format, and return its reference.

    Raises:
        DeclarationError: the model has no LoRA adapter, or its weights are sharded over processes.
    """
    from peft import PeftModel

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
    return store_folder(lambda path: _write_adapter(model, path), folder, "trl")


def _write_adapter(model: PeftModel, folder: Path) -> None:
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    name = model.active_adapter
    tensors = get_peft_model_state_dict(model, adapter_name=name)
    own = {key: tensor.detach().float().cpu().contiguous() for key, tensor in tensors.items()}
    save_file(own, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    model.peft_config[name].save_pretrained(str(folder))
