"""The recall model: what full attention and the approximate policies answer, from 8K to 128K tokens.

    python -m clo_jax.bench.recall CKPT [--lengths 8192,32768] [--samples 32] [--attention clo,exact] [--out FILE.json]

A prompt is full of records; the model continues a chain of lookups by itself (`clo_jax.eval.recall.chains`), so that
every answer is found by attention to one token far behind. A row is the share of lookups whose value is right. Answers
are kept in `--folder`: several processes may ask for some of the lengths each, and a call for all of them then finds
the answers there.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence

import numpy as np

from clo_jax.bench import report
from clo_jax.checkpoints import read_info
from clo_jax.config import CloConfig
from clo_jax.eval.answers import Answer, AnswerFile, Key, digest
from clo_jax.eval.intervals import wilson
from clo_jax.eval.recall import chains
from clo_jax.eval.recall.folder import TRAINING
from clo_jax.eval.variants import FULL, Variant, variants, varied
from clo_jax.llm import LLM

HOPS = 8
MOST_LOST = 0.005  # of the share, by clo at 10 %
MOST_SECONDS = 600  # of training


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Chains of lookups over long contexts, policy by policy.")
    parser.add_argument("checkpoint")
    parser.add_argument("--lengths", default="8192,32768,65536,131072")
    parser.add_argument("--samples", default="32", help="chains of a length: of each, or one number for all")
    parser.add_argument("--batch", type=int, default=8, help="chains at once")
    parser.add_argument("--attention", default="clo,exact")
    parser.add_argument("--sparsity", default="0.1,0.05,0.02", help="of policies other than full")
    parser.add_argument("--dtype", default="auto", help="of the model")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--seed", type=int, default=7_000_000)
    parser.add_argument("--vary", default="guess_from=input", help="clo once more, at the first sparsity; none: ''")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("clo-jax-eval"), help="of kept answers")
    parser.add_argument("--note", help="what the results file is to say, such as where kept answers were given")
    parser.add_argument("--out", type=pathlib.Path, default=report.RESULTS / "recall-qwen-accuracy.json")
    args = parser.parse_args(argv)
    shares = [float(share) for share in args.sparsity.split(",")]
    lengths, samples = ([int(n) for n in given.split(",")] for given in (args.lengths, args.samples))
    if len(samples) not in (1, len(lengths)):
        parser.error(f"--samples: got {args.samples}, wanted one number or one for each of --lengths {args.lengths}")
    try:
        names, options = args.attention.split(","), {"backend": args.backend}
        ways = variants(names, shares, CloConfig(), options)
        if "clo" in names and args.vary:
            ways += varied([way for way in ways if way.attention == "clo"][:1], (args.vary,))[1:]
    except ValueError as error:
        parser.error(str(error))
    _, info = read_info(args.checkpoint)
    setup = {"suite": "recall", "weights": dict(info.manifest.source_files), "dtype": args.dtype, "seed": args.seed}
    kept = AnswerFile(args.folder, setup | {"hops": HOPS})
    arguments = vars(args) | {
        "out": args.out.name, "folder": args.folder.name, "checkpoint": pathlib.Path(args.checkpoint).name,
    }  # fmt: skip
    rows = training_time(pathlib.Path(args.checkpoint))
    for length, number in zip(lengths, samples * (len(lengths) // len(samples)), strict=True):
        asked = [chains.question(args.seed + i, length, HOPS) for i in range(number)]
        first = len(rows)
        for way in ways:  # full attention first
            given = answers(args.checkpoint, args.dtype, args.batch, length, way, asked, kept)
            rows.append(judged(length, way, asked, given, rows[first:]))
            print(rows[-1].to_dict(), file=sys.stderr, flush=True)
            report.write(args.out, "recall", arguments, rows)
    print(report.markdown(report.write(args.out, "recall", arguments, rows)))


def training_time(checkpoint: pathlib.Path) -> list[report.Row]:
    """The row of what the checkpoint's own note says; none where there is no note."""
    note = checkpoint / TRAINING
    if not note.exists():
        return []
    told = json.loads(note.read_text())
    return [report.Row("training", told.pop("seconds"), "s", goal=f"<= {MOST_SECONDS} s", more={"trained": told})]


def answers(
    checkpoint: str,
    dtype: str,
    batch: int,
    length: int,
    way: Variant,
    asked: Sequence[chains.Question],
    kept: AnswerFile,
) -> list[Answer]:
    """One policy's answers to all questions of a length, tokens as text; those that are not kept are asked for."""
    settings = digest({name: repr(value) for name, value in way.load.items()})
    keys = [Key(way.name, settings, length, "chain", index) for index in range(len(asked))]
    missing = [index for index, key in enumerate(keys) if key not in kept.answers]
    if missing:
        new_tokens = chains.num_answer_tokens(HOPS)
        with LLM.load(checkpoint, max_context=length + new_tokens, max_batch=batch, dtype=dtype, **way.load) as llm:
            for first in range(0, len(missing), batch):
                turn = missing[first : first + batch]
                given = llm.generate([asked[i].ids for i in turn], max_new_tokens=new_tokens, ignore_eos=True)
                kept.add(
                    Answer(
                        keys[i], " ".join(map(str, one.token_ids)), one.completion_tokens, one.finish_reason,
                        one.metrics.hit_rate,
                    )
                    for i, one in zip(turn, given, strict=True)
                )  # fmt: skip
    return [kept.answers[key] for key in keys]


def judged(
    length: int, way: Variant, asked: Sequence[chains.Question], given: Sequence[Answer], before: Sequence[report.Row]
) -> report.Row:
    """A row of one policy's answers. `before`: the length's rows so far, the first one of full attention."""
    found, hits = [], [one.hit_rate for one in given]
    for question, one in zip(asked, given, strict=True):
        found += chains.right(question, list(map(int, one.text.split())))
    low, high = wilson(np.array(found, np.float64))
    more = {"lookups": len(found), "low": low, "high": high, "length": length, "attention": way.attention}
    name, right = f"lookups right, {way.name}, {length} tokens", sum(found) / len(found)
    if way is FULL:
        return report.Row(name, right, "share", goal=">= 0.99 share", more=more)
    more |= {"sparsity": way.sparsity, "hit_rate": None if None in hits else sum(hits) / len(hits)}
    if not before[0].value:  # nothing to lose
        return report.Row(name, right, "share", more=more)
    goal = f">= {1 - MOST_LOST}" if way.name == "clo 10 %" else None
    return report.Row(name, right, "share", "full", before[0].value, goal, more)


if __name__ == "__main__":
    main()
