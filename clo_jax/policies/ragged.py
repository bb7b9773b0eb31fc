"""Runs of different lengths, side by side in one array: what NumPy needs to handle them without a loop."""

import numpy as np


def steps(lengths: np.ndarray) -> np.ndarray:
    """0 to n - 1 for each n of `lengths` [r], one run after the other."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def before(lengths: np.ndarray) -> np.ndarray:
    """How much lies before each run of a row: lengths [..., r] -> [..., r]."""
    return np.cumsum(lengths, axis=-1) - lengths
