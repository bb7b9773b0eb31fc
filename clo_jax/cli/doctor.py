"""`clo-jax doctor`: what is installed, what this machine can do, and what AUTO would pick."""

import dataclasses
import os
from typing import Any

from rich.table import Table

from clo_jax.cli import _console
from clo_jax.cli import _options as o
from clo_jax.versions import native_build, versions

HONOURED = (
    "CLO_JAX_GDRAPI",
    "CLO_JAX_ISA",
    "CLO_JAX_THREADS",
    "JAX_PLATFORMS",
    "JAX_COMPILATION_CACHE_DIR",
    "XLA_FLAGS",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
)


@dataclasses.dataclass(frozen=True)
class Checked:
    """A transfer backend after its probe copy."""

    name: str
    available: bool
    reason: str
    gb_per_s: float | None = None  # 1e9 bytes a second
    latency_us: float | None = None  # from the post of one row to its delivery
    threads: int | None = None


def check_backends() -> list[Checked]:
    """Every backend in the order of AUTO; a backend whose probe copy fails is not available."""
    from clo_jax.errors import TransferError
    from clo_jax.transfer.backends import backends, probe

    checked = []
    for backend in backends():
        result = Checked(backend.name, backend.available, backend.reason)
        if backend.available:
            try:
                measured = probe(backend.name)
            except TransferError as error:
                result = dataclasses.replace(result, available=False, reason=str(error))
            else:
                result = dataclasses.replace(
                    result,
                    gb_per_s=measured.gb_per_s,
                    latency_us=measured.latency_us,
                    threads=measured.threads,
                )
        checked.append(result)
    return checked


def auto_choice(backends: list[Checked]) -> tuple[str | None, str]:
    """(name, why) of the backend that AUTO takes: the first that works, in the order of preference.

    Args:
      backends: those that serve programs where JAX runs.
    """
    skipped = []
    for backend in backends:
        if backend.available:
            before = f"; before it {', '.join(skipped)}" if skipped else ""
            return backend.name, f"first in the order of preference whose probe copy succeeded{before}"
        skipped.append(f"{backend.name} ({backend.reason})")
    return None, f"none is available: {', '.join(skipped)}"


def collect() -> dict[str, Any]:
    """Everything that doctor reports, as plain values."""
    import jax

    from clo_jax import _host, memory
    from clo_jax.transfer.choice import GPU_BACKENDS

    with _console.progress("probing the transfer backends"):
        probed = check_backends()
    serving = [backend for backend in probed if jax.default_backend() == "gpu" or backend.name not in GPU_BACKENDS]
    name, why = auto_choice(serving)
    return {
        "versions": versions(),
        "native": native_build(),
        "devices": [f"{device.platform}:{device.id} {device.device_kind}" for device in jax.devices()],
        "instruction_set": _host.instruction_set(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_available_bytes": memory.available_host_bytes(),
        "backends": probed,
        "auto": {"backend": name, "why": why},
        "environment": {key: os.environ[key] for key in HONOURED if key in os.environ},
    }


def doctor(
    json: o.Json = False,
    quiet: o.Quiet = False,
    no_progress: o.NoProgress = False,
    debug: o.Debug = False,
) -> None:
    """Show versions, devices, transfer backends with a measured probe copy, and what AUTO picks."""
    facts = collect()
    if json:
        _console.print_json(facts)
    else:
        print_report(facts)
    if facts["auto"]["backend"] is None:
        raise RuntimeError(f"no transfer backend: {facts['auto']['why']}")


def print_report(facts: dict[str, Any]) -> None:
    """The facts as text on stdout."""
    for name, version in facts["versions"].items():
        print(f"{name:<17} {version}")
    native = facts["native"]
    print(
        f"{'native part':<17} {native['build_type']}, {native['compiler']}, headers of jaxlib {native['jaxlib']}, ",
        end="",
    )
    print("with CUDA" if native["cuda"] else "without CUDA")
    print(f"{'instruction set':<17} {facts['instruction_set']}")
    print(f"{'devices':<17} {', '.join(facts['devices'])}")
    print(f"{'cpus':<17} {facts['cpus']}")
    print(f"{'memory available':<17} {_console.human_bytes(facts['memory_available_bytes'])}")
    for key, value in facts["environment"].items():
        print(f"{'environment':<17} {key}={value}")
    table = Table(title="transfer backends", title_justify="left")
    for column in ("backend", "available", "probe copy", "one row", "threads", "reason"):
        table.add_column(column, justify="right" if column in ("probe copy", "one row", "threads") else "left")
    for backend in facts["backends"]:
        measured = ("-", "-", "-")
        if backend.gb_per_s is not None:
            measured = (f"{backend.gb_per_s:.1f} GB/s", f"{backend.latency_us:.0f} us", str(backend.threads))
        table.add_row(backend.name, "yes" if backend.available else "no", *measured, backend.reason)
    _console.stdout().print(table)
    print(f"AUTO takes {facts['auto']['backend']}: {facts['auto']['why']}")
