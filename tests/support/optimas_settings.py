"""Settings of `optimas` given as flat keyword arguments, and optimizers created from them."""

from __future__ import annotations

from typing import Any

from compound.optimizers.optimas.local import LocalSearch, OfflineRewards
from compound.optimizers.optimas.methods import OptimasSettings
from compound.optimizers.search.joint import JointSearch
from compound.optimizers.search.local_gains import RewardGuide
from compound.optimizers.search.rewarding import RunRewards
from compound.optimizers.search.sources import CandidateSources
from compound.rewards.settings import RewardLearning

PARTS = ("backbone", "pairs", "reward")


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


def local_search(settings: OptimasSettings, sources: CandidateSources, **how: Any) -> LocalSearch:
    """Return the local search of the paper's form."""
    return LocalSearch(learning(settings), sources, **how)


def guided_search(settings: OptimasSettings, sources: CandidateSources, **how: Any) -> JointSearch:
    """Return a search guided by local rewards."""
    return JointSearch(
        sources, RewardGuide(learning(settings), settings.gold, settings.judge, **how)
    )


def offline_rewards(
    settings: OptimasSettings, sources: CandidateSources, scoring: type[RunRewards] = RunRewards
) -> OfflineRewards:
    """Return the offline phase."""
    return OfflineRewards(learning(settings), sources, scoring)


def proposals(*proposers: str, lm: str | None = None) -> dict[str, Any]:
    """Return the settings section of every method that proposes prompts."""
    writer = {} if lm is None else {"lm": lm}
    sources = ["llm" if name == "opro" else name for name in proposers if name != "demos"]
    alone = {"proposers": sources, **writer}
    searched = ["reflect" if name == "opro" else name for name in proposers]
    found: dict[str, Any] = {
        name: {"sources": searched, **writer} for name in ("search", "optimas", "hbc")
    }
    found |= {
        name: writer for name in ("opro", "textgrad", "gepa", "llm_selector_diagnoser") if writer
    }
    return {**found, "mipro": alone}
