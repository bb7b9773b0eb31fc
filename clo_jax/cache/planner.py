"""From what is known of a model and a machine to a plan: thresholds, resident heads, and what to expect of them.

`none`: layer 0 resident, as without a plan. `paper`: Eq. 11-13 (`plan`). `cost`: the smallest predicted step within a
budget of device memory (`plan_cost`). Every plan comes with the same prediction, so that they can be compared.
"""

import dataclasses
from typing import Literal

import numpy as np

from clo_jax.cache.calibration_parts import Costs
from clo_jax.cache.hardware import Hardware, layer_weight_bytes, model_weight_bytes
from clo_jax.cache.layout import CacheLayout
from clo_jax.cache.plan import ResidentHeads, paper_plan, prefetchable_heads, reuse_difficulty
from clo_jax.cache.plan_cost import Prediction, StepModel, cost_plan, miss_probability, predict
from clo_jax.cache.thresholds import thresholds
from clo_jax.config import CloConfig, ModelConfig

Planner = Literal["none", "paper", "cost"]
PLANNERS = ("none", "paper", "cost")

# Rows that a refresh moves, as a share of k, by the size of the buffer (retain): measured on SmolLM2-135M at 6K tokens
# and 10 %. Stands in where a model's own share was not measured.
_NEW_ROWS = ((1.0, 0.40), (1.25, 0.32), (1.5, 0.26), (2.0, 0.20), (3.0, 0.17))
_SMALLEST_SPREAD = 1e-3  # of cosines about their mean; a reuse margin of 0 means none


@dataclasses.dataclass(frozen=True)
class Machine:
    """A machine as a plan sees it, for one model, batch and context. `source`: measured where, or which preset."""

    layer_s: float  # of one layer whose heads are all offloaded and all hit
    link_bytes_per_s: float
    device_bytes_per_s: float
    rest_s: float
    source: str


@dataclasses.dataclass(frozen=True, eq=False)
class Heads:
    """What is known of a model's KV heads, [L, K] each: `importance` in [0, 1]; `similarity`: mean cosine of adjacent
    guesses; `hit_rate` at the thresholds in use and `new_rows` of a miss, where measured."""

    importance: np.ndarray
    similarity: np.ndarray
    hit_rate: np.ndarray | None = None
    new_rows: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What a planner decided. `thresholds`, `difficulty` (Eq. 11), `miss` (probability), float64 [L, K];
    `prefetchable`: N_p of Eq. 12; bytes: of the whole cache."""

    planner: Planner
    resident: ResidentHeads
    thresholds: np.ndarray
    difficulty: np.ndarray
    miss: np.ndarray
    prefetchable: int
    device_bytes: int
    host_bytes: int
    machine: Machine
    prediction: Prediction

    @property
    def num_resident(self) -> int:
        return sum(len(heads) for _, heads in self.resident)

    def is_resident(self) -> np.ndarray:
        """bool [L, K]."""
        found = np.zeros(self.thresholds.shape, bool)
        for layer, heads in self.resident:
            found[layer, list(heads)] = True
        return found


def measured_machine(costs: Costs, backend: str, model: ModelConfig, layout: CacheLayout) -> Machine:
    """A machine from a calibration's costs.

    The layer time is that of the measured batch nearest to the layout's, interpolated over contexts and held constant
    beyond those that were measured.

    Raises:
      ValueError: the backend, or what a plan needs, was not measured.
    """
    if backend not in costs.link_bytes_per_s:
        known = ", ".join(costs.link_bytes_per_s) or "none"
        raise ValueError(f"backend: got {backend!r}, whose bandwidth was not measured, wanted one of: {known}")
    if not costs.layer_times or costs.device_bytes_per_s is None:
        raise ValueError("costs: got none of the layer time, wanted measured ones: run clo-jax calibrate CKPT --costs")
    nearest = min({b for b, _, _ in costs.layer_times}, key=lambda b: abs(np.log(b / layout.batch)))
    rows = sorted((s, t) for b, s, t in costs.layer_times if b == nearest)
    seconds = float(np.interp(layout.max_tokens, [s for s, _ in rows], [t for _, t in rows]))
    rest = model.vocab_size * model.hidden_size * layout.itemsize / costs.device_bytes_per_s
    return Machine(seconds, costs.link_bytes_per_s[backend], costs.device_bytes_per_s, rest, costs.device)


def preset_machine(hardware: Hardware, model: ModelConfig, layout: CacheLayout) -> Machine:
    """A machine from its figures: a layer takes the time to read its weights and its heads' rows, and an overhead."""
    rows = layout.batch * model.num_kv_heads * attended_bytes(layout)
    read = layer_weight_bytes(model, layout.itemsize) + rows
    head = model.vocab_size * model.hidden_size * layout.itemsize
    return Machine(
        hardware.layer_overhead_s + read / hardware.device_bytes_per_s, hardware.link_bytes_per_s,
        hardware.device_bytes_per_s, head / hardware.device_bytes_per_s, f"{hardware.name} ({hardware.source})",
    )  # fmt: skip


def free_bytes(hardware: Hardware, model: ModelConfig, itemsize: int) -> int:
    """Device memory that is left for the cache: without the weights, and a tenth for everybody else."""
    return int(hardware.device_bytes * 0.9) - model_weight_bytes(model, itemsize)


def make_plan(
    planner: Planner, model: ModelConfig, clo: CloConfig, layout: CacheLayout, heads: Heads, machine: Machine,
    budget: int | None = None,
) -> Plan:  # fmt: skip
    """Plans one model for one batch and context.

    Args:
      planner: "none", "paper" or "cost".
      clo: thresholds, sparsity, refresh, and the reuse margin: epsilon of Eq. 11, and the spread of cosines where hit
        rates were not measured. layout: as without a plan (batch, context, dtype).
      machine: `measured_machine` or `preset_machine`.
      budget: bytes of device memory for the cache; planner cost only, which needs it.

    Raises:
      ValueError: an unknown planner, shapes that are not [L, K], no budget, or one too small for layer 0.
    """
    if planner not in PLANNERS:
        raise ValueError(f"planner: got {planner!r}, wanted none, paper or cost")
    shape = (model.num_layers, model.num_kv_heads)
    for name in ("importance", "similarity", "hit_rate", "new_rows"):
        values = getattr(heads, name)
        if values is not None and np.shape(values) != shape:
            raise ValueError(f"{name}: got shape {np.shape(values)}, wanted {shape} = [L, K]")
    tau = thresholds(heads.importance, clo.sim_threshold, clo.importance_power)
    set_bytes = layout.k_max * layout.stored_row_bytes
    cover = hiding_share(model, clo, layout)
    step = dataclasses.replace(_step_model(clo, layout, heads, tau, machine, set_bytes), cover=cover)
    hidden_s = cover * machine.layer_s
    resident: ResidentHeads
    if planner == "none":
        resident = ((0, tuple(range(model.num_kv_heads))),)
    elif planner == "paper":
        resident = paper_plan(
            tau, heads.similarity, clo.reuse_margin, hidden_s, machine.link_bytes_per_s, layout.batch * set_bytes
        )
    else:
        resident = cost_plan(step, most_resident(model, clo, layout, budget))
    planned = with_resident(model, clo, layout, resident)
    return Plan(
        planner, resident, np.asarray(tau, np.float64), reuse_difficulty(tau, heads.similarity, clo.reuse_margin),
        step.miss, prefetchable_heads(hidden_s, machine.link_bytes_per_s, layout.batch * set_bytes),
        sum(planned.device_bytes().values()), planned.host_bytes(), machine, predict(step, resident),
    )  # fmt: skip


def attended_bytes(layout: CacheLayout) -> int:
    """Bytes of rows that attention reads for one sequence and offloaded head."""
    return layout.num_slots * layout.stored_row_bytes + layout.tail_rows * layout.row_bytes


def hiding_share(model: ModelConfig, clo: CloConfig, layout: CacheLayout) -> float:
    """Share of a layer's time that hides the next layer's transfers: all of it after a guess from its input; after one
    from its attention the MLP and the next projections, by the bytes that they read of those that a layer reads."""
    if clo.guess_from == "input":
        return 1.0
    weights = layer_weight_bytes(model, layout.itemsize)
    output = model.num_heads * model.head_dim * model.hidden_size * layout.itemsize
    rows = layout.batch * model.num_kv_heads * attended_bytes(layout)
    return (weights - output) / (weights + rows)


def with_resident(model: ModelConfig, clo: CloConfig, layout: CacheLayout, resident: ResidentHeads) -> CacheLayout:
    """The layout with these resident heads."""
    planned = dataclasses.replace(clo, resident_heads=resident)
    return CacheLayout.clo(model, planned, layout.batch, layout.max_tokens, layout.dtype)


def most_resident(model: ModelConfig, clo: CloConfig, layout: CacheLayout, budget: int | None) -> int:
    """Resident heads that a budget of device memory has room for.

    Raises:
      ValueError: no budget, or one that does not even hold the cache with layer 0 resident.
    """
    L, K = model.num_layers, model.num_kv_heads
    every = ((0, tuple(range(K))),)
    least = sum(with_resident(model, clo, layout, every).device_bytes().values())
    if budget is None or budget < least:
        raise ValueError(
            f"kv_budget: got {budget}, wanted at least {least} bytes: the cache with layer 0 resident, batch "
            f"{layout.batch}, {layout.max_tokens} tokens"
        )
    if L == 1:
        return K
    one_more = sum(with_resident(model, clo, layout, (*every, (1, (0,)))).device_bytes().values()) - least
    return L * K if one_more <= 0 else min(L * K, K + (budget - least) // one_more)


def _step_model(
    clo: CloConfig, layout: CacheLayout, heads: Heads, tau: np.ndarray, machine: Machine, set_bytes: int
) -> StepModel:
    flush = clo.flush_tokens if clo.refresh_on_flush else None
    if heads.hit_rate is not None:
        miss = 1 - np.asarray(heads.hit_rate, np.float64)
    else:
        miss = miss_probability(tau, heads.similarity, max(clo.reuse_margin, _SMALLEST_SPREAD), flush)
    if clo.refresh == "whole":
        new_rows = np.ones(tau.shape)
    elif heads.new_rows is not None:
        new_rows = np.asarray(heads.new_rows, np.float64)
    else:
        new_rows = np.full(tau.shape, np.interp(clo.retain, *zip(*_NEW_ROWS, strict=True)))
    more = max(layout.max_tokens * layout.row_bytes - attended_bytes(layout), 0)  # that a resident head reads
    codes = layout.max_tokens * (layout.hash_bits // 8 + 2)
    return StepModel(
        miss=np.clip(miss, 0, 1), new_rows=np.clip(new_rows, 0, 1), layer_s=machine.layer_s,
        resident_s=layout.batch * more / machine.device_bytes_per_s,
        search_s=layout.batch * codes / machine.device_bytes_per_s,
        set_s=set_bytes / machine.link_bytes_per_s, batch=layout.batch, rest_s=machine.rest_s,
    )  # fmt: skip
