"""Versions of everything that shapes a result, and how the native part was built."""

import importlib.metadata
import platform
from typing import Any

PACKAGES = ("jax", "jaxlib", "flax", "orbax-checkpoint")


def versions() -> dict[str, str]:
    """Name -> version of clo-jax, python and the packages that clo-jax computes with, in that order."""
    found = {"clo-jax": importlib.metadata.version("clo-jax"), "python": platform.python_version()}
    return found | {name: importlib.metadata.version(name) for name in PACKAGES}


def native_build() -> dict[str, Any]:
    """How the native module was built: jaxlib (of the headers), compiler, build_type, cuda (bool)."""
    from clo_jax import _host

    return dict(_host.build_info())
