"""`clo-jax generate`: one prompt, one answer."""

import pathlib
import sys
from typing import Annotated, Any

import typer

from clo_jax.cli import _console
from clo_jax.cli import _options as o


def read_prompt(prompt: str | None, prompt_file: str | None) -> str:
    """The prompt from exactly one of the two options; the file "-" is stdin."""
    if (prompt is None) == (prompt_file is None):
        raise ValueError(f"--prompt, --prompt-file: got {'none' if prompt is None else 'both'}, wanted exactly one")
    if prompt is None:
        prompt = sys.stdin.read() if prompt_file == "-" else pathlib.Path(prompt_file).read_text(encoding="utf-8")
    if not prompt:
        raise ValueError(f"{'--prompt' if prompt_file is None else prompt_file}: got an empty prompt, wanted text")
    return prompt


def wants_chat(llm: Any, chat: bool | None) -> bool:
    """Whether the chat template is used: as told, else when the checkpoint has one (and stderr says so)."""
    has_template = llm.tokenizer is not None and llm.tokenizer.has_chat_template
    if chat and not has_template:
        raise ValueError("--chat: got a checkpoint without a chat template, wanted one with it (or --no-chat)")
    if chat is None and has_template:
        _console.note("using the checkpoint's chat template (--no-chat for the bare prompt)")
    return has_template if chat is None else chat


def summary(prompt_tokens: int | None, tokens: int, reason: str, metrics: Any) -> str:
    """One line of figures for stderr."""
    parts = [] if prompt_tokens is None else [f"{prompt_tokens} prompt tokens"]
    parts += [f"{tokens} new tokens ({reason})", f"first after {metrics.ttft_s:.2f} s"]
    if metrics.tpot_s:
        parts.append(f"{1 / metrics.tpot_s:.1f} tokens/s")
    parts.append(f"{metrics.attention} attention")
    if metrics.retriever is not None:
        parts.append(f"retriever {metrics.retriever}")
    if metrics.kv_dtype not in (None, "auto"):
        parts.append(f"{metrics.kv_dtype} rows")
    if metrics.head_scores is not None:
        parts.append(f"head scores {metrics.head_scores}")
    if metrics.planner not in (None, "none"):
        parts.append(f"planner {metrics.planner} ({metrics.resident_heads} heads resident)")
    if metrics.hit_rate is not None:
        parts.append(f"hit rate {metrics.hit_rate:.2f}")
    if metrics.backend is not None:
        parts.append(f"{metrics.rows_moved} rows moved by {metrics.backend}")
    parts.append(f"KV {_console.human_bytes(metrics.device_kv_bytes)} on the device")
    if metrics.host_kv_bytes:
        parts.append(f"{_console.human_bytes(metrics.host_kv_bytes)} on the host")
    return ", ".join(parts)


def generate(
    checkpoint: o.Checkpoint,
    prompt: Annotated[str | None, typer.Option(help="The prompt.")] = None,
    prompt_file: Annotated[str | None, typer.Option(help="File with the prompt; - is stdin.", metavar="FILE")] = None,
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="Use the chat template.", show_default="when there is one")
    ] = None,
    attention: o.AttentionOption = o.Attention.clo,
    max_context: o.MaxContext = None,
    max_new_tokens: o.MaxNewTokens = None,
    dtype: o.DTypeOption = o.DType.auto,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Do not stop at the checkpoint's stop tokens.")
    ] = False,
    stop_token_id: Annotated[list[int] | None, typer.Option(help="A further stop token; may be repeated.")] = None,
    preset: o.PresetOption = None,
    sparsity: o.Sparsity = None,
    retriever: o.RetrieverOption = None,
    refresh: o.RefreshOption = None,
    retain: o.Retain = None,
    guess_from: o.GuessFromOption = None,
    kv_dtype: o.KvDtypeOption = None,
    sim_threshold: o.SimThreshold = None,
    importance_power: o.ImportancePower = None,
    reuse_margin: o.ReuseMargin = None,
    hash_bits: o.HashBits = None,
    sink_tokens: o.SinkTokens = None,
    recent_tokens: o.RecentTokens = None,
    kv_offload: o.KvOffload = None,
    backend: o.Backend = None,
    transfer_threads: o.TransferThreads = None,
    calibration: o.Calibration = None,
    planner: o.PlannerOption = None,
    kv_budget: o.KvBudget = None,
    do_sample: o.DoSample = False,
    temperature: o.Temperature = None,
    top_k: o.TopK = None,
    top_p: o.TopP = None,
    seed: o.Seed = 0,
    json: o.Json = False,
    stream: Annotated[
        bool, typer.Option("--stream", help="Print the answer as it comes.", rich_help_panel=o.OUTPUT_PANEL)
    ] = False,
    quiet: o.Quiet = False,
    no_progress: o.NoProgress = False,
    debug: o.Debug = False,
) -> None:
    """Answer one prompt."""
    if json and stream:
        raise ValueError("--json, --stream: got both, wanted at most one")
    text = read_prompt(prompt, prompt_file)
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
        importance_power=importance_power,
        reuse_margin=reuse_margin,
        hash_bits=hash_bits,
        sink_tokens=sink_tokens,
        recent_tokens=recent_tokens,
        kv_offload=kv_offload,
        backend=backend,
        transfer_threads=transfer_threads,
        calibration=calibration,
        planner=planner,
        kv_budget=kv_budget,
    )
    options = {
        "max_new_tokens": max_new_tokens,
        "stop_token_ids": tuple(stop_token_id or ()),
        "ignore_eos": ignore_eos,
        **o.sampling_options(do_sample, seed, temperature=temperature, top_k=top_k, top_p=top_p),
    }

    from clo_jax.llm import LLM

    with _console.progress("loading"):
        llm = LLM.load(
            checkpoint, dtype=dtype.value, max_context=max_context, max_batch=1, pinning=_console.pinning, **load
        )  # fmt: skip
    with llm:
        options["chat"] = wants_chat(llm, chat)
        if stream:
            _stream(llm, text, options)
            return
        with _console.progress("answering", total=max_new_tokens) as advance:
            answer = llm.generate(text, callback=lambda delta: advance(len(delta.token_ids)), **options)[0]
        if json:
            _console.print_json(
                {
                    "text": answer.text,
                    "token_ids": answer.token_ids,
                    "finish_reason": answer.finish_reason,
                    "prompt_tokens": answer.prompt_tokens,
                    "completion_tokens": answer.completion_tokens,
                    "metrics": answer.metrics,
                    "settings": {**llm.describe(), "load": load, "generate": options},
                }
            )
        else:
            print(answer.text)
        _console.note(summary(answer.prompt_tokens, answer.completion_tokens, answer.finish_reason, answer.metrics))


def _stream(llm: Any, text: str, options: dict[str, Any]) -> None:
    tokens, last = 0, None
    for delta in _console.until_first(llm.stream(text, **options), "reading the prompt"):
        print(delta.text, end="", flush=True)
        tokens, last = tokens + len(delta.token_ids), delta
    print()
    _console.note(summary(None, tokens, last.finish_reason, last.metrics))
