"""The decode bench at a tiny shape: what is measured, replayed hits, controls, sizes that do not fit."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from clo_jax.bench import decode, decode_rows, replay, report, subject
from clo_jax.bench.subject import Subject
from clo_jax.config import CloConfig
from clo_jax.errors import MemoryPlanError
from clo_jax.eval.variants import variants
from tests import tiny

MODEL = dataclasses.replace(tiny.LLAMA, num_layers=2)
CLO = CloConfig(hash_bits=64, sink_tokens=4, recent_tokens=16, flush_tokens=8, sim_threshold=1.0)
HIT_RATE, NEW_ROWS = 0.75, 0.3


def plan(policies=("clo",), **changes):
    made = dict(contexts=(768,), steps=64, chunk=16)
    return decode.Plan(
        Subject("tiny", MODEL, "float32", "random", True), tuple(variants(policies, [0.1], CLO, {})), **made | changes
    )  # fmt: skip


def rows(planned, tmp_path):
    """Results file and its rows by name."""
    found, skipped = decode.run(planned)
    made = decode_rows.rows(planned, found, 1e10, 1e10)
    content = report.write(tmp_path / "x.json", "bench decode", decode_rows.arguments(planned, skipped), made)
    report.validate(json.loads((tmp_path / "x.json").read_text()))
    return content, {row["name"]: row for row in content["rows"]}


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    return rows(plan(), tmp_path_factory.mktemp("real"))


@pytest.fixture(scope="module")
def replayed(tmp_path_factory):
    pattern = replay.given(MODEL, HIT_RATE, NEW_ROWS)
    return rows(plan(pattern=pattern, batches=(2,)), tmp_path_factory.mktemp("replayed"))


def test_every_run_holds_its_controls(real):
    content, by_name = real
    clo, full = by_name["clo 10 %, 768 tokens"], by_name["full, 768 tokens"]
    base = by_name["weights only, batch 1"]
    assert {"memory read rate", "contiguous copy inside host memory"} <= set(by_name) or jax.default_backend() == "gpu"
    assert clo["control_name"] == "full" and clo["control"] == full["value"] and clo["ratio"] == clo["ratio_to_full"]
    assert full["control_name"] == "weights only" and full["control"] == base["value"]
    assert base["control_name"] == "its weights at the memory read rate"
    assert base["control"] == pytest.approx(1e10 / base["step_bytes"])
    assert clo["weights"] == "random" and clo["fill"] == "synthetic" and content["args"]["hits"] == "real"


def test_times_rows_and_bytes_belong_together(real):
    _, by_name = real
    clo, device = by_name["clo 10 %, 768 tokens"], by_name["clo 10 % on the device, 768 tokens"]
    assert clo["hit_rate"] == device["hit_rate"] == 0  # a threshold that nothing reaches
    assert clo["new_rows"] == device["new_rows"] and clo["rows_moved_per_step"] > 0 == device["rows_moved_per_step"]
    assert clo["link_bytes_per_step"] == clo["rows_moved_per_step"] * 2 * MODEL.head_dim * 4
    assert clo["min"] <= clo["p50_step_ms"] <= clo["p90_step_ms"] <= clo["p99_step_ms"] <= clo["max"]
    assert clo["value"] == clo["output_throughput"] == pytest.approx(1000 / clo["tpot_ms"])
    assert sum(v for k, v in clo["layer_us"].items() if k != "all") == pytest.approx(clo["layer_us"]["all"])
    assert 0 <= clo["overlap_ratio"] <= 1 and clo["cpu_cores_busy"] > 0
    assert device["host_kv_bytes"] == 0
    kept = clo["device_kv_bytes"] - clo["device_kv_parts"]["selected rows"] + clo["host_kv_bytes"]
    assert device["device_kv_bytes"] == kept


def test_replayed_hits_and_new_rows_come_out_as_told(replayed):
    content, by_name = replayed
    for name in ("clo 10 %, 768 tokens, batch 2", "clo 10 % on the device, 768 tokens, batch 2"):
        row = by_name[name]
        # Layer 0 is resident, so that its misses are never looked up.
        assert row["hits"] == "replayed" and row["hit_rate"] == pytest.approx(HIT_RATE, abs=0.08)
        assert row["new_rows"] == pytest.approx(NEW_ROWS, abs=0.12)
    assert by_name["full, 768 tokens, batch 2"]["hits"] == "none"
    assert content["args"]["hits"] == "replayed: hit rate 0.75, 0.3 of a set new"


def test_sequences_of_a_batch_miss_on_their_own():
    pattern = replay.given(MODEL, 0.5, 0.3)
    assert pattern.misses.mean() == pytest.approx(0.5)
    assert (pattern.misses[0] != pattern.misses[1]).any()
    counts = pattern.misses.sum(axis=(2, 3))
    assert counts.max() - counts.min() <= 1


def test_a_prefill_has_a_time_to_the_first_token(tmp_path):
    _, by_name = rows(plan(fill="prefill", contexts=(256,), steps=16), tmp_path)
    assert by_name["clo 10 %, 256 tokens"]["ttft_ms"] > 0 and by_name["clo 10 %, 256 tokens"]["fill"] == "prefill"


def test_what_does_not_fit_is_named_and_the_others_are_measured(tmp_path, monkeypatch):
    prepare = Subject.preparation

    def short_of_memory(self, load, context):
        if load["attention"] == "full":
            raise MemoryPlanError("not enough memory")
        return prepare(self, load, context)

    monkeypatch.setattr(Subject, "preparation", short_of_memory)
    content, by_name = rows(plan(contexts=(256,), steps=16), tmp_path)
    assert content["args"]["skipped"] == {"full, 256 tokens": "not enough memory"}
    assert by_name["clo 10 %, 256 tokens"]["control_name"] == "weights only"
    assert by_name["clo 10 %, 256 tokens"]["ratio_to_full"] is None
    with pytest.raises(MemoryPlanError, match="--lengths, --batches: nothing fits. not enough memory"):
        decode.run(plan((), contexts=(256,), steps=16))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"contexts": (8192,)}, "--lengths: got 8192, wanted 2 to 4096, the limit of tiny"),
        ({"contexts": (128,)}, "--lengths: got 128, wanted at least 194: 97 tokens are decoded"),
        ({"contexts": ()}, "--lengths: got none"),
        ({"batches": (0,)}, "--batches: got 0, wanted at least 1"),
        ({"steps": 20}, "--steps: got 20, wanted a positive multiple of --chunk = 16"),
        ({"chunk": 0}, "--chunk: got 0"),
        ({"fill": "air"}, "--fill: got 'air', wanted synthetic or prefill"),
    ],
)
def test_sizes_that_make_no_sense_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        plan(**changes)


def test_random_weights_are_distributed_as_a_models():
    drawn = subject.random_params(dataclasses.replace(MODEL, qkv_bias=True), "float32")
    assert jax.tree.structure(drawn) == jax.tree.structure(
        subject.models.abstract_params(dataclasses.replace(MODEL, qkv_bias=True), np.dtype("float32"))
    )
    first, second = (drawn["layers"][i]["attn"]["q"] for i in (0, 1))
    assert np.std(first["kernel"]) == pytest.approx(MODEL.hidden_size**-0.5, rel=0.1)
    assert np.std(first["bias"]) == pytest.approx(0.02, rel=0.3) and (first["kernel"] != second["kernel"]).any()


@pytest.mark.gpu
def test_decode_steps_launch_captured_graphs_only(real):
    assert jax.default_backend() == "gpu"
    calls = 3 * MODEL.num_layers  # prefetch, attend and offload, of each layer
    for row in real[0]["rows"]:
        if "attention" in row:
            assert row["kernel_launches_per_step"] < calls / 16
