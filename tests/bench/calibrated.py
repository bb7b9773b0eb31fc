"""A tiny checkpoint with a calibration that nothing was measured for: what the benches of calibrations are run on."""

import pathlib

import numpy as np

from clo_jax.cache import calibration
from clo_jax.cache.calibration_parts import Choice, Costs, HashWeights, Importance, Similarity
from clo_jax.cache.projections import projections
from clo_jax.calibrate.similarity import STATISTICS
from tests import tiny, tiny_checkpoint

LINK = 1e9


def write(folder: pathlib.Path) -> pathlib.Path:
    """The checkpoint's folder."""
    checkpoint = tiny_checkpoint.write_checkpoint(folder)
    L, K, D = tiny.LLAMA.num_layers, tiny.LLAMA.num_kv_heads, tiny.LLAMA.head_dim
    rng = np.random.default_rng(0)
    origin = dict(small=True, device="cpu", figures={}, versions={})
    seeds = 9 * np.arange(L)[:, None] + np.arange(K)[None]
    hashes = [
        HashWeights(kind, np.stack([[projections(kind, D, 32, seed) for seed in row] for row in seeds]), True)
        for kind in ("sign", "hata")
    ]
    statistics = {name: rng.uniform(0.2, 0.9, (L, K)).astype(np.float32) for name in STATISTICS}
    for seconds, parts in (
        (1.0, [Importance(rng.uniform(0.5, 1, (L, K)).astype(np.float32), "gates")]),
        (2.0, [*hashes, Choice("sign", 32, "held-out attention mass")]),
        (4.0, [Similarity(**statistics)]),
        (8.0, [Costs(((1, 1024, 1e-6),), {"host": LINK, "pull": LINK}, "cpu", 1e10)]),
    ):
        calibration.update(
            checkpoint / "calibration", *parts, provenance=origin | {"seconds": seconds}, model=tiny.LLAMA
        )
    return checkpoint
