"""Which transfer backends this machine has, and how fast each copies: by a real copy of scattered rows."""

import dataclasses
import time

import numpy as np

from clo_jax import _host
from clo_jax.errors import CloError, TransferError
from clo_jax.transfer.choice import GPU_BACKENDS, choose_backend
from clo_jax.transfer.engine import Engine

_HEADS, _HEAD_DIM = 8, 128
# 64 MiB of rows: more than the caches hold. For a GPU four times as many, because the host's own part of a copy that it
# starts, about 100 us, would be half of the time.
_TOKENS, _TOKENS_GPU = 16384, 65536
_REPEATS = 5
_LATENCIES = 50


@dataclasses.dataclass(frozen=True)
class Backend:
    """A transfer backend on this machine."""

    name: str
    available: bool
    reason: str  # why, or why not
    gb_per_s: float | None = None  # measured by a probe copy, 1e9 bytes a second; None when there was none


@dataclasses.dataclass(frozen=True)
class Probe:
    """A measured copy."""

    gb_per_s: float  # 1e9 bytes a second, best of the repeats
    latency_us: float  # from the post of one row to its delivery, median
    threads: int
    row_bytes: int


def backends() -> tuple[Backend, ...]:
    """All backends of this version, in the order in which "auto" tries them. Each of a GPU has copied a few rows:
    the first call takes a second or two, and what it finds out is kept."""
    return tuple(Backend(*fields) for fields in _host.backends())


def report() -> list[Backend]:
    """`backends`, each available one probed by a real copy: one whose copy fails is not available, and says why."""
    return [_probed(backend) for backend in backends()]


def _probed(backend: Backend) -> Backend:
    if not backend.available:
        return backend
    try:
        return dataclasses.replace(backend, gb_per_s=probe(backend.name).gb_per_s)
    except CloError as error:
        return dataclasses.replace(backend, available=False, reason=f"its probe copy failed: {error}")


def probe(backend: str = "auto", threads: int | None = None) -> Probe:
    """Copies a random tenth of 64 MiB of 512-byte rows (256 MiB for a GPU), checks every row, and measures. Takes a
    fraction of a second, or two seconds.

    Args:
      backend: name, or "auto".
      threads: transfer threads; None for the engine's default.

    Raises:
      ValueError: an unknown or unavailable backend.
      TransferError: the copy fails or delivers wrong rows.
    """
    random = np.random.default_rng(0)
    backend = choose_backend()[0] if backend == "auto" else backend
    tokens = _TOKENS_GPU if backend in GPU_BACKENDS else _TOKENS
    rows = tokens // 10  # of each head, as a refresh moves
    with Engine([_HEADS], 1, tokens, rows, _HEAD_DIM, "bfloat16", backend, threads) as engine:
        host = engine.host_rows(0).view(np.uint16)
        host[...] = random.integers(0, 2**16, size=host.shape, dtype=np.uint16)
        slots = np.broadcast_to(np.arange(rows, dtype=np.int32), (1, _HEADS, rows))
        engine.begin(_REPEATS + _LATENCIES)
        copies = []
        for _ in range(_REPEATS):
            _stage(engine, _choose(random, tokens, rows), slots, rows)
            copies.append(_timed(engine))
        selected = engine.selected_rows(0).view(np.uint16)
        wrong = sum(
            int((selected[0, h] != host[0, h, token]).any(axis=(1, 2)).sum())
            for h, token in enumerate(engine.request(0)[1][0])
        )
        if wrong:
            raise TransferError(f"backend {engine.backend}: {wrong} of {_HEADS * rows} rows arrived wrong")
        _stage(engine, _choose(random, tokens, rows), slots, 1)
        single = [_timed(engine) for _ in range(_LATENCIES)]
        engine.end()
        row_bytes = host[0, 0, 0].nbytes
        return Probe(
            gb_per_s=_HEADS * rows * row_bytes / min(copies) / 1e9,
            latency_us=float(np.median(single)) * 1e6,
            threads=engine.threads,
            row_bytes=row_bytes,
        )


def _choose(random: np.random.Generator, tokens: int, rows: int) -> np.ndarray:
    """[1, heads, rows] int32: ascending distinct tokens for each head, as a selection gives them."""
    chosen = [np.sort(random.permutation(tokens)[:rows]) for _ in range(_HEADS)]
    return np.asarray(chosen, np.int32)[None]


def _stage(engine: Engine, tokens: np.ndarray, slots: np.ndarray, rows: int) -> None:
    """A request of `rows` rows: of every head, or of the first when it is one row."""
    counts = np.full((1, _HEADS), rows if rows > 1 else 0, np.int32)
    counts[0, 0] = rows
    engine.stage(0, counts, tokens, slots)


def _timed(engine: Engine) -> float:
    """Seconds from the post of the staged request to its delivery."""
    start = time.perf_counter()
    engine.post(0)
    engine.wait(0)
    return time.perf_counter() - start
