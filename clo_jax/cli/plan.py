"""`clo-jax plan`: thresholds, resident heads and the predicted step of a model on a machine, without running it."""

import dataclasses
import enum
import pathlib
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from clo_jax.bench.shapes import SHAPES
from clo_jax.cli import _console
from clo_jax.cli import _options as o
from clo_jax.config import CloConfig, ModelConfig

MACHINE_PANEL = "Machine"
_TOKENS = 131072  # context, where the model goes as far


class KnownModel(enum.StrEnum):
    """The models of the paper, for plans from published head scores without a checkpoint."""

    llama3_8b = "llama3-8b"
    qwen25_14b = "qwen2.5-14b"


class HardwareName(enum.StrEnum):
    measured = "measured"
    pcie4 = "pcie4"
    pcie5 = "pcie5"
    pcie6 = "pcie6"
    c2c = "c2c"


def _machine(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=MACHINE_PANEL, **more)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a plan is made of, and in words where importance and similarity come from."""

    model: ModelConfig
    dtype: str
    clo: CloConfig
    heads: Any
    calibration: Any
    importance_source: str
    similarity_source: str


def plan(
    checkpoint: Annotated[
        str | None, typer.Argument(metavar="[CKPT]", help="Folder written by `clo-jax convert`.", show_default=False)
    ] = None,
    scores: Annotated[
        pathlib.Path | None, typer.Option(metavar="FILE", help="DuoAttention TSV, in place of measured importance.")
    ] = None,
    model: Annotated[KnownModel | None, typer.Option(help="Shape of the model, without a checkpoint.")] = None,
    similarity: Annotated[
        float | None, typer.Option(help="Mean cosine of adjacent steps where none was measured.", show_default="0.85")
    ] = None,
    planner: Annotated[o.Planner, typer.Option(help="Whose plan is shown layer by layer.")] = o.Planner.paper,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    context: Annotated[
        int | None, typer.Option(help="Tokens of each.", show_default="131072, or the model's limit")
    ] = None,
    kv_budget: Annotated[
        int | None,
        typer.Option(help="Bytes of device memory for the cache.", show_default="what weights leave of 90 %"),
    ] = None,
    hardware: Annotated[
        HardwareName | None,
        _machine("--hardware", help="A machine by its link.", show_default="measured with --costs, else pcie5"),
    ] = None,
    link_gb_per_s: Annotated[float | None, _machine("--link-gb-per-s", help="Reached by the link.")] = None,
    memory_gb_per_s: Annotated[float | None, _machine("--memory-gb-per-s", help="Reached by device memory.")] = None,
    memory_gib: Annotated[float | None, _machine("--memory-gib", help="Size of device memory.")] = None,
    preset: o.PresetOption = None,
    sparsity: o.Sparsity = None,
    refresh: o.RefreshOption = None,
    retain: o.Retain = None,
    guess_from: o.GuessFromOption = None,
    kv_dtype: o.KvDtypeOption = None,
    sim_threshold: o.SimThreshold = None,
    importance_power: o.ImportancePower = None,
    reuse_margin: o.ReuseMargin = None,
    hash_bits: o.HashBits = None,
    backend: o.Backend = None,
    plot: Annotated[pathlib.Path | None, typer.Option(metavar="PNG", help="Heads by layers, as a picture.")] = None,
    json: o.Json = False,
    quiet: o.Quiet = False,
    no_progress: o.NoProgress = False,
    debug: o.Debug = False,
) -> None:
    """Print which heads would stay on the device, and what a decode step would take."""
    from clo_jax.cache import planner as planning
    from clo_jax.cache.layout import CacheLayout

    clo = o.load_options(
        o.Attention.clo, preset, sparsity=sparsity, refresh=refresh, retain=retain, guess_from=guess_from,
        kv_dtype=kv_dtype, sim_threshold=sim_threshold,
        importance_power=importance_power, reuse_margin=reuse_margin, hash_bits=hash_bits,
    ).get("clo")  # fmt: skip
    given = _inputs(checkpoint, scores, model, similarity, clo)
    limit = given.model.max_position_embeddings
    context = min(_TOKENS, limit) if context is None else context
    if batch < 1 or not 2 <= context <= limit:
        raise ValueError(
            f"--batch, --context: got {batch}, {context}, wanted at least 1 and 2 to {limit}, the model's limit"
        )
    layout = CacheLayout.clo(given.model, given.clo, batch, context, given.dtype)
    machines = _machines(given, layout, hardware, link_gb_per_s, memory_gb_per_s, memory_gib, backend)
    plans, failures = {}, {}
    budgets = {name: free if kv_budget is None else kv_budget for name, (_, free) in machines.items()}
    for name, (machine, _) in machines.items():
        for kind in planning.PLANNERS:
            try:
                plans[name, kind] = planning.make_plan(
                    kind, given.model, given.clo, layout, given.heads, machine, budgets[name]
                )  # fmt: skip
            except ValueError as error:
                failures[name, kind] = error
    chosen = next(iter(machines))
    if (chosen, planner.value) in failures:
        raise failures[chosen, planner.value]
    shown = plans[chosen, planner.value]
    about = (
        f"{given.model.num_layers} layers of {given.model.num_kv_heads} KV heads, batch {batch}, {context} tokens; "
        f"importance: {given.importance_source}; similarity: {given.similarity_source}; "
        f"machine: {shown.machine.source}"
    )
    if plot is not None:
        from clo_jax.cli._plan_plot import draw

        draw(plot, shown, given.heads.importance, given.heads.similarity, f"planner {planner.value}: {about}")
    if json:
        _console.print_json({"about": about, "plan": _plain(shown), "compared": _compared(plans, budgets)})
        return
    console = _console.stdout()
    console.print(about, soft_wrap=True)
    console.print(_layers(shown, given.heads))
    console.print(_summary(plans, budgets))
    for (name, _), error in failures.items():
        _console.note(f"{name}: {error}")
    if plot is not None:
        _console.note(f"{plot}: written")


def _inputs(
    checkpoint: str | None, scores: pathlib.Path | None, model: KnownModel | None, similarity: float | None,
    clo: CloConfig | None,
) -> Inputs:  # fmt: skip
    from clo_jax.cache import calibration as calibrations
    from clo_jax.cache.layout import CacheLayout
    from clo_jax.cache.planner import Heads
    from clo_jax.calibrate.duo_scores import read_duo_scores
    from clo_jax.checkpoints import read_info
    from clo_jax.planning import measured_heads
    from clo_jax.policies.clo import measured_scores, neutral_scores

    if checkpoint is not None and model is not None:
        raise ValueError("--model: got it together with a checkpoint, wanted one of them")
    if similarity is not None and not -1 <= similarity <= 1:
        raise ValueError(f"--similarity: got {similarity}, wanted a cosine in [-1, 1]")
    found, dtype = None, "bfloat16"
    if checkpoint is not None:
        config, info = read_info(checkpoint)
        found, dtype = calibrations.find("auto", info.path, info.manifest.source_files, config), info.dtype
    else:
        config = SHAPES[(model or KnownModel.llama3_8b).value]
        if scores is None:
            raise ValueError("CKPT, --scores: got neither, wanted a checkpoint or head scores")
    if clo is None:
        choice = found.choice if found else None
        clo = CloConfig(retriever=choice.retriever, hash_bits=choice.hash_bits) if choice else CloConfig()
    part = read_duo_scores(scores, config) if scores is not None else found.importance if found else None
    shape = (config.num_layers, config.num_kv_heads)
    layout = CacheLayout.clo(config, clo, 1, min(4096, config.max_position_embeddings), dtype)
    head_scores = neutral_scores(layout) if part is None else measured_scores(layout, part)
    importance = head_scores.kv_heads
    if found is not None and found.similarity is not None and similarity is None:
        heads, source = measured_heads(importance, head_scores.source, found.similarity, clo), "measured"
    else:
        value = 0.85 if similarity is None else similarity
        heads, source = Heads(importance, np.full(shape, value)), f"{value:g} assumed for every head"
    return Inputs(config, dtype, clo, heads, found, "neutral" if part is None else part.source, source)


def _machines(
    given: Inputs, layout: Any, hardware: HardwareName | None, link: float | None, memory: float | None,
    size: float | None, backend: str | None,
) -> dict[str, Any]:  # fmt: skip
    """(machine, bytes for the cache) by name: the chosen one first, then the presets to compare with."""
    from clo_jax.cache import planner as planning
    from clo_jax.cache.hardware import PRESETS

    costs = given.calibration.costs if given.calibration else None
    numbers = {"link_bytes_per_s": link, "device_bytes_per_s": memory}
    changes: dict[str, Any] = {name: rate * 1e9 for name, rate in numbers.items() if rate is not None}
    if size is not None:
        changes["device_bytes"] = int(size * 2**30)
    if hardware is HardwareName.measured and costs is None:
        raise ValueError("--hardware: got measured, but there are no measured costs: clo-jax calibrate CKPT --costs")
    if hardware is None:
        hardware = HardwareName.pcie5 if costs is None or changes else HardwareName.measured
    found: dict[str, Any] = {}
    if hardware is HardwareName.measured:
        if changes:
            raise ValueError("--hardware: got measured with other figures, wanted a preset to change")
        backend = backend or next((name for name in costs.link_bytes_per_s if name != "host"), "host")
        found["measured"] = (planning.measured_machine(costs, backend, given.model, layout), None)
    else:
        chosen = PRESETS[hardware.value]
        if changes:
            chosen = dataclasses.replace(chosen, name=f"{chosen.name} changed", source="given", **changes)
        found["given" if changes else hardware.value] = _preset(planning, chosen, given, layout)
    for name, preset in PRESETS.items():
        found.setdefault(name, _preset(planning, preset, given, layout))
    return found


def _preset(planning: Any, hardware: Any, given: Inputs, layout: Any) -> tuple[Any, int]:
    return (
        planning.preset_machine(hardware, given.model, layout),
        planning.free_bytes(hardware, given.model, layout.itemsize),
    )


def _layers(shown: Any, heads: Any) -> Table:
    table = Table(title=f"planner {shown.planner}", title_justify="left")
    numbers = ("layer", "importance", "similarity", "threshold", "hard", "miss", "device us", "link us", "wait us")
    for column in (*numbers[:5], "resident", *numbers[5:]):
        table.add_column(column, justify="right" if column in numbers else "left")
    resident, p = dict(shown.resident), shown.prediction
    for layer in range(len(shown.thresholds)):
        tau = shown.thresholds[layer]
        table.add_row(
            str(layer), f"{heads.importance[layer].mean():.2f}", f"{heads.similarity[layer].mean():.2f}",
            f"{tau.min():.2f} to {tau.max():.2f}", str(int((shown.difficulty[layer] > 0).sum())),
            " ".join(map(str, resident.get(layer, ()))) or "-", f"{shown.miss[layer].mean():.2f}",
            *(f"{values[layer] * 1e6:.0f}" for values in (p.device_s, p.link_s, p.wait_s)),
        )  # fmt: skip
    return table


def _fits(found: Any, budget: int | None) -> bool | None:
    return None if budget is None else found.device_bytes <= budget


def _summary(plans: dict[Any, Any], budgets: dict[str, int | None]) -> Table:
    table = Table(title="what to expect", title_justify="left")
    numbers = ("resident", "N_p", "hit rate", "step ms", "waiting ms", "device KV", "fits", "host KV")
    for column in ("machine", "planner", *numbers):
        table.add_column(column, justify="right" if column in numbers else "left")
    for (name, kind), found in plans.items():
        table.add_row(
            f"{name}: {found.machine.source}" if kind == "none" else "", kind, str(found.num_resident),
            str(found.prefetchable), f"{found.prediction.hit_rate:.2f}", f"{found.prediction.step_s * 1e3:.2f}",
            f"{found.prediction.wait_s.sum() * 1e3:.2f}", _console.human_bytes(found.device_bytes),
            {None: "-", True: "yes", False: "no"}[_fits(found, budgets[name])], _console.human_bytes(found.host_bytes),
        )  # fmt: skip
    return table


def _compared(plans: dict[Any, Any], budgets: dict[str, int | None]) -> list[dict[str, Any]]:
    return [
        {
            "machine": name, "source": found.machine.source, "planner": kind, "resident_heads": found.num_resident,
            "prefetchable_heads": found.prefetchable, "hit_rate": found.prediction.hit_rate,
            "step_s": found.prediction.step_s, "wait_s": float(found.prediction.wait_s.sum()),
            "device_kv_bytes": found.device_bytes, "host_kv_bytes": found.host_bytes,
            "fits": _fits(found, budgets[name]),
        }
        for (name, kind), found in plans.items()
    ]  # fmt: skip


def _plain(shown: Any) -> dict[str, Any]:
    return {
        "planner": shown.planner,
        "resident_heads": [[layer, list(heads)] for layer, heads in shown.resident],
        "prefetchable_heads": shown.prefetchable,
        **{name: getattr(shown, name).tolist() for name in ("thresholds", "difficulty", "miss")},
        "device_s": shown.prediction.device_s.tolist(),
        "link_s": shown.prediction.link_s.tolist(),
        "wait_s": shown.prediction.wait_s.tolist(),
        "step_s": shown.prediction.step_s,
        "hit_rate": shown.prediction.hit_rate,
        "device_kv_bytes": shown.device_bytes,
        "host_kv_bytes": shown.host_bytes,
    }
