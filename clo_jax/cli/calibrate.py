"""`clo-jax calibrate`: measures what a model needs to run well, and keeps it beside the checkpoint."""

from typing import Annotated, Any

import typer
from rich.table import Table

from clo_jax.cli import _console
from clo_jax.cli import _options as o

PARTS_PANEL = "Parts (none given: all of them)"


def _part(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=PARTS_PANEL, **more)


def calibrate(
    checkpoint: o.Checkpoint,
    importance: Annotated[
        str | None,
        _part(
            "--importance",
            help="Head importance: gates (trained on the model), quick (an estimate), or a DuoAttention TSV file.",
            metavar="gates|quick|FILE",
            show_default=False,
        ),
    ] = None,
    hash: Annotated[bool, _part("--hash", help="Hash functions, trained and compared on held-out text.")] = False,
    similarity: Annotated[bool, _part("--similarity", help="Similarity of steps, hits, and a trace of them.")] = False,
    costs: Annotated[bool, _part("--costs", help="Layer time and bandwidths of this machine.")] = False,
    small: Annotated[
        bool | None,
        typer.Option("--small/--full", help="Short prompts, few steps.", show_default="--small without a GPU"),
    ] = None,
    per: Annotated[str, typer.Option(metavar="kv|query", help="A gate for each KV head or each query head.")] = "kv",
    steps: Annotated[int | None, typer.Option(help="Of the gates.", show_default="60")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Of --costs; may be repeated.", show_default="1")] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(help="Of --costs; may be repeated.", show_default="1024, 4096; to 131072 with --full"),
    ] = None,
    backend: o.Backend = None,
    seed: Annotated[int, typer.Option(help="Of prompts and their order.")] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue gates and hash functions that were interrupted.")
    ] = False,
    json: o.Json = False,
    quiet: o.Quiet = False,
    no_progress: o.NoProgress = False,
    debug: o.Debug = False,
) -> None:
    """Measure what a model needs to run well: importance, hash functions, similarity, costs, into CKPT/calibration."""
    if importance is None and not (hash or similarity or costs):
        importance, hash, similarity, costs = "gates", True, True, True
    gates = o.given(per=per, steps=steps)

    import jax

    from clo_jax.calibrate.run import Parts
    from clo_jax.calibrate.run import calibrate as run

    if small is None:
        small = jax.default_backend() == "cpu"
        _console.note(f"{'--small' if small else '--full'}: JAX runs on {jax.default_backend()}")
    outcome = run(
        checkpoint,
        Parts(importance, hash, similarity, costs),
        small=small,
        seed=seed,
        resume=resume,
        gates=gates,
        batches=tuple(batch or (1,)),
        contexts=tuple(context) if context else None,
        backend=backend or "auto",
        bar=_console.progress,
    )
    if json:
        _console.print_json(
            {
                "path": outcome.calibration.path,
                "parts": list(outcome.calibration.parts()),
                "seconds": outcome.seconds,
                "figures": outcome.figures,
            }
        )
        return
    _console.stdout().print(_table(outcome))
    print(f"{outcome.calibration.path}: {', '.join(outcome.calibration.parts())}")


def _table(outcome: Any) -> Table:
    table = Table(title="calibrated", title_justify="left")
    for column in ("part", "seconds", "figures"):
        table.add_column(column, justify="right" if column == "seconds" else "left", overflow="fold")
    for name, seconds in outcome.seconds.items():
        figures = ", ".join(f"{key} {_figure(value)}" for key, value in outcome.figures[name].items())
        table.add_row(name, f"{seconds:.1f}", figures)
    return table


def _figure(value: Any) -> str:
    if isinstance(value, dict):
        return "(" + ", ".join(f"{key} {_figure(item)}" for key, item in value.items()) + ")"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
