"""Decoding at 128K tokens and more against the goals that the project set itself: named runs of the decode bench, and
the ratios within each that a goal speaks of.

    python -m clo_jax.bench.headline 128k OUT.json

Hits are replayed (docs/benchmarks.md): 79 %, with 26 % of a refreshed set new, unless a run says otherwise. Goals are a
GPU's, and of the models and lengths that the runs name: elsewhere rows have none.
"""

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence

import jax

from clo_jax import memory
from clo_jax.bench import decode, decode_rows, rates, replay, report
from clo_jax.bench.subject import Subject, find
from clo_jax.config import CloConfig
from clo_jax.eval.variants import variants, varied

CLO, FULL = "clo 10 %", "full"
ON_DEVICE = f"{CLO}{decode.ON_DEVICE}"
INT8, FP8 = f"{CLO}, kv_dtype=int8", f"{CLO}, kv_dtype=fp8"
EARLY = f"{CLO}, guess_from=input"
INT8_EARLY = f"{CLO}, kv_dtype=int8,guess_from=input"  # moves half the bytes in a window of a whole layer
BUDGET = 48 * 2**30  # bytes of device memory in all, of the goal that asks for the best batch
HOST = 80 * 2**30  # bytes of host memory for a million tokens
_128K = 131072
# The original RetroInfer on the same kind of GPU, 128K tokens, ms a step by batch; measured by its authors' code.
RETROINFER_MS = {1: 42.7, 4: 77.2}
_FASTER = {1: ">= 1.5", 4: ">= 2"}  # than full attention, by batch


@dataclasses.dataclass(frozen=True)
class Steps:
    """What one run measured. `link`: bytes a second of a plain copy."""

    plan: decode.Plan
    found: decode.Found
    link: float

    def get(self, name: str, context: int, batch: int) -> decode.Measured | None:
        """None: it did not fit."""
        return self.found.get((name, 0 if name == decode.WEIGHTS_ONLY else context, batch))

    def ratio(
        self, slow: tuple[str, int, int], fast: tuple[str, int, int], goal: str | None, why: str = ""
    ) -> list[report.Row]:
        """The time of one step over that of another, each by name, context and batch; nothing where one is missing."""
        one, other = self.get(*slow), self.get(*fast)
        if one is None or other is None:
            return []
        value, control = decode_rows.step_ms(self.plan, one), decode_rows.step_ms(self.plan, other)
        return [report.Row(f"step, {_title(*slow)}{why}", value, "ms", f"step, {_title(*fast)}", control, goal)]

    def throughput(self, name: str, context: int, batch: int) -> float:
        """Tokens a second of all sequences."""
        return decode_rows.throughput(self.plan, batch, self.found[name, context, batch])


def _title(name: str, context: int, batch: int) -> str:
    place = "" if name == decode.WEIGHTS_ONLY else f", {context} tokens"
    return f"{name}{place}, batch {batch}"


def _at_128k(steps: Steps) -> list[report.Row]:
    """The defaults, their twin, and what int8 rows and the early guess change, each alone."""
    context, rows = steps.plan.contexts[0], _against(steps, CLO)
    for batch in (1, 4):
        for other in (INT8, EARLY, ON_DEVICE):
            rows += steps.ratio((other, context, batch), (CLO, context, batch), None)
        for other in (INT8, EARLY):
            rows += steps.ratio((FULL, context, batch), (other, context, batch), _FASTER[batch], f", against {other}")
    return rows + _best_within(steps, context)


def _early(steps: Steps) -> list[report.Row]:
    """Int8 rows and the early guess together."""
    return _against(steps, INT8_EARLY) + _best_within(steps, steps.plan.contexts[0])


def _against(steps: Steps, name: str) -> list[report.Row]:
    """One way of `clo` at 128K against the weights alone, full attention and the original RetroInfer; bytes, overlap,
    processor."""
    context, rows = steps.plan.contexts[0], []
    for batch in (1, 4):
        base = (decode.WEIGHTS_ONLY, context, batch)
        rows += steps.ratio((name, context, batch), base, "<= 1.35" if batch == 1 else None)
        rows += steps.ratio((FULL, context, batch), (name, context, batch), _FASTER[batch])
        clo, ms = steps.get(name, context, batch), RETROINFER_MS[batch]
        if clo is None:
            continue
        where = _title(name, context, batch)
        if (steps.plan.subject.name, context) == ("llama3-8b", _128K):
            step = decode_rows.step_ms(steps.plan, clo)
            rows.append(report.Row(f"step, the original RetroInfer, batch {batch}", ms, "ms", where, step, ">= 6"))
        rows += _offloading(steps, name, context, batch)
    return rows


def _offloading(steps: Steps, name: str, context: int, batch: int) -> list[report.Row]:
    """What offloading costs one way of `clo` beside time, and how much of its time is hidden."""
    ways = (name, FULL, f"{name}{decode.ON_DEVICE}")
    clo, full, device = (steps.get(way, context, batch) for way in ways)
    goals, where = batch == 1, _title(name, context, batch)
    rows = [
        report.Row(
            f"processor cores busy, {where}", clo.processor_s / sum(clo.chunk_s), "cores",
            goal="<= 0.1 cores" if goals else None,
        )
    ]  # fmt: skip
    if full is not None:
        kept, whole = sum(clo.device_parts.values()), sum(full.device_parts.values())
        rows.append(
            report.Row(f"device KV, {where}", kept, "bytes", "full attention", whole, "<= 0.25" if goals else None)
        )
    if device is not None and clo.moved is not None and clo.moved.bytes_moved:
        exposed = decode_rows.step_ms(steps.plan, clo) - decode_rows.step_ms(steps.plan, device)
        overlap = decode_rows.moved(steps.plan, clo, max(exposed, 0.0), steps.link)["overlap_ratio"]
        rows.append(report.Row(f"overlap, {where}", overlap, "share", goal=">= 0.9 share" if goals else None))
    return rows


def _best_within(steps: Steps, context: int) -> list[report.Row]:
    """Under a budget of device memory, weights and cache: each at its best batch."""
    fitting = [
        (steps.throughput(name, at, batch), name, batch)
        for (name, at, batch), measured in steps.found.items()
        if steps.plan.subject.weight_bytes + sum(measured.device_parts.values()) <= BUDGET
    ]
    clo = max((found for found in fitting if found[1] in (CLO, INT8, EARLY, INT8_EARLY)), default=None)
    full = max((found for found in fitting if found[1] == FULL), default=None)
    if clo is None or full is None:
        return []
    name = f"within {BUDGET >> 30} GiB: {_title(clo[1], context, clo[2])}"
    return [report.Row(name, clo[0], "tokens/s", _title(FULL, context, full[2]), full[0], ">= 3")]


def _always(steps: Steps) -> list[report.Row]:
    context, rows = steps.plan.contexts[0], []
    for name, goal in ((CLO, "<= 1.6"), (INT8, None), (EARLY, None)):
        rows += steps.ratio((name, context, 1), (decode.WEIGHTS_ONLY, context, 1), goal, ", refreshed at every step")
    return rows


def _against_full(steps: Steps) -> list[report.Row]:
    context = steps.plan.contexts[0]
    return steps.ratio((FULL, context, 1), (CLO, context, 1), ">= 1.4")


def _growth(steps: Steps) -> list[report.Row]:
    first, last = steps.plan.contexts[0], steps.plan.contexts[-1]
    rows = []
    for name, goal in ((CLO, "<= 3"), (FP8, "<= 2"), (FULL, None)):
        rows += steps.ratio((name, last, 1), (name, first, 1), goal)
    return rows


def _million(steps: Steps) -> list[report.Row]:
    context = steps.plan.contexts[0]
    measured = steps.get(CLO, context, 1)
    if measured is None:
        return []
    rows = [report.Row(f"host KV, {context} tokens", measured.host_bytes, "bytes", goal=f"<= {HOST} bytes")]
    return rows + steps.ratio((CLO, context, 1), (decode.WEIGHTS_ONLY, context, 1), None)


def _rivals(steps: Steps) -> list[report.Row]:
    context, rows = steps.plan.contexts[0], []
    for batch in steps.plan.batches:
        for rival, goal in (("retroinfer", ">= 1.5"), ("infinigen", ">= 3"), ("pqcache", ">= 3")):
            rows += steps.ratio((f"{rival} 10 %", context, batch), (CLO, context, batch), goal)
    return rows


@dataclasses.dataclass(frozen=True)
class Headline:
    """One run: what is measured, and the rows that its goals are about. `vary`: as of `clo-jax bench decode`.
    `only`: as of `decode.Plan`."""

    shape: str
    contexts: tuple[int, ...]
    goals: Callable[[Steps], list[report.Row]]
    batches: tuple[int, ...] = (1,)
    only: Mapping[int, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    policies: tuple[str, ...] = ("clo",)
    vary: tuple[str, ...] = ()
    clo: CloConfig = CloConfig()
    hit_rate: float = replay.HIT_RATE
    new_rows: float = replay.NEW_ROWS
    layers: int | None = None  # the first ones only
    steps: int = 128
    chunk: int = 32


HEADLINES = {
    "128k": Headline(
        "llama3-8b", (_128K,), _at_128k, batches=(1, 2, 4, 8), vary=("kv_dtype=int8", "guess_from=input"),
        only={1: (FULL, CLO, ON_DEVICE, INT8, EARLY), 2: (FULL,), 4: (FULL, CLO, INT8, EARLY), 8: (INT8,)},
    ),
    "early": Headline(
        "llama3-8b", (_128K,), _early, batches=(1, 2, 4, 8), vary=("kv_dtype=int8,guess_from=input",),
        only={
            1: (FULL, INT8_EARLY, f"{INT8_EARLY}{decode.ON_DEVICE}"), 2: (FULL,), 4: (FULL, INT8_EARLY),
            8: (INT8_EARLY,),
        },
    ),
    "always": Headline(
        "llama3-8b", (_128K,), _always, vary=("kv_dtype=int8", "guess_from=input"), clo=CloConfig(retain=2.0),
        hit_rate=0.0, new_rows=0.14, only={1: (FULL, CLO, INT8, EARLY)},
    ),
    "qwen": Headline("qwen2.5-14b", (_128K,), _against_full, only={1: (FULL, CLO)}),
    "growth": Headline(
        "llama3-8b", (32768, _128K, 524288), _growth, vary=("kv_dtype=fp8",), only={1: (FULL, CLO, FP8)}
    ),
    "1m": Headline("llama3-8b", (1048576,), _million, clo=CloConfig(kv_dtype="fp8"), only={1: (CLO,)}),
    # Steps of seconds, a layer like the other: a few of both do.
    "rivals": Headline(
        "llama3-8b", (_128K,), _rivals, batches=(1, 4), policies=("clo", "retroinfer", "infinigen", "pqcache"),
        layers=4, steps=4, chunk=1,
    ),
}  # fmt: skip


def plan(headline: Headline, subject: Subject) -> decode.Plan:
    """What the decode bench is asked."""
    ways = varied(variants(headline.policies, (0.1,), headline.clo, {}), headline.vary)
    pattern = replay.given(subject.model, headline.hit_rate, headline.new_rows)
    return decode.Plan(
        subject, tuple(ways), headline.contexts, headline.batches, headline.steps, headline.chunk, "synthetic", pattern,
        headline.only,
    )  # fmt: skip


def rows(headline: Headline, planned: decode.Plan, found: decode.Found, read: float, link: float) -> list[report.Row]:
    """The decode bench's figures, then those that the goals are about. read, link: the controls of `rates`."""
    judged = jax.default_backend() == "gpu" and planned.subject.name == headline.shape
    goals = headline.goals(Steps(planned, found, link))
    goals = goals if judged else [dataclasses.replace(row, goal=None) for row in goals]
    return decode_rows.rows(planned, found, read, link) + goals


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Runs of the decode bench that have goals.")
    parser.add_argument("run", choices=HEADLINES)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--shape", help="another architecture")
    parser.add_argument("--layers", type=int, help="its first ones only; `rivals` has 4 by itself")
    parser.add_argument("--contexts", help="other lengths")
    parser.add_argument("--batches", help="other batches")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--steps", type=int, help="timed ones")
    parser.add_argument("--chunk", type=int, help="steps of a program")
    args = parser.parse_args(argv)
    memory.grow_pool_on_demand()  # leaves the engine's arenas their room on a GPU
    chosen = HEADLINES[args.run]
    try:
        for name in ("contexts", "batches"):
            if getattr(args, name) is not None:
                chosen = dataclasses.replace(chosen, **{name: tuple(map(int, getattr(args, name).split(",")))})
        for name in ("layers", "steps", "chunk"):
            if getattr(args, name) is not None:
                chosen = dataclasses.replace(chosen, **{name: getattr(args, name)})
        subject = find(None, args.shape or chosen.shape, chosen.layers, args.dtype)
        planned = plan(chosen, subject)
    except ValueError as error:
        parser.error(str(error))
    read, link = rates.memory_rate(), rates.link_rate()
    arguments = {"run": args.run, "hit_rate": chosen.hit_rate, "new_rows": chosen.new_rows}

    def keep(found: decode.Found, skipped: dict[str, str]) -> dict[str, object]:
        told = arguments | decode_rows.arguments(planned, skipped)
        return report.write(args.out, "headline", told, rows(chosen, planned, found, read, link))

    found, skipped = decode.run(planned, keep, lambda what: print(what, file=sys.stderr, flush=True))
    print(report.markdown(keep(found, skipped)))


if __name__ == "__main__":
    main()
