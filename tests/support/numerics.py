"""Tolerances for two correct computations of the same floating-point number.

Processors and libraries add the terms of a sum in different orders, and fuse different
instructions. With unit roundoff u, a sum of n products then differs by about √n · u times the size
of its terms (Higham 2002, §2.8). A network computes many sums in sequence, whose errors accumulate
like random ones. The tolerance of a test therefore depends on the number format, the length and
number of the sums, and the size of the numbers; a fixed tolerance would hold on some processors
only. The errors that tests detect are larger by orders of magnitude.
"""

from __future__ import annotations

import math
from typing import Literal

Format = Literal["float64", "float32", "bfloat16", "float16"]
EPS: dict[Format, float] = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "bfloat16": 2.0**-7,
    "float16": 2.0**-10,
}
HALF = {"bfloat16", "float16"}
MANY = 4.0  # times the typical difference: the largest of many numbers


def rounding(
    size: float = 1.0, *, dtype: Format = "float32", length: int = 64, depth: int = 24
) -> float:
    """Return the largest rounding difference to expect between two results of one computation.

    Args:
        size: the largest intermediate number, such as a logit or a gradient.
        dtype: the format of the computation.
        length: the number of terms of its sums, such as a layer's width. In half precision they are
            added in float32, and only results are rounded.
        depth: the number of consecutive sums, about seven for each layer of a transformer. The
            defaults are those of the tiny models in these tests.

    >>> f"{rounding(10.0):.1e} {rounding(10.0, dtype='float64'):.1e}"
    '1.9e-04 3.5e-13'
    """
    terms = 1 if dtype in HALF else length
    return MANY * EPS[dtype] * math.sqrt(depth * terms) * size


LOGPROBS = rounding(20.0)  # no logit of the tiny random models in these tests is larger
GRADIENTS = rounding(depth=48)  # relative to the largest gradient; forward and backward pass
SCORES = rounding(
    2.0, length=384, depth=84
)  # products of unit vectors of a real encoder with 12 layers
REAL = rounding(30.0, length=1536, depth=210)  # log-probabilities of SmolLM2, with 30 layers
