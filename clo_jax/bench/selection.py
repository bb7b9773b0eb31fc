"""How well the codes select, and how many rows a refresh moves: the tables of docs/design.md (section 2), measured with
the product's own ops on the queries and keys of a real model.

    python -m clo_jax.bench.selection CKPT TEXT_FILE [--tokens 6000] [--steps 24] [--out FILE.json]

Mass: attention mass of the selected set relative to the exact top-k of the same size, over query heads, KV heads,
layers and steps. New rows: rows that a refresh moves as a share of k, with buffers of c · k rows. Queries are the exact
ones, so this is the quality of codes and buffers alone.
"""

import argparse
import dataclasses
import functools
import pathlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from clo_jax import checkpoints
from clo_jax import generate as gen
from clo_jax.bench import report
from clo_jax.cache.layout import CacheLayout
from clo_jax.cache.projections import projections
from clo_jax.config import ModelConfig
from clo_jax.ops.hash_encode import hash_encode
from clo_jax.ops.prefetch import prefetch
from clo_jax.ops.select_topk import select_topk
from clo_jax.policies.base import LayerState, Position, Shared, Tables
from clo_jax.policies.full import FullPolicy
from clo_jax.text import Tokenizer
from clo_jax.transfer.engine import Engine

EVERY = 6  # mass is looked at every so many steps
# What an independent prototype (torch, same model) measured before the ops existed, the control of each figure:
# (code, R, share) -> mass, and c -> new rows on a miss, at every step.
MASS = {
    ("hata, random", 128, 0.10): 0.906, ("hata, random", 256, 0.10): 0.942,
    ("hata, centred orthogonal", 128, 0.10): 0.945, ("hata, centred orthogonal", 256, 0.10): 0.963,
    ("sign", 128, 0.10): 0.976, ("sign", 128, 0.05): 0.963, ("sign", 128, 0.02): 0.948,
    ("sign", 256, 0.10): 0.987, ("sign", 256, 0.05): 0.980, ("sign", 256, 0.02): 0.972,
}  # fmt: skip
NEW_ROWS = {1.0: (0.40, 0.32), 1.25: (0.32, 0.25), 1.5: (0.26, 0.19), 2.0: (0.20, 0.14), 3.0: (0.17, 0.11)}


@dataclasses.dataclass(frozen=True)
class RecordingPolicy(FullPolicy):
    """Full attention that leaves each step's query in the layer's state."""

    def attend(
        self, layer: int, tables: Tables, q: jax.Array, k: jax.Array, v: jax.Array, at: Position, state: LayerState,
        shared: Shared,
    ) -> tuple[jax.Array, LayerState, Shared]:  # fmt: skip
        out, state, shared = super().attend(layer, tables, q, k, v, at, {"resident": state["resident"]}, shared)
        return out, state | {"query": q}, shared


def record(config: ModelConfig, params, ids: Sequence[int], steps: int) -> tuple[np.ndarray, list[jax.Array]]:
    """Greedy decode: queries [steps, L, H, D] and each layer's prompt keys [1, K, S, D]."""
    S = len(ids)
    policy = RecordingPolicy(CacheLayout.full(config, 1, S + steps, "float32"))
    tables = policy.tables()
    tokens = np.zeros((1, gen.bucket_length(S, S + steps)), np.int32)
    tokens[0, :S] = ids
    lengths = jnp.array([S], jnp.int32)
    layers, shared, logits = gen.prefill(config, policy, params, tables, jnp.asarray(tokens), lengths, gen.JITTED)
    limits = gen.Limits(jnp.array([steps + 2], jnp.int32), jnp.full((8,), -1, jnp.int32))
    state = gen.begin_jitted(layers, shared, logits, lengths, None, limits)
    step = jax.jit(functools.partial(gen.decode_step, config, policy))
    queries = []
    for _ in range(steps):
        logits, state = step(params, tables, state)
        queries.append(np.stack([np.asarray(layer["query"][0]) for layer in state.layers]))
        state = gen.accept(state, gen.choose(logits, None, state.count), limits)
    return np.stack(queries), [layer["resident"][:, :, :S, 0] for layer in state.layers]


@jax.jit
def exact_attention(query: jax.Array, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Attention weights [K, G, S] and log-sum-exp [H] of one query [H, D] over keys [1, K, S, D]."""
    _, K, _, D = keys.shape
    scores = jnp.einsum("kgd,ksd->kgs", query.reshape(K, -1, D), keys[0], precision="highest") * jnp.float32(D**-0.5)
    return jax.nn.softmax(scores, axis=-1), jax.nn.logsumexp(scores, axis=-1).reshape(-1)


def code_inputs(code: str, bits: int, keys: jax.Array) -> tuple[str, jax.Array, jax.Array]:
    """Retriever, projections and centre of one row of the table."""
    _, K, _, D = keys.shape
    retriever = "sign" if code == "sign" else "hata"
    weights = jnp.asarray(projections("hata" if code == "hata, random" else "sign", D, bits, seed=0))
    mean = jnp.zeros((1, K, D), jnp.float32) if code == "hata, random" else keys.mean(axis=2)
    return retriever, jnp.broadcast_to(weights, (K, *weights.shape)), mean


def mass_rows(queries: np.ndarray, keys: Sequence[jax.Array]) -> list[report.Row]:
    """The table of codes."""
    steps, num_layers, H, _ = queries.shape
    S = keys[0].shape[2]
    begin, end = jnp.zeros((1,), jnp.int32), jnp.array([S], jnp.int32)
    rows = []
    for (code, bits, share), prototype in MASS.items():
        k, found = int(share * S), []
        for layer in range(num_layers):
            K = keys[layer].shape[1]
            retriever, weights, mean = code_inputs(code, bits, keys[layer])
            codes, factors = hash_encode(keys[layer], weights, mean)
            for step in range(EVERY, steps, EVERY):
                weights_now, _ = exact_attention(queries[step, layer], keys[layer])
                _, lse = exact_attention(queries[step - 1, layer], keys[layer])
                got = select_topk(
                    jnp.asarray(queries[step, layer])[None], weights, mean, lse[None], codes, factors, begin, end,
                    jnp.array([k], jnp.int32), jnp.zeros((1, K), bool), k_max=k, retriever=retriever,
                    scale=queries.shape[-1] ** -0.5,
                )  # fmt: skip
                p = np.asarray(weights_now)
                exact = np.argsort(-p.sum(axis=1), axis=-1, kind="stable")[:, :k]
                for head in range(K):
                    ratio = p[head][:, np.asarray(got)[0, head]].sum(-1) / p[head][:, exact[head]].sum(-1)
                    found.append(ratio.mean())
        more = {
            "code": code,
            "bits": bits,
            "share": share,
            "prototype": prototype,
            "p10": float(np.quantile(found, 0.1)),
        }
        value = float(np.mean(found))
        rows.append(
            report.Row(f"mass, {code}, R = {bits}, {share:.0%}", value, "share", "prototype", prototype, None, more)
        )
        rows.append(_difference(rows[-1]))
    return rows


def new_rows(queries: np.ndarray, keys: Sequence[jax.Array]) -> list[report.Row]:
    """The table of buffers: the real prefetch op over the recorded queries."""
    rows = []
    for retain, prototypes in NEW_ROWS.items():
        for threshold, when, prototype in ((0.8, "on a miss", prototypes[0]), (2.0, "at every step", prototypes[1])):
            selected, posted, hits, misses = _replay(queries, keys, retain, threshold)
            more = {"retain": retain, "refreshed": when, "hit_rate": hits / (hits + misses), "prototype": prototype}
            name = f"new rows / k, buffer of {retain:g} k, refreshed {when}"
            rows.append(report.Row(name, posted / selected, "share", "prototype", prototype, None, more))
            rows.append(_difference(rows[-1]))
    return rows


def _difference(row: report.Row) -> report.Row:
    return report.Row(f"{row.name}: off the prototype by", abs(row.value - row.control), "share", goal="<= 0.03 share")


def _replay(queries: np.ndarray, keys: Sequence[jax.Array], retain: float, threshold: float):
    steps, num_layers, H, D = queries.shape
    _, K, S, _ = keys[0].shape
    k = int(0.1 * S)
    slots = int(retain * k)
    i32 = functools.partial(jnp.full, dtype=jnp.int32)
    with Engine(
        kv_heads=[K] * num_layers,
        batch=1,
        max_tokens=S,
        num_slots=slots,
        head_dim=D,
        dtype=jnp.float32,
        kv_offload=False,
    ) as engine:
        call = jax.jit(
            functools.partial(prefetch, engine=engine.handle, retriever="sign", refresh="delta", k_max=k, scale=D**-0.5)
        )
        token = jnp.zeros((1,), jnp.uint32)
        prepared = []
        for layer in range(num_layers):
            _, weights, mean = code_inputs("sign", 256, keys[layer])
            prepared.append((weights, mean, *hash_encode(keys[layer], weights, mean)))
        labels = [jnp.zeros((1, H, D), jnp.float32)] * num_layers
        ages = [i32((1, K), -1)] * num_layers
        for step in range(steps):
            if step == 1:
                jax.block_until_ready(token)
                engine.clear_counters()  # the first fill is no refresh
            for layer, (weights, mean, codes, factors) in enumerate(prepared):
                query = jnp.asarray(queries[step, layer])[None]
                _, lse = exact_attention(queries[max(step - 1, 0), layer], keys[layer])
                labels[layer], ages[layer], _, token = call(
                    query, labels[layer], ages[layer], jnp.ones((H,), jnp.float32),
                    jnp.full((K,), threshold, jnp.float32), i32((1,), 2**30), weights, mean, lse[None], codes, factors,
                    i32((1,), 0), i32((1,), S), i32((1,), k), i32((1,), slots), i32((1,), layer), token,
                )  # fmt: skip
        jax.block_until_ready(token)
        counters = engine.counters()
    return counters.rows_selected, counters.rows_posted, counters.hits, counters.misses


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Selection quality and new rows by buffer size.")
    parser.add_argument("checkpoint")
    parser.add_argument("text", type=pathlib.Path, help="a long English text")
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--out", type=pathlib.Path, default=report.RESULTS / "cpu-selection.json")
    args = parser.parse_args(argv)
    config, params, info = checkpoints.load_checkpoint(args.checkpoint, dtype="float32")
    tokenizer = Tokenizer.from_folder(info.path)
    text = tokenizer.decode(tokenizer.encode(args.text.read_text())[: args.tokens])
    ids = tokenizer.encode_chat([{"role": "user", "content": f"{text}\n\nSummarize the terms above in detail."}])
    queries, keys = record(config, params, ids, args.steps)
    rows = mass_rows(queries, keys) + new_rows(queries, keys)
    settings = {"checkpoint": args.checkpoint, "text": args.text.name, "tokens": len(ids), "steps": args.steps}
    print(report.markdown(report.write(args.out, "selection", settings, rows)))


if __name__ == "__main__":
    main()
