"""Costs: what is measured and in which order, on a tiny model; what makes no sense is refused."""

import dataclasses

import jax
import pytest

from clo_jax.cache.layout import CacheLayout
from clo_jax.cache.planner import measured_machine
from clo_jax.calibrate import costs
from clo_jax.config import CloConfig
from clo_jax.errors import CloError
from tests import tiny

CLO = CloConfig(sparsity=0.2)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="names the host's backend")
def test_a_tiny_model_is_measured(monkeypatch):
    seen = []
    found = costs.measure_costs(
        tiny.LLAMA, tiny.params(tiny.LLAMA), CLO, batches=(1,), contexts=(128,), repeats=3, progress=seen.append
    )
    assert seen == ["batch 1, 128 tokens", "bandwidths"]
    assert len(seen) == costs.num_measurements((1,), (128,))
    ((batch, context, seconds),) = found.layer_times
    assert (batch, context) == (1, 128) and 1e-6 < seconds < 1
    assert found.link_bytes_per_s["host"] > 1e7
    assert found.device_bytes_per_s > 1e8
    layout = CacheLayout.clo(tiny.LLAMA, CLO, 1, 128, "float32")
    assert measured_machine(found, "host", tiny.LLAMA, layout).layer_s == pytest.approx(seconds)


def test_layers_are_timed_by_difference(monkeypatch):
    asked = []

    def step(config, params, clo, batch, context, backend, repeats, steps, layers):
        asked.append((batch, context, layers))
        return 0.5 + 0.25 * layers

    monkeypatch.setattr(costs, "_step_seconds", step)
    assert costs.layer_seconds(tiny.LLAMA, tiny.params(tiny.LLAMA), CLO, 2, 256, repeats=2) == pytest.approx(0.25)
    assert asked == [(2, 256, 1), (2, 256, 3)]


def test_noise_is_an_error(monkeypatch):
    monkeypatch.setattr(costs, "_step_seconds", lambda *args: 1.0 / args[-1])
    with pytest.raises(CloError, match="batch 1, 256 tokens drowns in noise"):
        costs.layer_seconds(tiny.LLAMA, tiny.params(tiny.LLAMA), CLO, 1, 256)


def test_a_context_without_room_is_refused():
    with pytest.raises(ValueError, match="context: got 65, wanted at least 66"):
        costs.layer_seconds(tiny.LLAMA, {}, CLO, 1, 65)
    with pytest.raises(ValueError, match="num_layers: got 1"):
        costs.layer_seconds(dataclasses.replace(tiny.LLAMA, num_layers=1), {}, CLO, 1, 256)
