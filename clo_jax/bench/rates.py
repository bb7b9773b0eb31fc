"""Controls that every run measures beside its own figures: how fast memory is read and how fast a plain copy goes."""

import time
from collections.abc import Callable

import jax
import numpy as np

from clo_jax.bench import report
from clo_jax.calibrate.costs import memory_bytes_per_s

_REPEATS = 5
_READ_BYTES_GPU = 4 << 30  # so that the launch is nothing beside it
_COPY_BYTES = 256 << 20


def memory_rate() -> float:
    """Bytes a second that the default device reads of its memory."""
    return memory_bytes_per_s(_READ_BYTES_GPU) if jax.default_backend() == "gpu" else memory_bytes_per_s()


def link_name() -> str:
    """What `link_rate` copies."""
    gpu = jax.default_backend() == "gpu"
    return "contiguous copy, pinned host memory to the device" if gpu else "contiguous copy inside host memory"


def link_rate(size: int = _COPY_BYTES) -> float:
    """Bytes a second of a contiguous copy of `size` bytes to where transfers go: from pinned host memory to a GPU, or,
    on a CPU, to another place in host memory."""
    source = np.ones(size, np.uint8)
    if jax.default_backend() != "gpu":
        target = np.zeros_like(source)
        return size / _best(lambda: np.copyto(target, source))
    device = jax.devices()[0]
    to_host, to_device = (
        jax.sharding.SingleDeviceSharding(device, memory_kind=kind) for kind in ("pinned_host", "device")
    )
    pinned = jax.block_until_ready(jax.device_put(source, to_host))
    return size / _best(lambda: jax.block_until_ready(jax.device_put(pinned, to_device)))


def _best(once: Callable[[], object]) -> float:
    """Seconds of the shortest of some calls, after one that does not count."""
    seconds = []
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        once()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def rows(memory: float, link: float) -> list[report.Row]:
    """Both rates, bytes a second, as figures."""
    return [report.Row("memory read rate", memory / 1e9, "GB/s"), report.Row(link_name(), link / 1e9, "GB/s")]
