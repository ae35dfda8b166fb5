"""Sections of ``optimize:``: the method each belongs to, and validation of its content.

Methods are imported on first use.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic_core import ErrorDetails

from compound.core.errors import DeclarationError, suggest_name
from compound.graph.registry.code import find_code
from compound.graph.registry.plugins import installed, method_of, registered
from compound.optimization.settings.base import CommonSettings, NoSettings, Settings

LOSS = "{loss}"  # stands for the loss that a setting belongs to
REMOVED_SECTIONS = ("prompts", "rewards", "weights")  # until version 0.3, of all methods together
REMOVED = "is no longer a section; use that of the method, such as optimize.search"
# Names in TRL, verl, OpenRLHF and Hugging Face, mapped to the settings of methods that train
# weights.
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
        "scale": "scale_rewards norm_adv_by_std_in_grpo standardize",
        "loss": "loss_type importance_sampling_level policy_loss",
        f"loss.{LOSS}.beta": "kl_coef kl_loss_coef init_kl_coef use_kl_loss",
        f"loss.{LOSS}.clip": "epsilon clip_ratio clip_range cliprange eps_clip epsilon_low clip_ratio_low",
        f"loss.{LOSS}.clip_high": "epsilon_high clip_ratio_high eps_clip_high",
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
        "adapters have no dropout; optimizer.weight_decay regularizes them": "lora_dropout dropout",
        "set optimize.seed": "seed",
    }.items()
    for old in names.split()
}
# Settings that were removed, by the end of their path, and what to do instead.
GONE: Mapping[str, str] = {
    "better_together.interleave": "list the search of prompts as a stage: stages: [gepa, mmgrpo, gepa]",
    "baselines": "compare methods by: compound sweep FILE --methods search,random",
    "critic.adapter": "the value head reads the states of the policy, as with null before",
}
# where a method's section may hold them
WITHIN = ("", "prompts.", "training.ppo.", "training.grpo.")

UserSections = tuple[
    tuple[str, type[Settings] | None], ...
]  # user-defined methods; None if not importable


class _DynamicSettings(CommonSettings):
    """Base of dynamically created models, whose fields carry descriptions: they have no source code."""

    model_config = ConfigDict(use_attribute_docstrings=False)


@functools.cache
def optimize_model(own: UserSections = ()) -> type[CommonSettings]:
    """Build the model of ``optimize:``; a section of a user-defined method without a model is any mapping."""
    fields: dict[str, Any] = {
        name: (factory.settings, Field(default=None, description=f"Settings of method `{name}`."))
        for name, factory in registered().items()
        if factory.settings is not NoSettings
    }
    for name, model in own:
        fields[name] = (model or dict[str, object], Field(default=None))
    return create_model(
        "OptimizeSettings", __base__=_DynamicSettings, __doc__=CommonSettings.__doc__, **fields
    )


def settings_models() -> dict[type[BaseModel], list[str]]:
    """Return the models of all sections and subsections, with their paths under ``optimize:``.

    >>> settings_models()[registered()["mygo"].settings]
    ['mygo']
    """
    found: dict[type[BaseModel], list[str]] = {}
    for name, factory in registered().items():
        if factory.settings is not NoSettings:
            _collect(factory.settings, name, found)
    return found


def _collect(model: type[BaseModel], place: str, found: dict[type[BaseModel], list[str]]) -> None:
    found.setdefault(model, []).append(place)
    for name, field in model.model_fields.items():
        if (part := _model_in(field.annotation)) is not None:
            _collect(part, f"{place}.{name}", found)


def defaults() -> dict[str, dict[str, object]]:
    """Return the default settings of each section of a built-in method, as JSON."""
    return {
        name: factory.settings().model_dump(mode="json") for name, factory in registered().items()
    }


def own_sections(
    values: Mapping[str, object], folder: Path = Path(), *, imports: bool = True
) -> dict[str, type[Settings] | None]:
    """Return the models of the sections of methods that are not built in."""
    found: dict[str, type[Settings] | None] = {}
    for name in _own_methods(values):
        short = name.rpartition(":")[2]
        known = short in registered() or short in CommonSettings.model_fields
        given = [each for each in (name, short) if each in values]
        raw = [each for each in given if not isinstance(values[each], Settings)]
        for section in raw:
            if not (section == short and known):
                found[section] = _model_of(name, folder, imports=imports)
        if not raw and not known:  # so that a misspelled section is compared with its name
            model = _model_of(name, folder, imports=imports)
            if model not in (None, NoSettings):
                found[short] = model
    return found


def _own_methods(values: Mapping[str, object]) -> Iterator[str]:
    together = values.get("better_together")
    stages = (
        together.get("stages") if isinstance(together, Mapping) else getattr(together, "stages", ())
    )
    for names in ([values.get("method")], stages, list(values)):
        if isinstance(names, Sequence) and not isinstance(names, str):
            texts = (name for name in names if isinstance(name, str))
            yield from (name for name in texts if ":" in name or name in installed())


def _model_of(name: str, folder: Path, *, imports: bool) -> type[Settings] | None:
    """Return the settings model of a method, or None if its import fails (which is reported later)."""
    plugin = installed().get(name)
    if plugin is None and not imports:
        return None
    try:
        found = find_code(name, folder) if plugin is None else plugin.load()
    except DeclarationError:
        return None
    found = method_of(found)
    if isinstance(found, type):  # it lacks a decorator, and is rejected where it is used
        return None
    model = getattr(found, "settings", NoSettings)
    return model if isinstance(model, type) and issubclass(model, Settings) else None


def validate_sections(values: Mapping[str, object]) -> dict[str, object]:
    """Validate the content of ``optimize:`` and turn sections into settings.

    Raises:
        ValidationError: a value is invalid.
        DeclarationError: a section is one of an earlier version.
    """
    if lines := [f"optimize.{old} {REMOVED}" for old in REMOVED_SECTIONS if old in values]:
        raise DeclarationError("\n".join(lines))
    made = {name: type(value) for name, value in values.items() if isinstance(value, Settings)}
    known = {*CommonSettings.model_fields, *registered()}
    own = own_sections(values) | {name: kind for name, kind in made.items() if name not in known}
    if unknown := [name for name, model in own.items() if model is None]:
        raise DeclarationError(
            f"optimize.{unknown[0]}: its method cannot be imported",
            hint="pass its settings as an instance of its settings class",
        )
    whole = optimize_model(tuple(own.items())).model_validate(dict(values))
    names = [*CommonSettings.model_fields, *values]
    return {name: getattr(whole, name) for name in names if name in whole.model_fields_set}


def describe_errors(error: ValidationError, values: Mapping[str, object]) -> list[str]:
    """Return one line for each error in the content of ``optimize:``."""
    root = optimize_model(tuple(own_sections(values).items()))
    return [_problem(detail, root) for detail in error.errors()]


def _problem(error: ErrorDetails, root: type[BaseModel]) -> str:
    loc = tuple(part for part in error["loc"] if not str(part).startswith("~"))
    where = ".".join(map(str, loc))
    if error["type"] != "extra_forbidden":
        message = error["msg"].removeprefix("Value error, ")
        return f"{where}: {message}" if where else message
    return f"unknown setting {where}; {suggest_key(loc, root)}"


def suggest_key(loc: Sequence[str | int], root: type[BaseModel]) -> str:
    """Return a suggestion for an unknown key below ``optimize:``."""
    *parents, name = map(str, loc)
    for end, instead in GONE.items():
        if f".{'.'.join((*parents, name))}".endswith(f".{end}"):
            return f"it was removed; {instead}"
    model = model_at(root, parents)
    if not parents:
        if name in SYNONYMS and name not in get_close_matches(name, model.model_fields, 1, 0.9):
            return f"set {SYNONYMS[name].replace(LOSS, 'grpo')} in the section of the method"
        if name in registered():  # a method with settings is a field of the model
            return f"method {name!r} has no settings"
        return suggest_name(name, model.model_fields)
    section, *path = parents
    losses = model_at(root, [section]).model_fields.get("loss")
    default = losses.get_default(call_default_factory=True) if losses else None
    usual = str(getattr(default, "name", "grpo"))
    chosen = dict(itertools.pairwise(path)).get("loss") or usual
    prefixes = sorted(WITHIN, key=lambda prefix: not f"{'.'.join(path)}.".startswith(prefix or "-"))
    for prefix in prefixes if name in SYNONYMS else ():
        now = f"{section}.{prefix}{SYNONYMS[name].replace(LOSS, chosen)}"
        if _has(root, now.split(".")):
            return f"use optimize.{now}"
    if name in ELSEWHERE and _has(root, (section, "rollouts")):
        return ELSEWHERE[name]
    elsewhere = [
        place for place, leaf in _inner(model_at(root, [section]), (section,)) if leaf == name
    ]
    if elsewhere:
        place = next((place for place in elsewhere if chosen in place), elsewhere[0])
        return f"use optimize.{'.'.join(place)}"
    others = [
        other for other in registered() if other != section and _has(root, (other, *path, name))
    ]
    if others:
        return f"it belongs to {', '.join(others)}"
    inner = {leaf: path for path, leaf in _inner(model) if leaf not in model.model_fields}
    near = get_close_matches(name, [*model.model_fields, *inner], 1)
    if near and near[0] in inner:
        return f"did you mean {'.'.join((*path, *inner[near[0]]))}?"
    return suggest_name(name, model.model_fields)


def _inner(
    model: type[BaseModel], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], str]]:
    for name, field in model.model_fields.items():
        yield (*path, name), name
        if (part := _model_in(field.annotation)) is not None:
            yield from _inner(part, (*path, name))


def model_at(root: type[BaseModel], path: Iterable[str]) -> type[BaseModel]:
    """Return the model at a path of keys, or the last model along it."""
    model = root
    for part in path:
        field = model.model_fields.get(part)
        found = _model_in(field.annotation) if field is not None else None
        model = found or model
    return model


def _has(root: type[BaseModel], path: Sequence[str]) -> bool:
    model: type[BaseModel] | None = root
    for part in path:
        if model is None or part not in model.model_fields:
            return False
        model = _model_in(model.model_fields[part].annotation)
    return True


def _model_in(annotation: object) -> type[BaseModel] | None:
    """Return the model in an annotation, if there is exactly one."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = [model for argument in get_args(annotation) if (model := _model_in(argument))]
    return found[0] if len(found) == 1 else None
