"""Names of settings in earlier versions, mapped to their current names.

Until configuration format 2, ``optimize.prompts``, ``optimize.rewards`` and ``optimize.weights`` held the
settings of all methods. Now each method has its own section (docs/adr/0026).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

LOSS = "{loss}"  # stands for the loss that the old settings name


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
    "temperature": "temperature",
    "offline": "offline",
    "scheduler": "scheduler",
}
PROMPTS: Mapping[str, str] = _under("", "proposers lm edits_per_candidate")
OLD_SECTIONS: Mapping[str, Mapping[str, str]] = {
    "prompts": {**PROMPTS, "give_up": "budget.max_proposal_failures"},
    "rewards": REWARDS,
    "weights": WEIGHTS,
}
# Names in TRL, verl, OpenRLHF and Hugging Face, mapped to the settings of methods that train weights.
SYNONYMS: Mapping[str, str] = {
    old: new
    for new, names in {
        "steps": "max_steps num_train_epochs total_epochs total_training_steps num_episodes",
        "rollouts.examples": "train_batch_size rollout_batch_size generation_batch_size num_prompts_per_step",
        "rollouts.runs": "num_generations n n_samples_per_prompt rollout_n group_size num_samples",
        "rollouts.max_length": "max_prompt_length max_seq_length max_seq_len prompt_max_len max_model_len",
        "rollouts.mask_truncated": "mask_truncated_completions overlong_filter",
        "optimizer.lr": "learning_rate actor_learning_rate",
        "optimizer.schedule": "lr_scheduler_type lr_scheduler",
        "optimizer.warmup_steps": "warmup_ratio lr_warmup_steps lr_warmup_steps_ratio lr_warmup_ratio",
        "optimizer.epochs": "num_iterations ppo_epochs num_ppo_epochs max_epochs",
        "optimizer.minibatches": "num_mini_batches ppo_mini_batch_size mini_batch_size",
        "optimizer.micro_tokens": "per_device_train_batch_size gradient_accumulation_steps "
        "micro_train_batch_size ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu batch_size",
        "optimizer.max_norm": "max_grad_norm grad_clip",
        "optimizer.weight_decay": "weight_decay l2 wd",
        "optimizer.dropout": "lora_dropout dropout",
        "scale": "scale_rewards norm_adv_by_std_in_grpo standardize",
        "loss": "loss_type importance_sampling_level policy_loss",
        f"loss.{LOSS}.beta": "kl_coef kl_loss_coef init_kl_coef use_kl_loss",
        f"loss.{LOSS}.clip": "epsilon clip_ratio clip_range cliprange eps_clip epsilon_low clip_ratio_low",
        f"loss.{LOSS}.clip_high": "epsilon_high clip_ratio_high eps_clip_high",
        f"loss.{LOSS}.clip_delta": "delta clip_ratio_c",
        f"loss.{LOSS}.entropy": "entropy_coef entropy_coeff ent_coef",
        f"loss.{LOSS}.correction": "vllm_importance_sampling_cap vllm_importance_sampling_correction",
        "critic.lam": "gae_lambda lambd",
        "critic.lr": "critic_learning_rate critic_lr value_lr",
        "critic.clip": "cliprange_value value_clip",
        "base.gradient_checkpointing": "gradient_checkpointing enable_gradient_checkpointing",
        "base.dtype": "bf16 fp16 torch_dtype dtype",
        "base.quantization": "load_in_4bit load_in_8bit quantization",
        "evaluation.every": "eval_steps test_freq",
    }.items()
    for old in names.split()
}
ELSEWHERE: Mapping[str, str] = {
    old: hint
    for hint, names in {
        "set max_tokens of the component": "max_completion_length max_response_length max_new_tokens "
        "response_length generate_max_len",
        "set weights: {lora: {rank: …}} of the component": "r lora_r lora_rank rank lora lora_config "
        "peft_config",
        "set weights: {lora: {alpha: …}} of the component": "lora_alpha alpha",
        "set weights: {lora: {targets: …}} of the component": "target_modules lora_target_modules targets",
        "rollouts are sampled from the whole distribution, at rollouts.temperature": "top_p top_k min_p",
        "set optimize.seed": "seed",
    }.items()
    for old in names.split()
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


def renamed_path(
    section: str, leaf: str, has: Has, loss: str = "grpo", within: Sequence[str] = WITHIN
) -> str | None:
    """Return the path of a setting that is spelled as in an earlier version or another library, or None.

    Args:
        section: the section that holds the name.
        leaf: the name.
        has: predicate whether a setting exists at a path below ``optimize:``.
        loss: the loss that settings of a loss belong to.
        within: prefixes below the section, in order of preference.

    >>> renamed_path("mmgrpo", "lr", lambda path: list(path) == ["mmgrpo", "optimizer", "lr"])
    'mmgrpo.optimizer.lr'
    """
    for table in (*OLD_SECTIONS.values(), SYNONYMS):
        for prefix in within:
            path = f"{section}.{prefix}{table.get(leaf, '').replace(LOSS, loss)}"
            if leaf in table and has(path.split(".")):
                return path
    return None
