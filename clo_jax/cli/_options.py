"""Options that several commands share, and how they become configurations."""

import enum
from typing import Annotated, Any

import typer

from clo_jax.cli import _console
from clo_jax.config import CloConfig
from clo_jax.rivals import RIVALS

CLO_PANEL = "CLO (with --attention clo)"
SAMPLING_PANEL = "Sampling"
OUTPUT_PANEL = "Output"


class Attention(enum.StrEnum):
    full = "full"
    clo = "clo"
    exact = "exact"
    infinigen = "infinigen"
    pqcache = "pqcache"
    retroinfer = "retroinfer"


class Preset(enum.StrEnum):
    paper = "paper"


class Retriever(enum.StrEnum):
    sign = "sign"
    hata = "hata"
    exact = "exact"


class Refresh(enum.StrEnum):
    whole = "whole"
    delta = "delta"


class KvDtype(enum.StrEnum):
    auto = "auto"
    int8 = "int8"
    fp8 = "fp8"


class GuessFrom(enum.StrEnum):
    input = "input"
    attention = "attention"


class Planner(enum.StrEnum):
    none = "none"
    paper = "paper"
    cost = "cost"


class DType(enum.StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def _set(name: str, value_when_given: bool):
    def callback(given: bool) -> bool:
        if given:
            setattr(_console.verbosity, name, value_when_given)
        return given

    return callback


Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet", help="No notes and no progress.", callback=_set("quiet", True), rich_help_panel=OUTPUT_PANEL
    ),
]
NoProgress = Annotated[
    bool,
    typer.Option(
        "--no-progress", help="No progress bars.", callback=_set("progress", False), rich_help_panel=OUTPUT_PANEL
    ),
]
Debug = Annotated[
    bool,
    typer.Option("--debug", help="Traceback with errors.", callback=_set("debug", True), rich_help_panel=OUTPUT_PANEL),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.", rich_help_panel=OUTPUT_PANEL)]


def _clo(*names: str, help: str, default: str | bool = False) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=CLO_PANEL, show_default=default)


def _sampling(*names: str, help: str, default: str | bool = False) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=SAMPLING_PANEL, show_default=default)


Checkpoint = Annotated[str, typer.Argument(metavar="CKPT", help="Folder written by `clo-jax convert`.")]
AttentionOption = Annotated[
    Attention,
    typer.Option("--attention", help="full: the whole KV cache on the device. docs/policies.md has them all."),
]
MaxContext = Annotated[
    int | None, typer.Option(help="Tokens of prompt and answer to make room for.", show_default="the model's")
]
MaxNewTokens = Annotated[
    int | None, typer.Option(help="Longest answer in tokens.", show_default="256, or what the context has room for")
]
DTypeOption = Annotated[DType, typer.Option("--dtype", help="Of weights, activations and KV rows.")]

PresetOption = Annotated[
    Preset | None,
    _clo("--preset", help="paper: whole refresh, no retained rows, hata, 0.8, input; other flags still override."),
]
Sparsity = Annotated[float | None, _clo("--sparsity", help="Share of the context that is selected.", default="0.1")]
RetrieverOption = Annotated[
    Retriever | None, _clo("--retriever", help="How rows are scored; exact reads all keys.", default="sign")
]
RefreshOption = Annotated[
    Refresh | None, _clo("--refresh", help="On a miss: move the whole set or the difference.", default="delta")
]
Retain = Annotated[
    float | None, _clo("--retain", help="Buffer of a head as a multiple of k.", default="1.5; 1 with --refresh whole")
]
GuessFromOption = Annotated[
    GuessFrom | None,
    _clo(
        "--guess-from",
        help="Queries from the input of the layer before, or from after its attention.",
        default="attention",
    ),
]
KvDtypeOption = Annotated[
    KvDtype | None,
    _clo("--kv-dtype", help="Of offloaded rows, on the host and selected; int8, fp8: half the bytes.", default="auto"),
]
SimThreshold = Annotated[
    float | None, _clo("--sim-threshold", help="Cosine that counts as a hit; 1 refreshes always.", default="0.9")
]
ImportancePower = Annotated[float | None, _clo("--importance-power", help="n of Eq. 8.", default="3")]
ReuseMargin = Annotated[
    float | None,
    _clo("--reuse-margin", help="epsilon of Eq. 11; takes effect with a --planner.", default="0.1"),
]
HashBits = Annotated[int | None, _clo("--hash-bits", help="Bits of a key's code, multiple of 32.", default="256")]
SinkTokens = Annotated[int | None, _clo("--sink-tokens", help="First tokens, always attended.", default="4")]
RecentTokens = Annotated[
    int | None, _clo("--recent-tokens", help="Newest tokens, always attended (at least).", default="64")
]
KvOffload = Annotated[
    bool | None,
    _clo("--kv-offload/--no-kv-offload", help="Off: same selection, rows stay put; for comparison.", default="on"),
]
Backend = Annotated[str | None, _clo("--backend", help="Who moves the rows (see doctor).", default="auto")]
Calibration = Annotated[
    str | None,
    _clo("--calibration", help="A calibration's folder; none: run without.", default="the checkpoint's own"),
]
PlannerOption = Annotated[
    Planner | None,
    _clo("--planner", help="Which heads stay on the device: layer 0, Eq. 11-13, or the fastest step.", default="none"),
]
KvBudget = Annotated[
    int | None,
    _clo("--kv-budget", help="Bytes that --planner cost may fill.", default="most of what the device has free"),
]
Adapt = Annotated[
    bool | None,
    _clo("--adapt/--no-adapt", help="Revise the plan between requests when the workload drifts.", default="off"),
]
TransferThreads = Annotated[int | None, _clo("--transfer-threads", help="Copying threads.", default="by the backend")]

DoSample = Annotated[bool, _sampling("--do-sample", help="Draw tokens; without it the likeliest one is taken.")]
Temperature = Annotated[float | None, _sampling("--temperature", help="Above 1: more even.", default="1.0")]
TopK = Annotated[int | None, _sampling("--top-k", help="Draw from the k likeliest; 0: all.", default="0")]
TopP = Annotated[float | None, _sampling("--top-p", help="Draw from the likeliest that add up to p.", default="1.0")]
Seed = Annotated[int, typer.Option("--seed", help="Of the drawing.", rich_help_panel=SAMPLING_PANEL)]


def flag(name: str) -> str:
    """Keyword to flag: sim_threshold -> --sim-threshold; kv_offload given as False is --no-kv-offload."""
    return "--" + name.replace("_", "-")


def given(**options: Any) -> dict[str, Any]:
    """The options that were typed (not None), enums as plain strings."""
    return {
        name: value.value if isinstance(value, enum.Enum) else value
        for name, value in options.items()
        if value is not None
    }


def _names(typed: dict[str, Any]) -> str:
    return ", ".join("--no-" + flag(n)[2:] if v is False else flag(n) for n, v in typed.items())


def load_options(attention: Attention, preset: Preset | None, **options: Any) -> dict[str, Any]:
    """Keyword arguments of LLM.load from the CLO flags as typed (None: not typed). --sparsity is also the budget of the
    policies that CLO is compared with.

    Raises ValueError naming every CLO flag that was typed together with another policy.
    """
    typed = given(preset=preset, **options)
    if attention.value in RIVALS:
        budget = {name: typed.pop(name) for name in ("sparsity",) if name in typed}
        if typed:
            raise ValueError(
                f"--attention {attention.value}: got {_names(typed)}, wanted no CLO flags but --sparsity (they have no "
                "effect on it)"
            )
        return {"attention": attention.value, "rival": RIVALS[attention.value](**budget)}
    if attention is Attention.full:
        if typed:
            raise ValueError(
                f"--attention full: got {_names(typed)}, wanted no CLO flags (they have no effect on full attention)"
            )
        return {"attention": "full"}
    typed.pop("preset", None)
    loading = ("kv_offload", "backend", "transfer_threads", "calibration", "planner", "kv_budget", "adapt")
    transfer = {name: typed.pop(name) for name in loading if name in typed}
    if transfer.get("calibration") == "none":
        transfer["calibration"] = None
    if not typed and preset is None:
        return {"attention": "clo", **transfer}  # the calibration may then choose the retriever
    if typed.get("refresh") == "whole":
        typed.setdefault("retain", 1.0)
    clo = CloConfig.paper(**typed) if preset is Preset.paper else CloConfig(**typed)
    return {"attention": "clo", "clo": clo, **transfer}


def sampling_options(do_sample: bool, seed: int, **options: Any) -> dict[str, Any]:
    """Keyword arguments of LLM.generate. Raises ValueError for sampling flags without --do-sample."""
    typed = given(**options)
    if typed and not do_sample:
        names = ", ".join(flag(name) for name in typed)
        raise ValueError(f"--do-sample: not given, wanted together with {names} (greedy decoding ignores them)")
    return {"do_sample": do_sample, "seed": seed, **typed}
