"""How much attention mass a selection by hash codes keeps: the yardstick of everything that is trained here.

Mass of a query: the attention weight on the tokens that the codes select, relative to the weight on the exact top-k of
the same size, mean over the query heads of a group. 1 is a perfect selection.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from clo_jax.calibrate.collect import LayerSamples
from clo_jax.config import Retriever

LEVELS = 7.0  # as in `clo_jax.ops.select_topk`: the query's projections are rounded to -7 .. 7


class Encoded(NamedTuple):
    """One head's keys: `signs` ±1 float32 [N, R], `factors` float32 [N], `mean` float32 [D]."""

    signs: jax.Array
    factors: jax.Array
    mean: jax.Array


def key_mean(keys: jax.Array, length: jax.Array) -> jax.Array:
    """Mean [D] of the first `length` of one head's keys [N, D]."""
    inside = (jnp.arange(keys.shape[0], dtype=jnp.int32) < length)[:, None]
    return jnp.sum(jnp.where(inside, keys, 0.0), axis=0) / length.astype(jnp.float32)


def encode(keys: jax.Array, mean: jax.Array, weights: jax.Array) -> Encoded:
    """Codes of one head's keys [N, D] under weights [D, R], as `clo_jax.ops.hash_encode` makes them."""
    centred = keys - mean[None]
    p = jnp.dot(centred, weights, precision="highest")
    total = jnp.sum(jnp.abs(p), axis=-1)
    factors = jnp.where(total > 0, jnp.sum(centred**2, axis=-1) / jnp.where(total > 0, total, 1.0), 0.0)
    return Encoded(jnp.where(p > 0, 1.0, -1.0), factors.astype(jnp.float16).astype(jnp.float32), mean)


def scores(retriever: Retriever, queries: jax.Array, encoded: Encoded, weights: jax.Array, lse: jax.Array) -> jax.Array:
    """Scores [M, N] that `clo_jax.ops.select_topk` gives keys for queries [M, G, D]; lse [M, G]."""
    M, G, D = queries.shape
    z = jnp.dot(queries.reshape(M * G, D), weights, precision="highest")
    if retriever == "hata":
        agreement = jnp.dot(jnp.where(z > 0, 1.0, -1.0), encoded.signs.T)  # whole numbers: exact in float32
        return agreement.reshape(M, G, -1).sum(axis=1)
    step = jnp.max(jnp.abs(z), axis=-1, keepdims=True) / LEVELS
    levels = jnp.where(step > 0, jnp.round(z / jnp.where(step > 0, step, 1.0)), 0.0)
    dots = step * encoded.factors[None] * jnp.dot(levels, encoded.signs.T)
    dots = dots.reshape(M, G, -1) + jnp.dot(queries, encoded.mean, precision="highest")[..., None]
    return jnp.exp(jnp.minimum(dots * D**-0.5 - lse[..., None], 80.0)).sum(axis=1)


def attention(queries: jax.Array, keys: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Attention weights [M, G, N] and log-sum-exp [M, G] of queries [M, G, D] at `positions` over one head's keys."""
    M, G, D = queries.shape
    logits = jnp.dot(queries.reshape(M * G, D), keys.T, precision="highest").reshape(M, G, -1) * D**-0.5
    seen = jnp.arange(keys.shape[0], dtype=jnp.int32)[None] <= positions[:, None]
    logits = jnp.where(seen[:, None], logits, -jnp.inf)
    return jax.nn.softmax(logits, axis=-1), jax.nn.logsumexp(logits, axis=-1)


def ranks(score: jax.Array, positions: jax.Array) -> jax.Array:
    """Place of each token, 0 the best, among those that a query at its position sees; ties: the lower index first."""
    seen = jnp.arange(score.shape[1], dtype=jnp.int32)[None] <= positions[:, None]
    order = jnp.argsort(jnp.where(seen, -score, jnp.inf), axis=-1, stable=True)
    return jnp.argsort(order, axis=-1, stable=True)


def num_selected(positions: jax.Array, share: float) -> jax.Array:
    """k = ceil(share · context) for queries at `positions`."""
    return jnp.ceil(jnp.float32(share) * (positions + 1).astype(jnp.float32)).astype(jnp.int32)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _head_quality(retriever, shares, queries, keys, positions, length, weights):
    p, lse = attention(queries, keys, positions)
    if retriever == "exact":
        found = ranks(p.sum(axis=1), positions)
    else:
        mean = key_mean(keys, length) if retriever == "sign" else jnp.zeros_like(keys[0])
        found = ranks(scores(retriever, queries, encode(keys, mean, weights), weights, lse), positions)
    best = ranks(p.sum(axis=1), positions)
    masses, recalls = [], []
    for share in shares:
        k = num_selected(positions, share)[:, None]

        def kept(rank, k=k):
            return jnp.sum(jnp.where((rank < k)[:, None], p, 0.0), axis=-1)

        masses.append((kept(found) / kept(best)).mean(axis=-1))
        both = jnp.sum((found < k) & (best < k), axis=-1)
        recalls.append(both.astype(jnp.float32) / k[:, 0].astype(jnp.float32))
    return jnp.stack(masses), jnp.stack(recalls)


def selection_mass(
    samples: LayerSamples, weights: jax.Array, retriever: Retriever, shares: Sequence[float]
) -> np.ndarray:
    """Mass that codes keep on one layer of one prompt: the first of `selection_quality`."""
    return selection_quality(samples, weights, retriever, shares)[0]


def selection_quality(
    samples: LayerSamples, weights: jax.Array, retriever: Retriever, shares: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    """Mass that codes keep on one layer of one prompt, and their recall.

    Args:
      samples: the layer's queries and keys.
      weights: [K, D, R] float32 projections. ("exact" ignores them.)
      retriever: how codes are scored; "sign" centres the keys by their mean.
      shares: shares of the context that are selected.

    Returns:
      float64 [shares, K, M] each.
    """
    K, _, D = samples.keys.shape
    queries = samples.queries.reshape(-1, K, samples.queries.shape[1] // K, D)
    length = jnp.int32(samples.length)
    heads = [
        _head_quality(retriever, tuple(shares), queries[:, h], samples.keys[h], samples.positions, length, weights[h])
        for h in range(K)
    ]
    mass, recall = (
        np.stack([np.asarray(part, np.float64) for part in parts], axis=1) for parts in zip(*heads, strict=True)
    )
    return mass, recall
