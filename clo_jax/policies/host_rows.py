"""Rows in host memory under the CPU's management: what the rival systems do, and what CLO is there to avoid.

A program reaches the rows through callbacks: XLA stops where the callback stands, copies its operands to the host,
waits for Python, and copies the results back. So every access is a synchronisation with the host, and the CPU gathers
rows into a staging buffer before they are copied as a whole. The callbacks of a program are ordered by the `token` that
each takes and returns.

Three things are not as in a tuned system, and make times worse than theirs (what is counted is right either way): host
memory is pageable; Python answers, and gathers with NumPy on a few threads; and a callback's results have a fixed size,
all of which crosses the link. A policy that asks for as many rows at every step loses nothing by the last; one with a
cache on the device gets what it lacks in pieces (`policies.staging`), each of which costs one more callback. On a CPU
there is no link; the copies are the same.
"""

import concurrent.futures
import contextlib
import functools
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from clo_jax.policies.geometry import RivalLayout
from clo_jax.transfer.counters import Counters

THREADS = min(os.cpu_count() or 1, 4)  # that copy rows, the caller's included
PART_BYTES = 1 << 20  # what a thread of its own pays off for

_numbers = itertools.count(1)
_keepers: "weakref.WeakValueDictionary[int, HostRows]" = weakref.WeakValueDictionary()


@functools.cache
def _pool() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(max(THREADS - 1, 1), "rows")


def threads_for(nbytes: int) -> int:
    """Threads that copying so many bytes pays off for."""
    return min(max(nbytes // PART_BYTES, 1), THREADS)


def spread(do: Callable[[int], None], number: int, threads: int) -> None:
    """do(0) to do(number - 1) on `threads` threads, the caller's among them."""

    def some(first: int) -> None:
        for i in range(first, number, threads):
            do(i)

    jobs = [_pool().submit(some, first) for first in range(1, threads)]
    some(0)
    for job in jobs:
        job.result()


class HostRows:
    """Rows [B, K, S, 2, D] of each layer that is the policy's own. Serves one session at a time, in the place that the
    transfer engine has for CLO.

    Methods named `on_...` run inside callbacks, on NumPy arrays; `call` is how a traced function asks for them.
    """

    backend = "callback"

    def __init__(self, layout: RivalLayout) -> None:
        self.layout = layout
        shape = (layout.batch, layout.num_kv_heads, layout.max_tokens, 2, layout.head_dim)
        # Zeroed pages cost nothing until they are written.
        self._rows = [
            np.zeros(shape if layout.offloaded(layer) else (0,), jnp.dtype(layout.dtype))
            for layer in range(layout.num_layers)
        ]
        self._asked: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # by layer: index and count of the last step
        self._staging = np.zeros(0, jnp.dtype(layout.dtype))
        self._lock = threading.Lock()
        self.handle = next(_numbers)
        _keepers[self.handle] = self
        self.clear_counters()

    # --- what a session does with an engine ----------------------------------------

    def counters(self) -> Counters:
        """Counts since `clear_counters`. Hits and misses are rows that were, or were not, in a cache on the device."""
        with self._lock:
            return Counters(**self._counts)

    def clear_counters(self) -> None:
        with self._lock:
            self._counts = dict.fromkeys(Counters.__dataclass_fields__, 0)

    def reset(self) -> None:
        """Before and after a session. The rows stay; every prompt overwrites what it needs."""

    def drain(self) -> None:
        """Waits for what is under way: nothing, outside a program."""

    def serving(self, requests: int, program: Any) -> contextlib.AbstractContextManager:
        """Around one run of a program: there is nothing to launch."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Frees the rows. A program that still asks for them fails."""
        _keepers.pop(self.handle, None)
        self._rows = []

    def selected(self, layer: int) -> list[list[np.ndarray]]:
        """Numbers of the rows that the last step of a layer asked for, by [B][K]. They are tokens, unless the rows are
        a pool that new tokens take places of. ValueError before the first step."""
        index, count = self._last(layer)
        return [[row[:n] for row in heads] for heads, n in zip(index, count, strict=True)]

    def _last(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        if layer not in self._asked:
            raise ValueError(f"layer: got {layer}, which has asked for no rows yet")
        return self._asked[layer]

    # --- callbacks ----------------------------------------

    def on_offload(self, layer: int, rows: np.ndarray, lengths: np.ndarray) -> tuple[()]:
        """Takes the rows of prompts: rows [B, K, N, 2, D], lengths [B]."""
        K = self.layout.num_kv_heads

        def take(each: int) -> None:
            b, head = divmod(each, K)
            self._rows[layer][b, head, : lengths[b]] = rows[b, head, : lengths[b]]

        spread(take, len(lengths) * K, threads_for(rows.nbytes))
        self._offloaded(int(lengths.sum()) * K)
        return ()

    def on_fetch(
        self, layer: int, index: np.ndarray, count: np.ndarray, slot: np.ndarray, new: np.ndarray
    ) -> tuple[np.ndarray]:
        """Takes a new row of each head, then gathers rows.

        index [B, K, n] int32: rows to gather, of which the first count[b] are wanted; slot [B, K] int32: where the new
        rows [B, K, 2, D] belong, -1: nowhere. Returns [B, K, n, 2, D], zeros beyond the count.
        """
        self.append(layer, slot, new)
        self.remember(layer, index, count)
        B, K, n = index.shape
        staging = self._held((B, K, n, 2, self.layout.head_dim))
        first = np.arange(B * K).reshape(B, K, 1) * self.layout.max_tokens
        self.gather(layer, (first + index).ravel(), staging.reshape(B * K * n, 2, -1))
        for b in range(B):
            staging[b, :, count[b] :] = 0
        rows = int(count.sum()) * K
        self.count(rows_selected=rows, rows_posted=rows, moved=rows)
        return (staging,)

    def gather(self, layer: int, row: np.ndarray, out: np.ndarray) -> None:
        """Copies rows, numbers [n] among all of a layer's in the order [B, K, S], to `out` [n, 2, D]; on several
        threads where they are many."""
        store = self._rows[layer].reshape(-1, *out.shape[1:])
        parts = threads_for(out.nbytes)
        ends = [len(row) * i // parts for i in range(parts + 1)]

        def part(i: int) -> None:
            here = slice(ends[i], ends[i + 1])
            np.take(store, row[here], axis=0, out=out[here], mode="clip")

        spread(part, parts, parts)

    def _held(self, shape: tuple[int, ...]) -> np.ndarray:
        """Memory for the rows that a step fetches, the same at every step and layer: fresh memory costs more than the
        rows. When a program asks again, it has what it was sent."""
        if self._staging.shape != shape:
            self._staging = np.zeros(shape, jnp.dtype(self.layout.dtype))
        return self._staging

    def append(self, layer: int, slot: np.ndarray, new: np.ndarray) -> None:
        """Writes new rows [B, K, 2, D] at slots [B, K]; -1: nowhere."""
        b, head = np.nonzero(slot >= 0)
        self._rows[layer][b, head, slot[b, head]] = new[b, head]
        self._offloaded(len(b))

    def remember(self, layer: int, index: np.ndarray, count: np.ndarray) -> None:
        """Keeps what a step asks for. Copies: the operands of a callback are XLA's memory."""
        self._asked[layer] = (index.copy(), count.copy())

    # --- counting ----------------------------------------

    def count(self, moved: int = 0, **more: int) -> None:
        """Adds to the counters; `moved` rows also as bytes, and as a request when there are any."""
        more |= {"rows_moved": moved, "bytes_moved": moved * self.layout.row_bytes, "requests": int(moved > 0)}
        with self._lock:
            for name, n in more.items():
                self._counts[name] += n

    def _offloaded(self, rows: int) -> None:
        self.count(rows_offloaded=rows, bytes_offloaded=rows * self.layout.row_bytes)


def call(handle: int, method: str, results, token: jax.Array, layer, *operands: jax.Array):
    """A callback of the rows behind `handle`, inside a traced function.

    Args:
      method: "fetch" calls `on_fetch`.
      results: shapes and dtypes of what it returns, a sequence.
      token: uint32 [1], orders the callbacks.
      layer: a number or an int32 [1].

    Returns:
      the token, and what the method returns.

    Raises:
      jax.errors.JaxRuntimeError: at run time, when the rows are gone or the method fails.
    """
    shapes = [jax.ShapeDtypeStruct(token.shape, token.dtype), *results]
    which = jnp.full((1,), layer, jnp.int32) if isinstance(layer, int) else layer
    return tuple(io_callback(functools.partial(_answer, handle, method), shapes, token, which, *operands))


def _answer(handle: int, method: str, token, layer, *operands):
    keeper = _keepers.get(handle)
    if keeper is None:
        raise RuntimeError(f"host rows {handle} are closed")
    start = time.perf_counter_ns()
    arrays = [np.asarray(x) for x in operands]
    found = getattr(keeper, f"on_{method}")(int(np.asarray(layer)[0]), *arrays)
    keeper.count(wait_ns=time.perf_counter_ns() - start)
    return [np.asarray(token) + np.uint32(1), *found]
