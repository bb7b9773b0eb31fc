"""What the policies lose on RULER, where full attention can do the task at all.

    python -m clo_jax.bench.accuracy CKPT [--lengths 1024,4096,8192] [--samples 200] [--only NAME --only NAME ...]

Full attention answers every task of every length; a task counts at a length when it scores 60 points or more there.
Then every other way of attending answers those. Answers are kept in `--folder` (see `clo_jax.eval.runner`), so that
`--only` may ask one way, several processes with the same folder may ask several at once, and a last call without it
finds all answers there and writes the file.
"""

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from clo_jax.bench import report
from clo_jax.cache import calibration
from clo_jax.checkpoints import read_info
from clo_jax.config import CloConfig
from clo_jax.eval import intervals, runner, summary
from clo_jax.eval.answers import Answer, Key
from clo_jax.eval.ruler import TASKS
from clo_jax.eval.samples import GeneratedTask
from clo_jax.eval.sources import Sources
from clo_jax.eval.variants import FULL, Variant, variants, varied

ABLE = 60.0  # points of full attention from which on a task counts at a length
MOST_LOST = 0.5  # points, by clo at 10 %
RIVALS = ("infinigen", "retroinfer", "pqcache", "exact")
SPARSITIES = (0.1, 0.05, 0.02)
# Settings of CLO that the defaults are compared with, at the first sparsity; as of `clo-jax bench --vary`.
CHANGES = ("retain=2", "sim_threshold=0.95", "sim_threshold=0.8", "guess_from=input", "kv_dtype=int8")

Cell = tuple[int, str]  # length, task
Scores = Mapping[Cell, np.ndarray]  # points [n] of each sample


class Way(NamedTuple):
    """A way of attending, and how many samples of each task it answers."""

    variant: Variant
    samples: int


class Answers(NamedTuple):
    """Of one way, by cell."""

    scores: Scores
    given: Mapping[Cell, list[Answer]]


def ways(clo: CloConfig, samples: int, others: int) -> list[Way]:
    """All but full attention. `clo`: the settings as shipped; `samples` of CLO, `others` of the rest."""
    found = [Way(v, samples) for v in variants(["clo"], SPARSITIES, clo, {})[1:]]
    found += [Way(v, samples) for v in varied([found[0].variant], CHANGES)[1:]]
    return found + [Way(v, others) for v in variants(RIVALS, SPARSITIES, clo, {})[1:]]


def shipped(checkpoint: str) -> CloConfig:
    """The default settings, with the codes that the checkpoint's calibration chose where there is one."""
    model, info = read_info(checkpoint)
    found = calibration.find("auto", info.path, info.manifest.source_files, model)
    choice = found.choice if found else None
    return CloConfig(retriever=choice.retriever, hash_bits=choice.hash_bits) if choice else CloConfig()


@dataclasses.dataclass(frozen=True)
class Run:
    """What is asked of whom; see the module docstring."""

    checkpoint: str
    lengths: tuple[int, ...]
    samples: int
    batch: int
    dtype: str
    seed: int
    folder: pathlib.Path
    tasks: tuple[GeneratedTask, ...] = tuple(task for task in TASKS.values() if task.needs is None)

    def answers(self, variant: Variant, samples: int, cells: Sequence[Cell]) -> Answers:
        """Of one way; what was answered before is not asked again."""
        scores: dict[Cell, np.ndarray] = {}
        given: dict[Cell, list[Answer]] = {}
        for length in self.lengths:
            tasks = tuple(task for task in self.tasks if (length, task.name) in cells)
            if not tasks:
                continue
            plan = runner.Plan(
                "ruler", self.checkpoint, tasks, (variant,), (length,), samples, self.seed, None, self.dtype,
                self.batch, Sources(), self.folder, recall=0,
            )  # fmt: skip
            outcome = runner.run(plan)
            for task in tasks:
                cell, made = (length, task.name), outcome.samples[length, task.name]
                keys = [Key(variant.name, outcome.keys[variant.name], length, s.task, s.index) for s in made]
                given[cell] = [outcome.answers[key] for key in keys]
                pairs = zip(given[cell], made, strict=True)
                scores[cell] = 100 * np.array([task.metric(a.text, s.outputs) for a, s in pairs])
        return Answers(scores, given)

    def able(self) -> tuple[list[Cell], Answers]:
        """Where full attention scores enough, and its answers to everything."""
        full = self.answers(FULL, self.samples, [(length, task.name) for length in self.lengths for task in self.tasks])
        return [cell for cell, points in full.scores.items() if points.mean() >= ABLE], full


def mean(scores: Scores, cells: Sequence[Cell], samples: int | None = None) -> tuple[float, dict[str, float]]:
    """Mean over cells, of the first `samples` of each, and its interval of 95 %."""
    chosen = {f"{task} {length}": scores[length, task][:samples] for length, task in cells}
    low, high = intervals.bootstrap(chosen)
    return float(np.mean([points.mean() for points in chosen.values()])), {"low": low, "high": high}


def lost(full: Scores, scores: Scores, cells: Sequence[Cell]) -> tuple[float, dict[str, float]]:
    """Mean loss of `scores` against `full`, on the samples that both have, and its interval."""
    return mean({c: full[c][: len(scores[c])] - scores[c][: len(full[c])] for c in cells}, cells)


def rows(cells: Sequence[Cell], full: Answers, found: Mapping[str, tuple[Way, Answers]]) -> list[report.Row]:
    """All figures: of full attention, of each way and how it compares."""
    lengths = sorted({length for length, _ in cells})
    made = []
    for length in sorted({length for length, _ in full.scores}):
        of_all = {task: float(points.mean()) for (n, task), points in full.scores.items() if n == length}
        here = [cell for cell in cells if cell[0] == length]
        if here:
            value, interval = mean(full.scores, here)
            more = interval | {"tasks": of_all, "counted": [task for _, task in here], "length": length}
            made.append(report.Row(f"score, full, {length} tokens", value, "points", more=more))
    for name, (way, answers) in found.items():
        for part in [*lengths, None]:
            here = [cell for cell in cells if part in (None, cell[0])]
            value, interval = mean(answers.scores, here)
            control, _ = mean(full.scores, here, way.samples)
            loss, of_loss = lost(full.scores, answers.scores, here)
            more = {
                "interval": interval, "loss": loss, "loss_interval": of_loss, "samples": way.samples,
                "tasks": {f"{task} {length}": float(answers.scores[length, task].mean()) for length, task in here},
            }  # fmt: skip
            cost = summary.costs([answer for cell in here for answer in answers.given[cell]])._asdict()
            more |= {"rows_moved_a_step": cost.pop("rows_moved")} | cost
            where = f"{part} tokens" if part else "all lengths"
            made.append(report.Row(f"score, {name}, {where}", value, "points", "full", control, more=more))
        loss, interval = lost(full.scores, answers.scores, cells)
        goal = f"<= {MOST_LOST} points" if name == "clo 10 %" else None
        made.append(report.Row(f"loss, {name}", loss, "points", goal=goal, more=interval))
    return made + comparisons(cells, found)


def comparisons(cells: Sequence[Cell], found: Mapping[str, tuple[Way, Answers]]) -> list[report.Row]:
    """CLO against the systems of others, at the same sparsity, on the samples that both answered."""
    made = []
    for sparsity in SPARSITIES:
        share, clo = f"{sparsity * 100:g} %", found.get(f"clo {sparsity * 100:g} %")
        for rival in RIVALS:
            other = found.get(f"{rival} {share}")
            if clo is None or other is None:
                continue
            value, interval = lost(other[1].scores, clo[1].scores, cells)
            goal = {"infinigen": "<= 0 points", "retroinfer": f"<= {MOST_LOST} points"}.get(rival)
            goal = goal if sparsity == SPARSITIES[0] else None
            made.append(report.Row(f"{rival} less clo, {share}", value, "points", goal=goal, more=interval))
    return made


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="RULER, policy by policy, where full attention can do the task.")
    parser.add_argument("checkpoint")
    parser.add_argument("--lengths", default="1024,4096,8192")
    parser.add_argument("--samples", type=int, default=200, help="of a task and length, for full and clo")
    parser.add_argument("--others", type=int, default=100, help="the same, for the other policies")
    parser.add_argument("--tasks", default=",".join(name for name, task in TASKS.items() if task.needs is None))
    parser.add_argument("--batch", type=int, default=40, help="prompts at once")
    parser.add_argument("--dtype", default="auto", help="of the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("clo-jax-eval"))
    parser.add_argument("--only", action="append", help="ask this way alone, and write nothing")
    parser.add_argument("--without", action="append", default=[], help="leave this way out")
    parser.add_argument("--fewer", action="append", default=[], help="NAME=N: ask this way N samples of each task")
    parser.add_argument("--note", help="what the results file is to say, such as where kept answers were given")
    parser.add_argument("--out", type=pathlib.Path, default=report.RESULTS / "smollm2-accuracy.json")
    args = parser.parse_args(argv)
    every = {way.variant.name: way for way in ways(shipped(args.checkpoint), args.samples, args.others)}
    fewer = dict(one.rpartition("=")[::2] for one in args.fewer)
    for name in [*(args.only or []), *args.without, *fewer]:
        if name not in every:
            parser.error(f"--only, --without, --fewer: got {name!r}, wanted one of: {', '.join(every)}")
    for name, number in fewer.items():
        if not number.isdecimal() or not 1 <= int(number) <= every[name].samples:
            parser.error(f"--fewer: got {number!r} for {name}, wanted 1 to {every[name].samples}")
        every[name] = Way(every[name].variant, int(number))
    unknown = [name for name in args.tasks.split(",") if name not in TASKS]
    if unknown:
        parser.error(f"--tasks: got {unknown[0]!r}, wanted some of: {', '.join(TASKS)}")
    run = Run(
        args.checkpoint, tuple(map(int, args.lengths.split(","))), args.samples, args.batch, args.dtype, args.seed,
        args.folder, tuple(TASKS[name] for name in args.tasks.split(",")),
    )  # fmt: skip
    cells, full = run.able()
    print(f"full attention scores {ABLE:g} or more: {cells}", file=sys.stderr, flush=True)
    if not cells:
        raise SystemExit(f"accuracy: full attention scores less than {ABLE:g} points at every task: nothing to lose")
    found: dict[str, tuple[Way, Answers]] = {}
    for name, way in every.items():
        if name not in (args.only or every) or name in args.without:
            continue
        found[name] = (way, run.answers(way.variant, way.samples, cells))
        print(f"{name}: {lost(full.scores, found[name][1].scores, cells)}", file=sys.stderr, flush=True)
    if args.only:
        return
    arguments = vars(args) | {
        "out": args.out.name,
        "folder": args.folder.name,
        "checkpoint": pathlib.Path(args.checkpoint).name,
    }
    print(report.markdown(report.write(args.out, "accuracy", arguments, rows(cells, full, found))))


if __name__ == "__main__":
    main()
