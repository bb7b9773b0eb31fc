"""InfiniGen: full attention at 100 %, what it speculates with, its pool, and what it moves."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clo_jax.policies import infinigen
from clo_jax.rivals import InfiniGenConfig
from tests import tiny
from tests.policies import rivals

WHOLE = InfiniGenConfig(sparsity=1.0, full_layers=0)


@pytest.mark.parametrize("model", [rivals.LLAMA, rivals.QWEN], ids=["llama", "qwen2"])
def test_full_budget_equals_full_attention(model):
    rivals.check_full_budget(model, WHOLE)


@pytest.mark.slow
def test_rows_of_a_batch_equal_their_own_runs():
    rivals.check_batch(InfiniGenConfig(sparsity=0.2, alpha=2.0, full_layers=0))


@pytest.mark.slow
def test_hundreds_of_new_tokens_enter_the_partial_cache_and_the_host():
    model = rivals.ONE
    with rivals.rival(model, WHOLE, 1, 384) as (policy, rows):
        session = rivals.run(model, policy, rows, [tiny.prompt(50)], 300)
    assert session.tokens[0] == rivals.full_tokens(model, 50, 300, 384)
    m, K = session.metrics(), model.num_kv_heads
    assert m.rows_moved == m.rows_selected == K * sum(range(50, 50 + 299)) and m.hit_rate is None
    assert m.rows_offloaded == K * (50 + 298)  # the last row waits for a fetch that does not come


def test_nothing_is_speculated_from_what_enters_the_first_layer():
    with rivals.rival(tiny.LLAMA, InfiniGenConfig(), 1, 64) as (policy, _):
        assert [policy.layout.offloaded(layer) for layer in range(3)] == [(), (), (0, 1)]


def test_planted_key_is_attended():
    config = InfiniGenConfig(sparsity=0.05, full_layers=0)
    with rivals.rival(tiny.LLAMA, config, 2, 128) as (policy, _):
        assert rivals.planted(policy, 17, 100, 128, steps=4).min() > 0.9
    with rivals.rival(tiny.LLAMA, dataclasses.replace(config, alpha=1.0), 1, 128) as (policy, rows):
        assert rivals.planted(policy, 17, 100, 128).min() > 0.9
        assert rows.counters().rows_moved == tiny.LLAMA.num_kv_heads  # nothing else comes near the needle


def test_pool_keeps_what_is_fetched_and_forgets_what_is_not():
    config = InfiniGenConfig(sparsity=0.05, full_layers=0, pool_tokens=40)
    with rivals.rival(tiny.LLAMA, config, 2, 128) as (policy, rows):
        assert rivals.planted(policy, 3, 30, 64, steps=60).min() > 0.9
        assert policy.layout.host == 2 * 40 * policy.layout.row_bytes * 3 * 2
        assert rivals.planted(policy, 3, 60, 64).max() < 0.9  # the prompt's newest 40 tokens only
        assert rivals.planted(policy, 30, 60, 64).min() > 0.9


def test_full_pool_replaces_what_was_used_least():
    uses = jnp.array([[[3, 1, 1]], [[3, 1, 0]]], jnp.int32)
    slot, after = infinigen.replaced(uses, jnp.array([3, 2], jnp.int32))
    assert slot.tolist() == [[1], [2]] and after.tolist() == [[[3, 2, 1]], [[3, 1, 0]]]


def test_channels_follow_the_queries():
    # All queries of KV head 0 lie along (3, 4)/5, those of head 1 along the second axis.
    queries = jnp.array([[[[3.0, 4.0], [0.0, 2.0]], [[-6.0, -8.0], [0.0, 1.0]]]])
    skewed = infinigen.partial_projection(queries, 2, 1, skew=True)
    np.testing.assert_allclose(np.abs(skewed[0, :, :, 0]), [[0.6, 0.8], [0, 1]], atol=1e-5)
    plain = infinigen.partial_projection(queries, 2, 1, skew=False)
    np.testing.assert_allclose(plain[0, :, :, 0], [[0, 1], [0, 1]])


def test_all_channels_keep_every_score():
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(2, 3, 5, 8)), jnp.float32) for _ in range(2))
    axes = infinigen.partial_projection(q.transpose(0, 2, 1, 3), 3, 8, skew=True)
    want = jnp.einsum("bknd,bkmd->bknm", q, k)
    got = jnp.einsum("bknr,bkmr->bknm", infinigen.project(q, axes), infinigen.project(k, axes))
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_all_channels_and_the_exact_query_select_the_true_top():
    with rivals.rival(tiny.LLAMA, InfiniGenConfig(partial_ratio=1.0, full_layers=0), 2, 128) as (policy, rows):
        state, shared, query, k, v, keys = rivals.noise(policy, 90, 128)
        at = rivals.Position(jnp.full((2,), 90, jnp.int32), jnp.ones((2,), bool))
        rivals.step(policy, 0, {}, query, k, v, at, state, shared)[0].block_until_ready()
        found = [[sorted(head.tolist()) for head in heads] for heads in rows.selected(0)]
    assert found == rivals.heaviest(query, keys, 0, 90, 9)


def test_alpha_counts_what_comes_near_the_maximum():
    score = jnp.array([[[[5.0, 4.5, 1.0, -jnp.inf], [0.0, -0.5, -0.6, -0.9]]]])
    assert infinigen.num_above(score, 1.0).tolist() == [3]  # 2 and 4
    assert infinigen.num_above(score, 0.55).tolist() == [2]
    assert infinigen.num_above(score, 0.1).tolist() == [1]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"sparsity": 0.0}, "sparsity: got 0.0"),
        ({"partial_ratio": 1.1}, "partial_ratio: got 1.1"),
        ({"alpha": 0.0}, "alpha: got 0.0"),
        ({"full_layers": -1}, "full_layers: got -1"),
        ({"pool_tokens": 0}, "pool_tokens: got 0"),
        ({"sample_queries": 0}, "sample_queries: got 0"),
    ],
)
def test_settings_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        InfiniGenConfig(**changes)


def test_more_full_layers_than_the_model_has_are_refused():
    with pytest.raises(ValueError, match="full_layers: got 3, wanted 0 to 2"):
        with rivals.rival(rivals.LLAMA, InfiniGenConfig(full_layers=3), 1, 64):
            pass


def test_closed_rows_are_an_error():
    with rivals.rival(rivals.QWEN, WHOLE, 1, 64) as (policy, rows):
        rows.close()
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="host rows .* are closed"):
            rivals.planted(policy, 3, 20, 64)
