"""Rows that cross to the device in pieces: those that it caches stay where they are, the others come, however many.

A callback's results have a fixed size, and all of it crosses. Results with room for the most that a step can ask for
would be empty for the most part. So the answer brings a small piece along, and larger ones follow while rows are left:
what crosses is what was asked for, and less than a piece more. Each row comes with the two places that it goes to, in
the buffer that attention reads and in the device's cache; either may be none.
"""

import jax
import jax.numpy as jnp
import numpy as np

from clo_jax.policies.geometry import RivalLayout
from clo_jax.policies.host_rows import HostRows, call

FIRST_BYTES = 2 << 20  # of the piece that comes with the answer: crosses in about the time that one more callback takes
MORE_BYTES = 8 << 20  # of each further one


def piece_rows(row_bytes: int, most: int) -> tuple[int, int]:
    """Rows of the first piece and of each further one, where an access sends at most `most` rows."""
    first, more = (max(min(size // row_bytes, most), 1) for size in (FIRST_BYTES, MORE_BYTES))
    return first, more


class CachedRows(HostRows):
    """Rows in host memory of which the device caches some. Methods that answer an access return, last, what `_send`
    does."""

    def __init__(self, layout: RivalLayout, buffer: int, cached: int, most: int) -> None:
        """buffer: rows of the buffer of a head, cached: rows of its device cache, most: rows of all heads that one
        access may send."""
        super().__init__(layout)
        heads = layout.batch * layout.num_kv_heads
        self._ends = (heads * buffer, heads * cached)  # places from here on are none
        # The same memory for all steps: the next one asks when the device has what was sent to the last one.
        self._pieces = [
            np.zeros((n, 2, layout.head_dim), jnp.dtype(layout.dtype)) for n in piece_rows(layout.row_bytes, most)
        ]
        self._left: tuple[np.ndarray, ...] = ()

    def on_more(self, layer: int) -> tuple[np.ndarray, ...]:
        """The next piece: as `_send`."""
        return self._piece(layer, self._pieces[1])

    def _send(self, layer: int, row: np.ndarray, buffer: np.ndarray, cache: np.ndarray) -> tuple[np.ndarray, ...]:
        """Sends rows, numbers [n] among all of a layer's in the order [B, K, S], to places in [B, K, E] and in the
        cache's [B, K, P]; -1: nowhere. No place is there twice.

        Returns how many are left after the first piece, int32 [1]; its rows [m, 2, D]; their places, int32 [m] in the
        buffer and in the cache, all different, beyond the end for nowhere.
        """
        self._left = (row, buffer, cache)
        return self._piece(layer, self._pieces[0])

    def _piece(self, layer: int, piece: np.ndarray) -> tuple[np.ndarray, ...]:
        m = len(piece)
        row, *places = (x[:m] for x in self._left)
        self._left = tuple(x[m:] for x in self._left)
        n = len(row)
        self.gather(layer, row, piece[:n])
        found = [np.arange(end, end + m, dtype=np.int32) for end in self._ends]
        for to, at in zip(found, places, strict=True):
            np.copyto(to[:n], at, casting="same_kind", where=at >= 0)
        return np.array([len(self._left[0])], np.int32), piece, *found


def access(
    handle: int, method: str, token: jax.Array, layer, cache: jax.Array, buffer: int, most: int, *operands: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Fills a buffer with rows from the device's cache and from the host, and the cache with what enters it.

    Args:
      handle, method: of a CachedRows; the method returns where in the cache each row of the buffer is, int32 [B, K, E],
        -1: nowhere, and what `_send` does. What the buffer takes from the cache must not be replaced there.
      token: uint32 [1], orders the callbacks. layer: a number or an int32 [1].
      cache: [B, K, P, 2, D].
      buffer: E. most: rows of all heads that one access may send (both static).

    Returns:
      the token; the buffer [B, K, E, 2, D], zeros in rows that nothing belongs to; the cache.
    """
    B, K, P, *tail = cache.shape
    first, more = piece_rows(cache.dtype.itemsize * tail[0] * tail[1], most)

    def piece(n: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        places = jax.ShapeDtypeStruct((n,), jnp.int32)
        return jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((n, *tail), cache.dtype), places, places

    def put(all: jax.Array, at: jax.Array, rows: jax.Array) -> jax.Array:
        return all.at[at].set(rows, mode="drop", unique_indices=True)

    results = (jax.ShapeDtypeStruct((B, K, buffer), jnp.int32), *piece(first))
    token, source, left, rows, at, cached_at = call(handle, method, results, token, layer, *operands)
    filled = jnp.zeros((B, K, buffer, *tail), cache.dtype)
    if P:
        there = jnp.take_along_axis(cache, jnp.maximum(source, 0)[..., None, None], axis=2, mode="clip")
        filled = jnp.where(source[..., None, None] >= 0, there, filled)

    def one_more(carry):
        token, _, *whole = carry
        token, left, rows, *places = call(handle, "more", piece(more), token, layer)
        return token, left, *(put(all, at, rows) for all, at in zip(whole, places, strict=True))

    carry = (token, left, put(filled.reshape(-1, *tail), at, rows), cache.reshape(-1, *tail))
    token, _, filled, cache = jax.lax.while_loop(lambda carry: carry[1][0] > 0, one_more, carry)
    # Into the cache the first piece comes last: what is written has then been read, or XLA would copy the cache.
    cache = put(cache, cached_at, rows)
    return token, filled.reshape(B, K, buffer, *tail), cache.reshape(B, K, P, *tail)
