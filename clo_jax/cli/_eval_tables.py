"""Evaluations as tables and as results files."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

_TITLE = "read: % of the context selected, attended; recall: of the heaviest tokens, of all mass"


def overview(summaries: Sequence[Any]) -> Table:
    """A line for each variant and length; `summaries` are `eval.summary.Summary`."""
    title = f"points, with intervals of 95 %; {_TITLE}"
    table = _table(title, "policy", "length", "mean", "loss", "rows/step", "read", "recall")
    for s in summaries:
        table.add_row(
            s.variant, str(s.length), _cell(s.mean), "-" if s.loss is None else _cell(s.loss),
            _moved(s), _read(s), _recall(s),
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
    return "-" if found.selected is None else f"{found.selected * 100:.1f}\n{found.attended * 100:.1f}"


def _recall(found: Any) -> str:
    return "-" if found.recall is None else f"{found.recall:.3f}\n{found.mass_kept:.3f}"


def _cell(score: Any) -> str:
    return f"{score.value:.2f}\n{score.low:.1f} to {score.high:.1f}"


def _moved(found: Any) -> str:
    hits = "" if found.hit_rate is None else f"\n{found.hit_rate:.2f} hits"
    return "-" if found.rows_moved is None else f"{found.rows_moved:,.0f}{hits}"


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
        "dtype": plan.dtype, "batch": plan.max_batch, "recall": plan.recall, "sources": plan.sources.describe(),
        "skipped": outcome.skipped,
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
    title = f"KL(full || policy) in nats: mean, p50 p90 p99; {_TITLE}"
    table = _table(title, "policy", "length", "ppl", "mean KL", "same top", "read", "recall")
    for r in results:
        percentiles = " ".join(f"{value:.2g}" for value in list(r.percentiles.values())[:3])
        table.add_row(
            r.variant, str(r.length), f"{r.perplexity:.3f}", f"{r.kl.mean():.2g}\n{percentiles}",
            f"{r.agreement * 100:.1f} %", _read(r), _recall(r),
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
        "recall_tokens": plan.measured_steps, "policies": _policies(outcome),
    }  # fmt: skip
    report.write(path, "eval ppl", args, rows)


def _policies(outcome: Any) -> dict[str, Any]:
    """By name: what a policy was asked to be, and what it said it was."""
    found = {}
    for variant in outcome.plan.variants:
        load = {k: dataclasses.asdict(v) if dataclasses.is_dataclass(v) else v for k, v in variant.load.items()}
        found[variant.name] = {"load": load, "described": outcome.described[variant.name]}
    return found
