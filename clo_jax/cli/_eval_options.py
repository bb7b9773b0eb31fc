"""Options that the commands of `clo-jax eval` share, and how they become policies to compare."""

import pathlib
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from clo_jax.cli import _options as o

SAMPLES_PANEL = "Samples"


def sample(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=SAMPLES_PANEL, **more)


AttentionList = Annotated[str, typer.Option("--attention", metavar="LIST", help="Policies: see docs/policies.md.")]
SparsityList = Annotated[
    str,
    typer.Option("--sparsity", metavar="LIST", help="Shares of the context that are selected; each policy at each."),
]
Vary = Annotated[
    list[str] | None,
    typer.Option(
        "--vary", metavar="SETTINGS", help="CLO once more with settings such as retain=1,refresh=whole; repeatable.",
        rich_help_panel=o.CLO_PANEL,
    ),
]  # fmt: skip
Lengths = Annotated[str, typer.Option("--lengths", metavar="LIST", help="Tokens of prompt and answer together.")]
Samples = Annotated[int, sample("--samples", help="Prompts of each task and length.")]
Seed = Annotated[int, sample("--seed", help="Of what is generated.")]
Chat = Annotated[
    bool | None, sample("--chat/--no-chat", help="Use the chat template.", show_default="when there is one")
]
Haystack = Annotated[
    pathlib.Path | None,
    sample("--haystack", metavar="FILE", help="Text to hide needles in.", show_default="generated prose"),
]
Folder = Annotated[
    pathlib.Path, sample("--folder", help="Keeps samples and answers; a run that was interrupted goes on from there.")
]
Batch = Annotated[int, typer.Option("--batch", help="Prompts that are answered at once.")]
Recall = Annotated[
    int,
    sample("--recall", help="Samples of each task and length along which selection recall is measured; 0: it is not."),
]
JsonFile = Annotated[
    pathlib.Path | None,
    typer.Option("--json", metavar="FILE", help="Results file to write.", rich_help_panel=o.OUTPUT_PANEL),
]
Plot = Annotated[
    pathlib.Path | None,
    typer.Option("--plot", metavar="PNG", help="The results as a picture.", rich_help_panel=o.OUTPUT_PANEL),
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


def read_lengths(text: str) -> tuple[int, ...]:
    """Ascending, each once."""
    return tuple(sorted(set(split("--lengths", text, int))))


def read_variants(
    checkpoint: str, attention: str, sparsity: str, preset: o.Preset | None, vary: Sequence[str] | None = None,
    **options: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """The policies to compare. `vary`: settings to compare CLO with itself by. `options`: the flags of CLO but the
    sparsity, as typed; what they leave open comes from the calibration, as in `LLM.load`."""
    from clo_jax.cache import calibration
    from clo_jax.checkpoints import read_info
    from clo_jax.config import CloConfig
    from clo_jax.eval.variants import variants, varied

    load = o.load_options(o.Attention.clo, preset, **options)
    config = load.pop("clo", None)
    load.pop("attention")
    if config is None:
        model, info = read_info(checkpoint)
        found = calibration.find(load.get("calibration", "auto"), info.path, info.manifest.source_files, model)
        choice = found.choice if found else None
        config = CloConfig(retriever=choice.retriever, hash_bits=choice.hash_bits) if choice else CloConfig()
    ways = variants(split("--attention", attention, str), split("--sparsity", sparsity, float), config, load)
    return tuple(varied(ways, vary or ()))
