"""Time of a decode layer of Llama-3-8B's shape: matrix products, prefetch for the next layer, attention of this one.

    python -m clo_jax.bench.layer [--context 131072] [--layers 8] [--out FILE.json]

A program of many steps over a few such layers (`clo_jax.bench.layer_program`), every KV head offloaded. Random weights
say nothing about hits, so the program is told which heads miss, and how far queries turn: until the wanted share of
the rows of a refreshed set is new, which is measured and stands beside each figure. Transfers run beside the program
and, for comparison, in its own stream. Controls in the same run: the same layer when every head hits, its matrix
products alone, and a contiguous copy over the link.
"""

import argparse
import contextlib
import dataclasses
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from clo_jax import models
from clo_jax.bench import dense_attention, report
from clo_jax.bench.layer_program import Plan, State, fill, jitted_steps
from clo_jax.cache.layout import CacheLayout
from clo_jax.config import CloConfig, ModelConfig, RopeConfig
from clo_jax.policies.clo import CloPolicy, neutral_scores
from clo_jax.transfer.engine import Engine

PERIOD = 64  # rows of the table of misses; as many steps in a program make every run of it the same
TUNING_RUNS = 8


def llama_3_8b(layers: int) -> ModelConfig:
    """Llama-3-8B with fewer layers and next to no vocabulary."""
    return ModelConfig("llama", 256, 4096, 14336, layers, 32, 8, 128, 1e-5, 2**20, RopeConfig(500000.0))


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

    def __init__(self, model: ModelConfig, clo: CloConfig, context: int, steps: int, dtype: str, **engine) -> None:
        self.model, self.steps, self.context = model, steps, context
        L, H, D, K = model.num_layers, model.num_heads, model.head_dim, model.num_kv_heads
        clo = dataclasses.replace(clo, resident_heads=(), refresh_on_flush=False)
        layout = CacheLayout.clo(model, clo, 1, context + steps + 1, dtype)
        self.engine = Engine(
            kv_heads=[K] * L, batch=1, max_tokens=layout.max_tokens, num_slots=layout.num_slots, head_dim=D,
            dtype=jnp.dtype(dtype), **engine,
        )  # fmt: skip
        self.delta = CloPolicy(layout, clo, self.engine.handle, neutral_scores(layout))
        self.whole = dataclasses.replace(
            self.delta, layout=dataclasses.replace(layout, retain=1.0),
            config=dataclasses.replace(clo, refresh="whole", retain=1.0),
        )  # fmt: skip
        self.tables = self.delta.tables()
        keys = jax.random.split(jax.random.key(0), 4)
        self.params = models.random_params(model, keys[0], jnp.dtype(dtype))
        self.x0 = jax.random.normal(keys[1], (1, 1, model.hidden_size), jnp.dtype(dtype))
        self.planes = jax.random.normal(keys[2], (L, 2, H, D), jnp.float32)
        self.nothing = jnp.zeros((), jnp.dtype(dtype))
        layers, shared = fill(self.delta, self.tables, keys[3], self.planes, context)
        self.state = State(jnp.zeros_like(self.x0), layers, shared, jnp.int32(0))

    def close(self) -> None:
        self.engine.close()

    def plan(self, case: Case, angle: float) -> Plan:
        """The misses of a case, as many in every layer or in every step as its share allows."""
        shape = (PERIOD, self.model.num_layers, self.model.num_kv_heads)
        random, table = np.random.default_rng(0), np.zeros(shape, bool)
        for i, line in enumerate(table.reshape(-1, shape[2] if case.evenly else shape[1] * shape[2])):
            count = math.floor((i + 1) * case.missed * line.size) - math.floor(i * case.missed * line.size)
            line[random.permutation(line.size)[:count]] = True
        return Plan(jnp.asarray(table), jnp.float32(angle), self.planes, self.nothing)

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
                    print(f"{case.name}, beside {beside}: {timing}", file=sys.stderr, flush=True)
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


def link_rate(megabytes: int = 256, repeats: int = 5) -> float:
    """Bytes a second of a contiguous copy from pinned host memory to the device; 0 where JAX has no such memory."""
    device = jax.devices()[0]
    if not any(memory.kind == "pinned_host" for memory in device.addressable_memories()):
        return 0.0
    to_host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    to_device = jax.sharding.SingleDeviceSharding(device, memory_kind="device")
    data = jax.block_until_ready(jax.device_put(np.zeros(megabytes << 20, np.uint8), to_host))
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        jax.block_until_ready(jax.device_put(data, to_device))
        seconds.append(time.perf_counter() - start)
    return data.nbytes / min(seconds[1:])


def rows(timings: dict[tuple[str, bool], Timing], products: list[float], link: float) -> list[report.Row]:
    """The figures. A layer that moves whole sets is compared with what the link needs for them where that is longer."""
    found = [
        report.Row("layer, matrix products alone", statistics.median(products), "us", more=spread(products)),
        report.Row("contiguous copy, pinned host memory to the device", link / 1e9, "GB/s"),
    ]
    hits = {beside: statistics.median(timings[CASES[0].name, beside].microseconds) for beside in (True, False)}
    for case in CASES:
        for beside in (True, False):
            timing = timings[case.name, beside]
            median = statistics.median(timing.microseconds)
            carried = timing.layer_bytes / link * 1e6 if link else 0.0
            more = spread(timing.microseconds) | {
                "missed": timing.missed, "new": timing.new, "bytes_a_layer": timing.layer_bytes,
                "us_of_the_link": carried, "layers_by_refreshed_heads": timing.refreshed,
                "us_without_matrix_products": median - statistics.median(products),
            }  # fmt: skip
            name = f"layer, {case.name}, transfers {'beside the program' if beside else 'in line'}"
            control_name, control = CASES[0].name, hits[beside]
            if case.new is None and link:
                control_name, control = (
                    "each layer the larger of that and its bytes / link rate",
                    bound(timing, control, link),
                )
            goal = case.goal if beside else None
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


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="One decode layer with forced misses, on a GPU.")
    parser.add_argument("--context", type=int, default=131072)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=64, help="decode steps of one program")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--retriever", default="sign")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--out", type=pathlib.Path, default=report.RESULTS / "h200-layer.json")
    args = parser.parse_args(argv)
    if jax.default_backend() != "gpu":
        raise SystemExit("layer: JAX runs on " + jax.default_backend())
    started = time.perf_counter()

    def note(what: str) -> None:
        print(f"{time.perf_counter() - started:6.1f} s  {what}", file=sys.stderr, flush=True)

    link = link_rate()
    dense = dense_attention.rows(args.context)
    note("dense attention is measured")
    clo = CloConfig(sparsity=0.1, retain=1.5, retriever=args.retriever)
    with bench(llama_3_8b(args.layers), clo, args.context, args.steps, "bfloat16", backend=args.backend) as measured:
        note("caches are filled")
        products = measured.products(args.repeats)
        note("matrix products are measured")
        cases = [(case, measured.tuned(case)) for case in CASES]
        note("queries are tuned")
        timings = measured.time(cases, args.repeats)
        note("layers are measured")
    settings = vars(args) | {"out": args.out.name}
    content = report.write(args.out, "layer", settings, rows(timings, products, link) + dense)
    print(report.markdown(content))


if __name__ == "__main__":
    main()
