"""Does head importance separate the heads that retrieve? Half of the KV heads see sink and recent tokens only: those
with the lowest scores, those with the highest, or a random half; answers to hidden-number questions survive or do not.

    python -m clo_jax.bench.importance CKPT [--tokens 3500] [--prompts 20] [--scores FILE.tsv] [--out FILE.json]

The control is the model with all heads whole; only questions that it answers count. An answer survives when every one
of its tokens is still the likeliest. A question whose answer does not survive with all heads whole (another program
rounds otherwise, in 16 bits) is left out and counted.
"""

import argparse
import pathlib
import random
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clo_jax import models
from clo_jax.bench import report
from clo_jax.cache import calibration as calibrations
from clo_jax.calibrate import gated
from clo_jax.calibrate.duo_scores import read_duo_scores
from clo_jax.checkpoints import load_checkpoint
from clo_jax.eval.haystack import haystack, number_fact
from clo_jax.llm import LLM

QUESTION = "What is the secret number of the lighthouse? Answer with the number only."
Case = tuple[list[int], list[int]]  # token ids of a prompt, and of the model's own answer


def windowed(scores: np.ndarray, share: float, highest: bool, seed: int | None = None) -> np.ndarray:
    """Gates, float32 of the shape of `scores`: 0 for that share of heads with the lowest or highest scores (ties: lower
    head first), or for a random one with a seed; 1 for the others."""
    flat = np.asarray(scores, np.float64).reshape(-1)
    order = np.argsort(-flat if highest else flat, kind="stable")
    if seed is not None:
        order = np.random.default_rng(seed).permutation(flat.size)
    gates = np.ones(flat.size, np.float32)
    gates[order[: round(share * flat.size)]] = 0
    return gates.reshape(np.shape(scores))


def survives(config: Any, params: Any, case: Case, gates: np.ndarray, window: gated.Window) -> np.ndarray:
    """For each token of the answer, bool: whether it is still the likeliest after those before it."""
    prompt, answer = case
    length = len(prompt) + len(answer)
    tokens = np.zeros((1, -(-length // 256) * 256), np.int32)
    tokens[0, :length] = prompt + answer
    x, lengths = gated.embed_jitted(config, params, jnp.asarray(tokens)), jnp.asarray([length], jnp.int32)
    for layer in range(config.num_layers):
        x = gated.layer_jitted(config, window, params["layers"][layer], jnp.asarray(gates[layer]), x, lengths)
    first = len(prompt) - 1
    return np.asarray(_likeliest(config, params, x[:, first : first + len(answer)])) == np.asarray(answer)


def _likeliest(config: Any, params: Any, x: jax.Array) -> jax.Array:
    return jnp.argmax(models.merge(config, params).logits(x)[0], axis=-1)


def cases(checkpoint: str, tokens: int, number: int, seed: int) -> tuple[list[Case], int]:
    """Prompts that the model answers rightly, with its answers; and how many were asked."""
    found = []
    with LLM.load(checkpoint, attention="full", max_context=tokens + 300, max_batch=1) as llm:
        for n in range(seed, seed + number):
            sentence, secret = number_fact("lighthouse", n)
            depth = random.Random(f"clo-jax importance {n}").uniform(0.1, 0.9)
            text = haystack(tokens, llm.tokenizer, n, [(sentence, depth)])
            prompt = f"{text}\n\n{QUESTION}"
            chat = llm.tokenizer.has_chat_template
            ids = llm.tokenizer.encode_chat([{"role": "user", "content": prompt}]) if chat else None
            ids = llm.tokenizer.encode(prompt) if ids is None else ids
            answer = llm.generate(ids, max_new_tokens=24)[0]
            if secret in answer.text:
                found.append((ids, answer.token_ids))
    return found, number


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Answers that survive when half of the heads see a window only.")
    parser.add_argument("checkpoint")
    parser.add_argument("--tokens", type=int, default=3500)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--sink", type=int, default=64)
    parser.add_argument("--recent", type=int, default=256)
    parser.add_argument("--scores", type=pathlib.Path, help="TSV file; default: the checkpoint's calibration")
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--out", type=pathlib.Path, default=report.RESULTS / "smollm2-importance.json")
    args = parser.parse_args(argv)
    config, params, info = load_checkpoint(args.checkpoint)
    if args.scores is not None:
        part = read_duo_scores(args.scores, config)
    else:
        part = calibrations.read(info.path / calibrations.FOLDER).require_fit(config).importance
        if part is None:
            raise SystemExit("importance: the calibration has no head importance: clo-jax calibrate CKPT --importance")
    window = gated.Window(args.sink, args.recent)
    answered, asked = cases(args.checkpoint, args.tokens, args.prompts, args.seed)
    if not answered:
        raise SystemExit("importance: the model answers none of the questions")
    whole = np.ones(part.scores.shape, np.float32)
    right, answered = len(answered), [c for c in answered if survives(config, params, c, whole, window).all()]
    print(f"{right} of {asked} answered with all heads whole, {len(answered)} kept", file=sys.stderr, flush=True)
    if not answered:
        raise SystemExit("importance: no answer survives with all heads whole")
    rows = []
    for name, highest, seed, goal in (
        ("lowest", False, None, ">= 0.95"), ("highest", True, None, "< 0.5"), ("random", False, 0, None),
    ):  # fmt: skip
        gates = windowed(part.scores, args.share, highest, seed)
        kept = [survives(config, params, case, gates, window) for case in answered]
        answers = sum(bool(tokens.all()) for tokens in kept)
        more = {
            "asked": asked,
            "answered_rightly": right,
            "tokens_kept": float(np.concatenate(kept).mean()),
            "source": part.source,
        }
        rows.append(
            report.Row(
                f"answers kept, {name} {args.share:.0%} of heads windowed", answers, "answers", "all heads whole",
                len(kept), goal, more,
            )
        )  # fmt: skip
        print(rows[-1].to_dict(), file=sys.stderr, flush=True)
    arguments = vars(args) | {"out": args.out.name, "scores": str(args.scores) if args.scores else None}
    print(report.markdown(report.write(args.out, "importance", arguments, rows)))


if __name__ == "__main__":
    main()
