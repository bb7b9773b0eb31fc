"""Which heads stay resident: the paper's planner (Eq. 11-13), a pure function of measured inputs."""

import math

import numpy as np

ResidentHeads = tuple[tuple[int, tuple[int, ...]], ...]  # as CloConfig.resident_heads


def reuse_difficulty(thresholds: np.ndarray, similarity: np.ndarray, reuse_margin: float) -> np.ndarray:
    """Eq. 11: D = tau - (mean similarity of adjacent steps - epsilon). Above 0: the head is hard to reuse."""
    return np.asarray(thresholds, np.float64) - (np.asarray(similarity, np.float64) - reuse_margin)


def prefetchable_heads(layer_time_s: float, link_bytes_per_s: float, head_bytes: float) -> int:
    """Eq. 12: N_p, heads whose selected rows the link carries while one layer computes.

    Args:
      head_bytes: bytes of one head's selected rows, all sequences of the batch together.
    """
    for name, value in (
        ("layer_time_s", layer_time_s),
        ("link_bytes_per_s", link_bytes_per_s),
        ("head_bytes", head_bytes),
    ):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name}: got {value}, wanted a positive number")
    return math.floor(layer_time_s * link_bytes_per_s / head_bytes)


def paper_plan(
    thresholds: np.ndarray, similarity: np.ndarray, reuse_margin: float, layer_time_s: float, link_bytes_per_s: float,
    head_bytes: float,
) -> ResidentHeads:  # fmt: skip
    """Eq. 13: of each layer's hard heads, those beyond what prefetching covers stay resident, the hardest first (ties:
    the lower head). Layer 0 is resident whole: no layer before it could guess its query.

    Args:
      thresholds, similarity: [L, K]; tau and the mean cosine of adjacent steps (after Eq. 10).
      reuse_margin: epsilon.
      layer_time_s: time of one layer when every head hits. link_bytes_per_s: of the backend in use. head_bytes: see
        `prefetchable_heads`.

    Returns:
      ((layer, heads), ...) of every layer with resident heads.

    Raises:
      ValueError: shapes that differ, or figures that are not positive.
    """
    if np.shape(thresholds) != np.shape(similarity) or np.ndim(thresholds) != 2:
        raise ValueError(f"similarity: got shape {np.shape(similarity)}, wanted {np.shape(thresholds)} = [L, K]")
    covered = prefetchable_heads(layer_time_s, link_bytes_per_s, head_bytes)
    plan = [(0, tuple(range(np.shape(thresholds)[1])))]
    for layer, difficulty in enumerate(reuse_difficulty(thresholds, similarity, reuse_margin)):
        hardest = np.argsort(-difficulty, kind="stable")[: max(int((difficulty > 0).sum()) - covered, 0)]
        if layer > 0 and len(hardest):
            plan.append((layer, tuple(sorted(int(head) for head in hardest))))
    return tuple(plan)
