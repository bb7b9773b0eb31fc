"""The layer benchmark at a tiny shape on the CPU: forced misses and new rows come out as asked for."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from clo_jax.bench import layer, rates, report
from clo_jax.config import CloConfig
from tests import tiny

MODEL = dataclasses.replace(tiny.LLAMA, num_layers=2)
CLO = CloConfig(hash_bits=64, sink_tokens=4, recent_tokens=16, flush_tokens=8)


@pytest.fixture(scope="module")
def measured():
    with layer.bench(MODEL, CLO, context=512, steps=layer.PERIOD, dtype="float32") as made:
        yield made


@pytest.mark.parametrize("case", layer.CASES, ids=lambda case: case.name)
def test_a_case_misses_and_moves_what_it_says(measured, case):
    timings = measured.time([(case, measured.tuned(case))], repeats=1)
    for beside in (True, False):
        timing = timings[case.name, beside]
        assert timing.missed == pytest.approx(case.missed, abs=0.1)
        if case.missed:
            assert timing.new == pytest.approx(1.0 if case.new is None else case.new, abs=0.12)
            assert timing.layer_bytes > 0
        else:
            assert timing.layer_bytes == 0


def test_misses_are_spread_as_the_case_says(measured):
    for case in layer.CASES:
        misses = np.asarray(measured.plan(case, 0.1).misses)
        assert misses.mean() == pytest.approx(case.missed, abs=0.01)
        counts = misses.sum(axis=2) if case.evenly else misses.sum(axis=(1, 2))
        assert counts.max() - counts.min() <= 1


def test_a_layer_lends_no_time_to_another():
    # Half of the layers move nothing, half two heads of 1,000 bytes: 40 us of a link of 50 MB/s, 20 on average.
    timing = layer.Timing([50.0], missed=0.5, new=1.0, layer_bytes=1000.0, refreshed=(0.5, 0.0, 0.5))
    assert layer.bound(timing, hit=10.0, link=50e6) == pytest.approx((10 + 40) / 2)
    assert layer.bound(timing, hit=60.0, link=50e6) == pytest.approx(60)


def test_figures_make_a_valid_file(measured, tmp_path):
    cases = [(case, measured.plan(case, 0.1)) for case in layer.CASES]
    link = rates.link_rate(1 << 20) if jax.default_backend() == "gpu" else 50e9
    found = layer.rows(measured.time(cases, repeats=2), measured.products(2), link)
    content = report.write(tmp_path / "layer.json", "layer", {}, found)
    report.validate(json.loads((tmp_path / "layer.json").read_text()))
    goals = [row for row in content["rows"] if "goal" in row]
    assert len(goals) == 6 and all("beside" in row["name"] for row in goals)
    assert all(row["min"] <= row["value"] <= row["max"] for row in content["rows"] if "min" in row)
