"""Evaluations as tables and as results files."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table


def overview(summaries: Sequence[Any]) -> Table:
    """A line for each variant and length; `summaries` are `eval.summary.Summary`."""
    title = "points, with intervals of 95 %; read: selected / attended of the context"
    table = _table(title, "policy", "length", "mean", "loss", "hits", "rows/step", "read")
    for s in summaries:
        table.add_row(
            s.variant, str(s.length), _cell(s.mean), "-" if s.loss is None else _cell(s.loss),
            _number(s.hit_rate, ".2f"), _number(s.rows_moved, ",.0f"), _read(s),
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


def _table(title: str, *columns: str) -> Table:
    """Narrow enough for 80 characters."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in columns:
        table.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
    return table


def _read(found: Any) -> str:
    return "-" if found.selected is None else f"{found.selected * 100:.1f}/{found.attended * 100:.1f} %"


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
        "intervals": intervals.METHOD, "policies": _policies(outcome),
    }  # fmt: skip
    if plan.suite == "longbench":
        from clo_jax.eval.longbench import TRUNCATION

        args |= {"truncation": TRUNCATION, "cut": cut(outcome)}
    report.write(path, f"eval {plan.suite}", args, rows)


def cut(outcome: Any) -> dict[str, int]:
    """Samples that have lost their middle, by task and length."""
    counts = {f"{task}, {n} tokens": sum(s.cut for s in made) for (n, task), made in outcome.samples.items()}
    return {name: number for name, number in counts.items() if number}


def divergences(results: Sequence[Any]) -> Table:
    """A line for each `eval.divergence.Divergence`."""
    title = "KL(full || policy) in nats; read: selected / attended of the context"
    table = _table(title, "policy", "length", "ppl", "mean KL", "p50 p90 p99", "same top", "read")
    for r in results:
        percentiles = list(r.percentiles.values())[:3]
        table.add_row(
            r.variant, str(r.length), f"{r.perplexity:.3f}", f"{r.kl.mean():.2g}",
            " ".join(f"{value:.2g}" for value in percentiles), f"{r.agreement * 100:.1f} %", _read(r),
        )  # fmt: skip
    return table


def write_divergences(path: pathlib.Path, outcome: Any) -> None:
    """A results file: a row for each variant and length, its control the perplexity of full attention."""
    from clo_jax.bench import report

    control = {r.length: r.perplexity for r in outcome.results if r.attention == "full"}
    rows = []
    for r in outcome.results:
        more = {f.name: getattr(r, f.name) for f in dataclasses.fields(r)}
        more["kl"] = {"mean": float(r.kl.mean()), **r.percentiles, "by_token": [float(f"{x:.4g}") for x in r.kl]}
        name = f"{r.variant}, {r.length} tokens"
        rows.append(report.Row(name, r.perplexity, "perplexity", "full", control[r.length], more=more))
    plan = outcome.plan
    args = {
        "checkpoint": pathlib.Path(plan.checkpoint).name, "lengths": list(plan.lengths), "tokens": plan.tokens,
        "text": outcome.text, "seed": plan.seed, "dtype": plan.dtype,
        "policies": _policies(outcome),
    }  # fmt: skip
    report.write(path, "eval ppl", args, rows)


def _policies(outcome: Any) -> dict[str, Any]:
    """By name: what a policy was asked to be, and what it said it was."""
    found = {}
    for variant in outcome.plan.variants:
        load = {k: dataclasses.asdict(v) if dataclasses.is_dataclass(v) else v for k, v in variant.load.items()}
        found[variant.name] = {"load": load, "described": outcome.described[variant.name]}
    return found
