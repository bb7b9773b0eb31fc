"""Confidence intervals of 95 %: Wilson's for the score of one task, a bootstrap for means over tasks and for losses."""

import math
from collections.abc import Mapping

import numpy as np

METHOD = (
    "95 %; of a task: Wilson (wider than needed where scores lie between 0 and 1); of means over tasks and of losses: "
    "bootstrap over the samples of each task, 2000 draws, percentiles, losses by pairs of the same sample"
)
_Z = 1.959964  # of the normal distribution, both sides of 95 %
_DRAWS = 2000


def wilson(scores: np.ndarray) -> tuple[float, float]:
    """Interval of the mean of scores [n] in [0, 1], n >= 1."""
    n, mean = len(scores), float(np.mean(scores))
    middle = (mean + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z / (1 + _Z**2 / n) * math.sqrt(mean * (1 - mean) / n + _Z**2 / (4 * n**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def bootstrap(values: Mapping[str, np.ndarray]) -> tuple[float, float]:
    """Interval of the mean over tasks of each task's mean; values [n] by task, n >= 1. The same values, the same
    interval."""
    rng = np.random.default_rng(0)
    draws = [x[rng.integers(0, len(x), (_DRAWS, len(x)))].mean(axis=1) for x in values.values()]
    low, high = np.percentile(np.mean(draws, axis=0), [2.5, 97.5])
    return float(low), float(high)
