"""Decode steps of the policies by context length and batch, through the same sessions that answer prompts.

A cache is filled by a prefill or with random rows; steps run in chunks, each one program. Every run has its controls:
the step of the same model without attention ("weights only"), full attention, and CLO with the same selection and its
rows on the device. Two chunks go before those that are timed: the first compiles, the second is the first one with
transfers beside it.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from clo_jax import _host
from clo_jax.bench import replay
from clo_jax.bench.filled import BenchSession, WeightsOnlyPolicy
from clo_jax.bench.subject import Subject
from clo_jax.bench.ways import (
    ON_DEVICE,
    kept_bytes,
    on_device,
    processor_seconds,
    require_sizes,
    title,
    why_it_does_not_fit,
)  # fmt: skip
from clo_jax.cache.layout import CacheLayout
from clo_jax.errors import MemoryPlanError
from clo_jax.eval.variants import Variant
from clo_jax.policies.base import Policy, Tables
from clo_jax.policies.clo import CloPolicy
from clo_jax.policies.host_rows import HostRows
from clo_jax.prompts import Request
from clo_jax.transfer.counters import Counters
from clo_jax.transfer.engine import Engine

WARM_CHUNKS = 2
TUNING_ROUNDS = 6  # of two chunks each: one that settles, one that is looked at
LONGEST_TURN = math.pi / 4
WEIGHTS_ONLY = "weights only"
FILLS = ("synthetic", "prefill")


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What is measured. `contexts`: tokens of prompt and answer together. `steps`: timed ones, a multiple of `chunk`.
    `pattern`: the hits of CLO; None: as the model makes them. `only`: at these batches, the names of the ways to be
    measured; at others all are."""

    subject: Subject
    variants: tuple[Variant, ...]  # full attention first
    contexts: tuple[int, ...]
    batches: tuple[int, ...] = (1,)
    steps: int = 128
    chunk: int = 16
    fill: str = "synthetic"
    pattern: replay.Pattern | None = None
    only: Mapping[int, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ValueError: what is out of range; contexts that the model or the steps do not allow."""
        require_sizes(self.subject, self.contexts, self.batches)
        if self.chunk < 1:
            raise ValueError(f"--chunk: got {self.chunk}, wanted a positive integer")
        if self.steps < 1 or self.steps % self.chunk:
            raise ValueError(f"--steps: got {self.steps}, wanted a positive multiple of --chunk = {self.chunk}")
        if self.fill not in FILLS:
            raise ValueError(f"--fill: got {self.fill!r}, wanted {' or '.join(FILLS)}")
        if self.contexts[0] < 2 * self.decoded:
            raise ValueError(
                f"--lengths: got {self.contexts[0]}, wanted at least {2 * self.decoded}: {self.decoded} tokens are "
                "decoded"
            )

    @property
    def decoded(self) -> int:
        """Tokens that a run decodes, those before the timed ones included."""
        tuning = 2 * TUNING_ROUNDS if self.pattern is not None else 0
        return 1 + self.chunk * (WARM_CHUNKS + tuning) + self.steps

    @property
    def ways(self) -> tuple[Variant, ...]:
        """The variants; after each of CLO's the same one with its rows on the device."""
        found = []
        for variant in self.variants:
            found.append(variant)
            if variant.attention == "clo":
                found.append(on_device(variant))
        return tuple(found)

    def ways_at(self, batch: int) -> tuple[Variant, ...]:
        """Those of `ways` that are measured at a batch."""
        return tuple(way for way in self.ways if batch not in self.only or way.name in self.only[batch])


@dataclasses.dataclass(frozen=True, eq=False)
class Measured:
    """One way at one context and batch. `moved`: counts of the timed steps; None where nothing counts."""

    chunk_s: list[float]
    processor_s: float  # user and system time of the process, all threads
    launches: int | None  # of the product's kernels by the host; None on a CPU
    moved: Counters | None
    ttft_s: float | None  # None: no prefill
    hits: str  # "real" or "replayed"; "none" where nothing looks anything up
    more: dict[str, Any]  # retriever, backend
    device_parts: dict[str, int] = dataclasses.field(default_factory=dict)
    host_bytes: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Warm:
    """A session that has compiled, and whose hits are tuned where they are replayed: what is left of `chunks` is to be
    measured, `steps` of the plan. `session`: None where its metrics are of no use. `hits`: as in `Measured`."""

    chunks: Iterator[Any]
    policy: Policy
    engine: Engine | HostRows | None
    session: BenchSession | None
    hits: str


Found = dict[tuple[str, int, int], Measured]  # by name, context (0: any), batch


def run(
    plan: Plan, keep: Callable[[Found, dict[str, str]], None] = lambda found, skipped: None,
    progress: Callable[[str], None] = lambda what: None,
) -> tuple[Found, dict[str, str]]:  # fmt: skip
    """Measures everything.

    Args:
      keep: called with what there is after each measurement.
      progress: called with the name of what comes next, `num_measurements` times.

    Returns:
      The measurements, and why each one that is missing did not fit the memory.

    Raises:
      MemoryPlanError: none but the weights-only step fits.
    """
    params = plan.subject.params()
    found: Found = {}
    skipped: dict[str, str] = {}
    angles: dict[str, float] = {}
    for batch in plan.batches:
        progress(f"{WEIGHTS_ONLY}, batch {batch}")
        found[WEIGHTS_ONLY, 0, batch] = weights_only(plan, params, batch)
        for context in plan.contexts:
            for way in plan.ways_at(batch):
                name = title(way.name, context, batch)
                progress(name)
                try:
                    found[way.name, context, batch] = measure(plan, params, way, context, batch, angles)
                except (MemoryPlanError, jax.errors.JaxRuntimeError) as error:
                    skipped[name] = why_it_does_not_fit(error)
                keep(found, skipped)
    if len(found) == len(plan.batches):
        raise MemoryPlanError(f"--lengths, --batches: nothing fits. {next(iter(skipped.values()))}")
    return found, skipped


def num_measurements(plan: Plan) -> int:
    """How often `run` calls `progress`."""
    return sum(1 + len(plan.contexts) * len(plan.ways_at(batch)) for batch in plan.batches)


def measure(plan: Plan, params: Any, way: Variant, context: int, batch: int, angles: dict[str, float]) -> Measured:
    """One way.

    Args:
      angles: as of `warm`.

    Raises:
      MemoryPlanError: it does not fit.
    """
    with warm(plan, params, way, context, batch, angles) as run:
        measured = timed(plan, run)
    parts, host = kept_bytes(run.policy.layout, way)
    return dataclasses.replace(measured, device_parts=parts, host_bytes=host)


@contextlib.contextmanager
def warm(plan: Plan, params: Any, way: Variant, context: int, batch: int, angles: dict[str, float]) -> Iterator[Warm]:
    """A session of one way. `angles`: how far the queries of each variant of CLO turn, found where it is not there yet.

    Raises:
      MemoryPlanError: it does not fit.
    """
    subject, length = plan.subject, context - plan.decoded
    with contextlib.closing(subject.preparation(way.load, context)) as preparation:
        # Random rows of one layer, drawn, absorbed and padded, take at most half of what a prefill of it does.
        policy, tables = preparation.prepare(batch, length if plan.fill == "prefill" else -(-length // 2))
        engine, tuned = preparation.engine, None
        hits = "none" if engine is None else "real"
        if plan.pattern is not None and isinstance(policy, CloPolicy):
            policy, tables = replay.replayed(policy, tables, plan.pattern)
            hits, tuned = "replayed", way.name.removesuffix(ON_DEVICE)
            tables = replay.turn(tables, angles.get(tuned, replay.FIRST_ANGLE))
        prompts = subject.prompts(batch, length) if plan.fill == "prefill" else [range(length)] * batch
        request = Request(prompts, [plan.decoded] * batch, [], None)
        session = BenchSession(plan.fill, subject.model, params, policy, tables, engine, request, plan.chunk)
        with contextlib.closing(iter(session)) as chunks:
            for _ in range(1 + WARM_CHUNKS):
                next(chunks)
            if tuned is not None and tuned not in angles:
                angles[tuned] = tuned_angle(session, chunks, engine, tables, plan.pattern, policy)
            yield Warm(chunks, policy, engine, session, hits)


def weights_only(plan: Plan, params: Any, batch: int) -> Measured:
    """The step without attention. It is the same at every context."""
    with warm_weights_only(plan, params, batch) as run:
        return timed(plan, run)


@contextlib.contextmanager
def warm_weights_only(plan: Plan, params: Any, batch: int) -> Iterator[Warm]:
    """A session of the step without attention."""
    model, dtype = plan.subject.model, plan.subject.dtype
    policy = WeightsOnlyPolicy(CacheLayout.full(model, batch, 0, dtype))
    request = Request([range(1)] * batch, [plan.decoded] * batch, [], None)
    session = BenchSession("synthetic", model, params, policy, policy.tables(), None, request, plan.chunk)
    with contextlib.closing(iter(session)) as chunks:
        for _ in range(1 + WARM_CHUNKS):
            next(chunks)
        yield Warm(chunks, policy, None, None, "none")


def tuned_angle(
    session: BenchSession, chunks: Iterator[Any], engine: Engine, tables: tuple[Tables, ...],
    pattern: replay.Pattern, policy: CloPolicy,
) -> float:  # fmt: skip
    """The angle at which the wanted share of a refreshed set is new, by bisection. Whole sets move whatever it is."""
    low, high, angle = 0.0, LONGEST_TURN, replay.FIRST_ANGLE
    if policy.config.refresh == "whole":
        return angle
    for _ in range(TUNING_ROUNDS):
        angle = (low + high) / 2
        session.set_tables(replay.turn(tables, angle))
        next(chunks)
        before = engine.counters()
        next(chunks)
        share = new_rows(difference(engine.counters(), before))
        if share is None:
            break
        low, high = (angle, high) if share < pattern.new_rows else (low, angle)
    return angle


def timed(plan: Plan, run: Warm) -> Measured:
    """The next `plan.steps` steps, chunk by chunk."""
    gpu, engine, session = jax.default_backend() == "gpu", run.engine, run.session
    before = None if engine is None else engine.counters()
    launches, used, seconds = _host.handler_launches(), processor_seconds(), []
    for _ in range(plan.steps // plan.chunk):
        start = time.perf_counter()
        next(run.chunks)
        seconds.append(time.perf_counter() - start)
    used, launches = processor_seconds() - used, _host.handler_launches() - launches
    if engine is not None:
        engine.drain()
    more = {"retriever": getattr(run.policy, "retriever_name", None), "backend": getattr(engine, "backend", None)}
    return Measured(
        seconds, used, launches if gpu else None,
        None if engine is None else difference(engine.counters(), before),
        session.metrics().ttft_s if session is not None and plan.fill == "prefill" else None,
        run.hits, more,
    )  # fmt: skip


def difference(now: Counters, before: Counters) -> Counters:
    """What was counted in between."""
    names = (field.name for field in dataclasses.fields(Counters))
    return Counters(**{name: getattr(now, name) - getattr(before, name) for name in names})


def new_rows(counted: Counters) -> float | None:
    """Rows that refreshes moved, or would have moved, as a share of those that they selected."""
    return counted.rows_posted / counted.rows_selected if counted.rows_selected else None
