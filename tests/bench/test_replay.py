"""What is replayed: shares, and traces of calibrations of the same or another shape."""

import dataclasses

import numpy as np
import pytest

from clo_jax.bench import replay
from clo_jax.cache.calibration import Calibration
from clo_jax.cache.calibration_parts import Trace
from tests import tiny

P, N = 2, 5


def calibration(layers=tiny.LLAMA.num_layers, heads=tiny.LLAMA.num_kv_heads):
    hits = np.random.default_rng(0).random((P, N, layers, heads)) < 0.7
    new_rows = np.where(hits, 0, 3).astype(np.int32)
    return Calibration(trace=Trace(hits, new_rows, np.full((P, N), 10, np.int32), np.full(P, 99, np.int32)))


def test_a_trace_is_replayed_as_it_is():
    found = calibration()
    pattern = replay.traced(tiny.LLAMA, found)
    np.testing.assert_array_equal(pattern.misses, ~found.trace.hits)
    assert pattern.new_rows == pytest.approx(0.3) and pattern.source == "trace of 2 prompts, 5 steps"


def test_another_shape_replays_the_layers_of_the_same_depth():
    found = calibration(layers=6, heads=3)
    pattern = replay.traced(dataclasses.replace(tiny.LLAMA, num_layers=3, num_kv_heads=6), found)
    np.testing.assert_array_equal(pattern.misses[..., :3], ~found.trace.hits[:, :, ::2])
    np.testing.assert_array_equal(pattern.misses[..., 3:], ~found.trace.hits[:, :, ::2])
    assert pattern.source.endswith("of 6 layers with 3 KV heads")


def test_a_calibration_without_a_trace_is_refused():
    with pytest.raises(ValueError, match="--trace: got None, which has none"):
        replay.traced(tiny.LLAMA, Calibration())


@pytest.mark.parametrize("shares, name", [((1.2, 0.2), "--hit-rate: got 1.2"), ((0.2, -1), "--new-rows: got -1")])
def test_shares_are_shares(shares, name):
    with pytest.raises(ValueError, match=name):
        replay.given(tiny.LLAMA, *shares)
