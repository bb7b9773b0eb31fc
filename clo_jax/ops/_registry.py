"""Registers every native FFI target once, on first import of an op."""

import functools

import jax

from clo_jax import _host


@functools.cache
def register_all() -> None:
    """Registers all targets of the native module, for the CPU and, where it is built for it, for CUDA. Idempotent."""
    for platform in ("cpu", "CUDA"):
        for name, capsule in _host.registrations(platform).items():
            jax.ffi.register_ffi_target(name, capsule, platform=platform)
