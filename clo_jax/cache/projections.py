"""Untrained hash projections W [D, R]: what codes are made with until a calibration gives trained ones."""

import numpy as np

from clo_jax.config import Retriever


def projections(retriever: Retriever, head_dim: int, hash_bits: int, seed: int) -> np.ndarray:
    """Random projections, the same for every head.

    `sign` wants orthogonal directions (blocks of D orthonormal columns, cut at R): RaBitQ's estimator assumes them.
    `hata` gets independent normal columns: its untrained form is SimHash.

    Returns:
      float32 [D, R].
    """
    rng = np.random.default_rng(seed)
    if retriever == "hata":
        return rng.standard_normal((head_dim, hash_bits)).astype(np.float32)
    blocks = []
    for _ in range(-(-hash_bits // head_dim)):
        q, r = np.linalg.qr(rng.standard_normal((head_dim, head_dim)))
        blocks.append(q * np.sign(np.diag(r)))  # makes the factorisation unique, so that a seed means one matrix
    columns = np.concatenate(blocks, axis=1) if blocks else np.zeros((head_dim, 0))
    return columns[:, :hash_bits].astype(np.float32)
