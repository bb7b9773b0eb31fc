"""CLO: head-wise approximate cache on the device, rows in host memory, prefetch one layer ahead (design, section 2).

State of a layer: labels and their age, codes and key factors, key means, log-sum-exp of the last step, resident rows
and tail rows. The host rows, the selected rows and their slot table belong to the transfer engine.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from clo_jax.cache.calibration_parts import HashWeights, Importance
from clo_jax.cache.layout import CacheLayout
from clo_jax.cache.projections import projections
from clo_jax.cache.thresholds import thresholds
from clo_jax.config import CloConfig, GuessFrom
from clo_jax.ops.attend import attend
from clo_jax.ops.hash_encode import hash_encode
from clo_jax.ops.offload import offload
from clo_jax.ops.prefetch import prefetch
from clo_jax.policies import tracking
from clo_jax.policies.base import LATER, LayerState, Position, Prefilled, Shared, Tables
from clo_jax.policies.full import pad_tokens

NEVER = np.int32(2**30)  # an age that no head reaches


class HeadScores(NamedTuple):
    """Importance of heads, arrays hashed by identity: they only pass through to `tables`."""

    query_heads: np.ndarray  # [L, H] in [0, 1]
    kv_heads: np.ndarray  # [L, K]
    source: str  # "neutral", "given", "measured (by what)"


def neutral_scores(layout: CacheLayout) -> HeadScores:
    """All heads equally important: every threshold is the base threshold."""
    L, H, K = layout.num_layers, layout.num_heads, layout.num_kv_heads
    return HeadScores(np.ones((L, H), np.float32), np.ones((L, K), np.float32), "neutral")


def given_scores(layout: CacheLayout, scores: np.ndarray) -> HeadScores:
    """Scores that somebody measured: [L, K], one per KV head, or [L, H], one per query head.

    A KV head's threshold follows its most important query head, so that no head of a group is reused more loosely than
    its own importance allows.

    Raises:
      ValueError: another shape, or values outside [0, 1].
    """
    L, H, K = layout.num_layers, layout.num_heads, layout.num_kv_heads
    scores = np.asarray(scores, np.float32)
    if scores.shape not in ((L, K), (L, H)):
        raise ValueError(f"head_scores: got shape {scores.shape}, wanted {(L, K)} (KV heads) or {(L, H)} (query heads)")
    if not np.all((scores >= 0) & (scores <= 1)):
        raise ValueError(f"head_scores: got values in [{scores.min()}, {scores.max()}], wanted [0, 1]")
    if scores.shape == (L, K):
        return HeadScores(np.repeat(scores, layout.group, axis=1), scores, "given")
    return HeadScores(scores, scores.reshape(L, K, layout.group).max(axis=2), "given")


def measured_scores(layout: CacheLayout, importance: Importance) -> HeadScores:
    """Scores from a calibration, treated like given ones."""
    return given_scores(layout, importance.scores)._replace(source=f"measured ({importance.source})")


@dataclasses.dataclass(frozen=True)
class CloPolicy:
    """The policy for one layout, configuration and engine (its handle). `hashed`: projections of a calibration, for
    the configuration's retriever and bits; None: untrained ones. `planner`: what chose the layout's resident heads."""

    layout: CacheLayout
    config: CloConfig
    engine: int
    scores: HeadScores = dataclasses.field(compare=False)
    hashed: HashWeights | None = dataclasses.field(default=None, compare=False)
    planner: str = dataclasses.field(default="none", compare=False)
    track: bool = False  # keep `policies.tracking` statistics
    revision: Any = dataclasses.field(default=None, compare=False)  # of the plan, for the metrics
    name = "clo"
    sampled_queries = 0

    @property
    def guess_from(self) -> GuessFrom:
        return self.config.guess_from

    @property
    def retriever_name(self) -> str:
        """The retriever, and whether its projections are trained where that makes a difference: `sign` needs no
        training, `hata` does."""
        if self.hashed is not None and self.hashed.trained:
            return f"{self.config.retriever} (trained)"
        return "hata (untrained)" if self.config.retriever == "hata" else self.config.retriever

    # --- constants ----------------------------------------

    def tables(self) -> tuple[Tables, ...]:
        K, G, D = self.layout.num_kv_heads, self.layout.group, self.layout.head_dim
        untrained = projections(self.config.retriever, D, self.layout.hash_bits, self.config.seed)
        tau = thresholds(self.scores.kv_heads, self.config.sim_threshold, self.config.importance_power)
        per_layer = []
        for layer in range(self.layout.num_layers):
            heads = np.array(self.layout.offloaded(layer), np.int32)
            importance = self.scores.query_heads[layer].reshape(K, G)[heads].reshape(-1)
            weights = np.broadcast_to(untrained, (K, *untrained.shape))
            weights = weights if self.hashed is None else self.hashed.weights[layer]
            per_layer.append(
                {
                    "importance": jnp.asarray(importance, jnp.float32),
                    "thresholds": jnp.asarray(tau[layer][heads], jnp.float32),
                    "weights": jnp.asarray(weights[heads]),
                }
            )
            if self.track:
                per_layer[-1]["every_importance"] = jnp.asarray(self.scores.query_heads[layer], jnp.float32)
        return tuple(per_layer)

    def layer_kind(self, layer: int) -> tuple[int, ...]:
        """The resident heads: layers with the same ones share one compiled `absorb`."""
        return self.layout.resident[layer]

    def allocate(self) -> Shared:
        return {"token": jnp.zeros((1,), jnp.uint32)}

    # --- prefill ----------------------------------------

    def absorb(
        self, kind: tuple[int, ...], tables: Tables, prompt: Prefilled, layer: jax.Array, shared: Shared
    ) -> tuple[LayerState, Shared]:
        """Offloads the prompt's rows, hashes its keys and fetches the first set with the last prompt token's query."""
        lay, S = self.layout, self.layout.max_tokens
        resident = np.array(kind, np.int32)
        heads = np.array([h for h in range(lay.num_kv_heads) if h not in kind], np.int32)
        state: LayerState = {"resident": pad_tokens(prompt.rows[:, resident], S)}
        if self.track:
            state |= tracking.begin(prompt.query, lay.num_kv_heads)
        if not len(heads):
            return state | self._nothing_offloaded(prompt.rows.dtype), shared
        B, G, D, Ko = lay.batch, lay.group, lay.head_dim, len(heads)
        rows = prompt.rows[:, heads]
        query = prompt.query.reshape(B, lay.num_kv_heads, G, D)[:, heads].reshape(B, Ko * G, D)
        keys = rows[:, :, :, 0]
        valid = jax.lax.broadcasted_iota(jnp.int32, (B, 1, keys.shape[2]), 2) < prompt.lengths[:, None, None]
        # RaBitQ's estimator wants centred keys; HATA's codes are of the keys as they are.
        mean = masked_mean(keys, valid)
        mean = mean if self.config.retriever == "sign" else jnp.zeros_like(mean)
        codes, factors = self._encode(keys, tables["weights"], mean)
        token = offload(
            rows, jnp.zeros_like(prompt.lengths), prompt.lengths, layer, shared["token"],
            engine=self.engine, sink=lay.sink,
        )  # fmt: skip
        state |= {
            "mean": mean,
            "lse": last_lse(query, keys, valid),
            "codes": codes,
            "factors": factors,
            "tail": take_tail(rows, prompt.lengths, lay.sink, lay.tail_rows),
            "label": query,
            "age": jnp.full((B, Ko), -1, jnp.int32),
        }
        # The first decoded token then looks up against a set that was selected for its predecessor, like every other.
        at = Position(prompt.lengths, jnp.ones_like(prompt.lengths, bool))
        state, shared, _ = self._prefetch(layer, tables, query, at, state, shared | {"token": token})
        return state, shared

    def _nothing_offloaded(self, dtype) -> LayerState:
        lay = self.layout
        B, S, D = lay.batch, lay.max_tokens, lay.head_dim
        return {
            "mean": jnp.zeros((B, 0, D), jnp.float32),
            "lse": jnp.zeros((B, 0), jnp.float32),
            "codes": jnp.zeros((B, 0, S, lay.hash_bits // 32), jnp.uint32),
            "factors": jnp.zeros((B, 0, S), jnp.float16),
            "tail": jnp.zeros((B, 0, lay.tail_rows, 2, D), dtype),
            "label": jnp.zeros((B, 0, D), dtype),
            "age": jnp.zeros((B, 0), jnp.int32),
        }

    def _encode(self, keys: jax.Array, weights: jax.Array, mean: jax.Array) -> tuple[jax.Array, jax.Array]:
        B, Ko, _, _ = keys.shape
        S = self.layout.max_tokens
        if self.layout.hash_bits == 0:
            return jnp.zeros((B, Ko, S, 0), jnp.uint32), jnp.zeros((B, Ko, S), jnp.float16)
        codes, factors = hash_encode(keys, weights, mean)
        return pad_tokens(codes, S), pad_tokens(factors, S)

    # --- decode ----------------------------------------

    def prefetch(
        self, layer: int, tables: Tables, query: jax.Array, at: Position, state: LayerState, shared: Shared
    ) -> tuple[LayerState, Shared]:
        lay = self.layout
        heads = np.array(lay.offloaded(layer), np.int32)
        if self.track:
            state = tracking.observe_guess(state, query, tables["every_importance"], at.active)
        if not len(heads):
            return state, shared
        B, G, D = lay.batch, lay.group, lay.head_dim
        if len(heads) < lay.num_kv_heads:
            query = query.reshape(B, lay.num_kv_heads, G, D)[:, heads].reshape(B, len(heads) * G, D)
        state, shared, hit = self._prefetch(jnp.full((1,), layer, jnp.int32), tables, query, at, state, shared)
        return (tracking.observe_hits(state, heads, hit, at.active) if self.track else state), shared

    def _prefetch(
        self, layer: jax.Array, tables: Tables, query: jax.Array, at: Position, state: LayerState, shared: Shared
    ) -> tuple[LayerState, Shared, jax.Array]:
        lay = self.layout
        end = lay.flushed(at.position)
        just_flushed = end != lay.flushed(at.position - 1)
        max_age = jnp.where(just_flushed & self.config.refresh_on_flush, jnp.int32(0), NEVER)
        k = jnp.where(at.active, lay.num_selected(at.position), 0)
        label, age, hit, token, later = prefetch(
            query, state["label"], state["age"], tables["importance"], tables["thresholds"], max_age,
            tables["weights"], state["mean"], state["lse"], state["codes"], state["factors"],
            jnp.minimum(lay.sink, end), end, k, lay.capacity(k), layer, shared["token"],
            engine=self.engine, retriever=self.config.retriever, refresh=self.config.refresh,
            k_max=lay.k_max, scale=lay.head_dim**-0.5, later=shared.get(LATER),
        )  # fmt: skip
        shared = shared | {"token": token} | ({} if later is None else {LATER: later})
        return state | {"label": label, "age": age}, shared, hit

    def attend(
        self, layer: int, tables: Tables, q: jax.Array, k: jax.Array, v: jax.Array, at: Position, state: LayerState,
        shared: Shared,
    ) -> tuple[jax.Array, LayerState, Shared]:  # fmt: skip
        lay = self.layout
        order = lay.head_order(layer)
        q, k, v = permute_heads(q, order, lay.group), permute_heads(k, order, 1), permute_heads(v, order, 1)
        flushed = lay.flushed(at.position)
        which = jnp.full((1,), layer, jnp.int32)
        out, lse, resident, tail, codes, factors, token = attend(
            q, k, v, tables["weights"], state["mean"], at.position, flushed,
            state["resident"], state["tail"], state["codes"], state["factors"], which, shared["token"],
            engine=self.engine if state["label"].shape[1] else 0, sink=lay.sink, scale=lay.head_dim**-0.5,
        )  # fmt: skip
        if state["label"].shape[1]:
            after = lay.flushed(at.position + 1)
            token = offload(tail, flushed, after, which, token, engine=self.engine, sink=lay.sink)
        out = permute_heads(out, None if order is None else np.argsort(order), lay.group)
        state = state | {
            "resident": resident, "tail": tail, "codes": codes, "factors": factors,
            "lse": lse[:, : state["lse"].shape[1]],
        }  # fmt: skip
        return out, state, shared | {"token": token}


def permute_heads(x: jax.Array, order: np.ndarray | None, group: int) -> jax.Array:
    """Reorders the KV heads of [B, heads · group, D]; the group of a KV head stays together."""
    if order is None:
        return x
    B, H, D = x.shape
    return x.reshape(B, H // group, group, D)[:, order].reshape(B, H, D)


def masked_mean(keys: jax.Array, valid: jax.Array) -> jax.Array:
    """Mean over valid tokens: keys [B, K, N, D], valid [B, 1, N] -> float32 [B, K, D]."""
    total = jnp.sum(jnp.where(valid[..., None], keys.astype(jnp.float32), 0.0), axis=2)
    return total / jnp.sum(valid, axis=2)[..., None].astype(jnp.float32)


def last_lse(query: jax.Array, keys: jax.Array, valid: jax.Array) -> jax.Array:
    """Log-sum-exp of the last prompt token's attention: the normaliser that the first selection divides by.

    query [B, H, D], keys [B, K, N, D], valid [B, 1, N] -> float32 [B, H].
    """
    B, K, _, D = keys.shape
    q = query.astype(jnp.float32).reshape(B, K, -1, D)
    scores = jnp.einsum("bkgd,bknd->bkgn", q, keys.astype(jnp.float32)) * jnp.float32(D**-0.5)
    return jax.nn.logsumexp(jnp.where(valid[:, :, None], scores, -jnp.inf), axis=-1).reshape(B, -1)


def take_tail(rows: jax.Array, lengths: jax.Array, sink: int, tail_rows: int) -> jax.Array:
    """The tail buffer after a prompt: sink rows, then the ring of the newest tokens.

    rows [B, K, N, 2, D], lengths [B] -> [B, K, T, 2, D]. Row j >= sink holds the newest token p with
    (p - sink) mod (T - sink) = j - sink; rows that no token maps to yet hold anything: attention never reads them.
    """
    ring = tail_rows - sink
    j = jnp.arange(tail_rows, dtype=jnp.int32)[None, :]
    last = lengths[:, None] - 1
    newest = last - (last - j) % ring
    token = jnp.clip(jnp.where(j < sink, j, newest), 0, rows.shape[2] - 1)
    return jnp.take_along_axis(rows, token[:, None, :, None, None], axis=2)
