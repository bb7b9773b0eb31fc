"""Hit rates by batch on a real model: the paper's table, whose question is whether a larger batch hits less often.

    python -m clo_jax.bench.hit_rates CKPT OUT.json --length 2048 --batches 1,2,4,8

Each sequence is another generated document; the model continues it greedily, and hits are counted in the timed steps,
through the sessions of the decode bench. What a hit is differs: of CLO, a head that reuses its set, out of all lookups
of offloaded heads; of RetroInfer, a row of the clusters that it retrieves which its device cache has, out of all such
rows. The two are not to be compared. CLO is measured with its defaults and with the paper's threshold and guess.
"""

import argparse
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from clo_jax import memory
from clo_jax.bench import decode, decode_rows, report
from clo_jax.bench.subject import Subject, find
from clo_jax.bench.ways import title
from clo_jax.config import CloConfig
from clo_jax.eval.variants import Variant, variants, varied

PAPERS = "sim_threshold=0.8,guess_from=input"
HITS_OF = {"clo": "lookups of offloaded heads", "retroinfer": "rows of the clusters that are retrieved"}  # its unit
SPARSITY = 0.1


def ways(subject: Subject) -> tuple[Variant, ...]:
    """What is measured, full attention, which is not, in front. Codes are those that the calibration found best."""
    calibration = subject.calibration()
    choice = calibration.choice if calibration is not None else None
    clo = CloConfig(retriever=choice.retriever, hash_bits=choice.hash_bits) if choice else CloConfig()
    return tuple(varied(variants(("clo", "retroinfer"), (SPARSITY,), clo, {}), (PAPERS,)))


def plan(
    subject: Subject, length: int, batches: tuple[int, ...], rival_batches: tuple[int, ...], steps: int, chunk: int
) -> decode.Plan:  # fmt: skip
    """What the decode bench is asked: CLO at all batches, RetroInfer at those of `rival_batches`.

    Raises:
      ValueError: sizes that make no sense.
    """
    if not set(rival_batches) <= set(batches):
        raise ValueError(f"--rival-batches: got {list(rival_batches)}, wanted some of --batches = {list(batches)}")
    of = ways(subject)
    only = {
        batch: tuple(w.name for w in of if w.attention == "clo" or (w.attention in HITS_OF and batch in rival_batches))
        for batch in batches
    }
    return decode.Plan(subject, of, (length,), batches, steps, chunk, "prefill", None, only)


def measure(
    planned: decode.Plan, keep: Callable[[decode.Found], Any] = lambda found: None,
    progress: Callable[[str], None] = lambda what: None,
) -> decode.Found:  # fmt: skip
    """Every policy at every batch, as `decode.run` measures them, but without its controls of time.

    Raises:
      MemoryPlanError: one does not fit.
    """
    params, (context,), found = planned.subject.params(), planned.contexts, {}
    for batch in planned.batches:
        for way in planned.ways_at(batch):
            progress(title(way.name, context, batch))
            found[way.name, context, batch] = decode.measure(planned, params, way, context, batch, {})
            keep(found)
    return found


def rows(planned: decode.Plan, found: decode.Found) -> list[report.Row]:
    """A hit rate for each policy and batch; the control is that of its smallest batch."""
    made, load, first = [], {way.name: way for way in planned.ways}, {}
    for (name, context, batch), measured in found.items():
        moved = measured.moved
        rate = moved.hits / max(moved.hits + moved.misses, 1)
        smallest, base = first.setdefault(name, (batch, rate))
        more = {
            "policy": load[name].attention, "hits_of": HITS_OF[load[name].attention], "sparsity": SPARSITY,
            "context": context, "batch": batch, "lookups": moved.hits + moved.misses,
            "new_rows": decode.new_rows(moved),
            "rows_moved_per_step_and_sequence": moved.rows_moved / planned.steps / batch, **measured.more,
        }  # fmt: skip
        where = f"hit rate, {name}, batch {batch}"
        made.append(report.Row(where, rate, "share", f"batch {smallest}", base or None, None, more))
    return made


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Hit rates by batch, of text that a model continues.")
    parser.add_argument("checkpoint")
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--length", type=int, default=8192, help="tokens of prompt and answer")
    parser.add_argument("--batches", default="1,2,4,8")
    parser.add_argument("--rival-batches", help="of RetroInfer, some of --batches: it gathers in Python, slowly")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--steps", type=int, default=64, help="counted ones")
    parser.add_argument("--chunk", type=int, default=8, help="steps of a program")
    args = parser.parse_args(argv)
    memory.grow_pool_on_demand()  # leaves the engine's arenas their room on a GPU
    try:
        batches, rival = (_numbers(name, given) for name, given in (
            ("--batches", args.batches), ("--rival-batches", args.rival_batches or args.batches)
        ))  # fmt: skip
        subject = find(args.checkpoint, None, None, args.dtype)
        planned = plan(subject, args.length, batches, rival, args.steps, args.chunk)
    except ValueError as error:
        parser.error(str(error).replace("--lengths", "--length"))
    told = decode_rows.arguments(planned, {}) | {"rival_batches": list(rival)}

    def keep(found: decode.Found) -> dict[str, Any]:
        return report.write(args.out, "hit rates", told, rows(planned, found))

    found = measure(planned, keep, lambda what: print(what, file=sys.stderr, flush=True))
    print(report.markdown(keep(found)))


def _numbers(option: str, given: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(part) for part in given.split(",")}))
    except ValueError:
        raise ValueError(f"{option}: got {given!r}, wanted numbers such as 1,2,4") from None


if __name__ == "__main__":
    main()
