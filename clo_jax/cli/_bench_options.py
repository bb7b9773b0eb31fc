"""Options that the commands of `clo-jax bench` share, and how they become what is measured."""

import enum
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from clo_jax.cli import _console
from clo_jax.cli import _eval_options as e
from clo_jax.cli import _options as o

MODEL_PANEL = "Model"
POLICIES = "clo,exact,infinigen,pqcache,retroinfer"


def model_option(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=MODEL_PANEL, **more)


class Fill(enum.StrEnum):
    synthetic = "synthetic"
    prefill = "prefill"


class Hits(enum.StrEnum):
    real = "real"
    replayed = "replayed"


CheckpointOrShape = Annotated[
    str | None,
    typer.Argument(metavar="[CKPT]", help="Folder written by `clo-jax convert`; or a --shape.", show_default=False),
]
Shape = Annotated[
    str | None,
    model_option("--shape", metavar="NAME", help="llama3-8b, qwen2.5-14b, smollm2-135m or tiny, with random weights."),
]
Layers = Annotated[int | None, model_option("--layers", help="Keep the first ones only.", show_default="all")]
Batches = Annotated[str, typer.Option("--batches", metavar="LIST", help="Sequences at once.")]
DType = Annotated[
    o.DType,
    model_option("--dtype", help="Of weights, activations and KV rows.", show_default="the checkpoint's, or bfloat16"),
]  # fmt: skip


def read_batches(text: str) -> tuple[int, ...]:
    """Ascending, each once."""
    return tuple(sorted(set(e.split("--batches", text, int))))


def read_variants(
    checkpoint: str | None, attention: str, sparsity: str, preset: o.Preset | None, vary: Sequence[str] | None = None,
    **options: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """The policies to measure, full attention first. `vary`: settings to measure CLO with once more. `options`: the
    flags of CLO but the sparsity, as typed.

    Raises:
      ValueError: an unknown policy, or what needs a checkpoint where there is a shape.
    """
    if checkpoint is not None:
        return e.read_variants(checkpoint, attention, sparsity, preset, vary, **options)
    from clo_jax.config import CloConfig
    from clo_jax.eval.variants import variants, varied

    for name in ("calibration", "planner", "kv_budget"):
        if options.get(name) is not None:
            raise ValueError(f"{o.flag(name)}: got it with a --shape, wanted a checkpoint that was calibrated")
    load = o.load_options(o.Attention.clo, preset, **options)
    load.pop("attention")
    config = load.pop("clo", None) or CloConfig()
    ways = variants(e.split("--attention", attention, str), e.split("--sparsity", sparsity, float), config, load)
    return tuple(varied(ways, vary or ()))


def read_pattern(
    subject: Any, hits: Hits, hit_rate: float | None, new_rows: float | None, trace: str | None
) -> Any | None:
    """What is replayed; None: nothing.

    Raises:
      ValueError: what does not go together.
    """
    from clo_jax.bench import replay
    from clo_jax.cache import calibration

    typed = o.given(hit_rate=hit_rate, new_rows=new_rows, trace=trace)
    if hits is Hits.real:
        if typed:
            raise ValueError(f"--hits: got real with {', '.join(map(o.flag, typed))}, wanted replayed")
        return None
    if trace is not None and len(typed) > 1:
        raise ValueError("--trace: got it with --hit-rate or --new-rows, wanted either a trace or shares")
    found = calibration.read(trace) if trace is not None else None
    if not typed and (own := subject.calibration()) is not None and own.trace is not None:
        found = own
    if found is not None:
        return replay.traced(subject.model, found)
    return replay.given(
        subject.model, replay.HIT_RATE if hit_rate is None else hit_rate,
        replay.NEW_ROWS if new_rows is None else new_rows,
    )  # fmt: skip


def start() -> None:
    """Before JAX starts: leaves the engine's arenas their room on a GPU."""
    from clo_jax import memory

    memory.grow_pool_on_demand()


def told(advance: Callable[[int], None]) -> Callable[[str], None]:
    """Says what is measured next, on a line of its own, and moves the progress bar on."""

    def tell(what: str) -> None:
        _console.note(what)
        advance(1)

    return tell
