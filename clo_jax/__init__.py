"""Long-context decoding in JAX with the KV cache in host memory (CLO: CPU-light KV cache offloading).

with clo_jax.LLM.load("my-model") as llm:
    print(llm.generate("Hello", max_new_tokens=20)[0].text)
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clo_jax.config import CloConfig
    from clo_jax.errors import CheckpointError, CloError, MemoryPlanError, TransferError
    from clo_jax.llm import LLM
    from clo_jax.results import Delta, Generation, Metrics
    from clo_jax.rivals import ExactConfig, InfiniGenConfig, PQCacheConfig, RetroInferConfig

__version__ = "0.1.0"
__all__ = [
    "LLM", "CheckpointError", "CloConfig", "CloError", "Delta", "ExactConfig", "Generation", "InfiniGenConfig",
    "MemoryPlanError", "Metrics", "PQCacheConfig", "RetroInferConfig", "TransferError",
]  # fmt: skip

_HOME = {
    "LLM": "llm", "CloConfig": "config", "Generation": "results", "Delta": "results", "Metrics": "results",
    "CloError": "errors", "CheckpointError": "errors", "TransferError": "errors", "MemoryPlanError": "errors",
    "ExactConfig": "rivals", "InfiniGenConfig": "rivals", "PQCacheConfig": "rivals",
    "RetroInferConfig": "rivals",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """The public names, each imported when it is first used: `clo-jax --help` must not wait for JAX."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"clo_jax.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
