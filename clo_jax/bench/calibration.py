"""What a calibration is worth: attention mass and recall of the sets that its codes select, trained and untrained, on
text that nothing was trained on; and how long each part took.

    python -m clo_jax.bench.calibration CKPT [--random-model D] [--prompts 6] [--lengths 3000,6000] [--out FILE.json]

Rows give the mean over layers, heads and queries; their `per_layer` each layer's. The control of a trained row is the
same code without training. With --random-model there is no checkpoint: a small model of random weights and that head
dim is made, projections are trained on it here, and every row says so.
"""

import argparse
import dataclasses
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clo_jax import models
from clo_jax.bench import report
from clo_jax.cache import calibration as calibrations
from clo_jax.cache.calibration import Calibration
from clo_jax.cache.projections import projections
from clo_jax.calibrate import collect, hashing
from clo_jax.calibrate.hash_training import SHARES, HashSettings, untrained
from clo_jax.calibrate.mass import selection_quality
from clo_jax.calibrate.text import Prompts, prompts
from clo_jax.checkpoints import load_checkpoint
from clo_jax.config import ModelConfig, Retriever, RopeConfig
from clo_jax.text import Tokenizer

SEED = 424_243  # far from the seeds that are trained with
# Of the issue that asked for them, on SmolLM2-135M at 10 %: the mass that trained codes keep.
GOALS = {("hata", 256): ">= 0.97 share", ("sign", 128): ">= 0.98 share", ("sign", 256): ">= 0.99 share"}
_HARM = 0.005  # of the mass, by which trained codes may be worse on other text than what they were chosen by
MOST_SECONDS = {"gpu": 480, "cpu": 1800}
PARTS = {"importance": "importance", "hash": "choice", "similarity": "similarity", "costs": "costs"}  # their provenance
Codes = dict[tuple[Retriever, int], np.ndarray]  # projections [L, K, D, R]
Quality = dict[tuple[Retriever, int], np.ndarray]  # float64 [2 (mass, recall), L, shares]


def quality(config: ModelConfig, params: Any, texts: Sequence[Sequence[int]], queries: int, codes: Codes) -> Quality:
    """Mass and recall by kind of code, layer and share of `SHARES`, means over heads, prompts and queries.

    Args:
      texts: token ids. queries: positions in the later half of each, evenly spread.
      codes: projections [L, K, D, R] of each kind.
    """
    positions = [np.linspace(len(ids) // 2, len(ids) - 1, queries).astype(int).tolist() for ids in texts]
    found: dict[tuple[Retriever, int], list[np.ndarray]] = {kind: [] for kind in codes}
    for layer, samples in enumerate(collect.layers(config, params, texts, positions)):
        for (retriever, bits), weights in codes.items():
            each = [selection_quality(one, jnp.asarray(weights[layer]), retriever, SHARES) for one in samples]
            found[retriever, bits].append(np.mean(each, axis=(0, 3, 4)))
    return {kind: np.stack(layers, axis=1) for kind, layers in found.items()}


def without_training(config: ModelConfig, kinds: Sequence[tuple[Retriever, int]], seed: int) -> Codes:
    """The projections that these kinds have without a calibration."""
    L, K = config.num_layers, config.num_kv_heads
    ways = {(kind, bits): projections(kind, config.head_dim, bits, seed) for kind, bits in kinds}
    return {kind: np.broadcast_to(one, (L, K, *one.shape)) for kind, one in ways.items()}


def quality_rows(trained: Quality, plain: Quality, goals: bool, note: str = "") -> list[report.Row]:
    """Rows of mass and recall: trained codes against the same ones without training."""
    rows = []
    for kind, values in trained.items():
        retriever, bits = kind
        for index, what in enumerate(("mass", "recall")):
            for column, share in enumerate(SHARES):
                value, control = (float(part[index, :, column].mean()) for part in (values, plain[kind]))
                goal = GOALS.get(kind) if goals and what == "mass" and share == SHARES[0] else None
                more = {
                    "per_layer": [round(float(x), 5) for x in values[index, :, column]],
                    "per_layer_untrained": [round(float(x), 5) for x in plain[kind][index, :, column]],
                }
                name = f"{what} kept{note}, {retriever} R = {bits}, {share:.0%} of the tokens"
                rows.append(report.Row(name, value, "share", "untrained", control, goal, more))
    return rows


def time_rows(calibration: Calibration) -> list[report.Row]:
    """Seconds of each part, as its provenance has them, and of all of them."""
    rows, total = [], 0.0
    there = {name: calibration.provenance.get(entry) for name, entry in PARTS.items()}
    for name, origin in there.items():
        if origin is not None:
            total += origin["seconds"]
            more = {key: origin[key] for key in ("device", "small", "figures", "versions")}
            rows.append(report.Row(f"time of calibration, {name}", origin["seconds"], "s", more=more))
    if all(there.values()):
        small = all(origin["small"] for origin in there.values())
        kind = "cpu" if small else "gpu"
        name = f"time of calibration, all parts{', small' if small else ''}"
        rows.append(report.Row(name, total, "s", goal=f"<= {MOST_SECONDS[kind]} s"))
    return rows


def choice_rows(calibration: Calibration, trained: Quality) -> list[report.Row]:
    """The default retriever: its mass here, against that of the other kind at equal bytes a token."""
    choice = calibration.choice
    if choice is None:
        return []
    other: Retriever = "hata" if choice.retriever == "sign" else "sign"
    value = float(trained[choice.retriever, choice.hash_bits][0, :, 0].mean())
    rival = trained.get((other, choice.hash_bits))
    control = (f"{other} R = {choice.hash_bits}", float(rival[0, :, 0].mean())) if rival is not None else (None, None)
    name = f"mass kept by the default retriever, {choice.retriever} R = {choice.hash_bits}"
    return [report.Row(name, value, "share", *control, goal="> 1" if rival is not None else None,
                       more={"why": choice.why})]  # fmt: skip


def random_model(head_dim: int) -> tuple[ModelConfig, Any]:
    """A small Llama of random weights: 4 layers, 8 query heads on 2 KV heads."""
    config = ModelConfig("llama", 512, 8 * head_dim, 16 * head_dim, 4, 8, 2, head_dim, 1e-5, 8192, RopeConfig(1e4))
    return config, models.random_params(config, jax.random.key(0), jnp.float32)


def random_prompts(config: ModelConfig, count: int, lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Token ids that repeat themselves as text does: a walk over a few hundred ids with frequent returns."""
    rng, made = np.random.default_rng(seed), []
    for number in range(count):
        length = lengths[number % len(lengths)]
        made.append((rng.zipf(1.3, length) % config.vocab_size).tolist())
    return made


def of_random_model(head_dim: int, count: int, lengths: Sequence[int], queries: int, steps: int) -> list[report.Row]:
    """Trains both kinds of code on a random-weights model and judges them on other prompts."""
    config, params = random_model(head_dim)
    data = Prompts(random_prompts(config, 2 * count, lengths, 0), random_prompts(config, count, lengths, 1))
    settings = [HashSettings(kind, bits, steps=steps) for kind, bits in (("sign", 128), ("sign", 256), ("hata", 256))]
    at_once = 1 if jax.default_backend() == "cpu" else config.num_layers
    start = time.perf_counter()
    made = hashing.train(config, params, data, settings, queries_per_prompt=queries, layers_at_once=at_once)
    seconds = time.perf_counter() - start
    kinds: Codes = {(one.settings.retriever, one.settings.hash_bits): one.weights for one in made}
    plain: Codes = {
        (one.retriever, one.hash_bits): np.stack(
            [untrained(one, config.num_kv_heads, head_dim)] * config.num_layers
        )
        for one in settings
    }  # fmt: skip
    # Not the prompts by which training chose between trained and untrained weights.
    unseen = random_prompts(config, count, lengths, 2)
    judged = (quality(config, params, unseen, queries, codes) for codes in (kinds, plain))
    note = f" (random weights, D = {head_dim})"
    rows = quality_rows(*judged, goals=False, note=note)
    # Random weights attend nearly evenly to keys of all directions. What must hold for any keys: training does no harm.
    for place, row in enumerate(rows):
        if row.name.startswith("mass"):
            rows[place] = dataclasses.replace(row, goal=f">= {1 - _HARM}")
    gained = {one.settings.name: one.figures()["heads_that_gained"] for one in made}
    rows += [report.Row(f"heads that gained{note}, {name}", share, "share") for name, share in gained.items()]
    return [*rows, report.Row(f"time of training{note}", seconds, "s")]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Attention mass and recall of a calibration's codes on held-out text.")
    parser.add_argument("checkpoint", nargs="?")
    parser.add_argument("--random-model", type=int, metavar="D", help="a random-weights model of this head dim instead")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--lengths", default="3000,6000")
    parser.add_argument("--queries", type=int, default=128, help="of each prompt")
    parser.add_argument("--steps", type=int, default=600, help="of training, with --random-model")
    parser.add_argument("--dtype", default="auto", help="of the model")
    parser.add_argument("--out", type=pathlib.Path, default=report.RESULTS / "smollm2-calibration.json")
    args = parser.parse_args(argv)
    if (args.checkpoint is None) == (args.random_model is None):
        parser.error("wanted a checkpoint or --random-model, one of them")
    lengths = [int(length) for length in args.lengths.split(",")]
    if args.random_model is not None:
        rows = of_random_model(args.random_model, args.prompts, lengths, args.queries, args.steps)
    else:
        config, params, info = load_checkpoint(args.checkpoint, dtype=args.dtype)
        found = calibrations.read(info.path / calibrations.FOLDER).require_fit(config)
        texts = prompts(
            Tokenizer.from_folder(info.path), count=1, held_out=args.prompts, num_tokens=lengths, seed=SEED
        ).held_out  # fmt: skip
        codes: Codes = {(part.retriever, part.hash_bits): part.weights for part in found.hash_weights if part.trained}
        judged = []
        for name, ways in (("trained", codes), ("untrained", without_training(config, list(codes), 0))):
            judged.append(quality(config, params, texts, args.queries, ways))
            print(f"{name} codes judged", file=sys.stderr, flush=True)
        rows = quality_rows(*judged, goals=True) + choice_rows(found, judged[0]) + time_rows(found)
    if not rows:
        raise SystemExit("calibration: the checkpoint has none: run clo-jax calibrate CKPT")
    arguments = vars(args) | {"out": args.out.name}
    print(report.markdown(report.write(args.out, "calibration", arguments, rows)))


if __name__ == "__main__":
    main()
