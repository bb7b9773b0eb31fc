"""`clo-jax chat`: a conversation with the chat template."""

from collections.abc import Callable
from typing import Annotated, Any

import typer

from clo_jax.cli import _console
from clo_jax.cli import _options as o


def chat(
    checkpoint: o.Checkpoint,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    attention: o.AttentionOption = o.Attention.clo,
    max_context: o.MaxContext = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.")] = 256,
    dtype: o.DTypeOption = o.DType.auto,
    preset: o.PresetOption = None,
    sparsity: o.Sparsity = None,
    retriever: o.RetrieverOption = None,
    refresh: o.RefreshOption = None,
    retain: o.Retain = None,
    guess_from: o.GuessFromOption = None,
    kv_dtype: o.KvDtypeOption = None,
    sim_threshold: o.SimThreshold = None,
    backend: o.Backend = None,
    calibration: o.Calibration = None,
    planner: o.PlannerOption = None,
    kv_budget: o.KvBudget = None,
    adapt: o.Adapt = None,
    do_sample: o.DoSample = False,
    temperature: o.Temperature = None,
    top_k: o.TopK = None,
    top_p: o.TopP = None,
    seed: o.Seed = 0,
    quiet: o.Quiet = False,
    no_progress: o.NoProgress = False,
    debug: o.Debug = False,
) -> None:
    """Talk to a model. /quit or end of input leaves; Ctrl-C cancels the running answer."""
    load = o.load_options(
        attention,
        preset,
        sparsity=sparsity,
        retriever=retriever,
        refresh=refresh,
        retain=retain,
        guess_from=guess_from,
        kv_dtype=kv_dtype,
        sim_threshold=sim_threshold,
        backend=backend,
        calibration=calibration,
        planner=planner,
        kv_budget=kv_budget,
        adapt=adapt,
    )
    options = o.sampling_options(do_sample, seed, temperature=temperature, top_k=top_k, top_p=top_p)

    from clo_jax.llm import LLM

    with _console.progress("loading"):
        llm = LLM.load(
            checkpoint, dtype=dtype.value, max_context=max_context, max_batch=1, pinning=_console.pinning, **load
        )  # fmt: skip
    with llm:
        if llm.tokenizer is None or not llm.tokenizer.has_chat_template:
            raise ValueError(f"CKPT: got {checkpoint}, which has no chat template, wanted one with it (see generate)")
        _console.note("/quit leaves, Ctrl-C cancels an answer")
        converse(llm, system, {**options, "max_new_tokens": max_new_tokens}, _read_line)


def _read_line() -> str | None:
    try:
        _console.stderr().print("> ", end="")
        return input()
    except (EOFError, KeyboardInterrupt):
        return None


def converse(llm: Any, system: str | None, options: dict[str, Any], read_line: Callable[[], str | None]) -> None:
    """Reads and answers until /quit or the end of input (None). An answer that was cancelled, and a question that did
    not fit, are no part of the history."""
    history = [] if system is None else [{"role": "system", "content": system}]
    while (line := read_line()) is not None and line.strip() != "/quit":
        if not line.strip():
            continue
        messages = [*history, {"role": "user", "content": line}]
        ids = llm.tokenizer.encode_chat(messages)
        wanted = len(ids) + options["max_new_tokens"]
        if wanted > llm.max_context:
            _console.stderr().print(
                f"refused: the conversation has {len(ids)} tokens and the answer may take {options['max_new_tokens']}, "
                f"together {wanted}; the context holds {llm.max_context}. Nothing was cut; start a new chat",
                soft_wrap=True,
            )
            continue
        answer = _answer(llm, ids, options)
        if answer is not None:
            history = [*messages, {"role": "assistant", "content": answer}]


def _answer(llm: Any, ids: list[int], options: dict[str, Any]) -> str | None:
    """Prints the answer as it comes; None when Ctrl-C cancelled it."""
    parts: list[str] = []
    stream = llm.stream(ids, **options)
    try:
        for delta in _console.until_first(stream, "reading"):
            parts.append(delta.text)
            print(delta.text, end="", flush=True)
    except KeyboardInterrupt:
        stream.close()
        print()
        _console.note("cancelled")
        return None
    print()
    return "".join(parts)
