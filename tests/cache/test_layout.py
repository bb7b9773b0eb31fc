"""Cache geometry: token formulas at every boundary, byte counts, head plans."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from clo_jax.cache.layout import CacheLayout
from clo_jax.config import CloConfig, ModelConfig, RopeConfig

MODEL = ModelConfig("llama", 256, 96, 128, 3, 6, 2, 16, 1e-5, 1024, RopeConfig(10000.0))


def layout(batch=1, max_tokens=1024, **clo):
    return CacheLayout.clo(MODEL, CloConfig(**clo), batch, max_tokens, "float32")


def test_every_token_is_either_in_the_tail_or_selectable():
    lay = layout(sink_tokens=4, recent_tokens=64, flush_tokens=64)
    for n in range(1, 1025):
        flushed = int(lay.flushed(np.int32(n)))
        assert flushed % 64 == 0
        assert n - flushed >= min(n, 64)  # recent tokens stay
        assert n - flushed < 64 + 64  # and the ring holds what stays, one appended token included
        assert int(lay.num_selectable(np.int32(n))) == max(flushed - 4, 0)


def test_a_flush_is_exactly_one_block():
    lay = layout(recent_tokens=10, flush_tokens=8)
    steps = [int(lay.flushed(np.int32(n + 1)) - lay.flushed(np.int32(n))) for n in range(1, 1000)]
    assert set(steps) == {0, 8}


@pytest.mark.parametrize("sparsity", [0.02, 0.1, 0.5, 1.0])
def test_selected_tokens(sparsity):
    lay = layout(sparsity=sparsity, retain=1.5)
    n = jnp.arange(1, 1025, dtype=jnp.int32)
    k, capacity = np.asarray(lay.num_selected(n)), np.asarray(lay.capacity(lay.num_selected(n)))
    selectable = np.asarray(lay.num_selectable(n))
    assert (k <= selectable).all() and (k <= lay.k_max).all()
    assert (k >= np.minimum(np.floor(sparsity * np.asarray(n)), selectable)).all()
    assert (capacity >= k).all() and (capacity <= lay.num_slots).all()
    if sparsity == 1.0:
        np.testing.assert_array_equal(k, selectable)


def test_resident_heads_default_to_layer_zero():
    assert layout().resident == ((0, 1), (), ())
    lay = layout(resident_heads=((1, (1,)), (2, (1, 0))))
    assert lay.resident == ((), (1,), (0, 1))
    assert lay.offloaded(1) == (0,) and lay.head_order(1) is None
    swapped = layout(resident_heads=((1, (0,)),))
    np.testing.assert_array_equal(swapped.head_order(1), [1, 0])


@pytest.mark.parametrize(
    "plan, message",
    [
        (((3, (0,)),), "got layer 3, wanted 0 to 2"),
        (((0, (2,)),), r"got heads \[2\]"),
        (((0, (1, 1)),), r"heads \[1, 1\]"),
    ],
)
def test_heads_that_do_not_exist_are_refused(plan, message):
    with pytest.raises(ValueError, match=message):
        layout(resident_heads=plan)


def test_bytes():
    full = CacheLayout.full(MODEL, 2, 1024, "float32")
    assert full.device_bytes() == {"resident rows": 2 * 3 * 2 * 1024 * 2 * 16 * 4}
    assert full.host_bytes() == 0
    lay = layout(batch=2)
    parts = lay.device_bytes()
    assert parts["resident rows"] == 2 * 2 * 1024 * 128
    assert lay.host_bytes() == 2 * 4 * 1024 * 128
    assert parts["selected rows"] == 2 * 4 * lay.num_slots * 128
    assert lay.num_slots == 155 and lay.k_max == 103
    half = dataclasses.replace(lay, dtype="bfloat16")
    assert half.host_bytes() * 2 == lay.host_bytes()
    byte = layout(batch=2, kv_dtype="int8")
    assert byte.host_bytes() == 2 * 4 * 1024 * 48  # a byte an element, and sixteen of scales
    assert byte.device_bytes() == parts | {"selected rows": 2 * 4 * lay.num_slots * 48}


def test_a_head_dim_that_cannot_be_quantized_is_refused():
    model = dataclasses.replace(MODEL, head_dim=12)
    with pytest.raises(ValueError, match="kv_dtype: got 'int8' with a head dim of 12, wanted auto: .* multiple of 8"):
        CacheLayout.clo(model, CloConfig(kv_dtype="int8"), 1, 64, "float32")
