"""What the benches of policies have in common: policies by context length and batch, what they are called, which of
them fit, what they keep where."""

import dataclasses
import resource
from collections.abc import Mapping
from typing import Any

from clo_jax.bench.subject import Subject
from clo_jax.cache.layout import CacheLayout
from clo_jax.errors import MemoryPlanError
from clo_jax.eval.variants import Variant
from clo_jax.policies.geometry import RivalLayout

ON_DEVICE = " on the device"


def on_device(variant: Variant) -> Variant:
    """CLO with the same selection, but its rows stay on the device."""
    return dataclasses.replace(
        variant, name=variant.name + ON_DEVICE, load={**variant.load, "kv_offload": False}
    )  # fmt: skip


def require_sizes(subject: Subject, contexts: tuple[int, ...], batches: tuple[int, ...]) -> None:
    """Raises ValueError for lengths or batches that are none, or that the model does not allow."""
    limit = subject.model.max_position_embeddings
    for option, values, least, most in (("--lengths", contexts, 2, limit), ("--batches", batches, 1, None)):
        if not values:
            raise ValueError(f"{option}: got none, wanted at least one")
        for value in values:
            if value < least or (most is not None and value > most):
                wanted = f"at least {least}" if most is None else f"{least} to {most}, the limit of {subject.name}"
                raise ValueError(f"{option}: got {value}, wanted {wanted}")


def title(name: str, context: int, batch: int) -> str:
    """What a figure is called."""
    return f"{name}, {context} tokens" + (f", batch {batch}" if batch > 1 else "")


def policy(row: Mapping[str, Any]) -> str:
    """Whose figure a row of a results file is: the name that `title` was given, settings that are varied included."""
    return row["name"].partition(f", {row['context']} tokens")[0]


def why_it_does_not_fit(error: Exception) -> str:
    """What a run says that does not fit the memory; raises any other error."""
    if not isinstance(error, MemoryPlanError) and "RESOURCE_EXHAUSTED" not in str(error):
        raise error
    return " ".join(str(error).split())


def kept_bytes(layout: CacheLayout | RivalLayout, way: Variant) -> tuple[dict[str, int], int]:
    """Bytes on the device by part, and in host memory. Rows that are not offloaded are read where they are."""
    parts, host = layout.device_bytes(), layout.host_bytes()
    if way.load.get("kv_offload", True):
        return parts, host
    return {name: size for name, size in parts.items() if name != "selected rows"} | {"rows not offloaded": host}, 0


def processor_seconds() -> float:
    """User and system time of this process, all its threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
