"""RetroInfer: the cache as a vector store. Clusters of keys are retrieved exactly, estimated, or left out.

Source: Chen et al., "RetroInfer: A Vector-Storage Approach for Scalable Long-Context LLM Inference" (arXiv 2505.02922),
and the authors' repository, whose settings are the defaults here, but for the budget.

The method. The context is in three zones. The *steady zone* is on the device and attended to exactly: the `sink_tokens`
first tokens, the `recent_tokens` last ones of the prompt, and all that were generated since. Every other token belongs
to a cluster of its head: its keys, less their mean, are clustered by spherical k-means within segments of about
`segment_tokens` tokens, one cluster for `cluster_tokens` tokens (see `policies.clusters`). The device knows of each
cluster the mean key, the number of tokens and the sum of their values. In a step the exact query of each head is
multiplied with all centroids; the softmax is summed over the query heads that share a KV head; and the KV head ranks
its clusters. The first ones are the *retrieval zone*: their rows are attended to exactly. The next ones are the
*estimation zone*: a cluster counts as if all its keys were the centroid, exp(q·c) · size in the denominator and
exp(q·c) · Σv in the numerator. All zones meet in one softmax.

Budget. sparsity is the share of the clusters that is retrieved, `estimation` the share that is estimated. The
original's budget is 0.018 (`RetroInferConfig.original()`); the memory that CLO's authors report for it is that of 0.1,
the default here. How much they estimated is not known; the original's share is the default. The steady zone comes on
top.

New tokens. When `update_tokens` of them have gathered in the steady zone beyond the recent ones, the oldest
`update_tokens` are clustered among themselves (about their own mean, in one segment) and their clusters join the index.

The wave buffer. The rows of a cluster lie side by side in host memory. For each layer, sequence and KV head the CPU
keeps a list of the clusters that the device caches, in order of use, and a set of free pages of `page_tokens` rows. An
access splits the retrieved clusters in hits and misses; the device puts its execution buffer together from its cache
and from the rows that the host sends. Afterwards the missed clusters are admitted in their order while others can be
evicted, least recently used first. The cache holds `cache_ratio` of all clusters, or, if that is 0, three times as many
as are retrieved; in rows, as many as clusters of mean size have.

Where things are. Device: centroids, sizes, value sums, steady zone, the cluster cache; one execution buffer, which the
layers fill in turn, as in the original. Host: all rows of clusters, the lists. Each step and layer moves cluster
numbers to the host and waits, then the missed rows to the device. The device ranks, the CPU decides what is cached and
gathers.

What differs from the original.
- There the GPU reads missed rows from pinned host memory by itself, once the CPU has said which; here the CPU gathers
  them and they cross in pieces (`policies.staging`). The lists are NumPy's, on one thread for all heads, not those of
  a pool of C++ threads, and their update does not overlap with attention. See `policies.host_rows` for how times
  suffer. What is attended to and what is counted is not affected.
- Segments follow the number of tokens that are clustered, each sequence on its own; the number of centroids is not
  rounded to multiples that a kernel wants; a centroid that no key belongs to in an iteration stays.
- The execution buffer holds max(`buffer_clusters`, 4 times the retrieved) clusters of mean size, at most the context.
  There more than that is an error. Here the clusters that do not fit are estimated. There it also takes a copy of the
  steady zone at every step; here attention reads that zone where it is.
- The numbers of retrieved and estimated clusters grow with the index; there they stay as for the prompt.
- Index and estimation are in float32.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from clo_jax.config import ModelConfig
from clo_jax.policies import clusters, dense, kmeans
from clo_jax.policies.base import LayerState, Position, Prefilled, Shared
from clo_jax.policies.clo import take_tail
from clo_jax.policies.exact import write_row
from clo_jax.policies.geometry import RivalLayout
from clo_jax.policies.host_rows import call
from clo_jax.policies.ring import held_tokens, ring_place
from clo_jax.policies.rival import Always, HostPolicy, Reads
from clo_jax.policies.staging import access
from clo_jax.policies.wave_buffer import ClusterRows
from clo_jax.rivals import RetroInferConfig


@dataclasses.dataclass(frozen=True)
class RetroInferPolicy(HostPolicy):
    """See the module docstring. `rows`: the handle of its ClusterRows.

    State of a layer, C clusters, T = sink + recent + update: centroids [B, K, C, D] float32, sizes [B, K, C] float32,
    values [B, K, C, D] float32, how many clusters [B] int32 (`number`), how far tokens are indexed [B] int32
    (`indexed`), steady rows [B, K, T, 2, D] (as CLO's tail), cached rows [B, K, pages · page, 2, D].
    """

    layout: RivalLayout
    config: RetroInferConfig
    rows: int
    name = "retroinfer"

    @staticmethod
    def geometry(model: ModelConfig, config: RetroInferConfig, batch: int, max_tokens: int, dtype: str) -> RivalLayout:
        """The layout for a batch. Raises ValueError for more full layers than the model has."""
        layout = RivalLayout.of(model, batch, max_tokens, dtype, config.full_layers)
        policy, row = RetroInferPolicy(layout, config, 0), layout.row_bytes
        parts = {
            "centroids and value sums": policy.room * 4 * (2 * model.head_dim + 1),
            "steady rows": policy.steady * row,
            "cached clusters": policy.pages * config.page_tokens * row,
        }
        return layout.with_bytes(parts, max_tokens * row, {"execution buffer": policy.buffer * row})

    @staticmethod
    def keeper(layout: RivalLayout, config: RetroInferConfig) -> ClusterRows:
        """The host's part."""
        policy = RetroInferPolicy(layout, config, 0)
        return ClusterRows(layout, policy.room, policy.pages, config.page_tokens, policy.buffer, config.sink_tokens)

    # --- sizes ----------------------------------------

    @property
    def retriever_name(self) -> str:
        return f"clusters of {self.config.cluster_tokens}, estimation {self.config.estimation}, exact query"

    @property
    def room(self) -> int:
        """C: clusters that the context may have."""
        return self.layout.max_tokens // self.config.cluster_tokens + 2

    @property
    def steady(self) -> int:
        """T: rows of the steady zone; a context that never fills it needs no more than it has tokens."""
        full = self.config.sink_tokens + self.config.recent_tokens + self.config.update_tokens
        return min(full, max(self.layout.max_tokens, self.config.sink_tokens + 1))

    @property
    def probes(self) -> int:
        """Clusters that are retrieved, at most."""
        return max(round(self.room * self.config.sparsity), 1)

    @property
    def ranked(self) -> int:
        """Clusters that are retrieved or estimated, at most."""
        return min(self.probes + round(self.room * self.config.estimation) + 1, self.room)

    @property
    def buffer(self) -> int:
        """E: rows of the execution buffer."""
        held = max(self.config.buffer_clusters, 4 * self.probes)
        return min(held * self.config.cluster_tokens, self.layout.max_tokens)

    @property
    def pages(self) -> int:
        """Pages of the cache of a head."""
        config = self.config
        held = round(config.cache_ratio * self.room) if config.cache_ratio else 3 * self.probes
        return min(held, self.room) * -(-config.cluster_tokens // config.page_tokens)

    def always(self, prompt_tokens: int, cached: np.ndarray) -> Always:
        first, updates = self._updates(prompt_tokens, cached)
        return Always(self.config.sink_tokens, first + updates * self.config.update_tokens)

    def _updates(self, prompt_tokens: int, cached: np.ndarray) -> tuple[int, np.ndarray]:
        """How far the prompt is indexed, and how often new tokens have been."""
        config = self.config
        first = max(prompt_tokens - config.recent_tokens, config.sink_tokens)
        return first, np.maximum(cached - first - config.recent_tokens, 0) // config.update_tokens

    def reads(self, prompt_tokens: int, cached: np.ndarray) -> Reads:
        config, always = self.config, self.always(prompt_tokens, cached)
        first, updates = self._updates(prompt_tokens, cached)
        number = clusters.num_clusters(np.int32(first - config.sink_tokens), config.cluster_tokens, np)
        number = number + updates * (config.update_tokens // config.cluster_tokens)
        share = np.round(np.float32(config.sparsity) * number.astype(np.float32))
        of_mean_size = (always.begin - always.sink) / np.maximum(number, 1)
        selected = np.minimum(np.maximum(share, 1), self.probes) * of_mean_size
        return Reads(selected, always.count(cached) + selected)

    # --- prefill ----------------------------------------

    def absorb_own(self, prompt: Prefilled, layer: jax.Array, shared: Shared) -> tuple[LayerState, Shared]:
        lay, config = self.layout, self.config
        B, K, D = lay.batch, lay.num_kv_heads, lay.head_dim
        first = jnp.full((B,), config.sink_tokens, jnp.int32)
        indexed = jnp.maximum(prompt.lengths - config.recent_tokens, first)
        index = self._cluster(prompt.rows, first, indexed - first, self.room, config.segment_tokens)
        (token,) = call(self.rows, "build", (), shared["token"], layer, prompt.rows, index.labels)
        state = {
            "centroids": index.centroids,
            "sizes": index.sizes,
            "values": index.values,
            "number": clusters.num_clusters(indexed - first, config.cluster_tokens),
            "indexed": indexed,
            "steady": take_tail(prompt.rows, prompt.lengths, config.sink_tokens, self.steady),
            "cache": jnp.zeros((B, K, self.pages * config.page_tokens, 2, D), prompt.rows.dtype),
        }
        return state, shared | {"token": token}

    def _cluster(
        self, rows: jax.Array, first: jax.Array, count: jax.Array, room: int, segment: int
    ) -> clusters.Clusters:
        """Clusters of every head: rows [B, K, N, 2, D], first and count [B]; the results begin with [B, K]."""
        B, K = rows.shape[:2]
        make = functools.partial(
            clusters.cluster, room=room, per_cluster=self.config.cluster_tokens, segment=segment,
            iterations=self.config.iterations,
        )  # fmt: skip
        heads = (rows.reshape(B * K, *rows.shape[2:]), jnp.repeat(first, K), jnp.repeat(count, K))
        each = clusters.work_bytes(rows.shape[2], rows.shape[4], room, self.config.cluster_tokens, segment)
        found = kmeans.over_sets(make, heads, each)
        return clusters.Clusters(*(x.reshape(B, K, *x.shape[1:]) for x in found))

    # --- decode ----------------------------------------

    def attend_own(
        self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, at: Position, state: LayerState, shared: Shared
    ) -> tuple[jax.Array, LayerState, Shared]:
        lay, sink, T = self.layout, self.config.sink_tokens, self.steady
        state, shared = self._update(layer, at, state, shared)
        place = ring_place(at.position, sink, T)
        state = state | {"steady": write_row(state["steady"], place, jnp.stack([k, v], axis=2))}
        query = dense.grouped(q, lay.num_kv_heads)

        used = state["sizes"] > 0
        score = dense.masked(dense.scores(query, state["centroids"], lay.head_dim**-0.5), used)
        probes, ranked = self._counts(state["number"])
        index, chosen = dense.heaviest(dense.group_mass(score), jnp.where(at.active, ranked, 0), self.ranked)
        sizes = jnp.where(chosen, jnp.take_along_axis(state["sizes"], index, axis=2), 0.0)
        rows = jnp.cumsum(sizes, axis=2)
        rank = jnp.arange(self.ranked, dtype=jnp.int32)[None, None]
        retrieved = chosen & (rank < probes[:, None, None]) & (rows <= self.buffer)
        count = retrieved.sum(axis=2, dtype=jnp.int32)
        total = jnp.where(retrieved, sizes, 0.0).sum(axis=2)
        state, shared, buffer = self._access(layer, state, shared, index[:, :, : self.probes], count)

        filled = jnp.arange(self.buffer, dtype=jnp.float32)[None, None] < total[..., None]
        held = held_tokens(at.position, sink, T)
        reach = (held >= 0) & ((held < sink) | (held >= state["indexed"][:, None]))
        estimated = dense.Part(
            dense.masked(jnp.take_along_axis(score, index[:, :, None], axis=3), chosen & ~retrieved),
            jnp.take_along_axis(state["values"], index[..., None], axis=2),
            sizes,
        )
        parts = [
            dense.row_part(query, state["steady"], reach[:, None]),
            dense.row_part(query, buffer, filled),
            estimated,
        ]
        return dense.attend(parts, q.dtype), state, shared

    def _counts(self, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of `number` clusters [B], how many are retrieved, and how many retrieved or estimated: int32 [B]."""

        def share(of: float) -> jax.Array:
            return jnp.round(jnp.float32(of) * number.astype(jnp.float32)).astype(jnp.int32)

        probes = jnp.minimum(jnp.maximum(share(self.config.sparsity), 1), self.probes)
        return probes, jnp.minimum(jnp.minimum(probes + share(self.config.estimation), number), self.ranked)

    def _access(
        self, layer: int, state: LayerState, shared: Shared, index: jax.Array, count: jax.Array
    ) -> tuple[LayerState, Shared, jax.Array]:
        """The execution buffer [B, K, E, 2, D] with the rows of the clusters; the cache takes what it admits."""
        most = self.layout.batch * self.layout.num_kv_heads * self.buffer
        token, buffer, cache = access(
            self.rows, "access", shared["token"], layer, state["cache"], self.buffer, most, index, count
        )
        return state | {"cache": cache}, shared | {"token": token}, buffer

    def _update(self, layer: int, at: Position, state: LayerState, shared: Shared) -> tuple[LayerState, Shared]:
        """Indexes the oldest tokens of a steady zone that is full, before the next one comes."""
        config = self.config
        due = at.active & (at.position - state["indexed"] >= config.recent_tokens + config.update_tokens)
        parts = ("centroids", "sizes", "values")

        def index(old: tuple, token: jax.Array) -> tuple[tuple, jax.Array]:
            moved = state["indexed"][:, None] + jnp.arange(config.update_tokens, dtype=jnp.int32)[None]
            place = ring_place(moved, config.sink_tokens, self.steady)
            rows = jnp.take_along_axis(state["steady"], place[:, None, :, None, None], axis=2)
            every = jnp.full_like(at.position, config.update_tokens)
            room = config.update_tokens // config.cluster_tokens
            new = self._cluster(rows, jnp.zeros_like(every), every, room, config.update_tokens)
            labels = jnp.where(due[:, None, None], new.labels, -1)
            (token,) = call(self.rows, "extend", (), token, layer, rows, labels, state["number"])
            # Sequences that are not due write beyond the end: dropped.
            slot = jnp.where(due, state["number"], self.room)[:, None] + jnp.arange(room, dtype=jnp.int32)[None]
            put = jax.vmap(lambda all, i, some: all.at[:, i].set(some, mode="drop"))
            return tuple(put(all, slot, getattr(new, name)) for name, all in zip(parts, old, strict=True)), token

        old = tuple(state[name] for name in parts)
        found, token = jax.lax.cond(jnp.any(due), index, lambda old, token: (old, token), old, shared["token"])
        grown = state | dict(zip(parts, found, strict=True))
        grown["number"] = state["number"] + jnp.where(due, config.update_tokens // config.cluster_tokens, 0)
        grown["indexed"] = state["indexed"] + jnp.where(due, config.update_tokens, 0)
        return grown, shared | {"token": token}
