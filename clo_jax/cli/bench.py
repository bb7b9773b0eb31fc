"""`clo-jax bench decode|prefill|layer|transfer|memory|ablation`: how fast, and how much memory."""

import dataclasses
import pathlib
from typing import Annotated, Any

import typer

from clo_jax.cli import _bench_options as b
from clo_jax.cli import _bench_output as out
from clo_jax.cli import _console
from clo_jax.cli import _eval_options as e
from clo_jax.cli import _options as o

app = typer.Typer(
    name="bench",
    no_args_is_help=True,
    help="Measure speed and memory of the policies, beside full attention and what the machine can do.",
)


@app.command()
def decode(
    checkpoint: b.CheckpointOrShape = None,
    shape: b.Shape = None,
    layers: b.Layers = None,
    attention: e.AttentionList = b.POLICIES,
    sparsity: e.SparsityList = "0.1",
    lengths: e.Lengths = "32768",
    batches: b.Batches = "1",
    steps: Annotated[int, typer.Option(help="Decode steps that are timed.")] = 128,
    chunk: Annotated[int, typer.Option(help="Steps of one program.")] = 16,
    fill: Annotated[b.Fill, typer.Option(help="The cache: random rows, or a prefill of text.")] = b.Fill.synthetic,
    hits: Annotated[
        b.Hits, typer.Option(help="Of clo: as the model makes them (random weights: next to none), or replayed.")
    ] = b.Hits.real,
    hit_rate: Annotated[
        float | None, typer.Option(help="Share of lookups that hit, replayed.", show_default="0.79")
    ] = None,
    new_rows: Annotated[
        float | None, typer.Option(help="New rows of a refreshed set, replayed.", show_default="0.26")
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Calibration to replay.", show_default="the checkpoint's, if it has one"),
    ] = None,
    transformers: Annotated[
        pathlib.Path | None, typer.Option(metavar="GGUF", help="Run the checkpoint's origin in transformers, too.")
    ] = None,
    dtype: b.DType = o.DType.auto,
    preset: o.PresetOption = None,
    retriever: o.RetrieverOption = None,
    guess_from: o.GuessFromOption = None,
    kv_dtype: o.KvDtypeOption = None,
    vary: e.Vary = None,
    refresh: o.RefreshOption = None,
    retain: o.Retain = None,
    sim_threshold: o.SimThreshold = None,
    hash_bits: o.HashBits = None,
    recent_tokens: o.RecentTokens = None,
    backend: o.Backend = None,
    transfer_threads: o.TransferThreads = None,
    calibration: o.Calibration = None,
    planner: o.PlannerOption = None,
    kv_budget: o.KvBudget = None,
    json: e.JsonFile = None,
    plot: e.Plot = None,
    quiet: o.Quiet = False,
    no_progress: o.NoProgress = False,
    debug: o.Debug = False,
) -> None:
    """Decode steps by policy, length and batch: times, throughput, hits, rows moved, bytes, processor cores."""
    b.start()
    from clo_jax.bench import decode as bench
    from clo_jax.bench import decode_rows, rates, subject, tables, transformers_decode
    from clo_jax.cli import _bench_plots

    chosen = b.read_variants(
        checkpoint, attention, sparsity, preset, vary, retriever=retriever, guess_from=guess_from,
        kv_dtype=kv_dtype, refresh=refresh, retain=retain, sim_threshold=sim_threshold, hash_bits=hash_bits,
        recent_tokens=recent_tokens, backend=backend, transfer_threads=transfer_threads, calibration=calibration,
        planner=planner, kv_budget=kv_budget,
    )  # fmt: skip
    found = subject.find(checkpoint, shape, layers, dtype.value)
    if transformers is not None and checkpoint is None:
        raise ValueError("--transformers: got it with a --shape, wanted the checkpoint that was made of this file")
    pattern = b.read_pattern(found, hits, hit_rate, new_rows, trace)
    plan = bench.Plan(
        found, chosen, e.read_lengths(lengths), b.read_batches(batches), steps, chunk, fill.value, pattern
    )  # fmt: skip
    memory, link = rates.memory_rate(), rates.link_rate()

    def content(measured: Any, skipped: Any, more: Any = ()) -> dict[str, Any]:
        rows = [*decode_rows.rows(plan, measured, memory, link), *more]
        return out.kept(json, "bench decode", decode_rows.arguments(plan, skipped), rows)

    with _console.progress("measuring", bench.num_measurements(plan)) as advance:
        measured, skipped = bench.run(plan, content, b.told(advance))
        more = []
        if transformers is not None:
            full = {c: decode_rows.throughput(plan, 1, m) for (n, c, s), m in measured.items() if (n, s) == ("full", 1)}
            more = transformers_decode.rows(plan, transformers, full)
    out.skipped(skipped)
    made = content(measured, skipped, more)
    print(f"{tables.throughput(made)}\n\n{tables.decode(made)}" if 1 in plan.batches else tables.decode(made))
    if plot is not None:
        _bench_plots.draw_throughput(plot, made, out.title("decode", made))
    out.written(json, plot)


@app.command()
def prefill(
    checkpoint: b.CheckpointOrShape = None,
    shape: b.Shape = None,
    layers: b.Layers = None,
    attention: e.AttentionList = "clo",
    sparsity: e.SparsityList = "0.1",
    lengths: e.Lengths = "32768",
    batches: b.Batches = "1",
    repeats: Annotated[int, typer.Option(help="Prefills that are timed.")] = 5,
    dtype: b.DType = o.DType.auto,
    preset: o.PresetOption = None,
    retriever: o.RetrieverOption = None,
    kv_dtype: o.KvDtypeOption = None,
    vary: e.Vary = None,
    hash_bits: o.HashBits = None,
    backend: o.Backend = None,
    calibration: o.Calibration = None,
    json: e.JsonFile = None,
    plot: e.Plot = None,
    quiet: o.Quiet = False,
    no_progress: o.NoProgress = False,
    debug: o.Debug = False,
) -> None:
    """Time to the first token, with rows copied to the host and with all of them on the device."""
    b.start()
    from clo_jax.bench import prefill as bench
    from clo_jax.bench import subject, tables
    from clo_jax.cli import _bench_plots

    chosen = b.read_variants(
        checkpoint, attention, sparsity, preset, vary, retriever=retriever, kv_dtype=kv_dtype, hash_bits=hash_bits,
        backend=backend, calibration=calibration,
    )  # fmt: skip
    found = subject.find(checkpoint, shape, layers, dtype.value)
    plan = bench.Plan(found, chosen, e.read_lengths(lengths), b.read_batches(batches), repeats)

    def content(measured: Any, skipped: Any) -> dict[str, Any]:
        return out.kept(json, "bench prefill", bench.arguments(plan, skipped), bench.rows(plan, measured))

    with _console.progress("measuring", plan.num_measurements) as advance:
        measured, skipped = bench.run(plan, content, b.told(advance))
    out.skipped(skipped)
    made = content(measured, skipped)
    print(tables.prefill(made))
    if plot is not None:
        _bench_plots.draw_throughput(plot, made, out.title("prefill", made))
    out.written(json, plot)


@app.command()
def memory(
    checkpoint: b.CheckpointOrShape = None,
    shape: b.Shape = None,
    layers: b.Layers = None,
    attention: e.AttentionList = b.POLICIES,
    sparsity: e.SparsityList = "0.1",
    lengths: Annotated[
        str | None,
        typer.Option("--lengths", metavar="LIST", help="Tokens of context.", show_default="32K to 1M, or the model's"),
    ] = None,
    batches: b.Batches = "1",
    dtype: b.DType = o.DType.auto,
    preset: o.PresetOption = None,
    retriever: o.RetrieverOption = None,
    kv_dtype: o.KvDtypeOption = None,
    vary: e.Vary = None,
    retain: o.Retain = None,
    hash_bits: o.HashBits = None,
    recent_tokens: o.RecentTokens = None,
    calibration: o.Calibration = None,
    json: e.JsonFile = None,
    plot: e.Plot = None,
    quiet: o.Quiet = False,
    no_progress: o.NoProgress = False,
    debug: o.Debug = False,
) -> None:
    """What each policy keeps on the device and in host memory. Nothing is run."""
    from clo_jax.bench import decode_rows, subject, tables
    from clo_jax.bench import memory as bench
    from clo_jax.cli import _bench_plots

    chosen = b.read_variants(
        checkpoint, attention, sparsity, preset, vary, retriever=retriever, kv_dtype=kv_dtype, retain=retain,
        hash_bits=hash_bits, recent_tokens=recent_tokens, calibration=calibration,
    )  # fmt: skip
    found = subject.find(checkpoint, shape, layers, dtype.value)
    contexts = bench.contexts(found) if lengths is None else e.read_lengths(lengths)
    plan = bench.Plan(found, chosen, contexts, b.read_batches(batches))
    arguments = {
        "contexts": list(contexts), "batches": list(plan.batches), **found.describe(),
        "policies": decode_rows.policies(chosen),
    }  # fmt: skip
    made = out.kept(json, "bench memory", arguments, bench.rows(plan))
    print(tables.memory(made))
    if plot is not None:
        _bench_plots.draw_memory(plot, made, out.title("KV cache", made))
    out.written(json, plot)


@app.command()
def layer(
    shape: b.Shape = "llama3-8b",
    layers: Annotated[int, b.model_option("--layers", help="Of one program.")] = 8,
    context: Annotated[int, typer.Option(help="Tokens in the cache.")] = 131072,
    steps: Annotated[int, typer.Option(help="Decode steps of one program.")] = 64,
    repeats: Annotated[int, typer.Option(help="Timed programs of each case.")] = 5,
    retriever: o.RetrieverOption = None,
    guess_from: o.GuessFromOption = None,
    kv_dtype: o.KvDtypeOption = None,
    dtype: b.DType = o.DType.auto,
    backend: o.Backend = None,
    json: e.JsonFile = None,
    quiet: o.Quiet = False,
    no_progress: o.NoProgress = False,
    debug: o.Debug = False,
) -> None:
    """A decode layer with forced misses: what hits, misses and rows cost, transfers beside the program and in line."""
    b.start()
    from clo_jax.bench import layer as bench
    from clo_jax.bench import report, subject
    from clo_jax.config import CloConfig

    found = subject.find(None, shape, layers, dtype.value)
    clo = CloConfig(sparsity=0.1, retain=1.5, **o.given(retriever=retriever, guess_from=guess_from, kv_dtype=kv_dtype))
    model = dataclasses.replace(found.model, vocab_size=256)  # no layer has one
    rows = bench.measure(model, clo, context, steps, repeats, found.dtype, backend or "auto", _console.note)
    arguments = {"context": context, "steps": steps, "repeats": repeats, **found.describe(),
                 "clo": dataclasses.asdict(clo), "backend": backend or "auto"}  # fmt: skip
    print(report.markdown(out.kept(json, "layer", arguments, rows)))
    out.written(json, None)


@app.command()
def transfer(
    backends: Annotated[
        str, typer.Option(metavar="LIST", help="Transfer backends.", show_default="all that are here")
    ] = "",
    threads: Annotated[
        str, typer.Option(metavar="LIST", help="Numbers of copying threads.", show_default="each backend's own")
    ] = "",
    json: e.JsonFile = None,
    quiet: o.Quiet = False,
    no_progress: o.NoProgress = False,
    debug: o.Debug = False,
) -> None:
    """Transfer backends: scattered rows from host memory, beside a contiguous copy."""
    b.start()
    from clo_jax.bench import report
    from clo_jax.bench import transfer as bench

    names, numbers = e.split("--backends", backends, str), e.split("--threads", threads, int)
    rows, missing = bench.rows(names, numbers or [None])
    for name, why in missing.items():
        _console.note(f"{name}: not here: {why}")
    arguments = {"backends": names, "threads": numbers, "missing": missing}
    print(report.markdown(out.kept(json, "bench transfer", arguments, rows)))
    out.written(json, None)


@app.command()
def ablation(
    checkpoint: o.Checkpoint,
    prompts: Annotated[int, typer.Option(help="Questions about a hidden number.")] = 100,
    shortest: Annotated[int, typer.Option(help="Tokens of the shortest document.")] = 500,
    longest: Annotated[int, typer.Option(help="Tokens of the longest document.")] = 7000,
    seed: Annotated[int, typer.Option(help="Of the documents.")] = 5000,
    dtype: o.DTypeOption = o.DType.auto,
    backend: o.Backend = None,
    json: e.JsonFile = None,
    quiet: o.Quiet = False,
    no_progress: o.NoProgress = False,
    debug: o.Debug = False,
) -> None:
    """The paper's parts one by one: thresholds by head, groups that decide together, resident heads as planned."""
    b.start()
    from clo_jax.bench import ablation as bench
    from clo_jax.bench import report

    def content(arguments: Any, rows: Any) -> dict[str, Any]:
        return out.kept(json, "ablation", arguments, rows)

    found = bench.run(
        checkpoint, prompts, shortest, longest, dtype.value, backend or "auto", seed, content, _console.note
    )  # fmt: skip
    print(report.markdown(content(*found)))
    out.written(json, None)
