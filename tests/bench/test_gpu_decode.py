"""The benchmark of whole generations at a tiny shape."""

import dataclasses

import jax
import pytest

from clo_jax.bench import gpu_decode, report
from clo_jax.config import CloConfig
from tests import tiny

MODEL = dataclasses.replace(tiny.LLAMA, num_layers=2)
CLO = CloConfig(hash_bits=64, sink_tokens=4, recent_tokens=16, flush_tokens=8, sim_threshold=1.0)


@pytest.fixture(scope="module")
def found():
    return gpu_decode.measure(MODEL, CLO, 256, 2 * gpu_decode.CHUNK + 1, 1, "float32", "auto")


def test_every_way_is_measured(found, tmp_path):
    made = gpu_decode.rows(found, 200)
    content = report.write(tmp_path / "decode.json", "decode", {}, made)
    assert [row["met"] in (True, False) for row in content["rows"] if "goal" in row] == [True]
    assert found["host"][0].rows_moved > 0 == found["device"][0].rows_moved
    assert found["host"][0].hit_rate == found["device"][0].hit_rate == 0.0  # a threshold that nothing reaches


@pytest.mark.gpu
def test_decode_steps_launch_captured_graphs_only(found):
    assert jax.default_backend() == "gpu"
    calls = 3 * MODEL.num_layers  # prefetch, attend and offload, of each layer
    for name in ("full", "device", "host"):
        assert found[name][0].launches < calls / gpu_decode.CHUNK
