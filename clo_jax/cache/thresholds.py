"""Cosine thresholds of the head-wise cache (paper Eq. 7-9)."""

import numpy as np

ALWAYS_MISS = 2.0  # above every cosine


def thresholds(importance: np.ndarray, sim_threshold: float, importance_power: float) -> np.ndarray:
    """Threshold tau of each head from its importance s.

    Eq. 7: theta* = arccos(eta); Eq. 8: theta = s^n · theta* + (1 - s^n) · pi; Eq. 9: tau = cos(theta). An important
    head (s = 1) gets eta, an unimportant one (s = 0) gets -1, which every similarity reaches.

    Args:
      importance: any shape, values in [0, 1].
      sim_threshold: eta, in [-1, 1); at 1 or more every head gets `ALWAYS_MISS`: it is refreshed at every step.
      importance_power: n > 0.

    Returns:
      float32 of the same shape.

    Raises:
      ValueError: importance outside [0, 1] or not finite.
    """
    s = np.asarray(importance, np.float64)
    if not np.all(np.isfinite(s)) or s.min(initial=0.0) < 0 or s.max(initial=0.0) > 1:
        raise ValueError(f"importance: got values in [{s.min()}, {s.max()}], wanted [0, 1]")
    if sim_threshold >= 1:
        return np.full(s.shape, ALWAYS_MISS, np.float32)
    share = s**importance_power
    theta = share * np.arccos(sim_threshold) + (1 - share) * np.pi
    # cos(pi) is -1 exactly, so that s = 0 always hits; clipped because arccos and cos may overshoot by an ulp.
    return np.clip(np.cos(theta), -1.0, 1.0).astype(np.float32)
