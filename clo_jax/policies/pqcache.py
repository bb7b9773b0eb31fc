"""PQCache: product-quantised keys find the tokens, a block cache on the device spares some of the gathering.

Source: Zhang et al., "PQCache: Product Quantization-based KVCache for Long Context LLM Inference", SIGMOD 2025, and the
authors' repository, whose settings are the defaults here.

The method. At the end of prefill, the keys of each KV head beyond the sink are cut into `subvectors` parts, and the
parts are clustered by k-means (Euclidean, 2^code_bits centroids). A key's code is the numbers of its parts' nearest
centroids. In decode, a query head's products with all centroids make a table; a token's score is the sum of its code's
entries, scaled by D^-1/2; scores go through a softmax and are summed over the query heads that share a KV head; the KV
head fetches the tokens with the largest sums. The query is the exact one of the step and layer, so that nothing can
begin before the layer does: no guess, no overlap with the layer before.

Which tokens. Of the n - sink tokens beyond the `sink_tokens` first ones, a budget of ceil(sparsity · (n - sink)) is
attended to: the share `recent_share` of it are the newest tokens, the rest are selected among the tokens between. The
sink comes on top.

New tokens. A token enters the window of recent ones on the device. When it leaves, its row goes to the host, its key
gets the code of the nearest centroids, which stay as prefill made them, and from that very step on it can be selected.

The cache. Per layer and sequence the device holds `cache_tokens` tokens in blocks of `block_tokens` consecutive ones,
for all KV heads together. Selected rows in cached blocks are read there; the others are gathered by the CPU and copied.
Then the blocks are ranked by how many selected tokens they hold over all heads, and as many
of the best as the cache has blocks are inserted in that order under a least-frequently-used rule; blocks that are new
are copied whole.

Where things are. Device: codes, centroids, sink and recent rows, the block cache; the fetched rows, in one buffer that
the layers fill in turn. Host: the rows of all tokens that are neither sink nor recent, and the tables of the cache.
Each step and layer moves indices to the host and waits, then the missing rows and the new blocks to the device, and a
row per head that left the window to the host. The device selects, the CPU decides what is in the cache and gathers.

What differs from the original.
- Sizes follow the context as it grows; there they are fixed by the prompt. At the end of a prompt they are the same,
  but for a rounding.
- k-means runs in JAX on the device, a fixed number of iterations from evenly spaced keys; there on the CPU, beside the
  prefill of later layers, with 3 to 300 iterations, as many as fit. Prefill times are therefore not comparable.
- Codes and centroids stay on the device: they are a hundredth of the rows. There they live in host memory and are
  fetched one layer ahead.
- Whether a row is in the cache is looked up on the CPU, which is asked anyway, not on the device.
- Only whole blocks enter the cache; there the last, growing one may, with rows that are not there yet.
- Any number of sequences, each with its own cache; there one.
- A prompt with fewer keys than centroids gives each key its own; there it is not compressed and attended to in full.
- Gathering is NumPy's, on a few threads, and what is gathered crosses in pieces (`policies.staging`); see
  `policies.host_rows` for how times suffer. What is attended to and what is counted is not affected.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from clo_jax.config import ModelConfig
from clo_jax.policies import dense, kmeans
from clo_jax.policies.base import LayerState, Position, Prefilled, Shared
from clo_jax.policies.block_cache import BlockRows, most_sent
from clo_jax.policies.clo import take_tail
from clo_jax.policies.exact import write_row
from clo_jax.policies.geometry import RivalLayout
from clo_jax.policies.host_rows import call
from clo_jax.policies.ring import held_tokens, ring_place
from clo_jax.policies.rival import Always, HostPolicy, Reads
from clo_jax.policies.staging import access
from clo_jax.rivals import PQCacheConfig


@dataclasses.dataclass(frozen=True)
class PQCachePolicy(HostPolicy):
    """See the module docstring. `rows`: the handle of its BlockRows.

    State of a layer, m sub-vectors of d = D/m values, C centroids, T = sink + window: centroids [B, K, m, C, d]
    float32, codes [B, K, m, S] uint8, kept rows [B, K, T, 2, D] (as CLO's tail), cached blocks
    [B, K, blocks · block, 2, D].
    """

    layout: RivalLayout
    config: PQCacheConfig
    rows: int
    name = "pqcache"

    @staticmethod
    def geometry(model: ModelConfig, config: PQCacheConfig, batch: int, max_tokens: int, dtype: str) -> RivalLayout:
        """The layout for a batch.

        Raises:
          ValueError: more full layers than the model has, or sub-vectors that do not divide the head dim.
        """
        if model.head_dim % config.subvectors:
            raise ValueError(
                f"subvectors: got {config.subvectors}, wanted a divisor of the model's head dim {model.head_dim}"
            )
        layout = RivalLayout.of(model, batch, max_tokens, dtype, config.full_layers)
        policy, row = PQCachePolicy(layout, config, 0), layout.row_bytes
        parts = {
            "codes": config.subvectors * max_tokens,
            "centroids": 4 * 2**config.code_bits * model.head_dim,
            "sink and recent rows": policy.kept * row,
            "cached blocks": policy.blocks * config.block_tokens * row,
        }
        return layout.with_bytes(parts, max_tokens * row, {"fetched rows": policy.most * row})

    @staticmethod
    def keeper(layout: RivalLayout, config: PQCacheConfig) -> BlockRows:
        """The host's part."""
        policy = PQCachePolicy(layout, config, 0)
        return BlockRows(layout, policy.blocks, config.block_tokens, policy.most)

    @property
    def retriever_name(self) -> str:
        return f"{self.config.subvectors} x {self.config.code_bits} bit product codes, exact query"

    @property
    def blocks(self) -> int:
        """Blocks of the device cache; no more than the context has."""
        return min(self.config.cache_tokens, self.layout.max_tokens) // self.config.block_tokens

    @property
    def kept(self) -> int:
        """T: sink rows, then a ring for the window."""
        return self.config.sink_tokens + int(sizes(self.config, np.int32(self.layout.max_tokens), np)[0])

    @property
    def most(self) -> int:
        """Rows that a head selects at most."""
        return max(int(sizes(self.config, np.int32(self.layout.max_tokens), np)[1]), 1)

    def begins(self, length: jax.Array) -> jax.Array:
        """The first token of the window at a context of `length` tokens; those from the sink to it are candidates."""
        return jnp.maximum(length - sizes(self.config, length)[0], self.config.sink_tokens)

    def always(self, prompt_tokens: int, cached: np.ndarray) -> Always:
        recent, _ = sizes(self.config, cached + 1, np)
        return Always(self.config.sink_tokens, np.maximum(cached + 1 - recent, self.config.sink_tokens))

    def reads(self, prompt_tokens: int, cached: np.ndarray) -> Reads:
        always = self.always(prompt_tokens, cached)
        selected = np.minimum(sizes(self.config, cached + 1, np)[1], always.begin - always.sink)
        return Reads(selected, always.count(cached) + selected)

    # --- prefill ----------------------------------------

    def absorb_own(self, prompt: Prefilled, layer: jax.Array, shared: Shared) -> tuple[LayerState, Shared]:
        lay, config = self.layout, self.config
        B, K, D = lay.batch, lay.num_kv_heads, lay.head_dim
        first = jnp.minimum(prompt.lengths, config.sink_tokens)
        parts = split(prompt.rows[:, :, :, 0], config.subvectors)
        centroids = codebooks(parts, first, prompt.lengths - first, 2**config.code_bits, config.iterations)
        codes = encode(parts, centroids)
        (token,) = call(
            self.rows, "offload", (), shared["token"], layer, prompt.rows,
            jnp.minimum(self.begins(prompt.lengths), prompt.lengths),
        )  # fmt: skip
        state = {
            "centroids": centroids,
            "codes": jnp.pad(codes, ((0, 0), (0, 0), (0, 0), (0, lay.max_tokens - codes.shape[3]))),
            "kept": take_tail(prompt.rows, prompt.lengths, config.sink_tokens, self.kept),
            "cache": jnp.zeros((B, K, self.blocks * config.block_tokens, 2, D), prompt.rows.dtype),
        }
        return state, shared | {"token": token}

    # --- decode ----------------------------------------

    def attend_own(
        self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, at: Position, state: LayerState, shared: Shared
    ) -> tuple[jax.Array, LayerState, Shared]:
        lay, config = self.layout, self.config
        length, query = at.position + 1, dense.grouped(q, lay.num_kv_heads)
        begin = self.begins(length)
        state, slot, left = self._slide(state, jnp.stack([k, v], axis=2), at)

        token = jnp.arange(lay.max_tokens, dtype=jnp.int32)[None, None]
        candidate = (token >= config.sink_tokens) & (token < begin[:, None, None])
        score = dense.masked(code_scores(query, state["centroids"], state["codes"]), candidate)
        count = jnp.minimum(sizes(config, length)[1], jnp.maximum(begin - config.sink_tokens, 0))
        count = jnp.where(at.active, count, 0)
        index, chosen = dense.heaviest(dense.group_mass(score), count, self.most)
        state, shared, selected = self._fetch(layer, state, shared, index, count, slot, left, begin)

        held = held_tokens(at.position, config.sink_tokens, self.kept)
        reach = (held >= 0) & ((held < config.sink_tokens) | (held >= begin[:, None]))
        parts = [dense.row_part(query, state["kept"], reach[:, None]), dense.row_part(query, selected, chosen)]
        return dense.attend(parts, q.dtype), state, shared

    def _slide(self, state: LayerState, new: jax.Array, at: Position) -> tuple[LayerState, jax.Array, jax.Array]:
        """Takes a new row [B, K, 2, D] into the window. Returns the state, and what leaves it: the token's number
        [B, K], -1: none, and its row. Its code is among the codes then."""
        lay, sink = self.layout, self.config.sink_tokens
        leaving = self.begins(at.position)
        leaves = (self.begins(at.position + 1) > leaving) & at.active
        place = ring_place(leaving, sink, self.kept)
        left = jnp.take_along_axis(state["kept"], place[:, None, None, None, None], axis=2)[:, :, 0]
        parts = split(left[:, :, None, 0], self.config.subvectors)
        code = encode(parts, state["centroids"])[..., 0]
        where = jnp.where(leaves, leaving, lay.max_tokens)  # beyond the end: dropped
        codes = jax.vmap(lambda all, i, one: all.at[:, :, i].set(one, mode="drop"))(state["codes"], where, code)
        kept = write_row(state["kept"], ring_place(at.position, sink, self.kept), new)
        slot = jnp.broadcast_to(jnp.where(leaves, leaving, -1)[:, None], (lay.batch, lay.num_kv_heads))
        return state | {"codes": codes, "kept": kept}, slot, left

    def _fetch(
        self, layer: int, state: LayerState, shared: Shared, index: jax.Array, count: jax.Array, slot: jax.Array,
        left: jax.Array, end: jax.Array,
    ) -> tuple[LayerState, Shared, jax.Array]:  # fmt: skip
        """Rows [B, K, n, 2, D] of the selected tokens, from the cache or the host; what is new in the cache."""
        cache, n = state["cache"], index.shape[2]
        most = most_sent(self.layout, n, cache.shape[2])
        token, rows, cache = access(
            self.rows, "look_up", shared["token"], layer, cache, n, most, index, count, slot, left, end
        )
        return state | {"cache": cache}, shared | {"token": token}, rows


def sizes(config: PQCacheConfig, length, xp=jnp):
    """Window and number of selected tokens at a context of `length` tokens (int32), the newest one included. Both grow
    by at most one a token. `xp`: jnp, or np for a size that is static; both compute in float32."""
    beyond = xp.maximum(length - config.sink_tokens, 0).astype(xp.float32)
    budget = xp.ceil(xp.float32(config.sparsity) * beyond)
    recent = xp.floor(xp.float32(config.recent_share) * budget)
    selected = (budget - xp.maximum(recent, 1)).astype(xp.int32)
    return xp.maximum(recent, 1).astype(xp.int32), xp.maximum(selected, 0)


def split(keys: jax.Array, subvectors: int) -> jax.Array:
    """Sub-vectors of keys: [B, K, N, D] -> float32 [B, K, m, N, d]."""
    B, K, N, D = keys.shape
    return keys.astype(jnp.float32).reshape(B, K, N, subvectors, D // subvectors).transpose(0, 1, 3, 2, 4)


def codebooks(parts: jax.Array, first: jax.Array, count: jax.Array, number: int, iterations: int) -> jax.Array:
    """Centroids of each sub-vector from the tokens [first, first + count): [B, K, m, N, d] -> [B, K, m, C, d]."""
    B, K, m, N, d = parts.shape
    make = functools.partial(kmeans.lloyd, number=number, iterations=iterations)
    sets = (parts.reshape(-1, N, d), jnp.repeat(first, K * m), jnp.repeat(count, K * m))
    return kmeans.over_sets(make, sets, 4 * N * (d + 3 * number)).reshape(B, K, m, number, d)


def encode(parts: jax.Array, centroids: jax.Array) -> jax.Array:
    """Codes of sub-vectors [B, K, m, N, d] by centroids [B, K, m, C, d] -> uint8 [B, K, m, N]."""
    B, K, m, N, d = parts.shape
    sets = (parts.reshape(-1, N, d), centroids.reshape(B * K * m, -1, d))
    codes = kmeans.over_sets(kmeans.nearest, sets, 4 * N * (d + 3 * centroids.shape[3]))
    return codes.astype(jnp.uint8).reshape(B, K, m, N)


def code_scores(query: jax.Array, centroids: jax.Array, codes: jax.Array) -> jax.Array:
    """Scaled products of query [B, K, G, D] with the keys that codes [B, K, m, S] stand for -> float32 [B, K, G, S]."""
    B, K, G, D = query.shape
    m = codes.shape[2]
    q = query.astype(jnp.float32).reshape(B, K, G, m, D // m)
    table = jnp.einsum("bkgmd,bkmcd->bkgmc", q, centroids, precision="highest")
    found = jnp.take_along_axis(table, codes[:, :, None].astype(jnp.int32), axis=4)
    return found.sum(axis=3) * jnp.float32(1 / math.sqrt(D))
