"""PQCache: full attention at 100 %, its window, codes and block cache, and what it moves."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from clo_jax.policies import kmeans, pqcache, ring
from clo_jax.policies.block_cache import BlockRows, LfuTables
from clo_jax.rivals import PQCacheConfig
from tests import tiny
from tests.policies import rivals

SMALL = PQCacheConfig(sparsity=0.1, sink_tokens=4, code_bits=4, iterations=5, cache_tokens=32, block_tokens=8)
WHOLE = dataclasses.replace(SMALL, sparsity=1.0)


@pytest.mark.parametrize("model", [rivals.LLAMA, rivals.QWEN], ids=["llama", "qwen2"])
def test_full_budget_equals_full_attention(model):
    rivals.check_full_budget(model, WHOLE)


@pytest.mark.slow
def test_rows_of_a_batch_equal_their_own_runs():
    rivals.check_batch(dataclasses.replace(SMALL, sparsity=0.3))


def test_hundreds_of_new_tokens_leave_the_window_and_are_selected():
    model = rivals.ONE
    with rivals.rival(model, WHOLE, 1, 384) as (policy, rows):
        session = rivals.run(model, policy, rows, [tiny.prompt(50)], 300)
    assert session.tokens[0] == rivals.full_tokens(model, 50, 300, 384)
    counts = rows.counters()
    assert counts.rows_selected == counts.hits + counts.misses and 0 < session.metrics().hit_rate < 1
    assert counts.rows_selected == 2 * sum((n - 4 + 1) // 2 for n in range(51, 350))
    assert counts.rows_offloaded == 2 * (349 - 172)
    assert policy.begins(jnp.array([349])).tolist() == [349 - 172]  # half of what is beyond the sink


def test_planted_key_is_attended():
    with rivals.rival(tiny.LLAMA, SMALL, 2, 256) as (policy, _):
        assert rivals.planted(policy, 50, 200, 256, steps=4).min() > 0.9


def test_planted_new_key_is_attended_after_it_has_left_the_window():
    with rivals.rival(tiny.LLAMA, SMALL, 2, 256) as (policy, _):
        out = rivals.planted(policy, 153, 150, 256, steps=30)
        assert policy.begins(jnp.array([180])).tolist()[0] > 153
    assert out[:3].max() < 0.9 < out[3:].min()


@pytest.mark.slow
def test_the_cache_changes_no_token():
    prompts = [tiny.prompt(100)]
    tokens, moved = [], []
    for size in (64, 0):
        config = dataclasses.replace(SMALL, sparsity=0.2, cache_tokens=size)
        with rivals.rival(rivals.QWEN, config, 1, 160) as (policy, rows):
            session = rivals.run(rivals.QWEN, policy, rows, prompts, 24)
        tokens.append(session.tokens)
        moved.append(session.metrics())
    assert tokens[0] == tokens[1]
    assert moved[0].rows_selected == moved[1].rows_selected == moved[1].rows_moved
    assert moved[0].hit_rate > 0 == moved[1].hit_rate


def test_sizes_add_up_and_grow_by_at_most_one():
    n = np.arange(1, 3000, dtype=np.int32)
    for sparsity, share in ((0.1, 0.5), (0.07, 0.3), (1.0, 0.5), (1.0, 0.7), (0.5, 0.0), (0.9, 1.0)):
        config = PQCacheConfig(sparsity=sparsity, recent_share=share)
        recent, selected = pqcache.sizes(config, n, np)
        assert recent.min() == 1 and selected.min() == 0
        assert set(np.diff(recent)) <= {0, 1} and set(np.diff(selected)) <= {0, 1}
        found = pqcache.sizes(config, jnp.asarray(n))
        assert (found[0] == recent).all() and (found[1] == selected).all()
        beyond = np.maximum(n - 32, 0)
        want = np.ceil(np.float32(sparsity) * beyond.astype(np.float32))
        assert (recent + selected == np.maximum(want, 1)).all()
    assert [int(x) for x in pqcache.sizes(PQCacheConfig(), np.int32(1032), np)] == [50, 50]


def test_kept_rows_know_their_tokens():
    for newest in (0, 3, 4, 9, 10, 31):
        held = ring.held_tokens(jnp.array([newest]), 4, 10)[0].tolist()
        want = [*range(min(4, newest + 1)), *range(max(4, newest - 5), newest + 1)]
        assert sorted(t for t in held if t >= 0) == want
        assert all(held[int(ring.ring_place(jnp.int32(t), 4, 10))] == t for t in want)


def test_k_means_finds_planted_centres():
    centres = np.array([[0, 0], [10, 0], [0, 10]], np.float32)
    rng = np.random.default_rng(0)
    points = np.concatenate([centres[np.arange(90) // 30] + rng.normal(size=(90, 2)) * 0.1, np.full((10, 2), 99)])
    points = jnp.asarray(points, jnp.float32)
    found = kmeans.lloyd(points, jnp.int32(0), jnp.int32(90), 6, 10)  # what is beyond the 90 is not seen
    assert float(jnp.abs(found).max()) < 12
    near = np.asarray(found)[np.asarray(kmeans.nearest(jnp.asarray(centres), found))]
    np.testing.assert_allclose(near, centres, atol=0.3)
    total, size = kmeans.sums(points[:3], jnp.array([1, 0, 1]), jnp.array([True, True, False]), 2)
    assert size.tolist() == [1, 1] and (total == points[:2][::-1]).all()


def test_scores_of_codes_are_products_with_what_they_stand_for():
    rng = np.random.default_rng(0)
    keys = jnp.asarray(rng.normal(size=(1, 2, 12, 8)), jnp.float32)
    query = jnp.asarray(rng.normal(size=(1, 2, 3, 8)), jnp.float32)
    parts = pqcache.split(keys, 2)
    one = jnp.array([0], jnp.int32)
    centroids = pqcache.codebooks(parts, one, jnp.array([12], jnp.int32), 16, 3)  # more centroids than keys
    codes = pqcache.encode(parts, centroids)
    want = jnp.einsum("bkgd,bknd->bkgn", query, keys) / np.sqrt(8)
    np.testing.assert_allclose(pqcache.code_scores(query, centroids, codes), want, atol=1e-5)


def test_a_centroid_for_every_key_selects_the_true_top():
    config = dataclasses.replace(SMALL, sparsity=0.2, code_bits=7)  # 128 centroids, 86 keys
    with rivals.rival(tiny.LLAMA, config, 2, 128) as (policy, rows):
        state, shared, query, k, v, keys = rivals.noise(policy, 90, 128)
        at = rivals.Position(jnp.full((2,), 90, jnp.int32), jnp.ones((2,), bool))
        rivals.step(policy, 0, {}, query, k, v, at, state, shared)[0].block_until_ready()
        found = [[sorted(head.tolist()) for head in heads] for heads in rows.selected(0)]
    # Of 18 tokens beyond the sink the newest 9 are the window, the other 9 are selected.
    assert found == rivals.heaviest(query, keys, 4, 91 - 9, 9)


def test_least_frequently_used_block_leaves():
    table = LfuTables(1, 2, 10)

    def insert(*blocks):
        return table.insert(np.array([blocks]), np.array([len(blocks)]))[0].tolist()

    assert insert(3, 5) == [3, 5] and insert(5) == []
    assert insert(7) == [7] and table.place[0, [3, 5, 7]].tolist() == [-1, 1, 0]  # 3 was used least
    assert insert(5, 8, 9) == [9]  # 8 takes the place of 7, and 9 that of 8 at once
    assert table.place[0, [7, 8, 9]].tolist() == [-1, -1, 0]
    assert [x.tolist() for x in LfuTables(2, 0, 4).insert(np.zeros((2, 0), int), np.zeros(2, int))] == [[], []]


@pytest.mark.parametrize("capacity", [1, 3, 6, 20])
def test_tables_of_many_sequences_go_as_one_by_one(capacity):
    rng = np.random.default_rng(capacity)
    B, number = 3, 20
    table = LfuTables(B, capacity, number)
    uses, places = [{} for _ in range(B)], np.full((B, number), -1)
    for begin in np.cumsum(rng.integers(0, 2, 200)) % number:
        blocks = np.stack([rng.permutation((begin + np.arange(capacity)) % number) for _ in range(B)])
        count = rng.integers(0, capacity + 1, B)
        entered = table.insert(blocks, count)
        for use, place, row, n, found in zip(uses, places, blocks, count, entered, strict=True):
            before = place.copy()
            for block in row[:n].tolist():
                if block not in use and len(use) == capacity:
                    victim = min(use, key=lambda b: (use[b][0], use[b][1]))
                    place[block], place[victim] = place[victim], -1
                    del use[victim]
                elif block not in use:
                    place[block] = len(use)
                times, _ = use.get(block, (0, 0))
                use[block] = (times + 1, 1 + max((last for _, last in use.values()), default=0))
            assert found.tolist() == [block for block in use if place[block] != before[block]]
        assert (table.place == places).all()


def test_look_up_by_hand():
    model = dataclasses.replace(rivals.QWEN, num_layers=1, head_dim=2)
    config = dataclasses.replace(SMALL, cache_tokens=4, block_tokens=4, sparsity=0.5)
    with rivals.rival(model, config, 1, 16) as (policy, rows):
        assert isinstance(rows, BlockRows) and policy.blocks == 1 and policy.most == 3
        prompt = np.arange(12, dtype=np.float32).repeat(4).reshape(1, 1, 12, 2, 2)
        rows.on_offload(0, prompt, np.array([10]))
        index = np.array([[[6, 9, 5]]], np.int32)
        new = np.full((1, 1, 2, 2), 10, np.float32)
        args = (0, index, np.array([3]), np.array([[10]]), new, np.array([11]))
        source, left, staged, at, cached = rows.on_look_up(*args)
        assert source[0, 0].tolist() == [-1] * 3 and left == [0] and at[:3].tolist() == [0, 1, 2]
        assert staged[:, 0, 0].tolist() == [6, 9, 5, 4, 5, 6, 7] and cached[3:].tolist() == [0, 1, 2, 3]
        assert at[3:].min() >= 3 and cached[:3].min() >= 4  # nowhere
        source, left, staged, at, cached = rows.on_look_up(*args)
        assert source[0, 0].tolist() == [2, -1, 1] and left == [0] and staged[0, 0, 0] == 9 and at[0] == 1
        assert at[1:].min() >= 3 and cached.min() >= 4
        counts = rows.counters()
        assert (counts.hits, counts.misses, counts.rows_moved) == (2, 4, 4 + 4)
        rows.on_look_up(0, np.array([[[8, 10, 11]]]), np.array([3]), *args[3:])
        assert rows.on_look_up(*args)[0][0, 0].tolist() == [2, -1, 1]  # 8 to 11 is no whole block yet


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"sparsity": 1.01}, "sparsity: got 1.01"),
        ({"recent_share": -0.1}, "recent_share: got -0.1"),
        ({"code_bits": 9}, "code_bits: got 9"),
        ({"subvectors": 0}, "subvectors: got 0"),
        ({"iterations": 0}, "iterations: got 0"),
        ({"block_tokens": 0}, "block_tokens: got 0"),
        ({"sink_tokens": -1}, "sink_tokens: got -1"),
        ({"cache_tokens": -1}, "cache_tokens: got -1"),
        ({"full_layers": -1}, "full_layers: got -1"),
    ],
)
def test_settings_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        PQCacheConfig(**changes)


def test_subvectors_that_do_not_divide_the_head_are_refused():
    with pytest.raises(ValueError, match="subvectors: got 3, wanted a divisor of the model's head dim"):
        with rivals.rival(rivals.LLAMA, PQCacheConfig(subvectors=3), 1, 64):
            pass
