"""Evaluations as tables and as results files."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table


def overview(summaries: Sequence[Any]) -> Table:
    """A line for each variant and length; `summaries` are `eval.summary.Summary`."""
    title = "scores in points, with intervals of 95 %; of the context: selected / attended"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("policy", "length", "mean", "loss", "hit rate", "rows a step", "read"):
        table.add_column(column, justify="left" if column == "policy" else "right", no_wrap=column == "policy")
    for s in summaries:
        read = "-" if s.selected is None else f"{s.selected * 100:.1f} / {s.attended * 100:.1f} %"
        table.add_row(
            s.variant, str(s.length), _cell(s.mean), "-" if s.loss is None else _cell(s.loss),
            _number(s.hit_rate, ".2f"), _number(s.rows_moved, ",.0f"), read,
        )  # fmt: skip
    return table


def by_task(summaries: Sequence[Any], length: int) -> Table:
    """Tasks by variants at one length."""
    chosen = [s for s in summaries if s.length == length]
    table = Table(title=f"{length} tokens", title_justify="left")
    table.add_column("task")
    for s in chosen:
        table.add_column(s.variant, justify="right")
    for task in chosen[0].tasks:
        table.add_row(task, *(f"{s.tasks[task].value:.1f}" for s in chosen))
    return table


def _cell(score: Any) -> str:
    return f"{score.value:.2f}\n{score.low:.1f} to {score.high:.1f}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def write(path: pathlib.Path, outcome: Any, summaries: Sequence[Any]) -> None:
    """A results file: a row for each variant and length, its control the mean of full attention."""
    from clo_jax.bench import report
    from clo_jax.eval import intervals

    control = {s.length: s.mean.value for s in summaries if s.attention == "full"}
    rows = [
        report.Row(
            f"{s.variant}, {s.length} tokens", s.mean.value, "points", "full", control[s.length] or None,
            more=dataclasses.asdict(s),
        )
        for s in summaries
    ]  # fmt: skip
    plan = outcome.plan
    args = {
        "suite": plan.suite, "checkpoint": pathlib.Path(plan.checkpoint).name, "tasks": [t.name for t in plan.tasks],
        "lengths": list(plan.lengths), "samples": plan.samples, "seed": plan.seed, "chat": outcome.chat,
        "dtype": plan.dtype, "batch": plan.max_batch, "sources": plan.sources.describe(), "skipped": outcome.skipped,
        "left_out": {f"{task}, {n} tokens": k for (n, task), k in outcome.left_out.items() if k},
        "intervals": intervals.METHOD, "policies": {v.name: _settings(v) for v in plan.variants},
    }  # fmt: skip
    report.write(path, f"eval {plan.suite}", args, rows)


def _settings(variant: Any) -> dict[str, Any]:
    return {k: dataclasses.asdict(v) if dataclasses.is_dataclass(v) else v for k, v in variant.load.items()}
