"""Generalized advantage estimation over the tokens of one sample (Schulman et al. 2016; PPO and MAPPO).

The reward is given at the last token; earlier tokens receive only their KL penalty, if there is one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import pvariance

from compound.errors import DeclarationError

EPSILON = 1e-8  # added to the variance when advantages are whitened


def gae(
    values: Sequence[float],
    reward: float,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    kl: Sequence[float] = (),
    beta: float = 0.0,
) -> tuple[list[float], list[float]]:
    """Return the advantage and the value target of every token.

    With r_t = -beta kl_t, plus the reward at the last token, and V = 0 after it::

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t     = delta_t + gamma lam A_{t+1}
        target  = A_t + V_t

    Args:
        values: V_t, the value estimate before each sampled token.
        reward: the reward of the sample.
        gamma: the discount factor.
        lam: λ; 1 gives the return minus the value, 0 the one-step temporal difference.
        kl: the estimated KL divergence from the reference at each token; none by default.
        beta: the coefficient of the KL penalty.

    Raises:
        DeclarationError: ``gamma`` or ``lam`` is outside [0, 1], ``kl`` and ``values`` differ in length, or a
            number is not finite.

    Example:
        >>> gae([0.5, 0.25, 0.75], 1.0, lam=0.5)
        ([0.0625, 0.625, 0.25], [0.5625, 0.875, 1.0])
    """
    if not (0 <= gamma <= 1 and 0 <= lam <= 1):
        raise DeclarationError(f"gamma and lam must be between 0 and 1, but are {gamma} and {lam}")
    if kl and len(kl) != len(values):
        raise DeclarationError(f"there are {len(values)} values, but {len(kl)} KL estimates")
    if not all(map(math.isfinite, (*values, *kl, reward, beta))):
        raise DeclarationError(f"values, KL estimates and the reward ({reward}) must be finite numbers")
    advantages = [0.0] * len(values)
    next_value = next_advantage = 0.0
    r_t = reward
    for t in reversed(range(len(values))):
        if kl:
            r_t -= beta * kl[t]
        delta = r_t + gamma * next_value - values[t]
        next_advantage = advantages[t] = delta + gamma * lam * next_advantage
        next_value, r_t = values[t], 0.0
    return advantages, [advantage + value for advantage, value in zip(advantages, values, strict=True)]


def explained_variance(values: Sequence[Sequence[float]], returns: Sequence[Sequence[float]]) -> float | None:
    """Return the explained variance of the returns by the values, over the tokens of all samples.

    1 - Var(returns - values) / Var(returns); ``None`` if the returns have no variance.

    Example:
        >>> returns = [[0.0, 1.0], [0.5]]
        >>> explained_variance(returns, returns), explained_variance([[0.0, 0.0], [0.0]], returns)
        (1.0, 0.0)
    """
    estimates = [value for sample in values for value in sample]
    targets = [value for sample in returns for value in sample]
    spread = pvariance(targets) if targets else 0.0
    if not spread:
        return None
    return 1.0 - pvariance([t - e for e, t in zip(estimates, targets, strict=True)]) / spread


def whiten(batch: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the advantages of a batch, normalized to mean 0 and variance 1 over all tokens.

    Args:
        batch: the advantages of each sample's tokens.

    Example:
        >>> [[round(a, 3) for a in sample] for sample in whiten([[1.0, 3.0], [5.0, 7.0]])]
        [[-1.342, -0.447], [0.447, 1.342]]
    """
    tokens = [advantage for sample in batch for advantage in sample]
    if not tokens:
        return [[] for _ in batch]
    mean = math.fsum(tokens) / len(tokens)
    scale = math.sqrt(math.fsum((token - mean) ** 2 for token in tokens) / len(tokens) + EPSILON)
    return [[(advantage - mean) / scale for advantage in sample] for sample in batch]
