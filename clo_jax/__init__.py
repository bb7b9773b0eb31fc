"""Long-context decoding in JAX with the KV cache offloaded to host memory (CLO: CPU-light KV cache offloading)."""

import importlib
from typing import Any

__version__ = "0.1.0"

# Public name -> the module it lives in. Imported on first use, so that `import clo_jax` costs nothing.
_HOMES = {
    "LLM": "clo_jax.llm",
    "CloConfig": "clo_jax.config",
    "Generation": "clo_jax.results",
    "Delta": "clo_jax.results",
    "Metrics": "clo_jax.results",
    "CloError": "clo_jax.errors",
    "CheckpointError": "clo_jax.errors",
    "TransferError": "clo_jax.errors",
    "MemoryPlanError": "clo_jax.errors",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'clo_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
