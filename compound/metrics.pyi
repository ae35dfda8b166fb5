"""Public names of `compound.metrics`, for type checkers and for its ``__getattr__``."""

from compound.api.agreement import agreement as agreement
from compound.evaluation.metrics.built_in import accuracy as accuracy
from compound.evaluation.metrics.built_in import exact_match as exact_match
from compound.evaluation.metrics.built_in import json_match as json_match
from compound.evaluation.metrics.built_in import mrr as mrr
from compound.evaluation.metrics.built_in import recall_at_k as recall_at_k
from compound.evaluation.metrics.built_in import token_f1 as token_f1
from compound.evaluation.metrics.custom import custom as custom
from compound.evaluation.metrics.judges import pairwise as pairwise
from compound.evaluation.metrics.judges import rubric as rubric
from compound.evaluation.metrics.reading import numeric_match as numeric_match
from compound.evaluation.metrics.reading import regex_match as regex_match
from compound.evaluation.metrics.scoring import pass_at_k as pass_at_k
from compound.evaluation.metrics.similarity import rouge as rouge
from compound.evaluation.metrics.similarity import semantic_similarity as semantic_similarity
from compound.evaluation.statistics import Agreement as Agreement

__all__: list[str]
