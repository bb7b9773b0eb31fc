"""How exact rows of one byte an element are, by how their scales are shared: on keys and values of a checkpoint.

    python -m clo_jax.bench.quantized_rows CKPT --out FILE

Errors are relative: the norm of the difference over that of the rows, of all layers and heads together. The formats are
those of `ops.quantized_rows` (four groups of channels) and others that were not taken.
"""

import argparse
import pathlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from clo_jax import checkpoints
from clo_jax import generate as gen
from clo_jax.bench import report
from clo_jax.cache.layout import CacheLayout
from clo_jax.eval.haystack import haystack
from clo_jax.ops.quantized_rows import LARGEST, dequantize, quantize
from clo_jax.policies.full import FullPolicy
from clo_jax.text import Tokenizer

GROUPS = (1, 2, 8)  # beside the four of the product
_SPARE_TOKENS = 64  # generated prose is not longer than asked for by more
_SINKS = 4  # whose keys are far from all others: left out where tokens share scales


def rows_of(path: str, tokens: int, seed: int) -> tuple[str, np.ndarray]:
    """The checkpoint's name; float32 [L, K, S, 2, D] of generated prose, keys rotated."""
    config, params, info = checkpoints.load_checkpoint(path, dtype="float32")
    tokenizer = Tokenizer.from_folder(info.path)
    ids = tokenizer.encode(haystack(tokens + _SPARE_TOKENS, tokenizer, seed))[:tokens]
    policy = FullPolicy(CacheLayout.full(config, 1, tokens, "float32"))
    layers, _, _ = gen.prefill(
        config, policy, params, policy.tables(), jnp.asarray([ids]), jnp.asarray([tokens]), gen.JITTED
    )  # fmt: skip
    return pathlib.Path(info.path).name, np.stack([np.asarray(jax.tree.leaves(state)[0])[0] for state in layers])


def rounded(x: np.ndarray, kind: str) -> np.ndarray:
    """x in units of its scale, as its byte says it; what is too large is clipped."""
    x = np.clip(x, -LARGEST[kind], LARGEST[kind])
    return np.round(x) if kind == "int8" else x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)


def by_groups(x: np.ndarray, kind: str, groups: int) -> np.ndarray:
    """A scale for each of `groups` groups of channels of each token's key or value, x [..., D]."""
    parts = x.reshape(*x.shape[:-1], groups, -1)
    scale = np.abs(parts).max(axis=-1, keepdims=True) / LARGEST[kind]
    return (rounded(parts / scale, kind) * scale).reshape(x.shape)


def by_channel(x: np.ndarray, kind: str) -> np.ndarray:
    """A scale for each channel of a head, from the first half of the tokens, for all of x [L, K, S, D]."""
    scale = np.abs(x[:, :, : x.shape[2] // 2]).max(axis=2, keepdims=True) / LARGEST[kind]
    return rounded(x / scale, kind) * scale


def error(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.linalg.norm(x - y) / np.linalg.norm(x))


def rows(stored: np.ndarray) -> list[report.Row]:
    """Of keys and values: each format; the control is bfloat16's rounding."""
    made, plain = [], stored.astype(ml_dtypes.bfloat16).astype(np.float32)
    for kind in LARGEST:
        product = np.asarray(dequantize(quantize(jnp.asarray(stored), kind), kind))
        for part, what in enumerate(("keys", "values")):
            x, control = stored[..., part, :], error(stored[..., part, :], plain[..., part, :])
            later, half = x[:, :, _SINKS:], (x.shape[2] - _SINKS) // 2
            found = {"4 groups": product[..., part, :]}
            found |= {f"{n} group{'s' * (n > 1)}": by_groups(x, kind, n) for n in GROUPS}
            formats = {f"{scales} of channels of a token": error(x, y) for scales, y in found.items()}
            static = error(later[:, :, half:], by_channel(later, kind)[:, :, half:])
            formats["a channel, from the first half of the tokens"] = static
            for scales, value in formats.items():
                name = f"{kind}, {what}, a scale for {scales}"
                made.append(report.Row(name, value, "relative error", "bfloat16", control))
    return made


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Errors of quantized rows by how scales are shared.")
    parser.add_argument("checkpoint")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path, default=report.RESULTS / "smollm2-quantized-rows.json")
    args = parser.parse_args(argv)
    name, stored = rows_of(args.checkpoint, args.tokens, args.seed)
    L, K, S, _, D = stored.shape
    arguments = {"checkpoint": name, "tokens": S, "seed": args.seed, "layers": L, "kv_heads": K, "head_dim": D}
    print(report.markdown(report.write(args.out, "quantized rows", arguments, rows(stored))))


if __name__ == "__main__":
    main()
