"""How much memory a run may take, and the refusal of one that does not fit, before anything is allocated."""

import pathlib

from clo_jax.errors import MemoryPlanError

RESERVE_BYTES = 512 << 20  # for XLA's temporaries, the allocator and everybody else


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


def require(parts: dict[str, int], available: int) -> None:
    """Raises MemoryPlanError unless the parts and the reserve fit; the message's figures add up.

    Args:
      parts: name -> bytes.
      available: bytes, as `available_host_bytes` gives them.
    """
    need = sum(parts.values())
    if need + RESERVE_BYTES <= available:
        return
    listed = ", ".join(f"{name} {gib(n)}" for name, n in parts.items() if n)
    raise MemoryPlanError(
        f"not enough memory: need {gib(need)} ({listed}) and a reserve of {gib(RESERVE_BYTES)}, together "
        f"{gib(need + RESERVE_BYTES)}; available {gib(available)}. Lower max_context or the number of prompts"
    )


def gib(n: int) -> str:
    return f"{n / 2**30:.2f} GiB"
