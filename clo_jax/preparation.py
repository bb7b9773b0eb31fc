"""What answers the prompts of a model: layout, policy, tables and engine for one batch size."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from clo_jax import memory
from clo_jax.cache.calibration import Calibration
from clo_jax.cache.layout import ENGINE_PARTS, CacheLayout
from clo_jax.cache.planner import with_resident
from clo_jax.config import Attention, CloConfig, ModelConfig
from clo_jax.generate import bucket_length
from clo_jax.planning import PlanOptions, Plans
from clo_jax.policies.base import Policy, Tables
from clo_jax.policies.clo import CloPolicy, HeadScores, given_scores, measured_scores, neutral_scores
from clo_jax.policies.full import FullPolicy
from clo_jax.policies.geometry import RivalLayout
from clo_jax.policies.host_rows import HostRows
from clo_jax.policies.registry import rival_layout, rival_policy
from clo_jax.policies.tracking import HeadStatistics
from clo_jax.rivals import RivalConfig
from clo_jax.transfer.engine import Engine


@dataclasses.dataclass(frozen=True)
class Settings:
    """What `LLM.load` was told of the cache; documented there."""

    attention: Attention
    clo: CloConfig
    rival: RivalConfig | None
    max_context: int
    dtype: str
    kv_offload: bool
    backend: str
    transfer_threads: int | None
    timeout_s: float
    head_scores: Any
    calibration: Calibration | None
    plan: PlanOptions
    pinning: Callable[[int, int], None] | None


class Preparation:
    """Policy, tables and engine, made for the batch at hand and kept until another one comes. Close it."""

    def __init__(self, config: ModelConfig, settings: Settings) -> None:
        """Raises ValueError for settings that do not fit the model."""
        self._config, self._settings = config, settings
        self.plans: Plans | None = None
        self.engine: Engine | HostRows | None = None
        self._ready: tuple[Policy, tuple[Tables, ...]] | None = None
        layout = self.layout(1)
        if settings.attention == "clo":
            self.scores(layout)

    def close(self) -> None:
        """Frees the engine. Idempotent."""
        if self.engine is not None:
            self.engine.close()
        self.engine = self._ready = None

    def layout(self, batch: int) -> CacheLayout | RivalLayout:
        """Which heads of how many tokens are where."""
        settings = self._settings
        if settings.attention == "full":
            return CacheLayout.full(self._config, batch, settings.max_context, settings.dtype)
        if settings.rival is not None:
            return rival_layout(self._config, settings.rival, batch, settings.max_context, settings.dtype)
        layout = CacheLayout.clo(self._config, settings.clo, batch, settings.max_context, settings.dtype)
        if settings.plan.planner == "none":
            return layout
        if self.plans is None:
            scores = self.scores(layout)
            self.plans = Plans(
                settings.plan, self._config, settings.clo, scores.kv_heads, scores.source, settings.calibration,
                settings.backend,
            )  # fmt: skip
        return with_resident(self._config, settings.clo, layout, self.plans.plan(batch, layout).resident)

    def scores(self, layout: CacheLayout) -> HeadScores:
        """Importance of the heads, and where it comes from."""
        settings = self._settings
        if settings.head_scores is not None:
            return given_scores(layout, settings.head_scores)
        importance = settings.calibration.importance if settings.calibration else None
        return measured_scores(layout, importance) if importance else neutral_scores(layout)

    def policy(self, layout: CacheLayout, engine: int) -> CloPolicy:
        """The CLO policy over an engine's handle; 0 to describe it only."""
        clo, calibration, plan = self._settings.clo, self._settings.calibration, self._settings.plan
        hashed = calibration.hash_of(clo.retriever, clo.hash_bits) if calibration else None
        revision = self.plans.revision(layout.batch) if plan.adapt else None
        return CloPolicy(layout, clo, engine, self.scores(layout), hashed, plan.planner, plan.adapt, revision)

    def prepare(self, batch: int, longest: int) -> tuple[Policy, tuple[Tables, ...]]:
        """Policy and tables for a batch size; the engine of another layout is closed first.

        Raises:
          MemoryPlanError: what is not allocated yet does not fit, `longest` tokens of prefill included.
        """
        settings, layout = self._settings, self.layout(batch)
        ready = self._ready is not None and self._ready[0].layout == layout
        if self.engine is not None and not ready:
            self.close()
        self._require_memory(layout, longest, ready)
        if ready:
            return self._ready
        policy: Policy
        if settings.attention == "full":
            policy = FullPolicy(layout)
        elif settings.rival is not None:
            policy, self.engine = rival_policy(layout, settings.rival)
        else:
            self.engine = Engine(
                kv_heads=[len(layout.offloaded(layer)) for layer in range(layout.num_layers)],
                batch=batch, max_tokens=layout.max_tokens, num_slots=layout.num_slots, head_dim=layout.head_dim,
                dtype=jnp.dtype(settings.dtype), backend=settings.backend, threads=settings.transfer_threads,
                kv_offload=settings.kv_offload, timeout_s=settings.timeout_s, progress=settings.pinning,
                kv_dtype=layout.kv_dtype,
            )  # fmt: skip
            policy = self.policy(layout, self.engine.handle)
        self._ready = (policy, policy.tables())
        return self._ready

    def _require_memory(self, layout: CacheLayout | RivalLayout, longest: int, engine_is_there: bool) -> None:
        """Raises MemoryPlanError unless everything that a call will allocate fits where it will be."""
        config = self._config
        values = 3 * config.hidden_size + (4 * config.num_heads + 4 * config.num_kv_heads) * layout.head_dim
        tokens = layout.batch * bucket_length(longest, self._settings.max_context)
        pool = {name: n for name, n in layout.device_bytes().items() if name not in ENGINE_PARTS}
        pool["prefill"] = tokens * values * layout.itemsize
        arenas = {name: n for name, n in layout.device_bytes().items() if name in ENGINE_PARTS}
        rows = {"host rows": layout.host_bytes()}
        if engine_is_there:
            arenas = rows = {}
        available, device = memory.available_host_bytes(), memory.device()
        if device is None:
            memory.require(memory.Place("host memory", pool | arenas | rows, available))
        elif self._settings.kv_offload:
            memory.require(*memory.device_places(pool, arenas, device), memory.Place("host memory", rows, available))
        else:
            memory.require(*memory.device_places(pool, arenas | rows, device))

    def observe(self, statistics: HeadStatistics | None) -> None:
        """Lets the plans follow what a request showed."""
        if self.plans is not None and statistics is not None:
            self.plans.observe(statistics)

    def describe(self) -> dict[str, Any]:
        """What is attended and where it is, for one sequence."""
        settings, layout = self._settings, self.layout(1)
        rival = {} if settings.rival is None else {"settings": dataclasses.asdict(settings.rival)}
        clo = {} if settings.attention != "clo" else {
            "retriever": self.policy(layout, 0).retriever_name,
            "hash_bits": layout.hash_bits,
            "kv_dtype": layout.kv_dtype,
            "head_scores": self.scores(layout).source,
            "calibration": str(settings.calibration.path) if settings.calibration else None,
            "planner": settings.plan.planner,
            "resident_heads": [[layer, list(heads)] for layer, heads in enumerate(layout.resident) if heads],
            "costs_measured_on": settings.calibration.costs.device if self.plans else None,
        }  # fmt: skip
        return {
            "attention": settings.attention,
            "max_context": settings.max_context,
            "device_kv_bytes_per_sequence": sum(layout.device_bytes().values()),
            "host_kv_bytes_per_sequence": layout.host_bytes(),
        } | (rival or clo)
