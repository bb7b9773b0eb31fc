"""The plan of a running model: its calibration and the machine, for the batch at hand, to resident heads."""

import dataclasses
from typing import Any

import jax
import numpy as np

from clo_jax.cache.calibration import Calibration
from clo_jax.cache.calibration_parts import Costs, Similarity
from clo_jax.cache.layout import CacheLayout
from clo_jax.cache.planner import PLANNERS, Heads, Plan, Planner, make_plan, measured_machine
from clo_jax.config import CloConfig, ModelConfig
from clo_jax.transfer.backends import backends

_SHARE = 0.8  # of the device memory that is free, for the cache; the rest is for a step's temporaries


@dataclasses.dataclass(frozen=True, eq=False)
class Planning:
    """What plans are made with. `budget`: bytes of device memory for the cache (planner cost); None: most of what the
    device has free."""

    planner: Planner
    calibration: Calibration | None
    backend: str
    budget: int | None = None

    def __post_init__(self) -> None:
        if self.planner not in PLANNERS:
            raise ValueError(f"planner: got {self.planner!r}, wanted none, paper or cost")
        if self.budget is not None and self.planner != "cost":
            raise ValueError(f"kv_budget: got {self.budget} with planner {self.planner}, wanted planner cost")

    def plan(self, model: ModelConfig, clo: CloConfig, layout: CacheLayout, importance: np.ndarray) -> Plan:
        """The plan for a layout without a plan.

        Args:
          importance: of KV heads, [L, K].

        Raises:
          ValueError: the calibration lacks what a plan needs, or resident heads are given as well.
        """
        if clo.resident_heads is not None:
            raise ValueError(f"planner: got {self.planner!r} together with resident_heads, wanted one of them")
        found = self.calibration
        for name, flag in (("similarity", "--similarity"), ("costs", "--costs")):
            if found is None or getattr(found, name) is None:
                raise ValueError(
                    f"planner: got {self.planner!r} without measured {name}, wanted a calibration that has them: "
                    f"clo-jax calibrate CKPT {flag}"
                )
        machine = measured_machine(found.costs, backend_of(self.backend, found.costs), model, layout)
        budget = self.budget
        if self.planner == "cost" and budget is None:
            budget = free_device_bytes()
        heads = measured_heads(importance, found.similarity, clo)
        return make_plan(self.planner, model, clo, layout, heads, machine, budget)


def measured_heads(importance: np.ndarray, similarity: Similarity, clo: CloConfig) -> Heads:
    """Heads with the figures that were measured under the settings in use; the others are predicted."""

    def same(*names: str) -> bool:
        return all(similarity.settings.get(name) == getattr(clo, name) for name in names)

    hits = same("sim_threshold", "importance_power", "refresh_on_flush")
    return Heads(
        importance, similarity.adjacent, similarity.hit_rate if hits else None,
        similarity.new_rows if same("refresh", "retain", "sparsity") else None,
    )  # fmt: skip


def backend_of(backend: str, costs: Costs) -> str:
    """The backend whose bandwidth counts: the one that is named, or what "auto" takes of those that were measured."""
    if backend != "auto" or jax.default_backend() == "cpu":
        return "host" if backend == "auto" else backend
    names = [found.name for found in backends() if found.available and found.name in costs.link_bytes_per_s]
    return next((name for name in names if name != "host"), "host")


def free_device_bytes() -> int | None:
    """Bytes of the default device's memory that a cache may take; None where the device has no memory of its own."""
    stats: dict[str, Any] | None = jax.devices()[0].memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return int(_SHARE * (stats["bytes_limit"] - stats["bytes_in_use"]))
