"""A candidate that is no single option: the component's own local reward chooses for each input.

Its mean local reward cannot be beaten on the calls it is measured on, since it takes the best there by
definition. So it is never compared locally: it meets the global reward.
"""

from __future__ import annotations

from compound.graph.configuration import canonical
from compound.graph.space import PerInput
from compound.optimization.method import Task
from compound.optimizers.optimas.local_scoring import Scores
from compound.optimizers.optimas.rewarding import RunRewards
from compound.rewards.model import RewardModel
from compound.rewards.policy import freeze
from compound.storage.artifacts import addressed

ARMS = 3  # of its contest: the incumbent, the best single option, and itself


def chosen_by_reward(
    task: Task, rewards: RunRewards, component: str, scores: Scores
) -> list[dict[str, object]]:
    """Return the candidate, or none: the component has no such parameter, or there are too few runs for it.

    Args:
        task: the job.
        rewards: the run's; remembers what was tried.
        component: the one that the task's keys belong to.
        scores: what guides the job: a reward model can be stored, a baseline's scores cannot.
    """
    keys = [key for key in task.keys if isinstance(task.system.parameters[key], PerInput)]
    if not keys or not isinstance(scores, RewardModel) or task.scorer.left < ARMS * task.minibatch:
        return []
    reference = freeze(scores, component, rewards.memory.folder)
    current = task.system.configuration[keys[0]]
    if canonical(addressed(current)) == canonical(addressed(reference)):
        return []
    found = rewards.untried(task, [{keys[0]: reference}])
    rewards.note_tried(task, found)
    return found
