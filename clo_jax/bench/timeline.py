"""Where a decode step's time goes on a GPU, kernel by kernel: of the step without attention, and of each policy's.

    python -m clo_jax.bench.timeline OUT.json --context 131072 --attention full,clo

Sessions and replayed hits are those of the decode bench. After the chunks that are timed one more runs under JAX's
profiler, which shows every kernel, those in captured graphs as well. Kernels that start before those in front of them
have ended (programmatic dependent launch) overlap: an instant belongs to the kernel that started first, so that the
kernels' times and the gaps add up to the span.
"""

import argparse
import dataclasses
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, get_args

import jax
from jax.profiler import ProfileData

from clo_jax import memory
from clo_jax.bench import decode, decode_rows, replay, report
from clo_jax.bench.subject import find
from clo_jax.bench.ways import why_it_does_not_fit
from clo_jax.config import KV_DTYPES, CloConfig, GuessFrom
from clo_jax.errors import CloError, MemoryPlanError
from clo_jax.eval.variants import variants

TRANSFER, XLA = "transfer", "other kernels of XLA"
# What a kernel is, by parts of its name; the first that is found counts. Ours are called by that part.
OURS = {
    "attend": ("read_rows", "merge_fragments"),
    "prefetch": (
        "encode_kernel", "lookup_kernel", "select_kernel", "difference_kernel", "post_request_kernel",
        "serve_posted_kernel", "hand_over_kernel",
    ),
    "offload": ("offload_kernel", "offload_quantized_kernel"),
    "norms": ("add_norms_kernel",),
    TRANSFER: ("serve_resident_kernel", "scatter_rows_kernel"),  # on streams of their own, beside the program
}  # fmt: skip
THEIRS = {"copies": ("memcpy", "memset"), "matrix products": ("gemm", "gemv", "cutlass", "nvjet", "splitk", "dot")}
TIMED_CHUNKS = 4
_ANCHOR = "read_rows"  # once in each layer that attends
_NAME = 100  # characters kept of a name; templates have more


class Event(NamedTuple):
    """A kernel or copy on the device."""

    start_ns: float
    duration_ns: float
    name: str


@dataclasses.dataclass
class Kernel:
    """All launches of one kernel. `own_ns`: the instants that are its. `duration_ns`: from start to end, waiting for
    those in front included."""

    group: str
    name: str
    own_ns: float = 0.0
    duration_ns: float = 0.0
    launches: int = 0


@dataclasses.dataclass(frozen=True)
class Account:
    """A stretch of time. `span_ns` is `gap_ns` and the `own_ns` of all kernels but transfers, which run beside the
    others and own all of their duration. `overlap_ns`: what those others ran in instants that are not theirs."""

    span_ns: float
    gap_ns: float
    longest_gap_ns: float
    overlap_ns: float
    kernels: list[Kernel]  # longest first


def classify(name: str) -> tuple[str, str]:
    """Group of a kernel, and what it is called in results."""
    for group, parts in OURS.items():
        for part in parts:
            if part in name:
                return group, part
    lower = name.lower()
    found = (group for group, parts in THEIRS.items() if any(part in lower for part in parts))
    return next(found, XLA), name[:_NAME]


def account(events: Sequence[Event]) -> Account:
    """What the time from the first counted kernel's start to the last one's end went into.

    Args:
      events: of all streams, in any order.

    Raises:
      ValueError: no kernel but transfers.
    """
    kernels: dict[tuple[str, str], Kernel] = {}
    begin = reached = None
    gaps, overlap = [0.0], 0.0
    for start, duration, name in sorted(events):
        which = classify(name)
        kernel = kernels.setdefault(which, Kernel(*which))
        kernel.duration_ns += duration
        kernel.launches += 1
        if which[0] == TRANSFER:
            kernel.own_ns += duration
            continue
        if reached is None:
            begin = reached = start
        gaps.append(max(start - reached, 0.0))
        own = max(start + duration - max(start, reached), 0.0)
        kernel.own_ns += own
        overlap += duration - own
        reached = max(reached, start + duration)
    if reached is None:
        raise ValueError(f"events: got {len(events)}, none of them a kernel of the program, wanted at least one")
    listed = sorted(kernels.values(), key=lambda kernel: -kernel.own_ns)
    return Account(reached - begin, sum(gaps), max(gaps), overlap, listed)


def one_layer(events: Sequence[Event], steps: int, layers: int) -> list[dict[str, Any]]:
    """Kernels of about a layer, in the middle of the step in the middle: from one attention to the next, where there is
    attention. Starts are from the first one's, in microseconds."""
    counted = [event for event in sorted(events) if classify(event.name)[0] != TRANSFER]
    first = int(len(counted) * (steps // 2 + 0.5) / steps)
    anchors = [i for i in range(first, len(counted)) if _ANCHOR in counted[i].name][:2]
    first, last = anchors if len(anchors) == 2 else (first, first + len(counted) // (steps * layers))
    return [
        {
            "name": classify(event.name)[1],
            "start_us": round((event.start_ns - counted[first].start_ns) / 1e3, 3),
            "duration_us": round(event.duration_ns / 1e3, 3),
        }
        for event in counted[first : last + 1]
    ]


def traced(work: Callable[[], Any]) -> list[Event]:
    """What runs on the GPU while `work` does.

    Raises:
      CloError: the profiler saw nothing there.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            work()
        events = [event for path in pathlib.Path(folder).rglob("*.xplane.pb") for event in read(path)]
    if not events:
        raise CloError("timeline: the profiler saw nothing on the GPU; another process may be using CUPTI")
    return events


def read(path: pathlib.Path) -> Iterator[Event]:
    """Kernels and copies of a trace: what stands on the streams of GPUs."""
    for plane in ProfileData.from_file(str(path)).planes:
        for line in plane.lines:
            if "GPU" in plane.name and line.name.startswith("Stream"):
                yield from (Event(event.start_ns, event.duration_ns, event.name) for event in line.events)


def run(
    plan: decode.Plan, keep: Callable[[list[report.Row], dict[str, str]], None] = lambda rows, skipped: None,
    trace: Callable[[Callable[[], Any]], list[Event]] = traced,
) -> tuple[list[report.Row], dict[str, str]]:  # fmt: skip
    """Rows of the step without attention and of each of the plan's ways, at its first context and batch, and why each
    one that is missing did not fit. The last chunk of the plan's steps is the traced one.

    Args:
      keep: called with what there is after each of them.
      trace: calls what it is given, and returns the events.

    Raises:
      CloError: the profiler sees nothing.
    """
    params, angles = plan.subject.params(), {}
    context, batch = plan.contexts[0], plan.batches[0]
    untraced = dataclasses.replace(plan, steps=plan.steps - plan.chunk)

    def measure(session: decode.Warm) -> tuple[decode.Measured, list[Event]]:
        return decode.timed(untraced, session), trace(lambda: next(session.chunks))

    with decode.warm_weights_only(plan, params, batch) as session:
        base, events = measure(session)
    rows, skipped = policy_rows(untraced, decode.WEIGHTS_ONLY, base, base, events), {}
    keep(rows, skipped)
    for way in plan.ways:
        try:
            with decode.warm(plan, params, way, context, batch, angles) as session:
                measured, events = measure(session)
        except (MemoryPlanError, jax.errors.JaxRuntimeError) as error:
            skipped[way.name] = why_it_does_not_fit(error)
        else:
            rows += policy_rows(untraced, way.name, measured, base, events)
        keep(rows, skipped)
    return rows, skipped


def policy_rows(
    plan: decode.Plan, policy: str, measured: decode.Measured, base: decode.Measured, events: Sequence[Event]
) -> list[report.Row]:
    """The step, then what a layer's share of it went into: groups of kernels, gaps, each kernel. Times of a layer are
    the chunk's divided by steps and layers, so that embedding and head are in them.

    Args:
      measured: untraced chunks. base: those of the step without attention.
      events: of one more chunk.
    """
    layers, counts, found = plan.subject.model.num_layers, measured.moved, account(events)
    parts, step = plan.chunk * layers, decode_rows.step_ms(plan, measured)
    control = None if policy == decode.WEIGHTS_ONLY else decode_rows.step_ms(plan, base)
    looked_up = 0 if counts is None else counts.hits + counts.misses
    more = {
        "hits": measured.hits, "hit_rate": counts.hits / looked_up if looked_up else None,
        "new_rows": None if counts is None else decode.new_rows(counts),
    } | measured.more  # fmt: skip

    def row(name: str, ns: float, **more: Any) -> report.Row:
        return report.Row(f"{policy}: {name}", ns / 1e3 / parts, "us/layer", more=more)

    def total(name: str, kernels: Sequence[Kernel]) -> report.Row:
        duration, launches = sum(k.duration_ns for k in kernels), sum(k.launches for k in kernels)
        name += " (beside them, not counted)" if kernels[0].group == TRANSFER else ""
        own = sum(k.own_ns for k in kernels)
        return row(name, own, duration_us=duration / 1e3 / parts, launches=launches / parts)

    groups = {group: [k for k in found.kernels if k.group == group] for group in (*OURS, *THEIRS, XLA)}
    layer = one_layer(events, plan.chunk, layers)
    return [
        report.Row(f"{policy}: step", step, "ms", decode.WEIGHTS_ONLY, control, more=more),
        report.Row(f"{policy}: step, traced", found.span_ns / 1e6 / plan.chunk, "ms", "untraced", step),
        row("all", found.span_ns, overlap_us=found.overlap_ns / 1e3 / parts, one_layer=layer),
        *(total(group, kernels) for group, kernels in groups.items() if kernels),
        row("gaps", found.gap_ns, longest_us=found.longest_gap_ns / 1e3),
        *(total(f"{group}: {kernel.name}", [kernel]) for group, kernels in groups.items() for kernel in kernels),
    ]


def plan(args: argparse.Namespace) -> decode.Plan:
    """What the command line asks for.

    Raises:
      ValueError: what makes no sense, by the name of its option.
    """
    subject = find(None, args.shape, args.layers, "auto")
    clo = CloConfig(guess_from=args.guess_from, kv_dtype=args.kv_dtype)
    names = args.attention.split(",")
    ways = tuple(way for way in variants(names, (clo.sparsity,), clo, {}) if way.attention in names)
    pattern = replay.given(subject.model, replay.HIT_RATE, replay.NEW_ROWS)
    steps = args.chunk * (TIMED_CHUNKS + 1)
    try:
        return decode.Plan(subject, ways, (args.context,), (args.batch,), steps, args.chunk, pattern=pattern)
    except ValueError as error:
        raise ValueError(str(error).replace("--lengths", "--context").replace("--batches", "--batch")) from None


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Where a decode step's time goes on a GPU, kernel by kernel.")
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--shape", default="llama3-8b")
    parser.add_argument("--layers", type=int, help="its first ones only")
    parser.add_argument("--context", type=int, default=131072)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--attention", default="full,clo", help="policies; clo also with its rows on the device")
    parser.add_argument("--guess-from", choices=get_args(GuessFrom), default=CloConfig.guess_from)
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default=CloConfig.kv_dtype)
    parser.add_argument("--chunk", type=int, default=16)
    args = parser.parse_args(argv)
    memory.grow_pool_on_demand()  # leaves the engine's arenas their room; before JAX starts
    if jax.default_backend() != "gpu":
        parser.error(f"JAX runs on {jax.default_backend()}, wanted a GPU: only there can kernels be traced")
    try:
        planned = plan(args)
    except ValueError as error:
        parser.error(str(error))

    def keep(rows: list[report.Row], skipped: dict[str, str]) -> dict[str, Any]:
        print(f"{len(rows)} rows", file=sys.stderr, flush=True)
        return report.write(args.out, "timeline", decode_rows.arguments(planned, skipped), rows)

    print(report.markdown(keep(*run(planned, keep))))


if __name__ == "__main__":
    main()
