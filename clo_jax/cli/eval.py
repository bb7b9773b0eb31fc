"""`clo-jax eval ruler|niah`: what a lossy cache costs in accuracy, beside full attention on the same prompts."""

import pathlib
from typing import Annotated, Any

import typer

from clo_jax.cli import _console
from clo_jax.cli import _options as o

app = typer.Typer(
    name="eval", no_args_is_help=True, help="Measure accuracy against full attention, on generated tasks or a text."
)

SAMPLES_PANEL = "Samples"
_ATTENTION = "full,clo,exact"


def _sample(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=SAMPLES_PANEL, **more)


AttentionList = Annotated[
    str,
    typer.Option("--attention", metavar="LIST", help="Policies; exact: the keys themselves in place of codes."),
]
SparsityList = Annotated[
    str,
    typer.Option("--sparsity", metavar="LIST", help="Shares of the context that are selected; each policy at each."),
]
Lengths = Annotated[str, typer.Option("--lengths", metavar="LIST", help="Tokens of prompt and answer together.")]
Samples = Annotated[int, _sample("--samples", help="Prompts of each task and length.")]
Seed = Annotated[int, _sample("--seed", help="Of the prompts.")]
Chat = Annotated[
    bool | None, _sample("--chat/--no-chat", help="Use the chat template.", show_default="when there is one")
]
Haystack = Annotated[
    pathlib.Path | None,
    _sample("--haystack", metavar="FILE", help="Text to hide needles in.", show_default="generated prose"),
]
Folder = Annotated[
    pathlib.Path, _sample("--folder", help="Keeps samples and answers; a run that was interrupted goes on from there.")
]
Batch = Annotated[int, typer.Option("--batch", help="Prompts that are answered at once.")]
JsonFile = Annotated[
    pathlib.Path | None,
    typer.Option("--json", metavar="FILE", help="Results file to write.", rich_help_panel=o.OUTPUT_PANEL),
]
Plot = Annotated[
    pathlib.Path | None,
    typer.Option("--plot", metavar="PNG", help="The scores as a picture.", rich_help_panel=o.OUTPUT_PANEL),
]


def split(option: str, text: str, kind: Any) -> list[Any]:
    """The items of a comma-separated list.

    Raises:
      ValueError: an item that is not of the kind; names the option.
    """
    found = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        try:
            found.append(kind(item))
        except ValueError:
            what = {int: "integers", float: "numbers"}[kind]
            raise ValueError(f"{option}: got {item!r}, wanted {what} with commas between them") from None
    return found


def read_variants(checkpoint: str, attention: str, sparsity: str, preset: Any, loading: dict[str, Any], **clo: Any):
    """The policies to compare. What the flags leave open of CLO comes from the calibration, as in `LLM.load`."""
    from clo_jax.cache import calibration
    from clo_jax.checkpoints import read_info
    from clo_jax.eval.variants import variants

    load = o.load_options(o.Attention.clo, preset, **clo, **loading)
    config = load.pop("clo", None)
    load.pop("attention")
    if config is None:
        from clo_jax.config import CloConfig

        model, info = read_info(checkpoint)
        given = load.get("calibration", "auto")
        found = calibration.find(given, info.path, info.manifest.source_files, model)
        choice = found.choice if found else None
        config = CloConfig(retriever=choice.retriever, hash_bits=choice.hash_bits) if choice else CloConfig()
    return tuple(variants(split("--attention", attention, str), split("--sparsity", sparsity, float), config, load))


def _answer(plan: Any, json: pathlib.Path | None, plot: pathlib.Path | None, draw: str) -> None:
    """Runs a suite and reports."""
    from clo_jax.cli import _eval_plots, _eval_tables
    from clo_jax.eval.runner import run
    from clo_jax.eval.summary import summarize

    outcome = run(plan, _console.progress)
    for task, source in outcome.skipped.items():
        _console.note(f"{task}: left out, it needs --{source} FILE")
    for (length, task), number in outcome.left_out.items():
        if number:
            _console.note(f"{task} at {length} tokens: {number} of {plan.samples} prompts do not fit and are left out")
    summaries = summarize(outcome)
    console = _console.stdout()
    console.print(_eval_tables.overview(summaries))
    for length in plan.lengths:
        console.print(_eval_tables.by_task(summaries, length))
    if json is not None:
        _eval_tables.write(json, outcome, summaries)
        _console.note(f"{json}: written")
    if plot is not None:
        title = (
            f"{plan.suite}, {pathlib.Path(plan.checkpoint).name}, {plan.samples} samples a task and length; "
            "bars: intervals of 95 % (bootstrap)"
        )
        getattr(_eval_plots, draw)(plot, summaries, title)
        _console.note(f"{plot}: written")
    _console.note(f"answers: {outcome.file}")


@app.command()
def ruler(
    checkpoint: o.Checkpoint,
    attention: AttentionList = _ATTENTION,
    sparsity: SparsityList = "0.1",
    lengths: Lengths = "4096",
    samples: Samples = 50,
    tasks: Annotated[
        str | None, _sample("--tasks", metavar="LIST", help="Tasks by name.", show_default="all 13")
    ] = None,
    seed: Seed = 0,
    chat: Chat = None,
    haystack: Haystack = None,
    squad: Annotated[pathlib.Path | None, _sample("--squad", metavar="FILE", help="SQuAD's JSON, for qa_1.")] = None,
    hotpot: Annotated[
        pathlib.Path | None, _sample("--hotpot", metavar="FILE", help="HotpotQA's JSON, for qa_2.")
    ] = None,
    folder: Folder = pathlib.Path("clo-jax-eval"),
    batch: Batch = 1,
    dtype: o.DTypeOption = o.DType.auto,
    preset: o.PresetOption = None,
    refresh: o.RefreshOption = None,
    retain: o.Retain = None,
    sim_threshold: o.SimThreshold = None,
    hash_bits: o.HashBits = None,
    recent_tokens: o.RecentTokens = None,
    backend: o.Backend = None,
    calibration: o.Calibration = None,
    planner: o.PlannerOption = None,
    kv_budget: o.KvBudget = None,
    json: JsonFile = None,
    plot: Plot = None,
    quiet: o.Quiet = False,
    no_progress: o.NoProgress = False,
    debug: o.Debug = False,
) -> None:
    """RULER: 13 tasks over long texts. Scores by task, means, and the loss against full attention."""
    from clo_jax.eval.ruler import TASKS
    from clo_jax.eval.runner import Plan
    from clo_jax.eval.sources import Sources

    names = list(TASKS) if tasks is None else split("--tasks", tasks, str)
    unknown = [name for name in names if name not in TASKS]
    if unknown:
        raise ValueError(f"--tasks: got {unknown[0]!r}, wanted {', '.join(TASKS)}")
    loading = {"backend": backend, "calibration": calibration, "planner": planner, "kv_budget": kv_budget}
    clo = {"refresh": refresh, "retain": retain, "sim_threshold": sim_threshold, "hash_bits": hash_bits}
    chosen = read_variants(checkpoint, attention, sparsity, preset, loading, recent_tokens=recent_tokens, **clo)
    plan = Plan(
        "ruler", checkpoint, tuple(TASKS[name] for name in dict.fromkeys(names)), chosen,
        tuple(sorted(set(split("--lengths", lengths, int)))), samples, seed, chat, dtype.value, batch,
        Sources.read(haystack, squad, hotpot), folder,
    )  # fmt: skip
    _answer(plan, json, plot, "draw_scores")
