"""The figures of decode steps, from what was measured: names as in the benches of other engines, and what is CLO's own.
docs/benchmarks.md says what each field is."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from clo_jax.bench import rates, report
from clo_jax.bench.decode import WEIGHTS_ONLY, Found, Measured, Plan, new_rows
from clo_jax.bench.ways import title

_FULL = "full"
_WEIGHTS = "its weights at the memory read rate"


def rows(plan: Plan, found: Found, memory: float, link: float) -> list[report.Row]:
    """One row for each measurement.

    Args:
      found: what `decode.run` has so far. memory, link: bytes a second, the controls of `rates`.
    """
    made = rates.rows(memory, link)
    load = {way.name: way for way in plan.ways}
    for (name, context, batch), measured in found.items():
        value, step = throughput(plan, batch, measured), step_ms(plan, measured)
        base = found[WEIGHTS_ONLY, 0, batch]
        more = {"batch": batch} | plan.subject.describe() | timing(plan, measured)
        if name == WEIGHTS_ONLY:
            # What the step reads at least; the embedding is a row of its table.
            control = batch * memory / plan.subject.step_bytes
            more |= {"step_bytes": plan.subject.step_bytes}
            made.append(report.Row(f"{name}, batch {batch}", value, "tokens/s", _WEIGHTS, control, None, more))
            continue
        full, device = found.get((_FULL, context, batch)), found.get((f"{name} on the device", context, batch))
        way = load[name]
        more |= {
            "attention": way.attention, "sparsity": way.sparsity, "context": context,
            "kv_offload": way.load.get("kv_offload", True), "fill": plan.fill, "hits": measured.hits,
            "output_tokens": batch * plan.steps, "output_throughput": value,
            "ratio_to_weights_only": value / throughput(plan, batch, base),
            "ratio_to_full": None if full is None else value / throughput(plan, batch, full),
            "device_kv_bytes": sum(measured.device_parts.values()), "device_kv_parts": measured.device_parts,
            "host_kv_bytes": measured.host_bytes,
        }  # fmt: skip
        exposed = None if device is None else max(step - step_ms(plan, device), 0.0)
        more |= moved(plan, measured, exposed, link) | layers(plan, measured, base) | measured.more
        against, control = (_FULL, full) if full is not None and name != _FULL else (WEIGHTS_ONLY, base)
        made.append(
            report.Row(
                title(name, context, batch), value, "tokens/s", against, throughput(plan, batch, control), None, more
            )
        )  # fmt: skip
    return made


def throughput(plan: Plan, batch: int, measured: Measured) -> float:
    """Tokens a second of all sequences together."""
    return batch * plan.steps / sum(measured.chunk_s)


def step_ms(plan: Plan, measured: Measured) -> float:
    """Median over chunks."""
    return float(np.median(measured.chunk_s)) / plan.chunk * 1e3


def timing(plan: Plan, measured: Measured) -> dict[str, Any]:
    """Times of a step, and what the host does meanwhile."""
    steps = np.array(measured.chunk_s) / plan.chunk * 1e3
    p50, p90, p99 = (float(p) for p in np.percentile(steps, (50, 90, 99)))
    return {
        "ttft_ms": None if measured.ttft_s is None else measured.ttft_s * 1e3,
        "tpot_ms": float(steps.mean()), "step_ms": p50, "p50_step_ms": p50, "p90_step_ms": p90, "p99_step_ms": p99,
        "min": float(steps.min()), "max": float(steps.max()), "repeats": len(steps), "steps_per_repeat": plan.chunk,
        "cpu_cores_busy": measured.processor_s / sum(measured.chunk_s),
        "kernel_launches_per_step": None if measured.launches is None else measured.launches / plan.steps,
    }  # fmt: skip


def moved(plan: Plan, measured: Measured, exposed_ms: float | None, link: float) -> dict[str, Any]:
    """Hits, rows and bytes. exposed_ms: what a step takes longer than with its rows on the device; None: not known."""
    counts, seconds = measured.moved, sum(measured.chunk_s)
    if counts is None:
        return {
            "hit_rate": None, "new_rows": None, "rows_moved_per_step": 0.0, "link_bytes_per_step": 0.0,
            "link_gb_per_s": 0.0, "overlap_ratio": None, "wait_ms_per_step": 0.0,
        }  # fmt: skip
    looked_up, carried_ms = counts.hits + counts.misses, counts.bytes_moved / plan.steps / link * 1e3
    overlap = None if exposed_ms is None or not carried_ms else max(1 - exposed_ms / carried_ms, 0.0)
    return {
        "hit_rate": counts.hits / looked_up if looked_up else None, "new_rows": new_rows(counts),
        "rows_moved_per_step": counts.rows_moved / plan.steps,
        "link_bytes_per_step": counts.bytes_moved / plan.steps, "link_gb_per_s": counts.bytes_moved / seconds / 1e9,
        "overlap_ratio": overlap, "wait_ms_per_step": counts.wait_ns / plan.steps / 1e6,
    }  # fmt: skip


def layers(plan: Plan, measured: Measured, base: Measured) -> dict[str, Any]:
    """A step's time as microseconds of a layer, each part the step's share of it: embedding and head are in the matrix
    products, which are those of the step without attention."""
    number = plan.subject.model.num_layers
    step, products = step_ms(plan, measured) * 1e3, step_ms(plan, base) * 1e3
    wait = 0.0 if measured.moved is None else measured.moved.wait_ns / plan.steps / 1e3
    return {
        "layer_us": {
            "all": step / number, "matrix_products": products / number, "waiting_for_rows": wait / number,
            "attention_and_selection": (step - products - wait) / number,
        }
    }  # fmt: skip


def arguments(plan: Plan, skipped: Mapping[str, str]) -> dict[str, Any]:
    """For the results file: what was asked for, and what did not fit."""
    return {
        "contexts": list(plan.contexts), "batches": list(plan.batches), "steps": plan.steps, "chunk": plan.chunk,
        "fill": plan.fill, "skipped": dict(skipped), **plan.subject.describe(),
        "hits": "real" if plan.pattern is None else f"replayed: {plan.pattern.source}",
        "policies": policies(plan.variants),
    }  # fmt: skip


def policies(variants: Sequence[Any]) -> dict[str, Any]:
    """What each policy was asked to be."""
    return {
        v.name: {k: dataclasses.asdict(x) if dataclasses.is_dataclass(x) else x for k, x in v.load.items()}
        for v in variants
    }  # fmt: skip
