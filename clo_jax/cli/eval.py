"""`clo-jax eval ruler|niah|longbench|ppl`: what a lossy cache costs in accuracy, beside full attention."""

import pathlib
from typing import Annotated, Any

import typer

from clo_jax.cli import _console
from clo_jax.cli import _eval_options as e
from clo_jax.cli import _options as o

app = typer.Typer(
    name="eval",
    no_args_is_help=True,
    help="Measure accuracy against full attention, on tasks over long texts or along a text.",
)
_ATTENTION = "full,clo,exact"
_FEW = 10  # a bootstrap of fewer samples knows little of their spread
_FOLDER = pathlib.Path("clo-jax-eval")


@app.command()
def ruler(
    checkpoint: o.Checkpoint,
    attention: e.AttentionList = _ATTENTION,
    sparsity: e.SparsityList = "0.1",
    lengths: e.Lengths = "4096",
    samples: e.Samples = 50,
    tasks: Annotated[
        str | None, e.sample("--tasks", metavar="LIST", help="Tasks by name.", show_default="all 13")
    ] = None,
    seed: e.Seed = 0,
    chat: e.Chat = None,
    haystack: e.Haystack = None,
    squad: Annotated[pathlib.Path | None, e.sample("--squad", metavar="FILE", help="SQuAD's JSON, for qa_1.")] = None,
    hotpot: Annotated[
        pathlib.Path | None, e.sample("--hotpot", metavar="FILE", help="HotpotQA's JSON, for qa_2.")
    ] = None,
    recall: e.Recall = 1,
    folder: e.Folder = _FOLDER,
    batch: e.Batch = 1,
    dtype: o.DTypeOption = o.DType.auto,
    preset: o.PresetOption = None,
    refresh: o.RefreshOption = None,
    retain: o.Retain = None,
    guess_from: o.GuessFromOption = None,
    kv_dtype: o.KvDtypeOption = None,
    sim_threshold: o.SimThreshold = None,
    hash_bits: o.HashBits = None,
    recent_tokens: o.RecentTokens = None,
    backend: o.Backend = None,
    calibration: o.Calibration = None,
    planner: o.PlannerOption = None,
    kv_budget: o.KvBudget = None,
    vary: e.Vary = None,
    json: e.JsonFile = None,
    plot: e.Plot = None,
    quiet: o.Quiet = False,
    no_progress: o.NoProgress = False,
    debug: o.Debug = False,
) -> None:
    """RULER: 13 tasks over long texts. Scores by task, means, and the loss against full attention."""
    from clo_jax.eval.ruler import TASKS
    from clo_jax.eval.runner import Plan
    from clo_jax.eval.sources import Sources

    names = list(TASKS) if tasks is None else e.split("--tasks", tasks, str)
    unknown = [name for name in names if name not in TASKS]
    if unknown:
        raise ValueError(f"--tasks: got {unknown[0]!r}, wanted {', '.join(TASKS)}")
    chosen = e.read_variants(
        checkpoint, attention, sparsity, preset, vary, refresh=refresh, retain=retain, guess_from=guess_from,
        kv_dtype=kv_dtype, sim_threshold=sim_threshold, hash_bits=hash_bits, recent_tokens=recent_tokens,
        backend=backend, calibration=calibration, planner=planner, kv_budget=kv_budget,
    )  # fmt: skip
    plan = Plan(
        "ruler", checkpoint, tuple(TASKS[name] for name in dict.fromkeys(names)), chosen, e.read_lengths(lengths),
        samples, seed, chat, dtype.value, batch, Sources.read(haystack, squad, hotpot), folder, recall,
    )  # fmt: skip
    _run_tasks(plan, json, plot, "draw_scores")


@app.command()
def niah(
    checkpoint: o.Checkpoint,
    attention: e.AttentionList = _ATTENTION,
    sparsity: e.SparsityList = "0.1",
    lengths: e.Lengths = "1024,2048,4096",
    depths: Annotated[
        str, e.sample("--depths", metavar="LIST", help="Shares of the text before the needle.")
    ] = "0,0.25,0.5,0.75,1",
    samples: e.Samples = 10,
    seed: e.Seed = 0,
    chat: e.Chat = None,
    haystack: e.Haystack = None,
    recall: e.Recall = 1,
    folder: e.Folder = _FOLDER,
    batch: e.Batch = 1,
    dtype: o.DTypeOption = o.DType.auto,
    preset: o.PresetOption = None,
    refresh: o.RefreshOption = None,
    retain: o.Retain = None,
    guess_from: o.GuessFromOption = None,
    kv_dtype: o.KvDtypeOption = None,
    sim_threshold: o.SimThreshold = None,
    hash_bits: o.HashBits = None,
    recent_tokens: o.RecentTokens = None,
    backend: o.Backend = None,
    calibration: o.Calibration = None,
    planner: o.PlannerOption = None,
    kv_budget: o.KvBudget = None,
    vary: e.Vary = None,
    json: e.JsonFile = None,
    plot: e.Plot = None,
    quiet: o.Quiet = False,
    no_progress: o.NoProgress = False,
    debug: o.Debug = False,
) -> None:
    """Needle in a haystack: a number hidden at each depth of texts of each length; --plot draws heat maps."""
    from clo_jax.eval import niah as grid
    from clo_jax.eval.runner import Plan
    from clo_jax.eval.sources import Sources

    chosen = e.read_variants(
        checkpoint, attention, sparsity, preset, vary, refresh=refresh, retain=retain, guess_from=guess_from,
        kv_dtype=kv_dtype, sim_threshold=sim_threshold, hash_bits=hash_bits, recent_tokens=recent_tokens,
        backend=backend, calibration=calibration, planner=planner, kv_budget=kv_budget,
    )  # fmt: skip
    plan = Plan(
        "niah", checkpoint, grid.tasks(e.split("--depths", depths, float)), chosen, e.read_lengths(lengths), samples,
        seed, chat, dtype.value, batch, Sources.read(haystack), folder, recall,
    )  # fmt: skip
    _run_tasks(plan, json, plot, "draw_grid")


@app.command()
def longbench(
    checkpoint: o.Checkpoint,
    data: Annotated[pathlib.Path, e.sample("--data", metavar="FOLDER", help="The published NAME.jsonl files.")],
    attention: e.AttentionList = _ATTENTION,
    sparsity: e.SparsityList = "0.1",
    lengths: e.Lengths = "4096",
    samples: e.Samples = 200,
    tasks: Annotated[
        str | None, e.sample("--tasks", metavar="LIST", help="Sets by name.", show_default="all that are there")
    ] = None,
    chat: e.Chat = None,
    recall: e.Recall = 1,
    folder: e.Folder = _FOLDER,
    batch: e.Batch = 1,
    dtype: o.DTypeOption = o.DType.auto,
    preset: o.PresetOption = None,
    refresh: o.RefreshOption = None,
    retain: o.Retain = None,
    guess_from: o.GuessFromOption = None,
    kv_dtype: o.KvDtypeOption = None,
    sim_threshold: o.SimThreshold = None,
    hash_bits: o.HashBits = None,
    recent_tokens: o.RecentTokens = None,
    backend: o.Backend = None,
    calibration: o.Calibration = None,
    planner: o.PlannerOption = None,
    kv_budget: o.KvBudget = None,
    vary: e.Vary = None,
    json: e.JsonFile = None,
    plot: e.Plot = None,
    quiet: o.Quiet = False,
    no_progress: o.NoProgress = False,
    debug: o.Debug = False,
) -> None:
    """LongBench: up to 21 sets of real texts. Those longer than a length lose their middle, as in the original."""
    from clo_jax.eval import longbench as sets
    from clo_jax.eval.runner import Plan
    from clo_jax.eval.sources import Sources

    chosen = e.read_variants(
        checkpoint, attention, sparsity, preset, vary, refresh=refresh, retain=retain, guess_from=guess_from,
        kv_dtype=kv_dtype, sim_threshold=sim_threshold, hash_bits=hash_bits, recent_tokens=recent_tokens,
        backend=backend, calibration=calibration, planner=planner, kv_budget=kv_budget,
    )  # fmt: skip
    names = None if tasks is None else e.split("--tasks", tasks, str)
    plan = Plan(
        "longbench", checkpoint, sets.read(data, names), chosen, e.read_lengths(lengths), samples, 0, chat, dtype.value,
        batch, Sources(), folder, recall,
    )  # fmt: skip
    _run_tasks(plan, json, plot, "draw_scores")


@app.command()
def ppl(
    checkpoint: o.Checkpoint,
    attention: e.AttentionList = _ATTENTION,
    sparsity: e.SparsityList = "0.1",
    lengths: Annotated[
        str, typer.Option("--lengths", metavar="LIST", help="Tokens of the text, the decoded ones included.")
    ] = "4096",
    tokens: Annotated[int, e.sample("--tokens", help="Tokens at the end of each length that are decoded.")] = 512,
    recall_tokens: Annotated[
        int, e.sample("--recall-tokens", help="First decoded tokens at which selection recall is measured; 0: none.")
    ] = 32,
    text: Annotated[
        pathlib.Path | None,
        e.sample("--text", metavar="FILE", help="The text, from its beginning.", show_default="generated prose"),
    ] = None,
    seed: e.Seed = 0,
    dtype: o.DTypeOption = o.DType.auto,
    preset: o.PresetOption = None,
    refresh: o.RefreshOption = None,
    retain: o.Retain = None,
    guess_from: o.GuessFromOption = None,
    kv_dtype: o.KvDtypeOption = None,
    sim_threshold: o.SimThreshold = None,
    hash_bits: o.HashBits = None,
    recent_tokens: o.RecentTokens = None,
    backend: o.Backend = None,
    calibration: o.Calibration = None,
    planner: o.PlannerOption = None,
    kv_budget: o.KvBudget = None,
    vary: e.Vary = None,
    json: e.JsonFile = None,
    plot: e.Plot = None,
    quiet: o.Quiet = False,
    no_progress: o.NoProgress = False,
    debug: o.Debug = False,
) -> None:
    """Perplexity of a text, and at each token the divergence (KL) from what full attention predicts."""
    from clo_jax.cli import _eval_plots, _eval_tables
    from clo_jax.eval import divergence

    chosen = e.read_variants(
        checkpoint, attention, sparsity, preset, vary, refresh=refresh, retain=retain, guess_from=guess_from,
        kv_dtype=kv_dtype, sim_threshold=sim_threshold, hash_bits=hash_bits, recent_tokens=recent_tokens,
        backend=backend, calibration=calibration, planner=planner, kv_budget=kv_budget,
    )  # fmt: skip
    plan = divergence.Plan(checkpoint, chosen, e.read_lengths(lengths), tokens, text, seed, dtype.value, recall_tokens)
    outcome = divergence.run(plan, _console.progress)
    _console.stdout().print(_eval_tables.divergences(outcome.results))
    if json is not None:
        _eval_tables.write_divergences(json, outcome)
        _console.note(f"{json}: written")
    if plot is not None:
        _eval_plots.draw_divergences(plot, outcome.results, f"{pathlib.Path(checkpoint).name}, text: {outcome.text}")
        _console.note(f"{plot}: written")


def _run_tasks(plan: Any, json: pathlib.Path | None, plot: pathlib.Path | None, draw: str) -> None:
    """Runs a suite and reports; `draw`: the function that makes its picture."""
    from clo_jax.cli import _eval_plots, _eval_tables
    from clo_jax.eval.runner import run
    from clo_jax.eval.summary import summarize

    outcome = run(plan, _console.progress)
    for task, what in outcome.skipped.items():
        _console.note(f"{task}: left out, it needs {what}")
    for (length, task), number in outcome.left_out.items():
        if number:
            _console.note(f"{task} at {length} tokens: {number} prompts do not fit and are left out")
    for name, number in _eval_tables.cut(outcome).items():
        _console.note(f"{name}: {number} texts have lost their middle")
    if plan.samples < _FEW:
        _console.note(f"{plan.samples} samples a task: intervals of means and losses say little with so few")
    summaries = summarize(outcome)
    console = _console.stdout()
    console.print(_eval_tables.overview(summaries))
    for length in plan.lengths:
        console.print(_eval_tables.by_task(summaries, length))
    if json is not None:
        _eval_tables.write(json, outcome, summaries)
        _console.note(f"{json}: written")
    if plot is not None:
        title = f"{plan.suite}, {pathlib.Path(plan.checkpoint).name}, {plan.samples} samples a task and length"
        getattr(_eval_plots, draw)(plot, summaries, title)
        _console.note(f"{plot}: written")
    _console.note(f"answers: {outcome.file}")
