"""Decode speed of one checkpoint by context length: full attention, CLO, and optionally transformers, in one run.

    python -m clo_jax.bench.decode CKPT [--contexts 1024,4096,8192] [--transformers MODEL.gguf] [--out FILE.json]

The control of every row is full attention, all rows on the device, at the same context.
"""

import argparse
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from clo_jax.bench import report
from clo_jax.config import CloConfig
from clo_jax.eval.haystack import haystack
from clo_jax.llm import LLM

WARM_TOKENS = 16  # a first answer compiles everything; not counted


def prompts(llm: LLM, contexts: Sequence[int], new_tokens: int) -> dict[int, list[int]]:
    """Token ids of generated prose, `new_tokens` short of each context, so that decoding ends at the context."""
    text = haystack(max(contexts) + 64, llm.tokenizer, seed=0)
    ids = llm.tokenizer.encode(text)
    return {context: ids[: context - new_tokens] for context in contexts}


def decode_rates(llm: LLM, prompt: list[int], new_tokens: int, repeats: int) -> tuple[list[float], object]:
    """Tokens per second of each repeat (the first token apart), and the last metrics."""
    llm.generate(prompt, max_new_tokens=WARM_TOKENS + 1, ignore_eos=True)
    answers = [llm.generate(prompt, max_new_tokens=new_tokens, ignore_eos=True)[0] for _ in range(repeats)]
    return [1 / answer.metrics.tpot_s for answer in answers], answers[-1].metrics


def transformers_rates(gguf: pathlib.Path, prompt: list[int], new_tokens: int, repeats: int) -> list[float]:
    """The same for Hugging Face transformers with its cache in memory: fp32, greedy, SDPA attention."""
    import time

    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32).eval()
    rates = []
    with torch.no_grad():
        for _ in range(repeats):
            out = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
            token, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
            start = time.perf_counter()
            for _ in range(new_tokens - 1):
                out = model(token, past_key_values=cache, use_cache=True)
                token, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
            rates.append((new_tokens - 1) / (time.perf_counter() - start))
    return rates


def table(content: Mapping[str, Any]) -> str:
    """The README's table of a results file: tokens/s by context and system."""
    contexts = sorted({row["context"] for row in content["rows"]})
    systems = list(dict.fromkeys(row["name"].split(",")[0] for row in content["rows"]))
    by_name = {row["name"]: row["value"] for row in content["rows"]}
    lines = ["| context | " + " | ".join(systems) + " |", "|---" * (len(systems) + 1) + "|"]
    for context in contexts:
        values = (by_name.get(f"{system}, {context} tokens") for system in systems)
        lines.append(f"| {context:,} | " + " | ".join("" if v is None else f"{v:.1f}" for v in values) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Decode speed by context length.")
    parser.add_argument("checkpoint")
    parser.add_argument("--contexts", default="1024,4096,8192")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--transformers", type=pathlib.Path, help="GGUF file for the transformers rival")
    parser.add_argument("--out", type=pathlib.Path, default=report.RESULTS / "cpu-decode.json")
    args = parser.parse_args(argv)
    contexts = [int(n) for n in args.contexts.split(",")]
    console = Console(stderr=True)
    measured: dict[tuple[str, int], list[float]] = {}
    details: dict[tuple[str, int], dict] = {}
    texts: dict[int, list[int]] = {}
    for attention in ("full", "clo"):
        with LLM.load(args.checkpoint, attention=attention, clo=CloConfig(), max_context=max(contexts)) as llm:
            texts = prompts(llm, contexts, args.new_tokens)
            for context in contexts:
                rates, metrics = decode_rates(llm, texts[context], args.new_tokens, args.repeats)
                measured[attention, context] = rates
                details[attention, context] = {
                    "hit_rate": metrics.hit_rate, "rows_moved": metrics.rows_moved, "ttft_s": metrics.ttft_s,
                    "device_kv_bytes": metrics.device_kv_bytes, "host_kv_bytes": metrics.host_kv_bytes,
                    "retriever": metrics.retriever, "head_scores": metrics.head_scores,
                }  # fmt: skip
                console.print(f"{attention} {context}: {statistics.median(rates):.2f} tokens/s")
    if args.transformers:
        for context in contexts:
            measured["transformers", context] = transformers_rates(
                args.transformers, texts[context], args.new_tokens, args.repeats
            )
            console.print(
                f"transformers {context}: {statistics.median(measured['transformers', context]):.2f} tokens/s"
            )
    rows = []
    for (system, context), rates in measured.items():
        control = statistics.median(measured["full", context])
        goal = ">= 1.0" if system == "clo" and context >= 8192 else None
        more = details.get((system, context), {}) | {
            "context": context, "batch": 1, "repeats": len(rates), "min": min(rates), "max": max(rates),
        }  # fmt: skip
        rows.append(
            report.Row(f"{system}, {context} tokens", statistics.median(rates), "tokens/s", "full", control, goal, more)
        )
    content = report.write(
        args.out, "decode", vars(args) | {"out": args.out.name, "transformers": bool(args.transformers)}, rows
    )
    print(report.markdown(content))


if __name__ == "__main__":
    main()
