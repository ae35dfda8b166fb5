"""Upper bounds of TextGrad's requests: their number and their length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from compound.graph.bounds import CallBound, Extent
from compound.graph.component import Component, CompositeBase, Input, Source
from compound.graph.configuration import component_of
from compound.graph.system import System
from compound.optimization.bounds import Outlook
from compound.optimizers.baselines.criticism import MAX_TOKENS
from compound.optimizers.baselines.gradients import MOST, has_prompt
from compound.optimizers.baselines.opro.requests import purpose_of
from compound.optimizers.search.proposers.transcripts import longest_calls, longest_of, longest_run

TEMPLATE = 1000  # upper bound on the bytes of fixed text in a request, without the descriptions of steps
HEADING = 100  # upper bound on the bytes of fixed text for one run or version


def bounds(
    outlook: Outlook, steps: int, batch: int, momentum: int, constraints: Sequence[str], lm: str | None
) -> list[CallBound]:
    """Return the bounds of the requests for criticism and for rewriting.

    Args:
        outlook: the job.
        steps: the number of steps.
        batch: the number of runs criticized in one step.
        momentum: the number of earlier versions of a prompt in a request.
        constraints: conditions that each new prompt must meet.
        lm: the model; ``None`` for the system's own.
    """
    keys = [key for key in outlook.keys if key in outlook.texts]
    components = [c for c in outlook.system.components.values() if has_prompt(c)]
    names = sum(len(purpose_of(component).encode()) for component in components)
    fixed, answer = Extent(TEMPLATE + 2 * names), Extent(tokens=MAX_TOKENS)

    one_call = {c.name: longest_calls(replace(outlook.uses[c.name], calls=1)) for c in components}
    any_call, any_prompt = Extent(), Extent()
    for component in components:
        any_call = any_call.union(one_call[component.name])
        any_prompt = any_prompt.union(_longest_prompt(component, outlook))
    readers = min(MOST, sum(outlook.uses[component.name].calls for component in components))
    chained = any_call.times(2) + any_prompt + answer.times(readers)
    inputs, gold = longest_of(e.inputs for e in outlook.train), longest_of(e.gold for e in outlook.train)
    loss = any_call + inputs + longest_run(outlook) + gold

    rewriting = Extent()
    conditions = Extent(sum(len(text.encode()) + HEADING for text in constraints))
    for key in keys:
        calls = batch * min(MOST, outlook.uses[component_of(key)].calls)
        criticized = (one_call[component_of(key)] + answer + Extent(HEADING)).times(calls)
        versions = (outlook.texts[key] + Extent(HEADING)).times(1 + momentum)
        rewriting = rewriting.union(criticized + versions + conditions)
    lms, most = ((lm,) if lm else ()), steps * batch * most_requests(outlook)
    return [
        CallBound("criticism", most, fixed + loss.union(chained), MAX_TOKENS, lms),
        CallBound("rewriting", steps * len(keys), fixed + rewriting, MAX_TOKENS, lms),
    ]


def _longest_prompt(component: Component, outlook: Outlook) -> Extent:
    """Return a bound on the total length of a component's texts, or of its fixed prompt."""
    fixed = component.settings.get("prompt")
    texts = [extent for key, extent in outlook.texts.items() if component_of(key) == component.name]
    return sum(texts, Extent(len(fixed.encode()) if isinstance(fixed, str) else 0))


def most_requests(outlook: Outlook) -> float:
    """Return the maximum number of requests of `Backward.gradients` for one run."""
    system, uses = outlook.system, outlook.uses
    components = [component for component in system.components.values() if has_prompt(component)]
    calls = sum(uses[component.name].calls for component in components)
    prompts = sum(uses[component_of(key)].calls for key in outlook.keys if key in outlook.texts)
    if any(isinstance(node.component, CompositeBase) for node in system.nodes.values()):
        return min(MOST, calls + prompts + calls * (calls - 1) / 2)  # a call may read all earlier ones
    writers = {name: len(_writers(system, node.sources)) for name, node in system.nodes.items()}
    edges = sum(writers[name] for name, node in system.nodes.items() if has_prompt(node.component))
    tools = [writers[name] for name, node in system.nodes.items() if not has_prompt(node.component)]
    ends = max(1, len(_writers(system, [*system.outputs.values()])), *tools)  # a tool can fail
    return min(MOST, ends + prompts + edges)


def _writers(system: System, sources: Sequence[Source]) -> set[str]:
    """Return the nodes with prompts that sources come from, possibly by way of other nodes."""
    found, waiting, seen = set[str](), [*sources], set[str]()
    while waiting:
        source = waiting.pop()
        if isinstance(source, Input) or source.node.name in seen:
            continue
        seen.add(source.node.name)
        if has_prompt(source.node.component):
            found.add(source.node.name)
        else:
            waiting += system.nodes[source.node.name].sources
    return found
