"""`dspy.BestOfN` inside an imported program: attempts are samples of the program's own predictors."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

from compound.errors import CompoundError, DeclarationError
from compound.graph.fingerprint import code_digest

if TYPE_CHECKING:
    import dspy

TEMPERATURE = 1.0  # of all attempts, as in DSPy
OWN_MODEL = {
    "Refine": "creates a predictor in each run, which writes advice for the next attempt",
    "RLM": "calls models from the code that it generates",
}
"""Modules of DSPy that call a model outside of their predictors, and how."""


def check_modules(program: dspy.Module) -> None:
    """Reject a program with a module that calls a model outside of its predictors.

    Raises:
        DeclarationError: it has one; the message names the reason.
    """
    import dspy

    for name, why in OWN_MODEL.items():
        kind = getattr(dspy, name, None)
        if kind is not None and any(program.named_sub_modules(type_=kind)):
            more = ", or use dspy.BestOfN" if name == "Refine" else ""
            raise DeclarationError(
                f"dspy.{name} cannot be imported: it {why}, so that not all of its prompts can be tuned",
                hint=f"import it as one component with cp.from_dspy_module{more}",
            )


def own_adapter() -> dspy.Adapter:
    """Return the adapter that is set in DSPy.

    Raises:
        DeclarationError: it does more than to write messages and to read answers.
    """
    import dspy

    adapter = dspy.settings.adapter or dspy.ChatAdapter()
    kind = type(adapter)
    if isinstance(adapter, dspy.TwoStepAdapter):
        why = "reads answers by a model of its own"
    elif not kind.__call__.__module__.startswith("dspy."):
        why = "calls the model itself, in __call__"
    else:
        return adapter
    raise DeclarationError(
        f"programs cannot be imported with the adapter {kind.__name__}: it {why}",
        hint="import the module as one component with cp.from_dspy_module, or set another adapter",
    )


def sampled_predictors(program: dspy.Module) -> set[int]:
    """Return the identities of the predictors that a `dspy.BestOfN` samples."""
    import dspy

    return {
        id(predictor)
        for _, module in program.named_sub_modules(type_=dspy.BestOfN)
        for _, predictor in module.named_sub_modules(type_=dspy.Predict)
    }


def bind_attempts(program: dspy.Module) -> None:
    """Make each `dspy.BestOfN` call its module itself instead of copies of it with other models.

    DSPy draws different answers by copies of the model with different ``rollout_id``. Here, each call of a
    predictor has a seed of its own.

    Args:
        program: a copy of the user's program; it is modified.
    """
    import dspy

    for _, module in program.named_sub_modules(type_=dspy.BestOfN):
        module.forward = functools.partial(_forward, module)


def describe_attempts(program: dspy.Module) -> list[list[object]]:
    """Return the number of attempts, the threshold and the code of the reward of each `dspy.BestOfN`."""
    import dspy

    found = []
    for _, module in program.named_sub_modules(type_=dspy.BestOfN):
        held = inspect.getclosurevars(
            module.reward_fn
        ).nonlocals  # DSPy wraps the user's function in a lambda
        reward = held.get("reward_fn", module.reward_fn)
        found.append([module.N, module.threshold, module.fail_count, code_digest(reward)])
    return found


def _forward(module: Any, **given: object) -> object:  # noqa: ANN401 - a dspy.BestOfN, which has no types
    """Return the prediction with the highest reward, or the first one that reaches the threshold."""
    best, best_reward, allowed = None, float("-inf"), module.fail_count
    failure: Exception | None = None
    for attempt in range(module.N):
        try:
            prediction = module.module(**given)
            reward = module.reward_fn(given, prediction)
        except CompoundError:
            raise
        except Exception as error:
            failure = error
            if attempt > allowed:
                raise
            allowed -= 1
            continue
        if reward > best_reward:
            best, best_reward = prediction, reward
        if reward >= module.threshold:
            break
    if best is None and failure is not None:
        raise failure
    return best
