"""Time of a decode layer: matrix products, prefetch for the next layer, attention of this one.

A program of many steps over a few such layers (`clo_jax.bench.layer_program`), every KV head offloaded. Random weights
say nothing about hits, so the program is told which heads miss, and how far queries turn: until the wanted share of
the rows of a refreshed set is new, which is measured and stands beside each figure. Transfers run beside the program
and, for comparison, in its own stream. Controls in the same run: the same layer when every head hits, its matrix
products alone, and a contiguous copy over the link.
"""

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from clo_jax import models
from clo_jax.bench import dense_attention, rates, replay, report
from clo_jax.bench.layer_program import Plan, State, fill, jitted_steps
from clo_jax.bench.subject import random_params
from clo_jax.cache.layout import CacheLayout
from clo_jax.config import CloConfig, ModelConfig
from clo_jax.policies.clo import CloPolicy, neutral_scores
from clo_jax.transfer.engine import Engine

PERIOD = 64  # rows of the table of misses; as many steps in a program make every run of it the same
TUNING_RUNS = 8


@dataclasses.dataclass(frozen=True)
class Case:
    """Which heads miss, how much of their sets is new, and what the layer's time is compared with."""

    name: str
    missed: float  # share of head lookups
    new: float | None  # share of the rows of a refreshed set; None: whole sets move
    goal: str | None
    evenly: bool = False  # as many misses in every layer; else as many in every step, in layers at random


CASES = (
    Case("every head hits", 0.0, 0.0, None),
    Case("21 % of heads miss, 26 % of their rows are new", 0.21, 0.26, "<= 1.10"),
    Case("21 % of heads miss, evenly, 26 % of their rows are new", 0.21, 0.26, "<= 1.10", evenly=True),
    Case("every head misses, 19 % of their rows are new", 1.0, 0.19, "<= 1.30"),
    Case("21 % of heads miss, their whole sets move", 0.21, None, "<= 1.10"),
    Case("21 % of heads miss, evenly, their whole sets move", 0.21, None, "<= 1.10", evenly=True),
    Case("every head misses, whole sets move", 1.0, None, "<= 1.10"),
)


@dataclasses.dataclass(frozen=True)
class Timing:
    """One case, transfers in one place."""

    microseconds: list[float]  # of a layer, one for each repeat
    missed: float
    new: float
    layer_bytes: float  # that a layer moves on average
    refreshed: tuple[float, ...]  # share of layers in which 0, 1, ... heads miss


class Bench:
    """Model, cache and engine of one shape, filled once. Close it."""

    def __init__(
        self, model: ModelConfig, clo: CloConfig, context: int, steps: int, dtype: str,
        note: Callable[[str], None] = lambda what: None, **engine,
    ) -> None:  # fmt: skip
        """note: called with what was just measured. engine: further arguments of `Engine`."""
        self.model, self.steps, self.context, self.note = model, steps, context, note
        L, H, D, K = model.num_layers, model.num_heads, model.head_dim, model.num_kv_heads
        clo = dataclasses.replace(clo, resident_heads=(), refresh_on_flush=False)
        layout = CacheLayout.clo(model, clo, 1, context + steps + 1, dtype)
        self.engine = Engine(
            kv_heads=[K] * L, batch=1, max_tokens=layout.max_tokens, num_slots=layout.num_slots, head_dim=D,
            dtype=jnp.dtype(dtype), kv_dtype=layout.kv_dtype, **engine,
        )  # fmt: skip
        self.delta = CloPolicy(layout, clo, self.engine.handle, neutral_scores(layout))
        self.whole = dataclasses.replace(
            self.delta, layout=dataclasses.replace(layout, retain=1.0),
            config=dataclasses.replace(clo, refresh="whole", retain=1.0),
        )  # fmt: skip
        self.tables = self.delta.tables()
        keys = jax.random.split(jax.random.key(0), 4)
        self.params = models.for_decoding(random_params(model, dtype))
        self.x0 = jax.random.normal(keys[1], (1, 1, model.hidden_size), jnp.dtype(dtype))
        self.planes = jax.random.normal(keys[2], (L, 2, H, D), jnp.float32)
        self.nothing = jnp.zeros((), jnp.dtype(dtype))
        layers, shared = fill(self.delta, self.tables, keys[3], self.planes, context)
        self.state = State(jnp.zeros_like(self.x0), layers, shared, jnp.int32(0))

    def close(self) -> None:
        self.engine.close()

    def plan(self, case: Case, angle: float) -> Plan:
        """The misses of a case, as many in every layer or in every step as its share allows."""
        L, K = self.model.num_layers, self.model.num_kv_heads
        size = K if case.evenly else L * K
        table = replay.spread(np.random.default_rng(0), PERIOD * L * K // size, size, case.missed)
        return Plan(jnp.asarray(table.reshape(PERIOD, L, K)), jnp.float32(angle), self.planes, self.nothing)

    def run(self, policy: CloPolicy | None, plan: Plan, beside: bool) -> float:
        """Seconds of one program. Transfers are in line in its first run, which compiles it."""
        requests = self.steps * self.model.num_layers
        serving = self.engine.serving(requests, policy) if beside else contextlib.nullcontext()
        start = time.perf_counter()
        with serving:
            self.state = jitted_steps(
                self.model, policy, self.context, self.steps, self.params, self.tables, plan, self.x0, self.state
            )
            jax.block_until_ready(self.state)
        seconds = time.perf_counter() - start
        self.engine.end()
        return seconds

    def shares(self) -> tuple[float, float]:
        """Missed lookups and new rows since the counters were cleared."""
        counted = self.engine.counters()
        return (
            counted.misses / max(counted.hits + counted.misses, 1),
            counted.rows_posted / max(counted.rows_selected, 1),
        )

    def tuned(self, case: Case) -> Plan:
        """The plan whose queries turn far enough for the wanted share of new rows, by bisection."""
        if not case.new:
            return self.plan(case, 0.1)
        low, high = 0.0, math.pi / 4
        for _ in range(TUNING_RUNS):
            angle = (low + high) / 2
            self.run(self.delta, self.plan(case, angle), beside=False)
            self.engine.clear_counters()
            self.run(self.delta, self.plan(case, angle), beside=False)
            low, high = (angle, high) if self.shares()[1] < case.new else (low, angle)
        return self.plan(case, angle)

    def time(self, cases: Sequence[tuple[Case, Plan]], repeats: int) -> dict[tuple[str, bool], Timing]:
        """Every case, beside (True) and in line (False), by turns; before each timed run one that settles its sets."""
        L, timings = self.model.num_layers, {}
        for policy in (self.delta, self.whole):
            self.run(policy, cases[0][1], beside=True)
        for _ in range(repeats):
            for case, plan in cases:
                policy = self.whole if case.new is None else self.delta
                for beside in (True, False):
                    self.run(policy, plan, beside)
                    self.engine.clear_counters()
                    seconds = self.run(policy, plan, beside)
                    missed, new = self.shares()
                    moved = self.engine.counters().bytes_moved / (self.steps * L)
                    timing = timings.setdefault((case.name, beside), Timing([], missed, new, moved, refreshed(plan)))
                    timing.microseconds.append(seconds / (self.steps * L) * 1e6)
                    self.note(f"{case.name}, beside {beside}: {timing.microseconds[-1]:.1f} us")
        return timings

    def products(self, repeats: int) -> list[float]:
        """Microseconds of a layer's matrix products alone."""
        plan = self.plan(CASES[0], 0.0)
        seconds = [self.run(None, plan, beside=False) for _ in range(repeats + 1)][1:]
        return [s / (self.steps * self.model.num_layers) * 1e6 for s in seconds]


@contextlib.contextmanager
def bench(*args, **kwargs) -> Iterator[Bench]:
    made = Bench(*args, **kwargs)
    try:
        yield made
    finally:
        made.close()


def refreshed(plan: Plan) -> tuple[float, ...]:
    """Share of layers in which 0, 1, ... heads miss."""
    heads = np.asarray(plan.misses).sum(axis=2).ravel()
    return tuple((np.bincount(heads, minlength=plan.misses.shape[2] + 1) / heads.size).tolist())


def bound(timing: Timing, hit: float, link: float) -> float:
    """Microseconds of a layer when each takes what the link needs for its own rows, or what a layer takes that moves
    nothing, if that is longer. Requests are one layer ahead, so that a layer that moves little cannot lend its time to
    one that moves much."""
    head = timing.layer_bytes / sum(n * share for n, share in enumerate(timing.refreshed)) / link * 1e6
    return sum(share * max(n * head, hit) for n, share in enumerate(timing.refreshed))


def rows(
    timings: dict[tuple[str, bool], Timing], products: list[float], link: float, goals: bool = True
) -> list[report.Row]:
    """The figures, with the goals of a GPU where `goals` says so. A layer that moves whole sets is compared with what
    the link needs for them where that is longer."""
    found = [
        report.Row("layer, matrix products alone", statistics.median(products), "us", more=spread(products)),
        report.Row(rates.link_name(), link / 1e9, "GB/s"),
    ]
    hits = {beside: statistics.median(timings[CASES[0].name, beside].microseconds) for beside in (True, False)}
    for case in CASES:
        for beside in (True, False):
            timing = timings[case.name, beside]
            median = statistics.median(timing.microseconds)
            carried = timing.layer_bytes / link * 1e6
            more = spread(timing.microseconds) | {
                "missed": timing.missed, "new": timing.new, "bytes_a_layer": timing.layer_bytes,
                "us_of_the_link": carried, "layers_by_refreshed_heads": timing.refreshed,
                "us_without_matrix_products": median - statistics.median(products),
            }  # fmt: skip
            name = f"layer, {case.name}, transfers {'beside the program' if beside else 'in line'}"
            control_name, control = CASES[0].name, hits[beside]
            if case.new is None:
                control_name, control = (
                    "each layer the larger of that and its bytes / link rate",
                    bound(timing, control, link),
                )
            goal = case.goal if beside and goals else None
            with_control = case.goal is not None
            found.append(
                report.Row(
                    name, median, "us", control_name if with_control else None, control if with_control else None,
                    goal, more,
                )
            )  # fmt: skip
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"repeats": len(values), "min": min(values), "max": max(values)}


def measure(
    model: ModelConfig, clo: CloConfig, context: int, steps: int, repeats: int, dtype: str, backend: str,
    note: Callable[[str], None] = lambda what: None,
) -> list[report.Row]:  # fmt: skip
    """All figures. The comparison of dense attention is a GPU's: its rivals have no other form.

    Args:
      model: its layers are what is run; it may have a small vocabulary.
      context: tokens in the cache. steps: of one program. backend: of the transfers.
      note: called with what was just done.

    Raises:
      ValueError: a context that the model has no room for, or without room for a tail.
    """
    most, least = model.max_position_embeddings - steps - 1, clo.sink_tokens + clo.recent_tokens + clo.flush_tokens
    for name, value, low, high in (("--steps", steps, 1, most), ("--repeats", repeats, 1, None),
                                   ("--context", context, least, most)):  # fmt: skip
        if value < low or (high is not None and value > high):
            wanted = f"at least {low}" if high is None else f"{low} to {high}"
            raise ValueError(f"{name}: got {value}, wanted {wanted}")
    started = time.perf_counter()

    def timed(what: str) -> None:
        note(f"{time.perf_counter() - started:6.1f} s  {what}")

    link, dense = rates.link_rate(), []
    if jax.default_backend() == "gpu":
        dense = dense_attention.rows(context, model.num_heads, model.num_kv_heads, model.head_dim)
        timed("dense attention is measured")
    with bench(model, clo, context, steps, dtype, timed, backend=backend) as measured:
        timed("caches are filled")
        products = measured.products(repeats)
        timed("matrix products are measured")
        cases = [(case, measured.tuned(case)) for case in CASES]
        timed("queries are tuned")
        return rows(measured.time(cases, repeats), products, link, jax.default_backend() == "gpu") + dense
