"""`clo-jax doctor`: what is installed, what this machine can do, and what AUTO would pick."""

import os
from typing import Any

from rich.table import Table

from clo_jax.cli import _console
from clo_jax.cli import _options as o
from clo_jax.versions import native_build, versions

HONOURED = (
    "CLO_JAX_ISA",
    "CLO_JAX_THREADS",
    "JAX_PLATFORMS",
    "JAX_COMPILATION_CACHE_DIR",
    "XLA_FLAGS",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
)


def auto_choice(backends: list[Any]) -> tuple[str | None, str]:
    """(name, why) of the backend that AUTO takes: the first that works, in the order of preference."""
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
    from clo_jax.transfer import backends

    with _console.progress("probing the transfer backends"):
        probed = backends.report()
    name, why = auto_choice(probed)
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
    for column in ("backend", "available", "probe copy", "reason"):
        table.add_column(column, justify="right" if column == "probe copy" else "left")
    for backend in facts["backends"]:
        speed = "-" if backend.gb_per_s is None else f"{backend.gb_per_s:.1f} GB/s"
        table.add_row(backend.name, "yes" if backend.available else "no", speed, backend.reason)
    _console.stdout().print(table)
    print(f"AUTO takes {facts['auto']['backend']}: {facts['auto']['why']}")
