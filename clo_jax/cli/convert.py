"""`clo-jax convert`: a Hugging Face folder or a GGUF file to a checkpoint folder."""

import contextlib
import pathlib
from collections.abc import Callable, Iterator
from typing import Annotated

import typer

from clo_jax.cli import _console
from clo_jax.cli import _options as o

_STAGES = {"convert": "reading", "write": "writing", "verify": "verifying"}


@contextlib.contextmanager
def _bars() -> Iterator[Callable[[str, int, int], None]]:
    """A progress callback for `checkpoints.convert`: one bar (in MiB) for each stage."""
    with contextlib.ExitStack() as stack:
        stage, shown, advance = None, 0, None

        def report(name: str, done: int, total: int) -> None:
            nonlocal stage, shown, advance
            if name != stage:
                stack.close()
                advance = stack.enter_context(_console.progress(f"{_STAGES[name]} (MiB)", total >> 20))
                stage, shown = name, 0
            advance((done >> 20) - shown)
            shown = done >> 20

        yield report


def convert(
    source: Annotated[
        pathlib.Path, typer.Argument(metavar="SRC", help="Hugging Face folder (safetensors), or .gguf file.")
    ],
    out: Annotated[pathlib.Path, typer.Argument(metavar="OUT", help="Folder to be made.")],
    dtype: Annotated[
        o.DType, typer.Option("--dtype", help="Of the parameters; auto: the narrower that holds the source exactly.")
    ] = o.DType.auto,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare every tensor, and logits, with the source.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT when it is a checkpoint.")] = False,
    tokenizer: Annotated[
        pathlib.Path | None, typer.Option(metavar="FILE", help="A tokenizer.json in place of the source's.")
    ] = None,
    no_tokenizer: Annotated[bool, typer.Option("--no-tokenizer", help="Leave it out: token ids only.")] = False,
    json: o.Json = False,
    quiet: o.Quiet = False,
    no_progress: o.NoProgress = False,
    debug: o.Debug = False,
) -> None:
    """Convert a model to an Orbax checkpoint, all or nothing."""
    from clo_jax import checkpoints

    if tokenizer is not None and no_tokenizer:
        raise ValueError("--tokenizer: got a file together with --no-tokenizer, wanted one of them")
    with _bars() as report:
        result = checkpoints.convert(
            source,
            out,
            dtype=dtype.value,
            verify=verify,
            force=force,
            tokenizer=tokenizer,
            with_tokenizer=not no_tokenizer,
            progress=report,
        )
    for line in result.notes:
        _console.note(line)
    if json:
        _console.print_json(result)
        return
    print(
        f"{result.path}: {result.config.architecture}, {result.num_tensors} tensors, "
        f"{_console.human_bytes(result.num_bytes)} of {result.dtype}, {result.seconds:.1f} s"
    )
    if checked := result.verification:
        print(
            f"verified: {checked.num_tensors} tensors equal the source; logits differ by at most "
            f"{checked.logit_difference:.2g} (largest logit {checked.logit_scale:.3g})"
        )
