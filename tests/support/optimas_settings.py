"""Settings of `optimas` given as flat keyword arguments, and optimizers created from them."""

from __future__ import annotations

from typing import Any

from compound.optimizers.optimas.guided import GuidedSearch
from compound.optimizers.optimas.guides import Guide, LearnedRewards
from compound.optimizers.optimas.local import LocalSearch
from compound.optimizers.optimas.local_scoring import LocalSearchSettings
from compound.optimizers.optimas.methods import OptimasSettings
from compound.optimizers.optimas.offline import OfflineRewards
from compound.optimizers.search.prompts import PromptSearch
from compound.rewards.settings import RewardLearning

PARTS = ("backbone", "pairs", "reward", "search")


def optimas(start: OptimasSettings | None = None, /, **changes: Any) -> OptimasSettings:
    """Change settings of any section by name.

    >>> optimas(model="none", inputs=3).pairs.inputs
    3
    """
    found = (start or OptimasSettings()).model_dump(exclude_unset=True)
    for name, value in changes.items():
        parts = OptimasSettings()
        where = next((p for p in PARTS if name in type(getattr(parts, p)).model_fields), None)
        (found if where is None else found.setdefault(where, {}))[name] = value
    return OptimasSettings.model_validate(found)


def learning(settings: OptimasSettings) -> RewardLearning:
    """Return the settings of collecting pairs and learning rewards."""
    return RewardLearning(settings.pairs, settings.backbone, settings.reward)


def cloning_search(
    settings: OptimasSettings, prompts: PromptSearch, search: LocalSearchSettings | None = None
) -> LocalSearch:
    """Return the local search of behaviour cloning."""
    return LocalSearch(learning(settings), search or LocalSearchSettings(rounds=3), prompts)


def guided_search(settings: OptimasSettings, prompts: PromptSearch, **how: Any) -> GuidedSearch:
    """Return a search guided by a local reward."""
    return GuidedSearch(learning(settings), prompts, settings.search.rounds, settings.search.gold, **how)


def offline_rewards(
    settings: OptimasSettings, prompts: PromptSearch, guide: Guide | None = None
) -> OfflineRewards:
    """Return the offline phase."""
    return OfflineRewards(learning(settings), prompts, guide or LearnedRewards())


def proposals(*proposers: str, lm: str | None = None) -> dict[str, Any]:
    """Return the settings section of every method that proposes prompts."""
    writer = {} if lm is None else {"lm": lm}
    prompts = {"proposers": list(proposers), **writer}
    sources = ["llm" if name == "opro" else name for name in proposers if name != "demos"]
    alone = {"proposers": sources, **writer}
    found: dict[str, Any] = dict.fromkeys(("search", "coordinate"), prompts)
    found |= {name: {"prompts": prompts} for name in ("optimas", "hbc")}
    found |= {name: writer for name in ("opro", "textgrad", "gepa", "llm_selector_diagnoser") if writer}
    return {**found, "mipro": alone}
