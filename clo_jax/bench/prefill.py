"""Time to the first token by policy, context length and batch: prefill with its rows left on the device and copied to
the host."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from clo_jax.bench import decode_rows, report
from clo_jax.bench.subject import Subject
from clo_jax.bench.ways import kept_bytes, on_device, processor_seconds, require_sizes, title, why_it_does_not_fit
from clo_jax.errors import MemoryPlanError
from clo_jax.eval.variants import Variant
from clo_jax.prompts import Request
from clo_jax.session import Session

GOAL = ">= 0.95"  # of the rate with all rows on the device, on a GPU


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What is measured. `contexts`: tokens of prompt and first token together."""

    subject: Subject
    variants: tuple[Variant, ...]  # full attention first
    contexts: tuple[int, ...]
    batches: tuple[int, ...] = (1,)
    repeats: int = 5

    def __post_init__(self) -> None:
        require_sizes(self.subject, self.contexts, self.batches)
        if self.repeats < 1:
            raise ValueError(f"--repeats: got {self.repeats}, wanted a positive integer")

    @property
    def ways(self) -> tuple[Variant, ...]:
        """The variants; before each of CLO's its control, the same one with its rows on the device."""
        return tuple(
            way for v in self.variants for way in ((on_device(v), v) if v.attention == "clo" else (v,))
        )  # fmt: skip

    @property
    def num_measurements(self) -> int:
        return len(self.batches) * len(self.contexts) * len(self.ways)


@dataclasses.dataclass(frozen=True, eq=False)
class Measured:
    """One way at one context and batch."""

    ttft_s: list[float]
    cores: float
    device_bytes: int
    host_bytes: int


Found = dict[tuple[str, int, int], Measured]


def run(
    plan: Plan, keep: Callable[[Found, dict[str, str]], None] = lambda found, skipped: None,
    progress: Callable[[str], None] = lambda what: None,
) -> tuple[Found, dict[str, str]]:  # fmt: skip
    """Measures everything; arguments and results as of `decode.run`.

    Raises:
      MemoryPlanError: nothing fits.
    """
    params = plan.subject.params()
    found: Found = {}
    skipped: dict[str, str] = {}
    for batch in plan.batches:
        for context in plan.contexts:
            for way in plan.ways:
                name = title(way.name, context, batch)
                progress(name)
                try:
                    found[way.name, context, batch] = measure(plan, params, way, context, batch)
                except (MemoryPlanError, jax.errors.JaxRuntimeError) as error:
                    skipped[name] = why_it_does_not_fit(error)
                if found:
                    keep(found, skipped)
    if not found:
        raise MemoryPlanError(f"--lengths, --batches: nothing fits. {next(iter(skipped.values()))}")
    return found, skipped


def measure(plan: Plan, params: Any, way: Variant, context: int, batch: int) -> Measured:
    """One way, after one prefill that compiles it."""
    subject, length = plan.subject, context - 1
    with contextlib.closing(subject.preparation(way.load, context)) as preparation:
        policy, tables = preparation.prepare(batch, length)
        request = Request(subject.prompts(batch, length), [1] * batch, [], None)
        times, used, start = [], 0.0, 0.0
        for number in range(plan.repeats + 1):
            if number == 1:
                used, start = processor_seconds(), time.perf_counter()
            session = Session(subject.model, params, policy, tables, preparation.engine, request, 1)
            for _ in session:
                pass
            times.append(session.metrics().ttft_s)
        cores = (processor_seconds() - used) / (time.perf_counter() - start)
    parts, host = kept_bytes(policy.layout, way)
    return Measured(times[1:], cores, sum(parts.values()), host)


def rows(plan: Plan, found: Found) -> list[report.Row]:
    """Tokens/s of prefill; the control of CLO is CLO with its rows on the device, of all others full attention."""
    made, load = [], {way.name: way for way in plan.ways}
    for (name, context, batch), measured in found.items():
        tokens, way = batch * (context - 1), load[name]
        rate = tokens_per_second(tokens, measured)
        p50, p90, p99 = (float(p) * 1e3 for p in np.percentile(measured.ttft_s, (50, 90, 99)))
        more = plan.subject.describe() | {
            "attention": way.attention, "sparsity": way.sparsity, "context": context, "batch": batch,
            "kv_offload": way.load.get("kv_offload", True), "input_tokens": tokens,
            "input_throughput": rate, "ttft_ms": p50, "p50_ttft_ms": p50, "p90_ttft_ms": p90,
            "p99_ttft_ms": p99, "min": min(measured.ttft_s) * 1e3, "max": max(measured.ttft_s) * 1e3,
            "repeats": len(measured.ttft_s), "cpu_cores_busy": measured.cores,
            "device_kv_bytes": measured.device_bytes, "host_kv_bytes": measured.host_bytes,
        }  # fmt: skip
        against = f"{name} on the device" if (f"{name} on the device", context, batch) in found else "full"
        control, goal = found.get((against, context, batch)), None
        if control is None:
            against, control = name, measured
        elif against != "full" and jax.default_backend() == "gpu":
            goal = GOAL
        against_rate = tokens_per_second(tokens, control)
        made.append(report.Row(title(name, context, batch), rate, "tokens/s", against, against_rate, goal, more))
    return made


def tokens_per_second(tokens: int, measured: Measured) -> float:
    return tokens / float(np.median(measured.ttft_s))


def arguments(plan: Plan, skipped: Mapping[str, str]) -> dict[str, Any]:
    """For the results file."""
    return {
        "contexts": list(plan.contexts), "batches": list(plan.batches), "repeats": plan.repeats,
        "skipped": dict(skipped), **plan.subject.describe(), "policies": decode_rows.policies(plan.variants),
    }  # fmt: skip
