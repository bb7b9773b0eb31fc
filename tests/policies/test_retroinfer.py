"""RetroInfer: full attention at 100 %, its zones, its index and how it grows, its cache, and what moves."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clo_jax import generate as gen
from clo_jax.policies import clusters, kmeans
from clo_jax.policies.wave_buffer import ClusterRows, LruClusters
from clo_jax.rivals import RetroInferConfig
from tests import tiny
from tests.policies import rivals

SMALL = RetroInferConfig(
    sparsity=0.2, recent_tokens=8, cluster_tokens=4, segment_tokens=32, iterations=4, page_tokens=2, buffer_clusters=4,
    update_tokens=16,
)  # fmt: skip
WHOLE = dataclasses.replace(SMALL, sparsity=1.0)


@pytest.mark.parametrize("model", [rivals.LLAMA, rivals.QWEN], ids=["llama", "qwen2"])
def test_full_budget_equals_full_attention(model):
    rivals.check_full_budget(model, WHOLE)


@pytest.mark.slow
def test_rows_of_a_batch_equal_their_own_runs():
    rivals.check_batch(SMALL)


@pytest.mark.slow
def test_hundreds_of_new_tokens_enter_the_index():
    model = rivals.ONE
    with rivals.rival(model, WHOLE, 1, 384) as (policy, rows):
        session = rivals.run(model, policy, rows, [tiny.prompt(50)], 300)
    assert session.tokens[0] == rivals.full_tokens(model, 50, 300, 384)
    m, heads = session.metrics(), model.num_kv_heads
    updates = (348 - (50 - 8) - 8) // 16  # at the last step the steady zone holds at most 8 + 16 before it grows
    assert m.rows_offloaded == heads * (50 - 8 - 4 + 16 * updates)
    assert m.rows_selected == heads * sum(50 - 12 + 16 * ((n - 42 - 8) // 16) for n in range(50, 349))
    assert m.hit_rate > 0.9  # a cache for all clusters: each row moves once, or twice where pages run out
    assert m.rows_moved < m.rows_selected / 10


def test_planted_key_is_attended():
    with rivals.rival(tiny.LLAMA, dataclasses.replace(SMALL, estimation=0.0), 2, 128) as (policy, _):
        assert rivals.planted(policy, 50, 100, 128, steps=4).min() > 0.9


def test_planted_new_key_is_attended_after_it_has_been_indexed():
    with rivals.rival(tiny.LLAMA, dataclasses.replace(SMALL, estimation=0.0), 2, 128) as (policy, rows):
        out = rivals.planted(policy, 82, 80, 128, steps=30)
        assert rows.counters().rows_offloaded == 2 * (80 - 12 + 79 - 12 + 2 * 16)
    assert out[:2].max() < 0.9 < out[2:].min()


@pytest.mark.parametrize("buffer_clusters, sparsity", [(4, 0.05), (1, 0.05)])
def test_estimation_is_exact_where_a_cluster_is_its_centroid(buffer_clusters, sparsity):
    # Keys of six kinds, far from each other: whatever is not retrieved is estimated, and nothing is lost.
    model = rivals.QWEN
    H, D = model.num_heads, model.head_dim
    rng = np.random.default_rng(0)
    kind = rng.integers(0, 6, 64)
    rows = np.stack([8 * np.eye(D)[kind], rng.normal(size=(64, D))], axis=1).astype(np.float32)[None, None]
    query = jnp.asarray(0.1 * rng.normal(size=(1, H, D)), jnp.float32)
    config = dataclasses.replace(SMALL, estimation=1.0, sparsity=sparsity, buffer_clusters=buffer_clusters)
    with rivals.rival(model, config, 1, 80) as (policy, keeper):
        prompt = rivals.Prefilled(jnp.asarray(rows), query, jnp.array([60], jnp.int32))
        layer = jnp.array([0], jnp.int32)
        state, shared = gen.JITTED.absorb(policy, "offloaded", {}, prompt, layer, policy.allocate())
        new = jnp.zeros((1, 1, D), jnp.float32)
        at = rivals.Position(jnp.array([60], jnp.int32), jnp.ones((1,), bool))
        out, _, _ = jax.jit(functools.partial(policy.attend, 0))({}, query, new, new, at, state, shared)
        assert 0 < keeper.counters().rows_selected < 30
    score = np.concatenate([np.asarray(query)[0] @ rows[0, 0, :60, 0].T, np.zeros((H, 1))], axis=1) / np.sqrt(D)
    p = np.exp(score)
    want = (p / p.sum(axis=1, keepdims=True)) @ np.concatenate([rows[0, 0, :60, 1], np.zeros((1, D))])
    np.testing.assert_allclose(out[0], want, atol=1e-5)


@pytest.mark.slow
def test_one_execution_buffer_serves_all_layers():
    parts = []
    for layers in (1, 3):
        with rivals.rival(dataclasses.replace(tiny.LLAMA, num_layers=layers), SMALL, 2, 128) as (policy, _):
            parts.append(policy.layout.device_bytes())
    held = 2 * policy.layout.num_kv_heads * policy.buffer * policy.layout.row_bytes
    assert parts[0].pop("execution buffer") == parts[1].pop("execution buffer") == held
    assert parts[1] == {name: 3 * n for name, n in parts[0].items()}


def test_short_context_needs_no_more_steady_rows_than_tokens():
    want = rivals.full_tokens(rivals.ONE, 50, 12, 64)
    with rivals.rival(rivals.ONE, RetroInferConfig(sparsity=1.0), 1, 64) as (policy, rows):
        assert policy.steady == 64
        assert rivals.run(rivals.ONE, policy, rows, [tiny.prompt(50)], 12).tokens[0] == want
        assert rows.counters().rows_moved == 0


def test_clusters_by_hand():
    # Two directions around (5, 5), in the order abababbababa; before and behind them what must not be seen.
    keys = np.full((20, 2), 99, np.float32)
    order = np.array([0, 1] * 3 + [1, 0] * 3)
    keys[3:15] = np.array([(6, 5), (4, 5)])[order]
    rows = np.stack([keys, np.arange(20)[:, None].repeat(2, axis=1)], axis=1).astype(np.float32)
    found = clusters.cluster(jnp.asarray(rows), jnp.int32(3), jnp.int32(12), 5, 6, 64, 5)
    assert found.labels.tolist() == [-1] * 3 + order.tolist() + [-1] * 5
    assert found.sizes.tolist() == [6, 6, 0, 0, 0]
    np.testing.assert_allclose(found.centroids[:2], [[6, 5], [4, 5]], atol=1e-5)
    assert found.values[:2, 0].tolist() == [3 + 5 + 7 + 10 + 12 + 14, 4 + 6 + 8 + 9 + 11 + 13]


@pytest.mark.parametrize("count", [0, 1, 7, 31, 48, 49, 100])
def test_every_token_is_in_one_cluster(count):
    rng = np.random.default_rng(count)
    rows = jnp.asarray(rng.normal(size=(112, 2, 8)), jnp.float32)
    found = clusters.cluster(rows, jnp.int32(4), jnp.int32(count), 30, 4, 32, 4)
    labels = np.asarray(found.labels)
    assert (labels[4 : 4 + count] >= 0).all() and (labels[:4] == -1).all() and (labels[4 + count :] == -1).all()
    sizes = np.bincount(labels[labels >= 0], minlength=30)
    number = int(clusters.num_clusters(jnp.int32(count), 4))
    assert (
        found.sizes.tolist() == sizes.tolist()
        and sizes[number:].sum() == 0
        and number == (count > 0) * max(1, (count + 2) // 4)
    )
    for c in np.flatnonzero(sizes):
        member = np.asarray(rows)[labels == c]
        np.testing.assert_allclose(found.centroids[c], member[:, 0].mean(axis=0), atol=1e-5)
        np.testing.assert_allclose(found.values[c], member[:, 1].sum(axis=0), atol=1e-5)


def test_segments_are_clustered_on_their_own():
    # Each segment has two directions of its own and room for two clusters.
    axes = np.eye(8, dtype=np.float32)
    order = [0, 1] * 4 + [1, 0] * 4
    keys = axes[order + [2 + i for i in order]]
    rows = jnp.asarray(np.stack([keys, keys], axis=1))
    found = clusters.cluster(rows, jnp.int32(0), jnp.int32(32), 4, 8, 16, 3)
    assert found.labels.tolist() == order + [2 + i for i in order]


@pytest.mark.parametrize("at_once", [2, 3, 5, 9])
def test_heads_at_the_same_time_are_clustered_as_one_by_one(at_once):
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(5, 100, 2, 8)), jnp.float32)
    first, count = jnp.full((5,), 4, jnp.int32), jnp.array([96, 90, 33, 1, 0], jnp.int32)
    make = functools.partial(clusters.cluster, room=26, per_cluster=4, segment=32, iterations=4)
    want = kmeans.over_sets(make, (rows, first, count), 1, 1)
    found = kmeans.over_sets(make, (rows, first, count), 1, at_once)
    assert (found.labels == want.labels).all() and (found.sizes == want.sizes).all()
    np.testing.assert_allclose(found.centroids, want.centroids, atol=1e-5)
    np.testing.assert_allclose(found.values, want.values, atol=1e-5)


def test_least_recently_used_cluster_leaves():
    lists = LruClusters(1, 5, 4, 9)
    lists.pages[:], lists.slot[:] = [0, 2, 1, 2, 3], [0, 0, 2, 3, 5]

    def access(*wanted):
        """Which of the clusters were there, which enter, and the pages of those that are there now."""
        found = lists.access(np.array([wanted]), np.ones((1, len(wanted)), bool))
        there = [c for c, known in zip(wanted, np.any(found, axis=0)[0], strict=True) if known]
        pages = {c: [int(lists.row(0, c, i, 1)) for i in range(lists.pages[0, c])] for c in there}
        return *(x[0].tolist() for x in found), pages

    assert access(1, 2) == ([False] * 2, [True] * 2, {1: [0, 1], 2: [2]})
    assert access(1) == ([True], [False], {1: [0, 1]})
    # 2 has left for 3; for 4 there is too little room.
    assert access(3, 4) == ([False] * 2, [True, False], {3: [3, 2]})
    assert access(2, 3) == ([False, True], [True, False], {2: [0], 3: [3, 2]})  # 1 has left, 3 is wanted


def one_by_one(order: dict, free: list, wanted: list, pages) -> tuple[list, list]:
    """What `LruClusters.access` does, for one head: `order`, the pages of clusters that are there, and `free`, the free
    pages, change. Returns the clusters that were there and those that enter."""
    hits, entered = [c for c in wanted if c in order], []
    for cluster in hits:
        order[cluster] = order.pop(cluster)
    for cluster in (c for c in wanted if c not in hits):
        while len(free) < pages[cluster] and order and next(iter(order)) not in wanted:
            free += order.pop(next(iter(order)))
        if len(free) < pages[cluster]:
            break
        entered.append(cluster)
        order[cluster] = [free.pop(0) for _ in range(pages[cluster])]
    return hits, entered


@pytest.mark.parametrize("cached", [2, 7, 12, 30, 200])
def test_lists_of_many_heads_go_as_one_by_one(cached):
    rng = np.random.default_rng(cached)
    H, C, n = 3, 25, 6
    lists = LruClusters(H, C, cached, 100)
    lists.pages[:] = rng.integers(1, 5, (H, C))
    lists.slot[:] = np.cumsum(lists.pages, axis=1) - lists.pages
    states = [({}, list(range(cached))) for _ in range(H)]
    drawn = np.cumsum(rng.integers(0, 4, 200)) % C
    for begin in drawn:
        wanted = np.stack([rng.permutation((begin + np.arange(n + 2)) % C)[:n] for _ in range(H)])
        asked = np.arange(n)[None] < rng.integers(0, n + 1, H)[:, None]
        found = lists.access(wanted, asked)
        for h, (order, free) in enumerate(states):
            want = one_by_one(order, free, wanted[h, asked[h]].tolist(), lists.pages[h])
            assert tuple(wanted[h, x[h]].tolist() for x in found) == want
            for cluster, pages in order.items():
                assert [int(lists.row(h, cluster, i, 1)) for i in range(len(pages))] == pages


def test_access_by_hand():
    model = dataclasses.replace(rivals.QWEN, num_layers=1, head_dim=2)
    with rivals.rival(model, dataclasses.replace(SMALL, buffer_clusters=2), 1, 16) as (policy, rows):
        assert isinstance(rows, ClusterRows) and policy.buffer == 16
        prompt = np.arange(8, dtype=np.float32).repeat(4).reshape(1, 1, 8, 2, 2)
        rows.on_build(0, prompt, np.array([[[-1, 1, 0, 1, 2, 1, -1, 0]]]))
        rows.on_extend(0, prompt + 100, np.array([[[0, 0, -1, -1, -1, -1, -1, -1]]]), np.array([3]))
        args = (0, np.array([[[1, 3, 0]]]), np.array([[2]]))
        source, left, staged, at, cached = rows.on_access(*args)
        assert left == [0] and staged[:5, 0, 0].tolist() == [1, 3, 5, 100, 101] and (source == -1).all()
        assert at[:5].tolist() == [0, 1, 2, 3, 4] and cached[:5].tolist() == [0, 1, 2, 4, 5]
        # Cluster 1 has two pages of two rows. What is not sent goes nowhere.
        assert at[5:].min() >= 16 and cached[5:].min() >= policy.pages * 2
        source, left, _, at, cached = rows.on_access(*args)
        assert source[0, 0, :6].tolist() == [0, 1, 2, 4, 5, -1] and left == [0]
        assert at.min() >= 16 and cached.min() >= policy.pages * 2
        counts = rows.counters()
        assert (counts.hits, counts.misses, counts.rows_moved, counts.rows_offloaded) == (5, 5, 5, 8)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"sparsity": 0}, "sparsity: got 0"),
        ({"estimation": 1.5}, "estimation: got 1.5"),
        ({"cache_ratio": -0.1}, "cache_ratio: got -0.1"),
        ({"iterations": 1}, "iterations: got 1"),
        ({"update_tokens": 1000}, "update_tokens: got 1000, wanted a positive multiple of cluster_tokens = 16"),
        ({"recent_tokens": 0}, "recent_tokens: got 0"),
        ({"page_tokens": 0}, "page_tokens: got 0"),
        ({"sink_tokens": -1}, "sink_tokens: got -1"),
        ({"full_layers": -1}, "full_layers: got -1"),
    ],
)
def test_settings_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        RetroInferConfig(**changes)
