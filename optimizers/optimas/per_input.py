"""Per-input candidates: the component's own local reward chooses an option for each input.

By definition such a candidate chooses the option with the highest local reward, so comparing it by the local
reward would be biased. It is always tested by the global reward instead.
"""

from __future__ import annotations

from compound.graph.configuration import canonical_json
from compound.graph.space import PerInput
from compound.optimization.method import Task
from compound.optimizers.optimas.rewarding import RunRewards
from compound.rewards.model import RewardModel
from compound.rewards.policy import store_reward
from compound.storage.artifacts import without_path

ARMS = 3  # candidates of the test: the incumbent, the best single option, and the per-input candidate


def per_input_candidates(
    task: Task, rewards: RunRewards, component: str, model: RewardModel
) -> list[dict[str, object]]:
    """Return the per-input candidate of a component, if any, and note that it was tried.

    The list is empty if the component has no parameter that can be chosen per input, the budget does not
    cover a test, or the candidate was tried before.

    Args:
        task: the job.
        rewards: the rewards of the run, which store the tried candidates.
        component: the component that the job's keys belong to.
        model: the rewards of the run.
    """
    keys = [key for key in task.keys if isinstance(task.system.parameters[key], PerInput)]
    if not keys or task.scorer.runs_left < ARMS * task.minibatch:
        return []
    reference = store_reward(model, component, rewards.memory.folder)
    current = task.system.configuration[keys[0]]
    if canonical_json(without_path(current)) == canonical_json(without_path(reference)):
        return []
    candidates = rewards.untried(task, [{keys[0]: reference}])
    rewards.note_tried(task, candidates)
    return candidates
