"""How much memory a run may take, and the refusal of one that does not fit, before anything is allocated.

On a GPU three places fill up on their own: the host's memory, XLA's pool on the device, and what the pool leaves of the
device, where the engine's arenas are. XLA takes its pool when JAX starts (three quarters of the device, unless it is
told otherwise), so whether the arenas fit is decided then.
"""

import dataclasses
import os
import pathlib
from collections.abc import Mapping, MutableMapping

import jax
from jax._src import xla_bridge  # nothing public tells whether JAX has started, and starting it settles the pool

from clo_jax import _host
from clo_jax.errors import MemoryPlanError

RESERVE_BYTES = 512 << 20  # in each place, for temporaries, allocators and everybody else
POOL_SETTINGS = ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_ALLOCATOR")


@dataclasses.dataclass(frozen=True)
class Place:
    """One memory: what a run wants of it, and what there is."""

    name: str
    parts: Mapping[str, int]  # name -> bytes
    available: int
    advice: str = "Lower max_context or the number of prompts"


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU's memory now. The three sizes of the pool are None when JAX allocates without one."""

    free: int  # that nobody has taken, the pool included
    pool_limit: int | None  # what the pool may hold at most
    pool_held: int | None  # what it has taken from the device
    pool_used: int | None  # what arrays and programs occupy of it


def available_host_bytes(root: pathlib.Path = pathlib.Path("/")) -> int:
    """Bytes that this process may still take: MemAvailable, or less under a cgroup limit (v2, then v1).

    Args:
      root: where /proc and /sys are (tests give a folder of their own).
    """
    fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines() if ":" in line)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    pairs = [
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ]
    for limit_file, usage_file in pairs:
        try:
            limit, usage = ((root / name).read_text().strip() for name in (limit_file, usage_file))
        except OSError:
            continue
        if limit.isdigit():  # "max" means no limit
            available = min(available, max(int(limit) - int(usage), 0))
    return available


def device() -> Device | None:
    """The memory of the GPU that JAX runs on; None when it runs on none, or this build has no CUDA."""
    found = _host.device_bytes() if jax.default_backend() == "gpu" else None
    if found is None:
        return None
    stats = jax.local_devices()[0].memory_stats()
    if not stats or "bytes_limit" not in stats:
        return Device(found[0], None, None, None)
    limit = stats["bytes_limit"]
    return Device(found[0], limit, stats.get("pool_bytes", limit), stats["bytes_in_use"])


def grow_pool_on_demand(environment: MutableMapping[str, str] = os.environ) -> None:
    """Lets XLA take memory as it needs it, so that the engine's arenas find what it does not: for a build with CUDA,
    before JAX has started, and unless the environment says how XLA is to take memory. Else it changes nothing."""
    decided = any(name in environment for name in POOL_SETTINGS)
    if not decided and _host.build_info()["cuda"] and not xla_bridge.backends_are_initialized():
        environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"


def device_places(pool: Mapping[str, int], arenas: Mapping[str, int], found: Device) -> list[Place]:
    """What a run wants of a GPU's memory.

    Args:
      pool: name -> bytes of what JAX will allocate.
      arenas: the same of what the engine will allocate beside it.
    """
    if found.pool_limit is None:
        return [Place("device memory", {**pool, **arenas}, found.free)]
    wanted = sum(pool.values()) + RESERVE_BYTES - (found.pool_held - found.pool_used)
    growth = max(min(wanted, found.pool_limit - found.pool_held), 0)
    return [
        Place(
            "XLA's pool on the device", pool, max(found.pool_limit - found.pool_used, 0),
            f"The pool's limit is {gib(found.pool_limit)}: lower max_context or the number of prompts, or raise "
            "XLA_PYTHON_CLIENT_MEM_FRACTION before JAX starts",
        ),
        Place(
            "device memory outside of XLA's pool", {**arenas, "growth of XLA's pool": growth}, found.free,
            f"XLA's pool holds {gib(found.pool_held)}: lower max_context or the number of prompts, or, before JAX "
            "starts, set XLA_PYTHON_CLIENT_PREALLOCATE=false or lower XLA_PYTHON_CLIENT_MEM_FRACTION",
        ),
    ]  # fmt: skip


def require(*places: Place) -> None:
    """Raises MemoryPlanError unless what is wanted of each place fits there beside a reserve. The message has the
    figures of every place that falls short, and they add up. Of a place where nothing is wanted nothing is required."""
    short = [place for place in places if _need(place) and _need(place) + RESERVE_BYTES > place.available]
    if short:
        raise MemoryPlanError("not enough memory. " + ". ".join(_shortage(place) for place in short))


def _need(place: Place) -> int:
    return sum(place.parts.values())


def _shortage(place: Place) -> str:
    need = _need(place)
    listed = ", ".join(f"{name} {gib(n)}" for name, n in place.parts.items() if n)
    return (
        f"In {place.name}: need {gib(need)} ({listed}) and a reserve of {gib(RESERVE_BYTES)}, together "
        f"{gib(need + RESERVE_BYTES)}; available {gib(place.available)}. {place.advice}"
    )


def gib(n: int) -> str:
    return f"{n / 2**30:.2f} GiB"
