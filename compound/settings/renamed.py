"""Names of settings in earlier versions, mapped to their current names.

Until configuration format 2, ``optimize.prompts``, ``optimize.rewards`` and ``optimize.weights`` held the
settings of all methods. Now each method has its own section (docs/adr/0026).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

LOSS = "{loss}"  # placeholder for the loss named in the old settings


def _under(prefix: str, names: str) -> dict[str, str]:
    """Map settings to the same names under a new prefix."""
    return {name: f"{prefix}{name}" for name in names.split()}


WEIGHTS: Mapping[str, str] = {
    **_under("", "steps group padding adapters loss scale penalties forks teachers"),
    **_under("", "attempts keep threshold rule pace online stages"),
    **_under("rollouts.", "examples runs temperature max_length mask_truncated"),
    "stale": "rollouts.max_staleness",
    "failure": "rollouts.failure_score",
    **_under("optimizer.", "lr schedule max_norm max_skipped micro_tokens"),
    "warmup": "optimizer.warmup_steps",
    "passes": "optimizer.epochs",
    "parts": "optimizer.minibatches",
    **_under(f"loss.{LOSS}.", "clip clip_high clip_delta beta entropy correction"),
    "cispo_cap": "loss.cispo.cap",
    "sapo_positive": "loss.sapo.positive",
    "sapo_negative": "loss.sapo.negative",
    "vespo_positive": "loss.vespo.positive",
    "vespo_negative": "loss.vespo.negative",
    "eval_every": "evaluation.every",
    "eval_examples": "evaluation.examples",
    **_under("critic.", "gamma lam kl_reward"),
    "value_lr": "critic.lr",
    "value_clip": "critic.clip",
    "local": "training",
    "best": "max_reward",
    "warm_up": "cold_start",
}
REWARDS: Mapping[str, str] = {
    "backbone": "backbone.model",
    "max_length": "backbone.max_length",
    "train": "reward.lora",
    **_under("reward.lora.", "rank alpha lr epochs batch patience"),
    "weighting": "reward.weighting",
    "accuracy": "reward.min_accuracy",
    "sure": "reward.sufficient_accuracy",
    **_under("pairs.", "inputs samples"),
    "rollouts": "pairs.min_rollouts",
    "most_rollouts": "pairs.max_rollouts",
    "steps": "search.rounds",
    "temperature": "search.temperature",
    "offline": "offline",
    "scheduler": "scheduler",
}
PROMPTS: Mapping[str, str] = _under("", "proposers lm edits_per_candidate")
OLD_SECTIONS: Mapping[str, Mapping[str, str]] = {
    "prompts": {**PROMPTS, "give_up": "budget.max_proposal_failures"},
    "rewards": REWARDS,
    "weights": WEIGHTS,
}
WITHIN = ("", "prompts.", "training.ppo.", "training.grpo.")  # where a method's section may hold them
Has = Callable[[Sequence[str]], bool]


def new_names(
    section: str, values: Mapping[str, object], chosen: Sequence[str], known: Sequence[str], has: Has
) -> Iterator[tuple[str, str]]:
    """Yield each setting of an old section with a message about its current place.

    Args:
        section: a name from `OLD_SECTIONS`.
        values: content of ``optimize:``.
        chosen: the selected method and its stages.
        known: all other methods.
        has: predicate whether a setting exists at a path below ``optimize:``.
    """
    given = values[section]
    if not isinstance(given, Mapping) or not given:
        yield "", f"is no longer a section; use optimize.{chosen[0]}"
        return
    loss = str(given.get("loss", "grpo")) if section == "weights" else "grpo"
    for leaf in given:
        path = OLD_SECTIONS[section].get(leaf, "").replace(LOSS, loss)
        if path == "budget.max_proposal_failures":
            yield leaf, f"is now optimize.{path}"
            continue
        own, others = (
            [f"{method}.{prefix}{path}" for prefix in WITHIN for method in methods if path]
            for methods in (chosen, known)
        )
        now = next((place for place in [*own, *others] if has(place.split("."))), None)
        if now is None:
            yield leaf, "does not exist"
        elif now in own:
            yield leaf, f"is now optimize.{now}"
        else:
            yield leaf, f"is now optimize.{now}; method {chosen[0]!r} does not read it"


def renamed_path(section: str, leaf: str, has: Has) -> str | None:
    """Return the current path of a setting that is spelled as in an earlier version, or None.

    >>> renamed_path("mmgrpo", "lr", lambda path: list(path) == ["mmgrpo", "optimizer", "lr"])
    'mmgrpo.optimizer.lr'
    """
    for table in OLD_SECTIONS.values():
        for prefix in WITHIN:
            path = f"{section}.{prefix}{table.get(leaf, '').replace(LOSS, 'grpo')}"
            if leaf in table and has(path.split(".")):
                return path
    return None
