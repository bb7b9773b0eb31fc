"""RetroInfer's index: segmented spherical k-means over the keys of one head, and what stands for each cluster.

Keys are centred first. Within segments of consecutive tokens, which are clustered on their own, centroids are unit
vectors and a key belongs to the one with the largest product. The last iteration assigns every key to the best of all
centroids and leaves the means of the clusters as they are.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from clo_jax.policies import kmeans

CHUNK = 2048  # keys that meet all centroids at a time


class Clusters(NamedTuple):
    """An index of N tokens with room for C clusters. Of a cluster that is not used the size is 0."""

    centroids: jax.Array  # [C, D] float32: mean key
    sizes: jax.Array  # [C] float32: tokens
    values: jax.Array  # [C, D] float32: sum of values
    labels: jax.Array  # [N] int32: cluster of each token, -1: in none


def num_clusters(count, per_cluster: int, xp=jnp):
    """Clusters of `count` tokens (int32): one in `per_cluster`, rounded, at least one where there are tokens. `xp`: jnp
    or, outside of programs, np."""
    return xp.where(count > 0, xp.maximum((count + per_cluster // 2) // per_cluster, 1), 0)


def cluster(
    rows: jax.Array, first: jax.Array, count: jax.Array, room: int, per_cluster: int, segment: int, iterations: int
) -> Clusters:
    """Clusters the tokens [first, first + count) of one head.

    Args:
      rows: [N, 2, D]: K and V.
      first, count: int32.
      room: C, at least `num_clusters` of any count (static, like what follows).
      segment: tokens of a segment, about.
      iterations: of k-means, the last one over all segments included.
    """
    N = rows.shape[0]
    keys, values = rows[:, 0].astype(jnp.float32), rows[:, 1].astype(jnp.float32)
    token = jnp.arange(N, dtype=jnp.int32)
    valid = (token >= first) & (token < first + count)
    mean = jnp.where(valid[:, None], keys, 0.0).sum(axis=0) / jnp.maximum(count, 1).astype(jnp.float32)
    points = keys - mean[None]
    live = num_clusters(count, per_cluster)
    centroids = _in_segments(points, first, count, live, room, per_cluster, segment, iterations - 1)
    used = jnp.arange(room, dtype=jnp.int32) < live

    # The last iteration, a chunk of tokens at a time: all products at once would be too many.
    chunk = min(CHUNK, N)
    padding = -N % chunk

    def assign(total, piece):
        key, value, member = piece
        label = jnp.where(member, best(key, centroids, used), -1)
        found, size = kmeans.sums(jnp.concatenate([key, value], axis=1), label, member, room)
        return (total[0] + found, total[1] + size), label

    pieces = tuple(
        jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1)).reshape(-1, chunk, *x.shape[1:])
        for x in (points, values, valid)
    )
    empty = (jnp.zeros((room, 2 * keys.shape[1]), jnp.float32), jnp.zeros((room,), jnp.float32))
    (total, sizes), labels = jax.lax.scan(assign, empty, pieces)
    key_sum, value_sum = jnp.split(total, 2, axis=1)
    centroids = key_sum / jnp.maximum(sizes, 1.0)[:, None] + mean[None]
    return Clusters(centroids, sizes, value_sum, labels.reshape(-1)[:N])


def best(points: jax.Array, centroids: jax.Array, used: jax.Array) -> jax.Array:
    """The used centroid with the largest product, the first of several: [N, D], [C, D], [C] bool -> int32 [N]."""
    dot = jnp.matmul(points, centroids.T, precision="highest")
    return jnp.argmax(jnp.where(used[None], dot, -jnp.inf), axis=1).astype(jnp.int32)


def unit(x: jax.Array) -> jax.Array:
    """Rows of x as unit vectors; a row of zeros stays."""
    return x / jnp.maximum(jnp.linalg.norm(x, axis=1, keepdims=True), 1e-20)


def work_bytes(tokens: int, head_dim: int, room: int, per_cluster: int, segment: int) -> int:
    """Bytes that `cluster` needs for its work, about: float32 rows, and products of tokens with centroids."""
    length, some = _longest(tokens, per_cluster, segment)
    return 4 * (4 * tokens * head_dim + 3 * max(length * some, min(CHUNK, tokens) * room))


def _longest(tokens: int, per_cluster: int, segment: int) -> tuple[int, int]:
    """Tokens of the longest segment, and the most clusters that one has."""
    length = min(tokens, segment + segment // 2)
    return length, length // per_cluster + 2


def _in_segments(points, first, count, live, room, per_cluster, segment, iterations) -> jax.Array:
    """Unit centroids [room, D] of each segment on its own, those of one segment after those of the other."""
    N = points.shape[0]
    most = max(1, (N + segment // 2) // segment)
    length, some = _longest(N, per_cluster, segment)
    number = jnp.clip((count + segment // 2) // segment, 1, most)

    def one(s):
        begin, end = s * count // number, jnp.minimum(s + 1, number) * count // number
        begin_slot, end_slot = s * live // number, jnp.minimum(s + 1, number) * live // number
        part = jnp.take(points, first + begin + jnp.arange(length, dtype=jnp.int32), axis=0, mode="clip")
        n = jnp.maximum(end - begin, 0)
        own = jnp.maximum(end_slot - begin_slot, 0)
        member = jnp.arange(length, dtype=jnp.int32) < n
        place = jnp.arange(some, dtype=jnp.int32)
        start = jnp.take(part, place * n // jnp.maximum(own, 1), axis=0, mode="clip")

        def step(_, centroids):
            total, size = kmeans.sums(part, best(part, centroids, place < own), member, some)
            return jnp.where(size[:, None] > 0, unit(total), centroids)

        return jax.lax.fori_loop(0, iterations, step, unit(start)), jnp.where(place < own, begin_slot + place, room)

    centroids, slots = jax.lax.map(one, jnp.arange(most, dtype=jnp.int32))
    empty = jnp.zeros((room, points.shape[1]), jnp.float32)
    return empty.at[slots.reshape(-1)].set(centroids.reshape(-1, points.shape[1]), mode="drop")
