"""The recall model: what full attention and the approximate policies answer, from 8K to 128K tokens.

    python -m clo_jax.bench.recall CKPT [--lengths 8192,32768] [--samples 32] [--attention clo,exact] [--out FILE.json]

A prompt is full of records; the model continues a chain of lookups by itself (`clo_jax.eval.recall.chains`), so that
every answer is found by attention to one token far behind. A row is the share of lookups whose value is right.
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import get_args

import numpy as np

from clo_jax.bench import report
from clo_jax.config import Attention, CloConfig
from clo_jax.eval.intervals import wilson
from clo_jax.eval.recall import chains
from clo_jax.llm import LLM

HOPS = 8
MOST_LOST = 0.005  # of the share, by clo at 10 %


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Chains of lookups over long contexts, policy by policy.")
    parser.add_argument("checkpoint")
    parser.add_argument("--lengths", default="8192,32768,65536,131072")
    parser.add_argument("--samples", type=int, default=32, help="chains a length")
    parser.add_argument("--attention", default="clo,exact")
    parser.add_argument("--sparsity", default="0.1,0.05,0.02", help="of policies other than full")
    parser.add_argument("--dtype", default="auto", help="of the model")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--seed", type=int, default=7_000_000)
    parser.add_argument("--out", type=pathlib.Path, default=report.RESULTS / "recall-qwen-accuracy.json")
    args = parser.parse_args(argv)
    names = args.attention.split(",")
    if unknown := set(names) - set(get_args(Attention)):
        parser.error(f"attention: got {sorted(unknown)}, wanted some of {get_args(Attention)}")
    ways: list[tuple[Attention, float]] = [("full", 1.0)]
    ways += [(name, float(share)) for name in names if name != "full" for share in args.sparsity.split(",")]
    arguments = vars(args) | {"out": args.out.name}
    rows: list[report.Row] = []
    for length in map(int, args.lengths.split(",")):
        asked = [chains.question(args.seed + i, length, HOPS) for i in range(args.samples)]
        control = None
        for attention, share in ways:
            row = answer(args, length, attention, share, asked, control)
            control = control or row
            rows.append(row)
            print(row.to_dict(), file=sys.stderr, flush=True)
            report.write(args.out, "recall", arguments, rows)
    print(report.markdown(report.write(args.out, "recall", arguments, rows)))


def answer(
    args: argparse.Namespace, length: int, attention: Attention, share: float, asked: Sequence[chains.Question],
    full: report.Row | None,
) -> report.Row:  # fmt: skip
    """One policy's answers to all questions of a length, as a row; `full`: that of full attention."""
    new_tokens, hits, found = chains.num_answer_tokens(HOPS), [], []
    clo = {} if attention == "full" else {"clo": CloConfig(sparsity=share)}
    with LLM.load(
        args.checkpoint, attention=attention, max_context=length + new_tokens, max_batch=1, dtype=args.dtype,
        backend=args.backend, **clo,
    ) as llm:  # fmt: skip
        for one in asked:
            generation = llm.generate(one.ids, max_new_tokens=new_tokens, ignore_eos=True)[0]
            found += chains.right(one, generation.token_ids)
            hits.append(generation.metrics.hit_rate)
    low, high = wilson(np.array(found, np.float64))
    more = {"lookups": len(found), "low": low, "high": high, "length": length, "attention": attention}
    if attention == "full":
        return report.Row(f"lookups right, full, {length} tokens", sum(found) / len(found), "share",
                          goal=">= 0.99 share", more=more)  # fmt: skip
    more |= {"sparsity": share, "hit_rate": sum(filter(None, hits)) / len(hits)}
    goal = f">= {1 - MOST_LOST}" if attention == "clo" and share == 0.1 else None
    return report.Row(
        f"lookups right, {attention} at {share:.0%}, {length} tokens", sum(found) / len(found), "share", "full",
        full.value if full else None, goal, more,
    )  # fmt: skip


if __name__ == "__main__":
    main()
