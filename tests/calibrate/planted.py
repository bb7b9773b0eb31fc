"""Samples made by hand: most of what the keys are is noise that no query looks at."""

import jax.numpy as jnp
import numpy as np

from clo_jax.calibrate.collect import LayerSamples


def samples(seed=0, K=2, G=2, D=16, N=256, M=24, length=None, loud=3, loudness=4.0) -> LayerSamples:
    """Keys are louder in `loud` directions, the same for every seed, which queries do not look at."""
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(np.random.default_rng(99).standard_normal((K, D, D)))[0]
    noise = np.arange(D) < loud
    queries = rng.standard_normal((M, K, G, D)) * np.where(noise, 0.05, 2.0)
    queries = np.einsum("mkgr,kdr->mkgd", queries, basis).reshape(M, K * G, D)
    keys = np.einsum("knr,kdr->knd", rng.standard_normal((K, N, D)) * np.where(noise, loudness, 1.0), basis) + 0.5
    length = N if length is None else length
    positions = np.sort(rng.choice(np.arange(length // 2, length), M, replace=False))
    queries, keys = jnp.asarray(queries, jnp.float32), jnp.asarray(keys, jnp.float32)
    return LayerSamples(queries, queries, keys, jnp.asarray(positions, jnp.int32), length)
