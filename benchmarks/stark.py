"""Python steps of the stark system: scores along the relations of entities, and combination of rankings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import comb
from typing import NamedTuple

from compound.components.retriever import FoundPassage as Passage
from compound.core.example import Example
from compound.core.narrowing import entry
from compound.evaluation.metrics.text import normalize

Scores = dict[str, float]  # scores of entities by id

_EDGE = re.compile(r"(?P<relation>[^:\s][^:\n]*): (?P<name>.+) \[(?P<id>[^\[\]\s]+)\]")


class Edge(NamedTuple):
    """Relation of an entity to another one."""

    relation: str
    name: str
    id: str


def edge_line(edge: Edge) -> str:
    """Format an edge as a line of the relations of an entity.

    >>> edge_line(Edge("director", "Kurt Land", "17"))
    'director: Kurt Land [17]'
    """
    return f"{edge.relation}: {edge.name} [{edge.id}]"


def edges(text: str) -> Iterator[Edge]:
    """Parse the relations of an entity; lines of another form, such as dates, are ignored.

    >>> list(edges("director: Kurt Land [17]\\npublication date: 1953"))
    [Edge(relation='director', name='Kurt Land', id='17')]
    """
    for line in text.splitlines():
        if found := _EDGE.fullmatch(line):
            yield Edge(found["relation"], found["name"], found["id"])


def follow(found: list[Passage], wanted: str, own: float, base: float) -> Scores:
    """Score the entities found by their relations, and the entities that these lead to.

    A neighbor of an entity found has the entity's score, divided by the highest one, times ``base +
    (1 - base) * s``, where ``s`` is the share of the relation's words among the words wanted. Of
    several scores of an entity the highest counts.

    Args:
        found: entities, whose texts list their relations, with scores.
        wanted: text that names the relations to follow.
        own: weight of the entities found, from 0 (only their other neighbors count) to 1. A
            question that describes a chain of relations asks for a neighbor, one that lists
            relations for an entity found.
        base: weight of a relation that is not named, from 0 to 1.

    >>> film = {"id": "1", "text": "director: Kurt Land [17]\\ncast: Ann Lee [18]", "score": 4.0}
    >>> follow([film], "director", own=0.5, base=0.2)
    {'1': 0.5, '17': 1.0, '18': 0.2}
    """
    words, scores = set(normalize(wanted).split()), _normalized(found)
    result = dict(scores)
    for passage in found:
        for edge in edges(passage["text"]):
            named = normalize(edge.relation).split()
            share = sum(word in words for word in named) / len(named)
            score = scores[passage["id"]] * (base + (1 - base) * share)
            result[edge.id] = max(score, result.get(edge.id, 0.0))
    return {entity: own * score if entity in scores else score for entity, score in result.items()}


def combine(
    question: list[Passage],
    text: list[Passage],
    relation: Scores,
    question_weight: float,
    text_weight: float,
    relation_weight: float,
    most: int,
) -> list[str]:
    """Rank entities by the weighted sum of their scores, each divided by the highest of its kind.

    Args:
        question: entities found by the question.
        text: entities found by the text written about the entity wanted.
        relation: scores by relations.
        question_weight: weight of the scores by the question.
        text_weight: weight of the scores by the text.
        relation_weight: weight of the scores by relations.
        most: maximum number of entities.

    Returns:
        The ids, best first, without those whose sum is 0. Entities without a score of a kind have 0
        for it; ties keep the order of the arguments.

    >>> a, b = {"id": "a", "score": 2.0}, {"id": "b", "score": 1.0}
    >>> combine([a, b], [], {"b": 0.6}, 1.0, 1.0, 1.0, most=9)
    ['b', 'a']
    """
    total: Scores = {}
    parts = (
        (question_weight, _normalized(question)),
        (text_weight, _normalized(text)),
        (relation_weight, relation),
    )
    for weight, scores in parts:
        for entity, score in scores.items():
            total[entity] = total.get(entity, 0.0) + weight * score
    found = [entity for entity, score in total.items() if score > 0]
    return sorted(found, key=lambda entity: -total[entity])[:most]


def random_order(outputs: Mapping[str, object], example: Example) -> float:
    """Return the expected reciprocal rank of the first right entity if the ranking were shuffled (a control).

    Of ``n`` entities ``m`` are right: the first right one has rank ``r`` with probability
    ``C(n - r, m - 1) / C(n, m)``.

    >>> random_order({"ranked": ["a", "b"]}, Example("e1", {}, {"answer": ["b"]}))
    0.75
    """
    ranked = entry(outputs, "ranked", list)
    n, m = len(ranked), len(set(ranked).intersection(entry(example.gold, "answer", list)))
    return sum(comb(n - r, m - 1) / comb(n, m) / r for r in range(1, n - m + 2)) if m else 0.0


def _normalized(found: list[Passage]) -> Scores:
    """Return the scores, divided by the highest one; negative similarities count as 0."""
    scores: Mapping[str, float] = {passage["id"]: max(passage["score"], 0.0) for passage in found}
    highest = max(scores.values(), default=0.0) or 1.0
    return {entity: score / highest for entity, score in scores.items()}
