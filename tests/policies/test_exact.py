"""Exact selection: full attention at 100 %, the k largest by hand, and what the pieces of `policies.dense` compute."""

import jax.numpy as jnp
import numpy as np
import pytest

from clo_jax.policies import dense
from clo_jax.rivals import ExactConfig, rival_config
from tests import tiny
from tests.policies import rivals


@pytest.mark.parametrize("model", [rivals.LLAMA, rivals.QWEN], ids=["llama", "qwen2"])
def test_full_budget_equals_full_attention(model):
    rivals.check_full_budget(model, ExactConfig(sparsity=1.0))


def test_rows_of_a_batch_equal_their_own_runs():
    rivals.check_batch(ExactConfig(sparsity=0.2))


def test_planted_key_is_attended():
    with rivals.rival(tiny.LLAMA, ExactConfig(sparsity=0.02), 2, 128) as (policy, _):
        assert rivals.planted(policy, 17, 100, 128, steps=3).min() > 0.9


def test_attends_to_the_largest_and_to_nothing_else():
    # One head, four tokens with scores 0 to 3 and values that name them; half of five tokens, rounded up, is three.
    model = rivals.QWEN
    with rivals.rival(model, ExactConfig(sparsity=0.5), 1, 8) as (policy, _):
        D, H = model.head_dim, model.num_heads
        rows = np.zeros((1, 1, 8, 2, D), np.float32)
        rows[0, 0, :4, 0, 0] = [0, 3, 1, 2]
        rows[0, 0, :4, 1, 0] = [1, 10, 100, 1000]
        query = np.zeros((1, H, D), np.float32)
        query[..., 0] = np.sqrt(D)
        new = np.zeros((1, 1, D), np.float32)
        at = rivals.Position(jnp.array([4], jnp.int32), jnp.ones((1,), bool))
        out, state, _ = policy.attend(
            0, {}, jnp.asarray(query), jnp.asarray(new), jnp.asarray(new), at, {"resident": jnp.asarray(rows)}, {}
        )
    weights = np.exp([3.0, 1.0, 2.0])
    want = weights @ [10, 100, 1000] / weights.sum()
    np.testing.assert_allclose(out[0, :, 0], want, rtol=1e-5)


def test_mass_is_summed_over_the_group():
    score = jnp.log(jnp.array([[[[0.9, 0.1, 0.0], [0.2, 0.8, 0.0]]]], jnp.float32))
    np.testing.assert_allclose(dense.group_mass(score)[0, 0], [1.1, 0.9, -1.0], rtol=1e-5)
    index, chosen = dense.heaviest(jnp.array([[[0.2, 0.5, -1.0, 0.5]]]), jnp.array([4], jnp.int32), 4)
    assert index[0, 0].tolist() == [1, 3, 0, 2] and chosen[0, 0].tolist() == [True, True, True, False]


def test_entries_that_stand_for_several_tokens():
    # Three tokens under one score, as one entry and one by one.
    values = jnp.array([[[[1.0], [2.0], [4.0], [8.0]]]])
    alone = dense.Part(jnp.array([[[[0.5, 0.5, 0.5, 2.0]]]]), values)
    together = dense.Part(jnp.array([[[[0.5]]]]), jnp.array([[[[7.0]]]]), jnp.array([[[3.0]]]))
    last = dense.Part(jnp.array([[[[2.0]]]]), values[:, :, 3:])
    want = dense.attend([alone], jnp.float32)
    np.testing.assert_allclose(dense.attend([together, last], jnp.float32), want, rtol=1e-6)


@pytest.mark.parametrize("sparsity", [0.0, -0.1, 1.5, float("nan")])
def test_sparsity_out_of_range_is_refused(sparsity):
    with pytest.raises(ValueError, match="sparsity: got"):
        ExactConfig(sparsity=sparsity)


def test_settings_of_another_policy_are_refused():
    assert rival_config("exact") == ExactConfig() and rival_config("clo") is None
    with pytest.raises(ValueError, match="rival: got ExactConfig with attention clo, wanted None"):
        rival_config("clo", ExactConfig())
