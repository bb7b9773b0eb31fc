"""The plans of a running model: its calibration and the machine, for the batch at hand, to resident heads."""

import dataclasses
from typing import Any

import jax
import numpy as np

from clo_jax.adaptation import Revision, Seen, revised
from clo_jax.cache.calibration import Calibration
from clo_jax.cache.calibration_parts import Costs, Similarity
from clo_jax.cache.layout import CacheLayout
from clo_jax.cache.planner import PLANNERS, Heads, Plan, Planner, make_plan, measured_machine
from clo_jax.config import CloConfig, ModelConfig
from clo_jax.policies.tracking import HeadStatistics
from clo_jax.transfer.backends import backends

_SHARE = 0.8  # of the device memory that is free, for the cache; the rest is for a step's temporaries


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """How a model is planned. `budget`: bytes of device memory for the cache (planner cost); None: most of what the
    device has free. `adapt`: plans follow what requests show."""

    planner: Planner = "none"
    budget: int | None = None
    adapt: bool = False

    def __post_init__(self) -> None:
        if self.planner not in PLANNERS:
            raise ValueError(f"planner: got {self.planner!r}, wanted none, paper or cost")
        if self.budget is not None and self.planner != "cost":
            raise ValueError(f"kv_budget: got {self.budget} with planner {self.planner}, wanted planner cost")
        if self.adapt and self.planner == "none":
            raise ValueError("adapt: got True with planner none, wanted planner paper or cost")


class Plans:
    """One plan for each batch size of a model; with `adapt` they are revised between requests."""

    def __init__(
        self, options: PlanOptions, model: ModelConfig, clo: CloConfig, importance: np.ndarray, scores_source: str,
        calibration: Calibration | None, backend: str,
    ) -> None:  # fmt: skip
        """Args:
          importance: of KV heads, [L, K]; scores_source: where it comes from. backend: as for the engine.

        Raises:
          ValueError: the calibration lacks what a plan needs, or resident heads are given as well.
        """
        planner = options.planner
        if clo.resident_heads is not None:
            raise ValueError(f"planner: got {planner!r} together with resident_heads, wanted one of them")
        for name, flag in (("similarity", "--similarity"), ("costs", "--costs")):
            if calibration is None or getattr(calibration, name) is None:
                raise ValueError(
                    f"planner: got {planner!r} without measured {name}, wanted a calibration that has them: "
                    f"clo-jax calibrate CKPT {flag}"
                )
        self.options, self._model, self._clo = options, model, clo
        self._heads = measured_heads(importance, scores_source, calibration.similarity, clo)
        self._seen = Seen(self._heads)
        self._costs, self._backend = calibration.costs, backend_of(backend, calibration.costs)
        # Asked once: later the caches themselves take from what is free.
        self._budget = free_device_bytes() if planner == "cost" and options.budget is None else options.budget
        self._made: dict[int, tuple[CacheLayout, Plan, Heads, Revision]] = {}

    def plan(self, batch: int, layout: CacheLayout) -> Plan:
        """The plan for a batch size, whose layout without a plan is given.

        Raises:
          ValueError: the backend's bandwidth was not measured, or the budget is too small.
        """
        if batch not in self._made:
            heads = self._seen.heads(self._heads)
            self._made[batch] = (layout, self._make(layout, heads), heads, Revision())
        return self._made[batch][1]

    def revision(self, batch: int) -> Revision:
        """How the plan for a batch size came to be."""
        return self._made[batch][3]

    def observe(self, found: HeadStatistics) -> None:
        """Takes what a request showed, and revises the plans that it speaks against."""
        self._seen.add(found)
        heads = self._seen.heads(self._heads)
        for batch, (layout, plan, made_with, revision) in self._made.items():
            other = revised(plan, self._make(layout, heads), revision, made_with.similarity, heads.similarity)
            if other is not None:
                self._made[batch] = (layout, other[0], heads, other[1])

    def _make(self, layout: CacheLayout, heads: Heads) -> Plan:
        machine = measured_machine(self._costs, self._backend, self._model, layout)
        return make_plan(self.options.planner, self._model, self._clo, layout, heads, machine, self._budget)


def measured_heads(importance: np.ndarray, scores_source: str, similarity: Similarity, clo: CloConfig) -> Heads:
    """Heads with the figures that were measured under the settings and head scores in use; the others are predicted."""
    settings = similarity.settings.get("clo", {})

    def same(*names: str) -> bool:
        return all(name in settings and settings[name] == getattr(clo, name) for name in names)

    hits = same("sim_threshold", "importance_power", "refresh_on_flush", "guess_from") and (
        similarity.settings.get("head_scores") == scores_source
    )
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
