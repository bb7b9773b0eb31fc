"""The recall model: what full attention and the approximate policies answer, from 8K to 128K tokens.

    python -m clo_jax.bench.recall CKPT [--lengths 8192,32768] [--samples 32] [--attention clo,exact] [--out FILE.json]

A prompt is full of records; the model continues a chain of lookups by itself (`clo_jax.eval.recall.chains`), so that
every answer is found by attention to one token far behind. A row is the share of lookups whose value is right.
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence

import numpy as np

from clo_jax.bench import report
from clo_jax.config import CloConfig
from clo_jax.eval.intervals import wilson
from clo_jax.eval.recall import chains
from clo_jax.eval.variants import FULL, Variant, variants
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
    shares = [float(share) for share in args.sparsity.split(",")]
    try:
        ways = variants(args.attention.split(","), shares, CloConfig(), {"backend": args.backend})
    except ValueError as error:
        parser.error(str(error))
    arguments = vars(args) | {"out": args.out.name}
    rows: list[report.Row] = []
    for length in map(int, args.lengths.split(",")):
        asked = [chains.question(args.seed + i, length, HOPS) for i in range(args.samples)]
        first = len(rows)
        for way in ways:  # full attention first
            rows.append(answer(args.checkpoint, args.dtype, length, way, asked, rows[first:]))
            print(rows[-1].to_dict(), file=sys.stderr, flush=True)
            report.write(args.out, "recall", arguments, rows)
    print(report.markdown(report.write(args.out, "recall", arguments, rows)))


def answer(
    checkpoint: str,
    dtype: str,
    length: int,
    way: Variant,
    asked: Sequence[chains.Question],
    before: Sequence[report.Row],
) -> report.Row:
    """One policy's answers to all questions of a length, as a row. `before`: the length's rows so far, the first one of
    full attention."""
    new_tokens, found, hits = chains.num_answer_tokens(HOPS), [], []
    with LLM.load(checkpoint, max_context=length + new_tokens, max_batch=1, dtype=dtype, **way.load) as llm:
        for one in asked:
            generation = llm.generate(one.ids, max_new_tokens=new_tokens, ignore_eos=True)[0]
            found += chains.right(one, generation.token_ids)
            hits.append(generation.metrics.hit_rate)
    low, high = wilson(np.array(found, np.float64))
    more = {"lookups": len(found), "low": low, "high": high, "length": length, "attention": way.attention}
    name, right = f"lookups right, {way.name}, {length} tokens", sum(found) / len(found)
    if way is FULL:
        return report.Row(name, right, "share", goal=">= 0.99 share", more=more)
    more |= {"sparsity": way.sparsity, "hit_rate": None if None in hits else sum(hits) / len(hits)}
    if not before[0].value:  # nothing to lose
        return report.Row(name, right, "share", more=more)
    goal = f">= {1 - MOST_LOST}" if way.attention == "clo" and way.sparsity == 0.1 else None
    return report.Row(name, right, "share", "full", before[0].value, goal, more)


if __name__ == "__main__":
    main()
