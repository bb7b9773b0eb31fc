"""k-means in plain JAX, for the indexes of rival policies. Functions of one set of points; `over_sets` takes many.

Deterministic: centroids start at evenly spaced points. A centroid that no point is nearest to stays where it is.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

WORK_BYTES = 1 << 30  # that may be needed on a GPU for sets at the same time


def over_sets(make: Callable[..., Any], sets: tuple[jax.Array, ...], each: int, at_once: int | None = None) -> Any:
    """`make` of every set, the arrays of `sets` and of the results beginning with an axis over them.

    each: bytes that it needs for one set. at_once: how many sets at the same time (static); None: on a CPU, where one
    fills the cores, one; on a GPU, where one set's operations are too small to, as many as `WORK_BYTES` allow.
    """
    number = sets[0].shape[0]
    if at_once is None:
        at_once = 1 if jax.default_backend() == "cpu" else WORK_BYTES // each
    # The fewest rounds, of about the same size.
    rounds = -(-number // max(min(at_once, number), 1))
    batch = -(-number // rounds)
    return jax.lax.map(lambda s: make(*s), sets, batch_size=batch if batch > 1 else None)


def spaced(points: jax.Array, start: jax.Array, count: jax.Array, number: int) -> jax.Array:
    """`number` evenly spaced ones of the points [start, start + count): points [N, d] -> [number, d]."""
    index = start + jnp.arange(number, dtype=jnp.int32) * count // number
    return jnp.take(points, index, axis=0, mode="clip")


def nearest(points: jax.Array, centroids: jax.Array) -> jax.Array:
    """The centroid at the least Euclidean distance, the first of several: [N, d], [C, d] -> int32 [N]."""
    dot = jnp.matmul(points, centroids.T, precision="highest")
    return jnp.argmin(jnp.sum(centroids * centroids, axis=1)[None] - 2 * dot, axis=1).astype(jnp.int32)


def sums(points: jax.Array, label: jax.Array, valid: jax.Array, number: int) -> tuple[jax.Array, jax.Array]:
    """Sum and count of the valid points of each label: [N, d], [N], [N] bool -> [number, d], float32 [number]."""
    member = jax.nn.one_hot(jnp.where(valid, label, -1), number, dtype=jnp.float32, axis=0)
    return jnp.matmul(member, points, precision="highest"), member.sum(axis=1)


def lloyd(points: jax.Array, start: jax.Array, count: jax.Array, number: int, iterations: int) -> jax.Array:
    """Euclidean k-means over the points [start, start + count).

    points [N, d] float32; start, count int32; number C and iterations are static. Returns centroids [C, d].
    """
    token = jnp.arange(points.shape[0], dtype=jnp.int32)
    valid = (token >= start) & (token < start + count)

    def step(_, centroids):
        total, size = sums(points, nearest(points, centroids), valid, number)
        return jnp.where(size[:, None] > 0, total / jnp.maximum(size, 1.0)[:, None], centroids)

    return jax.lax.fori_loop(0, iterations, step, spaced(points, start, count, number))
