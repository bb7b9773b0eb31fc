"""The paper's ablation in time: what its parts save of a decode step, with hits as the ablation found them.

    python -m clo_jax.bench.ablation_speed OUT.json

`clo_jax.bench.ablation` measures parts on a real model, SmolLM2, whose cache is too small for offloading to show in its
steps. Here each part's hit rate is replayed at a large shape with random weights (`bench.replay`): with whole sets, as
in the paper, where a head that misses moves all of its rows, and with the delta, which moves those that are not there
yet, in the share that the ablation found. Resident heads are the ablation's in number: the same share of the heads
beyond layer 0, spread evenly over the layers (a plan's own choice of heads is not in its file); layer 0 is resident in
every part, as it was there. A part that equals one before it in all of this is not timed again.

Controls: the step of the uniform threshold with whole sets, which is the paper's, full attention, the step without it.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from clo_jax import memory
from clo_jax.bench import decode, decode_rows, rates, replay, report, shapes
from clo_jax.bench.subject import find
from clo_jax.bench.ways import kept_bytes, title, why_it_does_not_fit
from clo_jax.config import CloConfig, ModelConfig
from clo_jax.errors import MemoryPlanError
from clo_jax.eval.variants import FULL, Variant

SOURCE, MEASURED = report.RESULTS / "smollm2-ablation.json", "smollm2-135m"
UNIFORM = "uniform"
PARTS = (UNIFORM, "+T", "+T +G", "+T +G +P", "+T +G +P, nothing hidden")
WHOLE, DELTA = "whole sets", "delta"
_SPARSITY = 0.1
# Guesses as in the ablation: the paper's, which give a transfer the time of a whole layer.
SETS = {
    WHOLE: CloConfig(sparsity=_SPARSITY, guess_from="input", sim_threshold=0.8, refresh="whole", retain=1.0),
    DELTA: CloConfig(sparsity=_SPARSITY, guess_from="input", sim_threshold=0.8),
}


class Part(NamedTuple):
    """A row of the ablation. hit_rate: of offloaded heads; new_rows: of a refreshed set; resident: the share of heads
    beyond layer 0 that are."""

    name: str
    hit_rate: float
    new_rows: float
    resident: float


def read(path: pathlib.Path, model: ModelConfig) -> tuple[Part, ...]:
    """The parts in a results file of the ablation. model: the one that it was measured on.

    Raises:
      ValueError: it is none, or lacks a row.
    """
    content = json.loads(path.read_text())
    report.validate(content)
    rows = {row["name"]: row for row in content["rows"]}
    found = []
    for name in PARTS:
        wanted = (f"hit rate, {name}", f"rows moved / rows selected, {name}")
        lacking = [row for row in wanted if row not in rows]
        if lacking:
            raise ValueError(f"{path.name}: got no row {lacking[0]!r}, wanted it for the replay")
        hits, moved = (rows[row] for row in wanted)
        beyond = hits.get("resident_heads", model.num_kv_heads) - model.num_kv_heads
        share = beyond / ((model.num_layers - 1) * model.num_kv_heads)
        if not 0 <= share <= 1:
            raise ValueError(f"{path.name}: got {hits['resident_heads']} resident heads, wanted those of {model}")
        found.append(Part(name, hits["value"], moved["value"], share))
    return tuple(found)


def resident_heads(model: ModelConfig, share: float) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Layer 0, and that share of the other layers' heads, as even as whole numbers allow: as `CloConfig` has them."""
    K = model.num_kv_heads
    upto = [int(layer * share * K + 1e-9) for layer in range(model.num_layers)]
    more = ((layer, tuple(range(upto[layer] - upto[layer - 1]))) for layer in range(1, model.num_layers))
    return ((0, tuple(range(K))), *more)


@dataclasses.dataclass(frozen=True)
class Run:
    """One cache and the parts that are timed over it in turn: they have resident heads and sets in common. `ways`: by
    part, what the decode bench calls it."""

    sets: str
    ways: Mapping[Part, Variant]


@dataclasses.dataclass(frozen=True)
class Ablation:
    """What is measured. `plan`: of the decode bench, with the steps of one part. `timed`: by part, the one that it
    equals."""

    plan: decode.Plan
    parts: tuple[Part, ...]
    runs: tuple[Run, ...]
    timed: Mapping[str, Part]

    def length(self, run: Run) -> decode.Plan:
        """The plan of all parts of a run. The tuning of one part is in every plan that replays.

        Raises:
          ValueError: a context that is too short for them.
        """
        plan, parts = self.plan, len(run.ways)
        untimed = (2 * decode.TUNING_ROUNDS * (parts - 1) + parts) * plan.chunk
        return dataclasses.replace(plan, steps=plan.steps * parts + untimed)


def ablation(plan: decode.Plan, parts: Sequence[Part]) -> Ablation:
    """Which parts are timed over which cache.

    Args:
      plan: subject, sizes and steps; its variants are made here.

    Raises:
      ValueError: a context that is too short.
    """
    timed: dict[str, Part] = {}
    for part in parts:
        timed[part.name] = next((one for one in timed.values() if one[1:] == part[1:]), part)
    runs = []
    for share in dict.fromkeys(part.resident for part in parts):
        own = [part for part in dict.fromkeys(timed.values()) if part.resident == share]
        for sets, clo in SETS.items():
            settings = dataclasses.replace(clo, resident_heads=resident_heads(plan.subject.model, share))
            load = {"attention": "clo", "clo": settings}
            runs.append(Run(sets, {p: Variant(f"{p.name}, {sets}", "clo", _SPARSITY, load) for p in own}))
    ways = (FULL, *(way for run in runs for way in run.ways.values()))
    made = Ablation(dataclasses.replace(plan, variants=ways), tuple(parts), tuple(runs), timed)
    for run in runs:
        made.length(run)
    return made


def measure(
    asked: Ablation, keep: Callable[[decode.Found, dict[str, str]], Any] = lambda found, skipped: None,
    progress: Callable[[str], None] = lambda what: None,
) -> tuple[decode.Found, dict[str, str]]:  # fmt: skip
    """Measures everything; arguments and results as of `decode.run`.

    Raises:
      MemoryPlanError: the uniform threshold with whole sets, which all else is compared with, does not fit.
    """
    plan, (context,), (batch,) = asked.plan, asked.plan.contexts, asked.plan.batches
    params, found, skipped = plan.subject.params(), {}, {}
    progress(decode.WEIGHTS_ONLY)
    found[decode.WEIGHTS_ONLY, 0, batch] = decode.weights_only(plan, params, batch)
    progress(FULL.name)
    try:
        found[FULL.name, context, batch] = decode.measure(plan, params, FULL, context, batch, {})
    except (MemoryPlanError, jax.errors.JaxRuntimeError) as error:
        skipped[title(FULL.name, context, batch)] = why_it_does_not_fit(error)
    for number, run in enumerate(asked.runs):
        try:
            _measure_run(asked, run, params, found, progress)
        except (MemoryPlanError, jax.errors.JaxRuntimeError) as error:
            why = why_it_does_not_fit(error)
            if number == 0:
                raise MemoryPlanError(why) from error
            skipped |= {title(way.name, context, batch): why for way in run.ways.values()}
        keep(found, skipped)
    return found, skipped


def _measure_run(asked: Ablation, run: Run, params: Any, found: decode.Found, progress: Callable[[str], None]) -> None:
    plan, (context,), (batch,) = asked.plan, asked.plan.contexts, asked.plan.batches
    model, first = plan.subject.model, next(iter(run.ways.values()))
    patterns = {part: replay.given(model, part.hit_rate, part.new_rows) for part in run.ways}
    whole = dataclasses.replace(asked.length(run), pattern=next(iter(patterns.values())))
    progress(f"cache of {first.name}")
    # Each part is tuned below, the first one too.
    with decode.warm(whole, params, first, context, batch, {first.name: replay.FIRST_ANGLE}) as session:
        parts, host = kept_bytes(session.policy.layout, first)
        for part, way in run.ways.items():
            progress(way.name)
            policy, tables = replay.replayed(session.policy, session.policy.tables(), patterns[part])
            session.session.set_tables(replay.turn(tables, replay.FIRST_ANGLE))
            angle = decode.tuned_angle(
                session.session, session.chunks, session.engine, tables, patterns[part], policy
            )  # fmt: skip
            session.session.set_tables(replay.turn(tables, angle))
            next(session.chunks)  # other tables are elsewhere: captured graphs are written anew
            measured = decode.timed(plan, session)
            found[way.name, context, batch] = dataclasses.replace(measured, device_parts=parts, host_bytes=host)


def rows(asked: Ablation, found: decode.Found, read: float, link: float) -> list[report.Row]:
    """The decode bench's figures, then the table: steps of the parts, and what each saves of the uniform threshold's.
    read, link: the controls of `rates`."""
    plan, (context,), (batch,) = asked.plan, asked.plan.contexts, asked.plan.batches
    model, made = plan.subject.model, decode_rows.rows(plan, found, read, link)

    base = decode_rows.step_ms(plan, found[f"{UNIFORM}, {WHOLE}", context, batch])

    def step(name: str, way: str, more: Mapping[str, Any]) -> None:
        measured = found.get((way, 0 if way == decode.WEIGHTS_ONLY else context, batch))
        if measured is not None:
            ms = decode_rows.step_ms(plan, measured)
            cut = {"latency_cut": 1 - ms / base}
            made.append(report.Row(f"step, {name}", ms, "ms", f"step, {UNIFORM}, {WHOLE}", base, None, {**cut, **more}))

    for control in (decode.WEIGHTS_ONLY, FULL.name):
        step(control, control, {})
    for part in asked.parts:
        timed, resident = asked.timed[part.name].name, resident_heads(model, part.resident)
        more = {
            "part": part.name, "timed_as": timed, "hit_rate_found": part.hit_rate, "new_rows_found": part.new_rows,
            "found_on": MEASURED, "resident_heads": sum(len(heads) for _, heads in resident),
            "kv_heads": model.num_layers * model.num_kv_heads,
        }  # fmt: skip
        for sets in SETS:
            step(f"{part.name}, {sets}", f"{timed}, {sets}", {**more, "sets": sets})
    return made


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Decode steps with the hits of the ablation, part by part.")
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--shape", default="llama3-8b")
    parser.add_argument("--layers", type=int, help="its first ones only")
    parser.add_argument("--context", type=int, default=131072)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--steps", type=int, default=replay.PERIOD, help="timed ones of each part")
    parser.add_argument("--chunk", type=int, default=16, help="steps of a program")
    args = parser.parse_args(argv)
    memory.grow_pool_on_demand()  # leaves the engine's arenas their room on a GPU
    try:
        subject = find(None, args.shape, args.layers, args.dtype)
        parts = read(SOURCE, shapes.shape(MEASURED))
        plan = decode.Plan(
            subject, (FULL,), (args.context,), (args.batch,), args.steps, args.chunk,
            pattern=replay.given(subject.model, parts[0].hit_rate, parts[0].new_rows),
        )  # fmt: skip
        asked = ablation(plan, parts)
    except ValueError as error:
        parser.error(str(error).replace("--lengths", "--context").replace("--batches", "--batch"))
    read_rate, link = rates.memory_rate(), rates.link_rate()

    def keep(found: decode.Found, skipped: dict[str, str]) -> dict[str, Any]:
        told = decode_rows.arguments(asked.plan, skipped) | {
            "hits": f"replayed: those of each part on {MEASURED}", "parts_of": SOURCE.name,
        }  # fmt: skip
        return report.write(args.out, "ablation speed", told, rows(asked, found, read_rate, link))

    found = measure(asked, keep, lambda what: print(what, file=sys.stderr, flush=True))
    print(report.markdown(keep(*found)))


if __name__ == "__main__":
    main()
