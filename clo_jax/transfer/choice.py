"""What "auto" stands for: the transfer backend, and how many threads it has."""

import os

import jax

from clo_jax import _host

GPU_BACKENDS = ("pull", "bar", "staged")  # in the order in which "auto" tries them


def default_threads(backend: str = "host") -> int:
    """Transfer threads when none are asked for: half of the cores that this process may use, at most 4, or 8 where they
    feed a GPU."""
    return max(1, min(4 if backend == "host" else 8, len(os.sched_getaffinity(0)) // 2))


def choose_backend() -> tuple[str, tuple[tuple[str, str], ...]]:
    """What "auto" stands for here: the first backend that works, of those that serve programs where JAX runs them. And
    (name, why not) of each before it."""
    skipped = []
    elsewhere = _host.build_info()["cuda"] and jax.default_backend() != "gpu"
    for name in GPU_BACKENDS:
        available, reason = (False, f"JAX runs on {jax.default_backend()}") if elsewhere else _host.find_backend(name)
        if available:
            return name, tuple(skipped)
        skipped.append((name, reason))
    return "host", tuple(skipped)
